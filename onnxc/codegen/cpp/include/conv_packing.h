// Weights of convolutions that are no constants: packed by each run, as conv.h, conv_wino.h and conv_dw.h read them.
// Part of conv.h.
#pragma once
#include "vec.h"

// Weights that are packed at run time: element (o, c, kz, ky, kx) lies at w[o*os + c*cs + kz*zs + ky*ys + kx*xs].
struct ConvWeights { const f32 *w; i64 os, cs, zs, ys, xs; };

template <class S> OX i64 conv_taps(const S &s) { return s.KD * s.KH * s.KW; }
template <class S> OX const f32 *conv_tap(const S &s, const ConvWeights &w, i64 k) {
  return w.w + k / (s.KH * s.KW) * w.zs + k / s.KW % s.KH * w.ys + k % s.KW * w.xs;
}

// VL output channels of a few input channels at a time are turned, so that output channels are lanes: row
// (c * span + place of the tap) of a buffer has them. All that lies between the taps of a kernel is turned with them, by
// squares of VL by VL elements; where that is too much, or output channels are neighbours, the taps alone.
static constexpr i64 CONV_TURNED = 9 * VL;  // rows of the buffer, but for a square's last ones
struct ConvTurned {
  f32 rows[(CONV_TURNED + VL) * VL];
  i64 span;
  int place[CONV_TURNED];
  OX_LAMBDA vf at(i64 c, i64 tap) const { return ld(rows + (c * span + place[tap]) * VL); }
};

// How the kernel of a pair of channels lies: elements from its first tap in memory to its last, both counted, and where
// the tap at index 0 is among them. Squares: whether it is turned as a whole. Together: so are neighbouring channels.
struct ConvExtent { i64 span, origin; bool squares, together; };
template <class S> OX ConvExtent conv_extent(const S &s, const ConvWeights &w) {
  i64 z = (s.KD - 1) * w.zs, y = (s.KH - 1) * w.ys, x = (s.KW - 1) * w.xs;
  i64 low = ox_min(z, 0) + ox_min(y, 0) + ox_min(x, 0), span = ox_max(z, 0) + ox_max(y, 0) + ox_max(x, 0) - low + 1;
  bool squares = w.os != 1 && span <= CONV_TURNED;
  return {squares ? span : conv_taps(s), -low, squares, squares && w.cs == span};
}

// Input channels that fit at a time. Kernels of more taps than rows have the packers below take a part of them at a time.
OX i64 conv_turned(i64 span) { return ox_max(1, CONV_TURNED / ox_max(1, span)); }

// Output channels [o, o + n), n at most VL, of taps [t0, t1) of input channels [c, c + count): place is by tap - t0.
template <class S>
static void conv_turn(const S &s, const ConvWeights &w, const ConvExtent &e, i64 o, i64 n, i64 c, i64 count, i64 t0, i64 t1,
                      ConvTurned &t) {
  const f32 *p = w.w + o * w.os + c * w.cs;
  t.span = e.squares ? e.span : t1 - t0;
  for (i64 k = t0; k < t1; k++) t.place[k - t0] = int(e.squares ? e.origin + (conv_tap(s, w, k) - w.w) : k - t0);
  if (e.squares) {
    i64 run = e.together ? count * e.span : e.span;
    bool near = !e.together && w.os > 0 && w.os <= 2 * e.span;  // output channels are neighbours: they are fetched early
    for (i64 k = 0; k < (e.together ? 1 : count); k++) {
      const f32 *q = p + k * w.cs - e.origin;
      if (near) for (i64 j = 0; j < n * w.os; j += 16) __builtin_prefetch(q + 8 * w.cs + j);
      for (i64 j = 0; j < run; j += VL)
        tile_load(t.rows + (k * e.span + j) * VL, q + j, w.os, (int)n, (int)ox_min(VL, run - j));
    }
    return;
  }
  for (i64 j = t0; j < t1; j++) {
    const f32 *q = p + (conv_tap(s, w, j) - w.w);
    f32 *d = t.rows + (j - t0) * VL;
    for (i64 k = 0; k < count; k++, q += w.cs, d += t.span * VL) {
      __builtin_prefetch(q + 8 * w.cs);
      st(d, w.os == 1 ? ldn(q, (int)n) : lds(q, w.os, (int)n));
    }
  }
}

// For conv_items: an item is a panel.
struct ConvPanels {
  template <class S> static i64 count(const S &s) { return s.G * ox_up(s.CO / s.G, CONV_NR); }
  template <class S> static i64 bytes(const S &s) { return 4 * count(s) * CONV_NR * conv_taps(s) * (s.CI / s.G); }
  template <class S> static void pack(const S &s, const ConvWeights &w, i64 first, i64 last, f32 *out) {
    i64 cig = s.CI / s.G, cog = s.CO / s.G, panels = ox_up(cog, CONV_NR), taps = conv_taps(s);
    const ConvExtent e = conv_extent(s, w);
    i64 most = conv_turned(e.span), part = e.squares ? taps : ox_min(taps, CONV_TURNED);
    ConvTurned t;
    f32 *d = out + first * CONV_NR * taps * cig;
    for (i64 n = first; n < last; n++, d += CONV_NR * taps * cig)
      for (i64 c = 0; c < cig; c += most)
        for (i64 h = 0; h < CONV_NR; h += VL)
          for (i64 t0 = 0; t0 < taps; t0 += part) {
            i64 o = n % panels * CONV_NR + h, count = ox_min(most, cig - c), t1 = ox_min(taps, t0 + part);
            bool some = o < cog;
            if (some) conv_turn(s, w, e, n / panels * cog + o, ox_min(VL, cog - o), c, count, t0, t1, t);
            for (i64 k = t0; k < t1; k++)
              for (i64 i = 0; i < count; i++)
                st(d + (k * cig + c + i) * CONV_NR + h, some ? t.at(i, k - t0) : vf{});
          }
  }
};

// For the depthwise kernels: an item is a tap.
struct ConvTaps {
  template <class S> static i64 count(const S &s) { return conv_taps(s); }
  template <class S> static i64 bytes(const S &s) { return cround(4 * conv_taps(s) * (s.CI / s.G) * s.CO, 64) + 64; }
  template <class S> static void pack(const S &s, const ConvWeights &w, i64 first, i64 last, f32 *out) {
    i64 cig = s.CI / s.G;
    f32 *d = out + first * cig * s.CO;
    for (i64 k = first; k < last; k++)
      for (i64 c = 0; c < cig; c++)
        for (i64 o = 0; o < s.CO; o++) *d++ = conv_tap(s, w, k)[c * w.cs + o * w.os];
  }
};
