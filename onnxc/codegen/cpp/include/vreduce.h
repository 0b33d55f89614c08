// Horizontal reductions: one number from the lanes of a vector, by halving, so that the order is fixed.
#pragma once
#include "vec.h"

// N numbers as a vector. Down to four lanes the halves are registers of their own; the last four are combined
// as numbers, in the same order.
template <class T, int N> struct some { typedef T type __attribute__((vector_size(sizeof(T) * N))); };
template <class T, int N> struct halves { typename some<T, N / 2>::type lo, hi; };
template <class T, int N, class F> OX T h_fold(typename some<T, N>::type v, F f) {
  if constexpr (N > 4) {
    halves<T, N> h = bits<halves<T, N>>(v);
    return h_fold<T, N / 2>(f(h.lo, h.hi), f);
  } else {
    return f(f(v[0], v[2]), f(v[1], v[3]));
  }
}
template <class T> OX T h_sum(V<T> v) { return h_fold<T, VL>(v, [](auto a, auto b) { return (decltype(a))(a + b); }); }
template <class T> OX T h_prod(V<T> v) { return h_fold<T, VL>(v, [](auto a, auto b) { return (decltype(a))(a * b); }); }
// A NaN wins: it is greater than nothing, so that it stays as `a`, and is told from a lesser `a` as `b`.
template <class T> OX T h_max_any(V<T> v) {
  return h_fold<T, VL>(v, [](auto a, auto b) { auto r = a > b ? a : b; return (decltype(a))(a != a ? a : r); });
}
template <class T> OX T h_min_any(V<T> v) {
  return h_fold<T, VL>(v, [](auto a, auto b) { auto r = a < b ? a : b; return (decltype(a))(a != a ? a : r); });
}
#if defined(__x86_64__) && (ONNXC_VL == 4 || (ONNXC_VL == 8 && defined(__AVX__)) || (ONNXC_VL == 16 && defined(__AVX512F__)))
// Of floats without a NaN, an instruction for each halving: the same pairs, of which the second comes out of two zeros.
#define H_FAST(NAME)                                                                                        \
  template <int N> OX f32 NAME##_fast(typename some<f32, N>::type v) {                                      \
    if constexpr (N > 4) {                                                                                  \
      halves<f32, N> h = bits<halves<f32, N>>(v);                                                           \
      if constexpr (N == 16) return NAME##_fast<N / 2>(__builtin_ia32_##NAME##ps256(h.lo, h.hi));           \
      else return NAME##_fast<N / 2>(__builtin_ia32_##NAME##ps(h.lo, h.hi));                                \
    } else {                                                                                                \
      v = __builtin_ia32_##NAME##ps(v, __builtin_shufflevector(v, v, 2, 3, 2, 3));                          \
      return __builtin_ia32_##NAME##ps(v, __builtin_shufflevector(v, v, 1, 1, 1, 1))[0];                    \
    }                                                                                                       \
  }
H_FAST(max)
H_FAST(min)
#undef H_FAST
OX bool h_has_nan(vf v) {
#if ONNXC_VL == 16
  return __builtin_ia32_cmpps512_mask(v, v, 3, (u16)-1, 4) != 0;
#elif ONNXC_VL == 8
  return __builtin_ia32_movmskps256((vf)(v != v)) != 0;
#else
  return __builtin_ia32_movmskps((vf)(v != v)) != 0;
#endif
}
#define H_NAN(v) __builtin_expect(h_has_nan(v), 0)
#else
template <int N> OX f32 max_fast(vf v) { return h_max_any<f32>(v); }
template <int N> OX f32 min_fast(vf v) { return h_min_any<f32>(v); }
#define H_NAN(v) false
#endif
template <class T> OX T h_max(V<T> v) {
  if constexpr (__is_same(T, f32)) return H_NAN(v) ? h_max_any<T>(v) : max_fast<VL>(v);
  else return h_max_any<T>(v);
}
template <class T> OX T h_min(V<T> v) {
  if constexpr (__is_same(T, f32)) return H_NAN(v) ? h_min_any<T>(v) : min_fast<VL>(v);
  else return h_min_any<T>(v);
}
// Position of the best lane: ties go to the least position (or the greatest, if `last`). The first lane has the first
// element; of floats, a NaN counts at position 0 alone, as in onnxruntime, and lanes without an element are NaN as well.
template <class T, bool greatest, bool last, class P> OX i64 h_arg(V<T> v, V<P> at) {
  V<T> fit = v;
  if constexpr ((T)0.5 != 0) {
    if (__builtin_expect(v[0] != v[0], 0)) return at[0];
    fit = v_sel(v_eq(v, v), v, bc(v[0]));
  }
  const T best = h_fold<T, VL>(fit, [](auto a, auto b) {
    return (decltype(a))((greatest ? a > b : a < b) ? a : b);
  });
  const V<P> place = v_sel(v_eq(v, bc(best)), at, bc((P)(last ? -1 : ~((P)1 << (sizeof(P) * 8 - 1)))));
  return h_fold<P, VL>(place, [](auto a, auto b) { return (decltype(a))((last ? a > b : a < b) ? a : b); });
}
// Whether any lane of a mask is set.
template <class M> OX bool ox_any(M m) {
  typedef elem<M> I;
#if defined(__AVX__)
  if constexpr (sizeof(M) % 32 == 0) {
    typedef i64 words __attribute__((vector_size(32)));
    struct { words v[sizeof(M) / 32]; } w = bits<decltype(w)>(m);
    words any = w.v[0];
    OX_UNROLL for (unsigned i = 1; i < sizeof(M) / 32; i++) any |= w.v[i];
    return !__builtin_ia32_ptestz256(any, any);
  }
#endif
  return h_fold<I, VL>(m, [](auto a, auto b) { return (decltype(a))(a | b); }) != 0;
}
