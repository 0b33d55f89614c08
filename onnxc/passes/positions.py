"""`positions` for targets that have no routine for it: a running sum and a scatter."""

from __future__ import annotations

from onnxc.ir import dtypes
from onnxc.ir.graph import Graph
from onnxc.passes.simplify import Rewriter
from onnxc.primitives.builder import Builder


def expand_positions(graph: Graph) -> Graph:
    """The graph without `positions`. (In the regions of a scan there are none: their count has to be read.)"""
    if not any(n.op == "positions" for n in graph.nodes):
        return graph
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        if node.op != "positions":
            rewriter.keep(node)
            continue
        b = Builder()
        b.origin = node.origin
        mask = rewriter.value(node.operands[0])
        assert mask is not None
        (size,) = mask.shape
        ones = b.cast(mask, dtypes.int64)
        before = b.one("cumsum", ones, axis=0, exclusive=True, reverse=False)
        count = b.reduce("sum", ones, [0])
        # What is not wanted is written behind what is: each element has a place of its own.
        target = b.where(mask, before, b.add(b.sub(b.iota(size), before), count))
        room = b.full((size,), 0, dtypes.int64)
        places = b.one("scatter_elements", room, target, b.iota(size), axis=0, reduction="none", distinct=True)
        found = places, count
        rewriter.nodes += b.nodes
        for old, new in zip(node.outputs, found, strict=True):
            rewriter.replace(old, new)
    return rewriter.result()
