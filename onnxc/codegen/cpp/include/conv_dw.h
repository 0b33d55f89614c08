// f32 depthwise convolution over channels-last activations: channels are lanes, a tile slides along x.
//
// Weights: w[ky][kx][co]. A tile of DW_XB output pixels by a strip of channels is summed into scratch and
// then handed to the epilogue. Outside the image nothing is read and nothing added: no halo is needed.
#pragma once
#include "conv.h"

static constexpr int DW_XB = 7;    // ImageNet's maps are multiples of 7, others lose a few per cent
static constexpr i64 DW_CB = 128;  // channels of a strip

// One tile's place: x points to the input element (first pixel of the tile's window, first kernel row,
// first channel); ix is that pixel's column (maybe negative), ky0..ky1 are the kernel rows inside the image.
struct DwTile {
  const f32 *x, *w;
  f32 *D;
  i64 ix, ky0, ky1, cols;
};

// Adds one kernel row to the XB sums of one vector of channels.
template <int KW, int SX, bool EDGE, class L>
OX void dw_row(vf *acc, const f32 *p, i64 ips, i64 ix, i64 W, const f32 *w, i64 CO, L l) {
  vf k[KW];
  OX_UNROLL for (int i = 0; i < KW; i++) k[i] = ldl(w + i * CO, l);
  OX_UNROLL for (int j = 0; j < (DW_XB - 1) * SX + KW; j++) {
    if (EDGE && (u64)(ix + j) >= (u64)W) continue;
    vf v = ldl(p + j * ips, l);
    OX_UNROLL for (int i = 0; i < KW; i++)
      if (j >= i && (j - i) % SX == 0 && (j - i) / SX < DW_XB) acc[(j - i) / SX] += v * k[i];
  }
}

template <int KW, int SX, bool EDGE, class L>
OX void dw_vector(const ConvShape &s, const DwTile &t, i64 c, L l) {
  vf acc[DW_XB];
  OX_UNROLL for (int i = 0; i < DW_XB; i++) acc[i] = vf{};
  for (i64 ky = t.ky0; ky < t.ky1; ky++)
    dw_row<KW, SX, EDGE>(acc, t.x + ky * s.irs + c, s.ips, t.ix, s.W, t.w + ky * KW * s.CO + c, s.CO, l);
  OX_UNROLL for (int i = 0; i < DW_XB; i++) st(t.D + i * DW_CB + c, acc[i]);
}

// The sums of a tile, for kernel width KW and stride SX known at compile time and no dilation along x.
// Never inlined: one copy serves every depthwise convolution of that kind.
template <int KW, int SX, bool EDGE>
__attribute__((noinline, noclone)) static void dw_tile(const ConvShape &s, const DwTile &t) {
  i64 c = 0;
  for (; c + VL <= t.cols; c += VL) dw_vector<KW, SX, EDGE>(s, t, c, Full{});
  if (c < t.cols) dw_vector<KW, SX, EDGE>(s, t, c, Part{int(t.cols - c)});
}

// Any kernel, stride, dilation and channel multiplier: pixel by pixel. co is the strip's first channel.
__attribute__((noinline)) static void dw_tile_any(const ConvShape &s, const DwTile &t, i64 co, int rows) {
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
      st(t.D + r * DW_CB + c, acc);
    }
}

static i64 conv_dw_count(const ConvShape &s) { return s.N * s.OH * cdiv(s.CO, DW_CB); }
static i64 conv_dw_scratch(const ConvShape &) { return 4 * DW_XB * DW_CB; }

// Work items [first, last) of a depthwise convolution (G = CI, CO a multiple of CI); an item is an output row
// by a strip of channels. KW and SX are the shape's own, with DX = 1 and CO = CI; KW = 0 takes any shape.
template <int KW, int SX, class E>
static void conv_dw_items(const ConvShape &s, const f32 *x, const f32 *w, i64 first, i64 last, void *scratch, const E &epi) {
  i64 strips = cdiv(s.CO, DW_CB), reach = (DW_XB - 1) * SX + KW;
  f32 *D = (f32 *)scratch;
  for (i64 item = first; item < last; item++) {
    i64 row = item / strips, co = item % strips * DW_CB, oy = row % s.OH, iy = oy * s.SY - s.PT;
    DwTile t = {nullptr, w + co, D, 0, 0, 0, cmin(DW_CB, s.CO - co)};
    t.ky0 = iy < 0 ? cmin(s.KH, cdiv(-iy, s.DY)) : 0;
    t.ky1 = cmax(t.ky0, cmin(s.KH, cdiv(s.H - iy, s.DY)));
    const f32 *line = x + row / s.OH * s.ins + iy * s.irs + (s.CI == s.CO ? co : co / (s.CO / s.CI));
    for (i64 ox = 0; ox < s.OW; ox += DW_XB) {
      int rows = (int)cmin(DW_XB, s.OW - ox);
      t.ix = ox * s.SX - s.PL;
      t.x = line + t.ix * s.ips;
      if constexpr (KW == 0) dw_tile_any(s, t, co, rows);
      else if (t.ix < 0 || t.ix + reach > s.W) dw_tile<KW, SX, true>(s, t);
      else dw_tile<KW, SX, false>(s, t);
      conv_finish(s, D, DW_CB, Px{row * s.OW + ox, row / s.OH, oy, ox}, rows, co, t.cols, epi);
    }
  }
}
