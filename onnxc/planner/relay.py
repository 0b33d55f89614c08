"""Merges kernels that read a large tensor twice, first for sums of parts of it and then for what follows from them.

Where a tensor does not stay in the L2 cache from one kernel to the next (squeeze and excite, the gates of an attention
over channels, normalization over long rows), it is read from memory twice. One kernel in stages can work through it
image by image: its last stage follows the first so closely that it finds the image in the cache. The stages between
them, products of small matrices among them, are made for each image on its own.
"""

from __future__ import annotations

import math
from dataclasses import replace

from onnxc.ir.expr import Dim, Symbol, bounds, coefficient, prod
from onnxc.ir.graph import Node, Value
from onnxc.loops.nest import Nest
from onnxc.loops.terms import Load, walk
from onnxc.planner.flops import total
from onnxc.planner.groups import Group, Plan, group_reads
from onnxc.planner.in_place import is_step
from onnxc.planner.layout import Layout
from onnxc.planner.lower import Lowering
from onnxc.planner.section import Section
from onnxc.primitives.builder import constant_of
from onnxc.primitives.movement import VIEWS

# Of an H200, whose cache has 50 MB: 96 MB in images of 0.4 take 0.79 of the time of two kernels, 134 in images of 2 MB
# 0.82. How far the last stage is behind makes 0.80 of it with 12 MB, 0.79 with 14 to 18, 0.87 with 24, 0.91 with 30.
LEAST_BYTES = 64 << 20  # of the tensor: less would stay in the cache of itself, in good part
MOST_IMAGE = 2 << 20  # bytes of an image: some dozen must fit in the cache beside what is written
LEAST_IMAGE = 64 << 10  # bytes: of less, a program has too little to do
LEAST_IMAGES = 32  # that the stages are apart, many times over
SMALL = 16  # the elements of an image, over those of what the stages hand on for it
LIGHT = 4  # the same, over operations of all that is between the first stage and the last
MOST_STAGES = 6
WORDS = ("float32", "float16", "bfloat16")  # element types that stages hand on


def relayed(plan: Plan) -> Plan:
    """The plan with such kernels merged, where that saves time on a GPU."""
    if is_step(plan.graph):
        return plan
    groups = list(plan.groups)
    for last in plan.groups:
        merged = _merged(plan, groups, last)
        if merged is not None:
            group, gone = merged
            groups = [group if g is last else g for g in groups if not any(g is x for x in gone)]
    return replace(plan, groups=groups)


def images(nest: Nest, section: Section) -> Symbol | None:
    """The loop over images, if all that a section computes is within one of them."""
    first = section.variables[0][0] if section.variables else None
    if first is None or nest.lookups or not section.root.shape or section.root.shape[0] == 1:
        return None
    loops = [nest.outer] if nest.outer else [p.loops for p in nest.phases]
    return first if all(any(s == first for s, _ in part) for part in loops) else None


def loads(nest: Nest) -> list[Load]:
    """All that a nest reads."""
    terms = [r.body for p in nest.phases for r in p.reductions] + [s.term for s in nest.stores()]
    return [t for term in terms for t in walk(term) if isinstance(t, Load)]


def _merged(plan: Plan, groups: list[Group], last: Group) -> tuple[Group, list[Group]] | None:
    """The kernel that a group is the last stage of, and the groups that become part of it."""
    if not _is_loops(last) or last.sections[0].reductions:
        return None
    root, layout = last.sections[0].root, plan.layout
    if len(last.stored()) != 1 or not root.t.is_static or root.rank < 2:
        return None
    by_id = {v.id: v for v in plan.graph.values()}
    reads = {layout.storage(by_id[vid]) for vid in group_reads(last)}
    large = {v for v in reads if v.t.is_static and _is_large(v, root) and constant_of(v) is None}
    found = _before(plan, groups, last, large, by_id) if large else None
    if found is None:
        return None
    stages: list[Section] = []
    for group in found:
        section = _as_loops(plan, group)
        if section is None:
            return None
        stages.append(section)
    if not _is_by_images(stages, last.sections[0], layout):
        return None
    nodes = [n for g in (*found, last) for n in g.nodes]
    reasons = [r for g in (*found, last) for r in g.reasons]
    reasons.append(f"{len(stages) + 1} stages, image by image: {next(iter(large)).t} is in the cache when read again")
    return replace(last, nodes=nodes, reasons=reasons, stages=stages), found


def _is_loops(group: Group) -> bool:
    return group.kind == "loops" and len(group.sections) == 1 and not group.placements and not group.stages


def _is_large(v: Value, root: Value) -> bool:
    count, nbytes = root.shape[0], v.t.nbytes
    if not isinstance(count, int) or not isinstance(nbytes, int) or not v.shape or v.shape[0] != count:
        return False
    return count >= LEAST_IMAGES and nbytes >= LEAST_BYTES and LEAST_IMAGE * count <= nbytes <= MOST_IMAGE * count


def _before(
    plan: Plan, groups: list[Group], last: Group, large: set[Value], by_id: dict[int, Value]
) -> list[Group] | None:
    """The stages before the last one: what leads to it from sums of a large tensor that it reads, too."""
    reads = {id(g): {plan.layout.storage(by_id[vid]).id for vid in group_reads(g)} for g in groups}
    heavy = {v.id for v in large}
    taken = _leading(plan, groups, last, reads, heavy)
    first = [g for g in taken if reads[id(g)] & heavy and g.sections[0].reductions]
    if len(first) != 1:
        return None
    chosen, known = [first[0]], {first[0].stored()[0].id}
    for g in groups:
        if any(g is t for t in taken) and g is not first[0] and reads[id(g)] & known:
            chosen.append(g)
            known.add(g.stored()[0].id)
    inside = {id(g) for g in (*chosen, last)}
    if len(chosen) > MOST_STAGES or any(reads[id(g)] & known for g in groups if id(g) not in inside):
        return None
    if any(reads[id(g)] & heavy for g in chosen[1:]) or not reads[id(last)] & known:
        return None
    return chosen if _has_rows(first[0].sections[0], plan.layout, heavy) else None


def _leading(
    plan: Plan, groups: list[Group], last: Group, reads: dict[int, set[int]], heavy: set[int]
) -> list[Group]:  # fmt: skip
    """The groups that can be stages and lead to the last one, back to those that read what is `heavy`."""
    before = next(k for k, g in enumerate(groups) if g is last)
    writer = {plan.layout.storage(v).id: g for g in groups[:before] for v in g.stored()}
    taken: list[Group] = []
    pending = [writer[i] for i in sorted(reads[id(last)]) if i in writer]
    while pending:
        g = pending.pop()
        if any(g is t for t in taken) or not _is_stage(plan, g, last.sections[0].root):
            continue
        taken.append(g)
        if not reads[id(g)] & heavy:
            pending += [writer[i] for i in sorted(reads[id(g)]) if i in writer]
    return taken


def _is_stage(plan: Plan, group: Group, root: Value) -> bool:
    """Whether what a group hands on is small beside what the last stage makes, and nobody else wants it."""
    stored = group.stored()
    if len(stored) != 1 or plan.layout.storage(stored[0]) is not stored[0]:
        return False
    (v,) = stored
    if any(v.id == out.id for out in plan.graph.outputs):
        return False
    small = isinstance(v.t.size, int) and isinstance(root.t.size, int) and v.t.size * SMALL <= root.t.size
    alike = bool(v.shape) and v.shape[0] == root.shape[0] and v.dtype.name in WORDS
    if not small or not alike:
        return False
    return _is_loops(group) or (group.kind == "template" and not group.chain and _is_light(group, root))


def _is_light(group: Group, root: Value) -> bool:
    """Whether plain loops do what a template does in little of the time that the images take to read."""
    assert isinstance(root.t.size, int)
    flops, pointwise = total(group.nodes)
    work = flops + pointwise
    return isinstance(work, int) and work * LIGHT <= root.t.size


def _as_loops(plan: Plan, group: Group) -> Section | None:
    """The section of a group; of a template, one that computes it with plain loops."""
    if group.kind == "loops":
        return group.sections[0]
    (value,) = group.stored()
    section = Section.over(value, plan.layout.order_of(value))
    place = {id(n): k for k, n in enumerate(plan.graph.nodes)}
    for node in sorted(group.nodes, key=lambda n: place[id(n)], reverse=True):
        if not _takes(section, node, node.output.id == value.id):
            return None
    stored = {v.id for g in plan.groups for v in g.stored()}
    views = [
        v.node for vid, v in section.values.items()
        if vid not in section.members and vid not in stored and v.node is not None and v.node.op in VIEWS
    ]  # fmt: skip
    while views:  # that the template reads through
        node = views.pop()
        if not _takes(section, node, False):
            return None
        below = node.operands[0]
        if below.id not in stored and below.node is not None and below.node.op in VIEWS:
            views.append(below.node)
    return section


def _takes(section: Section, node: Node, store: bool) -> bool:
    """Has a node computed in a section, if it can be."""
    if section.accepts(node, store):
        return False
    section.split_for(node)
    section.add(node, store)
    return True


def _is_by_images(stages: list[Section], last: Section, layout: Layout) -> bool:
    """Whether each stage makes an image's part of its result from that of the stages before it, those between the first
    and the last in few turns.
    """
    handed = {layout.storage(s.root).id: math.prod(d for d in s.root.shape[1:] if isinstance(d, int)) for s in stages}
    for section in (*stages, last):
        nest = Lowering(section, layout).nest(None)
        image = images(nest, section)
        turns = sum((prod(d for _, d in (*nest.outer, *p.loops)) for p in nest.phases), start=0)
        between = section is not stages[0] and section is not last
        if image is None or not isinstance(turns, int) or (between and turns * LIGHT > _elements(last)):
            return False
        places = [(t.value.id, t.index[0]) for t in loads(nest)] + [(s.value.id, s.address) for s in nest.stores()]
        if any(vid in handed and not _is_in_row(a - handed[vid] * section.index[0], handed[vid]) for vid, a in places):
            return False
    return True


def _elements(section: Section) -> int:
    """Of the result."""
    found = section.root.t.size
    assert isinstance(found, int)
    return found


def _is_in_row(rest: Dim, size: int) -> bool:
    """Whether a place, without where its image begins, lies in that image."""
    low, high = bounds(rest)
    return low is not None and high is not None and low >= 0 and high < size


def _has_rows(section: Section, layout: Layout, heavy: set[int]) -> bool:
    """Whether the elements that are summed are neighbours: columns are read no faster from the cache."""
    nest = Lowering(section, layout).nest(None)
    inner = {s for p in nest.phases for s, d in p.loops if d != 1}
    return all(any(coefficient(t.index[0], s) == 1 for s in inner) for t in loads(nest) if t.value.id in heavy)
