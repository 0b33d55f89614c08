"""What the tests of answers compile for.

    pytest                          the CPU
    pytest --target cuda            this machine's GPU
    pytest --target simulated       no GPU at all: a driver in memory, and kernels in Triton's interpreter (slow)

With a GPU as the target, ``onnxc.compile`` without a target of its own compiles for it, and so do the harnesses. Tests
with the marker ``every_target`` run there; those that are about something of the CPU's alone say so with ``cpu_only``.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import onnxc
from onnxc.compiler import stages
from onnxc.errors import OnnxcError, UnsupportedError
from onnxc.ir.graph import Graph
from onnxc.passes.decompose import decompose
from onnxc.planner.groups import FusionOptions
from onnxc.primitives.interpret import interpret
from onnxc.runtime.cuda.driver import Device, device

Array = np.ndarray[Any, Any]
TARGETS = ("cpu", "cuda", "simulated")
_chosen = "cpu"

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="GPU kernels need Triton: pip install 'onnxc[cuda]'"
)


def is_gpu() -> bool:
    """Whether tests compile for a GPU, real or simulated."""
    return _chosen != "cpu"


def this_gpu() -> Device:
    """The first GPU of this machine; where there is none, the test is skipped and says why."""
    try:
        return device(0)
    except OnnxcError as error:
        pytest.skip(f"no GPU: {error}")


def choose(name: str, patch: pytest.MonkeyPatch) -> None:
    """Has ``onnxc.compile`` compile for this target, for as long as the patch lasts."""
    patch.setattr(f"{__name__}._chosen", name)
    if name == "cpu":
        return
    from onnxc import gpu

    if name == "simulated":
        from tests.simulated_gpu import SimulatedGpu

        SimulatedGpu().install(patch)
    else:  # each test process compiles in itself: pytest has started as many as are wanted
        patch.setattr(gpu, "compile_program", functools.partial(gpu.compile_program, workers=1))
    compile_ = onnxc.compile

    @functools.wraps(compile_)
    def compiled(model: Any, **options: Any) -> onnxc.CompiledModel:
        return compile_(model, **{"target": "cuda", **options})

    patch.setattr(onnxc, "compile", compiled)


def before_imports(name: str) -> None:
    """Triton decides when it is imported whether it interprets kernels."""
    if name == "simulated":
        os.environ["TRITON_INTERPRET"] = "1"


def evaluate(graph: Graph, inputs: Sequence[Array]) -> list[Array]:
    """The outputs of an imported graph: of its primitives in numpy, or compiled where a GPU is the target.

    A test of an element type for which there are no GPU kernels yet is skipped there.
    """
    if not is_gpu():
        return interpret(decompose(graph), list(inputs))
    try:
        return list(onnxc.compile(graph, cache=False)(*inputs).values())
    except UnsupportedError as error:
        if str(error).startswith("GPU kernels for"):
            pytest.skip(str(error))
        raise


def compiled_as_it_is(graph: Graph, fusion: FusionOptions | None) -> onnxc.CompiledModel:
    """A graph of primitives, compiled for the GPU without the passes, which would change what a test has built."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "passes", lambda options: [])
        return onnxc.compile(graph, cache=False, fusion=fusion or True)
