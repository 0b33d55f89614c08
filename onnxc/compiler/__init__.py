"""From a model to a compiled one: the stages of a compile, and the cache that saves them.

    model = compile("model.onnx")                 # onnxc.compile
    graph = onnx_file.load("model.onnx")          # or stage by stage:
    program = generate(graph, level(), FusionOptions(), Stages())
    library = build(program, level())

A compiled model is a *manifest* (names, shapes, memory plan, what the report tells) and *sections* (machine
code, weights, source). The cache keeps both in the same one file that ``model.save`` writes.

`options.py` lists the options; `request.py` reads them for this machine and makes the cache keys; `stages.py` has the
stages, `machine_code.py` the last of them, and `making.py` puts them together for a target; `job.py` is one compile, by
way of the cache (`entries.py`) and the autotuner; `api.py` is what users call.
"""

from __future__ import annotations

from onnxc.compiler.api import compile, measure
from onnxc.compiler.job import Measuring
from onnxc.compiler.machine_code import build
from onnxc.compiler.options import CompileOptions
from onnxc.compiler.stages import Stages, generate, prepared, weights_block

__all__ = [
    "CompileOptions",
    "Measuring",
    "Stages",
    "build",
    "compile",
    "generate",
    "measure",
    "prepared",
    "weights_block",
]
