"""CPU levels: what they need, and what they compile to."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest

from onnxc.errors import CpuError
from onnxc.runtime import cpu
from onnxc.runtime.package import load_library
from onnxc.runtime.toolchain import Source, compile_library, find_compiler

X86 = ["x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4"]
on_x86 = pytest.mark.skipif(cpu.machine() != "x86_64", reason="x86 levels need an x86 compiler")


def set_machine(monkeypatch: pytest.MonkeyPatch, machine: str, features: set[str]) -> None:
    monkeypatch.setattr(cpu, "machine", lambda: machine)
    monkeypatch.setattr(cpu, "machine_features", lambda: frozenset(features))


def test_native_runs_here() -> None:
    native = cpu.level("native")
    assert cpu.level() == native
    assert native.features <= cpu.machine_features()
    cpu.check_supported(native.features)
    assert cpu.level(cpu.best_level()).features <= cpu.machine_features()


@on_x86
def test_x86_levels_grow() -> None:
    levels = [cpu.level(name) for name in X86]
    assert [level.vector_length for level in levels] == [4, 4, 8, 16]
    for lower, higher in itertools.pairwise(levels):
        assert lower.features < higher.features
    assert "fma" in cpu.level("x86-64-v3").features


def test_unknown_and_foreign_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CpuError, match=r"level 'z80'; known are native, x86-64, .*x86-64-v3 \(AVX2\), .*armv8-a"):
        cpu.level("z80")
    set_machine(monkeypatch, "x86_64", set())
    with pytest.raises(CpuError, match="'armv8-a' is for aarch64"):
        cpu.level("armv8-a")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, "x86_64", set(cpu._X86_V3))
    assert cpu.missing_features(cpu.level("x86-64-v4").features)[0] == "avx512bw"
    with pytest.raises(CpuError, match=r"with avx512bw, .*avx512vl, which this one .*cpu='x86-64-v3'"):
        cpu.check_supported(cpu.level("x86-64-v4").features)
    cpu.check_supported(cpu.level("x86-64-v2").features)


@pytest.mark.parametrize(
    ("features", "length", "flags"),
    [
        (cpu._X86_V1, 4, ("-march=native",)),
        (cpu._X86_V3 - {"avx2"}, 4, ("-march=native",)),
        (cpu._X86_V3, 8, ("-march=native",)),
        (cpu._X86_V3 | {"avx512f"}, 8, ("-march=native",)),  # a first AVX-512 without BW, DQ and VL
        (cpu._X86_V4, 16, ("-march=native", "-mprefer-vector-width=512")),
    ],
)
def test_native_on_other_machines(
    monkeypatch: pytest.MonkeyPatch, features: frozenset[str], length: int, flags: tuple[str, ...]
) -> None:
    set_machine(monkeypatch, "x86_64", set(features))
    monkeypatch.setattr(cpu, "_read", lambda path: "vendor_id\t: AuthenticAMD\ncpu family\t: 6\nmodel\t\t: 85")
    level = cpu.level("native")
    assert (level.vector_length, level.flags) == (length, flags)


@pytest.mark.parametrize(
    ("features", "model", "flags"),
    [
        (cpu._X86_V4, 85, ("-mprefer-vector-width=512", "-DONNXC_BROAD_TILES", cpu.JUMPS_APART)),
        (cpu._X86_V4, 143, ("-mprefer-vector-width=512", "-DONNXC_BROAD_TILES")),
        (cpu._X86_V3, 158, (cpu.JUMPS_APART,)),
        (cpu._X86_V3, 151, ()),
    ],
)
def test_native_on_cores_of_intel(
    monkeypatch: pytest.MonkeyPatch, features: frozenset[str], model: int, flags: tuple[str, ...]
) -> None:
    set_machine(monkeypatch, "x86_64", set(features))
    monkeypatch.setattr(cpu, "_read", lambda path: f"vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: {model}")
    assert cpu.level("native").flags == ("-march=native", *flags)


def test_native_on_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, "aarch64", set(cpu._ARM_V8))
    assert cpu.level("native").flags == ("-mcpu=native",)
    assert cpu.level("armv8-a").vector_length == 4
    assert cpu.best_level() == "armv8-a"


def test_features_of_cpuinfo(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "processor\t: 0\nmodel name\t: A CPU @ 3 GHz\nflags\t\t: fpu sse sse2 pni abm avx2 nonsense\n"
    monkeypatch.setattr(cpu, "_read", lambda path: text)
    monkeypatch.setattr(cpu, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu.sys, "platform", "linux")
    found = cpu.machine_features.__wrapped__()
    assert found >= {"sse3", "lzcnt", "avx2"}
    assert not found & {"pni", "abm", "nonsense", "fpu"}
    assert cpu.model_name.__wrapped__() == "A CPU @ 3 GHz"


def test_cpu_quota(tmp_path: Path) -> None:
    file = tmp_path / "cpu.max"
    for text, count in [("150000 100000", 2), ("50000 100000", 1), ("200000 100000\n", 2)]:
        file.write_text(text)
        assert cpu._cgroup_cpus(file) == count
    for text in ("max 100000", "", "nonsense", "1 0"):
        file.write_text(text)
        assert cpu._cgroup_cpus(file) > 1000
    assert cpu._cgroup_cpus(tmp_path / "none") > 1000
    assert cpu.available_cpus() >= 1


def test_cache_sizes() -> None:
    for index in (1, 2, 3):
        assert cpu.cache_bytes(index) >= 0


@pytest.mark.parametrize("name", ["native", *X86])
def test_the_compiler_takes_the_flags(name: str) -> None:
    if name != "native" and cpu.machine() != "x86_64":
        pytest.skip("x86 levels need an x86 compiler")
    level = cpu.level(name)
    text = """
    #if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
    #define LENGTH 16
    #elif defined(__AVX2__)
    #define LENGTH 8
    #else
    #define LENGTH 4
    #endif
    typedef float v __attribute__((vector_size(4 * LENGTH)));
    extern "C" __attribute__((visibility("default"))) int length(const float *a, float *b) {
      v x; __builtin_memcpy(&x, a, sizeof x);
      x = x * x + 1;
      __builtin_memcpy(b, &x, sizeof x);
      return LENGTH;
    }
    """
    library = compile_library([Source("length.cpp", text)], flags=level.flags)
    if not cpu.missing_features(level.features):
        import ctypes

        a, b = (ctypes.c_float * 16)(*range(16)), (ctypes.c_float * 16)()
        assert load_library(library).length(a, b) == level.vector_length
        assert b[3] == 10


@on_x86
def test_native_names_each_feature_that_the_compiler_uses() -> None:
    """What -march=native switches on must be in the feature list, or a saved program could hit a bad CPU."""
    command = [*find_compiler().command, "-march=native", "-dM", "-E", "-x", "c++", "/dev/null"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    macros = {line.split()[1].strip("_").lower() for line in text.splitlines() if line.endswith(" 1")}
    names = {
        "bmi": "bmi1",
        "avx512vnni": "avx512_vnni",
        "avx512vbmi2": "avx512_vbmi2",
        "avx512bitalg": "avx512_bitalg",
        "avx512vpopcntdq": "avx512_vpopcntdq",
        "avx512bf16": "avx512_bf16",
        "avx512fp16": "avx512_fp16",
        "avx512vp2intersect": "avx512_vp2intersect",
        "avxvnni": "avx_vnni",
    }
    vector = {names.get(macro, macro) for macro in macros if macro.startswith(("avx", "fma", "f16c", "bmi"))}
    assert vector <= cpu.level("native").features
