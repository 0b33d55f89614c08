"""How values lie in memory: the order of their dims, and values that have no buffer of their own: they are parts of
larger ones, are written over others, or have the elements of others in another shape.

Logical shapes never change; a value's memory order is a permutation of its dims from outermost to innermost.
Convolutions and pooling run channels-last, so their values, and the pointwise values between them, are stored
channels-last, and no transpose is ever inserted inside a network. Graph inputs and outputs are row-major, and so is
what goes into regions and comes out of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from onnxc.ir.expr import Dim, recombine
from onnxc.ir.graph import Graph, Node, Value
from onnxc.loops.access import Index
from onnxc.passes.prepare import at_regions, joins_phases, reads_rows
from onnxc.planner.section import WINDOWS
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import constant_of
from onnxc.primitives.contraction import images_of
from onnxc.primitives.movement import VIEWS


@dataclass
class Layout:
    """Memory order and place of every value that is stored."""

    order: dict[int, tuple[int, ...]] = field(default_factory=dict)
    parts: dict[int, tuple[Value, Index]] = field(default_factory=dict)  # value id -> (whole, offset of the part)
    stored: set[int] = field(default_factory=set)  # values that a kernel writes, as far as the planner has decided
    overwrites: dict[int, Value] = field(default_factory=dict)  # value id -> what it is written over (in_place.py)
    reshaped: dict[int, Value] = field(default_factory=dict)  # value id -> its elements in another shape (placing.py)
    pitches: dict[int, tuple[int, int]] = field(default_factory=dict)  # of rows that are apart: length, and to the next

    def order_of(self, value: Value) -> tuple[int, ...]:
        """The logical axes of a value, the outermost in memory first."""
        return self.order.get(value.id, tuple(range(value.rank)))

    def strides(self, value: Value) -> tuple[Dim, ...]:
        """Elements between neighbours along each logical dim (of the whole, where the value is a part)."""
        if value.id in self.parts:
            return self.strides(self.parts[value.id][0])
        strides: list[Dim] = [0] * value.rank
        step: Dim = 1
        sizes, order = list(value.shape), self.order_of(value)
        if value.id in self.pitches:
            sizes[order[-1]] = self.pitches[value.id][1]
        for axis in reversed(order):
            strides[axis] = step
            step = step * sizes[axis]
        return tuple(strides)

    def nbytes(self, value: Value) -> Dim:
        """Bytes of a buffer for the value."""
        nbytes = value.t.nbytes
        if value.id not in self.pitches or not isinstance(nbytes, int):
            return nbytes
        width, pitch = self.pitches[value.id]
        return nbytes // width * pitch

    def offset(self, value: Value) -> Dim:
        """Elements from the start of the storage to the value's first."""
        if value.id not in self.parts:
            return 0
        whole, at = self.parts[value.id]
        return self.offset(whole) + dot(at, self.strides(whole))

    def storage(self, value: Value) -> Value:
        """The value that owns the buffer."""
        below = self.parts[value.id][0] if value.id in self.parts else self.placed_on(value)
        return value if below is None else self.storage(below)

    def placed_on(self, value: Value) -> Value | None:
        """The value in whose place it lies as a whole: it overwrites that one, or has its elements in another shape."""
        return self.overwrites.get(value.id, self.reshaped.get(value.id))

    def address(self, value: Value, at: Index) -> Dim:
        """Position of an element in its storage, in elements."""
        return recombine(self.offset(value) + dot(at, self.strides(value)))


def dot(at: Index, strides: tuple[Dim, ...]) -> Dim:
    """Sum of index times stride."""
    total: Dim = 0
    for i, s in zip(at, strides, strict=True):
        total = total + i * s
    return total


def channels_last(rank: int) -> tuple[int, ...]:
    """N, spatial..., C."""
    return (0, *range(2, rank), 1)


def assign(graph: Graph, templates: frozenset[str]) -> Layout:
    """Chooses the memory order of every value. `templates` are the ops that run as channels-last templates."""
    layout = Layout()
    pinned = {v.id for v in graph.inputs} | {v.id for v in graph.outputs} | at_regions(graph)
    uses = graph.uses()
    for node in graph.nodes:
        if node.op in ("conv", "conv_weights") and "conv" in templates:
            if reads_rows(node, graph, uses):
                continue
            images = images_of(node)
            for v in (*images, *([node.output] if node.op == "conv" else [])):
                if v.id not in pinned and constant_of(v) is None:
                    layout.order[v.id] = channels_last(v.rank)
            for v in images:
                _pull(layout, v, pinned)
        elif _follows(node):
            _inherit(layout, node, pinned)
    if "conv" in templates:
        for node in graph.nodes:
            if is_turned(node):
                layout.order.setdefault(node.operands[0].id, channels_last(node.output.rank))
    for node in graph.nodes:
        _order_for_reader(layout, node, uses, pinned)
    return layout


def turn_filters(graph: Graph, layout: Layout) -> Layout:
    """The layout with the computed weights of convolutions channels-last too, in any of the views that lead to them:
    for kernels that read weights as they lie, in long rows of channels. (Constants are packed, whatever their order.)
    """
    pinned = {v.id for v in graph.inputs} | {v.id for v in graph.outputs} | at_regions(graph)
    for node in graph.nodes:
        if node.op != "conv":
            continue
        chain = [node.operands[1]]
        while chain[-1].node is not None and chain[-1].node.op in VIEWS:
            chain.append(chain[-1].node.operands[0])
        for v in chain:
            if v.rank == node.output.rank and v.id not in pinned and constant_of(v) is None:
                layout.order.setdefault(v.id, channels_last(v.rank))
    return layout


def is_turned(node: Node) -> bool:
    """True for the copy that turns joined phases of a transposed convolution: see passes/prepare.py."""
    return node.op == "copy" and joins_phases(node.operands[0])


def _follows(node: Node) -> bool:
    if node.op == "gather":  # along one axis, as Resize does
        return node.output.rank == node.operands[0].rank
    return node.op in ("pad", "concat", "slice", *WINDOWS) or lookup(node.op).kind is Kind.POINTWISE


def _inherit(layout: Layout, node: Node, pinned: set[int]) -> None:
    value = node.output
    if value.id in layout.order or value.id in pinned or value.rank < 3:
        return
    if any(
        v.rank == value.rank and v.id in layout.order and layout.order[v.id] == channels_last(v.rank)
        for v in node.operands
    ):
        layout.order[value.id] = channels_last(value.rank)


def _pull(layout: Layout, value: Value, pinned: set[int]) -> None:
    """Values between a convolution and what they are computed from take its order too."""
    stack = [value]
    while stack:
        v = stack.pop()
        if v.node is None or not _follows(v.node):
            continue
        for x in v.node.operands:
            free = x.id not in layout.order and x.id not in pinned and constant_of(x) is None
            if free and x.rank == v.rank > 2 and x.node is not None and _follows(x.node):
                layout.order[x.id] = channels_last(x.rank)
                stack.append(x)


def _order_for_reader(layout: Layout, node: Node, uses: dict[int, list[Node]], pinned: set[int]) -> None:
    """A value that is only read transposed is stored transposed, if its innermost dim stays innermost."""
    for value in node.outputs:
        readers = uses.get(value.id, [])
        if (
            len(readers) == 1
            and readers[0].op == "transpose"
            and value.id not in layout.order
            and value.id not in pinned
        ):
            perm = readers[0].attrs["perm"]
            if perm and perm[-1] == len(perm) - 1 and node.op in ("attention",):
                layout.order[value.id] = perm
