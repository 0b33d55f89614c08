"""Gradients of scans: what LSTM, GRU and RNN are made of."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

import onnxc
from onnxc.export import to_onnx
from onnxc.frontends.onnx_file import load
from onnxc.gradient import differentiate
from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from onnxc.passes.decompose import decompose
from onnxc.primitives.builder import Builder
from onnxc.primitives.interpret import interpret
from tests.compile_harness import compile_graphs
from tests.gradient_harness import Array, agrees, compare, cotangents_of, floats, measured, types_of, with_gradient

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STEPS, BATCH, INPUT, HIDDEN = 5, 3, 4, 6
ORDER = ["X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P"]

# ------------------------------------------------------------ the primitive


def test_a_running_product() -> None:
    def build(b: Builder, start: Value, xs: Value) -> list[Value]:
        def step(inner: Builder, states: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
            y = inner.mul(states[0], slices[0])
            return [y], [inner.unary("sin", y), y]

        finals, results = b.scan([start], [xs], xs.shape[0], step)
        return [*finals, *results]

    for steps in (0, 1, 2, 7):
        agrees(build, floats(3), floats(steps, 3))


def test_what_every_step_sees_adds_up() -> None:
    """By a product of matrices, by another function, and twice by the same value."""

    def build(b: Builder, start: Value, w: Value, c: Value) -> list[Value]:
        def step(inner: Builder, states: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
            h = inner.tanh(inner.add(inner.matmul(states[0], w), inner.mul(c, c)))
            return [inner.matmul(h, w)], [inner.mul(inner.matmul(h, w), c)]

        finals, results = b.scan([start], [], 3, step)
        return [*finals, *results]

    agrees(build, floats(2, 4), floats(4, 4, seed=1), floats(4))


def test_states_of_several_kinds() -> None:
    """A counter of integers, a state that passes by, one without a cotangent, and one that is a result."""

    def build(b: Builder, x: Value, y: Value, xs: Value) -> list[Value]:
        def step(inner: Builder, states: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
            count, first, second, kept = states
            weight = inner.cast(count, dtypes.float64)
            mixed = inner.add(inner.mul(first, weight), inner.mul(second, slices[0]))
            scaled = inner.mul(second, inner.constant(np.array([-0.25])))
            return [inner.add(count, 1), mixed, scaled, kept], [first, inner.mul(kept, weight)]

        zero = b.constant(np.array(0))
        finals, results = b.scan([zero, x, y, x], [xs], xs.shape[0], step)
        return [finals[1], *results]

    agrees(build, floats(2), floats(2, seed=1), floats(4, 2))


def test_a_state_whose_start_is_constant() -> None:
    def build(b: Builder, xs: Value) -> Value:
        def step(inner: Builder, states: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
            return [inner.add(inner.mul(states[0], 0.5), inner.exp(slices[0]))], []

        finals, _ = b.scan([b.full((2,), 0.0, dtypes.float64)], [xs], xs.shape[0], step)
        return finals[0]

    agrees(build, floats(4, 2))


def test_a_scan_inside_of_a_scan() -> None:
    def build(b: Builder, start: Value, xs: Value, w: Value) -> list[Value]:
        def outer(inner: Builder, states: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
            def step(b: Builder, states: list[Value], parts: list[Value]) -> tuple[list[Value], list[Value]]:
                return [b.tanh(b.add(b.matmul(states[0], w), parts[0]))], [states[0]]

            finals, results = inner.scan([states[0]], [slices[0]], 3, step)
            return [inner.mul(finals[0], 2.0)], [inner.reduce("sum", results[0], [0])]

        finals, results = b.scan([start], [xs], 2, outer)
        return [*finals, *results]

    agrees(build, floats(1, 3), floats(2, 3, 1, 3), floats(3, 3, seed=1), dynamic=False)


def test_the_same_value_in_every_place() -> None:
    """As the start of two states, as what is scanned, and as what every step sees."""

    def build(b: Builder, x: Value) -> list[Value]:
        def step(inner: Builder, states: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
            sum_ = inner.reduce("sum", inner.mul(states[0], x), [0])
            return [inner.mul(states[1], 0.5), inner.mul(x, slices[0])], [inner.add(sum_, slices[0])]

        finals, results = b.scan([x, x], [x, x], x.shape[0], step)
        return [*finals, *results]

    agrees(build, floats(3))


def test_the_gradient_again() -> None:
    """Second order: the scan of the way back is a scan like any other."""

    def once(b: Builder, start: Value, xs: Value, w: Value) -> Value:
        def step(inner: Builder, states: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
            return [inner.tanh(inner.add(inner.matmul(states[0], w), slices[0]))], []

        return b.scan([start], [xs], 3, step)[0][0]

    b = Builder(differentiable=True)
    arrays = [floats(2, 3), floats(3, 2, 3, seed=1), floats(3, 3, seed=2)]
    inputs = [b.input(t, f"x{k}") for k, t in enumerate(types_of(arrays, False))]
    first = with_gradient(b.graph([once(b, *inputs)]), [0, 1, 2])
    given = [*arrays, floats(2, 3, seed=3)]
    dys = cotangents_of(interpret(first, given))
    second = with_gradient(first, [0, 1, 2, 3])
    results = interpret(second, [*given, *dys])
    for k, got in enumerate(results):
        compare(got, measured(lambda xs: interpret(first, xs), given, k, dys), f"input {k}")


def test_a_product_of_all_steps_at_once() -> None:
    """The recurrent weights' gradient is one matmul behind the scan, not a sum in it."""
    graph = differentiate(load(recurrent("LSTM", {})), ["Y"], ["R"], cotangents=True)
    back = graph.nodes[[n.op for n in graph.nodes].index("scan", 1 + [n.op for n in graph.nodes].index("scan"))]
    assert back.attrs["states"] == 2
    assert len(back.outputs) == 3


# ------------------------------------------------------------ LSTM, GRU, RNN


def arrays_of(op: str, directions: int, extras: Sequence[str], steps: int = STEPS) -> dict[str, Array]:
    rng = np.random.default_rng(1)
    gates = GATES[op]
    shapes = {
        "X": (steps, BATCH, INPUT), "W": (directions, gates * HIDDEN, INPUT), "R": (directions, gates * HIDDEN, HIDDEN),
        "B": (directions, 2 * gates * HIDDEN), "initial_h": (directions, BATCH, HIDDEN),
        "initial_c": (directions, BATCH, HIDDEN), "P": (directions, 3 * HIDDEN),
    }  # fmt: skip
    found: dict[str, Array] = {
        n: rng.standard_normal(shapes[n]) * 0.5 for n in ("X", "W", "R", "B", *extras) if n in shapes
    }
    if "sequence_lens" in extras:
        found["sequence_lens"] = np.array([steps, min(2, steps), min(3, steps)], np.int32)
    return found


def recurrent(op: str, given: Mapping[str, Array], dynamic: bool = False, **attrs: Any) -> onnx.ModelProto:
    given = given or arrays_of(op, 1, [])
    used = [n if n in given else "" for n in ORDER]
    while not used[-1]:
        used.pop()
    outputs = ["Y", "Y_h", "Y_c"][: 3 if op == "LSTM" else 2]
    node = helper.make_node(op, used, outputs, hidden_size=HIDDEN, **attrs)
    infos = [
        helper.make_tensor_value_info(
            n, helper.np_dtype_to_tensor_dtype(a.dtype), ["t", *a.shape[1:]] if dynamic and n == "X" else a.shape
        )
        for n, a in given.items()
    ]
    graph = helper.make_graph([node], "g", infos, [helper.make_empty_tensor_value_info(o) for o in outputs])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


def recurrent_agrees(op: str, given: dict[str, Array], dynamic: bool = False, **attrs: Any) -> None:
    """All gradients of all results, against central differences; and of the exported model in onnxruntime."""
    model = recurrent(op, given, dynamic, **attrs)
    losses = [o.name for o in model.graph.output]
    wrt = [n for n in given if given[n].dtype.kind == "f"]
    forward = decompose(load(model))
    base = [given[n] for n in forward.input_names]
    dys = cotangents_of(interpret(forward, base))
    graph = differentiate(load(model), losses, wrt, cotangents=True, outputs=False)
    named = {**given, **{f"{n}_cotangent": dy for n, dy in zip(losses, dys, strict=True)}}
    results = interpret(graph, [named[n] for n in graph.input_names])
    for n, got in zip(wrt, results, strict=True):
        compare(got, measured(lambda xs: interpret(forward, xs), base, forward.input_names.index(n), dys, 6), n)
    exported = to_onnx(graph)
    onnx.checker.check_model(exported, full_check=True)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(exported.SerializeToString(), options)
    for got, wanted in zip(session.run(None, {n: named[n] for n in graph.input_names}), results, strict=True):
        np.testing.assert_allclose(got, wanted, 1e-9, 1e-10)


@pytest.mark.parametrize(("op", "direction"), list(itertools.product(GATES, ["forward", "reverse", "bidirectional"])))
def test_directions_lengths_and_states(op: str, direction: str) -> None:
    d = 2 if direction == "bidirectional" else 1
    states = ["initial_h", "initial_c"] if op == "LSTM" else ["initial_h"]
    recurrent_agrees(op, arrays_of(op, d, []), direction=direction)
    recurrent_agrees(op, arrays_of(op, d, ["sequence_lens", *states]), direction=direction)


def test_variants() -> None:
    recurrent_agrees("LSTM", arrays_of("LSTM", 1, ["P", "initial_c", "initial_h"]))
    recurrent_agrees("LSTM", arrays_of("LSTM", 1, []), input_forget=1)
    for op in GATES:
        recurrent_agrees(op, arrays_of(op, 1, []), clip=0.3)
    recurrent_agrees("GRU", arrays_of("GRU", 2, ["initial_h"]), direction="bidirectional", linear_before_reset=1)
    recurrent_agrees("RNN", arrays_of("RNN", 1, []), activations=["Relu"])
    recurrent_agrees("LSTM", arrays_of("LSTM", 1, []), activations=["HardSigmoid", "Elu", "Softsign"])


def test_lengths_that_are_known_at_run_time() -> None:
    for op, steps in itertools.product(GATES, (0, 1, 4)):
        recurrent_agrees(op, arrays_of(op, 1, ["initial_h"], steps), dynamic=True)


def test_compiled() -> None:
    """The gradient compiles, and is what onnxruntime makes of the same model."""
    rng = np.random.default_rng(4)
    for op in GATES:
        given = arrays_of(op, 1, ["initial_h", "sequence_lens"])
        given = {n: a.astype(np.float32) if a.dtype.kind == "f" else a for n, a in given.items()}
        graph = differentiate(load(recurrent(op, given)), ["Y", "Y_h"], ["X", "W", "R", "B"], cotangents=True)
        dys = {v.name: rng.standard_normal(v.shape).astype(np.float32) for v in graph.inputs if v.name not in given}
        named = {n: {**given, **dys}[n] for n in graph.input_names}
        wanted = ort.InferenceSession(to_onnx(graph).SerializeToString()).run(None, named)
        (program,) = compile_graphs([graph])
        for a, b in zip(program(*named.values()), wanted, strict=True):
            np.testing.assert_allclose(a, b, 1e-4, 1e-5)


@pytest.mark.parametrize("op", ["LSTM", "RNN"])
def test_compiled_again(op: str) -> None:
    """So does the gradient of the exported gradient."""
    given = {n: a.astype(np.float32) for n, a in arrays_of(op, 1, []).items()}
    first = onnxc.backward(recurrent(op, given), "Y", ["X"], cotangents=True, outputs=False)
    second = onnxc.backward(first, "X_grad", ["X"], cotangents=True)
    dys = {"Y_cotangent": floats(STEPS, 1, BATCH, HIDDEN), "X_grad_cotangent": floats(STEPS, BATCH, INPUT)}
    named = {**given, **{n: dy.astype(np.float32) for n, dy in dys.items()}}
    wanted = ort.InferenceSession(second.SerializeToString()).run(None, named)
    for a, b in zip(onnxc.compile(second).run(None, named), wanted, strict=True):
        np.testing.assert_allclose(a, b, 1e-4, 1e-5)


# ------------------------------------------------------------ against PyTorch


@pytest.mark.parametrize(("op", "direction"), list(itertools.product(GATES, ["forward", "bidirectional"])))
def test_as_in_torch(op: str, direction: str) -> None:
    torch = pytest.importorskip("torch")
    d = 2 if direction == "bidirectional" else 1
    given = arrays_of(op, d, ["initial_h", "initial_c"] if op == "LSTM" else ["initial_h"])
    attrs: dict[str, Any] = {"direction": direction, **({"linear_before_reset": 1} if op == "GRU" else {})}
    module = getattr(torch.nn, op)(INPUT, HIDDEN, bidirectional=d == 2, dtype=torch.float64)
    blocks = {"LSTM": [0, 2, 3, 1], "GRU": [1, 0, 2], "RNN": [0]}[op]  # where ONNX has the gates of PyTorch's order

    def reordered(a: Array) -> Any:
        parts = np.split(a, GATES[op])
        return torch.tensor(np.concatenate([parts[k] for k in blocks]))

    with torch.no_grad():
        for k in range(d):
            tail = "_reverse" if k else ""
            both = np.split(given["B"][k], 2)
            for name, a in [
                ("weight_ih", given["W"][k]),
                ("weight_hh", given["R"][k]),
                ("bias_ih", both[0]),
                ("bias_hh", both[1]),
            ]:
                getattr(module, f"{name}_l0{tail}").copy_(reordered(a))
    x = torch.tensor(given["X"], requires_grad=True)
    h = torch.tensor(given["initial_h"], requires_grad=True)
    c = torch.tensor(given["initial_c"], requires_grad=True) if op == "LSTM" else None
    y, _ = module(x, (h, c) if op == "LSTM" else h)
    dy = np.random.default_rng(9).standard_normal((STEPS, d, BATCH, HIDDEN))
    y.backward(torch.tensor(dy.transpose(0, 2, 1, 3).reshape(STEPS, BATCH, d * HIDDEN)))
    graph = differentiate(load(recurrent(op, given, **attrs)), "Y", list(given), cotangents=True, outputs=False)
    named = {**given, "Y_cotangent": dy}
    got = dict(zip(given, interpret(graph, [named[n] for n in graph.input_names]), strict=True))
    np.testing.assert_allclose(got["X"], x.grad.numpy(), 1e-9, 1e-11)
    np.testing.assert_allclose(got["initial_h"], h.grad.numpy(), 1e-9, 1e-11)
    for k in range(d):
        tail = "_reverse" if k else ""
        for name, mine in [
            ("weight_ih", got["W"][k]),
            ("weight_hh", got["R"][k]),
            ("bias_ih", np.split(got["B"][k], 2)[0]),
        ]:
            np.testing.assert_allclose(
                reordered(mine).numpy(), getattr(module, f"{name}_l0{tail}").grad.numpy(), 1e-9, 1e-11
            )


def test_sizes_with_several_names() -> None:
    """The hidden size is that of the weights' rows by four, and of their columns: one number, two expressions."""
    given = arrays_of("LSTM", 1, [])
    model = recurrent("LSTM", given)
    wanted = differentiate(load(model), "Y", ["R", "X"], cotangents=True, outputs=False)
    for info, dims in zip(model.graph.input, (["t", "b", "i"], ["d", "g", "i"], ["d", "g", "h"]), strict=False):
        for place, name in zip(info.type.tensor_type.shape.dim, dims, strict=True):
            place.dim_param = name
    graph = differentiate(load(model), "Y", ["R", "X"], cotangents=True, outputs=False)
    named = {**given, "Y_cotangent": floats(STEPS, 1, BATCH, HIDDEN)}
    for g, w in zip(*(interpret(f, [named[n] for n in f.input_names]) for f in (graph, wanted)), strict=True):
        np.testing.assert_allclose(g, w, 1e-12)
