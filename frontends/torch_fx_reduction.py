"""ATen ops over axes: sums, extremes, statistics, running sums, orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnxc.errors import UnsupportedError
from onnxc.frontends.torch_fx_pointwise import truth
from onnxc.frontends.torch_fx_table import Call, aten, axes_of, axis_of
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, maximum, prod
from onnxc.ir.graph import Value
from onnxc.primitives.builder import Builder

Axes = int | Sequence[int] | None


def _wide(dtype: DType) -> DType:
    """What sums of this dtype are computed in."""
    return dtypes.float32 if dtype.is_float and dtype.bits < 32 else dtype


@aten("sum", "sum.dim_IntList")
def sum(c: Call, x: Value, axes: Axes = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    return c.b.reduce("sum", c.b.cast(x, _wide(c.type.dtype)), axes_of(c, axes, x.rank), keepdim)


@aten("mean", "mean.dim")
def mean(c: Call, x: Value, axes: Axes = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    return c.b.mean(c.b.cast(x, _wide(c.type.dtype)), axes_of(c, axes, x.rank), keepdim)


@aten("prod", "prod.dim_int")
def product(c: Call, x: Value, axis: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    return c.b.reduce("prod", c.b.cast(x, _wide(c.type.dtype)), axes_of(c, axis, x.rank), keepdim)


@aten("prims.prod")
def product_of_axes(c: Call, x: Value, axes: Axes, *, output_dtype: Any = None) -> Value:
    return c.b.reduce("prod", c.b.cast(x, _wide(c.type.dtype)), axes_of(c, axes, x.rank))


def _extreme(op: str) -> Callable[..., Value]:
    def rule(c: Call, x: Value, axes: Axes = None, keepdim: bool = False) -> Value:
        found = axes_of(c, axes, x.rank)
        if any(x.shape[a] == 0 for a in found):
            raise UnsupportedError(f"the {op} of no elements")  # which PyTorch refuses
        if x.dtype is dtypes.boolean:
            return truth(c.b, c.b.reduce(op, c.b.cast(x, dtypes.uint8), found, keepdim))
        return c.b.reduce(op, x, found, keepdim)

    return rule


aten("amax", "max")(_extreme("max"))
aten("amin", "min")(_extreme("min"))


@aten("any", "any.dim", "any.dims")
def any_(c: Call, x: Value, axes: Axes = None, keepdim: bool = False) -> Value:
    if axes is not None and not isinstance(axes, int) and not axes:
        return truth(c.b, x)
    bits = c.b.cast(truth(c.b, x), dtypes.uint8)
    return truth(c.b, c.b.reduce("max", bits, axes_of(c, axes, x.rank), keepdim))


@aten("all", "all.dim", "all.dims")
def all_(c: Call, x: Value, axes: Axes = None, keepdim: bool = False) -> Value:
    if axes is not None and not isinstance(axes, int) and not axes:
        return truth(c.b, x)
    bits = c.b.cast(truth(c.b, x), dtypes.uint8)
    return truth(c.b, c.b.reduce("min", bits, axes_of(c, axes, x.rank), keepdim))  # of no elements: 255


def best(b: Builder, op: str, x: Value, axis: int) -> Value:
    """Where the greatest (least) element of an axis stands, the first of equals; a NaN counts as both."""
    if x.dtype is dtypes.boolean:
        x = b.cast(x, dtypes.uint8)
    found = b.one(f"arg{op}", x, axis=axis, last=False)
    if not x.dtype.is_float:
        return found
    n = x.shape[axis]
    row = b.reshape(b.iota(n), (n, *(1,) * (x.rank - 1 - axis)))
    end = b.size_as(n, dtypes.int64)
    first = b.reduce("min", b.where(b.isnan(x), row, end), [axis])
    return b.where(b.lt(first, end), first, found)


def _arg(op: str) -> Callable[..., Value]:
    def rule(c: Call, x: Value, axis: int | None = None, keepdim: bool = False) -> Value:
        if x.rank == 0:
            return c.b.full((), 0, dtypes.int64)
        x = c.b.reshape(x, (prod(x.shape),)) if axis is None else x
        at = 0 if axis is None else axis_of(c, axis, x.rank)
        return c.b.reshape(best(c.b, op, x, at), c.type.shape)

    return rule


aten("argmax")(_arg("max"))
aten("argmin")(_arg("min"))


def _with_position(op: str) -> Callable[..., list[Value]]:
    def rule(c: Call, x: Value, axis: int, keepdim: bool = False) -> list[Value]:
        if x.rank == 0:
            return [x, c.b.full((), 0, dtypes.int64)]
        at = axis_of(c, axis, x.rank)
        where = best(c.b, op, x, at)
        return [_extreme(op)(c, x, at, keepdim), c.b.reshape(where, c.type.shape)]

    return rule


aten("max.dim")(_with_position("max"))
aten("min.dim")(_with_position("min"))


@aten("var.correction", "var.dim")
def var(
    c: Call, x: Value, axes: Axes = None, unbiased: bool = True, keepdim: bool = False, *, correction: Any = None
) -> Value:
    return _moments(c, x, axes, 1 if correction is None and unbiased else correction or 0, keepdim)[0]


@aten("var_mean.correction")
def var_mean(c: Call, x: Value, axes: Axes = None, *, correction: Any = 1, keepdim: bool = False) -> list[Value]:
    return list(_moments(c, x, axes, 1 if correction is None else correction, keepdim))


def _moments(c: Call, x: Value, axes: Axes, correction: float, keepdim: bool) -> tuple[Value, Value]:
    """Variance and mean, the variance over deviations from the mean, divided by the count less `correction`."""
    b, found = c.b, axes_of(c, axes, x.rank)
    wide = b.cast(x, _wide(x.dtype))
    average = b.mean(wide, found, True)
    deviation = b.sub(wide, average)
    total = b.reduce("sum", b.mul(deviation, deviation), found, keepdim)
    count = prod(x.shape[a] for a in found)
    if float(correction).is_integer():
        divisor = b.size_as(maximum(count - int(correction), 0), wide.dtype)
    else:
        divisor = b.max(b.sub(b.size_as(count, wide.dtype), correction), 0.0)
    return b.div(total, divisor), b.reshape(average, total.shape)


@aten("cumsum")
def cumsum(c: Call, x: Value, axis: int, *, dtype: Any = None) -> Value:
    """Floats are added up in float64, as PyTorch does on a CPU: of long rows float32 would keep few digits."""
    x = c.b.cast(x, dtypes.float64 if c.type.dtype.is_float else c.type.dtype)
    return c.b.one("cumsum", x, axis=axis_of(c, axis, x.rank), exclusive=False, reverse=False) if x.rank else x


# ---------------------------------------------------------------- orders


@aten("sort")
def sort(c: Call, x: Value, axis: int = -1, descending: bool = False) -> list[Value]:
    return ordered(c, x, None, axis, descending)


@aten("sort.stable")
def sort_stable(
    c: Call, x: Value, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> list[Value]:
    return ordered(c, x, None, dim, descending)


@aten("topk")
def topk(c: Call, x: Value, k: Dim, axis: int = -1, largest: bool = True, sorted: bool = True) -> list[Value]:
    return ordered(c, x, k, axis, largest)


def ordered(c: Call, x: Value, k: Dim | None, axis: int, largest: bool) -> list[Value]:
    """The best k (all for None), ties by position; a NaN is greater than every number."""
    b = c.b
    if x.rank == 0:
        return [x, b.full((), 0, dtypes.int64)]
    at = axis_of(c, axis, x.rank)
    count = x.shape[at] if k is None else k
    keys = _keys(b, x) if largest or x.dtype is dtypes.boolean else x
    _, where = b.emit("top_k", [keys], {"k": count, "axis": at, "largest": largest})
    return [b.one("gather_elements", x, where, axis=at), where]


def _keys(b: Builder, x: Value) -> Value:
    """Integers in the order of the elements, NaN the greatest, both zeros equal."""
    if not x.dtype.is_float:
        return b.cast(x, dtypes.uint8) if x.dtype is dtypes.boolean else x
    if x.dtype.bits < 32:
        x = b.cast(x, dtypes.float32)
    integer = {32: dtypes.int32, 64: dtypes.int64}.get(x.dtype.bits)
    if integer is None:
        raise UnsupportedError(f"an order of {x.dtype}")
    greatest = int(np.iinfo(integer.numpy).max)
    bits = b.bitcast(b.add(x, 0.0), integer)  # -0.0 + 0.0 is 0.0
    keys = b.where(b.lt(bits, 0), b.binary("bitxor", bits, greatest), bits)
    return b.where(b.isnan(x), greatest, keys)


@aten("histc")
def histc(c: Call, x: Value, bins: int = 100, low: float = 0, high: float = 0) -> Value:
    """How many elements lie in each of equal parts of [low, high]; those outside, and NaN, count nowhere."""
    if not low < high:
        raise UnsupportedError("a histogram whose limits are those of the data")
    b, flat = c.b, c.b.reshape(x, (x.t.size,))
    place = b.mul(b.div(b.sub(flat, low), high - low), float(bins))
    inside = b.and_(b.le(b.scalar(low, x.dtype), flat), b.le(flat, b.scalar(high, x.dtype)))
    index = b.cast(b.min(b.where(inside, place, 0.0), float(bins - 1)), dtypes.int64)  # cuts off, as PyTorch does
    start = b.full((bins,), 0, x.dtype)
    return b.one("scatter_elements", start, index, b.cast(inside, x.dtype), axis=0, reduction="add")
