"""How a convolution as an implicit product may be laid over the programs of a GPU: the candidates, and a cost model.

The model is that of `matmul_tiles.py` with numbers of its own: what was measured of the convolutions of two networks on
an H200, by tiles that gather their rows from images.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from onnxc.codegen.triton.kernel import power
from onnxc.codegen.triton.matmul_tiles import Blocks
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim

MULTIPROCESSORS = 132
OPEN = 1 << 14  # what a size counts as that is known at run time only
CANDIDATES = 8


@dataclass(frozen=True)
class Sizes:
    """What a choice depends on.

    Attributes:
        rows: positions of the result, in all images.
        outputs, channels: of a group.
        turns: of the loop, each over all channels.
        groups: how many.
        dtype: of the elements.
        exact: float32 on ordinary units.
        most: elements of the sum that are read at a time, where not as many as a tile may.
    """

    rows: Dim
    outputs: Dim
    channels: Dim
    turns: int
    groups: int
    dtype: DType
    exact: bool
    most: int | None = None


@dataclass(frozen=True)
class _Cost:
    """Microseconds: of a kernel, of each tile that a multiprocessor has, and of 64 elements of its sum."""

    blocks: Blocks
    kernel: float
    tile: float
    step: float

    def time(self, sizes: Sizes) -> float:
        """Of a convolution."""
        rows, outputs, channels = (
            d if isinstance(d, int) else OPEN for d in (sizes.rows, sizes.outputs, sizes.channels)
        )
        blocks = _fitted(self.blocks, sizes)
        tiles = -(-rows // blocks.m) * -(-outputs // blocks.n) * sizes.groups
        steps = sizes.turns * -(-channels // blocks.k) * blocks.k / 64
        return self.kernel + -(-tiles // MULTIPROCESSORS) * (self.tile + self.step * steps)


# Of 16-bit products on matrix units.
HALF = (
    _Cost(Blocks(128, 256, 64, 8, 4), 0.4, 4.7, 0.62),
    _Cost(Blocks(128, 128, 32, 4, 4), 1.85, 1.6, 0.48),
    _Cost(Blocks(128, 128, 64, 4, 4), 1.85, 1.6, 0.48),
    _Cost(Blocks(128, 64, 64, 4, 4), 2.25, 0.73, 0.33),
    _Cost(Blocks(128, 64, 32, 4, 4), 2.25, 0.73, 0.33),
    _Cost(Blocks(64, 128, 64, 4, 4), 2.15, 0.82, 0.26),
    _Cost(Blocks(64, 64, 64, 4, 4), 2.1, 0.34, 0.19),
    _Cost(Blocks(256, 64, 32, 4, 4), 1.9, 1.55, 0.66),
    _Cost(Blocks(128, 32, 32, 4, 4), 3.4, 0.3, 0.3),
    _Cost(Blocks(64, 32, 128, 4, 5), 1.45, 0.2, 0.2),
    _Cost(Blocks(128, 16, 32, 4, 4), 3.1, 0.22, 0.28),
    _Cost(Blocks(32, 64, 128, 4, 4), 0.5, 2.4, 0.22),
    _Cost(Blocks(32, 32, 64, 4, 4), 0.2, 0.43, 0.21),
    _Cost(Blocks(16, 64, 128, 4, 4), 0.2, 0.48, 0.19),
    _Cost(Blocks(16, 32, 256, 4, 3), 1.3, 0.13, 0.136),
    _Cost(Blocks(16, 32, 128, 4, 4), 0.2, 0.25, 0.17),
)  # fmt: skip
# The same of float32 on ordinary units, which need no large tiles.
EXACT = (
    _Cost(Blocks(128, 64, 16, 8, 3), 2.0, 1.0, 2.3), _Cost(Blocks(64, 64, 16, 4, 3), 2.0, 0.6, 1.28),
    _Cost(Blocks(32, 64, 32, 4, 3), 2.0, 0.4, 0.82), _Cost(Blocks(32, 32, 32, 2, 3), 2.0, 0.3, 0.52),
    _Cost(Blocks(16, 32, 32, 2, 3), 2.0, 0.2, 0.36),
)  # fmt: skip


def candidates(sizes: Sizes) -> list[Blocks]:
    """Tiles that are worth measuring, the cost model's choice first; no tile twice."""
    ranked = sorted(EXACT if sizes.exact else HALF, key=lambda cost: cost.time(sizes))
    return list(dict.fromkeys(_fitted(cost.blocks, sizes) for cost in ranked))[:CANDIDATES]


def _fitted(blocks: Blocks, sizes: Sizes) -> Blocks:
    """A tile for this dtype, with no more channels at a time than there are."""
    step = max(16, min(blocks.k, power(sizes.channels))) if isinstance(sizes.channels, int) else blocks.k
    step = min(step, sizes.most or step)
    return replace(blocks, k=max(16, step // 2) if sizes.dtype.bits == 32 and not sizes.exact else step)
