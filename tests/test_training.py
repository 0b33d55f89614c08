"""Training steps: the optimizers beside PyTorch's, and what a step keeps, gives back and refuses."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

import onnxc
from onnxc.errors import InputError, ModelError, UnsupportedError
from onnxc.optim import SGD, Adagrad, Adam, AdamW, Lion, Optimizer
from onnxc.training.step import TrainingStep, compile_training
from tests.small_models import Array, parse

RNG = np.random.default_rng(3)
STEPS = 12
MODEL = """
(float[n, 7] x, int64[n] y, float[7, 11] w, float[11] bias, float[5, 11] v, float[11] gain) =>
 (float loss, float[n, 5] scores)
{
  h = MatMul(x, w)
  a = Add(h, bias)
  g = Gelu(a)
  m = LayerNormalization(g, gain)
  scores = Gemm<transB = 1>(m, v)
  loss = SoftmaxCrossEntropyLoss(scores, y)
}
"""


class Net(nn.Module):
    """MODEL in PyTorch, from the same weights."""

    def __init__(self, weights: dict[str, Array]) -> None:
        super().__init__()
        for name, array in weights.items():
            setattr(self, name, nn.Parameter(torch.tensor(array)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = nn.functional.gelu(x @ self.w + self.bias)
        return nn.functional.cross_entropy(nn.functional.layer_norm(h, (11,), self.gain) @ self.v.T, y)


def model() -> tuple[onnx.ModelProto, dict[str, Array]]:
    shapes = {"w": (7, 11), "bias": (11,), "v": (5, 11), "gain": (11,)}
    weights = {n: (RNG.standard_normal(s) * 0.5).astype(np.float32) for n, s in shapes.items()}
    proto = parse(MODEL, 20)
    proto.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in weights.items())
    return proto, weights


def batch(rows: int = 6) -> tuple[Array, Array]:
    return RNG.standard_normal((rows, 7)).astype(np.float32), RNG.integers(0, 5, rows)


class TorchLion(torch.optim.Optimizer):
    """Lion as its paper has it: PyTorch has none."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                way = (mean * 0.9 + p.grad * (1 - 0.9)).sign()
                p.data.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * way)
                mean.mul_(0.99).add_(p.grad, alpha=1 - 0.99)


T = torch.optim
OPTIMIZERS: dict[str, tuple[Optimizer, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (SGD(lr=0.1), lambda p: T.SGD(p, lr=0.1)),
    "momentum": (SGD(lr=0.05, momentum=0.9, weight_decay=0.01),
                 lambda p: T.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01)),
    "nesterov": (SGD(lr=0.05, momentum=0.8, nesterov=True), lambda p: T.SGD(p, lr=0.05, momentum=0.8, nesterov=True)),
    "adam": (Adam(lr=0.01, weight_decay=0.1), lambda p: T.Adam(p, lr=0.01, weight_decay=0.1)),
    "adamw": (AdamW(lr=0.01, beta1=0.8, beta2=0.99), lambda p: T.AdamW(p, lr=0.01, betas=(0.8, 0.99))),
    "adagrad": (Adagrad(lr=0.1, lr_decay=0.1), lambda p: T.Adagrad(p, lr=0.1, lr_decay=0.1)),
    "lion": (Lion(lr=0.003, weight_decay=0.1), lambda p: TorchLion(p, lr=0.003, weight_decay=0.1)),
}  # fmt: skip


def train_both(
    step: TrainingStep, net: Net, theirs: torch.optim.Optimizer, clip: Callable[[], Any] = lambda: None
) -> None:
    """Losses and parameters stay together over some steps."""
    for _ in range(STEPS):
        x, y = batch()
        loss = net(torch.tensor(x), torch.tensor(y))
        theirs.zero_grad()
        loss.backward()
        clip()
        theirs.step()
        np.testing.assert_allclose(step(x, y)["loss"], loss.detach().numpy(), rtol=2e-5)
    for name, p in net.named_parameters():
        np.testing.assert_allclose(step.parameters[name], p.detach().numpy(), rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_beside_pytorch(name: str) -> None:
    proto, weights = model()
    mine, theirs = OPTIMIZERS[name]
    net = Net(weights)
    train_both(compile_training(proto, loss="loss", optimizer=mine), net, theirs(net.parameters()))


@pytest.mark.parametrize("kind", ["norm", "value"])
def test_clipping_beside_pytorch(kind: str) -> None:
    proto, weights = model()
    net = Net(weights)
    clip = {"norm": lambda: nn.utils.clip_grad_norm_(net.parameters(), 0.1),
            "value": lambda: nn.utils.clip_grad_value_(net.parameters(), 0.01)}[kind]  # fmt: skip
    bound: dict[str, Any] = {"norm": {"clip_norm": 0.1}, "value": {"clip_value": 0.01}}[kind]
    step = compile_training(proto, loss="loss", optimizer=SGD(lr=0.5), **bound)
    train_both(step, net, T.SGD(net.parameters(), lr=0.5), clip)


def test_a_batch_in_parts_is_the_batch() -> None:
    proto, _ = model()
    whole = compile_training(proto, loss="loss", optimizer=AdamW(lr=0.01))
    parts = compile_training(proto, loss="loss", optimizer=AdamW(lr=0.01), accumulate=3)
    for _ in range(4):
        x, y = batch(12)
        whole(x, y)
        before = parts.parameters
        for k in range(3):
            for name, array in parts.parameters.items():
                np.testing.assert_array_equal(array, before[name])
            parts(x[4 * k : 4 * k + 4], y[4 * k : 4 * k + 4])
    assert (parts.calls, parts.steps, whole.steps) == (12, 4, 4)
    for name, array in whole.parameters.items():
        np.testing.assert_allclose(parts.parameters[name], array, rtol=1e-4, atol=1e-5)


def test_schedules_and_rates_of_one_step() -> None:
    proto, _ = model()
    step = compile_training(proto, loss="loss", optimizer=SGD(lr=1.0), schedule=lambda k: 0.5 if k < 1 else 0.0)
    before = step.parameters["w"]
    x, y = batch()
    step(x, y)
    once = step.parameters["w"]
    assert not np.array_equal(before, once)
    assert step.learning_rate == 0.0
    step(x, y)
    np.testing.assert_array_equal(step.parameters["w"], once)
    step(x, y, learning_rate=0.5)
    assert not np.array_equal(step.parameters["w"], once)


def test_frozen_weights_stay() -> None:
    proto, weights = model()
    step = compile_training(proto, loss="loss", optimizer=AdamW(lr=0.1), wrt=["v"])
    for _ in range(3):
        step(*batch())
    assert set(step.parameters) == {"v"}
    trained = step.to_onnx()
    assert trained is not None
    for tensor in trained.graph.initializer:
        same = np.array_equal(numpy_helper.to_array(tensor), weights[tensor.name])
        assert same == (tensor.name != "v")


def test_a_run_goes_on_from_its_file(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    proto, _ = model()
    batches = [batch() for _ in range(6)]
    step = compile_training(proto, loss="loss", optimizer=Adam(lr=0.01))
    for x, y in batches[:3]:
        step(x, y)
    step.save(tmp_path / "state.safetensors")
    other = compile_training(proto, loss="loss", optimizer=Adam(lr=0.01))
    other.load(tmp_path / "state.safetensors")
    assert other.steps == 3
    for x, y in batches[3:]:
        step(x, y)
        other(x, y)
    for name, array in step.state().items():
        np.testing.assert_array_equal(other.state()[name], array, err_msg=name)


def test_the_trained_model_runs_in_onnxruntime(tmp_path: Path) -> None:
    proto, _ = model()
    step = compile_training(proto, loss="loss", optimizer=SGD(lr=0.5))
    x, y = batch()
    losses = [float(step(x, y)["loss"]) for _ in range(10)]
    assert losses[-1] < losses[0] - 0.1
    step.to_onnx(tmp_path / "trained.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx")
    loss, _ = session.run(None, {"x": x, "y": y})
    np.testing.assert_allclose(loss, step(x, y)["loss"], rtol=1e-5)


def test_equal_runs_have_equal_bits() -> None:
    proto, _ = model()
    batches = [batch() for _ in range(5)]
    runs = [compile_training(proto, loss="loss", optimizer=AdamW(lr=0.01), threads=k) for k in (1, 2)]
    for run in runs:
        for x, y in batches:
            run(x, y)
    for name, array in runs[0].parameters.items():
        assert array.tobytes() == runs[1].parameters[name].tobytes()


NORMALIZED = """
(float[n, 3, 4] x, float[3] scale, float[3] bias, float[3] mean, float[3] var) => (float loss)
{
  y, new_mean, new_var = BatchNormalization<training_mode = 1, momentum = 0.9>(x, scale, bias, mean, var)
  s = Sigmoid(y)
  q = Mul(s, s)
  loss = ReduceSum<keepdims = 0>(q)
}
"""


INFERRING = NORMALIZED.replace(", new_mean, new_var", "").replace("training_mode = 1, ", "")


@pytest.mark.parametrize(
    ("text", "opset"),
    [(NORMALIZED, 20), (NORMALIZED.replace("training_mode = 1, ", ""), 13), (INFERRING, 20), (INFERRING, 13)],
)
def test_running_statistics_follow_the_batches(text: str, opset: int) -> None:
    proto = parse(text, opset)
    start = {"scale": [1, 2, 3], "bias": [0, 1, 0], "mean": [0, 0, 0], "var": [1, 1, 1]}
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(a, np.float32), n) for n, a in start.items())
    step = compile_training(proto, optimizer=SGD(lr=0.1), batch_statistics=text is INFERRING)
    mean, var = np.zeros(3), np.ones(3)
    for _ in range(3):
        x = RNG.standard_normal((5, 3, 4)).astype(np.float32) * 3 + 1
        step(x)
        mean = 0.9 * mean + 0.1 * x.mean((0, 2))
        var = 0.9 * var + 0.1 * x.var((0, 2))  # the standard divides by the number of elements
    np.testing.assert_allclose(step.parameters["mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(step.parameters["var"], var, rtol=1e-5)
    assert not np.array_equal(step.parameters["scale"], np.asarray(start["scale"], np.float32))
    tuned = step.to_onnx()
    assert tuned is not None and tuned.graph.node == proto.graph.node
    assert set(compile_training(proto, optimizer=SGD(lr=0.1)).parameters) == (
        {"scale", "bias"} if text is INFERRING else start.keys()
    )


def _normalizing(text: str, weights: dict[str, list[float]]) -> onnx.ModelProto:
    proto = parse(text, 20)
    proto.graph.initializer.extend(numpy_helper.from_array(np.float32(a), n) for n, a in weights.items())
    return proto


@pytest.mark.parametrize("trained", [False, True])
def test_a_normalization_that_is_used_twice_takes_its_statistics_further(trained: bool) -> None:
    results, attribute = (", m1, v1", ", m2, v2"), "<training_mode = 1>"
    if not trained:
        results, attribute = ("", ""), ""
    text = f"""(float[6, 2] x, float[2] s, float[2] b, float[2] mean, float[2] var) => (float loss) {{
      y{results[0]} = BatchNormalization{attribute}(x, s, b, mean, var)
      y2 = Mul(y, y)
      z{results[1]} = BatchNormalization{attribute}(y2, s, b, mean, var)
      q = Mul(z, z)
      loss = ReduceSum<keepdims = 0>(q)
    }}"""
    start = {"s": [1.0, 2.0], "b": [0.5, 0.1], "mean": [0.0, 0.0], "var": [1.0, 1.0]}
    step = compile_training(_normalizing(text, start), optimizer=SGD(lr=0.1), batch_statistics=not trained)
    x = np.random.default_rng(1).standard_normal((6, 2)).astype(np.float32)
    step(x)
    y = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) * start["s"] + start["b"]
    mean, var = np.zeros(2), np.ones(2)
    for v in (x, y * y):
        mean, var = 0.9 * mean + 0.1 * v.mean(0), 0.9 * var + 0.1 * v.var(0)
    np.testing.assert_allclose(step.parameters["mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(step.parameters["var"], var, rtol=1e-5)


def test_a_normalization_that_cannot_change_its_mode_is_named() -> None:
    weights = {"s": [1.0, 2.0], "b": [0.5, 0.1], "mean": [0.0, 0.0], "var": [1.0, 1.0]}
    inside = """(float[6, 2] x, bool c, float[2] s, float[2] b, float[2] mean, float[2] var) => (float loss) {
      y = If(c) <then_branch = t () => (float[6, 2] u) { u = BatchNormalization(x, s, b, mean, var) },
                 else_branch = e () => (float[6, 2] w) { w = Mul(x, s) }>
      loss = ReduceSum<keepdims = 0>(y)
    }"""
    with pytest.raises(UnsupportedError, match=r"batch_statistics: n\d BatchNormalization is inside of n0 If"):
        compile_training(_normalizing(inside, weights), optimizer=SGD(lr=0.1), batch_statistics=True)
    given = """(float[6, 2] x, float[2] mean, float[2] var, float[2] s, float[2] b) => (float loss) {
      y = BatchNormalization(x, s, b, mean, var)
      loss = ReduceSum<keepdims = 0>(y)
    }"""
    own = {name: weights[name] for name in ("s", "b")}
    with pytest.raises(UnsupportedError, match="n0 BatchNormalization has statistics that are no weights"):
        compile_training(_normalizing(given, own), optimizer=SGD(lr=0.1), batch_statistics=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "nothing"}, "no value named 'nothing'"),
        ({"loss": "scores"}, "not a scalar"),
        ({}, "which of the outputs"),
        ({"loss": "loss", "wrt": ["u"]}, "no value named 'u'"),
        ({"loss": "loss", "clip_norm": 0.0}, "clip_norm is positive"),
        ({"loss": "loss", "accumulate": 0}, "accumulate"),
    ],
)
def test_what_cannot_be_trained_is_said(options: dict[str, Any], message: str) -> None:
    proto, _ = model()
    with pytest.raises(InputError, match=message):
        compile_training(proto, optimizer=SGD(), **options)


def test_negative_rates_are_refused() -> None:
    with pytest.raises(InputError, match="lr is a number from 0"):
        AdamW(lr=-1.0)


def test_wrong_batches_and_states_change_nothing() -> None:
    proto, _ = model()
    step = compile_training(proto, loss="loss", optimizer=SGD())
    before = step.state()
    x, y = batch()
    wrong: list[tuple[tuple[Array, ...], dict[str, Any]]] = [
        ((x,), {}), ((x, y, y), {}), ((x,), {"x": x}), ((x, y[:-1]), {}), ((x.T, y), {}),
    ]  # fmt: skip
    for args, named in wrong:
        with pytest.raises(InputError):
            step(*args, **named)
    for values in ({"w": np.zeros((2, 2))}, {"u": np.zeros(1)}):
        with pytest.raises(InputError):
            step.set_parameters(values)
    with pytest.raises(InputError, match="missing"):
        step.load_state({})
    for name, array in step.state().items():
        np.testing.assert_array_equal(array, before[name])


def test_parameters_can_be_set() -> None:
    proto, _ = model()
    step = compile_training(proto, loss="loss", optimizer=SGD())
    step.set_parameters({"w": np.zeros((7, 11))})
    assert step.parameters["w"].dtype == np.float32
    assert not step.parameters["w"].any()
    assert isinstance(step(*batch()), onnxc.runtime.compiled_model.Outputs)


def test_files_that_cannot_be_written_or_read(tmp_path: Path) -> None:
    proto, _ = model()
    step = compile_training(proto, loss="loss", optimizer=SGD())
    missing = tmp_path / "nowhere"
    with pytest.raises(InputError, match="cannot be written"):
        step.save(missing / "state.safetensors")
    with pytest.raises(InputError, match="cannot be written"):
        step.to_onnx(missing / "model.onnx")
    with pytest.raises(ModelError, match="cannot be opened"):
        step.to_onnx(model=missing / "model.onnx")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="not a regular file"):
        step.load(tmp_path / "pipe")
    path = tmp_path / "other.onnx"
    onnx.save_model(proto, str(path), save_as_external_data=True, location="other.data", size_threshold=0)
    apart = onnx.load(str(path), load_external_data=False)
    with pytest.raises(ModelError, match="base_dir"):
        step.to_onnx(model=apart)
    assert step.to_onnx(model=apart, base_dir=tmp_path) is not None
    table = apart.graph.node.add(op_type="Constant", output=["table"]).attribute.add(name="value")
    table.type = onnx.AttributeProto.TENSOR
    table.t.CopyFrom(next(t for t in apart.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL))
    whole = step.to_onnx(model=apart, base_dir=tmp_path)  # as it is written elsewhere
    assert whole is not None and whole.graph.node[-1].attribute[0].t.raw_data


def test_a_state_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proto, _ = model()
    step = compile_training(proto, loss="loss", optimizer=SGD(lr=0.1, momentum=0.9))
    path = tmp_path / "state.safetensors"
    step.save(path)
    before = path.read_bytes()
    step(*batch())

    def fails(*args: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as m:
        m.setattr("os.replace", fails)
        with pytest.raises(InputError, match="no space left"):
            step.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
