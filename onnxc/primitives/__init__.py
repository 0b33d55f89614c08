"""The canonical op set that everything else is a composite of.

Each primitive is defined once: its type rule, its numpy meaning (for constant folding, for sizes known as symbolic
expressions, and as a reference in tests) and its ONNX spelling.
"""
