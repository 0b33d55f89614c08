"""Elementary functions of complex numbers, as pairs of real values (Kahan, "Branch cuts for complex elementary
functions").

Special values (infinities, NaN, signs of zeros) are those of C's Annex G, which the standard repeats: where the formula
does not give them, a table of what it takes at infinity does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from onnxc.ops import numbers, reals
from onnxc.ops.numbers import parts
from onnxc.primitives.builder import Builder
from onnxc.primitives.pairs import Complex, Number


def isnan(b: Builder, x: Number) -> Value:
    return numbers.isnan(b, x)


def isinf(b: Builder, x: Number) -> Value:
    found = [b.one("isinf", p) for p in parts(x)]
    return b.or_(*found) if len(found) == 2 else found[0]


def isfinite(b: Builder, x: Number) -> Value:
    found = [reals.isfinite(b, p) for p in parts(x)]
    return b.and_(*found) if len(found) == 2 else found[0]


def reciprocal(b: Builder, x: Number) -> Number:
    one = b.full(x.shape, 1.0, numbers.part_type(x.dtype))
    return numbers.div(b, one, x)


def _like(b: Builder, x: Value, value: float) -> Value:
    return b.full(x.shape, value, x.dtype)


def sign(b: Builder, x: Complex) -> Number:
    """x / |x|; 0 for zero."""
    zero = b.scalar(0.0, x.re.dtype)
    return numbers.where(b, numbers.eq(b, x, zero), zero, numbers.phase(b, x))


def sinh(b: Builder, x: Complex) -> Complex:
    """sinh re cos im + i cosh re sin im."""
    re = _times(b, b.unary("sinh", x.re), b.unary("cos", x.im))
    im = _times(b, b.unary("cosh", x.re), b.unary("sin", x.im))
    huge, lost = b.one("isinf", x.re), b.not_(reals.isfinite(b, x.im))
    re = b.where(b.and_(huge, lost), x.re, re)
    re = b.where(b.and_(b.eq(x.re, 0.0), lost), x.re, re)
    return Complex(re, b.where(b.isnan(x.re), b.where(b.eq(x.im, 0.0), x.im, im), im))


def cosh(b: Builder, x: Complex) -> Complex:
    """cosh re cos im + i sinh re sin im."""
    re = _times(b, b.unary("cosh", x.re), b.unary("cos", x.im))
    im = _times(b, b.unary("sinh", x.re), b.unary("sin", x.im))
    huge, lost = b.one("isinf", x.re), b.not_(reals.isfinite(b, x.im))
    re = b.where(b.and_(huge, lost), b.abs(x.re), re)
    flat = b.or_(b.eq(x.im, 0.0), b.eq(x.re, 0.0))
    return Complex(re, b.where(b.and_(flat, b.or_(b.isnan(x.re), lost)), _like(b, x.re, 0.0), im))


def _times(b: Builder, x: Value, y: Value) -> Value:
    """A product in which a zero stays zero beside an infinity."""
    zero = b.or_(b.eq(x, 0.0), b.eq(y, 0.0))
    infinite = b.or_(b.one("isinf", x), b.one("isinf", y))
    signed = b.mul(reals.copysign(b, _like(b, x, 1.0), x), reals.copysign(b, _like(b, y, 1.0), y))
    return b.where(b.and_(zero, infinite), b.mul(signed, 0.0), b.mul(x, y))


def tanh(b: Builder, x: Complex) -> Complex:
    """(t (1 + u^2) c + i u) / (1 + t^2 u^2) of t = tanh re, u = tan im (Kahan); its limits where |re| is large."""
    most = 11.0 if x.re.dtype.bits == 32 else 22.0
    far = b.lt(most, b.abs(x.re))
    near = b.where(far, _like(b, x.re, 0.0), x.re)
    u = b.unary("tan", x.im)
    beta = b.add(b.mul(u, u), 1.0)
    s = b.unary("sinh", near)
    rho = b.sqrt(b.add(b.mul(s, s), 1.0))
    divisor = b.add(b.mul(b.mul(beta, s), s), 1.0)
    re = b.div(b.mul(b.mul(beta, rho), s), divisor)
    im = b.div(u, divisor)
    steep = b.one("isinf", u)
    re, im = b.where(steep, b.div(rho, b.where(steep, s, _like(b, s, 1.0))), re), b.where(steep, b.div(1.0, u), im)
    one = reals.copysign(b, _like(b, x.re, 1.0), x.re)
    size = b.exp(b.mul(b.abs(x.re), -2.0))
    twist = b.mul(b.mul(b.unary("sin", x.im), b.unary("cos", x.im)), 4.0)
    slight = b.mul(twist, size)
    lost = b.not_(reals.isfinite(b, x.im))
    endless = b.one("isinf", x.re)
    none = reals.copysign(b, _like(b, x.re, 0.0), b.where(endless, x.im, twist))
    slight = b.where(b.and_(b.eq(size, 0.0), b.or_(endless, b.not_(lost))), none, slight)
    unknown = b.and_(lost, b.not_(endless))
    one, slight = (b.where(unknown, _like(b, v, math.nan), v) for v in (one, slight))
    found = Complex(b.where(far, one, re), b.where(far, slight, im))
    found = Complex(b.where(b.and_(b.eq(x.re, 0.0), lost), x.re, found.re), found.im)
    flat = b.and_(b.isnan(x.re), b.eq(x.im, 0.0))
    return Complex(found.re, b.where(flat, x.im, found.im))


def _by_turning(f: Callable[[Builder, Complex], Complex]) -> Callable[[Builder, Complex], Complex]:
    """sin z = -i sinh(i z), and so on."""
    return lambda b, x: numbers.turned_back(b, f(b, numbers.turned(b, x)))


def cos(b: Builder, x: Complex) -> Complex:
    return cosh(b, numbers.turned(b, x))


def asinh(b: Builder, x: Complex) -> Complex:
    """asinh(re(conj(sqrt(1 - iz)) sqrt(1 + iz)) ...): by way of asin (Kahan)."""
    return numbers.turned(b, asin(b, numbers.turned_back(b, x)))


def _roots(b: Builder, x: Complex) -> tuple[Complex, Complex]:
    """sqrt(1 - x), sqrt(1 + x)"""
    less = Complex(b.sub(1.0, x.re), b.neg(x.im))
    more = Complex(b.add(x.re, 1.0), x.im)
    return numbers.sqrt(b, less), numbers.sqrt(b, more)


def asin(b: Builder, x: Complex) -> Complex:
    """atan2(re, re(sqrt(1 - z) sqrt(1 + z))) + i asinh(im(conj(sqrt(1 - z)) sqrt(1 + z)))"""
    scaled, log = _large(b, x)
    p, q = _roots(b, scaled)
    re = reals.atan2(b, x.re, b.sub(b.mul(p.re, q.re), b.mul(p.im, q.im)))
    im = b.unary("asinh", b.sub(b.mul(p.re, q.im), b.mul(p.im, q.re)))
    far = Complex(reals.atan2(b, x.re, b.abs(x.im)), reals.copysign(b, log.re, x.im))
    found = _either(b, _is_large(b, x), far, Complex(re, im))
    none = b.isnan(x.re)
    flat = b.and_(b.isnan(x.im), b.eq(x.re, 0.0))
    re = b.where(flat, x.re, found.re)
    wide = b.where(b.one("isinf", x.re), reals.copysign(b, _like(b, x.re, math.inf), x.im), found.im)
    return Complex(b.where(none, x.re, re), _unknown(b, x, wide))


def acos(b: Builder, x: Complex) -> Complex:
    """2 atan2(re sqrt(1 - z), re sqrt(1 + z)) + i asinh(im(conj(sqrt(1 + z)) sqrt(1 - z)))"""
    scaled, log = _large(b, x)
    p, q = _roots(b, scaled)
    re = b.mul(reals.atan2(b, p.re, q.re), 2.0)
    im = b.unary("asinh", b.sub(b.mul(q.re, p.im), b.mul(q.im, p.re)))
    far = Complex(reals.atan2(b, b.abs(x.im), x.re), b.neg(reals.copysign(b, log.re, x.im)))
    found = _either(b, _is_large(b, x), far, Complex(re, im))
    flat = b.and_(b.isnan(x.im), b.eq(x.re, 0.0))
    re = b.where(flat, _like(b, x.re, math.pi / 2), found.re)
    wide = b.where(b.one("isinf", x.re), reals.copysign(b, _like(b, x.re, math.inf), b.neg(x.im)), found.im)
    return Complex(b.where(b.isnan(x.re), x.re, re), _unknown(b, x, wide))


def acosh(b: Builder, x: Complex) -> Complex:
    """asinh(re(conj(sqrt(z - 1)) sqrt(z + 1))) + 2 i atan2(im sqrt(z - 1), re sqrt(z + 1))"""
    scaled, log = _large(b, x)
    p = numbers.sqrt(b, Complex(b.sub(scaled.re, 1.0), scaled.im))
    q = numbers.sqrt(b, Complex(b.add(scaled.re, 1.0), scaled.im))
    re = b.unary("asinh", b.add(b.mul(p.re, q.re), b.mul(p.im, q.im)))
    im = b.mul(reals.atan2(b, p.im, q.re), 2.0)
    found = _either(b, _is_large(b, x), Complex(log.re, reals.atan2(b, x.im, x.re)), Complex(re, im))
    infinite = isinf(b, x)
    re = b.where(infinite, _like(b, x.re, math.inf), found.re)
    flat = b.and_(b.isnan(x.im), b.eq(x.re, 0.0))
    im = b.where(flat, _like(b, x.re, math.pi / 2), found.im)
    return Complex(re, b.where(b.isnan(x.re), x.re, im))


def atanh(b: Builder, x: Complex) -> Complex:
    """log1p(4 re / ((1 - re)^2 + im^2)) / 4 + i atan2(2 im, (1 - re)(1 + re) - im^2) / 2"""
    most = 1e15 if x.re.dtype.bits == 32 else 1e100
    far = b.or_(b.lt(most, b.abs(x.re)), b.lt(most, b.abs(x.im)))
    p, q = (b.where(far, _like(b, v, 0.0), v) for v in (b.abs(x.re), b.abs(x.im)))
    less = b.sub(1.0, p)
    square = b.mul(q, q)
    re = b.mul(reals.log1p(b, b.div(b.mul(p, 4.0), b.add(b.mul(less, less), square))), 0.25)
    im = b.mul(reals.atan2(b, b.mul(q, 2.0), b.sub(b.mul(less, b.add(p, 1.0)), square)), 0.5)
    beside = b.and_(b.eq(p, 1.0), b.lt(q, 1e-10))  # the pole, where the square may be less than all numbers
    height = b.where(beside, q, _like(b, q, 1.0))  # elsewhere its logarithm has a derivative too
    re = b.where(beside, b.mul(b.sub(math.log(2), b.unary("log", height)), 0.5), re)
    pole = b.and_(b.eq(p, 1.0), b.eq(q, 0.0))
    re, im = b.where(pole, _like(b, re, math.inf), re), b.where(pole, q, im)
    size = reals.hypot(b, x.re, x.im)
    divisor = b.where(far, size, _like(b, size, 1.0))
    distant = b.div(b.div(b.abs(x.re), divisor), divisor)
    distant = b.where(b.one("isinf", size), _like(b, size, 0.0), distant)
    re = b.where(far, distant, re)
    im = b.where(far, _unknown(b, x, b.where(b.isnan(x.im), x.im, _like(b, im, math.pi / 2))), im)
    flat = b.and_(b.isnan(x.im), b.eq(x.re, 0.0))
    re = b.where(flat, _like(b, re, 0.0), re)
    return Complex(reals.copysign(b, re, x.re), reals.copysign(b, im, x.im))


def _is_large(b: Builder, x: Complex) -> Value:
    most = 1e8 if x.re.dtype.bits == 32 else 1e16
    return b.lt(most, b.max(b.abs(x.re), b.abs(x.im)))


def _large(b: Builder, x: Complex) -> tuple[Complex, Complex]:
    """x with what is large replaced, and log(2 |x|), which takes its place there."""
    large = _is_large(b, x)
    zero = _like(b, x.re, 0.0)
    log = numbers.log(b, x)
    more = Complex(b.add(log.re, b.scalar(math.log(2), log.re.dtype)), log.im)
    return Complex(b.where(large, zero, x.re), b.where(large, zero, x.im)), more


def _either(b: Builder, condition: Value, x: Complex, y: Complex) -> Complex:
    return Complex(b.where(condition, x.re, y.re), b.where(condition, x.im, y.im))


def _unknown(b: Builder, x: Complex, im: Value) -> Value:
    """The imaginary part beside a NaN: infinite where the other part is."""
    none = b.and_(b.isnan(x.re), b.not_(b.one("isinf", x.im)))
    return b.where(none, _like(b, im, math.nan), im)


def expm1(b: Builder, x: Complex) -> Complex:
    """expm1 re cos im - 2 sin^2(im / 2) + i exp re sin im. A zero real part is +0."""
    half = b.unary("sin", b.mul(x.im, 0.5))
    near = b.sub(b.mul(reals.expm1(b, x.re), b.unary("cos", x.im)), b.mul(b.mul(half, half), 2.0))
    full = numbers.exp(b, x)
    small = b.and_(b.lt(b.abs(x.re), 1.0), reals.isfinite(b, x.im))
    return Complex(b.where(small, b.add(near, 0.0), b.sub(full.re, 1.0)), full.im)


def log1p(b: Builder, x: Complex) -> Complex:
    """log(1 + z), its real part by log1p(re (2 + re) + im^2) / 2."""
    more = b.add(x.re, 1.0)
    far = numbers.log(b, Complex(more, x.im))
    near = b.mul(reals.log1p(b, b.add(b.mul(x.re, b.add(x.re, 2.0)), b.mul(x.im, x.im))), 0.5)
    small = b.lt(b.max(b.abs(x.re), b.abs(x.im)), 0.5)
    return Complex(b.where(small, near, far.re), far.im)


def _of_base(base: float) -> Callable[[Builder, Complex], Complex]:
    def rule(b: Builder, x: Complex) -> Complex:
        found = numbers.log(b, x)
        return Complex(b.mul(found.re, 1 / math.log(base)), b.mul(found.im, 1 / math.log(base)))

    return rule


def pow(b: Builder, x: Number, y: Number) -> Complex:
    """exp(y log x); 1 for y = 0, and 0 for a zero x with a positive y. Small whole y by products."""
    x, y = numbers.to_complex(b, x), numbers.to_complex(b, y)
    log = numbers.log(b, x)
    found = numbers.exp(b, numbers.mul(b, y, log))  # type: ignore[arg-type]
    one, zero = _like(b, x.re, 1.0), _like(b, x.re, 0.0)
    shape = numbers.add(b, x, y).shape
    power = Complex(b.expand(one, shape), b.expand(zero, shape))
    root = x
    whole = b.and_(b.eq(y.im, 0.0), b.and_(b.eq(b.round(y.re), y.re), b.le(b.abs(y.re), 63.0)))
    count = b.cast(b.where(whole, b.abs(y.re), b.scalar(0.0, y.re.dtype)), _INT)
    for k in range(6):
        odd = b.eq(b.binary("bitand", b.one("shr", count, b.scalar(k, _INT)), b.scalar(1, _INT)), 1)
        power = numbers.where(b, odd, numbers.mul(b, power, root), power)  # type: ignore[assignment]
        root = numbers.mul(b, root, root)  # type: ignore[assignment]
    inverse = numbers.div(b, b.full(shape, 1.0, x.re.dtype), power)
    power = numbers.where(b, b.lt(y.re, 0.0), inverse, power)  # type: ignore[assignment]
    found = numbers.where(b, whole, power, found)  # type: ignore[assignment]
    nothing = b.and_(numbers.eq(b, x, b.scalar(0.0, x.re.dtype)), b.lt(0.0, y.re))
    return numbers.where(b, nothing, b.full(shape, 0.0, x.re.dtype), found)  # type: ignore[return-value]


_INT = dtypes.int32

FUNCTIONS: dict[str, Callable[..., Number]] = {
    "exp": numbers.exp, "expm1": expm1, "log": numbers.log, "log1p": log1p, "log2": _of_base(2), "log10": _of_base(10),
    "sqrt": numbers.sqrt, "sin": _by_turning(sinh), "cos": cos, "tan": _by_turning(tanh), "sinh": sinh, "cosh": cosh,
    "tanh": tanh, "asin": asin, "acos": acos, "atan": _by_turning(atanh), "asinh": asinh, "acosh": acosh,
    "atanh": atanh, "pow": pow, "sign": sign,
    "round": lambda b, x: Complex(b.round(x.re), b.round(x.im)),
}  # fmt: skip
