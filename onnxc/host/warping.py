"""Dynamic time warping: which frame of a recording belongs to which word."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxc.host.registry import host_function

Array = np.ndarray[Any, Any]


@host_function
def ms_dynamic_time_warping(cost: Array) -> Array:
    """The cheapest way [2, steps] from the first of costs [rows, columns] to the last, as rows and columns.

    Sums are taken in the dtype of the costs, for all cells of an antidiagonal at once. Of equal ways it is the one
    along a row, then down a column.
    """
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf, cost.dtype)
    total[0, 0] = 0
    came = np.full(total.shape, 2, np.int8)  # 0: from row and column before, 1: from the row, 2: from the column
    came[:, 0] = 1
    came[0] = 2
    for d in range(2, rows + columns + 1):
        r = np.arange(max(1, d - columns), min(rows, d - 1) + 1)
        c = d - r
        both, row, column = total[r - 1, c - 1], total[r - 1, c], total[r, c - 1]
        by_both, by_row = (both < row) & (both < column), (row < both) & (row < column)
        total[r, c] = cost[r - 1, c - 1] + np.where(by_both, both, np.where(by_row, row, column))
        came[r, c] = np.where(by_both, 0, np.where(by_row, 1, 2))
    return _way_back(came)


def _way_back(came: Array) -> Array:
    r, c = (n - 1 for n in came.shape)
    way = []
    while r > 0 or c > 0:
        way.append((r - 1, c - 1))
        how = came[r, c]
        r, c = r - (how != 2), c - (how != 1)
    return np.array(way[::-1], np.int32).reshape(-1, 2).T.copy()
