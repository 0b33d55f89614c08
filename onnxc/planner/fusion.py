"""The fusion planner: partitions a graph of primitives into kernels.

Templates (matmul, convolution, attention) first take what follows them, as epilogues. Then the other nodes are
visited from the outputs backwards, and each joins the kernel that consumes it where that is legal: it is stored from
inside if others need it too. Every decision is written down with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import networkx as nx

from onnxc.errors import InternalError
from onnxc.ir.expr import Dim, always_equal
from onnxc.ir.graph import Graph, Node, Value
from onnxc.loops.access import VIEWS, Index, pushed_index
from onnxc.planner.chains import chain_convolutions
from onnxc.planner.clusters import Clusters
from onnxc.planner.groups import FusionOptions, Group, Placement, Plan, group_reads
from onnxc.planner.horizontal import divided, merge_small
from onnxc.planner.in_place import is_step, late_nodes, share_buffers, updates_of
from onnxc.planner.layout import Layout, assign, channels_last, is_turned
from onnxc.planner.machine import CPU, Machine
from onnxc.planner.order import sum_orders
from onnxc.planner.pairs import fellows
from onnxc.planner.section import FULL, Section, cost
from onnxc.planner.split import split_reductions
from onnxc.planner.stages import divide_routines
from onnxc.planner.templates import ENABLED, is_template, operand_is_direct
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import constant_of
from onnxc.primitives.contraction import images_of

Templates = Callable[[Node], bool]

NEAR = 12  # values of one size that a sum's operand is computed from, as far as sums beside it are looked for
MOST_BESIDE = 3  # sums of different values in one pass: sums of neighbouring layers would all be found
WOVEN = 3  # concatenations, and paddings between elements, that make a value one to be computed by itself
DEAR = 8  # what a function costs that does so alone
LONG_INDEX = 400  # characters of an index expression
MOST_NODES = 128  # of what follows a template that its epilogue may take


class _Planner:
    def __init__(
        self,
        graph: Graph,
        layout: Layout,
        options: FusionOptions,
        is_template: Templates,
        machine: Machine,
        exact: bool,
    ) -> None:
        self.graph, self.layout, self.options, self.is_template = graph, layout, options, is_template
        self.machine, self.exact = machine, exact
        self.orders = sum_orders(graph, layout) if exact else None
        self.clusters = Clusters(graph)
        self.uses = graph.uses()
        self.outputs = {v.id for v in graph.outputs}
        self.updated = updates_of(graph)
        self.late = late_nodes(graph)
        self.beside = machine.beside and bool(self.late)
        self.homes: dict[int, list[Group]] = {}  # id(node) -> groups that compute it
        self.groups: list[Group] = []
        self.copied: dict[int, list[Group]] = {}  # value id -> the concatenations that it is a part of
        self.boundaries: dict[int, str] = {}
        self.through_views: dict[int, str] = {}  # value id -> the template that reads it through views

    def run(self) -> Plan:
        for node in self.graph.nodes:
            if id(node) in self.homes:
                continue
            if self.is_template(node) or lookup(node.op).kind in (Kind.OPAQUE, Kind.CONTROL):
                self._open_template(node)
        for node in reversed(self.graph.nodes):
            if node.op != "constant" and id(node) not in self.homes:
                self._place(node)
        if self.options.horizontal:
            self._place_parts()
        return Plan(self.graph, self._ordered(), self.boundaries, self.layout)

    # ------------------------------------------------------------ epilogues

    def _open_template(self, node: Node) -> None:
        template = self.is_template(node)
        control = lookup(node.op).kind is Kind.CONTROL
        group = Group("template" if template else "control" if control else "opaque", node, nodes=[node])
        if control:
            (region,) = node.regions
            order = assign(region, ENABLED)
            group.region = plan(region, order, self.options, self.is_template, self.machine, exact=self.exact)
        self.groups.append(group)
        self.homes[id(node)] = [group]
        if template:
            section = self._section(node.output)
            section.stores.clear()
            group.sections.append(section)
            if self.options.epilogue:
                self._pair(group, section)
                self._absorb(group, section)
            self._store_needed(group, section)

    def _pair(self, group: Group, section: Section) -> None:
        """Takes another product of the same left factor into a product's kernel, where the epilogue of both leaves one
        value to store, and none of their results.
        """
        node = group.node
        assert node is not None
        if not (self.machine.pairs and self.options.pairs) or id(node) in self.late:
            return
        for other in fellows(node, self.uses):
            if id(other) in self.homes or id(other) in self.late or not self.is_template(other):
                continue
            own, its = self.clusters.of(node), self.clusters.of(other)
            if self.clusters.reaches([own], its) or self.clusters.reaches([its], own):
                continue
            both = (node, other)
            candidates = self._candidates(group, {n.output.id: section.index for n in both})
            taken = candidates[: self._length(both, candidates)]
            if taken and not {v.id for v in self._needed(both, taken)} & {n.output.id for n in both}:
                self.homes[id(other)] = [group]
                self.clusters.merge(node, other)
                section._demand(other.output, section.index)
                group.twin = other
                group.nodes.append(other)
                group.reasons.append(f"{other.op} of the same left factor runs beside it: their results meet")
                return

    def _absorb(self, group: Group, section: Section) -> None:
        """Takes the pointwise nodes that follow a template into its epilogue, with the views between them.

        Of all nodes that could be taken, the longest run is taken that leaves one value to store, if there is one.
        """
        assert group.node is not None
        at: dict[int, Index] = {v.id: section.index for v in group.results}
        candidates = self._candidates(group, at)
        for node in candidates[: self._length(group.cores, candidates)]:
            self._take(group, section, node, at)

    def _length(self, cores: Sequence[Node], candidates: list[Node]) -> int:
        """How many of the candidates a template takes: as many as leave one value to store, or nothing but updates of
        inputs.

        A narrow value (of bytes, say) goes before wider ones that are made from it by a few instructions: whoever reads
        them makes them again, from a quarter of the memory.
        """
        best, stored = 0, cores[0].output
        most = self.machine.late if id(cores[0]) in self.late else None
        for length in range(1, len(candidates[:most]) + 1):
            needed = self._needed(cores, candidates[:length])
            if len(needed) != 1 and not (needed and most is None and all(v.id in self.updated for v in needed)):
                continue
            if most is not None and needed[0].dtype.bits > cores[0].output.dtype.bits:
                continue
            more = candidates[best:length]
            bits = stored.dtype.bits
            narrow = bits <= self.machine.narrow and bits < needed[0].dtype.bits and needed[0].id not in self.outputs
            if not (narrow and all(n.op in ("cast", "sub", "mul") and _is_of(n, stored, more) for n in more)):
                best, stored = length, needed[0]
        return best

    def _candidates(self, group: Group, at: dict[int, Index]) -> list[Node]:
        """Pointwise nodes after a template that its loops could compute, in order; fills in their indices."""
        pending = [n for vid in at for n in self.uses.get(vid, ())]
        done: set[int] = set()
        found: list[Node] = []
        while pending and len(done) < MOST_NODES:
            pending.sort(key=self.clusters.position)
            node = pending.pop(0)
            if id(node) in done or id(node) in self.homes:
                continue
            done.add(id(node))
            index = self._pushed(group, node, at)
            if index is None or not self._same_pass(node, group):
                continue
            at[node.output.id] = index
            if node.op not in VIEWS:
                found.append(node)
            pending.extend(self.uses.get(node.output.id, ()))
        return found

    def _needed(self, cores: Sequence[Node], taken: list[Node]) -> list[Value]:
        """What must be stored if a template of these nodes takes those: results that others read."""
        inside = {id(n) for n in (*cores, *taken)}
        return [
            n.output for n in (*cores, *taken) if n.output.id in self.outputs or self._read_outside(n.output, inside)
        ]

    def _read_outside(self, value: Value, inside: set[int]) -> bool:
        for reader in self.uses.get(value.id, ()):
            if id(reader) in inside:
                continue
            if reader.op not in VIEWS or reader.output.id in self.outputs or self._read_outside(reader.output, inside):
                return True
        return False

    def _pushed(self, group: Group, node: Node, at: dict[int, Index]) -> Index | None:
        """The node's index in the template's loops, or None where it cannot be part of the epilogue."""
        mine = [v for v in node.operands if v.id in at]
        if node.op in ("reshape", "transpose"):
            return pushed_index(node, at[mine[0].id])
        if lookup(node.op).kind is not Kind.POINTWISE or node.op == "iota" or self._is_turned(mine[0], [node]):
            return None
        value = node.output
        sized = [v for v in mine if always_equal(v.t.size, value.t.size)]
        if len(sized) != len(mine) or any(v.dtype.bits > 32 and v.dtype.is_integer for v in node.operands):
            return None
        indices = {(0,) * (value.rank - v.rank) + at[v.id] for v in sized}
        if len(indices) != 1:
            return None
        own = self.clusters.of(group.node)  # type: ignore[arg-type]
        others = [v.node for v in node.operands if v.id not in at and v.node is not None]
        for other in others:
            if constant_of(other.output if len(other.outputs) == 1 else None) is None:
                target = self.clusters.of(other)
                if target == own or self.clusters.reaches([own], target):
                    return None
        return indices.pop()

    def _take(self, group: Group, section: Section, node: Node, at: dict[int, Index]) -> None:
        value, index = node.output, at[node.output.id]
        for v in node.operands:  # views on the way become members, so that their source's index is known
            chain = v
            while (
                chain.id in at and chain.node is not None and chain.node.op in VIEWS and chain.id not in section.members
            ):
                section.members[chain.id] = chain.node
                section._demand(chain, at[chain.id])
                chain = chain.node.operands[0]
        section._demand(value, index)
        section.add(node)
        self.homes[id(node)] = [group]
        group.nodes.append(node)
        self.clusters.merge(group.node, node)  # type: ignore[arg-type]
        group.reasons.append(f"epilogue: {node.op} runs on the accumulators of {group.node.op}")  # type: ignore[union-attr]

    def _store_needed(self, group: Group, section: Section) -> None:
        """Stores what the rest of the graph needs of a template's results."""
        assert group.node is not None
        cores = group.cores
        for value in self._needed(cores, [n for n in group.nodes if not group.is_for(n)]):
            section.stores[value.id] = section.demands[value.id][0]
            section.values[value.id] = value
            self._note_stored(value, f"{group.node.op} is a template")

    # ------------------------------------------------------------ everything else, backwards

    def _place(self, node: Node) -> None:
        value = node.output
        readers = self.uses.get(value.id, [])
        if not readers and value.id not in self.outputs:
            return
        if self._is_turned(value, readers):
            self._open(node, "a copy turns it")
            return
        needed = self._reason_to_store(node, readers)
        if node.op in VIEWS and not needed:
            self._note_template_readers(node, readers)
        takers = self._takers(node, readers)
        if node.op in VIEWS or _is_trivial(node):
            self._place_cheap(node, takers, needed)
        else:
            self._place_computed(node, readers, takers, needed)

    def _place_cheap(self, node: Node, takers: list[Group], needed: str) -> None:
        """A view or a number becomes part of each kernel that reads it, and is stored where that is `needed`."""
        if node.op in VIEWS and not needed and self._has_long_index(node, takers):
            self._open(node, "its index would be too long an expression")
            return
        if node.op not in VIEWS and node.operands and self._is_full(node, takers):
            self._open(node, needed or FULL)
            return
        for group in takers:
            self._inline(node, group)
        if needed:
            self._open(node, needed)

    def _place_computed(self, node: Node, readers: list[Node], takers: list[Group], needed: str) -> None:
        """What costs something goes into one of the kernels that read it, or beside one that reads the same, or into
        a kernel of its own.
        """
        if any(not self._same_pass(node, g) for g in takers):
            takers = [g for g in takers if self._same_pass(node, g)]
            needed = needed or "read in the backward pass"
        if self._join_any(node, readers, takers, needed):
            return
        if self._join_sibling(node, readers):
            self._note_stored(node.output, needed or "read by another kernel")
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
                self._note_stored(node.output, needed or "read by several kernels")
                return True
        return not needed and len(takers) > 1 and cost(node) <= 2 and self._duplicate(node, takers)

    @staticmethod
    def _is_full(node: Node, takers: list[Group]) -> bool:
        """Whether a section that reads the node is large enough: one number more would be one of a long chain."""
        return any(s.is_full for g in takers for s in g.sections if node.output.id in s.demands)

    def _is_turned(self, value: Value, readers: list[Node]) -> bool:
        """Whether a copy has the value in another order, which is better done by itself: see passes/prepare.py."""
        if self.machine is not CPU or self.layout.order_of(value) != channels_last(value.rank):
            return False
        return any(is_turned(r) and self.layout.order_of(r.output) != channels_last(value.rank) for r in readers)

    def _join_sibling(self, node: Node, readers: list[Node]) -> bool:
        """Puts a reduction into the kernel of another one of the same operand over the same axes, which reads it
        anyway: the least and the greatest element in one pass.
        """
        if not self.options.vertical or lookup(node.op).kind is not Kind.REDUCTION or "axes" not in node.attrs:
            return False
        value = node.output
        for other in self._siblings(node):
            for group in self.homes.get(id(other), ()):
                section = next((s for s in group.sections if other.output.id in s.members), None)
                if group.kind != "loops" or section is None or value.id in section.demands:
                    continue
                if other.op == node.op and len(section.reductions) >= MOST_BESIDE:
                    continue
                if not self._same_pass(node, group):
                    continue
                if self._closes_cycle(node, group, readers) or len(section.demands[other.output.id]) != 1:
                    continue
                section._demand(value, section.demands[other.output.id][0])
                if not section.accepts(node, True):
                    self._add(node, group, section, store=True)
                    group.reasons.append(f"{node.op} is computed beside {other.op}, which reads the same")
                    return True
                del section.demands[value.id], section.values[value.id]
        return False

    def _siblings(self, node: Node) -> list[Node]:
        """Reductions over the same axes of the same operand, or of others that are computed from the same."""
        (x,) = node.operands
        found = [n for n in self.uses.get(x.id, ()) if n.op != node.op and n.op.startswith("reduce_")]
        if self.beside:
            near = (n for v in self._sources(x) for n in self.uses.get(v.id, ()))
            found += _sums_behind(near, self.uses, node)
        return [n for n in found if n.attrs["axes"] == node.attrs["axes"]]

    def _sources(self, x: Value) -> list[Value]:
        """A value and those of its size that it is computed from element by element."""
        found, pending = [x], [x]
        while pending and len(found) < NEAR:
            node = pending.pop().node
            if node is not None and lookup(node.op).kind in (Kind.POINTWISE, Kind.VIEW) and id(node) not in self.homes:
                new = [v for v in node.operands if always_equal(v.t.size, x.t.size) and v not in found]
                found += new
                pending += new
        return found

    def _same_pass(self, node: Node, group: Group) -> bool:
        """Whether both are of a training step's forward pass, or both of what comes after it. What is saved between
        the two is the partitioner's decision, which no kernel may undo by computing something early.
        """
        return not self.late or (id(node) in self.late) == (id(group.nodes[0]) in self.late)

    def _add(self, node: Node, group: Group, section: Section, store: bool) -> None:
        """Computes the node in a section of a kernel."""
        section.split_for(node)
        section.add(node, store)
        self.homes[id(node)] = [group]
        self.clusters.merge(group.nodes[0], node)
        group.nodes.append(node)

    def _has_long_index(self, node: Node, takers: list[Group]) -> bool:
        """True where views of views have made an index that a kernel should not compute for every element."""
        if node.output.id in self.through_views or any(g.node is not None for g in takers):
            return False
        demands = (at for g in takers for s in g.sections for at in s.demands.get(node.output.id, ()))
        return any(len(repr(e)) > LONG_INDEX for at in demands for e in at)

    def _reason_to_store(self, node: Node, readers: list[Node]) -> str:
        value = node.output
        if value.id in self.outputs:
            return "an output of the model"
        if node.op not in VIEWS and value.id in self.through_views:
            return f"an operand of {self.through_views[value.id]}"
        for r in readers:
            if id(r) not in self.homes:
                continue
            for group in self.homes[id(r)]:
                if group.is_for(r) and group.kind in ("opaque", "control"):
                    return f"an operand of {r.op}"
                if group.is_for(r) and not (node.op in VIEWS and self._stays_direct(r, value)):
                    return f"an operand of {r.op}"
        return ""

    def _stays_direct(self, reader: Node, value: Value) -> bool:
        """Whether a template can read a view in place, even once one of the views behind it, which others read too,
        is stored for these: what is read is then the stored one.
        """
        if not operand_is_direct(self.layout, reader, value):
            return False
        stored, node = self.layout.stored, value.node
        while node is not None and node.op in VIEWS:
            value_behind = node.operands[0]
            if value_behind.id in stored:
                return True
            if len(self.uses.get(value_behind.id, [])) > 1:
                stored.add(value_behind.id)
                direct = operand_is_direct(self.layout, reader, value)
                stored.remove(value_behind.id)
                if not direct:
                    return False
            node = value_behind.node
        return True

    def _note_template_readers(self, node: Node, readers: list[Node]) -> None:
        """A template that reads a view reads the stored value behind it."""
        templates = [r.op for r in readers for g in self.homes.get(id(r), ()) if g.is_for(r)]
        if node.output.id in self.through_views:
            templates.append(self.through_views[node.output.id])
        if templates:
            self.through_views[node.operands[0].id] = templates[0]

    def _takers(self, node: Node, readers: list[Node]) -> list[Group]:
        """Kernels that compute a reader of the node inline (not as a template's operand)."""
        found: list[Group] = []
        copies = self.copied.get(node.output.id, ())
        for r in readers:
            for group in self.homes.get(id(r), ()):
                demanded = group in copies or any(node.output.id in s.demands for s in group.sections)
                if not group.is_for(r) and demanded and group not in found:
                    found.append(group)
        return found + [g for g in copies if g not in found]

    def _inline(self, node: Node, group: Group) -> None:
        for section in group.sections:
            if node.output.id in section.demands and node.output.id not in section.members:
                section.add(node)
        self.homes.setdefault(id(node), []).append(group)
        group.nodes.append(node)

    def _join(self, node: Node, group: Group, readers: list[Node], store: bool) -> bool:
        """Puts the node into a kernel that reads it, if that is legal there; stored from inside if asked."""
        if not self.options.vertical:
            return False
        sections = [s for s in group.sections if node.output.id in s.demands]
        if len(sections) != 1:
            return False
        kind = lookup(node.op).kind
        if group.kind == "template" and (kind is Kind.REDUCTION or node.op in ("concat", "pad") or store):
            return False
        if store and (kind is Kind.INDEXED or node.op in ("concat", "pad")):
            return False
        if node.op == "concat" and len(node.inputs) > 4:
            return False
        if store and self._closes_cycle(node, group, readers):
            return False
        if store and self.beside and sections[0].reductions and self._is_woven(node):
            return False
        if sections[0].accepts(node, store):
            return False
        self._add(node, group, sections[0], store)
        group.reasons.append(f"{node.op} is computed where it is used" + (", and stored for others" if store else ""))
        return True

    def _is_woven(self, node: Node) -> bool:
        """Whether a value is put together of parts, and to find an element's takes tests, or functions are computed for
        it: a sum had better not wait for that.
        """
        pending, seen, parts = [node], set[int](), 0
        while pending and len(seen) < MOST_NODES and parts < WOVEN:
            n = pending.pop()
            if id(n) not in seen and lookup(n.op).kind in (Kind.POINTWISE, Kind.VIEW) and id(n) not in self.homes:
                seen.add(id(n))
                parts += n.op == "concat" or (n.op == "pad" and any(n.attrs["interior"]))
                parts += WOVEN * (cost(n) >= DEAR and always_equal(n.output.t.size, node.output.t.size))
                pending += [v.node for v in n.operands if v.node is not None]
        return parts >= WOVEN

    def _closes_cycle(self, node: Node, group: Group, readers: list[Node]) -> bool:
        own = self.clusters.of(group.nodes[0])
        others = {self.clusters.of(r) for r in self._behind_views(readers)} - {own}
        return self.clusters.reaches(others, own)

    def _behind_views(self, readers: list[Node]) -> list[Node]:
        """Who reads a value in the end: a view is part of every kernel that reads it."""
        found, pending = list[Node](), list(readers)
        while pending:
            node = pending.pop()
            inlined = self.beside and node.op in VIEWS and node.output.id not in self.layout.stored
            if inlined and node.output.id not in self.outputs:
                pending += self.uses.get(node.output.id, ())
            else:
                found.append(node)
        return found

    def _duplicate(self, node: Node, takers: list[Group]) -> bool:
        """Cheap nodes are computed anew in each reader, if every reader can."""
        if not self.options.vertical or lookup(node.op).kind is not Kind.POINTWISE:
            return False
        few = len(takers) <= 3 and all(g.kind != "template" for g in takers)
        if not few and not (self.beside and _is_widened(node)):
            return False
        if sum(not _is_small(v, node.output) for v in node.operands) > 1:
            return False
        sections = [s for g in takers for s in g.sections if node.output.id in s.demands]
        if any(s.accepts(node, False) for s in sections):
            return False
        for section in sections:
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
        self._note_stored(node.output, reason)
        group = Group("loops", nodes=[node])
        self.groups.append(group)
        self.homes.setdefault(id(node), []).append(group)
        if node.op == "concat":
            self._open_concat(group, node)
            return
        section = self._section(node.output)
        group.sections.append(section)
        problem = section.accepts(node, True)
        assert not problem, f"{node} cannot be a root: {problem}"
        section.split_for(node)
        section.add(node, True)

    def _section(self, root: Value) -> Section:
        return Section.over(root, self.layout.order_of(root), self.orders)

    def _note_stored(self, value: Value, reason: str) -> None:
        self.boundaries[value.id] = reason
        self.layout.stored.add(value.id)

    def _open_concat(self, group: Group, node: Node) -> None:
        offset: Dim = 0
        axis = node.attrs["axis"]
        for v in node.operands:
            section = self._section(v)
            section.stores.clear()
            copied = self.copied.setdefault(v.id, [])
            copied += [group] if group not in copied else []
            start: Index = tuple(offset if k == axis else 0 for k in range(v.rank))
            group.placements[len(group.sections)] = Placement(node.output, start)
            group.sections.append(section)
            offset = offset + v.shape[axis]

    # ------------------------------------------------------------ concatenation without copies

    def _place_parts(self) -> None:
        """Values that a concatenation would only copy are written to their place in the whole by their own kernels."""
        writer = {v.id: g for g in self.groups for v in g.stored()}
        for group in [g for g in self.groups if g.placements]:
            kept: list[tuple[Section, Placement]] = []
            for k, section in enumerate(group.sections):
                placement = group.placements[k]
                if self._can_be_part(section, placement.target, writer):
                    self.layout.parts[section.root.id] = (placement.target, placement.start)
                    self.boundaries[section.root.id] += "; written in its place in a concatenation"
                else:
                    kept.append((section, placement))
            group.sections = [s for s, _ in kept]
            group.placements = dict(enumerate(p for _, p in kept))
            if not kept:
                self.groups.remove(group)

    def _can_be_part(self, section: Section, whole: Value, writer: dict[int, Group]) -> bool:
        root = section.root
        fixed = root.id in self.outputs or root.node is None or root.id in self.layout.parts
        if (
            fixed
            or root.id in section.members
            or writer.get(root.id) is None
            or writer[root.id].kind in ("opaque", "control")
        ):
            return False
        if self.layout.order_of(root) != self.layout.order_of(whole):
            return False
        return all(self._reads_strided(r, root) for r in self.uses.get(root.id, ()))

    def _reads_strided(self, reader: Node, value: Value) -> bool:
        """True for readers that take any strides: loops, and convolutions' images."""
        if reader.op in VIEWS:
            return all(self._reads_strided(r, reader.output) for r in self.uses.get(reader.output.id, ()))
        if any(g.is_for(reader) for g in self.homes.get(id(reader), ())):
            return any(v is value for v in images_of(reader))
        return True

    # ------------------------------------------------------------ order

    def _ordered(self) -> list[Group]:
        """Groups in topological order of what they read and write; the model's own order where that is free."""
        writers: dict[int, set[int]] = {}
        for k, g in enumerate(self.groups):
            for v in g.stored():
                writers.setdefault(v.id, set()).add(k)
                while v.id in self.layout.parts:
                    v = self.layout.parts[v.id][0]
                    writers.setdefault(v.id, set()).add(k)
        dag: nx.DiGraph = nx.DiGraph()
        dag.add_nodes_from(range(len(self.groups)))
        for k, g in enumerate(self.groups):
            dag.add_edges_from((w, k) for vid in group_reads(g) for w in writers.get(vid, ()) if w != k)
        first = [self._first_position(g) for g in self.groups]
        try:
            return [self.groups[k] for k in nx.lexicographical_topological_sort(dag, key=first.__getitem__)]
        except nx.NetworkXUnfeasible as error:
            raise InternalError("the fusion plan has a cycle", cause=error) from error

    def _first_position(self, group: Group) -> int:
        return min((self.clusters.position(n) for n in group.nodes), default=0)


def _is_of(node: Node, value: Value, others: list[Node]) -> bool:
    """True where a node needs nothing but one value, results of others, and single numbers."""
    made = {value.id, *(n.output.id for n in others)}
    return all(v.id in made or v.t.size == 1 for v in node.operands)


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


def _sums_behind(nodes: Iterable[Node], uses: Mapping[int, list[Node]], like: Node) -> list[Node]:
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
        elif lookup(node.op).kind in (Kind.POINTWISE, Kind.VIEW) and always_equal(node.output.t.size, x.t.size):
            pending += uses.get(node.output.id, ())
    return list(found.values())


def _is_small(operand: Value, result: Value) -> bool:
    """Whether reading an operand costs little beside reading the result."""
    mine, whole = operand.t.size, result.t.size
    return mine == 1 or (isinstance(mine, int) and isinstance(whole, int) and mine * 16 <= whole)


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
    found = _Planner(graph, layout, options, templates, machine, exact).run()
    if options.horizontal:
        found.groups = merge_small(found.groups, layout, machine, late_nodes(graph))
    found.groups = [part for group in found.groups for part in divided(group, machine)]
    if options.chains and not exact:
        found.groups = chain_convolutions(found.groups, layout, {v.id for v in graph.outputs})
    return share_buffers(found, reuse=machine is CPU) if options.in_place else found
