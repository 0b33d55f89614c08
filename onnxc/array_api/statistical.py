"""Sums, products, extremes, moments, along axes."""

from __future__ import annotations

import builtins

import numpy as np

from onnxc.array.core import Array, call
from onnxc.array.sizes import is_zero
from onnxc.array_api.data_types import Dtype, array, astype, checked_dtype, is_kind
from onnxc.array_api.manipulation import Axes, axes_of, axis_of
from onnxc.errors import InputError
from onnxc.ir.expr import maximum
from onnxc.ir.expr import prod as product
from onnxc.ir.graph import Value
from onnxc.ops import numbers
from onnxc.ops.common import along, flat_at_zero
from onnxc.primitives.builder import Builder
from onnxc.primitives.pairs import Complex, Number, each

Axis = int | tuple[int, ...] | None


def reduced_axes(x: Array, axis: Axes | None, name: str) -> tuple[int, ...]:
    """The axes of a reduction; all for None."""
    return tuple(range(x.ndim)) if axis is None else tuple(sorted(axes_of(axis, x.ndim, name)))


def is_nothing(x: Array, axes: tuple[int, ...], name: str) -> bool:
    """Whether there are no elements along axes, which the call decides of dynamic ones; no where only a run tells."""
    return builtins.any(is_zero(x.dims[a], name, unknown=False) for a in axes)


def summed(x: Array, dtype: Dtype | None) -> Array:
    """In the dtype of its sums: the given one, or at least the default integer."""
    if dtype is not None:
        return astype(x, checked_dtype(dtype), copy=False)
    if is_kind(x.dtype, "bool", "signed integer"):
        return astype(x, np.dtype("int64"), copy=False)
    return astype(x, np.dtype("uint64"), copy=False) if is_kind(x.dtype, "unsigned integer") else x


# ---------------------------------------------------------------- sums and products


def _sum(b: Builder, x: Number, *, axes: tuple[int, ...], keepdims: bool) -> Number:
    return numbers.total(b, x, axes, keepdims)


def sum(x: Array, /, *, axis: Axis = None, dtype: Dtype | None = None, keepdims: bool = False) -> Array:
    """The sum; that of small integers in 64 bits."""
    x = summed(array(x, "sum", "numeric"), dtype)
    return call(_sum, x, name="sum", axes=reduced_axes(x, axis, "sum"), keepdims=keepdims)  # type: ignore[no-any-return]


def _prod(b: Builder, x: Number, *, axes: tuple[int, ...], keepdims: bool) -> Number:
    return numbers.product(b, x, axes, keepdims)


def prod(x: Array, /, *, axis: Axis = None, dtype: Dtype | None = None, keepdims: bool = False) -> Array:
    """The product; that of small integers in 64 bits."""
    x = summed(array(x, "prod", "numeric"), dtype)
    return call(_prod, x, name="prod", axes=reduced_axes(x, axis, "prod"), keepdims=keepdims)  # type: ignore[no-any-return]


def _mean(b: Builder, x: Number, *, axes: tuple[int, ...], keepdims: bool) -> Number:
    return each(lambda v: b.mean(v, axes, keepdims), x)


def mean(x: Array, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """The mean; NaN of nothing."""
    x = array(x, "mean", "real floating", "complex floating")
    return call(_mean, x, name="mean", axes=reduced_axes(x, axis, "mean"), keepdims=keepdims)  # type: ignore[no-any-return]


def _var(b: Builder, x: Value, *, axes: tuple[int, ...], correction: float, keepdims: bool, root: bool) -> Value:
    """The squares of the deviations from the mean, over their number less the correction (0 where that is negative)."""
    deviation = b.sub(x, b.mean(x, axes, True))
    total = b.reduce("sum", b.mul(deviation, deviation), axes, keepdims)
    count = product(x.shape[a] for a in axes)
    if float(correction).is_integer():
        divisor = b.size_as(maximum(count - int(correction), 0), x.dtype)
    else:
        divisor = b.max(b.sub(b.size_as(count, x.dtype), correction), 0.0)
    found = b.div(total, divisor)
    return flat_at_zero(b, b.sqrt, found) if root else found


def var(x: Array, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Array:
    """The variance: over the number of elements less `correction`."""
    x = array(x, "var", "real floating")
    return call(  # type: ignore[no-any-return]
        _var, x, name="var", axes=reduced_axes(x, axis, "var"), correction=correction, keepdims=keepdims, root=False
    )


def std(x: Array, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Array:
    """The standard deviation: the root of the variance."""
    x = array(x, "std", "real floating")
    return call(  # type: ignore[no-any-return]
        _var, x, name="std", axes=reduced_axes(x, axis, "std"), correction=correction, keepdims=keepdims, root=True
    )


# ---------------------------------------------------------------- extremes


def _extreme(b: Builder, x: Value, *, op: str, axes: tuple[int, ...], keepdims: bool) -> Value:
    return b.reduce(op, x, axes, keepdims)


def _most(op: str, x: Array, axis: Axis, keepdims: bool) -> Array:
    x = array(x, op, "integral", "real floating")
    axes = reduced_axes(x, axis, op)
    if is_nothing(x, axes, op):
        raise ValueError(f"{op} of no elements: the shape {x.dims} along the axes {axes}")
    return call(_extreme, x, name=op, op=op, axes=axes, keepdims=keepdims)  # type: ignore[no-any-return]


def max(x: Array, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """The greatest element; NaN where one is NaN. ValueError for none."""
    return _most("max", x, axis, keepdims)


def min(x: Array, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """The least element; NaN where one is NaN. ValueError for none."""
    return _most("min", x, axis, keepdims)


# ---------------------------------------------------------------- running sums and products


def _running_sum(b: Builder, x: Number, *, axis: int) -> Number:
    return each(lambda v: b.one("cumsum", v, axis=axis, exclusive=False, reverse=False), x)


def _running_product(b: Builder, x: Number, *, axis: int) -> Number:
    """In steps that double (Hillis, Steele); along a dynamic size a product over a triangle."""
    size = x.shape[axis]
    if not isinstance(size, int):
        return _triangle_product(b, x, axis)
    step = 1
    while step < size:
        ones = b.full([step if k == axis else d for k, d in enumerate(x.shape)], 1, numbers.part_type(x.dtype))
        before = each(lambda v: b.slice(v, axis, 0, size - step), x)  # noqa: B023
        x = numbers.mul(b, x, numbers.concat(b, [ones, before], axis))
        step *= 2
    return x


def _triangle_product(b: Builder, x: Number, axis: int) -> Number:
    if isinstance(x, Complex):
        return numbers.stepwise(b, x, axis)[1]
    size = x.shape[axis]
    wide = b.reshape(x, (*x.shape[:axis], 1, *x.shape[axis:]))  # [..., output, input, ...]
    output, source = along(b, b.iota(size), x.rank + 1, axis), along(b, b.iota(size), x.rank + 1, axis + 1)
    return b.reduce("prod", b.where(b.le(source, output), wide, b.scalar(1, x.dtype)), [axis + 1])


def _initial(b: Builder, x: Number, *, axis: int, value: int) -> Number:
    first = b.full([1 if k == axis else d for k, d in enumerate(x.shape)], value, numbers.part_type(x.dtype))
    return numbers.concat(b, [first, x], axis)


def _running(
    name: str, x: Array, axis: int | None, dtype: Dtype | None, include_initial: bool
) -> Array:  # fmt: skip
    x = summed(array(x, name, "numeric"), dtype)
    if x.ndim == 0:
        raise InputError(f"{name} of an array without axes")
    if axis is None and x.ndim != 1:
        raise ValueError(f"{name} of an array of several axes needs an axis")
    at = axis_of(0 if axis is None else axis, x.ndim, name)
    rule, start = (_running_sum, 0) if name == "cumulative_sum" else (_running_product, 1)
    out: Array = call(rule, x, name=name, axis=at)
    return call(_initial, out, name=name, axis=at, value=start) if include_initial else out


def cumulative_sum(
    x: Array, /, *, axis: int | None = None, dtype: Dtype | None = None, include_initial: bool = False
) -> Array:
    """The sums up to each element; with `include_initial`, 0 before them."""
    return _running("cumulative_sum", x, axis, dtype, include_initial)


def cumulative_prod(
    x: Array, /, *, axis: int | None = None, dtype: Dtype | None = None, include_initial: bool = False
) -> Array:
    """The products up to each element; with `include_initial`, 1 before them."""
    return _running("cumulative_prod", x, axis, dtype, include_initial)
