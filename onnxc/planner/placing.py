"""Where nodes are computed that no template takes: each joins a kernel that reads it, or has one of its own."""

from __future__ import annotations

from onnxc.ir.expr import Dim, always_equal, is_nonnegative
from onnxc.ir.graph import Node, Value
from onnxc.loops.access import Index
from onnxc.loops.known import is_known
from onnxc.planner.draft import Draft
from onnxc.planner.groups import Group, Placement
from onnxc.planner.layout import Layout
from onnxc.planner.operands import CHEAP, follows, opened, takes
from onnxc.planner.section import FULL, Section, cost, is_reduction
from onnxc.planner.siblings import siblings
from onnxc.planner.templates import operand_is_direct
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import constant_of
from onnxc.primitives.movement import VIEWS

MOST_BESIDE = 3  # sums of different values in one pass: sums of neighbouring layers would all be found
MOST_SEEN = 128  # nodes that are looked at to find what a value is put together of
WOVEN = 3  # concatenations, and paddings between elements, that make a value one to be computed by itself
DEAR = 8  # what a function costs that does so alone
LONG_INDEX = 400  # characters of an index expression


class Placing:
    """Gives every node that has none yet a home. Nodes come from the outputs backwards: readers have theirs."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.copied: dict[int, list[Group]] = {}  # value id -> the concatenations that it is a part of
        self.through_views: dict[int, str] = {}  # value id -> the template that reads it through views
        self.left_out: set[int] = set()  # nodes whose values nobody reads

    def place(self, node: Node) -> None:
        """Has one kernel or several compute a node."""
        value = node.output
        readers = [r for r in self.draft.uses.get(value.id, []) if not self._ignores(r, value)]
        if not readers and value.id not in self.draft.outputs:
            self.left_out.add(id(node))
            return
        if self.draft.is_turned(value, readers):
            self._open(node, "a copy turns it")
            return
        if self._is_made_in_place(node, readers):
            return
        needed = self._reason_to_store(node, readers)
        if node.op in VIEWS and not needed:
            self._note_template_readers(node, readers)
        takers = self._takers(node, readers)
        if node.op in VIEWS or _is_trivial(node):
            self._place_cheap(node, takers, needed)
        else:
            self._place_computed(node, readers, takers, needed)

    def _ignores(self, reader: Node, value: Value) -> bool:
        """Whether a reader does without a value: it is not computed, or its index is known."""
        if id(reader) in self.left_out:
            return True
        return is_known(reader) and value is reader.operands[1] and value is not reader.operands[0]

    def _place_cheap(self, node: Node, takers: list[Group], needed: str) -> None:
        """A view or a number becomes part of each kernel that reads it, and is stored where that is `needed`."""
        if node.op in VIEWS and not needed and self._has_long_index(node, takers):
            self._open(node, "its index would be too long an expression")
            return
        if node.op not in VIEWS and node.operands and self._is_full(node, takers):
            self._open(node, needed or FULL)
            return
        fitting = [g for g in takers if node.op not in VIEWS or self._keeps_neighbours(node, g)]
        for group in fitting:
            self._inline(node, group)
        if len(fitting) < len(takers):
            needed = needed or "a routine reads neighbours"
        if needed:
            self._open(node, needed)

    def _keeps_neighbours(self, view: Node, group: Group) -> bool:
        """Whether what a routine reads through a view lies side by side where its lanes do."""
        found = ((s, at) for s in group.operands.values() for at in s.demands.get(view.output.id, ()))
        return all(follows(self.draft, s, v, i) for s, at in found for v, i in s.reads(view, at))

    def _place_computed(self, node: Node, readers: list[Node], takers: list[Group], needed: str) -> None:
        """What costs something goes into one of the kernels that read it, or beside one that reads the same, or into
        a kernel of its own.
        """
        if any(not self.draft.same_pass(node, g) for g in takers):
            takers = [g for g in takers if self.draft.same_pass(node, g)]
            needed = needed or "read in the backward pass"
        if self._join_any(node, readers, takers, needed):
            return
        if self._join_sibling(node, readers):
            self.draft.note_stored(node.output, needed or "read by another kernel")
            return
        self._open(node, needed or self._why_not(node, takers))

    def _join_any(self, node: Node, readers: list[Node], takers: list[Group], needed: str) -> bool:
        """Puts a node into one of the kernels that read it, or into each; False where it fits into none."""
        if not needed and len(takers) == 1:
            return self._join(node, takers[0], readers, store=False)
        if not needed and len(takers) > 1 and self._reads_as_much(node) and self._duplicate(node, takers):
            return True
        for group in takers:
            if self._join(node, group, readers, store=True):
                self.draft.note_stored(node.output, needed or "read by several kernels")
                return True
        return not needed and len(takers) > 1 and cost(node) <= 2 and self._duplicate(node, takers)

    @staticmethod
    def _is_full(node: Node, takers: list[Group]) -> bool:
        """Whether a section that reads the node is large enough: one number more would be one of a long chain."""
        return any(s.is_full for g in takers for s in g.sections if node.output.id in s.demands)

    def _join_sibling(self, node: Node, readers: list[Node]) -> bool:
        """Puts a reduction into the kernel of another one of the same operand over the same axes, which reads it
        anyway: the least and the greatest element in one pass.
        """
        if not self.draft.options.vertical or lookup(node.op).kind is not Kind.REDUCTION or "axes" not in node.attrs:
            return False
        value = node.output
        for other in siblings(node, self.draft):
            for group in self.draft.homes.get(id(other), ()):
                section = next((s for s in group.sections if other.output.id in s.members), None)
                if group.kind != "loops" or section is None or value.id in section.demands:
                    continue
                if other.op == node.op and len(section.reductions) >= MOST_BESIDE:
                    continue
                if not self.draft.same_pass(node, group):
                    continue
                if self._closes_cycle(group, readers) or len(section.demands[other.output.id]) != 1:
                    continue
                section.demand(value, section.demands[other.output.id][0])
                if not section.accepts(node, True):
                    self._add(node, group, section, store=True)
                    group.reasons.append(f"{node.op} is computed beside {other.op}, which reads the same")
                    return True
                del section.demands[value.id], section.values[value.id]
        return False

    def _add(self, node: Node, group: Group, section: Section, store: bool) -> None:
        """Computes the node in a section of a kernel."""
        section.split_for(node)
        section.add(node, store)
        self.draft.put(node, group)

    def _has_long_index(self, node: Node, takers: list[Group]) -> bool:
        """True where views of views have made an index that a kernel should not compute for every element."""
        if node.output.id in self.through_views or any(g.node is not None for g in takers):
            return False
        demands = (at for g in takers for s in g.sections for at in s.demands.get(node.output.id, ()))
        return any(len(repr(e)) > LONG_INDEX for at in demands for e in at)

    def _reason_to_store(self, node: Node, readers: list[Node]) -> str:
        value = node.output
        if value.id in self.draft.outputs:
            return "an output of the model"
        if node.op not in VIEWS and value.id in self.through_views:
            return f"an operand of {self.through_views[value.id]}"
        for r in readers:
            if id(r) not in self.draft.homes:
                continue
            for group in self.draft.homes[id(r)]:
                if not group.is_for(r) or value.id in group.operands:
                    continue
                if group.kind == "opaque" and _is_flat(node, self.draft.layout):
                    continue
                if group.kind in ("opaque", "control"):
                    return f"an operand of {r.op}"
                if not (node.op in VIEWS and self._stays_direct(r, value)):
                    return f"an operand of {r.op}"
        return ""

    def _stays_direct(self, reader: Node, value: Value) -> bool:
        """Whether a template can read a view in place, even once one of the views behind it, which others read too,
        is stored for these: what is read is then the stored one.
        """
        fewest = self.draft.machine.rows
        if not operand_is_direct(self.draft.layout, reader, value, fewest):
            return False
        stored, node = self.draft.layout.stored, value.node
        while node is not None and node.op in VIEWS:
            value_behind = node.operands[0]
            if value_behind.id in stored:
                return True
            if len(self.draft.uses.get(value_behind.id, [])) > 1:
                stored.add(value_behind.id)
                direct = operand_is_direct(self.draft.layout, reader, value, fewest)
                stored.remove(value_behind.id)
                if not direct:
                    return False
            node = value_behind.node
        return True

    def _is_made_in_place(self, node: Node, readers: list[Node]) -> bool:
        """Whether an output of the graph is what a routine, or the one kernel of a loop, makes in another shape: that
        then writes it.
        """
        value, layout = node.output, self.draft.layout
        if readers or value.id not in self.draft.outputs or not _is_flat(node, layout):
            return False
        (made,) = node.operands
        homes = self.draft.homes.get(id(made.node), ()) if made.node is not None else ()
        if made.id in self.draft.outputs or made.id in layout.reshaped or value.id in self.draft.updated:
            return False
        if not any((g.kind == "opaque" and not g.finishes) or g.recurrence is not None for g in homes):
            return False
        layout.reshaped[made.id] = value
        self.draft.note_stored(made, "an output of the model")
        return True

    def _note_template_readers(self, node: Node, readers: list[Node]) -> None:
        """A template that reads a view reads the stored value behind it; so does a routine that reads a flat one."""
        own = node.output.id
        homes = [(r, g) for r in readers for g in self.draft.homes.get(id(r), ())]
        templates = [r.op for r, g in homes if g.is_for(r) and own not in g.operands]
        if any(g.kind == "opaque" and g.is_for(r) and own not in g.operands for r, g in homes):
            self.draft.layout.reshaped[own] = node.operands[0]
        if node.output.id in self.through_views:
            templates.append(self.through_views[node.output.id])
        if templates:
            self.through_views[node.operands[0].id] = templates[0]

    def _takers(self, node: Node, readers: list[Node]) -> list[Group]:
        """Kernels that compute a reader of the node inline (not as a template's operand)."""
        found: list[Group] = []
        copies = self.copied.get(node.output.id, ())
        for r in readers:
            for group in self.draft.homes.get(id(r), ()):
                demanded = group in copies or any(node.output.id in s.demands for s in group.sections)
                if not group.is_for(r) and demanded and group not in found:
                    found.append(group)
        return found + [g for g in copies if g not in found]

    def _inline(self, node: Node, group: Group) -> None:
        for section in group.sections:
            if node.output.id in section.demands and node.output.id not in section.members:
                section.add(node)
        self.draft.homes.setdefault(id(node), []).append(group)
        group.nodes.append(node)

    def _join(self, node: Node, group: Group, readers: list[Node], store: bool) -> bool:
        """Puts the node into a kernel that reads it, if that is legal there; stored from inside if asked."""
        if not self.draft.options.vertical:
            return False
        sections = [s for s in group.sections if node.output.id in s.demands]
        if len(sections) != 1 and not (group.operands and sections and cost(node) <= CHEAP):
            return False
        if not all(self._may_join(node, group, s, store) for s in sections):
            return False
        kind = lookup(node.op).kind
        if store and (kind is Kind.INDEXED or node.op in ("concat", "pad")):
            return False
        if node.op == "concat" and len(node.inputs) > 4:
            return False
        if store and self._closes_cycle(group, readers):
            return False
        if store and self.draft.beside and sections[0].reductions and self._is_woven(node):
            return False
        if any(s.accepts(node, store) for s in sections):
            return False
        for section in sections:
            section.split_for(node)
            section.add(node, store)
        self.draft.put(node, group)
        group.reasons.append(f"{node.op} is computed where it is used" + (", and stored for others" if store else ""))
        return True

    def _may_join(self, node: Node, group: Group, section: Section, store: bool) -> bool:
        """Whether a kernel of this kind computes such a node there: templates and routines store nothing on the way."""
        if group.node is None:
            return True
        if any(section is s for s in group.operands.values()):
            return not store and takes(self.draft, group, section, node)
        return not (store or is_reduction(node) or node.op in ("concat", "pad"))

    def _is_woven(self, node: Node) -> bool:
        """Whether a value is put together of parts, and to find an element's takes tests, or functions are computed for
        it: a sum had better not wait for that.
        """
        pending, seen, parts = [node], set[int](), 0
        while pending and len(seen) < MOST_SEEN and parts < WOVEN:
            n = pending.pop()
            if id(n) not in seen and lookup(n.op).kind in (Kind.POINTWISE, Kind.VIEW) and id(n) not in self.draft.homes:
                seen.add(id(n))
                parts += n.op == "concat" or (n.op == "pad" and any(n.attrs["interior"]))
                parts += WOVEN * (cost(n) >= DEAR and always_equal(n.output.t.size, node.output.t.size))
                pending += [v.node for v in n.operands if v.node is not None]
        return parts >= WOVEN

    def _closes_cycle(self, group: Group, readers: list[Node]) -> bool:
        own = self.draft.clusters.of(group.nodes[0])
        others = {self.draft.clusters.of(r) for r in self._behind_views(readers)} - {own}
        return self.draft.clusters.reaches(others, own)

    def _behind_views(self, readers: list[Node]) -> list[Node]:
        """Who reads a value in the end: a view is part of every kernel that reads it."""
        found, pending = list[Node](), list(readers)
        while pending:
            node = pending.pop()
            inlined = self.draft.beside and node.op in VIEWS and node.output.id not in self.draft.layout.stored
            if inlined and node.output.id not in self.draft.outputs:
                pending += self.draft.uses.get(node.output.id, ())
            else:
                found.append(node)
        return found

    def _duplicate(self, node: Node, takers: list[Group]) -> bool:
        """Cheap nodes are computed anew in each reader, if every reader can."""
        if not self.draft.options.vertical or lookup(node.op).kind is not Kind.POINTWISE:
            return False
        few = len(takers) <= 3 and all(g.kind != "template" for g in takers)
        if not few and not (self.draft.beside and _is_widened(node)):
            return False
        if sum(not _is_small(v, node.output) for v in node.operands) > 1:
            return False
        sections = [(g, s) for g in takers for s in g.sections if node.output.id in s.demands]
        if any(s.accepts(node, False) or not self._may_join(node, g, s, False) for g, s in sections):
            return False
        for _, section in sections:
            section.split_for(node)
        for group in takers:
            self._inline(node, group)
        return True

    def _reads_as_much(self, node: Node) -> bool:
        """Whether a cheap node's readers may as well read its one large operand instead of its result."""
        return cost(node) <= 2 and sum(not _is_small(v, node.output) for v in node.operands) == 1

    def _why_not(self, node: Node, takers: list[Group]) -> str:
        for group in takers:
            for section in group.sections:
                if node.output.id in section.demands:
                    reason = section.accepts(node, len(takers) > 1)
                    if reason:
                        return reason
        return "no kernel reads it inline"

    def _open(self, node: Node, reason: str) -> None:
        """A new kernel that stores the node's value."""
        self.draft.note_stored(node.output, reason)
        self.draft.layout.reshaped.pop(node.output.id, None)
        group = Group("loops", nodes=[node])
        self.draft.groups.append(group)
        self.draft.homes.setdefault(id(node), []).append(group)
        if node.op == "concat":
            self._open_concat(group, node)
            return
        section = self.draft.section(node.output)
        group.sections.append(section)
        problem = section.accepts(node, True)
        assert not problem, f"{node} cannot be a root: {problem}"
        section.split_for(node)
        section.add(node, True)

    def open_operands(self, group: Group) -> None:
        """Gives a routine a section for each operand that it reads element by element."""
        for v in opened(group.node) if group.node is not None else ():
            section = self.draft.section(v)
            section.stores.clear()
            group.sections.append(section)
            group.operands[v.id] = section
            self.copied.setdefault(v.id, []).append(group)

    def _open_concat(self, group: Group, node: Node) -> None:
        offset: Dim = 0
        axis = node.attrs["axis"]
        for v in node.operands:
            section = self.draft.section(v)
            section.stores.clear()
            copied = self.copied.setdefault(v.id, [])
            copied += [group] if group not in copied else []
            start: Index = tuple(offset if k == axis else 0 for k in range(v.rank))
            group.placements[len(group.sections)] = Placement(node.output, start)
            group.sections.append(section)
            offset = offset + v.shape[axis]


def _is_flat(node: Node, layout: Layout) -> bool:
    """Whether a view has the elements of a value that is computed or given, in the same order in memory."""
    if node.op != "reshape":
        return False
    (source,) = node.operands
    if constant_of(source) is not None or (source.node is not None and source.node.op in VIEWS):
        return False
    plain = all(layout.order_of(v) == tuple(range(v.rank)) for v in (source, node.output))
    return plain and source.id not in layout.pitches and node.output.id not in layout.pitches


def _is_widened(node: Node) -> bool:
    """Whether a value is another one in more bits: whoever reads it may as well read that."""
    from_, to = node.operands[0].dtype if node.operands else None, node.output.dtype
    return node.op == "cast" and from_ is not None and from_.is_float and from_.bits < to.bits


def _is_trivial(node: Node) -> bool:
    """Computed again wherever it is used: it costs less than a load."""
    if node.op in ("iota", "sizes") or (
        node.output.t.size == 1 and lookup(node.op).kind is Kind.POINTWISE and cost(node) <= 2
    ):
        return all(v.t.size == 1 for v in node.operands)
    return False


def _is_small(operand: Value, result: Value) -> bool:
    """Whether reading an operand costs little beside reading the result."""
    mine, whole = operand.t.size, result.t.size
    return mine == 1 or is_nonnegative(whole - 16 * mine)
