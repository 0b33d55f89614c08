"""Loop transformations before emission: order, merging, the vector loop, and index-set splitting."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from onnxc.ir.expr import (
    Call,
    Dim,
    Symbol,
    always_equal,
    ceildiv,
    coefficient,
    floordiv,
    is_less,
    is_nonnegative,
    mod,
    of,
    prod,
    recombine,
    substitute,
    symbols,
)
from onnxc.loops.access import fresh
from onnxc.loops.nest import Loop, Nest, Phase
from onnxc.loops.terms import (
    Apply,
    Guard,
    Load,
    Lookup,
    Position,
    Reduced,
    Reduction,
    Term,
    index_symbols,
    walk,
)
from onnxc.planner.loop_index import divided_loops, is_size
from onnxc.planner.rows import ROWS_SYMBOL
from onnxc.primitives.costs import cycles

MAX_PIECES = 9
MAX_TILES = 4
NEAR = 16  # elements between lanes that lie in neighbouring lines
MAX_SPLITS = 6
LONG_RUN = 8  # neighbouring elements for which a loop is divided
SHORT = 64  # turns of a loop that is better joined with the one around it
ROWS = 32  # that have something in common, for it to be worth a table
CAST = 2  # of a vector to elements of another width, relative to an addition
ACROSS = 12  # the price of combining the lanes of a vector, relative to a load


def cost(terms: Iterable[Term]) -> int:
    """Rough cycles for a vector of terms, each computed once, relative to an addition; loads are free."""
    return sum(CAST if t.op == "cast" else cycles(t.op) for t in terms if isinstance(t, Apply))


def rewrite(term: Term, values: dict[Symbol, Dim], memo: dict[Term, Term] | None = None) -> Term:
    """The term with loop symbols replaced; guards that have become certain are resolved."""
    memo = {} if memo is None else memo
    if term not in memo:
        memo[term] = _rewrite(term, values, memo)
    return memo[term]


def _rewrite(term: Term, values: dict[Symbol, Dim], memo: dict[Term, Term]) -> Term:
    if isinstance(term, (Load, Reduced)):
        return replace(term, index=tuple(recombine(substitute(e, values)) for e in term.index))
    if isinstance(term, Position):
        return replace(term, expr=substitute(term.expr, values))
    if isinstance(term, Apply):
        return replace(term, args=tuple(rewrite(a, values, memo) for a in term.args))
    if isinstance(term, Guard):
        conditions = [recombine(substitute(c, values)) for c in term.conditions]
        open_ = tuple(c for c in conditions if not is_nonnegative(c))
        if any(is_less(c, 0) for c in open_):
            return rewrite(term.outside, values, memo)
        inside = rewrite(term.inside, values, memo)
        return Guard(term.dtype, open_, inside, rewrite(term.outside, values, memo)) if open_ else inside
    return term


def roots(phase: Phase) -> list[Term]:
    """The terms that a phase evaluates."""
    return [r.body for r in phase.reductions] + [s.term for s in phase.stores]


def phase_terms(phase: Phase, lookups: dict[Symbol, Lookup]) -> list[Term]:
    """Every term of a phase, lookups included."""
    out: list[Term] = []
    seen: set[Symbol] = set()
    for root in roots(phase):
        out.extend(walk(root))
    for t in out:
        for s in index_symbols(t):
            if s in lookups and s not in seen:
                seen.add(s)
                out.extend(walk(lookups[s].term))
    return out


def addresses(phase: Phase, lookups: dict[Symbol, Lookup]) -> list[Dim]:
    """All element positions that a phase reads and writes."""
    return [t.index[0] for t in phase_terms(phase, lookups) if isinstance(t, Load)] + [s.address for s in phase.stores]


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


def _larger(a: Dim, b: Dim) -> bool:
    return not always_equal(a, b) and is_nonnegative(a - b)


def ordered(loops: list[Loop], phases: list[Phase], lookups: dict[Symbol, Lookup]) -> list[Loop]:
    """Loops from the largest stride to the smallest (an insertion sort: symbolic strides are a partial
    order).
    """
    out: list[tuple[Dim, Loop]] = []
    for loop in loops:
        w = _weight(phases, lookups, loop[0])
        at = len(out)
        while at > 0 and _larger(w, out[at - 1][0]):
            at -= 1
        out.insert(at, (w, loop))
    return [loop for _, loop in out]


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
    outermost of them.
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
        if leaps is not None:
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


def substitute_nest(nest: Nest, values: dict[Symbol, Dim]) -> None:
    """Applies a renaming of loop symbols to everything in the nest."""
    memo: dict[Term, Term] = {}
    for phase in nest.phases:
        phase.reductions = [_reduction(r, values, memo) for r in phase.reductions]
        phase.stores = [
            replace(s, address=recombine(substitute(s.address, values)), term=rewrite(s.term, values, memo))
            for s in phase.stores
        ]
    nest.lookups = {s: replace(k, term=rewrite(k.term, values, memo)) for s, k in nest.lookups.items()}


def _reduction(r: Reduction, values: dict[Symbol, Dim], memo: dict[Term, Term]) -> Reduction:
    position = None if r.position is None else substitute(r.position, values)
    return replace(r, body=rewrite(r.body, values, memo), position=position)


def _split_loops(nest: Nest) -> None:
    """Divides a loop `i` of which accesses take `i // n` and `i % n`, so that `i % n` is contiguous."""
    for _ in range(MAX_SPLITS):
        found = next(
            (
                (s, n)
                for phase in nest.phases
                for e in addresses(phase, nest.lookups)
                for s, n in divided_loops(e)
                if isinstance(n, int) and n >= LONG_RUN and any(divides(n, d) for x, d in phase.loops if x == s)
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


def normalise(nest: Nest) -> None:
    """Orders and merges the outer loops, and the inner loops of the phases that share them."""
    if is_plain(nest):
        _split_loops(nest)
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
        loops, values = merge(loops, phases, nest.lookups, shared, is_plain(nest))
        for phase in phases:
            phase.loops = list(loops)
        if values:
            substitute_nest(nest, values)


# ---------------------------------------------------------------- the vector loop


def vectors_across(nest: Nest, lanes: int) -> dict[frozenset[Symbol], Symbol]:
    """The loops that vectors run along where sums must be made across their lanes, by the loops of each phase that has
    some. Empty where no sum must.
    """
    phases = [p for p in nest.phases if p.loops]
    if not any(r.across for r in nest.reductions()):
        return {}
    assert all(r.across is not False for r in nest.reductions()), "the planner keeps sums of two orders apart"
    found: dict[frozenset[Symbol], Symbol] = {}
    for phase in sorted(phases, key=lambda p: not any(r.across for r in p.reductions)):
        own = frozenset(s for s, _ in phase.loops)
        if any(r.across for r in phase.reductions):
            found[own] = phase.loops[-1][0]
        elif own not in found:
            known = [s for s in found.values() if s in own]
            prices = {s: _phase_price(nest, phase, s, lanes) for s in (known or own)}
            able = {s: price for s, price in prices.items() if price is not None}
            if able:
                found[own] = min(sorted(able, key=lambda s: s.key), key=able.__getitem__)
    return found


def _phase_price(nest: Nest, phase: Phase, s: Symbol, lanes: int) -> float | None:
    """What one vector along loop `s` of a phase costs."""
    guards = _guard_price(phase, nest.lookups, s, False)
    return None if guards is None else guards + _accesses_price(nest, phase, s, lanes, False)


def vector_candidates(nest: Nest) -> list[Symbol]:
    """Loops that every phase with loops contains, and the outer loops."""
    phases = [p for p in nest.phases if p.loops]
    found = [s for s, _ in nest.outer]
    if any(r.across is False for r in nest.reductions()):
        return found
    if phases:
        common = set.intersection(*({s for s, _ in p.loops} for p in phases))
        found += [s for s, _ in phases[-1].loops if s in common]
    return found


def choose_vector(nest: Nest, lanes: int) -> Symbol | None:
    """The loop whose lanes cost least; None where no loop can be vectorised."""
    best = best_vector(nest, lanes)
    return best[1] if best else None


def best_vector(nest: Nest, lanes: int) -> tuple[float, Symbol] | None:
    """That loop, after its price."""
    best: tuple[float, Symbol] | None = None
    for s in vector_candidates(nest):
        price = _price(nest, s, lanes)
        if price is not None and (best is None or price < best[0]):
            best = (price, s)
    return best


def extent_of(nest: Nest, s: Symbol) -> Dim:
    for loops in (nest.outer, *(p.loops for p in nest.phases)):
        for symbol, d in loops:
            if symbol == s:
                return d
    raise KeyError(s)


def _price(nest: Nest, s: Symbol, lanes: int) -> float | None:
    """What one vector along loop `s` costs, in loads of a vector; None where it would give wrong results."""
    extent = extent_of(nest, s)
    vectors = -(-extent // lanes) if isinstance(extent, int) and extent > 0 else 8
    filled = extent / (vectors * lanes) if isinstance(extent, int) and extent > 0 else 1.0
    outer = any(s == symbol for symbol, _ in nest.outer)
    total = 0.01 if outer else len(nest.reductions()) * ACROSS / vectors
    for phase in nest.phases:
        guards = _guard_price(phase, nest.lookups, s, outer)
        if guards is None:
            return None
        weight = 1.0 if phase.loops or not any(p.loops for p in nest.phases) else 0.05
        work = cost(phase_terms(phase, nest.lookups)) / 4
        total += weight * (guards + work + _accesses_price(nest, phase, s, lanes, outer))
    return total / filled


def _accesses_price(nest: Nest, phase: Phase, s: Symbol, lanes: int, outer: bool) -> float:
    plain = is_plain(nest)
    staged = staging(phase, nest.lookups, s, lanes) if outer or plain else None
    turned = {x.index[0] for x in staged.loads} if staged else set()
    tile = 3.0
    if staged:
        extent = dict(phase.loops)[staged.partner]
        tile += 2.0 * lanes / extent if isinstance(extent, int) and extent < lanes else 0.0
    stores = [x.address for x in phase.stores]
    loads = addresses(phase, nest.lookups)[: -len(stores) or None]
    return sum(
        tile if e in turned
        else 1.0 if _hoisted(e, phase, s, nest.lookups, plain)
        else _access_price(e, s, nest.lookups)
        for e in loads
    ) + sum(1.0 if _hoisted(e, phase, s, nest.lookups, False) else _access_price(e, s, nest.lookups)
            for e in stores)  # fmt: skip


def _hoisted(address: Dim, phase: Phase, s: Symbol, lookups: Mapping[Symbol, Lookup], plain: bool) -> bool:
    """Whether an access moves with loop `s` alone, and the phase has others: it is made before them. Where these are
    `plain` loops, the outermost of them may move it too (codegen/cpp/tables.py), if there are enough rows inside.
    """
    others = [(x, d) for x, d in phase.loops if x != s]
    moving = [k for k, (x, _) in enumerate(others) if varies(address, x, lookups)]
    if not others or not varies(address, s, lookups):
        return False
    if not moving:
        return True
    rows = prod(d for _, d in others[moving[-1] + 1 :])
    return plain and (not isinstance(rows, int) or rows >= ROWS)


def _access_price(address: Dim, s: Symbol, lookups: Mapping[Symbol, Lookup]) -> float:
    c = lane_stride(address, s, lookups)
    if c is None:
        # A shuffle, or lane by lane, each with an address of its own.
        return 2.0 if repeats(address, s) else 20.0
    if isinstance(c, int) and 0 <= c <= 4:
        return c + 1.0 if c > 1 else 0.5 + c / 2
    return 12.0 if isinstance(c, int) and abs(c) <= NEAR else 24.0  # lanes that no line of a cache has in common


def is_plain(nest: Nest) -> bool:
    """Without reductions and outer loops: any loop may be divided over the items."""
    return not nest.outer and not nest.reductions()


def apart(nest: Nest) -> list[Nest]:
    """A nest by the loops of its phases, where nothing holds these together: the vectors of each run along a loop of
    its own.
    """
    if not is_plain(nest):
        return [nest]
    found: dict[frozenset[Symbol], list[Phase]] = {}
    for phase in nest.phases:
        found.setdefault(frozenset(s for s, _ in phase.loops), []).append(phase)
    return [replace(nest, phases=phases, lookups=dict(nest.lookups)) for phases in found.values()]


@dataclass(frozen=True)
class Staging:
    """Loads that lie contiguous along loop `partner`, and are read a tile of VL by VL elements at a time. Where each row
    of a tile begins may be data: of the rows that a Gather takes, or a Resize.
    """

    partner: Symbol
    loads: tuple[Load, ...]


def staging(phase: Phase, lookups: Mapping[Symbol, Lookup], vector: Symbol, lanes: int) -> Staging | None:
    """The loads of a phase that are worth turning when its lanes run along `vector`; None where there
    are none.
    """
    guarded = {x for t in phase_terms(phase, dict(lookups)) if isinstance(t, Guard) for x in walk(t)}
    strided: list[Load] = []
    for t in phase_terms(phase, dict(lookups)):
        if isinstance(t, Load) and t not in guarded and t not in strided and _apart(t.index[0], vector, lookups):
            strided.append(t)
    best: Staging | None = None
    for k, extent in phase.loops:
        if k == vector or (isinstance(extent, int) and extent < lanes // 2):
            continue
        loads = tuple(t for t in strided if lane_stride(t.index[0], k, lookups) == 1)[:MAX_TILES]
        if loads and (best is None or len(loads) > len(best.loads)):
            best = Staging(k, loads)
    return best


def _apart(address: Dim, vector: Symbol, lookups: Mapping[Symbol, Lookup]) -> bool:
    """Whether neighbouring lanes read places that lie apart: in even steps, or where data says."""
    if symbols(address) & lookups.keys():
        return lane_stride(address, vector, lookups) is None
    return coefficient(address, vector) not in (0, 1, None)


def varies(d: Dim, s: Symbol | None, lookups: Mapping[Symbol, Lookup]) -> bool:
    """Whether an index depends on loop `s`, by itself or through data that is read with it."""
    found = symbols(d)
    return s in found or any(x in lookups and term_varies(lookups[x].term, s, lookups) for x in found)


def term_varies(term: Term, s: Symbol | None, lookups: Mapping[Symbol, Lookup]) -> bool:
    """Whether a term depends on loop `s`."""
    return any(varies(of(x), s, lookups) for t in walk(term) for x in index_symbols(t))


def lane_stride(address: Dim, s: Symbol, lookups: Mapping[Symbol, Lookup]) -> Dim | None:
    """Elements between neighbouring lanes of loop `s`; None where they are not evenly spaced."""
    if any(x in lookups and term_varies(lookups[x].term, s, lookups) for x in symbols(address)):
        return None
    return coefficient(address, s)


def repeats(address: Dim, s: Symbol | None) -> int | None:
    """How many neighbouring lanes of loop `s` read the same element where the next ones read the one after it
    (`s // 2`), and the lanes of a vector are a whole number of such runs; else None.
    """
    if isinstance(address, int) or s is None:
        return None
    moving = [(mono, c) for mono, c in address.terms if any(s in symbols(of(atom)) for atom in mono)]
    if len(moving) != 1 or moving[0][1] != 1 or len(moving[0][0]) != 1:
        return None
    (call,) = moving[0][0]
    if not isinstance(call, Call) or call.op != "floordiv" or call.args[0] != of(s):
        return None
    n = call.args[1]
    return n if isinstance(n, int) and n in (2, 4) else None


def _guard_price(phase: Phase, lookups: dict[Symbol, Lookup], s: Symbol, outer: bool) -> float | None:
    """Splitting the loop removes guards; those that stay are tested for each vector, or lane by lane."""
    if not _guarded(phase, lookups, s):
        return 0.0
    if not phase.reductions and not outer and split_phase(phase, lookups, s) is not None:
        return 0.0
    guards = [t for t in phase_terms(phase, lookups) if isinstance(t, Guard) and s in index_symbols(t)]
    if outer and any(isinstance(x, Reduced) for g in guards for x in walk(g)):
        return None  # a reduction's lanes cannot be looked at one by one
    return 4.0 * len(guards)


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


def split_phase(phase: Phase, lookups: dict[Symbol, Lookup], s: Symbol) -> list[Phase] | None:
    """The phase in pieces of loop `s` in which no guard depends on it; None where the pieces cannot be
    told.
    """
    if not _guarded(phase, lookups, s):
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
        if any(_guarded(p, lookups, loop) for p in pieces for loop, _ in p.loops if loop not in dict(phase.loops))
        else pieces
    )


def _guarded(phase: Phase, lookups: dict[Symbol, Lookup], s: Symbol) -> bool:
    return any(isinstance(t, Guard) and s in index_symbols(t) for t in phase_terms(phase, lookups))


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
