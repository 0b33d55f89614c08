"""Integers of fewer than eight bits on a GPU, with kernels in Triton's interpreter."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxc
from tests.triton_simulator import Simulator

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="GPU kernels need Triton: pip install 'onnxc[cuda]'"
)
TYPES = {"INT4": ml_dtypes.int4, "UINT4": ml_dtypes.uint4, "INT2": ml_dtypes.int2, "UINT2": ml_dtypes.uint2}
LIMITS = {"INT4": (-8, 7), "UINT4": (0, 15), "INT2": (-2, 1), "UINT2": (0, 3)}
F32 = np.float32


@pytest.fixture(scope="module")
def simulator() -> Iterator[Simulator]:
    found = Simulator()
    yield found
    found.close()


def model_of(
    nodes: list[onnx.NodeProto], inputs: list[tuple], outputs: list[tuple], *weights: onnx.TensorProto
) -> bytes:
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info(*x) for x in inputs],
        [helper.make_tensor_value_info(*x) for x in outputs], list(weights),
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)]).SerializeToString()


def assert_same(simulator: Simulator, model: bytes, inputs: list[np.ndarray]) -> None:
    ours = onnxc.compile(model, cache=False)(*inputs).values()
    theirs = simulator.run(model, inputs).outputs
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(b.astype(F32), a.astype(F32), rtol=1e-6)


@pytest.mark.parametrize("name", TYPES)
def test_quantized_and_back(name: str, simulator: Simulator) -> None:
    kind, (low, high) = getattr(TensorProto, name), LIMITS[name]
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "scale"], ["y"]),
        helper.make_node("QuantizeLinear", ["z", "scale"], ["q"], output_dtype=kind),
        helper.make_node("DequantizeLinear", ["q", "scale"], ["back"]),
    ]
    count = high - low + 1
    inputs = [("x", kind, [count]), ("z", TensorProto.FLOAT, [count]), ("scale", TensorProto.FLOAT, [])]
    outputs = [("y", TensorProto.FLOAT, [count]), ("q", kind, [count]), ("back", TensorProto.FLOAT, [count])]
    x = np.arange(low, high + 1)
    z = (1.7 * x).astype(F32)  # some of it is out of range
    assert_same(simulator, model_of(nodes, inputs, outputs), [x.astype(TYPES[name]), z, F32(0.5)])


@pytest.mark.parametrize("name", TYPES)
def test_casts_and_rows(name: str, simulator: Simulator) -> None:
    """Casts, a gather of rows, and a copy."""
    kind, (low, high) = getattr(TensorProto, name), LIMITS[name]
    nodes = [
        helper.make_node("Cast", ["x"], ["i"], to=TensorProto.INT32),
        helper.make_node("Cast", ["i"], ["again"], to=kind),
        helper.make_node("Transpose", ["x"], ["turned"]),
        helper.make_node("Gather", ["i", "rows"], ["some"]),
    ]
    inputs = [("x", kind, [2, 3]), ("rows", TensorProto.INT64, [4])]
    outputs = [("again", kind, [2, 3]), ("turned", kind, [3, 2]), ("some", TensorProto.INT32, [4, 3])]
    x = np.array([[low, high, 0], [high, low, 1]]).astype(TYPES[name])
    assert_same(simulator, model_of(nodes, inputs, outputs), [x, np.array([1, 0, 1, 1])])


@pytest.mark.parametrize("name", ["INT4", "UINT2"])
def test_a_product_with_packed_weights(name: str, simulator: Simulator) -> None:
    """Weights in blocks of four, each with a scale."""
    low, high = LIMITS[name]
    rng = np.random.default_rng(0)
    w = numpy_helper.from_array(rng.integers(low, high + 1, (8, 6)).astype(TYPES[name]), "w")
    scales = numpy_helper.from_array(rng.random((2, 6)).astype(F32), "scales")
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "scales"], ["wide"], axis=0, block_size=4),
        helper.make_node("MatMul", ["x", "wide"], ["y"]),
    ]
    model = model_of(nodes, [("x", TensorProto.FLOAT, [3, 8])], [("y", TensorProto.FLOAT, [3, 6])], w, scales)
    assert_same(simulator, model, [rng.standard_normal((3, 8)).astype(F32)])


def test_machine_code() -> None:
    nodes = [helper.make_node("DequantizeLinear", ["x", "scale"], ["y"])]
    inputs = [("x", TensorProto.INT4, [256]), ("scale", TensorProto.FLOAT, [])]
    model = model_of(nodes, inputs, [("y", TensorProto.FLOAT, [256])])
    assert "ox_part" in onnxc.compile(model, target="cuda:sm_90", cache=False).source
