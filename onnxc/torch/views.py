"""Results that lie in the memory of an argument, or of another result: PyTorch makes these views, and nothing is
computed.

Who writes to such a result writes to the other tensor too. And AOTAutograd takes strides and offset of what a graph
returns, to make the view of the caller's own tensor once more: so these must be those of a view.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

_MARK = "onnxc_view"


def is_returned_view(node: fx.Node) -> bool:
    """Whether PyTorch is to make this node, a view that the graph returns."""
    return _MARK in node.meta


def set_views_apart(module: fx.GraphModule) -> None:
    """Gives each result that shares memory a chain of views of its own, marked for PyTorch, in place.

    These are views of an argument, of another result, and those that are all of one tensor. What else reads the views
    that were there still has them.
    """
    graph = module.graph
    (end,) = (n for n in graph.nodes if n.op == "output")
    chains = {o: _chain(o) for o in end.all_input_nodes}
    shared = [o for o, chain in chains.items() if _is_shared(chain, chains)]
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(end):
        for o in shared:
            for n in reversed(chains[o][:-1]):
                if n not in copies:
                    copies[n] = graph.node_copy(n, lambda x: copies.get(x, x))
                    copies[n].meta[_MARK] = True
    end.args = fx.node.map_arg(end.args, lambda x: copies.get(x, x))
    for n in [n for o in shared for n in chains[o][:-1]]:
        if not n.users and n in graph.nodes:
            graph.erase_node(n)


def _chain(node: fx.Node) -> list[fx.Node]:
    """A node, what it is a view of, and so on, to the tensor that is no view."""
    found = [node]
    while _is_view(found[-1]):
        found.append(found[-1].all_input_nodes[0])
    return found


def _is_view(node: fx.Node) -> bool:
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and _is_view(source)
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target.is_view)


def _is_shared(chain: Sequence[fx.Node], chains: dict[fx.Node, list[fx.Node]]) -> bool:
    node, root = chain[0], chain[-1]
    if root is node:
        return False
    if root.op == "placeholder":
        return True
    if any("as_strided" in str(n.target) for n in chain):
        return False  # it speaks of addresses in memory, which must be PyTorch's from the start
    if any(n in chains for n in chain[1:]):
        return True
    others = [c for o, c in chains.items() if o is not node and c[-1] is root]
    return _is_whole(node, root) and any(_is_whole(c[0], root) for c in others)


def _is_whole(node: fx.Node, root: fx.Node) -> bool:
    """Whether a view has as many elements as what it is a view of."""
    a, b = node.meta.get("val"), root.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return _elements(a) == _elements(b)


def _elements(tensor: torch.Tensor) -> object:
    n = tensor.numel()
    return n.node.expr if isinstance(n, torch.SymInt) else n
