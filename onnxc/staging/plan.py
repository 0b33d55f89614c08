"""What a staged model does at a call: steps over slots, as a compiled model keeps them.

A slot holds a value: an array, a list, None. Each step names the slots that it reads and writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from onnxc.ir.graph import Graph, Node, Value
from onnxc.ir.types import Type


@dataclass
class Step:
    """One step.

    Attributes:
        kind: `part` (a program), or a node of `onnxc.primitives.host`.
        inputs: slots; None for what is left out.
        outputs: slots.
        types: of the outputs.
        part: of a program: its graph, whose inputs are those of the step and then a uint8[n, 0] for each of `sizes`,
            by which it learns sizes that are in none of the inputs' shapes.
        sizes: names of symbols.
        node: of all others.
        regions: the plans of the node's regions.
        dead: slots that no later step reads.
    """

    kind: str
    inputs: list[int | None]
    outputs: list[int]
    types: list[Type | None]
    part: Graph | None = None
    sizes: list[str] = field(default_factory=list)
    node: Node | None = None
    regions: list[Plan] = field(default_factory=list)
    dead: list[int] = field(default_factory=list)


@dataclass
class Plan:
    """Steps in order.

    Attributes:
        slots: how many there are.
        inputs, outputs: slots of the graph's own; an output may be an input, or stand twice.
        types: of the inputs.
        constants: slots with their values, constant arrays.
    """

    slots: int
    inputs: list[int]
    outputs: list[int]
    types: list[Type | None]
    steps: list[Step]
    constants: list[tuple[int, Value]] = field(default_factory=list)

    def told(self, symbol: str) -> bool:
        """Whether a program of it is told the size of this name."""
        return any(symbol in step.sizes for step in self.parts())

    def parts(self) -> Iterator[Step]:
        """The programs, those of regions too."""
        for step in self.steps:
            if step.part is not None:
                yield step
            for region in step.regions:
                yield from region.parts()
