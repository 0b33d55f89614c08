"""The command line: `onnxc info | compile | run | compare | explain | bench | tune`.

Commands import what they need when they run, so that `onnxc --help` is quick. Results go to standard output,
progress and errors to standard error. Exit codes: 0 done (for compare: the outputs agree), 1 the outputs
differ, 2 an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnxc.tools.options import (
    AnyModel,
    AsJson,
    Compiling,
    Given,
    InputShape,
    Model,
    Seconds,
    Target,
    Tuned,
    app,
    command,
    fail,
    output,
    print_json,
    progress,
    shapes_of,
)

if TYPE_CHECKING:
    from rich.console import Console

    from onnxc.report import Report
    from onnxc.runtime.signature import Tensor
    from onnxc.runtime.staged import Plain


def types_of(tensors: Sequence[Tensor | Plain]) -> dict[str, str]:
    """Inputs or outputs of a compiled model: `{"x": "float32[batch, 3]"}`; onnxruntime's word for what is no tensor."""
    from onnxc.runtime.signature import Tensor

    def text(t: Tensor | Plain) -> str:
        if not isinstance(t, Tensor):
            return t.type
        return f"{t.dtype.name}[{', '.join('?' if d is None else str(d) for d in t.dims)}]"

    return {t.name: text(t) for t in tensors}


def print_types(console: Console, title: str, types: Mapping[str, str]) -> None:
    """Inputs or outputs, one on a line."""
    from rich.markup import escape

    console.print(f"[bold]{title}[/]")
    width = max((len(name) for name in types), default=0)
    for name, type_ in types.items():
        console.print(f"  {escape(name.ljust(width))}  {escape(type_)}")


# ---------------------------------------------------------------- the commands


@command
def info(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="An ONNX file, or a saved .onnxc file.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what is in a model: inputs, outputs, ops and whether they are supported, weights.

    Without a model: what onnxc sees of this machine, and how fast it is at most.

    \b
    Examples:
      onnxc info model.onnx
      onnxc info model.onnxc --json
      onnxc info
    """
    from onnxc.tools.info import is_saved_model

    if model is None:
        show_machine(as_json)
        return
    if is_saved_model(model):
        show_saved(model, as_json)
        return
    from onnxc.report import size
    from onnxc.tools.info import model_info

    found = model_info(model)
    if as_json:
        print_json(found.to_dict())
        return
    console = output()
    opsets = ", ".join(f"{domain} {version}" for domain, version in found.opsets.items())
    console.print(
        f"{found.name or 'model'}: opset {opsets}" + (f", by {found.producer}" if found.producer else ""),
        markup=False,
    )
    print_types(console, "inputs", found.inputs)
    print_types(console, "outputs", found.outputs)
    console.print(f"weights: {found.weights} tensors, {size(found.weights_bytes)}", markup=False)
    console.print(f"dynamic dims: {', '.join(found.dims) or 'none'}", markup=False)
    console.print(f"[bold]ops[/] ({sum(op.count for op in found.ops)} nodes)")
    for op in found.ops:
        note = "" if op.supported else f"  [bold red]not supported[/] at opset {op.version}"
        console.print(f"  {op.count:6}  {op.name}{note}")
    missing = sum(not op.supported for op in found.ops)
    console.print("all ops are supported" if not missing else f"{missing} of {len(found.ops)} ops are not supported")


def show_machine(as_json: bool) -> None:
    """`info` for this machine."""
    from onnxc.tools.info import machine_info

    with progress("measuring this machine"):
        found = machine_info()
    if as_json:
        print_json(found.to_dict())
        return
    console = output()
    for title, text in found.lines():
        console.print(f"{title:12}{text}", markup=False)


def show_saved(path: str, as_json: bool) -> None:
    """`info` for a saved model, read without loading it."""
    from onnxc.report import Report, size
    from onnxc.runtime.face import STAGED
    from onnxc.runtime.package import open_package
    from onnxc.runtime.signature import Tensor
    from onnxc.runtime.staged import described

    with open_package(path) as package:
        manifest = package.manifest
    if as_json:
        print_json({key: value for key, value in manifest.items() if key not in ("kernels", "sources")})
        return
    console = output()
    for row in Report.from_manifest(manifest).summary():
        console.print(row)
    for title in ("inputs", "outputs"):
        staged = manifest.get("target") == STAGED
        rows = [described(*row) if staged else Tensor.from_json(row) for row in manifest[title]]
        print_types(console, title, types_of(rows))
    console.print(f"file: {size(os.path.getsize(path))}", markup=False)


@command
def compile(
    model: Model,
    output_path: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE.onnxc", help="File to write.", show_default=False)
    ],
    compiling: Compiling,
    cache: Annotated[bool, typer.Option(help="Use and fill the cache of compiled models.")] = True,
) -> None:
    """Compile a model and save it as one file that needs no compiler to load.

    \b
    Examples:
      onnxc compile model.onnx --output model.onnxc
      onnxc compile model.onnx -o model.onnxc --cpu x86-64-v3
      onnxc compile model.onnx -o fixed.onnxc --input-shape image=1,3,224,224
      onnxc compile model.onnx -o gpu.onnxc --target cuda:sm_80,sm_90 --dtype float16
    """
    import time

    from onnxc.report import size

    start = time.perf_counter()
    with progress(f"compiling {model}") as tell:
        compiled = compiling.compile(model, tell, cache)
        tell("save")
        compiled.save(output_path)
    seconds = time.perf_counter() - start
    counts = compiled.explain().counts
    typer.echo(
        f"{output_path}: {counts['kernels']} kernel calls ({counts['functions']} distinct functions),"
        f" {size(os.path.getsize(output_path))}, in {seconds:.1f} s"
    )


@command
def run(
    model: AnyModel,
    given: Given,
    compiling: Compiling,
    output_path: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE.npz", help="Write the outputs here.", show_default=False),
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
    from onnxc.tools.inputs import write_arrays

    with progress(f"running {model}") as tell:
        compiled = compiling.open(model, tell)
        arrays = given.arrays(compiled, model, compiling.shapes)
        tell("run")
        results = dict(compiled(*arrays.values()).items())
    if output_path:
        write_arrays(output_path, results)
    console = output()
    for name, value in results.items():
        for line in _lines(name, value):
            console.print(line, markup=False)
    if output_path:
        console.print(f"written to {output_path}", markup=False)


def _lines(name: str, value: Any) -> list[str]:
    """An output in a line; a sequence in one for itself and one for each value."""
    if isinstance(value, list):
        inside = [line for k, v in enumerate(value) for line in _lines(f"{name}[{k}]", v)]
        return [f"{name}  a sequence of {len(value)}", *inside]
    if value is None:
        return [f"{name}  nothing"]
    return [f"{name}  {value.dtype}{list(value.shape)}  {_digest(value)}"]


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


@command
def compare(
    model: Model,
    given: Given,
    compiling: Compiling,
    samples: Annotated[int, typer.Option(min=1, help="Sets of random inputs.")] = 1,
    rtol: Annotated[float, typer.Option(help="Tolerance relative to each element.")] = 1e-3,
    atol: Annotated[float, typer.Option(help="Tolerance relative to the output's largest value.")] = 1e-5,
    reference: Annotated[
        str, typer.Option(help="onnxruntime (not optimized), onnx (its evaluator) or float64.")
    ] = "onnxruntime",
    as_json: AsJson = False,
) -> None:
    """Compare onnxc's outputs with onnxruntime's.

    Floats that differ by more than the tolerance are judged by the same graph in float64: onnxc may be at
    most twice as far from it as onnxruntime. Integers must be equal. Exit code: 0 agree, 1 differ, 2 error.

    \b
    Examples:
      onnxc compare model.onnx
      onnxc compare model.onnx --samples 5 --dim batch=3
      onnxc compare model.onnx --inputs inputs.npz --rtol 1e-4
      onnxc compare model.onnx --target cuda --dtype float16 --rtol 1e-2 --atol 1e-2
    """
    from onnxc.tools import compare as tool

    with progress(f"comparing {model}") as tell:
        result = tool.compare(
            model,
            given.read(model, compiling.shapes),
            reference=reference,
            samples=samples,
            seed=given.seed,
            rtol=rtol,
            atol=atol,
            dims=given.dims,
            input_shapes=compiling.shapes,
            compiled=compiling.compile(model, tell),
            progress=tell,
        )
    if as_json:
        print_json(result.to_dict())
    else:
        output().print(result)
    raise typer.Exit(0 if result.agree else 1)


@command
def explain(
    model: AnyModel,
    compiling: Compiling,
    given: Given,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="One line for each kernel, in the order of a run.")
    ] = False,
    source: Annotated[
        str | None, typer.Option(metavar="k3", help="Print a kernel's generated source.", show_default=False)
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Run the model, and show the time of each kernel and its limit.")
    ] = False,
    runs: Annotated[int, typer.Option(min=1, help="Of --profile.")] = 30,
    as_json: AsJson = False,
) -> None:
    """Explain a compiled model: its kernels, what was fused into each and why, memory, compile time.

    \b
    Examples:
      onnxc explain model.onnx
      onnxc explain model.onnxc --kernels
      onnxc explain model.onnx --source k3
      onnxc explain model.onnx --profile --dim batch=8 --threads 2
      onnxc explain model.onnx --json > report.json
    """
    with progress(f"compiling {model}") as tell:
        report = None if profile else saved_for_gpu(model)
        if report is None:
            compiled = compiling.open(model, tell)
            report = compiled.explain()
        if profile:
            arrays = given.arrays(compiled, model, compiling.shapes)
            tell("measure")
            report = compiled.profile(arrays, runs=runs)
    if source is not None:
        if source not in report.sources:
            fail(f"no kernel {source!r}; there are {', '.join(report.sources) or 'none with source'}")
        typer.echo(report.source(source))
    elif as_json:
        print_json(report.to_dict())
    elif kernels:
        print_kernels(report)
    elif report.profile is not None:
        for row in (*report.summary(), report.profile):
            output().print(row)
    else:
        output().print(report)


def saved_for_gpu(path: str) -> Report | None:
    """The report of a saved model for a GPU, which need not be there; None for all else."""
    from onnxc.report import Report
    from onnxc.runtime.package import open_package
    from onnxc.tools.info import is_saved_model

    if not is_saved_model(path):
        return None
    with open_package(path) as package:
        report = Report.from_manifest(package.manifest)
    return report if report.gpu else None


def print_kernels(report: Report) -> None:
    """A table with a line for each kernel."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from onnxc.report import count, size

    console = output()
    for row in report.summary():
        console.print(row)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("#", "function", "kind", "nodes", "reads", "writes", "FLOP"):
        table.add_column(heading, justify="left" if heading in ("function", "kind", "nodes") else "right")
    for k in report.kernels:
        cells = (
            str(k.number),
            k.function,
            k.kind,
            k.label,
            size(k.reads),
            size(k.writes),
            count(k.flops) if k.flops else "",
        )
        table.add_row(*map(Text, cells))
    console.print(table)


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
    """Measure a model in onnxc and in onnxruntime (all optimizations), each in its own process, taking turns.

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


@command
def tune(model: Model, given: Given, target: Target, tune_seconds: Seconds = None, as_json: AsJson = False) -> None:
    """Measure the kernels that a model can choose between, and keep the result for all compiles.

    The result is a readable file, tuning.json in the cache's folder; it counts on machines of the same kind, for the
    same --cpu and --threads or the same GPU, and for every model with kernels of the same shapes. Ctrl-C ends it, and
    what was measured is kept.

    \b
    Examples:
      onnxc tune model.onnx
      onnxc tune model.onnx --target cuda --dtype float16 --tune-seconds 120
      onnxc tune model.onnx --target cuda --record h200.json
    """
    from onnxc.tools import tune as tool

    with progress(f"tuning {model}") as tell:
        result = tool.tune(
            model,
            given.read(model, target.shapes),
            target=target.target,
            cpu=target.cpu,
            threads=target.threads,
            accuracy=target.accuracy,
            precision=target.precision,
            dtype=target.dtype,
            input_shapes=target.shapes,
            dims=given.dims,
            seed=given.seed,
            seconds=tune_seconds,
            record=target.record,
            progress=tell,
        )
    if as_json:
        print_json(result.to_dict())
    else:
        output().print(result)


def show_version(wanted: bool) -> None:
    """`onnxc --version`."""
    if wanted:
        from importlib.metadata import version

        typer.echo(f"onnxc {version('onnxc')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Compile ONNX models to fast programs, run them, and compare them with onnxruntime."""


def main() -> None:
    """The entry point; a closed pipe (`onnxc explain m.onnx | head`) ends it quietly."""
    try:
        app()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that flushing at exit does not fail again
        raise SystemExit(141) from None


if __name__ == "__main__":
    main()
