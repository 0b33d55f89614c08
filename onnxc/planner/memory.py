"""The memory plan: lifetimes of intermediates, and their places in one arena."""

from __future__ import annotations

from dataclasses import dataclass

from onnxc.ir.expr import Dim, substitute
from onnxc.ir.graph import Value
from onnxc.planner.groups import Group, Plan, group_reads
from onnxc.planner.in_place import own_outputs, updates_of
from onnxc.planner.offsets import ALIGN, aligned, assign_offsets
from onnxc.planner.rows import ROWS_SYMBOL
from onnxc.primitives.builder import constant_of

__all__ = ["ALIGN", "Buffer", "aligned", "assign_offsets", "lifetimes", "region_values"]


@dataclass(frozen=True)
class Buffer:
    """One intermediate: the bytes it takes, and the first and last kernel (positions in the plan) that touch it."""

    value: Value
    nbytes: Dim
    first: int
    last: int


def lifetimes(plan: Plan) -> list[Buffer]:
    """Every value that lives in the arena, in the order in which they are first written."""
    fixed = {v.id for v in plan.graph.inputs} | {v.id for _, v in own_outputs(plan.graph)}
    at_end = updates_of(plan.graph).keys()
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    values: dict[int, Value] = {}
    by_id = {v.id: v for v in plan.graph.values()}
    for k, group in enumerate(plan.groups):
        for vid in sorted({v.id for v in group.stored()} | group_reads(group)):  # of a set, the order is any
            value = plan.layout.storage(by_id[vid])
            if value.id in fixed or constant_of(value) is not None:
                continue
            if value.id not in first and not _writes(plan, group, value):
                continue  # a view that is read through
            first.setdefault(value.id, k)
            last[value.id] = k
            values[value.id] = value
    end = len(plan.groups)  # when what could not be written over an input is copied there
    found = [Buffer(v, plan.layout.nbytes(v), first[i], end if i in at_end else last[i]) for i, v in values.items()]
    for k, group in enumerate(plan.groups):
        found += [Buffer(v, nbytes, k, k) for v, nbytes in region_values(group)]
    return found


def region_values(group: Group) -> list[tuple[Value, Dim]]:
    """What a control kernel keeps in the arena, and the bytes of each: the states before and after a step, and the
    region's intermediates. Where threads divide rows, all rows have their places there. Where one kernel
    does all steps, there are none.
    """
    when = 1 if group.recurrence is None else group.recurrence.stepwise
    if group.region is None or group.node is None or when == 0:
        return []
    region, node = group.region, group.node
    states = region.graph.inputs[: node.attrs["states"]]
    after = {k: region.graph.outputs[k] for k in node.attrs["results"][: node.attrs["states"]]}
    found = [*((v, v.t.nbytes) for v in (*states, *after.values())), *((b.value, b.nbytes) for b in lifetimes(region))]
    rows = {} if group.apart is None else {ROWS_SYMBOL: group.apart.rows}
    return [(v, substitute(nbytes, rows) * when) for v, nbytes in found]


def _writes(plan: Plan, group: Group, value: Value) -> bool:
    return any(plan.layout.storage(v) is value for v in group.stored())
