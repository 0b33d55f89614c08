// Matrix product C[M,N] = A[M,K] B[K,N] with an open prologue (how A is read) and an open epilogue (what
// happens to every finished vector of C, stores included). One code for f32, f64, i32 and the rest.
//
//   auto epi = [=](i64 m, i64 n, vf v, auto lanes) OX_LAMBDA {
//     stl(C + m * N + n, v + ldl(bias + n, lanes), lanes);
//   };
//   MmGrid g = mm_grid(M, N, K, threads);      // any thread count gives the same bits
//   for (i64 t = 0; t < g.tasks; t++)          // a pool runs the tasks in any order
//     mm_task<f32>(g, t, MmRows<f32>{A, lda}, Bp, M, N, K, scratch_of_this_thread, epi, MmLines{C, 4 * N, 4});
//
// Three levels. A register tile of R rows (1 to MM_MR) by one panel of NR = 2 VL columns: 2 R accumulators
// that start at zero and run over one K block of at most MM_KC. A block of A rows stays in L2 while the
// panels of B stream past it (or the other way round: see MM_SWEPT). Where the rows of A are contiguous, tiles read
// them where they lie (to copy them costs 3 to 10 %), the last one of an odd number of rows from the row above it on;
// what else A may be is read into scratch first, in rows of constant stride. Partial sums of the K blocks are added
// in scratch: fresh accumulators for every block keep the rounding error of long sums low. The order of additions
// of an element depends on K alone: not on tile, task, thread count or M.
//
// B is packed as [ceil(N/NR)][K][NR], zero padded:   CPU level  VL  NR  MR
// the compiler packs constants with the same NR.     AVX-512    16  32  12
// If half of the last panel is enough, it is         AVX, AVX2   8  16   6
// [K][VL]. Few rows of A read B where it lies.       other       4   8   6
#pragma once
#include "vec.h"

static constexpr int MM_NV = 2;             // vectors of a panel
static constexpr int MM_NR = MM_NV * VL;    // columns of a panel
#ifdef __AVX512F__
static constexpr int MM_MR = 12;            // most rows of a tile: even; 24 of 32 registers are sums
static constexpr i64 MM_A_ROOM = 163840;    // elements of packed A: about half of the L2 cache
#else
static constexpr int MM_MR = 6;
static constexpr i64 MM_A_ROOM = 65536;
#endif
// Longest chain of additions, and what a tile goes through of a panel of B.
#if OX_SUMS_STAY
static constexpr int MM_KC = 384;
#else
static constexpr int MM_KC = 256;
#endif
static constexpr int MM_AS = MM_KC + 16;    // row stride of a packed block of A
static constexpr int MM_MC = 144;           // most rows of a block that is not swept in place
static constexpr int MM_GROUP = 64;         // panels that all blocks of rows use in turn, unless swept
// Elements of B between use and prefetch. Of many rows it stops in the second level of the cache, since the first is full
// of what is multiplied: with 8 lanes, which read B twice as often as 16, this takes up to a tenth of the time.
static constexpr int MM_AHEAD = 4096;
// Broad tiles: 6 rows by two panels, where rows are many. For 24 products they load 10 times where 12 rows by one panel
// load 14 times, fetch ahead once for several k, and rows that share sets of the cache fit into 8 lines of each.
// For Intel's cores, see _BROAD in runtime/cpu.py.
#if defined(ONNXC_BROAD_TILES) && defined(__AVX512F__)
static constexpr bool MM_BROAD = true;
#else
static constexpr bool MM_BROAD = false;
#endif
// Swept panels: with many rows a strip of them takes MM_SWEPT panels in turn, of as many terms as MM_SWEPT_ROOM elements of
// B hold, which stay in the second level of the cache for all strips. The other order keeps one panel in the first level,
// where it is in the way of what else is read, and has to fetch the next by instructions in the tiles. With 8 lanes, where
// two threads of a core share its units and its caches, this takes 0.90 to 0.97 of the time, alone on a core 0.96 to 1.
#if OX_SUMS_STAY
static constexpr int MM_SWEPT = 4;
#else
static constexpr int MM_SWEPT = 0;
#endif
static constexpr i64 MM_SWEPT_FROM = 48, MM_SWEPT_ROOM = 49152;
static_assert(MM_SWEPT * MM_NR * MM_KC <= MM_SWEPT_ROOM, "a K block of swept panels fits");
static_assert(!MM_SWEPT || MM_MR == 6, "swept tiles have 4 or 6 rows");
static constexpr int MM_BROAD_FROM = MM_MR + 1;  // rows: fewer fit into a tile of one panel, which reads B once
static constexpr i64 MM_STAYS = 1 << 20;     // bytes of B
static constexpr int MM_SHORT = 32;         // up to so many terms, a sum is short (see mm_short)
static constexpr int MM_FEW = 2 * MM_MR;    // up to so many rows of A, packing B costs more than it gains
static constexpr i64 MM_NEAR = 8192;        // nor does it gain where B is so small that it stays in L1
static constexpr i64 MM_C_ROOM = MM_MC * MM_NR * 16;         // partial sums
static constexpr i64 MM_SCRATCH = MM_A_ROOM + MM_C_ROOM;     // elements of scratch of a thread
static_assert(MM_MC * MM_AS <= MM_A_ROOM && MM_MC % 2 == 0 && MM_MR % 2 == 0, "a K block of A fits");

// Part i of n nearly equal parts of x starts here (part n starts at x).
OX i64 mm_panels(i64 N) { return ox_up(N, MM_NR); }
// Columns of the last panel, if it is not whole; elements of packed B.
OX i64 mm_last(i64 N) { return N % MM_NR > VL ? MM_NR : N % MM_NR ? VL : 0; }
OX i64 mm_packed(i64 K, i64 N) { return (N / MM_NR * MM_NR + mm_last(N)) * K; }

// ---- transpose: W registers of W lanes, log2(W) rounds of interleaving ---------------------------------
template <class T, int... I> OX VR<T> mm_lo(VR<T> a, VR<T> b, lane_list<I...>) {
  return __builtin_shufflevector(a, b, (I / 2 + I % 2 * VRL<T>)...);
}
template <class T, int... I> OX VR<T> mm_hi(VR<T> a, VR<T> b, lane_list<I...>) {
  return __builtin_shufflevector(a, b, ((I + VRL<T>) / 2 + I % 2 * VRL<T>)...);
}
// dst[i * ds + j] = src[j * ss + i], i and j under W.
template <class T> static __attribute__((noinline)) void mm_transpose(const T *src, i64 ss, T *dst, i64 ds) {
  constexpr int W = VRL<T>;
  typename count_to<W>::type s;
  VR<T> a[W], b[W];
  OX_UNROLL for (int i = 0; i < W; i++) a[i] = ldr(src + i * ss);
  OX_UNROLL for (int r = 1; r < W; r *= 2) {
    OX_UNROLL for (int i = 0; i < W / 2; i++) {
      b[2 * i] = mm_lo<T>(a[i], a[i + W / 2], s);
      b[2 * i + 1] = mm_hi<T>(a[i], a[i + W / 2], s);
    }
    OX_UNROLL for (int i = 0; i < W; i++) a[i] = b[i];
  }
  OX_UNROLL for (int i = 0; i < W; i++) str(dst + i * ds, a[i]);
}
// The same for ni by nj elements of any count and strides: dst[i * ds + j] = src[j * ss + i * si].
template <class T> static void mm_gather(const T *src, i64 ss, i64 si, T *dst, i64 ds, i64 ni, i64 nj) {
  constexpr int W = VRL<T>;
  for (i64 j0 = 0; j0 < nj; j0 += W) {
    for (i64 i0 = 0; i0 < ni; i0 += W) {
      if (si == 1 && i0 + W <= ni && j0 + W <= nj) {
        mm_transpose(src + j0 * ss + i0, ss, dst + i0 * ds + j0, ds);
        continue;
      }
      for (i64 i = i0; i < ox_min(ni, i0 + W); i++)
        for (i64 j = j0; j < ox_min(nj, j0 + W); j++) dst[i * ds + j] = src[j * ss + i * si];
    }
  }
}

// ---- packing -------------------------------------------------------------------------------------------
// Panels [p0, p1) of b(k, n) = b[k * sk + n * sn] into bp (the start of the whole packed matrix).
// Any split of the panels may run in parallel.
template <class T> static void mm_pack_b(const T *b, i64 sk, i64 sn, i64 K, i64 N, T *bp, i64 p0, i64 p1) {
  static constexpr i64 G = 8, KB = 64;  // panels that share one pass over the rows, rows of a pass
  for (i64 g = p0; g < p1; g += G) {
    for (i64 k0 = 0; k0 < K; k0 += KB) {
      i64 k1 = ox_min(K, k0 + KB);
      for (i64 p = g; p < ox_min(p1, g + G); p++) {
        i64 n0 = p * MM_NR, w = ox_min(N - n0, MM_NR), pitch = w > VL ? MM_NR : VL;
        T *d = bp + n0 * K + k0 * pitch;
        const T *s = b + k0 * sk + n0 * sn;
        if (sn == 1 && w == MM_NR) {
          for (i64 k = k0; k < k1; k++, d += MM_NR, s += sk)
            OX_UNROLL for (int j = 0; j < MM_NV; j++) st(d + j * VL, ld(s + j * VL));
          continue;
        }
        if (sn == 1) {
          for (i64 k = k0; k < k1; k++, d += pitch, s += sk)
            for (i64 j = 0; j < w; j += VL) st(d + j, j + VL <= w ? ld(s + j) : ldn(s + j, (int)(w - j)));
          continue;
        }
        if (w < pitch)
          for (i64 i = 0; i < (k1 - k0) * pitch; i += VL) st(d + i, V<T>{});
        mm_gather(s, sn, sk, d, pitch, k1 - k0, w);
      }
    }
  }
}

// Readers of A: write rows [m, m + rows), columns [k, k + kc) to d in rows of MM_AS.
// MmRows: rows are contiguous. MmStrided: a(m, k) = p[m * sm + k * sk]. MmMap: f(m, k, lanes) gives the
// vector at (m, k..), computed as it is packed (a fused prologue).
template <class T> struct MmRows {
  static constexpr bool strips = true;
  const T *p;
  i64 lda;
  OX_LAMBDA void operator()(T *d, i64 m, i64 rows, i64 k, i64 kc) const {
    const T *s = p + m * lda + k;
    for (i64 i = 0; i < rows; i++, s += lda, d += MM_AS) {
      i64 j = 0;
      for (; j + VL <= kc; j += VL) {
        __builtin_prefetch(s + 4 * lda + j, 0, 2);  // rows are short runs that hardware does not foresee
        st(d + j, ld(s + j));
      }
      if (j < kc) st(d + j, ldn(s + j, (int)(kc - j)));
    }
  }
};
template <class T> struct MmStrided {
  static constexpr bool strips = false;
  const T *p;
  i64 sm, sk;
  OX_LAMBDA void operator()(T *d, i64 m, i64 rows, i64 k, i64 kc) const {
    if (sk == 1)
      MmRows<T>{p, sm}(d, m, rows, k, kc);
    else
      mm_gather(p + m * sm + k * sk, sk, sm, d, MM_AS, rows, kc);
  }
};
template <class T, class F> struct MmMap {
  static constexpr bool strips = true;
  F f;
  OX_LAMBDA void operator()(T *d, i64 m, i64 rows, i64 k, i64 kc) const {
    for (i64 i = 0; i < rows; i++, d += MM_AS) {
      i64 j = 0;
      for (; j + VL <= kc; j += VL) st(d + j, f(m + i, k + j, Full{}));
      if (j < kc) st(d + j, f(m + i, k + j, Part{(int)(kc - j)}));
    }
  }
};
template <class T, class F> OX MmMap<T, F> mm_map(F f) { return {f}; }
// Rows that a tile can read where they lie, and what they are apart.
template <class T, class A> OX const T *mm_in_place(const A &) { return nullptr; }
template <class T> OX const T *mm_in_place(const MmRows<T> &a) { return a.p; }
template <class T, class A> OX i64 mm_pitch(const A &) { return 0; }
template <class T> OX i64 mm_pitch(const MmRows<T> &a) { return a.lda; }

// B as tiles read it: packed, and where rows is set, in place (its rows are contiguous, ld apart) as far as whole
// panels go, or to the end by one row of A. Then mm_packs(M, N, K, true) is the first panel that must be packed.
template <class T> struct MmRight {
  const T *packed;
  const T *rows = nullptr;
  i64 ld = 0;
  MmRight(const T *p) : packed(p) {}
  MmRight(const T *p, const T *r, i64 l) : packed(p), rows(r), ld(l) {}
};
OX i64 mm_packs(i64 M, i64 N, i64 K, bool in_place) {
  return !in_place ? 0 : M == 1 ? mm_panels(N) : M <= MM_FEW || K * N <= MM_NEAR ? N / MM_NR : 0;
}

// ---- register tile -------------------------------------------------------------------------------------
// One tile: c[i][j] (+)= sum over k of a[i * as + k] * b[k * bk + j]. Panels are bs apart in B, cs in C.
template <class T> struct MmTile {
  const T *a;
  i64 as;
  const T *b;
  i64 bk, bs;
  const T *near;      // what is fetched meanwhile, as wide as a row of B: `step` elements further with each k; null of
                      // few rows by several panels, where all of B is at hand
  i64 step;
  T *c;
  i64 cs;
  bool add;
};
// For R rows and P panels of NV vectors.
template <class T, int R, int P, int NV, bool FETCH = true>
static __attribute__((noinline)) void mm_tile(i64 kc, const MmTile<T> &x) {
  constexpr int W = VRL<T>, N = NV * VL / W;  // registers of a row of B in a panel
  VR<T> s[R][P * N];
  const i64 as = x.as, bk = x.bk, bs = x.bs, step = x.step;
  const T *b = x.b, *near = x.near;
  // A pointer for every third row; an index reaches the two after it. Hidden from the compiler, which would
  // make a pointer (or a spill) for each.
  const T *row[(R + 2) / 3];
  OX_UNROLL for (int i = 0; i < R; i += 3) {
    row[i / 3] = x.a + i * as;
    asm("" : "+r"(row[i / 3]));
  }
  OX_UNROLL for (int i = 0; i < R; i++)
    OX_UNROLL for (int j = 0; j < P * N; j++) s[i][j] = VR<T>{};
  _Pragma("GCC unroll 4") for (i64 k = 0; k < kc; k++, b += bk, near += step) {
    VR<T> v[P * N];
    OX_UNROLL for (int q = 0; q < P; q++)
      OX_UNROLL for (int j = 0; j < N; j++) {
        const T *y = b + q * bs + j * W;
        if (FETCH && j * W * sizeof(T) % 64 == 0) __builtin_prefetch(near + q * bs + j * W, 0, P > 1 ? 3 : 2);
        v[q * N + j] = ldr(y);
      }
    OX_UNROLL for (int i = 0; i < R; i++)
      OX_UNROLL for (int j = 0; j < P * N; j++) s[i][j] += v[j] * row[i / 3][i % 3 * as + k];
  }
  OX_UNROLL for (int i = 0; i < R; i++)
    OX_UNROLL for (int j = 0; j < P * N; j++) {
      T *d = x.c + j / N * x.cs + i * MM_NR + j % N * W;
      str(d, x.add ? ldr(d) + s[i][j] : s[i][j]);
    }
}

// The same for R rows and two panels of a packed B, where tiles share the fetching of what they use next: a line or so
// for four k. Every third row has a pointer, moved on with k; the others are `one` and `two` bytes further.
template <class T, int R> static __attribute__((noinline)) void mm_broad_tile(i64 kc, const MmTile<T> &x) {
  constexpr int W = VRL<T>, N = MM_NR / W, SOME = 4, LINE = 64 / sizeof(T);
  VR<T> s[R][2 * N];
  const i64 bs = x.bs, lines = ox_up(SOME * x.step, LINE);
  const T *b = x.b, *near = x.near, *row[(R + 2) / 3];
  i64 one = x.as * (i64)sizeof(T), two = 2 * one;
  asm("" : "+r"(one), "+r"(two));  // hidden, or each k has indices of its own
  OX_UNROLL for (int i = 0; i < R; i += 3) {
    row[i / 3] = x.a + i * x.as;
    asm("" : "+r"(row[i / 3]));
  }
  OX_UNROLL for (int i = 0; i < R; i++)
    OX_UNROLL for (int j = 0; j < 2 * N; j++) s[i][j] = VR<T>{};
  const auto products = [&](int k) OX_LAMBDA {
    VR<T> v[2 * N];
    OX_UNROLL for (int j = 0; j < 2 * N; j++) v[j] = ldr(b + j / N * bs + k * MM_NR + j % N * W);
    OX_UNROLL for (int i = 0; i < R; i++)
      OX_UNROLL for (int j = 0; j < 2 * N; j++)
        s[i][j] += v[j] * ((const T *)((const char *)row[i / 3] + (i % 3 == 0 ? 0 : i % 3 == 1 ? one : two)))[k];
  };
  for (; kc >= SOME; kc -= SOME, b += SOME * MM_NR) {
    for (i64 j = 0; j < lines; j++, near += LINE) __builtin_prefetch(near, 0, 2);
    OX_UNROLL for (int k = 0; k < SOME; k++) products(k);
    OX_UNROLL for (int i = 0; i < R; i += 3) row[i / 3] += SOME;
  }
  for (; kc; kc--, b += MM_NR) {
    products(0);
    OX_UNROLL for (int i = 0; i < R; i += 3) row[i / 3]++;
  }
  OX_UNROLL for (int i = 0; i < R; i++)
    OX_UNROLL for (int j = 0; j < 2 * N; j++) {
      T *d = x.c + j / N * x.cs + i * MM_NR + j % N * W;
      str(d, x.add ? ldr(d) + s[i][j] : s[i][j]);
    }
}

// Tiles exist for 1, 2, 4, 6.. rows: an odd row more than that is computed on another row, or on zeros, and dropped.
OX i64 mm_even(i64 rows) { return rows > 1 ? (rows + 1) & ~1 : rows; }
// Of a vector: two for elements of 8 bytes, so that tiles of them have half the rows, or take half a panel at a time.
template <class T> static constexpr int mm_registers = vec_parts<V<T>>::count;
// Few rows leave few independent chains: take several panels at once.
template <class T> OX constexpr int mm_wide(i64 rows) {
  const int wide = rows == 1 ? 4 : rows == 2 || (rows == 4 && MM_MR > 6) ? 2 : 1;
  return wide > mm_registers<T> ? wide / mm_registers<T> : 1;
}
// np: panels (mm_wide(r) or 1), 0 for half a panel.
template <class T, int R> OX void mm_pick(i64 r, i64 np, i64 kc, const MmTile<T> &x) {
  if (r < R) {
    if constexpr (R > 1) mm_pick<T, (R > 2 ? R - 2 : 1)>(r, np, kc, x);
  } else if (np == 0) {
    mm_tile<T, R, 1, 1>(kc, x);
  } else if (mm_wide<T>(R) > 1 && np > 1) {
    if constexpr (mm_wide<T>(R) > 1)
      x.near ? mm_tile<T, R, mm_wide<T>(R), MM_NV>(kc, x) : mm_tile<T, R, mm_wide<T>(R), MM_NV, false>(kc, x);
  } else if constexpr (R * mm_registers<T> > MM_MR) {  // more sums than registers: one half of the panel, then the other
    MmTile<T> half = x;
    mm_tile<T, R, 1, 1>(kc, half);
    half.b += VL, half.near += VL, half.c += VL;
    mm_tile<T, R, 1, 1>(kc, half);
  } else {
    mm_tile<T, R, 1, MM_NV>(kc, x);
  }
}
template <class T> static constexpr int mm_rows = MM_MR / mm_registers<T> < 6 ? MM_MR : MM_MR / mm_registers<T>;
template <class T> static __attribute__((noinline)) void mm_tiles(i64 r, i64 np, i64 kc, const MmTile<T> &x) {
  mm_pick<T, mm_rows<T>>(r, np, kc, x);
}
// A tile of a swept strip, of 4 or 6 rows by one panel: a line is fetched for four k.
template <class T, int R, int NV> static __attribute__((noinline)) void mm_swept_tile(i64 kc, const MmTile<T> &x) {
  constexpr int W = VRL<T>, N = NV * VL / W, SOME = 4;
  VR<T> s[R][N];
  const T *b = x.b, *near = x.near, *row[R];
  OX_UNROLL for (int i = 0; i < R; i++) {
    row[i] = x.a + i * x.as;
    asm("" : "+r"(row[i]));  // hidden, or the compiler makes one of another in each k
  }
  OX_UNROLL for (int i = 0; i < R; i++)
    OX_UNROLL for (int j = 0; j < N; j++) s[i][j] = VR<T>{};
  const auto products = [&](i64 k, int of) OX_LAMBDA {
    VR<T> v[N];
    OX_UNROLL for (int j = 0; j < N; j++) v[j] = ldr(b + of * NV * VL + j * W);
    OX_UNROLL for (int i = 0; i < R; i++) {
      const VR<T> a = row[i][k] - VR<T>{};
      OX_UNROLL for (int j = 0; j < N; j++) add_product(s[i][j], v[j], a);
    }
  };
  i64 k = 0;
  for (; k + SOME <= kc; k += SOME, b += SOME * NV * VL, near += SOME * x.step) {
    __builtin_prefetch(near, 0, 2);
    OX_UNROLL for (int i = 0; i < SOME; i++) products(k + i, i);
  }
  for (; k < kc; k++, b += NV * VL) products(k, 0);
  OX_UNROLL for (int i = 0; i < R; i++)
    OX_UNROLL for (int j = 0; j < N; j++) {
      T *d = x.c + i * MM_NR + j * W;
      str(d, x.add ? ldr(d) + s[i][j] : s[i][j]);
    }
}
template <class T> static __attribute__((noinline)) void mm_swept_tiles(i64 r, bool half, i64 kc, const MmTile<T> &x) {
  if (r == 6) half ? mm_swept_tile<T, 6, 1>(kc, x) : mm_swept_tile<T, 6, MM_NV>(kc, x);
  else half ? mm_swept_tile<T, 4, 1>(kc, x) : mm_swept_tile<T, 4, MM_NV>(kc, x);
}
// The most rows of broad tiles, which have these or two less; 0: there are none.
template <class T> static constexpr int mm_broad = MM_BROAD && mm_registers<T> == 1 ? 6 : 0;
template <class T> static __attribute__((noinline)) void mm_broad_tiles(i64 r, i64 kc, const MmTile<T> &x) {
  r == 6 ? mm_broad_tile<T, 6>(kc, x) : mm_broad_tile<T, 4>(kc, x);
}
// Rows that lie a multiple of MM_SET bytes apart share sets of the first-level cache, of 8 or 12 lines. Twelve of them
// and B push each other out: up to a quarter of the time. Ten leave room for B, and need no copy of A.
static constexpr i64 MM_SET = 4096;
template <class T> OX i64 mm_most_rows(i64 pitch, bool broad) {
  return broad ? mm_broad<T> : mm_rows<T> > 10 && pitch * (i64)sizeof(T) % MM_SET == 0 ? 10 : mm_rows<T>;
}

// A matrix that the epilogue writes or reads at (m, n), element (0, 0) at p, with rows `row` bytes apart. Only a
// hint: its lines are fetched while the tile is computed; without it the epilogue waits for them (3 to 8 % of the
// time).
static constexpr int MM_LINES = 3;  // most of them that are fetched
struct MmLines { const void *p = nullptr; i64 row = 0, size = 0; };
OX void mm_fetch(const MmLines &x, i64 m, i64 r, i64 n, i64 N) {
  i64 w = ox_min(MM_NR, N - n) * x.size;
  const char *p = (const char *)x.p + m * x.row + n * x.size;
  if (!x.p) return;
  for (i64 i = 0; i < r; i++, p += x.row) {
    __builtin_prefetch(p, 0, 2);
    for (i64 j = 64; j < w; j += 64) __builtin_prefetch(p + j, 0, 2);
  }
}

// ---- blocks --------------------------------------------------------------------------------------------
// One product. The reader and the epilogue are called through pointers, once a tile: so the loops around
// the tiles are compiled once for all products of a file, and a kernel costs only its own epilogue.
template <class T> struct MmRun {
  void (*read)(const void *a, T *d, i64 m, i64 rows, i64 k, i64 kc);
  void (*finish)(const void *epi, const T *c, i64 m, i64 rows, i64 n, i64 N);
  const void *a, *epi;
  bool by_strips;
  const T *rows;   // A itself, lda apart, where tiles read it in place; else null
  i64 lda;
  MmRight<T> b;
  i64 N, K;
  T *scratch;
  MmLines lines[MM_LINES];
  i64 nk, kstep;   // K blocks and their length
  i64 mb, mn, me;  // this block of rows: first, count, count rounded up to even
};
// The closures are copied, so that what they captured by value stays in registers.
template <class T, class A> static void mm_read(const void *a, T *d, i64 m, i64 rows, i64 k, i64 kc) {
  const A copy = *(const A *)a;
  copy(d, m, rows, k, kc);
}
template <class T, class E>
static void mm_finish(const void *epi, const T *c, i64 m, i64 rows, i64 n, i64 N) {
  const E copy = *(const E *)epi;
  for (i64 end = ox_min(N, n + MM_NR); n < end; n += VL, c += VL) {
    if (n + VL <= N)
      for (i64 i = 0; i < rows; i++) copy(m + i, n, ld(c + i * MM_NR), Full{});
    else
      for (i64 i = 0; i < rows; i++) copy(m + i, n, ld(c + i * MM_NR), Part{(int)(N - n)});
  }
}
template <class T> OX i64 mm_kc(const MmRun<T> &run, i64 q) {
  return ox_max(0, ox_min(run.K, (q + 1) * run.kstep) - q * run.kstep);
}

// Whether tiles take two panels at a time though rows are many.
template <class T> OX bool mm_is_broad(const MmRun<T> &x) {
  return mm_broad<T> && x.me >= MM_BROAD_FROM && !x.b.rows;
}

// Whether strips of rows take several panels in turn.
template <class T> static constexpr int mm_swept = mm_registers<T> == 1 ? MM_SWEPT : 0;
template <class T> OX bool mm_is_swept(const MmRun<T> &x, i64 rows) {
  return mm_swept<T> && rows >= MM_SWEPT_FROM && !x.b.rows;
}

// Strip `it` of the nt strips of a block, at its row r0: how many rows are computed, how many of them count, and whether
// tiles read them where A lies. There a row that is missing at the end is the row above the strip, computed `again` and
// dropped; in scratch it is zeros.
struct MmStrip { i64 r, valid, again; bool in_place; };
template <class T> OX MmStrip mm_strip(const MmRun<T> &x, i64 it, i64 nt, i64 r0) {
  const i64 r = x.me == 1 ? 1 : ox_cut(x.me / 2, nt, it + 1) * 2 - r0, valid = ox_min(r, x.mn - r0);
  const bool in_place = x.rows && x.mb + r0 >= r - valid;
  return {r, valid, in_place ? r - valid : 0, in_place};
}
// Where tiles find K block q of a strip. `at`: the block's place in scratch, into which it is read first if `read`.
template <class T> OX const T *mm_find(const MmRun<T> &x, const MmStrip &s, i64 r0, i64 q, T *at, bool read) {
  if (s.in_place) return x.rows + (x.mb + r0 - s.again) * x.lda + q * x.kstep;
  if (read) x.read(x.a, at + r0 * MM_AS, x.mb + r0, s.valid, q * x.kstep, mm_kc(x, q));
  return at + r0 * MM_AS;
}

// Whether all of B stays in the second level of the cache, as that of a recurrent network does from step to step: then
// loads alone deliver it faster than with prefetches between them (1.2 times as fast on Emerald Rapids).
template <class T> OX bool mm_is_near(const MmRun<T> &x) { return x.K * x.N * (i64)sizeof(T) <= MM_STAYS; }

// K block q of np panels from p: all strips of rows, and after the last K block the epilogue of each.
template <class T> OX void mm_strips(const MmRun<T> &x, i64 p, i64 np, i64 q, T *at, T *c, bool read) {
  bool half = x.N - p * MM_NR <= VL, in_place = x.b.rows && (p + np) * MM_NR <= x.N, broad = np > 1 && mm_is_broad(x);
  i64 n = mm_kc(x, q), nt = ox_up(x.me, mm_most_rows<T>(x.rows ? x.lda : MM_AS, broad)), last = q + 1 == x.nk ? np : 0;
  i64 bk = in_place ? x.b.ld : half ? VL : MM_NR, bs = in_place ? MM_NR : MM_NR * x.K;
  const T *b = (in_place ? x.b.rows + p * MM_NR : x.b.packed + p * MM_NR * x.K) + q * x.kstep * bk;
  // The tiles of a panel share the fetching of what follows its block of K: one that did it alone would wait for it.
  bool shared = !in_place && (np == 1 || broad);
  const i64 each = ox_up(nt, np), part = n * bk / each;  // tiles that fetch for one panel, what each of them does
  const T *near = b + (!shared ? (in_place ? 32 * bk : MM_AHEAD / mm_registers<T> / np)
                       : q + 1 < x.nk ? n * bk : n * bk + (np - 1) * bs);  // after the last block, other panels come
  for (i64 it = 0, r0 = 0; it < nt; it++) {
    const MmStrip s = mm_strip(x, it, nt, r0);
    const T *a = mm_find(x, s, r0, q, at, read);
    for (i64 j = 0; j < last; j++)
      for (const MmLines &some : x.lines) mm_fetch(some, x.mb + r0, s.valid, (p + j) * MM_NR, x.N);
    T *const own = x.nk > 1 ? c + r0 * MM_NR : c;  // sums that nothing is added to can share a place
    const T *own_near = shared ? near + it / each * bs + it % each * part : np > 1 && mm_is_near<T>(x) ? nullptr : near;
    const i64 as = s.in_place ? x.lda : MM_AS;
    MmTile<T> tile{a, as, b, bk, bs, own_near, shared ? ox_up(bk, each) : bk, own, x.me * MM_NR, q > 0};
    if (broad) {
      if constexpr (mm_broad<T> > 0) mm_broad_tiles<T>(s.r, n, tile);
    } else {
      mm_tiles<T>(s.r, half ? 0 : np, n, tile);
    }
    for (i64 j = 0; j < last; j++)
      x.finish(x.epi, own + (j * x.me + s.again) * MM_NR, x.mb + r0, s.valid, (p + j) * MM_NR, x.N);
    r0 += s.r;
  }
}

// K blocks [q0, q1) of panels [p0, p1) of a packed B, strip by strip: what a strip reads of A stays in the first level of the
// cache, and the panels come from the second one after the other, as hardware foresees. Each strip fetches its share of the
// K blocks or panels that come next; the `first` ones, which nothing has fetched, are by the first strip.
template <class T>
OX void mm_sweep(const MmRun<T> &x, i64 p0, i64 p1, i64 q0, i64 q1, T *at, T *c, bool read, bool first) {
  const i64 nt = ox_up(x.me, MM_MR);
  const bool last = q1 == x.nk;
  for (i64 it = 0, r0 = 0; it < nt; it++) {
    const MmStrip s = mm_strip(x, it, nt, r0);
    for (i64 p = p0; p < p1; p++) {
      const bool half = x.N - p * MM_NR <= VL;
      const i64 bk = half ? VL : MM_NR, next = last ? (p1 - p0) * MM_NR * x.K - q0 * x.kstep * bk : (q1 - q0) * x.kstep * bk;
      T *const own = c + (x.nk > q1 - q0 ? ((p - p0) * x.me + r0) * MM_NR : 0);
      if (last)
        for (const MmLines &some : x.lines) mm_fetch(some, x.mb + r0, s.valid, p * MM_NR, x.N);
      for (i64 q = q0; q < q1; q++) {
        const T *a = mm_find(x, s, r0, q, at + (q - q0) * x.me * MM_AS, read && p == p0);
        const T *b = x.b.packed + p * MM_NR * x.K + q * x.kstep * bk;
        const i64 n = mm_kc(x, q);
        MmTile<T> tile{a, s.in_place ? x.lda : MM_AS, b, bk, 0, b + next + it * n / nt * bk, ox_up(bk, nt), own, 0, q > 0};
        if (first && it == 0) {
          tile.near = b + MM_AHEAD, tile.step = bk;
          mm_tiles<T>(s.r, half ? 0 : 1, n, tile);
        } else {
          mm_swept_tiles<T>(s.r, half, n, tile);
        }
      }
      if (last) x.finish(x.epi, own + s.again * MM_NR, x.mb + r0, s.valid, p * MM_NR, x.N);
    }
    r0 += s.r;
  }
}

// A block of rows by panels [p0, p1). ks: K blocks of A that are in scratch at once; if they are not all,
// every panel needs partial sums of its own. A is read before the first panel: strip by strip if possible,
// so that reading overlaps with multiplying; the row under an odd block is set to zero.
template <class T> OX void mm_rows_by_panels(const MmRun<T> &x, i64 p0, i64 p1, i64 ks) {
  i64 wide = mm_is_broad(x) ? 2 : mm_wide<T>(x.me), whole = x.N / MM_NR + (!x.b.rows && x.N % MM_NR > VL);
  for (i64 kg = 0; kg < x.nk; kg += ks) {
    i64 ke = ox_min(x.nk, kg + ks);
    for (i64 q = kg; q < ke; q++) {
      T *at = x.scratch + (q - kg) * x.me * MM_AS;
      if (!x.by_strips) x.read(x.a, at, x.mb, x.mn, q * x.kstep, mm_kc(x, q));
      const bool missing = x.me > x.mn && !(x.rows && x.me > MM_MR);  // a row that no strip finds in place
      for (i64 i = 0; i < MM_AS && missing; i += VL) st(at + x.mn * MM_AS + i, V<T>{});
    }
    if (mm_is_swept(x, x.me)) {
      if constexpr (mm_swept<T> > 0) {
        const i64 pieces = ox_max(1, ox_up((ke - kg) * x.kstep * mm_swept<T> * MM_NR, MM_SWEPT_ROOM));
        for (i64 p = p0; p < p1; p += mm_swept<T>)
          for (i64 i = 0; i < pieces; i++) {
            const i64 q = kg + ox_cut(ke - kg, pieces, i), end = kg + ox_cut(ke - kg, pieces, i + 1);
            T *const c = x.scratch + MM_A_ROOM + (ks == x.nk ? 0 : (p - p0) * x.me * MM_NR);
            mm_sweep(x, p, ox_min(p1, p + mm_swept<T>), q, end, x.scratch + (q - kg) * x.me * MM_AS, c,
                     x.by_strips && p == p0, p == p0 && i == 0);
          }
      }
      continue;
    }
    for (i64 p = p0, np; p < p1; p += np) {
      np = p + wide <= ox_min(p1, whole) ? wide : 1;
      T *c = x.scratch + MM_A_ROOM + (ks == x.nk ? 0 : (p - p0) * x.me * MM_NR);
      // What broad tiles found in place, the tiles of a panel that is left over may want in scratch.
      const bool read = x.by_strips && (p == p0 || (x.rows && np == 1 && mm_is_broad(x)));
      for (i64 q = kg; q < ke; q++) mm_strips(x, p, np, q, x.scratch + (q - kg) * x.me * MM_AS, c, read);
    }
  }
}

// One row of A by columns [n0, n1) of a B in place. B is read as it lies in memory, along some
// of its rows at a time; meanwhile the sums are in scratch. The same bits as those of tiles.
static constexpr int MM_ROW_STEP = 8;
static constexpr i64 MM_ROW_COLUMNS = 2048;  // that are computed at once: their sums stay in L1
template <class T, int R> OX void mm_row_step(const T *a, const T *b, i64 ld_, T *sum, i64 columns) {
  VR<T> f[R];
  OX_UNROLL for (int i = 0; i < R; i++) f[i] = a[i] - VR<T>{};
  i64 n = 0;
  for (; n + VL <= columns; n += VL)
    OX_UNROLL for (int j = 0; j < VL; j += VRL<T>) {
      VR<T> s = ldr(sum + n + j);
      OX_UNROLL for (int i = 0; i < R; i++) s += ldr(b + i * ld_ + n + j) * f[i];
      str(sum + n + j, s);
    }
  if (n == columns) return;
  V<T> s = ld(sum + n);
  OX_UNROLL for (int i = 0; i < R; i++) s += ldn(b + i * ld_ + n, (int)(columns - n)) * bc<T>(a[i]);
  st(sum + n, s);
}
template <class T> static __attribute__((noinline)) void mm_row(const MmRun<T> &x, i64 m, i64 n0, i64 n1) {
  const i64 w = n1 - n0;
  T *const total = x.scratch + MM_A_ROOM, *const sum = total + MM_ROW_COLUMNS;
  for (i64 q = 0; q < x.nk; q++) {
    const i64 kc = mm_kc(x, q);
    const T *a = x.rows ? x.rows + m * x.lda + q * x.kstep : x.scratch, *b = x.b.rows + q * x.kstep * x.b.ld + n0;
    if (!x.rows) x.read(x.a, x.scratch, m, 1, q * x.kstep, kc);
    for (i64 n = 0; n < w; n += VL) st(sum + n, V<T>{});
    i64 k = 0;
    for (; k + MM_ROW_STEP <= kc; k += MM_ROW_STEP) mm_row_step<T, MM_ROW_STEP>(a + k, b + k * x.b.ld, x.b.ld, sum, w);
    for (; k < kc; k++) mm_row_step<T, 1>(a + k, b + k * x.b.ld, x.b.ld, sum, w);
    for (i64 n = 0; n < w; n += VL) st(total + n, q ? ld(total + n) + ld(sum + n) : ld(sum + n));
  }
  for (i64 n = 0; n < w; n += MM_NR) x.finish(x.epi, total + n, m, 1, n0 + n, x.N);
}

// Panels are taken in groups: of B while several blocks of rows use it in turn, of C while sums are partial.
template <class T>
OX_APART void mm_blocks(MmRun<T> x, i64 m0, i64 m1, i64 p0, i64 p1) {
  if (m1 <= m0 || p1 <= p0) return;
  x.nk = ox_max(1, ox_up(x.K, MM_KC / mm_registers<T>));  // of B, 24 or 32 KB for a panel
  x.kstep = ox_up(ox_up(x.K, x.nk), 4) * 4;
  if (m1 - m0 == 1 && x.b.rows) {
    const i64 end = ox_min(p1 * MM_NR, x.N);
    for (i64 n = p0 * MM_NR; n < end; n += MM_ROW_COLUMNS) mm_row(x, m0, n, ox_min(n + MM_ROW_COLUMNS, end));
    return;
  }
  // What is swept in place needs no room but for partial sums, and the panels of a group stay for all blocks of rows.
  const bool swept = x.rows && mm_is_swept(x, m1 - m0);
  const i64 nm = ox_up(m1 - m0, swept ? MM_C_ROOM / (ox_max(1, mm_swept<T>) * MM_NR) : MM_MC);
  const i64 most = mm_even(ox_up(m1 - m0, nm));
  const i64 ks = swept ? x.nk : ox_min(x.nk, ox_max(1, MM_A_ROOM / (most * MM_AS)));
  i64 group = nm == 1 ? p1 - p0 : swept ? mm_swept<T> : MM_GROUP;
  if (ks < x.nk) group = ox_min(group, MM_C_ROOM / (most * MM_NR));
  for (i64 p = p0; p < p1; p += group)
    for (i64 im = 0; im < nm; im++) {
      x.mb = m0 + ox_cut(m1 - m0, nm, im);
      x.mn = m0 + ox_cut(m1 - m0, nm, im + 1) - x.mb;
      x.me = mm_even(x.mn);
      mm_rows_by_panels(x, p, ox_min(p1, p + group), ks);
    }
}
#ifdef ONNXC_APART
ONNXC_APART void mm_blocks<f32>(MmRun<f32>, i64, i64, i64, i64);
#endif

// Rows [m0, m1) by panels [p0, p1) of C. scratch: MM_SCRATCH elements, 64-byte aligned, one per thread.
// a: a reader of A. epi(m, n, v, lanes): C[m][n..] is v; lanes is Full, or Part in the last columns. It
// captures by value ([=]).
template <class T, class A, class E>
OX void matmul_block(const A &a, MmRight<T> b, i64 N, i64 K, i64 m0, i64 m1, i64 p0, i64 p1, T *scratch,
                     const E &epi, MmLines x = {}, MmLines y = {}, MmLines z = {}) {
  MmRun<T> run{mm_read<T, A>, mm_finish<T, E>, &a, &epi, A::strips, mm_in_place<T>(a), mm_pitch<T>(a),
               b, N, K, scratch, {x, y, z}, 0, 0, 0, 0, 0};
  mm_blocks<T>(run, m0, m1, p0, p1);
}

// ---- division of work ----------------------------------------------------------------------------------
// A grid of gm row ranges by gp panel ranges, of whole groups of `unit` panels. K is never divided, so the bits
// do not depend on it.
// `small`: all of it takes less time than to wake a thread.
struct MmGrid { i64 gm, gp, tasks, unit = 1; bool small = false; };
OX i64 mm_few(const MmGrid &g) { return g.small ? g.tasks + 1 : 0; }  // for ox_for_few
OX i64 mm_first(const MmGrid &g, i64 P, i64 i) {  // the first of P panels that belongs to range i
  return ox_min(P, ox_cut(ox_up(P, g.unit), g.gp, i) * g.unit);
}
// Pairs where tiles take two panels, and as many as are swept, unless that left threads without work.
OX i64 mm_unit(i64 M, i64 P, i64 threads) {
  const i64 unit = MM_BROAD && M >= MM_BROAD_FROM ? 2 : MM_SWEPT && M >= MM_SWEPT_FROM ? MM_SWEPT : 1;
  return ox_up(M, MM_MC) * ox_up(P, unit) >= 2 * threads ? unit : 1;
}
// The most ranges of rows: where panels are swept, each has rows enough for that.
OX i64 mm_row_parts(i64 M, i64 unit) {
  return MM_SWEPT && unit == MM_SWEPT ? ox_max(1, M / MM_SWEPT_FROM) : ox_up(M, 2 * MM_MR);
}
// Twelve tasks for each thread where A is read in place, which costs next to nothing to begin with: threads seldom run
// at one speed, and the last tasks even that out (with four, 2 to 5 % of the time of BERT was waiting). Twice as many
// where columns alone are divided: 1 % more; rows divided further would read B again.
static constexpr i64 MM_TASKS = 12;
// 4, 2 or 1 tasks for each thread, of a million multiplications (about 10 us) and `least` panels (sixteen if every
// task packs its own A) and more. Rows are divided first. (M + 8: B has to be read, too.)
// In a loop around products (`work` is MM_OFTEN) the threads are awake, and a fifth of that is worth a task. Elsewhere
// they may be: a product `alone` that is too small to wake them for is divided all the same, into a task for each at
// most.
static constexpr i64 MM_ONCE = 1000000, MM_OFTEN = 200000;
OX i64 mm_worth(i64 M, i64 N, i64 K, i64 work) { return ox_min(1 << 20, K * mm_panels(N) * MM_NR * (M + 8) / work); }
static __attribute__((noinline)) MmGrid mm_coarse_grid(
    i64 M, i64 N, i64 K, i64 threads, i64 least = 4, i64 work = MM_ONCE, bool alone = false) {
  i64 unit = mm_unit(M, mm_panels(N), threads), P = ox_up(mm_panels(N), unit), worth = mm_worth(M, N, K, work);
  i64 blocks = ox_up(M, MM_MC), n = threads * 4;
  while (n > threads && (n > worth || n > blocks * (P * unit / least))) n /= 2;
  n = ox_min(n, worth);
  const bool small = alone && n <= 1;
  if (small) n = ox_min(threads, mm_worth(M, N, K, MM_OFTEN));
  if (n <= 1 || M <= 0 || P <= 0) return {1, 1, 1};
  i64 gm = ox_min(n, blocks);
  while (n % gm) gm--;
  i64 gp = ox_min(n / gm, P);
  gm = ox_max(gm, ox_min(n / gp, mm_row_parts(M, unit)));
  return {gm, gp, gm * gp, unit, small};
}
static __attribute__((noinline)) MmGrid mm_grid(
    i64 M, i64 N, i64 K, i64 threads, i64 work = MM_ONCE, bool alone = false) {
  i64 unit = mm_unit(M, mm_panels(N), threads), P = ox_up(mm_panels(N), unit);
  i64 n = threads > 1 ? ox_min(threads * MM_TASKS, mm_worth(M, N, K, work) / 2) : 0;
  if (M <= MM_FEW || n <= threads * 4) return mm_coarse_grid(M, N, K, threads, 4, work, alone);
  i64 gm = ox_min(n, ox_up(M, MM_MC)), gp = ox_min(P, ox_max(1, n / gm));
  gp = ox_up(P, ox_up(P, gp));  // as many panels for all
  // Broad tiles, and those of swept panels, are few, and share the fetching of B: rows divided further would fetch it
  // more often than it can be hidden (of 77 rows, 2048 terms and 512 columns a fifth of the time).
  if (unit == 1 || gm * gp < 4 * threads) gm = ox_max(gm, ox_min(n / gp, mm_row_parts(M, unit)));
  if (gm == 1) gp = ox_max(gp, ox_min(P, ox_min(2 * threads * MM_TASKS, mm_worth(M, N, K, work)))), gp = ox_up(P, ox_up(P, gp));
  return {gm, gp, gm * gp, unit};
}
// What comes as item i of `items` in a turn of a loop: each thread's share forth in one turn, and back in the next, which
// so finds in the thread's cache what was read last. The share is that of ox_parallel; of others each item comes once, too.
OX i64 mm_forth_and_back(i64 i, i64 items, i64 threads, i64 turn) {
  if (turn % 2 == 0 || items < 1) return i;
  const i64 team = ox_max(1, ox_min(threads, items)), k = ((i + 1) * team - 1) / items;
  return items * k / team + items * (k + 1) / team - 1 - i;
}
template <class T, class A, class E>
OX void mm_task(const MmGrid &g, i64 t, const A &a, MmRight<T> b, i64 M, i64 N, i64 K, T *scratch,
                const E &epi, MmLines x = {}, MmLines y = {}, MmLines z = {}) {
  i64 im = t / g.gp, ip = t % g.gp, P = mm_panels(N);
  if (!mm_packs(M, N, K, b.rows)) b.rows = nullptr;
  matmul_block<T>(a, b, N, K, ox_cut(M, g.gm, im), ox_cut(M, g.gm, im + 1), mm_first(g, P, ip), mm_first(g, P, ip + 1),
                  scratch, epi, x, y, z);
}

// A B that nothing has packed: b(k, n) = p[k * sk + n * sn]. A task packs `panels` of them at a time into its thread's
// `room`, panels * MM_NR * K elements, and multiplies while they are in its cache: they never see the memory. It pays
// where columns alone are divided, so that each panel is packed once.
template <class T> struct MmLoose { const T *p; i64 sk, sn; };
OX MmGrid mm_loose_grid(i64 M, i64 N, i64 K, i64 threads, i64 work = MM_ONCE, bool alone = false) {
  const MmGrid g = mm_coarse_grid(M, N, K, threads, 4, work, alone);
  const i64 gp = ox_min(g.tasks, ox_up(mm_panels(N), g.unit));
  const i64 gm = ox_max(1, ox_min(g.tasks / gp, mm_row_parts(M, g.unit)));
  return {gm, gp, gm * gp, g.unit, g.small};
}
template <class T, class A, class E>
OX void mm_loose_task(const MmGrid &g, i64 t, const A &a, MmLoose<T> b, i64 M, i64 N, i64 K, i64 panels, T *room,
                      T *scratch, const E &epi, MmLines x = {}, MmLines y = {}, MmLines z = {}) {
  const i64 im = t / g.gp, ip = t % g.gp, P = mm_panels(N), end = mm_first(g, P, ip + 1);
  for (i64 p = mm_first(g, P, ip), q; p < end; p = q) {
    q = ox_min(end, p + panels);
    T *const packed = room - p * MM_NR * K;
    mm_pack_b(b.p, b.sk, b.sn, K, N, packed, p, q);
    matmul_block<T>(a, MmRight<T>(packed), N, K, ox_cut(M, g.gm, im), ox_cut(M, g.gm, im + 1), p, q, scratch, epi, x, y, z);
  }
}

// ---- short sums ----------------------------------------------------------------------------------------
// Where K is small (MM_SHORT and less), what surrounds the tiles above costs more than they do. So here is the plain
// loop, 8 or 4 rows at a time. The same bits.
template <class T> static constexpr int mm_short_most = (MM_MR > 6 ? 8 : 4) / mm_registers<T>;
template <class T, int R, int NV>
OX void mm_short_tile(const T *a, i64 lda, const T *b, i64 K, T *c) {
  constexpr int W = VRL<T>, N = NV * VL / W;
  VR<T> s[R][N];
  OX_UNROLL for (int i = 0; i < R; i++)
    OX_UNROLL for (int j = 0; j < N; j++) s[i][j] = VR<T>{};
  for (i64 k = 0; k < K; k++, b += NV * VL) {
    VR<T> v[N];
    OX_UNROLL for (int j = 0; j < N; j++) v[j] = ldr(b + j * W);
    OX_UNROLL for (int i = 0; i < R; i++)
      OX_UNROLL for (int j = 0; j < N; j++) s[i][j] += v[j] * a[i * lda + k];
  }
  OX_UNROLL for (int i = 0; i < R; i++)
    OX_UNROLL for (int j = 0; j < N; j++) str(c + i * MM_NR + j * W, s[i][j]);
}
template <class T, int R>
static __attribute__((noinline)) void mm_short_rows(const T *a, i64 lda, const T *b, i64 K, bool half, T *c) {
  if (half) mm_short_tile<T, R, 1>(a, lda, b, K, c);
  else mm_short_tile<T, R, MM_NV>(a, lda, b, K, c);
}
// Takes the place of mm_grid and mm_task for rows of A and a packed B. Blocks of 32 rows: their part of C stays in L1.
OX MmGrid mm_short_grid(i64 M, i64 N, i64 K, i64 threads, i64 work = MM_ONCE, bool alone = false) {
  return mm_coarse_grid(M, N, ox_max(K, MM_SHORT), threads, 1, work, alone);
}
template <class T, class E>
static void mm_short(const MmGrid &g, i64 t, const MmRows<T> &a, const T *b, i64 M, i64 N, i64 K, const E &epi) {
  constexpr int most = mm_short_most<T>;
  i64 im = t / g.gp, ip = t % g.gp, P = mm_panels(N), m1 = ox_cut(M, g.gm, im + 1), rows;
  alignas(64) T c[most * MM_NR];
  for (i64 m0 = ox_cut(M, g.gm, im); m0 < m1; m0 += 32)
    for (i64 p = mm_first(g, P, ip); p < mm_first(g, P, ip + 1); p++)
      for (i64 m = m0, end = ox_min(m0 + 32, m1), n = p * MM_NR; m < end; m += rows) {
        rows = end - m < most ? 1 : most;
        if (rows == 1) mm_short_rows<T, 1>(a.p + m * a.lda, a.lda, b + n * K, K, N - n <= VL, c);
        else mm_short_rows<T, most>(a.p + m * a.lda, a.lda, b + n * K, K, N - n <= VL, c);
        mm_finish<T, E>(&epi, c, m, rows, n, N);
      }
}
