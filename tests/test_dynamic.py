"""Dynamic dims: one compile, any size."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

import onnxc
from onnxc import errors
from onnxc.frontends import onnx_file
from onnxc.ir import expr
from onnxc.ir.expr import Dim, Sym
from onnxc.passes.decompose import decompose
from onnxc.planner.memory import aligned, assign_offsets
from onnxc.primitives.interpret import interpret
from onnxc.runtime import model as model_module
from onnxc.runtime.compiled_model import CompiledModel
from onnxc.runtime.library import load_runtime
from onnxc.runtime.model import Arena
from onnxc.runtime.sizes import encode, evaluate, spell
from tests.small_models import Array, floats, parse, reference

pytestmark = pytest.mark.every_target

# ---------------------------------------------------------------- sizes

SYMBOLS = [Sym("s0"), Sym("s1"), Sym("s2", 1)]


@st.composite
def dims(draw: st.DrawFn, depth: int = 2) -> Dim:
    """Expressions over three symbols. (Divisors are positive.)"""
    if depth == 0 or draw(st.booleans()):
        return draw(st.sampled_from(SYMBOLS) | st.integers(-3, 9))
    a, b = draw(dims(depth - 1)), draw(dims(depth - 1))
    kind = draw(st.sampled_from(["+", "-", "*", "//", "%", "max", "min"]))
    if kind in ("//", "%"):
        by = draw(st.integers(1, 7) | st.just(SYMBOLS[2]))
        return expr.floordiv(a, by) if kind == "//" else expr.mod(a, by)
    if kind in ("max", "min"):
        return (expr.maximum if kind == "max" else expr.minimum)(a, b)
    return a + b if kind == "+" else a - b if kind == "-" else a * b


@given(dims(), st.integers(0, 20), st.integers(0, 20), st.integers(1, 20))
@pytest.mark.cpu_only("the runtime of the CPU")
def test_sizes_are_the_expressions(d: Dim, s0: int, s1: int, s2: int) -> None:
    values = {"s0": s0, "s1": s1, "s2": s2}
    assert evaluate(encode(d), values) == expr.evaluate(d, values)
    text = spell(d, {"s0": "s0", "s1": "s1", "s2": "s2"})
    names: dict[str, Any] = {**values, "max": max, "min": min, "__builtins__": {}}
    assert text is not None and eval(str(text), names) == expr.evaluate(d, values)


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 12), st.integers(0, 5)), max_size=40))
@pytest.mark.cpu_only("the runtime of the CPU")
def test_arena_is_laid_out_as_the_planner_does(buffers: list[tuple[int, int, int]]) -> None:
    sizes = [64 * (n // 8) + n % 3 for n, _, _ in buffers]
    spans = [(first, first + length) for _, first, length in buffers]
    arena = Arena(sizes, list(range(len(sizes))), [a for a, _ in spans], [b for _, b in spans])
    total, *offsets = arena.layout({}, load_runtime())
    assert (offsets, total) == assign_offsets(sizes, spans)
    for i in range(len(sizes)):
        for j in range(i):
            if spans[i][0] <= spans[j][1] and spans[j][0] <= spans[i][1]:
                a, b = sorted((i, j), key=offsets.__getitem__)
                assert offsets[a] + aligned(sizes[a]) <= offsets[b]


@pytest.mark.cpu_only("the runtime of the CPU")
def test_arena_has_a_limit() -> None:
    arena = Arena([[[8, "s0", "s0"]]], [0, 0], [0, 0], [1, 1])
    with pytest.raises(errors.LimitError):
        arena.layout({"s0": 1 << 30}, load_runtime())


# ---------------------------------------------------------------- models

NET = """(float[batch, seq, 64] x, float[64, 96] w, float[96, 64] v, float[64] g) => (float[batch, seq, 64] y)
{ n = LayerNormalization(x, g, g) a = MatMul(n, w) b = Relu(a) c = MatMul(b, v) d = Add(c, x)
  t = MatMul(w, v) e = Softmax(d) y = MatMul(e, t) }"""


def net_inputs(batch: int, seq: int) -> tuple[Array, ...]:
    return floats(batch, seq, 64), floats(64, 96) / 8, floats(96, 64) / 8, floats(64)


@pytest.fixture(scope="module")
def net() -> CompiledModel:
    return onnxc.compile(parse(NET))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 7), (3, 128), (1, 33), (0, 5), (4, 0), (65, 3)])
def test_one_compile_any_size(net: CompiledModel, sizes: tuple[int, int], threads: int) -> None:
    inputs = net_inputs(*sizes)
    net.threads = threads
    (want,) = reference(parse(NET), *inputs)
    for _ in range(2):
        (got,) = net(*inputs)
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, 1e-4, 1e-5)


def test_sizes_change_from_call_to_call(net: CompiledModel) -> None:
    first = {n: net(*net_inputs(2, n))[0] for n in (40, 3, 17)}
    for n in (17, 40, 3, 17, 3):
        np.testing.assert_array_equal(net(*net_inputs(2, n))[0], first[n])


@pytest.mark.cpu_only("the runtime of the CPU")
def test_what_is_remembered_of_sizes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "_MOST_SITES", 4)
    model = onnxc.compile(parse("(float[N] x) => (float[N] y) { y = Neg(x) }"))
    for n in (*range(20), *range(20)):
        assert model(np.ones(n, np.float32))[0].tolist() == [-1.0] * n
        assert len(model._sites) <= 4
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_input_shapes_fix_dims() -> None:
    model = onnxc.compile(parse(NET), input_shapes={"x": (2, None, 64)})
    assert model.get_inputs()[0].shape == [2, "seq", 64]
    inputs = net_inputs(2, 5)
    np.testing.assert_allclose(model(*inputs)[0], reference(parse(NET), *inputs)[0], 1e-4, 1e-5)
    with pytest.raises(errors.InputError, match="size 2 in dim 0"):
        model(*net_inputs(3, 5))


def test_output_dims_are_named() -> None:
    text = """(float[N, M] x, float[K, M] y) => (float[P, M] z, float[Q] r)
    { z = Concat<axis=0>(x, y) s = Constant<value_ints=[-1]>() r = Reshape(x, s) }"""
    model = onnxc.compile(parse(text))
    z, r = model.get_outputs()
    assert z.shape in (["N + K", "M"], ["K + N", "M"]) and r.shape in (["N*M"], ["M*N"])
    z_, r_ = model(floats(3, 4), floats(2, 4))
    assert z_.shape == (5, 4) and r_.shape == (12,)


CASES = {
    "matmul": (
        "(float[N,M] x, float[K,M] y) => (float[N,K] z) { t = Transpose(y) z = MatMul(x, t) }",
        [((3, 4), (5, 4)), ((1, 1), (1, 1)), ((0, 4), (5, 4)), ((3, 0), (4, 0)), ((70, 33), (45, 33))],
    ),
    "reduce": (
        """(float[N,S] x) => (float[S] z, float[N] m)
        { a = Constant<value_ints=[0]>() b = Constant<value_ints=[1]>()
          z = ReduceSum<keepdims=0>(x, a) m = ReduceSum<keepdims=0>(x, b) }""",
        [((3, 4),), ((0, 4),), ((4, 0),), ((1, 999),), ((999, 1),)],
    ),
    "slice": (
        """(float[N] x) => (float[M] z)
        { s = Constant<value_ints=[0]>() e = Constant<value_ints=[-5]>() z = Slice(x, s, e, s) }""",
        [((8,),), ((3,),), ((0,),)],
    ),
    "reshape": (
        """(float[N,M] x) => (float[P,Q] z)
        { s = Constant<value_ints=[-1, 2]>() r = Reshape(x, s) z = Relu(r) }""",
        [((3, 4),), ((2, 1),), ((0, 2),)],
    ),
    "heads": (
        """(float[B,S,8] x) => (float[B,T,S,4] z)
        { s = Constant<value_ints=[0, 0, 2, 4]>() r = Reshape(x, s) t = Transpose<perm=[0, 2, 1, 3]>(r)
          z = Exp(t) }""",
        [((2, 3, 8),), ((1, 1, 8),)],
    ),
    "quotients": (  # a matrix that is packed at run time, of sizes that are computed
        """(float[1,1,N] x) => (float[1,P,Q] z)
        { a = MaxPool<kernel_shape=[1], strides=[2]>(x) b = MaxPool<kernel_shape=[1], strides=[3]>(x)
          t = Transpose<perm=[0, 2, 1]>(a) z = MatMul(t, b) }""",
        [((1, 1, 1),), ((1, 1, 12),), ((1, 1, 301),)],
    ),
}


@pytest.mark.parametrize(("text", "shapes"), CASES.values(), ids=CASES.keys())
def test_ops_at_many_sizes(text: str, shapes: list[tuple[tuple[int, ...], ...]]) -> None:
    model = onnxc.compile(parse(text))
    for each in shapes:
        inputs = [floats(*s) for s in each]
        for got, want in zip(model(*inputs), reference(parse(text), *inputs), strict=True):
            assert got.shape == want.shape
            np.testing.assert_allclose(got, want, 1e-4, 1e-5)


# ---------------------------------------------------------------- what is refused


def test_equal_names_are_equal_sizes() -> None:
    model = onnxc.compile(parse("(float[N, M] x, float[M] y) => (float[N, M] z) { z = Add(x, y) }"))
    with pytest.raises(errors.InputError) as caught:
        model(floats(2, 3), floats(4))
    for word in ("input 'y'", "size 3 in dim 0 (M)", "as in dim 1 of 'x'", "shape [4] was given"):
        assert word in str(caught.value)
    with pytest.raises(errors.InputError, match="rank 2"):
        model(floats(2), floats(2))


def test_different_names_that_must_agree() -> None:
    model = onnxc.compile(parse("(float[N] x, float[M] y) => (float[N] z) { z = Add(x, y) }"))
    np.testing.assert_array_equal(model(floats(3), floats(3))[0], 2 * floats(3))
    with pytest.raises(errors.SizesError, match="must be equal") as caught:
        model(floats(3), floats(4))
    assert caught.value.node == "n0 Add" and "N = 3, M = 4" in str(caught.value)


def test_open_dims_that_turn_out_to_be_one_are_broadcast(tmp_path: Path) -> None:
    """By a program of their own; a saved model has none."""
    model = onnxc.compile(parse("(float[N] x, float[M] y) => (float[K] z) { z = Add(x, y) }"))
    for n, m in ((3, 1), (1, 3), (3, 3), (1, 1), (2, 1)):
        (z,) = model(floats(n), floats(m))
        np.testing.assert_array_equal(z, floats(n) + floats(m))
    model.save(tmp_path / "m.onnxc")
    with pytest.raises(errors.SizesError, match="N = 3, M = 1"):
        onnxc.load(tmp_path / "m.onnxc")(floats(3), floats(1))


@pytest.mark.parametrize(
    "text",
    [
        "(float[N, K] x, float[L, M] y) => (float[N, M] z) { z = MatMul(x, y) }",
        "(float[N, K] x, float[L, M] y) => (float[P, K] z) { z = Concat<axis=0>(x, y) }",
        "(float[N, K] x, float[L, M] y) => (float[N, K] z) { z = Where(c, x, y) c = Less(x, y) }",
    ],
    ids=["matmul", "concat", "where"],
)
def test_sizes_that_do_not_fit(text: str) -> None:
    if "Where" in text:
        text = text.replace("{ z = Where(c, x, y) c = Less(x, y) }", "{ c = Less(x, y) z = Where(c, x, y) }")
    model = onnxc.compile(parse(text))
    with pytest.raises(errors.InputError, match="must be equal"):
        model(floats(3, 4), floats(5, 6))


def test_reshape_that_does_not_fit() -> None:
    model = onnxc.compile(
        parse("(float[N] x) => (float[M, 4] z) { s = Constant<value_ints=[-1, 4]>() z = Reshape(x, s) }")
    )
    assert model(floats(8))[0].shape == (2, 4)
    with pytest.raises(errors.InputError, match="must be equal"):
        model(floats(9))


def test_reshape_to_a_size_that_is_computed_to_be_zero() -> None:
    """Where 0 turns up at run time it copies the input's dim, as where it is written down."""
    model = onnxc.compile(
        parse("""(float[N, 4] x, float[M] t) => (float[A, B] y, float[C, D] z) {
      three = Constant<value_ints = [3]>() left = Constant<value_ints = [-1]>() four = Constant<value_ints = [4]>()
      size = Shape(t) less = Sub(size, three)
      s = Concat<axis = 0>(less, left) y = Reshape(x, s)
      r = Concat<axis = 0>(less, four) z = Reshape(x, r) }""")
    )
    for m in (5, 3):
        for found in model(x := floats(2, 4), floats(m)).values():
            np.testing.assert_array_equal(found, x)


def test_pads_that_cut_more_than_there_is() -> None:
    """An end may cut off what the other one adds; what is not there at all is an error."""
    model = onnxc.compile(
        parse("""(float[N] x) => (float[A] y, float[B] z) {
      p = Constant<value_ints = [-5, 2]>() q = Constant<value_ints = [2, -5]>()
      y = Pad(x, p) z = Pad(x, q) }""")
    )
    for n in (9, 4, 3):
        x = floats(n)
        assert [*model(x)[0]] == [*x, 0, 0][5:] and [*model(x)[1]] == [0, 0, *x][: n - 3]
    with pytest.raises(errors.InputError, match=r"negative size.*Pad"):
        model(floats(2))
    given = onnxc.compile(parse("(float[N] x, int64[2] p) => (float[A] y) { y = Pad(x, p) }"))
    x = floats(4)
    for pads, wanted in (((-5, 2), [*x, 0, 0][5:]), ((2, -6), []), ((-2, -2), [])):
        assert [*given(x, np.array(pads))[0]] == wanted
    for wrong in ((-5, 0), (-(2**63), 0), (-(2**62), -(2**62)), (1, -6)):
        with pytest.raises(errors.RunError, match="more is cut off than there is"):
            given(x, np.array(wrong))
    for pads, mode in (("-3, -2", "constant"), ("-5, 2", "edge")):
        text = f"(float[4] x) => (float[A] y) {{ p = Constant<value_ints=[{pads}]>() y = Pad<mode='{mode}'>(x, p) }}"
        with pytest.raises(errors.ShapeError, match=r"too much.*Pad"):
            onnxc.compile(parse(text.replace("'", '"')))


def test_window_larger_than_the_input() -> None:
    model = onnxc.compile(
        parse("(float[1, 1, H, W] x) => (float[1, 1, P, Q] z) { z = MaxPool<kernel_shape=[3, 3]>(x) }")
    )
    x = floats(1, 1, 5, 4)
    assert model(x)[0].shape == (1, 1, 3, 2)
    with pytest.raises(errors.InputError, match="negative size"):
        model(floats(1, 1, 5, 1))


def test_places_among_no_elements() -> None:
    """There is none: an error, unless none is asked for. Hardmax of nothing is nothing."""
    model = onnxc.compile(parse("""(float[N, M] x) => (int64[P, Q] y, float[N, M] z) {
      y = ArgMin <axis = 1> (x) z = Hardmax(x) }"""))  # fmt: skip
    for columns in (0, 3):
        assert [y.shape for y in model(floats(0, columns)).values()] == [(0, 1), (0, columns)]
    with pytest.raises(errors.InputError, match=r"fewer elements than are read.*ArgMin"):
        model(floats(2, 0))
    with pytest.raises(errors.ShapeError, match=r"no elements.*ArgMax"):
        onnxc.compile(parse("(float[2, 0] x) => (int64[P, Q] y) { y = ArgMax <axis = 1> (x) }"))
    hardmax = decompose(onnx_file.load(parse("(float[2, N] x) => (float[2, N] y) { y = Hardmax(x) }")))
    assert interpret(hardmax, [floats(2, 0)])[0].shape == (2, 0)


def test_pools_that_round_up_one_after_another() -> None:
    pools = "".join(
        f"y{k + 1} = MaxPool<kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1, pads=[{p}, {p}, {p}, {p}]>(y{k}) "
        for k, p in enumerate([0, 1, 0, 0, 1])
    )
    text = f"(float[1, 1, H, W] y0) => (float[1, 1, P, Q] y5) {{ {pools} }}"
    model = onnxc.compile(parse(text))
    for sizes in ((65, 64), (33, 47), (90, 34)):
        x = floats(1, 1, *sizes)
        np.testing.assert_array_equal(model(x)[0], reference(parse(text), x)[0])


@pytest.mark.cpu_only("the source of the CPU")
def test_lanes_that_divide_often_are_not_written_out() -> None:
    """A copy of such an address for each lane, in each piece of a Concat, took g++ minutes."""
    text = """(float[n, h, w, 3] x, float[n, u, v, 3] z) => (float[s] y)
<int64[2] rows = {6, 24}, int64[2] few = {6, 7}, int64[1] first = {0}> {
  t = Transpose <perm = [0, 3, 1, 2]> (x)
  s = Transpose <perm = [0, 3, 1, 2]> (z)
  a = Reshape(t, rows)
  b = Reshape(s, few)
  c = Concat <axis = 1> (a, b)
  y = ReduceMax <keepdims = 0> (c, first)
}"""
    model = onnxc.compile(parse(text))
    assert "lane_by_lane<" in model.source and "some_lanes<" not in model.source
    for h, w, u, v in ((4, 6, 7, 1), (12, 2, 1, 7)):
        given = floats(2, h, w, 3), floats(2, u, v, 3)
        np.testing.assert_array_equal(model(*given)[0], reference(parse(text), *given)[0])


def test_a_failed_call_changes_nothing(net: CompiledModel) -> None:
    good = net_inputs(2, 5)
    want = net(*good)[0]
    with pytest.raises(errors.InputError):
        net(floats(2, 5, 63), *good[1:])
    np.testing.assert_array_equal(net(*good)[0], want)


def test_saved_dynamic_model(net: CompiledModel, tmp_path: Path) -> None:
    net.save(tmp_path / "net.onnxc")
    again = onnxc.load(tmp_path / "net.onnxc")
    for sizes in ((1, 9), (2, 50)):
        np.testing.assert_array_equal(again(*net_inputs(*sizes))[0], net(*net_inputs(*sizes))[0])


HALVED = """(float[b, 3, h, w] x) => (float[b, N] y)
    <int64 one = {1}, int64 two = {2}, int64[1] first = {0}, int64[1] all = {-1}> {
    c = MaxPool<kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]>(x) s = Shape(x)
    h0 = Gather(s, two) h1 = Sub(h0, one) h2 = Div(h1, two) h3 = Add(h2, one)
    three = Add(two, one) w0 = Gather(s, three) w1 = Sub(w0, one) w2 = Div(w1, two) w3 = Add(w2, one)
    n = Mul(h3, w3) m = Mul(n, three) b0 = Gather(s, first) m1 = Reshape(m, all)
    to = Concat<axis = 0>(b0, m1) f = Reshape(c, to) y = Relu(f) }"""


def remainders(run: CompiledModel) -> set[str]:
    """What the program begins with where it takes remainders."""
    return {text for source in run.explain().sources.values() for text in re.findall(r"ox_mod\(.{8}", source)}


def test_sizes_that_a_model_computes_are_those_that_there_are() -> None:
    """As PyTorch's exporter has them, (h - 1) / 2 + 1, where a convolution's are (h + 1) / 2: kernels took them for
    two sizes, and divided by each to find an element (a detector of open height and width took twice the time).
    """
    model = parse(HALVED, 18)
    run = onnxc.compile(model)
    for shape in ((1, 3, 1, 1), (2, 3, 7, 4), (1, 3, 40, 33)):
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        np.testing.assert_array_equal(run(x)["y"], reference(model, x)[0])
    assert not remainders(run)
    with pytest.raises(errors.InputError, match="Reshape"):
        run(np.zeros((1, 3, 0, 5), np.float32))  # as a model has it, 0 / 2 + 1 rows


CEILED = """(float[b, 3, h, w] x) => (float[b, 3, H, W] y) {
    p = MaxPool<kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1>(x)
    q = MaxPool<kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1>(p)
    r = MaxPool<kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1>(q)
    y = MaxPool<kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1>(r) }"""


def test_pools_that_round_up_follow_each_other() -> None:
    """The size of each was an expression with several copies of that before it, and too long with the third."""
    model = parse(CEILED, 18)
    run = onnxc.compile(model)
    for shape in ((1, 3, 31, 32), (2, 3, 40, 57), (1, 3, 33, 34)):
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        np.testing.assert_array_equal(run(x)["y"], reference(model, x)[0])


@pytest.mark.parametrize("split", ["Constant<value_ints = [1, 2]>()", "Identity(s)", ""])
def test_parts_of_an_axis_that_do_not_make_it(split: str) -> None:
    """What they left over of an open axis was cut off; and so was an odd element of two equal parts."""
    text = f"(float[n] x, int64[k] s) => (float[a] y, float[c] z) {{ {f't = {split}' if split else ''} "
    model = onnxc.compile(parse(f"{text} y, z = Split({'x, t' if split else 'x'}) }}", 13))
    parts = model(floats(3 if split else 4), np.array([1, 2]))
    assert [v.size for v in parts.values()] == ([1, 2] if split else [2, 2])
    with pytest.raises(errors.InputError, match=r"must be equal .*Split"):
        model(floats(7), np.array([1, 2]))


@pytest.mark.parametrize("sizes", ["H, W", "1, 40"])
def test_pools_that_round_up_to_no_window(sizes: str) -> None:
    """ceil((1 - 3) / 2 + 1) is 0. With windows shorter than strides, a size had minimums and maximums of all before."""
    sparse = "".join(
        f"y{k + 1} = MaxPool<kernel_shape = [2, 3], strides = [3, 4], ceil_mode = 1>(y{k}) " for k in range(4)
    )
    text = f"""(float[2, {sizes}] x) => (float[2, P, Q] y, float[2, 1, R, S] y4) {{
      c = Constant<value_ints = [1]>() y0 = Unsqueeze(x, c) y5 = MaxPool<kernel_shape = [3, 3], strides = [2, 2],
      ceil_mode = 1>(y0) y = Squeeze(y5, c) {sparse} }}"""
    model = onnxc.compile(parse(text, 18))
    x = floats(2, 1, 40)
    want = reference(parse(text, 18), x)
    assert want[0].shape == (2, 0, 20)
    for got, expected in zip(model.run(None, {"x": x}), want, strict=True):
        np.testing.assert_array_equal(got, expected)


SPLIT_IN_TWO = """(float[b, 8, h, w] x) => (float[b, 8, H, W] y)
    <int64 one = {1}, int64 two = {2}, int64[1] first = {0}, int64[1] all = {-1}, int64[2] parts = {2, 4},
     int64[1] e = {8}> {
    c = MaxPool<kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]>(x) s = Shape(x)
    h0 = Gather(s, two) h1 = Sub(h0, one) h2 = Div(h1, two) h3 = Add(h2, one) h4 = Reshape(h3, all)
    three = Add(two, one) w0 = Gather(s, three) w1 = Sub(w0, one) w2 = Div(w1, two) w3 = Add(w2, one)
    w4 = Reshape(w3, all) b0 = Gather(s, first) t = Concat<axis = 0>(b0, parts, h4, w4) r = Reshape(c, t)
    u = Transpose<perm = [0, 2, 1, 3, 4]>(r) v = Concat<axis = 0>(b0, e, h4, w4) y = Reshape(u, v) }"""


def test_channels_are_shuffled_without_divisions_by_sizes() -> None:
    """Two computed sizes stand for those of the image; a product of them would not say which is which."""
    model = parse(SPLIT_IN_TWO, 18)
    run = onnxc.compile(model)
    for shape in ((1, 8, 5, 6), (3, 8, 1, 9)):
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        np.testing.assert_array_equal(run(x)["y"], reference(model, x)[0])
    assert all(re.fullmatch(r"ox_mod\(l\d, 2\).*", text) for text in remainders(run))


@pytest.mark.cpu_only("what C++ kernels are given")
def test_weights_say_how_long_a_sum_is() -> None:
    """An image of open sizes, flattened, meets constant weights: these are packed once, and a run checks the sizes."""
    model = parse("(float[b, 8, h, width] x) => (float[b, 20] y) { f = Flatten(x) y = MatMul(f, w) }", 18)
    model.graph.initializer.append(numpy_helper.from_array(floats(96, 20), "w"))
    run = onnxc.compile(model)
    x = floats(3, 8, 4, 3)
    np.testing.assert_allclose(run(x)["y"], reference(model, x)[0], 1e-5, 1e-5)
    assert any(", 20, 96, " in source for source in run.explain().sources.values())
    with pytest.raises(errors.InputError, match="MatMul"):
        run(floats(3, 8, 4, 4))


# What a reshape to m - 1 rows becomes, of which a program has as many as its operand: (inputs, initializers, nodes).
COMPUTED = {
    "attention": (
        "float[n, 8, 16] x, float[n, 16, 8] k, float[m] z", "int64[2] rest = {8, 8}",
        "p = MatMul(x, k) r = Reshape(p, to) q = Softmax<axis = -1>(r) y = MatMul(q, x)",
    ),
    "integers": (
        "uint8[n, 8, 16] x, float[m] z", "int64[2] rest = {8, 16}, float c = {0.5}, uint8 o = {3}",
        "f = DequantizeLinear(x, c, o) r = Reshape(f, to) y = QuantizeLinear(r, c, o)",
    ),
    "a size that a run tells": (
        "float[n, 8, 16] x, float[m] z", "int64[2] rest = {8, 16}", "r = Reshape(x, to) y = Relu(r)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", COMPUTED)
def test_computed_sizes_are_compared_whatever_becomes_of_the_reshape(kind: str) -> None:
    """Nothing compared them where a pass took the reshape away; a size that nothing else needed ended in a KeyError."""
    inputs, initializers, nodes = COMPUTED[kind]
    seen = "c = NonZero(z) s = Shape<start = 1>(c)" if kind == "a size that a run tells" else "s = Shape(z)"
    result = "uint8" if kind == "integers" else "float"
    model = parse(
        f"({inputs}) => ({result}[A, 8, 16] y) <int64[1] one = {{1}}, {initializers}>"
        f"{{ {seen} m = Sub(s, one) to = Concat<axis = 0>(m, rest) {nodes} }}"
    )
    run = onnxc.compile(model)

    def data(n: int, m: int) -> list[np.ndarray]:
        shapes = [(n, 8, 16), *([(n, 16, 8)] if kind == "attention" else ())]
        rng = np.random.default_rng(n)
        arrays = [rng.integers(0, 3, s).astype(np.uint8 if kind == "integers" else np.float32) for s in shapes]
        return [*arrays, np.ones(m, np.float32)]

    for n in (3, 1, 0):
        found, wanted = run(*data(n, n + 1))["y"], reference(model, *data(n, n + 1))[0]
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for n, m in ((3, 5), (3, 3), (0, 2)):
        with pytest.raises(errors.InputError, match="Reshape"):
            run(*data(n, m))


def test_a_size_over_one_that_may_be_nothing() -> None:
    """What algorithms of convolutions are chosen by was computed for a width of 224, which leaves nothing here."""
    text = """(float[1, 3, h, w] x, float[8, 3, 3, 3] f) => (float[1, 8, H, W] y)
        <int64[1] from = {224}, int64[1] to = {100000}, int64[1] last = {3}, int64[3] lead = {1, 3, -1}> {
        c = Slice(x, from, to, last) s = Shape<start = 3>(c) t = Concat<axis = 0>(lead, s) r = Reshape(x, t)
        y = Conv<pads = [1, 1, 1, 1]>(r, f) }"""
    model = parse(text)
    weights = np.random.default_rng(0).standard_normal((8, 3, 3, 3)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "f"))
    del model.graph.input[1]
    x = np.random.default_rng(1).standard_normal((1, 3, 4, 256)).astype(np.float32)
    np.testing.assert_allclose(onnxc.compile(model)(x)["y"], reference(model, x)[0], rtol=1e-4, atol=1e-4)
