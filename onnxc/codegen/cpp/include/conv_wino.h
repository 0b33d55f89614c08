// f32 3x3 convolution of stride 1 by Winograd's minimal filtering: F(2x2,3x3) does 2.25 times and F(4x4,3x3)
// 4 times fewer multiplications than direct convolution.
//
// Output tiles of M x M pixels come from input tiles of T x T, T = M + 2, overlapping by two. Both are
// transformed along y and x: V = B' d B, then for each of the P = T * T points one matmul over channels,
// then Y = A' m A. Blocks of tiles go through all steps while they are in the cache.
//
// Weights: U[panel][p][ci][NR] with U = G g G' (p = row * T + column), zero-padded to whole panels.
// F(2): G = [[1,0,0], [1/2,1/2,1/2], [1/2,-1/2,1/2], [0,0,1]].
// F(4): points 0, a, -a, b, -b, infinity, a = 45/64, b = 91/64 (Barabasz et al., "Error analysis and improving
// the accuracy of Winograd convolution for deep neural networks": points whose products stay near 1 lose
// least): G's row of point q is [1, q, q^2] / product of (q - other points), the last is [0, 0, 1].
//
// An infinity or NaN in the input spreads over its whole tile, where direct convolution spreads it over 3x3.
#pragma once
#include "conv.h"

// The one-dimensional transforms: bt makes T values of T, at makes M of T; inputs s apart, outputs d apart.
template <int M> struct Wino;
template <> struct Wino<2> {
  static constexpr int T = 4;
  OX void bt(const vf *x, i64 s, vf *y, i64 d) {
    vf x0 = x[0], x1 = x[s], x2 = x[2 * s], x3 = x[3 * s];
    y[0] = x0 - x2, y[d] = x1 + x2, y[2 * d] = x2 - x1, y[3 * d] = x1 - x3;
  }
  OX void at(const vf *m, i64 s, vf *y, i64 d) {
    vf m0 = m[0], m1 = m[s], m2 = m[2 * s], m3 = m[3 * s];
    y[0] = m0 + m1 + m2, y[d] = m1 - m2 - m3;
  }
};
template <> struct Wino<4> {
  static constexpr int T = 6;
  static constexpr f32 a = 45 / 64.f, b = 91 / 64.f, a2 = a * a, b2 = b * b;
  OX void bt(const vf *x, i64 s, vf *y, i64 d) {
    vf x0 = x[0], x1 = x[s], x2 = x[2 * s], x3 = x[3 * s], x4 = x[4 * s], x5 = x[5 * s];
    vf e = x4 - b2 * x2, o = a * (x3 - b2 * x1), f = x4 - a2 * x2, q = b * (x3 - a2 * x1);
    y[0] = (a2 * b2) * x0 - (a2 + b2) * x2 + x4;
    y[d] = e + o, y[2 * d] = e - o, y[3 * d] = f + q, y[4 * d] = f - q;
    y[5 * d] = (a2 * b2) * x1 - (a2 + b2) * x3 + x5;
  }
  OX void at(const vf *m, i64 s, vf *y, i64 d) {
    vf m0 = m[0], p = m[s] + m[2 * s], q = m[s] - m[2 * s], r = m[3 * s] + m[4 * s], t = m[3 * s] - m[4 * s];
    y[0] = m0 + p + r, y[d] = a * q + b * t, y[2 * d] = a2 * p + b2 * r;
    y[3 * d] = (a2 * a) * q + (b2 * b) * t + m[5 * s];
  }
};

// Tiles, blocks of tiles, parts of the panels; strides of V[p][tile][ci] and Mb[tile][p][NR] in floats. The
// strides are off powers of two, so that planes do not fall into the same sets of the L1 cache.
struct WinoPlan {
  i64 ty, tx, tiles, blocks, parts, most, panels, row, plane, mstride;
};

static constexpr i64 WINO_V = 256 * 1024;  // bytes of V that a block aims at

template <int M> static WinoPlan wino_plan(const ConvShape &s) {
  constexpr i64 P = Wino<M>::T * Wino<M>::T;
  WinoPlan p = {};
  p.ty = cdiv(s.OH, M), p.tx = cdiv(s.OW, M), p.tiles = s.N * p.ty * p.tx;
  p.row = cround(s.CI, VL), p.panels = cdiv(s.CO, CONV_NR);
  i64 least = M == 2 || s.CI >= 256 ? 24 : CONV_MR;  // fewer tiles would pass over too large weights too often
  i64 block = cmin(8 * CONV_MR, cmax(least, WINO_V / (4 * P * p.row) / CONV_MR * CONV_MR));
  p.blocks = conv_blocks(p.tiles, block + block / 4, 2 * CONV_MR, p.panels);
  p.parts = cmax(1, cmin(p.panels, cdiv(CONV_ITEMS, p.blocks)));
  p.most = cdiv(p.tiles, p.blocks);
  p.plane = p.most * p.row + 16, p.mstride = P * CONV_NR + 16;
  return p;
}

// Work items and bytes of scratch; items next to each other share a block's V.
template <int M> static i64 conv_wino_count(const ConvShape &s) {
  WinoPlan p = wino_plan<M>(s);
  return p.tiles > 0 ? p.blocks * p.parts : 0;
}
template <int M> static i64 conv_wino_scratch(const ConvShape &s) {
  WinoPlan p = wino_plan<M>(s);
  constexpr i64 P = Wino<M>::T * Wino<M>::T;
  i64 floats = P * p.plane + 2 * (p.most + CONV_MR) * p.mstride + p.row + M * M * CONV_NR;
  return 4 * floats + 8 * (p.most + 2 * CONV_MR);
}

// One vector of channels. What the next tile will newly need (its columns from the third on) is fetched ahead:
// on maps larger than the cache this is worth 20 %.
template <int M, class L>
OX void wino_input_vector(const f32 *const *x, const f32 *const *next, i64 c, f32 *v, i64 plane, L l) {
  constexpr int T = Wino<M>::T;
  vf y[T * T];
  for (int j = 0; j < T; j++) {
    vf g[T];
    OX_UNROLL for (int i = 0; i < T; i++) g[i] = ldl(x[i * T + j] + c, l);
    if (j >= 2) OX_UNROLL for (int i = 0; i < T; i++) __builtin_prefetch(next[i * T + j] + c);
    Wino<M>::bt(g, 1, y + j, T);
  }
  for (int i = 0; i < T; i++) {
    vf g[T];
    Wino<M>::bt(y + i * T, 1, g, 1);
    OX_UNROLL for (int j = 0; j < T; j++) st(v + (i * T + j) * plane + c, g[j]);
  }
}

// V of one tile: x[i * T + j] points to the first channel of the tile's pixel (i, j), or to zeros.
template <int M>
__attribute__((noinline, noclone)) static void wino_input(
    const f32 *const *x, const f32 *const *next, i64 CI, f32 *v, i64 plane) {
  i64 c = 0;
  for (; c + VL <= CI; c += VL) wino_input_vector<M>(x, next, c, v, plane, Full{});
  if (c < CI) wino_input_vector<M>(x, next, c, v, plane, Part{int(CI - c)});
}

// Y[i * M + j][NR] of one tile from Mb[p][NR].
template <int M> __attribute__((noinline, noclone)) static void wino_output(const f32 *m, i64 cols, f32 *Y) {
  constexpr int T = Wino<M>::T;
  for (i64 c = 0; c < cols; c += VL) {
    vf y[M * T];
    for (int j = 0; j < T; j++) {
      vf g[T];
      OX_UNROLL for (int i = 0; i < T; i++) g[i] = ld(m + (i * T + j) * CONV_NR + c);
      Wino<M>::at(g, 1, y + j, T);
    }
    for (int i = 0; i < M; i++) {
      vf g[M];
      Wino<M>::at(y + i * T, 1, g, 1);
      OX_UNROLL for (int j = 0; j < M; j++) st(Y + (i * M + j) * CONV_NR + c, g[j]);
    }
  }
}

// The pixels of input tile t: pointers to their first channels, or to zeros outside the image.
template <int M>
OX void wino_pixels(const ConvShape &s, const WinoPlan &p, const f32 *x, const f32 *zero, i64 t, const f32 **a) {
  constexpr int T = Wino<M>::T;
  i64 y0 = t / p.tx % p.ty * M - s.PT, x0 = t % p.tx * M - s.PL;
  const f32 *image = x + t / (p.tx * p.ty) * s.ins;
  for (i64 i = 0; i < T; i++)
    for (i64 j = 0; j < T; j++) {
      bool in = (u64)(y0 + i) < (u64)s.H && (u64)(x0 + j) < (u64)s.W;
      a[i * T + j] = in ? image + (y0 + i) * s.irs + (x0 + j) * s.ips : zero;
    }
}

// V of tiles [t0, t1).
template <int M>
static void wino_block(
    const ConvShape &s, const WinoPlan &p, const f32 *x, const f32 *zero, i64 t0, i64 t1, f32 *V) {
  constexpr int P = Wino<M>::T * Wino<M>::T;
  const f32 *a[2][P];
  wino_pixels<M>(s, p, x, zero, t0, a[0]);
  for (i64 t = t0; t < t1; t++, V += p.row) {
    wino_pixels<M>(s, p, x, zero, cmin(t + 1, p.tiles - 1), a[(t - t0 + 1) & 1]);
    wino_input<M>(a[(t - t0) & 1], a[(t - t0 + 1) & 1], s.CI, V, p.plane);
  }
}

// Sums of one panel that wait in Mb to be transformed back: tiles [t0, t0 + n), channels [c, c + cols).
struct WinoPending { const f32 *Mb; i64 t0, n, c, cols; };

// Transforms tiles [i0, i1) of the pending panel back and hands them to the epilogue.
template <int M, class E>
__attribute__((noinline)) static void wino_finish(
    const ConvShape &s, const WinoPlan &p, const WinoPending &w, i64 i0, i64 i1, f32 *Y, const E &epi) {
  for (i64 i = i0; i < i1; i++) {
    wino_output<M>(w.Mb + i * p.mstride, w.cols, Y);
    i64 t = w.t0 + i, y = t / p.tx % p.ty * M, x = t % p.tx * M, n = t / (p.tx * p.ty);
    for (i64 r = 0; r < cmin(M, s.OH - y); r++)
      conv_finish(s, Y + r * M * CONV_NR, CONV_NR, Px{(n * s.OH + y + r) * s.OW + x, n, y + r, x},
                  cmin(M, s.OW - x), w.c, w.cols, epi);
  }
}

// Work items [first, last); the epilogue is conv_items's. Shape: 3x3, strides, dilations and groups 1, ics 1.
// A panel is transformed back a few tiles at a time between the matmuls of the next one: at once, its stores
// to memory that is not in the cache would fill the store queue (20 % on maps of 144 x 144).
template <int M, bool NARROW = true, class E>
static void conv_wino_items(
    const ConvShape &s, const f32 *x, const f32 *u, i64 first, i64 last, void *scratch, const E &epi) {
  constexpr int P = Wino<M>::T * Wino<M>::T;
  WinoPlan p = wino_plan<M>(s);
  f32 *V = (f32 *)scratch, *Mb = V + P * p.plane, *Mb2 = Mb + (p.most + CONV_MR) * p.mstride;
  f32 *zero = Mb2 + (p.most + CONV_MR) * p.mstride, *Y = zero + p.row;
  const f32 **table = (const f32 **)(Y + M * M * CONV_NR);
  ConvRuns R = conv_runs(1, s.CI);
  for (i64 i = 0; i < p.row; i++) zero[i] = 0;
  WinoPending w = {};
  i64 built = -1;
  for (i64 item = first; item < last; item++) {
    i64 block = item / p.parts, part = item % p.parts;
    i64 t0 = p.tiles * block / p.blocks, n = p.tiles * (block + 1) / p.blocks - t0;
    if (built != block) wino_block<M>(s, p, x, zero, t0, t0 + n, V), built = block;
    for (i64 i = 0; i < n + CONV_MR; i++) table[i] = V + cmin(i, n - 1) * p.row;
    ConvTiles T = conv_tiles(n);
    for (i64 k = p.panels * part / p.parts; k < p.panels * (part + 1) / p.parts; k++) {
      i64 c = k * CONV_NR, cols = cmin(CONV_NR, s.CO - c);
      for (i64 q = 0; q < P; q++) {
        for (i64 t = 0, i = 0; t < T.count; i += T.size(t++))
          conv_tile_any<NARROW>(T.size(t), cols, table + i, q * p.plane, R, u + (k * P + q) * s.CI * CONV_NR,
                        Mb + i * p.mstride + q * CONV_NR, p.mstride);
        wino_finish<M>(s, p, w, w.n * q / P, w.n * (q + 1) / P, Y, epi);
      }
      w = {Mb, t0, n, c, cols};
      f32 *swap = Mb;
      Mb = Mb2, Mb2 = swap;
    }
  }
  wino_finish<M>(s, p, w, 0, w.n, Y, epi);
}
