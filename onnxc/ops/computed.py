"""Sizes that a model computes from data: normalized by a program, then read at run time (`Builder.extents`).

Each function is for a tensor whose content is not known while the graph is built; what is known is computed with
expressions, by the operators themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxc.errors import LimitError, ModelError
from onnxc.host.registry import NO_SIZE
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, prod
from onnxc.ir.graph import Value
from onnxc.primitives.base import MAX_RANK
from onnxc.primitives.builder import Builder

MOST_CUT = 1 << 48  # elements: no axis is so long, and sums of such amounts do not wrap


def is_computed(b: Builder, *values: Value | None) -> bool:
    """Whether the content of one of these tensors is not known now, and may be read at run time."""
    return b.run_time is not None and any(
        v is not None and v.shape != (0,) and b.known(v) is None and all(isinstance(d, int) for d in v.shape)
        for v in values
    )


def vector(b: Builder, dims: Sequence[Dim]) -> Value:
    """Sizes as an int64 tensor of rank 1."""
    content = np.empty(len(dims), object)
    content[:] = dims
    return b.sizes(content)


def _long(b: Builder, value: Value) -> Value:
    return b.cast(b.reshape(value, (value.t.size,)), dtypes.int64)


def _not_below(b: Builder, value: Value, low: Value | float) -> Value:
    return b.max(value, low)


def _when(b: Builder, holds: Value, value: Value) -> Value:
    """The value, or what no size may be: the run says so."""
    return b.where(holds, value, NO_SIZE)


def _check_rank(rank: int) -> None:
    """Before lists of that length are made: a model may claim a shape with billions of entries."""
    if rank > MAX_RANK:
        raise LimitError(f"a tensor would have the rank {rank}; the limit is {MAX_RANK}")


def reshape_sizes(b: Builder, x: Value, shape: Value, allowzero: bool) -> list[Dim]:
    """What Reshape makes of a shape: 0 copies a dim, -1 is what is left."""
    wanted = _long(b, shape)
    count = wanted.shape[0]
    assert isinstance(count, int)
    _check_rank(count)
    if not allowzero:
        own = [*x.shape[:count], *[0] * (count - x.rank)]
        wanted = b.where(b.eq(wanted, 0), vector(b, own), wanted)
    free = b.eq(wanted, -1)
    others = b.reduce("prod", b.where(free, 1, wanted), [0])
    left = b.div(b.size_as(x.t.size, dtypes.int64), _not_below(b, others, 1))
    return b.extents(b.where(free, left, wanted), "the shape of Reshape")


def expanded(b: Builder, x: Value, shape: Value) -> Value:
    """The tensor broadcast with a shape. Open dims of it may turn out to be 1."""
    wanted = _long(b, shape)
    count = wanted.shape[0]
    assert isinstance(count, int)
    rank = max(count, x.rank)
    _check_rank(rank)
    own = [*[1] * (rank - x.rank), *x.shape]
    if rank > count:
        wanted = b.concat([b.constant(np.ones(rank - count, np.int64)), wanted], 0)
    before = vector(b, own)
    found = b.where(b.eq(wanted, 1), before, wanted)
    fits = b.or_(b.eq(before, 1), b.eq(found, before))
    read = b.extents(_when(b, fits, found), "the shape of Expand", "it does not broadcast with that of the tensor")
    x = b.reshape(x, own)
    if all(isinstance(d, int) and d != 1 for d in own):  # the result is x; what was read says whether that is right
        return b.reshape(b.expand(x, read), own)
    sizes = [d if isinstance(d, int) and d != 1 else e for d, e in zip(own, read, strict=True)]
    for axis, (d, size) in enumerate(zip(own, sizes, strict=True)):
        if not isinstance(d, int):  # 1 or the size itself
            place = b.iota(size)
            one = b.eq(b.size_as(d, dtypes.int64), 1)
            x = b.gather(x, b.where(one, b.mul(place, 0), place), axis)
    return b.expand(x, sizes)


def range_size(b: Builder, start: Value, limit: Value, delta: Value) -> Dim:
    """How many numbers a Range has; a step of zero is an error of the run."""
    first, last, step = (b.cast(b.reshape(v, ()), dtypes.float64) for v in (start, limit, delta))
    still = b.eq(step, 0.0)
    steps = b.div(b.sub(last, first), b.where(still, 1.0, step))
    most = float(1 << 62)  # more is no number of elements, and would not be positive as an integer
    count = b.cast(b.min(_not_below(b, b.unary("ceil", steps), 0.0), most), dtypes.int64)
    return b.extents(_when(b, b.not_(still), count), "the size of Range", "the step is 0")[0]


def split_sizes(b: Builder, whole: Dim, split: Value) -> list[Dim]:
    """The sizes of Split, which add up to the axis."""
    sizes = _long(b, split)
    fits = b.eq(b.reduce("sum", sizes, [0]), b.size_as(whole, dtypes.int64))
    return b.extents(_when(b, fits, sizes), "the sizes of Split", "they do not add up to that of the axis")


def slice_sizes(
    b: Builder, starts: Value, ends: Value, dims: Sequence[Dim], steps: Sequence[int]
) -> tuple[list[Dim], list[Dim]]:
    """First positions and counts of a Slice along axes of these sizes. Steps are not zero."""
    size, zero = vector(b, dims), b.constant(np.zeros(len(dims), np.int64))
    step = b.constant(np.array(steps, np.int64))
    up = b.constant(np.array(steps) > 0)
    last = b.sub(size, 1)
    first, end = (b.where(b.lt(v, 0), b.add(v, size), v) for v in (_long(b, starts), _long(b, ends)))
    first = b.max(b.min(first, b.where(up, size, last)), zero)
    end = b.max(b.min(end, b.where(up, size, last)), b.where(up, zero, -1))
    reach = _not_below(b, b.where(up, b.sub(end, first), b.sub(first, end)), 0)
    width = b.abs(step)
    count = b.div(b.add(reach, b.sub(width, 1)), width)
    count = b.where(b.eq(size, 0), 0, count)
    found = b.extents(b.concat([b.where(b.eq(count, 0), 0, first), count], 0), "the ends of Slice")
    return found[: len(dims)], found[len(dims) :]


def pad_sizes(b: Builder, pads: Value, dims: Sequence[Dim], joined: bool) -> tuple[list[Dim], list[Dim], list[Dim]]:
    """Of each amount of a Pad, in front of axes of these sizes and behind: how much is cut off, how much is added; and
    of each axis what the cut leaves. No more may be cut than there is, with what is added where they are `joined`.

    (What is left is a size of its own: as a sum of five, shapes of four axes would have 625 terms for their elements.)
    """
    amounts = _long(b, pads)
    count = len(dims)
    if amounts.shape != (2 * count,):
        raise ModelError(f"{amounts.shape[0]} pads for {count} axes: two for each are needed")

    def both(v: Value) -> Value:
        return b.add(b.slice(v, 0, 0, count), b.slice(v, 0, count, 2 * count))

    cut, added = _not_below(b, b.neg(_not_below(b, amounts, -MOST_CUT)), 0), _not_below(b, amounts, 0)
    own = vector(b, dims)
    whole = b.add(own, both(added)) if joined else own
    fits = b.le(both(cut), whole)
    cut = _when(b, b.concat([fits, fits], 0), cut)
    left = b.sub(whole, both(cut))
    found = b.extents(b.concat([cut, added, left], 0), "the pads of Pad", "more is cut off than there is")
    return found[: 2 * count], found[2 * count : 4 * count], found[4 * count :]


def positions_where(b: Builder, mask: Value) -> Value:
    """The positions, int64 [n], at which a bool vector is true; how many they are is read at run time."""
    places, count = b.emit("positions", [mask])
    (found,) = b.extents(count, "how many elements are not zero")
    return b.slice(places, 0, 0, found)


def unravelled(b: Builder, flat: Value, shape: Sequence[Dim]) -> Value:
    """Positions in a flat tensor as int64 [rank, n]."""
    rows = []
    for axis in range(len(shape)):
        inner = b.size_as(prod(shape[axis + 1 :]), dtypes.int64)
        row = b.div(flat, _not_below(b, inner, 1))
        rows.append(
            b.reshape(row if axis == 0 else b.binary("mod", row, _at_least_one(b, shape[axis])), (1, *flat.shape))
        )
    return b.concat(rows, 0)


def _at_least_one(b: Builder, size: Dim) -> Value:
    return _not_below(b, b.size_as(size, dtypes.int64), 1)
