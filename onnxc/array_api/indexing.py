"""Indexing: parts of arrays by positions, slices, index arrays and masks; and arrays with such parts replaced."""

from __future__ import annotations

import builtins
import operator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onnxc.array.core import Array, asarray, call, concrete, content, elements, known
from onnxc.array.dims import may_be_equal
from onnxc.array.sizes import is_negative, value_of_size
from onnxc.array_api.data_types import Dtype, array, astype, is_kind, number, result_type, same
from onnxc.array_api.data_types import bool as bool_
from onnxc.array_api.manipulation import axis_of, broadcast_to, broadcasts, reshape
from onnxc.frontends.trace import current
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, Expr, ceildiv, maximum, minimum, prod
from onnxc.ir.graph import Value
from onnxc.ops import numbers
from onnxc.primitives.base import broadcast_shapes
from onnxc.primitives.builder import Builder
from onnxc.primitives.pairs import Number, each

# What an index says of one axis of the array: (start, size, step), kept or not; or a new axis.
Part = tuple[str, Dim, Dim, int]


@dataclass(frozen=True)
class Key:
    """An index, taken apart: what ints, slices and None do, then what index arrays select.

    Attributes:
        parts: in the order of the index; every axis of the array has one.
        arrays: index arrays, each with the axis that it selects from, counted after `parts` were applied.
        mask: the sole mask of an index, and the axis that its first dim lies at (of what it is then applied to).
        gap: where a new axis among `parts` only keeps index arrays apart, as numpy has an ellipsis do that stands for
            no axis; it is not in the result.
    """

    parts: tuple[Part, ...]
    arrays: tuple[tuple[int, Array], ...] = ()
    mask: tuple[int, Array] | None = None
    gap: int | None = None


_INTEGERS = (int, np.integer, Expr)


def parsed(x: Array, key: Any) -> Key:
    """An index of an array. IndexError for one that does not fit."""
    given = list(key) if isinstance(key, tuple) else [key]
    given = [_item(k) for k in given]
    used = builtins.sum(_width(k) for k in given)
    if used > x.ndim:
        raise IndexError(f"an index of {used} axes for an array with {x.ndim}")
    if builtins.sum(k is Ellipsis for k in given) > 1:
        raise IndexError("an index has one ellipsis (...)")
    at = next((n for n, k in enumerate(given) if k is Ellipsis), len(given))
    advanced = builtins.any(isinstance(k, Array) for k in given)
    inside = used == x.ndim and 0 < at < len(given) - 1  # an ellipsis that stands for no axis
    gap = advanced and inside and _selects(given[at - 1]) and _selects(given[at + 1])
    given[at : at + 1] = [None] if gap else [slice(None)] * (x.ndim - used)
    found = _taken_apart(x, given, advanced)
    return replace(found, gap=builtins.sum(map(_places, given[:at]))) if gap else found


def _selects(k: Any) -> builtins.bool:
    """Whether an item beside index arrays is one of them."""
    return not (k is None or isinstance(k, slice) or (isinstance(k, Array) and k.dtype == bool_))


def _places(k: Any) -> int:
    """How many axes an item leaves for what index arrays then select from."""
    return 0 if isinstance(k, Array) and k.ndim == 0 and k.dtype == bool_ else builtins.max(_width(k), 1)


def _item(k: Any) -> Any:
    """An index as it is meant: masks and index arrays as Arrays, arrays without axes as numbers if known."""
    if isinstance(k, (builtins.bool, np.bool_)):
        return concrete(np.asarray(k))
    if k is None or k is Ellipsis or isinstance(k, (slice, *_INTEGERS)):
        return k
    if isinstance(k, (list, np.ndarray)):
        k = concrete(elements(k))
    if not isinstance(k, Array):
        raise IndexError(f"an index is of ints, slices, ..., None and arrays, not of {type(k).__name__}")
    if not is_kind(k.dtype, "bool", "integral"):
        raise IndexError(f"an index array is of integers or bools, not of {k.dtype}")
    if k.ndim == 0 and k.dtype != bool_ and (data := known(k)) is not None:
        return int(data)
    return k


def _width(k: Any) -> int:
    """How many axes of the array an item stands for."""
    if k is None or k is Ellipsis:
        return 0
    return k.ndim if isinstance(k, Array) and k.dtype == bool_ else 1


def _taken_apart(x: Array, given: list[Any], advanced: bool) -> Key:
    parts: list[Part] = []
    arrays: list[tuple[int, Array]] = []
    mask: tuple[int, Array] | None = None
    axis, place = 0, 0
    for k in given:
        if k is None:
            parts.append(("new", 0, 1, 1))
        elif isinstance(k, slice):
            parts.append(("keep", *sliced(x.dims[axis], k)))
        elif isinstance(k, Array) and k.dtype == bool_:
            if mask is not None or arrays:
                raise IndexError("a mask stands in an index without other arrays")
            mask = (place, _fitting_mask(x.dims[axis : axis + k.ndim], k))
            parts += [("keep", 0, d, 1) for d in x.dims[axis : axis + k.ndim]]
        elif isinstance(k, Array):
            arrays.append((place, k))
            parts.append(("keep", 0, x.dims[axis], 1))
        elif advanced:
            arrays.append((place, asarray(position(x.dims[axis], k))))
            parts.append(("keep", 0, x.dims[axis], 1))
        else:
            parts.append(("drop", position(x.dims[axis], k), 1, 1))
        axis += _width(k)
        place += _places(k)
    if mask is not None and arrays:
        raise IndexError("a mask stands in an index without other arrays and numbers")
    return Key(tuple(parts), tuple(arrays), mask)


def _fitting_mask(shape: tuple[Dim, ...], mask: Array) -> Array:
    """A mask in the shape of its axes. It may have 0 in the place of a size: then it selects nothing."""
    if all(may_be_equal(d, m) for d, m in zip(shape, mask.dims, strict=True)):
        return broadcast_to(mask, shape)
    if any(m not in (d, 0) for d, m in zip(shape, mask.dims, strict=True)):
        raise IndexError(f"a mask of the shape {mask.dims} for axes of the shape {shape}")
    if not all(isinstance(d, int) for d in shape):
        raise IndexError(f"a mask of the shape {mask.dims} for axes of the dynamic shape {shape}")
    return concrete(np.zeros(shape, np.bool_))


def position(size: Dim, k: Any) -> Dim:
    """A position along an axis, counted from its start. IndexError outside."""
    at: Dim = k if isinstance(k, Expr) else operator.index(k)
    if isinstance(at, int) and isinstance(size, int):
        if not -size <= at < size:
            raise IndexError(f"position {at} along an axis of size {size}")
        return at % size
    return at + size if is_negative(at, "an index", unknown=False) else at  # the run refuses what lies outside


def sliced(size: Dim, k: slice) -> tuple[Dim, Dim, int]:
    """First position, number of elements and step of a slice."""
    step = 1 if k.step is None else _whole(k.step, "step")
    if step == 0:
        raise ValueError("a slice has a step of zero")
    start, stop = (
        v if v is None or isinstance(v, Expr) else _whole(v, end) for v, end in ((k.start, "start"), (k.stop, "stop"))
    )
    if isinstance(size, int) and not isinstance(start, Expr) and not isinstance(stop, Expr):
        found = range(*slice(start, stop, step).indices(size))
        return (found.start if found else 0), len(found), step
    low, high = (0, size) if step > 0 else (-1, size - 1)
    first = _bound(size, start, low, high, low if step > 0 else high)
    last = _bound(size, stop, low, high, high if step > 0 else low)
    count = ceildiv(last - first, step) if step > 0 else ceildiv(first - last, -step)
    return first, maximum(count, 0), step


def _whole(v: Any, what: str) -> int:
    if not isinstance(v, Expr) and not hasattr(v, "__index__"):
        raise TypeError(f"the {what} of a slice is an int, not of the type {type(v).__name__}")
    return value_of_size(v, f"the {what} of a slice")


def _bound(size: Dim, at: Dim | None, low: Dim, high: Dim, default: Dim) -> Dim:
    """An end of a slice, inside of the axis."""
    if at is None:
        return default
    if is_negative(at, "a slice"):
        at = at + size
    return maximum(minimum(at, high), low)


# ---------------------------------------------------------------- reading


def _basic(b: Builder, x: Number, *, parts: tuple[Part, ...]) -> Number:
    rows = [p for p in parts if p[0] != "new"]
    shape = [1 if p[0] == "new" else p[2] for p in parts if p[0] != "drop"]
    whole = all(p[1] == 0 and p[2] == d and p[3] == 1 for p, d in zip(rows, x.shape, strict=True))
    attrs: dict[str, Any] = {
        "starts": tuple(p[1] for p in rows), "sizes": tuple(p[2] for p in rows), "steps": tuple(p[3] for p in rows)
    }  # fmt: skip
    return each(lambda v: b.reshape(v if whole else b.one("slice", v, **attrs), shape), x)


def _order(axes: tuple[int, ...], rank: int) -> list[int]:
    """The indexed axes first."""
    return [*axes, *(k for k in range(rank) if k not in axes)]


def _selected(axes: tuple[int, ...], depth: int, rank: int) -> list[int]:
    """The permutation of [index dims, other dims] that puts the former where numpy has them: in the place of
    neighbouring axes, else in front.
    """
    first = axes[0] if list(axes) == list(range(axes[0], axes[0] + len(axes))) else 0
    rest = list(range(depth, rank))
    return [*rest[:first], *range(depth), *rest[first:]]


def _rows(b: Builder, indices: tuple[Number, ...]) -> Value:
    """Index arrays, broadcast, as [shape..., number of arrays]."""
    shape = broadcast_shapes(*(i.shape for i in indices))
    columns = [b.expand(b.cast(numbers.real(i), dtypes.int64), shape) for i in indices]
    return b.concat([b.reshape(c, (*shape, 1)) for c in columns], len(shape))


def _take(b: Builder, x: Number, *indices: Number, axes: tuple[int, ...]) -> Number:
    """x at index arrays along several axes."""
    if len(axes) == 1:
        index = b.cast(numbers.real(indices[0]), dtypes.int64)
        return each(lambda v: b.gather(v, index, axes[0]), x)
    rows = _rows(b, indices)
    order = _order(axes, x.rank)

    def one(v: Value) -> Value:
        found = b.one("gather_nd", b.transpose(v, order), rows, batch_dims=0)
        return b.transpose(found, _selected(axes, rows.rank - 1, found.rank))

    return each(one, x)


def _is_whole(key: Key, x: Array) -> bool:
    """Whether an index, but for its arrays, is the whole array."""
    return key.parts == tuple(("keep", 0, d, 1) for d in x.dims)


def getitem(x: Array, key: Any) -> Array:
    """x[key]: ints, slices, an ellipsis, None, index arrays, or one mask.

    Raises:
        IndexError: an index that does not fit. Inside of arrays, positions outside are errors of the run.
        TraceError: a mask that is computed in the trace: the shape of the result depends on it; use `where`.
    """
    found = parsed(x, key)
    out = same(x) if _is_whole(found, x) else call(_basic, x, name="getitem", parts=found.parts)
    if found.mask is not None:
        return _masked(out, *found.mask)
    if not found.arrays:
        return out
    axes = tuple(a for a, _ in found.arrays)
    out = call(_take, out, *(i for _, i in found.arrays), name="getitem", axes=axes)
    if found.gap is None:
        return out  # type: ignore[no-any-return]
    depth = len(broadcast_shapes(*(i.dims for _, i in found.arrays)))
    at = depth + found.gap - builtins.sum(a < found.gap for a in axes)
    return reshape(out, (*out.shape[:at], *out.shape[at + 1 :]))


def _masked(x: Array, axis: int, mask: Array) -> Array:
    """The elements along axes from `axis` on where a mask is true."""
    count = mask.ndim
    places = positions(mask, "an index that is a mask", "use array_api.where")
    joined = (*x.dims[:axis], prod(x.dims[axis : axis + count]), *x.dims[axis + count :])
    return call(_take, reshape(x, joined), places, name="getitem", axes=(axis,))  # type: ignore[no-any-return]


def _positions(b: Builder, mask: Value) -> list[Value]:
    return list(b.emit("positions", [b.reshape(mask, (mask.t.size,))]))


def positions(mask: Array, what: str, instead: str) -> Array:
    """Where a mask is true, in the order of its elements: int64 [count]. TraceError where it is not known yet."""
    if current() is not None:
        return concrete(np.flatnonzero(content(mask, what, instead)))
    places, count = call(_positions, mask, name="positions")
    return concrete(places._data[: int(count)])


# ---------------------------------------------------------------- writing


def _put(b: Builder, x: Number, value: Number, *, parts: tuple[Part, ...]) -> Number:
    """x with a part that is a box of steps replaced: the value, padded to the whole, where the box is."""
    rows = [p for p in parts if p[0] != "new"]
    shape = [1 if p[0] == "new" else p[2] for p in parts if p[0] != "drop"]
    sizes = [p[2] for p in rows]
    low = [p[1] if p[3] > 0 else p[1] + (p[2] - 1) * p[3] for p in rows]
    gaps = [builtins.abs(p[3]) - 1 for p in rows]
    span = [s + maximum(s - 1, 0) * g for s, g in zip(sizes, gaps, strict=True)]
    low = [0 if s == 0 else at for s, at in zip(sizes, low, strict=True)]
    high = [d - at - s for d, at, s in zip(x.shape, low, span, strict=True)]
    turned = [k for k, p in enumerate(rows) if p[3] < 0]
    box = b.pad(b.full(sizes, True, dtypes.boolean), low, high, False, gaps)

    def one(v: Value, new: Value) -> Value:
        new = b.flip(b.reshape(b.expand(new, shape), sizes), turned)
        return b.where(box, b.pad(new, low, high, b.scalar(0, v.dtype), gaps), v)

    return _zipped(b, one, x, value)


def _zipped(b: Builder, f: Any, x: Number, y: Number) -> Number:
    """A function of both real or imaginary parts."""
    if isinstance(x, Value):
        return f(x, numbers.real(y))  # type: ignore[no-any-return]
    y = numbers.to_complex(b, y)
    return type(x)(f(x.re, y.re), f(x.im, y.im))


def _scatter(b: Builder, x: Number, value: Number, *indices: Number, axes: tuple[int, ...]) -> Number:
    """x with what index arrays select replaced; of two values for one place the last."""
    order = _order(axes, x.rank)
    rows = _rows(b, indices)

    def one(v: Value, new: Value) -> Value:
        front = b.transpose(v, order)
        shape = (*rows.shape[:-1], *front.shape[len(axes) :])
        back = _selected(axes, rows.rank - 1, len(shape))
        new = b.expand(new, [shape[p] for p in back])
        new = b.transpose(new, [back.index(k) for k in range(len(back))])
        put = b.one("scatter_nd", front, rows, new, reduction="none")
        return b.transpose(put, [order.index(k) for k in range(v.rank)])

    return _zipped(b, one, x, value)


def _put_masked(b: Builder, x: Number, value: Number, mask: Value, *, axis: int) -> Number:
    mask = b.reshape(mask, (*mask.shape, *(1,) * (x.rank - axis - mask.rank)))
    return numbers.where(b, mask, value, x)


def _replacing(x: Array, value: Any) -> Array:
    """What is written, in the dtype of the array. TypeError where the dtypes do not mix to that."""
    if isinstance(value, (builtins.bool, int, float, complex)) and not isinstance(value, np.generic):
        found: Dtype = result_type(x, value)
        new = number(value, found)
    else:
        new = array(value, "an assignment to an array's elements")
        found = result_type(x, new)
    if found != x.dtype:
        raise TypeError(f"elements of an array of {x.dtype} are assigned {found}; use astype")
    return astype(new, x.dtype, copy=False)


def setitem(x: Array, key: Any, value: Any) -> Array:
    """x with the elements that key selects replaced by a value, which broadcasts to their shape."""
    new, found = _replacing(x, value), parsed(x, key)
    if found.mask is not None or found.arrays:
        return _written(x, found, new) if _is_whole(found, x) else _in_positions(x, key, new)
    selected = tuple(1 if p[0] == "new" else p[2] for p in found.parts if p[0] != "drop")
    new = _fitted(new, selected)
    return call(_put, x, new, name="setitem", parts=found.parts)  # type: ignore[no-any-return]


def _fitted(new: Array, shape: tuple[Dim, ...]) -> Array:
    """Without leading axes of size 1 that are more than the selection has. ValueError for what does not broadcast."""
    while new.ndim > len(shape) and new.dims[0] == 1:
        new = reshape(new, new.dims[1:])
    if not broadcasts(new.dims, shape):
        raise ValueError(f"values of the shape {new.dims} for elements of the shape {shape}")
    return new


def _written(x: Array, found: Key, new: Array) -> Array:
    """With index arrays or a mask, and all else whole."""
    if found.mask is None:
        axes = tuple(a for a, _ in found.arrays)
        indices = [i for _, i in found.arrays]
        depth = broadcast_shapes(*(i.dims for i in indices))
        rank = len(depth) + x.ndim - len(axes)
        shape = (*depth, *(d for k, d in enumerate(x.dims) if k not in axes))
        new = _fitted(new, tuple(shape[p] for p in _selected(axes, len(depth), rank)))
        return call(_scatter, x, new, *indices, name="setitem", axes=axes)  # type: ignore[no-any-return]
    axis, mask = found.mask
    inner = x.ndim - axis - mask.ndim
    if axis == 0 and new.ndim <= inner:
        new = _fitted(new, x.dims[mask.ndim :])
        return call(_put_masked, x, new, mask, name="setitem", axis=axis)  # type: ignore[no-any-return]
    places = positions(mask, "an assignment of several values by a mask", "use array_api.where")
    joined = (*x.dims[:axis], prod(x.dims[axis : axis + mask.ndim]), *x.dims[axis + mask.ndim :])
    flat = reshape(x, joined)
    new = _fitted(new, (*joined[:axis], places.dims[0], *joined[axis + 1 :]))
    return reshape(call(_scatter, flat, new, places, name="setitem", axes=(axis,)), x.dims)


def _numbered(b: Builder, x: Number) -> Value:
    return b.reshape(b.iota(prod(x.shape)), x.shape)


def _in_positions(x: Array, key: Any, new: Array) -> Array:
    """By the numbers of the elements that a key selects: for slices beside arrays."""
    places = getitem(call(_numbered, x, name="setitem"), key)
    new = broadcast_to(_fitted(new, places.dims), places.dims)
    flat = call(_scatter, reshape(x, (prod(x.dims),)), new, places, name="setitem", axes=(0,))
    return reshape(flat, x.dims)


# ---------------------------------------------------------------- functions


def take(x: Array, indices: Array, /, *, axis: int | None = None) -> Array:
    """The elements at positions along an axis (of a vector without one); negative ones count from the end."""
    x, places = array(x, "take"), array(indices, "take", "integral")
    if axis is None and x.ndim != 1:
        raise ValueError("take from an array of several axes needs an axis")
    at = axis_of(0 if axis is None else axis, x.ndim, "take")
    return call(_take, x, places, name="take", axes=(at,))  # type: ignore[no-any-return]


def _along(b: Builder, x: Number, index: Value, *, axis: int) -> Number:
    index = b.cast(index, dtypes.int64)
    shape = list(broadcast_shapes(*((*v.shape[:axis], 1, *v.shape[axis + 1 :]) for v in (x, index))))
    index = b.expand(index, [*shape[:axis], index.shape[axis], *shape[axis + 1 :]])
    whole = [*shape[:axis], x.shape[axis], *shape[axis + 1 :]]
    return each(lambda v: b.one("gather_elements", b.expand(v, whole), index, axis=axis), x)


def take_along_axis(x: Array, indices: Array, /, *, axis: int = -1) -> Array:
    """For each place of `indices` the element at that position along the axis."""
    x, places = array(x, "take_along_axis"), array(indices, "take_along_axis", "integral")
    if x.ndim != places.ndim:
        raise ValueError(f"take_along_axis of the shape {x.dims} by {places.dims}: their numbers of axes differ")
    at = axis_of(axis, x.ndim, "take_along_axis")
    return call(_along, x, places, name="take_along_axis", axis=at)  # type: ignore[no-any-return]
