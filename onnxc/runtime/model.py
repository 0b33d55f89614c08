"""A compiled model: what ``onnxc.compile`` and ``onnxc.load`` return.

    outputs = model(ids, mask)                  # by position, or by name: model(ids=ids, mask=mask)
    logits, cache = outputs                     # outputs["logits"], outputs[0]
    model.run(["logits"], {"input_ids": ids})   # onnxruntime's own call
    model.save("model.onnxc")                   # one file, which onnxc.load opens without a compiler

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from onnxc.errors import CpuError, InputError, LimitError, OnnxcError, PackageError
from onnxc.runtime.cache import Buffer, Cache
from onnxc.runtime.cpu import available_cpus, check_supported, machine, memory_bytes
from onnxc.runtime.library import CallError, NativeModel, Runtime, call_exception, load_runtime
from onnxc.runtime.outputs import OutputPool, has_large
from onnxc.runtime.package import load_library, open_package, write_package
from onnxc.runtime.signature import MOST_BYTES, Array, Shape, Signature, Tensor
from onnxc.runtime.sizes import Size, evaluate

if TYPE_CHECKING:
    from onnxc.report import Report

SCHEMA = 2  # of the manifest
PROGRAM, RUNTIME, SOURCE, WEIGHTS = "program.so", "runtime.so", "source.cpp", "weights"
_ALIGN = 64  # OX_ALIGN
_UNFIT = -1  # what ox_call_arrays returns where a call must go the slow way
_MOST_SITES = 512
_MOST_THREADS = 256  # OX_MAX_THREADS


class Outputs:
    """The outputs of a call: by name as in a dict, by position as in a tuple.

    >>> out = Outputs(("y", "z"), (1, 2))
    >>> out["z"], out[0], list(out), dict(out)
    (2, 1, [1, 2], {'y': 1, 'z': 2})
    """

    __slots__ = ("_arrays", "_names")

    def __init__(self, names: tuple[str, ...], arrays: tuple[Any, ...]) -> None:
        self._names, self._arrays = names, arrays

    @overload
    def __getitem__(self, key: str | int) -> Any: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, str):
            try:
                return self._arrays[self._names.index(key)]
            except ValueError:
                raise KeyError(f"no output {key!r}; the outputs are {list(self._names)}") from None
        return self._arrays[key]

    def __iter__(self) -> Iterator[Any]:
        """The arrays, so that ``a, b = model(x)`` works. (The names are in ``keys()``.)"""
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def keys(self) -> tuple[str, ...]:
        """The names, in the model's order."""
        return self._names

    def values(self) -> tuple[Any, ...]:
        """The arrays, in the model's order."""
        return self._arrays

    def items(self) -> list[tuple[str, Any]]:
        """(name, array), in the model's order."""
        return list(zip(self._names, self._arrays, strict=True))

    def get(self, name: str, default: Any = None) -> Any:
        """The array of that name, or the default."""
        return self[name] if name in self._names else default

    def __repr__(self) -> str:
        shown = (
            f"{n!r}: {a.dtype}{list(a.shape)}" if hasattr(a, "shape") else f"{n!r}: {a!r}" for n, a in self.items()
        )
        return f"Outputs({', '.join(shown)})"


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


class _Site:
    """All that a call needs to know for inputs of one set of shapes: made once, used by every such call."""

    __slots__ = ("address", "dims", "keep", "large", "outputs")

    def __init__(
        self,
        native: NativeModel,
        signature: Signature,
        shapes: Sequence[Shape],
        outputs: Sequence[Shape],
        dims: Sequence[int],
    ) -> None:
        self.outputs = [(s, t.dtype.numpy) for s, t in zip(outputs, signature.outputs, strict=True)]
        self.large = has_large(self.outputs)
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


class CompiledModel:
    """A compiled model. Call it with numpy arrays, from any number of threads.

    Args:
        manifest: what the compiler wrote down of the model.
        sections: its parts, by name: machine code, weights, generated source.
        threads: the most threads of a call; default: the CPUs that this process may use.
        cache: where the runtime of this process may be found.

    Attributes:
        manifest: names, shapes, kernels, memory plan, times of the stages.
    """

    def __init__(
        self,
        manifest: Mapping[str, Any],
        sections: Mapping[str, Buffer],
        *,
        threads: int | None = None,
        cache: Cache | None = None,
    ) -> None:
        self.manifest = manifest
        self._sections = sections
        self.threads = available_cpus() if threads is None else threads
        program = _read_program(manifest)
        self._signature, self._arena = program
        poison = os.environ.get("ONNXC_POISON") == "1"
        self._empty: Callable[..., Array] = _poisoned if poison else np.empty
        self._pool = OutputPool(poison)
        self._runtime = load_runtime(cache, sections.get(RUNTIME))
        self._memory_limit = int(manifest.get("memory_limit") or 0) or memory_bytes()
        self._weights = np.frombuffer(sections[WEIGHTS], np.uint8)
        self._native = NativeModel(
            self._runtime,
            load_library(sections[PROGRAM], PROGRAM),
            str(manifest["entry"]),
            [self._weights.ctypes.data],
            limit=self._memory_limit,
            poison=poison,
        )
        self._call_arrays = self._runtime.library.ox_call_arrays
        self._names, self._inputs = self._signature.output_names, self._signature.input_names
        self._quick = _readable(self._runtime)
        self._sites: dict[tuple[Shape, ...], _Site] = {}
        # A model without dynamic dims has this one only.
        self._fixed = None if self._signature.symbols else self._new_site(self._fixed_shapes())

    # ------------------------------------------------------------ calls

    def __call__(self, *args: Any, **kwargs: Any) -> Outputs:
        """Run the model.

        Args:
            args: inputs in the model's order; arrays, or what numpy makes an array of.
            kwargs: inputs by name.

        Returns:
            The outputs, by name and by position. The arrays are new, and the caller's own.

        Raises:
            InputError: an input has a wrong name, dtype, rank or size.
            RunError: the program failed, on an index out of bounds for instance.
            LimitError: it needs more memory than there is, or than it may use.
        """
        if kwargs:
            args = self._named(kwargs) if not args else self._signature.bind(args, kwargs)
        return Outputs(self._names, self._run(args))

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: object = None
    ) -> list[Array]:
        """Run the model as ``onnxruntime.InferenceSession.run`` does.

        Args:
            output_names: which outputs to return, in this order; None or empty: all.
            input_feed: the inputs by name.
            run_options: ignored.
        """
        found = self._run(self._named(input_feed))
        if not output_names:
            return list(found)
        unknown = [name for name in output_names if name not in self._names]
        if unknown:
            raise InputError(f"the model has no output {', '.join(map(repr, unknown))}; it has {list(self._names)}")
        return [found[self._names.index(name)] for name in output_names]

    def _named(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        """Inputs that are all given by name, in the model's order."""
        if len(given) == len(self._inputs):
            try:
                return tuple([given[name] for name in self._inputs])
            except KeyError:
                pass  # bind says what is wrong
        return self._signature.bind((), given)

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
        empty = self._empty
        try:
            if site.large:
                outputs = self._pool.arrays(site.outputs)
            else:
                outputs = tuple([empty(shape, dtype) for shape, dtype in site.outputs])
        except MemoryError as error:
            raise LimitError("no memory for the outputs", cause=error) from error
        code = self._call_arrays(site.address, self._threads, args, outputs)
        if code == 0:
            return outputs
        if code == _UNFIT:
            return self._run_any(args)
        failure = CallError()
        self._runtime.library.ox_last_error(ctypes.byref(failure))
        raise self._failure(failure)

    def _run_any(self, args: tuple[Any, ...]) -> tuple[Array, ...]:
        """The slow way: every input is checked and converted."""
        site, buffers, outputs, _ = self._prepared(args)
        failure = self._native.call(self._threads, buffers, site.dims)
        if failure is not None:
            raise self._failure(failure)
        return outputs

    def _prepared(self, args: tuple[Any, ...]) -> tuple[_Site, Any, tuple[Array, ...], tuple[Array, ...]]:
        """For a call of the program: site, addresses of buffers, new outputs, and the inputs, to be kept until then."""
        inputs = self._signature.arrays(self._signature.bind(args, {}))
        shapes = tuple(x.shape for x in inputs)
        site = self._sites.get(shapes)
        if site is None:
            site = self._new_site(shapes)
            self._remember(shapes, site)
        try:
            outputs = self._pool.arrays(site.outputs)
        except (MemoryError, ValueError) as error:
            raise LimitError("no memory for the outputs", cause=error) from error
        addresses = [x.ctypes.data for x in (*inputs, *outputs)]
        return site, (ctypes.c_void_p * (len(addresses) + 1))(*addresses), outputs, inputs

    def _remember(self, shapes: tuple[Shape, ...], site: _Site) -> None:
        # No lock, which a fork could leave locked: each step is atomic, and what is lost is made again.
        while len(self._sites) >= _MOST_SITES:
            try:
                self._sites.pop(next(iter(self._sites)), None)
            except (RuntimeError, StopIteration):  # another thread was quicker
                break
        self._sites[shapes] = site

    def _fixed_shapes(self) -> tuple[Shape, ...]:
        return tuple(tuple(evaluate(s, {}) for s in t.sizes) for t in self._signature.inputs)

    def _new_site(self, shapes: Sequence[Shape]) -> _Site:
        signature = self._signature
        values = signature.solve(shapes)
        signature.check(values)
        dims = [values[s] for s in signature.symbols]
        if self._arena is not None:
            dims += self._arena.layout(values, self._runtime)
        outputs = signature.output_shapes(values)
        _check_memory(signature, outputs)
        return _Site(self._native, signature, shapes, outputs, dims)

    def _failure(self, error: CallError) -> OnnxcError:
        kernels = self.manifest.get("kernels", ())
        node = None
        if 0 <= error.node < len(kernels):
            node = _suspects(kernels[error.node].get("origins", ()), error.code)
        return call_exception(error, node)

    # ------------------------------------------------------------ facts

    @property
    def threads(self) -> int:
        """The most threads that a call uses, its own among them. Can be set at any time."""
        return self._threads

    @threads.setter
    def threads(self, count: int) -> None:
        if type(count) is not int or not 1 <= count <= _MOST_THREADS:
            raise InputError(f"threads is a number from 1 to {_MOST_THREADS}, not {count!r}")
        self._threads = count

    def get_inputs(self) -> list[Tensor]:
        """The inputs, each with ``name``, ``type`` and ``shape``, as onnxruntime has them."""
        return list(self._signature.inputs)

    def get_outputs(self) -> list[Tensor]:
        """The outputs, each with ``name``, ``type`` and ``shape``, as onnxruntime has them."""
        return list(self._signature.outputs)

    @property
    def source(self) -> str:
        """The generated C++."""
        return bytes(self._sections[SOURCE]).decode()

    def explain(self) -> Report:
        """Which kernels the model became, from which nodes and why, with memory and times."""
        from onnxc.report import Report

        return Report.from_manifest({**self.manifest, "threads": self._threads})

    def profile(self, inputs: Mapping[str, Any] | Sequence[Any], *, runs: int = 30, warm_up: int = 3) -> Report:
        """Run the model with a clock around every kernel: which take the time, and how near are they to the machine's
        limits?

        Args:
            inputs: by name, or in the model's order.
            runs: that are measured. The best of them and the median are reported.
            warm_up: runs before them.

        Returns:
            As :meth:`explain`, with ``profile`` (see :class:`onnxc.roofline.Profile`); sizes are those of the inputs.

        Raises:
            InputError, RunError, LimitError: as a call.
        """
        from onnxc.roofline import Profile, best_and_median
        from onnxc.runtime.peaks import machine_peaks

        if runs < 1:
            raise InputError(f"runs is at least 1, not {runs!r}")
        args = self._named(inputs) if isinstance(inputs, Mapping) else tuple(inputs)
        site, buffers, _outputs, kept = self._prepared(args)
        values = dict(zip(self._signature.symbols, site.dims, strict=False))
        report = self.explain().at(lambda given: evaluate(given, values))
        times = [self._times(site, buffers, len(report.kernels)) for _ in range(warm_up + runs)][warm_up:]
        del kept
        each = [best_and_median(column) for column in zip(*times, strict=True)]
        total = best_and_median([sum(row) for row in times])
        names = self.manifest["dim_names"]
        kernels = tuple(k.timed(*pair) for k, pair in zip(report.kernels, each, strict=True))
        profile = Profile(
            machine_peaks(self._threads, int(self.manifest.get("lanes") or 0) or None),
            runs,
            *total,
            tuple(k.times for k in kernels if k.times),
            {names.get(s) or s: n for s, n in values.items()},
        )
        return replace(report, kernels=kernels, profile=profile)

    def _times(self, site: _Site, buffers: Any, kernels: int) -> list[int]:
        """Nanoseconds of each kernel in one run."""
        times = _longs([0] * kernels)
        failure = self._native.profile(self._threads, buffers, site.dims, times)
        if failure is not None:
            raise self._failure(failure)
        return list(times)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to one file, which :func:`load` opens without a compiler.

        Raises:
            PackageError: the file cannot be written.
        """
        write_package(path, self.manifest, self._sections)

    def trim(self) -> None:
        """Give the memory that the model holds between calls back to the system."""
        self._native.trim()
        self._pool.clear()

    def __repr__(self) -> str:
        inputs, outputs = (", ".join(map(str, side)) for side in (self._signature.inputs, self._signature.outputs))
        return f"<CompiledModel {self.manifest.get('name') or ''}({inputs}) -> ({outputs})>"

    def __reduce__(self) -> Any:
        raise TypeError("a compiled model cannot be pickled; save it, and load it where it is wanted")


def _check_memory(signature: Signature, shapes: Sequence[Shape]) -> None:
    """Refuses outputs larger than the machine's memory: the system may grant them, and then kill the process."""
    sizes = [math.prod(s) * t.dtype.itemsize for s, t in zip(shapes, signature.outputs, strict=True)]
    if sum(sizes) > memory_bytes():
        largest = signature.outputs[sizes.index(max(sizes))]
        raise LimitError(
            f"the outputs would have {sum(sizes)} bytes, {max(sizes)} of them in {largest.name!r}; "
            f"there are {memory_bytes()} bytes of memory"
        )


def _poisoned(shape: Shape, dtype: np.dtype[Any]) -> Array:
    """An array full of NaN: tests then see an element that was not written."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8).fill(0xFF)
    return array


_BLAMED = {3: ("Gather", "Scatter", "OneHot", "Embed", "Slice"), 4: ("Div", "Mod")}  # op types by ox_code


def _suspects(origins: Sequence[Sequence[Any]], code: int) -> str | None:
    """The nodes of a failed kernel that can have failed so, as ``n3 Gather 'embed'``."""
    likely = [o for o in origins if any(part in o[1] for part in _BLAMED.get(code, ()))] or list(origins)
    return " or ".join(f"n{o[0]} {o[1]}" + (f" {o[2]!r}" if len(o) > 2 and o[2] else "") for o in likely[:4]) or None


def _read_program(manifest: Mapping[str, Any]) -> tuple[Signature, Arena | None]:
    if manifest.get("schema") != SCHEMA:
        raise PackageError(f"the model was saved by another version of onnxc ({manifest.get('onnxc', 'unknown')})")
    try:
        signature = Signature(
            [Tensor.from_json(row) for row in manifest["inputs"]],
            [Tensor.from_json(row) for row in manifest["outputs"]],
            manifest["symbols"],
            manifest["dim_names"],
            [(a, b, str(node)) for a, b, node in manifest["equal"]],
            [(size, str(node)) for size, node in manifest["natural"]],
        )
        plan = manifest["arena"]
        arena = None if plan is None else Arena(plan["sizes"], plan["which"], plan["first"], plan["last"])
    except (KeyError, TypeError, ValueError) as error:
        raise PackageError(f"the manifest is damaged: {error!r}", cause=error) from error
    if signature.unsolved:
        raise PackageError(f"no input gives the dims {', '.join(signature.unsolved)}")
    return signature, arena


def load(path: str | os.PathLike[str], *, threads: int | None = None) -> CompiledModel:
    """Load a model that :meth:`CompiledModel.save` wrote. No compiler is needed.

    The file holds machine code: load only what you trust. Its weights are mapped, so processes that load one
    file share them; replace the file rather than write into it.

    Args:
        path: the file.
        threads: the most threads of a call; default: the CPUs that this process may use.

    Raises:
        PackageError: the file is not there, is damaged, or is of another version.
        CpuError: this machine lacks CPU features that the model was compiled for; it names them.
    """
    package = open_package(path)
    manifest = package.manifest
    target = manifest.get("requires") or {}
    if target.get("machine") != machine():
        raise CpuError(f"{os.fspath(path)!r} was compiled for {target.get('machine')}, and this machine is {machine()}")
    check_supported(target.get("features", ()), repr(os.fspath(path)))
    return CompiledModel(manifest, {n: package.section(n) for n in package.names if n != "manifest"}, threads=threads)
