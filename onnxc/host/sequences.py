"""Sequences (lists of arrays) and optionals (a value or None)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxc.errors import LimitError, RunError
from onnxc.host.registry import host_function, passes_on

Array = np.ndarray[Any, Any]
MOST_PARTS = 1 << 22  # of a split: each is an array of its own, of a hundred bytes and more


def _place(values: Sequence[Any], position: Array, end: int) -> int:
    """A possibly negative position in 0 to end - 1."""
    at = int(position.reshape(())) if position.size == 1 else end
    if not -len(values) <= at < end:
        raise RunError(f"position {at} is outside of a sequence of {len(values)}")
    return at + len(values) if at < 0 else at


@host_function
@passes_on()
def sequence_construct(*values: Any) -> tuple[list[Any]]:
    """A sequence of these values."""
    return (list(values),)


@host_function
@passes_on(1)
def sequence_at(values: list[Any], position: Array) -> Any:
    """The value at a position, which counts from the end where it is negative."""
    return values[_place(values, position, len(values))]


@host_function
@passes_on(2)
def sequence_insert(values: list[Any], value: Any, position: Array | None = None) -> tuple[list[Any]]:
    """The sequence with one more value before a position, or at its end."""
    at = len(values) if position is None else _place(values, position, len(values) + 1)
    return ([*values[:at], value, *values[at:]],)


@host_function
@passes_on(1)
def sequence_erase(values: list[Any], position: Array | None = None) -> tuple[list[Any]]:
    """The sequence without the value at a position, or without its last."""
    at = _place(values, np.asarray(-1) if position is None else position, len(values))
    return ([*values[:at], *values[at + 1 :]],)


@host_function
@passes_on()
def sequence_length(values: list[Any]) -> Array:
    """How many values there are, an int64 scalar."""
    return np.asarray(len(values), np.int64)


@host_function
def sequence_concat(values: list[Any], axis: int, new_axis: int = 0) -> Array:
    """The arrays of a sequence one after the other along an axis, an existing one or a new one."""
    if not values:
        raise RunError("an empty sequence cannot be concatenated")
    try:
        return np.stack(values, axis) if new_axis else np.concatenate(values, axis)
    except ValueError as error:
        shapes = ", ".join(str(list(v.shape)) for v in values[:8])
        raise RunError(f"arrays of shapes {shapes} cannot be joined along axis {axis}", cause=error) from error


@host_function
def sequence_split(x: Array, split: Array | None = None, axis: int = 0, keepdims: int = 1) -> tuple[list[Array]]:
    """Slices along an axis: of size 1 (without the axis, unless keepdims), of one size, or of these sizes."""
    if not -x.ndim <= axis < x.ndim:
        raise RunError(f"axis {axis} is out of range for rank {x.ndim}")
    size = x.shape[axis]
    step = 1 if split is None or split.ndim else int(split)
    if step <= 0:
        raise RunError(f"an axis cannot be split into parts of size {step}")
    count = -(-size // step) if split is None or not split.ndim else split.size
    if count > MOST_PARTS:
        raise LimitError(f"a sequence of {count} parts would be made; the limit is {MOST_PARTS}")
    if split is None or not split.ndim:
        ends = list(range(step, size, step))
    else:
        sizes = split.ravel().tolist()  # whose sum int64 need not hold
        if min(sizes, default=0) < 0 or sum(sizes) != size:
            more = f" and {count - 8} more" if count > 8 else ""
            raise RunError(f"parts of sizes {sizes[:8]}{more} do not make an axis of size {size}")
        ends = np.cumsum(split)[:-1].tolist()
    parts = np.split(x, ends, axis) if count else []
    drop = split is None and not keepdims
    return ([p.squeeze(axis).copy() if drop else p.copy() for p in parts],)


@host_function
@passes_on()
def optional(value: Any = None) -> tuple[Any]:
    """An optional of a value, or one that is empty."""
    return (value,)


@host_function
@passes_on()
def optional_get(value: Any) -> tuple[Any]:
    """The value of an optional that has one."""
    if value is None:
        raise RunError("an optional without a value was asked for it")
    return (value,)


@host_function
@passes_on()
def optional_has(value: Any = None) -> Array:
    """Whether there is a value, a bool scalar."""
    return np.asarray(value is not None)
