"""ATen's special functions: in float64, so that a result has the digits of float32 however it came about. (Those of
float64 near a zero, as of lgamma at 1 and 2, are right to 1e-15 beside numbers of about 1.)

Gamma functions are Stirling's series behind 8, and recurrences and reflections before it. Chebyshev series (of the
tables, computed with 40 digits) are of smooth functions of a variable from -1 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from onnxc.errors import UnsupportedError
from onnxc.frontends.torch_fx_table import Call, aten
from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from onnxc.ops import reals
from onnxc.primitives.builder import Builder

_ERFCX = (
    1.1774832005374487, -0.007260796620301899, -0.081265123236185, 0.06009212804122225, -0.02875393558027666,
    0.01059566336347286, -0.003136927294554266, 0.000745649437253617, -0.00013696965030100643, 1.718386160030053e-05,
    -7.158364623447325e-07, -2.426139944235609e-07, 5.576570939704449e-08, -2.1057869499548623e-09,
    -1.17178893401705e-09, 1.9098355236435298e-10, 1.4088717601802455e-11, -6.901109025932392e-12,
    9.167838667503393e-14, 2.14543684214095e-13, -1.4717839515457184e-14, -6.66950434329468e-15, 7.50260318115059e-16,
    2.2248135626012964e-16, -3.0680809006277294e-17,
)  # fmt: skip
_I0_SMALL = (
    0.33839763720473803, -0.3046826723431984, 0.17162090152220877, -0.09490109704804764, 0.04930528423967071,
    -0.02373741480589947, 0.010546460394594998, -0.004324309995050576, 0.0016394756169413357, -0.0005763755745385824,
    0.00018850288509584165, -5.754195010082104e-05, 1.6448448070728896e-05, -4.4167383584587505e-06,
    1.1173875391201037e-06, -2.670793853940612e-07, 6.046995022541919e-08, -1.300025009986248e-08,
    2.6598237246823866e-09, -5.189795601635263e-10, 9.675809035373237e-11, -1.726826291441556e-11,
    2.95505266312964e-12, -4.856446783111929e-13, 7.676185498604936e-14, -1.1685332877993451e-14,
    1.715391285555133e-15, -2.431279846547955e-16, 3.3307945188222384e-17, -4.4153416464793395e-18,
)  # fmt: skip
_I0_LARGE = (
    0.4022452055070544, 0.0033691164782556943, 6.889758346916825e-05, 2.8913705208347567e-06, 2.0489185894690638e-07,
    2.266668990498178e-08, 3.3962320257083865e-09, 4.94060238822497e-10, 1.1889147107846439e-11,
    -3.1499165279632416e-11, -1.3215811840447713e-11, -1.7941785315068062e-12, 7.180124451383666e-13,
    3.8527783827421426e-13, 1.54008621752141e-14, -4.150569347287222e-14, -9.554846698828307e-15,
    3.8116806693526224e-15, 1.7725601330565263e-15, -3.425485619677219e-16, -2.8276239805165836e-16,
    3.461222867697461e-17, 4.46562142029676e-17, -4.830504485944182e-18, -7.233180487874754e-18,
)  # fmt: skip
_I1_SMALL = (
    0.12629359322181682, -0.17641651835783406, 0.1026436586898471, -0.05294598120809499, 0.024726449030626516,
    -0.010564084894626197, 0.004156422944312888, -0.0015135724506312532, 0.0005122859561685758,
    -0.00016176081582589674, 4.781565107550054e-05, -1.3273163656039436e-05, 3.4702513081376785e-06,
    -8.568720264695455e-07, 2.0032947535521353e-07, -4.445059128796328e-08, 9.381537386495773e-09,
    -1.8872497517228294e-09, 3.625590281552117e-10, -6.663489723502027e-11, 1.1736186298890901e-11,
    -1.9839743977649436e-12, 3.223793365945575e-13, -5.042185504727912e-14, 7.600684294735408e-15,
    -1.1055969477353862e-15, 1.5536319577362005e-16, -2.111421214358166e-17, 2.7779141127610464e-18,
)  # fmt: skip
_I1_LARGE = (
    0.38928811750914005, -0.009761097491361469, -0.00011058893876262371, -3.882564808877691e-06,
    -2.512236237870209e-07, -2.6314688468895196e-08, -3.835380385964237e-09, -5.589743462196584e-10,
    -1.8974958123505413e-11, 3.2526035830154884e-11, 1.4125807436613782e-11, 2.0356285441470896e-12,
    -7.198551776245908e-13, -4.0835511110921974e-13, -2.1015418427726643e-14, 4.272440016711951e-14,
    1.0420276984128802e-14, -3.8144030724370075e-15, -1.8803547755107825e-15, 3.3082023109209285e-16,
    2.96262899764595e-16, -3.209525921993424e-17, -4.6503053684893586e-17, 4.414348323071708e-18,
    7.517296310842105e-18,
)  # fmt: skip


def special(name: str) -> Callable[[Callable[[Builder, Value], Value]], Callable[[Builder, Value], Value]]:
    """Registers a function of one real number, which is called with float64."""

    def add(function: Callable[[Builder, Value], Value]) -> Callable[[Builder, Value], Value]:
        def rule(c: Call, x: Value) -> Value:
            return function(c.b, c.b.cast(c.floats(x)[0], dtypes.float64))

        aten(name)(rule)
        return function

    return add


def _number(b: Builder, value: float) -> Value:
    return b.scalar(value, dtypes.float64)


def series(b: Builder, coefficients: Sequence[float], t: Value) -> Value:
    """The sum of Chebyshev's polynomials at t, by Clenshaw's recurrence."""
    twice = b.add(t, t)
    high, low = _number(b, coefficients[-1]), _number(b, 0.0)
    for k in coefficients[-2:0:-1]:
        high, low = b.add(b.sub(b.mul(twice, high), low), k), high
    return b.add(b.sub(b.mul(t, high), low), coefficients[0])


def _polynomial(b: Builder, coefficients: Sequence[float], x: Value) -> Value:
    """From the highest power on."""
    total = _number(b, coefficients[0])
    for k in coefficients[1:]:
        total = b.add(b.mul(total, x), k)
    return total


# ---------------------------------------------------------------- error functions


@special("special_erfcx")
def erfcx(b: Builder, x: Value) -> Value:
    """exp(x^2) erfc(x)"""
    size = b.abs(x)
    t = b.sub(1.0, b.div(8.0, b.add(size, 4.0)))
    found = b.div(series(b, _ERFCX, t), b.add(b.mul(size, 2.0), 1.0))
    return b.where(b.lt(x, 0.0), b.sub(b.mul(b.exp(b.mul(x, x)), 2.0), found), found)


@special("erfc")
@special("special_erfc")
def erfc(b: Builder, x: Value) -> Value:
    """1 - erf(x), with its digits where it is small."""
    size = b.max(x, 0.5)
    small = b.where(b.le(40.0, size), _number(b, 0.0), b.mul(b.exp(b.neg(b.mul(size, size))), erfcx(b, size)))
    return b.where(b.lt(x, 0.5), b.sub(1.0, b.erf(x)), small)


def _inverse(b: Builder, body: Value, tail: Value) -> Value:
    """z >= 0 with erf(z) = body and erfc(z) = tail = 1 - body: Winitzki's formula, then steps of Halley's."""
    a = 0.147
    w = b.log(b.mul(tail, b.add(body, 1.0)))
    first = b.add(b.mul(w, 0.5), 2 / (math.pi * a))
    z = b.sqrt(b.max(b.sub(b.sqrt(b.sub(b.mul(first, first), b.div(w, a))), first), 0.0))
    for _ in range(3):
        off = b.where(b.lt(body, 0.5), b.sub(b.erf(z), body), b.sub(tail, erfc(b, z)))
        half = b.exp(b.mul(b.mul(z, z), 0.5))  # twice: of a denormal tail exp(z^2) alone is too great
        step = b.mul(b.mul(b.mul(off, half), half), math.sqrt(math.pi) / 2)
        z = b.sub(z, b.div(step, b.add(b.mul(z, step), 1.0)))
    z = b.where(b.eq(tail, 0.0), _number(b, math.inf), z)
    return b.where(b.lt(tail, 0.0), _number(b, math.nan), z)


@special("erfinv")
@special("special_erfinv")
def erfinv(b: Builder, x: Value) -> Value:
    size = b.abs(x)
    return reals.copysign(b, _inverse(b, size, b.sub(1.0, size)), x)


@special("special_ndtri")
def ndtri(b: Builder, p: Value) -> Value:
    """The number below which a normal distribution has the share p."""
    tail = b.mul(b.min(p, b.sub(1.0, p)), 2.0)
    found = b.mul(_inverse(b, b.sub(1.0, tail), tail), math.sqrt(2.0))
    return b.where(b.lt(p, 0.5), b.neg(found), found)


# ---------------------------------------------------------------- gamma functions

# B_2k / (2k (2k - 1)) of Stirling's series, from k = 8 on downwards; and B_2k / 2k, B_2k of its derivatives.
_STIRLING = (-3617 / 122400, 1 / 156, -691 / 360360, 1 / 1188, -1 / 1680, 1 / 1260, -1 / 360, 1 / 12)
_DIGAMMA = (-3617 / 8160, 1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12)
_TRIGAMMA = (-3617 / 510, 7 / 6, -691 / 2730, 5 / 66, -1 / 30, 1 / 42, -1 / 30, 1 / 6)


def _behind(b: Builder, x: Value) -> tuple[Value, Value, Value, Value]:
    """Whether x is below 1/2; y, which is 1 - x then, else x; whether that is below 8; and y or 8 more."""
    reflected = b.lt(x, 0.5)
    y = b.where(reflected, b.sub(1.0, x), x)
    near = b.lt(y, 8.0)
    return reflected, y, near, b.where(near, b.add(y, 8.0), y)


def _turn(b: Builder, x: Value) -> Value:
    """pi times how far x is from the nearest whole number."""
    return b.mul(b.sub(x, b.round(x)), math.pi)


@special("lgamma")
def lgamma(b: Builder, x: Value) -> Value:
    """log |gamma(x)|"""
    reflected, y, near, z = _behind(b, x)
    inverse = b.div(1.0, z)
    rest = b.mul(inverse, _polynomial(b, _STIRLING, b.mul(inverse, inverse)))
    main = b.add(b.mul(b.sub(z, 0.5), b.sub(b.log(z), 1.0)), 0.5 * math.log(2 * math.pi) - 0.5)
    product = b.where(near, y, _number(b, 1.0))
    for k in range(1, 8):
        product = b.mul(product, b.where(near, b.add(y, float(k)), _number(b, 1.0)))
    found = b.sub(b.add(main, rest), b.log(product))
    sine = b.abs(b.one("sin", _turn(b, x)))
    other = b.sub(b.sub(math.log(math.pi), b.log(sine)), found)
    infinite = b.one("isinf", x)
    return b.where(infinite, _number(b, math.inf), b.where(reflected, other, found))


@special("digamma")
@special("special_psi")
def digamma(b: Builder, x: Value) -> Value:
    """The derivative of `lgamma`."""
    reflected, y, near, z = _behind(b, x)
    inverse = b.div(1.0, z)
    square = b.mul(inverse, inverse)
    found = b.sub(b.sub(b.log(z), b.mul(inverse, 0.5)), b.mul(square, _polynomial(b, _DIGAMMA, square)))
    for k in range(8):
        found = b.sub(found, b.where(near, b.div(1.0, b.add(y, float(k))), _number(b, 0.0)))
    turn = _turn(b, x)
    other = b.sub(found, b.mul(b.div(b.one("cos", turn), b.one("sin", turn)), math.pi))
    pole = b.and_(b.eq(x, b.round(x)), b.le(x, 0.0))
    at_pole = b.where(b.eq(x, 0.0), b.neg(b.div(1.0, x)), _number(b, math.nan))
    return b.where(pole, at_pole, b.where(reflected, other, found))


def trigamma(b: Builder, x: Value) -> Value:
    """The derivative of `digamma`."""
    reflected, y, near, z = _behind(b, x)
    inverse = b.div(1.0, z)
    square = b.mul(inverse, inverse)
    found = b.mul(inverse, b.add(b.mul(square, _polynomial(b, _TRIGAMMA, square)), b.add(b.mul(inverse, 0.5), 1.0)))
    for k in range(8):
        shifted = b.add(y, float(k))
        found = b.add(found, b.where(near, b.div(1.0, b.mul(shifted, shifted)), _number(b, 0.0)))
    part = b.div(math.pi, b.one("sin", _turn(b, x)))
    return b.where(reflected, b.sub(b.mul(part, part), found), found)


@aten("polygamma")
def polygamma(c: Call, n: int, x: Value) -> Value:
    if n not in (0, 1):
        raise UnsupportedError(f"the derivative number {n} of digamma")
    return (digamma, trigamma)[n](c.b, c.b.cast(c.floats(x)[0], dtypes.float64))


# ---------------------------------------------------------------- Bessel functions


def _bessel(order: int, scaled: bool, b: Builder, x: Value) -> Value:
    """The modified ones of the first kind; `scaled` by exp(-|x|)."""
    size = b.abs(x)
    small, large = ((_I0_SMALL, _I0_LARGE), (_I1_SMALL, _I1_LARGE))[order]
    near = series(b, small, b.sub(b.div(b.min(size, 8.0), 4.0), 1.0))
    near = b.mul(near, size) if order else near
    far = b.div(series(b, large, b.sub(b.div(16.0, b.max(size, 8.0)), 1.0)), b.sqrt(b.max(size, 8.0)))
    found = b.where(b.le(size, 8.0), near, far)
    if not scaled:  # in two parts: exp(x) alone may be too great
        half = b.exp(b.mul(size, 0.5))
        found = b.mul(b.mul(found, half), half)
    return reals.copysign(b, found, x) if order else found


for _name, _order, _scaled in (
    ("i0", 0, False), ("special_i0", 0, False), ("special_i0e", 0, True), ("special_i1", 1, False),
    ("special_i1e", 1, True), ("special_modified_bessel_i0", 0, False), ("special_modified_bessel_i1", 1, False),
):  # fmt: skip
    special(_name)(partial(_bessel, _order, _scaled))


@special("special_spherical_bessel_j0")
def spherical_j0(b: Builder, x: Value) -> Value:
    none = b.eq(x, 0.0)
    found = b.div(b.one("sin", x), b.where(none, _number(b, 1.0), x))
    return b.where(none, _number(b, 1.0), b.where(b.one("isinf", x), _number(b, 0.0), found))


# ---------------------------------------------------------------- of bits and divisors


@aten("nextafter")
def nextafter(c: Call, x: Value, y: Value) -> Value:
    if c.type.dtype.bits < 32:
        raise UnsupportedError(f"the next number in {c.type.dtype}")
    return reals.nextafter(c.b, *c.promoted(x, y))


@aten("frexp.Tensor")
def frexp(c: Call, x: Value) -> list[Value]:
    """m and e with m 2^e = x, m in 1/2 to 1: by the bits, of numbers that are not denormal."""
    b, (x,) = c.b, c.floats(x)
    wide = x.dtype.bits == 64
    integer, width, middle = (dtypes.int64, 52, 1022) if wide else (dtypes.int32, 23, 126)
    mask = 2 * middle + 3
    tiny = b.lt(b.abs(x), 2.0 ** (1 - middle))
    bits = b.bitcast(b.where(tiny, b.mul(x, 2.0**64), x), integer)
    exponent = b.binary("bitand", b.binary("shr", bits, b.scalar(width, integer)), b.scalar(mask, integer))
    kept = b.binary("bitand", bits, b.scalar(~(mask << width), integer))
    mantissa = b.bitcast(b.binary("bitor", kept, b.scalar(middle << width, integer)), x.dtype)
    exponent = b.sub(b.cast(exponent, dtypes.int32), b.where(tiny, b.scalar(64 + middle, dtypes.int32), middle))
    same = b.or_(b.eq(x, 0.0), b.not_(reals.isfinite(b, x)))
    return [b.where(same, x, mantissa), b.where(same, b.scalar(0, dtypes.int32), exponent)]


def _gcd(c: Call, x: Value, y: Value) -> Value:
    """Euclid's, for all elements until the last one is done."""
    b, shape = c.b, c.type.shape
    x, y = (b.expand(b.abs(v), shape) for v in c.promoted(x, y))

    def step(i: Builder, states: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
        high, low, _ = states
        zero = i.scalar(0, low.dtype)
        done = i.eq(low, zero)
        rest = i.binary("mod", high, i.where(done, i.scalar(1, low.dtype), low))
        after = i.where(done, zero, rest)
        left = i.reduce("max", i.cast(i.not_(i.eq(after, zero)), dtypes.uint8), range(low.rank))
        return [i.where(done, high, low), after, i.not_(i.eq(left, i.scalar(0, dtypes.uint8)))], []

    if x.t.size == 0:
        return x
    steps = 3 * x.dtype.bits // 2  # more than two neighbouring Fibonacci numbers take
    (found, _, _), _ = b.scan([x, y, b.scalar(True, dtypes.boolean)], [b.iota(steps)], steps, step, going=2)
    return found


@aten("gcd")
def gcd(c: Call, x: Value, y: Value) -> Value:
    return _gcd(c, x, y)


@aten("lcm")
def lcm(c: Call, x: Value, y: Value) -> Value:
    b, common = c.b, _gcd(c, x, y)
    x, y = c.promoted(x, y)
    none = b.eq(common, b.scalar(0, common.dtype))
    wide = dtypes.int32 if common.dtype.bits < 32 else common.dtype  # as C multiplies
    times = b.cast(b.div(x, b.where(none, b.scalar(1, common.dtype), common)), wide)
    return b.cast(b.abs(b.mul(times, b.cast(y, wide))), common.dtype)
