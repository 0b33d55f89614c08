"""Gradients against PyTorch's: its conventions where a derivative does not exist, and no NaN where it has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxc.frontends.onnx_file import load
from onnxc.gradient import differentiate
from onnxc.primitives.interpret import interpret

torch = pytest.importorskip("torch")
F = torch.nn.functional
Array = np.ndarray[Any, Any]

_SIZES = [1e-9, 0.1, 0.5, 1.0, 2.0, 3.0, 6.0, 19.0, 40.0, 100.0, 700.0, 1e4]
POINTS = np.array([0.0, -0.0, *_SIZES, *(-x for x in _SIZES)])


def gradients_of(
    op: str,
    inputs: Mapping[str, Array],
    wrt: Sequence[str],
    dys: Sequence[Array | None],
    opset: int = 22,
    **attrs: object,
) -> list[Array]:
    """Those of one node by some of its inputs; `dys` are the cotangents of its outputs, None for outputs to ignore."""
    outputs = [f"y{k}" for k in range(len(dys))]
    node = helper.make_node(op, list(inputs), outputs, **attrs)
    floats = {n: a for n, a in inputs.items() if n and n in wrt}
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in floats.items()
    ]
    weights = [numpy_helper.from_array(np.asarray(a), n) for n, a in inputs.items() if n and n not in wrt]
    ends = [helper.make_empty_tensor_value_info(y) for y in outputs]
    graph = helper.make_graph([node], "one", infos, ends, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    losses = [y for y, dy in zip(outputs, dys, strict=True) if dy is not None]
    found = differentiate(load(model), losses, wrt, cotangents=True, outputs=False)
    given = {**floats, **{f"{y}_cotangent": dy for y, dy in zip(outputs, dys, strict=True) if dy is not None}}
    return interpret(found, [given[n] for n in found.input_names])


def torch_gradients(
    f: Callable[..., Any], arrays: Sequence[Array], dy: Array | None = None
) -> tuple[list[Array], Array]:
    """PyTorch's, and the cotangent that was used."""
    xs = [torch.tensor(a, requires_grad=a.dtype.kind == "f") for a in arrays]
    y = f(*xs)
    if dy is None:
        dy = np.random.default_rng(7).uniform(0.5, 1.5, y.shape).astype(arrays[0].dtype)
    y.backward(torch.tensor(dy))
    zeros = [np.zeros(a.shape) for a in arrays]
    return [z if x.grad is None else x.grad.numpy() for x, z in zip(xs, zeros, strict=True)], dy


def same(got: Array, wanted: Array, what: str = "") -> None:
    """Equal up to rounding; where PyTorch has infinities or NaN, anything that is no finite number will do."""
    finite = np.isfinite(wanted)
    rtol, atol = (1e-7, 1e-12) if got.dtype == np.float64 else (1e-4, 1e-6)
    np.testing.assert_allclose(got[finite], wanted[finite], rtol, atol, err_msg=what)
    assert not np.isfinite(got[~finite]).any() or np.isnan(wanted[~finite]).any(), what


UNARY: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "Abs": (torch.abs, {}), "Relu": (torch.relu, {}), "LeakyRelu": (lambda x: F.leaky_relu(x, 0.1), {"alpha": 0.1}),
    "Elu": (lambda x: F.elu(x, 1.5), {"alpha": 1.5}), "Selu": (torch.selu, {}),
    "Celu": (lambda x: F.celu(x, 1.5), {"alpha": 1.5}), "Gelu": (F.gelu, {}), "Sigmoid": (torch.sigmoid, {}),
    "HardSigmoid": (F.hardsigmoid, {"alpha": 1 / 6}), "HardSwish": (F.hardswish, {}), "Softplus": (F.softplus, {}),
    "Softsign": (F.softsign, {}), "Mish": (F.mish, {}), "Tanh": (torch.tanh, {}),
    "ThresholdedRelu": (lambda x: F.threshold(x, 1.0, 0.0), {"alpha": 1.0}),
    "Shrink": (lambda x: F.hardshrink(x, 0.5), {"lambd": 0.5}), "Sqrt": (torch.sqrt, {}),
    "Reciprocal": (torch.reciprocal, {}), "Log": (torch.log, {}), "Exp": (torch.exp, {}), "Erf": (torch.erf, {}),
    "Sin": (torch.sin, {}), "Cos": (torch.cos, {}), "Tan": (torch.tan, {}), "Asin": (torch.asin, {}),
    "Acos": (torch.acos, {}), "Atan": (torch.atan, {}), "Sinh": (torch.sinh, {}), "Cosh": (torch.cosh, {}),
    "Asinh": (torch.asinh, {}), "Acosh": (torch.acosh, {}), "Atanh": (torch.atanh, {}), "Sign": (torch.sign, {}),
    "Floor": (torch.floor, {}), "Ceil": (torch.ceil, {}), "Round": (torch.round, {}), "Neg": (torch.neg, {}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("op", UNARY)
def test_unary(op: str, dtype: type) -> None:
    f, attrs = UNARY[op]
    points = POINTS.astype(dtype)
    (wanted,), dy = torch_gradients(f, [points])
    (got,) = gradients_of(op, {"x": points}, ["x"], [dy], **attrs)
    same(got, wanted, op)


def test_variants_of_activations() -> None:
    (wanted,), dy = torch_gradients(lambda x: F.gelu(x, approximate="tanh"), [POINTS])
    same(gradients_of("Gelu", {"x": POINTS}, ["x"], [dy], approximate="tanh")[0], wanted)
    (wanted,), dy = torch_gradients(F.silu, [POINTS])
    same(gradients_of("Swish", {"x": POINTS}, ["x"], [dy], 24)[0], wanted)
    (wanted,), dy = torch_gradients(lambda x: F.softshrink(x, 0.5), [POINTS])
    same(gradients_of("Shrink", {"x": POINTS}, ["x"], [dy], lambd=0.5, bias=0.5)[0], wanted)
    (wanted,), dy = torch_gradients(lambda x: torch.clamp(x, -2.0, 3.0), [POINTS])
    same(gradients_of("Clip", {"x": POINTS, "l": np.array(-2.0), "h": np.array(3.0)}, ["x"], [dy])[0], wanted)
    slope = np.array([0.25])
    wanted_, dy = torch_gradients(F.prelu, [POINTS, slope])
    for got, w in zip(gradients_of("PRelu", {"x": POINTS, "s": slope}, ["x", "s"], [dy]), wanted_, strict=True):
        same(got, w, "PRelu")


BINARY: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "Max": (torch.maximum, {}), "Min": (torch.minimum, {}), "Mul": (torch.mul, {}), "Div": (torch.div, {}),
    "Sub": (torch.sub, {}),
}  # fmt: skip


@pytest.mark.parametrize("op", BINARY)
def test_binary(op: str) -> None:
    x, y = (a.ravel().copy() for a in np.meshgrid(POINTS, POINTS))
    f, attrs = BINARY[op]
    wanted, dy = torch_gradients(f, [x, y])
    for k, (got, w) in enumerate(
        zip(gradients_of(op, {"x": x, "y": y}, ["x", "y"], [dy], **attrs), wanted, strict=True)
    ):
        same(got, w, f"{op} by {k}")


def test_pow() -> None:
    x, p = (a.ravel().copy() for a in np.meshgrid(np.array([0.0, 0.5, 1.0, 2.0, -1.0, -2.0]), np.arange(-3.0, 4.0)))
    wanted, dy = torch_gradients(torch.pow, [x, p])
    got = gradients_of("Pow", {"x": x, "p": p}, ["x", "p"], [dy])
    same(got[0], wanted[0])
    positive = x >= 0
    same(got[1][positive], wanted[1][positive])
    for power in (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, -1.0):
        (wanted_, *_), dy = torch_gradients(lambda x, power=power: torch.pow(x, power), [x])
        same(gradients_of("Pow", {"x": x, "p": np.array(power)}, ["x"], [dy])[0], wanted_, f"power {power}")


ROWS = np.array([[0.0, 0.0, 0.0, 0.0], [1.0, 3.0, 3.0, -2.0], [5.0, 5.0, 5.0, 5.0], [0.0, 2.0, -3.0, 0.0],
                 [100.0, -100.0, 3.0, 0.0], [1e4, 1.0, -1e4, 1e4]])  # fmt: skip
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "ReduceMax": lambda x: x.amax(1), "ReduceMin": lambda x: x.amin(1), "ReduceSum": lambda x: x.sum(1),
    "ReduceMean": lambda x: x.mean(1), "ReduceProd": lambda x: x.prod(1),
    "ReduceL1": lambda x: torch.linalg.vector_norm(x, 1, 1), "ReduceL2": lambda x: torch.linalg.vector_norm(x, 2, 1),
    "ReduceLogSumExp": lambda x: torch.logsumexp(x, 1), "ReduceSumSquare": lambda x: (x * x).sum(1),
    "ReduceLogSum": lambda x: x.sum(1).log(),
}  # fmt: skip


@pytest.mark.parametrize("op", REDUCTIONS)
def test_reductions(op: str) -> None:
    (wanted,), dy = torch_gradients(REDUCTIONS[op], [ROWS])
    (got,) = gradients_of(op, {"x": ROWS, "axes": np.array([1])}, ["x"], [dy], keepdims=0)
    same(got, wanted, op)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
def test_softmax(op: str) -> None:
    f = {"Softmax": F.softmax, "LogSoftmax": F.log_softmax}[op]
    rows = np.concatenate([ROWS, [[-np.inf, 1.0, 2.0, 3.0]]])
    (wanted,), dy = torch_gradients(lambda x: f(x, dim=1), [rows])
    same(gradients_of(op, {"x": rows}, ["x"], [dy], axis=1)[0], wanted, op)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_losses(reduction: str) -> None:
    labels, weight = np.array([0, 3, 1, 2, 3, 1]), np.array([0.5, 1.0, 2.0, 0.25])
    (wanted, *_), dy = torch_gradients(
        lambda x: F.cross_entropy(x, torch.tensor(labels), torch.tensor(weight), ignore_index=1, reduction=reduction),
        [ROWS],
    )
    inputs = {"x": ROWS, "labels": labels, "weight": weight}
    (got,) = gradients_of("SoftmaxCrossEntropyLoss", inputs, ["x"], [dy], reduction=reduction, ignore_index=1)
    same(got, wanted)
    (wanted, *_), dy = torch_gradients(
        lambda x: F.nll_loss(x, torch.tensor(labels), torch.tensor(weight), ignore_index=1, reduction=reduction), [ROWS]
    )
    (got,) = gradients_of("NegativeLogLikelihoodLoss", inputs, ["x"], [dy], reduction=reduction, ignore_index=1)
    same(got, wanted)


def test_normalizations_of_constant_rows() -> None:
    scale, bias = np.array([1.0, 2.0, -1.0, 0.5]), np.array([0.1, 0.2, 0.3, 0.4])
    wanted, dy = torch_gradients(lambda x, s, c: F.layer_norm(x, (4,), s, c), [ROWS, scale, bias])
    inputs = {"x": ROWS, "s": scale, "c": bias}
    for got, w in zip(gradients_of("LayerNormalization", inputs, ["x", "s", "c"], [dy]), wanted, strict=True):
        np.testing.assert_allclose(got, w, 1e-6, 1e-9)
    wanted, dy = torch_gradients(lambda x, s: F.rms_norm(x, (4,), s, 1e-5), [ROWS, scale])
    inputs = {"x": ROWS, "s": scale}
    for got, w in zip(gradients_of("RMSNormalization", inputs, ["x", "s"], [dy], 23), wanted, strict=True):
        np.testing.assert_allclose(got, w, 1e-6, 1e-9)
    x = ROWS.reshape(2, 3, 4)
    scale, bias = scale[:3], bias[:3]
    wanted, dy = torch_gradients(lambda x, s, c: F.instance_norm(x, None, None, s, c), [x, scale, bias])
    inputs = {"x": x, "s": scale, "c": bias}
    for got, w in zip(gradients_of("InstanceNormalization", inputs, ["x", "s", "c"], [dy]), wanted, strict=True):
        np.testing.assert_allclose(got, w, 1e-6, 1e-8)


def test_batch_normalization_in_training() -> None:
    rng = np.random.default_rng(0)
    x, scale, bias = rng.standard_normal((4, 3, 5)), rng.standard_normal(3), rng.standard_normal(3)
    mean, var = np.zeros(3), np.ones(3)
    wanted, dy = torch_gradients(
        lambda x, s, c: F.batch_norm(x, torch.zeros(3).double(), torch.ones(3).double(), s, c, training=True),
        [x, scale, bias],
    )
    inputs = {"x": x, "s": scale, "c": bias, "m": mean, "v": var}
    found = gradients_of("BatchNormalization", inputs, ["x", "s", "c"], [dy, None, None], training_mode=1)
    for got, w in zip(found, wanted, strict=True):
        same(got, w)


def test_ties_in_windows_and_choices() -> None:
    x = np.array([[[1.0, 1.0, 0.0, 2.0, 2.0, 2.0, -1.0]]])
    for kernel, stride, pad in [(2, 1, 0), (3, 2, 1), (3, 3, 0)]:
        (wanted,), dy = torch_gradients(lambda x, a=(kernel, stride, pad): F.max_pool1d(x, *a), [x])
        attrs = {"kernel_shape": [kernel], "strides": [stride], "pads": [pad, pad]}
        same(gradients_of("MaxPool", {"x": x}, ["x"], [dy], **attrs)[0], wanted)
    image = np.random.default_rng(0).integers(0, 3, (2, 2, 7, 8)).astype(np.float64)
    for kernel, stride, pad in [(2, 1, 0), (3, 2, 1), (4, 3, 2)]:
        (wanted,), dy = torch_gradients(lambda x, a=(kernel, stride, pad): F.max_pool2d(x, *a), [image])
        attrs = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
        same(gradients_of("MaxPool", {"x": image}, ["x"], [dy], **attrs)[0], wanted)
    (wanted,), dy = torch_gradients(lambda x: torch.topk(x, 3, dim=2).values, [np.arange(7.0).reshape(1, 1, 7)])
    inputs = {"x": np.arange(7.0).reshape(1, 1, 7), "k": np.array([3])}
    same(gradients_of("TopK", inputs, ["x"], [dy, None], axis=2)[0], wanted)


def test_of_three_equal_the_maximum_goes_by_pairs() -> None:
    """Max of several is a chain: of equal elements the last has a half, those before it share the rest."""
    x = np.ones(1)
    f = lambda x, y, z: torch.maximum(torch.maximum(x, y), z)  # noqa: E731
    wanted, dy = torch_gradients(f, [x, x.copy(), x.copy()])
    got = gradients_of("Max", {"x": x, "y": x, "z": x}, ["x", "y", "z"], [dy])
    for g, w in zip(got, wanted, strict=True):
        same(g, w)


def test_norms_at_zero() -> None:
    x = np.array([[0.0, 0.0, 0.0], [3.0, -4.0, 0.0]])
    for p in (1, 2):
        dy = np.ones((2, 3))
        (got,) = gradients_of("LpNormalization", {"x": x}, ["x"], [dy], axis=1, p=p)
        assert np.isfinite(got).all()
    image = x.reshape(2, 1, 3)
    for op, attrs in [("GlobalLpPool", {}), ("LpPool", {"kernel_shape": [3]})]:
        (got,) = gradients_of(op, {"x": image}, ["x"], [np.ones((2, 1, 1))], **attrs)
        np.testing.assert_allclose(got.reshape(2, 3), [[0, 0, 0], [0.6, -0.8, 0]])


def test_where_guards_what_it_does_not_take() -> None:
    """PyTorch's trap: a branch that is not taken gets the cotangent 0, which times infinity is NaN. So it is here."""
    x = np.array([0.0, 4.0])
    (wanted,), dy = torch_gradients(lambda x: torch.where(x > 0, torch.sqrt(x), 0.0), [x])
    assert np.isnan(wanted[0])
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        one (double[2] x) => (double[2] y) {
            zero = Constant <value = double {0.0}> ()
            c = Greater(x, zero)
            r = Sqrt(x)
            y = Where(c, r, zero)
        }""")
    found = differentiate(load(model), "y", ["x"], cotangents=True, outputs=False)
    (got,) = interpret(found, [x, dy])
    np.testing.assert_allclose(got, wanted)


def test_cumulative_products_with_zeros() -> None:
    x = np.array([[1.0, 2.0, 0.0, 3.0, 4.0], [0.0, 1.0, 0.0, 2.0, 5.0]])
    (wanted,), dy = torch_gradients(lambda x: torch.cumprod(x, 1), [x])
    same(gradients_of("CumProd", {"x": x, "axis": np.array(1)}, ["x"], [dy], 26)[0], wanted)


@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align", [0, 1])
def test_grid_sample(mode: str, padding: str, align: int) -> None:
    rng = np.random.default_rng(0)
    x, grid = rng.standard_normal((2, 3, 5, 4)), rng.uniform(-1.4, 1.4, (2, 3, 4, 2))
    wanted, dy = torch_gradients(
        lambda x, g: F.grid_sample(
            x, g, {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode), padding, bool(align)
        ),
        [x, grid],
    )
    got = gradients_of(
        "GridSample", {"x": x, "g": grid}, ["x", "g"], [dy], mode=mode, padding_mode=padding, align_corners=align
    )
    for g, w in zip(got, wanted, strict=True):
        same(g, w)


QUANTIZED = """<ir_version: 10, opset_import: ["" : 21]>
    one (float[3, 4] x, float[{n}] s) => (float[3, 4] y) <{kind}[{n}] z = {{{zeros}}}> {{
        q = QuantizeLinear <axis = 1> (x, s, z)
        y = DequantizeLinear <axis = 1> (q, s, z)
    }}"""


@pytest.mark.parametrize("kind", ["int8", "uint8"])
@pytest.mark.parametrize("n", [1, 4])
def test_rounding_to_a_type_and_back_passes_gradients_on(kind: str, n: int) -> None:
    """As PyTorch's fake quantization has it, by its scale too: 1 where nothing is cut off, the limits included."""
    zeros = [3, 5, 0, 9][:n]
    low, high = (-128, 127) if kind == "int8" else (0, 255)
    x = np.random.default_rng(0).uniform(-9, 9, (3, 4)).astype(np.float32)
    scale = np.array([0.05, 0.1, 0.03, 0.02], np.float32)[:n]
    x[0, 0], x[1, 0] = (low - zeros[0]) * scale[0], (high - zeros[0]) * scale[0]
    zero = torch.tensor(zeros, dtype=torch.float32)

    def fake(x: Any, s: Any) -> Any:
        if n == 1:
            return torch._fake_quantize_learnable_per_tensor_affine(x, s, zero, low, high, 1.0)
        return torch._fake_quantize_learnable_per_channel_affine(x, s, zero, 1, low, high, 1.0)

    (dx, ds), dy = torch_gradients(fake, [x, scale])
    model = onnx.parser.parse_model(QUANTIZED.format(n=n, kind=kind, zeros=", ".join(map(str, zeros))))
    found = differentiate(load(model), "y", ["x", "s"], cotangents=True)
    y, got, by_scale = interpret(found, [x, scale, dy])
    np.testing.assert_array_equal(y, fake(torch.tensor(x), torch.tensor(scale)).numpy())
    np.testing.assert_allclose(got, dx, 1e-6)
    np.testing.assert_allclose(by_scale, ds, 1e-4)
    assert 0 < (dx == 0).sum() < dx.size
