"""What every compiled model has, whatever it runs on: the class that ``onnxc.compile`` and ``onnxc.load`` return.

    outputs = model(ids, mask)                  # by position, or by name: model(ids=ids, mask=mask)
    logits, cache = outputs                     # outputs["logits"], outputs[0]
    model.run(["logits"], {"input_ids": ids})   # onnxruntime's own call
    model.save("model.onnxc")                   # one file, which onnxc.load opens without a compiler

`onnxc.runtime.model` has the models of the CPU, `onnxc.runtime.cuda` those of a GPU; `onnxc.runtime.opening` says which
one a manifest is for.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from onnxc.errors import InputError, ModelError, OnnxcError, PackageError, ShapeError, SizesError, shortened
from onnxc.report import Report
from onnxc.roofline import Peaks, Profile, best_and_median
from onnxc.runtime.binding import name_list
from onnxc.runtime.blocks import arrays_of
from onnxc.runtime.cache import Buffer, Cache
from onnxc.runtime.library import CallError, call_exception
from onnxc.runtime.package import write_package
from onnxc.runtime.random_state import Draws
from onnxc.runtime.signature import Signature, Tensor
from onnxc.runtime.sizes import evaluate

if TYPE_CHECKING:
    from onnxc.passes.record import PassLog

SCHEMA = 4  # of the manifest
WEIGHTS, SOURCE = "weights", "source."  # sections: the weights, and how the names of generated sources begin
DEFAULTS, FIXED = "defaults", "fixed"  # of the manifest (and a section): of inputs; initializers that are no inputs
CPU, CUDA, STAGED = "cpu", "cuda", "staged"  # targets; the last is several programs for one of the others


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
                raise KeyError(shortened(f"no output {key!r}; the outputs are {list(self._names)}")) from None
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


class CompiledModel:
    """A compiled model, as `onnxc.compile` and `onnxc.load` make it. Call it with arrays, from any number of threads.

    Args:
        manifest: what the compiler wrote down of the model.
        sections: its parts, by name: machine code, weights, generated source.
        threads: for the CPU: the most threads of a call; default: the CPUs that this process may use.
        cache: for the CPU: where the runtime of this process may be found.
        device: for a GPU: its number.

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
        device: int = 0,
    ) -> None:
        self.manifest = manifest
        self._sections = sections
        self._signature = read_signature(manifest, sections)
        self._draws = Draws() if manifest.get("random_state") else None
        self._given = self._signature if self._draws is None else self._signature.without_last()
        self._names, self._inputs = self._signature.output_names, self._given.input_names

    _variants: Variants | None = None
    record: Callable[..., PassLog | None] | None = None
    """Runs the passes again, on a model or its file where that is known, and tells what each does. For reports."""
    entry = ""
    """The key of the cache's entry that is mapped; empty where there is none."""

    # ------------------------------------------------------------ calls

    def __call__(self, /, *args: Any, **kwargs: Any) -> Outputs:
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
            args = self._named(kwargs) if not args else self._given.bind(args, kwargs)
        return Outputs(self._names, self._answer(self._with_state(args)))

    def answers(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """A call without names: the outputs in order, for inputs in order; errors as those of a call."""
        return self._answer(self._with_state(args))

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: object = None
    ) -> list[Any]:
        """Run the model as ``onnxruntime.InferenceSession.run`` does.

        Args:
            output_names: which outputs to return, in this order; None or empty: all.
            input_feed: the inputs by name.
            run_options: ignored.
        """
        names: tuple[str, ...] = ()
        if output_names is not None:
            names = name_list(output_names, "output_names")
        found = self._answer(self._with_state(self._named(input_feed)))
        if not names or names == self._names:
            return list(found)
        unknown = [name for name in names if name not in self._names]
        if unknown:
            raise InputError(f"the model has no output {', '.join(map(repr, unknown))}; it has {list(self._names)}")
        return [found[self._names.index(name)] for name in names]

    def _named(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        """Inputs that are all given by name, in the model's order."""
        if type(given) is not dict and not isinstance(given, Mapping):
            raise InputError(f"inputs are given as a dict by name, not as a {type(given).__name__}")
        if len(given) == len(self._inputs):
            try:
                return tuple([given[name] for name in self._inputs])
            except KeyError:
                pass  # bind says what is wrong
        return self._given.bind((), given)

    def _with_state(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """All inputs of the program: those that were given, and what random operators draw from."""
        if self._draws is None:
            return args
        return (*self._given.bind(args, {}), self._draws.next())

    @property
    def random(self) -> bool:
        """Whether the model has random operators, so that its calls differ."""
        return self._draws is not None

    def seed(self, seed: int | None = None, *, calls: int = 0) -> None:
        """Sets what the model's random operators draw from. (One without such operators is as it was.)

        Calls draw one after the other from a sequence that follows from the seed, operators that have a seed of their
        own from one that follows from that: the same seed, the same calls, the same numbers, in any number of threads
        and on any target.

        Args:
            seed: from 0 to 2^64 - 1; None: one that is unlike any other, as a model has at first.
            calls: how many calls of the sequence count as made already.

        Raises:
            InputError: a number out of range.
        """
        draws = Draws(seed, calls)
        if self._draws is not None:
            self._draws = draws

    def _answer(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The outputs; where dims of size 1 are to be broadcast that were open at compile time, a variant's."""
        try:
            return self._run(args)
        except SizesError as error:
            return self._varied(args, error, lambda variant: variant._run(args))

    def _varied(self, args: Sequence[Any], error: SizesError, run: Run) -> tuple[Any, ...]:
        """What a variant gives for these inputs; the error where none is for them."""
        args = self._signature.bind(args, {})  # with its defaults
        found = None if self._variants is None else self._variants.answer(self, args, error, run)
        if found is None:
            raise error
        return found

    def vary(self, compile: Vary) -> None:
        """Says how the model is compiled with some dims as numbers (`input_shapes`); and whether with care for sizes
        that only a run tells (`careful` of `onnxc.passes.decompose.decompose`).
        """
        self._variants = Variants(compile)

    def _run(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The outputs for inputs in the model's order."""
        raise NotImplementedError

    def attach(self, device: int | None = None) -> None:
        """Brings the model to where it runs, which the first call does otherwise: its GPU, or that of this number."""

    # ------------------------------------------------------------ facts

    def get_inputs(self) -> list[Tensor]:
        """The inputs, each with ``name``, ``type`` and ``shape``, as onnxruntime has them."""
        return list(self._given.inputs)

    def get_outputs(self) -> list[Tensor]:
        """The outputs, each with ``name``, ``type`` and ``shape``, as onnxruntime has them."""
        return list(self._signature.outputs)

    @property
    def source(self) -> str:
        """The generated source of the kernels."""
        texts = (data for name, data in self._sections.items() if name.startswith(SOURCE))
        return "\n".join(bytes(text).decode() for text in texts)

    def explain(self) -> Report:
        """Which kernels the model became, from which nodes and why, with memory and times."""
        return replace(Report.from_manifest(self.manifest), record=self.record)

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
        raise NotImplementedError

    def _to_profile(self, inputs: Any, runs: Any, warm_up: Any) -> tuple[Any, ...]:
        """The inputs of a profile, in the model's order."""
        if not isinstance(runs, Integral) or runs < 1:
            raise InputError(f"runs is at least 1, not {runs!r}")
        if not isinstance(warm_up, Integral) or warm_up < 0:
            raise InputError(f"warm_up is a number of runs, not {warm_up!r}")
        if not isinstance(inputs, Iterable) or (isinstance(inputs, np.ndarray) and not inputs.ndim):
            raise InputError(f"inputs are given by name or in order, not as a {type(inputs).__name__}")
        return self._with_state(self._named(inputs) if isinstance(inputs, Mapping) else tuple(inputs))

    def _profiled(self, values: Mapping[str, int], times: Sequence[Sequence[int]], peaks: Peaks) -> Report:
        """The report of a profile: nanoseconds of each kernel in each run, with these values of the dynamic dims."""
        report = self.explain().at(lambda given: evaluate(given, values))
        each = [best_and_median(column) for column in zip(*times, strict=True)]
        total = best_and_median([sum(row) for row in times])
        kernels = tuple(k.timed(*pair) for k, pair in zip(report.kernels, each, strict=True))
        names = self.manifest["dim_names"]
        dims = {names.get(s) or s: n for s, n in values.items()}
        profile = Profile(
            peaks, len(times), *total, tuple(k.times for k in kernels if k.times), dims, tuple(map(tuple, times))
        )
        return replace(report, kernels=kernels, profile=profile)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to one file, which :func:`onnxc.load` opens without a compiler.

        The same model, compiled with the same options for the same machine, is the same bytes.

        Raises:
            PackageError: the file cannot be written.
        """
        write_package(path, _without_times(self.manifest), self._sections)

    def trim(self) -> None:
        """Give the memory that the model holds between calls back to the system."""
        raise NotImplementedError

    def __repr__(self) -> str:
        inputs, outputs = (", ".join(map(str, side)) for side in (self._given.inputs, self._signature.outputs))
        return shortened(f"<{type(self).__name__} {self.manifest.get('name') or ''}({inputs}) -> ({outputs})>")

    def __reduce__(self) -> Any:
        raise TypeError("a compiled model cannot be pickled; save it, and load it where it is wanted")

    def _failure(self, error: CallError) -> OnnxcError:
        return failure(self.manifest, error)


Vary = Callable[[Mapping[str, Sequence[int | None]], bool], "CompiledModel"]
Run = Callable[["CompiledModel"], tuple[Any, ...]]
Place = tuple[str, int, int]  # an input, one of its axes, and how long that is

MOST_KEPT = 64  # programs that are kept of those compiled when a model ran
MANY = 16  # after so many the user is told


class Variants:
    """A model compiled again for dims that are 1: a program takes two open dims that meet to be equal, and where one
    of them is 1, it is broadcast by a program of its own.
    """

    def __init__(self, compile: Vary) -> None:
        self._compile = compile
        self._made: dict[Any, CompiledModel] = {}
        self._count = 0

    def answer(
        self, model: CompiledModel, args: Sequence[Any], error: SizesError, run: Run, careful: bool = False
    ) -> tuple[Any, ...] | None:
        """What a variant gives: first that for the dims that are 1, then, while sizes still meet that are computed,
        for the dims that make them. None where that does not help, or there is no such dim (nor care to be taken).
        """
        open_dims = _open_dims(model.get_inputs(), args)
        fixed = {place for place, _ in open_dims if place[2] == 1}
        if not fixed and not careful:
            fixed = _makers(open_dims, error)
        while fixed or careful:
            try:
                variant = self._variant(frozenset(fixed), model.get_inputs(), careful)
                return run(variant)
            except (ShapeError, ModelError):
                return None
            except SizesError as again:
                more = _makers(_open_dims(variant.get_inputs(), args), again)
                if more <= fixed:
                    return None
                fixed |= more
        return None

    def _variant(self, fixed: frozenset[Place], inputs: Sequence[Any], careful: bool) -> CompiledModel:
        key = careful, fixed
        found = self._made.get(key)
        if found is None:
            while len(self._made) >= MOST_KEPT:
                self._made.pop(next(iter(self._made)), None)
            sizes = {(name, axis): n for name, axis, n in fixed}
            names = {name for name, _, _ in fixed}
            shapes = {t.name: [sizes.get((t.name, k)) for k in range(len(t.sizes))] for t in inputs if t.name in names}
            found = self._made[key] = self._compile(shapes, careful)
            self._count += 1
            if self._count == MANY:
                warnings.warn(
                    f"the model was compiled {MANY} times, anew for dims that are 1 or make a size of 1: slow",
                    stacklevel=2,
                )
        return found


def _open_dims(inputs: Sequence[Any], args: Sequence[Any]) -> list[tuple[Place, Any]]:
    """Where the inputs have open dims, and what their sizes are for the program."""
    tensors = [(t, np.shape(x)) for t, x in zip(inputs, args, strict=False) if isinstance(t, Tensor)]
    return [
        ((t.name, axis, n), size)
        for t, shape in tensors
        for axis, (n, size) in enumerate(zip(shape, t.sizes, strict=True))
        if not isinstance(size, int)
    ]


def _makers(open_dims: Sequence[tuple[Place, Any]], error: SizesError) -> set[Place]:
    """The dims of which the size is computed that an error is about."""
    return {place for place, size in open_dims if isinstance(size, str) and size in error.symbols}


# ---------------------------------------------------------------- what a manifest says


def _without_times(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest that tells nothing of the compile that made it: how long its stages took."""
    kept = {key: value for key, value in manifest.items() if key != "stages"}
    return kept | ({"parts": list(map(_without_times, kept["parts"]))} if "parts" in kept else {})


def is_for_gpu(manifest: Mapping[str, Any]) -> bool:
    """Whether a model runs on a GPU, as one program or several."""
    target = manifest.get("target")
    if target == STAGED:
        target = str((manifest.get("options") or {}).get("target")).partition(":")[0]
    return target == CUDA


def read_signature(manifest: Mapping[str, Any], sections: Mapping[str, Buffer]) -> Signature:
    """The inputs with their defaults, outputs and dynamic dims.

    Raises:
        PackageError: the manifest is of another version, or damaged.
    """
    if manifest.get("schema") != SCHEMA:
        raise PackageError(f"the model was saved by another version of onnxc ({manifest.get('onnxc', 'unknown')})")
    try:
        signature = Signature(
            [Tensor.from_json(row) for row in manifest["inputs"]],
            [Tensor.from_json(row) for row in manifest["outputs"]],
            manifest["symbols"],
            dim_names(manifest),
            [(a, b, str(node)) for a, b, node in manifest["equal"]],
            [(size, str(node)) for size, node in manifest["natural"]],
            read_defaults(manifest, sections),
            manifest.get(FIXED, ()),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PackageError(f"the manifest is damaged: {error!r}", cause=error) from error
    if signature.unsolved:
        raise PackageError(f"no input gives the dims {', '.join(signature.unsolved)}")
    return signature


def read_defaults(manifest: Mapping[str, Any], sections: Mapping[str, Buffer]) -> dict[str, Any]:
    """The values of inputs that need not be given, by name. Raises KeyError, TypeError, ValueError for damaged ones."""
    table = manifest.get(DEFAULTS) or {}
    return dict(zip(table, arrays_of(list(table.values()), sections[DEFAULTS]), strict=True)) if table else {}


def dim_names(manifest: Mapping[str, Any]) -> Mapping[str, str]:
    """The model's names of its dynamic dims, by symbol. Raises ValueError where they are none."""
    names: Any = manifest["dim_names"]
    if isinstance(names, Mapping) and all(isinstance(n, str) for n in names.values()):
        return names
    raise ValueError("the names of dims are no names")


def failure(manifest: Mapping[str, Any], error: CallError) -> OnnxcError:
    """The exception for what a run of the program reported, with the nodes that can have failed so."""
    kernels = manifest.get("kernels", ())
    node = None
    if 0 <= error.node < len(kernels):
        node = _suspects(kernels[error.node].get("origins", ()), error.code)
    return call_exception(error, node)


_BLAMED = {3: ("gather", "scatter", "onehot", "embed", "slice", "index"), 4: ("div", "mod")}  # op types by ox_code


def _suspects(origins: Sequence[Sequence[Any]], code: int) -> str | None:
    """The nodes of a failed kernel that can have failed so, as ``n3 Gather 'embed' at net.py:17``."""
    likely = [o for o in origins if any(part in o[1].lower() for part in _BLAMED.get(code, ()))] or list(origins)
    return " or ".join(map(_place, likely[:4])) or None


def _place(origin: Sequence[Any]) -> str:
    number, kind, name, line = (*origin, "", "")[:4]
    return f"n{number} {kind}" + (f" {name!r}" if name else "") + (f" at {line}" if line else "")
