// Indices that data gives: where one is out of bounds, the call fails.
#pragma once
#include "runtime.h"
#include "vreduce.h"

OX i64 ox_index(ox_ctx *ctx, i64 i, i64 n) {
  i64 at = i < 0 ? i + n : i;
  if (__builtin_expect(at < 0 || at >= n, 0)) { ctx->api->fail(ctx, OX_ERR_INDEX, 0, i); return 0; }
  return at;
}
// Indices of which one is out of bounds: a call, as a copy in each place would take g++ longer than all else there.
static __attribute__((noinline, cold)) vl ox_indices_checked(ox_ctx *ctx, vl at, i64 n, int lanes) {
  for (int i = 0; i < VL; i++) at[i] = i < lanes ? ox_index(ctx, at[i], n) : 0;
  return at;
}
template <class T> OX vl ox_indices(ox_ctx *ctx, V<T> at, i64 n, int lanes) {
  const vl given = conv<i64, T>(at), r = given + ((given >> 63) & n);
  if (__builtin_expect(!ox_any(v_lt(r, vl{}) | v_ge(r, bc<i64>(n))), 1)) return r;
  return ox_indices_checked(ctx, given, n, lanes);
}
