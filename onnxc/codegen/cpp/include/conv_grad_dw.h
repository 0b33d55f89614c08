// The derivative of a depthwise f32 convolution (or one of groups of a few channels) by its weights: see conv_grad.h.
//
// Output channels are lanes, as in conv_dw.h; a loaded vector of input channels is permuted so that each lane sees the
// input that it needs. An item is a strip of channels in a part of the output rows.
#pragma once
#include "conv_dw.h"
#include "conv_grad.h"

static constexpr i64 GRAD_STRIP = 64;   // channels
static constexpr i64 GRAD_LINES = 8;    // output rows of a part at least
static constexpr i64 GRAD_CHAIN = 512;  // pixels of a row in one sum

// Channels of a strip, strips, output rows, their parts; inputs of a group and taps; floats of a strip's sums.
struct GradDwPlan { i64 strip, strips, lines, splits, cig, taps, sums; };
template <class S> static GradDwPlan grad_dw_plan(const S &s) {
  GradDwPlan p;
  p.strip = ox_min(GRAD_STRIP, cround(s.CO, VL)), p.strips = ox_up(s.CO, p.strip), p.lines = grad_planes(s) * s.OH;
  p.splits = ox_max(1, ox_min(ox_up(CONV_ITEMS, ox_max(1, p.strips)), p.lines / GRAD_LINES));
  p.cig = s.CI / s.G, p.taps = conv_taps(s), p.sums = p.taps * p.cig * p.strip;
  return p;
}

template <class S> static i64 grad_dw_scratch(const S &s) {
  GradDwPlan p = grad_dw_plan(s);
  return 4 * (p.sums + p.strip * p.cig + cround(p.cig * p.taps, VL)) + 64;
}
template <class S> static i64 grad_dw_room(const S &s) {
  GradDwPlan p = grad_dw_plan(s);
  return p.splits > 1 ? 4 * p.splits * p.strips * p.sums : 0;
}
template <class S> static i64 grad_dw_partial_count(const S &s) {
  GradDwPlan p = grad_dw_plan(s);
  return p.splits > 1 ? p.splits * p.strips : 0;
}
template <class S> static i64 grad_dw_count(const S &s) {
  GradDwPlan p = grad_dw_plan(s);
  return p.taps > 0 ? p.strips : 0;
}

// A run of output pixels: x and dy at the first one's first tap, and the steps from pixel to pixel and tap to tap.
struct GradDwRun { const f32 *x, *dy; i64 n, xs, xt, ys; };

// Adds to sum[k * step] what KW neighbouring taps get from a run, for a vector of channels.
template <int KW, bool PERM, class L, class X>
OX void grad_dw_run(const GradDwRun &r, f32 *sum, i64 step, vi lanes, L l, X lx) {
  constexpr int U = KW >= 5 ? 2 : KW >= 3 ? 3 : 4;  // chains of each tap
  for (i64 i0 = 0; i0 < r.n; i0 += GRAD_CHAIN) {
    i64 end = ox_min(r.n, i0 + GRAD_CHAIN);
    vf a[U][KW];
    OX_UNROLL for (int u = 0; u < U; u++) OX_UNROLL for (int k = 0; k < KW; k++) a[u][k] = vf{};
    const auto pixel = [&](i64 i, vf *to) OX_LAMBDA {
      vf g = ldl(r.dy + i * r.ys, l);
      OX_UNROLL for (int k = 0; k < KW; k++) {
        vf v = ldl(r.x + i * r.xs + k * r.xt, lx);
        if constexpr (PERM) v = dw_permuted(v, lanes);
        to[k] += g * v;
      }
    };
    i64 i = i0;
    for (; i + U <= end; i += U) OX_UNROLL for (int u = 0; u < U; u++) pixel(i + u, a[u]);
    for (; i < end; i++) pixel(i, a[0]);
    OX_UNROLL for (int k = 0; k < KW; k++) {
      vf v = ldl(sum + k * step, l);
      OX_UNROLL for (int u = 0; u < U; u++) v += a[u][k];
      stl(sum + k * step, v, l);
    }
  }
}

// A count of taps, as a type.
template <int N> struct GradTaps { static constexpr int value = N; };

// Output pixels [first, last) of a row whose tap at kx (a distance in x) lies inside the image.
struct GradSpan { i64 first, last; };
template <class S> OX GradSpan grad_span(const S &s, i64 kx) {
  i64 before = s.PL - kx, after = s.W + s.PL - kx;
  i64 first = before > 0 ? ox_min(s.OW, ox_up(before, s.SX)) : 0;
  return {first, ox_max(first, after > 0 ? ox_min(s.OW, ox_up(after, s.SX)) : 0)};
}

// What one row of the kernel gets from one row of the output: x and dy are at their first elements, for output channels
// from c on. KW = 0 takes any kernel, a tap at a time.
template <int KW, bool PERM, class S, class L, class X>
OX void grad_dw_row(const GradShape<S> &s, const f32 *x, const f32 *dy, f32 *sum, i64 step, vi lanes, L l, X lx) {
  const auto part = [&](auto taps, i64 kx, GradSpan o) OX_LAMBDA {
    GradDwRun r = {x + (o.first * s.SX - s.PL + kx * s.DX) * s.ips, dy + o.first * s.yps, o.last - o.first,
                   s.SX * s.ips, s.DX * s.ips, s.yps};
    grad_dw_run<decltype(taps)::value, PERM>(r, sum + kx * step, step, lanes, l, lx);
  };
  GradSpan all = {0, 0};
  if constexpr (KW > 1) {
    GradSpan a = grad_span(s, 0), b = grad_span(s, (KW - 1) * s.DX);
    all = {a.first, ox_max(a.first, b.last)};  // the first tap begins last, the last one ends first
    part(GradTaps<KW>{}, 0, all);
  }
  for (i64 k = 0; k < (KW > 0 ? KW : s.KW); k++) {
    GradSpan o = grad_span(s, k * s.DX);
    if (KW > 1 && all.first < all.last) {
      if (o.first < all.first) part(GradTaps<1>{}, k, {o.first, all.first});
      if (o.last > all.last) part(GradTaps<1>{}, k, {all.last, o.last});
    } else if (o.first < o.last) {
      part(GradTaps<1>{}, k, o);
    }
  }
}

// The sums D[tap][ci of a group][strip] of channels [co, co + cols) over output rows [r0, r1).
template <int KW, bool PERM, class S>
static void grad_dw_sum(const GradShape<S> &s, const GradDwPlan &p, const f32 *x, const f32 *dy, i64 co, i64 cols, i64 r0,
                        i64 r1, vi *lanes, f32 *D) {
  for (i64 i = 0; i < p.sums; i++) D[i] = 0;
  if (PERM) dw_lanes(s, co, cols, lanes);
  for (i64 r = r0; r < r1; r++) {
    i64 oy = r % s.OH, plane = r / s.OH, n = plane / s.OD, oz = plane % s.OD;
    const f32 *g = dy + n * s.yns + oz * s.yds + oy * s.yrs;
    for (i64 k = 0; k < s.KD * s.KH; k++) {
      i64 iz = oz * s.SZ - s.PF + k / s.KH * s.DZ, iy = oy * s.SY - s.PT + k % s.KH * s.DY;
      if ((u64)iy >= (u64)s.H || (S::VOLUME && (u64)iz >= (u64)s.D)) continue;
      const f32 *line = x + n * s.ins + iz * s.ids + iy * s.irs;
      for (i64 c = 0; c < cols; c += VL)
        for (i64 q = 0; q < p.cig; q++) {
          i64 ci = dw_channel(s, co + c);
          int have = (int)ox_min(VL, cols - c), inputs = (int)ox_min(VL, s.CI - ci);
          vi turn = PERM ? lanes[c / VL * p.cig + q] : vi{};
          f32 *d = D + (k * s.KW * p.cig + q) * p.strip + c;
          if (have == VL && inputs == VL)
            grad_dw_row<KW, PERM>(s, line + ci, g + co + c, d, p.cig * p.strip, turn, Full{}, Full{});
          else
            grad_dw_row<KW, PERM>(s, line + ci, g + co + c, d, p.cig * p.strip, turn, Part{have}, Part{inputs});
        }
    }
  }
}

// Sums of item i of the first step (or of the only one, with one part).
template <int KW, bool PERM, class S>
__attribute__((noinline)) static void grad_dw_item(
    const GradShape<S> &s, const GradDwPlan &p, const f32 *x, const f32 *dy, i64 i, void *scratch, f32 *D) {
  i64 part = i % p.splits, co = i / p.splits * p.strip;
  grad_dw_sum<KW, PERM>(s, p, x, dy, co, ox_min(p.strip, s.CO - co), p.lines * part / p.splits,
                        p.lines * (part + 1) / p.splits, (vi *)scratch, D);
}

template <int KW, bool PERM, class S>
static void grad_dw_partials(
    const GradShape<S> &s, const f32 *x, const f32 *dy, f32 *room, i64 first, i64 last, void *scratch) {
  GradDwPlan p = grad_dw_plan(s);
  for (i64 i = first; i < last; i++) grad_dw_item<KW, PERM>(s, p, x, dy, i, scratch, room + i * p.sums);
}

// Items [first, last), a strip each: see grad_items.
template <int KW, bool PERM, class S, class E>
static void grad_dw_items(const GradShape<S> &s, const f32 *x, const f32 *dy, const f32 *room, i64 first, i64 last,
                          void *scratch, const E &epi) {
  GradDwPlan p = grad_dw_plan(s);
  f32 *D = (f32 *)scratch + p.strip * p.cig, *row = D + p.sums;
  for (i64 i = first; i < last; i++) {
    i64 co = i * p.strip, cols = ox_min(p.strip, s.CO - co);
    if (p.splits > 1) {
      const f32 *parts = room + i * p.splits * p.sums;
      for (i64 j = 0; j < p.sums; j += VL) {
        vf v = ld(parts + j);
        for (i64 k = 1; k < p.splits; k++) v += ld(parts + k * p.sums + j);
        st(D + j, v);
      }
    } else {
      grad_dw_item<KW, PERM>(s, p, x, dy, i, scratch, D);
    }
    for (i64 m = 0; m < cols; m++) {
      for (i64 t = 0; t < p.taps; t++)
        for (i64 q = 0; q < p.cig; q++) row[q * p.taps + t] = D[(t * p.cig + q) * p.strip + m];
      grad_store(row, p.cig * p.taps, co + m, 0, epi);
    }
  }
}
