"""The weights of a program: one block of bytes that kernels address by offset, each array kept once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

ALIGN = 64


class WeightStore:
    """Collects constants, as they are or packed for a template, and gives each its offset."""

    def __init__(self) -> None:
        self._offsets: dict[object, int] = {}
        self._parts: list[tuple[int, Callable[[], np.ndarray], int]] = []
        self.nbytes = ALIGN

    def add(self, key: object, array: np.ndarray) -> int:
        """The offset of a constant's row-major bytes."""
        return self.add_packed(key, lambda: array, array.nbytes)

    def add_packed(self, key: object, make: Callable[[], np.ndarray], nbytes: int) -> int:
        """The offset of an array that `make` gives when the block is written."""
        if key not in self._offsets:
            self._offsets[key] = self.nbytes
            self._parts.append((self.nbytes, make, nbytes))
            self.nbytes += -(-nbytes // ALIGN) * ALIGN + ALIGN  # vectors may read past the end
        return self._offsets[key]

    def fill(self, block: np.ndarray) -> None:
        """Writes everything into a uint8 array of `nbytes`."""
        for offset, make, nbytes in self._parts:
            array = np.ascontiguousarray(make())
            assert array.nbytes == nbytes, (array.nbytes, nbytes)
            block[offset : offset + nbytes] = array.reshape(-1).view(np.uint8)
