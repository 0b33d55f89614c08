// Matrix times vector: C[M, 1] = A[M, K] b[K], where the rows of A and b are contiguous. Lanes run along K, so A is read
// once, as it lies; a tile would use one lane of its panel. Each element is the sum of two vectors of partial sums (the
// even and the odd vectors of its row), fresh ones for every MV_KC of each: its bits depend on K alone.
#pragma once
#include "matmul.h"
#include "vreduce.h"

static constexpr int MV_ROWS = 4;  // at once: eight chains of additions
static constexpr int MV_KC = 256;  // longest chain of additions
static constexpr i64 MV_BLOCK = 2 * VL * MV_KC;

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

// ---- few rows ------------------------------------------------------------------------------------------
// C[M, N] = A[M, K] B[K, N] of few rows, where the rows of A and the columns of B are contiguous: to turn B into panels
// would cost more than to multiply it. Lanes run along K here too. The lanes of each sum are added up at its end, those
// of a register of columns side by side. An element's bits depend on K alone: one sum for each lane, a fresh one for
// every MV_KC terms of it.
static constexpr int MV_FEW_ROWS = MM_MR > 6 ? 4 : 2;  // at once: with four columns, as many sums as registers allow

// Column n of B is at p + n * ld.
template <class T> struct MvColumns { const T *p; i64 ld; };

// N registers folded into one: where the W / N results of such folds are folded too, lane i * W / N + j of the last one
// is the sum of the lanes of x[i] of fold j.
template <class T, int N> OX VR<T> mv_fold(VR<T> *x) {
  typename count_to<VRL<T>>::type s;
  OX_UNROLL for (int n = N / 2; n; n /= 2)
    OX_UNROLL for (int i = 0; i < n; i++) x[i] = mm_lo<T>(x[i], x[i + n], s) + mm_hi<T>(x[i], x[i + n], s);
  return x[0];
}
template <class T> OX VR<T> mv_some(const T *p, i64 n) {  // the first n lanes of a register, zeros behind them
  return bits<vec_parts<V<T>>>(ldn(p, (int)n)).v[0];
}
// sum[i * apart] (+)= row i of A times C columns, folded.
template <class T, int R, int C>
OX void mv_dots(const T *a, i64 lda, const T *const *b, i64 k, i64 end, VR<T> *sum, int apart, bool add) {
  constexpr int W = VRL<T>;
  VR<T> s[R][C], y[C];
  OX_UNROLL for (int i = 0; i < R; i++)
    OX_UNROLL for (int j = 0; j < C; j++) s[i][j] = VR<T>{};
  for (; k + W <= end; k += W) {
    OX_UNROLL for (int j = 0; j < C; j++) y[j] = ldr(b[j] + k);
    OX_UNROLL for (int i = 0; i < R; i++) {
      const VR<T> x = ldr(a + i * lda + k);
      OX_UNROLL for (int j = 0; j < C; j++) s[i][j] += x * y[j];
    }
  }
  if (k < end) {
    OX_UNROLL for (int j = 0; j < C; j++) y[j] = mv_some(b[j] + k, end - k);
    OX_UNROLL for (int i = 0; i < R; i++) {
      const VR<T> x = mv_some(a + i * lda + k, end - k);
      OX_UNROLL for (int j = 0; j < C; j++) s[i][j] += x * y[j];
    }
  }
  OX_UNROLL for (int i = 0; i < R; i++) {
    const VR<T> v = mv_fold<T, C>(s[i]);
    sum[i * apart] = add ? sum[i * apart] + v : v;
  }
}
// R rows of A by the columns n to n + w, at most a register of them: row i goes to c + i * VL. Columns that are folded
// together lie apart in memory, which delivers several streams faster than one (two thirds of the time).
template <class T, int R>
static __attribute__((noinline)) void mv_few_rows(const T *a, i64 lda, MvColumns<T> b, i64 n, i64 w, i64 K, T *c) {
  constexpr int W = VRL<T>, C = W < 4 ? W : R == 1 && W > 4 ? 8 : 4, G = W / C;
  VR<T> sum[R][G];
  for (int g = 0; g < G; g++) {
    const T *column[C];
    OX_UNROLL for (int i = 0; i < C; i++) column[i] = b.p + (n + ox_min(i * G + g, w - 1)) * b.ld;
    i64 k = 0;
    do {
      mv_dots<T, R, C>(a, lda, column, k, ox_min(K, k + W * MV_KC), &sum[0][g], G, k > 0);
      k += W * MV_KC;
    } while (k < K);
  }
  OX_UNROLL for (int i = 0; i < R; i++) str(c + i * VL, mv_fold<T, G>(sum[i]));
}
template <class T, int R> OX void mv_pick(i64 r, const T *a, i64 lda, MvColumns<T> b, i64 n, i64 w, i64 K, T *c) {
  if constexpr (R > 1)
    if (r < R) return mv_pick<T, R - 1>(r, a, lda, b, n, w, K, c);
  mv_few_rows<T, R>(a, lda, b, n, w, K, c);
}
// Parts of a few hundred thousand multiplications.
OX i64 mv_few_parts(i64 M, i64 N, i64 K, i64 threads) {
  return ox_max(1, ox_min(ox_min(4 * threads, ox_up(N, VL)), M * N * K >> 15));
}
// Part t of `parts`, columns [n, n + VL) at a time for all rows.
template <class T, class E>
static void mv_few_task(i64 t, i64 parts, const MmRows<T> &a, MvColumns<T> b, i64 M, i64 N, i64 K, const E &epi) {
  constexpr int W = VRL<T>;
  alignas(64) T c[MV_FEW_ROWS * VL];
  const i64 blocks = ox_up(N, VL), end = ox_cut(blocks, parts, t + 1);
  for (i64 block = ox_cut(blocks, parts, t); block < end; block++) {
    const i64 n = block * VL, w = ox_min(VL, N - n);
    for (i64 m = 0, r; m < M; m += r) {
      r = ox_min(M - m, MV_FEW_ROWS);
      for (i64 j = 0; j < w; j += W)
        mv_pick<T, MV_FEW_ROWS>(r, a.p + m * a.lda, a.lda, b, n + j, ox_min(W, w - j), K, c + j);
      for (i64 i = 0; i < r; i++) {
        if (w == VL) epi(m + i, n, ld(c + i * VL), Full{});
        else epi(m + i, n, ldn(c + i * VL, (int)w), Part{(int)w});
      }
    }
  }
}
