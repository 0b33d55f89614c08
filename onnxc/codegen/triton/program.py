"""Writes the program of a plan for a GPU: Triton source, and the steps that launch its kernels.

The source is one Python text: what `library.py` holds, then a function for each distinct kernel. The steps (launches,
products by a library, copies, loops) are data: the runtime evaluates their sizes, and records them as one CUDA graph.

What was measured for an architecture may choose other kernels for it than for another one: `write_programs` writes a
program for each, which differ in kernels and grids, and share buffers, weights and the numbers of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

from onnxc.choices import Choice, Decisions
from onnxc.codegen.calls import KernelCall, Updates, kernel_call, size_symbols
from onnxc.codegen.flow import linked
from onnxc.codegen.triton.extern import Lies, Multiplication, Start
from onnxc.codegen.triton.kernel import OWN, Kernel
from onnxc.codegen.triton.loops import candidates, emit_sections
from onnxc.codegen.triton.matmul import Extern
from onnxc.codegen.triton.opaque import emit_opaque
from onnxc.codegen.triton.options import Options
from onnxc.codegen.triton.recurrence import emit_recurrence, recurrence_candidates
from onnxc.codegen.triton.relay import emit_relay, relay_candidates
from onnxc.codegen.triton.templates import template_ways
from onnxc.codegen.triton.terms import Packed
from onnxc.codegen.triton.tuning import Ways, name, subject
from onnxc.codegen.triton.user import users_library
from onnxc.codegen.triton.walk import Walks
from onnxc.codegen.weights import WeightStore
from onnxc.errors import UnsupportedError
from onnxc.ir.expr import Dim, Sym, ceildiv
from onnxc.ir.graph import Value
from onnxc.loops.nest import Nest
from onnxc.planner.groups import Group, Plan
from onnxc.planner.in_place import is_step, own_outputs, updates_of
from onnxc.planner.layout import Layout
from onnxc.planner.lower import Lowering
from onnxc.planner.memory import ALIGN, Buffer, aligned, assign_offsets, lifetimes
from onnxc.planner.partition import has_budget
from onnxc.planner.slack import slack
from onnxc.primitives.builder import constant_of

# Counts every change of what is generated: part of the cache key.
VERSION = 17

WHOLE = 256  # bytes that weights begin at multiples of: a row of a tile is then a line of the cache, not parts of two

WAITING = 8  # kernels that may run before anything waits for a product, from which on it need not be quick
SPARE = 40  # kernels for which a buffer is kept behind the last one that touches it, where steps run side by side

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
    """One kernel, once: which, for which call of the report, over how many programs, with what, and the positions of
    the arguments that it writes to.
    """

    kernel: int
    call: int
    programs: Dim
    arguments: tuple[Place | Size | None, ...]  # None: where errors are written down
    written: tuple[int, ...] = ()


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


@dataclass(frozen=True)
class Multiply:
    """A product by cuBLASLt, with the algorithm that it suggests at a rank, from 1 on; or else `instead`."""

    call: int
    work: Multiplication[Place]
    rank: int
    instead: tuple[Launch, ...]


Step = Launch | Multiply | Copy | Fill | Loop


@dataclass(frozen=True)
class Function:
    """A function of the source: what it takes, and how it is compiled."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    warps: int
    stages: int
    loose: tuple[int, ...] = ()  # parameters that point to where no alignment is known: a step's part of a sequence
    resident: int = 0  # programs for each multiprocessor, where fewer than the grid has can do its work


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
    updates: Updates | None = None
    branches: bool = False  # whether steps that do not need each other run side by side


def library(name: str = "library") -> str:
    """The text that stands in front of generated kernels."""
    return resources.files("onnxc.codegen.triton").joinpath(f"{name}.py").read_text(encoding="utf-8")


@dataclass
class Shared:
    """What the programs of one plan have in common: weights, functions by all that makes them, and kernels that were
    written already, by group, candidate, and what runs instead of a library's.
    """

    weights: WeightStore = field(default_factory=lambda: WeightStore(WHOLE))
    functions: dict[tuple[object, ...], Function] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    kernels: dict[tuple[int, str, str], list[Kernel]] = field(default_factory=dict)
    subjects: dict[int, tuple[str, dict[str, Any]]] = field(default_factory=dict)


class ProgramWriter:
    """Generates the program of a plan.

    Args:
        decisions: which of several kernels to take, where it was measured.
        shared: with other programs of the same plan.
    """

    def __init__(
        self,
        plan: Plan,
        options: Options | None = None,
        decisions: Decisions | None = None,
        shared: Shared | None = None,
    ) -> None:
        self.plan, self.options = plan, options or Options()
        self.decisions, self.shared = decisions or Decisions(), shared or Shared()
        self.weights = self.shared.weights
        self.functions: list[Function] = []
        self.calls: list[KernelCall] = []
        self.steps: list[Step] = []
        self.depth = 0
        self.at = 0  # the position of the group
        self.turns: Dim = 1
        self.buffers = _kept(plan)
        self._slack = slack(plan) if is_step(plan.graph) else [0] * len(plan.groups)
        self.walks = Walks()
        self._scratch: set[int] = set()  # ids of the buffers that kernels have for themselves
        self._tasks: dict[tuple[Hashable, Dim], tuple[Value, ...]] = {}  # those that kernels have done: their buffers
        graph = plan.graph
        self._places = {v.id: Place("input", k) for k, v in enumerate(graph.inputs)}
        self._places |= {v.id: Place("output", k) for k, (_, v) in enumerate(own_outputs(graph))}
        self._places |= {b.value.id: Place("arena", k) for k, b in enumerate(self.buffers)}
        guests = [v for v in graph.values() if plan.layout.placed_on(v) is not None]
        self._places |= {v.id: self._places[plan.layout.storage(v).id] for v in guests}

    def write(self) -> Program:
        """The whole program."""
        self._run(self.plan)
        updates = self._update_rest()
        texts = {f.name: self.shared.texts[f.name] for f in self.functions}
        sizes = [b.nbytes for b in self.buffers]
        offsets, nbytes = None, 0
        if all(isinstance(s, int) for s in sizes):
            offsets, nbytes = assign_offsets(
                [s for s in sizes if isinstance(s, int)], [(b.first, b.last) for b in self.buffers]
            )
        return Program(
            source_of(texts), self.functions, self.steps, linked(self.plan, self.calls), self.buffers,
            size_symbols(self.plan), self.weights, texts, offsets, nbytes,
            updates, is_step(self.plan.graph) and self.plan.branches,
        )  # fmt: skip

    def _update_rest(self) -> Updates | None:
        """Copies what could not be written over its input there. No kernel waits to see whether another one has found
        something wrong: so an input counts as changed from the first call on.
        """
        graph = self.plan.graph
        updates = updates_of(graph)
        if not updates:
            return None
        apart = [v for v in graph.outputs if v.id in updates and v.id not in self.plan.layout.overwrites]
        self.steps += [self._copy(updates[v.id], v) for v in apart]
        position = {v.id: k for k, v in enumerate(graph.inputs)}
        return Updates(tuple(sorted({position[v.id] for v in updates.values()})), 0)

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
        for at, group in enumerate(plan.groups):
            if not self.depth:
                self.at = at
            if group.kind == "control" and group.recurrence is None:
                self._scan(group)
            elif group.kind == "opaque":
                for kernel in emit_opaque(group, plan.layout):
                    if not self._done(kernel):
                        self._call([kernel], group, plan.layout, None)
            else:
                kernels, choice = self._chosen(group, plan.layout)
                self._call(kernels, group, plan.layout, choice)
                if group.recurrence is not None and group.recurrence.stepwise != 0:
                    self._scan(group, group.recurrence.stepwise)

    def _chosen(self, group: Group, layout: Layout) -> tuple[list[Kernel], Choice | None]:
        """A group's kernels as decided, and the choice if there was any."""
        ways = self._ways(group, layout)
        if id(group) not in self.shared.subjects:
            names = {name(c): c for c in ways.candidates}
            known = subject(group, self._written(group, ways, next(iter(names), ""), names)) if len(names) > 1 else ""
            self.shared.subjects[id(group)] = known, names
        known, names = self.shared.subjects[id(group)]
        fitting = [n for n, c in names.items() if getattr(c, "only", None) in (None, self.decisions.architecture)]
        library = [n for n in fitting if isinstance(names[n], Extern)]
        choice = self.decisions.choose(known, fitting, library) if len(names) > 1 else None
        chosen, instead = (choice.chosen, choice.instead) if choice is not None else (next(iter(names), ""), "")
        return self._written(group, ways, chosen, names, instead), choice

    def _written(self, group: Group, ways: Ways, chosen: str, names: dict[str, Any], instead: str = "") -> list[Kernel]:
        key = (id(group), chosen, instead)
        if key not in self.shared.kernels:
            way = names.get(chosen)
            way = replace(way, instead=names.get(instead)) if isinstance(way, Extern) else way
            self.shared.kernels[key] = ways.emit(way)
        return self.shared.kernels[key]

    def _ways(self, group: Group, layout: Layout) -> Ways:
        if group.recurrence is not None:
            waves = recurrence_candidates(group, self.options)
            return Ways(waves, lambda choice: [emit_recurrence(group, layout, self.options, choice)])
        if group.stages:
            return Ways(relay_candidates(), lambda choice: [emit_relay(group, layout, choice)])
        if group.kind != "loops":
            beside = not self.depth and self._slack[self.at] >= WAITING
            own = replace(self.options, beside=beside, libraries=self.plan.libraries)
            return template_ways(group, layout, own)

        def nests() -> list[Nest]:  # new ones each time: emitting changes them
            return [Lowering(s, layout).nest(group.placements.get(k)) for k, s in enumerate(group.sections)]

        return Ways(candidates(nests()), lambda choice: emit_sections(nests(), choice, layout.pitches))

    def _scan(self, group: Group, when: Dim = 1) -> None:
        """A loop around the region's kernels; states are copied from the step's result before the next step. `when`: 1
        where it runs, else 0.
        """
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
        trip = node.attrs["trip"] * when
        outside, self.steps = (self.steps, self.turns), []
        self.turns = self.turns * trip
        self.depth += 1
        self._run(region)
        self.depth -= 1
        body, (self.steps, self.turns) = self.steps, outside
        states = inner.inputs[:n]
        body += [*copies, *(self._copy(s, a) for s, a in zip(states, after[:n], strict=True))]
        self.steps += [
            *(self._copy(s, x, when) for s, x in zip(states, operands[:n], strict=True)),
            Loop(counter, trip, tuple(body)),
            *(self._copy(f, s, when) for f, s in zip(node.outputs[:n], states, strict=True)),
        ]

    def _copy(self, to: Value, source: Value, when: Dim = 1) -> Copy:
        return Copy(self.place(to), self.place(source), to.t.nbytes * when)

    def _call(self, kernels: list[Kernel], group: Group, layout: Layout, choice: Choice | None) -> None:
        """One call of the report: a launch of each kernel."""
        self._scratch |= {v.id for kernel in kernels for v in kernel.own}
        for kernel in kernels:
            for value in kernel.scratch:
                self._places[value.id] = Place("arena", len(self.buffers))
                self.buffers.append(Buffer(value, value.t.nbytes * kernel.when, self.at, self.at))
        self._clear([(v, kernel.when) for kernel in kernels for v in kernel.cleared])
        # Any kernel of a group may write to what one of them has found room for.
        written = {layout.storage(v).id for v in group.stored()} | self._scratch
        launches = [self._launch(kernel, written) for kernel in kernels]
        extern = kernels[0].extern
        self.steps += [self._product(*extern, launches)] if extern is not None else launches
        storages = {s.id: s for kernel in kernels for s in kernel.buffers.storages}.values()
        values = [v for v in storages if not isinstance(v, Packed) and v.id not in self._scratch]
        packed = sum(v.nbytes for v in storages if isinstance(v, Packed))
        function = self.functions[launches[0].kernel].name
        facts = kernel_call(self.plan, group, function, kernels[0].kind, values, packed, self.turns, choice)
        self.calls.append(facts)

    def _product(self, rank: int, work: Multiplication[Start], instead: Sequence[Launch]) -> Multiply:
        """A product by a library, in place of these launches."""

        def place(x: Start) -> Place:
            return self.place(x.storage).at(x.base * x.storage.dtype.itemsize)

        return Multiply(len(self.calls), work.placed(place), rank, tuple(instead))

    def _done(self, kernel: Kernel) -> bool:
        """Whether another group has run a kernel for the same task: its buffers then serve this one, too."""
        key = (kernel.task, kernel.when)
        if kernel.task is None or key not in self._tasks:
            self._tasks[key] = kernel.own
            return False
        self._scratch |= {v.id for v in kernel.own}
        self._places |= {v.id: self._places[b.id] for v, b in zip(kernel.own, self._tasks[key], strict=True)}
        return True

    def _clear(self, values: Sequence[tuple[Value, Dim]]) -> None:
        """Finds room for buffers that kernels want to be zero, side by side, and fills it: each if the kernel runs."""
        number = len(self.buffers)
        end: Dim = 0
        for value, when in values:
            self._places[value.id] = Place("arena", number, end)
            nbytes = value.t.nbytes
            end = end + (aligned(nbytes) if isinstance(nbytes, int) else ceildiv(nbytes, ALIGN) * ALIGN) * when
        if values:
            self.buffers.append(Buffer(values[0][0], end, self.at, self.at))
            self.steps.append(Fill(Place("arena", number), end))

    def _launch(self, kernel: Kernel, written: set[int]) -> Launch:
        text = kernel.text(self.plan.walks and self.walks.turns(kernel))
        places = [self.place(v) for v in kernel.buffers.storages]
        for place in places:
            self._keep(place)
        loose = tuple(k for k, place in enumerate(places) if not place.is_aligned)
        key = (text, tuple(kernel.parameters()), kernel.warps, kernel.stages, loose, kernel.resident)
        known = self.shared.functions
        if key not in known:
            own = f"k{len(known)}"
            parameters = tuple(kernel.parameters())
            known[key] = Function(own, parameters, kernel.warps, kernel.stages, loose, kernel.resident)
            self.shared.texts[own] = text
        function = known[key]
        if function not in self.functions:
            self.functions.append(function)
        arguments: list[Place | Size | None] = [*places]
        arguments += [Size(Sym(s), "i64" if kernel.wide else "i32") for s in kernel.sizes]
        if kernel.buffers.reports:
            arguments += [None, Size(len(self.calls), "i32")]
        marked = tuple(k for k, v in enumerate(kernel.buffers.storages) if v.id in written)
        return Launch(self.functions.index(function), len(self.calls), kernel.grid, tuple(arguments), marked)

    def _keep(self, place: Place) -> None:
        """Has a buffer live until now: what an earlier group's kernels have left there is read again."""
        if place.kind == "arena" and self.buffers[place.number].last < self.at:
            self.buffers[place.number] = replace(self.buffers[place.number], last=self.at)


def _kept(plan: Plan) -> list[Buffer]:
    """The buffers of a plan. Where steps run side by side, each is kept a while longer, so that few steps wait until
    others have left the memory that they write to; but not where memory is short.
    """
    found = lifetimes(plan)
    if not is_step(plan.graph) or has_budget(plan.graph):
        return found
    return [replace(b, last=min(b.last + SPARE, max(b.last, len(plan.groups)))) for b in found]


def write_programs(plan: Plan, options: Options, decisions: Sequence[Decisions]) -> list[Program]:
    """A program for each of the decisions, which share buffers, weights, and the numbers of calls."""
    shared = Shared()
    return [ProgramWriter(plan, options, each, shared).write() for each in decisions]


def source_of(texts: Mapping[str, str]) -> str:
    """A source with these functions, and those of users that they call."""
    roles = [library("library_roles")] if any(OWN in text for text in texts.values()) else []
    own = (_defined(name, text) for name, text in texts.items())
    return "\n\n".join([library(), *roles, *users_library(texts.values()), *own])


def _defined(name: str, text: str) -> str:
    return f"@{'gluon' if OWN in text else 'triton'}.jit\ndef {name}{text.replace(OWN, f'{name}_')}\n"


def encode(steps: Sequence[Step], spell: Encode) -> list[dict[str, Any]]:
    """The steps as data for a manifest; `spell` encodes sizes."""
    return [_encoded(step, spell) for step in steps]


def _encoded(step: Step, spell: Encode) -> dict[str, Any]:
    match step:
        case Launch():
            arguments = [_argument(a, spell) for a in step.arguments]
            grid = [spell(step.programs), 1, 1]
            found = {"launch": step.kernel, "call": step.call, "grid": grid, "args": arguments}
            return {**found, "writes": list(step.written)}
        case Multiply():
            return _encoded_product(step, spell)
        case Copy():
            return {"copy": [_argument(step.to, spell), _argument(step.source, spell), spell(step.nbytes)]}
        case Fill():
            return {"fill": [_argument(step.to, spell), spell(step.nbytes)]}
        case Loop():
            return {"loop": step.counter, "trip": spell(step.trip), "steps": encode(step.steps, spell)}


def _encoded_product(step: Multiply, spell: Encode) -> dict[str, Any]:
    work = step.work

    def matrix(x: Lies[Place] | None) -> list[Any] | None:
        return None if x is None else [_argument(x.at, spell), spell(x.apart), spell(x.batch), int(x.turned)]

    return {
        "product": [spell(size) for size in work.sizes], "call": step.call,
        "a": matrix(work.a), "b": matrix(work.b), "d": matrix(work.d), "c": matrix(work.c),
        "bias": None if work.bias is None else _argument(work.bias, spell), "epilogue": work.epilogue,
        "dtype": work.dtype, "precision": work.precision, "rank": step.rank, "instead": encode(step.instead, spell),
    }  # fmt: skip


def _argument(argument: Place | Size | None, spell: Encode) -> list[Any]:
    if argument is None:
        return ["error"]
    if isinstance(argument, Size):
        return ["size", spell(argument.value), argument.type]
    return [argument.kind, argument.number, spell(argument.offset)]
