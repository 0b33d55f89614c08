"""Copies of arrays with gaps into arrays without, by the driver alone: what no kernel of a model would do."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from onnxc.errors import InputError
from onnxc.runtime.cuda.arrays import Incoming, Shape
from onnxc.runtime.cuda.driver import Device

_MOST_COPIES = 256  # of rows of rows; above it the array goes through the host
_MOST_PITCH = (1 << 31) - 1


def densify(device: Device, x: Incoming, itemsize: int, to: int, stream: Any) -> None:
    """Copies an array into a row-major one at `to`, in the order of the stream. The context is current.

    Raises:
        InputError: it has negative strides.
    """
    strides = x.strides if x.strides is not None else row_major(x.shape, itemsize)
    if 0 in x.shape:
        return
    if any(s < 0 for s in strides):
        raise InputError("an array with negative strides on a GPU cannot be read: copy it first")
    dims = _merged([(n, s) for n, s in zip(x.shape, strides, strict=True) if n > 1])
    width = itemsize
    if dims and dims[-1][1] == itemsize:
        width = itemsize * dims.pop()[0]
    rows, pitch = dims.pop() if dims and width <= dims[-1][1] <= _MOST_PITCH else (1, width)
    if math.prod(n for n, _ in dims) > _MOST_COPIES:
        _through_host(device, x, strides, itemsize, to, stream)
        return
    for index in itertools.product(*(range(n) for n, _ in dims)):
        source = x.address + sum(k * s for k, (_, s) in zip(index, dims, strict=True))
        _rows(device, to, source, width, rows, pitch, stream)
        to += width * rows


def row_major(shape: Shape, itemsize: int) -> tuple[int, ...]:
    """The strides of an array without gaps, in bytes."""
    return tuple(itemsize * math.prod(shape[k + 1 :]) for k in range(len(shape)))


def _merged(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Dims that follow each other in memory become one."""
    merged: list[tuple[int, int]] = []
    for n, stride in dims:
        if merged and merged[-1][1] == n * stride:
            merged[-1] = (merged[-1][0] * n, stride)
        else:
            merged.append((n, stride))
    return merged


def _rows(device: Device, to: int, source: int, width: int, rows: int, pitch: int, stream: Any) -> None:
    if rows == 1:
        device.driver("cuMemcpyDtoDAsync", to, source, width, stream)
        return
    module = device.driver.module
    copy = module.CUDA_MEMCPY2D()
    copy.srcMemoryType = copy.dstMemoryType = module.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcDevice, copy.srcPitch = source, pitch
    copy.dstDevice, copy.dstPitch = to, width
    copy.WidthInBytes, copy.Height = width, rows
    device.driver("cuMemcpy2DAsync", copy, stream)


def _through_host(device: Device, x: Incoming, strides: tuple[int, ...], itemsize: int, to: int, stream: Any) -> None:
    span = itemsize + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True))
    raw = np.empty(span, np.uint8)
    device.driver("cuMemcpyDtoHAsync", raw.ctypes.data, x.address, span, stream)
    device.driver("cuStreamSynchronize", stream)
    # Elements as bytes: their strides need not be multiples of their size.
    view = np.ndarray((*x.shape, itemsize), np.uint8, raw.data, 0, (*strides, 1))
    dense = np.ascontiguousarray(view)
    device.driver("cuMemcpyHtoDAsync", to, dense.ctypes.data, dense.nbytes, stream)
    device.driver("cuStreamSynchronize", stream)  # `dense` goes
