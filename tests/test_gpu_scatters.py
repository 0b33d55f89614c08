"""Scatters that sort their updates by places, in Triton's interpreter: the same bits as adding one after the other, and
parts of those of a place that has many.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from onnxc.codegen.triton.scatter_sorted import PART
from onnxc.gpu import launches
from tests.targets import needs_triton
from tests.test_triton_kernels import f32, ints, parsed
from tests.triton_simulator import Answer, Request, Simulator, program_of

Array = np.ndarray[Any, Any]

pytestmark = needs_triton
SMALL = {"SORTED": 64}
JOINS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
NAMES = {
    "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float": np.float32, "double": np.float64,
    "int8": np.int8, "int32": np.int32, "int64": np.int64,
}  # fmt: skip


def in_order(
    op: str, x: Array, index: Array, updates: Array, axis: int = 0, reduction: str = "add", part: int = PART
) -> Array:
    """One update of a place after the other, but first so many of them with each other as there are parts."""
    y, join = x.copy(), JOINS[reduction]
    found: dict[tuple[int, ...], list[Any]] = {}
    for row in np.ndindex(*(index.shape[:-1] if op == "ScatterND" else index.shape)):
        to = tuple(index[row]) if op == "ScatterND" else (*row[:axis], index[row], *row[axis + 1 :])
        found.setdefault(tuple(int(i) % n for i, n in zip(to, y.shape, strict=False)), []).append(updates[row])
    for at, each in found.items():
        whole = len(each) // part * part
        parts = [functools.reduce(join, each[k : k + part]) for k in range(0, whole, part)]
        y[at] = functools.reduce(join, [*parts, *each[whole:]], y[at])
    return y


def sized(shape: tuple[int, ...], name: str, is_open: bool) -> str:
    return ",".join(f"{name}{k}" if is_open else str(n) for k, n in enumerate(shape))


def text_of(
    op: str, x: Array, index: Array, updates: Array, axis: int = 0, reduction: str = "add", is_open: bool = False
) -> str:
    """A model that scatters; `is_open`: its sizes are not known."""
    kind = next(name for name, dtype in NAMES.items() if np.dtype(dtype) == x.dtype)
    along = f"axis = {axis}, " if op == "ScatterElements" else ""
    shape, many, rest = (sized(v.shape, n, is_open) for v, n in ((x, "n"), (index, "m"), (updates, "u")))
    if op == "ScatterND":
        many = ",".join([*many.split(",")[:-1], str(index.shape[-1])])
    head = f"g ({kind}[{shape}] x, int64[{many}] i, {kind}[{rest}] u) => ({kind}[{shape}] y)"
    return f'{head} {{ y = {op}<{along}reduction = "{reduction}">(x, i, u) }}'


def run(simulator: Simulator, text: str, *inputs: Array, **options: Any) -> Answer:
    answer = simulator.run(parsed(text).SerializeToString(), list(inputs), **{"limits": SMALL, **options})
    assert answer.error[0] == 0
    return answer


def adds_in_order(simulator: Simulator, op: str, x: Array, index: Array, updates: Array, **how: Any) -> None:
    """Bit by bit."""
    options = {k: how.pop(k) for k in ("wide", "limits") if k in how}
    sizes = how.pop("sizes", (False,))  # whether they are open
    with np.errstate(all="ignore"):
        part = options.get("limits", {}).get("PART", PART)
        wanted = in_order(op, x, index, updates, how.get("axis", 0), how.get("reduction", "add"), part)
    for is_open in sizes:
        text = text_of(op, x, index, updates, **how, is_open=is_open)
        answer = run(simulator, text, x, index, updates, **options)
        assert "tl.cumsum(here" in answer.source  # updates were sorted
        (found,) = answer.outputs
        assert found.dtype == wanted.dtype
        assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(("places", "count"), [(1, 65), (50, 513), (200, 1030)])
def test_rows(simulator: Simulator, places: int, count: int) -> None:
    """Of one digit and of several, of blocks that are full or not; negative positions count from the end."""
    index = ints(-places, places, count, 1)
    for width in (1, 5, 130) if places < 2 else (3,):
        x, updates = f32(places, width), f32(count, width)
        adds_in_order(simulator, "ScatterND", x, index, updates)


def test_open_sizes(simulator: Simulator) -> None:
    """Also where a place has a number of more than one pair of digits."""
    for places, count in ((9, 70), (1100, 600)):
        x, updates = f32(places, 3), f32(count, 3)
        adds_in_order(simulator, "ScatterND", x, ints(-places, places, count, 1), updates, sizes=(True,))


@pytest.mark.parametrize(("places", "count"), [(40, 0), (0, 0)])
def test_no_updates(simulator: Simulator, places: int, count: int) -> None:
    x, index, updates = f32(places, 3), ints(0, 1, count, 1), f32(count, 3)
    for is_open in (False, True):
        answer = run(simulator, text_of("ScatterND", x, index, updates, is_open=is_open), x, index, updates)
        assert answer.outputs[0].tobytes() == x.tobytes()


@pytest.mark.parametrize("is_hot", [True, False])
def test_one_place_takes_all(simulator: Simulator, is_hot: bool) -> None:
    """Or each takes one."""
    index = np.full((300, 1), -2) if is_hot else np.random.default_rng(1).permutation(300)[:, None]
    adds_in_order(simulator, "ScatterND", f32(300, 3), index, f32(300, 3))


PLACES = {
    "one place with all": np.full(150, 4),
    "one with most": np.where(np.arange(150) % 3 == 0, np.arange(150) % 9, 4),
    "several with many": np.arange(150) // 40,
    "the first and the last": np.where(np.arange(150) < 70, 8, 0),
    "whole parts": np.repeat([7, 2, 5], [64, 32, 16]),
    "parts less one, and one more": np.repeat([7, 2, 5, 0, 1], [15, 17, 33, 1, 15]),
}  # fmt: skip
SHORT = {**SMALL, "PART": 16}


@pytest.mark.parametrize("name", PLACES)
def test_places_with_many_updates(simulator: Simulator, name: str) -> None:
    """Parts of these are joined first, wherever those of a place begin among all."""
    index = PLACES[name]
    index = np.random.default_rng(3).permutation(index)
    x, updates = f32(9, 3), f32(len(index), 3)
    adds_in_order(simulator, "ScatterND", x, index[:, None], updates, limits=SHORT)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "double", "int8"])
def test_parts_of_other_dtypes(simulator: Simulator, kind: str) -> None:
    index, updates = np.repeat([3, 0, 8], [50, 20, 5]), (f32(75) * 2).astype(NAMES[kind])
    x = f32(9).astype(NAMES[kind])
    adds_in_order(simulator, "ScatterElements", x, index, updates, limits=SHORT)


@pytest.mark.parametrize("reduction", ["mul", "max", "min"])
def test_parts_of_other_reductions(simulator: Simulator, reduction: str) -> None:
    index, x, updates = np.repeat([3, 0, 8], [50, 20, 5])[:, None], f32(9, 140), f32(75, 140)
    updates[7, 3] = np.nan
    adds_in_order(simulator, "ScatterND", x, index, updates, reduction=reduction, limits=SHORT, wide=True)


def test_a_place_depends_on_its_own_updates(simulator: Simulator) -> None:
    """Not on how many others have: its bits are the same whatever they do."""
    x, updates, found = f32(9, 3), f32(60, 3), set()
    for before in (9, 40, 47):
        index = np.concatenate([np.zeros(before, int), np.full(60, 4)])[:, None]
        more = np.concatenate([f32(before, 3), updates])
        text = text_of("ScatterND", x, index, more)
        found.add(run(simulator, text, x, index, more, limits=SHORT).outputs[0][4].tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "double", "int8"])
def test_dtypes(simulator: Simulator, kind: str) -> None:
    x, updates = (f32(9, 6) * 3).astype(NAMES[kind]), (f32(90, 6) * 3).astype(NAMES[kind])
    adds_in_order(simulator, "ScatterND", x, ints(-9, 9, 90, 1), updates)


@pytest.mark.parametrize("reduction", ["mul", "max", "min"])
def test_reductions(simulator: Simulator, reduction: str) -> None:
    x, updates = f32(9, 6), f32(90, 6)
    adds_in_order(simulator, "ScatterND", x, ints(-9, 9, 90, 1), updates, reduction=reduction)
    if reduction == "mul":
        x, updates = ints(-3, 3, 9, 6), ints(-3, 3, 90, 6)
        adds_in_order(simulator, "ScatterND", x, ints(-9, 9, 90, 1), updates, reduction=reduction)


def test_places_of_several_positions(simulator: Simulator) -> None:
    index = np.stack([ints(-5, 5, 40, 3), ints(-4, 4, 40, 3)], -1)
    adds_in_order(simulator, "ScatterND", f32(5, 4, 3), index, f32(40, 3, 3))
    adds_in_order(simulator, "ScatterND", f32(5, 4), index, f32(40, 3), wide=True)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_elements(simulator: Simulator, axis: int) -> None:
    """The index may have fewer lines than the data: what lies behind them stays."""
    shape, index_shape = [3, 4, 5], [2, 3, 4]
    index_shape[axis] = 70
    index, updates = ints(-shape[axis], shape[axis], *index_shape), f32(*index_shape)
    adds_in_order(simulator, "ScatterElements", f32(*shape), index, updates, axis=axis)


def test_elements_of_one_line(simulator: Simulator) -> None:
    adds_in_order(simulator, "ScatterElements", f32(1100), ints(-1100, 1100, 1100), f32(1100))


@pytest.mark.parametrize(("op", "wrong"), [("ScatterND", 5), ("ScatterND", -6), ("ScatterElements", 5)])
def test_wrong_index(simulator: Simulator, op: str, wrong: int) -> None:
    """It is reported, and joined with nothing."""
    x, updates, index = f32(5, 7), f32(70, 7), ints(0, 5, 70, 1 if op == "ScatterND" else 7)
    index[3, 0] = wrong
    text = text_of(op, x, index, updates)
    answer = simulator.run(parsed(text).SerializeToString(), [x, index, updates], limits=SMALL)
    assert answer.error[0] == 3 and answer.error[2] == wrong
    index[3, 0], without = 0, updates.copy()
    without[3, slice(None) if op == "ScatterND" else 0] = -0.0
    assert answer.outputs[0].tobytes() == in_order(op, x, index, without).tobytes()


def test_bits_are_those_of_places_with_programs_of_their_own(simulator: Simulator) -> None:
    """Which few updates of a place have, where their number is not the reason to sort them."""
    x, index, updates = f32(100, 6).astype(np.float16), ints(-100, 100, 200, 1), f32(200, 6).astype(np.float16)
    text = text_of("ScatterND", x, index, updates)
    sorted_, owned = (run(simulator, text, x, index, updates, limits=n) for n in (SMALL, {}))
    assert "tl.cumsum(here" in sorted_.source and "associative_scan" not in owned.source
    assert sorted_.outputs[0].tobytes() == owned.outputs[0].tobytes()


def test_no_more_kernels_than_digits() -> None:
    """Known places have as many passes as their number has digits; those that are not known leave out what they
    can when they run.
    """

    def steps(places: str) -> int:
        text = f"g (float[{places},4] x, int64[9000,1] i, float[9000,4] u) => (float[{places},4] y)"
        model = parsed(f'{text} {{ y = ScatterND<reduction = "add">(x, i, u) }}')
        return len(program_of(Request(model.SerializeToString(), []))[1].steps)

    assert [steps(n) for n in ("31", "32", "1023", "1024", "n")] == [7, 10, 10, 13, 28]


@pytest.mark.parametrize("places", ["1023", "n"])
def test_steps_say_what_they_write(places: str) -> None:
    """All of it: where steps run side by side, others wait for that."""
    text = f"g (float[{places},4] x, int64[9000,1] i, float[9000,4] u) => (float[{places},4] y)"
    model = parsed(f'{text} {{ y = ScatterND<reduction = "add">(x, i, u) }}')
    program = program_of(Request(model.SerializeToString(), []))[1]
    for step in launches(program.steps):
        stored = re.findall(r"tl\.store\(p(\d+)\b", program.kernels[program.functions[step.kernel].name])
        assert stored and {int(k) for k in stored} <= set(step.written)


@pytest.mark.parametrize("op", ["ScatterND", "ScatterElements"])
def test_the_run_chooses(simulator: Simulator, op: str) -> None:
    """Few updates are not sorted, where their number is not known: on both sides of the limit, and none at all."""
    for dtype, join in ((np.float32, "add"), (np.float16, "add"), (np.float32, "max")):
        for count in (0, 1, 63, 64, 65):
            x, index, updates = (v.astype(dtype) for v in (f32(9, 3), np.zeros(0), f32(count, 3)))
            index = ints(-9, 9, *((count, 1) if op == "ScatterND" else (count, 3)))
            text = text_of(op, x, index, updates, is_open=True, reduction=join)
            answer = run(simulator, text, x, index, updates)
            assert "tl.cumsum(here" in answer.source
            assert (answer.ran("tl.cumsum(here") > 0) == (count > 64)
            wanted = in_order(op, x, index, updates, reduction=join)
            tolerance = 1e-6 if count <= 64 and dtype == np.float32 and join == "add" else 0
            np.testing.assert_allclose(answer.outputs[0], wanted, tolerance, tolerance)


def layers(count: str, second: str = "i") -> str:
    """A graph network's: two scatters of as many updates, the second by another index or the same."""
    return f"""g (float[9,3] x, int64[{count},1] i, int64[{count},1] k,
        float[{count},3] u, float[{count},7] v, float[9,7] z) => (float[9,3] y, float[9,7] w) {{
            y = ScatterND<reduction = "add">(x, i, u)
            s = ReduceSum<keepdims = 1>(y)
            r = Add(v, s)
            w = ScatterND<reduction = "add">(z, {second}, r) }}"""


@pytest.mark.parametrize("count", ["80", "m"])
def test_scatters_by_one_index_share_its_sort(simulator: Simulator, count: str) -> None:
    inputs = [f32(9, 3), ints(-9, 9, 80, 1), ints(-9, 9, 80, 1), f32(80, 3), f32(80, 7), f32(9, 7)]
    sorts = []
    for second in "ik":
        text = layers(count, second)
        answer = run(simulator, text, *inputs)
        x, i, k, u, v, z = inputs
        y = in_order("ScatterND", x, i, u)
        np.testing.assert_array_equal(answer.outputs[0], y)
        wanted = in_order("ScatterND", z, i if second == "i" else k, v + y.sum())
        np.testing.assert_allclose(answer.outputs[1], wanted, 1e-5, 1e-5)
        sorts.append(answer.ran("tl.cumsum(here"))
    assert sorts == [1, 2]


@pytest.mark.parametrize(("kind", "slices"), [("float", (7,)), ("float16", (2, 5)), ("bfloat16", ()), ("bool", (3,))])
@pytest.mark.parametrize("wide", [False, True])
def test_rows_that_are_gathered(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch, kind: str, slices: tuple[int, ...], wide: bool
) -> None:
    """Where they are many and sorted, they are read where they lie: the same bits as with a kernel that gathers them,
    also where functions are between, and the index counts from the end.
    """
    lies, reduction = ",".join(map(str, slices)), "max" if kind == "bool" else "add"
    lead = f",{lies}" if lies else ""
    scale = "" if kind == "bool" else " p = Mul(g, s)"
    text = f"""g ({kind}[9{lead}] x, {kind}[11{lead}] h, int64[5,20] a, int64[5,20,1] i, {kind}[1] s)
        => ({kind}[9{lead}] y) {{ g = Gather<axis = 0>(h, a){scale}
        y = ScatterND<reduction = "{reduction}">(x, i, {"p" if scale else "g"}) }}"""
    dtype = np.dtype(bool) if kind == "bool" else np.dtype(NAMES[kind])
    x, h = (np.asarray(f32(n, *slices) > 0 if kind == "bool" else f32(n, *slices)).astype(dtype) for n in (9, 11))
    a, i, s = ints(-11, 11, 5, 20), ints(-9, 9, 5, 20, 1), f32(1).astype(dtype)
    given, options = [x, h, a, i, s], {"limits": {"SORTED": 64, "PART": 16}, "wide": wide}
    model = parsed(text).SerializeToString()
    fused, apart = (simulator.run(model, given, **options, fusion={"vertical": v}) for v in (True, False))
    assert fused.kinds.count("loops") == 0 < apart.kinds.count("loops")
    assert fused.outputs[0].tobytes() == apart.outputs[0].tobytes() and fused.error[0] == 0
    for at, wrong in (((2, 7), 11), ((4, 19), -12)):
        a[at] = wrong
        answer = simulator.run(model, given, **options)
        assert answer.error[0] == 3 and answer.error[2] == wrong
        a[at] = 0


def test_gathered_rows_that_others_read(simulator: Simulator) -> None:
    """They are stored then; so are those of two scatters, and of one that joins itself."""
    text = """g (float[40,3] x, float[40,3] h, int64[100] a, int64[100,1] i) => (float[40,3] y, float[100,3] g) {
        g = Gather<axis = 0>(h, a)  y = ScatterND<reduction = "add">(x, i, g) }"""
    x, h, a, i = f32(40, 3), f32(40, 3), ints(0, 40, 100), ints(0, 40, 100, 1)
    answer = simulator.run(parsed(text).SerializeToString(), [x, h, a, i], limits=SMALL)
    np.testing.assert_array_equal(answer.outputs[1], h[a])
    assert answer.outputs[0].tobytes() == in_order("ScatterND", x, i, h[a]).tobytes()
    text = """g (float[80,3] h, int64[80,1] i) => (float[80,3] y) { t = Relu(h)
        y = ScatterND<reduction = "add">(t, i, t) }"""
    i, h = ints(0, 80, 80, 1), f32(80, 3)
    answer = simulator.run(parsed(text).SerializeToString(), [h, i], limits=SMALL)
    assert answer.outputs[0].tobytes() == in_order("ScatterND", np.maximum(h, 0), i, np.maximum(h, 0)).tobytes()
