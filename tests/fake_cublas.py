"""A cuBLASLt in memory, beside the driver of `tests.fake_cuda`: the functions that `runtime/cuda/cublaslt.py` calls.

It reads what it is told as the library does: column by column, from descriptors that hold numbers and no names. What
the library would refuse, this refuses too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from tests.fake_cuda import FakeDriver

INVALID, NOT_SUPPORTED = 7, 15
KINDS = {0: np.dtype(np.float32), 2: np.dtype(np.float16), 14: np.dtype(ml_dtypes.bfloat16)}
Array = np.ndarray[Any, Any]


@dataclass
class Descriptor:
    """What a handle stands for: numbers by attribute."""

    numbers: dict[int, int] = field(default_factory=dict)
    kind: int = 0
    sizes: tuple[int, int, int] = (0, 0, 0)  # rows, columns, elements from column to column


class FakeCublas:
    """Stands for the loaded library.

    Args:
        driver: whose memory and streams it uses.

    Attributes:
        calls: products that it was given.
        suggested: how many algorithms it has for a product.
        version: as the library writes it.
        failing: functions that fail, with their status.
    """

    def __init__(self, driver: FakeDriver) -> None:
        self.driver, self.calls, self.suggested, self.version = driver, 0, 2, 130100
        self.failing: dict[str, int] = {}
        self.alive: dict[int, Descriptor] = {}
        self.algorithms: list[int] = []  # of the products that ran
        self._handles = 7000

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name.startswith("cublasLt") and name in self.failing:
            return lambda *arguments: self.failing[name]
        return found

    def _new(self, out: Any, descriptor: Descriptor) -> int:
        self._handles += 1
        self.alive[self._handles] = descriptor
        out._obj.value = self._handles
        return 0

    def _of(self, handle: ctypes.c_void_p) -> Descriptor:
        return self.alive[handle.value or 0]

    def cublasLtGetVersion(self) -> int:
        return self.version

    def cublasLtCreate(self, out: Any) -> int:
        return self._new(out, Descriptor())

    def cublasLtMatmulDescCreate(self, out: Any, compute: int, scale: int) -> int:
        return self._new(out, Descriptor({3: 0, 4: 0, 7: 1}, compute)) if scale == 0 else INVALID

    def cublasLtMatrixLayoutCreate(self, out: Any, kind: int, rows: int, columns: int, apart: int) -> int:
        if apart < rows or kind not in KINDS:
            return INVALID
        return self._new(out, Descriptor({5: 1, 6: 0}, kind, (rows, columns, apart)))

    def cublasLtMatmulPreferenceCreate(self, out: Any) -> int:
        return self._new(out, Descriptor())

    def _set(self, handle: ctypes.c_void_p, attribute: int, value: Any, size: int) -> int:
        assert size == ctypes.sizeof(value._obj)
        self._of(handle).numbers[attribute] = value._obj.value or 0
        return 0

    cublasLtMatmulDescSetAttribute = cublasLtMatrixLayoutSetAttribute = _set
    cublasLtMatmulPreferenceSetAttribute = _set

    def _destroy(self, handle: ctypes.c_void_p) -> int:
        del self.alive[handle.value or 0]
        return 0

    cublasLtMatmulDescDestroy = cublasLtMatrixLayoutDestroy = cublasLtMatmulPreferenceDestroy = _destroy

    def cublasLtMatmulAlgoGetHeuristic(
        self, handle: Any, operation: Any, a: Any, b: Any, c: Any, d: Any, preference: Any, wanted: int, results: Any,
        count: Any,
    ) -> int:  # fmt: skip
        said = self._of(preference).numbers
        assert said[1] == 0 and said[3] == 0 and all(said[k] in (2, 4, 8, 16) for k in (5, 6, 7, 8))
        if not self._agree(operation, a, b, c, d):
            return NOT_SUPPORTED
        count._obj.value = min(wanted, self.suggested)
        for rank, result in enumerate(results[: count._obj.value]):
            result.algorithm.data[0], result.workspace = rank + 1, 0
        return 0

    def _agree(self, operation: Any, *layouts: Any) -> bool:
        """Whether sizes fit each other."""
        op = self._of(operation).numbers
        (ar, ac, _), (br, bc, _), c, d = (self._of(x).sizes for x in layouts)
        a, b = ((ac, ar) if op[3] else (ar, ac)), ((bc, br) if op[4] else (br, bc))
        return a[1] == b[0] and (a[0], b[1]) == d[:2] == c[:2]

    def cublasLtMatmul(
        self, handle: Any, operation: Any, alpha: Any, a: int, la: Any, b: int, lb: Any, beta: Any, c: int, lc: Any,
        d: int, ld: Any, algorithm: Any, workspace: int | None, nbytes: int, stream: Any,
    ) -> int:  # fmt: skip
        op, rank = dict(self._of(operation).numbers), algorithm._obj.data[0]
        if not self._agree(operation, la, lb, lc, ld) or not rank or nbytes or workspace:
            return INVALID
        self.calls += 1
        one, more = alpha._obj.value, beta._obj.value
        x, y, z, out = (self._matrix(at, self._of(layout)) for at, layout in ((a, la), (b, lb), (c, lc), (d, ld)))
        kind = KINDS[self._of(ld).kind]

        def work() -> None:
            self.algorithms.append(rank)
            left, right = (v().astype(np.float32) for v in (x, y))
            left, right = (v.swapaxes(1, 2) if op[k] else v for v, k in ((left, 3), (right, 4)))
            found = one * (left @ right)
            if more:
                found = found + more * z().astype(np.float32)
            if op[7] & 4:
                found = found + self.driver.array(op[8], found.shape[1], kind).astype(np.float32)[:, None]
            if op[7] & 2:
                found = np.maximum(found, 0)
            if op[7] & 32:
                found = 0.5 * found * (1 + np.tanh(np.sqrt(2 / np.pi) * (found + 0.044715 * found**3)))
            np.copyto(out(), found.astype(kind))

        self.driver.push(int(stream.value or 0), work)
        return 0

    def _matrix(self, at: int, layout: Descriptor) -> Callable[[], Array]:
        """[count, rows, columns] of a matrix, when it is read or written."""
        (rows, columns, apart), kind = layout.sizes, KINDS[layout.kind]
        count, step = layout.numbers[5], layout.numbers[6]
        last = (count - 1) * step + (columns - 1) * apart + rows

        def found() -> Array:
            flat = self.driver.array(at, last, kind)
            size = kind.itemsize
            strides = (step * size, size, apart * size)
            return np.lib.stride_tricks.as_strided(flat, (count, rows, columns), strides)

        return found
