"""Weights of dead channels: the pass `lift-weights`."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import onnxc
from onnxc import FusionOptions
from onnxc.codegen.cpp.conv_algorithms import STRASSEN, candidates
from onnxc.frontends import onnx_file
from onnxc.ir.graph import Graph
from onnxc.passes.decompose import decompose
from onnxc.passes.simplify import fold_constants
from onnxc.passes.tiny_weights import lift_tiny_weights
from onnxc.primitives.builder import constant_of

Array = np.ndarray
UNIT = 2.0**-149  # the least float32
CASES = {"dense": (1, (20, 18, 1, 1)), "window": (1, (20, 18, 3, 3)), "groups": (3, (12, 6, 3, 3)),
         "depthwise": (18, (18, 1, 5, 5))}  # fmt: skip
STRICT = {"accuracy": "strict"}  # Winograd and Strassen spread infinities


def weights_of(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Rows 2 to 4 and columns 1 to 3 are denormal."""
    w = rng.standard_normal(shape).astype(np.float32)
    w[2:5] *= np.float32(1e-39)
    if shape[1] > 1:
        w[:, 1:4] = w[:, 1:4] * np.float32(1e-39)
    return w


def conv(w: Array, groups: int) -> ModelProto:
    node = helper.make_node("Conv", ["x", "w"], ["y"], group=groups, pads=[w.shape[2] // 2] * 4)
    return model(node, w, ["n", w.shape[1] * groups, "h", "w"])


def model(node: object, w: Array, shape: list[object]) -> ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(w, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def images(channels: int, rng: np.random.Generator) -> Array:
    x = rng.standard_normal((2, channels, 7, 11)).astype(np.float32)
    x[0, 2], x[0, 3], x[0, 4], x[0, 1, 2] = 0, 1e-40, -0.0, 1e37
    return x


def prepared(proto: ModelProto) -> Graph:
    return fold_constants(decompose(onnx_file.load(proto)), 1 << 28)


def lifted(proto: ModelProto) -> list[Array]:
    """The constants that the pass leaves."""
    graph = lift_tiny_weights(prepared(proto))
    return [w for w in map(constant_of, (v for n in graph.nodes for v in n.operands)) if w is not None]


@pytest.mark.parametrize("name", CASES)
def test_convolutions_are_right_to_the_least_float(name: str) -> None:
    groups, shape = CASES[name]
    rng = np.random.default_rng(0)
    w = weights_of(shape, rng)
    x = images(shape[1] * groups, rng)
    y = onnxc.compile(conv(w, groups), **STRICT)(x)[0]
    exact = onnxc.compile(conv(w, groups), fusion=FusionOptions(lift=False), **STRICT)(x)[0]
    size = onnxc.compile(conv(np.abs(w), groups), **STRICT)(np.abs(x))[0].astype(np.float64)
    assert (np.abs(y.astype(np.float64) - exact) <= 1e-6 * size + 4 * UNIT).all()
    assert (y[:, 2:5] != 0).any()  # not flushed
    assert all((np.abs(c) >= 2.0**-126)[c != 0].all() for c in lifted(conv(w, groups)))


@pytest.mark.parametrize("name", CASES)
def test_infinities_and_nan_stay(name: str) -> None:
    groups, shape = CASES[name]
    rng = np.random.default_rng(1)
    w, x = weights_of(shape, rng), images(shape[1] * groups, rng)
    x[1, 2, 3, 4], x[1, 3, 1, 1], x[0, 7, 2, 2] = np.inf, -np.inf, np.nan
    y = onnxc.compile(conv(w, groups), **STRICT)(x)[0]
    exact = onnxc.compile(conv(w, groups), fusion=FusionOptions(lift=False), **STRICT)(x)[0]
    assert np.isnan(exact).any() and np.isinf(exact).any()
    np.testing.assert_array_equal(np.isnan(y), np.isnan(exact))
    np.testing.assert_array_equal(np.where(np.isinf(y), y, 0), np.where(np.isinf(exact), exact, 0))


@pytest.mark.parametrize("transposed", [0, 1])
def test_products(transposed: int) -> None:
    rng = np.random.default_rng(2)
    w = rng.standard_normal((33, 20)).astype(np.float32)
    w[:, 4:7], w[9:12] = w[:, 4:7] * np.float32(1e-39), w[9:12] * np.float32(1e-39)
    x = rng.standard_normal((5, 33)).astype(np.float32)
    x[0, 9], x[1, 10], x[2] = np.inf, 1e38, 1e-38
    proto = model(
        helper.make_node("Gemm", ["x", "w"], ["y"], transB=transposed), w.T.copy() if transposed else w, ["n", 33]
    )
    y = onnxc.compile(proto)(x)[0]
    with np.errstate(all="ignore"):
        exact = x.astype(np.float64) @ w.astype(np.float64)
        size = np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64)
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(y[~finite], exact[~finite].astype(np.float32))
    assert (np.abs(y[finite] - exact[finite]) <= 1e-6 * size[finite] + UNIT).all()
    assert all((np.abs(c) >= 2.0**-126)[c != 0].all() for c in lifted(proto))


def test_ordinary_weights_stay() -> None:
    rng = np.random.default_rng(3)
    w = rng.standard_normal((8, 6, 1, 1)).astype(np.float32)
    w[3] *= np.float32(1e-25)  # small, and as fast as others
    w[5, 2] = 1e-40  # one among others
    w[6] = 0
    assert [c.tobytes() for c in lifted(conv(w, 1)) if c.shape == w.shape] == [w.tobytes()]
    assert len(lifted(conv(w, 1))) == 1


def test_strassen_is_not_for_channels_that_would_be_lost() -> None:
    """A dead channel and a live one meet in sums, in which the dead one's digits go."""
    rng = np.random.default_rng(4)
    w = rng.standard_normal((64, 64, 1, 1)).astype(np.float32)
    found = []
    for size in (1, 1e-5, 1e-20, 0):
        w[7] *= np.float32(size)
        (node,) = (n for n in prepared(conv(w, 1)).nodes if n.op == "conv")
        found.append(STRASSEN in candidates(node, 8, halves=True))
    assert found == [True, True, False, True]
