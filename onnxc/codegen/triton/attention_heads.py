"""Heads that share keys and values, as rows of one tile: where there are few queries, those are read once for all.

A matrix unit multiplies 16 rows at a time, however few of them there are. A model that generates text has one query
for each head, and several heads for each head of keys (grouped or multi-query attention).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from onnxc.codegen.triton.attention_tiles import FEW
from onnxc.ir.expr import Dim, Expr, Symbol, substitute, symbols
from onnxc.loops.access import fresh
from onnxc.planner.templates import AttentionAccess, Matrix


@dataclass(frozen=True)
class Sharing:
    """`count` neighbours of a batch loop share keys and values. `at` is its place among the batch loops."""

    loop: Symbol
    at: int
    count: int


def shared_heads(access: AttentionAccess) -> tuple[AttentionAccess, Sharing | None]:
    """The access with a loop over groups of heads in the place of one over heads, where that pays; and which."""
    queries = access.sizes[0]
    for at, (loop, size) in enumerate(access.batch):
        if not (isinstance(queries, int) and isinstance(size, int)):
            continue
        for count in range(min(size, FEW // max(1, queries)), 1, -1):
            if size % count:
                continue
            group, member = fresh("b", size // count), fresh("b", count)
            k, v = (_of_group(x, loop, group * count + member, member) for x in (access.k, access.v))
            if k is not None and v is not None:
                (own,) = symbols(group)
                batch = [*access.batch[:at], (own, size // count), *access.batch[at + 1 :]]
                return replace(access, batch=batch, k=k, v=v), Sharing(loop, at, count)
    return access, None


def _of_group(x: Matrix, loop: Symbol, head: Dim, member: Expr) -> Matrix | None:
    """A matrix by group; None where the members of a group have others."""
    base = substitute(x.base, {loop: head})
    return None if symbols(member) & symbols(base) else replace(x, base=base)
