"""What follows a template (matmul, convolution, attention) becomes part of its kernel: the epilogue. On GPUs a running
sum has one too.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnxc.ir.expr import Dim
from onnxc.ir.graph import Node, Value
from onnxc.loops.access import Index, pushed_index
from onnxc.loops.known import is_known
from onnxc.passes.epilogue import runs_beside
from onnxc.planner.draft import Draft
from onnxc.planner.groups import Group
from onnxc.planner.pairs import fellows
from onnxc.planner.section import Section
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import constant_of
from onnxc.primitives.movement import VIEWS

MOST_NODES = 128  # of what follows a template that its epilogue may take
MOST_LANES = 16  # results that a place in memory serves, below which their places count as many


class Epilogues:
    """Fills the groups of templates."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft

    def open(self, group: Group) -> None:
        """Gives a template's group its section, and all that its epilogue takes."""
        assert group.node is not None
        section = self.draft.section(group.node.output)
        section.stores.clear()
        group.sections.append(section)
        if self.draft.options.epilogue:
            self._pair(group, section)
            self._absorb(group, section)
        self._store_needed(group, section)

    def _pair(self, group: Group, section: Section) -> None:
        """Takes another product of the same left factor into a product's kernel, where the epilogue of both leaves one
        value to store, and none of their results.
        """
        node = group.node
        assert node is not None
        if not (self.draft.machine.pairs and self.draft.options.pairs) or id(node) in self.draft.late:
            return
        for other in fellows(node, self.draft.uses):
            if id(other) in self.draft.homes or id(other) in self.draft.late or not self.draft.is_template(other):
                continue
            own, its = self.draft.clusters.of(node), self.draft.clusters.of(other)
            if self.draft.clusters.reaches([own], its) or self.draft.clusters.reaches([its], own):
                continue
            both = (node, other)
            candidates = self._candidates(group, {n.output.id: section.index for n in both})
            taken = candidates[: self._length(both, candidates)]
            if taken and not {v.id for v in self.draft.needed(both, taken)} & {n.output.id for n in both}:
                self.draft.put(other, group)
                section.demand(other.output, section.index)
                group.twin = other
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
        most = self.draft.machine.late if id(cores[0]) in self.draft.late else None
        for length in range(1, len(candidates[:most]) + 1):
            needed = self.draft.needed(cores, candidates[:length])
            if len(needed) != 1 and not (needed and most is None and all(v.id in self.draft.updated for v in needed)):
                continue
            if most is not None and needed[0].dtype.bits > cores[0].output.dtype.bits:
                continue
            more = candidates[best:length]
            bits = stored.dtype.bits
            narrow = (
                bits <= self.draft.machine.narrow
                and bits < needed[0].dtype.bits
                and needed[0].id not in self.draft.outputs
            )
            if not (narrow and all(n.op in ("cast", "sub", "mul") and _is_of(n, stored, more) for n in more)):
                best, stored = length, needed[0]
        return best

    def _candidates(self, group: Group, at: dict[int, Index]) -> list[Node]:
        """Pointwise nodes after a template that its loops could compute, in order; fills in their indices."""
        pending = [n for vid in at for n in self.draft.uses.get(vid, ())]
        done: set[int] = set()
        found: list[Node] = []
        while pending and len(done) < MOST_NODES:
            pending.sort(key=self.draft.clusters.position)
            node = pending.pop(0)
            if id(node) in done or id(node) in self.draft.homes:
                continue
            done.add(id(node))
            index = self._pushed(group, node, at)
            if index is None or not self.draft.same_pass(node, group):
                continue
            at[node.output.id] = index
            if node.op not in VIEWS:
                found.append(node)
            pending.extend(self.draft.uses.get(node.output.id, ()))
        return found

    def _pushed(self, group: Group, node: Node, at: dict[int, Index]) -> Index | None:
        """The node's index in the template's loops, or None where it cannot be part of the epilogue."""
        mine = [v for v in node.operands if v.id in at]
        if node.op in ("reshape", "transpose"):
            return pushed_index(node, at[mine[0].id])
        if not runs_beside(node, at, wide=group.finishes) or self.draft.is_turned(mine[0], [node]):
            return None
        indices = {(0,) * (node.output.rank - v.rank) + at[v.id] for v in mine}
        if len(indices) != 1:
            return None
        own = self.draft.clusters.of(group.node)  # type: ignore[arg-type]
        for value in (v for v in node.operands if v.id not in at):
            other = value.node
            if other is None or constant_of(value) is not None:
                continue
            target = self.draft.clusters.of(other)
            if target == own or self.draft.clusters.reaches([own], target):
                return None
            if self.draft.machine.plain and self._looks_up(value, node.output.t.size):
                return None
        return indices.pop()

    def _looks_up(self, value: Value, results: Dim) -> bool:
        """Whether a value is computed from elements whose places are data, about one for each of so many results."""
        pending, seen = [value], set[int]()
        while pending and len(seen) < MOST_NODES:
            v = pending.pop()
            node = v.node
            if v.id in seen or node is None or id(node) in self.draft.homes or constant_of(v) is not None:
                continue
            seen.add(v.id)
            kind = lookup(node.op).kind
            if kind is Kind.INDEXED and not is_known(node):
                where = node.operands[1].t.size
                if not isinstance(where, int) or not isinstance(results, int) or where * MOST_LANES >= results:
                    return True
            elif node.op in VIEWS or kind in (Kind.POINTWISE, Kind.INDEXED):
                pending += node.operands
        return False

    def _take(self, group: Group, section: Section, node: Node, at: dict[int, Index]) -> None:
        value, index = node.output, at[node.output.id]
        for v in node.operands:  # views on the way become members, so that their source's index is known
            chain = v
            while (
                chain.id in at and chain.node is not None and chain.node.op in VIEWS and chain.id not in section.members
            ):
                section.members[chain.id] = chain.node
                section.demand(chain, at[chain.id])
                chain = chain.node.operands[0]
        section.demand(value, index)
        section.add(node)
        self.draft.put(node, group)
        group.reasons.append(f"epilogue: {node.op} runs on the accumulators of {group.node.op}")  # type: ignore[union-attr]

    def _store_needed(self, group: Group, section: Section) -> None:
        """Stores what the rest of the graph needs of a template's results."""
        assert group.node is not None
        cores = group.cores
        for value in self.draft.needed(cores, [n for n in group.nodes if not group.is_for(n)]):
            section.stores[value.id] = section.demands[value.id][0]
            section.values[value.id] = value
            self.draft.note_stored(value, f"{group.node.op} is a {'routine' if group.finishes else 'template'}")


def _is_of(node: Node, value: Value, others: list[Node]) -> bool:
    """True where a node needs nothing but one value, results of others, and single numbers."""
    made = {value.id, *(n.output.id for n in others)}
    return all(v.id in made or v.t.size == 1 for v in node.operands)
