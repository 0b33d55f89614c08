"""Derivatives of reads and writes at positions that are data: a read's is a sum at the places, a write's is a read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onnxc.autodiff.elementwise import zeros_like
from onnxc.autodiff.rules import Gradients, Step, rule
from onnxc.ir.dtypes import int64
from onnxc.ir.expr import always_equal, prod
from onnxc.ir.graph import Value
from onnxc.primitives.builder import Builder

FEW = 4  # a table with so many times the rows that are read has a gradient that is mostly zeros; one of so few is small
MANY = 256  # reads of a small table from which on it is worth to compare


@rule("gather")
def gather(s: Step) -> Gradients:
    """Rows that are read more than once add up."""
    b, (x, index), axis = s.b, s.operands, s.node.attrs["axis"]
    ahead = list(range(axis, axis + index.rank))
    rest = [k for k in range(s.dy.rank) if k not in ahead]
    updates = b.transpose(s.dy, [*ahead, *rest])
    rows, n = x.shape[axis], prod(index.shape)
    if isinstance(rows, int) and isinstance(n, int) and n * FEW <= rows:
        found = _few_rows(b, updates, index, n, rows)
    elif isinstance(rows, int) and 0 < rows <= FEW and isinstance(n, int) and n >= MANY:
        found = _small_table(b, updates, index, n, rows)
    else:
        zeros = zeros_like(b, b.transpose(x, [axis, *(k for k in range(x.rank) if k != axis)]))
        found = _scatter(b, zeros, b.reshape(index, (*index.shape, 1)), updates)
    back = [*range(1, axis + 1), 0, *range(axis + 1, x.rank)]
    return b.transpose(found, back), None


def _few_rows(b: Builder, updates: Value, index: Value, n: int, rows: int) -> Value:
    """The gradient of a large table, `n` rows of which are read, as a read: of sums in a small table, whose last row,
    which nothing adds to, stands for those that were not read. Whoever needs the gradient can then read it in place,
    and it is never in memory.
    """
    updates = b.reshape(updates, (n, *updates.shape[index.rank :]))
    index = b.reshape(b.cast(index, int64), (n, 1))
    nowhere = b.full((rows,), b.scalar(n, int64), int64)
    slots = _scatter(b, nowhere, index, b.iota(n), "none")  # of a row that is read twice, one of the two
    own = b.one("gather_nd", slots, index, batch_dims=0)
    zeros = b.full((n + 1, *updates.shape[1:]), b.scalar(0, updates.dtype), updates.dtype)
    return b.gather(_scatter(b, zeros, b.reshape(own, (n, 1)), updates), slots, 0)


def _small_table(b: Builder, updates: Value, index: Value, n: int, rows: int) -> Value:
    """The gradient of a table of a few rows, `n` times one of which is read: for each row the sum of what belongs to
    it, found by comparison. A scatter has as many threads at work as the table has elements.
    """
    rest = updates.shape[index.rank :]
    updates, own = b.reshape(updates, (n, 1, *rest)), b.reshape(index, (n, 1, *(1 for _ in rest)))
    own = b.where(b.lt(own, 0), b.add(own, rows), own)
    row = b.reshape(b.iota(rows, index.dtype), (1, rows, *(1 for _ in rest)))
    return b.reduce("sum", b.where(b.eq(own, row), updates, 0.0), [0])


def _scatter(b: Builder, x: Value, index: Value, updates: Value, reduction: str = "add") -> Value:
    return b.one("scatter_nd", x, b.cast(index, int64), updates, reduction=reduction)


@rule("gather_elements")
def gather_elements(s: Step) -> Gradients:
    """One element along the axis, as a loss picks that of its class, is found by comparison with all places."""
    b, (x, index), axis = s.b, s.operands, s.node.attrs["axis"]
    same = all(k == axis or always_equal(d, n) for k, (d, n) in enumerate(zip(x.shape, index.shape, strict=True)))
    if same and always_equal(index.shape[axis], 1):
        size = b.cast(b.sizes(np.asarray(x.shape[axis], object)), index.dtype)
        at = b.where(b.lt(index, 0), b.add(index, size), index)
        along = [x.shape[axis] if k == axis else 1 for k in range(x.rank)]
        return b.where(b.eq(at, b.reshape(b.iota(x.shape[axis], index.dtype), along)), s.dy, 0.0), None
    return b.one("scatter_elements", zeros_like(b, x), index, s.dy, axis=axis, reduction="add"), None


@rule("gather_nd")
def gather_nd(s: Step) -> Gradients:
    b, (x, index), batch = s.b, s.operands, s.node.attrs["batch_dims"]
    return _scatter(b, zeros_like(b, x), _with_batch(b, b.cast(index, int64), batch), s.dy), None


def _with_batch(b: Builder, index: Value, batch: int) -> Value:
    """Positions that begin with those along the batch dims."""
    lead = index.shape[:-1]
    axes = []
    for k in range(batch):
        along = b.reshape(b.iota(index.shape[k]), [index.shape[k] if j == k else 1 for j in range(len(lead) + 1)])
        axes.append(b.expand(along, (*lead, 1)))
    return b.concat([*axes, index], index.rank - 1)


@rule("scatter_nd")
def scatter_nd(s: Step) -> Gradients:
    x, index, updates = s.operands

    def read(v: Value) -> Value:
        return s.b.one("gather_nd", v, index, batch_dims=0)

    def write(v: Value, u: Value) -> Value:
        return _scatter(s.b, v, index, u, "none")

    def count(u: Value) -> Value:
        return _scatter(s.b, zeros_like(s.b, x), index, u)

    return _of_scatter(s, updates, read, write, count)


@rule("scatter_elements")
def scatter_elements(s: Step) -> Gradients:
    x, index, updates = s.operands
    axis = s.node.attrs["axis"]

    def read(v: Value) -> Value:
        return s.b.one("gather_elements", v, index, axis=axis)

    def write(v: Value, u: Value) -> Value:
        return s.b.one("scatter_elements", v, index, u, axis=axis, reduction="none")

    def count(u: Value) -> Value:
        return s.b.one("scatter_elements", zeros_like(s.b, x), index, u, axis=axis, reduction="add")

    return _of_scatter(s, updates, read, write, count)


def _of_scatter(
    s: Step, updates: Value, read: Callable[[Value], Value], write: Callable[[Value, Value], Value],
    count: Callable[[Value], Value],
) -> Gradients:  # fmt: skip
    """By what is written to, and by what is written. `read` takes elements at the positions, `write` puts some there,
    `count` adds up there.

    A position that is written twice without a reduction keeps one of the updates, which the standard leaves open: all
    of them get the derivative. Equal elements of max and min share it evenly.
    """
    b, x, reduction = s.b, s.x, s.node.attrs["reduction"]
    if reduction == "add":
        return s.dy, None, read(s.dy) if s.needed[2] else None
    if reduction == "none":
        dx = write(s.dy, zeros_like(b, updates)) if s.needed[0] else None
        return dx, None, read(s.dy) if s.needed[2] else None
    if reduction == "mul":  # y is a product of x and updates; not defined where one of them is zero
        scaled = b.mul(s.dy, s.y)
        du = b.div(read(scaled), updates) if s.needed[2] else None
        return b.div(scaled, x) if s.needed[0] else None, None, du
    own = b.cast(b.eq(x, s.y), x.dtype)
    theirs = b.cast(b.eq(updates, read(s.y)), x.dtype)
    share = b.div(s.dy, b.add(own, count(theirs)))
    return b.mul(own, share), None, b.mul(theirs, read(share))


@rule("top_k")
def top_k(s: Step) -> Gradients:
    """The elements that were chosen."""
    b, axis = s.b, s.node.attrs["axis"]
    if s.dys[0] is None:
        return [None]
    at = s.node.outputs[1]
    return [b.one("scatter_elements", zeros_like(b, s.x), at, s.dy, axis=axis, reduction="add")]
