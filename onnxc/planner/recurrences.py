"""Finds loops of which one kernel does all steps: LSTM, GRU, RNN and what is like them, on GPUs.

The steps of such a loop multiply their states by constant matrices, and all else in them is element by element. A step
becomes stages: a product needs whole rows of what it multiplies, so what is computed for a product, rather than carried
into the step, ends a stage. All elements that one program computes for a stage lie at the same place of tensors of one
shape, that of the states.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxc.ir.expr import Dim, always_equal, ceildiv, exceeds, is_nonnegative
from onnxc.ir.graph import Graph, Node, Value
from onnxc.ir.types import same_shape
from onnxc.loops.terms import Load, walk
from onnxc.planner.layout import assign
from onnxc.planner.lower import Lowering
from onnxc.planner.recurrence import (
    LEAST_OPEN,
    MOST_OPEN,
    MOST_READ,
    MOST_TURNS,
    Product,
    Recurrence,
    Stage,
)
from onnxc.planner.section import Section
from onnxc.planner.templates import ENABLED, matmul_access, through_views
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import constant_of
from onnxc.primitives.movement import VIEWS

WORDS = ("float32", "float16", "bfloat16")  # element types that steps hand on
MOST_STAGES = 3
MOST_NODES = 128  # of a step: its terms are walked recursively, so they must not be deep
MOST_PLACES = 8  # at which elements of a value are needed for one of a state: an LSTM has four gates
MOST_SUMMED = 1024  # elements of a row of a product: a program holds all of them for its rows
ROWS = 16
POINTWISE = (Kind.POINTWISE, Kind.VIEW)


def recurrence(node: Node) -> Recurrence | str:
    """How one kernel does all steps of a loop, or why none does."""
    if node.op != "scan" or "going" in node.attrs:
        return "data decides when it ends"
    (region,) = node.regions
    states = region.inputs[: node.attrs["states"]]
    if not states or states[0].rank < 2:
        return "it has no states of rows"
    finder = _Finder(node, region, states)
    return finder.why or finder.found()


class _Finder:
    """The stages of a loop's step. `why`: what forbids them."""

    def __init__(self, node: Node, region: Graph, states: list[Value]) -> None:
        self.node, self.region, self.states = node, region, states
        self.layout = assign(region, ENABLED)
        self.outside = {v.id: x for v, x in zip(region.inputs, node.operands, strict=True)}
        self.changing = {v.id for v in region.inputs[: len(states) + node.attrs["scanned"]]}  # from step to step
        self.levels: dict[int, int] = {}  # the stage that a value is of; -1: it needs no product
        self.products: dict[int, Product] = {}
        self.handed: dict[int, Value] = {}
        self.ends = [region.outputs[k] for k in node.attrs["results"]]
        self.held = 0  # bytes of matrices
        self.read: Dim = 0  # of these, in a step
        self.why = self._read()

    def _read(self) -> str:
        shape = self.states[0].shape
        if len(self.region.nodes) > MOST_NODES:
            return "its step is large"
        for n in self.region.nodes:
            if n.op == "matmul":
                why = self._product(n)
            elif n.op in VIEWS or n.op in ("constant", "iota") or lookup(n.op).kind in POINTWISE:
                why = ""
                level = max((self._level(v) for v in n.operands), default=-1)
                self.levels |= {v.id: level for v in n.outputs}
            else:
                why = f"{n.op} is in its step"
            if why:
                return why
        if not self.products:
            return "there is no product in its step"
        for n in self.region.nodes:
            for v in n.operands if n.op != "matmul" else ():
                if -1 < self._level(v) < self._level(n.output):
                    self.handed[v.id] = v
        kept = [*self.states, *self.handed.values(), *self.ends]
        if any(not same_shape(v.shape, shape) or v.dtype.name not in WORDS for v in kept):
            return "what it hands on has several shapes, or is no float"
        if max(self.levels.values()) >= MOST_STAGES:
            return "its steps have too many products one after the other"
        return ""

    def _level(self, v: Value) -> int:
        return self.levels.get(v.id, -1)

    def _product(self, node: Node) -> str:
        if not same_shape(node.output.shape[:-1], self.states[0].shape[:-1]):
            return "a product in its step has other rows than its states"
        access = matmul_access(self.layout, node)
        if access is None:
            return "a product in its step reads through a view"
        if any(v.dtype is not node.output.dtype or v.dtype.name not in WORDS for v in node.operands):
            return "a product in its step is of several types, or of no floats"
        rows, columns = (through_views(self.layout, v, (0,) * v.rank)[0] for v in node.operands)
        constant = None if columns.id in self.changing else _constant(self.outside.get(columns.id, columns))
        if constant is None:
            return "a product in its step is by no constant"
        if not isinstance(access.sizes[2], int) or not 0 < access.sizes[2] <= MOST_SUMMED:
            return "a product in its step has long sums"
        blocks, nbytes = ceildiv(access.sizes[0], ROWS), constant.size * node.output.dtype.itemsize
        self.held += nbytes
        self.read = self.read + blocks * nbytes
        if isinstance(self.read, int) and self.read > MOST_READ:
            return "its matrices are large, and its rows are many"
        level = self._level(rows)
        if rows.node is not None and constant_of(rows) is None:
            self.levels[rows.id] = level = max(level, 0)
            self.handed[rows.id] = rows
            level += 1
        self.levels[node.output.id] = max(level, 0)
        self.products[node.output.id] = Product(node, access, constant)
        return ""

    # ------------------------------------------------------------ stages

    def found(self) -> Recurrence | str:
        """The stages."""
        ends = list({v.id: v for v in (*self.handed.values(), *self.ends)}.values())
        stages: list[Stage] = []
        for level in range(1 + max(self.levels.values())):
            roots = [v for v in ends if max(0, self._level(v)) == level]
            if not roots:
                return "a stage of its step makes nothing"
            stage = self._stage(level, roots)
            if stage is None:
                return "elements of a step need many others"
            stages.append(stage)
        why = next((w for s in stages if (w := self._misplaced(s))), "")
        if why:
            return why
        sizes = [(tuple(d for _, d in p.access.batch), p.access.sizes[0]) for s in stages for p in s.products]
        if not sizes:
            return "there is no product in its step that is needed"
        if not all(isinstance(d, int) for d in (self.states[0].shape[-1], *sizes[0][0])):
            return "how many columns or matrices there are is known only when it runs"
        first, m = sizes[0]
        if any(not same_shape(b, first) or not always_equal(n, m) for b, n in sizes):
            return "its products have their rows in different orders"
        return Recurrence(
            self.layout, stages, list(self.handed.values()), self.outside, *self._stepwise()
        )  # fmt: skip

    def _stepwise(self) -> tuple[Dim, int | None]:
        """Whether there are so many rows that each step has kernels of its own; if not, how many there are at most."""
        if self.held <= LEAST_OPEN or isinstance(self.read, int):
            return 0, None
        most = MOST_OPEN[self.states[0].dtype.name]
        endless = exceeds(self.node.attrs["trip"], MOST_TURNS)
        return exceeds(self.read, most) * (1 - endless), most // self.held * ROWS if endless == 0 else None

    def _stage(self, level: int, roots: list[Value]) -> Stage | None:
        section = Section.over(roots[0], self.layout.order_of(roots[0]))
        for root in roots[1:]:
            section.demand(root, section.index)
            section.stores[root.id] = section.index

        def is_here(v: Value) -> bool:
            return self._level(v) in (-1, level)

        for node in reversed(self.region.nodes):
            v = node.output
            if node.op != "constant" and v.id in section.demands and is_here(v) and v.id not in self.products:
                if len(section.demands[v.id]) > MOST_PLACES:
                    return None
                section.add(node)
        products = [p for p in self.products.values() if p.node.output.id in section.demands and is_here(p.node.output)]
        terms = [store.term for store in Lowering(section, self.layout).nest(None).stores()]
        loads = list(dict.fromkeys(t for term in terms for t in walk(term) if isinstance(t, Load)))
        return Stage(section, roots, products, loads)

    def _misplaced(self, stage: Stage) -> str:
        """Whether an element is made of others than those at its own place of what is handed on, and at its row of
        products.
        """
        section = stage.section
        own = {v.id for v in (*self.states, *self.handed.values())}
        widths = {p.node.output.id: p.node.output.shape[-1] for p in stage.products}
        width = self.states[0].shape[-1]
        for load in stage.loads:
            known = load.value.id in own or load.value.id in widths
            off = load.index[0] - self.layout.address(load.value, section.index) if known else 0
            if load.value.id in own and off != 0:
                return "elements of what it hands on meet elsewhere"
            if load.value.id in widths and not (isinstance(off, int) and off >= 0):
                return "columns of a product meet elsewhere"
            if load.value.id in widths and not is_nonnegative(widths[load.value.id] - width - off):
                return "columns of a product meet elsewhere"
            inside = load.value.node is not None and constant_of(load.value) is None
            if inside and not known:
                return "a stage needs what another one keeps to itself"
        return ""


def _constant(value: Value) -> np.ndarray[Any, Any] | None:
    """The numbers of a constant, or of a view of one."""
    node = value.node
    if node is None or node.op not in VIEWS:
        return constant_of(value)
    below, evaluate = _constant(node.operands[0]), lookup(node.op).evaluate
    return None if below is None or evaluate is None else np.asarray(evaluate(below, **node.attrs))
