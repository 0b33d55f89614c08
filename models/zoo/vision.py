"""Image classifiers: ResNet-50, MobileNetV2, EfficientNet-B0, and the convolution block they share.

The order in which submodules are made fixes their random weights: keep it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def conv_bn(
    c_in: int,
    c_out: int,
    kernel: int = 3,
    stride: int = 1,
    groups: int = 1,
    activation: type[nn.Module] | None = nn.ReLU,
) -> nn.Sequential:
    """Convolution (padded by half its kernel), batch norm, activation."""
    layers: list[nn.Module] = [
        nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(c_out),
    ]
    if activation is not None:
        layers.append(activation())
    return nn.Sequential(*layers)


class Bottleneck(nn.Module):
    """ResNet's block: 1x1 down, 3x3, 1x1 up to four times the width, and the shortcut."""

    def __init__(self, c_in: int, width: int, stride: int) -> None:
        super().__init__()
        c_out = 4 * width
        self.body = nn.Sequential(
            conv_bn(c_in, width, 1),
            conv_bn(width, width, 3, stride),
            conv_bn(width, c_out, 1, activation=None),
        )
        reshaped = stride != 1 or c_in != c_out
        self.shortcut = conv_bn(c_in, c_out, 1, stride, activation=None) if reshaped else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet50(nn.Module):
    """He et al., 2015."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_bn(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
        channels = 64
        for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for block in range(blocks):
                layers.append(Bottleneck(channels, width, stride if block == 0 else 1))
                channels = 4 * width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(2048, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(self.features(x), 1), 1))


class InvertedResidual(nn.Module):
    """MobileNetV2's block: widen, depthwise 3x3, project; a residual where the shape stays."""

    def __init__(self, c_in: int, c_out: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = c_in * expansion
        layers: list[nn.Module] = [] if expansion == 1 else [conv_bn(c_in, hidden, 1, activation=nn.ReLU6)]
        layers.append(conv_bn(hidden, hidden, 3, stride, groups=hidden, activation=nn.ReLU6))
        layers.append(conv_bn(hidden, c_out, 1, activation=None))
        self.body = nn.Sequential(*layers)
        self.residual = stride == 1 and c_in == c_out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


class MobileNetV2(nn.Module):
    """Sandler et al., 2018."""

    STAGES = (  # expansion, channels, blocks, stride
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
        (6, 320, 1, 1),
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_bn(3, 32, 3, 2, activation=nn.ReLU6)]
        channels = 32
        for expansion, width, blocks, stride in self.STAGES:
            for block in range(blocks):
                layers.append(InvertedResidual(channels, width, stride if block == 0 else 1, expansion))
                channels = width
        layers.append(conv_bn(channels, 1280, 1, activation=nn.ReLU6))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(1280, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean([2, 3]))


class SqueezeExcite(nn.Module):
    """Channel attention: a gate for each channel from the mean over the image."""

    def __init__(self, channels: int, reduced: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, reduced, 1)
        self.expand = nn.Conv2d(reduced, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.expand(F.silu(self.reduce(F.adaptive_avg_pool2d(x, 1)))))


class MBConv(nn.Module):
    """EfficientNet's block: an inverted residual with squeeze-and-excite and SiLU."""

    def __init__(self, c_in: int, c_out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = c_in * expansion
        layers: list[nn.Module] = [] if expansion == 1 else [conv_bn(c_in, hidden, 1, activation=nn.SiLU)]
        layers.append(conv_bn(hidden, hidden, kernel, stride, groups=hidden, activation=nn.SiLU))
        layers.append(SqueezeExcite(hidden, max(1, c_in // 4)))
        layers.append(conv_bn(hidden, c_out, 1, activation=None))
        self.body = nn.Sequential(*layers)
        self.residual = stride == 1 and c_in == c_out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


class EfficientNetB0(nn.Module):
    """Tan and Le, 2019."""

    STAGES = (  # expansion, channels, blocks, stride, kernel
        (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5),
        (6, 192, 4, 2, 5), (6, 320, 1, 1, 3),
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_bn(3, 32, 3, 2, activation=nn.SiLU)]
        channels = 32
        for expansion, width, blocks, stride, kernel in self.STAGES:
            for block in range(blocks):
                layers.append(MBConv(channels, width, kernel, stride if block == 0 else 1, expansion))
                channels = width
        layers.append(conv_bn(channels, 1280, 1, activation=nn.SiLU))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(1280, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(self.features(x), 1), 1))
