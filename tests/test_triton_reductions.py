"""Reductions and other loop nests on GPUs: under any tile, divided over programs, and with many buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import TensorProto, helper

import onnxc
from onnxc.codegen.triton import tiles
from onnxc.codegen.triton.kernel import power
from onnxc.codegen.triton.tiles import Facts, Tile, best, candidates
from tests.targets import needs_triton
from tests.triton_simulator import Request, Simulator, program_of

Array = np.ndarray[Any, Any]

pytestmark = needs_triton
rng = np.random.default_rng(5)
TILES = {
    "whole rows": Tile(2, 64, 4, resident=1),
    "a row at a time": Tile(1, 64, 1, resident=1),
    "parts": Tile(1, 16, 4, resident=1),
    "parts of several rows": Tile(4, 8, 4, resident=1),
    "packed parts": Tile(2, 16, 4, resident=1, packed=1),
    "single turns": Tile(4, 1, 1, resident=1),
    "pieces": Tile(2, 16, 4),
    "pieces ahead": Tile(1, 8, 4, stages=3),
}


def model(text: str) -> bytes:
    parsed = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]>\n{text}')
    return bytes(parsed.SerializeToString())


def softmax(x: Array) -> Array:
    y = x.astype(np.float64)
    y = np.exp(y - y.max(-1, keepdims=True))
    return np.asarray(y / y.sum(-1, keepdims=True))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("length", [1, 7, 16, 33, 61])
@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_softmax_under_any_tile(simulator: Simulator, tile: str, length: int, dtype: str) -> None:
    x = rng.standard_normal((5, length)).astype({"float": np.float32, "float16": np.float16}[dtype])
    text = f"g ({dtype}[5, {length}] x) => ({dtype}[5, {length}] y) {{ y = Softmax(x) }}"
    (y,) = simulator.run(model(text), [x], tile=asdict(TILES[tile])).outputs
    np.testing.assert_allclose(y.astype(np.float64), softmax(x), 1e-5 if dtype == "float" else 1e-3)


@pytest.mark.parametrize("tile", [Tile(1, 16, 4, resident=1), Tile(2, 128, 4, 1, 1), Tile(1, 1024, 4, 1)], ids=str)
def test_parts_of_several_loops(simulator: Simulator, tile: Tile) -> None:
    """Channels do not change within a part that divides their length: their scales are then one number."""
    x = rng.standard_normal((2, 6, 8, 16)).astype(np.float16)
    w, b = (rng.standard_normal(6).astype(np.float16) for _ in range(2))
    text = """g (float16[2, 6, 8, 16] x, float16[6] w, float16[6] b) => (float16[2, 6, 8, 16] y) {
        y = GroupNormalization <num_groups = 2> (x, w, b)
    }"""
    answer = simulator.run(model(text).replace(b"\x10\x12", b"\x10\x15"), [x, w, b], tile=asdict(tile))
    assert len(answer.kinds) == 1
    z = x.astype(np.float64).reshape(2, 2, -1)
    z = ((z - z.mean(-1, keepdims=True)) / np.sqrt(z.var(-1, keepdims=True) + 1e-5)).reshape(x.shape)
    wanted = z * w[:, None, None] + b[:, None, None]
    np.testing.assert_allclose(answer.outputs[0].astype(np.float64), wanted, 1e-2, 1e-2)


FACTS = [
    Facts(kind, points, turns, run, phases, bits, mixed, (points, turns))
    for kind in ("flat", "turned", "rows", "columns")
    for points, turns, run in [
        (0, 1, 1),
        (1, 0, 0),
        (5, 17, 17),
        (4096, 24576, 4096),
        (8, 50257, 50257),
        (1 << 20, 49, 7),
    ]
    for phases, bits, mixed in [(1, 16, False), (3, 16, True), (2, 32, False), (1, 64, False)]
] + [Facts(kind, None, None, None) for kind in ("flat", "turned", "rows", "columns")]


@pytest.mark.parametrize("facts", FACTS, ids=str)
def test_candidates(facts: Facts) -> None:
    """Sides are powers of two, no two are equal, and the first is the cost model's."""
    found = candidates(facts)
    assert found[0] == best(facts) and len(set(found)) == len(found) <= 40
    assert all(n == power(n) for tile in found for n in (tile.points, tile.turns, tile.warps))


@pytest.mark.parametrize("tile", ["whole rows", "packed parts", "pieces ahead"])
def test_machine_code(tile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of tile compiles for three architectures."""
    monkeypatch.setattr(tiles, "ranked", lambda facts: iter([TILES[tile]]))
    text = "g (float16[9, 61] x) => (float16[9, 61] y) { y = Softmax(x) }"
    made = onnxc.compile(onnx.ModelProto.FromString(model(text)), target="cuda:sm_80,sm_90,sm_100", cache=False)
    assert set(made.manifest["cuda"]["images"]) == {"sm_80", "sm_90a", "sm_100a"}


# ---------------------------------------------------------------- pieces of one tensor that are joined

HALVES = "a, b = Split <axis = -1, num_outputs = 2> (z) "
JOINED = {
    "halves": (HALVES + "n = Neg (b) j = Concat <axis = -1> (n, a)", 4),
    "the other sign": (HALVES + "n = Neg (a) j = Concat <axis = -1> (b, n)", 4),
    "uneven": ("a, b = Split <axis = -1> (z, parts) n = Abs (b) j = Concat <axis = -1> (n, a)", 4),
    "three": ("a, b, c = Split <axis = -1, num_outputs = 3> (z) n = Neg (b) j = Concat <axis = -1> (c, n, a)", 6),
    "two functions": (HALVES + "n = Neg (b) m = Abs (a) j = Concat <axis = -1> (n, m)", 6),
    "of rows": ("a, b = Split <axis = 0> (z, rows) c = Concat <axis = 0> (b, a) j = Tanh (c)", 3),
}


@pytest.mark.parametrize(("case", "rows"), [(c, r) for c in JOINED for r in ("7", "N") if (c, r) != ("of rows", "N")])
def test_joined_pieces_are_read_once(simulator: Simulator, case: str, rows: str) -> None:
    """Where both sides of a condition are one function of elements some way apart, these are loaded once."""
    body, loads = JOINED[case]
    width = 17 if case == "three" else 14
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((7, width), (width,)))
    text = f"""g (float[{rows}, {width}] x, float[{width}] w) => (float[{rows}, {width}] y)
        <int64[2] parts = {{5, 9}}, int64[2] rows = {{3, 4}}> {{ z = Mul (x, w) {body} y = Add (z, j) }}"""
    answer = simulator.run(model(text), [x, w])
    z = x * w
    joined = {
        "halves": lambda: np.concatenate([-z[:, 7:], z[:, :7]], 1),
        "the other sign": lambda: np.concatenate([z[:, 7:], -z[:, :7]], 1),
        "uneven": lambda: np.concatenate([np.abs(z[:, 5:]), z[:, :5]], 1),
        "three": lambda: np.concatenate([z[:, 12:], -z[:, 6:12], z[:, :6]], 1),
        "two functions": lambda: np.concatenate([-z[:, 7:], np.abs(z[:, :7])], 1),
        "of rows": lambda: np.tanh(np.concatenate([z[3:], z[:3]])),
    }[case]()
    np.testing.assert_allclose(answer.outputs[0], z + joined, 1e-5, 1e-6)
    _, program = program_of(Request(model(text), []))
    assert all(kernel.count("tl.load(") == loads for kernel in program.kernels.values())
    assert len(program.kernels) == 1 + (rows == "N")  # with places of 64 bits, too


# ---------------------------------------------------------------- the best of long rows


@pytest.mark.parametrize(
    ("dtype", "k", "largest"),
    [("float", 50, 1), ("float", 2500, 0), ("float", 2503, 1), ("int8", 300, 1), ("int8", 1, 0)],
)
def test_best_of_long_rows(simulator: Simulator, largest: int, k: int, dtype: str) -> None:
    """In steps: ties by position, and NaN as the greatest."""
    n = 2503
    x = rng.integers(-50, 50, (2, n)).astype({"float": np.float32, "int8": np.int8}[dtype])
    if dtype == "float":
        x[0, ::97], x[1, 5:40], x[1, 7] = np.nan, np.inf, -np.inf
    text = f"""g ({dtype}[2, {n}] x) => ({dtype}[2, {k}] v, int64[2, {k}] i) {{
        k = Constant <value_ints = [{k}]> ()
        v, i = TopK <axis = -1, largest = {largest}> (x, k)
    }}"""
    values, at = simulator.run(model(text), [x]).outputs
    keys = x.astype(np.float64)
    nan_last = np.isnan(keys) != bool(largest)
    order = np.lexsort((-keys if largest else keys, nan_last), axis=-1)[:, :k]
    np.testing.assert_array_equal(at, order)
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, -1))


LOOSE = ["float", "float16", "bfloat16", "double", "int8", "uint8", "int16", "int32", "uint32", "int64"]


@pytest.mark.parametrize("dtype", LOOSE)
@pytest.mark.parametrize("largest", [0, 1])
def test_few_of_many(simulator: Simulator, largest: int, dtype: str) -> None:
    """Found before they are put in order, in one piece and in several: ties by position, zeros of both signs among
    them, and NaN of both signs as the greatest.
    """
    kind = helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(dtype.upper()))
    for n, k in ((700, 30), (5003, 300)) if dtype in ("float", "int8") else ((700, 30),):
        x = rng.integers(0 if dtype.startswith("u") else -99, 99, (2, n)).astype(kind)
        if dtype in LOOSE[:4]:
            x[0, ::97], x[0, 1::97], x[1, 5:40], x[1, 7] = np.nan, -x[0, ::97], np.inf, -np.inf
            x[1, ::3] = kind.type(0.0)
            x[1, ::6] = kind.type(-0.0)
        text = f"""g ({dtype}[b, {n}] x) => ({dtype}[b, {k}] v, int64[b, {k}] i) {{
            k = Constant <value_ints = [{k}]> ()
            v, i = TopK <axis = -1, largest = {largest}> (x, k)
        }}"""
        answer = simulator.run(model(text), [x])
        assert "last + step" in answer.source
        values, at = answer.outputs
        keys = x.astype(np.float64)
        order = np.lexsort((-keys if largest else keys, np.isnan(keys) != bool(largest)), axis=-1)[:, :k]
        np.testing.assert_array_equal(at, order)
        np.testing.assert_array_equal(values.view(np.uint8), np.take_along_axis(x, order, -1).view(np.uint8))


# ---------------------------------------------------------------- where the best is

ODD = {
    "all least": [-np.inf] * 9,
    "NaN first": [np.nan, 1, np.inf, 2, np.nan, np.inf, 0, 1, 3],
    "NaN inside": [1, np.nan, 5, 2, np.nan, 5, 0, 1, 3],
    "least and NaN": [-np.inf, np.nan, -np.inf, -np.inf, np.nan, -np.inf, -np.inf, -np.inf, -np.inf],
    "greatest": [3, np.inf, 1, np.inf, 1, 1, 1, 1, np.inf],
    "least": [3, -np.inf, 1, -np.inf, 1, 1, 1, 1, -np.inf],
}


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("last", [0, 1])
def test_where_the_best_is(simulator: Simulator, tile: str, op: str, last: int) -> None:
    """A NaN counts where it is first of all; of equal elements the first counts, or the last."""
    x = np.array(list(ODD.values()), np.float32)
    text = f"g (float[6, 9] x) => (int64[6] y) {{ y = {op} <axis = 1, keepdims = 0, select_last_index = {last}> (x) }}"
    (y,) = simulator.run(model(text), [x], tile=asdict(TILES[tile])).outputs
    key = x if op == "ArgMax" else -x
    some = np.where(np.isnan(key), -np.inf, key)
    best = some == some.max(1, keepdims=True)
    wanted = 8 - best[:, ::-1].argmax(1) if last else best.argmax(1)
    np.testing.assert_array_equal(y, np.where(np.isnan(x[:, 0]), 0, wanted))


@pytest.mark.parametrize("tile", ["whole rows", "pieces"])
def test_one_row_in_a_tile_of_several(simulator: Simulator, tile: str) -> None:
    """Its place does not depend on the row, but what is stored there has a lane for each."""
    x = rng.integers(0, 99, 61).astype(np.uint8)
    text = "g (uint8[61] x) => (int64 y) { y = ArgMin <axis = 0, keepdims = 0> (x) }"
    assert simulator.run(model(text), [x], tile=asdict(TILES[tile])).outputs[0] == x.argmin()


@pytest.mark.parametrize(
    ("dtype", "exclusive", "reverse"),
    [("float", 0, 0), ("float", 1, 0), ("float", 0, 1), ("float16", 0, 1), ("int64", 1, 1)],
)
def test_running_sums_of_long_rows(simulator: Simulator, exclusive: int, reverse: int, dtype: str) -> None:
    n = 17011
    kind = {"float": np.float32, "float16": np.float16, "int64": np.int64}[dtype]
    x = rng.integers(-3, 4, (2, n, 1)).astype(kind)
    x[0, 0] = x[0, -1] = -0.0
    text = f"""g ({dtype}[2, {n}, 1] x) => ({dtype}[2, {n}, 1] y) {{
        a = Constant <value_int = 1> ()
        y = CumSum <exclusive = {exclusive}, reverse = {reverse}> (x, a)
    }}"""
    (y,) = simulator.run(model(text), [x]).outputs
    z = x[:, ::-1] if reverse else x
    s = np.cumsum(z.astype(np.float64), 1) - (z if exclusive else 0)
    np.testing.assert_array_equal(y, (s[:, ::-1] if reverse else s).astype(kind))
    if not exclusive and dtype != "int64":
        assert np.signbit(y[0, -1 if reverse else 0])


# ---------------------------------------------------------------- divided over programs

LONG = 300007  # a prime


def reduced(op: str, dtype: str, shape: str, axis: int, kept: str) -> str:
    return f"""g ({dtype}[{shape}] x) => ({dtype}[{kept}] y) {{
        a = Constant <value_ints = [{axis}]> ()
        y = Reduce{op} <keepdims = 0> (x, a)
    }}"""


@pytest.mark.parametrize("op", ["Sum", "Mean", "Max", "Min", "Prod"])
@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_few_long_rows(simulator: Simulator, op: str, dtype: str) -> None:
    """Divided or not, the result is the same; 16-bit floats are not rounded in between."""
    kind = {"float": np.float32, "float16": np.float16}[dtype]
    x = (1 + rng.standard_normal((2, LONG)) / 50).astype(kind)
    x[1, 17] = -3
    if op == "Prod":  # exact
        x = np.where(np.arange(2 * LONG).reshape(2, LONG) % 60013, 1, 2).astype(kind)
    text = reduced(op, dtype, f"2, {LONG}", 1, "2")
    whole, parts = (simulator.run(model(text), [x], fusion={"split": split}) for split in (False, True))
    assert (len(whole.kinds), len(parts.kinds)) == (1, 2)
    z = x.astype(np.float64)
    means: dict[str, Callable[[int], Array]] = {
        "Sum": z.sum, "Mean": z.mean, "Max": z.max, "Min": z.min, "Prod": z.prod
    }  # fmt: skip
    wanted = means[op](1)
    for y in (whole.outputs[0], parts.outputs[0]):
        with np.errstate(over="ignore"):
            exact = wanted.astype(kind).astype(np.float64)
        np.testing.assert_allclose(y.astype(np.float64), exact, 2e-5 if dtype == "float" else 2e-3)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("op", ["Sum", "Max", "Min"])
def test_special_numbers_in_long_rows(simulator: Simulator, op: str, value: float) -> None:
    x = rng.standard_normal((1, LONG)).astype(np.float32)
    x[0, -1] = value
    text = reduced(op, "float", f"1, {LONG}", 1, "1")
    (y,) = simulator.run(model(text), [x]).outputs
    wanted = {"Sum": x.sum(1), "Max": x.max(1), "Min": x.min(1)}[op]
    np.testing.assert_allclose(y, wanted, 1e-4)


@pytest.mark.parametrize("shape", [(4099, 67), (5, 20011, 17)])
def test_columns(simulator: Simulator, shape: tuple[int, ...]) -> None:
    x = rng.standard_normal(shape).astype(np.float32)
    axis, n = len(shape) - 2, ", ".join(map(str, shape))
    kept = ", ".join(str(d) for k, d in enumerate(shape) if k != axis)
    answer = simulator.run(model(reduced("Sum", "float", n, axis, kept)), [x])
    assert len(answer.kinds) == 2
    np.testing.assert_allclose(answer.outputs[0], x.astype(np.float64).sum(axis), 1e-4, 1e-3)


# ---------------------------------------------------------------- what the planner does for a GPU


def test_concatenation_of_many(simulator: Simulator) -> None:
    """A kernel takes so many buffers at most."""
    xs = [rng.standard_normal((2, 1 + k % 5)).astype(np.float32) for k in range(90)]
    inputs = ", ".join(f"float[2, {x.shape[1]}] x{k}" for k, x in enumerate(xs))
    names = ", ".join(f"x{k}" for k in range(len(xs)))
    whole = np.concatenate(xs, 1)
    text = f"g ({inputs}) => (float[2, {whole.shape[1]}] y) {{ y = Concat <axis = 1> ({names}) }}"
    answer = simulator.run(model(text), xs)
    assert answer.kinds == ["loops"] * 3
    np.testing.assert_array_equal(answer.outputs[0], whole)


def test_products_of_halves_are_stored_as_halves(simulator: Simulator) -> None:
    """Whoever reads them widens them."""
    x, w = (rng.standard_normal(s).astype(np.float16) for s in [(32, 16), (16, 48)])
    text = """g (float16[32, 16] x, float16[16, 48] w) => (float16[32, 48] y) {
        p = MatMul(x, w)  q = Cast <to = 1> (p)  s = Softmax(q)  y = Cast <to = 10> (s)
    }"""
    answer = simulator.run(model(text), [x, w])
    assert answer.kinds == ["matmul", "loops"]
    p = (x.astype(np.float64) @ w.astype(np.float64)).astype(np.float16)
    np.testing.assert_allclose(answer.outputs[0].astype(np.float64), softmax(p), 1e-2, 1e-3)
