"""ATen ops that go by the order of elements: running extremes, medians, places in sorted rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from onnxc.errors import UnsupportedError
from onnxc.frontends.torch_fx_reduction import best, ordered
from onnxc.frontends.torch_fx_table import Call, Operand, aten, axis_of
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, floordiv
from onnxc.ir.graph import Value
from onnxc.ops import reals
from onnxc.primitives.builder import Builder

_COMPARED = 128  # whole numbers of a sorted row up to which all are compared, and none is looked for


# ---------------------------------------------------------------- running


def _front(b: Builder, x: Value, axis: int) -> Value:
    return b.transpose(x, [axis, *(i for i in range(x.rank) if i != axis)])


def _back(b: Builder, x: Value, axis: int) -> Value:
    return b.transpose(x, [*range(1, axis + 1), 0, *range(axis + 1, x.rank)])


def _bound(dtype: DType, greatest: bool) -> float | int:
    """What no element is beyond."""
    if dtype.is_float:
        return math.inf if greatest else -math.inf
    return dtype.limits[greatest]


def _running(op: str) -> Callable[[Call, Value, int], list[Value]]:
    """The greatest (least) element so far, and where the last such one stands; NaN from the first NaN on."""

    def rule(c: Call, x: Value, axis: int) -> list[Value]:
        b = c.b
        if x.rank == 0 or x.t.size == 0:
            return [x, b.full(x.shape, 0, dtypes.int64)]
        at = axis_of(c, axis, x.rank)
        rows = _front(b, b.cast(x, dtypes.uint8) if x.dtype is dtypes.boolean else x, at)
        worst = b.full(rows.shape[1:], _bound(rows.dtype, op == "min"), rows.dtype)

        def step(i: Builder, states: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
            (most, place), (own, number) = states, slices
            takes = i.le(most, own) if op == "max" else i.le(own, most)
            if own.dtype.is_float:
                takes = i.or_(i.isnan(own), i.and_(takes, i.not_(i.isnan(most))))
            most, place = i.where(takes, own, most), i.where(takes, number, place)
            return [most, place], [most, place]

        start = [worst, b.full(worst.shape, 0, dtypes.int64)]
        _, found = b.scan(start, [rows, b.iota(x.shape[at])], x.shape[at], step)
        return [_back(b, v, at) for v in found]

    return rule


aten("cummax")(_running("max"))
aten("cummin")(_running("min"))


@aten("logcumsumexp")
def logcumsumexp(c: Call, x: Value, axis: int) -> Value:
    """Sums of exponents so far, as logarithms: in float64, one after the other."""
    b = c.b
    if x.rank == 0 or x.t.size == 0:
        return x
    at = axis_of(c, axis, x.rank)
    rows = _front(b, b.cast(x, dtypes.float64), at)

    def step(i: Builder, states: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
        total = reals.logaddexp(i, states[0], slices[0])
        return [total], [total]

    _, (found,) = b.scan([b.full(rows.shape[1:], float("-inf"), dtypes.float64)], [rows], x.shape[at], step)
    return _back(b, found, at)


# ---------------------------------------------------------------- the k-th of a row


def _row(c: Call, x: Value, axis: int | None) -> tuple[Value, int]:
    """The tensor, of rank 1 at least, and an axis; all of it as a row without one."""
    if axis is None or x.rank == 0:
        return c.b.reshape(x, (x.t.size,)), 0
    return x, axis_of(c, axis, x.rank)


def _picked(c: Call, values: Value, where: Value, axis: int, place: Value) -> list[Value]:
    """What stands at a place of each row, and whence it came; in the shape of the results."""
    found = [c.b.one("gather_elements", v, place, axis=axis) for v in (values, where)]
    shape = c.type.shape
    return [c.b.reshape(v, shape) for v in found]


@aten("kthvalue")
def kthvalue(c: Call, x: Value, k: Dim, axis: int = -1, keepdim: bool = False) -> list[Value]:
    x, at = _row(c, x, axis)
    values, where = ordered(c, x, k, at, False)
    place = c.b.full((*x.shape[:at], 1, *x.shape[at + 1 :]), 0, dtypes.int64)
    return _picked(c, values, where, at, c.b.add(place, c.b.sub(c.b.size_as(k, dtypes.int64), 1)))


def _median(skips: bool) -> Callable[..., Any]:
    """The lower of the two middle elements. NaN where there is one, unless these are left out."""

    def rule(c: Call, x: Value, axis: int | None = None, keepdim: bool = False) -> Any:
        b, whole = c.b, axis is None
        x, at = _row(c, x, axis)
        count = x.shape[at]
        one = (*x.shape[:at], 1, *x.shape[at + 1 :])
        if count == 0 and whole and x.dtype.is_float:
            return b.full(c.type.shape, math.nan, x.dtype)
        if count == 0 and whole:
            raise UnsupportedError("the median of no integers")  # for which PyTorch gives what a NaN happens to become
        values, where = ordered(c, x, None, at, False)
        place = b.add(b.full(one, 0, dtypes.int64), b.size_as(floordiv(count - 1, 2), dtypes.int64))
        if x.dtype.is_float:
            unknown = b.isnan(x)
            if skips:
                known = b.reduce("sum", b.cast(b.not_(unknown), dtypes.int64), [at], True)
                place = b.div(b.max(b.sub(known, 1), 0), 2)
            else:  # they are behind all numbers
                any_ = b.reduce("max", b.cast(unknown, dtypes.uint8), [at], True)
                known = b.reduce("sum", b.cast(b.not_(unknown), dtypes.int64), [at], True)
                place = b.where(b.eq(any_, 0), place, known)
        found = _picked(c, values, where, at, place)
        return found[0] if whole else found

    return rule


aten("median", "median.dim")(_median(False))
aten("nanmedian", "nanmedian.dim")(_median(True))


@aten("mode")
def mode(c: Call, x: Value, axis: int = -1, keepdim: bool = False) -> list[Value]:
    """The most frequent element, the least of equally frequent ones, and where it stands last."""
    b = c.b
    x, at = _row(c, x, axis)
    values, _ = ordered(c, x, None, at, False)
    n, one = x.shape[at], (*x.shape[:at], 1, *x.shape[at + 1 :])
    changes = b.not_(b.eq(b.slice(values, at, 1, n), b.slice(values, at, 0, n - 1)))
    steps = b.concat([b.full(one, 0, dtypes.int64), b.cast(changes, dtypes.int64)], at)
    runs = b.one("cumsum", steps, axis=at, exclusive=False, reverse=False)  # equal elements have the same number
    ones, none = b.full(x.shape, 1, dtypes.int64), b.full(x.shape, 0, dtypes.int64)
    often = b.one("scatter_elements", none, runs, ones, axis=at, reduction="add")
    longest = b.reshape(best(b, "max", often, at), one)
    first = b.reshape(best(b, "max", b.cast(b.eq(runs, longest), dtypes.int64), at), one)
    chosen = b.one("gather_elements", values, first, axis=at)
    row = b.reshape(b.iota(n), (n, *(1,) * (x.rank - 1 - at)))
    last = b.reduce("max", b.where(b.eq(x, chosen), row, b.scalar(0, dtypes.int64)), [at], True)
    return [b.reshape(v, c.type.shape) for v in (chosen, last)]


# ---------------------------------------------------------------- places in sorted rows


@aten("searchsorted.Tensor", "searchsorted.Scalar")
def searchsorted(
    c: Call, rows: Value, x: Operand, *, out_int32: bool = False, right: bool = False, side: str | None = None,
    sorter: Value | None = None,
) -> Value:  # fmt: skip
    """How many elements of a sorted row [..., n] stand before each of x [..., m]: those less than it, or (`right`)
    less or equal. NaN is greater than all; rows of floats are halved as PyTorch does, for what it finds in rows with
    NaN depends on where it looks.
    """
    b = c.b
    if sorter is not None:
        rows = b.one("gather_elements", rows, sorter, axis=rows.rank - 1)
    rows, places = c.promoted(rows, x)
    right = right or side == "right"
    n = rows.shape[-1]

    def behind(v: Value, element: Value) -> Value:
        return b.not_(b.lt(v, element) if right else b.le(v, element))

    if not isinstance(n, int) or n == 0 or (n <= _COMPARED and not rows.dtype.is_float):
        element = b.reshape(rows, (n,) if rows.rank == 1 else (*rows.shape[:-1], 1, n))
        searched = b.reshape(places, (*places.shape, 1))
        before = behind(searched, element)
        if rows.dtype.is_float:
            before = b.and_(before, b.or_(b.not_(b.isnan(element)), b.isnan(searched)))
        return b.reduce("sum", b.cast(before, dtypes.int64), [places.rank])
    low, high = b.full(places.shape, 0, dtypes.int64), b.full(places.shape, n, dtypes.int64)
    for _ in range(n.bit_length()):  # halves what is left each time
        middle = b.min(b.div(b.add(low, high), 2), n - 1)
        at = b.gather(rows, middle, 0) if rows.rank == 1 else b.one("gather_elements", rows, middle, axis=rows.rank - 1)
        further = b.and_(behind(places, at), b.lt(low, high))
        low, high = b.where(further, b.add(middle, 1), low), b.where(further, high, b.min(high, middle))
    return low


@aten("bucketize.Tensor", "bucketize.Scalar")
def bucketize(c: Call, x: Operand, boundaries: Value, *, out_int32: bool = False, right: bool = False) -> Value:
    return searchsorted(c, boundaries, x, right=right)
