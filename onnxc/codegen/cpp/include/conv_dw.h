// f32 depthwise convolution over channels-last activations: channels are lanes, a tile slides along x.
//
// Weights: w[ky][kx][co]. A tile of DW_XB output pixels by a strip of channels is summed into scratch and
// then handed to the epilogue. Outside the image nothing is read and nothing added: no halo is needed.
#pragma once
#include "conv.h"

static constexpr int DW_XB = 7;    // ImageNet's maps are multiples of 7, others lose a few per cent
static constexpr i64 DW_CB = 128;  // channels of a strip at most

// Keeps a loaded vector in its register: GCC would load it again for each of its uses, which makes loads,
// not multiplications, the limit.
#if defined(__x86_64__) && (defined(__AVX512F__) || defined(__AVX__) && ONNXC_VL <= 8 || ONNXC_VL <= 4)
#define DW_KEEP(v) asm("" : "+v"(v))
#else
#define DW_KEEP(v)
#endif

// The place of one or more tiles in a row: x points to the input element (first pixel of the first window,
// first kernel row, first channel); ix is that pixel's column (maybe negative), ky0..ky1 are the kernel rows
// inside the image. Sums go to D[pixel][ds].
struct DwTile {
  const f32 *x, *w;
  f32 *D;
  i64 ix, ky0, ky1, cols, tiles, ds;
};

// Wide kernels add into two sets of sums where registers allow: one set is a chain of KH * KW dependent steps.
template <int KW> static constexpr int dw_sets = VL >= 16 && KW >= 5 ? 2 : 1;

// Adds one kernel row to the sums of one vector of channels.
template <int KW, int SX, bool EDGE, class L>
OX void dw_row(vf (*acc)[DW_XB], const f32 *p, i64 ips, i64 ix, i64 W, const f32 *w, i64 CO, L l) {
  vf k[KW];
  OX_UNROLL for (int i = 0; i < KW; i++) k[i] = ldl(w + i * CO, l);
  OX_UNROLL for (int j = 0; j < (DW_XB - 1) * SX + KW; j++) {
    if (EDGE && (u64)(ix + j) >= (u64)W) continue;
    vf v = ldl(p + j * ips, l);
    DW_KEEP(v);
    OX_UNROLL for (int i = 0; i < KW; i++)
      if (j >= i && (j - i) % SX == 0 && (j - i) / SX < DW_XB) acc[i % dw_sets<KW>][(j - i) / SX] += v * k[i];
  }
}

template <int KW, int SX, bool EDGE, class L>
OX void dw_vector(const ConvShape &s, const DwTile &t, const f32 *x, f32 *D, i64 c, L l) {
  vf acc[dw_sets<KW>][DW_XB];
  OX_UNROLL for (int i = 0; i < DW_XB; i++) acc[0][i] = acc[dw_sets<KW> - 1][i] = vf{};
  for (i64 ky = t.ky0; ky < t.ky1; ky++)
    dw_row<KW, SX, EDGE>(acc, x + ky * s.irs + c, s.ips, t.ix, s.W, t.w + ky * KW * s.CO + c, s.CO, l);
  const f32 *next = x + (t.ky1 + s.SY - 1) * s.irs + c;  // the row that the next output row will need
  OX_UNROLL for (int i = 0; i < DW_XB; i++)
    st(D + i * t.ds + c, dw_sets<KW> == 2 ? acc[0][i] + acc[1][i] : acc[0][i]);
}

// The sums of some tiles, for kernel width KW and stride SX known at compile time and no dilation along x.
// Never inlined: one copy serves every depthwise convolution of that kind.
template <int KW, int SX, bool EDGE>
__attribute__((noinline, noclone)) static void dw_tile(const ConvShape &s, const DwTile &t) {
  const f32 *x = t.x;
  f32 *D = t.D;
  for (i64 n = 0; n < t.tiles; n++, x += DW_XB * SX * s.ips, D += DW_XB * t.ds) {
    i64 c = 0;
    for (; c + VL <= t.cols; c += VL) dw_vector<KW, SX, EDGE>(s, t, x, D, c, Full{});
    if (c < t.cols) dw_vector<KW, SX, EDGE>(s, t, x, D, c, Part{int(t.cols - c)});
  }
}

// Any kernel, stride, dilation and channel multiplier: pixel by pixel. co is the strip's first channel.
__attribute__((noinline)) static void dw_tile_any(const ConvShape &s, const DwTile &t, i64 co, i64 rows) {
  i64 M = s.CO / s.CI;
  const f32 *x = t.x - co / M;
  for (i64 r = 0; r < rows; r++)
    for (i64 c = 0; c < t.cols; c += VL) {
      int n = (int)cmin(VL, t.cols - c);
      vf acc = {};
      for (i64 ky = t.ky0; ky < t.ky1; ky++)
        for (i64 kx = 0; kx < s.KW; kx++) {
          i64 j = r * s.SX + kx * s.DX;
          if ((u64)(t.ix + j) >= (u64)s.W) continue;
          const f32 *p = x + ky * s.DY * s.irs + j * s.ips;
          vf v = {};
          if (M == 1) v = ldn(p + co + c, n);
          else for (int i = 0; i < n; i++) v[i] = p[(co + c + i) / M];
          acc += v * ldn(t.w + (ky * s.KW + kx) * s.CO + c, n);
        }
      st(t.D + r * t.ds + c, acc);
    }
}

// An item is a strip of channels in a band of output rows. The input rows under a kernel by a strip's channels
// fit the L1 cache, so that each row comes from beyond it once and not KH times.
struct DwPlan { i64 strip, strips, band, bands; };
OX DwPlan dw_plan(const ConvShape &s) {
  DwPlan p;
  i64 fit = (VL >= 16 ? 32768 : 24576) / cmax(1, 4 * s.KH * cmin(s.W, s.OW * s.SX + s.KW)) / VL * VL;
  p.strips = cdiv(s.CO, cmin(DW_CB, cmax(2 * VL, fit)));
  p.strip = cround(cdiv(s.CO, p.strips), VL);
  p.strips = cdiv(s.CO, p.strip);
  p.band = cmax(1, cmin(8, s.N * s.OH * p.strips / 16));
  p.bands = cdiv(s.OH, p.band);
  return p;
}

static i64 conv_dw_count(const ConvShape &s) {
  DwPlan p = dw_plan(s);
  return s.N * p.bands * p.strips;
}
static i64 conv_dw_scratch(const ConvShape &) { return 4 * DW_XB * 2 * DW_CB; }

// One output row by a strip of channels from co on.
template <int KW, int SX, class E>
OX void dw_line(
    const ConvShape &s, const f32 *x, const f32 *w, i64 n, i64 oy, i64 co, i64 cols, f32 *D, const E &epi) {
  i64 iy = oy * s.SY - s.PT, reach = (DW_XB - 1) * SX + KW;
  DwTile t = {nullptr, w + co, D, 0, 0, 0, cols, 1, cround(cols, VL)};
  i64 most = cmax(1, 2 * DW_CB / t.ds);  // tiles at a time
  t.ky0 = iy < 0 ? cmin(s.KH, cdiv(-iy, s.DY)) : 0;
  t.ky1 = cmax(t.ky0, cmin(s.KH, cdiv(s.H - iy, s.DY)));
  const f32 *line = x + n * s.ins + iy * s.irs + (s.CI == s.CO ? co : co / (s.CO / s.CI));
  for (i64 ox = 0, pixels; ox < s.OW; ox += pixels) {
    t.ix = ox * s.SX - s.PL, t.x = line + t.ix * s.ips, t.tiles = 1;
    bool edge = KW == 0 || t.ix < 0 || t.ix + reach > s.W;
    i64 inner = (s.W - t.ix - reach) / (DW_XB * cmax(SX, 1)) + 1;
    if (!edge) t.tiles = cmin(cmin(most, inner), cdiv(s.OW - ox, DW_XB));
    pixels = cmin(t.tiles * DW_XB, s.OW - ox);
    if constexpr (KW == 0) dw_tile_any(s, t, co, pixels);
    else if (edge) dw_tile<KW, SX, true>(s, t);
    else dw_tile<KW, SX, false>(s, t);
    conv_finish(s, D, t.ds, Px{(n * s.OH + oy) * s.OW + ox, n, oy, ox}, pixels, co, cols, epi);
  }
}

// Work items [first, last) of a depthwise convolution (G = CI, CO a multiple of CI).
// KW and SX are the shape's own, with DX = 1 and CO = CI; KW = 0 takes any shape.
template <int KW, int SX, class E>
static void conv_dw_items(
    const ConvShape &s, const f32 *x, const f32 *w, i64 first, i64 last, void *scratch, const E &epi) {
  DwPlan p = dw_plan(s);
  for (i64 item = first; item < last; item++) {
    i64 co = item % p.strips * p.strip, band = item / p.strips % p.bands, n = item / (p.strips * p.bands);
    for (i64 oy = band * p.band; oy < cmin(s.OH, (band + 1) * p.band); oy++)
      dw_line<KW, SX>(s, x, w, n, oy, co, cmin(p.strip, s.CO - co), (f32 *)scratch, epi);
  }
}
