"""Gradients of random graphs: compiled, in numpy, and in onnxruntime from the exported model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxc.export import to_onnx
from onnxc.ir.dtypes import float32, int64
from onnxc.ir.expr import evaluate
from onnxc.ir.graph import Graph
from onnxc.primitives.interpret import interpret
from tests.compile_harness import compare, compile_graphs
from tests.gradient_harness import Array, with_gradient
from tests.random_graphs import Generator, Item, RandomGraph, Seeded
from tests.test_random_graphs import Drawn

SIZES = [{"s0": 3, "s1": 5}, {"s0": 1, "s1": 1}, {"s0": 17, "s1": 4}, {"s0": 0, "s1": 2}]
BATCH = 30
DECIDING = {"max", "min", "abs", "sign", "reduce_max", "reduce_min", "window_max", "reduce_prod"}


class Smooth(Generator):
    """Graphs in which nothing is decided by a value that may differ in its last digits: a tie that is none in another
    order of computing has another gradient. They have steps that gradients are more often wrong for.
    """

    def steps(self) -> Sequence[Callable[[Smooth], Item | None]]:
        return [*super().steps(), Smooth.shared, Smooth.tied, Smooth.running, Smooth.scattered, Smooth.convolved]

    def _small(self, item: Item) -> bool:
        node = item.value.node
        return super()._small(item) and (item.exact or node is None or node.op not in DECIDING)

    def real(self, rank: int = 0) -> Item | None:
        """A float of this rank at least."""
        return self.pick(lambda i: i.value.dtype.is_float and i.value.rank >= rank and i.bound < 100)

    def shared(self) -> Item | None:
        """Both operands of a node are one value, as it is and seen another way."""
        x = self.real()
        if x is None:
            return None
        y = self.b.flip(x.value, self.axes(x)) if x.value.rank and self.r.integer(0, 1) else x.value
        op = self.r.choice(["add", "sub", "mul"])
        bound = x.bound * x.bound if op == "mul" else 2 * x.bound
        return Item(self.b.binary(op, x.value, y), x.exact, bound)

    def tied(self) -> Item | None:
        """Equal operands of an extreme, of one value or of two."""
        x = self.real()
        if x is None or not x.exact:
            return None
        y = self.b.one("copy", x.value) if self.r.integer(0, 1) else x.value
        return Item(self.b.binary(self.r.choice(["max", "min"]), x.value, y), True, x.bound)

    def running(self) -> Item | None:
        x = self.real(1)
        if x is None:
            return None
        exclusive, reverse = bool(self.r.integer(0, 1)), bool(self.r.integer(0, 1))
        found = self.b.one("cumsum", x.value, axis=self.axis(x), exclusive=exclusive, reverse=reverse)
        return Item(found, x.exact, 40 * x.bound)

    def scattered(self) -> Item | None:
        """Rows that are added to, some of them more than once."""
        x = self.real(1)
        if x is None or x.value.shape[0] == 0:
            return None
        count = self.r.integer(1, 4)
        index = self.b.cast(self.index([count, 1], x.value.shape[0]), int64)
        y = self.fresh(x.value.dtype, [count, *x.value.shape[1:]])
        found = self.b.one("scatter_nd", x.value, index, y.value, reduction="add")
        return Item(found, x.exact, x.bound + 4 * y.bound)

    def convolved(self) -> Item | None:
        x = self.real(3)
        if x is None or x.value.dtype is not float32:  # onnxruntime has none of others
            return None
        if x.value.rank != 3 or not all(isinstance(d, int) and d > 0 for d in x.value.shape):
            return None
        taps = self.r.integer(1, 2)
        low, stride = self.r.integer(0, 1), self.r.integer(1, 2)
        _, channels, length = x.value.shape
        if evaluate(length, {}) + low < taps:
            return None
        w = self.fresh(x.value.dtype, [self.r.integer(1, 3), channels, taps])
        attrs = {"strides": (stride,), "dilations": (1,), "low": (low,), "high": (0,), "groups": 1}
        return Item(self.b.one("conv", x.value, w.value, **attrs), x.exact, 80 * x.bound)


def derived(seed: int, dynamic: bool, order: int = 1) -> tuple[RandomGraph, Graph] | None:
    """A random graph and its gradient by all float inputs, of which the gradient is taken again for the second order;
    None where it has no float outputs or inputs.
    """
    return _derived(Smooth(Seeded(seed), dynamic).run(5 + seed % 10), order)


def _derived(made: RandomGraph, order: int) -> tuple[RandomGraph, Graph] | None:
    graph = made.graph
    wrt = [k for k, v in enumerate(graph.inputs) if v.dtype.is_float]
    if not wrt or not any(v.dtype.is_float for v in graph.outputs):
        return None
    for _ in range(order):
        graph = with_gradient(graph, wrt)
    return made, graph


def arrays_for(made: RandomGraph, graph: Graph, sizes: dict[str, int], seed: int) -> list[Array] | None:
    """Inputs and cotangents; None for sizes at which the graph means nothing."""
    if any(evaluate(extent, sizes) == 0 for extent in made.extents.values()):
        return None
    rng = np.random.default_rng(seed)
    given = made.arrays(sizes, seed)
    for v in graph.inputs[len(given) :]:
        given.append(rng.integers(-2, 3, [evaluate(d, sizes) for d in v.shape]).astype(v.dtype.numpy))
    return given


def in_onnxruntime(graph: Graph, arrays: list[Array]) -> list[Array]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort.InferenceSession(to_onnx(graph).SerializeToString(), options)
    read = {i.name for i in session.get_inputs()}
    named = {v.name: a for v, a in zip(graph.inputs, arrays, strict=True) if v.name in read}
    return [np.asarray(y) for y in session.run(None, named)]


def answers(
    made: RandomGraph, graph: Graph, sizes: dict[str, int], seed: int
) -> tuple[list[Array], list[Array], list[Array]] | None:
    """Inputs, and the answers of numpy and of onnxruntime; None where there are none to compare."""
    arrays = arrays_for(made, graph, sizes, seed)
    if arrays is None:
        return None
    try:
        wanted = interpret(graph, arrays)
    except (IndexError, ValueError):  # an index into an axis of size 0
        return None
    if not all(np.isfinite(a).all() for a in wanted):
        return None
    return arrays, wanted, in_onnxruntime(graph, arrays)


def near(found: Array, wanted: Array, what: str) -> None:
    compare(found, wanted, 1e-3, 1e-5 * max(1.0, float(np.abs(wanted).max(initial=0))), what)


@pytest.mark.parametrize(("order", "dynamic"), [(1, False), (1, True), (2, True)])
def test_compiled_gradients(order: int, dynamic: bool) -> None:
    found = [d for seed in range(BATCH // order) if (d := derived(seed, dynamic, order)) is not None]
    compared = 0
    for seed, ((made, graph), program) in enumerate(zip(found, compile_graphs([g for _, g in found]), strict=True)):
        for sizes in SIZES if dynamic else SIZES[:1]:
            known = answers(made, graph, sizes, seed)
            if known is None:
                continue
            arrays, *others = known
            for k, (a, b, c) in enumerate(zip(program(*arrays), *others, strict=True)):
                near(a, b, f"graph {seed}, gradient {k}, compiled, {sizes}")
                near(c, b, f"graph {seed}, gradient {k}, onnxruntime, {sizes}")
                compared += 1
    assert compared > BATCH // order


@settings(max_examples=max(10, settings().max_examples))
@given(st.data(), st.booleans(), st.integers(1, 2), st.integers(0, 2**16))
def test_exported_gradients(data: st.DataObject, dynamic: bool, order: int, seed: int) -> None:
    """In numpy and in onnxruntime; what differs is shrunk."""
    found = _derived(Smooth(Drawn(data), dynamic).run(data.draw(st.integers(1, 10))), order)
    if found is None:
        return
    for sizes in SIZES if dynamic else SIZES[:1]:
        known = answers(*found, sizes, seed)
        if known is not None:
            for k, (b, c) in enumerate(zip(*known[1:], strict=True)):
                near(c, b, f"gradient {k}, {sizes}")
