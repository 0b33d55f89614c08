"""Spellings of views, padding, concatenation and counting."""

from __future__ import annotations

from typing import Any

from onnxc.export.common import Spelling, operand
from onnxc.export.nodes import NodeWriter
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, always_equal, is_nonnegative, maximum
from onnxc.ir.graph import Node


def _reshape(w: NodeWriter, node: Node, xs: list[str]) -> str:
    """To the sizes that the model computes, where these have to be found equal to those that there are."""
    equal = node.attrs.get("equal", ())
    computed = dict(zip(equal[1::2], equal[::2], strict=True))
    return w.reshape(xs[0], [computed.get(d, d) for d in node.attrs["shape"]])


def _expand(w: NodeWriter, node: Node, xs: list[str]) -> str:
    return w.compute("Expand", operand(node).dtype, xs, w.shape(node.attrs["shape"]))


def _slice(w: NodeWriter, node: Node, xs: list[str]) -> str:
    x = operand(node)
    rows = zip(x.shape, node.attrs["starts"], node.attrs["sizes"], node.attrs["steps"], strict=True)
    kept = [
        (axis, *row)
        for axis, row in enumerate(rows)
        if not (row[3] == 1 and row[1] == 0 and always_equal(row[0], row[2]))
    ]
    if not kept:
        return w.one("Identity", xs[0])
    ends = [_slice_end(w, dim, start + size * step, step) for _, dim, start, size, step in kept]
    ends_tensor = w.one("Concat", *ends, axis=0) if len(ends) > 1 else ends[0]
    return w.one(
        "Slice",
        xs[0],
        w.shape([k[2] for k in kept]),
        ends_tensor,
        w.ints(*(k[0] for k in kept)),
        w.ints(*(k[4] for k in kept)),
    )


def _slice_end(w: NodeWriter, dim: Dim, end: Dim, step: int) -> str:
    """Where a slice ends. Past the first element, where one counts down to it, is written `end - dim`."""
    if step > 0 or is_nonnegative(end):
        return w.dim(end)
    if isinstance(end, int):
        return w.ints(-(1 << 62))
    below = w.one("Less", w.dim(end), w.ints(0))
    return w.one("Where", below, w.dim(end - dim), w.dim(end))


def _pad(w: NodeWriter, node: Node, xs: list[str]) -> str:
    x, value = xs
    dtype, shape = operand(node).dtype, list(operand(node).shape)
    for axis, gap in enumerate(node.attrs["interior"]):
        if gap:
            x, shape[axis] = _interleave(w, x, value, dtype, shape, axis, gap)
    pads = (*node.attrs["low"], *node.attrs["high"])
    return x if all(always_equal(p, 0) for p in pads) else w.pad(x, value, dtype, pads)


def _interleave(
    w: NodeWriter, x: str, value: str, dtype: DType, shape: list[Any], axis: int, gap: int
) -> tuple[str, Dim]:
    """`gap` values between neighbours: each element is a row that is padded; the last padding is cut off."""
    rank, d = len(shape), shape[axis]
    rows = w.reshape(x, [*shape[: axis + 1], 1, *shape[axis + 1 :]])
    pads = [0] * (2 * (rank + 1))
    pads[rank + 1 + axis + 1] = gap
    rows = w.pad(rows, value, dtype, pads)
    whole = d * (gap + 1)
    flat = w.reshape(rows, [*shape[:axis], whole, *shape[axis + 1 :]])
    size = d + maximum(d - 1, 0) * gap
    return w.one("Slice", flat, w.ints(0), w.dim(size), w.ints(axis)), size


def _iota(w: NodeWriter, node: Node, xs: list[str]) -> str:
    size = w.one("Squeeze", w.dim(node.attrs["size"]))
    counted = w.one("Range", w.scalar(0, dtypes.int64), size, w.scalar(1, dtypes.int64))
    return counted if node.attrs["dtype"] is dtypes.int64 else w.cast(counted, node.attrs["dtype"])


def _sizes(w: NodeWriter, node: Node, xs: list[str]) -> str:
    return w.one("Identity", w.shape(node.attrs["dims"]))


SPELLINGS: dict[str, Spelling] = {
    "reshape": _reshape,
    "transpose": lambda w, node, xs: w.one("Transpose", *xs, perm=node.attrs["perm"]),
    "expand": _expand,
    "slice": _slice,
    "pad": _pad,
    "concat": lambda w, node, xs: w.one("Concat", *xs, axis=node.attrs["axis"]),
    "iota": _iota,
    "sizes": _sizes,
}
