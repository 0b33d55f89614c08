"""Training in halves: losses beside those in float32, and the scale of the loss in float16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxc
from onnxc.errors import InputError
from onnxc.optim import SGD, AdamW
from onnxc.training.precision import GOOD, SCALE, LossScale
from onnxc.training.step import TrainingStep
from tests.small_models import Array, parse

RNG = np.random.default_rng(5)
MLP = """(float[n, 24] x, int64[n] k, float[24, 37] w, float[37] gain, float[37, 11] v) =>
  (float loss, float[n, 11] scores)
{
  h = MatMul (x, w)  a = Gelu (h)  z = LayerNormalization (a, gain)  scores = MatMul (z, v)
  loss = SoftmaxCrossEntropyLoss (scores, k)
}"""
NET = """(float[n, 3, 9, 9] x, int64[n] k, float[8, 3, 3, 3] w, float[8] s, float[8] b, float[8] mean, float[8] var,
  float[8, 5] v) => (float loss)
{
  h = Conv<pads = [1, 1, 1, 1]> (x, w)
  z, mean_, var_ = BatchNormalization<training_mode = 1> (h, s, b, mean, var)
  a = Relu (z)  p = GlobalAveragePool (a)  q = Flatten (p)  scores = MatMul (q, v)
  loss = SoftmaxCrossEntropyLoss (scores, k)
}"""


def f32(*shape: int, scale: float = 1.0) -> Array:
    return (RNG.standard_normal(shape) * scale).astype(np.float32)


def mlp() -> onnx.ModelProto:
    return with_weights(MLP, w=f32(24, 37, scale=0.2), gain=np.linspace(0.9, 1.1, 37, dtype=np.float32),
                        v=f32(37, 11, scale=0.2))  # fmt: skip


def net() -> onnx.ModelProto:
    return with_weights(NET, w=f32(8, 3, 3, 3, scale=0.2), s=np.linspace(0.9, 1.1, 8, dtype=np.float32), b=f32(8),
                        mean=f32(8), var=f32(8) ** 2 + 1, v=f32(8, 5))  # fmt: skip


def with_weights(text: str, **weights: Array) -> onnx.ModelProto:
    proto = parse(text, 20)
    proto.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in weights.items())
    return proto


MODELS = {"mlp": (mlp, (f32(19, 24), RNG.integers(0, 11, 19))), "net": (net, (f32(7, 3, 9, 9), RNG.integers(0, 5, 7)))}
X, K = MODELS["mlp"][1]


def training(proto: onnx.ModelProto, precision: str = "float16", **options: Any) -> TrainingStep:
    return onnxc.compile_training(
        proto, **{"loss": "loss", "optimizer": AdamW(lr=1e-2), "precision": precision, **options}
    )


def fitting(precision: str) -> dict[str, Any]:
    """A scale at which no step of these models overflows."""
    return {"loss_scale": LossScale(2.0**8)} if precision == "float16" else {}


def losses(step: TrainingStep, batch: tuple[Array, ...], steps: int = 12) -> list[float]:
    return [float(step(*batch)["loss"]) for _ in range(steps)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_losses(name: str, precision: str) -> None:
    make, batch = MODELS[name]
    proto = make()
    step, wide = training(proto, precision, **fitting(precision)), training(proto, "float32")
    found, wanted = losses(step, batch), losses(wide, batch)
    np.testing.assert_allclose(found, wanted, rtol=0.01 if precision == "float16" else 0.05)
    assert wanted[-1] < 0.8 * wanted[0] and found != wanted
    assert {v.dtype for v in step.parameters.values()} == {np.dtype(np.float32)}
    assert step.explain().kept  # by reason, what stays float32
    assert not [k for k in step.explain().kernels if k.kind == "loops" and k.flops]  # products are no plain loops


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("precision", "most"), [("float16", 0.01), ("bfloat16", 0.08)])
def test_gradients(name: str, precision: str, most: float) -> None:
    """Those of a step, by what it subtracts: their relative error in the Euclidean norm.

    Some ten roundings, of 2^-11 or 2^-8; a normalization's gradient is a difference of nearly equal numbers.
    """
    make, batch = MODELS[name]
    proto = make()
    steps = [training(proto, p, optimizer=SGD(lr=1.0), **fitting(p)) for p in (precision, "float32")]
    before = steps[0].parameters
    for step in steps:
        step(*batch)
    assert steps[0].skipped == 0
    for n, v in before.items():
        found, wanted = (v.astype(np.float64) - step.parameters[n] for step in steps)
        assert np.linalg.norm(found - wanted) <= most * np.linalg.norm(wanted), n


@pytest.mark.parametrize("name", MODELS)
def test_overflow_changes_nothing_but_the_scale(name: str) -> None:
    """Steps are left out until the scale fits; the training is then the one that begins with that scale, to the bit."""
    make, batch = MODELS[name]
    proto = make()
    step = training(proto, loss_scale=LossScale(2.0**40))
    before = step.parameters
    while step.skipped == step.steps:
        at = step.parameters
        assert all((at[n] == v).all() for n, v in before.items() if n not in ("mean", "var"))
        step(*batch)
        assert step.loss_scale == 2.0 ** (40 - step.skipped) and step.steps < 40
    assert step.skipped > 3 and step.loss_scale is not None
    fitting = training(proto, loss_scale=LossScale(step.loss_scale))
    fitting.set_parameters({n: v for n, v in at.items() if n in ("mean", "var")})
    losses(fitting, batch, 1)
    losses(fitting, batch, 4), losses(step, batch, 4)
    assert fitting.skipped == 0
    for n, v in step.parameters.items():
        np.testing.assert_array_equal(fitting.parameters[n], v, n)


def test_scale_grows() -> None:
    step = training(mlp(), loss_scale=LossScale(8.0, growth=4.0, interval=3))
    scales = []
    for _ in range(7):
        step(X, K)
        scales.append(step.loss_scale)
    assert scales == [8, 8, 32, 32, 32, 128, 128]
    assert step.state()[f"{GOOD}/"] == 1 and step.state()[f"{SCALE}/"] == 128


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_batch_of_nan(name: str, accumulate: int) -> None:
    """It leaves no trace but a lower scale: not in parameters, in statistics, in sums of gradients."""
    make, (x, k) = MODELS[name]
    step = training(make(), accumulate=accumulate, loss_scale=LossScale(2.0**8))
    losses(step, (x, k), accumulate)
    before, bad = step.parameters, np.full_like(x, np.nan)
    for turn in range(accumulate):
        step(bad if turn == 0 else x, k)
    for n, v in step.parameters.items():
        assert n in ("mean", "var") or (v == before[n]).all()
        assert np.isfinite(v).all()
    assert (step.skipped, step.loss_scale) == (1, 2.0**7)
    after = losses(step, (x, k), 3 * accumulate)
    assert np.isfinite(after).all() and after[-1] < after[0]


def test_clipping_and_accumulation_see_plain_gradients() -> None:
    proto = mlp()
    options = {"optimizer": SGD(lr=0.5), "clip_norm": 0.1, "accumulate": 2}
    step, wide = training(proto, **options), training(proto, "float32", **options)
    losses(step, (X, K), 6), losses(wide, (X, K), 6)
    for n, v in wide.parameters.items():
        np.testing.assert_allclose(step.parameters[n], v, rtol=2e-2, atol=2e-3)


def test_state_holds_the_scale(tmp_path: Path) -> None:
    proto = mlp()
    step = training(proto, loss_scale=LossScale(2.0**30))
    losses(step, (X, K), 12)
    step.save(tmp_path / "state")
    again = training(proto)
    again.load(tmp_path / "state")
    assert (again.loss_scale, again.skipped) == (step.loss_scale, step.skipped) and step.skipped > 0
    assert losses(again, (X, K), 3) == losses(step, (X, K), 3)
    assert training(proto, "bfloat16").loss_scale is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "float8"}, "precision is one of"),
        ({"precision": "bfloat16", "loss_scale": LossScale()}, "for precision='float16'"),
        ({"precision": "float16", "loss_scale": 2.0}, "is a LossScale"),
        ({"precision": "float16", "loss": "scores"}, "not a scalar"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        training(mlp(), **options)


def test_scales_that_are_none() -> None:
    for wrong in ({"initial": 0.0}, {"growth": 0.5}, {"backoff": 2.0}, {"interval": 0}, {"initial": float("inf")}):
        with pytest.raises(InputError, match="LossScale"):
            LossScale(**wrong)
