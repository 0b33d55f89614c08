"""Memory of training steps: parameters that are updated in place, and what is computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxc
from onnxc.compiler import compile as compile_graph
from onnxc.errors import InputError, OnnxcError, RunError
from onnxc.frontends import onnx_file
from onnxc.gradient import joint
from onnxc.ir.graph import Graph
from onnxc.optim import SGD, AdamW, Optimizer
from onnxc.passes.pipeline import PassOptions, passes
from onnxc.planner.fusion import plan
from onnxc.planner.groups import FusionOptions, Plan
from onnxc.planner.in_place import UPDATES, Overwriting, late_nodes, updates_of
from onnxc.planner.layout import assign
from onnxc.planner.memory import assign_offsets, lifetimes
from onnxc.planner.partition import BUDGET, _policies, planned, recompute
from onnxc.planner.templates import ENABLED
from onnxc.training.graph import Update, slots_of, step_graph
from onnxc.training.step import TrainingStep, compile_training
from tests.small_models import Array, parse

RNG = np.random.default_rng(11)


def updating(text: str, updates: dict[str, str]) -> Graph:
    """A model some of whose outputs replace inputs."""
    graph = onnx_file.load(parse(text, 20))
    return replace(graph, metadata={**graph.metadata, UPDATES: updates})


def plan_of(graph: Graph) -> Plan:
    for _, run in passes(PassOptions()):
        graph = run(graph)
    return plan(graph, assign(graph, ENABLED), FusionOptions())


def in_place(graph: Graph) -> list[bool]:
    """Of each update, whether it is written over its input."""
    found = plan_of(graph)
    return [vid in found.layout.overwrites for vid in updates_of(found.graph)]


def run(text: str, updates: dict[str, str], *arrays: Array) -> list[Array]:
    """The outputs that a call returns, then the inputs as it leaves them."""
    given = [a.copy() for a in arrays]
    outputs = compile_graph(updating(text, updates), threads=2)(*given)
    return [*outputs, *given]


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


# ---------------------------------------------------------------- inputs that are overwritten

SIZES = (1, 7, 17, 1031)


@pytest.mark.parametrize("n", SIZES)
def test_an_update_is_written_over_its_input(n: int) -> None:
    text = f"""(float[{n}] p, float[{n}] g) => (float[{n}] new, float s)
        {{ new = Sub(p, g) s = ReduceSum<keepdims = 0>(g) }}"""
    p, g = normal(n), normal(n)
    assert in_place(updating(text, {"new": "p"})) == [True]
    total, after, same = run(text, {"new": "p"}, p, g)
    np.testing.assert_array_equal(after, p - g)
    np.testing.assert_array_equal(same, g)
    np.testing.assert_allclose(total, g.sum(dtype=np.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [1, 17, 67])
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # Read again, after the update in the model's order, by a kernel that can run before it.
        ("new = Sub(p, g) k = MatMul(m, p) y = Exp(k)", True),
        # Read by a kernel that needs the new value: the old one must be kept.
        ("new = Sub(p, g) k = MatMul(m, new) h = MatMul(m, p) y = Add(k, h)", None),
        # Read in the same kernel at other elements.
        ("r = Slice(p, last, end, axis, back) new = Sub(r, g) y = Identity(g)", False),
        # Read in the same kernel by a row's reduction that comes before the row is written.
        ("new = Softmax(p) y = Identity(g)", True),
        # Along the columns: other rows read what a row would overwrite.
        ("new = Softmax<axis = 0>(p) y = Identity(g)", None),
        # An operand of the product whose result replaces it.
        ("new = MatMul(m, p) y = Identity(g)", False),
    ],
)  # fmt: skip
def test_a_value_that_is_still_needed_is_not_overwritten(
    n: int, body: str, expected: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"""(float[{n}, {n}] p, float[{n}, {n}] g, float[{n}, {n}] m) => (float[{n}, {n}] new, float[{n}, {n}] y)
        <int64[1] last = {{-1}}, int64[1] end = {{-9223372036854775807}}, int64[1] axis = {{0}}, int64[1] back = {{-1}}>
        {{ {body} }}"""
    if expected is not None and n > 1:
        assert in_place(updating(text, {"new": "p"})) == [expected]
    arrays = normal(n, n), normal(n, n), normal(n, n)
    y, after, *rest = run(text, {"new": "p"}, *arrays)
    with monkeypatch.context() as m:
        m.setattr(Overwriting, "is_legal", lambda *args: False)
        apart = run(text, {"new": "p"}, *arrays)
    np.testing.assert_array_equal(y, apart[0])
    np.testing.assert_array_equal(after, apart[1])
    wanted = onnxc.compile(parse(text, 20), threads=2)(*arrays)
    np.testing.assert_allclose(y, wanted["y"], rtol=1e-6)
    np.testing.assert_allclose(after, wanted["new"], rtol=1e-6)
    for a, b in zip(rest, arrays[1:], strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_routine_does_not_write_over_what_it_reads_in_a_buffer_of_others() -> None:
    """What is scattered lies in the buffer of a running sum."""
    text = """(float[6,8] x, float[6,8] z, int64[6,8] i, float w) => (float[6,1] y, float w2)
    <int64[1] o = {1}, int64 ax = {1}> {
        a = CumSum (x, ax)  b = Exp (a)  c = ScatterElements <axis = 0> (z, i, b)  y = ReduceSum (c, o)  w2 = Neg (w)
    }"""
    x, z, w = normal(6, 8), normal(6, 8), normal()
    i = np.argsort(normal(6, 8), 0)
    wanted = z.copy()
    np.put_along_axis(wanted, i, np.exp(np.cumsum(x, 1)), 0)
    y, *_ = run(text, {"w2": "w"}, x, z, i, w)
    np.testing.assert_allclose(y, wanted.sum(1, keepdims=True), 1e-5)


def test_two_inputs_that_change_places() -> None:
    text = "(float[9] p, float[9] q) => (float[9] a, float[9] b) { a = Add(q, one) b = Mul(p, q) }"
    text = text.replace("{ a", "<float one = {1.0}> { a")
    p, q = normal(9), normal(9)
    for got, want in zip(run(text, {"a": "p", "b": "q"}, p, q), (q + 1, p * q), strict=True):
        np.testing.assert_array_equal(got, want)


def test_an_output_that_is_an_input_has_its_old_value() -> None:
    text = "(float[9] p, float[9] g) => (float[9] new, float[9] old) { new = Sub(p, g) old = Identity(p) }"
    p, g = normal(9), normal(9)
    old, after, _ = run(text, {"new": "p"}, p, g)
    np.testing.assert_array_equal(old, p)
    np.testing.assert_array_equal(after, p - g)


def test_arrays_that_a_call_could_not_change_are_refused() -> None:
    text = "(float[9] p, float[9] g) => (float[9] new, float[9] y) { new = Sub(p, g) y = Exp(g) }"
    step = compile_graph(updating(text, {"new": "p"}))
    for p in (normal(18)[::2], normal(9).astype(">f4"), [0.0] * 9):
        with pytest.raises(InputError, match="updated in place"):
            step(p, normal(9))


# ---------------------------------------------------------------- steps

MODEL = """
(float[n, 16] x, int64[n] y, int64[n] id, float[40, 16] table, float[16, 48] w, float[48] bias, float[48, 16] v,
 float[16] gain, float[10, 16] head) => (float loss)
{
  e = Gather(table, id)
  z = Add(x, e)
  a = LayerNormalization(z, gain)
  h = MatMul(a, w)
  i = Add(h, bias)
  g = Gelu(i)
  o = MatMul(g, v)
  z2 = Add(z, o)
  a2 = LayerNormalization(z2, gain)
  h2 = MatMul(a2, w)
  i2 = Add(h2, bias)
  g2 = Tanh(i2)
  o2 = MatMul(g2, v)
  z3 = Add(z2, o2)
  scores = Gemm<transB = 1>(z3, head)
  loss = SoftmaxCrossEntropyLoss(scores, y)
}
"""
SHAPES = {"table": (40, 16), "w": (16, 48), "bias": (48,), "v": (48, 16), "gain": (16,), "head": (10, 16)}


def model(rows: int | str = "n") -> onnx.ModelProto:
    proto = parse(MODEL.replace("[n", f"[{rows}"), 20)
    rng = np.random.default_rng(1)
    for name, shape in SHAPES.items():
        array = (rng.standard_normal(shape) * 0.3).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    return proto


def batch(rows: int) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(rows)
    return (rng.standard_normal((rows, 16)).astype(np.float32), rng.integers(0, 10, rows), rng.integers(-40, 40, rows))


def trained(step: TrainingStep, rows: Sequence[int]) -> tuple[list[float], dict[str, Array]]:
    losses = [float(step(*batch(k))["loss"]) for k in rows]
    return losses, dict(step.parameters)


def arena(step: TrainingStep) -> int:
    return int(step.explain().memory.arena)


STEPS = [(1, SGD(lr=0.1)), (17, AdamW(lr=0.01)), (64, SGD(lr=0.1, momentum=0.9))]


@pytest.mark.parametrize(("rows", "optimizer"), STEPS)
def test_every_budget_gives_the_same_bits(rows: int, optimizer: Optimizer) -> None:
    found, peaks = [], []
    for budget in (1.0, 0.5, 0.0):
        step = compile_training(model(rows), loss="loss", optimizer=optimizer, memory_budget=budget)
        found.append(trained(step, [rows] * 3))
        peaks.append(arena(step))
    for losses, parameters in found[1:]:
        assert losses == found[0][0]
        for name, array in parameters.items():
            np.testing.assert_array_equal(array, found[0][1][name], err_msg=name)
    assert peaks == sorted(peaks, reverse=True)


def test_budgets_of_dynamic_batches() -> None:
    steps = [
        compile_training(model(), loss="loss", optimizer=SGD(lr=0.1), memory_budget=budget) for budget in (1.0, 0.0)
    ]
    (a, before), (b, after) = (trained(step, [3, 17, 1, 64]) for step in steps)
    assert a == b
    for name in before:
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)


def test_losses_do_not_depend_on_what_is_computed_again() -> None:
    graph = prepared_step(SGD(lr=0.1))
    wanted: list[Array] = []
    slots = [np.zeros(tuple(v.shape), v.dtype.numpy) for v in graph.inputs]
    for k, (given, v) in enumerate(zip((*batch(17), 0.1, 1.0), graph.inputs, strict=False)):
        slots[k] = np.asarray(given, v.dtype.numpy)
    slots[5:] = [normal(*v.shape) for v in graph.inputs[5:]]
    policies = _policies(graph, divided=True)
    for policy, apart in [(p, False) for p in policies] + [(p, True) for p in policies[::2]]:
        arrays = [s.copy() for s in slots]
        outputs = compile_graph(recompute(graph, policy, apart=apart))(*arrays)
        found = [*outputs, *arrays]
        for x, y in zip(wanted or found, found, strict=True):
            np.testing.assert_array_equal(x, y)
        wanted = wanted or found


def layers(count: int) -> onnx.ModelProto:
    """A chain of equal layers."""
    lines = [f"h{k} = MatMul(z{k}, w{k})\n r{k} = Relu(h{k})\n z{k + 1} = Add(z{k}, r{k})" for k in range(count)]
    inputs = "".join(f", float[16, 16] w{k}" for k in range(count))
    text = (
        f"(float[512, 16] z0{inputs}) => (float loss) {{\n"
        + "\n".join(lines)
        + f"""
      s = Mul(z{count}, z{count})
      loss = ReduceMean<keepdims = 0>(s)
    }}"""
    )
    proto = parse(text, 20)
    for k in range(count):
        proto.graph.initializer.append(numpy_helper.from_array(0.05 * normal(16, 16), f"w{k}"))
    return proto


def test_stretches_are_computed_again_one_after_the_other() -> None:
    """Of a chain of equal layers some results are saved, and what is between is computed again, stretch by stretch."""
    proto = layers(12)
    x, found, peaks = normal(512, 16), [], []
    for budget in (1.0, 0.5):
        step = compile_training(proto, loss="loss", optimizer=SGD(lr=0.1), memory_budget=budget)
        found.append(([float(step(x)["loss"]) for _ in range(3)], step.parameters))
        peaks.append(arena(step))
    assert peaks[1] <= 0.5 * peaks[0], peaks
    assert found[0][0] == found[1][0] and np.isfinite(found[0][0]).all()
    for name, array in found[0][1].items():
        np.testing.assert_array_equal(array, found[1][1][name], err_msg=name)


WIDE = """
(float[64, 16] x, int64[64] y, float[16, 64] w, float[64, 16] v, float[10, 16] head) => (float loss)
{
  h = MatMul(x, w)
  g = Gelu(h)
  o = MatMul(g, v)
  z = Add(x, o)
  scores = Gemm<transB = 1>(z, head)
  loss = SoftmaxCrossEntropyLoss(scores, y)
}
"""


def test_stretches_with_random_numbers() -> None:
    """Where what is cheap takes more than what is saved, there are stretches all the same."""
    lines = [
        f"h{k} = Conv<pads=[1,1,1,1]>(z{k}, w{k})"
        f" b{k}, m{k}, v{k} = BatchNormalization<training_mode=1>(h{k}, g, c, c, g) r{k} = Relu(b{k})"
        f" d{k} = Dropout<seed={k}>(r{k}, ratio, on) z{k + 1} = Add(z{k}, d{k})"
        for k in range(10)
    ]
    inputs = "".join(f", float[8, 8, 3, 3] w{k}" for k in range(10))
    proto = parse(
        f"(float[8, 8, 12, 12] z0{inputs}, float[8] g, float[8] c) => (float loss) {{"
        " ratio = Constant<value = float {0.3}>() on = Constant<value = bool {1}>()"
        f" {' '.join(lines)} s = Mul(z10, z10) loss = ReduceMean<keepdims = 0>(s) }}"
    )
    for name, shape in [(f"w{k}", (8, 8, 3, 3)) for k in range(10)] + [("g", (8,)), ("c", (8,))]:
        proto.graph.initializer.append(numpy_helper.from_array(0.1 * normal(*shape), name))
    x, found, peaks = normal(8, 8, 12, 12), [], []
    for budget in (1.0, 0.5):
        step = compile_training(
            proto, loss="loss", optimizer=SGD(lr=0.1), memory_budget=budget, seed=3, wrt=[f"w{k}" for k in range(10)]
        )
        found.append([float(step(x)["loss"]) for _ in range(3)])
        peaks.append(arena(step))
    assert found[0] == found[1] and peaks[1] <= 0.5 * peaks[0], peaks


def test_each_kernel_computes_what_it_reads() -> None:
    """The activation is read by the product for a weight's gradient, its derivative by the epilogue of the product
    before it: but for these two and what the activation goes by, nothing wide is in memory at once.
    """
    proto = parse(WIDE, 20)
    for name, shape in {"w": (16, 64), "v": (64, 16), "head": (10, 16)}.items():
        proto.graph.initializer.append(numpy_helper.from_array(normal(*shape), name))
    found = planned(prepared_step(SGD(lr=0.1), proto), FusionOptions())
    wide = [b for b in lifetimes(found) if tuple(b.value.shape) in ((64, 64), (4096,))]
    alive = max(sum(b.first <= k <= b.last for b in wide) for k in range(len(found.groups)))
    assert alive == 3


def test_what_bends_is_saved_once() -> None:
    """The derivative of max(0, x) is told by the result, which the next product reads: x itself is not saved."""
    proto = parse(WIDE.replace("Gelu", "Relu"), 20)
    for name, shape in {"w": (16, 64), "v": (64, 16), "head": (10, 16)}.items():
        proto.graph.initializer.append(numpy_helper.from_array(normal(*shape), name))
    graph = prepared_step(SGD(lr=0.1), proto)
    late, uses = late_nodes(graph), graph.uses()
    (relu,) = (n for n in graph.nodes if n.op == "max" and n.output.shape == (64, 64))
    (x,) = (v for v in relu.operands if v.rank)
    assert not [n for n in uses[x.id] if id(n) in late]
    assert [n for n in uses[relu.output.id] if id(n) in late]


def prepared_step(optimizer: Optimizer, proto: onnx.ModelProto | None = None) -> Graph:
    both = joint(onnx_file.load(proto or model(17)), "loss")
    update = Update(optimizer)
    graph = step_graph(both, update, slots_of(both, update), last=True)
    for _, run_pass in passes(PassOptions()):
        graph = run_pass(graph)
    return graph


def test_all_parameters_and_states_are_updated_in_place() -> None:
    found = planned(prepared_step(AdamW()), FusionOptions())
    updates = updates_of(found.graph)
    assert len(updates) == 3 * len(SHAPES)
    apart = [v for v in found.graph.outputs if v.id in updates and v.id not in found.layout.overwrites]
    assert all(v.rank == 1 for v in apart), "only what shares a kernel with another reader may be apart"
    # The gradient of a weight that is used once is never in memory.
    late = late_nodes(found.graph)
    stored = {tuple(b.value.shape) for b in lifetimes(found) if b.value.node is None or id(b.value.node) in late}
    assert SHAPES["head"] not in stored


def test_what_switches_switch_off() -> None:
    def peak(budget: float, **switches: bool) -> int:
        graph = prepared_step(AdamW(), layers(6))
        graph.metadata[BUDGET] = budget
        found = planned(graph, FusionOptions(**switches))
        assert bool(found.layout.overwrites) == switches.get("in_place", True)
        buffers = lifetimes(found)
        return assign_offsets([int(b.nbytes) for b in buffers], [(b.first, b.last) for b in buffers])[1]

    peak(1.0, in_place=False)
    assert peak(0.5, recompute=False) == peak(1.0, recompute=False) >= peak(1.0) > peak(0.5)


def test_buffers_that_live_together_do_not_overlap() -> None:
    found = planned(prepared_step(AdamW()), FusionOptions())
    buffers = lifetimes(found)
    sizes, spans = [int(b.nbytes) for b in buffers], [(b.first, b.last) for b in buffers]
    offsets, total = assign_offsets(sizes, spans)
    used = sorted(zip(offsets, sizes, spans, strict=True))
    for k, (at, size, span) in enumerate(used):
        assert at + size <= total
        for other, _, there in used[k + 1 :]:
            if span[0] <= there[1] and there[0] <= span[1]:
                assert at + size <= other
    owners = {b.value.id for b in buffers}
    assert not owners & (found.layout.overwrites.keys() | found.layout.reshaped.keys()), (
        "a value that lies in another's buffer has one of its own"
    )


def test_a_failed_call_changes_nothing() -> None:
    step = compile_training(model(), loss="loss", optimizer=AdamW())
    before = step.state()
    x, y, ids = batch(7)
    for bad in ((x, y + 100, ids), (x, y, ids + 100)):
        with pytest.raises(RunError):
            step(*bad)
        for key, array in step.state().items():
            np.testing.assert_array_equal(array, before[key], err_msg=key)
    step(x, y, ids)
    assert step.calls == 1


def test_a_step_that_failed_halfway_wants_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    step = compile_training(model(), loss="loss", optimizer=SGD(lr=0.1))
    state = step.state()
    program = step._programs[0]

    def fails(*args: object) -> None:
        error = RunError("an index out of bounds")
        error.partial = True
        raise error

    with monkeypatch.context() as m:
        m.setattr(type(program), "__call__", lambda self, *args: fails(*args))
        with pytest.raises(RunError):
            step(*batch(7))
    with pytest.raises(InputError, match="load a state"):
        step(*batch(7))
    step.load_state(state)
    step(*batch(7))


def test_arrays_that_were_handed_out_stay_as_they_are() -> None:
    step = compile_training(model(), loss="loss", optimizer=SGD(lr=0.1))
    parameters, state = dict(step.parameters), step.state()
    kept = {name: a.copy() for name, a in parameters.items()}
    given = {"w": np.asfortranarray(normal(16, 48))}
    copy = given["w"].copy()
    step.set_parameters(given)
    loss = step(*batch(7))["loss"]
    before = loss.copy()
    step(*batch(7))
    np.testing.assert_array_equal(loss, before)
    for name, array in kept.items():
        np.testing.assert_array_equal(parameters[name], array)
        np.testing.assert_array_equal(state[f"parameter/{name}"], array)
    np.testing.assert_array_equal(given["w"], copy)


@pytest.mark.parametrize("budget", [-0.1, 1.5, "half"])
def test_budgets_that_are_none(budget: object) -> None:
    with pytest.raises(OnnxcError, match="memory_budget"):
        compile_training(model(), loss="loss", optimizer=SGD(), memory_budget=budget)  # type: ignore[arg-type]


def test_a_profile_leaves_the_parameters_alone() -> None:
    step = compile_training(model(), loss="loss", optimizer=SGD(lr=0.1))
    before = dict(step.parameters)
    report = step.profile(*batch(7), runs=2)
    assert report.profile is not None and report.profile.runs == 2
    for name, array in step.parameters.items():
        np.testing.assert_array_equal(array, before[name])
