// f32 matrix product with a constant B by one step of Strassen's algorithm: 7 products of halves instead of 8.
//
// Two neighbouring rows of A (u and l), two halves of K, and two neighbouring panels of B meet. A block's sums of A's
// quarters (V, seven planes) are made once by each thread that works on it. B is packed as matmul.h has it: sums of its
// quarters are made for one block of K at a time, by the first tile that multiplies by them, and stay in the first-level
// cache for the other tiles. The results of both rows are sums of the seven products M:
//
//   M0 = (u1 + r l2) (B11 + c B22 / r)   M3 = l2 (B21 - r B11)         C11 = M0 + M3 - c M4 + M6   C12 = M2 + M4
//   M1 = (l1 + r l2) B11                 M4 = (u1 / r + u2) B22        C21 = M1 + M3
//   M2 = u1 (B12 - B22 / r)              M5 = (l1 - u1) (B11 + c B12)  C22 = (M0 - M1 + M5) / c + M2
//                                        M6 = (u2 - l2) (B21 + c B22)
//
// A result's error is small beside what is added up with it. So all that meets is brought to one size by powers of two,
// which change no digit: the halves of K by r (one for each term), the columns of the two panels by c, and each row by
// the root of its sum of (a(k) weigh(k))^2, where weigh(k) is the size of B's row k. (By its largest element, a row with
// one great one would meet a neighbour of up to the root of K times its size.) A row that is zero gives zeros, and so
// does a column. Pairs are of one item of `each` rows; the last of an odd number is a pair with itself.
//
// A pair takes the ordinary product, if one of its rows has a NaN or an infinity, or a size beyond 2^60 or below 2^-60, so
// that nothing spreads to the neighbour; or a term of more than MS_SHARE of its square: where the weights of this term are
// small for a column, the other columns' would show in the result. The pairs that are left are the rows of the products.
// What an element is added up from depends on K, `each` and its pair alone: not on M, blocks, tasks or threads.
//
// Constants beside B: weigh[K], r[K / 2], 1 / r[K / 2], and for each pair of panels c, 1 / c (0 for a column of zeros)
// and 0 or 1 (a left column of zeros), [3][NR]. strassen.py makes them. Panels without a partner take the ordinary product,
// and so do pairs of panels whose first c is 0.
#pragma once
#include "matmul.h"
#include "vreduce.h"

static constexpr int MS_P = 7;
static constexpr int MS_KC = VL > 8 ? 192 : 256;  // of a block of K: B's sums and a tile of V stay in the first-level cache
static constexpr int MS_AS = MS_KC + 16;          // floats from a row of V to the next: off powers of two
static constexpr i64 MS_PAIRS = 64;               // of a block, at most; of more, V would not stay in the cache
static constexpr i64 MS_FEW_PAIRS = 24;           // of fewer, B's sums take too much of the time
static constexpr i64 MS_ROOM = 3 << 20;           // bytes of V
static constexpr i64 MS_ITEMS = 6;                // for each thread
static constexpr i64 MS_STATE = 16;               // floats in front of V: see MsState
static constexpr int MS_MOST = 60;                // size of a row, and its inverse, as a power of two, at most
static constexpr f32 MS_SHARE = 0.25f;

// each, per: rows and pairs of an item. most: pairs of a block, at most, even. parts: into which a block's pairs of panels
// are divided. Without pairs the whole product is the ordinary one, with the grid `plain`.
struct MsPlan { i64 each, per, pairs, half, nk, kstep, panels, blocks, parts, most, rest, tasks; MmGrid plain; };

static __attribute__((noinline)) MsPlan ms_plan(i64 M, i64 N, i64 K, i64 each, i64 threads, i64 work = MM_ONCE) {
  MsPlan p = {};
  p.each = each, p.per = ox_up(each, 2), p.pairs = each > 0 ? M / each * p.per : 0;
  if (!p.pairs) {
    p.plain = mm_grid(M, N, K, threads, work), p.tasks = p.plain.tasks;
    return p;
  }
  p.half = K / 2, p.nk = ox_up(p.half, MS_KC), p.kstep = ox_up(ox_up(p.half, p.nk), 4) * 4;
  p.panels = N / (2 * MM_NR);
  i64 most = ox_max(MS_FEW_PAIRS, ox_min(MS_PAIRS, MS_ROOM / (MS_P * 4 * p.half)));
  i64 items = threads > 1 ? threads * MS_ITEMS : 1;
  p.blocks = ox_max(ox_up(p.pairs, most), ox_min(ox_up(items, p.panels), p.pairs / MS_FEW_PAIRS));
  p.parts = ox_max(1, ox_min(p.panels, ox_up(4 * items, p.blocks)));
  p.most = mm_even(ox_up(p.pairs, p.blocks));
  p.rest = mm_panels(N) > 2 * p.panels ? ox_up(M, MM_MC) : 0;
  p.tasks = p.blocks * p.parts + p.rest;
  return p;
}
// Floats of scratch that a thread needs, after MM_SCRATCH of them: state, V, M, results, B's sums, V's pairs and scales.
// Planes of V and of M are that many floats apart: not a multiple of 4096 bytes, where they would share a set of the cache.
OX i64 ms_plane(const MsPlan &p) { return p.most * MS_AS + 144; }
OX i64 ms_results(const MsPlan &p) { return p.most * MM_NR + 48; }
OX i64 ms_v(const MsPlan &p) { return p.nk * MS_P * ms_plane(p); }
static constexpr i64 MS_SUMS = MS_KC * MM_NR + 1024;
static constexpr i64 MS_OUT = 2 * MM_MR * MM_NR;  // of a panel
OX i64 ms_floats(const MsPlan &p) {
  return !p.pairs ? 0 : MS_STATE + ox_up(ms_v(p) + 4 * p.most + MS_SUMS + MS_P * ms_results(p) + 2 * MS_OUT, 16) * 16;
}
OX i64 ms_bytes(const MsPlan &p) { return 4 * (MM_SCRATCH + ms_floats(p)); }  // of a thread's scratch
// The block of pairs that V is made of, and how many it has. Tasks next to each other share it: the threads' scratch has to
// be made fresh before the first.
struct MsState { i64 block, n; };
OX void ms_fresh(const MsPlan &p, char *scratch, i64 threads) {
  for (i64 t = 0; p.pairs && t < threads; t++) *(MsState *)(scratch + t * ms_bytes(p) + 4 * MM_SCRATCH) = {-1, 0};
}

template <class T> struct MsRun {
  MmRun<T> mm;
  MsPlan p;
  const T *weigh = nullptr, *rows = nullptr, *inverse = nullptr, *columns = nullptr;
  i64 t0 = 0, t1 = 0, n = 0;        // this block's pairs; how many are not left out
  T *V = nullptr, *back = nullptr;  // back: of each row what its results are multiplied by
  i64 *at = nullptr;                // which pair each of V is; from the end on, those that are left out
  T *sums = nullptr, *M = nullptr, *out = nullptr;
};

OX i64 ms_row(const MsPlan &p, i64 t) { return t / p.per * p.each + t % p.per * 2; }
OX bool ms_alone(const MsPlan &p, i64 t) { return t % p.per * 2 + 1 == p.each; }
OX i64 ms_end(const MsPlan &p, i64 t) { return ms_row(p, t) + 2 - ms_alone(p, t); }  // the row after a pair

// ---- A ----------------------------------------------------------------------------------------------------
// The power of two that brings a row to size 1; -1 where it is left out. back: its inverse, 0 for zeros.
static __attribute__((noinline)) f32 ms_scale(const f32 *a, const f32 *weigh, i64 K, f32 &back) {
  vf s[4] = {}, most[4] = {};
  const auto take = [&](int j, vf x) OX_LAMBDA {
    x *= x, s[j] += x, most[j] = x > most[j] ? x : most[j];
  };
  i64 k = 0;
  for (; k + 4 * VL <= K; k += 4 * VL)
    OX_UNROLL for (int j = 0; j < 4; j++) take(j, ld(a + k + j * VL) * ld(weigh + k + j * VL));
  for (; k + VL <= K; k += VL) take(0, ld(a + k) * ld(weigh + k));
  if (k < K) take(0, ldn(a + k, (int)(K - k)) * ldn(weigh + k, (int)(K - k)));
  OX_UNROLL for (int j = 1; j < 4; j++) s[0] += s[j], most[0] = most[j] > most[0] ? most[j] : most[0];
  const f32 square = h_sum<f32>(s[0]);
  const i32 exponent = (bits<i32>(square) >> 23 & 255) - 127;
  if (exponent >= -2 * MS_MOST && exponent <= 2 * MS_MOST) {
    const i32 half = exponent >> 1;
    back = bits<f32>((127 + half) << 23);
    return h_max_any<f32>(most[0]) > MS_SHARE * square ? -1 : bits<f32>((127 - half) << 23);
  }
  back = 0;
  for (k = 0; k < K; k++)
    if (!(a[k] == 0)) return -1;
  return 1;
}

// V of a pair of rows, at term k.
template <class L>
OX void ms_pair(const MsRun<f32> &x, const f32 *u, const f32 *l, f32 su, f32 sl, i64 k, f32 *v, i64 plane, L n) {
  const i64 h = x.p.half;
  const vf r = ldl(x.rows + k, n), i = ldl(x.inverse + k, n);
  const vf u1 = ldl(u + k, n) * bc(su), u2 = ldl(u + h + k, n) * bc(su);
  const vf l1 = ldl(l + k, n) * bc(sl), l2 = ldl(l + h + k, n) * bc(sl);
  st(v, u1 + r * l2), st(v + plane, l1 + r * l2), st(v + 2 * plane, u1), st(v + 3 * plane, l2);
  st(v + 4 * plane, u1 * i + u2), st(v + 5 * plane, l1 - u1), st(v + 6 * plane, u2 - l2);
}
// V[block of K][product][pair][MS_AS] of this block's pairs, which they are, and the scales of their rows.
static __attribute__((noinline)) i64 ms_left(const MsRun<f32> &x) {
  const i64 plane = ms_plane(x.p);
  i64 n = 0, out = 0;
  for (i64 t = x.t0; t < x.t1; t++) {
    const f32 *u = x.mm.rows + ms_row(x.p, t) * x.mm.lda, *l = ms_alone(x.p, t) ? u : u + x.mm.lda;
    f32 *const back = x.back + 2 * n;
    const f32 su = ms_scale(u, x.weigh, x.mm.K, back[0]), sl = ms_scale(l, x.weigh, x.mm.K, back[1]);
    if (su < 0 || sl < 0) {
      x.at[x.p.most - ++out] = t;
      continue;
    }
    x.at[n] = t;
    for (i64 q = 0; q < x.p.nk; q++) {
      f32 *v = x.V + q * MS_P * plane + n * MS_AS;
      i64 k = q * x.p.kstep;
      const i64 end = ox_min(x.p.half, k + x.p.kstep);
      for (; k + VL <= end; k += VL, v += VL) ms_pair(x, u, l, su, sl, k, v, plane, Full{});
      if (k < end) ms_pair(x, u, l, su, sl, k, v, plane, Part{(int)(end - k)});
    }
    n++;
  }
  for (i64 q = 0; n % 2 && q < MS_P * x.p.nk; q++)  // tiles have even rows
    for (i64 c = 0; c < MS_AS; c += VL) st(x.V + q * plane + n * MS_AS + c, vf{});
  return n;
}

// ---- B ----------------------------------------------------------------------------------------------------
// A block of K of B11, how far it is to the other panel and to the other half of K, and its scales.
struct MsQuarters { const f32 *b; i64 right, lower; const f32 *rows, *inverse, *columns; };
// The sum that product Q multiplies by, where p is in B11.
template <int Q> OX vf ms_sum(const MsQuarters &x, const f32 *p, i64 k, vf c) {
  if constexpr (Q == 0) return ld(p) + ld(p + x.right + x.lower) * x.inverse[k] * c;
  if constexpr (Q == 2) return ld(p + x.right) - ld(p + x.right + x.lower) * x.inverse[k];
  if constexpr (Q == 3) return ld(p + x.lower) - ld(p) * x.rows[k];
  if constexpr (Q == 5) return ld(p) + ld(p + x.right) * c;
  return ld(p + x.lower) + ld(p + x.right + x.lower) * c;
}
// mm_tile of MM_MR rows that makes the sums, hidden behind the multiplications.
template <int Q>
static __attribute__((noinline)) void ms_tile(i64 kc, const MmTile<f32> &x, const MsQuarters &y, f32 *sums) {
  vf s[MM_MR][MM_NV], c[MM_NV];
  const i64 as = x.as, step = x.step;
  const f32 *row[(MM_MR + 2) / 3], *b = y.b, *near = x.near;
  OX_UNROLL for (int i = 0; i < MM_MR; i += 3) {
    row[i / 3] = x.a + i * as;
    asm("" : "+r"(row[i / 3]));
  }
  OX_UNROLL for (int j = 0; j < MM_NV; j++) c[j] = ld(y.columns + j * VL);
  OX_UNROLL for (int i = 0; i < MM_MR; i++)
    OX_UNROLL for (int j = 0; j < MM_NV; j++) s[i][j] = vf{};
  for (i64 k = 0; k < kc; k++, b += MM_NR, sums += MM_NR, near += step) {
    vf v[MM_NV];
    OX_UNROLL for (int j = 0; j < MM_NV; j++) {
      if (j * VL * 4 % 64 == 0) __builtin_prefetch(near + j * VL, 0, 2);
      v[j] = ms_sum<Q>(y, b + j * VL, k, c[j]);
      st(sums + j * VL, v[j]);
    }
    OX_UNROLL for (int i = 0; i < MM_MR; i++)
      OX_UNROLL for (int j = 0; j < MM_NV; j++) s[i][j] += v[j] * row[i / 3][i % 3 * as + k];
  }
  OX_UNROLL for (int i = 0; i < MM_MR; i++)
    OX_UNROLL for (int j = 0; j < MM_NV; j++) {
      f32 *d = x.c + i * MM_NR + j * VL;
      st(d, x.add ? ld(d) + s[i][j] : s[i][j]);
    }
}
template <int Q>
static __attribute__((noinline)) void ms_first(i64 rows, i64 kc, const MmTile<f32> &x, const MsQuarters &y, f32 *sums) {
  if (rows == MM_MR) return ms_tile<Q>(kc, x, y, sums);
  const f32 *b = y.b;
  f32 *s = sums;
  for (i64 k = 0; k < kc; k++, b += MM_NR, s += MM_NR)
    OX_UNROLL for (int j = 0; j < MM_NV; j++) st(s + j * VL, ms_sum<Q>(y, b + j * VL, k, ld(y.columns + j * VL)));
  mm_tiles<f32>(rows, 1, kc, x);
}
OX void ms_multiply(int product, bool first, i64 rows, i64 kc, const MmTile<f32> &x, const MsQuarters &y, f32 *sums) {
  if (!first || product == 1 || product == 4) mm_tiles<f32>(rows, 1, kc, x);
  else if (product == 0) ms_first<0>(rows, kc, x, y, sums);
  else if (product == 2) ms_first<2>(rows, kc, x, y, sums);
  else if (product == 3) ms_first<3>(rows, kc, x, y, sums);
  else if (product == 5) ms_first<5>(rows, kc, x, y, sums);
  else ms_first<6>(rows, kc, x, y, sums);
}

// ---- C ----------------------------------------------------------------------------------------------------
// Adds the products of pairs [i0, i1) of V up and hands rows of both panels to the epilogue. Zeros are +0, as those of
// sums are.
static __attribute__((noinline)) void ms_finish(const MsRun<f32> &x, i64 pp, i64 i0, i64 i1) {
  const f32 *const columns = x.columns + pp * 3 * MM_NR;
  const i64 plane = ms_results(x.p), n = pp * 2 * MM_NR;
  f32 *const left = x.out, *const right = x.out + MS_OUT;
  i64 rows = 0;
  for (i64 i = i0; i < i1; i++) {
    const vf u = bc(x.back[2 * i]), l = bc(x.back[2 * i + 1]), zero = {};
    OX_UNROLL for (int j = 0; j < MM_NR; j += VL) {
      const f32 *s = x.M + i * MM_NR + j;
      f32 *const c1 = left + rows * MM_NR + j, *const c2 = right + rows * MM_NR + j;
      const vf c = ld(columns + j), inverse = ld(columns + MM_NR + j), alive = ld(columns + 2 * MM_NR + j);
      const vf m0 = ld(s), m1 = ld(s + plane), m2 = ld(s + 2 * plane), m3 = ld(s + 3 * plane), m4 = ld(s + 4 * plane);
      const vf m5 = ld(s + 5 * plane), m6 = ld(s + 6 * plane);
      st(c1, ((m0 + m3) + (m6 - m4 * c)) * alive * u + zero), st(c2, (m2 + m4) * u + zero);
      st(c1 + MM_NR, (m1 + m3) * l + zero), st(c2 + MM_NR, (((m0 - m1) + m5) * inverse + m2) * l + zero);
    }
    rows += 2 - ms_alone(x.p, x.at[i]);
    if (i + 1 < i1 && x.at[i + 1] == x.at[i] + 1) continue;
    const i64 m = ms_end(x.p, x.at[i]) - rows;  // rows are contiguous up to a pair that is left out
    x.mm.finish(x.mm.epi, left, m, rows, n, x.mm.N), x.mm.finish(x.mm.epi, right, m, rows, n + MM_NR, x.mm.N);
    rows = 0;
  }
}

// One pair of panels, by the pairs of V.
static __attribute__((noinline)) void ms_panels(const MsRun<f32> &x, i64 pp) {
  const i64 right = MM_NR * x.mm.K, lower = MM_NR * x.p.half, n = pp * 2 * MM_NR;
  const f32 *const B = x.mm.b.packed + n * x.mm.K;
  const i64 me = mm_even(x.n), first = ox_min(me, MM_MR), nt = 1 + ox_up(me - first, MM_MR);
  for (i64 q = 0; q < x.p.nk; q++) {
    const i64 k0 = q * x.p.kstep, kc = ox_min(x.p.half - k0, x.p.kstep);
    const f32 *const b = B + k0 * MM_NR;
    // Half a page away from B: a load that follows a store to the same place of another page waits for it.
    f32 *const sums = x.sums + ((((i64)b - (i64)x.sums) / 4 + 512) & 1023);
    const MsQuarters y{b, right, lower, x.rows + k0, x.inverse + k0, x.columns + pp * 3 * MM_NR};
    // Meanwhile the quarters of what comes next are fetched: by all tiles, since one would wait for its own.
    const f32 *const next = q + 1 == x.p.nk ? B + 2 * right : b + x.p.kstep * MM_NR;
    const i64 share = ox_up(4 * kc * MM_NR, MS_P * nt);
    for (int j = 0; j < MS_P; j++) {
      const bool last = q + 1 == x.p.nk && j + 1 == MS_P;
      const f32 *const factor = j == 1 ? b : j == 4 ? b + right + lower : sums;
      const f32 *const V = x.V + (q * MS_P + j) * ms_plane(x.p);
      for (i64 it = 0, i = 0, r; it < nt; it++, i += r) {
        r = it == 0 ? first : ox_cut((me - first) / 2, nt - 1, it) * 2 + first - i;
        const i64 valid = ox_min(x.n, i + r);
        const i64 m = ms_row(x.p, x.at[i]), rows = ox_min(2 * MM_MR, ms_end(x.p, x.at[valid - 1]) - m);
        for (const MmLines &some : x.mm.lines)
          if (last) mm_fetch(some, m, rows, n, x.mm.N), mm_fetch(some, m, rows, n + MM_NR, x.mm.N);
        const i64 at = (j * nt + it) * share, quarter = ox_min(3, at / (kc * MM_NR));
        const f32 *const near = next + quarter % 2 * right + quarter / 2 * lower + (at - quarter * kc * MM_NR);
        const MmTile<f32> tile{V + i * MS_AS, MS_AS, factor, MM_NR, 0, near, ox_up(share, kc),
                               x.M + j * ms_results(x.p) + i * MM_NR, 0, q > 0};
        ms_multiply(j, it == 0, r, kc, tile, y, sums);
        if (last) ms_finish(x, pp, i, valid);
      }
    }
  }
}
// The rows of pairs that are left out, one after the other, as readers and epilogues of matmul.h see them: two of each.
OX i64 ms_out_row(const MsRun<f32> &x, i64 i) {
  const i64 t = x.at[x.p.most - 1 - i / 2];
  return ms_row(x.p, t) + (ms_alone(x.p, t) ? 0 : i % 2);
}
static void ms_out_read(const void *run, f32 *d, i64 m, i64 rows, i64 k, i64 kc) {
  const MsRun<f32> &x = *(const MsRun<f32> *)run;
  for (i64 i = 0; i < rows; i++) x.mm.read(x.mm.a, d + i * MM_AS, ms_out_row(x, m + i), 1, k, kc);
}
static void ms_out_finish(const void *run, const f32 *c, i64 m, i64 rows, i64 n, i64 N) {
  const MsRun<f32> &x = *(const MsRun<f32> *)run;
  for (i64 i = 0; i < rows; i++, c += MM_NR) {
    const i64 row = ms_out_row(x, m + i);
    if ((m + i) % 2 == 0 || row != ms_out_row(x, m + i - 1)) x.mm.finish(x.mm.epi, c, row, 1, n, N);
  }
}
// The ordinary product of a pair of panels, by all pairs of this block or by those that are left out.
static __attribute__((noinline)) void ms_ordinary(const MsRun<f32> &x, i64 pp, bool all) {
  MmRun<f32> run = x.mm;
  if (all) return mm_blocks<f32>(run, ms_row(x.p, x.t0), ms_end(x.p, x.t1 - 1), 2 * pp, 2 * pp + 2);
  run.read = ms_out_read, run.finish = ms_out_finish, run.a = run.epi = &x, run.rows = nullptr;
  for (MmLines &some : run.lines) some = {};
  mm_blocks<f32>(run, 0, 2 * (x.t1 - x.t0 - x.n), 2 * pp, 2 * pp + 2);
}

// Task t of a plan with pairs. constants: see above; own: ms_floats of this thread.
template <class T> OX_APART void ms_work(MsRun<T> x, i64 t, const T *constants, T *own) {
  const MsPlan &p = x.p;
  const i64 K = x.mm.K, block = t / p.parts, part = t % p.parts, rest = t - p.blocks * p.parts;
  if (rest >= 0) {
    const i64 M = p.pairs / p.per * p.each;
    mm_blocks<T>(x.mm, ox_cut(M, p.rest, rest), ox_cut(M, p.rest, rest + 1), 2 * p.panels, mm_panels(x.mm.N));
    return;
  }
  x.weigh = constants, x.rows = constants + K, x.inverse = x.rows + p.half, x.columns = constants + 2 * K;
  x.t0 = ox_cut(p.pairs, p.blocks, block), x.t1 = ox_cut(p.pairs, p.blocks, block + 1);
  x.V = own + MS_STATE, x.M = x.V + ms_v(p), x.out = x.M + MS_P * ms_results(p), x.sums = x.out + 2 * MS_OUT;
  x.at = (i64 *)(x.sums + MS_SUMS), x.back = (T *)(x.at + p.most);
  MsState &state = *(MsState *)own;
  if (state.block != block) state = {block, ms_left(x)};
  x.n = state.n;
  for (i64 pp = ox_cut(p.panels, p.parts, part); pp < ox_cut(p.panels, p.parts, part + 1); pp++) {
    const bool fit = x.n > 0 && x.columns[pp * 3 * MM_NR] > 0;
    if (fit) ms_panels(x, pp);
    if (!fit || x.n < x.t1 - x.t0) ms_ordinary(x, pp, !fit);
  }
}
#ifdef ONNXC_APART
ONNXC_APART void ms_work<f32>(MsRun<f32>, i64, const f32 *, f32 *);
#endif

// Takes the place of mm_grid (ms_plan) and mm_task. scratch: MM_SCRATCH + ms_floats of a thread.
template <class E>
OX void ms_task(const MsPlan &p, i64 t, const MmRows<f32> &a, MmRight<f32> b, const f32 *constants, i64 M, i64 N, i64 K,
                f32 *scratch, const E &epi, MmLines x = {}, MmLines y = {}, MmLines z = {}) {
  if (!p.pairs) return mm_task(p.plain, t, a, b, M, N, K, scratch, epi, x, y, z);
  MmRun<f32> run{mm_read<f32, MmRows<f32>>, mm_finish<f32, E>, &a, &epi, true, a.p, a.lda,
                 b, N, K, scratch, {x, y, z}, 0, 0, 0, 0, 0};
  ms_work<f32>(MsRun<f32>{run, p}, t, constants, scratch + MM_SCRATCH);
}
