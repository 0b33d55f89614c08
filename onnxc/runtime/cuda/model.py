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
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from onnxc.errors import InputError, LimitError, OnnxcError, PackageError, SizesError
from onnxc.ir.dtypes import DType
from onnxc.runtime.cache import Buffer, Cache
from onnxc.runtime.compiled_model import WEIGHTS, CompiledModel, Outputs, failure
from onnxc.runtime.cuda.arrays import LEGACY, VECTOR, Array, DeviceArray, Incoming, Shape, is_dense, stream_of, usual
from onnxc.runtime.cuda.cublaslt import Library, library, told
from onnxc.runtime.cuda.driver import Device
from onnxc.runtime.cuda.graph import Kernels, Replay
from onnxc.runtime.cuda.memory import Block, Timeline, Watched
from onnxc.runtime.cuda.profile import Clock, gpu_peaks
from onnxc.runtime.cuda.program import Program
from onnxc.runtime.cuda.site import Site
from onnxc.runtime.cuda.workspace import Attachable, Workspace, element_of, is_crooked
from onnxc.runtime.library import TOO_LARGE, CallError
from onnxc.runtime.outputs import OutputPool, wanted

if TYPE_CHECKING:
    from onnxc.report import Report

IMAGES = "cubins:"  # and the architecture: the section of its machine code
_MOST_SITES = 64  # each has an instantiated graph
_MOST_PINNED = 256 << 20  # bytes of inputs and outputs above which numpy arrays are copied without pinned memory


class CudaModel(Attachable, CompiledModel):
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
    _space: Workspace
    _timeline: Timeline  # of the workspace
    _watched: Watched
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
        self._lock = threading.RLock()  # while it is brought to its GPU; calls hold the workspace's
        self._library: Library | str | None = None  # that products are given to, or why there is none, once it is known
        self._sites: OrderedDict[tuple[Shape, ...], Site] = OrderedDict()
        self._last: tuple[list[Shape], Site] | None = None  # that of the last call
        self._dtypes = [t.dtype for t in self._signature.inputs]
        self._named_stream = "stream" in self._inputs  # an input of that name is one
        updates = manifest.get("updates") or {}
        self._updated = frozenset(int(k) for k in updates.get("inputs", ()))

    def join(self, space: Workspace) -> None:
        """As :meth:`attach`, for a program that shares a workspace with others: to its GPU, whose context is current.
        A program that is on a GPU already stays where it is.
        """
        with self._lock:
            if self._attached:
                return
            self._device = gpu = space.device
            self._architecture = name = self._program.architecture(gpu.capability, gpu)
            try:
                code, weights = self._sections[IMAGES + name], memoryview(self._sections[WEIGHTS]).cast("B")
            except KeyError as error:
                raise PackageError(f"the model has no section {error}", cause=error) from error
            if self._program.wants_library(name):
                self._library = library(gpu)
            self._kernels = Kernels(gpu, self._program.images[name], code, self._products)
            self._weights = Block(gpu, weights.nbytes)
            gpu.upload(self._weights.address, weights)
            self._space, self._timeline, self._own = space, space.timeline, space.own
            self._watched = self._timeline.watch(functools.partial(_wrong, self.manifest))
            self._ordinal, self._attached = gpu.ordinal, True
            given = (gpu, self._timeline, self._sites, self._kernels, self._watched, self._weights, space)
            weakref.finalize(self, _release, *given).atexit = False

    # ------------------------------------------------------------ calls

    def __call__(self, /, *args: Any, stream: Any = None, **kwargs: Any) -> Outputs:
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
        with self._space.lock, self._device.current():
            if (given := usual(args, self._dtypes, self._device.ordinal, chosen)) is not None:
                return self._run_usual(args, *given)
            found = [self._space.read(x, chosen) for x in args]
            if found.count(None) == len(found) and not self._updated:
                return self._run_numpy(args)
            if chosen is None:
                chosen = next((x.stream for x in found if x is not None and x.stream is not None), LEGACY)
                for k, x in enumerate(found):
                    if x is not None and x.keep is None:  # its library must be told the stream
                        found[k] = self._space.read(args[k], chosen)
            return self._run_arrays(args, found, chosen)

    def run_on(self, args: Sequence[Any], stream: int) -> tuple[DeviceArray, ...]:
        """A call on this stream, in a workspace that the program shares: arrays of the GPU, whatever it is given."""
        with self._space.lock, self._device.current():
            if (given := usual(args, self._dtypes, self._device.ordinal, stream)) is not None:
                return self._run_usual(args, *given)
            return self._run_arrays(args, [self._space.read(x, stream) for x in args], stream)

    def _site(self, shapes: list[Shape]) -> Site:
        if self._last is not None and self._last[0] == shapes:
            return self._last[1]
        key = tuple([tuple(shape) for shape in shapes])
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = self._new_site(key)
        self._sites.move_to_end(key)
        self._last = [*key], site
        return site

    def _new_site(self, shapes: tuple[Shape, ...]) -> Site:
        signature = self._signature
        values = signature.solve(shapes)
        signature.check(values)
        gpu, weights = self._device, self._weights.nbytes
        flat = self._program.at(values, self._architecture, gpu.multiprocessors, self._products, weights)
        if self._limit and flat.arena > self._limit:
            raise LimitError(TOO_LARGE.format(value=flat.arena))
        outputs = signature.output_shapes(values)
        site = Site(values, flat, [*shapes, *outputs], [*signature.inputs, *signature.outputs], len(shapes))
        while len(self._sites) >= _MOST_SITES:
            old = self._sites.popitem(last=False)[1]
            if old.replay is not None:
                old.replay.close()
        return site

    # ------------------------------------------------------------ numpy

    def _run_numpy(self, args: Sequence[Any]) -> tuple[Array, ...]:
        """Inputs through a pinned block to the GPU, the program, outputs through the block back, all on our stream."""
        inputs = self._signature.arrays(args)
        site = self._site([x.shape for x in inputs])
        try:
            outputs = self._results.arrays(wanted(site.specs[len(inputs) :]))
        except (MemoryError, ValueError) as error:
            raise LimitError("no memory for the outputs", cause=error) from error
        self._timeline.check()
        driver, staging, stream = self._device.driver, self._space.staging, self._space.handles[self._own]
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

    def _run_usual(
        self, args: Sequence[Any], shapes: list[Shape], addresses: list[int], stream: int
    ) -> tuple[DeviceArray, ...]:
        """A call whose inputs are read where they are, and wait for nothing."""
        self._timeline.check()
        handle = self._space.handle(stream)
        site = self._site(shapes)
        self._timeline.follow(stream, handle)
        if self._space.holds:
            self._space.hold([])
        return self._launched(args, site, addresses, self._outputs(site, addresses, stream), stream, handle)

    def _run_arrays(self, args: Sequence[Any], found: list[Incoming | None], stream: int) -> tuple[DeviceArray, ...]:
        self._timeline.check()
        handle = self._space.handle(stream)
        return self._launched(args, *self._ready(args, found, stream, handle), stream, handle)

    def _launched(
        self, args: Sequence[Any], site: Site, addresses: list[int], outputs: tuple[DeviceArray, ...], stream: int,
        handle: Any,
    ) -> tuple[DeviceArray, ...]:  # fmt: skip
        self._launch(site, addresses, stream, handle)
        for k in self._updated:
            if isinstance(args[k], DeviceArray):
                args[k].written(stream, self._timeline)
        return outputs

    def _ready(
        self, args: Sequence[Any], found: list[Incoming | None], stream: int, handle: Any
    ) -> tuple[Site, list[int], tuple[DeviceArray, ...]]:
        """New outputs, and the addresses of inputs and outputs; what a stream must do first it has been given."""
        timeline = self._timeline
        shapes, addresses = list[Shape](), list[int]()
        host: dict[int, Array] = {}
        plain = True
        for k, x in enumerate(found):
            if k in self._updated:
                self._check_updated(k, x)
            if x is None:
                array = self._signature.array(k, args[k])
                if array.nbytes:
                    host[k] = array
                shapes.append(array.shape)
                addresses.append(0)
                continue
            address, dtype, shape, strides, origin, _ = x
            if dtype is not self._dtypes[k]:
                raise self._wrong_dtype(k, dtype)
            if strides is not None or origin != stream or address % VECTOR:
                plain = False
            shapes.append(shape)
            addresses.append(address)
        site = self._site(shapes)
        timeline.follow(stream, handle)
        space = self._space
        if not plain or space.holds:
            space.order(found, stream, handle)
        crooked = {} if plain else {k: x for k, x in enumerate(found) if x is not None and is_crooked(x)}
        if host or crooked:
            places = space.places(site.sizes, list(host), list(crooked))
            if host:
                space.stage(host, places, addresses, handle)
            if crooked:
                space.straighten(crooked, places, addresses, handle)
        return site, addresses, self._outputs(site, addresses, stream)

    def _outputs(self, site: Site, addresses: list[int], stream: int) -> tuple[DeviceArray, ...]:
        """New outputs; their addresses go behind those of the inputs."""
        pool, timeline = self._device.pool, self._timeline
        homes = site.homes(pool, stream)
        taken = pool.take(homes)
        addresses += taken
        made = zip(site.results, homes, taken, strict=True)
        return tuple([DeviceArray(*spec, home, timeline, address) for spec, home, address in made])

    def _check_updated(self, k: int, x: Incoming | None) -> None:
        """Refuses what a call could not change, since it would change a copy."""
        dense = x is not None and is_dense(x.shape, x.strides, self._dtypes[k].itemsize)
        if x is None or not dense or x.address % VECTOR:
            raise InputError(
                f"input {self._inputs[k]!r} is updated in place: it must be an array of the GPU, without gaps "
                f"and at a multiple of {VECTOR} bytes, as put() gives one"
            )

    def _wrong_dtype(self, k: int, dtype: DType | None) -> InputError:
        tensor = self._signature.inputs[k]
        came = dtype.name if dtype is not None else "another dtype"
        return InputError(f"input {tensor} expects dtype {tensor.dtype.name}; {came} was given")

    # ------------------------------------------------------------ the program

    def _launch(self, site: Site, addresses: list[int], stream: int, handle: Any) -> None:
        """Runs the program with inputs and outputs at these addresses."""
        replay = self._bound(site, addresses)
        if self._poison:
            self._fill(site, addresses, handle)
        replay.run(handle)
        self._timeline.record(stream, handle)

    def _bound(self, site: Site, addresses: list[int]) -> Replay:
        arena = self._space.reserve(site.flat.arena, self._limit)
        bases = [*addresses, arena.address, self._weights.address, self._watched.address]
        if site.replay is None:
            site.replay = Replay(self._device, self._kernels, site.flat, bases)
        else:
            site.replay.bind(bases)
        return site.replay

    def _fill(self, site: Site, addresses: list[int], handle: Any) -> None:
        """Fills the arena and the outputs with NaN: tests then see what was not written."""
        n = len(self._dtypes)
        arena = self._space.arena
        assert arena is not None
        places = [(arena.address, arena.nbytes), *zip(addresses[n:], site.sizes[n:], strict=True)]
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
        element = element_of(given)
        given = np.asarray(given, element.numpy, order="C")  # in the byte order of the GPU
        self.attach()
        with self._space.lock, self._device.current():
            nbytes, own = given.nbytes, self._space.handles[self._own]
            found = self._space.new(given.shape, element, self._own)
            if nbytes:  # on the stream itself: behind who had the memory before, and done when it has been waited for
                self._device.driver("cuMemcpyHtoDAsync", found.address, given.ctypes.data, nbytes, own)
                self._device.driver("cuStreamSynchronize", own)
        return found

    def holds(self, array: Any) -> bool:
        """Whether an array lies on the model's GPU. Raises as :meth:`attach`."""
        self.attach()
        return self._space.read(array, None) is not None

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

    def explain(self) -> Report:
        instead = {call for site in list(self._sites.values()) for call in site.flat.instead}
        return told(super().explain(), self._library, instead)

    @property
    def _products(self) -> Library | None:
        """The library that products are given to."""
        return self._library if isinstance(self._library, Library) else None

    def profile(self, inputs: Mapping[str, Any] | Sequence[Any], *, runs: int = 30, warm_up: int = 3) -> Report:
        args = self._signature.bind(self._to_profile(inputs, runs, warm_up), {})
        calls = len(self.manifest.get("kernels") or ())
        self.attach()
        with self._space.lock, self._device.current():
            stream = self._space.handles[self._own]
            found = [self._space.read(x, self._own) for x in args]
            outputs: tuple[Any, ...]
            if found.count(None) == len(found) and not self._updated:
                arrays = self._signature.arrays(args)
                outputs = self._run_numpy(arrays)  # the inputs are then on the GPU
                site = self._site([x.shape for x in arrays])
                staging = self._space.staging
                assert staging.block is not None
                addresses = [staging.block.address + at for at in site.offsets]
            else:
                site, addresses, outputs = self._ready(args, found, self._own, stream)
                self._launch(site, addresses, self._own, stream)
            replay = self._bound(site, addresses)
            clock = Clock(self._device, stream)
            times = [clock.times(replay.placed(), calls) for _ in range(warm_up + runs)][warm_up:]
            self._timeline.check()
            peaks = gpu_peaks(self._device)
            del outputs  # which the kernels have written to until now
        return self._profiled(site.values, times, peaks)

    def timed(self, args: tuple[Any, ...]) -> tuple[tuple[DeviceArray, ...], list[int], dict[str, int]]:
        """A call with a clock around every kernel: outputs, nanoseconds of each kernel, values of the dynamic dims."""
        with self._space.lock, self._device.current():
            stream = next((x.stream for x in args if isinstance(x, DeviceArray)), self._own)
            handle = self._space.handle(stream)
            site, addresses, outputs = self._ready(args, [self._space.read(x, stream) for x in args], stream, handle)
            replay = self._bound(site, addresses)
            times = Clock(self._device, handle).times(replay.placed(), len(self.manifest.get("kernels") or ()))
            self._timeline.record(stream, handle)
            self._timeline.check()
        return outputs, times, site.values

    def trim(self) -> None:
        if not self._attached:
            return
        with self._space.lock, self._device.current():
            self._timeline.synchronize()
            for site in self._sites.values():
                if site.replay is not None:
                    site.replay.close()
            self._sites.clear()
            self._last = None
            self._space.trim()
            self._results.clear()
            self._device.pool.clear()


def _release(
    device: Device, timeline: Timeline, sites: Mapping[Any, Site], kernels: Kernels, watched: Watched, *held: Any
) -> None:
    """Gives back what a model had that is no more, once its calls are done. What is in `held` goes after that.

    A finalizer is called with them, and keeps them: what a cycle of garbage holds is finalized in any order.
    """
    try:
        with device.current():
            timeline.drain()
            for site in sites.values():
                if site.replay is not None:
                    site.replay.close()
            kernels.close()
            timeline.forget(watched)
    except Exception:  # the GPU is lost
        pass


def _wrong(manifest: Mapping[str, Any], code: int, call: int, value: int) -> OnnxcError:
    """The exception for error words. (A result holds it: it must not hold the model.)"""
    found = failure(manifest, CallError(1, code, call, value))
    found.partial = bool(manifest.get("updates"))  # kernels behind the one that failed have run all the same
    return found
