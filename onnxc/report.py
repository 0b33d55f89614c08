"""What `model.explain()` returns: the kernels of a compiled model, and why they are what they are.

    report = model.explain()
    print(report)                          # the whole report as text
    report.kernels[3].origins, report.kernels[3].reasons
    report.source("k3")                    # the generated C++ of one kernel
    report.counts                          # {"kernels": 98, "templates": 60, "fused": 38, "functions": 14}
    report.to_dict()                       # all of it, as JSON can write it

`model.profile(inputs)` returns a report with the times of the kernels (`onnxc.roofline`).

A report is made from a model's manifest (`Report.from_manifest`), so a model that was saved and loaded has
the same. This module imports nothing of the compiler.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from onnxc.choices import Choice
from onnxc.errors import InputError, PackageError
from onnxc.reports.explain import explain_page
from onnxc.reports.figures import Number
from onnxc.reports.page import written
from onnxc.reports.printed import Printed
from onnxc.reports.trace import written_trace
from onnxc.roofline import KernelTime, Profile

if TYPE_CHECKING:
    from onnxc.passes.record import PassLog

LOOPS = "loops"


@dataclass(frozen=True)
class Origin:
    """A node of the user's model that a kernel computes (or a part of it)."""

    number: int
    op_type: str
    name: str = ""
    line: str = ""  # file:line of the PyTorch source, where the exporter recorded it

    def __str__(self) -> str:
        return f"n{self.number} {self.op_type}"


@dataclass(frozen=True)
class Boundary:
    """A value that a kernel writes to memory, and why it does not stay inside."""

    type: str
    reason: str


@dataclass(frozen=True)
class Take:
    """A value that a kernel reads from memory: the number of the kernel that made it, and which of its boundaries that
    is. Inputs of the model are -1, -2, ...
    """

    kernel: int
    store: int = 0


@dataclass(frozen=True)
class Step:
    """A primitive that a kernel computes.

    Attributes:
        op, type: what it is, and what it gives.
        nodes: numbers of the model's nodes that it is part of.
        reads: positions of those steps of the same kernel that it reads.
        work: operations and elements, to compare it with the kernel's other steps; 0 where dims are dynamic and a run
            has not told them.
    """

    op: str
    type: str
    nodes: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    work: int = 0
    size: Any = field(default=0, repr=False)  # of `work`, as `onnxc.runtime.sizes` writes it

    def at(self, evaluate: Callable[[Any], int]) -> Step:
        """The same with its work as a number."""
        if isinstance(self.size, int):
            return self
        work = evaluate(self.size)
        return replace(self, work=work, size=work)


@dataclass(frozen=True)
class Port:
    """An input or output of the model, and which kernel's store an output is (None: no kernel's)."""

    name: str
    type: str
    source: Take | None = None


@dataclass(frozen=True)
class Kernel:
    """One call of a run.

    Attributes:
        number: its place in the run, from 0.
        function: the generated function; equal kernels share one.
        kind: `loops` for generated loop nests, else the template: `matmul`, `conv`, `attention`, ...
        origins: the nodes of the model that it computes, in the model's order.
        reasons: why each of them is in this kernel.
        boundaries: what it stores, and why.
        takes: what it reads of other kernels and of the model's inputs.
        steps: its primitives.
        reads, writes: bytes of memory, once for each value; text where dims are dynamic. `weights` is a part
            of `reads`. These and what follows are of one call, and a kernel in a loop is called `turns` times.
        flops: multiplications and additions of matmuls, convolutions and attention.
        pointwise: other arithmetic: see `onnxc.roofline.KernelTime`.
        turns: calls in a run.
        choice: made by the cost model or the tuner, where there was one to make.
        times: in a profile (see `onnxc.roofline`).
        sizes: those of the numbers above that are dynamic, as `onnxc.runtime.sizes` writes them.
    """

    number: int
    function: str
    kind: str
    origins: tuple[Origin, ...] = ()
    reasons: tuple[str, ...] = ()
    boundaries: tuple[Boundary, ...] = ()
    reads: Number = 0
    writes: Number = 0
    weights: Number = 0
    flops: Number = 0
    pointwise: Number = 0
    turns: Number = 1
    choice: Choice | None = None
    times: KernelTime | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict, repr=False)
    takes: tuple[Take, ...] = ()
    steps: tuple[Step, ...] = field(default=(), repr=False)

    @property
    def is_template(self) -> bool:
        """True for a template or a routine of the runtime, false for fused loops."""
        return self.kind != LOOPS

    @property
    def label(self) -> str:
        """Its op types, shortened: `MatMul, Add, Gelu, 3x Cast`."""
        counts = Counter(o.op_type for o in self.origins)
        return ", ".join(f"{n}x {name}" if n > 1 else name for name, n in counts.items())

    def timed(self, best: float, median: float) -> Kernel:
        """The kernel with its seconds in a run. All of its numbers must be known."""
        turns = int(self.turns)
        work = {name: turns * int(getattr(self, name)) for name in ("reads", "writes", "flops", "pointwise")}
        times = KernelTime(self.number, self.function, self.kind, self.label, turns, best, median, **work)
        return replace(self, times=times)


@dataclass(frozen=True)
class NodeTime:
    """A node of the model, about how long it takes in a run, and the kernels that compute it."""

    origin: Origin
    seconds: float
    kernels: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON can write it."""
        return {**vars(self.origin), "seconds": self.seconds, "kernels": list(self.kernels)}


@dataclass(frozen=True)
class Place:
    """An intermediate: the first and the last kernel that use it, its type, and its place in the arena (None where that
    is laid out anew for each size).
    """

    first: int
    last: int
    type: str
    offset: int | None = None
    nbytes: int | None = None


@dataclass(frozen=True)
class Memory:
    """The memory plan, in bytes: `arena` holds all intermediates, of which the sum is `buffers_total`."""

    arena: Number = 0
    buffers: int = 0
    buffers_total: Number = 0
    weights: int = 0
    places: tuple[Place, ...] = field(default=(), repr=False)

    def at(self, arena: int, offsets: Sequence[int], sizes: Sequence[int]) -> Memory:
        """The same, laid out for certain sizes: bytes of the arena, and offset and bytes of each intermediate."""
        placed = zip(self.places, offsets, sizes, strict=True)
        places = tuple(replace(p, offset=offset, nbytes=nbytes) for p, offset, nbytes in placed)
        return replace(self, arena=arena, buffers_total=sum(sizes), places=places)


@dataclass(frozen=True)
class Report(Printed):
    """How a model was compiled. `stages` are seconds by stage, empty for a model that was loaded.

    Of a model for a GPU `gpu` names the architectures. Of one that was converted to float16 or bfloat16 `kept` tells of
    how many nodes something stayed float32, by reason.
    """

    kernels: tuple[Kernel, ...]
    memory: Memory
    stages: Mapping[str, float]
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)
    name: str = ""
    cpu: str = ""
    threads: int = 0
    gpu: str = ""
    kept: Mapping[str, int] = field(default_factory=dict)
    profile: Profile | None = None  # of model.profile()
    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()
    record: Callable[..., PassLog | None] | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        """One line: print() shows the tables."""
        what = "profile" if self.profile is not None else "report"
        return f"<{what} of {self.name or 'model'!r}: {len(self.kernels)} kernels, {self.gpu or self.cpu}>"

    @staticmethod
    def from_manifest(manifest: Mapping[str, Any]) -> Report:
        """The report of a manifest: see the keys of `_of`; those that are missing count as empty.

        Raises:
            PackageError: the manifest is damaged.
        """
        try:
            return Report._of(manifest)
        except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise PackageError(f"the manifest is damaged: {error!r}", cause=error) from error

    @staticmethod
    def _of(manifest: Mapping[str, Any]) -> Report:
        memory = manifest.get("memory") or {}
        dims = manifest.get("dim_names") or {}
        return Report(
            kernels=tuple(_kernel(i, entry, dims) for i, entry in enumerate(manifest.get("kernels") or ())),
            memory=Memory(
                _number(memory.get("arena", 0)),
                int(memory.get("buffers", 0)),
                _number(memory.get("buffers_total", 0)),
                int(memory.get("weights", 0)),
                tuple(Place(p[0], p[1], _named(str(p[2]), dims), *p[3:5]) for p in memory.get("places") or ()),
            ),
            stages={stage: float(seconds) for stage, seconds in (manifest.get("stages") or {}).items()},
            sources={name: str(text) for name, text in (manifest.get("sources") or {}).items()},
            name=str(manifest.get("name") or ""),
            cpu=str(manifest.get("cpu") or ""),
            threads=int(manifest.get("threads") or 0),
            gpu=str(manifest.get("gpu") or ""),
            kept={reason: int(nodes) for reason, nodes in (manifest.get("kept") or {}).items()},
            inputs=_ports(manifest, "inputs"),
            outputs=_ports(manifest, "outputs"),
        )

    def at(self, evaluate: Callable[[Any], int]) -> Report:
        """The same with numbers in place of dynamic sizes, which `evaluate` gives."""
        known: list[dict[str, Any]] = [
            {n: evaluate(s) for n, s in k.sizes.items()} | {"steps": tuple(step.at(evaluate) for step in k.steps)}
            for k in self.kernels
        ]
        kernels = (replace(k, **found, sizes={}) for k, found in zip(self.kernels, known, strict=True))
        return replace(self, kernels=tuple(kernels))

    @property
    def counts(self) -> dict[str, int]:
        """Kernels in a run: all, templates and routines, fused loops; and distinct functions."""
        templates = sum(k.is_template for k in self.kernels)
        return {
            "kernels": len(self.kernels),
            "templates": templates,
            "fused": len(self.kernels) - templates,
            "functions": len({k.function for k in self.kernels}),
        }

    def source(self, kernel: str | int) -> str:
        """The generated C++ or Triton source of a kernel, by function name (`k3`) or by the number of a call."""
        name = self.kernels[kernel].function if isinstance(kernel, int) else kernel
        if name not in self.sources:
            raise KeyError(f"no kernel {name!r}; there are {', '.join(self.sources) or 'none with source'}")
        text = self.sources[name]
        if not text.startswith("("):
            return text
        return f"def {name}{text}" if self.gpu else f"static void {name}{text}"

    def to_dict(self) -> dict[str, Any]:
        """All of the report as dicts, lists, strings and numbers."""
        return {
            "name": self.name,
            "cpu": self.cpu,
            "threads": self.threads,
            **({"gpu": self.gpu} if self.gpu else {}),
            **({"kept": dict(self.kept)} if self.kept else {}),
            "inputs": _plain(self.inputs),
            "outputs": _plain(self.outputs),
            "counts": self.counts,
            "kernels": [_plain(k) for k in self.kernels],
            "memory": {key: _plain(value) for key, value in vars(self.memory).items()},
            "stages": dict(self.stages),
            "sources": dict(self.sources),
            **({"profile": self.profile.to_dict()} if self.profile else {}),
            **({"node_times": [row.to_dict() for row in self.node_times()]} if self.profile else {}),
        }

    def to_html(self, path: str | os.PathLike[str], *, model: Any = None, title: str = "") -> None:
        """Writes the report as one HTML file that needs no network: see docs/reports.md.

        Args:
            path: the file.
            title: what the page calls the model; by default its graph's name.
            model: the model that was compiled (a path, bytes or a ModelProto), for the graphs before and after each
                pass; where it was compiled from a file that is still there it need not be given.

        Raises:
            OSError: the file cannot be written.
            OnnxcError: `model` is no model.
        """
        log = self.record(model) if self.record is not None else None
        written(path, explain_page(self.to_dict(), log.to_dict() if log is not None else None, title))

    def to_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes a profile as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

        Raises:
            InputError: the report has no profile: it is `model.profile(inputs)` that measures.
            OSError: the file cannot be written.
        """
        if self.profile is None or not self.profile.times:
            raise InputError("a trace shows measured runs: make it of model.profile(inputs), not of model.explain()")
        written_trace(path, self.to_dict(), [_parts(kernel) for kernel in self.kernels])

    def node_times(self) -> list[NodeTime]:
        """The time of each node of the model, the longest first; empty without a profile.

        The time of a kernel is divided among the nodes in it by the work of their primitives (arithmetic and elements):
        an estimate, where there are several.
        """
        found: dict[int, float] = {}
        places: dict[int, list[int]] = {}
        origins = {o.number: o for k in self.kernels for o in k.origins}
        for kernel in self.kernels:
            for number, part in _parts(kernel).items() if kernel.times else ():
                assert kernel.times is not None
                found[number] = found.get(number, 0.0) + kernel.times.best * part
                places.setdefault(number, []).append(kernel.number)
        rows = [NodeTime(origins[n], seconds, tuple(places[n])) for n, seconds in found.items() if n in origins]
        return sorted(rows, key=lambda row: -row.seconds)

    def rendered(self, width: int) -> Iterable[Any]:
        from onnxc.reports.tables import report_tables  # it imports rich: see `Printed`

        return report_tables(self)


def _number(value: Any) -> Number:
    """A number, or the expression that is one. Raises TypeError: a damaged manifest is to fail here, not when shown."""
    if not isinstance(value, (int, str)):
        raise TypeError(f"{str(value)[:40]!r} where a number is")
    return value


def _kernel(number: int, entry: Mapping[str, Any], dims: Mapping[str, str]) -> Kernel:
    stores = entry.get("boundaries")
    if stores is None:
        stores = [(s, "") for s in entry.get("stores", ())]
    return Kernel(
        number,
        str(entry.get("function", "")),
        _kind(entry),
        tuple(_origin(o) for o in entry.get("origins", ())),
        tuple(map(str, entry.get("reasons", ()))),
        tuple(Boundary(_named(str(t), dims), str(r)) for t, r in stores),
        _number(entry.get("reads", 0)),
        _number(entry.get("writes", 0)),
        _number(entry.get("weights", 0)),
        _number(entry.get("flops", 0)),
        _number(entry.get("pointwise", 0)),
        _number(entry.get("turns", 1)),
        _choice(entry.get("choice")),
        sizes=entry.get("sizes") or {},
        takes=tuple(Take(*pair) for pair in entry.get("takes", ())),
        steps=tuple(_step(step, dims) for step in entry.get("steps", ())),
    )


def _step(entry: Sequence[Any], dims: Mapping[str, str]) -> Step:
    op, type_, nodes, reads, size_ = entry
    return Step(op, _named(str(type_), dims), tuple(nodes), tuple(reads), size_ if isinstance(size_, int) else 0, size_)


def _ports(manifest: Mapping[str, Any], side: str) -> tuple[Port, ...]:
    """The inputs or outputs of a manifest. Of a model that is several programs the types are longer."""
    made: dict[int, Take] = {}
    if side == "outputs":
        for number, entry in enumerate(manifest.get("kernels") or ()):
            made.update({output: Take(number, store) for output, store in entry.get("results", ())})
    rows = manifest.get(side) or ()
    return tuple(Port(str(row[0]), _port_type(row), made.get(k)) for k, row in enumerate(rows))


def _port_type(row: Sequence[Any]) -> str:
    if len(row) < 4:  # name, type, dims
        return str((row[1] or ["?"])[0])
    return f"{row[1]}[{', '.join('?' if d is None else str(d) for d in row[3])}]"


def _choice(entry: Mapping[str, Any] | None) -> Choice | None:
    if not entry:
        return None
    candidates = tuple(map(str, entry["candidates"]))
    why, instead = (str(entry.get(key, "")) for key in ("why", "instead"))
    return Choice(str(entry["subject"]), str(entry["chosen"]), candidates, why, instead)


def _named(type_: str, dims: Mapping[str, str]) -> str:
    """A type with the model's own names of its dims: `float32[s0, 64]` is `float32[batch, 64]`."""
    return re.sub(r"\bs\d+\b", lambda found: dims.get(found[0]) or found[0], type_)


def _kind(entry: Mapping[str, Any]) -> str:
    kind = str(entry.get("kind", LOOPS))
    return kind if kind not in (LOOPS, "template", "opaque") else str(entry.get("template") or kind)


def _origin(entry: Any) -> Origin:
    if isinstance(entry, Mapping):
        return Origin(int(entry["number"]), *(str(entry.get(k, "")) for k in ("op_type", "name", "line")))
    number, *rest = entry
    return Origin(int(number), *(str(r) for r in rest))


def _plain(value: Any) -> Any:
    if isinstance(value, (Kernel, Boundary, Origin, Choice, Take, Step, Place, Port)):
        return {key: _plain(v) for key, v in vars(value).items() if key not in ("sizes", "times", "size")}
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _parts(kernel: Kernel) -> dict[int, float]:
    """The part of a kernel's work that each of the model's nodes asks for. Equal parts where no work is known."""
    parts: dict[int, float] = {}
    for step in kernel.steps:
        for number in step.nodes:
            parts[number] = parts.get(number, 0.0) + step.work / len(step.nodes)
    whole = sum(parts.values())
    if not whole:
        parts, whole = {o.number: 1.0 for o in kernel.origins}, float(len(kernel.origins))
    return {number: part / whole for number, part in parts.items()}
