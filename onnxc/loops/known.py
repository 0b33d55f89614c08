"""Indices whose content is known when a model is compiled, as index arithmetic.

Overlapping windows are read by a Gather whose index is a constant, `[[0, 1, 2], [1, 2, 3], ...]`: so exporters write
unfold, as_strided, a row or one element of an axis. Where such an index counts in even steps along each of its axes,
its element at (i, j) is i + j. That is the arithmetic of a slice: nothing is read, and nothing can lie outside.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxc.ir.expr import Dim, floordiv, is_less, is_nonnegative, mod
from onnxc.ir.graph import Node, Value
from onnxc.loops.access import Index, broadcast
from onnxc.primitives.builder import constant_of
from onnxc.primitives.movement import VIEWS

MOST_FACTORS = 2  # of an axis: two loops that an exporter has made one
MOST_ADDED = 4  # sums that make up an index
LARGEST = 1 << 24  # elements of a constant that is looked at
WORD = 32  # bits that kernels compute places with at least
_KEPT = 1 << 12

Progression = tuple[tuple[int, int], ...]  # from the inside: so many steps, each so long
_found: dict[int, tuple[Steps | None]] = {}  # by the ids of values, which are used once


@dataclass(frozen=True)
class Steps:
    """A tensor of whole numbers: `first`, and what each axis adds."""

    first: int
    least: int
    most: int
    axes: tuple[Progression, ...]

    def at(self, index: Index) -> Dim:
        """The element at an index."""
        total: Dim = self.first
        for i, progression in zip(index, self.axes, strict=True):
            for k, (count, step) in enumerate(progression):
                total = total + (i if k == len(progression) - 1 else mod(i, count)) * step
                i = floordiv(i, count)
        return total


def gathered_at(node: Node, at: Index) -> Dim | None:
    """The position that a gather reads for an element of its index; None where only the run tells, or where it lies
    outside.
    """
    if node.op != "gather":
        return None
    x, where = node.operands
    extent = x.shape[node.attrs["axis"]]
    parts = _parts(where, MOST_ADDED)
    if parts is None:
        return None
    least, most = sum(s.least for _, s in parts), sum(s.most for _, s in parts)
    from_end = most < 0
    lowest, highest = (least + extent, most + extent) if from_end else (least, most)
    if not is_nonnegative(lowest) or not is_less(highest, extent) or not _fits(where, least, most):
        return None
    total: Dim = extent if from_end else 0
    for value, steps in parts:
        total = total + steps.at(broadcast(value, at))
    return total


def is_known(node: Node) -> bool:
    """Whether a gather reads where it was known from the beginning that it would."""
    return node.op == "gather" and gathered_at(node, (0,) * node.operands[1].rank) is not None


def lies_inside(where: Value, extent: Dim) -> bool:
    """Whether the content of an index is known, and all of it from 0 on below so many. Not that of narrow integers,
    which kernels would multiply as they are.
    """
    while where.node is not None and where.node.op in VIEWS:
        where = where.node.operands[0]
    array = constant_of(where)
    if array is None or not isinstance(extent, int) or not 0 < array.size <= LARGEST or where.dtype.bits < WORD:
        return False
    return bool(array.min() >= 0 and array.max() < extent)


def _fits(value: Value, least: int, most: int) -> bool:
    low, high = value.dtype.limits
    return bool(low <= least and most <= high)


def _parts(value: Value, left: int) -> list[tuple[Value, Steps]] | None:
    """What an index is the sum of, each by its steps; None where there is more to it."""
    if constant_of(value) is not None:
        steps = _steps_of(value)
        return None if steps is None else [(value, steps)]
    if value.node is None or value.node.op != "add" or left < 2:
        return None
    sides = [_parts(v, left // 2) for v in value.node.operands]
    return None if any(s is None for s in sides) else [p for side in sides for p in side or ()]


def _steps_of(value: Value) -> Steps | None:
    known = _found.get(value.id)
    if known is None:
        array = constant_of(value)
        assert array is not None
        known = (steps_of(array),)
        if len(_found) >= _KEPT:  # by several threads, maybe: so nothing is read back from there
            _found.clear()
        _found[value.id] = known
    return known[0]


def steps_of(array: np.ndarray) -> Steps | None:
    """The steps of an array of integers; None where they are not even.

    >>> steps_of(np.array([[0, 1, 2], [10, 11, 12]]))
    Steps(first=0, least=0, most=12, axes=(((2, 10),), ((3, 1),)))
    """
    if array.dtype.kind not in "iu" or not 0 < array.size <= LARGEST or array.dtype == np.uint64:
        return None
    lines = [array[tuple(slice(None) if a == k else 0 for a in range(array.ndim))] for k in range(array.ndim)]
    axes = [_progression(line.astype(np.int64)) for line in lines]
    first = int(array[(0,) * array.ndim])
    total: np.ndarray = np.asarray(first, np.int64)
    for k, line in enumerate(lines):
        if axes[k] is None:
            return None
        shape = [-1 if a == k else 1 for a in range(array.ndim)]
        total = total + (line.astype(np.int64) - first).reshape(shape)
    if not np.array_equal(total, array):
        return None
    return Steps(first, int(array.min()), int(array.max()), tuple(a for a in axes if a is not None))


def _progression(line: np.ndarray) -> Progression | None:
    """The steps along an axis."""
    found: list[tuple[int, int]] = []
    while len(line) > 1:
        steps = np.diff(line)
        uneven = np.flatnonzero(steps != steps[0])
        count = int(uneven[0]) + 1 if uneven.size else len(line)
        rows = line.reshape(-1, count) if count > 1 and len(line) % count == 0 else None
        if rows is None or len(found) == MOST_FACTORS or (rows != rows[:, :1] + np.arange(count) * steps[0]).any():
            return None
        found.append((count, int(steps[0])))
        line = rows[:, 0]
    return tuple(found)
