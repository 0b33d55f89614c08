"""Tools around the compiler: inputs, comparison with onnxruntime, benchmarks."""
