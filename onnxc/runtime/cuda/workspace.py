"""What calls share that follow each other on a GPU: those of one model, or of all programs of a model of several.

A stream of its own for calls with numpy arrays, the order of calls on all streams with what went wrong in them, one
arena for all programs, staging blocks, and what must be held until a call is done.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxc.errors import InputError, LimitError
from onnxc.ir.dtypes import DType, from_numpy, string
from onnxc.planner.offsets import aligned
from onnxc.runtime.cuda.arrays import VECTOR, Array, DeviceArray, Incoming, Reader, Shape, is_dense, reader
from onnxc.runtime.cuda.copies import densify
from onnxc.runtime.cuda.driver import Device
from onnxc.runtime.cuda.driver import device as find_device
from onnxc.runtime.cuda.memory import Block, Event, Ring, Staging, Timeline, rounded
from onnxc.runtime.cuda.program import ALIGN

_MOST_HELD = 16  # calls whose inputs are held
_MOST_HANDLES = 64  # streams that are known
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class Workspace:
    """Of one GPU, whose context is current in all methods; who calls them holds the lock.

    Attributes:
        own: the stream of calls with numpy arrays.
        handles: streams, as the driver's functions take them.
        arena: the intermediates of all programs, one at a time.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self.timeline = Timeline(device)
        self.staging = Staging(device)
        self.arena: Block | None = None
        self._ring: Ring | None = None
        self._elsewhere = Event(device)
        self._held: list[Any] = []
        self._readers: dict[type, Reader | None] = {}
        try:
            handle = device.streams.pop()
        except IndexError:
            handle = device.driver("cuStreamCreate", _NON_BLOCKING)
        self.own = int(handle)
        self.handles: dict[int, Any] = {self.own: handle}
        weakref.finalize(self, _close, device, self.timeline, handle).atexit = False

    def handle(self, stream: int) -> Any:
        """A stream, as the driver's functions take it."""
        if stream not in self.handles:
            if len(self.handles) > _MOST_HANDLES:
                self.handles = {self.own: self.handles[self.own]}
            self.handles[stream] = self.device.driver.module.CUstream(stream)
        return self.handles[stream]

    def read(self, x: Any, stream: int | None) -> Incoming | None:
        """An array, if it is on the GPU."""
        kind = type(x)
        try:
            read = self._readers[kind]
        except KeyError:
            read = self._readers[kind] = reader(kind)
        return read(x, self.device.ordinal, stream) if read is not None else None

    # ------------------------------------------------------------ the order of things

    def order(self, found: Sequence[Incoming | None], stream: int, handle: Any) -> None:
        """Waits on the GPU for what makes the inputs, and holds those whose memory another stream could be given."""
        self.hold(self.follow(found, stream, handle))

    def follow(self, found: Sequence[Incoming | None], stream: int, handle: Any) -> list[Any]:
        """Waits on the GPU for what makes the inputs; returns what is to be held until the stream has read them."""
        held = []
        for x in found:
            if x is not None and x.stream != stream:
                held.append(x.keep)
                if x.stream is not None:
                    self._elsewhere.record(self.handle(x.stream))
                    self._elsewhere.wait(handle)
        return held

    def hold(self, held: list[Any]) -> None:
        """Holds these until the work that has been given to the GPU, and the next, is done."""
        if self._held and self.timeline.passed():
            self._held.clear()
        if held:
            if len(self._held) >= _MOST_HELD:
                self.timeline.synchronize()
                self._held.clear()
            self._held.append(held)

    @property
    def holds(self) -> bool:
        """Whether anything is held."""
        return bool(self._held)

    # ------------------------------------------------------------ memory

    def reserve(self, nbytes: int, limit: int) -> Block:
        """The arena, with at least so many bytes. (Graphs learn of a new one as they are used.)

        Args:
            nbytes: how many.
            limit: the most that it may have; 0 for none.
        """
        arena = self.arena
        if arena is not None and arena.nbytes >= nbytes:
            return arena
        spare = 0
        if arena is not None:
            self.timeline.synchronize()
            spare = arena.nbytes // 4  # sizes that grow from call to call shall not do this each time
            self.arena = arena = None
        try:
            self.arena = Block(self.device, max(nbytes, min(nbytes + spare, limit or nbytes + spare)))
        except LimitError:
            self.arena = Block(self.device, nbytes)
        return self.arena

    def new(self, shape: Shape, element: DType, stream: int) -> DeviceArray:
        """An array of which nothing is known, for work on this stream."""
        nbytes, pool = int(np.prod(shape, dtype=object)) * element.itemsize, self.device.pool
        home = pool.home(rounded(nbytes), stream)
        (address,) = pool.take([home])
        return DeviceArray(shape, element, nbytes, home, self.timeline, address)

    def trim(self) -> None:
        """Gives back what is held between calls. None may be under way."""
        self._held.clear()
        self.arena = self._ring = None
        self.staging = Staging(self.device)

    # ------------------------------------------------------------ copies

    def upload(self, array: Array, stream: int) -> DeviceArray:
        """A copy of an array of the host's, for work on this stream. The host may write over it. It does not wait for
        small ones.

        Raises:
            InputError: a dtype that no array on a GPU can have. LimitError: the GPU has no memory for it.
        """
        element = element_of(array)
        given = np.asarray(array, element.numpy, order="C")  # in the byte order of the GPU
        found = self.new(given.shape, element, stream)
        if given.nbytes:
            handle = self.handle(stream)
            if self._ring is None:
                self._ring = Ring(self.device)
            source = self._ring.put(given, handle)
            self.device.driver("cuMemcpyHtoDAsync", found.address, source or given.ctypes.data, given.nbytes, handle)
            if not source:  # the driver has waited, unless the array is in pinned memory of the caller's
                self.device.driver("cuStreamSynchronize", handle)
            self.timeline.record(stream, handle)
        return found

    def copy(self, x: DeviceArray, stream: int) -> DeviceArray:
        """A copy on the GPU of an array that is ready on this stream."""
        found = self.new(x.shape, x.element, stream)
        if x.nbytes:
            self.device.driver("cuMemcpyDtoDAsync", found.address, x.address, x.nbytes, self.handle(stream))
            self.timeline.record(stream, self.handle(stream))
        return found

    def stack(self, arrays: Sequence[DeviceArray], stream: int) -> DeviceArray:
        """Arrays of one shape and dtype, ready on this stream, along a new first axis."""
        first = arrays[0]
        found = self.new((len(arrays), *first.shape), first.element, stream)
        handle = self.handle(stream)
        for k, x in enumerate(arrays):
            if x.nbytes:
                to = found.address + k * first.nbytes
                self.device.driver("cuMemcpyDtoDAsync", to, x.address, x.nbytes, handle)
        self.timeline.record(stream, handle)
        return found

    def places(self, sizes: Sequence[int], host: Sequence[int], crooked: Sequence[int]) -> dict[int, int]:
        """Where in the staging block these inputs go, one behind the other: there may be many more that stay."""
        places, total, pinned = {}, 0, 0
        for number, k in enumerate((*host, *crooked), 1):
            places[k] = total
            total += aligned(sizes[k], ALIGN)
            pinned = total if number == len(host) else pinned
        self.staging.reserve(total, pinned, self.timeline)
        return places

    def stage(self, host: Mapping[int, Array], places: Mapping[int, int], addresses: list[int], handle: Any) -> None:
        """Copies numpy inputs among arrays of the GPU: nobody waits, but the next use of the pinned block."""
        staging = self.staging
        assert staging.block is not None and staging.pinned is not None
        staging.ready()
        raw = staging.pinned.array
        for k, x in host.items():
            at = places[k]
            np.copyto(raw[at : at + x.nbytes].view(x.dtype).reshape(x.shape), x)
            addresses[k] = staging.block.address + at
            if x.nbytes:
                self.device.driver("cuMemcpyHtoDAsync", addresses[k], staging.pinned.host + at, x.nbytes, handle)
        staging.copying(handle)

    def straighten(
        self, found: Mapping[int, Incoming], places: Mapping[int, int], addresses: list[int], handle: Any
    ) -> None:
        """Copies inputs that kernels cannot read where they are."""
        assert self.staging.block is not None
        for k, x in found.items():
            addresses[k] = self.staging.block.address + places[k]
            assert x.dtype is not None
            densify(self.device, x, x.dtype.itemsize, addresses[k], handle)

    def dense(self, x: Incoming, stream: int, handle: Any) -> DeviceArray:
        """An array of the GPU without gaps, on a stream that follows the one that makes it: itself, or a copy."""
        assert x.dtype is not None
        if not is_crooked(x):
            return Borrowed(x, stream, self.timeline)
        found = self.new(x.shape, x.dtype, stream)
        if found.nbytes:
            densify(self.device, x, x.dtype.itemsize, found.address, handle)
        return found


def _close(device: Device, timeline: Timeline, own: Any) -> None:
    """Waits for all calls of a workspace that is no more, and gives its stream back."""
    try:
        with device.current():
            timeline.drain()
            device.streams.append(own)
    except Exception:  # the GPU is lost
        pass


class Attachable:
    """What has a workspace on a GPU from its first call on: a model of one program, or of several."""

    _ordinal: int  # of the GPU that it is on, or will be
    _attached: bool
    _lock: threading.RLock

    def attach(self, device: int | None = None) -> None:
        """Brings the model to its GPU: its weights and all that calls share. The first call does it too.

        Args:
            device: another GPU, for a model that is on none yet.

        Raises:
            InputError: it is on another GPU already.
            CudaError: there is no such GPU, no driver, or no machine code for it.
            LimitError: the GPU has no memory for the weights.
        """
        with self._lock:
            if self._attached:
                if device not in (None, self._ordinal):
                    raise InputError(f"the model is on GPU {self._ordinal} already, and cannot go to GPU {device}")
                return
            gpu = find_device(self._ordinal if device is None else device)
            with gpu.current():
                self.join(Workspace(gpu))

    def join(self, space: Workspace) -> None:
        """As :meth:`attach`, to a workspace that is shared with others. The GPU's context is current."""
        raise NotImplementedError


class Borrowed(DeviceArray):
    """An array of somebody else's as one of ours, for as long as a call takes."""

    __slots__ = ("keep",)

    def __init__(self, x: Incoming, stream: int, timeline: Timeline) -> None:
        assert x.dtype is not None
        self.address, self.shape, self.element, self.keep = x.address, x.shape, x.dtype, x.keep
        self.nbytes = int(np.prod(x.shape, dtype=object)) * x.dtype.itemsize
        self.stream, self.timeline = stream, timeline

    def __del__(self) -> None:  # its memory is not ours
        pass


def is_crooked(x: Incoming) -> bool:
    """Whether kernels cannot read an array where it is: with gaps, or misaligned."""
    assert x.dtype is not None
    return bool(x.address % VECTOR) or not is_dense(x.shape, x.strides, x.dtype.itemsize)


def element_of(array: Array) -> DType:
    """The dtype of an array of the host's that is to go to a GPU.

    Raises:
        InputError: no array on a GPU can have it.
    """
    try:
        element = from_numpy(array.dtype)
    except KeyError as error:
        raise InputError(f"an array of dtype {array.dtype} cannot go to a GPU", cause=error) from error
    if element is string:
        raise InputError(f"an array of dtype {array.dtype} cannot go to a GPU")
    return element
