"""Low-rank adapters, and schedules of learning rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

import onnxc
from onnxc.errors import InputError
from onnxc.optim import AdamW
from onnxc.training import schedules
from onnxc.training.lora import with_lora
from tests.small_models import Array, parse, reference

RNG = np.random.default_rng(7)
TEXT = """(float[n, 13] x, float[n, 3] t, float[13, 17] w, float[11, 17] v, float[11] c, float[11, 3] u) =>
  (float loss, float[n, 3] y)
{
  a = MatMul (x, w)
  h = Tanh (a)
  g = Gemm<transB = 1, alpha = 0.5, beta = 2.0> (h, v, c)
  y = MatMul (g, u)
  d = Sub (y, t)
  s = Mul (d, d)
  loss = ReduceMean<keepdims = 0> (s)
}"""
SHAPES = {"w": (13, 17), "v": (11, 17), "c": (11,), "u": (11, 3)}
X, T = RNG.standard_normal((9, 13)).astype(np.float32), RNG.standard_normal((9, 3)).astype(np.float32)


def model(text: str = TEXT) -> onnx.ModelProto:
    proto = parse(text, 18)
    weights = {n: (RNG.standard_normal(s) * 0.4).astype(np.float32) for n, s in SHAPES.items()}
    proto.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in weights.items())
    return proto


def weights_of(proto: onnx.ModelProto) -> dict[str, Array]:
    return {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}


@pytest.mark.parametrize(("targets", "names"), [(None, "wvu"), (["v"], "v"), (["[uw]"], "wu")])
def test_adapters(tmp_path: Path, targets: list[str] | None, names: str) -> None:
    """At first the model is the same; training changes adapters alone; merged, they give what it gave with them."""
    proto = model()
    adapted = with_lora(proto, rank=2, targets=targets, alpha=3.0)
    onnx.checker.check_model(adapted.model, full_check=True)
    assert list(adapted.adapters) == list(names)
    before = onnxc.compile(proto)(X, T)
    for a, b in zip(onnxc.compile(adapted.model)(X, T), before, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    step = onnxc.compile_training(adapted.model, loss="loss", wrt=adapted.parameters, optimizer=AdamW(lr=0.05))
    losses = [float(step(X, T)["loss"]) for _ in range(60)]
    assert losses[-1] < 0.7 * losses[0] and set(step.parameters) == set(adapted.parameters)
    merged = adapted.merged(step.parameters)
    assert merged is not None and [n.op_type for n in merged.graph.node] == [n.op_type for n in proto.graph.node]
    after, original = weights_of(merged), weights_of(proto)
    for n, v in original.items():
        assert ((after[n] != v).any()) == (n in names)
        assert np.linalg.matrix_rank((after[n] - v).astype(np.float64), tol=1e-4) == 2 if n in names else True
    trained = step.to_onnx()
    assert trained is not None
    for a, b in zip(reference(merged, X, T), reference(trained, X, T), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    adapted.merged(step.parameters, tmp_path / "m.onnx")
    assert weights_of(onnx.load(tmp_path / "m.onnx"))["v"].tobytes() == after["v"].tobytes()


def test_a_weight_that_is_read_twice() -> None:
    """One adapter for all of its readers."""
    text = """(float[n, 5] x, float[5, 5] w) => (float loss) {
      a = MatMul (x, w)  b = Gemm<transB = 1> (a, w)  loss = ReduceSum<keepdims = 0> (b) }"""
    proto = parse(text, 18)
    w = RNG.standard_normal((5, 5)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(w, "w"))
    adapted = with_lora(proto, rank=2)
    step = onnxc.compile_training(adapted.model, loss="loss", wrt=adapted.parameters, optimizer=AdamW(lr=0.1))
    x = RNG.standard_normal((4, 5)).astype(np.float32)
    for _ in range(3):
        step(x)
    merged = adapted.merged(step.parameters)
    trained = step.to_onnx()
    assert merged is not None and trained is not None
    np.testing.assert_allclose(reference(merged, x)[0], reference(trained, x)[0], rtol=1e-4)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (TEXT, {"rank": 0}, "rank is an integer"),
        (TEXT, {"rank": 4}, "more than 'u'"),
        (TEXT, {"rank": 1, "targets": ["c"]}, "no matrix 'c'"),
        (TEXT, {"rank": 1, "targets": ["w", "q*"]}, r"no matrix 'q\*'"),
        (TEXT.replace("Tanh (a)", "Gather (w, 0)"), {"rank": 1, "targets": ["w"]}, "read by Gather too"),
    ],
)
def test_refusals(text: str, options: dict[str, Any], message: str) -> None:
    if "Gather" in text:
        text = text.replace("Gather (w, 0)", "Gather (w, k)").replace("float[n, 3] t,", "float[n, 3] t, int64[n] k,")
    with pytest.raises(InputError, match=message):
        with_lora(model(text), **options)


def test_missing_parameters() -> None:
    adapted = with_lora(model(), rank=1)
    with pytest.raises(InputError, match="missing"):
        adapted.merged({})


# ---------------------------------------------------------------- schedules

S = torch.optim.lr_scheduler
BESIDE: dict[str, tuple[Any, Any]] = {
    "linear": (schedules.linear(0.1, 7, 0.02), lambda o: S.LinearLR(o, 1.0, 0.2, 7)),
    "polynomial": (schedules.polynomial(0.1, 9, 2.5), lambda o: S.PolynomialLR(o, 9, 2.5)),
    "exponential": (schedules.exponential(0.1, 0.7), lambda o: S.ExponentialLR(o, 0.7)),
    "every": (schedules.exponential(0.1, 0.7, 4), lambda o: S.StepLR(o, 4, 0.7)),
    "piecewise": (schedules.piecewise(0.1, {3: 0.5, 8: 0.1}), lambda o: S.SequentialLR(
        o, [S.ConstantLR(o, 1.0), S.ConstantLR(o, 0.5, 99), S.ConstantLR(o, 0.05, 99)], [3, 8])),
    "restarts": (schedules.cosine_restarts(0.1, 3, 2, 0.01), lambda o: S.CosineAnnealingWarmRestarts(o, 3, 2, 0.01)),
    "one cycle": (schedules.one_cycle(0.1, 20), lambda o: S.OneCycleLR(o, 0.1, 20)),
}  # fmt: skip


@pytest.mark.parametrize("name", BESIDE)
def test_schedules_beside_pytorch(name: str) -> None:
    ours, make = BESIDE[name]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    theirs = make(optimizer)
    for k in range(20):
        np.testing.assert_allclose(ours(k), optimizer.param_groups[0]["lr"], rtol=1e-9, err_msg=str(k))
        optimizer.step()
        theirs.step()


def test_other_schedules() -> None:
    rate = schedules.warmed_up(schedules.cosine(1.0, 10, 0.1), 4, start=0.2)
    np.testing.assert_allclose([rate(k) for k in (0, 2, 4, 9, 14, 99)], [0.2, 0.6, 1.0, 0.55, 0.1, 0.1])
    rate = schedules.inverse_root(0.5, 4)
    np.testing.assert_allclose([rate(k) for k in (0, 3, 15)], [0.125, 0.5, 0.25])
    rate = schedules.joined([schedules.constant(1.0), schedules.linear(0.5, 2), schedules.constant(0.3)], [3, 5])
    assert [rate(k) for k in range(7)] == [1, 1, 1, 0.5, 0.25, 0.3, 0.3]


def test_a_schedule_in_a_training() -> None:
    adapted = with_lora(model(), rank=1)
    step = onnxc.compile_training(
        adapted.model, loss="loss", wrt=adapted.parameters, optimizer=onnxc.optim.SGD(),
        schedule=schedules.linear(0.1, 4),
    )  # fmt: skip
    rates = []
    for _ in range(5):
        rates.append(step.learning_rate)
        step(X, T)
    np.testing.assert_allclose(rates, [0.1, 0.075, 0.05, 0.025, 0])


@pytest.mark.parametrize(
    "make",
    [
        lambda: schedules.linear(0.1, 0),
        lambda: schedules.cosine(-0.1, 5),
        lambda: schedules.exponential(float("nan"), 0.5),
        lambda: schedules.one_cycle(0.1, 10, warm=1.0),
        lambda: schedules.joined([schedules.constant(1.0)], [3]),
        lambda: schedules.joined([schedules.constant(1.0)] * 3, [3, 2]),
    ],
)
def test_schedules_that_are_none(make: Any) -> None:
    with pytest.raises(InputError):
        make()
