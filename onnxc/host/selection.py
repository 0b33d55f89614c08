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
    values, first, inverse, counts = np.unique(
        x, return_index=True, return_inverse=True, return_counts=True, axis=axis, equal_nan=False
    )
    inverse = inverse.reshape(-1)
    if not sorted:
        order = np.argsort(first)
        values = values[order] if axis is None else np.take(values, order, axis)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        first, inverse, counts = first[order], place[inverse], counts[order]
    return (np.ascontiguousarray(values), *(v.astype(np.int64) for v in (first, inverse, counts)))


@host_function
def elements_at(at: Array, *lists: Array) -> Array:
    """The elements at places in several tensors, whose elements are counted one after the other."""
    whole = np.concatenate([x.ravel() for x in lists])
    return np.asarray(whole[at.ravel()]).reshape(at.shape)
