"""Pointwise ops between a reshape and the one that undoes it are done in the shape before.

PyTorch writes a group normalization so: [N, C, H, W] as [N, G, C / G * H * W], its mean taken away there, and back. The
shape between says nothing of channels and pixels. What reads the result at a pixel's neighbours, as a pool does, would
find each element's place by divisions, and the tensor has an order in memory of its own. Here the mean is spread over
the channels of its group, which are few numbers, and the image stays an image; reductions read it through the reshape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnxc.ir.expr import Dim, always_equal, floordiv
from onnxc.ir.graph import Graph, Node, Value
from onnxc.ir.types import same_shape
from onnxc.passes.simplify import Rewriter
from onnxc.passes.uniform import number_of
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import Builder

LEAST_RANK = 3  # of the shape before: an image's, or a line's

Wanted = dict[int, set[tuple[Dim, ...]]]  # the shapes that a value, or what pointwise ops make of it, is reshaped to


@dataclass(frozen=True)
class Piece:
    """A dim of the shape that both shapes are made of, by joining neighbours: its size, and its axis in either."""

    size: Dim
    before: int
    after: int


def sink_reshapes(graph: Graph) -> Graph:
    """The graph with reshapes moved behind the pointwise ops that follow them, up to where they are undone."""
    undone = _undone(graph)
    if not undone:
        return graph
    r = Rewriter(graph)
    whole: dict[int, Value] = {}  # a value of the old graph -> its elements in the shape before, in the new graph
    for node in graph.nodes:
        made = _in_shape_before(r, node, whole, undone) if len(node.outputs) == 1 else None
        if made is None:
            r.keep(node)
            x = node.operands[0] if node.op == "reshape" else None
            if x is not None and x.rank >= LEAST_RANK and x.shape in undone.get(node.output.id, ()):
                source = r.value(x)
                assert source is not None
                whole[node.output.id] = source
        elif node.op == "reshape":
            r.replace(node.output, made)
        else:
            whole[node.output.id] = made
            b = Builder()
            with b.from_origin(node.origin):
                r.replace(node.output, b.reshape(made, node.output.shape))
            r.nodes += b.nodes
    return r.result()


def _undone(graph: Graph) -> Wanted:
    found: Wanted = {}
    for node in reversed(graph.nodes):
        if node.op == "reshape":
            found.setdefault(node.operands[0].id, set()).add(node.output.shape)
        elif lookup(node.op).kind is Kind.POINTWISE and (shapes := found.get(node.output.id)):
            for v in node.operands:
                if same_shape(v.shape, node.output.shape):
                    found.setdefault(v.id, set()).update(shapes)
    return found


def _in_shape_before(r: Rewriter, node: Node, whole: dict[int, Value], undone: Wanted) -> Value | None:
    """What a node makes, in the shape before the reshape; None where it has to stay as it is."""
    if node.op == "reshape":
        before = whole.get(node.operands[0].id)
        return before if before is not None and same_shape(before.shape, node.output.shape) else None
    sources = [whole[v.id] for v in node.operands if v.id in whole]
    if lookup(node.op).kind is not Kind.POINTWISE or not sources:
        return None
    shape = sources[0].shape
    if shape not in undone.get(node.output.id, ()) or not all(same_shape(v.shape, shape) for v in sources):
        return None
    pieces = _pieces(shape, node.output.shape)
    if pieces is None:
        return None
    b = Builder()
    with b.from_origin(node.origin):
        operands = [
            whole.get(v.id) or _spread(b, r.value(v) or v, pieces, shape, node.output.shape) for v in node.operands
        ]
        if any(v is None for v in operands):
            return None
        made = b.one(node.op, *(v for v in operands if v is not None), **node.attrs)
    if not same_shape(made.shape, shape):
        return None
    r.nodes += b.nodes
    return made


def _pieces(before: Sequence[Dim], after: Sequence[Dim]) -> list[Piece] | None:
    """The pieces of two shapes of the same elements, without those of one element; None where they are not known."""
    found: list[Piece] = []
    i = j = 0
    a: Dim = before[0] if before else 1
    b: Dim = after[0] if after else 1
    while True:
        while a == 1 and i + 1 < len(before):
            i, a = i + 1, before[i + 1]
        while b == 1 and j + 1 < len(after):
            j, b = j + 1, after[j + 1]
        if a == 1 or b == 1:
            return found if a == b else None
        size = _common(a, b)
        if size is None:
            return None
        found.append(Piece(size, i, j))
        a, b = floordiv(a, size), floordiv(b, size)


def _common(a: Dim, b: Dim) -> Dim | None:
    """The one of two sizes that divides the other; None of no elements, which make no pieces."""
    if a == 0 or b == 0:
        return None
    if always_equal(a, b):
        return a
    return next((by for by, d in ((a, b), (b, a)) if always_equal(by * floordiv(d, by), d)), None)


def _spread(b: Builder, v: Value, pieces: Sequence[Piece], before: Sequence[Dim], after: Sequence[Dim]) -> Value | None:
    """An operand that broadcasts to the shape after, as one that broadcasts to the shape before: with its numbers along
    an axis repeated where it has one for several neighbours. None where that would not be so, or along the last axis,
    whose elements lie side by side.
    """
    if all(d == 1 for d in v.shape):
        return v if v.rank == 0 else b.reshape(v, ())
    if (same := number_of(v)) is not None:
        return b.constant(same)
    own = (*(1,) * (len(after) - v.rank), *v.shape)
    full = [own[p.after] != 1 for p in pieces]
    apart: list[Dim] = [p.size if f else 1 for p, f in zip(pieces, full, strict=True)]
    repeated, shape = list(apart), []
    for axis in range(len(before)):
        at = [k for k, p in enumerate(pieces) if p.before == axis]
        some = [full[k] for k in at]
        if any(some) and not all(some):
            if sorted(some, reverse=True) != some or axis == len(before) - 1 or not isinstance(before[axis], int):
                return None
            for k in at:
                repeated[k] = pieces[k].size
        shape.append(before[axis] if any(some) else 1)
    return b.reshape(b.expand(b.reshape(v, apart), repeated), shape)
