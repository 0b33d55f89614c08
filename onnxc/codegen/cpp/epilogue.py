"""Epilogues: what a template does with each vector of its result, stores included."""

from __future__ import annotations

from dataclasses import replace

from onnxc.codegen.cpp.terms import TermEmitter
from onnxc.codegen.cpp.writer import Scope
from onnxc.ir.expr import (
    Call,
    Dim,
    Expr,
    Symbol,
    always_equal,
    coefficient,
    index,
    recombine,
    substitute,
    symbols,
)
from onnxc.ir.graph import Value
from onnxc.loops.nest import Nest, Phase
from onnxc.loops.rewriting import rewrite, substitute_nest
from onnxc.loops.terms import Apply, Guard, Load, Position, Term, walk
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.planner.lower import Lowering
from onnxc.planner.section import Section


class Epilogue:
    """The epilogue section of a template group, as C++ statements over the accumulator `acc`.

    `places` gives the index of the template's result in terms of the template's own loops; `names` how C++ calls
    those loops. The lanes run along the loop `channel`; with `aligned`, its value is a multiple of the vector length
    at every call, so that `channel // n` and `channel % n` can be linear in the lanes. `linear`, where given, is
    another way to say the index (in terms of one flat position): each address takes it where it leaves no division.
    """

    def __init__(
        self, group: Group, layout: Layout, lanes: int, places: tuple[Dim, ...], names: dict[Symbol, str], channel: Expr,
        buffers: list[Value], *, aligned: bool = True, linear: tuple[Dim, ...] | None = None,
    ) -> None:  # fmt: skip
        assert group.node is not None
        section = group.sections[0]
        self.nest = Lowering(section, layout, group.results).nest(None)
        (c,) = symbols(channel)
        block, lane = index("block", 1 << 40), index("lane", lanes)
        split: dict[Symbol, Dim] = {c: block * lanes + lane if aligned else channel + lane}
        choices = [mapping(section, p) for p in ([linear, places] if linear else [places])]
        substitute_indices(self.nest, choices)
        substitute_nest(self.nest, split)
        (block_symbol,), (lane_symbol,) = symbols(block), symbols(lane)
        self.emitter = TermEmitter(self.nest.lookups, lane_symbol)
        self.emitter.exact = self.nest.exact
        self.emitter.buffers = buffers
        self.emitter.names = {**names, block_symbol: f"({names[c]} / VL)", lane_symbol: "0"}
        self.emitter.results[group.node.output.id] = "acc"
        self._known: set[object] = {*names, block_symbol, lane_symbol, "result"}
        self._column = {block_symbol: lanes, lane_symbol: 1}
        self._lanes = lanes

    def matrices(self, row: Symbol) -> list[tuple[Value, Dim, Dim]]:
        """What is written or read in contiguous rows, stores first: the buffer, the address of element (0, 0), and
        how far apart the rows are. None of those whose place is data, which only the epilogue itself reads."""
        stores = self.nest.stores()
        loads = [t for s in stores for t in walk(s.term) if isinstance(t, Load)]
        places = [(s.value, s.address) for s in stores] + [(x.value, x.index[0]) for x in loads]
        found: list[tuple[Value, Dim, Dim]] = []
        for value, address in dict.fromkeys(places):
            if symbols(address) & self.nest.lookups.keys():
                continue
            apart = coefficient(address, row)
            contiguous = all(always_equal(coefficient(address, s) or 0, c) for s, c in self._column.items())
            if contiguous and apart is not None and not always_equal(apart, 0):
                found.append((value, substitute(address, dict.fromkeys((row, *self._column), 0)), apart))
        return found

    def apart(self) -> int:
        """Elements of a vector that are moved one by one, since they do not lie side by side; loads count half."""
        stores = self.nest.stores()
        loads = {t for s in stores for t in walk(s.term) if isinstance(t, Load)}
        uneven = [self.emitter.stride(s.address) not in (0, 1) for s in stores]
        return self._lanes * sum(uneven) + self._lanes // 2 * sum(
            self.emitter.stride(t.index[0]) not in (0, 1) for t in loads
        )

    def emit(self) -> list[str]:
        """The statements; they use `acc`, `lanes` and the loops' names."""
        scope = Scope(available=self._known)
        stores = self.nest.stores()
        values = [self.emitter.emit(s.term, scope) for s in stores]  # all first: a store may overwrite what they read
        for s, value in zip(stores, values, strict=True):
            self.emitter.store(s, [value], scope)
        return scope.lines


def mapping(section: Section, places: tuple[Dim, ...]) -> dict[Symbol, Dim]:
    """What stands for each loop of a section in a template that puts its result at `places`. Where the section has
    divided the loop along an axis, as into `4 * outer + inner`, these are a quotient and a remainder of its place.
    """
    extents = dict(section.variables)
    found: dict[Symbol, Dim] = {}
    for i, place in zip(section.index, places, strict=True):
        strides = {s: coefficient(i, s) for s in symbols(i) if s in extents}
        for s, stride in strides.items():
            assert stride is not None, "a section's index is a sum of its loops"
            whole = stride * extents[s]
            is_inner = any(other is not None and always_equal(other, whole) for other in strides.values())
            found[s] = place // stride % extents[s] if is_inner else place // stride
    return found


def _best(address: Dim, choices: list[dict[Symbol, Dim]]) -> Dim:
    """The address under the first choice that leaves no division, else under the last."""
    for values in choices[:-1]:
        found = recombine(substitute(address, values))
        if not _has_calls(found):
            return found
    return recombine(substitute(address, choices[-1]))


def _has_calls(d: Dim) -> bool:
    return isinstance(d, Expr) and any(isinstance(a, Call) for a in d.atoms())


def substitute_indices(nest: Nest, choices: list[dict[Symbol, Dim]]) -> None:
    """Puts a template's loops into a nest; each address takes the first of `choices` that leaves no division."""
    memo: dict[Term, Term] = {}
    for k, phase in enumerate(nest.phases):
        stores = [
            replace(s, address=_best(s.address, choices), term=_term(s.term, choices, memo)) for s in phase.stores
        ]
        nest.phases[k] = Phase(phase.loops, phase.reductions, stores)
    nest.lookups = {s: replace(k, term=_term(k.term, choices, memo)) for s, k in nest.lookups.items()}


def _term(term: Term, choices: list[dict[Symbol, Dim]], memo: dict[Term, Term]) -> Term:
    if term not in memo:
        memo[term] = _new_term(term, choices, memo)
    return memo[term]


def _new_term(term: Term, choices: list[dict[Symbol, Dim]], memo: dict[Term, Term]) -> Term:
    if isinstance(term, Load):
        return replace(term, index=tuple(_best(e, choices) for e in term.index))
    if isinstance(term, Apply):
        return replace(term, args=tuple(_term(a, choices, memo) for a in term.args))
    if isinstance(term, (Guard, Position)):
        return rewrite(term, choices[-1])
    return term
