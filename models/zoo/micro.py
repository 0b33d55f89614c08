"""Small modules: an MLP, an LSTM, and the pointwise and reduction patterns that fusion is judged by.

The order in which submodules are made fixes their random weights: keep it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MLP(nn.Module):
    """Six linear layers, 1024 to 4096 and back, with GELU and ReLU; ten outputs."""

    def __init__(self, width: int = 1024, hidden: int = 4096, blocks: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(blocks):
            layers += [nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class LSTM(nn.Module):
    """A two-layer LSTM language model; logits for the last position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10000, 256)
        self.lstm = nn.LSTM(256, 512, 2, batch_first=True)
        self.out = nn.Linear(512, 10000)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(ids))[0][:, -1])


class BiasGeluNorm(nn.Module):
    """Bias, GELU (tanh form), residual, LayerNorm."""

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(width))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.norm(F.gelu(x + self.bias, approximate="tanh") + residual)


class MaskedSoftmax(nn.Module):
    """Scaled and masked softmax over the last axis."""

    def forward(self, scores: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(scores * 0.125 + mask, -1)


class RmsNormRope(nn.Module):
    """RMSNorm, then rotary positions on each head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int = 1024, heads: int = 16, positions: int = 512) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.heads = heads
        head = width // heads
        frequencies = 1 / 10000 ** (torch.arange(0, head, 2) / head)
        angles = torch.arange(positions)[:, None] * frequencies
        angles = torch.cat([angles, angles], -1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        batch, length, width = x.shape
        x = x.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        first, second = x.chunk(2, -1)
        return x * self.cos[:length] + torch.cat([-second, first], -1) * self.sin[:length]


class Chain(nn.Module):
    """Some thirty elementwise ops in a row, tanh and sigmoid among them."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.tanh(x * 0.5 + y)
            x = x * torch.sigmoid(x) - 0.1 * y
        return torch.clamp(torch.abs(x) + 1e-3, max=4.0).sqrt() * x


class CheapChain(nn.Module):
    """Twenty elementwise ops that cost one instruction each."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(5):
            x = x * y + 0.5
            x = torch.maximum(x, y) - 0.25
        return x


class GroupNormSilu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, 192)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(x))


class LayerNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(768)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class TransposeSum(nn.Module):
    """A transpose, a product and a sum over an axis that is not the last."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x.transpose(1, 2) * y).sum(1)
