"""Reductions over axes, arg-reductions, and cumulative sums. A reduced axis is dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnxc.errors import ShapeError
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, minimum, prod
from onnxc.ir.graph import Attrs
from onnxc.ir.types import TensorType
from onnxc.primitives.base import Kind, Primitive, register, summed_in_float32


def _reduce(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    axes = attrs["axes"]
    return (types[0].with_shape(tuple(d for i, d in enumerate(types[0].shape) if i not in axes)),)


def _arg(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    """`last`: of equal ones the last. With `empty`, a place among no elements is -1; else it is refused."""
    room = arg_room(types[0].shape, attrs)
    if isinstance(room, int) and room < 0:
        raise ShapeError(f"there is no greatest or least of no elements: axis {attrs['axis']} of {types[0]}")
    return (_reduce(types, {"axes": (attrs["axis"],)})[0].with_dtype(dtypes.int64),)


def arg_room(shape: Sequence[Dim], attrs: Attrs) -> Dim:
    """Negative where argmax or argmin is asked for a place among no elements."""
    axis = attrs["axis"]
    if attrs.get("empty"):
        return 0
    return shape[axis] - minimum(prod(d for i, d in enumerate(shape) if i != axis), 1)


def _numpy(f: Callable[..., Any]) -> Callable[..., np.ndarray]:
    def call(x: np.ndarray, axes: Sequence[int]) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.asarray(f(x, axis=tuple(axes))).astype(x.dtype)

    return call


def _extreme(f: Callable[..., Any], greatest: bool) -> Callable[..., np.ndarray]:
    """max or min; over no elements the least (greatest) value of the type."""

    def call(x: np.ndarray, axes: Sequence[int]) -> np.ndarray:
        if all(x.shape[a] for a in axes):
            return np.asarray(f(x, axis=tuple(axes))).astype(x.dtype)
        dtype = dtypes.from_numpy(x.dtype)
        whole = 2 ** (dtype.bits - (dtype.kind == "int"))
        least, most = -whole if dtype.kind == "int" else 0, whole - 1
        if dtype.is_float:
            least, most = -np.inf, np.inf
        shape = tuple(d for i, d in enumerate(x.shape) if i not in axes)
        return np.full(shape, least if greatest else most).astype(x.dtype)

    return call


def _arg_eval(f: Callable[..., Any]) -> Callable[..., np.ndarray]:
    def call(x: np.ndarray, axis: int, last: bool = False, empty: bool = False) -> np.ndarray:
        if empty and x.shape[axis] == 0:
            return np.full(np.delete(x.shape, axis), -1, np.int64)
        first = np.zeros(1, bool)
        if x.dtype.kind == "f" and np.isnan(x).any():  # as onnxruntime: a NaN counts at position 0 alone
            first = np.isnan(np.take(x, 0, axis))
            x = np.where(np.isnan(x), -np.inf if f is np.argmax else np.inf, x)
        at = f(x, axis=axis) if not last else x.shape[axis] - 1 - f(np.flip(x, axis), axis=axis)
        return np.where(first, 0, at).reshape(np.shape(at)).astype(np.int64)

    return call


def _cumsum(x: np.ndarray, axis: int, exclusive: bool = False, reverse: bool = False) -> np.ndarray:
    y = np.moveaxis(np.flip(x, axis) if reverse else x, axis, 0)
    if exclusive:
        y = np.concatenate([np.zeros_like(y[:1]), y[:-1]])
    with np.errstate(all="ignore"):
        out = np.moveaxis(np.cumsum(y, axis=0, dtype=x.dtype), 0, axis)
    return np.flip(out, axis) if reverse else out


register(Primitive("reduce_sum", Kind.REDUCTION, _reduce, summed_in_float32(_numpy(np.sum))))
register(Primitive("reduce_prod", Kind.REDUCTION, _reduce, summed_in_float32(_numpy(np.prod)), True))
register(Primitive("reduce_max", Kind.REDUCTION, _reduce, _extreme(np.max, True)))
register(Primitive("reduce_min", Kind.REDUCTION, _reduce, _extreme(np.min, False)))
register(Primitive("argmax", Kind.REDUCTION, _arg, _arg_eval(np.argmax)))
register(Primitive("argmin", Kind.REDUCTION, _arg, _arg_eval(np.argmin)))
register(Primitive("cumsum", Kind.OPAQUE, lambda types, attrs: (types[0],), summed_in_float32(_cumsum)))
