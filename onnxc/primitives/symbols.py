"""Which sizes a graph works with."""

from __future__ import annotations

from onnxc.ir.expr import Expr, Symbol, of, symbols
from onnxc.ir.graph import Graph, Node, Value
from onnxc.ir.types import TensorType
from onnxc.primitives.host import is_host


def symbols_of(graph: Graph) -> set[Symbol]:
    """Every symbol that stands in a graph: in types, sizes and attributes, of regions too."""
    found = {s for v in graph.inputs for s in symbols_of_value(v)}
    for node in graph.nodes:
        found |= symbols_of_node(node)
    return found


def symbols_of_node(node: Node) -> set[Symbol]:
    """The symbols in a node's output types, attributes and regions, and those that end their ranges."""
    found = {s for v in node.outputs for s in symbols_of_value(v)}
    for value in node.attrs.values():
        for entry in value if isinstance(value, tuple) else (value,):
            if isinstance(entry, Expr):
                found |= entry.symbols()
    for region in node.regions:
        found |= symbols_of(region)
    return found | {other for s in found if s.hi is not None for other in symbols(s.hi)}


def symbols_of_value(value: Value) -> set[Symbol]:
    """The symbols in a tensor's shape."""
    return {s for d in value.shape for s in symbols(d)} if isinstance(value.type, TensorType) else set()


def told_sizes(graph: Graph) -> dict[int, dict[Symbol, Value]]:
    """By the first output of each step of the host: the sizes that nothing before it tells, and the output of which
    each is a dim, or the first one of a `read`.
    """
    if not any(map(is_host, graph.nodes)):
        return {}
    known = {s for v in graph.inputs for s in symbols_of_value(v)}
    found: dict[int, dict[Symbol, Value]] = {}
    for node in filter(is_host, graph.nodes):
        known |= {s for v in node.operands for s in symbols_of_value(v)}
        read = {s for d in node.attrs["symbols"] for s in symbols(d)} if node.op == "read" else set()
        told = dict.fromkeys(read, node.outputs[0])
        for v in node.outputs:
            told |= {s: v for s in symbols_of_value(v) - told.keys() if of(s) in v.shape}
        found[node.outputs[0].id] = {s: v for s, v in told.items() if s not in known}
        known |= told.keys()
    return found
