"""The autotuner: measures the kernels between which a compile of a model can choose, and keeps the result.

Each candidate of each choice is measured inside the whole model, where its operands are as warm as they will be in
use: the model is compiled once for each candidate in turn, and all variants run interleaved under the profiler.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onnxc import tuned
from onnxc.compiler import compile as compile_model
from onnxc.errors import InputError
from onnxc.frontends import onnx_file
from onnxc.frontends.onnx_file import InputShapes
from onnxc.ir.graph import Graph
from onnxc.passes.decompose import decompose
from onnxc.runtime.cache import Cache
from onnxc.runtime.cpu import available_cpus, level
from onnxc.runtime.model import CompiledModel
from onnxc.tools.inputs import Arrays, random_inputs

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

ROUNDS = 5


@dataclass(frozen=True)
class Tuning:
    """Seconds of each candidate by subject, what the cost model would take, and the file that keeps it all."""

    times: Mapping[str, Mapping[str, float]]
    before: Mapping[str, str]
    path: str

    @property
    def best(self) -> dict[str, str]:
        """The fastest candidate by subject."""
        return {subject: min(each, key=lambda k: each[k]) for subject, each in self.times.items()}

    def to_dict(self) -> dict[str, Any]:
        return {"times": self.times, "before": self.before, "best": self.best, "path": self.path}

    def __str__(self) -> str:
        from rich.console import Console  # only to print

        console = Console(file=io.StringIO(), width=120, no_color=True, force_terminal=False)
        console.print(self)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in text.rstrip().splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("choice", "cost model's", "best", "times"):
            table.add_column(heading)
        best = self.best
        for subject, each in self.times.items():
            times = ", ".join(f"{name} {seconds * 1e6:.0f} us" for name, seconds in each.items())
            table.add_row(*map(Text, (subject, self.before[subject], best[subject], times)))
        yield table
        changed = sum(best[s] != self.before[s] for s in best)
        yield Text(f"{len(best)} choices measured, {changed} changed; kept in {self.path}", style="bold")


def tune(
    model: str | os.PathLike[str] | Graph,
    inputs: Arrays | None = None,
    *,
    cpu: str = "native",
    threads: int | None = None,
    cache: str | os.PathLike[str] | Cache | None = None,
    accuracy: str = "default",
    input_shapes: InputShapes | None = None,
    dims: Mapping[str, int] | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Tuning:
    """Measures a model's kernels; ``compile(..., tuned=True)`` takes what was found, for this model and others.

    Args:
        model: an ONNX file, or an imported graph.
        inputs: by name; None makes random ones (see `tools.inputs.random_inputs`, for `seed` and `dims` too).
        cpu, threads, accuracy, input_shapes: as for :func:`onnxc.compile`; what was measured counts only for the same.
        cache: the cache whose directory keeps the result (its default for None).
        progress: called with what is being done.

    Raises OnnxcError where the model cannot be compiled or run, CacheError where the result cannot be kept.
    """
    tell = progress or (lambda stage: None)
    if threads is not None and threads < 1:
        raise InputError("threads is at least 1")
    kept = cache if isinstance(cache, Cache) else Cache(cache)
    graph = model if isinstance(model, Graph) else onnx_file.load(model, input_shapes=input_shapes)
    feeds = inputs if inputs is not None else random_inputs(decompose(graph), seed=seed, dims=dims)

    def variant(decisions: Mapping[str, str]) -> CompiledModel:
        return compile_model(graph, cpu=cpu, threads=threads, cache=kept, accuracy=accuracy, tuned=decisions)

    tell("compile with the cost model's choices")
    first = variant({})
    choices = {k.choice.subject: k.choice for k in first.explain().kernels if k.choice and len(k.choice.candidates) > 1}
    variants = [first]
    for n in range(max((len(c.candidates) for c in choices.values()), default=0)):
        tell(f"compile candidate {n + 1}")
        variants.append(variant({s: c.candidates[n % len(c.candidates)] for s, c in choices.items()}))
    times: dict[str, dict[str, float]] = {s: {} for s in choices}
    for n in range(ROUNDS if choices else 0):
        tell(f"round {n + 1} of {ROUNDS}")
        for each in variants:
            _measure(each, feeds, times)
    tuned.save(kept, level(cpu), threads or available_cpus(), times)
    return Tuning(times, {s: c.chosen for s, c in choices.items()}, str(tuned.path(kept)))


def _measure(model: CompiledModel, feeds: Arrays, times: dict[str, dict[str, float]]) -> None:
    """Adds the best time of each choice's kernels: of several kernels with one subject, the mean."""
    found: dict[tuple[str, str], list[float]] = {}
    for kernel in model.profile(feeds, runs=3).kernels:
        if kernel.choice and kernel.choice.subject in times:
            assert kernel.times is not None
            found.setdefault((kernel.choice.subject, kernel.choice.chosen), []).append(kernel.times.best)
    for (subject, name), each in found.items():
        seconds = sum(each) / len(each)
        times[subject][name] = min(seconds, times[subject].get(name, seconds))
