"""Models that are several programs, with steps on the host between them: data decides about sizes or about what runs,
or values are no tensors.

A call walks through a plan (`onnxc.staging.plan`): programs run as they would alone, and what they hand on are
numpy's arrays of exactly the sizes that they have.
"""

from __future__ import annotations

import importlib
import json
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxc.errors import InputError, LimitError, OnnxcError, PackageError, RunError
from onnxc.host.registry import function
from onnxc.ir.dtypes import BY_NAME, from_numpy
from onnxc.ir.expr import Dim, Sym
from onnxc.ir.graph import Graph, Node
from onnxc.ir.text import from_text
from onnxc.ir.types import OptionalType, SequenceType, TensorType, Type
from onnxc.runtime.cache import Buffer, Cache
from onnxc.runtime.cpu import available_cpus, memory_bytes
from onnxc.runtime.face import SCHEMA, CompiledModel, Outputs
from onnxc.runtime.random_state import Draws
from onnxc.runtime.signature import Signature, Tensor
from onnxc.runtime.sizes import evaluate
from onnxc.runtime.staged_clock import Arguments, Clock, current

if TYPE_CHECKING:
    from onnxc.report import Report

Array = np.ndarray[Any, Any]
Values = list[Any]
Sizes = dict[str, int]
Compiler = Callable[[Graph, Mapping[str, Any]], CompiledModel]

MOST_KEPT = 64  # programs that one step keeps of those it has compiled
_MOMENT = 0.05  # seconds: how long programs run loops before the host looks whether it is to stop
_MANY = 16  # programs of one step after which the user is told
_compiler: list[Compiler] = []


def set_compiler(compiler: Compiler) -> None:
    """Says how graphs are compiled that wait for the run (with the options of the model that they are part of)."""
    _compiler[:] = [compiler]


def _compile(graph: Graph, options: Mapping[str, Any]) -> CompiledModel:
    if not _compiler:  # a model that was loaded: the one thing that it needs the compiler for
        importlib.import_module("onnxc.compiler")
    return _compiler[0](graph, options)


class Plain:
    """An input or output that is no tensor of a known rank, as onnxruntime describes one."""

    def __init__(self, name: str, described: Sequence[Any] | None) -> None:
        self.name, self.described = name, described
        self.shape: list[int | str | None] = []

    @property
    def type(self) -> str:
        """As onnxruntime spells it: ``seq(tensor(float))``."""
        return _spelled(self.described)

    def __str__(self) -> str:
        return f"{self.name!r}: {self.type}"


def _spelled(described: Sequence[Any] | None) -> str:
    if described is None:
        return "any"
    kind, *rest = described
    if kind in ("tensor", "nothing", "any"):
        return Tensor("", BY_NAME[rest[0]], (), ()).type
    if kind == "map":
        return f"map({rest[0]},{_spelled(['tensor', rest[1]])})"
    return f"{'seq' if kind == 'sequence' else kind}({_spelled(rest[0])})"


class StagedModel(CompiledModel):
    """A model of several programs. Call it with numpy arrays (and lists of them, and None), from any thread.

    Attributes:
        iteration_limit: the most iterations of a loop that the host runs; more are a LimitError. None: no limit.
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
        if manifest.get("schema") != SCHEMA:
            raise PackageError(f"the model was saved by another version of onnxc ({manifest.get('onnxc', 'unknown')})")
        self.manifest, self._sections = manifest, sections
        self.iteration_limit: int | None = None
        self.seeded: tuple[int | None, int] | None = None
        self.waiting: weakref.WeakSet[CompiledModel] = weakref.WeakSet()  # what was compiled when the model ran
        self._threads = available_cpus() if threads is None else threads
        try:
            self._infos = [[described(*row) for row in manifest[side]] for side in ("inputs", "outputs")]
            self._signature = Signature([t for t in self._infos[0] if isinstance(t, Tensor)], [])
            self._names, self._inputs = (tuple(t.name for t in side) for side in self._infos[::-1])
            self._draws = Draws() if manifest.get("random_state") else None
            if self._draws is not None:  # the last input is the runtime's
                self._inputs = self._inputs[:-1]
            self._parts = [
                CompiledModel(m, _part_sections(sections, k), threads=threads, cache=cache, device=device)
                for k, m in enumerate(manifest["parts"])
            ]
            self._arrays = _arrays(manifest["arrays"], sections)
            self._plan = _Plan(manifest["plan"], self)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise PackageError(f"the manifest is damaged: {error!r}", cause=error) from error

    # ------------------------------------------------------------ calls

    def __call__(self, *args: Any, **kwargs: Any) -> Outputs:
        if kwargs or len(args) != len(self._inputs):
            args = self._bound(args, kwargs)
        return Outputs(self._names, self._answer(self._with_state(args)))

    def _with_state(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args if self._draws is None else (*args, self._draws.next())

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        names = self._inputs
        unknown = [n for n in kwargs if n not in names]
        twice = [n for n in names[: len(args)] if n in kwargs]
        missing = [n for n in names[len(args) :] if n not in kwargs]
        if len(args) > len(names):
            raise InputError(f"{len(args)} inputs were given; the model has {len(names)}: {list(names)}")
        for what, which in (("has no", unknown), ("has more than once the", twice), ("is not given its", missing)):
            if which:
                raise InputError(f"the model {what} input {', '.join(map(repr, which))}; its inputs are {list(names)}")
        return (*args, *(kwargs[n] for n in names[len(args) :]))

    def _named(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        return self._bound((), given)

    def _run(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        values, sizes = self._checked(args)
        taken = {id(x) for x in (*_arrays_in(values), *self._arrays)}
        return tuple(_own(y, taken) for y in self._plan.run(values, sizes))

    def _checked(self, args: Sequence[Any]) -> tuple[Values, Sizes]:
        """The inputs as programs take them, and the dims that their shapes tell."""
        tensors = [k for k, t in enumerate(self._infos[0]) if isinstance(t, Tensor)]
        arrays = self._signature.arrays([args[k] for k in tensors])
        sizes = self._signature.solve([x.shape for x in arrays])
        values = [_as_value(t.described, x, t.name) if isinstance(t, Plain) else x
                  for t, x in zip(self._infos[0], args, strict=True)]  # fmt: skip
        for k, array in zip(tensors, arrays, strict=True):
            values[k] = array
        return values, sizes

    def attach(self, device: int | None = None) -> None:
        for part in self._parts:
            part.attach(device)

    def seed(self, seed: int | None = None, *, calls: int = 0) -> None:
        super().seed(seed, calls=calls)
        self.seeded = (seed, calls)
        for model in self.waiting:
            model.seed(seed, calls=calls)

    # ------------------------------------------------------------ facts

    @property
    def threads(self) -> int:
        """The most threads that a call uses. Can be set at any time."""
        return self._threads

    @threads.setter
    def threads(self, count: int) -> None:
        for part in (*self._parts, *self.waiting):
            part.threads = count  # type: ignore[attr-defined]
        self._threads = count

    def get_inputs(self) -> list[Any]:
        return self._infos[0][: len(self._inputs)]

    def get_outputs(self) -> list[Any]:
        return list(self._infos[1])

    @property
    def source(self) -> str:
        return "\n".join(part.source for part in self._parts)

    def trim(self) -> None:
        for part in self._parts:
            part.trim()

    def profile(self, inputs: Mapping[str, Any] | Sequence[Any], *, runs: int = 30, warm_up: int = 3) -> Report:
        from onnxc.runtime.peaks import machine_peaks

        args = self._to_profile(inputs, runs)
        clocks = [self._clocked(args) for _ in range(warm_up + runs)][warm_up:]
        sizes = defaultdict(int, clocks[-1].sizes)  # 0 where no program ran that knows them
        lanes = next((int(p.get("lanes") or 0) for p in self.manifest["parts"]), 0)
        report = self._profiled(sizes, [c.rows for c in clocks], machine_peaks(self._threads, lanes or None))
        assert report.profile is not None
        ran = [any(times) for times in zip(*(c.rows for c in clocks), strict=True)]
        kernels = tuple(k if r else replace(k, times=None) for k, r in zip(report.kernels, ran, strict=True))
        profile = replace(report.profile, kernels=tuple(k.times for k in kernels if k.times))
        return replace(report, kernels=kernels, profile=profile)

    def arguments(self, inputs: Sequence[Any]) -> dict[int, tuple[Any, ...]]:
        """What each program (by number) was given last in a call with these inputs."""
        found = current.clock = Arguments(self)
        try:
            self._run(self._with_state(tuple(inputs)))
        finally:
            current.clock = None
        numbers = {id(part): k for k, part in enumerate(self._parts)}
        return {numbers[key]: args for key, args in found.given.items()}

    def _clocked(self, args: tuple[Any, ...]) -> Clock:
        """Times of one call."""
        clock = current.clock = Clock(self, len(self.manifest["kernels"]))
        try:
            self._run(args)
        finally:
            current.clock = None
        return clock

    def __repr__(self) -> str:
        inputs, outputs = (", ".join(map(str, side)) for side in (self.get_inputs(), self._infos[1]))
        return f"<{type(self).__name__} {self.manifest.get('name') or ''}({inputs}) -> ({outputs})>"


def described(name: str, type: Sequence[Any] | None, dims: Sequence[Any]) -> Tensor | Plain:
    """An input or output as the manifest has it."""
    if type is not None and type[0] == "tensor":
        return Tensor(name, BY_NAME[type[1]], tuple(type[2]), tuple(dims))
    return Plain(name, type)


def _part_sections(sections: Mapping[str, Buffer], number: int) -> dict[str, Buffer]:
    head = f"p{number}."
    own = {name.removeprefix(head): data for name, data in sections.items() if name.startswith(head)}
    return own | {name: sections[name] for name in ("runtime.so",) if name in sections}


def _arrays(table: Sequence[Any], sections: Mapping[str, Buffer]) -> list[Array]:
    found = []
    for name, shape, offset, length in table:
        data = memoryview(sections["arrays"])[offset : offset + length]
        dtype = BY_NAME[name]
        if dtype.kind == "string":
            array: Array = np.array(json.loads(bytes(data)), object).reshape(shape)
        else:
            array = np.frombuffer(data, dtype.numpy).reshape(shape)
        found.append(array)
    return found


def _as_value(described: Sequence[Any] | None, x: Any, name: str) -> Any:
    """A caller's value as steps take it: arrays, lists, None."""
    if described is None:
        return _native(np.asarray(x))
    kind, *rest = described
    if kind == "sequence":
        if not isinstance(x, (list, tuple)):
            raise InputError(f"input {name!r} expects a list of values; a {type(x).__name__} was given")
        return [_as_value(rest[0], v, name) for v in x]
    if kind == "optional":
        return None if x is None else _as_value(rest[0], x, name)
    if kind == "map":
        return x
    dtype, array = BY_NAME[rest[0]], _native(np.asarray(x))
    rank = len(rest[1]) if kind == "tensor" else array.ndim
    if array.dtype != dtype.numpy or array.ndim != rank:
        of_rank = f" of rank {rank}" if kind == "tensor" else ""
        given = f"{array.dtype}{list(array.shape)}"
        raise InputError(f"input {name!r} expects arrays of {dtype}{of_rank}; {given} was given")
    return array


def _arrays_in(values: Iterable[Any]) -> Iterator[Array]:
    for x in values:
        if isinstance(x, list):
            yield from _arrays_in(x)
        elif isinstance(x, np.ndarray):
            yield x


def _own(y: Any, taken: set[int]) -> Any:
    """An output that shares no memory with an input, a constant or an output before it: these are in `taken`."""
    if isinstance(y, list):
        return [_own(v, taken) for v in y]
    if not isinstance(y, np.ndarray):
        return y
    y = y.copy() if id(y) in taken or not y.flags.writeable else y
    taken.add(id(y))
    return y


def _native(array: Array) -> Array:
    if array.dtype.kind in "US":
        return array.astype(object)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


# ---------------------------------------------------------------- steps


class _Plan:
    """Steps over slots, ready to run."""

    def __init__(self, described: Mapping[str, Any], model: StagedModel) -> None:
        self.model = model
        self.slots = int(described["slots"])
        self.inputs: list[int] = described["inputs"]
        self.outputs: list[int] = described["outputs"]
        self.types: list[Any] = described["types"]
        self.constants = [(slot, model._arrays[k]) for slot, k in described["constants"]]
        self.steps = [_STEPS[s["kind"]](s, model) for s in described["steps"]]

    def run(self, inputs: Sequence[Any], sizes: Sizes) -> Values:
        """The outputs. `sizes` are of the graphs around it, and get those that are learnt here."""
        values: Values = [None] * self.slots
        for slot, array in self.constants:
            values[slot] = array
        for slot, x in zip(self.inputs, inputs, strict=True):
            values[slot] = x
        clock = current.clock
        for step in self.steps:
            if clock is None or clock.model is not self.model:
                step.run(values, sizes)
            else:
                step.timed(values, sizes, clock)
        return [values[k] for k in self.outputs]

    def called(self, inputs: Sequence[Any], around: Sizes) -> Values:
        """As a region: it knows the sizes around it, and those of its inputs."""
        sizes = dict(around)
        for t, x in zip(self.types, inputs, strict=True):
            _learn(t, x, sizes)
        return self.run(inputs, sizes)


def _learn(described: Sequence[Any] | None, value: Any, sizes: Sizes) -> None:
    """Takes note of the sizes of a tensor that are symbols in its type."""
    if described is not None and described[0] == "tensor":
        shape = value.shape
        if len(shape) != len(described[2]):
            raise RunError(f"a tensor of rank {len(described[2])} was expected, of shape {list(shape)} it is")
        for size, found in zip(described[2], shape, strict=True):
            if isinstance(size, str):
                sizes[size] = found


class _Step:
    def __init__(self, described: Mapping[str, Any], model: StagedModel) -> None:
        self.model = model
        self.inputs: list[int | None] = described["in"]
        self.outputs: list[int] = described["out"]
        self.types: list[Any] = described["types"]
        self.dead: list[int] = described["dead"]
        self.kernel: int = described.get("kernel", 0)  # the row of the report
        self.node: str = described.get("node") or ""
        self.attrs = {k: _attribute(v, model) for k, v in described.get("attrs", {}).items()}
        self.regions = [_Plan(r, model) for r in described.get("regions", ())]

    def run(self, values: Values, sizes: Sizes) -> None:
        given = [None if k is None else values[k] for k in self.inputs]
        try:
            found = self.outcome(given, sizes)
        except OnnxcError as error:
            error.node = error.node or self.node or None
            raise
        if len(found) < len(self.outputs):
            raise RunError(f"a step made {len(found)} values, not {len(self.outputs)}", node=self.node)
        for slot, described, value in zip(self.outputs, self.types, found, strict=False):
            _learn(described, value, sizes)
            values[slot] = value
        for slot in self.dead:
            values[slot] = None

    def timed(self, values: Values, sizes: Sizes, clock: Clock) -> None:
        """`run`, with a clock."""
        clock.host(self.kernel, lambda: self.run(values, sizes))

    def outcome(self, given: Values, sizes: Sizes) -> Sequence[Any]:
        raise NotImplementedError


def _attribute(value: Any, model: StagedModel) -> Any:
    if isinstance(value, dict):
        return model._arrays[value["array"]]
    return tuple(value) if isinstance(value, list) else value


class _Part(_Step):
    """A program."""

    def __init__(self, described: Mapping[str, Any], model: StagedModel) -> None:
        super().__init__(described, model)
        number = described["part"]
        self.part = model._parts[number]
        self.call = self.part._run
        self.kernel = model.manifest["first_kernels"][number]
        self.told: list[str] = described["sizes"]

    def run(self, values: Values, sizes: Sizes) -> None:
        self._keep(self.call(self._arguments(values, sizes)), values)

    def timed(self, values: Values, sizes: Sizes, clock: Clock) -> None:
        self._keep(clock.part(self.kernel, self.part, self._arguments(values, sizes)), values)

    def _arguments(self, values: Values, sizes: Sizes) -> tuple[Any, ...]:
        args = [values[k] for k in self.inputs]  # type: ignore[index]
        for name in self.told:
            args.append(np.empty((sizes[name], 0), np.uint8))
        return tuple(args)

    def _keep(self, found: Sequence[Any], values: Values) -> None:
        for slot, value in zip(self.outputs, found, strict=True):
            values[slot] = value
        for slot in self.dead:
            values[slot] = None


class _Read(_Step):
    """Content that becomes sizes."""

    def __init__(self, described: Mapping[str, Any], model: StagedModel) -> None:
        super().__init__(described, model)
        self.symbols: list[str] = described["symbols"]

    def outcome(self, given: Values, sizes: Sizes) -> Sequence[Any]:
        (array,) = given
        numbers = array.ravel().tolist()
        if min(numbers, default=0) < 0:
            raise RunError(f"{self.attrs['what']}: the data of a tensor does not fit (it gives {numbers})")
        sizes.update(zip(self.symbols, numbers, strict=True))
        return (array,)


class _Host(_Step):
    """A function of `onnxc.host`."""

    def __init__(self, described: Mapping[str, Any], model: StagedModel) -> None:
        super().__init__(described, model)
        self.function = function(described["function"])

    def outcome(self, given: Values, sizes: Sizes) -> Sequence[Any]:
        try:
            found = self.function(*given, **self.attrs)
        except (OnnxcError, MemoryError):
            raise
        except Exception as error:
            raise RunError(f"a step on the host failed: {type(error).__name__}: {error}", cause=error) from error
        return found if isinstance(found, tuple) else (found,)


class _If(_Step):
    def outcome(self, given: Values, sizes: Sizes) -> Sequence[Any]:
        condition, *taken = given
        split = self.attrs["split"]
        if _flag(condition, "the condition of If"):
            return self.regions[0].called(taken[:split], sizes)
        return self.regions[1].called(taken[split:], sizes)


def _flag(x: Array, what: str) -> bool:
    if x.size != 1:
        raise RunError(f"{what} has {x.size} elements, and must have one")
    return bool(x.reshape(())[()])


class _Loop(_Step):
    def __init__(self, described: Mapping[str, Any], model: StagedModel) -> None:
        super().__init__(described, model)
        self.chunk: str | None = described.get("chunk")

    def outcome(self, given: Values, sizes: Sizes) -> Sequence[Any]:
        trip, condition, *rest = given
        most = None if trip is None else int(trip)
        go = condition is None or _flag(condition, "the condition of Loop")
        carried, taken = rest[: self.attrs["carried"]], rest[self.attrs["carried"] :]
        if self.chunk is not None:
            return self._in_chunks(most, go, carried, taken, sizes)
        results: list[Values] = [[] for _ in range(self.attrs["scans"])]
        body, limit, count, room = self.regions[0], self.model.iteration_limit, 0, memory_bytes()
        while go and (most is None or count < most):
            if limit is not None and count >= limit:
                raise LimitError(f"a loop runs for more than {limit} iterations (model.iteration_limit)")
            number = np.asarray(count, np.int64)
            flag, *found = body.called([number, np.asarray(True), *carried, *taken], sizes)
            go = _flag(flag, "the condition of Loop")
            carried = found[: len(carried)]
            for collected, x in zip(results, found[len(carried) :], strict=True):
                collected.append(x)
                room -= x.nbytes
            if room < 0:
                raise LimitError(f"what a loop collects does not fit into memory after {count + 1} iterations")
            count += 1
        return [*carried, *(_stacked(r, t, sizes) for r, t in zip(results, self.types[len(carried) :], strict=True))]

    def _in_chunks(self, most: int | None, go: bool, carried: Values, taken: Values, sizes: Sizes) -> Values:
        """A program runs many iterations at once; from one to the next takes no more than a moment."""
        assert self.chunk is not None
        count, chunk, limit, sizes = 0, 1, self.model.iteration_limit, dict(sizes)
        ends = [n for n in (most, limit) if n is not None]
        while go and (most is None or count < most):
            if limit is not None and count >= limit:
                raise LimitError(f"a loop runs for more than {limit} iterations (model.iteration_limit)")
            sizes[self.chunk] = min([chunk, *(n - count for n in ends)])
            begun = time.perf_counter()
            number = np.asarray(count, np.int64)
            flag, *found = self.regions[0].called([number, np.asarray(True), *carried, *taken], sizes)
            go, carried, count = _flag(flag, "the condition of Loop"), found[: len(carried)], int(found[-1])
            taken_seconds = time.perf_counter() - begun
            chunk = min(2 * chunk, 1 << 30) if taken_seconds < _MOMENT else max(1, chunk // 2)
        return carried


def _stacked(collected: Values, described: Sequence[Any] | None, sizes: Sizes) -> Array:
    """Results of all iterations, along a new first axis."""
    if collected:
        try:
            return np.stack(collected)
        except ValueError as error:
            shapes = {tuple(x.shape) for x in collected}
            raise RunError(f"a loop collects values of different shapes: {sorted(shapes)}", cause=error) from error
    if described is None:
        raise RunError("a loop that never ran collects values of unknown type")
    rest = [evaluate(d, sizes) if _is_known(d, sizes) else 0 for d in described[2][1:]]
    return np.empty((0, *rest), BY_NAME[described[1]].numpy)


def _is_known(size: Any, sizes: Sizes) -> bool:
    try:
        evaluate(size, sizes)
        return True
    except KeyError:
        return False


class _Later(_Step):
    """ONNX nodes that are compiled for the types (and some contents) that came."""

    def __init__(self, described: Mapping[str, Any], model: StagedModel) -> None:
        super().__init__(described, model)
        self.text: str = described["text"]
        self.held = {name: model._arrays[k] for name, k in described["held"].items()}
        self.models: dict[Any, CompiledModel] = {}
        self.made = 0

    def outcome(self, given: Values, sizes: Sizes) -> Sequence[Any]:
        fixed: tuple[int, ...] = self.attrs["fixed"]
        contents = {k: given[k] for k in fixed if isinstance(given[k], np.ndarray)}
        types = typed([None if k in contents else x for k, x in enumerate(given)])
        key = (repr(types), tuple((k, x.dtype.str, x.shape, x.tobytes()) for k, x in contents.items()))
        model = self.models.get(key)
        if model is None:
            model = self._compiled(types, contents, given)
            self._keep(key, model)
        return model._run(model._with_state(tuple(x for k, x in enumerate(given) if k not in contents)))

    def _keep(self, key: Any, model: CompiledModel) -> None:
        while len(self.models) >= MOST_KEPT:
            self.models.pop(next(iter(self.models)), None)
        self.models[key] = model
        self.model.waiting.add(model)
        if self.model.seeded is not None:
            model.seed(self.model.seeded[0], calls=self.model.seeded[1])
        self.made += 1
        if self.made == _MANY:
            names = ", ".join(self.node.split(" or ")[:3])
            warnings.warn(
                f"{names} was compiled {_MANY} times, anew for each content or rank of what it reads: slow",
                stacklevel=2,
            )

    def _compiled(self, types: Sequence[Type | None], contents: Mapping[int, Array], given: Values) -> CompiledModel:
        options = {**self.model.manifest["options"], "threads": self.model.threads}
        try:
            return _compile(self._graph(types, contents), options)
        except OnnxcError:  # an op may want sizes as numbers
            fixed = [_exact(t, x) for t, x in zip(types, given, strict=True)]
            if list(types) == fixed:
                raise
            return _compile(self._graph(fixed, contents), options)

    def _graph(self, types: Sequence[Type | None], contents: Mapping[int, Array]) -> Graph:
        graph = from_text(self.text, self.held)
        inputs, constants = [], []
        for k, (v, t) in enumerate(zip(graph.inputs, types, strict=True)):
            if k in contents:
                v.type = TensorType(from_numpy(contents[k].dtype), contents[k].shape)
                constants.append(Node("constant", (), [v], {"value": contents[k]}))
            else:
                v.type, v.name = t, f"in{k}"
                inputs.append(v)
        graph.inputs, graph.nodes = inputs, [*constants, *graph.nodes]
        return graph


def typed(values: Sequence[Any]) -> list[Type | None]:
    """The types of values: dims of one size share a symbol; 0 and 1 stay numbers."""
    known: dict[int, Dim] = {0: 0, 1: 1}

    def dim(n: int) -> Dim:
        if n not in known:
            known[n] = Sym(f"s{len(known) - 2}", 2)
        return known[n]

    return [_type_of(x, dim) for x in values]


def _type_of(x: Any, dim: Callable[[int], Dim]) -> Type | None:
    if isinstance(x, np.ndarray):
        return TensorType(from_numpy(x.dtype), tuple(map(dim, x.shape)))
    if isinstance(x, list):
        kinds = {repr(t): t for t in (_type_of(v, dim) for v in x)}
        return SequenceType(next(iter(kinds.values())) if len(kinds) == 1 else None)
    return OptionalType(None)


def _exact(t: Type | None, x: Any) -> Type | None:
    return t.with_shape(x.shape) if isinstance(t, TensorType) else t


_STEPS: dict[str, type[_Step]] = {
    "part": _Part, "read": _Read, "host": _Host, "if": _If, "loop": _Loop, "later": _Later,
}  # fmt: skip
