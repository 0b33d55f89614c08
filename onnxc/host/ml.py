"""What ai.onnx.ml does with strings and maps: object arrays of ``str``, dicts, lists of dicts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxc.errors import RunError
from onnxc.host.registry import host_function

Array = np.ndarray[Any, Any]
MOST_KEPT = 16  # tables that are kept from call to call


def _strings(values: Sequence[str], shape: tuple[int, ...]) -> Array:
    out = np.empty(len(values), object)
    out[:] = values
    return out.reshape(shape)


def _column(values: Sequence[Any], kind: str) -> Array:
    """Values as an array: ``string``, or a numpy dtype's name."""
    return _strings(values, (len(values),)) if kind == "string" else np.asarray(values, kind)


@host_function
def ml_take(at: Array, values: tuple[str, ...]) -> Array:
    """The strings at positions."""
    if at.size and not 0 <= at.min() <= at.max() < len(values):
        raise RunError(f"a label is outside of the {len(values)} that there are")
    return _strings([values[k] for k in at.ravel().tolist()], at.shape)


def _key(value: Any) -> Any:
    """NaN is a key like any other."""
    return None if isinstance(value, float) and value != value else value


@host_function
def ml_encode(x: Array, keys: tuple[Any, ...], values: tuple[Any, ...], default: Any, to: str) -> Array:
    """Each element by the table from keys to values; `default` where it has none. `to` is ``string`` or a dtype."""
    elements = x.ravel().tolist()
    if x.dtype.kind == "f":
        elements = [_key(v) for v in elements]
    at = np.fromiter(map(_places(keys).get, elements, itertools.repeat(len(keys))), np.intp, len(elements))
    return _column((*values, default), to)[at].reshape(x.shape)


@functools.lru_cache(maxsize=MOST_KEPT)
def _places(keys: tuple[Any, ...]) -> dict[Any, int]:
    """Where each key is; of a repeated one the first place."""
    return {_key(k): at for at, k in reversed(list(enumerate(keys)))}


@host_function
def ml_one_hot(x: Array, categories: tuple[str, ...], zeros: int) -> Array:
    """A new last axis with a one at the place of each element among the categories; none, if `zeros`, for others."""
    table = {c: k for k, c in enumerate(categories)}
    out = np.zeros((x.size, len(categories)), np.float32)
    for k, value in enumerate(x.ravel().tolist()):
        at = table.get(value)
        if at is not None:
            out[k, at] = 1
        elif not zeros:
            raise RunError("an input of OneHotEncoder is none of its categories")
    return out.reshape(*x.shape, len(categories))


def _map(x: Any, what: str) -> Mapping[Any, Any]:
    if not isinstance(x, Mapping):
        raise RunError(f"{what} takes a map, not a {type(x).__name__}")
    return x


@host_function
def ml_dict_vectorize(x: Any, vocabulary: tuple[Any, ...], to: str) -> Array:
    """The values of a map in the order of a vocabulary, [1, keys]; 0 or an empty string where it has none."""
    entries = _map(x, "DictVectorizer")
    nothing: Any = "" if to == "string" else 0
    return _column([entries.get(k, nothing) for k in vocabulary], to).reshape(1, -1)


@host_function
def ml_cast_map(x: Any, to: str, dense: int, size: int) -> Array:
    """The values of a map in the order of its keys, [1, values]; if not `dense`, each at the place of its key."""
    entries = _map(x, "CastMap")
    if any(not isinstance(k, (int, np.integer)) for k in entries):
        raise RunError("CastMap takes a map of integers")
    keys = sorted(entries)
    nothing: Any = "0.f" if to == "string" else 0  # onnxruntime's
    if dense:
        values = [_cast(entries[k], to) for k in keys]
    else:
        if keys and keys[0] < 0:
            raise RunError(f"CastMap: the key {keys[0]} is negative")
        values = [_cast(entries[k], to) if k in entries else nothing for k in range(size)]
    return _column(values, to).reshape(1, -1)


def _cast(value: Any, to: str) -> Any:
    if to == "string":
        return value if isinstance(value, str) else f"{float(value):.6f}"
    try:
        return float(value) if to == "float32" else int(float(value))
    except (ValueError, OverflowError) as error:
        raise RunError("CastMap: a value is no number", cause=error) from error


@host_function
def ml_zip_map(x: Array, keys: tuple[Any, ...]) -> tuple[list[dict[Any, float]]]:
    """Each row of x [rows, keys], or x [keys] itself, as a map from keys."""
    rows = x.reshape(1, -1) if x.ndim == 1 else x
    if rows.shape[-1] != len(keys):
        raise RunError(f"ZipMap has {len(keys)} keys for {rows.shape[-1]} columns")
    return ([dict(zip(keys, values, strict=True)) for values in rows.tolist()],)


@host_function
def ml_extract(x: Array, at: Array) -> Array:
    """The strings of the last axis at these positions; of a vector as a row."""
    places = at.ravel()
    if places.size and not 0 <= places.min() <= places.max() < x.shape[-1]:
        raise RunError(f"a position is outside of the {x.shape[-1]} features")
    rows = x.reshape(1, -1) if x.ndim == 1 else x
    return np.asarray(rows[..., places])
