"""The documentation is complete and points at what is there: options, layers, paths and links."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from onnxc import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]


def options() -> Iterator[tuple[str, str]]:
    """Each command with each of its options; of a switch, the spelling that changes something."""
    group = typer.main.get_command(cli.app)
    assert hasattr(group, "commands")
    for name, command in {"": group, **group.commands}.items():
        for parameter in command.params:
            spellings = parameter.secondary_opts or parameter.opts
            yield from ((name, o) for o in spellings if o.startswith("--"))


def test_the_page_of_the_command_line_has_every_option() -> None:
    page = (ROOT / "docs/cli.md").read_text()
    missing = {(c, o) for c, o in options() if not re.search(rf"{o}\b", page)}
    assert missing == set()


def test_every_command_has_a_section() -> None:
    page = (ROOT / "docs/cli.md").read_text()
    assert {c for c, _ in options() if c} == set(re.findall(r"^## (\w+):", page, re.MULTILINE))


def test_the_layers_are_those_of_the_contract() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    told = re.search(r"imports only what lies below it: ([^.]*)\.", page)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert told and re.findall(r"`(\w+)`", told[1]) == [layer.strip("()") for layer in contracts[0]["layers"]]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_paths_and_links_exist(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    named = re.findall(r"`((?:onnxc|frontends|models|tests|docs|benchmarks|\.ci)/[\w./-]*)`", prose)
    links = [link for link in re.findall(r"\]\(([^)#]+)", prose) if "://" not in link]
    absent = [p for p in named if not (ROOT / p).exists() and not p.startswith("benchmarks/results")]
    absent += [link for link in links if not (page.parent / link).exists()]
    assert absent == []
