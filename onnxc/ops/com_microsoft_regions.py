"""onnxruntime's contrib operators for regions of images, and for paddings that are inputs."""

from __future__ import annotations

from onnxc.errors import ModelError, ShapeError
from onnxc.ir.expr import Dim
from onnxc.ir.graph import Value
from onnxc.ops.com_microsoft import MS
from onnxc.ops.conv import conv_transpose
from onnxc.ops.registry import op
from onnxc.ops.sampling import Tap, weighted_sum
from onnxc.primitives.builder import Builder


@op("CropAndResize", 1, domain=MS)
def crop_and_resize(
    b: Builder, x: Value, rois: Value, batch_indices: Value, crop_size: Value, *,
    extrapolation_value: float = 0.0, mode: str = "bilinear",
) -> Value:  # fmt: skip
    """Regions [y1, x1, y2, x2], of 0 to 1 from the first pixel to the last, of the images that they name.

    [regions, C, crop height, crop width]; what lies outside of the image is `extrapolation_value`.
    """
    if mode not in ("bilinear", "nearest"):
        raise ModelError(f"CropAndResize has the mode {mode!r}; bilinear and nearest exist")
    if x.rank != 4 or rois.rank != 2:
        raise ShapeError(f"CropAndResize takes images [N, C, H, W] and regions [M, 4], not {x.t} and {rois.t}")
    height, width = b.static_ints(crop_size, "the crop_size of CropAndResize")
    if min(height, width) < 1:
        raise ModelError(f"CropAndResize: the crop_size {height} x {width} must be positive")
    count = rois.shape[0]
    top, left, bottom, right = (b.reshape(p, (count, 1)) for p in b.split(rois, 1, [1] * 4))
    rows = b.reshape(_spread(b, top, bottom, height, x.shape[2]), (count, height, 1))
    columns = b.reshape(_spread(b, left, right, width, x.shape[3]), (count, 1, width))
    taps, inside = [], []
    for at, size in ((rows, x.shape[2]), (columns, x.shape[3])):
        last = b.sub(b.size_as(size, at.dtype), 1.0)
        inside.append(b.and_(b.le(b.scalar(0.0, at.dtype), at), b.le(at, last)))
        taps.append(_taps(b, b.expand(at, (count, height, width)), last, mode))
    y = weighted_sum(b, x, taps, images=batch_indices)
    seen = b.reshape(b.and_(*inside), (count, 1, height, width))
    return b.where(seen, y, extrapolation_value)


def _spread(b: Builder, start: Value, end: Value, steps: int, size: Dim) -> Value:
    """[regions, steps]: positions from `start` to `end`, of 0 to 1; a single one lies between them."""
    last = b.sub(b.size_as(size, start.dtype), 1.0)
    if steps == 1:
        return b.mul(b.mul(b.add(start, end), 0.5), last)
    step = b.div(b.mul(b.sub(end, start), last), float(steps - 1))
    return b.add(b.mul(start, last), b.mul(b.cast(b.iota(steps), start.dtype), step))


def _taps(b: Builder, at: Value, last: Value, mode: str) -> list[Tap]:
    place = b.clip(at, 0.0, last)
    low = b.floor(place)
    share = b.sub(place, low)
    if mode == "nearest":  # halves go up
        return [Tap(b.where(b.lt(share, 0.5), low, b.add(low, 1.0)), None)]
    return [Tap(low, b.sub(1.0, share)), Tap(b.min(b.add(low, 1.0), last), share)]


@op("ConvTransposeWithDynamicPads", 1, domain=MS)
def conv_transpose_with_dynamic_pads(
    b: Builder, x: Value, w: Value, pads: Value | None = None, bias: Value | None = None, *,
    auto_pad: str = "NOTSET", dilations: list[int] | None = None, group: int = 1,
    kernel_shape: list[int] | None = None, output_padding: list[int] | None = None, strides: list[int] | None = None,
) -> Value:  # fmt: skip
    """ConvTranspose, with the pads as an input."""
    given = None if pads is None else [*b.static_ints(pads, "the pads of ConvTransposeWithDynamicPads")]
    return conv_transpose(
        b, x, w, bias, auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape,
        output_padding=output_padding, pads=given, strides=strides,
    )  # fmt: skip
