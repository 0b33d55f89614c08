"""The kernels of a draft as a whole: concatenations without copies, and an order in which the kernels can run."""

from __future__ import annotations

import networkx as nx

from onnxc.errors import InternalError
from onnxc.ir.graph import Node, Value
from onnxc.planner.draft import Draft
from onnxc.planner.groups import Group, Placement, group_reads
from onnxc.planner.section import Section
from onnxc.primitives.contraction import images_of
from onnxc.primitives.movement import VIEWS


def place_parts(draft: Draft) -> None:
    """Values that a concatenation would only copy are written to their place in the whole by their own kernels."""
    writer = {v.id: g for g in draft.groups for v in g.stored()}
    for group in [g for g in draft.groups if g.placements]:
        kept: list[tuple[Section, Placement]] = []
        for k, section in enumerate(group.sections):
            placement = group.placements[k]
            if _can_be_part(draft, section, placement.target, writer):
                draft.layout.parts[section.root.id] = (placement.target, placement.start)
                draft.boundaries[section.root.id] += "; written in its place in a concatenation"
            else:
                kept.append((section, placement))
        group.sections = [s for s, _ in kept]
        group.placements = dict(enumerate(p for _, p in kept))
        if not kept:
            draft.groups.remove(group)


def _can_be_part(draft: Draft, section: Section, whole: Value, writer: dict[int, Group]) -> bool:
    root = section.root
    if root.id in draft.outputs or root.node is None or root.id in draft.layout.parts or root.id in section.members:
        return False
    if root.id not in writer or writer[root.id].kind in ("opaque", "control"):
        return False
    if draft.layout.order_of(root) != draft.layout.order_of(whole):
        return False
    return all(_reads_strided(draft, r, root) for r in draft.uses.get(root.id, ()))


def _reads_strided(draft: Draft, reader: Node, value: Value) -> bool:
    """True for readers that take any strides: loops, and convolutions' images."""
    if reader.op in VIEWS:
        return all(_reads_strided(draft, r, reader.output) for r in draft.uses.get(reader.output.id, ()))
    if any(g.is_for(reader) for g in draft.homes.get(id(reader), ())):
        return any(v is value for v in images_of(reader))
    return True


def ordered(draft: Draft) -> list[Group]:
    """Groups in topological order of what they read and write; the model's own order where that is free."""
    groups, parts = draft.groups, draft.layout.parts
    writers: dict[int, set[int]] = {}
    for k, g in enumerate(groups):
        for v in g.stored():
            writers.setdefault(v.id, set()).add(k)
            while v.id in parts:
                v = parts[v.id][0]
                writers.setdefault(v.id, set()).add(k)
    dag: nx.DiGraph = nx.DiGraph()
    dag.add_nodes_from(range(len(groups)))
    for k, g in enumerate(groups):
        dag.add_edges_from((w, k) for vid in group_reads(g) for w in writers.get(vid, ()) if w != k)
    first = [min((draft.clusters.position(n) for n in g.nodes), default=0) for g in groups]
    try:
        return [groups[k] for k in nx.lexicographical_topological_sort(dag, key=first.__getitem__)]
    except nx.NetworkXUnfeasible as error:
        raise InternalError("the fusion plan has a cycle", cause=error) from error
