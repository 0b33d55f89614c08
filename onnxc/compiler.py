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
import gc
import importlib.metadata
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import onnxc.codegen.cpp as cpp
from onnxc import tuned as decisions
from onnxc.codegen.calls import KernelCall
from onnxc.codegen.cpp.choices import KernelOptions
from onnxc.codegen.cpp.program import ENTRY, VERSION, Program, ProgramWriter
from onnxc.codegen.triton.options import MOST_DEPTH
from onnxc.errors import CacheError, InputError, InternalError, OnnxcError, PackageError, UnsupportedError
from onnxc.fingerprint import Fingerprint, code_digest, fingerprint
from onnxc.frontends import onnx_file
from onnxc.frontends.onnx_file import InputShapes, Model
from onnxc.ir.expr import Dim
from onnxc.ir.graph import Graph, Origin, Value
from onnxc.passes.pipeline import PassOptions, passes
from onnxc.passes.precision import kept as kept_float32
from onnxc.passes.precision import summary
from onnxc.planner.fusion import plan
from onnxc.planner.groups import FusionOptions
from onnxc.planner.layout import assign
from onnxc.planner.templates import ENABLED
from onnxc.primitives.assumptions import assumptions
from onnxc.primitives.verify import verify
from onnxc.runtime.cache import Buffer, Cache, digest
from onnxc.runtime.cpu import Level, available_cpus, has_byte_products, level
from onnxc.runtime.library import ABI, NATIVE, load_runtime
from onnxc.runtime.model import PROGRAM, RUNTIME, SCHEMA, SOURCE, WEIGHTS, CompiledModel
from onnxc.runtime.package import MANIFEST, open_package, write_package
from onnxc.runtime.signature import Signature, Tensor
from onnxc.runtime.sizes import Size, encode, spell
from onnxc.runtime.toolchain import Source, compile_library, find_compiler

if TYPE_CHECKING:
    from onnxc import gpu
    from onnxc.codegen.triton.program import Program as GpuProgram

INCLUDE = Path(cpp.__file__).parent / "include"
Progress = Callable[[str], None]
_LARGE = 64 << 20  # bytes of weights from which a compile tidies up after itself


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
        fused = plan(graph, assign(graph, ENABLED), options)
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

    def key(self, model: Fingerprint, cache: Cache) -> str:
        """The cache key."""
        shapes = {name: list(shape) for name, shape in self.input_shapes.items()}
        options = [
            shapes,
            sorted(self.keep_inputs),
            self.memory_limit,
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
    tuned: bool | Mapping[str, str] = False,
    precision: str = "float32",
    dtype: str | None = None,
    fold_bytes: int = PassOptions.fold_bytes,
    memory_limit: int | None = None,
    progress: Progress | None = None,
) -> CompiledModel:
    """Compile a model.

    Args:
        model: a path, the bytes of a file, a ModelProto, or an imported graph (which is not cached).
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
        tuned: whether to choose between algorithms as :func:`onnxc.tune` found on this machine, where it has
            measured; or those decisions themselves. Otherwise a cost model chooses.
        precision: how a GPU multiplies float32 matrices: ``float32``, as it says; ``tf32``, on matrix units, with 10
            bits of each factor; or ``tf32x3``, on matrix units, in three products that keep nearly all bits.
        dtype: ``float16`` or ``bfloat16`` converts a float32 model: matrices and what is stored between kernels become
            halves, but for what needs float32's range or digits (``explain()`` lists it). Inputs and outputs stay
            float32. Default: the model's own dtypes.
        fold_bytes: the most bytes that constant folding may add to the weights.
        memory_limit: the most bytes of memory for one call's intermediates; above it the call fails.
            Default: what the machine has.
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
    if target == "cpu" and precision != "float32":
        raise InputError(f"precision {precision!r} is for GPUs: target='cuda'")
    on_gpu = None if target == "cpu" else _gpu_target(target, precision)
    if accuracy not in ("default", "strict"):
        raise InputError(f"accuracy is 'default' or 'strict', not {accuracy!r}")
    kinds = fusion if isinstance(fusion, FusionOptions) else _all_fusion(fusion)
    kept = _open_cache(cache)
    best = _decisions(tuned, kept, level(cpu), threads)
    request = _Request(
        level(cpu),
        kinds,
        _pass_options(fold_bytes, attention, integer, dtype, on_gpu=on_gpu is not None),
        KernelOptions(winograd=accuracy != "strict", tuned=best),
        input_shapes or {},
        tuple(keep_inputs),
        memory_limit or 0,
        on_gpu,
    )
    stages = Stages(progress=progress)
    if kept is not None and not isinstance(model, Graph):
        return _cached(model, base_dir, request, kept, stages, threads)
    manifest, sections = _compile(_import(model, base_dir, request, stages), request, kept, stages)
    return CompiledModel(manifest, sections, threads=threads, cache=kept)


def _gpu_target(target: str, precision: str) -> gpu.GpuTarget:
    from onnxc import gpu  # it imports the means to run Triton, which the CPU does not need

    return gpu.parse_target(target, precision)


def _pass_options(fold_bytes: int, attention: bool, integer: bool, dtype: str | None, *, on_gpu: bool) -> PassOptions:
    return PassOptions(
        fold_bytes,
        attention and (on_gpu or dtype is None),  # the CPU has a kernel for float32 alone
        integer and not on_gpu,
        weight_only=not on_gpu,
        half_attention=on_gpu,
        attention_depth=MOST_DEPTH if on_gpu else None,
        dtype=dtype,
        merge=on_gpu,
    )


def _decisions(
    tuned: bool | Mapping[str, str], cache: Cache | None, cpu: Level, threads: int | None
) -> tuple[tuple[str, str], ...]:
    if isinstance(tuned, bool):
        tuned = decisions.load(cache, cpu, threads or available_cpus()) if tuned and cache is not None else {}
    return tuple(sorted(tuned.items()))


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
        return model
    graph = onnx_file.load(model, base_dir=base_dir, input_shapes=request.input_shapes, keep_inputs=request.keep_inputs)
    stages.done("import")
    return graph


def _cached(
    model: Model,
    base_dir: str | os.PathLike[str] | None,
    request: _Request,
    cache: Cache,
    stages: Stages,
    threads: int | None,
) -> CompiledModel:
    """The cache's model. A new one is put into the cache and opened from there: its weights are mapped."""
    found = fingerprint(model, base_dir, cache)
    key = request.key(found, cache)
    stages.done("fingerprint")
    known = _from_cache(cache, key, threads)
    if known is not None:
        stages.done("load")
        return known
    manifest, sections = _compile(_import(model, base_dir, request, stages), request, cache, stages)
    if found.is_current():  # else what was compiled may not be what was looked at
        with contextlib.suppress(CacheError, PackageError):  # the disk is full: the model still works
            with cache.writing(key) as path:
                write_package(path, manifest, sections, unhashed=[WEIGHTS])
            stored = _from_cache(cache, key, threads)
            if stored is not None:
                return stored
    return CompiledModel(manifest, sections, threads=threads, cache=cache)


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


def _compile(
    graph: Graph, request: _Request, cache: Cache | None, stages: Stages
) -> tuple[dict[str, Any], dict[str, Buffer]]:
    """The manifest and the sections of a compiled graph."""
    manifest, sections = _make(graph, request, cache, stages)
    del graph
    if len(sections[WEIGHTS]) > _LARGE:
        gc.collect()  # graphs are full of cycles, and hold the model's own weights
    return manifest, sections


def _make_for_gpu(
    graph: Graph, request: _Request, target: gpu.GpuTarget, stages: Stages
) -> tuple[dict[str, Any], dict[str, Buffer]]:
    from onnxc import gpu

    graph = prepared(graph, request.passes, stages)
    with _no_surprises("code generation"):
        program = gpu.generate(graph, request.fusion, target)
    stages.done("generate")
    images, code = gpu.build(program, target)
    stages.done("triton")
    weights = weights_block(program)
    manifest = _manifest(graph, program, request, stages)
    names = ", ".join(f"sm_{n}" for n in target.architectures)
    manifest |= {"target": "cuda", "gpu": names, "cuda": gpu.described(program, images), "arena": _arena(program)}
    return manifest, {**code, SOURCE: program.source.encode(), WEIGHTS: weights.data}


def _make(
    graph: Graph, request: _Request, cache: Cache | None, stages: Stages
) -> tuple[dict[str, Any], dict[str, Buffer]]:
    if request.gpu is not None:
        return _make_for_gpu(graph, request, request.gpu, stages)
    with ThreadPoolExecutor(2) as pool:
        # The first compile of all also compiles the runtime: the rest does not wait for it.
        loading = pool.submit(load_runtime, cache)
        graph = prepared(graph, request.passes, stages)
        program = _program(graph, request.cpu, request.fusion, request.kernels, stages)
        building = pool.submit(build, program, request.cpu, cache)
        weights = weights_block(program)
        stages.done("weights")
        code = building.result()
        stages.done("c++")
        runtime = loading.result()
    manifest = _manifest(graph, program, request, stages)
    sections: dict[str, Buffer] = {
        PROGRAM: code, RUNTIME: runtime.code, SOURCE: program.source.encode(), WEIGHTS: weights.data,
    }  # fmt: skip
    return manifest, sections


# ---------------------------------------------------------------- the manifest


def _manifest(graph: Graph, program: Program | GpuProgram, request: _Request, stages: Stages) -> dict[str, Any]:
    """All but code and weights: what calls need, and what reports tell."""
    names = graph.dim_names
    equal, natural = _conditions(graph)
    offsets = program.offsets
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "onnxc": _version(),
        "requires": {"machine": request.cpu.machine, "features": sorted(request.cpu.features)},
        "entry": ENTRY,
        "memory_limit": request.memory_limit,
        "inputs": [_tensor(n, v, names) for n, v in zip(graph.input_names, graph.inputs, strict=True)],
        "outputs": [_tensor(n, v, names) for n, v in zip(graph.output_names, graph.outputs, strict=True)],
        "symbols": program.symbols,
        "dim_names": names,
        "equal": equal,
        "natural": natural,
        "arena": None if offsets is not None else _arena(program),
        # What model.explain() tells:
        "name": graph.name,
        "cpu": request.cpu.name,
        "lanes": request.cpu.vector_length,
        "kernels": [_kernel(call, names) for call in program.calls],
        "memory": {
            "arena": program.arena_bytes if offsets is not None else "laid out for each size",
            "buffers": len(program.buffers),
            "buffers_total": _spelled(_total(b.nbytes for b in program.buffers), names),
            "weights": program.weights.nbytes,
        },
        "kept": summary(kept_float32(graph)),
        "stages": dict(stages.seconds),
        "sources": program.kernels,
    }
    unsolved = Signature([Tensor.from_json(row) for row in manifest["inputs"]], (), program.symbols, names).unsolved
    if unsolved:
        dims = ", ".join(names.get(s) or s for s in unsolved)
        raise UnsupportedError(f"the sizes {dims} depend on data, or on no input's shape: give input_shapes")
    return manifest


def _version() -> str:
    try:
        return importlib.metadata.version("onnxc")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _tensor(name: str, value: Value, names: Mapping[str, str]) -> list[Any]:
    sizes, dims = tuple(map(encode, value.shape)), tuple(spell(d, names) for d in value.shape)
    return Tensor(name, value.dtype, sizes, dims).to_json()


def _arena(program: Program | GpuProgram) -> dict[str, Any]:
    """The lifetimes of the intermediates, for :class:`onnxc.runtime.model.Arena`."""
    places: dict[Dim, int] = {}
    which = [places.setdefault(b.nbytes, len(places)) for b in program.buffers]
    return {
        "sizes": [encode(d) for d in places],
        "which": which,
        "first": [b.first for b in program.buffers],
        "last": [b.last for b in program.buffers],
    }


def _kernel(call: KernelCall, names: Mapping[str, str]) -> dict[str, Any]:
    work = {name: getattr(call, name) for name in ("reads", "writes", "flops", "pointwise", "turns")}
    sizes = {name: encode(dim) for name, dim in work.items() if not isinstance(dim, int)}
    return {
        "function": call.function,
        "kind": call.kind,
        "origins": [[s.number, s.op_type, s.name, s.line] for s in call.origin],
        "reasons": list(call.reasons),
        "boundaries": [list(b) for b in call.boundaries],
        **{name: _spelled(dim, names) for name, dim in work.items()},
        **({"sizes": sizes} if sizes else {}),  # of those that are dynamic, to be evaluated
        "weights": call.weights,
        **({"choice": asdict(call.choice)} if call.choice is not None else {}),
    }


def _spelled(dim: Dim, names: Mapping[str, str]) -> int | str:
    found = spell(dim, names)
    return str(dim) if found is None else found


def _total(dims: Iterator[Dim]) -> Dim:
    total: Dim = 0
    for d in dims:
        total = total + d
    return total


# ---------------------------------------------------------------- what was taken for granted


def _conditions(graph: Graph) -> tuple[list[tuple[Size, Size, str]], list[tuple[Size, str]]]:
    """Pairs of sizes that must be equal and sizes that must not be negative, each with the node that wants it."""
    found = assumptions(graph)
    equal = [(encode(a), encode(b), describe(*place)) for (a, b), place in found.equal.items()]
    return equal, [(encode(d), describe(*place)) for d, place in found.natural.items()]


def describe(origin: Origin, op: str) -> str:
    """The node of the user's model that something comes from, as ``n3 Gather 'embed'``."""
    return " or ".join(f"{s} {s.name!r}" if s.name else str(s) for s in origin[:3]) or op


__all__ = ["Stages", "build", "compile", "generate", "level", "prepared", "weights_block"]
