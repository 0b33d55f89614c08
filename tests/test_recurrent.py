"""LSTM, GRU and RNN, compiled, against onnxruntime: directions, lengths, states, peepholes, activations."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import onnxc
from onnxc.errors import OnnxcError, RunError
from onnxc.frontends import onnx_file
from onnxc.passes.decompose import decompose
from onnxc.planner.groups import FusionOptions
from onnxc.primitives.interpret import interpret

pytestmark = pytest.mark.every_target

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STEPS, BATCH, INPUT, HIDDEN = 5, 3, 4, 7


def recurrent_model(
    op: str, directions: int, extras: dict[str, np.ndarray], dynamic: bool = False, hidden: int = HIDDEN,
    **attrs: object,
) -> onnx.ModelProto:  # fmt: skip
    """One node with constant weights of a fixed seed; `extras` are further constant inputs by their ONNX name."""
    rng = np.random.default_rng(1)
    gates = GATES[op]
    weights = {
        "W": rng.standard_normal((directions, gates * hidden, INPUT)) * 0.4,
        "R": rng.standard_normal((directions, gates * hidden, hidden)) * 0.4 * (HIDDEN / hidden) ** 0.5,
        "B": rng.standard_normal((directions, 2 * gates * hidden)) * 0.2,
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
    node = helper.make_node(op, ["X", *used], outputs, hidden_size=hidden, **attrs)
    shape = ["t", BATCH, INPUT] if dynamic else [STEPS, BATCH, INPUT]
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("X", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outputs], inits,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def unoptimized(model: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    """onnxruntime's answers."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return list(ort.InferenceSession(model.SerializeToString(), options).run(None, {"X": x}))


def agrees(model: onnx.ModelProto, steps: int = STEPS, compiled: onnxc.CompiledModel | None = None) -> None:
    x = np.random.default_rng(2).standard_normal((steps, BATCH, INPUT)).astype(np.float32)
    found = (compiled or onnxc.compile(model)).run(None, {"X": x})
    for a, b in zip(found, unoptimized(model, x), strict=True):
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


@pytest.mark.cpu_only("the source of the CPU")
def test_products_of_steps_are_divided() -> None:
    """The threads are awake in a loop: less work is worth a task there. The bits are the same."""
    compiled = agrees_in(recurrent_model("LSTM", 1, {}, hidden=160), fusion=FusionOptions(rows=False))
    grids = {line.split("(")[1] for line in compiled.source.splitlines() if "const MmGrid g" in line}
    assert grids == {"3, 640, 160, ctx->threads, MM_OFTEN);", "15, 640, 4, ctx->threads, MM_ONCE, true);"}


def agrees_in(model: onnx.ModelProto, fusion: bool | FusionOptions = True) -> onnxc.CompiledModel:
    """As `agrees`, with one thread and with two."""
    compiled = onnxc.compile(model, threads=2, fusion=fusion)
    agrees(model, compiled=compiled)
    x = np.random.default_rng(2).standard_normal((STEPS, BATCH, INPUT)).astype(np.float32)
    found = compiled(x)
    compiled.threads = 1
    assert [y.tobytes() for y in found] == [y.tobytes() for y in compiled(x)]
    return compiled


def test_large_directions_step_together() -> None:
    """One loop takes a step of both directions; where their activations differ, each has a loop."""
    rng = np.random.default_rng(3)
    sizes = {"LSTM": 92, "GRU": 105, "RNN": 182}
    more: dict[str, dict[str, object]] = {"LSTM": {"layout": 0}, "GRU": {"linear_before_reset": 0}, "RNN": {}}
    more["apart"] = {"activations": ["Tanh", "Relu"]}
    nodes, inits, outputs = [], [], []
    for k, (name, attrs) in enumerate(more.items()):
        op = name if name in GATES else "RNN"
        n = sizes[op]
        extras = {"initial_h": rng.standard_normal((2, BATCH, n))}
        if op != "RNN":
            extras["sequence_lens"] = np.array([STEPS, 2, 0])
        if op == "LSTM":
            extras |= {"initial_c": rng.standard_normal((2, BATCH, n)), "P": rng.standard_normal((2, 3 * n)) * 0.3}
        graph = recurrent_model(op, 2, extras, hidden=n, direction="bidirectional", **attrs).graph
        onnx.compose.add_prefix_graph(graph, f"{k}_", rename_inputs=False, inplace=True)
        nodes, inits, outputs = [*nodes, *graph.node], [*inits, *graph.initializer], [*outputs, *graph.output]
    x = helper.make_tensor_value_info("X", TensorProto.FLOAT, [STEPS, BATCH, INPUT])
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], outputs, inits),
        opset_imports=[helper.make_opsetid("", 20)], ir_version=10,
    )  # fmt: skip
    primitives = decompose(onnx_file.load(model))
    assert sum(node.op == "scan" for node in primitives.nodes) == len(GATES) + 2
    fed = np.random.default_rng(2).standard_normal((STEPS, BATCH, INPUT)).astype(np.float32)
    for a, b in zip(interpret(primitives, [fed]), unoptimized(model, fed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("op", GATES)
def test_one_compile_runs_any_number_of_steps(op: str) -> None:
    model = recurrent_model(op, 1, {}, dynamic=True)
    compiled = onnxc.compile(model)
    for steps in (1, 2, 9):
        agrees(model, steps, compiled)


@pytest.mark.parametrize("op", GATES)
def test_what_lies_batch_by_batch_is_one_product(op: str) -> None:
    """A transposed input, as of a batch that comes first: its rows are multiplied in the order in which they lie."""
    model = recurrent_model(op, 2, {}, direction="bidirectional")
    (node,), (x,) = model.graph.node, model.graph.input
    node.input[0] = "turned"
    model.graph.node.insert(0, helper.make_node("Transpose", ["X"], ["turned"], perm=[1, 0, 2]))
    for dim, name in zip(x.type.tensor_type.shape.dim, ("n", "t"), strict=False):
        dim.dim_param = name
    compiled = onnxc.compile(model)
    primitives = decompose(onnx_file.load(model))
    assert any(n.op == "matmul" and n.operands[0] is primitives.inputs[0] for n in primitives.nodes)
    for batch, steps in ((1, 4), (3, 5)):
        fed = np.random.default_rng(4).standard_normal((batch, steps, INPUT)).astype(np.float32)
        for a, b in zip(compiled.run(None, {"X": fed}), unoptimized(model, fed), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
def test_lengths_beyond_the_steps_are_errors(op: str) -> None:
    """As in onnxruntime: of none to all of the steps."""
    model = recurrent_model(op, 1, {"sequence_lens": np.full(BATCH, STEPS)}, direction="reverse")
    lens = next(i for i in model.graph.initializer if i.name == "sequence_lens")
    x = np.ones((STEPS, BATCH, INPUT), np.float32)
    for wrong in (STEPS + 1, -1):
        lens.CopyFrom(onnx.numpy_helper.from_array(np.array([0, wrong, STEPS], np.int32), "sequence_lens"))
        with pytest.raises(OnnxcError, match=rf"index.*{op}"):
            onnxc.compile(model, cache=False)(x)
    model.graph.initializer.remove(lens)
    model.graph.input.append(helper.make_tensor_value_info("sequence_lens", TensorProto.INT32, [BATCH]))
    compiled = onnxc.compile(model, cache=False)
    for wrong in (STEPS + 1, 99, -1):
        with pytest.raises(RunError, match=rf"index {max(wrong, STEPS + 1)} is out of bounds.*{op}"):
            compiled(x, np.array([0, wrong, STEPS], np.int32))
    compiled(x, np.array([0, 2, STEPS], np.int32))
