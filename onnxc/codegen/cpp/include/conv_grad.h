// The derivative of an f32 convolution by its weights, over channels-last activations:
//
//   dw[m][c][tap] = sum over output pixels of dy[pixel][m] * x[pixel's window at tap][c]
//
// A matmul whose K are the pixels. Rows are m, columns all taps of some channels c. An item is a block of both. It goes
// through its pixels by chunks: rows of dy are packed once a chunk, in strips of a tile's height; columns a panel at a
// time, by which all strips are multiplied while it is in the first-level cache. Sums of a chunk start at zero and are
// added to those in memory, which keeps the rounding error of long sums low.
//
// Where blocks are few, the pixels are divided too (`splits`): then the sums of each part go to the workspace, and a
// second step adds them up. The division depends on the shape alone, so any number of threads gives the same bits.
//
// The epilogue is called as epi(m, j, vf sum, lanes), where j = c * taps + tap counts within a row of [M, C / G, taps].
#pragma once
#include "conv.h"

// A convolution and the place of dy: element (n, m, z, y, x) at n*yns + z*yds + y*yrs + x*yps + m*ycs.
template <class S> struct GradShape : S { i64 yns, yds, yrs, yps, ycs; };

static constexpr i64 GRAD_KC = VL >= 16 ? 192 : 256;               // pixels of a chunk: the longest chain of additions
static constexpr i64 GRAD_ROWS = VL >= 16 ? 128 : 96;              // most rows of a block
static constexpr i64 GRAD_ROOM = (VL >= 16 ? 256 : 128) * 1024;    // bytes of sums that a block aims at
// Floats of a packed strip of dy: whole vectors are written of a pixel's rows, and what they have too much belongs to the next
// pixel, which is written later; behind the last one there must be room.
static constexpr i64 GRAD_PACKED = GRAD_KC * CONV_MR + VL;
static constexpr i64 GRAD_FINISH = 8;                              // rows of an item of the second step

static constexpr i64 GRAD_AHEAD = 8;                               // pixels between a use of x and its prefetch

// Blocks of rows and channels of a group, and their sizes; columns of a block's sums, in whole panels; parts of the
// pixels, and items of the second step that a block has.
struct GradPlan { i64 cig, cog, taps, rows, channels, mblocks, cblocks, blocks, width, pixels, splits, finish; };

template <class S> OX i64 grad_planes(const S &s) { return s.N * s.OD; }

template <class S> static GradPlan grad_plan(const S &s) {
  GradPlan p = {};
  p.cig = s.CI / s.G, p.cog = s.CO / s.G, p.taps = conv_taps(s), p.pixels = grad_planes(s) * s.OH * s.OW;
  p.mblocks = ox_max(1, ox_up(p.cog, GRAD_ROWS)), p.rows = ox_up(p.cog, p.mblocks), p.mblocks = ox_up(p.cog, ox_max(1, p.rows));
  i64 fit = ox_max(CONV_NR, GRAD_ROOM / ox_max(1, 4 * p.rows * p.taps) / CONV_NR * CONV_NR);
  p.cblocks = ox_max(1, ox_up(p.cig, fit));
  p.splits = ox_max(1, ox_min(ox_up(CONV_ITEMS, ox_max(1, s.G * p.mblocks * p.cblocks)), p.pixels / GRAD_KC));
  // Few pixels make few parts: then blocks of fewer channels, but enough of them for the packing of dy to pay.
  i64 more = ox_up(CONV_ITEMS, ox_max(1, s.G * p.mblocks * p.cblocks * p.splits));
  p.cblocks = ox_max(p.cblocks, ox_min(p.cblocks * more, p.cig * ox_min(p.taps, 2) / (2 * CONV_NR)));
  p.channels = ox_max(1, ox_min(cround(ox_up(p.cig, p.cblocks), VL), p.cig));
  p.cblocks = ox_up(p.cig, p.channels);
  p.blocks = s.G * p.mblocks * p.cblocks, p.width = cround(p.channels * p.taps, CONV_NR);
  p.finish = p.splits > 1 ? ox_up(p.rows, GRAD_FINISH) : 1;
  return p;
}

// Sums of a block: element (row m, column j) at [j / NR][m][j % NR]. Tiles write rows in whole strips.
OX i64 grad_height(const GradPlan &p) { return p.rows + CONV_MR; }
OX i64 grad_sums(const GradPlan &p) { return grad_height(p) * p.width; }

// A pixel of a chunk: where its window begins in x, maybe outside, and its row of dy.
struct GradPixel { const f32 *x, *dy; i64 iz, iy, ix; };

// Bytes of scratch of a thread, of the workspace for all partial sums, and items of both steps.
template <class S> static i64 grad_scratch(const S &s) {
  GradPlan p = grad_plan(s);
  i64 strips = ox_up(p.rows, CONV_MR) + 1, row = cround(p.channels * p.taps, VL) + VL;
  return 4 * (strips * GRAD_PACKED + GRAD_KC * CONV_NR + 4 * VL + grad_sums(p) + row) +
         (i64)sizeof(GradPixel) * (GRAD_KC + GRAD_AHEAD) + 64;
}
template <class S> static i64 grad_room(const S &s) {
  GradPlan p = grad_plan(s);
  return p.splits > 1 ? 4 * p.splits * p.blocks * grad_sums(p) : 0;
}
template <class S> static i64 grad_partial_count(const S &s) {
  GradPlan p = grad_plan(s);
  return p.splits > 1 ? p.splits * p.blocks : 0;
}
template <class S> static i64 grad_count(const S &s) {
  GradPlan p = grad_plan(s);
  return p.taps > 0 ? p.blocks * p.finish : 0;
}

// ---------------------------------------------------------------------------------------------------
// The register tile: D[i][j] (+)= sum over k of A[k * CONV_MR + i] * B[k * CONV_NR + j], for MR rows.
#define GRAD_DECL(i) vf c##i = {}, d##i = {};
#define GRAD_FMA(i) if constexpr (i < MR) { f32 s = A[i]; c##i += b * s, d##i += e * s; }
#define GRAD_SET(i) if constexpr (i < MR) { f32 *o = D + i * CONV_NR; st(o, c##i), st(o + VL, d##i); }
#define GRAD_ADD(i) if constexpr (i < MR) { f32 *o = D + i * CONV_NR; st(o, ld(o) + c##i), st(o + VL, ld(o + VL) + d##i); }
template <int MR>
__attribute__((noinline, noclone)) static void grad_tile(i64 kc, const f32 *A, const f32 *B, f32 *D, bool add) {
  CONV_ROWS(GRAD_DECL)
  for (i64 k = 0; k < kc; k++, A += CONV_MR, B += CONV_NR) {
    vf b = ld(B), e = ld(B + VL);
    CONV_ROWS(GRAD_FMA)
  }
  if (add) { CONV_ROWS(GRAD_ADD) } else { CONV_ROWS(GRAD_SET) }
}
#undef GRAD_DECL
#undef GRAD_FMA
#undef GRAD_SET
#undef GRAD_ADD

OX void grad_tile_rows(int rows, i64 kc, const f32 *A, const f32 *B, f32 *D, bool add) {
#define GRAD_CASE(m) case m: if constexpr (conv_has_tile<2>(m)) return grad_tile<m>(kc, A, B, D, add);
  switch (rows) {  // a count without a tile falls through to the next, which has one
    GRAD_CASE(1) GRAD_CASE(2) GRAD_CASE(3) GRAD_CASE(4) GRAD_CASE(5) GRAD_CASE(6) GRAD_CASE(7)
    GRAD_CASE(8) GRAD_CASE(9) GRAD_CASE(10) GRAD_CASE(11) GRAD_CASE(12) GRAD_CASE(13) GRAD_CASE(14)
  }
#undef GRAD_CASE
}

// ---------------------------------------------------------------------------------------------------
// Packing.

// Pixels [p0, p0 + kc).
template <class S> static void grad_pixels(const GradShape<S> &s, const f32 *x, const f32 *dy, i64 p0, i64 kc, GradPixel *q) {
  i64 ox = p0 % s.OW, oy = p0 / s.OW % s.OH, plane = p0 / (s.OW * s.OH);
  for (i64 k = 0; k < kc; k++, q++) {
    i64 n = plane / s.OD, oz = plane % s.OD;
    q->iz = oz * s.SZ - s.PF, q->iy = oy * s.SY - s.PT, q->ix = ox * s.SX - s.PL;
    q->x = x + n * s.ins + q->iz * s.ids + q->iy * s.irs + q->ix * s.ips;
    q->dy = dy + n * s.yns + oz * s.yds + oy * s.yrs + ox * s.yps;
    if (++ox == s.OW) ox = 0, oy++;
    if (oy == s.OH) oy = 0, plane++;
  }
}

// n floats, s apart; may write up to a whole number of vectors.
OX void grad_copy(const f32 *p, i64 s, i64 n, f32 *d) {
  i64 i = 0;
  if (s != 1) {
    for (; i < n; i++) d[i] = p[i * s];
    return;
  }
  for (; i + VL <= n; i += VL) st(d + i, ld(p + i));
  if (i < n) st(d + i, ldn(p + i, int(n - i)));
}

// Rows [m, m + rows) of dy as strips of GRAD_PACKED: [k][CONV_MR]. A pixel's rows are neighbours: all are read before the next.
template <class S>
static void grad_rows(const GradShape<S> &s, const GradPixel *q, i64 kc, i64 m, i64 rows, f32 *A) {
  ConvTiles T = conv_tiles(rows);
  i64 step = s.CO == 1 ? 1 : s.ycs;
  for (i64 k = 0; k < kc; k++, A += CONV_MR) {
    const f32 *p = q[k].dy + m * s.ycs;
    f32 *d = A;
    for (i64 t = 0; t < T.count; d += GRAD_PACKED, p += T.size(t++) * step) grad_copy(p, step, T.size(t), d);
  }
}

// Columns of a panel that are neighbours in x: n floats, at `at` from the window's first, for columns from `to` on. They
// are of the kernel's plane kz and row ky, and reach from its column x0 to x1.
struct GradRun { i64 at, n, to, kz, ky, x0, x1; };
struct GradRuns { int count; GradRun of[CONV_NR]; };

// One tap's channels [c, c + n).
template <class S> OX GradRun grad_run(const S &s, i64 tap, i64 c, i64 n, i64 to) {
  i64 kz = tap / (s.KH * s.KW) * s.DZ, ky = tap / s.KW % s.KH * s.DY, kx = tap % s.KW * s.DX;
  return {kz * s.ids + ky * s.irs + kx * s.ips + c * s.ics, n, to, kz, ky, kx, kx};
}

// The columns [first, end) of the taps of channels [c0, c0 + cb): a run for each tap, or with `merge` for each row of the
// kernel where its columns are neighbours in memory.
template <class S> static GradRuns grad_runs(const S &s, i64 c0, i64 cb, i64 first, i64 end, bool merge) {
  GradRuns r;
  r.count = 0;
  merge = merge && s.DX == 1 && cb == s.CI && s.ips == cb;
  for (i64 i = first, n; i < end; i += n) {
    n = ox_min(cb - i % cb, end - i);
    GradRun run = grad_run(s, i / cb, c0 + i % cb, n, i - first);
    if (merge && r.count && i / cb % s.KW > 0) r.of[r.count - 1].n += n, r.of[r.count - 1].x1 = run.x0;
    else r.of[r.count++] = run;
  }
  return r;
}

// Panel B[k][NR] of the columns [first, end). Runs are written in order, since each may write beyond its end.
template <class S>
static void grad_panel(
    const GradShape<S> &s, const GradPixel *q, i64 kc, i64 c0, i64 cb, i64 first, i64 end, f32 *B) {
  const GradRuns merged = grad_runs(s, c0, cb, first, end, true), single = grad_runs(s, c0, cb, first, end, false);
  i64 step = s.CI == 1 ? 1 : s.ics;
  if (merged.count == 1 && end - first == CONV_NR && step == 1 && merged.of[0].x0 == merged.of[0].x1) {
    const GradRun r = merged.of[0];
    for (i64 k = 0; k < kc; k++, q++, B += CONV_NR) {
      bool in = (u64)(q->iy + r.ky) < (u64)s.H && (u64)(q->ix + r.x0) < (u64)s.W;
      if (S::VOLUME) in = in && (u64)(q->iz + r.kz) < (u64)s.D;
      if (in) __builtin_prefetch(q[GRAD_AHEAD].x + r.at), __builtin_prefetch(q[GRAD_AHEAD].x + r.at + 16);
      const f32 *p = q->x + r.at;
      st(B, in ? ld(p) : vf{}), st(B + VL, in ? ld(p + VL) : vf{});
    }
    return;
  }
  for (i64 k = 0; k < kc; k++, q++, B += CONV_NR)
    for (int i = 0; i < merged.count; i++) {
      const GradRun r = merged.of[i];
      bool row = (u64)(q->iy + r.ky) < (u64)s.H && (!S::VOLUME || (u64)(q->iz + r.kz) < (u64)s.D);
      if (row && q->ix + r.x0 >= 0 && q->ix + r.x1 < s.W) {
        const f32 *p = q->x + r.at;
        grad_copy(p, step, r.n, B + r.to);
        continue;
      }
      i64 stop = r.to + r.n;
      if (r.x0 == r.x1 || !row) {
        for (i64 d = r.to; d < stop; d += VL) st(B + d, vf{});
        continue;
      }
      for (int j = 0; j < single.count; j++) {
        const GradRun t = single.of[j];
        if (t.to < r.to || t.to >= stop) continue;
        if ((u64)(q->ix + t.x0) < (u64)s.W) grad_copy(q->x + t.at, step, t.n, B + t.to);
        else for (i64 d = 0; d < t.n; d += VL) st(B + t.to + d, vf{});
      }
    }
}

// ---------------------------------------------------------------------------------------------------
// A thread's scratch, divided.
struct GradScratch { f32 *A, *B, *D, *row; GradPixel *pixels; };
OX GradScratch grad_divide(const GradPlan &p, void *scratch) {
  GradPixel *q = (GradPixel *)scratch;
  f32 *A = (f32 *)(q + GRAD_KC + GRAD_AHEAD), *B = A + (ox_up(p.rows, CONV_MR) + 1) * GRAD_PACKED;
  f32 *D = B + GRAD_KC * CONV_NR + 4 * VL;
  return {A, B, D, D + grad_sums(p), q};
}

// What a block covers: a group, rows from m and channels from c within it.
struct GradBlock { i64 g, m, rows, c, channels; };
OX GradBlock grad_block(const GradPlan &p, i64 i) {
  GradBlock b;
  b.c = i % p.cblocks * p.channels, b.m = i / p.cblocks % p.mblocks * p.rows, b.g = i / p.cblocks / p.mblocks;
  b.rows = ox_min(p.rows, p.cog - b.m), b.channels = ox_min(p.channels, p.cig - b.c);
  return b;
}

// The sums of a block over pixels [p0, p1).
template <class S>
__attribute__((noinline)) static void grad_sum(const GradShape<S> &s, const GradPlan &p, const GradBlock &b, const f32 *x,
                                               const f32 *dy, i64 p0, i64 p1, const GradScratch &w, f32 *D) {
  ConvTiles T = conv_tiles(b.rows);
  i64 panels = ox_up(b.channels * p.taps, CONV_NR), h = grad_height(p), chunks = ox_up(p1 - p0, GRAD_KC);
  if (chunks == 0) for (i64 i = 0; i < grad_sums(p); i++) D[i] = 0;
  for (i64 q = 0; q < chunks; q++) {
    i64 k0 = p0 + (p1 - p0) * q / chunks, kc = p0 + (p1 - p0) * (q + 1) / chunks - k0;
    grad_pixels(s, x, dy, k0, kc, w.pixels);
    grad_rows(s, w.pixels, kc, b.g * p.cog + b.m, b.rows, w.A);
    for (i64 j = 0; j < panels; j++) {
      i64 first = j * CONV_NR, end = ox_min(first + CONV_NR, b.channels * p.taps);
      grad_panel(s, w.pixels, kc, b.g * p.cig + b.c, b.channels, first, end, w.B);
      f32 *d = D + j * h * CONV_NR;
      for (i64 t = 0; t < T.count; d += T.size(t++) * CONV_NR)
        grad_tile_rows(T.size(t), kc, w.A + t * GRAD_PACKED, w.B, d, q > 0);
    }
  }
}

// The first step, where there are two: items [first, last), each one block's sums over one part of the pixels.
template <class S>
static void grad_partials(
    const GradShape<S> &s, const f32 *x, const f32 *dy, f32 *room, i64 first, i64 last, void *scratch) {
  GradPlan p = grad_plan(s);
  GradScratch w = grad_divide(p, scratch);
  for (i64 i = first; i < last; i++) {
    i64 part = i % p.splits;
    grad_sum(s, p, grad_block(p, i / p.splits), x, dy, p.pixels * part / p.splits, p.pixels * (part + 1) / p.splits, w,
             room + i * grad_sums(p));
  }
}

// Adds up the parts of rows [m0, m1) of a block.
static void grad_total(const GradPlan &p, const f32 *parts, i64 m0, i64 m1, i64 panels, f32 *D) {
  i64 h = grad_height(p);
  for (i64 j = 0; j < panels; j++)
    for (i64 i = (j * h + m0) * CONV_NR; i < (j * h + m1) * CONV_NR; i += VL) {
      vf v = ld(parts + i);
      for (i64 part = 1; part < p.splits; part++) v += ld(parts + part * grad_sums(p) + i);
      st(D + i, v);
    }
}

// A row's sums [tap][c] in the order of the weights, [c][tap].
OX void grad_turn(const f32 *D, i64 panel, i64 channels, i64 taps, f32 *row) {
  for (i64 t = 0, j = 0; t < taps; t++)
    for (i64 c = 0; c < channels; c++, j++) row[c * taps + t] = D[j / CONV_NR * panel + j % CONV_NR];
}

template <class E> OX void grad_store(const f32 *row, i64 n, i64 m, i64 j, const E &epi) {
  i64 i = 0;
  for (; i + VL <= n; i += VL) epi(m, j + i, ld(row + i), Full{});
  if (i < n) epi(m, j + i, ld(row + i), Part{int(n - i)});
}

// Rows [m0, m1) of a block, handed to the epilogue.
template <class E>
__attribute__((noinline)) static void grad_finish(
    const GradPlan &p, const GradBlock &b, const f32 *D, i64 m0, i64 m1, f32 *row, const E &call) {
  const E epi = call;
  i64 panel = grad_height(p) * CONV_NR;
  for (i64 m = m0; m < m1; m++) {
    const f32 *d = D + m * CONV_NR;
    if (p.taps > 1) {
      grad_turn(d, panel, b.channels, p.taps, row);
      grad_store(row, b.channels * p.taps, b.g * p.cog + b.m + m, b.c * p.taps, epi);
      continue;
    }
    for (i64 c = 0; c < b.channels; c += CONV_NR, d += panel)
      grad_store(d, ox_min(CONV_NR, b.channels - c), b.g * p.cog + b.m + m, b.c + c, epi);
  }
}

// The second, or only step: items [first, last).
template <class S, class E>
static void grad_items(const GradShape<S> &s, const f32 *x, const f32 *dy, const f32 *room, i64 first, i64 last,
                       void *scratch, const E &epi) {
  GradPlan p = grad_plan(s);
  GradScratch w = grad_divide(p, scratch);
  for (i64 i = first; i < last; i++) {
    GradBlock b = grad_block(p, i / p.finish);
    i64 m0 = i % p.finish * GRAD_FINISH, m1 = p.finish > 1 ? ox_min(m0 + GRAD_FINISH, b.rows) : b.rows;
    if (p.splits > 1) {
      grad_total(p, room + i / p.finish * p.splits * grad_sums(p), m0, m1, ox_up(b.channels * p.taps, CONV_NR), w.D);
    } else {
      grad_sum(s, p, b, x, dy, 0, p.pixels, w, w.D);
    }
    grad_finish(p, b, w.D, m0, m1, w.row, epi);
  }
}
