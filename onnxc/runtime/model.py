"""The models of the CPU: a loaded program, and the ways of a call.

A call goes one of two ways. The quick way leaves it to the runtime (``ox_call_arrays``) to compare the arrays
with what the model wants, and to run it, in one foreign call. Where something is not plainly so (a list,
another layout, a shape not seen before, an error), the slow way looks at each input in Python, converts what
can be converted and says what is wrong with the rest.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import starmap
from numbers import Integral
from typing import Any

import numpy as np

from onnxc.errors import InputError, LimitError, OnnxcError, PackageError
from onnxc.report import Report
from onnxc.runtime.cache import Buffer, Cache, digest
from onnxc.runtime.compiled_model import WEIGHTS, CompiledModel
from onnxc.runtime.cpu import available_bytes, available_cpus, memory_bytes
from onnxc.runtime.library import SIGNAL, CallError, NativeModel, Runtime, load_runtime
from onnxc.runtime.outputs import OutputPool, has_large, wanted
from onnxc.runtime.package import load_library
from onnxc.runtime.peaks import machine_peaks
from onnxc.runtime.signature import MOST_BYTES, Array, Shape, Signature
from onnxc.runtime.sizes import Size, evaluate

PROGRAM, RUNTIME, SOURCE = "program.so", "runtime.so", "source.cpp"
LAYOUT = "onnxc_layout"  # a function of the program: the `layout_digest` that it was compiled for
_ALIGN = 64  # OX_ALIGN
_ASKED = 16  # a call that takes less than this part of the memory does not ask how much of it is left
_UNFIT = -1  # what ox_call_arrays returns where a call must go the slow way
_MOST_SITES = 512
_MOST_THREADS = 256  # OX_MAX_THREADS


class Arena:
    """The memory plan of a program with dynamic dims, to be laid out for each new set of sizes.

    Args:
        sizes: bytes of the intermediates; those of one size share an entry.
        which: for each intermediate, its entry.
        first, last: for each intermediate, the first and last kernel that use it.
    """

    def __init__(self, sizes: Sequence[Size], which: Sequence[int], first: Sequence[int], last: Sequence[int]) -> None:
        self.sizes, self.which, self.first, self.last = list(sizes), list(which), list(first), list(last)

    def layout(self, values: Mapping[str, int], runtime: Runtime) -> list[int]:
        """The arena's bytes, then the offset of each intermediate.

        Raises:
            LimitError: it would be absurdly large.
        """
        exact = [evaluate(s, values) for s in self.sizes]
        nbytes = [max(_ALIGN, -(-exact[k] // _ALIGN) * _ALIGN) for k in self.which]
        if sum(nbytes) > MOST_BYTES:
            raise LimitError(f"the intermediates would have {sum(nbytes)} bytes")
        n, first, last = len(nbytes), self.first, self.last
        order = sorted(range(n), key=lambda i: (-exact[self.which[i]], first[i], last[i]))
        offsets = _longs([0] * n)
        total = runtime.library.ox_place(n, _longs(order), _longs(nbytes), _longs(first), _longs(last), offsets)
        if total < 0:
            raise LimitError("no memory for the memory plan")
        return [total, *offsets]

    def nbytes(self, values: Mapping[str, int]) -> list[int]:
        """The bytes of each intermediate."""
        exact = [evaluate(s, values) for s in self.sizes]
        return [exact[k] for k in self.which]


def _longs(values: Sequence[int]) -> ctypes.Array[ctypes.c_longlong]:
    return (ctypes.c_longlong * len(values))(*values)


class _Want(ctypes.Structure):
    """``ox_want`` of runtime.c."""

    _fields_ = (("descr", ctypes.c_void_p), ("shape", ctypes.c_void_p), ("rank", ctypes.c_longlong))


class _SiteFields(ctypes.Structure):
    """``ox_site`` of runtime.c."""

    _fields_ = (
        ("model", ctypes.c_void_p), ("dims", ctypes.c_void_p),
        ("want", ctypes.c_void_p), ("type", ctypes.c_void_p),
        ("head", ctypes.c_longlong), ("items", ctypes.c_longlong),
        ("inputs", ctypes.c_longlong), ("outputs", ctypes.c_longlong),
    )  # fmt: skip


_HEAD, _ITEMS = object.__basicsize__, tuple.__basicsize__


class Site:
    """All that a call needs to know for inputs of one set of shapes: made once, used by every such call.

    Attributes:
        address: of an ``ox_site``.
        model: the address of the ``ox_model``.
        dims: what a program is called with beside its buffers.
        inputs: the dtypes of the inputs.
        outputs, specs: what arrays there are to be; shapes and dtypes alone.
        large: whether memory for outputs is kept.
    """

    __slots__ = ("address", "dims", "inputs", "keep", "large", "model", "outputs", "specs")

    def __init__(
        self,
        native: NativeModel,
        signature: Signature,
        shapes: Sequence[Shape],
        outputs: Sequence[Shape],
        dims: Sequence[int],
    ) -> None:
        self.outputs = wanted([(s, t.dtype.numpy) for s, t in zip(outputs, signature.outputs, strict=True)])
        self.specs = [(w.shape, w.dtype) for w in self.outputs]
        self.inputs = [t.dtype.numpy for t in signature.inputs]
        self.large = has_large(self.outputs)
        self.model = native.handle
        self.dims = _longs(dims or [0])
        kept = [_longs(shape or [0]) for shape in shapes]
        want = (_Want * max(1, len(shapes)))(
            *(
                _Want(id(t.dtype.numpy), ctypes.addressof(k), len(s))
                for t, s, k in zip(signature.inputs, shapes, kept, strict=True)
            )
        )
        fields = _SiteFields(
            native.handle, ctypes.addressof(self.dims), ctypes.addressof(want), id(np.ndarray), _HEAD, _ITEMS,
            len(shapes), len(outputs),
        )  # fmt: skip
        self.address = ctypes.addressof(fields)
        self.keep = (kept, want, fields)


@functools.cache
def _readable(runtime: Runtime) -> bool:
    """Whether this Python's objects lie in memory as runtime.c reads them; else calls go the slow way."""
    array = np.zeros((2, 3), np.float32)
    found = _longs([0] * 6)
    runtime.library.ox_array_fields((array, None), _HEAD, _ITEMS, found)
    return list(found) == [2, id(np.ndarray), id(array.dtype), array.ctypes.data, 2, array.flags.num]


class CpuModel(CompiledModel):
    """A model compiled for the CPU. Call it with numpy arrays, from any number of threads."""

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
        self.threads = available_cpus() if threads is None else threads
        self._arena = _read_arena(manifest)
        self._lanes: int = manifest.get("lanes") or 0
        if self._lanes not in (0, 4, 8, 16):
            raise PackageError("the manifest is damaged: no machine has such vectors")
        poison = os.environ.get("ONNXC_POISON") == "1"
        self._empty: Callable[..., Array] = _poisoned if poison else np.empty
        self._pool = OutputPool(poison)
        updates = manifest.get("updates") or {}
        self._updated: Sequence[int] = updates.get("inputs", ())
        self._first_update: float = updates.get("first", math.inf)
        self._runtime = load_runtime(cache, sections.get(RUNTIME))
        self._memory_limit = int(manifest.get("memory_limit") or 0) or memory_bytes()
        self._weights = np.frombuffer(sections[WEIGHTS], np.uint8)
        program = load_library(sections[PROGRAM], PROGRAM)
        _check_layout(program, manifest, self._weights.nbytes)
        self._native = NativeModel(
            self._runtime,
            program,
            str(manifest["entry"]),
            [self._weights.ctypes.data],
            limit=self._memory_limit,
            poison=poison,
        )
        self._call_arrays = self._runtime.library.ox_call_arrays
        self._quick = _readable(self._runtime)
        self._sites: dict[tuple[Shape, ...], Site] = {}
        # A model without dynamic dims has this one only.
        self._fixed = None if self._signature.symbols else self._new_site(self._fixed_shapes())

    @property
    def weights(self) -> Array:
        """The block of weights, as bytes; mapped, where the model comes from a file or from the cache."""
        return self._weights

    @property
    def is_static(self) -> bool:
        """Whether inputs of one set of shapes are all that it takes."""
        return self._fixed is not None

    # ------------------------------------------------------------ calls

    def _run(self, args: tuple[Any, ...]) -> tuple[Array, ...]:
        site = self._fixed
        if site is None:
            try:
                site = self._sites.get(tuple([x.shape for x in args]))
            except (AttributeError, TypeError):  # lists and the like have no shape
                return self._run_any(args)
            if site is None:
                return self._run_any(args)
        if not self._quick:
            return self._run_any(args)
        outputs = self.new_outputs(site)
        code = self._call_arrays(site.address, self._threads, args, outputs)
        if code == 0:
            return outputs
        if code == _UNFIT:
            return self._run_any(args)
        raise self._last_failure()

    def new_outputs(self, site: Site) -> tuple[Array, ...]:
        """New arrays for the outputs."""
        empty = self._empty
        try:
            if site.large:
                return self._pool.arrays(site.outputs)
            return tuple(starmap(empty, site.specs))
        except (MemoryError, ValueError) as error:
            raise LimitError("no memory for the outputs", cause=error) from error

    def _last_failure(self) -> OnnxcError:
        """Why the quick call of this thread failed."""
        failure = CallError()
        self._runtime.library.ox_last_error(ctypes.byref(failure))
        return self._failure(failure)

    def _run_any(self, args: tuple[Any, ...]) -> tuple[Array, ...]:
        """The slow way: every input is checked and converted."""
        site, inputs = self._converted(args)
        outputs = self.new_outputs(site)
        if self._quick:
            code = self._call_arrays(site.address, self._threads, inputs, outputs)
            if code > 0:
                raise self._last_failure()
            if code == 0:
                return outputs
        failure = self._native.call(self._threads, _addresses(inputs, outputs), site.dims)
        if failure is not None:
            raise self._failure(failure)
        return outputs

    def _prepared(self, args: tuple[Any, ...]) -> tuple[Site, Any, tuple[Array, ...], tuple[Array, ...]]:
        """For a call of the program: site, addresses of buffers, new outputs, and the inputs, to be kept until then."""
        site, inputs = self._converted(args)
        outputs = self.new_outputs(site)
        return site, _addresses(inputs, outputs), outputs, inputs

    def _converted(self, args: tuple[Any, ...]) -> tuple[Site, tuple[Array, ...]]:
        """The inputs as the program takes them, and the site for their shapes."""
        inputs = self._signature.arrays(self._signature.bind(args, {}))
        self._check_updated(args, inputs)
        shapes = tuple([x.shape for x in inputs])
        return self.site(shapes), inputs

    def site(self, shapes: Sequence[Shape]) -> Site:
        """What a call with inputs of these shapes needs to know. SizesError, InputError where there is none."""
        key = tuple(shapes)
        site = self._sites.get(key)
        if site is None:
            site = self._new_site(key)
            self._remember(key, site)
        return site

    def _check_updated(self, given: Sequence[Any], inputs: Sequence[Array]) -> None:
        """Refuses what a call could not change, since it would change a copy."""
        for k in self._updated:
            x = given[k]
            plain = isinstance(x, np.ndarray) and x.ctypes.data == inputs[k].ctypes.data and x.flags.writeable
            if not plain and inputs[k].size:
                raise InputError(f"input {self._inputs[k]!r} is updated in place: it must be a writable, plain array")

    def _failure(self, error: CallError) -> OnnxcError:
        if error.code == SIGNAL:
            self._runtime.raise_signal()
        found = super()._failure(error)
        found.partial = error.node >= self._first_update
        return found

    def _remember(self, shapes: tuple[Shape, ...], site: Site) -> None:
        # No lock, which a fork could leave locked: each step is atomic, and what is lost is made again.
        while len(self._sites) >= _MOST_SITES:
            try:
                self._sites.pop(next(iter(self._sites)), None)
            except (RuntimeError, StopIteration):  # another thread was quicker
                break
        self._sites[shapes] = site

    def _fixed_shapes(self) -> tuple[Shape, ...]:
        return tuple(tuple(evaluate(s, {}) for s in t.sizes) for t in self._signature.inputs)

    def _new_site(self, shapes: Sequence[Shape]) -> Site:
        signature = self._signature
        values = signature.solve(shapes)
        signature.check(values)
        dims = [values[s] for s in signature.symbols]
        arena = [] if self._arena is None else self._arena.layout(values, self._runtime)
        outputs = signature.output_shapes(values)
        _check_memory(signature, outputs, *arena[:1])
        return Site(self._native, signature, shapes, outputs, dims + arena)

    # ------------------------------------------------------------ facts

    @property
    def threads(self) -> int:
        """The most threads that a call uses, its own among them. Can be set at any time."""
        return self._threads

    @threads.setter
    def threads(self, count: int) -> None:
        given: Any = count  # numpy's integers count too
        if isinstance(given, bool) or not isinstance(given, Integral) or not 1 <= int(given) <= _MOST_THREADS:
            raise InputError(f"threads is a number from 1 to {_MOST_THREADS}, not {count!r}")
        self._threads = int(given)

    def explain(self) -> Report:
        return replace(Report.from_manifest({**self.manifest, "threads": self._threads}), record=self.record)

    def profile(self, inputs: Mapping[str, Any] | Sequence[Any], *, runs: int = 30, warm_up: int = 3) -> Report:
        args = self._to_profile(inputs, runs, warm_up)
        site, buffers, _outputs, kept = self._prepared(args)
        values = dict(zip(self._signature.symbols, site.dims, strict=False))
        calls = len(self.manifest.get("kernels") or ())
        times = [self._times(site, buffers, calls) for _ in range(warm_up + runs)][warm_up:]
        del kept
        peaks = machine_peaks(self._threads, self._lanes or None)
        report = self._profiled(values, times, peaks)
        if self._arena is None:
            return report
        total, *offsets = self._arena.layout(values, self._runtime)
        return replace(report, memory=report.memory.at(total, offsets, self._arena.nbytes(values)))

    def timed(self, args: tuple[Any, ...]) -> tuple[tuple[Array, ...], list[int], dict[str, int]]:
        """A call with a clock around every kernel: outputs, nanoseconds of each kernel, values of the dynamic dims."""
        site, buffers, outputs, kept = self._prepared(args)
        times = self._times(site, buffers, len(self.manifest.get("kernels") or ()))
        del kept
        return outputs, times, dict(zip(self._signature.symbols, site.dims, strict=False))

    def _times(self, site: Site, buffers: Any, kernels: int) -> list[int]:
        """Nanoseconds of each kernel in one run."""
        times = _longs([0] * kernels)
        failure = self._native.profile(self._threads, buffers, site.dims, times)
        if failure is not None:
            raise self._failure(failure)
        return list(times)

    def trim(self) -> None:
        self._native.trim()
        self._pool.clear()


def _addresses(inputs: Sequence[Array], outputs: Sequence[Array]) -> ctypes.Array[ctypes.c_void_p]:
    addresses = [x.ctypes.data for x in (*inputs, *outputs)]
    return (ctypes.c_void_p * (len(addresses) + 1))(*addresses)


def _check_memory(signature: Signature, shapes: Sequence[Shape], arena: int = 0) -> None:
    """Refuses what is larger than the memory that is left: the system may grant it, and then kill the process."""
    sizes = [math.prod(s) * t.dtype.itemsize for s, t in zip(shapes, signature.outputs, strict=True)]
    total = sum(sizes) + arena
    if total <= memory_bytes() // _ASKED or total <= available_bytes():
        return
    largest = signature.outputs[sizes.index(max(sizes))]
    more = f", and what is computed on the way {arena} more" if arena else ""
    raise LimitError(
        f"the outputs would have {sum(sizes)} bytes, {max(sizes)} of them in {signature.shown(largest)}{more}; "
        f"{available_bytes()} bytes of memory are left"
    )


def _poisoned(shape: Shape, dtype: np.dtype[Any]) -> Array:
    """An array full of NaN: tests then see an element that was not written."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8).fill(0xFF)
    return array


def layout_digest(manifest: Mapping[str, Any], weights: int) -> str:
    """Of all sizes that decide where a program reads and writes: of arrays, intermediates and weights (in bytes), and
    what a call checks of them.
    """
    arrays = [[row[1:3] for row in manifest[side]] for side in ("inputs", "outputs")]
    checks = [[row[:-1] for row in manifest[kind]] for kind in ("equal", "natural")]
    return digest("layout", arrays, checks, manifest["symbols"], manifest["arena"], weights)


def _check_layout(program: ctypes.CDLL, manifest: Mapping[str, Any], weights: int) -> None:
    """Refuses a manifest of other sizes than the program is compiled for: it would leave its memory."""
    function = getattr(program, LAYOUT, None)
    if function is None:  # of a program that no manifest was made for
        return
    function.restype = ctypes.c_char_p
    if function() != layout_digest(manifest, weights).encode():
        raise PackageError("the manifest is damaged: its sizes are not those that the program was compiled for")


def _read_arena(manifest: Mapping[str, Any]) -> Arena | None:
    try:
        plan = manifest["arena"]
        return None if plan is None else Arena(plan["sizes"], plan["which"], plan["first"], plan["last"])
    except (KeyError, TypeError, ValueError) as error:
        raise PackageError(f"the manifest is damaged: {error!r}", cause=error) from error
