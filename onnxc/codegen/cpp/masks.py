"""Stores of bools that are only moved or combined: computed as the bytes that they are.

A bool in a kernel is a mask of 32-bit lanes, which fits what compares numbers or selects among them. Where bools alone
become bools, to make masks of bytes and bytes of masks is most of the work.
"""

from __future__ import annotations

from dataclasses import replace

from onnxc.ir import dtypes
from onnxc.loops.nest import Nest, Phase, Store
from onnxc.loops.terms import Apply, Const, Guard, Load, Term, walk

_ONE, _ZERO = (Const(dtypes.uint8, bytes([k])) for k in (1, 0))
_AS_BYTES = {"and": "bitand", "min": "bitand", "or": "bitor", "max": "bitor", "xor": "bitxor"}


def in_bytes(nest: Nest) -> Nest:
    """The nest with such stores written as terms of uint8; the storages stay bools."""
    memo: dict[Term, Term | None] = {}
    stores = [s for s in nest.stores() if s.value.dtype is dtypes.boolean and _bytes(s.term, memo) is not None]
    if not stores:
        return nest
    moved = {id(s) for s in stores}
    roots = [r.body for r in nest.reductions()] + [s.term for s in nest.stores() if id(s) not in moved]
    as_masks = {t for root in (*roots, *(x.term for x in nest.lookups.values())) for t in walk(root)}

    def stored(s: Store) -> Store:
        term = _bytes(s.term, memo) if id(s) in moved and as_masks.isdisjoint(walk(s.term)) else None
        return s if term is None else replace(s, term=term)

    phases = [Phase(p.loops, p.reductions, [stored(s) for s in p.stores]) for p in nest.phases]
    return replace(nest, phases=phases)


def _bytes(term: Term, memo: dict[Term, Term | None]) -> Term | None:
    """A term of bools (or of bytes, as a bool is made of them) as one of bytes that are 0 or 1; None where it is made of
    more than these.
    """
    if term not in memo:
        memo[term] = _made(term, memo)
    return memo[term]


def _made(term: Term, memo: dict[Term, Term | None]) -> Term | None:
    if isinstance(term, Guard):
        inside, outside = _bytes(term.inside, memo), _bytes(term.outside, memo)
        return None if inside is None or outside is None else Guard(dtypes.uint8, term.conditions, inside, outside)
    if term.dtype not in (dtypes.boolean, dtypes.uint8):
        return None
    if isinstance(term, Const):
        return _ONE if any(term.raw) else _ZERO
    if isinstance(term, Load):  # a caller's bool may be any byte
        return _apply("min", replace(term, dtype=dtypes.uint8), _ONE)
    if not isinstance(term, Apply):
        return None
    if term.op not in ("cast", "copy") and any(x.dtype is not dtypes.boolean for x in (term, *term.args)):
        return None  # comparisons of numbers
    args = [a for a in (_bytes(a, memo) for a in term.args) if a is not None]
    return _combined(term.op, args) if len(args) == len(term.args) else None


def _combined(op: str, args: list[Term]) -> Term | None:
    match op, args:
        case "copy" | "cast", [x]:
            return x
        case "not", [x]:
            return _apply("bitxor", x, _ONE)
        case "eq", [x, y]:
            return _apply("bitxor", _apply("bitxor", x, y), _ONE)
        case "where", [c, x, y]:
            return _apply("bitxor", y, _apply("bitand", c, _apply("bitxor", x, y)))
        case _, [x, y] if op in _AS_BYTES:
            return _apply(_AS_BYTES[op], x, y)
    return None


def _apply(op: str, *args: Term) -> Term:
    return Apply(dtypes.uint8, op, args)
