"""The C++ compiler: found, identified, run, and complained about."""

from __future__ import annotations

import ctypes
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from onnxc.compiler import machine_code
from onnxc.errors import ToolchainError
from onnxc.runtime import toolchain
from onnxc.runtime.cache import Cache
from onnxc.runtime.cpu import level
from onnxc.runtime.package import load_library
from onnxc.runtime.toolchain import Source, compile_library, compile_object, find_compiler

EXPORT = 'extern "C" __attribute__((visibility("default"))) '


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not asked any compiler yet."""
    monkeypatch.setattr(toolchain, "_identified", {})
    toolchain._command.cache_clear()


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary directories go, to see what stays."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# ---------------------------------------------------------------- finding


def test_the_compiler_is_asked_once(forget: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    fake = script(tmp_path / "fake", f"echo $* >> {log}\necho 'fake g++ 99.1'")
    monkeypatch.setenv("CXX", str(fake))
    cache = Cache(tmp_path / "cache")
    first = find_compiler(cache)
    assert (first.kind, first.version, first.command) == ("gcc", "fake g++ 99.1", (str(fake),))
    assert find_compiler(cache) is first
    monkeypatch.setattr(toolchain, "_identified", {})  # another process
    assert find_compiler(cache) == first
    assert log.read_text() == "--version\n"
    script(fake, f"echo $* >> {log}\necho 'fake clang 100'")  # an update
    later = find_compiler(cache)
    assert (later.kind, later.version) == ("clang", "fake clang 100")
    assert later.identity != first.identity


def test_arguments_in_cxx(forget: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = script(tmp_path / "fake", "echo fake 1")
    monkeypatch.setenv("CXX", f"{fake} -m64 '-DA=b c'")
    with_arguments = find_compiler()
    assert with_arguments.command == (str(fake), "-m64", "-DA=b c")
    monkeypatch.setenv("CXX", str(fake))
    assert find_compiler().identity != with_arguments.identity
    monkeypatch.chdir(tmp_path)  # a compile runs elsewhere
    monkeypatch.setenv("CXX", f"./{fake.name}")
    assert find_compiler().command == (str(fake),)


def test_no_compiler(forget: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"no C\+\+ compiler .*install .*CXX"):
        find_compiler()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolchainError, match="'no-such-compiler', which is not a program"):
        find_compiler()
    monkeypatch.setenv("CXX", "g++ '-DA")
    with pytest.raises(ToolchainError, match="no command: No closing quotation"):
        find_compiler()


def test_a_compiler_that_does_not_work(forget: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(script(tmp_path / "broken", "echo sorry >&2; exit 1")))
    with pytest.raises(ToolchainError, match=r"--version fails \(exit status 1\): sorry"):
        find_compiler()


def test_a_damaged_cache_entry_is_no_matter(forget: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path)
    first = find_compiler(cache)
    for _, _, path in cache._list():
        for junk in (b"", b"\xff\x00", b'["gcc"]', b"[" * 100_000, b"[1, 2]"):
            Path(path).write_bytes(junk)
            monkeypatch.setattr(toolchain, "_identified", {})
            assert find_compiler(cache) == first


# ---------------------------------------------------------------- compiling


def test_no_place_for_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(ToolchainError, match="cannot write the sources"):
        compile_library([Source("one.cpp", "")])


def test_one_source(scratch: Path) -> None:
    source = Source("one.cpp", EXPORT + "int f(int x) { return x + VALUE; }", ("-DVALUE=41",))
    assert load_library(compile_library([source])).f(1) == 42
    assert list(scratch.iterdir()) == [], "no temporary file stays"


def test_several_sources_and_a_header() -> None:
    text = '#include "common.h"\nint k{0}() {{ return N * STEP; }}'
    sources = [Source(f"k{n}.cpp", text.format(n), (f"-DN={n}",)) for n in range(5)]
    main = Source("main.cpp", EXPORT + "int f() { return " + " + ".join(f"k{n}()" for n in range(5)) + "; }")
    header = "#define STEP 10\n" + "\n".join(f"int k{n}();" for n in range(5))
    main = Source("main.cpp", '#include "common.h"\n' + main.text)
    for jobs in (1, 3):
        code = compile_library([*sources, main], headers={"common.h": header}, jobs=jobs)
        assert load_library(code).f() == 100


def test_many_reads_by_index_have_flags_of_their_own() -> None:
    gathers, gcc = "const vl d = ox_indices<i64>(ctx, t, 80, (int)lanes);", find_compiler()
    assert not machine_code._own_flags(gathers, gcc)
    flags = machine_code._own_flags(gathers * 100, gcc)
    assert bool(flags) == (gcc.kind == "gcc")
    assert load_library(compile_library([Source("one.cpp", EXPORT + "int f() { return 3; }", flags)])).f() == 3


APART = """#pragma once
template <class T> __attribute__((noinline)) T two(T x) { return 2 * x; }
template <class T> __attribute__((noinline)) T ten(T x) { return 10 * x; }
#ifdef ONNXC_APART
ONNXC_APART int two<int>(int);
ONNXC_APART int ten<int>(int);
#endif
"""


def test_what_programs_share_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of it, a library has what its program uses. A damaged object in the cache is compiled again."""
    made = []

    def counted(source: Source, **options: Any) -> bytes:
        made.append(source.text)
        return compile_object(source, **options)

    (tmp_path / "apart.h").write_text(APART)
    (tmp_path / "user.h").write_text('#include "apart.h"\n')
    monkeypatch.setattr(machine_code, "compile_object", counted)
    monkeypatch.setattr(machine_code, "INCLUDE", tmp_path)
    monkeypatch.setattr(machine_code, "APART", ("apart.h", "other.h"))
    cache = Cache(tmp_path / "cache")
    headers = ("apart.h", "apart.h", "user.h")  # by another header, too
    texts = [f'#include "{name}"\n{EXPORT}int f(int x) {{ return two(x) + {k}; }}' for k, name in enumerate(headers)]
    for k, text in enumerate(texts):
        if k != 1:  # as in a process of its own
            monkeypatch.setattr(machine_code, "_objects", {})
        code = machine_code.MachineCode(cache).library([text], level())
        assert load_library(code).f(20) == 40 + k
        assert b"3twoIiE" in code and b"3tenIiE" not in code
        assert made == ['#define ONNXC_APART template\n#include "apart.h"\n'] * (1 if k < 2 else 2)
        for entry in (tmp_path / "cache").glob("v1/*/*") if k == 1 else ():
            entry.write_bytes(entry.read_bytes()[:-1])


def test_a_header_of_parts_above_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its object has its own parts alone."""
    (tmp_path / "apart.h").write_text(APART)
    more = "template <class T> T three(T x) { return x + two(x); }\nONNXC_APART int three<int>(int);\n"
    (tmp_path / "above.h").write_text(f'#pragma once\n#include "apart.h"\n#ifdef ONNXC_APART\n{more}#endif\n')
    monkeypatch.setattr(machine_code, "INCLUDE", tmp_path)
    monkeypatch.setattr(machine_code, "APART", ("apart.h", "above.h"))
    made = []
    monkeypatch.setattr(machine_code, "compile_object", lambda s, **o: made.append(compile_object(s, **o)) or made[-1])
    monkeypatch.setattr(machine_code, "_objects", {})
    text = f'#include "above.h"\n{EXPORT}int f(int x) {{ return three(x); }}'
    assert load_library(machine_code.MachineCode().library([text], level())).f(20) == 60
    assert [b"_Z5threeIiET_S0_" in code for code in made].count(True) == 1
    assert [b"_Z3tenIiET_S0_" in code for code in made].count(True) == 1


def test_the_same_source_gives_the_same_bytes() -> None:
    source = Source("one.cpp", EXPORT + "int f(int x) { return x; }")
    assert compile_library([source]) == compile_library([source])


def test_what_a_kernel_may_need_is_linked() -> None:
    """Library calls that a compiler makes of plain code: memory functions, libm, libgcc."""
    text = """
    double expm1(double); float fmaf(float, float, float);
    """.replace("double expm1", 'extern "C" double expm1').replace("; float", '; extern "C" float')
    text += (
        EXPORT
        + """double f(const double *p, int n, char *to, long long m) {
      double a[512]; __builtin_memset(to, 7, m); __builtin_memcpy(a, p, sizeof a);
      __int128 big = (__int128)m * 1000003 * m; big = big / n;
      _Float16 h = (_Float16)a[1]; __asm__("" : "+x"(h));
      return expm1(a[0]) + fmaf((float)n, 2, 1) + (double)(long long)big + (double)(float)h;
    }"""
    )
    library = load_library(compile_library([Source("needs.cpp", text)]))
    library.f.restype = ctypes.c_double
    values, to = (ctypes.c_double * 512)(0.0, 0.5), (ctypes.c_char * 9)()
    assert library.f(values, 3, to, ctypes.c_longlong(9)) == 0 + 7 + 81 * 1000003 // 3 + 0.5
    assert to.raw == b"\x07" * 9


def test_an_error_in_a_source(scratch: Path) -> None:
    good = Source("good.cpp", "int g() { return 1; }")
    bad = Source("bad.cpp", "int f() {\n  return undeclared;\n}")
    for sources in ([bad], [good, bad]):
        with pytest.raises(ToolchainError) as caught:
            compile_library(sources)
        assert "bad.cpp:2" in str(caught.value)
        assert "undeclared" in str(caught.value)
        assert str(scratch) not in str(caught.value)
    assert list(scratch.iterdir()) == []


def test_an_error_at_link_time() -> None:
    source = Source("one.cpp", EXPORT + "int f() { return 1; }")
    with pytest.raises(ToolchainError, match="no_such_library"):
        compile_library([source], link_flags=["-lno_such_library"])


@pytest.mark.parametrize("count", [1, 3])
def test_out_of_time(count: int, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"
    hang = f'case "$1" in --version) echo slow 1;; *) sleep 300 & echo $! >> {pids}; wait;; esac'
    monkeypatch.setenv("CXX", str(script(tmp_path / "slow", hang)))
    compiler = find_compiler()
    start = time.monotonic()
    with pytest.raises(ToolchainError, match="out of time"):
        compile_library([Source(f"s{n}.cpp", "") for n in range(count)], compiler=compiler, timeout=0.5, jobs=2)
    assert time.monotonic() - start < 30
    for pid in pids.read_text().split():  # the compiler's own children ended with it
        deadline = time.monotonic() + 20
        while running(int(pid)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not running(int(pid))
    assert list(scratch.iterdir()) == []


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_a_compiler_that_floods_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flood = 'case "$1" in --version) echo loud 1;; *) yes complaint | head -c 3000000; exit 3;; esac'
    monkeypatch.setenv("CXX", str(script(tmp_path / "loud", flood)))
    with pytest.raises(ToolchainError, match="exit status 3") as caught:
        compile_library([Source("a.cpp", "")], compiler=find_compiler())
    assert len(str(caught.value)) < 7000


@pytest.mark.parametrize("name", ["", "a", "../a.cpp", "a b.cpp", "-o.cpp", "a.so", "a.cpp\n", "é.cpp"])
def test_source_names_are_ours(name: str) -> None:
    with pytest.raises(ValueError, match="not a source file name"):
        Source(name, "")


def test_sources_have_names_of_their_own() -> None:
    for sources in ([], [Source("a.cpp", ""), Source("a.cpp", "")]):
        with pytest.raises(ValueError, match="names of their own"):
            compile_library(sources)


def test_the_temporary_directory_is_private(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = f'case "$1" in --version) echo look 1;; *) stat -c %a . > {tmp_path}/mode; exit 1;; esac'
    monkeypatch.setenv("CXX", str(script(tmp_path / "look", look)))
    with pytest.raises(ToolchainError):
        compile_library([Source("a.cpp", "")], compiler=find_compiler())
    assert (tmp_path / "mode").read_text() == "700\n"
    assert os.listdir(scratch) == []


def test_folders_of_killed_compiles_are_removed_later(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are so old that no compile can be in them; nothing else, and what a link leads to least of all."""
    for name in ("onnxc-compile-old", "onnxc-compile-new", "other"):
        (scratch / name).mkdir()
        (scratch / name / "a.cpp").touch()
    (scratch / "onnxc-compile-link").symlink_to(scratch / "other")
    for name in ("onnxc-compile-old", "onnxc-compile-link", "other"):
        os.utime(scratch / name, (0, 0), follow_symlinks=False)
    compile_library([Source("one.cpp", EXPORT + "int one() { return 1; }")])
    assert sorted(os.listdir(scratch)) == ["onnxc-compile-link", "onnxc-compile-new", "other"]
    assert (scratch / "other" / "a.cpp").exists()
