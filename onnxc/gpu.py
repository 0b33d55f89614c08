"""Compiling for NVIDIA GPUs: what `compile` does for the targets ``cuda`` and ``cuda:sm_90``.

Machine code is made by Triton on any machine, with a GPU or without; one model may hold that of several architectures.
Where measurements say so, these have different kernels.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from onnxc.choices import Decisions
from onnxc.codegen.calls import KernelCall
from onnxc.codegen.triton.attention_steps import without_masks
from onnxc.codegen.triton.cubin import INSTALL, Image, KernelError, compile_each, compile_program
from onnxc.codegen.triton.matmul import Extern
from onnxc.codegen.triton.options import Options, check_precision, is_template
from onnxc.codegen.triton.program import (
    VERSION,
    Function,
    Launch,
    Loop,
    Multiply,
    Program,
    ProgramWriter,
    Shared,
    Step,
    encode,
    source_of,
    write_programs,
)
from onnxc.errors import CudaError, InputError, ToolchainError
from onnxc.ir.graph import Graph
from onnxc.planner.fusion import plan
from onnxc.planner.groups import FusionOptions, Plan
from onnxc.planner.in_place import is_step
from onnxc.planner.layout import Layout, assign, turn_filters
from onnxc.planner.machine import GPU
from onnxc.planner.partition import partitioned
from onnxc.planner.pitch import align_rows
from onnxc.planner.relay import relayed
from onnxc.planner.templates import ENABLED
from onnxc.runtime import sizes
from onnxc.runtime.cuda import cublaslt
from onnxc.runtime.cuda.driver import device, devices
from onnxc.tuned import Record, gpu_place, gpu_places

IMAGES = "cubins:"  # section of the machine code for an architecture
OLDEST = 75  # the oldest architecture that Triton compiles for
APART = 1.02  # of a step's memory may be taken so that kernels compute what others have computed: that is faster
BOUND = 90  # from here on Triton compiles for sm_90a and the like, whose code runs on no later architecture


@dataclass(frozen=True)
class GpuTarget:
    """What a model is compiled for: compute capabilities, as 90 for sm_90, and options of its kernels."""

    architectures: tuple[int, ...]
    options: Options

    def identity(self) -> list[Any]:
        """Everything that the machine code depends on."""
        return [list(self.architectures), self.options.precision, VERSION, _triton_version()]


def parse_target(target: str, precision: str) -> GpuTarget:
    """The target that a string names: ``cuda`` (this machine's GPU), ``cuda:sm_90``, or ``cuda:sm_80,sm_90``.

    Raises:
        InputError: the string or the precision is none of these. CudaError: ``cuda``, and there is no GPU.
    """
    check_precision(precision)
    name, _, rest = target.partition(":")
    found = [re.fullmatch(r"sm_(\d{2,3})", part) for part in rest.split(",")] if rest else []
    if name != "cuda" or not all(found):
        raise InputError(f"target is 'cpu', 'cuda', or 'cuda:sm_90' (several: 'cuda:sm_80,sm_90'), not {target!r}")
    numbers = tuple(sorted({int(m.group(1)) for m in found if m})) or (_capability(),)
    old = [n for n in numbers if n < OLDEST]
    if old:
        raise InputError(f"sm_{old[0]} is older than the oldest architecture that kernels can be made for, sm_{OLDEST}")
    return GpuTarget(numbers, Options(precision))


def _capability() -> int:
    major, minor = device().capability
    return int(major) * 10 + int(minor)


def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError as error:
        raise ToolchainError(INSTALL, cause=error) from error


# ---------------------------------------------------------------- what was measured


def local_architecture(target: GpuTarget) -> int:
    """The architecture of this machine's GPU, to measure on it.

    Raises:
        CudaError: there is no GPU. InputError: it is none that the target names.
    """
    try:
        number = _capability()
    except CudaError as error:
        raise CudaError(f'mode="max-autotune" measures on a GPU, and there is none: {error}', cause=error) from error
    if number not in target.architectures:
        named = ", ".join(f"sm_{n}" for n in target.architectures)
        raise InputError(f'mode="max-autotune" measures on this machine\'s GPU, which is sm_{number}, not {named}')
    return number


def local_place(architecture: int) -> str:
    """How a record calls this machine's GPU."""
    return gpu_place(device().name, architecture, _triton_version())


def decisions(record: Record | None, target: GpuTarget) -> dict[int, Decisions]:
    """What a record says for each architecture of a target.

    Measurements on any GPU of the architecture count; of several GPUs those on this machine's, else on the first by
    name.
    """
    return {n: _decisions(record, n) for n in target.architectures}


def _decisions(record: Record | None, architecture: int) -> Decisions:
    version = _triton_version()
    if record is None:
        return Decisions(missing="there is no record of measurements")
    places = gpu_places(record, architecture, version)
    if not places:
        elsewhere = [w for w in record.places() if f", sm_{architecture}," in w] or record.places()
        known = f"; it has {', '.join(elsewhere[:3])}" if elsewhere else ""
        return Decisions(missing=f"the record has nothing for sm_{architecture} with Triton {version}{known}")
    if len(places) > 1 and (own := _here(architecture)) in places:
        places = [own]
    best = {subject: name for where in reversed(places) for subject, name in record.best(where).items()}
    where = " and ".join(places)
    ranked = {subject: row.ranked for place in reversed(places) for subject, row in record.rows(place).items()}
    return Decisions(best, where, f"not among the {len(best)} choices measured on {where}", ranked=ranked)


def _here(architecture: int) -> str | None:
    """The place of this machine's GPU; None where it has none of this architecture, or none at all."""
    try:
        return local_place(architecture) if devices() and _capability() == architecture else None
    except CudaError:
        return None


def measurable(candidates: Iterable[str]) -> list[str]:
    """Those candidates that can be measured on this machine: not a library's where there is no library."""
    return [c for c in candidates if not c.startswith(Extern.called) or cublaslt.loaded() is not None]


# ---------------------------------------------------------------- the stages


def planned(graph: Graph, fusion: FusionOptions) -> Plan:
    """From a graph of primitives to the plan of its kernels."""
    graph = _conversions_first(without_masks(graph))
    options = replace(fusion, chains=False)

    def make(g: Graph, copies: Mapping[int, int]) -> Plan:
        found = plan(g, _layout(g), options, is_template, GPU)
        found = replace(found, walks=options.walks, branches=options.branches, libraries=options.libraries)
        return relayed(found) if options.relay else found

    return partitioned(graph, make, worth=APART, fast=True) if fusion.recompute else make(graph, {})


def _conversions_first(graph: Graph) -> Graph:
    """A training step in which all weights are converted before anything else: by few kernels."""
    if not is_step(graph):
        return graph
    first = [n for n in graph.nodes if n.op == "cast" and n.operands[0].node is None]
    taken = {id(n) for n in first}
    return replace(graph, nodes=[*first, *(n for n in graph.nodes if id(n) not in taken)])


def _layout(graph: Graph) -> Layout:
    return align_rows(graph, turn_filters(graph, assign(graph, ENABLED)))


def generate(plan: Plan, target: GpuTarget, measured: Mapping[int, Decisions]) -> dict[int, Program]:
    """From a plan to Triton source, for each architecture. Those whose kernels are the same have the same program."""
    numbers = target.architectures
    decided = [replace(measured.get(n, Decisions()), architecture=n) for n in numbers]
    written = write_programs(plan, target.options, decided)
    found: dict[int, Program] = {}
    for n, program in zip(numbers, written, strict=True):
        same = (p for p in found.values() if p.kernels.keys() == program.kernels.keys() and p.steps == program.steps)
        found[n] = next(same, program)
    return found


def build(program: Program, target: GpuTarget) -> tuple[dict[str, list[dict[str, Any]]], dict[str, bytes]]:
    """The machine code for each architecture: what the manifest says of it, and the sections."""
    rows: dict[str, list[dict[str, Any]]] = {}
    sections: dict[str, bytes] = {}
    for number in target.architectures:
        image_name = _image_name(number)
        rows[image_name], sections[IMAGES + image_name] = _packed(compile_program(program, number))
    return rows, sections


@dataclass
class Built:
    """Programs with their machine code.

    Attributes:
        programs: by architecture.
        rows: what the manifest says of each image, by the architecture's section.
        sections: machine code.
        own: the program of each of these sections.
    """

    programs: dict[int, Program]
    rows: dict[str, list[dict[str, Any]]]
    sections: dict[str, bytes]
    own: dict[str, Program]

    @property
    def first(self) -> Program:
        """The program that reports tell of: that of the oldest architecture."""
        return next(iter(self.programs.values()))

    @property
    def kernels(self) -> dict[str, str]:
        """The text of every function."""
        return {name: text for p in self.programs.values() for name, text in p.kernels.items()}

    @property
    def source(self) -> str:
        """The text of all of them."""
        return source_of(self.kernels)

    def calls(self) -> list[KernelCall]:
        """Of the first program; where another architecture has another kernel, the reason says so."""
        return [_told(n, call, self.programs) for n, call in enumerate(self.first.calls)]

    def described(self) -> dict[str, Any]:
        """What a manifest says of the programs."""
        steps = encode(self.first.steps, sizes.encode)
        return {"images": self.rows, "steps": steps, "branches": self.first.branches, **self._others()}

    def _others(self) -> dict[str, Any]:
        others = {k: encode(p.steps, sizes.encode) for k, p in self.own.items() if p is not self.first}
        return {"own_steps": others} if others else {}


def _told(number: int, call: KernelCall, programs: Mapping[int, Program]) -> KernelCall:
    if call.choice is None:
        return call
    found = {n: p.calls[number].choice for n, p in programs.items()}
    others = [f"sm_{n}: {c.chosen} ({c.why})" for n, c in found.items() if c and c.chosen != call.choice.chosen]
    return replace(call, choice=replace(call.choice, why="; ".join([call.choice.why, *others]))) if others else call


def make(plan: Plan, target: GpuTarget, measured: Mapping[int, Decisions], done: Callable[[str], None]) -> Built:
    """From a plan to machine code. Where a candidate does not compile for an architecture, the next one is taken.

    Args:
        measured: by architecture.
        done: is told the name of each stage that has ended.

    Raises:
        ToolchainError: a kernel does not compile in any way; or Triton is not installed.
    """
    measured = {n: measured.get(n, Decisions()) for n in target.architectures}
    while True:
        programs = generate(plan, target, measured)
        done("generate")
        built = Built(programs, {}, {}, {})
        for program in {id(p): p for p in programs.values()}.values():
            numbers = tuple(n for n, p in programs.items() if p is program)
            try:
                rows, sections = build(program, replace(target, architectures=numbers))
            except KernelError as error:
                refused = chosen(program, error.functions) - measured[numbers[0]].refused
                if not refused:
                    raise
                measured |= {n: replace(measured[n], refused=measured[n].refused | refused) for n in numbers}
                break
            built.rows |= rows
            built.sections |= sections
            built.own |= dict.fromkeys(rows, program)
        else:
            done("triton")
            return built
        done("triton")


def chosen(program: Program, functions: Iterable[str]) -> frozenset[tuple[str, str]]:
    """The choices, as subject and candidate, that these functions come from."""
    wanted = {k for k, f in enumerate(program.functions) if f.name in set(functions)}
    calls = (program.calls[step.call].choice for step in launches(program.steps) if step.kernel in wanted)
    return frozenset((c.subject, c.instead or c.chosen) for c in calls if c is not None)


def launches(steps: Iterable[Step]) -> Iterable[Launch]:
    """All launches, those inside of loops too."""
    for step in steps:
        if isinstance(step, Launch):
            yield step
        elif isinstance(step, Multiply):
            yield from step.instead
        elif isinstance(step, Loop):
            yield from launches(step.steps)


@dataclass
class Variants:
    """Programs of one plan for one architecture, with other decisions each; a kernel is compiled once for all."""

    plan: Plan
    target: GpuTarget
    architecture: int
    shared: Shared = field(default_factory=Shared)
    images: dict[str, Image | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if cublaslt.loaded() is None:  # there is nothing to measure of it
            self.plan = replace(self.plan, libraries=False)

    def prepare(self, decided: Sequence[Mapping[str, str]]) -> None:
        """Compiles what several of them need, side by side."""
        self._compile({f.name: f for each in decided for f in self._program(Decisions(each)).functions})

    def _compile(self, functions: Mapping[str, Function]) -> None:
        missing = [f for name, f in functions.items() if name not in self.images]
        if missing:
            source = source_of({f.name: self.shared.texts[f.name] for f in missing})
            images = compile_each(source, missing, self.architecture)
            self.images |= {f.name: image for f, image in zip(missing, images, strict=True)}

    def make(self, decided: Mapping[str, str]) -> Built:
        """One of them. Candidates that do not compile are left out; what was taken is in the calls' choices.

        Raises:
            ToolchainError: a kernel does not compile in any way.
        """
        found = Decisions(decided)
        while True:
            program = self._program(found)
            self._compile({f.name: f for f in program.functions})
            images = {f.name: self.images[f.name] for f in program.functions}
            failed = {name: image for name, image in images.items() if isinstance(image, str)}
            if not failed:
                break
            refused = chosen(program, failed) - found.refused
            if not refused:
                raise ToolchainError(next(iter(failed.values())))
            found = replace(found, refused=found.refused | refused)
        section = _image_name(self.architecture)
        rows, code = _packed([image for image in images.values() if isinstance(image, Image)])
        return Built({self.architecture: program}, {section: rows}, {IMAGES + section: code}, {section: program})

    def _program(self, found: Decisions) -> Program:
        return ProgramWriter(
            self.plan, self.target.options, replace(found, architecture=self.architecture), self.shared
        ).write()


def _image_name(architecture: int) -> str:
    return f"sm_{architecture}{'a' if architecture >= BOUND else ''}"


def _packed(images: Sequence[Image]) -> tuple[list[dict[str, Any]], bytes]:
    return _rows(images), b"".join(image.code for image in images)


def _rows(images: Sequence[Image]) -> list[dict[str, Any]]:
    rows, at = [], 0
    for image in images:
        rows.append(
            {"name": image.name, "at": at, "size": len(image.code), "shared": image.shared, "threads": image.threads,
             "scratch": image.scratch, "cluster": 1, "resident": image.resident}
        )  # fmt: skip
        at += len(image.code)
    return rows
