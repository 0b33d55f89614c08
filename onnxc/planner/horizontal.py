"""Horizontal fusion: small independent kernels that run close to each other become sections of one kernel.

And its opposite: a concatenation of many parts becomes several kernels, where a kernel can take only so many buffers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from onnxc.ir.graph import Value
from onnxc.planner.groups import Group, group_reads
from onnxc.planner.layout import Layout
from onnxc.planner.machine import CPU, Machine
from onnxc.planner.section import Section

SMALL_BYTES = 1 << 20  # of what a kernel writes: larger ones gain nothing from sharing a parallel region
WINDOW = 6  # kernels between the two at most


# Of one kernel: a compiler takes ever longer for a longer function.
MAX_SECTIONS = 64


def merge_small(
    groups: list[Group], layout: Layout, machine: Machine = CPU, late: Collection[int] = frozenset()
) -> list[Group]:
    """The kernels in an order in which they can run, with small neighbours merged.

    `first` moves down to `second` where nothing in between reads what it writes, or writes what it reads. A kernel of
    `late` nodes (by identity) is merged with such kernels only.
    """
    out = list(groups)
    widely = machine.beside and bool(late)  # then what is small stays so, however much it is merged with
    alone = {id(g.sections[0]) for g in out if widely and _is_small(g, machine)}
    window = machine.window if widely else WINDOW

    def is_small(g: Group) -> bool:
        return bool(g.sections) and id(g.sections[0]) in alone if widely else _is_small(g, None)

    k = 0
    while k < len(out):
        first = out[k]
        if is_small(first):
            for j in range(k + 1, min(len(out), k + 1 + window)):
                fits = len(first.sections) + len(out[j].sections) <= MAX_SECTIONS
                fits = fits and (
                    machine.pointers is None or len(_buffers(first) | _buffers(out[j])) <= machine.pointers
                )
                fits = fits and (id(first.nodes[0]) in late) == (id(out[j].nodes[0]) in late)
                if fits and is_small(out[j]) and not any(_depends(g, first, layout) for g in out[k + 1 : j + 1]):
                    out[j] = _merged(first, out[j])
                    del out[k]
                    k -= 1
                    break
        k += 1
    return out


def _is_small(group: Group, machine: Machine | None) -> bool:
    """Whether a kernel gains from sharing one. `machine`: of a training step that merges widely."""
    if group.kind != "loops":
        return False
    written = _bytes(group.stored())
    if machine is None:
        return written <= SMALL_BYTES
    sums = any(s.reductions for s in group.sections)
    if sums and machine.apart is not None:
        read = {vid: v for s in group.sections for vid, v in s.values.items() if vid not in s.members}
        return written <= SMALL_BYTES and _bytes(read.values()) < machine.apart
    return written <= (SMALL_BYTES if sums else machine.together)


def _bytes(values: Iterable[Value]) -> float:
    """Of all of them; infinite where that is known at run time only."""
    return sum(v.t.nbytes if isinstance(v.t.nbytes, int) else math.inf for v in values)


def _places(group: Group, layout: Layout) -> set[int]:
    """Values that a kernel writes, and the wholes that they are parts of."""
    found: set[int] = set()
    for v in group.stored():
        found.add(v.id)
        while v.id in layout.parts:
            v = layout.parts[v.id][0]
            found.add(v.id)
    return found


def _depends(later: Group, first: Group, layout: Layout) -> bool:
    return bool(group_reads(later) & _places(first, layout))


def _merged(first: Group, second: Group) -> Group:
    """One kernel with the sections of both."""
    shift = len(first.sections)
    placements = {**first.placements, **{k + shift: p for k, p in second.placements.items()}}
    reason = "horizontal: small and independent, so they share a kernel"
    return Group(
        "loops", None, None, [*first.sections, *second.sections], placements, [*first.nodes, *second.nodes],
        [*first.reasons, *second.reasons, reason],
    )  # fmt: skip


def divided(group: Group, machine: Machine) -> list[Group]:
    """A kernel as several, where its sections touch more buffers together than one may take."""
    if machine.pointers is None or group.kind != "loops" or len(_buffers(group)) <= machine.pointers:
        return [group]
    parts: list[list[int]] = [[]]
    taken: set[int] = set()
    for k in range(len(group.sections)):
        own = _section_buffers(group, k)
        if parts[-1] and len(taken | own) > machine.pointers:
            parts.append([])
            taken = set()
        taken |= own
        parts[-1].append(k)
    return [_part(group, part) for part in parts] if len(parts) > 1 else [group]


def _part(group: Group, part: list[int]) -> Group:
    """Some sections of a kernel, with the nodes that they compute, or that none of its sections computes (concat)."""
    sections = [group.sections[k] for k in part]
    inside, every = _members(sections), _members(group.sections)
    nodes = [n for n in group.nodes if n.output.id in inside or n.output.id not in every]
    placements = {at: group.placements[k] for at, k in enumerate(part) if k in group.placements}
    reasons = [*group.reasons, "one of several kernels: together they would take too many buffers"]
    return Group("loops", None, None, sections, placements, nodes, reasons)


def _members(sections: list[Section]) -> set[int]:
    return {vid for s in sections for vid in s.members}


def _buffers(group: Group) -> set[int]:
    """Values that a kernel reads or writes."""
    return {vid for k in range(len(group.sections)) for vid in _section_buffers(group, k)}


def _section_buffers(group: Group, k: int) -> set[int]:
    section = group.sections[k]
    target = {group.placements[k].target.id} if k in group.placements else set[int]()
    return {vid for vid in section.demands if vid not in section.members} | section.stores.keys() | target
