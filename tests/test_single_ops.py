"""Single operators whose kernels have ways of their own, over odd sizes: pads, repeats, gathers, turns, short rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnxc

pytestmark = pytest.mark.every_target

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)


def _model(op: str, inputs: list[Array], constants: list[Array], outputs: int = 1, **attrs: Any) -> onnx.ModelProto:
    names = [f"x{i}" for i in range(len(inputs))], [f"c{i}" for i in range(len(constants))]
    graph = helper.make_graph(
        [helper.make_node(op, [*names[0], *names[1]], [f"y{i}" for i in range(outputs)], **attrs)],
        "g",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for n, x in zip(names[0], inputs, strict=True)
        ],
        [onnx.ValueInfoProto(name=f"y{i}") for i in range(outputs)],
        [numpy_helper.from_array(c, n) for n, c in zip(names[1], constants, strict=True)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


def _run(op: str, inputs: list[Array], constants: list[Array], outputs: int = 1, **attrs: Any) -> list[Array]:
    compiled = onnxc.compile(_model(op, inputs, constants, outputs, **attrs), threads=2)
    return compiled.run(None, {f"x{i}": x for i, x in enumerate(inputs)})


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
@pytest.mark.parametrize(
    ("shape", "pads"),
    [((1, 97), (0, 5, 0, 96)), ((3, 7, 17), (0, 2, 0, 0, 3, 16)), ((2, 3, 5, 31), (0, 0, 1, 1, 0, 0, 2, 30)),
     ((2, 4), (0, 9, 1, 11)), ((5, 1), (1, 3, 1, 0)), ((2, 6), (0, -2, 0, 3))],
    ids=str,
)  # fmt: skip
def test_pads_that_continue_an_axis(mode: str, shape: tuple[int, ...], pads: tuple[int, ...]) -> None:
    x = RNG.standard_normal(shape).astype(np.float32)
    low, high = pads[: len(shape)], pads[len(shape) :]
    inner = x[tuple(slice(max(0, -a), n - max(0, -b)) for a, b, n in zip(low, high, shape, strict=True))]
    widths = [(max(0, a), max(0, b)) for a, b in zip(low, high, strict=True)]
    (y,) = _run("Pad", [x], [np.array(pads, np.int64)], mode=mode)
    np.testing.assert_array_equal(y, np.pad(inner, widths, mode=mode))


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.int64, np.float16, np.float64])
@pytest.mark.parametrize("times", [(2, 2), (4, 2), (1, 4), (3, 3), (2, 8)], ids=str)
@pytest.mark.parametrize("image", [(1, 1), (7, 17), (5, 8), (3, 67)], ids=str)
def test_nearest_neighbours_repeat(dtype: type, times: tuple[int, int], image: tuple[int, int]) -> None:
    x = RNG.integers(0, 100, (2, 3, *image)).astype(dtype)
    scales = np.array([1, 1, *times], np.float32)
    how = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    (y,) = _run("Resize", [x], [np.zeros(0, np.float32), scales], **how)
    np.testing.assert_array_equal(y, x.repeat(times[0], 2).repeat(times[1], 3))


def test_repeats_of_a_slice_begin_in_the_middle_of_a_run() -> None:
    x = RNG.standard_normal((3, 41)).astype(np.float32)
    nodes = [
        helper.make_node("Resize", ["x", "", "scales"], ["wide"], mode="nearest",
                         coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
        helper.make_node("Slice", ["wide", "start", "end", "axes"], ["part"]),
        helper.make_node("Concat", ["x", "part"], ["y"], axis=1),
    ]  # fmt: skip
    constants = {
        "scales": np.array([1, 2], np.float32),
        "start": np.array([3]),
        "end": np.array([80]),
        "axes": np.array([1]),
    }
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", 1, x.shape)], [onnx.ValueInfoProto(name="y")],
        [numpy_helper.from_array(c, n) for n, c in constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    (y,) = onnxc.compile(model, threads=2).run(None, {"x": x})
    np.testing.assert_array_equal(y, np.concatenate([x, x.repeat(2, 1)[:, 3:80]], 1))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.uint8, np.int16, np.int64, np.bool_])
@pytest.mark.parametrize("shape", [(1, 7), (17, 33), (64, 48), (131, 5)], ids=str)
def test_transposes(dtype: type, shape: tuple[int, int]) -> None:
    x = RNG.integers(0, 100, shape).astype(dtype)
    np.testing.assert_array_equal(_run("Transpose", [x], [])[0], x.T)


@pytest.mark.parametrize("length", [1, 3, 7, 17, 31, 60, 97])
@pytest.mark.parametrize("op", ["max", "min", "sum", "prod"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])
def test_reductions_of_short_rows(length: int, op: str, dtype: type) -> None:
    x = RNG.uniform(0.9, 1.1, (5, length)).astype(dtype) if np.dtype(dtype).kind == "f" else (
        RNG.integers(-3, 4, (5, length)).astype(dtype)
    )  # fmt: skip
    name = f"Reduce{op.capitalize()}"
    (y,) = _run(name, [x - 1 if op == "max" else x], [np.array([1])], keepdims=0)
    exact = getattr(np, op)((x - 1 if op == "max" else x).astype(np.float64), axis=1)
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [1, 7, 17, 60])
def test_gathers_along_rows(length: int) -> None:
    x = RNG.standard_normal((3, 5, length)).astype(np.float32)
    at = RNG.integers(-length, length, (3, 5, 29))
    np.testing.assert_array_equal(_run("GatherElements", [x, at], [], axis=2)[0], np.take_along_axis(x, at % length, 2))
    where = np.stack([RNG.integers(0, n, (3, 31)) for n in x.shape], -1)
    np.testing.assert_array_equal(_run("GatherND", [x, where], [])[0], x[tuple(np.moveaxis(where, -1, 0))])


@pytest.mark.parametrize("shape", [(1,), (7, 17), (128, 768), (3, 40961)], ids=str)
def test_dynamic_quantization(shape: tuple[int, ...]) -> None:
    x = (RNG.standard_normal(shape) * 3).astype(np.float32)
    y, scale, zero = _run("DynamicQuantizeLinear", [x], [], outputs=3)
    low, high = min(x.min(), np.float32(0)), max(x.max(), np.float32(0))
    exact = np.float32(high - low) / np.float32(255) or np.float32(1)
    np.testing.assert_allclose(scale, exact, rtol=1e-6)
    assert abs(int(zero) - round(float(-low / exact))) <= 1
    np.testing.assert_array_equal(y, np.clip(np.rint(x / scale) + zero, 0, 255).astype(np.uint8))


def test_least_and_greatest_take_one_pass() -> None:
    x = np.zeros((64, 4096), np.float32)
    report = onnxc.compile(_model("DynamicQuantizeLinear", [x], [], outputs=3)).explain()
    reasons = [r for k in report.to_dict()["kernels"] for r in k["reasons"]]
    assert any("computed beside" in r for r in reasons), reasons
