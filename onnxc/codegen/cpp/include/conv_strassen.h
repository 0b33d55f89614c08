// f32 1x1 convolution by one step of Strassen's algorithm: 7 products of halves instead of 8.
//
// Two neighbouring pixels of an image, two halves of the input channels, and two neighbouring panels of output channels
// are the halves of the rows of A, of the sums, and of the columns of B. Sums of A's parts (V, seven planes of a row
// for each pair of pixels) are written once for a block of pairs, those of B's parts are packed; each of the seven is one
// product (conv_tile), and the results of both pixels are sums of them:
//
//   M0 = (A11 + A22)(B11 + B22)   M3 = A22 (B21 - B11)           C11 = M0 + M3 - M4 + M6   C12 = M2 + M4
//   M1 = (A21 + A22) B11          M4 = (A11 + A12) B22           C21 = M1 + M3             C22 = M0 - M1 + M2 + M5
//   M2 = A11 (B12 - B22)          M5 = (A21 - A11)(B11 + B12)    M6 = (A12 - A22)(B21 + B22)
//
// A result's error is small beside the largest of what is added up with it. So that this is no more than the result's
// own terms (Ballard, Benson, Druinsky, Lipshitz, Schwartz, "Improving the numerical stability of fast matrix
// multiplication"), channels that meet are brought to one scale by powers of two: rows of B's lower half are packed
// divided by `rows`, with which the second half of A is multiplied; columns of the second panel are packed multiplied,
// and their sums are multiplied by `columns`.
//
// An infinity or NaN in a pixel spreads over the pair. Pairs are of one image: a batch does not change answers.
//
// Weights: U[pair of panels][product][ci / 2][NR], rows[ci / 2], columns[pair of panels][NR].
#pragma once
#include "conv.h"

static constexpr int STRASSEN_P = 7;

// Pairs of pixels of an image and of all, blocks of them, parts into which a block's pairs of panels are divided, pairs
// of a block at most; half of the input channels. Strides of V[product][pair][ci / 2] and of M[pair][product][NR] in
// floats are off powers of two.
struct StrassenPlan { i64 each, pairs, panels, blocks, parts, most, half, row, plane, mstride; };

template <class S> static StrassenPlan strassen_plan(const S &s) {
  StrassenPlan p = {};
  p.each = ox_up(s.OH * s.OW, 2), p.pairs = s.N * p.each, p.panels = s.CO / (2 * CONV_NR);
  p.half = s.CI / 2, p.row = p.half + 16, p.mstride = STRASSEN_P * CONV_NR + 16;
  i64 block = cround(24, CONV_MR);  // fewer would pass over the weights too often, of more V would leave the cache
  p.blocks = conv_blocks(p.pairs, block, block, p.panels);
  p.parts = ox_max(1, ox_min(p.panels, ox_up(CONV_ITEMS, p.blocks)));
  p.most = ox_up(p.pairs, p.blocks), p.plane = p.most * p.row + 16;
  return p;
}

// Work items and bytes of scratch. Items next to each other share V: each thread's scratch is made fresh before the
// first.
template <class S> static i64 conv_strassen_count(const S &s) {
  StrassenPlan p = strassen_plan(s);
  return p.pairs > 0 ? p.blocks * p.parts : 0;
}
template <class S> static i64 conv_strassen_scratch(const S &s) {
  StrassenPlan p = strassen_plan(s);
  i64 floats = CONV_STATE + STRASSEN_P * p.plane + 2 * (p.most + CONV_MR) * p.mstride;
  return 4 * floats + 8 * (p.most + 2 * CONV_MR);
}

// V of one pair of pixels, u and l.
OX void strassen_input(const f32 *u, const f32 *l, const f32 *rows, i64 half, f32 *v, i64 plane) {
  for (i64 c = 0; c < half; c += VL, v += VL) {
    vf r = ld(rows + c), u1 = ld(u + c), l1 = ld(l + c), u2 = ld(u + half + c), l2 = r * ld(l + half + c);
    st(v, u1 + l2), st(v + plane, l1 + l2), st(v + 2 * plane, u1), st(v + 3 * plane, l2);
    st(v + 4 * plane, u1 + r * u2), st(v + 5 * plane, l1 - u1), st(v + 6 * plane, r * u2 - l2);
  }
}

// The first pixel of pair t; whether it has no second, being the last of an odd number.
template <class S> OX auto strassen_px(const S &s, const StrassenPlan &p, i64 t) {
  return conv_px(s, t / p.each * (s.OH * s.OW) + t % p.each * 2);
}
OX bool strassen_alone(const ConvShape &s, const Px &q) { return q.y + 1 == s.OH && q.x + 1 == s.OW; }
template <class S> OX const f32 *strassen_at(const S &s, const f32 *x, const Px &q) {
  return x + q.n * s.ins + q.y * s.SY * s.irs + q.x * s.SX * s.ips;
}

// V of pairs [t0, t1). A pixel without a second is one with itself.
template <class S>
__attribute__((noinline)) static void strassen_block(
    const S &s, const StrassenPlan &p, const f32 *x, const f32 *rows, i64 t0, i64 t1, f32 *V) {
  Px q = strassen_px(s, p, t0);
  for (i64 t = t0; t < t1; t++, V += p.row) {
    const f32 *first = strassen_at(s, x, q), *second = first;
    if (!strassen_alone(s, q)) conv_next(s, q), second = strassen_at(s, x, q);
    conv_next(s, q);
    strassen_input(first, second, rows, p.half, V, p.plane);
  }
}

// Products of one pair of panels that wait in M to be added up: pairs [t0, t0 + n), channels from c on.
struct StrassenPending { const f32 *M; i64 t0, n, c; const f32 *columns; };

// Adds the products of pairs [i0, i1) up and hands the sums to the epilogue.
template <class S, class E>
__attribute__((noinline)) static void strassen_finish(
    const S &s, const StrassenPlan &p, const StrassenPending &w, i64 i0, i64 i1, const E &call) {
  const E epi = call;
  Px q = strassen_px(s, p, w.t0 + i0);
  for (i64 i = i0; i < i1; i++) {
    const f32 *m = w.M + i * p.mstride;
    bool alone = strassen_alone(s, q);
    Px next = q;
    conv_next(s, next);
    for (i64 j = 0; j < CONV_NR; j += VL, m += VL) {
      i64 c = w.c + j;
      vf m0 = ld(m), m1 = ld(m + CONV_NR), m2 = ld(m + 2 * CONV_NR), m3 = ld(m + 3 * CONV_NR), m4 = ld(m + 4 * CONV_NR);
      vf m5 = ld(m + 5 * CONV_NR), m6 = ld(m + 6 * CONV_NR), scale = ld(w.columns + j);
      epi(q, c, (m0 + m3) + (m6 - m4), Full{});
      epi(q, c + CONV_NR, (m2 + m4) * scale, Full{});
      if (alone) continue;
      epi(next, c, m1 + m3, Full{});
      epi(next, c + CONV_NR, ((m0 - m1) + (m2 + m5)) * scale, Full{});
    }
    q = next;
    if (!alone) conv_next(s, q);
  }
}

// Work items [first, last); the epilogue is conv_items's. Shape: a 1x1 kernel without pads, one group, whole vectors of
// half of the input channels, whole pairs of panels of output channels; ics 1.
// Like Winograd's, a pair of panels is added up a few pixels at a time between the products of the next one.
template <class S, class E, int N = 0>
static void conv_strassen_items(
    const S &s, const f32 *x, const f32 *u, i64 first, i64 last, void *scratch, const E &epi,
    const ConvNear<N> &near = {}) {
  StrassenPlan p = strassen_plan(s);
  const i64 K = p.half;
  const f32 *rows = u + p.panels * STRASSEN_P * K * CONV_NR, *columns = rows + K;
  i64 &built = *(i64 *)scratch;
  f32 *V = (f32 *)scratch + CONV_STATE, *M = V + STRASSEN_P * p.plane, *other = M + (p.most + CONV_MR) * p.mstride;
  const f32 **table = (const f32 **)(other + (p.most + CONV_MR) * p.mstride);
  const ConvRuns R = conv_runs(1, K);
  // Tiles that go through the seven products together: one where all weights of a panel stay in the second-level cache,
  // since its results then stay in the first.
  const i64 together = 4 * STRASSEN_P * K * CONV_NR <= CONV_KEPT / 2 ? 1 : p.most;
  StrassenPending w = {};
  for (i64 item = first; item < last; item++) {
    i64 block = item / p.parts, part = item % p.parts;
    i64 t0 = p.pairs * block / p.blocks, n = p.pairs * (block + 1) / p.blocks - t0;
    if (built != block) strassen_block(s, p, x, rows, t0, t0 + n, V), built = block;
    for (i64 i = 0; i < n + CONV_MR; i++) table[i] = V + ox_min(i, n - 1) * p.row;
    ConvTiles T = conv_tiles(n);
    for (i64 k = p.panels * part / p.parts; k < p.panels * (part + 1) / p.parts; k++) {
      const f32 *U = u + k * STRASSEN_P * K * CONV_NR;
      for (i64 first = 0, i = 0, rows, end; first < T.count; first = end, i += rows) {
        const f32 *B = U;
        end = ox_min(T.count, first + together);
        for (i64 q = 0; q < STRASSEN_P; q++, B += K * CONV_NR) {
          const i64 i0 = w.n * q / STRASSEN_P, i1 = w.n * (q + 1) / STRASSEN_P;
          if (N > 0 && i1 > i0) conv_near(near, strassen_px(s, p, w.t0 + i0).i, 2 * (i1 - i0), w.c, 2 * CONV_NR);
          rows = 0;
          for (i64 t = first; t < end; rows += T.size(t++)) {
            const ConvFetch next = together > 1 ? conv_fetch(B, K, t, T.count)
                : conv_fetch(U, STRASSEN_P * K, t * STRASSEN_P + q, T.count * STRASSEN_P);
            conv_tile_any<CONV_WIDE>(T.size(t), CONV_NR, table + i + rows, q * p.plane, R, B,
                                     M + rows * p.mstride + q * CONV_NR, p.mstride, next);
          }
          strassen_finish(s, p, w, i0, i1, epi);
        }
        w = {M, t0 + i, rows, k * 2 * CONV_NR, columns + k * CONV_NR};
        f32 *swap = M;
        M = other, other = swap;
      }
    }
  }
  strassen_finish(s, p, w, 0, w.n, epi);
}
