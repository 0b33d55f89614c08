"""What identifies a compile: the content of the model, and the code of the compiler itself.

A model is known by its bytes, those of its external data files included; no name and no time of a file counts, so a
copy of a model finds what was compiled from the original, and a file changed in place does not.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from onnxc.errors import ModelError
from onnxc.frontends.onnx_file import MAX_BYTES, Model
from onnxc.frontends.onnx_tensors import DataFolder, open_regular, text
from onnxc.runtime.cache import Cache, digest
from onnxc.runtime.cpu import available_cpus

_PIECE = 8 << 20  # bytes hashed at a time, by one thread
_PARALLEL_FROM = 32 << 20  # bytes; below it starting threads costs more than it saves
_FILES_KEY = "external data files, 1"


@dataclass(frozen=True)
class Fingerprint:
    """The content of a model, as it was when it was looked at.

    Attributes:
        digest: of all bytes.
        files: the files it was read from, with what tells whether they have changed since.
    """

    digest: str
    files: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def is_current(self) -> bool:
        """True while no file has been written since."""
        try:
            return all(_state(path) == state for path, state in self.files)
        except OSError:
            return False


def fingerprint(model: Model, base_dir: str | os.PathLike[str] | None, cache: Cache | None) -> Fingerprint:
    """The fingerprint of a model.

    Args:
        model: a path, the bytes of a file, or a ModelProto.
        base_dir: the folder of external data, for bytes and ModelProto.
        cache: where to remember which external files a model's bytes name.

    Raises:
        ModelError: a file cannot be read, or external data lies where it may not.
    """
    folder = None if base_dir is None else DataFolder(os.fspath(base_dir), os.fspath(base_dir))
    files: dict[str, tuple[int, ...]] = {}
    if isinstance(model, (ModelProto, bytes, bytearray, memoryview)):
        data = _serialized(model) if isinstance(model, ModelProto) else bytes(model)
        main = _digest_bytes(data)
    else:
        path = os.fspath(model)
        if folder is None:
            folder = DataFolder(os.path.dirname(os.path.abspath(path)), os.path.dirname(os.path.realpath(path)))
        data = None
        main = _digest_file(path, f"model {path!r}", files)
    locations = _locations(main, model, data, cache)
    if locations and folder is None:
        raise ModelError(f"the model has external data ({locations[0]!r}): give its folder as base_dir")
    outside = [_digest_file(folder.find(name), f"external data {name!r}", files) for name in locations] if folder else []
    return Fingerprint(digest("model", main, locations, outside), tuple(files.items()))


def _serialized(model: ModelProto) -> bytes:
    try:
        return bytes(model.SerializeToString(deterministic=True))
    except ValueError as error:
        raise ModelError("the model is over 2 GB: store its weights as external data", cause=error) from error


# ---------------------------------------------------------------- content


def _state(path: str) -> tuple[int, ...]:
    info = os.stat(path)
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def _digest_bytes(data: bytes) -> str:
    view = memoryview(data)
    pieces = [view[at : at + _PIECE] for at in range(0, len(view), _PIECE)]
    return _combine(len(view), _map(lambda piece: hashlib.sha256(piece).digest(), pieces, len(view)))


def _digest_file(path: str, what: str, files: dict[str, tuple[int, ...]]) -> str:
    """The digest of a file's content; notes the file's state."""
    handle = open_regular(path, what)
    try:
        files[path] = _state(path)
        size = os.fstat(handle).st_size
        # Read, not mapped: a file that is cut short meanwhile gives an error, and not the end of the process.
        pieces = _map(lambda at: _digest_piece(handle, at), range(0, size, _PIECE), size)
        return _combine(size, pieces)
    except OSError as error:
        raise ModelError(f"cannot read {what}: {error}", cause=error) from error
    finally:
        os.close(handle)


def _digest_piece(handle: int, at: int) -> bytes:
    sha = hashlib.sha256()
    end = at + _PIECE
    while at < end and (data := os.pread(handle, min(1 << 20, end - at), at)):
        sha.update(data)
        at += len(data)
    return sha.digest()


def _map[T](run, items, nbytes):  # placeholder
    ...


def _combine(size: int, pieces: Iterable[bytes]) -> str:
    return digest(size, b"".join(pieces))
