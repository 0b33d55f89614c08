"""Models on an NVIDIA GPU: through the driver alone, without torch, Triton or a compiler."""
