"""Random numbers: PyTorch's generator draws them before the program, which takes them as inputs.

What is drawn depends on sizes alone, and so is there before anything is computed, in the order of the graph: the
numbers are those of eager PyTorch, and what reads them is one program with all else. Dropout is such a mask, and a
product.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._prims.rng_prims import run_and_save_rng_state

_ATEN = torch.ops.aten
# Of their first tensor these read nothing but its type and its order in memory.
_SHAPED = (
    "bernoulli.p", "uniform", "exponential", "cauchy", "geometric", "log_normal", "random", "random.from", "random.to",
    "normal_functional", "rand_like", "randn_like", "randint_like", "randint_like.low_dtype",
)  # fmt: skip


def _overloads(names: Sequence[str]) -> set[Any]:
    parts = [name.partition(".") for name in names]
    found = [getattr(getattr(_ATEN, packet, None), overload or "default", None) for packet, _, overload in parts]
    return {overload for overload in found if overload is not None}


_LIKE = _overloads(_SHAPED)


def drawn(
    draw: Callable[..., torch.Tensor],
    size: Sequence[Sequence[int]],
    stride: Sequence[Sequence[int]],
    dtype: torch.dtype,
    args: Sequence[Any],
    options: Mapping[str, Any],
) -> torch.Tensor:
    """What an op draws for a tensor of this size and these strides, each given by its factors."""
    shape, steps = ([math.prod(factors) for factors in given] for given in (size, stride))
    return draw(torch.empty_strided(shape, steps, dtype=dtype), *args, **options)


def is_draw(node: fx.Node) -> bool:
    """Whether a node gives random numbers that depend on no data, and can be drawn before all else."""
    if node.target is drawn or (node.target in _LIKE and _is_argument(node.args[0])):
        return True
    return is_seeded(node) and not any(isinstance(n.meta.get("val"), torch.Tensor) for n in node.all_input_nodes)


def _is_argument(x: Any) -> bool:
    return isinstance(x, fx.Node) and x.op == "placeholder"


def is_seeded(node: fx.Node) -> bool:
    """Whether a node takes random numbers from PyTorch's generator."""
    if node.target in (drawn, run_and_save_rng_state):  # the latter draws in checkpoints
        return True
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def set_draws_apart(module: fx.GraphModule) -> None:
    """Rewrites draws for a computed tensor as draws for its size, and dropout as a mask and a product, in place.

    Left as they are: those of sizes that are no products of the graph's arguments.
    """
    for node in list(module.graph.nodes):
        if node.target is _ATEN.native_dropout.default:
            _dropped(module.graph, node)
        elif node.target in _LIKE and isinstance(node.args[0], fx.Node) and node.args[0].op == "call_function":
            found = _drawn(module.graph, node, node.args[0].meta["val"], node.target, node.args[1:], node.kwargs)
            if found is not None:
                found.meta["val"] = node.meta["val"]
                node.replace_all_uses_with(found)
                module.graph.erase_node(node)


def _dropped(graph: fx.Graph, node: fx.Node) -> None:
    """Dropout as PyTorch computes it: x * mask * scale."""
    x, p, train = node.args
    y, kept = node.meta["val"]
    if train is False or y.is_complex() or any(isinstance(d, int) and d == 0 for d in y.shape):  # none is drawn
        return
    share = 1.0 - p
    mask = _drawn(graph, node, kept, _ATEN.bernoulli_.float, (share,), {})  # which keeps the order in memory
    if mask is None:
        return
    with graph.inserting_before(node):
        product = _node(graph, node, y, _ATEN.mul.Tensor, x, mask)
        result = _node(graph, node, y, _ATEN.mul.Tensor, product, 1 / share if share else 0.0)
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with((result, mask)[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)


def _drawn(
    graph: fx.Graph, node: fx.Node, like: torch.Tensor, draw: Any, args: Sequence[Any], options: Mapping[str, Any]
) -> fx.Node | None:
    """A draw for a tensor like this one; None where its sizes cannot be told before all else."""
    if like.device.type != "cpu" or like.layout is not torch.strided:
        return None
    arguments = {
        n.meta["val"].node.expr: n
        for n in graph.nodes
        if n.op == "placeholder" and isinstance(n.meta.get("val"), torch.SymInt)
    }
    told = [_factors(n, arguments) for n in (*like.shape, *like.stride())]
    if None in told:
        return None
    rank = like.dim()
    with graph.inserting_before(node):
        return _node(graph, node, like, drawn, draw, told[:rank], told[rank:], like.dtype, args, options)


def _factors(n: Any, arguments: Mapping[sympy.Expr, fx.Node]) -> tuple[Any, ...] | None:
    """A size or a stride as a product of numbers and of the graph's arguments; None where it is none."""
    if isinstance(n, int):
        return (n,)
    found: list[Any] = []
    for factor in sympy.Mul.make_args(n.node.expr):
        base, power = factor.as_base_exp()
        if factor.is_Integer:
            found.append(int(factor))
        elif base in arguments and power.is_Integer and power > 0:
            found += [arguments[base]] * int(power)
        else:
            return None
    return tuple(found)


def _node(graph: fx.Graph, like: fx.Node, value: torch.Tensor, target: Callable[..., Any], *args: Any) -> fx.Node:
    """A new node of the origin of another."""
    made = graph.call_function(target, args)
    made.meta = {**like.meta, "val": value}
    return made
