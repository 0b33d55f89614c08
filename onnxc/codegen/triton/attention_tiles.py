"""How attention may be laid over the programs of a GPU: the candidates, and which one is taken unmeasured.

The order is that of measurements on an H200 (float16, batch * heads such that the GPU is full). Two or three programs
of 64 rows on a multiprocessor are better than one of 128: while one waits for its products, another has exponentials
to compute. Large tiles read keys and values less often, which counts where they no longer fit in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from onnxc.codegen.triton.kernel import power

LONG = 8192  # keys of a head from which on they do not stay in the L2 cache
DESCRIBED = 4096  # keys from which on making descriptors pays, and large tiles do
STREAMED = 512  # keys that are read for few queries: from here on it is the memory that counts
FEW = 16  # rows that one tile of the matrix units has
GROUP = 64  # queries of four warps with roles
ROLES = {64: 1024, 128: 512}  # keys from which on warps with roles are faster, by depth
PROCESSORS = 132
BLOCK = 64  # keys that a program of few queries reads in half a microsecond
JOIN = 6  # such times that another kernel costs
MOST_PARTS = 64
VECTOR = 16  # bytes to which descriptors are aligned
WASTE = 1.2  # queries of all tiles, over those that there are


@dataclass(frozen=True)
class AttentionTile:
    """One way to run attention.

    Attributes:
        rows: queries of a program.
        keys: that it takes at a time.
        warps: of a program.
        stages: blocks of keys and values that are being read at once.
        resident: 1 where queries stay in registers; 0 for shared memory.
        described: 1 where keys and values are read through tensor descriptors, on GPUs that have them. (Not together
            with `resident`: Triton 3.6 made wrong code of some such kernels.)
        roles: 1 where warps have roles (`attention_roles.py`); 2 where programs go from tile to tile, besides.
        turns: 1 where groups of four such warps begin products in turns.
        parts: of the keys, each of which another program takes; their results are joined by another kernel.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    resident: int = 0
    described: int = 0
    roles: int = 0
    turns: int = 0
    parts: int = 1

    @property
    def only(self) -> int | None:
        """The only architecture that has it; None for all."""
        return 90 if self.roles else None


@dataclass(frozen=True)
class Facts:
    """What a choice depends on.

    Attributes:
        queries, keys: None where they are known at run time only.
        heads: in all batches; None as well.
        depth: of a head, or its columns if there are more, as a power of two.
        bits: of an element.
        causal: whether about half of the keys is left out.
        described: whether tensor descriptors can tell how keys and values lie.
        roles: whether warps may have roles.
    """

    queries: int | None
    keys: int | None
    heads: int | None
    depth: int
    bits: int
    causal: bool = False
    described: bool = False
    roles: bool = False


def candidates(facts: Facts) -> list[AttentionTile]:
    """Tiles that are worth measuring, the best one first by the table; no tile twice."""
    fitting = [t for t in _ranked(facts) if t.keys <= max(FEW, power(facts.keys or LONG))]
    return list(dict.fromkeys(fitting or [AttentionTile(FEW, FEW, 4, 2)]))


def parts_of(facts: Facts, heads: int) -> int:
    """In how many parts the keys of few queries are divided: so that all multiprocessors have as much to read, if there
    is enough of it.

    Args:
        heads: at least; those that share keys and values count as one.
    """
    if facts.queries is None or facts.queries > FEW or heads >= PROCESSORS:
        return 1
    blocks = -(-(LONG if facts.keys is None else facts.keys) // BLOCK)

    def time(parts: int) -> float:
        each = -(-heads * parts // PROCESSORS) * -(-blocks // parts)
        return each + (JOIN + parts / 16 if parts > 1 else 0)

    return min(range(1, min(MOST_PARTS, max(1, blocks // 2)) + 1), key=time)


def _ranked(facts: Facts) -> Iterator[AttentionTile]:
    few = facts.queries is not None and facts.queries <= FEW
    if facts.bits == 32:
        yield from _exact(facts.depth, few)
    elif few:
        yield from _few(facts)
    else:
        yield from _halves(facts)


def _few(facts: Facts) -> Iterator[AttentionTile]:
    """Of one tile of the matrix units: the more is being read at once, the better, where there is much to read."""
    many = facts.keys is None or facts.keys >= STREAMED
    if many:
        yield AttentionTile(FEW, 128 if facts.depth <= 64 else 64, 4, 4)
    for keys, warps, stages in ((64, 4, 3), (128, 4, 3), (64, 4, 4), (128, 4, 4), (32, 4, 4), (128, 8, 3), (16, 4, 3)):
        yield AttentionTile(FEW, keys, warps, stages)


def _exact(depth: int, few: bool) -> Iterator[AttentionTile]:
    """Of float32, on ordinary units or with tf32."""
    for rows in (FEW,) if few else (64, 32) if depth <= 128 else (32, 64):
        for keys, stages in ((64, 2), (32, 2)) if few else ((32, 2), (64, 2), (32, 3)):
            yield AttentionTile(rows, keys, 4, stages)
    yield AttentionTile(FEW, FEW, 4, 2)


def _halves(facts: Facts) -> Iterator[AttentionTile]:
    """Of float16 and bfloat16."""
    keys = facts.keys or 0
    if facts.roles and _suits_roles(facts):
        yield from _with_roles(facts)
    if facts.depth <= 64:
        if facts.described and not facts.causal and keys >= DESCRIBED:
            yield AttentionTile(64, 128, 4, 2, described=1)
        ranked = [(64, 64, 4, 3, 0), (64, 128, 4, 2, 0), (128, 64, 8, 4, 1), (128, 64, 8, 3, 0), (128, 64, 4, 3, 1)]
        ranked += [(64, 64, 4, 2, 0), (64, 32, 4, 3, 0)]
    elif facts.depth <= 128:
        if keys >= (LONG if facts.causal else DESCRIBED):
            yield AttentionTile(128, 128, 8, 3, resident=1)
        ranked = [(64, 64, 4, 3, 0), (128, 128, 8, 3, 1), (128, 64, 8, 3, 0), (128, 64, 8, 3, 1), (128, 128, 8, 3, 0)]
        ranked += [(64, 32, 4, 2, 0), (64, 32, 4, 3, 0)]
    else:
        ranked = [(64, 32, 4, 3, 0), (64, 32, 4, 2, 0), (128, 64, 8, 2, 0), (64, 64, 4, 2, 0)]
    yield from (AttentionTile(*numbers) for numbers in ranked)
    if facts.described and facts.depth <= 128:
        yield from (AttentionTile(64, n, 4, stages, described=1) for n, stages in ((64, 3), (128, 2)))
    if 64 < facts.depth <= 128:  # of machine code for sm_90: none of them spills registers
        yield AttentionTile(128, 64, 8, 2)  # 143 registers, 96 KB
        if facts.described:
            yield AttentionTile(64, 32, 4, 3, described=1)  # 114 registers, 64 KB: three programs on a multiprocessor
            yield AttentionTile(128, 64, 4, 2, described=1)  # 252, 96 KB: each warp has rows of two products
    if facts.roles and not _suits_roles(facts):
        yield from _with_roles(facts)
    # Where there are few programs, or few keys.
    yield from (AttentionTile(32, n, warps, 3) for n, warps in ((64, 4), (32, 4), (32, 2)))
    yield AttentionTile(FEW, FEW, 4, 2)


def _with_roles(facts: Facts) -> Iterator[AttentionTile]:
    """Where tiles are short, or of unequal work, it pays that a program reads the next one before it has written the
    last.
    """
    first = 2 if facts.keys is None or facts.keys < LONG or facts.causal else 1
    for roles in (first, 3 - first):
        if facts.depth <= 64:
            found = [AttentionTile(3 * GROUP, 128, 12, 2, roles=roles, turns=1)]
            found.append(AttentionTile(2 * GROUP, 128, 8, 4, roles=roles, turns=1))
            yield from reversed(found) if facts.causal else found
        else:
            yield from (AttentionTile(2 * GROUP, 128, 8, 2, roles=roles, turns=t) for t in (int(facts.causal), 0))


def _suits_roles(facts: Facts) -> bool:
    """Whether these are faster: enough keys, and large tiles that keep all multiprocessors at work, few of whose rows
    are none.
    """
    if facts.queries is None or facts.keys is None or facts.heads is None or facts.depth not in ROLES:
        return False
    rows = next(_with_roles(facts)).rows
    tiles = -(-facts.queries // rows)
    fills = tiles * facts.heads >= PROCESSORS and tiles * rows <= WASTE * facts.queries
    return fills and facts.keys >= ROLES[facts.depth]
