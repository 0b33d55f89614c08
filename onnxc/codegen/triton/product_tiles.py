"""The tiles of products on a GPU, of matrices and of convolutions: what a choice is, and how long each would take.

A choice is a `Blocks`, plain numbers. The cost model knows of each kind of tile what was measured of many of them on an
H200: how long a tile takes that has no sum, and each further part of the sum. The multiprocessor that has most tiles
decides; where others have work beside the product, the sum of all tiles does. `matmul_tiles.py` and `conv_tiles.py`
have the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from onnxc.codegen.triton.kernel import Kernel, either, power
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, exceeds

MULTIPROCESSORS = 132
CANDIDATES = 8
FEW_ROWS = (16, 64, 256)  # of a product, where only the run knows how many there are: tiles are for these, at least
FEW_PLACES = (1024, 4096)  # besides those, of images of any size
FEW_IMAGES = (1, 8)  # the same of what has several rows each, besides the first two of these
WORTH = 0.96  # of the time of the tile for more rows that one for few takes at most
WORTH_OF_IMAGES = 0.9  # the same of what has several rows each: the times of convolutions are known less well
WORTH_OF_PLACES = 0.8  # of images of any size, for which more tiles might be worth the time that they are compiled in
SPLITS = (2, 3, 4, 6, 8, 12, 16)  # parts of a sum
LEAST_PART = 256  # of a sum that one has
JOIN, JOIN_PART = 3.0, 0.35  # microseconds for the kernel that joins parts, and for each of them
JOINED = 9e6  # bytes of parts that are written and read in a microsecond
READ = 4e6  # bytes of operands that are read in a microsecond
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
        split: parts of the sum, each of which has programs of its own, and whose sums another kernel adds up.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    resident: int = 0
    split: int = 1


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
        divisible: whether a sum may be made in parts.
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
    divisible: bool = False
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

    def time(self, facts: Facts, split: int = 1) -> float:
        """Of a product, with sums in so many parts."""
        blocks, size = fitted(self.blocks, facts), facts.unknown[0]
        m, n, k = (d if isinstance(d, int) else size for d in (facts.m, facts.n, facts.k))
        tiles = self.tiles(facts) * split
        each = -(-tiles // MULTIPROCESSORS)
        steps = facts.turns * -(-k // blocks.k) * blocks.k / 64 / split
        kernel, sums = self.kernel, (self.step + self.alone) * steps
        if split > 1:
            kernel += JOIN + JOIN_PART * split + m * n * (4 * 2 * split + facts.dtype.itemsize) / JOINED
            sums = max(sums, (m + n) * k * facts.dtype.itemsize / READ)
        if facts.beside:
            return kernel + tiles * (self.tile + self.step * steps) / MULTIPROCESSORS + BESIDE * (self.tile + sums)
        return kernel + max(self.tile + sums, each * (self.tile + self.step * steps))

    def tiles(self, facts: Facts) -> int:
        """How many a product has."""
        blocks, (size, count) = self.blocks, facts.unknown
        m, n = (d if isinstance(d, int) else size for d in (facts.m, facts.n))
        return -(-m // blocks.m) * -(-n // blocks.n) * (facts.count if isinstance(facts.count, int) else count)

    def splits(self, facts: Facts) -> list[int]:
        """In how many equal parts, each long enough, a sum may be made: those for which there are multiprocessors."""
        k, step = facts.k, fitted(self.blocks, facts).k
        if not (facts.divisible and isinstance(k, int) and isinstance(facts.m, int) and isinstance(facts.n, int)):
            return [1]
        most = min(MULTIPROCESSORS // max(1, self.tiles(facts)), k // LEAST_PART)
        return [1, *(s for s in SPLITS if s <= most and k % (s * step) == 0)]


# Of float32 on ordinary units, which need no large tiles.
EXACT = (
    Cost(Blocks(128, 64, 16, 8, 3), 2.0, 1.0, 2.3), Cost(Blocks(64, 64, 16, 4, 3), 2.0, 0.6, 1.28),
    Cost(Blocks(32, 64, 32, 4, 3), 2.0, 0.4, 0.82), Cost(Blocks(32, 32, 32, 2, 3), 2.0, 0.3, 0.52),
    Cost(Blocks(16, 32, 32, 2, 3), 2.0, 0.2, 0.36),
)  # fmt: skip


def candidates(halves: Iterable[Cost], facts: Facts) -> list[Blocks]:
    """Tiles that are worth measuring, the cost model's choice first; no tile twice. `halves`: of matrix units."""
    costs = [c for c in (EXACT if facts.exact else halves) if facts.described or not c.blocks.resident]
    ways = [(c.time(facts, s), replace(fitted(c.blocks, facts), split=s)) for c in costs for s in c.splits(facts)]
    ranked = (blocks for _, blocks in sorted(ways, key=lambda way: way[0]))
    return list(dict.fromkeys(ranked))[:CANDIDATES]


def for_few_rows(halves: Iterable[Cost], facts: Facts) -> list[tuple[Blocks, int]]:
    """Where the run decides how many rows there are: tiles for few of them, with the most rows of each, from fewest to
    more. None of them where the number of rows is known, or those for few would gain little.
    """
    if isinstance(facts.m, int):
        return []
    costs = [c for c in (EXACT if facts.exact else halves) if facts.described or not c.blocks.resident]
    single = [coefficient for _, coefficient in facts.m.terms]  # rows of an image, or of a sequence of a known length
    least = single[0] if len(single) == 1 else 1
    counts, worth = set(FEW_ROWS), WORTH
    if facts.unknown[0] > FEW_PLACES[-1]:
        counts, worth = {*FEW_ROWS, *FEW_PLACES}, WORTH_OF_PLACES
    if least > 1:
        counts = {max(rows, least) for rows in FEW_ROWS[:2]}
        counts |= {least * n for n in FEW_IMAGES if least * n > FEW_ROWS[:2][-1]}
        worth = WORTH_OF_IMAGES
    ways = [(c, split) for c in costs for split in (1, *SPLITS)]

    def time(way: tuple[Cost, int], rows: int) -> float:
        return way[0].time(replace(facts, m=rows), way[1])

    def best(rows: int) -> tuple[Cost, int]:
        known = replace(facts, m=rows)
        return min((w for w in ways if w[1] in w[0].splits(known)), key=lambda w: time(w, rows))

    found = list[tuple[Blocks, int]]()
    limit = facts.unknown[0]
    after = min(((c, 1) for c in costs), key=lambda w: time(w, limit))
    for rows in sorted(counts, reverse=True):
        way = best(rows)
        if rows >= limit or time(way, rows) > worth * time(after, rows):
            continue
        while 2 * rows < limit and time(way, 2 * rows) <= time(after, 2 * rows):
            rows *= 2
        found.insert(0, (replace(fitted(way[0].blocks, facts), split=way[1]), rows))
        after, limit = way, rows
    return found


def by_rows(
    rows: Dim, few: Sequence[tuple[Blocks, int]], many: Blocks, tiled: Callable[[Blocks, int | None], list[Kernel]]
) -> list[Kernel]:
    """The kernels with tiles for few rows, each up to some number of them, and those with the one for more; `tiled`
    makes those of a tile for as many rows at most.
    """
    if not few:
        return tiled(many, None)
    (blocks, most), *others = few
    return either(exceeds(rows, most), lambda: by_rows(rows, others, many, tiled), lambda: tiled(blocks, most))


def fitted(blocks: Blocks, facts: Facts) -> Blocks:
    """A tile for this dtype, with no more of the sum at a time than there is."""
    step = max(16, min(blocks.k, power(facts.k))) if isinstance(facts.k, int) else blocks.k
    step = min(step, facts.most or step)
    return replace(blocks, k=max(16, step // 2) if facts.dtype.bits == 32 and not facts.exact else step)
