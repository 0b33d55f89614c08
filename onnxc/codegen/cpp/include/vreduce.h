// Horizontal reductions: one number from the lanes of a vector, by halving, so that the order is fixed.
#pragma once
#include "vec.h"
#include "vmath.h"

template <class T> OX T h_sum(V<T> v) {
  T a[VL];
  st(a, v);
  OX_UNROLL for (int w = VL / 2; w; w /= 2) { OX_UNROLL for (int i = 0; i < w; i++) a[i] += a[i + w]; }
  return a[0];
}
template <class T> OX T h_prod(V<T> v) {
  T a[VL];
  st(a, v);
  OX_UNROLL for (int w = VL / 2; w; w /= 2) { OX_UNROLL for (int i = 0; i < w; i++) a[i] *= a[i + w]; }
  return a[0];
}
// Lane i takes lane i + w (mod VL).
template <class T> OX V<T> h_rotate(V<T> v, int w) {
  VM<T> index;
  OX_UNROLL for (int i = 0; i < VL; i++) index[i] = (elem<VM<T>>)((i + w) % VL);
  return __builtin_shuffle(v, index);
}
template <class T> OX T h_max(V<T> v) {  // NaN wins
  OX_UNROLL for (int w = VL / 2; w; w /= 2) v = v_max(v, h_rotate<T>(v, w));
  return v[0];
}
template <class T> OX T h_min(V<T> v) {
  OX_UNROLL for (int w = VL / 2; w; w /= 2) v = v_min(v, h_rotate<T>(v, w));
  return v[0];
}
// Position of the best lane: ties go to the least position (or the greatest, if last). A NaN counts only at
// position 0, as in onnxruntime; lanes without an element have position -1.
template <class T, class P, class F> OX i64 h_arg(V<T> v, V<P> at, bool last, F better) {
  int best = 0;
  for (int i = 1; i < VL; i++) {
    if (at[i] < 0) continue;
    bool tie = v[i] == v[best] && (last ? at[i] > at[best] : at[i] < at[best]);
    if (at[best] < 0 || better(v[i], v[best]) || tie || (v[best] != v[best] && at[best] != 0)) best = i;
  }
  return at[best];
}
