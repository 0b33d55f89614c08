"""A small classifier of handwritten digits, trained on scikit-learn's data and shipped as digits.onnx."""
