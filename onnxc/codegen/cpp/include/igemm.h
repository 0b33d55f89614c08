// Exact integer matrix product C[M,N] = A[M,K] B[K,N] in int32 (modulo 2^32), of 8 bit or 16 bit operands, with an
// open reader of A and an open epilogue, as in matmul.h.
//
// A lane of the register tile adds D products in one step: D neighbours along K lie in one 32 bit element.
//   D = 2: pairs of int16. 8 bit operands are widened as they are packed. vpmaddwd, and with VNNI vpdpwssd. A sum
//          of two products wraps in one case only, (-2^15)^2 twice, and then modulo 2^32: as it should.
//   D = 4: four uint8 of A by four int8 of B, vpdpbusd: only where the CPU has VNNI. int8 rows of A are read with
//          128 added; `init`, -128 times the sum of each column of B, makes up for it. Columns of B whose numbers lie in
//          another range of 256 (uint8, less a zero point or not) are packed less a number of their own, which `slope`
//          times the sum of a row of A adds again. Both make up for zero points, too (a constant B has none).
// vpmaddubsw, which saturates at 16 bits, is used nowhere.
//
// B is packed as [ceil(N / NR)][ceil(K / D)][NR][D], zero padded. A block of rows of A is packed as rows of K, zero
// padded to whole elements; it stays in the L2 cache while the panels of B stream past it. Integer sums do not
// depend on their order, so work may be divided in any way.
#pragma once
#include "vec.h"

static constexpr int IG_NV = 2;           // vectors of a panel
static constexpr int IG_NR = IG_NV * VL;  // columns of a panel
#ifdef __AVX512F__
static constexpr int IG_MR = 12;  // most rows of a tile
#else
static constexpr int IG_MR = 6;
#endif
static constexpr i64 IG_A_ROOM = 65536;  // elements (of 32 bits) of a block of A: a quarter of the L2 cache and more
static constexpr i64 IG_MC = 144;        // most rows of a block
static constexpr int IG_AHEAD = 4096;    // elements of B between use and prefetch (as MM_AHEAD of matmul.h)
// Tiles of many rows go without where lanes are 8: hardware sees what comes, and 2 to 4 % of the time is saved.
template <int P> static constexpr bool IG_FETCHES = VL != 8 || P > 1;
static constexpr i64 IG_C = (IG_MC + IG_MR) * IG_NR;  // elements of the sums of a block of rows by one panel
static constexpr i64 IG_SLACK = 32;      // elements that a reader may write behind the last row
static constexpr i64 IG_SPARE = 8;       // rows that a block may have behind its last one (igemm_amx.h)

typedef i32 ig_i32 __attribute__((may_alias));
typedef i16 ig_i16 __attribute__((may_alias));
typedef V<u32> ig_u;

OX i64 ig_panels(i64 N) { return ox_up(N, IG_NR); }

// ---- sums of products, lane by lane ----------------------------------------------------------------------
OX vi ig_add(vi a, vi b) { return (vi)((ig_u)a + (ig_u)b); }
OX vi ig_dot2(vi s, vi a, vi b) {
#if ONNXC_VL == 16 && defined(__AVX512VNNI__)
  return __builtin_ia32_vpdpwssd_v16si(s, a, b);
#elif ONNXC_VL == 8 && (defined(__AVXVNNI__) || defined(__AVX512VNNI__) && defined(__AVX512VL__))
  return __builtin_ia32_vpdpwssd_v8si(s, a, b);
#elif ONNXC_VL == 16 && defined(__AVX512BW__)
  typedef i16 h __attribute__((vector_size(64)));
  return ig_add(s, (vi)__builtin_ia32_pmaddwd512_mask((h)a, (h)b, vi{}, (u16)-1));
#elif ONNXC_VL == 8 && defined(__AVX2__)
  typedef i16 h __attribute__((vector_size(32)));
  return ig_add(s, __builtin_ia32_pmaddwd256((h)a, (h)b));
#elif ONNXC_VL == 4 && defined(__SSE2__)
  typedef i16 h __attribute__((vector_size(16)));
  return ig_add(s, __builtin_ia32_pmaddwd128((h)a, (h)b));
#else
  vi low = ((vi)((ig_u)a << 16) >> 16) * ((vi)((ig_u)b << 16) >> 16), high = (a >> 16) * (b >> 16);
  return ig_add(s, ig_add(low, high));
#endif
}
OX vi ig_dot4(vi s, vi a, vi b) {
#if ONNXC_VL == 16 && defined(__AVX512VNNI__)
  return __builtin_ia32_vpdpbusd_v16si(s, a, b);
#elif ONNXC_VL == 8 && (defined(__AVXVNNI__) || defined(__AVX512VNNI__) && defined(__AVX512VL__))
  return __builtin_ia32_vpdpbusd_v8si(s, a, b);
#else
  OX_UNROLL for (int i = 0; i < 32; i += 8)
    s = ig_add(s, (vi)((ig_u)a << (24 - i) >> 24) * ((vi)((ig_u)b << (24 - i)) >> 24));
  return s;
#endif
}
template <int D> OX vi ig_dot(vi s, vi a, vi b) {
  if constexpr (D == 4) return ig_dot4(s, a, b);
  else return ig_dot2(s, a, b);
}

// ---- runs of A ---------------------------------------------------------------------------------------------
// What an element of A becomes in a packed row.
template <int D> struct ig_packed;
template <> struct ig_packed<2> { typedef ig_i16 type; };
template <> struct ig_packed<4> { typedef u8 type; };
template <int D, class S> OX typename ig_packed<D>::type ig_one(S x, i16 zero = 0) {
  static_assert(D == 2 || sizeof(S) == 1, "quads are of bytes");
  if constexpr (D == 2) return (i16)(x - zero);
  else return (S)-1 < 0 ? (u8)(x ^ 0x80) : (u8)x;
}
// Elements of a step of ig_copy: a register of packed ones.
template <int D> static constexpr int ig_step = (REGISTER < VL * 4 ? REGISTER : VL * 4) / (D == 2 ? 2 : 1);

// n elements from s on into a packed row, of int16 less `zero`. Reads stay below `end`; writes may go on to the next
// multiple of ig_step.
template <int D, class S>
OX void ig_copy(const S *s, i64 n, typename ig_packed<D>::type *d, const S *end, i16 zero = 0) {
  constexpr int W = ig_step<D>;
  typedef S from __attribute__((vector_size(W * sizeof(S))));
  typedef S loose __attribute__((vector_size(W * sizeof(S)), aligned(1), may_alias));
  typedef i16 wide __attribute__((vector_size(W * 2)));
  typedef i16 out __attribute__((vector_size(W * 2), aligned(1), may_alias));
  typedef u8 bytes __attribute__((vector_size(W)));
  typedef u8 out_bytes __attribute__((vector_size(W), aligned(1), may_alias));
  i64 j = 0;
  for (; j < n && s + j + W <= end; j += W) {
    from v = *(const loose *)(s + j);
    if constexpr (D == 2) *(out *)(d + j) = __builtin_convertvector(v, wide) - zero;
    else if constexpr ((S)-1 < 0) *(out_bytes *)(d + j) = (bytes)v ^ (u8)0x80;
    else *(out_bytes *)(d + j) = (bytes)v;
  }
  for (; j < n; j++) d[j] = ig_one<D, S>(s[j], zero);
}
// The elements that fill a row up to whole 32 bit elements.
template <int D> OX void ig_finish_row(typename ig_packed<D>::type *d, i64 K) {
  for (i64 j = K; j % D; j++) d[j] = 0;
}

// Whether rows from p on, `row` bytes apart, are as a packed block has them: quads of uint8 need no change. Not where
// all would fall into one set of the cache, nor from the last to the first: a block may ask for rows behind its end.
template <int D, class S> OX bool ig_is_packed(const S *p, i64 row, i64 K) {
  return D == 4 && (S)-1 > 0 && row >= 0 && ((i64)p | row | K) % 4 == 0 && row % 4096 != 0;
}

// A reader writes rows [m, m + rows) of A to d, `as` elements apart; or it tells where they lie, `as` apart, if they need
// no packing (else null). Rows of elements that lie s apart, of int16 less `zero`:
template <class S> struct IgRows {
  const S *p, *end;
  i64 row, col, K;
  i16 zero = 0;
  template <int D> OX_LAMBDA void read(ig_i32 *d, i64 as, i64 m, i64 rows) const {
    const S *s = p + m * row;
    for (i64 i = 0; i < rows; i++, s += row, d += as) {
      auto *o = (typename ig_packed<D>::type *)d;
      if (col == 1) ig_copy<D, S>(s, K, o, end, zero);
      else for (i64 k = 0; k < K; k++) o[k] = ig_one<D, S>(s[k * col], zero);
      ig_finish_row<D>(o, K);
    }
  }
  template <int D> OX_LAMBDA const ig_i32 *in_place(i64 m, i64 rows, i64 &as) const {
    const S *at = p + m * row;
    if (!ig_is_packed<D>(at, row, K) || col != 1 || at + (rows - 1) * row + K > end) return nullptr;
    as = row / 4;
    return (const ig_i32 *)at;
  }
};

// ---- packing of B at run time -------------------------------------------------------------------------------
// B as it lies, b(k, n) = p[k * sk + n * sn], and what A and B are less. Pairs are packed less `zero`; of quads `init` and
// `slope` take zero points off the sums, which begin with
//     K * zero_a * zero_b - zero_a * (sum of a column of B)
// and have -zero_b times the sum of a row of A added, all of it by the bytes that are multiplied: uint8 of A, int8 of B.
template <class S> struct IgColumns {
  const S *p;
  i64 sk, sn, K, N;
  i32 zero_a, zero;
  static constexpr u32 flip = (S)-1 < 0 ? 0 : 0x80;  // of a byte: uint8 as int8, 128 less
  OX_LAMBDA u32 slope() const { return (u32)((i32)flip - zero); }
  OX_LAMBDA u32 first(u32 sum) const { return (u32)zero_a * ((u32)K * (u32)(zero - (i32)flip) - sum); }
};
// Up to D neighbours along K as one element: of VL columns that lie side by side, and of one.
template <int D, class S> OX vi ig_join(const IgColumns<S> &b, const S *s, i64 have) {
  constexpr int bits = 32 / D;
  ig_u x = {};
  OX_UNROLL for (int i = 0; i < D; i++)
    if (i < have) {
      ig_u v = (ig_u)conv<i32, S>(ld(s + i * b.sk));
      x |= ((D == 2 ? v - (u32)b.zero : v ^ b.flip) & ((1u << bits) - 1)) << i * bits;
    }
  return (vi)x;
}
template <int D, class S> OX i32 ig_join_one(const IgColumns<S> &b, const S *s, i64 have) {
  constexpr int bits = 32 / D;
  u32 x = 0;
  if (D == 4 && b.sk == 1 && have >= D) {
    __builtin_memcpy(&x, s, 4);
    return (i32)(x ^ b.flip * 0x01010101u);
  }
  OX_UNROLL for (int i = 0; i < D; i++)
    if (i < have) {
      u32 v = (u32)(i32)s[i * b.sk];
      x |= ((D == 2 ? v - (u32)b.zero : v ^ b.flip) & ((1u << bits) - 1)) << i * bits;
    }
  return (i32)x;
}
// Panels [p0, p1) into d, and for quads what the sums of their columns begin with into init.
template <int D, class S> static void ig_pack_b(const IgColumns<S> &b, i64 p0, i64 p1, ig_i32 *d, ig_i32 *init) {
  const i64 KP = ox_up(b.K, D);
  const vi ones = bc<i32>(0x01010101);
  for (i64 p = p0; p < p1; p++) {
    i64 n0 = p * IG_NR, w = ox_min(b.N - n0, IG_NR);
    const ig_i32 *const panel = d;
    for (i64 q = 0; q < KP; q++, d += IG_NR) {
      const S *s = b.p + D * q * b.sk + n0 * b.sn;
      i64 have = b.K - D * q;
      if (b.sn == 1 && w == IG_NR && have >= D) {
        OX_UNROLL for (int j = 0; j < IG_NR; j += VL) st((i32 *)d + j, ig_join<D>(b, s + j, D));
      } else {
        for (i64 j = 0; j < IG_NR; j++) d[j] = j < w ? ig_join_one<D>(b, s + j * b.sn, have) : 0;
      }
    }
    if constexpr (D == 4) {
      vi sums[IG_NV] = {};
      for (i64 q = 0; q < KP; q++)
        OX_UNROLL for (int j = 0; j < IG_NV; j++)
          sums[j] = ig_dot4(sums[j], ones, ld((const i32 *)panel + q * IG_NR + j * VL));
      for (int j = 0; j < IG_NR; j++, init++) *init = (i32)b.first((u32)sums[j / VL][j % VL]);
    }
  }
}
// Elements of all of B packed, with what sums begin with behind it.
OX i64 ig_whole(i64 N, i64 K, int D) { return ig_panels(N) * IG_NR * (ox_up(K, D) + (D == 4)); }

// For products whose rows are one block, each task packs the panels that it is about to use.
template <int D, class S> static void ig_pack_now(const void *b, i64 p, i64 np, ig_i32 *room, ig_i32 *init) {
  const IgColumns<S> c = *(const IgColumns<S> *)b;
  ig_pack_b<D>(c, p, p + np, room, init);
}

// ---- register tile ------------------------------------------------------------------------------------------
// c[i][j] = init[j] + sum over k of a[i * as + k] . b[k * NR + j], for R rows and P panels (bs, cs and NR apart).
template <int D, int R, int P>
static __attribute__((noinline)) void ig_tile(
    i64 kc, const ig_i32 *a, i64 as, const i32 *b, i64 bs, const i32 *init, i32 *c, i64 cs) {
  vi s[R][P * IG_NV];
  OX_UNROLL for (int i = 0; i < R; i++)
    OX_UNROLL for (int j = 0; j < P * IG_NV; j++) s[i][j] = init ? ld(init + j * VL) : vi{};
  _Pragma("GCC unroll 4") for (i64 k = 0; k < kc; k++, b += IG_NR) {
    vi v[P * IG_NV];
    OX_UNROLL for (int q = 0; q < P; q++)
      OX_UNROLL for (int j = 0; j < IG_NV; j++) {
        const i32 *x = b + q * bs + j * VL;
        if (IG_FETCHES<P> && j * VL % 16 == 0) __builtin_prefetch(x + IG_AHEAD / P, 0, P > 1 ? 3 : 2);
        v[q * IG_NV + j] = ld(x);
      }
    OX_UNROLL for (int i = 0; i < R; i++) {
      vi x = bc<i32>(a[i * as + k]);
      OX_UNROLL for (int j = 0; j < P * IG_NV; j++) s[i][j] = ig_dot<D>(s[i][j], x, v[j]);
    }
  }
  OX_UNROLL for (int i = 0; i < R; i++)
    OX_UNROLL for (int j = 0; j < P * IG_NV; j++) st(c + j / IG_NV * cs + i * IG_NR + j % IG_NV * VL, s[i][j]);
}
// Tiles exist for 1, 2, 4, 6.. rows: an odd row more than that is computed on a row that is not used.
OX i64 ig_even(i64 rows) { return rows > 1 ? (rows + 1) & ~1 : rows; }
static constexpr i64 IG_MOST_WIDE = 4;
OX int ig_wide(i64 rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }  // few rows: several panels at once
template <int D, int R>
static __attribute__((noinline)) void ig_tiles(i64 r, int wide, i64 kc, const ig_i32 *a, i64 as, const i32 *b, i64 bs,
                                               const i32 *init, i32 *c, i64 cs) {
  if (r < R) {
    if constexpr (R > 1) ig_tiles<D, (R > 2 ? R - 2 : 1)>(r, wide, kc, a, as, b, bs, init, c, cs);
  } else if (R <= 2 && wide > 1) {
    if constexpr (R <= 2) ig_tile<D, R, (R == 1 ? 4 : 2)>(kc, a, as, b, bs, init, c, cs);
  } else {
    ig_tile<D, R, 1>(kc, a, as, b, bs, init, c, cs);
  }
}

// Any number of rows by one panel.
template <int D>
static void ig_strip(i64 rows, i64 kc, const ig_i32 *a, i64 as, const i32 *b, const i32 *init, i32 *c) {
  for (i64 n; rows > 0; rows -= n, a += n * as, c += n * IG_NR) {
    n = ox_min(IG_MR, rows > 1 ? rows & ~1 : 1);
    ig_tiles<D, IG_MR>(n, 1, kc, a, as, b, 0, init, c, 0);
  }
}

#include "igemm_amx.h"

// ---- blocks ---------------------------------------------------------------------------------------------------
// One product. The reader and the epilogue are called through pointers, so that the loops around the tiles are
// compiled once for all products of a file; the epilogue once for a block of rows by a panel.
struct IgRun {
  void (*read)(const void *a, ig_i32 *d, i64 as, i64 m, i64 rows);
  const ig_i32 *(*in_place)(const void *a, i64 m, i64 rows, i64 &as);
  void (*finish)(const void *epi, const i32 *c, i64 m, i64 rows, i64 n, i64 N);
  const void *a, *epi;
  const i32 *bp, *init, *slope;  // the latter two may be null
  i64 N, K;
  i64 rise = IG_NR;  // between the slopes of two panels: 0 where all are alike
  void (*pack)(const void *b, i64 p, i64 np, ig_i32 *room, ig_i32 *init) = nullptr;  // null: all of B is in bp
  const void *b = nullptr;
};
template <int D, class A> static void ig_read(const void *a, ig_i32 *d, i64 as, i64 m, i64 rows) {
  const A copy = *(const A *)a;
  copy.template read<D>(d, as, m, rows);
}
template <int D, class A> static const ig_i32 *ig_in_place(const void *a, i64 m, i64 rows, i64 &as) {
  return ((const A *)a)->template in_place<D>(m, rows, as);
}
template <class E> static void ig_finish(const void *epi, const i32 *c, i64 m, i64 rows, i64 n, i64 N) {
  const E copy = *(const E *)epi;
  for (i64 end = ox_min(N, n + IG_NR); n < end; n += VL, c += VL) {
    if (n + VL <= N)
      for (i64 i = 0; i < rows; i++) copy(m + i, n, ld(c + i * IG_NR), Full{});
    else
      for (i64 i = 0; i < rows; i++) copy(m + i, n, ld(c + i * IG_NR), Part{(int)(N - n)});
  }
}

// Elements between packed rows: not a multiple of 4096 bytes, which would all fall into one set of the cache.
OX i64 ig_row(i64 K, int D) { return ox_up(ox_up(K, D), 16) * 16 + 16; }
OX i64 ig_rows(i64 K, int D) { return ox_max(IG_MR, ox_min(IG_MC, IG_A_ROOM / ig_row(K, D) / IG_MR * IG_MR)); }
// Bytes of scratch of a thread; where B is packed by tasks, ig_room more.
OX i64 ig_room(i64 K, int D) { return IG_MOST_WIDE * IG_NR * (ox_up(K, D) + 1) * 4; }
OX i64 ig_scratch(i64 K, int D) {
  return ox_up(((ig_rows(K, D) + IG_SPARE) * ig_row(K, D) + IG_SLACK + IG_C) * 4, 64) * 64;
}

// Sums of the bytes of packed rows; and what they add to the sums of a panel.
static __attribute__((noinline)) void ig_row_sums(const ig_i32 *a, i64 as, i64 rows, i64 kc, i32 *sums) {
  const vi ones = bc<i32>(0x01010101);
  for (i64 i = 0; i < rows; i++, a += as) {
    vi s = {};
    i64 k = 0;
    for (; k + VL <= kc; k += VL) s = ig_dot4(s, ld((const i32 *)a + k), ones);
    if (k < kc) s = ig_dot4(s, ldn((const i32 *)a + k, (int)(kc - k)), ones);
    u32 sum = 0;
    for (int j = 0; j < VL; j++) sum += (u32)s[j];
    sums[i] = (i32)sum;
  }
}
static __attribute__((noinline)) void ig_add_rows(const i32 *sums, i64 rows, const i32 *slope, i32 *c) {
  ig_u by[IG_NV];
  OX_UNROLL for (int j = 0; j < IG_NV; j++) by[j] = (ig_u)ld(slope + j * VL);
  for (i64 i = 0; i < rows; i++, c += IG_NR)
    OX_UNROLL for (int j = 0; j < IG_NV; j++) st(c + j * VL, (vi)((ig_u)ld(c + j * VL) + by[j] * (u32)sums[i]));
}

// Rows [m0, m1) by panels [p0, p1) of C.
template <int D>
static __attribute__((noinline)) void ig_block(const IgRun &x, i64 m0, i64 m1, i64 p0, i64 p1, void *scratch) {
  i64 KP = ox_up(x.K, D), mc = ig_rows(x.K, D), nm = ox_up(m1 - m0, mc);
  i32 *c = (i32 *)scratch;
  ig_i32 *const packed = (ig_i32 *)scratch + IG_C, *const room = (ig_i32 *)((char *)scratch + ig_scratch(x.K, D));
  for (i64 im = 0; im < nm; im++) {
    i64 mb = m0 + ox_cut(m1 - m0, nm, im), mn = m0 + ox_cut(m1 - m0, nm, im + 1) - mb, me = ig_even(mn);
    const IgxPlan plan = D == 4 ? igx_plan(mn, KP, p1 - p0) : IgxPlan{};
    if (plan.parts) me = plan.parts * plan.rows;
    i64 as = ig_row(x.K, D);
    const ig_i32 *at = x.in_place(x.a, mb, me, as);
    if (!at) {
      x.read(x.a, packed, as, mb, mn);
      for (i64 i = mn * as; i < me * as; i++) packed[i] = 0;
      at = packed;
    }
    i32 sums[IG_MC + IG_MR];
    if (D == 4 && x.slope) ig_row_sums(at, as, mn, KP, sums);
    i64 nt = ox_up(me, IG_MR);
    int wide = ig_wide(mn);
    if (plan.parts) igx_configure(plan.rows);
    for (i64 p = p0, np; p < p1; p += np) {
      np = p + wide <= p1 ? wide : 1;
      const i32 *b = x.bp + p * IG_NR * KP, *init = x.init ? x.init + p * IG_NR : nullptr;
      if (x.pack) {
        ig_i32 *const sums = room + IG_MOST_WIDE * IG_NR * KP;
        x.pack(x.b, p, np, room, sums);
        b = (const i32 *)room, init = D == 4 ? (const i32 *)sums : nullptr;
      }
      if (plan.parts) {
        igx_panel(plan, KP, at, as, b, init, c);
      } else {
        for (i64 it = 0, r, r0 = 0; it < nt; it++, r0 += r) {
          r = me == 1 ? 1 : ox_cut(me / 2, nt, it + 1) * 2 - r0;
          ig_tiles<D, IG_MR>(r, (int)np, KP, at + r0 * as, as, b, IG_NR * KP, init, c + r0 * IG_NR, me * IG_NR);
        }
      }
      for (i64 j = 0; j < np; j++) {
        if (D == 4 && x.slope) ig_add_rows(sums, mn, x.slope + (p + j) * x.rise, c + j * me * IG_NR);
        x.finish(x.epi, c + j * me * IG_NR, mb, mn, (p + j) * IG_NR, x.N);
      }
    }
    if (plan.parts) igx_release();
  }
}

// ---- division of work -------------------------------------------------------------------------------------------
// A grid of gm row ranges by gp panel ranges, of two million products each and more: the larger side is divided.
struct IgGrid { i64 gm, gp, tasks; };
static __attribute__((noinline)) IgGrid ig_grid(i64 M, i64 N, i64 K, i64 threads) {
  i64 P = ig_panels(N), worth = K * P * IG_NR * (M + 8) / 2000000, n = ox_min(threads * 4, worth);
  IgGrid g = {1, 1, 1};
  while (2 * g.tasks <= n) {
    bool rows = M / g.gm >= 4 * IG_MR, panels = P / g.gp >= 2;
    if (!rows && !panels) break;
    if (rows && (!panels || M / g.gm >= N / g.gp)) g.gm *= 2;
    else g.gp *= 2;
    g.tasks = g.gm * g.gp;
  }
  if (M <= 0 || N <= 0) g.tasks = 0;
  return g;
}
// Whether tasks pack B themselves: each panel for one block of rows.
OX bool ig_packs(const IgGrid &g, i64 M, i64 K, int D) { return g.gm == 1 && M <= ig_rows(K, D); }
// Task t. bp: packed B; init and slope: null or one number for each column of the panels. epi(m, n, vi sums, lanes).
template <int D, class A, class E>
OX void ig_task(const IgGrid &g, i64 t, const A &a, const i32 *bp, const i32 *init, const i32 *slope, i64 M, i64 N, i64 K,
                void *scratch, const E &epi) {
  i64 im = t / g.gp, ip = t % g.gp, P = ig_panels(N);
  IgRun run = {ig_read<D, A>, ig_in_place<D, A>, ig_finish<E>, &a, &epi, bp, init, slope, N, K};
  ig_block<D>(run, ox_cut(M, g.gm, im), ox_cut(M, g.gm, im + 1), ox_cut(P, g.gp, ip), ox_cut(P, g.gp, ip + 1), scratch);
}
// The same with B packed at run time: all of it before, at bp, or by the tasks.
template <int D, class A, class S, class E>
OX void ig_task(const IgGrid &g, i64 t, const A &a, const i32 *bp, const IgColumns<S> &b, i64 M, i64 N, i64 K,
                void *scratch, const E &epi) {
  i64 im = t / g.gp, ip = t % g.gp, P = ig_panels(N);
  i32 slope[IG_NR];
  for (int j = 0; j < IG_NR; j++) slope[j] = (i32)b.slope();
  IgRun run = {ig_read<D, A>, ig_in_place<D, A>, ig_finish<E>, &a, &epi, bp, D == 4 ? bp + P * IG_NR * ox_up(K, D) : nullptr,
               D == 4 && b.slope() ? slope : nullptr, N, K, 0, ig_packs(g, M, K, D) ? ig_pack_now<D, S> : nullptr, &b};
  ig_block<D>(run, ox_cut(M, g.gm, im), ox_cut(M, g.gm, im + 1), ox_cut(P, g.gp, ip), ox_cut(P, g.gp, ip + 1), scratch);
}
