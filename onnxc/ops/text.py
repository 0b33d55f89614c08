"""Strings, and images as files: all of it runs on the host, in functions of `onnxc.host`."""

from __future__ import annotations

from typing import Literal

from onnxc.errors import ModelError, NeedsContentError, ShapeError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim
from onnxc.ir.graph import Value
from onnxc.ir.types import TensorType
from onnxc.ops.registry import Flag, op
from onnxc.primitives.base import broadcast_shapes
from onnxc.primitives.builder import Builder
from onnxc.primitives.host import on_host


def _size(b: Builder, x: Value, what: str) -> Dim:
    """A size that only a run will tell."""
    if b.run_time is None:
        raise NeedsContentError(f"the size of {what} depends on data, which is not supported here", x)
    return b.run_time.size()


def convert_text(b: Builder, x: Value, to: DType) -> Value:
    """A cast from strings, or to them."""
    if x.dtype is to:
        return x
    if to is dtypes.string:
        (y,) = on_host(b, "to_strings", [x], [x.t.with_dtype(to)])
    else:
        (y,) = on_host(b, "from_strings", [x], [x.t.with_dtype(to)], dtype=to.numpy.name)
    return y


def equal_text(b: Builder, x: Value, y: Value) -> Value:
    """Which elements of two string tensors are the same."""
    (out,) = on_host(b, "string_equal", [x, y], [TensorType(dtypes.boolean, broadcast_shapes(x.shape, y.shape))])
    return out


@op("StringConcat", 20)
def string_concat(b: Builder, x: Value, y: Value) -> Value:
    (out,) = on_host(b, "string_concat", [x, y], [TensorType(dtypes.string, broadcast_shapes(x.shape, y.shape))])
    return out


@op("StringSplit", 20)
def string_split(b: Builder, x: Value, *, delimiter: str = "", maxsplit: int | None = None) -> list[Value]:
    """The parts, and how many there are of each string."""
    types = [x.t.with_shape((*x.shape, _size(b, x, "StringSplit"))), x.t.with_dtype(dtypes.int64)]
    return [*on_host(b, "string_split", [x], types, delimiter=delimiter, maxsplit=maxsplit)]


@op("RegexFullMatch", 20)
def regex_full_match(b: Builder, x: Value, *, pattern: str = "") -> Value:
    (y,) = on_host(b, "regex_full_match", [x], [x.t.with_dtype(dtypes.boolean)], pattern=pattern)
    return y


@op("StringNormalizer", 10)
def string_normalizer(
    b: Builder, x: Value, *, case_change_action: Literal["LOWER", "UPPER", "NONE"] = "NONE",
    is_case_sensitive: Flag = 0, locale: str = "en_US", stopwords: list[str] | None = None,
) -> Value:  # fmt: skip
    if x.rank not in (1, 2):
        raise ShapeError(f"StringNormalizer of {x.t}: it takes [C] or [1, C]")
    shape = (*(1,) * (x.rank - 1), _size(b, x, "StringNormalizer"))
    (y,) = on_host(
        b, "string_normalizer", [x], [x.t.with_shape(shape)], case_change_action=case_change_action,
        is_case_sensitive=is_case_sensitive, locale=locale, stopwords=tuple(stopwords or ()),
    )  # fmt: skip
    return y


@op("TfIdfVectorizer", 9)
def tfidf_vectorizer(
    b: Builder, x: Value, *, max_gram_length: int, max_skip_count: int, min_gram_length: int,
    mode: Literal["TF", "IDF", "TFIDF"], ngram_counts: list[int], ngram_indexes: list[int],
    pool_int64s: list[int] | None = None, pool_strings: list[str] | None = None, weights: list[float] | None = None,
) -> Value:  # fmt: skip
    if (pool_strings is not None) != (x.dtype is dtypes.string):
        raise ModelError(f"TfIdfVectorizer of {x.t} has a pool of {'strings' if pool_strings else 'integers'}")
    width = max(ngram_indexes, default=-1) + 1
    shape = (x.shape[0], width) if x.rank == 2 else (width,)
    (y,) = on_host(
        b, "tfidf_vectorizer", [x], [TensorType(dtypes.float32, shape)], mode=mode, min_gram_length=min_gram_length,
        max_gram_length=max_gram_length, max_skip_count=max_skip_count, ngram_counts=tuple(ngram_counts),
        ngram_indexes=tuple(ngram_indexes), pool_int64s=tuple(pool_int64s or ()),
        pool_strings=tuple(pool_strings or ()), weights=tuple(weights or ()),
    )  # fmt: skip
    return y


@op("ImageDecoder", 20)
def image_decoder(b: Builder, encoded: Value, *, pixel_format: Literal["RGB", "BGR", "Grayscale"] = "RGB") -> Value:
    """uint8 [height, width, channels]."""
    shape = (_size(b, encoded, "an image"), _size(b, encoded, "an image"), 1 if pixel_format == "Grayscale" else 3)
    (y,) = on_host(b, "image_decoder", [encoded], [TensorType(dtypes.uint8, shape)], pixel_format=pixel_format)
    return y
