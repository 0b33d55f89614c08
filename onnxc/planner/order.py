"""The order in which a training step adds up numbers: that of each sum follows from the sum alone.

Which values a kernel computes and stores decides along which loop vectors are best, and vectors along another loop add
in another order. So that a step's results do not depend on what is saved for the backward pass and what is computed
again, the order of a sum is chosen here, by its operand's shape and by how what that is computed from lies in memory;
and kernels keep to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnxc.ir.expr import Dim, Symbol, always_equal, coefficient, is_nonnegative, prod, symbols
from onnxc.ir.graph import Graph, Node, Value
from onnxc.loops.access import Index, behind_view, broadcast, fresh
from onnxc.planner.layout import Layout
from onnxc.planner.section import CONTRACTIONS, WINDOWS, SumOrder
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import constant_of
from onnxc.primitives.movement import VIEWS

SUMS = ("reduce_sum", "reduce_prod")
LANES = 16  # of the vectors that orders are chosen for, whatever the CPU's are
ACROSS = 12  # what it costs to combine the lanes of a vector, in loads
TILE = 3.0  # what it costs to read a vector by way of a tile
NEAR = 16  # elements between lanes that lie in neighbouring lines
DEPTH = 24  # nodes between a sum and the values that it is computed from


def sum_orders(graph: Graph, layout: Layout) -> dict[int, SumOrder]:
    """The order of every sum and product of floats, by the id of its result."""
    found = (n for n in graph.nodes if n.op in (*SUMS, *WINDOWS, *CONTRACTIONS) and n.output.dtype.is_float)
    return {n.output.id: _order(n, layout) for n in found if n.op != "window_max"}


def _order(node: Node, layout: Layout) -> SumOrder:
    if node.op not in SUMS:
        return SumOrder(False, ())
    (x,) = node.operands
    own = [fresh("i", d) for d in x.shape]
    at = tuple(0 if d == 1 else i for i, d in zip(own, x.shape, strict=True))
    loops = [(next(iter(symbols(i))), d) for i, d in zip(own, x.shape, strict=True)]
    reduced = [loops[a] for a in sorted(node.attrs["axes"]) if x.shape[a] != 1]
    kept = [loop for a, loop in enumerate(loops) if a not in node.attrs["axes"] and x.shape[a] != 1]
    places = sorted(_read(x, at), key=lambda p: -_size(p[0]))
    addresses = [layout.address(v, i) for v, i in places]
    runs = _runs(_by_stride(reduced, addresses), reduced, addresses)
    across = bool(runs) and _is_across(runs, _runs(_by_stride(kept, addresses), kept, addresses), addresses)
    return SumOrder(across, tuple(tuple(reduced.index(loop) for loop in run) for run in runs))


def _read(x: Value, at: Index) -> list[tuple[Value, Index]]:
    """The values that a value is computed from element by element, and where each is read."""
    found: list[tuple[Value, Index]] = []
    pending, seen = [(x, at)], 0
    while pending:
        value, index = pending.pop(0)
        node = value.node
        if constant_of(value) is not None and value.t.size == 1:
            continue
        seen += 1
        shown = behind_view(node, index) if node is not None and node.op in VIEWS and seen < DEPTH else None
        if shown is not None:
            pending.append(shown)
        elif node is not None and lookup(node.op).kind is Kind.POINTWISE and node.operands and seen < DEPTH:
            pending += [(v, broadcast(v, index)) for v in node.operands]
        else:
            found.append((value, index))
    return found


def _size(value: Value) -> int:
    return value.t.size if isinstance(value.t.size, int) else 1 << 40


_Loop = tuple[Symbol, Dim]


def _by_stride(loops: Sequence[_Loop], addresses: Sequence[Dim]) -> list[_Loop]:
    """Loops from the largest stride to the smallest; those of strides that cannot be told stay where they are."""
    out: list[tuple[Dim, _Loop]] = []
    for loop in loops:
        strides = (coefficient(e, loop[0]) for e in addresses)
        stride: Dim = next((c for c in strides if c is not None and not always_equal(c, 0)), 0)
        at = len(out)
        while at > 0 and not always_equal(stride, out[at - 1][0]) and is_nonnegative(stride - out[at - 1][0]):
            at -= 1
        out.insert(at, (stride, loop))
    return [loop for _, loop in out]


def _runs(loops: Sequence[_Loop], logical: Sequence[_Loop], addresses: Sequence[Dim]) -> list[list[_Loop]]:
    """Loops in order, those that every address walks as one, and that are neighbours of the value too, joined."""
    runs: list[list[_Loop]] = []
    for loop in loops:
        before = runs[-1][-1] if runs else None
        joins = before is not None and logical.index(before) + 1 == logical.index(loop)
        if before is not None and joins and all(_is_contiguous(e, before[0], loop) for e in addresses):
            runs[-1].append(loop)
        else:
            runs.append([loop])
    return runs


def _is_contiguous(e: Dim, outer: Symbol, inner: _Loop) -> bool:
    a, b = coefficient(e, outer), coefficient(e, inner[0])
    return a is not None and b is not None and always_equal(a, b * inner[1])


def _is_across(runs: list[list[_Loop]], kept: list[list[_Loop]], addresses: Sequence[Dim]) -> bool:
    """Whether the lanes of a vector are parts of one sum, rather than of neighbouring ones: whichever costs less."""
    if not kept:
        return True
    inner, _ = runs[-1][-1]
    extent = prod(d for _, d in runs[-1])
    vectors = -(-extent // LANES) if isinstance(extent, int) and extent > 0 else 8
    across = (ACROSS / vectors + sum(_price(coefficient(e, inner)) for e in addresses)) / _filled(extent)
    beside = (
        sum(_beside(e, run[-1][0], inner, extent) for e in addresses) / _filled(prod(d for _, d in run))
        for run in kept
    )  # fmt: skip
    return across <= min(beside)


def _beside(e: Dim, lane: Symbol, inner: Symbol, extent: Dim) -> float:
    """What it costs to read a vector of neighbouring sums' elements."""
    c = coefficient(e, lane)
    long = not isinstance(extent, int) or 2 * extent >= LANES
    if c is not None and c not in (0, 1) and long and coefficient(e, inner) == 1:
        return TILE + (2.0 * LANES / extent if isinstance(extent, int) and extent < LANES else 0.0)
    return _price(c)


def _price(c: Dim | None) -> float:
    """What it costs to read a vector whose lanes are so many elements apart; None: unevenly."""
    if c is None:
        return 20.0
    if isinstance(c, int) and 0 <= c <= 4:
        return c + 1.0 if c > 1 else 0.5 + c / 2
    return 12.0 if isinstance(c, int) and abs(c) <= NEAR else 24.0


def _filled(extent: Dim) -> float:
    """How much of a loop's vectors is used."""
    return extent / (-(-extent // LANES) * LANES) if isinstance(extent, int) and extent > 0 else 1.0
