"""Primitives that move elements without changing them: views, padding, concatenation, iota, constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxc.errors import ShapeError
from onnxc.ir import dtypes
from onnxc.ir.expr import (
    Dim,
    Expr,
    always_equal,
    ceildiv,
    is_nonnegative,
    maximum,
    minimum,
    never_equal,
    of,
    prod,
    substitute,
    symbols,
)
from onnxc.ir.graph import Attrs
from onnxc.ir.types import TensorType
from onnxc.primitives.base import Kind, Primitive, register

VIEWS = ("reshape", "transpose", "expand", "slice")  # index arithmetic alone, whatever kernel reads them


def _reshape(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    out = types[0].with_shape(tuple(attrs["shape"]))
    if never_equal(out.size, types[0].size):
        raise ShapeError(f"cannot reshape {list(types[0].shape)} to {list(out.shape)}")
    return (out,)


def settled(own: Sequence[Dim], wanted: Sequence[Dim]) -> tuple[tuple[Dim, ...], tuple[tuple[Dim, Dim], ...]]:
    """The shape that a reshape of `own` sizes has, and pairs of sizes that a run has to find equal.

    What is one size is spelled in one way, in terms of `own`, whatever the model computes for it, so that kernels need
    no division to find an element: a computed size that is one of those where nothing is empty, and one that all others
    leave one number for.

    >>> from onnxc.ir.expr import Sym, floordiv, maximum
    >>> h, w, n = Sym("h"), Sym("w"), Sym("n")
    >>> settled((2, 64, h, w), (2, 64, 4 * n))
    ((2, 64, h*w), ((4*n, h*w),))
    >>> settled((64, floordiv(h + 1, 2), 3), (8, 8, floordiv(maximum(h - 1, 0), 2) + 1, 3))
    ((8, 8, ((h + 1) // 2), 3), (((max(h - 1, 0) // 2) + 1, ((h + 1) // 2)),))
    """
    left, rest, found = list(own), list[int](), list(wanted)
    for i, d in enumerate(wanted):
        if d in left:
            left.remove(d)
        else:
            rest.append(i)
    computed = [i for i in rest if isinstance(d := wanted[i], Expr) and d not in map(of, symbols(d))]
    for i in list(computed):  # (an input's own size stays as it is spelled elsewhere)
        same = next((d for d in left if isinstance(d, Expr) and _equal_unless_empty(d, wanted[i])), None)
        if same is not None:
            found[i] = same
            left.remove(same)
            rest.remove(i)
            computed.remove(i)
    total, part = prod(left), prod(wanted[i] for i in rest if i not in computed)
    if len(computed) == 1 and isinstance(part, int) and part:
        (at,) = computed
        number = total // part
        if always_equal(number * part, total) and not never_equal(wanted[at], number):
            found[at] = number
    return tuple(found), tuple((a, b) for a, b in zip(wanted, found, strict=True) if not always_equal(a, b))


def _equal_unless_empty(a: Dim, b: Dim) -> bool:
    """Whether two sizes are the same where no open size is 0."""
    more = {s: 1 + of(s) for s in symbols(a) | symbols(b) if s.lo == 0 and s.hi is None}
    return always_equal(substitute(a, more), substitute(b, more))


def _transpose(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    perm = attrs["perm"]
    if sorted(perm) != list(range(types[0].rank)):
        raise ShapeError(f"{list(perm)} is not a permutation of the axes of {types[0]}")
    return (types[0].with_shape(tuple(types[0].shape[p] for p in perm)),)


def _expand(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    shape: tuple[Dim, ...] = tuple(attrs["shape"])
    own = types[0].shape
    if len(own) != len(shape):
        raise ShapeError(f"expand of {types[0]} to {list(shape)}: the ranks differ")
    if any(a != 1 and never_equal(a, b) for a, b in zip(own, shape, strict=True)):
        raise ShapeError(f"expand of {types[0]} to {list(shape)}: sizes other than 1 stay as they are")
    return (types[0].with_shape(shape),)


def _slice(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    """starts, sizes and steps for every axis; a negative step counts down from its start."""
    rows = zip(types[0].shape, attrs["starts"], attrs["sizes"], attrs["steps"], strict=True)
    if any(isinstance(d, int) and d < 0 for row in rows for d in slice_room(*row)):
        raise ShapeError(f"a slice from {attrs['starts']} of {attrs['sizes']} elements leaves {types[0]}")
    return (types[0].with_shape(tuple(attrs["sizes"])),)


def _pad(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    """low, high and interior (zeros between neighbours) per axis, none negative; the value is the second operand."""
    shape = tuple(
        lo + hi + d + maximum(d - 1, 0) * gap
        for d, lo, hi, gap in zip(types[0].shape, attrs["low"], attrs["high"], attrs["interior"], strict=True)
    )
    return (types[0].with_shape(shape),)


def _concat(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    axis = attrs["axis"]
    shape = list(types[0].shape)
    for t in types[1:]:
        if t.rank != len(shape) or t.dtype is not types[0].dtype:
            raise ShapeError(f"cannot concatenate {' and '.join(map(str, types))}")
        for i, (a, b) in enumerate(zip(shape, t.shape, strict=True)):
            if i == axis:
                shape[i] = a + b
            elif never_equal(a, b):
                raise ShapeError(f"cannot concatenate {' and '.join(map(str, types))} along axis {axis}")
            elif isinstance(b, int):
                shape[i] = b
    return (types[0].with_shape(tuple(shape)),)


def _slice_eval(x: np.ndarray, starts: Sequence[int], sizes: Sequence[int], steps: Sequence[int]) -> np.ndarray:
    index = []
    for start, size, step in zip(starts, sizes, steps, strict=True):
        end: int | None = start + size * step
        index.append(slice(start, None if step < 0 and end is not None and end < 0 else end, step))
    return x[tuple(index)]


def _pad_eval(x: np.ndarray, value: np.ndarray, low: Any, high: Any, interior: Any) -> np.ndarray:
    inner = tuple(d + max(d - 1, 0) * g for d, g in zip(x.shape, interior, strict=True))
    out = np.full([lo + d + hi for lo, d, hi in zip(low, inner, high, strict=True)], value, dtype=x.dtype)
    out[tuple(slice(lo, lo + d, g + 1) for lo, d, g in zip(low, inner, interior, strict=True))] = x
    return out


def slice_size(start: Dim, stop: Dim, step: int) -> Dim:
    """Number of elements from start up to (not with) stop."""
    return maximum(ceildiv(stop - start, step) if step > 0 else ceildiv(start - stop, -step), 0)


def slice_room(size: Dim, start: Dim, count: Dim, step: int) -> tuple[Dim, ...]:
    """How much of an axis lies on either side of a slice of `count` elements; nothing for an empty slice."""
    last = start + (count - 1) * step
    first, last = (start, last) if step > 0 else (last, start)
    if always_equal(first, 0) and always_equal(last, size - 1):
        return ()
    some = minimum(count, 1)
    return tuple(0 if is_nonnegative(room) else room * some for room in (first, size - 1 - last))


def _constant(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    value: np.ndarray = attrs["value"]
    return (TensorType(dtypes.from_numpy(value.dtype), value.shape),)


EXACT_COUNTS = {dtypes.float32: 1 << 24, dtypes.float64: 1 << 53}  # these hold all integers up to


def _iota(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    return (TensorType(attrs["dtype"], (attrs["size"],)),)


def _sizes(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    """An int64 vector of sizes that are known as expressions (`dims`): the way a shape enters a computation."""
    return (TensorType(dtypes.int64, (len(attrs["dims"]),)),)


register(Primitive("reshape", Kind.VIEW, _reshape, lambda x, shape, equal=(): x.reshape(shape), True))
register(Primitive("transpose", Kind.VIEW, _transpose, lambda x, perm: x.transpose(perm), True))
register(Primitive("expand", Kind.VIEW, _expand, lambda x, shape: np.broadcast_to(x, shape), True))
register(Primitive("slice", Kind.VIEW, _slice, _slice_eval, True))
register(Primitive("pad", Kind.VIEW, _pad, _pad_eval, False))
register(Primitive("concat", Kind.VIEW, _concat, lambda *xs, axis: np.concatenate(xs, axis), True))
register(Primitive("iota", Kind.POINTWISE, _iota, lambda size, dtype: np.arange(size).astype(dtype.numpy), False))
register(Primitive("constant", Kind.VIEW, _constant, lambda value: value))
register(Primitive("sizes", Kind.VIEW, _sizes, None))
