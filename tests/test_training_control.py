"""Training steps whose control flow and sizes depend on data: several programs, beside PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

import onnxc
from onnxc.errors import UnsupportedError
from onnxc.optim import AdamW
from onnxc.tools.compare.training import compare_training
from tests import staging_harness
from tests.small_models import Array, floats

# Layers until an element is large, then one of two ends; of the result only some elements count.
TEXT = """g (float[n, 3] x, float[n, 3] t, float[3, 3] w, float[3] b, float[3] c) => (float loss, int64 count) {
  go = Constant<value = bool {1}>()
  none = Constant<value = int64 {0}>()
  h0 = MatMul(x, w)
  count, h = Loop(, go, none, h0) <
    body = b2 (int64 i, bool ci, int64 k, float[n, 3] v) => (bool co, int64 k2, float[n, 3] vo) {
      m = MatMul(v, w)
      a = Add(m, b)
      ta = Tanh(a)
      vo = Add(v, ta)
      MORE
      one = Constant<value = int64 {1}>()
      k2 = Add(k, one)
    }>
  s = ReduceSum<keepdims = 0>(h)
  bound = Constant<value = float {16.0}>()
  large = Less(bound, s)
  y = If(large) <
    then_branch = then (...) => (float[n, 3] y1) { y1 = Mul(h, c) },
    else_branch = else (...) => (float[n, 3] y2) { y0 = Sigmoid(h)  y2 = Add(y0, c) }>
  half = Constant<value = float {-0.5}>()
  some = Less(half, t)
  places = NonZero(some)
  rows = Transpose(places)
  left = GatherND(y, rows)
  right = GatherND(t, rows)
  d = Sub(left, right)
  dd = Mul(d, d)
  loss = ReduceMean<keepdims = 0>(dd)
}""".replace("(...)", "()").replace("MORE", staging_harness.goes_on("co", "ReduceMax", "vo", 3.0, "float"))


def weights() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    found = {"w": 0.3 * np.eye(3) + 0.1 * rng.normal(size=(3, 3)), "b": 0.1 + 0.2 * rng.random(3), "c": rng.random(3)}
    return {name: array.astype(np.float32) for name, array in found.items()}


def model() -> onnx.ModelProto:
    proto = staging_harness.parsed(TEXT)
    proto.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in weights().items())
    return proto


def by_torch(p: dict[str, Any], x: Any, t: Any) -> tuple[Any, int, bool]:
    h, count = x @ p["w"], 0
    while count == 0 or h.max() < 3:
        h, count = h + torch.tanh(h @ p["w"] + p["b"]), count + 1
    large = bool(h.sum() > 16)
    y = h * p["c"] if large else torch.sigmoid(h) + p["c"]
    some = t > -0.5
    return ((y[some] - t[some]) ** 2).mean(), count, large


def batches(count: int) -> list[tuple[Array, Array]]:
    rng = np.random.default_rng(1)
    return [
        (s * floats(4, 3, seed=2 * k), floats(4, 3, seed=2 * k + 1))
        for k, s in enumerate(rng.uniform(0.2, 2, count).tolist())
    ]


@pytest.mark.parametrize("options", [{"memory_budget": 0.5, "clip_norm": 1.0}, {"accumulate": 2}])
def test_losses_are_those_of_pytorch(options: dict[str, Any]) -> None:
    step = onnxc.compile_training(model(), loss="loss", optimizer=AdamW(lr=1e-2), **options)
    p = {name: torch.tensor(array, requires_grad=True) for name, array in weights().items()}
    optimizer = torch.optim.AdamW(p.values(), lr=1e-2)
    every, seen = options.get("accumulate", 1), set()
    for k, (x, t) in enumerate(batches(20), 1):
        loss, count, large = by_torch(p, torch.tensor(x), torch.tensor(t))
        (loss / every).backward()
        if "clip_norm" in options:
            torch.nn.utils.clip_grad_norm_(p.values(), options["clip_norm"])
        if k % every == 0:
            optimizer.step()
            optimizer.zero_grad()
        out = step(x=x, t=t)
        assert list(out.keys()) == ["loss", "count"]
        assert out["count"] == count
        np.testing.assert_allclose(out["loss"], loss.detach().numpy(), rtol=1e-4)
        seen.add((count, large))
    assert len({count for count, _ in seen}) > 1 and len({large for _, large in seen}) == 2
    assert step.steps == 20 // every
    for name, array in step.parameters.items():
        np.testing.assert_allclose(array, p[name].detach().numpy(), rtol=1e-4, atol=1e-6)


def test_it_is_saved_and_exported_and_compared(tmp_path: Path) -> None:
    first, second = (onnxc.compile_training(model(), loss="loss", optimizer=AdamW(lr=0.1)) for _ in range(2))
    (x, t), (x2, t2) = batches(2)
    first(x=x, t=t)
    first.save(tmp_path / "state.safetensors")
    second.load(tmp_path / "state.safetensors")
    tuned = first.to_onnx()
    assert tuned is not None
    (loss,) = staging_harness.runtime(tuned).run(["loss"], {"x": x2, "t": t2})
    found = first(x=x2, t=t2)["loss"]
    np.testing.assert_array_equal(second(x=x2, t=t2)["loss"], found)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    np.testing.assert_array_equal(first.parameters["w"], second.parameters["w"])
    assert first.explain().kernels and first.profile(x, t).kernels
    feeds = [{"x": x, "t": t}, {"x": x2, "t": t2}]
    assert compare_training(model(), feeds, loss="loss", optimizer=AdamW(lr=1e-2)).agree


@pytest.mark.parametrize("options", [{"precision": "float16"}, {"target": "cuda:sm_90"}])
def test_what_needs_one_program(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"n3 Loop depends on data.*float32 on the CPU"):
        onnxc.compile_training(model(), loss="loss", optimizer=AdamW(lr=0.1), **options)
