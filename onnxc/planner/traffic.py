"""What a kernel moves and computes: bytes read and written, and the arithmetic of templates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from onnxc.ir.expr import Dim, prod
from onnxc.ir.graph import Node, Value
from onnxc.planner.fusion import Group, Plan, group_reads
from onnxc.primitives.builder import constant_of


def describe(plan: Plan) -> list[dict[str, Any]]:
    """For each kernel of a plan, in order, what `onnxc.report.Kernel` shows beside its name and its nodes.

    Keys: `template` (the primitive that a kernel template or a routine computes; empty for generated loops),
    `reads` and `writes` (bytes: an int, or an expression as text where dims are dynamic; `reads` has weights in it,
    and a gather's table counts as a whole), `weights` (the part of `reads` that is constant), `flops`
    (multiplications and additions of a template), `boundaries` (for each stored value, its type and why it is
    stored).
    """
    by_id = {v.id: v for v in plan.graph.values()}
    made = {v.id for g in plan.groups for v in g.stored()} | {v.id for v in plan.graph.inputs}
    return [_describe(plan, group, by_id, made) for group in plan.groups]


def _describe(plan: Plan, group: Group, by_id: dict[int, Value], made: set[int]) -> dict[str, Any]:
    read = [by_id[i] for i in sorted(group_reads(group)) if i in by_id]
    stored = [v for v in read if v.id in made and constant_of(v) is None]
    weights = [v for v in read if constant_of(v) is not None]
    return {
        "template": group.node.op if group.node is not None else "",
        "reads": _number(_bytes(stored + weights)),
        "weights": _number(_bytes(weights)),
        "writes": _number(_bytes(group.stored())),
        "flops": _number(flops(group.node)) if group.node is not None else 0,
        "boundaries": [[str(v.type), plan.boundaries.get(v.id, "")] for v in group.stored()],
    }


def _bytes(values: Iterable[Value]) -> Dim:
    total: Dim = 0
    for value in values:
        total = total + value.t.nbytes
    return total


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


def _number(d: Dim) -> int | str:
    return d if isinstance(d, int) else str(d)
