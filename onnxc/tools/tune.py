"""What :func:`onnxc.tune` and ``onnxc tune`` do: measure the kernels that a model can choose between, and show it.

`onnxc/autotune.py` measures, `onnxc/tuned.py` keeps the result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from onnxc.compiler.api import measure
from onnxc.compiler.job import Measuring
from onnxc.compiler.options import CompileOptions
from onnxc.errors import InputError
from onnxc.frontends.onnx_file import InputShapes
from onnxc.ir.graph import Graph
from onnxc.random_inputs import Arrays
from onnxc.reports.figures import microseconds
from onnxc.reports.printed import Printed
from onnxc.runtime.cache import Cache
from onnxc.tuned import fastest

_SHOWN = 6  # candidates of which the times are shown, the fastest first


@dataclass(frozen=True)
class Tuning(Printed):
    """Seconds of each candidate by subject, what was taken before, and the file that keeps it all.

    `refused` are candidates that did not compile, or answered wrongly.
    """

    times: Mapping[str, Mapping[str, float]]
    before: Mapping[str, str]
    path: str
    refused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def best(self) -> dict[str, str]:
        """The fastest candidate by subject; what was taken before where that is as fast."""
        return {subject: fastest(each, self.before[subject]) for subject, each in self.times.items()}

    def to_dict(self) -> dict[str, Any]:
        found = {"times": self.times, "before": self.before, "best": self.best, "path": self.path}
        return {**found, **({"refused": self.refused} if self.refused else {})}

    def rendered(self, width: int) -> Iterator[Any]:
        from rich import box  # see `Printed`
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("choice", "cost model's", "best", "times"):
            table.add_column(heading)
        best = self.best
        for subject, each in self.times.items():
            order = sorted(each, key=lambda name: each[name])
            times = ", ".join(f"{name} {microseconds(each[name])} us" for name in order[:_SHOWN])
            times += f", {len(order) - _SHOWN} slower" if len(order) > _SHOWN else ""
            table.add_row(*map(Text, (subject, self.before[subject], best[subject], times)))
        yield table
        changed = sum(best[s] != self.before[s] for s in best)
        yield Text(f"{len(best)} choices measured, {changed} changed; kept in {self.path}", style="bold")


def tune(
    model: str | os.PathLike[str] | Graph,
    inputs: Arrays | None = None,
    *,
    target: str = "cpu",
    cpu: str = "native",
    threads: int | None = None,
    cache: str | os.PathLike[str] | Cache | None = None,
    accuracy: str = "default",
    precision: str = "float32",
    dtype: str | None = None,
    input_shapes: InputShapes | None = None,
    dims: Mapping[str, int] | None = None,
    seed: int = 0,
    seconds: float | None = None,
    record: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Tuning:
    """Measures a model's kernels; compiles take what was found, for this model and others.

    Args:
        model: an ONNX file, or an imported graph.
        inputs: by name; None makes random ones (see `onnxc.random_inputs`, for `seed` and `dims` too).
        target, cpu, threads, accuracy, precision, dtype, input_shapes: as for :func:`onnxc.compile`; what was measured
            counts only for the same kind of machine and number of threads.
        cache: the cache whose directory keeps the result (its default for None).
        seconds: after so many no further candidates are begun.
        record: the file that keeps the result, in place of the cache's.
        progress: called with what is being done.

    Raises OnnxcError where the model cannot be compiled or run, CacheError where the result cannot be kept. Where the
    user stops it, what was measured is kept.
    """
    if threads is not None and threads < 1:
        raise InputError("threads is at least 1")
    options = CompileOptions(
        target=target, cpu=cpu, threads=threads, cache=True if cache is None else cache, accuracy=accuracy,
        input_shapes=input_shapes, precision=precision, dtype=dtype, record=record,
    )  # fmt: skip
    measuring = Measuring(seconds, again=True, inputs=inputs, dims=dims, seed=seed)
    found, kept = measure(model, measuring, options, progress)
    times = {s: found.times[s] for s in found.choices if s in found.times}
    refused = {s: tuple(sorted(names)) for s, names in found.refused.items()}
    return Tuning(times, {s: found.choices[s].chosen for s in times}, str(kept.path), refused)
