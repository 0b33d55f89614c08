"""How fast each kernel of a model ran, beside what the machine can do: what `model.profile()` adds to a report.

    report = model.profile({"x": x})
    report.profile.total                       # seconds of a run
    slowest = max(report.profile.kernels, key=lambda k: k.best)
    slowest.gflops, slowest.gbs                # GFLOP/s, GB/s
    report.profile.limit(slowest)              # ("compute", 0.83): at 83 % of what multiply-adds allow

A kernel can be no faster than its arithmetic at the machine's peak of multiply-adds, nor than its bytes at the
bandwidth of memory: the larger of the two times is its *bound*, and the share of its own time that the bound takes
says how near it is (the roofline model: Williams, Waterman, Patterson, CACM 52(4), 2009). Arithmetic is counted as
the model wants it: a convolution as a direct one, each element of a pointwise op once. So Winograd's algorithm, say,
can reach more than 100 %.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from onnxc.reports.printed import Printed

COMPUTE, MEMORY, CACHE = "compute", "memory", "cache"


@dataclass(frozen=True)
class Peaks:
    """What the machine can do: measured, not computed from a data sheet.

    Attributes:
        threads: that worked at once.
        lanes: float32 of a vector.
        flops: additions and multiplications a second, of fused multiply-adds; 0: not known.
        bandwidth: bytes a second, read from memory; 0: not known.
    """

    threads: int
    lanes: int
    flops: float
    bandwidth: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON can write it."""
        return asdict(self)

    def __str__(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return (
            f"{self.flops / 1e9:.0f} GFLOP/s of multiply-adds ({self.lanes} lanes),"
            f" {self.bandwidth / 1e9:.1f} GB/s from memory, {threads}"
        )


@dataclass(frozen=True)
class KernelTime:
    """One kernel of a profiled run. All calls of a run together, where it runs in a loop (`turns` of them).

    Attributes:
        number, function, kind, label: as in the report's `kernels`.
        turns: calls in a run.
        best, median: seconds, over the runs.
        reads, writes: bytes.
        flops: of contractions (matmul, convolution, attention), as 2 M N K.
        pointwise: other arithmetic: 1 for an addition, a comparison or a step of a reduction; 10 for a function such
            as exp.
    """

    number: int
    function: str
    kind: str
    label: str
    turns: int
    best: float
    median: float
    reads: int
    writes: int
    flops: int
    pointwise: int

    @property
    def arithmetic(self) -> int:
        """All of it."""
        return self.flops + self.pointwise

    @property
    def gflops(self) -> float:
        """10^9 operations a second."""
        return self.arithmetic / self.best / 1e9

    @property
    def gbs(self) -> float:
        """10^9 bytes a second."""
        return (self.reads + self.writes) / self.best / 1e9

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.arithmetic / max(1, self.reads + self.writes)


@dataclass(frozen=True)
class Profile(Printed):
    """The times of a model's kernels.

    Attributes:
        peaks: of the machine, with as many threads.
        runs: how many there were.
        total, median: seconds of a run, with the clock around every kernel: best and median.
        kernels: in the order of a run.
        dims: the sizes of dynamic dims.
        times: nanoseconds: for each run those of each kernel of the report (0: one that did not run).
    """

    peaks: Peaks
    runs: int
    total: float
    median: float
    kernels: tuple[KernelTime, ...]
    dims: dict[str, int]
    times: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    @property
    def flops(self) -> int:
        """Of the contractions of a run."""
        return sum(k.flops for k in self.kernels)

    @property
    def share_of_peak(self) -> float:
        """The part of the machine's multiply-adds that the contractions of a run use."""
        return self.flops / self.total / self.peaks.flops if self.peaks.flops and self.total else 0.0

    def shares(self, kernel: KernelTime) -> tuple[float, float]:
        """The parts of the machine's multiply-adds and of its memory's bandwidth that a kernel uses."""
        flops, bandwidth = self.peaks.flops, self.peaks.bandwidth
        return kernel.gflops * 1e9 / flops if flops else 0.0, kernel.gbs * 1e9 / bandwidth if bandwidth else 0.0

    def limit(self, kernel: KernelTime) -> tuple[str, float]:
        """What bounds a kernel, and how near to it the kernel is (1: it cannot be faster).

        `compute` where its arithmetic takes the longer time at the machine's peak, `memory` where its bytes do, and
        `cache` where they came faster than from memory.
        """
        compute, memory = self.shares(kernel)
        if compute >= memory:
            return COMPUTE, compute
        return (MEMORY, memory) if memory <= 1 else (CACHE, memory)

    def by_kind(self) -> dict[str, KernelTime]:
        """Kernels of one kind added up, the slowest kind first."""
        kinds: dict[str, list[KernelTime]] = {}
        for kernel in self.kernels:
            kinds.setdefault(kernel.kind, []).append(kernel)
        sums = {kind: _sum(kind, kernels) for kind, kernels in kinds.items()}
        return dict(sorted(sums.items(), key=lambda item: -item[1].best))

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON can write it."""
        return {
            "peaks": self.peaks.to_dict(),
            "runs": self.runs,
            "total": self.total,
            "median": self.median,
            "dims": self.dims,
            "flops": self.flops,
            "share_of_peak": self.share_of_peak,
            "times": [list(run) for run in self.times],
            "kernels": [self._row(k) for k in self.kernels],
            "kinds": {kind: self._row(k) for kind, k in self.by_kind().items()},
        }

    def _row(self, kernel: KernelTime) -> dict[str, Any]:
        compute, memory = self.shares(kernel)
        bound, share = self.limit(kernel)
        derived = {"gflops": kernel.gflops, "gbs": kernel.gbs, "compute": compute, "memory": memory}
        return {**asdict(kernel), **derived, "bound": bound, "share": share}

    def rendered(self, width: int) -> Iterable[Any]:
        from onnxc.reports.tables import profile_tables  # it imports rich: see `Printed`

        return profile_tables(self)


def _sum(kind: str, kernels: Sequence[KernelTime]) -> KernelTime:
    def added(name: str) -> Any:
        return sum(getattr(k, name) for k in kernels)

    calls = f"{len(kernels)} call{'s' if len(kernels) > 1 else ''}"
    figures = {name: added(name) for name in ("turns", "best", "median", "reads", "writes", "flops", "pointwise")}
    return KernelTime(number=-1, function="", kind=kind, label=calls, **figures)


def best_and_median(times: Sequence[int]) -> tuple[float, float]:
    """Seconds, of nanoseconds. No kernel takes no time at all: the clock has steps."""
    return max(1, min(times)) / 1e9, max(1.0, statistics.median(times)) / 1e9
