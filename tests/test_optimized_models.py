"""Models that onnxruntime optimized and saved, floating point and quantized, compile and agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import onnxc
from models.zoo import store
from onnxc.errors import UnsupportedError
from tests.agreement import assert_agrees
from tests.ops_harness import onnxruntime_multiplies_bytes

pytestmark = pytest.mark.every_target
LEVELS = {
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
Array = np.ndarray[Any, Any]

CNN = """<ir_version: 8, opset_import: ["" : 17]>
cnn (float[N, 3, 16, 16] x) => (float[N, 10] y) {
  c1 = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, w1, b1)
  n1 = BatchNormalization (c1, s1, o1, m1, v1)
  r1 = Relu (n1)
  c2 = Conv <pads = [1, 1, 1, 1]> (r1, w2, b2)
  a2 = Add (c2, r1)
  r2 = Relu (a2)
  d2 = Conv <pads = [1, 1, 1, 1], group = 8> (r2, w3, b3)
  k2 = Clip (d2, zero, six)
  c3 = Conv (k2, w4, b4)
  l3 = LeakyRelu <alpha = 0.1> (c3)
  c4 = Conv (r2, w4, b4)
  g4 = Sigmoid (c4)
  m4 = Mul (c4, g4)
  h4 = HardSigmoid (m4)
  j = Concat <axis = 1> (l3, m4, h4)
  p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (j)
  q = AveragePool <kernel_shape = [2, 2]> (p)
  g = GlobalAveragePool (q)
  f = Flatten (g)
  e = Gemm <transB = 1> (f, w5, b5)
  t = Tanh (e)
  u = Gemm <transB = 1> (t, w6, b6)
  y = Softmax (u)
}"""
CNN_WEIGHTS: dict[str, tuple[int, ...]] = {
    "w1": (8, 3, 3, 3), "b1": (8,), "s1": (8,), "o1": (8,), "m1": (8,), "v1": (8,), "w2": (8, 8, 3, 3), "b2": (8,),
    "w3": (8, 1, 3, 3), "b3": (8,), "w4": (6, 8, 1, 1), "b4": (6,), "w5": (16, 18), "b5": (16,), "w6": (10, 16),
    "b6": (10,),
}  # fmt: skip

ENCODER = """<ir_version: 8, opset_import: ["" : 17]>
encoder (float[B, S, 32] x) => (float[B, S, 32] y, float[B, S, 8] z) {
  sum = Add (x, skip)
  n = LayerNormalization <axis = -1> (sum, s1, o1)
  q0 = MatMul (n, wq)
  q1 = Add (q0, bq)
  kt = Transpose <perm = [0, 2, 1]> (q1)
  scores = MatMul (q1, kt)
  scaled = Mul (scores, eighth)
  p = Softmax <axis = -1> (scaled)
  o = MatMul (p, q1)
  h = Add (o, n)
  n2 = LayerNormalization <axis = -1> (h, s1, o1)
  u0 = MatMul (n2, wu)
  u = Add (u0, bu)
  d = Div (u, root)
  e = Erf (d)
  e1 = Add (e, one)
  m = Mul (u, e1)
  g = Mul (m, half)
  v0 = MatMul (g, wd)
  v = Add (v0, bd)
  y = Add (v, n2)
  fast = MatMul (y, wz)
  cube = Mul (fast, fast)
  sg = Sigmoid (fast)
  silu = Mul (fast, sg)
  z = Add (silu, cube)
}"""
ENCODER_WEIGHTS: dict[str, tuple[int, ...]] = {
    "skip": (32,), "s1": (32,), "o1": (32,), "wq": (32, 32), "bq": (32,), "wu": (32, 64), "bu": (64,),
    "wd": (64, 32), "bd": (32,), "wz": (32, 8),
}  # fmt: skip

LSTM = """<ir_version: 8, opset_import: ["" : 17]>
lstm (float[T, B, 12] x) => (float[T, B, 5] y) {
  h, last, cell = LSTM <hidden_size = 16> (x, w, r, b)
  f = Squeeze (h, axis)
  y0 = MatMul (f, wo)
  y = Add (y0, bo)
}"""
LSTM_WEIGHTS: dict[str, tuple[int, ...]] = {
    "w": (1, 64, 12), "r": (1, 64, 16), "b": (1, 128), "wo": (16, 5), "bo": (5,),
}  # fmt: skip
CONSTANTS = {
    "zero": np.float32(0), "six": np.float32(6), "one": np.float32(1), "half": np.float32(0.5),
    "root": np.float32(np.sqrt(2)), "eighth": np.float32(0.125), "axis": np.array([1]),
}  # fmt: skip
MODELS = {"cnn": (CNN, CNN_WEIGHTS), "encoder": (ENCODER, ENCODER_WEIGHTS), "lstm": (LSTM, LSTM_WEIGHTS)}


def model_of(name: str) -> onnx.ModelProto:
    text, shapes = MODELS[name]
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(5)
    used = {i for node in model.graph.node for i in node.input}
    weights: dict[str, Array] = {k: np.asarray(v) for k, v in CONSTANTS.items() if k in used}
    for k, shape in shapes.items():
        scale = np.sqrt(np.prod(shape[1:])) if len(shape) > 1 else 2.0
        array = (rng.standard_normal(shape) / scale).astype(np.float32)
        weights[k] = np.abs(array) + np.float32(0.5) if k[0] in "vs" and k != "skip" else array
    model.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in weights.items())
    return model


def inputs_of(name: str) -> dict[str, Array]:
    shape = {"cnn": (2, 3, 16, 16), "encoder": (2, 7, 32), "lstm": (9, 2, 12)}[name]
    return {"x": np.random.default_rng(7).standard_normal(shape).astype(np.float32)}


def optimized(path: Path, level: str) -> Path:
    """The model as onnxruntime saves it; in the order of channels that every machine has."""
    options = ort.SessionOptions()
    options.graph_optimization_level = LEVELS[level]
    options.log_severity_level = 4
    target = path.with_suffix(f".{level}.onnx")
    options.optimized_model_filepath = str(target)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", f"{target.name}.data")
    ort.InferenceSession(str(path), options, disabled_optimizers=["NchwcTransformer"])
    return target


def test_the_layout_of_one_machine(tmp_path: Path) -> None:
    """Weights in the blocks of a CPU's kernels: the error says what to do."""
    node = helper.make_node("Conv", ["x", "w"], ["y"], domain="com.microsoft.nchwc")
    info = [helper.make_tensor_value_info(name, 1, None) for name in "xy"]
    weights = [numpy_helper.from_array(np.ones((8, 8, 1, 1), np.float32), "w")]
    graph = helper.make_graph([node], "g", info[:1], info[1:], weights)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft.nchwc", 1)]
    with pytest.raises(UnsupportedError, match=r"save it again.*ORT_ENABLE_EXTENDED or lower"):
        onnxc.compile(helper.make_model(graph, opset_imports=opsets, ir_version=9))


def domains(path: Path) -> set[str]:
    return {node.domain for node in onnx.load(path, load_external_data=False).graph.node}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MODELS)
def test_floating_point(name: str, level: str, tmp_path: Path) -> None:
    """The optimized model gives the answers of the one that it was made from."""
    path = tmp_path / "model.onnx"
    onnx.save(model_of(name), path)
    saved = optimized(path, level)
    if level == "extended" and name != "lstm":
        assert "com.microsoft" in domains(saved)
    assert_agrees(path, inputs_of(name), onnxc.compile(saved))


class Calibration:
    """What `quantize_static` reads: the inputs, a few times."""

    def __init__(self, inputs: dict[str, Array]) -> None:
        self.left: Iterator[dict[str, Array]] = iter([inputs] * 2)

    def get_next(self) -> dict[str, Array] | None:
        return next(self.left, None)


def quantized(path: Path, how: str, inputs: dict[str, Array]) -> Path:
    quantization = pytest.importorskip("onnxruntime.quantization")
    target = path.with_suffix(f".{how}.onnx")
    narrow = not onnxruntime_multiplies_bytes()  # weights of 7 bits, as its own documents advise for such CPUs
    if how == "dynamic":
        quantization.quantize_dynamic(str(path), str(target), reduce_range=narrow)
    else:
        chosen = quantization.QuantFormat.QOperator if how == "qoperator" else quantization.QuantFormat.QDQ
        types = {"qdq": (quantization.QuantType.QUInt8, quantization.QuantType.QInt8)}
        activation, weight = types.get(how, (quantization.QuantType.QUInt8, quantization.QuantType.QUInt8))
        quantization.quantize_static(
            str(path), str(target), Calibration(inputs), quant_format=chosen, per_channel=how == "qdq",
            activation_type=activation, weight_type=weight, reduce_range=narrow,
        )  # fmt: skip
    return target


@pytest.fixture
def thread_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime's DynamicQuantizeLSTM gives the rows that a thread computes one scale; onnxc gives each its own."""

    class Session(ort.InferenceSession):  # type: ignore[misc]
        def __init__(self, model: Any, sess_options: Any = None, *args: Any, **options: Any) -> None:
            sess_options = sess_options or ort.SessionOptions()
            sess_options.intra_op_num_threads = 2  # the batch of the LSTM
            super().__init__(model, sess_options, *args, **options)

    monkeypatch.setattr(ort, "InferenceSession", Session)


@pytest.mark.usefixtures("thread_for_each_row")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", ["dynamic", "qdq", "qoperator"])
@pytest.mark.parametrize("name", MODELS)
def test_quantized(name: str, how: str, level: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model_of(name), path)
    saved = optimized(quantized(path, how, inputs_of(name)), level)
    assert_agrees(saved, inputs_of(name), onnxc.compile(saved))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in store.MICRO_GRAPHS else pytest.mark.exhaustive) for n in store.NAMES]
)
def test_zoo(zoo: Callable[[str], store.ZooModel], name: str, tmp_path: Path) -> None:
    model = zoo(name)
    path = tmp_path / model.path.name
    for part in model.path.parent.glob(f"{model.path.name}*"):
        (tmp_path / part.name).symlink_to(part)
    assert_agrees(model.path, model.inputs(), onnxc.compile(optimized(path, "extended")))
