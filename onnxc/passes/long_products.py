"""Products of a training step on a GPU: long sums in parts, and weights converted before they are turned.

The gradient of a weight is a small matrix whose elements are long sums, over all tokens of a batch: it has too few
tiles for a GPU; so has the gradient of what a product with a large vocabulary reads. So the sum is made in parts of
equal length, as a batch of products, and one product of what is left, which another kernel adds up, always in the same
order: the bits are the same in each run.

A weight that is turned and then converted would be copied in both orders, for the forward and the backward pass.
Converted first it is read where it lies, in either order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from onnxc.ir.dtypes import DType
from onnxc.ir.expr import prod
from onnxc.ir.graph import Graph, Node, Value
from onnxc.passes.simplify import Rewriter
from onnxc.primitives.builder import Builder

MOVES = ("transpose", "reshape", "slice", "pad", "gather")
PROCESSORS = 132
TILE = 128  # rows and columns of a program's part of the result
STEP = 64  # elements of a sum that a program reads at a time
STEP_TIME = 0.38  # microseconds that it takes for them
START = 3.0  # microseconds of another kernel
BANDWIDTH = 3e6  # bytes of memory in a microsecond
PARTS = (2, 3, 4, 6, 8, 12, 16)
SHORT = 256  # elements of a part at least
WORTH = 0.85  # of the time that a product takes in one part


def long_products(graph: Graph) -> Graph:
    """The graph with long sums of products of halves in parts, where that is faster."""
    r = Rewriter(graph)
    uses = graph.uses()
    for node in graph.nodes:
        if _is_turned_first(node, uses):
            _replace(r, node, partial(_converted_first, to=node.output.dtype))
        elif (parts := _parts(node)) > 1:
            _replace(r, node, partial(_in_parts, parts=parts))
        else:
            r.keep(node)
    return r.result()


def _replace(r: Rewriter, node: Node, make: Callable[[Builder, list[Value]], Value]) -> None:
    b = Builder()
    with b.from_origin(node.origin):
        found = make(b, [r.replaced.get(v.id, v) for v in node.operands])
    r.nodes += b.nodes
    r.replace(node.output, found)


# ---------------------------------------------------------------- weights


def _is_turned_first(node: Node, uses: dict[int, list[Node]]) -> bool:
    """A cast to 16 bits of something moved, of which products alone read, or views."""
    if node.op != "cast" or node.output.dtype.bits != 16 or not _moves(node.operands[0]):
        return False
    return all(n.op in ("matmul", "transpose", "reshape", "slice") for n in uses.get(node.output.id, ()))


def _moves(x: Value) -> list[Node]:
    """The nodes that move the elements of something, and add zeros, last one first."""
    found: list[Node] = []
    while x.node is not None and x.node.op in MOVES and x.dtype.bits == 32:
        found.append(x.node)
        x = x.node.operands[0]
    return found if any(n.op in ("transpose", "gather") for n in found) else []


def _converted_first(b: Builder, operands: list[Value], to: DType) -> Value:
    moves = _moves(operands[0])
    found = b.cast(moves[-1].operands[0], to)
    for node in reversed(moves):
        others = [b.cast(v, to) if v.dtype.is_float else v for v in node.operands[1:]]
        found = b.one(node.op, found, *others, **node.attrs)
    return found


# ---------------------------------------------------------------- sums in parts


def _parts(node: Node) -> int:
    """In how many parts the sum of a product is made."""
    x, y = node.operands if node.op == "matmul" else (None, None)
    if x is None or y is None or node.output.dtype.bits != 16 or y.rank != 2 or x.rank < 2:
        return 1
    (*rows, k), n = x.shape, y.shape[1]
    m = prod(rows)
    if not (isinstance(m, int) and isinstance(n, int) and isinstance(k, int)):
        return 1
    allowed = [p for p in PARTS if k // p >= SHORT]
    best = min((1, *allowed), key=lambda p: _time(m, n, k, p))
    return best if _time(m, n, k, best) < WORTH * _time(m, n, k, 1) else 1


def _time(m: int, n: int, k: int, parts: int) -> float:
    """Microseconds that a product takes in so many parts."""
    tiles = -(-m // TILE) * -(-n // TILE)
    if parts == 1:
        return -(-tiles // PROCESSORS) * -(-k // STEP) * STEP_TIME
    length = _length(k, parts)
    rest = k - parts * length
    product = -(-tiles * parts // PROCESSORS) * length // STEP * STEP_TIME
    if rest:
        product += START + -(-tiles // PROCESSORS) * -(-rest // STEP) * STEP_TIME
    return product + START + 4 * (parts + (rest > 0)) * m * n / BANDWIDTH


def _length(k: int, parts: int) -> int:
    """Of a part of a sum."""
    return k // (parts * STEP) * STEP


def _in_parts(b: Builder, operands: list[Value], parts: int) -> Value:
    x, y = operands
    (*outer, k), n = x.shape, y.shape[1]
    assert isinstance(k, int)
    m = prod(outer)
    x = b.reshape(x, (m, k))
    length = _length(k, parts)
    end = parts * length
    rows, columns = (x, y) if end == k else (b.slice(x, 1, 0, end), b.slice(y, 0, 0, end))
    left = b.transpose(b.reshape(rows, (m, parts, length)), (1, 0, 2))
    found = b.reduce("sum", b.matmul(left, b.reshape(columns, (parts, length, n))), [0])
    if end < k:
        found = b.add(found, b.matmul(b.slice(x, 1, end, k), b.slice(y, 0, end, k)))
    return b.reshape(found, (*outer, n))
