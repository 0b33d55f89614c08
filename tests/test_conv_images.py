"""Convolutions that read images of few channels as they lie: planes, of which a few rows are turned at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import onnxc

pytestmark = pytest.mark.every_target


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
def test_graph_inputs_of_few_channels(channels: int) -> None:
    """Several kernels over one image, of every kind of edge, against onnxruntime without optimizations."""
    rng = np.random.default_rng(channels)
    x = rng.standard_normal((2, channels, 37, 29)).astype(np.float32)
    cases: list[tuple[tuple[int, int], dict[str, Any]]] = [
        ((7, 7), {"strides": [2, 2], "pads": [3, 3, 3, 3]}),
        ((3, 3), {"pads": [1, 1, 1, 1]}),
        ((3, 3), {"strides": [2, 2], "pads": [0, 0, 1, 1]}),
        ((1, 1), {}),
        ((2, 5), {"strides": [3, 1], "dilations": [2, 3], "pads": [1, 4, 0, 7]}),
        ((16, 16), {"strides": [16, 16]}),
    ]
    nodes, weights, outputs = [], [], []
    for k, (kernel, attributes) in enumerate(cases):
        w = rng.standard_normal((20 + 7 * k, channels, *kernel)).astype(np.float32)
        weights.append(numpy_helper.from_array(w, f"w{k}"))
        nodes.append(helper.make_node("Conv", ["x", f"w{k}"], [f"y{k}"], **attributes))
        outputs.append(helper.make_tensor_value_info(f"y{k}", 1, None))
    graph = helper.make_graph(nodes, "images", [helper.make_tensor_value_info("x", 1, x.shape)], outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for threads in (1, 2):
        found = onnxc.compile(model, cache=False, threads=threads)(x)
        for got, want in zip(found, session.run(None, {"x": x}), strict=True):
            assert np.abs(np.asarray(got) - want).max() <= 1e-5 * np.sqrt((want.astype(np.float64) ** 2).mean())


def test_no_images_of_an_open_size() -> None:
    w = np.ones((132, 3, 3, 2), np.float32)
    x = helper.make_tensor_value_info("x", 1, [0, 12, "h", "w"])
    conv = helper.make_node("Conv", ["x", "k"], ["y"], group=4)
    graph = helper.make_graph([conv], "none", [x], [onnx.ValueInfoProto(name="y")], [numpy_helper.from_array(w, "k")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (y,) = onnxc.compile(model, cache=False).run(None, {"x": np.zeros((0, 12, 5, 6), np.float32)})
    assert y.shape == (0, 132, 3, 5)
