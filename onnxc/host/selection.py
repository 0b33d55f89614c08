"""Selections that kernels do not make: Unique, and elements of types that kernels do not have."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxc.host.registry import host_function

Array = np.ndarray[Any, Any]


@host_function
def unique(x: Array, axis: int | None = None, sorted: int = 1) -> tuple[Array, ...]:
    """The different elements (or slices along an axis), where each is first, which each element is, how often each is.

    Sorted, or in the order in which they come. Of NaNs each is another.
    """
    keys = x
    if axis is not None and x.dtype.kind not in "buif":  # numpy orders slices of its own numbers alone
        keys = np.unique(x, return_inverse=True, equal_nan=False)[1].reshape(x.shape)
    found = None if axis is None else _unique_slices(keys, axis)
    values, first, inverse, counts = found or np.unique(
        keys, return_index=True, return_inverse=True, return_counts=True, axis=axis, equal_nan=False
    )
    if keys is not x:
        values = np.take(x, first, axis)
    inverse = inverse.reshape(-1)
    if not sorted:
        order = np.argsort(first)
        values = values[order] if axis is None else np.take(values, order, axis)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        first, inverse, counts = first[order], place[inverse], counts[order]
    return (np.ascontiguousarray(values), *(v.astype(np.int64) for v in (first, inverse, counts)))


def _unique_slices(x: Array, axis: int) -> tuple[Array, Array, Array, Array] | None:
    """As np.unique along an axis, in a tenth of its time; None where slices have no order of bytes, as NaN has none."""
    rows = np.moveaxis(x, axis, 0)
    flat = np.ascontiguousarray(rows.reshape(len(rows), -1)) if rows.size else rows
    keys = _ordered(flat) if rows.size else None
    if keys is None:
        return None
    whole = keys.view(f"V{keys.shape[1] * keys.itemsize}").reshape(-1)  # compared byte by byte
    order = np.argsort(whole, kind="stable")
    new = np.ones(len(order), bool)
    keys = keys[order]
    np.any(keys[1:] != keys[:-1], axis=1, out=new[1:])
    starts = np.flatnonzero(new)
    inverse = np.empty(len(order), np.int64)
    inverse[order] = np.cumsum(new) - 1
    first = order[starts]
    return np.take(x, first, axis), first, inverse, np.diff(starts, append=len(order))


def _ordered(x: Array) -> Array | None:
    """Unsigned integers, most significant byte first, in the order of the numbers [n, m]; None where there are none."""
    if x.dtype.kind not in "buif" or x.dtype.itemsize > 8 or (x.dtype.kind == "f" and np.isnan(x).any()):
        return None
    bits = 8 * x.dtype.itemsize
    unsigned, sign = np.dtype(f"u{x.dtype.itemsize}"), 1 << (bits - 1)
    if x.dtype.kind == "f":
        raw = (x + x.dtype.type(0)).view(unsigned)  # -0 is 0
        keys = np.where(raw >> (bits - 1) != 0, ~raw, raw | unsigned.type(sign))
    else:
        keys = x.view(unsigned) ^ unsigned.type(sign if x.dtype.kind == "i" else 0)
    return np.ascontiguousarray(keys.astype(unsigned.newbyteorder(">")))


@host_function
def elements_at(at: Array, *lists: Array) -> Array:
    """The elements at places in several tensors, whose elements are counted one after the other."""
    whole = np.concatenate([x.ravel() for x in lists])
    return np.asarray(whole[at.ravel()]).reshape(at.shape)
