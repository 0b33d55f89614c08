"""A product whose columns are a gate and what it opens becomes two products, which a GPU makes in one kernel.

Gated networks often keep both matrices side by side, as one: SwiGLU, GeGLU. Their product is cut into halves, or into
even and odd columns, and a function of one half is multiplied with the other. As one product its columns are stored,
and read again by the function. As two products of the same rows they are one kernel, whose tiles are of both
(`planner/pairs.py`), and only what follows from both is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from onnxc.ir.expr import always_equal
from onnxc.ir.graph import Graph, Node, Value, merge_origins
from onnxc.passes.merge_products import ALIGNED, Branch, branch_of
from onnxc.passes.simplify import Rewriter
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import Builder

BITS = 16  # of what is multiplied: pairs of wider numbers are not made in one kernel
NEAR = 16  # nodes behind a half, as far as it is looked for where it meets the other one


def divide_gated_products(graph: Graph) -> Graph:
    """The graph with such products divided."""
    uses = graph.uses()
    outputs = {v.id for v in graph.outputs}
    r = Rewriter(graph)
    gone: set[int] = set()
    for node in graph.nodes:
        branch = branch_of(node, uses, outputs)
        halves = _halves(branch, uses, outputs) if branch is not None else None
        if branch is not None and halves is not None:
            _divide(r, branch, halves)
            gone |= {id(n) for n in (branch.addition, *(cut for cut, _ in halves)) if n is not None}
        elif id(node) not in gone:
            r.keep(node)
    return r.result()


def _halves(branch: Branch, uses: Mapping[int, list[Node]], outputs: set[int]) -> list[tuple[Node, np.ndarray]] | None:
    """The two slices of a product and their columns, where these are all of them and their readers meet."""
    y, cuts = branch.result, uses.get(branch.result.id, [])
    width = branch.weights.shape[1]
    if y.dtype.bits != BITS or y.id in outputs or len(cuts) != 2 or width % (2 * ALIGNED):
        return None
    columns = [_columns(cut, y) for cut in cuts]
    if any(c is None or len(c) != width // 2 for c in columns) or any(cut.output.id in outputs for cut in cuts):
        return None
    found = [(cut, c) for cut, c in zip(cuts, columns, strict=True) if c is not None]
    if len({int(c) for _, each in found for c in each}) != width:
        return None
    behind = [_behind(cut.output, uses) for cut in cuts]
    return found if behind[0] & behind[1] else None


def _columns(cut: Node, y: Value) -> np.ndarray | None:
    """The columns that a slice takes of a value's last axis, if it takes all of the others."""
    if cut.op != "slice" or not isinstance(y.shape[-1], int):
        return None
    starts, sizes, steps = (cut.attrs[name] for name in ("starts", "sizes", "steps"))
    around = zip(starts[:-1], sizes[:-1], steps[:-1], y.shape[:-1], strict=True)
    if not all(always_equal(start, 0) and always_equal(size, d) and step == 1 for start, size, step, d in around):
        return None
    if not all(isinstance(x, int) for x in (starts[-1], sizes[-1])):
        return None
    found: np.ndarray = starts[-1] + steps[-1] * np.arange(sizes[-1])
    return found


def _behind(half: Value, uses: Mapping[int, list[Node]]) -> set[int]:
    """The functions that follow from a half, element by element."""
    found: set[int] = set()
    pending: list[Value] = [half]
    while pending and len(found) < NEAR:
        for n in uses.get(pending.pop(0).id, ()):
            follows = lookup(n.op).kind is Kind.POINTWISE and always_equal(n.output.t.size, half.t.size)
            if follows and id(n) not in found:
                found.add(id(n))
                pending.append(n.output)
    return found


def _divide(r: Rewriter, branch: Branch, halves: Sequence[tuple[Node, np.ndarray]]) -> None:
    """A product for each half, in place of their slices."""
    b = Builder()
    parts = [branch.product, branch.addition, *(cut for cut, _ in halves)]
    x = r.value(branch.product.operands[0])
    assert x is not None
    with b.from_origin(merge_origins([n.origin for n in parts if n is not None])):
        for cut, columns in halves:
            y = b.matmul(x, b.constant(np.ascontiguousarray(branch.weights[:, columns])))
            if branch.bias is not None:
                y = b.add(y, b.constant(np.ascontiguousarray(branch.bias[columns])))
            r.replace(cut.output, y)
    r.nodes += b.nodes
