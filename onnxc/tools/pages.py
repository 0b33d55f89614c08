"""Pages that need a model beside the results."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from onnxc.frontends import onnx_file
from onnxc.frontends.onnx_file import InputShapes, Model
from onnxc.ir.graph import Graph
from onnxc.reports.compare import compare_page
from onnxc.reports.page import written

if TYPE_CHECKING:
    from onnxc.tools.compare.results import Comparison


def write_comparison(
    path: str | os.PathLike[str],
    comparison: Comparison,
    model: Model | None = None,
    *,
    input_shapes: InputShapes | None = None,
    title: str = "",
) -> None:
    """Writes a comparison as one HTML file.

    Args:
        path: the file.
        model: the one whose nodes the layers are numbered by: the page then has its graph.
        input_shapes: as the model was compared.
        title: what the page calls the model; by default the name of its file.

    Raises:
        OSError: the file cannot be written.
        ModelError: `model` is no model.
    """
    graph = [] if model is None else list(nodes_of(onnx_file.load(model, input_shapes=input_shapes or {})))
    known = os.path.basename(os.fspath(model)) if isinstance(model, (str, os.PathLike)) else ""
    written(path, compare_page(comparison.to_dict(), graph, title or known))


def nodes_of(graph: Graph) -> Iterator[dict[str, Any]]:
    """The nodes of an imported graph, with the numbers of those that each reads from. Bodies of control flow belong to
    their node.
    """
    for node in graph.nodes:
        if node.origin:
            own = node.origin[0]
            before = {v.node.origin[0].number for v in node.operands if v.node is not None and v.node.origin}
            yield {
                "number": own.number, "op_type": own.op_type, "name": own.name, "line": own.line,
                "reads": sorted(before - {own.number}),
            }  # fmt: skip
