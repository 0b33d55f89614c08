"""nn.LSTM, nn.GRU and nn.RNN as the compiler's own: one op for each layer, in the place of what PyTorch makes of them.

With ``torch._dynamo.config.allow_rnn`` Dynamo leaves a call of ``torch.lstm`` (``gru``, ``rnn_tanh``, ``rnn_relu``) in
its graph. AOTAutograd would make oneDNN's op of it, which has no derivative that it can trace, or one node for each
step. `with_layers` puts ``onnxc::rnn_layer`` there instead, whose rule is a scan over the steps, and whose derivative,
``onnxc::rnn_layer_backward``, is that of the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from onnxc.autodiff.clean import drop_unused, without_hints
from onnxc.autodiff.control import keep_steps
from onnxc.autodiff.reverse import gradients
from onnxc.frontends.torch_fx import RULES
from onnxc.frontends.torch_fx_nn import widened
from onnxc.frontends.torch_fx_table import Call, static
from onnxc.ir.graph import Value, cloned
from onnxc.passes.simplify import eliminate_dead
from onnxc.primitives.builder import Builder

# How often the state's size the gates are, and which of ONNX's gates each of PyTorch's is.
_GATES = {"lstm": (4, (0, 3, 1, 2)), "gru": (3, (1, 0, 2)), "rnn_tanh": (1, (0,)), "rnn_relu": (1, (0,))}
_DTYPES = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_CALLS: dict[Any, str] = {getattr(torch, name): name for name in _GATES}


# ---------------------------------------------------------------- the ops


def _eager(kind: str, x: torch.Tensor, states: Sequence[torch.Tensor], params: Sequence[torch.Tensor]) -> list[Any]:
    """PyTorch's own layer: x [steps, batch, features], states [directions, batch, hidden]."""
    two = len(states[0]) == 2
    biased = len(params) == (8 if two else 4)
    given = list(states) if kind == "lstm" else states[0]
    found = getattr(torch, kind)(x, given, list(params), biased, 1, 0.0, False, two, False)
    return list(found)


@torch.library.custom_op("onnxc::rnn_layer", mutates_args=())  # type: ignore[untyped-decorator]
def rnn_layer(
    kind: str, x: torch.Tensor, states: Sequence[torch.Tensor], params: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """One layer: the outputs [steps, batch, directions * hidden], then the last states."""
    return [y.clone() for y in _eager(kind, x, states, params)]


@rnn_layer.register_fake  # type: ignore[untyped-decorator]
def _(kind: str, x: torch.Tensor, states: Sequence[torch.Tensor], params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    directions, batch, hidden = states[0].shape
    return [x.new_empty((x.shape[0], batch, directions * hidden)), *(s.new_empty(s.shape) for s in states)]


@torch.library.custom_op("onnxc::rnn_layer_backward", mutates_args=())  # type: ignore[untyped-decorator]
def rnn_layer_backward(
    kind: str,
    cotangents: Sequence[torch.Tensor],
    x: torch.Tensor,
    states: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """The cotangents of x, the states and the parameters, for those of the layer's results."""
    given = [t.detach().requires_grad_() for t in (x, *states, *params)]
    n = 1 + len(states)
    with torch.enable_grad():
        found = _eager(kind, given[0], given[1:n], given[n:])
    made = torch.autograd.grad(found, given, list(cotangents), allow_unused=True)
    return [torch.zeros_like(t) if g is None else g.clone() for g, t in zip(made, given, strict=True)]


@rnn_layer_backward.register_fake  # type: ignore[untyped-decorator]
def _(
    kind: str,
    cotangents: Sequence[torch.Tensor],
    x: torch.Tensor,
    states: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    return [t.new_empty(t.shape) for t in (x, *states, *params)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    kind, x, states, params = inputs
    ctx.kind, ctx.counts = kind, (len(states), len(params))
    ctx.save_for_backward(x, *states, *params)


def _backward(ctx: Any, cotangents: list[torch.Tensor]) -> tuple[Any, ...]:
    x, *rest = ctx.saved_tensors
    n, _ = ctx.counts
    dx, *found = rnn_layer_backward(ctx.kind, cotangents, x, rest[:n], rest[n:])
    return None, dx, found[:n], found[n:]


rnn_layer.register_autograd(_backward, setup_context=_setup)


# ---------------------------------------------------------------- in Dynamo's graph


def with_layers(module: fx.GraphModule) -> fx.GraphModule:
    """The graph, changed in place, with layers of ours for calls of PyTorch's recurrent functions."""
    for node in module.graph.nodes:
        kind = _CALLS.get(node.target) if node.op == "call_function" else None
        if kind is not None and _is_plain(node):
            node.target = _LAYERED[kind]
    module.recompile()
    return module


def _is_plain(node: fx.Node) -> bool:
    """Whether a call has no packed sequences, no projections of the state, and floats of one dtype throughout."""
    args = node.args
    if len(args) != 9 or node.kwargs or isinstance(args[3], (list, tuple, fx.Node)):
        return False
    hx, params, biased, layers, two = args[1], args[2], args[3], args[4], args[7]
    if not isinstance(params, (list, tuple)) or not isinstance(layers, int):
        return False
    tensors = [args[0], *(hx if isinstance(hx, (list, tuple)) else [hx]), *params]
    values = [t.meta.get("example_value") if isinstance(t, fx.Node) else None for t in tensors]
    if not all(isinstance(v, torch.Tensor) and v.device.type == "cpu" for v in values):
        return False
    dtypes = {v.dtype for v in values if v is not None}
    return len(dtypes) == 1 and dtypes <= _DTYPES and len(params) == layers * (2 if two else 1) * (4 if biased else 2)


def _layered(kind: str) -> Callable[..., Any]:
    def recurrent(
        x: torch.Tensor, hx: Any, params: Sequence[torch.Tensor], biased: bool, layers: int, dropout: float,
        train: bool, two: bool, batch_first: bool,
    ) -> Any:  # fmt: skip
        states = list(hx) if kind == "lstm" else [hx]
        single = x.dim() == 2
        if single:
            x = x.unsqueeze(0 if batch_first else 1)
            states = [s.unsqueeze(1) for s in states]
        x = x.transpose(0, 1) if batch_first else x
        directions = 2 if two else 1
        each = directions * (4 if biased else 2)
        finals: list[list[torch.Tensor]] = []
        for k in range(layers):
            own = [s[k * directions : (k + 1) * directions] for s in states]
            x, *final = rnn_layer(kind, x, own, params[k * each : (k + 1) * each])
            finals.append(final)
            if dropout and train and k < layers - 1:
                x = torch.dropout(x, dropout, train)
        x = x.transpose(0, 1) if batch_first else x
        last = [torch.cat([f[i] for f in finals]) for i in range(len(states))]
        if single:
            x, last = x.squeeze(0 if batch_first else 1), [s.squeeze(1) for s in last]
        return (x, *last)

    return recurrent


_LAYERED = {kind: _layered(kind) for kind in _GATES}


# ---------------------------------------------------------------- rules


def _layer(c: Call, kind: str, x: Value, states: Sequence[Value], params: Sequence[Value]) -> list[Value]:
    """The layer as ONNX defines it, whose gates stand in another order; of halves in float32."""
    x, *rest = widened(c.b, x, *states, *params)
    states, params = rest[: len(states)], rest[len(states) :]
    b, directions = c.b, static(states[0].shape[0], "the number of directions")
    count, order = _GATES[kind]
    hidden = states[0].shape[2]
    each = len(params) // directions

    def ordered(v: Value) -> Value:
        gates = b.split(v, 0, [hidden] * count) if count > 1 else [v]
        return b.concat([gates[k] for k in order], 0) if count > 1 else v

    def of_all(at: Sequence[int]) -> Value:
        """The parameters at these places of each direction: [directions, ...]."""
        rows = [b.concat([ordered(params[d * each + k]) for k in at], 0) for d in range(directions)]
        return b.concat([b.reshape(r, (1, *r.shape)) for r in rows], 0)

    bias = of_all([2, 3]) if each == 4 else None
    options: dict[str, Any] = {"direction": "bidirectional" if directions == 2 else "forward"}
    if kind == "gru":
        options["linear_before_reset"] = 1
    if kind == "rnn_relu":
        options["activations"] = ["Relu"] * directions
    name = kind.partition("_")[0].upper()
    y, *finals = c.onnx(
        name, x, of_all([0]), of_all([1]), bias, None, *states, outputs=1 + len(states), hidden_size=hidden, **options
    )
    steps, batch = x.shape[:2]
    return [b.reshape(b.transpose(y, (0, 2, 1, 3)), (steps, batch, directions * hidden)), *finals]


def _layer_backward(
    c: Call, kind: str, cotangents: Sequence[Value], x: Value, states: Sequence[Value], params: Sequence[Value]
) -> list[Value]:
    """The derivative of the rule above: scans that run backwards."""
    inner = Builder(differentiable=True)
    inner.origin = c.b.origin
    outside = widened(c.b, *cotangents, x, *states, *params)
    inputs = [inner.input(v.t) for v in outside]
    seeds, wrt = inputs[: len(cotangents)], inputs[len(cotangents) :]
    n = 1 + len(states)
    found = _layer(Call(inner, ()), kind, wrt[0], wrt[1:n], wrt[n:])
    inner.nodes = keep_steps(inner.graph(found), wrt).nodes
    made = gradients(inner, list(inner.nodes), {y.id: s for y, s in zip(found, seeds, strict=True)}, wrt)
    ends = [inner.full(v.shape, 0, v.dtype) if g is None else g for g, v in zip(made, wrt, strict=True)]
    graph = drop_unused(without_hints(eliminate_dead(inner.graph(ends))))
    at = {v.id: o for v, o in zip(graph.inputs, outside, strict=True)}
    c.b.nodes += cloned(graph.nodes, at)
    return [at[v.id] for v in graph.outputs]


RULES[torch.ops.onnxc.rnn_layer.default] = _layer
RULES[torch.ops.onnxc.rnn_layer_backward.default] = _layer_backward
