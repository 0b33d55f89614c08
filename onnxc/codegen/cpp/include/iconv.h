// Exact integer convolution over channels-last activations: by implicit matrix product (igemm.h), and depthwise.
//
// Padding has the value `fill`: the zero point of the activations, so that what a zero point adds to a sum is the
// same for each pixel, and codegen's epilogue can take it off.
#pragma once
#include "igemm.h"

namespace iconv {
struct Px { i64 i, n, y, x; };  // an output pixel: its linear index n * OH * OW + y * OW + x, and its coordinates

// All sizes of one convolution. Element (n, c, y, x) of the input lies at n * ins + y * irs + x * ips + c.
struct Shape {
  i64 N, H, W, CI, OH, OW, CO;
  i64 KH, KW, SY, SX, DY, DX, PT, PL;  // kernel, strides, dilations, pads at the top and left
  i64 G;                               // groups
  i64 ins, irs, ips;
};
OX Px pixel(const Shape &s, i64 i) { return {i, i / (s.OH * s.OW), i / s.OW % s.OH, i % s.OW}; }
OX void step(const Shape &s, Px &q) {
  q.i++, q.x++;
  if (q.x == s.OW) q.x = 0, q.y++;
  if (q.y == s.OH) q.y = 0, q.n++;
}

// ---- implicit matrix product ------------------------------------------------------------------------------
// Output pixels as the rows of A: kernel rows one after the other, each KW taps of `len` channels from `first` on.
// Weights: a packed matrix for each group, with columns of output channels.
template <class S> struct Patches {
  Shape s;
  const S *x, *end;
  i64 first, len;
  S fill;

  template <int D> OX_LAMBDA void read(ig_i32 *d, i64 as, i64 m, i64 rows) const {
    typedef typename ig_packed<D>::type T;
    i64 taps = s.KW * len, span = (s.KW - 1) * s.DX + 1;
    bool whole = s.DX == 1 && s.ips == len;  // a kernel row is one run
    Px q = pixel(s, m);
    for (i64 i = 0; i < rows; i++, d += as, step(s, q)) {
      T *o = (T *)d;
      i64 iy = q.y * s.SY - s.PT, ix = q.x * s.SX - s.PL;
      const S *p = x + q.n * s.ins + iy * s.irs + ix * s.ips + first;
      for (i64 ky = 0; ky < s.KH; ky++, iy += s.DY, p += s.DY * s.irs, o += taps) {
        if ((u64)iy >= (u64)s.H) outside<D>(o, taps);
        else if (ix >= 0 && ix + span <= s.W && whole) ig_copy<D, S>(p, taps, o, end);
        else
          for (i64 k = 0; k < s.KW; k++) {
            if ((u64)(ix + k * s.DX) < (u64)s.W) ig_copy<D, S>(p + k * s.DX * s.ips, len, o + k * len, end);
            else outside<D>(o + k * len, len);
          }
      }
      ig_finish_row<D>((T *)d, s.KH * taps);
    }
  }
  // Of a kernel of one tap, whose pixels lie one after the other.
  template <int D> OX_LAMBDA const ig_i32 *in_place(i64 m, i64 rows, i64 &as) const {
    bool one = s.KH * s.KW == 1 && s.SY == 1 && s.SX == 1 && s.PT == 0 && s.PL == 0 && s.OH == s.H && s.OW == s.W;
    bool runs = s.irs == s.W * s.ips && (s.N == 1 || s.ins == s.H * s.irs);
    const S *at = x + m * s.ips + first;
    if (!one || !runs || !ig_is_packed<D>(at, s.ips, len) || at + (rows - 1) * s.ips + len > end) return nullptr;
    as = s.ips / 4;
    return (const ig_i32 *)at;
  }
  template <int D> OX_LAMBDA void outside(typename ig_packed<D>::type *o, i64 n) const {
    for (i64 j = 0; j < n; j++) o[j] = ig_one<D, S>(fill);
  }
};

// Hands rows of a tile to an epilogue of pixels: epi(Px, channel, vi sums, lanes).
template <class E> struct PixelEpilogue {
  Shape s;
  i64 c0;
  E epi;
};
template <class E> static void finish(const void *epi, const i32 *d, i64 m, i64 rows, i64 n, i64 N) {
  const PixelEpilogue<E> e = *(const PixelEpilogue<E> *)epi;
  i64 cols = ox_min(IG_NR, N - n), full = cols / VL * VL;
  Px q = pixel(e.s, m);
  for (i64 r = 0; r < rows; r++, d += IG_NR, step(e.s, q)) {
    for (i64 j = 0; j < full; j += VL) e.epi(q, e.c0 + n + j, ld(d + j), Full{});
    if (full < cols) e.epi(q, e.c0 + n + full, ld(d + full), Part{int(cols - full)});
  }
}

OX i64 depth(const Shape &s) { return s.KH * s.KW * (s.CI / s.G); }  // products of a sum
OX IgGrid grid(const Shape &s, i64 threads) { return ig_grid(s.N * s.OH * s.OW, s.CO / s.G, depth(s), threads); }

// Task t of grid.tasks * G. x ends at `end`; init, slope: null, or numbers for the columns of each group's panels.
template <int D, class S, class E>
static void task(const Shape &s, const IgGrid &g, i64 t, const S *x, S fill, const S *end, const i32 *w,
                 const i32 *init, const i32 *slope, void *scratch, const E &epi) {
  i64 group = t / g.tasks, len = s.CI / s.G, co = s.CO / s.G, K = depth(s), M = s.N * s.OH * s.OW, P = ig_panels(co);
  i64 im = t % g.tasks / g.gp, ip = t % g.gp;
  Patches<S> a = {s, x, end, group * len, len, fill};
  PixelEpilogue<E> e = {s, group * co, epi};
  const i32 *b = w + group * P * IG_NR * ox_up(K, D), *start = init ? init + group * P * IG_NR : nullptr;
  const i32 *rise = slope ? slope + group * P * IG_NR : nullptr;
  IgRun run = {ig_read<D, Patches<S>>, ig_in_place<D, Patches<S>>, finish<E>, &a, &e, b, start, rise, co, K};
  ig_block<D>(run, ox_cut(M, g.gm, im), ox_cut(M, g.gm, im + 1), ox_cut(P, g.gp, ip), ox_cut(P, g.gp, ip + 1), scratch);
}

// ---- depthwise ------------------------------------------------------------------------------------------------
// Lanes are channels. Two input rows (2 q, 2 q + 1) are interleaved to pairs of int16 in a line of scratch, edges
// filled, so that one step adds two taps; each line serves all output rows whose kernel reaches it.
//
// Weights: w[parity of the first input row][pair][kx][CO][2]: a kernel that starts at an odd row meets the pairs
// one row later. KH counts rows with their dilation: codegen puts rows of zeros between, and DY is 1.
static constexpr i64 DW_STRIP = 128;    // channels of a strip at most
static constexpr i64 DW_LINES = 12288;  // elements of all lines, about: they share the L1 cache with weights and sums
static constexpr i64 DW_PIXELS = 64;    // output pixels at a time
static constexpr i64 DW_LONG = 32768;   // elements of the lines of two vectors: longer rows are cut

template <int... I> struct DwSeq {};
OX i64 dw_pairs(const Shape &s) { return s.KH / 2 + 1; }
// Input columns under so many output pixels.
OX i64 dw_width(const Shape &s, i64 pixels) { return (pixels - 1) * s.SX + (s.KW - 1) * s.DX + 1; }
struct DwPlan { i64 strip, strips, band, bands, length, width; };  // length: pixels of a cut of a row
OX DwPlan dw_plan(const Shape &s) {
  DwPlan p;
  p.length = ox_min(s.OW, ox_max(DW_PIXELS, DW_LONG / (2 * VL * dw_pairs(s)) / s.SX));
  p.width = dw_width(s, p.length);
  i64 fit = DW_LINES / ox_max(1, dw_pairs(s) * p.width) / VL * VL;
  p.strips = ox_up(s.CO, ox_max(2 * VL, ox_min(DW_STRIP, fit)));
  p.strip = ox_up(ox_up(s.CO, p.strips), VL) * VL;
  p.strips = ox_up(s.CO, p.strip);
  p.band = ox_max(2, ox_min(16, s.N * s.OH * p.strips / 16));
  p.bands = ox_up(s.OH, p.band);
  return p;
}
static inline i64 dw_count(const Shape &s) {
  if (s.N * s.OH * s.OW * s.CO <= 0) return 0;
  DwPlan p = dw_plan(s);
  return s.N * p.bands * p.strips;
}
static inline i64 dw_scratch(const Shape &s) {
  if (s.N * s.OH * s.OW * s.CO <= 0) return 0;
  DwPlan p = dw_plan(s);
  return ox_up((dw_pairs(s) * p.width + DW_PIXELS) * p.strip * 4, 64) * 64;
}

// Two rows' vectors as pairs.
template <class S, int... I> OX vi dw_interleave(V<S> a, V<S> b, DwSeq<I...>) {
  typedef i16 wide __attribute__((vector_size(VL * 4)));
  return (vi)__builtin_convertvector(__builtin_shufflevector(a, b, (I / 2 + I % 2 * VL)...), wide);
}
template <class S> OX vi dw_pair(V<S> a, V<S> b) { return dw_interleave<S>(a, b, DwSeq<__integer_pack(2 * VL)...>{}); }

// A row of the image, or of fill where there is none: pixels and channels so many elements apart.
template <class S> struct DwRow { const S *p; i64 pixel, channel; };

// One pixel of a line, channels [0, cols) of rows a and b.
template <class S> OX void dw_pixel(const S *a, const S *b, i64 cols, i32 *d) {
  i64 c = 0;
  for (; c + VL <= cols; c += VL) st(d + c, dw_pair<S>(ld(a + c), ld(b + c)));
  if (c < cols) st(d + c, dw_pair<S>(ldn(a + c, int(cols - c)), ldn(b + c, int(cols - c))));
}
// The same where M output channels read each of the input's: c is the first of the output's.
template <class S> static void dw_spread(const DwRow<S> &a, const DwRow<S> &b, i64 x, i64 c, i64 cols, i64 M, i32 *d) {
  const S *u = a.p + x * a.pixel, *v = b.p + x * b.pixel;
  for (i64 i = 0; i < cols; i++) {
    i64 k = (c + i) / M;
    d[i] = (i32)((u16)(i16)u[k * a.channel] | (u32)(u16)(i16)v[k * b.channel] << 16);
  }
}
// Line q of image x: input rows 2 q and 2 q + 1, `wide` columns from ix on, channels [c0, c0 + cols).
template <class S>
static __attribute__((noinline)) void dw_line(
    const Shape &s, const S *x, i64 q, i64 ix, i64 wide, i64 c0, i64 cols, i64 strip, const S *fill, i32 *d) {
  bool same = s.CI == s.CO;
  i64 M = s.CO / s.CI, at = same ? c0 : 0;
  DwRow<S> a = {fill, 0, 0}, b = a;
  if ((u64)(2 * q) < (u64)s.H) a = {x + 2 * q * s.irs + at, s.ips, 1};
  if ((u64)(2 * q + 1) < (u64)s.H) b = {x + (2 * q + 1) * s.irs + at, s.ips, 1};
  for (i64 end = ix + wide; ix < end; ix++, d += strip) {
    if ((u64)ix >= (u64)s.W) dw_pixel(fill, fill, cols, d);
    else if (same) dw_pixel(a.p + ix * a.pixel, b.p + ix * b.pixel, cols, d);
    else dw_spread(a, b, ix, c0, cols, M, d);
  }
}

// Sums of `pixels` outputs of one vector of channels; lines lie `each` elements apart, slot by slot.
template <int PAIRS, int KW>
static __attribute__((noinline)) void dw_sums(
    const Shape &s, const i32 *const *lines, i64 ox, i64 pixels, i64 strip, const i32 *w, i64 wrow, i32 *d) {
  if constexpr (PAIRS > 0) {
    vi k[PAIRS * KW];
    OX_UNROLL for (int i = 0; i < PAIRS * KW; i++) k[i] = ld(w + i * wrow);
    for (i64 j = 0; j < pixels; j++, d += strip) {
      vi acc = {};
      OX_UNROLL for (int p = 0; p < PAIRS; p++)
        OX_UNROLL for (int x = 0; x < KW; x++)
          acc = ig_dot2(acc, ld(lines[p] + ((ox + j) * s.SX + x) * strip), k[p * KW + x]);
      st(d, acc);
    }
  } else {
    i64 pairs = dw_pairs(s);
    for (i64 j = 0; j < pixels; j++, d += strip) {
      vi acc = {};
      for (i64 p = 0; p < pairs; p++)
        for (i64 x = 0; x < s.KW; x++)
          acc = ig_dot2(acc, ld(lines[p] + ((ox + j) * s.SX + x * s.DX) * strip), ld(w + (p * s.KW + x) * wrow));
      st(d, acc);
    }
  }
}

static constexpr i64 DW_PAIRS = 64;  // most pairs of rows of a kernel
// A strip of channels of some output rows [y0, y1), pixels [x0, x0 + length) of each.
template <int PAIRS, int KW, class S, class E>
OX void dw_cut(const Shape &s, const DwPlan &p, const S *x, const S *fill, const i32 *w, i64 n, i64 y0, i64 y1, i64 x0,
               i64 length, i64 c0, i32 *scratch, const E &epi) {
  i64 pairs = dw_pairs(s), each = p.width * p.strip, wrow = ox_up(s.CO, VL) * VL, cols = ox_min(p.strip, s.CO - c0);
  i64 built = -(1ll << 40), wide = dw_width(s, length);  // lines up to `built` are there
  i32 *sums = scratch, *lines = sums + DW_PIXELS * p.strip;
  for (i64 oy = y0; oy < y1; oy++) {
    i64 iy = oy * s.SY - s.PT, odd = iy & 1, q0 = (iy - odd) / 2;
    const i32 *at[DW_PAIRS], *own[DW_PAIRS];
    for (i64 q = q0; q < q0 + pairs; q++) {
      i32 *line = lines + (q % pairs + pairs) % pairs * each;
      if (q > built) dw_line<S>(s, x, q, x0 * s.SX - s.PL, wide, c0, cols, p.strip, fill, line), built = q;
      at[q - q0] = line;
    }
    for (i64 ox = 0; ox < length; ox += DW_PIXELS) {
      i64 pixels = ox_min(DW_PIXELS, length - ox);
      for (i64 c = 0; c < cols; c += VL) {
        for (i64 q = 0; q < pairs; q++) own[q] = at[q] + c;
        dw_sums<PAIRS, KW>(s, own, ox, pixels, p.strip, w + odd * pairs * s.KW * wrow + c0 + c, wrow, sums + c);
      }
      const i32 *d = sums;
      for (i64 j = x0 + ox; j < x0 + ox + pixels; j++, d += p.strip) {
        Px px = {(n * s.OH + oy) * s.OW + j, n, oy, j};
        i64 c = 0;
        for (; c + VL <= cols; c += VL) epi(px, c0 + c, ld(d + c), Full{});
        if (c < cols) epi(px, c0 + c, ld(d + c), Part{int(cols - c)});
      }
    }
  }
}
// Work items [first, last). PAIRS and KW are the shape's own, with DX = 1, or 0 for any shape.
template <int PAIRS, int KW, class S, class E>
static void dw_items(
    const Shape &s, const S *x, S fill, const i32 *w, i64 first, i64 last, void *scratch, const E &call) {
  const E epi = call;
  S outside[DW_STRIP];
  for (i64 i = 0; i < DW_STRIP; i++) outside[i] = fill;
  DwPlan p = dw_plan(s);
  for (i64 item = first; item < last; item++) {
    i64 c0 = item % p.strips * p.strip, band = item / p.strips % p.bands, n = item / (p.strips * p.bands);
    i64 y0 = band * p.band, y1 = ox_min(s.OH, y0 + p.band);
    for (i64 x0 = 0; x0 < s.OW; x0 += p.length)
      dw_cut<PAIRS, KW>(s, p, x + n * s.ins, (const S *)outside, w, n, y0, y1, x0, ox_min(p.length, s.OW - x0), c0,
                        (i32 *)scratch, epi);
  }
}
}  // namespace iconv
