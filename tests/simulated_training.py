"""Trains a model on a GPU that is not there: in the simulator's process, whose kernels Triton's interpreter runs.

found = simulated(simulator, model, batches, optimizer=SGD(lr=0.1), precision="bfloat16")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import onnxc
from onnxc.errors import OnnxcError
from tests.simulated_gpu import SimulatedGpu
from tests.triton_simulator import Interpreter, Simulator

Array = np.ndarray[Any, Any]
Batch = dict[str, Array]


@dataclass(frozen=True)
class Trained:
    """What a training came to.

    Attributes:
        losses: of each step.
        state: behind the last one.
        errors: of each step, the type of what it raised; "" where it raised nothing.
        kernels: of a step, their kinds.
    """

    losses: list[float]
    state: dict[str, Array]
    errors: list[str]
    kernels: list[str]


def train(model: bytes, batches: Sequence[Batch], loss: str, options: dict[str, Any]) -> Trained:
    """A step for each batch, on the target that the options name."""
    step = onnxc.compile_training(model, loss=loss, cache=False, **options)
    found = Trained([], {}, [], [k.kind for k in step.explain().kernels])
    for batch in batches:
        try:
            found.losses.append(float(step(**batch)[loss]))
            found.errors.append("")
        except OnnxcError as error:
            found.errors.append(type(error).__name__)
    found.state.update(step.state())
    return found


def simulated(
    simulator: Simulator, model: bytes, batches: Sequence[Batch], loss: str = "loss", **options: Any
) -> Trained:
    """The same on the simulated GPU."""
    found = simulator.call(train_here, model, batches, loss, {**options, "target": "cuda"})
    assert isinstance(found, Trained)
    return found


def train_here(
    interpreter: Interpreter, model: bytes, batches: Sequence[Batch], loss: str, options: dict[str, Any]
) -> Trained:
    """`train` with a new simulated GPU, whose kernels this interpreter runs."""
    with pytest.MonkeyPatch.context() as patch:
        SimulatedGpu(interpreter).install(patch)
        return train(model, batches, loss, options)
