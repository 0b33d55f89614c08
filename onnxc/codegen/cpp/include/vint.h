// Quotients and remainders, of integers and of floats: all of them exact.
#pragma once
#include "vlibm.h"
#include "vround.h"

// Quotient towards zero. INT_MIN / -1 wraps; a zero divisor counts as 1 (lanes past a tail hold zeros):
// who may meet one checks for it before.
template <class A> static __attribute__((noinline)) A lanes_idiv(A a, A b) {
  for (int i = 0; i < VL; i++) a[i] = a[i] / b[i];
  return a;
}
// A quotient of numbers below 2^52 is the same in f64: it is no integer unless the exact one is.
template <class A> OX A wide_idiv(A a, A b) {
#if OX_512
  constexpr bool is_signed = (elem<A>)-1 < 0;
  typedef typename vec_parts<A>::part R;
  typedef VR<u64> W;
  typedef long long I __attribute__((vector_size(64)));
  vec_parts<A> p = bits<vec_parts<A>>(a), d = bits<vec_parts<A>>(b);
  W large = W{};
  for (int i = 0; i < vec_parts<A>::count; i++)
    large |= is_signed ? (bits<W>(p.v[i]) + (1ull << 52)) | (bits<W>(d.v[i]) + (1ull << 52)) : bits<W>(p.v[i] | d.v[i]);
  if (__builtin_expect(!__builtin_ia32_ptestmq512(bits<I>(large), I{} - (1ll << (is_signed ? 53 : 52)), (u8)-1), 1)) {
    OX_UNROLL for (int i = 0; i < vec_parts<A>::count; i++) {
      const VR<f64> x = __builtin_convertvector(p.v[i], VR<f64>), y = __builtin_convertvector(d.v[i], VR<f64>);
      p.v[i] = __builtin_convertvector(x / y, R);
    }
    return bits<A>(p);
  }
#elif OX_256
  // The sum of 2^52 + 2^51 and a smaller integer has that integer as its last bits.
  constexpr f64 base = 0x1.8p52;
  constexpr u64 code = 0x4338ull << 48, half = 1ull << 51;
  typedef VR<u64> W;
  typedef long long I __attribute__((vector_size(32)));
  vec_parts<A> p = bits<vec_parts<A>>(a), d = bits<vec_parts<A>>(b);
  constexpr u64 below = (elem<A>)-1 < 0 ? half : 0;  // u64 of 2^51 and more are none of these
  W large = W{};
  for (int i = 0; i < vec_parts<A>::count; i++) large |= (bits<W>(p.v[i]) + below) | (bits<W>(d.v[i]) + below);
  if (__builtin_expect(__builtin_ia32_ptestz256(bits<I>(large), bits<I>(W{} - (below ? 2 * half : half))), 1)) {
    OX_UNROLL for (int i = 0; i < vec_parts<A>::count; i++) {
      const VR<f64> x = bits<VR<f64>>(bits<W>(p.v[i]) + code) - base, y = bits<VR<f64>>(bits<W>(d.v[i]) + code) - base;
      const VR<f64> q = __builtin_ia32_roundpd256(x / y, 3) + base;
      p.v[i] = bits<VR<elem<A>>>(bits<W>(q) - code);
    }
    return bits<A>(p);
  }
#endif
  return lanes_idiv(a, b);
}
template <class A> OX A v_idiv(A a, A b) {
  typedef elem<A> T;
  const A one = bc((T)1);
  b = v_sel(v_eq(b, A{}), one, b);
  mask_of<A> minus = v_eq(b, bc((T)-1));
  if constexpr ((T)-1 < 0) b = v_sel(minus, one, b);
  A q;
  if constexpr (sizeof(T) == 8) q = wide_idiv(a, b);  // narrower ones are exact as floats
  else if constexpr (sizeof(T) == 4) q = conv<T, f64>(conv<f64, T>(a) / conv<f64, T>(b));
  else q = conv<T, i32>(conv<i32, f32>(conv<f32, T>(a) / conv<f32, T>(b)));
  if constexpr ((T)-1 < 0) return v_sel(minus, v_neg(a), q);
  else return q;
}

OX_LANES2(fmod)
// Remainder with the dividend's sign: C's fmod, and % of integers.
template <class A> OX A v_fmod(A a, A b) {
  if constexpr (is_float<elem<A>>) return lanes_fmod(a, b);
  else return a - v_idiv(a, b) * b;
}
#if OX_FMA
// Exact: the quotient may be rounded up to an integer, else x - q y is what C has; either needs no rounding. What is
// far apart, infinite, NaN or divided by 0 is left to libm.
OX vf v_fmod(vf x, vf y) {
  const vf a = v_abs(x), b = v_abs(y), q = v_trunc(a / b);
  const vf far = (q < 0x1p22f) & (b < F_INF) ? vf{} : bc(1.0f);
  if (__builtin_expect(v_any_gt(far, vf{}), 0)) return lanes_fmod(x, y);
  const vf r = a - q * b;
  return v_or(r < 0.0f ? r + b : r, v_signbit(x));
}
OX vd v_fmod(vd x, vd y) {
  const vd a = v_abs(x), b = v_abs(y), q = v_trunc(a / b);
  const vl near = v_lt(q, bc(0x1p51)) & v_lt(b, bc((f64)__builtin_inf()));
  if (__builtin_expect(v_any_gt(conv<f32, i64>(near + 1), vf{}), 0)) return lanes_fmod(x, y);
  const vd r = a - q * b;
  return v_or(v_sel(v_lt(r, vd{}), r + b, r), v_signbit(x));
}
#endif
// Remainder with the divisor's sign: Python's %; a zero result takes the divisor's sign too.
template <class A> OX A v_mod(A a, A b) {
  typedef elem<A> T;
  A r = v_fmod(a, b);
  const A zero = {};
  mask_of<A> other = v_lt(r, zero) ^ v_lt(b, zero);  // the signs differ
  if constexpr (is_float<T>) return v_sel(v_eq(r, zero), v_copysign(r, b), v_sel(other, r + b, r));
  else if constexpr ((T)-1 < 0) return v_sel(v_ne(r, zero) & other, r + b, r);
  else return r;
}
