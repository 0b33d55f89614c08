// f32 3x3 convolution by Winograd's minimal filtering: F(2x2,3x3) does 2.25 times and F(4x4,3x3) 4 times fewer
// multiplications than direct convolution. Kernels of 1x3 and 3x1 are transformed along one axis: F(1x4) does 2 times
// fewer.
//
// With a stride of 2 (STEP) the outer taps see the even places alone, as a kernel of two by Winograd's F(m, 2), and the
// middle one the odd places, as it is: for 2x2 outputs that is 25 multiplications instead of 36.
//
// Output tiles of MY x M pixels come from input tiles of TY x T, T = M + 2 (1 where M is 1; 2 M + 1 with the stride),
// overlapping by two (by one). Both are transformed along y and x: V = B' d B, then for each of the P = TY * T points one
// matmul over channels, then Y = A' m A. Blocks of tiles go through all steps while they are in the cache.
//
// In a volume the kernel's planes are more channels: V has those of all planes that an output needs.
//
// With a dilation of D, each D-th row (or column) is an image of its own: tiles take pixels D apart.
//
// Weights: U[group][panel][p][ci][NR] with U = G g G' (p = row * D + column), zero-padded to whole panels. V has the
// channels of a few groups. D is T, but for points that share their weights: the last one's serve all from it on.
// F(2): G = [[1,0,0], [1/2,1/2,1/2], [1/2,-1/2,1/2], [0,0,1]].
// F(4): points 0, a, -a, b, -b, infinity, a = 45/64, b = 91/64 (Barabasz et al., "Error analysis and improving
// the accuracy of Winograd convolution for deep neural networks": points whose products stay near 1 lose
// least): G's row of point q is [1, q, q^2] / product of (q - other points), the last is [0, 0, 1].
//
// F(2) with the stride: points 0, 1, infinity of the outer taps. F(4): a, -a, b, -b, infinity, a = 1/2, b = 5/4.
//
// An infinity or NaN in the input spreads over its whole tile, where direct convolution spreads it over 3x3.
#pragma once
#include "conv.h"

// The one-dimensional transforms: bt makes T values of T, at makes M of T, g (of weights) D of 3 (1 where M is 1); inputs
// s apart, outputs d apart.
template <int M, int STEP = 1> struct Wino;
template <> struct Wino<1> {  // an axis that is left alone
  static constexpr int T = 1, K = 1, D = T;
  OX void g(const vf *w, i64, vf *y, i64) { y[0] = w[0]; }
  OX void bt(const vf *x, i64, vf *y, i64) { y[0] = x[0]; }
  OX void at(const vf *m, i64, vf *y, i64) { y[0] = m[0]; }
};
template <> struct Wino<2> {
  static constexpr int T = 4, K = 3, D = T;
  OX void g(const vf *w, i64 s, vf *y, i64 d) {
    vf e = 0.5f * (w[0] + w[2 * s]), o = 0.5f * w[s];
    y[0] = w[0], y[d] = e + o, y[2 * d] = e - o, y[3 * d] = w[2 * s];
  }
  OX void bt(const vf *x, i64 s, vf *y, i64 d) {
    vf x0 = x[0], x1 = x[s], x2 = x[2 * s], x3 = x[3 * s];
    y[0] = x0 - x2, y[d] = x1 + x2, y[2 * d] = x2 - x1, y[3 * d] = x1 - x3;
  }
  OX void at(const vf *m, i64 s, vf *y, i64 d) {
    vf m0 = m[0], m1 = m[s], m2 = m[2 * s], m3 = m[3 * s];
    y[0] = m0 + m1 + m2, y[d] = m1 - m2 - m3;
  }
};
template <> struct Wino<4> {
  static constexpr int T = 6, K = 3, D = T;
  static constexpr f32 a = 45 / 64.f, b = 91 / 64.f, a2 = a * a, b2 = b * b;
  static constexpr f32 n0 = 1 / (a2 * b2), na = 1 / (2 * a2 * (a2 - b2)), nb = 1 / (2 * b2 * (b2 - a2));
  OX void g(const vf *w, i64 s, vf *y, i64 d) {
    vf w0 = w[0], w1 = w[s], w2 = w[2 * s];
    vf e = na * w0 + (na * a2) * w2, o = (na * a) * w1, f = nb * w0 + (nb * b2) * w2, q = (nb * b) * w1;
    y[0] = n0 * w0, y[d] = e + o, y[2 * d] = e - o, y[3 * d] = f + q, y[4 * d] = f - q, y[5 * d] = w2;
  }
  OX void bt(const vf *x, i64 s, vf *y, i64 d) {
    vf x0 = x[0], x1 = x[s], x2 = x[2 * s], x3 = x[3 * s], x4 = x[4 * s], x5 = x[5 * s];
    vf e = x4 - b2 * x2, o = a * (x3 - b2 * x1), f = x4 - a2 * x2, q = b * (x3 - a2 * x1);
    y[0] = (a2 * b2) * x0 - (a2 + b2) * x2 + x4;
    y[d] = e + o, y[2 * d] = e - o, y[3 * d] = f + q, y[4 * d] = f - q;
    y[5 * d] = (a2 * b2) * x1 - (a2 + b2) * x3 + x5;
  }
  OX void at(const vf *m, i64 s, vf *y, i64 d) {
    vf m0 = m[0], p = m[s] + m[2 * s], q = m[s] - m[2 * s], r = m[3 * s] + m[4 * s], t = m[3 * s] - m[4 * s];
    y[0] = m0 + p + r, y[d] = a * q + b * t, y[2 * d] = a2 * p + b2 * r;
    y[3 * d] = (a2 * a) * q + (b2 * b) * t + m[5 * s];
  }
};

template <> struct Wino<2, 2> {
  static constexpr int T = 5, K = 3, D = 4;
  OX void g(const vf *w, i64 s, vf *y, i64 d) { y[0] = w[0], y[d] = w[0] + w[2 * s], y[2 * d] = w[2 * s], y[3 * d] = w[s]; }
  OX void bt(const vf *x, i64 s, vf *y, i64 d) {
    vf x0 = x[0], x2 = x[2 * s], x4 = x[4 * s];
    y[0] = x0 - x2, y[d] = x2, y[2 * d] = x2 - x4, y[3 * d] = x[s], y[4 * d] = x[3 * s];
  }
  OX void at(const vf *m, i64 s, vf *y, i64 d) {
    vf m1 = m[s];
    y[0] = m[0] + m1 + m[3 * s], y[d] = m1 - m[2 * s] + m[4 * s];
  }
};

template <> struct Wino<4, 2> {
  static constexpr int T = 9, K = 3, D = 6;
  static constexpr f32 a = 1 / 2.f, b = 5 / 4.f, a2 = a * a, b2 = b * b;
  static constexpr f32 na = 1 / (2 * a * (a2 - b2)), nb = 1 / (2 * b * (b2 - a2));
  OX void g(const vf *w, i64 s, vf *y, i64 d) {
    vf e = na * w[0], o = (na * a) * w[2 * s], f = nb * w[0], q = (nb * b) * w[2 * s];
    y[0] = o + e, y[d] = o - e, y[2 * d] = q + f, y[3 * d] = q - f, y[4 * d] = w[2 * s], y[5 * d] = w[s];
  }
  OX void bt(const vf *x, i64 s, vf *y, i64 d) {
    vf x0 = x[0], x2 = x[2 * s], x4 = x[4 * s], x6 = x[6 * s];
    vf e = x6 - b2 * x2, o = a * (x4 - b2 * x0), f = x6 - a2 * x2, q = b * (x4 - a2 * x0);
    y[0] = e + o, y[d] = e - o, y[2 * d] = f + q, y[3 * d] = f - q;
    y[4 * d] = (a2 * b2) * x0 - (a2 + b2) * x4 + x[8 * s];
    y[5 * d] = x[s], y[6 * d] = x[3 * s], y[7 * d] = x[5 * s], y[8 * d] = x[7 * s];
  }
  OX void at(const vf *m, i64 s, vf *y, i64 d) {
    vf p = m[0] + m[s], q = m[0] - m[s], r = m[2 * s] + m[3 * s], t = m[2 * s] - m[3 * s];
    y[0] = p + r + m[5 * s], y[d] = a * q + b * t + m[6 * s], y[2 * d] = a2 * p + b2 * r + m[7 * s];
    y[3 * d] = (a2 * a) * q + (b2 * b) * t + m[4 * s] + m[8 * s];
  }
};

// Points of an axis that share the weights at k.
template <int M, int STEP> OX constexpr int wino_shared(int k) {
  typedef Wino<M, STEP> A;
  return k + 1 == A::D ? A::T - A::D + 1 : 1;
}

// Packs weights at run time: an item is a panel.
template <int MY, int M, int STEP = 1> struct WinoPanels {
  static constexpr i64 P = Wino<MY, STEP>::D * Wino<M, STEP>::D;
  template <class S> static i64 count(const S &s) { return ConvPanels::count(s); }
  template <class S> static i64 bytes(const S &s) { return 4 * count(s) * CONV_NR * P * s.KD * (s.CI / s.G); }

  // U of one plane of one input channel's kernel: points are `apart`.
  OX void transform(const ConvTurned &t, i64 c, f32 *d, i64 apart) {
    constexpr int KY = Wino<MY, STEP>::K, K = Wino<M, STEP>::K, TY = Wino<MY, STEP>::D, T = Wino<M, STEP>::D;
    vf y[TY * K];
    OX_UNROLL for (int j = 0; j < K; j++) {
      vf g[KY];
      OX_UNROLL for (int i = 0; i < KY; i++) g[i] = t.at(c, i * K + j);
      Wino<MY, STEP>::g(g, 1, y + j, K);
    }
    OX_UNROLL for (int i = 0; i < TY; i++) {
      vf g[T];
      Wino<M, STEP>::g(y + i * K, 1, g, 1);
      OX_UNROLL for (int j = 0; j < T; j++) st(d + (i * T + j) * apart, g[j]);
    }
  }

  template <class S> static void pack(const S &s, const ConvWeights &w, i64 first, i64 last, f32 *out) {
    i64 cig = s.CI / s.G, cog = s.CO / s.G, panels = ox_up(cog, CONV_NR), taps = conv_taps(s) / s.KD;
    const ConvExtent e = conv_extent(s, w);
    i64 most = conv_turned(e.squares ? e.span : taps), apart = s.KD * cig * CONV_NR;
    ConvTurned t;
    for (i64 n = first; n < last; n++)
      for (i64 c = 0; c < cig; c += most)
        for (i64 h = 0; h < CONV_NR; h += VL)
          for (i64 k = 0; k < s.KD; k++) {
            i64 o = n % panels * CONV_NR + h, count = ox_min(most, cig - c);
            f32 *d = out + n * P * apart + (k * cig + c) * CONV_NR + h;
            if (o < cog)
              conv_turn(s, w, e, n / panels * cog + o, ox_min(VL, cog - o), c, count, k * taps, (k + 1) * taps, t);
            for (i64 i = 0; i < count; i++, d += CONV_NR)
              if (o < cog) transform(t, i, d, apart);
              else for (i64 q = 0; q < P; q++) st(d + q * apart, vf{});
          }
  }
};

// Tiles and blocks of tiles; groups whose channels are in V together, and how many such sets there are; parts of such
// a set's panels; terms of a sum; channels and panels of a group; strides of V[p][tile][ci] and Mb[tile][p][NR] in floats. The
// strides are off powers of two, so that planes do not fall into the same sets of the L1 cache.
struct WinoPlan {
  i64 ty, tx, tiles, blocks, groups, sets, parts, most, terms, cog, panels, row, plane, mstride;
};

static constexpr i64 WINO_ROOM = VL >= 16 ? 448 * 1024 : 224 * 1024;  // bytes of V and of sums that a block aims at

static constexpr i64 WINO_STATE = 16;  // floats of scratch before everything else: what V holds

// Tiles along an axis of n outputs, and the first output of tile i: of all dilated images in turn.
OX i64 wino_tiles(i64 n, i64 d, i64 m) { return n / (d * m) * d + ox_min(n % (d * m), d); }
OX i64 wino_begin(i64 i, i64 d, i64 m) { return d == 1 ? i * m : i / d * (d * m) + i % d; }

template <int MY, int M, int STEP = 1, class S> static WinoPlan wino_plan(const S &s) {
  constexpr i64 P = Wino<MY, STEP>::T * Wino<M, STEP>::T;
  WinoPlan p = {};
  p.ty = wino_tiles(s.OH, s.DY, MY), p.tx = wino_tiles(s.OW, s.DX, M), p.tiles = s.N * s.OD * p.ty * p.tx;
  p.terms = s.KD * (s.CI / s.G), p.cog = s.CO / s.G, p.panels = ox_up(p.cog, CONV_NR);
  p.groups = ox_up(s.G, CONV_ITEMS), p.sets = ox_up(s.G, p.groups), p.row = cround((s.KD - 1) * s.CI + cround(p.groups * (s.CI / s.G), VL), VL);
  // Few tiles would pass over large weights too often. Where V of a whole map leaves the cache, as with 256 channels of
  // 20 x 20, two blocks of a wide tile's rows take 0.5 to 0.8 of the time.
  i64 all = p.panels * p.groups, least = cround(P <= 16 || p.terms >= 128 ? 24 : CONV_MR, CONV_MR);
  i64 block = ox_min(8 * CONV_MR, WINO_ROOM / (4 * P * (p.row + 2 * CONV_NR)) / CONV_MR * CONV_MR);
  p.blocks = conv_blocks(p.tiles, ox_max(least, block), VL >= 16 ? CONV_MR - 2 : least, all * p.sets);
  if (p.blocks > 1) p.blocks = cround(p.blocks, 2);
  p.parts = ox_max(1, ox_min(all, ox_up(CONV_ITEMS, p.blocks * p.sets)));
  p.most = ox_up(p.tiles, p.blocks);
  p.plane = p.most * p.row + 16, p.mstride = P * CONV_NR + 16;
  return p;
}

// Work items and bytes of scratch. Items next to each other share V, also when a thread gets them in several
// pieces: so each thread's scratch has to be made fresh before the first item (of small maps V is a third of the work).
template <int MY, int M, int STEP = 1, class S> static i64 conv_wino_count(const S &s) {
  WinoPlan p = wino_plan<MY, M, STEP>(s);
  return p.tiles > 0 ? p.blocks * p.sets * p.parts : 0;
}
template <int MY, int M, int STEP = 1, class S> static i64 conv_wino_scratch(const S &s) {
  WinoPlan p = wino_plan<MY, M, STEP>(s);
  constexpr i64 P = Wino<MY, STEP>::T * Wino<M, STEP>::T;
  i64 floats = WINO_STATE + P * p.plane + 2 * (p.most + CONV_MR) * p.mstride + p.row + MY * M * CONV_NR;
  return 4 * floats + 8 * (p.most + 2 * CONV_MR);
}

// One input tile: its pixel (i, j) begins at a[i * T + j]; inside the image at base + i * irs + j * ips.
struct WinoTile { const f32 *base; i64 irs, ips; const f32 *const *a; };

// One vector of channels. What the next tile will newly need (its columns beyond those that overlap) is fetched ahead:
// on maps larger than the cache this is worth 20 %.
template <int MY, int M, int STEP, bool INSIDE, class L>
OX void wino_input_vector(const WinoTile &t, i64 c, f32 *v, i64 plane, L l) {
  constexpr int TY = Wino<MY, STEP>::T, T = Wino<M, STEP>::T;
  vf y[TY * T];
  const f32 *column = t.base + c;
  for (int j = 0; j < T; j++, column += t.ips) {
    vf g[TY];
    OX_UNROLL for (int i = 0; i < TY; i++) g[i] = ldl(INSIDE ? column + i * t.irs : t.a[i * T + j] + c, l);
    if (INSIDE && j >= T - STEP * M)
      OX_UNROLL for (int i = 0; i < TY; i++) __builtin_prefetch(column + i * t.irs + STEP * M * t.ips);
    Wino<MY, STEP>::bt(g, 1, y + j, T);
  }
  for (int i = 0; i < TY; i++) {
    vf g[T];
    Wino<M, STEP>::bt(y + i * T, 1, g, 1);
    OX_UNROLL for (int j = 0; j < T; j++) st(v + (i * T + j) * plane + c, g[j]);
  }
}

// V of one tile.
template <int MY, int M, int STEP, bool INSIDE>
__attribute__((noinline, noclone)) static void wino_input(const WinoTile &tile, i64 CI, f32 *v, i64 plane) {
  const WinoTile t = tile;
  i64 c = 0;
  for (; c + VL <= CI; c += VL) wino_input_vector<MY, M, STEP, INSIDE>(t, c, v, plane, Full{});
  if (c < CI) wino_input_vector<MY, M, STEP, INSIDE>(t, c, v, plane, Part{int(CI - c)});
}

// A vector of a tile's sums Mb[p][NR], transformed back: put(i, v) is called for each row of M pixels.
template <int MY, int M, int STEP, class F> OX void wino_output_vector(const f32 *m, F put) {
  constexpr int TY = Wino<MY, STEP>::T, T = Wino<M, STEP>::T;
  vf y[MY * T];
  for (int j = 0; j < T; j++) {
    vf g[TY];
    OX_UNROLL for (int i = 0; i < TY; i++) g[i] = ld(m + (i * T + j) * CONV_NR);
    Wino<MY, STEP>::at(g, 1, y + j, T);
  }
  for (int i = 0; i < MY; i++) {
    vf g[M];
    Wino<M, STEP>::at(y + i * T, 1, g, 1);
    put(i, g);
  }
}

// Y[i * row + j * step][NR] of one tile from Mb[p][NR].
template <int MY, int M, int STEP>
__attribute__((noinline, noclone)) static void wino_output(const f32 *m, i64 cols, f32 *Y, i64 row, i64 step) {
  for (i64 c = 0; c < cols; c += VL)
    wino_output_vector<MY, M, STEP>(m + c, [=](int i, const vf *g) OX_LAMBDA {
      OX_UNROLL for (int j = 0; j < M; j++) st(Y + (i * row + j * step) * CONV_NR + c, g[j]);
    });
}

// V of tiles [t0, t1), of CI channels from x on, of plane kz of the kernel.
template <int MY, int M, int STEP = 1, class S>
static void wino_block(
    const S &s, const WinoPlan &p, const f32 *x, i64 CI, i64 kz, const f32 *zero, i64 t0, i64 t1, f32 *V) {
  constexpr int TY = Wino<MY, STEP>::T, T = Wino<M, STEP>::T;
  const f32 *a[TY * T];
  i64 tx = t0 % p.tx, ty = t0 / p.tx % p.ty;
  i64 plane = t0 / (p.tx * p.ty);
  for (i64 t = t0; t < t1; t++, V += p.row) {
    i64 y0 = STEP * wino_begin(ty, s.DY, MY) - s.PT, x0 = STEP * wino_begin(tx, s.DX, M) - s.PL;
    i64 z = plane % s.OD * s.SZ - s.PF + kz * s.DZ;
    bool beyond = S::VOLUME && (u64)z >= (u64)s.D;
    WinoTile tile = {x + plane / s.OD * s.ins + z * s.ids + y0 * s.irs + x0 * s.ips, s.DY * s.irs, s.DX * s.ips, a};
    if (!beyond && y0 >= 0 && x0 >= 0 && y0 + (TY - 1) * s.DY < s.H && x0 + (T - 1) * s.DX < s.W) {
      wino_input<MY, M, STEP, true>(tile, CI, V, p.plane);
    } else {
      for (i64 i = 0; i < TY; i++)
        for (i64 j = 0; j < T; j++) {
          bool in = !beyond && (u64)(y0 + i * s.DY) < (u64)s.H && (u64)(x0 + j * s.DX) < (u64)s.W;
          a[i * T + j] = in ? tile.base + i * tile.irs + j * tile.ips : zero;
        }
      wino_input<MY, M, STEP, false>(tile, CI, V, p.plane);
    }
    if (++tx == p.tx) tx = 0, ty++;
    if (ty == p.ty) ty = 0, plane++;
  }
}

// Sums of one panel that wait in Mb to be transformed back: tiles [t0, t0 + n), channels [c, c + cols).
struct WinoPending { const f32 *Mb; i64 t0, n, c, cols; };

// The pixel (y, x) of a plane.
OX Px wino_px(const ConvShape &s, i64 plane, i64 y, i64 x) { return {(plane * s.OH + y) * s.OW + x, plane, y, x}; }
OX PxVolume wino_px(const ConvVolume &s, i64 plane, i64 y, i64 x) {
  return {(plane * s.OH + y) * s.OW + x, plane / s.OD, y, x, plane % s.OD};
}
template <class P> OX P wino_moved(P q, i64 OW, i64 y, i64 x) {
  q.i += y * OW + x, q.y += y, q.x += x;
  return q;
}

// Transforms tiles [i0, i1) of the pending panel back and hands them to the epilogue: whole tiles straight from
// the registers, tiles that leave the image, or channels that fill no vector, by way of Y.
template <int MY, int M, int STEP, class S, class E>
__attribute__((noinline)) static void wino_finish(
    const S &s, const WinoPlan &p, const WinoPending &w, i64 i0, i64 i1, f32 *Y, const E &call) {
  const E epi = call;
  const i64 OW = s.OW, DY = s.DY, DX = s.DX;
  for (i64 i = i0; i < i1; i++) {
    const f32 *m = w.Mb + i * p.mstride;
    i64 t = w.t0 + i;
    i64 y = wino_begin(t / p.tx % p.ty, DY, MY), x = wino_begin(t % p.tx, DX, M);
    const auto q = wino_px(s, t / (p.tx * p.ty), y, x);
    if (y + (MY - 1) * DY < s.OH && x + (M - 1) * DX < OW && w.cols % VL == 0) {
      for (i64 c = 0; c < w.cols; c += VL)
        wino_output_vector<MY, M, STEP>(m + c, [=](int k, const vf *g) OX_LAMBDA {
          OX_UNROLL for (int j = 0; j < M; j++) epi(wino_moved(q, OW, k * DY, j * DX), w.c + c, g[j], Full{});
        });
      continue;
    }
    wino_output<MY, M, STEP>(m, w.cols, Y, M, 1);
    i64 each = DX == 1 ? M : 1;  // neighbours in a row of the result
    for (i64 r = 0; r < MY && y + r * DY < s.OH; r++)
      for (i64 j = 0; j < M && x + j * DX < OW; j += each)
        conv_finish(s, Y + (r * M + j) * CONV_NR, CONV_NR, wino_moved(q, OW, r * DY, j * DX), ox_min(each, OW - x), w.c,
                    w.cols, epi);
  }
}

// The same for epilogues whose lanes are pixels: several tiles are transformed back into a line of the result, for each of
// their rows. With a dilation of D, D tiles are neighbours' neighbours: together they are M * D pixels without a gap.
static constexpr i64 WINO_LINE = 64;  // pixels of such a line at most, and M * D at most (see conv_algorithms.py)

template <int MY, int M, int STEP, class S, class F>
__attribute__((noinline)) static void wino_finish(
    const S &s, const WinoPlan &p, const WinoPending &w, i64 i0, i64 i1, f32 *, const ConvAcross<F> &epi) {
  alignas(64) f32 line[MY * WINO_LINE * CONV_NR];
  const i64 DY = s.DY, D = s.DX, group = ox_max(1, 2 * VL / (M * D)) * D;
  const auto begin = [&](i64 i) { return ox_max(0, i - (w.t0 + i) % p.tx % group); };  // of the group that i is in
  if (i1 < w.n) i1 = begin(i1);
  for (i64 i = begin(i0), n; i < i1; i += n) {
    i64 t = w.t0 + i, tx = t % p.tx, y = wino_begin(t / p.tx % p.ty, DY, MY), x = wino_begin(tx, D, M);
    i64 left = ox_min(i1 - i, p.tx - tx), whole = tx % D ? 0 : ox_min(left, group - tx % group) / D;
    n = whole ? whole * D : ox_min(left, D - tx % D);
    for (i64 k = 0; k < n; k++)
      wino_output<MY, M, STEP>(w.Mb + (i + k) * p.mstride, w.cols, line + (k / D * M * D + k % D) * CONV_NR, WINO_LINE, D);
    const auto q = wino_px(s, t / (p.tx * p.ty), y, x);
    i64 step = whole ? n * M : D, pixels = whole ? n * M : n;  // to the next run of neighbours, and how many they are
    for (i64 r = 0; r < MY && y + r * DY < s.OH; r++)
      for (i64 j = 0; j < (whole ? n : D) * M && x + j < s.OW; j += step)
        conv_finish(s, line + (r * WINO_LINE + j) * CONV_NR, CONV_NR, wino_moved(q, s.OW, r * DY, j),
                    ox_min(pixels, s.OW - x - j), w.c, w.cols, epi);
  }
}

// Work items [first, last); the epilogue is conv_items's. Shape: 3 along the axes that are transformed, 1 along others;
// strides (but that along the depth) STEP, and dilations 1 where that is 2; ics 1, no groups in a volume.
// A panel is transformed back a few tiles at a time between the matmuls of the next one: at once, its stores
// to memory that is not in the cache would fill the store queue (20 % on maps of 144 x 144).
template <int MY, int M, int STEP = 1, ConvWidths W = CONV_BOTH, class S, class E>
static void conv_wino_items(
    const S &s, const f32 *x, const f32 *u, i64 first, i64 last, void *scratch, const E &epi) {
  constexpr int TX = Wino<M, STEP>::T, P = Wino<MY, STEP>::T * TX, DY = Wino<MY, STEP>::D, DX = Wino<M, STEP>::D;
  WinoPlan p = wino_plan<MY, M, STEP>(s);
  i64 &built = *(i64 *)scratch;
  f32 *V = (f32 *)scratch + WINO_STATE, *Mb = V + P * p.plane, *Mb2 = Mb + (p.most + CONV_MR) * p.mstride;
  f32 *zero = Mb2 + (p.most + CONV_MR) * p.mstride, *Y = zero + p.row;
  const f32 **table = (const f32 **)(Y + MY * M * CONV_NR);
  ConvRuns R = conv_runs(1, p.terms);
  for (i64 i = 0; i < p.row; i++) zero[i] = 0;
  WinoPending w = {};
  for (i64 item = first; item < last; item++) {
    i64 have = item / p.parts, part = item % p.parts, block = have / p.sets, g0 = have % p.sets * p.groups;
    i64 t0 = p.tiles * block / p.blocks, n = p.tiles * (block + 1) / p.blocks - t0, groups = ox_min(p.groups, s.G - g0);
    if (built != have) {
      i64 cig = s.CI / s.G;  // the last lanes of a plane's channels are written twice: planes come in order
      for (i64 kz = 0; kz < s.KD; kz++)
        wino_block<MY, M, STEP>(s, p, x + g0 * cig, groups * cig, kz, zero, t0, t0 + n, V + kz * s.CI);
      built = have;
    }
    for (i64 i = 0; i < n + CONV_MR; i++) table[i] = V + ox_min(i, n - 1) * p.row;
    ConvTiles T = conv_tiles(n);
    i64 all = groups * p.panels;
    for (i64 k = all * part / p.parts; k < all * (part + 1) / p.parts; k++) {
      i64 g = k / p.panels, c = k % p.panels * CONV_NR, cols = ox_min(CONV_NR, p.cog - c);
      const f32 *B = u + (g0 * p.panels + k) * DY * DX * p.terms * CONV_NR;
      for (i64 d = 0, q = 0; d < DY * DX; d++, B += p.terms * CONV_NR) {
        const i64 across = wino_shared<M, STEP>(d % DX), uses = wino_shared<MY, STEP>(d / DX) * across;
        for (i64 r = 0; r < uses; r++, q++) {
          const i64 point = (d / DX + r / across) * TX + d % DX + r % across;
          for (i64 t = 0, i = 0; t < T.count; i += T.size(t++)) {
            conv_tile_any<W>(T.size(t), cols, table + i, point * p.plane + g * p.terms, R, B,
                             Mb + i * p.mstride + point * CONV_NR, p.mstride,
                             conv_fetch(B, p.terms, r * T.count + t, uses * T.count));
          }
          wino_finish<MY, M, STEP>(s, p, w, w.n * q / P, w.n * (q + 1) / P, Y, epi);
        }
      }
      w = {Mb, t0, n, (g0 + g) * p.cog + c, cols};
      f32 *swap = Mb;
      Mb = Mb2, Mb2 = swap;
    }
  }
  wino_finish<MY, M, STEP>(s, p, w, 0, w.n, Y, epi);
}
