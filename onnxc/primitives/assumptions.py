"""What type rules take for granted about symbolic dims, so that a call can check it.

A type rule takes two different symbolic dims that meet (in a broadcast, a contraction, a concatenation) to be
equal, and a slice to lie inside its operand: kernels are written for that, and would read outside of a tensor
where it is not so. `assumptions` gives those conditions for each node that its types alone do not prove; a
compiled model evaluates them once for each new set of sizes, and refuses sizes that break one.

>>> from onnxc.ir import dtypes, expr
>>> from onnxc.ir.types import TensorType
>>> from onnxc.primitives.builder import Builder
>>> b = Builder()
>>> x, y = (b.input(TensorType(dtypes.float32, (expr.Sym(s),))) for s in ("n", "m"))
>>> assumptions(b.graph([b.add(x, y)])).equal
{(m, n): ((), 'add')}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from onnxc.ir.expr import Dim, always_equal, is_nonnegative, prod
from onnxc.ir.graph import Graph, Node, Pair, Place
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.contraction import attention_scores, least_room, not_one, window_size
from onnxc.primitives.indexing import scatter_depth
from onnxc.primitives.kernels import USER
from onnxc.primitives.movement import EXACT_COUNTS, slice_room
from onnxc.primitives.reduction import arg_room

WINDOWS = ("window_max", "window_sum")
Shape = tuple[Dim, ...]


@dataclass
class Assumptions:
    """Pairs of sizes that must be equal, and sizes that must not be negative, each with who wants it."""

    equal: dict[Pair, Place] = field(default_factory=dict)
    natural: dict[Dim, Place] = field(default_factory=dict)


def assumptions(graph: Graph) -> Assumptions:
    """All that the types of a graph of primitives leave to be checked, regions included."""
    found = Assumptions(dict(graph.equal))
    for node in graph.all_nodes():
        place = (node.origin, node.op)
        for a, b in _equal(node):
            if not always_equal(a, b):
                found.equal.setdefault((a, b), place)
        for d in _natural(node):
            if not is_nonnegative(d):
                found.natural.setdefault(d, place)
    return found


def with_stated(graph: Graph) -> Graph:
    """The graph that keeps what its nodes say of sizes, whatever passes make of these nodes: a reshape that has sizes
    of its operand for those that the model computes is the last to know of the latter.
    """
    stated = {pair: (node.origin, node.op) for node in graph.all_nodes() for pair in _stated(node)}
    return replace(graph, equal={**stated, **graph.equal})


def _equal(node: Node) -> Iterator[Pair]:
    """Sizes that the node's type rule takes to be equal."""
    shapes: list[Shape] = [v.shape for v in node.inputs if v is not None]
    rule = _RULES.get(node.op)
    if rule is None and lookup(node.op).kind is Kind.POINTWISE and len(shapes) > 1:
        rule = _all_broadcast
    if rule is not None:
        yield from rule(node, shapes, node.outputs[0].shape)


def _all_broadcast(node: Node, shapes: list[Shape], out: Shape) -> Iterator[Pair]:
    for shape in shapes:
        yield from _broadcast(shape, out)


def _reshape(node: Node, shapes: list[Shape], out: Shape) -> Iterator[Pair]:
    yield prod(shapes[0]), prod(out)
    yield from _stated(node)


def _product(node: Node, shapes: list[Shape], out: Shape) -> Iterator[Pair]:
    yield from _matmul(shapes[0], shapes[1], out)


def _attention(node: Node, shapes: list[Shape], out: Shape) -> Iterator[Pair]:
    q, kt, v, *bias = shapes
    yield from _scores(q, kt, bias)
    yield from _matmul(attention_scores(q, kt), v, out)


def _attention_norm(node: Node, shapes: list[Shape], out: Shape) -> Iterator[Pair]:
    q, kt, *bias = shapes
    yield from _scores(q, kt, bias)


def _attention_gradient(node: Node, shapes: list[Shape], out: Shape) -> Iterator[Pair]:
    q, kt, v, dy, norm, delta, *bias = shapes
    yield from _scores(q, kt, bias)
    yield from _matmul(attention_scores(q, kt), v, dy)
    yield from (pair for rows in (norm, delta) for pair in _broadcast(rows, dy[:-1]))


def _scores(q: Shape, kt: Shape, bias: list[Shape]) -> Iterator[Pair]:
    """The product of queries and keys, and what is added to it."""
    scores = attention_scores(q, kt)
    yield from _matmul(q, kt, scores)
    for shape in bias:
        yield from _repeat(shape, scores)


def _conv(node: Node, shapes: list[Shape], out: Shape) -> Iterator[Pair]:
    (x, w, *_), groups = shapes, node.attrs["groups"]
    yield x[1], w[1] * groups
    yield w[0], w[0] // groups * groups


def _conv_weights(node: Node, shapes: list[Shape], out: Shape) -> Iterator[Pair]:
    (x, dy), groups = shapes, node.attrs["groups"]
    yield x[0], dy[0]
    yield from ((d[1], d[1] // groups * groups) for d in (x, dy))
    keys = ("kernel", "strides", "low", "high", "dilations")
    rows = zip(dy[2:], x[2:], *(node.attrs[k] for k in keys), strict=True)
    yield from ((o, window_size(d, *row)) for o, d, *row in rows)


def _concat(node: Node, shapes: list[Shape], out: Shape) -> Iterator[Pair]:
    axis = node.attrs["axis"]
    for shape in shapes:
        yield from ((a, b) for i, (a, b) in enumerate(zip(shape, out, strict=True)) if i != axis)


def _gather_nd(node: Node, shapes: list[Shape], out: Shape) -> Iterator[Pair]:
    batch = node.attrs["batch_dims"]
    yield from zip(shapes[0][:batch], shapes[1][:batch], strict=True)


def _scatter_elements(node: Node, shapes: list[Shape], out: Shape) -> Iterator[Pair]:
    yield from zip(shapes[1], shapes[2], strict=True)


def _scatter_nd(node: Node, shapes: list[Shape], out: Shape) -> Iterator[Pair]:
    (data, index, updates), depth = shapes, scatter_depth([v.t for v in node.operands])
    yield index[-1], depth
    yield from zip((*index[:-1], *data[depth:]), updates, strict=True)


def _user(node: Node, shapes: list[Shape], out: Shape) -> Iterator[Pair]:
    yield from _stated(node)


def _stated(node: Node) -> Iterator[Pair]:
    """What the node itself says: one size after the other with that which it has to be."""
    equal = node.attrs.get("equal", ())
    yield from zip(equal[::2], equal[1::2], strict=True)


def _scan(node: Node, shapes: list[Shape], out: Shape) -> Iterator[Pair]:
    first, count = node.attrs["states"], node.attrs["scanned"]
    yield from ((shape[0], node.attrs["trip"]) for shape in shapes[first : first + count])


_RULES: dict[str, Callable[[Node, list[Shape], Shape], Iterator[Pair]]] = {  # node, its inputs' shapes, its output's
    "attention": _attention,
    "attention_gradient": _attention_gradient,
    "attention_norm": _attention_norm,
    "concat": _concat,
    "conv": _conv,
    "conv_weights": _conv_weights,
    "expand": _all_broadcast,
    "gather_nd": _gather_nd,
    "matmul": _product,
    "matmul_quantized": _product,
    "reshape": _reshape,
    "scan": _scan,
    "scatter_elements": _scatter_elements,
    "scatter_nd": _scatter_nd,
    USER: _user,
}


def _window_room(node: Node) -> Iterator[Dim]:
    """How much larger the padded input is than the window, along each axis that the window reaches over."""
    a, x = node.attrs, node.operands[0].shape
    kernel = node.operands[1].shape[2:] if node.op == "conv" else a["kernel"]
    for d, k, s, dilation, low, high in zip(
        x[-len(kernel) :], kernel, a["strides"], a["dilations"], a["low"], a["high"], strict=True
    ):
        if k != 1 or s != 1:
            room = d + low + high - (dilation * (k - 1) + 1)
            yield room - least_room(room, s, node.op in WINDOWS)


def _matmul(a: Shape, b: Shape, out: Shape) -> Iterator[Pair]:
    yield a[-1], b[-2]
    for shape in (a, b):
        yield from _broadcast(shape[:-2], out[:-2])


def _broadcast(shape: Shape, out: Shape) -> Iterator[Pair]:
    aligned = out[len(out) - len(shape) :]
    yield from ((a, b) for a, b in zip(shape, aligned, strict=True) if a != 1)


def _repeat(shape: Shape, out: Shape) -> Iterator[Pair]:
    """As `_broadcast`, but where a size is only known at run time, it may turn out to be 1."""
    aligned = out[len(out) - len(shape) :]
    pairs = zip(shape, aligned, strict=True)
    yield from ((a, not_one(a) * (b - 1) + 1) for a, b in pairs if a != 1 and not always_equal(a, b))


def _natural(node: Node) -> Iterator[Dim]:
    """Sizes that must not be negative: the output's own, and what is left on either side of a part that is read."""
    for value in node.outputs:
        yield from value.shape
    attrs = node.attrs
    if node.op == USER:
        yield from (attrs["items"], attrs["programs"], attrs["workspace"])
    if node.op in ("conv", "conv_weights", *WINDOWS):
        yield from _window_room(node)
    if node.op == "slice":
        rows = zip(node.operands[0].shape, attrs["starts"], attrs["sizes"], attrs["steps"], strict=True)
        for size, start, count, step in rows:
            yield from slice_room(size, start, count, step)
    elif node.op == "iota" and attrs["dtype"] in EXACT_COUNTS:
        yield EXACT_COUNTS[attrs["dtype"]] - attrs["size"]
    elif node.op == "pad":
        yield from (*attrs["low"], *attrs["high"])
    elif node.op in ("argmax", "argmin"):
        yield arg_room(node.operands[0].shape, attrs)
    elif node.op == "top_k":
        yield node.operands[0].shape[attrs["axis"]] - node.outputs[0].shape[attrs["axis"]]
    elif node.op in ("gather_elements", "scatter_elements"):
        data, index = (v.shape for v in node.operands[:2])
        yield from (d - n for i, (d, n) in enumerate(zip(data, index, strict=True)) if i != attrs["axis"])
