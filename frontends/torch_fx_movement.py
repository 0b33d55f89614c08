"""ATen ops that make tensors, and that move their elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxc.errors import UnsupportedError
from onnxc.frontends.torch_fx_folded import unfolded
from onnxc.frontends.torch_fx_table import Call, Operand, aten, axes_of, axis_of, static
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, always_equal, floordiv, is_nonnegative, maximum, minimum
from onnxc.ir.graph import Value
from onnxc.ops.common import limited

_TABLE = 1 << 16  # numbers of a range that are a constant


@aten("view", "reshape", "_unsafe_view", "view_copy")
def view(c: Call, x: Value, size: Sequence[Dim]) -> Value:
    product = unfolded(c.b, x, c.type.shape) if c.sole else None
    return c.b.reshape(x, c.type.shape) if product is None else product


@aten("view.dtype", "view_copy.dtype")
def as_bits_of(c: Call, x: Value, to: Any) -> Value:
    """The same memory as elements of another type; of another width, the last axis is longer or shorter."""
    b, dtype = c.b, c.type.dtype
    if dtype is dtypes.boolean and x.dtype is not dtype:
        raise UnsupportedError("bits of numbers as bools, of which some are neither true nor false")
    if x.dtype is dtypes.boolean:
        x = b.cast(x, dtypes.uint8)
    own, wanted = x.dtype.bits, dtype.bits
    bits = b.bitcast(x, dtypes.BY_NAME[f"uint{own}"])
    if own == wanted:
        return b.bitcast(bits, dtype)
    wide, narrow = (dtypes.BY_NAME[f"uint{n}"] for n in (max(own, wanted), min(own, wanted)))
    places = b.cast(b.mul(b.iota(wide.bits // narrow.bits), narrow.bits), wide)  # the first is the least
    if own > wanted:
        moved = b.binary("shr", b.reshape(bits, (*bits.shape, 1)), places)
        found = b.cast(b.binary("bitand", moved, b.scalar((1 << wanted) - 1, wide)), narrow)
        return b.bitcast(b.reshape(found, c.type.shape), dtype)
    apart = b.reshape(b.cast(bits, wide), (*c.type.shape, wanted // own))
    return b.bitcast(b.reduce("sum", b.binary("shl", apart, places), [apart.rank - 1]), dtype)


@aten("squeeze", "squeeze.dim", "squeeze.dims", "unsqueeze")
def reshaped(c: Call, x: Value, axes: int | Sequence[int] = ()) -> Value:
    return c.b.reshape(x, c.type.shape)


@aten("permute")
def permute(c: Call, x: Value, dims: Sequence[int]) -> Value:
    return c.b.transpose(x, [axis_of(c, d, x.rank) for d in dims])


@aten("t")
def t(c: Call, x: Value) -> Value:
    return c.b.swap(x, 0, 1) if x.rank == 2 else x


@aten("transpose.int")
def transpose(c: Call, x: Value, a: int, b: int) -> Value:
    return c.b.swap(x, axis_of(c, a, x.rank), axis_of(c, b, x.rank)) if x.rank else x


@aten("expand")
def expand(c: Call, x: Value, size: Sequence[Dim], *, implicit: bool = False) -> Value:
    return c.b.expand(x, c.type.shape)


@aten("repeat")
def repeat(c: Call, x: Value, repeats: Sequence[Dim]) -> Value:
    shape = (1,) * (len(repeats) - x.rank) + x.shape
    between = [d for pair in zip(repeats, shape, strict=True) for d in (1, pair[1])]
    tiled = [d for pair in zip(repeats, shape, strict=True) for d in pair]
    return c.b.reshape(c.b.expand(c.b.reshape(x, between), tiled), c.type.shape)


def _is_negative(position: Dim) -> bool:
    """Whether a place counts from the end, whatever the sizes are."""
    return position < 0 if isinstance(position, int) else is_nonnegative(-position - 1)


def _inside(position: Dim | None, size: Dim, default: Dim) -> Dim:
    """A start or an end of a slice, from 0 to the size."""
    if position is None or (isinstance(position, int) and position >= 2**63 - 1):
        return default
    if _is_negative(position):
        return maximum(size + position, 0)
    if isinstance(position, int) or is_nonnegative(position):
        return minimum(position, size)
    if is_nonnegative(position - size + 2):  # n - 1, say: where it is negative, that from the end is before the start
        return minimum(maximum(position, 0), size)
    raise UnsupportedError(f"a slice at {position}, whose sign is not known")


@aten("slice.Tensor")
def slice_(c: Call, x: Value, axis: int = 0, start: Dim | None = None, end: Dim | None = None, step: int = 1) -> Value:
    axis = axis_of(c, axis, x.rank)
    size = x.shape[axis]
    first = _inside(start, size, 0)
    return c.b.slice(x, axis, first, maximum(_inside(end, size, size), first), static(step, "the step of a slice"))


@aten("select.int")
def select(c: Call, x: Value, axis: int, index: Dim) -> Value:
    axis = axis_of(c, axis, x.rank)
    at = _position(index, x.shape[axis])
    return c.b.reshape(c.b.slice(x, axis, at, at + 1), x.shape[:axis] + x.shape[axis + 1 :])


def _position(index: Dim, size: Dim) -> Dim:
    if _is_negative(index):
        return size + index
    if isinstance(index, int) or is_nonnegative(index):
        return index
    raise UnsupportedError(f"an index {index}, whose sign is not known")


@aten("slice_scatter")
def slice_scatter(
    c: Call, x: Value, source: Value, axis: int = 0, start: Dim | None = None, end: Dim | None = None, step: int = 1
) -> Value:
    axis = axis_of(c, axis, x.rank)
    size = x.shape[axis]
    first = _inside(start, size, 0)
    last = maximum(_inside(end, size, size), first)
    if step == 1:
        source = c.b.expand(source, (*x.shape[:axis], last - first, *x.shape[axis + 1 :]))
        parts = [c.b.slice(x, axis, 0, first), source, c.b.slice(x, axis, last, size)]
        return c.b.concat([p for p in parts if p.shape[axis] != 0], axis) if size != 0 else x
    count = c.b.slice(x, axis, first, last, step).shape[axis]
    places = c.b.add(c.b.mul(c.b.iota(count), step), c.b.size_as(first, dtypes.int64))
    index = c.b.reshape(places, (count, *(1,) * (x.rank - 1 - axis)))
    shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
    return c.b.one(
        "scatter_elements", x, c.b.expand(index, shape), c.b.expand(source, shape), axis=axis, reduction="none"
    )


@aten("select_scatter")
def select_scatter(c: Call, x: Value, source: Value, axis: int, index: Dim) -> Value:
    axis = axis_of(c, axis, x.rank)
    at = _position(index, x.shape[axis])
    row = c.b.reshape(source, (*x.shape[:axis], 1, *x.shape[axis + 1 :]))
    return slice_scatter(c, x, row, axis, at, at + 1)


@aten("cat")
def cat(c: Call, xs: Sequence[Value], axis: int = 0) -> Value:
    kept = [x for x in xs if not (x.rank == 1 and x.shape[0] == 0 and c.type.rank != 1)]  # PyTorch's old empty tensors
    if not kept:
        return c.b.full(c.type.shape, 0, c.type.dtype)
    return c.b.concat([c.b.cast(x, c.type.dtype) for x in kept], axis_of(c, axis, kept[0].rank))


@aten("stack")
def stack(c: Call, xs: Sequence[Value], axis: int = 0) -> Value:
    axis = c.b.axis(axis, xs[0].rank + 1)
    rows = [c.b.cast(x, c.type.dtype) for x in xs]
    return c.b.concat([c.b.reshape(x, (*x.shape[:axis], 1, *x.shape[axis:])) for x in rows], axis)


@aten("split_with_sizes")
def split_with_sizes(c: Call, x: Value, sizes: Sequence[Dim], axis: int = 0) -> list[Value]:
    return c.b.split(x, axis_of(c, axis, x.rank), sizes)


@aten("split.Tensor")
def split(c: Call, x: Value, size: Dim, axis: int = 0) -> list[Value]:
    axis = axis_of(c, axis, x.rank)
    return c.b.split(x, axis, [t.shape[axis] for t in c.types if t is not None])


@aten("unbind.int", "unbind_copy.int")
def unbind(c: Call, x: Value, axis: int = 0) -> list[Value]:
    return [select(c, x, axis, i) for i in range(len(c.types))]


@aten("flip")
def flip(c: Call, x: Value, dims: Sequence[int]) -> Value:
    return c.b.flip(x, axes_of(c, dims, x.rank) if dims else ())


@aten("constant_pad_nd")
def constant_pad_nd(c: Call, x: Value, pad: Sequence[Dim], value: Operand = 0) -> Value:
    low, high = _pads(x, pad)
    x = _cropped(c, x, low, high)
    below, above = ([maximum(d, 0) for d in side] for side in (low, high))
    return c.b.pad(x, below, above, c.operand(value, x.dtype))


def _pads(x: Value, pad: Sequence[Dim]) -> tuple[list[Dim], list[Dim]]:
    """By axis; PyTorch counts axes from the last."""
    low: list[Dim] = [0] * x.rank
    high: list[Dim] = [0] * x.rank
    for i in range(len(pad) // 2):
        low[x.rank - 1 - i], high[x.rank - 1 - i] = pad[2 * i], pad[2 * i + 1]
    return low, high


def _cropped(c: Call, x: Value, low: Sequence[Dim], high: Sequence[Dim]) -> Value:
    """Without what negative padding takes away."""
    for axis, (a, z) in enumerate(zip(low, high, strict=True)):
        x = c.b.slice(x, axis, -minimum(a, 0), x.shape[axis] + minimum(z, 0))
    return x


def _padded_like(mode: str, c: Call, x: Value, pad: Sequence[Dim]) -> Value:
    low, high = _pads(x, pad)
    if not all(isinstance(d, int) for d in (*low, *high)):
        raise UnsupportedError(f"padding by {low} and {high}, which are not static")
    if any(d == 0 for d in x.shape):
        return c.b.full(c.type.shape, 0, x.dtype)
    if mode == "edge":
        x = _edges_cropped(c, x, low, high)
    return c.onnx("Pad", x, c.b.constant(np.array([*low, *high], np.int64)), mode=mode)[0]  # type: ignore[no-any-return]


def _edges_cropped(c: Call, x: Value, low: list[Dim], high: list[Dim]) -> Value:
    """Where padding is negative on a side, both sides of the axis; their padding is then none."""
    for axis, (before, after) in enumerate(zip(low, high, strict=True)):
        if isinstance(before, int) and isinstance(after, int) and min(before, after) < 0:
            size = static(x.shape[axis], "a size that is cropped and padded")
            place = np.clip(np.arange(-before, size + after, dtype=np.int64), 0, size - 1)
            x = c.b.gather(x, c.b.constant(place), axis)
            low[axis] = high[axis] = 0
    return x


@aten("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
def reflection_pad(c: Call, x: Value, pad: Sequence[Dim]) -> Value:
    return _padded_like("reflect", c, x, pad)


@aten("replication_pad1d", "replication_pad2d", "replication_pad3d")
def replication_pad(c: Call, x: Value, pad: Sequence[Dim]) -> Value:
    return _padded_like("edge", c, x, pad)


@aten("diagonal")
def diagonal(c: Call, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """The elements [i + down, i + right] of the two axes, by a reshape of rows one longer than they are wide."""
    a, z = axis_of(c, dim1, x.rank), axis_of(c, dim2, x.rank)
    rest = [i for i in range(x.rank) if i not in (a, z)]
    x = c.b.transpose(x, [*rest, a, z])
    down, right = max(-offset, 0), max(offset, 0)
    count = c.type.shape[-1]
    x = c.b.slice(x, x.rank - 2, down, down + count) if count != 0 else x
    x = c.b.slice(x, x.rank - 1, right, right + count) if count != 0 else x
    if count == 0:
        return c.b.full(c.type.shape, 0, x.dtype)
    index = c.b.iota(count)
    index = c.b.expand(c.b.reshape(index, (count, 1)), (*x.shape[:-1], 1))
    return c.b.reshape(c.b.one("gather_elements", x, index, axis=x.rank - 1), c.type.shape)


@aten("diagonal_scatter")
def diagonal_scatter(c: Call, x: Value, source: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """x with a diagonal of two axes replaced: the source, a column or a row of it, where the diagonal is."""
    b, a, z = c.b, axis_of(c, dim1, x.rank), axis_of(c, dim2, x.rank)
    order = [*(i for i in range(x.rank) if i not in (a, z)), a, z]
    x = b.transpose(x, order)
    *batch, rows, columns = x.shape
    size = rows if offset >= 0 else columns  # along which elements of the diagonal have their own numbers
    source = b.pad(source, [0] * source.rank, [*(0 for _ in batch), size - source.shape[-1]], b.scalar(0, x.dtype))
    source = b.reshape(source, (*batch, rows, 1) if offset >= 0 else (*batch, 1, columns))
    there = b.eq(b.add(b.reshape(b.iota(rows), (rows, 1)), offset), b.iota(columns))
    return b.transpose(b.where(there, source, x), [order.index(i) for i in range(x.rank)])


@aten("as_strided", "as_strided_copy")
def as_strided(
    c: Call, x: Value, size: Sequence[Dim], stride: Sequence[Dim], storage_offset: Dim | None = None
) -> Value:
    """Reads at addresses of the memory of x, which must be all of its storage, without gaps."""
    tensor = c.tensors[0]
    plain = storage_offset in (None, 0) and _is_row_major(c.type.shape, stride) and always_equal(c.type.size, x.t.size)
    if plain and tensor is not None and tensor.is_contiguous() and tensor.storage_offset() == 0:
        return c.b.reshape(x, c.type.shape)  # strides of axes of size 1 alone are others
    flat = _memory(c, x)
    if plain:
        return c.b.reshape(flat, c.type.shape)
    return c.b.gather(flat, _addresses(c, c.type.shape, stride, storage_offset or 0), 0)


def _is_row_major(shape: Sequence[Dim], stride: Sequence[Dim]) -> bool:
    dense: Dim = 1
    for d, s in zip(reversed(shape), reversed(stride), strict=True):
        if not always_equal(d, 1) and not always_equal(s, dense):
            return False
        dense = dense * d
    return True


@aten("as_strided_scatter")
def as_strided_scatter(
    c: Call, x: Value, source: Value, size: Sequence[Dim], stride: Sequence[Dim], storage_offset: Dim | None = None
) -> Value:
    b, flat, order = c.b, _memory(c, x), c.order(0)
    values, offset = b.reshape(source, (source.t.size,)), storage_offset or 0
    if offset == 0 and _is_row_major(source.shape, stride) and always_equal(source.t.size, x.t.size):
        put = values  # of all elements in order
    else:
        index = b.reshape(_addresses(c, source.shape, stride, offset), (source.t.size,))
        put = b.one("scatter_elements", flat, index, values, axis=0, reduction="none")
    return b.transpose(b.reshape(put, [x.shape[a] for a in order]), [order.index(i) for i in range(x.rank)])


def _memory(c: Call, x: Value) -> Value:
    """The elements in the order in which they lie in memory: [size]."""
    return c.b.reshape(c.b.transpose(x, c.order(0)), (x.t.size,))


def _addresses(c: Call, shape: Sequence[Dim], stride: Sequence[Dim], offset: Dim) -> Value:
    b, rank = c.b, len(shape)
    total = b.size_as(offset, dtypes.int64)
    for axis, (d, s) in enumerate(zip(shape, stride, strict=True)):
        row = b.mul(b.iota(d), b.size_as(s, dtypes.int64))
        total = b.add(total, b.reshape(row, (d, *(1,) * (rank - 1 - axis))))
    return b.expand(total, shape)


# ---------------------------------------------------------------- tensors out of nothing


@aten("full", "full_like", "fill.Scalar", "scalar_tensor", "new_full")
def full(c: Call, *args: Any, **options: Any) -> Value:
    given = [*args, *(v for k, v in options.items() if k == "fill_value")]
    return c.b.expand(c.operand(given[-1], c.type.dtype), c.type.shape)


@aten("fill.Tensor")
def fill(c: Call, x: Value, value: Value) -> Value:
    return c.b.expand(c.b.cast(value, c.type.dtype), c.type.shape)


@aten("empty.memory_format", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "zeros_like", "zeros")
def zeros(c: Call, *args: Any, **options: Any) -> Value:
    """What is empty may hold anything."""
    return c.b.full(c.type.shape, 0, c.type.dtype)


@aten("ones", "ones_like")
def ones(c: Call, *args: Any, **options: Any) -> Value:
    return c.b.full(c.type.shape, 1, c.type.dtype)


@aten("arange.start_step")
def arange(c: Call, start: Operand, end: Operand, step: Operand = 1, **options: Any) -> Value:
    """start + i * step, of floats in float64 as PyTorch has it."""
    b, dtype = c.b, c.type.dtype
    (count,) = c.type.shape
    if isinstance(step, float) or isinstance(start, float) or dtype.is_float:
        if not all(isinstance(v, (int, float)) for v in (start, step)):
            raise UnsupportedError("a range of floats that begins at a size")
        first, stride = float(start), float(step)  # type: ignore[arg-type]
        if isinstance(count, int) and count <= _TABLE:
            table = first + np.arange(count, dtype=np.float64) * stride
            return b.cast(b.constant(table.astype(dtype.numpy)), dtype)
        return b.cast(b.add(b.mul(b.cast(b.iota(count), dtypes.float64), stride), first), dtype)
    row = b.mul(b.iota(count), c.operand(step, dtypes.int64))
    return b.cast(b.add(row, c.operand(start, dtypes.int64)), dtype)


@aten("eye", "eye.m")
def eye(c: Call, *args: Any, **options: Any) -> Value:
    rows, columns = c.type.shape
    same = c.b.eq(c.b.reshape(c.b.iota(rows), (rows, 1)), c.b.iota(columns))
    return c.b.cast(same, c.type.dtype)


@aten("tril_indices", "triu_indices")
def triangle(c: Call, rows: Dim, columns: Dim, offset: int = 0, **options: Any) -> Value:
    """The rows [0] and the columns [1] of what lies in a triangle of a matrix."""
    height, width = (static(d, "a side of a matrix whose triangle is listed") for d in (rows, columns))
    limited(height * width, "a list of a triangle")
    listed = np.tril_indices if "tril" in c.name else np.triu_indices
    return c.b.cast(c.b.constant(np.stack(listed(height, offset, width)).astype(np.int64)), c.type.dtype)


@aten("fft_fftfreq", "fft_rfftfreq")
def frequencies(c: Call, length: Dim, spacing: float = 1.0, **options: Any) -> Value:
    """Those of a Fourier transform's results, per unit of `spacing`: from the middle on negative ones."""
    b, dtype = c.b, c.type.dtype
    (count,) = c.type.shape
    row = b.iota(count)
    if ".fft_fftfreq" in c.name:
        n = b.size_as(length, dtypes.int64)
        row = b.where(b.lt(row, b.size_as(floordiv(length + 1, 2), dtypes.int64)), row, b.sub(row, n))
    scale = b.mul(b.size_as(length, dtypes.float64), float(spacing))
    return b.cast(b.mul(b.cast(row, dtypes.float64), b.div(1.0, scale)), dtype)


@aten("prims.iota")
def iota(c: Call, length: Dim, *, start: Operand, step: Operand, **options: Any) -> Value:
    row = c.b.mul(c.b.iota(length), c.operand(step, dtypes.int64))
    return c.b.cast(c.b.add(row, c.operand(start, dtypes.int64)), c.type.dtype)
