"""The single file of a saved model: what is written comes back, and what is hostile is refused."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import mmap
import multiprocessing
import os
import random
import signal
import struct
import time
from pathlib import Path

import numpy as np
import pytest

from onnxc.errors import InputError, PackageError, ToolchainError
from onnxc.runtime import package as package_module
from onnxc.runtime.package import Package, is_library, load_library, open_package, write_package
from onnxc.runtime.toolchain import Compiler, Source, compile_library

spawn = multiprocessing.get_context("spawn")
MANIFEST = {"name": "m", "inputs": [{"name": "x", "shape": [2, "n"]}], "text": "é\u0000"}
SECTIONS = {"program.so": b"\x7fELF code", "weights": [bytes(range(256)) * 40, b"", b"end"], "empty": b""}
PREFIX = struct.Struct("<8sIIQ32s8x")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "m.onnxc"
    write_package(file, MANIFEST, SECTIONS)
    return file


def reseal(path: Path, header: bytes, body: bytes = b"", length: int | None = None) -> None:
    """A file with this header, and prefix and digest to match."""
    data = PREFIX.pack(b"\x89ONNXC\r\n", 1, len(header), 0, hashlib.sha256(header).digest()) + header + body
    length = len(data) if length is None else length
    path.write_bytes(data[:16] + struct.pack("<Q", length) + data[24:])


def refused(path: Path, match: str | None = None) -> None:
    with pytest.raises(PackageError, match=match):
        open_package(path, check_weights=True)


# ---------------------------------------------------------------- round trip


def test_what_is_written_comes_back(path: Path) -> None:
    with open_package(path, check_weights=True) as package:
        assert package.manifest == MANIFEST
        assert package.names == ("manifest", "program.so", "weights", "empty")
        assert bytes(package.section("weights")) == bytes(range(256)) * 40 + b"end"
        assert bytes(package.section("program.so")) == b"\x7fELF code"
        assert package.section("empty").nbytes == 0
        with pytest.raises(PackageError, match="no section 'other'"):
            package.section("other")


def test_sections_of_several_huge_pages(tmp_path: Path) -> None:
    huge = package_module.HUGE_PAGE
    data = np.random.default_rng(3).integers(0, 256, 2 * huge + 12345, np.uint8)
    parts = [memoryview(data[:7]), memoryview(data[7 : huge + 9]), memoryview(data[huge + 9 :])]
    starts = [4096]  # of the pieces: where they end, a huge page ends, or a part
    for piece in package_module._pieces(parts, 4096):
        starts.append(starts[-1] + piece.nbytes)
    assert starts == [4096, 4096 + 7, huge, 4096 + huge + 9, 2 * huge, 4096 + data.nbytes]
    write_package(tmp_path / "m.onnxc", MANIFEST, {"program.so": b"code", "weights": parts})
    with open_package(tmp_path / "m.onnxc", check_weights=True) as package:
        assert np.array_equal(np.frombuffer(package.section("weights"), np.uint8), data)


def test_sections_start_on_pages_and_are_read_only(path: Path) -> None:
    package = open_package(path)
    array = np.frombuffer(package.section("weights"), np.uint8)
    assert array.ctypes.data % mmap.PAGESIZE == 0
    assert not array.flags.writeable
    with pytest.raises(TypeError):
        package.section("weights")[0] = 1


def test_sections_outlive_the_package(path: Path) -> None:
    package = open_package(path)
    array = np.frombuffer(package.section("weights"), np.uint8)
    package.close()
    path.unlink()
    del package
    gc.collect()
    assert array[255] == 255


def test_numpy_buffers(tmp_path: Path) -> None:
    weights = [np.arange(1000, dtype=np.float32).reshape(10, 100), np.float64([1.5])]
    write_package(tmp_path / "w", {}, {"weights": [memoryview(array) for array in weights]})
    view = open_package(tmp_path / "w", check_weights=True).section("weights")
    np.testing.assert_array_equal(np.frombuffer(view[:4000], np.float32), weights[0].ravel())
    assert np.frombuffer(view[4000:], np.float64) == 1.5


def test_unhashed_sections(tmp_path: Path) -> None:
    write_package(tmp_path / "w", {}, {"weights": b"abc"}, unhashed=["weights"])
    data = (tmp_path / "w").read_bytes()
    (tmp_path / "w").write_bytes(data[:-1] + b"X")
    assert bytes(open_package(tmp_path / "w", check_weights=True).section("weights")) == b"abX"


@pytest.mark.parametrize("name", ["", "manifest", "A", "../x", "a b", "a" * 65, "é"])
def test_section_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(PackageError, match="section names"):
        write_package(tmp_path / "w", {}, {name: b""})
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- atomic


def test_a_failed_write_leaves_the_old_file(path: Path) -> None:
    with pytest.raises(TypeError):
        write_package(path, {"bad": object()}, SECTIONS)
    with pytest.raises((PackageError, TypeError)):
        write_package(path, {}, {"weights": [b"x", "no bytes"]})  # type: ignore[list-item]
    assert open_package(path).manifest == MANIFEST
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    with pytest.raises(PackageError, match="cannot write"):
        write_package(path.parent / "none" / "m", {}, {})


@pytest.mark.parametrize("name", ["pipe", "link", "folder", "a\0b"])
def test_only_regular_files_are_written_over(tmp_path: Path, name: str) -> None:
    """A device, as /dev/stdout is one, would be a file afterwards."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "folder").mkdir()
    before = sorted((p.name, p.lstat().st_ino) for p in tmp_path.iterdir())
    with pytest.raises(PackageError, match="cannot write"):
        write_package(tmp_path / name, MANIFEST, SECTIONS)
    assert sorted((p.name, p.lstat().st_ino) for p in tmp_path.iterdir()) == before


def keep_saving(path: str) -> None:
    number = 0
    while True:
        number += 1
        block = bytes([number % 256]) * 100_000
        write_package(path, {"number": number}, {"weights": [block] * 20})


def test_a_killed_writer_leaves_a_whole_file(path: Path) -> None:
    for wait in (0.0, 0.004, 0.011, 0.03):
        writer = spawn.Process(target=keep_saving, args=(str(path),))
        before = path.stat().st_ino
        writer.start()
        deadline = time.monotonic() + 60
        while path.stat().st_ino == before and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(wait)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(60)
        with open_package(path, check_weights=True) as package:
            assert set(bytes(package.section("weights"))) == {package.manifest["number"] % 256}


# ---------------------------------------------------------------- hostile files


def test_not_a_file(tmp_path: Path) -> None:
    refused(tmp_path, "not a regular file")
    refused(tmp_path / "none", "No such file")
    refused(Path("/dev/zero"), "not a regular file")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "not a regular file")
    with pytest.raises(PackageError):
        open_package("a\0b")
    with pytest.raises(InputError, match="has a path, and not a list"):
        open_package([tmp_path])  # type: ignore[arg-type]


def test_cut_short_at_each_length(path: Path) -> None:
    data = path.read_bytes()
    for length in [*range(700), *range(4000, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:length])
        refused(path)
    path.write_bytes(data + b"\0")
    refused(path, "damaged")


def test_each_changed_byte_is_found(path: Path) -> None:
    data = bytearray(path.read_bytes())
    with open_package(path) as package:
        places = [(s.offset, s.length) for s in package._sections.values()]
    header = PREFIX.unpack_from(data)[2]
    spots = [*range(56), *range(64, 64 + header)]  # the last 8 bytes of the prefix say nothing
    spots += [at for offset, length in places for at in range(offset, offset + length, 61)]
    for at in spots:
        data[at] ^= 0x41
        path.write_bytes(data)
        refused(path)
        data[at] ^= 0x41
    path.write_bytes(data)
    open_package(path, check_weights=True).close()


def test_weights_are_checked_on_demand(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(bytes(range(256)), bytes(256), 1))
    with open_package(path) as package, pytest.raises(PackageError, match="'weights' differs"):
        package.check("weights")
    refused(path, "'weights' differs")


def rows(*changed: list[object]) -> bytes:
    manifest = ["manifest", f"{4096:016x}", f"{2:016x}", ""]
    return json.dumps({"sections": [manifest, *changed]}).encode()


def place(number: int) -> str:
    return f"{number:016x}"


@pytest.mark.parametrize(
    "row",
    [
        ["w", place(8192), place(4097), ""],  # beyond the end
        ["w", place(8192), "f" * 16, ""],  # offset + length above 2**64
        ["w", "f" * 13 + "000", place(1), ""],
        ["w", place(4096), place(1), ""],  # over the manifest
        ["w", place(0), place(1), ""],  # over the header
        ["w", place(8193), place(1), ""],  # not on a page
        ["w", 8192, 1, ""],
        ["w", "-" + place(1)[1:], place(1), ""],
        ["w", " " * 15 + "0", place(1), ""],
        ["w", place(8192), place(1), "abc"],
        ["w", place(8192), place(1), None],
        ["manifest", place(8192), place(1), ""],  # twice
        ["../w", place(8192), place(1), ""],
        ["w" * 65, place(8192), place(1), ""],
        ["w", place(8192), place(1)],
        "wxyz",
        None,
        {"name": "w"},
    ],
)
def test_hostile_sections(path: Path, row: list[object]) -> None:
    header = rows(row)
    reseal(path, header, (b"\0" * (4096 - 64 - len(header)) + b"{}").ljust(8192 - 64 - len(header) + 4096, b"\0"))
    refused(path, "damaged")


def test_overlapping_sections(path: Path) -> None:
    header = rows(["a", place(8192), place(5000), ""], ["b", place(12288), place(10), ""])
    reseal(path, header, (b"\0" * (4096 - 64 - len(header)) + b"{}").ljust(20_000, b"\0"))
    refused(path, "'b' lies outside")


@pytest.mark.parametrize(
    "header",
    [
        *(b"", b"{", b"[]", b"null", b"{}", b'{"sections": {}}', b'{"sections": []}', b"\xff\xfe"),
        *(b"[" * 200_000, b'{"sections": [' + b"1," * 2000 + b"1]}", b"1" * 5000),
    ],
)
def test_hostile_headers(path: Path, header: bytes) -> None:
    reseal(path, header, b"\0" * 8192)
    refused(path)


def test_a_header_longer_than_the_file_or_the_limit(path: Path) -> None:
    good = path.read_bytes()
    for length in (len(good), 2**32 - 1, 1 << 21):
        path.write_bytes(good[:12] + struct.pack("<I", length) + good[16:])
        refused(path, "header")
    header = rows().ljust((1 << 20) + 1)
    reseal(path, header, b"\0" * 8192)
    refused(path, "header")


@pytest.mark.parametrize("manifest", [b"", b"[]", b"1", b"{", b"\xff", b"[" * 100_000, b"1" * 5000])
def test_hostile_manifests(path: Path, manifest: bytes) -> None:
    row = ["manifest", place(4096), place(len(manifest)), ""]
    header = json.dumps({"sections": [row]}).encode()
    reseal(path, header, b"\0" * (4096 - 64 - len(header)) + manifest)
    refused(path)


def test_other_versions(path: Path) -> None:
    good = path.read_bytes()
    for version in (0, 2, 2**32 - 1):
        path.write_bytes(good[:8] + struct.pack("<I", version) + good[12:])
        refused(path, f"format version {version}")


def test_random_bytes(path: Path) -> None:
    good, random_ = path.read_bytes(), random.Random(7)
    for round_ in range(600):
        data = bytearray(good)
        kind = round_ % 3
        if kind == 0:  # noise
            data = bytearray(random_.randbytes(random_.randrange(10_000)))
        elif kind == 1:  # noise behind a good prefix
            data[64:] = random_.randbytes(random_.randrange(10_000))
        else:  # a good header, damaged in some places, and sealed again
            header = bytearray(good[64 : 64 + PREFIX.unpack_from(good)[2]])
            for _ in range(random_.randrange(1, 6)):
                header[random_.randrange(len(header))] = random_.choice(b'0123456789abcdef",[]{}:\\\x00\xff')
            reseal(path, bytes(header), good[64 + len(header) :])
            try_open(path)
            continue
        path.write_bytes(data)
        try_open(path)


def try_open(path: Path) -> None:
    """Whatever it says, it may only be refused by a PackageError; what is accepted must be readable."""
    try:
        package = open_package(path, check_weights=True)
    except PackageError:
        return
    with package:
        for name in package.names:
            bytes(package.section(name))


# ---------------------------------------------------------------- machine code


def program(value: int) -> bytes:
    text = f'extern "C" __attribute__((visibility("default"))) int value() {{ return {value}; }}'
    return compile_library([Source("value.cpp", text)])


def test_each_load_is_a_library_of_its_own(tmp_path: Path) -> None:
    """Descriptors are used again at once: the loader must not take one library for another."""
    write_package(tmp_path / "m", {}, {"a.so": program(1), "b.so": program(2)})
    with open_package(tmp_path / "m") as package:
        handles = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        loaded = [package.load(name) for name in ("a.so", "b.so") * 20]
        if handles:
            assert len(os.listdir("/proc/self/fd")) == handles
    assert [library.value() for library in loaded] == [1, 2] * 20


def test_loading_without_memory_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_module, "_memory_file", lambda code: None)
    assert load_library(program(5)).value() == 5


@pytest.mark.parametrize("code", [b"", b"abc", b"#!/bin/sh\n", b"\x7fELF", b"\x7fELF" + bytes(5000)])
def test_what_is_no_library(tmp_path: Path, code: bytes) -> None:
    write_package(tmp_path / "m", {}, {"program.so": code})
    with open_package(tmp_path / "m") as package, pytest.raises(PackageError, match=r"'program\.so'"):
        package.load("program.so")


def test_a_library_that_is_cut_off(tmp_path: Path) -> None:
    """To load one would end the process. From a compiler it is that one's fault, and goes into no cache."""
    code = program(1)
    assert is_library(code) and not any(is_library(code[:n]) for n in range(len(code)))
    with pytest.raises(PackageError, match="is cut off"):
        load_library(code[:3000])
    script = tmp_path / "cxx"
    (tmp_path / "cut").write_bytes(code[:3000])
    script.write_text(f'#!/bin/sh\nfor last; do :; done\ncp {tmp_path}/cut "$last"\n')
    script.chmod(0o700)
    with pytest.raises(ToolchainError, match="made no library: 3000 bytes"):
        compile_library([Source("one.cpp", "")], compiler=Compiler((str(script),), "gcc", "", ""))


def read_all(path: str) -> None:
    assert open_package(path).section("weights")[0] == 0


def test_the_package_type_is_public(path: Path) -> None:
    assert isinstance(open_package(path), Package)
    assert ctypes.CDLL is not None
    process = spawn.Process(target=read_all, args=(str(path),))
    process.start()
    process.join(60)
    assert process.exitcode == 0
