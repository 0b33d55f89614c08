"""A random model as data: nodes, constants, inputs that can be drawn again at other sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tests.fuzz import shadows
from tests.fuzz.oracle import Array, Oracle, Refused, Value, onnx_type, reads, value_info

Dim = int | str
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Draw:
    """How the elements of an input are drawn.

    Attributes:
        kind: `normal`, `small` (a tenth of that), `whole` (small integers, as any dtype), `positive`, `unit` (below 1
            in magnitude), `nonzero`, `index` (of an axis of size `extent`, from its end too), `forward` (the same, from
            its start only), `count` (1 to `extent`).
    """

    kind: str = "normal"
    extent: Dim = 1

    def array(self, rng: np.random.Generator, dtype: np.dtype[Any], shape: Sequence[int], sizes: Sizes) -> Array:
        """An array of this dtype and shape."""
        return np.asarray(self._elements(rng, dtype, tuple(shape), sizes))

    def _elements(self, rng: np.random.Generator, dtype: np.dtype[Any], shape: tuple[int, ...], sizes: Sizes) -> Any:
        if dtype == np.bool_:
            return rng.random(shape) < 0.5
        if self.kind in ("index", "forward"):
            size = max(1, sizes[self.extent] if isinstance(self.extent, str) else self.extent)
            return rng.integers(-size if self.kind == "index" else 0, size, shape).astype(dtype)
        if self.kind == "count":
            return rng.integers(
                1, 1 + (sizes[self.extent] if isinstance(self.extent, str) else self.extent), shape
            ).astype(dtype)
        small = dtype.itemsize == 1 and dtype.name in ("int8", "uint8")
        low = 0 if dtype.name.startswith("uint") else -4
        if self.kind == "whole" or dtype.kind in "iu" or "int" in dtype.name:
            high = 12 if self.kind == "positive" else 5
            low = 1 if self.kind in ("positive", "nonzero") else low
            if small and self.kind == "normal":
                return rng.integers(
                    -128 if dtype.name == "int8" else 0, 128 if dtype.name == "int8" else 256, shape
                ).astype(dtype)
            return rng.integers(low, high, shape).astype(dtype)
        x = rng.standard_normal(shape)
        if self.kind == "positive":
            x = np.abs(x) + 0.25
        elif self.kind == "unit":
            x = 0.98 * np.tanh(x)
        elif self.kind == "small":
            x = 0.1 * x
        elif self.kind == "nonzero":
            x = np.where(x < 0, x - 0.5, x + 0.5)
        return x.astype(dtype)


@dataclass(frozen=True)
class Input:
    """An input of the model; its dims are sizes, or names of dynamic ones."""

    name: str
    dtype: np.dtype[Any]
    dims: tuple[Dim, ...]
    draw: Draw = Draw()


@dataclass
class Run:
    """Inputs, and what the model gives for them.

    Attributes:
        values: of every name.
        shadows: the same, rounded otherwise, several times.
    """

    inputs: dict[str, Array]
    values: dict[str, Value]
    shadows: list[dict[str, Value]]


@dataclass
class Model:
    """A model, and the inputs at the sizes that it grew with."""

    opset: int
    sizes: dict[str, int]
    inputs: list[Input] = field(default_factory=list)
    constants: dict[str, Array] = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    arrays: dict[str, Array] = field(default_factory=dict)
    seed: int = 0

    def proto(self, run: Run) -> onnx.ModelProto:
        """As ONNX. The outputs have types without shapes, taken from a run."""
        infos = [helper.make_tensor_value_info(i.name, onnx_type(i.dtype), list(i.dims)) for i in self.inputs]
        ends = [value_info(n, run.values[n], None) for n in self.outputs]
        weights = [numpy_helper.from_array(a, n) for n, a in self.constants.items()]
        graph = helper.make_graph(self.nodes, "fuzz", infos, ends, weights)
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10 if self.opset < 25 else 13
        )

    def draw(self, sizes: Sizes, seed: int) -> dict[str, Array]:
        """Inputs at other sizes."""
        rng = np.random.default_rng([self.seed, seed])
        return {
            i.name: i.draw.array(rng, i.dtype, [sizes[d] if isinstance(d, str) else d for d in i.dims], sizes)
            for i in self.inputs
        }

    def run(self, oracle: Oracle, inputs: dict[str, Array], steady: bool = True) -> Run:
        """Runs the nodes one by one. Raises Refused where they mean nothing at these sizes, or are ill-conditioned."""
        rng = np.random.default_rng([self.seed, 1])
        start: dict[str, Value] = {**self.constants, **inputs}
        run = Run(inputs, dict(start), [dict(start) for _ in range(shadows.COUNT)])
        for node in self.nodes:
            step(node, self.opset, run, self.constants, oracle, rng, steady)
        return run

    def live(self) -> Model:
        """Without what no output needs."""
        needed, nodes = set(self.outputs), []
        for node in reversed(self.nodes):
            if needed & {o for o in node.output if o}:
                nodes.append(node)
                needed.update(reads(node))
        return replace(
            self,
            nodes=nodes[::-1],
            inputs=[i for i in self.inputs if i.name in needed],
            constants={n: a for n, a in self.constants.items() if n in needed},
            arrays={n: a for n, a in self.arrays.items() if n in needed},
        )


def step(
    node: onnx.NodeProto,
    opset: int,
    run: Run,
    constants: Mapping[str, Array],
    oracle: Oracle,
    rng: np.random.Generator,
    steady: bool = True,
) -> None:
    """Runs a node on the values of a run and on its shadows, and adds the outputs. Raises Refused."""
    names = reads(node)
    ends = [o for o in node.output if o]
    outputs = oracle.run(node, opset, run.values, constants)
    inputs = [run.values[n] for n in names]
    same = all(s[n] is run.values[n] for s in run.shadows for n in names)
    noisy = shadows.rounds(node.op_type, inputs, outputs)
    others = []
    for s in run.shadows:
        found = outputs if same else oracle.run(node, opset, s, constants)
        others.append([shadows.moved(node.op_type, v, rng) for v in found] if noisy else found)
    if steady and not all(shadows.is_steady(v, [o[k] for o in others]) for k, v in enumerate(outputs)):
        raise Refused(f"{node.op_type}: ill-conditioned")
    run.values.update(zip(ends, outputs, strict=True))
    for s, found in zip(run.shadows, others, strict=True):
        s.update(zip(ends, found, strict=True))
