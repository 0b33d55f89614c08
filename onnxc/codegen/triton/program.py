"""Writes the program of a plan for a GPU: Triton source, and the steps that launch its kernels.

The source is one Python text: what `library.py` holds, then a function for each distinct kernel. The steps (launches,
copies, loops) are data: the runtime evaluates their sizes, and records them as one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from onnxc.codegen.calls import KernelCall, kernel_call, size_symbols
from onnxc.codegen.triton.kernel import Kernel
from onnxc.codegen.triton.loops import emit_sections
from onnxc.codegen.triton.opaque import emit_opaque
from onnxc.codegen.triton.options import Options
from onnxc.codegen.triton.templates import emit_template
from onnxc.codegen.triton.terms import Packed
from onnxc.codegen.weights import WeightStore
from onnxc.errors import UnsupportedError
from onnxc.ir.expr import Dim, Sym
from onnxc.ir.graph import Value
from onnxc.planner.groups import Group, Plan
from onnxc.planner.layout import Layout
from onnxc.planner.lower import Lowering
from onnxc.planner.memory import Buffer, assign_offsets, lifetimes
from onnxc.primitives.builder import constant_of

# Counts every change of what is generated: part of the cache key.
VERSION = 2

Encode = Callable[[Dim], Any]  # how a step spells a size


@dataclass(frozen=True)
class Place:
    """Where a buffer begins: what it is part of, the number of that part, and bytes from its start."""

    kind: str  # "input" | "output" | "arena" | "weights"
    number: int
    offset: Dim = 0

    def at(self, offset: Dim) -> Place:
        """A place some bytes further."""
        return Place(self.kind, self.number, self.offset + offset)

    @property
    def is_aligned(self) -> bool:
        """Whether its address is a multiple of 16, as those of all whole buffers are."""
        coefficients = [self.offset] if isinstance(self.offset, int) else [c for _, c in self.offset.terms]
        return all(c % 16 == 0 for c in coefficients)


@dataclass(frozen=True)
class Size:
    """A number that a kernel takes."""

    value: Dim
    type: str  # "i32" | "i64"


@dataclass(frozen=True)
class Launch:
    """One kernel, once: which, for which call of the report, over how many programs, with what."""

    kernel: int
    call: int
    programs: Dim
    arguments: tuple[Place | Size | None, ...]  # None: where errors are written down


@dataclass(frozen=True)
class Copy:
    """Bytes from one buffer to another."""

    to: Place
    source: Place
    nbytes: Dim


@dataclass(frozen=True)
class Fill:
    """Zeros."""

    to: Place
    nbytes: Dim


@dataclass(frozen=True)
class Loop:
    """Steps that run once for each value of a counter."""

    counter: str
    trip: Dim
    steps: tuple[Step, ...]


Step = Launch | Copy | Fill | Loop


@dataclass(frozen=True)
class Function:
    """A function of the source: what it takes, and how it is compiled."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    warps: int
    stages: int
    loose: tuple[int, ...] = ()  # parameters that point to where no alignment is known: a step's part of a sequence


@dataclass
class Program:
    """The generated source with what is needed to run it."""

    source: str
    functions: list[Function]
    steps: list[Step]
    calls: list[KernelCall]
    buffers: list[Buffer]
    symbols: list[str]
    weights: WeightStore
    kernels: dict[str, str] = field(default_factory=dict)  # function -> text
    offsets: list[int] | None = None  # of the buffers in the arena, where all sizes are known
    arena_bytes: int = 0


def library() -> str:
    """The text that stands in front of generated kernels."""
    return resources.files("onnxc.codegen.triton").joinpath("library.py").read_text(encoding="utf-8")


class ProgramWriter:
    """Generates the program of a plan."""

    def __init__(self, plan: Plan, options: Options | None = None) -> None:
        self.plan, self.options = plan, options or Options()
        self.weights = WeightStore()
        self.functions: dict[tuple[str, int, int, tuple[int, ...]], Function] = {}
        self.texts: dict[str, str] = {}
        self.calls: list[KernelCall] = []
        self.steps: list[Step] = []
        self.depth = 0
        self.turns: Dim = 1
        self.buffers = lifetimes(plan)
        graph = plan.graph
        self._places = {v.id: Place("input", k) for k, v in enumerate(graph.inputs)}
        self._places |= {v.id: Place("output", k) for k, v in enumerate(graph.outputs)}
        self._places |= {b.value.id: Place("arena", k) for k, b in enumerate(self.buffers)}

    def write(self) -> Program:
        """The whole program."""
        self._run(self.plan)
        text = "\n\n".join([library(), *(f"@triton.jit\ndef {name}{text}\n" for name, text in self.texts.items())])
        sizes = [b.nbytes for b in self.buffers]
        offsets, nbytes = None, 0
        if all(isinstance(s, int) for s in sizes):
            offsets, nbytes = assign_offsets(
                [s for s in sizes if isinstance(s, int)], [(b.first, b.last) for b in self.buffers]
            )
        return Program(
            text, list(self.functions.values()), self.steps, self.calls, self.buffers, size_symbols(self.plan),
            self.weights, dict(self.texts), offsets, nbytes,
        )  # fmt: skip

    def place(self, storage: Value | Packed) -> Place:
        """Where a buffer begins."""
        if isinstance(storage, Packed):
            return Place("weights", 0, self.weights.add_packed(storage.id, storage.nbytes, storage.write))
        if storage.id in self._places:
            return self._places[storage.id]
        constant = constant_of(storage)
        if constant is None:
            raise UnsupportedError(f"{storage} has no buffer")
        return Place("weights", 0, self.weights.add(storage.id, constant))

    def _run(self, plan: Plan) -> None:
        for group in plan.groups:
            if group.kind == "control":
                assert group.node is not None
                outside, self.turns = self.turns, self.turns * group.node.attrs["trip"]
                self._scan(group)
                self.turns = outside
            else:
                for kernel in self._kernels(group, plan.layout):
                    self._call(kernel, group)

    def _kernels(self, group: Group, layout: Layout) -> list[Kernel]:
        if group.kind == "loops":
            nests = [Lowering(s, layout).nest(group.placements.get(k)) for k, s in enumerate(group.sections)]
            return [emit_sections(nests)]
        if group.kind == "opaque":
            return emit_opaque(group, layout)
        return [emit_template(group, layout, self.options)]

    def _scan(self, group: Group) -> None:
        """A loop around the region's kernels; states are copied from the step's result before the next step."""
        node, region = group.node, group.region
        assert node is not None and region is not None
        n, m, places = node.attrs["states"], node.attrs["scanned"], node.attrs["results"]
        operands, inner = node.operands, region.graph
        counter = f"t{self.depth}"
        t = Sym(counter)
        for x, slice_ in zip(operands[n : n + m], inner.inputs[n : n + m], strict=True):
            self._places[slice_.id] = self.place(x).at(t * slice_.t.nbytes)
        for x, same in zip(operands[n + m :], inner.inputs[n + m :], strict=True):
            self._places[same.id] = self.place(x)
        after = [inner.outputs[k] for k in places]
        copies: list[Step] = []
        for y, stacked in zip(after[n:], node.outputs[n:], strict=True):
            place = self.place(stacked).at(t * y.t.nbytes)
            if y.id in self._places:
                copies.append(Copy(place, self.place(y), y.t.nbytes))
            else:
                self._places[y.id] = place
        outside, self.steps = self.steps, []
        self.depth += 1
        self._run(region)
        self.depth -= 1
        body, self.steps = self.steps, outside
        states = inner.inputs[:n]
        body += [*copies, *(self._copy(s, a) for s, a in zip(states, after[:n], strict=True))]
        self.steps += [
            *(self._copy(s, x) for s, x in zip(states, operands[:n], strict=True)),
            Loop(counter, node.attrs["trip"], tuple(body)),
            *(self._copy(f, s) for f, s in zip(node.outputs[:n], states, strict=True)),
        ]

    def _copy(self, to: Value, source: Value) -> Copy:
        return Copy(self.place(to), self.place(source), to.t.nbytes)

    def _call(self, kernel: Kernel, group: Group) -> None:
        text = kernel.text()
        places = [self.place(v) for v in kernel.buffers.storages]
        loose = tuple(k for k, place in enumerate(places) if not place.is_aligned)
        key = (text, kernel.warps, kernel.stages, loose)
        if key not in self.functions:
            name = f"k{len(self.functions)}"
            self.functions[key] = Function(name, tuple(kernel.parameters()), kernel.warps, kernel.stages, loose)
            self.texts[name] = text
        function = self.functions[key]
        arguments: list[Place | Size | None] = [*places]
        arguments += [Size(Sym(s), "i64" if kernel.wide else "i32") for s in kernel.sizes]
        if kernel.buffers.reports:
            arguments += [None, Size(len(self.calls), "i32")]
        number = int(function.name[1:])
        self.steps.append(Launch(number, len(self.calls), kernel.programs, tuple(arguments)))
        storages = [v for v in kernel.buffers.storages if not isinstance(v, Packed)]
        packed = sum(v.nbytes for v in kernel.buffers.storages if isinstance(v, Packed))
        self.calls.append(kernel_call(self.plan, group, function.name, kernel.kind, storages, packed, self.turns))


def encode(steps: list[Step] | tuple[Step, ...], spell: Encode) -> list[dict[str, Any]]:
    """The steps as data for a manifest; `spell` encodes sizes."""
    return [_encoded(step, spell) for step in steps]


def _encoded(step: Step, spell: Encode) -> dict[str, Any]:
    match step:
        case Launch():
            arguments = [_argument(a, spell) for a in step.arguments]
            grid = [spell(step.programs), 1, 1]
            return {"launch": step.kernel, "call": step.call, "grid": grid, "args": arguments}
        case Copy():
            return {"copy": [_argument(step.to, spell), _argument(step.source, spell), spell(step.nbytes)]}
        case Fill():
            return {"fill": [_argument(step.to, spell), spell(step.nbytes)]}
        case Loop():
            return {"loop": step.counter, "trip": spell(step.trip), "steps": encode(step.steps, spell)}


def _argument(argument: Place | Size | None, spell: Encode) -> list[Any]:
    if argument is None:
        return ["error"]
    if isinstance(argument, Size):
        return ["size", spell(argument.value), argument.type]
    return [argument.kind, argument.number, spell(argument.offset)]
