"""Random graphs of primitives: compiled with and without fusion, with dynamic and fixed sizes, against numpy.

``HYPOTHESIS_PROFILE=thorough`` looks longer. What hypothesis finds it also shrinks; the seeds below are
a fixed set
that shares compiler runs, and so covers more graphs in the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxc.ir.expr import evaluate
from onnxc.planner.groups import FusionOptions
from onnxc.primitives.interpret import interpret
from onnxc.runtime.cpu import Level, level
from tests.compile_harness import UNFUSED, Compiled, compare, compile_graphs
from tests.random_graphs import Generator, RandomGraph, Seeded

pytestmark = pytest.mark.every_target

T = TypeVar("T")
SIZES = [{"s0": 3, "s1": 5}, {"s0": 1, "s1": 1}, {"s0": 0, "s1": 2}, {"s0": 17, "s1": 4}, {"s0": 2, "s1": 33}]
BATCH = 20
EXAMPLES = settings().max_examples


class Drawn:
    """Decisions that hypothesis makes, and shrinks."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def choice(self, options: Sequence[T]) -> T:
        return options[self._data.draw(st.integers(0, len(options) - 1))]

    def integer(self, lo: int, hi: int) -> int:
        return self._data.draw(st.integers(lo, hi))


def run(made: RandomGraph, program: Compiled, sizes: dict[str, int], seed: int) -> None:
    """Compares one program with the interpreter; sizes at which the graph means nothing are passed over."""
    if any(evaluate(extent, sizes) == 0 for extent in made.extents.values()):
        return  # no index is right
    arrays = made.arrays(sizes, seed)
    try:
        expected = interpret(program.graph, arrays)
    except (IndexError, ValueError):  # an index into an axis of size 0
        return
    for actual, wanted, item in zip(program(*arrays), expected, made.outputs, strict=True):
        atol = 0.0 if item.exact else 1e-5 * max(1.0, item.bound)
        compare(actual, wanted, 1e-4, atol, f"{item.value.type} at {sizes}")


def run_batch(seeds: Sequence[int], dynamic: bool, options: FusionOptions | None, cpu: Level) -> None:
    """Graphs of these seeds, in one library."""
    made = [Generator(Seeded(s), dynamic).run(4 + s % 12) for s in seeds]
    for seed, graph, program in zip(seeds, made, compile_graphs([m.graph for m in made], options, cpu), strict=True):
        for sizes in SIZES if dynamic else SIZES[:1]:
            run(graph, program, sizes, seed)


@settings(max_examples=max(4, EXAMPLES // 10))
@given(st.data(), st.booleans(), st.integers(0, 2**16))
def test_fused_and_unfused_agree_with_numpy(data: st.DataObject, dynamic: bool, seed: int) -> None:
    made = Generator(Drawn(data), dynamic).run(data.draw(st.integers(1, 14)))
    for options in (None, UNFUSED):
        (program,) = compile_graphs([made.graph], options)
        for sizes in SIZES if dynamic else SIZES[:1]:
            run(made, program, sizes, seed)


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("options", [None, UNFUSED], ids=["fused", "unfused"])
def test_fixed_seeds(dynamic: bool, options: FusionOptions | None) -> None:
    for first in range(0, max(BATCH, EXAMPLES), BATCH):
        run_batch(range(first, first + BATCH), dynamic, options, level())


@pytest.mark.cpu_only("vectors of another CPU")
@pytest.mark.parametrize("name", ["x86-64-v2", "x86-64-v3"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
def test_fewer_lanes(dynamic: bool, name: str) -> None:
    native = level()
    if native.machine != "x86_64" or not level(name).features <= native.features:
        pytest.skip(f"this machine does not run {name} programs")
    run_batch(range(500, 500 + BATCH), dynamic, None, level(name))
    run_batch([50141], dynamic, None, level(name))  # lanes of a tile, read one by one under a guard


def test_a_graph_is_the_same_for_the_same_seed() -> None:
    first, second = (Generator(Seeded(7)).run(10) for _ in range(2))
    assert [n.op for n in first.graph.nodes] == [n.op for n in second.graph.nodes]
    for a, b in zip(first.arrays({}, 1), second.arrays({}, 1), strict=True):
        np.testing.assert_array_equal(a, b)
