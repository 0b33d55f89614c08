"""Products of one matrix that share a kernel: those whose results meet in a function.

A gated network multiplies each row by two matrices, and then one result by a function of the other: SwiGLU, GeGLU. As
one kernel the left factor is read once, no result is stored to be read again, and tiles of both fill a machine that
tiles of one leave partly idle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onnxc.ir.graph import Node
from onnxc.passes.epilogue import can_be_paired
from onnxc.primitives.builder import constant_of


def fellows(node: Node, uses: Mapping[int, list[Node]]) -> Iterator[Node]:
    """Products that could run in the tiles of this one: of the same left factor, and of a right one of the same sizes.
    Both are constants, whose columns can be put beside each other.
    """
    if node.op != "matmul" or not can_be_paired(node.output.t, constant_of(node.operands[1])):
        return
    left, right = node.operands[:2]
    for other in uses.get(left.id, ()):
        alike = other is not node and other.op == "matmul" and other.operands[0] is left and other.attrs == node.attrs
        if alike and constant_of(other.operands[1]) is not None and other.operands[1].t == right.t:
            yield other
