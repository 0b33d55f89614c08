"""Routines on GPUs whose operands and results are open: what leads to a running sum or a top-k is in its kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest

from tests.targets import needs_triton
from tests.triton_simulator import Simulator

Array = np.ndarray[Any, Any]

pytestmark = needs_triton
rng = np.random.default_rng(31)


def model(text: str) -> bytes:
    parsed = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]>\n{text}')
    return bytes(parsed.SerializeToString())


def halves(*shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float16)


@pytest.mark.parametrize("n", [6, 40, 2100])
@pytest.mark.parametrize(("exclusive", "reverse"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_casts_around_a_running_sum(simulator: Simulator, n: int, exclusive: int, reverse: int) -> None:
    """In float32, as PyTorch exports it; nothing but halves is in memory."""
    text = f"""g (float16[3, {n}] x, float16[{n}] w) => (float16[3, {n}] y) {{
        c = Cast <to = 1> (x)  a = Constant <value_int = 1> ()
        s = CumSum <exclusive = {exclusive}, reverse = {reverse}> (c, a)
        h = Cast <to = 10> (s)  y = Mul (h, w)
    }}"""
    x, w = halves(3, n), halves(n)
    answer = simulator.run(model(text), [x, w])
    assert answer.kinds == ["opaque"]
    z = (x[:, ::-1] if reverse else x).astype(np.float64)
    s = np.cumsum(z, 1) - (z if exclusive else 0)
    s = (s[:, ::-1] if reverse else s).astype(np.float16)
    np.testing.assert_allclose(answer.outputs[0].astype(np.float64), s.astype(np.float64) * w, 4e-3, 1e-2)


def test_positions_of_a_mask(simulator: Simulator) -> None:
    """Integers of 64 bits too."""
    text = """g (int64[B, 9] m) => (int64[B, 9] y) {
        one = Constant <value_int = 1> ()  b = Equal (m, one)  n = Not (b)  c = Cast <to = 7> (n)
        s = CumSum (c, one)  p = Mul (s, c)  y = Add (p, one)
    }"""
    m = rng.integers(0, 3, (5, 9))
    answer = simulator.run(model(text), [m])
    assert answer.kinds == ["opaque"]
    np.testing.assert_array_equal(answer.outputs[0], np.cumsum(m != 1, 1) * (m != 1) + 1)


VIEWS = {
    "reshape": ("float[4, 60] x", "s = Constant <value_ints = [4, 3, 20]> ()  t = Reshape (x, s)", (4, 60), 1),
    "slice": (
        "float[4, 3, 27] x",
        """a = Constant <value_ints = [2]> ()  b = Constant <value_ints = [22]> ()
        t = Slice (x, a, b, a)""", (4, 3, 27), 1),
    "transpose of rows": ("float[3, 4, 20] x", "t = Transpose <perm = [1, 0, 2]> (x)", (3, 4, 20), 1),
    "padding": (
        "float[4, 3, 18] x",
        "p = Constant <value_ints = [0, 0, 2, 0, 0, 0]> ()  t = Pad (x, p)", (4, 3, 18), 1),
    "function": ("float[4, 3, 20] x", "e = Exp (x)  t = Add (e, x)", (4, 3, 20), 1),
    "transpose": ("float[20, 3, 4] x", "t = Transpose <perm = [2, 1, 0]> (x)", (20, 3, 4), 2),
}  # fmt: skip


def seen(name: str, x: Array) -> Array:
    """What a view of VIEWS shows."""
    match name:
        case "reshape":
            return x.reshape(4, 3, 20)
        case "slice":
            return x[:, :, 2:22]
        case "transpose of rows":
            return x.transpose(1, 0, 2)
        case "padding":
            return np.pad(x, ((0, 0), (0, 0), (2, 0)))
        case "function":
            return np.asarray(np.exp(x) + x)
    return x.transpose()


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("axis", [1, 2])
def test_running_sum_of_a_view(simulator: Simulator, name: str, axis: int) -> None:
    inputs, body, shape, kernels = VIEWS[name]
    text = f"""g ({inputs}) => (float[4, 3, 20] y) {{
        {body}  axis = Constant <value_int = {axis}> ()  y = CumSum (t, axis)
    }}"""
    x = rng.standard_normal(shape).astype(np.float32)
    answer = simulator.run(model(text), [x])
    assert len(answer.kinds) == kernels and answer.kinds[-1] == "opaque"
    np.testing.assert_allclose(answer.outputs[0], np.cumsum(seen(name, x), axis), 1e-5, 1e-5)


@pytest.mark.parametrize("name", ["reshape", "padding", "transpose"])
def test_best_of_a_view(simulator: Simulator, name: str) -> None:
    inputs, body, shape, kernels = VIEWS[name]
    text = f"""g ({inputs}) => (float[4, 3, 5] v, int64[4, 3, 5] i) {{
        {body}  k = Constant <value_ints = [5]> ()  v, i = TopK (t, k)
    }}"""
    x = rng.standard_normal(shape).astype(np.float32)
    answer = simulator.run(model(text), [x])
    assert len(answer.kinds) == kernels
    places = np.argsort(-seen(name, x), -1, kind="stable")[..., :5]
    np.testing.assert_array_equal(answer.outputs[1], places)
    np.testing.assert_array_equal(answer.outputs[0], np.take_along_axis(seen(name, x), places, -1))


def test_few_of_a_long_reshaped_row(simulator: Simulator) -> None:
    """Pieces of rows, filled up, are read where they lie; a cast is made on the way."""
    text = """g (float16[2, 3, 1500] x) => (float[2, 7] v, int64[2, 7] i) {
        s = Constant <value_ints = [2, 4500]> ()  r = Reshape (x, s)  c = Cast <to = 1> (r)
        k = Constant <value_ints = [7]> ()  v, i = TopK (c, k)
    }"""
    x = halves(2, 3, 1500)
    answer = simulator.run(model(text), [x])
    assert answer.kinds[0] == "opaque"
    rows = x.reshape(2, 4500).astype(np.float32)
    places = np.argsort(-rows, 1, kind="stable")[:, :7]
    np.testing.assert_array_equal(answer.outputs[1], places)
    np.testing.assert_array_equal(answer.outputs[0], np.take_along_axis(rows, places, 1))


def test_an_operand_that_others_want(simulator: Simulator) -> None:
    """It is stored, and read by the running sum; what is as cheap to compute again is not."""
    text = """g (float[3, 30] x) => (float[3, 30] y, float[3, 30] e, float[3, 30] z) {
        a = Constant <value_int = 1> ()  e = Exp (x)  y = CumSum (e, a)  n = Neg (y)  z = Add (n, e)
    }"""
    x = rng.standard_normal((3, 30)).astype(np.float32)
    y, e, z = simulator.run(model(text), [x]).outputs
    np.testing.assert_allclose(e, np.exp(x), 1e-6)
    np.testing.assert_allclose(y, np.cumsum(np.exp(x), 1), 1e-5)
    np.testing.assert_allclose(z, e - y, 1e-5, 1e-5)


def test_softmax_is_stored_as_halves(simulator: Simulator) -> None:
    """Neither what it is made of nor the same in float32."""
    text = """g (float16[3, 30] x) => (float16[3, 30] y) {
        s = Softmax (x)  c = Cast <to = 1> (s)  a = Constant <value_int = 1> ()
        t = CumSum (c, a)  y = Cast <to = 10> (t)
    }"""
    x = halves(3, 30)
    answer = simulator.run(model(text), [x])
    assert answer.kinds == ["loops", "opaque"]
    p = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(answer.outputs[0], np.cumsum(p / p.sum(1, keepdims=True), 1), 2e-3, 2e-3)
