"""All steps, and the model of a seed."""

from __future__ import annotations

import random

from tests.fuzz import control, kernels, movement, patterns, pointwise, quantized, reductions
from tests.fuzz.grow import grow
from tests.fuzz.model import Model
from tests.fuzz.networks import BLOCKS
from tests.fuzz.oracle import Oracle
from tests.fuzz.steps import STEPS, Step

MODULES = (pointwise, movement, reductions, kernels, quantized, patterns, control)  # each adds its steps
NETWORKS = 4  # one model of so many is made of blocks of networks, and a few steps


def model_of(seed: int, oracle: Oracle, opset: int | None = None) -> Model:
    """The model of a seed: always the same, with the same versions of onnx and onnxruntime."""
    return grow(seed, oracle, steps_of(seed), opset)


def steps_of(seed: int) -> list[tuple[int, Step]]:
    """What the model of a seed is grown from, with weights."""
    if seed % NETWORKS != NETWORKS - 1:
        return STEPS
    return [*((6 * w, take) for w, take in BLOCKS), *random.Random(f"blocks {seed}").sample(STEPS, 6)]
