"""The maximum over parts of regions of images."""

from __future__ import annotations

import numpy as np

from onnxc.errors import ShapeError
from onnxc.ir.expr import never_equal
from onnxc.ir.graph import Value
from onnxc.ops.common import from_start, widened
from onnxc.ops.registry import op
from onnxc.primitives.builder import Builder


def _whole(b: Builder, x: Value) -> Value:
    """The nearest whole number, halves away from zero."""
    nearest = b.floor(b.add(b.abs(x), 0.5))
    return b.where(b.lt(x, 0.0), b.neg(nearest), nearest)


def _inside(b: Builder, start: Value, end: Value, size: Value, parts: int) -> Value:
    """Which positions of an axis lie in each part of each region: bool [regions, parts, size].

    A region reaches from `start` to `end`, both in it, and has one element at least; parts may overlap by one.
    """
    width = b.div(b.max(b.add(b.sub(end, start), 1.0), 1.0), float(parts))
    number = b.cast(b.iota(parts), width.dtype)
    width, start = (b.reshape(v, (*v.shape, 1)) for v in (width, start))
    low = b.add(b.floor(b.mul(number, width)), start)
    high = b.add(b.unary("ceil", b.mul(b.add(number, 1.0), width)), start)
    low, high = (b.reshape(v, (*v.shape, 1)) for v in (low, high))
    return b.and_(b.le(low, size), b.lt(size, high))


@op("MaxRoiPool", 1)
def max_roi_pool(
    b: Builder, x: Value, rois: Value, *, pooled_shape: list[int], spatial_scale: float = 1.0,
) -> Value:  # fmt: skip
    """[N, C, H, W], regions [R, 5] (image, x1, y1, x2, y2) to [R, C, *pooled_shape]; parts without elements are 0."""
    if x.rank != 4 or rois.rank != 2 or never_equal(rois.shape[1], 5) or len(pooled_shape) != 2:
        raise ShapeError(f"MaxRoiPool of {x.t} and {rois.t} to {list(pooled_shape)}")
    count, (_, channels, rows, columns) = rois.shape[0], x.shape
    boxes = b.reshape(widened(b, rois), (count, 5))  # an open dim: a run finds out
    image, *corners = (b.reshape(b.slice(boxes, 1, k, k + 1), (count,)) for k in range(5))
    x1, y1, x2, y2 = (_whole(b, b.mul(v, spatial_scale)) for v in corners)
    own = b.gather(x, from_start(b, image, x.shape[0]), 0)  # [R, C, H, W]
    across = _inside(b, x1, x2, b.cast(b.iota(columns), boxes.dtype), pooled_shape[1])
    down = _inside(b, y1, y2, b.cast(b.iota(rows), boxes.dtype), pooled_shape[0])
    least = b.scalar(-np.inf, x.dtype)
    # One axis after the other: [R, C, H, 1, W] where [R, 1, 1, parts, W], then the same down the columns.
    across = b.reshape(across, (count, 1, 1, pooled_shape[1], columns))
    lines = b.where(across, b.reshape(own, (count, channels, rows, 1, columns)), least)
    lines = b.swap(b.reduce("max", lines, [4]), 2, 3)  # [R, C, parts across, H]
    down = b.reshape(down, (count, 1, pooled_shape[0], 1, rows))
    cells = b.where(down, b.reshape(lines, (count, channels, 1, pooled_shape[1], rows)), least)
    y = b.reduce("max", cells, [4])
    return b.where(b.eq(y, least), 0.0, y)
