"""ResNet-50 (He et al., 2015), the form with the stride in the 3x3 convolution."""

from __future__ import annotations

import numpy as np
import onnx

from models.graph_builder import Dim, GraphBuilder

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # width, blocks, stride of the first block


def resnet50(*, batch: Dim = 1, size: Dim = 224, classes: int = 1000, seed: int = 0) -> onnx.ModelProto:
    """Input ``image`` float32 [batch, 3, size, size]; output ``logits`` float32 [batch, classes]."""
    g = GraphBuilder("resnet50", seed=seed)
    x = g.input("image", np.float32, [batch, 3, size, size])
    x = g.op("Relu", _conv_bn(g, "stem", x, 3, 64, 7, stride=2))
    x = g.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = 64
    for stage, (width, blocks, stride) in enumerate(STAGES):
        for block in range(blocks):
            with g.scope(f"stage{stage}.block{block}"):
                x = _bottleneck(g, x, channels, width, stride if block == 0 else 1)
            channels = 4 * width
    x = g.op("Flatten", g.op("GlobalAveragePool", x), axis=1)
    g.output("logits", g.linear("classifier", x, channels, classes), np.float32, [batch, classes])
    return g.build()


def _bottleneck(g: GraphBuilder, x: str, channels: int, width: int, stride: int) -> str:
    y = g.op("Relu", _conv_bn(g, "reduce", x, channels, width, 1))
    y = g.op("Relu", _conv_bn(g, "spatial", y, width, width, 3, stride=stride))
    y = _conv_bn(g, "expand", y, width, 4 * width, 1)
    if channels != 4 * width or stride != 1:
        x = _conv_bn(g, "shortcut", x, channels, 4 * width, 1, stride=stride)
    return g.op("Relu", g.op("Add", x, y))


def _conv_bn(g: GraphBuilder, name: str, x: str, c_in: int, c_out: int, kernel: int, *, stride: int = 1) -> str:
    with g.scope(name):
        return g.batch_norm("norm", g.conv("conv", x, c_in, c_out, kernel, stride=stride), c_out)
