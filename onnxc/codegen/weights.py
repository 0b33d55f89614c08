"""The weights of a program: one block of bytes that kernels address by offset, each array kept once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from onnxc.errors import InternalError

ALIGN = 64
THREADS = 2  # packing is bound by memory: more do not help

Write = Callable[[np.ndarray], None]  # fills a flat array of bytes


class WeightStore:
    """Collects constants, as they are or packed for a template, and gives each its offset, a multiple of `align`."""

    def __init__(self, align: int = ALIGN) -> None:
        self._align = align
        self._offsets: dict[object, int] = {}
        self._parts: list[tuple[int, int, Write]] = []
        self.nbytes = align

    def add(self, key: object, array: np.ndarray) -> int:
        """The offset of a constant's row-major bytes."""

        def write(out: np.ndarray) -> None:
            out.view(array.dtype).reshape(array.shape)[...] = array

        return self.add_packed(key, array.nbytes, write)

    def add_packed(self, key: object, nbytes: int, write: Write) -> int:
        """The offset of `nbytes` that `write` fills when the block is made."""
        if key not in self._offsets:
            self._offsets[key] = self.nbytes
            self._parts.append((self.nbytes, nbytes, write))
            self.nbytes += -(-(nbytes + ALIGN) // self._align) * self._align  # vectors may read past the end
        return self._offsets[key]

    def sizes(self) -> dict[int, int]:
        """Bytes of each array, by offset."""
        return {offset: nbytes for offset, nbytes, _ in self._parts}

    def fill(self, block: np.ndarray, after: Callable[[int], None] | None = None) -> None:
        """Writes everything into a zeroed uint8 array of `nbytes`; `after` is told the bytes of each part."""
        if block.nbytes < self.nbytes:
            raise InternalError("the block is too small for the weights")
        with ThreadPoolExecutor(THREADS) as pool:
            for nbytes in pool.map(lambda part: self._fill(block, *part), self._parts):
                if after is not None:
                    after(nbytes)

    def _fill(self, block: np.ndarray, start: int, nbytes: int, write: Write) -> int:
        write(block[start : start + nbytes])
        return nbytes

    def matches(self, block: np.ndarray, after: Callable[[int], None] | None = None) -> bool:
        """Whether a block has, at each array's place, what `fill` writes there. It is made again part by part."""
        if block.nbytes != self.nbytes:
            return False
        with ThreadPoolExecutor(THREADS) as pool:
            found = pool.map(lambda part: _same(block, *part), self._parts)
            for (_, nbytes, _), same in zip(self._parts, found, strict=True):
                if not same:
                    pool.shutdown(cancel_futures=True)
                    return False
                if after is not None:
                    after(nbytes)
        return True


def _same(block: np.ndarray, start: int, nbytes: int, write: Write) -> bool:
    part = np.zeros(nbytes + ALIGN, np.uint8)
    at = -part.ctypes.data % ALIGN
    part = part[at : at + nbytes]
    write(part)
    return bool(np.array_equal(part, block[start : start + nbytes]))
