"""Reductions that could share a pass: of one operand, or of values that are computed from the same."""

from __future__ import annotations

from collections.abc import Iterable

from onnxc.ir.expr import always_equal
from onnxc.ir.graph import Node, Value
from onnxc.planner.draft import Draft
from onnxc.primitives.base import Kind, lookup

NEAR = 12  # values of one size that a sum's operand is computed from, as far as sums beside it are looked for


def siblings(node: Node, draft: Draft) -> list[Node]:
    """Reductions over the same axes of the same operand, or of others that are computed from the same."""
    (x,) = node.operands
    found = [n for n in draft.uses.get(x.id, ()) if n.op != node.op and n.op.startswith("reduce_")]
    if draft.beside:
        near = (n for v in _sources(x, draft) for n in draft.uses.get(v.id, ()))
        found += _sums_behind(near, draft, node)
    return [n for n in found if n.attrs["axes"] == node.attrs["axes"]]


def _sources(x: Value, draft: Draft) -> list[Value]:
    """A value and those of its size that it is computed from element by element."""
    found, pending = [x], [x]
    while pending and len(found) < NEAR:
        node = pending.pop().node
        if node is not None and _is_element_wise(node) and id(node) not in draft.homes:
            new = [v for v in node.operands if always_equal(v.t.size, x.t.size) and v not in found]
            found += new
            pending += new
    return found


def _sums_behind(nodes: Iterable[Node], draft: Draft, like: Node) -> list[Node]:
    """Sums, of operands of the same shape as that of another, which follow from these nodes element by element."""
    (x,) = like.operands
    found: dict[int, Node] = {}
    pending, seen = list(nodes), set[int]()
    while pending and len(seen) < 2 * NEAR:
        node = pending.pop(0)
        if id(node) in seen or node is like:
            continue
        seen.add(id(node))
        if node.op == like.op and node.operands[0].shape == x.shape:
            found[id(node)] = node
        elif _is_element_wise(node) and always_equal(node.output.t.size, x.t.size):
            pending += draft.uses.get(node.output.id, ())
    return list(found.values())


def _is_element_wise(node: Node) -> bool:
    return lookup(node.op).kind in (Kind.POINTWISE, Kind.VIEW)
