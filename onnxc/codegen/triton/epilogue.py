"""Epilogues: what a template does with each tile of its result, stores included."""

from __future__ import annotations

from collections.abc import Sequence

from onnxc.codegen.cpp.epilogue import mapping, substitute_indices
from onnxc.codegen.triton.terms import Buffers, Scope, TermEmitter, TileVariable
from onnxc.ir.expr import Dim, Expr, Symbol, symbols
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.planner.lower import Lowering


class Tile:
    """A template's own loops, as the index expressions of operands and of the epilogue see them.

    Loops in `scalars` have one value in a program; those in `lanes` vary along an axis of the tile.
    """

    def __init__(self, shape: tuple[int, ...], buffers: Buffers) -> None:
        self.shape, self.buffers = shape, buffers
        self.names: dict[Symbol, str] = {}
        self.variables: dict[Symbol, TileVariable] = {}

    def scalar(self, loop: Symbol, name: str) -> None:
        """A loop with one value."""
        self.names[loop] = name

    def heads(self, batch: Sequence[tuple[Symbol, Dim]]) -> list[str]:
        """Takes the number `rest` apart into loops with one value, the innermost first."""
        lines, rest = [], "rest"
        for j, (loop, size) in reversed(list(enumerate(batch))):
            count = self.index(size)
            lines.append(f"b{j} = {rest}{f' % {count}' if j else ''}")
            rest = f"({rest} // {count})"
            self.scalar(loop, f"b{j}")
        return lines

    def lane(self, loop: Symbol, variable: TileVariable) -> None:
        """A loop along an axis."""
        self.names[loop] = variable.name
        self.variables[loop] = variable

    def emitter(self, lookups: dict[Symbol, object] | None = None) -> TermEmitter:
        """For terms of these loops."""
        found = TermEmitter(lookups or {}, self.shape, self.buffers)  # type: ignore[arg-type]
        found.names |= self.names
        found.variables |= self.variables
        return found

    def scope(self) -> Scope:
        """Where all loops are known."""
        return Scope(available=set(self.names))

    def index(self, d: Dim) -> str:
        """An index expression of the loops."""
        return self.emitter().index(d, self.scope())


def emit_epilogue(group: Group, layout: Layout, places: tuple[Dim, ...], tile: Tile, *results: str) -> list[str]:
    """The statements that finish and store a tile. `places` is the result's index in terms of the tile's loops,
    `results` are the names of what the group leaves in accumulators.
    """
    section = group.sections[0]
    nest = Lowering(section, layout, group.results).nest(None)
    substitute_indices(nest, [mapping(section, places)])
    emitter = tile.emitter(dict(nest.lookups))
    emitter.results |= {v.id: name for v, name in zip(group.results, results, strict=True)}
    emitter.result_symbols = frozenset(tile.variables)
    scope = tile.scope()
    for store in nest.stores():
        emitter.store(store.value, store.address, store.term, scope)
    return scope.lines


def symbol(e: Expr) -> Symbol:
    """The symbol that an index variable consists of."""
    (found,) = symbols(e)
    return found
