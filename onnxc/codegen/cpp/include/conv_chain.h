// A chain of convolutions, [1x1 ->] depthwise [-> 1x1], band by band: a few output rows of the depthwise convolution
// are computed from end to end while they are in the cache, so that what lies between the convolutions is never in
// memory as a whole. In a network of such blocks it would be most of the traffic.
//
// A band's rows of the depthwise convolution's input overlap those of the next band. A thread that takes the next band
// keeps them, and adds its own behind them until there is no room; another computes them again, to the same bits.
#pragma once
#include "conv_dw.h"

// Bytes of one thread's rows between the convolutions: they share the second-level cache with weights and images.
static constexpr i64 CHAIN_ROOM = VL >= 16 ? 400 * 1024 : 200 * 1024;
static constexpr i64 CHAIN_PIXELS = 96;  // of a band at least: fewer would pass over the weights too often

// The division into bands. Floats of a row of the depthwise convolution's input and output, where these are kept in
// the chain (else 0), and room for a band of each.
struct ChainPlan { i64 band, bands, before, after, most, before_room, after_room; };  // most: rows in before_room
static ChainPlan chain_plan(const ConvShape &dw, bool first, bool last) {
  ChainPlan p = {};
  p.before = first ? dw.W * dw.CI : 0, p.after = last ? dw.OW * dw.CO : 0;
  i64 reach = (dw.KH - 1) * dw.DY + 1, row = 4 * (p.before * dw.SY + p.after);
  i64 fit = (CHAIN_ROOM - 4 * p.before * (reach - dw.SY)) / ox_max(row, 1);
  i64 least = ox_up(CHAIN_PIXELS, ox_max(1, dw.OW)), even = ox_up(dw.OH * dw.N, CONV_ITEMS);
  p.bands = ox_up(dw.OH, ox_max(ox_max(1, ox_min(fit, even)), least));
  p.band = ox_max(1, ox_up(dw.OH, ox_max(p.bands, 1)));
  p.bands = ox_up(dw.OH, p.band);
  p.most = ox_min(dw.H, ox_max((p.band - 1) * dw.SY + reach, CHAIN_ROOM / ox_max(4 * p.before, 1)));
  p.before_room = cround(p.before * p.most + VL, 16);
  p.after_room = cround(p.after * p.band + VL, 16);
  return p;
}
static i64 chain_count(const ConvShape &dw, bool first, bool last) {
  return dw.OW > 0 ? dw.N * chain_plan(dw, first, last).bands : 0;
}

// A band: output rows [oy0, oy1) of image n, from input rows [y0, y1). Of the latter the thread has rows up to `have`;
// row `top` is the first in its room. It is kept at the start of the thread's scratch, since a thread gets its items in
// several pieces; n is -1 before the first.
struct ChainBand { i64 n, oy0, oy1, y0, y1, have, top; };
static constexpr i64 CHAIN_STATE = 64;
static_assert(sizeof(ChainBand) <= CHAIN_STATE, "and the rows begin on a cache line");

// The band of an item, after the thread's last one.
static ChainBand chain_band(const ConvShape &dw, const ChainPlan &p, i64 item, const ChainBand last, f32 *rows) {
  ChainBand b = {item / p.bands, item % p.bands * p.band, 0, 0, 0, 0, 0};
  b.oy1 = ox_min(dw.OH, b.oy0 + p.band);
  b.y0 = ox_min(dw.H, ox_max(0, b.oy0 * dw.SY - dw.PT));
  b.y1 = ox_max(b.y0, ox_min(dw.H, (b.oy1 - 1) * dw.SY - dw.PT + (dw.KH - 1) * dw.DY + 1));
  b.have = b.top = b.y0;
  if (last.n != b.n || b.y0 < last.y0 || b.y0 >= last.y1) return b;
  b.have = ox_min(last.y1, b.y1);
  if (b.y1 - last.top <= p.most) b.top = last.top;
  else __builtin_memmove(rows, rows + (b.y0 - last.top) * p.before, 4 * (last.y1 - b.y0) * p.before);
  return b;
}
