// What every generated program begins with.
#pragma once
#include "runtime.h"
#include "vec.h"

// What a kernel is called with: its buffers, the sizes that have names, and memory for its scratch.
struct ox_call { ox_ctx *ctx; void *const *p; const i64 *s; char *scratch; };

// One turn of a loop whose rows threads divide: `shared` bytes of weights that are read for any number of rows, `own`
// for each; multiplications and other operations of a row; kernels. And how many rows and turns there are.
struct ox_step { i64 rows, turns, shared, own, products, operations, kernels; };
// Nanoseconds of a turn for so many rows by one thread, in whose cache of the second level the weights are. To read
// them takes all of the time for a row or two; half of it is left beside the multiplications of more rows.
OX i64 ox_step_time(const ox_step &x, i64 rows) {
  const i64 reading = (x.shared + x.own * rows) / 70;
  return ox_max(reading, reading / 2 + x.products * rows * 3 / (16 * VL)) + x.operations * rows / (2 * VL);
}
static constexpr i64 OX_MEETING = 2500;  // nanoseconds that a parallel region takes longer than its work
static constexpr i64 OX_BEGIN = 20000;   // and until another thread has begun, if it slept
// The number of parts that take their rows through all turns, each by a thread of its own; 0 where threads rather
// divide each kernel: they read the weights once together, in place of once each. As few parts as take the least time,
// or nearly.
static __attribute__((noinline, unused)) i64 ox_parts(const ox_step &x, i64 threads) {
  if (threads <= 1 || x.rows <= 0 || x.turns <= 0) return 0;
  const i64 most = ox_min(threads, x.rows), together = ox_step_time(x, x.rows) / threads + x.kernels * OX_MEETING;
  const auto time = [&](i64 n) { return ox_step_time(x, ox_up(x.rows, n)) + (n > 1 ? OX_BEGIN / x.turns : 0); };
  i64 least = time(1), parts = 1;
  for (i64 n = 2; n <= most; n++) least = ox_min(least, time(n));
  while (time(parts) * 5 > least * 6) parts++;
  return time(parts) < together ? parts : 0;
}
// A context like this one, in which kernels find one thread.
static inline ox_ctx ox_alone(const ox_ctx *ctx) {
  ox_ctx alone = *ctx;
  alone.threads = 1;
  return alone;
}
// Calls part(first, last, worker, ctx, scratch) for all rows. Without parts that is a loop as any other, whose kernels
// this call's threads divide. Each part has a context of its own (`ox_alone`) and scratch, `each` bytes from
// that of the next; it reports failures to the caller's context, where the first part also has its clock, whoever takes
// it.
template <class F>
static inline void ox_rows(ox_ctx *ctx, i64 rows, i64 parts, char *scratch, i64 each, const F &part) {
  if (rows <= 0) return;
  if (!parts) return part(0, rows, 0, ctx, scratch);
  const ox_ctx begin = ox_alone(ctx);
  const auto own = [&](i64 first, i64 last, int worker) {
    ox_ctx apart = begin;
    if (first) apart.times = 0;
    part(rows * first / parts, rows * last / parts, worker, &apart, scratch + worker * each);
    if (!first) ctx->lap = apart.lap;
  };
  ox_for(ctx, parts, [](void *arg, i64 first, i64 last, int worker) {
    (*(decltype(own) *)arg)(first, last, worker);
  }, (void *)&own);
}
