// Square roots.
#pragma once
#include "vregisters.h"

template <class A> OX A v_sqrt(A x) {
  A r;
  OX_UNROLL for (int i = 0; i < VL; i++) {
    if constexpr (sizeof(elem<A>) == 4) r[i] = __builtin_sqrtf(x[i]);
    else r[i] = __builtin_sqrt(x[i]);
  }
  return r;
}
#if OX_512
template <> inline OX_LAMBDA vf v_sqrt(vf x) { return __builtin_ia32_sqrtps512_mask(x, x, OX_ALL, OX_CUR); }
#elif OX_256
template <> inline OX_LAMBDA vf v_sqrt(vf x) { return __builtin_ia32_sqrtps256(x); }
#elif OX_128
template <> inline OX_LAMBDA vf v_sqrt(vf x) { return __builtin_ia32_sqrtps(x); }
#endif

template <> inline OX_LAMBDA vd v_sqrt(vd x) {
  return by_registers(x, [](rd v) OX_LAMBDA {
#if OX_512
    return __builtin_ia32_sqrtpd512_mask(v, v, (u8)-1, OX_CUR);
#elif OX_256
    return __builtin_ia32_sqrtpd256(v);
#elif defined(__SSE2__)
    return __builtin_ia32_sqrtpd(v);
#else
    OX_UNROLL for (int i = 0; i < VRL<f64>; i++) v[i] = __builtin_sqrt(v[i]);
    return v;
#endif
  });
}
