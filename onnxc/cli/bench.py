"""`onnxc bench`: the speed of a model here and in other engines."""

from __future__ import annotations

from typing import Annotated

import typer

from onnxc.tools.options import (
    AsJson,
    Given,
    InputShape,
    Model,
    Tuned,
    command,
    output,
    print_json,
    progress,
    shapes_of,
)


@command
def bench(
    model: Model,
    given: Given,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="Engine to compare with: onnxruntime (default) or openvino. Repeatable.", show_default=False),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each engine.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each engine has.")] = 20,
    input_shape: InputShape = None,
    tuned: Tuned = True,
    as_json: AsJson = False,
) -> None:
    """Measure a model in onnxc and in onnxruntime, taking turns.

    Each engine has a process of its own; onnxruntime has all its optimizations.

    \b
    Examples:
      onnxc bench model.onnx
      onnxc bench model.onnx --peer onnxruntime --peer openvino
      onnxc bench model.onnx --threads 1 --rounds 50
      onnxc bench model.onnx --inputs inputs.npz --json
    """
    from onnxc.tools import bench as tool

    shapes = shapes_of(input_shape)
    with progress(f"measuring {model}") as tell:
        result = tool.bench(
            model,
            given.read(model, shapes),
            peers=peer or ["onnxruntime"],
            threads=threads,
            rounds=rounds,
            seed=given.seed,
            dims=given.dims,
            input_shapes=shapes,
            tuned=tuned,
            progress=tell,
        )
    if as_json:
        print_json(result.to_dict())
    else:
        output().print(result)
