"""What models may ask of quantized products at their limits: nothing to multiply, far dilations, infinite scales."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import onnxc

pytestmark = pytest.mark.every_target

LEVELS = ["native", "x86-64-v3", "x86-64-v2"]


def model(
    nodes: list[onnx.NodeProto], x: np.ndarray, y: int, constants: dict[str, np.ndarray], opset: int = 21
) -> onnx.ModelProto:
    """Nodes from x to y."""
    graph = helper.make_graph(
        nodes,
        "limits",
        [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), list(x.shape))],
        [helper.make_tensor_value_info("y", y, None)],
        [numpy_helper.from_array(a, name) for name, a in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def reference(m: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(m.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


def result(m: onnx.ModelProto, x: np.ndarray, **options: Any) -> np.ndarray:
    (y,) = onnxc.compile(m, **options)(x=x).values()
    return np.asarray(y)


@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (0, 0)])
@pytest.mark.parametrize("op", ["MatMul", "Gather"])
def test_quantized_weights_without_elements(shape: tuple[int, int], op: str) -> None:
    k, n = shape
    constants: dict[str, np.ndarray] = {
        "w": np.zeros(shape, np.int8),
        "scale": np.ones(n, np.float32),
        "zero": np.zeros(n, np.int8),
    }
    x = np.ones((3, k), np.float32) if op == "MatMul" else np.zeros(3 if k else 0, np.int64)
    nodes = [helper.make_node("DequantizeLinear", ["w", "scale", "zero"], ["d"], axis=1)]
    nodes.append(helper.make_node(op, ["x", "d"] if op == "MatMul" else ["d", "x"], ["y"]))
    y = result(model(nodes, x, onnx.TensorProto.FLOAT, constants), x)
    assert y.shape == (len(x), n) and not y.any()


@pytest.mark.parametrize("cpu", LEVELS)
@pytest.mark.parametrize("far", [{"dilations": [1, 1 << 40]}, {"strides": [1, 1 << 40]}, {"dilations": [1 << 40, 1]}])
def test_memory_does_not_grow_with_the_reach_of_an_integer_convolution(cpu: str, far: dict[str, Any]) -> None:
    """Most taps fall into the padding: what the kernel keeps of it must not be as wide."""
    x = np.arange(48, dtype=np.uint8).reshape(1, 16, 1, 3)
    reach = [d if d > 1 else 0 for d in next(iter(far.values()))]
    w = np.arange(144, dtype=np.int64).astype(np.int8).reshape(16, 1, 3, 3)
    w = w if "dilations" in far else w[:, :, :1]
    node = helper.make_node("ConvInteger", ["x", "w"], ["y"], group=16, pads=[*reach, *reach], **far)
    if reach[0] == 0 and "dilations" in far:
        node = helper.make_node("ConvInteger", ["x", "w"], ["y"], group=16, pads=[1, reach[1], 1, reach[1]], **far)
    m = model([node], x, onnx.TensorProto.INT32, {"w": w})
    assert np.array_equal(result(m, x, cpu=cpu), reference(m, x))


@pytest.mark.parametrize("scales", [(np.inf, 1), (1, np.nan), (1e38, 1e30), (1e38, 1), (1, 1e-45), (0, -1)])
def test_scales_of_no_use(scales: tuple[float, float]) -> None:
    """What dequantizing alone makes infinite or NaN is so in a product, too."""
    x = np.arange(-16, 16, dtype=np.int8).reshape(2, 16)
    constants: dict[str, np.ndarray] = {
        "sx": np.asarray(scales[0], np.float32),
        "sw": np.asarray(scales[1], np.float32),
        "w": (np.arange(48) - 20).astype(np.int8).reshape(16, 3),
    }
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "sx"], ["a"]),
        helper.make_node("DequantizeLinear", ["w", "sw"], ["b"]),
        helper.make_node("MatMul", ["a", "b"], ["y"]),
    ]
    m = model(nodes, x, onnx.TensorProto.FLOAT, constants)
    np.testing.assert_allclose(result(m, x), reference(m, x), rtol=1e-6)
