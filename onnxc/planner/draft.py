"""A plan in the making: the kernels that there are so far, and what all parts of the planner ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnxc.ir.graph import Graph, Node, Value
from onnxc.passes import epilogue
from onnxc.planner.clusters import Clusters
from onnxc.planner.groups import FusionOptions, Group
from onnxc.planner.in_place import late_nodes, updates_of
from onnxc.planner.layout import Layout, channels_last, is_turned
from onnxc.planner.machine import CPU, Machine
from onnxc.planner.order import sum_orders
from onnxc.planner.section import Section

Templates = Callable[[Node], bool]


class Draft:
    """Which kernels compute each node, and which values are stored.

    Attributes:
        homes: by id of a node, the groups that compute it.
        boundaries: by id of a value, why it is stored.
        late: ids of the nodes that are not of a training step's forward pass.
        beside: whether sums of different values share a pass, as `Machine.beside` says of training steps.
    """

    def __init__(
        self,
        graph: Graph,
        layout: Layout,
        options: FusionOptions,
        is_template: Templates,
        machine: Machine,
        exact: bool,
    ) -> None:
        self.graph, self.layout, self.options, self.is_template = graph, layout, options, is_template
        self.machine, self.exact = machine, exact
        self.orders = sum_orders(graph, layout) if exact else None
        self.clusters = Clusters(graph)
        self.uses = graph.uses()
        self.outputs = {v.id for v in graph.outputs}
        self.updated = updates_of(graph)
        self.late = late_nodes(graph)
        self.beside = machine.beside and bool(self.late)
        self.homes: dict[int, list[Group]] = {}
        self.groups: list[Group] = []
        self.boundaries: dict[int, str] = {}

    def section(self, root: Value) -> Section:
        """Loops over a value's elements."""
        return Section.over(root, self.layout.order_of(root), self.orders)

    def put(self, node: Node, group: Group) -> None:
        """Has this group alone compute a node."""
        self.homes[id(node)] = [group]
        self.clusters.merge(group.nodes[0], node)
        group.nodes.append(node)

    def note_stored(self, value: Value, reason: str) -> None:
        """A value goes to memory."""
        self.boundaries[value.id] = reason
        self.layout.stored.add(value.id)

    def needed(self, cores: Sequence[Node], taken: Sequence[Node]) -> list[Value]:
        """What must be stored if a template of these nodes takes those: results that others read."""
        return epilogue.needed(cores, taken, self.uses, self.outputs)

    def is_turned(self, value: Value, readers: list[Node]) -> bool:
        """Whether a copy has the value in another order, which is better done by itself: see passes/prepare.py."""
        if self.machine is not CPU or self.layout.order_of(value) != channels_last(value.rank):
            return False
        return any(is_turned(r) and self.layout.order_of(r.output) != channels_last(value.rank) for r in readers)

    def same_pass(self, node: Node, group: Group) -> bool:
        """Whether both are of a training step's forward pass, or both of what comes after it. What is saved between
        the two is the partitioner's decision, which no kernel may undo by computing something early.
        """
        return not self.late or (id(node) in self.late) == (id(group.nodes[0]) in self.late)
