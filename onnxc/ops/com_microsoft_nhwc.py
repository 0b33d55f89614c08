"""onnxruntime's convolutions and pools of channels-last images, and its quantized pools."""

from __future__ import annotations

import math
from collections.abc import Callable

from onnxc.ir.expr import Dim, never_equal
from onnxc.ir.graph import Value
from onnxc.ops.com_microsoft import MS, fused_conv
from onnxc.ops.com_microsoft_quantized import qlinear_global_average_pool, quantize_with_point
from onnxc.ops.common import rounded
from onnxc.ops.conv import window_of
from onnxc.ops.pooling import average_pool, max_pool, pool, with_ceil
from onnxc.ops.quantization import dequantize_linear, qlinear_conv
from onnxc.ops.registry import Flag, op
from onnxc.primitives.builder import Builder


def of_channels_last(b: Builder, x: Value, define: Callable[[Value], Value]) -> Value:
    """What an op of channels-first images [N, C, spatial...] gives for channels-last ones."""
    first = b.transpose(x, (0, x.rank - 1, *range(1, x.rank - 1)))
    y = define(first)
    return b.transpose(y, (0, *range(2, y.rank), 1))


@op("QLinearConv", 1, domain=MS)
def qlinear_conv_ms(
    b: Builder, x: Value, x_scale: Value, x_zero: Value, w: Value, w_scale: Value, w_zero: Value,
    scale: Value, zero: Value, bias: Value | None = None, *, auto_pad: str = "NOTSET", channels_last: Flag = 0,
    dilations: list[int] | None = None, group: int = 1, kernel_shape: list[int] | None = None,
    pads: list[int] | None = None, strides: list[int] | None = None,
) -> Value:  # fmt: skip
    """ONNX's QLinearConv, for images of either order; weights are [M, C / group, spatial...] in both."""

    def define(image: Value) -> Value:
        return qlinear_conv(
            b, image, x_scale, x_zero, w, w_scale, w_zero, scale, zero, bias, auto_pad=auto_pad,
            dilations=dilations, group=group, kernel_shape=kernel_shape, pads=pads, strides=strides,
        )  # fmt: skip

    return _in_order(b, x, channels_last, define)


def _in_order(b: Builder, x: Value, last: int, define: Callable[[Value], Value]) -> Value:
    return of_channels_last(b, x, define) if last else define(x)


@op("QLinearAveragePool", 1, domain=MS)
def qlinear_average_pool(
    b: Builder, x: Value, x_scale: Value, x_zero: Value | None, scale: Value, zero: Value | None = None, *,
    auto_pad: str = "NOTSET", ceil_mode: Flag = 0, channels_last: Flag = 0, count_include_pad: Flag = 0,
    kernel_shape: list[int], pads: list[int] | None = None, strides: list[int] | None = None,
) -> Value:  # fmt: skip
    def define(image: Value) -> Value:
        if ceil_mode and count_include_pad:  # other than AveragePool, it counts what ceil_mode adds
            spatial = image.shape[2:]
            window = with_ceil(spatial, window_of(spatial, kernel_shape, strides, None, pads, auto_pad))
            return b.div(pool(b, "window_sum", image, window), math.prod(kernel_shape))
        return average_pool(
            b, image, kernel_shape=kernel_shape, auto_pad=auto_pad, ceil_mode=ceil_mode,
            count_include_pad=count_include_pad, pads=pads, strides=strides,
        )  # fmt: skip

    spatial = x.shape[1:-1] if channels_last else x.shape[2:]
    if tuple(spatial) == tuple(kernel_shape) and not any(pads or ()) and auto_pad in ("NOTSET", "VALID"):
        return qlinear_global_average_pool(b, x, x_scale, x_zero, scale, zero, channels_last=channels_last)
    real = rounded(b, dequantize_linear(b, x, x_scale, x_zero))
    mean = _in_order(b, real, channels_last, define)
    return quantize_with_point(b, mean, scale, zero, x.dtype)


@op("NhwcMaxPool", 1, domain=MS)
def nhwc_max_pool(
    b: Builder, x: Value, *, auto_pad: str = "NOTSET", ceil_mode: Flag = 0, dilations: list[int] | None = None,
    kernel_shape: list[int], pads: list[int] | None = None, strides: list[int] | None = None,
) -> Value:  # fmt: skip
    def define(image: Value) -> Value:
        (y,) = max_pool(
            b, image, kernel_shape=kernel_shape, auto_pad=auto_pad, ceil_mode=ceil_mode, dilations=dilations,
            pads=pads, strides=strides, n_outputs=1,
        )  # fmt: skip
        return y

    return of_channels_last(b, x, define)


@op("NhwcFusedConv", 1, domain=MS)
def nhwc_fused_conv(
    b: Builder, x: Value, w: Value, bias: Value | None = None, z: Value | None = None, *,
    activation: str = "", activation_params: list[float] | None = None, auto_pad: str = "NOTSET",
    dilations: list[int] | None = None, group: int = 1, kernel_shape: list[int] | None = None,
    pads: list[int] | None = None, strides: list[int] | None = None,
) -> Value:  # fmt: skip
    """FusedConv of a channels-last image; weights are [M, C / group, spatial...]."""
    added = None if z is None else b.transpose(z, (0, z.rank - 1, *range(1, z.rank - 1)))

    def define(image: Value) -> Value:
        return fused_conv(
            b, image, w, bias, added, activation=activation, activation_params=activation_params,
            auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape, pads=pads,
            strides=strides,
        )  # fmt: skip

    return of_channels_last(b, x, define)


@op("NhwcConv", 1, domain=MS)
def nhwc_conv(
    b: Builder, x: Value, w: Value, bias: Value | None = None, *, auto_pad: str = "NOTSET",
    dilations: list[int] | None = None, group: int = 1, kernel_shape: list[int] | None = None,
    pads: list[int] | None = None, strides: list[int] | None = None,
) -> Value:  # fmt: skip
    """Convolution of a channels-last image, with weights [M, spatial..., C / group].

    So onnxruntime's optimizer writes them and its kernels read them. Its documentation says [M, C / group,
    spatial...]: such weights are taken too, where their sizes cannot be meant in the first order.
    """
    window = None if kernel_shape is None else tuple(kernel_shape)
    inner = w.rank == x.rank > 2 and _fits(w.shape[-1], group, x) and window in (None, tuple(w.shape[1:-1]))
    weights = b.transpose(w, (0, w.rank - 1, *range(1, w.rank - 1))) if inner else w
    return nhwc_fused_conv(
        b, x, weights, bias, auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape,
        pads=pads, strides=strides,
    )  # fmt: skip


def _fits(channels: Dim, group: int, x: Value) -> bool:
    return not never_equal(channels * group, x.shape[-1])
