"""Training steps on a GPU: against the CPU's, with kernels in Triton's interpreter; and their machine code."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxc
from onnxc.optim import SGD, AdamW
from tests.simulated_training import Batch, Trained, simulated, train
from tests.targets import needs_triton
from tests.triton_simulator import Simulator

pytestmark = needs_triton
STEPS = 3


def model_of(text: str, seed: int = 0, **weights: tuple[int, ...]) -> bytes:
    """A model of the text of its graph, with random weights of these shapes."""
    rng = np.random.default_rng(seed)
    found = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]>\n{text}')
    for name, shape in weights.items():
        array = rng.standard_normal(shape) / np.sqrt(np.prod(shape[:-1]))
        found.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    return found.SerializeToString()


LOSS = 'loss = SoftmaxCrossEntropyLoss<reduction = "mean">(y, t)'
MLP = model_of(
    f"""g (float[8, 6] x, int64[8] t) => (float loss) {{
    a = MatMul(x, w) b = Add(a, c) h = Relu(b) y = MatMul(h, v) {LOSS} }}""",
    w=(6, 16), c=(16,), v=(16, 4),
)  # fmt: skip
CONVOLUTIONS = model_of(
    f"""g (float[2, 3, 6, 6] x, int64[2] t) => (float loss) {{
    a = Conv<pads = [1, 1, 1, 1]>(x, w) n, m2, s2 = BatchNormalization<training_mode = 1>(a, g1, b1, mean, var)
    h = Relu(n) p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(h) q = Conv(p, u)
    d = Conv<strides = [2, 2], pads = [1, 1, 1, 1]>(q, k) r = Relu(d) z = GlobalAveragePool(r) f = Flatten(z)
    y = MatMul(f, v) {LOSS} }}""",
    w=(8, 3, 3, 3), g1=(8,), b1=(8,), mean=(8,), u=(6, 8, 1, 1), k=(5, 6, 3, 3), v=(5, 4),
)  # fmt: skip


def with_variance(model: bytes) -> bytes:
    proto = onnx.load_from_string(model)
    proto.graph.initializer.append(numpy_helper.from_array(np.ones(8, np.float32), "var"))
    return proto.SerializeToString()


CONVOLUTIONS = with_variance(CONVOLUTIONS)
GPT = model_of(
    """g (int64[2, 6] ids, int64[2, 6] t) => (float loss) {
    e = Gather(words, ids) x = Add(e, places)
    n = LayerNormalization<axis = -1>(x, g1, b1) qkv = MatMul(n, w) q0, k0, v0 = Split<axis = -1, num_outputs = 3>(qkv)
    heads = Constant<value = int64[4] {2, 6, 2, 8}>() whole = Constant<value = int64[3] {2, 6, 16}>()
    q1 = Reshape(q0, heads) k1 = Reshape(k0, heads) v1 = Reshape(v0, heads)
    q = Transpose<perm = [0, 2, 1, 3]>(q1) k = Transpose<perm = [0, 2, 3, 1]>(k1) v = Transpose<perm = [0, 2, 1, 3]>(v1)
    s0 = MatMul(q, k) r = Constant<value = float {0.35355}>() s1 = Mul(s0, r) s = Add(s1, mask)
    p = Softmax<axis = -1>(s) o0 = MatMul(p, v) o1 = Transpose<perm = [0, 2, 1, 3]>(o0) o = Reshape(o1, whole)
    a = MatMul(o, wo) x1 = Add(x, a) n1 = LayerNormalization<axis = -1>(x1, g2, b2)
    u = MatMul(n1, w1) h = Gelu(u) m = MatMul(h, w2) x2 = Add(x1, m) l = MatMul(x2, out)
    rows = Constant<value = int64[2] {12, 20}>() y = Reshape(l, rows) flat = Constant<value = int64[1] {12}>()
    t1 = Reshape(t, flat) loss = SoftmaxCrossEntropyLoss<reduction = "mean">(y, t1) }""",
    words=(20, 16), places=(6, 16), g1=(16,), b1=(16,), w=(16, 48), wo=(16, 16), g2=(16,), b2=(16,), w1=(16, 64),
    w2=(64, 16), out=(16, 20),
)  # fmt: skip


def with_mask(model: bytes) -> bytes:
    """Opset 20, for Gelu, and a causal mask as a weight that is not trained."""
    proto = onnx.load_from_string(model)
    proto.opset_import[0].version = 20
    mask = np.triu(np.full((6, 6), -1e9, np.float32), 1)
    proto.graph.node.insert(0, helper.make_node("Constant", [], ["mask"], value=numpy_helper.from_array(mask)))
    return proto.SerializeToString()


GPT = with_mask(GPT)
RNG = np.random.default_rng(1)
BATCHES: dict[str, list[Batch]] = {
    "mlp": [
        {"x": RNG.standard_normal((8, 6)).astype(np.float32), "t": RNG.integers(0, 4, 8)} for _ in range(STEPS)
    ],
    "convolutions": [
        {"x": RNG.standard_normal((2, 3, 6, 6)).astype(np.float32), "t": RNG.integers(0, 4, 2)} for _ in range(STEPS)
    ],
    "gpt": [{"ids": RNG.integers(0, 20, (2, 6)), "t": RNG.integers(0, 20, (2, 6))} for _ in range(STEPS)],
}  # fmt: skip
MODELS = {"mlp": MLP, "convolutions": CONVOLUTIONS, "gpt": GPT}


def both(simulator: Simulator, name: str, **options: Any) -> tuple[Trained, Trained]:
    """On the CPU, and on the simulated GPU."""
    model, batches = MODELS[name], BATCHES[name]
    return train(model, batches, "loss", options), simulated(simulator, model, batches, **options)


def assert_same(ours: Trained, theirs: Trained, rtol: float, atol: float) -> None:
    assert ours.errors == theirs.errors == [""] * STEPS
    np.testing.assert_allclose(theirs.losses, ours.losses, rtol=rtol)
    assert ours.state.keys() == theirs.state.keys()
    for key in ours.state.keys() - {"seed"}:
        np.testing.assert_allclose(theirs.state[key], ours.state[key], rtol=rtol, atol=atol, err_msg=key)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp", {"optimizer": SGD(lr=0.1, momentum=0.9), "clip_norm": 0.5}),
        ("mlp", {"optimizer": AdamW(lr=1e-2), "accumulate": 2}),
        ("convolutions", {"optimizer": SGD(lr=0.05, momentum=0.9)}),
        ("gpt", {"optimizer": AdamW(lr=1e-3), "memory_budget": 0.3}),
    ],
)
def test_steps_are_those_of_the_cpu(simulator: Simulator, name: str, options: dict[str, Any]) -> None:
    assert_same(*both(simulator, name, **options), rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize(("name", "precision"), [("mlp", "float16"), ("gpt", "bfloat16")])
def test_steps_in_halves(simulator: Simulator, name: str, precision: str) -> None:
    """Parameters are float32, and what is rounded to halves may be rounded elsewhere than on the CPU."""
    ours, theirs = both(simulator, name, optimizer=SGD(lr=0.05), precision=precision)
    assert ours.errors == theirs.errors == [""] * STEPS
    np.testing.assert_allclose(theirs.losses, ours.losses, rtol=2e-2 if precision == "bfloat16" else 3e-3)
    assert all(v.dtype != np.float16 for v in theirs.state.values())


def test_a_failed_step_is_the_last_one(simulator: Simulator) -> None:
    """On a GPU the kernels behind the one that fails run all the same: nothing can be said of the parameters."""
    batches = [BATCHES["gpt"][0], {**BATCHES["gpt"][1], "ids": np.full((2, 6), 20)}, BATCHES["gpt"][2]]
    found = simulated(simulator, GPT, batches, optimizer=SGD(lr=0.1))
    assert found.errors == ["", "RunError", "InputError"]


def test_compiled_without_a_gpu() -> None:
    """The kernels of a step become machine code anywhere; parameters are read and set before there is a GPU."""
    step = onnxc.compile_training(
        MLP, loss="loss", optimizer=AdamW(lr=1e-3), precision="bfloat16", target="cuda:sm_90", cache=False
    )
    manifest = step._programs[0].manifest
    assert set(manifest["cuda"]["images"]) == {"sm_90a"}
    assert len(manifest["updates"]["inputs"]) == 3 * 3  # three weights with two moments each
    value = np.ones((6, 16), np.float32)
    step.set_parameters({"w": value})
    assert np.array_equal(step.parameters["w"], value)
    assert helper.np_dtype_to_tensor_dtype(step.parameters["c"].dtype) == TensorProto.FLOAT
