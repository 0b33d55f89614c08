"""`onnxc info`: what is in a model, or what this machine can do."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from onnxc.tools.options import AsJson, command, output, print_json, progress

if TYPE_CHECKING:
    from rich.console import Console

    from onnxc.runtime.signature import Tensor
    from onnxc.runtime.staged_values import Plain


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
    from onnxc.reports.terminal import as_line

    console.print(f"[bold]{title}[/]")
    names = [as_line(name).plain for name in types]
    width = max(map(len, names), default=0)
    for name, type_ in zip(names, types.values(), strict=True):
        console.print(as_line(f"  {name.ljust(width)}  {type_}"))


@command
def info(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="An ONNX file, or a saved .onnxc file.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what is in a model, and whether its ops are supported.

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
    from onnxc.reports.figures import size
    from onnxc.reports.terminal import as_line
    from onnxc.tools.info import model_info

    found = model_info(model)
    if as_json:
        print_json(found.to_dict())
        return
    console = output()
    opsets = ", ".join(f"{domain} {version}" for domain, version in found.opsets.items())
    by = f", by {found.producer}" if found.producer else ""
    console.print(as_line(f"{found.name or 'model'}: opset {opsets}{by}"))
    print_types(console, "inputs", found.inputs)
    print_types(console, "outputs", found.outputs)
    console.print(f"weights: {found.weights} tensors, {size(found.weights_bytes)}", markup=False)
    console.print(as_line(f"dynamic dims: {', '.join(found.dims) or 'none'}"))
    console.print(f"[bold]ops[/] ({sum(op.count for op in found.ops)} nodes)")
    for op in found.ops:
        row = as_line(f"  {op.count:6}  {op.name}")
        if not op.supported:
            row.append("  not supported", "bold red").append(f" at opset {op.version}")
        console.print(row)
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
    from onnxc.report import Report
    from onnxc.reports.figures import size
    from onnxc.reports.tables import summary_lines
    from onnxc.runtime.compiled_model import STAGED
    from onnxc.runtime.package import open_package
    from onnxc.runtime.signature import Tensor
    from onnxc.runtime.staged_values import described

    with open_package(path) as package:
        manifest = package.manifest
    if as_json:
        print_json({key: value for key, value in manifest.items() if key not in ("kernels", "sources")})
        return
    console = output()
    for row in summary_lines(Report.from_manifest(manifest)):
        console.print(row)
    for title in ("inputs", "outputs"):
        staged = manifest.get("target") == STAGED
        rows = [described(*row) if staged else Tensor.from_json(row) for row in manifest[title]]
        print_types(console, title, types_of(rows))
    console.print(f"file: {size(os.path.getsize(path))}", markup=False)
