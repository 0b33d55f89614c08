"""A denoising UNet, as diffusion models have it: timed residual blocks, attention at the bottom.

The order in which submodules are made fixes their random weights: keep it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GROUPS = 32


class TimedResidual(nn.Module):
    """Two convolutions, each behind GroupNorm and SiLU, with the time embedding added between them."""

    def __init__(self, c_in: int, c_out: int, time_width: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, c_in)
        self.conv1 = nn.Conv2d(c_in, c_out, 3, 1, 1)
        self.time = nn.Linear(time_width, c_out)
        self.norm2 = nn.GroupNorm(GROUPS, c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1)
        self.shortcut = nn.Conv2d(c_in, c_out, 1) if c_in != c_out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.conv2(F.silu(self.norm2(h))) + self.shortcut(x)


class ImageAttention(nn.Module):
    """Self-attention over the pixels of a feature map, with a residual."""

    def __init__(self, channels: int, heads: int = 4) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        split = self.qkv(self.norm(x)).reshape(b, 3, self.heads, c // self.heads, h * w)
        query, key, value = split.transpose(-1, -2).unbind(1)
        attended = F.scaled_dot_product_attention(query, key, value)
        return x + self.out(attended.transpose(-1, -2).reshape(b, c, h, w))


class UNet(nn.Module):
    """Three resolutions, two residual blocks each on the way down and one more on the way up, with skips."""

    def __init__(
        self, width: int = 96, multipliers: tuple[int, ...] = (1, 2, 3), latent: int = 4, blocks: int = 2
    ) -> None:
        super().__init__()
        self.width, self.blocks = width, blocks
        self.time_width = 4 * width
        self.embed_time = nn.Sequential(
            nn.Linear(width, self.time_width), nn.SiLU(), nn.Linear(self.time_width, self.time_width)
        )
        self.conv_in = nn.Conv2d(latent, width, 3, 1, 1)
        self.down = nn.ModuleList()
        self.up = nn.ModuleList()
        channels, skips = self._make_down(multipliers)
        self.middle1 = TimedResidual(channels, channels, self.time_width)
        self.middle_attention = ImageAttention(channels)
        self.middle2 = TimedResidual(channels, channels, self.time_width)
        channels = self._make_up(multipliers, channels, skips)
        self.norm_out = nn.GroupNorm(GROUPS, channels)
        self.conv_out = nn.Conv2d(channels, latent, 3, 1, 1)

    def _block(self, c_in: int, c_out: int, attention: bool) -> nn.ModuleList:
        return nn.ModuleList(
            [
                TimedResidual(c_in, c_out, self.time_width),
                ImageAttention(c_out) if attention else nn.Identity(),
            ]
        )

    def _make_down(self, multipliers: tuple[int, ...]) -> tuple[int, list[int]]:
        channels = self.width
        skips = [channels]
        last = len(multipliers) - 1
        for level, multiplier in enumerate(multipliers):
            for _ in range(self.blocks):
                self.down.append(self._block(channels, self.width * multiplier, level == last))
                channels = self.width * multiplier
                skips.append(channels)
            if level < last:
                self.down.append(nn.ModuleList([nn.Conv2d(channels, channels, 3, 2, 1)]))
                skips.append(channels)
        return channels, skips

    def _make_up(self, multipliers: tuple[int, ...], channels: int, skips: list[int]) -> int:
        last = len(multipliers) - 1
        for level, multiplier in reversed(list(enumerate(multipliers))):
            for _ in range(self.blocks + 1):
                self.up.append(self._block(channels + skips.pop(), self.width * multiplier, level == last))
                channels = self.width * multiplier
            if level > 0:
                self.up.append(nn.ModuleList([nn.Conv2d(channels, channels, 3, 1, 1)]))
        return channels

    def _time_embedding(self, t: Tensor) -> Tensor:
        """Sines and cosines of the time step at geometrically spaced frequencies, through an MLP."""
        half = self.width // 2
        frequencies = torch.exp(torch.arange(half, device=t.device) * (-math.log(10000) / half))
        angles = t[:, None] * frequencies[None]
        return self.embed_time(torch.cat([angles.cos(), angles.sin()], -1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        time = self._time_embedding(t)
        h = self.conv_in(x)
        skips = [h]
        for stage in self.down:
            h = stage[1](stage[0](h, time)) if len(stage) == 2 else stage[0](h)
            skips.append(h)
        h = self.middle2(self.middle_attention(self.middle1(h, time)), time)
        for stage in self.up:
            if len(stage) == 2:
                h = stage[1](stage[0](torch.cat([h, skips.pop()], 1), time))
            else:
                h = stage[0](F.interpolate(h, scale_factor=2.0, mode="nearest"))
        return self.conv_out(F.silu(self.norm_out(h)))
