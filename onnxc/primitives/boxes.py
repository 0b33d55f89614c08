"""Non-maximum suppression: the best boxes of each class that do not overlap a better one by much."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxc.errors import ShapeError
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, never_equal
from onnxc.ir.graph import Attrs
from onnxc.ir.types import TensorType
from onnxc.primitives.base import Kind, Primitive, register


def _nms(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    """Boxes float32 [batch, n, 4], scores float32 [batch, classes, n], most int64 [], overlap float32 [] and, where
    boxes need more than a score, least float32 [] to rows (batch, class, box), int64 [batch * classes * room, 3], of
    which the first so many count: int64 [].

    For each batch and class, the boxes by score (of equal ones the first) that share no more than `overlap` of their
    area (intersection over union) with one that was taken before; at most `most` and `room`, which is an attribute.
    `center` says that boxes are [x, y, width, height]; else they are [y, x, y, x] of two corners.
    """
    boxes, scores, *numbers = types
    if boxes.rank != 3 or scores.rank != 3 or never_equal(boxes.shape[2], 4):
        raise ShapeError(f"NonMaxSuppression of boxes {boxes} and scores {scores}")
    pairs = ((boxes.shape[0], scores.shape[0]), (boxes.shape[1], scores.shape[2]))
    if any(never_equal(a, b) for a, b in pairs):
        raise ShapeError(f"NonMaxSuppression of boxes {boxes} and scores {scores}")
    wanted = [dtypes.int64, dtypes.float32, dtypes.float32][: len(numbers)]
    if [boxes.dtype, scores.dtype] != [dtypes.float32] * 2 or [t.dtype for t in numbers] != wanted:
        raise ShapeError(f"NonMaxSuppression of {', '.join(map(str, types))}")
    rows = scores.shape[0] * scores.shape[1] * attrs["room"]
    return TensorType(dtypes.int64, (rows, 3)), TensorType(dtypes.int64, ())


def _nms_eval(
    boxes: np.ndarray, scores: np.ndarray, most: np.ndarray, overlap: np.ndarray, least: np.ndarray | None = None, *,
    center: bool, room: Dim,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    assert isinstance(room, int)
    batches, classes, _ = scores.shape
    corners = [_corners(boxes[b], center) for b in range(batches)]
    rows = [
        (b, c, i)
        for b in range(batches)
        for c in range(classes)
        for i in _selected(corners[b], scores[b, c], min(int(most), room), np.float32(overlap), least)
    ]
    out = np.zeros((batches * classes * room, 3), np.int64)
    out[: len(rows)] = np.array(rows, np.int64).reshape(-1, 3)
    return out, np.asarray(len(rows), np.int64)


def _corners(boxes: np.ndarray, center: bool) -> np.ndarray:
    """Rows of x0, x1, y0, y1."""
    a, b, c, d = boxes.T
    if center:
        return np.stack([a - c / 2, a + c / 2, b - d / 2, b + d / 2], 1)
    return np.stack([np.minimum(b, d), np.maximum(b, d), np.minimum(a, c), np.maximum(a, c)], 1)


def _selected(
    corners: np.ndarray, scores: np.ndarray, most: int, overlap: np.float32, least: np.ndarray | None
) -> list[int]:
    order = np.argsort(-scores, kind="stable")
    found: list[int] = []
    for i in order:
        if len(found) >= most or (least is not None and not scores[i] > least):
            break
        if not any(_shared(corners[i], corners[k]) > overlap for k in found):
            found.append(int(i))
    return found


def _shared(p: np.ndarray, q: np.ndarray) -> np.float32:
    """Intersection over union; 0 where there is none."""
    width, height = (min(p[k + 1], q[k + 1]) - max(p[k], q[k]) for k in (0, 2))
    both = width * height
    areas = [(z[1] - z[0]) * (z[3] - z[2]) for z in (p, q)]
    union = areas[0] + areas[1] - both
    if width <= 0 or height <= 0 or min(both, *areas, union) <= 0:
        return np.float32(0)
    return np.float32(both / union)


register(Primitive("nms", Kind.OPAQUE, _nms, _nms_eval))
