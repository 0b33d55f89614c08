"""Values that are one number everywhere, whatever their size: masks of attention that hide nothing, as exporters leave
them in models of open sizes. (Of known sizes they are constants, which `fold-constants` makes.)

    where(0 <= iota(n), 0.0, -inf)    becomes    expand(0.0)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxc.errors import OnnxcError
from onnxc.ir import dtypes
from onnxc.ir.graph import Graph, Node, Value
from onnxc.passes.simplify import Rewriter
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import Builder, constant_of

LARGE = 1 << 62  # numbers that are made of positions, from which on they might not fit in 64 bits
POSITIONS = 1 << 42  # more than any tensor has
MOST = 1 << 12  # elements of a constant that are compared
MOVES = ("reshape", "transpose", "expand", "slice")


def number_of(v: Value | None) -> np.ndarray | None:
    """The number, of rank 0, that a constant has everywhere, or a view of one; None where it has several, or none."""
    while v is not None and v.node is not None and v.node.op in MOVES:
        (v,) = v.node.operands
    x = constant_of(v)
    if x is None or not 0 < x.size <= MOST or x.dtype == object:
        return None
    first = np.array(x.flat[0], x.dtype)
    return first if x.tobytes() == first.tobytes() * x.size else None


def fold_uniform(graph: Graph) -> Graph:
    """The graph with the values of open sizes that are one number everywhere made of it."""
    r, known = Rewriter(graph), _Known()
    for node in graph.nodes:
        known.see(node)
        new = None if all(isinstance(d, int) for v in node.outputs for d in v.shape) else _made(node, known, r)
        if new is None:
            r.keep(node)
        else:
            r.replace(node.output, new)
    return r.result()


def _made(node: Node, known: _Known, r: Rewriter) -> Value | None:
    """What stands for a node's result, if it is simpler."""
    if len(node.outputs) != 1 or node.op in (*MOVES, "constant"):
        return None
    number, b = known.numbers.get(node.output.id), Builder()
    with b.from_origin(node.origin):
        if number is not None:
            new = b.expand(b.constant(number), node.output.shape)
        elif node.op == "where" and (which := known.numbers.get(node.operands[0].id)) is not None:
            taken = r.value(node.operands[1 if which else 2])
            assert taken is not None
            new = b.expand(taken, node.output.shape)
        else:
            return None
    r.nodes += b.nodes
    return new


class _Known:
    """What is known of the values of a graph: numbers of those that are uniform, and the bounds of int64 elements."""

    def __init__(self) -> None:
        self.numbers: dict[int, np.ndarray] = {}
        self.bounds: dict[int, tuple[int, int]] = {}

    def see(self, node: Node) -> None:
        """Learns of a node's result."""
        if len(node.outputs) != 1 or node.output.dtype is dtypes.string:
            return
        number = self._number(node)
        if number is not None:
            self.numbers[node.output.id] = number
            if node.output.dtype is dtypes.int64:
                self.bounds[node.output.id] = int(number), int(number)
        elif (found := self._bounds(node)) is not None and max(map(abs, found)) < LARGE:
            self.bounds[node.output.id] = found

    def _number(self, node: Node) -> np.ndarray | None:
        if node.op == "constant":
            return number_of(node.output)
        found = [self.numbers.get(v.id) for v in node.operands]
        if node.op in MOVES:
            return found[0]
        if node.op == "where" and found[0] is not None:
            return found[1 if found[0] else 2]
        if node.op in ("lt", "le", "eq"):
            holds = self._holds(node.op, *(v.id for v in node.operands))
            if holds is not None:
                return np.array(holds)
        return self._evaluated(node, [x for x in found if x is not None])

    @staticmethod
    def _evaluated(node: Node, numbers: Sequence[np.ndarray]) -> np.ndarray | None:
        primitive = lookup(node.op)
        if primitive.kind is not Kind.POINTWISE or primitive.evaluate is None:
            return None
        if not numbers or len(numbers) != len(node.inputs):
            return None
        try:
            with np.errstate(all="ignore"):
                result = np.asarray(primitive.evaluate(*numbers, **node.attrs))
        except (OnnxcError, IndexError):  # a division by zero, which a run is to report
            return None
        return result.astype(node.output.dtype.numpy) if result.ndim == 0 else None

    def _bounds(self, node: Node) -> tuple[int, int] | None:
        """The least and the greatest that int64 elements are."""
        if node.op == "iota":
            return (0, POSITIONS) if node.attrs["dtype"] is dtypes.int64 else None
        if node.output.dtype is not dtypes.int64:
            return None
        found = [self.bounds.get(v.id) for v in node.operands]
        if node.op in MOVES or (node.op == "cast" and node.operands[0].dtype is dtypes.int64):
            return found[0]
        if node.op not in ("add", "mul") or found[0] is None or found[1] is None:
            return None
        ends = [a + b if node.op == "add" else a * b for a in found[0] for b in found[1]]
        return min(ends), max(ends)

    def _holds(self, op: str, a: int, b: int) -> bool | None:
        """Whether a comparison of two values always holds, or never; None where that is not known."""
        if a not in self.bounds or b not in self.bounds:
            return None
        (low, high), (least, most) = self.bounds[a], self.bounds[b]
        if high < least or (high == least and op == "le"):
            return op != "eq"
        if low > most or (low == most and op == "lt"):
            return False
        return None
