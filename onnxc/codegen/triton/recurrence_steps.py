"""What the kernels of recurrent loops have in common: the terms of a step's stages, and their matrices.

`recurrence.py` has programs of its own for each step, `recurrence_alone.py` one program for all steps of some rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from onnxc.codegen.cpp.epilogue import mapping, substitute_indices
from onnxc.codegen.triton.epilogue import Tile, symbol
from onnxc.codegen.triton.kernel import power
from onnxc.codegen.triton.options import Options
from onnxc.codegen.triton.terms import Buffers, Scope, TermEmitter, TileVariable
from onnxc.ir.expr import Dim, Symbol, of, prod, substitute
from onnxc.ir.graph import Value
from onnxc.ir.types import TensorType
from onnxc.loops.access import fresh
from onnxc.loops.terms import Apply, Guard, Load, Result, Term
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.planner.lower import Lowering
from onnxc.planner.recurrence import Product, Recurrence, Stage


def products_of(it: Recurrence) -> list[Product]:
    """Those of a step."""
    return [p for s in it.stages for p in s.products]


def width_of(group: Group) -> int:
    """Columns of a state."""
    assert group.node is not None
    width = group.node.outputs[0].shape[-1]
    assert isinstance(width, int)
    return width


def is_exact(it: Recurrence, options: Options) -> bool:
    """Whether its products are of float32, and are not for the matrix units."""
    return options.dot == "ieee" and products_of(it)[0].node.output.dtype.name == "float32"


def places_of(stage: Stage, it: Recurrence) -> dict[int, list[int]]:
    """Where in its columns a product is read, by the id of its result: how far behind an element's own column."""
    found: dict[int, set[int]] = {p.node.output.id: set() for p in stage.products}
    for load in stage.loads:
        if load.value.id in found:
            off = load.index[0] - it.layout.address(load.value, stage.section.index)
            assert isinstance(off, int)
            found[load.value.id].add(off)
    return {vid: sorted(offsets) for vid, offsets in found.items()}


def gates_of(it: Recurrence) -> int:
    """The most columns of a product that meet in an element of a state, as a power of two."""
    found = 1
    for stage in it.stages:
        found = max([found, *(power(len(offsets)) for offsets in places_of(stage, it).values())])
    return found


@dataclass
class Sums:
    """The results of a product, by how far behind an element's own column they are."""

    product: Product
    offsets: list[int]
    results: list[Value] = field(default_factory=list)

    @property
    def each(self) -> int:
        """Columns of the matrix for each column of a state."""
        return power(len(self.offsets))

    @property
    def length(self) -> int:
        """Elements of a sum."""
        k = self.product.access.sizes[2]
        assert isinstance(k, int)
        return k

    def matrices(self, width: int) -> np.ndarray:
        """What states of so many columns are multiplied by: [matrices, elements of a sum, columns, offsets]."""
        p = self.product
        b, (_, n, k) = p.access.b, p.access.sizes
        assert isinstance(n, int) and isinstance(k, int) and isinstance(b.row, int) and isinstance(b.col, int)
        counts = [d for _, d in p.access.batch]
        lead = prod(counts)
        assert isinstance(lead, int)
        flat = np.ascontiguousarray(p.constant).reshape(-1)
        columns = np.arange(width)[:, None] + np.array(self.offsets)[None, :]
        inner = np.arange(k)[:, None, None] * b.row + columns[None] * b.col
        found = np.empty((lead, k, width, len(self.offsets)), flat.dtype)
        for x in range(lead):
            at, rest = dict[Symbol, Dim](), x
            for loop, d in reversed(p.access.batch):
                assert isinstance(d, int)
                at[loop], rest = rest % d, rest // d
            base = substitute(b.base, at)
            assert isinstance(base, int)
            found[x] = flat[base + inner]
        return found


class Steps:
    """A loop of which a kernel is written: its states, its sizes, and the tile of a program."""

    def __init__(self, group: Group, layout: Layout, options: Options) -> None:
        node, it = group.node, group.recurrence
        assert node is not None and it is not None
        self.node, self.it, self.options = node, it, options
        self.layout = it.layout
        self.region = node.regions[0]
        self.results = [layout.storage(y) for y in node.outputs]  # elements may lie in an output of another shape
        self.trip, self.count = node.attrs["trip"], node.attrs["states"]
        self.states = self.region.inputs[: self.count]
        self.slices = {v.id for v in self.region.inputs[self.count : self.count + node.attrs["scanned"]]}
        self.ends = [self.region.outputs[k] for k in node.attrs["results"]]
        self.shape = self.states[0].shape
        self.size = prod(self.shape)
        first = products_of(it)[0].access
        self.access, self.rows, self.width = first, first.sizes[0], width_of(group)
        self.t, self.unit = fresh("t", self.trip), fresh("u", self.width)
        self.at = tuple(0 if d == 1 else x for d, x in zip(self.shape, (*first.index[:-1], self.unit), strict=True))

    def tile(self, buffers: Buffers, shape: tuple[int, int], rows: int) -> Tile:
        """Of a program: the axis `rows` of its shape is that of the rows of states, the other one that of units."""
        tile = Tile(shape, buffers)
        for name, size, axis, s in (("m", self.rows, rows, self.access.m), ("u", self.width, 1 - rows, self.unit)):
            whole = isinstance(size, int) and size % shape[axis] == 0
            known = size if isinstance(size, int) else None
            tile.lane(symbol(s), TileVariable(name, axis, shape[axis], None if whole else f"{name}m", known))
        tile.scalar(symbol(self.t), "t")
        return tile


class StageTerms:
    """A stage of a step: what is computed for an element, as terms of sums and of what is handed on."""

    def __init__(self, steps: Steps, stage: Stage, kept: frozenset[int]) -> None:
        """`kept`: states, and what stages hand on."""
        self.steps, self.stage, self.kept = steps, stage, kept
        self.sums = [
            Sums(p, offsets, [Value(TensorType(p.node.output.dtype, ())) for _ in offsets])
            for p, offsets in zip(stage.products, places_of(stage, steps.it).values(), strict=True)
        ]
        self.needed: dict[int, Value] = {}  # of what is kept: what is read at its own place
        self._memo: dict[Term, Term] = {}
        self._seen: set[int] = set()
        nest = Lowering(stage.section, steps.layout).nest(None)
        substitute_indices(nest, [mapping(stage.section, steps.at)])
        self.terms = {s.value.id: self._term(s.term) for s in nest.stores()}

    def _term(self, term: Term) -> Term:
        """A term of sums and of numbers that are handed on, in place of loads of them."""
        if term not in self._memo:
            self._memo[term] = self._changed(term)
        return self._memo[term]

    def _changed(self, term: Term) -> Term:
        if isinstance(term, Apply):
            return replace(term, args=tuple(map(self._term, term.args)))
        if isinstance(term, Guard):
            return replace(term, inside=self._term(term.inside), outside=self._term(term.outside))
        return self._read(term) if isinstance(term, Load) else term

    def _read(self, load: Load) -> Term:
        own, vid = self.steps, load.value.id
        for s in self.sums:
            if s.product.node.output.id == vid:
                off = load.index[0] - own.layout.address(load.value, own.at)
                assert isinstance(off, int)
                return Result(load.dtype, s.results[s.offsets.index(off)])
        if vid in self.kept:
            self.needed[vid] = load.value
            return Result(load.dtype, load.value)
        outside = own.it.outside.get(vid)
        if outside is None:
            return load
        step = own.t * load.value.t.size if vid in own.slices else 0
        return Load(load.dtype, outside, (load.index[0] + step,))

    def read_early(self, emitter: TermEmitter, scope: Scope) -> None:
        """Reads what does not depend on the step before."""
        for term in self.terms.values():
            self._early(term, emitter, scope)

    def _early(self, term: Term, emitter: TermEmitter, scope: Scope) -> None:
        if id(term) in self._seen:  # terms share parts: there may be many more paths than terms
            return
        self._seen.add(id(term))
        if isinstance(term, Apply):
            for a in term.args:
                self._early(a, emitter, scope)
        elif isinstance(term, Load):
            emitter.emit(term, scope)


def same_loops(steps: Steps, p: Product) -> dict[Symbol, Dim]:
    """The loops of a product over rows and matrices, as those of the tile."""
    same: dict[Symbol, Dim] = {symbol(p.access.m): steps.access.m}
    return same | {x: of(y) for (x, _), (y, _) in zip(p.access.batch, steps.access.batch, strict=True)}
