"""The times of a program's steps on a GPU, and what the GPU can do at most."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onnxc.errors import CudaError, LimitError
from onnxc.roofline import Peaks
from onnxc.runtime.cuda.driver import Device
from onnxc.runtime.cuda.graph import Node
from onnxc.runtime.cuda.memory import Pinned

_TOGETHER = 128  # steps that are enqueued before the first may run: well below what the driver's queue holds
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_TIMED = 0  # flags of an event with a clock
_COPIED = 1 << 30  # bytes of the copy that measures the bandwidth
_COPIES = 10


class Clock:
    """Runs steps one by one, with an event behind each.

    The host needs longer to launch a short kernel than the GPU to run it. So the stream waits at a gate until a batch
    of steps is enqueued: then they run back to back, as in a graph, and the time between two events is the step's own.

    Args:
        device: where. Its context is current, here and in all methods.
        stream: of the steps.
    """

    def __init__(self, device: Device, stream: Any) -> None:
        self._driver, self._stream = device.driver, stream
        self._pinned = Pinned(device, 8)
        self._gate = ctypes.c_int32.from_address(self._pinned.host)
        self._events: list[Any] = []
        self._gated = True

    def times(self, nodes: Sequence[Node], calls: int) -> list[int]:
        """Nanoseconds of each call in one run."""
        found = [0] * calls
        for start in range(0, len(nodes), _TOGETHER):
            batch = nodes[start : start + _TOGETHER]
            for node, nanoseconds in zip(batch, self._batch(batch), strict=True):
                if node.call < calls:
                    found[node.call] += nanoseconds
        return found

    def _batch(self, nodes: Sequence[Node]) -> list[int]:
        driver, stream = self._driver, self._stream
        while len(self._events) <= len(nodes):
            self._events.append(driver("cuEventCreate", _TIMED))
        self._shut()
        try:
            driver("cuEventRecord", self._events[0], stream)
            for node, event in zip(nodes, self._events[1:], strict=False):
                node.enqueue(stream)
                driver("cuEventRecord", event, stream)
        finally:
            self._gate.value = 1  # whatever happened: a stream must not wait forever
        driver("cuStreamSynchronize", stream)
        pairs = itertools.pairwise(self._events[: len(nodes) + 1])
        return [round(driver("cuEventElapsedTime", a, b) * 1e6) for a, b in pairs]

    def _shut(self) -> None:
        self._gate.value = 0
        if self._gated:
            try:
                self._driver("cuStreamWaitValue32", self._stream, self._pinned.device, 1, _EQUAL)
            except CudaError:  # this system has no such thing: short kernels then seem longer than they are
                self._gated = False

    def __del__(self) -> None:
        for event in getattr(self, "_events", ()):
            self._driver.attempt("cuEventDestroy", event)


@dataclass(frozen=True)
class GpuPeaks(Peaks):
    """What a GPU can do: the bandwidth is that of a copy, read plus written; its arithmetic is not measured.

    Attributes:
        device: its name.
    """

    device: str = ""

    def __str__(self) -> str:
        return f"{self.device}, {self.bandwidth / 1e9:.0f} GB/s of its memory, read plus written"


@functools.cache
def gpu_peaks(device: Device) -> GpuPeaks:
    """The peaks of a GPU, measured once in a process. Its context is current."""
    return GpuPeaks(0, 0, 0.0, _bandwidth(device), str(device))


def _bandwidth(device: Device) -> float:
    """Bytes a second of a large copy, read plus written; 0: not known."""
    driver = device.driver
    nbytes = min(_COPIED, device.memory()[0] // 4)
    try:
        block = device.allocate(2 * nbytes)
    except LimitError:
        return 0.0
    stream = driver.module.CUstream(0)
    events = [driver("cuEventCreate", _TIMED) for _ in range(_COPIES + 1)]
    try:
        driver("cuMemsetD8Async", block, 0, 2 * nbytes, stream)
        for k, event in enumerate(events):
            if k:
                driver("cuMemcpyDtoDAsync", block + nbytes, block, nbytes, stream)
            driver("cuEventRecord", event, stream)
        driver("cuStreamSynchronize", stream)
        best = min(driver("cuEventElapsedTime", a, b) for a, b in itertools.pairwise(events))
        return 2e3 * nbytes / best if best > 0 else 0.0
    finally:
        for event in events:
            driver.attempt("cuEventDestroy", event)
        device.free(block)
