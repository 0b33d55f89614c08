// Matrix product C[M,N] = A[M,K] B[K,N] with an open prologue (how A is read) and an open epilogue (what
// happens to every finished vector of C, stores included). One code for f32, f64, i32 and the rest.
//
//   auto epi = [=](i64 m, i64 n, vf v, auto lanes) OX_LAMBDA { stl(C + m * N + n, v + ldl(bias + n, lanes), lanes); };
//   MmGrid g = mm_grid(M, N, K, threads);                       // any thread count gives the same bits
//   for (i64 t = 0; t < g.tasks; t++)                           // a pool runs the tasks in any order
//     mm_task(g, t, MmRows<f32>{A, K}, Bp, M, N, K, (f32 *)scratch_of_this_thread, epi);
//
// Three levels. A register tile of R rows (1 to MM_MR) by one panel of NR = 2 VL columns: 2 R accumulators
// that start at zero and run over one K block of at most MM_KC. A block of A rows, copied into scratch in
// rows of constant stride (strides of 4096 bytes would all fall into one set of the L1 cache), stays in
// L2 while the panels of B stream past it. Partial sums of the K blocks are added in scratch: fresh
// accumulators for every block keep the rounding error of long sums low. The order of additions of an
// element depends on K alone: not on tile, task, thread count or M.
//
// B is packed as [ceil(N/NR)][K][NR], zero padded:   CPU level  VL  NR  MR
// the compiler packs constants with the same NR.     AVX-512    16  32  12
//                                                    AVX, AVX2   8  16   6
//                                                    other       4   8   6
#pragma once
#include "vec.h"

static constexpr int MM_NV = 2;
static constexpr int MM_NR = MM_NV * VL;
#ifndef ONNXC_MM_MR
#if defined(__AVX512F__)
#define ONNXC_MM_MR 12
#else
#define ONNXC_MM_MR 6
#endif
#endif
#ifndef ONNXC_MM_MC
#define ONNXC_MM_MC 144
#endif
#ifndef ONNXC_MM_PF
#define ONNXC_MM_PF 4096
#endif
#ifndef ONNXC_MM_GROUP
#define ONNXC_MM_GROUP 16
#endif
#ifndef ONNXC_MM_L2
#define ONNXC_MM_L2 (VL >= 16 ? 131072 : 65536)
#endif
static constexpr int MM_MR = ONNXC_MM_MR;
static constexpr int MM_KC = 256;            // longest chain of additions
static constexpr int MM_AS = MM_KC + 16;     // row stride of a packed block of A
static constexpr int MM_MC = ONNXC_MM_MC;    // most rows of a block
// Elements of scratch: room for packed A (a K block of MM_MC rows at least), then partial sums.
static constexpr i64 MM_A_ROOM = ONNXC_MM_L2 > MM_MC * MM_AS ? ONNXC_MM_L2 : MM_MC * MM_AS;
static constexpr i64 MM_C_ROOM = MM_MC * MM_NR * 16;
static constexpr i64 MM_SCRATCH = MM_A_ROOM + MM_C_ROOM;

#ifndef ONNXC_LANES
#define ONNXC_LANES
// How many lanes are valid, as a type: Full costs nothing, Part masks. Both convert to int.
struct Full { constexpr operator int() const { return VL; } };
struct Part { int n; constexpr operator int() const { return n; } };
template <class T> OX V<T> ldl(const T *p, Full) { return ld(p); }
template <class T> OX V<T> ldl(const T *p, Part l) { return ldn(p, l.n); }
template <class T> OX void stl(T *p, V<T> v, Full) { st(p, v); }
template <class T> OX void stl(T *p, V<T> v, Part l) { stn(p, v, l.n); }
#endif

OX i64 mm_min(i64 a, i64 b) { return a < b ? a : b; }
OX i64 mm_max(i64 a, i64 b) { return a > b ? a : b; }
OX i64 mm_up(i64 a, i64 b) { return (a + b - 1) / b; }
// Part i of n nearly equal parts of x starts here (part n starts at x).
OX i64 mm_cut(i64 x, i64 n, i64 i) { return x / n * i + mm_min(i, x % n); }
OX i64 mm_panels(i64 N) { return mm_up(N, MM_NR); }
OX i64 mm_packed(i64 K, i64 N) { return mm_panels(N) * MM_NR * K; }  // elements of packed B

// ---- transpose: VL vectors of VL lanes, log2(VL) rounds of interleaving --------------------------------
template <int... I> struct MmSeq {};
template <class T, int... I> OX V<T> mm_lo(V<T> a, V<T> b, MmSeq<I...>) {
  return __builtin_shuffle(a, b, VM<T>{(typename int_of<sizeof(T)>::s)(I / 2 + I % 2 * VL)...});
}
template <class T, int... I> OX V<T> mm_hi(V<T> a, V<T> b, MmSeq<I...>) {
  return __builtin_shuffle(a, b, VM<T>{(typename int_of<sizeof(T)>::s)((I + VL) / 2 + I % 2 * VL)...});
}
// dst[i * ds + j] = src[j * ss + i], i and j under VL.
template <class T> static __attribute__((noinline)) void mm_transpose(const T *src, i64 ss, T *dst, i64 ds) {
  MmSeq<__integer_pack(VL)...> s;
  V<T> a[VL], b[VL];
  OX_UNROLL for (int i = 0; i < VL; i++) a[i] = ld(src + i * ss);
  OX_UNROLL for (int r = 1; r < VL; r *= 2) {
    OX_UNROLL for (int i = 0; i < VL / 2; i++) {
      b[2 * i] = mm_lo<T>(a[i], a[i + VL / 2], s);
      b[2 * i + 1] = mm_hi<T>(a[i], a[i + VL / 2], s);
    }
    OX_UNROLL for (int i = 0; i < VL; i++) a[i] = b[i];
  }
  OX_UNROLL for (int i = 0; i < VL; i++) st(dst + i * ds, a[i]);
}
// The same for ni by nj elements of any count and strides: dst[i * ds + j] = src[j * ss + i * si].
template <class T> static void mm_gather(const T *src, i64 ss, i64 si, T *dst, i64 ds, i64 ni, i64 nj) {
  for (i64 j0 = 0; j0 < nj; j0 += VL) {
    for (i64 i0 = 0; i0 < ni; i0 += VL) {
      if (si == 1 && i0 + VL <= ni && j0 + VL <= nj) {
        mm_transpose(src + j0 * ss + i0, ss, dst + i0 * ds + j0, ds);
        continue;
      }
      for (i64 i = i0; i < mm_min(ni, i0 + VL); i++)
        for (i64 j = j0; j < mm_min(nj, j0 + VL); j++) dst[i * ds + j] = src[j * ss + i * si];
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
      i64 k1 = mm_min(K, k0 + KB);
      for (i64 p = g; p < mm_min(p1, g + G); p++) {
        i64 n0 = p * MM_NR, w = mm_min(N - n0, MM_NR);
        T *d = bp + n0 * K + k0 * MM_NR;
        const T *s = b + k0 * sk + n0 * sn;
        if (w < MM_NR)
          for (i64 i = 0; i < (k1 - k0) * MM_NR; i += VL) st(d + i, V<T>{});
        if (sn == 1 && w == MM_NR) {
          for (i64 k = k0; k < k1; k++, d += MM_NR, s += sk)
            OX_UNROLL for (int j = 0; j < MM_NV; j++) st(d + j * VL, ld(s + j * VL));
        } else {
          mm_gather(s, sn, sk, d, MM_NR, k1 - k0, w);
        }
      }
    }
  }
}

// Readers of A: write rows [m, m + rows), columns [k, k + kc) to d in rows of MM_AS.
// MmRows: rows are contiguous. MmStrided: a(m, k) = p[m * sm + k * sk]. MmMap: f(m, k, lanes) gives the
// vector at (m, k..), computed as it is packed (a fused prologue).
template <class T> struct MmRows {
  const T *p;
  i64 lda;
  OX_LAMBDA void operator()(T *d, i64 m, i64 rows, i64 k, i64 kc) const {
    const T *s = p + m * lda + k;
    for (i64 i = 0; i < rows; i++, s += lda, d += MM_AS) {
      i64 j = 0;
      for (; j + VL <= kc; j += VL) st(d + j, ld(s + j));
      if (j < kc) st(d + j, ldn(s + j, (int)(kc - j)));
    }
  }
};
template <class T> struct MmStrided {
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

// ---- register tile -------------------------------------------------------------------------------------
// c[i][j] (+)= sum over k of a[i * MM_AS + k] * b[k * NR + j], for R rows and P panels (bs and cs apart).
template <class T, int R, int P>
static __attribute__((noinline)) void mm_tile(i64 kc, const T *a, const T *b, i64 bs, T *c, i64 cs, bool add) {
  V<T> s[R][P * MM_NV];
  OX_UNROLL for (int i = 0; i < R; i++)
    OX_UNROLL for (int j = 0; j < P * MM_NV; j++) s[i][j] = V<T>{};
  _Pragma("GCC unroll 4") for (i64 k = 0; k < kc; k++, b += MM_NR) {
    V<T> v[P * MM_NV];
    OX_UNROLL for (int q = 0; q < P; q++)
      OX_UNROLL for (int j = 0; j < MM_NV; j++) {
        const T *x = b + q * bs + j * VL;
        if (ONNXC_MM_PF) __builtin_prefetch(x + ONNXC_MM_PF / P);
        v[q * MM_NV + j] = ld(x);
      }
    OX_UNROLL for (int i = 0; i < R; i++)
      OX_UNROLL for (int j = 0; j < P * MM_NV; j++) s[i][j] += v[j] * a[i * MM_AS + k];
  }
  OX_UNROLL for (int i = 0; i < R; i++)
    OX_UNROLL for (int j = 0; j < P * MM_NV; j++) {
      T *d = c + j / MM_NV * cs + i * MM_NR + j % MM_NV * VL;
      st(d, add ? ld(d) + s[i][j] : s[i][j]);
    }
}

// Tiles exist for 1, 2, 4, 6.. rows: an odd row more than that is computed on a row of zeros and dropped.
OX i64 mm_even(i64 rows) { return rows > 1 ? (rows + 1) & ~1 : rows; }
// Few rows leave few independent chains: take several panels at once.
OX int mm_wide(i64 rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
template <class T, int R>
OX void mm_pick(i64 r, int wide, i64 kc, const T *a, const T *b, i64 bs, T *c, i64 cs, bool add) {
  if (r < R) {
    if constexpr (R > 1) mm_pick<T, (R > 2 ? R - 2 : 1)>(r, wide, kc, a, b, bs, c, cs, add);
  } else if (R <= 2 && wide > 1) {
    if constexpr (R <= 2) mm_tile<T, R, (R == 1 ? 4 : 2)>(kc, a, b, bs, c, cs, add);
  } else {
    mm_tile<T, R, 1>(kc, a, b, bs, c, cs, add);
  }
}
template <class T> static constexpr int mm_rows = sizeof(T) > 4 ? (MM_MR / 2 + 1) & ~1 : MM_MR;
template <class T>
static __attribute__((noinline)) void mm_tiles(i64 r, int wide, i64 kc, const T *a, const T *b, i64 bs, T *c, i64 cs,
                                               bool add) {
  mm_pick<T, mm_rows<T>>(r, wide, kc, a, b, bs, c, cs, add);
}

// Hand finished rows [m, m + r) of the panel at column n to the epilogue.
template <class T, class E> OX void mm_finish(const T *c, i64 m, i64 r, i64 n, i64 N, const E &epi) {
  if (n + MM_NR <= N) {
    for (i64 i = 0; i < r; i++)
      for (int j = 0; j < MM_NV; j++) epi(m + i, n + j * VL, ld(c + i * MM_NR + j * VL), Full{});
    return;
  }
  for (; n < N; n += VL, c += VL)
    for (i64 i = 0; i < r; i++) epi(m + i, n, ld(c + i * MM_NR), Part{(int)mm_min(VL, N - n)});
}

// ---- blocks --------------------------------------------------------------------------------------------
// Rows [m0, m1) by panels [p0, p1) of C. scratch: MM_SCRATCH elements, 64-byte aligned, one per thread.
// a: a reader of A. epi(m, n, v, lanes): C[m][n..] is v; lanes is Full, or Part in the last column vector.
template <class T, class A, class E>
static void matmul_block(const A &a, const T *bp, i64 N, i64 K, i64 m0, i64 m1, i64 p0, i64 p1, T *scratch,
                         const E &epi) {
  if (m1 <= m0 || p1 <= p0) return;
  i64 rows = m1 - m0, nm = mm_up(rows, MM_MC), nk = mm_max(1, mm_up(K, MM_KC));
  i64 kstep = mm_up(mm_up(K, nk), 4) * 4, most = mm_even(mm_up(rows, nm));
  i64 ks = mm_min(nk, mm_max(1, MM_A_ROOM / (most * MM_AS)));  // K blocks of A in scratch at once
  bool whole = ks == nk;                                       // all of K: partial sums of one step of panels
  // Columns are taken in groups: of B when several blocks of rows use it in turn, of C while its sums are partial.
  i64 group = nm > 1 ? ONNXC_MM_GROUP : p1 - p0;
  if (!whole) group = mm_min(group, MM_C_ROOM / (most * MM_NR));
  T *cbuf = scratch + MM_A_ROOM;
  for (i64 pg = p0; pg < p1; pg += group) {
    i64 pe = mm_min(p1, pg + group);
    for (i64 im = 0; im < nm; im++) {
    i64 mb = m0 + mm_cut(rows, nm, im), mn = m0 + mm_cut(rows, nm, im + 1) - mb, me = mm_even(mn);
    i64 nt = mm_up(me, mm_rows<T>);
    int wide = mm_wide(mn);
      for (i64 kg = 0; kg < nk; kg += ks) {
        i64 ke = mm_min(nk, kg + ks);
        for (i64 q = kg; q < ke; q++) {
          T *d = scratch + (q - kg) * me * MM_AS;
          a(d, mb, mn, q * kstep, mm_min(K, (q + 1) * kstep) - q * kstep);
          if (me > mn)
            for (i64 i = 0; i < MM_AS; i += VL) st(d + mn * MM_AS + i, V<T>{});
        }
        for (i64 p = pg, np; p < pe; p += np) {
          np = p + wide <= pe ? wide : 1;
          T *c = cbuf + (whole ? 0 : (p - pg) * me * MM_NR);
          for (i64 q = kg; q < ke; q++) {
            i64 kc = mm_min(K, (q + 1) * kstep) - q * kstep;
            const T *b = bp + p * MM_NR * K + q * kstep * MM_NR;
            for (i64 it = 0; it < nt; it++) {
              i64 r0 = mm_cut(me / 2, nt, it) * 2, r = (me == 1 ? 1 : mm_cut(me / 2, nt, it + 1) * 2 - r0);
              mm_tiles<T>(r, (int)np, kc, scratch + ((q - kg) * me + r0) * MM_AS, b, MM_NR * K, c + r0 * MM_NR,
                          me * MM_NR, q > 0);
              if (q + 1 == nk)
                for (i64 j = 0; j < np; j++)
                  mm_finish<T>(c + (j * me + r0) * MM_NR, mb + r0, mm_min(r, mn - r0), (p + j) * MM_NR, N, epi);
            }
          }
        }
      }
    }
  }
}

// ---- division of work ----------------------------------------------------------------------------------
// A grid of gm row ranges by gp panel ranges. K is never divided, so the bits do not depend on it.
struct MmGrid { i64 gm, gp, tasks; };
static MmGrid mm_grid(i64 M, i64 N, i64 K, i64 threads) {
  i64 P = mm_panels(N), want = mm_min(threads * 4, K * P * MM_NR * (M + 8) / 1000000);
  if (threads <= 1 || want <= 1 || P * M == 0) return {1, 1, 1};
  i64 gp = mm_max(1, mm_min(want, M <= MM_MC ? P : P / 8));
  i64 gm = mm_max(1, mm_min(mm_up(want, gp), mm_up(M, 48)));
  return {gm, gp, gm * gp};
}
template <class T, class A, class E>
static void mm_task(const MmGrid &g, i64 t, const A &a, const T *bp, i64 M, i64 N, i64 K, T *scratch, const E &epi) {
  i64 im = t / g.gp, ip = t % g.gp, P = mm_panels(N);
  matmul_block<T>(a, bp, N, K, mm_cut(M, g.gm, im), mm_cut(M, g.gm, im + 1), mm_cut(P, g.gp, ip),
                  mm_cut(P, g.gp, ip + 1), scratch, epi);
}
