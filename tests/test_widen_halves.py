"""Halves on the CPU: computed in float32, rounded where a model can tell."""

from __future__ import annotations

import numpy as np
import onnx.numpy_helper
import onnx.parser
import pytest

import onnxc
from onnxc.frontends import onnx_file
from onnxc.ir import dtypes
from onnxc.ir.graph import Graph
from onnxc.passes.decompose import decompose
from onnxc.passes.widen_halves import KEPT, widen_halves
from onnxc.primitives.interpret import interpret
from onnxc.primitives.verify import verify
from tests.small_models import Array

HEAD = '<ir_version: 9, opset_import: ["" : 20]>\n'
HALVES = [("float16", np.float16), ("bfloat16", dtypes.bfloat16.numpy)]


def widened(text: str) -> Graph:
    graph = widen_halves(decompose(onnx_file.load(onnx.parser.parse_model(HEAD + text))))
    verify(graph, "widen-halves")
    return graph


def halves(rng: np.random.Generator, dtype: object, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


@pytest.mark.parametrize(("name", "dtype"), HALVES)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (7, 17, 5), (13, 1, 31)])
def test_a_chain_is_rounded_once(name: str, dtype: object, sizes: tuple[int, int, int]) -> None:
    """Against float64, rounded at the end: nothing is lost in between."""
    m, k, n = sizes
    text = f"""g ({name}[{m}, {k}] x, {name}[{k}, {n}] w, {name}[{n}] c) => ({name}[{m}, {n}] y) {{
      p = MatMul(x, w)
      q = Add(p, c)
      r = Tanh(q)
      y = Mul(r, q)
    }}"""
    rng = np.random.default_rng(0)
    x, w, c = halves(rng, dtype, m, k), halves(rng, dtype, k, n), halves(rng, dtype, n)
    (y,) = onnxc.compile(onnx.parser.parse_model(HEAD + text))(x, w, c)
    q = x.astype(np.float64) @ w.astype(np.float64) + c.astype(np.float64)
    wanted = np.tanh(q) * q
    unit = np.abs(wanted) * float(np.finfo(np.float16).eps if name == "float16" else 2.0**-7)
    assert y.dtype == dtype
    assert (np.abs(y.astype(np.float64) - wanted) <= 0.505 * unit + 1e-7).all()


@pytest.mark.parametrize(("name", "dtype"), HALVES)
def test_constants_are_computed_as_inputs_are(name: str, dtype: object) -> None:
    """What is known at compile time is rounded at the same places: once."""
    x = np.array([5188, -6.08, -4.1, -2.6, 0.3, 7]).astype(dtype)
    scale, zero = np.array(0.37).astype(dtype), np.array(3, np.int16)
    text = f"""g ({name}[6] x, {name} s, int16 z) => ({name}[6] a, {name}[6] b, int16[6] c) {{
      a = Softplus(x)
      b = Gelu(x)
      c = QuantizeLinear(x, s, z)
    }}"""
    model = onnx.parser.parse_model(HEAD.replace("9", "10").replace("20", "21") + text)
    given = onnxc.compile(model)(x, scale, zero)
    folded = onnx.ModelProto.FromString(model.SerializeToString())
    arrays = {"x": x, "s": scale, "z": zero}
    folded.graph.initializer.extend(onnx.numpy_helper.from_array(a, k) for k, a in arrays.items())
    del folded.graph.input[:]
    unit = 2.0**-10 if name == "float16" else 2.0**-7
    for key, y in onnxc.compile(folded)().items():
        np.testing.assert_allclose(y.astype(np.float64), given[key].astype(np.float64), unit if key != "c" else 0)


def test_what_overflows_in_between_does_not() -> None:
    text = """g (float16[4] x) => (float16[4] y) {
      s = Mul(x, x)
      y = Sqrt(s)
    }"""
    x = np.array([300, -1000, 60000, 2], np.float16)
    (y,) = onnxc.compile(onnx.parser.parse_model(HEAD + text))(x)
    np.testing.assert_array_equal(y, np.abs(x))


@pytest.mark.parametrize(("name", "dtype"), HALVES)
def test_a_cast_by_name_rounds(name: str, dtype: object) -> None:
    number = {"float16": 10, "bfloat16": 16}[name]
    text = f"""g (float[257] x) => (float[257] y) {{
      h = Cast<to = {number}>(x)
      s = Add(h, h)
      y = Cast<to = 1>(s)
    }}"""
    x = np.random.default_rng(1).standard_normal(257).astype(np.float32)
    (y,) = onnxc.compile(onnx.parser.parse_model(HEAD + text))(x)
    np.testing.assert_array_equal(y, (x.astype(dtype) * np.asarray(2, dtype)).astype(np.float32))


def test_steps_see_rounded_values() -> None:
    """A sum that is no half is one before it is compared, rounded or looked for: so ties stay ties."""
    text = """g (float16[3] x, float16[3] d) => (bool[3] e, float16[3] f, int64[1] a, int64[3] i) {
      s = Add(x, d)
      e = Equal(s, x)
      f = Floor(s)
      a = ArgMax<axis = 0>(s)
      i = Cast<to = 7>(s)
    }"""
    x, d = np.array([2047, 2048, 2048], np.float16), np.array([0.75, 0.75, 0.5], np.float16)
    e, f, a, i = onnxc.compile(onnx.parser.parse_model(HEAD + text))(x, d)
    s = x + d
    np.testing.assert_array_equal(e, s == x)
    np.testing.assert_array_equal(f, np.floor(s))
    assert a == np.argmax(s)
    np.testing.assert_array_equal(i, s.astype(np.int64))


def test_tables_and_outputs_stay_halves() -> None:
    text = """g (float16[16, 8] t, int64[3] i) => (float16[3, 8] y) {
      r = Gather(t, i)
      y = Exp(r)
    }"""
    graph = widened(text)
    (gather,) = [n for n in graph.nodes if n.op == "gather"]
    assert gather.output.dtype is dtypes.float16
    assert [v.dtype for v in graph.outputs] == [dtypes.float16]
    table = np.random.default_rng(3).standard_normal((16, 8)).astype(np.float16)
    (y,) = interpret(graph, [table, np.array([0, 3, 5])])
    np.testing.assert_array_equal(y, np.exp(table[[0, 3, 5]].astype(np.float32)).astype(np.float16))


def test_regions_keep_halves_at_their_ends() -> None:
    text = """g (float16[5] x) => (float16[5] y) {
      n = Constant<value = int64 {3}>()
      go = Constant<value = bool {1}>()
      y = Loop(n, go, x) <body = b (int64 k, bool c, float16[5] v) => (bool d, float16[5] w) {
        d = Identity(c)
        t = Exp(v)
        w = Tanh(t)
      }>
    }"""
    graph = widened(text)
    (scan,) = [n for n in graph.nodes if n.op == "scan"]
    assert {v.dtype for v in scan.regions[0].outputs} == {dtypes.float16}
    assert {n.output.dtype for n in scan.regions[0].nodes if n.op in ("exp", "tanh")} == {dtypes.float32}


def test_halves_that_were_chosen_stay() -> None:
    graph = decompose(
        onnx_file.load(onnx.parser.parse_model(HEAD + "g (float16[4] x) => (float16[4] y) { y = Exp(x) }"))
    )
    graph.metadata[KEPT] = True
    assert widen_halves(graph) is graph
