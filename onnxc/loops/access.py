"""How each primitive reads its operands: the index of every operand element that one output element needs.

This is the whole of lowering for views (they become index arithmetic) and the skeleton for everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from onnxc.errors import LimitError
from onnxc.ir.expr import (
    Dim,
    Expr,
    Symbol,
    always_equal,
    floordiv,
    index,
    is_less,
    is_nonnegative,
    mod,
    prod,
    recombine,
    substitute,
    symbols,
)
from onnxc.ir.graph import Node, Value

Index = tuple[Dim, ...]
_fresh = count()


def fresh(prefix: str, extent: Dim) -> Expr:
    """A new loop variable. Terms are ordered by names: of one length, so that the order is that of creation, and what
    was compiled before in this process changes nothing.
    """
    return index(f"{prefix}{next(_fresh):07x}", extent)


def broadcast(value: Value, at: Index) -> Index:
    """The index of an operand that numpy broadcasts to the shape that `at` indexes."""
    own = at[len(at) - value.rank :] if value.rank else ()
    return tuple(0 if d == 1 else i for d, i in zip(value.shape, own, strict=True))


def flatten(at: Index, shape: Sequence[Dim]) -> Dim:
    """Row-major position."""
    total: Dim = 0
    for i, d in zip(at, shape, strict=True):
        total = total * d + i
    return total


def unflatten(position: Dim, shape: Sequence[Dim]) -> Index:
    """The index at a row-major position; in a shape without elements, which has none, zeros."""
    if any(isinstance(d, int) and d == 0 for d in shape):
        return (0,) * len(shape)
    out: list[Dim] = []
    for k, d in enumerate(shape):
        stride = prod(shape[k + 1 :])
        q = floordiv(position, stride)
        out.append(q if k == 0 else mod(q, d))
    return tuple(out)


def _groups(old: Sequence[Dim], new: Sequence[Dim]) -> list[tuple[int, int, int, int]] | None:
    """Matches runs of dims with equal products: (i0, i1, j0, j1) slices of old and new; None where they
    do not match.
    """
    out = []
    i = j = 0
    while i < len(old) or j < len(new):
        i0, j0 = i, j
        a: Dim = 1
        b: Dim = 1
        first = True
        while first or not always_equal(a, b):
            first = False
            take_old = i < len(old) and (j >= len(new) or _smaller(a, b) or always_equal(a, b))
            if take_old:
                a, i = a * old[i], i + 1
            elif j < len(new):
                b, j = b * new[j], j + 1
            else:
                return None
            if a == 0 or b == 0:
                return None
            if i == len(old) and j == len(new) and not always_equal(a, b):
                return None
        out.append((i0, i, j0, j))
    return out


def _smaller(a: Dim, b: Dim) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    if isinstance(a, int):
        return True
    if isinstance(b, int):
        return False
    return (
        len(a.terms) < len(b.terms)
        or len(a.terms[0][0]) < len(b.terms[0][0])
        or (
            len(a.terms) == 1 and len(b.terms) == 1 and a.terms[0][0] == b.terms[0][0] and a.terms[0][1] < b.terms[0][1]
        )
    )


def reshape_index(at: Index, new: Sequence[Dim], old: Sequence[Dim]) -> Index:
    """The index into shape `old` of the element at `at` of shape `new`."""
    groups = _groups(old, new)
    if groups is None:
        return _reshaped(at, new, old)
    out: list[Dim] = []
    for i0, i1, j0, j1 in groups:
        if i1 - i0 == 1 and j1 - j0 == 1:
            out.append(at[j0])
        else:
            out.extend(_reshaped(at[j0:j1], new[j0:j1], old[i0:i1]))
    return tuple(out)


def _reshaped(at: Index, new: Sequence[Dim], old: Sequence[Dim]) -> Index:
    """`reshape_index` of dims that do not fall into groups.

    An index is one of an element that there is, though its expression may not say so: a window's or padding's is
    looked at only where it is inside. Left as it is, it could carry over into the next row, and would be divided. Where
    it is part of what was divided before, it has to be left, to be put together again: the shorter one is taken.
    """
    ways = [tuple(at)]
    inside: dict[Symbol, Dim] = {}
    unsure = [
        not isinstance(i, int) and not (is_nonnegative(i) and is_less(i, d)) for i, d in zip(at, new, strict=True)
    ]
    if any(unsure):
        places = [fresh("p", d) if u else i for i, d, u in zip(at, new, unsure, strict=True)]
        inside = {s: i for p, i, u in zip(places, at, unsure, strict=True) if u for s in symbols(p)}
        ways.append(tuple(places))
    found: list[Index] = []
    for k, way in enumerate(ways):
        try:
            split = unflatten(recombine(flatten(way, new)), old)
            found.append(tuple(substitute(i, inside) for i in split))
        except LimitError:
            if k + 1 == len(ways) and not found:
                raise
    return min(found, key=lambda index: sum(len(str(i)) for i in index))


def view_index(node: Node, at: Index) -> Index:
    """The operand index of a reshape, transpose, expand or slice."""
    (x,) = node.inputs
    assert x is not None
    if node.op == "reshape":
        return reshape_index(at, node.output.shape, x.shape)
    if node.op == "transpose":
        perm = node.attrs["perm"]
        return tuple(at[perm.index(i)] for i in range(len(perm)))
    if node.op == "expand":
        return broadcast(x, at)
    assert node.op == "slice", node.op
    return tuple(s + i * step for s, i, step in zip(node.attrs["starts"], at, node.attrs["steps"], strict=True))


def behind_view(node: Node, at: Index) -> tuple[Value, Index] | None:
    """The element that a view shows; None where its index is too complicated, behind views of views."""
    try:
        return node.operands[0], view_index(node, at)
    except LimitError:
        return None


def pushed_index(node: Node, at: Index) -> Index | None:
    """The other way: where the operand's element `at` stands in the output of a reshape or transpose."""
    (x,) = node.inputs
    assert x is not None
    if node.op == "reshape":
        return reshape_index(at, x.shape, node.output.shape)
    if node.op == "transpose":
        return tuple(at[p] for p in node.attrs["perm"])
    return None
