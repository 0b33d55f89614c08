"""The cache behind ``compile``: what is compiled again, what makes the key, and processes that share it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper
import pytest

import onnxc
from onnxc import errors
from onnxc.compiler.machine_code import MachineCode
from tests.own_process import python
from tests.small_models import floats, parse

TWO = "(float[2,3] a, float[3] b) => (float[2,3] sum) { sum = Add(a, b) }"
A, B = floats(2, 3), floats(3)


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the compiles that really happen."""
    count: list[int] = []
    of = MachineCode.of

    def counted(*args: Any) -> bytes:
        count.append(1)
        return of(*args)

    monkeypatch.setattr(MachineCode, "of", counted)
    return count


def test_second_compile_comes_from_the_cache(fresh_cache: Path, compiles: list[int]) -> None:
    for _ in range(3):
        np.testing.assert_array_equal(onnxc.compile(parse(TWO))(A, B)["sum"], A + B)
    assert len(compiles) == 1
    onnxc.compile(parse(TWO), cache=False)
    assert len(compiles) == 2


def test_options_are_part_of_the_key(fresh_cache: Path, compiles: list[int]) -> None:
    text = "(float[N,3] x) => (float[N,3] y) { y = Relu(x) }"
    for options in (
        {},
        {"fusion": False},
        {"cpu": "x86-64-v3"},
        {"memory_limit": 1 << 30},
        {"input_shapes": {"x": (2, 3)}},
    ):
        for _ in range(2):
            if options.get("cpu") and os.uname().machine != "x86_64":
                continue
            onnxc.compile(parse(text), **options)  # type: ignore[arg-type]
    onnxc.compile(parse(text), threads=1)  # is no part of what is compiled
    assert len(compiles) == 5 or os.uname().machine != "x86_64"


def external(folder: Path, value: float) -> Path:
    """A model whose weight lies in a file of its own."""
    weight = onnx.numpy_helper.from_array(np.full(1024, value, np.float32), "w")
    proto = parse("(float[1024] x) => (float[1024] y) { y = Add(x, w) }")
    proto.graph.initializer.append(weight)
    folder.mkdir(exist_ok=True)
    onnx.save(proto, folder / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    return folder / "m.onnx"


def test_external_data_counts_by_content(tmp_path: Path, fresh_cache: Path, compiles: list[int]) -> None:
    path = external(tmp_path / "a", 1.0)
    x = np.zeros(1024, np.float32)
    assert onnxc.compile(path)(x)["y"][5] == 1.0
    info = os.stat(tmp_path / "a" / "m.data")
    with open(tmp_path / "a" / "m.data", "r+b") as file:  # same size, same times
        file.write(np.full(1024, 2.0, np.float32).tobytes())
    os.utime(tmp_path / "a" / "m.data", ns=(info.st_atime_ns, info.st_mtime_ns))
    assert onnxc.compile(path)(x)["y"][5] == 2.0
    assert len(compiles) == 2
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # the same content elsewhere
    assert onnxc.compile(tmp_path / "b" / "m.onnx")(x)["y"][5] == 2.0
    assert len(compiles) == 2
    data = (tmp_path / "b" / "m.onnx").read_bytes()
    assert onnxc.compile(data, base_dir=tmp_path / "a")(x)["y"][5] == 2.0
    with pytest.raises(errors.ModelError, match="base_dir"):
        onnxc.compile(data)
    (tmp_path / "a" / "m.data").unlink()
    with pytest.raises(errors.ModelError, match=r"m\.data"):
        onnxc.compile(path)


def test_models_of_other_weights_share_machine_code(
    tmp_path: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first is compiled; what the cache has of it is not trusted where it is damaged."""
    from onnxc.compiler import machine_code

    compiled, compile_library = [], machine_code.compile_library

    def counted(sources: Any, **options: Any) -> bytes:
        compiled.append(sources)
        return compile_library(sources, **options)

    monkeypatch.setattr(machine_code, "compile_library", counted)
    x = np.zeros(1024, np.float32)
    for value in (1.0, 2.0):
        assert onnxc.compile(external(tmp_path / str(value), value))(x)["y"][5] == value
    assert len(compiled) == 1
    for entry in fresh_cache.glob("v1/*/*"):
        entry.write_bytes(entry.read_bytes()[:-1])
    assert onnxc.compile(external(tmp_path / "third", 3.0))(x)["y"][5] == 3.0
    assert len(compiled) == 2


def test_large_content_is_hashed_in_pieces(tmp_path: Path) -> None:
    from onnxc import fingerprint

    data = np.random.default_rng(0).integers(0, 256, (33 << 20) + 5, np.uint8).tobytes()
    (tmp_path / "f").write_bytes(data)
    path = str(tmp_path / "f")
    one = fingerprint._digest_file(os.open(path, os.O_RDONLY), path, "file", {})
    assert one == fingerprint._digest_bytes(data) != fingerprint._digest_bytes(data[:-1])


def test_of_external_files_only_what_is_used_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxc import fingerprint

    path = external(tmp_path / "m", 1.0)
    os.truncate(path.parent / "m.data", 1 << 40)  # bytes that no tensor uses, and that nobody has time to read
    first = fingerprint.fingerprint(path, None, None).digest
    with open(path.parent / "m.data", "r+b") as file:
        file.seek(1 << 39)
        file.write(b"unused")
    assert fingerprint.fingerprint(path, None, None).digest == first
    with open(path.parent / "m.data", "r+b") as file:
        file.write(b"used")
    assert fingerprint.fingerprint(path, None, None).digest != first


def test_many_tensors_at_one_place_are_read_once() -> None:
    from onnxc import fingerprint

    assert [*fingerprint._merged([(8, 9), (0, 4), (2, 6), (0, 4), (6, 8), (20, 30)])] == [(0, 9), (20, 30)]


def entries(cache: Path) -> list[Path]:
    """The cache's entries that are models."""
    return [p for p in cache.glob("v1/*/*") if p.read_bytes()[:6] == b"\x89ONNXC"]


@pytest.mark.parametrize("damage", [b"", b"\x89ONNXC\r\n", b"\0" * 9000])
def test_damaged_entry_is_compiled_again(fresh_cache: Path, compiles: list[int], damage: bytes) -> None:
    onnxc.compile(parse(TWO))
    (entry,) = entries(fresh_cache)
    entry.unlink()
    entry.write_bytes(damage)
    for _ in range(2):
        np.testing.assert_array_equal(onnxc.compile(parse(TWO))(A, B)["sum"], A + B)
    assert len(compiles) == 2


def test_unusable_default_cache_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ONNXC_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="without a cache"):
        model = onnxc.compile(parse(TWO))
    np.testing.assert_array_equal(model(A, B)["sum"], A + B)
    with pytest.raises(errors.CacheError):
        onnxc.compile(parse(TWO), cache=tmp_path / "file")


def test_cache_can_be_named(tmp_path: Path) -> None:
    onnxc.compile(parse(TWO), cache=tmp_path / "here")
    assert len(entries(tmp_path / "here")) == 1


COMPILE = """
    import numpy as np, onnxc
    from tests.small_models import parse
    text = "(float[N,32] x, float[32,32] w) => (float[N,32] y) { a = MatMul(x, w) y = Softmax(a) }"
    model = onnxc.compile(parse(text))
    out = model(np.ones((3, 32), "f"), np.eye(32, dtype="f"))["y"]
    assert abs(out - 1 / 32).max() < 1e-6
"""


def test_two_processes_compile_at_once(fresh_cache: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(COMPILE)]
    root = Path(__file__).parent.parent
    running = [subprocess.Popen(command, cwd=root, env=dict(os.environ)) for _ in range(3)]
    assert [p.wait(60) for p in running] == [0, 0, 0]
    assert len(entries(fresh_cache)) == 1
    assert not list((fresh_cache / "tmp").iterdir())


def test_killed_compile_leaves_a_good_cache(fresh_cache: Path) -> None:
    root = Path(__file__).parent.parent
    for wait in (0.2, 0.5, 0.8):
        process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(COMPILE)], cwd=root, env=dict(os.environ))
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = python(COMPILE)
    assert done.returncode == 0, done.stderr


def test_compile_loads_nothing_heavy(fresh_cache: Path) -> None:
    done = python(COMPILE + '\n    import sys\n    assert not {"torch", "triton", "sympy"} & set(sys.modules)\n')
    assert done.returncode == 0, done.stderr
