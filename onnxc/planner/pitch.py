"""Long rows of an odd length are stored some elements apart, so that each begins at a whole vector.

A GPU reads rows fastest that begin at multiples of 16 bytes, and its units that copy tiles know no others: of the
scores of 50257 words a product would read one element after the other. So what products read and make, and what is
computed of it element by element, lies in rows as far apart as a multiple of 128 bytes. What is between two rows is
never read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from onnxc.ir.graph import Graph, Node, Value
from onnxc.passes.prepare import at_regions
from onnxc.planner.layout import Layout
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import constant_of
from onnxc.primitives.movement import VIEWS

VECTOR = 16  # bytes
APART = 128  # bytes that rows begin at multiples of
LONG = 1024  # elements of a row: shorter ones are in the caches
MOST = 1 << 30  # elements of a value: a position in it keeps within 32 bits if it did before

_READERS = (Kind.POINTWISE, Kind.VIEW, Kind.REDUCTION, Kind.INDEXED)


def align_rows(graph: Graph, layout: Layout) -> Layout:
    """The layout with the rows of what products read and make at multiples of a vector."""
    uses = graph.uses()
    pinned = {v.id for v in graph.inputs} | {v.id for v in graph.outputs} | at_regions(graph)
    pending = deque(v for n in graph.nodes if n.op == "matmul" for v in (*n.operands, n.output))
    seen: set[int] = set()
    while pending:
        v = pending.popleft()
        if v.id in seen or not v.rank:
            continue
        seen.add(v.id)
        pitch = _pitch(layout, v)
        if pitch is not None and v.id not in pinned and constant_of(v) is None and _is_read_by_rows(v, uses):
            layout.pitches[v.id] = pitch
        pending += _neighbours(v, uses)
    return layout


def _pitch(layout: Layout, v: Value) -> tuple[int, int] | None:
    """Elements of a row, and from row to row; None where rows are short, or begin at vectors as they are."""
    size, width = v.t.size, v.shape[layout.order_of(v)[-1]]
    if v.rank < 2 or not (isinstance(size, int) and isinstance(width, int)) or not LONG <= width < size <= MOST:
        return None
    bits = v.dtype.bits
    if bits % 8 or width * bits // 8 % VECTOR == 0:
        return None
    step = APART * 8 // bits
    return width, -(-width // step) * step


def _is_read_by_rows(v: Value, uses: dict[int, list[Node]]) -> bool:
    """Whether all that reads a value finds its elements by their index, and none joins its rows to longer ones."""
    readers = uses.get(v.id, ())
    known = all(n.op == "matmul" or lookup(n.op).kind in _READERS for n in readers)
    return known and all(n.output.shape[-1:] == v.shape[-1:] for n in readers if n.op == "reshape")


def _neighbours(v: Value, uses: dict[int, list[Node]]) -> Iterator[Value]:
    """Values with the same elements, or with one for each of them: views, and what is computed element by element."""
    nodes = [n for n in (v.node, *uses.get(v.id, ())) if n is not None]
    for node in nodes:
        if node.op in VIEWS or lookup(node.op).kind is Kind.POINTWISE:
            yield from (x for x in (*node.operands, node.output) if x.t.size == v.t.size)
