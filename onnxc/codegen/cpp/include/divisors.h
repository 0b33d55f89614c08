// Divisors of integers: where one that data gives is zero, the call fails.
#pragma once
#include "runtime.h"
#include "vint.h"
#include "vreduce.h"

template <class T> OX V<T> ox_idivisor(ox_ctx *ctx, V<T> b, int n) {
  if (__builtin_expect(ox_any(v_eq(b, V<T>{})), 0)) {
    for (int i = 0; i < n; i++) if (b[i] == 0) ctx->api->fail(ctx, OX_ERR_DIVIDE, 0, 0);
  }
  return b;
}
template <class T> OX V<T> ox_idiv(ox_ctx *ctx, V<T> a, V<T> b, int n) { return v_idiv(a, ox_idivisor<T>(ctx, b, n)); }
