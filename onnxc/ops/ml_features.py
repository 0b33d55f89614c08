"""What prepares features: scaling, imputing, encoding, and what connects tensors with strings and maps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from onnxc.errors import ModelError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import prod
from onnxc.ir.graph import Value
from onnxc.ir.types import MapType, SequenceType, TensorType
from onnxc.ops.ml_common import ML, as_float32, row
from onnxc.ops.registry import Flag, op
from onnxc.primitives.builder import Builder
from onnxc.primitives.host import on_host

SPREAD, SHORT = 8, 4096  # integers are looked up in a table of so many entries for each of them, or so many in all


def _fits(x: Value, values: Sequence[float], what: str) -> None:
    """Values for each feature of x, or one for all."""
    width = x.shape[-1] if x.rank else 1
    if len(values) != 1 and isinstance(width, int) and width != len(values):
        raise ModelError(f"{what} has {len(values)} values for {width} features")


# ---------------------------------------------------------------- numbers


@op("Scaler", 1, domain=ML)
def scaler(b: Builder, x: Value, *, offset: list[float] | None = None, scale: list[float] | None = None) -> Value:
    """(x - offset) * scale, in float32."""
    shift, factor = offset or [0.0], scale or [1.0]
    for values in (shift, factor):
        _fits(x, values, "Scaler")
    return b.mul(b.sub(as_float32(b, x), row(b, shift)), row(b, factor))


@op("Binarizer", 1, domain=ML)
def binarizer(b: Builder, x: Value, *, threshold: float = 0.0) -> Value:
    """1 where x is above the threshold, else 0."""
    limit = b.scalar(np.float32(threshold), x.dtype)
    return b.cast(b.lt(limit, x), x.dtype)


@op("Imputer", 1, domain=ML)
def imputer(
    b: Builder, x: Value, *, imputed_value_floats: list[float] | None = None,
    imputed_value_int64s: list[int] | None = None, replaced_value_float: float = 0.0, replaced_value_int64: int = 0,
) -> Value:  # fmt: skip
    """Values, one for each feature or one for all, in place of a certain number or of NaN."""
    if x.dtype.is_float:
        values: Sequence[float] | None = imputed_value_floats
        replaced: float = replaced_value_float
    else:
        values, replaced = imputed_value_int64s, replaced_value_int64
    if not values:
        raise ModelError(f"Imputer has no values for {x.t}")
    _fits(x, values, "Imputer")
    gone = b.isnan(x) if replaced != replaced else b.eq(x, b.scalar(replaced, x.dtype))
    return b.where(gone, b.constant(np.asarray(values).astype(x.dtype.numpy)), x)


@op("Normalizer", 1, domain=ML)
def normalizer(b: Builder, x: Value, *, norm: str = "MAX") -> Value:
    """Rows over their greatest element, the sum of magnitudes, or the root of the sum of squares, in float32."""
    wide = as_float32(b, x)
    axis = [x.rank - 1]
    if norm == "MAX":
        size = b.reduce("max", wide, axis, True)
    elif norm == "L1":
        size = b.reduce("sum", b.abs(wide), axis, True)
    elif norm == "L2":
        size = b.sqrt(b.reduce("sum", b.mul(wide, wide), axis, True))
    else:
        raise ModelError(f"Normalizer has the norm {norm!r}; MAX, L1 and L2 exist")
    return b.where(b.eq(size, 0.0), wide, b.div(wide, size))


@op("FeatureVectorizer", 1, domain=ML)
def feature_vectorizer(b: Builder, *xs: Value, inputdimensions: list[int] | None = None) -> Value:
    """Inputs [rows, features], or [features] of a single row, side by side in float32. Further axes are features too,
    as onnxruntime has it. Of each input as many features as its dimension says: others are cut off, missing ones 0.
    """
    if not all(x.rank for x in xs):
        raise ModelError("FeatureVectorizer takes at least vectors")
    sizes = list(inputdimensions or ())
    if len(sizes) not in (0, len(xs)) or min(sizes, default=0) < 0:
        raise ModelError(f"FeatureVectorizer of {len(xs)} inputs has the dimensions {sizes}")
    parts = []
    for x, size in zip_longest(xs, sizes):
        rows, *features = x.shape if x.rank > 1 else (1, *x.shape)
        part = b.reshape(as_float32(b, x), (rows, prod(features)))
        parts.append(part if size is None else _of_size(b, part, size))
    return b.concat(parts, 1)


def _of_size(b: Builder, x: Value, size: int) -> Value:
    """x [rows, features] with that many features: the first ones, or zeros behind them."""
    if x.shape[1] == size:
        return x
    padded = b.pad(x, (0, 0), (0, size))
    return b.slice(padded, 1, 0, size)


@op("ArrayFeatureExtractor", 1, domain=ML)
def array_feature_extractor(b: Builder, x: Value, index: Value) -> Value:
    """The elements of the last axis at these positions, none of which counts from the end; of a vector as a row."""
    if not x.rank:
        raise ModelError("ArrayFeatureExtractor takes at least a vector")
    if x.dtype is dtypes.string:
        shape = (*(x.shape[:-1] if x.rank > 1 else (1,)), index.t.size)
        return on_host(b, "ml_extract", [x, index], [TensorType(dtypes.string, shape)])[0]
    low = b.sub(index, b.size_as(x.shape[-1], index.dtype))  # out of bounds
    at = b.where(b.lt(index, 0), low, index)
    y = b.gather(x, b.reshape(at, (index.t.size,)), x.rank - 1)
    return b.reshape(y, (1, *y.shape)) if x.rank == 1 else y


# ---------------------------------------------------------------- categories


@op("OneHotEncoder", 1, domain=ML)
def one_hot_encoder(
    b: Builder, x: Value, *, cats_int64s: list[int] | None = None, cats_strings: list[str] | None = None,
    zeros: Flag = 1,
) -> Value:  # fmt: skip
    """A new last axis with a one at the place of each element among the categories."""
    if bool(cats_int64s) == bool(cats_strings) or (x.dtype is dtypes.string) != bool(cats_strings):
        raise ModelError(f"OneHotEncoder of {x.t} needs categories of its kind")
    if cats_strings:
        shape = (*x.shape, len(cats_strings))
        return on_host(
            b, "ml_one_hot", [x], [TensorType(dtypes.float32, shape)], categories=tuple(cats_strings), zeros=zeros
        )[0]
    whole = b.reshape(b.cast(x, dtypes.int64), (*x.shape, 1))
    hot = b.cast(b.eq(whole, b.constant(np.asarray(cats_int64s, np.int64))), dtypes.float32)
    if zeros:
        return hot
    missing = b.eq(b.reduce("max", hot, [x.rank], True), 0.0)
    # There is no third element to gather: an unknown category is an error of the run.
    at = b.where(missing, b.scalar(2, dtypes.int64), b.scalar(0, dtypes.int64))
    return b.mul(hot, b.gather(b.constant(np.ones(2, np.float32)), at, 0))


def search(b: Builder, x: Value, keys: np.ndarray) -> tuple[Value, Value]:
    """Where x is among keys, which are in order and differ: (whether it is there, its position). NaN is no key."""
    if x.dtype.is_integer and int(keys[-1]) - int(keys[0]) < max(SPREAD * len(keys), SHORT):
        return _look_up(b, x, keys)
    count = len(keys)
    table = b.constant(keys)
    at = b.expand(b.scalar(0, dtypes.int64), x.shape)
    step = 1 << max(count.bit_length() - 1, 0)
    while step:
        further = b.add(at, step)
        probe = b.gather(table, b.clip(b.sub(further, 1), 0, count - 1), 0)
        at = b.where(b.and_(b.le(further, count), b.lt(probe, x)), further, at)
        step //= 2
    at = b.clip(at, 0, count - 1)
    return b.eq(b.gather(table, at, 0), x), at


def _look_up(b: Builder, x: Value, keys: np.ndarray) -> tuple[Value, Value]:
    """As `search`, for integers that lie close together: by a table of all from the first key to the last."""
    low, high = int(keys[0]), int(keys[-1])
    near = b.clip(x, low, high)
    at, there = b.sub(b.cast(near, dtypes.int64), low), b.eq(near, x)
    if high - low + 1 == len(keys):
        return there, at
    table = np.full(high - low + 1, -1, np.int64)
    table[keys.astype(np.int64) - low] = np.arange(len(keys))
    found = b.gather(b.constant(table), at, 0)
    return b.and_(there, b.le(b.scalar(0, dtypes.int64), found)), b.max(found, 0)


def encoded(
    b: Builder, x: Value, keys: Sequence[Any], values: Sequence[Any], default: Any, to: DType, nan: bool = False
) -> Value:
    """Each element by the table from keys to values; the default where it has none. Of a repeated key the first.

    With `nan`, NaN is a key like any other; else it is in no table.
    """
    if len(keys) != len(values):
        raise ModelError(f"{len(keys)} keys for {len(values)} values")
    if x.dtype.is_float and not nan:
        known = [k == k for k in keys]
        keys, values = ([v for v, there in zip(given, known, strict=True) if there] for given in (keys, values))
    if x.dtype is dtypes.string or to is dtypes.string:
        kind = "string" if to is dtypes.string else to.name
        out = TensorType(to, x.shape)
        plain = [v.item() if isinstance(v, np.generic) else v for v in (*keys, *values, default)]
        n = len(keys)
        options = {"keys": tuple(plain[:n]), "values": tuple(plain[n : 2 * n]), "default": plain[-1], "to": kind}
        return on_host(b, "ml_encode", [x], [out], **options)[0]
    other = b.scalar(default, to)
    if not keys:
        return b.expand(other, x.shape)
    column, results = np.asarray(keys, x.dtype.numpy), np.asarray(values, to.numpy)
    order, places = np.unique(column, return_index=True)
    unordered = np.isnan(order) if x.dtype.is_float else np.zeros(len(order), bool)
    y = b.expand(other, x.shape)
    if not unordered.all():
        there, at = search(b, x, order[~unordered])
        y = b.where(there, b.gather(b.constant(results[places[~unordered]]), at, 0), y)
    return b.where(b.isnan(x), b.scalar(results[places[unordered][0]], to), y) if unordered.any() else y


@op("LabelEncoder", 1, 1, domain=ML)
def label_encoder_1(
    b: Builder, x: Value, *, classes_strings: Sequence[str] = (), default_int64: int = -1,
    default_string: str = "_Unused",
) -> Value:  # fmt: skip
    """Strings to their places in a list, or places to strings."""
    places = range(len(classes_strings))
    if x.dtype is dtypes.string:
        return encoded(b, x, classes_strings, places, default_int64, dtypes.int64)
    return encoded(b, x, places, classes_strings, default_string, dtypes.string)


@op("CategoryMapper", 1, domain=ML)
def category_mapper(
    b: Builder, x: Value, *, cats_int64s: Sequence[int] = (), cats_strings: Sequence[str] = (),
    default_int64: int = -1, default_string: str = "_Unused",
) -> Value:  # fmt: skip
    """Strings to integers, or integers to strings."""
    if x.dtype is dtypes.string:
        return encoded(b, x, cats_strings, cats_int64s, default_int64, dtypes.int64)
    return encoded(b, x, cats_int64s, cats_strings, default_string, dtypes.string)


@op("LabelEncoder", 2, domain=ML)
def label_encoder_2(
    b: Builder, x: Value, *, default_float: float = -0.0, default_int64: int = -1, default_string: str = "_Unused",
    default_tensor: np.ndarray | None = None, keys_floats: list[float] | None = None,
    keys_int64s: list[int] | None = None, keys_strings: list[str] | None = None,
    keys_tensor: np.ndarray | None = None, values_floats: list[float] | None = None,
    values_int64s: list[int] | None = None, values_strings: list[str] | None = None,
    values_tensor: np.ndarray | None = None, opset: int,
) -> Value:  # fmt: skip
    """Each element by a table of keys and values; from version 4 on NaN may be a key, and tensors may give them."""
    keys = _one_of("keys", keys_floats, keys_int64s, keys_strings, keys_tensor)
    lists = (
        (values_floats, default_float, dtypes.float32), (values_int64s, default_int64, dtypes.int64),
        (values_strings, default_string, dtypes.string),
    )  # fmt: skip
    values = _one_of("values", values_floats, values_int64s, values_strings, values_tensor)
    for given, default, to in lists:
        if given is not None:
            return encoded(b, x, keys, values, default, to, opset >= 4)
    assert values_tensor is not None
    to = dtypes.string if values_tensor.dtype == object else dtypes.from_numpy(values_tensor.dtype)
    own: dict[str, Any] = {"string": default_string, "float": default_float}
    fallback = own.get(to.kind, default_int64)
    if default_tensor is not None and default_tensor.size:
        if default_tensor.size > 1 or default_tensor.dtype != values_tensor.dtype:
            raise ModelError(f"the default_tensor of LabelEncoder is no single {to} as its values are")
        fallback = default_tensor.reshape(-1)[0]
    return encoded(b, x, keys, values, fallback, to, opset >= 4)


def _one_of(what: str, *given: Sequence[Any] | np.ndarray | None) -> Sequence[Any]:
    """The one list or tensor that is given."""
    found = [list(v.reshape(-1)) if isinstance(v, np.ndarray) else v for v in given if v is not None]
    if len(found) != 1:
        raise ModelError(f"LabelEncoder needs one attribute of {what}, and has {len(found)}")
    return found[0]


# ---------------------------------------------------------------- maps


@op("DictVectorizer", 1, domain=ML)
def dict_vectorizer(
    b: Builder, x: Value, *, int64_vocabulary: list[int] | None = None, string_vocabulary: list[str] | None = None,
) -> Value:  # fmt: skip
    """The values of a map in the order of a vocabulary, [1, keys]."""
    if bool(int64_vocabulary) == bool(string_vocabulary):
        raise ModelError("DictVectorizer needs one vocabulary, of integers or of strings")
    if not isinstance(x.type, MapType):
        raise ModelError(f"DictVectorizer takes a map, not {x.type}")
    words = tuple(string_vocabulary or int64_vocabulary or ())
    out = TensorType(x.type.value, (1, len(words)))
    return on_host(b, "ml_dict_vectorize", [x], [out], vocabulary=words, to=out.dtype.name)[0]


@op("CastMap", 1, domain=ML)
def cast_map(b: Builder, x: Value, *, cast_to: str = "TO_FLOAT", map_form: str = "DENSE", max_map: int = 1) -> Value:
    """The values of a map from integers, in the order of its keys or each at the place of its key."""
    kinds = {"TO_FLOAT": dtypes.float32, "TO_STRING": dtypes.string, "TO_INT64": dtypes.int64}
    if cast_to not in kinds or map_form not in ("DENSE", "SPARSE"):
        raise ModelError(f"CastMap has cast_to {cast_to!r} and map_form {map_form!r}")
    dense, to = map_form == "DENSE", kinds[cast_to]
    size = b.run_time.size() if dense and b.run_time is not None else max_map
    options = {"to": to.name, "dense": int(dense), "size": max_map}
    return on_host(b, "ml_cast_map", [x], [TensorType(to, (1, size))], **options)[0]


@op("ZipMap", 1, domain=ML)
def zip_map(
    b: Builder, x: Value, *, classlabels_int64s: list[int] | None = None,
    classlabels_strings: list[str] | None = None,
) -> Value:  # fmt: skip
    """Each row as a map from class labels to scores: a sequence of maps."""
    if bool(classlabels_int64s) == bool(classlabels_strings):
        raise ModelError("ZipMap needs class labels, either strings or integers")
    key = dtypes.string if classlabels_strings else dtypes.int64
    labels = tuple(classlabels_strings or classlabels_int64s or ())
    out = SequenceType(MapType(key, dtypes.float32))
    return on_host(b, "ml_zip_map", [as_float32(b, x)], [out], keys=labels)[0]
