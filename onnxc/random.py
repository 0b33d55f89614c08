"""Random numbers that follow from a key: the same key and shape give the same numbers, in any program, on any target.

    key = random.key(0)
    first, second = random.split(key)
    weights = random.normal(first, (64, 64)) * 0.1

A key is used once: for one draw, or to be split. Numbers come from Threefry, a generator that counts
(:mod:`onnxc.primitives.random`), so they fuse with what reads them, and a derivative sees those that its function drew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from onnxc.array.argument_errors import named_all
from onnxc.array.arguments import size_of, whole
from onnxc.array.core import Array, asarray, call_one
from onnxc.errors import InputError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Expr
from onnxc.ir.graph import Value
from onnxc.ops.random import normal as _box_muller
from onnxc.ops.random import uniform as _unit
from onnxc.primitives.base import broadcast_shapes
from onnxc.primitives.builder import Builder
from onnxc.primitives.random import random_bits

_KEYS = 1 << 62  # draws count from 0 on, keys that come of a key from here on


def key(seed: Any) -> Array:
    """A key: an array of uint64 without axes.

    Args:
        seed: an int from 0 to 2^64 - 1, or an array of ints (which gives an array of keys).

    Raises:
        InputError: it is no int, or out of range.
    """
    if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool):
        if not 0 <= seed < 1 << 64:
            raise InputError(f"a seed is from 0 to 2^64 - 1, not {seed}")
        return asarray(np.uint64(seed))
    found = asarray(seed)
    if found.dtype.kind not in "iu":
        raise InputError(f"a seed is an int, not {found.dtype}")
    return call_one(_to_key, found, name="key")


def _to_key(b: Builder, x: Value) -> Value:
    return b.cast(x, dtypes.uint64)


def split(key: Any, n: int = 2) -> Array:
    """`n` keys in the place of one: an array [n], which can be unpacked."""
    return call_one(_split, key_array(key), name="split", n=whole(n, "the number of keys", 0))


def _split(b: Builder, k: Value, *, n: int) -> Value:
    return b.one("threefry", b.reshape(k, (1,)), b.add(b.iota(n), _KEYS))


def fold_in(key: Any, number: Any) -> Array:
    """A key out of a key and an int, as that of a step: another key for each number from 0 to 2^62 - 1."""
    given = asarray(number)
    if given.dtype.kind not in "iu" or given.ndim:
        raise InputError(f"fold_in takes an int, not {given.dtype}{list(given.dims)}")
    return call_one(_fold_in, key_array(key), given, name="fold_in")


def _fold_in(b: Builder, k: Value, number: Value) -> Value:
    # Twice, so that the keys are not those of split.
    return b.one("threefry", b.one("threefry", k, b.scalar(_KEYS - 1, dtypes.int64)), b.cast(number, dtypes.int64))


def uniform(key: Any, shape: Sequence[Any] = (), low: float = 0.0, high: float = 1.0, dtype: Any = np.float32) -> Array:
    """Numbers in [low, high), of 24 random bits, or 53 for float64."""
    to = _float_type(dtype)
    return call_one(_uniform, key_array(key), name="uniform", shape=_shape(shape), low=low, high=high, to=to)


def _uniform(b: Builder, k: Value, *, shape: tuple[Any, ...], low: float, high: float, to: DType) -> Value:
    found = unit(b, k, shape, _wide(to))
    return b.cast(b.add(b.mul(found, float(high) - float(low)), float(low)), to)


def normal(
    key: Any, shape: Sequence[Any] = (), mean: float = 0.0, deviation: float = 1.0, dtype: Any = np.float32
) -> Array:  # fmt: skip
    """Normally distributed numbers (Box and Muller's; none is beyond 6.8 deviations)."""
    to = _float_type(dtype)
    return call_one(_normal, key_array(key), name="normal", shape=_shape(shape), mean=mean, deviation=deviation, to=to)


def _normal(b: Builder, k: Value, *, shape: tuple[Any, ...], mean: float, deviation: float, to: DType) -> Value:
    found = _box_muller(b, random_bits(b, shape, k), _wide(to))
    return b.cast(b.add(b.mul(found, float(deviation)), float(mean)), to)


def bernoulli(key: Any, p: Any = 0.5, shape: Sequence[Any] | None = None) -> Array:
    """Bools that are true with probability p, a number or floats that broadcast to the shape."""
    probability = asarray(np.float32(p)) if isinstance(p, (int, float)) else asarray(p)
    if not dtypes.from_numpy(probability.dtype).is_float:
        raise InputError(f"bernoulli: probabilities are floats, not {probability.dtype}")
    drawn = probability.dims if shape is None else _shape(shape)
    if broadcast_shapes(drawn, probability.dims) != drawn:
        raise InputError(f"bernoulli: p {probability.dims} does not broadcast to {drawn}")
    return call_one(_bernoulli, key_array(key), probability, name="bernoulli", shape=drawn)


def _bernoulli(b: Builder, k: Value, p: Value, *, shape: tuple[Any, ...]) -> Value:
    dtype = _wide(p.dtype)
    return b.lt(unit(b, k, shape, dtype), b.cast(p, dtype))


def randint(key: Any, shape: Sequence[Any], low: int, high: int, dtype: Any = np.int64) -> Array:
    """Ints from low to high - 1, by the remainder of 63 bits: all equally likely but for high - low in 2^63."""
    to = dtypes.from_numpy(np.dtype(dtype))
    low, high = whole(low, "low"), whole(high, "high")
    if not low < high:
        raise InputError(f"randint: low is less than high, not {low} and {high}")
    if not to.is_integer or low < to.limits[0] or high - 1 > to.limits[1]:
        raise InputError(f"randint: {to} does not hold {low} to {high - 1}")
    if high - low >= 1 << 63:
        raise InputError(f"randint: of at most 2^63 - 1 numbers, not of {low} to {high - 1}")
    return call_one(_randint, key_array(key), name="randint", shape=_shape(shape), low=low, high=high, to=to)


def _randint(b: Builder, k: Value, *, shape: tuple[Any, ...], low: int, high: int, to: DType) -> Value:
    bits = b.cast(b.binary("shr", random_bits(b, shape, k), 1), dtypes.int64)
    return b.cast(b.add(b.binary("mod", bits, high - low), low), to)


def categorical(key: Any, scores: Any, axis: int = -1) -> Array:
    """For each row along an axis a class, int64, with the probabilities softmax(scores) (by the greatest of the scores
    plus Gumbel's noise).
    """
    given = asarray(scores)
    if not dtypes.from_numpy(given.dtype).is_float or not given.ndim:
        raise InputError(f"categorical: scores are floats with an axis, not {given.dtype}{list(given.dims)}")
    return call_one(_categorical, key_array(key), given, name="categorical", axis=whole(axis, "axis"))


def _categorical(b: Builder, k: Value, scores: Value, *, axis: int) -> Value:
    wide = b.cast(scores, _wide(scores.dtype))
    half = 2.0**-54 if wide.dtype is dtypes.float64 else 2.0**-25  # of the distance of two numbers
    drawn = b.min(b.add(unit(b, k, scores.shape, wide.dtype), half), 1 - 2 * half)  # neither 0 nor 1: logs are finite
    noise = b.neg(b.log(b.neg(b.log(drawn))))
    return b.one("argmax", b.add(wide, noise), axis=b.axis(axis, scores.rank), last=False)


def unit(b: Builder, k: Value, shape: Sequence[Any], dtype: DType) -> Value:
    """Numbers in [0, 1), float32 or float64."""
    return _unit(b, random_bits(b, shape, k), dtype)


def key_array(key: Any) -> Array:
    """A key, checked. InputError where it is none."""
    found = asarray(key)
    if found.dtype != np.uint64 or found.ndim:
        raise InputError(
            f"a key is made by onnxc.random.key or split, and is not {found.dtype}{list(found.dims)}"
            + ("; of an array of keys take one" if found.dtype == np.uint64 else "")
        )
    return found


def _wide(dtype: DType) -> DType:
    return dtypes.float64 if dtype is dtypes.float64 else dtypes.float32


def _float_type(dtype: Any) -> DType:
    found = dtypes.from_numpy(np.dtype(dtype))
    if not found.is_float or found.bits < 16:
        raise InputError(f"random numbers are floats of 16, 32 or 64 bits, not {found}")
    return found


def _shape(shape: Any) -> tuple[Any, ...]:
    given = tuple(shape) if isinstance(shape, Iterable) and not isinstance(shape, Expr) else (shape,)
    return tuple(size_of(d, f"each size of the shape {shape!r}") for d in given)


__all__ = ["bernoulli", "categorical", "fold_in", "key", "normal", "randint", "split", "uniform"]

named_all(globals(), __all__)
