"""The native runtime: its thread pool, its arenas and the call of a program."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from onnxc.errors import InternalError, LimitError, PackageError, RunError
from onnxc.runtime.cache import Cache
from onnxc.runtime.library import (
    NATIVE,
    POISON,
    CallError,
    NativeModel,
    Runtime,
    call_exception,
    load_runtime,
    runtime_code,
)
from onnxc.runtime.package import load_library
from onnxc.runtime.toolchain import Source, compile_library

PROGRAM = r"""
#ifdef __linux__
#include <sched.h>
#endif
#include "runtime.h"
#define MOST 4096
// Counts how often each item ran, and what must never be: a number out of range, or used twice at once.
struct Job {
  const ox_api *api; ox_pool *pool; int threads; int depth;
  int bad, calls, members; int busy[256]; unsigned char seen[MOST];
};
static void spin(const ox_api *api, ox_i64 ns) { ox_i64 t = api->now(); while (api->now() - t < ns) {} }
static void check(void *p, ox_i64 first, ox_i64 last, int worker) {
  Job *j = (Job *)p;
  int wrong = worker < 0 || worker >= j->threads || first >= last;
  if (wrong || __atomic_exchange_n(&j->busy[worker], 1, __ATOMIC_ACQUIRE))
    __atomic_fetch_add(&j->bad, 1, __ATOMIC_RELAXED);
  __atomic_fetch_add(&j->calls, 1, __ATOMIC_RELAXED);
  __atomic_fetch_or(&j->members, 1 << (worker & 31), __ATOMIC_RELAXED);
  for (ox_i64 i = first; i < last; i++) __atomic_fetch_add(&j->seen[i], 1, __ATOMIC_RELAXED);
  if (j->depth) {
    Job inner = {};
    inner.api = j->api, inner.pool = j->pool, inner.threads = 1;
    j->api->parallel(j->pool, 4, 50, check, &inner);
    for (int i = 0; i < 50; i++) if (inner.seen[i] != 1) __atomic_fetch_add(&j->bad, 1, __ATOMIC_RELAXED);
    if (inner.bad || inner.calls != 1) __atomic_fetch_add(&j->bad, 1, __ATOMIC_RELAXED);
  }
  if (worker >= 0 && worker < 256) __atomic_store_n(&j->busy[worker], 0, __ATOMIC_RELEASE);
}
// Returns how often a body was called, or -1.
OX_EXPORT int try_region(const ox_api *api, ox_pool *pool, int threads, ox_i64 items, int depth) {
  static Job zero;
  Job j = zero;
  j.api = api, j.pool = pool, j.threads = threads < 1 ? 1 : threads, j.depth = depth;
  api->parallel(pool, threads, items, check, &j);
  for (int i = 0; i < MOST; i++) if (j.seen[i] != (i < items)) j.bad++;
  return j.bad ? -1 : j.calls;
}
// The same by a region that is `small`, behind another one where that is asked for.
OX_EXPORT int try_small(const ox_api *api, ox_pool *pool, int threads, ox_i64 items, int behind) {
  static Job zero;
  Job j = zero, other = zero;
  j.api = other.api = api, j.pool = other.pool = pool, j.threads = other.threads = threads;
  if (behind) api->parallel(pool, threads, threads, check, &other);
  api->parallel_small(pool, threads, items, check, &j);
  for (int i = 0; i < MOST; i++) if (j.seen[i] != (i < items)) j.bad++;
  return j.bad ? -1 : j.calls;
}
static void rendezvous(void *p, ox_i64 first, ox_i64 last, int) {
  Job *j = (Job *)p;
  __atomic_fetch_add(&j->calls, (int)(last - first), __ATOMIC_RELAXED);
  ox_i64 t = j->api->now();
  while (__atomic_load_n(&j->calls, __ATOMIC_RELAXED) < j->threads && j->api->now() - t < 20000000000) {}
}
// `threads` items that wait for each other: returns whether all ran at the same time.
OX_EXPORT int meet(const ox_api *api, ox_pool *pool, int threads) {
  static Job zero;
  Job j = zero;
  j.api = api, j.threads = threads;
  ox_i64 t = api->now();
  api->parallel(pool, threads, threads, rendezvous, &j);
  return api->now() - t < 15000000000;
}
static void note_cpu(void *p, ox_i64 first, ox_i64, int) {
#ifdef __linux__
  ((Job *)p)->busy[first] = sched_getcpu();
#endif
  rendezvous(p, first, first + 1, 0);
}
// Whether two members that wait for each other have CPUs of their own.
OX_EXPORT int apart(const ox_api *api, ox_pool *pool) {
  static Job zero;
  Job j = zero;
  j.api = api, j.threads = 2;
  api->parallel(pool, 2, 2, note_cpu, &j);
  return j.busy[0] != j.busy[1];
}
static void count(void *p, ox_i64 first, ox_i64 last, int) {
  __atomic_fetch_add((ox_i64 *)p, last - first, __ATOMIC_RELAXED);
}
OX_EXPORT ox_i64 count_items(const ox_api *api, ox_pool *pool, ox_i64 items) {
  ox_i64 n = 0;
  api->parallel(pool, 3, items, count, &n);
  return n;
}
OX_EXPORT void many_regions(const ox_api *api, ox_pool *pool, int threads, int regions, int *bad) {
  for (int r = 0; r < regions; r++) if (try_region(api, pool, threads, 1 + r % 37, 0) < 0) ++*bad;
}

// Programs. Each takes dims[0] bytes of arena.
struct Fill { char *arena; ox_i64 share; };
static void fill(void *p, ox_i64 first, ox_i64 last, int) {
  Fill *f = (Fill *)p;
  for (ox_i64 i = first; i < last; i++) __builtin_memset(f->arena + i * f->share, (int)(i + 1), f->share);
}
// Fill the arena in parallel, wait, and look whether somebody else wrote to it.
OX_EXPORT int own_arena(ox_ctx *ctx, void *const *buffers, const ox_i64 *dims) {
  char *arena = ctx->api->arena(ctx, dims[0]);
  if (!arena) return ctx->error.code;
  if ((unsigned long long)arena % OX_ALIGN) return ctx->api->fail(ctx, OX_ERR_INTERNAL, 1, 0);
  Fill f = {arena, dims[0] / 8};
  ox_for(ctx, 8, fill, &f);
  spin(ctx->api, dims[1]);
  for (ox_i64 i = 0; i < f.share * 8; i++)
    if (arena[i] != (char)(i / f.share + 1)) return ctx->api->fail(ctx, OX_ERR_INTERNAL, 2, i);
  *(ox_i64 *)buffers[0] = (ox_i64)arena;
  return OX_OK;
}
OX_EXPORT int poisoned(ox_ctx *ctx, void *const *buffers, const ox_i64 *dims) {
  unsigned char *arena = (unsigned char *)ctx->api->arena(ctx, dims[0]);
  unsigned char *more = (unsigned char *)ctx->api->take(ctx, dims[0]);
  if (!arena || !more) return ctx->error.code;
  ox_i64 *n = (ox_i64 *)buffers[0];
  for (ox_i64 i = 0; i < dims[0]; i++) *n += (arena[i] == 0xff) + (more[i] == 0xff);
  __builtin_memset(arena, 1, dims[0]);
  return OX_OK;
}
static void fail_some(void *p, ox_i64 first, ox_i64 last, int) {
  ox_ctx *ctx = (ox_ctx *)p;
  for (ox_i64 i = first; i < last; i++) if (i % 10 == 3) ctx->api->fail(ctx, OX_ERR_INDEX, 17, i);
}
OX_EXPORT int failing(ox_ctx *ctx, void *const *, const ox_i64 *) {
  ox_for(ctx, 100, fail_some, ctx);
  return ox_failed(ctx) ? ctx->api->fail(ctx, OX_ERR_INTERNAL, 99, 99) : OX_OK;
}
OX_EXPORT int plain_code(ox_ctx *, void *const *, const ox_i64 *) { return 42; }
OX_EXPORT int takes_much(ox_ctx *ctx, void *const *buffers, const ox_i64 *dims) {
  for (int i = 0; i < 100; i++) {
    char *block = (char *)ctx->api->take(ctx, dims[0] + i);
    if (!block) return ctx->error.code;
    __builtin_memset(block, i, dims[0] + i);
  }
  *(ox_i64 *)buffers[0] = ((ox_i64 *)ctx->user)[0];
  return OX_OK;
}
static volatile float tiny = 1e-38f, half = 0.125f;
static void denormal(void *p, ox_i64 first, ox_i64, int) { ((float *)p)[first] = tiny * half; }
OX_EXPORT int denormals(ox_ctx *ctx, void *const *buffers, const ox_i64 *) {
  ctx->api->parallel(ctx->pool, ctx->threads, 2, denormal, buffers[0]);
  return OX_OK;
}
// Call a model with denormals flushed to zero; returns whether they are still flushed afterwards.
typedef int (*Call)(ox_model *, int, void *const *, const ox_i64 *, ox_error *);
OX_EXPORT int flushed(Call call, ox_model *m, void **b) {
#ifdef __x86_64__
  unsigned old = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(old | 0x8040);
  call(m, 2, b, 0, 0);
  int kept = (__builtin_ia32_stmxcsr() & 0x8040) == 0x8040;
  __builtin_ia32_ldmxcsr(old);
  return kept;
#else
  call(m, 2, b, 0, 0);
  return 1;
#endif
}
"""


@dataclass
class Native:
    """The runtime and the test program, loaded."""

    runtime: Runtime
    program: ctypes.CDLL

    def region(self, threads: int, items: int, depth: int = 0) -> int:
        return int(self.program.try_region(self.runtime.api, self.runtime.pool, threads, items, depth))

    def model(self, name: str, user: object = None, limit: int = 0, flags: int = 0) -> int:
        entry = ctypes.cast(getattr(self.program, name), ctypes.c_void_p)
        made = self.runtime.library.ox_model_new(entry, user, limit, flags)
        assert made
        return int(made)

    def call(self, model: int, dims: list[int], threads: int = 2) -> tuple[int, CallError, int]:
        """(code, error, what the program wrote to its first buffer)."""
        answer, error = ctypes.c_longlong(), CallError()
        buffers = (ctypes.c_void_p * 1)(ctypes.addressof(answer))
        sizes = (ctypes.c_longlong * len(dims))(*dims)
        code = self.runtime.library.ox_call(model, threads, buffers, sizes, ctypes.byref(error))
        return code, error, answer.value


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Native:
    runtime = load_runtime(Cache(tmp_path_factory.mktemp("cache")))
    code = compile_library([Source("program.cpp", PROGRAM)], include=[NATIVE])
    program = load_library(code)
    pointer, integer, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
    program.try_region.argtypes = [pointer, pointer, integer, long, integer]
    program.try_small.argtypes = [pointer, pointer, integer, long, integer]
    program.meet.argtypes = [pointer, pointer, integer]
    program.apart.argtypes = [pointer, pointer]
    program.count_items.argtypes = [pointer, pointer, long]
    program.count_items.restype = long
    program.many_regions.argtypes = [pointer, pointer, integer, integer, pointer]
    program.flushed.argtypes = [pointer, pointer, pointer]
    return Native(runtime, program)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run work(0) ... work(count - 1) at once, and raise what one of them raises."""
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    if failures:
        raise failures[0]


def in_child(work: Callable[[], bool]) -> int:
    """Fork; returns the child's exit status: 0 when `work` was true. A child that hangs is killed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if work() else 2
        finally:
            os._exit(status)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the forked child hangs")


# ---------------------------------------------------------------- regions


@pytest.mark.parametrize("threads", [-1, 1, 2, 3, 7, 40])
@pytest.mark.parametrize("items", [0, 1, 2, 3, 5, 64, 1000, 4096])
def test_each_item_runs_once(native: Native, threads: int, items: int) -> None:
    calls = native.region(threads, items)
    assert calls >= (items > 0)
    if threads <= 1 or items <= 1:
        assert calls == (items > 0), "one thread or one item is one call"


def test_threads_really_run_side_by_side(native: Native) -> None:
    before = native.runtime.library.ox_pool_regions(native.runtime.pool)
    for threads in (2, 3, 5):
        assert native.program.meet(native.runtime.api, native.runtime.pool, threads)
        time.sleep(0.01)  # the workers fall asleep, and must be woken
    assert native.runtime.library.ox_pool_regions(native.runtime.pool) >= before + 3


@pytest.mark.skipif(sys.platform != "linux", reason="threads are parted on Linux alone")
def test_a_worker_leaves_the_cpu_of_its_caller(native: Native) -> None:
    """Also where all other CPUs are busy: a scheduler leaves two such threads together for seconds."""
    allowed = sorted(os.sched_getaffinity(0))[:2]
    if len(allowed) < 2:
        pytest.skip("one CPU")

    def tasks() -> list[int]:
        return [int(task) for task in os.listdir("/proc/self/task")]

    def work() -> bool:
        native.runtime.library.ox_pool_set_spin(native.runtime.pool, 0)
        native.program.meet(native.runtime.api, native.runtime.pool, 2)
        for task in tasks():
            os.sched_setaffinity(task, allowed[:1])
        for task in tasks():
            os.sched_setaffinity(task, allowed)
        apart = 0
        for _ in range(40):
            time.sleep(0.01)  # the worker sleeps, and is woken on the CPU of its caller
            apart += native.program.apart(native.runtime.api, native.runtime.pool)
        return apart >= 20 and all(os.sched_getaffinity(task) == set(allowed) for task in tasks())

    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(busy.pid, allowed[1:])
        assert in_child(work) == 0
    finally:
        busy.kill()
        busy.wait()


def test_more_items_than_32_bits(native: Native) -> None:
    for items in (1 << 31, (1 << 33) + 12345, (1 << 40) + 1):
        assert native.program.count_items(native.runtime.api, native.runtime.pool, items) == items


def test_a_nested_region_runs_serially(native: Native) -> None:
    for threads in (2, 5):
        assert native.region(threads, 40, depth=1) > 0


def test_regions_from_eight_python_threads(native: Native) -> None:
    def work(number: int) -> None:
        bad = ctypes.c_int()
        native.program.many_regions(native.runtime.api, native.runtime.pool, 1 + number % 4, 400, ctypes.byref(bad))
        assert bad.value == 0
        for round_ in range(20):
            assert native.region(3, 10 + round_, depth=round_ % 2) > 0

    in_threads(8, work)


def test_without_spinning(native: Native) -> None:
    library, pool = native.runtime.library, native.runtime.pool
    library.ox_pool_set_spin(pool, 0)
    try:
        for _ in range(200):
            assert native.region(3, 20) > 0
    finally:
        library.ox_pool_set_spin(pool, 50_000)


def test_a_small_region_wakes_nobody_unless_many_follow(native: Native) -> None:
    library, pool, api = native.runtime.library, native.runtime.pool, native.runtime.api
    small = native.program.try_small

    def together(behind: int) -> int:
        before = library.ox_pool_regions(pool)
        assert small(api, pool, 2, 20, behind) > 0
        return int(library.ox_pool_regions(pool)) - before

    def alone() -> bool:
        time.sleep(0.005)  # the last one is long ago
        return bool(small(api, pool, 2, 20, 0) == 1)

    library.ox_pool_set_spin(pool, 0)
    try:
        assert any(alone() for _ in range(1000))  # as soon as the workers of other tests sleep
        assert all(together(0) == 0 for _ in range(100))  # without spinning, none would be awake for the next
        library.ox_pool_set_spin(pool, 1_000_000_000)
        assert any(together(0) for _ in range(1000))  # they come fast
        assert any(together(1) == 2 for _ in range(1000))  # a worker waits for work behind the region before
    finally:
        library.ox_pool_set_spin(pool, 50_000)


def test_a_stopped_pool_starts_again(native: Native) -> None:
    library, pool = native.runtime.library, native.runtime.pool
    for _ in range(20):
        assert native.region(4, 100) > 0
        assert library.ox_pool_workers(pool) >= 3
        library.ox_pool_stop(pool)
        assert library.ox_pool_workers(pool) == 0


# ---------------------------------------------------------------- fork and exit


def test_a_forked_child_starts_workers_anew(native: Native) -> None:
    assert native.region(3, 100) > 0

    def work() -> bool:
        library, pool = native.runtime.library, native.runtime.pool
        fresh = library.ox_pool_workers(pool) == 0
        together = native.program.meet(native.runtime.api, pool, 3)
        return bool(fresh and together and library.ox_pool_workers(pool) >= 2)

    for _ in range(5):
        assert in_child(work) == 0
    assert native.region(3, 100) > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking with threads is what is tested
def test_fork_while_other_threads_run_models(native: Native) -> None:
    model, stop = native.model("own_arena"), threading.Event()

    def work(number: int) -> None:
        if number:
            while not stop.is_set():
                assert native.call(model, [4096, 1000])[0] == 0
            return
        try:
            for _ in range(10):
                assert in_child(lambda: native.region(2, 50) > 0 and native.call(model, [4096, 0])[0] == 0) == 0
        finally:
            stop.set()

    in_threads(4, work)
    native.runtime.library.ox_model_free(model)


def test_the_process_exits_with_workers_about(tmp_path: Path) -> None:
    script = """
import ctypes, sys
from onnxc.runtime.cache import Cache
from onnxc.runtime.library import load_runtime
runtime = load_runtime(Cache(sys.argv[1]))
body = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_int)
seen = []
call = body(lambda arg, first, last, worker: seen.extend(range(first, last)))
runtime.library.ox_parallel(runtime.pool, 4, 10, ctypes.cast(call, ctypes.c_void_p), None)
assert sorted(seen) == list(range(10)), seen
"""
    root = str(Path(__file__).parent.parent)
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "cache")],
            env={**os.environ, "PYTHONPATH": root},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------- calls, arenas, errors


def test_concurrent_calls_have_arenas_of_their_own(native: Native) -> None:
    model = native.model("own_arena")

    def work(number: int) -> None:
        for size in (512, 100_000, 3 << 20):
            for _ in range(5):
                code, error, _ = native.call(model, [size, 100_000])
                assert (code, error.node) == (0, 0)

    in_threads(8, work)
    library = native.runtime.library
    assert library.ox_model_idle_bytes(model) >= 3 << 20
    library.ox_model_trim(model, 0)
    assert library.ox_model_idle_bytes(model) == 0
    library.ox_model_free(model)


def test_an_arena_is_used_again_and_given_up(native: Native) -> None:
    model, idle = native.model("own_arena"), native.runtime.library.ox_model_idle_bytes
    first = native.call(model, [64 << 10, 0])[2]
    assert native.call(model, [64 << 10, 0])[2] == first
    assert native.call(model, [32 << 10, 0])[2] == first
    assert native.call(model, [64 << 20, 0])[0] == 0
    assert idle(model) >= 64 << 20
    for _ in range(600):  # two windows without a large call
        assert native.call(model, [64 << 10, 0])[0] == 0
    assert 64 << 10 <= idle(model) < 4 << 20
    native.runtime.library.ox_model_free(model)


def test_arenas_of_a_busy_moment_are_given_up(native: Native) -> None:
    model = native.model("own_arena")
    in_threads(6, lambda number: [native.call(model, [100_000, 5_000_000]) for _ in range(5)] and None)
    for _ in range(600):
        native.call(model, [100_000, 0])
    assert 100_000 <= native.runtime.library.ox_model_idle_bytes(model) < 200_000
    native.runtime.library.ox_model_free(model)


def test_poison(native: Native) -> None:
    model = native.model("poisoned", flags=POISON)
    for size in (100, 5000, 3 << 20, 100):
        assert native.call(model, [size])[2] == 2 * size
    native.runtime.library.ox_model_free(model)


def test_the_first_error_wins(native: Native) -> None:
    model = native.model("failing")
    for threads in (1, 2, 4):
        code, error, _ = native.call(model, [], threads)
        assert (code, error.code, error.node, error.value % 10) == (3, 3, 17, 3)
    native.runtime.library.ox_model_free(model)


def test_a_code_without_a_report(native: Native) -> None:
    model = native.model("plain_code")
    code, error, _ = native.call(model, [])
    assert (code, error.code, error.node) == (42, 42, -1)
    native.runtime.library.ox_model_free(model)


@pytest.mark.parametrize(("size", "code"), [(1 << 20, 2), (-5, 2), (1 << 62, 2)])
def test_the_limit(native: Native, size: int, code: int) -> None:
    model = native.model("own_arena", limit=1 << 19)
    got, error, _ = native.call(model, [size, 0])
    assert (got, error.code, error.value) == (code, code, size)
    assert native.call(model, [1 << 19, 0])[0] == 0
    native.runtime.library.ox_model_free(model)


def test_memory_that_is_not_to_be_had(native: Native) -> None:
    for program in ("own_arena", "takes_much"):
        model = native.model(program)
        for size in (1 << 62, (1 << 63) - 200):
            code, error, _ = native.call(model, [size, 0])
            assert (code, error.value) == (1, size)
        native.runtime.library.ox_model_free(model)


def test_blocks_taken_and_the_user_pointer(native: Native) -> None:
    user = (ctypes.c_longlong * 1)(4711)
    model = native.model("takes_much", user=user)
    for size in (0, 1, 1000, 1 << 21):
        assert native.call(model, [size])[::2] == (0, 4711)
    native.runtime.library.ox_model_free(model)


def test_alloc_and_release(native: Native) -> None:
    library = native.runtime.library
    for size in (0, 1, 64, 1 << 21, 10 << 20):
        block = library.ox_alloc(size)
        assert block and block % 64 == 0
        ctypes.memset(block, 1, size)
        library.ox_release(block)
    library.ox_release(None)
    assert library.ox_alloc(-1) is None
    assert library.ox_alloc(1 << 60) is None


def test_denormals_whatever_the_caller_has_set(native: Native) -> None:
    out = (ctypes.c_float * 2)()
    buffers = (ctypes.c_void_p * 1)(ctypes.addressof(out))
    model = native.model("denormals")
    call = ctypes.cast(native.runtime.library.ox_call, ctypes.c_void_p)
    assert native.program.flushed(call, model, buffers), "the caller's own setting comes back"
    assert all(0 < value < 1e-38 for value in out)
    native.runtime.library.ox_model_free(model)


def test_the_model_class(native: Native) -> None:
    answer = ctypes.c_longlong()
    buffers = (ctypes.c_void_p * 1)(ctypes.addressof(answer))
    model = NativeModel(native.runtime, native.program, "takes_much", [4711], poison=True)
    assert model.call(1, buffers, (ctypes.c_longlong * 1)(10)) is None
    assert answer.value == 4711
    failing = NativeModel(native.runtime, native.program, "failing")
    error = failing.call(2, None, None)
    assert error is not None
    exception = call_exception(error, "n17 Gather")
    assert isinstance(exception, RunError)
    assert str(exception) == f"the index {error.value} is out of bounds [node n17 Gather]"
    limited = NativeModel(native.runtime, native.program, "own_arena", limit=1000)
    error = limited.call(1, buffers, (ctypes.c_longlong * 2)(1001, 0))
    assert error is not None
    assert isinstance(call_exception(error), LimitError)
    assert limited.call(1, buffers, (ctypes.c_longlong * 2)(1000, 0)) is None
    assert limited.idle_bytes == 1000
    limited.trim()
    assert limited.idle_bytes == 0
    limited.close()
    assert isinstance(call_exception(CallError(1, 42, -1, 0)), InternalError)
    with pytest.raises(PackageError, match="no entry 'nothing'"):
        NativeModel(native.runtime, native.program, "nothing")


def test_the_source_is_also_c11(tmp_path: Path) -> None:
    compiler = "gcc"
    if subprocess.run([compiler, "--version"], capture_output=True, check=False).returncode:
        pytest.skip("no C compiler")
    command = [compiler, "-std=c11", "-pedantic-errors", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    subprocess.run([*command, str(NATIVE / "runtime.c"), "-o", str(tmp_path / "c.so")], check=True)


def test_the_runtime_comes_from_the_cache(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    first = runtime_code(cache)
    assert cache.size() >= len(first)
    assert runtime_code(cache) == first


# ---------------------------------------------------------------- sanitizers

SANITIZED = r"""
#include "runtime.c"
#include <stdio.h>
static int bad;
static void body(void *p, ox_i64 first, ox_i64 last, int worker) {
  int *seen = (int *)p;
  (void)worker;
  for (ox_i64 i = first; i < last; i++) seen[i]++;
  if (first == 3) ox_parallel(ox_pool_get(), 2, 3, body, (int[8]){0});
}
static int entry(ox_ctx *ctx, void *const *buffers, const ox_i64 *dims) {
  (void)buffers;
  char *arena = ctx->api->arena(ctx, dims[0]);
  char *block = (char *)ctx->api->take(ctx, 100);
  memset(arena, 1, (size_t)dims[0]);
  block[0] = arena[0];
  return ctx->api->fail(ctx, dims[0] % 3 ? 0 : OX_ERR_INDEX, 1, 2), OX_OK;
}
static ox_model *model;
static void *caller(void *arg) {
  for (int r = 0; r < 300; r++) {
    int seen[100] = {0};
    int n = (r * 7 + *(int *)arg) % 100;
    ox_parallel(ox_pool_get(), 1 + r % 5, n, body, seen);
    for (int i = 0; i < 100; i++) if (seen[i] != (i < n)) __atomic_fetch_add(&bad, 1, __ATOMIC_RELAXED);
    ox_i64 dims[1] = {r == 50 ? 4000000 : 1000 + r};
    ox_call(model, 2, 0, dims, 0);
    if (r % 60 == 0) usleep(300);
  }
  return 0;
}
int main(void) {
  pthread_t threads[5];
  int numbers[5] = {0, 1, 2, 3, 4};
  model = ox_model_new(entry, 0, 0, 0);
  for (int i = 0; i < 5; i++) pthread_create(&threads[i], 0, caller, &numbers[i]);
  for (int i = 0; i < 5; i++) pthread_join(threads[i], 0);
  ox_model_free(model);
  ox_pool_stop(ox_pool_get());
  printf("bad %d\n", bad);
  return bad != 0;
}
"""


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
@pytest.mark.parametrize("system", ["futex", "portable"])
def test_under_sanitizers(tmp_path: Path, sanitizer: str, system: str) -> None:
    """Data races, leaks and undefined behaviour; also of the code for systems without a futex."""
    source = (NATIVE / "runtime.c").read_text()
    if system == "portable":
        source = source.replace("#ifdef __linux__", "#ifdef no_such_system")
    (tmp_path / "runtime.c").write_text(source)
    (tmp_path / "main.c").write_text(SANITIZED)
    command = [
        "gcc",
        "-O1",
        "-g",
        f"-fsanitize={sanitizer}",
        "-fno-sanitize-recover=undefined",
        f"-I{NATIVE}",
    ]
    program = str(tmp_path / "program")
    built = subprocess.run(
        [*command, str(tmp_path / "main.c"), "-o", program, "-lpthread"],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        pytest.skip(f"no sanitizer here: {built.stderr[:200]}")
    done = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not run on this kernel")
    assert (done.returncode, done.stderr) == (0, "")
