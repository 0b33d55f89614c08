"""Sums, means and maxima of rows of a table (nn.EmbeddingBag), and their derivatives."""

from __future__ import annotations

import math

from onnxc.errors import UnsupportedError
from onnxc.frontends.torch_fx_indexing import inside
from onnxc.frontends.torch_fx_nn import widened
from onnxc.frontends.torch_fx_table import Call, aten
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, maximum
from onnxc.ir.graph import Value
from onnxc.primitives.builder import Builder


def _gathered(b: Builder, start: Value, rows: Value, at: Value, how: str) -> Value:
    return b.one("scatter_elements", start, at, rows, axis=0, reduction=how)


def _bag_of_each(b: Builder, offsets: Value, n: Dim) -> Value:
    """Of each of n indices, the bag: how many bags have begun, less one."""
    ends = b.full((n + 1,), 0, dtypes.int64)
    ends = _gathered(b, ends, b.full(offsets.shape, 1, dtypes.int64), b.cast(offsets, dtypes.int64), "add")
    return b.sub(b.one("cumsum", b.slice(ends, 0, 0, n), axis=0, exclusive=False, reverse=False), 1)


@aten("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(
    c: Call, weight: Value, index: Value, offsets: Value, scale_grad_by_freq: bool = False, mode: int = 0,
    sparse: bool = False, factors: Value | None = None, include_last_offset: bool = False, padding_idx: int = -1,
) -> list[Value]:  # fmt: skip
    """Sums, means or maxima (mode 0, 1, 2) of rows of the weight. A bag begins at each offset; row `padding_idx` counts
    for nothing.

    The other outputs are what PyTorch's backward pass reads: the bag of each index, the sizes of the bags, and in mode
    2 which row each maximum is of. In mode 0 the latter are zeros, as they are there.
    """
    b, bags, n = c.b, c.type.shape[0], index.t.size
    bag = _bag_of_each(b, b.slice(offsets, 0, 0, bags), n)
    counted = b.not_(b.eq(index, padding_idx))
    (rows, factors) = widened(b, b.gather(weight, inside(b, index, weight.shape[0]), 0), factors)
    rows = rows if factors is None else b.mul(rows, b.reshape(factors, (n, 1)))
    spread = b.expand(b.reshape(bag, (n, 1)), rows.shape)
    column = b.reshape(counted, (n, 1))

    sizes = _gathered(b, b.full((bags,), 0, dtypes.int64), b.cast(counted, dtypes.int64), bag, "add")
    shape, none = (bags, weight.shape[1]), b.reshape(b.eq(sizes, 0), (bags, 1))
    if mode == 2:
        best = _gathered(b, b.full(shape, -math.inf, rows.dtype), b.where(column, rows, -math.inf), spread, "max")
        hit = b.and_(b.eq(rows, b.gather(best, bag, 0)), column)
        place = b.where(hit, b.reshape(b.iota(n), (n, 1)), b.size_as(n, dtypes.int64))
        first = _gathered(b, b.full(shape, b.size_as(n, dtypes.int64), dtypes.int64), place, spread, "min")
        which = b.gather(index, b.min(first, b.size_as(maximum(n - 1, 0), dtypes.int64)), 0) if n != 0 else first
        return _bags(c, [b.where(none, 0.0, best), bag, sizes, b.where(none, b.scalar(0, which.dtype), which)])
    total = _gathered(b, b.full(shape, 0, rows.dtype), b.where(column, rows, 0.0), spread, "add")
    if mode == 1:
        count = b.max(b.cast(b.reshape(sizes, (bags, 1)), rows.dtype), 1.0)
        return _bags(c, [b.div(total, count), bag, sizes, sizes])
    empty = b.full((bags,), 0, dtypes.int64)
    return _bags(c, [total, bag, empty, empty])


def _bags(c: Call, found: list[Value]) -> list[Value]:
    """PyTorch leaves outputs empty that it has no need of."""
    return [
        c.b.full(t.shape, 0, t.dtype) if t is not None and t.size == 0 else v
        for v, t in zip(found, c.types, strict=True)
    ]


@aten("_embedding_bag_backward")
def embedding_bag_backward(
    c: Call, dy: Value, index: Value, offsets: Value, bag: Value, sizes: Value, which: Value, rows: Dim,
    scale_grad_by_freq: bool, mode: int, sparse: bool, factors: Value | None = None, padding_idx: int = -1,
) -> Value:  # fmt: skip
    """By the table. In mode 2 each cotangent goes to the row that the maximum is of."""
    if sparse or (scale_grad_by_freq and mode == 2):
        raise UnsupportedError("a sparse gradient, or one that counts how often a row is read")
    b, n = c.b, index.t.size
    (dy, factors) = widened(b, dy, factors)
    start = b.full(c.type.shape, 0, dy.dtype)
    if mode == 2:
        filled = b.reshape(b.lt(0, sizes), (*sizes.shape, 1))
        return _gathered(b, start, b.where(filled, dy, 0.0), b.cast(which, dtypes.int64), "add")
    index, bags = b.cast(index, dtypes.int64), dy.shape[0]
    bag = _bag_of_each(b, b.slice(offsets, 0, 0, bags), n)
    if mode == 1:
        dy = b.div(dy, b.max(b.cast(b.reshape(sizes, (bags, 1)), dy.dtype), 1.0))
    each = b.gather(dy, bag, 0)
    each = b.mul(each, b.reshape(factors, (n, 1))) if factors is not None else each
    each = b.where(b.reshape(b.eq(index, padding_idx), (n, 1)), 0.0, each)
    if scale_grad_by_freq:
        often = _gathered(b, b.full((rows,), 0, dy.dtype), b.full((n,), 1, dy.dtype), index, "add")
        each = b.div(each, b.reshape(b.gather(often, index, 0), (n, 1)))
    return _gathered(b, start, each, b.expand(b.reshape(index, (n, 1)), each.shape), "add")


@aten("_embedding_bag_per_sample_weights_backward")
def factors_backward(
    c: Call, dy: Value, weight: Value, index: Value, offsets: Value, bag: Value, mode: int, padding_idx: int = -1
) -> Value:
    """By the factor of each index: its row, times the cotangent of its bag."""
    b, n = c.b, index.t.size
    (dy, weight) = widened(b, dy, weight)
    bag = _bag_of_each(b, b.slice(offsets, 0, 0, dy.shape[0]), n)
    found = b.reduce("sum", b.mul(b.gather(dy, bag, 0), b.gather(weight, index, 0)), [1])
    return b.where(b.eq(index, padding_idx), 0.0, found)
