"""A model on a GPU: its program as a CUDA graph for each set of input shapes, replayed by a call.

    y = model(x)["y"]                    # numpy in, numpy out: waits for the result
    y = model(tensor)["y"]               # an array of the GPU in (torch, CuPy, JAX): a DeviceArray out, nothing waits
    model(tensor, stream=stream)         # on this stream

**Which stream.** A call with arrays of the GPU runs on `stream`; without it, on the stream that the first of them comes
with: torch's current stream, that of ``__cuda_array_interface__``, that of a model's result, else the legacy default
stream, which is torch's and CuPy's default too. Work on other streams that made an input is waited for on the GPU.

**Memory.** The calls of a model share one arena, weights and staging blocks: they run one after the other, from
whatever threads and on whatever streams they come. Results are the caller's own.

**Errors.** What a kernel finds wrong (an index out of bounds) is raised by the call where its results are numpy arrays;
otherwise by ``numpy()`` or ``synchronize()`` of a result, or by the next call.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from onnxc.errors import InputError, LimitError, OnnxcError, PackageError, SizesError
from onnxc.ir.dtypes import DType, from_numpy, string
from onnxc.planner.offsets import aligned
from onnxc.runtime.cache import Buffer, Cache
from onnxc.runtime.cuda.arrays import LEGACY, Array, DeviceArray, Incoming, Reader, Shape, is_dense, reader, stream_of
from onnxc.runtime.cuda.copies import densify
from onnxc.runtime.cuda.driver import Device
from onnxc.runtime.cuda.driver import device as find_device
from onnxc.runtime.cuda.graph import Kernels, Replay
from onnxc.runtime.cuda.memory import Block, Event, Staging, Timeline, rounded
from onnxc.runtime.cuda.program import ALIGN, Flat, Program
from onnxc.runtime.face import WEIGHTS, CompiledModel, Outputs, failure
from onnxc.runtime.library import CallError
from onnxc.runtime.outputs import OutputPool
from onnxc.runtime.signature import Tensor

if TYPE_CHECKING:
    from onnxc.report import Report

IMAGES = "cubins:"  # and the architecture: the section of its machine code
_MOST_SITES = 64  # each has an instantiated graph
_MOST_PINNED = 256 << 20  # bytes of inputs and outputs above which numpy arrays are copied without pinned memory
_MOST_HELD = 16  # calls whose inputs are held
_VECTOR = 16  # bytes: what kernels take an address to be a multiple of
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class _Site:
    """All that calls with inputs of one set of shapes share."""

    def __init__(
        self, values: Mapping[str, int], flat: Flat, shapes: Sequence[Shape], tensors: Sequence[Tensor], inputs: int
    ) -> None:
        self.values, self.flat = dict(values), flat
        self.replay: Replay | None = None
        specs = list(zip(shapes, tensors, strict=True))
        self.specs = [(shape, t.dtype.numpy) for shape, t in specs]
        self.sizes = [int(np.prod(shape, dtype=np.int64)) * t.dtype.itemsize for shape, t in specs]
        self.results = [
            (shape, t.dtype, n, rounded(n)) for (shape, t), n in zip(specs[inputs:], self.sizes[inputs:], strict=True)
        ]
        self.offsets: list[int] = []  # in the staging blocks, of inputs and then outputs
        self.staged = 0
        for nbytes in self.sizes:
            self.offsets.append(self.staged)
            self.staged += aligned(nbytes, ALIGN)
        self.views: list[Array] = []
        self.generation = -1  # of the staging blocks that the views are of

    def in_pinned(self, staging: Staging) -> list[Array]:
        """The inputs and outputs as arrays in pinned memory."""
        assert staging.pinned is not None
        if self.generation != staging.generation:
            raw = staging.pinned.array
            places = zip(self.offsets, self.sizes, self.specs, strict=True)
            self.views = [raw[at : at + n].view(dtype).reshape(shape) for at, n, (shape, dtype) in places]
            self.generation = staging.generation
        return self.views


class CudaModel(CompiledModel):
    """A model compiled for a GPU. Call it with numpy arrays or with arrays of the GPU, from any number of threads.

    Args:
        manifest, sections: of the model.
        threads, cache: of no use here.
        device: the number of the GPU. It is first needed by a call (or `attach`): a model can be compiled and saved
            where there is none.
    """

    _device: Device
    _architecture: str
    _kernels: Kernels
    _weights: Block
    _timeline: Timeline
    _staging: Staging
    _elsewhere: Event
    _own: int  # the stream of calls with numpy arrays

    def __init__(
        self,
        manifest: Mapping[str, Any],
        sections: Mapping[str, Buffer],
        *,
        threads: int | None = None,
        cache: Cache | None = None,
        device: int = 0,
    ) -> None:
        super().__init__(manifest, sections)
        self._program = Program(manifest)
        self._ordinal = device
        self._attached = False
        self._limit = int(manifest.get("memory_limit") or 0)
        self._poison = os.environ.get("ONNXC_POISON") == "1"
        self._results = OutputPool(self._poison)
        self._lock = threading.RLock()
        self._sites: OrderedDict[tuple[Shape, ...], _Site] = OrderedDict()
        self._readers: dict[type, Reader | None] = {}
        self._held: list[Any] = []
        self._arena: Block | None = None
        self._handles: dict[int, Any] = {}
        self._dtypes = [t.dtype for t in self._signature.inputs]
        self._named_stream = "stream" in self._inputs  # an input of that name is one
        updates = manifest.get("updates") or {}
        self._updated = frozenset(int(k) for k in updates.get("inputs", ()))

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
            ordinal = self._ordinal if device is None else device
            self._device = gpu = find_device(ordinal)
            self._architecture = name = self._program.architecture(gpu.capability, gpu)
            try:
                code, weights = self._sections[IMAGES + name], memoryview(self._sections[WEIGHTS]).cast("B")
            except KeyError as error:
                raise PackageError(f"the model has no section {error}", cause=error) from error
            with gpu.current():
                self._kernels = Kernels(gpu, self._program.images[name], code)
                self._weights = Block(gpu, weights.nbytes)
                gpu.upload(self._weights.address, weights)
                self._timeline = Timeline(gpu, functools.partial(_wrong, self.manifest))
                self._staging = Staging(gpu)
                self._elsewhere = Event(gpu)
                own = gpu.driver("cuStreamCreate", _NON_BLOCKING)
            self._own = int(own)
            self._handles = {self._own: own}
            self._ordinal, self._attached = ordinal, True

    # ------------------------------------------------------------ calls

    def __call__(self, *args: Any, stream: Any = None, **kwargs: Any) -> Outputs:
        """Run the model.

        Args:
            args: inputs in the model's order: numpy arrays (or what numpy makes an array of), or arrays of the GPU.
            stream: where to run, if any input is on the GPU: a stream's handle, or a stream of torch, CuPy or
                cuda-core. Default: see the module.
            kwargs: inputs by name.

        Returns:
            The outputs, by name and by position: numpy arrays, or where any input is on the GPU, each a
            :class:`DeviceArray`.

        Raises:
            InputError: an input has a wrong name, dtype, rank or size.
            RunError: the program failed, on an index out of bounds for instance; perhaps in an earlier call.
            LimitError: it needs more memory than there is, or than it may use.
            CudaError: the driver failed.
        """
        if self._named_stream and stream is not None:
            kwargs["stream"], stream = stream, None
        if kwargs:
            args = self._named(kwargs) if not args else self._given.bind(args, kwargs)
        return Outputs(self._names, self._answer(self._with_state(args), stream))

    def _answer(self, args: tuple[Any, ...], stream: Any = None) -> tuple[Any, ...]:
        try:
            return self._run(args, stream)
        except SizesError as error:
            return self._varied(args, error, lambda variant: cast(CudaModel, variant)._run(args, stream))

    def _run(self, args: tuple[Any, ...], stream: Any = None) -> tuple[Any, ...]:
        if len(args) != len(self._dtypes):
            args = self._signature.bind(args, {})
        if not self._attached:
            self.attach()
        chosen = None if stream is None else stream_of(stream)
        with self._lock, self._device.current():
            found = [self._read(x, chosen) for x in args]
            if found.count(None) == len(found) and not self._updated:
                return self._run_numpy(args)
            if chosen is None:
                chosen = next((x.stream for x in found if x is not None and x.stream is not None), LEGACY)
                for k, x in enumerate(found):
                    if x is not None and x.keep is None:  # its library must be told the stream
                        found[k] = self._read(args[k], chosen)
            return self._run_arrays(args, found, chosen)

    def _read(self, x: Any, stream: int | None) -> Incoming | None:
        """An input, if it is on the GPU."""
        kind = type(x)
        try:
            read = self._readers[kind]
        except KeyError:
            read = self._readers[kind] = reader(kind)
        return read(x, self._device.ordinal, stream) if read is not None else None

    def _handle(self, stream: int) -> Any:
        """A stream, as the driver's functions take it."""
        if stream not in self._handles:
            if len(self._handles) > _MOST_SITES:
                self._handles = {self._own: self._handles[self._own]}
            self._handles[stream] = self._device.driver.module.CUstream(stream)
        return self._handles[stream]

    def _site(self, shapes: tuple[Shape, ...]) -> _Site:
        site = self._sites.get(shapes)
        if site is not None:
            self._sites.move_to_end(shapes)
            return site
        signature = self._signature
        values = signature.solve(shapes)
        signature.check(values)
        flat = self._program.at(values, self._architecture, self._device.multiprocessors)
        if self._limit and flat.arena > self._limit:
            raise LimitError(f"{flat.arena} bytes of memory are above the limit")
        outputs = signature.output_shapes(values)
        site = _Site(values, flat, [*shapes, *outputs], [*signature.inputs, *signature.outputs], len(shapes))
        while len(self._sites) >= _MOST_SITES:
            old = self._sites.popitem(last=False)[1]
            if old.replay is not None:
                old.replay.close()
        self._sites[shapes] = site
        return site

    # ------------------------------------------------------------ numpy

    def _run_numpy(self, args: Sequence[Any]) -> tuple[Array, ...]:
        """Inputs through a pinned block to the GPU, the program, outputs through the block back, all on our stream."""
        inputs = self._signature.arrays(args)
        site = self._site(tuple([x.shape for x in inputs]))
        try:
            outputs = self._results.arrays(site.specs[len(inputs) :])
        except (MemoryError, ValueError) as error:
            raise LimitError("no memory for the outputs", cause=error) from error
        self._timeline.check()
        driver, staging, stream = self._device.driver, self._staging, self._handles[self._own]
        pinned = site.staged <= _MOST_PINNED
        staging.reserve(site.staged, site.staged if pinned else 0, self._timeline)
        assert staging.block is not None and staging.pinned is not None
        staging.ready()
        self._timeline.follow(self._own, stream)
        block, n = staging.block.address, len(inputs)
        middle = site.offsets[n] if n < len(site.offsets) else site.staged  # where outputs begin
        if pinned:
            views = site.in_pinned(staging)
            for view, x in zip(views, inputs, strict=False):
                np.copyto(view, x)
            if middle:
                driver("cuMemcpyHtoDAsync", block, staging.pinned.host, middle, stream)
        else:
            for x, at in zip(inputs, site.offsets, strict=False):
                if x.nbytes:
                    driver("cuMemcpyHtoDAsync", block + at, x.ctypes.data, x.nbytes, stream)
        self._launch(site, [block + at for at in site.offsets], self._own, stream)
        if pinned:
            if site.staged > middle:
                driver("cuMemcpyDtoHAsync", staging.pinned.host + middle, block + middle, site.staged - middle, stream)
            driver("cuStreamSynchronize", stream)
            for y, view in zip(outputs, views[n:], strict=True):
                np.copyto(y, view)
        else:
            for y, at in zip(outputs, site.offsets[n:], strict=True):
                if y.nbytes:
                    driver("cuMemcpyDtoHAsync", y.ctypes.data, block + at, y.nbytes, stream)
            driver("cuStreamSynchronize", stream)
        self._timeline.check()
        return outputs

    # ------------------------------------------------------------ arrays of the GPU

    def _run_arrays(self, args: Sequence[Any], found: list[Incoming | None], stream: int) -> tuple[DeviceArray, ...]:
        self._timeline.check()
        handle = self._handle(stream)
        site, addresses, outputs = self._ready(args, found, stream, handle)
        self._launch(site, addresses, stream, handle)
        for k in self._updated:
            if isinstance(args[k], DeviceArray):
                args[k].written(stream, self._timeline)
        return outputs

    def _ready(
        self, args: Sequence[Any], found: list[Incoming | None], stream: int, handle: Any
    ) -> tuple[_Site, list[int], tuple[DeviceArray, ...]]:
        """New outputs, and the addresses of inputs and outputs; what a stream must do first it has been given."""
        timeline = self._timeline
        shapes, addresses = [], []
        host: dict[int, Array] = {}
        plain = True
        for k, x in enumerate(found):
            if k in self._updated:
                self._check_updated(k, x)
            if x is None:
                array = host[k] = self._signature.array(k, args[k])
                shapes.append(array.shape)
                addresses.append(0)
                continue
            address, dtype, shape, strides, origin, _ = x
            if dtype is not self._dtypes[k]:
                raise self._wrong_dtype(k, dtype)
            if strides is not None or origin != stream or address % _VECTOR:
                plain = False
            shapes.append(shape)
            addresses.append(address)
        site = self._site(tuple(shapes))
        timeline.follow(stream, handle)
        if not plain or self._held:
            self._order(found, stream, handle)
        crooked = [] if plain else [k for k, x in enumerate(found) if self._is_crooked(k, x)]
        if host or crooked:
            places = self._places(site, list(host), crooked)
            if host:
                self._stage(host, places, addresses, handle)
            if crooked:
                self._straighten(found, places, addresses, handle)
        pool = self._device.pool
        outputs = tuple([DeviceArray(pool, *spec, stream, timeline) for spec in site.results])
        addresses += [y.address for y in outputs]
        return site, addresses, outputs

    def _check_updated(self, k: int, x: Incoming | None) -> None:
        """Refuses what a call could not change, since it would change a copy."""
        dense = x is not None and is_dense(x.shape, x.strides, self._dtypes[k].itemsize)
        if x is None or not dense or x.address % _VECTOR:
            raise InputError(
                f"input {self._inputs[k]!r} is updated in place: it must be an array of the GPU, without gaps "
                f"and at a multiple of {_VECTOR} bytes, as put() gives one"
            )

    def _wrong_dtype(self, k: int, dtype: DType | None) -> InputError:
        tensor = self._signature.inputs[k]
        came = dtype.name if dtype is not None else "another dtype"
        return InputError(f"input {tensor} expects dtype {tensor.dtype.name}; {came} was given")

    def _order(self, found: Sequence[Incoming | None], stream: int, handle: Any) -> None:
        """Waits on the GPU for what makes the inputs, and holds those whose memory another stream could be given."""
        held = []
        for x in found:
            if x is not None and x.stream != stream:
                held.append(x.keep)
                if x.stream is not None:
                    self._elsewhere.record(self._handle(x.stream))
                    self._elsewhere.wait(handle)
        if self._held and self._timeline.passed():
            self._held.clear()
        if held:
            if len(self._held) >= _MOST_HELD:
                self._timeline.synchronize()
                self._held.clear()
            self._held.append(held)

    def _places(self, site: _Site, host: Sequence[int], crooked: Sequence[int]) -> dict[int, int]:
        """Where in the staging block these inputs go, one behind the other: there may be many more that stay."""
        places, total, pinned = {}, 0, 0
        for number, k in enumerate((*host, *crooked), 1):
            places[k] = total
            total += aligned(site.sizes[k], ALIGN)
            pinned = total if number == len(host) else pinned
        self._staging.reserve(total, pinned, self._timeline)
        return places

    def _stage(self, host: Mapping[int, Array], places: Mapping[int, int], addresses: list[int], handle: Any) -> None:
        """Copies numpy inputs among arrays of the GPU: nobody waits, but the next use of the pinned block."""
        assert self._staging.block is not None and self._staging.pinned is not None
        self._staging.ready()
        raw = self._staging.pinned.array
        for k, x in host.items():
            at = places[k]
            np.copyto(raw[at : at + x.nbytes].view(x.dtype).reshape(x.shape), x)
            addresses[k] = self._staging.block.address + at
            if x.nbytes:
                source = self._staging.pinned.host + at
                self._device.driver("cuMemcpyHtoDAsync", addresses[k], source, x.nbytes, handle)
        self._staging.copying(handle)

    def _is_crooked(self, k: int, x: Incoming | None) -> bool:
        """Whether kernels cannot read an input where it is: with gaps, or misaligned."""
        return x is not None and not (
            x.address % _VECTOR == 0 and is_dense(x.shape, x.strides, self._dtypes[k].itemsize)
        )

    def _straighten(
        self, found: Sequence[Incoming | None], places: Mapping[int, int], addresses: list[int], handle: Any
    ) -> None:
        """Copies such inputs."""
        assert self._staging.block is not None
        for k, at in places.items():
            x = found[k]
            if x is not None:
                addresses[k] = self._staging.block.address + at
                densify(self._device, x, self._dtypes[k].itemsize, addresses[k], handle)

    # ------------------------------------------------------------ the program

    def _launch(self, site: _Site, addresses: list[int], stream: int, handle: Any) -> None:
        """Runs the program with inputs and outputs at these addresses."""
        replay = self._bound(site, addresses)
        if self._poison:
            self._fill(site, addresses, handle)
        replay.run(handle)
        self._timeline.record(stream, handle)

    def _bound(self, site: _Site, addresses: list[int]) -> Replay:
        arena = self._arena
        if arena is None or arena.nbytes < site.flat.arena:
            arena = self._grow(site.flat.arena)
        bases = [*addresses, arena.address, self._weights.address, self._timeline.words]
        if site.replay is None:
            site.replay = Replay(self._device, self._kernels, site.flat, bases)
        else:
            site.replay.bind(bases)
        return site.replay

    def _grow(self, nbytes: int) -> Block:
        """A larger arena. The graphs learn of it as they are used."""
        spare = 0
        if self._arena is not None:
            self._timeline.synchronize()
            spare = self._arena.nbytes // 4  # sizes that grow from call to call shall not do this each time
            self._arena = None
        try:
            self._arena = Block(self._device, max(nbytes, min(nbytes + spare, self._limit or nbytes + spare)))
        except LimitError:
            self._arena = Block(self._device, nbytes)
        return self._arena

    def _fill(self, site: _Site, addresses: list[int], handle: Any) -> None:
        """Fills the arena and the outputs with NaN: tests then see what was not written."""
        n = len(self._dtypes)
        assert self._arena is not None
        places = [(self._arena.address, self._arena.nbytes), *zip(addresses[n:], site.sizes[n:], strict=True)]
        for address, nbytes in places:
            if nbytes:
                self._device.driver("cuMemsetD8Async", address, 0xFF, nbytes, handle)

    # ------------------------------------------------------------ arrays that stay on the GPU

    def put(self, array: Any) -> DeviceArray:
        """A copy of an array of the host's on the model's GPU, for calls that shall find it there.

        Raises:
            InputError: a dtype that no input can have. LimitError: the GPU has no memory for it. As :meth:`attach`.
        """
        given = np.asarray(array)
        try:
            element = from_numpy(given.dtype)
        except KeyError as error:
            raise InputError(f"an array of dtype {given.dtype} cannot go to a GPU", cause=error) from error
        if element is string:
            raise InputError(f"an array of dtype {given.dtype} cannot go to a GPU")
        given = np.asarray(given, element.numpy, order="C")  # in the byte order of the GPU
        self.attach()
        with self._lock, self._device.current():
            pool, nbytes, own = self._device.pool, given.nbytes, self._handles[self._own]
            found = DeviceArray(pool, given.shape, element, nbytes, rounded(nbytes), self._own, self._timeline)
            if nbytes:  # on the stream itself: behind who had the memory before, and done when it has been waited for
                self._device.driver("cuMemcpyHtoDAsync", found.address, given.ctypes.data, nbytes, own)
                self._device.driver("cuStreamSynchronize", own)
        return found

    def holds(self, array: Any) -> bool:
        """Whether an array lies on the model's GPU. Raises as :meth:`attach`."""
        self.attach()
        return self._read(array, None) is not None

    # ------------------------------------------------------------ facts

    @property
    def device(self) -> Device:
        """Where the model is. Raises as :meth:`attach`."""
        self.attach()
        return self._device

    @property
    def architecture(self) -> str:
        """That of the machine code which runs there. Raises as :meth:`attach`."""
        self.attach()
        return self._architecture

    def synchronize(self) -> None:
        """Waits for all calls.

        Raises:
            RunError: one of them failed.
        """
        if self._attached:
            with self._device.current():
                self._timeline.synchronize()

    def profile(self, inputs: Mapping[str, Any] | Sequence[Any], *, runs: int = 30, warm_up: int = 3) -> Report:
        from onnxc.runtime.cuda.profile import Clock, gpu_peaks

        args = self._signature.bind(self._to_profile(inputs, runs), {})
        calls = len(self.manifest.get("kernels") or ())
        self.attach()
        with self._lock, self._device.current():
            stream = self._handles[self._own]
            found = [self._read(x, self._own) for x in args]
            outputs: tuple[Any, ...]
            if found.count(None) == len(found) and not self._updated:
                arrays = self._signature.arrays(args)
                outputs = self._run_numpy(arrays)  # the inputs are then on the GPU
                site = self._site(tuple(x.shape for x in arrays))
                assert self._staging.block is not None
                addresses = [self._staging.block.address + at for at in site.offsets]
            else:
                site, addresses, outputs = self._ready(args, found, self._own, stream)
                self._launch(site, addresses, self._own, stream)
            replay = self._bound(site, addresses)
            clock = Clock(self._device, stream)
            times = [clock.times(replay.nodes, calls) for _ in range(warm_up + runs)][warm_up:]
            self._timeline.check()
            peaks = gpu_peaks(self._device)
            del outputs  # which the kernels have written to until now
        return self._profiled(site.values, times, peaks)

    def trim(self) -> None:
        if not self._attached:
            return
        with self._lock, self._device.current():
            self._timeline.synchronize()
            for site in self._sites.values():
                if site.replay is not None:
                    site.replay.close()
            self._sites.clear()
            self._held.clear()
            self._arena = None
            self._staging = Staging(self._device)
            self._results.clear()
            self._device.pool.clear()

    def __del__(self) -> None:
        if not getattr(self, "_attached", False):
            return
        try:
            with self._device.current():
                self._timeline.drain()
                for site in self._sites.values():
                    if site.replay is not None:
                        site.replay.close()
                self._kernels.close()
                self._device.driver.attempt("cuStreamDestroy", self._handles[self._own])
        except Exception:  # the process ends, or the GPU is lost
            pass


def _wrong(manifest: Mapping[str, Any], code: int, call: int, value: int) -> OnnxcError:
    """The exception for error words. (A result holds it: it must not hold the model.)"""
    found = failure(manifest, CallError(1, code, call, value))
    found.partial = bool(manifest.get("updates"))  # kernels behind the one that failed have run all the same
    return found
