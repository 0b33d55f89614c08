"""Scalar terms: the body of a loop nest, one element at a time.

A term says what one element is; loop variables are symbols of the index expressions inside it. Terms are
immutable
and compared by structure, so that equal subterms of a kernel are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, Symbol, symbols
from onnxc.ir.graph import Value

T = TypeVar("T")


def _hashed_once(cls: type[T]) -> type[T]:
    """Keeps a term's hash: that of `x + x` asks twice for that of x, and so on down, which grows
    exponentially.
    """
    compute: Callable[[Any], int] = cls.__hash__

    def kept(self: Any) -> int:
        found = self.__dict__.get("_hash")
        if found is None:
            found = self.__dict__["_hash"] = compute(self)
        return int(found)

    setattr(cls, "__hash__", kept)  # noqa: B010  (a type checker takes it for a method of this class alone)
    return cls


@dataclass(frozen=True)
class Term:
    """A scalar of a dtype."""

    dtype: DType


@dataclass(frozen=True)
class Load(Term):
    """The element of a stored value at a logical index."""

    value: Value
    index: tuple[Dim, ...]


@dataclass(frozen=True)
class Const(Term):
    """A number; kept as the bytes of its dtype so that NaN and -0.0 compare and print right."""

    raw: bytes


@dataclass(frozen=True)
class Position(Term):
    """An index expression as a number (int64)."""

    expr: Dim


@_hashed_once
@dataclass(frozen=True)
class Apply(Term):
    """A pointwise primitive of terms."""

    op: str
    args: tuple[Term, ...]
    attrs: tuple[tuple[str, Any], ...] = ()


@_hashed_once
@dataclass(frozen=True)
class Guard(Term):
    """`inside` where every condition is >= 0, else `outside`; nothing of `inside` is read elsewhere."""

    conditions: tuple[Dim, ...]
    inside: Term
    outside: Term


@dataclass(frozen=True)
class Lookup:
    """An index that is data: `symbol` stands in index expressions for term wrapped into [0, extent). `inside`: it is
    known to lie there as it is.
    """

    symbol: Symbol
    term: Term
    extent: Dim
    inside: bool = False


@dataclass(frozen=True)
class Reduced(Term):
    """The result of a reduction of the same kernel (`Reduction.key`), at an index over its outer loops."""

    key: int
    index: tuple[Dim, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Result(Term):
    """The element that a template has just computed (its accumulator)."""

    value: Value


@dataclass
class Reduction:
    """`op` over `variables` of `body`; one per (reduced value, index).

    For argmax and argmin `position` is the index along the axis. `across`: whether the lanes of a vector are parts of
    one result, along the last of the variables, which are walked in their order; None where a kernel may choose.
    """

    key: int
    op: str
    value: Value
    index: tuple[Dim, ...]
    variables: tuple[tuple[Symbol, Dim], ...]
    body: Term
    position: Dim | None = None
    attrs: dict[str, Any] = field(default_factory=dict)
    across: bool | None = None


def children(term: Term) -> tuple[Term, ...]:
    """Direct subterms."""
    if isinstance(term, Apply):
        return term.args
    if isinstance(term, Guard):
        return (term.inside, term.outside)
    return ()


def walk(term: Term) -> Iterator[Term]:
    """The term and all below it, each once."""
    seen: set[int] = set()
    stack = [term]
    while stack:
        t = stack.pop()
        if id(t) not in seen:
            seen.add(id(t))
            yield t
            stack.extend(children(t))


def index_symbols(term: Term) -> set[Symbol]:
    """Symbols in the term's own index expressions (not its children's)."""
    found: set[Symbol] = set()
    exprs: tuple[Dim, ...] = ()
    if isinstance(term, (Load, Reduced)):
        exprs = term.index
    elif isinstance(term, Position):
        exprs = (term.expr,)
    elif isinstance(term, Guard):
        exprs = term.conditions
    for e in exprs:
        found |= symbols(e)
    return found


def deep_walk(roots: Iterable[Term], lookups: Mapping[Symbol, Lookup]) -> list[Term]:
    """Terms, all below them, and the terms of the lookups that their indices use."""
    out = [t for root in roots for t in walk(root)]
    seen: set[Symbol] = set()
    for t in out:
        for s in index_symbols(t):
            if s in lookups and s not in seen:
                seen.add(s)
                out.extend(walk(lookups[s].term))
    return out
