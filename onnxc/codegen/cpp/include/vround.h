// Rounding of floats to whole numbers.
#pragma once
#include "vmath.h"

// Adding and subtracting 2^23 (2^52) rounds half to even; larger values have no fraction. The sign of x
// is put back so that -0.3 gives -0.
template <class A> OX A v_round_any(A x) {
  typedef elem<A> T;
  const A big = bc((T)(sizeof(T) == 4 ? 0x1p23 : 0x1p52)), ax = v_abs(x);
  return v_or(v_sel(v_lt(ax, big), (ax + big) - big, ax), v_signbit(x));
}
template <class A> OX A v_round(A x) { return v_round_any(x); }
template <class A> OX A v_floor(A x) {
  A r = v_round_any(x);
  return v_sel(v_gt(r, x), r - (elem<A>)1, r);
}
template <class A> OX A v_ceil(A x) {
  A r = v_round_any(x);
  return v_or(v_sel(v_lt(r, x), r + (elem<A>)1, r), v_signbit(x));
}
template <class A> OX A v_trunc(A x) { return v_or(v_floor(v_abs(x)), v_signbit(x)); }
#if OX_512 || OX_256 || OX_128
#if OX_512
#define OX_ROUND(x, mode) __builtin_ia32_rndscaleps_mask(x, mode, x, OX_ALL, OX_CUR)
#elif OX_256
#define OX_ROUND(x, mode) __builtin_ia32_roundps256(x, 8 | mode)
#else
#define OX_ROUND(x, mode) __builtin_ia32_roundps(x, 8 | mode)
#endif
template <> inline OX_LAMBDA vf v_round(vf x) { return OX_ROUND(x, 0); }
template <> inline OX_LAMBDA vf v_floor(vf x) { return OX_ROUND(x, 1); }
template <> inline OX_LAMBDA vf v_ceil(vf x) { return OX_ROUND(x, 2); }
template <> inline OX_LAMBDA vf v_trunc(vf x) { return OX_ROUND(x, 3); }
#endif
