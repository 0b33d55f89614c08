"""Kernels for the driver in memory, as Python functions; and arrays of other libraries on its GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from onnxc.runtime.cuda import arrays as arrays_module
from onnxc.runtime.cuda import dlpack
from onnxc.runtime.cuda import driver as driver_module
from onnxc.runtime.cuda.driver import Driver
from tests.fake_cuda import FakeDriver

F32 = np.float32


def low(word: int) -> int:
    """An i32 argument."""
    return ctypes.c_int32(word).value


def add(gpu: FakeDriver, grid: tuple[int, int, int], a: list[int]) -> None:
    """z = x + y over n elements."""
    x, y, z, n, *_ = a
    n = low(n)
    gpu.array(z, n, F32)[:] = gpu.array(x, n, F32) + gpu.array(y, n, F32)


def scale(gpu: FakeDriver, grid: tuple[int, int, int], a: list[int]) -> None:
    """y = x * w over rows of four."""
    x, w, y, n, *_ = a
    assert grid == (n, 1, 1)
    gpu.array(y, 4 * n, F32)[:] = (gpu.array(x, 4 * n, F32).reshape(n, 4) * gpu.array(w, 4, F32)).reshape(-1)


def take(gpu: FakeDriver, grid: tuple[int, int, int], a: list[int]) -> None:
    """y = x[i], rows of four, with a check of the indices."""
    x, i, y, rows, n, error, call, *_ = a
    indices = gpu.array(i, n, np.int64)
    for k, index in enumerate(indices):
        if not 0 <= index < rows:
            words = np.frombuffer((ctypes.c_int64 * 4).from_address(error), np.int64)
            if not words[0]:
                words[:3] = 3, low(call), index
            continue
        gpu.array(y + 16 * k, 4, F32)[:] = gpu.array(x + 16 * int(index), 4, F32)


def scratched(gpu: FakeDriver, grid: tuple[int, int, int], a: list[int]) -> None:
    """y = x, by way of 64 bytes of scratch for each program."""
    x, y, n, scratch, profile = a
    assert profile == 0
    gpu.view(scratch, 64 * grid[0]).fill(0xCC)
    gpu.array(y, n, F32)[:] = gpu.array(x, n, F32)


KERNELS = {"add": (6, add), "scale": (6, scale), "take": (9, take), "scratched": (5, scratched)}


def use(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.kernels = dict(KERNELS)
    monkeypatch.setattr(driver_module, "load_driver", lambda: Driver(fake))
    monkeypatch.setattr(driver_module, "_devices", {})
    monkeypatch.setenv("ONNXC_POISON", "0")


class Foreign:
    """An array of the GPU of some library, with the interface of version 3."""

    def __init__(
        self, gpu: FakeDriver, array: np.ndarray, stream: int | None = 1, offset: int = 0, **more: Any
    ) -> None:
        self.gpu, self.dtype, self.shape = gpu, array.dtype, array.shape
        place = gpu._allocate(array.nbytes + 64, False)
        self.address = place + offset
        gpu.view(self.address, array.nbytes)[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.stream, self.more = stream, more

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape, "typestr": self.dtype.str, "data": (self.address, False), "version": 3,
            "strides": None, "stream": self.stream, **self.more,
        }  # fmt: skip


class Packed:
    """An array of the GPU of a library that has DLPack only."""

    def __init__(self, gpu: FakeDriver, array: np.ndarray, device: tuple[int, int] = (2, 0)) -> None:
        self.array, self.address, self.device = array, gpu.put(array), device
        self.streams: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: Any = None) -> Any:
        self.streams.append(stream)
        dtype = arrays_module.from_numpy(self.array.dtype)
        return dlpack.write(self, self.address, 0, dtype, self.array.shape)
