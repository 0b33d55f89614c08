"""Arrays in one block of bytes, a section of a saved model, with a table in its manifest.

>>> import numpy as np
>>> block = Block()
>>> block.add(np.arange(3)), block.add(np.array(["a", "bc"], object))
(0, 1)
>>> arrays_of(block.table, block.data())
[array([0, 1, 2]), array(['a', 'bc'], dtype=object)]
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxc.ir.dtypes import BY_NAME, from_numpy
from onnxc.runtime.cache import Buffer

_ALIGN = 64


class Block:
    """A block while it is written.

    Attributes:
        table: dtype, shape, offset and length of each array: what JSON can write.
    """

    def __init__(self) -> None:
        self.table: list[list[Any]] = []
        self._pieces: list[bytes] = []
        self._end = 0

    def add(self, array: np.ndarray[Any, Any]) -> int:
        """The number of an array in the table."""
        dtype = from_numpy(array.dtype)
        text = dtype.kind == "string"
        plain = json.dumps(array.ravel().tolist()).encode() if text else np.ascontiguousarray(array).tobytes()
        self.table.append([dtype.name, list(array.shape), self._end, len(plain)])
        self._pieces.append(plain + bytes(-len(plain) % _ALIGN))
        self._end += len(self._pieces[-1])
        return len(self.table) - 1

    def data(self) -> bytes:
        """The block."""
        return b"".join(self._pieces)


def arrays_of(table: Sequence[Any], data: Buffer) -> list[np.ndarray[Any, Any]]:
    """The arrays of a block, which cannot be written. Raises ValueError, TypeError and KeyError for a wrong table."""
    found = []
    for name, shape, offset, length in table:
        piece, dtype = memoryview(data)[offset : offset + length], BY_NAME[name]
        if dtype.kind == "string":
            array = np.array(json.loads(bytes(piece)), object).reshape(shape)
        else:
            array = np.frombuffer(piece, dtype.numpy).reshape(shape)
        array.setflags(write=False)
        found.append(array)
    return found
