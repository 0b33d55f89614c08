"""Functions of each element: arithmetic, comparisons, logic, bits, rounding, elementary functions."""

from __future__ import annotations

import builtins
from collections.abc import Callable

from onnxc.array.core import Array, call
from onnxc.array_api.data_types import Scalar, array, astype, is_kind, is_number, number, promoted, result_type, same
from onnxc.ir import dtypes
from onnxc.ir.expr import Expr
from onnxc.ir.graph import Value
from onnxc.ops import complexes, numbers, reals
from onnxc.primitives.builder import Builder
from onnxc.primitives.pairs import Complex, Number

Operand = Array | Scalar
_FLOATS = ("real floating", "complex floating")
_REAL = ("integral", "real floating")
_BITS = ("bool", "integral")


# ---------------------------------------------------------------- rules: the meaning of each name


_PRIMITIVES = {
    "exp": "exp", "log": "log", "sqrt": "sqrt", "sin": "sin", "cos": "cos", "tan": "tan", "asin": "asin",
    "acos": "acos", "atan": "atan", "sinh": "sinh", "cosh": "cosh", "tanh": "tanh", "asinh": "asinh", "acosh": "acosh",
    "atanh": "atanh", "bitwise_invert": "bitnot", "logical_not": "not", "add": "add", "subtract": "sub",
    "multiply": "mul", "divide": "div", "pow": "pow", "remainder": "mod", "bitwise_and": "bitand",
    "bitwise_or": "bitor", "bitwise_xor": "bitxor", "logical_and": "and", "logical_or": "or", "logical_xor": "xor",
    "maximum": "max", "minimum": "min", "equal": "eq", "less": "lt", "less_equal": "le",
}  # fmt: skip
_ON_BOOLS = {"bitand": "and", "bitor": "or", "bitxor": "xor", "bitnot": "not"}
_BOTH: dict[str, Callable[..., Number]] = {  # of real and complex numbers
    "negative": numbers.neg, "square": lambda b, x: numbers.mul(b, x, x), "abs": numbers.absolute,
    "reciprocal": complexes.reciprocal, "isnan": complexes.isnan, "isinf": complexes.isinf,
    "isfinite": complexes.isfinite, "add": numbers.add, "subtract": numbers.sub, "multiply": numbers.mul,
    "divide": numbers.div, "equal": numbers.eq, "not_equal": lambda b, x, y: b.not_(numbers.eq(b, x, y)),
}  # fmt: skip
_REALS: dict[str, Callable[..., Value]] = {
    "sign": reals.sign, "signbit": reals.signbit, "expm1": reals.expm1, "log1p": reals.log1p, "log2": reals.log2,
    "log10": reals.log10, "floor": lambda b, x: b.floor(x), "ceil": lambda b, x: b.unary("ceil", x),
    "round": lambda b, x: b.round(x), "trunc": reals.trunc, "atan2": reals.atan2, "copysign": reals.copysign,
    "hypot": reals.hypot, "logaddexp": reals.logaddexp, "nextafter": reals.nextafter,
    "floor_divide": reals.floor_divide,
    "bitwise_left_shift": lambda b, x, y: reals.shift(b, "shl", x, y),
    "bitwise_right_shift": lambda b, x, y: reals.shift(b, "shr", x, y),
}  # fmt: skip


def _pointwise(b: Builder, *xs: Number, op: str) -> Number:
    """The function of the standard that `op` names, of operands of one dtype."""
    if op in _BOTH:
        return _BOTH[op](b, *xs)
    if builtins.any(isinstance(x, Complex) for x in xs):
        return complexes.FUNCTIONS[op](b, *xs)
    values = [numbers.real(x) for x in xs]
    if op in _REALS:
        return _REALS[op](b, *values)
    primitive = _PRIMITIVES[op]
    if values[0].dtype is dtypes.boolean:
        primitive = _ON_BOOLS.get(primitive, primitive)
        if primitive in ("lt", "le"):
            values = [reals.ordered(b, v) for v in values]
    return b.one(primitive, *values)


def _unary(op: str, x: Array, *kinds: str) -> Array:
    return call(_pointwise, array(x, op, *kinds), name=op, op=op)  # type: ignore[no-any-return]


def _binary(op: str, x1: Operand, x2: Operand, *kinds: str) -> Array:
    return call(_pointwise, *promoted(op, x1, x2, kinds=kinds), name=op, op=op)  # type: ignore[no-any-return]


# ---------------------------------------------------------------- elementary functions


def exp(x: Array, /) -> Array:
    return _unary("exp", x, *_FLOATS)


def expm1(x: Array, /) -> Array:
    """exp(x) - 1 without the loss of digits near zero."""
    return _unary("expm1", x, *_FLOATS)


def log(x: Array, /) -> Array:
    return _unary("log", x, *_FLOATS)


def log1p(x: Array, /) -> Array:
    """log(1 + x) without the loss of digits near zero."""
    return _unary("log1p", x, *_FLOATS)


def log2(x: Array, /) -> Array:
    return _unary("log2", x, *_FLOATS)


def log10(x: Array, /) -> Array:
    return _unary("log10", x, *_FLOATS)


def sqrt(x: Array, /) -> Array:
    return _unary("sqrt", x, *_FLOATS)


def sin(x: Array, /) -> Array:
    return _unary("sin", x, *_FLOATS)


def cos(x: Array, /) -> Array:
    return _unary("cos", x, *_FLOATS)


def tan(x: Array, /) -> Array:
    return _unary("tan", x, *_FLOATS)


def asin(x: Array, /) -> Array:
    return _unary("asin", x, *_FLOATS)


def acos(x: Array, /) -> Array:
    return _unary("acos", x, *_FLOATS)


def atan(x: Array, /) -> Array:
    return _unary("atan", x, *_FLOATS)


def sinh(x: Array, /) -> Array:
    return _unary("sinh", x, *_FLOATS)


def cosh(x: Array, /) -> Array:
    return _unary("cosh", x, *_FLOATS)


def tanh(x: Array, /) -> Array:
    return _unary("tanh", x, *_FLOATS)


def asinh(x: Array, /) -> Array:
    return _unary("asinh", x, *_FLOATS)


def acosh(x: Array, /) -> Array:
    return _unary("acosh", x, *_FLOATS)


def atanh(x: Array, /) -> Array:
    return _unary("atanh", x, *_FLOATS)


def atan2(x1: Operand, x2: Operand, /) -> Array:
    """The angle of the point (x2, x1), from -pi to pi."""
    return _binary("atan2", x1, x2, "real floating")


def hypot(x1: Operand, x2: Operand, /) -> Array:
    """sqrt(x1^2 + x2^2) without overflow."""
    return _binary("hypot", x1, x2, "real floating")


def logaddexp(x1: Operand, x2: Operand, /) -> Array:
    """log(exp(x1) + exp(x2)) without overflow."""
    return _binary("logaddexp", x1, x2, "real floating")


# ---------------------------------------------------------------- arithmetic


def add(x1: Operand, x2: Operand, /) -> Array:
    return _binary("add", x1, x2, "numeric")


def subtract(x1: Operand, x2: Operand, /) -> Array:
    return _binary("subtract", x1, x2, "numeric")


def multiply(x1: Operand, x2: Operand, /) -> Array:
    return _binary("multiply", x1, x2, "numeric")


def divide(x1: Operand, x2: Operand, /) -> Array:
    """The quotient of floats; integers divide by `floor_divide`."""
    return _binary("divide", x1, x2, *_FLOATS)


def floor_divide(x1: Operand, x2: Operand, /) -> Array:
    """The quotient rounded down. An integer divided by zero is an error of the run."""
    return _binary("floor_divide", x1, x2, *_REAL)


def remainder(x1: Operand, x2: Operand, /) -> Array:
    """The remainder with the sign of x2. That of an integer by zero is an error of the run."""
    return _binary("remainder", x1, x2, *_REAL)


def pow(x1: Operand, x2: Operand, /) -> Array:
    """x1 to the power x2; of integers modulo 2^bits."""
    if isinstance(x2, int) and x2 < 0 and is_number(x1):
        x2 = float(x2)  # as Python
    return _binary("pow", x1, x2, "numeric")


def negative(x: Array, /) -> Array:
    return _unary("negative", x, "numeric")


def positive(x: Array, /) -> Array:
    return same(array(x, "positive", "numeric"))


def abs(x: Array, /) -> Array:
    return _unary("abs", x, "numeric")


def square(x: Array, /) -> Array:
    return _unary("square", x, "numeric")


def reciprocal(x: Array, /) -> Array:
    return _unary("reciprocal", x, *_FLOATS)


def sign(x: Array, /) -> Array:
    """-1, 0 or 1; x / |x| of a complex number; NaN for NaN."""
    return _unary("sign", x, "numeric")


def copysign(x1: Operand, x2: Operand, /) -> Array:
    """The magnitude of x1 with the sign of x2."""
    return _binary("copysign", x1, x2, "real floating")


def nextafter(x1: Operand, x2: Operand, /) -> Array:
    """The float next to x1 in the direction of x2."""
    return _binary("nextafter", x1, x2, "real floating")


def maximum(x1: Operand, x2: Operand, /) -> Array:
    """The greater; NaN where either is NaN."""
    return _binary("maximum", x1, x2, *_REAL)


def minimum(x1: Operand, x2: Operand, /) -> Array:
    """The lesser; NaN where either is NaN."""
    return _binary("minimum", x1, x2, *_REAL)


def clip(x: Array, /, min: Operand | Expr | None = None, max: Operand | Expr | None = None) -> Array:
    """Limited to [min, max], in the dtype of x; NaN where x or a limit is."""
    x = array(x, "clip", *_REAL)
    for name, limit in (("max", min), ("min", max)):
        if limit is None:
            continue
        if isinstance(limit, Expr):
            limit = array(limit, "clip")
        if isinstance(limit, Array):
            result_type(x, limit)  # of kinds that mix
            bound = astype(limit, x.dtype, copy=False)
        else:
            bound = number(limit, promoted("clip", x, limit)[0].dtype)
        x = call(_limited, x, bound, name="clip", op=name)
    return same(x)


def _limited(b: Builder, x: Value, bound: Value, *, op: str) -> Value:
    """The derivative by x is 1 at the bound, as that of Clip."""
    return b.max(x, bound, tie=1.0) if op == "max" else b.min(x, bound, tie=1.0)


# ---------------------------------------------------------------- rounding


def _rounded(op: str, x: Array, *kinds: str) -> Array:
    """Integers are whole already."""
    x = array(x, op, *kinds)
    return same(x) if is_kind(x.dtype, "integral") else _unary(op, x)


def floor(x: Array, /) -> Array:
    return _rounded("floor", x, *_REAL)


def ceil(x: Array, /) -> Array:
    return _rounded("ceil", x, *_REAL)


def trunc(x: Array, /) -> Array:
    return _rounded("trunc", x, *_REAL)


def round(x: Array, /) -> Array:
    """To the nearest integer, halves to even; both parts of a complex number."""
    return _rounded("round", x, "numeric")


# ---------------------------------------------------------------- comparisons, logic, bits


def equal(x1: Operand, x2: Operand, /) -> Array:
    return _binary("equal", x1, x2)


def not_equal(x1: Operand, x2: Operand, /) -> Array:
    return _binary("not_equal", x1, x2)


def less(x1: Operand, x2: Operand, /) -> Array:
    return _binary("less", x1, x2, *_REAL)


def less_equal(x1: Operand, x2: Operand, /) -> Array:
    return _binary("less_equal", x1, x2, *_REAL)


def greater(x1: Operand, x2: Operand, /) -> Array:
    return less(x2, x1)


def greater_equal(x1: Operand, x2: Operand, /) -> Array:
    return less_equal(x2, x1)


def logical_and(x1: Operand, x2: Operand, /) -> Array:
    return _binary("logical_and", x1, x2, "bool")


def logical_or(x1: Operand, x2: Operand, /) -> Array:
    return _binary("logical_or", x1, x2, "bool")


def logical_xor(x1: Operand, x2: Operand, /) -> Array:
    return _binary("logical_xor", x1, x2, "bool")


def logical_not(x: Array, /) -> Array:
    return _unary("logical_not", x, "bool")


def bitwise_and(x1: Operand, x2: Operand, /) -> Array:
    return _binary("bitwise_and", x1, x2, *_BITS)


def bitwise_or(x1: Operand, x2: Operand, /) -> Array:
    return _binary("bitwise_or", x1, x2, *_BITS)


def bitwise_xor(x1: Operand, x2: Operand, /) -> Array:
    return _binary("bitwise_xor", x1, x2, *_BITS)


def bitwise_invert(x: Array, /) -> Array:
    return _unary("bitwise_invert", x, *_BITS)


def bitwise_left_shift(x1: Operand, x2: Operand, /) -> Array:
    """Bits moved out are lost; x2 is not negative."""
    return _binary("bitwise_left_shift", x1, x2, "integral")


def bitwise_right_shift(x1: Operand, x2: Operand, /) -> Array:
    """The sign moves in; x2 is not negative."""
    return _binary("bitwise_right_shift", x1, x2, "integral")


def _tested(op: str, x: Array) -> Array:
    """Of integers nothing is NaN or infinite."""
    x = array(x, op, "numeric")
    if is_kind(x.dtype, "integral"):
        return call(_everywhere, x, name=op, value=op == "isfinite")  # type: ignore[no-any-return]
    return _unary(op, x)


def _everywhere(b: Builder, x: Value, *, value: builtins.bool) -> Value:
    return b.full(x.shape, value, dtypes.boolean)


def isnan(x: Array, /) -> Array:
    return _tested("isnan", x)


def isinf(x: Array, /) -> Array:
    return _tested("isinf", x)


def isfinite(x: Array, /) -> Array:
    return _tested("isfinite", x)


def signbit(x: Array, /) -> Array:
    """Whether the sign bit is set: also of -0.0 and of some NaN."""
    return _unary("signbit", x, "real floating")


# ---------------------------------------------------------------- parts of complex numbers


def _part(b: Builder, x: Number, *, part: str) -> Number:
    if part == "conj":
        return numbers.conj(b, x)
    if isinstance(x, Complex):
        return x.re if part == "real" else x.im
    return x if part == "real" else b.full(x.shape, 0, x.dtype)


def _of_parts(part: str, x: Array) -> Array:
    x = array(x, part, "numeric")
    if part != "imag" and not is_kind(x.dtype, "complex floating"):
        return same(x)
    return call(_part, x, name=part, part=part)  # type: ignore[no-any-return]


def conj(x: Array, /) -> Array:
    return _of_parts("conj", x)


def real(x: Array, /) -> Array:
    return _of_parts("real", x)


def imag(x: Array, /) -> Array:
    return _of_parts("imag", array(x, "imag", "complex floating"))
