"""Gathers whose places many rows share: the places and their weights are computed once for a piece of these rows.

A sampled image is read at the same four neighbours in each of its channels. One item takes some pixels, and computes
for all of them where the neighbours are and what they weigh; then it goes through the channels:

    for (i64 pixel = lo; pixel < hi; pixel += VL) ...place[pixel - lo] = y * 100 + x... weight[pixel - lo] = ...
    for (i64 channel = ...) for (i64 pixel = lo; pixel < hi; pixel += VL) ...(image + 10000 * channel)[place[pixel - lo]]...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from onnxc.codegen.cpp import spelling
from onnxc.codegen.cpp.tables import is_dear
from onnxc.codegen.cpp.terms import TermEmitter
from onnxc.codegen.cpp.writer import Scope, indent
from onnxc.ir.expr import Dim, Symbol, symbols
from onnxc.loops.nest import Phase, phase_terms
from onnxc.loops.terms import Guard, Load, Term, children, index_symbols

ROWS = 4  # that share the places, at least
STEP = 4 * 16  # elements: several of the longest vectors
BYTES = 40 << 10  # of all tables of an item: each piece goes over the whole of what is read


@dataclass(frozen=True)
class Shared:
    """What rows have in common: `inner` loops that it does not depend on, the `outer` ones, terms, and addresses."""

    outer: list[tuple[Symbol, Dim]]
    inner: list[tuple[Symbol, Dim]]
    terms: list[Term]
    places: dict[Dim, str]  # and the type of what rows share of each
    width: int  # of the tables


def shared(emitter: TermEmitter, phase: Phase, vector: Symbol) -> Shared | None:
    """What the rows of a phase share, whose vectors run along `vector`; None where that is no gather, or too much."""
    inner = _sharing(emitter, phase, vector)
    if not any(not isinstance(d, int) or d >= ROWS for _, d in inner):
        return None
    free = frozenset(s for s, _ in inner)
    terms = list(_common(emitter, [s.term for s in phase.stores], vector, free))
    found = _places(emitter, [s.term for s in phase.stores], set(terms), free)
    places = {d: _place_type(emitter, d, dict(phase.loops)[vector]) for d in found or []}
    size = sum(8 if t.dtype.itemsize == 8 else 4 for t in terms) + sum(8 if k == "i64" else 4 for k in places.values())
    if not places or size * STEP > BYTES:
        return None
    outer = [(s, d) for s, d in phase.loops if s != vector and s not in free]
    return Shared(outer, inner, terms, places, _width(size, dict(phase.loops)[vector]))


def _sharing(emitter: TermEmitter, phase: Phase, vector: Symbol) -> list[tuple[Symbol, Dim]]:
    """The loops over rows that gather at the same places along the vector loop; none where nothing is gathered."""
    every = phase_terms(phase, dict(emitter.lookups))
    scattered = any(symbols(s.address) & emitter.lookups.keys() for s in phase.stores)
    if scattered or any(isinstance(t, Guard) for t in every):
        return []
    data = {s for t in every for s in index_symbols(t) if s in emitter.lookups}
    moving = [deps for s in data if vector in (deps := emitter.deps(emitter.lookups[s].term))]
    return [(s, d) for s, d in phase.loops if s != vector and not any(s in deps for deps in moving)] if moving else []


def _width(size: int, extent: Dim) -> int:
    """How many elements of the vector loop the tables of an item hold, at so many bytes for each."""
    width = BYTES // size // STEP * STEP
    if isinstance(extent, int) and extent > 0:  # pieces of the same size
        width = -(-extent // (-(-extent // width) * STEP)) * STEP
    return width


def _common(emitter: TermEmitter, terms: list[Term], vector: Symbol, free: frozenset[Symbol]) -> Iterator[Term]:
    """Terms that cost more than a load, and are the same in all of the rows."""
    pending, seen = list(terms), set[Term]()
    while pending:
        term = pending.pop()
        if term in seen:
            continue
        seen.add(term)
        deps = emitter.deps(term)
        same = vector in deps and not deps & free and all(isinstance(d, Symbol) for d in deps)
        if same and is_dear(emitter, term):
            yield term
        else:
            pending += children(term)


def _places(emitter: TermEmitter, terms: list[Term], known: set[Term], free: frozenset[Symbol]) -> list[Dim] | None:
    """The addresses that are read lane by lane; None where one cannot be divided into what rows share and the rest."""
    pending, seen, found = list(terms), set(known), list[Dim]()
    while pending:
        term = pending.pop()
        if term in seen:
            continue
        seen.add(term)
        pending += children(term)
        if isinstance(term, Load) and emitter.stride(term.index[0]) is None and term.index[0] not in found:
            parts = emitter.flat_parts(term.index[0])
            if parts is None or any(symbols(c) & free for c in (parts.own, *(c for _, c in parts.steps))):
                return None
            found.append(term.index[0])
    return found


def _place_type(emitter: TermEmitter, address: Dim, extent: Dim) -> str:
    """The integer that holds what the lanes add to an address."""
    parts, most = emitter.flat_parts(address), 0
    assert parts is not None
    for c, size in [(parts.own, extent), *((c, emitter.lookups[s].extent) for s, c in parts.steps)]:
        if c == 0:
            continue
        if not isinstance(c, int) or not isinstance(size, int):
            return "i64"
        most += abs(c) * size
    return "i32" if most < 1 << 31 else "i64"


def fill(emitter: TermEmitter, own: Shared, vector: Symbol, scope: Scope) -> list[str]:
    """Statements that make the tables of elements [lo, hi) of the vector loop; loads and terms that are emitted later
    read them. The scope knows the outer loops.
    """
    name, inner, lines = emitter.name_loop(vector), scope.child({vector}), list[str]()
    tables, places = dict[Term, str](), dict[Dim, tuple[Dim, str]]()
    for term in own.terms:
        table = emitter.fresh("table")
        lines.append(f"alignas(64) {spelling.lane_type(term.dtype)} {table}[{own.width}];")
        inner.lines.append(f"stl({table} + ({name} - lo), {emitter.emit(term, inner)}, lanes);")
        tables[term] = f"{table} + ({name} - lo)"
    for address, kind in own.places.items():
        table, parts = emitter.fresh("table"), emitter.flat_parts(address)
        assert parts is not None
        lines.append(f"alignas(64) {kind} {table}[{own.width}];")
        inner.lines.append(f"stl({table} + ({name} - lo), conv<{kind}, i64>({emitter.flat_sum(parts, inner)}), lanes);")
        places[address] = parts.rest, f"({table} + ({name} - lo))"
    emitter.tables, emitter.places = tables, places
    body = emitter.fresh("fill")
    return [
        *lines, f"const auto {body} = [&](const i64 {name}, auto lanes) OX_LAMBDA {{", *indent(inner.lines), "};",
        f"for (i64 {name} = lo; {name} < hi; {name} += VL)",
        f"  if ({name} + VL <= hi) {body}({name}, Full{{}}); else {body}({name}, Part{{(int)(hi - {name})}});",
    ]  # fmt: skip
