// Horizontal reductions: one number from the lanes of a vector, by halving, so that the order is fixed.
#pragma once
#include "vec.h"

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
template <class T> OX T h_max(V<T> v) {  // NaN wins
  T a[VL];
  st(a, v);
  T r = a[0];
  OX_UNROLL for (int i = 1; i < VL; i++) r = (a[i] > r || a[i] != a[i]) ? a[i] : r;
  return r;
}
template <class T> OX T h_min(V<T> v) {
  T a[VL];
  st(a, v);
  T r = a[0];
  OX_UNROLL for (int i = 1; i < VL; i++) r = (a[i] < r || a[i] != a[i]) ? a[i] : r;
  return r;
}
// Position of the best lane: ties go to the least position (or the greatest, if last).
template <class T, class F> OX i64 h_arg(V<T> v, vl at, bool last, F better) {
  int best = 0;
  for (int i = 1; i < VL; i++) {
    if (at[best] < 0 || (at[i] >= 0 && (better(v[i], v[best]) || (v[i] == v[best] && (last ? at[i] > at[best] : at[i] < at[best])))))
      best = i;
  }
  return at[best];
}
