"""The steps of a program as a CUDA graph: built once for a set of sizes, replayed by one call of the driver.

The graph is built node by node rather than captured from a stream: so the node of each step is known, and where a call
has an input or output elsewhere than the last one had, only the nodes that use it are changed
(``cuGraphExecKernelNodeSetParams``), in the instantiated graph. Launches that are under way keep what they had.

Steps follow each other, or where the program says so, each comes behind those that it needs: gradients of weights are
then computed beside what leads to the next layer's, and fill multiprocessors that it leaves idle.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

from onnxc.errors import CudaError, LimitError, OnnxcError, PackageError
from onnxc.runtime.cuda.cublaslt import Described, Library
from onnxc.runtime.cuda.driver import INVALID_VALUE, Device, DriverError
from onnxc.runtime.cuda.needs import needs
from onnxc.runtime.cuda.program import Copy, Fill, Flat, Image, Launch, Multiply, Pointer, Step

MOST_NODES = 1 << 16  # of a graph; a longer program is launched step by step
MOST_SETTLED = 8  # graphs of a program, for one set of sizes, besides the one that is updated
MOST_SETTLED_NODES = 1 << 13  # of all these graphs of a model together
PATIENCE = 4 * MOST_SETTLED  # calls for which a graph has not served before another takes its place
MOST_BRANCHED = 1 << 11  # nodes of a graph with branches; others follow each other
_PLENTY = 48 << 10  # bytes of shared memory above which a kernel must ask
_WIDE_CLUSTER = 8  # above which a kernel must ask
_WORD = 4  # bytes of the elements that a fill writes, where they divide it


class Kernels:
    """The kernels of a model, each loaded when it is first used.

    Args:
        device: where. Its context is current.
        images: in order.
        code: the section that they lie in.
        library: that products are given to, if there is one.
    """

    def __init__(self, device: Device, images: Sequence[Image], code: Any, library: Library | None = None) -> None:
        self.images, self.library = images, library
        self._device = device
        self._code = memoryview(code)
        self._functions: dict[int, Any] = {}
        self._modules: list[Any] = []
        self.spare = MOST_SETTLED_NODES  # nodes that graphs of settled places may have yet

    def function(self, kernel: int, arguments: int) -> Any:
        """The loaded function, to be launched with so many arguments."""
        if kernel not in self._functions:
            found = self._load(self.images[kernel])
            self._check(found, self.images[kernel].name, arguments)
            self._functions[kernel] = found
        return self._functions[kernel]

    def _check(self, function: Any, name: str, arguments: int) -> None:
        """The driver takes as many as the machine code has, whatever it is given: a wrong number would end the process.

        Drivers before 12.4 cannot tell.
        """
        for index, wanted in ((arguments - 1, True), (arguments, False)):
            try:
                self._device.driver("cuFuncGetParamInfo", function, index)
                has = True
            except DriverError as error:
                if error.code != INVALID_VALUE:
                    return
                has = False
            except CudaError:
                return
            if has != wanted:
                raise PackageError(f"the machine code of {name!r} does not take {arguments} arguments")

    def _load(self, image: Image) -> Any:
        if image.at + image.size > self._code.nbytes:
            raise PackageError(f"the machine code of {image.name!r} lies outside of its section")
        driver = self._device.driver
        module = driver("cuModuleLoadData", bytes(self._code[image.at : image.at + image.size]))
        self._modules.append(module)
        function = driver("cuModuleGetFunction", module, image.name.encode())
        attribute = driver.module.CUfunction_attribute
        if image.shared > _PLENTY:
            driver(
                "cuFuncSetAttribute", function, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, image.shared
            )
        if image.cluster > _WIDE_CLUSTER:
            driver("cuFuncSetAttribute", function, attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        return function

    def close(self) -> None:
        """Unloads them. No call may be under way. The context is current."""
        modules, self._modules, self._functions = self._modules, [], {}
        for module in modules:
            self._device.driver.attempt("cuModuleUnload", module)


class Node(Protocol):
    """One step, with its place in a graph. Addresses are those of the program's bases, by number."""

    call: int

    def bases(self) -> set[int]:
        """Those that it uses."""

    def add(self, graph: Any, after: list[Any]) -> Any:
        """Adds it to a graph, behind these nodes."""

    def place(self, addresses: Sequence[int]) -> None:
        """The bases are here."""

    def update(self, executable: Any) -> None:
        """Has an instantiated graph know of the new places."""

    def enqueue(self, stream: Any) -> None:
        """Runs it without a graph."""


class KernelNode:
    """A launch of a kernel."""

    def __init__(self, device: Device, kernels: Kernels, step: Launch) -> None:
        self._driver, self.call = device.driver, step.call
        image = kernels.images[step.kernel]
        self._cluster = image.cluster
        arguments = step.arguments
        # A word for each argument, which holds an i32 in its lower half, and the words' addresses.
        self._words = (ctypes.c_int64 * len(arguments))(*(a if isinstance(a, int) else 0 for a in arguments))
        start = ctypes.addressof(self._words)
        self._table = (ctypes.c_void_p * len(arguments))(*range(start, start + 8 * len(arguments), 8))
        self._places = [(k, *a) for k, a in enumerate(arguments) if isinstance(a, Pointer)]
        params = device.driver.module.CUDA_KERNEL_NODE_PARAMS()
        params.func = self._function = kernels.function(step.kernel, len(arguments))
        params.gridDimX, params.gridDimY, params.gridDimZ = self._grid = step.grid
        params.blockDimX, params.blockDimY, params.blockDimZ = image.threads, 1, 1
        params.sharedMemBytes = image.shared
        params.kernelParams = ctypes.addressof(self._table)
        self._image, self._params = image, params
        self._set = device.driver.function("cuGraphExecKernelNodeSetParams")
        self._node: Any = None

    def bases(self) -> set[int]:
        return {base for _, base, _ in self._places}

    def place(self, addresses: Sequence[int]) -> None:
        words = self._words
        for k, base, offset in self._places:
            words[k] = addresses[base] + offset

    def add(self, graph: Any, after: list[Any]) -> Any:
        driver = self._driver
        self._node = driver("cuGraphAddKernelNode", graph, after, len(after), self._params)
        if self._cluster > 1:
            identity, value = self._cluster_attribute()
            driver("cuGraphKernelNodeSetAttribute", self._node, identity, value)
        return self._node

    def _cluster_attribute(self) -> tuple[Any, Any]:
        module = self._driver.module
        value = module.CUkernelNodeAttrValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = self._cluster, 1, 1
        return module.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value

    def update(self, executable: Any) -> None:
        self._set(executable, self._node, self._params)

    def enqueue(self, stream: Any) -> None:
        image, table = self._image, ctypes.addressof(self._table)
        if self._cluster == 1:
            self._driver(
                "cuLaunchKernel", self._function, *self._grid, image.threads, 1, 1, image.shared, stream, table, 0
            )
            return
        module = self._driver.module
        config, attribute = module.CUlaunchConfig(), module.CUlaunchAttribute()
        config.gridDimX, config.gridDimY, config.gridDimZ = self._grid
        config.blockDimX, config.blockDimY, config.blockDimZ = image.threads, 1, 1
        config.sharedMemBytes, config.hStream = image.shared, stream
        attribute.id, attribute.value = self._cluster_attribute()
        config.attrs, config.numAttrs = [attribute], 1
        self._driver("cuLaunchKernelEx", config, self._function, table, 0)


class MultiplyNode:
    """A product by the library: a graph of its own inside the graph, which is captured anew where a matrix moves."""

    def __init__(self, device: Device, library: Library, step: Multiply) -> None:
        self._driver, self._library, self.call, self._step = device.driver, library, step.call, step
        self._described = Described(library, step.product)
        self._places: dict[str, int] = {}
        self._node: Any = None

    def bases(self) -> set[int]:
        return {at.base for at in self._step.at.values()}

    def place(self, addresses: Sequence[int]) -> None:
        self._places = {name: addresses[at.base] + at.offset for name, at in self._step.at.items()}

    def _captured(self) -> Any:
        return self._library.captured(self._described, self._step.algorithm, self._places)

    def add(self, graph: Any, after: list[Any]) -> Any:
        part = self._captured()
        try:
            self._node = self._driver("cuGraphAddChildGraphNode", graph, after, len(after), part)  # a copy of it
        finally:
            self._driver.attempt("cuGraphDestroy", part)
        return self._node

    def update(self, executable: Any) -> None:
        part = self._captured()
        try:
            self._driver("cuGraphExecChildGraphNodeSetParams", executable, self._node, part)
        finally:
            self._driver.attempt("cuGraphDestroy", part)

    def enqueue(self, stream: Any) -> None:
        self._library.run(self._described, self._step.algorithm, self._places, stream)


class CopyNode:
    """A copy within the GPU's memory."""

    def __init__(self, device: Device, step: Copy) -> None:
        self._driver, self.call, self._step = device.driver, step.call, step
        self._context = device.context
        module = device.driver.module
        copy = module.CUDA_MEMCPY3D()
        copy.srcMemoryType = copy.dstMemoryType = module.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.WidthInBytes, copy.Height, copy.Depth = step.nbytes, 1, 1
        copy.srcPitch = copy.dstPitch = step.nbytes
        copy.srcHeight = copy.dstHeight = 1
        self._copy, self._to, self._from = copy, 0, 0
        self._node: Any = None

    def bases(self) -> set[int]:
        return {self._step.to.base, self._step.source.base}

    def place(self, addresses: Sequence[int]) -> None:
        to, source = self._step.to, self._step.source
        self._to, self._from = addresses[to.base] + to.offset, addresses[source.base] + source.offset
        self._copy.dstDevice, self._copy.srcDevice = self._to, self._from

    def add(self, graph: Any, after: list[Any]) -> Any:
        self._node = self._driver("cuGraphAddMemcpyNode", graph, after, len(after), self._copy, self._context)
        return self._node

    def update(self, executable: Any) -> None:
        self._driver("cuGraphExecMemcpyNodeSetParams", executable, self._node, self._copy, self._context)

    def enqueue(self, stream: Any) -> None:
        self._driver("cuMemcpyDtoDAsync", self._to, self._from, self._step.nbytes, stream)


class FillNode:
    """Zeros in the GPU's memory."""

    def __init__(self, device: Device, step: Fill) -> None:
        self._driver, self.call, self._step = device.driver, step.call, step
        self._context = device.context
        size = 1 if step.nbytes % _WORD or step.to.offset % _WORD else _WORD
        fill = device.driver.module.CUDA_MEMSET_NODE_PARAMS()
        fill.value, fill.elementSize, fill.width, fill.height = 0, size, step.nbytes // size, 1
        self._fill, self._to = fill, 0
        self._node: Any = None

    def bases(self) -> set[int]:
        return {self._step.to.base}

    def place(self, addresses: Sequence[int]) -> None:
        self._to = addresses[self._step.to.base] + self._step.to.offset
        self._fill.dst = self._to

    def add(self, graph: Any, after: list[Any]) -> Any:
        self._node = self._driver("cuGraphAddMemsetNode", graph, after, len(after), self._fill, self._context)
        return self._node

    def update(self, executable: Any) -> None:
        self._driver("cuGraphExecMemsetNodeSetParams", executable, self._node, self._fill, self._context)

    def enqueue(self, stream: Any) -> None:
        self._driver("cuMemsetD8Async", self._to, 0, self._step.nbytes, stream)


class Executable:
    """An instantiated graph, and where its nodes have the bases: None where that is not known."""

    def __init__(self, handle: Any, addresses: list[int]) -> None:
        self.handle = handle
        self.addresses: list[int] | None = addresses
        self.used = 0  # the number of the last binding that found the bases there


class Replay:
    """The nodes of a program for one set of sizes, as a graph where they are not too many.

    Inputs and outputs at other places cost an update of each node that uses them, 3 us of the host. So places that come
    again, as arrays do that are used in turn, are given an instantiated graph of their own: nothing is updated then.

    Args:
        device: where. Its context is current, here and in all methods.
        kernels: of the model.
        flat: the steps.
        addresses: of the bases.
    """

    def __init__(self, device: Device, kernels: Kernels, flat: Flat, addresses: list[int]) -> None:
        self._device, self._kernels = device, kernels
        self._launch = device.driver.function("cuGraphLaunch")
        self._nodes: list[Node] = [_node(device, kernels, step) for step in flat.steps]
        self._users: dict[int, list[Node]] = {}
        for node in self._nodes:
            node.place(addresses)
            for base in node.bases():
                self._users.setdefault(base, []).append(node)
        count = len(self._nodes)
        branches = flat.branches and count <= MOST_BRANCHED
        self._before = needs(flat.steps) if branches else [[k - 1] if k else [] for k in range(count)]
        self._first = addresses  # as the nodes are added
        self._addresses: list[int] | None = addresses  # of the next run; None where binding failed midway
        self._graph: Any = None  # which the nodes belong to
        self._now: Executable | None = None  # of the next run
        self._roaming: Executable | None = None  # the one that is updated
        self._settled: dict[tuple[int, ...], Executable] = {}  # the others, by their places
        self._passing: OrderedDict[tuple[int, ...], None] = OrderedDict()  # places that came of late
        self._bindings, self._patience = 0, PATIENCE
        self._settles = True  # until one cannot be had
        if 0 < count <= MOST_NODES:
            self._now = self._roaming = Executable(self._built(), addresses)

    def _built(self) -> Any:
        """The graph, instantiated."""
        driver = self._device.driver
        try:
            graph = self._graph = driver("cuGraphCreate", 0)
            added: list[Any] = []
            for node, before in zip(self._nodes, self._before, strict=True):
                added.append(node.add(graph, [added[k] for k in before]))
            return driver("cuGraphInstantiate", graph, 0)
        except LimitError as error:
            self._drop_graph()
            raise LimitError(f"the GPU has no memory for a graph of {len(self._nodes)} steps", cause=error) from error

    def bind(self, addresses: list[int]) -> None:
        """The bases are here from the next run on."""
        if addresses == self._addresses:
            return
        self._addresses = None
        if self._roaming is None:
            for node in self._nodes:
                node.place(addresses)
        else:
            self._now = self._found(tuple(addresses), addresses)
        self._addresses = addresses

    def _found(self, key: tuple[int, ...], addresses: list[int]) -> Executable:
        """The instantiated graph that has the bases here, now if not before."""
        assert self._roaming is not None
        self._bindings += 1
        found = self._settled.get(key)
        if found is None:
            found = self._roaming
            if found.addresses != addresses and self._comes_again(key):
                found = self._settle(key, addresses) or found
            self._update(found, addresses)
        found.used = self._bindings
        return found

    def _comes_again(self, key: tuple[int, ...]) -> bool:
        """Whether these places came before, not long ago."""
        again = key in self._passing
        self._passing[key] = None
        if len(self._passing) > PATIENCE:
            self._passing.popitem(last=False)
        return again

    def _settle(self, key: tuple[int, ...], addresses: list[int]) -> Executable | None:
        """A new graph for these places, if there is room for one, or one that has long not served makes room. Each time
        one does, the next must have waited twice as long: to instantiate graphs takes longer than to update them.
        """
        if not self._settles:
            return None
        full = len(self._settled) >= MOST_SETTLED or self._kernels.spare < len(self._nodes)
        oldest = min(self._settled, key=lambda k: self._settled[k].used, default=None)
        if full and (oldest is None or self._bindings - self._settled[oldest].used <= self._patience):
            return None
        try:
            found = Executable(self._device.driver("cuGraphInstantiate", self._graph, 0), self._first)
        except (CudaError, LimitError):  # memory, perhaps: the one that there is does as well
            self._settles = False
            return None
        try:
            self._update(found, addresses)
        except OnnxcError:
            self._destroy(found)
            raise
        if full and oldest is not None:
            self._patience *= 2
            self._unsettle(oldest)
        self._settled[key] = found
        self._kernels.spare -= len(self._nodes)
        return found

    def _unsettle(self, key: tuple[int, ...]) -> None:
        self._destroy(self._settled.pop(key))
        self._kernels.spare += len(self._nodes)

    def _update(self, executable: Executable, addresses: list[int]) -> None:
        known, executable.addresses = executable.addresses, None  # should something fail, all are set the next time
        moved = [u for base, u in self._users.items() if known is None or known[base] != addresses[base]]
        for node in moved[0] if len(moved) == 1 else dict.fromkeys(itertools.chain(*moved)):
            node.place(addresses)
            node.update(executable.handle)
        executable.addresses = addresses

    def placed(self) -> list[Node]:
        """The nodes, where the last binding has the bases, for those who run them one by one."""
        assert self._addresses is not None
        for node in self._nodes:
            node.place(self._addresses)
        return self._nodes

    def run(self, stream: Any) -> None:
        """One run, on a stream."""
        if self._now is not None:
            self._launch(self._now.handle, stream)
        else:
            for node in self._nodes:
                node.enqueue(stream)

    def close(self) -> None:
        """Frees the graphs. (The driver waits with that for launches under way.)"""
        for key in list(self._settled):
            self._unsettle(key)
        roaming, self._now, self._roaming = self._roaming, None, None
        if roaming is not None:
            self._destroy(roaming)
            self._drop_graph()

    def _destroy(self, executable: Executable) -> None:
        self._device.driver.attempt("cuGraphExecDestroy", executable.handle)

    def _drop_graph(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            self._device.driver.attempt("cuGraphDestroy", graph)


def _node(device: Device, kernels: Kernels, step: Step) -> Node:
    match step:
        case Launch():
            return KernelNode(device, kernels, step)
        case Multiply():
            assert kernels.library is not None
            return MultiplyNode(device, kernels.library, step)
        case Copy():
            return CopyNode(device, step)
        case Fill():
            return FillNode(device, step)
