"""Recurrent networks in training steps and gradients on a GPU: loops forward, which save their states, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxc
from onnxc.optim import SGD, AdamW
from tests.simulated_training import Batch, Trained, simulated, train
from tests.targets import needs_triton, this_gpu
from tests.triton_simulator import Simulator

pytestmark = needs_triton
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STEPS = 3


def model_of(op: str, steps: int, batch: int, hidden: int, directions: int = 1, **attributes: Any) -> bytes:
    """A recurrent op, a product of its last state, and a loss by classes."""
    given = {"hidden_size": hidden, "direction": "bidirectional" if directions == 2 else "forward", **attributes}
    spelled = ", ".join(f'{k} = "{v}"' if isinstance(v, str) else f"{k} = {v}" for k, v in given.items())
    last = "h" if op != "LSTM" else "h, c"
    found = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 18]>
        g (float[{steps}, {batch}, 5] x, int64[{batch}] t) => (float loss) {{
            y, {last} = {op} <{spelled}> (x, w, r, b)
            turned = Transpose <perm = [1, 0, 2]> (h)  flat = Flatten (turned)  out = MatMul (flat, v)
            loss = SoftmaxCrossEntropyLoss <reduction = "mean"> (out, t) }}""")
    rng, rows = np.random.default_rng(4), GATES[op] * hidden
    shapes = {
        "w": (directions, rows, 5), "r": (directions, rows, hidden), "b": (directions, 2 * rows),
        "v": (directions * hidden, 4),
    }  # fmt: skip
    for name, shape in shapes.items():
        array = rng.standard_normal(shape) / np.sqrt(max(5, hidden))
        found.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    return bytes(found.SerializeToString())


def batches_of(steps: int, batch: int) -> list[Batch]:
    rng = np.random.default_rng(5)
    return [
        {"x": rng.standard_normal((steps, batch, 5)).astype(np.float32), "t": rng.integers(0, 4, batch)}
        for _ in range(STEPS)
    ]


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "lstm": ("LSTM", {}, {"optimizer": SGD(lr=0.2, momentum=0.9)}),
    "both directions": ("LSTM", {"directions": 2}, {"optimizer": SGD(lr=0.2)}),
    "gru": ("GRU", {}, {"optimizer": AdamW(lr=1e-2), "clip_norm": 0.5}),
    "gru, reset after the product": ("GRU", {"linear_before_reset": 1}, {"optimizer": SGD(lr=0.2)}),
    "rnn": ("RNN", {}, {"optimizer": SGD(lr=0.2), "accumulate": 2}),
    "its matrices stay": ("LSTM", {}, {"optimizer": SGD(lr=0.2), "wrt": ["w", "b", "v"]}),
    "all of it stays": ("GRU", {}, {"optimizer": SGD(lr=0.2), "wrt": ["v"]}),
    "little memory": ("LSTM", {}, {"optimizer": SGD(lr=0.2), "memory_budget": 0.3}),
}


def assert_same(found: Trained, wanted: Trained, tolerance: float) -> None:
    assert found.errors == wanted.errors == [""] * STEPS
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=tolerance)
    assert found.state.keys() == wanted.state.keys()
    for key in wanted.state.keys() - {"seed"}:
        np.testing.assert_allclose(found.state[key], wanted.state[key], tolerance, tolerance / 20, err_msg=key)


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_the_cpu(simulator: Simulator, name: str) -> None:
    op, attributes, options = CASES[name]
    model, batches = model_of(op, 4, 3, 6, **attributes), batches_of(4, 3)
    assert_same(simulated(simulator, model, batches, **options), train(model, batches, "loss", options), 2e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("steps", "batch", "hidden"), [(30, 5, 40), (20, 64, 128)])
def test_steps_on_a_gpu(name: str, steps: int, batch: int, hidden: int) -> None:
    """Those of the CPU, and the same bits twice."""
    this_gpu()
    op, attributes, options = CASES[name]
    model, batches = model_of(op, steps, batch, hidden, **attributes), batches_of(steps, batch)
    found, again = (train(model, batches, "loss", {**options, "target": "cuda"}) for _ in range(2))
    assert_same(found, train(model, batches, "loss", {**options, "target": "cpu"}), 1e-3)
    assert found.losses == again.losses
    assert all((found.state[key] == again.state[key]).all() for key in found.state.keys() - {"seed"})


def gradients_of(op: str, steps: int, batch: int, hidden: int, **attributes: Any) -> bytes:
    """The loss, and its gradient by the input: all matrices are constants."""
    found = onnxc.backward(model_of(op, steps, batch, hidden, **attributes), "loss", ["x"])
    assert found is not None
    return bytes(found.SerializeToString())


GRADIENTS = {k: v[:2] for k, v in CASES.items() if "stay" not in k and "memory" not in k}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_by_what_a_loop_reads(simulator: Simulator, name: str) -> None:
    op, attributes = GRADIENTS[name]
    model, (batch, *_) = gradients_of(op, 4, 3, 6, **attributes), batches_of(4, 3)
    found = simulator.run(model, [batch["x"], batch["t"]])
    assert not found.error[0]
    for y, wanted in zip(found.outputs, onnxc.compile(model, target="cpu")(**batch).values(), strict=True):
        np.testing.assert_allclose(y, np.asarray(wanted), 2e-4, 2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize(("steps", "batch", "hidden"), [(30, 5, 40), (20, 64, 128)])
def test_gradients_on_a_gpu(name: str, steps: int, batch: int, hidden: int) -> None:
    this_gpu()
    op, attributes = GRADIENTS[name]
    model, (given, *_) = gradients_of(op, steps, batch, hidden, **attributes), batches_of(steps, batch)
    found = onnxc.compile(model, target="cuda")(**given)
    for y, wanted in zip(found.values(), onnxc.compile(model, target="cpu")(**given).values(), strict=True):
        np.testing.assert_allclose(np.asarray(y), np.asarray(wanted), 1e-3, 5e-5)
