"""Strassen's algorithm for float32 products with a constant right factor (matmul_strassen.h): its constants, where it may run."""

from __future__ import annotations

import numpy as np

from onnxc.ir.expr import Dim, always_equal, prod
from onnxc.ir.graph import Node

WIDEST = 40  # powers of two between the sizes of rows, or of columns, at most: others are left to the ordinary product
LARGEST = 30  # the exponent of the largest weight, and its negative, at most
SHARE = 0.25  # MS_SHARE of matmul_strassen.h
MOST_UNFIT = 0.125  # of the pairs of panels, which would take longer than in the ordinary product
LEAST_ROWS = 48  # below, tiles are left with few rows, and few share the sums of B
LEAST_OF_ITEM = 16  # below, an odd one is paired with itself too often
LEAST_TERMS = 64  # of half a sum
STRASSEN = "strassen"
# Which of both is faster, processors decide more than sizes do: on Zen 4 it takes 0.92 to 0.97 of the ordinary product's
# time in transformers, on Cascade Lake 1.00 to 1.11. So only a measurement chooses it.
COSTS = {"direct": 0.0, STRASSEN: 1.0}


def constants(b: np.ndarray, panel: int) -> np.ndarray | None:
    """What the kernel reads beside a right factor [K, N], as float32: sizes of rows [K], what lower rows are divided by
    [K / 2], its inverse, and for each pair of panels [3][panel]: what the right one is multiplied by, the inverse, and
    whether columns of the left one are not zero. What the right one is multiplied by is 0 where a single weight is more
    than SHARE of a column's square: such a pair takes the ordinary product. None where the weights are not fit: not
    finite, whole rows of zeros, sizes too far apart, or many such pairs.

    Sizes are roots of mean squares: of rows, beside the sizes of the columns, and so the other way round. So a single
    great weight makes neither its row great nor its column.
    """
    k, n = b.shape
    peak = max(float(b.max()), -float(b.min()))
    if not 2.0**-LARGEST <= peak <= 2.0**LARGEST:
        return None
    squares = np.square(b / np.float32(peak))
    columns = squares.sum(axis=0, dtype=np.float64)
    alive = columns > 0
    if (alive != b.any(axis=0)).any() or np.log2(columns[alive]).min() < -2 * WIDEST:
        return None
    inverse = np.divide(k, columns, out=np.zeros(n), where=alive)
    # Not by a library whose rounding depends on its threads.
    rows = np.einsum("kn,n->k", squares, inverse.astype(np.float32)).astype(np.float64)
    if rows.min() <= 0:
        return None
    sizes = np.rint(np.log2(rows / n) / 2)
    if np.ptp(sizes) > WIDEST:
        return None
    squares *= np.exp2(-2 * sizes).astype(np.float32)[:, None]
    columns, most = (
        x[: n // (2 * panel) * 2 * panel] for x in (squares.sum(axis=0, dtype=np.float64), squares.max(axis=0))
    )
    unfit = (most > SHARE * columns).reshape(-1, 2 * panel).any(axis=1)
    if unfit.mean() > MOST_UNFIT:
        return None
    left, right = np.moveaxis(columns.reshape(-1, 2, panel), 1, 0)
    scale = np.zeros(left.shape)
    both = (left > 0) & (right > 0)
    scale[both] = np.rint(np.log2(left[both] / right[both]) / 2)
    pairs = np.stack([np.exp2(scale) * ~unfit[:, None], np.exp2(-scale) * (right > 0), left > 0], axis=1)
    apart = sizes[k // 2 :] - sizes[: k // 2]
    parts = [np.exp2(sizes - sizes.max()), np.exp2(apart), np.exp2(-apart), pairs]
    return np.concatenate([part.astype(np.float32).reshape(-1) for part in parts])


def rows_of_item(node: Node) -> Dim | None:
    """How many rows of a product with one right factor belong together: those of the last axis but one.

    A left factor of two axes may be a flattened one: then those of what it was. If not, an open number of rows may be a
    batch, whose items should not depend on how many they are: None.
    """
    value, out = node.operands[0], node.output
    if out.rank > 2:
        return out.shape[-2] if any(d != 1 for d in out.shape[:-2]) else prod(out.shape[:-1])
    while value.rank == 2 and value.node is not None and value.node.op == "reshape":
        value = value.node.operands[0]
    if value.rank > 2 and always_equal(value.shape[-1], node.operands[0].shape[-1]):
        rows: Dim = value.shape[-2]
        return rows
    return out.shape[0] if isinstance(out.shape[0], int) else None


def is_possible(m: Dim, n: Dim, k: Dim, each: Dim | None, panel: int) -> bool:
    """Whether the kernel can compute a product of these sizes, with items of `each` rows, and may be worth it."""
    if not isinstance(n, int) or not isinstance(k, int) or not isinstance(each, int) or each < LEAST_OF_ITEM:
        return False
    few = isinstance(m, int) and m < LEAST_ROWS
    return not few and k % 2 == 0 and k >= 2 * LEAST_TERMS and n >= 2 * panel
