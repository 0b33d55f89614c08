"""The loop of a nest that lanes run along: the one whose accesses, guards and sums cost least."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from onnxc.codegen.cpp.index_sets import guarded, split_phase
from onnxc.codegen.loop_order import ROWS
from onnxc.ir.expr import Call, Dim, Symbol, coefficient, of, prod, symbols
from onnxc.loops.nest import Nest, Phase, addresses, extent_of, phase_terms
from onnxc.loops.rewriting import term_varies, varies
from onnxc.loops.terms import Apply, Guard, Load, Lookup, Reduced, Term, index_symbols, walk
from onnxc.primitives.costs import cycles

MAX_TILES = 4
NEAR = 16  # elements between lanes that lie in neighbouring lines
CAST = 2  # of a vector to elements of another width, relative to an addition
ACROSS = 12  # the price of combining the lanes of a vector, relative to a load


def cost(terms: Iterable[Term]) -> int:
    """Rough cycles for a vector of terms, each computed once, relative to an addition; loads are free."""
    return sum(CAST if t.op == "cast" else cycles(t.op) for t in terms if isinstance(t, Apply))


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
    plain = nest.is_plain
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
    if not guarded(phase, lookups, s):
        return 0.0
    if not phase.reductions and not outer and split_phase(phase, lookups, s) is not None:
        return 0.0
    guards = [t for t in phase_terms(phase, lookups) if isinstance(t, Guard) and s in index_symbols(t)]
    if outer and any(isinstance(x, Reduced) for g in guards for x in walk(g)):
        return None  # a reduction's lanes cannot be looked at one by one
    return 4.0 * len(guards)
