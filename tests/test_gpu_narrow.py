"""Floats of eight bits and fewer, and integers of fewer than eight, on a GPU: kernels in Triton's interpreter."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxc
from onnxc.ir import dtypes
from tests import test_narrow_dtypes as narrow
from tests.targets import needs_triton
from tests.triton_simulator import Simulator

pytestmark = needs_triton
TYPES = {"INT4": ml_dtypes.int4, "UINT4": ml_dtypes.uint4, "INT2": ml_dtypes.int2, "UINT2": ml_dtypes.uint2}
LIMITS = {"INT4": (-8, 7), "UINT4": (0, 15), "INT2": (-2, 1), "UINT2": (0, 3)}
F32 = np.float32


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


SMALL = [*narrow.SMALL_FLOATS, narrow.POWERS]


def test_floats_to_small_ones_and_back(simulator: Simulator) -> None:
    """Every code of every type as others, and floats and integers that lie beside or between codes, as the CPU."""
    rng = np.random.default_rng(0)
    hard = rng.integers(0, 1 << 32, 500, dtype=np.uint32)
    around = np.arange(0, 1 << 16, 131, dtype=np.uint32) << 16
    x = np.concatenate([hard, around, around + 1, around - 1]).view(F32)
    with np.errstate(all="ignore"):
        near = x.astype(np.float64) * (1 + rng.choice([-1, 1], x.shape) * 2.0**-30)  # a float32 lies between both
    whole = rng.integers(-1 << 31, 1 << 31, 500).astype(np.int32)
    inputs = [("x", dtypes.float32, x), ("near", dtypes.float64, near), ("whole", dtypes.int32, whole)]
    inputs += [(f"in_{d.name}", d, narrow.codes(d)) for d in SMALL]
    nodes, outputs = list[onnx.NodeProto](), dict[str, dtypes.DType]()
    for name, _, _ in inputs[:3]:
        for d in SMALL:
            outputs[f"{name}_{d.name}"] = d
            nodes.append(helper.make_node("Cast", [name], [f"{name}_{d.name}"], to=d.onnx, saturate=name == "near"))
    for d in SMALL:
        outputs |= {f"wide_{d.name}": dtypes.float32, f"turned_{d.name}": d}
        nodes += [
            helper.make_node("Cast", [f"in_{d.name}"], [f"wide_{d.name}"], to=dtypes.float32.onnx),
            helper.make_node("Transpose", [f"in_{d.name}"], [f"turned_{d.name}"], perm=[0]),
        ]
    model = narrow.model_of(nodes, {name: d for name, d, _ in inputs}, outputs).SerializeToString()
    arrays = [array for _, _, array in inputs]
    ours = onnxc.compile(model, cache=False)(*arrays)
    with np.errstate(all="ignore"):
        theirs = simulator.run(model, arrays).outputs
    for (name, a), b in zip(ours.items(), theirs, strict=True):
        assert a.dtype == b.dtype, name
        narrow.assert_same(b, a)


@pytest.mark.parametrize("name", ["float8e4m3fn", "float8e5m2fnuz", "float4e2m1"])
def test_bits_and_updates_of_small_floats(name: str, simulator: Simulator) -> None:
    """Their bits, a scatter, the best of a row, and a scatter that adds."""
    d = dtypes.BY_NAME[name]
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "scale"], ["wide"]),
        helper.make_node("QuantizeLinear", ["wide", "scale"], ["back"], output_dtype=d.onnx),
        helper.make_node("ScatterElements", ["x", "at", "updates"], ["scattered"], axis=0),
    ]
    infos = {"x": d, "scale": dtypes.float32, "at": dtypes.int64, "updates": d}
    model = narrow.model_of(nodes, infos, {"wide": dtypes.float32, "back": d, "scattered": d}, opset=25)
    model.graph.input[1].type.tensor_type.shape.dim.pop()
    codes = np.arange(0, 1 << d.bits, 3, dtype=np.uint8).view(d.numpy)
    inputs = [codes, F32(0.25), np.array([1, 3, 2], np.int64), codes[:3]]
    ours = onnxc.compile(model, cache=False)(*inputs).values()
    for a, b in zip(ours, simulator.run(model.SerializeToString(), inputs).outputs, strict=True):
        narrow.assert_same(b, a)


def test_machine_code() -> None:
    nodes = [helper.make_node("DequantizeLinear", ["x", "scale"], ["y"])]
    inputs = [("x", TensorProto.INT4, [256]), ("scale", TensorProto.FLOAT, [])]
    model = model_of(nodes, inputs, [("y", TensorProto.FLOAT, [256])])
    assert "ox_part" in onnxc.compile(model, target="cuda:sm_90", cache=False).source
