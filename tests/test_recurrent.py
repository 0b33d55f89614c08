"""LSTM, GRU and RNN, compiled, against onnxruntime: directions, lengths, states, peepholes, activations."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import onnxc

pytestmark = pytest.mark.every_target

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STEPS, BATCH, INPUT, HIDDEN = 5, 3, 4, 7


def recurrent_model(
    op: str, directions: int, extras: dict[str, np.ndarray], dynamic: bool = False, **attrs: object
) -> onnx.ModelProto:
    """One node with constant weights of a fixed seed; `extras` are further constant inputs by their ONNX name."""
    rng = np.random.default_rng(1)
    gates = GATES[op]
    weights = {
        "W": rng.standard_normal((directions, gates * HIDDEN, INPUT)) * 0.4,
        "R": rng.standard_normal((directions, gates * HIDDEN, HIDDEN)) * 0.4,
        "B": rng.standard_normal((directions, 2 * gates * HIDDEN)) * 0.2,
        **extras,
    }
    order = ["W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P"]
    used = [name if name in weights else "" for name in order]
    while not used[-1]:
        used.pop()
    inits = [
        onnx.numpy_helper.from_array(np.asarray(v, np.int32 if k == "sequence_lens" else np.float32), k)
        for k, v in weights.items()
    ]
    outputs = ["Y", "Y_h", "Y_c"][: 3 if op == "LSTM" else 2]
    node = helper.make_node(op, ["X", *used], outputs, hidden_size=HIDDEN, **attrs)
    shape = ["t", BATCH, INPUT] if dynamic else [STEPS, BATCH, INPUT]
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("X", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outputs], inits,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def agrees(model: onnx.ModelProto, steps: int = STEPS, compiled: onnxc.CompiledModel | None = None) -> None:
    x = np.random.default_rng(2).standard_normal((steps, BATCH, INPUT)).astype(np.float32)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    expected = ort.InferenceSession(model.SerializeToString(), options).run(None, {"X": x})
    found = (compiled or onnxc.compile(model)).run(None, {"X": x})
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(("op", "direction"), list(itertools.product(GATES, ["forward", "reverse", "bidirectional"])))
def test_directions(op: str, direction: str) -> None:
    agrees(recurrent_model(op, 2 if direction == "bidirectional" else 1, {}, direction=direction))


@pytest.mark.parametrize(("op", "direction"), list(itertools.product(GATES, ["forward", "reverse", "bidirectional"])))
def test_sequence_lengths_and_initial_states(op: str, direction: str) -> None:
    d = 2 if direction == "bidirectional" else 1
    rng = np.random.default_rng(3)
    extras = {"sequence_lens": np.array([5, 2, 3]), "initial_h": rng.standard_normal((d, BATCH, HIDDEN))}
    if op == "LSTM":
        extras["initial_c"] = rng.standard_normal((d, BATCH, HIDDEN))
    agrees(recurrent_model(op, d, extras, direction=direction))
    agrees(recurrent_model(op, d, extras | {"sequence_lens": np.array([5, 0, 3])}, direction=direction))


def test_peepholes_and_clip() -> None:
    p = np.random.default_rng(4).standard_normal((1, 3 * HIDDEN)) * 0.3
    agrees(recurrent_model("LSTM", 1, {"P": p}))
    agrees(recurrent_model("LSTM", 1, {}, clip=0.3))
    agrees(recurrent_model("LSTM", 1, {}, input_forget=1))


def test_other_activations() -> None:
    agrees(recurrent_model("LSTM", 1, {}, activations=["HardSigmoid", "Relu", "Softsign"]))
    agrees(recurrent_model("GRU", 1, {}, activations=["Sigmoid", "LeakyRelu"], activation_alpha=[0.2]))
    agrees(recurrent_model("RNN", 2, {}, direction="bidirectional", activations=["Relu", "Tanh"]))


@pytest.mark.parametrize("linear", [0, 1])
def test_gru_reset_before_or_after(linear: int) -> None:
    agrees(recurrent_model("GRU", 1, {}, linear_before_reset=linear))


@pytest.mark.parametrize("op", GATES)
def test_one_compile_runs_any_number_of_steps(op: str) -> None:
    model = recurrent_model(op, 1, {}, dynamic=True)
    compiled = onnxc.compile(model)
    for steps in (1, 2, 9):
        agrees(model, steps, compiled)
