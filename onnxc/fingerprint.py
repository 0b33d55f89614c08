"""What identifies a compile: the content of the model, and the code of the compiler itself.

A model is known by its bytes, those that it uses of external data files included; no name and no time of a file
counts. So a copy of a model finds what was compiled from the original, and a file changed in place does not.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto

from onnxc.errors import CacheError, LimitError, ModelError, OnnxcError
from onnxc.frontends.onnx_file import Model, open_model, path_of
from onnxc.frontends.onnx_tensors import DataFolder, all_tensors, external_place, open_regular, text, too_large
from onnxc.ir.graph import Graph
from onnxc.ir.text import to_text
from onnxc.runtime.cache import Cache, digest
from onnxc.runtime.cpu import available_cpus, memory_bytes

_PIECE = 8 << 20  # bytes hashed at a time, by one thread
_PARALLEL_FROM = 32 << 20  # bytes; below it starting threads costs more than it saves
_FILES_KEY = "external data files, 5"

Span = tuple[int, int]  # of the bytes of a file: the first, and the one after the last


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
        path = path_of(model)
        if folder is None:
            folder = DataFolder.of(path)
        data = None
        main = _digest_file(open_model(path), path, f"model {path!r}", files)
    used = _used_files(main, model, data, cache)
    if used and folder is None:
        raise ModelError(f"the model has external data ({used[0].location!r}): give its folder as base_dir")
    _check_memory(used)
    outside = [_digest_used(file, folder, files) for file in used] if folder else []
    return Fingerprint(digest("model", main, [file.location for file in used], outside), tuple(files.items()))


def fingerprint_graph(graph: Graph) -> Fingerprint:
    """The fingerprint of a graph: of its text, with digests of large constants, and of what the text leaves out."""
    rest = [graph.name, sorted(graph.dim_names.items()), graph.input_names, graph.output_names]
    return Fingerprint(digest("graph", to_text(graph), rest, repr(sorted(graph.metadata.items()))), ())


def mentions(model: Model | Graph, names: Iterable[str]) -> bool:
    """Whether a model may have an operator of one of these names: whether its bytes have the name anywhere."""
    names = tuple(names)
    wanted = [name.encode() for name in names]
    if not wanted:
        return False
    if isinstance(model, Graph):
        ops = {node.op.partition("@")[0] for node in model.all_nodes()}
        return any(op.endswith(names) for op in ops)
    if isinstance(model, (ModelProto, bytes, bytearray, memoryview)):
        data = _serialized(model) if isinstance(model, ModelProto) else bytes(model)
        return any(name in data for name in wanted)
    with os.fdopen(open_model(os.fspath(model)), "rb") as file:
        reach, end = max(map(len, wanted)) - 1, b""
        while piece := file.read(_PIECE):
            data = end + piece
            if any(name in data for name in wanted):
                return True
            end = data[len(data) - reach :] if reach else b""
    return False


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
    return _combine([(0, len(view))], lambda at, end: blake3(view[at:end]).digest())


def _digest_file(
    handle: int, path: str, what: str, files: dict[str, tuple[int, ...]], spans: Sequence[Span] | None = None
) -> str:
    """The digest of an open file's content, or of some of it; notes the file's state, and closes it."""
    try:
        files[path] = _state(path)
        # Read, not mapped: a file that is cut short meanwhile gives an error, and not the end of the process.
        size = os.fstat(handle).st_size
        wanted = [(0, size)] if spans is None else [(min(at, size), min(end, size)) for at, end in spans]
        return _combine(wanted, lambda at, end: _digest_piece(handle, at, end))
    except OSError as error:
        raise ModelError(f"cannot read {what}: {error}", cause=error) from error
    finally:
        os.close(handle)


def _digest_piece(handle: int, at: int, end: int) -> bytes:
    if end - at == _PIECE and _is_hole(handle, at, end):
        return _zeros_digest()
    content = blake3()
    while at < end and (data := os.pread(handle, min(1 << 20, end - at), at)):
        content.update(data)
        at += len(data)
    return content.digest()


def _is_hole(handle: int, at: int, end: int) -> bool:
    """Whether a file has nothing on the disk there, as a sparse one that says to be larger than any disk."""
    if not hasattr(os, "SEEK_DATA"):
        return False
    try:
        return os.lseek(handle, at, os.SEEK_DATA) >= end
    except OSError as error:
        return error.errno == errno.ENXIO  # nothing up to its end; other errors: the file system cannot say


@functools.cache
def _zeros_digest() -> bytes:
    """The digest of a piece that holds nothing but zeros."""
    return blake3(bytes(_PIECE)).digest()


def _combine(spans: Sequence[Span], piece: Callable[[int, int], bytes]) -> str:
    """The digest of the digests of pieces: large content is hashed by several threads."""
    size = sum(end - at for at, end in spans)
    pieces = [(at, min(at + _PIECE, end)) for first, end in spans for at in range(first, end, _PIECE)]
    if size < _PARALLEL_FROM:
        return digest(size, b"".join(piece(at, end) for at, end in pieces))
    with ThreadPoolExecutor(min(8, available_cpus())) as pool:
        return digest(size, b"".join(pool.map(lambda span: piece(*span), pieces)))


# ---------------------------------------------------------------- external data


@dataclass(frozen=True)
class _Used:
    """What a model uses of an external file: bytes, and tensors to name in errors: the one that reaches `farthest`, and
    the `largest`.
    """

    location: str
    farthest: str
    largest: str
    spans: tuple[Span, ...]

    @property
    def end(self) -> int:
        """The bytes that the file must have."""
        return max((end for _, end in self.spans), default=0)


def _used_files(main: str, model: Model, data: bytes | None, cache: Cache | None) -> list[_Used]:
    """The external files that a model names. To know them takes parsing it, so the cache remembers them."""
    key = digest(_FILES_KEY, main)
    known = cache.read(key) if cache else None
    if known:
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            return [
                _Used(str(name), str(far), str(large), tuple((int(a), int(b)) for a, b in spans))
                for name, far, large, spans in json.loads(known)
            ]
    if isinstance(model, ModelProto):
        proto: ModelProto | None = model
    else:
        if data is None:
            data = Path(os.fspath(model)).read_bytes()  # type: ignore[arg-type]
        proto = _parse(data) if b"location" in data else None  # the key of the entry that names the file
    found = _used_by(all_tensors(proto)) if proto else []
    if cache:
        with contextlib.suppress(CacheError):  # looked for again next time
            cache.put(key, json.dumps([[f.location, f.farthest, f.largest, f.spans] for f in found]).encode())
    return found


def _used_by(tensors: Iterable[TensorProto]) -> list[_Used]:
    """By location; of tensors whose place is not understood none, since their import is an error."""
    found: dict[str, list[tuple[Span, str]]] = {}
    for tensor in tensors:
        if tensor.data_location == TensorProto.EXTERNAL:
            with contextlib.suppress(OnnxcError):
                location, at, size = external_place(tensor)
                found.setdefault(location, []).append(((at, at + size), text(tensor.name)))
    used = []
    for location, places in sorted(found.items()):
        _, farthest = max(places, key=lambda p: p[0][1])
        _, largest = max(places, key=lambda p: p[0][1] - p[0][0])
        used.append(_Used(location, farthest, largest, tuple(_merged(span for span, _ in places))))
    return used


def _merged(spans: Iterable[Span]) -> Iterator[Span]:
    """In order, and none with bytes of another: however many tensors say that they lie at one place."""
    begin = reach = 0
    for at, end in sorted(spans):
        if at > reach:
            yield begin, reach
            begin = at
        reach = max(reach, end)
    yield begin, reach


def _check_memory(used: Sequence[_Used]) -> None:
    """Raises LimitError for more data than the machine's memory holds, before any is read."""
    sizes = [(sum(end - at for at, end in file.spans), file) for file in used]
    total, limit = sum(size for size, _ in sizes), memory_bytes()
    if total > limit:
        size, file = max(sizes, key=lambda x: x[0])
        raise LimitError(too_large(f"external data {file.location!r} (tensor {file.largest!r})", size, total, limit))


def _digest_used(file: _Used, folder: DataFolder, files: dict[str, tuple[int, ...]]) -> str:
    what = f"tensor {file.farthest!r}"
    try:
        path = folder.path(file.location)
    except ModelError as error:
        raise ModelError(f"{what}: {error.message}", cause=error) from error
    named = f"{what}: external data {file.location!r}"
    handle = open_regular(path, named)
    size = os.fstat(handle).st_size
    if file.end > size:  # said before anything is read
        os.close(handle)
        raise ModelError(f"{what} reaches byte {file.end} of an external file of {size} bytes")
    return _digest_file(handle, path, named, files, file.spans)


def _parse(data: bytes) -> ModelProto | None:
    try:
        model: ModelProto = ModelProto.FromString(data)
        return model
    except (DecodeError, RuntimeError, ValueError):
        return None  # the import will say what is wrong


# ---------------------------------------------------------------- the compiler


@functools.cache
def code_digest() -> str:
    """The digest of this package's own code: what an edited compiler made is not what the old one made."""
    root = Path(__file__).parent
    found = []
    for folder, folders, names in os.walk(root, followlinks=True):  # frontends may be a link
        folders[:] = sorted(f for f in folders if f != "__pycache__")
        found += [os.path.join(folder, name) for name in sorted(names) if name.endswith((".py", ".h", ".c"))]
    parts: list[object] = []
    for path in found:
        with open(path, "rb") as file:
            parts += [os.path.relpath(path, root), file.read()]
    return digest(*parts)
