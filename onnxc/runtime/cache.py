"""The cache of compiled things: a private directory of files named by digests.

An entry is one file, written under a name of its own and then renamed: whoever looks sees the whole entry
or none, also when two processes write it at once or one is killed half way. Entries are bytes; what they
mean, and whether they are intact, is for the reader to say. Nothing here is ever unpickled.

>>> import tempfile
>>> cache = Cache(tempfile.mkdtemp())
>>> key = digest("kernel", b"source", {"flags": ["-O2"]})
>>> cache.read(key) is None
True
>>> _ = cache.put(key, b"compiled")
>>> cache.read(key)
b'compiled'
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from onnxc.errors import CacheError

DEFAULT_LIMIT = 8 << 30  # bytes of all entries
_LAYOUT = "v1"
_KEY = re.compile(r"[0-9a-f]{64}")
_TEMPORARY_LIFE = 24 * 3600.0  # seconds after which a temporary file has lost its writer
_TOUCH_AFTER = 60.0  # seconds: an entry used again sooner keeps its time
_LOOK_AFTER = 60.0  # seconds: a process that begins to write does not look at the size if somebody has since then
_LOOK_PARTS = 32  # a process looks again when it has written this part of the limit
_unseen: dict[str, int] = {}  # bytes that this process has written to a cache since it last looked, by root

Buffer = bytes | bytearray | memoryview


def default_root() -> Path:
    """``$ONNXC_CACHE``, else ``onnxc`` in the user's cache directory."""
    given = os.environ.get("ONNXC_CACHE")
    if given:
        return Path(given).expanduser()
    import platformdirs  # here, because most runs have no need of it

    return Path(platformdirs.user_cache_dir("onnxc", appauthor=False))


def digest(*parts: object) -> str:
    """A key (64 hex digits) of parts: bytes, or anything that JSON can write. Equal parts, equal key.

    Each part is preceded by its kind and length, so ("ab", "c") and ("a", "bc") differ.
    """
    sha = hashlib.sha256()
    for part in parts:
        if isinstance(part, (bytes, bytearray, memoryview)):
            kind, data = "b", memoryview(part).cast("B")
        else:
            kind, data = "j", memoryview(_json(part))
        sha.update(f"{kind}{len(data)}:".encode())
        sha.update(data)
    return sha.hexdigest()


def _json(part: object) -> bytes:
    return json.dumps(part, sort_keys=True, separators=(",", ":")).encode()


class Cache:
    """A cache directory. Safe for any number of threads and processes.

    Args:
        root: the directory; made (with mode 0700) when it is not there. Default: :func:`default_root`.
        limit: bytes of all entries together; above it the entries used longest ago go.

    Raises:
        CacheError: the directory cannot be made or written, or is not private and cannot be made so.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None, limit: int = DEFAULT_LIMIT) -> None:
        if root is not None and not os.fspath(root):
            raise CacheError("a cache is a folder, and the name of this one is empty")
        self.root = Path(root) if root is not None else default_root()
        self.limit = limit
        self._entries = self.root / _LAYOUT
        self._temporary = self.root / "tmp"
        _private_directory(self.root, parents=True)
        _private_directory(self._entries)
        _private_directory(self._temporary)

    def path(self, key: str) -> Path:
        """Where the entry of this key is, or would be."""
        if not _KEY.fullmatch(key):
            raise ValueError("a cache key is 64 hex digits")
        return self._entries / key[:2] / key

    def get(self, key: str) -> Path | None:
        """The path of an entry, now marked as used; None when there is none.

        Another process may remove the entry at any time: open it at once, and take a missing file as a miss.
        """
        path = self.path(key)
        try:
            info = path.stat()
            if time.time() - info.st_mtime > _TOUCH_AFTER:
                os.utime(path)
        except OSError:
            return None
        return path if stat.S_ISREG(info.st_mode) else None

    def open(self, key: str) -> BinaryIO | None:
        """An entry, open for reading: it stays readable even when another process removes it."""
        path = self.get(key)
        with contextlib.suppress(OSError):
            return open(path, "rb") if path else None
        return None

    def read(self, key: str) -> bytes | None:
        """The bytes of an entry, or None."""
        file = self.open(key)
        if file is None:
            return None
        with file:
            return file.read()

    def put(self, key: str, data: Buffer | Iterable[Buffer]) -> Path:
        """Write an entry, in place of one that is there. Returns its path.

        Raises:
            CacheError: the disk is full, or the directory has gone.
        """
        parts = [data] if isinstance(data, (bytes, bytearray, memoryview)) else data
        with self.writing(key) as temporary, open(temporary, "wb") as file:
            for part in parts:
                file.write(part)
        return self.path(key)

    @contextlib.contextmanager
    def writing(self, key: str) -> Iterator[Path]:
        """A path to write an entry to: it becomes the entry when the block ends without an exception.

        >>> import tempfile
        >>> cache, key = Cache(tempfile.mkdtemp()), "0" * 64
        >>> with cache.writing(key) as path:
        ...     _ = path.write_bytes(b"x")
        >>> cache.read(key)
        b'x'
        """
        final = self.path(key)
        temporary = self._temporary / f"{os.getpid()}-{secrets.token_hex(8)}"
        try:
            yield temporary
            size = temporary.stat().st_size
            _private_directory(final.parent)
            os.replace(temporary, final)
        except OSError as error:
            raise CacheError(f"cannot write to the cache in {self.root}: {error}", cause=error) from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        self._look_sometimes(size)

    def _look_sometimes(self, size: int) -> None:
        """After a write of so many bytes. To look takes 7 us an entry: too long for each compile, or each process."""
        begins = str(self.root) not in _unseen
        unseen = _unseen[str(self.root)] = _unseen.get(str(self.root), 0) + size
        if unseen > self.limit // _LOOK_PARTS or (begins and not self._seen_lately()):
            self.trim()

    def _seen_lately(self) -> bool:
        """By any process: `trim` marks the root, in which nothing else changes."""
        with contextlib.suppress(OSError):
            return 0 <= time.time() - self.root.stat().st_mtime < _LOOK_AFTER
        return False

    def remove(self, key: str) -> None:
        """Remove an entry (one that turned out to be damaged, say); it need not be there."""
        with contextlib.suppress(OSError):
            self.path(key).unlink()

    def size(self) -> int:
        """Bytes of all entries."""
        return sum(size for _, size, _ in self._list())

    def trim(self, limit: int | None = None) -> int:
        """Remove what dead processes left, and, above the limit, the entries used longest ago.

        Returns the bytes removed. Stops at nine tenths of the limit, so that not every write trims.
        """
        _unseen[str(self.root)] = 0
        with contextlib.suppress(OSError):
            os.utime(self.root)
        self._remove_abandoned()
        limit = self.limit if limit is None else limit
        entries = sorted(self._list())
        total = before = sum(size for _, size, _ in entries)
        if total <= limit:
            return 0
        for _, size, path in entries:
            if total <= limit * 9 // 10:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size
        return before - total

    def clear(self) -> None:
        """Remove every entry."""
        for _, _, path in self._list():
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _remove_abandoned(self) -> None:
        oldest = time.time() - _TEMPORARY_LIFE
        with contextlib.suppress(OSError), os.scandir(self._temporary) as files:
            for file in files:
                with contextlib.suppress(OSError):
                    if file.stat(follow_symlinks=False).st_mtime < oldest:
                        os.unlink(file.path)

    def _list(self) -> list[tuple[float, int, str]]:
        """(time of last use, bytes, path) of each entry."""
        found = []
        for folder in _scan(self._entries):
            for file in _scan(folder.path):
                with contextlib.suppress(OSError):
                    info = file.stat(follow_symlinks=False)
                    if _KEY.fullmatch(file.name) and stat.S_ISREG(info.st_mode):
                        found.append((info.st_mtime, info.st_size, file.path))
        return found


def _scan(path: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:
        return []


def _private_directory(path: Path, parents: bool = False) -> None:
    """Make sure that `path` is a directory that only this user can read or change.

    The cache holds code that runs: a directory that somebody else owns is refused, and one of our own that is
    open to others is closed.
    """
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        info = path.stat() if parents else path.lstat()  # the root alone may be a link
        if not stat.S_ISDIR(info.st_mode):
            raise CacheError(f"{path} is not a directory")
        if sys.platform == "win32":
            return
        if info.st_uid != os.geteuid():
            raise CacheError(f"{path} belongs to another user; set ONNXC_CACHE to a directory of your own")
        if stat.S_IMODE(info.st_mode) & 0o077:
            path.chmod(0o700)
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise CacheError(f"cannot use {path} as a cache: {error}", cause=error) from error
