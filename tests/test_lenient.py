"""What models of other tools leave to the runtime: onnxruntime's reading of it is ours."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxc
from tests.small_models import floats, parse, reference


@pytest.mark.parametrize("opset", [11, 13])
def test_squeeze_of_an_empty_list_of_axes(opset: int) -> None:
    """Of all axes of size 1, as without a list."""
    if opset < 13:
        model = parse("(float[3, 1, 5, 1] x) => (float[A, B] y) { y = Squeeze(x) }", opset)
        model.graph.node[0].attribute.append(
            onnx.AttributeProto(name="axes", type=onnx.AttributeProto.INTS)  # helper.make_attribute refuses it
        )
    else:
        model = parse("(float[3, 1, 5, 1] x) => (float[A, B] y) <int64[0] a = {}> { y = Squeeze(x, a) }", opset)
    x = floats(3, 1, 5, 1)
    (y,) = reference(model, x)
    found = onnxc.compile(model)(x)[0]
    assert found.shape == y.shape == (3, 5)
    np.testing.assert_array_equal(found, y)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_stash_type_that_names_none(dtype: type[np.generic]) -> None:
    name = {np.float16: "float16", np.float32: "float"}[dtype]
    model = parse(
        f"({name}[2, 4, 8] x, {name}[8] s, {name}[8] b) => ({name}[A, B, C] y) "
        "{ y = LayerNormalization<axis=-1, stash_type=0>(x, s, b) }"
    )
    arrays = [floats(2, 4, 8).astype(dtype), floats(8).astype(dtype), floats(8, seed=1).astype(dtype)]
    (y,) = reference(model, *arrays)
    tolerance = 2e-3 if dtype is np.float16 else 1e-5
    np.testing.assert_allclose(onnxc.compile(model)(*arrays)[0], y, tolerance, tolerance)


def test_the_mean_of_a_normalization_without_one() -> None:
    """Zeros; the other outputs are where they would be."""
    model = parse(
        "(float[2, 3, 8] x, float[2, 3, 8] k, float[8] g) => (float[A, B, C] y, float[D, E, F] m, float[G, H, I] d, "
        "float[J, K, L] t) { y, m, d, t = com.microsoft.SkipSimplifiedLayerNormalization<epsilon=0.00001>(x, k, g) }"
    )
    model.opset_import.add(domain="com.microsoft", version=1)
    arrays = [floats(2, 3, 8), floats(2, 3, 8, seed=1), floats(8)]
    for found, wanted in zip(
        onnxc.compile(model).run(None, arrays_by_name(model, arrays)), reference(model, *arrays), strict=True
    ):
        assert found.shape == wanted.shape and found.dtype == wanted.dtype
        np.testing.assert_allclose(found, wanted, 1e-5, 1e-5)


def arrays_by_name(model: onnx.ModelProto, arrays: list[np.ndarray]) -> dict[str, np.ndarray]:
    return dict(zip((i.name for i in model.graph.input), arrays, strict=True))
