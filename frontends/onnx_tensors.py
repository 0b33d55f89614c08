"""ONNX tensors as numpy arrays: every dtype, both storages, and data in files beside the model.

The model comes from a stranger. So every count is computed in Python ints and compared with the bytes that
are really there before anything is allocated, and a file is read only where `DataFolder` allows it. Data of
large models is mapped, never read: loading a 10 GB model takes the memory of its graph.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator
from math import prod

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto

from onnxc.errors import InputError, LimitError, ModelError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType

MAX_ELEMENTS = 1 << 40  # no dim and no tensor may claim more
MAX_SPARSE_ELEMENTS = 1 << 26  # a sparse tensor takes memory that the file does not back


def text(value: str | bytes) -> str:
    """A string of the model; bytes that are not UTF-8 survive as surrogates (and are written back as they
    were).
    """
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value


class DataFolder:
    """Where a model's external data may be read from: regular files inside the model's folder.

    The folder is the one the caller named (`logical`) or the one the model file really lies in (`real`): in a
    download cache the model and its data are links to files that lie together elsewhere. A location is taken
    relative to either folder, and the file that it resolves to must lie inside one of them. Each file is
    mapped once.

    Attributes:
        limit: bytes that tensors may take together, where the machine has no more memory; None: any number.
    """

    def __init__(self, logical: str, real: str) -> None:
        self.limit: int | None = None
        try:
            self._folders = list(dict.fromkeys((os.path.abspath(logical), os.path.realpath(real))))
            self._allowed = {os.path.realpath(folder) for folder in self._folders}
        except (ValueError, OSError) as error:  # a null byte, a surrogate; the working directory is gone
            raise InputError(f"no folder can have the name {logical!r} ({error})", cause=error) from error
        self._maps: dict[str, np.ndarray] = {}
        self._taken: dict[tuple[str, int], int] = {}
        self._total = 0

    @classmethod
    def of(cls, path: str) -> DataFolder:
        """The folder of a model's file. Raises ModelError where a relative path begins in a directory that is gone."""
        try:
            return cls(os.path.dirname(os.path.abspath(path)), os.path.dirname(os.path.realpath(path)))
        except OSError as error:
            raise ModelError(f"model {path!r} cannot be opened: the working directory is gone", cause=error) from error

    def take(self, location: str, offset: int, length: int, what: str) -> None:
        """Counts the bytes of a tensor, before they are read. Raises LimitError where they are too many."""
        before = self._taken.get((location, offset), 0)
        self._taken[location, offset] = max(length, before)
        self._total += max(length - before, 0)
        if self.limit is not None and self._total > self.limit:
            raise LimitError(too_large(what, length, self._total, self.limit))

    def map(self, location: str) -> np.ndarray:
        """The bytes of a file, mapped read-only. Raises ModelError where the location is not allowed."""
        path = self.path(location)
        if path not in self._maps:
            self._maps[path] = map_file(path, f"external data {location!r}")
        return self._maps[path]

    @property
    def mapped(self) -> list[np.ndarray]:
        """The files that have been mapped."""
        return list(self._maps.values())

    def path(self, location: str) -> str:
        """The file that a location means. Raises ModelError where the location is not allowed."""
        if not location or "\0" in location or os.path.isabs(location) or ".." in location.split(os.sep):
            raise ModelError(f"external data location {location!r} must be a relative path inside the model's folder")
        return self._resolve(location)

    def _resolve(self, location: str) -> str:
        candidates = [os.path.join(folder, location) for folder in self._folders]
        found = next((c for c in candidates if os.path.lexists(c)), None)
        if found is None:
            raise ModelError(f"external data file {location!r} is not in the model's folder ({self._folders[0]})")
        target = os.path.realpath(found)
        if not any(os.path.commonpath((target, folder)) == folder for folder in self._allowed):
            raise ModelError(f"external data location {location!r} leads outside the model's folder")
        return target


def open_regular(path: str, what: str, flags: int = 0) -> int:
    """A descriptor of a regular file. Never blocks on a pipe or device: those are a ModelError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error  # what it is called has been said
        raise ModelError(f"{what} cannot be opened: {reason}", cause=error) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ModelError(f"{what} is not a regular file")
    return descriptor


def map_file(path: str, what: str) -> np.ndarray:
    """A whole file as read-only bytes, mapped. The path has been resolved: a link that appears now is not
    followed.
    """
    with os.fdopen(open_regular(path, what, os.O_NOFOLLOW), "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return np.empty(0, np.uint8)
        try:
            return np.asarray(np.memmap(file, np.uint8, "r"))
        except (OSError, ValueError) as error:  # no address is left for so much, say
            raise ModelError(f"{what} cannot be mapped: {error}", cause=error) from error


# ---------------------------------------------------------------- tensors


def shape_of(dims: object, what: str) -> tuple[int, ...]:
    """A tensor's dims as checked Python ints."""
    shape = tuple(int(d) for d in dims)  # type: ignore[attr-defined]
    if any(d < 0 for d in shape):
        raise ModelError(f"{what} has a negative dim: {list(shape)}")
    if len(shape) > 64 or prod(max(d, 1) for d in shape) > MAX_ELEMENTS:
        raise LimitError(f"{what} claims the shape {list(shape)}, which is more than any tensor may have")
    return shape


def dtype_of(number: int, what: str) -> DType:
    """The dtype of a TensorProto.DataType number."""
    if number not in dtypes.BY_ONNX:
        raise ModelError(f"{what} has an unknown element type ({number})")
    return dtypes.BY_ONNX[number]


def array_of(tensor: TensorProto, folder: DataFolder | None, what: str | None = None) -> np.ndarray:
    """A tensor as an array, without a copy where the data is mapped. Raises ModelError where its data does
    not fit.
    """
    what = what or f"tensor {text(tensor.name)!r}"
    dtype, shape = dtype_of(tensor.data_type, what), shape_of(tensor.dims, what)
    if tensor.HasField("segment"):
        raise ModelError(f"{what} is stored in segments, which no version of ONNX defines")
    if tensor.data_location == TensorProto.EXTERNAL:
        return _unpack(external_bytes(tensor, folder, what), dtype, shape, what)
    if dtype is dtypes.string:
        return _strings(tensor, shape, what)
    if tensor.HasField("raw_data"):
        return _unpack(np.frombuffer(tensor.raw_data, np.uint8), dtype, shape, what)
    return _typed(tensor, dtype, shape, what)


def byte_count(dtype: DType, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor in a file, where sub-byte elements lie packed."""
    return -(-prod(shape) * dtype.bits // 8)


def _unpack(data: np.ndarray, dtype: DType, shape: tuple[int, ...], what: str) -> np.ndarray:
    """Little-endian bytes of a file as an array."""
    if dtype is dtypes.string:
        raise ModelError(f"{what} holds strings, which cannot be stored as raw bytes")
    if data.size != byte_count(dtype, shape):
        raise ModelError(
            f"{what}: {dtype}{list(shape)} takes {byte_count(dtype, shape)} bytes, the model has {data.size}"
        )
    if dtype.bits < 8:
        return _unpack_bits(data, dtype, prod(shape)).reshape(shape)
    if dtype is dtypes.boolean:
        return np.asarray(np.not_equal(data, 0).reshape(shape))
    if data.ctypes.data % dtype.numpy.alignment:
        data = data.copy()
    if sys.byteorder == "big":
        width = {"complex": dtype.itemsize // 2}.get(dtype.kind, dtype.itemsize)
        data = data.reshape(-1, width)[:, ::-1].reshape(-1)
    return data.view(dtype.numpy).reshape(shape)


def _unpack_bits(data: np.ndarray, dtype: DType, count: int) -> np.ndarray:
    """Elements of 2, 4 or 6 bits, the first one in the lowest bits, one to a byte."""
    if 8 % dtype.bits == 0:
        shifts = np.arange(0, 8, dtype.bits, dtype=np.uint8)
        elements = (np.asarray(data)[:, None] >> shifts) & np.uint8((1 << dtype.bits) - 1)
    else:
        bits = np.unpackbits(np.asarray(data), bitorder="little")[: count * dtype.bits]
        elements = np.packbits(bits.reshape(-1, dtype.bits), axis=1, bitorder="little")
    elements = elements.reshape(-1)[:count]
    if dtype.kind == "int":  # extend the sign
        top = np.uint8(1 << (dtype.bits - 1))
        elements = ((elements ^ top).astype(np.int16) - int(top)).astype(np.int8)
        return elements.astype(dtype.numpy)
    return elements.view(dtype.numpy)


def _strings(tensor: TensorProto, shape: tuple[int, ...], what: str) -> np.ndarray:
    if len(tensor.string_data) != prod(shape):
        count = len(tensor.string_data)
        raise ModelError(f"{what}: a shape of {list(shape)} needs {prod(shape)} strings, the model has {count}")
    out = np.empty(prod(shape), object)
    out[:] = [text(s) for s in tensor.string_data]
    return out.reshape(shape)


_FIELDS: dict[str, tuple[str, type[np.generic]]] = {
    "float32": ("float_data", np.float32),
    "complex64": ("float_data", np.float32),
    "float64": ("double_data", np.float64),
    "complex128": ("double_data", np.float64),
    "int64": ("int64_data", np.int64),
    "uint64": ("uint64_data", np.uint64),
    "uint32": ("uint64_data", np.uint64),
}


def _typed(tensor: TensorProto, dtype: DType, shape: tuple[int, ...], what: str) -> np.ndarray:
    """A tensor stored in a typed field; what is narrower than 32 bits is stored as int32, floats as their
    bits.
    """
    field, stored = _FIELDS.get(dtype.name, ("int32_data", np.int32))
    values = np.array(getattr(tensor, field), stored)
    packed = 8 % dtype.bits == 0 and dtype.bits < 8  # elements of 6 bits take an entry each
    expected = byte_count(dtype, shape) if packed else prod(shape) * (2 if dtype.kind == "complex" else 1)
    if values.size != expected:
        raise ModelError(
            f"{what}: {dtype}{list(shape)} takes {expected} entries of {field}, the model has {values.size}"
        )
    if packed:
        return _unpack_bits(values.astype(np.uint8), dtype, prod(shape)).reshape(shape)
    if dtype.kind == "complex":
        return values.view(dtype.numpy).reshape(shape)
    if stored is np.int32 and dtype.is_float:  # as their bits
        bits = np.uint16 if dtype.bits == 16 else np.uint8
        return values.astype(bits).view(dtype.numpy).reshape(shape)
    return values.astype(dtype.numpy).reshape(shape)


# ---------------------------------------------------------------- external data


def external_place(tensor: TensorProto, what: str | None = None) -> tuple[str, int, int]:
    """Where the data of a tensor lies that has a file of its own: the location, the first byte, and how many.

    Raises ModelError where this is not said, or not in natural numbers that fit the tensor's shape.
    """
    what = what or f"tensor {text(tensor.name)!r}"
    dtype, shape = dtype_of(tensor.data_type, what), shape_of(tensor.dims, what)
    entries = {text(e.key): text(e.value) for e in tensor.external_data}
    if len(entries) != len(tensor.external_data):
        raise ModelError(f"{what} says twice where its external data lies")
    size = byte_count(dtype, shape)
    offset = _natural(entries.get("offset", "0"), what, "offset")
    length = _natural(entries.get("length", str(size)), what, "length")
    if length != size:
        raise ModelError(f"{what}: {dtype}{list(shape)} takes {size} bytes, its external data has length {length}")
    return entries.get("location", ""), offset, length


def external_bytes(tensor: TensorProto, folder: DataFolder | None, what: str) -> np.ndarray:
    """The bytes of a tensor that lies in a file of its own. Raises ModelError for one that may not be read, or ends
    too soon.
    """
    location, offset, length = external_place(tensor, what)
    if folder is None:
        raise ModelError(f"{what} lies in an external file: give base_dir=, the folder it is in")
    folder.take(location, offset, length, what)
    try:
        data = folder.map(location)
    except ModelError as error:
        raise ModelError(f"{what}: {error.message}", cause=error) from error
    if offset + length > data.size:
        raise ModelError(f"{what} reaches byte {offset + length} of an external file of {data.size} bytes")
    return data[offset : offset + length]


def too_large(what: str, size: int, total: int, limit: int) -> str:
    """What an error says of weights that the machine's memory cannot hold."""
    return (
        f"{what} takes {size} bytes, and with the model's other external data {total} bytes: "
        f"{limit} bytes of memory are there for all"
    )


def all_tensors(model: ModelProto) -> Iterator[TensorProto]:
    """The tensors of a model, wherever they stand: weights, and those in attributes of nodes, functions, subgraphs,
    however deep these lie in each other.
    """
    graphs = [model.graph]
    for function in model.functions:
        yield from _attribute_tensors(function.attribute_proto, graphs)
        for node in function.node:
            yield from _attribute_tensors(node.attribute, graphs)
    while graphs:
        graph = graphs.pop()
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
        for node in graph.node:
            yield from _attribute_tensors(node.attribute, graphs)


def _attribute_tensors(attributes: Iterable[AttributeProto], graphs: list[GraphProto]) -> Iterator[TensorProto]:
    """Those of attributes themselves; the graphs among them are added to a list."""
    for a in attributes:
        if a.HasField("t"):
            yield a.t
        yield from a.tensors
        for sparse in (*([a.sparse_tensor] if a.HasField("sparse_tensor") else []), *a.sparse_tensors):
            yield from (sparse.values, sparse.indices)
        graphs += [*([a.g] if a.HasField("g") else []), *a.graphs]


def _natural(value: str, what: str, key: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 19):
        raise ModelError(f"{what}: the {key} of its external data must be a natural number, not {value[:40]!r}")
    return int(value)


# ---------------------------------------------------------------- sparse tensors


def dense(sparse: onnx.SparseTensorProto, folder: DataFolder | None) -> np.ndarray:
    """A sparse tensor, written out. Its positions are either linear ([n]) or one row of coordinates each ([n,
    rank]).
    """
    what = f"sparse tensor {text(sparse.values.name)!r}"
    shape = shape_of(sparse.dims, what)
    if prod(shape) > MAX_SPARSE_ELEMENTS:
        raise LimitError(f"{what} of shape {list(shape)} is too large to be written out")
    values, positions = array_of(sparse.values, folder, what), array_of(sparse.indices, folder, what)
    if positions.dtype != np.int64:
        raise ModelError(f"{what}: its positions are {positions.dtype}, and have to be int64")
    if values.ndim != 1 or positions.shape not in ((values.size,), (values.size, len(shape))):
        raise ModelError(
            f"{what}: values {list(values.shape)} and positions {list(positions.shape)} do not fit together"
        )
    limits = np.array(shape if positions.ndim == 2 else [prod(shape)], np.int64)
    if np.any(positions < 0) or np.any(positions.reshape(-1, limits.size) >= limits):
        raise ModelError(f"{what} has a position outside of its shape {list(shape)}")
    _check_places(positions, shape, what)
    out = np.zeros(shape, values.dtype) if values.dtype != object else np.full(shape, "", object)
    if positions.ndim == 2:
        out[tuple(positions.T)] = values
    else:
        out.reshape(-1)[positions] = values
    return out


def _check_places(positions: np.ndarray, shape: tuple[int, ...], what: str) -> None:
    """Raises ModelError for a place that is given twice: which value counts is not said anywhere. The standard wants
    places in ascending order, too; any other order means the same, and onnxruntime reads it.
    """
    steps = np.array([prod(shape[axis + 1 :]) for axis in range(len(shape))], np.int64)
    places = np.sort(positions if positions.ndim == 1 else positions @ steps)
    again = places[1:][places[1:] == places[:-1]]
    if again.size:
        place = [int(i) for i in np.unravel_index(again[0], shape)]
        raise ModelError(f"{what} has two values at the position {place}; each position may be given once")
