"""A report and its profile in a terminal: lines and tables of rich, readable without colour.

Names of a model are text here, never markup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from onnxc.reports.figures import count, microseconds, size
from onnxc.reports.terminal import as_line

if TYPE_CHECKING:
    from onnxc.report import Kernel, NodeTime, Report
    from onnxc.roofline import KernelTime, Profile

_LISTED = 4  # candidates that were not taken; of more the number is told


def report_tables(report: Report) -> Iterator[Any]:
    """The whole report: its summary, its profile, and some lines for each kernel."""
    yield from summary_lines(report)
    if report.profile:
        yield as_line("")
        yield report.profile
    for kernel in report.kernels:
        yield as_line("")
        yield from _kernel_lines(kernel)


def summary_lines(report: Report) -> Iterator[Text]:
    """Counts, memory, stages."""
    counts = report.counts
    kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(k.kind for k in report.kernels).most_common())
    title = f"{report.name or 'model'}: {counts['kernels']} kernel calls a run ({kinds or 'none'})"
    where = ", ".join(_machine(report))
    yield as_line(title + (f"; {where}" if where else ""), style="bold")
    yield as_line(
        f"  {counts['templates']} template or routine calls, {counts['fused']} fused kernels,"
        f" {counts['functions']} distinct functions"
    )
    for reason, number in report.kept.items():
        yield as_line(f"  float32 in {number} nodes: {reason}")
    memory = report.memory
    # With dynamic dims the arena is laid out anew for each size, and the manifest says so in words.
    arena = size(memory.arena) if isinstance(memory.arena, int) else memory.arena
    yield as_line(
        f"  memory: arena {arena} for {memory.buffers} intermediates"
        f" of {size(memory.buffers_total)} together; weights {size(memory.weights)}"
    )
    if report.stages:
        total = sum(report.stages.values())
        long = ", ".join(f"{name} {seconds:.2f}" for name, seconds in report.stages.items() if seconds >= 0.005)
        yield as_line(f"  compiled in {total:.2f} s" + (f": {long}" if long else ""))


def _machine(report: Report) -> Iterator[str]:
    """What the model was compiled for."""
    if report.gpu:
        yield f"gpu {report.gpu}"
        return
    if report.cpu:
        yield f"cpu {report.cpu}"
    if report.threads:
        yield f"{report.threads} threads"


def _kernel_lines(kernel: Kernel) -> Iterator[Any]:
    """One kernel as lines of rich text. Names of the model are text, never markup."""
    head = as_line(f"{kernel.number:4}  ")
    head.append(f"{kernel.function} {kernel.kind}", style="bold cyan" if kernel.is_template else "bold green")
    head.append(as_line(f"  {kernel.label or '(of no single node)'}"))
    yield head
    work = [f"reads {size(kernel.reads)}", f"writes {size(kernel.writes)}"]
    if kernel.weights:
        work[0] += f" (weights {size(kernel.weights)})"
    if kernel.flops:
        work.append(f"{count(kernel.flops)}FLOP")
    yield as_line("      " + ", ".join(work))
    for origin in kernel.origins:
        extra = "  ".join(x for x in (origin.name, origin.line) if x)
        yield as_line(f"      {origin}" + (f"  {extra}" if extra else ""), style="dim")
    for reason in _counted(kernel.reasons):
        yield as_line(f"      + {reason}")
    if kernel.choice and len(kernel.choice.candidates) > 1:
        others = [c for c in kernel.choice.candidates if c != kernel.choice.chosen]
        listed = ", ".join(others) if len(others) <= _LISTED else f"one of {len(others)} others"
        why = f"; {kernel.choice.why}" if kernel.choice.why else ""
        yield as_line(f"      = {kernel.choice.chosen} (or {listed}) for {kernel.choice.subject}{why}")
    for boundary in kernel.boundaries:
        yield as_line(f"      > stores {boundary.type}" + (f": {boundary.reason}" if boundary.reason else ""))


def _counted(lines: Sequence[str]) -> Iterable[str]:
    return (f"{line} ({n} times)" if n > 1 else line for line, n in Counter(lines).items())


def kernel_table(report: Report) -> Table:
    """A line for each kernel: nodes, bytes, arithmetic."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("#", "function", "kind", "nodes", "reads", "writes", "FLOP"):
        table.add_column(heading, justify="left" if heading in ("function", "kind", "nodes") else "right")
    for k in report.kernels:
        flops = count(k.flops) if k.flops else ""
        table.add_row(*map(as_line, (str(k.number), k.function, k.kind, k.label, size(k.reads), size(k.writes), flops)))
    return table


def node_table(rows: Sequence[NodeTime], whole: float) -> Table:
    """A line for each node of the model, with its part of the `whole`, in seconds."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("node", "us", "of run", "kernels", "name", "line"):
        table.add_column(heading, justify="right" if heading in ("us", "of run") else "left", no_wrap=True)
    for row in rows:
        o = row.origin
        kernels = " ".join(map(str, row.kernels[:4])) + (" ..." if len(row.kernels) > 4 else "")
        cells = (str(o), f"{row.seconds * 1e6:.1f}", f"{row.seconds / whole:.1%}", kernels, o.name, o.line)
        table.add_row(*map(as_line, cells))
    return table


def profile_tables(profile: Profile) -> Iterator[Any]:
    """The time of a run, and tables of the kinds of kernels and of the kernels, the slowest first."""
    dims = ", ".join(f"{name} {size}" for name, size in profile.dims.items())
    best, median = microseconds(profile.total), microseconds(profile.median)
    at = f" at {dims}" if dims else ""
    yield as_line(f"{best} us a run (best of {profile.runs}; median {median} us){at}", style="bold")
    yield as_line(f"  the machine: {profile.peaks}")
    if profile.flops:
        share = f", {profile.share_of_peak:.0%} of the peak" if profile.peaks.flops else ""
        yield as_line(f"  contractions: {profile.flops / 1e9:.3g} GFLOP{share}")
    yield _times(profile, "kind", [(kind, k.label, k) for kind, k in profile.by_kind().items()])
    kernels = sorted(profile.kernels, key=lambda k: -k.best)
    yield _times(profile, "#", [(f"{k.number} {k.function} {k.kind}", k.label, k) for k in kernels])


def _times(profile: Profile, first: str, rows: Sequence[tuple[str, str, KernelTime]]) -> Table:
    """A table of kernels, or of sums of them, with a name and a label each."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in (first, "nodes"):
        table.add_column(heading, max_width=44, no_wrap=True, overflow="ellipsis")
    for heading in ("best us", "median", "of run", "GFLOP/s", "of peak", "GB/s", "of memory", "bound"):
        table.add_column(heading, justify="left" if heading == "bound" else "right", no_wrap=True)
    whole = sum(k.best for k in profile.kernels) or 1.0  # where the clock saw none
    for name, label, k in rows:
        compute, memory = profile.shares(k)
        cells = (
            name, label, microseconds(k.best), microseconds(k.median), f"{k.best / whole:.1%}",
            f"{k.gflops:.3g}", f"{compute:.0%}", f"{k.gbs:.3g}", f"{memory:.0%}", profile.limit(k)[0],
        )  # fmt: skip
        table.add_row(*map(as_line, cells))
    return table
