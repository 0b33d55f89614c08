"""The tiles of products on a GPU, of matrices and of convolutions: what a choice is, and how long each would take.

A choice is a `Blocks`, plain numbers. The cost model knows of each kind of tile what was measured of many of them on an
H200: how long a tile takes that has no sum, and each further part of the sum. The multiprocessor that has most tiles
decides; where others have work beside the product, the sum of all tiles does. `matmul_tiles.py` and `conv_tiles.py`
have the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from onnxc.codegen.triton.kernel import power
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim

MULTIPROCESSORS = 132
CANDIDATES = 8
BESIDE = 0.15  # what the time of one tile counts of a product that runs beside others


@dataclass(frozen=True)
class Blocks:
    """A tile's sizes, and how a program runs it.

    Attributes:
        m, n: of the tile, powers of two.
        k: of the sum that are read at a time.
        warps: of a program.
        stages: pieces of the sum that are in shared memory at once.
        resident: programs for each multiprocessor, which take one tile after the other and read through descriptors;
            0 for a program for each tile.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    resident: int = 0


@dataclass(frozen=True)
class Facts:
    """What a choice depends on.

    Attributes:
        m, n, k: sizes of the product; of the sum, those that a turn of the loop runs over.
        count: of products, in a batch or in groups.
        dtype: of the elements.
        exact: float32 on ordinary units.
        described: whether operands can be read through tensor descriptors.
        turns: of the loop around the sum: taps of a window.
        most: elements of the sum that are read at a time, where not as many as a tile may.
        beside: whether other kernels run beside this one, and nothing waits for it.
        pair: whether a tile's sums are twice as many columns as its result has: those of two products.
        unknown: what a size counts as that is known at run time only, and what a number of products does.
    """

    m: Dim
    n: Dim
    k: Dim
    count: Dim
    dtype: DType
    exact: bool
    described: bool = False
    turns: int = 1
    most: int | None = None
    beside: bool = False
    pair: bool = False
    unknown: tuple[int, int] = (1 << 10, 16)


@dataclass(frozen=True)
class Cost:
    """Microseconds: of a kernel, of each tile that a multiprocessor has, of 64 elements of a tile's sum, and how much
    longer those take of a tile that is alone there.
    """

    blocks: Blocks
    kernel: float
    tile: float
    step: float
    alone: float = 0.0

    def time(self, facts: Facts) -> float:
        """Of a product."""
        blocks, (size, count) = fitted(self.blocks, facts), facts.unknown
        m, n, k = (d if isinstance(d, int) else size for d in (facts.m, facts.n, facts.k))
        tiles = -(-m // blocks.m) * -(-n // blocks.n) * (facts.count if isinstance(facts.count, int) else count)
        each = -(-tiles // MULTIPROCESSORS)
        steps = facts.turns * -(-k // blocks.k) * blocks.k / 64
        if facts.beside:
            work = tiles * (self.tile + self.step * steps) / MULTIPROCESSORS
            return self.kernel + work + BESIDE * (self.tile + (self.step + self.alone) * steps)
        return self.kernel + max(self.tile + (self.step + self.alone) * steps, each * (self.tile + self.step * steps))


# Of float32 on ordinary units, which need no large tiles.
EXACT = (
    Cost(Blocks(128, 64, 16, 8, 3), 2.0, 1.0, 2.3), Cost(Blocks(64, 64, 16, 4, 3), 2.0, 0.6, 1.28),
    Cost(Blocks(32, 64, 32, 4, 3), 2.0, 0.4, 0.82), Cost(Blocks(32, 32, 32, 2, 3), 2.0, 0.3, 0.52),
    Cost(Blocks(16, 32, 32, 2, 3), 2.0, 0.2, 0.36),
)  # fmt: skip


def candidates(halves: Iterable[Cost], facts: Facts) -> list[Blocks]:
    """Tiles that are worth measuring, the cost model's choice first; no tile twice. `halves`: of matrix units."""
    ranked = sorted(EXACT if facts.exact else halves, key=lambda cost: cost.time(facts))
    found = (fitted(c.blocks, facts) for c in ranked if facts.described or not c.blocks.resident)
    return list(dict.fromkeys(found))[:CANDIDATES]


def fitted(blocks: Blocks, facts: Facts) -> Blocks:
    """A tile for this dtype, with no more of the sum at a time than there is."""
    step = max(16, min(blocks.k, power(facts.k))) if isinstance(facts.k, int) else blocks.k
    step = min(step, facts.most or step)
    return replace(blocks, k=max(16, step // 2) if facts.dtype.bits == 32 and not facts.exact else step)
