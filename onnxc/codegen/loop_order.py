"""The order of a nest's loops: by strides, the largest outside; neighbours are joined that accesses walk as one."""

from __future__ import annotations

from collections.abc import Iterable

from onnxc.ir.expr import (
    Dim,
    Symbol,
    always_equal,
    coefficient,
    floordiv,
    mod,
    prod,
    recombine,
    substitute,
    symbols,
)
from onnxc.loops.access import fresh
from onnxc.loops.loop_index import divided_loops, is_size
from onnxc.loops.nest import Loop, Nest, Phase, addresses, extent_of, phase_terms
from onnxc.loops.rewriting import substitute_nest
from onnxc.loops.terms import Guard, Lookup, Position, index_symbols
from onnxc.planner.guesses import IMAGES, taken
from onnxc.planner.rows import ROWS_SYMBOL

MAX_SPLITS = 6
LONG_RUN = 8  # neighbouring elements for which a loop is divided
SHORT = 64  # turns of a loop that is better joined with the one around it
ROWS = 32  # that have something in common, for it to be worth a table


def normalise(nest: Nest, divide: bool = False) -> None:
    """Orders and merges the outer loops, and the inner loops of the phases that share them. `divide`: loops of sums are
    divided too, where what they read lies in another order than they have, and loops of open sizes.
    """
    if nest.is_plain or (divide and not any(r.across is not None for p in nest.phases for r in p.reductions)):
        _split_loops(nest, divide)
    nest.outer = ordered(nest.outer, nest.phases, nest.lookups)
    nest.outer, values = merge(nest.outer, nest.phases, nest.lookups)
    if values:
        substitute_nest(nest, values)
    groups: dict[frozenset[Symbol], list[Phase]] = {}
    for phase in nest.phases:
        if phase.loops:
            groups.setdefault(frozenset(s for s, _ in phase.loops), []).append(phase)
    for own, phases in groups.items():
        if any(r.across is not None for p in phases for r in p.reductions):
            continue  # sums that have an order
        shared = {s for other in groups if other != own for s in other & own}
        loops = ordered(phases[0].loops, phases, nest.lookups)
        loops, values = merge(loops, phases, nest.lookups, shared, nest.is_plain)
        for phase in phases:
            phase.loops = list(loops)
        if values:
            substitute_nest(nest, values)


def ordered(loops: list[Loop], phases: list[Phase], lookups: dict[Symbol, Lookup]) -> list[Loop]:
    """Loops from the largest stride to the smallest; those that may as well be equal stay as they are. What symbolic
    strides are taken for makes their order a total one.
    """
    strides = [taken(_weight(phases, lookups, s), min(IMAGES)) for s, _ in loops]
    return [loop for _, loop in sorted(zip(strides, loops, strict=True), key=lambda x: x[0], reverse=True)]


def _weight(phases: list[Phase], lookups: dict[Symbol, Lookup], s: Symbol) -> Dim:
    """The stride by which a loop is ordered: that of the first store, else of the first load, that it
    moves.
    """
    for phase in reversed(phases):
        for e in [st.address for st in phase.stores] + addresses(phase, lookups):
            c = coefficient(e, s)
            if c is not None and c != 0:
                return c
    return 0


def merge(
    loops: list[Loop],
    phases: list[Phase],
    lookups: dict[Symbol, Lookup],
    keep: Iterable[Symbol] = (),
    plain: bool = False,
) -> tuple[list[Loop], dict[Symbol, Dim]]:
    """Joins neighbours that every access walks as one loop. Returns the loops and what replaces the old
    symbols.

    Loops in `keep` stay (other phases walk them too, with other neighbours), and those over a thread's rows of a scan:
    how an element is computed may not depend on where these begin. Loops that are `plain` may have tables inside the
    outermost of them, where their sizes are known.
    """
    pinned = _pinned(phases, lookups).union(keep)
    every = [e for p in phases for e in addresses(p, lookups)]
    written = [s.address for p in phases for s in p.stores]
    merged = list(loops)
    values: dict[Symbol, Dim] = {}
    k = len(merged) - 2
    while k >= 0:
        (a, ea), (b, eb) = merged[k], merged[k + 1]
        known = {a, b, *(_outermost(merged, k) if plain else ())}
        leaps = None if {a, b} & pinned or ROWS_SYMBOL in symbols(ea) else _leaps((a, b), eb, every, written, known)
        if leaps is not None and (isinstance(ea, int) or not leaps):
            both = fresh("i", ea * eb)
            (symbol,) = symbols(both)
            # most accesses use a and b only as a * eb + b: for them the pair may be called (0, both)
            step: dict[Symbol, Dim] = {a: floordiv(both, eb), b: mod(both, eb)} if leaps else {a: 0, b: both}
            every = [recombine(substitute(e, step)) if leaps else substitute(e, step) for e in every]
            written = [recombine(substitute(e, step)) if leaps else substitute(e, step) for e in written]
            values = {s: substitute(v, step) for s, v in values.items()} | step
            merged[k : k + 2] = [(symbol, ea * eb)]
        k -= 1
    return merged, values


def _outermost(loops: list[Loop], pair: int) -> list[Symbol]:
    """The outermost loops, before the pair at `pair`, that leave enough rows inside."""
    found = []
    for k in range(pair):
        inside = [d for _, d in (*loops[k + 1 : pair], *loops[pair + 2 :])]
        rows = prod(inside)
        if not inside or (isinstance(rows, int) and rows < ROWS):
            break
        found.append(loops[k][0])
    return found


def _pinned(phases: Iterable[Phase], lookups: dict[Symbol, Lookup]) -> set[Symbol]:
    """Loops that must keep their own index: guards and positions speak of them."""
    found: set[Symbol] = set()
    for phase in phases:
        for t in phase_terms(phase, lookups):
            if isinstance(t, (Guard, Position)):
                found |= index_symbols(t)
        for r in phase.reductions:
            if r.position is not None:
                found |= symbols(r.position)
    return found


def _leaps(
    pair: tuple[Symbol, Symbol], extent: Dim, every: list[Dim], written: list[Dim], known: set[Symbol]
) -> list[Dim] | None:
    """Accesses that do not walk two loops as one; None where the two must stay. Where the inner loop is short, what
    depends on the `known` loops alone may leap: a kernel reads it once, before its other loops.
    """
    leaps = [e for e in every if not _contiguous(e, *pair, extent)]
    if not leaps:
        return leaps
    short = isinstance(extent, int) and 0 < extent < SHORT
    if not short or any(not _contiguous(e, *pair, extent) for e in written):
        return None
    others = [e for e in every if {s for s in symbols(e) if not is_size(s)} - known]
    if any(e in leaps for e in others) or not any(coefficient(e, pair[1]) == 1 for e in others):
        return None
    return leaps


def _contiguous(e: Dim, a: Symbol, b: Symbol, extent: Dim) -> bool:
    ca, cb = coefficient(e, a), coefficient(e, b)
    return ca is not None and cb is not None and always_equal(ca, cb * extent)


def _split_loops(nest: Nest, open_sizes: bool) -> None:
    """Divides a loop `i` of which accesses take `i // n` and `i % n`, so that `i % n` is contiguous."""

    def is_long(n: Dim) -> bool:
        return (open_sizes or isinstance(n, int)) and taken(n, min(IMAGES)) >= LONG_RUN

    for _ in range(MAX_SPLITS):
        found = next(
            (
                (s, n)
                for phase in nest.phases
                for e in addresses(phase, nest.lookups)
                for s, n in divided_loops(e)
                if is_long(n) and any(divides(n, d) for x, d in phase.loops if x == s)
            ),
            None,
        )
        if found is None:
            return
        split_loop(nest, *found, extent_of(nest, found[0]))


def split_loop(nest: Nest, symbol: Symbol, n: Dim, extent: Dim) -> None:
    """Makes a loop two: an outer one, and an inner one of `n` turns, which divides its extent."""
    outer, inner = fresh(symbol.key[0], extent // n), fresh(symbol.key[0], n)
    pair = [(next(iter(symbols(outer))), extent // n), (next(iter(symbols(inner))), n)]

    def divided(loops: list[Loop]) -> list[Loop]:
        return [p for x in loops for p in (pair if x[0] == symbol else [x])]

    nest.outer = divided(nest.outer)
    for phase in nest.phases:
        phase.loops = divided(phase.loops)
    substitute_nest(nest, {symbol: outer * n + inner})


def divides(n: Dim, extent: Dim) -> bool:
    """Whether a loop can be split so, and not into one turn of itself."""
    return not always_equal(extent, n) and always_equal(extent % n, 0)
