"""MobileNetV2 (Sandler et al., 2018): inverted residuals around depthwise convolutions."""

from __future__ import annotations

import numpy as np
import onnx

from models.graph_builder import Dim, GraphBuilder

# expansion, channels, blocks, stride of the first block
STAGES = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip


def mobilenet_v2(*, batch: Dim = 1, size: Dim = 224, classes: int = 1000, seed: int = 0) -> onnx.ModelProto:
    """Input ``image`` float32 [batch, 3, size, size]; output ``logits`` float32 [batch, classes]."""
    g = GraphBuilder("mobilenet_v2", seed=seed)
    limits = (g.constant("zero", 0.0, np.float32), g.constant("six", 6.0, np.float32))
    x = g.input("image", np.float32, [batch, 3, size, size])
    x = _conv_bn(g, "stem", x, 3, 32, 3, stride=2, clip=limits)
    channels = 32
    for stage, (expansion, width, blocks, stride) in enumerate(STAGES):
        for block in range(blocks):
            with g.scope(f"stage{stage}.block{block}"):
                x = _inverted_residual(g, x, channels, width, expansion, stride if block == 0 else 1, limits)
            channels = width
    x = _conv_bn(g, "head", x, channels, 1280, 1, clip=limits)
    x = g.op("Flatten", g.op("GlobalAveragePool", x), axis=1)
    g.output("logits", g.linear("classifier", x, 1280, classes), np.float32, [batch, classes])
    return g.build()


def _inverted_residual(
    g: GraphBuilder, x: str, c_in: int, c_out: int, expansion: int, stride: int, limits: tuple[str, str]
) -> str:
    hidden = c_in * expansion
    y = x if expansion == 1 else _conv_bn(g, "expand", x, c_in, hidden, 1, clip=limits)
    y = _conv_bn(g, "depthwise", y, hidden, hidden, 3, stride=stride, groups=hidden, clip=limits)
    y = _conv_bn(g, "project", y, hidden, c_out, 1)
    return g.op("Add", x, y) if stride == 1 and c_in == c_out else y


def _conv_bn(
    g: GraphBuilder,
    name: str,
    x: str,
    c_in: int,
    c_out: int,
    kernel: int,
    *,
    stride: int = 1,
    groups: int = 1,
    clip: tuple[str, str] | None = None,
) -> str:
    """Convolution, batch norm and, where limits are given, ReLU6 as a Clip."""
    with g.scope(name):
        x = g.batch_norm("norm", g.conv("conv", x, c_in, c_out, kernel, stride=stride, groups=groups), c_out)
        return g.op("Clip", x, *clip) if clip else x
