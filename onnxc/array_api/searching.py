"""Where elements are: extremes, what is not zero, places in an order; and a choice between two arrays."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from onnxc.array.core import Array, call, concrete, content
from onnxc.array.eager import run_eagerly
from onnxc.array_api.data_types import Scalar, array, is_kind, promoted
from onnxc.array_api.manipulation import axis_of, reshape
from onnxc.array_api.statistical import Axis, is_nothing, reduced_axes
from onnxc.errors import InputError
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, prod
from onnxc.ir.graph import Value
from onnxc.ops import numbers, reals
from onnxc.ops.common import along
from onnxc.primitives.builder import Builder
from onnxc.primitives.pairs import Number

_MOST_BITS = 40  # of the number of elements that is searched, where a call tells it


def truth(b: Builder, x: Number) -> Value:
    """Whether each element is not zero."""
    if isinstance(x, Value):
        return reals.truth(b, x)
    return b.or_(reals.truth(b, x.re), reals.truth(b, x.im))


# ---------------------------------------------------------------- extremes


def _best(b: Builder, x: Value, *, op: str, axis: int, shape: tuple[Dim, ...]) -> Value:
    """The first of equals; a NaN counts as the greatest and as the least."""
    found = b.one(f"arg{op}", x, axis=axis, last=False)
    if x.dtype.is_float:
        size = x.shape[axis]
        end = b.size_as(size, dtypes.int64)
        places = b.where(b.isnan(x), along(b, b.iota(size), x.rank, axis), end)
        first = b.reduce("min", places, [axis])
        found = b.where(b.lt(first, end), first, found)
    return b.reshape(found, shape)


def _arg(op: str, x: Array, axis: int | None, keepdims: bool) -> Array:
    x = array(x, f"arg{op}", "integral", "real floating")
    if axis is None:
        shape: tuple[Dim, ...] = (1,) * x.ndim if keepdims else ()
        x, at = reshape(x, (prod(x.dims),)), 0
    else:
        at = axis_of(axis, x.ndim, f"arg{op}")
        shape = tuple(1 if k == at else d for k, d in enumerate(x.dims) if keepdims or k != at)
    if is_nothing(x, (at,), f"arg{op}"):
        raise ValueError(f"arg{op} of no elements")
    return call(_best, x, name=f"arg{op}", op=op, axis=at, shape=shape)  # type: ignore[no-any-return]


def argmax(x: Array, /, *, axis: int | None = None, keepdims: bool = False) -> Array:
    """The position of the greatest element, the first of equals; without an axis among all elements."""
    return _arg("max", x, axis, keepdims)


def argmin(x: Array, /, *, axis: int | None = None, keepdims: bool = False) -> Array:
    """The position of the least element, the first of equals; without an axis among all elements."""
    return _arg("min", x, axis, keepdims)


# ---------------------------------------------------------------- what is not zero


def _count(b: Builder, x: Number, *, axes: tuple[int, ...], keepdims: bool) -> Value:
    return b.reduce("sum", b.cast(truth(b, x), dtypes.int64), axes, keepdims)


def count_nonzero(x: Array, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """How many elements are not zero."""
    x = array(x, "count_nonzero")
    axes = reduced_axes(x, axis, "count_nonzero")
    return call(_count, x, name="count_nonzero", axes=axes, keepdims=keepdims)  # type: ignore[no-any-return]


def run_on_content(rule: Any, x: Array, name: str, instead: str) -> tuple[Any, ...]:
    """The results of a rule for an array whose content has to be known now. TraceError where it is not."""
    found: tuple[Any, ...] = run_eagerly(rule, [content(x, name, instead)], name, {})
    return found


def _nonzero(b: Builder, x: Number) -> list[Value]:
    """The coordinates of what is not zero, each vector as long as there are elements; then how many count."""
    places, count = b.emit("positions", [b.reshape(truth(b, x), (numbers.real(x).t.size,))])
    out = []
    for size in reversed(x.shape):
        whole = b.size_as(size, dtypes.int64)
        out.append(b.binary("mod", places, whole))
        places = b.div(places, whole)
    return [*reversed(out), count]


def nonzero(x: Array, /) -> tuple[Array, ...]:
    """The positions of what is not zero: a vector for each axis.

    Raises:
        TraceError: of an array that is computed in a trace: the shape of the result depends on it.
    """
    x = array(x, "nonzero")
    if x.ndim == 0:
        raise InputError("nonzero of an array without axes")
    if 0 in x.dims:
        content(x, "nonzero", "use where")
        return tuple(concrete(np.empty(0, np.int64)) for _ in range(x.ndim))
    *found, count = run_on_content(_nonzero, x, "nonzero", "use where, or count_nonzero")
    return tuple(concrete(v[: int(count)]) for v in found)


# ---------------------------------------------------------------- places in an order


def _is_before(b: Builder, x: Value, y: Value) -> Value:
    """x < y in the order of sorts: a NaN is greater than all else."""
    less = b.lt(x, y)
    return b.or_(less, b.and_(b.isnan(y), b.not_(b.isnan(x)))) if x.dtype.is_float else less


def _search(b: Builder, x: Value, v: Value, *sorter: Value, right: bool) -> Value:
    """How many elements are before v: in halves, each step for all v."""
    if sorter:
        x = b.gather(x, b.cast(sorter[0], dtypes.int64), 0)
    size = x.shape[0]
    x, v = reals.ordered(b, x), reals.ordered(b, v)
    found = b.full(v.shape, 0, dtypes.int64)
    step = 1 << (size.bit_length() if isinstance(size, int) else _MOST_BITS) >> 1
    end = b.size_as(size, dtypes.int64)
    if not isinstance(size, int):  # of no elements, too, one is read
        x = b.concat([x, b.full((1,), 0, x.dtype)], 0)
    while step:
        last = b.add(found, step - 1)
        inside = b.lt(last, end)
        at = b.gather(x, b.where(inside, last, b.scalar(0, dtypes.int64)), 0)
        before = b.not_(_is_before(b, v, at)) if right else _is_before(b, at, v)
        found = b.where(b.and_(inside, before), b.add(found, step), found)
        step >>= 1
    return found


def searchsorted(
    x1: Array, x2: Array, /, *, side: Literal["left", "right"] = "left", sorter: Array | None = None
) -> Array:
    """How many elements of the ordered vector x1 are less than each of x2 (with `right`: not greater)."""
    if side not in ("left", "right"):
        raise ValueError(f"the side of searchsorted is 'left' or 'right', not {side!r}")
    line, values = promoted("searchsorted", array(x1, "searchsorted"), array(x2, "searchsorted"))
    if line.ndim != 1 or is_kind(line.dtype, "complex floating"):
        raise InputError(f"searchsorted in a vector of real numbers, not in {line.dtype}, {line.dims}")
    rest = [] if sorter is None else [array(sorter, "searchsorted", "integral")]
    return call(_search, line, values, *rest, name="searchsorted", right=side == "right")  # type: ignore[no-any-return]


# ---------------------------------------------------------------- a choice


def _where(b: Builder, condition: Value, x: Number, y: Number) -> Number:
    return numbers.where(b, condition, x, y)


def where(condition: Array, x1: Array | Scalar, x2: Array | Scalar, /) -> Array:
    """x1 where the condition is true, else x2."""
    mask = array(condition, "where", "bool")
    return call(_where, mask, *promoted("where", x1, x2), name="where")  # type: ignore[no-any-return]
