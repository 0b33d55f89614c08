"""Integer products: the kernels bit by bit against the interpreter, the operators against onnx's reference evaluator,
and models of QuantizeLinear and DequantizeLinear against the same in float64."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import onnxc
from onnxc.codegen.cpp.integer import byte_shifts
from onnxc.errors import ShapeError
from onnxc.frontends import onnx_file
from onnxc.ir import dtypes
from onnxc.ir.graph import Graph
from onnxc.ir.types import TensorType
from onnxc.passes.pipeline import PassOptions, passes
from onnxc.primitives.builder import Builder
from onnxc.primitives.interpret import interpret
from onnxc.primitives.verify import verify
from onnxc.runtime.cpu import has_byte_products, level, missing_features
from tests.compile_harness import Compiled, CompiledForGpu, compile_graphs
from tests.targets import is_gpu

NARROW = (np.uint8, np.int8, np.int16)
BYTES = (np.uint8, np.int8)
LEVELS = [
    name
    for name in (["native", "x86-64", "x86-64-v3", "x86-64-v4"] if platform.machine() == "x86_64" else ["native"])
    if not missing_features(level(name).features)
]


def numbers(shape: Sequence[int], dtype: Any, seed: int = 0) -> np.ndarray:
    """Numbers of the whole range, a third of them its ends."""
    rng, info = np.random.default_rng([seed, *shape]), np.iinfo(dtype)
    ends = rng.choice([info.min, info.max], shape)
    return np.where(rng.random(shape) < 0.3, ends, rng.integers(info.min, info.max + 1, shape)).astype(dtype)


def of_array(array: np.ndarray) -> TensorType:
    return TensorType(dtypes.from_numpy(array.dtype), array.shape)


def check(cases: list[tuple[Graph, list[np.ndarray]]], cpu: str, kind: str | None = None) -> None:
    """Every graph gives the interpreter's bits, with any number of threads."""
    for compiled, (graph, inputs) in zip(_compiled([g for g, _ in cases], cpu), cases, strict=True):
        if kind is not None and isinstance(compiled, Compiled):
            assert any(kind in call.kind for call in compiled.program.calls), [c.kind for c in compiled.program.calls]
        for threads in (1, 3):
            for got, want in zip(compiled(*inputs, threads=threads), interpret(graph, inputs), strict=True):
                np.testing.assert_array_equal(got, want)


def _compiled(graphs: list[Graph], cpu: str) -> list[Compiled] | list[CompiledForGpu]:
    for graph in graphs:
        verify(graph)
    return compile_graphs(graphs, cpu=level(cpu))


# ---------------------------------------------------------------- matmul


def matmul_case(x: np.ndarray, y: np.ndarray, constant: bool = True) -> tuple[Graph, list[np.ndarray]]:
    b = Builder()
    left = b.input(of_array(x), "x")
    right = b.constant(y) if constant else b.input(of_array(y), "y")
    return b.graph([b.one("matmul", left, right, wide=True)]), [x] if constant else [x, y]


@pytest.mark.parametrize("cpu", LEVELS)
def test_matmul_of_all_types_and_odd_sizes(cpu: str) -> None:
    """Sums of many products of the largest numbers wrap as int32 does."""
    cases = []
    sizes = [(1, 1, 1), (1, 7, 3), (1, 300, 129), (2, 17, 33), (5, 4, 64), (7, 31, 17), (13, 128, 47), (29, 2, 1)]
    sizes += [(12, 8, 5), (6, 12, 40)]  # rows of whole quads, which are read in place
    for k, (a, b) in enumerate(itertools.product(NARROW, NARROW)):
        for m, depth, n in sizes[k % 2 :: 2]:
            cases.append(matmul_case(numbers((m, depth), a), numbers((depth, n), b, 1)))
    check(cases, cpu, "integer matmul")


@pytest.mark.parametrize("cpu", LEVELS)
def test_matmul_without_constants(cpu: str) -> None:
    cases = [
        matmul_case(numbers(left, a), numbers(right, b, 1), constant=False)
        for a, b in itertools.product(NARROW, NARROW)
        for left, right in [((3, 9), (9, 5)), ((2, 1, 6, 17), (3, 17, 70))]
    ]
    cases += [  # one row by several panels at once, and more rows than fit into one block
        matmul_case(numbers(left, np.uint8), numbers(right, b, 1), constant=False)
        for b in BYTES
        for left, right in [((1, 301), (301, 167)), ((151, 10), (10, 40))]
    ]
    check(cases, cpu, "integer matmul")


@pytest.mark.parametrize("cpu", LEVELS)
@pytest.mark.parametrize(("turned", "constant"), [(False, False), (True, False), (False, True)])
def test_matmul_less_zero_points(cpu: str, turned: bool, constant: bool) -> None:
    """B is packed at compile time; else before, or by tasks, whole quads of its columns side by side or not."""
    cases = []
    sizes = [(1, 1, 1), (1, 301, 167), (2, 6, 70), (5, 64, 33), (47, 65, 40), (151, 12, 64), (3, 0, 5)]
    for k, (left, right) in enumerate(itertools.product(BYTES, BYTES)):
        points = [(0, 7), (-128, 0), (127, -128), (255, 128), (-255, 255), (3, -1)]
        for (m, depth, n), zeros in zip(sizes, itertools.cycle(points[k:] + points[:k]), strict=False):
            count = 1 if constant else 3
            x, y = numbers((3, m, depth), left), numbers((count, n, depth) if turned else (count, depth, n), right, 1)
            b = Builder()
            whole, other = b.input(of_array(x), "x"), b.constant(y) if constant else b.input(of_array(y), "y")
            other = b.swap(other, 1, 2) if turned else other
            out = b.one("matmul", whole, other, wide=True, zeros=zeros)
            cases.append((b.graph([out]), [x] if constant else [x, y]))
    check(cases, cpu, "integer matmul")


def test_zero_points_of_what_is_no_byte_are_refused() -> None:
    b = Builder()
    x, y = (b.input(TensorType(dtypes.int16, (2, 2)), name) for name in "xy")
    with pytest.raises(ShapeError, match="zero points are for 8 bits"):
        b.one("matmul", x, y, wide=True, zeros=(1, 0))


@pytest.mark.parametrize("cpu", LEVELS)
@pytest.mark.parametrize("left", BYTES)
def test_matmul_of_many_rows(cpu: str, left: Any) -> None:
    """Blocks of rows that CPUs with matrix registers divide into parts of 16 rows at most, and sums into runs of 64."""
    sizes = [(4, 1024, 70), (15, 511, 70), (16, 512, 64), (17, 1024, 31), (31, 1100, 70), (33, 400, 33), (47, 333, 65),
             (48, 256, 64), (49, 2052, 40), (135, 129, 96), (145, 72, 33), (290, 1090, 35)]  # fmt: skip
    cases = [matmul_case(numbers((m, k), left), numbers((k, n), np.int8, 1)) for m, k, n in sizes]
    cases += [matmul_case(numbers((m, k), left), numbers((k, n), np.int8, 1), constant=False) for m, k, n in sizes[3:8]]
    check(cases, cpu, "integer matmul")


@pytest.mark.parametrize("cpu", LEVELS)
@pytest.mark.parametrize("left", BYTES)
def test_matmul_of_shifted_bytes(cpu: str, left: Any) -> None:
    """Weights less their zero points: columns of 256 numbers in a row, each from elsewhere on."""
    cases = []
    for m, k, n in [(1, 9, 3), (3, 70, 33), (50, 129, 40), (150, 64, 65)]:
        first = np.random.default_rng(n).integers(-3000, 3000, n)
        first[::3] = -128
        y = (numbers((k, n), np.uint8, 1) + first).astype(np.int16)
        cases.append(matmul_case(numbers((m, k), left), y))
    check(cases, cpu, "integer matmul")


def test_which_weights_are_bytes() -> None:
    columns = np.array([[-128, 0, 256, -255], [127, 255, 511, 0]], np.int16)
    shifts = byte_shifts(columns)
    assert shifts is not None and shifts.tolist() == [0, 128, 384, -127]
    assert np.array_equal((columns - shifts).astype(np.int8) + shifts, columns)
    assert byte_shifts(np.array([[-128], [128]], np.int16)) is None
    assert byte_shifts(np.zeros((0, 3), np.uint8)) is not None


@pytest.mark.parametrize("cpu", LEVELS)
def test_matmul_through_views(cpu: str) -> None:
    cases = []
    for constant in (False, True):
        x, y = numbers((4, 11, 6), np.uint8), numbers((4, 19, 6), np.int8, 1)
        b = Builder()
        left = b.input(of_array(x), "x")
        right = b.constant(y) if constant else b.input(of_array(y), "y")
        out = b.one("matmul", left, b.swap(right, 1, 2), wide=True)
        square = b.one("matmul", b.swap(left, 1, 2), left, wide=True)
        cases.append((b.graph([out, square]), [x] if constant else [x, y]))
    check(cases, cpu)


@pytest.mark.parametrize("rows", [8, 40])
def test_rows_from_the_last_to_the_first(rows: int) -> None:
    """Nothing is read before the first row, where inaccessible memory lies: a block may take rows behind its end."""
    x, y = numbers((rows, 512), np.uint8), numbers((512, 70), np.int8, 1)
    b = Builder()
    out = b.one("matmul", b.flip(b.input(of_array(x), "x"), [0]), b.constant(y), wide=True)
    check([(b.graph([out]), [x])], "native", "integer matmul")


def test_no_products_and_no_rows() -> None:
    cases = [
        matmul_case(numbers((3, 0), np.uint8), numbers((0, 5), np.int8)),
        matmul_case(numbers((0, 4), np.uint8), numbers((4, 5), np.int8)),
        matmul_case(numbers((3, 4), np.uint8), numbers((4, 0), np.int8)),
    ]
    check(cases, "native")


def test_saturating_instructions_are_not_used() -> None:
    """vpmaddubsw would give 32767 for the sum of two products."""
    x, y = np.full((6, 64), 255, np.uint8), np.full((64, 32), 127, np.int8)
    for cpu in LEVELS:
        check([matmul_case(x, y), matmul_case(x, -y - 1), matmul_case(x.view(np.int8), y)], cpu)


# ---------------------------------------------------------------- convolution


def conv_case(
    x: tuple[int, ...], w: tuple[int, ...], types: tuple[Any, Any] = (np.uint8, np.int8), groups: int = 1,
    stride: int = 1, dilation: int = 1, low: int = 0, high: int = 0, fill: int | None = None,
) -> tuple[Graph, list[np.ndarray]]:  # fmt: skip
    image, weights = numbers(x, types[0]), numbers(w, types[1], 1)
    b = Builder()
    n = len(x) - 2
    operands = [b.input(of_array(image), "x"), b.constant(weights)]
    inputs = [image]
    if fill is not None:
        inputs.append(np.asarray(fill, types[0]))
        operands.append(b.input(of_array(inputs[-1]), "fill") if fill % 2 else b.constant(inputs.pop()))
    out = b.one("conv", *operands, strides=(stride,) * n, low=(low,) * n, high=(high,) * n, dilations=(dilation,) * n,
                groups=groups, wide=True)  # fmt: skip
    return b.graph([out]), inputs


@pytest.mark.parametrize("cpu", LEVELS)
def test_conv_shapes(cpu: str) -> None:
    cases = [
        conv_case((1, 3, 9, 11), (5, 3, 3, 3), low=1, high=1, fill=7),
        conv_case((2, 5, 8, 7), (17, 5, 3, 2), stride=2, low=1, high=0, fill=8),
        conv_case((1, 16, 5, 5), (40, 16, 1, 1)),
        conv_case((2, 8, 4, 7), (5, 8, 1, 1)),
        conv_case((1, 16, 4, 6), (12, 4, 1, 1), groups=4),
        conv_case((1, 8, 4, 6), (3, 8, 1, 1), low=1, high=1, fill=9),
        conv_case((1, 7, 12, 10), (4, 7, 3, 3), dilation=2, low=2, high=2),
        conv_case((1, 6, 6, 9), (9, 2, 3, 3), groups=3, low=1, high=2, fill=100),
        conv_case((2, 4, 13), (6, 4, 5), stride=3, low=2, high=2, fill=3),
        conv_case((1, 1, 7, 7), (1, 1, 7, 7), low=3, high=3, fill=1),
        conv_case((1, 2, 5, 5), (3, 2, 3, 3), types=(np.int8, np.uint8), low=1, high=1, fill=-5),
        conv_case((1, 2, 5, 5), (33, 2, 3, 3), types=(np.int8, np.int8), low=1, high=1, fill=-128),
        conv_case((1, 2, 5, 5), (3, 2, 3, 3), types=(np.uint8, np.int16), low=1, high=1, fill=255),
        conv_case((1, 2, 5, 5), (3, 2, 3, 3), types=(np.int16, np.int8), low=1, high=1, fill=-999),
        conv_case((0, 2, 5, 5), (3, 2, 3, 3)),
        conv_case((1, 64, 7, 7), (70, 64, 1, 1)),  # the last part of rows would reach behind the image
        conv_case((2, 64, 7, 9), (33, 64, 3, 3), stride=2, low=1, high=1, fill=40),
        conv_case((1, 36, 12, 13), (64, 36, 3, 3), types=(np.int8, np.int8), low=1, high=1, fill=-77),
        conv_case((1, 128, 9, 11), (96, 64, 1, 1), groups=2),
        conv_case((1, 64, 8, 9), (70, 32, 3, 3), types=(np.uint8, np.uint8), groups=2, low=1, high=1, fill=9),
        conv_case((1, 32, 9, 9), (40, 32, 3, 3), types=(np.int8, np.uint8), low=1, high=1, fill=-3),
    ]
    check(cases, cpu, "integer conv")


@pytest.mark.parametrize("cpu", LEVELS)
def test_depthwise_shapes(cpu: str) -> None:
    cases = [
        conv_case((1, c, h, 9), (c * m, 1, k, k), types=(a, b), groups=c, stride=s, dilation=d, low=p, high=p, fill=f)
        for c, h, m, k, a, b, s, d, p, f in [
            (8, 10, 1, 3, np.uint8, np.int8, 1, 1, 1, 9),
            (17, 9, 1, 3, np.int8, np.int8, 2, 1, 1, -7),
            (33, 8, 1, 5, np.uint8, np.uint8, 1, 1, 2, 12),
            (130, 7, 1, 4, np.uint8, np.int8, 2, 1, 1, 0),
            (5, 11, 1, 3, np.int8, np.uint8, 1, 2, 2, 3),
            (3, 7, 3, 3, np.uint8, np.int8, 1, 1, 1, 77),
            (64, 9, 1, 7, np.uint8, np.int8, 1, 1, 3, 1),
            (2, 9, 1, 1, np.uint8, np.int16, 1, 1, 0, 0),
            (150, 5, 2, 3, np.uint8, np.int8, 1, 1, 1, 200),
        ]
    ]
    rows = [conv_case((2, 6, 15), (6, 1, 5), groups=6, low=2, high=2, fill=11),
            conv_case((1, 3, 5003), (3, 1, 9), groups=3, stride=2, low=4, high=3, fill=3)]  # fmt: skip
    check([*cases, *rows], cpu, "depthwise")


@pytest.mark.parametrize("cpu", [name for name in LEVELS if name in ("x86-64", "x86-64-v3", "x86-64-v4")])
def test_winograd_shapes(cpu: str) -> None:
    cases = [
        conv_case((1, 32, 16, 16), (32, 32, 3, 3), low=1, high=1, fill=255),
        conv_case((2, 32, 9, 13), (40, 32, 3, 3), low=1, high=1, fill=7),
        conv_case((1, 64, 10, 9), (37, 64, 3, 3), low=0, high=2, fill=128),
        conv_case((1, 32, 12, 12), (64, 32, 3, 3), types=(np.int8, np.int8), low=1, high=1, fill=-128),
        conv_case((3, 32, 8, 8), (70, 32, 3, 3), low=2, high=2),
    ]
    check(cases, cpu, "winograd")


def test_winograd_beside_products_of_bytes() -> None:
    """Where VNNI multiplies bytes it takes more tiles to be worth it; matrix registers are quicker still."""
    native = level("native")
    cpu = replace(native, features=native.features - {"amx_tile", "amx_int8"})
    if not has_byte_products(cpu):
        pytest.skip("the CPU does not multiply bytes")
    cases = [conv_case((1, 32, size, size), (40, 32, 3, 3), (np.uint8, weights), low=1, high=1, fill=9)
             for weights in BYTES for size in (12, 24)]  # fmt: skip
    for compiled, (graph, inputs) in zip(compile_graphs([g for g, _ in cases], cpu=cpu), cases, strict=True):
        if isinstance(compiled, Compiled):
            assert any("winograd" in call.kind for call in compiled.program.calls) == (inputs[0].shape[2] == 24)
        for got, want in zip(compiled(*inputs), interpret(graph, inputs), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("cpu", LEVELS)
def test_sums_too_large_for_winograd(cpu: str) -> None:
    """576 times a sum is computed modulo 2^32: where 2^25 may be exceeded, the direct kernel runs."""
    image = np.full((1, 2048, 8, 8), 255, np.uint8)
    for weights in (np.full((32, 2048, 3, 3), 127, np.int8), np.full((32, 2048, 3, 3), -128, np.int8)):
        b = Builder()
        x = b.input(of_array(image), "x")
        out = b.one("conv", x, b.constant(weights), strides=(1, 1), low=(1, 1), high=(1, 1), dilations=(1, 1),
                    groups=1, wide=True)  # fmt: skip
        check([(b.graph([out]), [image])], cpu, "integer conv")


# ---------------------------------------------------------------- quantize


@pytest.mark.every_target
@pytest.mark.parametrize("cpu", LEVELS)
def test_quantize_is_division_and_rounding(cpu: str) -> None:
    """Ties, their neighbours, infinities and NaN; scales for which 1 / scale is not exact."""
    cases = []
    for k, scale in enumerate(np.array([1.0, 0.1, 1 / 3, 0.0078125, 3e-5, 77.7, 1e-35, 1e-44, 3e38], np.float32)):
        with np.errstate(over="ignore"):
            ties = (np.arange(-300, 300) + 0.5).astype(np.float32) * scale
        special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e38, -1e38, 1e-45], np.float32)
        x = np.concatenate([ties, np.nextafter(ties, np.float32(9)), np.nextafter(ties, np.float32(-9)), special])
        b = Builder()
        value = b.input(of_array(x), "x")
        low, high = ((0, 255), (-128, 127))[k % 2]
        out = b.one("quantize", value, scale=float(scale), zero=k * 3, low=low, high=high)
        cases.append((b.graph([b.cast(out, dtypes.uint8 if low == 0 else dtypes.int8)]), [x]))
    check(cases, cpu)


# ---------------------------------------------------------------- operators, against onnx's reference


def node_model(
    op: str, inputs: dict[str, np.ndarray], constants: dict[str, Any], out: int, **attrs: Any
) -> onnx.ModelProto:
    nodes = [helper.make_node(op, [*attrs.pop("order")], ["y"], **attrs)]
    return model_of(nodes, inputs, constants, out)


def model_of(
    nodes: list[onnx.NodeProto], inputs: dict[str, np.ndarray], constants: dict[str, Any], out: int
) -> onnx.ModelProto:
    types = {k: helper.np_dtype_to_tensor_dtype(v.dtype) for k, v in inputs.items()}
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info(k, types[k], v.shape) for k, v in inputs.items()],
        [helper.make_tensor_value_info("y", out, None)], [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=9)


def operator_models() -> Iterator[tuple[onnx.ModelProto, dict[str, np.ndarray]]]:
    """Every integer operator over all types of its operands, with one zero point and with one for each column."""
    int32, scale = TensorProto.INT32, np.float32
    for k, (a, b) in enumerate(itertools.product(BYTES, BYTES)):
        same = helper.np_dtype_to_tensor_dtype(np.dtype(a))
        x, w, za, zb = numbers((5, 33), a), numbers((33, 20), b, 1), numbers((), a, 2), numbers((), b, 3)
        names, zs = ["x", "w", "za", "zb"], numbers((20,), b, 4)
        every = {"x": x, "w": w, "za": za, "zb": zb}
        yield node_model("MatMulInteger", {"x": x}, {"w": w, "za": za, "zb": zb}, int32, order=names), {"x": x}
        model = node_model("MatMulInteger", {"x": x, "za": za}, {"w": w, "zb": zs}, int32, order=names)
        yield model, {"x": x, "za": za}
        yield node_model("MatMulInteger", every, {}, int32, order=names), every
        image, kernel = numbers((2, 6, 7, 8), a), numbers((12, 3, 3, 3), b, 1)
        conv = {"pads": [1, 1, 1, 1], "strides": [1 + k % 2] * 2, "group": 2}
        given = {"x": image, "za": za}
        yield node_model("ConvInteger", given, {"w": kernel, "zb": zb}, int32, order=names, **conv), given
        every = {"x": image, "w": kernel, "za": za, "zb": zb}
        yield node_model("ConvInteger", every, {}, int32, order=names, **conv), every
        order = ["x", "sa", "za", "w", "sb", "zb", "sy", "zy"]
        constants = {"sa": scale(0.02), "za": za, "w": w, "sb": scale(0.01), "zb": zb}
        constants |= {"sy": scale(3.3), "zy": numbers((), a, 5)}
        yield node_model("QLinearMatMul", {"x": x}, constants, same, order=order), {"x": x}
        constants |= {"w": kernel, "sb": np.linspace(0.01, 0.03, 12).astype(np.float32), "zb": np.full(12, zb)}
        constants |= {"bias": np.arange(-600, 600, 100, dtype=np.int32), "sy": scale(5.1)}
        order.append("bias")
        yield node_model("QLinearConv", {"x": image}, constants, same, order=order, **conv), {"x": image}
        given = {"x": image, "w": constants.pop("w")}
        yield node_model("QLinearConv", given, constants, same, order=order, **conv), given


@pytest.mark.parametrize("fed", [(), ("zero",), ("scale", "zero")], ids=str)
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16])
def test_nan_becomes_the_least_integer(dtype: Any, fed: tuple[str, ...]) -> None:
    """Whether numbers are constants, and all is one primitive, or not."""
    x = np.array([np.nan, np.inf, -np.inf, 1, -1, 0.25, 0.75, -np.nan, 1e38], np.float32)
    numbers = {"scale": np.float32(0.5), "zero": dtype(3)}
    given = {"x": x} | {k: np.asarray(v) for k, v in numbers.items() if k in fed}
    constants = {k: v for k, v in numbers.items() if k not in fed}
    out = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = onnx_file.load(node_model("QuantizeLinear", given, constants, out, order=["x", "scale", "zero"]))
    for _, run in passes(PassOptions()):
        graph = run(graph)
    assert any(n.op == "quantize" for n in graph.nodes) == (not fed)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    want = np.array([low, high, low, 5, max(low, 1), 3, 5, low, high], dtype)
    arrays = [given[v.name] for v in graph.inputs]
    np.testing.assert_array_equal(interpret(graph, arrays)[0], want)
    check([(graph, arrays)], "native")


@pytest.mark.parametrize("integer", [True, False])
def test_operators(integer: bool) -> None:
    cases = []
    for model, inputs in operator_models():
        (want,) = ReferenceEvaluator(model).run(None, inputs)
        graph = onnx_file.load(model)
        for name, run in passes(PassOptions(integer=integer)):
            graph = run(graph)
            verify(graph, name)
        assert integer == any(n.attrs.get("wide") for n in graph.nodes)
        arrays = [inputs[v.name] for v in graph.inputs]
        np.testing.assert_array_equal(interpret(graph, arrays)[0], want)
        cases.append((graph, arrays))
    for cpu in LEVELS if integer else LEVELS[:1]:
        check(cases, cpu, "integer" if integer else None)


# ---------------------------------------------------------------- dequantized products, against float64


def quantized(x: np.ndarray, scale: Any, zero: Any) -> np.ndarray:
    return np.asarray((x.astype(np.float64) - np.float64(zero)) * np.float64(scale))


def agrees(got: np.ndarray, exact: np.ndarray, scale: float, zero: int) -> None:
    """The nearest integer of the float64 result; either of two where that is a tie but for float32's rounding."""
    ratio = exact / scale
    nearest = np.clip(np.rint(ratio) + zero, 0, 255)
    close = np.abs(np.abs(ratio - np.floor(ratio)) - 0.5) < 1e-4
    assert (np.abs(got - nearest)[close] <= 1).all()
    np.testing.assert_array_equal(got[~close], nearest[~close])


def dequantize(name: str, axis: int = 1) -> onnx.NodeProto:
    return helper.make_node("DequantizeLinear", [name, f"{name}_s", f"{name}_z"], [f"{name}_f"], axis=axis)


def kinds(model: onnx.ModelProto, cpu: str) -> tuple[onnxc.CompiledModel, list[str]]:
    compiled = onnxc.compile(model, cpu=cpu, cache=False)
    return compiled, [k.kind for k in compiled.explain().kernels]


@pytest.mark.every_target
@pytest.mark.parametrize("cpu", ["native", "x86-64-v3"] if "x86-64-v3" in LEVELS else ["native"])
def test_dequantized_gemm(cpu: str) -> None:
    """Weights transposed, one scale a column, a float bias, Relu, and QuantizeLinear."""
    x, w = numbers((19, 70), np.uint8), numbers((33, 70), np.int8, 1)
    scales, bias = np.linspace(0.001, 0.01, 33).astype(np.float32), np.linspace(-9, 9, 33).astype(np.float32)
    constants: dict[str, Any] = {"x_s": np.float32(0.05), "x_z": np.uint8(131), "y_s": np.float32(0.21)}
    constants |= {"w": w, "w_s": scales, "w_z": np.zeros(33, np.int8), "b": bias, "y_z": np.uint8(3)}
    nodes = [
        dequantize("x"), dequantize("w", 0), helper.make_node("Gemm", ["x_f", "w_f", "b"], ["p"], transB=1),
        helper.make_node("Relu", ["p"], ["r"]), helper.make_node("QuantizeLinear", ["r", "y_s", "y_z"], ["y"]),
    ]  # fmt: skip
    compiled, found = kinds(model_of(nodes, {"x": x}, constants, TensorProto.UINT8), cpu)
    assert is_gpu() or found == ["integer matmul"]
    exact = quantized(x, constants["x_s"], 131) @ quantized(w, scales[:, None], 0).T + bias
    agrees(compiled(x=x)["y"], np.maximum(exact, 0), float(constants["y_s"]), 3)


@pytest.mark.every_target
@pytest.mark.parametrize("cpu", ["native", "x86-64-v3"] if "x86-64-v3" in LEVELS else ["native"])
def test_dequantized_residual_block(cpu: str) -> None:
    """conv, QuantizeLinear, DequantizeLinear, sum with what went in, Relu: one kernel."""
    x, w = numbers((1, 32, 12, 12), np.uint8), numbers((32, 32, 3, 3), np.int8, 1) // 4
    constants = {"x_s": np.float32(0.05), "x_z": np.uint8(120), "w": w, "w_s": np.float32(0.01), "w_z": np.int8(0),
                 "m_s": np.float32(0.31), "m_z": np.uint8(127), "y_s": np.float32(0.2), "y_z": np.uint8(0)}  # fmt: skip
    nodes = [
        dequantize("x"), dequantize("w"), helper.make_node("Conv", ["x_f", "w_f"], ["p"], pads=[1, 1, 1, 1]),
        helper.make_node("QuantizeLinear", ["p", "m_s", "m_z"], ["m"]), dequantize("m"),
        helper.make_node("Add", ["m_f", "x_f"], ["s"]), helper.make_node("Relu", ["s"], ["r"]),
        helper.make_node("QuantizeLinear", ["r", "y_s", "y_z"], ["y"]),
    ]  # fmt: skip
    model = model_of(nodes, {"x": x}, constants, TensorProto.UINT8)
    compiled, found = kinds(model, cpu)
    assert is_gpu() or (sum("integer conv" in k for k in found) == 1 and len(found) <= 3)
    plain = onnxc.compile(model, cpu=cpu, cache=False, integer=False)
    padded = np.pad(quantized(x, constants["x_s"], 120), [(0, 0), (0, 0), (1, 1), (1, 1)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    inner = np.einsum("ncyxij,ocij->noyx", windows, quantized(w, constants["w_s"], 0)) / np.float64(constants["m_s"])
    within = np.clip(np.rint(inner) + 127, 0, 255)
    outer = np.maximum(quantized(within, constants["m_s"], 127) + quantized(x, constants["x_s"], 120), 0)
    outer /= np.float64(constants["y_s"])
    wanted = np.clip(np.rint(outer), 0, 255)
    ties = np.any([np.abs(np.abs(r - np.floor(r)) - 0.5) < 1e-4 for r in (inner, outer)], axis=0)
    assert ties.mean() < 0.05
    for got in (compiled(x=x)["y"].astype(int), plain(x=x)["y"].astype(int)):
        np.testing.assert_array_equal(got[~ties], wanted[~ties])
        assert np.abs(got - wanted).max() <= 2  # a step of the inner scale is one and a half of the outer's


def _moved_between_pairs(scales: Sequence[float], zeros: Sequence[int]) -> onnx.ModelProto:
    """x quantized; then a reshape, a transpose and a slice, each between a dequantization and a quantization."""
    moves = [("Reshape", ["shape"], {}), ("Transpose", [], {"perm": [1, 0, 2]}), ("Slice", ["from", "to"], {})]
    nodes = [helper.make_node("QuantizeLinear", ["x", "s0", "z0"], ["q0"])]
    for k, (op, more, attrs) in enumerate(moves):
        nodes += [
            helper.make_node("DequantizeLinear", [f"q{k}", f"s{k}", f"z{k}"], [f"d{k}"]),
            helper.make_node(op, [f"d{k}", *more], [f"m{k}"], **attrs),
            helper.make_node("QuantizeLinear", [f"m{k}", f"s{k + 1}", f"z{k + 1}"], [f"q{k + 1}"]),
        ]
    arrays = {"shape": np.array([2, 3, 4]), "from": np.array([1]), "to": np.array([3])}
    arrays |= {f"s{k}": np.float32(s) for k, s in enumerate(scales)}
    arrays |= {f"z{k}": np.uint8(z) for k, z in enumerate(zeros)}
    graph = helper.make_graph(
        nodes, "moved", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [6, 4])],
        [helper.make_tensor_value_info("q3", TensorProto.UINT8, None)],
        [numpy_helper.from_array(np.asarray(a), name) for name, a in arrays.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_what_is_only_moved_between_pairs_stays_integers() -> None:
    """One rounding is left where all pairs are alike; every other scale or zero point is another rounding."""
    x = np.linspace(-3, 3, 24, dtype=np.float32).reshape(6, 4)
    cases = [([0.02] * 4, [7] * 4, 1), ([0.02, 0.02, 0.03, 0.03], [7] * 4, 2), ([0.02] * 4, [7, 8, 8, 0], 3),
             ([2.0**-60] * 4, [0] * 4, 4)]  # fmt: skip
    for scales, zeros, left in cases:
        model = _moved_between_pairs(scales, zeros)
        graph = onnx_file.load(model)
        for _, run in passes(PassOptions()):
            graph = run(graph)
        assert sum(node.op == "quantize" for node in graph.nodes) == left
        fed = x * np.float32(scales[0] / 0.02)
        (found,) = interpret(graph, [fed])
        (expected,) = ReferenceEvaluator(model).run(None, {"x": fed})
        np.testing.assert_array_equal(found, expected)


def test_a_sum_that_could_wrap_stays_a_float_sum() -> None:
    x, w = np.full((1, 40000), 255, np.uint8), np.full((40000, 1), 255, np.uint8)
    constants = {"x_s": np.float32(1), "x_z": np.uint8(0), "w": w, "w_s": np.float32(1), "w_z": np.uint8(0)}
    nodes = [dequantize("x"), dequantize("w"), helper.make_node("MatMul", ["x_f", "w_f"], ["y"])]
    compiled, found = kinds(model_of(nodes, {"x": x}, constants, TensorProto.FLOAT), "native")
    assert not any("integer" in k for k in found)
    np.testing.assert_allclose(compiled(x=x)["y"], [[40000.0 * 255 * 255]], rtol=1e-6)


@pytest.mark.every_target
def test_attention_of_dequantized_tensors() -> None:
    """Neither operand is constant, and both have zero points."""
    x, y = numbers((2, 5, 16), np.uint8), numbers((2, 16, 7), np.int8, 1)
    constants = {"x_s": np.float32(0.1), "x_z": np.uint8(77), "y_s": np.float32(0.2), "y_z": np.int8(-9)}
    nodes = [dequantize("x"), helper.make_node("DequantizeLinear", ["v", "y_s", "y_z"], ["v_f"]),
             helper.make_node("MatMul", ["x_f", "v_f"], ["y"])]  # fmt: skip
    compiled, found = kinds(model_of(nodes, {"x": x, "v": y}, constants, TensorProto.FLOAT), "native")
    assert is_gpu() or any("integer matmul" in k for k in found)
    exact = quantized(x, constants["x_s"], 77) @ quantized(y, constants["y_s"], -9)
    np.testing.assert_allclose(compiled(x=x, v=y)["y"], exact, rtol=1e-5, atol=1e-4)


def test_zero_points_are_no_tensors_of_their_own() -> None:
    """One kernel reads the bytes as they are."""
    constants = {"x_s": np.float32(0.1), "x_z": np.uint8(77), "y_s": np.float32(0.2), "y_z": np.uint8(9)}
    nodes = [dequantize("x"), helper.make_node("DequantizeLinear", ["v", "y_s", "y_z"], ["v_f"]),
             helper.make_node("MatMul", ["x_f", "v_f"], ["y"])]  # fmt: skip
    x, y = numbers((2, 5, 16), np.uint8), numbers((2, 16, 7), np.uint8, 1)
    _, found = kinds(model_of(nodes, {"x": x, "v": y}, constants, TensorProto.FLOAT), "native")
    assert found == ["integer matmul"]


@pytest.mark.parametrize("cpu", ["native", "x86-64-v3"] if "x86-64-v3" in LEVELS else ["native"])
def test_weights_that_are_quantized_in_the_model(cpu: str) -> None:
    """So large that they are folded only after products of integers are found."""
    w = numbers((512, 300), np.int8, 1).astype(np.float32)
    nodes = [dequantize("x"), helper.make_node("QuantizeLinear", ["w", "w_s", "w_z"], ["q"]),
             helper.make_node("DequantizeLinear", ["q", "w_s", "w_z"], ["w_f"]),
             helper.make_node("MatMul", ["x_f", "w_f"], ["y"])]  # fmt: skip
    for a, b in itertools.product(BYTES, BYTES):
        constants = {"x_s": np.float32(0.01), "x_z": a(77), "w": w, "w_s": np.float32(1.5), "w_z": b(9)}
        x = numbers((5, 512), a)
        whole = np.clip(np.round(w / 1.5) + 9, np.iinfo(b).min, np.iinfo(b).max) - 9
        model = onnxc.compile(model_of(nodes, {"x": x}, constants, TensorProto.FLOAT), cpu=cpu, cache=False)
        np.testing.assert_allclose(model(x=x)["y"], (x.astype(float) - 77) @ whole * 0.015, rtol=1e-5, atol=1e-3)


def test_bytes_are_stored_and_not_the_floats_made_from_them() -> None:
    """A pool reads what a convolution quantized: a quarter of the memory."""
    x, w = numbers((1, 8, 9, 9), np.uint8), numbers((16, 8, 3, 3), np.int8, 1)
    constants = {"x_s": np.float32(0.05), "x_z": np.uint8(1), "w": w, "w_s": np.float32(0.01), "w_z": np.int8(0),
                 "m_s": np.float32(0.5), "m_z": np.uint8(100)}  # fmt: skip
    nodes = [
        dequantize("x"), dequantize("w"), helper.make_node("Conv", ["x_f", "w_f"], ["p"]),
        helper.make_node("QuantizeLinear", ["p", "m_s", "m_z"], ["m"]), dequantize("m"),
        helper.make_node("MaxPool", ["m_f"], ["y"], kernel_shape=[2, 2]),
    ]  # fmt: skip
    compiled, _ = kinds(model_of(nodes, {"x": x}, constants, TensorProto.FLOAT), "native")
    (conv,) = [k for k in compiled.explain().kernels if "integer conv" in k.kind]
    assert [b.type for b in conv.boundaries] == ["uint8[1, 16, 7, 7]"]


@pytest.mark.every_target
@pytest.mark.parametrize("opset", [11, 13])
def test_softmax_names_the_opset_that_it_follows(opset: int) -> None:
    """Its attribute `opset` says whether the axes from `axis` on are one."""
    x, scale, zero = numbers((3, 4, 5), np.uint8), np.float32(0.02), np.uint8(0)
    node = helper.make_node(
        "QLinearSoftmax", ["x", "s", "z", "t", "z"], ["y"], domain="com.microsoft", axis=1, opset=opset
    )
    model = model_of([node], {"x": x}, {"s": scale, "t": np.float32(1 / 256), "z": zero}, TensorProto.UINT8)
    got = onnxc.compile(model, cache=False)(x=x)["y"]
    real = x.astype(np.float64) * scale
    axes = (1, 2) if opset < 13 else (1,)
    e = np.exp(real - real.max(axes, keepdims=True))
    exact = e / e.sum(axes, keepdims=True) * 256
    assert np.abs(got - np.clip(exact, 0, 255)).max() <= 0.5 + 1e-3
