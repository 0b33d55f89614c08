"""MatMul, Gemm and Det. Einsum has its own file."""

from __future__ import annotations

from onnxc.errors import ShapeError, UnsupportedError
from onnxc.ir.graph import Value
from onnxc.ops.common import static_dim
from onnxc.ops.registry import op
from onnxc.primitives.builder import Builder


@op("MatMul", 1)
def matmul(b: Builder, x: Value, y: Value) -> Value:
    """numpy's matmul: a vector counts as a row on the left and as a column on the right."""
    if not x.rank or not y.rank:
        raise ShapeError(f"MatMul of {x.t} and {y.t}: a scalar has no inner dim")
    left = b.reshape(x, (1, *x.shape)) if x.rank == 1 else x
    right = b.reshape(y, (*y.shape, 1)) if y.rank == 1 else y
    out = b.matmul(left, right)
    shape = list(out.shape)
    if y.rank == 1:
        del shape[-1]
    if x.rank == 1:
        del shape[-1 if y.rank == 1 else -2]
    return b.reshape(out, shape)


@op("Gemm", 7)
def gemm(
    b: Builder, x: Value, y: Value, c: Value | None = None, *, alpha: float = 1.0, beta: float = 1.0,
    transA: int = 0, transB: int = 0,
) -> Value:  # fmt: skip
    """alpha * x' @ y' + beta * c. A factor of one is left out, and c with a factor of zero is not read."""
    x = b.swap(x, 0, 1) if transA else x
    y = b.swap(y, 0, 1) if transB else y
    out = b.matmul(x, y)
    if alpha != 1.0:
        out = b.mul(out, alpha)
    if c is None or beta == 0.0:
        return out
    return b.add(out, c if beta == 1.0 else b.mul(c, beta))


@op("Det", 11)
def det(b: Builder, x: Value) -> Value:
    """The determinant of small matrices [..., n, n], by expansion along rows."""
    n = static_dim(x.shape[-1], "the size of Det")
    if n > 4 or n < 1:
        raise UnsupportedError(f"Det of matrices of size {n} is not supported; 1 to 4 are")
    cells = [[_cell(b, x, i, j) for j in range(n)] for i in range(n)]
    return _determinant(b, cells, 0, tuple(range(n)))


def _cell(b: Builder, x: Value, i: int, j: int) -> Value:
    row = b.slice(x, x.rank - 2, i, i + 1)
    return b.reshape(b.slice(row, x.rank - 1, j, j + 1), x.shape[:-2])


def _determinant(b: Builder, cells: list[list[Value]], row: int, columns: tuple[int, ...]) -> Value:
    """Of the rows from `row` on and these columns."""
    if len(columns) == 1:
        return cells[row][columns[0]]
    total: Value | None = None
    for k, column in enumerate(columns):
        rest = columns[:k] + columns[k + 1 :]
        term = b.mul(cells[row][column], _determinant(b, cells, row + 1, rest))
        total = term if total is None else b.sub(total, term) if k % 2 else b.add(total, term)
    assert total is not None
    return total
