"""The fusion planner: partitions a graph of primitives into kernels.

Templates (matmul, convolution, attention) first take what follows them, as epilogues (`epilogues.py`). Then the other
nodes are visited from the outputs backwards, and each joins the kernel that consumes it where that is legal
(`placing.py`): it is stored from inside if others need it too. Every decision is written down with its reason.
"""

from __future__ import annotations

from onnxc.ir.graph import Graph, Node
from onnxc.planner.chains import chain_convolutions
from onnxc.planner.draft import Draft, Templates
from onnxc.planner.epilogues import Epilogues
from onnxc.planner.groups import FusionOptions, Group, Plan
from onnxc.planner.horizontal import divided, merge_small
from onnxc.planner.in_place import is_step, late_nodes, share_buffers
from onnxc.planner.layout import Layout, assign
from onnxc.planner.machine import CPU, Machine
from onnxc.planner.operands import finishes
from onnxc.planner.parts import ordered, place_parts
from onnxc.planner.placing import Placing
from onnxc.planner.recurrence import Recurrence
from onnxc.planner.recurrences import recurrence
from onnxc.planner.rows import Apart, is_apart, rows_apart
from onnxc.planner.split import split_reductions
from onnxc.planner.stages import divide_routines
from onnxc.planner.templates import ENABLED, is_template
from onnxc.primitives.base import Kind, lookup


def plan(
    graph: Graph,
    layout: Layout,
    options: FusionOptions | None = None,
    templates: Templates = is_template,
    machine: Machine = CPU,
    *,
    exact: bool = False,
) -> Plan:
    """Partitions the graph into kernels. `templates` says which nodes the target has a kernel template for. `exact`:
    what is computed has the same bits in every plan; so it is in training steps on a CPU, and in their regions.
    """
    options, exact = options or FusionOptions(), machine is CPU and (exact or is_step(graph))
    if options.split:
        graph, layout = split_reductions(graph, layout, machine)
    if options.split and machine.staged:
        graph, layout = divide_routines(graph, layout)
    found = _planned(Draft(graph, layout, options, templates, machine, exact))
    if options.horizontal:
        found.groups = merge_small(found.groups, layout, machine, late_nodes(graph))
    found.groups = [part for group in found.groups for part in divided(group, machine)]
    if options.chains and not exact:
        found.groups = chain_convolutions(found.groups, layout, {v.id for v in graph.outputs})
    return share_buffers(found, reuse=machine is CPU) if options.in_place else found


def _planned(draft: Draft) -> Plan:
    epilogues, placing = Epilogues(draft), Placing(draft)
    for node in draft.graph.nodes:
        if id(node) in draft.homes:
            continue
        template, kind = draft.is_template(node), lookup(node.op).kind
        if template or kind in (Kind.OPAQUE, Kind.CONTROL):
            group = Group("template" if template else kind.name.lower(), node, nodes=[node])
            draft.groups.append(group)
            draft.homes[id(node)] = [group]
            group.finishes = draft.machine.opens and finishes(node)
            if template or group.finishes:
                epilogues.open(group)
            if draft.machine.opens:
                placing.open_operands(group)
            if group.kind == "control":
                group.region, group.apart = _planned_region(node, draft)
                group.recurrence = _recurrence(group, draft)
    for node in reversed(draft.graph.nodes):
        if node.op != "constant" and id(node) not in draft.homes:
            placing.place(node)
    if draft.options.horizontal:
        place_parts(draft)
    return Plan(draft.graph, ordered(draft), draft.boundaries, draft.layout)


def _planned_region(node: Node, draft: Draft) -> tuple[Plan, Apart | None]:
    """The plan of a scan's step; for some of its rows, where each thread takes rows of its own through all steps."""
    (region,) = node.regions
    if draft.machine is not CPU or draft.exact or not draft.options.rows:
        return _step(region, draft), None
    found = rows_apart(node)
    if isinstance(found, Apart):
        apart = _step(found.region, draft)
        why = is_apart(found.region, [v for group in apart.groups for v in group.stored()], apart.layout)
        if not why:
            _note(apart, "threads divide the rows of the loop, and do not meet between its steps")
            return apart, found
    else:
        why = found
    whole = _step(region, draft)
    _note(whole, f"threads meet after each kernel of the loop: {why}")
    return whole, None


def _recurrence(group: Group, draft: Draft) -> Recurrence | None:
    """How one kernel does all steps of a loop, where one does on a GPU."""
    assert group.node is not None
    if draft.machine is CPU or is_step(draft.graph) or not draft.options.recurrence:
        return None
    found = recurrence(group.node)
    if isinstance(found, Recurrence):
        group.reasons.append("one kernel does all steps of the loop")
        return found
    if group.region is not None:
        _note(group.region, f"each step of the loop has kernels of its own: {found}")
    return None


def _step(region: Graph, draft: Draft) -> Plan:
    order = assign(region, ENABLED)
    return plan(region, order, draft.options, draft.is_template, draft.machine, exact=draft.exact)


def _note(step: Plan, reason: str) -> None:
    for group in step.groups:
        group.reasons.append(reason)
