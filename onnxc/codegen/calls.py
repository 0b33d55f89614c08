"""What a report tells of a kernel's call: the same for every target."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onnxc.choices import Choice
from onnxc.ir.expr import Dim, Symbol, symbols
from onnxc.ir.graph import Origin, Value
from onnxc.planner.flops import elements_read, total
from onnxc.planner.groups import Group, Plan
from onnxc.primitives.builder import constant_of


@dataclass(frozen=True)
class KernelCall:
    """One kernel of a run, for reports: which function, from which nodes, why it is one kernel."""

    function: str
    kind: str
    origin: Origin
    reasons: tuple[str, ...]
    boundaries: tuple[tuple[str, str], ...]  # type of each value that it stores, and why it is stored
    reads: Dim  # bytes, weights among them
    writes: Dim
    weights: int
    flops: Dim = 0  # of its contractions
    pointwise: Dim = 0  # other arithmetic
    turns: Dim = 1  # calls in a run: more than one inside a scan
    choice: Choice | None = None

    @property
    def stores(self) -> tuple[str, ...]:
        """Types of the values that it stores."""
        return tuple(t for t, _ in self.boundaries)


def kernel_call(
    plan: Plan, group: Group, name: str, kind: str, buffers: Iterable[Value], packed: int, turns: Dim,
    choice: Choice | None = None,
) -> KernelCall:  # fmt: skip
    """The facts of a call of the function `name`.

    Args:
        buffers: the storages that it takes.
        packed: bytes of the constants that it takes in an order of its own.
        turns: how often it is called in a run.
    """
    stored = group.stored()
    boundaries = tuple((str(v.type), plan.boundaries.get(v.id, "")) for v in stored)
    written = {plan.layout.storage(v).id for v in stored if v.id not in plan.layout.shared}
    needed = elements_read(group.nodes, plan.layout)
    reads: Dim = 0
    weights = packed
    for v in buffers:
        nbytes = needed.get(v.id, v.t.size) * v.dtype.itemsize
        if constant_of(v) is not None and isinstance(nbytes, int):
            weights += nbytes
        elif v.id not in written:
            reads = reads + nbytes
    writes: Dim = 0
    for v in stored:
        writes = writes + v.t.nbytes
    flops, pointwise = total(group.nodes)
    return KernelCall(
        name, kind, group.origin, tuple(group.reasons), boundaries, reads + weights, writes, weights, flops, pointwise,
        turns, choice,
    )  # fmt: skip


def size_symbols(plan: Plan) -> list[str]:
    """The dynamic dims of a plan, in the order in which its program takes them."""
    found: set[Symbol] = set()
    for v in plan.graph.values():
        for d in v.shape:
            found |= symbols(d)
    return sorted(s.key for s in found)
