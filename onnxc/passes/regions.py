"""Passes over nodes with regions."""

from __future__ import annotations

from dataclasses import replace

from onnxc.ir.graph import Graph, Node
from onnxc.primitives.builder import constant_of


def sink_constants(graph: Graph) -> Graph:
    """Makes constant operands of a scan anew inside its region, where a template can see that they are constant."""
    nodes = [_sunk(n) if n.op == "scan" else n for n in graph.nodes]
    return replace(graph, nodes=nodes)


def _sunk(node: Node) -> Node:
    (region,) = node.regions
    fixed = node.attrs["states"] + node.attrs["scanned"]
    operands, inputs = list(node.operands[:fixed]), list(region.inputs[:fixed])
    made: list[Node] = []
    for outside, inside in zip(node.operands[fixed:], region.inputs[fixed:], strict=True):
        constant = constant_of(outside)
        if constant is None:
            operands.append(outside)
            inputs.append(inside)
        else:
            origin = outside.node.origin if outside.node is not None else ()
            made.append(Node("constant", (), [inside], {"value": constant}, (), origin))
    if not made:
        return node
    inner = replace(region, inputs=inputs, nodes=[*made, *region.nodes])
    return Node("scan", operands, node.outputs, node.attrs, [inner], node.origin)
