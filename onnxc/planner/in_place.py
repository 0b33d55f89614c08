"""Values that take the buffer of another: inputs that a program updates, and results that overwrite an operand.

A graph whose metadata has ``{"updates": {output name: input name}}`` has outputs that replace inputs: parameters in a
training step. They are written over the inputs, so that no second copy exists. Two things make that legal: every other
kernel that reads the old value runs before the one that writes the new one, and that one reads an element at most
where it writes it. Where either does not hold, the output gets a buffer of its own in the arena, from which it is
copied at the end of the run.

The same is done with intermediates of such a graph: a result takes the buffer of an operand that nobody reads later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import networkx as nx

from onnxc.ir.expr import Dim, always_equal
from onnxc.ir.graph import UPDATES, Graph, Value
from onnxc.loops.nest import Nest, Store
from onnxc.loops.terms import Load, Term, walk
from onnxc.planner.groups import Group, Plan, group_reads
from onnxc.planner.layout import Layout
from onnxc.planner.lower import Lowering
from onnxc.primitives.movement import VIEWS


def updates_of(graph: Graph) -> dict[int, Value]:
    """The input that each output replaces, by the output's id."""
    inputs = {v.name: v for v in graph.inputs}
    names: dict[str, str] = graph.metadata.get(UPDATES, {})
    return {
        v.id: inputs[names[name]] for name, v in zip(graph.output_names, graph.outputs, strict=True) if name in names
    }


def own_outputs(graph: Graph) -> list[tuple[str, Value]]:
    """The outputs that a run returns, with their names: those that replace no input."""
    names = graph.metadata.get(UPDATES, {})
    return [(n, v) for n, v in zip(graph.output_names, graph.outputs, strict=True) if n not in names]


def is_step(graph: Graph) -> bool:
    """Whether a graph replaces some of its inputs, as a training step does."""
    return bool(graph.metadata.get(UPDATES))


def late_nodes(graph: Graph) -> set[int]:
    """Of a graph that replaces inputs, the backward pass and the updates: the nodes, by identity, that no output
    needs which a run returns.
    """
    if not is_step(graph):
        return set()
    early, pending = set[int](), [v.node for _, v in own_outputs(graph) if v.node is not None]
    while pending:
        node = pending.pop()
        if id(node) not in early:
            early.add(id(node))
            pending += [v.node for v in node.operands if v.node is not None]
    return {id(n) for n in graph.nodes if id(n) not in early and n.op != "constant"}


def share_buffers(plan: Plan, *, reuse: bool = True) -> Plan:
    """The plan of a graph with updates: its kernels in an order in which inputs can be overwritten, and early; the
    layout says whose buffer each value takes. Other plans stay as they are. Without `reuse` intermediates keep buffers
    of their own.
    """
    updates = updates_of(plan.graph)
    if not updates:
        return plan
    order, layout, check = _Order(plan), plan.layout, Overwriting(plan)
    for v in plan.graph.outputs:
        k = order.writer(v) if v.id in updates else None
        if k is not None and check.is_legal(plan.groups[k], v, updates[v.id]) and order.put_last(k, updates[v.id]):
            layout.overwrites[v.id] = updates[v.id]
    plan = replace(plan, groups=order.early(set(layout.overwrites)))
    if reuse:
        _reuse(plan, updates, check)
    return plan


# ---------------------------------------------------------------- order


class _Order:
    """What must run before what, and how the kernels are ordered at last."""

    def __init__(self, plan: Plan) -> None:
        self.groups, self.layout = plan.groups, plan.layout
        self.writers: dict[int, list[int]] = {}
        for k, group in enumerate(self.groups):
            for v in group.stored():
                for whole in _wholes(v, self.layout):
                    self.writers.setdefault(whole.id, []).append(k)
        self.readers: dict[int, list[int]] = {}
        self.after: nx.DiGraph = nx.DiGraph()
        self.after.add_nodes_from(range(len(self.groups)))
        for k, group in enumerate(self.groups):
            for vid in group_reads(group):
                self.readers.setdefault(vid, []).append(k)
                self.after.add_edges_from((w, k) for w in self.writers.get(vid, ()) if w != k)

    def writer(self, value: Value) -> int | None:
        """The kernel that writes an output; None where several write parts of it."""
        found = set(self.writers[value.id])
        return found.pop() if len(found) == 1 else None

    def put_last(self, k: int, source: Value) -> bool:
        """Lets every other kernel that reads a graph input run before kernel `k`. False where that cannot be."""
        others = {r for r in self.readers.get(source.id, ()) if r != k}
        if others & nx.descendants(self.after, k):
            return False
        self.after.add_edges_from((r, k) for r in others)
        return True

    def early(self, overwriting: set[int]) -> list[Group]:
        """The kernels in order. Those that only overwrite inputs take no memory, and free some: they come as early as
        they can.
        """
        only = [all(v.id in overwriting for v in group.stored()) for group in self.groups]
        found = nx.lexicographical_topological_sort(self.after, key=lambda k: (not only[k], k))
        return [self.groups[k] for k in found]


def _wholes(v: Value, layout: Layout) -> Iterator[Value]:
    """A value, and the wholes that it is a part of."""
    yield v
    while v.id in layout.parts:
        v = layout.parts[v.id][0]
        yield v


# ---------------------------------------------------------------- who may overwrite what


@dataclass(frozen=True)
class _Use:
    """Stores and loads of a nest, each with the phase in which it happens."""

    stores: list[tuple[int, Store]]
    loads: list[tuple[int, Load]]

    @staticmethod
    def of(nest: Nest) -> _Use:
        stores = [(k, s) for k, phase in enumerate(nest.phases) for s in phase.stores]
        terms: list[tuple[int, Term]] = [(k, s.term) for k, s in stores]
        terms += [(k, r.body) for k, phase in enumerate(nest.phases) for r in phase.reductions]
        terms += [(len(nest.phases), lookup.term) for lookup in nest.lookups.values()]  # read at any time
        found = [(k, t) for k, term in terms for t in walk(term) if isinstance(t, Load)]
        return _Use(stores, found)


class Overwriting:
    """Which results kernels can write over which operands."""

    def __init__(self, plan: Plan) -> None:
        self.layout = plan.layout
        self._values = {v.id: v for v in plan.graph.values()}
        self._uses: dict[int, _Use] = {}  # of a section, by its identity

    def is_legal(self, group: Group, result: Value, source: Value) -> bool:
        """Whether a kernel can write `result` over `source`: it reads no element of it elsewhere than where it writes
        it, and not later.

        Rows of a nest run in any order, and its phases one after the other: what an earlier phase reads at the very
        address that a later one writes (in the same loops), no other row touches.
        """
        layout = self.layout
        if result.dtype is not source.dtype or not always_equal(layout.nbytes(result), layout.nbytes(source)):
            return False
        buffer = layout.storage(source)
        if group.chain or group.kind in ("control", "opaque"):
            read = (self._values[i] for i in group_reads(group))
            return group.kind == "opaque" and all(layout.storage(v) is not buffer for v in read)
        if any(layout.storage(v) is buffer for core in group.cores for v in _behind(core.operands)):
            return False
        uses = [self._use(group, k) for k in range(len(group.sections))]
        places = [(use, k, s.address) for use in uses for k, s in use.stores if s.value is layout.storage(result)]
        if len(places) != 1:
            return False
        own, phase, address = places[0]
        return all(
            use is own and k <= phase and _same(load.index, address)
            for use in uses for k, load in use.loads if layout.storage(load.value) is buffer
        )  # fmt: skip

    def _use(self, group: Group, k: int) -> _Use:
        section = group.sections[k]
        if id(section) not in self._uses:
            nest = Lowering(section, self.layout, group.results).nest(group.placements.get(k))
            self._uses[id(section)] = _Use.of(nest)
        return self._uses[id(section)]


def _same(index: tuple[Dim, ...], address: Dim) -> bool:
    return len(index) == 1 and always_equal(index[0], address)


def _behind(operands: tuple[Value, ...]) -> Iterator[Value]:
    """The values, and those that they are views of."""
    for v in operands:
        yield v
        while v.node is not None and v.node.op in VIEWS:
            v = v.node.operands[0]
            yield v


# ---------------------------------------------------------------- intermediates


def _reuse(plan: Plan, updates: dict[int, Value], check: Overwriting) -> None:
    """Lets results take the buffers of operands that are read for the last time."""
    layout, graph = plan.layout, plan.graph
    values = {v.id: v for v in graph.values()}
    kept = {v.id for v in graph.inputs} | {v.id for v in graph.outputs} | updates.keys()
    first, last = _spans(plan, values)
    for k, group in enumerate(plan.groups):
        read = {layout.storage(values[i]).id for i in group_reads(group)} - kept
        ends = [values[i] for i in sorted(read) if i in first and first[i] < k == last[i]]
        for result in group.stored():
            if result.id in kept or first.get(result.id) != k:  # a part of a whole has no buffer of its own
                continue
            for source in ends:
                if check.is_legal(group, result, source):
                    layout.overwrites[result.id] = source
                    last[source.id] = last.pop(result.id)
                    ends.remove(source)
                    break


def _spans(plan: Plan, values: dict[int, Value]) -> tuple[dict[int, int], dict[int, int]]:
    """The first and the last kernel that touches each buffer, by the id of the value that owns it."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for k, group in enumerate(plan.groups):
        written = [plan.layout.storage(v).id for v in group.stored()]
        for vid in written:
            first.setdefault(vid, k)
        for vid in (*written, *(plan.layout.storage(values[i]).id for i in group_reads(group))):
            last[vid] = k
    return first, last
