"""What this machine can do at most: multiply-adds of float32, and reads from memory.

Measured for a CPU, a vector length and a number of threads, in a tenth of a second, and kept in the cache. Bursts are
short (parts of a millisecond) and the best of many counts, so that a busy machine gives the same figures as an idle
one, as long as it leaves some moments free.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace

from onnxc.errors import CacheError
from onnxc.roofline import Peaks
from onnxc.runtime.cache import Cache, digest
from onnxc.runtime.cpu import available_cpus, cache_bytes, machine_features, memory_bytes, model_name
from onnxc.runtime.library import Runtime, load_runtime

VERSION = 1  # of how it is measured: part of the cache key
SAMPLES = 5  # processes that measure; the cache keeps the best, since any one may have had half a machine
BURSTS = 48
_LIMIT = 0.08  # seconds for all bursts of one kind
CHAINS = 12  # OX_FMA_CHAINS of peaks.h
_LINE = 64
_MOST_THREADS = 256  # OX_MAX_THREADS
_TURNS = 6_000  # of a burst of multiply-adds: some tens of microseconds, then repeated until it is long enough
_LONG = 3e-4  # seconds of a burst
_LEAST, _MOST = 128 << 20, 512 << 20  # bytes of a block that no cache holds much of


def machine_lanes() -> int:
    """Float32 lanes of the widest vectors that this machine has."""
    features = machine_features()
    return 16 if "avx512f" in features else 8 if {"avx2", "fma"} <= features else 4


@functools.cache
def machine_peaks(threads: int | None = None, lanes: int | None = None) -> Peaks:
    """The peaks of this machine: the best that this process and some before it have measured.

    Args:
        threads: that work at once; default: the CPUs that this process may use.
        lanes: of a vector (16, 8 or 4); default, and at most: what the machine has.

    Raises:
        ToolchainError: the runtime must be compiled, and cannot be.
    """
    threads, lanes = min(threads or available_cpus(), _MOST_THREADS), min(lanes or 16, machine_lanes())
    try:
        cache = Cache()
    except CacheError:
        return measure(load_runtime(), threads, lanes)
    key = digest("peaks", VERSION, model_name(), lanes, threads, available_cpus())
    samples, known = _known(cache, key)
    if known is not None and samples >= SAMPLES:
        return known
    found = measure(load_runtime(cache), threads, lanes)
    if known is not None:
        found = replace(found, flops=max(found.flops, known.flops), bandwidth=max(found.bandwidth, known.bandwidth))
    with contextlib.suppress(CacheError):
        cache.put(key, json.dumps([samples + 1, found.to_dict()]).encode())
    return found


def _known(cache: Cache, key: str) -> tuple[int, Peaks | None]:
    """The cache's entry: how often they were measured, and the best."""
    data = cache.read(key)
    try:
        samples, best = json.loads(data or b"")
        return int(samples), Peaks(**best)
    except (ValueError, TypeError):  # none, or a damaged one: measured again
        return 0, None


def measure(runtime: Runtime, threads: int, lanes: int) -> Peaks:
    """The peaks, measured now."""
    turns = _TURNS
    while 0 <= _multiply(runtime, 1, lanes, turns) < _LONG:
        turns *= 2
    flops = 2.0 * CHAINS * lanes * turns
    together = _best(lambda: _multiply(runtime, threads, lanes, turns))
    if math.isinf(together):  # they never worked at the same time: as if each had a CPU of its own
        flops *= min(threads, available_cpus()) / _best(lambda: _multiply(runtime, 1, lanes, turns))
    else:
        flops *= threads / together
    return Peaks(threads, lanes, flops, _bandwidth(runtime, threads, lanes) or _bandwidth(runtime, 1, lanes))


def _multiply(runtime: Runtime, threads: int, lanes: int, turns: int) -> float:
    return float(runtime.library.ox_peak_fma(lanes, threads, turns)) / 1e9


def _bandwidth(runtime: Runtime, threads: int, lanes: int) -> float:
    """Bytes a second, read by all threads together from memory; 0: not known.

    A block much larger than the caches is written from its start to its end. What is read then is its first half,
    part by part, each of them once: none of it is in a cache any more.
    """
    wanted = min(max(8 * cache_bytes(3), _LEAST), _MOST, memory_bytes() // 8)
    share = max(1, wanted // (2 * BURSTS * threads) // _LINE) * _LINE
    part = share * threads
    library = runtime.library
    block = library.ox_alloc(2 * BURSTS * part)
    if not block:
        return 0.0
    try:
        ctypes.memset(block, 1, 2 * BURSTS * part)
        parts = iter(range(block, block + BURSTS * part, part))
        return part / _best(lambda: float(library.ox_peak_read(lanes, threads, next(parts), share, 1)) / 1e9)
    finally:
        library.ox_release(block)


def _best(run: Callable[[], float]) -> float:
    """The least time, in seconds; infinite where no burst succeeded."""
    end = time.perf_counter() + _LIMIT
    best = math.inf
    for _ in range(BURSTS):
        seconds = run()
        if seconds > 0:
            best = min(best, seconds)
        if time.perf_counter() > end:
            break
    return best
