"""The documentation runs: its Python and command-line examples, and the examples in docstrings.

In README, CONTRIBUTING and docs/*.md,

- ```python blocks run in order, one interpreter for each file, in a folder that holds `models/digits`. What a
  block prints is compared with the ```text or ```cpp block that follows it, where there is one;
- in ```console blocks, the lines that start with `$ onnxc` run, and must exit with 0. What they print is
  compared with what is shown, except for numbers, which differ from machine to machine;
- `...` stands for anything, and white space does not count.

    python tests/test_docs.py [README.md ...]      # writes what the examples print now, where it differs
"""

from __future__ import annotations

import doctest
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
MODULES = sorted(
    str(p.relative_to(ROOT).with_suffix("")).replace("/", ".")
    for p in [*(ROOT / "onnxc").glob("**/*.py"), *(ROOT / "onnxc/frontends").glob("*.py")]
    if ">>> " in p.read_text()
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])[+-]?\d[\d.]*(?:e[+-]?\d+)?(?![\w.])")
LIKENESS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

# Runs blocks in one interpreter, and gives what each of them printed; the traceback of one that fails.
DRIVER = """
import contextlib, io, json, sys, traceback
blocks, space, printed = json.load(sys.stdin), {"__name__": "__main__"}, []
for text in blocks:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            exec(compile(text, "example", "exec"), space)
        except BaseException:
            json.dump({"failed": text, "error": traceback.format_exc()}, sys.__stdout__)
            sys.exit()
    printed.append(out.getvalue())
json.dump(printed, sys.stdout)
"""


@dataclass
class Example:
    """Something that a file shows to be run. `start` and `end` are where the output that it shows stands."""

    code: str
    shown: str | None
    start: int = 0
    end: int = 0


def python_examples(text: str) -> list[Example]:
    """The Python blocks of a file, each with the output block after it."""
    blocks = list(FENCE.finditer(text))
    found = []
    for block, after in zip(blocks, [*blocks[1:], None], strict=False):
        if block[1] != "python":
            continue
        follows = after is not None and not text[block.end() : after.start()].strip()
        if after is not None and follows and after[1] in ("text", "cpp"):
            found.append(Example(block[2], after[2], after.start(2), after.end(2)))
        else:
            found.append(Example(block[2], None))
    return found


def console_examples(text: str) -> list[Example]:
    """The commands of a file that start with `$ onnxc`, each with the lines after it."""
    found = []
    for block in FENCE.finditer(text):
        if block[1] != "console":
            continue
        for command in re.finditer(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block[2], re.MULTILINE):
            if command[1].startswith("onnxc "):
                at = block.start(2)
                found.append(Example(command[1], command[2], at + command.start(2), at + command.end(2)))
    return found


def run_python(examples: list[Example], folder: Path) -> list[str]:
    """What each block prints. Raises AssertionError with the traceback of one that fails."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], input=json.dumps([e.code for e in examples]), cwd=folder,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout, done.stderr
    result: list[str] | dict[str, str] = json.loads(done.stdout)
    assert isinstance(result, list), f"{result['failed']}\n{result['error']}"  # type: ignore[call-overload]
    return result


def run_command(line: str, folder: Path) -> str:
    """What a command prints. Raises AssertionError where it does not exit with 0."""
    start = "import sys; sys.argv[0] = 'onnxc'; from onnxc.cli import main; main()"
    words = shlex.split(line, comments=True)[1:]
    done = subprocess.run(
        [sys.executable, "-c", start, *words], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return "\n".join(row.rstrip() for row in done.stdout.splitlines()) + "\n"


def masked(text: str) -> str:
    """Without numbers, the lines of tables, whose length depends on them, and stages, of which those that took time
    are printed."""
    text = re.sub(r"(compiled in [\d.]+ s):.*", r"\1", text)
    return NUMBER.sub("#", re.sub("─+", "─", text))


def alike(shown: str, printed: str) -> bool:
    """Whether they are equal, but for white space and what `...` stands for."""
    return doctest.OutputChecker().check_output(shown, printed, LIKENESS)


def workplace(folder: Path) -> Path:
    """A folder as the examples want it."""
    (folder / "models").mkdir()
    (folder / "models" / "digits").symlink_to(ROOT / "models" / "digits")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return workplace(tmp_path)


@pytest.mark.parametrize("name", [f for f in FILES if "```python" in (ROOT / f).read_text()])
def test_python_blocks(name: str, folder: Path) -> None:
    examples = python_examples((ROOT / name).read_text())
    for example, printed in zip(examples, run_python(examples, folder), strict=True):
        if example.shown is not None:
            assert alike(example.shown, printed), f"{example.code}\nprints\n{printed}"


@pytest.mark.parametrize("name", [f for f in FILES if "$ onnxc " in (ROOT / f).read_text()])
def test_console_blocks(name: str, folder: Path) -> None:
    for example in console_examples((ROOT / name).read_text()):
        printed = run_command(example.code, folder)
        assert alike(masked(example.shown or ""), masked(printed)), f"{example.code}\nprints\n{printed}"


@pytest.mark.parametrize("name", FILES)
def test_links_lead_somewhere(name: str) -> None:
    text = FENCE.sub("", (ROOT / name).read_text())
    targets = [t.partition("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in t]
    assert [t for t in targets if t and not (ROOT / name).parent.joinpath(t).exists()] == []


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted and not results.failed


# ---------------------------------------------------------------- writing the files anew


def updates(text: str, folder: Path) -> Iterator[tuple[Example, str]]:
    """The examples whose output is not what is shown, with what they print."""
    examples = python_examples(text)
    for example, printed in zip(examples, run_python(examples, folder) if examples else [], strict=True):
        if example.shown is not None and not alike(example.shown, printed):
            yield example, printed
    for example in console_examples(text):
        printed = run_command(example.code, folder)
        if not alike(masked(example.shown or ""), masked(printed)):
            yield example, printed


def main() -> None:
    os.environ.setdefault("PYTHONPATH", str(ROOT))
    for name in sys.argv[1:] or FILES:
        path = ROOT / name
        text = path.read_text()
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
            os.environ["ONNXC_CACHE"] = cache
            found = sorted(updates(text, workplace(Path(folder))), key=lambda u: -u[0].start)
        for example, printed in found:
            text = text[: example.start] + printed.rstrip() + "\n" + text[example.end :]
        if found:
            path.write_text(text)
            print(f"{name}: {len(found)} outputs written")


if __name__ == "__main__":
    main()
