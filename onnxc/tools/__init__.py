"""Tools around the compiler: inputs, comparison with onnxruntime, benchmarks. Only these import onnxruntime."""
