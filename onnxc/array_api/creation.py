"""Functions that make arrays: of Python's and numpy's data, of one value, of ranges."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from onnxc.array.core import Array, call, concrete
from onnxc.array.core import asarray as as_array
from onnxc.array.sizes import value_of_size
from onnxc.array_api.data_types import (
    DEFAULTS,
    Dtype,
    Scalar,
    array,
    astype,
    checked_device,
    checked_dtype,
    copied,
    is_kind,
    name_of,
    number,
    result_type,
)  # fmt: skip
from onnxc.array_api.manipulation import broadcast_to, dims, reshape, stack
from onnxc.errors import InputError
from onnxc.frontends.trace import current
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, Expr, ceildiv, maximum
from onnxc.ir.graph import Value
from onnxc.ops.indexing import triangle
from onnxc.primitives.builder import Builder
from onnxc.primitives.pairs import Number, each

Shape = int | Sequence[Dim]
Device = str | None


def asarray(
    obj: Any, /, *, dtype: Dtype | None = None, device: Device = None, copy: builtins.bool | None = None
) -> Array:
    """An array of what is given: numbers, nested lists of numbers (and of arrays), arrays of this or another library.

    Raises:
        TypeError: elements of no dtype of the standard, or a dtype that they do not convert to.
        ValueError: `copy=False` where only a copy is possible.
    """
    checked_device(device)
    wanted = None if dtype is None else checked_dtype(dtype)
    if isinstance(obj, (Array, Expr, np.ndarray, np.generic)):
        x = as_array(obj)
        if copy is False and wanted not in (None, x.dtype):
            raise ValueError(f"{x.dtype} becomes {wanted} by a copy only")
        x = x if wanted is None else astype(x, wanted, copy=False)
        return copied(x) if copy else x
    if copy is False:
        return from_dlpack(obj, copy=False) if hasattr(obj, "__dlpack__") else _no_view(obj)
    try:
        if isinstance(obj, (list, tuple)) and _has_traced(obj):
            return stack([asarray(x, dtype=dtype) for x in obj])
        return _of_data(obj, wanted)
    except RecursionError:
        raise ValueError("the lists are too deep: one may hold itself") from None


def _no_view(obj: Any) -> Array:
    raise ValueError(f"a {type(obj).__name__} becomes an array by a copy only")


def _has_traced(obj: Any) -> builtins.bool:
    if isinstance(obj, (list, tuple)):
        return any(map(_has_traced, obj))
    return isinstance(obj, Expr) or (isinstance(obj, Array) and obj.is_traced)


def _of_data(obj: Any, dtype: Dtype | None) -> Array:
    if hasattr(obj, "__dlpack__") and not hasattr(obj, "__array__"):
        obj = np.from_dlpack(obj)
    if isinstance(obj, (builtins.bool, int, float, complex)) and dtype is not None:
        return number(obj, dtype)
    data = np.array(obj, dtype)
    if data.dtype == object or data.dtype.kind in "USMmV":
        raise TypeError(f"elements of the dtype {data.dtype} are none of the array API standard")
    return as_array(data)


def from_dlpack(x: object, /, *, device: Device = None, copy: builtins.bool | None = None) -> Array:
    """An array of another library, through DLPack: without a copy where that is possible."""
    checked_device(device)
    if isinstance(x, Array):
        return copied(x) if copy else x
    data = np.from_dlpack(x, copy=copy)  # type: ignore[arg-type]
    return as_array(data)


# ---------------------------------------------------------------- one value


def _fill(b: Builder, value: Number, *, shape: tuple[Dim, ...]) -> Number:
    return each(lambda v: b.expand(v, shape), value)


def filled(value: Array, shape: Sequence[Dim]) -> Array:
    """One value in a shape. In a trace it stays one value, whatever the size."""
    if current() is not None or value.is_traced:
        return call(_fill, value, name="full", shape=tuple(shape))  # type: ignore[no-any-return]
    assert value._data is not None
    return concrete(np.full(tuple(shape), value._data, value.dtype))


def full(
    shape: Shape, fill_value: Scalar | Array, *, dtype: Dtype | None = None, device: Device = None
) -> Array:  # fmt: skip
    """One value everywhere; the dtype is the default one of its kind."""
    checked_device(device)
    if not isinstance(fill_value, (builtins.bool, int, float, complex)):
        value = array(fill_value, "full")
        return filled(value if dtype is None else astype(value, checked_dtype(dtype), copy=False), dims(shape))
    kind = "complex floating" if isinstance(fill_value, complex) else "real floating"
    if dtype is None and isinstance(fill_value, builtins.bool):
        wanted = np.dtype(builtins.bool)
    elif dtype is None:
        wanted = DEFAULTS["integral" if isinstance(fill_value, int) else kind]
    else:
        wanted = checked_dtype(dtype)
    return filled(number(fill_value, wanted), dims(shape))


def zeros(shape: Shape, *, dtype: Dtype | None = None, device: Device = None) -> Array:
    return full(shape, 0, dtype=DEFAULTS["real floating"] if dtype is None else dtype, device=device)


def ones(shape: Shape, *, dtype: Dtype | None = None, device: Device = None) -> Array:
    return full(shape, 1, dtype=DEFAULTS["real floating"] if dtype is None else dtype, device=device)


def empty(shape: Shape, *, dtype: Dtype | None = None, device: Device = None) -> Array:
    """Zeros: what an array holds is never left open here."""
    return zeros(shape, dtype=dtype, device=device)


def full_like(x: Array, /, fill_value: Scalar, *, dtype: Dtype | None = None, device: Device = None) -> Array:
    return full(array(x, "full_like").dims, fill_value, dtype=x.dtype if dtype is None else dtype, device=device)


def zeros_like(x: Array, /, *, dtype: Dtype | None = None, device: Device = None) -> Array:
    return full_like(x, 0, dtype=dtype, device=device)


def ones_like(x: Array, /, *, dtype: Dtype | None = None, device: Device = None) -> Array:
    return full_like(x, 1, dtype=dtype, device=device)


def empty_like(x: Array, /, *, dtype: Dtype | None = None, device: Device = None) -> Array:
    """Zeros: what an array holds is never left open here."""
    return zeros_like(x, dtype=dtype, device=device)


# ---------------------------------------------------------------- ranges


def _steps(b: Builder, *, start: Dim, size: Dim, step: int, dtype: str) -> Value:
    """start, start + step, ... with a size that is an expression."""
    steps = b.add(b.mul(b.iota(size), step), b.size_as(start, dtypes.int64))
    return b.cast(steps, dtypes.BY_NAME[dtype])


def arange(
    start: float | Dim, /, stop: float | Dim | None = None, step: float = 1, *, dtype: Dtype | None = None,
    device: Device = None,
) -> Array:  # fmt: skip
    """start, start + step, ... up to, not with, stop. In a trace with dynamic dims `start` and `stop` may be sizes."""
    checked_device(device)
    given: tuple[Any, ...] = (0, start, step) if stop is None else (start, stop, step)
    start, stop, step = (int(v) if isinstance(v, np.integer) else v for v in given)
    whole = all(isinstance(v, (int, Expr)) for v in (start, stop, step))
    found = DEFAULTS["integral" if whole else "real floating"] if dtype is None else checked_dtype(dtype)
    if step == 0:
        raise ValueError("arange has a step of zero")
    if isinstance(start, Expr) or isinstance(stop, Expr):
        if not isinstance(step, int) or isinstance(start, float) or isinstance(stop, float):
            raise TypeError("arange up to a dynamic size is of integers")
        count = ceildiv(stop - start, step) if step > 0 else ceildiv(start - stop, -step)
        return call(  # type: ignore[no-any-return]
            _steps, name="arange", start=start, size=maximum(count, 0), step=step, dtype=name_of(found)
        )
    return concrete(np.arange(start, stop, step, dtype=found))


def _spaced(
    b: Builder, *, start: float, stop: float, size: Dim, endpoint: builtins.bool, dtype: str
) -> Value:  # fmt: skip
    """As numpy's: the last number is `stop` itself."""
    number = b.iota(size)
    steps = b.size_as(maximum(size - 1, 1) if endpoint else size, dtypes.float64)
    found = b.add(b.mul(b.cast(number, dtypes.float64), b.div(b.scalar(stop - start, dtypes.float64), steps)), start)
    if endpoint:
        is_last = b.and_(b.eq(number, b.size_as(size - 1, dtypes.int64)), b.lt(0, number))
        found = b.where(is_last, stop, found)
    return b.cast(found, dtypes.BY_NAME[dtype])


def linspace(
    start: complex, stop: complex, /, num: int | Expr, *, dtype: Dtype | None = None, device: Device = None,
    endpoint: builtins.bool = True,
) -> Array:  # fmt: skip
    """`num` numbers, evenly spaced from start to stop, with stop among them where it is the `endpoint`."""
    checked_device(device)
    complex_ = builtins.any(type(v) is complex for v in (start, stop))
    found = DEFAULTS["complex floating" if complex_ else "real floating"] if dtype is None else checked_dtype(dtype)
    if complex_ and not is_kind(found, "complex floating"):
        raise TypeError(f"linspace between complex numbers cannot be of {found}")
    if isinstance(num, Expr):
        if complex_ or not is_kind(found, "real floating"):
            raise TypeError("linspace of a dynamic size is of real floats")
        ends = {"start": float(start.real), "stop": float(stop.real)}
        return call(  # type: ignore[no-any-return]
            _spaced, name="linspace", size=num, endpoint=bool(endpoint), dtype=name_of(found), **ends
        )
    if num < 0:
        raise ValueError(f"linspace of {num} numbers")
    return concrete(np.linspace(start, stop, num, dtype=found, endpoint=endpoint))


def eye(
    n_rows: Dim, n_cols: Dim | None = None, /, *, k: int = 0, dtype: Dtype | None = None, device: Device = None
) -> Array:
    """Ones on the diagonal k, zeros elsewhere."""
    checked_device(device)
    found = DEFAULTS["real floating"] if dtype is None else checked_dtype(dtype)
    n_cols = n_rows if n_cols is None else n_cols
    if isinstance(n_rows, Expr) or isinstance(n_cols, Expr):
        shape = dims((n_rows, n_cols))
        return call(_eye, name="eye", shape=shape, k=value_of_size(k, "a diagonal"), dtype=name_of(found))  # type: ignore[no-any-return]
    return concrete(np.eye(n_rows, n_cols, k, dtype=found))


def _eye(b: Builder, *, shape: tuple[Dim, Dim], k: int, dtype: str) -> Value:
    row = b.reshape(b.add(b.iota(shape[0]), k), (shape[0], 1))
    return b.cast(b.eq(row, b.iota(shape[1])), dtypes.BY_NAME[dtype])


def meshgrid(*arrays: Array, indexing: Literal["xy", "ij"] = "xy") -> list[Array]:
    """The coordinates of a grid: each vector laid along an axis of its own; `xy` exchanges the first two."""
    if indexing not in ("xy", "ij"):
        raise ValueError(f"the indexing of meshgrid is 'xy' or 'ij', not {indexing!r}")
    given = [array(x, "meshgrid") for x in arrays]
    if builtins.any(x.ndim > 1 for x in given):
        raise InputError(f"meshgrid is of vectors, not of the shapes {[x.dims for x in given]}")
    if given:
        result_type(*given)
    axes = list(range(len(given)))
    if indexing == "xy" and len(given) > 1:
        axes[:2] = [1, 0]
    sizes = [x.dims[0] if x.ndim else 1 for x in given]
    shape = [sizes[axes.index(k)] for k in range(len(given))]
    return [
        broadcast_to(reshape(x, tuple(n if k == a else 1 for k in range(len(given)))), tuple(shape))
        for x, a, n in zip(given, axes, sizes, strict=True)
    ]


def _triangle(b: Builder, x: Number, *, k: int, upper: builtins.bool) -> Number:
    mask = triangle(b, x.shape[-2], x.shape[-1], k, upper)
    return each(lambda v: b.where(mask, v, b.scalar(0, v.dtype)), x)


def _half(name: str, x: Array, k: int) -> Array:
    x = array(x, name)
    if x.ndim < 2:
        raise InputError(f"{name} is of matrices, not of the shape {x.dims}")
    return call(_triangle, x, name=name, k=value_of_size(k, "a diagonal"), upper=name == "triu")  # type: ignore[no-any-return]


def tril(x: Array, /, *, k: int = 0) -> Array:
    """Matrices with zeros above the diagonal k."""
    return _half("tril", x, k)


def triu(x: Array, /, *, k: int = 0) -> Array:
    """Matrices with zeros below the diagonal k."""
    return _half("triu", x, k)
