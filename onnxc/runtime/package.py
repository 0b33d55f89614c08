"""The single file of a saved model: a header, and sections that can be mapped.

The file starts with a prefix of 64 bytes (magic, format version, sizes, digest of the header), then the
header (JSON: name, offset, length and SHA-256 of each section), then the sections, each on a boundary of
4096 bytes. Sections are read through a read-only mapping, so processes that load one file share its pages.

A file is checked against its own size before anything of it is used: one that is cut short, damaged or made
up gives a :class:`~onnxc.errors.PackageError`. Digests find damage. They do not make a stranger's file safe
to run: a package holds machine code.

>>> import tempfile, os
>>> path = os.path.join(tempfile.mkdtemp(), "m.onnxc")
>>> write_package(path, {"name": "m"}, {"weights": [b"ab", b"cd"]})
>>> with open_package(path) as package:
...     package.manifest, bytes(package.section("weights"))
({'name': 'm'}, b'abcd')
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import mmap
import os
import re
import secrets
import stat
import struct
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from onnxc.errors import InputError, PackageError

FORMAT_VERSION = 1
ALIGNMENT = 4096
HUGE_PAGE = 2 << 20
MANIFEST = "manifest"
_MAGIC = b"\x89ONNXC\r\n"  # the carriage return shows a file that was mangled as text
_PREFIX = struct.Struct("<8sIIQ32s8x")  # magic, version, header's length, file's length, header's SHA-256
_NAME = re.compile(r"[a-z0-9][a-z0-9_.:-]{0,63}")
_PLACE = re.compile(r"[0-9a-f]{16}")  # of an offset or a length
_SHA = re.compile(r"([0-9a-f]{64})?")
_MOST_HEADER = 1 << 20
_MOST_SECTIONS = 1024
_MOST_MANIFEST = 1 << 28

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class _Section:
    name: str
    offset: int
    length: int
    sha256: str  # empty: not recorded


def write_package(
    path: str | os.PathLike[str],
    manifest: Mapping[str, Any],
    sections: Mapping[str, Buffer | Sequence[Buffer]],
    *,
    unhashed: Iterable[str] = (),
) -> None:
    """Write a package: to a temporary file beside `path`, then renamed, so that no reader sees half of it.

    Args:
        path: the file; one that is there is replaced.
        manifest: what JSON can write.
        sections: bytes, or a list of buffers that follow each other, by name (``program.so``, ``weights``).
        unhashed: sections to record without a digest, because computing it costs too much.

    Raises:
        PackageError: a section's name is not allowed, or the file cannot be written.
        InputError: what is given is no path.
    """
    _check_path(path)
    target, skipped = Path(os.fsdecode(path)), set(unhashed)
    text = json.dumps(manifest, separators=(",", ":")).encode()
    buffers = {MANIFEST: [memoryview(text)], **{name: _views(data) for name, data in sections.items()}}
    if MANIFEST in sections or not all(_NAME.fullmatch(name) for name in buffers):
        raise PackageError(f"section names are lower-case letters, digits and _.:- only: {sorted(sections)}")
    temporary = target.parent / f".{target.name[:100]}.{os.getpid()}-{secrets.token_hex(6)}"
    try:
        with open(temporary, "xb") as file:
            _write(file, buffers, skipped)
        put_in_place(temporary, target)
    except (OSError, ValueError) as error:  # whose text would name the temporary file
        why = getattr(error, "strerror", None) or error
        raise PackageError(f"cannot write {os.fspath(path)!r}: {why}", cause=error) from error
    finally:
        with contextlib.suppress(OSError, ValueError):
            temporary.unlink()


def put_in_place(finished: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Renames a finished file to `path`, where a regular file may lie: a device would not be one afterwards.

    Raises OSError: something else lies there, or the system refuses.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(errno.EEXIST, "it is there and is not a regular file")
    os.replace(finished, path)


def _check_path(path: object) -> None:
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise InputError(f"a saved model has a path, and not a {type(path).__name__}")
    if isinstance(path, bytes) and b"\0" in path:  # no path has one, and what is in a file does
        raise InputError("a saved model has a path; the bytes of a file were given")


def open_at_once(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """A descriptor of a file, without a wait for a writer, should it be a pipe. Raises OSError, or ValueError for what
    no path can be.
    """
    return os.open(path, flags | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))


def _views(data: Buffer | Sequence[Buffer]) -> list[memoryview]:
    parts = [data] if isinstance(data, (bytes, bytearray, memoryview)) else data
    return [memoryview(part).cast("B") for part in parts]


def _write(file: BinaryIO, buffers: Mapping[str, list[memoryview]], unhashed: set[str]) -> None:
    lengths = {name: sum(view.nbytes for view in views) for name, views in buffers.items()}
    # Offsets have a fixed width in the header, so its length is known before them.
    blank = _header([_Section(name, 0, length, "0" * 64) for name, length in lengths.items()])
    end = _PREFIX.size + len(blank)
    done = []
    for name, views in buffers.items():
        offset = _aligned(end)
        file.seek(offset)
        sha = hashlib.sha256()
        for piece in _pieces(views, offset):
            file.write(piece)
            if name not in unhashed:
                sha.update(piece)
        done.append(_Section(name, offset, lengths[name], "" if name in unhashed else sha.hexdigest()))
        end = offset + lengths[name]
    file.truncate(end)
    header = _header(done).ljust(len(blank))
    file.seek(0)
    file.write(_PREFIX.pack(_MAGIC, FORMAT_VERSION, len(header), end, hashlib.sha256(header).digest()))
    file.write(header)


def _pieces(views: Iterable[memoryview], offset: int) -> Iterator[memoryview]:
    """What is written from `offset` on, each time up to the next multiple of a huge page.

    File systems with large folios (Linux 6.16 and later: ext4) then keep the file in huge pages, and so it is mapped.
    Written at once, it may lie in small ones, and products that read all weights take 1 to 3 % longer.
    """
    for view in views:
        start = 0
        while start < view.nbytes:
            end = min(view.nbytes, start + HUGE_PAGE - offset % HUGE_PAGE)
            yield view[start:end]
            offset, start = offset + end - start, end


def _header(sections: Sequence[_Section]) -> bytes:
    rows = [[s.name, f"{s.offset:016x}", f"{s.length:016x}", s.sha256] for s in sections]
    return json.dumps({"sections": rows}, separators=(",", ":")).encode()


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def open_package(path: str | os.PathLike[str], *, check_weights: bool = False) -> Package:
    """Open a package and check it.

    Args:
        path: the file.
        check_weights: check the digests of all sections now. Without it, ``weights`` (which would be read
            as a whole) is not checked, and the others are.

    Raises:
        PackageError: the file is not there, is not a package, or is damaged.
        InputError: what is given is no path.
    """
    _check_path(path)
    try:
        handle = open_at_once(path)
    except OSError as error:
        raise PackageError(f"cannot open {os.fspath(path)!r}: {error.strerror}", cause=error) from error
    except ValueError as error:
        raise PackageError(f"cannot open {os.fspath(path)!r}: {error}", cause=error) from error
    try:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode):
            raise PackageError(f"{os.fspath(path)!r} is not a regular file")
        if info.st_size < _PREFIX.size:
            raise PackageError(f"{os.fspath(path)!r} is not a saved model: it has {info.st_size} bytes")
        mapping = mmap.mmap(handle, info.st_size, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a hint, and not every kernel knows it
                mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        raise PackageError(f"cannot map {os.fspath(path)!r}: {error}", cause=error) from error
    finally:
        os.close(handle)
    try:
        return Package(os.fspath(path), mapping, check_weights)
    except BaseException:
        with contextlib.suppress(BufferError):
            mapping.close()
        raise


class Package:
    """An open package. Use :func:`open_package`.

    Attributes:
        path: the file.
        manifest: what :func:`write_package` was given.
    """

    def __init__(self, path: str, mapping: mmap.mmap, check_weights: bool) -> None:
        self.path = path
        self._mapping = mapping
        self._sections = {section.name: section for section in _read_sections(path, mapping)}
        for name in self._sections:
            if name != "weights" or check_weights:
                self.check(name)
        self.manifest: dict[str, Any] = self._read_manifest()

    @property
    def names(self) -> tuple[str, ...]:
        """The sections' names, in the file's order (the manifest is one of them)."""
        return tuple(self._sections)

    def section(self, name: str) -> memoryview:
        """A section's bytes: a read-only view of the mapped file that starts on a page.

        It stays good after :meth:`close`, as does everything made of it (``numpy.frombuffer``).

        Raises:
            PackageError: there is no section of that name.
        """
        found = self._find(name)
        return memoryview(self._mapping)[found.offset : found.offset + found.length]

    def check(self, name: str) -> None:
        """Compare a section with its digest, where one was recorded.

        Raises:
            PackageError: they differ, or there is no such section.
        """
        expected = self._find(name).sha256
        with self.section(name) as view:
            if expected and hashlib.sha256(view).hexdigest() != expected:
                raise PackageError(f"{self.path!r} is damaged: section {name!r} differs from its digest")

    def load(self, name: str) -> ctypes.CDLL:
        """Load a section that is a shared library into this process. This runs code of the file.

        Raises:
            PackageError: the section is not there or is not a library for this machine.
        """
        with self.section(name) as view:
            return load_library(view, name)

    def close(self) -> None:
        """Let the file go; it stays mapped while views of its sections are in use."""
        with contextlib.suppress(BufferError):
            self._mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _find(self, name: str) -> _Section:
        try:
            return self._sections[name]
        except KeyError:
            raise PackageError(f"{self.path!r} has no section {name!r}") from None

    def _read_manifest(self) -> dict[str, Any]:
        with self.section(MANIFEST) as view:
            if view.nbytes > _MOST_MANIFEST:
                raise PackageError(f"{self.path!r}: its manifest has {view.nbytes} bytes")
            manifest = _parse(self.path, bytes(view))
        if not isinstance(manifest, dict):
            raise PackageError(f"{self.path!r}: its manifest is not a JSON object")
        return manifest


def _read_sections(path: str, mapping: mmap.mmap) -> list[_Section]:
    """Read the prefix and the header, and check all that they say against the file's size."""
    magic, version, header_length, file_length, sha = _PREFIX.unpack_from(mapping)
    if magic != _MAGIC:
        raise PackageError(f"{path!r} is not a saved model (onnxc.compile reads ONNX files)")
    if version != FORMAT_VERSION:
        raise PackageError(f"{path!r} has format version {version}; this onnxc reads {FORMAT_VERSION}")
    if file_length != len(mapping):
        raise PackageError(f"{path!r} is damaged: it has {len(mapping)} bytes of {file_length}")
    end = _PREFIX.size + header_length
    if header_length > _MOST_HEADER or end > len(mapping):
        raise PackageError(f"{path!r} is damaged: a header of {header_length} bytes")
    header = mapping[_PREFIX.size : end]
    if hashlib.sha256(header).digest() != sha:
        raise PackageError(f"{path!r} is damaged: the header differs from its digest")
    sections = _parse_sections(path, _parse(path, header))
    for section in sections:
        if section.offset % ALIGNMENT or not end <= section.offset <= len(mapping) - section.length:
            raise PackageError(f"{path!r} is damaged: section {section.name!r} lies outside of its place")
        end = section.offset + section.length
    return sections


def _parse(path: str, text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise PackageError(f"{path!r} is damaged: {error}", cause=error) from error


def _parse_sections(path: str, header: Any) -> list[_Section]:
    rows = header.get("sections") if isinstance(header, dict) else None
    if not isinstance(rows, list) or len(rows) > _MOST_SECTIONS:
        raise PackageError(f"{path!r} is damaged: the header lists no sections")
    sections = [_parse_section(path, row) for row in rows]
    names = {section.name for section in sections}
    if len(names) != len(sections) or MANIFEST not in names:
        raise PackageError(f"{path!r} is damaged: sections {sorted(names)}")
    return sections


def _parse_section(path: str, row: Any) -> _Section:
    if isinstance(row, list) and len(row) == 4 and all(isinstance(cell, str) for cell in row):
        name, offset, length, sha = row
        places = _PLACE.fullmatch(offset) and _PLACE.fullmatch(length)
        if places and _NAME.fullmatch(name) and _SHA.fullmatch(sha):
            return _Section(name, int(offset, 16), int(length, 16), sha)
    raise PackageError(f"{path!r} is damaged: a section that reads {str(row)[:100]!r}")


# ---------------------------------------------------------------- loading machine code

_loads = 0
_loads_lock = threading.Lock()


def load_library(code: Buffer, name: str = "library") -> ctypes.CDLL:
    """Load a shared library from memory. It stays loaded.

    On Linux through a file that exists in memory only; elsewhere, or where that is forbidden, through a file
    in a private temporary directory.

    Raises:
        PackageError: the bytes are not a library that this process can load.
    """
    if not is_library(code):
        raise PackageError(f"{name!r} is not a shared library, or is cut off")
    handle = _memory_file(code)
    try:
        if handle is not None:
            with contextlib.suppress(OSError):
                return ctypes.CDLL(_unused_path(handle))
        return _load_from_directory(code)
    except OSError as error:
        raise PackageError(f"cannot load {name!r}: {error}", cause=error) from error
    finally:
        if handle is not None:
            os.close(handle)


_ELF64 = struct.Struct("<4sBB26xQQ6xHHHH2x")  # magic, class, order; of programs, then sections: places, sizes, counts
_SEGMENT = struct.Struct("<8xQ16xQ")  # offset and bytes in the file


def is_library(code: Buffer) -> bool:
    """Whether bytes are a shared library as a whole. Of one that is cut off the system maps what lies behind the end of
    the file, and the process dies when that is read.
    """
    data = memoryview(code).cast("B")
    if bytes(data[:4]) == b"\xcf\xfa\xed\xfe":
        return True
    if data.nbytes < 64 or bytes(data[:4]) != b"\x7fELF":
        return False
    _, width, order, segments, sections, size, count, section_size, section_count = _ELF64.unpack_from(data)
    if (width, order) != (2, 1):  # not of 64 bits with the low byte first: the system's loader may know
        return True
    ends = [segments + size * count, sections + section_size * section_count]
    if max(ends) > data.nbytes or size < _SEGMENT.size:
        return False
    places = [_SEGMENT.unpack_from(data, segments + k * size) for k in range(count)]
    return all(offset + length <= data.nbytes for offset, length in places)


def _memory_file(code: Buffer) -> int | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        handle = os.memfd_create("onnxc", os.MFD_CLOEXEC)
    except OSError:
        return None
    view = memoryview(code).cast("B")
    try:
        while view.nbytes:
            view = view[os.write(handle, view) :]
    except OSError:
        os.close(handle)
        return None
    return handle


def _unused_path(handle: int) -> str:
    """A path to the open file that this process has not loaded a library by before.

    The loader takes a path that it has seen for the library that it has: with a descriptor number used again,
    an old library would come back. So the path spells a count of loads, in slashes and dots.
    """
    global _loads
    with _loads_lock:
        _loads += 1
        spelled = "".join("./" if bit == "1" else "/" for bit in f"{_loads:b}")
    return f"/proc/self/fd/{spelled}{handle}"


def _load_from_directory(code: Buffer) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="onnxc-") as folder:  # mode 0700, and a name never used before
        path = Path(folder) / "library.so"
        path.write_bytes(code)
        return ctypes.CDLL(str(path))
