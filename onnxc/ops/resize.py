"""Resize and its predecessor Upsample: axis by axis, by positions and weights computed from the index.

Positions are computed in float32, operation for operation as onnxruntime does, since a rounding more or
less picks another element. Where sizes are known they are constants; where not, arithmetic on the index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from onnxc.errors import ModelError, NeedsSizesError, ShapeError, UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim
from onnxc.ir.graph import Value
from onnxc.ops.common import constant_input, limited, static_dim, widened
from onnxc.ops.registry import Flag, op
from onnxc.primitives.builder import Builder, constant_of

Mode = Literal["nearest", "linear", "cubic"]
Nearest = Literal["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]
Policy = Literal["stretch", "not_larger", "not_smaller"]
Coordinates = Literal[
    "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_half_pixel_for_nn",
    "tf_crop_and_resize",
]  # fmt: skip


@dataclass(frozen=True)
class Axis:
    """How one axis is resized: sizes before and after, the scale (None: after / before), and the crop."""

    axis: int
    before: Dim
    after: Dim
    scale: float | None
    crop: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True)
class Style:
    """The attributes of a Resize that hold for every axis."""

    mode: str = "nearest"
    coordinates: str = "half_pixel"
    nearest: str = "round_prefer_floor"
    cubic_a: float = -0.75
    exclude_outside: bool = False
    extrapolation: float = 0.0
    antialias: bool = False


class _Grid:
    """The numbers that a coordinate transformation is written in: float32 values of an axis."""

    def __init__(self, b: Builder, axis: Axis) -> None:
        self.b = b
        self.i = b.cast(b.iota(axis.after), dtypes.float32)
        self.before = b.size_as(axis.before, dtypes.float32)
        self.after = b.size_as(axis.after, dtypes.float32)
        self.scale = b.div(self.after, self.before) if axis.scale is None else b.scalar(axis.scale, dtypes.float32)
        self.given, self.crop = axis.scale, axis.crop

    def half_pixel(self) -> Value:
        return self.b.sub(self.b.div(self.b.add(self.i, 0.5), self.scale), 0.5)

    def half_pixel_symmetric(self) -> Value:
        """Half pixels, with what rounding the output size lost shared by both ends."""
        b = self.b
        lost = b.sub(1.0, b.div(self.after, b.mul(self.scale, self.before)))
        offset = b.mul(b.div(self.before, 2.0), lost)
        i, scale, offset = (b.cast(v, dtypes.float64) for v in (self.i, self.scale, offset))  # as onnxruntime does
        return b.cast(b.sub(b.add(offset, b.div(b.add(i, 0.5), scale)), 0.5), dtypes.float32)

    def pytorch_half_pixel(self) -> Value:
        return self._unless_single(self.half_pixel(), 0.0)

    def align_corners(self) -> Value:
        """The last element lies on the last one, if the size is a whole one before it is cut to that."""
        b = self.b
        i, before, after = self.i, self.before, self.after
        if self.given is not None:
            i, before, scale = (b.cast(v, dtypes.float64) for v in (i, before, self.scale))
            after = b.mul(scale, before)
        last = b.max(b.sub(after, 1.0), 1.0)
        at = b.cast(b.div(b.mul(i, b.sub(before, 1.0)), last), dtypes.float32)
        return self._unless_single(at, 0.0)

    def asymmetric(self) -> Value:
        return self.b.div(self.i, self.scale)

    def tf_half_pixel_for_nn(self) -> Value:
        return self.b.div(self.b.add(self.i, 0.5), self.scale)

    def tf_crop_and_resize(self) -> Value:
        b, (start, end) = self.b, self.crop
        edge = b.sub(self.before, 1.0)
        inner = b.div(b.mul(b.mul(self.i, end - start), edge), b.max(b.sub(self.after, 1.0), 1.0))
        return self._unless_single(b.add(b.mul(edge, start), inner), b.mul(edge, 0.5 * (start + end)))

    def _unless_single(self, many: Value, one: Value | float) -> Value:
        """What is right for an output of more than one element, or for one alone."""
        return self.b.where(self.b.lt(self.b.scalar(1.0, dtypes.float32), self.after), many, one)


_COORDINATES: dict[str, Callable[[_Grid], Value]] = {
    "half_pixel": _Grid.half_pixel, "half_pixel_symmetric": _Grid.half_pixel_symmetric,
    "pytorch_half_pixel": _Grid.pytorch_half_pixel, "align_corners": _Grid.align_corners,
    "asymmetric": _Grid.asymmetric, "tf_half_pixel_for_nn": _Grid.tf_half_pixel_for_nn,
    "tf_crop_and_resize": _Grid.tf_crop_and_resize,
}  # fmt: skip


def _away_from_zero(b: Builder, x: Value) -> Value:
    """C's round for x >= -0.5 or so: halves up (a negative position is clamped to 0 anyway)."""
    return b.floor(b.add(x, 0.5))


def _nearest(b: Builder, x: Value, style: Style, scale: Value) -> Value:
    """The whole position nearest to a coordinate."""
    if style.nearest == "floor":
        return b.floor(x)
    if style.nearest == "ceil":
        return b.unary("ceil", x)
    if style.nearest == "round_prefer_ceil":
        return _away_from_zero(b, x)
    if style.nearest == "round_prefer_floor":
        return b.unary("ceil", b.sub(x, 0.5))
    if style.nearest == "simple":  # before opset 11: up when shrinking, else down
        return b.where(b.lt(scale, 1.0), b.unary("ceil", x), b.floor(x))
    raise ModelError(f"Resize has no nearest_mode {style.nearest!r}")


def _along(b: Builder, weights: Value, x: Value, axis: int) -> Value:
    """A vector of weights in the type of x, laid along an axis."""
    return b.cast(b.reshape(weights, (weights.shape[0], *(1,) * (x.rank - 1 - axis))), x.dtype)


def pick(b: Builder, x: Value, axis: int, index: Value) -> Value:
    """x at the given positions of an axis: as a view where the positions form a simple pattern."""
    known = constant_of(index)
    size = x.shape[axis]
    if known is not None and isinstance(size, int) and known.size and size:
        times = known.size // size
        if times and np.array_equal(known, np.repeat(np.arange(size), times)):
            return repeat_each(b, x, axis, times)
    return _read(b, x, axis, index)


def _read(b: Builder, x: Value, axis: int, index: Value) -> Value:
    """x at the given positions of an axis: as a view where they are known to be evenly spaced."""
    known = constant_of(index)
    if known is not None and known.size and isinstance(x.shape[axis], int):
        step = int(known[1] - known[0]) if known.size > 1 else 1
        if step > 0 and np.array_equal(known, known[0] + step * np.arange(known.size)):
            return b.slice(x, axis, int(known[0]), int(known[-1]) + 1, step)
    return b.gather(x, index, axis)


def repeat_each(b: Builder, x: Value, axis: int, times: Dim) -> Value:
    """Every element of an axis `times` times in a row."""
    lead, tail = x.shape[:axis], x.shape[axis + 1 :]
    wide = b.expand(b.reshape(x, (*lead, x.shape[axis], 1, *tail)), (*lead, x.shape[axis], times, *tail))
    return b.reshape(wide, (*lead, x.shape[axis] * times, *tail))


def _positions(b: Builder, at: Value, size: Dim) -> Value:
    """Float positions as indices inside an axis."""
    return b.cast(b.clip(at, 0.0, b.sub(b.size_as(size, dtypes.float32), 1.0)), dtypes.int64)


def _is_repeat(axis: Axis, style: Style) -> int | None:
    """The factor, where nearest neighbours are known to repeat each element, whatever the size."""
    if axis.before == 0:
        return None
    times = axis.after // axis.before if axis.scale is None else int(axis.scale)
    if not isinstance(times, int) or times < 1 or axis.after != axis.before * times or axis.scale not in (None, times):
        return None
    halves = style.coordinates in ("half_pixel", "pytorch_half_pixel") and style.nearest.startswith("round")
    return times if halves or (style.coordinates == "asymmetric" and style.nearest in ("floor", "simple")) else None


def _nearest_axis(b: Builder, x: Value, axis: Axis, style: Style) -> Value:
    times = _is_repeat(axis, style)
    if times is not None:
        return repeat_each(b, x, axis.axis, times)
    grid = _Grid(b, axis)
    at = _COORDINATES[style.coordinates](grid)
    y = pick(b, x, axis.axis, _positions(b, _nearest(b, at, style, grid.scale), axis.before))
    return _extrapolated(b, y, axis, style, at)


def _linear_axis(b: Builder, x: Value, axis: Axis, style: Style) -> Value:
    at = _COORDINATES[style.coordinates](_Grid(b, axis))
    last = b.sub(b.size_as(axis.before, dtypes.float32), 1.0)
    inside = b.clip(at, 0.0, last)
    low = b.floor(inside)
    # Of the last element and itself halves are added, as onnxruntime does: 0 times an infinite one would be NaN.
    share = _along(b, b.where(b.lt(low, last), b.sub(inside, low), 0.5), x, axis.axis)
    first = _read(b, x, axis.axis, _positions(b, low, axis.before))
    second = _read(b, x, axis.axis, _positions(b, b.add(low, 1.0), axis.before))
    y = b.add(b.mul(first, b.sub(1.0, share)), b.mul(second, share))
    return _extrapolated(b, y, axis, style, at)


def cubic_weights(b: Builder, share: Value, a: float) -> list[Value]:
    """Keys, Cubic convolution interpolation: the weights of the four neighbours of a point."""

    def near(t: Value) -> Value:  # |t| <= 1
        return b.add(b.mul(b.mul(b.sub(b.mul(t, a + 2), a + 3), t), t), 1.0)

    def far(t: Value) -> Value:  # 1 < |t| < 2
        return b.sub(b.mul(b.add(b.mul(b.sub(b.mul(t, a), 5 * a), t), 8 * a), t), 4 * a)

    rest = b.sub(1.0, share)
    return [far(b.add(share, 1.0)), near(share), near(rest), far(b.add(rest, 1.0))]


def _cubic_axis(b: Builder, x: Value, axis: Axis, style: Style) -> Value:
    at = _COORDINATES[style.coordinates](_Grid(b, axis))
    low = b.floor(at)
    weights = cubic_weights(b, b.sub(at, low), style.cubic_a)
    places = [b.add(low, float(k - 1)) for k in range(4)]
    if style.exclude_outside:
        end = b.size_as(axis.before, dtypes.float32)
        inside = [b.and_(b.le(b.scalar(0.0, dtypes.float32), p), b.lt(p, end)) for p in places]
        weights = [b.where(i, w, 0.0) for i, w in zip(inside, weights, strict=True)]
        total = b.add(b.add(weights[0], weights[1]), b.add(weights[2], weights[3]))
        weights = [b.div(w, total) for w in weights]
    y: Value | None = None
    for place, weight in zip(places, weights, strict=True):
        tap = b.mul(_read(b, x, axis.axis, _positions(b, place, axis.before)), _along(b, weight, x, axis.axis))
        y = tap if y is None else b.add(y, tap)
    assert y is not None
    return _extrapolated(b, y, axis, style, at)


def _extrapolated(b: Builder, y: Value, axis: Axis, style: Style, at: Value) -> Value:
    """With tf_crop_and_resize, a constant where the coordinate is outside of the input."""
    if style.coordinates != "tf_crop_and_resize":
        return y
    end = b.sub(b.size_as(axis.before, dtypes.float32), 1.0)
    outside = b.or_(b.lt(at, 0.0), b.lt(end, at))
    mask = b.reshape(outside, (axis.after, *(1,) * (y.rank - 1 - axis.axis)))
    return b.where(mask, style.extrapolation, y)


def _antialias_axis(b: Builder, x: Value, axis: Axis, style: Style) -> Value:
    """Shrinking with a filter that widens with the factor."""
    before, after = (
        static_dim(axis.before, "Resize with antialias"),
        static_dim(axis.after, "Resize with antialias"),
    )
    if after == 0:
        return b.slice(x, axis.axis, 0, 0)
    places = _COORDINATES[style.coordinates](_Grid(b, axis))
    at = constant_of(places)
    if at is None:
        raise UnsupportedError(f"Resize with antialias to {after} elements is not supported")
    scale = min(axis.scale if axis.scale is not None else after / before, 1.0)
    reach = int(np.ceil(2 / scale)) + 1
    limited(after * (before + 2 * reach), "Resize with antialias")
    taps = np.arange(-reach, before + reach)
    distance = np.abs(at[:, None].astype(np.float64) - taps) * scale
    if style.mode == "linear":
        weights = np.maximum(1 - distance, 0)
    else:
        a, t = style.cubic_a, distance
        near, far = ((a + 2) * t - (a + 3)) * t * t + 1, ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
        weights = np.where(t < 1, near, np.where(t < 2, far, 0))
    if style.exclude_outside:
        weights *= (taps >= 0) & (taps < before)
    total = weights.sum(1, keepdims=True)
    weights /= np.where(total == 0, 1, total)  # none is in reach of what lies far outside
    inner = np.zeros((before, after))
    np.add.at(inner, np.clip(taps, 0, before - 1), weights.T)  # the edge stands for what is beyond it
    return _extrapolated(b, weighted(b, x, axis.axis, inner.astype(x.dtype.numpy)), axis, style, places)


MOST_TAPS = 24  # of a filter that is written out; a longer one is a matrix


def weighted(b: Builder, x: Value, axis: int, matrix: np.ndarray) -> Value:
    """Sums of neighbours along an axis: [elements, results] weights, of which a result has a few that are not 0."""
    used = matrix != 0
    taps = int(used.sum(0).max(initial=0))
    if not 0 < taps <= MOST_TAPS or 4 * taps > len(matrix):
        rows = b.reshape(x, (1, *x.shape)) if x.rank == 1 else b.swap(x, axis, x.rank - 1)
        sums = b.matmul(rows, b.constant(matrix))
        return b.reshape(sums, sums.shape[1:]) if x.rank == 1 else b.swap(sums, axis, x.rank - 1)
    order = np.argsort(~used, axis=0, kind="stable")[:taps]  # of each result the taps that it has, then others
    places = np.where(np.take_along_axis(used, order, 0), order, order[:1])
    weights = np.take_along_axis(matrix, places, 0)
    first = places == places[:1]  # read again instead of a tap that there is not: it shares its weight
    weights = np.where(first, weights / first.sum(0), weights).astype(matrix.dtype)
    y: Value | None = None
    for place, weight in zip(places, weights, strict=True):
        tap = b.mul(b.gather(x, b.constant(place), axis), _along(b, b.constant(weight), x, axis))
        y = tap if y is None else b.add(y, tap)
    assert y is not None
    return y


def _rounded(b: Builder, x: Value, dtype: DType) -> Value:
    """Floats as the nearest integers, halves away from zero, inside of the range of a dtype."""
    info = np.iinfo(dtype.numpy)
    y = b.where(b.lt(x, 0.0), b.unary("ceil", b.sub(x, 0.5)), b.floor(b.add(x, 0.5)))
    greatest = np.float32(info.max)  # which int32 does not have
    greatest = greatest if float(greatest) <= info.max else np.nextafter(greatest, np.float32(0))
    return b.clip(y, float(info.min), float(greatest))


def resize(b: Builder, x: Value, axes: Sequence[Axis], style: Style) -> Value:
    """x with each of the axes resized; floats are computed in float32 at least.

    Integers are truncated; with antialias they are rounded after each axis, the last axis first, as in onnxruntime.
    """
    if style.coordinates not in _COORDINATES:
        raise ModelError(f"Resize has no coordinate_transformation_mode {style.coordinates!r}")
    crops = style.coordinates == "tf_crop_and_resize"
    axes = [a for a in axes if crops or a.before != a.after or a.scale not in (None, 1.0)]
    if style.mode == "nearest":
        for axis in axes:
            x = _nearest_axis(b, x, axis, style)
        return x
    if style.mode not in ("linear", "cubic"):
        raise ModelError(f"Resize has no mode {style.mode!r}")
    y = widened(b, x) if x.dtype.is_float else b.cast(x, dtypes.float32)
    if style.antialias:
        for axis in sorted(axes, key=lambda a: -a.axis):
            y = _antialias_axis(b, y, axis, style)
            y = _rounded(b, y, x.dtype) if x.dtype.is_integer else y
        return b.cast(y, x.dtype)
    step = _linear_axis if style.mode == "linear" else _cubic_axis
    for axis in axes:
        y = step(b, y, axis, style)
    return b.cast(y, x.dtype)


def _scaled(size: Dim, scale: float) -> Dim:
    """floor(size * scale); a size known only at run time needs a scale that is a simple fraction, or is waited for."""
    if isinstance(size, int):
        return int(np.float32(scale) * np.float32(size))
    exact = Fraction(float(scale)).limit_denominator(1024)
    if float(np.float32(exact.numerator / exact.denominator)) != float(np.float32(scale)):
        raise NeedsSizesError(f"Resize by the scale {scale} needs to know the size {size}", size)
    return size * exact.numerator // exact.denominator


def _by_scales(
    x: Value, scales: Sequence[float], axes: Sequence[int], crops: Sequence[tuple[float, float]],
) -> list[Axis]:  # fmt: skip
    if len(scales) != len(axes) or min(scales, default=1) <= 0:
        raise ModelError(f"Resize has the scales {list(scales)} for the axes {list(axes)} of {x.t}")
    found = []
    for axis, scale, crop in zip(axes, scales, crops, strict=True):
        size = x.shape[axis]
        # The standard's text has the roi in this size; its shape inference, its evaluator and onnxruntime do not.
        found.append(Axis(axis, size, _scaled(size, scale), float(scale), crop))
    return found


def _by_sizes(
    x: Value, sizes: Sequence[Dim], axes: Sequence[int], crops: Sequence[tuple[float, float]], policy: str,
) -> list[Axis]:  # fmt: skip
    if len(sizes) != len(axes):
        raise ShapeError(f"Resize has the sizes {list(sizes)} for the axes {list(axes)} of {x.t}")
    own = [x.shape[a] for a in axes]
    if policy == "stretch":
        return [Axis(a, d, s, None, c) for a, d, s, c in zip(axes, own, sizes, crops, strict=True)]
    ratios = [static_dim(s, "Resize") / static_dim(d, "Resize") for s, d in zip(sizes, own, strict=True)]
    scale = min(ratios) if policy == "not_larger" else max(ratios)
    return [
        Axis(a, d, int(np.floor(scale * static_dim(d, "Resize") + 0.5)), scale, c)
        for a, d, c in zip(axes, own, crops, strict=True)
    ]


def _present(v: Value | None) -> bool:
    """True for an input that is there: exporters write an empty tensor for an absent one."""
    return v is not None and v.shape != (0,)


@op("Resize", 11)
def resize_11(
    b: Builder, x: Value, roi: Value | None = None, scales: Value | None = None, sizes: Value | None = None,
    *, antialias: Flag = 0, axes: list[int] | None = None, coordinate_transformation_mode: Coordinates = "half_pixel",
    cubic_coeff_a: float = -0.75, exclude_outside: Flag = 0, extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: Policy = "stretch", mode: Mode = "nearest",
    nearest_mode: Nearest = "round_prefer_floor",
) -> Value:  # fmt: skip
    style = Style(
        mode, coordinate_transformation_mode, nearest_mode, cubic_coeff_a, bool(exclude_outside),
        extrapolation_value, bool(antialias),
    )  # fmt: skip
    places = list(range(x.rank)) if axes is None else [b.axis(a, x.rank) for a in axes]
    if len(set(places)) < len(places):
        raise ModelError(f"Resize names an axis twice: {axes}")
    crops = [(0.0, 1.0)] * len(places)
    if style.coordinates == "tf_crop_and_resize" and roi is not None:
        region = constant_input(roi, "the roi of Resize").astype(np.float64)
        crops = [(float(region[i]), float(region[i + len(places)])) for i in range(len(places))]
    if _present(sizes):
        assert sizes is not None
        wanted = b.ints(sizes, "the sizes of Resize")
        return resize(b, x, _by_sizes(x, wanted, places, crops, keep_aspect_ratio_policy), style)
    if not _present(scales):
        raise ModelError("Resize has neither scales nor sizes")
    assert scales is not None
    factors = constant_input(scales, "the scales of Resize").ravel()
    return resize(b, x, _by_scales(x, [float(f) for f in factors], places, crops), style)


def _legacy(b: Builder, x: Value, scales: Sequence[float], mode: str) -> Value:
    """Before opset 11 a position was simply divided by the scale."""
    crops = [(0.0, 1.0)] * x.rank
    found = _by_scales(x, [float(f) for f in scales], range(x.rank), crops)
    return resize(b, x, found, Style(mode.replace("bilinear", "linear"), "asymmetric", "simple"))


@op("Resize", 10, 10)
@op("Upsample", 9)
def upsample_9(b: Builder, x: Value, scales: Value, *, mode: str = "nearest") -> Value:
    return _legacy(b, x, constant_input(scales, "the scales of Upsample").ravel().tolist(), mode)


@op("Upsample", 7, 8)
def upsample_7(b: Builder, x: Value, *, mode: str = "nearest", scales: list[float]) -> Value:
    return _legacy(b, x, scales, mode)
