"""Derivatives of If, and of Loop and Scan as ONNX has them, against differences of the compiled model."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

import onnxc
from onnxc.errors import UnsupportedError
from onnxc.frontends import onnx_file
from onnxc.gradient import differentiate
from tests.small_models import Array

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


def test_a_loop_that_data_ends_has_none() -> None:
    text = """g (double[2] x) => (double loss) {
      go = Constant<value = bool {1}>()
      z = Loop(, go, x) <body = b2 (int64 i, bool ci, double[2] v) => (bool co, double[2] vo) {
        one = Constant<value = double {1.0}>()
        vo = Add(v, one)
        m = ReduceMax<keepdims = 0>(vo)
        ten = Constant<value = double {10.0}>()
        co = Less(m, ten)
      }>
      loss = ReduceSum<keepdims = 0>(z)
    }"""
    with pytest.raises(UnsupportedError, match=r"how often a Loop runs.*n1 Loop"):
        differentiate(onnx_file.load(onnx.parser.parse_model(HEAD + text)), "loss", ["x"])
