"""Manifest and sections of one program: what the stages make of a graph, for the CPU or for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxc.autotune import Decided
from onnxc.compiler.machine_code import MachineCode
from onnxc.compiler.request import Request
from onnxc.compiler.stages import Stages, no_surprises, prepared, weights_block, written
from onnxc.ir.graph import Graph
from onnxc.manifest import arena_of, layout_of, manifest_of
from onnxc.runtime.compiled_model import WEIGHTS, CompiledModel
from onnxc.runtime.library import Runtime, load_runtime
from onnxc.runtime.model import PROGRAM, RUNTIME, SOURCE
from onnxc.runtime.opening import open_model
from onnxc.runtime.toolchain import result_of
from onnxc.staged import Made

if TYPE_CHECKING:
    from onnxc import gpu


def made(graph: Graph, request: Request, code: MachineCode, stages: Stages) -> Made:
    """Of a graph of primitives."""
    with ThreadPoolExecutor(1) as pool:
        # The first compile of all also compiles the runtime: the rest does not wait for it.
        loading = pool.submit(load_runtime, code.cache) if request.gpu is None else None
        graph = prepared(graph, request.options.passes, stages)
        return made_of_prepared(graph, request, code, stages, loading)


def made_of_prepared(
    graph: Graph, request: Request, code: MachineCode, stages: Stages, loading: Future[Runtime] | None = None
) -> Made:
    """Of a graph that has passed the passes."""
    if request.gpu is not None:
        return _for_gpu(graph, request, request.gpu, stages)
    return _for_cpu(graph, request, code, stages, loading)


def _for_cpu(
    graph: Graph, request: Request, code: MachineCode, stages: Stages, loading: Future[Runtime] | None
) -> Made:
    options = request.options
    kernels = replace(options.kernels, tuned=tuple(sorted(request.measured[0].best.items())))
    with ThreadPoolExecutor(1) as pool, code.runs.stopped_by_errors():
        program, layout = written(graph, request.cpu, options.fusion_options, kernels, stages)
        building = pool.submit(code.of, program, request.cpu)
        weights = weights_block(program, graph)
        stages.done("weights")
        library = result_of(building)
        stages.done("c++")
        runtime = result_of(loading) if loading is not None else load_runtime(code.cache)
    manifest = manifest_of(graph, program, layout, request.cpu, options.memory_limit or 0, stages.seconds)
    return manifest, {
        PROGRAM: library, RUNTIME: runtime.code, SOURCE: program.source.encode(), WEIGHTS: weights.data,
    }  # fmt: skip


def _for_gpu(graph: Graph, request: Request, target: gpu.GpuTarget, stages: Stages) -> Made:
    from onnxc import gpu

    with no_surprises("code generation"):
        plan = gpu.planned(graph, request.options.fusion_options)
        stages.done("plan")
        built = gpu.make(plan, target, request.measured, stages.done)
    weights = weights_block(built.first, graph)
    return _packed(graph, request, target, built, weights, stages)


def _packed(
    graph: Graph,
    request: Request,
    target: gpu.GpuTarget,
    built: gpu.Built,
    weights: np.ndarray[Any, Any],
    stages: Stages,
) -> Made:
    program = replace(built.first, calls=built.calls(), kernels=built.kernels)
    layout, limit = layout_of(graph, program), request.options.memory_limit or 0
    manifest = manifest_of(graph, program, layout, request.cpu, limit, stages.seconds)
    names = ", ".join(f"sm_{n}" for n in target.architectures)
    manifest |= {"target": "cuda", "gpu": names, "cuda": built.described(), "arena": arena_of(built.first)}
    return manifest, {**built.sections, SOURCE: built.source.encode(), WEIGHTS: weights.data}


def gpu_variants(
    graph: Graph, request: Request, target: gpu.GpuTarget
) -> tuple[Callable[[Decided], CompiledModel], Callable[[Sequence[Decided]], None]]:
    """What makes variants of a prepared graph for this machine's GPU, and what prepares several side by side."""
    from onnxc import gpu

    architecture = gpu.local_architecture(target)
    variants = gpu.Variants(gpu.planned(graph, request.options.fusion_options), target, architecture)
    blocks: dict[int, np.ndarray[Any, Any]] = {}

    def variant(decided: Decided) -> CompiledModel:
        with no_surprises("code generation"):
            built = variants.make(decided)
        store = built.first.weights
        if store.nbytes not in blocks:  # of candidates that pack weights in other ways there may be more
            blocks[store.nbytes] = weights_block(built.first, graph)
        return open_model(*_packed(graph, request, target, built, blocks[store.nbytes], Stages()))

    return variant, variants.prepare
