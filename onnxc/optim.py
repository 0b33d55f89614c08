"""Optimizers: how parameters follow from gradients, as graphs of primitives.

Each is a description; :func:`onnxc.compile_training` builds its update into the training step. Formulas and defaults
are those of PyTorch, so that a run can be compared with one there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from onnxc.errors import InputError
from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from onnxc.primitives.builder import Builder

States = Mapping[str, Value]


class Clock(NamedTuple):
    """What all updates of a step share: scalars of float64, in which small differences of powers keep their digits.

    Attributes:
        rate: the learning rate.
        step: 1.0 in the first step.
    """

    rate: Value
    step: Value


@dataclass(frozen=True)
class Optimizer(ABC):
    """An update rule.

    Attributes:
        lr: the learning rate, where the run gives no other.
    """

    lr: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool):
                continue
            most = 1 if name.startswith("beta") else math.inf
            if not isinstance(value, (int, float)) or not 0 <= value < most:
                raise InputError(f"{type(self).__name__}: {name} is a number from 0 to below {most}, and not {value!r}")

    @property
    @abstractmethod
    def states(self) -> Sequence[str]:
        """Names of what it keeps for each parameter, in the parameter's shape, zeros at first."""

    @abstractmethod
    def update(self, b: Builder, p: Value, g: Value, states: States, clock: Clock) -> tuple[Value, dict[str, Value]]:
        """The new parameter and its new states, from a parameter, its gradient and its states."""


def _narrow(b: Builder, x: Value, like: Value) -> Value:
    return b.cast(x, like.dtype)


def _decayed(b: Builder, p: Value, weight_decay: float, clock: Clock) -> Value:
    """p (1 - rate * weight_decay): decay apart from the gradient."""
    if not weight_decay:
        return p
    return b.mul(p, _narrow(b, b.sub(1.0, b.mul(clock.rate, weight_decay)), p))


def _mixed(b: Builder, old: Value, new: Value, share: float) -> Value:
    """share * old + (1 - share) * new."""
    return b.add(b.mul(old, share), b.mul(new, 1.0 - share))


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent. With momentum, v = momentum * v + g and p -= lr * v.

    Attributes:
        momentum: 0 keeps no state.
        weight_decay: is added to the gradient, times the parameter.
        nesterov: looks ahead: p -= lr * (g + momentum * v).
    """

    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    @property
    def states(self) -> Sequence[str]:
        return ("momentum",) if self.momentum else ()

    def update(self, b: Builder, p: Value, g: Value, states: States, clock: Clock) -> tuple[Value, dict[str, Value]]:
        g = b.add(g, b.mul(p, self.weight_decay)) if self.weight_decay else g
        kept = {}
        if self.momentum:
            kept["momentum"] = v = b.add(b.mul(states["momentum"], self.momentum), g)
            g = b.add(g, b.mul(v, self.momentum)) if self.nesterov else v
        return b.sub(p, b.mul(g, _narrow(b, clock.rate, p))), kept


@dataclass(frozen=True)
class Adam(Optimizer):
    """Kingma and Ba, Adam: steps scaled by running means of the gradient and its square.

    Attributes:
        beta1, beta2: how much of the running means is kept in a step.
        eps: is added to the root of the second.
        weight_decay: is added to the gradient, times the parameter.
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    @property
    def states(self) -> Sequence[str]:
        return ("mean", "square")

    def update(self, b: Builder, p: Value, g: Value, states: States, clock: Clock) -> tuple[Value, dict[str, Value]]:
        g = b.add(g, b.mul(p, self.weight_decay)) if self.weight_decay else g
        return self._step(b, p, g, states, clock)

    def _step(self, b: Builder, p: Value, g: Value, states: States, clock: Clock) -> tuple[Value, dict[str, Value]]:
        mean = _mixed(b, states["mean"], g, self.beta1)
        square = _mixed(b, states["square"], b.mul(g, g), self.beta2)
        first, second = (b.sub(1.0, b.pow(b.scalar(x, dtypes.float64), clock.step)) for x in (self.beta1, self.beta2))
        root = b.add(b.div(b.sqrt(square), _narrow(b, b.sqrt(second), p)), self.eps)
        size = _narrow(b, b.div(clock.rate, first), p)
        return b.sub(p, b.div(b.mul(mean, size), root)), {"mean": mean, "square": square}


@dataclass(frozen=True)
class AdamW(Adam):
    """Loshchilov and Hutter, Decoupled Weight Decay Regularization: Adam whose decay does not pass through its means.

    Attributes:
        weight_decay: times the learning rate, the share of a parameter that is lost in a step.
    """

    weight_decay: float = 1e-2

    def update(self, b: Builder, p: Value, g: Value, states: States, clock: Clock) -> tuple[Value, dict[str, Value]]:
        return self._step(b, _decayed(b, p, self.weight_decay, clock), g, states, clock)


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Duchi, Hazan and Singer, Adaptive Subgradient Methods: steps scaled by the root of all squares so far.

    Attributes:
        lr_decay: the learning rate is divided by 1 + (step - 1) * lr_decay.
        weight_decay: is added to the gradient, times the parameter.
        eps: is added to the root.
    """

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    eps: float = 1e-10

    @property
    def states(self) -> Sequence[str]:
        return ("sum",)

    def update(self, b: Builder, p: Value, g: Value, states: States, clock: Clock) -> tuple[Value, dict[str, Value]]:
        g = b.add(g, b.mul(p, self.weight_decay)) if self.weight_decay else g
        total = b.add(states["sum"], b.mul(g, g))
        slower = b.add(b.mul(b.sub(clock.step, 1.0), self.lr_decay), 1.0)
        size = _narrow(b, b.div(clock.rate, slower), p)
        return b.sub(p, b.div(b.mul(g, size), b.add(b.sqrt(total), self.eps))), {"sum": total}


@dataclass(frozen=True)
class Lion(Optimizer):
    """Chen and others, Symbolic Discovery of Optimization Algorithms: steps of one size, by the sign of a mean.

    Attributes:
        beta1, beta2: how much of the mean counts in a step, and how much of it is kept.
        weight_decay: times the learning rate, the share of a parameter that is lost in a step.
    """

    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0

    @property
    def states(self) -> Sequence[str]:
        return ("mean",)

    def update(self, b: Builder, p: Value, g: Value, states: States, clock: Clock) -> tuple[Value, dict[str, Value]]:
        way = b.unary("sign", _mixed(b, states["mean"], g, self.beta1))
        p = _decayed(b, p, self.weight_decay, clock)
        return b.sub(p, b.mul(way, _narrow(b, clock.rate, p))), {"mean": _mixed(b, states["mean"], g, self.beta2)}
