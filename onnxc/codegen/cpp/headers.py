"""Which headers a kernel includes: those that define what its text names.

A small program takes the compiler less time than all of the headers do.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

INCLUDE = Path(__file__).parent / "include"

_NAME = re.compile(r"\b(?:v|h|ox)_\w+")
# What lines without indentation define: functions and types.
_DEFINED = re.compile(
    r"^(?:(?:OX|template) [^(\n]*\b((?:v|h|ox)_\w+)\(|struct (ox_\w+) |typedef [^(\n]*\b(ox_\w+);)", re.MULTILINE
)


def headers_of(text: str) -> set[str]:
    """The headers that define functions and types of a kernel's text."""
    table = defined()
    return {header for name in set(_NAME.findall(text)) for header in table.get(name, ())}


@functools.cache
def defined() -> dict[str, tuple[str, ...]]:
    """Names, and the headers that define them: one for floats and one for integers, perhaps."""
    table: dict[str, tuple[str, ...]] = {}
    for path in sorted(INCLUDE.glob("*.h")):
        for name in {name for found in _DEFINED.findall(path.read_text(encoding="utf-8")) for name in found if name}:
            table[name] = (*table.get(name, ()), path.name)
    return table
