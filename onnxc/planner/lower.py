"""Lowers a section to a loop nest: builds the scalar term of every store and sorts reductions into phases."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, Symbol, is_less, recombine, symbols
from onnxc.ir.graph import Node, Value
from onnxc.loops.access import Index
from onnxc.loops.known import lies_inside
from onnxc.loops.nest import Loop, Nest, Phase, Store
from onnxc.loops.terms import (
    Apply,
    Const,
    Guard,
    Load,
    Lookup,
    Position,
    Reduced,
    Reduction,
    Result,
    Term,
    deep_walk,
    index_symbols,
)
from onnxc.planner.groups import Placement
from onnxc.planner.layout import Layout
from onnxc.planner.section import CONTRACTIONS, WINDOWS, Section, conv_guards
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import constant_of


class Lowering:
    """Builds terms for one section. `results` are the values that a template leaves in its accumulators, if any."""

    def __init__(self, section: Section, layout: Layout, results: Iterable[Value] = ()) -> None:
        self.section, self.layout, self.results = section, layout, {v.id for v in results}
        self.reductions: dict[int, Reduction] = {}
        self.lookups: dict[Symbol, Lookup] = {}
        self._memo: dict[tuple[int, Index], Term] = {}
        self._interned: dict[Term, Term] = {}

    def at(self, value: Value, index: Index) -> Term:
        """The term of one element of a value."""
        key = (value.id, index)
        if key not in self._memo:
            self._memo[key] = self._intern(self._build(value, index))
        return self._memo[key]

    def _intern(self, term: Term) -> Term:
        return self._interned.setdefault(term, term)

    def _build(self, value: Value, index: Index) -> Term:
        constant = constant_of(value)
        if constant is not None and constant.size == 1:
            return Const(value.dtype, constant.tobytes())
        if value.id in self.results:
            return Result(value.dtype, value)
        node = self.section.members.get(value.id)
        if node is None:
            return Load(value.dtype, self.layout.storage(value), (self.layout.address(value, index),))
        return self._compute(node, index)

    def _compute(self, node: Node, index: Index) -> Term:
        kind = lookup(node.op).kind
        dtype = node.output.dtype
        if node.op == "iota":
            return (
                Apply(dtype, "cast", (Position(dtypes.int64, index[0]),), ())
                if dtype is not dtypes.int64
                else Position(dtype, index[0])
            )
        if node.op == "sizes":
            return self._sizes(node, index)
        reads = self.section.reads(node, index)
        if node.op == "concat":
            return self._concat(node, reads)
        if node.op == "pad":
            (x, inner), (fill, _) = reads
            guards = tuple(c for c in map(recombine, self._pad_guards(node, index)) if not _certain(c))
            return self._guard(guards, self.at(x, inner), self.at(fill, ()))
        if kind is Kind.VIEW:
            ((x, inner),) = reads
            return self.at(x, inner)
        if kind is Kind.POINTWISE:
            args = tuple(self.at(v, i) for v, i in reads)
            if node.op == "cast" and (known := _before_narrowing(args[0], dtype)) is not None:
                return known
            return Apply(dtype, node.op, args, tuple((k, v) for k, v in node.attrs.items() if k != "to"))
        if kind is Kind.INDEXED:
            return self._indexed(node, reads)
        return self._reduce(node, index, reads)

    def _guard(self, conditions: tuple[Dim, ...], inside: Term, outside: Term) -> Term:
        return Guard(inside.dtype, conditions, inside, outside) if conditions else inside

    def _pad_guards(self, node: Node, index: Index) -> list[Dim]:
        x = node.operands[0]
        out: list[Dim] = []
        for i, d, lo, gap in zip(index, x.shape, node.attrs["low"], node.attrs["interior"], strict=True):
            inner = i - lo
            out += [inner, (d - 1) * (gap + 1) - inner]
            if gap:
                out.append(0 - inner % (gap + 1))
        return out

    def _concat(self, node: Node, reads: list[tuple[Value, Index]]) -> Term:
        axis = node.attrs["axis"]
        parts = [(v, i) for v, i in reads if v.shape[axis] != 0] or reads[:1]
        value, at = parts[-1]
        term = self.at(value, at)
        for value, at in reversed(parts[:-1]):
            # Earlier parts are tested first, so one side is enough.
            inside = recombine(value.shape[axis] - 1 - at[axis])
            if not is_less(inside, 0):
                term = self._guard(() if _certain(inside) else (inside,), self.at(value, at), term)
        return term

    def _sizes(self, node: Node, index: Index) -> Term:
        dims = node.attrs["dims"]
        term: Term = Position(dtypes.int64, dims[-1])
        for k in reversed(range(len(dims) - 1)):
            term = self._guard((k - index[0],), Position(dtypes.int64, dims[k]), term)
        return term

    def _indexed(self, node: Node, reads: list[tuple[Value, Index]]) -> Term:
        x = node.operands[0]
        for value, at in reads[:-1]:
            symbol = self.section.lookups[(node.output.id, at)]
            assert symbol.hi is not None
            self.lookups[symbol] = Lookup(symbol, self.at(value, at), symbol.hi + 1, lies_inside(value, symbol.hi + 1))
        return self.at(x, reads[-1][1])

    def _reduce(self, node: Node, index: Index, reads: list[tuple[Value, Index]]) -> Term:
        plan = self.section.reduction(node, index)
        terms = [self.at(v, i) for v, i in reads]
        op, position = node.op, None
        if op in CONTRACTIONS:
            body: Term = Apply(node.output.dtype, "mul", (terms[0], terms[1]))
            if op != "matmul":
                body = self._outside(node, reads[0][1], body, 0)
            op = "sum"
        elif op in WINDOWS:
            op = op.removeprefix("window_")
            body = self._outside(node, reads[0][1], terms[0], 0 if op == "sum" else _lowest(node.output))
        else:
            (body,) = terms
            op = op.removeprefix("reduce_")
            if op in ("argmax", "argmin"):
                position = reads[0][1][node.attrs["axis"]]
        key, order = len(self.reductions), self.section.order_of(node.output)
        self.reductions[key] = Reduction(
            key, op, node.output, index, tuple(plan.variables), self._intern(body), position, dict(node.attrs),
            None if order is None else order.across,
        )  # fmt: skip
        return Reduced(node.output.dtype, key, index)

    def _outside(self, node: Node, at: Index, body: Term, fill: float | int) -> Term:
        guards = tuple(c for c in conv_guards(node, at) if not _certain(c))
        outside = Const(body.dtype, np.asarray(fill, body.dtype.numpy).tobytes())
        return self._guard(guards, body, outside)

    # ------------------------------------------------------------ the nest

    def nest(self, placement: Placement | None) -> Nest:
        """The section's loops, phases and stores."""
        section = self.section
        stores = [self._store(section.values[vid], section.values[vid], at, at) for vid, at in section.stores.items()]
        if placement is not None:
            place = tuple(i + start for i, start in zip(section.index, placement.start, strict=True))
            stores.append(self._store(placement.target, section.root, place, section.index))
        outer_symbols = section.outer
        if outer_symbols is None:
            outer_symbols = [s for s, _ in section.variables] if self.reductions else []
        outer = [(s, d) for s, d in section.variables if s in outer_symbols]
        inner = [(s, d) for s, d in section.all_variables() if s not in outer_symbols]
        phases = self._phases()
        by_loops: dict[tuple[Loop, ...], list[Store]] = {}
        for s in stores:
            by_loops.setdefault(tuple(x for x in inner if _uses(s, x[0], self.lookups)), []).append(s)
        phases += [
            Phase(list(loops), stores=some) for loops, some in sorted(by_loops.items(), key=lambda kv: len(kv[0]))
        ]
        return Nest(outer, phases, self.lookups, section.orders is not None)

    def _store(self, target: Value, value: Value, place: Index, at: Index) -> Store:
        return Store(self.layout.storage(target), self.layout.address(target, place), self.at(value, at))

    def _phases(self) -> list[Phase]:
        level: dict[int, int] = {}
        for key, r in self.reductions.items():  # made in dependency order: operands first
            below = [level[t.key] for t in deep_walk([r.body], self.lookups) if isinstance(t, Reduced)]
            level[key] = 1 + max(below, default=0)
        phases: dict[tuple[int, tuple[Symbol, ...], bool], Phase] = {}
        for key, r in sorted(self.reductions.items(), key=lambda kv: level[kv[0]]):
            alone = self.section.orders is not None and r.position is not None  # vectors are not taken side by side
            place = (level[key], tuple(s for s, _ in r.variables), alone)
            phases.setdefault(place, Phase(list(r.variables))).reductions.append(r)
        return list(phases.values())


def _uses(store: Store, loop: Symbol, lookups: dict[Symbol, Lookup]) -> bool:
    if loop in symbols(store.address):
        return True
    return any(loop in index_symbols(t) for t in deep_walk([store.term], lookups))


def _before_narrowing(term: Term, dtype: DType) -> Term | None:
    """The int32 number that was quantized, where it is narrowed to its own type and read back as int32."""
    if dtype is not dtypes.int32 or not isinstance(term, Apply) or term.op != "cast":
        return None
    inner = term.args[0]
    if not isinstance(inner, Apply) or inner.op != "quantize" or not term.dtype.is_integer:
        return None
    attrs, (least, greatest) = dict(inner.attrs), term.dtype.limits
    return inner if least <= attrs["low"] and attrs["high"] <= greatest else None


def _certain(condition: Dim) -> bool:
    """Whether it is >= 0 wherever the loops are: `batch - 1 - n`, say, of n below an open batch."""
    return is_less(-condition, 1)


def _lowest(value: Value) -> float | int:
    if value.dtype.is_float:
        return -float("inf")
    return int(value.dtype.limits[0])
