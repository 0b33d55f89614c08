"""`onnxc compare`: two runs of a model, where they differ, and who is right."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnxc.tools.options import (
    AsJson,
    Compiling,
    Given,
    Html,
    Model,
    a_folder,
    beside_the_model,
    command,
    fail,
    output,
    print_json,
    progress,
    say,
)

if TYPE_CHECKING:
    from onnxc.tools.compare.results import Comparison


Second = Annotated[
    str | None,
    typer.Argument(metavar="SIDE", help="The same as --reference: a second ONNX file, say.", show_default=False),
]
Samples = Annotated[int, typer.Option(min=1, help="Sets of random inputs.")]
KeepWorst = Annotated[bool, typer.Option("--keep-worst", help="Show only the worst sample of each output.")]
Rtol = Annotated[float, typer.Option(help="Tolerance relative to each element.")]
Atol = Annotated[float, typer.Option(help="Tolerance relative to the output's largest value.")]
Tolerance = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DTYPE|OP=1e-3",
        help="Of layers, relative to the largest value: float16=1e-2, Softmax=1e-4. Repeatable.",
        show_default=False,
    ),
]
Reference = Annotated[
    str | None,
    typer.Option(
        metavar="SIDE",
        help="onnxruntime (:basic, :extended, :all optimize), onnx (its evaluator), float64, onnxc, another "
        "FILE.onnx (FILE.onnx@float64), or saved outputs: FILE.npz, a folder of output_0.pb.",
        show_default="onnxruntime",
    ),
]
Ours = Annotated[
    str | None,
    typer.Option(
        metavar="SIDE",
        help="What is judged: onnxc; onnxruntime where the reference is another file.",
        show_default=False,
    ),
]
Layers = Annotated[bool, typer.Option("--layers", help="Compare every tensor inside, too.")]
Bisect = Annotated[
    str | None,
    typer.Option(
        metavar="nodes|passes|fusion|precision", help="Look for what makes the difference.", show_default=False
    ),
]
Folder = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FOLDER",
        help="Of --bisect nodes: the smallest failing model.",
        callback=a_folder,
        show_default=False,
    ),
]


@command
def compare(
    model: Model,
    given: Given,
    compiling: Compiling,
    second: Second = None,
    samples: Samples = 1,
    keep_worst: KeepWorst = False,
    rtol: Rtol = 1e-3,
    atol: Atol = 1e-5,
    tolerance: Tolerance = None,
    reference: Reference = None,
    ours: Ours = None,
    layers: Layers = False,
    bisect: Bisect = None,
    folder: Folder = None,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Compare a model's answers with onnxruntime's, or any two sides.

    Floats that differ by more than the tolerance are judged by the same graph in float64: ours may be at most twice as
    far from it as the reference. Integers must be equal. --inputs also takes images, wav files, folders of samples, and
    FILE.py:FUNCTION. Exit code: 0 agree, 1 differ (or a layer is at fault), 2 error.

    \b
    Examples:
      onnxc compare model.onnx
      onnxc compare model.onnx --samples 5 --dim batch=3
      onnxc compare model.onnx --inputs inputs.npz --rtol 1e-4
      onnxc compare model.onnx --target cuda --dtype float16 --rtol 1e-2 --atol 1e-2
      onnxc compare model.onnx --layers --html report.html
      onnxc compare model.onnx --layers --json > report.json
      onnxc compare model.onnx --bisect nodes --output smallest
      onnxc compare quantized.onnx model.onnx --layers
    """
    from onnxc.tools import compare as tool
    from onnxc.tools.compare.bounds import parse_tolerances

    if second is not None and reference is not None:
        fail(f"there is one reference, and two are given: {second!r}, and --reference {reference!r}")
    if folder is not None and bisect != "nodes":
        fail("--output is where --bisect nodes writes the smallest model; nothing else is written there")
    reference = next((side for side in (second, reference) if side is not None), "onnxruntime")
    beside_the_model(model, html)
    beside_the_model(_file(reference), html)
    with progress(f"comparing {model}") as tell:
        result = tool.compare(
            model,
            _inputs(model, given, compiling),
            ours=ours,
            reference=reference,
            samples=samples,
            seed=given.seed,
            keep_worst=keep_worst,
            layers=layers,
            bisect=bisect,
            folder=folder or ("compare-smallest" if bisect == "nodes" else None),
            rtol=rtol,
            atol=atol,
            tolerances=parse_tolerances(tolerance or []),
            dims=given.dims,
            **compiling.everything,
            progress=tell,
        )
        if html:
            tell("write")
            _write_page(html, result, model, reference, compiling)
    if as_json:
        print_json(result.to_dict())
    else:
        output().print(result)
    if html:
        say(f"written to {html}", err=as_json)
    raise typer.Exit(0 if result.agree and not result.faults else 1)


def _inputs(model: str, given: Given, compiling: Compiling) -> Iterable[Mapping[str, Any]] | None:
    """The samples that --inputs names; None where they are random."""
    from onnxc.frontends import onnx_file
    from onnxc.tools.data import samples_of

    if given.inputs == "random":
        return None
    return samples_of(given.inputs, onnx_file.load(model, input_shapes=compiling.shapes))


def _file(side: str) -> str:
    """The file of `other.onnx@float64`; the name of a file may have an @ as well."""
    return side if os.path.exists(side) else side.rpartition("@")[0] or side


def _write_page(path: str, result: Comparison, model: str, reference: str, compiling: Compiling) -> None:
    from onnxc.tools.pages import write_comparison

    file = _file(reference)
    other = file if file.endswith(".onnx") else model  # whose nodes the layers are
    write_comparison(path, result, other, input_shapes=compiling.shapes, title=os.path.basename(model))
