"""The standard's own operators for training: its cases, compiled, and what they leave out."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.case.model import collect_testcases as model_cases
from onnx.backend.test.case.node import collect_testcases as node_cases

import onnxc
from onnxc.errors import ModelError, UnsupportedError

Array = np.ndarray[Any, Any]
DOMAIN = "ai.onnx.preview.training"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    CASES = {
        c.name: c
        for c in [*node_cases(None), *model_cases()]
        if c.model is not None and any(o.domain == DOMAIN for o in c.model.opset_import)
    }


def array(value: Any) -> Array:
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)


def test_cases_are_there() -> None:
    assert len(CASES) == 9


@pytest.mark.every_target
@pytest.mark.parametrize("name", sorted(CASES))
def test_case(name: str) -> None:
    case = CASES[name]
    run = onnxc.compile(case.model)
    for given, wanted in case.data_sets:
        found = run(*map(array, given))
        for a, b in zip(found, map(array, wanted), strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            np.testing.assert_allclose(a, b, case.rtol, case.atol)


def model(body: str, *, weights: dict[str, Array] | None = None) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18, "{DOMAIN}" : 1]>\ng {body}')
    proto.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in (weights or {}).items())
    return proto


G = DOMAIN + ".Gradient"
RNG = np.random.default_rng(2)
A, B = RNG.standard_normal((2, 5, 7)).astype(np.float32)


def test_first_update() -> None:
    """T = 0: Adam's rate is not adjusted, and the momentum takes the whole gradient."""
    attributes = {"alpha": 0.9, "beta": 0.1, "mode": "standard", "norm_coefficient": 0.0}
    node = helper.make_node("Momentum", list("rtxgv"), ["x2", "v2"], domain=DOMAIN, **attributes)
    infos = [helper.make_tensor_value_info(n, k, s) for n, k, s in (("r", 11, []), ("t", 7, [1]), ("x", 11, ["n"]),
                                                                    ("g", 11, ["n"]), ("v", 11, ["n"]))]  # fmt: skip
    outs = [helper.make_tensor_value_info(n, 11, ["n"]) for n in ("x2", "v2")]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    run = onnxc.compile(
        helper.make_model(helper.make_graph([node], "g", infos, outs), opset_imports=opsets, ir_version=8)
    )
    x, g, v = RNG.standard_normal((3, 13))
    for t, share in ((0, 1.0), (3, 0.1)):
        x2, v2 = run(np.float64(0.3), np.array([t]), x, g, v)
        np.testing.assert_allclose(v2, 0.9 * v + share * g, 1e-6)
        np.testing.assert_allclose(x2, x - 0.3 * v2, 1e-6)


def test_wrong_number_of_tensors() -> None:
    with pytest.raises(ModelError, match="for each that is updated there are 3"):
        onnxc.compile(
            model(f"(float r, int64 t, float[3] x, float[3] y) => (float[3] z) {{ z = {DOMAIN}.Adagrad (r, t, x, y) }}")
        )


# ---------------------------------------------------------------- Gradient


def test_gradient_by_weights_and_inputs() -> None:
    """By an initializer, which is a constant otherwise, by an input, and by one on which nothing depends."""
    body = f"""(float[n, 5] x, float[3] z) => (float[n, 7] y, float[5, 7] dw, float[n, 5] dx, float[3] dz) {{
      h = MatMul (x, w)  y = Tanh (h)  dw, dx, dz = {G}<xs = ["w", "x", "z"], y = "y"> (w, x, z) }}"""
    x = RNG.standard_normal((4, 5)).astype(np.float32)
    y, dw, dx, dz = onnxc.compile(model(body, weights={"w": A}))(x, np.ones(3, np.float32))
    dh = 1 - y.astype(np.float64) ** 2
    np.testing.assert_allclose(dw, x.T @ dh, 1e-4, 1e-5)
    np.testing.assert_allclose(dx, dh @ A.T, 1e-4, 1e-5)
    assert (dz == 0).all()


def test_gradient_in_the_middle() -> None:
    """Of a value between, with another one held fast (zs); what follows reads it."""
    body = f"""(float[n] x) => (float[n] r) {{
      h = Mul (x, x)  y = Mul (h, x)  dh = {G}<xs = ["h"], zs = ["x"], y = "y"> (h, x)  r = Add (dh, y) }}"""
    x = RNG.standard_normal(11).astype(np.float32)
    np.testing.assert_allclose(onnxc.compile(model(body))(x)["r"], x + x**3, 1e-5)


def test_second_derivative() -> None:
    """Of x^3 + the sum of x^2 y: the second Gradient differentiates the first one's result."""
    body = f"""(float[n] x, float[n] y) => (float[n] dx, float[n] dxx, float[n] dxy) {{
      s = Mul (x, x)  c = Mul (s, x)  q = Mul (s, y)  z = Add (c, q)
      dx = {G}<xs = ["x"], zs = ["y"], y = "z"> (x, y)
      dxx, dxy = {G}<xs = ["x", "y"], y = "dx"> (x, y) }}"""
    x, y = RNG.standard_normal((2, 9)).astype(np.float32)
    dx, dxx, dxy = onnxc.compile(model(body))(x, y)
    np.testing.assert_allclose(dx, 3 * x**2 + 2 * x * y, 1e-4, 1e-5)
    np.testing.assert_allclose(dxx, 6 * x + 2 * y, 1e-4, 1e-5)
    np.testing.assert_allclose(dxy, 2 * x, 1e-4, 1e-5)


def test_gradient_elsewhere() -> None:
    """At other values than the graph's own: y is computed again from them, even where one value is given twice."""
    body = f"""(float[n] a, float[n] b, float[n] p) => (float[n] y, float[n] da, float[n] db) {{
      s = Mul (a, b)  y = Mul (s, a)  da, db = {G}<xs = ["a", "b"], y = "y"> (p, p) }}"""
    a, b, p = RNG.standard_normal((3, 6)).astype(np.float32)
    y, da, db = onnxc.compile(model(body))(a, b, p)
    np.testing.assert_allclose(y, a * a * b, 1e-5)
    np.testing.assert_allclose(da, 2 * p * p, 1e-5)
    np.testing.assert_allclose(db, p * p, 1e-5)


def test_gradient_behind_dropout() -> None:
    """By the mask that was drawn."""
    body = f"""(float[n] x, float r, bool t) => (float[n] y, bool[n] mask, float[n] dx) {{
      y, mask = Dropout (x, r, t)  dx = {G}<xs = ["x"], y = "y"> (x) }}"""
    x = RNG.standard_normal(301).astype(np.float32)
    _, mask, dx = onnxc.compile(model(body))(x, np.float32(0.5), np.array(True))
    np.testing.assert_array_equal(dx, np.where(mask, 2, 0))
    assert 0.3 < mask.mean() < 0.7


@pytest.mark.parametrize(
    ("attributes", "inputs", "message"),
    [
        ('xs = ["q"], y = "y"', "x", "no tensor 'q'"),
        ('xs = ["x"], y = "late"', "x", "no tensor 'late'"),
        ('xs = ["x"], y = "y"', "x, x", "2 inputs and 1 outputs"),
        ('xs = ["k"], y = "y"', "k", "derivatives of float32"),
    ],
)
def test_refusals(attributes: str, inputs: str, message: str) -> None:
    body = f"""(float[n] x, int64[n] k) => (float[n] dx, float[n] late) {{
      f = Cast<to = 1> (k)  y = Mul (x, f)  dx = {G}<{attributes}> ({inputs})  late = Abs (dx) }}"""
    with pytest.raises((ModelError, UnsupportedError), match=message):
        onnxc.compile(model(body))
