"""Real functions of floats (float32, float64) that are no primitives, composed so that special values and the last
digits are right.
"""

from __future__ import annotations

import math

from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from onnxc.ops import common
from onnxc.primitives.builder import Builder

_INTEGER = {32: dtypes.int32, 64: dtypes.int64}


def copysign(b: Builder, x: Value, y: Value) -> Value:
    """The magnitude of x with the sign of y, that of a zero or NaN too."""
    size = b.abs(x)
    return b.where(common.negative(b, y), b.neg(size), size)


def hypot(b: Builder, x: Value, y: Value) -> Value:
    """sqrt(x^2 + y^2) without overflow: float32 in double precision, float64 divided by a power of two."""
    infinite = b.or_(b.one("isinf", x), b.one("isinf", y))
    if x.dtype is dtypes.float32:
        p, q = b.cast(x, dtypes.float64), b.cast(y, dtypes.float64)
        found = b.cast(b.sqrt(b.add(b.mul(p, p), b.mul(q, q))), x.dtype)
    else:
        p, q = b.abs(x), b.abs(y)
        high = b.max(p, q)
        scale = b.where(b.lt(1e150, high), 2.0**-600, b.where(b.lt(high, 1e-150), b.scalar(2.0**600, x.dtype), 1.0))
        p, q = b.mul(p, scale), b.mul(q, scale)
        found = b.div(b.sqrt(b.add(b.mul(p, p), b.mul(q, q))), scale)
    return b.derived(b.where(infinite, b.scalar(math.inf, x.dtype), found), "hypot", x, y)


def log1p(b: Builder, x: Value) -> Value:
    """log(u) x / (u - 1) for u = 1 + x: the rounding of u cancels out (Kahan). -0.0 stays what it is."""
    u = b.add(x, 1.0)
    d = b.sub(u, 1.0)
    same = b.or_(b.eq(d, 0.0), b.eq(u, math.inf))
    one = b.scalar(1.0, x.dtype)
    near = b.mul(b.log(u), b.div(x, b.where(same, one, d)))
    return b.derived(b.where(same, x, near), "log1p", x)


def expm1(b: Builder, x: Value) -> Value:
    """(u - 1) x / log(u) for u = exp(x): the rounding of u cancels out (Kahan). -0.0 stays what it is."""
    u = b.exp(x)
    d = b.sub(u, 1.0)
    same = b.eq(d, 0.0)
    # Where x is large, or -1 is all that is left, u - 1 has its digits.
    far = b.or_(b.lt(0.5, b.abs(x)), same)
    near = b.mul(d, b.div(x, b.where(far, b.scalar(1.0, x.dtype), b.log(u))))
    return b.derived(b.where(same, x, b.where(far, d, near)), "expm1", x)


def bits_of(b: Builder, x: Value) -> Value:
    """The bits of floats, as integers with a sign."""
    return b.bitcast(x, _INTEGER[x.dtype.bits])


def signbit(b: Builder, x: Value) -> Value:
    """Whether the sign bit is set: of -0.0 and of some NaN too."""
    return common.negative(b, x)


def isfinite(b: Builder, x: Value) -> Value:
    """Whether x is neither infinite nor NaN."""
    return b.lt(b.abs(x), math.inf)


def trunc(b: Builder, x: Value) -> Value:
    """x without its fraction."""
    return copysign(b, b.floor(b.abs(x)), x)


def nextafter(b: Builder, x: Value, y: Value) -> Value:
    """The neighbour of x toward y: one more or less, as integers, where signs are kept apart."""
    integer = _INTEGER[x.dtype.bits]
    bits = bits_of(b, x)
    away = b.eq(b.lt(x, y), b.lt(0.0, x))  # from zero
    step = b.add(bits, b.where(away, b.scalar(1, integer), b.scalar(-1, integer)))
    least = copysign(b, b.bitcast(b.scalar(1, integer), x.dtype), y)
    moved = b.where(b.eq(x, 0.0), least, b.bitcast(step, x.dtype))
    found = b.where(b.eq(x, y), y, moved)
    return b.where(b.or_(b.isnan(x), b.isnan(y)), b.scalar(math.nan, x.dtype), found)


def in_double(b: Builder, *xs: Value) -> list[Value]:
    """Values as float64."""
    return [b.cast(x, dtypes.float64) for x in xs]


def atan2(b: Builder, y: Value, x: Value) -> Value:
    """The angle of the point (x, y), by the arc of the lesser over the greater coordinate."""
    p, q = in_double(b, b.abs(x), b.abs(y))
    low, high = b.min(p, q), b.max(p, q)
    ratio = b.div(low, b.where(b.eq(high, 0.0), b.scalar(1.0, high.dtype), high))
    angle = b.one("atan", b.where(b.and_(b.eq(low, math.inf), b.eq(high, math.inf)), b.scalar(1.0, ratio.dtype), ratio))
    angle = b.where(b.lt(p, q), b.sub(math.pi / 2, angle), angle)
    angle = b.where(signbit(b, x), b.sub(math.pi, angle), angle)
    found = copysign(b, b.cast(angle, y.dtype), y)
    return b.derived(b.where(b.or_(b.isnan(x), b.isnan(y)), b.scalar(math.nan, y.dtype), found), "atan2", y, x)


def log2(b: Builder, x: Value) -> Value:
    """The exponent, and the logarithm of a mantissa near 1: exact for powers of two."""
    given = x
    (x,) = in_double(b, x)
    bits = bits_of(b, x)
    tiny = b.lt(bits, 1 << 52)  # subnormal, zero or negative
    bits = b.where(tiny, bits_of(b, b.mul(x, 2.0**54)), bits)
    near = 0x3FE6A09E667F3BCD  # the square root of a half: mantissas are between it and its double
    shifted = b.sub(bits, near)
    exponent = b.one("shr", shifted, b.scalar(52, dtypes.int64))
    mantissa = b.bitcast(b.sub(bits, b.one("shl", exponent, b.scalar(52, dtypes.int64))), dtypes.float64)
    exponent = b.sub(exponent, b.where(tiny, b.scalar(54, dtypes.int64), 0))
    found = b.add(b.cast(exponent, dtypes.float64), b.mul(b.log(mantissa), 1 / math.log(2)))
    plain = b.or_(b.le(x, 0.0), b.not_(isfinite(b, x)))
    return b.derived(b.cast(b.where(plain, b.log(x), found), given.dtype), "log2", given)


def log10(b: Builder, x: Value) -> Value:
    """The logarithm; a whole number where 10 to its power is x."""
    given = x
    (x,) = in_double(b, x)
    found = b.div(b.log(x), math.log(10))
    whole = b.round(found)
    exact = b.eq(b.pow(10.0, whole), x)
    found = b.where(b.and_(exact, isfinite(b, found)), whole, found)
    return b.derived(b.cast(found, given.dtype), "log10", given)


def logaddexp(b: Builder, x: Value, y: Value) -> Value:
    """log(exp(x) + exp(y)), the greater taken out."""
    high, low = b.max(x, y), b.min(x, y)
    near = b.add(high, log1p(b, b.exp(b.sub(low, high))))
    return b.derived(b.where(b.and_(b.eq(x, y), b.one("isinf", x)), x, near), "logaddexp", x, y)


def sign(b: Builder, x: Value) -> Value:
    """-1, 0 or 1; NaN for NaN."""
    zero = b.scalar(0, x.dtype)
    found = b.cast(b.lt(zero, x), x.dtype)
    if x.dtype.kind != "uint":
        found = b.sub(found, b.cast(b.lt(x, zero), x.dtype))
    return b.where(b.isnan(x), x, found) if x.dtype.is_float else found


def floor_divide(b: Builder, x: Value, y: Value) -> Value:
    """As Python divides.

    Where one of both is infinite it is the quotient, as the standard says (numpy says otherwise).
    """
    if x.dtype.kind == "uint":
        return b.div(x, y)
    found = common.floor_divide(b, x, y)
    if not x.dtype.is_float:
        return found
    return b.where(b.or_(b.one("isinf", x), b.one("isinf", y)), b.div(x, y), found)


def shift(b: Builder, op: str, x: Value, y: Value) -> Value:
    """A shift by as many bits as the type has, or more, leaves the sign (right) or nothing."""
    bits = x.dtype.bits
    room = b.clip(y, 0, bits - 1)
    found = b.one(op, x, room)
    if op == "shr" and x.dtype.kind == "int":
        return found
    return b.where(b.le(bits, y), b.scalar(0, x.dtype), found)


def truth(b: Builder, x: Value) -> Value:
    """Whether each element is not zero; NaN is not."""
    return x if x.dtype is dtypes.boolean else b.not_(b.eq(x, b.scalar(0, x.dtype)))


def ordered(b: Builder, x: Value) -> Value:
    """Bools as integers, of which one is less than the other."""
    return b.cast(x, dtypes.uint8) if x.dtype is dtypes.boolean else x
