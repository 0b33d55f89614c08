"""What the planner decides: groups of nodes that share a kernel, and the plan that they make."""

from __future__ import annotations

from dataclasses import dataclass, field

from onnxc.ir.graph import Graph, Node, Origin, Value, merge_origins
from onnxc.loops.access import Index
from onnxc.planner.layout import Layout
from onnxc.planner.recurrence import Recurrence
from onnxc.planner.rows import Apart
from onnxc.planner.section import Section
from onnxc.primitives.movement import VIEWS


@dataclass(frozen=True)
class FusionOptions:
    """Switches for measurement and for tests: each turns one kind of fusion off.

    Attributes:
        vertical: nodes with those that read them.
        epilogue: what follows a template, in its kernel.
        horizontal: small kernels that do not need each other.
        chains: convolutions of a chain, in bands of rows.
        split: no fusion but its opposite: reductions in two stages, which costs kernels and gains speed.
        in_place: of training steps: parameters are written over, and intermediates over operands that nobody reads
            later.
        relay: on GPUs: kernels that read a large tensor twice, image by image.
        walks: on GPUs: kernels begin at the end of a large buffer, where the one before them has ended.
        branches: of training steps on GPUs: kernels run beside others that they do not need.
        pairs: on GPUs: two products of one matrix whose results meet in a function, as the gate and what it opens.
        tables: a function from bytes to bytes, as of a quantized model's activations, in one step: its 256 results are
            looked up.
        lift: on CPUs: channels whose weights are as good as zero, denormal numbers among them, are scaled by powers of
            two, and back.
        libraries: on GPUs: products by cuBLASLt, where they were measured to take less time.
        rows: on CPUs: each thread takes rows of its own through all steps of a loop, where these do not meet.
        selects: an If of two small branches that cannot fail is no step of the host: both are computed, one is taken.
        turns: of loops that data end: a program runs many iterations that collect results, and (on CPUs) one whose
            number of iterations has a limit is part of the program around it.
        stacks: sequences of tensors of one shape are one tensor.
        recurrence: on GPUs: all steps of a loop in one kernel, where they are products of states and what is element by
            element, as of an LSTM.
        recompute: of training steps: the backward pass computes values of the forward pass again. Without it a memory
            budget has no effect.
    """

    vertical: bool = True
    epilogue: bool = True
    horizontal: bool = True
    chains: bool = True
    split: bool = True
    in_place: bool = True
    relay: bool = True
    walks: bool = True
    branches: bool = True
    pairs: bool = True
    tables: bool = True
    lift: bool = True
    libraries: bool = True
    rows: bool = True
    selects: bool = True
    turns: bool = True
    stacks: bool = True
    recurrence: bool = True
    recompute: bool = True


OF_STEPS = ("in_place", "recompute", "branches")  # switches that matter to training steps alone


@dataclass
class Placement:
    """A section's root goes into part of a larger value (concat), whose first element is at `start`."""

    target: Value
    start: Index


@dataclass(eq=False)
class Group:
    """One kernel to be: its sections, or a template or runtime routine with an epilogue section."""

    kind: str  # "loops" | "template" | "opaque" | "control"
    node: Node | None = None
    region: Plan | None = None  # of a control group
    sections: list[Section] = field(default_factory=list)
    placements: dict[int, Placement] = field(default_factory=dict)  # by position of the section
    nodes: list[Node] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    chain: list[Group] = field(default_factory=list)  # template groups that run band by band, this one's node last
    stages: list[Section] = field(default_factory=list)  # that run before the section, image by image
    twin: Node | None = None  # another product of the same left operand, whose result the epilogue reads too
    operands: dict[int, Section] = field(default_factory=dict)  # by id of the value: what a routine reads element-wise
    finishes: bool = False  # whether a routine has an epilogue, the first of the sections
    apart: Apart | None = None  # of a control group: where threads divide the rows of its region
    recurrence: Recurrence | None = None  # of a control group: where one kernel does all of its steps

    @property
    def cores(self) -> tuple[Node, ...]:
        """The nodes that a template or a routine computes; what else is in its kernel follows from their results."""
        return tuple(n for n in (self.node, self.twin) if n is not None)

    @property
    def results(self) -> tuple[Value, ...]:
        """What a template leaves in its accumulators."""
        return tuple(n.output for n in self.cores)

    def is_for(self, node: Node) -> bool:
        """Whether a template or a routine computes the node itself, and reads its operands from memory."""
        return any(n is node for n in self.cores)

    @property
    def origin(self) -> Origin:
        """The nodes of the user's model that it computes parts of."""
        return merge_origins(n.origin for n in self.nodes)

    def stored(self) -> list[Value]:
        """Values that this kernel writes."""
        out: dict[int, Value] = {}
        if self.kind in ("opaque", "control") and self.node is not None and not self.finishes:
            out.update({v.id: v for v in self.node.outputs})
        for k, section in enumerate(self.sections):
            if k in self.placements:
                target = self.placements[k].target
                out[target.id] = target
            out.update({vid: section.values[vid] for vid in section.stores})
        return list(out.values())


@dataclass
class Plan:
    """The kernels in an order in which they can run, and why each boundary is where it is."""

    graph: Graph
    groups: list[Group]
    boundaries: dict[int, str]  # value id -> why it is stored
    layout: Layout
    walks: bool = True  # as of FusionOptions
    branches: bool = True
    libraries: bool = True


def group_reads(group: Group) -> set[int]:
    """Ids of the stored values that a kernel reads."""
    if group.chain:
        between = {v.id for g in group.chain[:-1] for v in g.stored()}
        return set[int]().union(*(group_reads(g) for g in group.chain)) - between
    found: set[int] = set()
    for v in (v for core in group.cores for v in core.operands if v.id not in group.operands):
        chain = v
        found.add(chain.id)
        while chain.node is not None and chain.node.op in VIEWS:
            chain = chain.node.operands[0]
            found.add(chain.id)
    for section in (*group.stages, *group.sections):
        found |= {vid for vid in section.demands if vid not in section.members}
    found -= {section.root.id for section in group.stages}
    return found - {v.id for core in group.cores for v in core.outputs}
