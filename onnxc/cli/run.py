"""`onnxc run`: a model once."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from onnxc.tools.options import AnyModel, Given, Keeping, beside_the_model, command, in_a_folder, output, progress, say


@command
def run(
    model: AnyModel,
    given: Given,
    compiling: Keeping,
    output_path: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE.npz",
            help="Write the outputs here.",
            callback=in_a_folder,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run a model once and show its outputs.

    \b
    Examples:
      onnxc run model.onnx
      onnxc run model.onnxc --inputs inputs.npz --output outputs.npz
      onnxc run model.onnx --inputs test_data_set_0
      onnxc run model.onnx --dim batch=4 --dim sequence=77 --seed 1
      onnxc run model.onnx --target cuda
    """
    from onnxc.reports.terminal import as_line
    from onnxc.tools.inputs import write_arrays

    if output_path:
        beside_the_model(model, output_path)
    with progress(f"running {model}") as tell:
        compiled = compiling.open(model, tell)
        arrays = given.arrays(compiled, model, compiling.shapes)
        tell("run")
        results = dict(zip((t.name for t in compiled.get_outputs()), compiled.run(None, arrays), strict=True))
    if output_path:
        write_arrays(output_path, results)
    console = output()
    for name, value in results.items():
        for line in _lines(name, value):
            console.print(as_line(line))
    if output_path:
        say(f"written to {output_path}")


def _lines(name: str, value: Any) -> list[str]:
    """An output in a line; a sequence in one for itself and one for each value."""
    if isinstance(value, list):
        inside = [line for k, v in enumerate(value) for line in _lines(f"{name}[{k}]", v)]
        return [f"{name}  a sequence of {len(value)}", *inside]
    if value is None:
        return [f"{name}  nothing"]
    dtype = "string" if value.dtype.hasobject else value.dtype
    return [f"{name}  {dtype}{list(value.shape)}  {_digest(value)}"]


def _digest(array: Any) -> str:
    """A tensor in a line: its range and its first elements."""
    import numpy as np

    if not array.size:
        return "empty"
    first = " ".join(f"{x:.6g}" if array.dtype.kind == "f" else str(x) for x in array.reshape(-1)[:4])
    more = " ..." if array.size > 4 else ""
    if array.dtype.kind not in "fiu":
        return f"{first}{more}"
    nans = int(np.isnan(array).sum()) if array.dtype.kind == "f" else 0
    least, most = (
        np.nanmin(array) if nans < array.size else np.nan,
        np.nanmax(array) if nans < array.size else np.nan,
    )
    return f"{first}{more}  from {least:.6g} to {most:.6g}" + (f", {nans} NaN" if nans else "")
