"""Epilogues: what a template does with each vector of its result, stores included."""

from __future__ import annotations

from dataclasses import replace

from onnxc.codegen.cpp.shape import substitute_nest
from onnxc.codegen.cpp.terms import TermEmitter
from onnxc.codegen.cpp.writer import Scope
from onnxc.ir.expr import Dim, Expr, Symbol, index, of, recombine, symbols
from onnxc.ir.graph import Value
from onnxc.loops.nest import Nest, Phase
from onnxc.loops.terms import Load, Term, children
from onnxc.planner.fusion import Group
from onnxc.planner.layout import Layout
from onnxc.planner.lower import Lowering


class Epilogue:
    """The epilogue section of a template group, as C++ statements over the accumulator.

    `places` gives the index of the template's result in terms of the template's own loops; `names` how C++ calls
    those loops. `channel` is the loop that the lanes run along; its C++ name is a multiple of VL at every call.
    """

    def __init__(self, group: Group, layout: Layout, lanes: int, places: tuple[Dim, ...], names: dict[Symbol, str], channel: Expr, buffers: list[Value]) -> None:
        assert group.node is not None
        section = group.sections[0]
        lowering = Lowering(section, layout, group.node.output)
        self.nest = lowering.nest(None)
        values: dict[Symbol, Dim] = {}
        for at, place in zip(section.index, places, strict=True):
            for s in symbols(at):
                values[s] = place
        (c,) = symbols(channel)
        block, lane = index("block", 1 << 40), index("lane", lanes)
        split = {c: block * lanes + lane}
        substitute_nest(self.nest, values)
        _recombine(self.nest)
        substitute_nest(self.nest, split)
        (block_symbol,), (lane_symbol,) = symbols(block), symbols(lane)
        self.emitter = TermEmitter(self.nest.lookups, lane_symbol)
        self.emitter.buffers = buffers
        self.emitter.names = {**names, block_symbol: f"({names[c]} / VL)", lane_symbol: "0"}
        self.emitter.results[group.node.output.id] = "acc"
        self._known: set[object] = {*names, block_symbol, lane_symbol, "result"} - {c}

    def emit(self) -> list[str]:
        """The statements; they use `acc`, `lanes` and the loops' names."""
        scope = Scope(available=self._known)
        for store in self.nest.stores():
            value = self.emitter.emit(store.term, scope)
            self.emitter.store(store.value, store.address, value, scope)
        return scope.lines


def _recombine(nest: Nest) -> None:
    memo: dict[Term, Term] = {}
    for k, phase in enumerate(nest.phases):
        stores = [replace(s, address=recombine(s.address), term=_recombine_term(s.term, memo)) for s in phase.stores]
        nest.phases[k] = Phase(phase.loops, phase.reductions, stores)


def _recombine_term(term: Term, memo: dict[Term, Term]) -> Term:
    if term not in memo:
        if isinstance(term, Load):
            memo[term] = replace(term, index=tuple(recombine(e) for e in term.index))
        elif children(term):
            memo[term] = _with_children(term, memo)
        else:
            memo[term] = term
    return memo[term]


def _with_children(term: Term, memo: dict[Term, Term]) -> Term:
    from onnxc.loops.terms import Apply, Guard  # noqa: PLC0415

    if isinstance(term, Apply):
        return replace(term, args=tuple(_recombine_term(a, memo) for a in term.args))
    assert isinstance(term, Guard)
    return replace(term, inside=_recombine_term(term.inside, memo), outside=_recombine_term(term.outside, memo))


__all__ = ["Epilogue", "of"]
