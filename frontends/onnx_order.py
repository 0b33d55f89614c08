"""Topological order of imported nodes; a model with a cycle is an error that names it."""

from __future__ import annotations

import networkx as nx

from onnxc.errors import ModelError
from onnxc.ir.graph import Node, topological


def ordered(nodes: list[Node]) -> list[Node]:
    """The nodes in topological order: as they stand, where that is one."""
    seen: set[int] = set()
    made_here = {v.id for n in nodes for v in n.outputs}
    for node in nodes:
        if any(v.id in made_here and v.id not in seen for v in node.operands):
            break
        seen.update(v.id for v in node.outputs)
    else:
        return nodes
    try:
        return topological(nodes)
    except ValueError as error:
        raise ModelError(f"the graph has a cycle: {_cycle(nodes)}", cause=error) from error


def _cycle(nodes: list[Node]) -> str:
    position = {id(n): i for i, n in enumerate(nodes)}
    g: nx.DiGraph = nx.DiGraph()
    for i, n in enumerate(nodes):
        g.add_edges_from((position[id(v.node)], i) for v in n.operands if v.node is not None and id(v.node) in position)
    sources = [nodes[a].origin for a, _ in nx.find_cycle(g)]
    names = [f"{o[0]} {o[0].name!r}" if o else "Identity" for o in sources]
    return " -> ".join([*names[:8], *(["..."] if len(names) > 8 else []), names[0]])
