"""ATen ops of distances between rows, and their derivatives."""

from __future__ import annotations

import math

import numpy as np

from onnxc.errors import UnsupportedError
from onnxc.frontends.torch_fx_pointwise import sign
from onnxc.frontends.torch_fx_table import Call, aten, static
from onnxc.ir.graph import Value
from onnxc.primitives.builder import Builder

_PAIRS = 1 << 20  # rows of a table of pairs


@aten("_cdist_forward")
def cdist(c: Call, x: Value, y: Value, p: float, mode: int | None) -> Value:
    """The distances [..., P, R] of rows [..., P, M] and [..., R, M]."""
    return _norm(c.b, _differences(c.b, x, y), p)


@aten("_cdist_backward")
def cdist_backward(c: Call, dy: Value, x: Value, y: Value, p: float, distances: Value) -> Value:
    b = c.b
    slopes = _slopes(c, _differences(b, x, y), _column(b, distances), p)
    return b.reduce("sum", b.mul(slopes, _column(b, dy)), [slopes.rank - 2])


@aten("_pdist_forward")
def pdist(c: Call, x: Value, p: float = 2) -> Value:
    """The distances of rows i < j, in the order of i, then j."""
    low, high = _pairs(c, x)
    return _norm(c.b, c.b.sub(c.b.gather(x, low, 0), c.b.gather(x, high, 0)), p)


@aten("_pdist_backward")
def pdist_backward(c: Call, dy: Value, x: Value, p: float, distances: Value) -> Value:
    b, (low, high) = c.b, _pairs(c, x)
    difference = b.sub(b.gather(x, low, 0), b.gather(x, high, 0))
    slopes = b.mul(_slopes(c, difference, _column(b, distances), p), _column(b, dy))
    total = b.full(x.shape, 0, x.dtype)
    for index, part in ((low, slopes), (high, b.neg(slopes))):
        rows = b.expand(b.reshape(index, (*index.shape, 1)), part.shape)
        total = b.one("scatter_elements", total, rows, part, axis=0, reduction="add")
    return total


def _differences(b: Builder, x: Value, y: Value) -> Value:
    """[..., P, R, M]"""
    (*lead, rows, width), (*others, columns, _) = x.shape, y.shape
    return b.sub(b.reshape(x, (*lead, rows, 1, width)), b.reshape(y, (*others, 1, columns, width)))


def _column(b: Builder, x: Value) -> Value:
    return b.reshape(x, (*x.shape, 1))


def _pairs(c: Call, x: Value) -> tuple[Value, Value]:
    n = static(x.shape[0], "the number of rows whose distances are computed")
    if n * (n - 1) // 2 > _PAIRS:
        raise UnsupportedError(f"the distances of {n} rows")
    low, high = np.triu_indices(n, 1)
    return c.b.constant(low.astype(np.int64)), c.b.constant(high.astype(np.int64))


def _norm(b: Builder, d: Value, p: float) -> Value:
    """Over the last axis."""
    last, size = [d.rank - 1], b.abs(d)
    if p == 0:
        return b.reduce("sum", b.cast(b.not_(b.eq(d, 0.0)), d.dtype), last)
    if p == 1:
        return b.reduce("sum", size, last)
    if p == 2:
        return b.sqrt(b.reduce("sum", b.mul(d, d), last))
    if p == math.inf:
        return b.reduce("max", size, last) if d.shape[-1] != 0 else b.full(d.shape[:-1], 0, d.dtype)
    return b.pow(b.reduce("sum", b.pow(size, p), last), 1 / p)


def _slopes(c: Call, d: Value, distance: Value, p: float) -> Value:
    """How the norm changes with each difference; zero where PyTorch says so, at a distance of zero."""
    b = c.b
    if p == 0:
        return b.full(d.shape, 0, d.dtype)
    if p == 1:
        return sign(c, d)
    if p == math.inf:
        return b.where(b.eq(b.abs(d), distance), sign(c, d), 0.0)
    none = b.eq(distance, 0.0)
    safe = b.where(none, 1.0, distance)
    if p == 2:
        return b.where(none, 0.0, b.div(d, safe))
    if p < 1:
        none = b.or_(none, b.eq(d, 0.0))
    size = b.where(none, 1.0, b.abs(d))
    return b.where(none, 0.0, b.mul(sign(c, d), b.pow(b.div(size, safe), p - 1)))
