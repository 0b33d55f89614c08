"""Gradients of random graphs: compiled, in numpy, and in onnxruntime from the exported model."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from onnxc.export import to_onnx
from onnxc.ir.expr import evaluate
from onnxc.ir.graph import Graph
from onnxc.primitives.interpret import interpret
from tests.compile_harness import compare, compile_graphs
from tests.gradient_harness import Array, with_gradient
from tests.random_graphs import Generator, Item, RandomGraph, Seeded

SIZES = [{"s0": 3, "s1": 5}, {"s0": 1, "s1": 1}, {"s0": 17, "s1": 4}]
BATCH = 30
DECIDING = {"max", "min", "abs", "sign", "reduce_max", "reduce_min", "window_max", "reduce_prod"}


class Smooth(Generator):
    """Graphs in which nothing is decided by a value that may differ in its last digits: a tie that is none in another
    order of computing has another gradient.
    """

    def _small(self, item: Item) -> bool:
        node = item.value.node
        return super()._small(item) and (item.exact or node is None or node.op not in DECIDING)


def derived(seed: int, dynamic: bool) -> tuple[RandomGraph, Graph] | None:
    """A random graph and its gradient by all float inputs; None where it has no float outputs or inputs."""
    made = Smooth(Seeded(seed), dynamic).run(5 + seed % 10)
    graph = made.graph
    wrt = [k for k, v in enumerate(graph.inputs) if v.dtype.is_float]
    if not wrt or not any(v.dtype.is_float for v in graph.outputs):
        return None
    return made, with_gradient(graph, wrt)


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


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
def test_compiled_gradients(dynamic: bool) -> None:
    found = [d for seed in range(BATCH) if (d := derived(seed, dynamic)) is not None]
    compared = 0
    for seed, ((made, graph), program) in enumerate(zip(found, compile_graphs([g for _, g in found]), strict=True)):
        for sizes in SIZES if dynamic else SIZES[:1]:
            arrays = arrays_for(made, graph, sizes, seed)
            if arrays is None:
                continue
            try:
                wanted = interpret(graph, arrays)
            except (IndexError, ValueError):  # an index into an axis of size 0
                continue
            if not all(np.isfinite(a).all() for a in wanted):
                continue
            for k, (a, b, c) in enumerate(
                zip(program(*arrays), wanted, in_onnxruntime(graph, arrays), strict=True)
            ):  # fmt: skip
                atol = 1e-5 * max(1.0, float(np.abs(b).max(initial=0)))
                compare(a, b, 1e-3, atol, f"graph {seed}, gradient {k}, compiled, {sizes}")
                compare(c, b, 1e-3, atol, f"graph {seed}, gradient {k}, onnxruntime, {sizes}")
                compared += 1
    assert compared > BATCH
