"""Arithmetic of real and complex numbers alike: what rules are written in that work for both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce as fold

from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim
from onnxc.ir.graph import Value
from onnxc.ops import reals
from onnxc.primitives.builder import Builder
from onnxc.primitives.pairs import PART, Complex, Number, each


def real(x: Number) -> Value:
    """The real part of a number; a real one itself."""
    return x.re if isinstance(x, Complex) else x


def parts(x: Number) -> list[Value]:
    """The real and the imaginary part; of a real number the one that there is."""
    return [x.re, x.im] if isinstance(x, Complex) else [x]


def part_type(dtype: DType) -> DType:
    """The dtype of the parts of a complex number, or a real one itself."""
    return PART.get(dtype, dtype)


def to_complex(b: Builder, x: Number) -> Complex:
    """A number as a complex one."""
    return x if isinstance(x, Complex) else Complex(x, b.full(x.shape, 0.0, x.dtype))


def cast(b: Builder, x: Number, to: DType) -> Number:
    """As C converts. A complex number becomes a real one only by name (`real`), so that nothing is lost unseen."""
    if to in PART:
        part = PART[to]
        if isinstance(x, Complex):
            return Complex(b.cast(x.re, part), b.cast(x.im, part))
        return to_complex(b, b.cast(x, part))
    if isinstance(x, Complex):
        raise TypeError(f"a complex array becomes {to} by real() or abs(), not by a conversion")
    if to.kind == "bool":
        return reals.truth(b, x)
    return b.cast(x, to)


def zeros(b: Builder, shape: Sequence[Dim], dtype: DType) -> Number:
    """Zeros of a real or complex dtype."""
    zero = b.full(shape, 0, part_type(dtype))
    return Complex(zero, zero) if dtype in PART else zero


# ---------------------------------------------------------------- arithmetic


def add(b: Builder, x: Number, y: Number) -> Number:
    """x + y, where either may be complex."""
    return _part_by_part(b, b.add, x, y)


def sub(b: Builder, x: Number, y: Number) -> Number:
    """x - y, where either may be complex."""
    return _part_by_part(b, b.sub, x, y)


def _part_by_part(b: Builder, combine: Callable[[Value, Value], Value], x: Number, y: Number) -> Number:
    if isinstance(x, Complex) or isinstance(y, Complex):
        x, y = to_complex(b, x), to_complex(b, y)
        return Complex(combine(x.re, y.re), combine(x.im, y.im))
    return combine(x, y)


def mul(b: Builder, x: Number, y: Number) -> Number:
    """A product with a real number is that of both parts."""
    return _product(b, b.mul, x, y)


def _product(b: Builder, multiply: Callable[[Value, Value], Value], x: Number, y: Number) -> Number:
    if isinstance(x, Complex) and isinstance(y, Complex):
        re = b.sub(multiply(x.re, y.re), multiply(x.im, y.im))
        return Complex(re, b.add(multiply(x.re, y.im), multiply(x.im, y.re)))
    if isinstance(x, Complex):
        assert isinstance(y, Value)
        return Complex(multiply(x.re, y), multiply(x.im, y))
    if isinstance(y, Complex):
        return Complex(multiply(x, y.re), multiply(x, y.im))
    return multiply(x, y)


def div(b: Builder, x: Number, y: Number) -> Number:
    """A complex quotient by the ratio of the divisor's parts, the lesser over the greater (Smith)."""
    if not isinstance(y, Complex):
        return Complex(b.div(x.re, y), b.div(x.im, y)) if isinstance(x, Complex) else b.div(x, y)
    x = to_complex(b, x)
    turned = b.lt(b.abs(y.re), b.abs(y.im))
    high, low = b.where(turned, y.im, y.re), b.where(turned, y.re, y.im)
    zero = b.eq(high, 0.0)
    ratio = b.where(zero, low, b.div(low, b.where(zero, b.scalar(1.0, high.dtype), high)))
    divisor = b.add(high, b.mul(low, ratio))
    first, second = b.where(turned, x.im, x.re), b.where(turned, x.re, x.im)
    re = b.div(b.add(first, b.mul(second, ratio)), divisor)
    sign = b.where(turned, b.scalar(-1.0, high.dtype), 1.0)
    im = b.mul(b.div(b.sub(second, b.mul(first, ratio)), divisor), sign)
    # A straight quotient: im = (x.im - x.re r) / d; a turned one: im = (x.im r - x.re) / d.
    return Complex(re, im)


def neg(b: Builder, x: Number) -> Number:
    """-x"""
    return each(b.neg, x)


def conj(b: Builder, x: Number) -> Number:
    """x with the other sign of its imaginary part."""
    return Complex(x.re, b.neg(x.im)) if isinstance(x, Complex) else x


def absolute(b: Builder, x: Number) -> Value:
    """|x|, without overflow in between."""
    if isinstance(x, Complex):
        return reals.hypot(b, x.re, x.im)
    return x if x.dtype.kind == "uint" else b.abs(x)


def square_abs(b: Builder, x: Number) -> Value:
    """|x|^2"""
    if isinstance(x, Complex):
        return b.add(b.mul(x.re, x.re), b.mul(x.im, x.im))
    return b.mul(x, x)


def where(b: Builder, condition: Value, x: Number, y: Number) -> Number:
    """x or y, of which either may be complex."""
    if isinstance(x, Complex) or isinstance(y, Complex):
        x, y = to_complex(b, x), to_complex(b, y)
        return Complex(b.where(condition, x.re, y.re), b.where(condition, x.im, y.im))
    return b.where(condition, x, y)


def eq(b: Builder, x: Number, y: Number) -> Value:
    """Whether both parts are equal."""
    if isinstance(x, Complex) or isinstance(y, Complex):
        x, y = to_complex(b, x), to_complex(b, y)
        return b.and_(b.eq(x.re, y.re), b.eq(x.im, y.im))
    return b.eq(x, y)


def isnan(b: Builder, x: Number) -> Value:
    """Whether a part is NaN."""
    found = [b.isnan(p) for p in parts(x)]
    return b.or_(*found) if len(found) == 2 else found[0]


def phase(b: Builder, x: Number) -> Number:
    """x / |x|; 1 for zero. A complex number is divided by its greater part before: tiny ones keep their digits."""
    one = b.scalar(1.0, part_type(x.dtype))
    most = fold(b.max, [b.abs(p) for p in parts(x)])
    zero = b.eq(most, 0.0)
    x = div(b, x, b.where(zero, one, most))
    if isinstance(x, Complex):
        x = div(b, x, b.where(zero, one, b.sqrt(square_abs(b, x))))
    return where(b, zero, one, x)


# ---------------------------------------------------------------- sums and movement


def total(b: Builder, x: Number, axes: Sequence[int], keepdims: bool = False) -> Number:
    """The sum over axes."""
    return each(lambda v: b.reduce("sum", v, axes, keepdims), x)


def product(b: Builder, x: Number, axes: Sequence[int], keepdims: bool = False) -> Number:
    """The product over axes."""
    if isinstance(x, Value):
        return b.reduce("prod", x, axes, keepdims)
    for axis in axes:
        x = _folded(b, x, axis) if isinstance(x.shape[axis], int) else stepwise(b, x, axis)[0]
    shape = tuple(1 if k in axes else d for k, d in enumerate(x.shape) if keepdims or k not in axes)
    return each(lambda v: b.reshape(v, shape), x)


def _folded(b: Builder, x: Complex, axis: int) -> Complex:
    """The product along an axis, of size 1 then: halves by halves."""
    size = x.shape[axis]
    assert isinstance(size, int)
    if size == 0:
        return to_complex(b, b.full([1 if k == axis else d for k, d in enumerate(x.shape)], 1.0, x.re.dtype))
    while size > 1:
        half = size // 2
        first, second, rest = (
            Complex(*(b.slice(v, axis, low, high) for v in parts(x)))
            for low, high in ((0, half), (half, 2 * half), (2 * half, size))
        )
        halves = mul(b, first, second)
        x = to_complex(b, concat(b, [halves, rest], axis) if size % 2 else halves)
        size = half + size % 2
    return x


def stepwise(b: Builder, x: Complex, axis: int) -> tuple[Complex, Complex]:
    """The product along an axis of any size, of size 1 then, and the products up to each of its elements."""

    def step(b: Builder, state: Sequence[Value], here: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        found = parts(mul(b, Complex(*state), Complex(*here)))
        return found, found

    order = [axis, *(k for k in range(x.rank) if k != axis)]
    back = [order.index(k) for k in range(x.rank)]
    sliced = [b.transpose(v, order) for v in parts(x)]
    one = parts(to_complex(b, b.full(sliced[0].shape[1:], 1.0, x.re.dtype)))
    whole, running = b.scan(one, sliced, x.shape[axis], step)
    rows = [b.reshape(v, (1, *v.shape)) for v in whole]
    last, products = (Complex(*(b.transpose(v, back) for v in pair)) for pair in (rows, running))
    return last, products


def matmul(b: Builder, x: Number, y: Number) -> Number:
    """Of matrices: four products of real ones, or two with one operand real."""
    return _product(b, b.matmul, x, y)


def concat(b: Builder, xs: Sequence[Number], axis: int) -> Number:
    """Numbers side by side: complex ones where any of them is."""
    if any(isinstance(x, Complex) for x in xs):
        pairs = [to_complex(b, x) for x in xs]
        return Complex(b.concat([p.re for p in pairs], axis), b.concat([p.im for p in pairs], axis))
    return b.concat([real(x) for x in xs], axis)


def adjoint(b: Builder, x: Number) -> Number:
    """Matrices [..., m, n] conjugated and transposed."""
    return conj(b, each(lambda v: b.swap(v, v.rank - 2, v.rank - 1), x))


def from_polar(b: Builder, size: Value, angle: Value) -> Complex:
    """size * exp(i angle); a zero or infinite size is not NaN at an angle of zero."""
    flat = b.eq(angle, 0.0)
    im = b.where(flat, angle, b.mul(size, b.unary("sin", angle)))
    return Complex(b.where(flat, size, b.mul(size, b.unary("cos", angle))), im)


# ---------------------------------------------------------------- functions of complex numbers


def angle(b: Builder, x: Complex) -> Value:
    """The angle of a complex number, from -pi to pi."""
    return reals.atan2(b, x.im, x.re)


def exp(b: Builder, x: Complex) -> Complex:
    """exp(re) (cos im + i sin im). C's special values: where re is infinite the angle may be anything finite or not."""
    finite = reals.isfinite(b, x.im)
    low, high = b.eq(x.re, -math.inf), b.eq(x.re, math.inf)
    still = b.and_(b.or_(low, high), b.not_(finite))  # an angle that there is none of
    angle_ = b.where(still, b.scalar(0.0, x.im.dtype), x.im)
    out = from_polar(b, b.exp(x.re), angle_)
    nothing = b.where(b.and_(high, b.not_(finite)), b.scalar(math.nan, x.im.dtype), out.im)
    return Complex(out.re, nothing)


def log(b: Builder, x: Complex) -> Complex:
    """log |x| + i angle; near |x| = 1 by log1p, which keeps digits."""
    p, q = b.abs(x.re), b.abs(x.im)
    high, low = b.max(p, q), b.min(p, q)
    near = b.and_(b.lt(0.5, high), b.lt(high, 2.0))
    less = b.sub(high, 1.0)
    by_one = b.mul(reals.log1p(b, b.add(b.mul(less, b.add(high, 1.0)), b.mul(low, low))), 0.5)
    half = b.scalar(0.5, high.dtype)
    # Both parts are halved before, so that |x| does not overflow.
    size = reals.hypot(b, b.mul(x.re, half), b.mul(x.im, half))
    tiny = b.lt(high, 1e-30)
    doubled = b.where(tiny, b.scalar(0.0, half.dtype), math.log(2))
    far = b.add(b.log(b.where(tiny, reals.hypot(b, x.re, x.im), size)), doubled)
    return Complex(b.where(near, by_one, far), angle(b, x))


def sqrt(b: Builder, x: Complex) -> Complex:
    """The root with a real part that is not negative, by the half of |re| + |x| (Kahan)."""
    p = b.abs(x.re)
    huge = b.lt(1e30, b.max(p, b.abs(x.im)))
    scale = b.where(huge, b.scalar(0.25, p.dtype), 1.0)
    re, im = b.mul(p, scale), b.mul(x.im, scale)
    back = b.where(huge, b.scalar(2.0, p.dtype), 1.0)
    root = b.sqrt(b.add(b.mul(re, 0.5), b.mul(reals.hypot(b, re, im), 0.5)))
    zero = b.eq(root, 0.0)
    other = b.div(b.mul(im, 0.5), b.where(zero, b.scalar(1.0, p.dtype), root))
    root, other = b.mul(root, back), b.mul(other, back)
    negative = reals.signbit(b, x.re)
    out_re = b.where(negative, b.abs(other), root)
    out_im = b.where(negative, reals.copysign(b, root, x.im), reals.copysign(b, other, x.im))
    return _root_at_infinity(b, x, negative, Complex(out_re, out_im))


def _root_at_infinity(b: Builder, x: Complex, negative: Value, root: Complex) -> Complex:
    """Where a part is infinite: inf + 0i of inf + yi, 0 + inf i of -inf + yi, inf + im i of an infinite im."""
    inf, none = b.full(x.shape, math.inf, x.re.dtype), b.full(x.shape, 0.0, x.re.dtype)
    infinite, straight = b.one("isinf", x.im), b.one("isinf", x.re)
    lost = b.isnan(x.im)
    re = b.where(negative, b.where(lost, x.im, none), inf)
    im = b.where(negative, reals.copysign(b, inf, x.im), b.where(lost, x.im, reals.copysign(b, none, x.im)))
    re, im = b.where(straight, re, root.re), b.where(straight, im, root.im)
    return Complex(b.where(infinite, inf, re), b.where(infinite, x.im, im))


def turned(b: Builder, x: Complex) -> Complex:
    """i x"""
    return Complex(b.neg(x.im), x.re)


def turned_back(b: Builder, x: Complex) -> Complex:
    """-i x"""
    return Complex(x.im, b.neg(x.re))
