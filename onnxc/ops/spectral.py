"""Fourier transforms, as products with matrices of short ones, and the windows and filters beside them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from onnxc.errors import ModelError, ShapeError
from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from onnxc.ops.common import constant_input, dtype_of, limited, static_dim, static_shape
from onnxc.ops.registry import Flag, op
from onnxc.ops.slicing import crop_or_pad
from onnxc.primitives.builder import Builder

Complex = tuple[Value, Value | None]  # real and imaginary parts; without the latter, of real numbers


def _parts(b: Builder, x: Value) -> tuple[Value, Value | None]:
    """Real and imaginary part of [..., 1] or [..., 2], without that axis."""
    shape = x.shape[:-1]
    if static_dim(x.shape[-1], "whether DFT transforms complex numbers") == 1:
        return b.reshape(x, shape), None
    real, imaginary = b.split(x, x.rank - 1, [1, 1])
    return b.reshape(real, shape), b.reshape(imaginary, shape)


def _last(b: Builder, x: Value, axis: int) -> Value:
    """The axis moved to the end."""
    return b.transpose(x, [*(i for i in range(x.rank) if i != axis), axis])


def _first(b: Builder, x: Value, axis: int) -> Value:
    """The last axis moved back to its place."""
    order = list(range(x.rank - 1))
    order.insert(axis, x.rank - 1)
    return b.transpose(x, order)


def _product(b: Builder, x: Value, matrix: np.ndarray) -> Value:
    m = b.constant(matrix.astype(x.dtype.numpy))
    return b.matmul(x, m) if x.rank > 1 else b.reshape(b.matmul(b.reshape(x, (1, *x.shape)), m), (matrix.shape[1],))


def _roots(numbers: np.ndarray, length: int, sign: int) -> tuple[np.ndarray, np.ndarray]:
    """Real and imaginary parts of e^(sign 2 pi i n / length), with exact zeros."""
    angle = 2 * math.pi * (numbers % length) / length
    cos, sin = np.cos(angle), sign * np.sin(angle)
    return np.where(np.abs(cos) < 1e-12, 0, cos), np.where(np.abs(sin) < 1e-12, 0, sin)


def _turned(b: Builder, x: Complex, cos: Value, sin: Value) -> Complex:
    """The product with numbers of the length 1."""
    real, imaginary = x
    out = b.mul(real, cos), b.mul(real, sin)
    if imaginary is None:
        return out
    return b.sub(out[0], b.mul(imaginary, sin)), b.add(out[1], b.mul(imaginary, cos))


def _direct(b: Builder, x: Complex, length: int, bins: int, sign: int) -> Complex:
    """The first bins of a transform along the last axis, as a product with its matrix."""
    limited(length * bins, "DFT")
    cos, sin = _roots(np.outer(np.arange(length), np.arange(bins)), length, sign)
    real, imaginary = x
    out = _product(b, real, cos), _product(b, real, sin)
    if imaginary is None:
        return out
    return b.sub(out[0], _product(b, imaginary, sin)), b.add(out[1], _product(b, imaginary, cos))


# A transform of real numbers is a product up to this length: it is one kernel, and reads what it needs once.
MOST_DIRECT = 2048


def _radix(length: int, real: bool) -> int:
    """The first factor by which a transform is divided, or the length itself."""
    if real and length <= MOST_DIRECT:
        return length
    return next((r for r in (8, 4, 2, 3, 5, 7, 11, 13) if length % r == 0), length)


def fourier(b: Builder, x: Complex, length: int, sign: int) -> Complex:
    """The transform along the last axis: short ones of r elements, turned, then those of what is left (Cooley, Tukey).

    X[k1 + r k2] = sum over n2 of w_m^(n2 k2) w_N^(n2 k1) sum over n1 of w_r^(n1 k1) x[m n1 + n2], for N = r m.
    """
    r = _radix(length, x[1] is None)
    if r == length:
        return _direct(b, x, length, length, sign)
    m = length // r
    lead = x[0].shape[:-1]
    rank = len(lead) + 2

    def each(x: Complex, f: Callable[[Value], Value]) -> Complex:
        return f(x[0]), None if x[1] is None else f(x[1])

    columns = each(x, lambda v: b.swap(b.reshape(v, (*lead, r, m)), rank - 2, rank - 1))
    short = _direct(b, columns, r, r, sign)  # [..., n2, k1]
    tables = _roots(np.outer(np.arange(m), np.arange(r)), length, sign)
    cos, sin = (b.constant(t.astype(x[0].dtype.numpy)) for t in tables)
    rows = each(_turned(b, short, cos, sin), lambda v: b.swap(v, rank - 2, rank - 1))
    found = fourier(b, rows, m, sign)  # [..., k1, k2]
    return each(found, lambda v: b.reshape(b.swap(v, rank - 2, rank - 1), (*lead, length)))


def transform(b: Builder, x: Value, axis: int, length: int, inverse: bool, onesided: bool) -> Value:
    """The discrete Fourier transform of [..., 1 or 2] along an axis of that length, cropped or padded."""
    half = length // 2 + 1
    if length < 1:
        raise ModelError(f"DFT has the length {length}")
    if onesided and inverse:
        limited(length * half, "DFT")
        return _real_inverse(b, x, axis, length)
    real, imaginary = (None if p is None else _last(b, crop_or_pad(b, p, axis, length), axis) for p in _parts(b, x))
    assert real is not None
    sign, bins = 1 if inverse else -1, half if onesided else length
    if _radix(length, imaginary is None) == length:
        found = _direct(b, (real, imaginary), length, bins, sign)
    else:
        limited(length, "DFT")
        found = fourier(b, (real, imaginary), length, sign)
    parts = []
    for part in found:
        assert part is not None
        part = b.slice(part, part.rank - 1, 0, bins)
        parts.append(_first(b, b.mul(part, 1 / length) if inverse else part, axis))
    return b.concat([b.reshape(p, (*p.shape, 1)) for p in parts], x.rank - 1)


def _real_inverse(b: Builder, x: Value, axis: int, length: int) -> Value:
    """From half of a symmetric spectrum to the real signal: all bins but the first and middle count twice."""
    half = length // 2 + 1
    real, imaginary = (None if p is None else _last(b, crop_or_pad(b, p, axis, half), axis) for p in _parts(b, x))
    assert real is not None
    angle = 2 * math.pi * np.outer(np.arange(half), np.arange(length)) / length
    twice = np.full((half, 1), 2.0)
    twice[0] = 1
    if length % 2 == 0:
        twice[-1] = 1
    out = _product(b, real, twice * np.cos(angle) / length)
    if imaginary is not None:
        out = b.sub(out, _product(b, imaginary, twice * np.sin(angle) / length))
    out = _first(b, out, axis)
    return b.reshape(out, (*out.shape, 1))


def _dft(b: Builder, x: Value, length: Value | None, axis: int, inverse: int, onesided: int) -> Value:
    axis = b.axis(axis, x.rank)
    if axis == x.rank - 1:
        raise ShapeError(f"DFT along the last axis of {x.t}, which holds real and imaginary parts")
    if length is not None:
        (n,) = b.static_ints(length, "the length of DFT")
    else:
        size = static_dim(x.shape[axis], "the length of DFT")
        n = 2 * (size - 1) if inverse and onesided else size
    return transform(b, x, axis, n, bool(inverse), bool(onesided))


@op("DFT", 17, 19)
def dft_17(
    b: Builder, x: Value, dft_length: Value | None = None, *, axis: int = 1, inverse: Flag = 0,
    onesided: Flag = 0,
) -> Value:  # fmt: skip
    return _dft(b, x, dft_length, axis, inverse, onesided)


@op("DFT", 20)
def dft_20(
    b: Builder, x: Value, dft_length: Value | None = None, axis: Value | None = None, *, inverse: Flag = 0,
    onesided: Flag = 0,
) -> Value:  # fmt: skip
    at = -2 if axis is None else b.static_ints(axis, "the axis of DFT")[0]
    return _dft(b, x, dft_length, at, inverse, onesided)


MOST_PARTS = 16  # of a frame that are as long as a step


def _frames(b: Builder, signal: Value, width: int, step: int) -> Value:
    """Each `step` samples the next `width`: [batch, length, k] to [batch, frames, width, k].

    Frames of a few steps are put together of these, which lie side by side: the samples then are read in a row, and not
    each by its place.
    """
    count = (signal.shape[1] - width) // step + 1
    parts = -(-width // step)
    if not 0 < parts <= MOST_PARTS:
        start = b.reshape(b.mul(b.iota(count), step), (count, 1))
        return b.gather(signal, b.add(start, b.iota(width)), 1)
    batch, _, k = signal.shape
    padded = b.pad(signal, [0, 0, 0], [0, parts * step - width, 0])
    rows = [b.part(padded, 1, part * step, count * step) for part in range(parts)]
    return b.slice(b.concat([b.reshape(x, (batch, count, step, k)) for x in rows], 2), 2, 0, width)


@op("STFT", 17)
def stft(
    b: Builder, signal: Value, frame_step: Value, window: Value | None = None,
    frame_length: Value | None = None, *, onesided: Flag = 1,
) -> Value:  # fmt: skip
    """[batch, length, 1 or 2] to [batch, frames, bins, 2]: the transform of each windowed frame."""
    if signal.rank == 2:
        signal = b.reshape(signal, (*signal.shape, 1))
    (step,) = b.static_ints(frame_step, "the step of STFT")
    if step < 1:
        raise ModelError(f"STFT has a frame_step of {step}; it must be positive")
    if frame_length is not None:
        (width,) = b.static_ints(frame_length, "the frame length of STFT")
    else:
        width = static_dim(signal.shape[1] if window is None else window.shape[0], "the frame length of STFT")
    frames = _frames(b, signal, width, step)
    if window is not None:
        frames = b.mul(frames, b.reshape(window, (*window.shape, 1)))
    return transform(b, frames, 2, width, False, bool(onesided))


@op("MelWeightMatrix", 17)
def mel_weight_matrix(
    b: Builder, num_mel_bins: Value, dft_length: Value, sample_rate: Value, lower_edge_hertz: Value,
    upper_edge_hertz: Value, *, output_datatype: int = 1,
) -> Value:  # fmt: skip
    """Triangular filters, evenly spaced on the mel scale: [dft_length / 2 + 1, num_mel_bins]."""
    bins, length, rate = (
        static_shape(b.ints(v, "MelWeightMatrix"), "MelWeightMatrix")[0]
        for v in (num_mel_bins, dft_length, sample_rate)
    )
    limited(length * bins, "MelWeightMatrix")
    edges = [
        float(constant_input(v, "an edge of MelWeightMatrix").item()) for v in (lower_edge_hertz, upper_edge_hertz)
    ]
    place = f"edges of {edges[0]} and {edges[1]} Hz"
    given = f"MelWeightMatrix of a dft_length of {length}, a sample_rate of {rate} and {place}"
    if length < 0 or rate < 1 or not all(0 <= f < math.inf for f in edges):
        raise ModelError(f"{given}: none of them may be negative, and the rate must be positive")
    low, high = (2595 * math.log10(1 + f / 700) for f in edges)
    mel = low + np.arange(bins + 2) * ((high - low) / (bins + 2))
    at = ((length + 1) * (700 * (10 ** (mel / 2595) - 1)) // rate).astype(np.int64)
    if at.max() > length // 2:
        raise ModelError(f"{given}: the upper edge is out of the range of {length // 2 + 1} bins")
    out = np.zeros((length // 2 + 1, bins))
    for i in range(bins):
        left, middle, right = at[i : i + 3]
        rise = middle - left
        if rise == 0:
            out[middle, i] = 1
        else:
            out[left : middle + 1, i] = np.arange(rise + 1) / rise
        if right > middle:
            out[middle:right, i] = (right - np.arange(middle, right)) / (right - middle)
    return b.constant(out.astype(dtype_of(output_datatype, "MelWeightMatrix").numpy))


def window(
    b: Builder, name: str, size: Value, dtype: int, periodic: bool, weights: tuple[float, float, float],
) -> Value:  # fmt: skip
    """w0 - w1 cos(2 pi n / d) + w2 cos(4 pi n / d) for n below the size; d is the size, or one less."""
    (count,) = b.ints(size, f"the size of {name}")
    n = b.cast(b.iota(count), dtypes.float64)
    period = b.size_as(count if periodic else count - 1, dtypes.float64)
    angle = b.div(b.mul(n, 2 * math.pi), period)
    y = b.sub(weights[0], b.mul(b.unary("cos", angle), weights[1]))
    if weights[2]:
        y = b.add(y, b.mul(b.unary("cos", b.mul(angle, 2.0)), weights[2]))
    return b.cast(y, dtype_of(dtype, name))


def _window_op(name: str, weights: tuple[float, float, float]) -> None:
    @op(name, 17)
    def define(b: Builder, size: Value, *, output_datatype: int = 1, periodic: Flag = 1) -> Value:
        return window(b, name, size, output_datatype, bool(periodic), weights)


_window_op("HannWindow", (0.5, 0.5, 0.0))
_window_op("HammingWindow", (25 / 46, 21 / 46, 0.0))
_window_op("BlackmanWindow", (0.42, 0.5, 0.08))
