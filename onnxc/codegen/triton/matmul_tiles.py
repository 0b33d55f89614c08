"""How a product of matrices may be laid over the programs of a GPU: the candidates, and a cost model.

A choice is a `Blocks`, plain numbers. `candidates` lists those that are worth measuring for a product, the one that the
cost model takes first. The model knows of each kind of tile what was measured of many of them on an H200: how long a
tile takes that has no sum, and each further part of the sum. The multiprocessor that has most tiles decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from onnxc.codegen.triton.kernel import power
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim

MULTIPROCESSORS = 132
OPEN = 1 << 10  # what a size counts as that is known at run time only
OPEN_BATCH = 16
CANDIDATES = 8
MOST_LANES = 1 << 16  # elements of a tile: its sums fill the registers of a program


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

    def as_dict(self) -> dict[str, int]:
        """The numbers by name."""
        return asdict(self)

    @staticmethod
    def from_dict(numbers: Mapping[str, int]) -> Blocks:
        """The inverse of :meth:`as_dict`.

        Raises:
            ValueError: a name or number that no tile has.
        """
        try:
            found = Blocks(**numbers)
        except TypeError as error:
            raise ValueError(f"not a tile: {dict(numbers)}") from error
        sides = (found.m, found.n, found.k)
        fine = all(type(n) is int for n in numbers.values()) and all(16 <= n == power(n) <= 512 for n in sides)
        fine = fine and found.m * found.n <= MOST_LANES and 1 <= found.warps == power(found.warps) <= 16
        if not (fine and 1 <= found.stages <= 8 and 0 <= found.resident <= 4):
            raise ValueError(f"not a tile: {dict(numbers)}")
        return found


@dataclass(frozen=True)
class Facts:
    """What a choice depends on.

    Attributes:
        m, n, k, batch: sizes of the product.
        dtype: of its elements.
        exact: float32 on ordinary units.
        described: whether operands can be read through tensor descriptors.
    """

    m: Dim
    n: Dim
    k: Dim
    batch: Dim
    dtype: DType
    exact: bool
    described: bool = False


@dataclass(frozen=True)
class _Cost:
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
        m, n, k, batch = (
            d if isinstance(d, int) else most
            for d, most in zip((facts.m, facts.n, facts.k, facts.batch), (OPEN, OPEN, OPEN, OPEN_BATCH), strict=True)
        )
        tiles = -(-m // self.blocks.m) * -(-n // self.blocks.n) * batch
        each = -(-tiles // MULTIPROCESSORS)
        steps = -(-k // self.blocks.k) * self.blocks.k / 64
        return self.kernel + max(self.tile + (self.step + self.alone) * steps, each * (self.tile + self.step * steps))


# Of 16-bit products on matrix units.
HALF = (
    _Cost(Blocks(128, 256, 64, 8, 3, 1), 1.8, 1.65, 0.74),
    _Cost(Blocks(128, 128, 64, 4, 3, 2), 2.15, 0.8, 0.38),
    _Cost(Blocks(128, 128, 64, 4, 4, 1), 1.6, 1.1, 0.395),
    _Cost(Blocks(128, 256, 64, 8, 4), 0.5, 3.7, 0.67),
    _Cost(Blocks(128, 128, 32, 4, 4), 0.65, 0.95, 0.405, 0.15),
    _Cost(Blocks(128, 128, 64, 4, 3), 1.3, 1.15, 0.39, 0.085),
    _Cost(Blocks(64, 256, 64, 4, 4), 0.3, 2.75, 0.38),
    _Cost(Blocks(64, 128, 64, 4, 6), 0.7, 2.1, 0.23),
    _Cost(Blocks(128, 64, 64, 4, 4), 1.95, 0.8, 0.26),
    _Cost(Blocks(64, 64, 64, 4, 6), 1.6, 1.1, 0.125, 0.035),
    _Cost(Blocks(64, 64, 128, 4, 4), 0.95, 1.5, 0.16),
    _Cost(Blocks(64, 32, 128, 4, 5), 0.75, 1.6, 0.14),
    _Cost(Blocks(32, 64, 128, 4, 4), 2.65, 0.1, 0.19, 0.055),
    _Cost(Blocks(32, 32, 128, 4, 5), 1.85, 0.5, 0.125, 0.04),
    _Cost(Blocks(16, 64, 128, 4, 4), 2.2, 0.2, 0.135, 0.035),
    _Cost(Blocks(16, 32, 128, 4, 4), 2.2, 0.2, 0.12, 0.035),
)  # fmt: skip
# The same of float32 on ordinary units, which need no large tiles.
EXACT = (
    _Cost(Blocks(128, 64, 16, 8, 3), 2.0, 1.0, 2.3), _Cost(Blocks(64, 64, 16, 4, 3), 2.0, 0.6, 1.28),
    _Cost(Blocks(32, 64, 32, 4, 3), 2.0, 0.4, 0.82), _Cost(Blocks(32, 32, 32, 2, 3), 2.0, 0.3, 0.52),
    _Cost(Blocks(16, 32, 32, 2, 3), 2.0, 0.2, 0.36),
)  # fmt: skip


def candidates(facts: Facts) -> list[Blocks]:
    """Tiles that are worth measuring, the cost model's choice first; no tile twice."""
    ranked = sorted(EXACT if facts.exact else HALF, key=lambda cost: cost.time(facts))
    found = (_fitted(c.blocks, facts) for c in ranked if facts.described or not c.blocks.resident)
    return list(dict.fromkeys(found))[:CANDIDATES]


def _fitted(blocks: Blocks, facts: Facts) -> Blocks:
    """A tile for this dtype, with no more of the sum at a time than there is."""
    step = max(16, min(blocks.k, power(facts.k))) if isinstance(facts.k, int) else blocks.k
    return replace(blocks, k=max(16, step // 2) if facts.dtype.bits == 32 and not facts.exact else step)
