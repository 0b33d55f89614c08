"""Products with packed weights: the kernel (wq.h) compiled alone against float64, and models that lead to it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxc
from onnxc.codegen.cpp.weight_only import pack_codes, pack_rows, packed_bytes, zero_type
from onnxc.export import to_onnx
from onnxc.frontends import onnx_file
from onnxc.ir.graph import Graph
from onnxc.passes.pipeline import PassOptions, passes
from onnxc.primitives.interpret import interpret
from onnxc.primitives.verify import verify
from onnxc.tools.compare import compare
from onnxc.tools.compare.verdict import Verdict
from tests.native_library import native_library
from tests.targets import is_gpu

LEVELS = {"native": ["-march=native"], "avx2": ["-march=x86-64-v3"], "sse2": ["-march=x86-64"]}

SOURCE = r"""
#include "wq.h"
alignas(64) static char scratch[WQ_SCRATCH * 4];

// Every task of a grid made for `threads` threads, last task first.
template <class Q, class Z>
static void run(const f32 *a, i64 sm, i64 sk, const u8 *q, const f32 *s, const void *z, f32 *c, i64 ldc, i64 M, i64 N,
                i64 K, i64 bs, i64 threads) {
  const WqMat w{q, s, z, N, K, bs};
  const WqGrid g = wq_grid(M, w, threads);
  const auto epi = [=](i64 m, i64 n, vf v, auto lanes) OX_LAMBDA { stl(c + m * ldc + n, v, lanes); };
  for (i64 t = g.tasks; t-- > 0;)
    if (sk == 1)
      wq_task<Q, Z, WQ_ANY>(g, t, WqRows{a, sm}, w, M, (f32 *)scratch, epi);
    else
      wq_task<Q, Z, WQ_MANY>(g, t, WqStrided{a, sm, sk}, w, M, (f32 *)scratch, epi);
}
#define ENTRY(NAME, Q, Z)                                                                                     \
  extern "C" void NAME(const f32 *a, i64 sm, i64 sk, const u8 *q, const f32 *s, const void *z, f32 *c,        \
                       i64 ldc, i64 M, i64 N, i64 K, i64 bs, i64 threads) {                                   \
    run<Q, Z>(a, sm, sk, q, s, z, c, ldc, M, N, K, bs, threads);                                              \
  }
#define ENTRIES(BITS)                                                                                         \
  ENTRY(run_##BITS##_WqNone, WqInt<BITS>, WqNone)                                                             \
  ENTRY(run_##BITS##_WqByte, WqInt<BITS>, WqByte) ENTRY(run_##BITS##_WqFloat, WqInt<BITS>, WqFloat)
ENTRIES(2) ENTRIES(4) ENTRIES(8)
ENTRY(run_float16_WqNone, WqHalf, WqNone) ENTRY(run_bfloat16_WqNone, WqBf16, WqNone)
extern "C" i64 panel_width() { return WQ_NR; }
"""


@dataclass
class Kernel:
    """The compiled test library."""

    lib: ctypes.CDLL

    def matmul(
        self, a: np.ndarray, codes: np.ndarray, bits: int, block: int, scales: np.ndarray, zeros: np.ndarray | None,
        threads: int = 1,
    ) -> np.ndarray:  # fmt: skip
        """a @ weights; the output has five guard columns and a guard row, which must stay untouched."""
        (m, k), n = a.shape, codes.shape[1]
        panel = int(self.lib.panel_width())
        q = np.zeros(packed_bytes(k, n, bits, block, panel), np.uint8)
        pack_codes(codes, bits, block, panel, q)
        kind, points = zero_type(zeros)
        packed = [_packed_rows(r, panel) if r is not None else None for r in (scales, points)]
        c = np.full((m + 1, n + 5), 99, np.float32)
        name = f"run_{codes.dtype.name if bits == 16 else bits}_{kind}"
        arrays = [ctypes.c_void_p(0 if x is None else x.ctypes.data) for x in (a, q, *packed, c)]
        steps = [ctypes.c_longlong(s // 4) for s in a.strides]
        rest = [ctypes.c_longlong(x) for x in (n + 5, m, n, k, block, threads)]
        getattr(self.lib, name)(arrays[0], *steps, *arrays[1:], *rest)
        assert (c[m] == 99).all() and (c[:, n:] == 99).all(), "wrote outside of C"
        return c[:m, :n]


def _packed_rows(rows: np.ndarray, panel: int) -> np.ndarray:
    out = np.zeros(-(-rows.shape[1] // panel) * panel * len(rows) * rows.itemsize, np.uint8)
    pack_rows(rows, panel, out)
    return out


@pytest.fixture(scope="module", params=list(LEVELS))
def kernel(request: pytest.FixtureRequest, session_folder: Path) -> Kernel:
    library = native_library(session_folder, SOURCE, ["-Wall", "-Wextra", "-Werror", *LEVELS[request.param]])
    return Kernel(ctypes.CDLL(str(library)))


# M, K, N, block: few and many rows, blocks that are no multiple of a unit, of K or of a chain, several blocks of rows
SHAPES = [
    (1, 1, 1, 1), (1, 64, 32, 64), (3, 100, 70, 32), (2, 129, 33, 16), (5, 257, 100, 257), (8, 1000, 65, 128),
    (1, 700, 129, 700), (9, 333, 40, 37), (17, 640, 130, 128), (150, 1030, 90, 16), (4, 90, 200, 45),
    (20, 900, 200, 300), (1, 31, 17, 5), (33, 4000, 64, 4000), (160, 2600, 300, 100), (13, 7, 7, 7),
]  # fmt: skip


@pytest.mark.parametrize("zeros", ["none", "whole", "float"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_kernel_against_float64(kernel: Kernel, bits: int, zeros: str) -> None:
    rng = np.random.default_rng(bits)
    for m, k, n, block in SHAPES:
        half = 1 << (bits - 1)
        codes = rng.integers(-half, half, (k, n)).astype(np.int8)
        groups = -(-k // block)
        scales = (rng.random((groups, n)) + 0.1).astype(np.float32)
        points = None if zeros == "none" else rng.integers(-9, 9, (groups, n)).astype(np.float32)
        points = points + np.float32(0.25) if points is not None and zeros == "float" else points
        row = np.arange(k) // block
        exact = (codes - (np.float64(0) if points is None else points[row])) * scales.astype(np.float64)[row]
        a = rng.standard_normal((m, k)).astype(np.float32)
        expected = a.astype(np.float64) @ exact
        bound = 1e-6 * np.linalg.norm(a, axis=1).max() * np.linalg.norm(exact, axis=0).max()
        first = kernel.matmul(a, codes, bits, block, scales, points)
        assert np.abs(first - expected).max() <= bound, (m, k, n, block)
        np.testing.assert_array_equal(kernel.matmul(a, codes, bits, block, scales, points, threads=3), first)
        wide = np.zeros((m, k, 3), np.float32)
        wide[:, :, 1] = a
        strided = kernel.matmul(wide[:, :, 1], codes, bits, block, scales, points)
        assert np.abs(strided - expected).max() <= bound, (m, k, n, block)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_halves_are_converted_exactly(kernel: Kernel, dtype: Any) -> None:
    """Times one, every number of 16 bits: denormals, infinities and NaN, too."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(1024, 64)
    for row in (0, 1, 31, 1023):
        a = np.zeros((1, 1), np.float32) + 1
        codes = np.ascontiguousarray(numbers[row : row + 1])
        scales = np.ones((1, 64), np.float32)
        found = kernel.matmul(a, codes, 16, 1, scales, None)[0]
        np.testing.assert_array_equal(found, codes[0].astype(np.float32))
    weights = np.random.default_rng(0).standard_normal((300, 77)).astype(dtype)
    a = np.random.default_rng(1).standard_normal((14, 300)).astype(np.float32)
    found = kernel.matmul(a, weights, 16, 300, np.ones((1, 77), np.float32), None)
    np.testing.assert_allclose(found, a.astype(np.float64) @ weights.astype(np.float64), atol=1e-4)


def test_infinities_and_nan_of_activations(kernel: Kernel) -> None:
    """Zero points are subtracted before the product: an infinity times a weight of zero is NaN, else infinite."""
    codes = np.array([[1, -2], [0, 3]], np.int8)
    points, scales = np.array([[0, -2]], np.float32), np.ones((1, 2), np.float32)
    for m in (1, 20):
        a = np.tile(np.array([[np.inf, 0]], np.float32), (m, 1))
        np.testing.assert_array_equal(
            kernel.matmul(a, codes, 4, 2, scales, points), np.tile([[np.inf, np.nan]], (m, 1))
        )


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [2, 4])
def test_few_rows_of_any_size_of_numbers(kernel: Kernel, bits: int, zeros: bool) -> None:
    """Sums of positive numbers lose no more than others; powers of two change no bit, and denormals count."""
    rng = np.random.default_rng(bits)
    half = 1 << (bits - 1)
    for m, k, n, block in [(1, 1000, 150, 16), (2, 500, 70, 32), (1, 4100, 40, 128), (2, 1027, 33, 256), (1, 7, 3, 7)]:
        codes = rng.integers(-half, half, (k, n)).astype(np.int8)
        groups = -(-k // block)
        scales = (rng.random((groups, n)) + 0.5).astype(np.float32)
        points = rng.integers(-half, half, (groups, n)).astype(np.float32) if zeros else None
        row = np.arange(k) // block
        exact = (codes - (np.float64(0) if points is None else points[row])) * scales.astype(np.float64)[row]
        a = (rng.random((m, k)) + 0.5).astype(np.float32)
        found = kernel.matmul(a, codes, bits, block, scales, points)
        bound = np.linalg.norm(a, axis=1).max() * np.linalg.norm(exact, axis=0).max()
        assert np.abs(found - a.astype(np.float64) @ exact).max() <= 1.5e-6 * bound, (m, k, n, block)
        for power in (-100, 90, 105):
            factor = np.float32(2.0**power)
            scaled = kernel.matmul(a * factor, codes, bits, block, scales, points)
            np.testing.assert_array_equal(scaled, found * factor)
        tiny = a * np.float32(2.0**-145)
        bound = 2.0**-149 * (groups + 1)
        got = kernel.matmul(tiny, codes, bits, block, scales, points)
        assert np.abs(got - tiny.astype(np.float64) @ exact).max() <= bound


@pytest.mark.parametrize("bits", [2, 4])
def test_a_row_does_not_depend_on_the_other(kernel: Kernel, bits: int) -> None:
    """Nor does a column: what overflows, and infinities and NaN, stay where they are."""
    rng = np.random.default_rng(bits)
    half = 1 << (bits - 1)
    codes, scales = rng.integers(-half, half, (300, 90)).astype(np.int8), np.ones((10, 90), np.float32)
    codes[7, 5:] = 0
    a = rng.standard_normal((2, 300)).astype(np.float32)
    both = kernel.matmul(a, codes, bits, 30, scales, None)
    for value in (np.inf, np.nan, 3e38, 1e-42, 1e32):
        a[1] = value
        np.testing.assert_array_equal(kernel.matmul(a, codes, bits, 30, scales, None)[0], both[0])
    one = a[:1].copy()
    codes[8] = codes[7]
    one[0, 7:9] = 0
    before = kernel.matmul(one, codes, bits, 30, scales, None)[0]
    one[0, 7], one[0, 8] = 3e38, 1e30
    found = kernel.matmul(one, codes, bits, 30, scales, None)[0]
    np.testing.assert_array_equal(found[5:], before[5:])
    with np.errstate(over="ignore", invalid="ignore"):
        expected = one[0].astype(np.float64) @ codes.astype(np.float64)
        np.testing.assert_allclose(found, expected.astype(np.float32), rtol=1e-5, atol=1e-4)


# ---------------------------------------------------------------- models


def model_of(
    nodes: list[onnx.NodeProto], m: int | str, k: int, n: int, weights: dict[str, np.ndarray]
) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [m, k])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [m, n])
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(v, name) for name, v in weights.items()])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def n_bits(
    m: int | str, k: int, n: int, bits: int, block: int, zeros: str = "", bias: bool = False, level: int = 0
) -> onnx.ModelProto:
    """A MatMulNBits; zeros are "", "packed" or "float"."""
    rng = np.random.default_rng(k * n + bits)
    blocks = -(-k // block)
    weights = {"q": rng.integers(0, 256, (n, blocks, block * bits // 8), dtype=np.uint8),
               "s": ((rng.random((n, blocks)) + 0.5) / 16).astype(np.float32)}  # fmt: skip
    inputs = ["x", "q", "s"]
    if zeros:
        inputs.append("z")
        packed = rng.integers(0, 256, (n, (blocks * bits + 7) // 8), dtype=np.uint8)
        weights["z"] = packed if zeros == "packed" else (rng.random((n, blocks)) * (1 << bits)).astype(np.float32)
    if bias:
        inputs += [""] * (5 - len(inputs)) + ["b"]
        weights["b"] = rng.standard_normal(n).astype(np.float32)
    node = helper.make_node("MatMulNBits", inputs, ["y"], domain="com.microsoft", K=k, N=n, bits=bits,
                            block_size=block, accuracy_level=level)  # fmt: skip
    return model_of([node], m, k, n, weights)


def dequantized(
    m: int, k: int, n: int, dtype: str, scales: str, zeros: bool = False, form: str = "matmul"
) -> onnx.ModelProto:
    """DequantizeLinear before MatMul (form "matmul"), Transpose and MatMul, or Gemm with a transposed operand."""
    rng = np.random.default_rng(k + n)
    store, low, high = {"int8": (np.int8, -128, 128), "uint8": (np.uint8, 0, 256), "int4": (ml_dtypes.int4, -8, 8),
                        "uint4": (ml_dtypes.uint4, 0, 16)}[dtype]  # fmt: skip
    shape = (k, n) if form == "matmul" else (n, k)
    inner = shape.index(k)
    at = {"tensor": (), "channel": (n,), "block": tuple(-(-d // 32) if i == inner else d for i, d in enumerate(shape))}
    weights = {"q": rng.integers(low, high, shape).astype(store),
               "s": np.asarray((rng.random(at[scales]) + 0.5) / 16, np.float32)}  # fmt: skip
    if zeros:
        weights["z"] = np.asarray(rng.integers(low, high, at[scales])).astype(store)
    blocks: dict[str, int] = {"axis": inner, "block_size": 32} if scales == "block" else {"axis": 1 - inner}
    nodes = [helper.make_node("DequantizeLinear", list(weights), ["w"], **blocks)]
    if form == "gemm":
        weights["c"] = rng.standard_normal(n).astype(np.float32)
        nodes.append(helper.make_node("Gemm", ["x", "w", "c"], ["y"], transB=1))
    else:
        last = "w"
        if form == "transposed":
            nodes.append(helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]))
            last = "t"
        nodes.append(helper.make_node("MatMul", ["x", last], ["y"]))
    return model_of(nodes, m, k, n, weights)


def reference(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    out: np.ndarray = ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})[0]
    return out


def activations(rows: int, k: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, k)).astype(np.float32)


def n_bits_weights(model: onnx.ModelProto) -> np.ndarray:
    """The weights [K, N] of a MatMulNBits in float64."""
    at = {a.name: a.i for a in model.graph.node[0].attribute}
    given = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    k, n, bits, block = (at[key] for key in ("K", "N", "bits", "block_size"))

    def unpacked(x: np.ndarray) -> np.ndarray:
        parts = [(x >> s) & ((1 << bits) - 1) for s in range(0, 8, bits)]
        return np.stack(parts, -1).reshape(n, -1).astype(np.float64)

    zeros = given.get("z", np.full((n, -(-k // block)), 1 << (bits - 1), np.float64))
    zeros = unpacked(zeros) if zeros.dtype == np.uint8 else zeros.astype(np.float64)
    group = given.get("g", np.arange(k) // block)
    return ((unpacked(given["q"])[:, :k] - zeros[:, group]) * given["s"][:, group]).T


def check_model(
    model: onnx.ModelProto, rows: int, k: int, most_bytes: float, weights: np.ndarray | None = None
) -> None:
    compiled = onnxc.compile(model)
    report = compiled.explain()
    if not is_gpu():
        assert [kernel.kind for kernel in report.kernels] == ["matmul_quantized"]
        assert report.memory.weights <= most_bytes
    x = activations(rows, k)
    expected = reference(model, x) if weights is None else x @ weights
    found = compiled(x)["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.every_target
@pytest.mark.parametrize("zeros", ["", "packed", "float"])
@pytest.mark.parametrize(("bits", "block"), [(2, 16), (4, 32), (4, 128), (8, 32)])
def test_n_bits_stay_packed(bits: int, block: int, zeros: str) -> None:
    k, n, rows = 520, 192, 1 if bits == 4 else 21
    padded = -(-k // block) * block
    size = padded * n * bits / 8 + padded // block * n * (8 if zeros == "float" else 5)
    model = n_bits(rows, k, n, bits, block, zeros, bias=bits == 4)
    unknown = bits == 8 and zeros == "float"  # to onnxruntime
    check_model(model, rows, k, 1.05 * size + 4096, n_bits_weights(model) if unknown else None)


@pytest.mark.every_target
@pytest.mark.parametrize("zeros", ["", "packed"])
@pytest.mark.parametrize("order", ["plain", "permuted", "uneven"])
def test_groups_by_index(order: str, zeros: str) -> None:
    """g_idx says whose scale a column has. onnxruntime leaves zero points out with it: so float64 judges."""
    k, n = 300, 130
    rng = np.random.default_rng(3)
    model = n_bits(3, k, n, 4, 32, zeros)
    group = np.arange(k, dtype=np.int32) // 32
    group = {"plain": group, "permuted": rng.permutation(group), "uneven": rng.integers(0, 10, k, np.int32)}[order]
    model.graph.initializer.append(numpy_helper.from_array(group, "g"))
    model.graph.node[0].input.extend(["g"] if zeros else ["", "g"])
    x = activations(3, k)
    expected = x @ n_bits_weights(model)
    compiled = onnxc.compile(model)
    packed = "matmul_quantized" in [kernel.kind for kernel in compiled.explain().kernels]
    assert is_gpu() or packed == (order != "uneven")
    np.testing.assert_allclose(compiled(x)["y"], expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.every_target
@pytest.mark.parametrize("form", ["matmul", "transposed", "gemm"])
@pytest.mark.parametrize("scales", ["tensor", "channel", "block"])
@pytest.mark.parametrize(("dtype", "zeros"), [("int8", False), ("uint8", True), ("int4", False), ("uint4", True)])
def test_dequantized_weights_stay_packed(dtype: str, zeros: bool, scales: str, form: str) -> None:
    k, n = 320, 192
    size = k * n * (0.5 if "4" in dtype else 1) + (k // 32 if scales == "block" else 1) * n * 5
    check_model(dequantized(4, k, n, dtype, scales, zeros, form), 4, k, 1.05 * size + 4096)


@pytest.mark.every_target
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_stay_packed(dtype: str) -> None:
    k, n = 320, 128
    weights = activations(k, n).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
    nodes = [
        helper.make_node("Cast", ["w"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x", "f"], ["y"]),
    ]
    compiled = onnxc.compile(model_of(nodes, 3, k, n, {"w": weights}))
    assert is_gpu() or compiled.explain().memory.weights <= 2 * k * n + 4 * n + 4096
    x = activations(3, k)
    np.testing.assert_allclose(compiled(x)["y"], x @ weights.astype(np.float32), rtol=1e-4, atol=1e-4)


@pytest.mark.every_target
def test_float16_models_keep_float16_weights() -> None:
    """Products are summed in float32 and rounded once."""
    k, n = 512, 192
    weights = {"w": (activations(k, n) / 16).astype(np.float16), "b": activations(1, n)[0].astype(np.float16)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Add", ["p", "b"], ["y"])]
    model = model_of(nodes, 3, k, n, weights)
    for info in (model.graph.input[0], model.graph.output[0]):
        info.type.tensor_type.elem_type = TensorProto.FLOAT16
    compiled = onnxc.compile(model)
    assert is_gpu() or "matmul_quantized" in [kernel.kind for kernel in compiled.explain().kernels]
    x = activations(3, k).astype(np.float16)
    expected = x.astype(np.float64) @ weights["w"].astype(np.float64) + weights["b"]
    np.testing.assert_allclose(compiled(x)["y"], expected, rtol=2e-3, atol=2e-3)


@pytest.mark.every_target
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_known_only_at_run_time(bits: int) -> None:
    """One program for decoding and prefill; any thread count gives the same bits."""
    model = n_bits("rows", 700, 200, bits, 32, "packed", bias=True)
    compiled = [onnxc.compile(model, threads=t) for t in (1, 2)]
    for rows in (0, 1, 2, 3, 5, 8, 9, 12, 13, 40, 150):
        x = activations(rows, 700)
        found = [c(x)["y"] for c in compiled]
        np.testing.assert_array_equal(*found)
        if rows:
            expected = reference(model, x)
            np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_bias_activation_and_residual_run_in_the_epilogue() -> None:
    model = n_bits(2, 256, 256, 4, 32)
    (node,) = model.graph.node
    node.output[0] = "p"
    model.graph.initializer.append(numpy_helper.from_array(activations(1, 256)[0], "b"))
    for op, inputs, out in (("Add", ["p", "b"], "q1"), ("Gelu", ["q1"], "g"), ("Add", ["g", "x"], "y")):
        model.graph.node.append(helper.make_node(op, inputs, [out]))
    compiled = onnxc.compile(model)
    assert len(compiled.explain().kernels) == 1
    x = activations(2, 256)
    np.testing.assert_allclose(compiled(x)["y"], reference(model, x), rtol=1e-4, atol=1e-4)


@pytest.mark.every_target
def test_batches_share_the_weights() -> None:
    model = n_bits(1, 512, 160, 4, 32)
    for info, last in ((model.graph.input[0], 512), (model.graph.output[0], 160)):
        info.CopyFrom(helper.make_tensor_value_info(info.name, TensorProto.FLOAT, ["b", "s", last]))
    compiled = onnxc.compile(model)
    x = activations(15, 512).reshape(3, 5, 512)
    expected = reference(model, x)
    np.testing.assert_allclose(compiled(x)["y"], expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64"])
def test_other_cpu_levels(level: str) -> None:
    for bits, rows in ((2, 1), (4, 3), (8, 30)):
        model = n_bits(rows, 300, 130, bits, 32, "packed")
        x = activations(rows, 300)
        expected = reference(model, x)
        found = onnxc.compile(model, cpu=level)(x)["y"]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


# ---------------------------------------------------------------- the pass


def stages(model: onnx.ModelProto, options: PassOptions | None = None) -> Iterator[tuple[str, Graph]]:
    graph = onnx_file.load(model)
    for name, run in passes(options or PassOptions()):
        graph = run(graph)
        verify(graph, after=name)
        yield name, graph


@pytest.mark.parametrize("zeros", ["", "packed", "float"])
def test_every_stage_runs_in_onnxruntime(zeros: str) -> None:
    model = n_bits(3, 300, 130, 4, 32, zeros, bias=True)
    x = activations(3, 300)
    expected = reference(model, x)
    for name, graph in stages(model):
        found = reference(to_onnx(graph), x)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max(), err_msg=name)
    assert "matmul_quantized" in [n.op for n in graph.nodes]
    (found,) = interpret(graph, [x])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_the_pass_can_be_switched_off() -> None:
    *_, (_, graph) = stages(n_bits(3, 300, 130, 4, 32), PassOptions(weight_only=False))
    assert "matmul" in [n.op for n in graph.nodes]


def found_by_pass(model: onnx.ModelProto) -> dict[str, Any] | None:
    *_, (_, graph) = stages(model)
    return next((dict(n.attrs) for n in graph.nodes if n.op == "matmul_quantized"), None)


def test_block_and_bits_are_read_off_the_weights() -> None:
    assert found_by_pass(dequantized(1, 320, 192, "int8", "block")) == {"bits": 8, "block": 32}
    assert found_by_pass(dequantized(1, 320, 192, "int8", "channel")) == {"bits": 8, "block": 320}
    model = dequantized(1, 320, 192, "int8", "channel")
    narrow = numpy_helper.to_array(model.graph.initializer[0]) % 4 - 2
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(narrow.astype(np.int8), "q"))
    assert found_by_pass(model) == {"bits": 2, "block": 320}


def test_what_packing_cannot_say_is_left_alone() -> None:
    infinite = dequantized(1, 320, 192, "int8", "channel")
    infinite.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.full(192, np.inf, np.float32), "s"))
    assert found_by_pass(infinite) is None
    assert found_by_pass(dequantized(1, 20000, 4, "int8", "channel")) is None  # panels would be mostly empty
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s"], ["w"], axis=0),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    each_row = {"q": np.ones((320, 192), np.int8), "s": np.linspace(1, 2, 320, dtype=np.float32)}
    assert found_by_pass(model_of(nodes, 1, 320, 192, each_row)) is None  # as many scales as weights would be


@pytest.mark.every_target
def test_integers_that_wrap_around_are_taken_as_they_are() -> None:
    """A narrowing cast, a difference in eight bits, and two differences in turn: the answer stays right."""
    rng = np.random.default_rng(5)
    k, n = 256, 192
    for steps in (
        [("Cast", ["q"], {"to": TensorProto.INT8})],
        [("Cast", ["q"], {"to": TensorProto.INT8}), ("Sub", ["", "z"], {})],
        [("Cast", ["q"], {"to": TensorProto.FLOAT}), ("Sub", ["", "f"], {}), ("Sub", ["", "f"], {})],
        [("Sub", ["q", "w"], {})],
    ):
        weights = {"q": rng.integers(-300, 300, (k, n)).astype(np.int32), "z": np.full(n, 100, np.int8),
                   "w": np.full(n, 77, np.int32), "f": np.full(n, 3, np.float32),
                   "s": rng.random(n, np.float32)}  # fmt: skip
        nodes, last = [], ""
        for number, (op, inputs, attrs) in enumerate([*steps, ("Cast", [""], {"to": TensorProto.FLOAT})]):
            nodes.append(helper.make_node(op, [i or last for i in inputs], [f"t{number}"], **attrs))
            last = f"t{number}"
        nodes += [helper.make_node("Mul", [last, "s"], ["m"]), helper.make_node("MatMul", ["x", "m"], ["y"])]
        x = activations(2, k)
        model = model_of(nodes, 2, k, n, weights)
        expected = reference(model, x)
        found = onnxc.compile(model)(x)["y"]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_an_accuracy_level_is_the_references_liberty() -> None:
    """onnxruntime rounds what is multiplied to 8 bits, where the model allows it."""
    given = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    found = compare(n_bits(4, 64, 16, 4, 32, level=4), {"x": given}, layers=True)
    assert found.agree and found.outputs[0].verdict is Verdict.THEIRS_WORSE, str(found)
    assert "accuracy_level lets onnxruntime round" in found.layers[0].note
