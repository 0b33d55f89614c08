"""Functions of one byte become tables.

Quantized models compute their activations between two quantizers: bytes are dequantized, SiLU is computed in floats,
quantized half way, and quantized again. Each byte of the result follows from one byte, so that there are 256 results.
They are computed here, by what the primitives mean to numpy, and a kernel looks them up.

Before: quantizers are `quantize` primitives, constants are folded. After: the same bytes, but where the last bit of a
float decides (near the middle between two integers, in a comparison).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxc.ir import dtypes
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
    "mod": 20, "fmod": 20, "tan": 100, "asin": 100, "acos": 100, "atan": 100, "sinh": 100, "cosh": 100, "asinh": 100,
    "acosh": 100, "atanh": 100,
}  # fmt: skip
ELEMENTS = 512  # of fewer nothing is gained
MOST_NODES = 64
FAILING = frozenset({"div", "mod", "fmod"})  # kernels report a division of integers by zero


@dataclass(frozen=True)
class Function:
    """What a value is of the bytes of another one, each element of the one at its place: the nodes between them."""

    root: Value
    steps: frozenset[Node]


def tabulate_bytes(graph: Graph, table: int) -> Graph:
    """The graph with `byte_table` for what computes bytes from bytes and takes more instructions than a table. Training
    steps are left alone, which have the same bits with and without each fusion.
    """
    return graph if graph.metadata.get(UPDATES) else _Pass(graph, table).run()


class _Pass:
    def __init__(self, graph: Graph, table: int) -> None:
        self.graph, self.table = graph, table
        self.uses = graph.uses()
        self.outputs = {v.id for v in graph.outputs}
        self.functions: dict[int, Function] = {}  # by id of the value
        self.numbers: dict[int, np.ndarray | None] = {}  # its results for the bytes 0 to 255

    def run(self) -> Graph:
        r, b = Rewriter(self.graph), Builder()
        b.nodes = r.nodes
        for node in self.graph.nodes:
            function = self._function(node)
            if function is not None:
                self.functions[node.output.id] = function
                if self._pays(node, function) and (numbers := self._numbers(node.output)) is not None:
                    root = r.value(function.root)
                    assert root is not None
                    with b.from_origin(merge_origins(n.origin for n in function.steps)):
                        table = b.one("byte_table", root, numbers=tuple(numbers.tolist()), to=node.output.dtype)
                    r.replace(node.output, table)
                    continue
            if node.regions:
                regions = [tabulate_bytes(g, self.table) for g in node.regions]
                node = Node(node.op, node.inputs, node.outputs, node.attrs, regions, node.origin)
            r.keep(node)
        return r.result()

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
            if constant is not None or function is None or root not in (None, function.root):
                return None
            root = function.root
            steps |= function.steps
        if root is None or len(steps) > MOST_NODES or node.output.rank != root.rank:
            return None
        same = all(always_equal(a, b) for a, b in zip(node.output.shape, root.shape, strict=True))
        return Function(root, frozenset(steps)) if same else None

    def _pays(self, node: Node, function: Function) -> bool:
        size = node.output.t.size
        large = not isinstance(size, int) or size >= ELEMENTS
        return node.output.dtype in BYTES and large and self._cost(node, function) > self.table

    def _cost(self, node: Node, function: Function) -> int:
        """Instructions for a vector of a node's output, from its root or from bytes between that are needed anyway."""
        pending, seen = [node], {node}
        while pending:
            for x in pending.pop().operands:
                if x.node in function.steps and x.node not in seen and not self._is_needed(x, function):
                    seen.add(x.node)
                    pending.append(x.node)
        return sum(COSTS.get(n.op, 1) for n in seen)

    def _is_needed(self, x: Value, function: Function) -> bool:
        others = (n for n in self.uses.get(x.id, ()) if n not in function.steps)
        return x.dtype in BYTES and (x.id in self.outputs or next(others, None) is not None)

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
        if node.op == "cast" and arrays[0].dtype.kind == "f" and v.dtype.is_integer:
            least, greatest = v.dtype.limits
            if not ((arrays[0] >= least) & (arrays[0] < greatest + 1)).all():  # what of others is the platform's choice
                return None
        return np.asarray(lookup(node.op).evaluate(*arrays, **node.attrs), v.dtype.numpy)  # type: ignore[misc]
