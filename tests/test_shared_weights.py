"""One weight that several operators read in different ways: each has it packed as its own kernel reads it."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper

import onnxc
from tests.small_models import floats, parse, reference


def with_weight(text: str, weight: np.ndarray) -> ModelProto:
    """A model of a text, with a weight `w`."""
    model = parse(text)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return model


@pytest.mark.parametrize("shape", [(4, 2, 3, 3), (2, 8, 3, 3), (4, 8, 1, 1), (64, 16, 3, 3), (48, 20, 1, 1)])
def test_convolutions_with_other_groups(shape: tuple[int, ...]) -> None:
    c, k = shape[1], shape[2] // 2
    model = with_weight(
        f"(float[1,{c},20,20] a, float[1,{2 * c},20,20] b) => (float[N,M,H,W] y, float[N,M,H,W] z) {{"
        f" y = Conv <pads = [{k},{k},{k},{k}]> (a, w) z = Conv <group = 2, pads = [{k},{k},{k},{k}]> (b, w) }}",
        floats(*shape, seed=2),
    )
    given = [floats(1, c, 20, 20), floats(1, 2 * c, 20, 20, seed=1)]
    for ours, theirs in zip(onnxc.compile(model)(*given).values(), reference(model, *given), strict=True):
        np.testing.assert_allclose(ours, theirs, 1e-4, 1e-4)


def test_volumes_and_images() -> None:
    """A convolution of a volume that is one of images, and one that is not."""
    model = with_weight(
        "(float[1,6,7,5,30] a, float[1,6,7,5,60] b) => (float[N,M,D,H,W] y, float[N,M,D,H,W] z) {"
        " y = Conv <pads = [1,0,0,1,0,0]> (a, w) z = Conv <pads = [1,0,0,1,0,0], strides = [1,1,2]> (b, w) }",
        floats(2, 6, 3, 1, 1, seed=2),
    )
    given = [floats(1, 6, 7, 5, 30), floats(1, 6, 7, 5, 60, seed=1)]
    for ours, theirs in zip(onnxc.compile(model)(*given).values(), reference(model, *given), strict=True):
        np.testing.assert_allclose(ours, theirs, 1e-4, 1e-4)


@pytest.mark.parametrize("fold", [0, 1 << 20])
def test_products_with_parts_of_a_matrix(fold: int) -> None:
    """By the whole, by some of its columns, by some of its rows, and by the same numbers in another shape."""
    model = with_weight(
        "(float[5,48] a, float[5,24] b, float[5,96] c) => (float[M,N] p, float[M,N] q, float[M,N] r, float[M,N] s)"
        " <int64[1] zero = {0}, int64[1] half = {24}, int64[1] rows = {0}, int64[1] columns = {1},"
        " int64[2] other = {96, 24}> {"
        " p = MatMul(a, w) left = Slice(w, zero, half, columns) q = MatMul(a, left)"
        " top = Slice(w, zero, half, rows) r = MatMul(b, top) flat = Reshape(w, other) s = MatMul(c, flat) }",
        floats(48, 48, seed=3),
    )
    given = [floats(5, 48), floats(5, 24, seed=1), floats(5, 96, seed=2)]
    found = onnxc.compile(model, fold_bytes=fold)(*given).values()
    for ours, theirs in zip(found, reference(model, *given), strict=True):
        np.testing.assert_allclose(ours, theirs, 1e-4, 1e-4)
