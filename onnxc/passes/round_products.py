"""Which products are numbers of their own, and which may be joined with the sum that they go into.

Compilers join a product and the sum that it goes into, in one instruction that does not round the product. That is
nearer to the truth, and a number other than the product is elsewhere: `x * c` less the greatest of such is then not 0
where it is the greatest, but its rounding error, which may be huge; and the root of `b * b - 4 * a * c` is NaN where it
should be 0. So that models can rely on what is equal being equal, a product may be joined only with an addition that is
all its use, and not with another product. All others are marked here with the attribute `rounded`, and kernels of every
target keep to it: what a product is does not depend on which kernels compute it.
"""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum

import numpy as np

from onnxc.ir.graph import Graph, Node, Value, copied
from onnxc.primitives.builder import constant_of
from onnxc.primitives.movement import VIEWS

PRODUCTS = frozenset({"mul", "pow"})
MOVED = frozenset({*VIEWS, "copy", "cast", "pad", "concat", "gather", "gather_elements"})  # the numbers themselves
# No sum joins a product through these.
CHOSEN = frozenset({"max", "min", "where", "abs", "sign", "floor", "ceil", "round"})
SUMS = frozenset({"reduce_sum", "window_sum", "cumsum"})


class Use(IntEnum):
    """What becomes of a value's products."""

    APART = 0  # they meet no sum
    JOINED = 1  # one sum, which may take them unrounded
    ROUNDED = 2  # they have to be the same wherever they are computed


def round_products(graph: Graph) -> Graph:
    """The graph with products marked that must be rounded; regions too."""
    return _marked(copied(graph)) if _has_any(graph) else graph


def _has_any(graph: Graph) -> bool:
    found = _Uses(graph)
    return any(found.is_rounded(node) or any(map(_has_any, node.regions)) for node in graph.nodes)


def _marked(graph: Graph) -> Graph:
    """The same of a graph that nothing else has: its nodes are taken over."""
    found = _Uses(graph)
    marks = [{"rounded": True} if found.is_rounded(node) else {} for node in graph.nodes]
    nodes = [
        Node(n.op, n.inputs, n.outputs, {**n.attrs, **mark}, [_marked(g) for g in n.regions], n.origin)
        if mark or n.regions
        else n
        for n, mark in zip(graph.nodes, marks, strict=True)
    ]
    return replace(graph, nodes=nodes)


class _Uses:
    """What becomes of the products that the values of a graph end in."""

    def __init__(self, graph: Graph) -> None:
        self._users = graph.uses()
        self._outputs = {v.id for v in graph.outputs}
        self._products: set[int] = set()  # values of which a sum could be joined with a product
        for node in graph.nodes:
            moved = node.op in MOVED or node.op == "neg"
            if _is_product(node) or (moved and any(v.id in self._products for v in node.operands)):
                self._products.add(node.output.id)
        self._found: dict[int, Use] = {}
        for node in reversed(graph.nodes):
            for v in node.outputs:
                self._found[v.id] = self._combined(v)

    def is_rounded(self, node: Node) -> bool:
        """Whether a node makes a product that has to be rounded."""
        return _is_product(node) and self._found[node.output.id] is Use.ROUNDED

    def _combined(self, value: Value) -> Use:
        users = self._users.get(value.id, ())
        uses = [self._by(node, value) for node in users]
        if Use.JOINED not in uses:
            return max(uses, default=Use.APART)
        times = sum(v is value for node in users for v in node.operands) + (value.id in self._outputs)
        return Use.JOINED if times == 1 else Use.ROUNDED

    def _by(self, user: Node, value: Value) -> Use:
        if user.op == "sub":
            return Use.ROUNDED
        if user.op == "add":
            other = user.operands[user.operands[0] is value]
            joined = other.id not in self._products and self._found[user.output.id] is not Use.ROUNDED
            return Use.JOINED if joined else Use.ROUNDED
        if user.op in SUMS:
            return Use.ROUNDED if self._found[user.outputs[0].id] is Use.ROUNDED else Use.JOINED
        if user.op in MOVED and user.operands[0].dtype.is_float:
            return self._found[user.output.id]
        if user.op == "neg":
            return Use.ROUNDED if self._found[user.output.id] else Use.APART
        if user.op in CHOSEN:
            return Use.ROUNDED if self._found[user.output.id] is Use.ROUNDED else Use.APART
        return Use.APART


def _is_product(node: Node) -> bool:
    """Whether a node multiplies, and may round: not where it doubles and halves."""
    if node.op not in PRODUCTS or not node.output.dtype.is_float:
        return False
    return not any(_is_power_of_two(constant_of(v)) for v in node.operands if node.op == "mul")


def _is_power_of_two(factor: np.ndarray | None) -> bool:
    """Of a constant."""
    if factor is None or factor.size != 1:
        return False
    mantissa, _ = np.frexp(factor.astype(np.float64).reshape(()))
    return bool(abs(mantissa) == 0.5)
