"""Linear quantization, and integer matmul and convolution."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import numpy as np

from onnxc.errors import ModelError, ShapeError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, ceildiv, floordiv, prod
from onnxc.ir.graph import Value
from onnxc.ops.cast import convert
from onnxc.ops.common import dtype_of, limits, of_shape, per_channel, static_shape, widened, within
from onnxc.ops.conv import Window, check_pads, convolve, kernel_of, window_of
from onnxc.ops.matmul import matmul
from onnxc.ops.registry import Flag, op
from onnxc.ops.resize import repeat_each
from onnxc.primitives.builder import Builder, constant_of

LEAST_PRODUCT = (4, 16)  # rows and depth of a matrix product that a convolution by run-time weights is worth
MOST_TAPS = 128  # of such a convolution's kernel: each is a slice of the image
MOST_COLUMNS = 1 << 25  # elements of all windows of several images, each of which takes up to three bytes
WHOLE = "whole"  # a hint of casts: their operands are whole numbers that the type has


def spread(b: Builder, v: Value, x: Value, axis: int, block: int) -> Value:
    """A scale or zero point made to broadcast to x: per tensor, per axis, or per block of an axis."""
    if v.t.size == 1 and (v.rank <= 1 or not block):
        return b.reshape(v, ())
    axis = b.axis(axis, x.rank)
    if v.rank == 1 and not block:
        return within(b, b.reshape(v, (*v.shape, *(1,) * (x.rank - 1 - axis))), x.shape)
    if v.rank != x.rank:
        raise ShapeError(f"a scale {v.t} does not fit {x.t}")
    if block:
        blocks = [ceildiv(d, block) if i == axis else d for i, d in enumerate(x.shape)]
        v = of_shape(b, v, blocks, f"a scale or zero point of blocks of {block} of {x.t}")
    each = block or ceildiv(x.shape[axis], v.shape[axis])
    wide = repeat_each(b, v, axis, each)
    return b.slice(wide, axis, 0, x.shape[axis])


def is_zero(v: Value | None) -> bool:
    """True for a zero point that is absent, or constant and zero."""
    array = constant_of(v)
    return v is None or (array is not None and not array.astype(np.float32).any())


def to_quantized(b: Builder, x: Value, zero: Value | None, to: DType, saturate: bool = True) -> Value:
    """round(x) + zero, limited to the type: x is a float that is already divided by the scale.

    Of an integer type NaN becomes the least number, as in onnxruntime. Derivatives of `whole_of` go through the
    rounding, where the limits leave the number as it is.
    """
    if to.is_float:
        return convert(b, x if is_zero(zero) or zero is None else b.add(x, b.cast(zero, x.dtype)), to, saturate)
    y = b.derived(b.round(x), "through", x)
    if zero is not None and not is_zero(zero):
        y = b.add(y, b.cast(zero, y.dtype))
    low, high = (float(v) for v in limits(to))
    more = b.le(low, y) if b.differentiable else b.lt(low, y)  # at the limits the derivative is 1
    whole = b.min(b.where(more, y, low), high, tie=1.0)
    return b.one("cast", whole, to=to, **{WHOLE: True}) if b.differentiable else b.cast(whole, to)


def whole_of(b: Builder, x: Value) -> Value:
    """What :func:`to_quantized` gave as an integer, as the float that it was, so that there is a derivative; else x."""
    rounded = b.differentiable and x.node is not None and x.node.attrs.get(WHOLE)
    return x.node.operands[0] if rounded and x.node is not None else x


def quantize(
    b: Builder, x: Value, scale: Value, zero: Value | None, axis: int, block: int, to: DType, saturate: bool,
    precision: DType | None = None,
) -> Value:  # fmt: skip
    """saturate(round(x / scale) + zero)."""
    width = precision or scale.dtype
    if zero is not None and scale.rank == 0:  # a zero point of one element is one for all
        zero = b.reshape(zero, ())
    ratio = b.div(b.cast(x, width), spread(b, b.cast(scale, width), x, axis, block))
    point = None if zero is None else spread(b, zero, x, axis, block)
    return to_quantized(b, widened(b, ratio), point, to, saturate)


@op("QuantizeLinear", 1, domain="com.microsoft")
@op("QuantizeLinear", 10)
def quantize_linear(
    b: Builder, x: Value, scale: Value, zero: Value | None = None, *, axis: int = 1, block_size: int = 0,
    output_dtype: int = 0, precision: int = 0, saturate: Flag = 1,
) -> Value:  # fmt: skip
    to = zero.dtype if zero is not None else dtype_of(output_dtype, "QuantizeLinear") if output_dtype else dtypes.uint8
    exact = dtype_of(precision, "QuantizeLinear") if precision else None
    return quantize(b, x, scale, zero, axis, block_size, to, bool(saturate), exact)


def centered(b: Builder, x: Value, zero: Value | None) -> Value:
    """x - zero in int32, which holds the difference of narrower integers exactly."""
    wide = b.cast(x, dtypes.int32)
    return wide if zero is None or is_zero(zero) else b.sub(wide, within(b, b.cast(zero, dtypes.int32), x.shape))


@op("DequantizeLinear", 1, domain="com.microsoft")
@op("DequantizeLinear", 10)
def dequantize_linear(
    b: Builder, x: Value, scale: Value, zero: Value | None = None, *, axis: int = 1, block_size: int = 0,
    output_dtype: int = 0,
) -> Value:  # fmt: skip
    """(x - zero) * scale. The derivative of what has been quantized just before goes through to what that was."""
    to = dtype_of(output_dtype, "DequantizeLinear") if output_dtype else scale.dtype
    factor = widened(b, spread(b, scale, x, axis, block_size))
    point = None if zero is None else spread(b, zero, x, axis, block_size)
    if x.dtype.is_float:
        whole = b.cast(x, factor.dtype)
        whole = whole if point is None or is_zero(zero) else b.sub(whole, b.cast(point, factor.dtype))
        return b.cast(b.mul(whole, factor), to)
    whole = whole_of(b, x)
    if whole is not x:
        less = whole if point is None or is_zero(zero) else b.sub(whole, b.cast(point, whole.dtype))
        return b.cast(b.mul(b.cast(less, factor.dtype), factor), to)
    point = None if is_zero(zero) or point is None else b.cast(point, dtypes.int32)
    weights = constant_of(x) is not None and x.rank > 1
    with b.unfolded() if weights else nullcontext():  # the pass "integer-products" wants to see them as they are
        return b.cast(b.mul(b.cast(centered(b, x, point), factor.dtype), factor), to)


@op("DynamicQuantizeLinear", 11)
def dynamic_quantize_linear(b: Builder, x: Value) -> list[Value]:
    """uint8 with a scale and zero point that span the tensor's own range and zero."""
    axes = range(x.rank)
    high, low = b.max(b.reduce("max", x, axes), 0.0), b.min(b.reduce("min", x, axes), 0.0)
    return list(quantized_from(b, x, low, high))


def quantized_from(b: Builder, x: Value, low: Value, high: Value) -> tuple[Value, Value, Value]:
    """x as uint8 over the range from low to high, which has zero in it; the scale and the zero point."""
    scale = b.div(b.sub(high, low), 255.0)
    scale = b.where(b.eq(scale, 0.0), 1.0, scale)
    zero = b.clip(b.round(b.clip(b.div(b.neg(low), scale), 0.0, 255.0)), 0.0, 255.0)
    zero = b.cast(zero, dtypes.uint8)
    return to_quantized(b, b.div(x, scale), zero, dtypes.uint8), scale, zero


def _row_zero(b: Builder, zero: Value | None) -> Value | None:
    """The zero point of a left operand: one for each row where it is a vector."""
    return b.reshape(zero, (*zero.shape, 1)) if zero is not None and zero.rank == 1 and zero.t.size != 1 else zero


def integer_product(b: Builder, x: Value, y: Value, x_zero: Value | None, y_zero: Value | None) -> Value:
    """(x - x_zero) @ (y - y_zero) in int32."""
    return matmul(b, centered(b, x, _row_zero(b, _scalar(b, x_zero))), centered(b, y, _scalar(b, y_zero)))


def _scalar(b: Builder, v: Value | None) -> Value | None:
    """A single number without axes, which would add some to what it is combined with."""
    return b.reshape(v, ()) if v is not None and v.t.size == 1 else v


@op("MatMulInteger", 10)
def matmul_integer(
    b: Builder, x: Value, y: Value, x_zero: Value | None = None, y_zero: Value | None = None,
) -> Value:  # fmt: skip
    return integer_product(b, x, y, x_zero, y_zero)


@op("QLinearMatMul", 10)
def qlinear_matmul(
    b: Builder, x: Value, x_scale: Value, x_zero: Value, y: Value, y_scale: Value, y_zero: Value,
    scale: Value, zero: Value,
) -> Value:  # fmt: skip
    acc = b.cast(integer_product(b, x, y, x_zero, y_zero), dtypes.float32)
    row, column, out = (b.cast(v, dtypes.float32) for v in (x_scale, y_scale, scale))
    factor = b.div(b.mul(_row_zero(b, _scalar(b, row)) or row, _scalar(b, column) or column), _scalar(b, out) or out)
    return to_quantized(b, b.mul(acc, within(b, factor, acc.shape)), _scalar(b, zero), zero.dtype)


def _channel_zero(b: Builder, zero: Value | None, rank: int) -> Value | None:
    """A zero point of weights, one for each output channel where it is a vector."""
    zero = _scalar(b, zero)
    return zero if zero is None or zero.rank == 0 else b.reshape(zero, (*zero.shape, *(1,) * (rank - 1)))


def integer_convolution(
    b: Builder, x: Value, w: Value, x_zero: Value | None, w_zero: Value | None, group: int, auto_pad: str,
    strides: list[int] | None, dilations: list[int] | None, pads: list[int] | None,
) -> Value:  # fmt: skip
    """The convolution of (x - x_zero) and (w - w_zero) in int32; padding counts as x_zero."""
    window = window_of(x.shape[2:], static_shape(w.shape[2:], "the kernel"), strides, dilations, pads, auto_pad)
    if constant_of(w) is None and _is_product(x, w, window, group):
        return _product_of_windows(b, x, w, _scalar(b, x_zero), _scalar(b, w_zero), window, group)
    weights = centered(b, w, _channel_zero(b, w_zero, w.rank))
    return convolve(b, centered(b, x, _scalar(b, x_zero)), weights, window, group)


def _is_product(x: Value, w: Value, window: Window, group: int) -> bool:
    """Whether a convolution is computed as `_product_of_windows`: of sizes that are known, and fit, and some depth."""
    if x.rank != w.rank or not _not_negative(*x.shape, *w.shape, *window.low, *window.high):
        return False
    fits = group > 0 and w.shape[1] * group == x.shape[1] and w.shape[0] % group == 0 and 0 not in w.shape
    rows, depth = LEAST_PRODUCT
    spare = w.shape[0] - rows * group, prod(w.shape[1:]) - depth, MOST_TAPS - prod(window.kernel)
    of_bytes = (x.dtype.bits, w.dtype.bits) == (8, 8)
    return fits and of_bytes and _not_negative(*spare, *(n - 1 for n in window.counts(x.shape[2:])))


def _not_negative(*sizes: Dim) -> bool:
    """Whether all are known numbers, none of them negative."""
    return all(isinstance(d, int) and d >= 0 for d in sizes)


def _product_of_windows(
    b: Builder, x: Value, w: Value, x_zero: Value | None, w_zero: Value | None, window: Window, group: int
) -> Value:
    """A convolution as a matrix product, whose kernel takes weights that are not known before the run; one image after
    the other, where all windows at once would take much memory.
    """
    maps, depth, count = w.shape[0], w.shape[1], window.counts(x.shape[2:])
    elements = prod((*x.shape[:2], *window.kernel, *count))
    if x.shape[0] != 1 and isinstance(elements, int) and elements > MOST_COLUMNS:

        def image(i: Builder, _: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
            own = i.reshape(slices[0], (1, *x.shape[1:]))
            found = _product_of_windows(i, own, w, x_zero, w_zero, window, group)
            return [], [i.reshape(found, (maps, *count))]

        return b.scan([], [x], x.shape[0], image)[1][0]
    padded = b.pad(x, (0, 0, *window.low), (0, 0, *window.high), 0 if x_zero is None else x_zero)
    parts = []
    for tap in product(*map(range, window.kernel)):
        part = padded
        for axis, (i, d, n, s) in enumerate(zip(tap, window.dilations, count, window.strides, strict=True), 2):
            part = b.slice(part, axis, i * d, i * d + (n - 1) * s + 1, s)
        parts.append(b.reshape(part, (x.shape[0], group, depth, 1, prod(count))))
    columns = b.reshape(b.concat(parts, 3), (x.shape[0], group, depth * len(parts), prod(count)))
    rows = b.reshape(w, (group, floordiv(maps, group), depth * len(parts)))
    if w_zero is not None and w_zero.rank:
        w_zero = b.reshape(w_zero, (group, floordiv(maps, group), 1))
    acc = b.matmul(centered(b, rows, w_zero), centered(b, columns, x_zero))
    return b.reshape(acc, (x.shape[0], maps, *count))


@op("ConvInteger", 10)
def conv_integer(
    b: Builder, x: Value, w: Value, x_zero: Value | None = None, w_zero: Value | None = None, *,
    auto_pad: str = "NOTSET", dilations: list[int] | None = None, group: int = 1,
    kernel_shape: list[int] | None = None, pads: list[int] | None = None, strides: list[int] | None = None,
) -> Value:  # fmt: skip
    kernel_of("ConvInteger", x, w, group, kernel_shape)
    check_pads("ConvInteger", pads, auto_pad)
    return integer_convolution(b, x, w, x_zero, w_zero, group, auto_pad, strides, dilations, pads)


@op("QLinearConv", 10)
def qlinear_conv(
    b: Builder, x: Value, x_scale: Value, x_zero: Value, w: Value, w_scale: Value, w_zero: Value,
    scale: Value, zero: Value, bias: Value | None = None, *, auto_pad: str = "NOTSET",
    dilations: list[int] | None = None, group: int = 1, kernel_shape: list[int] | None = None,
    pads: list[int] | None = None, strides: list[int] | None = None,
) -> Value:  # fmt: skip
    """The bias is int32 in units of x_scale * w_scale."""
    if zero is None:
        raise ModelError("QLinearConv needs the zero point of its output")
    kernel_of("QLinearConv", x, w, group, kernel_shape)
    check_pads("QLinearConv", pads, auto_pad)
    acc = integer_convolution(b, x, w, x_zero, w_zero, group, auto_pad, strides, dilations, pads)
    if bias is not None:
        acc = b.add(acc, per_channel(b, bias, acc))
    w_scales = _channel_zero(b, w_scale, w.rank - 1)
    assert w_scales is not None
    factor = b.div(b.mul(b.reshape(x_scale, ()), w_scales), b.reshape(scale, ()))
    return to_quantized(
        b, b.mul(b.cast(acc, dtypes.float32), within(b, factor, acc.shape)), _scalar(b, zero), zero.dtype
    )
