"""Loops whose rows threads divide: the same bits for any number of threads, and here also those of undivided loops.

Small loops are not worth a thread, so most of these tests ask for as many parts as there are threads or rows, however
narrow rows are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
import pytest
from onnx import helper

import onnxc
from onnxc.codegen.cpp import program
from onnxc.errors import OnnxcError
from onnxc.frontends import onnx_file
from onnxc.passes.decompose import decompose
from onnxc.passes.pipeline import PassOptions, passes
from onnxc.planner import rows
from onnxc.planner.groups import FusionOptions
from onnxc.planner.rows import ROWS, Apart, rows_apart
from onnxc.primitives.interpret import interpret
from onnxc.primitives.verify import verify
from tests.staging_harness import parsed, runtime
from tests.test_recurrent import GATES, INPUT, STEPS, recurrent_model

THREADS = (1, 2, 3, 5)
WHOLE = FusionOptions(rows=False)
Arrays = Sequence[np.ndarray]


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As many parts as there are threads and rows."""

    def parts(step: str) -> str:
        return f"ox_min(ctx->threads, ox_step{{{step}}}.rows)"

    monkeypatch.setattr(program, "_parts", parts)
    monkeypatch.setattr(rows, "LEAST_WORK", 0)
    monkeypatch.setattr(rows, "NARROWEST", 1)
    yield


def numbers(*shape: int, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def same_bits(model: onnx.ModelProto, *feeds: Arrays, threads: Sequence[int] = THREADS) -> Iterator[Arrays]:
    """What the model answers, the same with every number of threads, and with loops that are not divided."""
    apart, whole = (onnxc.compile(model, cache=False, fusion=f) for f in (FusionOptions(), WHOLE))
    assert "const auto part = " in apart.source and "const auto part = " not in whole.source
    for feed in feeds:
        wanted = list(whole(*feed))
        for n in threads:
            apart.threads = n
            for a, b in zip(apart(*feed), wanted, strict=True):
                assert a.shape == b.shape
                assert a.tobytes() == b.tobytes(), f"{n} threads, {feed[0].shape}"
        yield wanted


@pytest.mark.parametrize("op", ["LSTM", "GRU"])
def test_bits_do_not_depend_on_where_parts_begin(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler may join a product with a sum otherwise in a loop's last vectors. Rows shorter than a vector would lie
    there or not by the parts.
    """
    monkeypatch.setattr(program, "_parts", lambda step: f"ox_min(ctx->threads, ox_step{{{step}}}.rows)")
    for hidden in (2, 3, 16, 37):
        model = recurrent_model(op, 1, {}, hidden=hidden)
        model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "b"
        compiled = onnxc.compile(model, cache=False)
        assert ("const auto part = " in compiled.source) == (hidden >= rows.NARROWEST)
        x = numbers(STEPS, 501, INPUT)
        found = []
        for compiled.threads in (1, 2, 3):
            found.append([np.asarray(y).tobytes() for y in compiled(x)])
        assert found[0] == found[1] == found[2]


def recurrent(batch: int | str) -> onnx.ModelProto:
    """A model of several recurrent nodes: what they take and in which directions they run differs."""
    rng = np.random.default_rng(3)
    forms = [
        ("LSTM", 1, 7, {"P": (1, 21)}, {"clip": 0.9}),
        ("LSTM", 2, 92, {"P": (2, 3 * 92)}, {"direction": "bidirectional"}),  # both directions step by step
        ("LSTM", 2, 20, {}, {"direction": "bidirectional", "input_forget": 1}),
        ("GRU", 1, 33, {}, {"linear_before_reset": 1, "direction": "reverse"}),
        ("GRU", 2, 105, {}, {"direction": "bidirectional", "linear_before_reset": 0}),
        ("RNN", 1, 40, {}, {"activations": ["Relu"]}),
    ]
    nodes, inits, outputs = [], [], []
    for k, (op, directions, hidden, extras, attrs) in enumerate(forms):
        made = {name: rng.standard_normal(shape) * 0.3 for name, shape in extras.items()}
        graph = recurrent_model(op, directions, made, hidden=hidden, **attrs).graph
        onnx.compose.add_prefix_graph(graph, f"{k}_", rename_inputs=False, inplace=True)
        (node,) = graph.node
        given = {4: "lens", 5: "", 6: ""}
        if op == "LSTM" and directions == 1:
            given |= {5: "h", 6: "c"}
        node.input.extend([""] * (7 - len(node.input)))
        for at, name in given.items():
            node.input[at] = name
        while not node.input[-1]:
            node.input.pop()
        nodes, inits, outputs = [*nodes, node], [*inits, *graph.initializer], [*outputs, *graph.output]
    f, i = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32
    inputs = [helper.make_tensor_value_info("X", f, [STEPS, batch, INPUT]),
              helper.make_tensor_value_info("lens", i, [batch]),
              *(helper.make_tensor_value_info(n, f, [1, batch, 7]) for n in "hc")]  # fmt: skip
    graph = helper.make_graph(nodes, "g", inputs, outputs, inits)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def feed(batch: int) -> list[np.ndarray]:
    lens = np.random.default_rng(batch).integers(0, STEPS + 1, batch).astype(np.int32)
    return [numbers(STEPS, batch, INPUT), lens, numbers(1, batch, 7, seed=4), numbers(1, batch, 7, seed=5)]


@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize("batch", [2, 7, "n"])
def test_recurrent_ops(batch: int | str) -> None:
    model = recurrent(batch)
    feeds = [feed(b) for b in ((0, 1, 2, 3, 5, 8, 17) if batch == "n" else (batch,)) if isinstance(b, int)]
    session = runtime(model)
    for given, found in zip(feeds, same_bits(model, *feeds), strict=True):
        names = {i.name: x for i, x in zip(model.graph.input, given, strict=True)}
        for a, b in zip(found, session.run(None, names) if given[0].shape[1] else found, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=4e-6)


@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize("op", GATES)
def test_batch_first(op: str) -> None:
    """layout=1, which onnxruntime does not have: against the primitives in numpy."""
    model = recurrent_model(op, 1, {}, layout=1, hidden=24)
    for dim, size in zip(model.graph.input[0].type.tensor_type.shape.dim, (5, STEPS), strict=False):
        dim.dim_value = size
    x = numbers(5, STEPS, INPUT)
    (found,) = same_bits(model, [x])
    for a, b in zip(found, interpret(decompose(onnx_file.load(model)), [x]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=4e-6)


def scan(body: str, states: str = "float[b, 6] s", out: str = "float[b, 6] a, float[b, 6] y") -> str:
    """A scan over x by one state, [b, 6], and w [6, 6] from outside."""
    return f"""g (float[b, 6] s0, float[t, b, 6] x, float[b] m) => (float[b, 6] last, float[t, b, 6] ys)
    <float[6, 6] w = {{{", ".join(str(0.07 * (k % 11) - 0.3) for k in range(36))}}}> {{
      last, ys = Scan <num_scan_inputs = 1, body = step ({states}, float[b, 6] r) => ({out}) {{ {body} }}> (s0, x)
    }}"""


APART = {
    "product, softmax, a mask of the batch": """
        p = MatMul(s, w) q = Add(p, r) e = Softmax <axis = 1> (q)
        one = Constant <value = int64[1] {1}> () n = Unsqueeze(m, one) a = Mul(e, n) y = Tanh(a)""",
    "views": """
        h = Constant <value = int64[3] {0, 2, 3}> () v = Reshape(s, h) t = Transpose <perm = [0, 2, 1]> (v)
        f = Constant <value = int64[2] {0, 6}> () u = Reshape(t, f)
        left, right = Split <axis = 1, num_outputs = 2> (u) c = Concat <axis = 1> (right, left)
        a = Add(c, r) y = Neg(a)""",
    "sums and what broadcasts": """
        k = Constant <value = int64[1] {1}> () m1 = ReduceMax <keepdims = 1> (r, k)
        m2 = ReduceMean <keepdims = 1> (s, k)
        d = Sub(s, m2) a = Add(d, m1) y = Max(a, r)""",
    "a column": """
        o = Constant <value = int64[1] {1}> () i = Constant <value = int64[1] {0}> ()
        v = Slice(w, i, o, o) q = MatMul(s, v) h = Mul(q, r) a = Tanh(h) y = Neg(a)""",
    "a state that stays": "a = Identity(s) y = Add(s, r)",
}


@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize("form", APART)
def test_scans(form: str) -> None:
    model = parsed(scan(APART[form]))
    sizes = ((1, 3), (2, 3), (7, 4), (17, 1), (5, 0), (0, 2))
    feeds = [[numbers(b, 6), numbers(t, b, 6), numbers(b)] for b, t in sizes]
    session = runtime(model)
    for given, found in zip(feeds, same_bits(model, *feeds), strict=True):
        names = dict(zip(("s0", "x", "m"), given, strict=True))
        # onnxruntime has no scans of nothing
        for a, b in zip(found, session.run(None, names) if given[1].size else found, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize("columns", [6, 40])
def test_rows_with_weights_of_their_own(columns: int) -> None:
    """Two matrices of weights, each for one row of the state, packed at compile time or not."""
    w, v = numbers(2, 6, columns) * np.float32(0.3), numbers(2, columns, 6, seed=7) * np.float32(0.3)
    text = f"""g (float[2, b, 6] s0, float[t, 2, b, 6] x) => (float[2, b, 6] last, float[t, 2, b, 6] ys)
      <float[2, 6, {columns}] w = {{0}}, float[2, {columns}, 6] v = {{0}}> {{
        last, ys = Scan <num_scan_inputs = 1, body = step (float[2, b, 6] s, float[2, b, 6] r)
          => (float[2, b, 6] a, float[2, b, 6] y) {{
            p = MatMul(s, w) q = Tanh(p) u = MatMul(q, v) a = Add(u, r) y = Neg(a)
        }}> (s0, x)
      }}"""
    model = parsed(text.replace("= {0}", ""))
    for name, value in (("w", w), ("v", v)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    feeds = [[numbers(2, b, 6), numbers(4, 2, b, 6)] for b in (1, 3, 30)]
    session = runtime(model)
    for given, found in zip(feeds, same_bits(model, *feeds), strict=True):
        for a, b in zip(found, session.run(None, dict(zip(("s0", "x"), given, strict=True))), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("divided")
def test_inside_of_another_loop() -> None:
    """The inner loop is divided in each turn of the outer one, whose steps all rows share."""
    inner = scan("q = Add(s, r) e = Tanh(q) a = MatMul(e, w) y = Neg(a)").split("{", 1)[1].rsplit("}", 1)[0]
    text = f"""g (float[b, 6] z, float[t, b, 6] x, float[k] ks) => (float[b, 6] end, float[k, b, 6] lasts)
    <float[6, 6] w = {{{", ".join(str(0.07 * (k % 11) - 0.3) for k in range(36))}}}> {{
      end, lasts = Scan <num_scan_inputs = 1, body = outer (float[b, 6] s0, float[] k)
        => (float[b, 6] after, float[b, 6] kept) {{
          {inner.split("> {", 1)[-1]}
          sum = ReduceSum <keepdims = 0> (last) small = Mul(sum, k) after = Sub(last, small) kept = Identity(after)
      }}> (z, ks)
    }}"""
    model = parsed(text)
    given = [numbers(5, 6), numbers(4, 5, 6), numbers(3) * np.float32(0.01)]
    (found,) = same_bits(model, given)
    for a, b in zip(found, runtime(model).run(None, dict(zip(("z", "x", "ks"), given, strict=True))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


SHARED = {
    "its columns are summed": "k = Constant <value = int64[1] {0}> () z = ReduceSum <keepdims = 1> (s, k) "
    "a = Add(r, z) y = Neg(a)",
    "its rows change places": "e = Transpose <perm = [1, 0]> (s) f = MatMul(e, r) a = MatMul(r, f) y = Neg(a)",
    "it looks rows up": "k = Constant <value = int64[1] {0}> () p = Gather <axis = 0> (s, k) a = Add(r, p) y = Neg(a)",
    "rows from the last to the first": "p = Constant <value = int64[1] {-1}> () k = Constant <value = int64[1] {0}> () "
    "e = Constant <value = int64[1] {-9223372036854775807}> () q = Slice(s, p, e, k, p) a = Add(q, r) y = Neg(a)",
    "a running sum": "k = Constant <value = int64 {0}> () q = CumSum(s, k) a = Add(q, r) y = Neg(a)",
    "a product by what is computed": "k = Constant <value = int64[2] {6, -1}> () h = Reshape(m, k) "
    "q = MatMul(s, h) a = Add(q, r) y = Neg(a)",
}


@pytest.mark.parametrize("form", SHARED)
def test_rows_that_meet(form: str) -> None:
    """What is made of several rows is not divided, and the report says why."""
    text = scan(SHARED[form]).replace("float[b] m", "float[36] m")
    report = onnxc.compile(parsed(text), cache=False).explain()
    assert "const auto part = " not in onnxc.compile(parsed(text)).source
    assert any("threads meet after each kernel of the loop: " in r for k in report.kernels for r in k.reasons)


def test_sizes_that_may_differ() -> None:
    """A dim of another name meets the rows: whether it is as large, or 1, a run tells."""
    text = """g (float[b, 6] s0, float[t, c, 6] x) => (float[b, 6] last, float[t, b, 6] ys) {
      last, ys = Scan <num_scan_inputs = 1, body = step (float[b, 6] s, float[c, 6] r)
        => (float[b, 6] a, float[b, 6] y) { a = Add(s, r) y = Neg(a) }> (s0, x)
    }"""
    compiled = onnxc.compile(parsed(text), cache=False)
    assert "const auto part = " not in compiled.source
    given = {"s0": numbers(3, 6), "x": numbers(4, 3, 6)}
    for a, b in zip(compiled(**given), runtime(parsed(text)).run(None, given), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def only_scan(model: onnx.ModelProto) -> onnxc.ir.graph.Node:
    graph = onnx_file.load(model)
    for _, run in passes(PassOptions()):
        graph = run(graph)
    (node,) = [n for n in graph.nodes if n.op == "scan"]
    return node


def test_step_of_some_rows() -> None:
    """The region for a part is a valid graph, whose rows are open, and tells what a step costs."""
    found = rows_apart(only_scan(recurrent_model("LSTM", 1, {}, hidden=32)))
    assert isinstance(found, Apart)
    verify(found.region, "rows")
    assert found.rows == 3 and (found.shared, found.own) == (4 * 32 * 32 * 4, 0)
    assert found.products == 4 * 32 * 32
    assert {v.shape[0] for v in found.region.inputs} == {ROWS}
    both = rows_apart(only_scan(recurrent_model("LSTM", 2, {}, hidden=92, direction="bidirectional")))
    assert isinstance(both, Apart)
    assert both.rows == 2 and (both.shared, both.own) == (0, 4 * 92 * 92 * 4)


def test_one_row_and_large_weights_stay_together() -> None:
    model = recurrent_model("LSTM", 1, {}, hidden=32)
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 1
    assert rows_apart(only_scan(model)) == "it has one row"
    assert rows_apart(only_scan(recurrent_model("LSTM", 1, {}, hidden=4))) == "a step is little work"
    large = rows_apart(only_scan(recurrent_model("RNN", 1, {}, hidden=800)))
    assert large == "its weights, 2560000 bytes, stay in no thread's cache"


def test_reports_name_the_model_s_own_sizes() -> None:
    """Bytes, types and operations are those of all rows."""
    model = recurrent_model("LSTM", 1, {}, hidden=32)
    apart, whole = (onnxc.compile(model, cache=False, fusion=f).explain() for f in (FusionOptions(), WHOLE))
    for a, b in zip(apart.kernels, whole.kernels, strict=True):
        assert (a.reads, a.writes, a.flops, a.boundaries) == (b.reads, b.writes, b.flops, b.boundaries)
    assert any("threads divide the rows of the loop" in r for k in apart.kernels for r in k.reasons)
    assert "s999999" not in str([apart.to_dict()["kernels"], str(apart)])


@pytest.mark.usefixtures("divided")
def test_profile_counts_each_kernel() -> None:
    compiled = onnxc.compile(recurrent_model("LSTM", 1, {}, hidden=32), cache=False, threads=3)
    profile = compiled.profile([numbers(STEPS, 3, INPUT)]).profile
    assert profile is not None
    assert [k.turns for k in profile.kernels].count(STEPS) == 2  # the product and what follows it
    assert all(0 < k.best <= profile.total for k in profile.kernels)


@pytest.mark.usefixtures("divided")
def test_failures_of_a_part_end_the_call() -> None:
    text = """g (int64[b, 4] s0, int64[t, b, 4] x) => (int64[b, 4] last, int64[t, b, 4] ys) {
      last, ys = Scan <num_scan_inputs = 1, body = step (int64[b, 4] s, int64[b, 4] r)
        => (int64[b, 4] a, int64[b, 4] y) { d = Div(s, r) a = Add(d, r) y = Mod(a, r) }> (s0, x)
    }"""
    compiled = onnxc.compile(parsed(text), cache=False)
    assert "const auto part = " in compiled.source
    x = np.arange(1, 3 * 6 * 4 + 1).reshape(3, 6, 4)
    for n in THREADS:
        compiled.threads = n
        good = list(compiled(x[0], x))
        bad = x.copy()
        bad[1, 4, 2] = 0
        with pytest.raises(OnnxcError, match="divi"):
            compiled(x[0], bad)
        assert [a.tobytes() for a in compiled(x[0], x)] == [a.tobytes() for a in good]


def test_what_is_worth_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime's own choice of parts, by rows, weights and threads."""
    found: Mapping[tuple[int, ...], int] = {
        (8, 64, 262144, 0, 65536, 8000, 2): 2,  # 8 sequences of an LSTM of 128 units
        (2, 64, 4096, 0, 1024, 1000, 2): 1,  # so little that a region would take longer
        (2, 64, 1 << 20, 0, 1 << 18, 16000, 2): 0,  # 2 rows: the columns of large weights are divided
        (2, 64, 0, 262144, 65536, 8000, 2): 2,  # two directions
        (0, 64, 262144, 0, 65536, 8000, 2): 0,
    }
    for step, parts in found.items():
        chosen = f"ox_parts(ox_step{{{', '.join(map(str, step))}}}, 2)"
        checked = f"({chosen} == {parts} ? 0 : (ctx->api->fail(ctx, OX_ERR_INTERNAL, 0, {chosen}), 0))"
        monkeypatch.setattr(program, "_parts", lambda _, text=checked: text)
        compiled = onnxc.compile(parsed(scan(APART["views"])), cache=False)
        compiled(numbers(2, 6), numbers(3, 2, 6), numbers(2))
