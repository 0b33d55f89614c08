"""Small modules with a loss, of parts that the models of the zoo have not: trained beside PyTorch in the tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Attention with fewer heads of keys than of queries, causal and by rotated positions on demand."""

    def __init__(self, width: int, heads: int, groups: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.size, self.causal = heads, groups, width // heads, causal
        self.queries = nn.Linear(width, width, bias=not causal)
        self.keys = nn.Linear(width, groups * self.size, bias=not causal)
        self.values = nn.Linear(width, groups * self.size, bias=not causal)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._split(self.queries(x)), self._split(self.keys(x)), self._split(self.values(x))
        if self.causal:
            q, k = rotated(q), rotated(k)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(x.shape))

    def _split(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], x.shape[1], -1, self.size).transpose(1, 2)


def rotated(x: Tensor) -> Tensor:
    """Neighbours as points of a plane, turned by their position."""
    length, size = x.shape[-2:]
    speeds = 10000.0 ** (-torch.arange(0, size, 2).to(x.dtype) / size)
    angles = torch.arange(length).to(x.dtype)[:, None] * speeds
    a, b = x[..., ::2], x[..., 1::2]
    turned = a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()
    return torch.stack(turned, -1).flatten(-2)


class SmallViT(nn.Module):
    """A classifier of images by attention between patches."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.first = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.1 * torch.randn(1, 17, width))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.attention = Attention(width, 4, 4, causal=False)
        self.wide = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.positions
        x = x + self.attention(self.norm1(x))
        x = x + self.wide(self.norm2(x))
        return self.head(self.norm3(x)[:, 0])


class Autoencoder(nn.Module):
    """Convolutions down, transposed convolutions up; its loss has two terms."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.SiLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ELU())
        self.up = nn.Sequential(
            nn.ConvTranspose2d(16, 8, 3, 2, 1, output_padding=1), nn.LeakyReLU(0.1), nn.ConvTranspose2d(8, 1, 4, 2, 1),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        code = self.down(images)
        return F.mse_loss(self.up(code).sigmoid(), images) + 0.01 * code.abs().mean()


class Tagger(nn.Module):
    """A class for each word, by a GRU that reads both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.gru = nn.GRU(16, 24, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 7)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.gru(self.embed(ids))[0])


class RMSNorm(nn.Module):
    """x by the root of its mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain


class Decoder(nn.Module):
    """A causal language model with gates, whose scores are by the table of its embedding."""

    def __init__(self, words: int = 60, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.norm1, self.norm2, self.norm3 = (RMSNorm(width) for _ in range(3))
        self.attention = Attention(width, 4, 2, causal=True)
        self.gate, self.wide = (nn.Linear(width, 48, bias=False) for _ in range(2))
        self.narrow = nn.Linear(48, width, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        x = x + self.narrow(F.silu(self.gate(y)) * self.wide(y))
        return self.norm3(x) @ self.embed.weight.T


class MobileNet(nn.Module):
    """Inverted residuals with batch norms, and gates by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.first, self.second = self._residual(8, 8, 1), self._residual(8, 16, 2)
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 4, 1), nn.ReLU(), nn.Conv2d(4, 16, 1), nn.Hardsigmoid(),
        )  # fmt: skip
        self.head = nn.Linear(16, 10)

    def _residual(self, inner: int, outer: int, stride: int) -> nn.Module:
        wide = 3 * inner
        return nn.Sequential(
            nn.Conv2d(inner, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.Hardswish(),
            nn.Conv2d(wide, outer, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        x = self.second(x + self.first(x))
        return self.head((x * self.gate(x)).mean((2, 3)))
