"""Reductions in two stages, where one stage would run on one thread, or walk through memory in leaps.

A reduction to few elements has little that can run in parallel. And one over channels-last groups (GroupNorm: the
sum over the pixels of six neighbouring channels) has neighbouring elements that belong to one result, and long leaps
to the next of them:

    reduce_sum [1, 32, 6, 64, 64] over (2, 3, 4)        strides (_, 6, 1, 12288, 192)

The first stage keeps the innermost axes, so that its vectors run over all channels, and some parts of the outermost
ones, so that it runs in parallel; the second sums what it leaves. The number of parts follows from the shapes alone:
results do not depend on the number of threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import (
    Dim,
    Expr,
    Symbol,
    always_equal,
    coefficient,
    floordiv,
    is_nonnegative,
    of,
    substitute,
    symbols,
)
from onnxc.ir.graph import Graph, Node, Value
from onnxc.loops.access import Index, behind_view, broadcast, fresh
from onnxc.loops.loop_index import divided_loops
from onnxc.passes.simplify import Rewriter
from onnxc.planner.guesses import guessed_size
from onnxc.planner.layout import Layout
from onnxc.planner.machine import CPU, Machine
from onnxc.planner.section import WINDOWS
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import Builder, constant_of
from onnxc.primitives.movement import VIEWS

REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod")
WIDE = 16  # taps of a window
MOST_TAPS, MOST_STRIDE, LEAST_ROW, LONGEST_ROW = 32, 4, 8, 2048  # of windows that go row by row


@dataclass
class _Loop:
    """A loop of a reduction's operand; several may make up one axis."""

    symbol: Symbol
    extent: Dim
    axis: int
    stays: bool  # it is not reduced
    stride: int = 0  # in memory; a guess where it is open
    stage: int = 0  # the one that reduces it; 0 where it stays
    filled: int = 0  # elements by which this loop and the next one, a part of it, are longer than what they divide

    @property
    def size(self) -> int:
        """Its extent, or a guess: of a batch that is not known, one."""
        open_batch = self.stays and not isinstance(self.extent, int)
        return 1 if open_batch else guessed_size((self.extent,))


def split_reductions(graph: Graph, layout: Layout, machine: Machine = CPU) -> tuple[Graph, Layout]:
    """The graph with every reduction that gains from it in two stages."""
    found = {id(n): plan for n in graph.nodes if n.op in REDUCTIONS and (plan := _stages(n, layout, machine))}
    windows = {id(n) for n in graph.nodes if n.op in WINDOWS and _is_wide(n) and not _has_rows(n, layout)}
    if not found and not windows:
        return graph, layout
    rewriter, order = _Split(graph), dict(layout.order)
    for node in graph.nodes:
        if id(node) in found:
            rewriter.split(node, found[id(node)], order)
        elif id(node) in windows:
            rewriter.separate(node, order)
        else:
            rewriter.keep(node)
    for old, new in rewriter.replaced.items():
        if old in order:
            order[new.id] = order[old]
    return rewriter.result(), replace(layout, order=order)


class _Split(Rewriter):
    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.divided: dict[tuple[int, tuple[Dim, ...], str], Value] = {}
        self.wide: dict[int, Value] = {}

    def split(self, node: Node, loops: list[_Loop], order: dict[int, tuple[int, ...]]) -> None:
        """Adds both stages of a reduction."""
        x, out = self.value(node.operands[0]), node.output
        assert x is not None
        if _is_narrow(x) and node.op in ("reduce_sum", "reduce_prod"):
            x = self._widened(node, x, order)
        extents = tuple(p.extent for p in loops)
        key = (x.id, extents, node.op if any(p.filled for p in loops) else "")
        first = self.divided.get(key) or self._add(node, "reshape", self._filled(node, x, loops), extents)
        self.divided[key] = first  # reductions of one operand stay reductions of one operand
        partial = self._reduce(node, first, [k for k, p in enumerate(loops) if p.stage == 1])
        rest = [p for p in loops if p.stage != 1]
        order[partial.id] = tuple(sorted(range(len(rest)), key=lambda k: (-rest[k].stride, k)))
        whole = self._reduce(node, partial, [k for k, p in enumerate(rest) if p.stage == 2])
        result = self._add(node, "reshape", whole, out.shape)
        self.replace(out, self._cast(node, result, out.dtype))

    def _filled(self, node: Node, x: Value, loops: list[_Loop]) -> Value:
        """The operand, filled up with what changes nothing where its parts are not equally long."""
        if not any(p.filled for p in loops):
            return x
        pairs = {k + 1 for k, p in enumerate(loops) if p.filled}
        high = tuple(p.filled for k, p in enumerate(loops) if k not in pairs)
        shape = tuple(
            p.extent * loops[k + 1].extent - p.filled if p.filled else p.extent
            for k, p in enumerate(loops)
            if k not in pairs
        )
        b = Builder()
        b.origin = node.origin
        found = b.pad(b.reshape(x, shape), (0,) * len(high), high, _neutral(node.op, x.dtype))
        self.nodes += b.nodes
        return found

    def _widened(self, node: Node, x: Value, order: dict[int, tuple[int, ...]]) -> Value:
        """An operand as float32; the same value for all of its reductions."""
        if x.id not in self.wide:
            self.wide[x.id] = self._cast(node, x, dtypes.float32)
            if x.id in order:
                order[self.wide[x.id].id] = order[x.id]
        return self.wide[x.id]

    def _cast(self, node: Node, x: Value, dtype: DType) -> Value:
        if x.dtype is dtype:
            return x
        new = Node("cast", [x], [Value(x.t.with_dtype(dtype))], {"to": dtype}, (), node.origin)
        self.nodes.append(new)
        return new.output

    def separate(self, node: Node, order: dict[int, tuple[int, ...]]) -> None:
        """Adds a window as one for each of its axes: 5 + 5 taps for 25."""
        (x,), out, attrs = node.operands, node.output, node.attrs
        value = self.value(x)
        assert value is not None
        neutral = {"kernel": 1, "strides": 1, "dilations": 1, "low": 0, "high": 0}
        shape = list(x.shape)
        for axis in (a for a in range(x.rank) if any(attrs[k][a] != n for k, n in neutral.items())):
            own = {k: tuple(attrs[k][a] if a == axis else n for a in range(x.rank)) for k, n in neutral.items()}
            shape[axis] = out.shape[axis]
            new = Node(node.op, [value], [Value(out.t.with_shape(tuple(shape)))], own, (), node.origin)
            self.nodes.append(new)
            value = new.output
            if out.id in order:
                order[value.id] = order[out.id]
        self.replace(out, value)

    def _add(self, node: Node, op: str, x: Value, shape: tuple[Dim, ...]) -> Value:
        new = Node(op, [x], [Value(x.t.with_shape(tuple(shape)))], {"shape": tuple(shape)}, (), node.origin)
        self.nodes.append(new)
        return new.output

    def _reduce(self, node: Node, x: Value, axes: list[int]) -> Value:
        shape = tuple(d for k, d in enumerate(x.shape) if k not in axes)
        new = Node(node.op, [x], [Value(x.t.with_shape(shape))], {"axes": tuple(axes)}, (), node.origin)
        self.nodes.append(new)
        return new.output


def _is_wide(node: Node) -> bool:
    """Whether a window has so many taps that one pass for each axis is cheaper."""
    kernel = [k for k in node.attrs["kernel"] if k != 1]
    taps = math.prod(kernel)
    return bool(node.output.dtype.bits >= 32 and taps >= WIDE and 2 * sum(kernel) <= taps)


def _has_rows(node: Node, layout: Layout) -> bool:
    """Whether windows over two axes run along rows in memory: their kernel then does one axis after the other itself, a
    row at a time (codegen/cpp/lines.py).
    """
    row, attrs = layout.order_of(node.output)[-1], node.attrs
    wide = [a for a, k in enumerate(attrs["kernel"]) if k != 1]
    length, results = node.operands[0].shape[row], node.output.shape[row]
    if len(wide) != 2 or row not in wide or not isinstance(length, int) or not isinstance(results, int):
        return False
    stride, dilation, taps = (attrs[k][row] for k in ("strides", "dilations", "kernel"))
    fits = results >= LEAST_ROW and length <= LONGEST_ROW and taps <= MOST_TAPS
    return bool(fits and stride <= MOST_STRIDE and min(stride, dilation) == 1)


def _stages(node: Node, layout: Layout, machine: Machine) -> list[_Loop] | None:
    """The loops of a reduction with the stage of each, in the operand's order; None where one stage is well."""
    (x,) = node.operands
    if guessed_size(x.shape) < machine.leaping or (_is_narrow(x) and not machine.widen):
        return None
    loops = _loops(node, layout, machine) or []
    size = math.prod(p.size for p in loops)
    if size < machine.leaping:
        return None
    inward = sorted(loops, key=lambda p: p.stride)
    kept = [p for p in inward if p.stays]
    run = _innermost(inward, kept)
    leaps = _leaps(inward, kept, run, machine)
    items = math.prod(p.size for p in [*kept, *(run if leaps else ())])
    if leaps or not run:
        items = -(-items // machine.columns)
    few = items < machine.few_items and size >= max(machine.large, items * machine.long)
    if not leaps and not few:
        return None
    for p in inward:
        p.stage = 0 if p in kept else 2 if leaps and p in run else 1
    if few:
        loops = _cut(loops, min(machine.parts // items, size // machine.part), machine.uneven)
    return loops if any(p.stage == 1 for p in loops) and any(p.stage == 2 for p in loops) else None


def _leaps(inward: list[_Loop], kept: list[_Loop], run: list[_Loop], machine: Machine) -> bool:
    """Whether few of the elements that are added up follow each other in memory, and others lie beyond what stays."""
    short = bool(run) and bool(kept) and math.prod(p.size for p in run) < machine.short_run
    return short and any(p.stride > kept[0].stride and p not in kept for p in inward)


def _is_narrow(x: Value) -> bool:
    """Whether what is kept in between would be rounded."""
    return bool(x.dtype.is_float and x.dtype.bits < 32)


def _neutral(op: str, dtype: DType) -> np.generic:
    """What changes no result of a reduction."""
    number: float
    if op in ("reduce_sum", "reduce_prod"):
        number = 1 if op == "reduce_prod" else -0.0  # -0.0 + x is x, whatever the x
    elif dtype.is_float:
        number = -np.inf if op == "reduce_max" else np.inf
    elif dtype is dtypes.boolean:
        number = int(op == "reduce_min")
    else:
        limits = np.iinfo(dtype.numpy)
        number = limits.min if op == "reduce_max" else limits.max
    found: np.generic = dtype.numpy.type(number)
    return found


def _innermost(inward: list[_Loop], kept: list[_Loop]) -> list[_Loop]:
    """The reduced loops inside all that stay."""
    return [p for p in inward if p not in kept and (not kept or p.stride < kept[0].stride)]


def _cut(loops: list[_Loop], parts: int, uneven: bool) -> list[_Loop]:
    """Takes whole loops of the first stage, or a part of one, into the second until there are enough parts. They may be
    `uneven`: then the last one is filled up.
    """
    for p in sorted((p for p in loops if p.stage == 1), key=lambda p: -p.stride):
        if parts < 2:
            break
        extent = p.extent
        if not isinstance(extent, int):
            others = any(q.stage == 1 for q in loops if q is not p)
            count = _factor(extent, parts) or (extent if others else 1)
            at, inner = loops.index(p), floordiv(extent, count)
            outer = replace(p, extent=count, stride=p.stride * guessed_size((inner,)), stage=2)
            if count != 1:
                loops[at : at + 1] = [outer, *([] if inner == 1 else [replace(p, extent=inner)])]
                parts //= outer.size
            continue
        if extent <= parts:
            p.stage, parts = 2, parts // extent
            continue
        count = max(c for c in range(1, parts + 1) if extent % c == 0)
        if uneven and 2 * count <= parts:
            count = -(-extent // -(-extent // parts))
        if 2 * count > parts:
            inner = -(-extent // count)
            at = loops.index(p)
            outer = _Loop(p.symbol, count, p.axis, p.stays, p.stride * inner, 2, inner * count - extent)
            loops = [*loops[:at], outer, replace(p, extent=inner), *loops[at + 1 :]]
            break
    return loops


def _factor(extent: Expr, most: int) -> Dim | None:
    """A number of parts that an open extent falls into at any size; None where it is no product."""
    if len(extent.terms) != 1:
        return None
    (((atom, *others), coefficient),) = extent.terms
    count = max(c for c in range(1, most + 1) if coefficient % c == 0)
    if 4 * count > most:
        return count
    if others:
        return of(atom)
    return count if count > 1 else None


def _loops(node: Node, layout: Layout, machine: Machine) -> list[_Loop] | None:
    """The loops that the operand's largest source is walked by, with their strides in memory."""
    (x,) = node.operands
    axes = node.attrs["axes"]
    own = [fresh("i", d) for d in x.shape]
    at = tuple(0 if d == 1 else v for v, d in zip(own, x.shape, strict=True))
    loops = [
        _Loop(next(iter(symbols(v))), d, axis, axis not in axes)
        for axis, (v, d) in enumerate(zip(own, x.shape, strict=True))
        if d != 1
    ]
    source = _source(x, at, machine)
    if source is None:
        return None
    address = layout.address(*source)
    for _ in range(8):
        found = next(((s, n) for s, n in divided_loops(address)), None)
        if found is None:
            break
        k = next((k for k, p in enumerate(loops) if p.symbol == found[0]), None)
        by = found[1]
        count = floordiv(loops[k].extent, by) if k is not None else 0
        if k is None or not always_equal(count * by, loops[k].extent):
            return None
        outer, inner = fresh("i", count), fresh("i", by)
        address = substitute(address, {found[0]: outer * by + inner})
        parts = ((outer, count), (inner, by))
        loops[k : k + 1] = [_Loop(next(iter(symbols(v))), d, loops[k].axis, loops[k].stays) for v, d in parts]
    for p in loops:
        stride = coefficient(address, p.symbol)
        if stride is None or (isinstance(stride, int) and stride <= 0) or not is_nonnegative(stride):
            return None
        p.stride = guessed_size((stride,))
    return loops


def _source(x: Value, at: Index, machine: Machine) -> tuple[Value, Index] | None:
    """The largest value in memory that a value is computed from element by element, and where it is read; None where it
    is larger than them all.
    """
    best: tuple[Value, Index] | None = None
    joined: tuple[Value, Index] | None = None
    pending, seen = [(x, at)], 0
    while pending and seen < machine.depth:
        value, index = pending.pop()
        if _larger(x, value):
            continue
        seen += 1
        node = value.node
        if node is not None and node.op in VIEWS:
            shown = behind_view(node, index)
            pending += [shown] if shown is not None else []
        elif node is not None and lookup(node.op).kind is Kind.POINTWISE and node.operands:
            pending += [(v, broadcast(v, index)) for v in node.operands]
        elif machine.inline and node is not None and node.op == "concat":
            joined = joined or (value, index)
        elif constant_of(value) is None and (best is None or _larger(value, best[0])):
            best = value, index
    return best or joined


def _larger(a: Value, b: Value) -> bool:
    return guessed_size(a.shape) > guessed_size(b.shape)
