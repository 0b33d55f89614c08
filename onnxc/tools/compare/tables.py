"""A comparison in the terminal: rich tables, readable without colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from onnxc.reports.terminal import as_line
from onnxc.tools.compare.verdict import Verdict

if TYPE_CHECKING:
    from onnxc.tools.compare.results import Comparison, OutputComparison, TensorComparison

SHOWN = 12  # layers in the table at most
_COLOURS = {Verdict.WRONG: "bold red", Verdict.OURS_WORSE: "red", Verdict.THEIRS_WORSE: "yellow"}


def comparison_tables(found: Comparison, width: int = 160) -> Iterator[Any]:
    """The outputs, what the layers say, what a reduction left, and a last line; in a narrow terminal the tables have
    fewer columns.
    """
    yield _outputs(found, width)
    if found.layers:
        yield from _layers(found, width)
    if found.reduction is not None:
        yield from _reduction(found)
    for note in found.notes:
        yield as_line(f"note: {note}")
    differing = sum(not o.agrees for o in found.outputs)
    end = (
        f"agrees with {found.reference}"
        if not differing
        else f"{differing} of {len(found.outputs)} outputs differ from {found.reference}"
    )
    seed = f", seed {found.seed}" if found.seed is not None else ""
    yield as_line(f"{end} (rtol {found.rtol:g}, atol {found.atol:g} of the largest value{seed})", style="bold")


def _outputs(found: Comparison, width: int) -> Table:
    several = len({o.sample for o in found.outputs}) > 1
    logits = any(o.metrics is not None and o.metrics.top1 is not None and not o.agrees for o in found.outputs)
    headings = ["output", "sample", "type", "max abs", "max rel", "top-1", "verdict"]
    left_out = {"sample": not several, "top-1": not logits, "type": width < 80}
    shown = [h for h in headings if not left_out.get(h)]
    table = _table(shown, folded=("output", "verdict"))
    for o in found.outputs:
        top = o.metrics.top1 if o.metrics is not None else None
        cells = [o.name, str(o.sample), f"{o.dtype}{list(o.shape)}", f"{o.max_abs:.2e}", f"{o.max_rel:.2e}"]
        cells.append("" if top is None else f"{top:.1%}")
        row = dict(zip(headings, [*map(as_line, cells), _verdict(o)], strict=True))
        table.add_row(*(row[h] for h in shown))
    return table


def _table(headings: Sequence[str], folded: Sequence[str]) -> Table:
    """An empty table; columns that are not `folded` are never broken."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        left = heading in ("output", "type", "verdict", "node", "tensor")
        table.add_column(heading, justify="left" if left else "right", overflow="fold", no_wrap=heading not in folded)
    return table


def _verdict(o: OutputComparison) -> Text:
    word = "agrees" if o.agrees else "DIFFERS"
    text = Text(word, style="green" if o.agrees else "bold red")
    shown = o.verdict not in (Verdict.EQUAL, Verdict.ROUNDING) or not o.agrees
    text.append(f" ({o.verdict.value})" if shown else "", style=_COLOURS.get(o.verdict, "default"))
    text.append(f": {o.note}" if o.note else "", style="default")
    return text


def _layers(found: Comparison, width: int) -> Iterator[Any]:
    rows = [t for t in found.layers if t.verdict is not Verdict.SKIPPED]
    counts = {v: sum(t.verdict is v for t in rows) for v in Verdict}
    words = ", ".join(f"{n} {v.value}" for v, n in counts.items() if n)
    yield as_line(f"{len(rows)} tensors inside: {words}", style="bold")
    worst = sorted((t for t in rows if t.introduced is not None), key=lambda t: -_excess(t))[:SHOWN]
    chosen = sorted({id(t): t for t in [*found.faults[:SHOWN], *worst]}.values(), key=lambda t: t.depth)[: 2 * SHOWN]
    if chosen:
        yield _layer_table(chosen, width)
    culprit = found.culprit
    if culprit is not None:
        where = f" {culprit.node_name!r}" if culprit.node_name else ""
        line = f", {culprit.origin}" if culprit.origin else ""
        yield as_line(
            f"the error is made by {culprit.label}{where}{line}: {culprit.note or culprit.verdict.value}",
            "bold red",
        )
    nonfinite = found.first_nonfinite
    if nonfinite is not None:
        side, t = nonfinite
        assert t.metrics is not None
        at = t.metrics.ours if side != "theirs" else t.metrics.theirs
        yield as_line(f"first NaN or infinity ({side}): {t.label}, {t.name!r} at {list(at.first or ())}")


def _excess(t: TensorComparison) -> float:
    return (t.introduced or 0.0) / (t.bound or 1e-30)


def _layer_table(rows: list[TensorComparison], width: int) -> Table:
    least = {"tensor": 80, "type": 110, "inherited": 70, "bound": 90}  # widths from which there is room
    headings = ["node", "tensor", "type", "error", "inherited", "introduced", "bound", "verdict"]
    shown = [h for h in headings if width >= least.get(h, 0)]
    table = _table(shown, folded=("node", "tensor"))
    for t in rows:
        numbers = [_number(x) for x in (t.error, t.inherited, t.introduced, t.bound)]
        cells = [*map(as_line, [t.label, _short(t.name), f"{t.dtype}{list(t.shape)}", *numbers])]
        row = dict(zip(headings, [*cells, Text(t.verdict.value, _COLOURS.get(t.verdict, "default"))], strict=True))
        table.add_row(*(row[h] for h in shown))
    return table


def _short(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:18]}...{name[-19:]}"


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.1e}"


def _reduction(found: Comparison) -> Iterator[Text]:
    reduced = found.reduction
    assert reduced is not None
    for step in reduced.steps:
        yield as_line(f"  {step}")
    yield as_line(f"{reduced.kind}: {reduced.culprit or 'no single one makes the difference'}", style="bold")
    if reduced.model:
        yield Text(f"the smallest failing model: {reduced.model} ({len(reduced.nodes)} nodes), inputs {reduced.inputs}")
    if reduced.command:
        yield Text(f"  {reduced.command}")
