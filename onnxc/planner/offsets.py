"""Where buffers lie in an arena. (It imports nothing: the runtime of a GPU lays arenas out too, at a call.)"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

ALIGN = 64


def aligned(nbytes: int, align: int = ALIGN) -> int:
    """Rounded up to the alignment; an empty buffer takes one unit, so that its address is valid."""
    return max(align, -(-nbytes // align) * align)


def assign_offsets(sizes: Sequence[int], spans: Sequence[tuple[int, int]], align: int = ALIGN) -> tuple[list[int], int]:
    """Places buffers so that those alive together do not overlap: largest first, each in the lowest gap that fits.

    Returns the offsets and the arena's size, in bytes.

    >>> assign_offsets([100, 200, 100], [(0, 1), (1, 2), (2, 3)])
    ([256, 0, 256], 384)
    """
    offsets = [0] * len(sizes)
    placed: list[tuple[int, int, int]] = []  # offset, length and number, the lowest first
    total = 0
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], spans[i])):
        size = aligned(sizes[i], align)
        first, last = spans[i]
        at = 0
        for start, length, j in placed:
            if spans[j][0] <= last and first <= spans[j][1]:
                if at + size <= start:
                    break
                at = max(at, start + length)
        offsets[i] = at
        total = max(total, at + size)
        insort(placed, (at, size, i))
    return offsets, total
