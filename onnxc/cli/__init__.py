"""The command line: `onnxc info | compile | run | compare | explain | profile | bench | tune`, a file for each command.

Commands import what they need when they run, so that `onnxc --help` is quick. Results go to standard output,
progress and errors to standard error. Exit codes: 0 done (for compare: the outputs agree), 1 the outputs
differ, 2 an error, 141 a closed pipe.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

# Importing a command's file adds the command: in this order, which is that of the help.
from onnxc.cli import info  # isort: skip
from onnxc.cli import compile  # isort: skip
from onnxc.cli import run  # isort: skip
from onnxc.cli import compare  # isort: skip
from onnxc.cli import explain  # isort: skip
from onnxc.cli import bench  # isort: skip
from onnxc.cli import tune  # isort: skip
from onnxc.tools.options import CLOSED, app

__all__ = ["app", "bench", "compare", "compile", "explain", "info", "main", "run", "tune"]


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
    _open_streams()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where its errors can be told
    except BrokenPipeError:
        _leave_output()
        raise SystemExit(CLOSED) from None
    except OSError as error:  # the disk is full
        _leave_output()
        if "--debug" in sys.argv or os.environ.get("ONNXC_DEBUG"):
            raise
        print(f"onnxc: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _open_streams() -> None:
    """Standard streams that whoever started the process has closed (`onnxc info >&-`) lead nowhere. Files that are
    opened later would have their numbers, and get what is printed.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _leave_output() -> None:
    """What is left to be written goes nowhere: flushing it at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
