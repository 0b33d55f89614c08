// Attention without a score matrix in memory: O = softmax(scale * Q K^T + bias) V for one head, in f32.
//
// Online softmax (Milakov and Gimelshein 2018; Dao et al. 2022): keys come in blocks; for each row the
// running maximum m and the sum l of exponentials are kept, and the output so far is scaled by
// exp(m_old - m_new) whenever the maximum grows.
//
//   for each block of keys                 K packed as [panel][d][2 VL keys], V as [panel][key][2 VL]
//     for each tile of MR rows
//       S  = (scale Q) K^T                 register tile; S stays in the L1 cache
//       S  = score(row, key, S), m         masks and biases: generated code, VL consecutive keys a call
//       P  = exp(S - m), l                 VL keys at a time, among the products of
//       O  = O * exp(m_old - m) + P V      the same register tile
//
// A tile leaves out the keys of a block that a mask hides from all of its rows, as soon as it is certain that
// their exponentials are exactly 0: a causal mask that comes as data costs half of the work, not all of it.
//
// A row's arithmetic depends neither on the rows beside it nor on the range it is computed in, so any
// split of the rows over threads gives the same bits. (One exception: where V is not finite, whether a
// masked key under `causal` turns the row into NaN depends on the tile that the row falls in.)
#pragma once
#include "vec.h"

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
static constexpr int KB = MR > 6 ? 512 : 256;  // most keys of a block
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

// Keys of a block: K and V of a block shall leave room in the L2 cache.
OX i64 keys_together(i64 d, i64 dv) {
  i64 n = KB;
  while (n > 128 && n * (d + dv) > 81920) n /= 2;
  return n;
}

// Floats of scratch that one call needs (64-byte aligned); it depends on neither sq nor sk.
OX i64 scratch_floats(i64 d, i64 dv) {
  i64 rows = rows_together(dv), keys = keys_together(d, dv);
  return 2 * MR * LD + 2 * NR + keys * d + (keys + rows) * up(dv, VL) + 2 * (rows + VL) + 16;
}

// Rows per work item: whole heads if that makes two items a thread, else ranges of whole tiles (each item packs the
// keys for itself, which costs about as much as the work on 6 rows). Long heads are divided further, into ranges of PART
// rows and more, until there are six items a thread: threads are rarely equally fast.
static constexpr i64 PART = 256;
OX i64 rows_per_item(i64 rows, i64 heads, i64 threads) {
  i64 parts = 1;
  if (threads > 1 && heads > 0) {
    i64 more = lesser((6 * threads + heads - 1) / heads, rows / PART);
    parts = (2 * threads + heads - 1) / heads;
    parts = parts > more ? parts : more;
  }
  i64 n = up((rows + parts - 1) / parts, MR);
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

// 2^(x - m) for x <= m and m finite, e^(x - m) where the scores are natural: exactly 0 where x is -inf, NaN for NaN.
// c: the constants, as whole vectors in memory, because register tiles around have no register left for them.
static constexpr f32 LOG2E = 1.44269504f;
#define OX_SPLAT(x) (vf{} + x)
#if defined(__AVX512DQ__) && ONNXC_VL == 16
// z = n + i / 32 + f with 0 <= f < 1 / 32: 2^(i / 32) from a table, 2^f a minimax polynomial of degree 2. A sum that is
// rounded down has i in its last bits; one instruction takes f (0 for an infinity), one multiplies by 2^floor(z). Three
// of these operations need the units that multiply. 0 below 2^-126: products of denormals, as masks of -100 make them,
// take 150 cycles each.
static const vf COEF[] = {
    {1.f, 1.02189715f, 1.04427378f, 1.0671404f, 1.09050773f, 1.11438674f, 1.13878863f, 1.16372486f,
     1.18920712f, 1.21524736f, 1.24185781f, 1.26905096f, 1.29683955f, 1.32523664f, 1.35425555f, 1.38390988f},
    {1.41421356f, 1.44518081f, 1.47682615f, 1.50916443f, 1.54221083f, 1.57598085f, 1.61049033f, 1.64575548f,
     1.68179283f, 1.7186193f, 1.75625216f, 1.79470908f, 1.83400809f, 1.87416763f, 1.91520656f, 1.95714412f},
    OX_SPLAT(0.2426527f), OX_SPLAT(0.69312376f), OX_SPLAT(12582912.f / 32), OX_SPLAT(LOG2E), OX_SPLAT(-126.f)};
template <bool NATURAL> OX vf exp_below(vf x, vf m, const vf *c) {
  vf z = x - m;
  if (NATURAL) z *= c[5];
  vi i = bits<vi>(__builtin_ia32_addps512_mask(z, c[4], z, (u16)-1, 9));
  vf f = __builtin_ia32_reduceps512_mask(z, 5 << 4 | 9, z, (u16)-1);
  vf t = __builtin_ia32_vpermi2varps512_mask(c[0], i, c[1], (u16)-1);
  vf p = f * c[2] + c[3];
  p = p * (f * t) + t;
  const u16 normal = (u16)__builtin_ia32_cmpps512_mask(z, c[6], 0x15, (u16)-1, 4);  // not less: NaN passes
  return __builtin_ia32_scalefps512_mask(p, z, vf{}, normal, 4);
}
#else
// z = n + f with f in [-1/2, 1/2]; 2^f is a minimax polynomial of degree 5; 2^n has n + 127 in its exponent bits, read
// off the rounded sum. 0 below 2^-126.5.
static const vf COEF[] = {
    OX_SPLAT(1.32764666e-3f), OX_SPLAT(9.67554096e-3f), OX_SPLAT(5.55071346e-2f), OX_SPLAT(2.40221202e-1f),
    OX_SPLAT(6.93146944e-1f), OX_SPLAT(1.f), OX_SPLAT(12582912.f + 127.f),  // 1.5 * 2^23 + the exponent's bias
    OX_SPLAT(LOG2E), OX_SPLAT(-127.f), OX_SPLAT(-88.0297f)};                // the least x: 2^n is then +0
template <bool NATURAL> OX vf exp_below(vf x, vf m, const vf *c) {
  x = vmax(c[NATURAL ? 9 : 8], x - m);
  vf t = (NATURAL ? x * c[7] : x) + c[6], n = t - c[6], f = (NATURAL ? x * c[7] : x) - n;
  vf p = f * c[0] + c[1];
  p = p * f + c[2];
  p = p * f + c[3];
  p = p * f + c[4];
  p = p * f + c[5];
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

// What a tile does besides, lane by lane: MAXIMA keeps in `row` the greatest of N vectors of each row of scores, which
// begin at `base`: those of the panel before, since a tile that stores maxima together with its scores waits for the
// stores. BASE2 and NATURAL find scores in A, less `base` they become exponentials; `row` takes their sums.
enum { NOTHING, MAXIMA, BASE2, NATURAL };
struct Extra {
  const f32 *base;
  vf *row;
};

// VL scores of each of N rows become exponentials.
template <int N, int WHAT> OX void exp_columns(f32 *A, const f32 *base, vf *sum) {
  const vf *c = COEF;
  asm volatile("" : "+r"(c));  // hidden, or the compiler takes registers for constants and spills the tile
  OX_UNROLL for (int i = 0; i < N; i++) {
    vf p = exp_below<WHAT == NATURAL>(ld(A + i * LD), splat(base[i]), c);
    st(A + i * LD, p);
    sum[i] += p;
  }
}

template <int M, int N> OX void add_products(const f32 *A, const f32 *B, i64 ahead, vf (&c)[M][N]) {
  vf b[N];
  OX_UNROLL for (int j = 0; j < N; j++) {
    __builtin_prefetch(B + j * VL + ahead);
    b[j] = ld(B + j * VL);
  }
  OX_UNROLL for (int i = 0; i < M; i++)
    OX_UNROLL for (int j = 0; j < N; j++) c[i][j] += b[j] * A[i * LD];
}

// C[i][:] = beta[i] * C[i][:] + sum over k of A[i][k] B[k][:], for M rows and N vectors; beta null means
// 0 and reads no C. The pitch of A is LD, that of B is `pitch`. Accumulators start at zero in every call:
// a chain of additions is then as long as one block, not as the sequence.
// Exponentials of the next VL keys are spread among the products of those before: most of what they do leaves the
// units that multiply alone.
template <int M, int N, int WHAT>
OX_APART void tile(f32 *A, const f32 *B, i64 pitch, i64 kn, f32 *C, i64 ldc, const f32 *beta, Extra x) {
  vf c[M][N];
  i64 ahead = 16 * pitch, k = 0;
  OX_UNROLL for (int i = 0; i < M; i++)
    OX_UNROLL for (int j = 0; j < N; j++) c[i][j] = vf{};
  if constexpr (WHAT == BASE2 || WHAT == NATURAL) {
    constexpr int STEP = 4, ROWS = M * STEP / VL;
    exp_columns<M, WHAT>(A, x.base, x.row);
    for (i64 next = VL; next < kn; next += VL) {
      f32 *s = A + next;
      const f32 *base = x.base;
      for (vf *sum = x.row; sum < x.row + M; k += STEP, s += ROWS * LD, base += ROWS, sum += ROWS) {
        exp_columns<ROWS, WHAT>(s, base, sum);
        OX_UNROLL for (int i = 0; i < STEP; i++, B += pitch) add_products(A + k + i, B, ahead, c);
      }
    }
  }
  if constexpr (WHAT == MAXIMA) {
    for (int i = 0; i < M; i++) {
      vf top = x.row[i];
      OX_UNROLL for (int j = 0; j < N; j++) top = vmax(top, ld(x.base + i * LD + j * VL));
      x.row[i] = top;
      if (k == kn) continue;
      add_products(A + k, B, ahead, c);
      k++, B += pitch;
    }
  }
  _Pragma("GCC unroll 2") for (; k < kn; k++, B += pitch) add_products(A + k, B, ahead, c);
  OX_UNROLL for (int i = 0; i < M; i++)
    OX_UNROLL for (int j = 0; j < N; j++) {
      f32 *p = C + i * ldc + j * VL;
      st(p, beta ? ld(p) * beta[i] + c[i][j] : c[i][j]);
    }
}

#ifdef ONNXC_APART
#define TILE(M, N, WHAT) \
  ONNXC_APART void tile<M, N, WHAT>(f32 *, const f32 *, i64, i64, f32 *, i64, const f32 *, Extra);
TILE(UNIT, 1, NOTHING) TILE(2 * UNIT, 1, NOTHING) TILE(MR, 1, NOTHING)
TILE(UNIT, 2, NOTHING) TILE(2 * UNIT, 2, NOTHING) TILE(MR, 2, NOTHING)
TILE(MR, 2, MAXIMA) TILE(MR, 2, BASE2) TILE(MR, 2, NATURAL)
#undef TILE
#endif

template <int N>
OX void pick_tile(int units, f32 *A, const f32 *B, i64 pitch, i64 kn, f32 *C, i64 ldc, const f32 *beta) {
  if (units == 3) tile<3 * UNIT, N, NOTHING>(A, B, pitch, kn, C, ldc, beta, {});
  else if (units == 2) tile<2 * UNIT, N, NOTHING>(A, B, pitch, kn, C, ldc, beta, {});
  else tile<UNIT, N, NOTHING>(A, B, pitch, kn, C, ldc, beta, {});
}

// A matrix as panels of NR columns, `step` floats apart; a last panel of VL columns has a pitch of its own.
struct Panels {
  const f32 *p;
  i64 step, pitch, last_pitch;
};

// One tile of rows, `units` of UNIT rows (1 to 3), against the columns [c, cols) of B (multiples of VL).
OX void panels(int units, f32 *A, Panels B, i64 kn, f32 *C, i64 ldc, i64 c, i64 cols, const f32 *beta) {
  for (B.p += c / NR * B.step; c + NR <= cols; c += NR, B.p += B.step)
    pick_tile<2>(units, A, B.p, B.pitch, kn, C + c, ldc, beta);
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
// LEVEL: 3 for the first level of the cache, 2 for the second.
template <int LEVEL = 3> OX void prefetch_row(const f32 *p, i64 n) {
  for (i64 c = 0; c < n; c += 16) __builtin_prefetch(p + c, 0, LEVEL);
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
OX void copy_scaled(const f32 *p, i64 cs, i64 n, f32 scale, f32 *d) {
  i64 c = 0;
  vf by = splat(scale);
  if (cs == 1) {
    for (; c + 4 * VL <= n; c += 4 * VL)
      OX_UNROLL for (int i = 0; i < 4 * VL; i += VL) st(d + c + i, ld(p + c + i) * by);
    for (; c + VL <= n; c += VL) st(d + c, ld(p + c) * by);
    if (c < n) st(d + c, ldn(p + c, (int)(n - c)) * by);
    return;
  }
  for (; c < n; c += VL) st(d + c, lds(p + c * cs, cs, (int)lesser(n - c, VL)) * by);
}

// ---- softmax of the rows of one block ----

// Whether a score function changes anything.
template <class Score> static constexpr bool changes_score = !__is_same(Score, Plain);
template <class Score> OX constexpr bool changes(const Score &) { return changes_score<Score>; }

// Raw scores s[j .. n) of `row` for keys k0 + j ... become final scores, -inf up to `pad`; returns their maximum and
// that of `top`, lane by lane.
template <class Score>
OX vf row_scores(f32 *s, i64 row, i64 k0, i64 j, i64 n, i64 pad, vf top, const Score &score) {
  const vf none = splat(-__builtin_inff());
  for (; j + VL <= n; j += VL) {
    vf v = score(row, k0 + j, ld(s + j), Full{});
    if (changes(score)) st(s + j, v);
    top = vmax(top, v);
  }
  if (j < n) {
    int have = (int)(n - j);
    vf v = sel<f32>(Lane::first(have), score(row, k0 + j, ld(s + j), Part{have}), none);
    st(s + j, v);
    top = vmax(top, v);
    j += VL;
  }
  for (; j < pad; j += VL) st(s + j, none);
  return top;
}

// One output row: o / l. All keys masked gives 0 / 0 = NaN, as softmax of -inf everywhere does; under
// GUARD a NaN row of probabilities becomes zeros (torch's exporter writes IsNaN and Where for this).
template <bool GUARD, class Out>
OX void finish_row(const f32 *o, f32 l, i64 row, i64 dv, bool empty, const Out &out) {
  bool zero = empty || (GUARD && !(l > 0));
  f32 r = 1 / l;
  i64 c = 0;  // + 0: no zero has a sign, whatever was skipped
  for (; c + VL <= dv; c += VL) out(row, c, zero ? vf{} : ld(o + c) * r + vf{}, Full{});
  if (c < dv) out(row, c, zero ? vf{} : ld(o + c) * r + vf{}, Part{(int)(dv - c)});
}

// Keys that row r may see, from key k0 on, at most n.
OX i64 visible(const Shape &z, i64 r, i64 k0, i64 n) {
  if (z.causal == NO_CAUSAL) return n;
  i64 i = z.group > 1 ? r % z.sq : r, v = i + z.causal + 1 - k0;
  return v < 0 ? 0 : v < n ? v : n;
}
// Whether rows [a, b) are not all of one head.
OX bool wraps(const Shape &z, i64 a, i64 b) { return z.group > 1 && a / z.sq != (b - 1) / z.sq; }
// The same as `visible`, largest over rows [a, b); smallest.
OX i64 visible_any(const Shape &z, i64 a, i64 b, i64 k0, i64 n) {
  return visible(z, wraps(z, a, b) ? z.sq - 1 : b - 1, k0, n);
}
OX i64 visible_all(const Shape &z, i64 a, i64 b, i64 k0, i64 n) { return visible(z, wraps(z, a, b) ? 0 : a, k0, n); }
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
  i64 rows = rows_together(dv), keys = keys_together(d, dv);
  x.v = x.k + keys * d, x.o = x.v + keys * up(dv, VL), x.m = x.o + rows * up(dv, VL), x.l = x.m + rows + VL;
  return x;
}

// Where the maxima of the first keys of a block, whole panels of them, are found as the scores after them are computed.
struct Early {
  i64 keys;
  vf *top;
};

// S = (scale Q) K^T for the rows [r, r + n) of one tile and `cols` keys of the packed block.
static void tile_scores(const Shape &z, In q, i64 r, i64 n, int units, i64 cols, f32 scale, Early e, const Room &x) {
  f32 ones[MR];
  OX_UNROLL for (int i = 0; i < MR; i++) ones[i] = 1;
  i64 c = 0;
  do {  // columns of Q by chunks that fit the pitch
    i64 cn = lesser(z.d - c, KB), full = cols / NR * NR;
    for (i64 i = 0; i < n; i++) prefetch_row(query(z, q, r + i) + c * q.cs + MR * q.rs, q.cs == 1 ? cn : 0);
    for (i64 i = 0; i < n; i++) copy_scaled(query(z, q, r + i) + c * q.cs, q.cs, cn, scale, x.q + i * LD);
    const f32 *beta = c ? ones : nullptr;
    i64 early = c + KB >= z.d ? e.keys : 0;
    Panels k{x.k + c * NR, z.d * NR, NR, 0};
    panels(units, x.q, k, cn, x.s, LD, 0, early ? NR : full, beta);
    for (i64 j = NR; j <= early; j += NR)
      tile<MR, 2, MAXIMA>(x.q, k.p + j * z.d, NR, cn, x.s + j, LD, beta, {x.s + j - NR, e.top});
    if (early) panels(units, x.q, k, cn, x.s, LD, early + NR, full, beta);
    if (full < cols) panels(units, x.q, {x.k + full * z.d + c * VL, 0, 0, VL}, cn, x.s + full, LD, 0, VL, beta);
    c += KB;
  } while (c < z.d);
}

// How the exponentials of these scores are taken: where no score function adds to them, they come times log2(e).
template <class Score> static constexpr int exps = changes_score<Score> ? NATURAL : BASE2;
template <class Score> OX f32 scaled(const Shape &z) { return exps<Score> == BASE2 ? z.scale * LOG2E : z.scale; }

// Scores of rows [r, r + n) for keys k0 .. k0 + kn become final, up to `pad`; m (running maxima), x.top (what to
// subtract before taking the exponentials) and x.factor (what the output and the sums so far are to be multiplied by)
// are brought up to date, VL rows at a time.
template <class Score>
OX void maxima(const Shape &z, i64 r, int n, i64 k0, i64 kn, i64 pad, Early e, f32 *m, const Room &x,
               const Score &score) {
  for (int a = 0; a < n; a += VL) {
    int have = n - a < VL ? n - a : VL;
    vf t[VL];
    for (int i = 0; i < have; i++) {
      i64 row = r + a + i, see = visible(z, row, k0, kn);
      t[i] = row_scores(x.s + (a + i) * LD, row, k0, e.keys, see, pad, e.top[a + i], score);
    }
    for (int i = have; i < VL; i++) t[i] = vf{};
    vf old = ldn(m + a, have), now = vmax(old, max_lanes(t));
    // Nothing seen yet: subtract 0, since -inf - -inf is NaN and -inf - 0 is not.
    vf base = sel<f32>(now == -__builtin_inff(), vf{}, now);
    stn(m + a, now, have);
    st(x.top + a, base);
    st(x.factor + a, exp_below<exps<Score> == NATURAL>(old, base, COEF));
  }
}

// O = factor O + P V for a tile that has its scores (`pad` keys wide, n of them exist), where P are their exponentials;
// `sum`, zeros before, takes their sums.
template <int WHAT>
OX void tile_values(int units, i64 n, i64 pad, Panels v, i64 dvp, const f32 *beta, f32 *o, vf *sum, const Room &x) {
  i64 c = 0;
  if (units == 3 && dvp >= NR) {
    tile<MR, 2, WHAT>(x.s, v.p, v.pitch, n, o, dvp, beta, {x.top, sum});
    c = NR;
  } else {
    for (i64 i = 0; i < units * UNIT; i += UNIT)
      for (i64 j = 0; j < pad; j += VL) exp_columns<UNIT, WHAT>(x.s + i * LD + j, x.top + i, sum + i);
  }
  panels(units, x.s, v, n, o, dvp, c, dvp, beta);
}

// l (sums) of n rows, brought up to date.
OX void sums(int n, f32 *l, const vf *sum, const f32 *factor) {
  for (int a = 0; a < n; a += VL) {
    int have = n - a < VL ? n - a : VL;
    vf t[VL];
    for (int i = 0; i < VL; i++) t[i] = i < have ? sum[a + i] : vf{};
    stn(l + a, ldn(l + a, have) * ld(factor + a) + add_lanes(t), have);
  }
}

// ---- keys that a score function hides ----
//
// Where the scores of all rows of a tile lie so far below their maxima that the exponentials are exactly 0 (a mask of
// -inf, of -1e9, of -1e4 does that), neither the scores nor the products with V need to be computed: 0 times V adds
// nothing, as long as V is finite. |q . k| <= |q| |k| tells so before any score is known.

static constexpr f32 DEPTH = 105;  // e^-105 is less than half of the smallest float

// A block of packed keys: what bounds its scores, found when it is first asked for.
struct Block {
  i64 k0, kn;
  f32 length = -1;  // of its longest key; NaN if a key or a value is not finite
};

// The length of the longest key, or NaN; x.k and x.v are packed.
static f32 longest_key(const Shape &z, i64 kn, const Room &x) {
  vf top = vf{}, bad = vf{};
  const f32 *p = x.k;
  for (i64 j = 0, width; j < kn; j += NR) {
    width = kn - j > VL ? NR : VL;
    vf a = vf{}, b = vf{};
    for (i64 c = 0; c < z.d; c++, p += width) {
      vf u = ld(p), v = ld(p + width - VL);
      a += u * u, b += v * v;
    }
    bad += a * 0.f + b * 0.f;
    top = vmax(vmax(a, b), top);
  }
  for (i64 i = 0; i < kn * up(z.dv, VL); i += VL) bad += ld(x.v + i) * 0.f;
  return __builtin_sqrtf(hmax(top)) + hsum(bad);
}

// No score of rows [r, r + n) with a key so long is greater, nor less than minus that; NaN if a query is not finite.
static f32 reach(const Shape &z, In q, i64 r, i64 n, f32 key) {
  f32 top = 0, bad = 0;
  for (i64 i = r; i < r + n; i++) {
    const f32 *p = query(z, q, i);
    f32 a = 0;
    if (q.cs != 1) {
      for (i64 c = 0; c < z.d; c++) a += p[c * q.cs] * p[c * q.cs];
    } else {
      vf t = vf{};
      for (i64 c = 0; c < z.d; c += VL) {
        vf x = z.d - c >= VL ? ld(p + c) : ldn(p + c, (int)(z.d - c));
        t += x * x;
      }
      a = hsum(t);
    }
    bad += a * 0;
    top = a > top ? a : top;
  }
  // 1 makes up for squares that vanish, 1.01 for rounding.
  return 1.01f * __builtin_sqrtf(top) * key * __builtin_fabsf(z.scale) + 1 + bad;
}

// The scores of a row from key k on, of which n exist (-inf after those), if all products with the query were s.
template <class Score> OX vf scores_if(f32 s, i64 row, i64 k, i64 n, const Score &score) {
  if (n >= VL) return score(row, k, splat(s), Full{});
  return sel<f32>(Lane::first((int)n), score(row, k, splat(s), Part{(int)n}), splat(-__builtin_inff()));
}

// What the maximum of a row will be at least: m so far, or what the first of n keys from k on will make it.
template <class Score> OX f32 least_maximum(f32 m, f32 most, i64 row, i64 k, i64 n, const Score &score) {
  return m > -__builtin_inff() ? m : hmax(scores_if(-most, row, k, n, score));
}

// Whether the exponentials of the scores of n rows with `have` (up to VL) keys from k on are 0, if no product is
// greater than `most`, and the maximum of row r + i is at least low[i].
template <class Score>
OX bool hidden(i64 r, i64 n, i64 k, i64 have, const f32 *low, f32 most, const Score &score) {
  vi seen = vi{};
  for (i64 i = 0; i < n; i++) {
    vf v = scores_if(most, r + i, k, have, score);
    seen |= ~((v < splat(low[i] - DEPTH)) | (v == splat(-__builtin_inff())));
  }
  return hmax(sel<f32>(seen != 0, splat(1), vf{})) == 0;
}

// How many keys of the block rows [r, r + n) need; none after those do they need. m: running maxima of the rows. A look
// at the last row, which sees most under a causal mask, tells whether to look closer.
template <class Score>
static i64 needed(const Shape &z, In q, i64 r, i64 n, const f32 *m, Block &y, const Room &x, const Score &score) {
  i64 see = visible_any(z, r, r + n, y.k0, y.kn), j = (see - 1) / VL * VL, last = r + n - 1;
  if (!changes(score) || !see) return see;
  f32 low[MR] = {least_maximum(m[n - 1], 0, last, y.k0, see, score)};
  if (!hidden(last, 1, y.k0 + j, see - j, low, 0, score)) return see;
  if (y.length == -1) y.length = longest_key(z, y.kn, x);
  f32 most = reach(z, q, r, n, y.length);
  if (!(most < __builtin_inff())) return see;
  for (i64 i = 0; i < n; i++) low[i] = least_maximum(m[i], most, r + i, y.k0, visible(z, r + i, y.k0, see), score);
  for (; see && hidden(r, n, y.k0 + j, see - j, low, most, score); j -= VL) see = j;
  return see;
}

// One tile, rows [r, r + n), against a packed block of keys; `at` is its place in o, m, l.
template <class Score>
static void tile_rows(const Shape &z, In q, i64 r, i64 n, i64 at, Block &y, const Room &x, const Score &score) {
  int units = (int)((n + UNIT - 1) / UNIT);
  i64 k0 = y.k0, kn = y.kn, dvp = up(z.dv, VL), see = needed(z, q, r, n, x.m + at, y, x, score), pad = up(see, VL);
  if (!see) {
    for (i64 i = at * dvp; !k0 && i < (at + n) * dvp; i += VL) st(x.o + i, vf{});
    return;
  }
  vf sum[MR], top[MR];
  OX_UNROLL for (int i = 0; i < MR; i++) sum[i] = vf{}, top[i] = splat(-__builtin_inff());
  i64 full = changes(score) || units < 3 ? 0 : visible_all(z, r, r + n, k0, see) / NR * NR;
  Early e{full ? full - NR : 0, top};
  // The last panel of the block is narrow if the block needs no more; those before it never are.
  tile_scores(z, q, r, n, units, lesser(up(pad, NR), up(kn, VL)), scaled<Score>(z), e, x);
  maxima(z, r, (int)n, k0, see, pad, e, x.m + at, x, score);
  tile_values<exps<Score>>(units, lesser(pad, kn), pad, {x.v, kn * NR, NR, VL}, dvp, k0 ? x.factor : nullptr,
                           x.o + at * dvp, sum, x);
  sums((int)n, x.l + at, sum, x.factor);
}

// Rows [a, b), at most rows_together.
template <bool GUARD, class Score, class Out>
static void many_rows(const Shape &z, In q, In k, In v, i64 a, i64 b, f32 *w, const Score &score,
                      const Out &out) {
  i64 dvp = up(z.dv, VL), block = keys_together(z.d, z.dv), k0 = 0;
  Room x = room(w, z.d, z.dv);
  for (i64 i = 0; i < b - a; i++) x.m[i] = -__builtin_inff(), x.l[i] = 0;
  do {
    i64 kn = visible_any(z, a, b, k0, lesser(z.sk - k0, block)), rows;
    pack_rows_as_lanes(In{k.p + k0 * k.rs, k.rs, k.cs}, kn, z.d, x.k);
    pack_columns(In{v.p + k0 * v.rs, v.rs, v.cs}, kn, z.dv, x.v);
    Block y{k0, kn};
    i64 next = k0 + block, each = (block * MR + b - a - 1) / (b - a);  // rows of the next block, while this one is used
    for (i64 r = a; r < b; r += rows) {
      for (i64 end = lesser(next + each, z.sk); next < end; next++) {
        if (k.cs == 1) prefetch_row<2>(k.p + next * k.rs, z.d);
        if (v.cs == 1) prefetch_row<2>(v.p + next * v.rs, z.dv);
      }
      rows = lesser(UNIT * next_units((b - r + UNIT - 1) / UNIT), b - r);
      if (k0 && !visible_any(z, r, r + rows, k0, kn)) continue;  // finished in an earlier block
      tile_rows(z, q, r, rows, r - a, y, x, score);
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
static void few_values(bool alone, int rows, f32 *s, In v, i64 n, i64 dv, const f32 *factor, f32 *o) {
  i64 dvp = up(dv, VL), c = alone ? dv / (4 * VL) * (4 * VL) : dv / VL * VL;
  if (alone) for (i64 x = 0; x < c; x += 4 * VL) add_values<4>(s, v.p + x, v.rs, n, *factor, o + x, Full{});
  else panels(1, s, {v.p, NR, v.rs, v.rs}, n, o, dvp, 0, c, factor);
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
  i64 block = alone ? 256 : 128;  // a small block of K and V stays in L1 for the next unit
  Room x = room(w, z.d, z.dv);
  f32 *qs = x.k;  // nothing is packed
  for (i64 i = 0; i < all; i++) {  // rows of padding repeat the last one
    x.m[i] = -__builtin_inff(), x.l[i] = 0;
    copy_scaled(query(z, q, lesser(a + i, b - 1)), q.cs, z.d, scaled<Score>(z), qs + i * dp);
    for (i64 c = 0; c < dvp; c += VL) st(x.o + i * dvp + c, vf{});
  }
  i64 see = visible_any(z, a, b, 0, z.sk);
  for (i64 k0 = 0; k0 < see; k0 += block)
    for (i64 r = a; r < b; r += UNIT) {
      int rows = (int)lesser(b - r, UNIT);
      i64 kn = visible_any(z, r, r + rows, k0, lesser(z.sk - k0, block)), at = r - a;
      if (!kn) continue;
      few_scores(alone, rows, qs + at * dp, In{k.p + k0 * k.rs, k.rs, k.cs}, kn, z.d, x.s);
      vf sum[MR], top[MR];
      OX_UNROLL for (int i = 0; i < MR; i++) sum[i] = vf{}, top[i] = splat(-__builtin_inff());
      maxima(z, r, rows, k0, kn, up(kn, VL), {0, top}, x.m + at, x, score);
      for (i64 j = 0; j < kn; j += VL) {
        if (alone) exp_columns<1, exps<Score>>(x.s + j, x.top, sum);
        else exp_columns<UNIT, exps<Score>>(x.s + j, x.top, sum);
      }
      sums(rows, x.l + at, sum, x.factor);
      few_values(alone, rows, x.s, In{v.p + k0 * v.rs, v.rs, v.cs}, kn, z.dv, x.factor, x.o + at * dvp);
    }
  for (i64 i = 0; i < b - a; i++) finish_row<GUARD>(x.o + i * dvp, x.l[i], a + i, z.dv, z.sk == 0, out);
}

// Rows [r0, r1) of the shape.group * shape.sq rows of one key/value head.
//
// score(row, key, s, lanes) -> vf: s holds scale * (q . k) for VL consecutive keys, of which the first
//   `lanes` exist (Full or Part, both convert to int): masks and biases are added here. Keys that `causal`
//   hides are never asked for, others may be more than once. The result must not fall as s grows: a great s tells
//   which keys are hidden from a whole tile.
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
