"""Real functions of floats (float32, float64) that are no primitives, composed so that special values and the last
digits are right.
"""

from __future__ import annotations

import math

from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from onnxc.ops.common import negative
from onnxc.primitives.builder import Builder


def copysign(b: Builder, x: Value, y: Value) -> Value:
    """The magnitude of x with the sign of y, that of a zero or NaN too."""
    size = b.abs(x)
    return b.where(negative(b, y), b.neg(size), size)


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
    return b.where(infinite, b.scalar(math.inf, x.dtype), found)


def log1p(b: Builder, x: Value) -> Value:
    """log(u) x / (u - 1) for u = 1 + x: the rounding of u cancels out (Kahan). -0.0 stays what it is."""
    u = b.add(x, 1.0)
    d = b.sub(u, 1.0)
    same = b.or_(b.eq(d, 0.0), b.eq(u, math.inf))
    one = b.scalar(1.0, x.dtype)
    near = b.mul(b.log(u), b.div(x, b.where(same, one, d)))
    return b.where(same, x, near)


def expm1(b: Builder, x: Value) -> Value:
    """(u - 1) x / log(u) for u = exp(x): the rounding of u cancels out (Kahan). -0.0 stays what it is."""
    u = b.exp(x)
    d = b.sub(u, 1.0)
    same = b.eq(d, 0.0)
    # Where x is large, or -1 is all that is left, u - 1 has its digits.
    far = b.or_(b.lt(0.5, b.abs(x)), same)
    near = b.mul(d, b.div(x, b.where(far, b.scalar(1.0, x.dtype), b.log(u))))
    return b.where(same, x, b.where(far, d, near))
