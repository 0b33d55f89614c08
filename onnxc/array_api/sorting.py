"""Orders along an axis. Of equal elements the first comes first; NaN is greater than every number."""

from __future__ import annotations

from onnxc.array.core import Array, call
from onnxc.array_api.data_types import array
from onnxc.array_api.manipulation import axis_of
from onnxc.errors import InputError
from onnxc.ir.graph import Value
from onnxc.ops.reals import bits_of, ordered
from onnxc.primitives.builder import Builder


def order(b: Builder, x: Value, axis: int, descending: bool = False) -> Value:
    """The positions of the elements in their order, int64."""
    attrs = {"k": x.shape[axis], "axis": axis, "largest": descending}
    return b.emit("top_k", [_keys(b, x)], attrs)[1]


def _keys(b: Builder, x: Value) -> Value:
    """Integers in the order of the elements, both zeros equal."""
    if not x.dtype.is_float:
        return ordered(b, x)
    bits = bits_of(b, b.add(x, b.scalar(0.0, x.dtype)))  # -0.0 + 0.0 is 0.0
    greatest = b.scalar(bits.dtype.limits[1], bits.dtype)
    keys = b.where(b.lt(bits, 0), b.binary("bitxor", bits, greatest), bits)
    return b.where(b.isnan(x), greatest, keys)


def _sort(b: Builder, x: Value, *, axis: int, descending: bool) -> Value:
    return b.one("gather_elements", x, order(b, x, axis, descending), axis=axis)


def _argsort(b: Builder, x: Value, *, axis: int, descending: bool) -> Value:
    return order(b, x, axis, descending)


def _checked(name: str, x: Array, axis: int) -> tuple[Array, int]:
    x = array(x, name, "integral", "real floating", "bool")
    if x.ndim == 0:
        raise InputError(f"{name} of an array without axes")
    return x, axis_of(axis, x.ndim, name)


def sort(x: Array, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Array:
    """The elements in their order. (It is stable in any case.)"""
    x, at = _checked("sort", x, axis)
    return call(_sort, x, name="sort", axis=at, descending=bool(descending))  # type: ignore[no-any-return]


def argsort(x: Array, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Array:
    """The positions of the elements in their order. (It is stable in any case.)"""
    x, at = _checked("argsort", x, axis)
    return call(_argsort, x, name="argsort", axis=at, descending=bool(descending))  # type: ignore[no-any-return]
