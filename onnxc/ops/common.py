"""What several families of operators share: reading axes and dtypes, and computing in a wider type."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from onnxc.errors import LimitError, ModelError, NeedsContentError, NeedsSizesError, ShapeError, UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, never_equal
from onnxc.ir.graph import Value
from onnxc.primitives.builder import Builder, constant_of


def dtype_of(number: int, what: str) -> DType:
    """The dtype that an attribute names by its ONNX number."""
    if number not in dtypes.BY_ONNX:
        raise ModelError(f"{what} names the element type {number}, which ONNX does not have")
    return dtypes.BY_ONNX[number]


def float_of(number: int, what: str) -> DType:
    """The dtype in which an attribute wants something computed: one of floats."""
    dtype = dtype_of(number, what)
    if not dtype.is_float or dtype.bits < 16:
        raise ModelError(f"{what} is {dtype}; it has to be a type of floats with 16 bits at least")
    return dtype


def numeric(dtype: DType, what: str) -> DType:
    """The dtype itself; strings and complex numbers raise UnsupportedError."""
    if dtype.kind in ("string", "complex"):
        raise UnsupportedError(f"{what} of {dtype} is not supported")
    return dtype


def axes_of(b: Builder, axes: Sequence[int] | Value | None, rank: int, what: str) -> tuple[int, ...] | None:
    """Axes given as an attribute or as an input, made positive and sorted, each once; None where they are absent."""
    if axes is None:
        return None
    given = b.static_ints(axes, f"the axes of {what}") if isinstance(axes, Value) else list(axes)
    return tuple(sorted({b.axis(a, rank) for a in given}))


def static_dim(d: Dim, what: str) -> int:
    """A dim that must be known at compile time (which may be when the model runs)."""
    if not isinstance(d, int):
        raise NeedsSizesError(f"{what} must be static, but is {d}", d)
    return d


def static_shape(shape: Sequence[Dim], what: str) -> tuple[int, ...]:
    """A shape that must be known at compile time."""
    return tuple(static_dim(d, what) for d in shape)


def constant_input(value: Value, what: str) -> np.ndarray:
    """The array of an input that must be constant."""
    array = constant_of(value)
    if array is None:
        raise NeedsContentError(f"{what} must be constant", value)
    return array


# An operator's definition computes tables of at most this many elements with numpy.
TABLE_ELEMENTS = 1 << 24


def limited(count: Dim, what: str) -> int:
    """A number of elements that a definition is about to compute. LimitError for too many."""
    count = static_dim(count, what)
    if count > TABLE_ELEMENTS:
        raise LimitError(f"{what} needs a table of {count} elements; the limit is {TABLE_ELEMENTS}")
    return count


def scalar_of(b: Builder, x: Value) -> Value:
    """A tensor of one element as a scalar (exporters write [1] for many a scalar)."""
    return b.reshape(x, ())


def along(b: Builder, x: Value, rank: int, axis: int) -> Value:
    """A vector laid along one axis of a tensor of that rank, for broadcasting.

    The dims before the axis are left out, as broadcasting adds them.
    """
    return b.reshape(x, (*x.shape, *(1,) * (rank - 1 - axis)))


def from_start(b: Builder, index: Value, size: Dim) -> Value:
    """As int64, an index that must not be negative: gathers count those from the end, here they are out of bounds."""
    index = b.cast(index, dtypes.int64)
    return b.where(b.lt(index, 0), b.size_as(size, dtypes.int64), index)


def counted(b: Builder, counts: Value, most: Dim, least: Value | int = 0) -> Value:
    """Counts as int64; those below `least` or above `most` are errors of the run: they index what there is to count."""
    size = most + 1
    index = b.cast(counts, dtypes.int64)
    return b.gather(b.iota(size), b.where(b.lt(index, least), b.size_as(size, dtypes.int64), index), 0)


def check_within(x: Value, shape: Sequence[Dim]) -> Sequence[Dim]:
    """ShapeError where a tensor would not broadcast to a shape, or make it larger; the dims of it that x has."""
    own = shape[max(len(shape) - x.rank, 0) :]
    if x.rank > len(shape) or any(d != 1 and never_equal(d, s) for d, s in zip(x.shape, own, strict=True)):
        raise ShapeError(f"{x.t} does not broadcast to {list(shape)}")
    return own


def within(b: Builder, x: Value, shape: Sequence[Dim]) -> Value:
    """A tensor that is to be broadcast to a shape, and not to make it larger. ShapeError where it would."""
    own = check_within(x, shape)
    return b.expand(x, [1 if d == 1 else s for d, s in zip(x.shape, own, strict=True)])


def per_channel(b: Builder, v: Value, x: Value) -> Value:
    """A vector [C], or of one number for all, along axis 1 of a tensor x; it must not make that larger."""
    if v.rank != 1 or not x.rank or (x.rank > 1 and v.shape != (1,) and never_equal(v.shape[0], x.shape[1])):
        raise ShapeError(f"{v.t} is no vector with a number for each channel of {x.t}")
    return within(b, b.reshape(v, (1, *v.shape, *(1,) * (x.rank - 2))), x.shape) if x.rank > 1 else v


def of_shape(b: Builder, x: Value, shape: Sequence[Dim], what: str) -> Value:
    """x, which has to have that shape. ShapeError where it has not; where the run tells, an error of the run.

    A size that turns out to be 1 only then is broadcast.
    """
    if x.rank != len(shape) or any(never_equal(d, s) for d, s in zip(x.shape, shape, strict=True)):
        raise ShapeError(f"{what} is {x.t}, but has to be {list(shape)}")
    return b.expand(x, shape)


def per_last(b: Builder, v: Value, x: Value, what: str) -> Value:
    """A vector with a number for each element of the last axis of x."""
    return of_shape(b, v, x.shape[-1:], what)


def is_narrow(dtype: DType) -> bool:
    """A float type in which sums lose digits, so that they are computed in float32."""
    return dtype.is_float and dtype.bits < 32


def widened(b: Builder, x: Value) -> Value:
    """float16 and bfloat16 as float32; everything else as it is."""
    return b.cast(x, dtypes.float32) if is_narrow(x.dtype) else x


def limits(dtype: DType) -> tuple[int, int]:
    """Least and greatest value of an integer type, four and two bits wide ones too."""
    return dtype.limits


def lowest(dtype: DType) -> float | int:
    """The neutral element of max."""
    return -np.inf if dtype.is_float else limits(dtype)[0]


def flat_at_zero(b: Builder, root: Callable[[Value], Value], x: Value) -> Value:
    """A root of x, none of which is negative; at zero, where it is infinitely steep, its derivative counts as 0."""
    if not b.differentiable:
        return root(x)
    zero = b.eq(x, 0.0)
    return b.where(zero, 0.0, root(b.where(zero, 1.0, x)))


def rounded(b: Builder, x: Value) -> Value:
    """A float product that is rounded before it is added to anything.

    Compilers contract a product and a sum to one fused operation; none does so through a maximum, and that with the
    least finite number changes no product but -inf.
    """
    return b.max(x, -float(np.finfo(np.float32).max))


def merge_axes(b: Builder, x: Value, axis: int) -> Value:
    """[d0, ..., dn] as [d0 * ... * d(axis-1), d(axis) * ... * dn]."""
    lead: Dim = 1
    tail: Dim = 1
    for d in x.shape[:axis]:
        lead = lead * d
    for d in x.shape[axis:]:
        tail = tail * d
    return b.reshape(x, (lead, tail))


def negative(b: Builder, x: Value) -> Value:
    """Whether the sign bit is set: of -0.0 and of some NaN too."""
    integer = {32: dtypes.int32, 64: dtypes.int64, 16: dtypes.int16, 8: dtypes.int8}[x.dtype.bits]
    return b.lt(b.bitcast(x, integer), 0)


def floor_divide(b: Builder, x: Value, y: Value) -> Value:
    """As Python divides: of floats by way of the remainder, so that 1.0 // 0.1 is 9."""
    zero = b.scalar(0, x.dtype)
    if x.dtype.is_integer:
        quotient = b.div(x, y)
        inexact = b.not_(b.eq(b.mul(quotient, y), x))
        return b.sub(quotient, b.cast(b.and_(inexact, b.one("xor", b.lt(x, zero), b.lt(y, zero))), x.dtype))
    rest = b.binary("fmod", x, y)
    turned = b.and_(b.not_(b.eq(rest, 0.0)), b.one("xor", b.lt(rest, zero), b.lt(y, zero)))
    quotient = b.sub(b.div(b.sub(x, rest), y), b.cast(turned, x.dtype))
    floor = b.floor(quotient)
    floor = b.add(floor, b.cast(b.lt(0.5, b.sub(quotient, floor)), x.dtype))
    plain = b.div(x, y)
    of_zero = b.where(negative(b, plain), b.scalar(-0.0, x.dtype), 0.0)
    return b.where(b.eq(y, 0.0), plain, b.where(b.eq(quotient, 0.0), of_zero, floor))
