"""What the commands of the command line share: their options, how they report errors and progress, how they print.

Options that several commands have are fields of a class; a command has a parameter of that class:

    @command
    def run(model: AnyModel, given: Given, compiling: Compiling) -> None: ...
"""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_type_hints

import typer

from onnxc.errors import InputError, InternalError, OnnxcError, spelled

if TYPE_CHECKING:
    from rich.console import Console

    from onnxc.random_inputs import Arrays
    from onnxc.runtime.compiled_model import CompiledModel

Progress = Callable[[str], None]
Shapes = dict[str, tuple[int | str | None, ...]]
_KEYWORD = Parameter.KEYWORD_ONLY
CLOSED = 141  # the exit code where nobody reads what is printed: a shell's, of a process that SIGPIPE ends

app = typer.Typer(
    name="onnxc",
    help="Compile ONNX models to fast programs, run them, and compare them with onnxruntime.",
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


def in_a_folder(path: str | None) -> str | None:
    """A path to write to: that it has a folder is looked at before there is anything to write."""
    if path is not None and not os.path.isdir(os.path.dirname(path) or "."):
        fail(f"there is no folder for {path!r}")
    if path is not None and os.path.isdir(path or "."):
        fail(f"{path!r} is a folder, not a file to write")
    if path is not None and os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
        fail(f"{path!r} is there, and is not a regular file: name another one to write")
    return path


def a_folder(path: str | None) -> str | None:
    """A folder to write to, which need not be there."""
    if path is not None and os.path.exists(path) and not os.path.isdir(path):
        fail(f"{path!r} is there, and is no folder: name another one to write to")
    return path


def beside_the_model(model: str, *paths: str | None) -> None:
    """Fails where a command would write over the model that it reads."""
    for path in paths:
        if path and os.path.exists(model) and os.path.exists(path) and os.path.samefile(model, path):
            fail(f"{path!r} would replace the model itself: name another file to write")


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Html = Annotated[
    str | None,
    typer.Option(
        "--html", metavar="FILE.html", help="Write a page for a browser.", callback=in_a_folder, show_default=False
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
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

Tuned = Annotated[
    bool, typer.Option("--tuned/--no-tuned", help="Choose kernels as was measured, where it was; or by a cost model.")
]
RecordFile = Annotated[
    str | None,
    typer.Option(
        "--record", metavar="FILE.json", help="Measurements, in place of the cache's tuning.json.", show_default=False
    ),
]
Seconds = Annotated[
    float | None,
    typer.Option(
        "--tune-seconds", min=0, help="After so many, no further candidates are measured.", show_default=False
    ),
]


@dataclass(frozen=True)
class Given:
    """Which inputs a command uses."""

    inputs: Annotated[
        str, typer.Option(metavar="FILE|FOLDER|random", help="An .npz, a folder of input_0.pb, ..., or random.")
    ] = "random"
    seed: Annotated[int, typer.Option(help="Of random inputs.")] = 0
    dim: Annotated[
        list[str] | None,
        typer.Option(
            "--dim",
            metavar="NAME=SIZE",
            help="Size of a dynamic dim in random inputs. Repeatable.",
            show_default=False,
        ),
    ] = None

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of dynamic dims."""
        from onnxc.tools.inputs import parse_dims

        return parse_dims(self.dim or ())

    def read(self, model: str, shapes: Shapes) -> Arrays | None:
        """The inputs for an ONNX file; None where they are to be random."""
        if self.inputs == "random":
            return None
        from onnxc.frontends import onnx_file
        from onnxc.tools.inputs import inputs_of

        return inputs_of(self.inputs, onnx_file.load(model, input_shapes=shapes))

    def arrays(self, compiled: CompiledModel, model: str, shapes: Shapes) -> Arrays:
        """The inputs for a compiled model, but for those with a default that no file gives. A saved model has no graph:
        random integers are then small.
        """
        from onnxc.random_inputs import random_for_signature, random_inputs
        from onnxc.tools.info import is_saved_model
        from onnxc.tools.inputs import read_inputs

        tensors, manifest = compiled.get_inputs(), compiled.manifest
        defaults = manifest.get("defaults", ())
        if self.inputs != "random":
            names = [t.name for t in tensors]
            types = {t.name: t.dtype.numpy for t in tensors if hasattr(t, "dtype")}  # a sequence has none
            return read_inputs(self.inputs, names, optional=defaults, fixed=manifest.get("fixed", ()), types=types)
        tensors = [t for t in tensors if t.name not in defaults]
        if is_saved_model(model):
            return random_for_signature([(t.name, t.type, t.shape) for t in tensors], seed=self.seed, dims=self.dims)
        from onnxc.frontends import onnx_file
        from onnxc.passes.decompose import decompose

        graph = decompose(onnx_file.load(model, input_shapes=shapes, keep_inputs=list(defaults)), staged=True)
        return random_inputs(graph, seed=self.seed, dims=self.dims)


@dataclass(frozen=True)
class Target:
    """What a command compiles for: for the CPU or for a GPU."""

    target: Annotated[
        str,
        typer.Option(
            metavar="cpu|cuda|cuda:sm_90",
            help="The CPU; this machine's GPU; or GPUs by architecture, on any machine (cuda:sm_80,sm_90).",
        ),
    ] = "cpu"
    cpu: Annotated[str, typer.Option(help="What to compile for: native, x86-64-v3, x86-64-v4, ...")] = "native"
    threads: Threads = None
    input_shape: InputShape = None
    accuracy: Annotated[
        str,
        typer.Option(
            metavar="default|strict", help="strict: no algorithm that rounds more coarsely (Winograd, Strassen)."
        ),
    ] = "default"

    precision: Annotated[
        str, typer.Option(metavar="float32|tf32|tf32x3", help="How a GPU multiplies float32 matrices.")
    ] = "float32"
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="float16|bfloat16", help="Convert a float32 model; inputs and outputs stay.", show_default=False
        ),
    ] = None
    record: RecordFile = None

    @property
    def shapes(self) -> Shapes:
        """Fixed dims of inputs."""
        return shapes_of(self.input_shape)

    @property
    def keywords(self) -> dict[str, Any]:
        """What `onnxc.compile` and `onnxc.tune` take."""
        names = ("target", "cpu", "threads", "accuracy", "precision", "dtype")
        return {name: getattr(self, name) for name in names} | {"input_shapes": self.shapes}


@dataclass(frozen=True)
class Compiling(Target):
    """How a command compiles."""

    mode: Annotated[
        str,
        typer.Option(
            metavar="default|max-autotune", help="max-autotune: measure kernels first, where that was not done."
        ),
    ] = "default"
    tune_seconds: Seconds = None
    tuned: Tuned = True

    @property
    def everything(self) -> dict[str, Any]:
        """What `onnxc.compile` and `onnxc.compare` take."""
        names = ("mode", "tune_seconds", "tuned", "record")
        return self.keywords | {name: getattr(self, name) for name in names}

    @property
    def kept(self) -> dict[str, Any]:
        """What `onnxc.compile` takes, and no comparison."""
        return {}

    def open(self, path: str, tell: Progress) -> CompiledModel:
        """A compiled model: compiled from ONNX, or loaded from a saved file."""
        from onnxc.tools.info import is_saved_model

        if is_saved_model(path):
            from onnxc.runtime.opening import load

            idle = [f for f in fields(self) if f.name != "threads" and getattr(self, f.name) != f.default]
            if idle:
                names = (f"{'no-' if f.default is True else ''}{f.name.replace('_', '-')}" for f in idle)
                options = ", ".join(f"--{name}" for name in names)
                raise InputError(f"{path!r} is compiled already: {options} would change nothing")
            tell("load")
            return load(path, threads=self.threads)
        tell("compile")
        return self.compile(path, tell)

    def compile(self, path: str, tell: Progress, cache: bool = True) -> CompiledModel:
        """An ONNX file, compiled."""
        from onnxc.compiler import compile as compile_model

        return compile_model(
            path,
            **self.everything,
            **self.kept,
            cache=cache,
            progress=lambda stage: tell(f"{stage} done"),  # the compiler names stages as they end
        )


@dataclass(frozen=True)
class Keeping(Compiling):
    """How a command compiles that only compiles or runs."""

    keep_input: Annotated[
        list[str] | None,
        typer.Option(
            "--keep-input",
            metavar="NAME",
            help="An input that the model has an initializer for stays one, with that default. Repeatable.",
            show_default=False,
        ),
    ] = None

    @property
    def kept(self) -> dict[str, Any]:
        return {"keep_inputs": self.keep_input or ()}


def shapes_of(options: Sequence[str] | None) -> Shapes:
    """What --input-shape says."""
    from onnxc.tools.inputs import parse_shapes

    return parse_shapes(options or ())


# ---------------------------------------------------------------- errors, progress, printing


def fail(message: str) -> NoReturn:
    """One message on standard error, exit code 2. What a model calls its nodes is shown in it, and never obeyed."""
    text = "\n".join(map(spelled, message.split("\n")))
    typer.echo(f"onnxc: error: {text}", err=True)
    raise typer.Exit(2)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Makes a function a command: its errors are messages, and option groups among its parameters are options.

    Every command gets `--debug`.
    """
    hints = get_type_hints(function, include_extras=True)
    parameters: list[Parameter] = []
    groups: dict[str, tuple[Any, list[str]]] = {}
    for parameter in signature(function).parameters.values():
        kind = hints[parameter.name]
        if not is_dataclass(kind):
            parameters.append(parameter.replace(annotation=kind))
            continue
        types = get_type_hints(kind, include_extras=True)
        options = [Parameter(f.name, _KEYWORD, default=f.default, annotation=types[f.name]) for f in fields(kind)]
        groups[parameter.name] = kind, [option.name for option in options]
        parameters += options
    parameters.append(Parameter("debug", _KEYWORD, default=False, annotation=Debug))

    @functools.wraps(function)
    def call(**given: Any) -> None:
        debug = given.pop("debug") or os.environ.get("ONNXC_DEBUG")
        made = {name: make(**{key: given.pop(key) for key in keys}) for name, (make, keys) in groups.items()}
        try:
            with nullcontext() if debug else _warnings_told():
                function(**given, **made)
        except (OnnxcError, OSError, MemoryError) as error:
            if isinstance(error, BrokenPipeError):  # typer would exit with 1, as where the sides of a comparison differ
                raise typer.Exit(CLOSED) from error
            if debug:
                raise
            text = str(error) or type(error).__name__
            fail(f"{text} (a fault of onnxc: please report it)" if isinstance(error, InternalError) else text)

    # Required ones first, as a signature has to have them; typer reads names and types from here.
    ordered = sorted(parameters, key=lambda p: p.default is not Parameter.empty)
    call.__signature__ = Signature([p.replace(kind=_KEYWORD) for p in ordered])  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    app.command(no_args_is_help=any(p.default is Parameter.empty for p in parameters))(call)
    return function


@contextmanager
def _warnings_told() -> Iterator[None]:
    """Warnings as a command says them: without the line of onnxc's own code that they come from."""

    def tell(message: Warning | str, *place: object) -> None:
        say(f"onnxc: warning: {message}", err=True)

    with warnings.catch_warnings():
        warnings.showwarning = tell  # type: ignore[assignment]
        yield


@contextmanager
def progress(title: str) -> Iterator[Progress]:
    """A spinner with the name of the stage on standard error, only for a terminal."""
    from rich.text import Text

    from onnxc.reports.terminal import SafeConsole

    console = SafeConsole(stderr=True)
    if not (console.is_terminal and sys.stderr.isatty()):  # $FORCE_COLOR makes a log one that has colours, no terminal
        yield lambda stage: None
        return
    with console.status(Text(title)) as status:
        yield lambda stage: status.update(Text(f"{title}: {stage}"))


def output() -> Console:
    """Standard output. Lines are never broken; colours are for terminals (and $NO_COLOR is heeded)."""
    from onnxc.reports.terminal import SafeConsole

    return SafeConsole(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 160)


def say(text: str, err: bool = False) -> None:
    """A line with names of files in it, which are shown and never obeyed."""
    typer.echo(spelled(text), err=err)


def print_json(value: Any) -> None:
    """JSON for programs."""
    typer.echo(json.dumps(value, indent=2))
