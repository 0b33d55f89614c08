"""Pools: a window's maximum, mean or norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce as fold
from itertools import product

import ml_dtypes

from onnxc.errors import LimitError, ShapeError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, ceildiv, maximum, minimum, prod
from onnxc.ir.graph import Value
from onnxc.ops.common import along, flat_at_zero, from_start, lowest, of_shape
from onnxc.ops.conv import Window, window_of
from onnxc.ops.registry import Flag, op
from onnxc.primitives.builder import Builder, constant_of
from onnxc.primitives.contraction import window_size

# MaxPool that also gives positions is built from one slice for each element of the window.
MAX_TAPS = 1024


def with_ceil(spatial: Sequence[Dim], window: Window) -> Window:
    """Rounds the number of windows up, by more padding at the end; a window still begins before that padding.

    ONNX: ceil((size + pads - span) / stride + 1), less one where the last window would begin past the input. The first
    is ceil((size + low + stride + high - span) / stride), and the last window begins past where its excess is positive.
    """
    high: list[Dim] = []
    for d, s, span, lo, hi in zip(spatial, window.strides, window.spans, window.low, window.high, strict=True):
        count = ceildiv(d + lo + minimum(s + hi - span, 0), s)
        last = (count - 1) * s + span - d - lo  # what the last window reads of padding
        # Where a window is shorter than a stride, that may be less than was asked for: to pad by the rest of the stride
        # adds no window, and is a size without a maximum in it.
        high.append(maximum(last, minimum(hi, 0)) if isinstance(last, int) else last + max(s - span, 0))
    return replace(window, high=tuple(high))


def _positions(spatial: Sequence[Dim], window: Window) -> tuple[Dim, ...]:
    rows = zip(spatial, window.kernel, window.strides, window.low, window.high, window.dilations, strict=True)
    return tuple(window_size(*row, empty=True) for row in rows)


def pool(b: Builder, primitive: str, x: Value, window: Window) -> Value:
    """A window primitive over the last axes, its padding cropped where it is negative, as only a model's own can be."""
    lead = x.rank - len(window.kernel)
    crop = [min(h, 0) if isinstance(h, int) else 0 for h in window.high]
    for i, c in enumerate(crop):
        if c != 0:
            x = b.slice(x, lead + i, 0, x.shape[lead + i] + c)
    ones, zeros = (1,) * lead, (0,) * lead
    return b.one(
        primitive, x, kernel=ones + window.kernel, strides=ones + window.strides,
        dilations=ones + window.dilations, low=zeros + window.low,
        high=zeros + tuple(h - c for h, c in zip(window.high, crop, strict=True)),
    )  # fmt: skip


@op("MaxPool", 1)
def max_pool(
    b: Builder, x: Value, *, kernel_shape: list[int], auto_pad: str = "NOTSET", ceil_mode: Flag = 0,
    dilations: list[int] | None = None, pads: list[int] | None = None, storage_order: Flag = 0,
    strides: list[int] | None = None, n_outputs: int,
) -> list[Value]:  # fmt: skip
    window = window_of(x.shape[2:], kernel_shape, strides, dilations, pads, auto_pad)
    if ceil_mode:
        window = with_ceil(x.shape[2:], window)
    y = pool(b, "window_max", x, window)
    return [y] if n_outputs == 1 else [y, _max_positions(b, x, window, bool(storage_order))]


def _max_positions(b: Builder, x: Value, window: Window, column_major: bool) -> Value:
    """Where in the whole input each window has its first maximum, counted by rows or by columns."""
    spatial = x.shape[2:]
    count = _positions(spatial, window)
    at = b.reshape(b.one("argmax", _taps(b, x, window, count), axis=0, last=False), (*x.shape[:2], *count))
    total: Value | None = None
    weight: Dim = 1
    order = range(len(spatial)) if column_major else reversed(range(len(spatial)))
    inner = [prod(window.kernel[i + 1 :]) for i in range(len(spatial))]
    for i in order:
        tap = b.binary("mod", b.div(at, b.size_as(inner[i], at.dtype)), window.kernel[i])
        base = b.sub(b.mul(b.iota(count[i]), window.strides[i]), b.size_as(window.low[i], at.dtype))
        place = b.add(b.mul(tap, window.dilations[i]), along(b, base, len(spatial), i))
        place = b.mul(place, b.size_as(weight, at.dtype))
        total = place if total is None else b.add(total, place)
        weight = weight * spatial[i]
    assert total is not None
    planes = b.mul(b.iota(x.shape[0] * x.shape[1]), b.size_as(weight, at.dtype))
    return b.add(total, b.reshape(planes, (*x.shape[:2], *(1,) * len(spatial))))


def _taps(b: Builder, x: Value, window: Window, count: Sequence[Dim]) -> Value:
    """[taps, N, C, positions...]: every element of every window; padding is less than any element."""
    if math.prod(window.kernel) > MAX_TAPS:
        raise LimitError(f"MaxPool with positions has a window {window.kernel} of more than {MAX_TAPS}")
    least = lowest(x.dtype)
    if x.dtype.is_integer:  # of 8 bits
        x, least = b.cast(x, dtypes.int32), least - 1
    elif any(d != 0 for d in (*window.low, *window.high)):  # where all is -inf, it is an element that is meant
        x = b.max(x, float(ml_dtypes.finfo(x.dtype.numpy).min))  # type: ignore[no-untyped-call]
    padded = b.pad(x, (0, 0, *window.low), (0, 0, *(maximum(h, 0) for h in window.high)), least)
    taps = []
    for offset in product(*(range(k) for k in window.kernel)):
        starts = (0, 0, *(o * d for o, d in zip(offset, window.dilations, strict=True)))
        tap = b.one("slice", padded, starts=starts, sizes=(*x.shape[:2], *count), steps=(1, 1, *window.strides))
        taps.append(b.reshape(tap, (1, *tap.shape)))
    return b.concat(taps, 0)


@op("AveragePool", 1)
def average_pool(
    b: Builder, x: Value, *, kernel_shape: list[int], auto_pad: str = "NOTSET", ceil_mode: Flag = 0,
    count_include_pad: Flag = 0, dilations: list[int] | None = None, pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Value:  # fmt: skip
    """The mean over a window. `count_include_pad` counts padding as zeros, never what `ceil_mode` adds."""
    spatial = x.shape[2:]
    plain = window_of(spatial, kernel_shape, strides, dilations, pads, auto_pad)
    window = with_ceil(spatial, plain) if ceil_mode else plain
    total = pool(b, "window_sum", x, window)
    counts = [_counts(b, i, spatial[i], plain, window, bool(count_include_pad), x.dtype) for i in range(len(spatial))]
    same = prod(c for c in counts if isinstance(c, int))
    differing = [along(b, c, len(counts), i) for i, c in enumerate(counts) if not isinstance(c, int)]
    return b.div(total, b.mul(fold(b.mul, differing), same) if differing else same)  # type: ignore[arg-type]


def _counts(
    b: Builder, axis: int, size: Dim, plain: Window, window: Window, include_pad: bool, dtype: DType,
) -> Value | int:  # fmt: skip
    """How many elements of each window along an axis count: one number where all are equal."""
    low, high = (plain.low[axis], plain.high[axis])
    kernel, stride, dilation = window.kernel[axis], window.strides[axis], window.dilations[axis]
    if (low == 0 and window.high[axis] == 0) or (include_pad and window.high[axis] == high):
        return kernel
    start, end = (0, size + low + high) if include_pad else (low, low + size)
    ones = b.full((end - start,), 1, dtype)
    outer = Window((kernel,), (stride,), (dilation,), (start,), (size + low + window.high[axis] - end,))
    counts = b.max(pool(b, "window_sum", ones, outer), 1)  # of no elements the mean is 0, as onnxruntime has it
    known = constant_of(counts)
    return int(known[0]) if known is not None and known.size and (known == known[0]).all() else counts


@op("LpPool", 2)
def lp_pool(
    b: Builder, x: Value, *, kernel_shape: list[int], auto_pad: str = "NOTSET", ceil_mode: Flag = 0,
    dilations: list[int] | None = None, p: int = 2, pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Value:  # fmt: skip
    """(sum of |x| ** p) ** (1 / p) over each window."""
    window = window_of(x.shape[2:], kernel_shape, strides, dilations, pads, auto_pad)
    if ceil_mode:
        window = with_ceil(x.shape[2:], window)
    return root(b, pool(b, "window_sum", power(b, x, p), window), p)


def power(b: Builder, x: Value, p: int) -> Value:
    """|x| ** p."""
    return b.mul(x, x) if p == 2 else b.abs(x) if p == 1 else b.pow(b.abs(x), float(p))


def root(b: Builder, x: Value, p: int) -> Value:
    """x ** (1 / p)."""
    if p == 1:
        return x
    return flat_at_zero(b, lambda v: b.sqrt(v) if p == 2 else b.pow(v, 1 / p), x)


def _spatial(x: Value) -> range:
    return range(2, x.rank)


@op("GlobalAveragePool", 1)
def global_average_pool(b: Builder, x: Value) -> Value:
    return b.mean(x, _spatial(x), True)


@op("GlobalMaxPool", 1)
def global_max_pool(b: Builder, x: Value) -> Value:
    return b.reduce("max", x, _spatial(x), True)


@op("GlobalLpPool", 2)
def global_lp_pool(b: Builder, x: Value, *, p: int = 2) -> Value:
    return root(b, b.reduce("sum", power(b, x, p), _spatial(x), True), p)


@op("MaxUnpool", 9)
def max_unpool(
    b: Builder, x: Value, index: Value, output_shape: Value | None = None, *, kernel_shape: list[int],
    pads: list[int] | None = None, strides: list[int] | None = None,
) -> Value:  # fmt: skip
    """Zeros, with the elements of x at the positions that MaxPool gave.

    Positions count in a tensor of the size that follows from the window; a larger output has zeros behind it.
    """
    n = x.rank - 2
    step, around = strides or [1] * n, pads or [0] * (2 * n)
    if not len(kernel_shape) == len(step) == n or len(around) != 2 * n:
        raise ShapeError(f"MaxUnpool has kernel {kernel_shape}, strides {step}, pads {around} for {n} spatial axes")
    inferred = [
        (d - 1) * s - around[i] - around[n + i] + k
        for i, (d, s, k) in enumerate(zip(x.shape[2:], step, kernel_shape, strict=True))
    ]
    shape = [*x.shape[:2], *inferred]
    flat = b.full((prod(shape),), 0, x.dtype)
    where = b.reshape(of_shape(b, index, x.shape, "the positions of MaxUnpool"), (prod(x.shape),))
    filled = b.one(
        "scatter_elements",
        flat,
        from_start(b, where, prod(shape)),
        b.reshape(x, (prod(x.shape),)),
        axis=0,
        reduction="none",
    )
    y = b.reshape(filled, shape)
    if output_shape is None:
        return y
    wanted = b.ints(output_shape, "the shape of MaxUnpool")
    behind = [d - own for d, own in zip(wanted, shape, strict=True)]
    if any(isinstance(d, int) and d < 0 for d in behind):
        raise ShapeError(f"MaxUnpool to {wanted} needs {shape} at least")
    return b.pad(y, [0] * y.rank, behind)
