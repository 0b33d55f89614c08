"""Sums and extremes of the differences of two tensors, block by block: what is added up stays in the cores' caches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

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
    found = Sums()
    own, other, error = (np.empty(min(BLOCK, a.size)) for _ in range(3))
    x, y = a.reshape(-1), b.reshape(-1)
    with np.errstate(all="ignore"):
        for start in range(0, x.size, BLOCK):
            n = min(BLOCK, x.size - start)
            if not _add(found, start, x[start : start + n], y[start : start + n], own[:n], other[:n], error[:n]):
                return None
    whole = a.size and math.isfinite(found.total + found.noise + found.ours + found.theirs)
    return found if whole else None


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
