"""float32 models converted to float16 and bfloat16: what becomes half, what does not, and how far answers move.

Accuracy is judged on the CPU, with onnxruntime as the oracle for the pass itself: bounds are the dtype's rounding
unit times the number of stages on the longest way through the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import onnx
import pytest

from models import build
from onnxc.errors import InputError
from onnxc.export import to_onnx
from onnxc.frontends import onnx_file
from onnxc.ir import dtypes
from onnxc.ir.graph import Graph, Node
from onnxc.ir.text import constants, from_text, to_text
from onnxc.ir.types import TensorType
from onnxc.passes.pipeline import PassOptions, passes
from onnxc.passes.precision import convert_precision, kept, summary
from onnxc.passes.precision_rules import HALVES
from onnxc.passes.simplify import fold_constants
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import Builder
from onnxc.primitives.interpret import interpret
from onnxc.primitives.verify import verify
from tests.compile_harness import compile_graphs
from tests.random_graphs import Generator, Seeded
from tests.small_models import Array, floats, parse, reference

UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
F32 = dtypes.float32


def converted(model: onnx.ModelProto, dtype: str = "float16", **options: bool) -> Graph:
    """Through all passes. (The CPU has no attention of halves.)"""
    graph = onnx_file.load(model)
    for name, run in passes(PassOptions(dtype=dtype, **{"attention": False, **options})):
        graph = run(graph)
        verify(graph, name)
    return graph


def of(text: str, dtype: str = "float16", opset: int = 20, **options: bool) -> Graph:
    return converted(parse(text, opset), dtype, **options)


def nodes(graph: Graph, op: str) -> list[Node]:
    return [n for n in graph.nodes if n.op == op] + [n for m in graph.nodes for g in m.regions for n in nodes(g, op)]


def types(graph: Graph, op: str) -> list[str]:
    return [n.outputs[0].dtype.name for n in nodes(graph, op)]


def reasons(graph: Graph) -> str:
    return "; ".join(row.reason for row in kept(graph))


def depth(graph: Graph) -> int:
    """The most places at which a value is rounded, one after the other: templates and casts."""
    found: dict[int, int] = {}
    for node in graph.nodes:
        last = max((found.get(v.id, 0) for v in node.operands), default=0)
        steps = node.attrs["trip"] if node.op == "scan" else 0
        rounds = lookup(node.op).kind is Kind.TEMPLATE or node.op == "cast"
        found.update({v.id: last + rounds + (steps if isinstance(steps, int) else 0) for v in node.outputs})
    return max(found.get(v.id, 0) for v in graph.outputs) + 1


def error(found: Array, wanted: Array) -> float:
    """The largest distance, by the largest magnitude; NaN and infinities stand at the same places."""
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    finite = np.isfinite(b)
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    np.testing.assert_array_equal(a[~finite & ~np.isnan(b)], b[~finite & ~np.isnan(b)])
    scale = np.abs(b[finite]).max(initial=0.0) or 1.0
    return float(np.abs(a[finite] - b[finite]).max(initial=0.0) / scale)


# ---------------------------------------------------------------- models


def weights(**shapes: Sequence[int]) -> str:
    """Initializers with the variance that keeps activations at 1."""
    made = []
    for k, (name, shape) in enumerate(shapes.items()):
        array = floats(*shape, seed=k) * (1.0 if len(shape) == 1 else float(np.prod(shape[1:])) ** -0.5)
        made.append(f"float[{','.join(map(str, shape))}] {name} = {{{','.join(f'{x:.7g}' for x in array.ravel())}}}")
    return f"<{', '.join(made)}>"


MLP = f"""(float[7,24] x) => (float[7,5] y) {weights(a=(24, 33), b=(33,), c=(33, 33), d=(33,), e=(33, 5))} {{
    h = Gemm(x, a, b) i = Gelu(h) j = Gemm(i, c, d) k = Relu(j) m = Add(k, i) y = MatMul(m, e) }}"""
CNN = f"""(float[2,3,13,13] x) => (float[2,5] y)
    {weights(a=(8, 3, 3, 3), b=(8,), c=(8, 1, 3, 3), d=(12, 8, 1, 1), e=(12, 12), f=(12, 5))} {{
    h = Conv <pads = [1,1,1,1]> (x, a, b) s = Sigmoid(h) i = Mul(h, s) p = MaxPool <kernel_shape = [2,2]> (i)
    q = Conv <group = 8, pads = [1,1,1,1]> (p, c) r = HardSwish(q) t = Conv(r, d) g = GlobalAveragePool(t)
    u = Flatten(g) v = MatMul(u, e) w = Sigmoid(v) z = Mul(u, w) y = MatMul(z, f) }}"""
LARGE_MEANS = f"""(float[9,40] x) => (float[9,6] y) {weights(s=(40,), b=(40,), w=(40, 6))} {{
    n = LayerNormalization(x, s, b) y = MatMul(n, w) }}"""
MASKED = f"""(float[2,6,16] x, bool[2,1,6] hidden) => (float[2,6,16] y) {weights(a=(16, 16), b=(16, 16))} {{
    q = MatMul(x, a) k = MatMul(x, b) kt = Transpose <perm = [0,2,1]> (k) s = MatMul(q, kt)
    m = Constant <value = float {{-1e9}}> () c = Constant <value = float {{0.25}}> () t = Mul(s, c)
    u = Where(hidden, m, t) p = Softmax <axis = -1> (u) y = MatMul(p, x) }}"""
ADDED_MASK = f"""(float[2,6,16] x, int64[2,1,6] seen) => (float[2,6,16] y) {weights(a=(16, 16))} {{
    q = MatMul(x, a) kt = Transpose <perm = [0,2,1]> (x) s = MatMul(q, kt)
    f = Cast <to = 1> (seen) one = Constant <value = float {{1}}> () g = Sub(one, f)
    low = Constant <value = float {{-3.4028235e38}}> () m = Mul(g, low) u = Add(s, m)
    p = Softmax <axis = -1> (u) y = MatMul(p, x) }}"""
LSTM = f"""(float[6,3,10] x) => (float[6,1,3,8] y, float[1,3,8] h, float[1,3,8] c)
    {weights(w=(1, 32, 10), r=(1, 32, 8), b=(1, 64))} {{ y, h, c = LSTM <hidden_size = 8> (x, w, r, b) }}"""
GRU = f"""(float[6,3,10] x) => (float[6,1,3,8] y, float[1,3,8] h)
    {weights(w=(1, 24, 10), r=(1, 24, 8), b=(1, 48))} {{ y, h = GRU <hidden_size = 8> (x, w, r, b) }}"""
GROUPED = f"""(float[2,8,5,5] x) => (float[2,4,5,5] y) {weights(s=(2,), b=(2,), w=(4, 8, 3, 3))} {{
    n = GroupNormalization <num_groups = 2> (x, s, b) i = Softplus(n) j = Tanh(i) k = Mul(n, j)
    y = Conv <pads = [1,1,1,1]> (k, w) }}"""


def _feed(*arrays: Array) -> Callable[[], list[Array]]:
    return lambda: list(arrays)


SEEN = np.array([[[1, 1, 1, 0, 0, 1]], [[0, 0, 0, 0, 0, 0]]])
MODELS: dict[str, tuple[str, list[Array]]] = {
    "mlp": (MLP, [floats(7, 24)]),
    "cnn": (CNN, [floats(2, 3, 13, 13)]),
    "large means": (LARGE_MEANS, [floats(9, 40) + np.float32(1000)]),
    "masked": (MASKED, [floats(2, 6, 16), SEEN == 0]),
    "added mask": (ADDED_MASK, [floats(2, 6, 16), SEEN]),
    "lstm": (LSTM, [floats(6, 3, 10)]),
    "gru": (GRU, [floats(6, 3, 10)]),
    "grouped": (GROUPED, [floats(2, 8, 5, 5) * 10]),
}


@pytest.mark.every_target
@pytest.mark.parametrize("dtype", HALVES)
def test_answers_are_near_those_of_float32(dtype: str) -> None:
    graphs = {name: of(text, dtype) for name, (text, _) in MODELS.items()}
    programs = compile_graphs(list(graphs.values()))
    for (name, (text, feed)), program in zip(MODELS.items(), programs, strict=True):
        for found, wanted in zip(program(*feed), reference(parse(text, 20), *feed), strict=True):
            assert found.dtype == wanted.dtype

            assert error(found, wanted) <= 2 * UNIT[dtype] * depth(graphs[name]) ** 0.5, name


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"lstm", "gru"}))  # a scan has no ONNX spelling
def test_onnxruntime_runs_what_the_pass_makes(name: str) -> None:
    """float16 alone: onnxruntime multiplies no bfloat16 on a CPU."""
    text, feed = MODELS[name]
    for attention in (False, True):
        graph = of(text, attention=attention)
        for found, wanted in zip(reference(to_onnx(graph), *feed), reference(parse(text, 20), *feed), strict=True):
            assert error(found, wanted) <= 4 * UNIT["float16"] * depth(graph) ** 0.5


SMALL = {
    "bert": {"layers": 2, "width": 32, "heads": 2, "sequence": 9, "vocabulary": 1000},
    "gpt2": {"layers": 2, "width": 32, "heads": 2, "sequence": 9, "vocabulary": 1000},
}


@pytest.mark.every_target
@pytest.mark.parametrize("name", SMALL)
def test_transformers(name: str) -> None:
    model = build.build(name, **SMALL[name])
    feed = build.random_inputs(model)
    wanted = reference(model, *feed.values())
    graphs = [converted(model, dtype) for dtype in HALVES]
    for dtype, graph, program in zip(HALVES, graphs, compile_graphs(graphs), strict=True):
        for a, b in zip(program(*feed.values()), wanted, strict=True):
            assert error(a, b) <= 2 * UNIT[dtype] * depth(graph) ** 0.5
    fused = converted(model, attention=True)
    assert set(types(fused, "attention")) == {"float16"}
    for a, b in zip(reference(to_onnx(fused), *feed.values()), wanted, strict=True):
        assert error(a, b) <= 4 * UNIT["float16"] * depth(fused) ** 0.5


# ---------------------------------------------------------------- what becomes half


def test_contractions_are_half_and_edges_stay() -> None:
    graph = of(MLP)
    assert types(graph, "matmul") == ["float16"] * 3
    assert [v.dtype for v in (*graph.inputs, *graph.outputs)] == [F32, F32]
    assert all(n.output.dtype is dtypes.float16 for n in nodes(graph, "constant") if n.output.rank)
    assert not kept(graph)


def test_a_chain_of_float32_is_rounded_once() -> None:
    """From the input through the normalization to the matmul there is one cast, in front of the latter."""
    casts = nodes(of(LARGE_MEANS), "cast")
    assert [(n.operands[0].dtype.name, n.output.dtype.name) for n in casts] == [
        ("float32", "float16"),
        ("float16", "float32"),
    ]


def test_residuals_are_stored_as_halves() -> None:
    """Whatever is read behind the next matmul, scaled in float32 or not."""
    weight = weights(a=(8, 8))
    graph = of(
        f"""(float[4,8] x) => (float[4,8] y) {weight} {{
        c = Constant <value = float {{0.3}}> () r = MatMul(x, a) s = Mul(r, c) t = Add(x, s)
        u = MatMul(t, a) v = Mul(u, c) w = Add(t, v) y = MatMul(w, a) }}"""
    )
    first, second = nodes(graph, "add")
    assert first.output.dtype is F32  # 0.3 is no half ...
    assert second.operands[0].node is not None
    rounded = second.operands[0].node
    assert rounded.op == "cast" and rounded.operands[0].dtype is dtypes.float16  # ... but it lies in memory as one


def test_edges_become_halves_where_asked() -> None:
    graph = of(MLP, keep_io=False)
    assert [v.dtype for v in (*graph.inputs, *graph.outputs)] == [dtypes.float16] * 2
    assert graph.metadata["output_types"]["y"][0] == "float16"
    (x,) = MODELS["mlp"][1]
    (found,) = reference(to_onnx(graph), x.astype(np.float16))
    assert error(found, reference(parse(MLP, 20), x)[0]) <= 4 * UNIT["float16"] * depth(graph) ** 0.5


def test_sums_squares_and_exponentials_stay_float32() -> None:
    graph = of("(float16[3,8] x) => (float16[3,8] y) { f = Cast <to = 1> (x) s = Softmax(f) y = Cast <to = 10> (s) }")
    assert types(graph, "exp") == types(graph, "reduce_sum") == types(graph, "div") == ["float32"]
    assert types(graph, "reduce_max") == types(graph, "sub") == ["float16"]
    assert {op for row in kept(graph) for op in row.ops} == {"exp", "reduce_sum"}
    assert [s.op_type for row in kept(graph) for s in row.origin] == ["Softmax"] * len(kept(graph))


def test_constants_beyond_the_range_stay() -> None:
    graph = of(MASKED)
    assert "a constant of 1e+09 is beyond the range of float16" in reasons(graph)
    assert types(graph, "where") == types(graph, "reduce_max") == ["float32"]
    assert types(graph, "matmul") == ["float16"] * 4  # a softmax is bounded again
    assert "beyond" not in reasons(of(MASKED, "bfloat16"))
    assert "beyond the range of bfloat16" in reasons(of(ADDED_MASK, "bfloat16"))


def test_weights_that_do_not_fit_keep_their_matmul() -> None:
    for value, why in ((1e6, "beyond"), (1e-7, "below")):
        graph = of(
            f"(float[2,2] x) => (float[2,2] y) <float[2,2] w = {{0, {value}, 0, 0}}, float[2,2] v = {{1,2,3,4}}> "
            "{ z = MatMul(x, w) y = MatMul(z, v) }"
        )
        assert types(graph, "matmul") == ["float32", "float16"] and why in reasons(graph)


def test_small_divisors_stay() -> None:
    text = "(float16[2] x) => (float[2] y) <float[2] d = {1e-9, 3}> { f = Cast <to = 1> (x) y = Div(f, d) }"
    assert types(of(text), "div") == ["float32"] and "below" in reasons(of(text))
    assert types(of(text.replace("1e-9", "2")), "div") == ["float16"]


def test_limits_do_not_spread() -> None:
    """A clip to the range of float32 says nothing of what is clipped."""
    graph = of(
        f"""(float[4,8] x) => (float[4,8] y) {weights(a=(8, 8))} {{ h = MatMul(x, a)
        low = Constant <value = float {{-3e38}}> () high = Constant <value = float {{3e38}}> ()
        c = Clip(h, low, high) y = MatMul(c, a) }}"""
    )
    assert types(graph, "matmul") == ["float16"] * 2


@pytest.mark.every_target
def test_positions_stay() -> None:
    """Angles of 3000 radians: a half would be one off."""
    text = f"""(int64[1,5] at, float[1,5,8] x) => (float[1,5,4] y) {weights(w=(8, 4))} {{
        axes = Constant <value = int64[1] {{2}}> () u = Unsqueeze(at, axes) f = Cast <to = 1> (u)
        rate = Constant <value = float[1,1,8] {{1, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003}}> ()
        a = MatMul(f, rate) s = Sin(a) z = Mul(s, x) y = MatMul(z, w) }}"""
    graph = of(text)
    assert types(graph, "matmul") == ["float32", "float16"] and "integers" in reasons(graph)
    feed = [np.array([[0, 5, 300, 2999, 30001]]), floats(1, 5, 8)]
    (program,) = compile_graphs([graph])
    assert error(program(*feed)[0], reference(parse(text, 20), *feed)[0]) <= 4 * UNIT["float16"]


def test_timesteps_stay() -> None:
    """A float that sin reads is float32 back to where its kernel begins."""
    text = """(float[3] t) => (float[3,4] y) {
        rate = Constant <value = float[4] {1, 0.1, 0.01, 0.0001}> () axes = Constant <value = int64[1] {1}> ()
        u = Unsqueeze(t, axes) a = Mul(u, rate) y = Sin(a) }"""
    assert types(of(text, keep_io=False), "mul") == ["float32"]


def test_what_becomes_integers_is_float32() -> None:
    graph = of(
        f"""(float[4,8] x) => (uint8[4,8] y) {weights(a=(8, 8))} {{
        h = MatMul(x, a) c = Constant <value = float {{256}}> () s = Mul(h, c) r = Round(s) y = Cast <to = 2> (r) }}"""
    )
    assert types(graph, "matmul") == ["float16"]
    assert types(graph, "mul") == types(graph, "round") == ["float32"]
    assert "its argument becomes integers" in reasons(graph)


def test_masks_of_integers_do_not_hold_activations() -> None:
    graph = of(
        f"""(float[2,4,8] x, int64[2,4,1] mask) => (float[2,8] y) {weights(a=(8, 8))} {{
        h = MatMul(x, a) m = Cast <to = 1> (mask) k = Mul(h, m)
        axes = Constant <value = int64[1] {{1}}> ()
        s = ReduceSum <keepdims = 0> (k, axes) n = ReduceSum <keepdims = 0> (m, axes)
        p = Div(s, n) y = MatMul(p, a) }}"""
    )
    assert types(graph, "matmul") == ["float16"] * 2


def test_unbounded_exponentials_stay() -> None:
    text = """(float[4,8] x) => (float[4,8] y) <float[8,8] a> { h = MatMul(x, a) e = Exp(h) y = MatMul(e, a) }"""
    text = text.replace("<float[8,8] a>", weights(a=(8, 8)))
    assert types(of(text), "matmul") == ["float16", "float32"] and "without a bound" in reasons(of(text))
    assert types(of(text, "bfloat16"), "matmul") == ["bfloat16"] * 2
    bounded = text.replace("e = Exp(h)", "g = Abs(h) n = Neg(g) e = Exp(n)")
    assert types(of(bounded), "matmul") == ["float16"] * 2


def test_bytes_and_booleans_become_halves_at_once() -> None:
    graph = of(
        f"""(uint8[1,3,9,9] x) => (float[1,4,7,7] y) {weights(a=(4, 3, 3, 3))} {{
        f = Cast <to = 1> (x) c = Constant <value = float {{128}}> () g = Div(f, c) y = Conv(g, a) }}"""
    )
    assert types(graph, "cast") == ["float16", "float32"] and types(graph, "conv") == ["float16"]


def test_roundings_of_the_model_stay() -> None:
    """float32 -> float16 -> float32 changes values; float16 -> float32 -> float16 does not."""
    there = of("(float[5] x) => (float[5] y) { h = Cast <to = 10> (x) y = Cast <to = 1> (h) }")
    assert types(there, "cast") == ["float16", "float32"]
    back = of("(float16[5] x) => (float16[5] y) { f = Cast <to = 1> (x) y = Cast <to = 10> (f) }")
    assert not nodes(back, "cast")
    other = of("(float[5] x) => (float[5] y) { h = Cast <to = 16> (x) y = Cast <to = 1> (h) }")
    assert types(other, "cast") == ["bfloat16", "float32"]


def test_states_of_recurrences_stay() -> None:
    graph = of(LSTM)
    (scan,) = nodes(graph, "scan")
    assert [v.dtype for v in scan.outputs[: scan.attrs["states"]]] == [F32] * scan.attrs["states"]
    assert set(types(graph, "matmul")) == {"float16"} and "recurrence" in reasons(graph)


def test_other_dtypes_are_left_alone() -> None:
    text = "(double[4,4] x, float16[4,4] h, int64[4] i) => (double[4,4] y, float16[4,4] g, int64[4] j) "
    text += "{ y = MatMul(x, x) g = MatMul(h, h) j = Add(i, i) }"
    assert [v.dtype.name for v in of(text, "bfloat16").outputs] == ["float64", "float16", "int64"]
    assert not nodes(of(text, "bfloat16"), "cast")


def test_packed_halves_are_multiplied_as_such() -> None:
    model = parse("(float[4,160] x, float16[160,160] w) => (float[4,160] y) { f = Cast <to = 1> (w) y = MatMul(x, f) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(floats(160, 160).astype(np.float16), "w"))
    graph = onnx_file.load(model)
    for _, run in passes(PassOptions()):
        graph = run(graph)
    assert nodes(graph, "matmul_quantized")
    for dtype in HALVES:
        made = converted(model, dtype)
        assert types(made, "matmul") == [dtype] and not nodes(made, "matmul_quantized")


def test_packed_integers_stay_packed() -> None:
    b = Builder()
    x = b.input(b.constant(np.zeros((4, 64), np.float32)).t, "x")
    q, scale = b.constant(np.ones((64, 64), np.int8)), b.constant(np.full((1, 64), 0.5, np.float32))
    packed = b.one("matmul_quantized", b.matmul(x, b.constant(floats(64, 64))), q, scale, bits=4, block=64)
    graph = convert_precision(b.graph([b.matmul(packed, b.constant(floats(64, 64)))]), "float16")
    verify(graph)
    assert types(graph, "matmul_quantized") == ["float32"] and types(graph, "matmul") == ["float16"] * 2


def test_the_list_survives_as_text() -> None:
    graph = of(CNN)
    again = from_text(to_text(graph), constants(graph))
    assert kept(again) == kept(graph) != []
    assert sum(summary(kept(graph)).values()) == len(kept(graph))
    assert kept(fold_constants(graph, 0)) == kept(graph)


def test_another_dtype_is_refused() -> None:
    with pytest.raises(InputError, match="float16, bfloat16"):
        of(MLP, "float8")


@pytest.mark.every_target
@pytest.mark.parametrize("dtype", HALVES)
def test_random_graphs(dtype: str) -> None:
    """Valid, and as near as a depth of roundings allows; where rounding decides, nothing can be said."""
    made = [Generator(Seeded(s), s % 2 == 1).run(4 + s % 12) for s in range(100, 140)]
    graphs = [convert_precision(m.graph, dtype) for m in made]
    for graph in graphs:
        verify(graph)
    sizes = {"s0": 3, "s1": 5}
    for seed, (m, graph, program) in enumerate(zip(made, graphs, compile_graphs(graphs), strict=True)):
        arrays = m.arrays(sizes, seed)
        for v, item, a, e in zip(graph.outputs, m.outputs, program(*arrays), interpret(m.graph, arrays), strict=True):
            assert v.dtype is item.value.dtype
            if v.dtype.is_float:
                atol = 8 * UNIT[dtype] * depth(graph) * max(1.0, item.bound)
                np.testing.assert_allclose(a.astype(np.float64), e.astype(np.float64), 0.05, atol, err_msg=str(seed))


@pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.bfloat16])
def test_constants_are_added_up_as_kernels_do(dtype: dtypes.DType) -> None:
    """Sums, products of matrices and convolutions of halves that are folded are of float32, and rounded once."""
    rng, unit = np.random.default_rng(3), UNIT[dtype.name]
    b = Builder()
    x = rng.uniform(0.5, 1, (2048, 3)).astype(dtype.numpy)
    v = b.constant(x)
    found = [b.reduce("sum", v, (0,)), b.matmul(b.transpose(v, (1, 0)), v), b.one("cumsum", v, axis=0)]
    graph = fold_constants(b.graph(found), 1 << 20)
    wide = x.astype(np.float64)
    for out, wanted in zip(graph.outputs, (wide.sum(0), wide.T @ wide, wide.cumsum(0)), strict=True):
        assert out.node is not None and out.node.op == "constant"
        np.testing.assert_allclose(out.node.attrs["value"].astype(np.float64), wanted, rtol=1.01 * unit)


def test_what_folding_drops_does_not_count() -> None:
    """A chain of results is folded where two of them fit into the budget; what would not fit at all is left."""
    b = Builder()
    first = x = b.input(TensorType(F32, (1 << 10, 3)))
    for _ in range(20):
        x = b.neg(x)
    graph = b.graph([x])
    known = Node("constant", (), [first], {"value": np.ones((1 << 10, 3), np.float32)})
    graph = replace(graph, inputs=[], nodes=[known, *graph.nodes])
    size = 3 << 12
    assert [n.op for n in fold_constants(graph, 2 * size).nodes] == ["constant"]
    assert "neg" in [n.op for n in fold_constants(graph, size - 1).nodes]
