"""NonMaxSuppression, against onnxruntime, which decides what ties and odd boxes mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onnxc
from onnxc.errors import ModelError, RunError
from onnxc.primitives.base import lookup
from tests.staging_harness import check, int64, parsed, same

pytestmark = pytest.mark.every_target

f32 = np.float32
ALL = """g (float[b, n, 4] boxes, float[b, c, n] scores, int64[1] most, float[1] iou, float[1] least) => (y) {
  y = NonMaxSuppression <center_point_box = %d> (boxes, scores, most, iou, least)
}"""


def case(batch: int, classes: int, n: int, most: int, iou: float, least: float, levels: int = 0) -> dict[str, Any]:
    """Random boxes; scores of a few levels have many ties."""
    rng = np.random.default_rng(n + most)
    boxes = rng.random((batch, n, 4)).astype(f32)
    boxes[..., 2:] *= 0.3 if n % 2 else 1
    scores = rng.random((batch, classes, n)).astype(f32) - f32(0.2)
    if levels:
        scores = np.round(scores * levels) / f32(levels)
    numbers = {"most": int64([most]), "iou": f32([iou]), "least": f32([least])}
    return {"boxes": boxes, "scores": scores.astype(f32), **numbers}


CASES = [
    case(1, 1, 1, 1, 0.5, 0.0), case(2, 3, 17, 5, 0.4, 0.0), case(1, 2, 0, 3, 0.5, 0.0), case(2, 3, 17, 0, 0.4, 0.0),
    case(1, 2, 300, 10**6, 0.5, 0.25), case(1, 2, 301, 40, 0.1, -1.0, levels=4), case(1, 1, 2003, 10**6, 0.7, 0.0),
    case(1, 3, 64, 7, 0.0, 0.5), case(1, 3, 64, 7, 1.0, 2.0), case(1, 1, 500, -3, 0.5, 0.0),
]  # fmt: skip


@pytest.mark.parametrize("center", (0, 1))
def test_boxes(center: int) -> None:
    check(ALL % center, *CASES)


@pytest.mark.parametrize("center", (0, 1))
def test_odd_boxes(center: int) -> None:
    """Corners in any order, no area, negative sizes, infinities, NaN; -0 is 0."""
    boxes = f32([[
        [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 1], [0, 0, -1, -1], [0, 0, np.inf, 1],
        [np.nan, 0, 1, 1], [0, 0, 1, np.nan], [0, 0, 1e30, 1e30], [0, 0, 1e-30, 1e-30], [5, 5, 1, 1],
    ]])  # fmt: skip
    scores = f32([[[0, -0.0, 0.5, 0.5, 1, 0.25, np.inf, -np.inf, 0.1, 0.2, 0.3, -1], [0] * 12]])
    feed = {"boxes": boxes, "scores": scores, "most": int64([12]), "iou": f32([0.3]), "least": f32([-9])}
    check(ALL % center, feed, feed | {"scores": scores[:, ::-1].copy(), "least": f32([-0.5])})


@pytest.mark.parametrize("given", range(4))
def test_inputs_that_are_left_out(given: int) -> None:
    names = ["most", "iou", "least"][:given]
    kinds = {"most": "int64[1] most", "iou": "float[1] iou", "least": "float[1] least"}
    text = f"g ({', '.join(['float[b, n, 4] boxes', 'float[b, c, n] scores', *(kinds[n] for n in names)])}) => (y) "
    text += f"{{ y = NonMaxSuppression ({', '.join(['boxes', 'scores', *names])}) }}"
    feed = case(2, 3, 17, 5, 0.4, 0.1)
    check(text, {k: v for k, v in feed.items() if k in ("boxes", "scores", *names)})


def test_known_numbers_and_what_follows() -> None:
    """A detector's end: transposed predictions in, the chosen boxes and scores out."""
    text = """g (float[1, n, c] s, float[1, 4, n] t) => (chosen, best)
  <int64 most = {10}, float iou = {0.5}, float least = {0.1}, int64[1] two = {2}, int64[1] three = {3},
   int64[1] one = {1}> {
  boxes = Transpose <perm = [0, 2, 1]> (t) scores = Transpose <perm = [0, 2, 1]> (s)
  y = NonMaxSuppression <center_point_box = 1> (boxes, scores, most, iou, least)
  at = Slice(y, two, three, one) k = Squeeze(at, one) flat = Squeeze(boxes) chosen = Gather(flat, k)
  best = GatherND(scores, y)
}"""
    feed = case(1, 5, 33, 10, 0.5, 0.1)
    given = {"s": feed["scores"].transpose(0, 2, 1).copy(), "t": feed["boxes"].transpose(0, 2, 1).copy()}
    check(text, given)


def test_threads_and_repeats() -> None:
    model = onnxc.compile(parsed(ALL % 0))
    feed = CASES[4]
    found = []
    for threads in (1, 2, 3, 2):
        model.threads = threads
        found.append(model(**feed)["y"].tobytes())
    assert len(set(found)) == 1


@settings(max_examples=25)
@given(st.integers(0, 60), st.integers(1, 3), st.integers(0, 9), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 3))
def test_random(n: int, classes: int, most: int, iou: float, levels: int) -> None:
    check(ALL % (n % 2), case(1, classes, n, most, iou, -0.1, levels))


def test_numpy_meaning() -> None:
    for feed in CASES[:-1]:
        for center in (False, True):
            arrays = [feed["boxes"], feed["scores"], feed["most"][0], feed["iou"][0], feed["least"][0]]
            arrays = [np.asarray(a) for a in arrays]
            (rows, count) = lookup("nms").evaluate(*arrays, center=center, room=feed["boxes"].shape[1])  # type: ignore[misc]
            model = onnxc.compile(parsed(ALL % center))
            same(model(**feed)["y"], rows[: int(count)], "nms")


def test_keys_that_make_a_quicksort_slow() -> None:
    """Sorted, reversed, organ pipes: a class of 20000 boxes of no area, all of which are taken."""
    n = 20000
    up = np.arange(n, dtype=f32)
    model = onnxc.compile(parsed(ALL % 0))
    for scores in (up, up[::-1], np.minimum(up, up[::-1]), np.zeros(n, f32), np.where(up % 2, up, -up)):
        feed = {"boxes": np.zeros((1, n, 4), f32), "scores": scores.reshape(1, 1, n).copy(), "most": int64([n])}
        got = model(**feed, iou=f32([0.5]), least=f32([-1e9]))["y"][:, 2]
        same(got, np.argsort(-scores, kind="stable").astype(np.int64), "order")


def test_wrong_data() -> None:
    model = onnxc.compile(parsed(ALL % 0))
    feed = CASES[1]
    for wrong in ({"boxes": feed["boxes"][:1]}, {"scores": feed["scores"][..., :5]}):
        with pytest.raises((RunError, onnxc.errors.InputError)):
            model(**{**feed, **wrong})
    for iou in (1.5, -0.1, np.nan):
        with pytest.raises(RunError, match="the iou_threshold is not in 0 to 1"):
            model(**{**feed, "iou": f32([iou])})
    with pytest.raises(ModelError, match="iou_threshold"):
        onnxc.compile(
            parsed((ALL % 0).replace(", float[1] iou", "").replace("=> (y) {", "=> (y) <float[1] iou = {1.5}> {"))
        )


def test_boxes_and_scores_of_one_tensor_and_equal_thresholds() -> None:
    """As detectors have them: one buffer for both, and one for both numbers."""
    text = """g (float[1, n, 6] all) => (y)
    <int64[1] zero = {0}, int64[1] four = {4}, int64[1] six = {6}, int64[1] two = {2}, int64[1] most = {9},
     float[1] iou = {0.5}, float[1] least = {0.5}> {
      boxes = Slice (all, zero, four, two)
      rest = Slice (all, four, six, two)
      scores = Transpose <perm = [0, 2, 1]> (rest)
      y = NonMaxSuppression (boxes, scores, most, iou, least)
    }"""
    check(text, {"all": np.random.default_rng(0).random((1, 40, 6)).astype(f32)})
