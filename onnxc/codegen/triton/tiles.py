"""How loop nests may be laid over the programs of a GPU: what matters of a nest, the candidates, and a cost model.

A `Tile` is one choice, as plain numbers. `candidates` lists those that are worth measuring for a nest, the one that the
cost model takes first; any tile is correct for any nest, so a tile that was measured for one GPU may be used on all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from onnxc.codegen.triton.kernel import power

FLAT = 1024  # elements of a flat tile
SIDE = 64  # of a square tile, which is turned
PERSISTENT = 32768  # lanes of a row that stays in registers, or twice as many where nothing is better
ROWS = 1024  # lanes of a program of several short rows: one warp, whose sums need no shared memory
PER_WARP = 1024  # lanes of each warp of longer rows, and of neighbouring rows
PIECE = 8192  # turns of a row at a time, where it does not fit
WHOLE = 4096  # lanes of a row that is one part, whatever lanes that leaves idle
TILE = 8192  # lanes of a tile of neighbouring rows that stays in registers
COLUMNS = 64  # neighbouring rows of a tile
DEPTH = 128  # turns at a time of neighbouring rows
SHORT = 64  # turns that threads walk alone, each for some of ...
ALONE = 1024  # neighbouring rows of a tile
PROGRAMS = 132  # programs enough for a GPU: one for each multiprocessor
PACKED = 16384  # lanes of a row of 16-bit elements that are kept so
MOST_WARPS = 16
MOST_PARTS = 16  # of a row that stays in registers
NARROW = 4  # neighbours of a row that are fewer than a thread reads at once


@dataclass(frozen=True)
class Tile:
    """One way to lay a nest over programs.

    Attributes:
        points: elements of a program without reductions, along the store where the tile is turned; else rows.
        turns: of a row at a time; the other side of a turned tile.
        warps: of a program.
        resident: 1 where all turns of a row stay in registers, in as many parts as it takes; 0 for a loop.
        packed: 1 where resident elements of 16 bits stay so from phase to phase.
        stages: pieces of a loop that are being read at once; 1 leaves that to the hardware.
    """

    points: int
    turns: int = 1
    warps: int = 4
    resident: int = 0
    packed: int = 0
    stages: int = 1


@dataclass(frozen=True)
class Facts:
    """What a choice depends on.

    Attributes:
        kind: ``flat``, ``turned``, ``rows`` (elements of a row are neighbours) or ``columns`` (rows are).
        points: elements, or rows; None where that is known at run time only.
        turns: of the longest phase; None where that is known at run time only.
        run: turns of the innermost loop of that phase.
        phases: that read the same row.
        bits: of the widest elements that rows are made of.
        mixed: whether some elements are neighbours along the row, and others across rows.
        sides: of a turned tile, along the store and along the load.
    """

    kind: str
    points: int | None
    turns: int | None = 1
    run: int | None = None
    phases: int = 1
    bits: int = 32
    mixed: bool = False
    sides: tuple[int | None, int | None] = (None, None)


def best(facts: Facts) -> Tile:
    """The tile that the cost model takes."""
    return next(ranked(facts))


def candidates(facts: Facts) -> list[Tile]:
    """Tiles that are worth measuring, the best one first by the cost model; no tile twice."""
    return list(dict.fromkeys(ranked(facts)))


def ranked(facts: Facts) -> Iterator[Tile]:
    """Tiles for a nest, from what the cost model takes to what it takes last."""
    return {"flat": _flat, "turned": _turned, "rows": _rows, "columns": _columns}[facts.kind](facts)


def _warps(lanes: int, each: int = PER_WARP, most: int = MOST_WARPS) -> int:
    """Warps of a program: one for each so many lanes, rounded to a power of two below."""
    return max(1, min(most, power(lanes // each + 1) // 2))


def _many(facts: Facts) -> int:
    return facts.points if facts.points is not None else 1 << 20


def _spread(points: int, facts: Facts, least: int = 1, programs: int = PROGRAMS) -> int:
    """As many rows as leave programs enough for the GPU."""
    points = min(points, power(_many(facts)))
    while points > least and _many(facts) // points < programs:
        points //= 2
    return points


def _flat(facts: Facts) -> Iterator[Tile]:
    for lanes, each in ((FLAT, 256), (512, 256), (2 * FLAT, 256), (2 * FLAT, 512), (4 * FLAT, 512)):
        lanes = min(lanes, power(_many(facts)))
        yield Tile(lanes, warps=_warps(lanes, each))


def _turned(facts: Facts) -> Iterator[Tile]:
    for x, y, each in (
        (SIDE, SIDE, 512), (64, 64, 1024), (64, 32, 256), (32, 64, 256), (64, 32, 512), (32, 64, 512), (128, 32, 512),
        (32, 128, 512), (32, 32, 256),
    ):  # fmt: skip
        sides = [min(n, power(d)) if d is not None else n for n, d in zip((x, y), facts.sides, strict=True)]
        yield Tile(sides[0], sides[1], _warps(math.prod(sides), each))


def _is_window(facts: Facts) -> bool:
    """Whether rows are so short that a thread can walk them alone, all reads written out: the taps of a pooling."""
    return facts.turns is not None and 1 < facts.turns <= MOST_PARTS and facts.phases == 1


def _windows(facts: Facts, lanes: tuple[int, ...], each: int) -> Iterator[Tile]:
    """Tiles of so many lanes, `each` for a warp."""
    for points in (min(n, power(_many(facts))) for n in lanes):
        yield Tile(points, 1, _warps(points, each), 1)


# ---------------------------------------------------------------- rows whose elements are neighbours


def _rows(facts: Facts) -> Iterator[Tile]:
    """Rows stay in registers where several phases read them and they fit, and where they are short."""
    if _is_window(facts) and facts.run is not None and facts.run <= NARROW:
        yield from _windows(facts, (256, 512, 128, 1024), 64)
    whole = power(facts.turns) if facts.turns is not None else None
    if whole is None or whole > 2 * PERSISTENT:
        yield from _looped_rows(facts)
    elif whole <= WHOLE or (facts.phases > 1 and whole <= 2 * PERSISTENT):
        yield from _resident_rows(facts, whole)
        yield from _looped_rows(facts)
    else:
        yield from _looped_rows(facts)
        yield from _resident_rows(facts, whole)


def _resident_rows(facts: Facts, whole: int) -> Iterator[Tile]:
    assert facts.turns is not None
    short = 2 * ROWS if facts.phases == 1 and facts.bits == 16 else ROWS
    parts = _parts(facts, whole)
    turns = whole if whole <= WHOLE else parts[-1]
    lanes = _lanes(facts, turns)
    halves = facts.bits == 16 and facts.phases > 1
    few = _many(facts) < PROGRAMS
    points = _spread(max(1, min(short // whole, 128)), facts)
    packed = halves and lanes >= PACKED and (few or lanes <= PERSISTENT)
    yield Tile(points, turns, _warps(points * lanes) if lanes >= 2 * ROWS else 1, 1, int(packed))
    for turns, rows in itertools.product(parts, (points, 2 * points)):
        lanes = rows * _lanes(facts, turns)
        for warps in (w for w in (1, 2, 4, 8, 16) if 16 <= lanes // (32 * w) <= 96 and rows * turns // (32 * w) >= 8):
            if lanes <= 2 * WHOLE or rows == points:
                yield from (Tile(rows, turns, warps, 1, p) for p in range(1 + (halves and lanes >= 1024 * warps)))


def _lanes(facts: Facts, turns: int) -> int:
    """Lanes of a row in parts of so many turns."""
    assert facts.turns is not None
    return -(-facts.turns // turns) * turns


def _parts(facts: Facts, whole: int) -> list[int]:
    """Turns of a part: the whole row; less, where that leaves fewer lanes idle; the innermost loop, where its length is
    a power of two: what depends on the other loops is then one number for each part.
    """
    found = [whole]
    assert facts.turns is not None
    waste = whole
    for turns in (whole >> k for k in range(1, 6) if whole >> k >= 128):
        lanes = _lanes(facts, turns)
        if lanes // turns <= MOST_PARTS and lanes < waste and lanes - facts.turns < lanes // 8:
            found.append(turns)
            waste = lanes
    run = facts.run
    if run is not None and run < facts.turns and run == power(run) >= 256 and facts.turns // run <= MOST_PARTS:
        found.append(run)
    return list(dict.fromkeys(found))


def _looped_rows(facts: Facts) -> Iterator[Tile]:
    whole = power(facts.turns) if facts.turns is not None else 1 << 20
    turns = min(PIECE, whole)
    points = _spread(max(1, min(ROWS // turns, 128)), facts)
    yield Tile(points, turns, _warps(points * turns, 256, 32))
    for turns, warps, stages in (
        (4096, 16, 1), (2048, 8, 1), (4096, 8, 1), (8192, 16, 1), (2048, 4, 1), (4096, 8, 3),
    ):  # fmt: skip
        if turns <= whole:
            yield Tile(points, turns, warps, stages=stages)


# ---------------------------------------------------------------- rows that are neighbours


def _columns(facts: Facts) -> Iterator[Tile]:
    if _is_window(facts):
        yield from _windows(facts, (1024, 512, 2048, 256), 256)
    whole = power(facts.turns) if facts.turns is not None else None
    points = _spread(min(COLUMNS, power(_many(facts))), facts, 16, 4 * PROGRAMS - 16)
    if whole is not None and whole * points <= TILE and (facts.phases > 1 or facts.mixed):
        yield Tile(points, whole, _warps(points * whole), 1)
    elif whole is not None and whole <= SHORT and facts.phases == 1 and _many(facts) >= ALONE * PROGRAMS:
        yield Tile(ALONE, 2, 4)
    else:
        turns = min(DEPTH, whole) if whole is not None else DEPTH
        each = 2 * PER_WARP if facts.mixed else PER_WARP  # a tile that is turned waits at barriers
        yield Tile(points, turns, _warps(points * turns, 512 if points < COLUMNS else each))
    for columns, turns, warps in _COLUMN_SHAPES:
        if columns <= power(_many(facts)):
            if whole is None or turns < whole:
                yield Tile(columns, turns, warps)
            elif columns * whole <= TILE:
                yield Tile(columns, whole, _warps(columns * whole), 1)


_COLUMN_SHAPES = (
    (64, 128, 8), (32, 128, 8), (64, 256, 16), (128, 64, 16), (32, 64, 4), (64, 64, 8), (32, 64, 2), (1024, 2, 4),
    (1024, 8, 4), (512, 4, 2),
)  # fmt: skip
