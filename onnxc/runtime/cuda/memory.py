"""Memory of a GPU, and memory of the host that a GPU reaches: who owns it, and when it may be used again.

Work on a GPU is ordered by streams, and a call returns before its work is done. So memory that is freed is given to
nobody else but to later work on the stream that used it last: that work runs after.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxc.errors import LimitError

if TYPE_CHECKING:
    from onnxc.runtime.cuda.driver import Device

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_SMALLEST = 512
_PORTABLE_MAPPED = 3  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_WORDS = 32  # bytes of error words
_WATCHED = 32  # programs whose error words share a block
_HALF = 1 << 19  # bytes of one half of a ring
Failure = Callable[[int, int, int], Exception]
"""Makes the exception of a code, the number of the call in a run, and a value."""


def rounded(nbytes: int) -> int:
    """The size of the block for so many bytes, at most an eighth larger, so that like sizes share blocks.

    >>> rounded(1), rounded(4096), rounded(5000)
    (512, 4096, 5120)
    """
    step = max(_SMALLEST, 1 << max(0, (nbytes - 1).bit_length() - 4))
    return max(_SMALLEST, -(-nbytes // step) * step)


class Home:
    """Blocks of one size, one of :func:`rounded`, that the same stream used last. Any thread may take and give without
    a lock: a call has many results.
    """

    __slots__ = ("idle", "nbytes", "pool", "stream")

    def __init__(self, pool: BlockPool, nbytes: int, stream: int) -> None:
        self.pool, self.nbytes, self.stream = pool, nbytes, stream
        self.idle: list[int] = []  # addresses of those that are free

    def give(self, address: int) -> None:
        """Takes a block back, of which work on the stream may still be under way."""
        self.idle.append(address)
        if self.pool.is_large:
            self.pool.clear(self.pool.most)


class BlockPool:
    """Blocks for the results of calls. Those that are free are kept.

    Args:
        device: whose memory.
        most: bytes that may be kept.

    Attributes:
        is_large: whether all blocks, those in use too, have more bytes than may be kept.
    """

    def __init__(self, device: Device, most: int) -> None:
        self._device, self.most = device, most
        self._homes: dict[tuple[int, int], Home] = {}  # none ever goes: whoever gives may just have found it
        self._nbytes = 0  # of all blocks
        self.is_large = False
        self._lock = threading.RLock()  # a thread that holds it may collect garbage, and give a block back

    @property
    def idle_bytes(self) -> int:
        """Bytes that are kept for later."""
        return sum(home.nbytes * len(home.idle) for home in list(self._homes.values()))

    def home(self, nbytes: int, stream: int) -> Home:
        """The home of blocks of a size for a stream."""
        found = self._homes.get((nbytes, stream))
        if found is None:
            with self._lock:
                found = self._homes.setdefault((nbytes, stream), Home(self, nbytes, stream))
        return found

    def take(self, homes: Sequence[Home]) -> list[int]:
        """The addresses of blocks, one of each home. The context is current.

        Raises:
            LimitError: there is not so much memory.
        """
        found = list[int]()
        for home in homes:
            try:
                found.append(home.idle.pop())
            except IndexError:
                try:
                    found.append(self._new(home.nbytes))
                except LimitError:
                    for address, own in zip(found, homes, strict=False):
                        own.give(address)
                    raise
        return found

    def _new(self, nbytes: int) -> int:
        address = self._device.allocate(nbytes)
        self._count(nbytes)
        return address

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes += nbytes
            self.is_large = self._nbytes > self.most

    def clear(self, most: int = 0) -> None:
        """Frees what is kept, the largest first, until it is no more than so many bytes."""
        with self._lock:
            excess = self.idle_bytes - most
            for home in sorted(self._homes.values(), key=lambda h: -h.nbytes) if excess > 0 else ():
                while home.idle and excess > 0:
                    try:
                        address = home.idle.pop()
                    except IndexError:  # another thread has taken it
                        break
                    excess -= home.nbytes
                    self._count(-home.nbytes)
                    self._device.free(address)


class Block:
    """Memory of the GPU, freed with this object."""

    __slots__ = ("_device", "address", "nbytes")

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device, self.nbytes = device, nbytes
        self.address = 0
        self.address = device.allocate(nbytes)

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            try:
                self._device.free(self.address)
            except Exception:  # the process ends, and modules are gone
                pass


class Pinned:
    """Memory of the host that the GPU copies from and to, and that kernels can reach. Freed with this object.

    Attributes:
        host: its address.
        device: its address for kernels.
        array: its bytes.
    """

    __slots__ = ("_device", "array", "device", "host", "nbytes")

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device, self.nbytes = device, nbytes
        self.host = 0
        self.host = int(device.driver("cuMemHostAlloc", max(1, nbytes), _PORTABLE_MAPPED))
        self.device = int(device.driver("cuMemHostGetDevicePointer", self.host, 0))
        raw = (ctypes.c_uint8 * max(1, nbytes)).from_address(self.host)
        self.array: Bytes = np.frombuffer(memoryview(raw).cast("B"), np.uint8)

    def __del__(self) -> None:
        if getattr(self, "host", 0):
            self._device.driver.attempt("cuMemFreeHost", self.host)


class Event:
    """A point in the work of a stream."""

    __slots__ = ("_device", "_handle", "_record")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._handle: Any = None
        self._handle = device.driver("cuEventCreate", _NO_TIMING)
        self._record = device.driver.function("cuEventRecord")

    def record(self, stream: Any) -> None:
        """The point is now, behind all work that the stream has been given."""
        self._record(self._handle, stream)

    def wait(self, stream: Any) -> None:
        """What the stream is given from now on runs after the point. (The host does not wait.)"""
        self._device.driver("cuStreamWaitEvent", stream, self._handle, 0)

    def synchronize(self) -> None:
        """The host waits for the point."""
        self._device.driver("cuEventSynchronize", self._handle)

    def passed(self) -> bool:
        """Whether the work before the point is done."""
        return self._device.driver.is_ready("cuEventQuery", self._handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self._device.driver.attempt("cuEventDestroy", self._handle)


class Watched:
    """The error words of one program, in memory of the host: its kernels write there only when something is wrong, and
    to look costs no copy and no wait.

    Attributes:
        words: code, number of the call in a run, value, and one that is not used.
        address: theirs, for kernels.
        failure: makes the exception of the first three.
    """

    __slots__ = ("address", "failure", "words")

    def __init__(self, pinned: Pinned, offset: int, failure: Failure) -> None:
        self.words = (ctypes.c_int64 * 4).from_address(pinned.host + offset)
        self.words[:] = [0] * 4
        self.address = pinned.device + offset
        self.failure = failure


class Timeline:
    """The calls that share an arena, one after the other on whatever streams, and the errors that their kernels write
    down.

    A call on another stream than the last one's waits there for the last one. One event, recorded after each call, is
    then behind all of them.

    Args:
        device: where they are.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._event = Event(device)
        self._blocks: list[Pinned] = []
        self._watched: list[Watched] = []
        self._free: list[tuple[Pinned, int]] = []
        self._stream: int | None = None
        self._lock = threading.RLock()  # a thread that holds it may collect garbage, and forget a program

    def watch(self, failure: Failure) -> Watched:
        """Error words for one more program."""
        with self._lock:
            if not self._free:
                self._blocks.append(Pinned(self.device, _WATCHED * _WORDS))
                self._free = [(self._blocks[-1], k * _WORDS) for k in range(_WATCHED)]
            found = Watched(*self._free.pop(), failure)
            self._watched = [*self._watched, found]
        return found

    def forget(self, watched: Watched) -> None:
        """No kernel writes there any more. What one has written is still raised."""
        with self._lock:
            if not watched.words[0]:
                self._watched = [w for w in self._watched if w is not watched]

    def follow(self, stream: int, handle: Any) -> None:
        """Before a call on this stream."""
        if stream != self._stream and self._stream is not None:
            self._event.wait(handle)

    def record(self, stream: int, handle: Any) -> None:
        """After a call on this stream."""
        self._event.record(handle)
        self._stream = stream

    def join(self, consumer: Any) -> None:
        """Has another stream wait for the calls so far."""
        self._event.wait(consumer)

    def passed(self) -> bool:
        """Whether all calls are done."""
        return self._event.passed()

    def drain(self) -> None:
        """Waits for all calls."""
        self._event.synchronize()

    def synchronize(self) -> None:
        """Waits for all calls, and raises what went wrong in them."""
        self._event.synchronize()
        self.check()

    def check(self) -> None:
        """Raises what a call that is done, or is under way, has found wrong. Once: the next call starts afresh."""
        for watched in self._watched:
            if watched.words[0]:
                break
        else:
            return
        failures = []
        with self._lock:
            self._event.synchronize()  # nobody writes there any more
            for watched in self._watched:
                code, call, value, _ = watched.words
                watched.words[:] = [0] * 4
                if code:
                    failures.append((watched.failure, code, call, value))
        for failure, *words in failures[:1]:
            raise failure(*words)


class Staging:
    """A block of pinned memory with one of the GPU beside it, for the inputs and outputs of calls with numpy arrays.

    Attributes:
        generation: counts up when the blocks move.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.pinned: Pinned | None = None
        self.block: Block | None = None
        self.generation = 0
        self._copied = Event(device)
        self._busy = False

    def reserve(self, nbytes: int, pinned: int, timeline: Timeline) -> None:
        """Has the blocks hold so many bytes. No call may be under way where they are too small: it is waited for."""
        if self.block is None or self.block.nbytes < nbytes:
            timeline.synchronize()
            self.block = None  # first, so that both need not be there at once
            self.block = Block(self._device, nbytes)
            self.generation += 1
        if self.pinned is None or self.pinned.nbytes < pinned:
            self.ready()
            self.pinned = Pinned(self._device, pinned)
            self.generation += 1

    def ready(self) -> None:
        """Waits until what was written to the pinned block has been copied out of it."""
        if self._busy:
            self._copied.synchronize()
            self._busy = False

    def copying(self, stream: Any) -> None:
        """After a copy out of the pinned block that nobody waits for."""
        self._copied.record(stream)
        self._busy = True


class Ring:
    """Pinned memory for small arrays on their way to the GPU: the host waits only for those of the round before.

    It has two halves. Who goes on to one waits until all that was copied out of it has been.
    """

    def __init__(self, device: Device) -> None:
        self._pinned = Pinned(device, 2 * _HALF)
        self._events = [Event(device), Event(device)]
        self._busy = [False, False]
        self._at = 0

    def put(self, array: np.ndarray[Any, Any], stream: Any) -> int:
        """The address of a copy of a dense array, to be copied on by this stream next; 0 where it is too large."""
        nbytes = -(-array.nbytes // 64) * 64
        if nbytes > _HALF // 4:
            return 0
        half = self._at // _HALF
        if self._at + nbytes > (half + 1) * _HALF:
            self._events[half].record(stream)  # behind the copies so far: all on this stream, or on one it follows
            self._busy[half] = True
            half = 1 - half
            self._at = half * _HALF
            if self._busy[half]:
                self._events[half].synchronize()
                self._busy[half] = False
        at = self._at
        self._at += nbytes
        self._pinned.array[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
        return self._pinned.host + at
