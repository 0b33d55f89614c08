"""`onnxc compile`: a model as one file."""

from __future__ import annotations

import os
import time
from typing import Annotated

import typer

from onnxc.tools.options import Keeping, Model, beside_the_model, command, in_a_folder, progress, say


@command
def compile(
    model: Model,
    output_path: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="FILE.onnxc", help="File to write.", callback=in_a_folder, show_default=False
        ),
    ],
    compiling: Keeping,
    cache: Annotated[bool, typer.Option(help="Use and fill the cache of compiled models.")] = True,
) -> None:
    """Compile a model to one file, which needs no compiler to load.

    \b
    Examples:
      onnxc compile model.onnx --output model.onnxc
      onnxc compile model.onnx -o model.onnxc --cpu x86-64-v3
      onnxc compile model.onnx -o fixed.onnxc --input-shape image=1,3,224,224
      onnxc compile model.onnx -o gpu.onnxc --target cuda:sm_80,sm_90 --dtype float16
    """
    from onnxc.reports.figures import size

    beside_the_model(model, output_path)
    start = time.perf_counter()
    with progress(f"compiling {model}") as tell:
        compiled = compiling.compile(model, tell, cache)
        tell("save")
        compiled.save(output_path)
    seconds = time.perf_counter() - start
    counts = compiled.explain().counts
    say(
        f"{output_path}: {counts['kernels']} kernel calls ({counts['functions']} distinct functions),"
        f" {size(os.path.getsize(output_path))}, in {seconds:.1f} s"
    )
