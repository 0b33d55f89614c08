"""The page of a comparison: verdict, error along the depth of the model, graph, layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnxc.reports.page import rendered

_SCRIPTS = ("common.js", "graph.js", "compare.js")


def compare_page(comparison: Mapping[str, Any], graph: Sequence[Mapping[str, Any]] = (), title: str = "") -> str:
    """The text of a page.

    Args:
        comparison: a comparison's `to_dict()`.
        graph: the model's nodes in order, each with `number`, `op_type`, `name`, `line` and, in `reads`, the numbers of
            the nodes that it reads from. Without them there is no graph.
        title: what the page calls the model.
    """
    ours, theirs = comparison["sides"]
    heading = f"{title or 'model'}: {ours} against {theirs}"
    data = {"kind": "compare", "comparison": comparison, "graph": list(graph)}
    return rendered(f"{title or 'model'}: compare", heading, data, _SCRIPTS)
