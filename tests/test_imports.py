"""Imports inside of functions have a reason that CONTRIBUTING.md names, or one in a comment of their own."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
# What commands and measured processes import is what they run: `onnxc --help` starts without the compiler.
COMMANDS = ("onnxc/cli/", "onnxc/tools/options.py", "onnxc/tools/worker.py")
# Packages that may be absent, or that take long to import and are seldom needed; the modules of the GPU target.
LATE = r"PIL|jinja2|onnx\.reference|onnxruntime|openvino|rich|safetensors|torch|triton|onnxc\.(gpu|runtime\.cuda)"
LATE_IMPORT = re.compile(rf"(import|from) ({LATE})\b|from onnxc import gpu\b")


def unexplained(path: Path) -> list[str]:
    """The imports inside of functions of a file for which no reason is given."""
    found, types_only, in_text = [], False, False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line and not line.startswith((" ", "#")):
            types_only = line.startswith("if TYPE_CHECKING")
        statement = re.fullmatch(r" +((from [\w.]+ )?import \S.*)", line)
        in_text ^= line.count('"""') % 2 == 1
        if not statement or types_only or in_text:
            continue
        if not LATE_IMPORT.match(statement[1]) and "  # " not in line:
            found.append(f"{path.relative_to(ROOT)}:{number}: {statement[1]}")
    return found


def test_imports_inside_of_functions_have_a_reason() -> None:
    files = [p for folder in ("onnxc", "frontends") for p in ROOT.glob(f"{folder}/**/*.py")]
    assert len(files) > 400
    assert [row for p in files if not str(p.relative_to(ROOT)).startswith(COMMANDS) for row in unexplained(p)] == []
