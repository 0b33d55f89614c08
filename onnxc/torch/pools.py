"""Pools whose windows stand where numbers are drawn: ``fractional_max_pool2d``, ``fractional_max_pool3d``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

aten = torch.ops.aten


def _starts(drawn: Tensor, size: int, count: int, window: int) -> Tensor:
    """Where the `count` windows along an axis begin, for a number of each image and channel: [images, channels, count].

    The step from one to the next is rounded as the elements are, and the last window ends with the axis.
    """
    last = drawn.new_full((*drawn.shape, 1), size - window, dtype=torch.int64)
    if count == 1:
        return last
    kind = np.float32 if drawn.dtype is torch.float32 else np.float64
    step = float(kind(size - window) / kind(count - 1))
    first = drawn[..., None]
    at = ((torch.arange(count - 1) + first) * step).to(torch.int64) - (first * step).to(torch.int64)
    return torch.cat([at, last], -1)


def _pooled(x: Tensor, window: Sequence[int], counts: Sequence[int], drawn: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The greatest element of each window, and its place in the image; of NaN the last, of equal ones the first.

    Args:
        x: [images, channels, *sizes].
        window: its size along each axis.
        counts: how many windows there are along each axis.
        drawn: for each axis numbers [images, channels].
    """
    sizes, axes = x.shape[2:], len(window)
    place: Any = 0
    for k, (size, length, count) in enumerate(zip(sizes, window, counts, strict=True)):
        starts = _starts(drawn[k], size, count, length)
        at = starts[..., None] + torch.arange(length)  # [images, channels, count, length]
        shape = [1] * (2 * axes)
        shape[k], shape[axes + k] = count, length
        place = place * size + at.reshape(*starts.shape[:2], *shape)
    place = place.reshape(*x.shape[:2], math.prod(counts), math.prod(window))
    seen = x.flatten(2).gather(2, place.flatten(2)).reshape(place.shape)
    nan = torch.where(seen.isnan(), torch.arange(seen.shape[-1]), -1).amax(-1)
    best = torch.where(nan >= 0, nan, seen.argmax(-1))[..., None]
    found, at = (t.gather(-1, best).reshape(*x.shape[:2], *counts) for t in (seen, place))
    return found, at


def fractional_max_pool(x: Tensor, window: Sequence[int], counts: Sequence[int], samples: Tensor) -> Any:
    """``aten.fractional_max_pool2d`` and ``aten.fractional_max_pool3d``. Halves, of which each step of where windows
    stand is rounded, are left to PyTorch.
    """
    axes = len(window)
    if x.dtype not in (torch.float32, torch.float64) or not all(type(d) is int for d in x.shape) or not x.numel():
        return NotImplemented
    order = range(axes - 1, -1, -1) if axes == 2 else range(axes)  # of images the number for rows is the second
    drawn = samples.to(x.dtype)
    images = x if x.dim() == axes + 2 else x[None]
    found = _pooled(images, window, counts, [drawn[..., k] for k in order])
    return found if images is x else tuple(t[0] for t in found)


def fractional_max_pool_backward(
    dy: Tensor, x: Tensor, window: Sequence[int], counts: Sequence[int], indices: Tensor
) -> Tensor:  # fmt: skip
    """The derivatives: each window's goes to the element that it gave."""
    axes = len(window)
    flat = torch.zeros_like(x, memory_format=torch.contiguous_format).flatten(-axes)
    return flat.scatter_add(-1, indices.flatten(-axes), dy.flatten(-axes)).reshape(x.shape)


POOLS: dict[Any, Callable[..., Any]] = {
    aten.fractional_max_pool2d.default: fractional_max_pool,
    aten.fractional_max_pool3d.default: fractional_max_pool,
    aten.fractional_max_pool2d_backward.default: fractional_max_pool_backward,
    aten.fractional_max_pool3d_backward.default: fractional_max_pool_backward,
}
