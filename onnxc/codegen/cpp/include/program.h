// What every generated program begins with.
#pragma once
#include "runtime.h"
#include "vec.h"

// What a kernel is called with: its buffers, the sizes that have names, and memory for its scratch.
struct ox_call { ox_ctx *ctx; void *const *p; const i64 *s; char *scratch; };

// Rows that threads divide: how many parts there are, and a loop whose part for some of the rows is
// part(first, last, worker, ctx, scratch). All of them at once run as a program does, with this call's threads. Else each
// part has a context of its own, in which its kernels find one thread, `scratch` bytes apart, and the failure of which it
// reports; the clock runs in the caller's.
OX i64 ox_parts(i64 rows, i64 threads, i64 weights) {
  (void)weights;
  return ox_max(1, ox_min(threads, rows / 2));
}
template <class F>
static inline void ox_rows(ox_ctx *ctx, i64 rows, i64 parts, char *scratch, i64 each, const F &part) {
  if (rows <= 0) return;
  if (parts <= 1) return part(0, rows, 0, ctx, scratch);
  const auto own = [&](i64 first, i64 last, int worker) {
    ox_ctx apart = *ctx;
    apart.threads = 1, apart.error = ox_error();
    if (worker) apart.times = 0;
    part(rows * first / parts, rows * last / parts, worker, &apart, scratch + worker * each);
    if (!worker) ctx->lap = apart.lap;
  };
  ox_for(ctx, parts, [](void *arg, i64 first, i64 last, int worker) {
    (*(decltype(own) *)arg)(first, last, worker);
  }, (void *)&own);
}
