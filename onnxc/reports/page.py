"""One HTML file for a report: data, scripts, styles and libraries in one, so that it opens anywhere, without a network.

Strings of a model are data and nothing else. They go into the page as JSON in which no `<` is left (`embedded`), and
the page's scripts show them as text. The page's policy forbids it to load anything.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from onnxc.errors import about_file

ASSETS, TEMPLATES = "assets", "templates"
LIBRARIES = ("graphs.js", "plots.js", "tables.js")  # vendored: see bundles/ in the repository
_FOOTER = "Made by onnxc. This file holds everything it needs: it loads nothing, and sends nothing."


def rendered(title: str, heading: str, data: Mapping[str, Any], scripts: Sequence[str]) -> str:
    """The text of a page.

    Args:
        title: of the window.
        heading: the first line of the page.
        data: what the scripts show, as JSON can write it (numbers that are not finite become null).
        scripts: names of the assets that do so, in order.
    """
    page: str = _template().render(
        title=title,
        heading=heading,
        data=embedded(data),
        scripts=[asset(name) for name in (*LIBRARIES, *scripts)],
        page_css=asset("page.css"),
        tables_css=asset("tables.css"),
        licences=asset("LICENSES.txt"),
        footer=_FOOTER,
    )
    return page


def written(path: str | os.PathLike[str], page: str) -> None:
    """Writes a page to a file; what in a name is no character is spelled out. Raises OSError where that fails."""
    path = os.fspath(path)  # no number, which `open` would take for an open file
    with about_file(path), open(path, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
        file.write(page)


def embedded(data: Any) -> str:
    r"""JSON that can stand in a script element, whatever its strings are.

    >>> embedded({"name": "</script><!--", "nan": float("nan")})
    '{"name":"\\u003c/script\\u003e\\u003c!--","nan":null}'
    """
    text = json.dumps(_finite(data), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


@cache
def asset(name: str) -> str:
    """The text of a file of `assets/`."""
    return resources.files("onnxc.reports").joinpath(ASSETS, name).read_text(encoding="utf-8")


@cache
def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("onnxc.reports", TEMPLATES)
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template("report.html")
