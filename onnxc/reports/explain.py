"""The page of `model.explain()` and `model.profile()`: graph, kernels, memory, passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxc.reports.page import rendered

_SCRIPTS = ("common.js", "graph.js", "explain.js")


def explain_page(report: Mapping[str, Any], passes: Mapping[str, Any] | None, title: str = "") -> str:
    """The text of a page.

    Args:
        report: a report's `to_dict()`.
        passes: a pass log's `to_dict()`, where there is one.
        title: what the page calls the model; by default its graph's name.
    """
    kind = "profile" if report.get("profile") else "explain"
    name = title or str(report.get("name") or "model")
    heading = f"{name}: where the time goes" if kind == "profile" else f"{name}: what it was compiled to"
    return rendered(f"{name}: {kind}", heading, {**report, "kind": kind, "passes": passes}, _SCRIPTS)
