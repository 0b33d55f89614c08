"""Which sizes a graph works with."""

from __future__ import annotations

from onnxc.ir.expr import Expr, Symbol, symbols
from onnxc.ir.graph import Graph, Node, Value
from onnxc.ir.types import TensorType


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
