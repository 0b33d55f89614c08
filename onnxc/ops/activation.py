"""Activation functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from onnxc.ops.common import merge_axes, scalar_of
from onnxc.ops.registry import op
from onnxc.primitives.builder import Builder


@op("Relu", 1)
def relu(b: Builder, x: Value) -> Value:
    return b.max(0, x, tie=1.0)  # in this order -0.0 stays -0.0; the derivative at 0 is 0


@op("Gelu", 20)
def gelu(b: Builder, x: Value, *, approximate: Literal["none", "tanh"] = "none") -> Value:
    """Hendrycks and Gimpel, Gaussian Error Linear Units: x * Phi(x), or its tanh approximation."""
    if approximate == "tanh":
        inner = b.mul(b.add(x, b.mul(b.mul(b.mul(x, x), x), 0.044715)), math.sqrt(2 / math.pi))
        return b.mul(b.mul(x, 0.5), b.add(b.tanh(inner), 1.0))
    return b.mul(b.mul(x, 0.5), b.add(b.erf(b.mul(x, math.sqrt(0.5))), 1.0))


@op("Sigmoid", 1)
def sigmoid(b: Builder, x: Value) -> Value:
    return b.sigmoid(x)


@op("Tanh", 1)
def tanh(b: Builder, x: Value) -> Value:
    return b.tanh(x)


def negative(b: Builder, x: Value) -> Value:
    """Where the branch below zero is taken. At zero both have the same value, and the derivative is the lower one's."""
    return b.le(x, 0.0) if b.differentiable else b.lt(x, 0.0)


@op("LeakyRelu", 1)
def leaky_relu(b: Builder, x: Value, *, alpha: float = 0.01) -> Value:
    return b.where(negative(b, x), b.mul(x, alpha), x)


@op("PRelu", 7)
def prelu(b: Builder, x: Value, slope: Value) -> Value:
    return b.where(negative(b, x), b.mul(x, slope), x)


@op("ThresholdedRelu", 10)
def thresholded_relu(b: Builder, x: Value, *, alpha: float = 1.0) -> Value:
    return b.where(b.lt(b.scalar(alpha, x.dtype), x), x, 0.0)


def expm1_of_negative(b: Builder, x: Value) -> Value:
    """exp(x) - 1 for x below 0 (the argument is capped, so that the branch not taken cannot overflow)."""
    return b.sub(b.exp(b.min(x, 0.0, tie=1.0)), 1.0)


@op("Elu", 1)
def elu(b: Builder, x: Value, *, alpha: float = 1.0) -> Value:
    return b.where(negative(b, x), b.mul(expm1_of_negative(b, x), alpha), x)


@op("Selu", 6)
def selu(
    b: Builder, x: Value, *, alpha: float = 1.6732632423543772848170429916717,
    gamma: float = 1.0507009873554804934193349852946,
) -> Value:  # fmt: skip
    return b.mul(elu(b, x, alpha=alpha), gamma)


@op("Celu", 12)
def celu(b: Builder, x: Value, *, alpha: float = 1.0) -> Value:
    below = b.div(x, alpha)
    grown = expm1_of_negative(b, below) if alpha > 0 else b.sub(b.exp(below), 1.0)
    above = x if alpha else b.mul(below, 0.0)  # an alpha of 0 makes it NaN: max(0, x) + min(0, 0 * infinity)
    return b.where(negative(b, x), b.mul(grown, alpha), above)


@op("HardSigmoid", 1)
def hard_sigmoid(b: Builder, x: Value, *, alpha: float = 0.2, beta: float = 0.5) -> Value:
    """Of slope 0 at both bends."""
    return b.min(b.max(b.add(b.mul(x, alpha), beta), 0.0, tie=0.0), 1.0, tie=0.0)


@op("HardSwish", 14)
def hard_swish(b: Builder, x: Value) -> Value:
    """x * HardSigmoid(x); at the bends the derivative is that of the lines beyond them."""
    return b.mul(x, hard_sigmoid(b, x, alpha=1 / 6, beta=0.5))


@op("Softplus", 1)
def softplus(b: Builder, x: Value) -> Value:
    """log(1 + exp(x)), without overflow for large x."""
    return b.derived(b.add(b.max(x, 0.0), b.log(b.add(b.exp(b.neg(b.abs(x))), 1.0))), "softplus", x)


@op("Softsign", 1)
def softsign(b: Builder, x: Value) -> Value:
    return b.div(x, b.add(b.abs(x), 1.0))


@op("Mish", 18)
def mish(b: Builder, x: Value) -> Value:
    """x * tanh(log(1 + exp(x))) = x * n / (n + 2) with n = exp(x) * (exp(x) + 2), which keeps the digits of small ones.

    For positive x, numerator and denominator are multiplied by exp(-2 * x): nothing overflows.
    """
    below = negative(b, x)
    e = b.exp(b.where(below, x, b.neg(x)))
    twice = b.mul(e, 2.0)
    square = b.mul(e, e)
    over = b.add(twice, b.where(below, square, 1.0))
    return b.mul(x, b.div(over, b.add(over, b.where(below, 2.0, b.mul(square, 2.0)))))


@op("Swish", 24)
def swish(b: Builder, x: Value, *, alpha: float = 1.0) -> Value:
    return b.mul(x, b.sigmoid(x if alpha == 1.0 else b.mul(x, alpha)))


@op("SwiGLU", 28)
def swiglu(b: Builder, gate: Value, x: Value, *, alpha: float = 1.0) -> Value:
    return b.mul(swish(b, gate, alpha=alpha), x)


@op("Shrink", 9)
def shrink(b: Builder, x: Value, *, bias: float = 0.0, lambd: float = 0.5) -> Value:
    """Of integers computed in float64 and cut off, as onnxruntime does: -lambd is no uint8, and 1.5 no integer."""
    if x.dtype.is_integer:
        return b.cast(shrink(b, b.cast(x, dtypes.float64), bias=bias, lambd=lambd), x.dtype)
    below = b.lt(x, b.scalar(-lambd, x.dtype))
    above = b.lt(b.scalar(lambd, x.dtype), x)
    return b.where(below, b.add(x, bias), b.where(above, b.sub(x, bias), 0))


@op("Clip", 6, 10)
def clip_6(b: Builder, x: Value, *, max: float | None = None, min: float | None = None) -> Value:
    return b.clip(x, min, max)


@op("Clip", 11)
def clip_11(b: Builder, x: Value, min: Value | None = None, max: Value | None = None) -> Value:
    return b.clip(x, None if min is None else scalar_of(b, min), None if max is None else scalar_of(b, max))


@op("Softmax", 13)
def softmax_13(b: Builder, x: Value, *, axis: int = -1) -> Value:
    return b.softmax(x, b.axis(axis, x.rank))


@op("LogSoftmax", 13)
def log_softmax_13(b: Builder, x: Value, *, axis: int = -1) -> Value:
    axis = b.axis(axis, x.rank)
    shifted = b.sub(x, b.detach(b.reduce("max", x, [axis], True)))
    return b.sub(shifted, b.log(b.reduce("sum", b.exp(shifted), [axis], True)))


@op("Hardmax", 13)
def hardmax_13(b: Builder, x: Value, *, axis: int = -1) -> Value:
    """One at the first greatest element, zero elsewhere."""
    axis = b.axis(axis, x.rank)
    best = b.one("argmax", x, axis=axis, last=False, empty=True)
    best = b.reshape(best, [1 if i == axis else d for i, d in enumerate(x.shape)])
    positions = b.reshape(b.iota(x.shape[axis]), (x.shape[axis], *(1,) * (x.rank - 1 - axis)))
    return b.cast(b.eq(best, positions), x.dtype)


def _coerced(name: str, newer: Callable[..., Value]) -> None:
    """Before opset 13 these ops flattened the axes from `axis` on to one (axis 1 where none is given)."""

    @op(name, 1, 12)
    def define(b: Builder, x: Value, *, axis: int = 1) -> Value:
        axis = b.axis(axis, x.rank) if axis != x.rank else axis
        if axis == x.rank - 1:
            return newer(b, x, axis=axis)
        flat = newer(b, merge_axes(b, x, axis), axis=1)
        return b.reshape(flat, x.shape)


_coerced("Softmax", softmax_13)
_coerced("LogSoftmax", log_softmax_13)
_coerced("Hardmax", hardmax_13)
