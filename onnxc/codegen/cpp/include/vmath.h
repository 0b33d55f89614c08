// Math on whole vectors: signs, minimum and maximum of any element type, and what the headers of functions share. Those
// are vround.h, vsqrt.h, vexp.h, vlog.h, verf.h, vtrig.h, varc.h, vlibm.h, vpow.h, vint.h and vquantize.h, and a program
// includes those whose functions it names (headers.py).
//
// Most functions of f32 and f64 are polynomials (bounds in ULP stand beside each; tests/test_vmath.py checks them); the
// rarer ones call libm lane by lane through __builtin_ functions, so that nothing is included or declared. Results
// follow IEEE 754: NaN, infinities, -0.0 and denormals included.
//
// Every function has three forms at most: AVX-512 (VL 16), AVX (VL 8), and vector extensions that compile
// anywhere. All rely on a * b + c being contracted to one fused instruction where the machine has it, but
// none needs it to be right. Coefficients are minimax fits of the relative error, rounded to the element type.
#pragma once
#include "vec.h"

#if defined(__AVX512F__) && defined(__AVX512DQ__) && ONNXC_VL == 16
#define OX_512 1
#elif defined(__AVX__) && ONNXC_VL == 8
#define OX_256 1
#elif defined(__SSE4_1__) && ONNXC_VL == 4
#define OX_128 1
#endif
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define OX_FMA 1
#else
#define OX_FMA 0
#endif
#if OX_512
#define OX_ALL ((u16)-1)  // the mask of all lanes
#define OX_CUR 4          // "round as the mode register says": the last argument of most builtins
#endif

template <class T> static constexpr bool is_float = (T)0.5 != 0;

static constexpr f32 F_INF = __builtin_inff();

// Functions of AVX2 have a short form for arguments that need no care: so many instructions wait for each other that
// the processor's schedulers, not its units, bound how many vectors are under way at once. Where a lane needs more, a
// call replaces it and leaves the others as they are: what a lane gives depends on nothing but its own argument.
#if OX_256 && defined(__AVX2__) && defined(__FMA__)
#define OX_SHORT 1
#define OX_SELDOM static __attribute__((noinline, cold, unused))
#define OX_OUTSIDE(m) __builtin_expect(__builtin_ia32_movmskps256((vf)(m)), 0)  // whether any lane is marked
#endif

// ---- bits: signs, tests -------------------------------------------------------------------------------

template <class A> OX A v_signbit(A x) {
  typedef typename int_of<sizeof(elem<A>)>::s I;
  return bits<A>(bits<V<I>>(x) & bc((I)((I)1 << (sizeof(I) * 8 - 1))));
}
template <class A> OX A v_xor(A a, A b) { return bits<A>(bits<mask_of<A>>(a) ^ bits<mask_of<A>>(b)); }
template <class A> OX A v_or(A a, A b) { return bits<A>(bits<mask_of<A>>(a) | bits<mask_of<A>>(b)); }
template <class A> OX A v_neg(A x) {
  typedef elem<A> T;
  if constexpr (is_float<T>) return v_xor(x, bc((T)-0.0));
  else return (x ^ bc((T)-1)) + bc((T)1);
}
template <class A> OX A v_abs(A x) {
  typedef elem<A> T;
  if constexpr (is_float<T>) return v_xor(x, v_signbit(x));
  else if constexpr ((T)-1 > 0) return x;
  else return v_sel(v_lt(x, A{}), v_neg(x), x);
}
template <class A> OX A v_copysign(A magnitude, A sign) { return v_or(v_abs(magnitude), v_signbit(sign)); }

// -1, 0 or 1; a NaN stays, and both zeros give +0.
template <class A> OX A v_sign(A x) {
  typedef elem<A> T;
  const A one = bc((T)1), zero = {};
  A r = v_sel(v_gt(x, zero), one, v_sel(v_lt(x, zero), bc((T)-1), zero));
  if constexpr (is_float<T>) return v_sel(v_ne(x, x), x, r);
  else return r;
}

// ---- minimum, maximum ---------------------------------------------------------------------------------

// One instruction on x86: the second operand where the two are equal or either is NaN.
template <class A> OX A v_max_fast(A a, A b) { return v_sel(v_gt(a, b), a, b); }
template <class A> OX A v_min_fast(A a, A b) { return v_sel(v_lt(a, b), a, b); }
#if OX_512
template <> inline OX_LAMBDA vf v_max_fast(vf a, vf b) {
  return __builtin_ia32_maxps512_mask(a, b, a, OX_ALL, OX_CUR);
}
template <> inline OX_LAMBDA vf v_min_fast(vf a, vf b) {
  return __builtin_ia32_minps512_mask(a, b, a, OX_ALL, OX_CUR);
}
#elif OX_256
template <> inline OX_LAMBDA vf v_max_fast(vf a, vf b) { return __builtin_ia32_maxps256(a, b); }
template <> inline OX_LAMBDA vf v_min_fast(vf a, vf b) { return __builtin_ia32_minps256(a, b); }
#elif OX_128
template <> inline OX_LAMBDA vf v_max_fast(vf a, vf b) { return __builtin_ia32_maxps(a, b); }
template <> inline OX_LAMBDA vf v_min_fast(vf a, vf b) { return __builtin_ia32_minps(a, b); }
#endif

// a where it is no number, else r. Not as a select: of `x != x` for an x that was selected g++ asks the same of both
// sides, which takes exponential time for a chain of maxima.
template <class A> OX A v_nan_or(A a, A r) {
  typedef mask_of<A> M;
  const M nan = v_ne(a, a);
  return bits<A>((bits<M>(a) & nan) | (bits<M>(r) & ~nan));
}
#if OX_512
template <> inline OX_LAMBDA vf v_nan_or(vf a, vf r) {
  return __builtin_ia32_blendmps_512_mask(r, a, __builtin_ia32_cmpps512_mask(a, a, 3, OX_ALL, OX_CUR));
}
#elif OX_256
template <> inline OX_LAMBDA vf v_nan_or(vf a, vf r) {
  return __builtin_ia32_blendvps256(r, a, __builtin_ia32_cmpps256(a, a, 3));
}
#endif

// As numpy.maximum and ONNX Max: a NaN in either gives NaN; of two zeros the second comes out.
template <class A> OX A v_max(A a, A b) {
  if constexpr (is_float<elem<A>>) return v_nan_or(a, v_max_fast(a, b));
  else return v_max_fast(a, b);
}
template <class A> OX A v_min(A a, A b) {
  if constexpr (is_float<elem<A>>) return v_nan_or(a, v_min_fast(a, b));
  else return v_min_fast(a, b);
}
// lo <= x <= hi in two instructions; NaN passes.
template <class A> OX A v_clip(A x, elem<A> lo, elem<A> hi) {
  return v_min_fast(bc(hi), v_max_fast(bc(lo), x));
}

// Whether any lane of a is greater than b's.
OX bool v_any_gt(vf a, vf b) {
#if OX_512
  return __builtin_ia32_cmpps512_mask(a, b, 30, OX_ALL, OX_CUR) != 0;
#elif OX_256
  return __builtin_ia32_movmskps256((vf)(a > b)) != 0;
#elif OX_128
  return __builtin_ia32_movmskps((vf)(a > b)) != 0;
#else
  vi m = a > b;
  i32 any = 0;
  OX_UNROLL for (int i = 0; i < VL; i++) any |= m[i];
  return any != 0;
#endif
}
