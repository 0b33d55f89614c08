"""Images read at positions that are data: GridSample, AffineGrid, RoiAlign, DeformConv, and Col2Im."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce as fold
from itertools import product
from typing import Literal

import numpy as np

from onnxc.errors import ModelError, ShapeError, UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, prod
from onnxc.ir.graph import Value
from onnxc.ops.common import along, from_start, limited, of_shape, static_dim, static_shape
from onnxc.ops.conv import kernel_of, window_of, with_bias
from onnxc.ops.registry import Flag, op
from onnxc.ops.resize import cubic_weights
from onnxc.primitives.builder import Builder


@dataclass(frozen=True)
class Tap:
    """Along one axis: positions [N, out...], whole floats inside of it, their weights (None: one), and where they count
    at all (None: everywhere): where they do not, what is read may be infinite.
    """

    at: Value
    weight: Value | None
    counts: Value | None = None


def weighted_sum(
    b: Builder, x: Value, taps: Sequence[Sequence[Tap]], combine: str = "add", images: Value | None = None
) -> Value:
    """x [N, C, D...] read at every combination of one tap for each D, weighted and added: [N, C, out...].

    With `images` [M], integers, the taps are [M, out...], each of the image that it names.
    """
    last = b.transpose(x, (0, *range(2, x.rank), 1))
    images = None if images is None else from_start(b, images, x.shape[0])
    total: Value | None = None
    for corner in product(*taps):
        shape = (*corner[0].at.shape, 1)
        places = [b.reshape(_index(b, t.at), shape) for t in corner]
        if images is not None:
            places.insert(0, b.expand(b.reshape(images, (shape[0], *(1,) * (len(shape) - 1))), shape))
        index = b.concat(places, len(shape) - 1)
        value = b.one("gather_nd", last, index, batch_dims=0 if images is not None else 1)
        weights = [t.weight for t in corner if t.weight is not None]
        if weights:
            weight = fold(b.mul, weights)
            weight = b.cast(b.reshape(weight, (*weight.shape, 1)), x.dtype)
            value = b.mul(value, weight)
            if combine == "max":  # a neighbour that does not count may be infinite
                value = b.where(b.eq(weight, 0.0), 0.0, value)
        counts = [t.counts for t in corner if t.counts is not None]
        if counts:
            value = b.where(b.reshape(fold(b.and_, counts), shape), value, 0.0)
        total = value if total is None else b.binary(combine, total, value)
    assert total is not None
    return b.transpose(total, (0, total.rank - 1, *range(1, total.rank - 1)))


def _index(b: Builder, at: Value) -> Value:
    """Whole positions as integers. What is no number reads the first element; its weight says what that counts."""
    return b.cast(b.where(b.unary("isnan", at), 0.0, at), dtypes.int64)


def zero_outside(b: Builder, at: Value, weight: Value | None, size: Dim) -> Tap:
    """A tap that counts nothing where its position is outside of the axis."""
    end = b.size_as(size, at.dtype)
    inside = b.and_(b.le(b.scalar(0.0, at.dtype), at), b.lt(at, end))
    return Tap(b.clip(at, 0.0, b.sub(end, 1.0)), weight, inside)


def linear_taps(b: Builder, at: Value, size: Dim) -> list[Tap]:
    """Both neighbours of a position, zero outside."""
    low = b.floor(at)
    share = b.sub(at, low)
    return [zero_outside(b, low, b.sub(1.0, share), size), zero_outside(b, b.add(low, 1.0), share, size)]


# ---------------------------------------------------------------- GridSample


def _reflected(b: Builder, at: Value, size: Dim, align_corners: bool) -> Value:
    """Positions mirrored at the borders of an axis until they are inside."""
    low = 0.0 if align_corners else -0.5
    extent = b.size_as(size - 1 if align_corners else size, at.dtype)
    period = b.max(b.mul(extent, 2.0), 1e-30)
    offset = b.abs(b.sub(at, low))  # mirrored before periods are taken away: what is near the border stays exact
    offset = b.sub(offset, b.mul(b.floor(b.div(offset, period)), period))
    return b.add(b.min(offset, b.sub(period, offset)), low)


def _placed(b: Builder, at: Value, weight: Value | None, size: Dim, padding: str, align_corners: bool) -> Tap:
    """A whole position with what the padding mode makes of it outside of the axis."""
    if padding == "zeros":
        return zero_outside(b, at, weight, size)
    if padding == "reflection":
        at = b.unary("ceil", b.sub(_reflected(b, at, size, align_corners), 0.25))  # -0.5 is 0
    return Tap(b.clip(at, 0.0, b.sub(b.size_as(size, at.dtype), 1.0)), weight)


@op("GridSample", 16)
def grid_sample(
    b: Builder, x: Value, grid: Value, *, align_corners: Flag = 0, mode: str = "linear",
    padding_mode: str = "zeros",
) -> Value:  # fmt: skip
    """x [N, C, D...] at the positions grid [N, out..., r] of -1 to 1, the last axis first."""
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    if mode not in ("linear", "nearest", "cubic") or padding_mode not in ("zeros", "border", "reflection"):
        raise ModelError(f"GridSample has the mode {mode!r} and the padding_mode {padding_mode!r}")
    spatial = x.shape[2:]
    grid = of_shape(b, grid, (x.shape[0], *grid.shape[1 : x.rank - 1], len(spatial)), "the grid of GridSample")
    parts = [b.reshape(p, p.shape[:-1]) for p in b.split(grid, grid.rank - 1, [1] * len(spatial))]
    taps = []
    for size, part in zip(spatial, reversed(parts), strict=True):
        length = b.size_as(size, part.dtype)
        if align_corners:
            at = b.mul(b.div(b.add(part, 1.0), 2.0), b.sub(length, 1.0))
        else:
            at = b.div(b.sub(b.mul(b.add(part, 1.0), length), 1.0), 2.0)
        taps.append(_grid_taps(b, at, size, mode, padding_mode, bool(align_corners)))
    return weighted_sum(b, x, taps)


def _grid_taps(b: Builder, at: Value, size: Dim, mode: str, padding: str, align: bool) -> list[Tap]:
    if mode == "nearest":
        at = b.round(at)
    if mode != "cubic" and padding == "border":
        at = b.clip(at, 0.0, b.sub(b.size_as(size, at.dtype), 1.0))
    elif mode != "cubic" and padding == "reflection":
        at = _reflected(b, at, size, align)
    if mode == "nearest":
        return [_placed(b, at, None, size, padding, align)]
    low = b.floor(at)
    share = b.sub(at, low)
    if mode == "linear":
        weights, first = [b.sub(1.0, share), share], 0
    else:
        weights, first = cubic_weights(b, share, -0.75), -1
    return [_placed(b, b.add(low, float(first + i)), w, size, padding, align) for i, w in enumerate(weights)]


@op("AffineGrid", 20)
def affine_grid(b: Builder, theta: Value, size: Value, *, align_corners: Flag = 0) -> Value:
    """The grid [N, D..., r] of an image of the size [N, C, D...] under the matrices theta [N, r, r + 1]."""
    spatial = static_shape(b.ints(size, "the size of AffineGrid"), "the size of AffineGrid")[2:]
    limited(prod(spatial), "AffineGrid")
    axes = [np.linspace(-1, 1, d) if align_corners else (2 * np.arange(d) + 1) / d - 1 for d in spatial]
    mesh = np.meshgrid(*axes, indexing="ij")
    points = np.stack([*mesh[::-1], np.ones(spatial)]).reshape(len(spatial) + 1, -1)
    out = b.matmul(theta, b.constant(points.astype(theta.dtype.numpy)))
    return b.reshape(b.swap(out, 1, 2), (theta.shape[0], *spatial, len(spatial)))


# ---------------------------------------------------------------- RoiAlign


def _roi_positions(b: Builder, start: Value, extent: Value, bins: int, samples: Dim, own: Value | None = None) -> Value:
    """[rois, bins * samples]: evenly spaced inside of each bin; as many of them as are a region's `own` count."""
    if own is None:
        assert isinstance(samples, int)
        limited(bins * samples, "RoiAlign")
        step = b.constant(((np.arange(bins * samples) + 0.5) / (bins * samples)).astype(start.dtype.numpy))
    else:
        each = b.max(b.size_as(samples, dtypes.int64), 1)
        k = b.iota(bins * samples)
        number, inner = (b.cast(b.binary(how, k, each), start.dtype) for how in ("div", "mod"))
        inner = b.div(b.add(inner, 0.5), b.reshape(b.max(own, 1.0), (*own.shape, 1)))
        step = b.div(b.add(number, inner), float(bins))
    return b.add(b.reshape(start, (*start.shape, 1)), b.mul(b.reshape(extent, (*extent.shape, 1)), step))


def _roi_taps(b: Builder, at: Value, size: Dim) -> list[Tap]:
    """Neighbours of a position; less than one element outside counts as the border, more as zero."""
    end = b.size_as(size, at.dtype)
    inside = b.and_(b.le(b.scalar(-1.0, at.dtype), at), b.le(at, end))
    place = b.clip(at, 0.0, b.sub(end, 1.0))
    low = b.floor(place)
    share = b.sub(place, low)
    high = b.min(b.add(low, 1.0), b.sub(end, 1.0))
    return [Tap(low, b.where(inside, b.sub(1.0, share), 0.0)), Tap(high, b.where(inside, share, 0.0))]


@op("RoiAlign", 10)
def roi_align(
    b: Builder, x: Value, rois: Value, batch_indices: Value, *,
    coordinate_transformation_mode: Literal["half_pixel", "output_half_pixel"] | None = None,
    mode: Literal["avg", "max"] = "avg", output_height: int = 1, output_width: int = 1, sampling_ratio: int = 0,
    spatial_scale: float = 1.0, opset: int,
) -> Value:  # fmt: skip
    """The mean over each bin of each region [x1, y1, x2, y2] of the image that it names.

    In mode max, as in onnxruntime, the greatest weighted neighbour of any sample.
    """
    if min(output_height, output_width, sampling_ratio) < 0:
        raise ModelError(f"RoiAlign to {output_height} x {output_width} with {sampling_ratio} samples")
    how = coordinate_transformation_mode or ("half_pixel" if opset >= 16 else "output_half_pixel")
    shift = 0.5 if how == "half_pixel" else 0.0
    scaled = b.sub(b.mul(rois, spatial_scale), shift)
    left, top, right, bottom = (b.reshape(p, p.shape[:1]) for p in b.split(scaled, 1, [1] * 4))
    extents = [b.sub(bottom, top), b.sub(right, left)]
    if how != "half_pixel":
        extents = [b.max(e, 1.0) for e in extents]
    bins = (output_height, output_width)
    count = rois.shape[0]
    own = (
        None
        if sampling_ratio > 0
        else [b.unary("ceil", b.div(e, float(max(n, 1)))) for e, n in zip(extents, bins, strict=True)]
    )
    samples = [sampling_ratio] * 2 if own is None else _most_samples(b, own)
    ys, xs = (
        _roi_positions(b, s, e, n, k, None if own is None else own[i])
        for i, (s, e, n, k) in enumerate(zip((top, left), extents, bins, samples, strict=True))
    )
    shape = (count, ys.shape[1], xs.shape[1])
    ys, xs = (
        b.expand(b.reshape(ys, (*ys.shape, 1)), shape),
        b.expand(b.reshape(xs, (count, 1, xs.shape[1])), shape),
    )
    taps = [_roi_taps(b, ys, x.shape[2]), _roi_taps(b, xs, x.shape[3])]
    y = weighted_sum(b, x, taps, "add" if mode == "avg" else "max", batch_indices)
    y = b.reshape(y, (count, x.shape[1], output_height, samples[0], output_width, samples[1]))
    if own is None:
        return b.mean(y, [3, 5]) if mode == "avg" else b.reduce("max", y, [3, 5])
    taken = [b.lt(b.cast(b.iota(k), n.dtype), b.reshape(n, (count, 1))) for n, k in zip(own, samples, strict=True)]
    rows, columns = (
        b.reshape(t, (count, 1, 1, *s)) for t, s in zip(taken, ((samples[0], 1, 1), (1, 1, samples[1])), strict=True)
    )
    both = b.and_(rows, columns)
    if mode == "avg":
        total = b.reduce("sum", b.where(both, y, 0.0), [3, 5])
        number = b.max(b.mul(b.max(own[0], 0.0), b.max(own[1], 0.0)), 1.0)
        return b.div(total, b.reshape(number, (count, 1, 1, 1)))
    some = b.and_(*(b.reshape(b.le(b.scalar(1.0, n.dtype), n), (count, 1, 1, 1)) for n in own))
    return b.where(some, b.reduce("max", b.where(both, y, -np.inf), [3, 5]), 0.0)


def _most_samples(b: Builder, own: Sequence[Value]) -> list[Dim]:
    """The most samples of a bin of any region, down and across."""
    zero = b.full((1,), 0.0, own[0].dtype)
    most = [b.cast(b.reduce("max", b.concat([zero, n], 0), [0], True), dtypes.int64) for n in own]
    return b.extents(b.concat(most, 0), "how many samples RoiAlign takes")


# ---------------------------------------------------------------- DeformConv, Col2Im


@op("DeformConv", 19)
def deform_conv(
    b: Builder, x: Value, w: Value, offset: Value, bias: Value | None = None, mask: Value | None = None, *,
    dilations: list[int] | None = None, group: int = 1, kernel_shape: list[int] | None = None,
    offset_group: int = 1, pads: list[int] | None = None, strides: list[int] | None = None,
) -> Value:  # fmt: skip
    """A 2D convolution, its taps moved by offsets [N, offset groups * kernel * 2, out...] and masked."""
    if x.rank != 4:
        raise UnsupportedError(f"DeformConv of {x.t}: only 2D is supported")
    n, channels = x.shape[:2]
    kernel = kernel_of("DeformConv", x, w, group, kernel_shape)
    window = window_of(x.shape[2:], kernel, strides, dilations, pads, "NOTSET")
    taps = limited(prod(kernel), "DeformConv")
    out = window.counts(x.shape[2:])
    offset = of_shape(b, offset, (n, offset_group * taps * 2, *out), "the offset of DeformConv")
    moved = b.reshape(offset, (n * offset_group, taps, 2, *out))
    images = b.reshape(x, (n * offset_group, channels // offset_group, *x.shape[2:]))
    axes = []
    for i in range(2):
        move = b.reshape(b.slice(moved, 2, i, i + 1), (n * offset_group, taps, *out))
        of_tap = np.indices(kernel)[i].ravel() * window.dilations[i]
        start = b.sub(b.mul(b.iota(out[i]), window.strides[i]), b.size_as(window.low[i], dtypes.int64))
        grid = b.add(along(b, b.constant(of_tap.astype(np.int64)), 3, 0), along(b, start, 2, i))
        axes.append(linear_taps(b, b.add(b.cast(grid, x.dtype), move), x.shape[i + 2]))
    columns = weighted_sum(b, images, axes)
    if mask is not None:
        mask = of_shape(b, mask, (n, offset_group * taps, *out), "the mask of DeformConv")
        columns = b.mul(columns, b.reshape(mask, (n * offset_group, 1, taps, *out)))
    # Rows of channels, which lie side by side where they are read.
    each = (n, offset_group, prod(out), taps, channels // offset_group)
    rows = b.reshape(b.transpose(columns, (0, 3, 4, 2, 1)), each)
    rows = b.reshape(b.transpose(rows, (0, 2, 3, 1, 4)), (n, prod(out), taps, group, channels // group))
    rows = b.reshape(b.transpose(rows, (0, 3, 1, 2, 4)), (n, group, prod(out), taps * (channels // group)))
    filters, wide = w.shape[0] // group, taps * w.shape[1]
    weights = b.transpose(b.reshape(w, (group, filters, w.shape[1], taps)), (0, 3, 2, 1))
    y = b.matmul(rows, b.reshape(weights, (1, group, wide, filters)))
    return with_bias(b, b.reshape(b.transpose(y, (0, 1, 3, 2)), (n, w.shape[0], *out)), bias)


@op("Col2Im", 18)
def col2im(
    b: Builder, x: Value, image_shape: Value, block_shape: Value, *, dilations: list[int] | None = None,
    pads: list[int] | None = None, strides: list[int] | None = None,
) -> Value:  # fmt: skip
    """Blocks [N, C * block, count] added up where they overlap: [N, C, image...]."""
    image = static_shape(b.ints(image_shape, "the image of Col2Im"), "the image of Col2Im")
    block = static_shape(b.ints(block_shape, "the block of Col2Im"), "the block of Col2Im")
    window = window_of(image, block, strides, dilations, pads, "NOTSET")
    low, high = static_shape(window.low, "pads"), static_shape(window.high, "pads")
    padded = [lo + d + hi for lo, d, hi in zip(low, image, high, strict=True)]
    count = [(p - s) // step + 1 for p, s, step in zip(padded, window.spans, window.strides, strict=True)]
    taps, size = prod(block), prod(padded)
    limited(taps * prod(count), "Col2Im")
    if static_dim(x.shape[2], "Col2Im") != prod(count):
        raise ShapeError(f"Col2Im of {x.t}: {prod(count)} blocks fit in the image {list(image)}")
    channels = x.shape[1] // taps
    turns = [-(-k // s) for k, s in zip(block, window.strides, strict=True)]
    if set(window.dilations) == {1} and int(np.prod(turns)) <= MOST_TURNS:
        y = _laid_out(b, b.reshape(x, (x.shape[0], channels, *block, *count)), window.strides, turns)
        made = static_shape(y.shape[2:], "the image of Col2Im")
        beyond = [max(p - d, 0) for p, d in zip(padded, made, strict=True)]
        return _cropped(b, b.pad(y, (0,) * y.rank, (0, 0, *beyond), 0), low, image)
    tap = np.indices(block).reshape(len(block), -1, 1)
    start = np.indices(count).reshape(len(block), 1, -1)
    shape = (-1, 1, 1)
    at = tap * np.reshape(window.dilations, shape) + start * np.reshape(window.strides, shape)
    flat = np.ravel_multi_index(tuple(at), padded).reshape(1, 1, -1).astype(np.int64)
    rows = (x.shape[0], channels, flat.size)
    zeros = b.full((x.shape[0], channels, size), 0, x.dtype)
    total = b.one(
        "scatter_elements",
        zeros,
        b.expand(b.constant(flat), rows),
        b.reshape(x, rows),
        axis=2,
        reduction="add",
    )
    return _cropped(b, b.reshape(total, (x.shape[0], channels, *padded)), low, image)


MOST_TURNS = 16  # blocks that overlap in a place


def _laid_out(b: Builder, x: Value, strides: Sequence[int], turns: Sequence[int]) -> Value:
    """Blocks [N, C, block..., count...] in steps of the strides, added up: [N, C, (count + turns - 1) * stride...].

    Along an axis a block is `turns` pieces of a stride's length, the last one filled up with zeros. Piece k of block i
    belongs to piece i + k of the result.
    """
    n, (lead, block, count) = len(strides), (x.shape[:2], x.shape[2 : 2 + len(strides)], x.shape[2 + len(strides) :])
    missing = [t * s - static_dim(k, "Col2Im") for t, s, k in zip(turns, strides, block, strict=True)]
    x = b.pad(x, (0,) * x.rank, (0, 0, *missing, *(0,) * n), 0)
    x = b.reshape(x, (*lead, *(d for pair in zip(turns, strides, strict=True) for d in pair), *count))
    y: Value | None = None
    for place in product(*map(range, turns)):
        piece = x
        for i, k in enumerate(place):
            piece = b.slice(piece, 2 + 2 * i, k, k + 1)
        piece, kept = b.reshape(piece, (*lead, *strides, *count)), (0,) * (2 + n)
        after = [t - 1 - k for t, k in zip(turns, place, strict=True)]
        piece = b.pad(piece, (*kept, *place), (*kept, *after), 0)
        y = piece if y is None else b.add(y, piece)
    assert y is not None
    y = b.transpose(y, (0, 1, *(k for i in range(n) for k in (2 + n + i, 2 + i))))
    return b.reshape(y, (*lead, *((d + t - 1) * s for d, t, s in zip(count, turns, strides, strict=True))))


def _cropped(b: Builder, y: Value, low: Sequence[int], image: Sequence[int]) -> Value:
    """The image within its padding."""
    for i, (lo, d) in enumerate(zip(low, image, strict=True)):
        y = b.slice(y, i + 2, lo, lo + d)
    return y
