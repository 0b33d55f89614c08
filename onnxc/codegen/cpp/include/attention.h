// Attention without a score matrix in memory: O = softmax(scale * Q K^T + bias) V for one head, in f32.
//
// Online softmax (Milakov and Gimelshein 2018; Dao et al. 2022): keys come in blocks; for each row the
// running maximum m and the sum l of exponentials are kept, and the output so far is scaled by
// exp(m_old - m_new) whenever the maximum grows.
//
//   for each block of keys                 K packed as [panel][d][2 VL keys], V as [panel][key][2 VL]
//     for each tile of MR rows
//       S  = (scale Q) K^T                 register tile; S stays in the L1 cache
//       S  = score(row, key, S)            masks and biases: generated code, VL consecutive keys a call
//       P  = exp(S - m), l, m              row by row
//       O  = O * exp(m_old - m) + P V      the same register tile
//
// A row's arithmetic depends neither on the rows beside it nor on the range it is computed in, so any
// split of the rows over threads gives the same bits. (One exception: where V is not finite, whether a
// masked key under `causal` turns the row into NaN depends on the tile that the row falls in.)
#pragma once
#include "vec.h"

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

namespace attn {

// A matrix of one head: element (row, column) is p[row * rs + column * cs].
struct In {
  const f32 *p;
  i64 rs, cs;
};

static constexpr i64 NO_CAUSAL = (i64)1 << 60;

// The problem of one key/value head. `group` query heads share it (grouped-query attention): row
// r = g * sq + i is query i of head g, and head g of Q begins q_group elements after head g - 1.
struct Shape {
  i64 sq, sk, d, dv;
  f32 scale = 1;
  i64 causal = NO_CAUSAL;  // query i sees keys 0 .. i + causal; NO_CAUSAL: all of them
  i64 group = 1, q_group = 0;
};

// The score function of plain attention.
struct Plain {
  template <class L> vf operator()(i64, i64, vf s, L) const { return s; }
};

#if (defined(__AVX512F__) && ONNXC_VL == 16) || defined(__aarch64__)
static constexpr int MR = 12;  // 24 of 32 registers accumulate
#else
static constexpr int MR = 6;  // 12 of 16
#endif
static constexpr int UNIT = MR / 3;  // tiles have 1, 2 or 3 units of rows
static constexpr int NR = 2 * VL;    // columns of a tile
static constexpr int KB = 256;       // keys of a block
static constexpr int LD = KB + 16;   // row pitch of Q and S in scratch, no power of two
static constexpr int RB = MR * 128;   // most rows that share one packed block of keys
static constexpr i64 O_ROOM = MR > 6 ? 98304 : 32768;  // floats of output that they may have: a third of the L2 cache
static constexpr int FEW = 8;        // up to so many rows, K and V are read in place
static constexpr int AHEAD = 32;     // rows of K and V that packing asks for early
static_assert(KB % NR == 0 && FEW % UNIT == 0, "blocks are made of whole tiles");

OX i64 up(i64 a, i64 b) { return (a + b - 1) / b * b; }
OX i64 lesser(i64 a, i64 b) { return a < b ? a : b; }

// Rows that share one packed block of keys: every such block is packed once for each of them.
OX i64 rows_together(i64 dv) {
  i64 n = O_ROOM / up(dv > 0 ? dv : 1, VL) / MR * MR;
  return n < 8 * MR ? 8 * MR : n < RB ? n : RB;
}

// Floats of scratch that one call needs (64-byte aligned); it depends on neither sq nor sk.
OX i64 scratch_floats(i64 d, i64 dv) {
  i64 rows = rows_together(dv);
  return 2 * MR * LD + 2 * NR + KB * d + (KB + rows) * up(dv, VL) + 2 * (rows + VL) + 16;
}

// Rows per work item: whole heads if that makes two items a thread, else ranges of whole tiles (each item
// packs the keys for itself, which costs about as much as the work on 6 rows).
OX i64 rows_per_item(i64 rows, i64 heads, i64 threads) {
  i64 parts = threads > 1 ? (2 * threads + heads - 1) / heads : 1, n = up((rows + parts - 1) / parts, MR);
  return n > 4 * MR ? n : 4 * MR;
}

// ---- vector helpers ----

// Like maxps: b where either is NaN.
OX vf vmax(vf a, vf b) {
#if defined(__AVX512F__) && ONNXC_VL == 16
  return __builtin_ia32_maxps512_mask(a, b, a, (u16)-1, 4);
#elif defined(__AVX__) && ONNXC_VL == 8
  return __builtin_ia32_maxps256(a, b);
#elif defined(__SSE2__) && ONNXC_VL == 4
  return __builtin_ia32_maxps(a, b);
#else
  return a > b ? a : b;
#endif
}

// Index vectors are written as packs, so that they are constants from the start: filled by a loop they
// are built at run time, lane by lane.
template <int... I> struct Lanes {
  // The low (high) halves of a and b interleaved: a0 b0 a1 b1 ...
  template <int HIGH> OX vf zip(vf a, vf b) {
    return __builtin_shuffle(a, b, vi{I / 2 + (I & 1) * VL + HIGH * (VL / 2)...});
  }
  // Lane i of the result is lane i + BY, cyclically.
  template <int BY> OX vf rotate(vf a) { return __builtin_shuffle(a, vi{((I + BY) & (VL - 1))...}); }
  // All ones in the first n lanes.
  OX vi first(int n) { return vi{I...} < n; }
};
template <int N> struct lanes_to { typedef Lanes<__integer_pack(N)...> type; };
typedef lanes_to<VL>::type Lane;

OX vf splat(f32 x) { return x - vf{}; }  // x - 0 is x, -0.0 and NaN included
template <int H = VL / 2> OX f32 hmax(vf a) {
  if constexpr (H == 0) return a[0];
  else return hmax<H / 2>(vmax(a, Lane::rotate<H>(a)));
}
template <int H = VL / 2> OX f32 hsum(vf a) {
  if constexpr (H == 0) return a[0];
  else return hsum<H / 2>(a + Lane::rotate<H>(a));
}

// e^(x - m) for x <= m and m finite: exactly 0 where x is -inf, NaN for NaN. (x - m) log2(e) = n + f; 2^f is a
// minimax polynomial of degree 5.
#if defined(__AVX512DQ__) && ONNXC_VL == 16
// One instruction takes f = z - floor(z), 0 for an infinity, and one multiplies by 2^floor(z).
OX vf exp_below(vf x, vf m) {
  vf z = (x - m) * 1.44269504f;
  vf f = __builtin_ia32_reduceps512_mask(z, 9, z, (u16)-1);
  vf p = f * 1.86713007e-3f + 9.01703032e-3f;
  p = p * f + 5.57999131e-2f;
  p = p * f + 2.40164450e-1f;
  p = p * f + 6.93151312e-1f;
  p = p * f + 1.0f;
  return __builtin_ia32_scalefps512_mask(p, z, p, (u16)-1, 4);
}
#else
// f is in [-1/2, 1/2]; 2^n has n + 127 in its exponent bits, read off the rounded sum. 0 below 2^-126.5.
OX vf exp_below(vf x, vf m) {
  const f32 LOG2E = 1.44269504f, BIG = 12582912.f + 127.f;  // 1.5 * 2^23 + the exponent's bias
  x = x - m;
  x = vmax(splat(-88.0297f), x);                               // -127 / log2(e): 2^n is then +0
  vf t = x * LOG2E + BIG;
  vf f = x * LOG2E - (t - BIG);
  vf p = f * 1.32764666e-3f + 9.67554096e-3f;
  p = p * f + 5.55071346e-2f;
  p = p * f + 2.40221202e-1f;
  p = p * f + 6.93146944e-1f;
  p = p * f + 1.0f;
  return p * bits<vf>(bits<vi>(t) << 23);
}
#endif

// Lane i of the result is `op` over the lanes of t[i], for VL vectors.
template <int H = VL / 2, class Op> OX vf across(const vf *t, Op op) {
  if constexpr (H == 0) {
    return t[0];
  } else {
    vf u[H];
    OX_UNROLL for (int i = 0; i < H; i++) u[i] = op(Lane::zip<0>(t[i], t[i + H]), Lane::zip<1>(t[i], t[i + H]));
    return across<H / 2>(u, op);
  }
}
OX vf add_lanes(const vf *t) { return across(t, [](vf a, vf b) OX_LAMBDA { return a + b; }); }
OX vf max_lanes(const vf *t) { return across(t, [](vf a, vf b) OX_LAMBDA { return vmax(a, b); }); }

// ---- the register tile ----

// C[i][:] = beta[i] * C[i][:] + sum over k of A[i][k] B[k][:], for M rows and N vectors; beta null means
// 0 and reads no C. The pitch of A is LD, that of B is `pitch`. Accumulators start at zero in every call:
// a chain of additions is then as long as one block, not as the sequence.
template <int M, int N>
__attribute__((noinline)) static void tile(const f32 *A, const f32 *B, i64 pitch, i64 kn, f32 *C, i64 ldc,
                                           const f32 *beta) {
  vf c[M][N];
  i64 ahead = 16 * pitch;
  OX_UNROLL for (int i = 0; i < M; i++)
    OX_UNROLL for (int j = 0; j < N; j++) c[i][j] = vf{};
  _Pragma("GCC unroll 2") for (i64 k = 0; k < kn; k++, B += pitch) {
    vf b[N];
    OX_UNROLL for (int j = 0; j < N; j++) {
      __builtin_prefetch(B + j * VL + ahead);
      b[j] = ld(B + j * VL);
    }
    OX_UNROLL for (int i = 0; i < M; i++)
      OX_UNROLL for (int j = 0; j < N; j++) c[i][j] += b[j] * A[i * LD + k];
  }
  OX_UNROLL for (int i = 0; i < M; i++)
    OX_UNROLL for (int j = 0; j < N; j++) {
      f32 *p = C + i * ldc + j * VL;
      st(p, beta ? ld(p) * beta[i] + c[i][j] : c[i][j]);
    }
}

template <int N>
OX void pick_tile(int units, const f32 *A, const f32 *B, i64 pitch, i64 kn, f32 *C, i64 ldc,
                  const f32 *beta) {
  if (units == 3) tile<3 * UNIT, N>(A, B, pitch, kn, C, ldc, beta);
  else if (units == 2) tile<2 * UNIT, N>(A, B, pitch, kn, C, ldc, beta);
  else tile<UNIT, N>(A, B, pitch, kn, C, ldc, beta);
}

// A matrix as panels of NR columns, `step` floats apart; a last panel of VL columns has a pitch of its own.
struct Panels {
  const f32 *p;
  i64 step, pitch, last_pitch;
};

// One tile of rows, `units` of UNIT rows (1 to 3), against the first `cols` columns of B (a multiple of VL).
OX void panels(int units, const f32 *A, Panels B, i64 kn, f32 *C, i64 ldc, i64 cols, const f32 *beta) {
  i64 c = 0;
  for (; c + NR <= cols; c += NR, B.p += B.step) pick_tile<2>(units, A, B.p, B.pitch, kn, C + c, ldc, beta);
  if (c < cols) pick_tile<1>(units, A, B.p, B.last_pitch, kn, C + c, ldc, beta);
}

// Units of the next tile when `left` units remain: never a single unit after full tiles.
OX int next_units(i64 left) { return left == 4 ? 2 : left >= 3 ? 3 : (int)left; }

// ---- packing ----

// d[c * pitch + i] = row i of s, column c; n of VL rows exist (the others become 0), cn of VL columns.
__attribute__((noinline)) static void transpose(const f32 *s, i64 rs, int n, int cn, f32 *d, i64 pitch) {
  vf r[VL], t[VL];
  if (n < VL || cn < VL) {
    for (int i = 0; i < VL; i++) t[i] = i < n ? ldn(s + i * rs, cn) : vf{};
    s = (const f32 *)t, rs = VL;
  }
  OX_UNROLL for (int i = 0; i < VL; i++) r[i] = ld(s + i * rs);
  OX_UNROLL for (int h = 1; h < VL; h *= 2) {  // each stage is a perfect shuffle of the whole square
    vf u[VL];
    OX_UNROLL for (int i = 0; i < VL / 2; i++) {
      u[2 * i] = Lane::zip<0>(r[i], r[i + VL / 2]);
      u[2 * i + 1] = Lane::zip<1>(r[i], r[i + VL / 2]);
    }
    OX_UNROLL for (int i = 0; i < VL; i++) r[i] = u[i];
  }
  OX_UNROLL for (int i = 0; i < VL; i++) {
    if (i < cn) st(d + i * pitch, r[i]);
  }
}

// Asks for n columns of one row (rows of a head are often far apart, where the hardware sees no stream).
OX void prefetch_row(const f32 *p, i64 n) {
  for (i64 c = 0; c < n; c += 16) __builtin_prefetch(p + c);
}

// A block of n rows of s, transposed: panels of NR rows as [column][row], the last one VL rows wide if
// no more are needed; missing rows become 0.
static void pack_rows_as_lanes(In s, i64 n, i64 cols, f32 *d) {
  for (i64 r = 0; r < n; r += NR, d += NR * cols) {
    int width = n - r > VL ? NR : VL;
    for (int x = 0; x < width; x += VL) {
      int have = (int)lesser(n - r - x, VL);
      const f32 *p = s.p + (r + x) * s.rs;
      if (s.cs == 1) {
        for (int i = 0; i < VL; i++) prefetch_row(p + (i + AHEAD) * s.rs, cols);
        for (i64 c = 0; c < cols; c += VL)
          transpose(p + c, s.rs, have, (int)lesser(cols - c, VL), d + c * width + x, width);
      } else if (s.rs == 1 && have == VL) {
        for (i64 c = 0; c < cols; c++) st(d + c * width + x, ld(p + c * s.cs));
      } else {
        for (i64 c = 0; c < cols; c++) st(d + c * width + x, lds(p + c * s.cs, s.rs, have));
      }
    }
  }
}

// A block of n rows of s: panels of NR columns as [row][column], the last one VL wide if no more are
// needed; missing columns become 0.
static void pack_columns(In s, i64 n, i64 cols, f32 *d) {
  for (i64 c = 0; c < cols; c += NR) {
    int width = cols - c > VL ? NR : VL;
    if (s.cs == 1 && cols - c >= NR) {
      const f32 *p = s.p + c;
      for (i64 r = 0; r < n; r++, p += s.rs, d += NR) {
        OX_UNROLL for (int x = 0; x < NR; x += 16) __builtin_prefetch(p + AHEAD * s.rs + x);
        OX_UNROLL for (int x = 0; x < NR; x += VL) st(d + x, ld(p + x));
      }
      continue;
    }
    for (i64 r = 0; r < n; r++, d += width) {
      if (s.cs == 1) prefetch_row(s.p + (r + AHEAD) * s.rs + c, width);
      for (int x = 0; x < width; x += VL) {
        int have = (int)lesser(cols - c - x, VL);
        const f32 *p = s.p + r * s.rs + (c + x) * s.cs;
        st(d + x, s.cs != 1 ? lds(p, s.cs, have) : have == VL ? ld(p) : ldn(p, have));
      }
    }
  }
}

// Row of Q: n columns, times scale.
static void copy_scaled(const f32 *p, i64 cs, i64 n, f32 scale, f32 *d) {
  for (i64 c = 0; c < n; c += VL) {
    int have = (int)lesser(n - c, VL);
    vf x = cs != 1 ? lds(p + c * cs, cs, have) : have == VL ? ld(p + c) : ldn(p + c, have);
    st(d + c, x * scale);
  }
}

// ---- softmax of the rows of one block ----

// Whether a score function changes anything.
OX constexpr bool changes(const Plain &) { return false; }
template <class Score> OX constexpr bool changes(const Score &) { return true; }

// Raw scores s[0 .. n) of `row` for keys k0 ... become final scores, -inf up to a whole vector; returns
// their maximum, lane by lane.
template <class Score> OX vf row_scores(f32 *s, i64 row, i64 k0, i64 n, const Score &score) {
  const f32 INF = __builtin_inff();
  vf top = splat(-INF);
  i64 j = 0;
  for (; j + VL <= n; j += VL) {
    vf v = score(row, k0 + j, ld(s + j), Full{});
    if (changes(score)) st(s + j, v);
    top = vmax(top, v);
  }
  if (j < n) {
    int have = (int)(n - j);
    vf v = score(row, k0 + j, ld(s + j), Part{have});
    v = sel<f32>(Lane::first(have), v, splat(-INF));
    st(s + j, v);
    top = vmax(top, v);
  }
  return top;
}

// s becomes exp(s - base) for n keys and 0 up to `pad`; returns the sum, lane by lane.
OX vf row_exp(f32 *s, i64 n, i64 pad, f32 base) {
  vf sum = vf{}, b = splat(base);
  i64 j = 0;
  _Pragma("GCC unroll 2") for (; j < n; j += VL) {
    vf p = exp_below(ld(s + j), b);
    st(s + j, p);
    sum += p;
  }
  for (; j < pad; j += VL) st(s + j, vf{});
  return sum;
}

// One output row: o / l. All keys masked gives 0 / 0 = NaN, as softmax of -inf everywhere does; under
// GUARD a NaN row of probabilities becomes zeros (torch's exporter writes IsNaN and Where for this).
template <bool GUARD, class Out>
OX void finish_row(const f32 *o, f32 l, i64 row, i64 dv, bool empty, const Out &out) {
  bool zero = empty || (GUARD && !(l > 0));
  f32 r = 1 / l;
  i64 c = 0;
  for (; c + VL <= dv; c += VL) out(row, c, zero ? vf{} : ld(o + c) * r, Full{});
  if (c < dv) out(row, c, zero ? vf{} : ld(o + c) * r, Part{(int)(dv - c)});
}

// Keys that row r may see, from key k0 on, at most n.
OX i64 visible(const Shape &z, i64 r, i64 k0, i64 n) {
  if (z.causal == NO_CAUSAL) return n;
  i64 i = z.group > 1 ? r % z.sq : r, v = i + z.causal + 1 - k0;
  return v < 0 ? 0 : v < n ? v : n;
}
// The same, largest over rows [a, b).
OX i64 visible_any(const Shape &z, i64 a, i64 b, i64 k0, i64 n) {
  bool wraps = z.group > 1 && a / z.sq != (b - 1) / z.sq;
  return visible(z, wraps ? z.sq - 1 : b - 1, k0, n);
}
OX const f32 *query(const Shape &z, In q, i64 r) {
  return z.group > 1 ? q.p + r / z.sq * z.q_group + r % z.sq * q.rs : q.p + r * q.rs;
}

// ---- many rows: packed blocks ----

// Where the parts of one thread's scratch lie.
struct Room {
  f32 *q, *s, *top, *factor;  // of one tile: rows of Q, scores, maxima, factors
  f32 *k, *v;                 // the packed block of keys
  f32 *o, *m, *l;             // of rows_together: output so far, running maxima, sums
};
OX Room room(f32 *w, i64 d, i64 dv) {
  Room x;
  x.q = w, x.s = x.q + MR * LD, x.top = x.s + MR * LD, x.factor = x.top + NR, x.k = x.factor + NR;
  i64 rows = rows_together(dv);
  x.v = x.k + KB * d, x.o = x.v + KB * up(dv, VL), x.m = x.o + rows * up(dv, VL), x.l = x.m + rows + VL;
  return x;
}

// S = (scale Q) K^T for the rows [r, r + n) of one tile and `cols` keys of the packed block.
static void tile_scores(const Shape &z, In q, i64 r, i64 n, int units, i64 cols, const Room &x) {
  f32 ones[MR];
  OX_UNROLL for (int i = 0; i < MR; i++) ones[i] = 1;
  i64 c = 0;
  do {  // columns of Q by chunks that fit the pitch
    i64 cn = lesser(z.d - c, KB), full = cols / NR * NR;
    for (i64 i = 0; i < n; i++) prefetch_row(query(z, q, r + i) + c * q.cs + MR * q.rs, q.cs == 1 ? cn : 0);
    for (i64 i = 0; i < n; i++) copy_scaled(query(z, q, r + i) + c * q.cs, q.cs, cn, z.scale, x.q + i * LD);
    const f32 *beta = c ? ones : nullptr;
    panels(units, x.q, {x.k + c * NR, z.d * NR, NR, 0}, cn, x.s, LD, full, beta);
    if (full < cols) panels(units, x.q, {x.k + full * z.d + c * VL, 0, 0, VL}, cn, x.s + full, LD, VL, beta);
    c += KB;
  } while (c < z.d);
}

// Scores of rows [r, r + n) for keys k0 .. k0 + kn become exponentials; m (running maxima), l (sums) and x.factor
// (what the output and the sums so far are to be multiplied by) are brought up to date, VL rows at a time.
template <class Score>
OX void softmax(const Shape &z, i64 r, int n, i64 k0, i64 kn, i64 pad, f32 *m, f32 *l, const Room &x,
                const Score &score) {
  for (int a = 0; a < n; a += VL) {
    int have = n - a < VL ? n - a : VL;
    vf t[VL];
    for (int i = 0; i < have; i++)
      t[i] = row_scores(x.s + (a + i) * LD, r + a + i, k0, visible(z, r + a + i, k0, kn), score);
    for (int i = have; i < VL; i++) t[i] = vf{};
    vf old = ldn(m + a, have), now = vmax(old, max_lanes(t));
    // Nothing seen yet: subtract 0, since -inf - -inf is NaN and -inf - 0 is not.
    vf base = sel<f32>(now == -__builtin_inff(), vf{}, now), factor = exp_below(old, base);
    stn(m + a, now, have);
    st(x.top + a, base);
    st(x.factor + a, factor);
    for (int i = 0; i < have; i++)
      t[i] = row_exp(x.s + (a + i) * LD, visible(z, r + a + i, k0, kn), pad, x.top[a + i]);
    stn(l + a, ldn(l + a, have) * factor + add_lanes(t), have);
  }
}

// One tile, rows [r, r + n), against the packed keys k0 .. k0 + kn; `at` is its place in o, m, l.
template <class Score>
static void tile_rows(const Shape &z, In q, i64 r, i64 n, i64 at, i64 k0, i64 kn, const Room &x,
                      const Score &score) {
  int units = (int)((n + UNIT - 1) / UNIT);
  i64 dvp = up(z.dv, VL), pad = up(visible_any(z, r, r + n, k0, kn), VL);
  // The last panel of the block is narrow if the block needs no more; those before it never are.
  tile_scores(z, q, r, n, units, lesser(up(pad, NR), up(kn, VL)), x);
  softmax(z, r, (int)n, k0, kn, pad, x.m + at, x.l + at, x, score);
  const f32 *beta = k0 ? x.factor : nullptr;
  panels(units, x.s, {x.v, kn * NR, NR, VL}, lesser(pad, kn), x.o + at * dvp, dvp, dvp, beta);
}

// Rows [a, b), at most rows_together.
template <bool GUARD, class Score, class Out>
static void many_rows(const Shape &z, In q, In k, In v, i64 a, i64 b, f32 *w, const Score &score,
                      const Out &out) {
  i64 dvp = up(z.dv, VL), block = z.d + z.dv > 320 ? KB / 2 : KB, k0 = 0;
  Room x = room(w, z.d, z.dv);
  for (i64 i = 0; i < b - a; i++) x.m[i] = -__builtin_inff(), x.l[i] = 0;
  do {
    i64 kn = visible_any(z, a, b, k0, lesser(z.sk - k0, block)), rows;
    pack_rows_as_lanes(In{k.p + k0 * k.rs, k.rs, k.cs}, kn, z.d, x.k);
    pack_columns(In{v.p + k0 * v.rs, v.rs, v.cs}, kn, z.dv, x.v);
    for (i64 r = a; r < b; r += rows) {
      rows = lesser(UNIT * next_units((b - r + UNIT - 1) / UNIT), b - r);
      if (k0 && !visible_any(z, r, r + rows, k0, kn)) continue;  // finished in an earlier block
      tile_rows(z, q, r, rows, r - a, k0, kn, x, score);
      if (k0 + block < z.sk && visible_any(z, r, r + rows, k0 + block, 1)) continue;
      for (i64 i = r; i < r + rows; i++)
        finish_row<GUARD>(x.o + (i - a) * dvp, x.l[i - a], i, z.dv, z.sk == 0, out);
    }
    k0 += block;
  } while (k0 < z.sk && visible_any(z, a, b, k0, 1));
}

// ---- few rows: K and V are read once, in place ----

// Scores of one row (q, zero-padded to a multiple of VL) for n keys, K stored key by key.
static void score_row(const f32 *q, In k, i64 n, i64 d, f32 *s) {
  i64 full = d / VL * VL;
  vf t[VL];
  for (i64 j = 0; j < n; j += VL) {
    for (i64 i = 0; i < VL; i++) {
      const f32 *p = k.p + lesser(j + i, n - 1) * k.rs;
      vf x = full < d ? ld(q + full) * ldn(p + full, (int)(d - full)) : vf{};
      for (i64 c = 0; c < full; c += VL) x += ld(q + c) * ld(p + c);
      t[i] = x;
    }
    st(s + j, add_lanes(t));
  }
}

// Scores of UNIT rows (q has pitch dp, s has pitch LD): VL products at a time, UNIT rows by VL / UNIT keys.
static void score_unit(const f32 *q, i64 dp, In k, i64 n, i64 d, f32 *s) {
  static constexpr int KEYS = VL / UNIT;
  for (i64 j = 0; j < n; j += KEYS) {
    const f32 *p[KEYS];
    vf t[VL];
    OX_UNROLL for (int i = 0; i < KEYS; i++) p[i] = k.p + lesser(j + i, n - 1) * k.rs;
    OX_UNROLL for (int i = 0; i < VL; i++) t[i] = vf{};
    for (i64 c = 0; c < d; c += VL) {
      vf a[KEYS];
      if (c + VL <= d) { OX_UNROLL for (int i = 0; i < KEYS; i++) a[i] = ld(p[i] + c); }
      else { OX_UNROLL for (int i = 0; i < KEYS; i++) a[i] = ldn(p[i] + c, (int)(d - c)); }
      OX_UNROLL for (int r = 0; r < UNIT; r++) {
        vf b = ld(q + r * dp + c);
        OX_UNROLL for (int i = 0; i < KEYS; i++) t[r * KEYS + i] += a[i] * b;
      }
    }
    vf sums = add_lanes(t);
    OX_UNROLL for (int r = 0; r < UNIT; r++)
      __builtin_memcpy(s + r * LD + j, (f32 *)&sums + r * KEYS, KEYS * sizeof(f32));
  }
}

// Scores of one row for K stored transposed.
static void score_columns(const f32 *q, In k, i64 n, i64 d, f32 *s) {
  i64 j = 0;
  for (; j + 4 * VL <= n; j += 4 * VL) {
    vf t[4] = {};
    for (i64 c = 0; c < d; c++)
      OX_UNROLL for (int i = 0; i < 4; i++) t[i] += ld(k.p + c * k.cs + j + i * VL) * q[c];
    OX_UNROLL for (int i = 0; i < 4; i++) st(s + j + i * VL, t[i]);
  }
  for (; j < n; j += VL) {
    vf t = vf{};
    int have = (int)lesser(n - j, VL);
    for (i64 c = 0; c < d; c++) {
      const f32 *p = k.p + c * k.cs + j;
      t += (have == VL ? ld(p) : ldn(p, have)) * q[c];
    }
    st(s + j, t);
  }
}

// o[0 .. N vectors) = o * factor + sum over n keys of p[k] V[k]; `have` lanes of the last vector exist.
template <int N, class L>
OX void add_values(const f32 *p, const f32 *v, i64 rs, i64 n, f32 factor, f32 *o, L have) {
  vf x[N], y[N];
  OX_UNROLL for (int i = 0; i < N; i++) x[i] = ld(o + i * VL) * factor, y[i] = vf{};
  auto row = [&](const f32 *r, f32 s, vf *t) OX_LAMBDA {
    OX_UNROLL for (int i = 0; i < N; i++)
      t[i] += (i < N - 1 || (int)have == VL ? ld(r + i * VL) : ldn(r + i * VL, have)) * s;
  };
  i64 k = 0;
  for (; k + 2 <= n; k += 2) row(v + k * rs, p[k], x), row(v + (k + 1) * rs, p[k + 1], y);
  if (k < n) row(v + k * rs, p[k], x);
  OX_UNROLL for (int i = 0; i < N; i++) st(o + i * VL, x[i] + y[i]);
}

// Scores of the rows of a unit (one row if `alone`) for the n keys that k begins with.
OX void few_scores(bool alone, int rows, const f32 *q, In k, i64 n, i64 d, f32 *s) {
  i64 dp = up(d, VL);
  if (k.cs != 1) for (int i = 0; i < rows; i++) score_columns(q + i * dp, k, n, d, s + i * LD);
  else if (alone) score_row(q, k, n, d, s);
  else score_unit(q, dp, k, n, d, s);
}

// O = factor O + P V for the rows of a unit (one row if `alone`), V read in place.
static void few_values(bool alone, int rows, const f32 *s, In v, i64 n, i64 dv, const f32 *factor, f32 *o) {
  i64 dvp = up(dv, VL), c = alone ? dv / (4 * VL) * (4 * VL) : dv / VL * VL;
  if (alone) for (i64 x = 0; x < c; x += 4 * VL) add_values<4>(s, v.p + x, v.rs, n, *factor, o + x, Full{});
  else panels(1, s, {v.p, NR, v.rs, v.rs}, n, o, dvp, c, factor);
  for (; c < dv; c += VL)
    for (int i = 0; i < rows; i++)
      add_values<1>(s + i * LD, v.p + c, v.rs, n, factor[i], o + i * dvp + c, Part{(int)lesser(dv - c, VL)});
}

// Rows [a, b), at most FEW; `alone`: the problem has a single row.
template <bool GUARD, class Score, class Out>
static void few_rows(const Shape &z, In q, In k, In v, i64 a, i64 b, f32 *w, const Score &score,
                     const Out &out) {
  bool alone = z.group * z.sq == 1;
  i64 dp = up(z.d, VL), dvp = up(z.dv, VL), all = alone ? 1 : up(b - a, UNIT);
  i64 block = alone ? KB : KB / 2;  // a small block of K and V stays in L1 for the next unit
  Room x = room(w, z.d, z.dv);
  f32 *qs = x.k;  // nothing is packed
  for (i64 i = 0; i < all; i++) {  // rows of padding repeat the last one
    x.m[i] = -__builtin_inff(), x.l[i] = 0;
    copy_scaled(query(z, q, lesser(a + i, b - 1)), q.cs, z.d, z.scale, qs + i * dp);
    for (i64 c = 0; c < dvp; c += VL) st(x.o + i * dvp + c, vf{});
  }
  i64 see = visible_any(z, a, b, 0, z.sk);
  for (i64 k0 = 0; k0 < see; k0 += block)
    for (i64 r = a; r < b; r += UNIT) {
      int rows = (int)lesser(b - r, UNIT);
      i64 kn = visible_any(z, r, r + rows, k0, lesser(z.sk - k0, block)), at = r - a;
      if (!kn) continue;
      few_scores(alone, rows, qs + at * dp, In{k.p + k0 * k.rs, k.rs, k.cs}, kn, z.d, x.s);
      softmax(z, r, rows, k0, kn, up(kn, VL), x.m + at, x.l + at, x, score);
      few_values(alone, rows, x.s, In{v.p + k0 * v.rs, v.rs, v.cs}, kn, z.dv, x.factor, x.o + at * dvp);
    }
  for (i64 i = 0; i < b - a; i++) finish_row<GUARD>(x.o + i * dvp, x.l[i], a + i, z.dv, z.sk == 0, out);
}

// Rows [r0, r1) of the shape.group * shape.sq rows of one key/value head.
//
// score(row, key, s, lanes) -> vf: s holds scale * (q . k) for VL consecutive keys, of which the first
//   `lanes` exist (Full or Part, both convert to int): masks and biases are added here. Keys that `causal`
//   hides are never asked for.
// out(row, column, v, lanes): stores `lanes` consecutive columns of one row of the result.
// w: scratch_floats(d, dv) floats, one buffer per thread.
template <bool GUARD = false, class Score, class Out>
OX void attention(const Shape &z, In q, In k, In v, i64 r0, i64 r1, f32 *w, const Score &score,
                  const Out &out) {
  w = (f32 *)(((u64)w + 63) & ~(u64)63);
  bool in_place = z.group * z.sq <= FEW && v.cs == 1 && (k.cs == 1 || k.rs == 1);
  if (in_place) return few_rows<GUARD>(z, q, k, v, r0, r1, w, score, out);
  i64 n = rows_together(z.dv);
  for (i64 r = r0; r < r1; r += n) many_rows<GUARD>(z, q, k, v, r, lesser(r + n, r1), w, score, out);
}

}  // namespace attn
