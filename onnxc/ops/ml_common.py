"""What operators of ai.onnx.ml share: input types, class labels, and what is made of scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxc.errors import ModelError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.graph import Value
from onnxc.ir.types import TensorType
from onnxc.primitives.builder import Builder
from onnxc.primitives.host import on_host

ML = "ai.onnx.ml"
TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")


def as_rows(b: Builder, x: Value, what: str) -> Value:
    """[rows, features]; a vector is one row."""
    if x.rank not in (1, 2):
        raise ModelError(f"{what} takes [rows, features], not {x.t}")
    return b.reshape(x, (1, *x.shape)) if x.rank == 1 else x


def as_float32(b: Builder, x: Value) -> Value:
    """A value as float32, in which these operators compute."""
    return b.cast(x, dtypes.float32)


def row(b: Builder, values: Sequence[float] | np.ndarray, dtype: DType = dtypes.float32) -> Value:
    """A constant vector."""
    return b.constant(np.asarray(values, dtype.numpy))


def transform_of(name: str, what: str) -> str:
    """A post transform's name, checked."""
    if name not in TRANSFORMS:
        raise ModelError(f"{what} has the post_transform {name!r}; {', '.join(TRANSFORMS)} exist")
    return name


def transformed(b: Builder, scores: Value, name: str) -> Value:
    """Scores [rows, classes] after a post transform."""
    if name == "LOGISTIC":
        return b.sigmoid(scores)
    if name == "SOFTMAX":
        return b.softmax(scores, 1)
    if name == "SOFTMAX_ZERO":
        return _softmax_zero(b, scores)
    return probit(b, scores) if name == "PROBIT" else scores


def _softmax_zero(b: Builder, scores: Value) -> Value:
    """Softmax in which what is zero stays zero and does not count."""
    top = b.reduce("max", scores, [1], True)
    counts = b.lt(1e-7, b.abs(scores))
    e = b.exp(b.sub(scores, top))
    total = b.reduce("sum", b.where(counts, e, 0.0), [1], True)
    return b.div(b.where(counts, e, b.mul(scores, b.exp(b.neg(top)))), total)


def probit(b: Builder, p: Value) -> Value:
    """The quantile of a normal distribution, with the approximation of the inverse of erf that onnxruntime takes.

    S. Winitzki, A handy approximation for the error function and its inverse (2008), with a = 0.147.
    """
    x = b.sub(b.mul(p, 2.0), 1.0)
    log = b.log(b.mul(b.sub(1.0, x), b.add(x, 1.0)))
    half = b.add(b.mul(log, 0.5), 2 / (3.14159 * 0.147))
    inside = b.sub(b.sqrt(b.sub(b.mul(half, half), b.mul(log, 1 / 0.147))), half)
    root = b.sqrt(inside)
    return b.mul(b.where(b.lt(x, 0.0), b.neg(root), root), 1.41421356)


def logistic_pair(b: Builder, score: Value) -> Value:
    """Probabilities [rows, 2] of a score [rows, 1] and its opposite."""
    return b.concat([b.sigmoid(b.neg(score)), b.sigmoid(score)], 1)


def labels_of(
    strings: Sequence[str] | None, ints: Sequence[int] | None, what: str
) -> tuple[Sequence[str] | None, Sequence[int] | None]:
    """The class labels that a classifier has: one of both kinds."""
    if bool(strings) == bool(ints):
        raise ModelError(f"{what} needs class labels, either strings or integers")
    return strings or None, ints or None


def labelled(b: Builder, at: Value, strings: Sequence[str] | None, ints: Sequence[int] | None) -> Value:
    """The labels at positions [rows]."""
    if ints:
        return b.gather(b.constant(np.asarray(ints, np.int64)), at, 0)
    assert strings
    (out,) = on_host(b, "ml_take", [at], [TensorType(dtypes.string, at.shape)], values=tuple(strings))
    return out


def same_length(what: str, **given: Sequence[object] | np.ndarray | None) -> int:
    """The length of attributes that run side by side; None are left out. ModelError where they differ."""
    lengths = {k: len(v) for k, v in given.items() if v is not None}
    if len(set(lengths.values())) > 1:
        raise ModelError(f"attributes of {what} have different lengths: {lengths}")
    return next(iter(lengths.values()), 0)
