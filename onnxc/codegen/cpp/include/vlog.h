// Natural logarithms.
#pragma once
#include "vregisters.h"

// log(1 + f) + e ln2 for f in [-1/4, 1/2].
OX vf v_log_poly(vf f, vf e) {
  vf p = f * -0.04511205479502678f + 0.10468878597021103f;
  p = p * f + -0.13163873553276062f;
  p = p * f + 0.14478321373462677f;
  p = p * f + -0.1664699912071228f;
  p = p * f + 0.19990819692611694f;
  p = p * f + -0.25000104308128357f;
  p = p * f + 0.3333345055580139f;
  vf s = f * f, y = (p * f) * s + e * 0x1.7f7d1cp-20f;
  return e * 0x1.62e4p-1f + ((y - s * 0.5f) + f);
}

// 0.9 ULP. x = m 2^e with m in [3/4, 3/2).
#if OX_512
OX vf v_log(vf x) {
  // getexp and getmant do denormals, zero, infinity and (as sign control says) negatives by themselves.
  vf m = __builtin_ia32_getmantps512_mask(x, 11, x, OX_ALL, OX_CUR);
  vf e = __builtin_ia32_getexpps512_mask(x, x, OX_ALL, OX_CUR);
  e -= __builtin_ia32_getexpps512_mask(m, m, OX_ALL, OX_CUR);
  return v_log_poly(m - 1.0f, e);
}
#else
OX vf v_log_bits(vi b, vi less) {
  return v_log_poly(bits<vf>((b & 0x7fffff) + 0x3f400000) - 1.0f, conv<f32, i32>((b >> 23) - less));
}
OX vf v_log_any(vf x) {
  vi tiny = x < 0x1p-126f;
  vf r = v_log_bits(bits<vi>(tiny ? x * 0x1p23f : x) - 0x3f400000, tiny & 23);
  r = x < F_INF ? r : x;  // infinity and NaN
  return x > 0.0f ? r : x == 0.0f ? bc(-F_INF) : bc(__builtin_nanf(""));
}
#if OX_SHORT
OX_SELDOM vf v_log_far(vf x, vf near) { return (x >= 0x1p-126f) & (x < F_INF) ? near : v_log_any(x); }
OX vf v_log(vf x) {
  const vf r = v_log_bits(bits<vi>(x) - 0x3f400000, vi{});
  const V<u32> b = bits<V<u32>>(x) - 0x800000u;  // below 0x7f000000 for positive normal numbers
  return OX_OUTSIDE(bits<vf>(b | (b + 0x1000000u))) ? v_log_far(x, r) : r;
}
#else
OX vf v_log(vf x) { return v_log_any(x); }
#endif
#endif

// ---- f64 -----------------------------------------------------------------------------------------------

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
