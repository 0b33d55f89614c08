"""Kernels that walk through lines: along one axis of a tensor, for each index of the others.

What such a kernel reads is open (`onnxc.planner.operands`): the section of its operand says how an element is
computed of a line's index and a position.
"""

from __future__ import annotations

from onnxc.codegen.cpp.epilogue import mapping, substitute_indices
from onnxc.codegen.triton import spelling
from onnxc.codegen.triton.epilogue import Tile, symbol
from onnxc.codegen.triton.kernel import touched
from onnxc.codegen.triton.terms import TileVariable
from onnxc.codegen.triton.writer import Writer
from onnxc.ir.expr import Dim, prod
from onnxc.ir.graph import Value
from onnxc.loops.access import Index, fresh
from onnxc.loops.nest import Nest, Phase, Store
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.planner.lower import Lowering
from onnxc.planner.section import Section


class Lines:
    """The lines of a routine's operand, and of results of its rank.

    Args:
        lanes: of how many lines a program has at once, along the first axis of its tile, with the mask of those that
            count; None where a line is a number.
    """

    def __init__(self, group: Group, layout: Layout, lanes: int | None = None, mask: str | None = None) -> None:
        assert group.node is not None
        self.group, self.layout, self.lanes, self.mask = group, layout, lanes, mask
        (self.x,), self.axis = group.node.operands, group.node.attrs["axis"]
        self.names: dict[int, str] = {}  # of the index along each other axis
        order = layout.order_of(group.node.outputs[0])
        self.others = [a for a in order if a != self.axis and self.x.shape[a] != 1]

    @property
    def n(self) -> Dim:
        """Elements of a line."""
        n: Dim = self.x.shape[self.axis]
        return n

    @property
    def count(self) -> Dim:
        """How many there are."""
        return prod(self.x.shape[a] for a in self.others)

    def writer(self) -> Writer:
        """Of the kernel."""
        return Writer(self.layout, [*touched(self.group, self.layout), *self.group.node.outputs], self.n)  # type: ignore[union-attr]

    def divide(self, w: Writer, line: str) -> None:
        """Takes a line's number apart."""
        rest = line
        for k, a in reversed(list(enumerate(self.others))):
            name, size = w.buffers.fresh("i"), w.size(self.x.shape[a])
            w.lines.append(f"{name} = {rest}{f' % {size}' if k else ''}")
            rest = f"({rest} // {size})"
            self.names[a] = name

    def start(self, w: Writer, value: Value) -> str:
        """A pointer to a line of a result."""
        strides = self.layout.strides(value)
        names = [self.names[a] for a in self.others]
        return f"{w.start(value)} + {w.along(names, [strides[a] for a in self.others])}"

    def tile(self, w: Writer, shape: tuple[int, ...], position: TileVariable) -> tuple[Tile, Index]:
        """A tile of lines and positions, and the index of its elements."""
        tile, places = Tile(shape, w.buffers), list[Dim]()
        for a, d in enumerate(self.x.shape):
            own = fresh("i", d)
            if a == self.axis:
                tile.lane(symbol(own), position)
            elif a not in self.names:
                places.append(0)
                continue
            elif self.lanes is None:
                tile.scalar(symbol(own), self.names[a])
            else:
                tile.lane(symbol(own), TileVariable(self.names[a], 0, self.lanes, self.mask))
            places.append(own)
        return tile, tuple(places)

    def read(self, w: Writer, shape: tuple[int, ...], position: TileVariable) -> tuple[list[str], str]:
        """Statements for the operand's elements, and these as they would lie in memory; of fewer lanes where they are
        the same along a line.
        """
        x = self.x
        section = self.group.operands.get(x.id) or Section.over(x, self.layout.order_of(x))
        lowering = Lowering(section, self.layout)
        store = Store(x, 0, lowering.at(x, section.index))
        nest = Nest([], [Phase([], stores=[store])], lowering.lookups)
        tile, places = self.tile(w, shape, position)
        substitute_indices(nest, [mapping(section, places)])
        emitter, scope = tile.emitter(dict(nest.lookups)), tile.scope()
        text = emitter.emit(nest.stores()[0].term, scope)
        return scope.lines, spelling.narrowed(text, x.dtype)


def as_term(name: str, text: str, value: Value) -> str:
    """Names elements as kernels compute with them; a bool stays a byte."""
    return f"{name} = {text if value.dtype.name == 'bool' else spelling.widened(text, value.dtype)}"
