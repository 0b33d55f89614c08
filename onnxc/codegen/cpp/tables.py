"""Tables: what all rows of a loop nest have in common, computed once by each parallel item.

Where rows of channels are scaled by a number for each group of six channels, the lanes of a vector read that number at
`channel // 6`, and so they would for every row. An item computes it for all channels first:

    for (i64 c = 0; c < 192; c += VL) ...table[c] = 1 / sqrt(variance[c / 6] + epsilon)...
    for (i64 row = ...) for (i64 c = 0; c < 192; c += VL) ...ldl(table + c, lanes)...

Where it is another number for each image of a batch, the tables are made anew for each image that an item comes to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnxc.codegen.cpp import spelling
from onnxc.codegen.cpp.terms import TermEmitter
from onnxc.codegen.cpp.vector_loop import cost
from onnxc.codegen.cpp.writer import Scope, indent
from onnxc.codegen.loop_order import ROWS
from onnxc.ir.expr import Symbol, prod
from onnxc.loops.nest import Loop, Phase, phase_terms
from onnxc.loops.terms import Apply, Guard, Load, Term, children, index_symbols, walk

BYTES = 1 << 15  # of all tables of an item
TABLE_WEIGHT = 5  # cost of a term that is worth a table


def costs(term: Term, least: int) -> bool:
    """Whether a term and all below it cost so much. (It looks no further than that, as it is asked of every term.)"""
    total = 0
    for t in walk(term):
        total += cost([t]) if isinstance(t, Apply) else 1
        if total >= least:
            return True
    return False


def around(loops: Sequence[Loop]) -> Iterator[frozenset[Symbol]]:
    """The loops that tables may be made in, the fewest first: so many of the outermost that enough rows remain."""
    for k in range(len(loops)):
        rows = prod(d for _, d in loops[k:])
        if k == 0 or not isinstance(rows, int) or rows >= ROWS:
            yield frozenset(s for s, _ in loops[:k])


def terms(emitter: TermEmitter, phase: Phase, vector: Symbol, outer: frozenset[Symbol]) -> list[Term]:
    """Terms that move with the vector loop, and else with `outer` alone, and cost more than a load; none that a guard may
    leave out.
    """
    found: list[Term] = []
    pending, seen = [s.term for s in phase.stores], set[Term]()
    while pending:
        term = pending.pop()
        if isinstance(term, Guard) or term in seen:
            continue
        seen.add(term)
        if vector in emitter.deps(term) <= {vector, *outer} and is_dear(emitter, term):
            found.append(term)
        else:
            pending += children(term)
    return found


def is_dear(emitter: TermEmitter, term: Term) -> bool:
    """Whether a term costs more than a load, or reads lane by lane."""
    if isinstance(term, Load):
        return emitter.stride(term.index[0]) is None
    if not isinstance(term, Apply):
        return False
    return costs(term, TABLE_WEIGHT) or any(is_dear(emitter, t) for t in term.args)


def indices(emitter: TermEmitter, phase: Phase, vector: Symbol, outer: frozenset[Symbol]) -> list[Symbol]:
    """Indices that are data and move like such terms; none where a guard may leave some out."""
    every = phase_terms(phase, dict(emitter.lookups))
    if any(isinstance(t, Guard) for t in every):
        return []
    used = {s for t in every for s in index_symbols(t) if s in emitter.lookups}
    moving = {s: emitter.deps(emitter.lookups[s].term) for s in used}
    return [s for s in sorted(used, key=lambda s: s.key) if vector in moving[s] <= {vector, *outer}]


def fill(
    emitter: TermEmitter, computed: list[Term], data: list[Symbol], vector: Symbol, extent: int,
    scopes: tuple[Scope, Scope], lanes: int,
) -> list[str]:  # fmt: skip
    """Statements that make the tables; what is emitted in the second scope (of a row) then reads them. Empty where
    there are none, or too many.

    The first scope is that which they stand in. A table has whole vectors of `lanes` elements.
    """
    if not 0 < 4 * extent * (len(computed) + 2 * len(data)) <= BYTES:
        return []
    outside, row = scopes
    name, size = emitter.name_loop(vector), -(-extent // lanes) * lanes
    inner, lines, tables = outside.child({vector}), list[str](), dict[Term, str]()
    for term in computed:
        table = emitter.fresh("table")
        lines.append(f"alignas(64) {spelling.lane_type(term.dtype)} {table}[{size}];")
        inner.lines.append(f"stl({table} + {name}, {emitter.emit(term, inner)}, lanes);")
        tables[term] = f"{table} + {name}"
    for s in data:
        table = emitter.fresh("table")
        lines.append(f"alignas(64) i64 {table}[{size}];")
        inner.lines.append(f"stl({table} + {name}, {emitter.data_index(s, inner)}, lanes);")
        row.lookups[s] = f"({table} + {name})"
    emitter.tables = tables
    body = emitter.fresh("fill")
    turn, rest = f"{body}({name}, Full{{}});", f"{body}({name}, Part{{(int)({extent} - {name})}});"
    if extent % lanes:
        turn = rest if extent < lanes else f"if ({name} + VL <= {extent}) {turn} else {rest}"
    return [
        *lines, f"const auto {body} = [&](const i64 {name}, auto lanes) OX_LAMBDA {{", *indent(inner.lines), "};",
        f"for (i64 {name} = 0; {name} < {extent}; {name} += VL) {turn}",
    ]  # fmt: skip
