"""The pipeline: from a graph as imported to a compiled model."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import onnxc.codegen.cpp as cpp
from onnxc.codegen.cpp.program import Program, ProgramWriter
from onnxc.ir.graph import Graph
from onnxc.passes.pipeline import PassOptions, passes
from onnxc.planner.fusion import FusionOptions, plan
from onnxc.planner.layout import assign
from onnxc.planner.templates import ENABLED
from onnxc.runtime.cpu import Level, level
from onnxc.runtime.library import NATIVE
from onnxc.runtime.toolchain import Source, compile_library

INCLUDE = Path(cpp.__file__).parent / "include"


@dataclass
class Stages:
    """Seconds that each stage of a compile took."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def done(self, name: str) -> None:
        """Ends a stage: the time since the stage before."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def generate(graph: Graph, cpu: Level, options: FusionOptions, stages: Stages) -> Program:
    """From an imported graph to generated source."""
    for name, run in passes(PassOptions()):
        graph = run(graph)
        stages.done(name)
    layout = assign(graph, ENABLED)
    fused = plan(graph, layout, options)
    stages.done("plan")
    program = ProgramWriter(fused, cpu.vector_length).write()
    stages.done("generate")
    return program


def build(program: Program, cpu: Level) -> bytes:
    """Compiles the source to a shared library."""
    return compile_library([Source("model.cpp", program.source)], include=[INCLUDE, NATIVE], flags=[*cpu.flags])


def weights_block(program: Program) -> np.ndarray:
    """The program's weights as one aligned block of bytes."""
    block = np.zeros(program.weights.nbytes + 4096, np.uint8)
    start = -block.ctypes.data % 4096
    block = block[start : start + program.weights.nbytes]
    program.weights.fill(block)
    return block


__all__ = ["Stages", "build", "generate", "level", "weights_block"]
