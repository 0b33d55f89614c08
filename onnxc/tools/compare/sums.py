"""Sums and extremes of the differences of two tensors.

float32 and float64 go through native/differences.cpp, in one pass, where there is a C++ compiler. The same in numpy
goes block by block: what is added up stays in the cores' caches.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxc.tools.compare.native import library

Array = np.ndarray[Any, Any]
BLOCK = 1 << 13  # elements: three arrays of them as float64 stay in a cache, and BLAS adds up so few in one thread
GAP_BLOCK = 1 << 15  # of one array
_ONES = np.ones(BLOCK)


@dataclass
class Sums:
    """Of two tensors of finite real numbers, in float64.

    Attributes:
        top, worst: the largest absolute difference, and the row-major position of the first that is as large.
        total: of the absolute differences.
        noise, ours, theirs: of the squared differences and of the squares of each.
        scale: the largest magnitude of theirs.
        zero_signs: zeros of both whose signs differ.
    """

    top: float = -1.0
    worst: int = 0
    total: float = 0.0
    noise: float = 0.0
    ours: float = 0.0
    theirs: float = 0.0
    scale: float = 0.0
    zero_signs: int = 0

    @property
    def product(self) -> float:
        """The sum of the products of both: |a - b|^2 = a^2 + b^2 - 2ab."""
        return (self.ours + self.theirs - self.noise) / 2


def sums(a: Array, b: Array) -> Sums | None:
    """The sums of two tensors of one shape, floats that numpy knows. None where an element is not finite (or a sum is
    not), and of empty ones.
    """
    native = _native("sums", a, b)
    found = native_sums(native, a, b) if native is not None else numpy_sums(a, b)
    if found is None or not a.size:
        return None
    return found if math.isfinite(found.total + found.noise + found.ours + found.theirs) else None


def numpy_sums(a: Array, b: Array) -> Sums | None:
    """None where an element is not finite."""
    found = Sums()
    own, other, error = (np.empty(min(BLOCK, a.size)) for _ in range(3))
    x, y = a.reshape(-1), b.reshape(-1)
    with np.errstate(all="ignore"):
        for start in range(0, x.size, BLOCK):
            n = min(BLOCK, x.size - start)
            if not _add(found, start, x[start : start + n], y[start : start + n], own[:n], other[:n], error[:n]):
                return None
    return found


def _add(found: Sums, start: int, x: Array, y: Array, own: Array, other: Array, error: Array) -> bool:
    """One block; the last three are room for it. False where something is not finite."""
    np.copyto(own, x)
    np.copyto(other, y)
    np.subtract(own, other, out=error)
    np.abs(error, out=error)
    at = int(error.argmax())  # of a NaN, where there is one
    top = float(error[at])
    if not math.isfinite(top):
        return False
    if top > found.top:
        found.top, found.worst = top, start + at
    found.total += float(np.dot(error, _ONES[: len(error)]))
    found.noise += float(np.dot(error, error))
    found.ours += float(np.dot(own, own))
    found.theirs += float(np.dot(other, other))
    found.scale = max(found.scale, float(other.max()), -float(other.min()))
    if not other.all():
        zeros = (other == 0) & (own == 0)
        found.zero_signs += int(np.count_nonzero(zeros & (np.signbit(own) != np.signbit(other))))
    return True


def largest_gap(a: Array, b: Array) -> float:
    """The largest absolute difference of two tensors of one shape, floats that numpy knows, in float64. NaN or infinite
    where an element is, of either.
    """
    native = _native("gap", a, b)
    return float(native(a.ctypes.data, b.ctypes.data, a.size)) if native is not None else numpy_gap(a, b)


def numpy_gap(a: Array, b: Array) -> float:
    """As `largest_gap`."""
    x, y = a.reshape(-1), b.reshape(-1)
    room, top = np.empty(min(GAP_BLOCK, x.size)), 0.0
    with np.errstate(all="ignore"):
        for start in range(0, x.size, GAP_BLOCK):
            n = min(GAP_BLOCK, x.size - start)
            part = np.subtract(x[start : start + n], y[start : start + n], out=room[:n], dtype=np.float64)
            high, low = float(part.max()), float(part.min())
            if not math.isfinite(high - low):
                return math.nan if math.isnan(high) or math.isnan(low) else math.inf
            top = max(top, high, -low)
    return top


# ---------------------------------------------------------------- natively


class _Sums(ctypes.Structure):
    """Sums of differences.cpp."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("top", "total", "noise", "ours", "theirs", "scale")),
        ("worst", ctypes.c_longlong), ("zero_signs", ctypes.c_longlong),
    )  # fmt: skip


def native_sums(function: Callable[..., None], a: Array, b: Array) -> Sums:
    """Sums that are not finite where an element is not."""
    found = _Sums(-1.0)
    function(a.ctypes.data, b.ctypes.data, a.size, ctypes.byref(found))
    return Sums(**{name: getattr(found, name) for name in Sums.__dataclass_fields__})


def _native(what: str, a: Array, b: Array) -> Callable[..., Any] | None:
    """A function of differences.cpp for two arrays; None where it has none for them."""
    kinds = "".join({np.dtype(np.float32): "f", np.dtype(np.float64): "d"}.get(x.dtype, "") for x in (a, b))
    if len(kinds) < 2 or not (a.flags.c_contiguous and b.flags.c_contiguous):
        return None
    found = library()
    return getattr(found, f"{what}_{kinds}") if found is not None else None
