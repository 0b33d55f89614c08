"""Sizes that are known at a call: dim expressions in a form that a saved model holds, and their numbers.

A *size* is what JSON can write: an int, the name of a symbol, or a sum of products, ``[[2, "s0"], [1]]`` for
``2*s0 + 1``. A factor that is a list is an operation, ``["floordiv", "s0", 2]``.

>>> from onnxc.ir.expr import Sym
>>> encode(2 * Sym("s0") + 1), encode(Sym("s0") // 2)
([[2, 's0'], [1]], [[1, ['floordiv', 's0', 2]]])
>>> evaluate([[2, "s0"], [1]], {"s0": 5})
11
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from onnxc.ir.expr import Atom, Call, Dim

Size = int | str | list[Any]

_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": max,
    "min": min,
}


def encode(dim: Dim) -> Size:
    """A dim as a size."""
    if isinstance(dim, int):
        return dim
    terms = [[coefficient, *map(_factor, monomial)] for monomial, coefficient in dim.terms]
    if len(terms) == 1 and terms[0][0] == 1 and len(terms[0]) == 2 and isinstance(terms[0][1], str):
        return terms[0][1]
    return terms


def _factor(atom: Atom) -> str | list[Any]:
    if isinstance(atom, Call):
        return [atom.op, *map(encode, atom.args)]
    return atom.key


def evaluate(size: Size, values: Mapping[str, int]) -> int:
    """The number that a size has where the symbols have these values.

    Raises:
        ZeroDivisionError: it divides by a dim that is zero.
    """
    if isinstance(size, int):
        return size
    if isinstance(size, str):
        return values[size]
    total = 0
    for coefficient, *factors in size:
        term: int = coefficient
        for factor in factors:
            term *= values[factor] if isinstance(factor, str) else _operate(factor, values)
        total += term
    return total


def symbols_in(size: Size) -> set[str]:
    """The names of the symbols that a size is computed from.

    >>> sorted(symbols_in([[2, "s0"], [1, ["min", "s1", 5]]]))
    ['s0', 's1']
    """
    if isinstance(size, int):
        return set()
    if isinstance(size, str):
        return {size}
    factors = [factor for _, *row in size for factor in row]
    return set().union(*({f} if isinstance(f, str) else symbols_in(f[1]) | symbols_in(f[2]) for f in factors))


def _operate(factor: list[Any], values: Mapping[str, int]) -> int:
    name, a, b = factor
    return _OPERATIONS[name](evaluate(a, values), evaluate(b, values))


def spell(dim: Dim, names: Mapping[str, str]) -> int | str | None:
    """A dim for a person: an int, the model's name of a dynamic dim (None for one without), an expression.

    >>> from onnxc.ir.expr import Sym
    >>> spell(Sym("s0"), {"s0": "batch"}), spell(Sym("s1"), {}), spell(2 * Sym("s0"), {"s0": "batch"})
    ('batch', None, '2*batch')
    """
    size = encode(dim)
    if isinstance(size, int):
        return size
    if isinstance(size, str):
        return names.get(size)
    return _sum(size, names)


def _sum(terms: list[Any], names: Mapping[str, str]) -> str:
    text = ""
    for coefficient, *factors in terms:
        words = [_word(f, names) for f in factors]
        if abs(coefficient) != 1 or not words:
            words.insert(0, str(abs(coefficient)))
        sign = ("-" if coefficient < 0 else "") if not text else (" - " if coefficient < 0 else " + ")
        text += sign + "*".join(words)
    return text


def _word(factor: str | list[Any], names: Mapping[str, str]) -> str:
    if isinstance(factor, str):
        return names.get(factor) or factor
    name, *sizes = factor
    a, b = (
        s if isinstance(s, int) else _word(s, names) if isinstance(s, str) else f"({_sum(s, names)})" for s in sizes
    )
    sign = {"floordiv": "//", "mod": "%"}.get(name)
    return f"({a} {sign} {b})" if sign else f"{name}({a}, {b})"
