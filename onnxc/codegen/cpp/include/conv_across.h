// Epilogues whose lanes are pixels, and not channels: for results that lie planar, as a model's outputs do. To store the
// channels of one pixel, each to another plane, takes an instruction for each; planes are often a power of two apart, so
// that they meet in a few lines of the cache.
//
// Sums of a strip of pixels by a vector of channels are turned on the stack (tile.h), and handed over plane by plane.
// Part of conv.h.
#pragma once
#include "tile.h"

// f(pixel, channel, sums, lanes): lane i has the sum of that channel at the i-th pixel from there on. These pixels are
// of one plane; the epilogue reads of `pixel` how far from the plane's beginning it is, alone: x may be beyond a row.
template <class F> struct ConvAcross { F f; };
template <class F> OX ConvAcross<F> conv_across(const F &f) { return {f}; }
template <class E> inline constexpr bool conv_is_across = false;
template <class F> inline constexpr bool conv_is_across<ConvAcross<F>> = true;

static constexpr i64 CONV_STRIP = 4 * VL;  // pixels of a strip: whole lines of a plane, several at a time

// As the other conv_finish, for such an epilogue.
template <class S, class P, class F>
__attribute__((noinline)) static void conv_finish(
    const S &s, const f32 *D, i64 ds, P q, i64 rows, i64 c, i64 cols, const ConvAcross<F> &call) {
  const F epi = call.f;
  alignas(64) f32 turned[CONV_STRIP * VL];
  for (i64 n; rows > 0; rows -= n, D += n * ds, q = conv_px(s, q.i + n)) {
    n = ox_min(ox_min(rows, CONV_STRIP), ((s.OD - conv_z(q)) * s.OH - q.y) * s.OW - q.x);
    for (i64 j = 0; j < cols; j += VL) {
      int some = (int)ox_min(VL, cols - j);
      for (i64 k = 0; k < n; k += VL)
        tile_load(turned + k * VL, D + k * ds + j, ds, (int)ox_min(VL, n - k), some);
      const f32 *plane = turned;
      for (i64 h = 0; h < some; h++, plane += VL) {
        P at = q;
        i64 k = 0;
        for (; k + VL <= n; k += VL, at.i += VL, at.x += VL) epi(at, c + j + h, ld(plane + k * VL), Full{});
        if (k < n) epi(at, c + j + h, ld(plane + k * VL), Part{int(n - k)});
      }
    }
  }
}

// Where the sums of a panel's tiles go, one after the other, on their way to the epilogue.
template <bool ACROSS> struct ConvSums {
  f32 *D;
  OX_LAMBDA f32 *next() { return D; }
  // The `rows` sums at next(), of pixels from i on. `last` of the block.
  template <class S, class E>
  OX_LAMBDA void finish(const S &s, i64 i, i64 rows, bool, i64 c, i64 cols, const E &epi) {
    conv_finish(s, D, CONV_NR, conv_px(s, i), rows, c, cols, epi);
  }
};

// Tiles are collected until they are a strip, which ends where a line of the plane may end.
template <> struct ConvSums<true> {
  f32 *D;
  i64 have = 0;
  alignas(64) f32 strip[(CONV_STRIP + 2 * CONV_MR) * CONV_NR];  // a tile has no more pixels than that
  ConvSums(f32 *d) : D(d) {}
  f32 *next() { return strip + have * CONV_NR; }
  template <class S, class E> void finish(const S &s, i64 i, i64 rows, bool last, i64 c, i64 cols, const E &epi) {
    have += rows, i += rows;
    if (have < CONV_STRIP && !last) return;
    i64 rest = last ? 0 : i % VL, ready = have - rest;
    conv_finish(s, strip, CONV_NR, conv_px(s, i - have), ready, c, cols, epi);
    for (i64 k = 0; k < rest * CONV_NR; k += VL) st(strip + k, ld(strip + ready * CONV_NR + k));
    have = rest;
  }
};
