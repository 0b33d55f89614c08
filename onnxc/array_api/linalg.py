"""The standard's extension `linalg`: of matrices [..., m, n], whose sizes are known when a program is compiled."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np

from onnxc.array.argument_errors import named_all
from onnxc.array.core import Array, call
from onnxc.array.dims import may_be_equal
from onnxc.array.sizes import is_equal, value_of_size
from onnxc.array_api.creation import eye
from onnxc.array_api.data_types import (
    Dtype,
    array,
    astype,
    promoted,
)  # fmt: skip
from onnxc.array_api.data_types import (
    number as as_number,
)
from onnxc.array_api.linear_algebra import matmul, matrix_transpose, tensordot, vecdot
from onnxc.array_api.manipulation import broadcast_to
from onnxc.array_api.searching import truth
from onnxc.array_api.statistical import Axis, is_nothing, reduced_axes
from onnxc.array_api.statistical import sum as sum_
from onnxc.errors import InputError, NeedsSizesError
from onnxc.ir import dtypes
from onnxc.ir.expr import always_equal, maximum, minimum
from onnxc.ir.graph import Value
from onnxc.ops import matrices, numbers
from onnxc.ops.common import flat_at_zero
from onnxc.ops.decompositions import own_type
from onnxc.primitives.base import broadcast_shapes
from onnxc.primitives.builder import Builder
from onnxc.primitives.pairs import Number, each

_FLOATS = ("real floating", "complex floating")


class EighResult(NamedTuple):
    """The result of `eigh`."""

    eigenvalues: Array
    eigenvectors: Array


class QRResult(NamedTuple):
    """The result of `qr`."""

    Q: Array
    R: Array


class SlogdetResult(NamedTuple):
    """The result of `slogdet`."""

    sign: Array
    logabsdet: Array


class SVDResult(NamedTuple):
    """The result of `svd`."""

    U: Array
    S: Array
    Vh: Array


def _matrices(name: str, x: Array, square: bool = False) -> Array:
    x = array(x, name, *_FLOATS)
    if square and x.ndim > 1 and not always_equal(*x.dims[-2:]) and may_be_equal(*x.dims[-2:]):
        raise NeedsSizesError(
            f"{name} is of square matrices, and only a call tells whether {x.dims} are some", *x.dims[-2:]
        )
    if x.ndim < 2 or (square and not always_equal(x.dims[-1], x.dims[-2])):
        raise InputError(f"{name} is of {'square ' if square else ''}matrices, not of the shape {x.dims}")
    return x


# ---------------------------------------------------------------- elimination


def det(x: Array, /) -> Array:
    """Determinants."""
    return call(matrices.det, _matrices("det", x, True), name="det")  # type: ignore[no-any-return]


def slogdet(x: Array, /) -> SlogdetResult:
    """Signs, and logarithms of the absolute values, of determinants; 0 and -infinity where there is no inverse."""
    return SlogdetResult(*call(matrices.slogdet, _matrices("slogdet", x, True), name="slogdet"))


def solve(x1: Array, x2: Array, /) -> Array:
    """x with x1 x = x2, for matrices x2 or one vector. Infinities or NaN where x1 has no inverse."""
    x, y = promoted("solve", _matrices("solve", x1, True), array(x2, "solve"), kinds=_FLOATS)
    at = y.ndim - min(y.ndim, 2)
    if y.ndim == 0 or not may_be_equal(x.dims[-1], y.dims[at]):
        raise InputError(f"solve of the shapes {x.dims} and {y.dims}")
    y = broadcast_to(y, (*y.dims[:at], x.dims[-1], *y.dims[at + 1 :]))
    return call(matrices.solve, x, y, name="solve")  # type: ignore[no-any-return]


def inv(x: Array, /) -> Array:
    """Inverse matrices. Infinities or NaN where there is none."""
    x = _matrices("inv", x, True)
    return solve(x, broadcast_to(eye(x.dims[-1], dtype=x.dtype), x.dims))


def matrix_power(x: Array, n: int, /) -> Array:
    """The product of n equal matrices; of their inverses where n is negative."""
    x = _matrices("matrix_power", x, True)
    if n == 0:
        return broadcast_to(eye(x.dims[-1], dtype=x.dtype), x.dims)
    x, n = (inv(x), -n) if n < 0 else (x, n)
    out = None
    while n:
        if n & 1:
            out = x if out is None else matmul(out, x)
        n >>= 1
        x = matmul(x, x) if n else x
    assert out is not None
    return out


def cholesky(x: Array, /, *, upper: bool = False) -> Array:
    """Lower triangles l with l l* = x, or upper ones. NaN where x is not positive definite."""
    return call(matrices.cholesky, _matrices("cholesky", x, True), name="cholesky", upper=bool(upper))  # type: ignore[no-any-return]


# ---------------------------------------------------------------- orthogonal factors


def qr(x: Array, /, *, mode: Literal["reduced", "complete"] = "reduced") -> QRResult:
    """Matrices q with orthonormal columns (all of them: `complete`) and upper triangles r with q r = x."""
    if mode not in ("reduced", "complete"):
        raise ValueError(f"the mode of qr is 'reduced' or 'complete', not {mode!r}")
    return QRResult(*call(matrices.qr, _matrices("qr", x), name="qr", complete=mode == "complete"))


def eigh(x: Array, /) -> EighResult:
    """Eigenvalues, from the least on, and eigenvectors, in columns, of symmetric (or Hermitian) matrices.

    It reads what is on and below the diagonal.
    """
    return EighResult(*call(matrices.eigh, _matrices("eigh", x, True), name="eigh"))


def eigvalsh(x: Array, /) -> Array:
    """Eigenvalues, from the least on, of symmetric (or Hermitian) matrices."""
    return call(matrices.eigh, _matrices("eigvalsh", x, True), name="eigvalsh")[0]  # type: ignore[no-any-return]


def svd(x: Array, /, *, full_matrices: bool = True) -> SVDResult:
    """u, singular values s, from the greatest on, and v* with u s v* = x. Without `full_matrices`, the first columns
    of u and rows of v* alone.
    """
    return SVDResult(*call(matrices.svd, _matrices("svd", x), name="svd", full=bool(full_matrices)))


def svdvals(x: Array, /) -> Array:
    """Singular values, from the greatest on."""
    return call(matrices.svd, _matrices("svdvals", x), name="svdvals", full=False)[1]  # type: ignore[no-any-return]


# ---------------------------------------------------------------- by singular values


def _tolerance(name: str, x: Array, rtol: Any) -> Array:
    """The least ratio to the greatest singular value that counts: a number, or one for each matrix."""
    part = np.dtype(x.dtype.type(0).real.dtype)
    if rtol is None:
        m, n = x.dims[-2:]
        if not isinstance(m, int) or not isinstance(n, int):
            raise NeedsSizesError(f"{name} of matrices of dynamic size needs rtol=", m, n)
        rtol = float(max(m, n) * np.finfo(part).eps)
    if isinstance(rtol, (int, float, np.integer)):
        return as_number(float(rtol), part)
    return astype(array(rtol, name, "real floating"), part, copy=False)


def _kept(b: Builder, values: Value, rtol: Value) -> Value:
    """Which singular values count."""
    most = b.reduce("max", values, [values.rank - 1], True)
    return b.lt(b.mul(most, b.reshape(rtol, (*rtol.shape, 1))), values)


def _rank(b: Builder, x: Number, rtol: Value) -> Value:
    if matrices.is_empty(x):
        return b.full(x.shape[:-2], 0, dtypes.int64)
    values = numbers.real(matrices.svd(b, x, full=False)[1])
    return b.reduce("sum", b.cast(_kept(b, values, rtol), dtypes.int64), [values.rank - 1])


def matrix_rank(x: Array, /, *, rtol: float | Array | None = None) -> Array:
    """How many singular values are greater than `rtol` times the greatest."""
    x = _matrices("matrix_rank", x)
    return call(_rank, x, _tolerance("matrix_rank", x, rtol), name="matrix_rank")  # type: ignore[no-any-return]


def _pinv(b: Builder, x: Number, rtol: Value) -> Number:
    return matrices.pinv(b, x, lambda values: _kept(b, values, rtol))


def pinv(x: Array, /, *, rtol: float | Array | None = None) -> Array:
    """Pseudo-inverses (Moore, Penrose), by the singular values that are greater than `rtol` times the greatest."""
    x = _matrices("pinv", x)
    return call(_pinv, x, _tolerance("pinv", x, rtol), name="pinv")  # type: ignore[no-any-return]


# ---------------------------------------------------------------- norms


def _matrix_norm(b: Builder, x: Number, *, ord: Any, keepdims: bool) -> Value:
    last = x.rank - 1
    if ord == "fro":
        found = flat_at_zero(b, b.sqrt, b.reduce("sum", numbers.square_abs(b, x), [last - 1, last]))
    elif ord in ("nuc", 2, -2):
        values = numbers.real(matrices.svd(b, x, full=False)[1])
        op = {"nuc": "sum", 2: "max", -2: "min"}[ord]
        found = b.reduce(op, values, [values.rank - 1])
    else:
        axis = last - 1 if abs(ord) == 1 else last
        sums = b.reduce("sum", numbers.absolute(b, x), [axis])
        found = b.reduce("max" if ord > 0 else "min", sums, [last - 1])
    return b.reshape(found, (*found.shape, 1, 1)) if keepdims else found


def matrix_norm(x: Array, /, *, keepdims: bool = False, ord: Any = "fro") -> Array:
    """Norms of matrices: `fro` (of all elements), `nuc` (the sum of the singular values), 2 and -2 (the greatest and
    the least), 1 and -1 (the greatest and the least sum of a column), inf and -inf (of a row).
    """
    x = _matrices("matrix_norm", x)
    if ord not in ("fro", "nuc", 1, -1, 2, -2, math.inf, -math.inf):
        raise ValueError(f"matrix_norm has no order {ord!r}")
    if ord not in ("fro", "nuc") and is_nothing(x, (-2, -1), "matrix_norm"):
        raise ValueError(f"matrix_norm of the order {ord} of no elements")
    return call(_matrix_norm, x, name="matrix_norm", ord=ord, keepdims=keepdims)  # type: ignore[no-any-return]


def _vector_norm(b: Builder, x: Number, *, axes: tuple[int, ...], keepdims: bool, ord: float) -> Value:
    if ord == 2:
        return flat_at_zero(b, b.sqrt, b.reduce("sum", numbers.square_abs(b, x), axes, keepdims))
    if ord == 0:
        return b.reduce("sum", b.cast(truth(b, x), own_type(x)), axes, keepdims)
    size = numbers.absolute(b, x)
    if math.isinf(ord):
        return b.reduce("max" if ord > 0 else "min", size, axes, keepdims)
    if ord == 1:
        return b.reduce("sum", size, axes, keepdims)
    if ord < 0:  # infinite at 0
        return b.pow(b.reduce("sum", b.pow(size, float(ord)), axes, keepdims), 1 / float(ord))
    powers = flat_at_zero(b, lambda v: b.pow(v, float(ord)), size)
    return flat_at_zero(b, lambda v: b.pow(v, 1 / float(ord)), b.reduce("sum", powers, axes, keepdims))


def vector_norm(x: Array, /, *, axis: Axis = None, keepdims: bool = False, ord: float = 2) -> Array:
    """(sum |x|^ord)^(1 / ord); the greatest or the least for inf and -inf, and how many are not zero for 0."""
    x = array(x, "vector_norm", *_FLOATS)
    axes = reduced_axes(x, axis, "vector_norm")
    if math.isinf(ord) and is_nothing(x, axes, "vector_norm"):
        if ord < 0:
            raise ValueError("vector_norm of the order -inf of no elements")
        ord = 1  # 0
    return call(_vector_norm, x, name="vector_norm", axes=axes, keepdims=keepdims, ord=ord)  # type: ignore[no-any-return]


# ---------------------------------------------------------------- the rest


def _diagonal(b: Builder, x: Number, *, offset: int) -> Number:
    """A step of a row and a column more at a time."""
    *lead, m, n = x.shape
    row, column = max(-offset, 0), max(offset, 0)
    count = maximum(minimum(m - row, n - column), 0)
    flat = each(lambda v: b.reshape(v, (*lead, m * n)), x)
    if isinstance(count, int) and count == 0:
        return each(lambda v: b.full((*lead, 0), 0, v.dtype), x)
    start = row * n + column
    index = b.add(b.mul(b.iota(count), b.size_as(n + 1, dtypes.int64)), b.size_as(start, dtypes.int64))
    return each(lambda v: b.gather(v, index, len(lead)), flat)


def _any_matrices(name: str, x: Array) -> Array:
    x = array(x, name)
    if x.ndim < 2:
        raise InputError(f"{name} is of matrices, not of the shape {x.dims}")
    return x


def diagonal(x: Array, /, *, offset: int = 0) -> Array:
    """The elements on a diagonal, above (below, where it is negative) the main one."""
    return call(_diagonal, _any_matrices("diagonal", x), name="diagonal", offset=value_of_size(offset, "a diagonal"))  # type: ignore[no-any-return]


def trace(x: Array, /, *, offset: int = 0, dtype: Dtype | None = None) -> Array:
    """The sum of a diagonal."""
    return sum_(diagonal(array(x, "trace", "numeric"), offset=offset), axis=-1, dtype=dtype)


def _outer(b: Builder, x: Number, y: Number) -> Number:
    return numbers.mul(b, each(lambda v: b.reshape(v, (*v.shape, 1)), x), y)


def outer(x1: Array, x2: Array, /) -> Array:
    """The products of all elements of two vectors."""
    x, y = promoted("outer", array(x1, "outer"), array(x2, "outer"), kinds=("numeric",))
    if x.ndim != 1 or y.ndim != 1:
        raise InputError(f"outer is of vectors, not of the shapes {x.dims} and {y.dims}")
    return call(_outer, x, y, name="outer")  # type: ignore[no-any-return]


def _cross(b: Builder, x: Number, y: Number, *, axis: int) -> Number:
    shape = broadcast_shapes(x.shape, y.shape)
    at = axis % len(shape)
    x, y = (each(lambda v: b.expand(v, shape), v) for v in (x, y))

    def turned(v: Number, by: int) -> Number:
        ends = [each(lambda p: b.slice(p, at, by, 3), v), each(lambda p: b.slice(p, at, 0, by), v)]
        return numbers.concat(b, ends, at)

    return numbers.sub(b, numbers.mul(b, turned(x, 1), turned(y, 2)), numbers.mul(b, turned(x, 2), turned(y, 1)))


def cross(x1: Array, x2: Array, /, *, axis: int = -1) -> Array:
    """The cross products of vectors of three elements."""
    x, y = promoted("cross", array(x1, "cross"), array(x2, "cross"), kinds=("numeric",))
    at = axis - max(x.ndim, y.ndim) if axis >= 0 else axis
    if not -min(x.ndim, y.ndim) <= at < 0:
        raise IndexError(f"cross along the axis {axis} of the shapes {x.dims} and {y.dims}")
    if not (is_equal(x.dims[at], 3, "cross") and is_equal(y.dims[at], 3, "cross")):
        raise ValueError(f"cross of the shapes {x.dims} and {y.dims}: not three elements along the axis {axis}")
    return call(_cross, x, y, name="cross", axis=at)  # type: ignore[no-any-return]


__all__ = [
    "cholesky", "cross", "det", "diagonal", "eigh", "eigvalsh", "inv", "matmul", "matrix_norm", "matrix_power",
    "matrix_rank", "matrix_transpose", "outer", "pinv", "qr", "slogdet", "solve", "svd", "svdvals", "tensordot",
    "trace", "vecdot", "vector_norm",
]  # fmt: skip

named_all(globals(), __all__)


def __dir__() -> list[str]:
    return __all__
