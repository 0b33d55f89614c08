"""Gradients of convolutions by their weights as products of matrices, for a target that has kernels for these alone.

    dw[m, c, k] = sum over n, o of dy[n, m, o] x[n, c, o * stride + k * dilation - low]

With channels last, the pixels of all images are rows of two matrices, and for each k the rows of x, moved by as many as
k says, meet those of dy: dy has rows of zeros where x has its edges, so that no row of another line or image counts.
Where windows are further apart than one pixel, each k has its rows copied out. Of images with few channels those of all
k are copied side by side, into one matrix: a product for each would read dy that often.

Such a product is a long sum with a small result, and would leave most of a GPU idle. So it is made in parts, which are
summed in float32: always in the same order, so the bits are the same in each run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from onnxc.ir.graph import Graph, Node, Value
from onnxc.passes.simplify import Rewriter
from onnxc.primitives.builder import Builder

TILE = 64  # rows and columns of the part of a result that a program has
PROGRAMS = 264  # that fill a GPU
SHORT = 256  # rows that a part has at least
MOST_TAPS = 64
FEW = 8  # channels of an image that are copied side by side for all taps
VECTOR = 8  # elements of a row that are a multiple of what a product reads at a time


def weight_products(graph: Graph) -> Graph:
    """The graph without `conv_weights`, but for those of groups, of open sizes, and of windows with very many taps."""
    r = Rewriter(graph)
    for node in graph.nodes:
        if node.op == "conv_weights" and _is_product(node):
            b = Builder()
            with b.from_origin(node.origin):
                found = _products(b, node, *(r.replaced.get(v.id, v) for v in node.operands))
            r.nodes += b.nodes
            r.replace(node.output, found)
        else:
            r.keep(node)
    return r.result()


def _is_product(node: Node) -> bool:
    attrs = node.attrs
    static = all(v.t.is_static for v in (*node.operands, node.output))
    edges = all(isinstance(d, int) and d >= 0 for d in (*attrs["low"], *attrs["high"]))
    sizes = all(v.t.size != 0 for v in node.operands)
    return attrs["groups"] == 1 and static and edges and sizes and math.prod(attrs["kernel"]) <= MOST_TAPS


def _products(b: Builder, node: Node, x: Value, dy: Value) -> Value:
    attrs = node.attrs
    taps = list(itertools.product(*(range(k) for k in attrs["kernel"])))
    steps = [tuple(t * d for t, d in zip(tap, attrs["dilations"], strict=True)) for tap in taps]
    x = b.pad(_channels_last(b, x), [0, *attrs["low"], 0], [0, *attrs["high"], 0])
    dy = _channels_last(b, dy)
    if _sizes(x)[-1] <= FEW and len(taps) > 1:
        return _side_by_side(b, node, x, dy, len(taps))
    if all(s == 1 for s in attrs["strides"]):
        pairs = _moved(b, x, dy, steps)
    else:
        rows = _rows(b, dy)
        pairs = [(_rows(b, _window(b, x, dy, at, attrs["strides"])), rows) for at in steps]
    found = [_product(b, rows, moved, int(x.shape[0])) for moved, rows in pairs]
    out = b.concat([b.reshape(f, (1, *f.shape)) for f in found], 0)
    return b.reshape(b.transpose(out, (1, 2, 0)), node.output.shape)


def _side_by_side(b: Builder, node: Node, x: Value, dy: Value, taps: int) -> Value:
    """One product, with the pixels of all taps in a row, and zeros up to a whole vector of them."""
    rank, channels = x.rank - 2, _sizes(x)[-1]
    keys = ("kernel", "strides", "dilations")
    for axis, (size, count, stride, step) in reversed(
        list(enumerate(zip(_sizes(dy)[1:-1], *(node.attrs[k] for k in keys), strict=True), 1))
    ):
        places = np.arange(size)[:, None] * stride + np.arange(count)[None, :] * step
        x = b.gather(x, b.constant(places.astype(np.int64)), axis)
    x = b.transpose(x, (0, *range(1, 2 * rank, 2), *range(2, 2 * rank + 1, 2), 2 * rank + 1))
    rows = b.reshape(x, (math.prod(_sizes(dy)[:-1]), taps * channels))
    rows = b.pad(rows, [0, 0], [0, -taps * channels % VECTOR])
    found = b.slice(_product(b, _rows(b, dy), rows, int(dy.shape[0])), 1, 0, taps * channels)
    out = b.reshape(found, (dy.shape[-1], taps, channels))
    return b.reshape(b.transpose(out, (0, 2, 1)), node.output.shape)


def _channels_last(b: Builder, x: Value) -> Value:
    return b.transpose(x, (0, *range(2, x.rank), 1))


def _rows(b: Builder, x: Value) -> Value:
    return b.reshape(x, (math.prod(_sizes(x)[:-1]), x.shape[-1]))


def _sizes(x: Value) -> list[int]:
    return [d for d in x.shape if isinstance(d, int)]


def _moved(b: Builder, x: Value, dy: Value, steps: Sequence[Sequence[int]]) -> list[tuple[Value, Value]]:
    """For each tap the rows of x that meet those of dy, which has as many."""
    lines = _sizes(x)[1:-1]
    dy = b.pad(dy, [0] * dy.rank, [0, *(a - d for a, d in zip(lines, _sizes(dy)[1:-1], strict=True)), 0])
    strides = [math.prod(lines[k + 1 :]) for k in range(len(lines))]
    offsets = [sum(t * s for t, s in zip(at, strides, strict=True)) for at in steps]
    rows, whole = _rows(b, dy), _rows(b, x)
    count = _sizes(whole)[0]
    whole = b.pad(whole, [0, 0], [max(offsets), 0])
    return [(b.slice(whole, 0, at, at + count), rows) for at in offsets]


def _window(b: Builder, x: Value, dy: Value, at: Sequence[int], strides: Sequence[int]) -> Value:
    """The pixels that a tap reads, one for each of dy."""
    for axis, (start, size, stride) in enumerate(zip(at, _sizes(dy)[1:-1], strides, strict=True), 1):
        x = b.slice(x, axis, start, start + (size - 1) * stride + 1, stride)
    return x


def _product(b: Builder, dy: Value, x: Value, images: int) -> Value:
    """dy' x, of the shape [M, C]."""
    (rows, m), c = _sizes(dy), _sizes(x)[1]
    parts = _parts(rows, -(-m // TILE) * -(-c // TILE), images)
    left, right = (b.reshape(v, (parts, rows // parts, v.shape[1])) for v in (dy, x))
    return b.reduce("sum", b.matmul(b.swap(left, 1, 2), right), [0])


def _parts(rows: int, tiles: int, images: int) -> int:
    """In how many parts of equal length: as few as fill a GPU."""
    allowed = [p for p in range(1, images + 1) if images % p == 0 and rows // p >= SHORT] or [1]
    return next((p for p in allowed if p * tiles >= PROGRAMS), allowed[-1])
