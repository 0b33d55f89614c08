"""What a training is given and cannot use: arguments, batches, states and files."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxc
from onnxc.errors import InputError
from onnxc.optim import SGD, AdamW
from onnxc.training import schedules
from onnxc.training.step import TrainingStep, compile_training
from tests.small_models import Array, floats, parse

TEXT = """(float[n, 3] x, float[n, 2] t, float[3, 2] w, float[2] b, int32[2] k) => (float loss, float[n, 2] h)
{
  m = MatMul(x, w)
  c = Cast<to = 1>(k)
  g = Mul(m, c)
  h = Add(g, b)
  d = Sub(h, t)
  q = Mul(d, d)
  loss = ReduceMean<keepdims = 0>(q)
}"""
X, T = floats(6, 3), floats(6, 2)


def model() -> onnx.ModelProto:
    proto = parse(TEXT)
    arrays = {"w": floats(3, 2, seed=1), "b": np.zeros(2, np.float32), "k": np.ones(2, np.int32)}
    proto.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items())
    return proto


def compiled(**options: Any) -> TrainingStep:
    return compile_training(model(), **{"loss": "loss", "optimizer": AdamW(lr=0.1), **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": 3}, "loss is a list of names, and not 3"),
        ({"loss": b"loss"}, "loss is a list of names"),
        ({"loss": []}, "loss: no name was given"),
        ({"loss": "x"}, "'x' is float32.*not a scalar"),
        ({"wrt": "w"}, "wrt is a list of names, and not 'w'"),
        ({"wrt": [3]}, "wrt is a list of names"),
        ({"wrt": []}, "no weight that could be trained"),
        ({"wrt": ["x"]}, r"\['x'\] are no weights"),
        ({"wrt": ["h"]}, r"\['h'\] are no weights"),
        ({"wrt": ["w", "k"]}, r"'k' is int32\[2\]; only floats"),
        ({"stop_gradient": "h"}, "stop_gradient is a list of names"),
        ({"stop_gradient": ["u"]}, "no value named 'u'"),
        ({"stop_gradient": ["h"]}, "no weight that could be trained"),
        ({"optimizer": SGD}, "optimizer is one of"),
        ({"schedule": 0.1}, "schedule is a function"),
        ({"clip_norm": float("nan")}, "clip_norm is positive"),
        ({"clip_value": -1}, "clip_value is positive"),
        ({"accumulate": True}, "accumulate is a number of steps"),
        ({"seed": -1}, "seed is an integer"),
        ({"precision": "int8"}, "precision is one of"),
        ({"precision": "float16", "loss_scale": 128.0}, "loss_scale is a LossScale"),
        ({"memory_budget": float("nan")}, "memory_budget is a fraction"),
    ],
)
def test_arguments_that_mean_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        compiled(**options)


def test_integers_have_no_derivative() -> None:
    with pytest.raises(InputError, match="only floats have a derivative"):
        onnxc.backward(model(), "loss", ["k"])


def test_a_shape_that_is_to_be_trained() -> None:
    """What a Reshape needs to know is not what its message is about."""
    proto = parse(
        """(float[n, 4] x) => (float loss) <int64[2] shape = {-1, 2}, float[2] w = {1, 2}>
        { y = Reshape(x, shape) z = Mul(y, w) loss = ReduceSum<keepdims = 0>(z) }""",
        18,
    )
    with pytest.raises(InputError, match=r"'shape' is int64\[2\]; only floats have a derivative"):
        compile_training(proto, optimizer=SGD(), wrt=["w", "shape"])


def test_a_weight_that_nothing_reads() -> None:
    proto = model()
    proto.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "spare"))
    with pytest.raises(InputError, match="no value named 'spare' that anything reads"):
        compile_training(proto, loss="loss", optimizer=SGD(), wrt=["w", "spare"])
    step = compile_training(proto, loss="loss", optimizer=SGD())
    assert "spare" not in step.parameters


def test_names_that_are_given_twice_count_once() -> None:
    once, twice = compiled(wrt=["w"]), compiled(wrt=["w", "w"])
    for step in (once, twice):
        step(X, T)
    assert twice.parameters.keys() == {"w"}
    np.testing.assert_array_equal(once.parameters["w"], twice.parameters["w"])


# ---------------------------------------------------------------- states

_KEPT: list[TrainingStep] = []


@pytest.fixture
def step() -> TrainingStep:
    """A step some way into its training."""
    if not _KEPT:
        _KEPT.append(compiled())
        _KEPT[0](X, T)
    return _KEPT[0]


def changed(state: Mapping[str, Array], **other: Any) -> dict[str, Any]:
    return {**state, **{key.replace("__", "/"): value for key, value in other.items()}}


@pytest.mark.parametrize(
    "other",
    [
        {"parameter__w": np.zeros((2, 3), np.float32)},
        {"parameter__w": np.zeros((3, 2), np.int32)},
        {"parameter__w": np.zeros((3, 2), complex)},
        {"parameter__w": None},
        {"parameter__w": [[1.0], [2.0, 3.0]]},
        {"parameter__u": np.zeros(1, np.float32)},
        {"calls": np.asarray(-1)},
        {"calls": np.asarray(1.5)},
        {"calls": np.asarray([1])},
        {"calls": np.asarray(1 << 63, np.uint64)},
        {"seed": np.asarray(-1)},
    ],
)
def test_states_that_do_not_fit_change_nothing(step: TrainingStep, other: dict[str, Any]) -> None:
    before = step.state()
    with pytest.raises(InputError):
        step.load_state(changed(before, **other))
    same(step, before)


def test_states_that_are_none(step: TrainingStep) -> None:
    before = step.state()
    for given in (None, [1], "state"):
        with pytest.raises(InputError, match="by name"):
            step.load_state(given)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="by name"):
            step.set_parameters(given)  # type: ignore[arg-type]
    for missing in before:
        with pytest.raises(InputError, match=f"missing: .*{missing}"):
            step.load_state({k: v for k, v in before.items() if k != missing})
    same(step, before)


def same(step: TrainingStep, before: Mapping[str, Array]) -> None:
    after = step.state()
    assert after.keys() == before.keys()
    for key, array in before.items():
        assert after[key].tobytes() == array.tobytes(), key


def safetensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04cos\nsystem\n(S'true'\ntR.",
        struct.pack("<Q", 1 << 62) + b"{}",
        safetensors(b"[" * 100_000),
        safetensors({"parameter/w": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 1 << 40]}}),
        safetensors({"parameter/w": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 0]}}),
        safetensors({"parameter/w": {"dtype": "F8_E4M3", "shape": [3, 2], "data_offsets": [0, 6]}}, bytes(6)),
        safetensors({"parameter/w": {"dtype": "BF16", "shape": [3, 2], "data_offsets": [0, 12]}}, bytes(12)),
    ],
)
def test_hostile_files_change_nothing(step: TrainingStep, content: bytes, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    before = step.state()
    path = tmp_path / "state.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError):
        step.load(path)
    step.save(path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(InputError):
        step.load(path)
    with pytest.raises(InputError):
        step.load(tmp_path)
    same(step, before)


# ---------------------------------------------------------------- steps that go wrong, runs that go on


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2}, {"clip_value": 1.0}, {"clip_norm": 1.0}, {"precision": "float16"}], ids=str
)
def test_a_gradient_that_is_a_constant(options: dict[str, Any]) -> None:
    """That of a weight which is only added to: it depends on nothing that a step is given."""
    proto = parse("(float[2, 3] x, float[3] w) => (float loss) { y = Add(x, w) loss = ReduceSum<keepdims = 0>(y) }")
    proto.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "w"))
    step = compile_training(proto, loss="loss", optimizer=SGD(lr=0.5), **options)
    for _ in range(options.get("accumulate", 1)):
        np.testing.assert_allclose(step(floats(2, 3))["loss"], floats(2, 3).sum() + 6, rtol=1e-2)
    moved = 0.5 if "clip_value" in options else 0.5 / np.sqrt(3) if "clip_norm" in options else 1.0
    np.testing.assert_allclose(step.parameters["w"], np.full(3, 1 - moved), rtol=1e-5)


def test_parts_are_clipped_as_a_whole() -> None:
    """The norm is that of the mean, and not of each part."""
    whole = compiled(optimizer=SGD(lr=1.0), clip_norm=0.05)
    parts = compiled(optimizer=SGD(lr=1.0), clip_norm=0.05, accumulate=3)
    before = whole.parameters
    whole(X, T)
    for k in range(3):
        parts(X[2 * k : 2 * k + 2], T[2 * k : 2 * k + 2])
    moved = np.sqrt(sum(((a - before[n]) ** 2).sum() for n, a in whole.parameters.items()))
    np.testing.assert_allclose(moved, 0.05, rtol=1e-4)
    for name, array in whole.parameters.items():
        np.testing.assert_allclose(parts.parameters[name], array, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 3}, {"precision": "float16", "accumulate": 2, "schedule": schedules.cosine(0.1, 3)}]
)
def test_a_run_that_goes_on_has_the_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    """Saved between two updates, and with a schedule that ends before the run does."""
    pytest.importorskip("safetensors")
    step, other = compiled(**options), compiled(**options)
    for _ in range(4):
        step(X, T)
    step.save(tmp_path / "state")
    other.load(tmp_path / "state")
    for _ in range(5):
        assert step(X, T)["loss"] == other(X, T)["loss"]
    same(other, step.state())
    proto = step.to_onnx()
    assert proto is not None
    (loss, _) = onnxc.compile(proto)(X, T).values()
    np.testing.assert_allclose(loss, step(X, T)["loss"], rtol=2e-3 if "precision" in options else 1e-6)


def test_rates_that_are_none_change_nothing(step: TrainingStep) -> None:
    before = step.state()
    for rate in (float("nan"), float("inf"), "big", None, [1, 2]):
        if rate is not None:
            with pytest.raises(InputError, match="learning rate"):
                step(X, T, learning_rate=rate)  # type: ignore[arg-type]
    for schedule in (lambda k: float("nan"), lambda k: None, lambda k: "big"):
        step.schedule = schedule  # type: ignore[assignment]
        with pytest.raises(InputError, match="learning rate"):
            step(X, T)
    step.schedule = lambda k: 1 / 0
    with pytest.raises(ZeroDivisionError):
        step(X, T)
    step.schedule = None
    same(step, before)


def test_weights_of_several_dtypes() -> None:
    """Each is updated in its own."""
    text = """(double[n, 3] x, double[3, 2] w, float[2] b) => (double loss)
    { m = MatMul(x, w) c = Cast<to = 11>(b) h = Add(m, c) q = Mul(h, h) loss = ReduceMean<keepdims = 0>(q) }"""
    found = []
    for precision in ("float32", "bfloat16"):
        proto = parse(text)
        arrays = {"w": floats(3, 2).astype(np.float64), "b": np.ones(2, np.float32)}
        proto.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items())
        step = compile_training(proto, optimizer=SGD(lr=0.5), precision=precision)
        step(X.astype(np.float64))
        assert {n: a.dtype.name for n, a in step.parameters.items()} == {"w": "float64", "b": "float32"}
        found.append(step.parameters)
        h = X.astype(np.float64) @ arrays["w"] + arrays["b"]
        np.testing.assert_allclose(step.parameters["w"], arrays["w"] - 0.5 * X.T @ h / 6, rtol=1e-6)
        np.testing.assert_allclose(step.parameters["b"], 1 - 0.5 * h.sum(0) / 6, rtol=1e-2)
