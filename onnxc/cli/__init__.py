"""The command line: `onnxc info | compile | run | compare | explain | profile | bench | tune`, a file for each command.

Commands import what they need when they run, so that `onnxc --help` is quick. Results go to standard output,
progress and errors to standard error. Exit codes: 0 done (for compare: the outputs agree), 1 the outputs
differ, 2 an error.
"""

from __future__ import annotations

import os
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
from onnxc.tools.options import app

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
    try:
        app()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that flushing at exit does not fail again
        raise SystemExit(141) from None
