"""Steps of a GPU's program that run side by side: which need which, and what products without haste become."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from onnxc.codegen.triton.matmul_tiles import candidates
from onnxc.codegen.triton.product_tiles import Facts
from onnxc.ir import dtypes
from onnxc.ir.types import TensorType
from onnxc.planner.fusion import plan
from onnxc.planner.layout import Layout
from onnxc.planner.slack import slack
from onnxc.primitives.builder import Builder
from onnxc.runtime.cuda.needs import needs
from onnxc.runtime.cuda.program import Copy, Fill, Launch, Pointer, Span


def kernel(*spans: tuple[int, int, bool]) -> Launch:
    """A launch that touches bytes of one base."""
    return Launch(0, 0, (1, 1, 1), (), tuple(Span(0, *s) for s in spans))


def test_needs() -> None:
    steps = [
        kernel((0, 10, True)),
        kernel((0, 10, False), (10, 20, True)),
        kernel((0, 10, False), (20, 30, True)),
        kernel((10, 30, False), (0, 10, True)),  # writes to what 1 and 2 read
        kernel((5, 6, False)),
        kernel((40, 50, True)),
        kernel(),
    ]
    assert needs(steps) == [[], [0], [0], [2, 1], [3], [], []]


def test_copies_and_fills_are_steps_too() -> None:
    steps = [Fill(0, Pointer(1, 8), 8), Copy(0, Pointer(0, 0), Pointer(1, 12), 4), Fill(0, Pointer(1, 0), 8)]
    assert needs(steps) == [[], [0], []]


@pytest.mark.parametrize("seed", range(20))
def test_any_order_that_needs_allow_gives_the_same(seed: int) -> None:
    draw = random.Random(seed)

    def span() -> tuple[int, int, bool]:
        start = draw.randrange(24)
        return start, start + draw.randrange(1, 8), draw.random() < 0.4

    steps = [kernel(*(span() for _ in range(draw.randrange(4)))) for _ in range(40)]
    found = needs(steps)

    def run(order: list[int]) -> list[int]:
        memory = [0] * 32
        for k in order:
            read = [tuple(memory[s.start : s.end]) for s in steps[k].spans]
            for s in (s for s in steps[k].spans if s.written):
                memory[s.start : s.end] = [hash((k, *read, at)) for at in range(s.start, s.end)]
        return memory

    order: list[int] = []
    while len(order) < len(steps):
        ready = [k for k in range(len(steps)) if k not in order and all(j in order for j in found[k])]
        order.append(draw.choice(ready))
    assert run(order) == run(list(range(len(steps))))


def test_slack() -> None:
    b = Builder()
    x, w = (b.input(TensorType(dtypes.float32, (64, 64)), name) for name in ("x", "w"))
    aside = b.matmul(x, w)  # nothing but the end waits for it
    way = x
    for _ in range(5):
        way = b.matmul(way, w)
    made = plan(b.graph([b.matmul(aside, way)], ["y"]), Layout({}))
    (long,) = {s for s in slack(made) if s}
    assert long == 4 and slack(made).count(long) == 1


def test_products_without_haste_have_larger_tiles() -> None:
    facts = Facts(768, 3072, 4096, 1, dtypes.bfloat16, exact=False, described=True)
    alone, beside = candidates(facts)[0], candidates(replace(facts, beside=True))[0]
    assert beside.m * beside.n > alone.m * alone.n
