"""Functions of one byte that become tables: the pass `byte-tables` and the primitive `byte_table`."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnxruntime import InferenceSession

import onnxc
from onnxc.errors import ShapeError
from onnxc.export import to_onnx
from onnxc.frontends import onnx_file
from onnxc.ir import dtypes
from onnxc.ir.graph import Graph
from onnxc.ir.types import TensorType
from onnxc.passes.pipeline import PassOptions, passes
from onnxc.planner.groups import FusionOptions
from onnxc.primitives.builder import Builder
from onnxc.primitives.interpret import interpret
from onnxc.primitives.verify import verify
from onnxc.runtime.cpu import level, missing_features
from tests.compile_harness import compile_graphs

LEVELS = [
    name
    for name in ("x86-64-v2", "x86-64-v3", "x86-64-v4", "native")
    if name == "native" or (platform.machine() == "x86_64" and not missing_features(level(name).features))
]
BYTES = (dtypes.uint8, dtypes.int8)
EVERY = np.arange(256, dtype=np.uint8)


@pytest.mark.parametrize("cpu", LEVELS)
def test_lookups_of_all_bytes(cpu: str) -> None:
    """Every byte, signed or not, to bytes of both kinds, in tails of vectors, behind quantizers, in front of floats."""
    rng = np.random.default_rng(0)
    graphs, inputs = [], []
    for source in BYTES:
        for to in BYTES:
            numbers = tuple(rng.integers(to.limits[0], to.limits[1] + 1, 256).tolist())
            for size in (1, 7, 33, 512 + 19):
                b = Builder()
                x = b.input(TensorType(source, (size,)), "x")
                y = b.input(TensorType(dtypes.float32, (size,)), "y")
                low, high = source.limits
                q = b.cast(b.one("quantize", y, scale=0.1, zero=low + 128, low=low, high=high), source)
                tables = [b.one("byte_table", v, numbers=numbers, to=to) for v in (x, q)]
                graphs.append(b.graph([*tables, b.mul(b.cast(tables[0], dtypes.float32), y)]))
                whole = np.resize(rng.permutation(EVERY), size).view(source.numpy)
                inputs.append([whole, rng.normal(0, 6, size).astype(np.float32)])
    for graph, given, program in zip(graphs, inputs, compile_graphs(graphs, cpu=level(cpu)), strict=True):
        verify(graph, "the test")
        for got, want in zip(program(*given), interpret(graph, given), strict=True):
            np.testing.assert_array_equal(got, want)


def test_what_is_no_table() -> None:
    b = Builder()
    x = b.input(TensorType(dtypes.int8, (3,)), "x")
    for numbers, to in (((0,) * 255, dtypes.int8), ((-1,) * 256, dtypes.uint8), ((0,) * 256, dtypes.int32)):
        with pytest.raises(ShapeError):
            b.one("byte_table", x, numbers=numbers, to=to)
    with pytest.raises(ShapeError):
        b.one("byte_table", b.cast(x, dtypes.int32), numbers=(0,) * 256, to=dtypes.int8)


# ---------------------------------------------------------------- the pass

ACTIVATIONS = {
    "silu": "s = Sigmoid(xf)",
    "hard_swish": "s = HardSigmoid <alpha = 0.1666667, beta = 0.5> (xf)",
    "tanh": "s = Tanh(xf)",
    "softplus": "s = Softplus(xf)",
}


def quantized(activation: str, dtype: str = "uint8", shape: str = "2, 40, 31") -> onnx.ModelProto:
    """x between two quantizers, times a function of it between two more."""
    low = 0 if dtype == "uint8" else -128
    model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 19]>
    g (float[{shape}] x) => ({dtype}[{shape}] y) <float sx = {{0.05}}, {dtype} zx = {{{low + 131}}},
      float ss = {{0.0045}}, {dtype} zs = {{{low}}}, float sy = {{0.03}}, {dtype} zy = {{{low + 20}}}> {{
      xq = QuantizeLinear(x, sx, zx)
      xf = DequantizeLinear(xq, sx, zx)
      {activation}
      sq = QuantizeLinear(s, ss, zs)
      sf = DequantizeLinear(sq, ss, zs)
      product = Mul(xf, sf)
      y = QuantizeLinear(product, sy, zy)
    }}""")
    onnx.checker.check_model(model)
    return model


def passed(model: onnx.ModelProto, **options: Any) -> Graph:
    graph = onnx_file.load(model)
    for name, run in passes(PassOptions(**options)):
        graph = run(graph)
        verify(graph, name)
    return graph


def ops(graph: Graph) -> list[str]:
    return [n.op for n in graph.nodes if n.op != "constant"]


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_all_between_quantizers_is_one_table(activation: str, dtype: str) -> None:
    """The same bytes as computed: by the primitives to the bit, by kernels but where a float is near a tie."""
    model = quantized(ACTIVATIONS[activation], dtype)
    graph = passed(model, table_cost=12)
    assert ops(graph) == ["quantize", "cast", "byte_table"]
    assert len({s.number for s in graph.nodes[-1].origin}) >= 5, "the nodes that it stands for"
    x = np.random.default_rng(1).normal(0, 4, (2, 40, 31)).astype(np.float32)
    x.flat[:4] = np.nan, np.inf, -np.inf, 1e30
    np.testing.assert_array_equal(interpret(graph, [x])[0], interpret(passed(model, table_cost=None), [x])[0])

    got = onnxc.compile(model)(x=x)["y"]
    computed = onnxc.compile(model, fusion=FusionOptions(tables=False))(x=x)["y"]
    apart = np.abs(got.astype(int) - computed.astype(int))
    assert apart.max() <= 1 and (apart > 0).mean() < 0.01


def test_what_costs_less_than_a_table_is_computed() -> None:
    model = quantized("s = Relu(xf)")
    assert "byte_table" not in ops(passed(model, table_cost=60))
    assert "byte_table" in ops(passed(model, table_cost=12))
    assert "byte_table" not in ops(passed(quantized(ACTIVATIONS["silu"], shape="4, 10"), table_cost=12)), "few elements"
    assert "byte_table" in ops(passed(quantized(ACTIVATIONS["silu"], shape="N, 10"), table_cost=12))


def test_what_follows_from_more_than_a_byte_is_computed() -> None:
    """Two tensors, a scale for each channel, a division of integers that may be one by zero."""
    rows = "float[40, 31] x"
    for inputs, body in (
        (f"{rows}, uint8[40, 31] other", "b = DequantizeLinear(other, scale, zero)  s = Mul(a, b)  c = Exp(s)"),
        (rows, f"wide = Constant <value = float[31] {{{', '.join(['0.5'] * 31)}}}> ()  s = Mul(a, wide)  c = Exp(s)"),
        (f"{rows}, float factor", "s = Mul(a, factor)  c = Exp(s)"),
        (rows, "i = Cast <to = 6> (q)  one = Constant <value = int32 {1000}> ()  d = Div(one, i)  e = Div(one, d)"
               "  f = Cast <to = 1> (e)  g = Exp(f)  c = Tanh(g)"),
    ):  # fmt: skip
        model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 19]>
        g ({inputs}) => (uint8[40, 31] y) <float scale = {{0.05}}, uint8 zero = {{7}}> {{
          q = QuantizeLinear(x, scale, zero)
          a = DequantizeLinear(q, scale, zero)
          {body}
          y = QuantizeLinear(c, scale, zero)
        }}""")
        assert "byte_table" not in ops(passed(model, table_cost=12))


def test_bytes_that_are_needed_anyway_are_where_functions_begin() -> None:
    """What follows from them by one instruction is no table of its own."""
    model = quantized(ACTIVATIONS["silu"])
    model.graph.node.extend(onnx.parser.parse_graph("g (uint8 y, uint8 c) => (uint8 z) { z = BitwiseXor(y, c) }").node)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.uint8(128), "c"))
    alone, both = onnx.ModelProto(), onnx.ModelProto()
    for m, last in ((alone, False), (both, True)):
        m.CopyFrom(model)
        z = onnx.helper.make_tensor_value_info("z", onnx.TensorProto.UINT8, [2, 40, 31])
        m.graph.output.append(z)
        if not last:
            del m.graph.output[0]
    assert ops(passed(alone, table_cost=12)) == ["quantize", "cast", "byte_table"]
    assert ops(passed(both, table_cost=12)) == ["quantize", "cast", "byte_table", "bitxor"]


@pytest.mark.parametrize("fold_bytes", [1 << 28, 0])
def test_constants_of_many_bytes_are_no_roots(fold_bytes: int) -> None:
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 19]>
    g (uint8[300000] z) => (uint8[300000] w) <float scale = {0.01}, uint8 zero = {3}> {
      a = Cast <to = 11> (c)
      b = Tanh(a)
      f = Cast <to = 1> (b)
      y = QuantizeLinear(f, scale, zero)
      w = Max(y, z)
    }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.resize(EVERY, 300000), "c"))
    compiled = onnxc.compile(model, fold_bytes=fold_bytes)
    (want,) = InferenceSession(model.SerializeToString()).run(None, {"z": np.zeros(300000, np.uint8)})
    np.testing.assert_array_equal(compiled(z=np.zeros(300000, np.uint8))["w"], want)


def test_in_loops_and_in_onnx() -> None:
    """The body of a loop; and the model written out as ONNX, which onnxruntime runs, for signed bytes too."""
    for dtype in ("uint8", "int8"):
        model = quantized(ACTIVATIONS["silu"], dtype, shape="40, 31")
        x = np.random.default_rng(3).normal(0, 4, (40, 31)).astype(np.float32)
        graph = passed(model, table_cost=12)
        (want,) = interpret(graph, [x])
        (got,) = InferenceSession(to_onnx(graph).SerializeToString()).run(None, {"x": x})
        np.testing.assert_array_equal(got, want)

        body = onnx.GraphProto()
        body.CopyFrom(model.graph)
        body.node.append(onnx.helper.make_node("DequantizeLinear", ["y", "sy", "zy"], ["back"]))
        loop = onnx.parser.parse_model(
            f"""<ir_version: 9, opset_import: ["" : 19]>
        g (float[40, 31] start) => ({dtype}[3, 40, 31] all) <int64 trips = {{3}}> {{
          end, all = Loop <body = b (int64 i, bool go, float[40, 31] x) => (bool on, float[40, 31] back,
            {dtype}[40, 31] y) {{ on = Identity(go) }}> (trips, "", start)
        }}""".replace('"", start', ", start")
        )
        inner = loop.graph.node[0].attribute[0].g
        inner.node.extend(body.node)
        loop.graph.initializer.extend(model.graph.initializer)
        compiled = onnxc.compile(loop)
        (want,) = InferenceSession(loop.SerializeToString()).run(None, {"start": x})
        assert np.abs(compiled(start=x)["all"].astype(int) - want.astype(int)).max() <= 1


def test_in_the_kernel_of_a_convolution() -> None:
    """A table follows quantization in the epilogue, and the next convolution reads its bytes."""
    rng = np.random.default_rng(2)
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 19]>
    g (uint8[1, 8, 24, 24] x) => (uint8[1, 16, 24, 24] y) <float sx = {0.02}, uint8 zx = {128}, float sw = {0.01},
      int8 zw = {0}, float sy = {0.05}, uint8 zy = {100}, float ss = {0.004}, uint8 zs = {0}> {
      xf = DequantizeLinear(x, sx, zx)
      wf = DequantizeLinear(w, sw, zw)
      c = Conv <pads = [1, 1, 1, 1]> (xf, wf)
      cq = QuantizeLinear(c, sy, zy)
      cf = DequantizeLinear(cq, sy, zy)
      s = Sigmoid(cf)
      sq = QuantizeLinear(s, ss, zs)
      sf = DequantizeLinear(sq, ss, zs)
      p = Mul(cf, sf)
      y = QuantizeLinear(p, sy, zy)
    }""")
    weights = rng.integers(-127, 128, (16, 8, 3, 3)).astype(np.int8)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    compiled = onnxc.compile(model)
    *_, last = compiled.explain().kernels  # the first puts channels last
    assert last.kind.startswith("integer conv") and {o.op_type for o in last.origins} >= {"Conv", "Sigmoid", "Mul"}
    x = rng.integers(0, 256, (1, 8, 24, 24)).astype(np.uint8)
    np.testing.assert_array_equal(compiled(x=x)["y"], interpret(passed(model), [x])[0])
    (want,) = InferenceSession(model.SerializeToString()).run(None, {"x": x})
    apart = np.abs(compiled(x=x)["y"].astype(int) - want.astype(int))  # it adds up floats, and ties fall otherwise
    assert apart.max() <= 1 and (apart > 0).mean() < 0.01
