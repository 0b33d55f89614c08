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
template <class T> OX T h_max(V<T> v) {
  return h_fold<T, VL>(v, [](auto a, auto b) { auto r = a > b ? a : b; return (decltype(a))(a != a ? a : r); });
}
template <class T> OX T h_min(V<T> v) {
  return h_fold<T, VL>(v, [](auto a, auto b) { auto r = a < b ? a : b; return (decltype(a))(a != a ? a : r); });
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
