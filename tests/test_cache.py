"""The cache directory: private, atomic, bounded."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import stat
import time
from pathlib import Path

import pytest

import onnxc.runtime.cache
from onnxc.errors import CacheError
from onnxc.runtime.cache import Cache, default_root, digest

KEY = digest("test", 1)
spawn = multiprocessing.get_context("spawn")


def test_an_entry_comes_back(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c")
    assert cache.get(KEY) is None
    assert cache.read(KEY) is None
    assert cache.open(KEY) is None
    path = cache.put(KEY, b"one")
    assert (path, path.name) == (cache.get(KEY), KEY)
    cache.put(KEY, [b"tw", memoryview(b"o")])
    assert Cache(tmp_path / "c").read(KEY) == b"two"
    cache.remove(KEY)
    cache.remove(KEY)
    assert cache.read(KEY) is None


def test_an_open_entry_outlives_its_removal(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put(KEY, b"one")
    file = cache.open(KEY)
    cache.clear()
    assert file is not None
    with file:
        assert file.read() == b"one"


def test_the_digest_tells_parts_apart() -> None:
    parts = [("ab", "c"), ("a", "bc"), (b"ab", "c"), ("abc",), ({"a": 1},), ({"a": "1"},), (["a", 1],), ()]
    assert len({digest(*part) for part in parts}) == len(parts)
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    with pytest.raises(TypeError):
        digest(object())


@pytest.mark.parametrize("key", ["", "../../etc/passwd", "0" * 63, "0" * 65, "G" * 64, "A" * 64, "0" * 64 + "\n"])
def test_only_digests_are_names(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="64 hex digits"):
        Cache(tmp_path).put(key, b"")


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXC_CACHE", str(tmp_path / "given"))
    assert default_root() == tmp_path / "given"
    assert Cache().root == tmp_path / "given"
    monkeypatch.delenv("ONNXC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_root().name == "onnxc"


# ---------------------------------------------------------------- private


def test_the_directories_are_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        cache = Cache(tmp_path / "new" / "deep")
        entry = cache.put(KEY, b"x")
    finally:
        os.umask(old)
    for path in (cache.root, entry.parent, entry.parent.parent, cache.root / "tmp"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_an_open_directory_of_ours_is_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    Cache(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_what_cannot_be_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    for bad in (file, file / "below", Path("/proc/nothing/here"), Path("/sys")):
        if os.geteuid() or bad != Path("/sys"):
            with pytest.raises(CacheError):
                Cache(bad)
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "v1").symlink_to(tmp_path)
    with pytest.raises(CacheError, match="not a directory"):
        Cache(linked)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(CacheError, match="belongs to another user"):
        Cache(tmp_path / "theirs")


def test_a_directory_that_went_away(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c")
    for folder in (cache.root / "tmp", cache.root / "v1", cache.root):
        folder.rmdir()
    assert cache.read(KEY) is None
    assert cache.trim() == 0
    with pytest.raises(CacheError, match="cannot write"):
        cache.put(KEY, b"x")


# ---------------------------------------------------------------- bounded


def test_the_entries_used_longest_ago_go(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    keys = [digest(n) for n in range(20)]
    for age, key in enumerate(keys):
        path = cache.put(key, bytes(1000))
        os.utime(path, (time.time() - 100_000 + age, time.time() - 100_000 + age))
    assert cache.get(keys[0]) is not None, "using an entry makes it young"
    removed = cache.trim(10_000)
    assert removed == 11_000
    assert cache.size() == 9000
    assert [cache.get(key) is not None for key in keys] == [True] + [False] * 11 + [True] * 8


def test_writing_trims_by_itself(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=50_000)
    for n in range(200):
        cache.put(digest(n), bytes(1000))
    assert cache.size() <= 50_000 + 32_000


def test_looks_at_the_size_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One when a process begins to write, if no other has looked lately, and one for each part of the limit: however
    many objects there are for one folder (each compile makes one), and however many entries.
    """
    looks: list[int] = []
    trim = Cache.trim
    monkeypatch.setattr(Cache, "trim", lambda self: looks.append(trim(self)))
    Cache(tmp_path)  # makes its folders, which changes the time of the root
    os.utime(tmp_path, (0, 0))
    for n in range(100):
        Cache(tmp_path, limit=320_000).put(digest(n), bytes(1000))
    assert len(looks) == 1 + 9  # after the first, and after each eleven
    monkeypatch.setattr(onnxc.runtime.cache, "_unseen", {})  # another process
    Cache(tmp_path).put(digest(0), bytes(1000))
    assert len(looks) == 10


def test_abandoned_files_go(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    old, young = tmp_path / "tmp" / "1-old", tmp_path / "tmp" / "1-young"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 1e6, time.time() - 1e6))
    cache.trim()
    assert not old.exists()
    assert young.exists()


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path)

    def write_half() -> None:
        with cache.writing(KEY) as path:
            path.write_bytes(b"half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        write_half()
    assert cache.read(KEY) is None
    assert list((tmp_path / "tmp").iterdir()) == []


# ---------------------------------------------------------------- several processes


def sealed(number: int) -> bytes:
    """Some data, and its digest: a torn entry shows."""
    data = bytes([number % 256]) * (50_000 + number)
    return hashlib.sha256(data).digest() + data


def intact(entry: bytes) -> bool:
    return hashlib.sha256(entry[32:]).digest() == entry[:32]


def keep_writing(root: str, number: int, rounds: int) -> None:
    cache = Cache(root)
    for round_ in range(rounds):
        data = sealed(number + round_)
        cache.put(KEY, (data[at : at + 1000] for at in range(0, len(data), 1000)))


def test_two_processes_write_one_key(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    writers = [spawn.Process(target=keep_writing, args=(str(tmp_path), n * 100, 150)) for n in range(2)]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        entry = cache.read(KEY)
        if entry is not None:
            seen += 1
            assert intact(entry)
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert seen > 0
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_killed_writer_leaves_a_cache_that_works(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    writer = spawn.Process(target=keep_writing, args=(str(tmp_path), 0, 1_000_000))
    for wait in (0.0, 0.003, 0.007, 0.02, 0.05):
        writer = spawn.Process(target=keep_writing, args=(str(tmp_path), 0, 1_000_000))
        writer.start()
        deadline = time.monotonic() + 60
        while cache.read(KEY) is None and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(wait)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(60)
        entry = cache.read(KEY)
        assert entry is not None
        assert intact(entry)
        cache.put(KEY, sealed(7))
        assert cache.read(KEY) == sealed(7)
        cache.remove(KEY)
