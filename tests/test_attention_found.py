"""What looks like attention and is none, and divisors that no scale can stand for: answers stay those of the model."""

from __future__ import annotations

import numpy as np
import pytest

import onnxc
from onnxc.ir import dtypes
from onnxc.ir.types import TensorType
from onnxc.passes.ranges import value_ranges
from onnxc.primitives.builder import Builder
from tests.small_models import floats, parse, reference

HEAD = """(float[1, h, 8, 4] q, float[1, h, 8, 4] k, float[1, h, 8, 4] v) => (float[1, h, 8, 4] y) {
  kt = Transpose<perm = [0, 1, 3, 2]>(k)
  x = MatMul(q, kt)
  zero = Constant<value = float {0}>()
  tiny = Constant<value = float {1e-42}>()
  columns = Constant<value = int64[1] {2}>()
"""
SHIFT = "m = ReduceMax<axes = [-1]>(x)  d = Sub(x, m)  e = Exp(d)"
SUM = "s = ReduceSum(e, last)  p = Div(e, s)"
BODIES = {
    "the greatest of a row beside columns": "m0 = ReduceMax<axes = [-1], keepdims = 0>(x)  m = Unsqueeze(m0, columns)"
    "  d = Sub(x, m)  e = Exp(d)  s = ReduceSum(e, last)  p = Div(e, s)",
    "the sum of a row beside columns": f"{SHIFT}  s0 = ReduceSum<keepdims = 0>(e, last)  s = Unsqueeze(s0, columns)"
    "  p = Div(e, s)",
    "rows by zero": "x0 = Div(x, zero)  p = Softmax(x0)",
    "rows by a number whose reciprocal is infinite": "t = Mul(x, tiny)  x0 = Div(t, tiny)  p = Softmax(x0)",
}


@pytest.mark.parametrize("name", BODIES)
def test_answers(name: str) -> None:
    last = "last = Constant<value = int64[1] {-1}>()"
    model = parse(f"{HEAD} {last} {BODIES[name]}  y = MatMul(p, v) }}", 17)
    q, k, v = (floats(1, 2, 8, 4, seed=n) for n in range(3))
    q[0, 0, 0] = 0
    (wanted,) = reference(model, q, k, v)
    np.testing.assert_allclose(onnxc.compile(model)(q, k, v)["y"], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("shape", "bound"), [((4, 1), 0.0), ((1, 4), np.inf)], ids=str)
def test_rows_less_their_greatest(shape: tuple[int, int], bound: float) -> None:
    """Nothing is above zero where each row meets its own maximum, and only there."""
    b = Builder()
    x = b.input(TensorType(dtypes.float32, (4, 4)))
    y = b.sub(x, b.reshape(b.reduce("max", x, [1]), shape))
    z = b.exp(y)
    assert value_ranges(b.graph([z]))[z.id].high == np.exp(bound)
