"""Operators that were experimental until opset 9 and are in no later one. Models of that time have them, and
onnxruntime still runs them.
"""

from __future__ import annotations

import numpy as np

from onnxc.errors import ModelError, ShapeError
from onnxc.ir.expr import never_equal
from onnxc.ir.graph import Value
from onnxc.ops.activation import softplus, thresholded_relu
from onnxc.ops.normalization import mean_variance_normalization
from onnxc.ops.registry import Flag, op
from onnxc.ops.slicing import slice_10
from onnxc.primitives.builder import Builder


@op("Affine", 1, 9)
def affine(b: Builder, x: Value, *, alpha: float = 1.0, beta: float = 0.0) -> Value:
    return b.add(b.mul(x, alpha), beta)


@op("Scale", 1, 9)
def scale_1(b: Builder, x: Value, *, scale: float = 1.0) -> Value:
    return b.mul(x, scale)


@op("ScaledTanh", 1, 9)
def scaled_tanh(b: Builder, x: Value, *, alpha: float, beta: float) -> Value:
    return b.mul(b.tanh(b.mul(x, beta)), alpha)


@op("ParametricSoftplus", 1, 9)
def parametric_softplus(b: Builder, x: Value, *, alpha: float, beta: float) -> Value:
    return b.mul(softplus(b, b.mul(x, beta)), alpha)


@op("ThresholdedRelu", 1, 9)
def thresholded_relu_1(b: Builder, x: Value, *, alpha: float = 1.0) -> Value:
    return thresholded_relu(b, x, alpha=alpha)


@op("ImageScaler", 1, 9)
def image_scaler(b: Builder, x: Value, *, bias: list[float], scale: float = 1.0) -> Value:
    """scale * x + bias of an image [N, C, H, W], with a bias for each channel."""
    if x.rank != 4 or never_equal(x.shape[1], len(bias)):
        raise ShapeError(f"ImageScaler has {len(bias)} biases for the channels of {x.t}")
    offsets = b.constant(np.asarray(bias, x.dtype.numpy).reshape(1, -1, 1, 1))
    return b.add(b.mul(x, scale), offsets)


@op("MeanVarianceNormalization", 1, 8)
def mean_variance_normalization_1(
    b: Builder, x: Value, *, across_channels: Flag = 0, normalize_variance: Flag = 1
) -> Value:
    """[N, C, D...] less the mean, of a channel in all images or of everything, divided by the deviation if asked."""
    axes = [a for a in range(x.rank) if across_channels or a != 1]
    return mean_variance_normalization(b, x, axes=axes) if normalize_variance else b.sub(x, b.mean(x, axes, True))


@op("Crop", 1, 9)
def crop(b: Builder, x: Value, *, border: list[int], scale: list[int] | None = None) -> Value:
    """An image [N, C, H, W] without its border (left, top, right, bottom); `scale` gives the size [H, W] instead of
    the border's last two.
    """
    if x.rank != 4 or len(border) != 4 or len(scale or (0, 0)) != 2:
        raise ShapeError(f"Crop of {x.t} with the border {border}: it takes an image [N, C, H, W] and four borders")
    left, top, right, bottom = border
    height, width = x.shape[2:]
    ends = [height - bottom, width - right] if not scale else [top + scale[0], left + scale[1]]
    for start, end, size in zip((top, left), ends, (height, width), strict=True):
        if start < 0 or any(isinstance(d, int) and d < 0 for d in (end - start, size - end)):
            raise ModelError(f"Crop of {x.t} with the border {border} and the scale {scale} leaves the image")
    return b.slice(b.slice(x, 2, top, ends[0]), 3, left, ends[1])


@op("DynamicSlice", 1, 9)
def dynamic_slice(b: Builder, x: Value, starts: Value, ends: Value, axes: Value | None = None) -> Value:
    return slice_10(b, x, starts, ends, axes)
