"""Products of matrices and vectors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxc.array.core import Array, call
from onnxc.array.dims import may_be_equal
from onnxc.array_api.data_types import array, promoted
from onnxc.array_api.manipulation import axis_of
from onnxc.errors import InputError
from onnxc.ir.expr import never_equal, prod
from onnxc.ops import numbers
from onnxc.primitives.base import broadcast_shapes
from onnxc.primitives.builder import Builder
from onnxc.primitives.pairs import Number, each


def _matmul(b: Builder, x: Number, y: Number) -> Number:
    """A vector counts as a row on the left and as a column on the right."""
    left = each(lambda v: b.reshape(v, (1, *v.shape)), x) if x.rank == 1 else x
    right = each(lambda v: b.reshape(v, (*v.shape, 1)), y) if y.rank == 1 else y
    out = numbers.matmul(b, left, right)
    shape = list(out.shape)
    if y.rank == 1:
        del shape[-1]
    if x.rank == 1:
        del shape[-1 if y.rank == 1 else -2]
    return each(lambda v: b.reshape(v, shape), out)


def matmul(x1: Array, x2: Array, /) -> Array:
    """The product of matrices [..., m, k] and [..., k, n], or of vectors [k]."""
    x, y = promoted("matmul", array(x1, "matmul"), array(x2, "matmul"), kinds=("numeric",))
    if not x.ndim or not y.ndim:
        raise InputError("matmul of an array without axes; multiply does that")
    if never_equal(x.dims[-1], y.dims[-2 if y.ndim > 1 else 0]):
        raise InputError(f"matmul of the shapes {x.dims} and {y.dims}: the inner sizes differ")
    return call(_matmul, x, y, name="matmul")  # type: ignore[no-any-return]


def _swap(b: Builder, x: Number) -> Number:
    return each(lambda v: b.swap(v, v.rank - 2, v.rank - 1), x)


def matrix_transpose(x: Array, /) -> Array:
    """The last two axes exchanged."""
    x = array(x, "matrix_transpose")
    if x.ndim < 2:
        raise InputError(f"matrix_transpose of the shape {x.dims}")
    return call(_swap, x, name="matrix_transpose")  # type: ignore[no-any-return]


def _tensordot(b: Builder, x: Number, y: Number, *, first: tuple[int, ...], second: tuple[int, ...]) -> Number:
    left = [k for k in range(x.rank) if k not in first]
    right = [k for k in range(y.rank) if k not in second]
    outer, inner = [x.shape[k] for k in left], [x.shape[k] for k in first]
    rest = [y.shape[k] for k in right]
    rows = each(lambda v: b.reshape(b.transpose(v, [*left, *first]), (prod(outer), prod(inner))), x)
    y = each(lambda v: b.expand(b.transpose(v, [*second, *right]), (*inner, *rest)), y)  # which looks at the sizes
    columns = each(lambda v: b.reshape(v, (prod(inner), prod(rest))), y)
    return each(lambda v: b.reshape(v, (*outer, *rest)), numbers.matmul(b, rows, columns))


def tensordot(x1: Array, x2: Array, /, *, axes: int | tuple[Sequence[int], Sequence[int]] = 2) -> Array:
    """The sums of products along pairs of axes: the last ones of x1 with the first of x2, or those that are named."""
    x, y = promoted("tensordot", array(x1, "tensordot"), array(x2, "tensordot"), kinds=("numeric",))
    if isinstance(axes, (int, np.integer)):
        if not 0 <= axes <= min(x.ndim, y.ndim):
            raise ValueError(f"tensordot along {axes} axes of the shapes {x.dims} and {y.dims}")
        first, second = tuple(range(x.ndim - axes, x.ndim)), tuple(range(axes))
    else:
        first = tuple(axis_of(a, x.ndim, "tensordot") for a in axes[0])
        second = tuple(axis_of(a, y.ndim, "tensordot") for a in axes[1])
    if len(first) != len(second) or any(
        not may_be_equal(x.dims[i], y.dims[k]) for i, k in zip(first, second, strict=True)
    ):
        raise ValueError(f"tensordot of the shapes {x.dims} and {y.dims} along {axes}: the sizes differ")
    return call(_tensordot, x, y, name="tensordot", first=first, second=second)  # type: ignore[no-any-return]


def _vecdot(b: Builder, x: Number, y: Number, *, axis: int) -> Number:
    shape = broadcast_shapes(x.shape, y.shape)
    return numbers.total(b, numbers.mul(b, numbers.conj(b, x), y), [axis % len(shape)])


def vecdot(x1: Array, x2: Array, /, *, axis: int = -1) -> Array:
    """The sums of conj(x1) * x2 along an axis, which is counted from the end."""
    x, y = promoted("vecdot", array(x1, "vecdot"), array(x2, "vecdot"), kinds=("numeric",))
    least = min(x.ndim, y.ndim)
    if axis >= 0 and x.ndim == y.ndim:
        axis = axis - x.ndim
    if not -least <= axis < 0:
        raise InputError(f"vecdot along the axis {axis} of the shapes {x.dims} and {y.dims}")
    if not may_be_equal(x.dims[axis], y.dims[axis]):
        raise InputError(f"vecdot of the shapes {x.dims} and {y.dims}: the sizes of the axis differ")
    return call(_vecdot, x, y, name="vecdot", axis=axis)  # type: ignore[no-any-return]
