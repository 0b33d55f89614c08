// f32 depthwise convolution over channels-last activations: channels are lanes, a tile slides along x.
//
// The same kernels serve groups of a few channels, and several outputs for a channel: the lanes are output channels,
// and a loaded vector of input channels is permuted so that each lane sees the input that it needs. What is needed for
// VL outputs must lie within VL inputs.
//
// Weights: w[ky][kx][ci of a group][co]. A tile of DW_XB output pixels by a strip of channels is summed into scratch
// and then handed to the epilogue. Outside the image nothing is read and nothing added: no halo is needed.
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

// The place of one or more tiles in a row: x points to the input row of the first kernel row, at the first pixel of
// the first window and channel 0; ix is that pixel's column (maybe negative), ky0..ky1 are the kernel rows inside the
// image. Output channels co to co + cols go to D[pixel][ds]; lanes has the permutations of each vector of them.
struct DwTile {
  const f32 *x, *w;
  f32 *D;
  const vi *lanes;
  i64 ix, ky0, ky1, co, cols, tiles, ds;
};

// Wide kernels add into two sets of sums where registers allow: one set is a chain of KH * KW dependent steps.
template <int KW> static constexpr int dw_sets = VL >= 16 && KW >= 5 ? 2 : 1;

// The permutation of a vector's lanes at run time.
OX vf dw_permuted(vf v, vi lanes) { return __builtin_shuffle(v, lanes); }

// Adds one kernel row of one input channel of each group to the sums of one vector of channels.
template <int KW, int SX, bool EDGE, bool PERM, int DX, class L, class X>
OX void dw_row(vf (*acc)[DW_XB], const f32 *p, i64 ips, i64 ix, i64 W, const f32 *w, i64 step, vi lanes, L l, X lx) {
  vf k[KW];
  OX_UNROLL for (int i = 0; i < KW; i++) k[i] = ldl(w + i * step, l);
  OX_UNROLL for (int j = 0; j < (DW_XB - 1) * SX + (KW - 1) * DX + 1; j++) {
    if (EDGE && (u64)(ix + j) >= (u64)W) continue;
    vf v = ldl(p + j * ips, lx);
    if constexpr (PERM) v = dw_permuted(v, lanes);
    DW_KEEP(v);
    OX_UNROLL for (int i = 0; i < KW; i++)
      if (int at = j - i * DX; at >= 0 && at % SX == 0 && at / SX < DW_XB) acc[i % dw_sets<KW>][at / SX] += v * k[i];
  }
}

// The first input channel that output channel c needs.
OX i64 dw_channel(const ConvShape &s, i64 c) { return s.CO == s.CI && s.CI == s.G ? c : c / (s.CO / s.G) * (s.CI / s.G); }

// The sums of a tile for one vector of channels, from t.co + c on; x is the input's first of these.
template <int KW, int SX, bool EDGE, bool PERM, int DX, class L, class X>
OX void dw_vector(const ConvShape &s, const DwTile &t, const f32 *x, f32 *D, i64 c, L l, X lx) {
  vf acc[dw_sets<KW>][DW_XB];
  OX_UNROLL for (int i = 0; i < DW_XB; i++) acc[0][i] = acc[dw_sets<KW> - 1][i] = vf{};
  i64 group = PERM ? s.CI / s.G : 1, step = group * s.CO;
  for (i64 ky = t.ky0; ky < t.ky1; ky++)
    for (i64 q = 0; q < group; q++)
      dw_row<KW, SX, EDGE, PERM, DX>(acc, x + ky * s.DY * s.irs, s.ips, t.ix, s.W,
                                     t.w + (ky * KW * group + q) * s.CO + c, step,
                                     PERM ? t.lanes[c / VL * group + q] : vi{}, l, lx);
  OX_UNROLL for (int i = 0; i < DW_XB; i++)
    st(D + i * t.ds + c, dw_sets<KW> == 2 ? acc[0][i] + acc[1][i] : acc[0][i]);
}

// The same for any kernel, stride and dilation.
template <bool EDGE, class L, class X>
OX void dw_vector_any(const ConvShape &s, const DwTile &t, const f32 *x, f32 *D, i64 c, L l, X lx) {
  vf acc[DW_XB];
  OX_UNROLL for (int i = 0; i < DW_XB; i++) acc[i] = vf{};
  i64 group = s.CI / s.G;
  bool permuted = group > 1 || s.CO > s.CI;
  for (i64 ky = t.ky0; ky < t.ky1; ky++)
    for (i64 kx = 0; kx < s.KW; kx++)
      for (i64 q = 0; q < group; q++) {
        vf k = ldl(t.w + ((ky * s.KW + kx) * group + q) * s.CO + c, l);
        const f32 *p = x + ky * s.DY * s.irs + kx * s.DX * s.ips;
        i64 ix = t.ix + kx * s.DX;
        vi lanes = permuted ? t.lanes[c / VL * group + q] : vi{};
        OX_UNROLL for (int r = 0; r < DW_XB; r++) {
          if (EDGE && (u64)(ix + r * s.SX) >= (u64)s.W) continue;
          vf v = ldl(p + r * s.SX * s.ips, lx);
          acc[r] += (permuted ? dw_permuted(v, lanes) : v) * k;
        }
      }
  OX_UNROLL for (int i = 0; i < DW_XB; i++) st(D + i * t.ds + c, acc[i]);
}

// The sums of some tiles, for kernel width KW, stride SX and dilation DX along x known at compile time, or for any
// (KW = 0). Never inlined: one copy serves every depthwise convolution of that kind.
template <int KW, int SX, bool EDGE, bool PERM, int DX = 1>
__attribute__((noinline, noclone)) static void dw_tile(const ConvShape &s, const DwTile &t) {
  const f32 *x = t.x;
  f32 *D = t.D;
  for (i64 n = 0; n < t.tiles; n++, x += DW_XB * s.SX * s.ips, D += DW_XB * t.ds)
    for (i64 c = 0; c < t.cols; c += VL) {
      i64 ci = dw_channel(s, t.co + c);
      int lanes = (int)ox_min(VL, t.cols - c), inputs = (int)ox_min(VL, s.CI - ci);
      const f32 *p = x + ci;
      if constexpr (KW == 0) {
        if (lanes == VL && inputs == VL) dw_vector_any<EDGE>(s, t, p, D, c, Full{}, Full{});
        else dw_vector_any<EDGE>(s, t, p, D, c, Part{lanes}, Part{inputs});
      } else {
        if (lanes == VL && inputs == VL) dw_vector<KW, SX, EDGE, PERM, DX>(s, t, p, D, c, Full{}, Full{});
        else dw_vector<KW, SX, EDGE, PERM, DX>(s, t, p, D, c, Part{lanes}, Part{inputs});
      }
    }
}

// The permutations for the outputs of a strip: lanes[vector][ci of a group].
static void dw_lanes(const ConvShape &s, i64 co, i64 cols, vi *lanes) {
  i64 group = s.CI / s.G;
  for (i64 c = co; c < co + cols; c += VL)
    for (i64 q = 0; q < group; q++, lanes++)
      for (i64 i = 0; i < VL; i++) (*lanes)[i] = i32(dw_channel(s, ox_min(c + i, s.CO - 1)) - dw_channel(s, c) + q);
}

// An item is a strip of channels in a band of output rows. The input rows under a kernel by a strip's channels
// fit the L1 cache, so that each row comes from beyond it once and not KH times.
struct DwPlan { i64 strip, strips, band, bands; };
OX DwPlan dw_plan(const ConvShape &s) {
  DwPlan p;
  i64 fit = (VL >= 16 ? 32768 : 24576) / ox_max(1, 4 * s.KH * ox_min(s.W, s.OW * s.SX + s.KW)) / VL * VL;
  p.strips = ox_up(s.CO, ox_min(DW_CB, ox_max(2 * VL, fit)));
  p.strip = cround(ox_up(s.CO, p.strips), VL);
  p.strips = ox_up(s.CO, p.strip);
  p.band = ox_max(1, ox_min(8, s.N * s.OH * p.strips / 16));
  p.bands = ox_up(s.OH, p.band);
  return p;
}

static i64 conv_dw_count(const ConvShape &s) {
  DwPlan p = dw_plan(s);
  return s.N * p.bands * p.strips;
}
static i64 conv_dw_scratch(const ConvShape &s) { return 4 * (DW_XB * 2 * DW_CB + DW_CB * (s.CI / s.G)); }

// One output row by a strip of channels: t has the channels, and lanes and D.
template <int KW, int SX, bool PERM, int DX, class E>
OX void dw_line(const ConvShape &s, const f32 *x, DwTile t, i64 n, i64 oy, const E &epi) {
  i64 iy = oy * s.SY - s.PT, reach = (DW_XB - 1) * s.SX + (s.KW - 1) * s.DX + 1;
  i64 most = ox_max(1, 2 * DW_CB / t.ds);  // tiles at a time
  t.ky0 = iy < 0 ? ox_min(s.KH, ox_up(-iy, s.DY)) : 0;
  t.ky1 = ox_max(t.ky0, ox_min(s.KH, ox_up(s.H - iy, s.DY)));
  const f32 *line = x + n * s.ins + iy * s.irs;
  for (i64 ox = 0, pixels; ox < s.OW; ox += pixels) {
    t.ix = ox * s.SX - s.PL, t.x = line + t.ix * s.ips, t.tiles = 1;
    bool edge = t.ix < 0 || t.ix + reach > s.W;
    i64 inner = (s.W - t.ix - reach) / (DW_XB * s.SX) + 1;
    if (!edge) t.tiles = ox_min(ox_min(most, inner), ox_up(s.OW - ox, DW_XB));
    pixels = ox_min(t.tiles * DW_XB, s.OW - ox);
    if (edge) dw_tile<KW, SX, true, PERM, DX>(s, t);
    else dw_tile<KW, SX, false, PERM, DX>(s, t);
    conv_finish(s, t.D, t.ds, Px{(n * s.OH + oy) * s.OW + ox, n, oy, ox}, pixels, t.co, t.cols, epi);
  }
}

// Output rows [y0, y1) of image n by the channels of strips [first, last).
template <int KW, int SX, bool PERM, int DX, class E>
OX void dw_strips(const ConvShape &s, const DwPlan &p, const f32 *x, const f32 *w, i64 n, i64 y0, i64 y1, i64 first,
                  i64 last, void *scratch, const E &epi) {
  f32 *D = (f32 *)scratch;
  vi *lanes = (vi *)(D + DW_XB * 2 * DW_CB);
  for (i64 strip = first; strip < last; strip++) {
    i64 co = strip * p.strip, cols = ox_min(p.strip, s.CO - co);
    if (PERM || KW == 0) dw_lanes(s, co, cols, lanes);
    for (i64 oy = y0; oy < y1; oy++)
      dw_line<KW, SX, PERM, DX>(s, x, DwTile{nullptr, w + co, D, lanes, 0, 0, 0, co, cols, 1, cround(cols, VL)}, n, oy,
                                epi);
  }
}

// Output rows [y0, y1) of image n: see conv_dw_items.
template <int KW, int SX, bool PERM = false, int DX = 1, class E>
static void conv_dw_rows(
    const ConvShape &s, const f32 *x, const f32 *w, i64 n, i64 y0, i64 y1, void *scratch, const E &epi) {
  DwPlan p = dw_plan(s);
  dw_strips<KW, SX, PERM, DX>(s, p, x, w, n, y0, y1, 0, p.strips, scratch, epi);
}

// Work items [first, last) of a depthwise convolution, or (PERM) one of small groups.
// KW, SX and DX are the shape's own; KW = 0 takes any shape, whatever PERM is.
template <int KW, int SX, bool PERM = false, int DX = 1, class E>
static void conv_dw_items(
    const ConvShape &s, const f32 *x, const f32 *w, i64 first, i64 last, void *scratch, const E &epi) {
  DwPlan p = dw_plan(s);
  for (i64 item = first; item < last; item++) {
    i64 strip = item % p.strips, band = item / p.strips % p.bands, n = item / (p.strips * p.bands);
    dw_strips<KW, SX, PERM, DX>(s, p, x, w, n, band * p.band, ox_min(s.OH, (band + 1) * p.band), strip, strip + 1, scratch,
                                epi);
  }
}
