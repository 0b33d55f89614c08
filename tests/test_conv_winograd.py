"""Winograd's and Strassen's algorithms in whole models: dilated kernels, strides of 2, kernels along one axis, 1x1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

import onnxc


def _convolved(x: np.ndarray, w: np.ndarray, pads: list[int], dilations: list[int], strides: list[int]) -> np.ndarray:
    """The convolution in float64, tap by tap."""
    axes = x.ndim - 2
    wide = np.pad(x.astype(np.float64), [(0, 0), (0, 0), *zip(pads[:axes], pads[axes:], strict=True)])
    size = [(wide.shape[2 + k] - (w.shape[2 + k] - 1) * dilations[k] - 1) // strides[k] + 1 for k in range(axes)]
    y = np.zeros((x.shape[0], w.shape[0], *size))
    for tap in np.ndindex(*w.shape[2:]):
        places = zip(tap, dilations, size, strides, strict=True)
        at = tuple(slice(t * d, t * d + (n - 1) * s + 1, s) for t, d, n, s in places)
        y += np.einsum("ni...,oi->no...", wide[(slice(None), slice(None), *at)], w[(..., *tap)].astype(np.float64))
    return y


@pytest.mark.parametrize(
    ("shape", "kernel", "attributes", "expected"),
    [
        ((1, 96, 30, 29), (3, 3), {"dilations": [2, 2], "pads": [2, 2, 2, 2]}, "winograd F(4x4)"),
        ((2, 96, 17, 19), (3, 3), {"dilations": [3, 1], "pads": [3, 0, 1, 2]}, "winograd"),
        ((1, 64, 9, 9), (3, 3), {"dilations": [9, 9], "pads": [9, 9, 9, 9]}, "direct"),
        ((1, 96, 31, 50), (3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1]}, "winograd F(4x4) stride 2"),
        ((1, 128, 27, 28), (3, 3), {"strides": [2, 2], "pads": [1, 0, 1, 1]}, "winograd F(2x2) stride 2"),
        ((1, 96, 30, 30), (3, 3), {"strides": [2, 2], "dilations": [2, 2], "pads": [2, 2, 2, 2]}, "direct"),
        ((1, 32, 9, 24, 26), (3, 3, 3), {"strides": [2, 2, 2], "pads": [1] * 6}, "winograd F(4x4) stride 2"),
        ((1, 96, 211), (3,), {"dilations": [4], "pads": [8, 0]}, "winograd F(1x4)"),
        ((3, 64, 50), (3,), {"pads": [1, 1]}, "winograd F(1x4)"),
        ((1, 64, 40, 12), (3, 1), {"pads": [1, 0, 1, 0]}, "winograd F(4x1)"),
    ],
)
def test_against_float64(
    shape: tuple[int, ...], kernel: tuple[int, ...], attributes: dict[str, Any], expected: str
) -> None:
    """The kernel that is expected, its error, and a plain sum where accuracy is strict."""
    rng = np.random.default_rng(sum(shape))
    x = rng.standard_normal(shape).astype(np.float32)
    w = rng.standard_normal((64, shape[1], *kernel)).astype(np.float32)
    node = helper.make_node("Conv", ["x", "w"], ["y"], **attributes)
    inputs, outputs = ([helper.make_tensor_value_info(name, 1, s)] for name, s in (("x", shape), ("y", None)))
    graph = helper.make_graph([node], "g", inputs, outputs, [numpy_helper.from_array(w, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    want = _convolved(
        x, w, attributes["pads"], *(attributes.get(key, [1] * len(kernel)) for key in ("dilations", "strides"))
    )
    scale = np.sqrt((want**2).mean())
    for accuracy, limit in (("default", 2e-5), ("strict", 5e-6)):
        compiled = onnxc.compile(model, cache=False, accuracy=accuracy, threads=2)
        (kind,) = (k.kind for k in compiled.explain().kernels if k.kind.startswith("conv"))
        assert (expected in kind) if accuracy == "default" else kind == "conv direct"
        assert np.abs(np.asarray(compiled(x)[0]) - want).max() <= limit * scale


def test_one_tap() -> None:
    """A 1x1 kernel of many channels, channels-last: Strassen's algorithm, but not where weights are infinite."""
    rng = np.random.default_rng(3)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((2, 9, 15, 1024), (64, 1024, 1, 1)))
    endless = w.copy()
    endless[5, 7] = np.inf
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2]),
        *(helper.make_node("Conv", ["t", k], [f"c{k}"]) for k in ("w", "v")),
        *(helper.make_node("Transpose", [f"c{k}"], [f"y{k}"], perm=[0, 2, 3, 1]) for k in ("w", "v")),
    ]
    inputs = [helper.make_tensor_value_info("x", 1, x.shape)]
    outputs = [helper.make_tensor_value_info(f"y{k}", 1, (*x.shape[:3], 64)) for k in ("w", "v")]
    weights = [numpy_helper.from_array(k, name) for k, name in ((w, "w"), (endless, "v"))]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    compiled = onnxc.compile(model, cache=False, threads=2)
    kinds = [k.kind for k in compiled.explain().kernels if k.kind.startswith("conv")]
    assert sorted(kinds) == ["conv direct", "conv strassen"]
    want = x.astype(np.float64) @ w[:, :, 0, 0].T.astype(np.float64)
    finite, other = (np.asarray(y) for y in compiled(x))
    assert np.abs(finite - want).max() <= 1e-5 * np.sqrt((want**2).mean())
    assert np.isinf(other[..., 5]).all() and np.isfinite(other[..., :5]).all()
