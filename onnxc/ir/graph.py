"""The graph: a DAG of immutable nodes over typed values. One class serves every stage.

A node's `op` is either a primitive (`add`, `matmul`; see `onnxc.primitives`) or an ONNX operator as imported
(`onnx.Gelu`, `com.microsoft.FusedMatMul`), whose values may have no type yet. Passes build new graphs; nodes that a
pass leaves alone are shared between the old graph and the new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from types import MappingProxyType
from typing import Any

import networkx as nx
import numpy as np

from onnxc.errors import ShapeError
from onnxc.ir.expr import Dim
from onnxc.ir.types import TensorType, Type

Attrs = Mapping[str, Any]
DECLARED = "declared types"  # an attribute of imported nodes: what the model says of each output; no attribute's name
_ids = count()


@dataclass(frozen=True, slots=True)
class Source:
    """One node of the user's model: its position in the file, op type, name, and the source line the exporter left."""

    number: int
    op_type: str
    name: str = ""
    line: str = ""

    def __str__(self) -> str:
        return f"n{self.number} {self.op_type}"


Origin = tuple[Source, ...]
Pair = tuple[Dim, Dim]
Place = tuple[Origin, str]  # the nodes of the user's model that want something, and the primitive


UPDATES = "updates"  # in the metadata of a training step: which input each output replaces, by name
MOST_SOURCES = 1000  # of one node or kernel: a longer list tells nobody more


def merge_origins(origins: Iterable[Origin]) -> Origin:
    """The union, in the order of the user's model; the first of very many."""
    return tuple(sorted({s for o in origins for s in o}, key=lambda s: (s.number, s.op_type))[:MOST_SOURCES])


def describe(origin: Origin, op: str) -> str:
    """The node of the user's model that something comes from, as ``n3 Gather 'embed'``."""
    return " or ".join(f"{s} {s.name!r}" if s.name else str(s) for s in origin[:3]) or op


class Value:
    """One tensor of the graph: a graph input or an output of a node.

    `type` is None in a graph as imported, and where only a run will tell (`onnxc.primitives.host`); values that
    steps on the host work on may be sequences, optionals and maps. `data` is the content where it is known at compile
    time and small: an int64 array, or an object array of ints and symbolic expressions (the sizes a shape computation
    works on).
    """

    __slots__ = ("data", "id", "index", "name", "node", "type")

    def __init__(self, type: Type | None, name: str = "", data: np.ndarray | None = None) -> None:
        self.id = next(_ids)
        self.type = type
        self.name = name
        self.data = data
        self.node: Node | None = None
        self.index = 0

    @property
    def t(self) -> TensorType:
        """The type, where it must be known and a tensor's."""
        if type(self.type) is not TensorType:
            raise ShapeError(
                f"a tensor is expected, not {'a value of unknown type' if self.type is None else self.type}"
            )
        return self.type

    @property
    def shape(self) -> tuple[Any, ...]:
        """Of a tensor's type."""
        return self.t.shape

    @property
    def rank(self) -> int:
        """The number of axes of a tensor."""
        return len(self.t.shape)

    @property
    def dtype(self) -> Any:
        """Of a tensor's type."""
        return self.t.dtype

    def __repr__(self) -> str:
        return f"%{self.id}: {self.type}"


class Node:
    """An operation. Immutable once made; its outputs are made with it."""

    __slots__ = ("attrs", "inputs", "op", "origin", "outputs", "regions")

    def __init__(
        self,
        op: str,
        inputs: Sequence[Value | None],
        outputs: Sequence[Value],
        attrs: Attrs | None = None,
        regions: Sequence[Graph] = (),
        origin: Origin = (),
    ) -> None:
        self.op = op
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.attrs: Attrs = MappingProxyType(dict(attrs or {}))
        self.regions = tuple(regions)
        self.origin = origin
        for i, out in enumerate(self.outputs):
            out.node, out.index = self, i

    @property
    def output(self) -> Value:
        """The only output."""
        (out,) = self.outputs
        return out

    @property
    def operands(self) -> tuple[Value, ...]:
        """The inputs that are present, with those that its regions take from outside."""
        own = tuple(v for v in self.inputs if v is not None)
        return own + tuple(v for g in self.regions for v in g.captures())

    def __repr__(self) -> str:
        return f"{self.op}({', '.join('-' if v is None else f'%{v.id}' for v in self.inputs)})"


@dataclass
class Graph:
    """Inputs, nodes in topological order, outputs. Names of inputs and outputs are the model's own."""

    inputs: list[Value]
    outputs: list[Value]
    nodes: list[Node]
    output_names: list[str]
    name: str = ""
    dim_names: dict[str, str] = field(default_factory=dict)  # symbol -> the model's name of the dim
    metadata: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)  # of inputs that need not be given, by name
    equal: dict[Pair, Place] = field(default_factory=dict)  # sizes that nodes, which may be gone, want to be equal

    @property
    def input_names(self) -> list[str]:
        """The names of the inputs, in order."""
        return [v.name for v in self.inputs]

    def values(self) -> Iterator[Value]:
        """Inputs, then every node's outputs."""
        yield from self.inputs
        for node in self.nodes:
            yield from node.outputs

    def all_nodes(self) -> Iterator[Node]:
        """Its nodes in order, each before those of its regions."""
        for node in self.nodes:
            yield node
            for region in node.regions:
                yield from region.all_nodes()

    def captures(self) -> list[Value]:
        """Values used here but made outside (this graph is a region)."""
        own = {v.id for v in self.values()}
        used = [v for n in self.nodes for v in n.operands] + self.outputs
        return list({v.id: v for v in used if v.id not in own}.values())

    def uses(self) -> dict[int, list[Node]]:
        """Value id to the nodes that read it (a node stands once however often it reads it)."""
        found: dict[int, list[Node]] = {}
        for node in self.nodes:
            for vid in {v.id for v in node.operands}:
                found.setdefault(vid, []).append(node)
        return found

    def networkx(self) -> nx.MultiDiGraph:
        """The DAG of nodes: an edge for each read, keyed by the position of the operand. Data: `node` and `value`."""
        g: nx.MultiDiGraph = nx.MultiDiGraph()
        for i, node in enumerate(self.nodes):
            g.add_node(i, node=node)
        position = {id(node): i for i, node in enumerate(self.nodes)}
        for i, node in enumerate(self.nodes):
            for k, value in enumerate(node.operands):
                if value.node is not None and id(value.node) in position:
                    g.add_edge(position[id(value.node)], i, key=k, value=value)
        return g


def cloned(nodes: Iterable[Node], values: dict[int, Value]) -> list[Node]:
    """Copies of nodes, regions included, that read `values` (by id) where they are there; the copies' outputs are
    added to it.
    """
    made = []
    for node in nodes:
        regions = []
        for region in node.regions:
            inner = dict(values)
            inputs = [Value(v.type, v.name, v.data) for v in region.inputs]
            inner.update({old.id: new for old, new in zip(region.inputs, inputs, strict=True)})
            body = cloned(region.nodes, inner)
            regions.append(
                replace(region, inputs=inputs, nodes=body, outputs=[inner.get(v.id, v) for v in region.outputs])
            )
        outputs = [Value(v.type, v.name, v.data) for v in node.outputs]
        inputs_ = [None if v is None else values.get(v.id, v) for v in node.inputs]
        made.append(Node(node.op, inputs_, outputs, node.attrs, regions, node.origin))
        values.update({old.id: new for old, new in zip(node.outputs, outputs, strict=True)})
    return made


def copied(graph: Graph) -> Graph:
    """The same graph, made of values and nodes of its own: passes may take the copy apart."""
    inputs = [Value(v.type, v.name, v.data) for v in graph.inputs]
    values = {old.id: new for old, new in zip(graph.inputs, inputs, strict=True)}
    nodes = cloned(graph.nodes, values)
    return replace(graph, inputs=inputs, nodes=nodes, outputs=[values[v.id] for v in graph.outputs])


def topological(nodes: Iterable[Node]) -> list[Node]:
    """The nodes in an order in which each comes after those it reads from; the given order where that is free.

    Raises ValueError on a cycle.
    """
    nodes = list(nodes)
    position = {id(n): i for i, n in enumerate(nodes)}
    g: nx.DiGraph = nx.DiGraph()
    g.add_nodes_from(range(len(nodes)))
    for i, n in enumerate(nodes):
        for v in n.operands:
            if v.node is not None and id(v.node) in position:
                g.add_edge(position[id(v.node)], i)
    try:
        order = list(nx.lexicographical_topological_sort(g))
    except nx.NetworkXUnfeasible as error:
        raise ValueError("the graph has a cycle") from error
    return [nodes[i] for i in order]
