"""One kernel for all steps of a recurrent network: in Triton's interpreter its answers are those of kernels for each
step, which are checked elsewhere; and those of a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxc
from onnxc.planner.groups import FusionOptions
from tests.targets import needs_triton, this_gpu
from tests.triton_simulator import Simulator

Array = np.ndarray[Any, Any]

pytestmark = needs_triton
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
DTYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}


def numbers(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def network(
    op: str, dtype: str, steps: int | str, batch: int | str, hidden: int, directions: int = 1, states: bool = False,
    lens: list[int] | None = None, peepholes: bool = False, **attributes: Any,
) -> bytes:  # fmt: skip
    """A model of one recurrent op with constant weights. Its input has three columns."""
    rows, scale = GATES[op] * hidden, hidden**-0.5
    weights = {
        "w": numbers(1, directions, rows, 3), "r": scale * numbers(2, directions, rows, hidden),
        "b": numbers(3, directions, 2 * rows),
    }  # fmt: skip
    names, outputs = ["x", "w", "r", "b"], ["y", "h", "c"][: 3 if op == "LSTM" else 2]
    turned = attributes.get("layout", 0)
    inputs: dict[str, tuple[int | str, ...]] = {"x": (batch, steps, 3) if turned else (steps, batch, 3)}
    names.append("lens" if lens else "")
    state = (batch, directions, hidden) if turned else (directions, batch, hidden)
    for name in ("h0", "c0")[: len(outputs) - 1]:
        names.append(name if states else "")
        inputs |= {name: state} if states else {}
    if peepholes:
        names.append("p")
        weights["p"] = numbers(4, directions, 3 * hidden)
    way = {1: attributes.pop("direction", "forward"), 2: "bidirectional"}[directions]
    node = helper.make_node(op, names, outputs, hidden_size=hidden, direction=way, **attributes)
    kind = DTYPES[dtype]
    constants = [
        numpy_helper.from_array(a.astype(helper.tensor_dtype_to_np_dtype(kind)), n) for n, a in weights.items()
    ]
    if lens:
        constants.append(numpy_helper.from_array(np.array(lens, np.int32), "lens"))
    y = (batch, steps, directions, hidden) if turned else (steps, directions, batch, hidden)
    shapes: dict[str, tuple[int | str, ...]] = {"y": y} | dict.fromkeys("hc", state)
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info(n, kind, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(n, kind, shapes[n]) for n in outputs], constants,
    )  # fmt: skip
    found = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    return bytes(found.SerializeToString())


def given(model: bytes, **sizes: int) -> list[Array]:
    """Inputs of a model; `sizes` are its open dims."""
    found = []
    for k, v in enumerate(onnx.ModelProto.FromString(model).graph.input):
        dims = [sizes[d.dim_param] if d.dim_param else d.dim_value for d in v.type.tensor_type.shape.dim]
        found.append(numbers(10 + k, *dims).astype(helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type)))
    return found


FORMS: dict[str, dict[str, int]] = {  # limits that decide for one
    "programs for each step": {"HELD": 0},
    "a program for all steps": {"ANYWHERE": 1 << 20},
}


def both(simulator: Simulator, model: bytes, inputs: list[Array], dtype: str, **options: Any) -> list[str]:
    """The kinds of kernels; the answers are those of kernels for each step."""
    plain = simulator.run(model, inputs, fusion={"recurrence": False, "libraries": False})
    found = simulator.run(model, inputs, **options)
    if "recurrence" in found.kinds and "limits" in options:
        assert ("ox_unwritten(" in found.source) == ("HELD" in options["limits"])
    assert not found.error[0] and "recurrence" not in plain.kinds
    for x, y in zip(found.outputs, plain.outputs, strict=True):
        np.testing.assert_allclose(x.astype(np.float64), y.astype(np.float64), TOLERANCE[dtype], TOLERANCE[dtype])
    return found.kinds


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "one row": ("LSTM", "float32", {"steps": 5, "batch": 1, "hidden": 12}),
    "a few rows": ("LSTM", "float32", {"steps": 3, "batch": 3, "hidden": 9, "states": True}),
    "several blocks of rows": ("LSTM", "float32", {"steps": 3, "batch": 21, "hidden": 33}),
    "halves": ("LSTM", "float16", {"steps": 3, "batch": 19, "hidden": 21, "states": True}),
    "bfloat16": ("LSTM", "bfloat16", {"steps": 2, "batch": 5, "hidden": 17}),
    "both directions in turn": ("LSTM", "float32", {"steps": 3, "batch": 2, "hidden": 8, "directions": 2}),
    "both directions together": ("LSTM", "float16", {"steps": 2, "batch": 3, "hidden": 100, "directions": 2}),
    "backwards": ("RNN", "float32", {"steps": 4, "batch": 2, "hidden": 7, "direction": "reverse"}),
    "peepholes": ("LSTM", "float32", {"steps": 3, "batch": 2, "hidden": 10, "peepholes": True, "clip": 0.5}),
    "lengths": ("LSTM", "float32", {"steps": 4, "batch": 3, "hidden": 6, "lens": [2, 4, 0], "states": True}),
    "batch first": ("GRU", "float32", {"steps": 2, "batch": 3, "hidden": 6, "layout": 1, "states": True}),
    "reset after the product": ("GRU", "float32", {"steps": 3, "batch": 3, "hidden": 6, "linear_before_reset": 1}),
    "a gate of two products": ("GRU", "float32", {"steps": 3, "batch": 9, "hidden": 20, "states": True}),
    "two products of halves": ("GRU", "float16", {"steps": 3, "batch": 2, "hidden": 20, "directions": 2}),
    "other functions": ("RNN", "float32", {"steps": 3, "batch": 4, "hidden": 5, "activations": ["LeakyRelu"]}),
    "one unit": ("RNN", "float16", {"steps": 3, "batch": 4, "hidden": 1}),
    "sums in parts": ("RNN", "float32", {"steps": 2, "batch": 2, "hidden": 150}),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_networks(simulator: Simulator, name: str, form: str) -> None:
    op, dtype, options = CASES[name]
    if name in ("sums in parts", "both directions together") and form != "programs for each step":
        pytest.skip("its matrices are large, or its rows too few for them")
    model = network(op, dtype, **options)
    assert "recurrence" in both(simulator, model, given(model), dtype, limits=FORMS[form])


def lstm(x: Array, w: Array, r: Array, b: Array) -> Array:
    """The states of all steps, in float64."""
    h, c, found = np.zeros((x.shape[1], r.shape[-1])), np.zeros((x.shape[1], r.shape[-1])), []
    for step in x.astype(np.float64):
        i, o, f, g = np.split(step @ w[0].T + h @ r[0].T + b[0, : len(w[0])] + b[0, len(w[0]) :], 4, 1)
        i, o, f = (1 / (1 + np.exp(-v)) for v in (i, o, f))
        c = f * c + i * np.tanh(g)
        h = o * np.tanh(c)
        found.append(h)
    return np.stack(found)[:, None]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("batch", "hidden"), [(1, 1), (2, 15), (3, 16), (8, 17), (9, 31), (5, 32), (4, 47), (17, 64)])
def test_exact_sums(simulator: Simulator, batch: int, hidden: int, form: str) -> None:
    """Float32 is no less exact than its sums: those of a float64 LSTM to a few units in the last place."""
    model = network("LSTM", "float32", 4, batch, hidden)
    (x,), weights = given(model), {t.name: numpy_helper.to_array(t) for t in parameters(model)}
    (y, *_) = simulator.run(model, [x], limits=FORMS[form]).outputs
    wanted = lstm(x, *(weights[k].astype(np.float64) for k in "wrb"))
    assert np.linalg.norm(y - wanted) < 4e-7 * np.linalg.norm(wanted)


def parameters(model: bytes) -> list[TensorProto]:
    return list(onnx.ModelProto.FromString(model).graph.initializer)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("candidate", range(10))
def test_candidates(simulator: Simulator, candidate: int, dtype: str) -> None:
    model = network("LSTM", dtype, 2, 5, 21)
    fusion = {"libraries": False}
    assert "recurrence" in both(simulator, model, given(model), dtype, candidate=candidate, fusion=fusion)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_open_sizes(simulator: Simulator, steps: int, form: str) -> None:
    """Of no steps, the last states are the first ones."""
    model = network("LSTM", "float32", "t", "b", 6, states=True)
    for batch in (1, 18):
        inputs = given(model, t=steps, b=batch)
        assert "recurrence" in both(simulator, model, inputs, "float32", limits=FORMS[form])
        if not steps:
            assert (simulator.run(model, inputs, limits=FORMS[form]).outputs[1] == inputs[1]).all()


@pytest.mark.parametrize("op", ["LSTM", "GRU"])
def test_as_many_rows_as_the_run_decides(simulator: Simulator, op: str) -> None:
    """However many there are, few programs of a step read its matrices: each goes through several blocks of rows."""
    model = network(op, "float32", 3, "b", 6, states=True)
    for batch in (1, 8, 41):
        inputs = given(model, b=batch)
        for most in (1, 2500):  # bytes: of one block's matrices, or of a few
            assert "recurrence" in both(simulator, model, inputs, "float32", limits={"HELD": 0, "MOST_READ": most})


@pytest.mark.parametrize(("op", "directions"), [("LSTM", 1), ("LSTM", 2), ("GRU", 1)])
def test_many_rows_have_kernels_for_each_step(simulator: Simulator, op: str, directions: int) -> None:
    """Where the run finds out that there are so many; also where there are no steps, or no rows."""
    model = network(op, "float32", "t", "b", 6, directions, states=True)
    nbytes = (4 if op == "LSTM" else 3) * 6 * 6 * 4  # of each direction, which have loops of their own
    limits = {"HELD": 0, "LEAST_OPEN": 0, "MOST_OPEN": {"float32": nbytes}}
    for steps, batch in ((3, 16), (3, 17), (3, 40), (0, 17), (2, 0)):
        inputs = given(model, t=steps, b=batch)
        found = simulator.run(model, inputs, limits=limits)
        assert (found.ran("ox_unwritten(") > 0) == (0 < batch <= 16)
        plain = simulator.run(model, inputs, fusion={"recurrence": False, "libraries": False})
        for x, y in zip(found.outputs, plain.outputs, strict=True):
            np.testing.assert_allclose(x, y, 1e-6, 1e-6)
        if batch > 16:
            assert [x.tobytes() for x in found.outputs] == [y.tobytes() for y in plain.outputs]


def test_loops_of_very_many_steps_are_one_kernel(simulator: Simulator) -> None:
    """However many rows they have: a graph with kernels for each step would be large."""
    model = network("RNN", "float32", "t", "b", 2)
    limits = {"LEAST_OPEN": 0, "MOST_OPEN": {"float32": 1}, "MOST_TURNS": 2, "HELD": 0}
    for steps in (2, 3):
        found = simulator.run(model, given(model, t=steps, b=2), limits=limits)
        assert (found.ran("ox_unwritten(") > 0) == (steps > 2)


@pytest.mark.parametrize("form", FORMS)
def test_wide_indices(simulator: Simulator, form: str) -> None:
    model = network("GRU", "float32", 2, 3, 6)
    assert "recurrence" in both(simulator, model, given(model), "float32", wide=True, limits=FORMS[form])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "held"), [(5, False), (40, True)])
def test_who_holds_matrices_of_128_units(simulator: Simulator, rows: int, held: bool, dtype: str) -> None:
    """Of halves, on the architecture where that was measured; those of float32 are too large for a program."""
    model = network("LSTM", dtype, 1, rows, 128)
    for architecture in (None, 90):
        alone = held and dtype != "float32" and architecture == 90
        limits = {"ANYWHERE": 48 << 10} if alone else {"ANYWHERE": 48 << 10, "HELD": 128 << 10}
        assert "recurrence" in both(simulator, model, given(model), dtype, architecture=architecture, limits=limits)


def test_results_are_written_where_they_are_wanted(simulator: Simulator) -> None:
    """No copy of them in another shape, unless they are turned."""
    for directions, loops in ((1, 0), (2, 1)):
        model = network("LSTM", "float32", 3, 2, 6, directions)
        assert both(simulator, model, given(model), "float32").count("loops") == loops


STEPS = {  # of a state [3, 4], with a constant matrix r [4, 4]
    "a product of all": ("recurrence", "p = MatMul (s, r)  q = Add (p, v)  n = Tanh (q)"),
    "a product of what is computed": ("recurrence", "q = Mul (s, v)  p = MatMul (q, r)  n = Tanh (p)"),
    "a product that is not of the state": ("recurrence", "p = MatMul (v, r)  n = Add (p, s)"),
    "what is computed, twice": ("recurrence", "q = Mul (s, v)  e = Exp (q)  p = MatMul (q, r)  n = Add (p, e)"),
    "two, one after the other": ("recurrence", "p = MatMul (s, r)  q = Relu (p)  u = MatMul (q, r)  n = Sub (u, v)"),
    "parts that are shared": ("recurrence", "p = MatMul (s, r)  e0 = Tanh (p)  "
                              + "  ".join(f"e{k + 1} = Mul (e{k}, e{k})" for k in range(60)) + "  n = Add (e60, v)"),
    "no number at zero": ("recurrence", "p = MatMul (s, r)  a = Abs (p)  l = Log (a)  m = Sub (l, l)  n = Add (p, m)"),
    "a mean of each row": ("loops", "p = MatMul (s, r)  m = ReduceMean (p, one)  n = Sub (p, m)"),
    "no product": ("loops", "n = Add (s, v)"),
    "a product that nothing needs": ("loops", "p = MatMul (s, r)  n = Identity (s)"),
    "a product of another rank": ("loops", "f = Unsqueeze (s, zero)  p = MatMul (f, r)  q = Squeeze (p, zero)  "
                                           "n = Add (q, v)"),
    "columns that are turned": ("loops", "t = Transpose <perm = [1, 0]> (s)  p = MatMul (r, t)  "
                                         "u = Transpose <perm = [1, 0]> (p)  n = Add (u, v)"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", STEPS)
def test_any_scan(simulator: Simulator, name: str, form: str) -> None:
    """Whatever a step is, if its products are by constants and the rest is element by element."""
    kind, step = STEPS[name]
    text = f"""<ir_version: 10, opset_import: ["" : 18]>
        g (float[3, 4] x, float[5, 3, 4] vs) => (float[3, 4] y, float[5, 3, 4] ys) {{
            y, ys = Scan <num_scan_inputs = 1, body = step (float[3, 4] s, float[3, 4] v)
                => (float[3, 4] n, float[3, 4] z) {{ {step}  z = Neg (n) }}> (x, vs) }}"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(numbers(5, 4, 4) / 2, "r"))
    for k, number in enumerate(("zero", "one")):
        model.graph.initializer.append(numpy_helper.from_array(np.array([k]), number))
    inputs = [numbers(6, 3, 4), numbers(7, 5, 3, 4)]
    kinds = both(simulator, model.SerializeToString(), inputs, "float32", limits=FORMS[form])
    assert ("recurrence" in kinds) == (kind == "recurrence")


@pytest.mark.parametrize("form", FORMS)
def test_states_that_change_places(simulator: Simulator, form: str) -> None:
    """Each becomes the other one, which has been changed, and both are what they were before the step until it ends."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 18]>
        g (float[3, 4] x, float[3, 4] y, float[5, 3, 4] vs) => (float[3, 4] a, float[3, 4] b, float[5, 3, 4] cs) {
            a, b, cs = Scan <num_scan_inputs = 1, body = step (float[3, 4] s, float[3, 4] u, float[3, 4] v)
                => (float[3, 4] s1, float[3, 4] u1, float[3, 4] c) {
                    p = MatMul (s, r)  q = Add (p, u)  s1 = Tanh (q)  u1 = Identity (s)  c = Mul (u, v)
                }> (x, y, vs) }""")
    model.graph.initializer.append(numpy_helper.from_array(numbers(5, 4, 4), "r"))
    inputs = [numbers(6, 3, 4), numbers(8, 3, 4), numbers(7, 5, 3, 4)]
    assert "recurrence" in both(simulator, model.SerializeToString(), inputs, "float32", limits=FORMS[form])


@pytest.mark.parametrize("step", ["MatMul (v, s)", "MatMul (s, s)"])
def test_a_state_that_is_a_constant_at_first_is_none(simulator: Simulator, step: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 18]>
        g (float[5, 4, 4] vs) => (float[4, 4] y) {{
            y = Scan <num_scan_inputs = 1, body = step (float[4, 4] s, float[4, 4] v) => (float[4, 4] n) {{
                p = {step}  q = Tanh (p)  n = Add (q, v) }}> (x, vs) }}"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(numbers(5, 4, 4), "x"))
    assert "recurrence" not in both(simulator, model.SerializeToString(), [numbers(7, 5, 4, 4)], "float32")


def test_products_of_more_rows_than_states(simulator: Simulator) -> None:
    text = """<ir_version: 10, opset_import: ["" : 18]>
        g (float[3, 4] x, float[5, 5, 4] vs) => (float[3, 4] y) <int64[1] zero = {0}, int64[1] three = {3}> {
            y = Scan <num_scan_inputs = 1, body = step (float[3, 4] s, float[5, 4] v) => (float[3, 4] n) {
                p = MatMul (v, r)  f = Slice (p, zero, three, zero)  n = Add (f, s) }> (x, vs) }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(numbers(5, 4, 4), "r"))
    inputs = [numbers(6, 3, 4), numbers(7, 5, 5, 4)]
    assert "recurrence" not in both(simulator, model.SerializeToString(), inputs, "float32")


@pytest.mark.parametrize("batch", [1, 3])
def test_as_many_matrices_as_the_run_decides(simulator: Simulator, batch: int) -> None:
    text = """<ir_version: 10, opset_import: ["" : 18]>
        g (float[b, 2, 3, 4] x, float[5, b, 2, 3, 4] vs) => (float[b, 2, 3, 4] y) {
            y = Scan <num_scan_inputs = 1, body = step (float[b, 2, 3, 4] s, float[b, 2, 3, 4] v)
                => (float[b, 2, 3, 4] n) { p = MatMul (s, r)  n = Add (p, v) }> (x, vs) }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(numbers(5, 2, 4, 4) / 2, "r"))
    inputs = [numbers(6, batch, 2, 3, 4), numbers(7, 5, batch, 2, 3, 4)]
    assert "recurrence" not in both(simulator, model.SerializeToString(), inputs, "float32")


@pytest.mark.parametrize("form", FORMS)
def test_a_number_that_is_none_ends_in_its_row(simulator: Simulator, form: str) -> None:
    """NaN is handed on, and no wait goes on for ever."""
    model = network("LSTM", "float32", 4, 3, 6)
    (x,) = given(model)
    x[1, 1, 0] = np.nan
    (y, *_) = simulator.run(model, [x], limits=FORMS[form]).outputs
    assert np.isnan(y[1:, 0, 1]).all() and np.isfinite(y[:, 0, [0, 2]]).all() and np.isfinite(y[0]).all()


def test_large_matrices_of_many_rows_are_multiplied_step_by_step() -> None:
    model = network("LSTM", "float32", 3, 64, 1024)
    found = onnxc.compile(model, target="cuda:sm_90", cache=False).explain()
    assert "recurrence" not in [k.kind for k in found.kernels]
    assert any("its matrices are large" in r for k in found.kernels for r in k.reasons)


@pytest.mark.parametrize(
    ("op", "dtype", "batch", "hidden"),
    [
        ("LSTM", "float32", 1, 1024),
        ("GRU", "float16", 64, 512),
        ("LSTM", "float16", 8, 64),
        ("LSTM", "float32", 8, 64),
        ("GRU", "bfloat16", 64, 128),
    ],
)
def test_machine_code(op: str, dtype: str, batch: int, hidden: int) -> None:
    """For several architectures, which have other numbers of bytes of shared memory."""
    found = onnxc.compile(network(op, dtype, 3, batch, hidden), target="cuda:sm_75,sm_80,sm_90,sm_100", cache=False)
    assert "recurrence" in [k.kind for k in found.explain().kernels]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "hidden"), [(1, 1024), (3, 100), (64, 512), (37, 200), (9, 64), (300, 30), (70, 128)]
)
@pytest.mark.parametrize("op", GATES)
def test_on_a_gpu(op: str, batch: int, hidden: int, dtype: str) -> None:
    """Programs that run at the same time; the same bits from run to run."""
    this_gpu()
    model = network(op, dtype, 50, batch, hidden, 2, states=True)
    inputs = given(model)
    found = onnxc.compile(model, target="cuda")
    assert "recurrence" in [k.kind for k in found.explain().kernels]
    wanted = onnxc.compile(model, target="cuda", fusion=FusionOptions(recurrence=False))(*inputs)
    for first, again, y in zip(found(*inputs), found(*inputs), wanted, strict=True):
        assert (np.asarray(first) == np.asarray(again)).all()
        np.testing.assert_allclose(
            np.asarray(first).astype(np.float64), np.asarray(y).astype(np.float64), 0, 10 * TOLERANCE[dtype]
        )
