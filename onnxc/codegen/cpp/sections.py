"""Kernels of one section or several, whose items follow each other.

Of many sections, those that differ only in where they read and write (the parts of a long Concat, the outputs of a
Split) are one piece of code and a table of places; and every piece is a function of its own. So the text grows with
what is different, not with the number of sections, and no function is longer than a section.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from onnxc.codegen.cpp import spelling
from onnxc.codegen.cpp.loops import NestEmitter
from onnxc.codegen.cpp.masks import in_bytes
from onnxc.codegen.cpp.writer import KernelSource, indent
from onnxc.ir.expr import Dim, Expr
from onnxc.ir.graph import Value
from onnxc.loops.nest import Nest, apart
from onnxc.loops.terms import Apply, Guard, Load, Term, walk

FEW = 8  # sections whose text is in the kernel's own function


def emit_sections(nests: list[Nest], lanes: int) -> KernelSource:
    """A kernel function over one or more sections: their items follow each other."""
    parts = [part for n in nests for part in apart(in_bytes(n))]
    return _side_by_side(parts, lanes) if len(parts) <= FEW else _by_table(parts, lanes)


def _side_by_side(parts: list[Nest], lanes: int) -> KernelSource:
    """Section after section, in one function."""
    emitters = [NestEmitter(part, lanes) for part in parts]
    buffers: list[Value] = []
    lines: list[str] = []
    counts: list[str] = []
    for e in emitters:
        e.emitter.buffers = buffers  # one numbering for all sections
        body, items = e.emit()
        start = " + ".join(counts) or "0"
        if len(emitters) == 1:
            lines += body
        else:
            lines += [f"{{ const i64 begin = {start}, count = {items};",
                      "  const i64 base = first, until = last;",
                      "  const i64 first = ox_max(base - begin, 0), last = ox_min(until - begin, count);",
                      "  if (first < last) {", *indent(body, 2), "  }", "}"]  # fmt: skip
        counts.append(f"({items})")
    return _source(emitters, lines, buffers, " + ".join(counts) or "0")


def _source(emitters: list[NestEmitter], lines: list[str], buffers: list[Value], items: str) -> KernelSource:
    return KernelSource(
        text="\n".join(indent(lines)),
        buffers=buffers,
        includes=frozenset(name for e in emitters for name in e.includes),
        items=items,
        symbols=sorted({s.key for e in emitters for s in e.emitter.size_symbols()}),
    )


@dataclass
class _Piece:
    """Code that sections share, and for each of them the places of its buffers: numbers, and elements before them."""

    body: list[str]
    items: str
    types: list[str]
    rows: list[list[int]] = field(default_factory=list)

    def lines(self, number: int) -> list[str]:
        """The piece as a function, and the calls of it."""
        table, part, n = f"places{number}", f"part{number}", len(self.rows)
        rows = ", ".join(f"{{{', '.join(map(str, row)) or '0'}}}" for row in self.rows)
        pointers = [
            f"{t} *const __restrict p{k} = ({t} *)a->p[place[{2 * k}]] + place[{2 * k + 1}];"
            for k, t in enumerate(self.types)
        ]
        return [
            f"static const i64 {table}[][{max(1, 2 * len(self.types))}] = {{{rows}}};",
            f"const auto {part} = [&](const i64 *const place, const i64 first, const i64 last) OX_PART {{",
            *indent(["(void)place;", *pointers, *self.body]), "};",
            f"begin = ox_parts({n}, {self.items}, begin, first, last,",
            f"                 [&](i64 k, i64 from, i64 to) {{ {part}({table}[k], from, to); }});",
        ]  # fmt: skip


def _by_table(parts: list[Nest], lanes: int) -> KernelSource:
    """Each piece of code once, in a function of its own, for all sections that it is the code of."""
    emitters: list[NestEmitter] = []
    places: dict[int, int] = {}  # value id -> the kernel's number of a buffer
    buffers: list[Value] = []
    pieces: dict[tuple[str, ...], _Piece] = {}
    for nest in parts:
        moved, offsets = from_zero(nest)
        e = NestEmitter(moved, lanes)
        body, items = e.emit()
        own = e.emitter.buffers
        types = [spelling.storage_type(v.dtype) for v in own]
        piece = pieces.setdefault((items, *types, *body), _Piece(body, items, types))
        for v in own:
            if v.id not in places:
                places[v.id] = len(buffers)
                buffers.append(v)
        piece.rows.append([x for v in own for x in (places[v.id], offsets.get(v.id, 0))])
        emitters.append(e)
    lines = ["i64 begin = 0;"]
    for k, piece in enumerate(pieces.values()):
        lines += piece.lines(k)
    source = _source(emitters, lines, buffers, " + ".join(f"{len(p.rows)} * ({p.items})" for p in pieces.values()))
    source.named = False
    return source


def from_zero(nest: Nest) -> tuple[Nest, dict[int, int]]:
    """The nest with the least constant of each buffer's addresses taken away; these constants, by the value's id."""
    terms = [r.body for r in nest.reductions()] + [s.term for s in nest.stores()]
    terms += [found.term for found in nest.lookups.values()]
    loads = {t for term in terms for t in walk(term) if isinstance(t, Load)}
    least: dict[int, int] = {}
    for value, address in [*((t.value, t.index[0]) for t in loads), *((s.value, s.address) for s in nest.stores())]:
        if value.dtype.bits >= 8:  # else an element has no address of its own
            c = _constant(address)
            least[value.id] = min(c, least.get(value.id, c))
    least = {vid: c for vid, c in least.items() if c}
    return (_moved(nest, least) if least else nest), least


def _constant(address: Dim) -> int:
    return dict(address.terms).get((), 0) if isinstance(address, Expr) else address


def _moved(nest: Nest, least: dict[int, int]) -> Nest:
    memo: dict[Term, Term] = {}

    def new(term: Term) -> Term:
        if term not in memo:
            memo[term] = _with_loads(term, new, least)
        return memo[term]

    phases = [
        replace(
            p,
            reductions=[replace(r, body=new(r.body)) for r in p.reductions],
            stores=[replace(s, address=s.address - least.get(s.value.id, 0), term=new(s.term)) for s in p.stores],
        )
        for p in nest.phases
    ]
    return replace(nest, phases=phases, lookups={s: replace(x, term=new(x.term)) for s, x in nest.lookups.items()})


def _with_loads(term: Term, new: Callable[[Term], Term], least: dict[int, int]) -> Term:
    if isinstance(term, Load):
        return replace(term, index=(term.index[0] - least.get(term.value.id, 0),))
    if isinstance(term, Apply):
        return replace(term, args=tuple(map(new, term.args)))
    if isinstance(term, Guard):
        return replace(term, inside=new(term.inside), outside=new(term.outside))
    return term
