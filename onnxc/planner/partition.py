"""What a training step saves on its way forward, and what it computes again on its way back.

Every value that the backward pass reads must either stay in memory from one pass to the other or be computed again.
Which is which is a minimum cut: a value can be computed again if its operands are at hand, so the values to save
separate those that cannot be computed again from those that the backward pass reads, and the fewest bytes do it.
(As in Chen and others, Training Deep Nets with Sublinear Memory Cost, for the idea, and in PyTorch's
min_cut_rematerialization_partition for the cut.)

What may be computed again is a matter of time. Pointwise operations may: they run where they are read. Products and
convolutions may where they are next to nothing of the step, or where it has a memory budget, those first that give the
most bytes for their arithmetic.
Reductions never do: their results are small, and what they read is large. A value has the same bits whether it is saved
or computed again, and sums do not depend on what their kernels store (see order.py).

How good a cut is tells the memory plan, and nothing else: each is planned, and the peaks are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import networkx as nx

from onnxc.ir.expr import Dim, evaluate, symbols
from onnxc.ir.graph import Graph, Node, Value, cloned
from onnxc.planner.flops import flops
from onnxc.planner.fusion import plan
from onnxc.planner.groups import FusionOptions, Plan
from onnxc.planner.in_place import is_step, late_nodes
from onnxc.planner.layout import Layout, assign
from onnxc.planner.memory import assign_offsets, lifetimes
from onnxc.planner.stretches import Costs, stretches
from onnxc.planner.templates import ENABLED
from onnxc.primitives.base import Kind, lookup

BUDGET = "memory_budget"  # of a graph's metadata: a fraction of the peak that it has without a budget
SIZE = 61  # what a dynamic dim counts
CHEAP = 0.01  # of a step's arithmetic may be done again without a budget
WORTH = 0.97  # of the peak is reason enough to compute pointwise values for each kernel that reads them
SMALL = 1 << 13  # elements of a value that a fast plan saves rather than computes again
MOST_LEVELS = 6  # of arithmetic for a byte that are tried
FREE = (Kind.POINTWISE, Kind.VIEW, Kind.INDEXED)
SOURCES = ("iota", "sizes", "constant")  # the operations without operands whose results never change


Planner = Callable[[Graph, Mapping[int, int]], Plan]  # the ids of copies, with those of what they are copies of


def planned(graph: Graph, options: FusionOptions) -> Plan:
    """The plan of a graph; of a training step, with what is computed again in the backward pass. Copies lie in memory
    as what they are copies of: else sums of them could be added up in another order.
    """
    order = assign(graph, ENABLED).order

    def make(g: Graph, copies: Mapping[int, int]) -> Plan:
        same = ((v.id, copies.get(v.id, v.id)) for v in g.values())
        return plan(g, Layout({k: order[of] for k, of in same if of in order}), options)

    return partitioned(graph, make) if options.recompute else make(graph, {})


def has_budget(graph: Graph) -> bool:
    """Whether a step shall take less memory than it does by itself."""
    return float(graph.metadata.get(BUDGET, 1.0)) < 1


def partitioned(graph: Graph, make: Planner, worth: float = WORTH, *, fast: bool = False) -> Plan:
    """The same by a target's own planner. Pointwise values are computed for each kernel that reads them where that
    takes less than `worth` of the peak. A `fast` plan moves fewer bytes, and may take more memory where there is no
    budget: what is in memory anyway stays there.
    """
    if not is_step(graph):
        return make(graph, {})
    budget = float(graph.metadata.get(BUDGET, 1.0))
    if fast and not has_budget(graph):
        return make(*_recomputed(graph, _fast_policy(graph), apart=True))
    policies = _policies(graph, divided=budget < 1)
    cheap = [p for p in policies if p.share <= CHEAP]
    best = min((_attempt(graph, make, p) for p in (None, cheap[0], *cheap[1:][-1:])), key=lambda a: a.peak)
    if best.policy is not None:
        other = _attempt(graph, make, best.policy, apart=True)
        best = other if other.peak < worth * best.peak else best
    goal = budget * best.peak
    for policy in policies[len(cheap) :]:
        if best.peak <= goal:
            break
        best = min(best, _attempt(graph, make, policy, apart=True), key=lambda a: a.peak)
    return best.plan


@dataclass(frozen=True)
class _Attempt:
    plan: Plan
    peak: int  # bytes of the arena
    policy: Policy | None


def _attempt(graph: Graph, make: Planner, policy: Policy | None, *, apart: bool = False) -> _Attempt:
    """The plan where a policy says what is computed again; None: nothing is."""
    found = make(graph, {}) if policy is None else make(*_recomputed(graph, policy, apart=apart))
    buffers = lifetimes(found)
    _, peak = assign_offsets([_number(b.nbytes) for b in buffers], [(b.first, b.last) for b in buffers])
    return _Attempt(found, peak, policy)


def _number(d: Dim) -> int:
    """A size, with a guess in the place of dynamic dims."""
    return d if isinstance(d, int) else evaluate(d, {s.key: SIZE for s in symbols(d)})


# ---------------------------------------------------------------- what may be computed again


def _arithmetic(node: Node) -> float:
    """Operations for each byte of a node's result, where it may be computed again; else infinity."""
    kind = lookup(node.op).kind
    if len(node.outputs) != 1 or not (node.inputs or node.op in SOURCES):
        return math.inf
    if kind in FREE:
        return 0.0
    if kind is not Kind.TEMPLATE:
        return math.inf
    return _number(flops(node)) / max(1, _number(node.output.t.nbytes))


@dataclass(frozen=True)
class Policy:
    """Which forward nodes may be computed again.

    Attributes:
        share: of the step's arithmetic, how much would be done again at most.
        nodes: those nodes, by identity.
        stored: ids of values that the forward pass stores anyway: of two that are equally good these are saved.
    """

    share: float
    nodes: frozenset[int]
    stored: frozenset[int] = frozenset()


def _policies(graph: Graph, divided: bool) -> list[Policy]:
    """Policies worth trying, by the arithmetic that they take: pointwise nodes alone; then products and convolutions
    too, up to so much arithmetic for a byte; or, with `divided`, those of some stretches of the model, but for what
    goes from one stretch to the next.
    """
    late = late_nodes(graph)
    forward = [n for n in graph.nodes if id(n) not in late and n.op != "constant"]
    cost = {id(n): _arithmetic(n) for n in forward}
    work = {id(n): _number(flops(n)) for n in graph.nodes}
    whole = sum(work.values()) or 1

    def policy(chosen: Iterable[Node]) -> Policy:
        nodes = frozenset(id(n) for n in chosen if cost[id(n)] < math.inf)
        return Policy(sum(work[k] for k in nodes) / whole, nodes)

    found = [policy(n for n in forward if cost[id(n)] <= most) for most in (0.0, *_levels(cost.values()))]
    cheap = max((p for p in found if p.share <= CHEAP), key=lambda p: p.share)
    sizes = [sum(_number(v.t.nbytes) for v in n.outputs) for n in forward]
    dear = {k for k, c in cost.items() if c < math.inf} - cheap.nodes
    ids = stretches(Costs(forward, sizes, work, cheap.nodes, dear)) if divided else []
    long = [policy(n for n in forward if id(n) in chosen) for chosen in ids]
    found += [p for p in long if p.share > CHEAP]  # what is cheap must not depend on the budget
    return sorted({p.nodes: p for p in found}.values(), key=lambda p: p.share)


def _levels(costs: Iterable[float]) -> list[float]:
    """Amounts of arithmetic for a byte, ascending; of many, some that are spread over all."""
    found = sorted({c for c in costs if 0 < c < math.inf})
    if len(found) <= MOST_LEVELS:
        return found
    return [found[k * (len(found) - 1) // (MOST_LEVELS - 1)] for k in range(MOST_LEVELS)]


def _fast_policy(graph: Graph) -> Policy:
    """Pointwise nodes may be computed again, but for operands of products and convolutions in both passes: these are in
    memory in the forward pass, and would have to be for the backward pass. And but for small values: to compute one
    again may take a kernel of its own.
    """
    late = late_nodes(graph)
    both = _operands(n for n in graph.nodes if id(n) not in late) & _operands(n for n in graph.nodes if id(n) in late)
    may = (n for n in graph.nodes if id(n) not in late and n.op != "constant" and _arithmetic(n) == 0)
    sums = (n for n in graph.nodes if id(n) not in late and lookup(n.op).kind is Kind.REDUCTION)
    read = {_behind(v, widened=True).id for n in sums for v in n.operands}
    again = (n for n in may if _is_free(n) or (n.output.id not in both and _number(n.output.t.size) > SMALL))
    return Policy(0.0, frozenset(id(n) for n in again), frozenset(read))


def _is_free(node: Node) -> bool:
    """Whether a node needs no kernel."""
    return lookup(node.op).kind is Kind.VIEW or node.op in SOURCES


def _operands(nodes: Iterable[Node]) -> set[int]:
    """Ids of what templates among these nodes read, through views."""
    return {_behind(v).id for n in nodes if lookup(n.op).kind is Kind.TEMPLATE for v in n.operands}


def _behind(v: Value, widened: bool = False) -> Value:
    """What a value is a view of, or what it is in more bits."""
    while v.node is not None and v.node.operands:
        x = v.node.operands[0]
        wider = widened and v.node.op == "cast" and x.dtype.is_float and x.dtype.bits < v.dtype.bits
        if not (wider or lookup(v.node.op).kind is Kind.VIEW):
            break
        v = x
    return v


# ---------------------------------------------------------------- the cut


def recompute(graph: Graph, policy: Policy, *, apart: bool = False) -> Graph:
    """The graph in which the backward pass reads saved values and copies of forward nodes. With `apart`, what will be
    kernels of their own have copies of their own of what is pointwise: none of it need be in memory for another.
    """
    return _recomputed(graph, policy, apart=apart)[0]


def _recomputed(graph: Graph, policy: Policy, *, apart: bool) -> tuple[Graph, dict[int, int]]:
    """The same, and what values are copies of, by their ids."""
    late = late_nodes(graph)
    saved = _saved(graph, late, lambda node: id(node) in policy.nodes, policy.stored)
    kernels = _kernels(graph, late) if apart else {}
    copies = _Copies(late, saved)
    for node in graph.nodes:
        if id(node) in late:
            copies.add(node, kernels.get(id(node), 0))
        else:
            copies.nodes.append(node)
    shared = copies.shared
    outputs = [shared.get(v.id, v) if v.node is not None and id(v.node) in late else v for v in graph.outputs]
    return replace(graph, nodes=copies.nodes, outputs=outputs), copies.copied


def _kernels(graph: Graph, late: set[int]) -> dict[int, int]:
    """Which pointwise nodes of the backward pass may share a kernel: those that read each other. Numbers from 1 on, by
    the node's identity.
    """
    near = [n for n in graph.nodes if id(n) in late and _is_near(n)]
    flow: nx.Graph = nx.Graph()
    flow.add_nodes_from(id(n) for n in near)
    flow.add_edges_from((id(v.node), id(n)) for n in near for v in n.operands if v.node and id(v.node) in flow)
    return {k: number for number, part in enumerate(nx.connected_components(flow), 1) for k in part}


def _is_near(node: Node) -> bool:
    """Whether a node runs where it is read."""
    return lookup(node.op).kind in (Kind.POINTWISE, Kind.VIEW)


class _Copies:
    """The nodes of a graph in which late nodes read copies. `shared` are those for all kernels, by what they are copies
    of; beside them each kernel has its own.
    """

    def __init__(self, late: set[int], saved: set[int]) -> None:
        self.late, self.saved = late, saved
        self.nodes: list[Node] = []
        self.shared: dict[int, Value] = {}
        self.copied: dict[int, int] = {}  # id of a copy -> of what
        self._own: dict[int, dict[int, Value]] = {0: self.shared}

    def add(self, node: Node, kernel: int) -> None:
        """A late node, as part of a kernel; 0: of any."""
        own = self._own.setdefault(kernel, {})
        for v in node.operands:
            self._make(v, own)
        self._clone(node, own, self.shared)

    def _make(self, v: Value, own: dict[int, Value]) -> None:
        """Copies of the nodes that make a value anew."""
        pending = [(v, own)]
        while pending:
            x, place = pending[-1]
            node = x.node
            if node is None or not self._is_missing(x, place):
                pending.pop()
                continue
            place = self._place(node, place)
            missing = [(u, place) for u in node.operands if self._is_missing(u, place)]
            if missing:
                pending += missing
            else:
                self._clone(node, place, place)
                pending.pop()

    def _place(self, node: Node, own: dict[int, Value]) -> dict[int, Value]:
        """Where the copy of a forward node is noted: what is dear is computed once for all kernels."""
        return own if _is_near(node) else self.shared

    def _is_missing(self, v: Value, own: dict[int, Value]) -> bool:
        if v.node is None or id(v.node) in self.late or v.node.op == "constant" or v.id in self.saved:
            return False
        return v.id not in self._place(v.node, own)

    def _clone(self, node: Node, own: dict[int, Value], to: dict[int, Value]) -> None:
        values = {**self.shared, **own} if node.regions else self._read(node, own)
        self.nodes += cloned([node], values)
        to.update((v.id, values[v.id]) for v in node.outputs)
        self.copied.update((values[v.id].id, v.id) for v in node.outputs)

    def _read(self, node: Node, own: dict[int, Value]) -> dict[int, Value]:
        found = ((v.id, own.get(v.id) or self.shared.get(v.id)) for v in node.operands)
        return {k: v for k, v in found if v is not None}


def _saved(graph: Graph, late: set[int], may: Callable[[Node], bool], stored: Collection[int]) -> set[int]:
    """Ids of the forward values that are saved: of the fewest bytes, such that all that late nodes read follows from
    them. Of equals, those that are `stored` anyway, by their ids.
    """
    read = {v.id: v for n in graph.nodes if id(n) in late for v in n.operands if _is_forward(v, late)}
    flow: nx.DiGraph = nx.DiGraph()
    flow.add_nodes_from(("source", "sink"))
    for v, distance in _reached(read, late, may):
        assert v.node is not None
        inside, outside = (v.id, 0), (v.id, 1)
        if may(v.node):
            operands = [u for u in v.node.operands if _is_forward(u, late)]
            flow.add_edges_from(((u.id, 1), inside) for u in operands)
        else:
            flow.add_edge("source", inside)
        if lookup(v.node.op).kind is Kind.VIEW:  # its operand is what is saved
            flow.add_edge(inside, outside)
        else:
            flow.add_edge(inside, outside, capacity=_weight(v, distance, v.id in stored))
        if v.id in read:
            flow.add_edge(outside, "sink")
    return {x[0] for x in _cut(flow)}


def _is_forward(v: Value, late: set[int]) -> bool:
    """Whether a value is made by a node of the forward pass; constants and inputs are always at hand."""
    return v.node is not None and id(v.node) not in late and v.node.op != "constant"


def _reached(read: Mapping[int, Value], late: set[int], may: Callable[[Node], bool]) -> Iterator[tuple[Value, int]]:
    """The values that could be needed in order to compute again what is read, nearest first, each with how many
    nodes lie between.
    """
    seen, now, distance = set(read), list(read.values()), 0
    while now:
        ahead: list[Value] = []
        for v in now:
            yield v, distance
            assert v.node is not None
            for u in v.node.operands if may(v.node) else ():
                if u.id not in seen and _is_forward(u, late):
                    seen.add(u.id)
                    ahead.append(u)
        now, distance = ahead, distance + 1


def _weight(v: Value, distance: int, stored: bool) -> int:
    """What it costs to save a value: its bytes. Of equals, the one nearest to what reads it, or one that is stored."""
    return max(1, _number(v.t.nbytes)) * (99 if stored else 100 + min(distance, 50))


def _cut(flow: nx.DiGraph) -> list[tuple[int, int]]:
    """The insides of the values whose edge is cut."""
    if not flow.out_degree("source"):
        return []
    _, (near, _far) = nx.minimum_cut(flow, "source", "sink", flow_func=nx.algorithms.flow.boykov_kolmogorov)
    return [x for x in near if x not in ("source", "sink") and x[1] == 0 and (x[0], 1) not in near]
