"""Index expressions of loops: which loops they divide, and whether they count through places without a gap."""

from __future__ import annotations

from collections.abc import Iterable

from onnxc.ir.expr import Call, Dim, Expr, Symbol, always_equal, coefficient, of, prod, recombine, symbols


def is_loop(s: Symbol) -> bool:
    """Whether a symbol is a loop variable, and no size."""
    return s.key[0] in "ir"


def is_size(s: Symbol) -> bool:
    """Whether a symbol is a size that the run knows."""
    return s.key[0] == "s" and s.key[1:].isdigit()


def divided_loops(e: Dim) -> Iterable[tuple[Symbol, Dim]]:
    """Loops that are divided: pairs (loop, by)."""
    if isinstance(e, Expr):
        for atom in e.atoms():
            if isinstance(atom, Call) and atom.op in ("floordiv", "mod"):
                x, n = atom.args
                if isinstance(x, Expr) and len(x.terms) == 1 and x.terms[0][1] == 1 and len(x.terms[0][0]) == 1:
                    inner = x.terms[0][0][0]
                    if isinstance(inner, Symbol) and is_loop(inner):
                        yield inner, n
                        continue
                yield from divided_loops(x)


def is_mixed_radix(position: Dim, extent: dict[Symbol, Dim]) -> bool:
    """True where the flat position is a sum of loops whose strides nest, or splits that add up to such a sum."""
    position = recombine(position)
    parts = [(coefficient(position, s), d) for s, d in extent.items()]
    split = [
        a
        for a in (position.atoms() if isinstance(position, Expr) else ())
        if isinstance(a, Call) and symbols(of(a)) & extent.keys()
    ]
    if split:
        parts = [(c, d) for c, d in parts if c is not None and c != 0]
        for call in split:
            parts.append((_factor(position, call), _call_extent(call, extent)))
    reach: Dim = 1
    while parts:
        found = next((p for p in parts if p[0] is not None and always_equal(p[0], reach)), None)
        if found is None:
            return False
        parts.remove(found)
        reach = reach * found[1]
    return True


def _factor(position: Dim, call: Call) -> Dim | None:
    """What an operation is multiplied by, where it stands in one term alone."""
    assert isinstance(position, Expr)
    terms = [(mono, c) for mono, c in position.terms if call in mono]
    if len(terms) != 1:
        return None
    mono, total = terms[0]
    out: Dim = total
    for a in mono:
        if a != call:
            out = out * of(a)
    return out


def _call_extent(call: Call, extent: dict[Symbol, Dim]) -> Dim:
    x, n = call.args
    if call.op == "mod":
        return n
    inner = symbols(x)
    return prod(extent.get(s, 1) for s in inner) // n if call.op == "floordiv" else 0
