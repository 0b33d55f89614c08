"""Derivatives of If, and of Loop and Scan as ONNX has them, against differences of the compiled model."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

import onnxc
from onnxc.errors import UnsupportedError
from onnxc.frontends import onnx_file
from onnxc.gradient import differentiate
from tests import staging_harness
from tests.small_models import Array, floats

HEAD = '<ir_version: 9, opset_import: ["" : 20]>\n'
EPS = 1e-6


def check(text: str, inputs: dict[str, Array], wrt: list[str]) -> None:
    """The gradient of the output `loss`, in float64, against central differences."""
    model = onnx.parser.parse_model(HEAD + text)
    forward = onnxc.compile(model)
    found = onnxc.compile(differentiate(onnx_file.load(model), "loss", wrt))(**inputs)
    for name in wrt:
        wanted = np.zeros_like(inputs[name])
        for at in np.ndindex(wanted.shape):
            ends = []
            for sign in (1, -1):
                moved = {**inputs, name: inputs[name].copy()}
                moved[name][at] += sign * EPS
                ends.append(forward(**moved)["loss"])
            wanted[at] = (ends[0] - ends[1]) / (2 * EPS)
        np.testing.assert_allclose(found[f"{name}_grad"], wanted, rtol=1e-6, atol=1e-8)


BRANCHES = """g (double[2, 3] x, double[3] w, bool c) => (double loss) {
  h = Exp(x)
  y = If(c) <
    then_branch = t () => (double[2, M] a) { a0 = Mul(h, w)  a = Concat<axis = 1>(a0, h, a0) },
    else_branch = e () => (double[2, K] b) { b = Mul(h, h) }>
  z = Mul(y, y)
  loss = ReduceSum<keepdims = 0>(z)
}"""


@pytest.mark.parametrize("flag", [True, False])
def test_the_branch_that_ran(flag: bool) -> None:
    rng = np.random.default_rng(0)
    check(BRANCHES, {"x": rng.random((2, 3)), "w": rng.random(3), "c": np.array(flag)}, ["x", "w"])


def test_an_if_inside_of_an_if() -> None:
    text = """g (double[3] x, bool c, bool d) => (double loss) {
      y = If(c) <
        then_branch = t () => (double[3] a) {
          a = If(d) <
            then_branch = t2 () => (double[3] a2) { a2 = Sin(x) },
            else_branch = e2 () => (double[3] b2) { b2 = Mul(x, x) }>
        },
        else_branch = e () => (double[3] b) { b = Identity(x) }>
      z = Mul(y, x)
      loss = ReduceSum<keepdims = 0>(z)
    }"""
    x = np.random.default_rng(1).random(3)
    for c in (True, False):
        for d in (True, False):
            check(text, {"x": x, "c": np.array(c), "d": np.array(d)}, ["x"])


def test_loop_and_scan() -> None:
    text = """g (double[2] x, double[3, 2] q) => (double loss) {
      last, rows = Scan<num_scan_inputs = 1, body = b (double[2] s, double[2] e) => (double[2] so, double[2] o) {
        so = Mul(s, e)
        o = Exp(so)
      }>(x, q)
      go = Constant<value = bool {1}>()
      n = Constant<value = int64 {4}>()
      z = Loop(n, go, last) <body = b2 (int64 i, bool ci, double[2] v) => (bool co, double[2] vo) {
        co = Identity(ci)
        vo = Sin(v)
      }>
      r = ReduceSum<keepdims = 0>(rows)
      t = ReduceSum<keepdims = 0>(z)
      loss = Add(r, t)
    }"""
    rng = np.random.default_rng(2)
    check(text, {"x": rng.random(2), "q": rng.random((3, 2))}, ["x", "q"])


WHILE = """g (double[2] x, double[2] w) => (double loss) {
  go = Constant<value = bool {1}>()
  z = Loop(, go, x) <body = b2 (int64 i, bool ci, double[2] v) => (bool co, double[2] vo) {
    u = Mul(v, w)
    t = Exp(u)
    vo = Add(v, t)
    MORE
  }>
  loss = ReduceSum<keepdims = 0>(z)
}""".replace("MORE", staging_harness.goes_on("co", "ReduceMax", "vo", 10.0))
COUNTED = """g (double[2] x, double[2] w, int64 n) => (double loss) {
  go = Constant<value = bool {1}>()
  z, r = Loop(n, go, x) <body = b2 (int64 i, bool ci, double[2] v) => (bool co, double[2] vo, double[2] q) {
    co = Identity(ci)
    f = Cast<to = 11>(i)
    a = Mul(v, w)
    vo = Sin(a)
    q = Mul(vo, f)
  }>
  z2 = ReduceSum<keepdims = 0>(z)
  r2 = ReduceSum<keepdims = 0>(r)
  loss = Add(z2, r2)
}"""
NESTED = """g (double[3] x, double[3] w, int64 n, double[3] far) => (double loss) {
  go = Constant<value = bool {1}>()
  z, rows = Loop(n, go, x) <body = b2 (int64 i, bool ci, double[3] v) => (bool co, double[3] vo, double[3] row) {
    s = ReduceSum<keepdims = 0>(v)
    limit = Constant<value = double {1.5}>()
    c = Less(s, limit)
    y = If(c) <
      then_branch = t () => (double[3] a) { a = Mul(v, w) },
      else_branch = e () => (double[3] b) { b = Sin(v) }>
    one = Constant<value = bool {1}>()
    q = Loop(, one, y) <body = b3 (int64 j, bool cj, double[3] p) => (bool ck, double[3] po) {
      po0 = Mul(p, far)
      po = Add(po0, w)
      INNER
    }>
    vo = Tanh(q)
    row = Mul(q, v)
    OUTER
  }>
  z2 = ReduceSum<keepdims = 0>(z)
  r2 = ReduceSum<keepdims = 0>(rows)
  loss = Add(z2, r2)
}""".replace("INNER", staging_harness.goes_on("ck", "ReduceSum", "po", 6.0)).replace(
    "OUTER", staging_harness.goes_on("co", "ReduceSum", "q", 100.0)
)


@pytest.mark.parametrize("start", [0.1, 3.0, 11.0])  # 7, 2 and 1 iterations
def test_a_loop_that_data_ends(start: float) -> None:
    rng = np.random.default_rng(3)
    check(WHILE, {"x": rng.random(2) + start, "w": rng.random(2) / 2}, ["x", "w"])


@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_loop_as_often_as_data_says(count: int) -> None:
    rng = np.random.default_rng(4)
    check(COUNTED, {"x": rng.random(2), "w": rng.random(2), "n": np.array(count)}, ["x", "w"])
    inputs = {"x": rng.random(3), "w": rng.random(3), "n": np.array(count), "far": 1 + rng.random(3)}
    check(NESTED, inputs, ["x", "w", "far"])


@pytest.mark.parametrize(("text", "wrt"), [(WHILE, ["x", "w"]), (NESTED, ["x", "w", "far"])])
def test_the_graph_is_one_that_onnxruntime_runs(text: str, wrt: list[str]) -> None:
    rng = np.random.default_rng(5)
    model = onnx.parser.parse_model(HEAD + text)
    inputs = {"x": rng.random(3), "w": rng.random(3), "n": np.array(3), "far": 1 + rng.random(3)}
    if text is WHILE:
        inputs = {"x": rng.random(2), "w": rng.random(2)}
    gradient = onnxc.backward(model, "loss", wrt)
    assert gradient is not None
    wanted = staging_harness.runtime(gradient).run(None, inputs)
    for name, x, y in zip(
        [o.name for o in gradient.graph.output], wanted, onnxc.compile(gradient)(**inputs), strict=True
    ):
        np.testing.assert_allclose(y, x, rtol=1e-9, err_msg=name)


def test_a_recurrence_inside_of_an_if() -> None:
    text = """g (double[3, 2, 3] x, double[1, 16, 3] w, double[1, 16, 4] r, bool c) => (double loss) {
      one = Constant<value = double {1.0}>()
      h = If(c) <
        then_branch = t () => (double[1, 2, 4] a) { all, a, last = LSTM<hidden_size = 4>(x, w, r) },
        else_branch = e () => (double[1, 2, 4] b) { all2, b = RNN<hidden_size = 4>(x, w4, r4) }>
      z = Mul(h, h)
      loss = ReduceSum<keepdims = 0>(z)
    }""".replace(
        "one = Constant<value = double {1.0}>()",
        """
      axis = Constant<value_ints = [1]>()
      zero = Constant<value_ints = [0]>()
      four = Constant<value_ints = [4]>()
      w4 = Slice(w, zero, four, axis)
      r4 = Slice(r, zero, four, axis)""",
    )
    rng = np.random.default_rng(6)
    for c in (True, False):
        inputs = {"x": rng.random((3, 2, 3)), "w": rng.random((1, 16, 3)), "r": rng.random((1, 16, 4))}
        check(text, {**inputs, "c": np.array(c)}, ["x", "w", "r"])


def test_sizes_that_are_data() -> None:
    text = """g (double[4] x) => (double loss) {
      half = Constant<value = double {0.5}>()
      large = Greater(x, half)
      places = NonZero(large)
      rows = Transpose(places)
      some = GatherND(x, rows)
      z = Mul(some, some)
      loss = ReduceMean<keepdims = 0>(z)
    }"""
    check(text, {"x": np.array([0.1, 0.7, 0.9, 0.3])}, ["x"])


def test_the_backward_pass_has_the_mask_of_the_branch_and_of_each_iteration() -> None:
    text = """g (float[3, 4] x, float[4] w, bool c, int64 n) => (float loss, float[3, 4] y) {
      half = Constant<value = float {0.5}>()
      on = Constant<value = bool {1}>()
      y0 = If(c) <
        then_branch = t () => (float[3, 4] a) { a0 = Mul(x, w)  a = Dropout(a0, half, on) },
        else_branch = e () => (float[3, 4] b) { b0 = Mul(w, x)  b1 = Dropout(b0, half, on)  b = Identity(b1) }>
      y = Loop(n, on, y0) <body = b2 (int64 i, bool ci, float[3, 4] v) => (bool co, float[3, 4] vo) {
        fifth = Constant<value = float {0.2}>()
        vo = Dropout(v, fifth, on)
        m = ReduceMax<keepdims = 0>(vo)
        limit = Constant<value = float {1000.0}>()
        co = Less(m, limit)
      }>
      loss = ReduceSum<keepdims = 0>(y)
    }"""
    graph = differentiate(onnx_file.load(onnx.parser.parse_model(HEAD + text)), "loss", ["w"])
    gradient = onnxc.compile(graph, seed=3)
    x, w = floats(3, 4) + 2, floats(4, seed=1) + 2
    for c in (True, False):
        for n in (0, 2):
            out = gradient(x=x, w=w, c=np.array(c), n=np.array(n))
            assert 0 < np.mean(out["y"] == 0) < 1
            np.testing.assert_allclose(out["w_grad"], (out["y"] / w).sum(0), rtol=1e-5)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "vo = Concat<axis = 0>(v, x)",
            r"changes its shape.*value 0 of n2 Loop is float64\[s0\], and float64\[s0 \+ 2\]",
        ),
        ("e = Exp(v)  s = SequenceConstruct(e, x)  vo = ConcatFromSequence<axis = 0>(s)", "changes its shape"),
    ],
)
def test_what_has_no_derivative_says_so(body: str, message: str) -> None:
    text = f"""g (double[2] x, int64 n) => (double loss) {{
      on = Constant<value = bool {{1}}>()
      x0 = Exp(x)
      z = Loop(n, on, x0) <body = b (int64 i, bool ci, v) => (bool co, vo) {{ {body}  co = Identity(ci) }}>
      loss = ReduceSum<keepdims = 0>(z)
    }}"""
    with pytest.raises(UnsupportedError, match=message):
        differentiate(onnx_file.load(onnx.parser.parse_model(HEAD + text)), "loss", ["x"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("y = Reshape(x, sizes)  z = Mul(y, y)  loss = ReduceSum<keepdims = 0>(z)", "known to a run alone.*n0 Reshape"),
        (
            """s = SequenceEmpty<dtype = 11>()  on = Constant<value = bool {1}>()
            n = ReduceSum<keepdims = 0>(sizes)
            q = Loop(n, on, s) <body = b (int64 i, bool ci, v) => (bool co, vo) {
              at = Constant<value = int64 {0}>()
              e = Exp(x)  vo = SequenceInsert(v, e, at)  co = Identity(ci) }>
            z = ConcatFromSequence<axis = 0>(q)  loss = ReduceSum<keepdims = 0>(z)""",
            "sequence_concat has no derivative, which n4 ConcatFromSequence needs",
        ),
    ],
)
def test_what_only_a_run_can_build_says_so(text: str, message: str) -> None:
    model = onnx.parser.parse_model(HEAD + f"g (double[4] x, int64[m] sizes) => (double loss) {{ {text} }}")
    with pytest.raises(UnsupportedError, match=message):
        differentiate(onnx_file.load(model), "loss", ["x"])


@pytest.mark.parametrize("position", [0, 1, -1])
def test_one_of_a_sequence_at_a_place_that_is_data(position: int) -> None:
    text = """g (double[4] x, int64 n) => (double loss) {
      a = Sin(x)  b = Exp(x)  s = SequenceConstruct(x, a, b)  v = SequenceAt(s, n)
      y = Mul(v, v)  loss = ReduceSum<keepdims = 0>(y) }"""
    check(text, {"x": np.random.default_rng(0).random(4), "n": np.array(position)}, ["x"])


def test_what_a_loop_appends() -> None:
    """Tensors of one shape: the sequence is one tensor."""
    text = """g (double[4] x, int64 n) => (double loss) {
      s = SequenceEmpty<dtype = 11>()  on = Constant<value = bool {1}>()
      q, last = Loop(n, on, s, x) <body = b (int64 i, bool ci, v, double[4] u) => (bool co, vo, double[4] uo) {
        uo = Sin(u)  vo = SequenceInsert(v, uo)  co = Identity(ci) }>
      z = ConcatFromSequence<axis = 0>(q)  y = Mul(z, z)  loss = ReduceSum<keepdims = 0>(y) }"""
    check(text, {"x": np.random.default_rng(0).random(4), "n": np.array(3)}, ["x"])
