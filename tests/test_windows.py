"""Pools over rows, over odd sizes and every kind of window, against float64: kernels go through lines of columns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnxc
from onnxc.ir.expr import Sym, evaluate
from onnxc.ops.conv import Window
from onnxc.ops.pooling import with_ceil

pytestmark = pytest.mark.every_target

Shape = tuple[int, ...]


def _windows(x: np.ndarray, kernel: Shape, strides: Shape, dilations: Shape, pads: Shape, fill: float) -> np.ndarray:
    """[taps, n, c, rows, columns]."""
    padded = np.pad(x, [(0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])], constant_values=fill)
    counts = [
        (n - (k - 1) * d - 1) // s + 1 for n, k, s, d in zip(padded.shape[2:], kernel, strides, dilations, strict=True)
    ]
    ends = [(n - 1) * s + 1 for n, s in zip(counts, strides, strict=True)]
    return np.stack(
        [
            padded[:, :, i * dilations[0] :, j * dilations[1] :][:, :, : ends[0] : strides[0], : ends[1] : strides[1]]
            for i, j in product(range(kernel[0]), range(kernel[1]))
        ]
    )


def _run(op: str, x: np.ndarray, cpu: str | None = None, shape: list[str] | None = None, **attrs: object) -> np.ndarray:
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        [helper.make_node(op, ["x"], ["y"], **attrs)], "g",
        [helper.make_tensor_value_info("x", kind, shape or x.shape)], [helper.make_tensor_value_info("y", kind, None)],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    (y,) = onnxc.compile(model, threads=2, **({} if cpu is None else {"cpu": cpu})).run(None, {"x": x})
    return y


def _cases() -> Iterator[tuple[Shape, Shape, Shape, Shape, Shape]]:
    """Image, kernel, strides, dilations, pads."""
    yield (17, 56), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)
    yield (7, 17), (3, 3), (2, 2), (1, 1), (1, 1, 1, 1)
    yield (5, 131), (3, 2), (1, 3), (1, 1), (0, 1, 2, 0)
    yield (13, 23), (5, 5), (1, 1), (1, 1), (2, 2, 2, 2)
    yield (19, 29), (3, 3), (1, 1), (2, 2), (2, 2, 2, 2)
    yield (19, 29), (3, 3), (2, 1), (1, 3), (1, 2, 0, 3)
    yield (23, 64), (13, 13), (1, 1), (1, 1), (6, 6, 6, 6)
    yield (9, 67), (2, 5), (3, 2), (1, 1), (0, 0, 0, 0)
    yield (8, 16), (7, 7), (7, 7), (1, 1), (3, 3, 3, 3)
    yield (3, 9), (3, 9), (1, 1), (1, 1), (0, 0, 0, 0)
    yield (4, 1), (2, 1), (1, 1), (1, 1), (1, 0, 0, 0)
    yield (31, 40), (1, 5), (1, 1), (1, 1), (0, 2, 0, 2)


@pytest.mark.parametrize("case", list(_cases()), ids=str)
def test_pools_of_rows(case: tuple[Shape, Shape, Shape, Shape, Shape]) -> None:
    image, kernel, strides, dilations, pads = case
    x = np.random.default_rng(0).standard_normal((2, 3, *image)).astype(np.float32)
    attrs = {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "pads": pads}
    taps = _windows(x.astype(np.float64), kernel, strides, dilations, pads, -np.inf)
    np.testing.assert_array_equal(_run("MaxPool", x, **attrs), taps.max(0).astype(np.float32))
    zeros = _windows(x.astype(np.float64), kernel, strides, dilations, pads, 0)
    mean = _run("AveragePool", x, count_include_pad=1, **attrs)
    np.testing.assert_allclose(mean, zeros.mean(0), rtol=1e-5, atol=1e-6)
    some = zeros.sum(0) / np.isfinite(taps).sum(0)
    np.testing.assert_allclose(_run("AveragePool", x, **attrs), some, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("kernel", [(40, 1300), (33, 2)])
def test_windows_longer_than_the_image(kernel: tuple[int, int], opened: bool) -> None:
    """Some networks take the mean of all pixels so: what is not there is not looked at."""
    x = np.random.default_rng(0).standard_normal((2, 3, 7, 9)).astype(np.float32)
    x[:, :, 0] = np.inf
    attrs = {"kernel_shape": kernel, "ceil_mode": 1, "strides": kernel}
    shape = ["n", "c", "h", "w"] if opened else None
    want = (
        x.max((2, 3)) if kernel[1] > 9 else np.concatenate([x[..., k : k + 2].max((2, 3)) for k in range(0, 9, 2)], -1)
    )
    np.testing.assert_array_equal(_run("MaxPool", x, shape=shape, **attrs).reshape(want.shape), want)
    np.testing.assert_array_equal(_run("AveragePool", x, shape=shape, **attrs), _run("AveragePool", x, **attrs))


def test_windows_are_as_many_as_the_standard_says() -> None:
    """ceil((size + pads - kernel) / stride + 1), but for one that would begin past the operand: where padding takes
    some of the operand away, too.
    """
    size = Sym("size")
    for d, k, s, low, high in product((5, 6), (1, 3), (1, 2, 4), (-1, 0, 1), (-2, 0, 1)):
        want = min(-(-(d + low + high - k) // s) + 1, -(-(d + low) // s))
        for axis in (d, size):
            window = with_ceil([axis], Window((k,), (s,), (1,), (low,), (high,)))
            assert evaluate(window.counts([axis])[0], {"size": d}) == want, (d, k, s, low, high)


def test_the_mean_of_no_pixels_is_zero() -> None:
    """As onnxruntime has it: here every tap of a dilated window is in the padding."""
    x = np.ones((1, 1, 1, 5), np.float32)
    got = _run("AveragePool", x, kernel_shape=(3, 1), dilations=(2, 1), pads=(1, 0, 4, 0))
    np.testing.assert_array_equal(got[0, 0], [[0] * 5, [1] * 5])


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.uint8, np.int8])
def test_types(dtype: type) -> None:
    x = np.random.default_rng(1).integers(0 if dtype is np.uint8 else -100, 100, (1, 2, 11, 37))
    taps = _windows(x.astype(np.float64), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), -np.inf)
    got = _run("MaxPool", x.astype(dtype), kernel_shape=(3, 3), pads=(1, 1, 1, 1))
    np.testing.assert_array_equal(got, taps.max(0).astype(dtype))


def test_not_a_number_wins_in_its_windows_alone() -> None:
    x = np.random.default_rng(2).standard_normal((1, 1, 9, 40)).astype(np.float32)
    x[0, 0, 4, 17] = np.nan
    x[0, 0, 0, 0] = -np.inf
    got = _run("MaxPool", x, kernel_shape=(3, 3), pads=(1, 1, 1, 1))
    taps = _windows(x.astype(np.float64), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), -np.inf)
    np.testing.assert_array_equal(got, taps.max(0).astype(np.float32))


def test_results_do_not_depend_on_threads() -> None:
    x = np.random.default_rng(3).standard_normal((1, 16, 57, 61)).astype(np.float32)
    node = helper.make_node("AveragePool", ["x"], ["y"], kernel_shape=(5, 5), pads=(2, 2, 2, 2))
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [onnx.ValueInfoProto(name="y")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    compiled = onnxc.compile(model, threads=1)
    one = compiled.run(None, {"x": x})[0]
    compiled.threads = 4
    np.testing.assert_array_equal(one, compiled.run(None, {"x": x})[0])
