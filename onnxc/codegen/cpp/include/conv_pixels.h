// f32 convolution whose lanes are pixels of an output row: for groups of few output channels, which would leave most
// lanes empty, and for depthwise convolutions of planar images, which are read and written as they lie.
//
// The input rows under a band of output rows are copied first, each channel to a plane of its own, with zeros around the
// image; columns are sorted by their remainder modulo the stride, so that the pixels of a vector are neighbours under
// every tap: x * SX + kx * DX lies at x + kx * DX / SX of phase kx * DX % SX.
//
// A tile is R output rows by X vectors of pixels by O output channels, whose sums stay in registers. Of one output
// channel, a loaded vector goes to all rows that it belongs to.
//
// Weights: w[group][part of O channels][kz][ci of a group][kx][ky][O].
//
// Template arguments: O; K and S, the taps of a column (more than these, taken K or K - 1 at a time, where LONG) and the
// stride along it, K = 0 for any of both; WAY, how a tile lies.
#pragma once
#include "conv_dw.h"

enum PxWay { PX_WIDE, PX_TALL, PX_LINE };  // two vectors of some rows, one vector of many rows, one row
// Vectors of sums of an output channel: with 32 registers, and with 16.
#if defined(__AVX512F__) || defined(__aarch64__)
template <int O> static constexpr int px_sums = O < 4 ? 8 : 6;
#else
template <int O> static constexpr int px_sums = 10 - 2 * O;
#endif
template <int O, PxWay WAY> static constexpr int px_rows = WAY == PX_LINE ? 1 : WAY == PX_TALL ? px_sums<O> : px_sums<O> / 2;
template <int O, PxWay WAY> static constexpr int px_vectors = px_sums<O> / px_rows<O, WAY>;

static constexpr i64 PX_PLANES = 8192;   // floats of copied planes that stay in the L1 cache
static constexpr i64 PX_TURNED = 49152;  // of planes copied from channels-last, as many at a time as there are lanes
static constexpr i64 PX_FLUSH = 160;     // terms of a sum in registers, as in conv_runs

struct PxPlan {
  i64 cig, cog, parts;            // channels of a group; parts of O output channels
  bool turns;                     // planes are copied from channels-last
  i64 width, row, plane;          // floats: a copied row of a phase, of all phases, of a plane
  i64 chunk;                      // planes that are copied at a time
  i64 band, bands;                // output rows of an item
  i64 sums;                       // floats: a row of sums
};

template <int O, PxWay WAY, class S> static PxPlan px_plan(const S &s) {
  constexpr i64 R = px_rows<O, WAY>;
  PxPlan p = {};
  p.cig = s.CI / s.G, p.cog = s.CO / s.G, p.parts = ox_up(p.cog, O);
  p.turns = s.ics == 1 && s.ips != 1 && p.cig > 1;
  p.sums = cround(s.OW, px_vectors<O, WAY> * VL);
  p.width = cround(ox_max(1, p.sums + (s.KW - 1) * s.DX / s.SX), VL);  // 1: there may be no pixels
  if (p.width * s.SX % 512 == 0) p.width += VL;  // rows that would share the places of a cache
  p.row = p.width * s.SX;
  const i64 planes = s.KD * p.cig, unit = p.turns ? ox_min(VL, planes) : 1, room = p.turns ? PX_TURNED : PX_PLANES;
  const i64 under = (s.KH - 1) * s.DY + 1, fit = (room / (p.row * unit) - under) / s.SY + 1;
  const i64 others = s.N * s.OD * s.G, few = ox_max(1, s.OH * others / CONV_ITEMS);
  p.band = cround(ox_max(1, ox_min(ox_min(s.OH, few), ox_max(fit, ox_min(4 * R, under)))), R);
  p.bands = s.OW > 0 ? ox_up(s.OH, p.band) : 0;
  p.plane = ((p.band - 1) * s.SY + under) * p.row;
  p.chunk = ox_min(planes, ox_max(unit, room / p.plane / unit * unit));
  return p;
}

template <int O, PxWay WAY, class S> static i64 conv_px_count(const S &s) {
  return s.N * s.OD * s.G * px_plan<O, WAY>(s).bands;
}
// The sums, VL * VL elements on their way from channels-last, the planes, and where the taps of a row begin.
template <int O, PxWay WAY, class S> static i64 conv_px_scratch(const S &s) {
  PxPlan p = px_plan<O, WAY>(s);
  return 4 * (p.parts * O * p.band * p.sums + VL * VL + p.chunk * p.plane) + 8 * s.KW;
}

// A tile, or some taps of it. x points to the first row under it; `offsets` of the taps of a row from there.
struct PxTile {
  const f32 *x, *w;
  const i64 *offsets;
  i64 row, down, next;  // floats between copied rows, between the taps of a column, from an output row to the next
  i64 planes, plane, across, taps;
  i64 w_across, w_plane;
  f32 *D;
  i64 d_row, d_out;
  bool more;  // adds to what is in D
};

template <int O, int K, int S, int R, int X>
__attribute__((noinline, noclone)) static void px_tile(const PxTile &t) {
  vf acc[O][R][X];
  OX_UNROLL for (int o = 0; o < O; o++)
    OX_UNROLL for (int r = 0; r < R; r++)
      OX_UNROLL for (int j = 0; j < X; j++) acc[o][r][j] = vf{};
  const f32 *x = t.x, *w = t.w;
  const i64 row = t.row, next = t.next;
  for (i64 p = 0; p < t.planes; p++, x += t.plane, w += t.w_plane)
    for (i64 kx = 0; kx < t.across; kx++) {
      const f32 *a = x + t.offsets[kx], *k = w + kx * t.w_across;
      if constexpr (K > 0) {
        static_assert(O == 1);
        vf b[K];
        OX_UNROLL for (int i = 0; i < K; i++) b[i] = bc(k[i]);
        OX_UNROLL for (int i = 0; i < (R - 1) * S + K; i++)
          OX_UNROLL for (int j = 0; j < X; j++) {
            vf v = ld(a + i * row + j * VL);
            DW_KEEP(v);
            OX_UNROLL for (int r = 0; r < R; r++)
              if (int ky = i - r * S; ky >= 0 && ky < K) acc[0][r][j] += v * b[ky];
          }
      } else {
        for (i64 ky = 0; ky < t.taps; ky++, a += t.down, k += O) {
          vf b[O];
          OX_UNROLL for (int o = 0; o < O; o++) b[o] = bc(k[o]);
          OX_UNROLL for (int r = 0; r < R; r++)
            OX_UNROLL for (int j = 0; j < X; j++) {
              vf v = ld(a + r * next + j * VL);
              if constexpr (O > 1) DW_KEEP(v);
              OX_UNROLL for (int o = 0; o < O; o++) acc[o][r][j] += v * b[o];
            }
        }
      }
    }
  f32 *const D = t.D;
  const i64 d_row = t.d_row, d_out = t.d_out;
  if (t.more)
    OX_UNROLL for (int o = 0; o < O; o++)
      OX_UNROLL for (int r = 0; r < R; r++)
        OX_UNROLL for (int j = 0; j < X; j++) acc[o][r][j] += ld(D + o * d_out + r * d_row + j * VL);
  OX_UNROLL for (int o = 0; o < O; o++)
    OX_UNROLL for (int r = 0; r < R; r++)
      OX_UNROLL for (int j = 0; j < X; j++) st(D + o * d_out + r * d_row + j * VL, acc[o][r][j]);
}

OX void px_zero(f32 *d, i64 n) {
  i64 i = 0;
  for (; i + VL <= n; i += VL) st(d + i, vf{});
  if (i < n) stn(d + i, vf{}, int(n - i));
}

// The columns [first, last) of a phase that lie inside of the image.
struct PxInside { i64 first, last; };
template <class S> OX PxInside px_inside(const S &s, const PxPlan &p, i64 phase) {
  i64 first = ox_min(p.width, ox_max(0, ox_up(s.PL - phase, s.SX)));
  return {first, ox_max(first, ox_min(p.width, ox_up(s.W + s.PL - phase, s.SX)))};
}

// One row of one channel: x points to column 0.
template <class S> OX void px_copy_row(const S &s, const PxPlan &p, const f32 *x, f32 *d) {
  for (i64 phase = 0; phase < s.SX; phase++, d += p.width) {
    const PxInside in = px_inside(s, p, phase);
    const f32 *from = x + (phase - s.PL) * s.ips;  // of column 0, which may lie outside
    px_zero(d, in.first), px_zero(d + in.last, p.width - in.last);
    i64 j = in.first;
    const i64 step = s.SX * s.ips;
    if (step == 1) {
      for (; j + VL <= in.last; j += VL) st(d + j, ld(from + j));
      if (j < in.last) stn(d + j, ldn(from + j, int(in.last - j)), int(in.last - j));
    } else if (step == 2) {
      for (; j + VL <= in.last; j += VL) st(d + j, lds(from + 2 * j, 2, Full{}));
      for (; j < in.last; j++) d[j] = from[2 * j];
    } else {
      for (; j < in.last; j++) d[j] = from[j * step];
    }
  }
}

// One row of up to VL channels that are neighbours, turned: the planes lie p.plane apart.
template <class S> static void px_turn_row(const S &s, const PxPlan &p, const f32 *x, i64 channels, f32 *turned, f32 *d) {
  for (i64 phase = 0; phase < s.SX; phase++, d += p.width) {
    const PxInside in = px_inside(s, p, phase);
    for (i64 c = 0; c < channels; c++)
      px_zero(d + c * p.plane, in.first), px_zero(d + c * p.plane + in.last, p.width - in.last);
    for (i64 j = in.first; j < in.last; j += VL) {
      const int n = (int)ox_min(VL, in.last - j);
      tile_load(turned, x + (j * s.SX + phase - s.PL) * s.ips, s.SX * s.ips, n, (int)channels);
      for (i64 c = 0; c < channels; c++) {
        if (n == VL) st(d + c * p.plane + j, ld(turned + c * VL));
        else stn(d + c * p.plane + j, ld(turned + c * VL), n);
      }
    }
  }
}

// Copies planes [p0, p1) of a group, of those that (kz, ci) number: `rows` rows from y0 on. x points to kz = 0, ci = 0.
template <class S>
static void px_copy(const S &s, const PxPlan &p, const f32 *x, i64 p0, i64 p1, i64 y0, i64 rows, f32 *turned, f32 *d) {
  for (i64 n = p0, some; n < p1; n += some, d += some * p.plane) {
    const i64 ci = n % p.cig;
    some = p.turns ? ox_min(ox_min(VL, p1 - n), p.cig - ci) : 1;
    const f32 *plane = x + n / p.cig * s.DZ * s.ids + ci * s.ics;
    for (i64 r = 0; r < rows; r++) {
      const f32 *row = plane + (y0 + r) * s.irs;
      if ((u64)(y0 + r) >= (u64)s.H)
        for (i64 c = 0; c < some; c++) px_zero(d + c * p.plane + r * p.row, p.row);
      else if (p.turns) px_turn_row(s, p, row, some, turned, d + r * p.row);
      else px_copy_row(s, p, row, d + r * p.row);
    }
  }
}

// The sums of some taps of a column, from `first` on, for all tiles of a band.
template <int O, int K, int S, PxWay WAY>
OX void px_tiles(const PxPlan &p, PxTile t, i64 first, i64 rows, f32 *D) {
  constexpr int R = px_rows<O, WAY>, X = px_vectors<O, WAY>;
  const f32 *x = t.x + first * t.down;
  t.w += first * O;
  for (i64 y = 0; y < rows; y += R)
    for (i64 j = 0; j < p.sums; j += X * VL) {
      t.x = x + y * t.next + j, t.D = D + y * t.d_row + j;
      px_tile<O, K, S, R, X>(t);
    }
}

// Adds planes [p0, p1), which have been copied to x, to the sums of `rows` rows.
template <int O, int K, int S, bool LONG, PxWay WAY, class Z>
static void px_planes(const Z &s, const PxPlan &p, PxTile t, i64 p0, i64 p1, i64 rows, const f32 *w, const f32 *x, f32 *D,
                      bool more) {
  const i64 at_once = ox_max(1, PX_FLUSH / (s.KH * s.KW));
  for (i64 part = 0; part < p.parts; part++, D += O * t.d_out, w += s.KD * p.cig * t.w_plane)
    for (i64 n = p0; n < p1; n += at_once) {
      t.planes = ox_min(at_once, p1 - n), t.more = more || n > p0;
      t.x = x + (n - p0) * p.plane, t.w = w + n * t.w_plane;
      if constexpr (!LONG) {
        px_tiles<O, K, S, WAY>(p, t, 0, rows, D);
      } else {
        const i64 count = ox_up(s.KH, K), wide = s.KH - count * (K - 1);
        for (i64 i = 0; i < wide; i++, t.more = true) px_tiles<O, K, S, WAY>(p, t, i * K, rows, D);
        for (i64 i = 0; i < count - wide; i++, t.more = true)
          px_tiles<O, K - 1, S, WAY>(p, t, wide * K + i * (K - 1), rows, D);
      }
    }
}

// Hands the sums of `rows` rows from q on, of channels from c on, to an epilogue whose lanes are pixels: conv_across.h.
template <class Z, class P, class F>
OX void px_finish(const Z &s, const PxPlan &p, const f32 *D, const PxTile &t, P q, i64 rows, i64 c, f32 *,
                  const ConvAcross<F> &call) {
  const F epi = call.f;
  for (i64 o = 0; o < p.cog; o++)
    for (i64 r = 0; r < rows; r++) {
      const f32 *d = D + o * t.d_out + r * t.d_row;
      auto at = q;
      at.y += r, at.i += r * s.OW;
      i64 j = 0;
      for (; j + VL <= s.OW; j += VL, at.i += VL, at.x += VL) epi(at, c + o, ld(d + j), Full{});
      if (j < s.OW) epi(at, c + o, ld(d + j), Part{int(s.OW - j)});
    }
}
// The same, turned, to one whose lanes are channels.
template <class Z, class P, class E>
OX void px_finish(const Z &s, const PxPlan &p, const f32 *D, const PxTile &t, P q, i64 rows, i64 c, f32 *turned, const E &call) {
  const E epi = call;
  for (i64 r = 0; r < rows; r++, q.y++, D += t.d_row) {
    auto at = q;
    for (i64 j = 0; j < s.OW; j += VL)
      for (i64 o = 0, n = ox_min(VL, s.OW - j), some; o < p.cog; o += VL) {
        some = ox_min(VL, p.cog - o);
        tile_load(turned, D + o * t.d_out + j, t.d_out, (int)some, VL);
        at.x = j, at.i = q.i + r * s.OW + j;
        for (i64 k = 0; k < n; k++, at.x++, at.i++) {
          if (some == VL) epi(at, c + o, ld(turned + k * VL), Full{});
          else epi(at, c + o, ld(turned + k * VL), Part{int(some)});
        }
      }
  }
}

// Work items [first, last): an item is a band of rows of a group in an image, or in an output plane of a volume.
template <int O, int K, int S, bool LONG, PxWay WAY, class Z, class E>
static void conv_px_items(const Z &s, const f32 *x, const f32 *w, i64 first, i64 last, void *scratch, const E &call) {
  const PxPlan p = px_plan<O, WAY>(s);
  f32 *const D = (f32 *)scratch, *const turned = D + p.parts * O * p.band * p.sums, *const copied = turned + VL * VL;
  i64 *const offsets = (i64 *)(copied + p.chunk * p.plane);
  for (i64 kx = 0; kx < s.KW; kx++) offsets[kx] = kx * s.DX % s.SX * p.width + kx * s.DX / s.SX;
  PxTile t = {};
  t.offsets = offsets, t.row = p.row, t.down = s.DY * p.row, t.next = s.SY * p.row, t.plane = p.plane;
  t.across = s.KW, t.taps = s.KH, t.w_across = s.KH * O, t.w_plane = s.KW * s.KH * O;
  t.d_row = p.sums, t.d_out = p.band * p.sums;
  const i64 group = p.parts * s.KD * p.cig * t.w_plane;
  for (i64 item = first; item < last; item++) {
    const i64 y0 = item % p.bands * p.band, rows = ox_min(p.band, s.OH - y0), g = item / p.bands % s.G;
    const i64 image = item / (p.bands * s.G), n = image / s.OD, z = image % s.OD;
    const ConvPlanes planes = conv_planes(s, z);
    const f32 *base = x + n * s.ins + (z * s.SZ - s.PF) * s.ids + g * p.cig * s.ics;
    if (planes.first == planes.last || !p.cig) px_zero(D, p.parts * O * t.d_out);
    for (i64 p0 = planes.first * p.cig, end = planes.last * p.cig, p1; p0 < end; p0 = p1) {
      p1 = ox_min(end, p0 + p.chunk);
      px_copy(s, p, base, p0, p1, y0 * s.SY - s.PT, (rows - 1) * s.SY + (s.KH - 1) * s.DY + 1, turned, copied);
      px_planes<O, K, S, LONG, WAY>(s, p, t, p0, p1, rows, w + g * group, copied, D, p0 > planes.first * p.cig);
    }
    px_finish(s, p, D, t, conv_px(s, (image * s.OH + y0) * s.OW), rows, g * p.cog, turned, call);
  }
}
