"""Spellings of matmul, convolution, attention and pooling windows."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxc.export.common import Spelling, operand
from onnxc.export.nodes import NodeWriter
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, always_equal, prod
from onnxc.ir.graph import Node
from onnxc.primitives.attention import fill_of, score_steps

ARITHMETIC = {"add": "Add", "sub": "Sub", "scale": "Mul", "max": "Max"}


def _matmul(w: NodeWriter, node: Node, xs: list[str]) -> str:
    dtype = node.output.dtype
    if node.attrs.get("wide"):
        zeros = node.attrs.get("zeros", (0, 0))
        xs = [w.cast(x, dtype) for x in xs]
        xs = [w.compute("Sub", dtype, [x, w.scalar(z, dtype)]) if z else x for x, z in zip(xs, zeros, strict=True)]
    return w.compute("MatMul", dtype, xs)


def _conv(w: NodeWriter, node: Node, xs: list[str]) -> str:
    dtype, attrs = node.output.dtype, node.attrs
    pads = (*attrs["low"], *attrs["high"])
    xs = [w.cast(x, dtype) for x in xs] if attrs.get("wide") else xs
    if len(xs) > 2:
        xs = [w.pad(xs[0], xs[2], dtype, (0, 0, *attrs["low"], 0, 0, *attrs["high"])), xs[1]]
        pads = (0,) * len(pads)
    if not all(isinstance(p, int) for p in pads):
        rank = operand(node).rank
        zeros: list[Dim] = [0, 0]
        around = zeros + list(attrs["low"]) + zeros + list(attrs["high"])
        xs = [w.pad(xs[0], w.scalar(0, dtype), dtype, around), xs[1]]
        pads = (0,) * (2 * (rank - 2))
    return w.compute(
        "Conv",
        dtype,
        xs,
        strides=attrs["strides"],
        dilations=attrs["dilations"],
        pads=pads,
        group=attrs["groups"],
    )


def _conv_weights(w: NodeWriter, node: Node, xs: list[str]) -> str:
    """A Conv in which images and channels change places, and strides and dilations too."""
    dtype, attrs, groups, rank = node.output.dtype, node.attrs, node.attrs["groups"], node.output.rank
    (x, dy), (_, c, *kernel) = node.operands, node.output.shape
    swapped, n, spatial, high = (1, 0, *range(2, rank)), x.shape[0], list(x.shape[2:]), list(attrs["high"])
    image, low, known = xs[0], attrs["low"], True
    rows = zip(kernel, dy.shape[2:], *(attrs[key] for key in ("dilations", "strides", "low")), strict=True)
    for i, (k, out, dilation, stride, lo) in enumerate(rows):
        over = dilation * (k - 1) + stride * (out - 1) + 1 - lo - spatial[i]  # what windows reach beyond the image
        if not isinstance(over, int):
            known = False
            continue
        if over < 0:  # less than a stride: else another window would fit
            image = w.one("Slice", image, w.ints(0), w.dim(spatial[i] + over), w.ints(i + 2))
            spatial[i] = spatial[i] + over
        high[i] = max(over, 0)
    if not all(isinstance(p, int) for p in (*low, *high)):
        image = w.pad(image, w.scalar(0, dtype), dtype, [0, 0, *low, 0, 0, *high])
        spatial = [d + p + q for d, p, q in zip(spatial, low, high, strict=True)]
        low, high = (0,) * len(low), [0] * len(high)
    if groups > 1:
        image = w.one("Transpose", w.reshape(image, (n, groups, c, *spatial)), perm=(2, 1, 0, *range(3, rank + 1)))
        image = w.reshape(image, (c, groups * n, *spatial))
    else:
        image = w.one("Transpose", image, perm=swapped)
    kernels = w.one("Transpose", xs[1], perm=swapped)
    found = w.compute("Conv", dtype, [image, kernels], strides=attrs["dilations"], dilations=attrs["strides"],
                      pads=(*low, *high), group=groups)  # fmt: skip
    found = w.one("Transpose", found, perm=swapped)
    if known:
        return found
    axes = range(2, rank)  # there may be more taps than wanted
    return w.one("Slice", found, w.ints(*(0 for _ in axes)), w.ints(*kernel), w.ints(*axes))


def _matmul_quantized(w: NodeWriter, node: Node, xs: list[str]) -> str:
    """The weights are made as numbers, then multiplied: ONNX's blocked DequantizeLinear has no float zero points."""
    rows = w.constant(np.arange(node.operands[1].shape[0]) // node.attrs["block"])
    weights = w.cast(xs[1], dtypes.float32)
    if len(xs) > 3:
        weights = w.one("Sub", weights, w.one("Gather", xs[3], rows, axis=0))
    return w.one("MatMul", xs[0], w.one("Mul", weights, w.one("Gather", xs[2], rows, axis=0)))


def _attention(w: NodeWriter, node: Node, xs: list[str]) -> str:
    dtype = operand(node).dtype
    scores = w.compute("MatMul", dtype, xs[:2])
    scores = w.compute("Mul", dtype, [scores, w.scalar(node.attrs.get("scale", 1.0), dtype)])
    masks = list(zip((v.dtype for v in node.operands[3:]), xs[3:], strict=True))
    fits = all(of in (dtype, dtypes.boolean) for of, _ in masks)
    wide = dtype if fits else dtypes.float32  # masks may be wider than what is multiplied
    scores = scores if fits else w.cast(scores, wide)
    names = [x if of in (wide, dtypes.boolean) else w.cast(x, wide) for of, x in masks]
    for name, mask, number in score_steps(node.attrs, names):
        scores = _score_step(w, wide, scores, name, mask, number)
    p = w.compute("Softmax", wide, [scores], axis=-1)
    p = p if wide is dtype else w.cast(p, dtype)
    if node.attrs.get("guard", False):
        p = w.select(dtype, w.one("IsNaN", p), w.scalar(0, dtype), p)
    return w.compute("MatMul", dtype, [p, xs[2]])


def _score_step(w: NodeWriter, dtype: DType, s: str, name: str, mask: Any, number: float | None) -> str:
    if name == "tanh":
        return w.compute("Tanh", dtype, [s])
    if name in ("add", "sub"):
        return w.compute(ARITHMETIC[name], dtype, [s, mask])
    assert number is not None
    given = w.constant(fill_of(number, dtype.numpy))
    if name in ("fill", "keep"):
        return w.select(dtype, mask, *((given, s) if name == "fill" else (s, given)))
    return w.compute(ARITHMETIC[name], dtype, [s, given])


def _window(op_type: str, pool: str, combine: str, native: set[str]) -> Spelling:
    """A pool where one fits (up to three axes, a dtype that has one), else the shifted slices one by one."""

    def spell(w: NodeWriter, node: Node, xs: list[str]) -> str:
        x, attrs = operand(node), node.attrs
        fill = 0 if op_type == "sum" else _lowest(x.dtype)
        pads = (*attrs["low"], *attrs["high"])
        padded = xs[0]
        if not all(always_equal(p, 0) for p in pads):
            padded = w.pad(xs[0], w.scalar(fill, x.dtype), x.dtype, pads)
        shape = [d + lo + hi for d, lo, hi in zip(x.shape, attrs["low"], attrs["high"], strict=True)]
        axes = [a for a in range(x.rank) if attrs["kernel"][a] != 1 or attrs["strides"][a] != 1]
        if not axes:
            return w.one("Identity", padded)
        if x.dtype.name in native and len(axes) <= 3:
            return _pool(w, node, padded, shape, axes, pool)
        for axis in axes:
            padded = _shifted(w, node, padded, axis, combine)
        return padded

    return spell


def _lowest(dtype: DType) -> float | int:
    return -np.inf if dtype.is_float else int(np.iinfo(dtype.numpy).min)


def _pool(w: NodeWriter, node: Node, x: str, shape: list[Any], axes: list[int], pool: str) -> str:
    """A pooling op over the windowed axes: they are moved to the end, all others become the batch."""
    attrs, rank = node.attrs, len(shape)
    rest = [a for a in range(rank) if a not in axes]
    perm = [*rest, *axes]
    moved = x if perm == list(range(rank)) else w.one("Transpose", x, perm=perm)
    flat = w.reshape(moved, [prod(shape[a] for a in rest), 1, *(shape[a] for a in axes)])
    kernel, strides, dilations = ([attrs[k][a] for a in axes] for k in ("kernel", "strides", "dilations"))
    more = {"count_include_pad": 1} if pool == "AveragePool" else {}
    out = w.one(pool, flat, kernel_shape=kernel, strides=strides, dilations=dilations, **more)
    if pool == "AveragePool":
        out = w.one("Mul", out, w.scalar(int(prod(kernel)), operand(node).dtype))  # type: ignore[arg-type]
    sizes = node.output.shape
    back = w.reshape(out, [sizes[a] for a in perm])
    return back if perm == list(range(rank)) else w.one("Transpose", back, perm=[perm.index(a) for a in range(rank)])


def _shifted(w: NodeWriter, node: Node, x: str, axis: int, combine: str) -> str:
    """A window along one axis: the slices that hold its first, second, ... elements, combined."""
    attrs, size = node.attrs, node.output.shape[axis]
    stride, dilation = attrs["strides"][axis], attrs["dilations"][axis]
    taps = []
    for k in range(attrs["kernel"][axis]):
        start = k * dilation
        end = w.dim(start + (size - 1) * stride + 1)
        taps.append(w.one("Slice", x, w.ints(start), end, w.ints(axis), w.ints(stride)))
    total = taps[0]
    for tap in taps[1:]:
        total = w.compute(combine, operand(node).dtype, [total, tap])
    return total


SPELLINGS: dict[str, Spelling] = {
    "matmul": _matmul,
    "matmul_quantized": _matmul_quantized,
    "conv": _conv,
    "conv_weights": _conv_weights,
    "attention": _attention,
    "window_max": _window("max", "MaxPool", "Max", {"float16", "float32", "float64"}),
    "window_sum": _window("sum", "AveragePool", "Add", {"float32"}),
}
