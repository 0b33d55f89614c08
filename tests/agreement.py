"""The rule of agreement, as tests ask for it: `assert_agrees(path, inputs, compiled)`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxc.runtime.compiled_model import CompiledModel
from onnxc.tools.compare import compare

Array = np.ndarray[Any, Any]
Inputs = Mapping[str, Array]


def assert_agrees(model: Path | onnx.ModelProto, inputs: Inputs, compiled: CompiledModel) -> None:
    """Fails with the table of errors where an output is not onnxruntime's (see `onnxc.tools.compare`)."""
    result = compare(model, inputs, compiled=compiled)
    shapes = {name: list(a.shape) for name, a in inputs.items()}
    assert result.agree, f"with inputs {shapes}:\n{result}"


def assert_repeats(compiled: CompiledModel, inputs: Inputs) -> None:
    """Every run gives the same bits, with one thread as with two."""
    first: dict[str, Array] | None = None
    for threads in (2, 1, 2, 1):
        compiled.threads = threads
        outputs = {name: np.asarray(a) for name, a in compiled(**inputs).items()}
        first = first or outputs
        for name, a in outputs.items():
            same = a.dtype == first[name].dtype and a.tobytes() == first[name].tobytes()
            assert same, f"{name} is not the same in each run (the last one with {threads} threads)"
