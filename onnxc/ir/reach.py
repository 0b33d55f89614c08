"""How far symbolic expressions reach: whether what a kernel computes of sizes fits in 32 bits."""

from __future__ import annotations

from collections.abc import Iterable

from onnxc.ir.expr import Atom, Call, Dim, Symbol, floordiv, is_nonnegative, of, prod, symbols, upper


def reach(d: Dim) -> Dim:
    """What an expression never exceeds, up or down: a sum of products of sizes, free of loop variables.

    >>> from onnxc.ir.expr import Sym, index
    >>> n, i = Sym("n"), index("i", Sym("n") * 64)
    >>> reach(2 * i + 3), reach(i - n), reach(i // n % 7 - n)
    (128*n + 1, 65*n + 1, n + 7)
    """
    if isinstance(d, int):
        return abs(d)
    has_calls = any(isinstance(atom, Call) for atom in d.atoms())
    top = upper(d) if not has_calls and is_nonnegative(d) else None
    if isinstance(top, int):
        return max(top, 0)
    if top is not None:
        return _sum(prod(map(of, mono)) * c for mono, c in top.terms if c > 0)
    return _sum(prod(map(_reach_of_atom, mono)) * abs(c) for mono, c in d.terms)


def _reach_of_atom(atom: Atom) -> Dim:
    if isinstance(atom, Symbol):
        return of(atom) if atom.hi is None else reach(atom.hi)
    assert isinstance(atom, Call)
    a, b = atom.args
    if atom.op == "mod":
        return reach(b)
    if atom.op != "floordiv":
        return reach(a) + reach(b)
    by = b if all(s.hi is None for s in symbols(b)) else 1
    return floordiv(reach(a), by) + (0 if is_nonnegative(a) else 1)


def _sum(parts: Iterable[Dim]) -> Dim:
    return sum(parts, start=0)
