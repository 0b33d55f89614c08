"""Models with a planted fault: a correct text, what is replaced in it, and the first tensor that goes wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from tests.small_models import floats, parse

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Fault:
    """A model in which `right` stands once; with `wrong` in its place, `tensor` is the first that differs."""

    name: str
    text: str
    right: str
    wrong: str
    tensor: str
    engine: str = "onnxruntime"

    def models(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """The correct and the faulty one."""
        assert self.text.count(self.right) == 1, self.name
        return parse(self.text, 20), parse(self.text.replace(self.right, self.wrong), 20)


ATTENTION = """(float[2, 8, 16] x, float[2, 1, 8] m) => (float[2, 8, 16] y) {
  w1 = Constant<value_float=0.25>() xs = Mul(x, w1) q = Tanh(xs) k = Sigmoid(x) kt = Transpose<perm=[0, 2, 1]>(k)
  s = MatMul(q, kt) c = Constant<value_float=0.25>() sc = Mul(s, c) masked = Add(sc, m) p = Softmax<axis=-1>(masked)
  o = MatMul(p, x) r = Add(o, x) t = Sub(r, q) y = Tanh(t) }"""
IMAGE = """(float[1, 4, 12, 12] x, float[6, 4, 3, 3] w, float[6, 6, 3, 3] v) => (float[1, 6, K] y) {
  a = Conv<pads=[1, 1, 1, 1]>(x, w) b = Relu(a) h = Conv<pads=[1, 1, 1, 1]>(b, v)
  g = AveragePool<kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], count_include_pad=1>(h)
  l = LeakyRelu<alpha=0.1>(g) f = Constant<value_ints=[1, 6, -1]>() y = Reshape(l, f) }"""
NORM = """(float[4, 32] x, float[32] s, float[32] z) => (float[4, 32] y) {
  a = Mul(x, x) b = Sub(a, x) n = LayerNormalization<axis=-1, epsilon=0.001>(b, s, z) g = Gelu<approximate="none">(n)
  d = Div(g, s) e = Add(d, n) ax = Constant<value_ints=[1]>() u = ReduceMean<keepdims=1>(e, ax) y = Sub(e, u) }"""
MOVES = """(float[6, 8] x, float[6, 8] t) => (float[M, K] y) {
  i = Constant<value_ints=[0, 2, 4, 5]>() a = Sigmoid(x) b = Gather<axis=0>(a, i) s0 = Constant<value_ints=[1]>()
  e0 = Constant<value_ints=[5]>() ax = Constant<value_ints=[1]>() c = Slice(b, s0, e0, ax)
  tt = Tanh(t) d = Slice(tt, s0, e0, ax) f = Concat<axis=0>(c, d) h = Exp(f) sq = Constant<value_ints=[10, 4]>()
  lo = Constant<value_float=0.5>() hi = Constant<value_float=2.0>() r = Clip(h, lo, hi) y = Reshape(r, sq) }"""
INTEGERS = """(float[5, 9] x) => (float[5, 9] y) {
  k = Constant<value_float=3.0>() a = Mul(x, k) b = Round(a) sc = Constant<value_float=0.05>()
  zp = Constant<value_int=7>()
  z8 = Cast<to=3>(zp) q = QuantizeLinear(a, sc, z8) d = DequantizeLinear(q, sc, z8) n = Cast<to=7>(a) f = Cast<to=1>(n)
  e = Add(b, d) g = Add(e, f) y = Tanh(g) }"""
GUARD = """(float[4, 6] x) => (float[4, 6] y) {
  a = Relu(x) tiny = Constant<value_float=0.000001>() b = Max(a, tiny) l = Log(b) c = Constant<value_float=0.1>()
  s = Mul(l, c) e = Exp(s) y = Sub(e, x) }"""
CAUSAL = """(float[1, 6, 6] x) => (float[1, 6, 6] y) {
  a = Tanh(x) k = Constant<value_int=0>() t = Trilu<upper=0>(a, k) b = MatMul(t, a) z = Constant<value_int=0>()
  c = CumSum<exclusive=0>(b, z)
  y = Sigmoid(c) }"""
RESIZE = """(float[1, 2, 5, 5] x) => (float[1, 2, 10, 10] y) {
  a = Tanh(x) s = Constant<value_floats=[1.0, 1.0, 2.0, 2.0]>()
  b = Resize<mode="linear", coordinate_transformation_mode="half_pixel">(a, , s) c = Mul(b, b)
  p = Constant<value_ints=[0, 0, 1, 1, 0, 0, 1, 1]>() e = Pad<mode="reflect">(c, p) k = MaxPool<kernel_shape=[3, 3]>(e)
  y = Exp(k) }"""
CONTROL = """(float[5, 4] x) => (float[4] y, float[5, 4] z) {
  a = Tanh(x) t = ReduceSum<keepdims=0>(a) zero = Constant<value_float=0.0>() c = Greater(t, zero)
  b = If(c) <then_branch = g1 () => (float[5, 4] p) { p = Exp(a) },
             else_branch = g2 () => (float[5, 4] q) { q = Neg(a) }>
  i = Constant<value_floats=[0.5, 0.5, 0.5, 0.5]>()
  f, z = Scan<num_scan_inputs=1, body = g3 (float[4] s, float[4] v) => (float[4] u, float[4] o) {
    d = Mul(s, v) u = Add(d, v) o = Identity(u) }>(i, b)
  y = Exp(f) }"""
QUANTIZED = """(float[4, 16] x, float[16, 8] w) => (float[4, 8] y) {
  xs = Constant<value_float=0.03>() x3 = Constant<value_int=3>() xz = Cast<to=2>(x3) q = QuantizeLinear(x, xs, xz)
  ws = Constant<value_float=0.02>() w0 = Constant<value_int=0>() wz = Cast<to=3>(w0) wq = QuantizeLinear(w, ws, wz)
  i = MatMulInteger(q, wq, xz) f = Cast<to=1>(i) sc = Mul(xs, ws) d = Mul(f, sc) y = Tanh(d) }"""
UPDATES = """(float[4, 8] x, float[3, 8] u, float[8, 8] w) => (float[4, 8] y) {
  h = Gemm<transB=1>(x, w) a = Tanh(h) k = Constant<value_ints=[1, 1, 3]>() kc = Constant<value_ints=[3, 1]>()
  at = Reshape(k, kc) s = ScatterND<reduction="add">(a, at, u)
  e = Constant<value_floats=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]>() l = Sqrt(e) m = Log(e)
  n = Add(l, m) b = Mul(s, n) y = Sub(b, x) }"""

FAULTS = [
    Fault("wrong axis of Softmax", ATTENTION, "Softmax<axis=-1>", "Softmax<axis=1>", "p"),
    Fault("dropped mask", ATTENTION, "masked = Add(sc, m)", "masked = Identity(sc)", "masked"),
    Fault("swapped operands of Sub", ATTENTION, "t = Sub(r, q)", "t = Sub(q, r)", "t"),
    Fault("forgotten scale", ATTENTION, "sc = Mul(s, c)", "sc = Identity(s)", "sc"),
    Fault(
        "accumulator of low precision", ATTENTION, "o = MatMul(p, x)",
        "p16 = Cast<to=10>(p) x16 = Cast<to=10>(x) o16 = MatMul(p16, x16) o = Cast<to=1>(o16)", "o",
        "onnx",  # onnxruntime multiplies halves in float32
    ),
    Fault("residual from the wrong place", ATTENTION, "r = Add(o, x)", "r = Add(o, xs)", "r"),
    Fault("padding off by one", IMAGE, "a = Conv<pads=[1, 1, 1, 1]>", "a = Conv<pads=[0, 0, 2, 2]>", "a"),
    Fault("padding counted or not", IMAGE, "count_include_pad=1", "count_include_pad=0", "g"),
    Fault("wrong slope", IMAGE, "alpha=0.1", "alpha=0.12", "l"),
    Fault("lost activation", IMAGE, "b = Relu(a)", "b = Identity(a)", "b"),
    Fault("wrong epsilon", NORM, "epsilon=0.001", "epsilon=0.1", "n"),
    Fault("approximate Gelu", NORM, 'approximate="none"', 'approximate="tanh"', "g"),
    Fault("swapped operands of Div", NORM, "d = Div(g, s)", "d = Div(s, g)", "d"),
    Fault("sum for mean", NORM, "u = ReduceMean<keepdims=1>", "u = ReduceSum<keepdims=1>", "u"),
    Fault("wrong row", MOVES, "[0, 2, 4, 5]", "[0, 2, 3, 5]", "b"),
    Fault("parts in the wrong order", MOVES, "Concat<axis=0>(c, d)", "Concat<axis=0>(d, c)", "f"),
    Fault("wrong limit", MOVES, "hi = Constant<value_float=2.0>", "hi = Constant<value_float=1.9>", "r"),
    Fault(
        "wrong rounding mode", INTEGERS, "b = Round(a)",
        "hf = Constant<value_float=0.5>() ah = Add(a, hf) b = Floor(ah)",
        "b",
    ),
    Fault("wrong zero point", INTEGERS, "d = DequantizeLinear(q, sc, z8)", "d = DequantizeLinear(q, sc)", "d"),
    Fault("rounded for cut", INTEGERS, "n = Cast<to=7>(a)", "n = Cast<to=7>(b)", "n"),
    Fault("lost guard against NaN", GUARD, "b = Max(a, tiny)", "b = Identity(a)", "b"),
    Fault("mask off by one", CAUSAL, "k = Constant<value_int=0>() t", "k = Constant<value_int=1>() t", "t"),
    Fault("half a pixel", RESIZE, "half_pixel", "asymmetric", "b"),
    Fault("edges for reflections", RESIZE, 'mode="reflect"', 'mode="edge"', "e"),
    Fault("a branch of its own", CONTROL, "{ p = Exp(a) }", "{ p = Neg(a) }", "b"),
    Fault("state that is not carried", CONTROL, "d = Mul(s, v)", "d = Mul(v, v)", "f"),
    Fault("zero point left out of a product", QUANTIZED, "MatMulInteger(q, wq, xz)", "MatMulInteger(q, wq)", "i"),
    Fault("signed for unsigned", QUANTIZED, "xz = Cast<to=2>(x3)", "xz = Cast<to=3>(x3)", "q"),
    Fault("transposed weight", UPDATES, "Gemm<transB=1>", "Gemm<transB=0>", "h"),
    Fault("lost duplicates", UPDATES, 'ScatterND<reduction="add">', 'ScatterND<reduction="none">', "s"),
    Fault("constants folded wrongly", UPDATES, "n = Add(l, m)", "n = Sub(l, m)", "b"),
]  # fmt: skip


def inputs_of(model: onnx.ModelProto) -> dict[str, Array]:
    """Random inputs; ties among them, for rounding."""
    found = {}
    for k, i in enumerate(model.graph.input):
        shape = tuple(d.dim_value for d in i.type.tensor_type.shape.dim)
        x = floats(*shape, seed=k)
        x.reshape(-1)[:2] = (0.5, 1.5) if x.size > 1 else 0.5
        found[i.name] = x
    return found
