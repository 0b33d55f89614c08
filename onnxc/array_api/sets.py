"""What is different in an array. Each NaN is different from every other."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from onnxc.array.core import Array, concrete, content
from onnxc.array_api.data_types import array
from onnxc.array_api.searching import run_on_content
from onnxc.array_api.sorting import order
from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from onnxc.ops import numbers
from onnxc.primitives.builder import Builder
from onnxc.primitives.pairs import Number, each


class UniqueAll(NamedTuple):
    """The result of `unique_all`."""

    values: Array
    indices: Array
    inverse_indices: Array
    counts: Array


class UniqueCounts(NamedTuple):
    """The result of `unique_counts`."""

    values: Array
    counts: Array


class UniqueInverse(NamedTuple):
    """The result of `unique_inverse`."""

    values: Array
    inverse_indices: Array


def _order(b: Builder, x: Number) -> Value:
    """Complex numbers by their real, then by their imaginary parts."""
    if isinstance(x, Value):
        return order(b, x, 0)
    first = order(b, x.im, 0)
    return b.gather(first, order(b, b.gather(x.re, first, 0), 0), 0)


def _unique(b: Builder, x: Number) -> list[Number]:
    """Values, first positions, counts (vectors of which the first so many count), inverse positions, how many."""
    shape, size = x.shape, numbers.real(x).t.size
    x = each(lambda v: b.reshape(v, (size,)), x)
    by = _order(b, x)
    line = each(lambda v: b.gather(v, by, 0), x)
    before, after = (each(lambda v, at=at: b.slice(v, 0, at, size - 1 + at), line) for at in (0, 1))  # type: ignore[misc]
    first = b.concat([b.full((1,), True, dtypes.boolean), b.not_(numbers.eq(b, before, after))], 0)
    starts, count = b.emit("positions", [first])
    place = b.iota(size)
    starts = b.where(b.lt(place, count), starts, b.scalar(0, dtypes.int64))  # what follows them is left open
    ends = b.concat([b.slice(starts, 0, 1, size), b.full((1,), 0, dtypes.int64)], 0)
    ends = b.where(b.lt(b.add(place, 1), count), ends, b.size_as(size, dtypes.int64))
    number = b.sub(b.one("cumsum", b.cast(first, dtypes.int64), axis=0, exclusive=False, reverse=False), 1)
    inverse = b.one("scatter_elements", number, by, number, axis=0, reduction="none")
    return [
        each(lambda v: b.gather(v, starts, 0), line), b.gather(by, starts, 0), b.sub(ends, starts),
        b.reshape(inverse, shape), count,
    ]  # fmt: skip


def _all(x: Array, name: str) -> UniqueAll:
    x = array(x, name)
    instead = "call it outside of the traced function"
    if 0 in x.dims:
        content(x, name, instead)
        none = np.empty(0, np.int64)
        empty = np.empty(0, x.dtype)
        return UniqueAll(concrete(empty), concrete(none), concrete(np.empty(x.dims, np.int64)), concrete(none))
    values, indices, counts, inverse, count = run_on_content(_unique, x, name, instead)
    values, indices, counts = (v[: int(count)] for v in (values, indices, counts))
    return UniqueAll(concrete(values), concrete(indices), concrete(inverse), concrete(counts))


def unique_all(x: Array, /) -> UniqueAll:
    """The different elements in their order, the first position of each, where each element of x is in them, and how
    often each is there.

    Raises:
        TraceError: of an array that is computed in a trace: the shape of the result depends on it.
    """
    return _all(x, "unique_all")


def unique_counts(x: Array, /) -> UniqueCounts:
    """The different elements, and how often each is there. As `unique_all`, which see."""
    found = _all(x, "unique_counts")
    return UniqueCounts(found.values, found.counts)


def unique_inverse(x: Array, /) -> UniqueInverse:
    """The different elements, and where each element of x is in them. As `unique_all`, which see."""
    found = _all(x, "unique_inverse")
    return UniqueInverse(found.values, found.inverse_indices)


def unique_values(x: Array, /) -> Array:
    """The different elements, in their order. As `unique_all`, which see."""
    return _all(x, "unique_values").values
