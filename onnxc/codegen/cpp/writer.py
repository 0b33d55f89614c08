"""Scopes of generated C++: lines, names that are in scope, and terms that have been computed there."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from onnxc.choices import Choice
from onnxc.ir.expr import Symbol
from onnxc.ir.graph import Value
from onnxc.loops.terms import Term


@dataclass(eq=False)
class Scope:
    """A block of C++. `available` are the loop symbols and reductions whose values are known here."""

    parent: Scope | None = None
    available: set[object] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)
    terms: dict[Term, str] = field(default_factory=dict)
    lookups: dict[Symbol, str] = field(default_factory=dict)  # data indices that have been read here: their names
    guarded: bool = False
    lanewise: bool = False  # the body of a function of the vector loop's variable, which may be called for single lanes

    def child(self, available: set[object] | None = None, guarded: bool = False) -> Scope:
        return Scope(self, available or set(), guarded=guarded or False)

    def chain(self) -> list[Scope]:
        """This scope and its parents, innermost first."""
        out: list[Scope] = []
        scope: Scope | None = self
        while scope is not None:
            out.append(scope)
            scope = scope.parent
        return out


@dataclass
class KernelSource:
    """A generated kernel: the body of its function, and what it must be called with."""

    text: str
    buffers: list[Value]  # storages, in the order of the call's pointers p0, p1, ...
    items: str  # C++ expression over the size symbols: units of parallel work
    symbols: list[str] = field(default_factory=list)  # dynamic dims that the body uses
    weights: list[tuple[str, int]] = field(default_factory=list)  # packed constants w0, w1, ...: element type, offset
    by_row: dict[int, int] = field(default_factory=dict)  # of packed constants: bytes of a row, where each has its own
    includes: frozenset[str] = frozenset()
    before: list[str] = field(default_factory=list)  # statements of the program ahead of the call
    scratch: str = "0"
    few: str = "0"  # C++ expression: fewer items than this take less time than to wake a thread
    kind: str = "loops"
    choice: Choice | None = None
    named: bool = True  # whether the function's pointers have names: else the body finds them
    unit: tuple[str, str] | None = None  # of a user's kernel: its name, and a translation unit that defines it


def indent(lines: list[str], by: int = 1) -> list[str]:
    """Lines moved to the right."""
    return ["  " * by + line for line in lines]


_DEFINES = re.compile(r"(?:const )?(?:V<\w+>|i64|vl|vi) (\w+)(?: = |\{)")
_WORD = re.compile(r"\b[A-Za-z_]\w*")


def interleave(lines: list[str], loop: str, at: str, accumulators: list[str], copies: int) -> list[str] | None:
    """A vector loop's body for several vectors from `at` on, statement by statement in turn.

    Loops in the body are walked once for all. None where it has other statements than loops,
    definitions, updates and
    stores in one line each. Copy k calls its own names with `_k` at the end; `x` before an accumulator's
    name is how
    the body calls it.
    """
    text = [line.strip() for line in lines]
    own = {m.group(1) for line in text for m in [_DEFINES.match(line)] if m} | {loop}
    out = [f"const i64 {loop}_{k} = {at} + {k} * VL;" for k in range(copies)]
    for line in text:
        if line in ("{", "}") or (line.startswith("for (") and line.endswith("{")):
            if own & set(_WORD.findall(line)):
                return None
            out.append(line)
            continue
        if (
            not line.endswith(";")
            or line.startswith(("{", "if", "for", "else", "const auto", "alignas"))
            or not _one_definition(line)
        ):
            return None
        for k in range(copies):
            names = {n: f"{n}_{k}" for n in own} | {f"x{a}": f"{a}_{k}" if k else a for a in accumulators}
            out.append(_renamed(line, names))
    return out


def _renamed(line: str, names: dict[str, str]) -> str:
    return _WORD.sub(lambda m: names.get(m.group(), m.group()), line)


def _one_definition(line: str) -> bool:
    """A definition of one name with its value, or no definition at all."""
    return _DEFINES.match(line) is not None or not re.match(r"(?:const )?V<\w+> ", line)
