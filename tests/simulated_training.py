"""Trains a model on a GPU that is not there: in a process of its own, whose kernels Triton's interpreter runs.

losses, parameters = trained(model, batches, optimizer=SGD(lr=0.1), precision="bfloat16")
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Batch = dict[str, Array]
ROOT = Path(__file__).resolve().parents[1]


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
    import onnxc
    from onnxc.errors import OnnxcError

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


def simulated(model: bytes, batches: Sequence[Batch], loss: str = "loss", **options: Any) -> Trained:
    """The same on the simulated GPU."""
    return _elsewhere(train, model, batches, loss, {**options, "target": "cuda"})


def _elsewhere(function: Callable[..., Any], *arguments: Any) -> Any:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    found = subprocess.run(
        [sys.executable, "-m", "tests.simulated_training"], input=pickle.dumps((function.__name__, arguments)),
        capture_output=True, cwd=ROOT, env=environment, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr.decode()[-4000:]
    return pickle.loads(found.stdout)


def main() -> None:
    """Answers one request on standard input."""
    import pytest

    from tests import simulated_training
    from tests.simulated_gpu import SimulatedGpu

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not get into the answer
    name, arguments = pickle.load(sys.stdin.buffer)
    with pytest.MonkeyPatch.context() as patch:
        SimulatedGpu().install(patch)
        found = getattr(simulated_training, name)(*arguments)
    with answers:
        answers.write(pickle.dumps(found))


if __name__ == "__main__":
    main()
