"""Scopes of generated C++: lines, names that are in scope, and terms that have been computed there."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

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
    includes: frozenset[str] = frozenset()
    before: list[str] = field(default_factory=list)  # statements of the program ahead of the call
    scratch: str = "0"
    kind: str = "loops"


def indent(lines: list[str], by: int = 1) -> list[str]:
    """Lines moved to the right."""
    return ["  " * by + line for line in lines]


_DEFINES = re.compile(r"const (?:V<\w+>|i64|vl|vi) (\w+) = ")


def interleave(lines: list[str], loop: str, at: str, accumulators: list[str], copies: int) -> list[str] | None:
    """A vector loop's body for several vectors from `at` on, statement by statement in turn.

    None where the body has other statements than definitions, updates and stores in one line each. Copy k calls its
    own names with `_k` at the end; `x` before an accumulator's name is how the body calls it.
    """
    if any(not line.endswith(";") or line.startswith(("{", "if", "for", "else", "const auto", "V<")) for line in lines):
        return None
    own = {m.group(1) for line in lines for m in [_DEFINES.match(line)] if m}
    out = [f"const i64 {loop}_{k} = {at} + {k} * VL;" for k in range(copies)]
    for line in lines:
        for k in range(copies):
            names = {n: f"{n}_{k}" for n in own | {loop}} | {f"x{a}": f"{a}_{k}" if k else a for a in accumulators}
            out.append(re.sub(r"\b\w+\b", lambda m, names=names: names.get(m.group(), m.group()), line))
    return out
