// f64 one register after the other: what the functions of f64 in vsqrt.h, vexp.h, vlog.h and vtrig.h share.
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
