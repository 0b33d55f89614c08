"""Gradients of ONNX models, as ONNX models."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from onnxc.autodiff.clean import drop_unused, with_factors_outside, without_hints, without_turned_products
from onnxc.autodiff.control import keep_steps
from onnxc.autodiff.elementwise import zeros_like
from onnxc.autodiff.reverse import gradients
from onnxc.errors import InputError, UnsupportedError
from onnxc.export.graphs import WEIGHTS
from onnxc.export.model import to_onnx, write_onnx
from onnxc.frontends import onnx_file
from onnxc.frontends.onnx_file import InputShapes, Model
from onnxc.ir.graph import Graph, Node, Value
from onnxc.ir.types import TensorType, same_shape
from onnxc.passes.decompose import Rule, decompose
from onnxc.passes.random_state import lift_random_state
from onnxc.passes.simplify import eliminate_dead, share_common
from onnxc.primitives.builder import Builder, constant_of
from onnxc.runtime.binding import name_list


def backward(
    model: Model,
    loss: str | Sequence[str] | None = None,
    wrt: Sequence[str] | None = None,
    *,
    cotangents: bool = False,
    stop_gradient: Sequence[str] = (),
    outputs: bool = True,
    input_shapes: InputShapes | None = None,
    base_dir: str | os.PathLike[str] | None = None,
    path: str | os.PathLike[str] | None = None,
) -> onnx.ModelProto | None:
    """The gradient of a model, as an ONNX model that any runtime runs.

    Its inputs are the model's; its outputs are those of the model, then one for each name in `wrt`, `<name>_grad`, in
    the shape of what it is the gradient of. It consists of ordinary operators, so it can be differentiated again.

    Args:
        model: a path, the bytes of a file, or a ModelProto.
        loss: what is differentiated: the name of a value, or of several, which add up. By default the only output.
        wrt: by what: names of inputs, of weights (initializers) or of values between. By default all weights of a
            float dtype that the loss depends on: where PyTorch's exporter noted which are parameters of the module,
            these; else all but scalars, as exporters write the numbers of a formula.
        cotangents: the gradient is that of sum(loss * cotangent), with a further input `<name>_cotangent` for each
            loss, in its shape (a vector-Jacobian product). Without it every loss must be a scalar.
        stop_gradient: names of values that count as constants.
        outputs: whether the model's own outputs stay.
        input_shapes, base_dir: as in :func:`onnxc.compile`.
        path: writes the model to this file, its weights to a second one beside it, and returns None: for models
            over 2 GB.

    Raises:
        InputError: a name that the model does not have, a loss that is no scalar or no float. UnsupportedError: an
        operator on the way that has no derivative here. ModelError: the model is not valid.
    """
    imported = onnx_file.load(model, base_dir=base_dir, input_shapes=input_shapes)
    graph = differentiate(imported, loss, wrt, cotangents=cotangents, stop_gradient=stop_gradient, outputs=outputs)
    if path is None:
        return to_onnx(graph)
    write_onnx(graph, path)
    return None


@dataclass(frozen=True)
class Joint:
    """A model and its gradient as one graph of primitives, in which the weights that it is the gradient by are inputs.

    Attributes:
        graph: its outputs are the model's own.
        wrt: what it was differentiated by, with the names.
        gradients: for each of them, None where the loss does not depend on it.
        weights: the arrays of those that were weights, and of the buffers, by name.
        buffers: what each buffer becomes, by the buffer's name.
        cotangents: inputs that are those of the losses, where they were asked for.
    """

    graph: Graph
    wrt: tuple[Value, ...]
    gradients: tuple[Value | None, ...]
    weights: Mapping[str, np.ndarray]
    buffers: Mapping[str, Value]
    cotangents: tuple[Value, ...] = ()


def differentiate(
    imported: Graph,
    loss: str | Sequence[str] | None = None,
    wrt: Sequence[str] | None = None,
    *,
    cotangents: bool = False,
    stop_gradient: Sequence[str] = (),
    outputs: bool = True,
) -> Graph:
    """:func:`backward` from an imported graph to a graph of primitives."""
    both = joint(imported, loss, wrt, cotangents=cotangents, stop_gradient=stop_gradient)
    b = Builder()
    named = [
        (f"{v.name}_grad", zeros_like(b, v) if dx is None else dx)
        for v, dx in zip(both.wrt, both.gradients, strict=True)
        if dx is not None or wrt is not None
    ]
    own = list(zip(both.graph.output_names, both.graph.outputs, strict=True)) if outputs else []
    own_names = [n for n, _ in own]
    graph = replace(
        both.graph, nodes=[*both.graph.nodes, *b.nodes], outputs=[v for _, v in (*own, *named)],
        output_names=[*own_names, *_unique([n for n, _ in named], [*own_names, *both.graph.input_names])],
    )  # fmt: skip
    graph.metadata = {**graph.metadata, WEIGHTS: list(both.weights)}
    return _bound(lift_random_state(cleaned(graph)), both.weights)  # at last, so that equal weights stay apart


def cleaned(graph: Graph) -> Graph:
    """Without what nothing needs, what is computed twice, and what only derivative rules read."""
    return share_common(
        with_factors_outside(without_turned_products(drop_unused(without_hints(eliminate_dead(graph)))))
    )


def joint(
    imported: Graph,
    loss: str | Sequence[str] | None = None,
    wrt: Sequence[str] | None = None,
    *,
    cotangents: bool = False,
    stop_gradient: Sequence[str] = (),
    buffers: Mapping[str, Value] | None = None,
    prepare: Callable[[Graph, Sequence[Value]], Graph] | None = None,
) -> Joint:
    """The model with its gradient; arguments and errors as those of :func:`backward`.

    Where data decide what is computed, the graph has steps on the host. `buffers` are weights that a
    run replaces by values of the model: these become inputs too. `prepare` is given the primitives before they are
    differentiated, and what they are differentiated by.
    """
    buffers = buffers or {}
    names = _Names(imported)
    losses = [names.value(n, "loss") for n in _loss_names(imported, loss)]
    chosen = names.weights() if wrt is None else [names.value(n, "wrt") for n in name_list(wrt, "wrt")]
    chosen = [v for v in chosen if v.name not in buffers]
    # Weights first: shapes follow from what some integers hold, which they could not as inputs.
    _only_floats([(v.name, v) for v in chosen if constant_of(v) is not None])
    own_rules = _own_rules(imported, names, stop_gradient)
    lifted, weights = _lifted(imported, [*chosen, *(names.value(n, "buffers") for n in buffers)])
    marked = [*losses, *chosen, *buffers.values()]
    every = [*lifted.output_names, *(v.name for v in marked)]
    primal = _decomposed(replace(lifted, outputs=[*lifted.outputs, *marked], output_names=every), own_rules)
    if prepare is not None:
        first = len(imported.outputs) + len(losses)
        primal = prepare(primal, primal.outputs[first : first + len(chosen)])
    own, rest = primal.outputs[: len(imported.outputs)], primal.outputs[len(imported.outputs) :]
    ends, ways, after = _parts(rest, len(losses), len(chosen))
    # A weight that is named there stays as it is; a value between still has a derivative by itself.
    frozen = {v.id for v in chosen if v.name in weights and own_rules.get(v.id) is _detached}
    free = [way for way, v in zip(ways, chosen, strict=True) if v.id not in frozen]
    primal = keep_steps(primal, free)
    b = Builder()
    b.nodes, b.inputs = list(primal.nodes), list(primal.inputs)
    _only_floats([(v.name, way) for way, v in zip(ways, chosen, strict=True)])
    seeds = _seeds(b, ends, [v.name for v in losses], cotangents)
    by_free = iter(gradients(b, primal.nodes, seeds, free))
    found = [None if v.id in frozen else next(by_free) for v in chosen]
    for way, v in zip(ways, chosen, strict=True):
        way.name = v.name
    graph = replace(primal, inputs=b.inputs, nodes=b.nodes, outputs=own, output_names=list(imported.output_names))
    asked = tuple(b.inputs[len(primal.inputs) :])
    return Joint(graph, tuple(ways), tuple(found), weights, dict(zip(buffers, after, strict=True)), asked)


def _own_rules(imported: Graph, names: _Names, stop_gradient: Sequence[str]) -> dict[int, Rule]:
    """The derivatives of values that have others than their nodes give them: none, or none of one row."""
    stopped = [*name_list(stop_gradient, "stop_gradient"), *names.known(imported.metadata.get("detached", ()))]
    found: dict[int, Rule] = {names.value(n, "stop_gradient").id: _detached for n in stopped}
    padding: Mapping[str, int] = imported.metadata.get("padding", {})
    return found | {names.value(n, "padding").id: _without_row(padding[n]) for n in names.known(padding)}


def _only_floats(values: Sequence[tuple[str, Value]]) -> None:
    """InputError where one of these is to be differentiated by and is no float."""
    integers = [
        f"{name!r} is {v.type}" for name, v in values if not isinstance(v.type, TensorType) or not v.dtype.is_float
    ]
    if integers:
        raise InputError(f"wrt: {', '.join(integers)}; only floats have a derivative")


def _detached(b: Builder, y: Value, inputs: Sequence[Value | None]) -> Value:
    """The rule of a value through which nothing is differentiated."""
    return b.detach(y)


def _without_row(row: int) -> Rule:
    """The rule of rows of an embedding, one of which (that of the padding) is not trained."""

    def rule(b: Builder, y: Value, inputs: Sequence[Value | None]) -> Value:
        index = inputs[1] if len(inputs) > 1 else None
        fits = index is not None and same_shape((*index.shape, *y.shape[index.rank :]), y.shape)
        if index is None or not fits or row > index.dtype.limits[1]:
            return y
        mask = b.where(b.eq(index, row), b.scalar(0, y.dtype), 1.0)
        return b.derived(y, "chosen", y, b.reshape(mask, (*index.shape, *(1,) * (y.rank - index.rank))))

    return rule


def _decomposed(graph: Graph, own_rules: Mapping[int, Rule]) -> Graph:
    """Primitives with the hints of derivative rules; with steps on the host only where data decide."""
    try:
        return decompose(graph, differentiable=True, rules=own_rules)
    except UnsupportedError:
        return decompose(graph, differentiable=True, staged=True, rules=own_rules)


def _parts(values: list[Value], first: int, second: int) -> tuple[list[Value], list[Value], list[Value]]:
    """The first so many, the next so many, and the rest."""
    return values[:first], values[first : first + second], values[first + second :]


class _Names:
    """What the names of a model stand for."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._values = {v.name: v for v in reversed(list(graph.values())) if v.name}

    def value(self, name: str, what: str) -> Value:
        """The value of a name. InputError where there is none."""
        if name not in self._values:
            weights = [v.name for v in self.weights()]
            raise InputError(
                f"{what}: the model has no value named {name!r} that anything reads; its inputs are "
                f"{self._graph.input_names}, its outputs {self._graph.output_names}, its weights {weights[:20]}"
                f"{' ...' if weights[20:] else ''}"
            )
        return self._values[name]

    def known(self, names: Iterable[str]) -> list[str]:
        """Those of the names that stand for something."""
        return [name for name in names if name in self._values]

    def weights(self) -> list[Value]:
        """Initializers of a float dtype that are parameters. Where the exporter did not note which are, all but sizes,
        bounds, statistics, and scalars, as exporters write the numbers of a formula.
        """
        noted: Mapping[str, bool] = self._graph.metadata.get("parameters", {})
        uses: set[int] = set()
        for node in self._graph.nodes:
            fixed = _fixed_inputs(node.op, self._graph.metadata.get("opsets", {}))
            uses.update(v.id for k, v in enumerate(node.inputs) if v is not None and k not in fixed)
            uses.update(v.id for region in node.regions for v in region.captures())
        nodes = [n for n in self._graph.nodes if n.op == "constant" and not n.origin]
        found = [n.output for n in nodes if n.output.name and n.output.dtype.is_float]
        return [v for v in found if noted.get(v.name, v.rank > 0 and v.id in uses)]


# Running statistics, the exponent of a power, which exporters write as an initializer, and the weights of classes.
_LEFT_ALONE = {
    ("", "BatchNormalization"): {3, 4}, ("", "Pow"): {1}, ("", "QuantizeLinear"): {1, 2},
    ("", "DequantizeLinear"): {1, 2}, ("", "SoftmaxCrossEntropyLoss"): {2}, ("", "NegativeLogLikelihoodLoss"): {2},
}  # fmt: skip


def _fixed_inputs(op: str, opsets: Mapping[str, int]) -> set[int]:
    """Inputs of an ONNX operator that training leaves alone: those that the standard calls not differentiable, and
    those above.
    """
    domain, _, name = op.partition("@")[0].rpartition(".")
    domain = "" if domain == "onnx" else domain
    if (domain, name) in _LEFT_ALONE:
        return _LEFT_ALONE[domain, name]
    try:
        schema = onnx.defs.get_schema(name, opsets.get(domain, 1), domain)
    except onnx.defs.SchemaError:
        return set()
    never = onnx.defs.OpSchema.DifferentiationCategory.NonDifferentiable
    return {k for k, formal in enumerate(schema.inputs) if formal.differentiation_category == never}


def _loss_names(graph: Graph, loss: str | Sequence[str] | None) -> list[str]:
    if loss is None and len(graph.outputs) > 1:
        raise InputError(f"loss: which of the outputs {graph.output_names} is differentiated?")
    if loss is None:
        return list(graph.output_names)
    found = [loss] if isinstance(loss, str) else list(name_list(loss, "loss"))
    if not found:
        raise InputError(f"loss: no name was given; the model's outputs are {graph.output_names}")
    return found


def _lifted(graph: Graph, chosen: Sequence[Value]) -> tuple[Graph, dict[str, np.ndarray]]:
    """The graph with these weights as inputs, so that nothing is folded into them; and what they were."""
    weights = {v.name: array for v in chosen if (array := constant_of(v)) is not None}
    ids = {v.id for v in chosen}
    inputs = [*graph.inputs]
    nodes = []
    for node in graph.nodes:
        if node.op == "constant" and node.output.id in ids:
            node.output.node = None
            inputs.append(node.output)
        else:
            nodes.append(node)
    return replace(graph, inputs=inputs, nodes=nodes), weights


def _bound(graph: Graph, weights: Mapping[str, np.ndarray]) -> Graph:
    """The graph with its weights in their places again."""
    made = [Node("constant", (), [v], {"value": weights[v.name]}) for v in graph.inputs if v.name in weights]
    return replace(graph, inputs=[v for v in graph.inputs if v.name not in weights], nodes=[*made, *graph.nodes])


def _seeds(b: Builder, ends: Sequence[Value], names: Sequence[str], cotangents: bool) -> dict[int, Value]:
    """The cotangents of the losses: ones, or inputs of their own."""
    found: dict[int, Value] = {}
    for v, name in zip(ends, names, strict=True):
        if not isinstance(v.type, TensorType):
            at = next((f" ({o})" for n in (v.node,) if n is not None for o in n.origin), "")
            raise UnsupportedError(f"loss: what type {name!r} has is known to a run alone{at}, so it has no derivative")
        if not v.dtype.is_float:
            raise InputError(f"loss: {name!r} is {v.t}; only floats have a derivative")
        if not cotangents and v.t.size != 1:
            raise InputError(
                f"loss: {name!r} is {v.t}, not a scalar: reduce it in the model, or ask for cotangents=True"
            )
        (own,) = _unique([f"{name}_cotangent"], [x.name for x in b.inputs])
        seed = b.input(v.t, own) if cotangents else b.full(v.shape, b.scalar(1, v.dtype), v.dtype)
        found[v.id] = b.add(found[v.id], seed) if v.id in found else seed
    return found


def _unique(names: Sequence[str], taken: Sequence[str]) -> list[str]:
    """The names, each made different from those before it and from those that are taken."""
    seen = list(taken)
    for name in names:
        while name in seen:
            name += "_"
        seen.append(name)
    return seen[len(taken) :]
