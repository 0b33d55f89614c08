// Matrix times vector: C[M, 1] = A[M, K] b[K], where the rows of A and b are contiguous. Lanes run along K, so A is read
// once, as it lies; a tile would use one lane of its panel. Each element is the sum of two vectors of partial sums (the
// even and the odd vectors of its row), fresh ones for every MM_KC of each: its bits depend on K alone.
#pragma once
#include "matmul.h"
#include "vreduce.h"

static constexpr int MV_ROWS = 4;  // at once: eight chains of additions
static constexpr i64 MV_BLOCK = 2 * VL * MM_KC;

template <class T, int R> OX void mv_block(const T *a, i64 lda, const T *b, i64 K, T *sum) {
  constexpr int W = VRL<T>, N = VL / W;  // registers of a vector
  struct { VR<T> v[N]; } s[R][2] = {};
  i64 k = 0;
  for (; k + 2 * VL <= K; k += 2 * VL)
    OX_UNROLL for (int h = 0; h < N; h++) {
      const VR<T> x = ldr(b + k + h * W), y = ldr(b + k + VL + h * W);
      OX_UNROLL for (int i = 0; i < R; i++) {
        s[i][0].v[h] += ldr(a + i * lda + k + h * W) * x;
        s[i][1].v[h] += ldr(a + i * lda + k + VL + h * W) * y;
      }
    }
  V<T> t[R];
  OX_UNROLL for (int i = 0; i < R; i++) t[i] = bits<V<T>>(s[i][0]);
  for (; k < K; k += VL) {
    const int n = (int)ox_min(VL, K - k);
    const V<T> x = ldn(b + k, n);
    OX_UNROLL for (int i = 0; i < R; i++) t[i] += ldn(a + i * lda + k, n) * x;
  }
  OX_UNROLL for (int i = 0; i < R; i++) sum[i] += h_sum<T>(t[i] + bits<V<T>>(s[i][1]));
}
template <class T, int R> static __attribute__((noinline)) void mv_rows(const T *a, i64 lda, const T *b, i64 K, T *sum) {
  OX_UNROLL for (int i = 0; i < R; i++) sum[i] = T{};
  for (i64 k = 0; k < K; k += MV_BLOCK) mv_block<T, R>(a + k, lda, b + k, ox_min(MV_BLOCK, K - k), sum);
}

// Parts of about 256 KB of A.
OX i64 mv_parts(i64 M, i64 K, i64 threads) { return ox_max(1, ox_min(ox_min(4 * threads, M / MV_ROWS), M * K >> 14)); }
// Part t of `parts`. epi(m, 0, v, lanes): C[m] is the first lane of v, the only one that is valid.
template <class T, class E>
static void mv_task(i64 t, i64 parts, const MmRows<T> &a, const T *b, i64 M, i64 K, const E &epi) {
  T sum[MV_ROWS];
  const i64 end = ox_cut(M, parts, t + 1);
  for (i64 m = ox_cut(M, parts, t), rows; m < end; m += rows) {
    rows = end - m < MV_ROWS ? 1 : MV_ROWS;
    if (rows == 1) mv_rows<T, 1>(a.p + m * a.lda, a.lda, b, K, sum);
    else mv_rows<T, MV_ROWS>(a.p + m * a.lda, a.lda, b, K, sum);
    for (i64 i = 0; i < rows; i++) epi(m + i, (i64)0, bc<T>(sum[i]), Part{1});
  }
}
