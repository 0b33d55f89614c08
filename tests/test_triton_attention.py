"""Attention on GPUs: kernels in Triton's interpreter against float64, what is known of masks, tiles, machine code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxc.codegen.triton.attention_mask import Band, Mask, mask_of
from onnxc.codegen.triton.attention_tiles import AttentionTile, Facts, candidates
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, Sym
from onnxc.ir.types import TensorType
from onnxc.primitives.builder import Builder
from tests.targets import needs_triton
from tests.triton_simulator import Answer, Request, Simulator, program_of

Array = np.ndarray[Any, Any]
INF = float("inf")

rng = np.random.default_rng(11)


def normal(*shape: int, dtype: str = "float16") -> Array:
    return rng.standard_normal(shape).astype(dtype)


def wanted(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    scale: float = 0.25,
    guard: bool = False,
    hidden: tuple[Array, float] | None = None,
) -> Array:
    """What attention means, in float64. `hidden`: where scores are replaced, and by what."""
    with np.errstate(all="ignore"):
        q, k, v = (x.astype(np.float64) for x in (q, k, v))
        s = q @ k.swapaxes(-1, -2) * scale
        s = s if bias is None else s + bias.astype(np.float64)
        s = s if hidden is None else np.where(hidden[0], hidden[1], s)
        p = np.exp(s - s.max(-1, keepdims=True, initial=-INF))
        p = p / p.sum(-1, keepdims=True)
        return np.asarray(np.where(np.isnan(p), 0, p) @ v if guard else p @ v)


class Case:
    """A model of attention over q, k, v, and how its mask is made."""

    def __init__(self, q: Array, k: Array, v: Array, scale: float = 0.25, guard: bool = False) -> None:
        self.arrays = [q, k, v]
        self.scale, self.guard = scale, guard
        self.dims: list[list[str]] = []
        self.inputs: list[Array] = []
        self.constants: list[onnx.TensorProto] = []
        self.nodes: list[onnx.NodeProto] = []
        self.bias: Array | None = None
        self.mask: str | None = None
        self.hidden: tuple[Array, float] | None = None
        self.kept = False  # whether the model's condition is where scores stay

    def constant(self, name: str, array: Any) -> str:
        """An initializer."""
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def node(self, op: str, inputs: Sequence[str], output: str, **attrs: Any) -> str:
        """One node."""
        self.nodes.append(helper.make_node(op, list(inputs), [output], **attrs))
        return output

    def masked(self, bias: Array, constant: bool) -> Case:
        """With a mask that is an initializer or an input."""
        self.bias = bias
        if constant:
            self.mask = self.constant("bias", bias)
        else:
            self.mask = "bias"
            self.inputs.append(bias)
        return self

    def filled(self, hidden: Array, fill: float, constant: bool, kept: bool = False) -> Case:
        """With scores that are `fill` where a condition holds."""
        self.hidden, self.kept = (hidden, fill), kept
        condition = ~hidden if kept else hidden
        if constant:
            self.mask = self.constant("bias", condition)
        else:
            self.mask = "bias"
            self.inputs.append(condition)
        return self

    def model(self, dynamic: bool = False) -> onnx.ModelProto:
        """The model; with `dynamic`, sequences have sizes that are known at run time only."""
        kind = helper.np_dtype_to_tensor_dtype(self.arrays[0].dtype)
        q, k, v = self.arrays
        names: dict[int, str] = {q.shape[-2]: "S", k.shape[-2]: "K"} if dynamic else {}

        def info(name: str, x: Array) -> onnx.ValueInfoProto:
            shape = [names.get(d, d) if axis >= x.ndim - 2 else d for axis, d in enumerate(x.shape)]
            shape[-1] = x.shape[-1] if name in "qkv" else shape[-1]
            return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), shape)

        infos = [info(n, x) for n, x in zip("qkv", self.arrays, strict=True)]
        infos += [info(f"bias{k or ''}", x) for k, x in enumerate(self.inputs)]
        nodes = list(self.nodes)
        keys, values = "k", "v"
        if k.shape[1] != q.shape[1]:  # heads that share keys and values
            share = q.shape[1] // k.shape[1]
            for name, x in (("k", k), ("v", v)):
                wide = [x.shape[0], x.shape[1], share, *x.shape[2:]]
                self.constant(f"{name}_axis", np.array([2]))
                self.constant(f"{name}_wide", np.array(wide))
                self.constant(f"{name}_flat", np.array([x.shape[0], q.shape[1], *x.shape[2:]]))
                nodes.append(helper.make_node("Unsqueeze", [name, f"{name}_axis"], [f"{name}1"]))
                nodes.append(helper.make_node("Expand", [f"{name}1", f"{name}_wide"], [f"{name}2"]))
                nodes.append(helper.make_node("Reshape", [f"{name}2", f"{name}_flat"], [f"{name}3"]))
            keys, values = "k3", "v3"
        scale = numpy_helper.from_array(np.asarray(self.scale, q.dtype), "scale")
        nodes += [
            helper.make_node("Transpose", [keys], ["kt"], perm=[0, 1, 3, 2]),
            helper.make_node("MatMul", ["q", "kt"], ["s"]),
            helper.make_node("Mul", ["s", "scale"], ["t"]),
        ]
        nodes += [*self.masking("t", "u"), helper.make_node("Softmax", ["u"], ["p"], axis=-1)]
        if self.guard:
            self.constant("zero", np.zeros((), q.dtype))
            nodes.append(helper.make_node("IsNaN", ["p"], ["bad"]))
            nodes.append(helper.make_node("Where", ["bad", "zero", "p"], ["p0"]))
        nodes.append(helper.make_node("MatMul", ["p0" if self.guard else "p", values], ["y"]))
        rows: Any = names.get(q.shape[-2], q.shape[-2])
        y = helper.make_tensor_value_info("y", kind, [*q.shape[:-2], rows, v.shape[-1]])
        graph = helper.make_graph(nodes, "g", infos, [y], [scale, *self.constants])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

    def masking(self, s: str, u: str) -> list[onnx.NodeProto]:
        """What makes scores `u` of scaled products `s`."""
        if self.mask is not None and self.hidden is not None:
            fill = self.constant("fill", np.asarray(self.hidden[1], self.arrays[0].dtype))
            both = [s, fill] if self.kept else [fill, s]
            return [helper.make_node("Where", [self.mask, *both], [u])]
        if self.mask is not None:
            return [helper.make_node("Add", [s, self.mask], [u])]
        return [helper.make_node("Identity", [s], [u])]

    def wanted(self) -> Array:
        """The answer."""
        q, k, v = self.arrays
        share = q.shape[1] // k.shape[1]
        return wanted(q, k.repeat(share, 1), v.repeat(share, 1), self.bias, self.scale, self.guard, self.hidden)

    def agrees(self, simulator: Simulator, dynamic: bool = False, **options: Any) -> Answer:
        """One kernel gives the answer."""
        model = self.model(dynamic).SerializeToString()
        answer = simulator.run(model, [*self.arrays, *self.inputs], **options)
        assert answer.kinds.count("attention") == 1 and answer.error[0] == 0
        tolerance = 4e-3 if self.arrays[0].dtype == np.float16 else 1e-5
        found = answer.outputs[0].astype(np.float64)
        np.testing.assert_allclose(found, self.wanted(), tolerance, tolerance, equal_nan=True)
        return answer


def heads(
    queries: int, keys: int, depth: int = 16, columns: int = 16, dtype: str = "float16"
) -> tuple[Array, Array, Array]:
    """q, k, v of two heads."""
    q, k = normal(1, 2, queries, depth, dtype=dtype), normal(1, 2, keys, depth, dtype=dtype)
    return q, k, normal(1, 2, keys, columns, dtype=dtype)


def band(queries: int, keys: int, lower: int | None, upper: int | None, low: float, dtype: str = "float16") -> Array:
    """0 where a row sees a key."""
    apart = np.arange(keys)[None, :] - np.arange(queries)[:, None]
    seen = (apart >= (lower if lower is not None else -queries)) & (apart <= (upper if upper is not None else keys))
    return np.where(seen, 0, low).astype(dtype)[None, None]


def reads_no_mask(answer: Answer) -> bool:
    """Whether the kernel has four buffers: q, k, v and the result."""
    (text,) = [t for t in answer.source.split("\nk") if "tl.dot" in t]
    return "p4" not in text.split("):")[0]


# ---------------------------------------------------------------- sizes


@needs_triton
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "depth", "columns"),
    [
        (1, 1, 16, 16),
        (1, 197, 64, 64),
        (7, 5, 8, 24),
        (17, 63, 40, 16),
        (64, 64, 64, 64),
        (65, 130, 16, 5),
        (131, 7, 32, 80),
    ],
)
def test_sizes(
    simulator: Simulator, queries: int, keys: int, depth: int, columns: int, dynamic: bool, dtype: str
) -> None:
    Case(*heads(queries, keys, depth, columns, dtype)).agrees(simulator, dynamic)


@needs_triton
@pytest.mark.parametrize("depth", [64, 128, 256])
@pytest.mark.parametrize("queries", [3, 90])
def test_every_tile(simulator: Simulator, queries: int, depth: int) -> None:
    q, k, v = (x[:, :1] for x in heads(queries, 150, depth, depth))
    names = len(candidates(Facts(queries, 150, 1, depth, 16, causal=True, described=True)))
    for number in range(names):
        case = Case(q, k, v, 0.1).masked(band(queries, 150, None, 60, -INF), constant=True)
        assert reads_no_mask(case.agrees(simulator, candidate=number))


@needs_triton
@pytest.mark.parametrize("wide", [False, True])
def test_grouped_heads(simulator: Simulator, wide: bool) -> None:
    q, k, v = normal(2, 6, 20, 16), normal(2, 2, 70, 16), normal(2, 2, 70, 16)
    Case(q, k, v).agrees(simulator, wide=wide)
    Case(q, k, v).masked(band(20, 70, None, 50, -INF), constant=True).agrees(simulator, wide=wide)


@needs_triton
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("queries", "count", "shared"), [(1, 8, 2), (2, 6, 2), (5, 6, 1), (1, 48, 2), (3, 5, 5)])
def test_few_queries_of_grouped_heads(simulator: Simulator, queries: int, count: int, shared: int, dtype: str) -> None:
    """Heads that share keys are rows of one tile."""
    q = normal(2, count, queries, 16, dtype=dtype)
    k, v = (normal(2, shared, 70, 16, dtype=dtype) for _ in range(2))
    for case in (
        Case(q, k, v),
        Case(q, k, v).masked(normal(2, count, queries, 70, dtype=dtype), constant=False),
        Case(q, k, v).masked(band(queries, 70, None, 60, -INF, dtype), constant=True),
    ):
        for wide in (False, True):
            assert ("head =" in case.agrees(simulator, wide=wide).source) == (count != shared)


@needs_triton
@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-30])
def test_scales(simulator: Simulator, scale: float) -> None:
    Case(*heads(9, 70, dtype="float32"), scale).agrees(simulator)
    Case(*heads(9, 70, dtype="float32"), scale).masked(band(9, 70, None, 0, -INF, "float32"), True).agrees(simulator)


# ---------------------------------------------------------------- masks


@needs_triton
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("low", [-INF, -65504.0, -1e4, -3.0])
@pytest.mark.parametrize(("queries", "keys", "lower", "upper"), [
    (100, 100, None, 0), (20, 150, None, 130), (20, 150, None, 3), (150, 20, None, 5), (90, 90, -70, 0),
    (90, 90, -3, 3), (70, 90, 5, None),
])  # fmt: skip
def test_bands(
    simulator: Simulator, queries: int, keys: int, lower: int | None, upper: int | None, low: float, dtype: str,
    constant: bool,
) -> None:  # fmt: skip
    case = Case(*heads(queries, keys, dtype=dtype), guard=low == -INF)
    answer = case.masked(band(queries, keys, lower, upper, low, dtype), constant).agrees(simulator)
    assert reads_no_mask(answer) == constant


@needs_triton
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("low", [-INF, -3.4e38])
@pytest.mark.parametrize(("lower", "upper"), [(None, -30), (40, None)])
def test_rows_that_see_nothing(
    simulator: Simulator, lower: int | None, upper: int | None, low: float, guard: bool, constant: bool
) -> None:
    """They are uniform where the mask is finite; else NaN, or what a guard makes of it."""
    case = Case(*heads(90, 90, dtype="float32"), guard=guard)
    case.masked(band(90, 90, lower, upper, low, "float32"), constant).agrees(simulator)


@needs_triton
@pytest.mark.parametrize(("dtype", "fill"), [
    ("float16", -INF), ("float16", -65504.0), ("float32", -3.4e38), ("float32", -1e4), ("float16", -3.0),
    ("float32", 0.0), ("float16", 2.0),
])  # fmt: skip
@pytest.mark.parametrize(("queries", "keys", "lower", "upper", "kept"), [
    (100, 100, None, 0, False), (20, 150, None, 130, True), (90, 90, -70, 0, False), (90, 90, -70, 0, True),
])  # fmt: skip
def test_filled_bands(
    simulator: Simulator, queries: int, keys: int, lower: int | None, upper: int | None, kept: bool, fill: float,
    dtype: str,
) -> None:  # fmt: skip
    """`masked_fill` and `where` of a triangle or a window."""
    hidden = band(queries, keys, lower, upper, 1.0, dtype) != 0
    case = Case(*heads(queries, keys, dtype=dtype), guard=fill == -INF)
    answer = case.filled(hidden, fill, constant=True, kept=kept).agrees(simulator)
    assert reads_no_mask(answer) == (fill != 0)


@needs_triton
@pytest.mark.parametrize(("dtype", "fill"), [("float16", -INF), ("float16", -65504.0), ("float32", -1e9)])
@pytest.mark.parametrize(
    ("shape", "scale"), [((1, 1, 90, 70), 0.25), ((1, 2, 90, 70), -0.5), ((70,), 0.25), ((90, 1), 0.0)]
)
def test_any_filled_mask(simulator: Simulator, shape: tuple[int, ...], dtype: str, fill: float, scale: float) -> None:
    """Scores are replaced, not lowered: rows without any key are uniform where the number is finite."""
    hidden = rng.random(shape) < 0.4
    for constant in (False, True):
        case = Case(*heads(90, 70, dtype=dtype), scale).filled(hidden, fill, constant)
        assert not reads_no_mask(case.agrees(simulator))
    Case(*heads(90, 70, dtype=dtype), scale).filled(hidden, fill, False, kept=True).agrees(simulator, dynamic=True)


@needs_triton
def test_a_mask_of_the_scores_themselves(simulator: Simulator) -> None:
    """They are in memory then, and nothing is gained by making them twice."""
    case = Case(*heads(20, 40, dtype="float32"))
    case.hidden = case.arrays[0] @ case.arrays[1].swapaxes(-1, -2) * np.float32(0.25) < 0.1, -INF
    text = """<ir_version: 10, opset_import: ["" : 18]>
    g (float[1, 2, 20, 16] q, float[1, 2, 40, 16] k, float[1, 2, 40, 16] v) => (float[1, 2, 20, 16] y)
    <float scale = {0.25}, float least = {0.1}, float low = {-inf}> {
        kt = Transpose <perm = [0, 1, 3, 2]> (k)
        s = MatMul (q, kt)
        t = Mul (s, scale)
        hidden = Less (t, least)
        u = Where (hidden, low, t)
        p = Softmax <axis = -1> (u)
        y = MatMul (p, v)
    }"""
    answer = simulator.run(onnx.parser.parse_model(text).SerializeToString(), case.arrays)
    assert "attention" not in answer.kinds
    np.testing.assert_allclose(answer.outputs[0], case.wanted(), 1e-5, 1e-5)


@needs_triton
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_filled_scores_of_a_converted_model(simulator: Simulator, constant: bool, kept: bool) -> None:
    """The number stays float32's: a row without any key is uniform, where float16 has no such number."""
    hidden = rng.random((1, 1, 20, 40)) < 0.5
    hidden[0, 0, 7] = True
    case = Case(*heads(20, 40, dtype="float32")).filled(hidden, -3.4e38, constant, kept)
    answer = simulator.run(case.model().SerializeToString(), [*case.arrays, *case.inputs], dtype="float16")
    assert answer.kinds.count("attention") == 1
    np.testing.assert_allclose(answer.outputs[0], case.wanted(), 4e-3, 4e-3)


@needs_triton
def test_filled_scores_hide_what_is_no_number(simulator: Simulator) -> None:
    q, k, v = heads(20, 40, dtype="float32")
    k[:, :, 30:] = np.nan
    hidden = np.arange(40) >= 30
    case = Case(q, k, v).filled(hidden, -INF, constant=False)
    assert np.isfinite(case.wanted()).all()
    case.agrees(simulator)


@needs_triton
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("shape", [(1, 1, 90, 70), (1, 2, 90, 70), (1, 1, 1, 70), (70,), (90, 1), (2, 90, 70)])
def test_any_mask(simulator: Simulator, shape: tuple[int, ...], dtype: str) -> None:
    bias = normal(*shape, dtype=dtype)
    for constant in (False, True):
        assert not reads_no_mask(Case(*heads(90, 70, dtype=dtype)).masked(bias, constant).agrees(simulator))
    Case(*heads(90, 70, dtype=dtype)).masked(bias, False).agrees(simulator, dynamic=True)


@needs_triton
def test_a_mask_of_zeros_is_not_read(simulator: Simulator) -> None:
    case = Case(*heads(90, 70))
    case.constant("true", np.ones((1, 1, 90, 1), bool))
    case.constant("shape", np.array([1, 1, 90, 70]))
    case.node("Expand", ["true", "shape"], "seen")
    case.mask = case.node(
        "Where", ["seen", case.constant("o", np.float16(0)), case.constant("l", np.float16(-INF))], "b"
    )
    assert reads_no_mask(case.agrees(simulator))


@needs_triton
def test_padding_is_read_by_line(simulator: Simulator) -> None:
    case = Case(*heads(90, 70), guard=True)
    keep = rng.random((1, 1, 1, 70)) < 0.7
    case.inputs.append(keep)
    case.constant("true", np.ones((1, 1, 90, 1), bool))
    case.node("And", ["true", "bias"], "seen")
    case.mask = case.node(
        "Where", ["seen", case.constant("o", np.float16(0)), case.constant("l", np.float16(-65504))], "b"
    )
    case.bias = np.where(keep, 0, -65504).astype(np.float16)
    answer = case.agrees(simulator)
    (text,) = [t for t in answer.source.split("\nk") if "tl.dot" in t]
    assert all("+ key[None, :]" in line for line in text.splitlines() if "tl.load(p1" in line)


@needs_triton
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("low", [-INF, -65504.0])
def test_causal_masks_of_indices(simulator: Simulator, low: float, dynamic: bool) -> None:
    """Range, LessOrEqual and Where of sizes: nothing of the mask is read."""
    case = Case(*heads(90, 130))
    for name, x, axis in (("S", "q", 2), ("K", "k", 2)):
        case.node("Shape", [x], f"{name}_1", start=axis, end=axis + 1)
        case.node("Squeeze", [f"{name}_1"], name)
    case.constant("i0", np.array(0))
    case.constant("i1", np.array(1))
    case.node("Range", ["i0", "S", "i1"], "rows0")
    case.node("Range", ["i0", "K", "i1"], "cols")
    case.node("Sub", ["K", "S"], "past")
    case.node("Add", ["rows0", "past"], "rows1")
    case.node("Unsqueeze", ["rows1", case.constant("ax", np.array([1]))], "rows")
    case.node("LessOrEqual", ["cols", "rows"], "seen")
    case.mask = case.node(
        "Where", ["seen", case.constant("o", np.float16(0)), case.constant("l", np.float16(low))], "b"
    )
    case.bias = band(90, 130, None, 40, low)
    answer = case.agrees(simulator, dynamic)
    assert reads_no_mask(answer)


@needs_triton
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("past", [0, 7])
def test_causal_attention_op(simulator: Simulator, past: int, dynamic: bool) -> None:
    q, k, v = (normal(1, 2, 70, 16) for _ in range(3))
    old = [normal(1, 2, past, 16) for _ in range(2)]
    shape = [1, 2, "S" if dynamic else 70, 16]
    before = [1, 2, "P" if dynamic else past, 16]
    after = [1, 2, "T" if dynamic else past + 70, 16]
    kind = TensorProto.FLOAT16
    names = ["q", "k", "v", *(["", "pk", "pv"] if past else [])]
    outputs = ["y", *(["nk", "nv"] if past else [])]
    infos = [helper.make_tensor_value_info(n, kind, before if n[0] == "p" else shape) for n in names if n]
    results = [helper.make_tensor_value_info(n, kind, shape if n == "y" else after) for n in outputs]
    node = helper.make_node("Attention", names, outputs, is_causal=1, scale=0.25)
    graph = helper.make_graph([node], "g", infos, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    answer = simulator.run(model.SerializeToString(), [q, k, v, *(old if past else [])])
    assert "attention" in answer.kinds and reads_no_mask(answer)
    k, v = (np.concatenate([a, b], 2) for a, b in zip(old, (k, v), strict=True))
    bias = band(70, 70 + past, None, past, -INF)
    np.testing.assert_allclose(answer.outputs[0].astype(np.float64), wanted(q, k, v, bias), 4e-3, 4e-3)


@needs_triton
@pytest.mark.parametrize("sizes", [(70, 70), (1, 1), (17, 17), ("S", "S")], ids=str)
def test_causal_mask_as_pytorch_exports_it(simulator: Simulator, sizes: tuple[Any, Any]) -> None:
    """A triangle of ones, and the lowest number where that is 0."""
    queries, keys = (70 if d == "S" else d for d in sizes)
    low, half = np.array([-65504.0, 0.5], np.float16).view(np.uint16)  # as text has them: their bits
    q, k, v = (normal(1, 2, n, 16) for n in (queries, keys, keys))
    text = f"""<ir_version: 10, opset_import: ["" : 18]>
    g (float16[1, 2, {sizes[0]}, 16] q, float16[1, 2, {sizes[1]}, 16] k, float16[1, 2, {sizes[1]}, 16] v)
    => (float16[1, 2, {sizes[0]}, 16] y) <float one = {{1}}, float none = {{0}}, float16 low = {{{low}}},
        float16 zero = {{0}}, float16[1] scale = {{{half}}}> {{
        rows = Shape <start = 2, end = 3> (q)
        columns = Shape <start = 2, end = 3> (k)
        both = Concat <axis = 0> (rows, columns)
        square = Expand (one, both)
        triangle = Trilu <upper = 0> (square)
        hidden = Equal (triangle, none)
        mask = Where (hidden, low, zero)
        turned = Transpose <perm = [0, 1, 3, 2]> (k)
        qs = Mul (q, scale)
        ks = Mul (turned, scale)
        s = MatMul (qs, ks)
        t = Add (s, mask)
        p = Softmax <axis = -1> (t)
        y = MatMul (p, v)
    }}"""
    answer = simulator.run(onnx.parser.parse_model(text).SerializeToString(), [q, k, v])
    assert answer.kinds == ["attention"] and reads_no_mask(answer), "and nobody computes the mask"
    bias = band(queries, keys, None, 0, -INF)
    np.testing.assert_allclose(answer.outputs[0].astype(np.float64), wanted(q, k, v, bias), 4e-3, 4e-3)


@needs_triton
@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_so(simulator: Simulator, bad: float, guard: bool) -> None:
    tiles = candidates(Facts(70, 130, 2, 16, 16, described=True))
    resident = next(k for k, tile in enumerate(tiles) if tile.resident)
    for place in range(3):
        arrays = heads(70, 130)
        arrays[place][0, 0, 66, 3] = bad
        for number in (0, resident):
            Case(*arrays, guard=guard).agrees(simulator, candidate=number)


# ---------------------------------------------------------------- what is known of masks


def known(bias: Array | Any, queries: Dim, keys: Dim, fill: float | None = None) -> Mask:
    """What is known of a constant."""
    return mask_of(Builder().constant(bias), queries, keys, fill)


def test_bands_of_constants() -> None:
    causal = np.where(np.tri(5), 0, -INF)
    assert known(causal, 5, 5) == Mask(band=Band(None, 0))
    assert known(causal[None, None], 5, 5).band == Band(None, 0)
    assert known(np.where(np.tri(5, 9, 4), 0, -1e9), 5, 9).band == Band(None, 4, -1e9)
    assert known(np.where(np.tri(5, 5, -1), 0, -1e9), 5, 5).band == Band(None, -1, -1e9)
    assert known(np.where(np.tri(9, 9, 2) - np.tri(9, 9, -3), 0, -1.0), 9, 9).band == Band(-2, 2, -1)
    assert known(np.stack([causal, causal]), 5, 5).band == Band(None, 0)
    assert known(np.stack([causal, np.zeros((5, 5))]), 5, 5).band is None
    assert known(causal[:, :1], 5, 5).band is None, "a column that is repeated is no band"
    odd = causal.copy()
    odd[3, 1] = -INF
    assert known(odd, 5, 5) == Mask()
    odd[3, 1] = np.nan
    assert known(odd, 5, 5) == Mask()
    assert known(np.zeros((1, 5)), 5, 5) == Mask(nothing=True, alike=True)
    assert known(np.ones((5, 5)), 5, 5) == Mask(alike=True)
    assert known(np.arange(5.0)[None], 5, 5) == Mask(alike=True)
    assert known(np.zeros((0, 5)), 0, 5).band is None


def test_when_hidden_keys_may_be_left_out() -> None:
    half, full, most = dtypes.float16, dtypes.float32, 512.0
    assert Band(None, -9).hides(5, 5, half, INF) and Band(3, 4).hides(5, 5, half, INF)
    assert Band(None, 0, -65504.0).hides(5, 5, half, most) and not Band(None, 0, -65504.0).hides(5, 5, full, most)
    assert Band(None, 0, -1e9).hides(5, 5, full, most) and not Band(None, 0, -1e4).hides(5, 5, half, most)
    assert not Band(None, -1, -65504.0).hides(5, 5, half, most), "its first row sees nothing"
    assert Band(-2, 0, -1e9).hides(5, 5, full, most) and not Band(-2, 0, -1e9).hides(9, 5, full, most)
    assert not Band(2, None, -1e9).hides(5, 5, full, most)
    assert Band(None, 0, -1e9).hides(5, 5, full, 5e8) and not Band(None, 0, -1e9).hides(5, 5, full, 6e8)


def test_bands_of_comparisons() -> None:
    b = Builder()
    rows, keys = Sym("s0"), Sym("s1")
    row, key = b.reshape(b.iota(rows), (rows, 1)), b.iota(keys)
    low, zero = b.scalar(-INF, dtypes.float32), b.scalar(0.0, dtypes.float32)

    def found(seen: Any, a: Any = zero, c: Any = low) -> Band | None:
        return mask_of(b.where(seen, a, c), rows, keys).band

    two = b.scalar(2, dtypes.int64)
    assert found(b.le(key, b.add(row, two))) == Band(None, 2)
    assert found(b.lt(key, b.add(row, two))) == Band(None, 1)
    assert found(b.le(b.sub(row, two), key)) == Band(-2, None)
    assert found(b.lt(row, key), low, zero) == Band(None, 0)
    assert found(b.lt(row, key), zero, b.scalar(1.0, dtypes.float32)) == Band(1, None, 1.0)
    assert found(b.lt(row, key), low, low) is None
    assert found(b.not_(b.lt(row, key))) == Band(None, 0)
    assert found(b.and_(b.le(key, row), b.le(b.sub(row, two), key))) == Band(-2, 0)
    assert found(b.and_(b.le(key, row), b.le(key, b.add(row, two)))) is None
    assert found(b.le(key, two)) is None
    ones = b.where(b.le(key, row), b.scalar(1.0, dtypes.float32), zero)
    assert found(b.eq(ones, zero), low, zero) == found(b.lt(zero, ones)) == Band(None, 0)
    assert found(b.cast(ones, dtypes.boolean)) == Band(None, 0)
    assert found(b.eq(ones, b.scalar(2.0, dtypes.float32))) is None
    assert found(b.eq(ones, b.scalar(np.nan, dtypes.float32))) is None
    huge = b.scalar(1 << 40, dtypes.int64)
    assert found(b.le(key, b.add(row, huge))) is None
    x = b.input(TensorType(dtypes.int64, (keys,)), "x")
    assert found(b.le(x, row)) is None
    flags = b.input(TensorType(dtypes.boolean, (1, keys)), "flags")
    assert mask_of(b.where(b.expand(flags, (rows, keys)), zero, low), rows, keys) == Mask(alike=True)
    assert mask_of(b.where(b.and_(flags, b.le(key, row)), zero, low), rows, keys) == Mask()


def test_bands_of_conditions() -> None:
    """Of conditions where scores are replaced."""
    b = Builder()
    rows, keys = Sym("s0"), Sym("s1")
    row, key = b.reshape(b.iota(rows), (rows, 1)), b.iota(keys)
    true, false = b.scalar(True, dtypes.boolean), b.scalar(False, dtypes.boolean)
    window = b.and_(b.le(key, row), b.le(b.sub(row, b.scalar(2, dtypes.int64)), key))

    def found(hidden: Any, fill: float = -INF) -> Band | None:
        return mask_of(hidden, rows, keys, fill).band

    assert found(b.lt(row, key)) == found(b.not_(b.le(key, row))) == Band(None, 0)
    assert found(b.lt(row, key), -3.0) == Band(None, 0, -3.0)
    assert found(b.not_(window)) == Band(-2, 0)
    assert found(window) is None and found(b.lt(row, key), 0.0) is None
    assert found(b.where(b.le(key, row), false, true)) == found(b.where(b.lt(row, key), true, false)) == Band(None, 0)
    assert found(b.not_(b.where(b.le(key, row), window, false))) is None, "two upper bounds"
    flags = b.input(TensorType(dtypes.boolean, (1, keys)), "flags")
    assert mask_of(flags, rows, keys, -INF) == Mask(alike=True)
    assert found(b.where(b.lt(row, key), true, flags)) is found(b.where(flags, true, false)) is None
    assert known(np.tri(5) == 0, 5, 5, -INF).band == Band(None, 0)
    assert known(np.tri(9, 9, 2) - np.tri(9, 9, -3) == 0, 9, 9, -1.0).band == Band(-2, 2, -1.0)
    assert known(np.zeros((5, 5), bool), 5, 5, -INF) == Mask(nothing=True, alike=True)
    assert known(np.ones((5, 5), bool), 5, 5, -INF) == Mask(alike=True)
    assert known(np.tri(5) == 0, 5, 5, 0.0) == Mask()


# ---------------------------------------------------------------- tiles and machine code


def test_candidates() -> None:
    for depth, bits, queries, keys in ((64, 16, 512, 512), (128, 16, 1, 7), (256, 32, None, None), (16, 32, 3, 3)):
        found = candidates(Facts(queries, keys, None, depth, bits))
        assert len(set(found)) == len(found) > 1 or keys in (3, 7)


@needs_triton
@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize(
    ("depth", "mask", "tile"),
    [
        (64, "causal", None),
        (128, "causal", None),
        (64, None, None),
        (128, "any", None),
        (64, "filled", None),
        (64, "causal", AttentionTile(64, 128, 4, 2, described=1)),
        (128, None, AttentionTile(128, 128, 8, 3, resident=1)),
    ],
)
def test_machine_code(architecture: int, depth: int, mask: str | None, tile: AttentionTile | None) -> None:
    from onnxc.codegen.triton.cubin import compile_program

    q, k, v = (normal(1, 2, 512, depth) for _ in range(3))
    case = Case(q, k, v)
    if mask == "filled":
        case.filled(rng.random((512, 512)) < 0.5, -65504.0, constant=True)
    elif mask is not None:
        case.masked(band(512, 512, None, 0, -65504.0) if mask == "causal" else normal(1, 1, 512, 512), True)
    found = candidates(Facts(512, 512, 2, depth, 16, mask == "causal", described=True))
    number = found.index(tile) if tile is not None else 0
    _, program = program_of(Request(case.model().SerializeToString(), [], candidate=number))
    (image,) = compile_program(program, architecture, 1)
    assert image.code and image.threads == 32 * found[number].warps
    assert (image.scratch > 0) == (found[number].described == 1 and architecture >= 90)
