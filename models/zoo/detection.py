"""A detector of YOLOv8n's shape for 640x640 images, its boxes decoded inside the graph.

The order in which submodules are made fixes their random weights: keep it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.zoo.vision import conv_bn

conv = partial(conv_bn, activation=nn.SiLU)
upsample = partial(F.interpolate, scale_factor=2.0, mode="nearest")


class C2f(nn.Module):
    """Split the channels, run a chain of small blocks on one half, concatenate every step."""

    def __init__(self, c_in: int, c_out: int, blocks: int, residual: bool) -> None:
        super().__init__()
        half = c_out // 2
        self.residual = residual
        self.enter = conv(c_in, c_out, 1)
        self.leave = conv((2 + blocks) * half, c_out, 1)
        self.blocks = nn.ModuleList(nn.Sequential(conv(half, half, 3), conv(half, half, 3)) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.enter(x).chunk(2, 1))
        for block in self.blocks:
            y = block(parts[-1])
            parts.append(parts[-1] + y if self.residual else y)
        return self.leave(torch.cat(parts, 1))


class SpatialPyramid(nn.Module):
    """SPPF: three max pools in a row, all their results concatenated."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.enter = conv(channels, channels // 2, 1)
        self.leave = conv(channels * 2, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.enter(x)]
        for _ in range(3):
            parts.append(F.max_pool2d(parts[-1], 5, 1, 2))
        return self.leave(torch.cat(parts, 1))


class Yolo(nn.Module):
    """Output [batch, 4 + classes, 8400]: box centre and size in pixels, then class probabilities."""

    anchors: Tensor
    strides: Tensor
    bins: Tensor

    def __init__(self, classes: int = 80, bins: int = 16) -> None:
        super().__init__()
        self.bin_count = bins
        self.stem = nn.Sequential(conv(3, 16, 3, 2), conv(16, 32, 3, 2), C2f(32, 32, 1, True))
        self.stage3 = nn.Sequential(conv(32, 64, 3, 2), C2f(64, 64, 2, True))
        self.stage4 = nn.Sequential(conv(64, 128, 3, 2), C2f(128, 128, 2, True))
        self.stage5 = nn.Sequential(conv(128, 256, 3, 2), C2f(256, 256, 1, True), SpatialPyramid(256))
        self.up4 = C2f(128 + 256, 128, 1, False)
        self.up3 = C2f(64 + 128, 64, 1, False)
        self.down3 = conv(64, 64, 3, 2)
        self.mix4 = C2f(64 + 128, 128, 1, False)
        self.down4 = conv(128, 128, 3, 2)
        self.mix5 = C2f(128 + 256, 256, 1, False)
        self.boxes = self._heads(64, 4 * bins)
        self.scores = self._heads(80, classes)
        self._make_anchors()

    @staticmethod
    def _heads(width: int, outputs: int) -> nn.ModuleList:
        """One head for each of the three resolutions."""
        return nn.ModuleList(
            nn.Sequential(conv(channels, width, 3), conv(width, width, 3), nn.Conv2d(width, outputs, 1))
            for channels in (64, 128, 256)
        )

    def _make_anchors(self) -> None:
        anchors, strides = [], []
        for cells, stride in ((80, 8.0), (40, 16.0), (20, 32.0)):
            centres = torch.arange(cells) + 0.5
            y, x = torch.meshgrid(centres, centres, indexing="ij")
            anchors.append(torch.stack((x, y)).reshape(2, -1))
            strides.append(torch.full((cells * cells,), stride))
        self.register_buffer("anchors", torch.cat(anchors, 1))
        self.register_buffer("strides", torch.cat(strides))
        self.register_buffer("bins", torch.arange(self.bin_count).float())

    def _pyramid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        p3 = self.stage3(self.stem(x))
        p4 = self.stage4(p3)
        p5 = self.stage5(p4)
        top4 = self.up4(torch.cat((upsample(p5), p4), 1))
        out3 = self.up3(torch.cat((upsample(top4), p3), 1))
        out4 = self.mix4(torch.cat((self.down3(out3), top4), 1))
        out5 = self.mix5(torch.cat((self.down4(out4), p5), 1))
        return out3, out4, out5

    def _decode(self, boxes: Tensor) -> Tensor:
        """Each side's distance is the mean of a distribution over bins; sides become centre and size."""
        bins = boxes.reshape(boxes.shape[0], 4, self.bin_count, -1).softmax(2)
        distances = (bins * self.bins[None, None, :, None]).sum(2)
        before, after = distances.chunk(2, 1)
        low, high = self.anchors - before, self.anchors + after
        return torch.cat(((low + high) / 2, high - low), 1) * self.strides

    def forward(self, x: Tensor) -> Tensor:
        features = self._pyramid(x)
        boxes = torch.cat([head(f).flatten(2) for head, f in zip(self.boxes, features, strict=True)], 2)
        scores = torch.cat([head(f).flatten(2) for head, f in zip(self.scores, features, strict=True)], 2)
        return torch.cat((self._decode(boxes), scores.sigmoid()), 1)
