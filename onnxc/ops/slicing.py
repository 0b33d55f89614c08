"""Slice and Pad, whose bounds may be sizes that are known only at run time."""

from __future__ import annotations

from collections.abc import Sequence

from onnxc.errors import ModelError, ShapeError, UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, always_equal, bounds, ceildiv, floordiv, is_nonnegative, maximum, minimum
from onnxc.ir.graph import Value
from onnxc.ops.common import along, from_start, of_shape, scalar_of, static_dim
from onnxc.ops.computed import is_computed, pad_sizes, slice_sizes
from onnxc.ops.registry import op
from onnxc.primitives.builder import Builder, Operand
from onnxc.primitives.movement import slice_size

# Exporters write the greatest int32 or int64 for "to the end".
FAR = 2**31 - 1
LONGEST = 1 << 40  # step: no axis has so many elements, and one is taken of each


def clamp(position: Dim, size: Dim, low: Dim, high: Dim) -> Dim:
    """A position of a slice, counted from the end where it is negative, and moved into [low, high].

    Where the sign is not known, the size is added if it is negative: times min(-position, 1), or else times 0.
    """
    least, most = bounds(position)
    if isinstance(position, int) and abs(position) >= FAR:
        return high if position > 0 else low
    if most is not None and most < 0:
        return maximum(position + size, low)
    if not isinstance(position, int) and (least is None or least < 0):
        position = position + size * minimum(maximum(-position, 0), 1)
    return minimum(maximum(position, low), high)


def _count(first: Dim, end: Dim, size: Dim, step: int) -> Dim:
    """Number of elements of a slice inside an axis. From its beginning or to its end: no clamp."""
    if step > 0 and (end == size or first == 0):
        return ceildiv(end - first, step)
    return slice_size(first, end, step)


def _part(d: Dim, start: Dim, end: Dim, step: int) -> tuple[Dim, Dim]:
    """The first element of a slice of an axis of this size, and how many there are."""
    start = -1 if always_equal(d - start, 1) else start  # the last element, also of none
    low, high = (0, d) if step > 0 else (-1, d - 1)
    backwards = step < 0 and start != -1  # from the last element there is no clamp; else an axis may be too short
    first = clamp(start, d, 0 if backwards else low, high)
    last = clamp(end, d, low, high)
    if step == 1 and last == d and isinstance(start, int) and 0 <= start < FAR:
        count = maximum(d - start, 0)  # the same as d - min(start, d), and stays short when slices follow
    elif step == 1 and last == d and isinstance(start, int) and -FAR < start < 0:
        count = minimum(-start, d)  # which shows that the last element is at most one
        first = d - count
    else:
        count = _count(first, last, d, step)
    if backwards and isinstance(start, int) and start < 0:
        count = minimum(count, d)
    return (0 if count == 0 else first), count


def _slice(
    b: Builder, x: Value, starts: Sequence[Dim], ends: Sequence[Dim], axes: Sequence[int],
    steps: Sequence[int],
) -> Value:  # fmt: skip
    """One `slice` primitive for all axes."""
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise ModelError("Slice has starts, ends, axes and steps of different lengths")
    at: list[Dim] = [0] * x.rank
    sizes, strides = list(x.shape), [1] * x.rank
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        i = b.axis(axis, x.rank)
        if step == 0:
            raise ModelError("Slice has a step of zero")
        (at[i], sizes[i]), strides[i] = _part(x.shape[i], start, end, step), step
    if sizes == list(x.shape) and all(s == 1 for s in strides):
        return x
    return b.one("slice", x, starts=tuple(at), sizes=tuple(sizes), steps=tuple(strides))


@op("Slice", 1, 9)
def slice_1(
    b: Builder, x: Value, *, starts: list[int], ends: list[int], axes: list[int] | None = None,
) -> Value:  # fmt: skip
    return _slice(b, x, starts, ends, axes if axes is not None else list(range(len(starts))), [1] * len(starts))


@op("Slice", 10)
def slice_10(
    b: Builder, x: Value, starts: Value, ends: Value, axes: Value | None = None, steps: Value | None = None,
) -> Value:  # fmt: skip
    count = static_dim(starts.t.size, "the number of starts of Slice")
    if count > x.rank:
        raise ModelError(f"Slice has {count} starts for the axes of {x.t}")
    along_axes = list(range(count)) if axes is None else b.static_ints(axes, "the axes of Slice")
    strides = [1] * count if steps is None else b.static_ints(steps, "the steps of Slice")
    strides = [max(-LONGEST, min(s, LONGEST)) for s in strides]
    if is_computed(b, starts, ends):
        return _slice_computed(b, x, starts, ends, along_axes, strides)
    first = b.ints(starts, "the start of Slice")
    return _slice(b, x, first, b.ints(ends, "the end of Slice"), along_axes, strides)


def _slice_computed(
    b: Builder, x: Value, starts: Value, ends: Value, axes: Sequence[int], steps: Sequence[int]
) -> Value:
    """The same, with ends that are read at run time."""
    if not static_dim(starts.t.size, "starts") == static_dim(ends.t.size, "ends") == len(axes) == len(steps):
        raise ModelError("Slice has starts, ends, axes and steps of different lengths")
    if 0 in steps:
        raise ModelError("Slice has a step of zero")
    places = [b.axis(a, x.rank) for a in axes]
    first, count = slice_sizes(b, starts, ends, [x.shape[i] for i in places], steps)
    at: list[Dim] = [0] * x.rank
    sizes, strides = list(x.shape), [1] * x.rank
    for i, start, size, step in zip(places, first, count, steps, strict=True):
        at[i], sizes[i], strides[i] = start, size, step
    return b.one("slice", x, starts=tuple(at), sizes=tuple(sizes), steps=tuple(strides))


Sides = tuple[Sequence[Dim], Sequence[Dim]]  # amounts in front of each axis, and behind it


def _pad(b: Builder, x: Value, low: Sequence[Dim], high: Sequence[Dim], mode: str, value: Operand) -> Value:
    """Padded by amounts of which negative ones crop."""
    cut = [maximum(-d, 0) for d in low], [maximum(-d, 0) for d in high]
    added = [maximum(d, 0) for d in low], [maximum(d, 0) for d in high]
    return _cropped_and_padded(b, x, cut, added, mode, value)


def _cropped_and_padded(
    b: Builder, x: Value, cut: Sides, added: Sides, mode: str, value: Operand, left: Sequence[Dim] | None = None
) -> Value:
    """First cropped, in every mode, then padded; but with a constant, an end may cut off some of what the other one
    adds. `left`: the sizes that the cut leaves, if they are computed.
    """
    if mode == "constant":
        if all(map(_leaves_enough, x.shape, *cut, *added)):
            return b.pad(_cropped(b, x, *cut), *added, value)
        return _cropped(b, b.pad(x, *added, value), *cut, left)
    if mode not in ("edge", "reflect", "wrap"):
        raise UnsupportedError(f"Pad has no mode {mode!r}")
    x = _cropped(b, x, *cut, left)
    for axis, (before, behind) in enumerate(zip(*added, strict=True)):
        if (before, behind) != (0, 0):
            x = _continue(b, x, axis, before, behind, mode)
    return x


def _leaves_enough(size: Dim, first: Dim, last: Dim, before: Dim, behind: Dim) -> bool:
    """Whether an axis may be cropped before it is padded: where one end cuts, nothing is added, or enough is left."""
    return (first, last) == (0, 0) or (before, behind) == (0, 0) or is_nonnegative(size - first - last)


def _cropped(b: Builder, x: Value, low: Sequence[Dim], high: Sequence[Dim], left: Sequence[Dim] | None = None) -> Value:
    """Without so many elements at the ends of each axis; a call with sizes that have fewer is an error."""
    if all(d == 0 for d in (*low, *high)):
        return x
    sizes = tuple(left or (size - first - last for size, first, last in zip(x.shape, low, high, strict=True)))
    if any(isinstance(d, int) and d < 0 for d in sizes):
        raise ShapeError(f"Pad by negative amounts cuts {list(low)} and {list(high)} off the ends of {x.t}: too much")
    return b.one("slice", x, starts=tuple(low), sizes=sizes, steps=(1,) * x.rank)


def _continue(b: Builder, x: Value, axis: int, low: Dim, high: Dim, mode: str) -> Value:
    """An axis continued by its own elements at both ends. Of what lies along the last axis, which is contiguous,
    slices are put together where one reaches far enough; else each element is looked up.
    """
    size = x.shape[axis]
    near = 1 if mode == "reflect" else 0  # a reflection leaves out the element at the edge
    if size == 0 or axis != x.rank - 1 or not all(_fits_in(d + near, size) for d in (low, high)):
        return b.gather(x, _source_positions(b, size, low, high, mode), axis)
    if mode == "wrap":
        before, after = b.slice(x, axis, size - low, size), b.slice(x, axis, 0, high)
    elif mode == "reflect":
        before = b.flip(b.slice(x, axis, 1, 1 + low), [axis])
        after = b.flip(b.slice(x, axis, size - 1 - high, size - 1), [axis])
    else:
        before = b.expand(b.slice(x, axis, 0, 1), (*x.shape[:axis], low))
        after = b.expand(b.slice(x, axis, size - 1, size), (*x.shape[:axis], high))
    return b.concat([v for v, d in ((before, low), (x, 1), (after, high)) if d != 0], axis)


def _fits_in(width: Dim, size: Dim) -> bool:
    return isinstance(width, int) and isinstance(size, int) and width <= size


def crop_or_pad(b: Builder, x: Value, axis: int, size: int) -> Value:
    """An axis cut, or continued with zeros, to a size."""
    grow = size - x.shape[axis]
    high: list[Dim] = [0] * x.rank
    high[axis] = grow
    return _pad(b, x, [0] * x.rank, high, "constant", 0)


def _source_positions(b: Builder, size: Dim, low: Dim, high: Dim, mode: str) -> Value:
    """For each position of a padded axis, the position that it copies."""
    if size == 0:
        raise ShapeError(f"Pad of an empty axis in mode {mode}")
    last = b.size_as(size - 1, dtypes.int64)
    at = b.sub(b.iota(low + size + high), b.size_as(low, dtypes.int64))
    if mode == "edge":
        return b.clip(at, 0, last)
    if mode == "wrap":
        return b.binary("mod", at, b.size_as(size, dtypes.int64))
    # A reflection has the period 2 * (size - 1); from its middle, the position is size - 1 less the distance.
    period = b.size_as(maximum(2 * (size - 1), 1), dtypes.int64)
    return b.sub(last, b.abs(b.sub(b.binary("mod", at, period), last)))


def pads_by_axis(pads: Sequence[Dim], axes: Sequence[int], rank: int) -> tuple[list[Dim], list[Dim]]:
    """ONNX's [low..., high...] over some axes, as one list for each side over all axes."""
    if len(pads) != 2 * len(axes):
        raise ModelError(f"{len(pads)} pads for {len(axes)} axes: two for each are needed")
    low: list[Dim] = [0] * rank
    high: list[Dim] = [0] * rank
    for i, axis in enumerate(axes):
        low[axis], high[axis] = pads[i], pads[len(axes) + i]
    return low, high


@op("Pad", 2, 10)
def pad_2(b: Builder, x: Value, *, pads: list[int], mode: str = "constant", value: float = 0.0) -> Value:
    return _pad(b, x, *pads_by_axis(pads, range(x.rank), x.rank), mode, value)


@op("Pad", 11)
def pad_11(
    b: Builder, x: Value, pads: Value, constant_value: Value | None = None, axes: Value | None = None, *,
    mode: str = "constant",
) -> Value:  # fmt: skip
    places = range(x.rank) if axes is None else [b.axis(a, x.rank) for a in b.static_ints(axes, "the axes of Pad")]
    value: Operand = 0 if constant_value is None else scalar_of(b, constant_value)
    is_bool = x.dtype is dtypes.boolean
    if is_bool:
        x = b.cast(x, dtypes.uint8)
        value = b.cast(value, dtypes.uint8) if isinstance(value, Value) else value
    if is_computed(b, pads):
        *amounts, left = pad_sizes(b, pads, [x.shape[axis] for axis in places], mode == "constant")
        cut, added = (pads_by_axis(v, places, x.rank) for v in amounts)
        sizes = list(x.shape)
        for axis, size in zip(places, left, strict=True):
            sizes[axis] = size
        x = _cropped_and_padded(b, x, cut, added, mode, value, sizes)
    else:
        x = _pad(b, x, *pads_by_axis(b.ints(pads, "the pads of Pad"), places, x.rank), mode, value)
    return b.cast(x, dtypes.boolean) if is_bool else x


@op("CenterCropPad", 18)
def center_crop_pad(b: Builder, x: Value, shape: Value, *, axes: list[int] | None = None) -> Value:
    """Cropped or padded with zeros to the shape, the middle kept; what is odd goes to the end."""
    wanted = b.ints(shape, "the shape of CenterCropPad")
    places = range(x.rank) if axes is None else [b.axis(a, x.rank) for a in axes]
    if len(places) != len(wanted) or len(set(places)) < len(places):
        raise ModelError(f"CenterCropPad has a shape of {len(wanted)} sizes for the axes {list(places)}")
    sizes = list(x.shape)
    cut, added = _no_ends(x.rank), _no_ends(x.rank)
    for axis, size in zip(places, wanted, strict=True):
        if isinstance(size, int) and size < 0:
            raise ShapeError(f"CenterCropPad to a negative size: {size} in dim {axis}")
        for ends, amount in ((cut, x.shape[axis] - size), (added, size - x.shape[axis])):
            whole = maximum(amount, 0)
            ends[0][axis] = floordiv(whole, 2)
            ends[1][axis] = whole - ends[0][axis]
        sizes[axis] = size
    return _cropped_and_padded(b, x, cut, added, "constant", 0, sizes)


def _no_ends(rank: int) -> tuple[list[Dim], list[Dim]]:
    return [0] * rank, [0] * rank


@op("ReverseSequence", 10)
def reverse_sequence(
    b: Builder, x: Value, lengths: Value, *, batch_axis: int = 1, time_axis: int = 0,
) -> Value:  # fmt: skip
    """The first `lengths[i]` steps of each sequence reversed, the rest left in place."""
    time, batch = b.axis(time_axis, x.rank), b.axis(batch_axis, x.rank)
    if time == batch:
        raise ModelError(f"ReverseSequence has time_axis and batch_axis {time}; they must differ")
    by_rows = x.rank > 2 and max(time, batch) == 1
    rank = 2 if by_rows else x.rank
    step, number = (along(b, b.iota(x.shape[axis]), rank, axis) for axis in (time, batch))
    lengths = of_shape(b, lengths, (x.shape[batch],), "the lengths of ReverseSequence")
    length = along(b, from_start(b, lengths, x.shape[time] + 1), rank, batch)
    mirrored = b.sub(b.sub(length, step), 1)
    source = b.where(b.lt(step, length), mirrored, step)
    if not by_rows:
        return b.one("gather_elements", x, b.expand(source, x.shape), axis=time)
    shape = (*x.shape[:2], 1)
    places = (source, number) if time == 0 else (number, source)
    index = b.concat([b.reshape(b.expand(v, shape[:2]), shape) for v in places], 2)
    return b.one("gather_nd", x, index, batch_dims=0)
