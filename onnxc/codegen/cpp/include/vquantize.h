// Rounding to integers, and quantization.
#pragma once
#include "vround.h"

// To the nearest integer, halves to even; x is within the range of i32.
OX vi v_round_int(vf x) {
#if OX_512
  return __builtin_ia32_cvtps2dq512_mask(x, vi{}, OX_ALL, OX_CUR);
#elif OX_256
  return __builtin_ia32_cvtps2dq256(x);
#elif OX_128
  return __builtin_ia32_cvtps2dq(x);
#else
  return conv<i32, f32>(v_round(x));
#endif
}
// round(x) + zero for x limited to [lo, hi]; NaN counts as lo.
OX vi v_quantize(vf x, f32 lo, f32 hi, i32 zero) {
  return v_round_int(v_min_fast(v_max_fast(x, bc(lo)), bc(hi))) + zero;
}
// round(x / s) + zero likewise; r is 1 / s. The quotient is the one that division gives: x r is less than two units
// in the last place away, and its remainder, exact with FMA, times r is what it lacks (Markstein).
OX vi v_quantize(vf x, f32 s, f32 r, f32 lo, f32 hi, i32 zero) {
  x = v_min_fast(v_max_fast(x, bc(lo)), bc(hi));
#if OX_512
  vf q = x * r, e = __builtin_ia32_vfmaddps512_mask(-q, bc(s), x, OX_ALL, OX_CUR);
  q = __builtin_ia32_vfmaddps512_mask(e, bc(r), q, OX_ALL, OX_CUR);
#elif OX_256 && defined(__FMA__)
  vf q = x * r, e = __builtin_ia32_vfmaddps256(-q, bc(s), x);
  q = __builtin_ia32_vfmaddps256(e, bc(r), q);
#else
  (void)r;
  vf q = x / s;
#endif
  return v_round_int(q) + zero;
}
