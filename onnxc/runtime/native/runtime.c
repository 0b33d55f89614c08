// The runtime of compiled models: a thread pool, arenas, and the call of a program.
//
// Compiled once as C++ or C11 (both must work) into a library of its own; one process has one pool, whatever
// the number of models. Programs reach it through the table at the end (runtime.h says how).
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "runtime.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

typedef unsigned int u32;
typedef unsigned long long u64;

// One lock for everything that is rare or short (starting workers, free lists of arenas): with one lock a
// fork needs to hold no more than this one to find the process in a sane state.
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// ---------------------------------------------------------------- waiting

static ox_i64 ox_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (ox_i64)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void pause_cpu(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb" ::: "memory");
#else
  sched_yield();
#endif
}

// Sleep while *word == value (or return early, for no reason); wake whoever sleeps on it. wake_word uses the
// address as a name only: the memory behind it may be gone, for a region lives on its caller's stack.
#ifdef __linux__
static void wait_word(u32 *word, u32 value) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, (void *)0, (void *)0, 0);
}
static void wake_word(u32 *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, (void *)0, (void *)0, 0); }
static void reset_sleep(void) {}
#else
static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t sleep_cond = PTHREAD_COND_INITIALIZER;
static void wait_word(u32 *word, u32 value) {
  pthread_mutex_lock(&sleep_lock);
  while (__atomic_load_n(word, __ATOMIC_ACQUIRE) == value) pthread_cond_wait(&sleep_cond, &sleep_lock);
  pthread_mutex_unlock(&sleep_lock);
}
static void wake_word(u32 *word) {
  (void)word;
  pthread_mutex_lock(&sleep_lock);
  pthread_cond_broadcast(&sleep_cond);
  pthread_mutex_unlock(&sleep_lock);
}
static void reset_sleep(void) {
  pthread_mutex_init(&sleep_lock, 0);
  pthread_cond_init(&sleep_cond, 0);
}
#endif

// Round to nearest, denormals on, no traps: what IEEE arithmetic wants. Some libraries change it for the
// thread that loads them. Returns what was set before.
static u64 fpu_set(u64 wanted) {
#if defined(__x86_64__)
  u32 old = __builtin_ia32_stmxcsr();
  if ((old & ~0x3fu) != wanted) __builtin_ia32_ldmxcsr((u32)wanted);
  return old & ~0x3fu; // without the sticky exception flags
#elif defined(__aarch64__)
  u64 old;
  __asm__ volatile("mrs %0, fpcr" : "=r"(old));
  if (old != wanted) __asm__ volatile("msr fpcr, %0" ::"r"(wanted));
  return old;
#else
  return wanted;
#endif
}
#if defined(__x86_64__)
#define FPU_IEEE 0x1f80u
#else
#define FPU_IEEE 0u
#endif

// ---------------------------------------------------------------- the pool

// A region's items are cut into one range per member. A member works through its own range from the front,
// and then helps others from the back of theirs. So the same member gets the same part of the data in one
// region after the other (it is still in its cache), and a member that comes late or never costs nothing.
typedef struct region region;
typedef struct seat {
  u64 range; // next item in the low half, end in the high half
  region *of;
  int number;
} __attribute__((aligned(64))) seat;

struct region {
  ox_body body;
  void *arg;
  ox_i64 items, group; // a range counts groups of items, so that 32 bits suffice
  int team;
  int cpu; // that of the caller when it began
  seat *seats;
  u32 running __attribute__((aligned(64))); // seats handed out and not given back, and CALLER_SLEEPS
};
#define CALLER_SLEEPS 0x80000000u

// A worker's mailbox says what it does; anything above STOP is the address of the seat that it is offered.
enum { IDLE = 0, BUSY = 1, ASLEEP = 2, STOP = 3 };
typedef struct worker {
  u64 mailbox;
  u32 bell;     // rung (counted up) for a worker that is asleep
  int slept;    // since its last region
  ox_i64 moved; // when it last left the CPU of a caller
  pthread_t thread;
} __attribute__((aligned(64))) worker;

struct ox_pool {
  int count;      // workers started
  int cpus;       // CPUs that this process may use
  int spin_max;   // nanoseconds, set by the user
  int spin;       // nanoseconds, as the machine's load advises
  int calls;      // model calls in progress that may use workers
  int in_row;     // small regions that found no worker awake, each soon after the one before
  ox_i64 alone;   // when the last of them ended
  ox_i64 regions; // regions that had more than one member (read by tests)
  worker workers[OX_MAX_THREADS];
};
static ox_pool pool_of_process;
static __thread int inside_region;

#define SPIN_DEFAULT 50000
#define SPIN_LEAST 1000
#define SPIN_GAP 20000 // a spinning thread that loses this many nanoseconds at once has lost its CPU
#define MOVE_GAP 2000000 // nanoseconds between two moves of a worker from one CPU to another

static int cpu_count(void) {
#ifdef __linux__
  cpu_set_t set;
  if (!sched_getaffinity(0, sizeof set, &set)) return CPU_COUNT(&set);
#endif
  long n = sysconf(_SC_NPROCESSORS_ONLN);
  return n < 1 ? 1 : (int)n;
}

// Spin with a time limit that adapts: halved when the machine took the CPU away, restored slowly.
typedef struct spinner {
  ox_i64 start, last;
  int turns;
} spinner;

static void spin_learn(ox_pool *pool, int preempted) {
  int spin = __atomic_load_n(&pool->spin, __ATOMIC_RELAXED), max = __atomic_load_n(&pool->spin_max, __ATOMIC_RELAXED);
  int next = preempted ? spin / 2 : spin + spin / 16 + 16;
  if (next < SPIN_LEAST) next = SPIN_LEAST;
  if (next > max) next = max;
  if (next != spin) __atomic_store_n(&pool->spin, next, __ATOMIC_RELAXED);
}

static int spin_more(ox_pool *pool, spinner *s) {
  pause_cpu();
  if (++s->turns & 15) return 1;
  ox_i64 now = ox_now();
  if (!s->start) s->start = s->last = now;
  if (now - s->last > SPIN_GAP) { spin_learn(pool, 1); return 0; }
  s->last = now;
  ox_i64 limit = __atomic_load_n(&pool->spin, __ATOMIC_RELAXED);
  // To wake a sleeper costs its caller some 10 us. In the midst of a model's call the next region is near.
  if (__atomic_load_n(&pool->calls, __ATOMIC_RELAXED)) limit *= 4;
  return now - s->start < limit;
}

// Take a quarter of what a range still has: few steps for many small items, single ones at the end.
static int claim(seat *s, int own, ox_i64 *first, ox_i64 *last) {
  u64 range = __atomic_load_n(&s->range, __ATOMIC_RELAXED);
  for (;;) {
    u64 next = range & 0xffffffffu, end = range >> 32;
    if (next >= end) return 0;
    u64 n = (end - next + 3) / 4;
    u64 left = own ? (end << 32 | (next + n)) : ((end - n) << 32 | next);
    if (!__atomic_compare_exchange_n(&s->range, &range, left, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
    *first = (ox_i64)(own ? next : end - n);
    *last = *first + (ox_i64)n;
    return 1;
  }
}

static void work(region *r, int me) {
  for (int k = 0; k < r->team; k++) {
    seat *s = &r->seats[(me + k) % r->team];
    ox_i64 first, last;
    while (claim(s, k == 0, &first, &last)) {
      last *= r->group;
      r->body(r->arg, first * r->group, last < r->items ? last : r->items, me);
    }
  }
}

static int current_cpu(void) {
#ifdef __linux__
  return sched_getcpu();
#else
  return -1;
#endif
}

// Leave the caller's CPU. Where no CPU is idle, Linux wakes a worker on the CPU of who wakes it, and since both sleep
// often it does not part them later: for seconds a model would take the time that it has on one CPU.
static void move_away(worker *w, int cpu) {
#ifdef __linux__
  cpu_set_t allowed, others;
  if (cpu < 0 || cpu >= CPU_SETSIZE || cpu != current_cpu()) return;
  ox_i64 now = ox_now();
  if (now - w->moved < MOVE_GAP || sched_getaffinity(0, sizeof allowed, &allowed)) return;
  w->moved = now, others = allowed;
  CPU_CLR(cpu, &others);
  if (!CPU_COUNT(&others) || sched_setaffinity(0, sizeof others, &others)) return;
  sched_setaffinity(0, sizeof allowed, &allowed);
#else
  (void)w, (void)cpu;
#endif
}

// The mailbox's next offer. Spins, then sleeps; a worker beyond the number of CPUs sleeps at once.
static u64 next_offer(ox_pool *pool, worker *w) {
  int may_spin = w - pool->workers < pool->cpus - 1;
  for (;;) {
    spinner s = {0, 0, 0};
    do {
      u64 got = __atomic_load_n(&w->mailbox, __ATOMIC_RELAXED);
      if (got > ASLEEP) { spin_learn(pool, 0); return got; }
    } while (may_spin && spin_more(pool, &s));
    u32 seen = __atomic_load_n(&w->bell, __ATOMIC_ACQUIRE);
    u64 idle = IDLE;
    if (!__atomic_compare_exchange_n(&w->mailbox, &idle, ASLEEP, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) continue;
    while (__atomic_load_n(&w->mailbox, __ATOMIC_ACQUIRE) == ASLEEP) {
      wait_word(&w->bell, seen);
      seen = __atomic_load_n(&w->bell, __ATOMIC_ACQUIRE);
    }
    w->slept = 1;
  }
}

static void *worker_main(void *arg) {
  worker *w = (worker *)arg;
  ox_pool *pool = &pool_of_process;
  inside_region = 1;
  fpu_set(FPU_IEEE);
  for (;;) {
    u64 got = next_offer(pool, w);
    if (got == STOP) return 0;
    // Between the look and this exchange the caller may have withdrawn the offer, or made another.
    if (!__atomic_compare_exchange_n(&w->mailbox, &got, BUSY, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) continue;
    seat *s = (seat *)got;
    region *r = s->of;
    if (w->slept) move_away(w, r->cpu);
    w->slept = 0;
    work(r, s->number);
    // Free again before the region ends: the caller's next region, a moment later, wants this worker.
    __atomic_store_n(&w->mailbox, (u64)IDLE, __ATOMIC_RELEASE);
    u32 *running = &r->running;
    if (__atomic_fetch_sub(running, 1, __ATOMIC_ACQ_REL) == (CALLER_SLEEPS | 1)) wake_word(running);
  }
}

static void start_worker(worker *w, pthread_attr_t *attr, int *count) {
  w->mailbox = IDLE;
  if (!pthread_create(&w->thread, attr, worker_main, w)) __atomic_store_n(count, *count + 1, __ATOMIC_RELEASE);
}

// Have `wanted` workers, or as many as the system grants. Workers take no signals: those are the host's.
static void grow(ox_pool *pool, int wanted) {
  sigset_t all, old;
  pthread_attr_t attr;
  pthread_mutex_lock(&lock);
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  pthread_attr_init(&attr);
  pthread_attr_setstacksize(&attr, (size_t)8 << 20);
  for (int before = -1; before != pool->count && pool->count < wanted;) {
    before = pool->count;
    start_worker(&pool->workers[before], &attr, &pool->count);
  }
  pthread_attr_destroy(&attr);
  pthread_sigmask(SIG_SETMASK, &old, 0);
  pthread_mutex_unlock(&lock);
}

// Offer a seat (or STOP) to a worker, to one that sleeps only with `wake`. Returns whether the worker was free.
static int offer(worker *w, u64 what, int wake) {
  u64 state = __atomic_load_n(&w->mailbox, __ATOMIC_RELAXED);
  while (state == IDLE || (state == ASLEEP && wake)) {
    if (!__atomic_compare_exchange_n(&w->mailbox, &state, what, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) continue;
    if (state == ASLEEP) {
      __atomic_fetch_add(&w->bell, 1, __ATOMIC_RELEASE);
      wake_word(&w->bell);
    }
    return 1;
  }
  return 0;
}

// Wait for the members that took their seats; take back the seats of those that have not come yet.
static void finish(ox_pool *pool, region *r, worker *const *asked) {
  spinner s = {0, 0, 0};
  for (int i = 0; i < 32; i++) {
    if (!__atomic_load_n(&r->running, __ATOMIC_ACQUIRE)) return;
    pause_cpu();
  }
  u32 withdrawn = 0;
  for (int k = 1; k < r->team; k++) {
    u64 mine = (u64)&r->seats[k];
    if (asked[k] && __atomic_load_n(&asked[k]->mailbox, __ATOMIC_RELAXED) == mine)
      withdrawn += __atomic_compare_exchange_n(&asked[k]->mailbox, &mine, (u64)IDLE, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  }
  u32 left = __atomic_sub_fetch(&r->running, withdrawn, __ATOMIC_ACQUIRE);
  while (left && spin_more(pool, &s)) left = __atomic_load_n(&r->running, __ATOMIC_ACQUIRE);
  if (!left) return;
  left = __atomic_or_fetch(&r->running, CALLER_SLEEPS, __ATOMIC_ACQUIRE);
  while (left != CALLER_SLEEPS) {
    wait_word(&r->running, left);
    left = __atomic_load_n(&r->running, __ATOMIC_ACQUIRE);
  }
}

// The range of member k: an even share of the groups.
static u64 share(ox_i64 groups, int team, int k) {
  return (u64)(groups * (k + 1) / team) << 32 | (u64)(groups * k / team);
}

static void run_region(ox_pool *pool, int threads, ox_i64 items, ox_body body, void *arg, int wake) {
  if (items <= 0) return;
  if (threads > OX_MAX_THREADS) threads = OX_MAX_THREADS;
  ox_i64 group = (items >> 30) + 1, groups = (items + group - 1) / group;
  if (threads > groups) threads = (int)groups;
  if (threads <= 1 || inside_region) { body(arg, 0, items, 0); return; }
  if (__atomic_load_n(&pool->count, __ATOMIC_ACQUIRE) < threads - 1) grow(pool, threads - 1);

  seat seats[OX_MAX_THREADS];
  worker *asked[OX_MAX_THREADS];
  region r;
  r.body = body, r.arg = arg, r.items = items, r.group = group, r.team = threads, r.seats = seats, r.cpu = current_cpu();
  r.running = (u32)threads - 1;
  // The ranges are set for the whole team before anyone starts: that of an absent member is taken by others.
  for (int k = 0; k < threads; k++) seats[k].range = share(groups, threads, k), seats[k].of = &r, seats[k].number = k;
  int count = __atomic_load_n(&pool->count, __ATOMIC_ACQUIRE), next = 0;
  u32 absent = 0;
  for (int k = 1; k < threads; k++) {
    while (next < count && !offer(&pool->workers[next], (u64)&seats[k], wake)) next++;
    asked[k] = next < count ? &pool->workers[next++] : (worker *)0;
    absent += !asked[k];
  }
  if (absent) __atomic_fetch_sub(&r.running, absent, __ATOMIC_RELAXED);
  inside_region = 1;
  if (absent == (u32)threads - 1) {
    body(arg, 0, items, 0);
    inside_region = 0;
    return;
  }
  __atomic_fetch_add(&pool->regions, 1, __ATOMIC_RELAXED);
  work(&r, 0);
  inside_region = 0;
  finish(pool, &r, asked);
}

// Run body over the items with at most `threads` members, the caller among them (as number 0).
//
// Several threads may call at once: each gets the workers that are free at that moment, and none waits for
// another's; with no worker free the caller does everything itself. A call from inside a body runs serially
// on its thread, as member 0. With one item or one thread the body is called directly.
OX_EXPORT void ox_parallel(ox_pool *pool, int threads, ox_i64 items, ox_body body, void *arg) {
  run_region(pool, threads, items, body, arg, 1);
}

#define SMALL_ROW 4       // small regions in a row for which workers are woken
#define SMALL_LONG 20000  // nanoseconds after which one was not small on this machine: the next wakes workers

static int count_idle(ox_pool *pool) {
  int count = __atomic_load_n(&pool->count, __ATOMIC_ACQUIRE), idle = 0;
  for (int k = 0; k < count; k++) idle += __atomic_load_n(&pool->workers[k].mailbox, __ATOMIC_RELAXED) == IDLE;
  return idle;
}

// Whether small regions follow each other so closely that workers, woken for one, are awake for the next.
static int small_in_row(ox_pool *pool, ox_i64 now) {
  ox_i64 spin = __atomic_load_n(&pool->spin, __ATOMIC_RELAXED);
  if (__atomic_load_n(&pool->calls, __ATOMIC_RELAXED)) spin *= 4;
  if (now - __atomic_load_n(&pool->alone, __ATOMIC_RELAXED) < spin)
    return __atomic_add_fetch(&pool->in_row, 1, __ATOMIC_RELAXED) >= SMALL_ROW;
  __atomic_store_n(&pool->in_row, 0, __ATOMIC_RELAXED);
  return 0;
}

// As ox_parallel, for work that is done before a worker that sleeps has come: to wake it costs the caller 5 to 10 us,
// and it begins some 20 us later. So those that are awake take part. Where none is the caller does all of it, unless it
// makes one such region after the other: then workers that are woken will be awake for the next.
OX_EXPORT void ox_parallel_small(ox_pool *pool, int threads, ox_i64 items, ox_body body, void *arg) {
  if (items <= 0) return;
  int idle = inside_region ? 0 : count_idle(pool);
  if (idle || inside_region) {
    run_region(pool, threads <= idle ? threads : idle + 1, items, body, arg, 0);
    return;
  }
  ox_i64 begin = ox_now();
  int wake = small_in_row(pool, begin);
  if (wake) run_region(pool, threads, items, body, arg, 1);
  else body(arg, 0, items, 0);
  ox_i64 end = ox_now();
  if (!wake && end - begin > SMALL_LONG) __atomic_store_n(&pool->in_row, SMALL_ROW, __ATOMIC_RELAXED);
  __atomic_store_n(&pool->alone, end, __ATOMIC_RELAXED);
}

// A forked child has this thread and no other: forget the workers, the next region starts new ones.
static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork_parent(void) { pthread_mutex_unlock(&lock); }
static void after_fork_child(void) {
  pthread_mutex_unlock(&lock); // this thread locked it, in before_fork
  reset_sleep();
  memset(pool_of_process.workers, 0, sizeof pool_of_process.workers);
  pool_of_process.count = pool_of_process.calls = 0;
  pool_of_process.spin = pool_of_process.spin_max;
}

__attribute__((constructor)) static void start_runtime(void) {
  pool_of_process.cpus = cpu_count();
  pool_of_process.spin = pool_of_process.spin_max = SPIN_DEFAULT;
  pthread_atfork(before_fork, after_fork_parent, after_fork_child);
}

OX_EXPORT ox_pool *ox_pool_get(void) { return &pool_of_process; }
OX_EXPORT int ox_pool_workers(ox_pool *pool) { return __atomic_load_n(&pool->count, __ATOMIC_ACQUIRE); }
OX_EXPORT ox_i64 ox_pool_regions(ox_pool *pool) { return __atomic_load_n(&pool->regions, __ATOMIC_RELAXED); }
OX_EXPORT int ox_cpus(void) { return cpu_count(); }

// How long an idle worker spins before it sleeps; 0 sleeps at once.
OX_EXPORT void ox_pool_set_spin(ox_pool *pool, int nanoseconds) {
  __atomic_store_n(&pool->spin_max, nanoseconds, __ATOMIC_RELAXED);
  __atomic_store_n(&pool->spin, nanoseconds, __ATOMIC_RELAXED);
}

// End all workers and wait for them; the next region starts new ones. No other thread may be in a region.
// (A process need not call this before it exits: workers hold nothing, and the library is never unloaded.)
OX_EXPORT void ox_pool_stop(ox_pool *pool) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < pool->count; i++) {
    worker *w = &pool->workers[i];
    while (!offer(w, STOP, 1)) pause_cpu();
    pthread_join(w->thread, 0);
  }
  __atomic_store_n(&pool->count, 0, __ATOMIC_RELEASE);
  pthread_mutex_unlock(&lock);
}

// ---------------------------------------------------------------- memory

// Every block starts with this header, on a cache line of its own; the payload follows it.
struct ox_block {
  ox_block *next;
  ox_i64 bytes;  // of the payload
  ox_i64 mapped; // bytes of the mapping; 0: from malloc
} __attribute__((aligned(OX_ALIGN)));

#define HUGE_PAGE ((ox_i64)2 << 20)
#define MOST_BYTES ((ox_i64)1 << 46)

// Pages of the system, on a 2 MB boundary so that the kernel can use huge pages; given back when freed.
static ox_block *map_block(ox_i64 bytes) {
  ox_i64 size = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  char *raw = (char *)mmap(0, (size_t)(size + HUGE_PAGE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == (char *)MAP_FAILED) return 0;
  ox_i64 head = (ox_i64)(-(u64)raw & (u64)(HUGE_PAGE - 1));
  if (head) munmap(raw, (size_t)head);
  if (head < HUGE_PAGE) munmap(raw + head + size, (size_t)(HUGE_PAGE - head));
#ifdef MADV_HUGEPAGE
  madvise(raw + head, (size_t)size, MADV_HUGEPAGE);
#endif
  ox_block *block = (ox_block *)(raw + head);
  block->mapped = size;
  return block;
}

static ox_block *new_block(ox_i64 bytes) {
  if (bytes < 0 || bytes > MOST_BYTES) return 0;
  ox_i64 total = bytes + (ox_i64)sizeof(ox_block);
  ox_block *block = 0;
  if (total >= HUGE_PAGE) {
    block = map_block(total);
    if (!block) return 0;
    block->bytes = block->mapped - (ox_i64)sizeof(ox_block);
  } else {
    void *memory;
    if (posix_memalign(&memory, OX_ALIGN, (size_t)(total + OX_ALIGN - 1) / OX_ALIGN * OX_ALIGN)) return 0;
    block = (ox_block *)memory;
    block->mapped = 0;
    block->bytes = bytes;
  }
  block->next = 0;
  return block;
}

static void free_block(ox_block *block) {
  if (block->mapped) munmap(block, (size_t)block->mapped);
  else free(block);
}

static void free_chain(ox_block *block) {
  while (block) {
    ox_block *next = block->next;
    free_block(block);
    block = next;
  }
}

static int ox_fail(ox_ctx *ctx, int code, ox_i64 node, ox_i64 value) {
  int free_slot = 0;
  if (__atomic_compare_exchange_n(&ctx->error.claimed, &free_slot, 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
    ctx->error.node = node;
    ctx->error.value = value;
    __atomic_store_n(&ctx->error.code, code ? code : OX_ERR_INTERNAL, __ATOMIC_RELEASE);
  }
  return code;
}

OX_EXPORT void *ox_alloc(ox_i64 bytes) {
  ox_block *block = new_block(bytes);
  return block ? block + 1 : 0;
}

OX_EXPORT void ox_release(void *memory) {
  if (memory) free_block((ox_block *)memory - 1);
}

static void *ox_take(ox_ctx *ctx, ox_i64 bytes) {
  ox_block *block = new_block(bytes);
  if (!block) { ox_fail(ctx, OX_ERR_MEMORY, -1, bytes); return 0; }
  if (ctx->flags & OX_POISON) memset((void *)(block + 1), 0xff, (size_t)bytes);
  block->next = __atomic_load_n(&ctx->taken, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(&ctx->taken, &block->next, block, 1, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {}
  return block + 1;
}

// ---------------------------------------------------------------- models and their arenas

// Each call in progress has an arena of its own; between calls they wait in a list, the last used first (it
// is the one still in the caches). Every WINDOW calls the list gives up what no call of the window needed.
struct ox_model {
  ox_entry entry;
  void *const *user;
  ox_i64 limit;
  int flags;
  ox_block *idle;
  int idle_count, idle_least, calls;
  ox_i64 largest; // of the window's arenas
};
#define WINDOW 256

OX_EXPORT ox_model *ox_model_new(ox_entry entry, void *const *user, ox_i64 limit, int flags) {
  ox_model *m = (ox_model *)calloc(1, sizeof(ox_model));
  if (!m) return 0;
  m->entry = entry, m->user = user, m->limit = limit, m->flags = flags;
  return m;
}

// With the lock held: unlink the arenas of the list beyond the first `keep`, or larger than `most`.
static ox_block *unlink_idle(ox_model *m, int keep, ox_i64 most) {
  ox_block *gone = 0, **at = &m->idle;
  int kept = 0;
  while (*at) {
    ox_block *block = *at;
    if (kept < keep && block->bytes <= most) { kept++; at = &block->next; continue; }
    *at = block->next;
    block->next = gone;
    gone = block;
  }
  m->idle_count = kept;
  return gone;
}

// With the lock held: at the end of a window, what to free.
static ox_block *end_window(ox_model *m) {
  ox_i64 most = m->largest * 4 < HUGE_PAGE ? HUGE_PAGE : m->largest * 4;
  ox_block *gone = unlink_idle(m, m->idle_count - m->idle_least, most);
  m->calls = 0, m->largest = 0, m->idle_least = m->idle_count;
  return gone;
}

// Free all idle arenas but `keep`.
OX_EXPORT void ox_model_trim(ox_model *m, int keep) {
  pthread_mutex_lock(&lock);
  ox_block *gone = unlink_idle(m, keep, MOST_BYTES);
  if (m->idle_least > m->idle_count) m->idle_least = m->idle_count;
  pthread_mutex_unlock(&lock);
  free_chain(gone);
}

// Bytes held in idle arenas.
OX_EXPORT ox_i64 ox_model_idle_bytes(ox_model *m) {
  ox_i64 sum = 0;
  pthread_mutex_lock(&lock);
  for (ox_block *block = m->idle; block; block = block->next) sum += block->bytes;
  pthread_mutex_unlock(&lock);
  return sum;
}

// No call may be in progress.
OX_EXPORT void ox_model_free(ox_model *m) {
  if (!m) return;
  ox_model_trim(m, 0);
  free(m);
}

static ox_block *take_idle(ox_model *m, ox_i64 bytes) {
  pthread_mutex_lock(&lock);
  ox_block *block = m->idle;
  if (block) m->idle = block->next, m->idle_count--;
  if (m->idle_count < m->idle_least) m->idle_least = m->idle_count;
  if (bytes > m->largest) m->largest = bytes;
  pthread_mutex_unlock(&lock);
  return block;
}

static void put_idle(ox_model *m, ox_block *block) {
  ox_block *gone = 0;
  pthread_mutex_lock(&lock);
  block->next = m->idle;
  m->idle = block;
  m->idle_count++;
  if (++m->calls >= WINDOW) gone = end_window(m);
  pthread_mutex_unlock(&lock);
  free_chain(gone);
}

static char *ox_arena(ox_ctx *ctx, ox_i64 bytes) {
  if (bytes < 0 || (ctx->model->limit && bytes > ctx->model->limit)) {
    ox_fail(ctx, OX_ERR_LIMIT, -1, bytes);
    return 0;
  }
  ox_block *block = ctx->arena_block ? ctx->arena_block : take_idle(ctx->model, bytes);
  ctx->arena_block = 0, ctx->arena = 0, ctx->arena_bytes = 0;
  if (block && block->bytes < bytes) { free_block(block); block = 0; }
  if (!block) block = new_block(bytes);
  if (!block) { ox_fail(ctx, OX_ERR_MEMORY, -1, bytes); return 0; }
  ctx->arena_block = block, ctx->arena = (char *)(block + 1), ctx->arena_bytes = bytes;
  if (ctx->flags & OX_POISON) memset(ctx->arena, 0xff, (size_t)bytes);
  return ctx->arena;
}

static void ox_lap_end(ox_ctx *ctx, ox_i64 kernel) {
  ox_i64 now = ox_now();
  if (kernel >= 0 && kernel < ctx->kernels) ctx->times[kernel] += now - ctx->lap;
  ctx->lap = ox_now(); // the clock's own time counts for no kernel
}

// ---------------------------------------------------------------- signals

// Python runs handlers of signals in its main thread, when that has its lock; a program that loops without end never
// comes to it. So between turns of loops the lock is taken now and then, for handlers to run. What one of them raises
// (KeyboardInterrupt, say) ends the call, and is kept for the caller to raise again.
static struct {
  int (*ensure)(void);      // PyGILState_Ensure; NULL where no Python is around
  void (*release)(int);     // PyGILState_Release
  int (*check)(void);       // PyErr_CheckSignals
  void (*fetch)(void **, void **, void **); // PyErr_Fetch
} python;
static __thread void *exception_of_thread[3];
#define SIGNALS_EVERY 50000000 // nanoseconds
#define LOOK_EVERY 10000000

OX_EXPORT void ox_set_python(int (*ensure)(void), void (*release)(int), int (*check)(void),
                             void (*fetch)(void **, void **, void **)) {
  python.release = release, python.check = check, python.fetch = fetch, python.ensure = ensure;
}

// The type, value and traceback of what ended this thread's last call: OX_ERR_SIGNAL. They are the caller's to keep.
OX_EXPORT void ox_exception(void **found) { memcpy(found, exception_of_thread, sizeof exception_of_thread); }

static void look_for_signals(ox_ctx *ctx) {
  int state = python.ensure();
  if (python.check()) {
    void **e = exception_of_thread;
    python.fetch(e, e + 1, e + 2);
    ox_fail(ctx, OX_ERR_SIGNAL, -1, 0);
  }
  python.release(state);
}

// To look at the clock takes as long as a short turn. So the next look is after as many turns as take LOOK_EVERY, by
// what those since the last one took, and no more than twice as many as those.
static void ox_turn(ox_ctx *ctx) {
  ox_i64 now = ox_now(), taken = ctx->granted + 1, next = 2 * taken;
  if (!ctx->looked) ctx->signals = now;
  else if (now - ctx->looked > LOOK_EVERY / 2) next = (ox_i64)((double)LOOK_EVERY * taken / (now - ctx->looked));
  ctx->looked = now;
  ctx->turns = ctx->granted = next;
  if (now - ctx->signals < SIGNALS_EVERY) return;
  ctx->signals = now;
  if (python.ensure && !ox_failed(ctx)) look_for_signals(ctx);
}

static const ox_api api_of_runtime = {
    OX_ABI, (int)sizeof(ox_api), ox_parallel, ox_arena, ox_take, ox_alloc, ox_release, ox_fail, ox_now, ox_lap_end,
    ox_turn, ox_parallel_small,
};
OX_EXPORT const ox_api *ox_api_get(void) { return &api_of_runtime; }

// As ox_call; the nanoseconds of each kernel are added to times[0] ... times[kernels - 1], where it is given.
OX_EXPORT int ox_profile(ox_model *m, int threads, void *const *buffers, const ox_i64 *dims, ox_error *error,
                         ox_i64 *times, ox_i64 kernels) {
  ox_ctx ctx;
  memset((void *)&ctx, 0, sizeof ctx);
  ctx.api = &api_of_runtime, ctx.pool = &pool_of_process, ctx.model = m, ctx.user = m->user, ctx.flags = m->flags;
  ctx.times = times, ctx.kernels = kernels;
  ctx.threads = threads < 1 ? 1 : threads > OX_MAX_THREADS ? OX_MAX_THREADS : threads;
  u64 fpu = fpu_set(FPU_IEEE);
  if (ctx.threads > 1) __atomic_fetch_add(&pool_of_process.calls, 1, __ATOMIC_RELAXED);
  int code = m->entry(&ctx, buffers, dims);
  if (ctx.threads > 1) __atomic_fetch_sub(&pool_of_process.calls, 1, __ATOMIC_RELAXED);
  if (fpu != FPU_IEEE) fpu_set(fpu);
  if (code && !ctx.error.code) ox_fail(&ctx, code, -1, 0);
  if (ctx.arena_block) put_idle(m, ctx.arena_block);
  if (ctx.taken) free_chain(ctx.taken);
  if (error) *error = ctx.error;
  return ctx.error.code;
}

// Run a model once. Safe from any number of threads at a time. Returns 0, or the code of the first failure,
// which *error (when given) describes.
OX_EXPORT int ox_call(ox_model *m, int threads, void *const *buffers, const ox_i64 *dims, ox_error *error) {
  return ox_profile(m, threads, buffers, dims, error, 0, 0);
}

// ---------------------------------------------------------------- calls with numpy arrays

// A call straight from Python objects. To ask an array for its address takes Python a microsecond; here its
// fields are read where they lie. What is relied on is numpy's PyArrayObject_fields (part of numpy's ABI) and
// CPython's tuple; where the fields start depends on the Python (`head`, `items`). The caller tests once,
// with ox_array_fields, that all of this holds. The objects must stay alive and unchanged during the call.
typedef struct ox_fields {
  char *data;
  int rank;
  const ox_i64 *shape;
  const ox_i64 *strides;
  void *base;
  void *descr;
  int flags;
} ox_fields;
#define ARRAY_READY 0x101 // C-contiguous and aligned
#define MOST_ARRAYS 1024  // more inputs and outputs than these go the slow way (a decoder of 64 layers has 256)

typedef struct ox_want {
  void *descr;
  const ox_i64 *shape;
  ox_i64 rank;
} ox_want;

// All that a call needs to know for inputs of one set of shapes.
typedef struct ox_site {
  ox_model *model;
  const ox_i64 *dims;
  const ox_want *want; // of each input
  void *type;          // of arrays: numpy.ndarray itself
  ox_i64 head, items;  // bytes of an object's head; bytes before a tuple's items
  ox_i64 inputs, outputs;
} ox_site;

static const ox_fields *fields_of(const char *object, ox_i64 head) { return (const ox_fields *)(object + head); }
static void *type_of(const char *object, ox_i64 head) { return *(void *const *)(object + head - sizeof(void *)); }
static const char *item_of(const char *tuple, ox_i64 items, ox_i64 k) { return ((const char *const *)(tuple + items))[k]; }

// What is found of the tuple's first item: number of items, its type, descr, data, rank, flags.
OX_EXPORT void ox_array_fields(const char *tuple, ox_i64 head, ox_i64 items, ox_i64 *found) {
  const char *array = item_of(tuple, items, 0);
  const ox_fields *f = fields_of(array, head);
  found[0] = *(const ox_i64 *)(tuple + head);
  found[1] = (ox_i64)type_of(array, head), found[2] = (ox_i64)f->descr, found[3] = (ox_i64)f->data;
  found[4] = f->rank, found[5] = f->flags;
}

static __thread ox_error error_of_thread;
// The failure of this thread's last ox_call_arrays.
OX_EXPORT void ox_last_error(ox_error *error) { *error = error_of_thread; }

static int fits(const char *array, const ox_want *want, const ox_site *s) {
  if (type_of(array, s->head) != s->type) return 0;
  const ox_fields *f = fields_of(array, s->head);
  if (f->descr != want->descr || f->rank != want->rank || (f->flags & ARRAY_READY) != ARRAY_READY) return 0;
  for (int i = 0; i < f->rank; i++)
    if (f->shape[i] != want->shape[i]) return 0;
  return 1;
}

// Run a model on a tuple of inputs and a tuple of outputs. Returns -1, and does nothing, where an input is not
// plainly what the site is for (the caller then finds out why); else as ox_call.
OX_EXPORT int ox_call_arrays(const ox_site *s, int threads, const char *inputs, const char *outputs) {
  void *buffers[MOST_ARRAYS];
  if (*(const ox_i64 *)(inputs + s->head) != s->inputs || s->inputs + s->outputs > MOST_ARRAYS) return -1;
  for (ox_i64 i = 0; i < s->inputs; i++) {
    const char *array = item_of(inputs, s->items, i);
    if (!fits(array, &s->want[i], s)) return -1;
    buffers[i] = fields_of(array, s->head)->data;
  }
  for (ox_i64 i = 0; i < s->outputs; i++)
    buffers[s->inputs + i] = fields_of(item_of(outputs, s->items, i), s->head)->data;
  return ox_call(s->model, threads, buffers, s->dims, &error_of_thread);
}

// ---------------------------------------------------------------- arenas of dynamic sizes

// The memory plan for new sizes: places n blocks, in the given order, each in the lowest gap between those
// that are in use at the same time (first[i] to last[i]). Sizes are multiples of OX_ALIGN. Returns the bytes of
// all, or -1 where there is no memory.
OX_EXPORT ox_i64 ox_place(ox_i64 n, const ox_i64 *order, const ox_i64 *bytes, const ox_i64 *first, const ox_i64 *last,
                          ox_i64 *offsets) {
  ox_i64 *placed = (ox_i64 *)malloc((size_t)(n + 1) * sizeof(ox_i64)), total = 0; // by offset
  if (!placed) return -1;
  for (ox_i64 k = 0; k < n; k++) {
    ox_i64 i = order[k], at = 0, p;
    for (p = 0; p < k; p++) {
      ox_i64 j = placed[p];
      if (first[j] > last[i] || first[i] > last[j]) continue;
      if (at + bytes[i] <= offsets[j]) break;
      if (offsets[j] + bytes[j] > at) at = offsets[j] + bytes[j];
    }
    offsets[i] = at;
    if (at + bytes[i] > total) total = at + bytes[i];
    for (p = k; p > 0 && offsets[placed[p - 1]] > at; p--) placed[p] = placed[p - 1];
    placed[p] = i;
  }
  free(placed);
  return total;
}

#include "peaks.h"
