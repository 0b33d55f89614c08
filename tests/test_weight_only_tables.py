"""Embedding tables of small integers: rows are computed after they have been gathered, and the table stays packed."""

from __future__ import annotations

import time

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxc
from tests.targets import is_gpu

pytestmark = pytest.mark.every_target

ROWS, WIDTH = 1000, 192


def model_of(nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray]) -> onnx.ModelProto:
    i = helper.make_tensor_value_info("i", TensorProto.INT64, ["b", "s"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", "s", WIDTH])
    graph = helper.make_graph(nodes, "g", [i], [y], [numpy_helper.from_array(v, name) for name, v in weights.items()])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def check(model: onnx.ModelProto, most_bytes: float, low: int = 0) -> None:
    """Equal to onnxruntime's to the last bit."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    indices = np.random.default_rng(0).integers(low, ROWS, (2, 5))
    (expected,) = ort.InferenceSession(model.SerializeToString(), options).run(None, {"i": indices})
    compiled = onnxc.compile(model)
    np.testing.assert_array_equal(compiled(i=indices)["y"], expected)
    assert is_gpu() or compiled.explain().memory.weights <= most_bytes


@pytest.mark.parametrize("scales", ["tensor", "row", "block"])
@pytest.mark.parametrize("dtype", ["int8", "int4", "uint4"])
def test_dequantize_before_gather(dtype: str, scales: str) -> None:
    rng = np.random.default_rng(1)
    store = {"int8": np.int8, "int4": ml_dtypes.int4, "uint4": ml_dtypes.uint4}[dtype]
    low, high = {"int8": (-128, 128), "int4": (-8, 8), "uint4": (0, 16)}[dtype]
    shape, attrs = {"tensor": ((), {}), "row": ((ROWS,), {"axis": 0}),
                    "block": ((ROWS, WIDTH // 32), {"axis": 1, "block_size": 32})}[scales]  # fmt: skip
    weights = {"q": rng.integers(low, high, (ROWS, WIDTH)).astype(store),
               "s": np.asarray(rng.random(shape) + 0.5, np.float32)}  # fmt: skip
    if dtype == "uint4":
        weights["z"] = np.asarray(rng.integers(low, high, shape)).astype(store)
    nodes = [
        helper.make_node("DequantizeLinear", list(weights), ["w"], **attrs),
        helper.make_node("Gather", ["w", "i"], ["y"]),
    ]
    size = ROWS * WIDTH * (1 if dtype == "int8" else 0.5) + 8 * ROWS * (WIDTH // 32 if scales == "block" else 1)
    check(model_of(nodes, weights), size + 4096, low=-ROWS)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_gather_block_quantized(bits: int, zeros: bool) -> None:
    rng = np.random.default_rng(2)
    weights = {"q": rng.integers(0, 256, (ROWS, WIDTH * bits // 8), dtype=np.uint8),
               "s": rng.random((ROWS, WIDTH // 32), np.float32) + 0.5}  # fmt: skip
    if zeros:
        weights["z"] = rng.integers(0, 256, (ROWS, WIDTH // 32 * bits // 8), dtype=np.uint8)
    inputs = ["q", "i", "s", *(["z"] if zeros else [])]
    attrs = {"bits": bits, "block_size": 32, "gather_axis": 0, "quantize_axis": 1}
    node = helper.make_node("GatherBlockQuantized", inputs, ["y"], domain="com.microsoft", **attrs)
    check(model_of([node], weights), ROWS * WIDTH * bits / 8 + 8 * ROWS * WIDTH // 32 + 4096)


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4])
def test_gather_block_quantized_of_four_bit_types(dtype: type) -> None:
    rng = np.random.default_rng(3)
    weights = {"q": rng.integers(0, 8, (ROWS, WIDTH)).astype(dtype),
               "s": rng.random((ROWS, WIDTH // 64), np.float32) + 0.5}  # fmt: skip
    node = helper.make_node("GatherBlockQuantized", ["q", "i", "s"], ["y"], domain="com.microsoft", block_size=64)
    check(model_of([node], weights), ROWS * WIDTH * 0.5 + 4 * ROWS * WIDTH // 64 + 4096)


def test_halves() -> None:
    table = np.random.default_rng(4).standard_normal((ROWS, WIDTH)).astype(np.float16)
    nodes = [
        helper.make_node("Cast", ["q"], ["w"], to=TensorProto.FLOAT),
        helper.make_node("Gather", ["w", "i"], ["y"]),
    ]
    check(model_of(nodes, {"q": table}), 2 * ROWS * WIDTH + 4096, low=-ROWS)


def test_a_scale_that_is_a_large_graph_is_evaluated_once() -> None:
    """Doubled fifty times: without sharing, that would be 2 ** 50 additions."""
    weights = {"q": np.ones((ROWS, WIDTH), np.int8), "s0": np.full((ROWS, WIDTH), 2.0**-50, np.float32)}
    nodes = [helper.make_node("Cast", ["q"], ["c"], to=TensorProto.FLOAT)]
    nodes += [helper.make_node("Add", [f"s{k}", f"s{k}"], [f"s{k + 1}"]) for k in range(50)]
    nodes += [helper.make_node("Mul", ["c", "s50"], ["w"]), helper.make_node("Gather", ["w", "i"], ["y"])]
    start = time.perf_counter()
    check(model_of(nodes, weights), 4 * ROWS * WIDTH)
    assert time.perf_counter() - start < 60
