"""Derivatives of reductions, cumulative sums and windows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from onnxc.autodiff.elementwise import zeros_like
from onnxc.autodiff.rules import Gradients, Step, rule
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim
from onnxc.ir.graph import Attrs, Value
from onnxc.primitives.builder import Builder

BY_TAPS = "by_taps"  # a hint of window_max: its derivative reads numbers of taps
MOST_TAPS = 32


def _spread(b: Builder, v: Value, like: Value, axes: Sequence[int]) -> Value:
    """A reduced value repeated along the axes that it lost."""
    kept = b.reshape(v, [1 if i in axes else d for i, d in enumerate(like.shape)])
    return b.expand(kept, like.shape)


@rule("reduce_sum")
def reduce_sum(s: Step) -> Gradients:
    return [_spread(s.b, s.dy, s.x, s.node.attrs["axes"])]


@rule("reduce_max", "reduce_min")
def reduce_extreme(s: Step) -> Gradients:
    """Equal elements share the derivative evenly."""
    b, axes = s.b, s.node.attrs["axes"]
    best = b.eq(s.x, _spread(b, s.y, s.x, axes))
    count = b.reduce("sum", b.cast(best, s.x.dtype), axes)
    return [b.where(best, _spread(b, b.div(s.dy, count), s.x, axes), 0.0)]


@rule("reduce_prod")
def reduce_prod(s: Step) -> Gradients:
    """The product of the others, exact where one of the factors is zero."""
    b, axes = s.b, s.node.attrs["axes"]
    zero = b.eq(s.x, 0.0)
    zeros = b.reduce("sum", b.cast(zero, s.x.dtype), axes)
    others = b.reduce("prod", b.where(zero, 1.0, s.x), axes)
    none = b.mul(s.dy, b.where(b.eq(zeros, 0.0), others, 0.0))
    one = b.mul(s.dy, b.where(b.eq(zeros, 1.0), others, 0.0))
    safe = b.where(zero, 1.0, s.x)
    return [b.where(zero, _spread(b, one, s.x, axes), b.div(_spread(b, none, s.x, axes), safe))]


@rule("cumsum")
def cumsum(s: Step) -> Gradients:
    """The sum from the other end."""
    attrs = s.node.attrs
    back = {"exclusive": attrs.get("exclusive", False), "reverse": not attrs.get("reverse", False)}
    return [s.b.one("cumsum", s.dy, axis=attrs["axis"], **back)]


@rule("window_sum")
def window_sum(s: Step) -> Gradients:
    """Each element adds up the windows that hold it: windows over the cotangent, with zeros between strides."""
    b, attrs = s.b, s.node.attrs
    gaps = [n - 1 for n in attrs["strides"]]
    spread = b.pad(s.dy, (0,) * s.x.rank, (0,) * s.x.rank, 0.0, gaps)
    low: list[Dim] = []
    high: list[Dim] = []
    rows = zip(s.x.shape, spread.shape, attrs["kernel"], attrs["dilations"], attrs["low"], strict=True)
    for i, (size, wide, k, step, before) in enumerate(rows):
        reach = step * (k - 1)
        lo = reach - before
        hi = size - wide - lo + reach
        cut_low, cut_high = _negative(lo), _negative(hi)
        spread = b.slice(spread, i, cut_low, wide - cut_high)
        low.append(lo + cut_low)
        high.append(hi + cut_high)
    return [
        b.one("window_sum", spread, kernel=attrs["kernel"], strides=(1,) * s.x.rank, low=tuple(low), high=tuple(high),
              dilations=attrs["dilations"])
    ]  # fmt: skip


def _negative(d: Dim) -> int:
    """By how much a padding is below zero: that is cropped. (One that depends on sizes is never.)"""
    return max(-d, 0) if isinstance(d, int) else 0


@rule("window_max")
def window_max(s: Step) -> Gradients:
    """Of equal elements the first in the window has it all."""
    few = BY_TAPS in s.node.attrs and prod(s.node.attrs["kernel"]) <= MOST_TAPS
    return [(_by_taps if few else _by_windows)(s.b, s.x, s.y, s.dy, s.node.attrs)]


def _by_windows(b: Builder, x: Value, y: Value, dy: Value, attrs: Attrs) -> Value:
    """The cotangent of `x`, whose windows have the maxima `y`.

    Windows along several axes are taken apart: the maxima of their rows, and the maxima of those. The first row with
    the maximum, and the first element in it, is the first element of all; and the taps are far fewer.
    """
    wide = [k for k, n in enumerate(attrs["kernel"]) if n > 1]
    if len(wide) > 1:
        rows, others = (_along(attrs, chosen) for chosen in (wide[-1:], [k for k in range(x.rank) if k != wide[-1]]))
        inner = b.one("window_max", x, **rows)
        return _by_windows(b, x, inner, _by_windows(b, inner, y, dy, others), rows)
    padded = b.pad(x, attrs["low"], attrs["high"], -np.inf)
    total: Value | None = None
    taken: Value | None = None
    for tap in product(*(range(k) for k in attrs["kernel"])):
        starts = tuple(j * d for j, d in zip(tap, attrs["dilations"], strict=True))
        seen = b.one("slice", padded, starts=starts, sizes=tuple(y.shape), steps=tuple(attrs["strides"]))
        best = b.eq(seen, y)
        if taken is not None:
            best = b.and_(best, b.not_(taken))
        taken = best if taken is None else b.or_(taken, best)
        part = _put_back(b, b.where(best, dy, 0.0), padded, starts, attrs["strides"])
        total = part if total is None else b.add(total, part)
    inside = zeros_like(b, padded) if total is None else total
    return b.one("slice", inside, starts=tuple(attrs["low"]), sizes=tuple(x.shape), steps=(1,) * x.rank)


def _by_taps(b: Builder, x: Value, y: Value, dy: Value, attrs: Attrs) -> Value:
    """The same by the number of each window's first greatest element, which takes a byte: an element of `x` reads it of
    every window that it is in. For a target whose time goes into reading, and not into the tests.
    """
    padded = b.pad(x, attrs["low"], attrs["high"], -np.inf)
    taps = list(enumerate(product(*(range(k) for k in attrs["kernel"]))))
    starts = [tuple(j * d for j, d in zip(tap, attrs["dilations"], strict=True)) for _, tap in taps]
    first = b.full(y.shape, b.scalar(len(taps), dtypes.uint8), dtypes.uint8)
    for k, _ in reversed(taps):
        seen = b.one("slice", padded, starts=starts[k], sizes=tuple(y.shape), steps=tuple(attrs["strides"]))
        first = b.where(b.eq(seen, y), b.scalar(k, dtypes.uint8), first)
    total: Value | None = None
    for k, _ in taps:
        own = b.where(b.eq(first, b.scalar(k, dtypes.uint8)), dy, 0.0)
        part = _put_back(b, own, padded, starts[k], attrs["strides"])
        total = part if total is None else b.add(total, part)
    inside = zeros_like(b, padded) if total is None else total
    return b.one("slice", inside, starts=tuple(attrs["low"]), sizes=tuple(x.shape), steps=(1,) * x.rank)


def _along(attrs: Attrs, axes: Collection[int]) -> dict[str, Any]:
    """Windows along these axes alone; along the others they have one element."""
    plain = {"kernel": 1, "strides": 1, "low": 0, "high": 0, "dilations": 1}
    return {n: tuple(v if k in axes else one for k, v in enumerate(attrs[n])) for n, one in plain.items()}


def _put_back(b: Builder, part: Value, like: Value, starts: Sequence[int], strides: Sequence[int]) -> Value:
    """Elements of a strided slice in their places among zeros."""
    high = [
        size - start - ((count - 1) * step + 1)
        for size, start, count, step in zip(like.shape, starts, part.shape, strides, strict=True)
    ]
    return b.pad(part, starts, high, 0.0, [n - 1 for n in strides])
