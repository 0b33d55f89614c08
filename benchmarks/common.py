"""What the benchmarks share: marks, the machine's description, small models, private caches."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from models.zoo import store
from onnxc.runtime.cpu import available_cpus, best_level, cache_bytes, model_name
from onnxc.runtime.peaks import machine_peaks
from onnxc.runtime.toolchain import find_compiler

THREADS = 2
PROFILE_RUNS = 20
INDUCTOR = Path(__file__).parent / "inductor.json"


@dataclass(frozen=True)
class Mark:
    """A figure with the limit that it should stay at or under; or, with `at_least`, reach."""

    name: str
    value: float
    limit: float
    unit: str = ""
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "met": self.met}


@dataclass
class Outcome:
    """What a benchmark found: a table for people, all data for programs, and marks."""

    title: str
    headings: list[str]
    rows: list[list[str]] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """The table, with the notes under it."""
        lines = [
            f"## {self.title}",
            "",
            _row(self.headings),
            _row(["---"] * len(self.headings)),
            *map(_row, self.rows),
        ]
        return "\n".join([*lines, *(["", *self.notes] if self.notes else [])])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(c.replace('|', '/') for c in cells)} |"


def machine() -> dict[str, Any]:
    """Where figures were taken: processor, caches, compiler, versions."""
    packages = ("onnxc", "onnxruntime", "openvino", "onnx", "numpy", "networkx", "torch")
    peaks = machine_peaks(THREADS)
    return {
        "cpu": model_name(),
        "cpus": available_cpus(),
        "level": best_level(),
        "caches": [cache_bytes(k) for k in (1, 2, 3)],
        "load_before": round(os.getloadavg()[0], 2),  # near 0 where figures mean something
        "system": platform.platform(),
        "python": platform.python_version(),
        "compiler": find_compiler().version,
        "threads": THREADS,
        "peaks": peaks.to_dict(),
        "packages": {name: found for name in packages if (found := _version(name))},
    }


def peers() -> list[str]:
    """The engines to compare with: OpenVINO only where it is installed."""
    return ["onnxruntime", *(["openvino"] if find_spec("openvino") else [])]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@contextmanager
def private_cache() -> Iterator[dict[str, str]]:
    """An empty cache for worker processes, as their environment."""
    with tempfile.TemporaryDirectory(prefix="onnxc-bench-cache-") as folder:
        os.chmod(folder, 0o700)
        yield {"ONNXC_CACHE": folder}


def zoo(name: str) -> store.ZooModel:
    """A model of the zoo, exported first if it is missing."""
    return store.find(name) or store.ensure(name)


def one_op(op: str = "Relu", shape: tuple[int, ...] = (4,)) -> onnx.ModelProto:
    """A model of one unary node."""
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"])], "one_op", [_info("x", shape)], [_info("y", shape)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def fusable() -> onnx.ModelProto:
    """``y = x @ W; y + 1; relu; * 0.5; sum``: one template and one fused kernel."""
    weight = np.random.default_rng(0).standard_normal((64, 32), np.float32)
    constants = [("W", weight), ("one", np.float32(1)), ("half", np.float32(0.5))]
    nodes = [
        helper.make_node("MatMul", ["x", "W"], ["a"]),
        helper.make_node("Add", ["a", "one"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("Mul", ["c", "half"], ["d"]),
        helper.make_node("ReduceSum", ["d"], ["y"], keepdims=0),
    ]
    initializers = [numpy_helper.from_array(np.asarray(a), name) for name, a in constants]
    graph = helper.make_graph(nodes, "fusable", [_info("x", (128, 64))], [_info("y", ())], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def _info(name: str, shape: tuple[int, ...]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


@contextmanager
def stored(model: onnx.ModelProto) -> Iterator[str]:
    """The model in a temporary file."""
    with tempfile.TemporaryDirectory(prefix="onnxc-bench-model-") as folder:
        path = os.path.join(folder, "model.onnx")
        onnx.save(model, path)
        yield path
