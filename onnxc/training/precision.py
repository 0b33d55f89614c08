"""Training in halves: forward and backward pass in float16 or bfloat16, parameters and updates in float32.

What may be a half is decided as for any model (`onnxc.passes.precision`): matrices and what is stored between kernels,
but for sums, exponentials and other things that need float32. The range of float16 ends at 6e-8, where gradients often
begin: so the loss is multiplied by a number as large as the gradients bear, and they are divided by it in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxc.autodiff.reduction import BY_TAPS
from onnxc.autodiff.reverse import active_values
from onnxc.errors import InputError
from onnxc.gradient import Joint, cleaned
from onnxc.ir import dtypes
from onnxc.ir.graph import Graph, Node, Value
from onnxc.passes.attention import fuse_attention
from onnxc.passes.long_products import long_products
from onnxc.passes.one_pass_moments import one_pass_moments
from onnxc.passes.pipeline import PassOptions
from onnxc.passes.precision import convert_precision
from onnxc.passes.simplify import Rewriter, fold_constants
from onnxc.passes.weight_gradients import find_weight_gradients
from onnxc.passes.weight_products import weight_products
from onnxc.passes.widen_products import widen_products
from onnxc.primitives.builder import Builder

PRECISIONS = ("float32", "bfloat16", "float16")
PRODUCTS = ("tf32", "tf32x3")  # how a GPU may multiply float32
DEEPEST = 128  # heads of attention whose derivative has a kernel that is worth it
SCALE, GOOD, SKIPPED = "loss scale", "good steps", "skipped steps"  # what is kept


@dataclass(frozen=True)
class LossScale:
    """What the loss is multiplied by, for gradients in float16. A step whose gradients are not finite changes nothing
    but the scale.

    Attributes:
        initial: the scale at first.
        growth: it is multiplied by this after `interval` good steps in a row;
        backoff: and by this after a step that was not good.
        interval: how many good steps.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        wanted = {"initial": (0, math.inf), "growth": (1, math.inf), "backoff": (0, 1)}
        for name, (low, high) in wanted.items():
            value = getattr(self, name)
            good = isinstance(value, (int, float)) and low <= value <= high and value > 0 and math.isfinite(value)
            if not good:
                raise InputError(f"LossScale: {name} is a positive number from {low} to {high}, and not {value!r}")
        if type(self.interval) is not int or self.interval < 1:
            raise InputError(f"LossScale: interval is a number of steps from 1 on, and not {self.interval!r}")

    def states(self) -> dict[str, np.ndarray]:
        """What is kept from step to step, by name, as it is at first."""
        zero = np.zeros((), np.float64)
        return {SCALE: np.asarray(self.initial, np.float64), GOOD: zero, SKIPPED: zero}

    def seeds(self, scale: Value, cotangents: Sequence[Value]) -> list[Node]:
        """Nodes that make the cotangents of the losses, which were inputs: the scale, instead of 1."""
        b = Builder()
        for c in cotangents:
            b.nodes.append(Node("copy", [b.cast(b.reshape(scale, c.shape), c.dtype)], [c]))
        return b.nodes

    def unscaled(self, b: Builder, gradients: Mapping[str, Value], scale: Value) -> dict[str, Value]:
        """The gradients as they were without a scale."""
        inverse = b.div(1.0, scale)
        return {name: b.mul(g, b.cast(inverse, g.dtype)) for name, g in gradients.items()}

    def after(self, b: Builder, good: Value, states: Mapping[str, Value]) -> dict[str, Value]:
        """The new states, from whether the step was good."""
        count = b.add(states[GOOD], 1.0)
        grown = b.le(float(self.interval), count)
        # Powers of two beyond what a float32 holds, or a half has the inverse of, do no good.
        larger = b.min(b.mul(states[SCALE], self.growth), 2.0**126)
        smaller = b.max(b.mul(states[SCALE], self.backoff), 2.0**-126)
        return {
            SCALE: b.where(good, b.where(grown, larger, states[SCALE]), smaller),
            GOOD: b.where(b.and_(good, b.not_(grown)), count, 0.0),
            SKIPPED: b.where(good, states[SKIPPED], b.add(states[SKIPPED], 1.0)),
        }


def all_finite(b: Builder, values: Iterable[Value]) -> Value:
    """Whether no element of any is infinite or NaN."""
    found = b.scalar(True, dtypes.boolean)
    for v in values:
        found = b.and_(found, b.lt(b.reduce("max", b.abs(v), range(v.rank)), math.inf))
    return found


def before_gradients(precision: str, *, on_gpu: bool) -> Callable[[Graph, Sequence[Value]], Graph] | None:
    """What a GPU wants found before it is differentiated. Windows, whose derivative then reads less; and attention in
    halves, whose derivative then computes probabilities again instead of reading them. (Of float32 there are no kernels
    for that.)
    """
    if not on_gpu:
        return None

    def prepare(graph: Graph, wrt: Sequence[Value]) -> Graph:
        graph = _with_windows(graph)
        if precision == "float32":
            return graph
        learnt = active_values(graph.nodes, wrt)
        return fuse_attention(graph, deepest=DEEPEST, learnt=learnt, stepped=False)

    return prepare


def _with_windows(graph: Graph) -> Graph:
    """The graph whose greatest elements of windows have the hint that their derivative is to go by taps."""
    r = Rewriter(graph)
    for node in graph.nodes:
        if node.op == "window_max":
            x, out = r.value(node.operands[0]), Value(node.output.type, node.output.name, node.output.data)
            r.nodes.append(Node(node.op, [x], [out], {**node.attrs, BY_TAPS: True}, (), node.origin))
            r.replace(node.output, out)
        else:
            r.keep(node)
    return r.result()


def lowered(joint: Joint, precision: str, *, on_gpu: bool = False) -> Joint:
    """A model and its gradient in halves; its inputs, outputs, weights and gradients stay as they are. A GPU multiplies
    halves as they are.

    Raises:
        InputError: a loss that is no scalar.
    """
    wide = [v for v in joint.cotangents if v.t.size != 1]
    if wide:
        raise InputError(f"loss: {wide[0].name.removesuffix('_cotangent')!r} is {wide[0].t}, not a scalar")
    if precision == "float32":
        return joint
    graph, found = joint.graph, [g for g in joint.gradients if g is not None]
    outputs = [*graph.outputs, *found, *joint.buffers.values()]
    names = [f"out{k}" for k in range(len(outputs))]
    whole = cleaned(replace(graph, outputs=outputs, output_names=names, metadata={}))
    whole = find_weight_gradients(fold_constants(whole, PassOptions.fold_bytes))
    whole = convert_precision(weight_products(whole) if on_gpu else whole, precision)
    whole = long_products(one_pass_moments(whole)) if on_gpu else widen_products(whole)
    own, rest = whole.outputs[: len(graph.outputs)], iter(whole.outputs[len(graph.outputs) :])
    gradients = tuple(None if g is None else next(rest) for g in joint.gradients)
    buffers = dict(zip(joint.buffers, rest, strict=True))
    metadata = {**whole.metadata, **graph.metadata}
    made = replace(whole, outputs=own, output_names=graph.output_names, metadata=metadata)
    return replace(joint, graph=made, gradients=gradients, buffers=buffers)


def scaling_of(precision: str, loss_scale: LossScale | None) -> LossScale | None:
    """The scale of a training in this precision, if it has one.

    Raises:
        InputError: an unknown precision, or a scale for another than float16.
    """
    if precision not in PRECISIONS:
        raise InputError(f"precision is one of {', '.join(PRECISIONS)}, and not {precision!r}")
    if loss_scale is not None and (precision != "float16" or not isinstance(loss_scale, LossScale)):
        raise InputError(
            f"loss_scale is a LossScale, for precision='float16'; {loss_scale!r} was given for {precision}"
        )
    return (loss_scale or LossScale()) if precision == "float16" else None
