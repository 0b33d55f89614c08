// f32 depthwise convolution of volumes: the tiles of conv_dw.h, one plane of the kernel after the other, added up.
//
// Weights: w[kz][ky][kx][ci of a group][co].
#pragma once
#include "conv_dw.h"

static i64 conv_dw3_count(const ConvVolume &s) {
  DwPlan p = dw_plan(s);
  return s.N * s.OD * p.bands * p.strips;
}
static i64 conv_dw3_scratch(const ConvVolume &s) { return conv_dw_scratch(s) + 4 * DW_XB * 2 * DW_CB; }

// One output row of plane q.z by a strip of channels: see dw_line. The sums of a plane go to t.D, all to `sum`.
template <int KW, int SX, bool PERM, int DX, class E>
OX void dw3_line(const ConvVolume &s, const f32 *x, DwTile t, f32 *sum, PxVolume q, const E &epi) {
  i64 iy = q.y * s.SY - s.PT, reach = (DW_XB - 1) * s.SX + (s.KW - 1) * s.DX + 1;
  i64 most = ox_max(1, 2 * DW_CB / t.ds);  // tiles at a time
  t.ky0 = iy < 0 ? ox_min(s.KH, ox_up(-iy, s.DY)) : 0;
  t.ky1 = ox_max(t.ky0, ox_min(s.KH, ox_up(s.H - iy, s.DY)));
  ConvPlanes planes = conv_planes(s, q.z);
  const f32 *line = x + q.n * s.ins + (q.z * s.SZ - s.PF) * s.ids + iy * s.irs, *w = t.w;
  for (i64 pixels; q.x < s.OW; q.i += pixels, q.x += pixels) {
    t.ix = q.x * s.SX - s.PL, t.tiles = 1;
    bool edge = t.ix < 0 || t.ix + reach > s.W;
    i64 inner = (s.W - t.ix - reach) / (DW_XB * s.SX) + 1;
    if (!edge) t.tiles = ox_min(ox_min(most, inner), ox_up(s.OW - q.x, DW_XB));
    pixels = ox_min(t.tiles * DW_XB, s.OW - q.x);
    i64 room = pixels * t.ds;  // a multiple of VL
    for (i64 i = 0; i < room; i += VL) st(sum + i, vf{});
    for (i64 kz = planes.first; kz < planes.last; kz++) {
      t.x = line + kz * s.DZ * s.ids + t.ix * s.ips, t.w = w + kz * s.KH * s.KW * (s.CI / s.G) * s.CO;
      if (edge) dw_tile<KW, SX, true, PERM, DX>(s, t);
      else dw_tile<KW, SX, false, PERM, DX>(s, t);
      for (i64 i = 0; i < room; i += VL) st(sum + i, ld(sum + i) + ld(t.D + i));
    }
    conv_finish(s, sum, t.ds, q, pixels, t.co, t.cols, epi);
  }
}

// Work items [first, last): see conv_dw_items.
template <int KW, int SX, bool PERM = false, int DX = 1, class E>
static void conv_dw3_items(
    const ConvVolume &s, const f32 *x, const f32 *w, i64 first, i64 last, void *scratch, const E &epi) {
  DwPlan p = dw_plan(s);
  f32 *sum = (f32 *)scratch, *D = sum + DW_XB * 2 * DW_CB;
  vi *lanes = (vi *)(D + DW_XB * 2 * DW_CB);
  for (i64 item = first; item < last; item++) {
    i64 strip = item % p.strips, band = item / p.strips % p.bands, plane = item / (p.strips * p.bands);
    i64 co = strip * p.strip, cols = ox_min(p.strip, s.CO - co);
    if (PERM || KW == 0) dw_lanes(s, co, cols, lanes);
    for (i64 y = band * p.band; y < ox_min(s.OH, (band + 1) * p.band); y++) {
      DwTile t = {nullptr, w + co, D, lanes, 0, 0, 0, co, cols, 1, cround(cols, VL)};
      dw3_line<KW, SX, PERM, DX>(s, x, t, sum, PxVolume{(plane * s.OH + y) * s.OW, plane / s.OD, y, 0, plane % s.OD}, epi);
    }
  }
}
