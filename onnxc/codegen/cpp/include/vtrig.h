// Sine and cosine.
#pragma once
#include "vlibm.h"
#include "vregisters.h"

OX_LANES(sin) OX_LANES(cos)

// sin(x + quarter pi/2): 1.6 ULP up to SINCOS_LIMIT, libm beyond. x = n pi/2 + r by Cody and Waite: with a
// fused multiply the first subtraction is exact; without, pi/2 needs parts so short that n times each is. All parts are
// positive, so that -0 stays -0.
static constexpr f32 SINCOS_LIMIT = OX_FMA ? 48000.0f : 10000.0f;
OX vf v_sincos(vf x, i32 quarter) {
  const vf magic = bc(0x1.8p23f);
  vf q = x * 0x1.45f306p-1f + magic, n = q - magic;
#if OX_FMA
  vf r = ((x - n * 0x1.921fb4p0f) - n * 0x1.4442dp-24f) - n * 0x1.846988p-48f;
#else
  vf r = (((x - n * 0x1.92p0f) - n * 0x1.fb4p-12f) - n * 0x1.444p-24f) - n * 0x1.68c234p-39f;
#endif
  vi k = bits<vi>(q) + quarter;
  vf t = r * r;
  vf s = (t * -0.00019517907639965415f + 0.008332187309861183f) * t + -0.16666655242443085f;
  s = v_or(s * (t * r) + r, v_signbit(r));  // the sign matters for -0 alone
  vf c = (t * 2.44323346123565e-05f + -0.0013887309469282627f) * t + 0.04166664555668831f;
  c = (c * t + -0.5f) * t + 1.0f;
  vf y = (k & 1) != 0 ? c : s;
  return bits<vf>(bits<vi>(y) ^ ((k & 2) << 30));
}
OX vf v_sin(vf x) {
  const vf r = v_sincos(x, 0), a = v_abs(x);
  if (__builtin_expect(!v_any_gt(a, bc(SINCOS_LIMIT)), 1)) return r;
  return a > SINCOS_LIMIT ? lanes_sin(x) : r;
}
OX vf v_cos(vf x) {
  const vf r = v_sincos(x, 1), a = v_abs(x);
  if (__builtin_expect(!v_any_gt(a, bc(SINCOS_LIMIT)), 1)) return r;
  return a > SINCOS_LIMIT ? lanes_cos(x) : r;
}

// ---- f64 -----------------------------------------------------------------------------------------------

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
#else
OX vd v_sin(vd x) { return lanes_sin(x); }
OX vd v_cos(vd x) { return lanes_cos(x); }
#endif
