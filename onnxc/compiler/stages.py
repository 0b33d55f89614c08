"""The stages of a compile, one function each: import, passes, plan and source, the block of weights."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxc.autodiff.operator import expand_gradients
from onnxc.codegen.cpp.choices import KernelOptions
from onnxc.codegen.cpp.program import Program, ProgramWriter
from onnxc.compiler.options import CompileOptions
from onnxc.errors import InternalError, LimitError, OnnxcError
from onnxc.frontends import onnx_file
from onnxc.frontends.onnx_file import Model
from onnxc.ir.graph import Graph
from onnxc.ir.types import TensorType
from onnxc.manifest import layout_of
from onnxc.passes.decompose import decompose
from onnxc.passes.pipeline import PassOptions, passes
from onnxc.passes.random_state import lift_random_state
from onnxc.planner.groups import FusionOptions
from onnxc.planner.partition import planned
from onnxc.primitives.host import is_host
from onnxc.primitives.places import is_foreign
from onnxc.primitives.verify import verify
from onnxc.runtime.cpu import Level, available_bytes, has_byte_products, has_matrix_products, memory_bytes
from onnxc.runtime.mapped import forgetting
from onnxc.runtime.model import LAYOUT, layout_digest

if TYPE_CHECKING:
    from onnxc.codegen.triton.program import Program as GpuProgram

Progress = Callable[[str], None]
_ASKED = 16  # weights that take less than this part of the memory do not ask how much of it is left


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


@contextlib.contextmanager
def no_surprises(what: str) -> Iterator[None]:
    """The last line of defence: what no rule has foreseen of a model is an InternalError, not a KeyError."""
    try:
        yield
    except OnnxcError:
        raise
    except MemoryError as error:
        raise LimitError(f"{what} needs more memory than there is", cause=error) from error
    except Exception as error:
        raise InternalError(f"{what} failed: {type(error).__name__}: {error}", cause=error) from error


def imported(model: Model | Graph, options: CompileOptions, stages: Stages) -> Graph:
    """The graph of a model, as its file has it."""
    if isinstance(model, Graph):
        return expand_gradients(model)
    try:
        graph = onnx_file.load(
            model,
            base_dir=options.base_dir,
            input_shapes=options.input_shapes,
            keep_inputs=options.keep_inputs,
            memory=memory_bytes(),
        )
    except MemoryError as error:
        raise LimitError("the model's weights need more memory than there is", cause=error) from error
    stages.done("import")
    return expand_gradients(graph)


def lowered(graph: Graph, options: CompileOptions, careful: bool = False) -> Graph:
    """In primitives and steps on the host."""
    with no_surprises("the pass 'decompose'"):
        return lift_random_state(decompose(graph, staged=True, careful=careful, avoided=options.avoided))


def is_staged(graph: Graph) -> bool:
    """Whether a graph of primitives is to become several programs."""
    values = (*graph.inputs, *graph.outputs)  # those that no kernel can hold are the host's
    plain = all(isinstance(v.type, TensorType) and not is_foreign(v) for v in values)
    return not plain or any(is_host(n) for n in graph.nodes)


def prepared(graph: Graph, options: PassOptions, stages: Stages) -> Graph:
    """Through the passes: from an imported graph to one that the planner takes.

    ``ONNXC_VERIFY=1`` verifies the graph after each.
    """
    checked = os.environ.get("ONNXC_VERIFY") == "1"
    for name, run in passes(options):
        with no_surprises(f"the pass {name!r}"):
            graph = run(graph)
        if checked:
            verify(graph, name)
        stages.done(name)
    return graph


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
    return written(graph, cpu, options, kernels or KernelOptions(), stages)[0]


def written(
    graph: Graph, cpu: Level, options: FusionOptions, kernels: KernelOptions, stages: Stages
) -> tuple[Program, dict[str, Any]]:
    """From a graph that has passed the passes to generated source, and its layout (of `layout_of`), whose digest the
    source has: a program does not run with another manifest.
    """
    with no_surprises("planning"):
        fused = planned(graph, options)
    stages.done("plan")
    with no_surprises("code generation"):
        kernels = replace(kernels, vnni=has_byte_products(cpu), matrices=has_matrix_products(cpu))
        program = ProgramWriter(fused, cpu.vector_length, kernels).write()
        layout = layout_of(graph, program)
        text = layout_digest(layout, program.weights.nbytes)
        program.sources[-1] += f'OX_EXPORT const char *{LAYOUT}() {{ return "{text}"; }}\n'
    stages.done("generate")
    return program, layout


def weights_block(program: Program | GpuProgram, graph: Graph) -> np.ndarray[Any, Any]:
    """The program's weights as one aligned block of bytes. They are packed from the constants of `graph`: those that
    are mapped from a file leave memory as they have been read, so that large models are not in memory twice.
    """
    size = program.weights.nbytes + 4096
    if size > memory_bytes() // _ASKED and size > available_bytes():  # the system may grant it, and end the process
        raise LimitError(f"the weights of the program take {size} bytes: {available_bytes()} bytes of memory are left")
    try:
        block = np.zeros(size, np.uint8)
    except MemoryError as error:
        raise LimitError(f"no memory for the weights of the program: {size} bytes", cause=error) from error
    start = -block.ctypes.data % 4096
    block = block[start : start + program.weights.nbytes]
    program.weights.fill(block, forgetting(constants(graph)))
    return block


def constants(graph: Graph) -> list[np.ndarray[Any, Any]]:
    """The arrays that a graph has inside."""
    return [n.attrs["value"] for n in graph.nodes if n.op == "constant"]
