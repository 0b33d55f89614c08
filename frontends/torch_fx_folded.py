"""Products as the user wrote them: PyTorch's decompositions fold the axes of a batch into one before each product, and
unfold them after it.

    view(mm(view(x, [6, 4]), w), [2, 3, 5])   is   x @ w   for x [2, 3, 4]
"""

from __future__ import annotations

from collections.abc import Sequence

from onnxc.ir.expr import Dim, always_equal
from onnxc.ir.graph import Value
from onnxc.primitives.builder import Builder


def unfolded(b: Builder, y: Value, shape: Sequence[Dim]) -> Value | None:
    """The product `y`, after which a bias may have been added, built anew in `shape`, out of operands that were folded;
    None where `y` is no such product.
    """
    node = y.node
    if node is None or len(shape) < 2:
        return None
    if node.op == "cast":
        inner = unfolded(b, node.operands[0], shape)
        return None if inner is None else b.cast(inner, y.dtype)
    if node.op == "add":
        x, bias = node.operands
        inner = unfolded(b, x, shape) if bias.rank <= 1 else None
        if inner is None:
            return None
        with b.from_origin(node.origin):
            return b.add(inner, bias)
    if node.op != "matmul":
        return None
    x, w = node.operands
    operands = _sources(x, w, shape)
    if operands is None:
        return None
    with b.from_origin(node.origin):
        return b.matmul(*operands)


def _sources(x: Value, w: Value, shape: Sequence[Dim]) -> tuple[Value, Value] | None:
    """The operands of a product of matrices, or of equally many, before their first axes became one."""
    rows = _before(x)
    if x.rank == w.rank == 2:
        if rows is None or not always_equal(shape[-1], w.shape[1]):
            return None
        return (rows, w) if _same(rows.shape, (*shape[:-1], x.shape[-1])) else None
    columns = _before(w)
    if rows is None or columns is None or x.rank != 3 or w.rank != 3 or len(shape) < 3:
        return None
    lead = shape[:-2]
    wanted = ((rows, (*lead, *x.shape[1:])), (columns, (*lead, *w.shape[1:])))
    fits = all(_same(v.shape, s) for v, s in wanted) and _same(shape[-2:], (x.shape[1], w.shape[2]))
    return (rows, columns) if fits else None


def _before(x: Value) -> Value | None:
    return x.node.operands[0] if x.node is not None and x.node.op == "reshape" else None


def _same(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    return len(a) == len(b) and all(always_equal(d, e) for d, e in zip(a, b, strict=True))
