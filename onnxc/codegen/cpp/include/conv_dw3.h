// f32 depthwise convolution of volumes: the tiles of conv_dw.h, one plane of the kernel after the other, added up.
//
// Weights: w[kz][ky][kx][ci of a group][co].
#pragma once
#include "conv_dw.h"

static i64 conv_dw3_count(const ConvVolume &s) { return s.OD * conv_dw_count(s); }
static i64 conv_dw3_scratch(const ConvVolume &s) { return conv_dw_scratch(s); }

// The sums of a block in output plane z: see dw_block. `x` is the image, of all planes.
template <int K, int S, bool PERM, bool LONG, bool TALL>
OX void dw3_block(const ConvVolume &s, DwTile t, const f32 *x, i64 z, f32 *D, const DwBlock &b) {
  const ConvPlanes planes = conv_planes(s, z);
  const f32 *const w = t.w;
  if (planes.first == planes.last)
    for (i64 i = 0; i < b.rows * b.pixels * cround(t.cols, VL); i += VL) st(D + i, vf{});
  for (i64 kz = planes.first; kz < planes.last; kz++) {
    t.w = w + kz * s.KH * s.KW * (s.CI / s.G) * s.CO, t.more = kz > planes.first;
    dw_block<K, S, PERM, LONG, TALL>(s, t, x + (z * s.SZ - s.PF + kz * s.DZ) * s.ids, D, b);
  }
}

// Work items [first, last): see conv_dw_items.
template <int K, int S, bool PERM = false, bool LONG = false, bool TALL = false, class E>
static void conv_dw3_items(
    const ConvVolume &s, const f32 *x, const f32 *w, i64 first, i64 last, void *scratch, const E &epi) {
  DwPlan p = dw_plan(s);
  vi *const lanes = dw_room_of_lanes(scratch);
  for (i64 item = first; item < last; item++) {
    i64 strip = item % p.strips, band = item / p.strips % p.bands, plane = item / (p.strips * p.bands);
    i64 co = strip * p.strip, cols = ox_min(p.strip, s.CO - co), n = plane / s.OD, z = plane % s.OD;
    if (PERM) dw_lanes(s, co, cols, lanes);
    DwTile t = {};
    t.w = w + co, t.lanes = lanes, t.co = co, t.cols = cols;
    const auto sums = [&](f32 *D, const DwBlock &b) OX_LAMBDA {
      dw3_block<K, S, PERM, LONG, TALL>(s, t, x + n * s.ins, z, D, b);
    };
    dw_rows<TALL>(s, cols, co, PxVolume{plane * s.OH * s.OW, n, 0, 0, z}, band * p.band,
                  ox_min(s.OH, (band + 1) * p.band), (f32 *)scratch, sums, epi);
  }
}
