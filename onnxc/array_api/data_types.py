"""The standard's dtypes (numpy's objects), how they mix, and what is known of each."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxc.array.core import Array, call, checked, concrete, elements, size, traced
from onnxc.errors import InputError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Expr
from onnxc.ops import numbers
from onnxc.primitives.builder import Builder
from onnxc.primitives.pairs import Number

Dtype = np.dtype[Any]
Scalar = builtins.bool | int | float | complex

int8, int16, int32, int64 = (np.dtype(f"int{n}") for n in (8, 16, 32, 64))
uint8, uint16, uint32, uint64 = (np.dtype(f"uint{n}") for n in (8, 16, 32, 64))
float32, float64 = np.dtype("float32"), np.dtype("float64")
complex64, complex128 = np.dtype("complex64"), np.dtype("complex128")
bool = np.dtype("bool")

_SIGNED, _UNSIGNED = (int8, int16, int32, int64), (uint8, uint16, uint32, uint64)
KINDS: dict[str, tuple[Dtype, ...]] = {
    "bool": (bool,),
    "signed integer": _SIGNED,
    "unsigned integer": _UNSIGNED,
    "integral": _SIGNED + _UNSIGNED,
    "real floating": (float32, float64),
    "complex floating": (complex64, complex128),
    "numeric": _SIGNED + _UNSIGNED + (float32, float64, complex64, complex128),
}
ALL = (bool, *KINDS["numeric"])
DEFAULTS = {"real floating": float64, "complex floating": complex128, "integral": int64, "indexing": int64}


def is_kind(dtype: Dtype, *kinds: str) -> builtins.bool:
    """Whether a dtype is of one of these kinds of the standard, as `real floating`."""
    return any(dtype in KINDS[k] for k in kinds)


def checked_dtype(dtype: Any) -> Dtype:
    """A dtype of the standard: numpy's object, its name, or numpy's type. TypeError for others."""
    try:
        found: Dtype = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"{dtype!r} is no dtype") from None
    if dtype is None or found not in ALL:
        raise TypeError(f"{dtype} is no dtype of the array API standard; those are {', '.join(map(str, ALL))}")
    return found


def compiled_type(dtype: Dtype) -> DType:
    """The compiler's object for a dtype."""
    return dtypes.from_numpy(dtype)


# ---------------------------------------------------------------- promotion


def _mixed(a: Dtype, b: Dtype) -> Dtype:
    """The dtype that two mix to. TypeError where the standard has none: between kinds."""
    for kinds in (("bool",), ("integral",), ("real floating", "complex floating")):
        if is_kind(a, *kinds) and is_kind(b, *kinds) and is_kind(found := np.promote_types(a, b), *kinds):
            return found
    if a.kind not in "biufc" or b.kind not in "biufc" or a not in ALL or b not in ALL:
        wrong = a if a not in ALL else b
        raise TypeError(f"{wrong} is no dtype of the array API standard")
    raise TypeError(f"{a} and {b} do not mix: the array API standard has no dtype for both; use astype")


def is_number(x: Any) -> builtins.bool:
    """Whether an operand is a number of Python: also one that a traced function was given."""
    if isinstance(x, Array):
        return x.weak
    return isinstance(x, (builtins.bool, int, float, complex)) and not isinstance(x, np.generic)


def _number_kind(x: Any) -> str:
    if isinstance(x, Array):
        return x.dtype.kind
    return "b" if isinstance(x, builtins.bool) else "i" if isinstance(x, int) else "f" if isinstance(x, float) else "c"


_FITS = {
    "b": ("bool",),
    "i": ("integral", "real floating", "complex floating"),
    "f": ("real floating", "complex floating"),
    "c": ("complex floating", "real floating"),
}


def scalar_type(x: Scalar | Array, like: Dtype) -> Dtype:
    """The dtype of a Python number beside an array of dtype `like`. TypeError for one of another kind."""
    kind = _number_kind(x)
    if not is_kind(like, *_FITS[kind]):
        raise TypeError(f"the number {x!r} does not fit an array of {like}; convert one of both")
    return np.promote_types(like, complex64) if kind == "c" else like


def result_type(*arrays_and_dtypes: Array | Scalar | Dtype) -> Dtype:
    """The dtype that arrays, dtypes and numbers (beside at least one of the former) mix to."""
    numbers_ = [x for x in arrays_and_dtypes if is_number(x)]
    given = [x for x in arrays_and_dtypes if not is_number(x)]
    found = [checked_dtype(x.dtype if isinstance(x, (Array, np.ndarray)) else x) for x in given]
    if not found:
        traced = [x.dtype for x in numbers_ if isinstance(x, Array)]
        if not traced:
            raise TypeError("result_type needs an array or a dtype")
        return np.result_type(*traced, *(x for x in numbers_ if not isinstance(x, Array)))
    out = found[0]
    for dtype in found:
        out = _mixed(out, dtype)
    for x in numbers_:
        out = _mixed(out, scalar_type(x, out))  # type: ignore[arg-type]
    return out


def _array(x: Any, name: str) -> Array:
    """An operand that has to be an array (numpy's are, too)."""
    if isinstance(x, Array):
        return x
    if isinstance(x, (np.ndarray, np.generic)):
        return concrete(elements(x))
    if isinstance(x, Expr):
        return size(x, weak=True)
    raise TypeError(f"{name} is of arrays, not of {type(x).__name__}")


def array(x: Any, name: str, *kinds: str) -> Array:
    """An array operand whose dtype is of one of these kinds (of any, without). TypeError for others."""
    found = _array(x, name)
    if kinds and not is_kind(found.dtype, *kinds):
        raise TypeError(f"{name} is of {' or '.join(kinds)} arrays, not of {found.dtype}")
    return found


def number(x: Scalar, dtype: Dtype) -> Array:
    """A Python number as an array without axes. OverflowError where an integer does not fit."""
    if is_kind(dtype, "integral") and isinstance(x, int):
        limits = np.iinfo(dtype)
        if not limits.min <= x <= limits.max:
            raise OverflowError(f"{x} does not fit {dtype}")
    with np.errstate(all="ignore"):
        return concrete(np.asarray(x, dtype))


def promoted(name: str, *xs: Any, kinds: Sequence[str] = ()) -> list[Array]:
    """Operands in the dtype that they mix to, which has to be of one of these kinds; numbers become arrays."""
    given = [x if is_number(x) else _array(x, name) for x in xs]
    try:
        dtype = result_type(*given)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    if "real floating" in kinds and is_kind(dtype, "integral") and all(map(is_number, given)):
        dtype = float64  # as Python divides its integers
    if kinds and not is_kind(dtype, *kinds):
        raise TypeError(f"{name} is of {' or '.join(kinds)} arrays, not of {dtype}")
    return [astype(x, dtype, copy=False) if isinstance(x, Array) else number(x, dtype) for x in given]


# ---------------------------------------------------------------- functions


def _convert(b: Builder, x: Number, *, to: str) -> Number:
    return numbers.cast(b, x, dtypes.BY_NAME[to])


def name_of(dtype: Dtype) -> str:
    """The compiler's name of a dtype: a static argument of rules."""
    return compiled_type(dtype).name


def astype(x: Array, dtype: Dtype, /, *, copy: builtins.bool = True, device: str | None = None) -> Array:
    """The elements converted as C converts; a bool is whether they are not zero.

    TypeError for complex ones as others: see `real` and `abs`.
    """
    x, dtype = array(x, "astype"), checked_dtype(dtype)
    checked_device(device)
    if x.dtype == dtype:
        return copied(x) if copy else x
    if is_kind(x.dtype, "complex floating") and not is_kind(dtype, "complex floating"):
        raise TypeError(f"{x.dtype} does not become {dtype} by astype; use real, imag or abs")
    return call(_convert, x, name="astype", to=name_of(dtype))  # type: ignore[no-any-return]


def copied(x: Array) -> Array:
    """An array of its own with the same elements."""
    if x._data is not None:
        return concrete(x._data.copy())
    return same(x)


def same(x: Array) -> Array:
    """Another array of the same elements. (Writing to one puts a new value into its place alone.)"""
    if x._data is not None:
        return concrete(x._data)
    checked(x)
    assert x._value is not None and x._trace is not None
    return traced(x._value, x._trace, x.weak)


def checked_device(device: Any) -> None:
    """InputError for a device other than the one that there is."""
    if device not in (None, "cpu"):
        raise InputError(f"the only device is 'cpu', not {device!r}")


def can_cast(from_: Dtype | Array, to: Dtype, /) -> builtins.bool:
    """Whether the rules of promotion lead from one dtype to the other."""
    source = from_.dtype if isinstance(from_, Array) else checked_dtype(from_)
    try:
        return _mixed(source, checked_dtype(to)) == to
    except TypeError:
        return False


@dataclass(frozen=True)
class finfo_object:
    """What `finfo` gives."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: Dtype


@dataclass(frozen=True)
class iinfo_object:
    """What `iinfo` gives."""

    bits: int
    max: int
    min: int
    dtype: Dtype


def finfo(type: Dtype | Array, /) -> finfo_object:
    """The limits of a float dtype, or of the parts of a complex one."""
    dtype = type.dtype if isinstance(type, Array) else checked_dtype(type)
    if not is_kind(dtype, "real floating", "complex floating"):
        raise TypeError(f"finfo is of float dtypes, not of {dtype}")
    f = np.finfo(dtype)
    return finfo_object(f.bits, float(f.eps), float(f.max), float(f.min), float(f.smallest_normal), np.dtype(f.dtype))


def iinfo(type: Dtype | Array, /) -> iinfo_object:
    """The limits of an integer dtype."""
    dtype = type.dtype if isinstance(type, Array) else checked_dtype(type)
    if not is_kind(dtype, "integral"):
        raise TypeError(f"iinfo is of integer dtypes, not of {dtype}")
    i = np.iinfo(dtype)
    return iinfo_object(i.bits, int(i.max), int(i.min), dtype)


def isdtype(dtype: Dtype, kind: Dtype | str | tuple[Dtype | str, ...]) -> builtins.bool:
    """Whether a dtype is another, or of a kind ("integral", ...), or any of several."""
    dtype = checked_dtype(dtype)
    if isinstance(kind, tuple):
        return any(isdtype(dtype, k) for k in kind)
    if isinstance(kind, str):
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is no kind of dtypes; those are {', '.join(KINDS)}")
        return is_kind(dtype, kind)
    return dtype == checked_dtype(kind)
