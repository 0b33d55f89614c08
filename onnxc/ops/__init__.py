"""ONNX operators, each defined in one place as a composite of primitives. `registry` says how to add one."""
