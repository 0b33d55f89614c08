"""Small programs for the runtime of a GPU, as the code generator's manifests have them.

Their kernels (`add`, `scale`, `take`, `scratched`) are Python functions in `tests/cuda_kernels.py`, and PTX in
`tests/test_cuda_gpu.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxc.runtime.compiled_model import SCHEMA
from tests.fake_cuda import cubin

F32 = np.float32
Model = tuple[dict[str, Any], dict[str, bytes]]  # manifest and sections


@dataclass(frozen=True)
class Target:
    """Where the kernels come from."""

    architecture: str = "sm_90"
    image: Callable[[str], bytes] = cubin


FAKE = Target()
WEIGHTS = np.arange(1, 5, dtype=F32)


def manifest(
    inputs: list[Any],
    outputs: list[Any],
    images: list[str],
    steps: list[Any],
    arena: Sequence[Any] = (),
    *,
    target: Target = FAKE,
) -> Model:
    """A model; `arena` has a row for each buffer: size, first, last."""
    code, rows = b"", []
    for name in images:
        extra = {"scratch": 64} if name == "scratched" else {}
        image = target.image(name)
        rows.append({"name": name, "at": len(code), "size": len(image), "shared": 0, "threads": 128, **extra})
        code += image
    symbols = sorted({d for row in inputs for d in row[2] if isinstance(d, str)})
    found = {
        "schema": SCHEMA, "onnxc": "0", "target": "cuda", "name": "m", "inputs": inputs, "outputs": outputs,
        "symbols": symbols, "dim_names": {"s0": "N"}, "equal": [], "natural": [],
        "arena": {
            "sizes": [row[0] for row in arena], "which": list(range(len(arena))),
            "first": [row[1] for row in arena], "last": [row[2] for row in arena],
        },
        "kernels": [
            {"function": n, "kind": "loops", "origins": [[k, n.title(), f"node{k}"]], "reads": 8, "writes": 4}
            for k, n in enumerate(images)
        ],
        "cuda": {"images": {target.architecture: rows}, "steps": steps},
    }  # fmt: skip
    return found, {f"cubins:{target.architecture}": code, "weights": WEIGHTS.tobytes(), "source.py": b"# kernels"}


def size(value: Any, kind: str = "i32") -> list[Any]:
    return ["size", value, kind]


def two_steps(rows: Any = "s0", target: Target = FAKE) -> Model:
    """y = (x + x) * w, of rows of four."""
    n = [[4, rows]] if isinstance(rows, str) else 4 * rows
    nbytes = [[16, rows]] if isinstance(rows, str) else 16 * rows
    x = ["input", 0, 0]
    steps = [
        {"launch": 0, "call": 0, "grid": [rows, 1, 1], "args": [x, x, ["arena", 0, 0], size(n)]},
        {
            "launch": 1, "call": 1, "grid": [rows, 1, 1],
            "args": [["arena", 0, 0], ["weights", 0, 0], ["output", 0, 0], size(rows, "i64")],
        },
    ]  # fmt: skip
    dim = "N" if isinstance(rows, str) else rows
    return manifest(
        [["x", "float32", [rows, 4], [dim, 4]]], [["y", "float32", [rows, 4], [dim, 4]]], ["add", "scale"], steps,
        [(nbytes, 0, 1)], target=target,
    )  # fmt: skip


def expected(x: np.ndarray) -> np.ndarray:
    return (x + x) * WEIGHTS


def rows(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([n, seed]).standard_normal((n, 4)).astype(F32)


def cumulative(trip: Any = "s0", target: Target = FAKE) -> Model:
    """y[t] = x[0] + ... + x[t], a state of four floats, and the last state as z."""
    state, after = ["arena", 0, 0], ["arena", 1, 0]
    steps = [
        {"fill": [state, 16]},
        {
            "loop": "t0", "trip": trip, "steps": [
                {
                    "launch": 0, "call": 0, "grid": [1, 1, 1],
                    "args": [state, ["input", 0, [[16, "t0"]]], after, size(4)],
                },
                {"copy": [["output", 0, [[16, "t0"]]], after, 16]},
                {"copy": [state, after, 16]},
            ],
        },
        {"copy": [["output", 1, 0], state, 16]},
    ]  # fmt: skip
    return manifest(
        [["x", "float32", [trip, 4], ["N", 4]]], [["y", "float32", [trip, 4], ["N", 4]], ["z", "float32", [4], [4]]],
        ["add"], steps, [(16, 0, 2), (16, 0, 2)], target=target,
    )  # fmt: skip


def sum_of_two(target: Target = FAKE) -> Model:
    step = {
        "launch": 0, "call": 0, "grid": ["s0", 1, 1],
        "args": [["input", 0, 0], ["input", 1, 0], ["output", 0, 0], size("s0")],
    }  # fmt: skip
    vector = ["float32", ["s0"], ["N"]]
    return manifest([["a", *vector], ["b", *vector]], [["c", *vector]], ["add"], [step], target=target)


def gathering(target: Target = FAKE) -> Model:
    step = {
        "launch": 0, "call": 0, "grid": ["s1", 1, 1],
        "args": [
            ["input", 0, 0], ["input", 1, 0], ["output", 0, 0], size("s0", "i64"), size("s1", "i64"), ["error"],
            size(0),
        ],
    }  # fmt: skip
    found, sections = manifest(
        [["x", "float32", ["s0", 4], ["N", 4]], ["i", "int64", ["s1"], [None]]],
        [["y", "float32", ["s1", 4], [None, 4]]], ["take"], [step], target=target,
    )  # fmt: skip
    found["kernels"][0]["origins"] = [[0, "Relu", "r"], [1, "Gather", "embed"]]
    return found, sections
