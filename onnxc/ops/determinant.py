"""Det: by expansion for matrices of up to 4 rows, by elimination with pivots for larger ones; Inverse by the latter."""

from __future__ import annotations

import math
from functools import partial

from onnxc.errors import ShapeError
from onnxc.ir import dtypes
from onnxc.ir.expr import never_equal
from onnxc.ir.graph import Value
from onnxc.ops.common import static_dim
from onnxc.ops.registry import op
from onnxc.primitives.builder import Builder

_EXPANDED = 4  # rows; of 5 the expansion has 325 terms
_LONG_ROWS = 12  # of as many elements, to have vectors go along them


@op("Det", 11)
def det(b: Builder, x: Value) -> Value:
    """The determinants of matrices [..., n, n], as [...]; of halves computed in float32."""
    if x.rank < 2 or never_equal(x.shape[-1], x.shape[-2]):
        raise ShapeError(f"Det of {x.t}: it takes square matrices [..., n, n]")
    n = static_dim(x.shape[-1], "the size of Det")
    if n == 0:
        return b.full(x.shape[:-2], 1.0, x.dtype)
    if n <= _EXPANDED:
        return _expanded(b, [[_cell(b, x, i, j) for j in range(n)] for i in range(n)], 0, tuple(range(n)))
    wide = b.cast(x, dtypes.float32) if x.dtype.bits < 32 else x
    return b.cast(b.reshape(_eliminated(b, wide, n), x.shape[:-2]), x.dtype)


def _cell(b: Builder, x: Value, i: int, j: int) -> Value:
    row = b.slice(x, x.rank - 2, i, i + 1)
    return b.reshape(b.slice(row, x.rank - 1, j, j + 1), x.shape[:-2])


def _expanded(b: Builder, cells: list[list[Value]], row: int, columns: tuple[int, ...]) -> Value:
    """Of the rows from `row` on and these columns."""
    if len(columns) == 1:
        return cells[row][columns[0]]
    total: Value | None = None
    for k, column in enumerate(columns):
        rest = columns[:k] + columns[k + 1 :]
        term = b.mul(cells[row][column], _expanded(b, cells, row + 1, rest))
        total = term if total is None else b.sub(total, term) if k % 2 else b.add(total, term)
    assert total is not None
    return total


def _eliminated(b: Builder, x: Value, n: int) -> Value:
    """[batch] in float64: the product of the pivots, which may leave float32's range on the way, with a sign for each
    exchange of two rows.

    Half of the columns are eliminated, then half of those of the quarter that is left, and so on: what lies above and
    beside a quarter is of no use any more.
    """
    batch = x.t.with_shape(x.shape[:-2]).size
    a, row, product = b.reshape(x, (batch, n, n)), 1, b.full((batch, 1, 1), 1.0, dtypes.float64)
    if n < _LONG_ROWS and not (isinstance(batch, int) and batch < n):  # vectors go along matrices, not along rows
        a, row, product = b.transpose(a, (1, 2, 0)), 0, b.reshape(product, (1, 1, batch))
    while n:
        steps = n if n < _LONG_ROWS else n // 2
        (a, product), _ = b.scan([a, product], [b.iota(steps)], steps, partial(_step, n, row))
        a, n = b.slice(b.slice(a, row, steps, n), row + 1, steps, n), n - steps
    return product


def _step(n: int, row: int, b: Builder, states: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
    """Column k of matrices, whose rows and columns are the axes `row` and row + 1, is eliminated below its pivot.

    The row of the pivot is where row k was, then, but not the other way: no step reads it again.
    """
    (a, product), (k,) = states, slices
    at = b.reshape(k, (1,))
    rows = b.reshape(b.iota(n), (n, 1) if row else (n, 1, 1))
    column, own = b.gather(a, at, row + 1), b.gather(a, at, row)
    size = b.where(b.isnan(column), math.inf, b.abs(column))  # a NaN is to be seen in the answer
    pivot = b.reshape(b.one("argmax", b.where(b.lt(rows, k), -1.0, size), axis=row, last=False), product.shape)
    best = b.one("gather_elements", a, b.expand(pivot, own.shape), axis=row)
    top = b.gather(best, at, row + 1)
    none, moved = b.eq(top, 0.0), b.eq(rows, pivot)
    under = b.where(moved, b.gather(own, at, row + 1), column)
    factor = b.where(none, 0.0, b.div(under, b.where(none, 1.0, top)))
    a = b.where(b.lt(k, rows), b.sub(b.where(moved, own, a), b.mul(factor, best)), a)
    return [a, b.mul(product, b.cast(b.where(b.eq(pivot, k), top, b.neg(top)), product.dtype))], []


# ---------------------------------------------------------------- Inverse


@op("Inverse", 1, domain="com.microsoft")
def inverse(b: Builder, x: Value) -> Value:
    """The inverses of matrices [..., n, n]; infinities or NaN where there is none. Halves are computed in float32."""
    if x.rank < 2 or never_equal(x.shape[-1], x.shape[-2]):
        raise ShapeError(f"Inverse of {x.t}: it takes square matrices [..., n, n]")
    n, batch = static_dim(x.shape[-1], "the size of Inverse"), x.t.with_shape(x.shape[:-2]).size
    wide = b.reshape(b.cast(x, dtypes.float32) if x.dtype.bits < 32 else x, (batch, n, n))
    unit = b.cast(b.eq(b.reshape(b.iota(n), (n, 1)), b.iota(n)), wide.dtype)
    both = b.concat([wide, b.expand(unit, (batch, n, n))], 2)
    if n:
        ((both,), _) = b.scan([both], [b.iota(n)], n, partial(_jordan_step, n))
    return b.cast(b.reshape(b.slice(both, 2, n, 2 * n), x.shape), x.dtype)


def _jordan_step(n: int, b: Builder, states: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
    """Column k of [batch, n, 2 n] becomes one of the unit matrix: the row of the pivot changes places with row k."""
    (a,), (k,) = states, slices
    at, rows = b.reshape(k, (1,)), b.reshape(b.iota(n), (n, 1))
    column, own = b.gather(a, at, 2), b.gather(a, at, 1)
    size = b.where(b.isnan(column), math.inf, b.abs(column))
    pivot = b.reshape(b.one("argmax", b.where(b.lt(rows, k), -1.0, size), axis=1, last=False), (a.shape[0], 1, 1))
    best = b.one("gather_elements", a, b.expand(pivot, own.shape), axis=1)
    scaled = b.div(best, b.gather(best, at, 2))
    moved = b.where(b.eq(rows, pivot), own, a)
    return [b.where(b.eq(rows, k), scaled, b.sub(moved, b.mul(b.gather(moved, at, 2), scaled)))], []
