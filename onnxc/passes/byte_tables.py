"""Functions of one byte become tables.

Quantized models compute their activations between two quantizers: bytes are dequantized, SiLU is computed in floats,
quantized half way, and quantized again. Each byte of the result follows from one byte, so that there are 256 results.
They are computed here, by what the primitives mean to numpy, and a kernel looks them up.

Before: quantizers are `quantize` primitives, constants are folded. After: the same bytes, but where a float is so near
to the middle of two that the last bit of a function decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import always_equal
from onnxc.ir.graph import UPDATES, Graph, Node, Value, merge_origins
from onnxc.passes.simplify import Rewriter
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import Builder, constant_of

BYTES = (dtypes.uint8, dtypes.int8)
COMPUTED = frozenset({
    dtypes.boolean, dtypes.float32, dtypes.float64, *(dtypes.BY_NAME[f"{kind}{bits}"] for kind in ("int", "uint")
    for bits in (8, 16, 32, 64)),
})  # fmt: skip
# Instructions for a vector of numbers, roughly; what is not named takes one.
COSTS = {
    "quantize": 8, "exp": 14, "log": 16, "sqrt": 6, "div": 6, "tanh": 20, "erf": 20, "sin": 20, "cos": 20, "pow": 40,
    "tan": 100, "asin": 100, "acos": 100, "atan": 100, "sinh": 100, "cosh": 100, "asinh": 100, "acosh": 100,
    "atanh": 100,
}  # fmt: skip
ELEMENTS = 512  # of fewer nothing is gained
MOST_NODES = 64
FAILING = frozenset({"div", "mod", "fmod"})  # kernels report a division of integers by zero


@dataclass(frozen=True)
class Function:
    """What a value is of the bytes of another one, each element of the one at its place: the nodes between them."""

    root: Value
    steps: frozenset[Node]

    def cost(self, table: int) -> int:
        """Instructions for a vector, where a table takes so many."""
        return sum(table if n.op == "byte_table" else COSTS.get(n.op, 1) for n in self.steps)


def tabulate_bytes(graph: Graph, table: int) -> Graph:
    """The graph with `byte_table` for what computes bytes from bytes and takes more instructions than a table. Training
    steps are left alone, which have the same bits with and without each fusion.
    """
    return graph if graph.metadata.get(UPDATES) else _Pass(graph, table).run()


class _Pass:
    def __init__(self, graph: Graph, table: int) -> None:
        self.table = table
        self.r = Rewriter(graph)
        self.b = Builder()
        self.b.nodes = self.r.nodes
        self.functions: dict[int, Function] = {}  # by id of the value, in the new graph
        self.numbers: dict[int, np.ndarray | None] = {}  # its results for the bytes 0 to 255

    def run(self) -> Graph:
        for node in self.r.graph.nodes:
            if node.regions:
                regions = [tabulate_bytes(g, self.table) for g in node.regions]
                node = Node(node.op, node.inputs, node.outputs, node.attrs, regions, node.origin)
            kept = self.r.keep(node)
            function = self._function(kept)
            if function is None:
                continue
            self.functions[kept.output.id] = function
            if self._pays(kept.output, function) and (numbers := self._numbers(kept.output)) is not None:
                self.r.replace(node.output, self._table(function, numbers, kept.output.dtype))
        return self.r.result()

    def _table(self, function: Function, numbers: np.ndarray, to: DType) -> Value:
        """The table, which is a step of the same function: what follows from it may become a table in its place."""
        with self.b.from_origin(merge_origins(n.origin for n in function.steps)):
            found = self.b.one("byte_table", function.root, numbers=tuple(numbers.tolist()), to=to)
        assert found.node is not None
        self.functions[found.id] = Function(function.root, frozenset({found.node}))
        return found

    def _function(self, node: Node) -> Function | None:
        """What the node's output is of one value's bytes; None where it is more than that."""
        if lookup(node.op).kind is not Kind.POINTWISE or lookup(node.op).evaluate is None or len(node.outputs) != 1:
            return None
        if node.output.dtype not in COMPUTED or (node.op in FAILING and not node.output.dtype.is_float):
            return None
        root, steps = None, {node}
        for x in node.operands:
            constant = constant_of(x)
            if constant is not None and constant.size == 1:
                continue
            function = self.functions.get(x.id) or (Function(x, frozenset()) if x.dtype in BYTES else None)
            if function is None or root not in (None, function.root):
                return None
            root = function.root
            steps |= function.steps
        if root is None or len(steps) > MOST_NODES or node.output.rank != root.rank:
            return None
        same = all(always_equal(a, b) for a, b in zip(node.output.shape, root.shape, strict=True))
        return Function(root, frozenset(steps)) if same else None

    def _pays(self, output: Value, function: Function) -> bool:
        size = output.t.size
        large = not isinstance(size, int) or size >= ELEMENTS
        return output.dtype in BYTES and large and function.cost(self.table) > self.table

    def _numbers(self, v: Value) -> np.ndarray | None:
        """The results of a function, in the order of its root's bytes; None where numpy may not say what kernels do."""
        if v.id not in self.numbers:
            self.numbers[v.id] = self._computed(v)
        return self.numbers[v.id]

    def _computed(self, v: Value) -> np.ndarray | None:
        if v.id not in self.functions:
            every: np.ndarray = np.arange(256, dtype=np.uint8).view(v.dtype.numpy)
            return every
        node = v.node
        assert node is not None
        arrays = []
        for x in node.operands:
            constant = constant_of(x)
            array = self._numbers(x) if constant is None else constant.reshape(())
            if array is None:
                return None
            arrays.append(array)
        if node.op == "cast" and arrays[0].dtype.kind == "f" and not v.dtype.is_float:
            least, greatest = v.dtype.limits if v.dtype.is_integer else (0, 0)
            if not (np.isfinite(arrays[0]) & (arrays[0] >= least) & (arrays[0] <= greatest)).all():
                return None
        return np.asarray(lookup(node.op).evaluate(*arrays, **node.attrs))  # type: ignore[misc]
