"""The derivative of convolutions by their weights, where the pixels fill the chunks in which they are packed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import helper, numpy_helper

from onnxc.optim import SGD
from onnxc.training.step import compile_training


@pytest.mark.parametrize("channels", [(3, 8), (8, 24), (24, 15)], ids=str)
@pytest.mark.parametrize(
    ("batch", "size", "kernel", "stride"),
    [(8, 16, 1, 1), (2, 32, 3, 2), (1, 24, 1, 1), (2, 24, 3, 1), (1, 7, 3, 1)],  # 256 pixels of 8 lanes, 192 of 16
)
def test_whole_chunks_of_pixels(channels: tuple[int, int], batch: int, size: int, kernel: int, stride: int) -> None:
    """The last pixel of a strip of rows wrote into the first pixel of the next strip."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, channels[0], size, size)).astype(np.float32)
    w = rng.standard_normal((channels[1], channels[0], kernel, kernel)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[kernel // 2] * 4, strides=[stride] * 2),
        helper.make_node("Mul", ["c", "c"], ["q"]),
        helper.make_node("ReduceMean", ["q"], ["loss"], keepdims=0),
    ]
    infos = [helper.make_tensor_value_info(n, 1, shape) for n, shape in (("x", x.shape), ("loss", []))]
    graph = helper.make_graph(nodes, "conv", infos[:1], infos[1:], [numpy_helper.from_array(w, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    step = compile_training(model, loss="loss", optimizer=SGD(lr=1.0))
    step(x)
    found = w.astype(np.float64) - step.parameters["w"]
    exact = torch.tensor(w, dtype=torch.float64, requires_grad=True)
    result = torch.nn.functional.conv2d(torch.tensor(x).double(), exact, stride=stride, padding=kernel // 2)
    (result**2).mean().backward()
    assert exact.grad is not None
    wanted = exact.grad.numpy()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max() + 4e-7 * np.abs(w).max())
