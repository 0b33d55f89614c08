"""onnxruntime's contrib operators that ONNX took over later, or that move elements."""

from __future__ import annotations

from onnxc.errors import ModelError
from onnxc.ir import dtypes
from onnxc.ir.expr import floordiv
from onnxc.ir.graph import Value
from onnxc.ops.com_microsoft import MS
from onnxc.ops.indexing import gather_nd, trilu
from onnxc.ops.math import range_
from onnxc.ops.registry import op
from onnxc.ops.sampling import grid_sample
from onnxc.ops.slicing import pad_11
from onnxc.primitives.builder import Builder

op("Trilu", 1, domain=MS)(trilu)
op("GridSample", 1, domain=MS)(grid_sample)


@op("GatherND", 1, domain=MS)
def gather_nd_ms(b: Builder, x: Value, index: Value) -> Value:
    return gather_nd(b, x, index)


@op("Pad", 1, domain=MS)
def pad(b: Builder, x: Value, pads: Value, value: Value | None = None, *, mode: str = "constant") -> Value:
    """Pads [2 * rank] or [1, 2 * rank]."""
    return pad_11(b, x, b.reshape(pads, (2 * x.rank,)), value, mode=mode)


@op("ExpandDims", 1, domain=MS)
def expand_dims(b: Builder, x: Value, axis: Value) -> Value:
    (at,) = b.static_ints(axis, "the axis of ExpandDims")
    place = b.axis(at, x.rank + 1)
    return b.reshape(x, (*x.shape[:place], 1, *x.shape[place:]))


@op("Range", 1, domain=MS)
def range_ms(b: Builder, start: Value, limit: Value, delta: Value | None = None) -> Value:
    return range_(b, start, limit, b.scalar(1, start.dtype) if delta is None else delta)


@op("UnfoldTensor", 1, domain=MS)
def unfold_tensor(b: Builder, x: Value, *, dim: int = -1, size: int, step: int = 1) -> Value:
    """All runs of `size` elements along an axis, `step` apart, along a new last axis."""
    axis = b.axis(dim, x.rank)
    if size < 1 or step < 1:
        raise ModelError(f"UnfoldTensor: size {size} and step {step} must be positive")
    count = floordiv(x.shape[axis] - size, step) + 1
    starts = b.reshape(b.mul(b.iota(count), step), (count, 1))
    index = b.add(starts, b.iota(size, dtypes.int64))
    y = b.gather(x, index, axis)
    order = [*range(axis + 1), *range(axis + 2, y.rank), axis + 1]
    return b.transpose(y, order)
