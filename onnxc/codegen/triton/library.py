"""What generated kernels call: this file's text stands in front of them, so it imports nothing of ours.

Each function is the meaning of a primitive where Triton's own operator differs from it: integers that are divided
round toward zero (or down, for indices), NaN goes through maximum and minimum, and casts do as onnxruntime does.
Arithmetic of float32 is IEEE's: functions come from libdevice, divisions and roots are rounded correctly, and
denormals are kept.
"""

# The names of this file are Triton's: a type checker can say nothing of it.
# mypy: ignore-errors

import triton
import triton.language as tl
from triton.language.extra import libdevice

ox_descriptors = tl.constexpr(False)  # whether tiles are read through tensor descriptors, where a kernel can
ox_wary = tl.constexpr(False)  # whether indices must not become pairs of 16 bits (see cubin.py)


@triton.jit
def ox_nothing():
    """0. Where `ox_wary`, the compiler does not know that: an index with this in it may be large, for all it knows, and
    stays 32 bits wide. (The third dim of a grid has one program.)
    """
    if ox_wary:
        found = tl.program_id(2) << 16
    else:
        found = 0
    return found


@triton.jit
def ox_turned(kind: tl.constexpr):
    """The bits that are turned in numbers of a type that stages hand each other: those of a NaN that no computation has
    as its result.
    """
    if kind == tl.float32:
        found: tl.constexpr = 0x7F812345
    elif kind == tl.float16:
        found: tl.constexpr = 0x7D23
    else:
        found: tl.constexpr = 0x7FA3
    return found


@triton.jit
def ox_given(x, kind: tl.constexpr):
    """Numbers as words that are not zero. (This NaN becomes another one.)"""
    word: tl.constexpr = tl.int32 if kind == tl.float32 else tl.int16
    bits = x.to(kind).to(word, bitcast=True) ^ ox_turned(kind)
    return tl.where(bits == 0, 1, bits).to(word)


@triton.jit
def ox_taken(words, kind: tl.constexpr):
    """The numbers that words stand for."""
    return (words ^ ox_turned(kind)).to(words.dtype).to(kind, bitcast=True)


@triton.jit
def ox_read(at, mask=None, other=0.0):
    """Floats from memory, zeros where the mask does not hold. Triton decides for its own loads which thread reads what,
    and has threads exchange what they have read; here each reads what it needs: for tiles that are small.
    """
    kind: tl.constexpr = at.dtype.element_ty
    if mask is None:
        counts = at.to(tl.int64) != 0
    else:
        counts = mask
    if kind.primitive_bitwidth == 32:
        words = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p ld.global.b32 $0, [$1]; }",
            "=r,l,r", [at.to(tl.int64), counts.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        words = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b16 $0, 0; @p ld.global.b16 $0, [$1]; }",
            "=h,l,r", [at.to(tl.int64), counts.to(tl.int32)], dtype=tl.int16, is_pure=True, pack=1,
        )  # fmt: skip
    return words.to(kind, bitcast=True)


@triton.jit
def ox_missing(words, count, lanes: tl.constexpr):
    """Whether some of the first words, `lanes` at most, have not been written yet."""
    at = tl.arange(0, lanes)
    return tl.max((tl.load(words + at, mask=at < count, other=1, volatile=True) == 0).to(tl.int32), 0)


@triton.jit
def ox_await(words, count, most: tl.constexpr, lanes: tl.constexpr):
    """Waits until the first `count` words, `most` at most, have been written, so many at a time. Behind the barrier
    they may be read, past the L1 cache.
    """
    for start in tl.static_range(0, most, lanes):
        missing = ox_missing(words + start, count - start, lanes)
        while missing != 0:
            missing = ox_missing(words + start, count - start, lanes)
    tl.debug_barrier()


@triton.jit
def ox_unwritten(holds):
    """Whether something holds of any word of a matrix; 0 if it does not."""
    return tl.max(tl.max(holds.to(tl.int32), 1), 0)


@triton.jit
def ox_floordiv(a, b):
    """a // b, rounded down; 0 for b = 0 (a size: then there are no elements)."""
    d = tl.where(b == 0, 1, b)
    q = a // d
    q = tl.where((a % d != 0) & ((a < 0) != (d < 0)), q - 1, q)
    return tl.where(b == 0, 0, q)


@triton.jit
def ox_floormod(a, b):
    """a - ox_floordiv(a, b) * b; 0 for b = 0."""
    d = tl.where(b == 0, 1, b)
    r = a % d
    r = tl.where((r != 0) & ((r < 0) != (d < 0)), r + d, r)
    return tl.where(b == 0, 0, r)


@triton.jit
def ox_max(a, b):
    """The larger of two numbers; NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def ox_min(a, b):
    """The smaller of two numbers; NaN if one is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def ox_add(a, b):
    return a + b


@triton.jit
def ox_mul(a, b):
    """Of floats a number of its own, which nothing joins with a sum that the last one goes into."""
    if a.dtype.is_floating():
        return libdevice.mul_rn(a, b)
    return a * b


@triton.jit
def ox_or(a, b):
    return a | b


@triton.jit
def ox_and(a, b):
    return a & b


@triton.jit
def ox_sum(x, axis: tl.constexpr):
    return tl.reduce(x, axis, ox_add, keep_dims=True)


@triton.jit
def ox_prod(x, axis: tl.constexpr):
    return tl.reduce(x, axis, ox_mul, keep_dims=True)


@triton.jit
def ox_max_of(x, axis: tl.constexpr):
    return tl.reduce(x, axis, ox_max, keep_dims=True)


@triton.jit
def ox_min_of(x, axis: tl.constexpr):
    return tl.reduce(x, axis, ox_min, keep_dims=True)


@triton.jit
def ox_any_of(x, axis: tl.constexpr):
    return tl.reduce(x.to(tl.int32), axis, ox_or, keep_dims=True) != 0


@triton.jit
def ox_all_of(x, axis: tl.constexpr):
    return tl.reduce(x.to(tl.int32), axis, ox_and, keep_dims=True) != 0


@triton.jit
def ox_some(x):
    """1 if any element of a matrix is not 0, else 0: one number, for a branch."""
    return tl.max(tl.max((x != 0).to(tl.int32), 1), 0)


@triton.jit
def ox_count(x):
    """How many elements of a matrix are not 0, as one number."""
    return tl.sum(tl.sum((x != 0).to(tl.int32), 1), 0)


@triton.jit
def ox_least(chosen, x, none):
    """The least of the chosen elements of a matrix, as one number; `none` where it is less."""
    return tl.min(tl.min(tl.where(chosen, x, none), 1), 0)


@triton.jit
def ox_neg(x):
    """-x of a float, zeros and NaN included: older releases of Triton take 0 - x for it."""
    if x.dtype == tl.float64:
        return (x.to(tl.uint64, bitcast=True) ^ (1 << 63)).to(tl.float64, bitcast=True)
    else:
        return (x.to(tl.uint32, bitcast=True) ^ (1 << 31)).to(tl.float32, bitcast=True)


@triton.jit
def ox_odd(x):
    """A float64 as a float32, rounded to odd: then it can be rounded again to less as if at once."""
    y = x.to(tl.float32)
    back = y.to(tl.float64)
    u = y.to(tl.uint32, bitcast=True)
    u = tl.where(tl.abs(back) > tl.abs(x), u - 1, u)
    return tl.where((back != x) & (x == x), u | 1, u).to(tl.float32, bitcast=True)


@triton.jit
def ox_from_small(x, E: tl.constexpr, M: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr):
    """Floats of E exponent and M mantissa bits, with a sign above them, from bytes. What the largest codes mean:
    infinities and NaN (IEEE), one NaN of either sign (FN), no NaN but in place of -0 (FNUZ), nothing (FINITE).
    """
    SIGN: tl.constexpr = 1 << (E + M)
    FIELD: tl.constexpr = ((1 << E) - 1) << M
    b = x.to(tl.uint8, bitcast=True).to(tl.uint32)
    magnitude = b & (SIGN - 1)
    shifted = magnitude << (23 - M)
    # Times a power of two: what is denormal becomes a plain float.
    scale = tl.full(b.shape, (254 - BIAS) << 23, tl.uint32).to(tl.float32, bitcast=True)
    f = (shifted.to(tl.float32, bitcast=True) * scale).to(tl.uint32, bitcast=True)
    if KIND == "IEEE":
        f = tl.where(magnitude >= FIELD, shifted | 0x7F800000, f)
    if KIND == "FN":
        f = tl.where(magnitude == SIGN - 1, 0x7FC00000, f)
    if KIND == "FNUZ":
        f = tl.where(b == SIGN, 0x7FC00000, f)
    return (f | ((b & SIGN) << (31 - E - M))).to(tl.float32, bitcast=True)


@triton.jit
def ox_to_small(x, E: tl.constexpr, M: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr):
    """The bytes of such floats, rounded to the nearest even; what is too large becomes infinite, NaN, or (FINITE) the
    greatest number.
    """
    SIGN: tl.constexpr = 1 << (E + M)
    FIELD: tl.constexpr = ((1 << E) - 1) << M
    u = x.to(tl.float32).to(tl.uint32, bitcast=True)
    sign = (u >> 31) << (E + M)
    a = u & 0x7FFFFFFF
    # A sum with a number whose last bit is worth as much as that of denormals here rounds to it.
    MAGIC: tl.constexpr = (151 - BIAS - M) << 23
    magic = tl.full(a.shape, MAGIC, tl.uint32).to(tl.float32, bitcast=True)
    little = (a.to(tl.float32, bitcast=True) + magic).to(tl.uint32, bitcast=True) - MAGIC
    plain = ((a + ((1 << (22 - M)) - 1) + ((a >> (23 - M)) & 1)) >> (23 - M)) - ((127 - BIAS) << M)
    r = tl.where(a < ((128 - BIAS) << 23), little, plain)
    if KIND == "IEEE":
        payload = (a >> (23 - M)) & ((1 << M) - 1)
        payload = tl.where(payload == 0, 1 << (M - 1), payload)
        r = tl.where(a > 0x7F800000, payload | FIELD, tl.minimum(r, FIELD)) | sign
    if KIND == "FN":
        r = tl.minimum(r, SIGN - 1) | sign
    if KIND == "FNUZ":
        r = tl.where(r >= SIGN, SIGN, tl.where(r == 0, 0, r | sign))
    if KIND == "FINITE":
        r = tl.where(a > 0x7F800000, sign ^ SIGN, tl.minimum(r, SIGN - 1) | sign)
    return r.to(tl.uint8)


@triton.jit
def ox_from_power(x):
    """Powers of two from 2^-127 on, and NaN, from bytes."""
    b = x.to(tl.uint8, bitcast=True).to(tl.uint32)
    f = tl.where(b == 0, 0x00400000, tl.where(b == 255, 0x7FC00000, b << 23))
    return f.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def ox_to_power(x):
    """The bytes of such powers: the nearest, halves up. What is no positive number becomes NaN."""
    u = x.to(tl.float32).to(tl.uint32, bitcast=True)
    tiny = tl.where(u < 0x00200000, 255, tl.where(u < 0x00600000, 0, 1))  # denormal floats
    r = tl.where(u < 0x00800000, tiny, (u + 0x00400000) >> 23)
    return tl.where((u == 0) | (u >= 0x7F800000), 255, r).to(tl.uint8)


@triton.jit
def ox_part(x, FREE: tl.constexpr, SIGNED: tl.constexpr):
    """The number in the lower bits of bytes, which leave FREE bits."""
    y = x.to(tl.uint8) << FREE
    if SIGNED:
        y = y.to(tl.int8, bitcast=True)
    return y >> FREE


@triton.jit
def ox_codes(x, SHIFT: tl.constexpr, SWAPPED: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """The numbers that BITS bits of words are from bit SHIFT on, behind a swap of bytes if so, and 2^(10 - SHIFT) more,
    as float16.
    """
    return tl.inline_asm_elementwise(ASM, "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def ox_sign(x):
    """-1, 0 or 1; NaN of NaN, and +0 of both zeros."""
    one = tl.full(x.shape, 1, x.dtype)
    return tl.where(x > 0, one, tl.where(x < 0, -one, tl.where(x == x, one - one, x)))


@triton.jit
def ox_tanh_half(x):
    """tanh of a float16 or bfloat16, to a unit in the last place of the former: one instruction, for all numbers."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def ox_exp2_half(x):
    """2^x of a float32 not below -126, to two units in its last place: one instruction."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def ox_exp_half(x):
    """exp of a float16: what is below 2^-126 is 0."""
    return ox_exp2_half(x * 1.4426950408889634)


@triton.jit
def ox_rcp_half(x):
    """1 / x of a float16, to a unit in the last place of a float32: one instruction. That of 2^126 is 0."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def ox_erf_half(x, tiny: tl.constexpr):
    """erf of a float16 or bfloat16: 1 - 2^p(|x|) with 13 bits of erfc; where `tiny` numbers count, their series too."""
    t = ox_min(tl.abs(x), 4.0)
    p = ((0.00023633058 * t - 0.0040692966) * t + 0.03142833) * t - 0.14992991
    p = ((p * t - 0.9181496) * t - 1.6279223) * t
    y = libdevice.copysign(1.0 - ox_exp2_half(p), x)
    if tiny:
        y = tl.where(t < 0.125, x * (1.1283792 - 0.3761264 * (x * x)), y)
    return y


@triton.jit
def ox_turn(k, count, back: tl.constexpr):
    """The number of the k-th of so many turns, from the first or from the last one."""
    if back:
        k = count - 1 - k
    return k


@triton.jit
def ox_again(x):
    """Elements of 16 bits as they are; the compiler takes them for new ones."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@triton.jit
def ox_pow_int(a, b, bits: tl.constexpr):
    """Integer powers by repeated squaring, which wrap around; 1 / a^-b is rounded toward zero where b < 0."""
    one = tl.full(a.shape, 1, a.dtype)
    unit = (a == 1) | (a + one == 0)
    r = tl.where((b < 0) & (unit == 0), one - one, one)
    n = tl.where(b < 0, b & 1, b)
    for _ in range(bits):
        r = tl.where((n & 1) != 0, r * a, r)
        a = a * a
        n = n >> 1
    return r


@triton.jit
def ox_isinf(x, positive: tl.constexpr, negative: tl.constexpr):
    found = x != x
    found = found & (x == x)
    if positive:
        found = found | (x == float("inf"))
    if negative:
        found = found | (x == float("-inf"))
    return found


@triton.jit
def ox_idiv(a, b):
    """Integers divided, rounded toward zero; 0 for b = 0 (which is reported)."""
    return tl.where(b == 0, 0, a // tl.where(b == 0, 1, b)).to(a.dtype)


@triton.jit
def ox_fmod_int(a, b):
    """The remainder with the sign of a."""
    return tl.where(b == 0, 0, a % tl.where(b == 0, 1, b)).to(a.dtype)


@triton.jit
def ox_mod_int(a, b):
    """The remainder with the sign of b."""
    d = tl.where(b == 0, 1, b)
    r = a % d
    r = tl.where((r != 0) & ((r < 0) != (d < 0)), r + d, r)
    return tl.where(b == 0, 0, r).to(a.dtype)


@triton.jit
def ox_mod_float(a, b):
    """The remainder with the sign of b (numpy's mod)."""
    r = libdevice.fmod(a, b)
    r = tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)
    return tl.where(r == 0, libdevice.copysign(r, b), r)


@triton.jit
def ox_shl(a, b, bits: tl.constexpr):
    """a << b; 0 where b is as large as the type."""
    ok = (b >= 0) & (b < bits)
    return tl.where(ok, a << tl.where(ok, b, 0), 0).to(a.dtype)


@triton.jit
def ox_shr(a, b, bits: tl.constexpr):
    """a >> b; where b is as large as the type (or negative), nothing is left but the sign."""
    ok = (b >= 0) & (b < bits)
    return tl.where(ok, a >> tl.where(ok, b, 0), tl.where(a < 0, a >> (bits - 1), 0)).to(a.dtype)


@triton.jit
def ox_to_signed(x, target: tl.constexpr, limit: tl.constexpr):
    """A float as a signed integer, as x86 has it: the least value where it is out of range, or NaN."""
    least = tl.full(x.shape, -limit, x.dtype)
    ok = (x >= least) & (x < -least)
    return tl.where(ok, x, least).to(target)


@triton.jit
def ox_to_int32(x):
    return ox_to_signed(x, tl.int32, 2147483648.0)


@triton.jit
def ox_to_int64(x):
    return ox_to_signed(x, tl.int64, 9223372036854775808.0)


@triton.jit
def ox_to_uint32(x):
    """As x86 compilers have it: what is above half of the range is shifted into it."""
    high = x >= 2147483648.0
    low = ox_to_int32(tl.where(high, x - 2147483648.0, x)).to(tl.uint32, bitcast=True)
    return tl.where(high, low ^ 2147483648, low).to(tl.uint32)


@triton.jit
def ox_to_uint64(x):
    high = x >= 9223372036854775808.0
    low = ox_to_int64(tl.where(high, x - 9223372036854775808.0, x))
    return tl.where(high, low ^ -9223372036854775808, low).to(tl.uint64, bitcast=True)


@triton.jit
def ox_quantize(x, scale, zero, low, high):
    """round(x / scale) + zero, limited to [low, high], as int32; NaN gives low."""
    y = libdevice.rint(tl.div_rn(x, scale)) + zero
    y = tl.where(y == y, y, low)
    return tl.minimum(tl.maximum(y, low), high).to(tl.int32)


@triton.jit
def ox_rounds(x, y, a: tl.constexpr, b: tl.constexpr, c: tl.constexpr, d: tl.constexpr):
    """Four rounds of Threefry, with these rotations."""
    x += y
    y = ((y << a) | (y >> (32 - a))) ^ x
    x += y
    y = ((y << b) | (y >> (32 - b))) ^ x
    x += y
    y = ((y << c) | (y >> (32 - c))) ^ x
    x += y
    y = ((y << d) | (y >> (32 - d))) ^ x
    return x, y


@triton.jit
def ox_threefry(key, counter):
    """Threefry-2x32 with 20 rounds: see onnxc/primitives/random.py."""
    a, b = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    c = a ^ b ^ 0x1BD11BDA
    x, y = counter.to(tl.uint32) + a, (counter >> 32).to(tl.uint32) + b
    x, y = ox_rounds(x, y, 13, 15, 26, 6)
    x, y = ox_rounds(x + b, y + (c + 1), 17, 29, 16, 24)
    x, y = ox_rounds(x + c, y + (a + 2), 13, 15, 26, 6)
    x, y = ox_rounds(x + a, y + (b + 3), 17, 29, 16, 24)
    x, y = ox_rounds(x + b, y + (c + 4), 13, 15, 26, 6)
    return (x + c).to(tl.uint64) | ((y + (a + 5)).to(tl.uint64) << 32)


@triton.jit
def ox_wrapped(i, extent):
    """An index that is data: negative ones count from the end."""
    i = i.to(tl.int64)
    return tl.where(i < 0, i + extent, i)


@triton.jit
def ox_same(a, b):
    """Whether two elements have the same place in an order, in which NaN is the greatest."""
    return (a == b) | ((a != a) & (b != b))


@triton.jit
def ox_above(a, b):
    """Whether a comes before b where the greatest is first, NaN before all."""
    return (a > b) | ((a != a) & (b == b))


@triton.jit
def ox_below(a, b):
    """Whether a comes before b where the least is first, NaN behind all."""
    return (a < b) | ((b != b) & (a == a))


@triton.jit
def ox_report(error, bad, code, call, value):
    """Writes down what went wrong: codes of runtime.h, and a value that says more.

    One report is kept, with the words of one lane: that which draws number 0. Once one has, others need not draw.
    """
    zero = tl.zeros(bad.shape, tl.int32)
    nothing = zero.to(tl.int64)
    drawn = error + 3 + zero
    bad = bad & (tl.load(drawn, mask=bad, other=1, volatile=True) == 0)
    first = bad & (tl.atomic_add(drawn, nothing + 1, mask=bad) == 0)
    tl.store(error + zero, nothing + code, mask=first)
    tl.store(error + 1 + zero, nothing + call, mask=first)
    tl.store(error + 2 + zero, nothing + value, mask=first)


# ---------------------------------------------------------------- boxes and trees


@triton.jit
def ox_score_key(score, at):
    """Integers that are greater for higher scores, and of equal ones (-0 is 0) for lower positions."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (order << 32) | (4294967295 - at.to(tl.int64))


@triton.jit
def ox_in_order(a, b):
    """The lower of two ends, and the higher one."""
    return tl.where(a >= b, b, a), tl.where(a >= b, a, b)


@triton.jit
def ox_overlaps(ax0, ax1, ay0, ay1, bx0, bx1, by0, by1, limit):
    """Whether what boxes have in common is more than `limit` of what they cover. Each step is rounded."""
    area, other = libdevice.mul_rn(ax1 - ax0, ay1 - ay0), libdevice.mul_rn(bx1 - bx0, by1 - by0)
    left, right = tl.where(ax0 < bx0, bx0, ax0), tl.where(bx1 < ax1, bx1, ax1)
    low, high = tl.where(ay0 < by0, by0, ay0), tl.where(by1 < ay1, by1, ay1)
    common = libdevice.mul_rn(right - left, high - low)
    both = area + other - common
    apart = (right <= left) | (high <= low) | (common <= 0) | (area <= 0) | (other <= 0) | (both <= 0)
    return (tl.div_rn(common, both) > limit) & (apart == 0)


@triton.jit
def ox_double(words):
    """A float64 that lies in two words."""
    low, high = tl.load(words).to(tl.uint32, bitcast=True), tl.load(words + 1).to(tl.uint32, bitcast=True)
    return (low.to(tl.uint64) | (high.to(tl.uint64) << 32)).to(tl.float64, bitcast=True)
