"""Small models, written as text, and onnxruntime's answers to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import onnxruntime as ort

Array = np.ndarray[Any, Any]


def parse(text: str, opset: int = 18) -> onnx.ModelProto:
    """A model from ``(float[N] x) => (float[N] y) { y = Relu(x) }``."""
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> g {text}')


def reference(model: onnx.ModelProto, *inputs: Array) -> list[Array]:
    """What onnxruntime gives, with its optimizations off."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: list[Array] = session.run(None, {i.name: x for i, x in zip(session.get_inputs(), inputs, strict=True)})
    return found


def floats(*shape: int, seed: int = 0) -> Array:
    """Normal numbers."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)
