"""`onnxc explain` and `onnxc profile`: what became of each node, and how long it takes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from onnxc.tools.options import (
    AnyModel,
    AsJson,
    Given,
    Html,
    Keeping,
    beside_the_model,
    command,
    fail,
    in_a_folder,
    output,
    print_json,
    progress,
    say,
)

if TYPE_CHECKING:
    from onnxc.report import Report


@command
def explain(
    model: AnyModel,
    compiling: Keeping,
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
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Explain a compiled model: kernels, what is fused and why, memory.

    \b
    Examples:
      onnxc explain model.onnx
      onnxc explain model.onnxc --kernels
      onnxc explain model.onnx --source k3
      onnxc explain model.onnx --profile --dim batch=8 --threads 2
      onnxc explain model.onnx --html report.html
      onnxc explain model.onnx --json > report.json
    """
    beside_the_model(model, html)
    with progress(f"compiling {model}") as tell:
        report = None if profile else saved_for_gpu(model)
        if report is None:
            compiled = compiling.open(model, tell)
            report = compiled.explain()
        if profile:
            arrays = given.arrays(compiled, model, compiling.shapes)
            tell("measure")
            report = compiled.profile(arrays, runs=runs)
        if html:
            tell("write")
            report.to_html(html, title=os.path.basename(model))
    if html:
        say(f"written to {html}", err=as_json)
    if source is not None:
        if source not in report.sources:
            fail(f"no kernel {source!r}; there are {', '.join(report.sources) or 'none with source'}")
        if as_json:
            print_json({source: report.source(source)})
        else:
            typer.echo(report.source(source))
    elif as_json:
        print_json(report.to_dict())
    elif kernels:
        print_kernels(report)
    elif report.profile is not None:
        print_profile(report)
    elif not html:
        output().print(report)


@command
def profile(
    model: AnyModel,
    compiling: Keeping,
    given: Given,
    runs: Annotated[int, typer.Option(min=1, help="Runs to measure.")] = 30,
    html: Html = None,
    trace: Annotated[
        str | None,
        typer.Option(
            "--trace",
            metavar="FILE.json",
            help="Write a trace for Perfetto.",
            callback=in_a_folder,
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a model with a clock around every kernel.

    Which take the time, and how near are they to the machine's limits?

    \b
    Examples:
      onnxc profile model.onnx
      onnxc profile model.onnx --dim batch=8 --threads 2 --runs 100
      onnxc profile model.onnx --html report.html --trace trace.json
      onnxc profile model.onnxc --inputs inputs.npz --json
    """
    beside_the_model(model, html, trace)
    with progress(f"profiling {model}") as tell:
        compiled = compiling.open(model, tell)
        arrays = given.arrays(compiled, model, compiling.shapes)
        tell("measure")
        report = compiled.profile(arrays, runs=runs)
        tell("write")
        if html:
            report.to_html(html, title=os.path.basename(model))
        if trace:
            report.to_trace(trace)
    if as_json:
        print_json(report.to_dict())
    else:
        print_profile(report)
        print_nodes(report)
    for path in filter(None, (html, trace)):
        say(f"written to {path}", err=as_json)


def print_profile(report: Report) -> None:
    """The summary, and the times by kind and by kernel."""
    assert report.profile is not None
    from onnxc.reports.tables import summary_lines

    for row in (*summary_lines(report), report.profile):
        output().print(row)


_SLOWEST = 20  # nodes that are listed


def print_nodes(report: Report) -> None:
    """A table of the nodes of the model that take longest."""
    from onnxc.reports.tables import node_table

    rows = report.node_times()
    whole = sum(row.seconds for row in rows)
    if not whole:
        return
    console = output()
    console.print("nodes of the model, each with its part of its kernels' times (an estimate, by work)", markup=False)
    console.print(node_table(rows[:_SLOWEST], whole))
    if len(rows) > _SLOWEST:
        console.print(f"and {len(rows) - _SLOWEST} more nodes: --json or --html", markup=False)


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
    from onnxc.reports.tables import kernel_table, summary_lines

    for row in (*summary_lines(report), kernel_table(report)):
        output().print(row)
