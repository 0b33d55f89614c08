"""Operators that bring their own derivative along, and values that have none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import numpy_helper

import onnxc
from onnxc.errors import ModelError
from onnxc.ir.graph import Value
from onnxc.ops import registry
from onnxc.ops.registry import op
from onnxc.primitives.builder import Builder

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(4)


@pytest.fixture
def custom() -> Iterator[Callable[..., Any]]:
    """`op` for the time of a test."""
    registry.table()
    before = {key: list(rows) for key, rows in registry._TABLE.items()}
    yield op
    registry._TABLE.clear()
    registry._TABLE.update(before)


def model(body: str, **weights: Array) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18, "com.example" : 1]>\ng {body}')
    proto.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in weights.items())
    return proto


def run(proto: onnx.ModelProto, *inputs: Array) -> list[Array]:
    """In onnxruntime: what is exported is standard ONNX, with no trace of the rule."""
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip([i.name for i in session.get_inputs()], inputs, strict=True)))


def test_straight_through(custom: Any) -> None:
    """Rounding, whose derivative is zero, with the derivative of the identity; the attribute reaches both."""

    def through(b: Builder, dys: list[Value], xs: list[Value], ys: list[Value], *, step: float = 1.0) -> Value:
        return b.where(b.le(b.abs(xs[0]), 4 * step), dys[0], 0.0)

    @custom("FakeQuantize", 1, domain="com.example", gradient=through)
    def fake_quantize(b: Builder, x: Value, *, step: float = 1.0) -> Value:
        return b.mul(b.round(b.mul(x, 1 / step)), step)

    body = """(float[n, 7] x) => (float loss, float[n, 7] q) {
      q = com.example.FakeQuantize<step = 0.5> (x)  y = Mul (q, w)  loss = ReduceSum<keepdims = 0> (y) }"""
    x, w = (RNG.standard_normal((5, 7)) * 2).astype(np.float32), RNG.standard_normal(7).astype(np.float32)
    _, q, dx, dw = run(onnxc.backward(model(body, w=w), loss="loss", wrt=["x", "w"]), x)
    np.testing.assert_array_equal(q, np.round(x * 2) / 2)
    np.testing.assert_allclose(dx, np.where(abs(x) <= 2, np.broadcast_to(w, x.shape), 0), 1e-6)
    np.testing.assert_allclose(dw, q.sum(0), 1e-5)
    np.testing.assert_array_equal(onnxc.compile(model(body, w=w))(x)["q"], q)
    step = onnxc.compile_training(model(body, w=w), loss="loss", optimizer=onnxc.optim.SGD(lr=0.1))
    step(x)
    np.testing.assert_allclose(step.parameters["w"], w - 0.1 * q.sum(0), 1e-5, 1e-6)


def test_several_inputs_and_outputs(custom: Any) -> None:
    """A missing optional input, an output that nothing reads, dys of None, a dtype that has no derivative."""
    seen: list[list[bool]] = []

    def rule(
        b: Builder, dys: Sequence[Value | None], xs: Sequence[Value | None], ys: Sequence[Value]
    ) -> list[Value | None]:
        x, bias, index, y = *xs, ys[0]
        seen.append([v is None for v in (*dys, x, bias, index)])
        assert dys[0] is not None and x is not None
        return [b.mul(dys[0], b.add(y, 1.0)), None, None]

    @custom("Odd", 1, domain="com.example", gradient=rule)
    def odd(b: Builder, x: Value, bias: Value | None = None, index: Value | None = None) -> list[Value]:
        return [b.exp(x), b.neg(x)]

    body = """(float[n] x, int64[n] k) => (float loss) {
      y, z = com.example.Odd (x, , k)  loss = ReduceSum<keepdims = 0> (y) }"""
    x = RNG.standard_normal(9).astype(np.float32)
    _, dx = run(onnxc.backward(model(body), loss="loss", wrt=["x"]), x, np.arange(9))
    np.testing.assert_allclose(dx, np.exp(x) + 1, 1e-5)
    assert seen == [[False, True, False, True, False]]


def test_wrong_results(custom: Any) -> None:
    results: list[Any] = []

    @custom("Wrong", 1, domain="com.example", gradient=lambda b, dys, xs, ys: results[0](b, dys[0]))
    def wrong(b: Builder, x: Value, y: Value) -> Value:
        return b.add(x, y)

    proto = model(
        "(float[3] x, float[3] y) => (float s) { z = com.example.Wrong (x, y) s = ReduceSum<keepdims = 0> (z) }"
    )
    for made, message in (
        (lambda b, dy: dy, "has 1 results for 2 inputs"),
        (lambda b, dy: [dy, b.reduce("sum", dy, [0])], "by its input 1, which is float32.3., is float32.."),
    ):
        results[:] = [made]
        with pytest.raises(ModelError, match=message):
            onnxc.backward(proto, loss="s", wrt=["x", "y"])


def test_stop_gradient() -> None:
    """A value that is held fast: what flows past it stays."""
    body = "(float[n] x) => (float s) { y = Mul (x, x)  z = Mul (y, x)  s = ReduceSum<keepdims = 0> (z) }"
    x = RNG.standard_normal(5).astype(np.float32)
    for stops, wanted in (((), 3 * x**2), (("y",), x**2)):
        _, dx = run(onnxc.backward(model(body), loss="s", wrt=["x"], stop_gradient=stops), x)
        np.testing.assert_allclose(dx, wanted, 1e-5)
