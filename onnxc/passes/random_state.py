"""What random numbers are drawn from becomes an input of the graph, the last, which the runtime fills in."""

from __future__ import annotations

from dataclasses import replace

from onnxc.ir.graph import Graph, Value
from onnxc.passes.simplify import Rewriter

METADATA = "random_state"  # the name of that input
_NAME = "random_state"


def lift_random_state(graph: Graph) -> Graph:
    """The graph with its `random_state`, where it has one, as its last input; the metadata has its name.

    Before: primitives. A graph that has been through this pass stays as it is.
    """
    nodes = [n for n in graph.nodes if n.op == "random_state"]
    if not nodes:
        return graph
    name = _NAME
    while name in graph.input_names or name in graph.output_names:
        name += "_"
    given = Value(nodes[0].output.type, name)
    r = Rewriter(replace(graph, inputs=[*graph.inputs, given], metadata={**graph.metadata, METADATA: name}))
    for node in graph.nodes:
        if node.op == "random_state":
            r.replace(node.output, given)
        else:
            r.keep(node)
    return r.result()


def state_input(graph: Graph) -> Value | None:
    """The input that the runtime fills in."""
    name = graph.metadata.get(METADATA)
    return next((v for v in graph.inputs if v.name == name), None) if name is not None else None
