"""Branches and loops that a tensor decides about: PyTorch looks at it, and what is in them are programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

_HIGHER = torch.ops.higher_order
Region = Callable[..., Any]


def _branch(chosen: Any, then: Region, otherwise: Region, operands: tuple[Any, ...] = ()) -> Any:
    return (then if chosen else otherwise)(*operands)


def _loop(goes_on: Region, body: Region, carried: tuple[Any, ...], others: tuple[Any, ...]) -> Any:
    if not goes_on(*carried, *others):
        return tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in carried)
    while True:
        carried = body(*carried, *others)
        if not goes_on(*carried, *others):
            return carried


# What decides, as it is called when the regions are programs.
DECIDED: dict[Any, Callable[..., Any]] = {_HIGHER.cond: _branch, _HIGHER.while_loop: _loop}


def regions(node: fx.Node) -> Iterator[tuple[fx.Node, fx.GraphModule]]:
    """The graphs that an op is given, each with the node that names it."""
    for source in node.all_input_nodes:
        found = getattr(node.graph.owning_module, str(source.target), None) if source.op == "get_attr" else None
        if isinstance(found, fx.GraphModule):
            yield source, found


def as_region(module: fx.GraphModule, compiled: Callable[[fx.GraphModule], Callable[[list[Any]], list[Any]]]) -> Region:
    """A region as something to call: its results are a tuple, or one that is none.

    Args:
        module: the region's graph.
        compiled: makes a program of a graph whose results are a list.
    """
    graph = fx.Graph()  # a copy: another op may be given the same region
    results = graph.graph_copy(module.graph, {})
    alone = isinstance(results, fx.Node)
    graph.output([results] if alone else results)
    program = compiled(fx.GraphModule(module, graph))

    def call(*args: Any) -> Any:
        found = program(list(args))
        return found[0] if alone else tuple(found)

    return call
