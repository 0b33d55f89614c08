"""MatMul and Gemm. Einsum has its own file."""

from __future__ import annotations

from onnxc.errors import ModelError, ShapeError
from onnxc.ir.graph import Value
from onnxc.ops.common import within
from onnxc.ops.registry import Flag, op
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
    transA: Flag = 0, transB: Flag = 0,
) -> Value:  # fmt: skip
    """alpha * x' @ y' + beta * c. A factor of one is left out, and c with a factor of zero is not read."""
    if (x.rank, y.rank) != (2, 2):
        raise ModelError(f"Gemm multiplies two matrices, not {x.t} and {y.t}")
    x = b.swap(x, 0, 1) if transA else x
    y = b.swap(y, 0, 1) if transB else y
    out = b.matmul(x, y)
    if alpha != 1.0:
        out = b.mul(out, alpha)
    if c is None or beta == 0.0:
        return out
    c = within(b, c, out.shape)
    return b.add(out, c if beta == 1.0 else b.mul(c, beta))
