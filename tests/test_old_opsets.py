"""Operators as opsets 1 to 6 have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

from onnxc.errors import ModelError, ShapeError, UnsupportedError
from onnxc.frontends.onnx_file import load
from tests.targets import evaluate

pytestmark = pytest.mark.every_target

rng = np.random.default_rng(0)


def f32(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def run(
    op: str, *inputs: np.ndarray, opset: int = 6, outputs: int = 1, const: tuple[int, ...] = (), **attrs: Any
) -> list[Any]:
    """The outputs of one node of an old opset; the inputs in `const` are initializers."""
    names = [f"x{k}" for k in range(len(inputs))]
    node = helper.make_node(op, names, [f"y{k}" for k in range(outputs)], **attrs)
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for n, x in zip(names, inputs, strict=True)
    ]
    made = [helper.make_empty_tensor_value_info(f"y{k}") for k in range(outputs)]
    weights = [numpy_helper.from_array(inputs[k], names[k]) for k in const]
    graph = helper.make_graph([node], "g", [i for k, i in enumerate(infos) if k not in const], made, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_operatorsetid("", opset)], ir_version=3)
    return evaluate(load(model), [x for k, x in enumerate(inputs) if k not in const])


FUNCTIONS = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Pow": np.power, "Less": np.less,
    "Greater": np.greater,
}  # fmt: skip
X = np.abs(f32(2, 3, 4, 5)) + 1


@pytest.mark.parametrize("opset", [1, 6])
@pytest.mark.parametrize("op", FUNCTIONS)
def test_broadcasting_is_asked_for(op: str, opset: int) -> None:
    f = FUNCTIONS[op]
    cases = [
        ((), None),
        ((1, 1), None),
        ((5,), None),
        ((4, 5), None),
        ((3, 4), 1),
        ((2,), 0),
        ((3,), -3),
        ((2, 3, 4, 5), None),
    ]
    for shape, axis in cases:
        y = np.abs(f32(*shape)) + 1
        at = 4 - y.ndim if axis is None else axis % 4
        aligned = y.reshape(()) if y.size == 1 else y.reshape(y.shape + (1,) * (4 - at - y.ndim))
        attrs = {"broadcast": 1, **({} if axis is None else {"axis": axis})}
        (got,) = run(op, X, y, opset=opset, **attrs)
        np.testing.assert_allclose(got, f(X, aligned), 1e-5)
    np.testing.assert_allclose(run(op, X, X[::-1].copy(), opset=opset)[0], f(X, X[::-1]), 1e-5)


@pytest.mark.parametrize("op", ["And", "Or", "Xor", "Equal"])
def test_logic(op: str) -> None:
    x, y = np.array([[True, False], [False, True]]), np.array([True, False])
    f = {"And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor, "Equal": np.equal}[op]
    assert run(op, x, y, broadcast=1, axis=0, opset=1)[0].tolist() == f(x, y[:, None]).tolist()


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ShapeError, match="without broadcast=1"):
        run("Add", X, f32(5))
    with pytest.raises(ShapeError, match="does not fit"):
        run("Add", X, f32(4, 5), broadcast=1, axis=3)
    with pytest.raises(ShapeError):
        run("Add", X, f32(3, 5), broadcast=1)


def test_hints_of_buffers_change_nothing() -> None:
    (y,) = run("Relu", X - 2, opset=1, consumed_inputs=[1])
    np.testing.assert_array_equal(y, np.maximum(X - 2, 0))
    with pytest.raises(UnsupportedError, match="no attribute nonsense"):
        run("Relu", X, opset=1, nonsense=1)


def test_batch_normalization() -> None:
    scale, bias, mean, var = f32(3), f32(3), f32(3), np.abs(f32(3)) + 0.5
    a, b, m, v = (p.reshape(1, 3, 1, 1) for p in (scale, bias, mean, var))
    wanted = (X - m) / np.sqrt(v + 1e-3) * a + b
    for opset in (1, 6, 7):
        attrs = {"is_test": 1} if opset < 7 else {}
        (y,) = run("BatchNormalization", X, scale, bias, mean, var, opset=opset, epsilon=1e-3, **attrs)
        np.testing.assert_allclose(y, wanted, 1e-4, 1e-5)
    each = [f32(3, 4, 5), f32(3, 4, 5), f32(3, 4, 5), np.abs(f32(3, 4, 5)) + 0.5]
    (y,) = run("BatchNormalization", X, *each, opset=6, is_test=1, spatial=0)
    np.testing.assert_allclose(y, (X - each[2]) / np.sqrt(each[3] + 1e-5) * each[0] + each[1], 1e-4, 1e-5)
    own_mean, own_var = X.mean((0, 2, 3)), X.var((0, 2, 3))
    found = run("BatchNormalization", X, scale, bias, mean, var, opset=6, outputs=5, momentum=0.75)
    normal = (X - own_mean.reshape(m.shape)) / np.sqrt(own_var.reshape(v.shape) + 1e-5)
    running = [old * 0.75 + new * 0.25 for old, new in ((mean, own_mean), (var, own_var))]
    for y, wanted in zip(found, [normal * a + b, *running, own_mean, 1 / np.sqrt(own_var + 1e-5)], strict=True):
        np.testing.assert_allclose(y, wanted, 1e-4, 1e-5)
    with pytest.raises(UnsupportedError, match="training mode with spatial=0"):
        run("BatchNormalization", X, *each, opset=6, outputs=5, spatial=0)


def test_shapes_as_attributes() -> None:
    assert run("Reshape", X, opset=1, shape=[0, -1, 5])[0].shape == (2, 12, 5)
    assert run("Concat", X, X, opset=1)[0].shape == (2, 6, 4, 5)
    padded = run("Pad", X, opset=1, paddings=[0, 0, 1, 0, 0, 0, 0, 2], value=3.0)[0]
    np.testing.assert_array_equal(padded, np.pad(X, [(0, 0), (0, 0), (1, 0), (0, 2)], constant_values=3))
    tiles, axis = np.array(3, np.float32), np.array(1, np.float32)
    assert run("Tile", X, tiles, axis, opset=1, const=(1, 2))[0].shape == (2, 9, 4, 5)
    parts = run("Split", X, np.array([1, 2], np.float32), opset=1, outputs=2, axis=1, const=(1,))
    assert [p.shape[1] for p in parts] == [1, 2]
    parts = run("Split", X, opset=1, outputs=2, axis=3, split=[4, 1])
    assert [p.shape[3] for p in parts] == [4, 1]


def test_casts_to_a_name() -> None:
    for name, dtype in (("FLOAT16", np.float16), ("DOUBLE", np.float64), ("int32", np.int32), ("BOOL", np.bool_)):
        (y,) = run("Cast", X, opset=1, to=name)
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, X.astype(dtype))
    with pytest.raises(ModelError, match="'NUMBER', which is no type"):
        run("Cast", X, opset=1, to="NUMBER")


def test_what_else_changed() -> None:
    slope = f32(3)
    (y,) = run("PRelu", X - 2, slope, opset=6)
    np.testing.assert_allclose(y, np.where(X - 2 < 0, (X - 2) * slope.reshape(3, 1, 1), X - 2), 1e-6)
    (y,) = run("Selu", X - 2, opset=1)
    np.testing.assert_allclose(y, 1.0507 * np.where(X - 2 > 0, X - 2, 1.6732 * np.expm1(X - 2)), 1e-5, 1e-6)
    (y,) = run("Gemm", f32(2, 3), f32(3, 4), f32(4), opset=6, broadcast=1, alpha=0.5)
    assert y.shape == (2, 4)
    for op, f in (("Max", np.maximum), ("Min", np.minimum), ("Sum", np.add)):
        np.testing.assert_array_equal(run(op, X, X[::-1].copy(), opset=1)[0], f(X, X[::-1]))
    (y,) = run("GlobalLpPool", X, opset=1, p=2.0)
    np.testing.assert_allclose(y, np.sqrt((X * X).sum((2, 3), keepdims=True)), 1e-5)
    (y,) = run("Upsample", X, opset=1, height_scale=2.0, width_scale=3.0)
    np.testing.assert_array_equal(y, X.repeat(2, 2).repeat(3, 3))
    with pytest.raises(UnsupportedError, match=r"order 2\.5"):
        run("GlobalLpPool", X, opset=1, p=2.5)
