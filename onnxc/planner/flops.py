"""The arithmetic of contractions, for reports."""

from __future__ import annotations

from onnxc.ir.expr import Dim, prod
from onnxc.ir.graph import Node


def flops(node: Node) -> Dim:
    """Multiplications and additions of a contraction; 0 for other primitives."""
    out: tuple[Dim, ...] = node.outputs[0].shape
    if node.op == "matmul":
        inner: Dim = node.operands[0].shape[-1]
        return 2 * prod(out) * inner
    if node.op == "conv":
        return 2 * prod(out) * prod(node.operands[1].shape[1:])
    if node.op == "attention":
        width: Dim = node.operands[0].shape[-1]
        keys: Dim = node.operands[1].shape[-1]
        return 2 * prod(out[:-1]) * keys * (width + out[-1])
    return 0
