"""Random operators, and Dropout. `onnxc.primitives.random` says what numbers they draw."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from onnxc.errors import ModelError, ShapeError, UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim
from onnxc.ir.graph import Value
from onnxc.ops.common import dtype_of, is_narrow, scalar_of, widened
from onnxc.ops.registry import Flag, op
from onnxc.primitives.builder import Builder, constant_of
from onnxc.primitives.random import random_bits, random_key

Shape = tuple[Dim, ...]
Distribution = Callable[[Builder, Value, DType], Value]
"""Numbers of a dtype, float32 or float64, from 64 random bits for each."""


# ---------------------------------------------------------------- distributions


def uniform(b: Builder, bits: Value, dtype: DType) -> Value:
    """In [0, 1): multiples of 2^-24, or of 2^-53 for float64. Exact, so that comparisons are the same everywhere."""
    if dtype is dtypes.float64:
        return b.mul(b.cast(b.cast(b.binary("shr", bits, 11), dtypes.int64), dtype), 2.0**-53)
    word = b.binary("shr", b.cast(bits, dtypes.uint32), 8)
    return b.mul(b.cast(b.cast(word, dtypes.int32), dtype), 2.0**-24)


def normal(b: Builder, bits: Value, dtype: DType) -> Value:
    """Box and Muller, A Note on the Generation of Random Normal Deviates (1958): the cosine. None is beyond 6.8."""
    low = b.cast(b.cast(bits, dtypes.uint32), dtype)
    high = b.cast(b.cast(b.cast(b.binary("shr", bits, 32), dtypes.uint32), dtypes.int32), dtype)
    radius = b.sqrt(b.mul(b.log(b.mul(b.add(low, 0.5), 2.0**-32)), -2.0))
    return b.mul(radius, b.unary("cos", b.mul(high, math.pi * 2.0**-31)))


def _drawn(b: Builder, draw: Distribution, shape: Shape, dtype: DType, seed: float | None) -> Value:
    """A tensor of what a distribution gives, in float32 for narrower types."""
    bits = random_bits(b, shape, random_key(b, seed))
    return draw(b, bits, dtypes.float64 if dtype is dtypes.float64 else dtypes.float32)


def _tensor(
    b: Builder, draw: Distribution, shape: Shape, dtype: DType, seed: float | None, scale: float, shift: float
) -> Value:
    if not dtype.is_float or dtype.bits < 16:
        raise ModelError(f"random numbers of {dtype}; they are floats of 16, 32 or 64 bits")
    return b.cast(b.add(b.mul(_drawn(b, draw, shape, dtype, seed), scale), shift), dtype)


def _like(x: Value, dtype: int | None) -> DType:
    return x.dtype if dtype is None else dtype_of(dtype, "dtype")


def _static(shape: list[int]) -> Shape:
    if any(d < 0 for d in shape):
        raise ShapeError(f"a random tensor of the shape {shape}")
    return tuple(shape)


# ---------------------------------------------------------------- operators


@op("RandomNormal", 1)
def random_normal(
    b: Builder, *, dtype: int = 1, mean: float = 0.0, scale: float = 1.0, seed: float | None = None, shape: list[int]
) -> Value:
    return _tensor(b, normal, _static(shape), dtype_of(dtype, "dtype"), seed, scale, mean)


@op("RandomNormalLike", 1)
def random_normal_like(
    b: Builder, x: Value, *, dtype: int | None = None, mean: float = 0.0, scale: float = 1.0, seed: float | None = None
) -> Value:
    return _tensor(b, normal, x.shape, _like(x, dtype), seed, scale, mean)


@op("RandomUniform", 1)
def random_uniform(
    b: Builder, *, dtype: int = 1, high: float = 1.0, low: float = 0.0, seed: float | None = None, shape: list[int]
) -> Value:
    return _tensor(b, uniform, _static(shape), dtype_of(dtype, "dtype"), seed, high - low, low)


@op("RandomUniformLike", 1)
def random_uniform_like(
    b: Builder, x: Value, *, dtype: int | None = None, high: float = 1.0, low: float = 0.0, seed: float | None = None
) -> Value:
    return _tensor(b, uniform, x.shape, _like(x, dtype), seed, high - low, low)


@op("Bernoulli", 15)
def bernoulli(b: Builder, x: Value, *, dtype: int | None = None, seed: float | None = None) -> Value:
    """1 with the probability that the input gives: never for 0, always for 1."""
    wide = widened(b, x)
    return b.cast(b.lt(_drawn(b, uniform, x.shape, wide.dtype, seed), wide), _like(x, dtype))


@op("Multinomial", 7)
def multinomial(b: Builder, x: Value, *, dtype: int = 6, sample_size: int = 1, seed: float | None = None) -> Value:
    """Class numbers, drawn by logarithms of weights that need not add up to 1; infinite ones and NaN are never drawn.

    The class in whose part of the summed weights a uniform number lies.
    """
    if x.rank != 2 or sample_size < 0 or x.shape[1] == 0:
        raise ShapeError(f"Multinomial draws {sample_size} samples from {x.t}, which is not [batch, classes]")
    to = dtype_of(dtype, "dtype")
    if to not in (dtypes.int32, dtypes.int64):
        raise ModelError(f"Multinomial gives int32 or int64, not {to}")
    logits = b.cast(x, dtypes.float64)
    finite = b.lt(b.abs(logits), np.inf)
    logits = b.where(finite, logits, -np.inf)
    top = b.max(b.reduce("max", logits, [1], True), float(np.finfo(np.float64).min))  # of nothing but infinities
    until = b.one("cumsum", b.exp(b.sub(logits, top)), axis=1, exclusive=False, reverse=False)
    bits = random_bits(b, (x.shape[0], sample_size), random_key(b, seed))
    # 48 bits: times a number they stay below it, so that the last class of a positive weight is the last drawn.
    share = b.mul(b.cast(b.cast(b.binary("shr", bits, 16), dtypes.int64), dtypes.float64), 2.0**-48)
    total = b.slice(until, 1, x.shape[1] - 1, x.shape[1])
    at = b.reshape(b.mul(share, total), (x.shape[0], sample_size, 1))
    passed = b.le(b.reshape(until, (x.shape[0], 1, x.shape[1])), at)
    last = b.size_as(x.shape[1] - 1, dtypes.int32)  # of nothing but infinities; else it is no limit
    return b.cast(b.min(b.reduce("sum", b.cast(passed, dtypes.int32), [2]), last), to)


# ---------------------------------------------------------------- Dropout


@op("Dropout", 1, 6)
def dropout_1(b: Builder, x: Value, *, is_test: Flag = 0, ratio: float = 0.5) -> list[Value]:
    if is_test:
        return [x, b.full(x.shape, 1, x.dtype)]
    y, mask = _dropout(b, x, b.scalar(ratio, dtypes.float32), None, None)
    return [y, b.cast(mask, x.dtype)]


@op("Dropout", 7, 11)
def dropout_7(b: Builder, x: Value, *, ratio: float = 0.5, opset: int) -> list[Value]:
    """Inference: the identity, with a mask of zeros (onnxruntime's choice; the standard leaves it open)."""
    return [x, b.full(x.shape, 0, x.dtype if opset < 10 else dtypes.boolean)]


@op("Dropout", 12)
def dropout_12(
    b: Builder, x: Value, ratio: Value | None = None, training_mode: Value | None = None, *, seed: int | None = None,
) -> list[Value]:  # fmt: skip
    """Inference: the identity, with a mask of all true."""
    training, share = constant_of(training_mode), constant_of(ratio)
    never = training_mode is None or (training is not None and not training.item())
    if never or (share is not None and share.item() == 0):
        return [x, b.full(x.shape, True, dtypes.boolean)]
    chance = b.scalar(0.5, dtypes.float32) if ratio is None else b.detach(scalar_of(b, ratio))
    flag = None if training is not None or training_mode is None else scalar_of(b, training_mode)
    return list(_dropout(b, x, chance, flag, None if seed is None else float(seed)))


def _dropout(b: Builder, x: Value, ratio: Value, training: Value | None, seed: float | None) -> tuple[Value, Value]:
    """The elements that are kept, times 1 / (1 - ratio), and which they are.

    Args:
        ratio: the probability of being dropped, a float.
        training: whether any is, where that is not certain.
    """
    if not x.dtype.is_float:
        raise UnsupportedError(f"Dropout of {x.t} in training mode")
    kept = b.le(b.cast(ratio, dtypes.float32), _drawn(b, uniform, x.shape, dtypes.float32, seed))
    scale = b.div(1.0, b.sub(1.0, b.cast(ratio, dtypes.float64)))
    if training is not None:
        kept = b.or_(kept, b.not_(training))
        scale = b.where(training, scale, 1.0)
    wide = widened(b, x)
    # Of what is dropped 0, or NaN as of 0 times infinity; this way a derivative needs the mask alone, a byte each.
    y = b.where(kept, b.mul(wide, b.cast(scale, wide.dtype)), b.mul(b.detach(wide), 0.0))
    return b.cast(y, x.dtype) if is_narrow(x.dtype) else y, kept
