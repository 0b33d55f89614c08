"""Index-set splitting: a phase as several, each over a part of a loop in which no guard depends on it."""

from __future__ import annotations

import itertools
from dataclasses import replace

from onnxc.ir.expr import Dim, Symbol, ceildiv, coefficient, is_nonnegative, of, substitute, symbols
from onnxc.loops.access import fresh
from onnxc.loops.loop_index import is_size
from onnxc.loops.nest import Phase, phase_terms
from onnxc.loops.rewriting import rewrite, term_varies
from onnxc.loops.terms import Guard, Lookup, Term, index_symbols

MAX_PIECES = 9


def split_phase(phase: Phase, lookups: dict[Symbol, Lookup], s: Symbol) -> list[Phase] | None:
    """The phase in pieces of loop `s` in which no guard depends on it; None where the pieces cannot be
    told.
    """
    if not guarded(phase, lookups, s):
        return [phase]
    data = {x for t in phase_terms(phase, lookups) for x in index_symbols(t) if x in lookups}
    if any(term_varies(lookups[x].term, s, lookups) for x in data):
        return None  # an index that is data is read once for all pieces
    cuts = _cuts(phase, lookups, s)
    if cuts is None or len(cuts) + 1 > MAX_PIECES:
        return None
    edges: list[Dim] = [0, *cuts, dict(phase.loops)[s]]
    pieces = [_piece(phase, s, lo, hi) for lo, hi in itertools.pairwise(edges)]
    return (
        None
        if any(guarded(p, lookups, loop) for p in pieces for loop, _ in p.loops if loop not in dict(phase.loops))
        else pieces
    )


def guarded(phase: Phase, lookups: dict[Symbol, Lookup], s: Symbol) -> bool:
    return any(isinstance(t, Guard) and s in index_symbols(t) for t in phase_terms(phase, lookups))


def breakpoint_of(condition: Dim, s: Symbol) -> Dim | None:
    """The first value of a loop at which a condition changes, where it is linear in that loop and sizes
    only.
    """
    c = coefficient(condition, s)
    if not isinstance(c, int) or c == 0:
        return None
    rest = condition - of(s) * c
    if not all(map(is_size, symbols(rest))):
        return None
    if abs(c) != 1 and not isinstance(rest, int):
        return None
    return ceildiv(-rest, c) if c > 0 else rest // -c + 1


def _cuts(phase: Phase, lookups: dict[Symbol, Lookup], s: Symbol) -> list[Dim] | None:
    """Where guards change along loop `s`, from the least to the greatest; None where their order is not
    certain.
    """
    extent = dict(phase.loops)[s]
    cuts: list[Dim] = []
    for c in {c for t in phase_terms(phase, lookups) if isinstance(t, Guard) for c in t.conditions if s in symbols(c)}:
        at = breakpoint_of(c, s)
        if at is None:
            return None
        if at in cuts or is_nonnegative(0 - at) or is_nonnegative(at - extent):
            continue
        if not is_nonnegative(at) or not is_nonnegative(extent - at):
            return None
        place = sum(is_nonnegative(at - other) for other in cuts)
        if not all(is_nonnegative(other - at) for other in cuts[place:]):
            return None
        cuts.insert(place, at)
    return cuts


def _piece(phase: Phase, s: Symbol, lo: Dim, hi: Dim) -> Phase:
    part = fresh("i", hi - lo)
    (symbol,) = symbols(part)
    values: dict[Symbol, Dim] = {s: part + lo}
    memo: dict[Term, Term] = {}
    stores = [
        replace(x, address=substitute(x.address, values), term=rewrite(x.term, values, memo)) for x in phase.stores
    ]
    loops = [(symbol, hi - lo) if x == s else (x, d) for x, d in phase.loops]
    return Phase(loops, [], stores)
