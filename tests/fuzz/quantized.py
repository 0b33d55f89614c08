"""Steps: quantized operators, pairs of QuantizeLinear and DequantizeLinear, weights of few bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tests.fuzz.grow import F32, I8, U8, Grower, Item
from tests.fuzz.model import Draw
from tests.fuzz.reductions import image
from tests.fuzz.steps import step

INT4, UINT4 = np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.uint4)


def scale(g: Grower, shape: tuple[int, ...] = ()) -> Item:
    return g.constant(g.rng.uniform(0.02, 0.2, shape).astype(np.float32))


def zero(g: Grower, kind: np.dtype, shape: tuple[int, ...] = ()) -> Item:
    low, high = (-3, 4) if kind.name.startswith("int") else (0, 9)
    return g.constant(g.rng.integers(low, high, shape).astype(kind))


def quantized(g: Grower, x: Item, kind: np.dtype) -> tuple[Item, Item, Item]:
    """A tensor as bytes, with its scale and zero point."""
    s, z = scale(g), zero(g, kind)
    return g.emit("QuantizeLinear", [x, s, z]), s, z


@step(4)
def pair(g: Grower) -> Item:
    """Quantized and back, by tensor or by axis."""
    x = g.float()
    if x.dtype != F32:
        x = g.fresh(F32, g.shape())
    kind = g.choice([U8, I8])
    axis = g.integer(0, x.rank - 1) if x.rank and g.opset >= 13 and g.chance(0.5) else None
    shape = () if axis is None else (x.shape[axis],)
    s, z = scale(g, shape), zero(g, kind, shape)
    q = g.emit("QuantizeLinear", [x, s, z if g.chance(0.8) or kind == I8 else None], axis=axis)
    return g.emit("DequantizeLinear", [q, s, z if q.dtype == kind else None], axis=axis)


@step(3)
def pair_around(g: Grower) -> Item:
    """Pairs around a product or a convolution: what exporters of quantized models write."""
    image_ = g.chance(0.5)
    x = image(g, 4, 4) if image_ else g.float(2, 3)
    if x.dtype != F32:
        x = g.fresh(F32, [2, 4, 6, 6] if image_ else [3, 8])
    qx, sx, zx = quantized(g, x, g.choice([U8, I8]))
    x = g.emit("DequantizeLinear", [qx, sx, zx])
    shape = [g.choice([4, 8]), x.shape[1], 3, 3] if image_ else [x.shape[-1], g.integer(1, 9)]
    channels = shape[0] if image_ else shape[1]
    per_channel = g.opset >= 13 and g.chance(0.5)
    sw = scale(g, (channels,) if per_channel else ())
    zw = g.constant(np.zeros(sw.shape, np.int8))
    w = g.emit(
        "DequantizeLinear",
        [g.fresh(I8, shape, constant=True), sw, zw],
        axis=(0 if image_ else 1) if per_channel else None,
    )
    y = g.emit("Conv", [x, w], pads=[1, 1, 1, 1]) if image_ else g.emit("MatMul", [x, w])
    y = g.emit("Relu", [y]) if g.chance(0.5) else y
    qy, sy, zy = quantized(g, y, g.choice([U8, I8]))
    return g.emit("DequantizeLinear", [qy, sy, zy])


@step(2)
def integer_product(g: Grower) -> Item:
    a, b = g.choice([(U8, U8), (U8, I8), (I8, I8)])
    m, k, n = g.size(), g.size(), g.size()
    batch = g.shape(0, 1)
    x, w = g.fresh(a, [*batch, m, k]), g.fresh(b, [k, n])
    zx, zw = (zero(g, kind) if g.chance(0.6) else None for kind in (a, b))
    if g.chance(0.5):
        return g.emit("MatMulInteger", [x, w, zx, zw])
    return g.emit("QLinearMatMul", [x, scale(g), zero(g, a), w, scale(g), zero(g, b), scale(g), zero(g, a)])


@step(2)
def integer_conv(g: Grower) -> Item:
    a, b = g.choice([(U8, U8), (U8, I8), (I8, I8)])
    c = g.integer(1, 5)
    x = g.fresh(a, [g.integer(1, 2), c, g.integer(3, 8), g.integer(3, 8)])
    w = g.fresh(b, [g.integer(1, 9), c, g.integer(1, 3), g.integer(1, 3)], constant=True)
    attrs = {"pads": [1, 0, 1, 0]} if g.chance(0.4) and w.shape[2] > 1 else {}
    if g.chance(0.5):
        return g.emit("ConvInteger", [x, w, zero(g, a), zero(g, b)], **attrs)
    bias = g.constant(g.rng.integers(-99, 99, w.shape[0]).astype(np.int32)) if g.chance(0.5) else None
    by_channel = g.chance(0.4)
    sw, zw = scale(g, (w.shape[0],) if by_channel else ()), None
    zw = g.constant(np.zeros(sw.shape, b)) if by_channel else zero(g, b)
    return g.emit("QLinearConv", [x, scale(g), zero(g, a), w, sw, zw, scale(g), zero(g, a), bias], **attrs)


@step(2)
def dynamic_quantize(g: Grower) -> Item:
    x = g.float(1)
    if x.dtype != F32:
        x = g.fresh(F32, g.shape(1, 3), Draw("normal"))
    q, s, z = g.emit_all("DynamicQuantizeLinear", [x], 3)
    return g.emit("DequantizeLinear", [q, s, z])


@step(2)
def weight_only(g: Grower) -> Item:
    """A product with weights of 4 or 8 bits, by channel or in blocks."""
    k, n = 16 * g.integer(1, 2), g.integer(1, 9)
    x = g.fresh(F32, [g.size(), k], constant=False)
    kind = g.choice([I8, U8, INT4, UINT4])
    w = g.constant(g.rng.integers(-8 if kind.name.startswith("int") else 0, 8, (k, n)).astype(kind))
    if g.chance(0.5):
        s = scale(g, (k // 16, n))
        y = g.emit("DequantizeLinear", [w, s, zero(g, kind, s.shape) if g.chance(0.5) else None], axis=0, block_size=16)
    else:
        s = scale(g, (n,))
        y = g.emit("DequantizeLinear", [w, s, zero(g, kind, s.shape) if g.chance(0.5) else None], axis=1)
    return g.emit("MatMul", [x, y])
