"""Reads and writes at positions that are data. Negative ones count from the end; outside is an error."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxc.errors import ShapeError
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, is_less, never_equal
from onnxc.ir.graph import Attrs
from onnxc.ir.types import TensorType
from onnxc.primitives.base import Kind, Primitive, register


def _gather(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    """out[a..., i..., b...] = x[a..., index[i...], b...] with `axis` the place of the index."""
    _check_index(types[1])
    axis = attrs["axis"]
    return (types[0].with_shape(types[0].shape[:axis] + types[1].shape + types[0].shape[axis + 1 :]),)


def _check_index(index: TensorType) -> None:
    if not index.dtype.is_integer:
        raise ShapeError(f"an index must be of integers, not {index}")


def _check_reach(data: Sequence[Dim], index: Sequence[Dim], axis: int) -> None:
    """An index of elements lies inside the data along the axes that it does not select from."""
    if len(index) != len(data):
        raise ShapeError(f"an index of rank {len(index)} for data of rank {len(data)}")
    for i, (d, n) in enumerate(zip(data, index, strict=True)):
        if i != axis and is_less(d, n):
            raise ShapeError(f"the index {list(index)} reaches outside of the data {list(data)}")


def _gather_elements(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    _check_index(types[1])
    _check_reach(types[0].shape, types[1].shape, attrs["axis"])
    return (types[0].with_shape(types[1].shape),)


def _gather_elements_eval(x: np.ndarray, index: np.ndarray, axis: int) -> np.ndarray:
    """The index may be smaller than x along the other axes."""
    used = x[tuple(slice(None) if i == axis else slice(d) for i, d in enumerate(index.shape))]
    return np.take_along_axis(used, index.astype(np.int64), axis)


def _gather_nd(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    """index [batch..., i..., depth] selects x[batch..., index...]: its last axis holds positions."""
    _check_index(types[1])
    data, index, batch = types[0].shape, types[1].shape, attrs["batch_dims"]
    depth = index[-1] if index else None
    if not isinstance(depth, int) or not 0 <= batch < len(index) or batch + depth > len(data):
        raise ShapeError(f"an index {list(index)} with {batch} batch dims for data {list(data)}")
    _check_dims("the batch dims of the index", index[:batch], data[:batch])
    return (types[0].with_shape(types[1].shape[:-1] + types[0].shape[batch + depth :]),)


def _gather_nd_eval(x: np.ndarray, index: np.ndarray, batch_dims: int) -> np.ndarray:
    if not batch_dims:
        return np.asarray(x[tuple(np.moveaxis(index, -1, 0))])
    lead = x.shape[:batch_dims]
    depth = batch_dims + index.shape[-1]
    out = np.empty((*index.shape[:-1], *x.shape[depth:]), x.dtype)
    for at in np.ndindex(*lead):
        out[at] = _gather_nd_eval(x[at], index[at], 0)
    return out


def _check_dims(what: str, dims: Sequence[Dim], wanted: Sequence[Dim]) -> None:
    """Raises ShapeError where two shapes are known to differ."""
    if len(dims) != len(wanted) or any(never_equal(a, b) for a, b in zip(dims, wanted, strict=True)):
        raise ShapeError(f"{what} have the shape {list(dims)}, not {list(wanted)}")


def _check_scattered(types: Sequence[TensorType]) -> None:
    data, index, updates = types
    _check_index(index)
    if data.dtype is not updates.dtype:
        raise ShapeError(f"updates {updates} for data {data}: their dtypes differ")


def _scatter_elements(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    """out[..., index[p], ...] = updates[p] at `axis`, for each place p of the index, in order. `distinct` says that no
    two of a line are the same.
    """
    data, index, updates = (t.shape for t in types)
    _check_scattered(types)
    _check_reach(data, index, attrs["axis"])
    _check_dims("the updates", updates, index)
    return (types[0],)


def _scatter_nd(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    """out[index[p]] = updates[p] for each place p of the leading axes of the index, in order."""
    data, index, updates = (t.shape for t in types)
    _check_scattered(types)
    depth = scatter_depth(types)
    if not index or not 0 <= depth <= len(data) or never_equal(index[-1], depth):
        raise ShapeError(f"an index {list(index)} and updates {list(updates)} for data {list(data)}")
    _check_dims("the updates", updates, (*index[:-1], *data[depth:]))
    return (types[0],)


def scatter_depth(types: Sequence[TensorType]) -> int:
    """How many axes of the data the index of scatter_nd selects: known from the ranks, whatever the sizes."""
    data, index, updates = types
    return data.rank + index.rank - 1 - updates.rank


def _scatter_nd_eval(x: np.ndarray, index: np.ndarray, updates: np.ndarray, reduction: str) -> np.ndarray:
    out = x.copy()
    at = tuple(np.moveaxis(index, -1, 0))
    _SCATTER[reduction](out, at, updates)
    return out


def _scatter_elements_eval(
    x: np.ndarray, index: np.ndarray, updates: np.ndarray, axis: int, reduction: str, distinct: bool = False
) -> np.ndarray:
    out = x.copy()
    grid: list[np.ndarray] = list(np.indices(index.shape))
    grid[axis] = index
    _SCATTER[reduction](out, tuple(grid), updates)
    return out


_SCATTER = {
    "none": lambda out, at, updates: out.__setitem__(at, updates),
    "add": np.add.at, "mul": np.multiply.at, "max": np.maximum.at, "min": np.minimum.at,
}  # fmt: skip


def _top_k(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    """The k greatest (least) along an axis, ties by position, NaN as the greatest: values and int64 positions.

    `runs`, where it is given, says that the axis is made of runs of so many elements, each of them in order already.
    `loose`: not in order, but those that come before the last one by their positions, then its equals by theirs.
    """
    shape = list(types[0].shape)
    if is_less(shape[attrs["axis"]], attrs["k"]):
        raise ShapeError(f"the best {attrs['k']} of {shape[attrs['axis']]} elements")
    shape[attrs["axis"]] = attrs["k"]
    out = types[0].with_shape(tuple(shape))
    return out, out.with_dtype(dtypes.int64)


def _top_k_eval(
    x: np.ndarray, k: int, axis: int, largest: bool, runs: int = 0, loose: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    floating = dtypes.from_numpy(x.dtype).is_float
    keys: np.ndarray = x.astype(np.float64) if floating else x
    if largest:
        keys = np.negative(keys) if floating else np.invert(keys)
    nan = np.isnan(keys) if floating else np.zeros(keys.shape, np.bool_)
    order = np.take(np.lexsort((keys, nan != largest), axis=axis), range(k), axis=axis)
    if loose:
        found = np.take_along_axis(keys, order, axis)
        last = np.take(found, [k - 1], axis=axis)
        same = (found == last) | ((last != last) & (found != found))
        order = np.take_along_axis(order, np.lexsort((order, same), axis=axis), axis)
    return np.take_along_axis(x, order, axis), order.astype(np.int64)


def _positions(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    """Where a bool vector [n] is true: int64 [n], of which the first so many count: int64 []."""
    (mask,) = types
    if mask.rank != 1 or mask.dtype is not dtypes.boolean:
        raise ShapeError(f"positions of {mask}")
    return TensorType(dtypes.int64, mask.shape), TensorType(dtypes.int64, ())


def _positions_eval(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    found = np.flatnonzero(mask)
    out = np.zeros(mask.shape, np.int64)
    out[: len(found)] = found
    return out, np.asarray(len(found), np.int64)


def _gather_eval(x: np.ndarray, index: np.ndarray, axis: int) -> np.ndarray:
    return np.asarray(np.take(x, index.astype(np.int64), axis=axis))


register(Primitive("gather", Kind.INDEXED, _gather, _gather_eval, True))
register(Primitive("gather_elements", Kind.INDEXED, _gather_elements, _gather_elements_eval))
register(Primitive("gather_nd", Kind.INDEXED, _gather_nd, _gather_nd_eval))
register(Primitive("scatter_elements", Kind.OPAQUE, _scatter_elements, _scatter_elements_eval))
register(Primitive("scatter_nd", Kind.OPAQUE, _scatter_nd, _scatter_nd_eval))
register(Primitive("positions", Kind.OPAQUE, _positions, _positions_eval))
register(Primitive("top_k", Kind.OPAQUE, _top_k, _top_k_eval))
