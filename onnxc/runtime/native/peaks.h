// What this machine can do at most: short bursts of multiply-adds, and of reads. Part of runtime.c.
//
// A runtime runs on every CPU of its instruction set, so the bursts exist for each vector length, and the caller
// asks for one that the CPU has. Each returns its nanoseconds; the caller takes the best of several.
#ifndef ONNXC_PEAKS_H
#define ONNXC_PEAKS_H

#define OX_FMA_CHAINS 12 // more than two units of latency four need; with two factors they fit 16 registers
#define OX_EACH_CHAIN(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define OX_CHAIN_START(K) vec c##K = x + (float)K;
#define OX_CHAIN_STEP(K) c##K = c##K * x + y;
#define OX_CHAIN_END(K) x += c##K;

// Both factors stay below one, so that the sums neither overflow nor become denormal.
#define OX_BURSTS(LANES, TARGET)                                                                                  \
  TARGET static float fma_burst##LANES(ox_i64 turns) {                                                            \
    typedef float vec __attribute__((vector_size(LANES * 4)));                                                    \
    vec x = {0}, y = {0};                                                                                         \
    x += 0.75f, y += 0.25f;                                                                                       \
    OX_EACH_CHAIN(OX_CHAIN_START)                                                                                 \
    for (ox_i64 t = 0; t < turns; t++) { OX_EACH_CHAIN(OX_CHAIN_STEP) }                                           \
    OX_EACH_CHAIN(OX_CHAIN_END)                                                                                   \
    return x[0];                                                                                                  \
  }                                                                                                               \
  TARGET static int read_burst##LANES(const char *from, ox_i64 bytes) {                                           \
    typedef int vec __attribute__((vector_size(LANES * 4)));                                                      \
    const vec *at = (const vec *)from, *const end = at + bytes / (8 * (ox_i64)sizeof(vec)) * 8;                   \
    vec a = {0}, b = {0}, c = {0}, d = {0};                                                                       \
    for (; at < end; at += 8) {                                                                                   \
      a ^= at[0], b ^= at[1], c ^= at[2], d ^= at[3];                                                             \
      a ^= at[4], b ^= at[5], c ^= at[6], d ^= at[7];                                                             \
    }                                                                                                             \
    a ^= b ^ c ^ d;                                                                                               \
    return a[0];                                                                                                  \
  }

OX_BURSTS(4, )
#if defined(__x86_64__)
OX_BURSTS(8, __attribute__((target("avx2,fma"))))
OX_BURSTS(16, __attribute__((target("avx512f,fma"))))
#endif

typedef struct burst {
  int lanes, threads;
  ox_i64 turns, share; // bytes of a member
  const char *memory;
  u32 sink; // so that the compiler cannot leave the work out
  int arrived, ready, late;
  ox_i64 first, last; // when the first member began, and the last one ended
} burst;

// Wait until all members are here. Returns whether that took no more than `patience` nanoseconds.
static int burst_meet(const burst *b, int *count, ox_i64 patience) {
  ox_i64 start = ox_now(), waited = 0;
  __atomic_fetch_add(count, 1, __ATOMIC_RELAXED);
  while (__atomic_load_n(count, __ATOMIC_RELAXED) < b->threads && waited < patience) waited = ox_now() - start;
  return ox_now() - start < patience;
}

// Members begin together: first they wait for those that must wake, then they make sure that all are running, and
// none waits for the CPU of another.
static ox_i64 burst_begin(burst *b) {
  int met = burst_meet(b, &b->arrived, 5000000) & burst_meet(b, &b->ready, 200000);
  if (!met) __atomic_store_n(&b->late, 1, __ATOMIC_RELAXED);
  return ox_now();
}

static void burst_end(burst *b, ox_i64 start, u32 result) {
  ox_i64 end = ox_now();
  __atomic_fetch_add(&b->sink, result, __ATOMIC_RELAXED);
  ox_i64 seen = __atomic_load_n(&b->first, __ATOMIC_RELAXED);
  while (start < seen && !__atomic_compare_exchange_n(&b->first, &seen, start, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
  seen = __atomic_load_n(&b->last, __ATOMIC_RELAXED);
  while (end > seen && !__atomic_compare_exchange_n(&b->last, &seen, end, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

static float fma_once(const burst *b) {
#if defined(__x86_64__)
  if (b->lanes == 16) return fma_burst16(b->turns);
  if (b->lanes == 8) return fma_burst8(b->turns);
#endif
  return fma_burst4(b->turns);
}

static int read_once(const burst *b, const char *from) {
#if defined(__x86_64__)
  if (b->lanes == 16) return read_burst16(from, b->share);
  if (b->lanes == 8) return read_burst8(from, b->share);
#endif
  return read_burst4(from, b->share);
}

static void fma_body(void *arg, ox_i64 first, ox_i64 last, int worker) {
  burst *b = (burst *)arg;
  (void)worker;
  for (; first < last; first++) {
    ox_i64 start = burst_begin(b);
    burst_end(b, start, (u32)fma_once(b));
  }
}

static void read_body(void *arg, ox_i64 first, ox_i64 last, int worker) {
  burst *b = (burst *)arg;
  (void)worker;
  for (; first < last; first++) {
    ox_i64 start = burst_begin(b);
    u32 sum = 0;
    for (ox_i64 t = 0; t < b->turns; t++) {
      sum += (u32)read_once(b, b->memory + first * b->share);
      __asm__ volatile("" ::: "memory"); // a new read each time
    }
    burst_end(b, start, sum);
  }
}

// Nanoseconds from the first member's beginning to the last one's end; -1 where they did not work at the same time.
static ox_i64 timed_burst(ox_body body, burst *b) {
  b->first = (ox_i64)((u64)-1 >> 1);
  if (b->threads <= 1) body(b, 0, 1, 0);
  else ox_parallel(&pool_of_process, b->threads, b->threads, body, b);
  return b->late ? -1 : b->last - b->first;
}

// Each of `threads` threads makes turns * OX_FMA_CHAINS multiply-adds of vectors of float32.
OX_EXPORT ox_i64 ox_peak_fma(int lanes, int threads, ox_i64 turns) {
  burst b;
  memset((void *)&b, 0, sizeof b);
  b.lanes = lanes, b.threads = threads, b.turns = turns;
  return timed_burst(fma_body, &b);
}

// Each of `threads` threads reads its own `share` bytes (a multiple of 64, as is the address) of threads * share,
// `turns` times.
OX_EXPORT ox_i64 ox_peak_read(int lanes, int threads, const void *memory, ox_i64 share, ox_i64 turns) {
  burst b;
  memset((void *)&b, 0, sizeof b);
  b.lanes = lanes, b.threads = threads, b.turns = turns, b.share = share, b.memory = (const char *)memory;
  return timed_burst(read_body, &b);
}

#endif
