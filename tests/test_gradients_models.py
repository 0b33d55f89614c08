"""`onnxc.backward` on whole models: names, shared values, second order, and miscompiles that others have shipped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import onnxc
from onnxc.errors import InputError
from onnxc.frontends.onnx_file import load
from onnxc.passes.decompose import decompose
from onnxc.primitives.interpret import interpret
from tests.gradient_harness import Array, compare, cotangents_of, measured
from tests.gradient_ops import cases, derive
from tests.small_models import parse

SMALL = '<ir_version: 10, opset_import: ["" : 21]>'


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(SMALL + text)


def run(model: onnx.ModelProto | None, **given: Any) -> dict[str, Array]:
    """In onnxruntime, optimizations off."""
    assert model is not None
    onnx.checker.check_model(model, full_check=True)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options)
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(None, given), strict=True))


X = np.array([0.5, -1.0, 2.0])

# ------------------------------------------------------------ shared values


@pytest.mark.parametrize(
    ("body", "slope"),
    [
        ("y = Mul(x, x)", 2 * X),
        ("a = Add(x, x) y = Mul(a, x)", 4 * X),
        ("a = Mul(x, x) b = Exp(a) c = Sin(a) d = Mul(b, c) y = Sub(d, a)",
         2 * X * (np.exp(X**2) * (np.sin(X**2) + np.cos(X**2)) - 1)),
        ("a = Sub(x, x) y = Exp(a)", 0 * X),
        ("a, b = Split <axis = 0, num_outputs = 2> (x) c = Concat <axis = 0> (b, a, b) y = Mul(c, c)", None),
        ("a = Identity(x) b = Identity(a) y = Sum(a, b, x, b)", np.full(3, 4.0)),
        ("y = Max(x, x, x)", np.ones(3)),
        ("y = Div(x, x)", 0 * X),
    ],
)  # fmt: skip
def test_values_with_several_readers(body: str, slope: Array | None) -> None:
    model = parsed(f"m (double[3] x) => (double l) {{ {body} l = ReduceSum <keepdims = 0> (y) }}")
    got = run(onnxc.backward(model, "l", ["x"]), x=X)["x_grad"]
    if slope is None:  # a holds x[0] and x[1], b holds x[2] and stands in the loss twice
        slope = 2 * X * np.array([1, 1, 2])
    np.testing.assert_allclose(got, slope, 1e-12, 1e-15)


def test_an_initializer_with_several_readers() -> None:
    model = parsed("""m (double[1, 3] x) => (double l) <double[3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 10}> {
        a = MatMul(x, w) b = MatMul(a, w) l = ReduceSum <keepdims = 0> (b) }""")
    w = np.array([[1.0, 2, 3], [4, 5, 6], [7, 8, 10]])
    ones = np.ones((1, 3))
    got = run(onnxc.backward(model), x=X[None])
    np.testing.assert_allclose(got["w_grad"], X[None].T @ ones @ w.T + (X[None] @ w).T @ ones)


def test_gradients_are_not_kept_from_one_call_to_the_next() -> None:
    model = parsed("m (double[3] x) => (double l) { y = Mul(x, x) l = ReduceSum <keepdims = 0> (y) }")
    found = onnxc.backward(model, wrt=["x"])
    assert found is not None
    session = ort.InferenceSession(found.SerializeToString())
    compiled = onnxc.compile(found)
    for scale in (1.0, 2.0, 1.0):
        for got in (session.run(["x_grad"], {"x": scale * X})[0], compiled(x=scale * X)["x_grad"]):
            np.testing.assert_array_equal(got, 2 * scale * X)


# ------------------------------------------------------------ names


def test_an_output_that_is_also_used_inside() -> None:
    model = parsed(
        "m (double[3] x) => (double[3] y, double l) { y = Exp(x) z = Mul(y, y) l = ReduceSum <keepdims = 0> (z) }"
    )
    got = run(onnxc.backward(model, "l", ["x", "y"]), x=X)
    assert list(got) == ["y", "l", "x_grad", "y_grad"]
    np.testing.assert_allclose(got["x_grad"], 2 * np.exp(2 * X))
    np.testing.assert_allclose(got["y_grad"], 2 * np.exp(X))


def test_an_input_that_is_an_output() -> None:
    model = parsed("m (double[3] x) => (double[3] x, double l) { l = ReduceSum <keepdims = 0> (x) }")
    both = onnxc.backward(model, ["l", "x"], ["x"], cotangents=True, outputs=False)
    np.testing.assert_allclose(run(both, x=X, l_cotangent=np.array(3.0), x_cotangent=X)["x_grad"], 3 + X)


def test_a_value_between() -> None:
    """Of a value and of what it is computed from, at once."""
    model = parsed("m (double[3] x) => (double l) { a = Mul(x, x) b = Exp(a) l = ReduceSum <keepdims = 0> (b) }")
    got = run(onnxc.backward(model, "l", ["b", "a", "x", "l"], outputs=False), x=X)
    np.testing.assert_allclose(got["b_grad"], np.ones(3))
    np.testing.assert_allclose(got["a_grad"], np.exp(X**2))
    np.testing.assert_allclose(got["x_grad"], 2 * X * np.exp(X**2))
    np.testing.assert_array_equal(got["l_grad"], 1.0)


def test_what_the_loss_does_not_depend_on() -> None:
    model = parsed("""m (double[3] x, double[2, N] u, int64[3] i) => (double l) {
        c = Cast <to = 11> (i) y = Mul(x, c) l = ReduceSum <keepdims = 0> (y) }""")
    got = run(onnxc.backward(model, "l", ["x", "u"]), x=X, u=np.ones((2, 5)), i=np.array([1, 2, 3]))
    np.testing.assert_array_equal(got["u_grad"], np.zeros((2, 5)))
    np.testing.assert_array_equal(got["x_grad"], [1, 2, 3])


def test_integers_cut_the_gradient() -> None:
    model = parsed("""m (double[3] x) => (double l) {
        i = Cast <to = 7> (x) c = Cast <to = 11> (i) y = Mul(x, c) l = ReduceSum <keepdims = 0> (y) }""")
    np.testing.assert_array_equal(run(onnxc.backward(model, "l", ["x"]), x=X)["x_grad"], [0, -1, 2])


def test_stop_gradient() -> None:
    model = parsed("m (double[3] x) => (double l) { a = Exp(x) y = Mul(a, x) l = ReduceSum <keepdims = 0> (y) }")
    got = run(onnxc.backward(model, "l", ["x"], stop_gradient=["a"]), x=X)
    np.testing.assert_allclose(got["x_grad"], np.exp(X))
    got = run(onnxc.backward(model, "l", ["x", "a"], stop_gradient=["a"]), x=X)
    np.testing.assert_allclose(got["x_grad"], np.exp(X))
    np.testing.assert_allclose(got["a_grad"], X)


def test_a_weight_in_stop_gradient_stays_as_it_is() -> None:
    model = parsed("""m (double[3] x) => (double l) <double[3] v = {1, 2, 3}, double[3] w = {4, 5, 6}> {
        y = Mul(x, w) z = Mul(y, v) l = ReduceSum <keepdims = 0> (z) }""")
    assert onnxc.backward(model, "l", stop_gradient=["w"]).graph.output[-1].name == "v_grad"
    got = run(onnxc.backward(model, "l", ["w", "v"], stop_gradient=["w"]), x=X)
    np.testing.assert_allclose(got["v_grad"], X * [4, 5, 6])
    np.testing.assert_array_equal(got["w_grad"], [0, 0, 0])
    step = onnxc.compile_training(model, loss="l", optimizer=onnxc.optim.SGD(lr=0.1), stop_gradient=["w"])
    step(X)
    np.testing.assert_array_equal(step.parameters.get("w", [4, 5, 6]), [4, 5, 6])
    np.testing.assert_allclose(step.parameters["v"], [1, 2, 3] - 0.1 * X * [4, 5, 6])


def test_several_losses_add_up() -> None:
    model = parsed("""m (double[3] x) => (double k, double l) {
        y = Mul(x, x) k = ReduceSum <keepdims = 0> (y) l = ReduceSum <keepdims = 0> (x) }""")
    np.testing.assert_array_equal(run(onnxc.backward(model, ["k", "l"], ["x"]), x=X)["x_grad"], 2 * X + 1)
    np.testing.assert_array_equal(run(onnxc.backward(model, ["k", "k"], ["x"]), x=X)["x_grad"], 4 * X)


def test_names_that_are_taken() -> None:
    """A model whose inputs are named as its gradients would be."""
    model = parsed(
        "m (double[3] x, double[3] x_grad, double[3] y_cotangent) => (double[3] y) "
        "{ a = Mul(x, x_grad) y = Add(a, y_cotangent) }"
    )
    found = onnxc.backward(model, "y", ["x", "x"], cotangents=True)
    got = run(found, x=X, x_grad=X, y_cotangent=X, y_cotangent_=np.ones(3))
    assert list(got) == ["y", "x_grad_", "x_grad__"]
    np.testing.assert_array_equal(got["x_grad_"], X)


def test_misuse_is_told() -> None:
    model = parsed("m (double[3] x, int64[3] i) => (double[3] y, int64[3] j) { y = Exp(x) j = Add(i, i) }")
    with pytest.raises(InputError, match="not a scalar"):
        onnxc.backward(model, "y", ["x"])
    with pytest.raises(InputError, match="no value named 'nothing'"):
        onnxc.backward(model, "y", ["nothing"])
    with pytest.raises(InputError, match="only floats"):
        onnxc.backward(model, "j", ["x"], cotangents=True)
    with pytest.raises(InputError, match="which of the outputs"):
        onnxc.backward(model)


def test_to_a_file(tmp_path: Path) -> None:
    model = parsed("m (double[3] x) => (double l) { y = Mul(x, x) l = ReduceSum <keepdims = 0> (y) }")
    assert onnxc.backward(model, "l", ["x"], path=tmp_path / "g.onnx") is None
    np.testing.assert_array_equal(run(onnx.load(tmp_path / "g.onnx"), x=X)["x_grad"], 2 * X)


# ------------------------------------------------------------ positions that are data


def test_rows_that_are_read_twice_add_up() -> None:
    model = parsed("""m (double[4, 2] w, int64[N] i) => (double l) {
        e = Gather(w, i) s = Mul(e, e) l = ReduceSum <keepdims = 0> (s) }""")
    w, i = np.arange(8.0).reshape(4, 2), np.array([1, 3, 1, -1, 1])
    wanted = np.zeros_like(w)
    np.add.at(wanted, i, 2 * w[i])
    np.testing.assert_array_equal(run(onnxc.backward(model, "l", ["w"]), w=w, i=i)["w_grad"], wanted)


def test_positions_that_are_written_twice() -> None:
    model = parsed("""m (double[4] x, int64[3] i, double[3] u) => (double[4] y) {
        y = ScatterElements <axis = 0, reduction = "add"> (x, i, u) }""")
    dy = np.array([1.0, 2, 3, 4])
    found = onnxc.backward(model, "y", ["x", "u"], cotangents=True, outputs=False)
    got = run(found, x=np.zeros(4), i=np.array([2, 2, 0]), u=np.ones(3), y_cotangent=dy)
    np.testing.assert_array_equal(got["x_grad"], dy)
    np.testing.assert_array_equal(got["u_grad"], [3, 3, 1])


# ------------------------------------------------------------ second order


def test_a_hessian_product() -> None:
    model = parsed("""m (double[3] x) => (double l) {
        a = Mul(x, x) b = Mul(a, x) l = ReduceSum <keepdims = 0> (b) }""")
    once = onnxc.backward(model, "l", ["x"], outputs=False)
    assert once is not None
    v = np.array([1.0, -2.0, 0.5])
    twice = onnxc.backward(once, "x_grad", ["x"], cotangents=True)
    got = run(twice, x=X, x_grad_cotangent=v)
    assert list(got) == ["x_grad", "x_grad_"]
    np.testing.assert_allclose(got["x_grad_"], 6 * X * v)
    assert twice is not None
    third = onnxc.backward(twice, "x_grad_", ["x"], cotangents=True, outputs=False)
    np.testing.assert_allclose(run(third, x=X, x_grad_cotangent=v, x_grad__cotangent=v)["x_grad"], 6 * v * v)


SECOND = [
    "test_sigmoid", "test_tanh", "test_softmax_axis_1", "test_logsoftmax_axis_1", "test_gelu_default_2", "test_mish",
    "test_matmul_3d", "test_gemm_all_attributes", "test_basic_conv_with_padding", "test_convtranspose_pads",
    "test_layer_normalization_2d_axis1", "test_reduce_prod_keepdims_random", "test_reduce_l2_keep_dims_random",
    "test_averagepool_2d_pads", "test_maxpool_2d_pads", "test_gather_1", "test_scatter_elements_with_axis", "test_div",
    "test_pow", "test_cumsum_2d_axis_0", "test_reduce_log_sum_exp_keepdims_random", "test_slice_neg_steps",
    "test_constant_pad", "test_attention_4d", "test_resize_upsample_scales_linear", "test_prelu_example",
    "test_einsum_batch_matmul", "test_batchnorm_epsilon_training_mode", "test_rms_normalization_2d_axis1",
    "test_l2normalization_axis_1", "test_gridsample_bilinear",
]  # fmt: skip
CASES = cases()


@pytest.mark.parametrize("name", SECOND)
def test_second_order(name: str) -> None:
    """The gradient's gradient, by way of ONNX models, against differences of the gradient."""
    case = CASES[name]
    found = derive(case)
    assert found is not None
    once = onnxc.backward(found.model, found.losses, found.wrt, cotangents=True, outputs=False)
    assert once is not None
    forward = decompose(load(once))
    named = {
        **case.inputs,
        **{f"{n}_cotangent": dy for n, dy in zip(found.losses, _dys(case, found.model), strict=True)},
    }
    given = [named[n] for n in forward.input_names]
    dys = cotangents_of(interpret(forward, given))
    twice = onnxc.backward(once, forward.output_names, found.wrt, cotangents=True, outputs=False)
    assert twice is not None
    graph = decompose(load(twice))
    named |= {f"{n}_cotangent": dy for n, dy in zip(forward.output_names, dys, strict=True)}
    results = interpret(graph, [named[n] for n in graph.input_names])
    for n, got in zip(found.wrt, results, strict=True):
        slope = measured(lambda xs: interpret(forward, xs), given, forward.input_names.index(n), dys, 8)
        compare(got, slope, n)


def _dys(case: Any, model: onnx.ModelProto) -> Sequence[Array]:
    forward = decompose(load(model))
    return cotangents_of(interpret(forward, [case.inputs[n] for n in forward.input_names]))


def test_weights_keep_their_names_and_equal_ones_stay_apart() -> None:
    text = """(float[n, 4] x, float[4, 4] first, float[4, 4] second, float[4] gain) => (float loss)
        { a = MatMul(x, first) g = Mul(a, gain) b = MatMul(g, second) loss = ReduceSumSquare<keepdims = 0>(b) }"""
    proto = parse(text, 20)
    for name, shape in (("first", (4, 4)), ("second", (4, 4)), ("gain", (4,))):
        proto.graph.initializer.append(numpy_helper.from_array(np.full(shape, 0.5, np.float32), name))
    gradient = onnxc.backward(proto)
    assert gradient is not None
    assert {"first", "second", "gain"} <= {t.name for t in gradient.graph.initializer}
    again = onnxc.backward(gradient, loss="loss")
    assert again is not None and {o.name for o in again.graph.output} >= {"first_grad_", "second_grad_", "gain_grad_"}
