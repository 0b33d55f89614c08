"""How a product of matrices may be laid over the programs of a GPU: what was measured of each kind of tile."""

from __future__ import annotations

from onnxc.codegen.triton import product_tiles
from onnxc.codegen.triton.product_tiles import Blocks, Cost, Facts

# Of 16-bit products on matrix units.
HALF = (
    Cost(Blocks(128, 256, 64, 8, 3, 1), 1.8, 1.65, 0.74, 0.4),
    Cost(Blocks(128, 128, 64, 4, 3, 2), 2.15, 0.8, 0.38, 0.13),
    Cost(Blocks(128, 128, 64, 4, 4, 1), 1.6, 1.1, 0.395),
    Cost(Blocks(128, 256, 64, 8, 4), 0.5, 3.7, 0.74),
    Cost(Blocks(128, 128, 32, 4, 4), 0.65, 0.95, 0.405, 0.15),
    Cost(Blocks(128, 128, 64, 4, 3), 1.3, 1.15, 0.39, 0.085),
    Cost(Blocks(64, 256, 64, 4, 4), 0.3, 2.75, 0.38),
    Cost(Blocks(64, 128, 64, 4, 6), 0.7, 2.1, 0.23, 0.045),
    Cost(Blocks(128, 64, 64, 4, 4), 1.95, 0.8, 0.26, 0.05),
    Cost(Blocks(64, 64, 64, 4, 6), 1.6, 1.1, 0.125, 0.035),
    Cost(Blocks(64, 64, 128, 4, 4), 0.95, 1.5, 0.16),
    Cost(Blocks(64, 32, 128, 4, 5), 0.75, 1.6, 0.14),
    Cost(Blocks(32, 64, 128, 4, 4), 2.65, 0.1, 0.19, 0.055),
    Cost(Blocks(32, 32, 128, 4, 5), 1.85, 0.5, 0.125, 0.04),
    Cost(Blocks(16, 64, 128, 4, 4), 2.2, 0.2, 0.135, 0.035),
    Cost(Blocks(16, 32, 128, 4, 4), 2.2, 0.2, 0.12, 0.035),
)  # fmt: skip

# Of two of them whose results meet, by the tile of what follows; measured with a gate behind them, on an H100.
PAIRS = (
    Cost(Blocks(128, 128, 64, 8, 3, 1), 0.1, 2.15, 0.745),
    Cost(Blocks(128, 64, 64, 4, 3, 2), 6.05, 0.5, 0.39),
    Cost(Blocks(128, 64, 64, 4, 4, 1), 4.85, 0.65, 0.405, 0.14),
    Cost(Blocks(64, 128, 64, 4, 4, 1), 3.0, 1.4, 0.385, 0.2),
    Cost(Blocks(128, 128, 64, 8, 4), 0.5, 2.2, 0.75),
    Cost(Blocks(128, 64, 64, 4, 3), 0.2, 1.95, 0.425, 0.015),
    Cost(Blocks(128, 64, 64, 4, 4), 1.0, 1.5, 0.43, 0.16),
    Cost(Blocks(64, 128, 64, 4, 5), 1.0, 1.5, 0.42, 0.15),
    Cost(Blocks(64, 64, 64, 4, 4, 2), 0.1, 0.3, 0.34, 0.1),
    Cost(Blocks(64, 64, 64, 4, 6), 0.7, 2.1, 0.29),
    Cost(Blocks(128, 32, 64, 4, 4), 1.0, 1.0, 0.29),
    Cost(Blocks(32, 64, 128, 4, 3), 1.0, 1.0, 0.3, 0.24),
    Cost(Blocks(32, 32, 128, 4, 4), 1.0, 0.5, 0.28),
    Cost(Blocks(16, 64, 128, 4, 3), 1.0, 1.0, 0.25, 0.285),
    Cost(Blocks(16, 32, 128, 4, 4), 1.0, 0.5, 0.265),
)  # fmt: skip


def for_few_rows(facts: Facts) -> list[tuple[Blocks, int]]:
    """As that of `product_tiles`."""
    return product_tiles.for_few_rows(PAIRS if facts.pair else HALF, facts)


def candidates(facts: Facts) -> list[Blocks]:
    """Tiles that are worth measuring for a product of matrices, the cost model's choice first."""
    return product_tiles.candidates(PAIRS if facts.pair else HALF, facts)
