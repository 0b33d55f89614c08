"""The command line: `onnxc compile | run | compare | explain | bench | info`.

Commands import what they need when they run, so that `onnxc --help` is quick. Results go to standard output,
progress and errors to standard error. Exit codes: 0 done (for compare: the outputs agree), 1 the outputs
differ, 2 an error.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, ParamSpec

import typer

from onnxc.errors import InternalError, OnnxcError

if TYPE_CHECKING:
    from rich.console import Console

    from onnxc.report import Report
    from onnxc.runtime.signature import Tensor
    from onnxc.tools.inputs import Arrays

P = ParamSpec("P")
Progress = Callable[[str], None]

app = typer.Typer(
    name="onnxc",
    help="Compile ONNX models to fast C++ programs, run them, and compare them with onnxruntime.",
    epilog="onnxc COMMAND --help shows a command's options, with examples.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="An ONNX file.", show_default=False)]
AnyModel = Annotated[
    str, typer.Argument(metavar="MODEL", help="An ONNX file, or a saved .onnxc file.", show_default=False)
]
Cpu = Annotated[str, typer.Option(help="What to compile for: native, x86-64-v3, x86-64-v4, ...")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads of a run (default: one for each CPU).", show_default=False)
]
InputShape = Annotated[
    list[str] | None,
    typer.Option(
        "--input-shape",
        metavar="NAME=1,3,224,224",
        help="Fix the dims of an input; ? leaves one open. Repeatable.",
        show_default=False,
    ),
]
Inputs = Annotated[
    str, typer.Option(metavar="FILE|FOLDER|random", help="An .npz, a folder of input_0.pb, ..., or random.")
]
Seed = Annotated[int, typer.Option(help="Of random inputs.")]
Dim = Annotated[
    list[str] | None,
    typer.Option(
        "--dim",
        metavar="NAME=SIZE",
        help="Size of a dynamic dim in random inputs. Repeatable.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


# ---------------------------------------------------------------- errors, progress, printing


def fail(message: str) -> NoReturn:
    """One clear message on standard error, exit code 2."""
    typer.echo(f"onnxc: error: {message}", err=True)
    raise typer.Exit(2)


def command(function: Callable[P, None]) -> Callable[P, None]:
    """Makes a function a command whose errors are messages."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        debug = bool(kwargs.get("debug")) or bool(os.environ.get("ONNXC_DEBUG"))
        try:
            function(*args, **kwargs)
        except (OnnxcError, OSError, MemoryError) as error:
            if debug or isinstance(error, BrokenPipeError):
                raise
            text = str(error) or type(error).__name__
            fail(f"{text} (a fault of onnxc: please report it)" if isinstance(error, InternalError) else text)

    app.command(no_args_is_help=True)(call)
    return call


@contextmanager
def progress(title: str) -> Iterator[Progress]:
    """A spinner with the name of the stage on standard error, only for a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage: None
        return
    with console.status(Text(title)) as status:
        yield lambda stage: status.update(Text(f"{title}: {stage}"))


def ended(tell: Progress) -> Progress:
    """For the compiler, which names stages as they end."""
    return lambda stage: tell(f"{stage} done")


def output() -> Console:
    """Standard output. Lines are never broken; colours are for terminals (and $NO_COLOR is heeded)."""
    from rich.console import Console

    return Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 160)


def print_json(value: Any) -> None:
    """JSON for programs."""
    typer.echo(json.dumps(value, indent=2))


# ---------------------------------------------------------------- what the commands share


def open_model(
    path: str, tell: Progress, *, cpu: str = "native", threads: int | None = None, shapes: Sequence[str] = ()
) -> Any:
    """A compiled model: compiled from ONNX, or loaded from a saved file."""
    from onnxc.tools.info import is_saved_model
    from onnxc.tools.inputs import parse_shapes

    if is_saved_model(path):
        from onnxc.runtime.model import load

        tell("load")
        return load(path, threads=threads)
    from onnxc.compiler import compile as compile_model

    tell("compile")
    return compile_model(
        path, cpu=cpu, threads=threads, input_shapes=parse_shapes(shapes), progress=ended(tell)
    )


def get_inputs(
    where: str,
    model: str,
    names: Sequence[str],
    *,
    seed: int,
    dims: Sequence[str],
    shapes: Sequence[str] = (),
) -> Arrays:
    """The inputs that a command was asked to use."""
    from onnxc.tools.inputs import parse_dims, parse_shapes, random_inputs, read_inputs

    if where != "random":
        return read_inputs(where, names)
    from onnxc.frontends import onnx_file
    from onnxc.passes.decompose import decompose

    graph = decompose(onnx_file.load(model, input_shapes=parse_shapes(shapes)))
    return random_inputs(graph, seed=seed, dims=parse_dims(dims))


def types_of(tensors: Sequence[Tensor]) -> dict[str, str]:
    """Inputs or outputs of a compiled model: `{"x": "float32[batch, 3]"}`."""
    shapes = {t.name: ", ".join("?" if d is None else str(d) for d in t.dims) for t in tensors}
    return {t.name: f"{t.dtype.name}[{shapes[t.name]}]" for t in tensors}


def print_types(console: Console, title: str, types: Mapping[str, str]) -> None:
    """Inputs or outputs, one on a line."""
    from rich.markup import escape

    console.print(f"[bold]{title}[/]")
    width = max((len(name) for name in types), default=0)
    for name, type_ in types.items():
        console.print(f"  {escape(name.ljust(width))}  {escape(type_)}")


# ---------------------------------------------------------------- the commands


@command
def info(model: AnyModel, as_json: AsJson = False, debug: Debug = False) -> None:
    """Show what is in a model: inputs, outputs, ops and whether they are supported, weights.

    \b
    Examples:
      onnxc info model.onnx
      onnxc info model.onnxc --json
    """
    from onnxc.tools.info import is_saved_model

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
    console.print(
        "all ops are supported" if not missing else f"{missing} of {len(found.ops)} ops are not supported"
    )


def show_saved(path: str, as_json: bool) -> None:
    """`info` for a saved model, read without loading it."""
    from onnxc.report import Report, size
    from onnxc.runtime.package import open_package
    from onnxc.runtime.signature import Tensor

    with open_package(path) as package:
        manifest = package.manifest
    if as_json:
        print_json({key: value for key, value in manifest.items() if key not in ("kernels", "sources")})
        return
    console = output()
    for row in Report.from_manifest(manifest).summary():
        console.print(row)
    for title in ("inputs", "outputs"):
        rows = [Tensor.from_json(row) for row in manifest[title]]
        print_types(console, title, types_of(rows))
    console.print(f"file: {size(os.path.getsize(path))}", markup=False)


@command
def compile(
    model: Model,
    output_path: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE.onnxc", help="File to write.", show_default=False)
    ],
    cpu: Cpu = "native",
    threads: Threads = None,
    input_shape: InputShape = None,
    cache: Annotated[bool, typer.Option(help="Use and fill the cache of compiled models.")] = True,
    debug: Debug = False,
) -> None:
    """Compile a model and save it as one file that needs no compiler to load.

    \b
    Examples:
      onnxc compile model.onnx --output model.onnxc
      onnxc compile model.onnx -o model.onnxc --cpu x86-64-v3
      onnxc compile model.onnx -o fixed.onnxc --input-shape image=1,3,224,224
    """
    import time

    from onnxc.compiler import compile as compile_model
    from onnxc.report import size
    from onnxc.tools.inputs import parse_shapes

    start = time.perf_counter()
    with progress(f"compiling {model}") as tell:
        compiled = compile_model(
            model,
            cpu=cpu,
            threads=threads,
            cache=cache,
            input_shapes=parse_shapes(input_shape or ()),
            progress=ended(tell),
        )
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
    inputs: Inputs = "random",
    output_path: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE.npz", help="Write the outputs here.", show_default=False
        ),
    ] = None,
    seed: Seed = 0,
    dim: Dim = None,
    cpu: Cpu = "native",
    threads: Threads = None,
    input_shape: InputShape = None,
    debug: Debug = False,
) -> None:
    """Run a model once and show its outputs.

    \b
    Examples:
      onnxc run model.onnx
      onnxc run model.onnxc --inputs inputs.npz --output outputs.npz
      onnxc run model.onnx --inputs test_data_set_0
      onnxc run model.onnx --dim batch=4 --dim sequence=77 --seed 1
    """
    from onnxc.tools.inputs import write_arrays

    with progress(f"running {model}") as tell:
        compiled = open_model(model, tell, cpu=cpu, threads=threads, shapes=input_shape or ())
        given = inputs_for(compiled, model, inputs, seed, dim or (), input_shape or ())
        tell("run")
        results = dict(compiled(*given.values()))
    if output_path:
        write_arrays(output_path, results)
    console = output()
    for name, array in results.items():
        console.print(f"{name}  {array.dtype}{list(array.shape)}  {_digest(array)}", markup=False)
    if output_path:
        console.print(f"written to {output_path}", markup=False)


def inputs_for(
    compiled: Any, model: str, where: str, seed: int, dims: Sequence[str], shapes: Sequence[str]
) -> Arrays:
    """Inputs for a compiled model. A saved one has no graph: random integers are then small."""
    from onnxc.tools.info import is_saved_model
    from onnxc.tools.inputs import parse_dims, random_for_signature

    if where == "random" and is_saved_model(model):
        return random_for_signature(
            [(i.name, i.type, i.shape) for i in compiled.get_inputs()], seed=seed, dims=parse_dims(dims)
        )
    return get_inputs(
        where, model, [i.name for i in compiled.get_inputs()], seed=seed, dims=dims, shapes=shapes
    )


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
    inputs: Inputs = "random",
    samples: Annotated[int, typer.Option(min=1, help="Sets of random inputs.")] = 1,
    seed: Seed = 0,
    dim: Dim = None,
    rtol: Annotated[float, typer.Option(help="Tolerance relative to each element.")] = 1e-3,
    atol: Annotated[float, typer.Option(help="Tolerance relative to the output's largest value.")] = 1e-5,
    reference: Annotated[
        str, typer.Option(help="onnxruntime (not optimized), onnx (its evaluator) or float64.")
    ] = "onnxruntime",
    cpu: Cpu = "native",
    threads: Threads = None,
    input_shape: InputShape = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare onnxc's outputs with onnxruntime's.

    Floats that differ by more than the tolerance are judged by the same graph in float64: onnxc may be at
    most twice as far from it as onnxruntime. Integers must be equal. Exit code: 0 agree, 1 differ, 2 error.

    \b
    Examples:
      onnxc compare model.onnx
      onnxc compare model.onnx --samples 5 --dim batch=3
      onnxc compare model.onnx --inputs inputs.npz --rtol 1e-4
    """
    from onnxc.tools import compare as tool
    from onnxc.tools.inputs import parse_dims, parse_shapes, read_inputs

    shapes = parse_shapes(input_shape or ())
    with progress(f"comparing {model}") as tell:
        given = None
        if inputs != "random":
            from onnxc.frontends import onnx_file

            given = read_inputs(inputs, onnx_file.load(model, input_shapes=shapes).input_names)
        result = tool.compare(
            model,
            given,
            reference=reference,
            samples=samples,
            seed=seed,
            rtol=rtol,
            atol=atol,
            dims=parse_dims(dim or ()),
            input_shapes=shapes,
            cpu=cpu,
            threads=threads,
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
    kernels: Annotated[
        bool, typer.Option("--kernels", help="One line for each kernel, in the order of a run.")
    ] = False,
    source: Annotated[
        str | None, typer.Option(metavar="k3", help="Print a kernel's generated C++.", show_default=False)
    ] = None,
    as_json: AsJson = False,
    cpu: Cpu = "native",
    threads: Threads = None,
    input_shape: InputShape = None,
    debug: Debug = False,
) -> None:
    """Explain a compiled model: its kernels, what was fused into each and why, memory, compile time.

    \b
    Examples:
      onnxc explain model.onnx
      onnxc explain model.onnxc --kernels
      onnxc explain model.onnx --source k3
      onnxc explain model.onnx --json > report.json
    """
    with progress(f"compiling {model}") as tell:
        report: Report = open_model(model, tell, cpu=cpu, threads=threads, shapes=input_shape or ()).explain()
    if source is not None:
        if source not in report.sources:
            fail(f"no kernel {source!r}; there are {', '.join(report.sources) or 'none with source'}")
        typer.echo(report.source(source))
    elif as_json:
        print_json(report.to_dict())
    elif kernels:
        print_kernels(report)
    else:
        output().print(report)


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
    inputs: Inputs = "random",
    peer: Annotated[
        list[str] | None,
        typer.Option(help="Engine to compare with (default: onnxruntime). Repeatable.", show_default=False),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each engine.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each engine has.")] = 20,
    seed: Seed = 0,
    dim: Dim = None,
    input_shape: InputShape = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure a model in onnxc and in onnxruntime (all optimizations), each in its own process, taking turns.

    \b
    Examples:
      onnxc bench model.onnx
      onnxc bench model.onnx --threads 1 --rounds 50
      onnxc bench model.onnx --inputs inputs.npz --json
    """
    from onnxc.tools import bench as tool
    from onnxc.tools.inputs import parse_dims, parse_shapes, read_inputs

    shapes = parse_shapes(input_shape or ())
    with progress(f"measuring {model}") as tell:
        given = None
        if inputs != "random":
            from onnxc.frontends import onnx_file

            given = read_inputs(inputs, onnx_file.load(model, input_shapes=shapes).input_names)
        result = tool.bench(
            model,
            given,
            peers=peer or ["onnxruntime"],
            threads=threads,
            rounds=rounds,
            seed=seed,
            dims=parse_dims(dim or ()),
            input_shapes=shapes,
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
    """Compile ONNX models to fast C++ programs, run them, and compare them with onnxruntime."""


def main() -> None:
    """The entry point; a closed pipe (`onnxc explain m.onnx | head`) ends it quietly."""
    try:
        app()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that flushing at exit does not fail again
        raise SystemExit(141) from None


if __name__ == "__main__":
    main()
