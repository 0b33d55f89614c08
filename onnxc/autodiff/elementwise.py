"""Derivatives of pointwise primitives."""

from __future__ import annotations

import math
from collections.abc import Callable

from onnxc.autodiff.rules import Gradients, Step, constant_almost_everywhere, rule
from onnxc.ir.graph import Value
from onnxc.ops import reals
from onnxc.primitives.builder import Builder, constant_of

rule("floor", "ceil", "round", "sign")(constant_almost_everywhere)


@rule("copy")
def copy(s: Step) -> Gradients:
    """Of what has a derivative of its own, that one; of what stops derivatives, none."""
    if s.node.attrs.get("stop"):
        return [None]
    name = s.node.attrs.get("rule")
    if name is None:
        return [s.dy]
    found = OWN[name](s)
    dxs = [found] if isinstance(found, Value) else found
    return [None, *dxs, *[None] * (len(s.operands) - 1 - len(dxs))]


def _sigmoid(s: Step) -> Value:
    """y (1 - y): nothing overflows, as exp(-x) does."""
    return s.b.mul(s.dy, s.b.mul(s.y, s.b.sub(1.0, s.y)))


def _softplus(s: Step) -> Value:
    return s.b.mul(s.dy, s.b.sigmoid(s.operands[1]))


def _deviation(s: Step) -> Value:
    """2 (x - mean) of the squares of a variance: deviations add up to 0, so what the mean would add is 0 too."""
    return s.b.mul(s.dy, s.b.mul(s.operands[2], 2.0))


def _through(s: Step) -> Value:
    """As if nothing had been rounded."""
    return s.dy


def _chosen(s: Step) -> Value:
    """0 where the mask is 0."""
    return s.b.where(s.b.eq(s.operands[2], 0.0), 0.0, s.dy)


def _log1p(s: Step) -> Value:
    return s.b.div(s.dy, s.b.add(s.operands[1], 1.0))


def _expm1(s: Step) -> Value:
    return s.b.mul(s.dy, s.b.exp(s.operands[1]))


def _logarithm(base: float) -> Callable[[Step], Value]:
    return lambda s: s.b.div(s.dy, s.b.mul(s.operands[1], math.log(base)))


def _hypot(s: Step) -> Gradients:
    """The coordinates of the direction; 0 at the origin."""
    _, x, y = s.operands
    size = _or_one(s.b, s.y)
    return [s.b.mul(s.dy, s.b.div(v, size)) for v in (x, y)]


def _atan2(s: Step) -> Gradients:
    """The direction, turned by a right angle, over the distance; 0 at the origin."""
    _, y, x = s.operands
    size = _or_one(s.b, reals.hypot(s.b, x, y))
    slope = s.b.div(s.dy, size)
    return [s.b.mul(slope, s.b.div(v, size)) for v in (x, s.b.neg(y))]


def _or_one(b: Builder, size: Value) -> Value:
    return b.where(b.eq(size, 0.0), 1.0, size)


def _logaddexp(s: Step) -> Gradients:
    """Shares of the sum; a half each of equal infinities."""
    b, (_, x, y) = s.b, s.operands
    same = b.and_(b.eq(x, y), b.one("isinf", x))
    ahead = b.where(same, 0.0, b.sub(x, y))
    return [b.mul(s.dy, b.sigmoid(v)) for v in (ahead, b.neg(ahead))]


# Derivatives of compositions, by the name that `Builder.derived` gives: by the first operand, or by several.
OWN: dict[str, Callable[[Step], Value | Gradients]] = {
    "sigmoid": _sigmoid,
    "softplus": _softplus,
    "deviation": _deviation,
    "through": _through,
    "chosen": _chosen,
    "log1p": _log1p,
    "expm1": _expm1,
    "log2": _logarithm(2),
    "log10": _logarithm(10),
    "hypot": _hypot,
    "atan2": _atan2,
    "logaddexp": _logaddexp,
}


@rule("neg")
def neg(s: Step) -> Gradients:
    return [s.b.neg(s.dy)]


@rule("abs")
def absolute(s: Step) -> Gradients:
    """0 at 0."""
    return [s.b.mul(s.dy, s.b.unary("sign", s.x))]


@rule("exp")
def exp(s: Step) -> Gradients:
    return [s.b.mul(s.dy, s.y)]


@rule("log")
def log(s: Step) -> Gradients:
    return [s.b.div(s.dy, s.x)]


@rule("sqrt")
def sqrt(s: Step) -> Gradients:
    """Infinite at 0."""
    return [s.b.div(s.dy, s.b.mul(s.y, 2.0))]


@rule("sin")
def sin(s: Step) -> Gradients:
    return [s.b.mul(s.dy, s.b.unary("cos", s.x))]


@rule("cos")
def cos(s: Step) -> Gradients:
    return [s.b.neg(s.b.mul(s.dy, s.b.unary("sin", s.x)))]


@rule("tan")
def tan(s: Step) -> Gradients:
    return [s.b.mul(s.dy, s.b.add(s.b.mul(s.y, s.y), 1.0))]


@rule("asin")
def asin(s: Step) -> Gradients:
    return [s.b.div(s.dy, _one_minus_square_root(s.b, s.x))]


@rule("acos")
def acos(s: Step) -> Gradients:
    return [s.b.neg(s.b.div(s.dy, _one_minus_square_root(s.b, s.x)))]


def _one_minus_square_root(b: Builder, x: Value) -> Value:
    return b.sqrt(b.sub(1.0, b.mul(x, x)))


@rule("atan")
def atan(s: Step) -> Gradients:
    return [s.b.div(s.dy, s.b.add(s.b.mul(s.x, s.x), 1.0))]


@rule("sinh")
def sinh(s: Step) -> Gradients:
    return [s.b.mul(s.dy, s.b.unary("cosh", s.x))]


@rule("cosh")
def cosh(s: Step) -> Gradients:
    return [s.b.mul(s.dy, s.b.unary("sinh", s.x))]


@rule("tanh")
def tanh(s: Step) -> Gradients:
    return [s.b.mul(s.dy, s.b.sub(1.0, s.b.mul(s.y, s.y)))]


@rule("asinh")
def asinh(s: Step) -> Gradients:
    return [s.b.div(s.dy, s.b.sqrt(s.b.add(s.b.mul(s.x, s.x), 1.0)))]


@rule("acosh")
def acosh(s: Step) -> Gradients:
    return [s.b.div(s.dy, s.b.sqrt(s.b.sub(s.b.mul(s.x, s.x), 1.0)))]


@rule("atanh")
def atanh(s: Step) -> Gradients:
    return [s.b.div(s.dy, s.b.sub(1.0, s.b.mul(s.x, s.x)))]


@rule("erf")
def erf(s: Step) -> Gradients:
    bell = s.b.exp(s.b.neg(s.b.mul(s.x, s.x)))
    return [s.b.mul(s.dy, s.b.mul(bell, 2 / math.sqrt(math.pi)))]


@rule("add")
def add(s: Step) -> Gradients:
    return s.dy, s.dy


@rule("sub")
def sub(s: Step) -> Gradients:
    return s.dy, s.b.neg(s.dy) if s.needed[1] else None


@rule("mul")
def mul(s: Step) -> Gradients:
    x, y = s.operands
    return s.b.mul(s.dy, y) if s.needed[0] else None, s.b.mul(s.dy, x) if s.needed[1] else None


@rule("div")
def div(s: Step) -> Gradients:
    _, y = s.operands
    dx = s.b.div(s.dy, y)
    return dx, s.b.neg(s.b.mul(dx, s.y)) if s.needed[1] else None


@rule("pow")
def pow_(s: Step) -> Gradients:
    """Of a constant power 0 the derivative is 0 at x = 0 too; of 0 to a positive power, 0 by the power."""
    b, (x, p) = s.b, s.operands
    dx = dp = None
    if s.needed[0]:
        slope = b.mul(p, b.pow(x, b.sub(p, 1.0)))
        dx = b.mul(s.dy, b.where(b.eq(p, 0.0), 0.0, slope))
    if s.needed[1]:
        flat = b.and_(b.eq(x, 0.0), b.le(0.0, p))
        dp = b.mul(s.dy, b.where(flat, 0.0, b.mul(s.y, b.log(x))))
    return dx, dp


@rule("mod")
def mod(s: Step) -> Gradients:
    """x - floor(x / y) y, between its jumps."""
    b, (x, y) = s.b, s.operands
    return s.dy, b.neg(b.mul(s.dy, b.floor(b.div(x, y)))) if s.needed[1] else None


@rule("fmod")
def fmod(s: Step) -> Gradients:
    """x - trunc(x / y) y, between its jumps."""
    b, (x, y) = s.b, s.operands
    if not s.needed[1]:
        return s.dy, None
    q = b.div(x, y)
    whole = b.where(b.lt(q, 0.0), b.unary("ceil", q), b.floor(q))
    return s.dy, b.neg(b.mul(s.dy, whole))


@rule("max", "min")
def extreme(s: Step) -> Gradients:
    """Where both are equal each has a half; or the node's `tie` says how much of it is the first one's."""
    b, (x, y) = s.b, s.operands
    tie = float(s.node.attrs.get("tie", 0.5))
    less, more = (x, y) if s.node.op == "min" else (y, x)  # the first wins where less < more
    found: list[Value | None] = []
    for k, share in enumerate((tie, 1 - tie)):
        if not s.needed[k]:
            found.append(None)
        elif share == 0:
            found.append(b.where(_wins(s, k), s.dy, 0.0))
        elif share == 1:
            found.append(b.where(b.le(less, more) if k == 0 else b.le(more, less), s.dy, 0.0))
        else:
            found.append(b.where(_wins(s, k), s.dy, b.where(b.eq(x, y), b.mul(s.dy, share), 0.0)))
    return found


def _wins(s: Step, k: int) -> Value:
    """Whether operand `k` wins alone: told by the result where the other one is a constant, as max(0, x) > 0 where
    x > 0. The result is what others read, so the operand need not be saved too.
    """
    own, other = s.operands[k], s.operands[1 - k]
    seen = own if constant_of(other) is None else s.y
    return s.b.lt(other, seen) if s.node.op == "max" else s.b.lt(seen, other)


@rule("where")
def where(s: Step) -> Gradients:
    condition = s.operands[0]
    first = s.b.where(condition, s.dy, 0.0) if s.needed[1] else None
    return None, first, s.b.where(condition, 0.0, s.dy) if s.needed[2] else None


@rule("cast")
def cast(s: Step) -> Gradients:
    return [s.b.cast(s.dy, s.x.dtype)]


def zeros_like(b: Builder, x: Value) -> Value:
    """Zeros in the shape of a value."""
    return b.full(x.shape, b.scalar(0, x.dtype), x.dtype)
