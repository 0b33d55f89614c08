"""Fourier transforms of real and complex values along one axis, without a factor before them."""

from __future__ import annotations

import numpy as np

from onnxc.ir.graph import Value
from onnxc.ops.slicing import crop_or_pad
from onnxc.ops.spectral import fourier
from onnxc.primitives.builder import Builder
from onnxc.primitives.pairs import Complex, Number, each


def transform(b: Builder, x: Number, axis: int, length: int, sign: int, half: bool = False) -> Complex:
    """X[k] = sum over n of e^(sign 2 pi i k n / length) x[n], of x cut or continued with zeros to the length; with
    `half`, the first half of the results, whose mirror image the rest is where x is real.
    """
    x = _last(b, each(lambda v: crop_or_pad(b, v, axis, length), x), axis)
    re, im = fourier(b, (x.re, x.im) if isinstance(x, Complex) else (x, None), length, sign)
    assert im is not None
    found: Number = Complex(re, im)
    if half:
        found = each(lambda v: b.slice(v, v.rank - 1, 0, length // 2 + 1), found)
    found = _back(b, found, axis)
    assert isinstance(found, Complex)
    return found


def to_real(b: Builder, x: Number, axis: int, length: int) -> Value:
    """The transform of sign 1 of a symmetric spectrum, of which the first half is given."""
    kept = length // 2 + 1
    x = _last(b, each(lambda v: crop_or_pad(b, v, axis, kept), x), axis)
    re, im = (x.re, x.im) if isinstance(x, Complex) else (x, b.full(x.shape, 0.0, x.dtype))
    last = x.rank - 1
    alone = [0] if length % 2 else [0, kept - 1]  # what is its own mirror image is real
    im = b.where(b.constant(np.isin(np.arange(kept), alone)), b.scalar(0, im.dtype), im)
    mirrored = (length - 1) // 2
    re_tail, im_tail = (b.flip(b.slice(v, last, 1, 1 + mirrored), [last]) for v in (re, im))
    re, _ = fourier(b, (b.concat([re, re_tail], last), b.concat([im, b.neg(im_tail)], last)), length, 1)
    found = _back(b, re, axis)
    assert isinstance(found, Value)
    return found


def _last(b: Builder, x: Number, axis: int) -> Number:
    """The axis at the end."""
    return each(lambda v: b.transpose(v, [*(k for k in range(v.rank) if k != axis), axis]), x)


def _back(b: Builder, x: Number, axis: int) -> Number:
    """The last axis in its place again."""
    order = list(range(x.rank - 1))
    order.insert(axis, x.rank - 1)
    return each(lambda v: b.transpose(v, order), x)
