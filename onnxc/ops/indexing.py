"""Reads and writes at positions that are data: gathers, scatters, selection by rank or by place."""

from __future__ import annotations

from typing import Literal

import numpy as np

from onnxc.errors import ModelError, NeedsContentError, ShapeError
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, prod
from onnxc.ir.graph import Value
from onnxc.ir.types import same_shape
from onnxc.ops.common import along, constant_input, from_start, scalar_of, static_dim
from onnxc.ops.computed import positions_where, unravelled
from onnxc.ops.registry import Flag, op
from onnxc.ops.text import equal_text
from onnxc.primitives.builder import Builder, constant_of

_REDUCTIONS = ("none", "add", "mul", "max", "min")


@op("Gather", 1)
def gather(b: Builder, x: Value, index: Value, *, axis: int = 0) -> Value:
    return b.gather(x, index, b.axis(axis, x.rank))


@op("GatherElements", 11)
def gather_elements(b: Builder, x: Value, index: Value, *, axis: int = 0) -> Value:
    return b.one("gather_elements", x, index, axis=b.axis(axis, x.rank))


@op("GatherND", 11)
def gather_nd(b: Builder, x: Value, index: Value, *, batch_dims: int = 0) -> Value:
    if index.rank and static_dim(index.shape[-1], "the number of axes that GatherND indexes") == 0:
        raise ShapeError(f"the indices of GatherND are {index.t}: they index no axis")
    return b.one("gather_nd", x, index, batch_dims=batch_dims)


def _reduction(name: str) -> str:
    if name not in _REDUCTIONS:
        raise ModelError(f"the reduction {name!r} of a scatter is none of {', '.join(_REDUCTIONS)}")
    return name


@op("ScatterElements", 11)
@op("Scatter", 9)
def scatter_elements(
    b: Builder, x: Value, index: Value, updates: Value, *, axis: int = 0, reduction: str = "none",
) -> Value:  # fmt: skip
    axis, joined = b.axis(axis, x.rank), _reduction(reduction)
    rows = _whole_rows(x, index, updates, axis)
    if rows is not None:
        return b.one("scatter_nd", x, b.reshape(rows, (index.shape[0], 1)), updates, reduction=joined)
    return b.one("scatter_elements", x, index, updates, axis=axis, reduction=joined)


def _whole_rows(x: Value, index: Value, updates: Value, axis: int) -> Value | None:
    """What an index along the first axis repeats for all elements of a row, as graph networks have it; else None."""
    node = index.node
    if axis or x.rank < 2 or x.dtype is dtypes.string or node is None or node.op != "expand":
        return None
    (given,) = node.operands
    repeats = same_shape(given.shape, (index.shape[0], *(1,) * (x.rank - 1)))
    whole = same_shape(index.shape[1:], x.shape[1:]) and same_shape(index.shape, updates.shape)
    return given if repeats and whole else None


@op("ScatterND", 11)
def scatter_nd(b: Builder, x: Value, index: Value, updates: Value, *, reduction: str = "none") -> Value:
    return b.one("scatter_nd", x, index, updates, reduction=_reduction(reduction))


@op("TensorScatter", 24)
def tensor_scatter(
    b: Builder, past: Value, update: Value, write_indices: Value | None = None, *, axis: int = -2,
    mode: Literal["linear", "circular"] = "linear",
) -> Value:  # fmt: skip
    """Writes `update` into a cache [batch, ..., sequence, ...], for each batch from its own position on."""
    axis = b.axis(axis, past.rank)
    count, at = past.shape[axis], along(b, b.iota(update.shape[axis]), past.rank, axis)
    first = b.scalar(0, dtypes.int64) if write_indices is None else along(b, write_indices, past.rank, 0)
    if mode == "circular":
        size = b.size_as(count, dtypes.int64)
        turned = b.binary("mod", b.add(at, b.binary("mod", b.cast(first, dtypes.int64), size)), size)
        at = b.where(b.lt(first, 0), size, turned)  # out of bounds
    else:
        at = b.add(at, from_start(b, first, count))
    return b.one("scatter_elements", past, b.expand(at, update.shape), update, axis=axis, reduction="none")


@op("OneHot", 9)
def one_hot(b: Builder, index: Value, depth: Value, values: Value, *, axis: int = -1) -> Value:
    """values[1] where the place along the new axis is the index (negative from the end), else values[0]."""
    exact = constant_of(depth)
    count: Dim = int(exact.item()) if exact is not None else _depth(b, depth)
    axis = b.axis(axis, index.rank + 1)
    place = b.cast(index, dtypes.int64)
    place = b.where(b.lt(place, 0), b.add(place, b.size_as(count, dtypes.int64)), place)
    place = b.reshape(place, (*index.shape[:axis], 1, *index.shape[axis:]))
    hot = b.eq(place, along(b, b.iota(count), index.rank + 1, axis))
    off, on = (scalar_of(b, v) for v in b.split(values, 0, [1, 1]))
    return b.where(hot, on, off)


def _depth(b: Builder, depth: Value) -> Dim:
    if b.known(depth) is None and b.run_time is not None:
        depth = b.cast(depth, dtypes.int64)
    return b.extents(depth, "the depth of OneHot")[0]


def triangle(b: Builder, rows: Dim, columns: Dim, k: Value | int, upper: bool) -> Value:
    """A mask [rows, columns], true on the diagonal k and above (below) it."""
    diagonal = along(b, b.add(b.iota(rows), k), 2, 0)
    column = b.iota(columns)
    return b.le(diagonal, column) if upper else b.le(column, diagonal)


@op("Trilu", 14)
def trilu(b: Builder, x: Value, k: Value | None = None, *, upper: Flag = 1) -> Value:
    # A diagonal beyond all dims that there may be is as good as any further off, whose sums with rows would wrap.
    diagonal = 0 if k is None else b.clip(scalar_of(b, k), -(2**41), 2**41)
    mask = triangle(b, x.shape[-2], x.shape[-1], diagonal, bool(upper))
    return b.where(mask, x, 0)


def _top_k(b: Builder, x: Value, k: Dim, axis: int, largest: bool) -> list[Value]:
    return list(b.emit("top_k", [x], {"k": k, "axis": b.axis(axis, x.rank), "largest": largest}))


@op("TopK", 1, 9)
def top_k_1(b: Builder, x: Value, *, k: int, axis: int = -1) -> list[Value]:
    return _top_k(b, x, k, axis, True)


@op("TopK", 10)
def top_k_10(
    b: Builder, x: Value, k: Value, *, axis: int = -1, largest: Flag = 1, sorted: Flag = 1,
) -> list[Value]:  # fmt: skip
    """Sorted in any case: without `sorted` every order is right."""
    (count,) = b.extents(k, "the count of TopK")
    return _top_k(b, x, count, axis, bool(largest))


@op("Compress", 9)
def compress(b: Builder, x: Value, condition: Value, *, axis: int | None = None) -> Value:
    """The slices whose condition is true; what the condition is too short for is left out."""
    if axis is None:
        x, axis = b.reshape(x, (prod(x.shape),)), 0
    if b.run_time is not None and constant_of(condition) is None:
        keep = positions_where(b, b.reshape(condition, (condition.t.size,)))
    else:
        (places,) = np.nonzero(constant_input(condition, "the condition of Compress").ravel())
        keep = b.constant(places.astype(np.int64))
    return b.gather(x, keep, b.axis(axis, x.rank))


@op("NonZero", 9)
def non_zero(b: Builder, x: Value) -> Value:
    """The positions of what is not zero, int64 [rank, count], in the order of the elements."""
    content = constant_of(x)
    if content is not None:
        return b.constant(np.array(np.nonzero(np.atleast_1d(content)), dtype=np.int64))
    if b.run_time is None:
        raise NeedsContentError("the size of NonZero depends on data, which is not supported here", x)
    shape = x.shape or (1,)
    flat = b.reshape(x, (prod(shape),))
    if x.dtype.kind == "complex":  # zero in both parts, whatever their signs
        bits = b.bitcast(flat, dtypes.uint64)
        flat = b.binary("bitand", bits, b.scalar(0x7FFFFFFF7FFFFFFF, dtypes.uint64))
    if x.dtype is dtypes.boolean:
        mask = flat
    else:
        empty = equal_text(b, flat, b.scalar("", x.dtype)) if x.dtype is dtypes.string else b.eq(flat, 0)
        mask = b.unary("not", empty)
    return unravelled(b, positions_where(b, mask), shape)
