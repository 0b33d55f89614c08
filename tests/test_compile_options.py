"""The options of a compile: one list, read the same way wherever they are given."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

import onnxc
from onnxc.compiler.options import CompileOptions
from onnxc.errors import InputError
from onnxc.planner.groups import FusionOptions


def test_the_call_has_the_options_of_the_class() -> None:
    parameters = dict(inspect.signature(onnxc.compile).parameters)
    del parameters["model"], parameters["progress"]
    assert {n: (p.default, p.annotation) for n, p in parameters.items()} == {
        f.name: (f.default, f.type) for f in fields(CompileOptions)
    }


@pytest.mark.parametrize("fusion", [True, False, FusionOptions(chains=False)])
def test_what_a_model_of_several_programs_keeps_is_read_back(fusion: bool | FusionOptions) -> None:
    options = CompileOptions(
        target="cuda:sm_90", fusion=fusion, dtype="float16", precision="tf32", memory_limit=1 << 20
    )
    row = options.to_json()
    assert row["fusion"] == (fusion if isinstance(fusion, bool) else vars(fusion))
    assert CompileOptions.from_json(row) == options
    assert CompileOptions.from_json({**row, "of another version": 1}, threads=3).threads == 3


def test_keywords_make_the_same_options() -> None:
    options = CompileOptions(keep_inputs=["w"], base_dir="here", tuned={"a": "b"})  # type: ignore[arg-type]
    assert CompileOptions(**options.keywords()) == options
    assert options.keep_inputs == ("w",)


@pytest.mark.parametrize(
    "given",
    [
        {"mode": "fast"},
        {"accuracy": "best"},
        {"precision": "tf32"},
        {"precision": "fp16"},
        {"device": 1},
        {"device": 1, "target": "cuda", "mode": "max-autotune"},
        {"mode": "max-autotune", "tuned": False},
        {"target": None},
        {"cache": 5},
        {"threads": np.array([1, 2])},
        {"keep_inputs": np.array(3)},
        {"keep_inputs": [["x"]]},
        {"device": [1]},
        {"attention": np.array([1, 2])},
        {"integer": "no"},
        {"mode": np.array([1, 2])},
        {"precision": np.array([1, 2])},
        {"accuracy": np.array([1, 2])},
        {"keep_inputs": "x"},
        {"input_shapes": [3]},
        {"input_shapes": {"x": None}},
        {"input_shapes": {b"x": [3]}},
        {"fusion": "none"},
        {"tuned": 5},
        {"fold_bytes": "1 MB"},
        {"memory_limit": -1},
    ],
)
def test_what_is_wrong_is_said_before_anything_is_read(given: dict[str, Any]) -> None:
    for make in (CompileOptions, lambda **options: onnxc.compile("no such file.onnx", **options)):
        with pytest.raises(InputError, match=next(iter(given))):
            make(**given)


@pytest.mark.parametrize("dtype", ["float16", np.float16, np.dtype("float16")])
def test_dtypes_are_known_by_their_names(dtype: Any) -> None:
    assert CompileOptions(dtype=dtype).dtype == "float16"


def test_numbers_of_numpy_are_those_of_python() -> None:
    shapes: Any = {"x": np.array([2, 3])}
    given: Any = {"fold_bytes": np.int64(9), "memory_limit": np.int32(1 << 30)}
    numpy = CompileOptions(input_shapes=shapes, **given)
    assert numpy == CompileOptions(input_shapes={"x": [2, 3]}, fold_bytes=9, memory_limit=1 << 30)
    assert json.dumps([numpy.input_shapes, numpy.fold_bytes, numpy.memory_limit])
