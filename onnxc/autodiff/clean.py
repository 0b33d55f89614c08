"""Tidies a graph that has been differentiated."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from onnxc.autodiff.reduction import BY_TAPS
from onnxc.ir import dtypes
from onnxc.ir.expr import Symbol
from onnxc.ir.graph import Graph, Node, Value, merge_origins
from onnxc.passes.simplify import Rewriter
from onnxc.primitives.builder import Builder
from onnxc.primitives.custom import OWN
from onnxc.primitives.symbols import symbols_of_node, told_sizes

WIDE_FLOATS = (dtypes.float32, dtypes.float64)  # sums of others may be beyond their range where the product's is not
HINTS = ("tie", "saved", "whole", BY_TAPS)  # attributes that say nothing of a node's results


def without_hints(graph: Graph) -> Graph:
    """The graph without copies and attributes that are there for derivative rules."""
    r = Rewriter(graph)
    for node in graph.nodes:
        if node.op == OWN:
            for old, kept in zip(node.outputs, node.operands, strict=False):
                r.replace(old, r.replaced.get(kept.id, kept))
        elif node.op == "copy" and ("stop" in node.attrs or "rule" in node.attrs):
            source = r.value(node.operands[0])
            assert source is not None
            r.replace(node.output, source)
        elif node.regions or not node.attrs.keys().isdisjoint(HINTS):
            attrs = {k: v for k, v in node.attrs.items() if k not in HINTS}
            outputs = [Value(v.type, v.name, v.data) for v in node.outputs]
            regions = [without_hints(g) for g in node.regions]
            r.nodes.append(Node(node.op, [r.value(v) for v in node.inputs], outputs, attrs, regions, node.origin))
            for old, new in zip(node.outputs, outputs, strict=True):
                r.replace(old, new)
        else:
            r.keep(node)
    return r.result()


def drop_unused(graph: Graph) -> Graph:
    """Without what no output needs: nodes, stacked results of loops, and what their steps then do not read. What alone
    tells a size is needed where the size is.
    """
    needed = {v.id for v in graph.outputs}
    told = told_sizes(graph)
    sizes: set[Symbol] = set()
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if told:
            needed.update(v.id for s, v in told.get(node.outputs[0].id, {}).items() if s in sizes)
        if node.op == "read" or any(v.id in needed for v in node.outputs):  # its sizes are, else it is gone already
            kept.append(_FEWER[node.op](node, needed) if node.op in _FEWER else node)
            needed.update(v.id for v in kept[-1].operands)
            sizes |= symbols_of_node(kept[-1]) if told else set()
    return replace(graph, nodes=kept[::-1])


def _smaller(node: Node, needed: Collection[int]) -> Node:
    """A scan without the results that nothing needs."""
    (region,) = node.regions
    n, m = node.attrs["states"], node.attrs["scanned"]
    kept = [k for k, v in enumerate(node.outputs) if k < n or v.id in needed]
    wanted = [region.outputs[node.attrs["results"][k]] for k in kept]
    ends = list({v.id: v for v in wanted}.values())
    inner = drop_unused(replace(region, outputs=ends, output_names=[f"out{k}" for k in range(len(ends))]))
    read = {v.id for node in inner.nodes for v in node.operands} | {v.id for v in ends}
    used = [k for k, v in enumerate(region.inputs) if k < n or v.id in read]
    attrs = {
        **node.attrs,
        "scanned": sum(n <= k < n + m for k in used),
        "results": tuple(next(i for i, e in enumerate(ends) if e is v) for v in wanted),
    }
    body = replace(inner, inputs=[region.inputs[k] for k in used])
    operands = [node.operands[k] for k in used]
    return Node("scan", operands, [node.outputs[k] for k in kept], attrs, [body], node.origin)


def _smaller_loop(node: Node, needed: Collection[int]) -> Node:
    """A loop of the host without the results that nothing needs."""
    carried, region = node.attrs["carried"], node.regions[0]
    kept = [k for k, v in enumerate(node.outputs) if k < carried or v.id in needed]
    ends = [region.outputs[0], *(region.outputs[1 + k] for k in kept)]
    body = drop_unused(replace(region, outputs=ends, output_names=[f"out{k}" for k in range(len(ends))]))
    attrs, regions = {**node.attrs, "scans": len(kept) - carried}, [body, *node.regions[1:]]
    if "declared" in attrs:
        attrs["declared"] = tuple(text for k, text in enumerate(attrs["declared"], carried) if k in kept)
    if len(kept) < len(node.outputs) and attrs.pop("chunk", None) is not None:
        regions = [body]  # the region of several iterations has all results
    return Node("loop", node.inputs, [node.outputs[k] for k in kept], attrs, regions, node.origin)


def _smaller_branches(node: Node, needed: Collection[int]) -> Node:
    """An If whose branches compute what they give out alone."""
    return Node("if", node.inputs, node.outputs, node.attrs, [drop_unused(g) for g in node.regions], node.origin)


_FEWER = {"scan": _smaller, "loop": _smaller_loop, "if": _smaller_branches}


def without_turned_products(graph: Graph) -> Graph:
    """(a b)' becomes b' a', where nothing else reads the product: the gradient of a weight that is used transposed."""
    uses = graph.uses()
    outputs = {v.id for v in graph.outputs}
    r = Rewriter(graph)
    for node in graph.nodes:
        product = node.operands[0].node if node.op == "transpose" else None
        turned = product is not None and product.op == "matmul" and _swaps_matrix(node.attrs["perm"])
        if not turned or product is None or len(uses[node.operands[0].id]) > 1 or node.operands[0].id in outputs:
            r.keep(node)
            continue
        b = Builder()
        with b.from_origin(merge_origins([product.origin, node.origin])):
            left, right = (r.value(v) for v in product.operands)
            assert left is not None and right is not None
            new = b.matmul(_turned(b, right), _turned(b, left))
        r.nodes += b.nodes
        r.replace(node.output, new)
    return r.result()


def with_factors_outside(graph: Graph) -> Graph:
    """sum(a b) becomes sum(a) b where b is the same all along the sum: so sums of one value are found to be equal, as
    that of a cotangent, which is the gradient of a bias and a part of what a normalization passes on.
    """
    r = Rewriter(graph)
    for node in graph.nodes:
        x = r.value(node.operands[0]) if node.op == "reduce_sum" and node.output.dtype in WIDE_FLOATS else None
        found = None if x is None else _factors(x, node.attrs["axes"])
        if x is None or found is None:
            r.keep(node)
            continue
        terms, factors = found
        b = Builder()
        with b.from_origin(node.origin):
            total = b.reduce("sum", terms, node.attrs["axes"])
            for op, factor in reversed(factors):
                total = b.neg(total) if factor is None else b.binary(op, total, _outside(b, factor, node, x.rank))
        r.nodes += b.nodes
        r.replace(node.output, total)
    return r.result()


def _factors(x: Value, axes: Sequence[int]) -> tuple[Value, list[tuple[str, Value | None]]] | None:
    """What is left of a product without what is the same along some axes; and that, outermost first, with its op. None
    where there is nothing.
    """
    found: list[tuple[str, Value | None]] = []
    while x.node is not None and x.node.op in ("neg", "mul", "div"):
        op, operands = x.node.op, x.node.operands
        if op == "neg":
            found.append((op, None))
            x = operands[0]
            continue
        same = [_is_same_along(v, x, axes) for v in operands]
        k = next((k for k in ((1, 0) if op == "mul" else (1,)) if same[k]), None)
        if k is None or same[1 - k] or operands[1 - k].shape != x.shape:
            break
        found.append((op, operands[k]))
        x = operands[1 - k]
    return (x, found) if any(factor is not None for _, factor in found) else None


def _is_same_along(v: Value, x: Value, axes: Sequence[int]) -> bool:
    """Whether an operand of `x` has one element for all along these axes."""
    lead = x.rank - v.rank
    return all(a < lead or v.shape[a - lead] == 1 for a in axes) and any(x.shape[a] != 1 for a in axes)


def _outside(b: Builder, factor: Value, node: Node, rank: int) -> Value:
    """A factor in the shape of what is left of the sum's axes, or one that broadcasts to it."""
    lead = rank - factor.rank
    return b.reshape(factor, [d for k, d in enumerate(factor.shape) if k + lead not in node.attrs["axes"]])


def _turned(b: Builder, v: Value) -> Value:
    """A matrix transposed; of one that is a transpose, the matrix that it is the transpose of."""
    if v.node is not None and v.node.op == "transpose" and _swaps_matrix(v.node.attrs["perm"]):
        return v.node.operands[0]
    return b.swap(v, v.rank - 2, v.rank - 1)


def _swaps_matrix(perm: Sequence[int]) -> bool:
    n = len(perm)
    return tuple(perm) == (*range(n - 2), n - 1, n - 2)
