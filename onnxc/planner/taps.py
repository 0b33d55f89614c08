"""Taps: values that kernels compute inside are written out beside their results, and nothing else changes.

A value that becomes an output of a graph changes the plan: it has to be stored, in row-major order, and patterns such
as attention are no longer found around it. A tap is put into a plan that is finished: the groups, their order, their
loops and the memory order of every value stay, and a kernel gets one store more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from onnxc.ir.expr import always_equal, symbols
from onnxc.ir.graph import Value
from onnxc.loops.access import Index
from onnxc.planner.groups import Group, Plan
from onnxc.planner.section import Section
from onnxc.primitives.builder import constant_of


@dataclass(frozen=True)
class Tap:
    """A value that a run shows.

    Attributes:
        value: what is tapped.
        buffer: the value whose buffer it lies in: itself, the whole that it is written into (a concatenation), or an
            output that has its elements in another shape.
        start: where it begins in `buffer`, in each dim; None where it is all of it in another shape.
        order: the memory order of `buffer`, from the outermost dim to the innermost.
        how: "stored", where a kernel stores it anyway; "inside", where a kernel got a store for it.
    """

    value: Value
    buffer: Value
    start: Index | None
    order: tuple[int, ...]
    how: Literal["stored", "inside"]


def tapped(plan: Plan, values: Sequence[Value]) -> tuple[Plan, list[Tap]]:
    """The plan with taps, and those of `values` that can be shown: their buffers are further outputs, after the graph's
    own, named `tap0`, `tap1`, ... in the order of the distinct buffers.

    What is computed nowhere as a whole (inside of attention; between two convolutions that run band by band; only at
    some positions, or several times) cannot be shown. The groups of `plan` are changed in place.
    """
    own = {v.id for v in plan.graph.outputs} | {v.id for v in plan.graph.inputs}
    stored = {v.id for g in plan.groups for v in g.stored()}
    between = {v.id for g in plan.groups for link in g.chain[:-1] for v in link.stored()}
    taps: list[Tap] = []
    for value in {v.id: v for v in values}.values():
        if value.id in own or constant_of(value) is not None or value.id in between:
            continue
        tap = _stored(plan, value) if value.id in stored else _inside(plan, value)
        if tap is not None:
            taps.append(tap)
    buffers = [v for v in {t.buffer.id: t.buffer for t in taps}.values() if v.id not in own]
    graph = plan.graph
    names = [f"tap{k}" for k in range(len(buffers))]
    shown = replace(graph, outputs=[*graph.outputs, *buffers], output_names=[*graph.output_names, *names])
    return replace(plan, graph=shown), taps


def _stored(plan: Plan, value: Value) -> Tap | None:
    """A value that has a place in memory already."""
    layout = plan.layout
    if layout.storage(value) is value:
        return Tap(value, value, (0,) * value.rank, layout.order_of(value), "stored")
    output = layout.reshaped.get(value.id)
    if output is not None and layout.storage(output) is output:
        return Tap(value, output, None, layout.order_of(output), "stored")
    if layout.placed_on(value) is not None:
        return None  # another value lies there, later or before
    start: Index = (0,) * value.rank
    buffer = value
    while buffer.id in layout.parts:
        buffer, at = layout.parts[buffer.id]
        start = tuple(a + b for a, b in zip(start, at, strict=True))
    if layout.placed_on(buffer) is not None:
        return None
    return Tap(value, buffer, start, layout.order_of(buffer), "stored")


def _inside(plan: Plan, value: Value) -> Tap | None:
    """Adds a store to the first kernel that computes each element of the value exactly once."""
    for group in plan.groups:
        for section in group.sections if not group.chain and group.kind != "control" else ():
            if _is_whole(group, section, value):
                section.stores[value.id] = section.demands[value.id][0]
                section.values[value.id] = value
                return Tap(value, value, (0,) * value.rank, plan.layout.order_of(value), "inside")
    return None


def _is_whole(group: Group, section: Section, value: Value) -> bool:
    """Whether a section computes each element of a value once, and could store it where it does."""
    result = any(value is v for v in group.results)
    if not result and value.id not in section.members:
        return False
    demands = section.demands.get(value.id, [])
    if len(demands) != 1 or not section.visits_once(value, demands[0]):
        return False
    index = {s for e in demands[0] for s in symbols(e)}
    if group.kind == "template":  # its epilogue stores whole vectors: not what stays the same along one of its loops
        return all(s in index or always_equal(n, 1) for s, n in section.variables)
    return set(section.outer or ()) <= index
