"""What a report tells of a kernel's call: the same for every target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnxc.choices import Choice
from onnxc.ir.expr import Dim, Symbol, substitute, symbols
from onnxc.ir.graph import Node, Origin, Value
from onnxc.planner.flops import elements_read, total
from onnxc.planner.groups import Group, Plan, group_reads
from onnxc.primitives.builder import constant_of


@dataclass(frozen=True)
class Updates:
    """The inputs that a program overwrites: their positions, and the first call of a kernel that does so."""

    inputs: tuple[int, ...]
    first: int


@dataclass(frozen=True)
class Step:
    """A primitive of a kernel: op, type, numbers of the model's nodes, positions of those steps of the kernel that it
    reads, and operations and elements, to compare it with the other steps.
    """

    op: str
    type: str
    nodes: tuple[int, ...]
    reads: tuple[int, ...]
    work: Dim


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
    needs: tuple[int, ...] = ()  # ids of the values that it reads from memory
    gives: tuple[int, ...] = ()  # ids of the values that it stores, in the order of `boundaries`
    takes: tuple[tuple[int, int], ...] = ()  # this and the next: see `onnxc.codegen.flow.linked`
    group: int = 0
    results: tuple[tuple[int, int], ...] = ()
    steps: tuple[Step, ...] = ()

    @property
    def stores(self) -> tuple[str, ...]:
        """Types of the values that it stores."""
        return tuple(t for t, _ in self.boundaries)


def kernel_call(
    plan: Plan, group: Group, name: str, kind: str, buffers: Iterable[Value], packed: int, turns: Dim,
    choice: Choice | None = None, sizes: Mapping[Symbol, Dim] | None = None,
) -> KernelCall:  # fmt: skip
    """The facts of a call of the function `name`.

    Args:
        buffers: the storages that it takes.
        packed: bytes of the constants that it takes in an order of its own.
        turns: how often it is called in a run.
        sizes: what symbols are that the model does not have.
    """
    stored, sizes = group.stored(), sizes or {}
    boundaries = tuple((_type(v, sizes), plan.boundaries.get(v.id, "")) for v in stored)
    written = {plan.layout.storage(v).id for v in stored if v.id not in plan.layout.overwrites}
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
    reads, writes, flops, pointwise = (substitute(d, sizes) for d in (reads + weights, writes, flops, pointwise))
    return KernelCall(
        name, kind, group.origin, tuple(group.reasons), boundaries, reads, writes, weights, flops, pointwise,
        turns, choice, tuple(sorted(group_reads(group))), tuple(v.id for v in stored),
        steps=tuple(_steps(group.nodes, sizes)),
    )  # fmt: skip


def _type(value: Value, sizes: Mapping[Symbol, Dim]) -> str:
    return str(value.t.with_shape(tuple(substitute(d, sizes) for d in value.shape)))


def _steps(nodes: Sequence[Node], sizes: Mapping[Symbol, Dim]) -> Iterator[Step]:
    position = {v.id: k for k, node in enumerate(nodes) for v in node.outputs}
    for node in nodes:
        reads = sorted({position[v.id] for v in node.operands if v.id in position})
        flops, pointwise = total([node])
        work = flops + pointwise
        for v in node.outputs:
            work = work + v.t.size
        types = ", ".join(_type(v, sizes) for v in node.outputs)
        yield Step(node.op, types, tuple(s.number for s in node.origin), tuple(reads), substitute(work, sizes))


def size_symbols(plan: Plan) -> list[str]:
    """The dynamic dims of a plan, in the order in which its program takes them."""
    found: set[Symbol] = set()
    for v in plan.graph.values():
        for d in v.shape:
            found |= symbols(d)
    return sorted(s.key for s in found)
