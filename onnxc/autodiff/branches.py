"""The derivative of an `if`: an `if` of the branches' derivatives, which compute their branch again."""

from __future__ import annotations

from collections.abc import Sequence

from onnxc.autodiff.reverse import gradients
from onnxc.autodiff.rules import Gradients, Step, rule
from onnxc.ir.graph import Graph, Node, Value, cloned
from onnxc.passes.simplify import eliminate_dead
from onnxc.primitives.builder import Builder
from onnxc.primitives.control import close_region


@rule("if")
def if_(s: Step) -> Gradients:
    """Cotangents of what the branch that ran has read; of what only the other one reads they are zero."""
    condition, *taken = s.operands
    split = s.node.attrs["split"]
    wanted = [k for k, v in enumerate(taken) if s.needed[k + 1]]
    regions, outside = [], []
    for region, first, count in ((s.node.regions[0], 0, split), (s.node.regions[1], split, len(taken) - split)):
        inner = Builder(s.b.differentiable, s.b.run_time)
        inner.origin = s.b.origin
        own = {k: region.inputs[k - first] for k in wanted if first <= k < first + count}
        found = _branch(s, inner, region, taken[first : first + count], list(own.values()))
        dxs = dict(zip(own, found, strict=True))
        ends = [_zeros(inner, taken[k]) if dxs.get(k) is None else dxs[k] for k in wanted]
        made = [v for v in ends if v is not None]
        nodes = eliminate_dead(Graph([], made, inner.nodes, [""] * len(made))).nodes
        closed, reads = close_region([], nodes, made)
        regions.append(closed)
        outside.append(reads)
    operands = [condition, *outside[0], *outside[1]]
    outputs = [Value(taken[k].type) for k in wanted]
    s.b.nodes.append(Node("if", operands, outputs, {"split": len(outside[0])}, regions, s.b.origin))
    dys: list[Value | None] = [None] * len(s.operands)
    for k, dx in zip(wanted, outputs, strict=True):
        dys[k + 1] = dx
    return dys


def _branch(
    s: Step, b: Builder, region: Graph, taken: Sequence[Value], wrt: Sequence[Value]
) -> list[Value | None]:  # fmt: skip
    """The cotangents of some inputs of a branch, built in `b` after the branch itself."""
    places = {inside.id: x for inside, x in zip(region.inputs, taken, strict=True)}
    # A value that is read twice has two inputs here, each with a cotangent of its own.
    for v in wrt:
        places[v.id] = b.one("copy", places[v.id])
    starts = [places[v.id] for v in wrt]
    nodes = cloned(region.nodes, places)
    b.nodes += nodes
    seeds: dict[int, Value] = {}
    for y, dy in zip(region.outputs, s.dys, strict=True):
        if dy is not None and y.id in places:
            end = places[y.id]
            seed = b.reshape(dy, end.shape)  # of the sizes that this branch knows
            seeds[end.id] = b.add(seeds[end.id], seed) if end.id in seeds else seed
    return gradients(b, nodes, seeds, starts)


def _zeros(b: Builder, like: Value) -> Value:
    return b.full(like.shape, b.scalar(0, like.dtype), like.dtype)
