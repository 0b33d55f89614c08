"""The standard's own operators for training, but for Gradient, which is a pass: `onnxc.autodiff.operator`.

Each takes a rate R, the number T of updates before, and then, for any number of tensors together: the tensors, their
gradients, and what it keeps for each. It gives the new tensors, and the new of what it keeps.
"""

from __future__ import annotations

from collections.abc import Callable

from onnxc.errors import ModelError
from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from onnxc.ops.common import scalar_of
from onnxc.ops.registry import op
from onnxc.primitives.builder import Builder

DOMAIN = "ai.onnx.preview.training"
Update = Callable[[Value, Value, list[Value]], list[Value]]
"""A tensor's new value and the new states, from the tensor, its gradient and its states."""


def _each(tensors: tuple[Value | None, ...], states: int, update: Update) -> list[Value]:
    """An update of each tensor: the operands come tensor by tensor within each kind, and so do the results."""
    given = [v for v in tensors if v is not None]
    kinds = 2 + states
    if len(given) != len(tensors) or not given or len(given) % kinds:
        raise ModelError(f"{len(tensors)} tensors: for each that is updated there are {kinds}")
    count = len(given) // kinds
    results = [update(x, g, list(kept)) for x, g, *kept in (given[k::count] for k in range(count))]
    return [v for kind in zip(*results, strict=True) for v in kind]


def _regular(b: Builder, x: Value, g: Value, norm_coefficient: float) -> Value:
    """The gradient, with that of half the square norm."""
    return b.add(b.mul(x, norm_coefficient), g) if norm_coefficient else g


def _clock(b: Builder, rate: Value, step: Value) -> tuple[Value, Value]:
    """Rate and number of updates as float64, in which small differences of powers keep their digits."""
    rate, step = (b.cast(scalar_of(b, v), dtypes.float64) for v in (rate, step))
    return rate, step


@op("Adagrad", 1, domain=DOMAIN)
def adagrad(
    b: Builder, rate: Value, step: Value, *tensors: Value | None, decay_factor: float = 0.0, epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
) -> list[Value]:  # fmt: skip
    r, t = _clock(b, rate, step)
    size = b.div(r, b.add(b.mul(t, decay_factor), 1.0))

    def update(x: Value, g: Value, kept: list[Value]) -> list[Value]:
        g = _regular(b, x, g, norm_coefficient)
        squares = b.add(kept[0], b.mul(g, g))
        root = b.add(b.sqrt(squares), epsilon)
        return [b.sub(x, b.div(b.mul(g, b.cast(size, x.dtype)), root)), squares]

    return _each(tensors, 1, update)


@op("Adam", 1, domain=DOMAIN)
def adam(
    b: Builder, rate: Value, step: Value, *tensors: Value | None, alpha: float = 0.9, beta: float = 0.999,
    epsilon: float = 1e-6, norm_coefficient: float = 0.0, norm_coefficient_post: float = 0.0,
) -> list[Value]:  # fmt: skip
    r, t = _clock(b, rate, step)
    first, second = (b.sub(1.0, b.pow(b.scalar(x, dtypes.float64), t)) for x in (alpha, beta))
    size = b.where(b.lt(0.0, t), b.div(b.mul(r, b.sqrt(second)), first), r)

    def update(x: Value, g: Value, kept: list[Value]) -> list[Value]:
        g = _regular(b, x, g, norm_coefficient)
        mean = b.add(b.mul(kept[0], alpha), b.mul(g, 1.0 - alpha))
        square = b.add(b.mul(kept[1], beta), b.mul(b.mul(g, g), 1.0 - beta))
        new = b.sub(x, b.div(b.mul(mean, b.cast(size, x.dtype)), b.add(b.sqrt(square), epsilon)))
        return [b.mul(new, 1.0 - norm_coefficient_post) if norm_coefficient_post else new, mean, square]

    return _each(tensors, 2, update)


@op("Momentum", 1, domain=DOMAIN)
def momentum(
    b: Builder, rate: Value, step: Value, *tensors: Value | None, alpha: float, beta: float, mode: str,
    norm_coefficient: float,
) -> list[Value]:  # fmt: skip
    if mode not in ("standard", "nesterov"):
        raise ModelError(f"the mode of Momentum is standard or nesterov, and not {mode!r}")
    r, t = _clock(b, rate, step)
    share = b.where(b.lt(0.0, t), b.scalar(beta, dtypes.float64), 1.0)

    def update(x: Value, g: Value, kept: list[Value]) -> list[Value]:
        g = _regular(b, x, g, norm_coefficient)
        v = b.add(b.mul(kept[0], alpha), b.mul(g, b.cast(share, x.dtype)))
        way = b.add(g, b.mul(v, alpha)) if mode == "nesterov" else v
        return [b.sub(x, b.mul(way, b.cast(r, x.dtype))), v]

    return _each(tensors, 1, update)
