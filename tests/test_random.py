"""Random operators: the generator, what they draw, and how calls, seeds, threads, fusion and targets bear on it."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import helper

import onnxc
from onnxc.errors import InputError, ModelError, ShapeError
from onnxc.export import to_onnx
from onnxc.frontends.onnx_file import load
from onnxc.ir import dtypes
from onnxc.ir.text import from_text, to_text
from onnxc.ir.types import TensorType
from onnxc.passes.pipeline import PassOptions, passes
from onnxc.primitives.builder import Builder
from onnxc.primitives.random import threefry
from onnxc.runtime.random_state import Draws
from tests.triton_simulator import Simulator

Array = np.ndarray[Any, Any]


def model(text: str, opset: int = 22) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]>\ng {text}')


def compiled(text: str, opset: int = 22, **options: Any) -> onnxc.CompiledModel:
    return onnxc.compile(model(text, opset), **options)


# ---------------------------------------------------------------- the generator


def words(low: int, high: int) -> int:
    return low | high << 32


KNOWN = [  # the vectors of the authors' Random123 library: counter, key, result
    (words(0, 0), words(0, 0), words(0x6B200159, 0x99BA4EFE)),
    (words(0xFFFFFFFF, 0xFFFFFFFF), words(0xFFFFFFFF, 0xFFFFFFFF), words(0x1CB996FC, 0xBB002BE7)),
    (words(0x243F6A88, 0x85A308D3), words(0x13198A2E, 0x03707344), words(0xC4923A9C, 0x483DF7A0)),
]


def test_known_answers() -> None:
    counters, keys, wanted = (np.array(column, np.uint64) for column in zip(*KNOWN, strict=True))
    np.testing.assert_array_equal(threefry(keys, counters.view(np.int64)), wanted)


@pytest.mark.every_target
def test_compiled_generator() -> None:
    """The kernel computes the same bits, in whole vectors and in tails, of counters beyond 32 bits and below zero."""
    rng = np.random.default_rng(5)
    b = Builder()
    key, counter = b.input(TensorType(dtypes.uint64, (7, 1)), "key"), b.input(TensorType(dtypes.int64, (7, 37)), "at")
    run = onnxc.compile(b.graph([b.one("threefry", key, counter)], ["bits"]), cache=False)
    keys = rng.integers(0, 2**64, (7, 1), np.uint64)
    counters = rng.integers(-(2**63), 2**63 - 1, (7, 37))
    counters[0, :3] = 0, 1, -1
    np.testing.assert_array_equal(run(keys, counters)["bits"], threefry(keys, counters))


def test_text_of_a_graph() -> None:
    """The state is a node of the graph, and after its pass an input."""
    graph = load(model("(float[3] x) => (float[3] y) { y = RandomUniformLike(x) }"))
    ops = []
    for _, run in passes(PassOptions()):
        graph = run(graph)
        assert to_text(from_text(to_text(graph))) == to_text(graph)
        ops.append({n.op for n in graph.nodes})
    assert "random_state" in ops[0] and "random_state" not in ops[1]
    assert graph.input_names == ["x", "random_state"]


# ---------------------------------------------------------------- distributions


def distance(sample: Array, cumulative: Any) -> float:
    """Kolmogorov's statistic times the root of the sample's size: above 1.95 for one in a thousand."""
    x = np.sort(sample.astype(np.float64).ravel())
    f = np.array([cumulative(v) for v in x])
    steps = np.arange(len(x) + 1) / len(x)
    return float(max((steps[1:] - f).max(), (f - steps[:-1]).max()) * math.sqrt(len(x)))


def normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


N = 20011
DTYPES = {"float": 1, "float16": 10, "double": 11, "bfloat16": 16}


@pytest.mark.every_target
@pytest.mark.parametrize("dtype", DTYPES)
def test_uniform(dtype: str) -> None:
    attributes = f"shape = [{N}], low = -2.0, high = 3.0, dtype = {DTYPES[dtype]}"
    text = f"() => ({dtype}[{N}] y) {{ y = RandomUniform<{attributes}> () }}"
    y = compiled(text, seed=1)()["y"].astype(np.float64)
    assert y.min() >= -2 and y.max() <= 3
    assert abs(y.mean() - 0.5) < 4 * 5 / math.sqrt(12 * N)
    assert abs(y.var() - 25 / 12) < 0.05
    if dtype in ("float", "double"):
        assert distance(y, lambda v: (v + 2) / 5) < 1.95
        assert len(np.unique(y)) > N - 30  # 2^24 numbers


@pytest.mark.every_target
@pytest.mark.parametrize("dtype", DTYPES)
def test_normal(dtype: str) -> None:
    attributes = f"shape = [{N}], mean = 1.5, scale = 2.0, dtype = {DTYPES[dtype]}"
    text = f"() => ({dtype}[{N}] y) {{ y = RandomNormal<{attributes}> () }}"
    y = (compiled(text, seed=1)()["y"].astype(np.float64) - 1.5) / 2
    assert abs(y.mean()) < 4 / math.sqrt(N) + 0.004 * (dtype == "bfloat16")
    assert abs(y.var() - 1) < 4 * math.sqrt(2 / N)
    assert abs((y**3).mean()) < 4 * math.sqrt(15 / N) and abs((y**4).mean() - 3) < 4 * math.sqrt(96 / N)
    if dtype in ("float", "double"):
        assert distance(y, normal_cdf) < 1.95
    # Neighbours, and equal places of different draws, know nothing of each other.
    assert abs((y[1:] * y[:-1]).mean()) < 4 / math.sqrt(N)


def test_like() -> None:
    """Shape from the input, dtype from it or from the attribute."""
    out = compiled(
        """(float16[a, b] x, int32[b] k) => (float16[a, b] y, double[b] z) {
          y = RandomNormalLike(x)  z = RandomUniformLike<dtype = 11>(k) }"""
    )(np.zeros((3, 17), np.float16), np.zeros(17, np.int32))
    assert out["y"].shape == (3, 17) and out["y"].dtype == np.float16
    assert out["z"].shape == (17,) and out["z"].dtype == np.float64
    assert (
        compiled("(float[0, n] x) => (float[0, n] y) { y = RandomNormalLike(x) }")(np.zeros((0, 3), np.float32))[0].size
        == 0
    )
    with pytest.raises(ModelError, match="random numbers of int32"):
        compiled("(int32[3] x) => (int32[3] y) { y = RandomNormalLike(x) }")
    with pytest.raises(ShapeError, match="-3"):
        compiled("() => (float[3] y) { y = RandomNormal<shape = [-3]>() }")


BERNOULLI = ["float", "double", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
             "uint64", "bool"]  # fmt: skip


@pytest.mark.every_target
def test_bernoulli() -> None:
    """Every dtype; the same draw in all of them, since the seed is the same."""
    named = {n: dtypes.BY_NAME[{"float": "float32", "double": "float64"}.get(n, n)] for n in BERNOULLI}
    numbers = {n: helper.np_dtype_to_tensor_dtype(dtype.numpy) for n, dtype in named.items()}
    nodes = " ".join(f"{n}_ = Bernoulli<seed = 2.0, dtype = {k}>(x)" for n, k in numbers.items())
    outputs = ", ".join(f"{n}[s, t] {n}_" for n in BERNOULLI)
    run = compiled(f"(float[s, t] x) => ({outputs}, float[s, t] plain) {{ {nodes} plain = Bernoulli(x) }}")
    p = np.tile(np.array([0, 0.25, 0.9, 1], np.float32), (5003, 1))
    out = run(p)
    for name in BERNOULLI:
        found = out[name + "_"]
        assert found.dtype == helper.tensor_dtype_to_np_dtype(numbers[name]) and found.shape == p.shape
        np.testing.assert_array_equal(found.astype(np.float64), out["float_"])
    for drawn in (out["float_"], out["plain"]):
        assert set(np.unique(drawn)) == {0, 1}
        assert (drawn[:, 0] == 0).all() and (drawn[:, 3] == 1).all()
        np.testing.assert_allclose(drawn.mean(0), p[0], atol=4 * 0.5 / math.sqrt(5003))


@pytest.mark.parametrize("dtype", ["float16", "double", "bfloat16"])
def test_bernoulli_of_other_floats(dtype: str) -> None:
    p = np.full(9001, 0.3, {"float16": np.float16, "double": np.float64, "bfloat16": ml_dtypes.bfloat16}[dtype])
    y = compiled(f"({dtype}[n] x) => ({dtype}[n] y) {{ y = Bernoulli(x) }}", seed=3)(p)["y"]
    assert y.dtype == p.dtype and abs(y.astype(np.float64).mean() - float(p[0])) < 4 * 0.46 / math.sqrt(9001)


@pytest.mark.every_target
def test_multinomial() -> None:
    run = compiled("(float[3, 5] x) => (int64[3, n] y) { y = Multinomial<dtype = 7, sample_size = 20011>(x) }", seed=4)
    weights = np.array([[1, 2, 3, 0, 4], [0, 0, 7, 0, 0], [5e-30, 1e-30, 0, 0, 4e-30]])
    with np.errstate(divide="ignore"):
        logits = np.log(weights).astype(np.float32)
    y = run(logits)["y"]
    assert y.dtype == np.int64 and y.shape == (3, 20011)
    counts = np.stack([np.bincount(row, minlength=5) for row in y]) / 20011
    shares = weights / weights.sum(1, keepdims=True)
    np.testing.assert_allclose(counts, shares, atol=4 * 0.5 / math.sqrt(20011))
    assert (counts[shares == 0] == 0).all()
    logits[1] = np.nan, np.inf, -1, -np.inf, np.nan  # what is no weight is never drawn
    logits[2] = -np.inf
    y = run(logits)["y"]
    assert (y[1] == 2).all() and (y[2] < 5).all()  # of no weights at all, some class


# ---------------------------------------------------------------- calls, seeds, threads

TWO = "(float[n] x) => (float[n] a, float[n] b) { a = RandomUniformLike%s(x) b = RandomUniformLike%s(x) }"
X = np.zeros(1009, np.float32)


def draws(run: onnxc.CompiledModel, calls: int, x: Array = X) -> list[bytes]:
    return [b"".join(y.tobytes() for y in run(x)) for _ in range(calls)]


@pytest.mark.every_target
def test_fresh_numbers() -> None:
    """Operators, calls and models differ; the same seed gives the same calls again, whatever was called before."""
    run, other = compiled(TWO % ("", "")), compiled(TWO % ("", ""))
    a, b = run(X)
    assert (a != b).mean() > 0.99
    assert len(set(draws(run, 5) + draws(other, 5))) == 10
    run.seed(7)
    first = draws(run, 3)
    run.seed(7)
    assert draws(run, 3) == first
    assert draws(compiled(TWO % ("", ""), seed=7), 3) == first
    run.seed(7, calls=2)
    assert draws(run, 1) == first[2:]
    run.seed(8)
    assert not set(draws(run, 3)) & set(first)
    run.seed()
    assert not set(draws(run, 3)) & set(first)


@pytest.mark.every_target
def test_own_seeds_go_on_as_in_onnxruntime() -> None:
    """With the attribute, a sequence that begins anew with each session; equal seeds are equal sequences."""
    proto = model(TWO % ("<seed = 1.0>", "<seed = 1.0>"), 18)

    def behaves(session: Any) -> tuple[bytes, bytes]:
        (a, b), (c, d) = (session.run(None, {"x": X}) for _ in range(2))
        assert a.tobytes() == b.tobytes() and c.tobytes() == d.tobytes() and a.tobytes() != c.tobytes()
        return a.tobytes(), c.tobytes()

    for make in (
        lambda: onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]),
        lambda: onnxc.compile(proto),
        lambda: onnxc.compile(proto, seed=3),  # which is for operators without a seed
    ):
        assert behaves(make()) == behaves(make())
    a, b = onnxc.compile(model(TWO % ("<seed = 1.0>", "<seed = 1.5>")))(X)
    assert (a != b).any()


def test_seeds_out_of_range() -> None:
    run = compiled("(float[3] x) => (float[3] y) { y = Relu(x) }", seed=3)  # of no consequence
    for seed in (-1, 2**64, 1.5, "a"):
        with pytest.raises(InputError, match="seed is an integer from 0"):
            run.seed(seed)  # type: ignore[arg-type]
    run.seed(2**64 - 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_draws_for_itself() -> None:
    """Processes that share a model's memory do not share its entropy; a seed that was given stays."""
    for draws, alike in ((Draws(), False), (Draws(5), True)):
        draws.next()
        source, sink = os.pipe()
        if not os.fork():
            os.write(sink, draws.next().tobytes())
            os._exit(0)
        os.wait()
        assert (os.read(source, 16) == draws.next().tobytes()) is alike
        os.close(source), os.close(sink)


def test_threads_share_no_state() -> None:
    """Calls from several threads: as many different draws as calls, which are those of calls one by one."""
    run = compiled(TWO % ("", ""), seed=9)
    with ThreadPoolExecutor(8) as pool:
        found = [row for part in pool.map(lambda _: draws(run, 12), range(8)) for row in part]
    assert len(set(found)) == 96
    run.seed(9)
    assert sorted(found) == sorted(draws(run, 96))


EVERYTHING = """(float[n, m] x, float r) =>
  (float[n, m] y, bool[n, m] mask, float[n, m] u, double[n, m] d, int32[n, 11] k)
{
  on = Constant<value = bool {1}> ()
  half = RandomUniformLike (x)
  z = Mul (x, half)
  y, mask = Dropout (z, r, on)
  u = RandomUniformLike<seed = 4.0> (x)
  d = RandomUniformLike<dtype = 11> (x)
  k = Multinomial<sample_size = 11> (u)
}"""


def test_bits_do_not_depend_on_kernels() -> None:
    """Threads, fusion, fixed and dynamic sizes, runs: the same bits."""
    x, r = np.random.default_rng(0).standard_normal((37, 61)).astype(np.float32), np.float32(0.4)
    wanted: list[bytes] | None = None
    for options in ({}, {"threads": 1}, {"threads": 7}, {"fusion": False}, {"input_shapes": {"x": (37, 61)}}):
        run = compiled(EVERYTHING, seed=11, **options)
        found = [y.tobytes() for _ in range(2) for y in run(x, r)]
        wanted = wanted or found
        assert found == wanted


def test_save_and_load(tmp_path: Path) -> None:
    run = compiled(EVERYTHING)
    run.save(tmp_path / "m.onnxc")
    again = onnxc.load(tmp_path / "m.onnxc")
    x, r = np.ones((5, 7), np.float32), np.float32(0.5)
    assert [i.name for i in again.get_inputs()] == ["x", "r"] and "random_state" not in repr(again)
    for each in (run, again):
        each.seed(1)
    for a, b in zip(run(x=x, r=r), again.run(None, {"x": x, "r": r}), strict=True):
        np.testing.assert_array_equal(a, b)
    assert run.profile({"x": x, "r": r}, runs=1, warm_up=0).kernels
    with pytest.raises(InputError, match="missing input 'r'"):
        run(x)
    with pytest.raises(InputError, match="the model has 2"):
        run(x, r, r)
    with pytest.raises(InputError, match="no input 'random_state'"):
        run(x=x, r=r, random_state=np.zeros(2, np.uint64))


def test_tools(tmp_path: Path) -> None:
    """Two runtimes cannot be compared by what they draw; variants of kernels can."""
    proto = model("""(float[1, 16, 14, 14] x, float[16, 16, 3, 3] w) => (float[1, 16, 12, 12] z) {
      y = Conv (x, w)  u = RandomUniformLike<high = 100.0> (y)  z = Add (y, u) }""")
    w = np.random.default_rng(0).standard_normal((16, 16, 3, 3)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    with pytest.raises(InputError, match="random operators"):
        onnxc.compare(proto)
    found = onnxc.tune(proto, record=tmp_path / "record.json")
    assert found.times and not found.refused
    assert onnxc.compile(proto).random and not compiled("(float[3] x) => (float[3] y) { y = Relu (x) }").random


def test_names_that_are_taken() -> None:
    """A model may call an input or output of its own as the state is called."""
    text = "(float[n] random_state) => (float[n] random_state_) { random_state_ = RandomNormalLike(random_state) }"
    assert compiled(text)(random_state=X)["random_state_"].std() > 0.8


# ---------------------------------------------------------------- Dropout

ON = np.array(True)


def check_dropout(x: Array, y: Array, mask: Array, ratio: float, rtol: float) -> None:
    mask = mask.astype(bool)
    with np.errstate(all="ignore"):
        wanted = np.where(mask, x.astype(np.float64) / (1 - ratio), 0)
    np.testing.assert_allclose(y.astype(np.float64), wanted, rtol)
    assert abs(mask.mean() - (1 - ratio)) < 4 * math.sqrt(ratio * (1 - ratio) / mask.size)


@pytest.mark.every_target
@pytest.mark.parametrize("dtype", ["float", "double", "float16", "bfloat16"])
@pytest.mark.parametrize("opset", [12, 13, 22])
def test_dropout(dtype: str, opset: int) -> None:
    if dtype == "bfloat16" and opset < 13:
        pytest.skip("not in the standard")
    kind = {"float16": np.float16, "double": np.float64, "bfloat16": ml_dtypes.bfloat16, "float": np.float32}[dtype]
    x = (np.random.default_rng(1).standard_normal((67, 131)) + 3).astype(kind)
    text = f"({dtype}[n, m] x, float r, bool t) => ({dtype}[n, m] y, bool[n, m] k) {{ y, k = Dropout(x, r, t) }}"
    run = compiled(text, opset, seed=2)
    rtol = {"float": 1e-6, "double": 1e-7, "float16": 1e-3, "bfloat16": 1e-2}[dtype]
    for ratio in (0.5, 0.1, 0.9):
        y, mask = run(x, np.float32(ratio), ON)
        assert y.dtype == x.dtype and mask.dtype == bool
        check_dropout(x, y, mask, float(np.float32(ratio)), rtol)
    for ratio, training in ((0.0, True), (0.5, False)):
        y, mask = run(x, np.float32(ratio), np.array(training))
        np.testing.assert_array_equal(y, x)
        assert mask.all()


def test_dropout_of_constants() -> None:
    """What is known is not drawn: no ratio, no training."""
    x = np.ones((50, 51), np.float32)
    for ratio, training, kept in ((0.0, 1, 1.0), (0.3, 0, 1.0), (0.3, 1, 0.7)):
        text = f"""(float[n, m] x) => (float[n, m] y, bool[n, m] mask) {{
          r = Constant<value = float {{{ratio}}}> () t = Constant<value = bool {{{training}}}> ()
          y, mask = Dropout<seed = 3> (x, r, t) }}"""
        y, mask = compiled(text)(x)
        assert abs(mask.mean() - kept) < 0.05
        np.testing.assert_allclose(y[mask], 1 / kept, rtol=1e-6)
        assert (y[~mask] == 0).all()
    text = "(float[n, m] x) => (float[n, m] y) { t = Constant<value = bool {1}> () y = Dropout (x, , t) }"
    assert abs((compiled(text)(x)["y"] == 2).mean() - 0.5) < 0.05


def test_dropout_of_opset_6() -> None:
    x = np.ones((90, 91), np.float32)
    y, mask = compiled(
        "(float[n, m] x) => (float[n, m] y, float[n, m] mask) { y, mask = Dropout<ratio = 0.25> (x) }", 6
    )(x)
    check_dropout(x, y, mask, 0.25, 1e-6)
    y = compiled("(float[n, m] x) => (float[n, m] y) { y = Dropout<ratio = 0.25, is_test = 1> (x) }", 6)(x)["y"]
    np.testing.assert_array_equal(y, x)


def test_dropped_infinities_are_nan() -> None:
    """As the standard's formula has it: scale * data * mask."""
    x = np.full(101, np.inf, np.float32)
    y, mask = compiled("(float[n] x, float r, bool t) => (float[n] y, bool[n] k) { y, k = Dropout(x, r, t) }")(
        x, np.float32(0.5), ON
    )
    assert np.isinf(y[mask]).all() and np.isnan(y[~mask]).all()


# ---------------------------------------------------------------- other runtimes and targets


def test_exported_model_draws_the_same() -> None:
    """onnxruntime computes the bits of a first call of seed 0 from the exported graph, or of the state it is given."""
    graph = load(model(EVERYTHING))
    for _, run in passes(PassOptions()):
        graph = run(graph)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        to_onnx(graph).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    x, r = np.random.default_rng(0).standard_normal((13, 17)).astype(np.float32), np.float32(0.4)
    ours = compiled(EVERYTHING, seed=0)
    for state in (None, (0, 1), (2**63 + 5, 12)):
        feeds = {"x": x, "r": np.asarray(r)} | ({} if state is None else {"random_state": np.array(state, np.uint64)})
        if state is not None:
            ours.seed(state[0], calls=state[1])
        for a, b in zip(ours(x, r), session.run(None, feeds), strict=True):
            np.testing.assert_array_equal(a, b)


def test_gpu_kernels_draw_the_same(simulator: Simulator) -> None:
    text = EVERYTHING.replace("int32[n, 11] k)", "float[n, m] g)").replace(
        "k = Multinomial<sample_size = 11> (u)", "g = RandomNormalLike (x)"
    )
    x, r = np.random.default_rng(0).standard_normal((13, 37)).astype(np.float32), np.float32(0.4)
    ours = compiled(text)
    for state in ((0, 0), (2**63 + 5, 12)):
        ours.seed(state[0], calls=state[1])
        given = [x, np.asarray(r), np.array(state, np.uint64)]
        answer = simulator.run(model(text).SerializeToString(), given)
        *exact, g = answer.outputs
        *wanted, h = ours(x, r)
        for a, b in zip(exact, wanted, strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(g, h, rtol=1e-5, atol=1e-6)  # log and cos are each target's own


# ---------------------------------------------------------------- subgraphs

LOOP = """(float[5] x, int64 k%s) => (float[5] y, float[n, 5] all)
{
  on = Constant<value = bool {1}> ()
  y, all = Loop (k, %s, x) <body = b (int64 i, bool go, float[5] s) => (bool go_on, float[5] t, float[5] drawn) {
    go_on = Identity (go)
    drawn = RandomUniformLike%s (x)
    t = Add (s, drawn)
  }>
}"""


@pytest.mark.parametrize("seed", ["", "<seed = 2.0>"])
@pytest.mark.parametrize("condition", ["on", "c"])
def test_each_iteration_draws_anew(seed: str, condition: str) -> None:
    """In a loop of the program, and in one of the host's."""
    x = np.zeros(5, np.float32)
    given = (x, np.array(7), *([np.array(True)] if condition == "c" else []))
    run = compiled(LOOP % (", bool c" if condition == "c" else "", condition, seed), 18, seed=1)
    first, second = (run(*given)["all"] for _ in range(2))
    assert first.shape == (7, 5) and len(np.unique([first, second])) == 70
    run.seed(1)
    np.testing.assert_array_equal(run(*given)["all"], first)


def test_an_exported_loop_draws_the_same() -> None:
    """Its generator is a long chain of single numbers, as operators of ONNX."""
    seven = "{\n  k = Constant<value = int64 {7}> ()\n"
    text = (LOOP % ("", "on", "")).replace(", int64 k", "").replace("{\n", seven, 1)
    graph = load(model(text, 18))
    for _, run in passes(PassOptions()):
        graph = run(graph)
    x = np.zeros(5, np.float32)
    ours, again = compiled(text, 18, seed=0), onnxc.compile(to_onnx(graph))
    for a, b in zip(again(x), ours(x), strict=True):
        np.testing.assert_array_equal(a, b)


def test_branches_draw() -> None:
    run = compiled(
        """(float[500] x, bool c) => (float[500] y) {
          y = If (c) <then_branch = a () => (float[500] p) { p = RandomUniformLike (x) },
                      else_branch = b () => (float[500] q) { q = RandomNormalLike (x) }> }""",
        18, seed=3,
    )  # fmt: skip
    x = np.zeros(500, np.float32)
    first, second, other = (run(x, np.array(c))["y"] for c in (True, True, False))
    assert (first != second).any() and first.min() >= 0 and other.min() < -1
    run.seed(3)
    np.testing.assert_array_equal(run(x, np.array(True))["y"], first)
