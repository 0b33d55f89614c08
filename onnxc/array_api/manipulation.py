"""Functions that change shapes and the order of elements."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxc.array.core import Array, call, content
from onnxc.array.sizes import is_equal, is_negative, value_of_size
from onnxc.array_api.data_types import array, astype, copied, result_type, same
from onnxc.errors import InputError, ShapeError
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, Expr, always_equal, never_equal, prod
from onnxc.ops import numbers
from onnxc.ops.shape import remaining
from onnxc.primitives.base import broadcast_shapes
from onnxc.primitives.builder import Builder
from onnxc.primitives.pairs import Number, each

Axes = int | Sequence[int]


def dims(shape: Dim | Sequence[Dim]) -> tuple[Dim, ...]:
    """A shape: one size or several, ints or expressions. Negative ones are errors."""
    found = (shape,) if isinstance(shape, (int, Expr)) or not isinstance(shape, Sequence) else tuple(shape)
    out = tuple(d if isinstance(d, Expr) else operator.index(d) for d in found)
    if builtins.any(isinstance(d, int) and d < 0 for d in out):
        raise InputError(f"the shape {out} has a negative size")
    return out


def axis_of(axis: int, rank: int, name: str) -> int:
    """A possibly negative axis. IndexError for one that is not there."""
    at = value_of_size(axis, name)
    if not -rank <= at < rank:
        raise IndexError(f"{name} has no axis {axis}: the array has {rank}")
    return at % rank


def axes_of(axes: Axes, rank: int, name: str) -> tuple[int, ...]:
    """Several axes, each named once."""
    given = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
    found = tuple(axis_of(a, rank, name) for a in given)
    if len(set(found)) != len(found):
        raise ValueError(f"{name} names an axis twice: {given}")
    return found


# ---------------------------------------------------------------- rules


def _reshape(b: Builder, x: Number, *, shape: tuple[Dim, ...]) -> Number:
    return each(lambda v: b.reshape(v, shape), x)


def _expand(b: Builder, x: Number, *, shape: tuple[Dim, ...]) -> Number:
    return each(lambda v: b.expand(v, shape), x)


def _transpose(b: Builder, x: Number, *, perm: tuple[int, ...]) -> Number:
    return each(lambda v: b.transpose(v, perm), x)


def _flip(b: Builder, x: Number, *, axes: tuple[int, ...]) -> Number:
    return each(lambda v: b.flip(v, axes), x)


def _concat(b: Builder, *xs: Number, axis: int) -> Number:
    return numbers.concat(b, xs, axis)


def _roll(b: Builder, x: Number, *, shifts: tuple[int, ...], axes: tuple[int, ...]) -> Number:
    for shift, axis in zip(shifts, axes, strict=True):
        size = x.shape[axis]
        if isinstance(size, int) and size == 0:
            continue
        at = size - shift % size
        x = each(lambda v: b.concat([b.slice(v, axis, at, size), b.slice(v, axis, 0, at)], axis), x)  # noqa: B023
    return x


def _repeat(b: Builder, x: Number, *, count: int, axis: int) -> Number:
    """Each element `count` times in turn."""
    shape = (*x.shape[: axis + 1], count, *x.shape[axis + 1 :])
    joined = (*x.shape[:axis], x.shape[axis] * count, *x.shape[axis + 1 :])
    spread = (*x.shape[: axis + 1], 1, *x.shape[axis + 1 :])
    return each(lambda v: b.reshape(b.expand(b.reshape(v, spread), shape), joined), x)


def _tile(b: Builder, x: Number, *, counts: tuple[int, ...]) -> Number:
    rank = max(len(counts), x.rank)
    own = (1,) * (rank - x.rank) + x.shape
    times = (1,) * (rank - len(counts)) + counts
    narrow = tuple(d for size in own for d in (1, size))
    wide = tuple(d for pair in zip(times, own, strict=True) for d in pair)
    joined = tuple(n * d for n, d in zip(times, own, strict=True))
    return each(lambda v: b.reshape(b.expand(b.reshape(v, narrow), wide), joined), x)


# ---------------------------------------------------------------- functions


def reshape(x: Array, /, shape: Dim | Sequence[Dim], *, copy: bool | None = None) -> Array:
    """The same elements in another shape; one size may be -1: what is left."""
    x = array(x, "reshape")
    given: Any = shape if isinstance(shape, Sequence) else (shape,)
    wanted: tuple[Dim, ...] = tuple(d if isinstance(d, Expr) else operator.index(d) for d in given)
    free = [k for k, d in enumerate(wanted) if isinstance(d, int) and d == -1]
    if len(free) > 1 or builtins.any(isinstance(d, int) and d < -1 for d in wanted):
        raise ValueError(f"reshape to {wanted}: one size may be -1, none less")
    if free:
        wanted = _completed(x, wanted, free[0])
    if never_equal(prod(wanted), prod(x.dims)):  # others that differ, a call finds
        raise ValueError(f"reshape of the shape {x.dims} to {wanted}: the numbers of elements differ")
    out = same(x) if wanted == x.dims else call(_reshape, x, name="reshape", shape=wanted)
    return copied(out) if copy else out


def _completed(x: Array, wanted: tuple[Dim, ...], free: int) -> tuple[Dim, ...]:
    others = (*wanted[:free], *wanted[free + 1 :])
    if always_equal(prod(others), 0):
        raise ValueError(f"reshape of the shape {x.dims} to {wanted}: -1 beside a size of 0")
    try:
        return (*wanted[:free], remaining(x.dims, others), *wanted[free + 1 :])
    except ShapeError:
        raise ValueError(f"reshape of the shape {x.dims} to {wanted}: the numbers of elements differ") from None


def broadcasts(shape: Sequence[Dim], wanted: Sequence[Dim]) -> builtins.bool:
    """Whether a shape broadcasts to another one; sizes that may be equal, a call compares."""
    pairs = zip(shape, wanted[len(wanted) - len(shape) :], strict=False)
    return len(shape) <= len(wanted) and not builtins.any(d != 1 and never_equal(d, w) for d, w in pairs)


def broadcast_to(x: Array, /, shape: tuple[Dim, ...]) -> Array:
    """Repeated to a shape that it broadcasts to."""
    x, wanted = array(x, "broadcast_to"), dims(shape)
    if not broadcasts(x.dims, wanted):
        raise ValueError(f"the shape {x.dims} does not broadcast to {wanted}")
    return call(_expand, x, name="broadcast_to", shape=wanted)  # type: ignore[no-any-return]


def broadcast_arrays(*arrays: Array) -> list[Array]:
    """Repeated to the shape that all broadcast to."""
    given = [array(x, "broadcast_arrays") for x in arrays]
    shape = broadcast_shapes(*(x.dims for x in given))
    return [broadcast_to(x, shape) for x in given]


def concat(arrays: Sequence[Array], /, *, axis: int | None = 0) -> Array:
    """Arrays one after the other along an axis; of None, all elements of each."""
    if not arrays:
        raise ValueError("concat of no arrays")
    given = [array(x, "concat") for x in arrays]
    dtype = result_type(*given)
    if axis is None:
        given, axis = [reshape(x, (-1,) if prod(x.dims) != 0 else (0,)) for x in given], 0
    at = axis_of(axis, given[0].ndim, "concat")
    given = [astype(x, dtype, copy=False) for x in given]
    return call(_concat, *given, name="concat", axis=at)  # type: ignore[no-any-return]


def stack(arrays: Sequence[Array], /, *, axis: int = 0) -> Array:
    """Arrays of one shape along a new axis."""
    given = [array(x, "stack") for x in arrays]
    if not given:
        raise ValueError("stack of no arrays")
    first = given[0].dims
    if builtins.any(x.ndim != len(first) or not builtins.all(map(_is_stacked, x.dims, first)) for x in given):
        raise ValueError(f"stack of different shapes: {', '.join(str(x.dims) for x in given)}")
    at = axis_of(axis, given[0].ndim + 1, "stack")
    return concat([expand_dims(x, at) for x in given], axis=at)


def _is_stacked(a: Dim, b: Dim) -> bool:
    return is_equal(a, b, "stack")


def unstack(x: Array, /, *, axis: int = 0) -> tuple[Array, ...]:
    """The slices along an axis."""
    x = array(x, "unstack")
    at = axis_of(axis, x.ndim, "unstack")
    size = value_of_size(x.dims[at], "unstack")
    return tuple(x[(slice(None),) * at + (k,)] for k in range(size))


def expand_dims(x: Array, /, axis: Axes = 0) -> Array:
    """With further axes of size 1, at these places of the result."""
    x = array(x, "expand_dims")
    count = len(axis) if isinstance(axis, (tuple, list)) else 1
    rank = x.ndim + count
    places = axes_of(axis, rank, "expand_dims")
    rest = iter(x.dims)
    return reshape(x, tuple(1 if k in places else next(rest) for k in range(rank)))


def squeeze(x: Array, /, axis: Axes) -> Array:
    """Without axes of size 1."""
    x = array(x, "squeeze")
    gone = axes_of(axis, x.ndim, "squeeze")
    if builtins.any(not is_equal(x.dims[a], 1, "squeeze") for a in gone):
        raise ValueError(f"squeeze of the axes {gone} of the shape {x.dims}: their sizes are not 1")
    return reshape(x, tuple(d for k, d in enumerate(x.dims) if k not in gone))


def permute_dims(x: Array, /, axes: tuple[int, ...]) -> Array:
    """The axes in another order."""
    x = array(x, "permute_dims")
    perm = axes_of(axes, x.ndim, "permute_dims")
    if len(perm) != x.ndim:
        raise ValueError(f"permute_dims by {axes} of an array with {x.ndim} axes")
    return call(_transpose, x, name="permute_dims", perm=perm)  # type: ignore[no-any-return]


def moveaxis(x: Array, source: Axes, destination: Axes, /) -> Array:
    """Axes moved to other places; the others keep their order."""
    x = array(x, "moveaxis")
    origin, places = axes_of(source, x.ndim, "moveaxis"), axes_of(destination, x.ndim, "moveaxis")
    if len(origin) != len(places):
        raise ValueError(f"moveaxis from {source} to {destination}: their numbers differ")
    rest = [k for k in range(x.ndim) if k not in origin]
    for place, axis in sorted(zip(places, origin, strict=True)):
        rest.insert(place, axis)
    return permute_dims(x, tuple(rest))


def flip(x: Array, /, *, axis: Axes | None = None) -> Array:
    """Reversed along some axes, or all."""
    x = array(x, "flip")
    axes = tuple(range(x.ndim)) if axis is None else axes_of(axis, x.ndim, "flip")
    return call(_flip, x, name="flip", axes=axes)  # type: ignore[no-any-return]


def roll(x: Array, /, shift: Dim | Sequence[Dim], *, axis: Axes | None = None) -> Array:
    """Moved along axes, where what leaves at the end comes in at the start; without an axis, all elements in a row."""
    x = array(x, "roll")
    several = isinstance(shift, (tuple, list))
    given: Any = shift if several else (shift,)
    shifts = tuple(s if isinstance(s, Expr) else operator.index(s) for s in given)
    if axis is None:
        if several:
            raise ValueError("roll by several shifts needs as many axes")
        flat = reshape(x, (prod(x.dims),))
        return reshape(call(_roll, flat, name="roll", shifts=shifts, axes=(0,)), x.dims)
    axes = tuple(axis_of(a, x.ndim, "roll") for a in (axis if isinstance(axis, (tuple, list)) else (axis,)))
    shifts = shifts if several else shifts * len(axes)
    if len(shifts) != len(axes):
        raise ValueError(f"roll by {shift} along {axis}: their numbers differ")
    return call(_roll, x, name="roll", shifts=shifts, axes=axes)  # type: ignore[no-any-return]


def repeat(x: Array, repeats: Dim | Array, /, *, axis: int | None = None) -> Array:
    """Each element so many times in turn: as often as a number, or an array's element for it, says.

    Raises:
        TraceError: in a trace, `repeats` is an array that is computed there: the shape of the result depends on it.
    """
    x = array(x, "repeat")
    if axis is None:
        x, axis = reshape(x, (prod(x.dims),)), 0
    at = axis_of(axis, x.ndim, "repeat")
    if isinstance(repeats, (int, Expr)):
        if is_negative(repeats, "repeat"):
            raise ValueError(f"repeat of {repeats} times")
        return call(_repeat, x, name="repeat", count=repeats, axis=at)  # type: ignore[no-any-return]
    counts = array(repeats, "repeat", "integral")
    data = content(counts, "repeat", "give the number of repeats as an int, or as an array made outside")
    size = value_of_size(x.dims[at], "repeat")
    if data.ndim > 1 or (data.ndim == 1 and data.size not in (1, size)):
        raise ValueError(f"repeat of {size} elements by {data.shape}")
    if (data < 0).any():
        raise ValueError("repeat of a negative number of times")
    places = np.repeat(np.arange(size), data.astype(np.int64))
    return call(_pick, x, places, name="repeat", axis=at)  # type: ignore[no-any-return]


def _pick(b: Builder, x: Number, places: Number, *, axis: int) -> Number:
    index = b.cast(numbers.real(places), dtypes.int64)
    return each(lambda v: b.gather(v, index, axis), x)


def tile(x: Array, repetitions: tuple[int, ...], /) -> Array:
    """Copies side by side, so many along each axis."""
    counts = dims(repetitions)
    return call(_tile, array(x, "tile"), name="tile", counts=counts)  # type: ignore[no-any-return]
