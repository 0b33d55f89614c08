"""The graph of one training step: the model with its gradient, and the optimizer behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxc.errors import InputError, UnsupportedError
from onnxc.gradient import Joint, cleaned
from onnxc.ir import dtypes
from onnxc.ir.graph import UPDATES, Graph, Node, Value
from onnxc.ir.types import TensorType
from onnxc.optim import Clock, Optimizer
from onnxc.passes.simplify import Rewriter
from onnxc.primitives.builder import Builder
from onnxc.primitives.host import is_host
from onnxc.training.precision import SCALE, SKIPPED, LossScale, all_finite


@dataclass(frozen=True)
class Update:
    """What happens to the gradients of a step.

    Attributes:
        optimizer: turns them into new parameters.
        clip_norm: the most that their norm, over all parameters, may be; larger ones are scaled down.
        clip_value: the most that an element may be, either way.
        steps: of how many micro-batches the mean is taken before the parameters change.
        scaling: what the loss is multiplied by, for gradients in float16.
    """

    optimizer: Optimizer
    clip_norm: float | None = None
    clip_value: float | None = None
    steps: int = 1
    scaling: LossScale | None = None

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
    def type(self) -> TensorType:
        """Of the tensor."""
        return TensorType(dtypes.from_numpy(self.initial.dtype), self.initial.shape)

    @property
    def key(self) -> str:
        """A name for files."""
        return f"{self.state or 'parameter'}/{self.name}"


def slots_of(joint: Joint, update: Update) -> list[Slot]:
    """All that a step keeps, parameters first, then buffers, then states."""
    found = [Slot(name, "", array) for name, array in joint.weights.items()]
    for v in _trained(joint):
        nothing = np.zeros_like(joint.weights[v.name])
        found += [Slot(v.name, state, nothing) for state in update.optimizer.states]
        found += [Slot(v.name, "gradient", nothing)] if update.steps > 1 else []
    found += [Slot("", state, initial) for state, initial in update.scaling.states().items()] if update.scaling else []
    return found


def _trained(joint: Joint) -> list[Value]:
    return [v for v, g in zip(joint.wrt, joint.gradients, strict=True) if g is not None and v.name in joint.weights]


def step_graph(joint: Joint, update: Update, slots: Sequence[Slot], *, last: bool) -> Graph:
    """The graph of a step; without `last`, of one that adds to the gradients only.

    Its inputs are the model's, `rate` and `step` (scalars of float64), then all slots; its outputs are the model's,
    then the new contents of the slots that change, which a run writes over the old ones.
    """
    b = Builder()
    clock = Clock(*(b.input(TensorType(dtypes.float64, ()), name) for name in ("rate", "step")))
    held = {v.name: v for v in joint.graph.inputs if v.name in joint.weights}
    own = [v for v in joint.graph.inputs if v.name not in joint.weights and v not in joint.cotangents]
    values = [b.input(s.type) if s.state else held[s.name] for s in slots]
    inputs = [*own, clock.rate, clock.step, *values]
    place = {(s.name, s.state): k for k, s in enumerate(slots)}
    seeds = update.scaling.seeds(values[place["", SCALE]], joint.cotangents) if update.scaling else []
    total = _summed(b, joint, values, place, update)
    new: dict[int, Value] = {place[name, ""]: value for name, value in joint.buffers.items()}
    if update.scaling:  # a batch that overflows leaves no trace
        new = {k: b.where(b.lt(b.abs(v), math.inf), v, values[k]) for k, v in new.items()}
    if last:
        new |= _updated(b, total, values, place, update, clock)
    else:
        new |= {place[n, "gradient"]: g for n, g in total.items()}
    changed = sorted(k for k, v in new.items() if v is not values[k])
    outputs = [*joint.graph.outputs, *(new[k] for k in changed)]
    prefix = _prefix([*joint.graph.output_names, *(v.name for v in own)])
    names = [*joint.graph.output_names, *(f"{prefix}new {k}" for k in changed)]
    updates = {f"{prefix}new {k}": f"{prefix}{k}" for k in changed}
    first, rest = _of_clock(b.nodes, clock)
    graph = replace(
        joint.graph, inputs=inputs, nodes=[*seeds, *first, *joint.graph.nodes, *rest], outputs=outputs,
        output_names=names, metadata={**joint.graph.metadata, UPDATES: updates},
    )  # fmt: skip
    return _named(
        cleaned(graph),
        [
            *own,
            *(Value(v.type, prefix + v.name) for v in (clock.rate, clock.step)),
            *(Value(v.type, f"{prefix}{k}") for k, v in enumerate(values)),
        ],
    )


def _summed(
    b: Builder, joint: Joint, values: Sequence[Value], place: Mapping[tuple[str, str], int], update: Update
) -> dict[str, Value]:
    """The gradients by name: without the loss's scale, and with those of the calls before."""
    total = {v.name: g for v, g in zip(joint.wrt, joint.gradients, strict=True) if g is not None}
    if update.scaling:
        total = update.scaling.unscaled(b, total, values[place["", SCALE]])
    if update.steps > 1:
        share = 1 / update.steps
        total = {n: b.add(values[place[n, "gradient"]], b.mul(g, share)) for n, g in total.items()}
    return total


def changed_slots(graph: Graph, slots: Sequence[Slot]) -> list[int]:
    """The numbers of the slots that a step replaces, in the order of its outputs."""
    names: Mapping[str, str] = graph.metadata[UPDATES]
    first = len(graph.inputs) - len(slots)
    place = {name: k - first for k, name in enumerate(graph.input_names)}
    return [place[names[n]] for n in graph.output_names if n in names]


def check_is_one_program(graph: Graph) -> None:
    """UnsupportedError where a run decides what is computed, which only float32 on a CPU allows."""
    for node in graph.nodes:
        if is_host(node):
            where = next((f"{s} ({s.line})" if s.line else str(s) for s in node.origin), node.op)
            raise UnsupportedError(
                f"{where} depends on data, so that a step is several programs: these are trained in float32 on the "
                "CPU alone"
            )


def _of_clock(nodes: Sequence[Node], clock: Clock) -> tuple[list[Node], list[Node]]:
    """The nodes that follow from the clock alone, and the others. The former run first: no update waits for them."""
    known = {clock.rate.id, clock.step.id}
    first: list[Node] = []
    for node in nodes:
        if all(v.id in known for v in node.operands):  # a gradient may be a constant, which is made later
            first.append(node)
            known.update(v.id for v in node.outputs)
    taken = {id(n) for n in first}
    return first, [n for n in nodes if id(n) not in taken]


def _updated(
    b: Builder, gradients: Mapping[str, Value], values: Sequence[Value], place: Mapping[tuple[str, str], int],
    update: Update, clock: Clock,
) -> dict[int, Value]:  # fmt: skip
    """New parameters and states, by slot."""
    found: dict[int, Value] = {}
    scaling = {s: values[place["", s]] for s in update.scaling.states()} if update.scaling else {}
    good = all_finite(b, gradients.values()) if update.scaling else None
    if update.scaling:
        clock = clock._replace(step=b.sub(clock.step, scaling[SKIPPED]))
    gradients = _clipped(b, gradients, update)
    for name, g in gradients.items():
        states = {s: values[place[name, s]] for s in update.optimizer.states}
        p, after = update.optimizer.update(b, values[place[name, ""]], g, states, clock)
        found[place[name, ""]] = p
        found |= {place[name, s]: v for s, v in after.items()}
    if update.scaling and good is not None:
        found = {k: b.where(good, v, values[k]) for k, v in found.items()}
        found |= {place["", s]: v for s, v in update.scaling.after(b, good, scaling).items()}
    if update.steps > 1:
        found |= {place[n, "gradient"]: b.full(g.shape, b.scalar(0, g.dtype), g.dtype) for n, g in gradients.items()}
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


def _prefix(taken: Sequence[str]) -> str:
    """What no name of the model begins with."""
    prefix = "slot "
    while any(name.startswith(prefix) for name in taken):
        prefix += "_ "
    return prefix


def _named(graph: Graph, inputs: Sequence[Value]) -> Graph:
    """The graph with other inputs in the place of its own, of the same types."""
    r = Rewriter(replace(graph, inputs=list(inputs)))
    for old, new in zip(graph.inputs, inputs, strict=True):
        r.replace(old, new)
    for node in graph.nodes:
        r.keep(node)
    return r.result()
