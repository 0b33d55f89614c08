// Exact integer 3x3 convolution by Winograd's F(4x4), with the points 0, 1, -1, 2, -2: a quarter of the products.
//
// No fraction appears. The input transform stays within int16 (rows of B' sum up to 10, both ways 100, times 255 is
// 25500). Weights are transformed with G's rows freed of their denominators, [1 0 0], [1 1 1], [1 -1 1], [1 2 4],
// [1 -2 4], [0 0 1]: at most 49 times the largest weight, which is 255. The output transform has 24 times those
// denominators in it, T = 6 -4 -4 1 1 24, and so gives 576 Y = 64 * 9 Y modulo 2^32; the inverse of 9 modulo 2^32
// makes it 64 Y, a shift Y. That is exact for |Y| < 2^25, which codegen has proved from the weights.
//
// Weights: U[panel][36][CI / 2][NR][2]. CI is a multiple of 2 VL.
#pragma once
#include "iconv.h"

namespace iwino {
using iconv::Px;
using iconv::Shape;
static constexpr i64 ROOM = 98304;  // elements of a block's transformed input
static constexpr i64 TILES = 24;    // tiles of a block at most
static constexpr i64 ITEMS = 16;    // work items aimed at

struct Plan { i64 th, tw, tiles, row, most, blocks, parts; };
static __attribute__((noinline)) Plan plan(const Shape &s) {
  Plan p;
  p.th = ox_up(s.OH, 4), p.tw = ox_up(s.OW, 4), p.tiles = s.N * p.th * p.tw;
  p.row = s.CI / 2 + 16;
  i64 fit = ox_max(IG_MR, ox_min(TILES, ROOM / (36 * p.row) / IG_MR * IG_MR));
  p.blocks = ox_max(ox_up(p.tiles, fit), ox_min(ITEMS, p.tiles / IG_MR));
  p.most = ig_even(ox_up(p.tiles, ox_max(1, p.blocks)));
  p.parts = ox_max(1, ox_min(ig_panels(s.CO) / 2, ITEMS / ox_max(1, p.blocks)));
  return p;
}
static inline i64 count(const Shape &s) {
  Plan p = plan(s);
  return s.CO > 0 ? p.blocks * p.parts : 0;
}
static inline i64 scratch_bytes(const Shape &s) {
  Plan p = plan(s);
  return ox_up(4 * (36 * p.most * (p.row + IG_NR) + 16 * IG_NR), 64) * 64;
}

// One dimension of B' d: six of int16 to six.
template <class H> OX void forward(const H *d, i64 ds, H *o, i64 os) {
  H a = d[4 * ds] - 4 * d[2 * ds], b = d[3 * ds] - 4 * d[ds], c = d[4 * ds] - d[2 * ds], e = 2 * (d[3 * ds] - d[ds]);
  o[0] = 4 * d[0] - 5 * d[2 * ds] + d[4 * ds];
  o[os] = a + b, o[2 * os] = a - b, o[3 * os] = c + e, o[4 * os] = c - e;
  o[5 * os] = 4 * d[ds] - 5 * d[3 * ds] + d[5 * ds];
}
// One dimension of A' T m: six of int32 to four, modulo 2^32.
OX void backward(const ig_u *m, i64 ms, ig_u *o, i64 os) {
  ig_u a = m[ms] + m[2 * ms], b = m[ms] - m[2 * ms], c = m[3 * ms] + m[4 * ms], e = m[3 * ms] - m[4 * ms];
  o[0] = 6 * m[0] - 4 * a + c, o[os] = 2 * e - 4 * b, o[2 * os] = 4 * (c - a);
  o[3 * os] = 8 * e - 4 * b + 24 * m[5 * ms];
}

// Tile t of the input, all channels: V[p][row] of pairs, V's planes `plane` elements apart.
template <class S>
static __attribute__((noinline)) void read_tile(
    const Shape &s, const Plan &p, const S *x, i64 t, S fill, ig_i32 *v, i64 plane) {
  constexpr int W = 2 * VL;
  typedef i16 H __attribute__((vector_size(2 * W)));
  typedef i16 HL __attribute__((vector_size(2 * W), aligned(1), may_alias));
  typedef S L __attribute__((vector_size(W), aligned(1), may_alias));
  typedef S LV __attribute__((vector_size(W)));
  i64 n = t / (p.th * p.tw), iy = t / p.tw % p.th * 4 - s.PT, ix = t % p.tw * 4 - s.PL;
  const S *at = x + n * s.ins + iy * s.irs + ix * s.ips;
  H outside = (i16)fill - H{};
  for (i64 c = 0; c < s.CI; c += W) {
    H d[36], half[36];
    OX_UNROLL for (int y = 0; y < 6; y++) {
      bool in = (u64)(iy + y) < (u64)s.H;
      OX_UNROLL for (int i = 0; i < 6; i++) {
        d[y * 6 + i] = outside;
        if (in && (u64)(ix + i) < (u64)s.W) {
          LV raw = *(const L *)(at + y * s.irs + i * s.ips + c);
          d[y * 6 + i] = __builtin_convertvector(raw, H);
        }
      }
    }
    OX_UNROLL for (int i = 0; i < 6; i++) forward<H>(d + i, 6, half + i, 6);
    OX_UNROLL for (int y = 0; y < 6; y++) forward<H>(half + 6 * y, 1, d + 6 * y, 1);
    OX_UNROLL for (int k = 0; k < 36; k++) *(HL *)((ig_i16 *)(v + k * plane) + c) = d[k];
  }
}
// The sixteen outputs of a tile for one vector of channels: m's planes are `plane` apart, d's pixels IG_NR.
static __attribute__((noinline)) void write_tile(const i32 *m, i64 plane, i32 *d) {
  ig_u half[24], out[16];
  OX_UNROLL for (int i = 0; i < 6; i++) {
    ig_u col[6];
    OX_UNROLL for (int y = 0; y < 6; y++) col[y] = (ig_u)ld(m + (y * 6 + i) * plane);
    backward(col, 1, half + i, 6);
  }
  OX_UNROLL for (int y = 0; y < 4; y++) backward(half + 6 * y, 1, out + 4 * y, 1);
  OX_UNROLL for (int k = 0; k < 16; k++) st(d + k * IG_NR, (vi)(out[k] * 0x38e38e39u) >> 6);
}

// Work items [first, last): blocks of tiles by parts of the panels.
template <class S, class E>
static void items(
    const Shape &s, const S *x, S fill, const i32 *u, i64 first, i64 last, void *scratch, const E &call) {
  const E epi = call;
  Plan p = plan(s);
  i32 *m = (i32 *)scratch, *d = m + 36 * p.most * IG_NR;
  ig_i32 *v = (ig_i32 *)(d + 16 * IG_NR);
  i64 panels = ig_panels(s.CO), K = s.CI / 2, plane = p.most * p.row, built = -1;
  for (i64 item = first; item < last; item++) {
    i64 block = item / p.parts, part = item % p.parts;
    i64 t0 = ox_cut(p.tiles, p.blocks, block), tiles = ox_cut(p.tiles, p.blocks, block + 1) - t0, even = ig_even(tiles);
    for (i64 t = 0; t < tiles && built != block; t++) read_tile<S>(s, p, x, t0 + t, fill, v + t * p.row, plane);
    for (i64 k = 0; k < 36 && even > tiles && built != block; k++)
      for (i64 i = 0; i < K; i++) v[k * plane + tiles * p.row + i] = 0;
    built = block;
    i64 strips = ox_up(even, IG_MR);
    for (i64 n = ox_cut(panels, p.parts, part); n < ox_cut(panels, p.parts, part + 1); n++) {
      for (i64 k = 0; k < 36; k++)
        for (i64 it = 0, r, r0 = 0; it < strips; it++, r0 += r) {
          r = even == 1 ? 1 : ox_cut(even / 2, strips, it + 1) * 2 - r0;
          ig_tiles<2, IG_MR>(r, 1, K, v + k * plane + r0 * p.row, p.row, u + (n * 36 + k) * K * IG_NR, 0, nullptr,
                             m + (k * p.most + r0) * IG_NR, 0);
        }
      i64 cols = ox_min(IG_NR, s.CO - n * IG_NR);
      for (i64 t = 0; t < tiles; t++) {
        i64 at = t0 + t, img = at / (p.th * p.tw), oy = at / p.tw % p.th * 4, ox = at % p.tw * 4;
        for (i64 j = 0; j < cols; j += VL) write_tile(m + t * IG_NR + j, p.most * IG_NR, d + j);
        for (i64 y = 0; y < ox_min(4, s.OH - oy); y++)
          for (i64 i = 0; i < ox_min(4, s.OW - ox); i++) {
            Px q = {(img * s.OH + oy + y) * s.OW + ox + i, img, oy + y, ox + i};
            const i32 *z = d + (y * 4 + i) * IG_NR;
            i64 j = 0;
            for (; j + VL <= cols; j += VL) epi(q, n * IG_NR + j, ld(z + j), Full{});
            if (j < cols) epi(q, n * IG_NR + j, ld(z + j), Part{int(cols - j)});
          }
      }
    }
  }
}
}  // namespace iwino
