// Blocks of rows by a panel of igemm.h in Intel's matrix registers: up to 32 rows by the 32 columns of a panel at a
// time, with B as igemm.h packs it for VNNI. The sums are the same numbers: they are exact.
//
// To configure the registers takes as long as twenty of their products. So a block of rows is divided into parts of one
// height, with rows behind its end that do not count, IG_SPARE at most; and what sums are longer than a multiple of 64
// bytes is vectors' work.
#pragma once
#include "amx.h"

struct IgxPlan { i64 parts = 0, rows = 0; };  // parts of so many rows each; none where vectors do all

#if OX_MATRICES && ONNXC_VL == 16
static constexpr i64 IGX_ROWS = 16, IGX_K = 16;  // of a register: rows, and elements of 32 bits of a row
static constexpr i64 IGX_KC = 128;               // elements of K of a piece of a panel, which stays in L1
static constexpr i64 IGX_WORTH = 2048;           // elements of A times panels
static_assert((IG_MC + IGX_ROWS - 1) / IGX_ROWS - 1 <= IG_SPARE, "parts end before the room of a block does");

OX IgxPlan igx_plan(i64 rows, i64 kc, i64 panels) {
  if (rows < 4 || kc < IGX_K || rows * kc * panels < IGX_WORTH || !ox_matrices_allowed()) return {};
  IgxPlan plan;
  plan.parts = ox_up(rows, IGX_ROWS), plan.rows = ox_up(rows, plan.parts);
  return plan;
}
// 0 to 3 are sums, 4 and 5 rows of A, 6 and 7 the halves of a panel.
OX_PART static void igx_configure(i64 rows) {
  ox_matrices x = {1, 0, {}, {}, {}};
  for (int i = 0; i < 8; i++) x.bytes[i] = 64, x.rows[i] = (u8)(i < 6 ? rows : IGX_K);
  x.configure();
}

OX void igx_release() { OX_MATRIX_RELEASE(); }

// c += a b for one or two parts of rows, kc a multiple of IGX_K. Meanwhile `lines` lines from near on are fetched for
// each step, which a later pass uses: hardware does not see that rows of B follow each other.
template <bool TWO>
static void igx_sums(i64 rows, i64 kc, const ig_i32 *a, i64 as, const i32 *b, i32 *c, const i32 *near, i64 lines) {
  const ig_i32 *lower = a + rows * as;
  i32 *d = c + rows * IG_NR;
  constexpr i64 pitch = IG_NR * sizeof(i32), half = IG_NR / 2;
  OX_MATRIX_LOAD(0, c, pitch);
  OX_MATRIX_LOAD(1, c + half, pitch);
  if (TWO) {
    OX_MATRIX_LOAD(2, d, pitch);
    OX_MATRIX_LOAD(3, d + half, pitch);
  }
  for (i64 k = 0; k < kc; k += IGX_K, b += IGX_K * IG_NR) {
    for (i64 i = 0; i < lines; i++, near += 16) __builtin_prefetch(near, 0, 2);
    OX_MATRIX_LOAD(4, a + k, as * 4);
    OX_MATRIX_LOAD(6, b, pitch);
    OX_MATRIX_DOT(0, 4, 6);
    OX_MATRIX_LOAD(7, b + half, pitch);
    OX_MATRIX_DOT(1, 4, 7);
    if (TWO) {
      OX_MATRIX_LOAD(5, lower + k, as * 4);
      OX_MATRIX_DOT(2, 5, 6);
      OX_MATRIX_DOT(3, 5, 7);
    }
  }
  OX_MATRIX_STORE(0, c, pitch);
  OX_MATRIX_STORE(1, c + half, pitch);
  if (TWO) {
    OX_MATRIX_STORE(2, d, pitch);
    OX_MATRIX_STORE(3, d + half, pitch);
  }
}

// c[i][j] = init[j] + sum over k of a[i * as + k] . b[k * NR + j], for the rows of a plan and one panel.
static __attribute__((noinline)) void igx_panel(
    const IgxPlan &plan, i64 kc, const ig_i32 *a, i64 as, const i32 *b, const i32 *init, i32 *c) {
  i64 whole = kc / IGX_K * IGX_K, passes = ox_up(plan.parts, 2), lines = ox_up(2 * IGX_K, passes), kn;
  ig_strip<4>(plan.parts * plan.rows, kc - whole, a + whole, as, b + whole * IG_NR, init, c);
  for (i64 k = 0; k < whole; k += kn) {
    kn = ox_min(IGX_KC, whole - k);
    const i32 *at = b + k * IG_NR, *near = at + kn * IG_NR;
    for (i64 i = 0; i < plan.parts; i += 2, near += lines * kn / IGX_K * 16) {
      i64 m = i * plan.rows;
      const auto sums = i + 2 > plan.parts ? igx_sums<false> : igx_sums<true>;
      sums(plan.rows, kn, a + m * as + k, as, at, c + m * IG_NR, near, lines);
    }
  }
}
#else
OX IgxPlan igx_plan(i64, i64, i64) { return {}; }
OX void igx_configure(i64) {}
OX void igx_panel(const IgxPlan &, i64, const ig_i32 *, i64, const i32 *, const i32 *, i32 *) {}
OX void igx_release() {}
#endif
