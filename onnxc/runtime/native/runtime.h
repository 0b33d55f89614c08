// The contract between a generated program and the runtime. The generated C++ includes this text, so it
// includes nothing itself and reads as C11 and as C++17.
//
// A program never links to the runtime: its entry gets a context, and the context holds a table of
// functions (ox_api). A field is only ever added at the end of the table, and OX_ABI counts every change
// that an older program would not survive.
#ifndef ONNXC_RUNTIME_H
#define ONNXC_RUNTIME_H

#define OX_ABI 4
#define OX_ALIGN 64        // every block of memory starts on a cache line
#define OX_MAX_THREADS 256 // a region never has more members than this

// Before a program's entry: libraries are compiled with hidden symbols.
#ifdef __cplusplus
#define OX_EXPORT extern "C" __attribute__((visibility("default")))
#else
#define OX_EXPORT __attribute__((visibility("default")))
#endif

typedef long long ox_i64;
typedef struct ox_pool ox_pool;
typedef struct ox_api ox_api;
typedef struct ox_ctx ox_ctx;
typedef struct ox_model ox_model;
typedef struct ox_block ox_block;

// One piece of a parallel region: the items first <= i < last, by the member `worker` of the region's team.
// 0 <= worker < threads, and no two pieces of one region run at the same time under the same number, so
// `worker` picks a scratch buffer.
typedef void (*ox_body)(void *arg, ox_i64 first, ox_i64 last, int worker);

// What a program exports. Returns OX_OK or an ox_code; the same as what it reported by api->fail.
typedef int (*ox_entry)(ox_ctx *ctx, void *const *buffers, const ox_i64 *dims);

enum ox_code {
  OX_OK = 0,
  OX_ERR_MEMORY = 1,   // value: the bytes that could not be allocated
  OX_ERR_LIMIT = 2,    // value: the bytes wanted, above the model's limit
  OX_ERR_INDEX = 3,    // value: the index out of bounds
  OX_ERR_DIVIDE = 4,   // integer division by zero
  OX_ERR_SHAPE = 5,    // value: the size that does not fit
  OX_ERR_OVERLAP = 6,  // the share of an overlap that is not in 0 to 1
  OX_ERR_INTERNAL = 7, // the compiler's own fault
  OX_ERR_USER = 8,     // value: what the kernel of a user returned
  OX_ERR_SIGNAL = 9,   // a handler of a signal raised an exception: ox_exception hands it out
};

enum ox_flags {
  OX_POISON = 1, // fill every block with 0xFF bytes (NaN in every float type) before the program sees it
};

// The first failure of a call. `code` is written last; it is zero while nothing has failed.
typedef struct ox_error {
  int claimed;
  int code;
  ox_i64 node;
  ox_i64 value;
} ox_error;

// One call of one program. It lives on the stack of the calling thread.
struct ox_ctx {
  const ox_api *api;
  ox_pool *pool;
  int threads; // the most members that a region of this call may have
  int flags;
  char *arena; // set by api->arena
  ox_i64 arena_bytes;
  void *const *user; // what the model was made with: its weights, say
  ox_model *model;
  ox_block *arena_block; // the runtime's own
  ox_block *taken;       // the runtime's own
  ox_error error;
  ox_i64 *times; // nanoseconds of each kernel, added up, in a call that is profiled; NULL in all others
  ox_i64 kernels, lap; // entries of `times`; when the last kernel ended
  ox_i64 turns, granted;   // of loops: how many may be taken until api->turn is called; how many those were at first
  ox_i64 looked, signals;  // the runtime's own: when it looked at the clock, and for signals
};

struct ox_api {
  int abi;  // OX_ABI
  int size; // sizeof(ox_api)
  // Run body over 0 <= i < items and return when all of it is done; see ox_parallel in runtime.c.
  void (*parallel)(ox_pool *pool, int threads, ox_i64 items, ox_body body, void *arg);
  // The call's arena, with at least `bytes` bytes; its contents are undefined. NULL after a failure (which
  // it reports). A second use in one call may move the arena, and loses what was in it. From the thread of
  // the entry only.
  char *(*arena)(ox_ctx *ctx, ox_i64 bytes);
  // A block that lives until the end of the call. Any thread. NULL after a failure (which it reports).
  void *(*take)(ox_ctx *ctx, ox_i64 bytes);
  // A block that lives until api->release (outputs of a size known late). Any thread. NULL on failure.
  void *(*alloc)(ox_i64 bytes);
  void (*release)(void *block);
  // Record a failure (the first wins), from any thread. Returns `code`, so that an entry can return it.
  int (*fail)(ox_ctx *ctx, int code, ox_i64 node, ox_i64 value);
  // Nanoseconds of a clock that never goes back.
  ox_i64 (*now)(void);
  // Of a profiled call: adds the time since the last lap to this kernel's. -1: only starts a lap.
  void (*lap)(ox_ctx *ctx, ox_i64 kernel);
  // Of a loop, now and then: lets handlers of signals run. They may end the call, which then has failed.
  void (*turn)(ox_ctx *ctx);
  // As parallel, for work that takes less time than to wake a worker; see ox_parallel_small in runtime.c.
  void (*parallel_small)(ox_pool *pool, int threads, ox_i64 items, ox_body body, void *arg);
};

// Whether some part of this call has failed: what a long loop asks before it goes on.
static inline int ox_failed(const ox_ctx *ctx) { return __atomic_load_n(&ctx->error.code, __ATOMIC_RELAXED); }

// Before a loop, whose turns may be longer than those before it.
static inline ox_i64 ox_loop(ox_ctx *ctx) {
  ox_i64 more = ctx->turns - 15;
  if (more > 0) ctx->turns -= more, ctx->granted -= more;
  return 0;
}

// Whether a loop is to end before its next turn: after a failure, and where a signal says so. As ox_loop, from the
// thread of the entry only.
static inline int ox_ends(ox_ctx *ctx) {
  if (__builtin_expect(--ctx->turns < 0, 0)) ctx->api->turn(ctx);
  return ox_failed(ctx);
}

// The end of a kernel. One branch, never taken but in a call that is profiled.
static inline void ox_lap(ox_ctx *ctx, ox_i64 kernel) {
  if (__builtin_expect(ctx->times != 0, 0)) ctx->api->lap(ctx, kernel);
}

// A parallel region of this call. One item or one thread is a plain call, with no runtime in between. Not inlined: an
// entry has hundreds of these.
static __attribute__((noinline, unused)) void ox_for(const ox_ctx *ctx, ox_i64 items, ox_body body, void *arg) {
  if (items <= 0) return;
  if (items == 1 || ctx->threads <= 1) body(arg, 0, items, 0);
  else ctx->api->parallel(ctx->pool, ctx->threads, items, body, arg);
}

// The same; fewer than `few` items take less time than to wake a thread.
static __attribute__((noinline, unused)) void ox_for_few(
    const ox_ctx *ctx, ox_i64 items, ox_body body, void *arg, ox_i64 few) {
  if (items > 1 && items < few && ctx->threads > 1)
    ctx->api->parallel_small(ctx->pool, ctx->threads, items, body, arg);
  else ox_for(ctx, items, body, arg);
}

#endif
