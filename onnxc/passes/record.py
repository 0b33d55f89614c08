"""What each pass did to a graph, as text and in numbers: for reports.

A text is kept as its difference from the one before (`Change`), in which values that a pass left alone keep their
names; `texts` puts all of them together again.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from onnxc.errors import abridged
from onnxc.ir.graph import Graph, Source
from onnxc.ir.text import to_text
from onnxc.passes.pipeline import PassOptions, passes

IMPORT = "import"
MOST_LINES = 20_000  # of larger graphs the texts are left out: they would take longer to compare than to compile
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|%(\d+)')  # a string of the model, or a value
_LONG = 2500  # characters of a string, of which the middle goes: each pass would look at a name of megabytes again

Change = list[tuple[str, int | list[str]]]
"""From one text to the next: `("=", 3)` keeps lines, `("-", 2)` leaves lines out, `("+", [...])` adds some."""


@dataclass(frozen=True)
class PassRecord:
    """One pass; the first record is the import.

    Attributes:
        seconds: that it took.
        nodes: of the graph after it, those of regions too.
        ops: op to how many more (or, below 0, fewer) of it there are than before.
        change: of the text; None where the graph is too large.
    """

    name: str
    seconds: float
    nodes: int
    ops: dict[str, int]
    change: Change | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON can write it."""
        return dict(vars(self))


@dataclass(frozen=True)
class PassLog:
    """All passes of a compile, and the nodes of the model that they began with."""

    records: tuple[PassRecord, ...]
    nodes: tuple[Source, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON can write it."""
        return {
            "records": [r.to_dict() for r in self.records],
            "nodes": [[s.number, s.op_type, s.name, s.line] for s in self.nodes],
        }

    def texts(self) -> Iterator[str]:
        """The graph after each of the records."""
        lines: list[str] = []
        for record in self.records:
            lines = _applied(lines, record.change or [])
            yield "\n".join(lines)


def record_passes(graph: Graph, options: PassOptions) -> PassLog:
    """Runs the passes on an imported graph, and writes down what each does.

    >>> import onnx.parser
    >>> from onnxc.frontends import onnx_file
    >>> model = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[2] y) { a = Neg(x) y = Exp(a) }')
    >>> log = record_passes(onnx_file.load(model), PassOptions())
    >>> log.records[1].name, log.records[1].ops
    ('decompose', {'onnx.Neg': -1, 'onnx.Exp': -1, 'neg': 1, 'exp': 1})
    """
    writer = _Recorder()
    found = {s for node in graph.all_nodes() for s in node.origin}
    writer.add(IMPORT, 0.0, graph)
    for name, run in passes(options):
        start = time.perf_counter()
        graph = run(graph)
        writer.add(name, time.perf_counter() - start, graph)
    return PassLog(tuple(writer.records), tuple(sorted(found, key=lambda s: s.number)))


def record_import(graph: Graph, lowered: Graph) -> PassLog:
    """The same for a model that becomes several programs: as it was imported, and as it was cut."""
    writer = _Recorder()
    found = {s for node in graph.all_nodes() for s in node.origin}
    writer.add(IMPORT, 0.0, graph)
    writer.add("decompose", 0.0, lowered)
    return PassLog(tuple(writer.records), tuple(sorted(found, key=lambda s: s.number)))


class _Recorder:
    """Compares each graph with the one before."""

    def __init__(self) -> None:
        self.records: list[PassRecord] = []
        self.lines: list[str] = []
        self.keys: list[str] = []
        self.ops: Counter[str] = Counter()
        self.fresh = 0

    def add(self, name: str, seconds: float, graph: Graph) -> None:
        ops = Counter(n.op for n in graph.all_nodes())
        more = {op: ops[op] - self.ops[op] for op in [*self.ops, *(ops - self.ops)] if ops[op] != self.ops[op]}
        self.ops = ops
        self.records.append(PassRecord(name, seconds, ops.total(), more, self._change(graph)))

    def _change(self, graph: Graph) -> Change | None:
        if self.ops.total() > MOST_LINES or (self.records and self.records[-1].change is None):
            return None
        lines = [_abridged(line) for line in to_text(graph, digests=False).splitlines()]
        keys = [_TOKEN.sub(lambda found: found[0] if found[1] is None else "%", line) for line in lines]
        blocks = SequenceMatcher(None, self.keys, keys, autojunk=False).get_matching_blocks()
        same = {b.b + k: b.a + k for b in blocks for k in range(b.size)}
        lines = self._renamed(lines, same)
        change = _change(self.lines, lines, same)
        self.lines, self.keys = lines, keys
        return change

    def _renamed(self, lines: Sequence[str], same: dict[int, int]) -> list[str]:
        """The lines with the names that values had before, where a line is as it was; others get new ones."""
        names: dict[str, str] = {}
        for at, line in enumerate(lines):
            old = _defined(self.lines[same[at]]) if at in same else []
            for k, own in enumerate(_defined(line)):
                if own not in names:
                    names[own] = old[k] if k < len(old) else self._new()
        return [_TOKEN.sub(lambda m: m[0] if m[1] is None else f"%{names.get(m[1], m[1])}", line) for line in lines]

    def _new(self) -> str:
        self.fresh += 1
        return str(self.fresh - 1)


def _abridged(line: str) -> str:
    return line if len(line) <= _LONG else _TOKEN.sub(lambda found: abridged(found[0], _LONG), line)


def _defined(line: str) -> list[str]:
    """The values that a line defines."""
    text = line.strip()
    head = text.split(" = ")[0] if text.startswith("%") else text if text.startswith("input ") else ""
    return [m[1] for m in _TOKEN.finditer(head) if m[1] is not None]


def _change(old: Sequence[str], new: Sequence[str], same: dict[int, int]) -> Change:
    change: Change = []
    at = start = 0

    def put(sign: str, value: int | list[str]) -> None:
        if change and change[-1][0] == sign:
            before = change[-1][1]
            value = before + value  # type: ignore[operator]
            change.pop()
        if value:
            change.append((sign, value))

    for start, line in enumerate(new):
        to = same.get(start)
        if to is not None and old[to] == line:
            put("-", to - at)
            put("=", 1)
            at = to + 1
        else:
            put("+", [line])
    put("-", len(old) - at)
    return change


def _applied(lines: Sequence[str], change: Change) -> list[str]:
    found: list[str] = []
    at = 0
    for sign, value in change:
        if isinstance(value, list):
            found += value
        else:
            found += lines[at : at + value] if sign == "=" else ()
            at += value
    return found
