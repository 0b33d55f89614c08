// exp, log, tanh, sin, cos and sqrt of f64, one register after the other. Coefficients are minimax fits of the
// relative error, rounded to f64; bounds in ULP stand beside each function (tests/test_vmath.py checks them).
#pragma once
#include "vmath.h"

typedef VR<f64> rd;
typedef VR<u64> ru;

template <class F> OX vd by_registers(vd x, F f) {
  vec_parts<vd> p = bits<vec_parts<vd>>(x);
  OX_UNROLL for (int i = 0; i < vec_parts<vd>::count; i++) p.v[i] = f(p.v[i]);
  return bits<vd>(p);
}
OX rd r_bc(f64 x) { return x - rd{}; }
OX rd r_abs(rd x) { return bits<rd>(bits<ru>(x) & ~0ull >> 1); }
OX rd r_sign_of(rd magnitude, rd x) { return bits<rd>(bits<ru>(magnitude) | (bits<ru>(x) & 1ull << 63)); }
// lo <= x <= hi; NaN passes.
OX rd r_clip(rd x, f64 lo, f64 hi) {
  x = x < lo ? r_bc(lo) : x;
  return x > hi ? r_bc(hi) : x;
}

static constexpr f64 ROUND64 = 0x1.8p52;          // adding it rounds: the low bits are the integer
static constexpr u64 ONE64 = 1023ull << 52;       // the bits of 1.0
static constexpr f64 LN2_HI = 0x1.62e42feep-1;    // times an exponent, exact
static constexpr f64 LN2_LO = 0x1.a39ef35793c76p-33;

// p 2^n for n in [-1076, 1025], given as q = n + ROUND64, rounded once (see v_scale).
OX rd r_scale(rd p, rd q) {
  const rd n = q - ROUND64;
#if OX_512
  return __builtin_ia32_scalefpd512_mask(p, n, p, (u8)-1, OX_CUR);
#else
  const rd half = n * 0.5 + ROUND64, rest = (n - (half - ROUND64)) + ROUND64;
  return p * bits<rd>((bits<ru>(half) << 52) + ONE64) * bits<rd>((bits<ru>(rest) << 52) + ONE64);
#endif
}
// e^x = 2^n (1 + p): q is n + ROUND64, and p = e^r - 1 for the rest r of x, with |r| <= ln2 / 2.
struct ExpParts { rd q, p; };
OX ExpParts r_exp_parts(rd x) {
  const rd q = x * 0x1.71547652b82fep0 + ROUND64, n = q - ROUND64, r = (x - n * LN2_HI) - n * LN2_LO, t = r * r, u = t * t;
  const rd a = (r * 0x1.55555555554f9p-3 + 0x1.000000000000ap-1) + (r * 0x1.1111111127becp-7 + 0x1.55555555507c5p-5) * t;
  const rd b = (r * 0x1.a01a012ac8401p-13 + 0x1.6c16c18454d88p-10) + (r * 0x1.71df23516bc5ep-19 + 0x1.a01999922301dp-16) * t;
  const rd c = r * 0x1.ad843d4d150e9p-26 + 0x1.28ade8f77a72fp-22;
  return {q, ((c * u + b) * u + a) * t + r};
}

// 1.1 ULP, denormal results included.
OX rd r_exp(rd x) {
  const ExpParts e = r_exp_parts(r_clip(x, -746.0, 710.0));
  return r_scale(e.p + 1.0, e.q);
}
OX vd v_exp(vd x) { return by_registers(x, [](rd v) OX_LAMBDA { return r_exp(v); }); }

// 2.7 ULP. With e^2|x| = h (1 + p): (h p + (h - 1)) / (h p + (h + 1)), or 1 less 2 / (h p + (h + 1)) where that is small.
// From 19.1 on the nearest double is 1.
OX rd r_tanh(rd x) {
  const ExpParts e = r_exp_parts(r_clip(2.0 * r_abs(x), 0.0, 40.0));
  const rd h = bits<rd>((bits<ru>(e.q) << 52) + ONE64), y = h * e.p;
  const auto far = h > 4.0;
  const rd q = (far ? r_bc(-2.0) : y + (h - 1.0)) / (y + (h + 1.0));
  return r_sign_of(far ? q + 1.0 : q, x);
}
OX vd v_tanh(vd x) { return by_registers(x, [](rd v) OX_LAMBDA { return r_tanh(v); }); }

// 1 ULP. x = m 2^e with m in [sqrt(1/2), sqrt(2)); with s = f / (2 + f), log(1 + f) = f - (f^2 / 2 - s (f^2 / 2 + R(s^2))).
OX rd r_log(rd x) {
  const u64 base = 0x3fe6a09e667f3bcd;  // sqrt(1/2)
  const auto tiny = x < 0x1p-1022;
  const ru b = bits<ru>(tiny ? x * 0x1p52 : x) - (base - (1024ull << 52));
  const rd e = bits<rd>((b >> 52) | 0x4330000000000000) - (tiny ? r_bc(0x1p52 + 1024 + 52) : r_bc(0x1p52 + 1024));
  const rd f = bits<rd>((b & 0xfffffffffffff) + base) - 1.0, s = f / (f + 2.0), z = s * s, w = z * z, half = f * f * 0.5;
  const rd even = ((w * 0x1.2f19b92bc70cfp-3 + 0x1.7466511409381p-3) * w + 0x1.24924942521b1p-2) * w + 0x1.5555555555593p-1;
  const rd odd = (w * 0x1.399fcd87a62adp-3 + 0x1.c71c51b59551ap-3) * w + 0x1.999999997f751p-2;
  rd r = e * LN2_HI - ((half - (s * ((odd * z + even) * z + half) + e * LN2_LO)) - f);
  r = x < __builtin_inf() ? r : x;  // infinity and NaN
  return x > 0.0 ? r : x == 0.0 ? r_bc(-__builtin_inf()) : x == x ? r_bc(__builtin_nan("")) : x;
}
OX vd v_log(vd x) { return by_registers(x, [](rd v) OX_LAMBDA { return r_log(v); }); }

// sin(x + quarter pi/2), 1.5 ULP up to SINCOS_LIMIT64, libm beyond, and without fused multiplies: with them the first
// subtraction of n pi/2 is exact.
#if OX_FMA
static constexpr f64 SINCOS_LIMIT64 = 0x1p20;
OX rd r_sincos(rd x, u64 quarter) {
  const rd q = x * 0x1.45f306dc9c883p-1 + ROUND64, n = q - ROUND64;
  const rd r = ((x - n * 0x1.921fb54442d18p0) - n * 0x1.1a62633145c07p-54) + n * 0x1.f1976b7ed8fbcp-110;
  const ru k = bits<ru>(q) + quarter;
  const rd t = r * r, u = t * t;
  const rd a = (t * 0x1.5d915e6ac697ap-33 - 0x1.ae5e60c619590p-26) * u + (t * 0x1.71de3570fff23p-19 - 0x1.a01a019c0a2c8p-13);
  const rd s = r + (a * u + (t * 0x1.111111110f842p-7 - 0x1.5555555555549p-3)) * (t * r);
  const rd b = (t * -0x1.8facd1735faeep-37 + 0x1.1ee9e891100b8p-29) * u + (t * -0x1.27e4f80534841p-22 + 0x1.a01a019cab75cp-16);
  const rd w = 1.0 - t * 0.5;
  const rd c = w + (((1.0 - w) - t * 0.5) + (b * u + (t * -0x1.6c16c16c15140p-10 + 0x1.555555555554cp-5)) * u);
  const rd y = (k & 1) != 0 ? c : s;
  return bits<rd>(bits<ru>(y) ^ ((k & 2) << 62));
}
OX bool v_any_beyond(vd x, f64 limit) {
  ru any{};
  const vec_parts<vd> p = bits<vec_parts<vd>>(x);
  OX_UNROLL for (int i = 0; i < vec_parts<vd>::count; i++) any |= bits<ru>(r_abs(p.v[i]) > limit);
  u64 found = 0;
  OX_UNROLL for (int i = 0; i < VRL<f64>; i++) found |= any[i];
  return found != 0;
}
OX vd v_sin(vd x) {
  const vd r = by_registers(x, [](rd v) OX_LAMBDA { return v == 0.0 ? v : r_sincos(v, 0); });
  if (__builtin_expect(!v_any_beyond(x, SINCOS_LIMIT64), 1)) return r;
  return v_sel(v_gt(v_abs(x), bc(SINCOS_LIMIT64)), lanes_sin(x), r);
}
OX vd v_cos(vd x) {
  const vd r = by_registers(x, [](rd v) OX_LAMBDA { return r_sincos(v, 1); });
  if (__builtin_expect(!v_any_beyond(x, SINCOS_LIMIT64), 1)) return r;
  return v_sel(v_gt(v_abs(x), bc(SINCOS_LIMIT64)), lanes_cos(x), r);
}
#endif

template <> inline OX_LAMBDA vd v_sqrt(vd x) {
  return by_registers(x, [](rd v) OX_LAMBDA {
#if OX_512
    return __builtin_ia32_sqrtpd512_mask(v, v, (u8)-1, OX_CUR);
#elif OX_256
    return __builtin_ia32_sqrtpd256(v);
#elif defined(__SSE2__)
    return __builtin_ia32_sqrtpd(v);
#else
    OX_UNROLL for (int i = 0; i < VRL<f64>; i++) v[i] = __builtin_sqrt(v[i]);
    return v;
#endif
  });
}
