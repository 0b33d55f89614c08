"""All steps, and the model of a seed."""

from __future__ import annotations

from tests.fuzz import control, kernels, movement, patterns, pointwise, quantized, reductions
from tests.fuzz.grow import grow
from tests.fuzz.model import Model
from tests.fuzz.oracle import Oracle
from tests.fuzz.steps import STEPS

MODULES = (pointwise, movement, reductions, kernels, quantized, patterns, control)  # each adds its steps


def model_of(seed: int, oracle: Oracle, opset: int | None = None) -> Model:
    """The model of a seed: always the same, with the same versions of onnx and onnxruntime."""
    return grow(seed, oracle, STEPS, opset)
