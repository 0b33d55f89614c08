"""Tests of all elements, and differences of neighbours."""

from __future__ import annotations

from onnxc.array.core import Array, call
from onnxc.array_api.data_types import array, result_type
from onnxc.array_api.elementwise import logical_xor, subtract
from onnxc.array_api.manipulation import axis_of, concat
from onnxc.array_api.searching import truth
from onnxc.array_api.statistical import Axis, reduced_axes
from onnxc.errors import InputError
from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from onnxc.primitives.builder import Builder
from onnxc.primitives.pairs import Number


def _test(b: Builder, x: Number, *, op: str, axes: tuple[int, ...], keepdims: bool) -> Value:
    bits = b.cast(truth(b, x), dtypes.uint8)
    return b.lt(b.scalar(0, dtypes.uint8), b.reduce(op, bits, axes, keepdims))


def all(x: Array, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """Whether no element is zero; true of nothing."""
    x = array(x, "all")
    return call(_test, x, name="all", op="min", axes=reduced_axes(x, axis, "all"), keepdims=keepdims)  # type: ignore[no-any-return]


def any(x: Array, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """Whether an element is not zero; false of nothing."""
    x = array(x, "any")
    return call(_test, x, name="any", op="max", axes=reduced_axes(x, axis, "any"), keepdims=keepdims)  # type: ignore[no-any-return]


def diff(
    x: Array, /, *, axis: int = -1, n: int = 1, prepend: Array | None = None, append: Array | None = None
) -> Array:
    """The differences of neighbours along an axis, `n` times, with further elements before and after."""
    x = array(x, "diff")
    if n < 0:
        raise ValueError(f"diff of the order {n}")
    if x.ndim == 0:
        raise InputError("diff of an array without axes")
    at = axis_of(axis, x.ndim, "diff")
    given = [v for v in (prepend, x, append) if v is not None]
    result_type(*given)
    x = concat(given, axis=at) if len(given) > 1 else x
    lead = (slice(None),) * at
    less = logical_xor if x.dtype.kind == "b" else subtract
    size = x.dims[at]
    for _ in range(min(n, size) if isinstance(size, int) else n):  # more would leave as little: nothing
        x = less(x[(*lead, slice(1, None))], x[(*lead, slice(None, -1))])
    return x
