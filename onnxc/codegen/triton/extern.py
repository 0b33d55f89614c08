"""Products that a library can do: which those are, and what the library is told of one.

A matmul group is one where its epilogue is no more than cuBLASLt's: a bias for each column, a matrix that is added,
then ReLU or GELU in its tanh form. What a function is, is found out by its values, not by how a model spells it. The
kernel of the group is written all the same: it runs where the library is not found, or knows no way for the sizes that
come.

cuBLASLt rounds to halves once, at the end, where the kernel also rounds what the model stores between its ops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from onnxc.codegen.cpp.epilogue import mapping, substitute_indices
from onnxc.codegen.triton.options import Options
from onnxc.codegen.triton.terms import Packed
from onnxc.ir.expr import Dim, Symbol, always_equal, coefficient, is_nonnegative, of, substitute, symbols
from onnxc.ir.graph import Value
from onnxc.loops.terms import Apply, Const, Load, Result, Term, children
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.planner.lower import Lowering
from onnxc.planner.templates import MatmulAccess
from onnxc.primitives.base import lookup

At = TypeVar("At")  # where a matrix begins: a `Start`, or a place of the program
To = TypeVar("To")
FLOATS = ("float32", "float16", "bfloat16")
PRECISIONS = ("float32", "tf32")  # of Options, that the library has
CASTS = ("cast", "bitcast", "byte_table")  # terms do not tell their primitives what they become
Array = np.ndarray[Any, Any]
_ROUNDED = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-3}  # how far GELU's constants may be off, as a share
_MOST = 2 * float(np.finfo(np.float32).max)  # a function of sums ends nowhere below
_FAR = np.geomspace(1e-38, _MOST, 1001)
_ODD = np.random.default_rng(0).normal(0, 4, 1001)
_PROBES = np.concatenate([[1.0, 2.0], -_FAR, _FAR, np.linspace(-12, 12, 1201), _ODD])


class Start(NamedTuple):
    """An element of a buffer."""

    storage: Value | Packed
    base: Dim


@dataclass(frozen=True)
class Lies(Generic[At]):
    """A matrix in memory: where it begins, and elements from row to row, and from one of a batch to the next; `turned`
    where it is from column to column, and those of a column are neighbours.
    """

    at: At
    apart: Dim
    batch: Dim
    turned: bool = False


@dataclass(frozen=True)
class Multiplication(Generic[At]):
    """d = epilogue(a @ b + c + bias).

    Attributes:
        sizes: rows and columns of d, length of the sums, and how many products there are.
        c, bias: None where there is none.
    """

    sizes: tuple[Dim, Dim, Dim, Dim]
    a: Lies[At]
    b: Lies[At]
    d: Lies[At]
    c: Lies[At] | None
    bias: At | None
    epilogue: str
    dtype: str
    precision: str

    def placed(self, where: Callable[[At], To]) -> Multiplication[To]:
        """The same, with other words for where matrices begin."""

        def lies(x: Lies[At]) -> Lies[To]:
            return Lies(where(x.at), x.apart, x.batch, x.turned)

        return Multiplication(
            self.sizes, lies(self.a), lies(self.b), lies(self.d), lies(self.c) if self.c is not None else None,
            where(self.bias) if self.bias is not None else None, self.epilogue, self.dtype, self.precision,
        )  # fmt: skip


def multiplication(
    group: Group, layout: Layout, options: Options, access: MatmulAccess, operands: Sequence[Any]
) -> Multiplication[Start] | None:
    """A matmul group as the library can do it; None where it cannot.

    Args:
        operands: the factors, as the kernel reads them.
    """
    node = group.node
    assert node is not None
    dtype = node.output.dtype
    m, n, k = access.sizes
    if group.twin is not None or len(group.sections) != 1 or dtype.name not in FLOATS or options.dot not in _DOTS:
        return None
    if any(always_equal(size, few) for size in (m, n, k) for few in (0, 1)):
        return None
    nest = Lowering(group.sections[0], layout, group.results).nest(None)
    substitute_indices(nest, [mapping(group.sections[0], access.index)])
    stores = nest.stores()
    if len(stores) != 1 or nest.lookups or nest.reductions() or stores[0].value.dtype is not dtype:
        return None
    (row,), (column,) = symbols(access.m), symbols(access.n)
    loops = _Loops(row, column, access.batch)
    found = _epilogue(stores[0].term, dtype.name)
    d = loops.matrix(stores[0].value, stores[0].address)
    factors = [loops.factor(x, own) for x, own in zip(operands, (row, column), strict=True)]
    if found is None or d is None or None in factors:
        return None
    name, loads = found
    bias = [x for load in loads if (x := loops.vector(load.value, load.index[0])) is not None]
    c = [y for load in loads if (y := loops.matrix(load.value, load.index[0])) is not None]
    if len(bias) + len(c) != len(loads) or max(len(bias), len(c)) > 1:
        return None
    if c and c[0].at.storage is d.at.storage and c[0] != d:  # what is written over must lie where it is read
        return None
    (a, b), count = factors, loops.count
    assert a is not None and b is not None
    return Multiplication(
        (m, n, k, count), a, b, d, next(iter(c), None), next(iter(bias), None), name, dtype.name, options.precision
    )


_DOTS = ("ieee", "tf32")


class _Loops:
    """The loops of a product, and how matrices lie along them."""

    def __init__(self, row: Symbol, column: Symbol, batch: Sequence[tuple[Symbol, Dim]]) -> None:
        self.row, self.column, self.batch = row, column, batch
        self.count: Dim = 1
        for _, size in batch:
            self.count = self.count * size

    def matrix(self, value: Value, address: Dim) -> Lies[Start] | None:
        """What has rows one behind the other."""
        apart, near = coefficient(address, self.row), coefficient(address, self.column)
        if apart is None or near is None or always_equal(apart, 0) or not always_equal(near, 1):
            return None
        return self._lies(value, address, apart, False)

    def vector(self, value: Value, address: Dim) -> Start | None:
        """What all rows of all products have in common."""
        near = coefficient(address, self.column)
        if near is None or not always_equal(near, 1) or symbols(address) & {self.row, *(s for s, _ in self.batch)}:
            return None
        found = self._lies(value, address, 0, False)
        return found.at if found is not None else None

    def factor(self, x: Any, own: Symbol) -> Lies[Start] | None:
        """An operand, as the kernel reads it: `outer` is its stride along the result, `inner` along the sum. Rows are
        those of the result for the left one, and of the sum for the right one.
        """
        left = own is self.row
        near, far = (x.inner, x.outer) if left else (x.outer, x.inner)
        if always_equal(near, 1):
            return self._lies(x.value, x.base, far, False)
        return self._lies(x.value, x.base, near, True) if always_equal(far, 1) else None

    def _lies(self, value: Value | Packed, address: Dim, apart: Dim, turned: bool) -> Lies[Start] | None:
        step = self._step(address)
        if step is None or not (is_nonnegative(apart) and is_nonnegative(step)):  # the library goes forward alone
            return None
        loops = (self.row, self.column, *(s for s, _ in self.batch))
        base = substitute(address, dict.fromkeys(loops, 0))
        rest = address - base
        for loop in loops:
            own = coefficient(address, loop)
            if own is None:
                return None
            rest = rest - of(loop) * own
        return Lies(Start(value, base), apart, step, turned) if always_equal(rest, 0) else None

    def _step(self, address: Dim) -> Dim | None:
        """How far products of the batch are apart, if all of them are equally far."""
        step: Dim = 0
        size: Dim = 1  # products for each turn of the loop
        for loop, count in reversed(self.batch):
            own = coefficient(address, loop)
            if own is None or (size != 1 and not always_equal(own, step * size)):
                return None
            step = own if size == 1 else step
            size = size * count
        return step


# ---------------------------------------------------------------- what follows the sums


def _epilogue(term: Term, dtype: str) -> tuple[str, list[Load]] | None:
    """Which function of the library's a term is, and what is added to the sums before it."""
    term = _bare(term, dtype)
    sums = {t: loads for t in _innermost(term, dtype) if (loads := _added(t, dtype)) is not None}
    if len(sums) != 1:
        return None
    ((inner, loads),) = sums.items()
    if inner == term:
        return "", loads
    with np.errstate(all="ignore"), contextlib.suppress(_OtherError):
        values = np.broadcast_to(_at(term, inner, _PROBES, dtype), _PROBES.shape)
        if np.array_equal(values, np.maximum(_PROBES, 0)):
            return "relu", loads
        if _is_gelu(values, _ROUNDED[dtype]):
            return "gelu", loads
    return None


def _is_gelu(values: Array, rounded: float) -> bool:
    """Whether a function is x/2 (1 + tanh(p x + q x^3)) to the last digits, with p and q within a share of GELU's."""
    one, two = np.arctanh(2 * values[:2] / _PROBES[:2] - 1)  # p + q, 2p + 8q
    q = (two - 2 * one) / 6
    p = one - q
    root = np.sqrt(2 / np.pi)
    wanted = _PROBES / 2 * (1 + np.tanh(p * _PROBES + q * _PROBES**3))
    return bool(
        abs(p / root - 1) < rounded and abs(q / (0.044715 * root) - 1) < rounded
        and np.all(np.abs(values - wanted) <= 1e-9 * np.abs(wanted) + 1e-14 * np.minimum(np.abs(_PROBES), 1))
    )  # fmt: skip


class _OtherError(Exception):
    """A term is no function of the sums alone."""


def _bare(term: Term, dtype: str) -> Term:
    """A term without conversions between halves and float32, which the library computes in."""
    own = (dtype, "float32")
    while isinstance(term, Apply) and term.op == "cast" and dtype != "float32":
        if term.dtype.name not in own or term.args[0].dtype.name not in own:
            break
        term = term.args[0]
    return term


def _added(term: Term, dtype: str) -> list[Load] | None:
    """What is added to the result of the product, if the term is no more than that."""
    term = _bare(term, dtype)
    if isinstance(term, Result):
        return []
    if not isinstance(term, Apply) or term.op != "add":
        return None
    for one, other in (term.args, term.args[::-1]):
        load, before = _bare(other, dtype), _added(one, dtype)
        if before is not None and isinstance(load, Load) and load.dtype.name == dtype:
            return [*before, load]
    return None


def _innermost(term: Term, dtype: str) -> Iterator[Term]:
    """The largest parts of a term that are sums."""
    stack, seen = [term], set[Term]()
    while stack:
        t = _bare(stack.pop(), dtype)
        if t not in seen:
            seen.add(t)
            if _added(t, dtype) is not None:
                yield t
            else:
                stack.extend(children(t))


def _at(term: Term, inner: Term, x: Array, dtype: str) -> Array:
    """A term as a function of one of its parts."""
    known: dict[Term, Array] = {inner: x}

    def value(t: Term) -> Array:
        t = _bare(t, dtype)
        if t not in known:
            if isinstance(t, Const) and t.dtype.name in FLOATS:
                known[t] = np.frombuffer(t.raw, t.dtype.numpy).astype(np.float64)
            elif isinstance(t, Apply) and t.op not in CASTS and (evaluate := lookup(t.op).evaluate) is not None:
                known[t] = np.asarray(evaluate(*map(value, t.args), **dict(t.attrs)))
            else:
                raise _OtherError
        return known[t]

    return value(term)
