"""Random operators in training, and other miscompiles that gradients invite: numbers drawn anew in the backward pass,
gradients that count a shared value once or twice too often, sums that do not begin at zero.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor

import onnxc
from onnxc.errors import InputError
from onnxc.frontends.onnx_file import load
from onnxc.ir.graph import cloned
from onnxc.optim import SGD, AdamW
from onnxc.passes.decompose import decompose
from onnxc.training.step import TrainingStep
from tests.small_models import Array, parse

RNG = np.random.default_rng(6)
DROPOUT = """(float[n, 17] x, float ratio, bool on, float[17, 37] w, float[37, 11] v) =>
  (float loss, float[n, 37] d, bool[n, 37] mask)
{
  h = MatMul (x, w)
  d, mask = Dropout (h, ratio, on)
  y = MatMul (d, v)
  s = Mul (y, y)
  loss = ReduceSum<keepdims = 0> (s)
}"""
W, V = (RNG.standard_normal(s).astype(np.float32) * 0.2 for s in ((17, 37), (37, 11)))
X, RATIO, ON = RNG.standard_normal((13, 17)).astype(np.float32), np.float32(0.25), np.array(True)


def with_weights(text: str, **weights: Array) -> onnx.ModelProto:
    proto = parse(text, 20)
    proto.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in weights.items())
    return proto


def dropout() -> onnx.ModelProto:
    return with_weights(DROPOUT, w=W, v=V)


def training(proto: onnx.ModelProto, **options: Any) -> TrainingStep:
    return onnxc.compile_training(proto, **{"loss": "loss", "optimizer": SGD(lr=1e-3), **options})


def gradients(mask: Array, w: Array, v: Array) -> tuple[Array, Array]:
    """Those of the loss by w and v, with this mask."""
    kept = mask / 0.75
    d = (X.astype(np.float64) @ w) * kept
    dy = 2 * (d @ v)
    return X.T @ ((dy @ v.T) * kept), d.T @ dy


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_the_backward_pass_has_the_mask_of_the_forward_pass(budget: float) -> None:
    """Step by step, and where it is computed again instead of kept."""
    step = training(dropout(), memory_budget=budget)
    masks = []
    for _ in range(4):
        before = step.parameters
        out = step(X, RATIO, ON)
        masks.append(out["mask"].tobytes())
        for name, g in zip("wv", gradients(out["mask"], before["w"], before["v"]), strict=True):
            np.testing.assert_allclose(before[name] - step.parameters[name], 1e-3 * g, rtol=1e-4, atol=1e-6)
    assert len(set(masks)) == 4


def test_computed_again_it_is_the_same() -> None:
    """A copy of the nodes that draw, in kernels of its own, gives the same bits."""
    graph = decompose(load(dropout()))
    values: dict[int, Any] = {}
    graph.nodes += cloned([n for n in graph.nodes if n.op not in ("constant", "random_state")], values)
    graph.outputs += [values[v.id] for v in graph.outputs]
    graph.output_names += [f"again{k}" for k in range(3)]
    for fusion in (True, False):
        out = onnxc.compile(graph, cache=False, fusion=fusion)(X, RATIO, ON).values()
        for a, b in zip(out[:3], out[3:], strict=True):
            np.testing.assert_array_equal(a, b)


def test_seeds(tmp_path: Path) -> None:
    """The seed decides, together with the number of the call; files of states hold it."""

    def run(step: TrainingStep, calls: int = 3) -> list[bytes]:
        return [step(X, RATIO, ON)["mask"].tobytes() for _ in range(calls)]

    first = run(training(dropout(), seed=5), 6)
    assert len(set(first)) == 6
    assert run(training(dropout(), seed=5)) == first[:3]
    assert run(training(dropout(), seed=5, threads=1)) == first[:3]
    assert not set(run(training(dropout(), seed=6))) & set(first)
    assert not set(run(training(dropout()))) & set(run(training(dropout())))
    step = training(dropout(), seed=5)
    run(step)
    step.save(tmp_path / "state")
    again = training(dropout(), seed=9)
    again.load(tmp_path / "state")
    assert run(again) == first[3:]
    with pytest.raises(InputError, match="seed"):
        training(dropout(), seed=-1)


def test_each_part_of_a_batch_draws() -> None:
    step = training(dropout(), accumulate=3, seed=1)
    before, total = step.parameters, [np.zeros_like(W, np.float64), np.zeros_like(V, np.float64)]
    masks = set()
    for _ in range(3):
        mask = step(X, RATIO, ON)["mask"]
        masks.add(mask.tobytes())
        total = [t + g / 3 for t, g in zip(total, gradients(mask, before["w"], before["v"]), strict=True)]
    assert len(masks) == 3
    for name, g in zip("wv", total, strict=True):
        np.testing.assert_allclose(before[name] - step.parameters[name], 1e-3 * g, rtol=1e-4, atol=1e-6)


def test_training_mode_off() -> None:
    step = training(dropout(), seed=1)
    before = step.parameters
    out = step(X, RATIO, np.array(False))
    assert out["mask"].all()
    gw, _ = gradients(np.full((13, 37), 0.75), before["w"], before["v"])
    np.testing.assert_allclose(before["w"] - step.parameters["w"], 1e-3 * gw, rtol=1e-4, atol=1e-6)


def test_exported_gradient_has_one_mask() -> None:
    """In onnxruntime, which does not fill in the state: each state has its mask, the same in both directions."""
    proto = onnxc.backward(dropout(), loss="loss", wrt=["w", "v"])
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"x": X, "ratio": np.asarray(RATIO), "on": ON}
    masks = set()
    for state in (None, (0, 1), (7, 0)):
        given = {} if state is None else {"random_state": np.array(state, np.uint64)}
        _, _, mask, gw, gv = session.run(None, feeds | given)
        masks.add(mask.tobytes())
        for a, b in zip((gw, gv), gradients(mask, W, V), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    assert len(masks) == 3


def test_reparametrized_noise() -> None:
    """A sample of mean + deviation * noise: its gradient reads the noise that was drawn."""
    text = """(float[n, 5] x, float[5] m, float[5] d) => (float loss, float[n, 5] z) {
      noise = RandomNormalLike (x)  e = Mul (d, noise)  z = Add (m, e)
      r = Sub (z, x)  q = Mul (r, r)  loss = ReduceSum<keepdims = 0> (q) }"""
    m, d = (RNG.standard_normal(5).astype(np.float32) + 1 for _ in range(2))
    x = RNG.standard_normal((7, 5)).astype(np.float32)
    step = training(with_weights(text, m=m, d=d))
    z = step(x)["z"].astype(np.float64)
    np.testing.assert_allclose(m - step.parameters["m"], 1e-3 * (2 * (z - x)).sum(0), rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(
        d - step.parameters["d"], 1e-3 * (2 * (z - x) * (z - m) / d).sum(0), rtol=1e-3, atol=1e-6
    )


# ---------------------------------------------------------------- statistics


@pytest.mark.parametrize("budget", [1.0, 0.0])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_statistics_are_updated_once(budget: float, precision: str) -> None:
    """Once a step, whatever of the forward pass is computed again."""
    text = """(float[n, 6] x, float[6, 6] w, float[6] s, float[6] b, float[6] mean, float[6] var) => (float loss)
    {
      z, m, v = BatchNormalization<training_mode = 1, momentum = 0.5> (x, s, b, mean, var)
      t = Tanh (z)  h = MatMul (t, w)  u = Tanh (h)  q = Mul (u, t)  loss = ReduceSum<keepdims = 0> (q)
    }"""
    ones, zeros = np.ones(6, np.float32), np.zeros(6, np.float32)
    w = RNG.standard_normal((6, 6)).astype(np.float32)
    proto = with_weights(text, w=w, s=ones * 1.5, b=zeros + 0.5, mean=zeros, var=ones)
    step = training(proto, memory_budget=budget, precision=precision)
    x = (RNG.standard_normal((9, 6)) + 2).astype(np.float32)
    for k in range(1, 4):
        step(x)
        rtol = 1e-5 if precision == "float32" else 1e-2
        np.testing.assert_allclose(step.parameters["mean"], x.mean(0) * (1 - 0.5**k), rtol=rtol)
        np.testing.assert_allclose(step.parameters["var"], x.var(0) * (1 - 0.5**k) + 0.5**k, rtol=rtol)


# ---------------------------------------------------------------- shared values

SHARED: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "both factors": ("y = Mul (w, w)", lambda w: w * w),
    "both sides of a difference": ("y = Sub (w, w)", lambda w: w - w),
    "quotient of itself": ("y = Div (w, w)", lambda w: w / w),
    "product with its own transpose": ("t = Transpose<perm = [1, 0]> (w) y = MatMul (w, t)", lambda w: w @ w.T),
    "product with itself twice": ("a = MatMul (w, w) y = MatMul (a, w)", lambda w: w @ w @ w),
    "joined to itself": ("y0 = Concat<axis = 0> (w, w, w) y = Mul (y0, y0)", lambda w: torch.cat([w, w, w]) ** 2),
    "both branches": ("c = Less (w, half) y0 = Where (c, w, w) y = Mul (y0, w)", lambda w: w * w),
    "the same row twice": ("y0 = Gather<axis = 0> (w, twice) y = Mul (y0, y0)", lambda w: w[[1, 1, 0]] ** 2),
    "greater of itself": ("y = Max (w, w)", lambda w: torch.maximum(w, w)),
    "broadcast against itself": ("r = ReduceSum<keepdims = 1> (w, one) y = Mul (w, r)", lambda w: w * w.sum(1, True)),
    "a layer used twice": ("a = MatMul (x, w) b = Tanh (a) y = MatMul (b, w)", lambda w: torch.tanh(XT @ w) @ w),
    "an embedding that is tied": (
        "e = Gather (w, ids) t = Transpose<perm = [1, 0]> (w) y = MatMul (e, t)", lambda w: w[[2, 0, 2]] @ w.T,
    ),
    "convolved with itself": (
        "u = Unsqueeze (w, ends) y = Conv (u, u)", lambda w: torch.nn.functional.conv2d(w[None, None], w[None, None]),
    ),
}  # fmt: skip
XT = torch.tensor(RNG.standard_normal((4, 5)).astype(np.float32))


@pytest.mark.parametrize("name", SHARED)
def test_shared_values(name: str) -> None:
    """A weight that is read several times: each reading counts once."""
    body, function = SHARED[name]
    text = f"""(float[4, 5] x, float[5, 5] w) => (float loss) {{
      half = Constant<value = float {{0.5}}> () twice = Constant<value = int64[3] {{1, 1, 0}}> ()
      ids = Constant<value = int64[3] {{2, 0, 2}}> () one = Constant<value = int64[1] {{1}}> ()
      ends = Constant<value = int64[2] {{0, 1}}> () three = Constant<value = float {{3}}> ()
      {body}
      y_ = Sin (y)  z = Mul (y_, three)  loss = ReduceSum<keepdims = 0> (z) }}"""
    w = RNG.standard_normal((5, 5)).astype(np.float32) + 2
    proto = with_weights(text, w=w)
    p = torch.tensor(w, requires_grad=True)
    (3 * torch.sin(function(p))).sum().backward()
    assert p.grad is not None
    step = training(proto, optimizer=SGD(lr=1.0))
    step(XT.numpy())
    np.testing.assert_allclose(w - step.parameters["w"], p.grad.numpy(), rtol=2e-4, atol=2e-4)


def test_sums_begin_at_zero() -> None:
    """After an update the next sum of gradients knows nothing of the last; so for states that are loaded, too."""
    text = "(float[3] x, float[3] w) => (float loss) { y = Mul (x, w) loss = ReduceSum<keepdims = 0> (y) }"
    w = np.zeros(3, np.float32)
    step = training(with_weights(text, w=w), accumulate=2, optimizer=SGD(lr=1.0))
    xs = RNG.standard_normal((10, 3)).astype(np.float32)
    wanted = np.zeros(3)
    for k, x in enumerate(xs):
        step(x)
        wanted = wanted - x / 2
        if k % 2:
            np.testing.assert_allclose(step.parameters["w"], wanted, rtol=1e-5, atol=1e-6)
    state = step.state()
    step(xs[0])
    step.load_state(state)
    step(xs[1]), step(xs[2])
    np.testing.assert_allclose(step.parameters["w"], wanted - xs[1] / 2 - xs[2] / 2, rtol=1e-5, atol=1e-6)


def test_an_output_that_is_also_a_loss() -> None:
    """And a weight that is an output as it is: the model's outputs are from before the update."""
    text = """(float[3] x, float[3] w) => (float[3] same, float loss, float[3] y) {
      same = Identity (w)  y = Mul (x, w)  loss = ReduceSum<keepdims = 0> (y) }"""
    w, x = np.ones(3, np.float32), np.array([1, 2, 3], np.float32)
    step = training(with_weights(text, w=w), optimizer=AdamW(lr=0.1))
    out = step(x)
    kept = {n: v.copy() for n, v in out.items()}
    np.testing.assert_array_equal(out["same"], w)
    step(x)
    for n, v in kept.items():
        np.testing.assert_array_equal(out[n], v)


def test_masks_of_a_loop() -> None:
    """A recurrence with Dropout: the way back, which runs the steps again, has the mask of each."""
    text = """(float[4, 7] x, float[7, 7] w) => (float loss, bool[n, 4, 7] masks) {
      k = Constant<value = int64 {5}> ()  on = Constant<value = bool {1}> ()  r = Constant<value = float {0.25}> ()
      h, masks = Loop (k, on, x) <body = b (int64 i, bool go, float[4, 7] s) =>
        (bool go_on, float[4, 7] t, bool[4, 7] mask) {
          go_on = Identity (go)  a = MatMul (s, w)  c = Tanh (a)  t, mask = Dropout (c, r, on)
      }>
      q = Mul (h, h)  loss = ReduceSum<keepdims = 0> (q) }"""
    w = RNG.standard_normal((7, 7)).astype(np.float32) * 0.5
    x = RNG.standard_normal((4, 7)).astype(np.float32)
    step = training(with_weights(text, w=w), optimizer=SGD(lr=1.0))
    masks = step(x)["masks"]
    assert len({m.tobytes() for m in masks}) == 5
    p = torch.tensor(w, requires_grad=True, dtype=torch.float64)
    h = torch.tensor(x, dtype=torch.float64)
    for mask in masks:
        h = torch.tanh(h @ p) * torch.tensor(mask / 0.75)
    (h * h).sum().backward()
    assert p.grad is not None
    np.testing.assert_allclose(w - step.parameters["w"], p.grad.numpy(), rtol=1e-4, atol=1e-5)
