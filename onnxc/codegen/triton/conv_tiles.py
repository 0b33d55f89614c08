"""How a convolution as an implicit product may be laid over the programs of a GPU: what was measured of each kind of
tile, by the convolutions of two networks. These tiles gather their rows from images.
"""

from __future__ import annotations

from onnxc.codegen.triton import product_tiles
from onnxc.codegen.triton.product_tiles import Blocks, Cost, Facts

UNKNOWN = (1 << 14, 1)  # what a number of rows counts as that is known at run time only

# Of 16-bit products on matrix units.
HALF = (
    Cost(Blocks(128, 256, 64, 8, 4), 0.4, 4.7, 0.62),
    Cost(Blocks(128, 128, 32, 4, 4), 1.85, 1.6, 0.48),
    Cost(Blocks(128, 128, 64, 4, 4), 1.85, 1.6, 0.48),
    Cost(Blocks(128, 64, 64, 4, 4), 2.25, 0.73, 0.33),
    Cost(Blocks(128, 64, 32, 4, 4), 2.25, 0.73, 0.33),
    Cost(Blocks(64, 128, 64, 4, 4), 2.15, 0.82, 0.26),
    Cost(Blocks(64, 64, 64, 4, 4), 2.1, 0.34, 0.19),
    Cost(Blocks(256, 64, 32, 4, 4), 1.9, 1.55, 0.66),
    Cost(Blocks(128, 32, 32, 4, 4), 3.4, 0.3, 0.3),
    Cost(Blocks(64, 32, 128, 4, 5), 1.45, 0.2, 0.2),
    Cost(Blocks(128, 16, 32, 4, 4), 3.1, 0.22, 0.28),
    Cost(Blocks(32, 64, 128, 4, 4), 0.5, 2.4, 0.22),
    Cost(Blocks(32, 32, 64, 4, 4), 0.2, 0.43, 0.21),
    Cost(Blocks(16, 64, 128, 4, 4), 0.2, 0.48, 0.19),
    Cost(Blocks(16, 32, 256, 4, 3), 1.3, 0.13, 0.136),
    Cost(Blocks(16, 32, 128, 4, 4), 0.2, 0.25, 0.17),
)  # fmt: skip
# The same where each tap of few channels is tested: what is computed of an element counts, and wide tiles share it.
TESTED = (
    Cost(Blocks(256, 64, 32, 4, 3), 1.0, 1.6, 1.4),
    Cost(Blocks(256, 64, 16, 4, 4), 1.0, 1.6, 1.5),
    Cost(Blocks(512, 64, 32, 8, 3), 1.0, 3.3, 3.4),
    Cost(Blocks(128, 64, 32, 4, 2), 1.0, 0.8, 1.05),
    Cost(Blocks(128, 32, 32, 4, 4), 1.0, 0.6, 0.95),
    Cost(Blocks(128, 16, 32, 4, 4), 1.0, 0.5, 0.9),
    Cost(Blocks(64, 64, 32, 4, 4), 1.0, 0.45, 0.9),
    Cost(Blocks(64, 32, 32, 4, 5), 1.0, 0.4, 0.8),
    Cost(Blocks(32, 32, 32, 4, 4), 1.0, 0.3, 0.4),
    Cost(Blocks(16, 32, 32, 4, 3), 1.0, 0.25, 0.22),
)


def for_few_rows(facts: Facts) -> list[tuple[Blocks, int]]:
    """As that of `product_tiles`: of positions of all images."""
    return product_tiles.for_few_rows(HALF if facts.most is None else TESTED, facts)


def candidates(facts: Facts) -> list[Blocks]:
    """Tiles that are worth measuring for a convolution, the cost model's choice first."""
    return product_tiles.candidates(HALF if facts.most is None else TESTED, facts)
