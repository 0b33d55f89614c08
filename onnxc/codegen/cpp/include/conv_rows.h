// f32 convolution of images of few channels by small kernels, as stems are: direct, as in conv.h, but with no table of
// pointers, which would take as long as sums of few terms.
//
// The input under a band of output rows is copied channels-last, with zeros around it (unless it lies so already and
// nothing is outside). There the taps of a pixel's neighbour begin SX * CI floats after its own: a tile of pixels of one
// output row by a panel of output channels needs one pointer, and a kernel row is a run of KW * CI terms. The last tile of
// a row may compute pixels beyond it, which nobody uses.
//
// Weights: w[panel][ky][kx][ci][NR], output channels zero-padded to whole panels of NR, as conv.h's.
#pragma once
#include "conv.h"

// Pixels of a tile: rows of OW pixels fall into as few tiles as there are registers for, of one size. Where the width is
// not known (0), as many as there are registers for.
template <int CO, int OW> static constexpr int cr_pixels = [] {
  const int most = CO <= VL && CONV_MR < 12 ? 2 * CONV_MR : CONV_MR, tiles = (OW + most - 1) / most;
  return OW ? (OW + tiles - 1) / tiles : most;
}();

struct CrPlan {
  i64 tiles;         // of an output row
  i64 cut, cuts;     // tiles of an item's part of a row, and such parts
  i64 band, bands;   // output rows of an item
  i64 width, under;  // floats of a copied row, copied rows
  bool inside;       // nothing needs to be copied
};

static constexpr i64 CR_ROOM = 12288;  // floats that are copied at a time

template <int CI, int KW, int SX, int P> static CrPlan cr_plan(const ConvShape &s) {
  CrPlan p = {};
  const i64 rows = s.N * s.OH;
  p.tiles = ox_up(s.OW, P);
  p.cuts = ox_max(1, ox_min(p.tiles / 4, CONV_ITEMS / ox_max(rows, 1)));
  p.cut = ox_max(1, ox_up(p.tiles, p.cuts)), p.cuts = ox_up(p.tiles, p.cut);
  p.width = cround(((p.cut * P - 1) * SX + KW) * CI, VL);
  const i64 fit = (CR_ROOM / p.width - s.KH) / s.SY + 1, few = ox_max(1, rows / CONV_ITEMS);
  p.band = ox_max(1, ox_min(ox_min(s.OH, few), ox_max(fit, ox_up(2 * s.KH, s.SY))));
  p.bands = ox_up(s.OH, p.band);
  p.under = (p.band - 1) * s.SY + s.KH;
  const bool within = s.PT == 0 && s.PL == 0 && (s.OH - 1) * s.SY + s.KH <= s.H && (s.OW - 1) * SX + KW <= s.W;
  p.inside = within && s.OW % P == 0 && s.ips == CI && (s.ics == 1 || CI == 1);
  return p;
}

template <int CI, int KW, int SX, int CO, int P> static i64 conv_row_count(const ConvShape &s) {
  const CrPlan p = cr_plan<CI, KW, SX, P>(s);
  return s.N * p.bands * p.cuts;
}
template <int CI, int KW, int SX, int CO, int P> static i64 conv_row_scratch(const ConvShape &s) {
  const CrPlan p = cr_plan<CI, KW, SX, P>(s);
  return p.inside ? 0 : 4 * (p.under * p.width + CI * VL);
}

// Sums of P pixels, STEP floats apart, by NV vectors of channels: `runs` runs of LEN terms, `down` floats apart. `end` gets
// them pixel by pixel.
template <int P, int NV, int LEN, int STEP, class E>
OX void cr_sums(const f32 *a, i64 down, i64 runs, const f32 *w, const E &end) {
  constexpr int TERMS = OX_SUMS_STAY ? 3 : 1;  // at a time: of 8 lanes, what is no multiplication takes a fifth of the time
  vf acc[P][NV];
  OX_UNROLL for (int r = 0; r < P; r++)
    OX_UNROLL for (int j = 0; j < NV; j++) acc[r][j] = vf{};
  for (i64 y = 0; y < runs; y++, a += down) {
    const f32 *t = a;
    const auto term = [&](int k) OX_LAMBDA {
      vf b[NV];
      OX_UNROLL for (int j = 0; j < NV; j++) b[j] = ld(w + k * CONV_NR + j * VL);
      OX_UNROLL for (int r = 0; r < P; r++) {
        const vf v = bc(t[r * STEP + k]);
        OX_UNROLL for (int j = 0; j < NV; j++) add_product(acc[r][j], b[j], v);
      }
    };
    int k = 0;
    for (; k + TERMS <= LEN; k += TERMS, t += TERMS, w += TERMS * CONV_NR) {
      asm("" : "+r"(t));  // or the compiler moves what the next term reads as well from register to register
      OX_UNROLL for (int i = 0; i < TERMS; i++) term(i);
    }
    for (; k < LEN; k++, t++, w += CONV_NR) term(0);
  }
  OX_UNROLL for (int r = 0; r < P; r++) end(r, acc[r]);
}

// A tile, from registers to the epilogue: `pixels` of it from q on, COLS channels from c on.
template <int P, int COLS, int LEN, int STEP, class E>
__attribute__((noinline)) static void cr_tile(const f32 *a, i64 down, i64 runs, const f32 *w, Px q, int pixels, i64 c,
                                              const E &call) {
  constexpr int NV = COLS > VL ? 2 : 1, LAST = COLS - (NV - 1) * VL;
  const E epi = call;
  cr_sums<P, NV, LEN, STEP>(a, down, runs, w, [&](int r, const vf *acc) OX_LAMBDA {
    if (r >= pixels) return;
    if constexpr (NV > 1) epi(q, c, acc[0], Full{});
    if constexpr (LAST == VL) epi(q, c + (NV - 1) * VL, acc[NV - 1], Full{});
    else epi(q, c + (NV - 1) * VL, acc[NV - 1], Part{LAST});
    q.i++, q.x++;
  });
}
// The same, to rows of CONV_NR sums.
template <int P, int COLS, int LEN, int STEP>
__attribute__((noinline, noclone)) static void cr_tile_to(const f32 *a, i64 down, i64 runs, const f32 *w, f32 *D) {
  constexpr int NV = COLS > VL ? 2 : 1;
  cr_sums<P, NV, LEN, STEP>(a, down, runs, w, [&](int r, const vf *acc) OX_LAMBDA {
    OX_UNROLL for (int j = 0; j < NV; j++) st(D + r * CONV_NR + j * VL, acc[j]);
  });
}

// Input rows [y, y + rows) of an image at x, from column ix on: `wide` pixels of each.
template <int CI> static void cr_copy(const ConvShape &s, const CrPlan &p, const f32 *x, i64 y, i64 rows, i64 ix, f32 *d) {
  const i64 wide = p.width / CI, first = ox_min(wide, ox_max(0, -ix)), last = ox_max(first, ox_min(wide, s.W - ix));
  for (i64 r = 0; r < rows; r++, y++, d += p.width) {
    if ((u64)y >= (u64)s.H) {
      for (i64 i = 0; i < p.width; i += VL) st(d + i, vf{});
      continue;
    }
    for (i64 i = 0; i < first * CI; i++) d[i] = 0;
    conv_copy_row(s, x + y * s.irs + (ix + first) * s.ips, last - first, CI, d + first * CI);
    for (i64 i = last * CI; i < p.width; i++) d[i] = 0;
  }
}

// A tile by the panels from K on, which write longer runs of results than a panel at a time would.
template <int CI, int KW, int SX, int CO, int P, int K, class E, int N>
OX void cr_tile_by_all(const ConvShape &s, const f32 *a, i64 down, const f32 *w, i64 panel, const Px &q, int pixels, const E &epi,
                       const ConvNear<N> &near) {
  constexpr int COLS = CO - K * CONV_NR < CONV_NR ? CO - K * CONV_NR : CONV_NR;
  conv_near(near, q.i, pixels, K * CONV_NR, COLS);
  cr_tile<P, COLS, KW * CI, SX * CI>(a, down, s.KH, w + K * panel, q, pixels, K * CONV_NR, epi);
  if constexpr ((K + 1) * CONV_NR < CO)
    cr_tile_by_all<CI, KW, SX, CO, P, K + 1>(s, a, down, w, panel, q, pixels, epi, near);
}
// The same for an epilogue whose lanes are pixels, by one panel: these are collected.
template <int CI, int KW, int SX, int CO, int P, int K, class F>
OX void cr_across(const ConvShape &s, const CrPlan &p, const f32 *a, i64 down, const f32 *w, i64 panel, const Px &q, i64 rows,
                  i64 tiles, const ConvAcross<F> &epi) {
  constexpr int COLS = CO - K * CONV_NR < CONV_NR ? CO - K * CONV_NR : CONV_NR;
  ConvSums<true> sums = {nullptr};
  for (i64 y = 0; y < rows; y++) {
    const f32 *from = a + y * s.SY * down;
    for (i64 t = 0, x = q.x; t < tiles; t++, from += P * SX * CI, x += P) {
      cr_tile_to<P, COLS, KW * CI, SX * CI>(from, down, s.KH, w + K * panel, sums.next());
      const bool last = t + 1 == tiles && (p.cuts > 1 || y + 1 == rows);
      sums.finish(s, q.i - q.x + y * s.OW + x, ox_min(P, s.OW - x), last, K * CONV_NR, COLS, epi);
    }
  }
  if constexpr ((K + 1) * CONV_NR < CO)
    cr_across<CI, KW, SX, CO, P, K + 1>(s, p, a, down, w, panel, q, rows, tiles, epi);
}

// Work items [first, last): bands of rows of an image, or parts of them. The epilogue is as conv_items wants it.
template <int CI, int KW, int SX, int CO, int P, class E, int N = 0>
static void conv_row_items(const ConvShape &s, const f32 *x, const f32 *w, i64 first, i64 last, void *scratch, const E &epi,
                           const ConvNear<N> &near = {}) {
  const CrPlan p = cr_plan<CI, KW, SX, P>(s);
  f32 *const copied = (f32 *)scratch;
  const i64 panel = s.KH * KW * CI * CONV_NR, down = p.inside ? s.irs : p.width;
  for (i64 item = first; item < last; item++) {
    const i64 cut = item % p.cuts, band = item / p.cuts % p.bands, n = item / (p.cuts * p.bands);
    const i64 y0 = band * p.band, rows = ox_min(p.band, s.OH - y0);
    const i64 t0 = cut * p.cut, tiles = ox_min(p.cut, p.tiles - t0), x0 = t0 * P;
    const f32 *const image = x + n * s.ins, *from = copied;
    if (p.inside) from = image + y0 * s.SY * s.irs + x0 * SX * CI;
    else cr_copy<CI>(s, p, image, y0 * s.SY - s.PT, (rows - 1) * s.SY + s.KH, x0 * SX - s.PL, copied);
    const Px q = {(n * s.OH + y0) * s.OW + x0, n, y0, x0};
    if constexpr (conv_is_across<E>) {
      cr_across<CI, KW, SX, CO, P, 0>(s, p, from, down, w, panel, q, rows, tiles, epi);
    } else {
      for (i64 y = 0; y < rows; y++)
        for (i64 t = 0; t < tiles; t++) {
          const Px at = {q.i + y * s.OW + t * P, n, y0 + y, x0 + t * P};
          const f32 *a = from + y * s.SY * down + t * P * SX * CI;
          cr_tile_by_all<CI, KW, SX, CO, P, 0>(s, a, down, w, panel, at, (int)ox_min(P, s.OW - at.x), epi, near);
        }
    }
  }
}
