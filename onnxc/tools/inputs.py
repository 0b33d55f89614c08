"""Inputs for a model that are read from files, and what is written to them."""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError

from onnxc.errors import InputError, LimitError, about_file
from onnxc.frontends.onnx_file import FIXED, MAX_BYTES
from onnxc.ir.graph import Graph
from onnxc.ir.types import TensorType
from onnxc.random_inputs import Array, Arrays
from onnxc.runtime.cpu import available_bytes


def inputs_of(path: str | os.PathLike[str], graph: Graph) -> Arrays:
    """Inputs from a file, as `read_inputs` has them, for a graph as imported."""
    types = {v.name: v.type.dtype.numpy for v in graph.inputs if isinstance(v.type, TensorType)}
    return read_inputs(path, graph.input_names, fixed=graph.metadata.get(FIXED, ()), types=types)


def read_inputs(
    path: str | os.PathLike[str], names: Sequence[str], *, optional: Collection[str] = (), fixed: Collection[str] = (),
    types: Mapping[str, np.dtype[Any]] | None = None,
) -> Arrays:  # fmt: skip
    """Inputs from an .npz (by input name; or in order as i0, i1, ..., or as numpy names what has no names: arr_0, ...)
    or a folder of input_0.pb, ...

    `names` are the model's inputs, `optional` are those of them that have a default, `fixed` are initializers that
    are none, though the model lists them, and `types` are the inputs' own. Raises InputError where the file does not
    fit.
    """
    place = Path(path)
    if not place.exists():
        raise InputError(f"there is no file {os.fspath(path)!r} to read inputs from")
    found = _read_folder(place, names) if place.is_dir() else _read_npz(place)
    found = _in_order(found, names, "i")
    constants = ", ".join(repr(name) for name in found if name in fixed)
    if constants:
        raise InputError(
            f"{os.fspath(path)!r} gives {constants}, which the model has initializers for, compiled as constants: "
            "--keep-input NAME of compile, run, explain and profile keeps them inputs"
        )
    missing = [name for name in names if name not in found and name not in optional]
    if missing:
        has = ", ".join(map(repr, found)) or "nothing"
        raise InputError(f"{os.fspath(path)!r} lacks the inputs {', '.join(map(repr, missing))}; it has {has}")
    own = types or {}
    return {name: as_declared(found[name], own.get(name)) for name in names if name in found}


def read_tensors(path: str | os.PathLike[str], names: Sequence[str], kind: str = "output") -> Arrays:
    """All tensors of an .npz (by name; or o0, o1, ... in the order of `names`), or of a folder of output_0.pb, ..."""
    place = Path(path)
    if not place.exists():
        raise InputError(f"there is no file {os.fspath(path)!r} to read {kind}s from")
    found = _read_folder(place, names, kind) if place.is_dir() else _read_npz(place)
    return _in_order(found, names, kind[0])


def _in_order(found: Arrays, names: Sequence[str], letter: str) -> Arrays:
    """Tensors that are numbered instead of named, by name."""
    for start in (letter, "arr_"):
        if not set(names) & set(found) and all(f"{start}{k}" in found for k in range(len(names))):
            return {name: found[f"{start}{k}"] for k, name in enumerate(names)}
    return found


# What numpy and zipfile raise for files that are damaged, encrypted or claim more than fits into memory.
_UNREADABLE = (
    OSError, ValueError, TypeError, AttributeError, EOFError, MemoryError, RuntimeError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def _read_npz(path: Path) -> Arrays:
    check_regular(path)
    if not zipfile.is_zipfile(path):  # numpy would take it for a pickle
        raise InputError(f"{os.fspath(path)!r} is not an .npz file: it is no archive of arrays")
    try:
        _check_unpacked(path)
        with np.load(path, allow_pickle=False) as stored:
            members = {name: f"{name}.npy" for name in stored.files}  # "x.npy" is the file of "x", or a tensor's name
            found = {name: stored[m if m in stored else name] for name, m in members.items()}
        other = [name for name, array in found.items() if not isinstance(array, np.ndarray)]
        if other:
            raise TypeError(f"{other[0]!r} is none")
        return _with_lists(found)
    except _UNREADABLE as error:
        raise InputError(f"{os.fspath(path)!r} is not an .npz file with plain arrays ({error})", cause=error) from error


def _check_unpacked(path: Path) -> None:
    """Raises LimitError for an archive that says to be larger, unpacked, than the memory that is left: no more than it
    says is read of a member.
    """
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    total, left = sum(m.file_size for m in members), available_bytes()
    if total > left:
        largest = max(members, key=lambda m: m.file_size)
        raise LimitError(
            f"{os.fspath(path)!r} has {total} bytes, unpacked, {largest.file_size} of them in "
            f"{largest.filename.removesuffix('.npy')!r}: {left} bytes of memory are left"
        )


def check_regular(path: Path) -> None:
    """Raises InputError where a path is not one of a regular file: to read from a pipe might never end."""
    if not path.is_file():
        raise InputError(f"{os.fspath(path)!r} is not a regular file")


def _with_lists(arrays: Arrays) -> dict[str, Any]:
    """`s[0]`, `s[1]`, ... as the list `s`."""
    lists: dict[str, list[Array]] = {}
    for name in arrays:
        base, bracket, rest = name.rpartition("[")
        if bracket and rest == f"{len(lists.get(base, ()))}]":
            lists.setdefault(base, []).append(arrays[name])
    return {**arrays, **lists}


def _read_folder(path: Path, names: Sequence[str], kind: str = "input") -> Arrays:
    """ONNX's own test data: input_K.pb is the K-th input, unless the tensor has the name of one."""
    numbered = [(int(m[1]), p) for p in path.iterdir() if (m := re.fullmatch(kind + r"_(\d+)\.pb", p.name))]
    found: Arrays = {}
    for number, file in sorted(numbered):
        check_regular(file)
        try:
            if file.stat().st_size >= MAX_BYTES:
                raise ValueError("it is over 2 GB, which protobuf cannot hold")
            tensor = onnx.TensorProto.FromString(file.read_bytes())
            array = onnx.numpy_helper.to_array(tensor)
        except (*_UNREADABLE, DecodeError, KeyError, onnx.checker.ValidationError) as error:
            raise InputError(f"{os.fspath(file)!r} is not a tensor ({error})", cause=error) from error
        name = tensor.name if tensor.name in names else names[number] if number < len(names) else str(number)
        found[name] = array
    return found


def write_arrays(path: str | os.PathLike[str], arrays: Mapping[str, Array | list[Any] | None]) -> None:
    """Writes an .npz at exactly this path. Types that numpy lacks become float32 (bfloat16) or bytes (int4).

    The values of a sequence are `name[0]`, `name[1]`, ...; an empty optional is left out. Raises InputError for texts
    that numpy would change.
    """
    plain = {name: _plain(a) for name, a in _flat(arrays)}
    with (
        about_file(path),
        zipfile.ZipFile(path, "w") as archive,
    ):  # np.savez has parameters that tensors may be named as
        for name, array in plain.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(array))


def _plain(array: Array) -> Array:
    """As .npz files have it without pickles, which nothing here reads: texts of one length, and numpy's own numbers."""
    if array.dtype.hasobject:
        texts = array.astype(np.str_)
        if not np.array_equal(texts, array):  # numpy takes NUL at the end of a text for its padding
            raise InputError("an .npz file holds no text that ends with a NUL character")
        return texts
    return array.astype(_carrier(array.dtype), copy=False)


def as_declared(array: Any, dtype: np.dtype[Any] | None) -> Any:
    """What `write_arrays` has made of numbers of this type, or numpy, which stores their bytes alone, as these numbers;
    all else as it is.
    """
    if not isinstance(array, np.ndarray) or dtype is None or dtype.type is np.void or _carrier(dtype) == dtype:
        return array
    if array.dtype == np.dtype((np.void, dtype.itemsize)):
        return array.view(dtype)
    if array.dtype != _carrier(dtype):
        return array
    found = array.astype(dtype)
    return found if np.array_equal(found.astype(array.dtype), array, equal_nan=array.dtype.kind == "f") else array


def _carrier(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type that numbers of a type have in an .npz: numpy writes its own alone."""
    if dtype.isbuiltin == 1:
        return dtype
    kind = next((kind for kind in ("uint", "int") if dtype.name.startswith(kind)), "float")
    return np.dtype({"uint": np.uint8, "int": np.int8, "float": np.float32}[kind])


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
    for name, value in values.items():
        if isinstance(value, list):
            yield from _flat({f"{name}[{k}]": v for k, v in enumerate(value)})
        elif value is not None:
            yield name, value


def parse_shapes(options: Sequence[str]) -> dict[str, tuple[int | str | None, ...]]:
    """Shapes as the command line gives them.

    >>> parse_shapes(["x=1,3,224,224", "ids=batch,?"])
    {'x': (1, 3, 224, 224), 'ids': ('batch', None)}
    """
    shapes: dict[str, tuple[int | str | None, ...]] = {}
    for option in options:
        name, equals, text = option.rpartition("=")
        if not equals or not name:
            raise InputError(f"a shape of an input is given as NAME=1,3,224,224, not {option!r}")
        shapes[name] = tuple(_dim(d.strip()) for d in text.split(",")) if text.strip() else ()
    return shapes


def _dim(text: str) -> int | str | None:
    if re.fullmatch(r"-?\d{1,18}", text, re.ASCII):
        return int(text)
    if re.fullmatch(r"-?\d+", text):
        raise InputError(f"the size of a dim has up to 18 digits, 0 to 9, and is not {text[:40]!r}")
    return None if text in ("?", "") else text


def parse_dims(options: Sequence[str]) -> dict[str, int]:
    """Sizes of dynamic dims as the command line gives them.

    >>> parse_dims(["batch=2", "sequence=77"])
    {'batch': 2, 'sequence': 77}
    """
    dims: dict[str, int] = {}
    for option in options:
        name, equals, text = option.rpartition("=")
        if not equals or not name or not re.fullmatch(r"\d{1,18}", text, re.ASCII):
            raise InputError(f"--dim gives the size of a dim as NAME=2, from 0 on, and not {option!r}")
        dims[name] = int(text)
    return dims
