"""What may follow a template's results in its kernel, as far as the graph alone tells.

Passes that make products for the planner to fuse, and the planner, ask the same: `needed`, `runs_beside`, `meet`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from onnxc.ir.expr import always_equal
from onnxc.ir.graph import Node, Value
from onnxc.ir.types import TensorType
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.movement import VIEWS

PAIRED_BITS = 16  # of what two products in one kernel multiply: on units that take 32 bits there is no gain
NEAR = 16  # nodes behind two results, as far as they are looked for where these meet

Uses = Mapping[int, Sequence[Node]]


def can_be_paired(product: TensorType, matrix: np.ndarray | None) -> bool:
    """Whether a product by a constant may be one of two in a kernel, whose columns are put beside each other."""
    return product.dtype.bits == PAIRED_BITS and matrix is not None and matrix.ndim == 2 and min(matrix.shape) > 1


def meet(cores: Sequence[Node], position: Mapping[int, int], uses: Uses, outputs: Collection[int]) -> bool:
    """Whether functions of the results of these nodes leave one value to store, and none of the results. `position`
    is each node's in the graph, by its id.
    """
    results = {n.output.id for n in cores}
    at, taken = set(results), list[Node]()
    pending = {id(n): n for vid in at for n in uses.get(vid, ())}
    while pending and len(taken) < NEAR:
        node = pending.pop(min(pending, key=position.__getitem__))
        if not runs_beside(node, at):
            continue
        at.add(node.output.id)
        taken.append(node)
        left = needed(cores, taken, uses, outputs)
        if len(left) == 1 and left[0].id not in results:
            return True
        pending |= {id(n): n for n in uses.get(node.output.id, ())}
    return False


def runs_beside(node: Node, at: Collection[int], *, wide: bool = False) -> bool:
    """Whether a pointwise node computes one element from one of each of these values (their ids) that it reads. `wide`:
    of integers of 64 bits too.
    """
    mine = [v for v in node.operands if v.id in at]
    if lookup(node.op).kind is not Kind.POINTWISE or node.op == "iota":
        return False
    if not wide and any(v.dtype.bits > 32 and v.dtype.is_integer for v in node.operands):
        return False
    return all(always_equal(v.t.size, node.output.t.size) for v in mine)


def needed(cores: Sequence[Node], taken: Sequence[Node], uses: Uses, outputs: Collection[int]) -> list[Value]:
    """What a kernel that computes these nodes must store: results that others read, or that are outputs."""
    nodes = (*cores, *taken)
    inside = {id(n) for n in nodes}
    return [n.output for n in nodes if n.output.id in outputs or _read_outside(n.output, inside, uses, outputs)]


def _read_outside(value: Value, inside: set[int], uses: Uses, outputs: Collection[int]) -> bool:
    for reader in uses.get(value.id, ()):
        if id(reader) in inside:
            continue
        if reader.op not in VIEWS or reader.output.id in outputs or _read_outside(reader.output, inside, uses, outputs):
            return True
    return False
