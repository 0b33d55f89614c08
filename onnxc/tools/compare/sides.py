"""The sides of a comparison: whatever gives outputs for inputs, and perhaps the tensors on the way.

side = make_side("onnxruntime:all", source)    # also onnxc, onnx, float64, other.onnx, saved.npz, a torch module
outputs = side.run(given)
stream = side.stream(given, order)             # None where a side shows its outputs alone
stream.get(["h1", "h2"])                       # tensors, asked for in the order of the model's nodes
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from onnxc.compiler.api import compile as compile_model
from onnxc.compiler.options import CompileOptions
from onnxc.errors import InputError, OnnxcError, UnsupportedError
from onnxc.ir.dtypes import BY_NAME
from onnxc.runtime.compiled_model import CompiledModel
from onnxc.runtime.mapped import forget
from onnxc.tools.compare.engines import (
    Engine,
    Float64,
    Onnxc,
    OnnxReference,
    OnnxRuntime,
    Runner,
    called,
    described,
    load_piece,
    torch_runner,
)
from onnxc.tools.compare.peer import peer
from onnxc.tools.compare.pieces import SourceModel
from onnxc.tools.compare.tapped import TappedProgram
from onnxc.tools.inputs import as_declared, read_tensors

Array = np.ndarray[Any, Any]
Arrays = dict[str, Any]
Tell = Callable[[str], None]
BATCH_BYTES = 1 << 28  # of tensors that a compiled model shows in one run
PIECE_BYTES = 1 << 26  # of weights in one piece of a model that is run piece by piece
WHOLE_BYTES = 1 << 30  # of weights of a model that is loaded whole


class Stream:
    """Tensors of one run. `names` says which there are, and how each is seen (see TensorComparison.tap)."""

    names: Mapping[str, str]
    types: Mapping[str, np.dtype[Any]] = {}  # the model's own, where values come in wider ones
    halves: np.dtype[Any] | None = None  # what the side rounds to between any two nodes, whatever types it shows

    def get(self, names: Sequence[str]) -> Arrays:
        """Tensors, in the order of the model's nodes; each is asked for once."""
        raise NotImplementedError


class Side:
    """A model and an engine that runs it.

    Attributes:
        name: in words.
        model: as it was given.
        source: the same as nodes and tensors; None for saved outputs and PyTorch modules.
        casts: of inputs that have another float type on the other side, the coarser type and this side's own.
    """

    casts: Mapping[str, tuple[np.dtype[Any], np.dtype[Any]]] = {}

    def __init__(self, source: SourceModel, engine: Engine) -> None:
        self.model, self.engine = source.model, engine
        self.name = engine.name
        self.source: SourceModel | None = source
        self._runner: Runner | None = None

    def prepare(self, role: str) -> None:
        """Says what the side is in the comparison, and begins what can be done meanwhile."""
        if isinstance(self.engine, OnnxRuntime):
            self.engine.subject = f"{described(self.model)}, {role}"
            peer().start()

    @property
    def output_names(self) -> list[str]:
        """The names of what `run` gives, in the model's order."""
        assert self.source is not None
        return self.source.outputs

    def fed(self, given: Mapping[str, Any]) -> Arrays:
        """Inputs in this side's types, with values that both sides can have."""
        cast = {n: np.asarray(given[n]).astype(coarse).astype(own) for n, (coarse, own) in self.casts.items()}
        return {**given, **cast}

    def run(self, given: Arrays) -> list[Any]:
        """The model's outputs. Raises OnnxcError."""
        if self._by_pieces:
            assert self.source is not None
            found = PieceStream(self.source, self.engine, given).get(self.source.outputs)
            return [found[name] for name in self.source.outputs]
        if self._runner is None:
            self._runner = self.engine.load(self.model)
        return self._runner(given)

    @property
    def _by_pieces(self) -> bool:
        """Whether the model is too large to be loaded whole by an engine that packs weights again. It runs node by
        node, so that parts give what the whole does.
        """
        source = self.source
        if source is None or not isinstance(self.engine, OnnxRuntime) or not self.runs_by_node:
            return False
        large = source.total_bytes > WHOLE_BYTES and source.data_dir is not None
        return large and all(n in source.made and n not in source.fixed for n in source.outputs)

    @property
    def runs_by_node(self) -> bool:
        """Whether parts of the model give what the whole does: then its outputs can be taken from a stream."""
        plain = isinstance(self.engine, OnnxRuntime) and self.engine.level == "disabled"
        return self.source is not None and (plain or isinstance(self.engine, (OnnxReference, Float64)))

    def stream(self, given: Arrays, order: Sequence[str]) -> Stream | None:
        """The tensors on the way; `order` are those that may be asked for. None where there are none to be had."""
        assert self.source is not None
        return PieceStream(self.source, self.engine, given)

    def rest(self) -> None:
        """Lets memory go that the next run can have again at little cost."""

    def close(self) -> None:
        """Lets the memory of a loaded model go."""
        self._runner = None


class OnnxcSide(Side):
    """A model, compiled. Tensors inside come from taps; where there can be none, from pieces compiled alone."""

    def __init__(
        self, source: SourceModel, options: CompileOptions, compiled: Any = None, tell: Tell | None = None
    ) -> None:
        super().__init__(source, Onnxc(options, progress=(lambda stage: tell(f"{stage} done")) if tell else None))
        self.first, self.note = options, ""  # of the first compile; what it measures is known to the others
        self.options = replace(options, mode="default", tune_seconds=None)
        self.random = bool(getattr(compiled, "random", False))
        self._own, self._is_given = compiled, compiled is not None
        if compiled is not None:
            self._runner = called(compiled)
        self._program: TappedProgram | None = None

    @property
    def is_compiled(self) -> bool:
        """Whether what runs is what `options` say, and no stand-in."""
        return self._own is None or isinstance(self._own, CompiledModel)

    def run(self, given: Arrays) -> list[Any]:
        if self._runner is None:
            assert isinstance(self.engine, Onnxc)
            self._own = compile_model(self.model, **self.first.keywords(), progress=self.engine.progress)
            self.random = bool(getattr(self._own, "random", False))
            self._runner = called(self._own)
        return self._runner(given)

    def tapped(self) -> TappedProgram:
        """The program with taps. Raises UnsupportedError where there is none."""
        if self._program is None:
            plain = None if self._is_given else self._own  # what is given may be compiled from something else
            self._program = TappedProgram(self.model, self.options, plain=plain)
        return self._program

    def stream(self, given: Arrays, order: Sequence[str]) -> Stream | None:
        found = self._stream(given, order)
        if self.options.dtype is not None:
            found.halves = BY_NAME[self.options.dtype].numpy
        return found

    def _stream(self, given: Arrays, order: Sequence[str]) -> Stream:
        assert self.source is not None
        try:
            return TapStream(self.tapped(), given, order, self.source.outputs)
        except UnsupportedError as error:
            self.note = f"{error.message}: parts of the model are compiled one by one, which changes the fusion"
            return PieceStream(self.source, Onnxc(replace(self.options, input_shapes={}, base_dir=None)), given)

    def rest(self) -> None:
        if self.source is not None and self.source.total_bytes > WHOLE_BYTES:
            forget([getattr(self._own, "weights", None)])  # they are mapped

    def close(self) -> None:
        if self._runner is not None and self._own is not None:
            self.rest()  # given by the caller, or cheap to keep
            return
        super().close()


class OptimizedSide(Side):
    """onnxruntime with optimizations. Tensors are those that are left of the optimized graph, which is what runs."""

    def stream(self, given: Arrays, order: Sequence[str]) -> Stream | None:
        assert isinstance(self.engine, OnnxRuntime)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "optimized.onnx")
            self.engine.optimize(self.model, path)
            optimized = SourceModel(path)
            for name in optimized.weights:  # before the folder goes
                tensor = optimized.weights[name]
                if tensor.data_location:
                    optimized.weights[name] = optimized._tensor(name)
        return PieceStream(optimized, OnnxRuntime("disabled", self.engine.threads, self.engine.subject), given)


class SavedSide(Side):
    """Outputs, and perhaps other tensors, that were saved: by name."""

    runs_by_node = False

    def __init__(self, name: str, arrays: Mapping[str, Any], model: SourceModel) -> None:
        types = model.declared_types
        self.name, self.source = name, None
        self.arrays = {n: _native(as_declared(a, types.get(n))) for n, a in arrays.items()}
        self._outputs = model.outputs
        missing = [n for n in self._outputs if n not in arrays]
        if missing:
            raise InputError(
                f"{name} lacks the outputs {', '.join(map(repr, missing))}; it has {', '.join(arrays) or 'nothing'}"
            )

    @property
    def output_names(self) -> list[str]:
        return self._outputs

    def run(self, given: Arrays) -> list[Any]:
        return [self.arrays[n] for n in self._outputs]

    def stream(self, given: Arrays, order: Sequence[str]) -> Stream | None:
        return SavedStream(self.arrays)

    def prepare(self, role: str) -> None:
        pass

    def close(self) -> None:
        pass


class TorchSide(Side):
    """A PyTorch module, called with the model's inputs in their order."""

    runs_by_node = False

    def __init__(self, module: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self.name, self.source = "PyTorch", None
        self._outputs, self._run = list(outputs), torch_runner(module, inputs)

    @property
    def output_names(self) -> list[str]:
        return self._outputs

    def run(self, given: Arrays) -> list[Any]:
        found = self._run(given)
        if len(found) != len(self._outputs):
            raise InputError(f"the module has {len(found)} tensor outputs, and the model {len(self._outputs)}")
        return found

    def stream(self, given: Arrays, order: Sequence[str]) -> Stream | None:
        return None

    def prepare(self, role: str) -> None:
        pass

    def close(self) -> None:
        pass


# ---------------------------------------------------------------- streams


class SavedStream(Stream):
    """Tensors of a file, but for bytes that numpy has stored of a type which it lacks, and the model does not name."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self.arrays = arrays
        raw = [n for n, a in arrays.items() if isinstance(a, np.ndarray) and a.dtype.type is np.void]
        self.names = dict.fromkeys((n for n in arrays if n not in raw), "output")

    def get(self, names: Sequence[str]) -> Arrays:
        return {n: self.arrays[n] for n in names}


class PieceStream(Stream):
    """A model, run piece by piece: only the weights of one piece, and what later pieces read, are in memory."""

    def __init__(self, source: SourceModel, engine: Engine, given: Mapping[str, Any]) -> None:
        self.source, self.engine = source, engine
        self.names = dict.fromkeys(source.tensors(), "output")
        self.live: dict[str, Any] = dict(given)
        self.next = 0
        self.last = {n: k for k, names in enumerate(source.reads) for n in names}
        self.types: dict[str, np.dtype[Any]] = {}  # that the model has, where the engine computes in others

    def get(self, names: Sequence[str]) -> Arrays:
        end = max((self.source.made[n] + 1 for n in names if n in self.source.made), default=0)
        wanted = set(names)
        found = {n: self.live[n] for n in names if n in self.live}
        while self.next < end:
            found |= self._step(self._stop(end), wanted)
        return found

    def _stop(self, end: int) -> int:
        """Where a piece ends that begins at the next node: before its weights become too many."""
        total = 0
        for k in range(self.next, end):
            total += self.source.weight_bytes(k)
            if total > PIECE_BYTES and k > self.next:
                return k
        return end

    def _step(self, end: int, wanted: set[str]) -> Arrays:
        nodes = range(self.next, end)
        made = [o for k in nodes for o in self.source.nodes[k].output if o]
        ends = [o for o in made if o in wanted or self.last.get(o, -1) >= end]
        ends = [o for o in ends if o not in self.source.fixed or self.last.get(o, -1) >= end]
        if ends:
            runner, fed = load_piece(self.engine, self.source, list(nodes), self._feeds(), ends)
            results = runner({n: self.live[n] for n in fed})
            self.live.update(zip(ends, results, strict=True))
            self.types.update(zip(ends, getattr(runner, "dtypes", ()), strict=False))
        found = {n: self.live[n] for n in made if n in wanted and n in self.live}
        self.next = end
        for name in [n for n in self.live if self.last.get(n, -1) < end and n in self.source.made]:
            del self.live[name]
        return found

    def _feeds(self) -> Mapping[str, Any]:
        """What pieces are fed, as far as its types and the contents of small integers go."""
        return {n: _typed(a, self.types[n]) if n in self.types else a for n, a in self.live.items()}


def _native(value: Any) -> Any:
    """An array in this machine's order of bytes; all else as it is."""
    if not isinstance(value, np.ndarray) or value.dtype.isnative:
        return value
    return value.astype(value.dtype.newbyteorder("="))


def _typed(value: Any, dtype: np.dtype[Any]) -> Any:
    """An array of this type and the value's shape, where the value has another type."""
    if not isinstance(value, np.ndarray) or value.dtype == dtype:
        return value
    return np.broadcast_to(np.zeros((), dtype), value.shape)


class TapStream(Stream):
    """A compiled model with taps: as many at once as fit in `BATCH_BYTES`."""

    def __init__(self, program: TappedProgram, given: Arrays, order: Sequence[str], outputs: Sequence[str]) -> None:
        self.program, self.given = program, given
        self.outputs = list(outputs)
        self.names = {**program.names, **dict.fromkeys(outputs, "output")}
        self.types = program.types
        self.order = [n for n in order if n in program.names and n not in self.outputs]
        self.held: Arrays = {}
        self.results: list[Array] | None = None
        self.batches = 0

    def get(self, names: Sequence[str]) -> Arrays:
        found: Arrays = {}
        for name in names:
            if name not in self.held:
                if name in self.outputs and self.results is not None:
                    found[name] = self.results[self.outputs.index(name)]
                    continue
                self._run_batch(name)
            if name in self.outputs:
                assert self.results is not None
                found[name] = self.results[self.outputs.index(name)]
            else:
                found[name] = self.held.pop(name)
        return found

    def _run_batch(self, first: str) -> None:
        """Runs with taps for a tensor and those that follow."""
        start = self.order.index(first) if first in self.order else len(self.order)
        total, batch = 0, list[str]()
        for name in self.order[start:]:
            total += self.program.nbytes(name, self.given)
            if batch and total > BATCH_BYTES:
                break
            batch.append(name)
        self.held.clear()
        self.results, self.held = self.program.run(self.given, batch)
        self.batches += 1


# ---------------------------------------------------------------- by name


def make_side(
    spec: Any, source: SourceModel, options: CompileOptions, *, compiled: Any = None, tell: Tell | None = None
) -> Side:
    """A side from its description.

    - ``onnxc``, or a `CompileOptions`: the model of `source`, compiled (with `options`).
    - ``onnxruntime``, ``onnxruntime:basic``, ``:extended``, ``:all``; ``onnx``; ``float64``: that model in these.
    - ``other.onnx`` (or its bytes, or a ModelProto): another model in onnxruntime; ``other.onnx@float64``: in another
      engine of those above.
    - ``outputs.npz``, or a folder with ``output_0.pb``, ...: saved outputs. Also a dict of arrays by name.
    - a `torch.nn.Module`.

    Raises InputError for anything else.
    """
    if isinstance(spec, CompileOptions):
        return OnnxcSide(source, spec, tell=tell)
    if isinstance(spec, Side):
        return spec
    if isinstance(spec, bytes) or hasattr(spec, "SerializeToString"):
        return Side(SourceModel(spec), OnnxRuntime())
    if isinstance(spec, Mapping):
        return SavedSide("saved outputs", spec, source)
    if _is_module(spec):
        return TorchSide(spec, source.inputs, source.outputs)
    if isinstance(spec, (str, os.PathLike)):
        return _named_side(os.fspath(spec), source, options, compiled, tell)
    raise InputError(f"{type(spec).__name__} is no side of a comparison")


def _named_side(spec: str, source: SourceModel, options: CompileOptions, compiled: Any, tell: Tell | None) -> Side:
    if not spec:
        raise InputError("a side of a comparison has a name; none was given")
    if spec == "onnxc":
        return OnnxcSide(source, options, compiled, tell)
    name, _, level = spec.partition(":")
    if name == "onnxruntime":
        engine = OnnxRuntime(level or "disabled", options.threads)
        return Side(source, engine) if engine.level == "disabled" else OptimizedSide(source, engine)
    if spec in ("onnx", "float64"):
        return Side(source, OnnxReference() if spec == "onnx" else Float64(options.folder))
    path, at, engine_name = spec.rpartition("@")
    if at and not Path(spec).exists():
        side = make_side(engine_name, SourceModel(path), replace(options, base_dir=None), tell=tell)
        side.name = f"{Path(path).name} in {side.name}"
        return side
    place = Path(spec)
    if place.is_dir() or place.suffix == ".npz":
        return SavedSide(spec, read_tensors(place, source.outputs, "output"), source)
    if place.suffix in (".onnx", ".pb", ".ort") or place.is_file():
        if not place.is_file():
            raise InputError(f"there is no file {spec!r}")
        side = Side(SourceModel(spec), OnnxRuntime(threads=options.threads))
        side.name = f"{place.name} in {side.name}"
        return side
    raise InputError(
        f"no reference {spec!r}; there are onnxc, onnxruntime (onnxruntime:basic, :extended, :all), onnx, float64, "
        "an ONNX file (FILE.onnx, FILE.onnx@float64), saved outputs (FILE.npz, a folder of output_0.pb, ...)"
    )


def _is_module(spec: Any) -> bool:
    return any(c.__module__.startswith("torch.nn") and c.__name__ == "Module" for c in type(spec).__mro__)


__all__ = ["OnnxcError", "OnnxcSide", "PieceStream", "Side", "Stream", "TapStream", "make_side"]
