// Functions that libm computes, lane by lane.
#pragma once
#include "vmath.h"

// lanes_NAME for f32 and f64. Not inlined: VL calls in a row are long.
#define OX_LANES(NAME)                                                                      \
  template <class A> static __attribute__((noinline)) A lanes_##NAME(A x) {                 \
    for (int i = 0; i < VL; i++) {                                                          \
      if constexpr (sizeof(elem<A>) == 4) x[i] = __builtin_##NAME##f(x[i]);                 \
      else x[i] = __builtin_##NAME(x[i]);                                                   \
    }                                                                                       \
    return x;                                                                               \
  }
#define OX_LANES2(NAME)                                                                     \
  template <class A> static __attribute__((noinline)) A lanes_##NAME(A x, A y) {            \
    for (int i = 0; i < VL; i++) {                                                          \
      if constexpr (sizeof(elem<A>) == 4) x[i] = __builtin_##NAME##f(x[i], y[i]);           \
      else x[i] = __builtin_##NAME(x[i], y[i]);                                             \
    }                                                                                       \
    return x;                                                                               \
  }

OX_LANES(tan) OX_LANES(sinh) OX_LANES(cosh) OX_LANES(asinh) OX_LANES(acosh) OX_LANES(atanh)
template <class A> OX A v_tan(A x) { return lanes_tan(x); }
template <class A> OX A v_sinh(A x) { return lanes_sinh(x); }
template <class A> OX A v_cosh(A x) { return lanes_cosh(x); }
template <class A> OX A v_asinh(A x) { return lanes_asinh(x); }
template <class A> OX A v_acosh(A x) { return lanes_acosh(x); }
template <class A> OX A v_atanh(A x) { return lanes_atanh(x); }
