"""Pointwise ATen ops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as Promotion

from onnxc.frontends.torch_fx_table import Call, Operand, aten, computed_in, named, saturates
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import always_equal
from onnxc.ir.graph import Value
from onnxc.ops import cast, common, reals
from onnxc.ops.common import negative
from onnxc.primitives.builder import Builder

_FLOAT_UNARY = (
    "exp", "log", "sqrt", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh",
    "atanh", "erf",
)  # fmt: skip
_UNARY = ("abs", "neg")
_ROUNDING = ("floor", "ceil", "round")
_ON_BOOLS = {"add": "or", "mul": "and", "max": "or", "min": "and"}


def _float_unary(name: str) -> Callable[[Call, Value], Value]:
    return lambda c, x: c.b.one(name, *c.floats(x))


def _unary(name: str) -> Callable[[Call, Value], Value]:
    return lambda c, x: x if x.dtype is dtypes.boolean else c.b.one(name, *c.promoted(x))


def _rounding(name: str) -> Callable[[Call, Value], Value]:
    return lambda c, x: c.b.one(name, *c.promoted(x)) if x.dtype.is_float else x


for _name in _FLOAT_UNARY:
    aten(_name)(_float_unary(_name))
for _name in _UNARY:
    aten(_name)(_unary(_name))
for _name in _ROUNDING:
    aten(_name)(_rounding(_name))
aten("_neg_view")(_unary("neg"))  # what the imaginary part of a conjugate is


@aten("round.decimals")
def round_decimals(c: Call, x: Value, *, decimals: int) -> Value:
    b, scale = c.b, 10.0 ** abs(decimals)
    if not x.dtype.is_float or decimals == 0:
        return _rounding("round")(c, x)
    (x,) = c.promoted(x)
    return b.div(b.round(b.mul(x, scale)), scale) if decimals > 0 else b.mul(b.round(b.div(x, scale)), scale)


@aten("sign", "sgn")
def sign(c: Call, x: Value) -> Value:
    """0 for NaN."""
    b, zero = c.b, c.b.scalar(0, x.dtype)
    if x.dtype is dtypes.boolean:
        return x
    return b.sub(b.cast(b.lt(zero, x), x.dtype), b.cast(b.lt(x, zero), x.dtype))


@aten("trunc")
def trunc(c: Call, x: Value) -> Value:
    if not x.dtype.is_float:
        return x
    (x,) = c.promoted(x)
    return c.b.where(negative(c.b, x), c.b.one("ceil", x), c.b.floor(x))


@aten("signbit")
def signbit(c: Call, x: Value) -> Value:
    return negative(c.b, x) if x.dtype.is_float else c.b.lt(*c.promoted(x, 0))


@aten("rsqrt")
def rsqrt(c: Call, x: Value) -> Value:
    return c.b.div(1.0, c.b.sqrt(*c.floats(x)))


@aten("reciprocal")
def reciprocal(c: Call, x: Value) -> Value:
    return c.b.div(1.0, *c.floats(x))


@aten("log2")
def log2(c: Call, x: Value) -> Value:
    return c.b.mul(c.b.log(*c.floats(x)), 1 / math.log(2))


@aten("log10")
def log10(c: Call, x: Value) -> Value:
    return c.b.mul(c.b.log(*c.floats(x)), 1 / math.log(10))


@aten("exp2")
def exp2(c: Call, x: Value) -> Value:
    """By a power, which is exact for whole numbers."""
    return c.b.pow(2.0, *c.floats(x))


@aten("log1p")
def log1p(c: Call, x: Value) -> Value:
    return reals.log1p(c.b, *c.floats(x))


@aten("expm1")
def expm1(c: Call, x: Value) -> Value:
    return reals.expm1(c.b, *c.floats(x))


@aten("sigmoid")
def sigmoid(c: Call, x: Value) -> Value:
    return c.b.sigmoid(*c.floats(x))


@aten("relu")
def relu(c: Call, x: Value) -> Value:
    x, zero = c.promoted(x, 0)
    return c.b.max(x, zero)


@aten("silu")
def silu(c: Call, x: Value) -> Value:
    (x,) = c.floats(x)
    return c.b.mul(x, c.b.sigmoid(x))


@aten("gelu")
def gelu(c: Call, x: Value, *, approximate: str = "none") -> Value:
    (y,) = c.onnx("Gelu", *c.floats(x), approximate=approximate)
    return y  # type: ignore[no-any-return]


@aten("hardtanh")
def hardtanh(c: Call, x: Value, low: float = -1.0, high: float = 1.0) -> Value:
    return clamp(c, x, low, high)


@aten("leaky_relu")
def leaky_relu(c: Call, x: Value, slope: float = 0.01) -> Value:
    (x,) = c.promoted(x)
    return c.b.where(c.b.lt(0.0, x), x, c.b.mul(x, slope))


@aten("elu")
def elu(c: Call, x: Value, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Value:
    b, (x,) = c.b, c.floats(x)
    low = b.mul(expm1(c, b.mul(x, input_scale)), alpha * scale)
    return b.where(b.le(x, 0.0), low, b.mul(x, scale))


# ---------------------------------------------------------------- two operands


def _binary(c: Call, op: str, x: Operand, y: Operand) -> Value:
    x, y = c.promoted(x, y)
    y = _narrow(c.b, y, x)
    x = _narrow(c.b, x, y)
    return c.b.one(_ON_BOOLS[op] if x.dtype is dtypes.boolean and op in _ON_BOOLS else op, x, y)


def _narrow(b: Builder, x: Value, beside: Value) -> Value:
    """The number of which `x` is made (by full_like, say) beside a tensor of its shape: then constants fold."""
    node = x.node
    if node is None or node.op != "expand" or node.operands[0].t.size != 1 or x.rank != beside.rank:
        return x
    alike = all(always_equal(a, d) for a, d in zip(x.shape, beside.shape, strict=True))
    return b.reshape(node.operands[0], ()) if alike else x


@aten("add.Tensor", "add.Scalar")
def add(c: Call, x: Operand, y: Operand, alpha: float = 1) -> Value:
    return _binary(c, "add", x, y if alpha == 1 else _scaled(c, x, y, alpha))


@aten("sub.Tensor", "sub.Scalar")
def sub(c: Call, x: Operand, y: Operand, alpha: float = 1) -> Value:
    return _binary(c, "sub", x, y if alpha == 1 else _scaled(c, x, y, alpha))


@aten("rsub.Tensor", "rsub.Scalar")
def rsub(c: Call, x: Operand, y: Operand, alpha: float = 1) -> Value:
    return sub(c, y, x, alpha)


def _scaled(c: Call, x: Operand, y: Operand, alpha: float) -> Value:
    dtype = computed_in(Promotion.DEFAULT, x, y)
    return c.b.mul(c.operand(y, dtype), alpha)


@aten("mul.Tensor", "mul.Scalar")
def mul(c: Call, x: Operand, y: Operand) -> Value:
    return _binary(c, "mul", x, y)


@named("prims.fma.default")  # which is there only once TorchInductor has been imported
def fma(c: Call, x: Value, y: Value, z: Value) -> Value:
    """x * y + z."""
    x, y, z = c.promoted(x, y, z)
    return c.b.add(c.b.mul(x, y), z)


@aten("div.Tensor", "div.Scalar", "true_divide.Tensor")
def div(c: Call, x: Operand, y: Operand) -> Value:
    return c.b.div(*c.floats(x, y))


@aten("div.Tensor_mode", "div.Scalar_mode")
def div_mode(c: Call, x: Operand, y: Operand, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return div(c, x, y)
    a, d = c.promoted(x, y)
    if rounding_mode == "floor":
        return common.floor_divide(c.b, a, d)
    return c.b.div(a, d) if a.dtype.is_integer else trunc(c, c.b.div(a, d))


@aten("floor_divide")
def floor_divide(c: Call, x: Operand, y: Operand) -> Value:
    return common.floor_divide(c.b, *c.promoted(x, y))


@aten("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def remainder(c: Call, x: Operand, y: Operand) -> Value:
    return c.b.binary("mod", *c.promoted(x, y))


@aten("fmod.Tensor", "fmod.Scalar")
def fmod(c: Call, x: Operand, y: Operand) -> Value:
    return c.b.binary("fmod", *c.promoted(x, y))


_POWERS: dict[float, Callable[[Builder, Value], Value]] = {
    1: lambda b, x: x,
    2: lambda b, x: b.mul(x, x),
    3: lambda b, x: b.mul(b.mul(x, x), x),
    0.5: lambda b, x: b.sqrt(x),
    -0.5: lambda b, x: b.div(1.0, b.sqrt(x)),
    -1: lambda b, x: b.div(1.0, x),
    -2: lambda b, x: b.div(1.0, b.mul(x, x)),
}


@aten("pow.Tensor_Tensor", "pow.Scalar", "pow.Tensor_Scalar")
def pow(c: Call, x: Operand, y: Operand) -> Value:
    a, e = c.promoted(x, y)
    if isinstance(y, (int, float)) and a.dtype.is_float and y in _POWERS:
        return _POWERS[y](c.b, a)
    if isinstance(y, int) and a.dtype.is_integer and y in (1, 2, 3):
        return _POWERS[y](c.b, a)
    return c.b.pow(a, e)


@aten("maximum")
def maximum(c: Call, x: Value, y: Value) -> Value:
    return _binary(c, "max", x, y)


@aten("minimum")
def minimum(c: Call, x: Value, y: Value) -> Value:
    return _binary(c, "min", x, y)


@aten("clamp", "clamp.Tensor")
def clamp(c: Call, x: Value, low: Operand | None = None, high: Operand | None = None) -> Value:
    given = [v for v in (low, high) if v is not None]
    x, *limits = c.promoted(x, *given)
    x = x if low is None else c.b.max(x, limits[0])
    return x if high is None else c.b.min(x, limits[-1])


@aten("clamp_min", "clamp_min.Tensor")
def clamp_min(c: Call, x: Value, low: Operand) -> Value:
    return clamp(c, x, low, None)


@aten("clamp_max", "clamp_max.Tensor")
def clamp_max(c: Call, x: Value, high: Operand) -> Value:
    return clamp(c, x, None, high)


def _of_numbers(op: str) -> Callable[[Call, Value, Value], Value]:
    """The greater or lesser one; where one is NaN, the other."""

    def rule(c: Call, x: Value, y: Value) -> Value:
        x, y = c.promoted(x, y)
        if not x.dtype.is_float:
            return _binary(c, op, x, y)
        return c.b.where(c.b.isnan(x), y, c.b.where(c.b.isnan(y), x, c.b.binary(op, x, y)))

    return rule


aten("fmax")(_of_numbers("max"))
aten("fmin")(_of_numbers("min"))


@aten("copysign.Tensor", "copysign.Scalar")
def copysign(c: Call, x: Value, y: Operand) -> Value:
    return reals.copysign(c.b, *c.floats(x, y))


@aten("hypot")
def hypot(c: Call, x: Value, y: Value) -> Value:
    return reals.hypot(c.b, *c.promoted(x, y))


@aten("angle")
def angle(c: Call, x: Value) -> Value:
    """Of a real number: pi where it is negative."""
    b, (x,) = c.b, c.floats(x)
    return b.where(b.isnan(x), x, b.where(b.lt(x, 0.0), b.scalar(math.pi, x.dtype), 0.0))


@aten("atan2")
def atan2(c: Call, y: Value, x: Value) -> Value:
    b, (y, x) = c.b, c.floats(y, x)
    ax, ay = b.abs(x), b.abs(y)
    low, high = b.min(ax, ay), b.max(ax, ay)
    ratio = b.div(low, b.where(b.eq(high, 0.0), 1.0, high))
    angle = b.one("atan", b.where(b.and_(b.eq(low, math.inf), b.eq(high, math.inf)), 1.0, ratio))
    angle = b.where(b.lt(ax, ay), b.sub(math.pi / 2, angle), angle)
    angle = b.where(negative(b, x), b.sub(math.pi, angle), angle)
    angle = b.where(negative(b, y), b.neg(angle), angle)
    return b.where(b.or_(b.isnan(x), b.isnan(y)), math.nan, angle)


# ---------------------------------------------------------------- comparisons, logic, bits


def _compare(op: str, swapped: bool, negated: bool) -> Callable[[Call, Operand, Operand], Value]:
    def rule(c: Call, x: Operand, y: Operand) -> Value:
        x, y = c.promoted(x, y)
        if x.dtype is dtypes.boolean:
            x, y = c.b.cast(x, dtypes.uint8), c.b.cast(y, dtypes.uint8)
        y = _narrow(c.b, y, x)
        x = _narrow(c.b, x, y)
        found = c.b.one(op, y, x) if swapped else c.b.one(op, x, y)
        return c.b.not_(found) if negated else found

    return rule


for _name, _rule in {
    "eq": _compare("eq", False, False), "ne": _compare("eq", False, True), "lt": _compare("lt", False, False),
    "le": _compare("le", False, False), "gt": _compare("lt", True, False), "ge": _compare("le", True, False),
}.items():  # fmt: skip
    aten(f"{_name}.Tensor", f"{_name}.Scalar")(_rule)


def truth(b: Builder, x: Value) -> Value:
    """Whether each element is not zero; NaN is not."""
    return x if x.dtype is dtypes.boolean else b.not_(b.eq(x, b.scalar(0, x.dtype)))


@aten("logical_not")
def logical_not(c: Call, x: Value) -> Value:
    return c.b.not_(truth(c.b, x))


def _logical(op: str) -> Callable[[Call, Value, Value], Value]:
    return lambda c, x, y: c.b.one(op, truth(c.b, x), truth(c.b, y))


for _name in ("and", "or", "xor"):
    aten(f"logical_{_name}")(_logical(_name))


def _bitwise(op: str) -> Callable[[Call, Operand, Operand], Value]:
    def rule(c: Call, x: Operand, y: Operand) -> Value:
        x, y = c.promoted(x, y)
        return c.b.one(op if x.dtype is dtypes.boolean else f"bit{op}", x, y)

    return rule


for _name in ("and", "or", "xor"):
    aten(f"bitwise_{_name}.Tensor", f"bitwise_{_name}.Scalar", f"bitwise_{_name}.Scalar_Tensor")(_bitwise(_name))


@aten("bitwise_not")
def bitwise_not(c: Call, x: Value) -> Value:
    return c.b.not_(x) if x.dtype is dtypes.boolean else c.b.one("bitnot", x)


def _shift(op: str) -> Callable[[Call, Operand, Operand], Value]:
    """By a negative number of bits, or as many as there are: all move out; the sign moves in from the left."""

    def rule(c: Call, x: Operand, y: Operand) -> Value:
        b, (x, y) = c.b, c.promoted(x, y)
        bits, zero = b.scalar(x.dtype.bits, x.dtype), b.scalar(0, x.dtype)
        inside = b.and_(b.le(zero, y), b.lt(y, bits))
        moved = b.one(op, x, b.where(inside, y, b.scalar(x.dtype.bits - 1, x.dtype)))
        return moved if op == "shr" and x.dtype.kind == "int" else b.where(inside, moved, zero)

    return rule


for _name, _rule in {"left": _shift("shl"), "right": _shift("shr")}.items():
    aten(*(f"bitwise_{_name}_shift.{kind}" for kind in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")))(_rule)
    aten(f"__{_name[0]}shift__.Tensor", f"__{_name[0]}shift__.Scalar")(_rule)


@aten("isnan")
def isnan(c: Call, x: Value) -> Value:
    return c.b.isnan(x) if x.dtype.is_float else c.b.full(x.shape, False, dtypes.boolean)


@aten("isinf")
def isinf(c: Call, x: Value) -> Value:
    return c.b.one("isinf", x) if x.dtype.is_float else c.b.full(x.shape, False, dtypes.boolean)


@aten("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def where(c: Call, condition: Value, x: Operand, y: Operand) -> Value:
    x, y = (_narrow(c.b, c.operand(v, c.type.dtype), condition) for v in (x, y))
    return c.b.where(truth(c.b, condition), x, y)


@aten("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(c: Call, x: Value, mask: Value, value: Operand) -> Value:
    return c.b.where(mask, c.operand(value, x.dtype), x)


# ---------------------------------------------------------------- dtypes


@aten("_to_copy", "clone", "alias", "detach", "lift_fresh_copy", "to.dtype", "contiguous", "copy")
def convert(c: Call, x: Operand, *rest: Any, **options: Any) -> Value:
    """The result has the dtype that PyTorch says; `copy` takes the values of its second argument. (`vmap` converts
    numbers too.)
    """
    if not isinstance(x, Value):
        return c.operand(x, c.type.dtype)
    source = rest[0] if rest and isinstance(rest[0], Value) else x
    return _cast(c, c.b.expand(source, x.shape), c.type.dtype)


@aten("prims.convert_element_type")
def convert_element_type(c: Call, x: Value, dtype: Any) -> Value:
    return _cast(c, x, c.type.dtype)


def _cast(c: Call, x: Value, dtype: DType) -> Value:
    return truth(c.b, x) if dtype is dtypes.boolean else cast.convert(c.b, x, dtype, saturates(dtype))
