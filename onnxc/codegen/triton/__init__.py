"""Code generation for NVIDIA GPUs: Triton kernels from the same plan and loop IR as the C++ ones."""
