"""Loops that indices divide, as loops of their own: so that what lanes read lies side by side again.

A shuffle of channels reads `i % 3 * 40 + i // 3`, lane by lane. Where i = 3 * q + r, that is `r * 40 + q`:

    for (i64 i = 0; i < 120; i++) out[i] = x[i % 3 * 40 + i / 3];

becomes

    for (i64 q = 0; q < 40; q += VL) st_turns(out + 3 * q, ld(x + q), ld(x + 40 + q), ld(x + 80 + q));

A sum over what a reshape made one axis of is walked as its operand lies in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from onnxc.codegen.cpp.vector_loop import best_vector
from onnxc.codegen.loop_order import divides, normalise, split_loop
from onnxc.ir.expr import Call, Dim, Expr, Symbol, always_equal, coefficient, recombine, substitute, symbols
from onnxc.loops.loop_index import divided_loops
from onnxc.loops.nest import Nest, Phase, Store, phase_terms
from onnxc.loops.rewriting import rewrite, term_varies
from onnxc.loops.terms import Guard, Load, Lookup, Position, Term, index_symbols

MOST_SPLITS = 12
MOST_TURNS = 4  # stores whose lanes take turns in memory
MOST_TERMS = 64  # of a phase: loops around more are not written out


def arrange(nest: Nest, lanes: int) -> None:
    """Brings the loops of a nest into their order; those that indices divide are split where that makes a vector of the
    nest cheaper.
    """
    divided = _copy(nest)
    normalise(nest)
    if any(r.across is not None for r in nest.reductions()) or not any(_is_divided(e) for e in _indices(nest)):
        return
    if not _split_loops(divided):
        return
    normalise(divided)
    found, now = best_vector(divided, lanes), best_vector(nest, lanes)
    if found is not None and (now is None or found[0] < now[0]):
        nest.outer, nest.phases, nest.lookups = divided.outer, divided.phases, divided.lookups


def _copy(nest: Nest) -> Nest:
    phases = [Phase(list(p.loops), list(p.reductions), list(p.stores)) for p in nest.phases]
    return replace(nest, outer=list(nest.outer), phases=phases, lookups=dict(nest.lookups))


def _indices(nest: Nest) -> Iterator[Dim]:
    """All expressions over the loops of a nest."""
    for phase in nest.phases:
        for t in phase_terms(phase, nest.lookups):
            if isinstance(t, Load):
                yield from t.index
            elif isinstance(t, Guard):
                yield from t.conditions
            elif isinstance(t, Position):
                yield t.expr
        yield from (s.address for s in phase.stores)


def _is_divided(e: Dim) -> bool:
    return isinstance(e, Expr) and any(isinstance(a, Call) for a in e.atoms())


def _split_loops(nest: Nest) -> bool:
    """Whether there were loops to split."""
    positions = {s for r in nest.reductions() if r.position is not None for s in symbols(r.position)}
    for k in range(MOST_SPLITS):
        extents = {s: d for loops in (nest.outer, *(p.loops for p in nest.phases)) for s, d in loops}
        pairs = ((s, n) for e in _indices(nest) for s, n in divided_loops(e) if s in extents and s not in positions)
        found = next(((s, n) for s, n in pairs if divides(n, extents[s])), None)
        if found is None:
            return k > 0
        split_loop(nest, *found, extents[found[0]])
    return True


# ---------------------------------------------------------------- lanes that take turns


def written_out(phase: Phase, lookups: Mapping[Symbol, Lookup], vector: Symbol) -> Phase:
    """The phase with a store for each turn of the short loops that lie between the lanes of its stores, in place of these
    loops; as it is where there are none.
    """
    loops = _between(phase, vector)
    values: list[dict[Symbol, Dim]] = [{}]
    for s, d in loops:
        values = [known | {s: k} for known in values for k in range(d)]
    if phase.reductions or len(values) * len(phase_terms(phase, dict(lookups))) > MOST_TERMS:
        return phase
    data = {s for t in phase_terms(phase, {}) for s in index_symbols(t) if s in lookups}
    if not loops or any(term_varies(lookups[x].term, s, lookups) for x in data for s, _ in loops):
        return phase
    memos = [dict[Term, Term]() for _ in values]
    stores = [
        replace(s, address=recombine(substitute(s.address, at)), term=rewrite(s.term, at, memo))
        for s in phase.stores for at, memo in zip(values, memos, strict=True)
    ]  # fmt: skip
    return Phase([x for x in phase.loops if x not in loops], [], stores)


def _between(phase: Phase, vector: Symbol) -> list[tuple[Symbol, int]]:
    """The loops over what lies between neighbouring lanes of all stores, from the outermost on; none where these leave a
    place out, or where there are too many.
    """
    steps = {coefficient(s.address, vector) for s in phase.stores}
    (step,) = steps if len(steps) == 1 else (None,)
    found, reach = list[tuple[Symbol, int]](), 1
    if not isinstance(step, int) or not 2 <= step <= MOST_TURNS:
        return []
    while reach < step:
        fitting = ((s, d) for s, d in phase.loops if all(coefficient(x.address, s) == reach for x in phase.stores))
        s, d = next(fitting, (None, None))
        if s is None or not isinstance(d, int) or reach * d > step:
            return []
        found.insert(0, (s, d))
        reach *= d
    return found if reach == step else []


def turns(stores: list[Store], vector: Symbol | None) -> list[list[int]]:
    """The stores by their positions, those together whose lanes take turns: which follow each other, at places side by
    side.
    """
    out, k = list[list[int]](), 0
    while k < len(stores):
        first = stores[k]
        step = None if vector is None else coefficient(first.address, vector)
        some = stores[k : k + step] if isinstance(step, int) and 2 <= step <= MOST_TURNS else [first]
        together = len(some) == step and all(
            s.value is first.value and always_equal(s.address - first.address, i) for i, s in enumerate(some)
        )
        out.append(list(range(k, k + (len(some) if together else 1))))
        k += len(out[-1])
    return out
