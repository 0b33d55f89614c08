"""ATen ops that count, or whose results have sizes that data decides: in models these are read between two programs."""

from __future__ import annotations

from onnxc.errors import UnsupportedError
from onnxc.frontends.torch_fx_indexing import along_axes, positions
from onnxc.frontends.torch_fx_table import Call, aten
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim
from onnxc.ir.graph import Value
from onnxc.ops.selection import unique as unique_of
from onnxc.primitives.builder import Builder


def _flat(b: Builder, x: Value) -> Value:
    return b.reshape(x, (x.t.size,))


@aten("nonzero")
def nonzero(c: Call, x: Value) -> Value:
    """[how many, rank]"""
    b, places = c.b, positions(c.b, x)
    (count,) = places.shape
    columns = [b.reshape(v, (count, 1)) for v in along_axes(b, places, x.shape)]
    return b.concat(columns, 1) if columns else b.full((count, 0), 0, dtypes.int64)


@aten("nonzero_numpy")
def nonzero_numpy(c: Call, x: Value) -> list[Value]:
    x = c.b.reshape(x, (1,)) if x.rank == 0 else x
    return along_axes(c.b, positions(c.b, x), x.shape)


@aten("masked_select")
def masked_select(c: Call, x: Value, mask: Value) -> Value:
    b, like = c.b, c.b.where(mask, x, x)  # of both shapes
    return b.gather(_flat(b, b.expand(x, like.shape)), positions(b, b.expand(mask, like.shape)), 0)


@aten("_local_scalar_dense")
def local_scalar(c: Call, x: Value) -> Value:
    """The number that a tensor of one element is; the importer reads it where it is a size."""
    return x


# ---------------------------------------------------------------- counts


@aten("bincount")
def bincount(c: Call, x: Value, weights: Value | None = None, minlength: Dim = 0) -> Value:
    """How often each number up to the greatest is there; the sum of its weights."""
    b = c.b
    if b.run_time is None:
        raise UnsupportedError("data decides how many numbers it counts")
    x = b.cast(x, dtypes.int64)
    least = b.size_as(minlength, dtypes.int64)
    ends = b.concat([x, b.reshape(b.sub(least, 1), (1,))], 0)
    negative = b.lt(b.reduce("min", b.concat([x, b.full((1,), 0, dtypes.int64)], 0), [0]), 0)
    count = b.where(negative, -1, b.add(b.reduce("max", ends, [0]), 1))
    (size,) = b.extents(b.reshape(count, (1,)), "how many numbers bincount counts, none of which may be negative")
    if weights is None:
        weights = b.full(x.shape, 1, dtypes.int64)
    elif weights.dtype is not dtypes.float32:
        weights = b.cast(weights, dtypes.float64)
    start = b.full((size,), 0, weights.dtype)
    return b.one("scatter_elements", start, x, weights, axis=0, reduction="add")


@aten("repeat_interleave.Tensor")
def repeat_interleave(c: Call, repeats: Value, *, output_size: Dim | None = None) -> Value:
    """The number of each repeat, as often as it says."""
    b, (count,) = c.b, repeats.shape
    if b.run_time is None:
        raise UnsupportedError("data decides how long it is")
    repeats = b.cast(repeats, dtypes.int64)
    ends = b.one("cumsum", repeats, axis=0, exclusive=False, reverse=False)
    negative = b.reduce("sum", b.cast(b.lt(repeats, 0), dtypes.int64), [0], True)
    total = b.where(b.eq(negative, 0), b.reduce("sum", repeats, [0], True), -1)
    (size,) = b.extents(total, "the sum of the repeats, none of which may be negative")
    one = b.full((count,), 1, dtypes.int64)
    ended = b.one("scatter_elements", b.full((size + 1,), 0, dtypes.int64), ends, one, axis=0, reduction="add")
    return b.slice(b.one("cumsum", ended, axis=0, exclusive=False, reverse=False), 0, 0, size)


# ---------------------------------------------------------------- what is different


def _unique(c: Call, x: Value, axis: int | None) -> list[Value]:
    """Sorted values, which of them each element is, and how often each is there."""
    values, _, inverse, counts = unique_of(c.b, x, axis=axis)
    assert values is not None and inverse is not None and counts is not None
    return [values, inverse, counts]


@aten("_unique2")
def unique2(
    c: Call, x: Value, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> list[Value]:
    values, inverse, counts = _unique(c, x, None)
    none = c.b.full((0,), 0, dtypes.int64)
    return [values, c.b.reshape(inverse, x.shape) if return_inverse else none, counts if return_counts else none]


@aten("unique_dim")
def unique_dim(
    c: Call, x: Value, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> list[Value]:
    return _unique(c, x, c.b.axis(dim, x.rank))


@aten("unique_consecutive")
def unique_consecutive(
    c: Call, x: Value, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> list[Value]:
    """Elements that differ from the one before."""
    b, none = c.b, c.b.full((0,), 0, dtypes.int64)
    if dim is not None and x.rank > 1:
        raise UnsupportedError("unique_consecutive along an axis")
    flat, size = _flat(b, x), x.t.size
    if size == 0:
        return [flat, b.reshape(none, x.shape) if return_inverse else none, none]
    line = b.iota(size)
    before = b.gather(flat, b.max(b.sub(line, 1), 0), 0)
    first = b.or_(b.eq(line, 0), b.not_(b.eq(flat, before)))
    places = positions(b, first)
    number = b.sub(b.one("cumsum", b.cast(first, dtypes.int64), axis=0, exclusive=False, reverse=False), 1)
    ends = b.slice(b.concat([places, b.reshape(b.size_as(size, dtypes.int64), (1,))], 0), 0, 1, places.shape[0] + 1)
    return [
        b.gather(flat, places, 0),
        b.reshape(number, x.shape) if return_inverse else none,
        b.sub(ends, places) if return_counts else none,
    ]
