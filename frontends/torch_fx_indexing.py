"""ATen ops that read and write at positions that are data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from onnxc.errors import UnsupportedError
from onnxc.frontends.torch_fx_pointwise import truth
from onnxc.frontends.torch_fx_table import Call, Operand, aten, axis_of
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, always_equal, maximum, never_equal
from onnxc.ir.graph import Value
from onnxc.ops import reals
from onnxc.ops.computed import positions_where
from onnxc.primitives.base import broadcast_shapes
from onnxc.primitives.builder import Builder


@aten("unfold")
def unfold(c: Call, x: Value, axis: int, size: int, step: int) -> Value:
    """Windows along an axis; their elements become the last axis."""
    if x.rank == 0:
        return c.b.reshape(x, c.type.shape)
    at = axis_of(c, axis, x.rank)
    count = c.type.shape[at]
    starts = c.b.reshape(c.b.mul(c.b.iota(count), step), (count, 1))
    windows = c.b.gather(x, c.b.add(starts, c.b.iota(size)), at)
    return c.b.transpose(windows, [i for i in range(windows.rank) if i != at + 1] + [at + 1])


def inside(b: Builder, index: Value, size: Dim) -> Value:
    """An index that may not count from the end: what is negative lies outside, which is an error of the run."""
    return b.where(b.lt(index, 0), b.sub(index, b.size_as(size, index.dtype)), index)


@aten("embedding")
def embedding(c: Call, weight: Value, index: Value, *rest: Any, **options: Any) -> Value:
    return c.b.gather(weight, inside(c.b, index, weight.shape[0]), 0)


@aten("index_select")
def index_select(c: Call, x: Value, axis: int, index: Value) -> Value:
    if x.rank == 0:
        return x
    index = c.b.reshape(index, (1,)) if index.rank == 0 else index
    at = axis_of(c, axis, x.rank)
    return c.b.gather(x, inside(c.b, index, x.shape[at]), at)


@aten("gather")
def gather(c: Call, x: Value, axis: int, index: Value, *, sparse_grad: bool = False) -> Value:
    if index.t.size == 0:
        return c.b.full(index.shape, 0, x.dtype)
    x, index = (c.b.reshape(v, (1,)) if v.rank == 0 else v for v in (x, index))
    at = axis_of(c, axis, x.rank)
    found = c.b.one("gather_elements", x, inside(c.b, index, x.shape[at]), axis=at)
    return c.b.reshape(found, c.type.shape)


def positions(b: Builder, mask: Value) -> Value:
    """The positions, in all elements, at which a mask is true: int64 [n]."""
    if b.run_time is None:
        raise UnsupportedError("data decides how much it selects")
    return positions_where(b, b.reshape(truth(b, mask), (mask.t.size,)))


def along_axes(b: Builder, places: Value, shape: Sequence[Dim]) -> list[Value]:
    """Positions in all elements as those along each axis."""
    found = []
    for d in reversed(shape):
        size = b.size_as(maximum(d, 1), dtypes.int64)
        found.append(b.binary("mod", places, size))
        places = b.div(places, size)
    return found[::-1]


def without_masks(b: Builder, indices: Sequence[Value | None]) -> list[Value | None]:
    """Indices, with the positions at which it is true, along each of its axes, in the place of each mask."""
    found: list[Value | None] = []
    for v in indices:
        found += along_axes(b, positions(b, v), v.shape) if v is not None and _is_mask(v) else [v]
    return found


def _is_mask(index: Value) -> bool:
    return index.dtype in (dtypes.boolean, dtypes.uint8)


@aten("index.Tensor", "_unsafe_index.Tensor")
def index(c: Call, x: Value, indices: Sequence[Value | None]) -> Value:
    if c.b.run_time is not None:
        indices = without_masks(c.b, indices)
    axes = _indexed(indices)
    if len(axes) == 1:
        (axis,) = axes
        given = indices[axis]
        assert given is not None
        return c.b.gather(x, given, axis)
    front = c.b.transpose(x, _to_front(axes, x.rank))
    picked = _stacked(c, [i for i in indices if i is not None])
    found = c.b.one("gather_nd", front, picked, batch_dims=0)
    return c.b.transpose(found, _back(axes, picked.rank - 1, found.rank))


@aten("index_put", "_unsafe_index_put")
def index_put(c: Call, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False) -> Value:
    given = [i for i in indices if i is not None]
    if len(given) == 1 and _is_mask(given[0]):
        return _masked_put(c, x, indices, values, accumulate)
    if c.b.run_time is not None:
        indices = without_masks(c.b, indices)
        given = [i for i in indices if i is not None]
    axes = _indexed(indices)
    b, order = c.b, _to_front(axes, x.rank)
    front, picked = b.transpose(x, order), _stacked(c, given)
    # The values broadcast to the shape that reading there has; then the indexed axes go to the front.
    shape = (*picked.shape[:-1], *front.shape[len(axes) :])
    back = _back(axes, picked.rank - 1, len(shape))
    values = b.expand(values, [shape[p] for p in back])
    values = b.transpose(values, [back.index(i) for i in range(len(back))])
    put = b.one("scatter_nd", front, picked, values, reduction="add" if accumulate else "none")
    return b.transpose(put, [order.index(i) for i in range(x.rank)])


@aten("index_add")
def index_add(c: Call, x: Value, axis: int, index: Value, source: Value, *, alpha: Operand = 1) -> Value:
    scaled = c.b.cast(c.b.mul(c.operand(alpha, source.dtype), source), x.dtype) if alpha != 1 else source
    return _put_rows(c, x, axis, index, scaled, True)


@aten("index_copy")
def index_copy(c: Call, x: Value, axis: int, index: Value, source: Value) -> Value:
    return _put_rows(c, x, axis, index, source, False)


@aten("index_fill.int_Scalar", "index_fill.int_Tensor")
def index_fill(c: Call, x: Value, axis: int, index: Value, value: Operand) -> Value:
    """x[..., index, ...] = value. PyTorch makes it of `index_copy`, whose indices may not count from the end."""
    row = c.b.reshape(x, (1,)) if x.rank == 0 else x
    places = [None] * axis_of(c, axis, row.rank) + [index]
    return c.b.reshape(index_put(c, row, places, c.operand(value, x.dtype)), x.shape)


def _put_rows(c: Call, x: Value, axis: int, index: Value, source: Value, accumulate: bool) -> Value:
    """x[..., index, ...] = source, or += source."""
    shape = x.shape
    index = c.b.reshape(index, (1,)) if index.rank == 0 else index
    x, source = (c.b.reshape(v, (1,)) if v.rank == 0 else v for v in (x, source))
    at = axis_of(c, axis, x.rank)
    rows = (*x.shape[:at], *index.shape, *x.shape[at + 1 :])
    if source.rank != len(rows) or any(map(never_equal, source.shape, rows)):
        raise UnsupportedError(f"rows {source.type} for {x.type}")  # PyTorch's own error says more
    places = [None] * at + [inside(c.b, index, x.shape[at])]
    return c.b.reshape(index_put(c, x, places, source, accumulate), shape)


def _masked_put(c: Call, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool) -> Value:
    """x[:, mask] = values: the k-th place of the mask gets the k-th row of the values, or their only one."""
    b, first = c.b, next(i for i, v in enumerate(indices) if v is not None)
    mask = truth(b, indices[first])  # type: ignore[arg-type]
    rest = x.shape[first + mask.rank :]
    spread = b.reshape(mask, (*mask.shape, *(1,) * len(rest)))
    # Without the mask's axes, the values have the rank of x less those, and one for the places.
    rank = x.rank - mask.rank + 1
    if values.rank < rank:
        values = b.reshape(values, (*(1,) * (rank - values.rank), *values.shape))
    if values.rank != rank:
        raise UnsupportedError(f"values {values.type} at the places of a mask of {x.type}")
    if always_equal(values.shape[first], 1):
        new = b.reshape(values, (*values.shape[:first], *(1,) * mask.rank, *values.shape[first + 1 :]))
    elif values.shape[first] == 0:
        return x
    else:
        last = b.sub(b.size_as(values.shape[first], dtypes.int64), 1)
        new = b.gather(values, b.min(_place(c, mask), last), first)  # behind the last place nothing is read
    if accumulate:
        return b.where(spread, b.add(x, new), x)
    return b.where(spread, new, x)


def _place(c: Call, mask: Value) -> Value:
    """Of each element of a mask, how many before it are set."""
    flat = c.b.cast(c.b.reshape(mask, (mask.t.size,)), dtypes.int64)
    before = c.b.one("cumsum", flat, axis=0, exclusive=True, reverse=False)
    return c.b.reshape(before, mask.shape)


@aten("put")
def put(c: Call, x: Value, index: Value, source: Value, accumulate: bool = False) -> Value:
    """At positions in all elements, which may count from the end."""
    flat, places = c.b.reshape(x, (x.t.size,)), c.b.reshape(index, (index.t.size,))
    found = index_put(c, flat, [places], c.b.reshape(source, (source.t.size,)), accumulate)
    return c.b.reshape(found, x.shape)


@aten("masked_scatter")
def masked_scatter(c: Call, x: Value, mask: Value, source: Value) -> Value:
    """The k-th place of the mask gets the k-th element of the source."""
    b, shape = c.b, c.type.shape
    if mask.dtype is not dtypes.boolean:
        raise UnsupportedError(f"a mask of {mask.dtype}")
    if source.t.size == 0:
        return b.expand(x, shape)
    mask = b.expand(truth(b, mask), shape)
    place = b.min(_place(c, mask), b.sub(b.size_as(source.t.size, dtypes.int64), 1))
    return b.where(mask, b.gather(b.reshape(source, (source.t.size,)), place, 0), b.expand(x, shape))


@aten("masked_scatter_backward")
def masked_scatter_backward(c: Call, dy: Value, mask: Value, sizes: Sequence[Dim]) -> Value:
    """By the source: its k-th element gets what arrives at the k-th place of the mask, those behind get none."""
    b, count = c.b, c.type.size
    mask = b.expand(truth(b, mask), dy.shape)
    place = b.where(mask, _place(c, mask), b.size_as(count, dtypes.int64))  # one behind the last is thrown away
    flat = b.full((count + 1,), 0, dy.dtype)
    put = b.one(
        "scatter_elements", flat, b.reshape(place, (dy.t.size,)), b.reshape(dy, (dy.t.size,)), axis=0, reduction="none"
    )
    return b.reshape(b.slice(put, 0, 0, count), c.type.shape)


def _indexed(indices: Sequence[Value | None]) -> list[int]:
    """The axes that indices are given for."""
    for value in indices:
        if value is not None and _is_mask(value):
            raise UnsupportedError("a mask as an index, of which only a run tells how much it selects")
    return [i for i, value in enumerate(indices) if value is not None]


def _to_front(axes: Sequence[int], rank: int) -> list[int]:
    return [*axes, *(i for i in range(rank) if i not in axes)]


def _back(axes: Sequence[int], depth: int, rank: int) -> list[int]:
    """The permutation of [index dims, other dims] that puts the former where PyTorch has them: in the place of
    neighbouring axes, else in front.
    """
    first = axes[0] if list(axes) == list(range(axes[0], axes[0] + len(axes))) else 0
    rest = list(range(depth, rank))
    return [*rest[:first], *range(depth), *rest[first:]]


def _stacked(c: Call, indices: Sequence[Value]) -> Value:
    """[shape..., number of indices]"""
    shape = broadcast_shapes(*(i.shape for i in indices))
    columns = [c.b.reshape(c.b.expand(c.b.cast(i, dtypes.int64), shape), (*shape, 1)) for i in indices]
    return c.b.concat(columns, len(shape))


def _scattered(c: Call, x: Value, axis: int, index: Value, source: Value, reduction: str) -> Value:
    if index.t.size == 0:  # of whatever rank
        return x
    shape = x.shape
    x, index, source = (c.b.reshape(v, (1,)) if v.rank == 0 else v for v in (x, index, source))
    for a, (have, want) in enumerate(zip(source.shape, index.shape, strict=True)):
        if not always_equal(have, want):
            source = c.b.slice(source, a, 0, want)
    if index.dtype is not dtypes.int64:
        index = c.b.cast(index, dtypes.int64)
    at = axis_of(c, axis, x.rank)
    index = inside(c.b, index, x.shape[at])
    out = c.b.one("scatter_elements", x, index, source, axis=at, reduction=reduction)
    return c.b.reshape(out, shape)


@aten("scatter.src")
def scatter(c: Call, x: Value, axis: int, index: Value, source: Value) -> Value:
    return _scattered(c, x, axis, index, source, "none")


@aten("scatter.value")
def scatter_value(c: Call, x: Value, axis: int, index: Value, value: Operand) -> Value:
    return _scattered(c, x, axis, index, c.b.expand(c.operand(value, x.dtype), index.shape), "none")


@aten("scatter_add")
def scatter_add(c: Call, x: Value, axis: int, index: Value, source: Value) -> Value:
    return _scattered(c, x, axis, index, source, "add")


_NEUTRAL: dict[str, float] = {"sum": 0, "mean": 0, "prod": 1, "amax": -math.inf, "amin": math.inf}
_REDUCTIONS = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}


@aten("scatter_reduce.two")
def scatter_reduce(
    c: Call, x: Value, axis: int, index: Value, source: Value, reduce: str, *, include_self: bool = True
) -> Value:
    if not include_self:  # what is written to begins with the neutral element
        neutral = _NEUTRAL[reduce]
        if not x.dtype.is_float and reduce in ("amax", "amin"):
            least, most = (0, 1) if x.dtype is dtypes.boolean else x.dtype.limits
            neutral = least if reduce == "amax" else most
        x = scatter_value(c, x, axis, index, neutral)
    if reduce != "mean":
        return _scattered(c, x, axis, index, source, _REDUCTIONS[reduce])
    total = _scattered(c, x, axis, index, source, "add")
    one = c.b.full(x.shape, 1, x.dtype)
    begin = one if include_self else scatter_value(c, one, axis, index, 0)
    count = _scattered(c, begin, axis, index, c.b.full(index.shape, 1, x.dtype), "add")
    count = c.b.where(c.b.eq(count, 0), 1, count)  # a count of small integers may have begun anew
    return c.b.div(total, count) if x.dtype.is_float else reals.floor_divide(c.b, total, count)


@aten("index_reduce")
def index_reduce(
    c: Call, x: Value, axis: int, index: Value, source: Value, reduce: str, *, include_self: bool = True
) -> Value:
    """Rows of the source, each put into that of x which its index says."""
    b, shape = c.b, x.shape
    x, source = (b.reshape(v, (1,)) if v.rank == 0 else v for v in (x, source))
    at = axis_of(c, axis, x.rank)
    places = b.reshape(index, (index.t.size, *(1,) * (x.rank - 1 - at)))
    places = b.expand(b.cast(places, dtypes.int64), source.shape)
    return b.reshape(scatter_reduce(c, x, at, places, source, reduce, include_self=include_self), shape)


@aten("scatter.reduce", "scatter.value_reduce")
def scatter_with(c: Call, x: Value, axis: int, index: Value, source: Operand, *, reduce: str) -> Value:
    names = {"add": "add", "multiply": "mul"}
    if not isinstance(source, Value):
        source = c.b.expand(c.operand(source, x.dtype), index.shape)
    return _scattered(c, x, axis, index, source, names[reduce])
