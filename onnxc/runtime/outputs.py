"""Memory for outputs, used again once nobody holds them.

Every call returns arrays of its own. A large array comes fresh from the system, which gives it page by page as it is
first written; for outputs of megabytes that takes longer than the kernels that write them. So the memory behind
large outputs is kept, and used again when the last array over it is gone. Where sizes change from call to call, that of
the sizes used longest ago is forgotten.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
Spec = tuple[tuple[int, ...], np.dtype[Any]]

LARGE = 1 << 16  # bytes from which memory is kept: below, the C library keeps it itself
SPARE = 2  # blocks kept for each output: a loop that feeds outputs back holds two sets
KEPT = 2 * SPARE  # times the bytes of a call's outputs are kept at most, or
KEPT_BYTES = 1 << 25  # so many
_IDLE = 2  # references to a block that only `_free_block` holds: its variable, and getrefcount's argument


class Wanted(NamedTuple):
    """An output of a call: `most` blocks of its size are kept."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int
    most: int


def wanted(specs: Sequence[Spec]) -> tuple[Wanted, ...]:
    """The outputs of a call, by shapes and dtypes."""
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in specs]
    count = Counter(sizes)
    return tuple([Wanted(*spec, n, SPARE * count[n]) for spec, n in zip(specs, sizes, strict=True)])


def has_large(outputs: Sequence[Wanted]) -> bool:
    """Whether any of these outputs is worth keeping memory for."""
    return any(w.nbytes >= LARGE for w in outputs)


class OutputPool:
    """Blocks of memory for the outputs of one model. Safe to use from several threads: list operations are atomic."""

    def __init__(self, poison: bool = False) -> None:
        self._blocks: dict[int, list[Array]] = {}  # by their bytes, the sizes used last at the end
        self._grown = False
        self._poison = poison

    def arrays(self, outputs: Sequence[Wanted]) -> tuple[Array, ...]:
        """New arrays for these outputs. Raises MemoryError."""
        arrays = tuple([self._array(*w) for w in outputs])
        if self._grown:
            self._grown = False
            self._forget(max(KEPT_BYTES, KEPT * sum(a.nbytes for a in arrays)))
        return arrays

    def clear(self) -> None:
        """Forgets the blocks that are free; those in use go when their arrays go."""
        self._blocks.clear()

    def _array(self, shape: tuple[int, ...], dtype: np.dtype[Any], nbytes: int, most: int) -> Array:
        if nbytes < LARGE:
            block = np.empty(nbytes, np.uint8)
        else:
            kept = self._blocks.pop(nbytes, [])  # what another thread puts there meanwhile is at worst not used again
            self._blocks[nbytes] = kept
            block = self._free_block(kept, nbytes)
        if self._poison:
            block.fill(0xFF)
        array: Array = np.ndarray(shape, dtype, buffer=block.data if not nbytes else block)
        if nbytes >= LARGE and len(kept) < most:
            kept.append(block)  # only now, while `array` holds it: another thread must not think it free
        return array

    def _forget(self, most: int) -> None:
        """Leaves what was used last, of so many bytes."""
        for nbytes, kept in reversed(list(self._blocks.items())):
            most -= nbytes * len(kept)
            if most < 0:
                self._blocks.pop(nbytes, None)

    def _free_block(self, kept: list[Array], nbytes: int) -> Array:
        for _ in range(len(kept)):
            try:
                block = kept.pop()  # the one used last, which caches may still hold
            except IndexError:  # another thread took it
                break
            if sys.getrefcount(block) == _IDLE:
                return block
            kept.insert(0, block)
        self._grown = True
        return np.empty(nbytes, np.uint8)
