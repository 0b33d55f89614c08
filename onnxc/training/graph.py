"""The graph of one training step: the model with its gradient, and the optimizer behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxc.errors import InputError
from onnxc.gradient import Joint, cleaned
from onnxc.ir import dtypes
from onnxc.ir.graph import Graph, Value
from onnxc.ir.types import TensorType
from onnxc.optim import Clock, Optimizer
from onnxc.passes.simplify import Rewriter
from onnxc.primitives.builder import Builder


@dataclass(frozen=True)
class Update:
    """What happens to the gradients of a step.

    Attributes:
        optimizer: turns them into new parameters.
        clip_norm: the most that their norm, over all parameters, may be; larger ones are scaled down.
        clip_value: the most that an element may be, either way.
        steps: of how many micro-batches the mean is taken before the parameters change.
    """

    optimizer: Optimizer
    clip_norm: float | None = None
    clip_value: float | None = None
    steps: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.optimizer, Optimizer):
            raise InputError(f"optimizer is one of onnxc.optim, as AdamW(lr=1e-3), and not {self.optimizer!r}")
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, (int, float)) or not value > 0):
                raise InputError(f"{name} is positive, and not {value!r}")
        if type(self.steps) is not int or self.steps < 1:
            raise InputError(f"accumulate is a number of steps from 1 on, and not {self.steps!r}")


@dataclass(frozen=True)
class Slot:
    """Something that a step reads and replaces: a parameter, a state of the optimizer, a sum of gradients.

    Attributes:
        name: of the parameter or buffer that it belongs to.
        state: the state's name; "" for the parameter itself.
        initial: what it is at first.
    """

    name: str
    state: str
    initial: np.ndarray

    @property
    def key(self) -> str:
        """A name for files."""
        return f"{self.state or 'parameter'}/{self.name}"


@dataclass(frozen=True)
class StepGraph:
    """A graph whose inputs are the model's, `rate` and `step` (scalars of float64), then all slots; its outputs are the
    model's, then the new contents of the slots that change.
    """

    graph: Graph
    changed: tuple[int, ...]  # the slots, by number


def slots_of(joint: Joint, update: Update) -> list[Slot]:
    """All that a step keeps, parameters first, then buffers, then states."""
    found = [Slot(name, "", array) for name, array in joint.weights.items()]
    for v in _trained(joint):
        nothing = np.zeros_like(joint.weights[v.name])
        found += [Slot(v.name, state, nothing) for state in update.optimizer.states]
        found += [Slot(v.name, "gradient", nothing)] if update.steps > 1 else []
    return found


def _trained(joint: Joint) -> list[Value]:
    return [v for v, g in zip(joint.wrt, joint.gradients, strict=True) if g is not None and v.name in joint.weights]


def step_graph(joint: Joint, update: Update, slots: Sequence[Slot], *, last: bool) -> StepGraph:
    """The graph of a step; without `last`, of one that adds to the gradients only."""
    b = Builder()
    clock = Clock(*(b.input(TensorType(dtypes.float64, ()), name) for name in ("rate", "step")))
    held = {v.name: v for v in joint.graph.inputs if v.name in joint.weights}
    own = [v for v in joint.graph.inputs if v.name not in joint.weights]
    values = [held[s.name] if not s.state else b.input(held[s.name].t) for s in slots]
    inputs = [*own, clock.rate, clock.step, *values]
    place = {(s.name, s.state): k for k, s in enumerate(slots)}
    total = {v.name: g for v, g in zip(joint.wrt, joint.gradients, strict=True) if g is not None}
    if update.steps > 1:
        share = 1 / update.steps
        total = {n: b.add(values[place[n, "gradient"]], b.mul(g, share)) for n, g in total.items()}
    new: dict[int, Value] = {place[name, ""]: value for name, value in joint.buffers.items()}
    if last:
        new |= _updated(b, total, values, place, update, clock)
    else:
        new |= {place[n, "gradient"]: g for n, g in total.items()}
    changed = tuple(sorted(new))
    outputs = [*joint.graph.outputs, *(new[k] for k in changed)]
    names = [*joint.graph.output_names, *(f"new:{k}" for k in changed)]
    graph = replace(
        joint.graph, inputs=inputs, nodes=[*joint.graph.nodes, *b.nodes], outputs=outputs, output_names=names
    )
    return StepGraph(_named(cleaned(graph), len(own)), changed)


def _updated(
    b: Builder, gradients: Mapping[str, Value], values: Sequence[Value], place: Mapping[tuple[str, str], int],
    update: Update, clock: Clock,
) -> dict[int, Value]:  # fmt: skip
    """New parameters and states, by slot."""
    gradients = _clipped(b, gradients, update)
    found: dict[int, Value] = {}
    for name, g in gradients.items():
        states = {s: values[place[name, s]] for s in update.optimizer.states}
        p, after = update.optimizer.update(b, values[place[name, ""]], g, states, clock)
        found[place[name, ""]] = p
        found |= {place[name, s]: v for s, v in after.items()}
        if update.steps > 1:
            found[place[name, "gradient"]] = b.full(g.shape, b.scalar(0, g.dtype), g.dtype)
    return found


def _clipped(b: Builder, gradients: Mapping[str, Value], update: Update) -> Mapping[str, Value]:
    if update.clip_value is not None:
        gradients = {n: b.clip(g, -update.clip_value, update.clip_value) for n, g in gradients.items()}
    if update.clip_norm is None or not gradients:
        return gradients
    squares = [b.cast(b.reduce("sum", b.mul(g, g), range(g.rank)), dtypes.float64) for g in gradients.values()]
    total = squares[0]
    for square in squares[1:]:
        total = b.add(total, square)
    scale = b.min(b.div(update.clip_norm, b.add(b.sqrt(total), 1e-6)), 1.0)
    return {n: b.mul(g, b.cast(scale, g.dtype)) for n, g in gradients.items()}


def _named(graph: Graph, own: int) -> Graph:
    """Inputs that are not the model's get names of their own, so that none of the model's can meet them."""
    new = [*graph.inputs[:own], *(Value(v.type, f"slot:{k}") for k, v in enumerate(graph.inputs[own:]))]
    r = Rewriter(replace(graph, inputs=new))
    for old, value in zip(graph.inputs, new, strict=True):
        r.replace(old, value)
    for node in graph.nodes:
        r.keep(node)
    return r.result()
