"""A product whose columns are a gate and what it opens becomes two products, which a GPU makes in one kernel.

Gated networks often keep both matrices side by side, as one: SwiGLU, GeGLU. Their product is cut into halves, or into
even and odd columns, and a function of one half is multiplied with the other. As one product its columns are stored,
and read again by the function. As two products of the same rows they are one kernel, whose tiles are of both
(`planner/pairs.py`), and only what follows from both is stored. Where the planner would make two kernels of them, by
what `passes/epilogue.py` says, the product stays whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnxc.ir.expr import always_equal
from onnxc.ir.graph import Graph, Node, Value, merge_origins
from onnxc.passes.epilogue import can_be_paired, meet
from onnxc.passes.merge_products import ALIGNED, Branch, branch_of
from onnxc.passes.simplify import Rewriter
from onnxc.primitives.builder import Builder


def divide_gated_products(graph: Graph) -> Graph:
    """The graph with such products divided."""
    uses = graph.uses()
    outputs = {v.id for v in graph.outputs}
    position = {id(n): k for k, n in enumerate(graph.nodes)}
    r = Rewriter(graph)
    gone: set[int] = set()
    for node in graph.nodes:
        branch = branch_of(node, uses, outputs)
        halves = _halves(branch, uses, outputs) if branch is not None else []
        if branch is not None and halves and meet(halves, position, uses, outputs):
            _divide(r, branch, halves)
            gone |= {id(n) for n in (branch.addition, *halves) if n is not None}
        elif id(node) not in gone:
            r.keep(node)
    return r.result()


def _halves(branch: Branch, uses: Mapping[int, list[Node]], outputs: set[int]) -> list[Node]:
    """The two slices of a product that a kernel could make as a pair, if these are all that reads it."""
    y, cuts = branch.result, uses.get(branch.result.id, [])
    width = branch.weights.shape[1]
    if y.id in outputs or len(cuts) != 2 or width % (2 * ALIGNED):
        return []
    columns = [_columns(cut, y) for cut in cuts]
    if any(c is None or not can_be_paired(y.t, branch.weights[:, c]) for c in columns):
        return []
    taken = {k for c in columns if c is not None for k in range(width)[c]}
    return cuts if len(taken) == width else []


def _columns(cut: Node, y: Value) -> slice | None:
    """The columns that a slice takes of a value's last axis, if it takes all of the others and half of this one."""
    if cut.op != "slice" or not isinstance(y.shape[-1], int):
        return None
    starts, sizes, steps = (cut.attrs[name] for name in ("starts", "sizes", "steps"))
    around = zip(starts[:-1], sizes[:-1], steps[:-1], y.shape[:-1], strict=True)
    if not all(always_equal(start, 0) and always_equal(size, d) and step == 1 for start, size, step, d in around):
        return None
    if not isinstance(starts[-1], int) or sizes[-1] != y.shape[-1] // 2:
        return None
    end = starts[-1] + steps[-1] * sizes[-1]
    return slice(starts[-1], end if end >= 0 else None, steps[-1])


def _divide(r: Rewriter, branch: Branch, halves: Sequence[Node]) -> None:
    """A product for each half, in place of their slices. Their weights are views of the whole's: nothing is copied."""
    b = Builder()
    parts = [branch.product, branch.addition, *halves]
    x = r.value(branch.product.operands[0])
    assert x is not None
    with b.from_origin(merge_origins([n.origin for n in parts if n is not None])):
        for cut in halves:
            columns = _columns(cut, branch.result)
            assert columns is not None
            y = b.matmul(x, b.constant(branch.weights[:, columns]))
            if branch.bias is not None:
                y = b.add(y, b.constant(branch.bias[columns]))
            r.replace(cut.output, y)
    r.nodes += b.nodes
