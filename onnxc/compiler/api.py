"""`onnxc.compile`, and what measures a model: from a user's call to a job."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from onnxc.autotune import Tuner
from onnxc.compiler.entries import open_cache
from onnxc.compiler.job import Job, Measuring
from onnxc.compiler.options import CompileOptions
from onnxc.compiler.request import Request
from onnxc.compiler.stages import Progress, Stages, imported, is_staged, lowered
from onnxc.errors import InputError
from onnxc.frontends.onnx_file import InputShapes, Model
from onnxc.ir.graph import Graph
from onnxc.passes.pipeline import PassOptions
from onnxc.passes.record import PassLog, record_import, record_passes
from onnxc.planner.groups import FusionOptions
from onnxc.runtime.cache import Cache
from onnxc.runtime.compiled_model import CompiledModel
from onnxc.runtime.staged_later import set_compiler
from onnxc.tuned import Record


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
    dtype: Any = None,
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
        fusion: False for one kernel a node (to measure, and to find faults); or which kinds to use: an
            `onnxc.FusionOptions`.
        attention: whether to find attention and run it as one kernel.
        integer: whether to multiply quantized tensors as integers, so that DequantizeLinear, MatMul (or Conv, Gemm)
            and QuantizeLinear are one exact integer product; False adds up floats as the model has it.
        accuracy: ``strict`` rules out algorithms that round more coarsely than a plain sum (Winograd's, for 3x3
            convolutions, and Strassen's, for 1x1 ones and products); ``default`` takes them where they are faster.
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
            float32. Given by name, or as numpy or PyTorch has them. Default: the model's own dtypes.
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

    >>> import numpy as np
    >>> import onnx.parser
    >>> head = '<ir_version: 8, opset_import: ["" : 18]>'
    >>> model = onnx.parser.parse_model(head + "g (float[N] x) => (float[N] y) { y = Add(x, x) }")
    >>> compile(model)(np.ones(3, np.float32))["y"]
    array([2., 2., 2.], dtype=float32)
    """
    given = dict(locals())  # all options by name, as CompileOptions lists them
    del given["model"], given["progress"]
    return compiled(model, CompileOptions(**given), progress)


def compiled(model: Model | Graph, options: CompileOptions, progress: Progress | None = None) -> CompiledModel:
    """As `compile`, for options that are one object."""
    if progress is not None and not callable(progress):
        raise InputError(f"progress is a function, not {progress!r}")
    options = options.for_device()
    cache = open_cache(options)
    record = Record.of(cache, options.record)
    request = Request.of(options)
    tuning = Measuring(options.tune_seconds) if options.mode != "default" else None
    found = Job(request, cache, record, Stages(progress=progress), tuning).compiled(model)
    if options.device:
        found.attach(options.device)
    if options.seed is not None:
        found.seed(options.seed)
    known = os.fspath(model) if isinstance(model, (str, os.PathLike)) else ""  # what is in memory is not kept for this
    found.record = functools.partial(_recorded, request, known, _modified(known))
    if symbols_meet(found.manifest) and not isinstance(model, Graph):

        def again(ones: Mapping[str, Sequence[int | None]], careful: bool) -> CompiledModel:
            shapes = replace(options, input_shapes=_with_ones(options.input_shapes or {}, ones))
            made = Job(replace(request, options=shapes, careful=careful), cache, record).compiled(model)
            if options.device:
                made.attach(options.device)
            return made

        found.vary(again)
    return found


def measure(
    model: Model | Graph, tuning: Measuring, options: CompileOptions, progress: Progress | None = None
) -> tuple[Tuner, Record]:
    """Measures a model's kernels, and adds the times to the record: see :func:`onnxc.tune`."""
    cache = open_cache(options)
    record = Record.of(cache, options.record)
    job = Job(Request.of(options), cache, record, Stages(progress=progress), tuning)
    assert record is not None  # or there is no such job
    graph = imported(model, options, job.stages)
    if is_staged(lowered(graph, options)):
        raise InputError("the model is several programs: mode='max-autotune' measures each of them as it is compiled")
    return job.tuned(graph)[0], record


# ---------------------------------------------------------------- what a model may ask for later


def _recorded(request: Request, path: str, modified: int, model: Model | None = None) -> PassLog | None:
    """What each pass does to the graph of a model, or of the file; None where that is no longer what was compiled."""
    if model is None and (not path or _modified(path) != modified):
        return None
    graph = imported(path if model is None else model, request.options, Stages())
    in_primitives = lowered(graph, request.options)
    if is_staged(in_primitives):
        return record_import(graph, in_primitives)
    return record_passes(graph, request.options.passes)


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


def _compile_later(graph: Graph, options: Mapping[str, Any]) -> CompiledModel:
    """A part of a model, when the model runs and its types are known."""
    return compiled(graph, CompileOptions.from_json(options, threads=options["threads"]))


set_compiler(_compile_later)
