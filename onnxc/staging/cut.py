"""Cuts a graph with steps on the host into programs and a plan that runs them in turn.

Every node has a time: programs run at even times, host steps at odd ones, each as early as what it reads allows. All
that is computed at one time is one program. A node that depends on a size is no earlier than the size is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from onnxc.ir import dtypes
from onnxc.ir.expr import Expr, of, symbols
from onnxc.ir.graph import Graph, Node, Value
from onnxc.ir.types import TensorType
from onnxc.primitives.builder import constant_of
from onnxc.primitives.host import is_host
from onnxc.primitives.symbols import symbols_of, symbols_of_node
from onnxc.staging.plan import Plan, Step

FREE = ("constant", "sizes", "iota")  # made again in each program that reads them
VIEWS = ("reshape", "expand")  # and so are these: a program that did nothing else would only copy


def cut(graph: Graph, chunks: bool = True) -> Plan:
    """The plan of a graph of primitives and host steps (or of a region, whose inputs are all that it reads).

    With `chunks`, programs run many iterations of a loop at once, where they can (a scan that ends early).
    """
    return _Cutter(graph, chunks).plan()


class _Program:
    """The nodes of one time, as they become a graph of their own."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.inputs: dict[int, Value] = {}  # by id of the value outside
        self.inside: dict[int, Value] = {}
        self.outputs: dict[int, Value] = {}  # by id, as they are outside

    def take(self, value: Value) -> Value:
        """A value of another time, as this program sees it."""
        if value.id not in self.inside:
            node = value.node
            if node is not None and node.op in (*FREE, *VIEWS):
                self.add(node)
            else:
                self.inputs[value.id] = value
                self.inside[value.id] = Value(value.type, value.name)
        return self.inside[value.id]

    def add(self, node: Node) -> None:
        inputs = [None if v is None else self.take(v) for v in node.inputs]
        outputs = [Value(v.type, v.name, v.data) for v in node.outputs]
        self.nodes.append(Node(node.op, inputs, outputs, node.attrs, node.regions, node.origin))
        self.inside.update({old.id: new for old, new in zip(node.outputs, outputs, strict=True)})

    def graph(self, like: Graph, number: int) -> tuple[Graph, list[str]]:
        """The program's graph, and the symbols that it is told."""
        inputs = [self.inside[vid] for vid in self.inputs]
        names = [f"in{k}" for k in range(len(inputs))]
        graph = replace(
            like, inputs=inputs, nodes=self.nodes, outputs=[self.inside[vid] for vid in self.outputs],
            output_names=[f"out{k}" for k in range(len(self.outputs))], name=f"{like.name} part {number}", metadata={},
        )  # fmt: skip
        given = {next(iter(symbols(d))) for v in inputs for d in v.shape if _is_symbol(d)}
        told = sorted(symbols_of(graph) - given, key=lambda s: (len(s.key), s.key))
        for value, name in zip(inputs, names, strict=True):
            value.name = name
        hidden = [Value(TensorType(dtypes.uint8, (of(s), 0)), f"size_{s.key}") for s in told]
        graph.inputs = [*inputs, *hidden]
        used = {s.key for s in symbols_of(graph)}
        graph.dim_names = {s: name for s, name in like.dim_names.items() if s in used}
        return graph, [s.key for s in told]


def _is_symbol(d: object) -> bool:
    return isinstance(d, Expr) and len(found := d.symbols()) == 1 and d == of(next(iter(found)))


class _Cutter:
    def __init__(self, graph: Graph, chunks: bool) -> None:
        self.graph, self.chunks = graph, chunks
        self.times: dict[int, int] = {v.id: -1 for v in graph.inputs}  # of values; those that are free have none
        self.sizes: dict[str, int] = {}  # of symbols; those that are not there are known from the start
        self.programs: dict[int, _Program] = {}
        self.hosts: dict[int, list[Node]] = {}
        self.slots: dict[int, int] = {}
        self.constants: list[tuple[int, Value]] = []

    def plan(self) -> Plan:
        graph = self.graph
        for v in graph.inputs:
            self._slot(v)
        for node in graph.nodes:
            self._place(node)
        for v in graph.outputs:
            self._ask(v)
        steps = [s for time in sorted({*self.programs, *self.hosts}) for s in self._steps(time)]
        outputs = [self._slot(v) for v in graph.outputs]
        inputs = [self._slot(v) for v in graph.inputs]
        _bury(steps, {*outputs})
        return Plan(len(self.slots), inputs, outputs, [v.type for v in graph.inputs], steps, self.constants)

    # ------------------------------------------------------------ times

    def _place(self, node: Node) -> None:
        if node.op in (*FREE, *VIEWS):
            return
        time = max([0, self._known(node), *(self._ready(v) for v in node.operands)])
        if is_host(node):
            free = [self._computed(v) for v in node.operands if v.id not in self.times and constant_of(v) is None]
            time = max([time, *free])
            time += 1 - time % 2
            self.hosts.setdefault(time, []).append(node)
            for v in node.operands:
                self._ask(v)
            self._learn(node, time)
        else:
            time += time % 2
            self._program(time, node)
        for v in node.outputs:
            self.times[v.id] = time

    def _known(self, node: Node) -> int:
        """When the sizes are known that the node works with."""
        found = symbols_of_node(node)
        if is_host(node):  # sizes that it tells itself have no time yet
            found = {s for s in found if s.key in self.sizes}
        return max((self.sizes.get(s.key, 0) for s in found), default=0)

    def _learn(self, node: Node, time: int) -> None:
        """The sizes that a host step tells."""
        if node.op == "read":
            self.sizes.update({s.key: time for d in node.attrs["symbols"] for s in symbols(d)})
            return
        for v in node.outputs:
            for d in v.shape if isinstance(v.type, TensorType) else ():
                if _is_symbol(d):
                    self.sizes.setdefault(repr(d), time)

    def _ready(self, v: Value) -> int:
        """When a value is there."""
        if v.id in self.times:
            return self.times[v.id]
        assert v.node is not None
        return max([self._known(v.node), *map(self._ready, v.node.operands)])

    def _sources(self, v: Value) -> Iterator[Value]:
        """What a program reads for a value that it may make again: the value itself, or what lies under the view."""
        if v.node is not None and v.node.op in VIEWS:
            for x in v.node.operands:
                yield from self._sources(x)
        elif v.id in self.times:
            yield v

    def _computed(self, v: Value) -> int:
        """When a program can give out a value that is free."""
        return (self._ready(v) + 1) // 2 * 2

    def _program(self, time: int, node: Node) -> None:
        self._ask_sources(node.operands, time)
        self.programs.setdefault(time, _Program()).add(node)

    def _ask_sources(self, values: Iterable[Value], time: int) -> None:
        """The programs of other times give out what is read at this one."""
        for v in values:
            for source in self._sources(v):
                if self.times[source.id] != time:
                    self._ask(source)

    def _ask(self, v: Value) -> None:
        """A value that is read at another time than it is made at: its program gives it out."""
        if v.id in self.slots:
            return
        self._slot(v)
        if constant_of(v) is not None:
            self.constants.append((self.slots[v.id], v))
            return
        if v.id not in self.times:  # free, but read by the host: computed once
            time = self._computed(v)
            self._ask_sources([v], time)
            self.times[v.id] = time
            self.programs.setdefault(time, _Program()).take(v)
        if self.times[v.id] % 2 == 0:
            self.programs[self.times[v.id]].outputs[v.id] = v

    def _slot(self, v: Value) -> int:
        return self.slots.setdefault(v.id, len(self.slots))

    # ------------------------------------------------------------ steps

    def _steps(self, time: int) -> Iterator[Step]:
        for node in self.hosts.get(time, ()):
            inputs = [None if v is None else self._slot(v) for v in node.inputs]
            regions = [cut(g, self.chunks) for g in self._regions(node)]
            outputs = [self._slot(v) for v in node.outputs]
            yield Step(node.op, inputs, outputs, [v.type for v in node.outputs], node=node, regions=regions)
        program = self.programs.get(time)
        if program is not None and program.outputs:
            part, sizes = program.graph(self.graph, time // 2)
            inputs = [self._slot_of(vid) for vid in program.inputs]
            outputs = [self._slot_of(vid) for vid in program.outputs]
            yield Step("part", inputs, outputs, [v.type for v in program.outputs.values()], part=part, sizes=sizes)

    def _regions(self, node: Node) -> tuple[Graph, ...]:
        if node.op == "later":
            return ()
        chunked = "chunk" in node.attrs
        return node.regions[-1:] if chunked and self.chunks else node.regions[: 1 if chunked else None]

    def _slot_of(self, vid: int) -> int:
        return self.slots[vid]


def _bury(steps: list[Step], kept: Iterable[int]) -> None:
    """Notes at each step which slots are read there for the last time."""
    seen = set(kept)
    for step in reversed(steps):
        now = {s for s in (*step.inputs, *step.outputs) if s is not None} - seen
        step.dead = sorted(now)
        seen |= now
