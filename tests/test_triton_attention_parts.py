"""Attention of few queries over many keys on GPUs: parts of the keys, joined by a second kernel."""

from __future__ import annotations

import numpy as np
import pytest

from onnxc.codegen.triton.attention_tiles import Facts, candidates, parts_of
from tests.targets import needs_triton
from tests.test_triton_attention import INF, Case, band, normal, rng
from tests.triton_simulator import Answer, Request, Simulator, program_of


def parts(answer: Answer) -> int:
    """How many programs had keys of a head."""
    (text,) = [t for t in answer.source.split("\nk") if "tl.dot" in t]
    return int(text.split("part = pid % ")[1].split("\n")[0])


def grouped(queries: int, keys: int, heads: int = 2, shared: int = 1, depth: int = 16, dtype: str = "float16") -> Case:
    q = normal(1, heads * shared, queries, depth, dtype=dtype)
    return Case(q, *(normal(1, heads, keys, depth, dtype=dtype) for _ in range(2)))


@needs_triton
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("queries", "keys", "shared", "depth"), [(1, 1537, 1, 64), (1, 1024, 4, 16), (3, 1111, 3, 24), (16, 900, 1, 16)]
)
def test_sizes(simulator: Simulator, queries: int, keys: int, shared: int, depth: int, dtype: str) -> None:
    answer = grouped(queries, keys, 2, shared, depth, dtype).agrees(simulator)
    assert parts(answer) > 3


@needs_triton
def test_wide_indices_and_every_tile(simulator: Simulator) -> None:
    case = grouped(2, 700, 2, 2)
    assert parts(case.agrees(simulator, wide=True)) > 1
    for number in range(1, len(candidates(Facts(4, 700, 2, 16, 16)))):
        assert parts(case.agrees(simulator, candidate=number)) > 1


@needs_triton
@pytest.mark.parametrize("keys", [1, 5, 64, 1000])
def test_sizes_known_at_run_time(simulator: Simulator, keys: int) -> None:
    """Most parts have no keys where there are few."""
    case = grouped(1, keys)
    model = case.model(dynamic=True)
    model.graph.input[0].type.tensor_type.shape.dim[2].Clear()
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_value = 1
    answer = simulator.run(model.SerializeToString(), case.arrays)
    assert parts(answer) > 32
    np.testing.assert_allclose(answer.outputs[0], case.wanted(), 4e-3, 4e-3)


@needs_triton
@pytest.mark.parametrize(("lower", "upper"), [(None, 600), (400, 1200), (None, -1), (1300, None)])
@pytest.mark.parametrize("constant", [True, False])
def test_masks(simulator: Simulator, lower: int | None, upper: int | None, constant: bool) -> None:
    """Of rows that see no key at all, too."""
    mask = band(5, 1400, lower, upper, -INF)
    grouped(5, 1400, 2, 2).masked(mask, constant).agrees(simulator)


@needs_triton
@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("fill", [-INF, -65504.0])
def test_filled_scores(simulator: Simulator, guard: bool, fill: float) -> None:
    case = grouped(4, 1400)
    case.guard = guard
    hidden = rng.random((4, 1400)) < 0.5
    hidden[1] = True
    hidden[2, :900] = True
    case.filled(hidden, fill, constant=False).agrees(simulator)


@needs_triton
def test_what_is_no_number_stays_so(simulator: Simulator) -> None:
    case = grouped(2, 1400)
    case.arrays[1][0, 0, 700, 3] = np.nan
    case.arrays[2][0, 1, 1300, 5] = np.inf
    case.agrees(simulator)


@needs_triton
def test_the_join_is_in_the_report_as_one_call() -> None:
    _, program = program_of(Request(grouped(1, 4096).model().SerializeToString(), []))
    assert len(program.calls) == 1 and len(program.steps) == 2
    assert [str(b.value.t) for b in program.buffers] == ["float32[2, 32, 1, 16]", "float32[2, 32, 1, 2]"]
    assert program.arena_bytes >= 4 * 2 * 32 * 18


def test_how_many_parts() -> None:
    """As many as keep all multiprocessors at work; none where a second kernel would cost more."""

    def chosen(queries: int | None, keys: int | None, heads: int) -> int:
        return parts_of(Facts(queries, keys, heads, 128, 16), heads)

    assert [chosen(1, 16384, heads) for heads in (2, 8, 32, 1000)] == [64, 16, 4, 1]
    assert chosen(1, None, 8) == chosen(1, 8192, 8)
    assert chosen(1, 256, 8) == chosen(17, 16384, 1) == chosen(None, None, 1) == 1
