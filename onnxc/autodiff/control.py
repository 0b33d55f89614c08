"""Derivatives of control flow: a scan's is a scan that runs backwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from onnxc.autodiff import loops
from onnxc.autodiff.elementwise import zeros_like
from onnxc.autodiff.reverse import active_values, gradients
from onnxc.autodiff.rules import Gradients, Step, rule
from onnxc.errors import InternalError, UnsupportedError
from onnxc.ir.expr import prod
from onnxc.ir.graph import Graph, Node, Value
from onnxc.passes.simplify import eliminate_dead
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import Builder
from onnxc.primitives.control import close_region, scan_types
from onnxc.primitives.host import RunTime
from onnxc.primitives.symbols import symbols_of

# ------------------------------------------------------------ before differentiation


def keep_steps(graph: Graph, wrt: Sequence[Value], run_time: RunTime | None = None) -> Graph:
    """The graph with loops that keep, step by step, what the way back starts from.

    Each scan that depends on `wrt` gets further results: its states before each step, and the products made in it
    (`saved` counts them); each loop of the host what it carries before each iteration. All else the way back computes
    again. `onnxc.autodiff.clean.drop_unused` takes away what it did not read.

    `run_time` gives out sizes that the graph does not have, for graphs that are a part of another.
    """
    active = active_values(graph.nodes, wrt)
    sizes = run_time or RunTime(1 + max((int(s.key[1:]) for s in symbols_of(graph) if s.key[1:].isdigit()), default=-1))
    nodes = [_keeping(n, sizes) if any(v.id in active for v in n.outputs) else n for n in graph.nodes]
    return replace(graph, nodes=nodes)


def _keeping(node: Node, sizes: RunTime) -> Node:
    if node.op not in ("scan", "loop", "if"):
        return node
    inner = [replace(g, nodes=[_keeping(n, sizes) for n in g.nodes]) for g in node.regions]
    if node.op != "scan":
        node = Node(node.op, node.inputs, node.outputs, node.attrs, inner, node.origin)
        return loops.keeping(node, sizes) if node.op == "loop" else node
    (region,) = inner
    products = [n.output for n in region.nodes if lookup(n.op).kind is Kind.TEMPLATE and n.output.dtype.is_float]
    saved = [*region.inputs[: node.attrs["states"]], *products]
    ends = list({v.id: v for v in (*region.outputs, *saved)}.values())
    place = {v.id: k for k, v in enumerate(ends)}
    places = [place[region.outputs[k].id] for k in node.attrs["results"]] + [place[v.id] for v in saved]
    names = [f"out{k}" for k in range(len(ends))]
    stacked = [Value(v.t.with_shape((node.attrs["trip"], *v.shape))) for v in saved]
    attrs = {**node.attrs, "results": tuple(places), "saved": len(saved)}
    body = replace(region, outputs=ends, output_names=names)
    return Node("scan", node.inputs, [*node.outputs, *stacked], attrs, [body], node.origin)


# ------------------------------------------------------------ the rule


@dataclass
class _Scan:
    """The parts of a scan that is differentiated."""

    node: Node
    region: Graph = field(init=False)
    states: int = field(init=False)
    scanned: int = field(init=False)
    ends: list[Value] = field(init=False)  # the region's value for each of the node's outputs

    def __post_init__(self) -> None:
        (self.region,) = self.node.regions
        self.states, self.scanned = self.node.attrs["states"], self.node.attrs["scanned"]
        self.ends = [self.region.outputs[k] for k in self.node.attrs["results"]]

    @property
    def saved(self) -> dict[int, Value]:
        """Stacked results, by the id of the region's value that they keep."""
        count = self.node.attrs.get("saved", 0)
        pairs = list(zip(self.ends, self.node.outputs, strict=True))
        return {inside.id: outside for inside, outside in pairs[len(pairs) - count :]}

    def carried(self, needed: Sequence[bool]) -> list[int]:
        """States that depend on what is wanted: at first, or after some steps."""
        wanted = [k for k, n in enumerate(needed) if n]
        while True:
            active = active_values(self.region.nodes, [self.region.inputs[k] for k in wanted])
            more = [k for k in range(self.states) if k not in wanted and self.ends[k].id in active]
            if not more:
                return [k for k in range(self.states) if k in wanted]
            wanted += more


@rule("scan")
def scan(s: Step) -> Gradients:
    """A scan from the last step to the first: its states are the cotangents of the states.

    Of what every step sees the cotangents add up: as a further state, or, where they are products of matrices, as
    one product of all steps at once.
    """
    it = _Scan(s.node)
    if "going" in s.node.attrs:
        raise UnsupportedError("a loop that data ends has no derivative")
    back = _Back(s, it, it.carried(s.needed))
    return back.build()


class _Back:
    """Builds the scan of the way back."""

    def __init__(self, s: Step, it: _Scan, carried: list[int]) -> None:
        self.s, self.it, self.carried, self.b = s, it, carried, s.b
        self.inner = Builder(s.b.differentiable)
        self.inner.origin = s.b.origin
        self.slices: list[Value] = []
        self.stacks: dict[int, Value] = {}  # what slices are of, in the order of the steps back

    def slice(self, outside: Value) -> Value:
        """One step of a stacked value, the last step first."""
        inside = self.inner.input(outside.t.with_shape(outside.shape[1:]))
        self.slices.append(inside)
        self.stacks[inside.id] = self.b.flip(outside, [0])
        return inside

    def build(self) -> Gradients:
        it, b, s = self.it, self.b, self.s
        fixed = it.states + it.scanned
        states = [self.inner.input(it.node.operands[k].t) for k in self.carried]
        places = self.mapped()
        shared: dict[int, int] = {}  # one position for each value that every step sees
        for k in range(fixed, len(it.node.operands)):
            if s.needed[k]:
                shared.setdefault(it.node.operands[k].id, k)
        xs = [k for k in range(it.states, fixed) if s.needed[k]]
        wrt = [places[it.region.inputs[k].id] for k in (*self.carried, *xs, *shared.values())]
        found = gradients(self.inner, self.body(places), self.cotangents(states, places), wrt)
        after = [zeros_like(self.inner, v) if dx is None else dx for v, dx in zip(states, found, strict=False)]
        init = [self.cotangent(k) for k in self.carried]
        slices, of_all = found[len(states) : len(states) + len(xs)], found[len(states) + len(xs) :]
        results = [dx for dx in slices if dx is not None]
        sums: list[tuple[int, Value | list[_Product]]] = []  # for each operand, the state or the products
        for k, dx in zip(shared.values(), of_all, strict=True):
            products = None if dx is None else self.products(dx)
            if dx is not None and products is None:
                states.append(self.inner.input(dx.t))
                after.append(self.inner.add(states[-1], dx))
                init.append(zeros_like(b, it.node.operands[k]))
                sums.append((k, states[-1]))
            elif products is not None:
                results += [v for p in products for v in (p.x, p.y) if v.id not in self.stacks]
                sums.append((k, products))
        self.finals, self.stacked = self.run(init, states, after, results)
        dxs: list[Value | None] = [None] * len(it.node.operands)
        for k, v in zip(self.carried, states, strict=False):
            dxs[k] = self.finals[v.id]
        for k, dx in zip(xs, slices, strict=True):
            dxs[k] = None if dx is None else b.flip(self.stacked[dx.id], [0])
        for k, total in sums:
            dxs[k] = self.finals[total.id] if isinstance(total, Value) else self.total(total)
        return dxs

    def cotangent(self, k: int) -> Value:
        """That of a state's last value."""
        dy = self.s.dys[k]
        return zeros_like(self.b, self.it.node.operands[k]) if dy is None else dy

    def mapped(self) -> dict[int, Value]:
        """The values that a step back starts from, by the ids of the region's."""
        it = self.it
        places = {vid: self.slice(stacked) for vid, stacked in it.saved.items()}
        lost = [v for v in it.region.inputs[: it.states] if v.id not in places]
        if lost:
            raise InternalError("a scan is differentiated that has not kept its states: see keep_steps")
        fixed = it.states + it.scanned
        for inside, x in zip(it.region.inputs[it.states :], it.node.operands[it.states :], strict=True):
            is_stacked = it.region.inputs.index(inside) < fixed
            places[inside.id] = self.slice(x) if is_stacked else x
        return places

    def body(self, places: dict[int, Value]) -> list[Node]:
        """The step's own nodes again, as far as their results are not there already. It fills in `places`."""
        every = []
        for node in self.it.region.nodes:
            kept = all(v.id in places for v in node.outputs)
            every.append(_again(node, places))
            if kept:  # differentiated as any node, but its results are slices
                for v in every[-1].outputs:
                    v.node, v.index = None, 0
            else:
                self.inner.nodes.append(every[-1])
        return every

    def cotangents(self, states: Sequence[Value], places: Mapping[int, Value]) -> dict[int, Value]:
        """Those of a step's results: from the step after it, and from what reads the stacked results."""
        it, found = self.it, dict[int, Value]()
        pairs = [(it.ends[k], v) for k, v in zip(self.carried, states, strict=True)]
        pairs += [
            (end, self.slice(dy))
            for end, dy in zip(it.ends[it.states :], self.s.dys[it.states :], strict=True)
            if dy is not None
        ]
        for end, dy in pairs:
            vid = places[end.id].id
            found[vid] = self.inner.add(found[vid], dy) if vid in found else dy
        return found

    def products(self, dx: Value) -> list[_Product] | None:
        """The products of matrices that a value is a sum of; None where it is something else."""
        node = dx.node
        own = {v.id for n in self.inner.nodes for v in n.outputs} | set(self.stacks)
        if node is None or dx.id not in own:
            return None
        if node.op == "add" and all(v.shape == dx.shape for v in node.operands):
            left, right = (self.products(v) for v in node.operands)
            return None if left is None or right is None else left + right
        if node.op != "matmul" or dx.rank != 2:
            return None
        x, y = node.operands
        if x.node is None or x.node.op != "transpose" or not {x.node.operands[0].id, y.id} <= own:
            return None
        return [_Product(x.node.operands[0], y)]

    def total(self, products: Sequence[_Product]) -> Value:
        """The sum of x' y over all steps: one product of all their rows."""
        b, total = self.b, None
        for p in products:
            x, y = (self.stacks.get(v.id) or self.stacked[v.id] for v in (p.x, p.y))
            x, y = (b.reshape(v, (prod(v.shape[:2]), v.shape[2])) for v in (x, y))
            part = b.matmul(b.swap(x, 0, 1), y)
            total = part if total is None else b.add(total, part)
        assert total is not None
        return total

    def run(
        self, init: Sequence[Value], states: Sequence[Value], after: Sequence[Value], results: Sequence[Value]
    ) -> tuple[dict[int, Value], dict[int, Value]]:
        """The scan itself. Its last states by the ids of the states, its stacked results by those of the results."""
        results = list({v.id: v for v in results}.values())
        ends = list({v.id: v for v in (*after, *results)}.values())
        nodes = eliminate_dead(Graph([], ends, self.inner.nodes, [""] * len(ends))).nodes
        region, taken = close_region([*states, *self.slices], nodes, ends)
        place = {v.id: k for k, v in enumerate(ends)}
        attrs = {
            "states": len(states), "scanned": len(self.slices), "trip": self.it.node.attrs["trip"],
            "results": tuple(place[v.id] for v in (*after, *results)),
        }  # fmt: skip
        operands = [*init, *(self.stacks[v.id] for v in self.slices), *taken]
        types = scan_types([v.t for v in operands], attrs, region)
        node = Node("scan", operands, [Value(t) for t in types], attrs, (region,), self.b.origin)
        self.b.nodes.append(node)
        finals = {v.id: out for v, out in zip(states, node.outputs, strict=False)}
        return finals, {v.id: out for v, out in zip(results, node.outputs[len(states) :], strict=True)}


def _again(node: Node, places: dict[int, Value]) -> Node:
    """The node with other operands, by the ids of its own. Results that have no place yet get one."""
    outputs = [places.get(v.id) or Value(v.type, v.name, v.data) for v in node.outputs]
    places.update({old.id: new for old, new in zip(node.outputs, outputs, strict=True)})
    inputs = [None if v is None else places[v.id] for v in node.inputs]
    return Node(node.op, inputs, outputs, node.attrs, [_copied(g) for g in node.regions], node.origin)


def _copied(region: Graph) -> Graph:
    places = {v.id: Value(v.type, v.name, v.data) for v in region.inputs}
    inputs = list(places.values())
    nodes = [_again(n, places) for n in region.nodes]
    return replace(region, inputs=inputs, nodes=nodes, outputs=[places[v.id] for v in region.outputs])


@dataclass(frozen=True)
class _Product:
    """x' y, of two values [rows, ...] of one step."""

    x: Value
    y: Value
