"""Det: by expansion for matrices of up to 4 rows, by elimination with pivots for larger ones."""

from __future__ import annotations

import math

from onnxc.errors import ShapeError
from onnxc.ir import dtypes
from onnxc.ir.expr import never_equal
from onnxc.ir.graph import Value
from onnxc.ops.common import static_dim
from onnxc.ops.registry import op
from onnxc.primitives.builder import Builder

_EXPANDED = 4  # rows; of 5 the expansion has 325 terms


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
    """[batch, 1, 1]: the product of the pivots, with a sign for each exchange of two rows."""
    flat = b.reshape(x, (x.t.with_shape(x.shape[:-2]).size, n, n))
    batch = flat.shape[0]
    rows, columns = b.reshape(b.iota(n), (1, n, 1)), b.reshape(b.iota(n), (1, 1, n))

    def picked(i: Builder, a: Value, where: Value, axis: int) -> Value:
        return i.reduce("sum", i.where(where, a, 0.0), [axis], True)

    def step(i: Builder, states: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
        (a, product), (k,) = states, slices
        column = picked(i, a, i.eq(columns, k), 2)
        size = i.where(i.isnan(column), math.inf, i.abs(column))  # a NaN is to be seen in the answer
        pivot = i.reshape(i.one("argmax", i.where(i.lt(rows, k), -1.0, size), axis=1, last=False), (batch, 1, 1))
        here, there = i.eq(rows, k), i.eq(rows, pivot)
        own, best = picked(i, a, here, 1), picked(i, a, there, 1)
        a = i.where(here, best, i.where(there, own, a))
        top = picked(i, best, i.eq(columns, k), 2)
        column = picked(i, a, i.eq(columns, k), 2)
        none = i.eq(top, 0.0)
        factor = i.where(none, 0.0, i.div(column, i.where(none, 1.0, top)))
        a = i.where(i.lt(k, rows), i.sub(a, i.mul(factor, best)), a)
        return [a, i.mul(product, i.where(i.eq(pivot, k), top, i.neg(top)))], []

    (_, product), _ = b.scan([flat, b.full((batch, 1, 1), 1.0, x.dtype)], [b.iota(n)], n, step)
    return product
