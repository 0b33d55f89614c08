"""Other loop symbols in terms and nests, and what depends on a loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from onnxc.ir.expr import Dim, Symbol, is_less, is_nonnegative, of, recombine, substitute, symbols
from onnxc.loops.nest import Nest
from onnxc.loops.terms import Apply, Guard, Load, Lookup, Position, Reduced, Reduction, Term, index_symbols, walk


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


def varies(d: Dim, s: Symbol | None, lookups: Mapping[Symbol, Lookup]) -> bool:
    """Whether an index depends on loop `s`, by itself or through data that is read with it."""
    found = symbols(d)
    return s in found or any(x in lookups and term_varies(lookups[x].term, s, lookups) for x in found)


def term_varies(term: Term, s: Symbol | None, lookups: Mapping[Symbol, Lookup]) -> bool:
    """Whether a term depends on loop `s`."""
    return any(varies(of(x), s, lookups) for t in walk(term) for x in index_symbols(t))
