"""Which CPU this is, and which CPU a program is compiled for.

A *level* is a name that a user gives as ``cpu=``: ``native`` (this machine), or a level that several
machines share. It decides the compiler's flags, the vector length of the generated code and the features
that a machine must have to run it.

>>> level("x86-64-v3").vector_length
8
>>> sorted(level("x86-64-v4").features - level("x86-64-v3").features)
['avx512bw', 'avx512cd', 'avx512dq', 'avx512f', 'avx512vl']
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from onnxc.errors import CpuError


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Features by the names of /proc/cpuinfo, except where a clearer name exists (pni is SSE3, abm is LZCNT).
_RENAMED = {"pni": "sse3", "abm": "lzcnt"}

_X86_V1 = _words("fxsr sse sse2")
_X86_V2 = _X86_V1 | _words("sse3 ssse3 sse4_1 sse4_2 popcnt cx16 lahf_lm")
_X86_V3 = _X86_V2 | _words("avx avx2 bmi1 bmi2 f16c fma lzcnt movbe xsave")
_X86_V4 = _X86_V3 | _words("avx512f avx512bw avx512cd avx512dq avx512vl")
# What a compiler may use by itself, or kernels ask for, above the levels. A feature that is not in this list
# never makes a saved program refuse a machine.
_X86_EXTRA = _words(
    """
    adx aes vaes pclmulqdq vpclmulqdq gfni sha_ni fma4 xop sse4a rdrand rdseed avx_vnni avx_vnni_int8
    avx_vnni_int16 avx_ne_convert avx_ifma avx512ifma avx512vbmi avx512_vbmi2 avx512_vnni avx512_bitalg
    avx512_vpopcntdq avx512_bf16 avx512_fp16 avx512_vp2intersect amx_tile amx_int8 amx_bf16 amx_fp16
    """
)
_ARM_V8 = _words("fp asimd")
_ARM_V82 = _ARM_V8 | _words("crc32 atomics asimdrdm fphp asimdhp asimddp")
_ARM_EXTRA = _words("aes pmull sha1 sha2 fcma jscvt sve sve2 i8mm bf16 asimdfhm")
_KNOWN = _X86_V4 | _X86_EXTRA | _ARM_V82 | _ARM_EXTRA


@dataclass(frozen=True)
class Level:
    """What a program is compiled for.

    Attributes:
        name: as the user gave it.
        machine: the instruction set, as ``platform.machine()`` names it: ``x86_64`` or ``aarch64``.
        flags: for the compiler.
        vector_length: lanes of a vector in generated code (ONNXC_VL): 16, 8 or 4, whatever the type.
        features: what a machine must have, by the names of :func:`machine_features`.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    vector_length: int
    features: frozenset[str]


_WIDE = "-mprefer-vector-width=512"
# Products in tiles of 6 rows by 64 columns (matmul.h): on Cascade Lake, models take 0.87 to 1.02 of the time. Not
# measured on AMD's cores, for which 12 rows by 32 were chosen: they read less of the second-level cache.
_BROAD = "-DONNXC_BROAD_TILES"
# Intel's cores from Skylake to Comet Lake do not keep decoded instructions of 32 bytes that a jump ends or crosses
# ("jump conditional code erratum"): loops of products lost 1 to 10 % where one happened to lie so.
JUMPS_APART = "-mbranches-within-32B-boundaries"
_JUMPS_MATTER = (78, 85, 94, 142, 158, 165, 166)  # models of family 6
_LEVELS = {
    "x86-64": Level("x86-64", "x86_64", ("-march=x86-64",), 4, _X86_V1),
    "x86-64-v2": Level("x86-64-v2", "x86_64", ("-march=x86-64-v2",), 4, _X86_V2),
    "x86-64-v3": Level("x86-64-v3", "x86_64", ("-march=x86-64-v3",), 8, _X86_V3),
    "x86-64-v4": Level("x86-64-v4", "x86_64", ("-march=x86-64-v4", _WIDE), 16, _X86_V4),
    "armv8-a": Level("armv8-a", "aarch64", ("-march=armv8-a",), 4, _ARM_V8),
    "armv8.2-a": Level("armv8.2-a", "aarch64", ("-march=armv8.2-a+fp16+dotprod",), 4, _ARM_V82),
}

_ALSO = {"x86-64-v3": "AVX2", "x86-64-v4": "AVX-512"}  # what users call levels


def level_names() -> tuple[str, ...]:
    """All names that :func:`level` knows."""
    return ("native", *_LEVELS)


def level(name: str = "native") -> Level:
    """The level of that name.

    Raises:
        CpuError: for an unknown name, or one of another instruction set than this machine's.
    """
    if name == "native":
        return _native()
    if name not in _LEVELS:
        known = ", ".join(f"{n} ({_ALSO[n]})" if n in _ALSO else n for n in level_names())
        raise CpuError(f"unknown CPU level {name!r}; known are {known}")
    found = _LEVELS[name]
    if found.machine != machine():
        raise CpuError(f"CPU level {name!r} is for {found.machine}, and the compiler here is for {machine()}")
    return found


def has_byte_products(of: Level) -> bool:
    """True where vectors of the level's length have VNNI: products of bytes, added up by fours."""
    if of.vector_length == 16:
        return {"avx512f", "avx512_vnni"} <= of.features
    return of.vector_length == 8 and ("avx_vnni" in of.features or {"avx512_vnni", "avx512vl"} <= of.features)


def has_matrix_products(of: Level) -> bool:
    """True where matrix registers multiply bytes (AMX) that are packed for vectors of 16 lanes."""
    return of.vector_length == 16 and {"amx_tile", "amx_int8"} <= of.features


def byte_table_cost(of: Level) -> int:
    """Instructions that it takes to look up a vector of bytes in a table of 256: see vbytes.h."""
    if of.vector_length == 16 and {"avx512vbmi", "avx512vl"} <= of.features:
        return 12
    return 16 if of.vector_length == 16 and {"avx512bw", "avx512vl"} <= of.features else 24


def missing_features(features: Iterable[str]) -> list[str]:
    """Those of the features that this machine lacks, sorted."""
    return sorted(set(features) - machine_features())


def check_supported(features: Iterable[str], what: str = "the program") -> None:
    """Check that this machine can run what needs these features.

    Raises:
        CpuError: with the features that are missing.
    """
    missing = missing_features(features)
    if missing:
        raise CpuError(
            f"{what} was compiled for a CPU with {', '.join(missing)}, which this one ({model_name()}) "
            f"lacks; compile it here, or elsewhere with cpu={best_level()!r}"
        )


def best_level() -> str:
    """The highest named level that this machine supports.

    Raises:
        CpuError: on an instruction set that has no named level.
    """
    fitting = [
        entry.name for entry in _LEVELS.values() if entry.machine == machine() and not missing_features(entry.features)
    ]
    if not fitting:
        raise CpuError(f"there is no CPU level for {machine()}: use 'native'")
    return fitting[-1]


@functools.cache
def machine() -> str:
    """The instruction set: ``x86_64``, ``aarch64``, or what else the platform reports."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


@functools.cache
def machine_features() -> frozenset[str]:
    """The features of this machine that matter to compiled code, by their names in /proc/cpuinfo."""
    if sys.platform.startswith("linux"):
        names = _cpuinfo_words("flags") or _cpuinfo_words("Features")
    elif sys.platform == "darwin":
        names = _darwin_features()
    else:
        names = []
    renamed = {_RENAMED.get(name, name) for name in names}
    if machine() == "aarch64":
        renamed |= _ARM_V8  # part of the base of the instruction set
    if machine() == "x86_64":
        renamed |= _X86_V1
    return frozenset(renamed & _KNOWN)


@functools.cache
def model_name() -> str:
    """The CPU's name for people."""
    words = _cpuinfo_words("model name") if sys.platform.startswith("linux") else []
    return " ".join(words) or platform.processor() or machine()


@functools.cache
def available_cpus() -> int:
    """CPUs that this process may use: its affinity, and the CPU quota of its control group."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        count = os.cpu_count() or 1
    return max(1, min(count, _cgroup_cpus(Path("/sys/fs/cgroup/cpu.max"))))


@functools.cache
def memory_bytes() -> int:
    """Bytes of memory that this process may use: the machine's, or its control group's where that is less."""
    try:
        machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not told: no limit of ours
        machine_bytes = sys.maxsize
    group = _read(Path("/sys/fs/cgroup/memory.max"))
    return min(machine_bytes, int(group)) if group.isdigit() and int(group) else machine_bytes


def available_bytes() -> int:
    """Bytes of memory, swap included, that are left: where a process writes to more, the system ends it."""
    machine, group = _table(Path("/proc/meminfo")), _table(Path("/sys/fs/cgroup/memory.stat"))
    left = memory_bytes()
    if "MemAvailable" in machine:
        left = min(left, (machine["MemAvailable"] + machine.get("SwapFree", 0)) << 10)
    most, used = (_read(Path("/sys/fs/cgroup", name)) for name in ("memory.max", "memory.current"))
    if most.isdigit() and used.isdigit():  # files that were read are let go
        left = min(left, max(int(most) - int(used) + group.get("inactive_file", 0), 0))
    return left


def _table(path: Path) -> dict[str, int]:
    """The numbers of a file of the system, by the word before them."""
    rows = [line.split() for line in _read(path).splitlines()]
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


@functools.cache
def cache_bytes(index: int) -> int:
    """Bytes of the data cache of level `index` (1 to 3) that the first CPU sees; 0 where it is not known.

    A cache that several CPUs share counts in full.
    """
    base = Path("/sys/devices/system/cpu/cpu0/cache")
    for entry in sorted(base.glob("index*")) if base.is_dir() else []:
        if _read(entry / "level") == str(index) and _read(entry / "type") in ("Data", "Unified"):
            size = _read(entry / "size")
            unit = {"K": 1 << 10, "M": 1 << 20}.get(size[-1:], 1)
            digits = size.rstrip("KM")
            return int(digits) * unit if digits.isdigit() else 0
    return 0


def _native() -> Level:
    features = machine_features()
    if machine() == "x86_64":
        # A compiler older than the CPU still finds its features by CPUID: only the tuning is another's.
        wide = features >= _X86_V4
        flags = ("-march=native", *([_WIDE] if wide else []), *_intel_flags(wide))
        return Level("native", "x86_64", flags, 16 if wide else 8 if {"avx", "avx2"} <= features else 4, features)
    flag = "-mcpu=native" if machine() == "aarch64" else "-march=native"
    return Level("native", machine(), (flag,), 4, features)


def _intel_flags(wide: bool) -> tuple[str, ...]:
    """What suits this CPU, if it is Intel's; `wide`: with vectors of 512 bits."""
    if _cpuinfo_words("vendor_id") != ["GenuineIntel"]:
        return ()
    model = _cpuinfo_words("model")
    jumps = _cpuinfo_words("cpu family") == ["6"] and model in [[str(m)] for m in _JUMPS_MATTER]
    return (*([_BROAD] if wide else []), *([JUMPS_APART] if jumps else []))


def _cpuinfo_words(field: str) -> list[str]:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.split()
    return []


def _darwin_features() -> list[str]:
    if machine() == "aarch64":
        return sorted(_ARM_V82)  # every Apple CPU that runs macOS has these
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.features", "machdep.cpu.leaf7_features"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    names = {"avx1.0": "avx", "sse4.1": "sse4_1", "sse4.2": "sse4_2"}
    found = [names.get(word, word) for word in text.lower().split()]
    # sysctl leaves out of its list what every CPU with AVX2 has.
    return found + (sorted(_X86_V3) if "avx2" in found else [])


def _cgroup_cpus(path: Path) -> int:
    quota, _, period = _read(path).partition(" ")
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return sys.maxsize
    return max(1, -(-int(quota) // int(period)))


def _read(path: Path) -> str:
    """The start of a file of the system. One read: all of /proc/cpuinfo takes long with many CPUs."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(1 << 14).decode("ascii", "replace").strip()
    except OSError:
        return ""
