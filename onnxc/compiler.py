"""From a model to a compiled one: the stages of a compile, and the cache that saves them.

    model = compile("model.onnx")                 # onnxc.compile
    graph = onnx_file.load("model.onnx")          # or stage by stage:
    program = generate(graph, level(), FusionOptions(), Stages())
    library = build(program, level())

A compiled model is a *manifest* (names, shapes, memory plan, what the report tells) and *sections* (machine
code, weights, source). The cache keeps both in the same one file that ``model.save`` writes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import onnxc.codegen.cpp as cpp
from onnxc.autodiff.operator import expand_gradients
from onnxc.autotune import Decided, Method, Tuner
from onnxc.choices import Decisions
from onnxc.codegen.cpp.choices import KernelOptions
from onnxc.codegen.cpp.program import VERSION, Program, ProgramWriter
from onnxc.codegen.triton.options import MOST_DEPTH
from onnxc.errors import CacheError, InputError, InternalError, OnnxcError, PackageError
from onnxc.fingerprint import Fingerprint, code_digest, fingerprint, fingerprint_graph, mentions
from onnxc.frontends import onnx_file
from onnxc.frontends.onnx_file import InputShapes, Model
from onnxc.ir.graph import Graph, copied
from onnxc.ir.types import TensorType
from onnxc.manifest import arena_of, manifest_of
from onnxc.ops.registry import users_names
from onnxc.passes.decompose import decompose
from onnxc.passes.pipeline import PassOptions, passes
from onnxc.passes.random_state import lift_random_state
from onnxc.passes.record import PassLog, record_import, record_passes
from onnxc.passes.simplify import eliminate_dead
from onnxc.planner.groups import FusionOptions
from onnxc.planner.partition import planned
from onnxc.primitives.host import is_host
from onnxc.primitives.verify import verify
from onnxc.random_inputs import Arrays, random_inputs
from onnxc.runtime.cache import Buffer, Cache, digest
from onnxc.runtime.cpu import Level, available_cpus, has_byte_products, level
from onnxc.runtime.library import ABI, NATIVE, Runtime, load_runtime
from onnxc.runtime.model import PROGRAM, RUNTIME, SCHEMA, SOURCE, WEIGHTS, CompiledModel
from onnxc.runtime.package import MANIFEST, open_package, write_package
from onnxc.runtime.staged import StagedModel
from onnxc.runtime.staged_later import set_compiler
from onnxc.runtime.toolchain import Source, compile_library, find_compiler
from onnxc.staged import assembled
from onnxc.staging.cut import cut
from onnxc.tuned import Record, cpu_place

if TYPE_CHECKING:
    from onnxc import gpu
    from onnxc.codegen.triton.program import Program as GpuProgram

INCLUDE = Path(cpp.__file__).parent / "include"
Progress = Callable[[str], None]
MODES = ("default", "max-autotune")
_LARGE = 64 << 20  # bytes of weights from which a compile tidies up after itself
# The CPU's clock and caches wander, so all of its variants take turns; a GPU's do not, and its memory may be full.
_CPU_METHOD = Method(batch=8, together=8, rounds=5, runs=3, median=False, tolerance=1e-2)
_GPU_METHOD = Method(batch=4 * available_cpus(), together=1, rounds=2, runs=15, median=True, tolerance=3e-2)


@dataclass
class Stages:
    """Seconds that each stage of a compile took. `progress` is told the name of each stage that has ended."""

    seconds: dict[str, float] = field(default_factory=dict)
    progress: Progress | None = None
    _last: float = field(default_factory=time.perf_counter)

    def done(self, name: str) -> None:
        """Ends a stage: the time since the stage before."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now
        if self.progress is not None:
            self.progress(name)


# ---------------------------------------------------------------- the stages


def prepared(graph: Graph, options: PassOptions, stages: Stages) -> Graph:
    """Through the passes: from an imported graph to one that the planner takes.

    ``ONNXC_VERIFY=1`` verifies the graph after each.
    """
    checked = os.environ.get("ONNXC_VERIFY") == "1"
    for name, run in passes(options):
        with _no_surprises(f"the pass {name!r}"):
            graph = run(graph)
        if checked:
            verify(graph, name)
        stages.done(name)
    return graph


@contextlib.contextmanager
def _no_surprises(what: str) -> Iterator[None]:
    """The last line of defence: what no rule has foreseen of a model is an InternalError, not a KeyError."""
    try:
        yield
    except OnnxcError:
        raise
    except Exception as error:
        raise InternalError(f"{what} failed: {type(error).__name__}: {error}", cause=error) from error


def generate(
    graph: Graph,
    cpu: Level,
    options: FusionOptions,
    stages: Stages,
    pass_options: PassOptions | None = None,
    kernels: KernelOptions | None = None,
) -> Program:
    """From an imported graph to generated source."""
    graph = prepared(graph, pass_options or PassOptions(), stages)
    return _program(graph, cpu, options, kernels or KernelOptions(), stages)


def _program(graph: Graph, cpu: Level, options: FusionOptions, kernels: KernelOptions, stages: Stages) -> Program:
    with _no_surprises("planning"):
        fused = planned(graph, options)
    stages.done("plan")
    with _no_surprises("code generation"):
        kernels = replace(kernels, vnni=has_byte_products(cpu))
        program = ProgramWriter(fused, cpu.vector_length, kernels).write()
    stages.done("generate")
    return program


def build(program: Program, cpu: Level, cache: Cache | None = None) -> bytes:
    """Compiles the source to a shared library."""
    return compile_library(
        [Source(f"part{k}.cpp", text) for k, text in enumerate(program.sources)],
        include=[INCLUDE, NATIVE],
        flags=[*cpu.flags],
        link_flags=["-Wl,-z,defs"] if program.units else [],
        bare=not program.units,  # the code of users may need the C++ library
        compiler=find_compiler(cache),
    )


def weights_block(program: Program | GpuProgram) -> np.ndarray[Any, Any]:
    """The program's weights as one aligned block of bytes."""
    block = np.zeros(program.weights.nbytes + 4096, np.uint8)
    start = -block.ctypes.data % 4096
    block = block[start : start + program.weights.nbytes]
    program.weights.fill(block)
    return block


# ---------------------------------------------------------------- the face


Measured = Mapping[int, Decisions]
"""What was measured, by architecture; 0 is the CPU."""


@dataclass(frozen=True)
class Measuring:
    """What is to be measured before a compile.

    Attributes:
        seconds: after so many no further candidates are begun; None for no end.
        again: whether to measure what the record has already.
        inputs, dims, seed: what the model is run with; random inputs for None.
    """

    seconds: float | None = None
    again: bool = False
    inputs: Arrays | None = None
    dims: Mapping[str, int] | None = None
    seed: int = 0


@dataclass(frozen=True)
class _Request:
    """What a compile is to make, apart from the model itself: all of it is part of the cache key."""

    cpu: Level
    fusion: FusionOptions
    passes: PassOptions
    kernels: KernelOptions
    input_shapes: InputShapes
    keep_inputs: tuple[str, ...]
    memory_limit: int
    gpu: gpu.GpuTarget | None = None
    measured: Measured = field(default_factory=dict)
    careful: bool = False  # as of `decompose`

    def key(self, model: Fingerprint, cache: Cache) -> str:
        """The cache key, without what was measured."""
        shapes = {name: list(shape) for name, shape in self.input_shapes.items()}
        options = [
            shapes,
            sorted(self.keep_inputs),
            self.memory_limit,
            self.careful,
            asdict(self.fusion),
            asdict(self.passes),
            asdict(self.kernels),
        ]
        target = [
            self.cpu.name,
            self.cpu.machine,
            self.cpu.flags,
            self.cpu.vector_length,
            sorted(self.cpu.features),
        ]
        if self.gpu is not None:
            return digest("gpu", model.digest, options, self.gpu.identity(), [code_digest(), SCHEMA])
        tools = [find_compiler(cache).identity, code_digest(), VERSION, SCHEMA, ABI]
        return digest("model", model.digest, options, target, tools)

    def decided(self, key: str, subjects: Mapping[str, Sequence[str]]) -> str:
        """The cache key with that part of what was measured that decides anything in the model."""
        found = {n: {s: d.best[s] for s in subjects if s in d.best} for n, d in self.measured.items()}
        return digest("decided", key, found)


def compile(
    model: Model | Graph,
    *,
    target: str = "cpu",
    cpu: str = "native",
    threads: int | None = None,
    cache: bool | str | os.PathLike[str] | Cache = True,
    base_dir: str | os.PathLike[str] | None = None,
    input_shapes: InputShapes | None = None,
    keep_inputs: Sequence[str] = (),
    fusion: bool | FusionOptions = True,
    attention: bool = True,
    integer: bool = True,
    accuracy: str = "default",
    mode: str = "default",
    tune_seconds: float | None = None,
    tuned: bool | Mapping[str, str] = True,
    record: str | os.PathLike[str] | None = None,
    precision: str = "float32",
    dtype: str | None = None,
    device: int = 0,
    fold_bytes: int = PassOptions.fold_bytes,
    memory_limit: int | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
) -> CompiledModel:
    """Compile a model.

    Args:
        model: a path, the bytes of a file, a ModelProto, or a graph, as imported or of primitives.
        target: ``cpu``; ``cuda``, for this machine's GPU; or ``cuda:sm_90``, on any machine, for a GPU of that
            architecture (several: ``cuda:sm_80,sm_90``).
        cpu: what to compile for: ``native``, or a level such as ``x86-64-v3`` that several machines share.
        threads: the most threads of a call; default: the CPUs that this process may use.
        cache: whether to look in the cache first and to keep the result there; or another cache's directory.
        base_dir: the folder of external data, for bytes and ModelProto.
        input_shapes: sizes for dynamic dims, as ``{"x": (1, 3, 224, 224)}``; None leaves a dim as it is.
        keep_inputs: inputs that stay inputs although the model has a default for them.
        fusion: False for one kernel a node (to measure, and to find faults); or which kinds to use.
        attention: whether to find attention and run it as one kernel.
        integer: whether to multiply quantized tensors as integers, so that DequantizeLinear, MatMul (or Conv, Gemm)
            and QuantizeLinear are one exact integer product; False adds up floats as the model has it.
        accuracy: ``strict`` rules out algorithms that round more coarsely than a plain sum (Winograd's, for 3x3
            convolutions); ``default`` takes them where they are faster.
        mode: ``max-autotune`` measures the kernels between which the compile can choose, on this machine, where the
            record lacks them (:func:`onnxc.tune` shows the times); ``default`` measures nothing.
        tune_seconds: after so many ``max-autotune`` begins no further candidates, and takes what it has found.
        tuned: whether to choose between kernels as was measured on this machine's kind, where it was, and by a cost
            model elsewhere; or those decisions themselves, by subject. False: by the cost model alone.
        record: the file that keeps measurements, in place of ``tuning.json`` in the cache's directory.
        precision: how a GPU multiplies float32 matrices: ``float32``, as it says; ``tf32``, on matrix units, with 10
            bits of each factor; or ``tf32x3``, on matrix units, in three products that keep nearly all bits.
        dtype: ``float16`` or ``bfloat16`` converts a float32 model: matrices and what is stored between kernels become
            halves, but for what needs float32's range or digits (``explain()`` lists it). Inputs and outputs stay
            float32. Default: the model's own dtypes.
        device: the number of the GPU that ``cuda`` means and that the model is for. Other than 0: it is brought there.
        fold_bytes: the most bytes that constant folding may add to the weights.
        memory_limit: the most bytes of memory for one call's intermediates; above it the call fails.
            Default: what the machine has.
        seed: what random operators draw from, as :meth:`CompiledModel.seed` takes it: by default another in each model.
            It is no part of a saved model.
        progress: is called with the name of each stage that has ended.

    Raises:
        ModelError: the model is not valid; UnsupportedError: it asks for what onnxc cannot do.
        InputError: an option is wrong.
        ToolchainError: there is no C++ compiler.

    >>> import onnx.parser
    >>> head = '<ir_version: 8, opset_import: ["" : 18]>'
    >>> model = onnx.parser.parse_model(head + "g (float[N] x) => (float[N] y) { y = Add(x, x) }")
    >>> compile(model)(np.ones(3, np.float32))["y"]
    array([2., 2., 2.], dtype=float32)
    """
    if mode not in MODES:
        raise InputError(f"mode is {' or '.join(map(repr, MODES))}, not {mode!r}")
    target = _for_device(target, device, mode)
    kept = _open_cache(cache)
    own = Record.of(kept, record)
    request = _request(
        target, precision, cpu, dtype, fusion, attention, integer, fold_bytes, accuracy, input_shapes or {},
        tuple(keep_inputs), memory_limit or 0,
    )  # fmt: skip
    options = {
        "target": target, "cpu": cpu, "fusion": fusion if isinstance(fusion, bool) else asdict(fusion),
        "attention": attention, "integer": integer, "accuracy": accuracy, "precision": precision, "dtype": dtype,
        "fold_bytes": fold_bytes, "memory_limit": memory_limit,
    }  # fmt: skip
    job = _Job(request, kept, Stages(progress=progress), threads, own, tuned, options=options)
    if mode != "default":
        if tuned is not True:
            raise InputError(f"mode={mode!r} takes what it measures, and tuned={tuned!r} says otherwise")
        job.tuning = Measuring(tune_seconds)
        job.check_tuning()
    found = job.compiled(model, base_dir)
    if device:
        found.attach(device)
    if seed is not None:
        found.seed(seed)
    known = os.fspath(model) if isinstance(model, (str, os.PathLike)) else ""  # what is in memory is not kept for this
    found.record = functools.partial(_recorded, request, known, _modified(known), base_dir)
    if symbols_meet(found.manifest) and not isinstance(model, Graph):

        def again(ones: Mapping[str, Sequence[int | None]], careful: bool) -> CompiledModel:
            variant = replace(request, input_shapes=_with_ones(input_shapes or {}, ones), careful=careful)
            made = _Job(variant, kept, Stages(), threads, own, tuned, options=options).compiled(model, base_dir)
            if device:
                made.attach(device)
            return made

        found.vary(again)
    return found


def _recorded(
    request: _Request, path: str, modified: int, base_dir: str | os.PathLike[str] | None, model: Model | None = None
) -> PassLog | None:
    """What each pass does to the graph of a model, or of the file; None where that is no longer what was compiled."""
    if model is None and (not path or _modified(path) != modified):
        return None
    graph = _import(path if model is None else model, base_dir, request, Stages())
    lowered = _lowered(graph)
    return record_import(graph, lowered) if is_staged(lowered) else record_passes(graph, request.passes)


def _modified(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns if path else 0
    except OSError:
        return -1


def symbols_meet(manifest: Mapping[str, Any]) -> bool:
    """Whether a program takes open dims for granted to be equal."""
    return bool(manifest.get("equal")) or any(part["equal"] for part in manifest.get("parts", ()))


def _with_ones(given: InputShapes, ones: Mapping[str, Sequence[int | None]]) -> InputShapes:
    """Shapes that were asked for, and dims that are 1."""
    merged = {name: tuple(shape) for name, shape in given.items()}
    for name, shape in ones.items():
        before = merged.get(name, (None,) * len(shape))
        merged[name] = tuple(b if a is None else a for a, b in zip(shape, before, strict=True))
    return merged


def _for_device(target: str, device: int, mode: str) -> str:
    """The target, where ``cuda`` means another GPU than the first."""
    if not device:
        return target
    if target == "cpu" or mode != "default":
        raise InputError(f"device={device!r} is for target='cuda' and mode='default' (GPU 0 is measured)")
    from onnxc.runtime.cuda.driver import device as find_device

    return f"cuda:{find_device(device).architecture}" if target == "cuda" else target


def measure(
    model: Model | Graph,
    tuning: Measuring,
    *,
    target: str = "cpu",
    cpu: str = "native",
    threads: int | None = None,
    cache: bool | str | os.PathLike[str] | Cache = True,
    accuracy: str = "default",
    input_shapes: InputShapes | None = None,
    precision: str = "float32",
    dtype: str | None = None,
    record: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> tuple[Tuner, Record]:
    """Measures a model's kernels, and adds the times to the record: see :func:`onnxc.tune`."""
    kept = _open_cache(cache)
    request = _request(
        target, precision, cpu, dtype, True, True, True, PassOptions.fold_bytes, accuracy, input_shapes or {}, (), 0
    )
    job = _Job(request, kept, Stages(progress=progress), threads, Record.of(kept, record), True, tuning)
    job.check_tuning()
    assert job.record is not None
    graph = _import(model, None, request, job.stages)
    if is_staged(_lowered(graph)):
        raise InputError("the model is several programs: mode='max-autotune' measures each of them as it is compiled")
    tuner, _ = job.tuned(graph)
    return tuner, job.record


def _request(
    target: str, precision: str, cpu: str, dtype: str | None, fusion: bool | FusionOptions, attention: bool,
    integer: bool, fold_bytes: int, accuracy: str, input_shapes: InputShapes, keep_inputs: tuple[str, ...],
    memory_limit: int,
) -> _Request:  # fmt: skip
    if target == "cpu" and precision != "float32":
        raise InputError(f"precision {precision!r} is for GPUs: target='cuda'")
    on_gpu = None if target == "cpu" else _gpu_target(target, precision)
    if accuracy not in ("default", "strict"):
        raise InputError(f"accuracy is 'default' or 'strict', not {accuracy!r}")
    return _Request(
        level(cpu),
        fusion if isinstance(fusion, FusionOptions) else _all_fusion(fusion),
        pass_options_of(fold_bytes, attention, integer, dtype, on_gpu=on_gpu is not None),
        KernelOptions(winograd=accuracy != "strict"),
        input_shapes,
        keep_inputs,
        memory_limit,
        on_gpu,
    )


def _gpu_target(target: str, precision: str) -> gpu.GpuTarget:
    from onnxc import gpu  # it imports the means to run Triton, which the CPU does not need

    return gpu.parse_target(target, precision)


def pass_options_of(fold_bytes: int, attention: bool, integer: bool, dtype: str | None, *, on_gpu: bool) -> PassOptions:
    """What the passes do for a target."""
    return PassOptions(
        fold_bytes,
        attention and (on_gpu or dtype is None),  # the CPU has a kernel for float32 alone
        integer and not on_gpu,
        weight_only=not on_gpu,
        half_attention=on_gpu,
        attention_depth=MOST_DEPTH if on_gpu else None,
        dtype=dtype,
        merge=on_gpu,
        weight_gradients=not on_gpu,
        widen=not on_gpu,
        positions=not on_gpu,
    )


def _all_fusion(on: bool) -> FusionOptions:
    return FusionOptions() if on else FusionOptions(**dict.fromkeys(asdict(FusionOptions()), False))


def _open_cache(cache: bool | str | os.PathLike[str] | Cache) -> Cache | None:
    if isinstance(cache, Cache):
        return cache
    if not isinstance(cache, bool):
        return Cache(cache)
    try:
        return Cache() if cache else None
    except CacheError as error:  # not asked for by name: do without
        warnings.warn(f"compiling without a cache: {error}", stacklevel=3)
        return None


def _import(model: Model | Graph, base_dir: str | os.PathLike[str] | None, request: _Request, stages: Stages) -> Graph:
    if isinstance(model, Graph):
        return expand_gradients(model)
    graph = onnx_file.load(model, base_dir=base_dir, input_shapes=request.input_shapes, keep_inputs=request.keep_inputs)
    stages.done("import")
    return expand_gradients(graph)


@dataclass
class _Job:
    """One compile: of what, with what, and what it may have measured before.

    Attributes:
        record: of measurements; None where there is no place for one.
        decided: whether the record decides; or decisions by subject.
        tuning: what to measure before; None for nothing.
        options: of `compile`, for parts of the model that are compiled when it runs.
    """

    request: _Request
    cache: Cache | None
    stages: Stages
    threads: int | None
    record: Record | None
    decided: bool | Mapping[str, str]
    tuning: Measuring | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._look_up()

    def _look_up(self) -> None:
        """What was measured becomes part of the request."""
        target, decided = self.request.gpu, self.decided
        numbers = target.architectures if target is not None else (0,)
        measured: Measured
        if not isinstance(decided, bool):
            measured = dict.fromkeys(numbers, Decisions(decided, "another occasion", "nothing was given"))
        elif not decided:
            measured = dict.fromkeys(numbers, Decisions(missing="tuned=False"))
        elif target is not None:
            from onnxc import gpu

            measured = gpu.decisions(self.record, target)
        else:
            measured = {0: Decisions(self.record.best(self._place()) if self.record is not None else {})}
        self.request = replace(self.request, measured=measured)

    def check_tuning(self) -> None:
        """Raises where nothing can be measured, or kept: before any work is done."""
        if self.tuning is not None and self.record is None:
            raise InputError("measurements need a place: a cache, or record=")
        if self.tuning is not None and self.tuning.seconds is not None and not self.tuning.seconds >= 0:
            raise InputError(f"tune_seconds is not negative, and not {self.tuning.seconds!r}")
        self._place()

    def _place(self) -> str:
        """How the record calls where this job measures."""
        if self.request.gpu is None:
            return cpu_place(self.request.cpu, self.threads or available_cpus())
        from onnxc import gpu

        return gpu.local_place(gpu.local_architecture(self.request.gpu))

    # ------------------------------------------------------------ with the cache

    def compiled(self, model: Model | Graph, base_dir: str | os.PathLike[str] | None) -> CompiledModel:
        """The model, from the cache if it is there."""
        if self.cache is not None:
            return self._cached(model, base_dir, self.cache)
        manifest, sections = self._compile(_import(model, base_dir, self.request, self.stages))
        return CompiledModel(manifest, sections, threads=self.threads, cache=self.cache)

    def _cached(self, model: Model | Graph, base_dir: str | os.PathLike[str] | None, cache: Cache) -> CompiledModel:
        """The cache's model. A new one is put into the cache and opened from there: its weights are mapped.

        The model's key leads to its choices, and these, with what was measured of them, to the compiled model: so
        what is measured of other models changes nothing.
        """
        found = fingerprint_graph(model) if isinstance(model, Graph) else fingerprint(model, base_dir, cache)
        if mentions(model, users_names()):  # known by what it builds, whatever its Python depends on
            built = self._lowered(_import(model, base_dir, self.request, self.stages))
            found = replace(found, digest=digest("users", found.digest, fingerprint_graph(built).digest))
        key = self.request.key(found, cache)
        self.stages.done("fingerprint")
        subjects = _subjects(cache, key)
        if subjects is not None and self._is_measured(subjects):
            known = _from_cache(cache, self.request.decided(key, subjects), self.threads)
            if known is not None:
                self.stages.done("load")
                return known
        manifest, sections = self._compile(_import(model, base_dir, self.request, self.stages))
        if found.is_current():  # else what was compiled may not be what was looked at
            subjects = _choices(manifest)
            entry = self.request.decided(key, subjects)
            with contextlib.suppress(CacheError, PackageError):  # the disk is full: the model still works
                cache.put(key, json.dumps(subjects).encode())
                with cache.writing(entry) as path:
                    write_package(path, manifest, sections, unhashed=[WEIGHTS])
                stored = _from_cache(cache, entry, self.threads)
                if stored is not None:
                    return stored
        return CompiledModel(manifest, sections, threads=self.threads, cache=cache)

    def _is_measured(self, subjects: Mapping[str, Sequence[str]]) -> bool:
        """Whether nothing is left to be measured for these choices."""
        if self.tuning is None:
            return True
        assert self.record is not None
        rows = self.record.rows(self._place())
        return all(s in rows and not rows[s].lacks(names) for s, names in subjects.items())

    def _compile(self, graph: Graph) -> tuple[dict[str, Any], dict[str, Buffer]]:
        """The manifest and the sections of a graph."""
        lowered = self._lowered(graph)
        if is_staged(lowered):
            manifest, sections = self._staged(lowered)
        elif self.tuning is not None:
            _, graph = self.tuned(graph)
            manifest, sections = _make_ready(graph, self.request, self.cache, self.stages, None)
        else:
            manifest, sections = _make(lowered, self.request, self.cache, self.stages)
        del graph
        if len(sections.get(WEIGHTS, b"")) > _LARGE:
            gc.collect()  # graphs are full of cycles, and hold the model's own weights
        return manifest, sections

    def _lowered(self, graph: Graph) -> Graph:
        return _lowered(graph, self.request.careful)

    def _staged(self, graph: Graph) -> tuple[dict[str, Any], dict[str, Buffer]]:
        """Of a graph with steps on the host."""
        if os.environ.get("ONNXC_VERIFY") == "1":
            verify(graph, "decompose")
        with _no_surprises("planning"):
            plan = cut(eliminate_dead(graph), chunks=self.request.gpu is None)
        parts: list[Graph] = []

        def made(part: Graph) -> tuple[dict[str, Any], dict[str, Buffer]]:
            parts.append(part)
            return _make(copied(part), self.request, self.cache, self.stages)

        found = assembled(graph, plan, made, self.options, self.stages.seconds)
        if self.tuning is None or not self._tuned_parts(graph, StagedModel(*found, threads=self.threads), parts):
            return found
        return assembled(graph, plan, made, self.options, self.stages.seconds)

    # ------------------------------------------------------------ measuring

    def _tuned_parts(self, graph: Graph, model: StagedModel, parts: Sequence[Graph]) -> bool:
        """Measures the choices of each program, with what it is given in a call of the model. Whether there are any."""
        tuning = self.tuning
        assert tuning is not None
        if not _choices(model.manifest):
            return False
        feeds = tuning.inputs or random_inputs(graph, seed=tuning.seed, dims=tuning.dims)
        for number, args in model.arguments(list(feeds.values())).items():
            if _choices(model.manifest["parts"][number]):
                part = copied(parts[number])
                self.tuning = replace(tuning, inputs=dict(zip(part.input_names, args, strict=True)))
                self.tuned(part)
        self.tuning = tuning
        return True

    def tuned(self, graph: Graph) -> tuple[Tuner, Graph]:
        """Measures the choices of a graph, as `tuning` says; what follows is compiled with the result.

        Also returns the graph as it is after the passes.
        """
        tuning, record, where = self.tuning, self.record, self._place()
        assert tuning is not None and record is not None
        feeds = tuning.inputs
        if feeds is None:
            feeds = random_inputs(decompose(graph), seed=tuning.seed, dims=tuning.dims)
        ready = prepared(graph, self.request.passes, self.stages)
        variant, prepare = self._variants(ready)
        tuner = Tuner(
            variant,
            feeds,
            _CPU_METHOD if self.request.gpu is None else _GPU_METHOD,
            keep=lambda rows: record.add(where, rows) if rows else None,
            prepare=prepare,
            known={} if tuning.again else record.rows(where),
            seconds=tuning.seconds,
            tell=self.stages.progress or (lambda stage: None),
        )
        tuner.run()
        self.stages.done("tune")
        self._look_up()
        return tuner, ready

    def _variants(self, graph: Graph) -> tuple[Callable[[Decided], CompiledModel], Callable[[Sequence[Decided]], None]]:
        """What makes variants of a graph that has passed the passes, and what may prepare several."""
        if self.request.gpu is not None:
            return _gpu_variants(graph, self.request, self.request.gpu)

        def variant(decided: Decided) -> CompiledModel:
            request = replace(self.request, measured={0: Decisions(decided)})
            manifest, sections = _make_for_cpu(graph, request, self.cache, Stages(), None)
            return CompiledModel(manifest, sections, threads=self.threads, cache=self.cache)

        return variant, lambda batch: None


def _lowered(graph: Graph, careful: bool = False) -> Graph:
    """In primitives and steps on the host."""
    with _no_surprises("the pass 'decompose'"):
        return lift_random_state(decompose(graph, staged=True, careful=careful))


def is_staged(graph: Graph) -> bool:
    """Whether a graph of primitives is to become several programs."""
    return any(is_host(n) for n in graph.nodes) or not all(isinstance(v.type, TensorType) for v in graph.inputs)


def _gpu_variants(
    graph: Graph, request: _Request, target: gpu.GpuTarget
) -> tuple[Callable[[Decided], CompiledModel], Callable[[Sequence[Decided]], None]]:
    from onnxc import gpu

    architecture = gpu.local_architecture(target)
    variants = gpu.Variants(gpu.planned(graph, request.fusion), target, architecture)
    blocks: dict[int, np.ndarray[Any, Any]] = {}

    def variant(decided: Decided) -> CompiledModel:
        with _no_surprises("code generation"):
            built = variants.make(decided)
        store = built.first.weights
        if store.nbytes not in blocks:  # of candidates that pack weights in other ways there may be more
            blocks[store.nbytes] = weights_block(built.first)
        manifest, sections = _packed_for_gpu(graph, request, target, built, blocks[store.nbytes], Stages())
        return CompiledModel(manifest, sections)

    return variant, variants.prepare


def _subjects(cache: Cache, key: str) -> dict[str, list[str]] | None:
    """The choices of a model that was compiled before; None where it was not."""
    try:
        found = json.loads(cache.read(key) or b"null")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _choices(manifest: Mapping[str, Any]) -> dict[str, list[str]]:
    """The choices of a compiled model with their candidates, by subject."""
    found = [kernel["choice"] for kernel in manifest["kernels"] if "choice" in kernel]
    return {c["subject"]: list(c["candidates"]) for c in found if len(c["candidates"]) > 1}


def _from_cache(cache: Cache, key: str, threads: int | None) -> CompiledModel | None:
    path = cache.get(key)
    if path is None:
        return None
    try:
        package = open_package(path)
        sections = {name: package.section(name) for name in package.names if name != MANIFEST}
        return CompiledModel(package.manifest, sections, threads=threads, cache=cache)
    except PackageError:  # damaged, or removed a moment ago: compile again
        cache.remove(key)
        return None


def _make_for_gpu(
    graph: Graph, request: _Request, target: gpu.GpuTarget, stages: Stages
) -> tuple[dict[str, Any], dict[str, Buffer]]:
    from onnxc import gpu

    with _no_surprises("code generation"):
        plan = gpu.planned(graph, request.fusion)
        stages.done("plan")
        built = gpu.make(plan, target, request.measured, stages.done)
    return _packed_for_gpu(graph, request, target, built, weights_block(built.first), stages)


def _packed_for_gpu(
    graph: Graph,
    request: _Request,
    target: gpu.GpuTarget,
    built: gpu.Built,
    weights: np.ndarray[Any, Any],
    stages: Stages,
) -> tuple[dict[str, Any], dict[str, Buffer]]:
    manifest = manifest_of(
        graph, replace(built.first, calls=built.calls(), kernels=built.kernels), request.cpu, request.memory_limit,
        stages.seconds,
    )  # fmt: skip
    names = ", ".join(f"sm_{n}" for n in target.architectures)
    manifest |= {"target": "cuda", "gpu": names, "cuda": built.described(), "arena": arena_of(built.first)}
    return manifest, {**built.sections, SOURCE: built.source.encode(), WEIGHTS: weights.data}


def _make(
    graph: Graph, request: _Request, cache: Cache | None, stages: Stages
) -> tuple[dict[str, Any], dict[str, Buffer]]:
    with ThreadPoolExecutor(1) as pool:
        # The first compile of all also compiles the runtime: the rest does not wait for it.
        loading = pool.submit(load_runtime, cache) if request.gpu is None else None
        return _make_ready(prepared(graph, request.passes, stages), request, cache, stages, loading)


def _make_ready(
    graph: Graph, request: _Request, cache: Cache | None, stages: Stages, loading: Future[Runtime] | None
) -> tuple[dict[str, Any], dict[str, Buffer]]:
    """Of a graph that has passed the passes."""
    if request.gpu is not None:
        return _make_for_gpu(graph, request, request.gpu, stages)
    return _make_for_cpu(graph, request, cache, stages, loading)


def _make_for_cpu(
    graph: Graph, request: _Request, cache: Cache | None, stages: Stages, loading: Future[Runtime] | None
) -> tuple[dict[str, Any], dict[str, Buffer]]:
    kernels = replace(request.kernels, tuned=tuple(sorted(request.measured[0].best.items())))
    with ThreadPoolExecutor(1) as pool:
        program = _program(graph, request.cpu, request.fusion, kernels, stages)
        building = pool.submit(build, program, request.cpu, cache)
        weights = weights_block(program)
        stages.done("weights")
        code = building.result()
        stages.done("c++")
        runtime = loading.result() if loading is not None else load_runtime(cache)
    manifest = manifest_of(graph, program, request.cpu, request.memory_limit, stages.seconds)
    sections: dict[str, Buffer] = {
        PROGRAM: code, RUNTIME: runtime.code, SOURCE: program.source.encode(), WEIGHTS: weights.data,
    }  # fmt: skip
    return manifest, sections


def _compile_later(graph: Graph, options: Mapping[str, Any]) -> CompiledModel:
    """A part of a model, when the model runs and its types are known."""
    fusion = options["fusion"]
    return compile(graph, **{**options, "fusion": fusion if isinstance(fusion, bool) else FusionOptions(**fusion)})


set_compiler(_compile_later)

__all__ = ["Stages", "build", "compile", "generate", "level", "prepared", "weights_block"]
