// f32 depthwise convolution over channels-last activations: channels are lanes, a tile slides along a row.
//
// The same kernels serve groups of a few channels, and several outputs for a channel: the lanes are output channels,
// and a loaded vector of input channels is permuted so that each lane sees the input that it needs. What is needed for
// VL outputs must lie within VL inputs.
//
// A tile is DW_XB output pixels by a vector of channels, whose sums stay in registers. A loaded input goes to all sums
// that it belongs to: so the inputs of a tile must be neighbours in steps of the stride. With a dilation they are where
// the outputs are that far apart, too: a row is then as many interleaved rows. Kernels that are higher than wide slide
// down a column, by the same code, with the axes exchanged. Long kernels take a part of the taps at a time, whose
// weights fit the registers.
//
// Weights: w[ky][kx][ci of a group][co]. Sums go by way of scratch to the epilogue. Outside the image nothing is read
// and nothing added: no halo is needed.
//
// Template arguments: K, the taps along the axis of sliding (more than these, taken K or K - 1 at a time, where LONG),
// S, the stride there; PERM as above; TALL slides along y. K = 0 takes any kernel, stride and dilation.
#pragma once
#include "conv.h"

static constexpr int DW_XB = 7;                 // ImageNet's maps are multiples of 7, others lose a few per cent
static constexpr i64 DW_CB = 128;               // channels of a strip at most
static constexpr i64 DW_SUMS = 8 * DW_XB * DW_CB;  // floats of scratch for sums

// Keeps a loaded vector in its register: GCC would load it again for each of its uses, which makes loads,
// not multiplications, the limit.
#if defined(__x86_64__) && (defined(__AVX512F__) || defined(__AVX__) && ONNXC_VL <= 8 || ONNXC_VL <= 4)
#define DW_KEEP(v) asm("" : "+v"(v))
#else
#define DW_KEEP(v)
#endif
#define DW_HIDE(p) asm("" : "+r"(p))  // how a pointer was made

// An axis of a convolution; `step` floats lie between neighbours of its input.
struct DwAxis { i64 size, taps, stride, dilation, pad, step; };
OX DwAxis dw_across(const ConvShape &s) { return {s.W, s.KW, s.SX, s.DX, s.PL, s.ips}; }
OX DwAxis dw_down(const ConvShape &s) { return {s.H, s.KH, s.SY, s.DY, s.PT, s.irs}; }

// a / b, rounded up. Most dilations are 1, and a division takes as long as a row of products.
OX i64 dw_up(i64 a, i64 b) { return b == 1 ? a : ox_up(a, b); }

// The taps of an output that lie inside of the image.
struct DwTaps { i64 first, last; };
OX DwTaps dw_taps(const DwAxis &a, i64 out) {
  i64 in = out * a.stride - a.pad, first = in < 0 ? ox_min(a.taps, dw_up(-in, a.dilation)) : 0;
  return {first, ox_max(first, ox_min(a.taps, dw_up(a.size - in, a.dilation)))};
}

// One or more tiles. x points to the input of a tile's first output under the first tap (maybe outside), for channel 0:
// place `at` of `size` along the axis of sliding, at a distance of `step`; `cross` has the taps of the other axis that
// lie inside, `across` floats apart. Output channels co to co + cols go to D[output][ds].
struct DwTile {
  const f32 *x, *w;
  f32 *D;
  const vi *lanes;
  i64 at, size, step, taps;
  DwTaps cross;
  i64 across, w_tap, w_cross;  // the latter: floats between weights
  i64 outs, ds;                // outputs of a tile that there are
  i64 tiles, x_next, D_next;
  i64 co, cols;
  bool more;  // adds to what is in D
};

// Wide kernels add into two sets of sums where registers allow: one set is a chain of as many steps as there are taps.
template <int K> static constexpr int dw_sets = VL >= 16 && K >= 5 ? 2 : 1;

// Vectors of channels at once: two of narrow kernels where registers allow, for the chains of one are few, and what finds
// the places is shared.
#if defined(__AVX512F__) || defined(__aarch64__)
template <int K> static constexpr int dw_together = K > 0 && K < 5 ? 2 : 1;
#else
template <int K> static constexpr int dw_together = 1;
#endif

// The permutation of a vector's lanes at run time.
OX vf dw_permuted(vf v, vi lanes) { return __builtin_shuffle(v, lanes); }

// Pointers to N places at a distance of `step`, of which each third is in a register: a load adds a multiple of `step` by
// itself. GCC would keep more multiples of it than there are registers.
template <int N> struct DwPlaces {
  const f32 *third[(N + 2) / 3];
  i64 step;
  OX_LAMBDA DwPlaces(const f32 *p, i64 step) : step(step) {
    OX_UNROLL for (int i = 0; i < (N + 2) / 3; i++, p += 3 * step) {
      DW_HIDE(p);
      third[i] = p;
    }
  }
  OX_LAMBDA const f32 *at(int i) const { return third[i / 3] + i % 3 * step; }
};

// Which of N places from `at` on lie in [0, size), a bit each.
template <int N> OX u64 dw_inside(i64 at, i64 size) {
  const i64 first = ox_min(N, ox_max(0, -at)), last = ox_min(N, ox_max(0, size - at));
  return ~0ull << first & ((1ull << last) - 1);
}

// Adds some taps of one input channel of each group to the sums of U vectors of channels.
template <int K, int S, bool EDGE, bool PERM, int U = 1, class L, class X>
OX void dw_row(vf (*acc)[DW_XB], const f32 *p, i64 step, u64 inside, const f32 *w, i64 w_tap, vi lanes, L l, X lx) {
  vf k[U][K];
  OX_UNROLL for (int i = 0; i < U * K; i++) k[i / K][i % K] = ldl(w + i % K * w_tap + i / K * VL, l);
  const DwPlaces<(DW_XB - 1) * S + K> x(p, step);
  if constexpr (EDGE) DW_HIDE(inside);  // or its bits would be kept apart
  OX_UNROLL for (int j = 0; j < (DW_XB - 1) * S + K; j++) {
    if (EDGE && !(inside >> j & 1)) continue;
    OX_UNROLL for (int u = 0; u < U; u++) {
      vf v = ldl(x.at(j) + u * VL, lx);
      if constexpr (PERM) v = dw_permuted(v, lanes);
      DW_KEEP(v);
      OX_UNROLL for (int i = 0; i < K; i++)
        if (int to = j - i; to >= 0 && to % S == 0 && to / S < DW_XB)
          acc[u * dw_sets<K> + i % dw_sets<K>][to / S] += v * k[u][i];
    }
  }
}

// Adds K taps, of which all may lie inside though others of the tile do not.
template <int K, int S, bool EDGE, bool PERM, class L, class X>
OX void dw_part(vf (*acc)[DW_XB], const f32 *p, i64 step, i64 at, i64 size, const f32 *w, i64 w_tap, vi lanes, L l, X lx) {
  constexpr int reach = (DW_XB - 1) * S + K;
  if (!EDGE || (at >= 0 && at + reach <= size)) dw_row<K, S, false, PERM>(acc, p, step, 0, w, w_tap, lanes, l, lx);
  else if (at < size && at + reach > 0)
    dw_row<K, S, true, PERM>(acc, p, step, dw_inside<reach>(at, size), w, w_tap, lanes, l, lx);
}

// The first input channel that output channel c needs.
OX i64 dw_channel(const ConvShape &s, i64 c) { return c / (s.CO / s.G) * (s.CI / s.G); }

template <bool EDGE> OX void dw_store(const DwTile &t, const vf *sums, f32 *D) {
  if (!t.more && (!EDGE || t.outs == DW_XB)) {
    OX_UNROLL for (int i = 0; i < DW_XB; i++) st(D + i * t.ds, sums[i]);
    return;
  }
  OX_UNROLL for (int i = 0; i < DW_XB; i++)
    if (i < t.outs) st(D + i * t.ds, t.more ? ld(D + i * t.ds) + sums[i] : sums[i]);
}

// The sums of a tile for U vectors of channels, from t.co + c on; x is the input's first of these.
template <int K, int S, bool EDGE, bool PERM, bool LONG, int U, class L, class X>
OX void dw_vector(const ConvShape &s, const DwTile &t, const f32 *x, f32 *D, i64 c, L l, X lx) {
  constexpr int sets = dw_sets<K>;
  vf acc[U * sets][DW_XB];
  OX_UNROLL for (int i = 0; i < U * sets * DW_XB; i++) acc[i / DW_XB][i % DW_XB] = vf{};
  const i64 group = PERM ? s.CI / s.G : 1, step = t.step, size = t.size, w_tap = t.w_tap;
  const u64 inside = EDGE && !LONG ? dw_inside<(DW_XB - 1) * S + K>(t.at, size) : 0;
  for (i64 k = t.cross.first; k < t.cross.last; k++)
    for (i64 q = 0; q < group; q++) {
      const f32 *p = x + k * t.across, *w = t.w + k * t.w_cross + q * s.CO + c;
      const vi lanes = PERM ? t.lanes[c / VL * group + q] : vi{};
      if constexpr (LONG) {
        const i64 parts = ox_up(t.taps, K), wide = t.taps - parts * (K - 1);
        i64 at = t.at;
        for (i64 n = 0; n < wide; n++, p += K * step, w += K * w_tap, at += K)
          dw_part<K, S, EDGE, PERM>(acc, p, step, at, size, w, w_tap, lanes, l, lx);
        for (i64 n = wide; n < parts; n++, p += (K - 1) * step, w += (K - 1) * w_tap, at += K - 1)
          dw_part<K - 1, S, EDGE, PERM>(acc, p, step, at, size, w, w_tap, lanes, l, lx);
      } else {
        dw_row<K, S, EDGE, PERM, U>(acc, p, step, inside, w, w_tap, lanes, l, lx);
      }
    }
  OX_UNROLL for (int u = 0; u < U; u++) {
    if constexpr (sets == 2) OX_UNROLL for (int i = 0; i < DW_XB; i++) acc[2 * u][i] += acc[2 * u + 1][i];
    dw_store<EDGE>(t, acc[u * sets], D + c + u * VL);
  }
}

// The same for any stride and dilation: along the row there is a place for each column.
template <bool EDGE, bool PERM, class L, class X>
OX void dw_vector_any(const ConvShape &s, const DwTile &t, const f32 *x, f32 *D, i64 c, L l, X lx) {
  vf acc[DW_XB];
  OX_UNROLL for (int i = 0; i < DW_XB; i++) acc[i] = vf{};
  const i64 group = PERM ? s.CI / s.G : 1;
  for (i64 k = t.cross.first; k < t.cross.last; k++)
    for (i64 kx = 0; kx < t.taps; kx++)
      for (i64 q = 0; q < group; q++) {
        const vf w = ldl(t.w + k * t.w_cross + kx * t.w_tap + q * s.CO + c, l);
        const vi lanes = PERM ? t.lanes[c / VL * group + q] : vi{};
        const f32 *p = x + k * t.across + kx * s.DX * t.step;
        const i64 at = t.at + kx * s.DX;
        OX_UNROLL for (int i = 0; i < DW_XB; i++) {
          if (EDGE && (u64)(at + i * s.SX) >= (u64)t.size) continue;
          vf v = ldl(p + i * s.SX * t.step, lx);
          if constexpr (PERM) v = dw_permuted(v, lanes);
          acc[i] += v * w;
        }
      }
  dw_store<EDGE>(t, acc, D + c);
}

template <int K, int S, bool EDGE, bool PERM, bool LONG, int U = 1, class L, class X>
OX void dw_sums(const ConvShape &s, const DwTile &t, const f32 *x, f32 *D, i64 c, L l, X lx) {
  if constexpr (K == 0) dw_vector_any<EDGE, PERM>(s, t, x, D, c, l, lx);
  else dw_vector<K, S, EDGE, PERM, LONG, U>(s, t, x, D, c, l, lx);
}

// The sums of some tiles. Never inlined: one copy serves every depthwise convolution of that kind.
template <int K, int S, bool EDGE, bool PERM, bool LONG>
__attribute__((noclone)) OX_APART void dw_tile(const ConvShape &s, const DwTile &call) {
  const DwTile t = call;  // which no store can alias
  const f32 *x = t.x;
  f32 *D = t.D;
  for (i64 n = 0; n < t.tiles; n++, x += t.x_next, D += t.D_next)
    if constexpr (PERM) {
      for (i64 c = 0; c < t.cols; c += VL) {
        i64 ci = dw_channel(s, t.co + c);
        int lanes = (int)ox_min(VL, t.cols - c), inputs = (int)ox_min(VL, s.CI - ci);
        if (lanes == VL && inputs == VL) dw_sums<K, S, EDGE, PERM, LONG>(s, t, x + ci, D, c, Full{}, Full{});
        else dw_sums<K, S, EDGE, PERM, LONG>(s, t, x + ci, D, c, Part{lanes}, Part{inputs});
      }
    } else {
      constexpr int U = LONG ? 1 : dw_together<K>;
      i64 c = 0;
      for (; c + U * VL <= t.cols; c += U * VL)
        dw_sums<K, S, EDGE, PERM, LONG, U>(s, t, x + t.co + c, D, c, Full{}, Full{});
      if (U > 1 && c + VL <= t.cols) dw_sums<K, S, EDGE, PERM, LONG>(s, t, x + t.co + c, D, c, Full{}, Full{}), c += VL;
      const Part rest{int(t.cols - c)};
      if (rest.n) dw_sums<K, S, EDGE, PERM, LONG>(s, t, x + t.co + c, D, c, rest, rest);
    }
}

#ifdef ONNXC_APART
#define DW_APART(k, s) \
  ONNXC_APART void dw_tile<k, s, true, false, false>(const ConvShape &, const DwTile &); \
  ONNXC_APART void dw_tile<k, s, false, false, false>(const ConvShape &, const DwTile &);
DW_APART(3, 1) DW_APART(3, 2) DW_APART(5, 1) DW_APART(5, 2) DW_APART(7, 1)
#undef DW_APART
#endif

// The permutations for the outputs of a strip: lanes[vector][ci of a group].
static void dw_lanes(const ConvShape &s, i64 co, i64 cols, vi *lanes) {
  i64 group = s.CI / s.G;
  for (i64 c = co; c < co + cols; c += VL)
    for (i64 q = 0; q < group; q++, lanes++)
      for (i64 i = 0; i < VL; i++) (*lanes)[i] = i32(dw_channel(s, ox_min(c + i, s.CO - 1)) - dw_channel(s, c) + q);
}

// An item is a strip of channels in a band of output rows. The input rows under a kernel by a strip's channels
// fit the L1 cache, so that each row comes from beyond it once and not KH times. Tiles that slide down a column read an
// input once for DW_XB rows: they want bands of these.
struct DwPlan { i64 strip, strips, band, bands; };
OX DwPlan dw_plan(const ConvShape &s) {
  DwPlan p;
  const bool tall = s.KH > s.KW;
  i64 fit = (VL >= 16 ? 32768 : 24576) / ox_max(1, 4 * s.KH * ox_min(s.W, s.OW * s.SX + s.KW)), together = DW_XB;
  p.strips = 1;
  if (tall) {
    together = DW_XB * ox_min(s.DY, ox_up(s.OH, DW_XB)), fit = DW_CB / s.DY;
    p.strips = ox_min(ox_up(s.CO, 2 * VL), CONV_ITEMS / ox_max(1, s.N * ox_up(s.OH, together)));
  }
  p.strips = ox_max(p.strips, ox_up(s.CO, ox_min(DW_CB, ox_max(2 * VL, fit / VL * VL))));
  p.strip = cround(ox_up(s.CO, p.strips), VL);
  p.strips = ox_up(s.CO, p.strip);
  p.band = ox_max(1, ox_min(tall ? together : 8, s.N * s.OH * p.strips / CONV_ITEMS));
  p.bands = ox_up(s.OH, p.band);
  return p;
}
static i64 conv_dw_count(const ConvShape &s) {
  DwPlan p = dw_plan(s);
  return s.N * p.bands * p.strips;
}

static i64 conv_dw_scratch(const ConvShape &s) { return 4 * (DW_SUMS + DW_CB * (s.CI / s.G)); }
OX vi *dw_room_of_lanes(void *scratch) { return (vi *)((f32 *)scratch + DW_SUMS); }

// A rectangle of output pixels: rows [y, y + rows) by columns [x, x + pixels).
struct DwBlock { i64 y, rows, x, pixels; };

// Tiles that slide along a row or, where TALL, down a column: outputs `first`, `first` + dilation, ... of these, `outs`
// in all, from `origin` on, in the interval [o0, o1) of the other axis.
template <int K, int S, bool PERM, bool LONG, bool TALL>
OX void dw_slide(const ConvShape &s, DwTile &t, f32 *D, const f32 *image, const DwAxis &along, const DwAxis &cross, i64 origin,
                 i64 outs, i64 o0, i64 o1, i64 D_cross) {
  const i64 stride = K == 0 ? s.SX : S, apart = K == 0 ? 1 : along.dilation;  // in and between places
  const i64 reach = (DW_XB - 1) * stride + (K == 0 ? (s.KW - 1) * s.DX : t.taps - 1) + 1;
  const i64 in = origin * along.stride - along.pad, floor = apart == 1 ? in : in / apart - (in % apart < 0);
  t.size = dw_up(along.size - (in - floor * apart), apart), t.step = along.step * apart;
  for (i64 i = 0, done; i < outs; i += done) {
    const i64 at = floor + i * stride;
    const bool edge = outs - i < DW_XB || at < 0 || at + reach > t.size;
    t.at = at, t.outs = ox_min(DW_XB, outs - i), done = t.outs;
    for (i64 o = o0; o < o1; o += TALL ? t.tiles : 1) {
      const i64 from = o * cross.stride - cross.pad;
      t.cross = dw_taps(cross, o), t.tiles = 1;
      t.x = image + (in + i * stride * apart) * along.step + from * cross.step;
      t.D = D + i * t.ds + (o - o0) * D_cross;
      if constexpr (TALL) {
        i64 end = (cross.taps - 1) * cross.dilation + 1;
        if (from >= 0 && from + end <= cross.size)
          t.tiles = ox_min(o1 - o, (cross.size - end - from) / cross.stride + 1);
        t.x_next = cross.stride * cross.step, t.D_next = D_cross;
      } else if (!edge) {
        t.tiles = ox_min((outs - i) / DW_XB, (t.size - reach - at) / (DW_XB * stride) + 1);
        t.x_next = DW_XB * stride * t.step, t.D_next = DW_XB * t.ds, done = t.tiles * DW_XB;
      }
      if (edge) dw_tile<K, S, true, PERM, LONG>(s, t);
      else dw_tile<K, S, false, PERM, LONG>(s, t);
    }
  }
}

// The sums of a block go to D[pixel][ds]. `image` is the plane; t has what is left: w, lanes, co, cols, more.
template <int K, int S, bool PERM, bool LONG, bool TALL>
OX void dw_block(const ConvShape &s, DwTile &t, const f32 *image, f32 *D, const DwBlock &b) {
  const DwAxis across = dw_across(s), down = dw_down(s);
  const i64 ds = cround(t.cols, VL), w_x = s.CI / s.G * s.CO, w_y = s.KW * w_x;
  if constexpr (TALL) {
    t.taps = s.KH, t.across = s.DX * s.ips, t.w_tap = w_y, t.w_cross = w_x;
    for (i64 p = 0; p < ox_min(b.rows, s.DY); p++) {
      t.ds = s.DY * b.pixels * ds;
      dw_slide<K, S, PERM, LONG, true>(s, t, D + p * b.pixels * ds, image, down, across, b.y + p, dw_up(b.rows - p, s.DY),
                                       b.x, b.x + b.pixels, ds);
    }
  } else {
    const i64 phases = K == 0 ? 1 : s.DX;
    t.taps = s.KW, t.across = s.DY * s.irs, t.w_tap = w_x, t.w_cross = w_y;
    for (i64 y = 0; y < b.rows; y++)
      for (i64 p = 0; p < ox_min(b.pixels, phases); p++) {
        t.ds = phases * ds;
        dw_slide<K, S, PERM, LONG, false>(s, t, D + (y * b.pixels + p) * ds, image, across, down, b.x + p,
                                          dw_up(b.pixels - p, phases), b.y + y, b.y + y + 1, 0);
      }
  }
}

// The rectangle that begins at (y, x): of as many pixels as the sums of a strip have room for. Those of an epilogue of
// channels are read from the L1 cache again; one whose lanes are pixels takes rows together.
template <bool TALL, bool ACROSS> OX DwBlock dw_next(const ConvShape &s, i64 cols, i64 y, i64 y1, i64 x) {
  const i64 ds = cround(cols, VL), unit = TALL ? DW_XB * s.DY : DW_XB * s.DX;
  if (!TALL && !ACROSS && 4 * (s.OW - x) * ds <= DW_SUMS) return {y, 1, x, s.OW - x};
  const i64 room = DW_SUMS / ds;
  DwBlock b = {y, ox_min(y1 - y, TALL ? ox_min(room, unit) : 1), x, s.OW - x};
  i64 most = TALL || ACROSS || s.DX > 1 ? room / b.rows : room / 4;
  if (b.pixels > most) b.pixels = TALL || unit > most ? most : most / unit * unit;
  else if (!TALL && ACROSS && x == 0) b.rows = ox_max(1, ox_min(y1 - y, room / ox_max(1, s.OW)));
  return b;
}

// Output rows [y0, y1) of q's plane by the channels of a strip; sums(D, block) computes a block's.
template <bool TALL, class S, class P, class F, class E>
OX void dw_rows(const S &s, i64 cols, i64 co, P q, i64 y0, i64 y1, f32 *D, const F &sums, const E &epi) {
  const i64 ds = cround(cols, VL), plane = q.i;
  for (i64 y = y0, rows; y < y1; y += rows) {
    rows = y1 - y;
    for (i64 x = 0; x < s.OW;) {
      const DwBlock b = dw_next<TALL, conv_is_across<E>>(s, cols, y, y + rows, x);
      rows = b.rows;
      sums(D, b);
      bool whole = b.pixels == s.OW;  // rows that lie side by side
      for (i64 r = 0; r < (whole ? 1 : rows); r++) {
        q.y = y + r, q.x = x, q.i = plane + q.y * s.OW + x;
        conv_finish(s, D + r * b.pixels * ds, ds, q, b.pixels * (whole ? rows : 1), co, cols, epi);
      }
      x += b.pixels;
    }
  }
}

// Output rows [y0, y1) of image n by the channels of strips [first, last).
template <int K, int S, bool PERM, bool LONG, bool TALL, class E>
OX void dw_strips(const ConvShape &s, const DwPlan &p, const f32 *x, const f32 *w, i64 n, i64 y0, i64 y1, i64 first,
                  i64 last, void *scratch, const E &epi) {
  vi *const lanes = dw_room_of_lanes(scratch);
  for (i64 strip = first; strip < last; strip++) {
    const i64 co = strip * p.strip, cols = ox_min(p.strip, s.CO - co);
    if (PERM) dw_lanes(s, co, cols, lanes);
    DwTile t = {};
    t.w = w + co, t.lanes = lanes, t.co = co, t.cols = cols;
    const auto sums = [&](f32 *D, const DwBlock &b) OX_LAMBDA {
      dw_block<K, S, PERM, LONG, TALL>(s, t, x + n * s.ins, D, b);
    };
    dw_rows<TALL>(s, cols, co, Px{n * s.OH * s.OW, n, 0, 0}, y0, y1, (f32 *)scratch, sums, epi);
  }
}

// Output rows [y0, y1) of image n: see conv_dw_items.
template <int K, int S, bool PERM = false, bool LONG = false, bool TALL = false, class E>
static void conv_dw_rows(
    const ConvShape &s, const f32 *x, const f32 *w, i64 n, i64 y0, i64 y1, void *scratch, const E &epi) {
  DwPlan p = dw_plan(s);
  dw_strips<K, S, PERM, LONG, TALL>(s, p, x, w, n, y0, y1, 0, p.strips, scratch, epi);
}

// Work items [first, last) of a depthwise convolution, or (PERM) one of small groups.
template <int K, int S, bool PERM = false, bool LONG = false, bool TALL = false, class E>
static void conv_dw_items(
    const ConvShape &s, const f32 *x, const f32 *w, i64 first, i64 last, void *scratch, const E &epi) {
  DwPlan p = dw_plan(s);
  for (i64 item = first; item < last; item++) {
    i64 strip = item % p.strips, band = item / p.strips % p.bands, n = item / (p.strips * p.bands);
    dw_strips<K, S, PERM, LONG, TALL>(s, p, x, w, n, band * p.band, ox_min(s.OH, (band + 1) * p.band), strip, strip + 1,
                                      scratch, epi);
  }
}
