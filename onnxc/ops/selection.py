"""Selections whose size depends on data: different elements, boxes that do not overlap."""

from __future__ import annotations

import numpy as np

from onnxc.errors import ModelError, NeedsContentError
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, minimum
from onnxc.ir.graph import Value
from onnxc.ir.types import TensorType
from onnxc.ops.control import scalar
from onnxc.ops.registry import Flag, op
from onnxc.primitives.builder import Builder, constant_of
from onnxc.primitives.host import on_host


@op("Unique", 11)
def unique(b: Builder, x: Value, *, axis: int | None = None, sorted: Flag = 1) -> list[Value | None]:
    """Different elements, or slices along an axis: values, first places, which each element is, and how often."""
    if b.run_time is None:
        raise NeedsContentError("the size of Unique depends on data, which is not supported here", x)
    count = b.run_time.size()
    at = None if axis is None else b.axis(axis, x.rank)
    shape = (count,) if at is None else (*x.shape[:at], count, *x.shape[at + 1 :])
    places = TensorType(dtypes.int64, (count,))
    whole = TensorType(dtypes.int64, (x.t.size if at is None else x.shape[at],))
    types = [x.t.with_shape(shape), places, whole, places]
    return [*on_host(b, "unique", [x], types, axis=at, sorted=sorted)]


@op("NonMaxSuppression", 10)
def non_max_suppression(
    b: Builder, boxes: Value, scores: Value, most: Value | None, overlap: Value | None, least: Value | None, *,
    center_point_box: Flag = 0,
) -> Value:  # fmt: skip
    """For each class the best boxes that do not overlap a better one, rows of (batch, class, box)."""
    known = [None if v is None else constant_of(v) for v in (most, overlap)]
    limit, share = (
        0 if v is None else None if c is None else c.reshape(-1)[0] for v, c in zip((most, overlap), known, strict=True)
    )
    if limit is not None and limit <= 0:  # as where it is left out
        return b.constant(np.empty((0, 3), np.int64))
    if share is not None and not 0 <= share <= 1:
        raise ModelError(f"NonMaxSuppression has an iou_threshold of {share}, which is not in 0 to 1")
    if b.run_time is None:
        raise NeedsContentError("the number of boxes of NonMaxSuppression depends on data", scores)
    assert most is not None
    room: Dim = boxes.shape[1]
    room = room if limit is None else minimum(int(limit), room)
    given = [
        b.cast(scalar(b, most), dtypes.int64),
        b.scalar(0.0, dtypes.float32) if overlap is None else scalar(b, overlap),
        *([] if least is None else [scalar(b, least)]),
    ]
    rows, count = b.emit("nms", [boxes, scores, *given], {"center": bool(center_point_box), "room": room})
    (found,) = b.extents(count, "how many boxes are selected")
    return b.slice(rows, 0, 0, found)
