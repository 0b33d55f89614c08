// e^x and tanh.
#pragma once
#include "vregisters.h"

// p 2^n for n in [-300, 300], given as q = n + 1.5 * 2^23 (its low bits are n), rounded once: results may
// be denormal, zero or infinite. In two steps because 2^n may not be a normal number: the first is exact.
OX vf v_scale(vf p, vf q) {
#if OX_512
  return __builtin_ia32_scalefps512_mask(p, q - 0x1.8p23f, p, OX_ALL, OX_CUR);
#else
  vi k = bits<vi>(q), h = k >> 1;
  return p * bits<vf>((h << 23) + 0x3f800000) * bits<vf>(((k - h) << 23) + 0x3f800000);
#endif
}

// e^x, 1.3 ULP, denormal results included; NaN passes. x = n ln2 + r: adding 1.5 * 2^23 rounds x / ln2 to a whole
// number (or less, to eighths or sixteenths), and of the two parts of ln2 the first times n is exact.
#if OX_512
static const f32 EXP2_16TH[16] __attribute__((aligned(64))) = {  // 2^(k/16)
    1.0f,        1.04427373f, 1.09050775f, 1.13878858f, 1.18920708f, 1.24185777f, 1.29683959f, 1.35425556f,
    1.41421354f, 1.47682619f, 1.54221082f, 1.61049032f, 1.68179286f, 1.75625217f, 1.8340081f,  1.91520655f};
OX vf v_exp(vf x) {
  // n in sixteenths: 2^(k/16) comes from a register, r is so small that degree 3 does, and scalef floors n.
  x = v_clip(x, -104.0f, 89.0f);
  vf q = x * 0x1.715476p0f + 0x1.8p19f, n = q - 0x1.8p19f;
  vf r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
  vf t = __builtin_shuffle(*(const vf *)EXP2_16TH, bits<vi>(q));
  vf p = (r * 0.16666839f + 0.50001627f) * (r * r) + r;
  return __builtin_ia32_scalefps512_mask(p * t + t, n, n, OX_ALL, OX_CUR);
}
#elif OX_SHORT
// The bits of 2^(i/8), less i in the place that the low bits of q << 20 have.
static const u32 EXP2_8TH[8] __attribute__((aligned(32))) = {0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7,
                                                             0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7};
// n in eighths, as q = 8 n + 1.5 * 2^23, s = 2^n and p = e^r - 1.
struct ExpNear { vf q, s, p; };
OX ExpNear v_exp_near(vf x) {
  vf q = x * 0x1.715476p3f + 0x1.8p23f, n = q - 0x1.8p23f;
  vf r = (x - n * 0x1.62e4p-4f) - n * 0x1.7f7d1cp-23f, t = r * r;
  vf p = (t * 0.04167063534259796f + (r * 0.16668027639389038f + 0.5f)) * t + r;
  vf power = __builtin_ia32_permvarsf256(bits<vf>(ld(EXP2_8TH)), bits<vi>(q));
  return {q, bits<vf>(bits<V<u32>>(power) + (bits<V<u32>>(q) << 20)), p};
}
// Beyond 87 on either side 2^n may be no normal number. Masks make -infinity frequent, so that what is surely zero or
// infinite is told from the rest.
OX_SELDOM vf v_exp_far(vf x, vf near) {
  const vi low = x < -104.0f, high = x > 89.0f, edge = ~((v_abs(x) <= 87.0f) | low | high);
  near = high ? bc(F_INF) : low ? vf{} : near;
  if (__builtin_ia32_movmskps256((vf)edge) == 0) return near;
  const ExpNear e = v_exp_near((low | high) ? vf{} : x);
  const vi n = (bits<vi>(e.q) - bits<vi>(bc(0x1.8p23f))) >> 3;
  const vf s = bits<vf>(bits<vi>(e.s) - (n << 23));
  return edge ? v_scale(e.p * s + s, bits<vf>(n)) : near;
}
OX vf v_exp(vf x) {
  const ExpNear e = v_exp_near(x);
  const vf r = e.p * e.s + e.s;
  return OX_OUTSIDE(~(v_abs(x) <= 87.0f)) ? v_exp_far(x, r) : r;
}
#else
OX vf v_exp(vf x) {
  x = v_clip(x, -104.0f, 89.0f);
  vf q = x * 0x1.715476p0f + 0x1.8p23f, n = q - 0x1.8p23f;
  vf r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f, t = r * r;
  vf p = (t * 0.0013818938750773668f + (r * 0.008368703536689281f + 0.04166828840970993f)) * t +
         (r * 0.1666652113199234f + 0.4999999403953552f);
  return v_scale(p * t + (r + 1.0f), q);
}
#endif

// 3 ULP. With 2 |x| = n ln2 + 2 r: (2^n e^2r - 1) / (2^n e^2r + 1), and p = e^2r - 1 so that small results
// keep their digits. An error of r matters the less the larger n is, so ln2 needs no second part. Beyond
// 9.02 the nearest float is 1, and at 10 the quotient is 1.
OX vf v_tanh(vf x) {
  vf a = v_min_fast(bc(10.0f), v_abs(x)), q = a * 0x1.715476p1f + 0x1.8p23f;
  vf r = a - (q - 0x1.8p23f) * 0x1.62e43p-2f, h = bits<vf>((bits<vi>(q) + 128) << 23), t = r * r;
  vf p = r * (16 * 0.008366432040929794f) + 8 * 0.04166746139526367f;
  p = (t * (32 * 0.0013868435053154826f) + p) * t + (r * (4 * 0.1666654497385025f) + 2 * 0.4999999701976776f);
  p = p * t + r;
  vf s = h * 0.5f;
  return v_or((h * p + (s - 1.0f)) / (h * p + (s + 1.0f)), v_signbit(x));
}

// ---- f64 -----------------------------------------------------------------------------------------------

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
