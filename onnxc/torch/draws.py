"""Random numbers: PyTorch's generator draws them before the program, which takes them as inputs.

What is drawn depends on sizes alone, and so is there before anything is computed, in the order of the graph: the
numbers are those of eager PyTorch, and what reads them is one program with all else. Dropout is such a mask, and a
product.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import sympy
import torch
from torch import fx
from torch._functorch import compile_utils
from torch._guards import detect_fake_mode
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.fx.node import map_arg

from onnxc.torch.regions import regions

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


# A size: a number, or a function of PyTorch's (by its name) of others. In the graph its arguments stand for numbers.
Formula = Any
_FUNCTIONS: dict[str, Callable[..., int]] = {
    "Add": lambda *x: sum(x), "Mul": lambda *x: math.prod(x), "Pow": pow, "PowByNatural": pow, "Max": max, "Min": min,
    "FloorDiv": operator.floordiv, "CleanDiv": operator.floordiv, "CeilDiv": lambda x, y: -(-x // y),
    "Mod": operator.mod, "PythonMod": operator.mod, "ModularIndexing": lambda x, by, modulus: x // by % modulus,
}  # fmt: skip


def drawn(
    draw: Callable[..., torch.Tensor],
    size: Sequence[Formula],
    stride: Sequence[Formula],
    dtype: torch.dtype,
    args: Sequence[Any],
    options: Mapping[str, Any],
    state: torch.Tensor | None = None,
) -> torch.Tensor:
    """What an op draws for a tensor of this size and these strides; in the state that the generator was in, where one
    is given.
    """
    shape, steps = ([_value(formula) for formula in given] for given in (size, stride))
    like = torch.empty_strided(shape, steps, dtype=dtype)
    return draw(like, *args, **options) if state is None else run_with_rng_state(state, draw, like, *args, **options)


def _value(formula: Formula) -> int:
    if isinstance(formula, int):
        return formula
    name, *args = formula
    return _FUNCTIONS[name](*map(_value, args))


def is_draw(node: fx.Node) -> bool:
    """Whether a node gives random numbers that depend on no data, and can be drawn before all else."""
    if node.target in (drawn, torch.get_rng_state):
        return True
    if node.target is run_with_rng_state:
        return not any(isinstance(n.meta.get("val"), torch.Tensor) for n in node.all_input_nodes[1:])
    if node.target in _LIKE and _is_argument(node.args[0]):
        return True
    return is_seeded(node) and not any(isinstance(n.meta.get("val"), torch.Tensor) for n in node.all_input_nodes)


def _is_argument(x: Any) -> bool:
    return isinstance(x, fx.Node) and x.op == "placeholder"


def is_seeded(node: fx.Node) -> bool:
    """Whether a node takes random numbers from PyTorch's generator, or looks at it."""
    if node.target in (drawn, torch.get_rng_state, run_and_save_rng_state):
        return True
    if any(is_seeded(inner) for _, region in regions(node) for inner in region.graph.nodes):
        return True
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


@contextmanager
def kept_apart(graph: fx.Graph) -> Iterator[None]:
    """Within, PyTorch's search for equal nodes knows all draws of a graph for draws: of two that it does not list
    (`randn_like`, `exponential`, `uniform`, `normal`) for the same tensor it would keep one.
    """
    listed = compile_utils.rand_ops
    found = {compile_utils.get_aten_target(n) for n in graph.nodes if n.op == "call_function" and is_seeded(n)}
    added = [op for op in found if op not in listed]
    listed += added
    try:
        yield
    finally:
        listed[:] = [op for op in listed if op not in added]


def set_draws_apart(module: fx.GraphModule) -> None:
    """Rewrites draws for a computed tensor as draws for its size, and dropout as a mask and a product, in place. In
    checkpoints the way forward keeps the generator's state, and the way back draws in that state.

    Left as they are: those of sizes that the graph's arguments do not tell.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is run_and_save_rng_state:
            node = _without_state(graph, node)
        state, target, args = None, node.target, node.args
        if target is run_with_rng_state:
            state, target, *args = args
            _type(node, target, args)
        if target is _ATEN.native_dropout.default:
            _dropped(graph, node, args, state)
        elif target in _LIKE and isinstance(args[0], fx.Node) and (args[0].op == "call_function" or state is not None):
            found = _drawn(graph, node, args[0].meta["val"], target, args[1:], node.kwargs, state)
            if found is not None:
                found.meta["val"] = node.meta["val"]
                node.replace_all_uses_with(found)
                graph.erase_node(node)


def _without_state(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A draw, before which the generator's state is looked at: two nodes in place of one."""
    op, *args = node.args
    with graph.inserting_before(node):
        state = _node(graph, node, torch.empty(0), torch.get_rng_state)
        draw = _node(graph, node, torch.empty(0), op, *args)
    draw.kwargs = node.kwargs
    _type(state, lambda: torch.empty(torch.get_rng_state().shape, dtype=torch.uint8), ())
    _type(draw, op, args)
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with((state, draw)[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
    return draw


def _type(node: fx.Node, op: Any, args: Sequence[Any]) -> None:
    """Notes what an op gives, which PyTorch's partitioner does not, in a node that calls it."""
    vals = [n.meta["val"] for n in node.graph.nodes if n.op == "placeholder"]
    mode = detect_fake_mode(vals) or nullcontext()
    with mode:
        node.meta["val"] = op(*map_arg(args, lambda n: n.meta["val"]), **map_arg(node.kwargs, lambda n: n.meta["val"]))


def _dropped(graph: fx.Graph, node: fx.Node, args: Sequence[Any], state: fx.Node | None) -> None:
    """Dropout as PyTorch computes it: x * mask * scale."""
    x, p, train = args
    y, kept = node.meta["val"]
    if train is False or y.is_complex() or any(isinstance(d, int) and d == 0 for d in y.shape):  # none is drawn
        return
    share = 1.0 - p
    mask = _drawn(graph, node, kept, _ATEN.bernoulli_.float, (share,), {}, state)  # which keeps the order in memory
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
    graph: fx.Graph,
    node: fx.Node,
    like: torch.Tensor,
    draw: Any,
    args: Sequence[Any],
    options: Mapping[str, Any],
    state: fx.Node | None,
) -> fx.Node | None:
    """A draw for a tensor like this one; None where its sizes cannot be told before all else."""
    if like.device.type != "cpu" or like.layout is not torch.strided:
        return None
    arguments = {
        n.meta["val"].node.expr: n
        for n in graph.nodes
        if n.op == "placeholder" and isinstance(n.meta.get("val"), torch.SymInt)
    }
    try:
        told = [
            _formula(n.node.expr if isinstance(n, torch.SymInt) else n, arguments)
            for n in (*like.shape, *like.stride())
        ]
    except KeyError:
        return None
    rank = like.dim()
    with graph.inserting_before(node):
        return _node(graph, node, like, drawn, draw, told[:rank], told[rank:], like.dtype, args, options, state)


def _formula(size: Any, arguments: Mapping[sympy.Expr, fx.Node]) -> Formula:
    """A size, or a stride. KeyError where the graph's arguments do not tell it."""
    if isinstance(size, int) or size.is_Integer:
        return int(size)
    if size.is_Symbol:
        return arguments[size]
    name = type(size).__name__
    if name not in _FUNCTIONS or (size.is_Pow and not size.exp.is_positive):  # which would be no whole number
        raise KeyError(name)
    return (name, *(_formula(x, arguments) for x in size.args))


def _node(graph: fx.Graph, like: fx.Node, value: torch.Tensor, target: Callable[..., Any], *args: Any) -> fx.Node:
    """A new node of the origin of another."""
    made = graph.call_function(target, args)
    made.meta = {**like.meta, "val": value}
    return made
