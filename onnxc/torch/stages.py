"""Which nodes of an FX graph are one program, and which PyTorch computes between programs.

Every node has a time, as early as what it reads allows: what is imported runs in the program of that time, what is not
runs after it. So a graph with one node that is missing becomes two programs, however the nodes stand; and one program,
where that node reads only arguments, or draws random numbers: it runs before.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx

from onnxc.frontends.torch_fx import is_size
from onnxc.torch.draws import is_seeded
from onnxc.torch.views import is_returned_view


@dataclass
class Stage:
    """Nodes that are compiled together, then nodes that PyTorch computes one by one."""

    compiled: list[fx.Node] = field(default_factory=list)
    eager: list[fx.Node] = field(default_factory=list)


def stages(graph: fx.Graph, missing: Container[fx.Node]) -> list[Stage]:
    """The stages of a graph in order. Nodes that draw random numbers keep their order, and so do those that act."""
    times: dict[fx.Node, int] = {}
    eager: set[fx.Node] = set()
    found: list[Stage] = []
    told = set().union(*(_symbols(n) for n in graph.nodes if n.op == "placeholder"))
    drew, acted = 0, 1  # what acts on an argument is not to run before a program that reads what it was
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            times[node] = 0
            continue
        if node in missing or is_size(node) or node.op != "call_function" or is_returned_view(node):
            eager.add(node)
            time = max([times[n] for n in node.all_input_nodes], default=0)
            if is_seeded(node):
                time = drew = max(time, drew)
            elif node.is_impure():
                readers = (u for n in node.all_input_nodes for u in n.users)
                time = acted = max(time, acted, *(times.get(u, 0) for u in readers))
        else:
            read = [n for n in node.all_input_nodes if not is_size(n) or _symbols(n) - told]
            time = max([1, *(times[n] + (n in eager) for n in read)])
        times[node] = time
        while len(found) <= time:
            found.append(Stage())
        (found[time].eager if node in eager else found[time].compiled).append(node)
    return found


def _symbols(node: fx.Node) -> set[sympy.Symbol]:
    """What a number's value, or a tensor's sizes, depend on."""
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return {s for d in sizes if isinstance(d, torch.SymInt | torch.SymFloat) for s in d.node.expr.free_symbols}


def must_run(node: fx.Node) -> bool:
    """Whether a node must run even where nothing reads what it gives: it draws random numbers, or changes something."""
    return is_seeded(node) or node.is_impure()
