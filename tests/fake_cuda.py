"""A CUDA driver in memory, for tests without a GPU: the functions of ``cuda.bindings.driver`` that the runtime uses.

Memory is numpy's, kernels are Python functions, graphs are lists. Streams are lazy: work that a stream is given runs as
late as it may, when the host waits for it or another stream does, and then now and then a step of any other stream
runs between. So a wait that is missing shows as a wrong result.
Each access is checked against the allocations, and memory that is freed is overwritten.
"""

from __future__ import annotations

import ctypes
import gc
import heapq
import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np

Kernel = Callable[["FakeDriver", tuple[int, int, int], list[int]], None]


MULTIPROCESSORS = 4  # of each GPU


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701


class Failed(Exception):
    """Becomes a return code."""


class Handle:
    """As the handles of cuda-bindings: int() gives the number, and nothing else does."""

    def __init__(self, number: int = 0) -> None:
        self._number = int(number)

    def __int__(self) -> int:
        return self._number


def api(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the driver: counts its calls, and returns a tuple whose first is the code."""

    def call(self: FakeDriver, *arguments: Any) -> tuple[Any, ...]:
        with self.lock:
            self.calls[function.__name__] += 1
            try:
                if function.__name__ in self.failing:
                    raise Failed(self.failing[function.__name__])
                found = function(self, *arguments)
            except Failed as error:
                return (error.args[0], None)
        return (CUresult.CUDA_SUCCESS,) if found is None else (CUresult.CUDA_SUCCESS, *found)

    call.__name__ = function.__name__
    return call


class Params:
    """A structure of the driver: any field may be set."""

    def __init__(self) -> None:
        self.clusterDim = SimpleNamespace()


class FakeDriver:
    """Stands for the module ``cuda.bindings.driver``.

    Args:
        memory: bytes of the GPU.
        devices: how many there are.
        capability: of each.

    Attributes:
        kernels: by name: how many parameters, and the function. `cubin(name)` is an image of it.
        calls: of each function, counted.
        failing: functions that fail, with the code.
        launches: names of the kernels that ran.
    """

    CUresult = CUresult
    CUstream = Handle
    CUstreamCaptureMode = int
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=76,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=16,
    )  # fmt: skip
    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED=14
    )
    CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_DEVICE=2)
    CUkernelNodeAttrID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=4)
    CUDA_KERNEL_NODE_PARAMS = CUDA_MEMCPY3D = CUDA_MEMCPY2D = CUDA_MEMSET_NODE_PARAMS = Params
    CUkernelNodeAttrValue = CUlaunchConfig = CUlaunchAttribute = Params

    def __init__(self, memory: int = 1 << 28, devices: int = 1, capability: tuple[int, int] = (9, 0)) -> None:
        self.memory, self.devices, self.capability = memory, devices, capability
        self.kernels: dict[str, tuple[int, Kernel]] = {}
        self.calls: Counter[str] = Counter()
        self.graphs = 0  # that were captured and not destroyed
        self.misused = 0  # waits for events that are gone
        self.failing: dict[str, CUresult] = {}
        self.launches: list[str] = []
        self.shared: dict[str, int] = {}
        self.clusters: list[int] = []
        self.lock = threading.RLock()
        self._blocks: dict[int, tuple[np.ndarray, int, bool]] = {}  # address: bytes, length, whether on the host
        self._streams: dict[int, deque[Callable[[], None]]] = {0: deque()}
        self._contexts = threading.local()
        self._handles = 1000
        self._random = random.Random(0)
        self._captured: dict[int, list[Callable[[], None]]] = {}  # work of streams that are captured
        self._busy: set[int] = set()  # streams that wait for others
        self._clock = 0.0

    # ------------------------------------------------------------ what tests use

    def view(self, address: int, nbytes: int, host: bool | None = None) -> np.ndarray:
        """Bytes of an allocation."""
        for start, (array, length, on_host) in list(self._blocks.items()):
            if start <= address and address + nbytes <= start + length and host in (None, on_host):
                return array[address - start : address - start + nbytes]
        raise Failed(CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)

    def array(self, address: int, count: int, dtype: Any) -> np.ndarray:
        """Elements of an allocation."""
        return self.view(address, count * np.dtype(dtype).itemsize).view(dtype)

    def used(self, host: bool = False) -> int:
        """Bytes that are allocated."""
        return sum(n for _, n, on_host in list(self._blocks.values()) if on_host == host)

    def spans(self) -> list[tuple[int, int]]:
        """Address and bytes of all that is allocated, of the host's too."""
        return [(address, n) for address, (_, n, _) in list(self._blocks.items())]

    def pending(self) -> int:
        """Work that has not run yet."""
        return sum(map(len, self._streams.values()))

    def put(self, array: np.ndarray) -> int:
        """The address of a copy on the GPU."""
        address = self._allocate(max(1, array.nbytes), False)
        self.view(address, array.nbytes)[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return address

    def push(self, stream: int, work: Callable[[], None]) -> None:
        """Gives a stream work, or the graph that it is captured into."""
        self._captured.get(stream, self._queue(stream)).append(work)

    # ------------------------------------------------------------ inside

    def _allocate(self, nbytes: int, host: bool) -> int:
        if not host and self.used() + nbytes > self.memory:
            raise Failed(CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        raw = np.full(nbytes + 512, 0xA5, np.uint8)
        skip = -raw.ctypes.data % 256
        address = raw.ctypes.data + skip
        self._blocks[address] = (raw[skip : skip + nbytes], nbytes, host)
        return address

    def _release(self, address: Any, host: bool) -> None:
        if int(address) not in self._blocks or self._blocks[int(address)][2] != host:
            raise Failed(CUresult.CUDA_ERROR_INVALID_VALUE)
        self.finish()
        self._blocks.pop(int(address))[0].fill(0xEE)

    def _handle(self) -> Handle:
        self._handles += 1
        return Handle(self._handles)

    def _queue(self, stream: Any) -> deque[Callable[[], None]]:
        if int(stream) not in self._streams:
            raise Failed(CUresult.CUDA_ERROR_INVALID_VALUE)
        return self._streams[int(stream)]

    def _drain(self, stream: Any) -> None:
        while self._queue(stream):
            self._step(stream)

    def finish(self) -> None:
        """Runs all work."""
        for stream in list(self._streams):
            self._drain(stream)

    def _await(self, event: Any, token: object, stream: Any) -> None:
        """Runs a stream up to where the event was recorded on it. (It may have been again, on another.)"""
        while token in event.pending:
            self._step(stream)

    def _step(self, stream: Any) -> None:
        """The next work of a stream, and then perhaps some of others."""
        self._advance(int(stream))
        for _ in range(self._random.randrange(4)):
            other = self._random.choice(list(self._streams))
            queue = self._streams[other]
            if queue and other not in self._busy and getattr(queue[0], "ready", bool)(1):
                self._advance(other)

    def _advance(self, stream: int) -> None:
        collects = gc.isenabled()
        gc.disable()  # what is freed waits for all work, and would run the next before this one is done
        self._busy.add(stream)
        try:
            self._queue(stream).popleft()()
        finally:
            self._busy.discard(stream)
            if collects:
                gc.enable()

    def _context(self) -> None:
        if not getattr(self._contexts, "stack", None):
            raise Failed(CUresult.CUDA_ERROR_INVALID_CONTEXT)

    def _copy(self, to: int, source: int, nbytes: int) -> None:
        self.view(int(to), nbytes)[:] = self.view(int(source), nbytes)

    def _kernel(self, function: Any, grid: tuple[int, int, int], table: int) -> Callable[[], None]:
        """The launch, with its arguments read now, as the driver does."""
        count, run = self.kernels[function.name]
        places = (ctypes.c_void_p * count).from_address(table)
        arguments = [ctypes.c_int64.from_address(p).value for p in places]

        def work() -> None:
            self.launches.append(function.name)
            run(self, grid, arguments)

        return work

    # ------------------------------------------------------------ devices and contexts

    @api
    def cuInit(self, flags: int) -> Any: ...

    @api
    def cuGetErrorString(self, code: CUresult) -> Any:
        return (code.name.lower().replace("_", " ").encode(),)

    @api
    def cuDriverGetVersion(self) -> Any:
        return (13000,)

    @api
    def cuDeviceGetCount(self) -> Any:
        return (self.devices,)

    @api
    def cuDeviceGet(self, ordinal: int) -> Any:
        return (Handle(ordinal),)

    @api
    def cuDeviceGetName(self, length: int, device: Any) -> Any:
        return (b"Fake GPU".ljust(length, b"\0"),)

    @api
    def cuDeviceGetAttribute(self, attribute: int, device: Any) -> Any:
        return (MULTIPROCESSORS if attribute == 16 else self.capability[attribute - 75],)

    @api
    def cuDevicePrimaryCtxRetain(self, device: Any) -> Any:
        return (Handle(77 + int(device)),)

    @api
    def cuCtxGetCurrent(self) -> Any:
        stack = getattr(self._contexts, "stack", None)
        return (stack[-1] if stack else Handle(0),)

    @api
    def cuCtxPushCurrent(self, context: Any) -> Any:
        self._contexts.__dict__.setdefault("stack", []).append(context)

    @api
    def cuCtxPopCurrent(self) -> Any:
        return (self._contexts.stack.pop(),)

    # ------------------------------------------------------------ memory

    @api
    def cuMemGetInfo(self) -> Any:
        self._context()
        return (self.memory - self.used(), self.memory)

    @api
    def cuMemAlloc(self, nbytes: int) -> Any:
        self._context()
        return (Handle(self._allocate(nbytes, False)),)

    @api
    def cuMemFree(self, address: Any) -> Any:
        self._context()
        self._release(address, False)

    @api
    def cuMemHostAlloc(self, nbytes: int, flags: int) -> Any:
        self._context()
        return (self._allocate(nbytes, True),)

    @api
    def cuMemHostGetDevicePointer(self, host: int, flags: int) -> Any:
        return (Handle(host),)

    @api
    def cuMemFreeHost(self, address: int) -> Any:
        self._release(address, True)

    @api
    def cuMemcpyHtoD(self, to: Any, source: Any, nbytes: int) -> Any:
        self.finish()
        target, data = self.view(int(to), nbytes, host=False), _bytes(source, nbytes).copy()
        self.push(0, lambda: target.__setitem__(slice(None), data))  # the host does not wait for it

    @api
    def cuMemcpyDtoH(self, to: int, source: Any, nbytes: int) -> Any:
        self.finish()
        _host(to, nbytes)[:] = self.view(int(source), nbytes, host=False)

    @api
    def cuMemcpyHtoDAsync(self, to: Any, source: int, nbytes: int, stream: Any) -> Any:
        target = self.view(int(to), nbytes, host=False)
        try:
            data = self.view(source, nbytes, host=True)  # pinned: read when it is copied
        except Failed:
            data = _host(source, nbytes).copy()
        self._queue(stream).append(lambda: target.__setitem__(slice(None), data))

    @api
    def cuMemcpyDtoHAsync(self, to: int, source: Any, nbytes: int, stream: Any) -> Any:
        data = self.view(int(source), nbytes, host=False)
        target = _host(to, nbytes)
        self._queue(stream).append(lambda: target.__setitem__(slice(None), data))
        try:
            self.view(to, nbytes, host=True)
        except Failed:
            self._drain(stream)  # not pinned: the driver waits

    @api
    def cuMemcpyDtoDAsync(self, to: Any, source: Any, nbytes: int, stream: Any) -> Any:
        self._queue(stream).append(lambda: self._copy(to, source, nbytes))

    @api
    def cuMemcpy2DAsync(self, copy: Any, stream: Any) -> Any:
        if copy.srcPitch < copy.WidthInBytes or copy.dstPitch < copy.WidthInBytes:
            raise Failed(CUresult.CUDA_ERROR_INVALID_VALUE)
        rows = [
            (copy.dstDevice + k * copy.dstPitch, copy.srcDevice + k * copy.srcPitch, copy.WidthInBytes)
            for k in range(copy.Height)
        ]
        self._queue(stream).append(lambda: [self._copy(*row) for row in rows] and None)

    @api
    def cuMemsetD8Async(self, to: Any, value: int, nbytes: int, stream: Any) -> Any:
        self._queue(stream).append(lambda: self.view(int(to), nbytes).fill(value))

    # ------------------------------------------------------------ streams and events

    @api
    def cuStreamCreate(self, flags: int) -> Any:
        handle = self._handle()
        self._streams[int(handle)] = deque()
        return (handle,)

    @api
    def cuStreamDestroy(self, stream: Any) -> Any:
        self._drain(stream)
        del self._streams[int(stream)]

    @api
    def cuStreamSynchronize(self, stream: Any) -> Any:
        self._drain(stream)

    @api
    def cuStreamBeginCapture(self, stream: Any, mode: int) -> Any:
        assert not self._queue(stream) and int(stream) not in self._captured
        self._captured[int(stream)] = []

    @api
    def cuStreamEndCapture(self, stream: Any) -> Any:
        self.graphs += 1
        works = self._captured.pop(int(stream))
        return (SimpleNamespace(nodes=[SimpleNamespace(work=w, after=[]) for w in works], captured=True),)

    @api
    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> Any:
        token, source = event.token, event.stream

        def wait() -> None:
            self._await(event, token, source)

        wait.ready = lambda _: token not in event.pending  # type: ignore[attr-defined]
        self._queue(stream).append(wait)

    @api
    def cuStreamWaitValue32(self, stream: Any, address: Any, value: int, flags: int) -> Any:
        def gate() -> None:
            assert ctypes.c_int32.from_address(int(address)).value == value, "the GPU would wait forever"

        self._queue(stream).append(gate)

    @api
    def cuEventCreate(self, flags: int) -> Any:
        return (SimpleNamespace(stream=None, token=None, pending=[], time=0.0, gone=False),)

    @api
    def cuEventDestroy(self, event: Any) -> Any:
        event.gone = True

    @api
    def cuEventRecord(self, event: Any, stream: Any) -> Any:
        token = object()
        event.stream, event.token = stream, token
        event.pending.append(token)

        def work() -> None:
            event.pending.remove(token)
            self._clock += 0.001
            event.time = self._clock

        self._queue(stream).append(work)

    @api
    def cuEventSynchronize(self, event: Any) -> Any:
        self.misused += event.gone
        self._await(event, event.token, event.stream)

    @api
    def cuEventQuery(self, event: Any) -> Any:
        if event.token in event.pending:
            raise Failed(CUresult.CUDA_ERROR_NOT_READY)

    @api
    def cuEventElapsedTime(self, start: Any, end: Any) -> Any:
        return (end.time - start.time,)

    # ------------------------------------------------------------ kernels

    @api
    def cuModuleLoadData(self, image: bytes) -> Any:
        if not image.startswith(b"cubin:"):
            raise Failed(CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU)
        return (SimpleNamespace(name=image.removeprefix(b"cubin:").rstrip(b"\0").decode()),)

    @api
    def cuModuleUnload(self, module: Any) -> Any: ...

    @api
    def cuModuleGetFunction(self, module: Any, name: bytes) -> Any:
        if module.name != name.decode() or module.name not in self.kernels:
            raise Failed(CUresult.CUDA_ERROR_NOT_FOUND)
        return (SimpleNamespace(name=module.name),)

    @api
    def cuFuncGetParamInfo(self, function: Any, index: int) -> Any:
        if not 0 <= index < self.kernels[function.name][0]:
            raise Failed(CUresult.CUDA_ERROR_INVALID_VALUE)
        return (8 * index, 8)

    @api
    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> Any:
        self.shared[function.name] = value

    @api
    def cuLaunchKernel(self, function: Any, *rest: Any) -> Any:
        *grid, _, _, _, _, stream, table, _ = rest
        self._queue(stream).append(self._kernel(function, tuple(grid), table))

    @api
    def cuLaunchKernelEx(self, config: Any, function: Any, table: int, extra: int) -> Any:
        self.clusters += [a.value.clusterDim.x for a in config.attrs]
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        self._queue(config.hStream).append(self._kernel(function, grid, table))

    # ------------------------------------------------------------ graphs

    @api
    def cuGraphCreate(self, flags: int) -> Any:
        return (SimpleNamespace(nodes=[]),)

    def _node(self, graph: Any, after: list[Any], count: int, work: Callable[[], None]) -> Any:
        assert len(after) == count and all(n in graph.nodes for n in after)
        node = SimpleNamespace(work=work, after=list(after))
        graph.nodes.append(node)
        return (node,)

    def _kernel_work(self, p: Any) -> Callable[[], None]:
        return self._kernel(p.func, (p.gridDimX, p.gridDimY, p.gridDimZ), p.kernelParams)

    def _copy_work(self, p: Any) -> Callable[[], None]:
        to, source, nbytes = p.dstDevice, p.srcDevice, p.WidthInBytes * p.Height * p.Depth
        return lambda: self._copy(to, source, nbytes)

    def _fill_work(self, p: Any) -> Callable[[], None]:
        to, nbytes, value = p.dst, p.elementSize * p.width * p.height, p.value
        assert to % p.elementSize == 0 and value == 0
        return lambda: self.view(to, nbytes).fill(0)

    @api
    def cuGraphAddKernelNode(self, graph: Any, after: list[Any], count: int, params: Any) -> Any:
        return self._node(graph, after, count, self._kernel_work(params))

    @api
    def cuGraphAddMemcpyNode(self, graph: Any, after: list[Any], count: int, params: Any, context: Any) -> Any:
        return self._node(graph, after, count, self._copy_work(params))

    @api
    def cuGraphAddMemsetNode(self, graph: Any, after: list[Any], count: int, params: Any, context: Any) -> Any:
        return self._node(graph, after, count, self._fill_work(params))

    def _part_work(self, part: Any) -> Callable[[], None]:
        works = [n.work for n in part.nodes]
        return lambda: [work() for work in works] and None

    @api
    def cuGraphAddChildGraphNode(self, graph: Any, after: list[Any], count: int, part: Any) -> Any:
        return self._node(graph, after, count, self._part_work(part))

    @api
    def cuGraphExecChildGraphNodeSetParams(self, executable: Any, node: Any, part: Any) -> Any:
        self._update(executable, node, self._part_work(part))

    @api
    def cuGraphKernelNodeSetAttribute(self, node: Any, attribute: int, value: Any) -> Any:
        self.clusters.append(value.clusterDim.x)

    @api
    def cuGraphInstantiate(self, graph: Any, flags: int) -> Any:
        self._context()
        order = _late_first(graph.nodes)
        return (SimpleNamespace(order=order, works=[n.work for n in order]),)

    def _update(self, executable: Any, node: Any, work: Callable[[], None]) -> None:
        executable.works[[n is node for n in executable.order].index(True)] = work

    @api
    def cuGraphExecKernelNodeSetParams(self, executable: Any, node: Any, params: Any) -> Any:
        self._update(executable, node, self._kernel_work(params))

    @api
    def cuGraphExecMemcpyNodeSetParams(self, executable: Any, node: Any, params: Any, context: Any) -> Any:
        self._update(executable, node, self._copy_work(params))

    @api
    def cuGraphExecMemsetNodeSetParams(self, executable: Any, node: Any, params: Any, context: Any) -> Any:
        self._update(executable, node, self._fill_work(params))

    @api
    def cuGraphLaunch(self, executable: Any, stream: Any) -> Any:
        self._context()
        self._queue(stream).extend(executable.works)

    @api
    def cuGraphExecDestroy(self, executable: Any) -> Any: ...

    @api
    def cuGraphDestroy(self, graph: Any) -> Any:
        self.graphs -= getattr(graph, "captured", False)


def _late_first(nodes: list[Any]) -> list[Any]:
    """The nodes of a graph in an order that it allows, and as far as it can be from that in which they were added."""
    waiting = {id(n): len(n.after) for n in nodes}
    users: dict[int, list[Any]] = {}
    for n in nodes:
        for before in n.after:
            users.setdefault(id(before), []).append(n)
    number = {id(n): k for k, n in enumerate(nodes)}
    ready = [-k for k, n in enumerate(nodes) if not n.after]
    heapq.heapify(ready)
    found = []
    while ready:
        node = nodes[-heapq.heappop(ready)]
        found.append(node)
        for user in users.get(id(node), []):
            waiting[id(user)] -= 1
            if not waiting[id(user)]:
                heapq.heappush(ready, -number[id(user)])
    assert len(found) == len(nodes)
    return found


def cubin(name: str) -> bytes:
    """An image of a kernel."""
    return f"cubin:{name}".encode()


def _host(address: int, nbytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


def _bytes(source: Any, nbytes: int) -> np.ndarray:
    return _host(source, nbytes) if isinstance(source, int) else np.frombuffer(source, np.uint8)[:nbytes]
