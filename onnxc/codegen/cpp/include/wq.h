// Matrix product C[M,N] = A[M,K] B[K,N] with weights B that stay packed: codes of 2, 4, 8 or 16 bits, and
// a scale (and a zero point) for every block of K of every column: b(k, n) = (q(k, n) - z(k / bs, n)) * s(k / bs, n).
//
//   WqMat w{codes, scales, zeros, N, K, bs};
//   WqGrid g = wq_grid(M, w, threads);         // any thread count gives the same bits
//   for (i64 t = 0; t < g.tasks; t++)
//     wq_task<WqInt<4>, WqNone, WQ_ANY>(g, t, WqRows{A, lda}, w, M, scratch_of_this_thread, epi);
//
// Columns lie in panels of NR = 4 VL, zero padded. A *unit* is 4 bytes of each column of a panel, which hold
// U = 32 / bits steps of K; a block of K takes whole units. Lanes run along N, so scales are vectors:
//
//   codes  [panels][G blocks][ceil(bs / U) units][4 NR bytes]      scales, zeros  [panels][G][NR]
//     2, 4 bits: NR words, the code of step j at bit j * bits, signed
//     8 bits:    [U][NR] signed bytes        16 bits: [U][NR] halves (float16 or bfloat16)
//
// Few rows (decoding) are bound by how fast the codes arrive: they are unpacked in registers and multiplied at
// once; a block is summed without its scale, at most WQ_CHAIN long, and scaled when it is added to the total.
// Many rows: the register tile of the first strip of rows unpacks and scales a block of K of half a panel, and
// leaves it in scratch for the tiles of all other strips.
#pragma once
#include "vec.h"

static constexpr int WQ_NV = 4;               // vectors of a panel
static constexpr int WQ_NR = WQ_NV * VL;      // columns of a panel
static constexpr int WQ_UNIT = 4 * WQ_NR;     // bytes of a unit
static constexpr int WQ_CHAIN = 256;          // longest chain of additions
static constexpr int WQ_AHEAD = 16 * WQ_UNIT; // bytes between use and prefetch
// Many rows: register tiles of up to WQ_MR rows and half a panel; blocks of rows of A in scratch.
static constexpr int WQ_HV = 2;
static constexpr int WQ_HR = WQ_HV * VL;
#ifdef __AVX512F__
static constexpr int WQ_MR = 12;
static constexpr i64 WQ_A_ROOM = 163840;      // floats of A in scratch
#else
static constexpr int WQ_MR = 6;
static constexpr i64 WQ_A_ROOM = 65536;
#endif
static constexpr int WQ_AS = WQ_CHAIN + 16;   // row stride of a block of A: no power of two
static constexpr int WQ_MC = 144;             // most rows of a block
static constexpr int WQ_B_ROOM = WQ_CHAIN * WQ_HR;
static constexpr i64 WQ_C_ROOM = WQ_MC * WQ_HR * 16;                  // partial sums
static constexpr i64 WQ_SCRATCH = WQ_A_ROOM + WQ_C_ROOM + WQ_B_ROOM;  // floats of a thread
static_assert(WQ_MC * WQ_AS <= WQ_A_ROOM, "a K block of A fits");
// What the code is for: few rows (contiguous ones), more rows, or what is not known before the run.
static constexpr int WQ_FEW = 1, WQ_MANY = 2, WQ_ANY = 3;
static constexpr i64 WQ_FEW_ROWS = 8;

struct WqMat {
  const u8 *q;
  const f32 *s;
  const void *z;
  i64 N, K, bs;
  OX_LAMBDA i64 panels() const { return ox_up(N, WQ_NR); }
  OX_LAMBDA i64 blocks() const { return ox_up(K, bs); }
};

// ---- codes: one vector of a unit's step j ----------------------------------------------------------------
template <int BITS> struct WqInt {
  static constexpr int U = 32 / BITS;
  OX vf get(const u8 *unit, int v, int j) {
    vi word = ld((const i32 *)unit + v * VL);
#if defined(__AVX512F__) && ONNXC_VL == 16
    // A table of 16 values, looked up by the lowest four bits: what lies above needs no mask.
    const vf four = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
    const vf two = {0, 1, -2, -1, 0, 1, -2, -1, 0, 1, -2, -1, 0, 1, -2, -1};
    return __builtin_shuffle(BITS == 4 ? four : two, word >> (j * BITS));
#else
#if defined(__AVX2__) && ONNXC_VL == 8
    const vf table = {0, 1, -2, -1, 0, 1, -2, -1};  // looked up by the lowest three bits
    if constexpr (BITS == 2) return __builtin_ia32_permvarsf256(table, word >> (j * BITS));
#endif
    return __builtin_convertvector((word << (32 - BITS - j * BITS)) >> (32 - BITS), vf);
#endif
  }
};
// A code of 4 bits as it lies highest in its word, which is 2^28 times the code: a mask takes the place of a shift.
struct WqHigh {
  static constexpr int U = 8;
  OX vf get(const u8 *unit, int v, int j) {
    const vi word = ld((const i32 *)unit + v * VL);
    return __builtin_convertvector((word << (28 - j * 4)) & (i32)0xf0000000, vf);
  }
};
// How many times a code its vector is.
template <class Q> static constexpr f32 wq_lift = 1.0f;
template <> constexpr f32 wq_lift<WqHigh> = 0x1p28f;
// Signed bytes as floats.
OX vf wq_bytes(const i8 *p) { return conv<f32, i8>(ld(p)); }
template <> struct WqInt<8> {
  static constexpr int U = 4;
  OX vf get(const u8 *unit, int v, int j) { return wq_bytes((const i8 *)unit + (j * WQ_NV + v) * VL); }
};
struct WqHalf {  // float16
  static constexpr int U = 2;
  OX vf get(const u8 *unit, int v, int j) {
    const i16 *p = (const i16 *)unit + (j * WQ_NV + v) * VL;
#if defined(__AVX512F__) && ONNXC_VL == 16
    return __builtin_ia32_vcvtph2ps512_mask(ld(p), vf{}, (u16)-1, 4);
#elif defined(__F16C__) && ONNXC_VL == 8
    return __builtin_ia32_vcvtph2ps256(ld(p));
#else
    vi h = conv<i32, i16>(ld(p)), sign = (h & 0x8000) << 16;
    vf x = bits<vf>((h & 0x7fff) << 13) * 0x1p112f;  // denormals too
    vi inf = (h & 0x7c00) == 0x7c00;
    return bits<vf>(sign | (inf & (0x7f800000 | (h & 0x3ff) << 13)) | (~inf & bits<vi>(x)));
#endif
  }
};
struct WqBf16 {
  static constexpr int U = 2;
  OX vf get(const u8 *unit, int v, int j) {
    return bits<vf>(conv<i32, i16>(ld((const i16 *)unit + (j * WQ_NV + v) * VL)) << 16);
  }
};

// ---- zero points: none, small integers, or floats ----------------------------------------------------------
struct WqNone {
  OX vf get(const void *, i64) { return vf{}; }
  OX vf from(vf w, vf) { return w; }
};
struct WqByte {
  OX vf get(const void *z, i64 at) { return wq_bytes((const i8 *)z + at); }
  OX vf from(vf w, vf z) { return w - z; }
};
struct WqFloat {
  OX vf get(const void *z, i64 at) { return ld((const f32 *)z + at); }
  OX vf from(vf w, vf z) { return w - z; }
};

// ---- few rows ----------------------------------------------------------------------------------------------
// c[i * WQ_NR + n] = sum over k of a(i, k) b(k, n) for the columns of panel p. R rows of code, `rows` of A.
template <class Q, class Z, int R>
static __attribute__((noinline)) void wq_few(const WqMat &w, i64 p, const f32 *a, i64 lda, i64 rows, f32 *c) {
  static constexpr int T = R > 2 && VL < 16 ? 2 : WQ_NV, S = R == 1 ? 2 : 1;  // vectors at a time, chains of each
  const i64 G = w.blocks(), step = ox_up(w.bs, Q::U) * WQ_UNIT;
  const f32 *x[R];
  for (int v0 = 0; v0 < WQ_NV; v0 += T) {
    OX_UNROLL for (int i = 0; i < R; i++) x[i] = a + ox_min(i, rows - 1) * lda;
    vf total[R][T];
    OX_UNROLL for (int i = 0; i < R; i++)
      OX_UNROLL for (int v = 0; v < T; v++) total[i][v] = vf{};
    i64 at = p * G * WQ_NR + v0 * VL;
    const u8 *block = w.q + p * G * step;
    for (i64 left = w.K; left > 0; left -= w.bs, at += WQ_NR, block += step) {
      const u8 *u = block;
      vf z[T];
      OX_UNROLL for (int v = 0; v < T; v++) z[v] = Z::get(w.z, at + v * VL) * wq_lift<Q>;
      for (i64 rest = ox_min(w.bs, left); rest > 0; rest -= WQ_CHAIN) {
        vf sum[R][T][S];
        OX_UNROLL for (int i = 0; i < R; i++)
          OX_UNROLL for (int v = 0; v < T; v++)
            OX_UNROLL for (int h = 0; h < S; h++) sum[i][v][h] = vf{};
        i64 n = ox_min(rest, WQ_CHAIN);
        for (; n >= Q::U; n -= Q::U, u += WQ_UNIT) {
          OX_UNROLL for (int b = v0 * VL * 4; b < (v0 + T) * VL * 4; b += 64) __builtin_prefetch(u + WQ_AHEAD + b);
          OX_UNROLL for (int j = 0; j < Q::U; j++)
            OX_UNROLL for (int v = 0; v < T; v++) {
              const vf b = Z::from(Q::get(u, v0 + v, j), z[v]);
              OX_UNROLL for (int i = 0; i < R; i++) sum[i][v][j % S] += b * x[i][j];
            }
          OX_UNROLL for (int i = 0; i < R; i++) x[i] += Q::U;
        }
        for (int j = 0; j < n; j++) {
          OX_UNROLL for (int v = 0; v < T; v++) {
            const vf b = Z::from(Q::get(u, v0 + v, j), z[v]);
            OX_UNROLL for (int i = 0; i < R; i++) sum[i][v][0] += b * *x[i];
          }
          OX_UNROLL for (int i = 0; i < R; i++) x[i]++;
        }
        OX_UNROLL for (int v = 0; v < T; v++) {
          const vf s = ld(w.s + at + v * VL);
          OX_UNROLL for (int i = 0; i < R; i++)
            total[i][v] += (S > 1 ? sum[i][v][0] + sum[i][v][S - 1] : sum[i][v][0]) * (1.0f / wq_lift<Q>) * s;
        }
      }
    }
    OX_UNROLL for (int i = 0; i < R; i++)
      OX_UNROLL for (int v = 0; v < T; v++) st(c + i * WQ_NR + (v0 + v) * VL, total[i][v]);
  }
}
// One row, which is bound by the unpacking. Multiples of codes by a power of two change no bit of a sum, unless it
// overflows; then it is infinite or NaN to the end, and the panel is computed again from the codes themselves.
template <class Q, class Z>
static __attribute__((noinline)) void wq_one(const WqMat &w, i64 p, const f32 *a, i64 lda, i64 rows, f32 *c) {
#if defined(__AVX2__) && ONNXC_VL == 8
  if constexpr (__is_same(Q, WqInt<4>) && !__is_same(Z, WqFloat)) {
    wq_few<WqHigh, Z, 1>(w, p, a, lda, rows, c);
    vf any{};
    OX_UNROLL for (int v = 0; v < WQ_NV; v++) any += ld(c + v * VL) * 0.0f;  // NaN of what is not finite
    if (__builtin_expect(!__builtin_ia32_movmskps256((vf)(any != any)), 1)) return;
  }
#endif
  wq_few<Q, Z, 1>(w, p, a, lda, rows, c);
}

// ---- many rows ---------------------------------------------------------------------------------------------
// The first strip of rows (all WQ_MR of them) multiplies what it unpacks while it stores it for the strips to come:
// b[k - k0][WQ_HR] = the weights of steps [k0, k1) and of WQ_HV vectors of panel p, from vector v0 on.
template <class Q, class Z>
static __attribute__((noinline)) void wq_first(const WqMat &w, i64 p, int v0, i64 k0, i64 k1, const f32 *a, f32 *b,
                                               f32 *c, bool add) {
  const i64 G = w.blocks(), step = ox_up(w.bs, Q::U) * WQ_UNIT;
  vf sum[WQ_MR][WQ_HV];
  OX_UNROLL for (int i = 0; i < WQ_MR; i++)
    OX_UNROLL for (int v = 0; v < WQ_HV; v++) sum[i][v] = vf{};
  i64 g = k0 / w.bs, r = k0 - g * w.bs;  // block, and step in it
  for (i64 k = k0; k < k1; g++, r = 0) {
    const i64 end = ox_min(k1, k - r + w.bs), at = (p * G + g) * WQ_NR + v0 * VL;
    const u8 *u = w.q + (p * G + g) * step + r / Q::U * WQ_UNIT;
    vf s[WQ_HV], z[WQ_HV];
    OX_UNROLL for (int v = 0; v < WQ_HV; v++) s[v] = ld(w.s + at + v * VL), z[v] = Z::get(w.z, at + v * VL);
    const auto one = [&](int j) OX_LAMBDA {
      vf x[WQ_HV];
      OX_UNROLL for (int v = 0; v < WQ_HV; v++, b += VL) st(b, x[v] = Z::from(Q::get(u, v0 + v, j), z[v]) * s[v]);
      OX_UNROLL for (int i = 0; i < WQ_MR; i++)
        OX_UNROLL for (int v = 0; v < WQ_HV; v++) sum[i][v] += x[v] * a[i * WQ_AS];
      a++;
    };
    for (int j = (int)(r % Q::U); k < end; u += WQ_UNIT, j = 0)
      if (j == 0 && k + Q::U <= end) {
        if (v0 == 0)  // for the other half, too
          OX_UNROLL for (int i = 0; i < WQ_UNIT; i += 64) __builtin_prefetch(u + WQ_AHEAD + i);
        OX_UNROLL for (int i = 0; i < Q::U; i++) one(i);
        k += Q::U;
      } else {
        for (; j < Q::U && k < end; j++, k++) one(j);
      }
  }
  OX_UNROLL for (int i = 0; i < WQ_MR; i++)
    OX_UNROLL for (int v = 0; v < WQ_HV; v++) {
      f32 *d = c + i * WQ_HR + v * VL;
      st(d, add ? ld(d) + sum[i][v] : sum[i][v]);
    }
}

// Readers of A: write rows [m, m + rows), columns [k, k + kc) to d in rows of WQ_AS.
struct WqRows {
  const f32 *p;
  i64 lda;
  OX_LAMBDA void operator()(f32 *d, i64 m, i64 rows, i64 k, i64 kc) const {
    const f32 *s = p + m * lda + k;
    for (i64 i = 0; i < rows; i++, s += lda, d += WQ_AS) {
      i64 j = 0;
      for (; j + VL <= kc; j += VL) {
        __builtin_prefetch(s + 4 * lda + j, 0, 2);  // rows are short runs that hardware does not foresee
        st(d + j, ld(s + j));
      }
      if (j < kc) st(d + j, ldn(s + j, (int)(kc - j)));
    }
  }
};
struct WqStrided {
  const f32 *p;
  i64 sm, sk;
  OX_LAMBDA void operator()(f32 *d, i64 m, i64 rows, i64 k, i64 kc) const {
    for (i64 j = 0; j < kc; j++)
      for (i64 i = 0; i < rows; i++) d[i * WQ_AS + j] = p[(m + i) * sm + (k + j) * sk];
  }
};

// c[i][j] (+)= sum over k of a[i * WQ_AS + k] * b[k * WQ_HR + j], for R rows.
template <int R> static __attribute__((noinline)) void wq_rows(i64 kc, const f32 *a, const f32 *b, f32 *c, bool add) {
  vf s[R][WQ_HV];
  OX_UNROLL for (int i = 0; i < R; i++)
    OX_UNROLL for (int j = 0; j < WQ_HV; j++) s[i][j] = vf{};
  _Pragma("GCC unroll 4") for (i64 k = 0; k < kc; k++, b += WQ_HR) {
    vf v[WQ_HV];
    OX_UNROLL for (int j = 0; j < WQ_HV; j++) v[j] = ld(b + j * VL);
    OX_UNROLL for (int i = 0; i < R; i++)
      OX_UNROLL for (int j = 0; j < WQ_HV; j++) s[i][j] += v[j] * a[i * WQ_AS + k];
  }
  OX_UNROLL for (int i = 0; i < R; i++)
    OX_UNROLL for (int j = 0; j < WQ_HV; j++) {
      f32 *d = c + i * WQ_HR + j * VL;
      st(d, add ? ld(d) + s[i][j] : s[i][j]);
    }
}
// Tiles exist for even counts of rows, the first for WQ_MR: rows more are computed on zeros and dropped.
OX i64 wq_most(i64 rows) { return ox_max(WQ_MR, (rows + 1) & ~1); }
template <int R = WQ_MR> OX void wq_tile(i64 r, i64 kc, const f32 *a, const f32 *b, f32 *c, bool add) {
  if constexpr (R > 2)
    if (r < R) return wq_tile<R - 2>(r, kc, a, b, c, add);
  wq_rows<R>(kc, a, b, c, add);
}

// One product. What depends on codes, reader and epilogue is called through pointers, a panel at a time: the
// loops around are compiled once.
struct WqRun {
  void (*few[3])(const WqMat &w, i64 p, const f32 *a, i64 lda, i64 rows, f32 *c);  // for 1, 2 and 4 rows
  void (*first)(const WqMat &w, i64 p, int v0, i64 k0, i64 k1, const f32 *a, f32 *b, f32 *c, bool add);
  void (*read)(const void *a, f32 *d, i64 m, i64 rows, i64 k, i64 kc);
  void (*finish)(const void *epi, const f32 *c, i64 cs, i64 m, i64 rows, i64 n, i64 end);
  const void *a, *epi;
  WqMat w;
  f32 *scratch;
};
// The closures are copied, so that what they captured by value stays in registers.
template <class A> static void wq_read(const void *a, f32 *d, i64 m, i64 rows, i64 k, i64 kc) {
  const A copy = *(const A *)a;
  copy(d, m, rows, k, kc);
}
template <class E>
static void wq_finish(const void *epi, const f32 *c, i64 cs, i64 m, i64 rows, i64 n, i64 end) {
  const E copy = *(const E *)epi;
  for (; n < end; n += VL, c += VL) {
    if (n + VL <= end)
      for (i64 i = 0; i < rows; i++) copy(m + i, n, ld(c + i * cs), Full{});
    else
      for (i64 i = 0; i < rows; i++) copy(m + i, n, ld(c + i * cs), Part{(int)(end - n)});
  }
}

static __attribute__((noinline)) void wq_few_blocks(const WqRun &x, const f32 *a, i64 lda, i64 M, i64 p0, i64 p1) {
  for (i64 p = p0; p < p1; p++)
    for (i64 m = 0; m < M; m += 4) {
      const i64 rows = ox_min(4, M - m), n = p * WQ_NR;
      x.few[rows > 2 ? 2 : rows - 1](x.w, p, a + m * lda, lda, rows, x.scratch);
      x.finish(x.epi, x.scratch, WQ_NR, m, rows, n, ox_min(x.w.N, n + WQ_NR));
    }
}

// Rows [m0, m1) by half panels [h0, h1). Partial sums of the K blocks are added in scratch.
static __attribute__((noinline)) void wq_many_blocks(const WqRun &x, i64 m0, i64 m1, i64 h0, i64 h1) {
  if (m1 <= m0 || h1 <= h0) return;
  const i64 K = x.w.K, bs = x.w.bs, kstep = bs < WQ_CHAIN ? WQ_CHAIN / bs * bs : WQ_CHAIN, nk = ox_max(1, ox_up(K, kstep));
  const i64 nm = ox_up(m1 - m0, WQ_MC), most = wq_most(ox_up(m1 - m0, nm));
  const i64 ks = ox_min(nk, ox_max(1, WQ_A_ROOM / (most * WQ_AS)));
  const i64 group = ks < nk ? ox_min(h1 - h0, WQ_C_ROOM / (most * WQ_HR)) : h1 - h0;
  f32 *const sums = x.scratch + WQ_A_ROOM, *const b = sums + WQ_C_ROOM;
  for (i64 im = 0; im < nm; im++) {
    const i64 mb = m0 + ox_cut(m1 - m0, nm, im), mn = m0 + ox_cut(m1 - m0, nm, im + 1) - mb, me = wq_most(mn);
    const i64 nt = ox_up(me - WQ_MR, WQ_MR);
    for (i64 hg = h0; hg < h1; hg += group)
      for (i64 kg = 0; kg < nk; kg += ks) {
        const i64 ke = ox_min(nk, kg + ks);
        for (i64 q = kg; q < ke && (hg == h0 || ks < nk); q++) {
          f32 *at = x.scratch + (q - kg) * me * WQ_AS;
          x.read(x.a, at, mb, mn, q * kstep, ox_min(kstep, K - q * kstep));
          for (i64 i = mn * WQ_AS; i < me * WQ_AS; i += VL) st(at + i, vf{});
        }
        for (i64 h = hg; h < ox_min(h1, hg + group); h++) {
          f32 *c = sums + (ks < nk ? (h - hg) * me * WQ_HR : 0);
          for (i64 q = kg; q < ke; q++) {
            const i64 k0 = q * kstep, k1 = ox_min(K, k0 + kstep);
            const f32 *at = x.scratch + (q - kg) * me * WQ_AS;
            x.first(x.w, h / 2, (int)(h % 2) * WQ_HV, k0, k1, at, b, c, q > 0);
            for (i64 it = 0, r, r0 = WQ_MR; it < nt; it++, r0 += r) {
              r = WQ_MR + ox_cut((me - WQ_MR) / 2, nt, it + 1) * 2 - r0;
              wq_tile(r, k1 - k0, at + r0 * WQ_AS, b, c + r0 * WQ_HR, q > 0);
            }
          }
          const i64 n = h * WQ_HR;
          if (ke == nk) x.finish(x.epi, c, WQ_HR, mb, mn, n, ox_min(x.w.N, n + WQ_HR));
        }
      }
  }
}

// ---- division of work --------------------------------------------------------------------------------------
// gm row ranges by gp panel ranges; K is never divided. A task takes at least 100 thousand codes; with many rows
// each packs its own A, and that pays from eight panels on.
struct WqGrid { i64 gm, gp, tasks; };
static __attribute__((noinline)) WqGrid wq_grid(i64 M, const WqMat &w, i64 threads) {
  const i64 P = w.panels(), worth = ox_min(1 << 20, w.K * P * WQ_NR * (M / 4 + 1) / 100000);
  const i64 blocks = M > WQ_FEW_ROWS ? ox_up(M, WQ_MC) : 1;
  i64 n = threads * 4;
  while (n > threads && M > WQ_FEW_ROWS && n > blocks * (P / 8)) n /= 2;
  n = ox_min(n, worth);
  if (n > threads) n -= n % threads;
  if (n <= 1 || M <= 0 || P <= 0) return {1, 1, 1};
  const i64 gm = ox_min(n, blocks);
  const i64 gp = ox_min(ox_up(n, gm), P);
  return {gm, gp, gm * gp};
}

// A as it lies in memory, where its rows are contiguous: then few rows need no copy of it.
OX const f32 *wq_direct(const WqRows &a, i64 *lda) { return *lda = a.lda, a.p; }
template <class A> OX const f32 *wq_direct(const A &, i64 *) { return nullptr; }

template <class Q, class Z, int KIND, class A, class E>
OX void wq_task(const WqGrid &g, i64 t, const A &a, const WqMat &w, i64 M, f32 *scratch, const E &epi) {
  WqRun x{{}, nullptr, wq_read<A>, wq_finish<E>, &a, &epi, w, scratch};
  i64 lda = 0;
  const f32 *direct = wq_direct(a, &lda);
  const i64 im = t / g.gp, ip = t % g.gp, P = w.panels(), p0 = ox_cut(P, g.gp, ip), p1 = ox_cut(P, g.gp, ip + 1);
  if constexpr ((KIND & WQ_FEW) != 0)
    if (KIND == WQ_FEW || (direct && M <= WQ_FEW_ROWS)) {
      x.few[0] = wq_one<Q, Z>, x.few[1] = wq_few<Q, Z, 2>, x.few[2] = wq_few<Q, Z, 4>;
      return wq_few_blocks(x, direct, lda, M, p0, p1);
    }
  if constexpr ((KIND & WQ_MANY) != 0) {
    x.first = wq_first<Q, Z>;
    wq_many_blocks(x, ox_cut(M, g.gm, im), ox_cut(M, g.gm, im + 1), 2 * p0, ox_min(ox_up(w.N, WQ_HR), 2 * p1));
  }
}
