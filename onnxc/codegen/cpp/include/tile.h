// A square of VL by VL elements, turned on its way through the first-level cache: how a kernel reads along one
// loop what lies contiguous along another.
#pragma once
#include "vec.h"

template <class T, int... I> OX V<T> tile_lo(V<T> a, V<T> b, lane_list<I...>) {
  return __builtin_shufflevector(a, b, (I % 2 ? VL + I / 2 : I / 2)...);
}
template <class T, int... I> OX V<T> tile_hi(V<T> a, V<T> b, lane_list<I...>) {
  return __builtin_shufflevector(a, b, (I % 2 ? VL + VL / 2 + I / 2 : VL / 2 + I / 2)...);
}

// dst[j * VL + i] = rows(i)[j] for i < ni, j < nj; lanes i >= ni of dst are zero. Row i and row i + VL / 2
// are interleaved, log2(VL) times, which is the transpose.
template <class T, class R> OX void tile_turn(T *dst, const R &rows, int ni, int nj) {
  const all_lanes s{};
  V<T> a[VL], b[VL];
  if (ni == VL && nj == VL) {
    OX_UNROLL for (int i = 0; i < VL; i++) a[i] = ld(rows(i));
  } else {
    OX_UNROLL for (int i = 0; i < VL; i++) a[i] = i < ni ? ldn(rows(i), nj) : V<T>{};
  }
  OX_UNROLL for (int r = 1; r < VL; r *= 2) {
    OX_UNROLL for (int i = 0; i < VL / 2; i++) {
      b[2 * i] = tile_lo<T>(a[i], a[i + VL / 2], s);
      b[2 * i + 1] = tile_hi<T>(a[i], a[i + VL / 2], s);
    }
    OX_UNROLL for (int i = 0; i < VL; i++) a[i] = b[i];
  }
  OX_UNROLL for (int i = 0; i < VL; i++) st(dst + i * VL, a[i]);
}

// Rows that lie `stride` elements apart.
template <class T>
__attribute__((noclone)) OX_APART void tile_load(T *dst, const T *src, i64 stride, int ni, int nj) {
  if constexpr (!__is_class(T)) {
    tile_turn(dst, [=](int i) OX_LAMBDA { return src + i * stride; }, ni, nj);
  } else { // what is narrower than its lanes is moved as it is
    typedef typename T::word word;
    tile_load<word>((word *)dst, (const word *)src, stride, ni, nj);
  }
}

// Rows that lie anywhere.
template <class T> __attribute__((noclone)) OX_APART void tile_gather(T *dst, const T *const *rows, int ni, int nj) {
  if constexpr (!__is_class(T)) {
    tile_turn(dst, [=](int i) OX_LAMBDA { return rows[i]; }, ni, nj);
  } else {
    typedef typename T::word word;
    tile_turn((word *)dst, [=](int i) OX_LAMBDA { return (const word *)rows[i]; }, ni, nj);
  }
}

#ifdef ONNXC_APART
ONNXC_APART void tile_load<f32>(f32 *, const f32 *, i64, int, int);
ONNXC_APART void tile_gather<f32>(f32 *, const f32 *const *, int, int);
#endif
