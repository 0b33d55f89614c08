# ruff: noqa: E501  (text of models and scripts)
"""Threads, processes, and machines on which something is missing: what a careless user meets."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxc
from onnxc.errors import CacheError, CpuError, InputError, ModelError, OnnxcError, ToolchainError
from onnxc.runtime import cpu, toolchain
from tests.small_models import parse

TEXT = "(float[N, 64] x, float[64, 96] w) => (float[N, 96] y) { a = MatMul(x, w) b = Gelu(a) y = Softmax<axis=-1>(b) }"
spawn = multiprocessing.get_context("spawn")


def net() -> Any:
    return parse(TEXT, 20)


def inputs(n: int, seed: int = 0) -> tuple[Any, Any]:
    random = np.random.default_rng([n, seed])
    return random.standard_normal((n, 64)).astype(np.float32), random.standard_normal((64, 96)).astype(np.float32) / 8


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_many_threads_many_sizes(threads: int) -> None:
    """Each caller with inputs and sizes of its own, all at once; the number of threads does not change an answer."""
    model = onnxc.compile(net(), threads=threads)
    cases = [(n, s) for n in (1, 7, 64, 300) for s in range(2)]
    model.threads = 1
    wanted = {case: model(*inputs(*case))[0] for case in cases}
    model.threads = threads
    wrong: list[str] = []

    def call(case: tuple[int, int]) -> None:
        try:
            for _ in range(25):
                if not np.array_equal(model(*inputs(*case))[0], wanted[case]):
                    wrong.append(f"other answers for {case}")
        except BaseException as error:
            wrong.append(repr(error))

    callers = [threading.Thread(target=call, args=(case,)) for case in cases]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(120)
    assert not wrong


def test_errors_of_one_thread_are_not_anothers() -> None:
    model = onnxc.compile(parse("(float[5] x, int64[N] i) => (float[N] y) { y = Gather(x, i) }"))
    x = np.arange(5, dtype=np.float32)
    wrong: list[str] = []

    def call(bad: int | None) -> None:
        for _ in range(200):
            index = np.full(9, 3 if bad is None else bad)
            try:
                (y,) = model(x, index)
                if bad is not None or not (y == 3).all():
                    wrong.append(f"{bad} went through")
            except OnnxcError as error:
                if bad is None or str(bad) not in str(error):
                    wrong.append(str(error))

    callers = [threading.Thread(target=call, args=(bad,)) for bad in (None, 7, None, -9, 11)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(120)
    assert not wrong


def test_threads_compile_at_once(fresh_cache: Path) -> None:
    found: list[Any] = []
    callers = [threading.Thread(target=lambda: found.append(onnxc.compile(net())(*inputs(5))[0])) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(120)
    assert len(found) == 4
    assert all(np.array_equal(y, found[0]) for y in found)


# ---------------------------------------------------------------- processes


def compile_and_run(seed: int) -> float:
    return float(onnxc.compile(net())(*inputs(5, seed))[0].sum())


def test_processes_compile_at_once(fresh_cache: Path) -> None:
    with spawn.Pool(3) as pool:
        assert pool.map(compile_and_run, [0, 0, 0]) == pytest.approx([5.0] * 3, rel=1e-5)
    assert not list((fresh_cache / "tmp").iterdir())


@pytest.mark.parametrize("wait", [0.2, 0.5, 0.8, 1.1, 1.5])
def test_killed_at_any_moment(fresh_cache: Path, wait: float) -> None:
    script = "from tests.test_processes import compile_and_run; compile_and_run(0)"
    victim = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    time.sleep(wait)
    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait(60)
    assert compile_and_run(0) == pytest.approx(5.0, rel=1e-5)
    assert compile_and_run(0) == pytest.approx(5.0, rel=1e-5)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_forked_while_others_call() -> None:
    model = onnxc.compile(net(), threads=2)
    want = model(*inputs(64))[0]
    stop = threading.Event()

    def call() -> None:
        while not stop.is_set():
            model(*inputs(64))

    callers = [threading.Thread(target=call) for _ in range(2)]
    for caller in callers:
        caller.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point
            for _ in range(5):
                child = os.fork()
                if child == 0:
                    signal.alarm(30)
                    os._exit(0 if np.array_equal(model(*inputs(64))[0], want) else 1)
                assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        for caller in callers:
            caller.join(60)


# ---------------------------------------------------------------- what is missing


@pytest.mark.parametrize("kind", ["a file", "a link to nowhere", "below a file"])
def test_a_cache_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    path = tmp_path / "cache"
    if kind == "a link to nowhere":
        path.symlink_to(tmp_path / "file" / "deep")
    (tmp_path / "file").write_text("")
    if kind == "a file":
        path.write_text("")
    monkeypatch.setenv("ONNXC_CACHE", str(tmp_path / "file" / "below" if kind == "below a file" else path))
    with pytest.warns(UserWarning, match="without a cache"):
        assert compile_and_run(0) == pytest.approx(5.0, rel=1e-5)
    with pytest.raises(CacheError):  # asked for by name
        onnxc.compile(net(), cache=tmp_path / "file")


def test_a_cache_that_is_read_only(fresh_cache: Path) -> None:
    """What is in it is used; what is not is compiled, and not kept."""
    compile_and_run(0)
    folders = [p for p in (fresh_cache, *fresh_cache.rglob("*")) if p.is_dir()]
    for folder in folders:
        folder.chmod(0o500)
    try:
        assert compile_and_run(0) == pytest.approx(5.0, rel=1e-5)
        assert (
            onnxc.compile(parse("(float[N] x) => (float[N] y) { y = Neg(x) }"))(np.ones(3, np.float32))[0].sum() == -3
        )
    finally:
        for folder in folders:
            folder.chmod(0o700)


def test_a_cache_on_a_full_disk(fresh_cache: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    script = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "import onnxc.runtime.cache as c; real = c.open if hasattr(c, 'open') else open\n"
        "import onnxc.runtime.package as p\n"
        "full = lambda path, mode='r', *a, **k: real('/dev/full', mode, *a, **k) if 'w' in mode else real(path, mode, *a, **k)\n"
        "c.open = full; p.open = full\n"
        "from tests.test_processes import compile_and_run; print(round(compile_and_run(0), 3))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "5.0", done.stderr


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnxc.compile(net()).save(tmp_path / "net.onnxc")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ToolchainError, match="install"):
        onnxc.compile(net(), cache=False)
    assert onnxc.load(tmp_path / "net.onnxc")(*inputs(5))[0].sum() == pytest.approx(5.0, rel=1e-5)


@pytest.mark.parametrize("compiler", ["false", "true", "no-such-program"])
def test_a_compiler_that_does_not_work(monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    monkeypatch.setenv("CXX", shutil.which(compiler) or compiler)
    with pytest.raises(ToolchainError):
        onnxc.compile(net(), cache=False)


def test_a_cpu_that_lacks_what_a_file_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnxc.compile(net()).save(tmp_path / "net.onnxc")
    names = frozenset({"sse", "sse2", "fxsr"})
    for module in (cpu, toolchain):
        if hasattr(module, "machine_features"):
            monkeypatch.setattr(module, "machine_features", lambda: names)
    with pytest.raises(CpuError, match="cpu="):
        onnxc.load(tmp_path / "net.onnxc")


def test_an_interrupt_does_not_wait_for_the_compiler(tmp_path: Path, fresh_cache: Path) -> None:
    compiler = shutil.which("g++")
    assert compiler
    slow = tmp_path / "slow"
    slow.write_text(
        f'#!/bin/sh\ncase "$*" in *part0.cpp*) touch {tmp_path}/begun; sleep 100;; esac\nexec {compiler} "$@"\n'
    )
    slow.chmod(0o755)
    script = (
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import onnxc\nfrom tests.test_processes import net\n"
        "try: onnxc.compile(net())\nexcept KeyboardInterrupt: print('interrupted')"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env={**os.environ, "CXX": str(slow)}) as process:  # fmt: skip
        while not (tmp_path / "begun").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=90) == ("interrupted\n", "")
    assert time.monotonic() - begun < 60


def test_no_file_can_be_opened() -> None:
    """Operators and functions of the host are in modules, which are looked for when they are first wanted."""
    script = (
        "import os, onnxc\nfrom onnxc.errors import LimitError\nfrom onnxc.ops import registry\n"
        "from onnxc.host import registry as host\nfiles = []\n"
        "try:\n    while True: files.append(os.open(os.devnull, os.O_RDONLY))\nexcept OSError: pass\n"
        "for table in (registry.table, host.table):\n"
        "    try: print(len(table()))\n    except LimitError as error: print(error)\n"
        "os.closerange(files[0], files[-1] + 1)\n"
        "print(len(registry.table()) > 200, len(host.table()) > 20)\n"
    )
    done = subprocess.run(["sh", "-c", 'ulimit -n 40; exec "$@"', "sh", sys.executable, "-c", script],
                          capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    assert done.stdout.splitlines() == [
        "the modules of onnxc.ops cannot be read: Too many open files",
        "the modules of onnxc.host cannot be read: Too many open files",
        "True True",
    ], done.stderr


@pytest.mark.parametrize("cache", [True, False])
def test_a_working_directory_that_is_gone(cache: bool, tmp_path: Path, fresh_cache: Path) -> None:
    here = os.getcwd()
    (tmp_path / "gone").mkdir()
    try:
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        assert len(onnxc.compile(net(), cache=cache)(*inputs(3)))
        with pytest.raises(ModelError, match=r"model 'm\.onnx' cannot be opened: the working directory is gone"):
            onnxc.compile("m.onnx", cache=cache)
        with pytest.raises(InputError, match=r"no folder can have the name '\.'"):
            onnxc.compile(net(), base_dir=".", cache=cache)
    finally:
        os.chdir(here)


@pytest.mark.parametrize("damage", ["empty", "short", "zeros", "noise", "text"])
def test_damaged_entries(fresh_cache: Path, damage: str) -> None:
    compile_and_run(0)
    entries = [p for p in (fresh_cache / "v1").rglob("*") if p.is_file()]
    assert entries
    for entry in entries:
        data = entry.read_bytes()
        noise = np.random.default_rng(0).integers(0, 256, len(data), np.uint8).tobytes()
        entry.write_bytes({"empty": b"", "short": data[: len(data) // 2], "zeros": bytes(len(data)),
                           "noise": noise, "text": b"[[[[" * 50}[damage])  # fmt: skip
    script = "from tests.test_processes import compile_and_run; print(round(compile_and_run(0), 3))"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
        assert done.stdout.strip() == "5.0", done.stderr


def test_every_error_is_one_kind() -> None:
    assert all(issubclass(kind, OnnxcError) for kind in (CacheError, CpuError, ToolchainError))
