"""Generated GPU kernels in Triton's interpreter, against onnxruntime with its optimizations off, or numpy's meaning."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxc.frontends.onnx_file import load
from onnxc.passes.decompose import decompose
from onnxc.primitives.interpret import interpret
from tests.ops_harness import Case, build, compare, expected, feeds
from tests.targets import needs_triton
from tests.test_ops import CASES
from tests.triton_simulator import Answer, Failed, Request, Simulator, program_of

Array = np.ndarray[Any, Any]

pytestmark = needs_triton
rng = np.random.default_rng(3)


def f32(*shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def ints(low: int, high: int, *shape: int) -> Array:
    return rng.integers(low, high, shape)


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]>\n{text}')


def agrees(simulator: Simulator, case: Case, dynamic: bool | None = None, **options: Any) -> Answer:
    """The program's answers are the oracle's, with sizes known at compile time and at run time only."""
    wanted = expected(case)
    choices = [dynamic] if dynamic is not None else [False, True] if case.dynamic else [False]
    for each in choices:
        answer = simulator.run(build(case, each).SerializeToString(), list(feeds(case).values()), **options)
        assert answer.error[0] == 0
        for k, (a, b) in enumerate(zip(answer.outputs, wanted, strict=True)):
            compare(a, b, f"{case}{' with dynamic dims' if each else ''}, output {k}", case)
    return answer


def means(simulator: Simulator, text: str, *inputs: Array, tolerance: float = 1e-5, **options: Any) -> Answer:
    """The program computes what the primitives mean in numpy."""
    model = parsed(text)
    with np.errstate(all="ignore"):
        wanted = interpret(decompose(load(model)), list(inputs))
    answer = simulator.run(model.SerializeToString(), list(inputs), **options)
    assert answer.error[0] == 0
    names = [v.name for v in model.graph.output]
    for name, a, b in zip(names, answer.outputs, wanted, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.dtype.kind in "iub":
            np.testing.assert_array_equal(a, b, name)
        else:
            x, y = a.astype(np.float64), b.astype(np.float64)
            np.testing.assert_allclose(x, y, tolerance, tolerance / 10, err_msg=name)
            if name not in ("max_", "min_", "relu_"):  # of zeros numpy takes either
                np.testing.assert_array_equal(np.signbit(x[y == 0]), np.signbit(y[y == 0]), name)
    return answer


# ---------------------------------------------------------------- pointwise

SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-42, 88.0, -88.0, 1.5, -2.5, 0.5, 2.0, -1.0, 3e38, 1e-8, 0.999]
UNARY = (
    "Neg Abs Sign Exp Log Sqrt Sin Cos Tan Asin Acos Atan Sinh Cosh Tanh Asinh Acosh Atanh Erf Floor Ceil Round "
    "IsNaN Reciprocal Relu Sigmoid Softplus"
)
BFLOAT16 = [
    "Neg",
    "Abs",
    "Exp",
    "Log",
    "Sqrt",
    "Tanh",
    "Erf",
    "Relu",
    "Sigmoid",
]  # what onnx defines for it, and ml_dtypes does as IEEE
FLOATS = {"float": np.float32, "double": np.float64, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
INTEGERS = {name: np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")}


@pytest.mark.parametrize("dtype", FLOATS)
def test_functions_of_floats(simulator: Simulator, dtype: str) -> None:
    x = np.array(SPECIAL).astype(FLOATS[dtype])
    ops = [op for op in UNARY.split() if dtype != "bfloat16" or op in BFLOAT16]
    n = x.size
    outputs = ", ".join(f"{'bool' if op == 'IsNaN' else dtype}[{n}] {op.lower()}_" for op in ops)
    body = "\n".join(f"{op.lower()}_ = {op}(x)" for op in ops)
    tolerance = {"float": 1e-5, "double": 1e-12, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    means(simulator, f"g ({dtype}[{n}] x) => ({outputs}) {{ {body} }}", x, tolerance=tolerance)


def test_signs_of_bfloat16(simulator: Simulator) -> None:
    x = np.array(SPECIAL).astype(ml_dtypes.bfloat16)
    n = x.size
    model = parsed(f"g (bfloat16[{n}] x) => (bfloat16[{n}] y) {{ y = Sign(x) }}")
    (y,) = simulator.run(model.SerializeToString(), [x]).outputs
    wanted = np.sign(x.astype(np.float32))  # ml_dtypes' own gives -0 for -0
    np.testing.assert_array_equal(y.astype(np.float32), wanted)


@pytest.mark.parametrize("dtype", FLOATS)
def test_pairs_of_floats(simulator: Simulator, dtype: str) -> None:
    x, y = (a.astype(FLOATS[dtype]).ravel() for a in np.meshgrid(SPECIAL, SPECIAL))
    ops = dict.fromkeys(["Add", "Sub", "Mul", "Div", "Max", "Min"], dtype) | dict.fromkeys(
        ("Less", "Equal", "GreaterOrEqual"), "bool"
    )
    outputs = ", ".join(f"{t}[{x.size}] {op.lower()}_" for op, t in ops.items())
    body = "\n".join(f"{op.lower()}_ = {op}(x, y)" for op in ops)
    tolerance = {"float": 1e-6, "double": 1e-14, "float16": 1e-3, "bfloat16": 1e-2}[dtype]
    text = f"g ({dtype}[{x.size}] x, {dtype}[{x.size}] y) => ({outputs}) {{ {body} }}"
    means(simulator, text, x, y, tolerance=tolerance)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_pairs_of_integers(simulator: Simulator, dtype: str) -> None:
    limits = np.iinfo(INTEGERS[dtype])
    some = np.array([limits.min, limits.min + 1, 0, 1, 2, 7, 100, limits.max - 1, limits.max], INTEGERS[dtype])
    x, y = (a.ravel() for a in np.meshgrid(some, some[some != 0]))
    if limits.min < 0:
        x, y = x[(x != limits.min) | (y != -1)], y[(x != limits.min) | (y != -1)]
    same = ["Add", "Sub", "Mul", "Div", "Max", "Min", "BitwiseAnd", "BitwiseOr", "BitwiseXor"]
    ops = dict.fromkeys(same, dtype) | dict.fromkeys(("Less", "Equal", "GreaterOrEqual"), "bool")
    outputs = ", ".join(f"{t}[{x.size}] {op.lower()}_" for op, t in ops.items())
    body = "\n".join(f"{op.lower()}_ = {op}(x, y)" for op in ops)
    body += "\nm = Mod(x, y)\nf = Mod<fmod = 1>(x, y)\nn = BitwiseNot(x)\na = Abs(x)"
    outputs += "".join(f", {dtype}[{x.size}] {name}" for name in "mfna")
    means(simulator, f"g ({dtype}[{x.size}] x, {dtype}[{x.size}] y) => ({outputs}) {{ {body} }}", x, y)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
def test_shifts(simulator: Simulator, dtype: str) -> None:
    x = np.array([1, 3, 255, 128, 77], dtype)
    y = np.array([0, 1, 7, 3, 5], dtype)
    body = 'l = BitShift<direction = "LEFT">(x, y) r = BitShift<direction = "RIGHT">(x, y)'
    means(simulator, f"g ({dtype}[5] x, {dtype}[5] y) => ({dtype}[5] l, {dtype}[5] r) {{ {body} }}", x, y)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "bool"])
def test_casts(simulator: Simulator, dtype: str) -> None:
    kinds = {**FLOATS, **INTEGERS, "bool": np.dtype(bool)}
    x = np.array([0, 1, 2.5, 100.7, 127], np.float64).astype(kinds[dtype])
    if dtype in FLOATS or dtype.startswith("int"):
        x = np.concatenate([x, -x])
    body, outputs = [], []
    for k, target in enumerate(kinds):
        number = getattr(TensorProto, target.upper())
        body.append(f"y{k} = Cast<to = {number}>(x)")
        outputs.append(f"{target}[{x.size}] y{k}")
        if dtype in FLOATS and target.startswith("u"):  # C leaves negative floats as unsigned integers open
            body[-1] = f"a{k} = Abs(x) y{k} = Cast<to = {number}>(a{k})"
    text = f"g ({dtype}[{x.size}] x) => ({', '.join(outputs)}) {{ {' '.join(body)} }}"
    means(simulator, text, x, tolerance=1e-2)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integer_powers(simulator: Simulator, dtype: str) -> None:
    x, y = (a.ravel().astype(dtype) for a in np.meshgrid([-3, -1, 0, 1, 2, 7], [0, 1, 2, 5, 9]))
    agrees(simulator, Case("Pow", [x, y], opset=15), dynamic=False)


def test_operands_that_are_expanded(simulator: Simulator) -> None:
    """Strides of 0 along the rows and the depth of a product."""
    a, b = f32(1, 1), f32(9, 1)
    text = "g (float[1,1] a, float[9,1] b) => (float[17,11] y) { s = Constant<value_ints = [17, 9]>() "
    text += "t = Constant<value_ints = [9, 11]>() c = Expand(a, s) d = Expand(b, t) y = MatMul(c, d) }"
    means(simulator, text, a, b)


def test_division_by_zero_is_reported(simulator: Simulator) -> None:
    model = parsed("g (int32[5] x, int32[5] y) => (int32[5] q, int32[5] r) { q = Div(x, y) r = Mod(x, y) }")
    x, y = np.arange(5, dtype=np.int32), np.array([1, 2, 0, 4, 5], np.int32)
    assert simulator.run(model.SerializeToString(), [x, y]).error[0] == 4
    assert simulator.run(model.SerializeToString(), [x, y + 1]).error[0] == 0


def test_negative_and_wrong_indices(simulator: Simulator) -> None:
    model = parsed("g (float[7,3] x, int64[4] i) => (float[4,3] y) { y = Gather(x, i) }").SerializeToString()
    x = f32(7, 3)
    index = np.array([0, -1, -7, 6])
    answer = simulator.run(model, [x, index])
    np.testing.assert_array_equal(answer.outputs[0], x[index])
    assert answer.error[0] == 0
    for wrong in (7, -8, 1 << 40):
        answer = simulator.run(model, [x, np.array([0, wrong, 1, 2])])
        assert answer.error[0] == 3 and answer.error[2] == wrong


def test_nothing_is_read_from_empty_buffers(simulator: Simulator) -> None:
    model = parsed("g (float[N,3] x, int64[4] i) => (float[4,3] y) { y = Gather(x, i) }").SerializeToString()
    answer = simulator.run(model, [f32(0, 3), np.array([0, -1, 1, 2])])
    assert answer.error[0] == 3
    text = "g (float[4,0] x, float[0,3] w) => (float[4,3] y) { a = Sub(x, x) b = Abs(a) y = MatMul(b, w) }"
    means(simulator, text, f32(4, 0), f32(0, 3))


@pytest.mark.parametrize(
    ("op", "index"), [("Gather<axis = 1>", [1, 1]), ("GatherElements<axis = 1>", [2, 1, 3]), ("GatherND", [1, 2])]
)
def test_no_index_is_right_in_an_axis_without_elements(simulator: Simulator, op: str, index: list[int]) -> None:
    dims = ", ".join("ABC"[: len(index)])
    text = f"g (float[N,0,3] x, int64[{dims}] i) => (float[P,Q,R] y) {{ y = {op}(x, i) }}"
    if op == "GatherND":
        text = text.replace("[A, B]", "[A, 2]").replace("[P,Q,R]", "[P,Q]")
    answer = simulator.run(parsed(text).SerializeToString(), [f32(2, 0, 3), ints(0, 1, *index)])
    assert answer.error[0] == 3


# ---------------------------------------------------------------- reductions and norms

REDUCTIONS = ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL2", "ReduceLogSumExp"]


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)], ids=str)
def test_reductions(simulator: Simulator, axes: tuple[int, ...]) -> None:
    x = f32(5, 7, 17)
    rank = [d for k, d in enumerate(x.shape) if k not in axes]
    outputs = ", ".join(f"float{rank or '[]'} {op.lower()}_" for op in REDUCTIONS).replace("float[]", "float")
    body = "\n".join(f"{op.lower()}_ = {op}<keepdims = 0>(x, a)" for op in REDUCTIONS)
    text = f"g (float[5,7,17] x) => ({outputs}) {{ a = Constant<value_ints = {list(axes)}>() {body} }}"
    means(simulator, text, x, tolerance=1e-4)


@pytest.mark.parametrize("limits", [{}, {"PERSISTENT": 32, "PIECE": 32, "TILE": 256}], ids=["persistent", "looped"])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("last", [0, 1])
def test_argmax(simulator: Simulator, axis: int, last: int, limits: dict[str, int]) -> None:
    x = ints(-3, 3, 3, 37, 41).astype(np.float32)  # many ties
    attrs = {"axis": axis, "select_last_index": last}
    for op in ("ArgMax", "ArgMin"):
        agrees(simulator, Case(op, [x], attrs, 13), dynamic=False, limits=limits)


@pytest.mark.parametrize("limits", [{}, {"PERSISTENT": 32, "PIECE": 32, "TILE": 256}], ids=["persistent", "looped"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_rows_of_any_length(simulator: Simulator, axis: int, limits: dict[str, int]) -> None:
    x = f32(5, 37, 41)
    agrees(simulator, Case("Softmax", [x], {"axis": axis}, 13), limits=limits)
    agrees(simulator, Case("LogSoftmax", [x], {"axis": axis}, 13), dynamic=False, limits=limits)


def test_a_sum_of_one_element_after_another_reduction(simulator: Simulator) -> None:
    """Both are in one kernel, whose tile has lanes for the first alone."""
    text = "g (float[4,8,1] x) => (int64[8] y) { a = Constant<value_ints = [1]>() "
    text += "i = ArgMax<axis = 0, keepdims = 0>(x) y = ReduceSum<keepdims = 0>(i, a) }"
    answer = means(simulator, text, f32(4, 8, 1))
    assert answer.kinds == ["loops"]


def test_reductions_of_special_values(simulator: Simulator) -> None:
    x = f32(6, 9)
    x[1, 3], x[2, 8], x[3, 0], x[4] = np.nan, np.inf, -np.inf, -np.inf
    names = {"ReduceMax": "float", "ReduceMin": "float", "ReduceSum": "float", "ArgMax": "int64", "ArgMin": "int64"}
    outputs = ", ".join(f"{t}[6] {op.lower()}_" for op, t in names.items())
    body = "\n".join(
        f"{op.lower()}_ = {op}<axis = 1, keepdims = 0>(x)"
        if op[:3] == "Arg"
        else f"{op.lower()}_ = {op}<keepdims = 0>(x, a)"
        for op in names
    )
    means(simulator, f"g (float[6,9] x) => ({outputs}) {{ a = Constant<value_ints = [1]>() {body} }}", x)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1), (0, 0)], ids=str)
def test_empty_and_single(simulator: Simulator, shape: tuple[int, int]) -> None:
    agrees(simulator, Case("ReduceSum", [f32(*shape), np.array([1])], {"keepdims": 0}, 13, const=[1], dynamic=False))
    agrees(simulator, Case("Exp", [f32(*shape)], dynamic=False))


def test_reductions_of_an_empty_axis(simulator: Simulator) -> None:
    """Their rows are many and have no element, or they are none and what is made of them has none either."""
    text = "g (float[N,8,0,M] x) => (float[A,B,C] y) <int64[1] a = {2}> { y = ReduceMax<keepdims = 0>(x, a) }"
    means(simulator, text, f32(2, 8, 0, 4))
    text = "g (float[N,M,0] x) => (float[N,M,0] y) <int64 a = {1}> { z = CumSum(x, a) l = LogSoftmax(z) y = Neg(l) }"
    means(simulator, text, f32(2, 5, 0))


@pytest.mark.parametrize("width", [1, 7, 64, 1000])
def test_norms(simulator: Simulator, width: int) -> None:
    x, s, b = f32(3, 5, width), f32(width), f32(width)
    agrees(simulator, Case("LayerNormalization", [x, s, b], {"axis": -1}, 17, atol=1e-5))
    if width == 7:
        x = f32(2, 6, 5, 7)
        agrees(
            simulator, Case("GroupNormalization", [x, f32(6), f32(6)], {"num_groups": 3}, 21, atol=1e-5), dynamic=False
        )
        agrees(simulator, Case("InstanceNormalization", [x, f32(6), f32(6)], atol=1e-5), dynamic=False)


# ---------------------------------------------------------------- movement

MOVES = [
    Case("Transpose", [f32(37, 45)]),
    Case("Transpose", [f32(3, 33, 5, 40)], {"perm": [3, 1, 0, 2]}),
    Case("Pad", [f32(2, 3, 9), np.array([0, 1, 2, 0, 0, 3])], opset=18, const=[1]),
    Case("Pad", [f32(5, 6), np.array([1, 2, 2, 1])], {"mode": "reflect"}, 18, const=[1]),
    Case("Concat", [f32(4, 7), f32(4, 1), f32(4, 9)], {"axis": 1}),
    Case("Slice", [f32(9, 11), *map(np.array, ([8, 1], [-20, 9], [0, 1], [-2, 3]))], opset=13, const=[1, 2, 3, 4]),
    Case("Gather", [f32(50, 16), ints(-50, 50, 3, 5)], {"axis": 0}),
    Case("Gather", [f32(5, 16, 3), ints(-16, 16, 7)], {"axis": 1}),
    Case("GatherElements", [f32(5, 7), ints(-7, 7, 5, 3)], {"axis": 1}, dynamic=False),
    Case("GatherND", [f32(5, 7, 3), ints(-5, 5, 4, 2)], dynamic=False),
    Case("Expand", [f32(3, 1), np.array([2, 3, 6])], const=[1]),
    Case("Where", [f32(5, 7) > 0, f32(5, 1), f32(7)]),
    Case("Resize", [f32(1, 2, 5, 6), None, np.float32([1, 1, 1.7, 2.2])], {"mode": "linear"}, const=[2], dynamic=False,
         atol=1e-5),
    Case("MaxPool", [f32(2, 3, 9, 11)], {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]},
         dynamic=False),
    Case("AveragePool", [f32(2, 3, 9, 11)], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}, dynamic=False),
]  # fmt: skip


@pytest.mark.parametrize("case", MOVES, ids=str)
def test_movement(simulator: Simulator, case: Case) -> None:
    agrees(simulator, case)


def test_indices_of_64_bits(simulator: Simulator) -> None:
    cases = [
        MOVES[0],
        MOVES[2],
        MOVES[6],
        Case("Softmax", [f32(7, 33)], {"axis": 1}),
        Case("MatMul", [f32(17, 19), f32(19, 23)]),
    ]
    cases += [Case("TopK", [f32(3, 37), np.array([5])], opset=11, const=[1], outputs=2)]
    cases += [Case("CumSum", [f32(3, 3001), np.array(1)], opset=14, const=[1], rtol=1e-4, atol=1e-3)]
    cases += [Case("ScatterElements", [f32(5, 7), ints(0, 5, 4, 3), f32(4, 3)], {"reduction": "add"}, 18)]
    cases += [Case("ScatterND", [f32(5, 7), ints(0, 5, 9, 1), f32(9, 7)], {"reduction": "add"}, 18)]
    for case in cases:
        answer = agrees(simulator, case, dynamic=False, wide=True)
        assert "tl.int64" in answer.source


# ---------------------------------------------------------------- contractions


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 17, 7), (7, 1, 17), (17, 7, 1), (37, 41, 43), (64, 64, 64), (130, 70, 33)], ids=str
)
def test_matmul(simulator: Simulator, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    agrees(simulator, Case("MatMul", [f32(m, k), f32(k, n)], atol=1e-4))
    agrees(
        simulator,
        Case("Gemm", [f32(k, m), f32(n, k), f32(n)], {"transA": 1, "transB": 1, "alpha": 0.5}, atol=1e-4),
        dynamic=False,
    )


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64, np.int32, np.uint8])
def test_matmul_of_other_types(simulator: Simulator, dtype: Any) -> None:
    a, b = (f32(2, 3, 17, 19) * 3).astype(dtype), (f32(3, 19, 7) * 3).astype(dtype)
    name = {np.float16: "float16", ml_dtypes.bfloat16: "bfloat16", np.float64: "double", np.int32: "int32"}.get(dtype)
    if name is None:
        text = "g (uint8[2,3,17,19] a, uint8[3,19,7] b) => (int32[2,3,17,7] y) { y = MatMulInteger(a, b) }"
    else:
        text = f"g ({name}[2,3,17,19] a, {name}[3,19,7] b) => ({name}[2,3,17,7] y) {{ y = MatMul(a, b) }}"
    means(simulator, text, a, b, tolerance=2e-2)


CONVOLUTIONS = [
    ((2, 3, 17, 19), (8, 3, 7, 7), {"strides": [2, 2], "pads": [3, 3, 3, 3]}),
    ((1, 32, 9, 9), (40, 32, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((1, 20, 9, 9), (24, 20, 1, 1), {}),
    ((1, 34, 9, 9), (6, 17, 3, 3), {"group": 2, "pads": [1, 2, 0, 1], "dilations": [2, 1]}),
    ((1, 16, 9, 9), (16, 1, 3, 3), {"group": 16, "pads": [1, 1, 1, 1]}),
    ((1, 6, 9, 9), (12, 1, 3, 3), {"group": 6}),
    ((1, 16, 30), (24, 16, 5), {"pads": [2, 2]}),
    ((1, 4, 6, 7, 8), (6, 4, 3, 3, 3), {"pads": [1] * 6}),
]


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize(("x", "w", "attrs"), CONVOLUTIONS, ids=str)
def test_convolution(simulator: Simulator, x: Any, w: Any, attrs: dict[str, Any], constant: bool) -> None:
    const = [1] if constant else []
    agrees(simulator, Case("Conv", [f32(*x), f32(*w)], attrs, const=const, dynamic=False, rtol=1e-4, atol=1e-4))


def test_convolution_of_dynamic_images(simulator: Simulator) -> None:
    weights = f32(6, 5, 3, 3)
    case = Case("Conv", [f32(2, 5, 9, 11), weights], {"pads": [1, 1, 1, 1]}, const=[1], keep=[5], rtol=1e-4, atol=1e-4)
    agrees(simulator, case, dynamic=True)


ATTENTION = """g (float[{s}] q, float[{k}] k, float[{v}] v{m}) => (float[{o}] y) {{
  kt = Transpose<perm = [0, 1, 3, 2]>(k) s = MatMul(q, kt) c = Constant<value_float = 0.25>() t = Mul(s, c)
  {add} p = Softmax<axis = -1>(u) y = MatMul(p, v) }}"""


@pytest.mark.parametrize("mask", [None, "1,1,20,37", "2,1,1,37", "37"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_attention(simulator: Simulator, mask: str | None, dynamic: bool) -> None:
    q, k, v = f32(2, 3, 20, 16), f32(2, 3, 37, 16), f32(2, 3, 37, 11)
    text = ATTENTION.format(
        s="2,3,S,16" if dynamic else "2,3,20,16", k="2,3,K,16" if dynamic else "2,3,37,16",
        v="2,3,K,11" if dynamic else "2,3,37,11", o="2,3,S,11" if dynamic else "2,3,20,11",
        m=f", float[{mask.replace('20', 'S').replace('37', 'K') if dynamic else mask}] m" if mask else "",
        add="u = Add(t, m)" if mask else "u = Identity(t)",
    )  # fmt: skip
    inputs = [q, k, v]
    if mask:
        m = f32(*map(int, mask.split(",")))
        m[..., rng.random(37) < 0.3] = -np.inf
        inputs.append(m)
    answer = means(simulator, text, *inputs, tolerance=1e-4)
    assert "attention" in answer.kinds


@pytest.mark.parametrize("keys", [0, 1, 5])
@pytest.mark.parametrize("dynamic", [False, True])
def test_attention_of_few_keys(simulator: Simulator, keys: int, dynamic: bool) -> None:
    k = "K" if dynamic else str(keys)
    text = ATTENTION.format(s="2,3,4,16", k=f"2,3,{k},16", v=f"2,3,{k},11", o="2,3,4,11", m="", add="u = Identity(t)")
    answer = means(simulator, text, f32(2, 3, 4, 16), f32(2, 3, keys, 16), f32(2, 3, keys, 11), tolerance=1e-4)
    assert answer.kinds == ["attention"]


@pytest.mark.parametrize("scale", ["1e-40", "3e38", "0.0", "-1.0"])
def test_attention_of_any_scale(simulator: Simulator, scale: str) -> None:
    text = ATTENTION.format(
        s="2,3,4,16", k="2,3,5,16", v="2,3,5,11", o="2,3,4,11", m="", add="u = Identity(t)"
    ).replace("0.25", scale)
    q, k, v = f32(2, 3, 4, 16) * 1e-3, f32(2, 3, 5, 16) * 1e-3, f32(2, 3, 5, 11)
    means(simulator, text, q, k, v, tolerance=1e-3)


@pytest.mark.parametrize("depth", ["300", "D"])
def test_heads_that_the_template_does_not_take(simulator: Simulator, depth: str) -> None:
    text = ATTENTION.format(
        s=f"2,3,4,{depth}", k=f"2,3,5,{depth}", v="2,3,5,11", o="2,3,4,11", m="", add="u = Identity(t)"
    )
    answer = means(simulator, text, f32(2, 3, 4, 300), f32(2, 3, 5, 300), f32(2, 3, 5, 11), tolerance=1e-4)
    assert "attention" not in answer.kinds


def test_rows_of_attention_that_see_nothing(simulator: Simulator) -> None:
    m = np.zeros((1, 1, 20, 37), np.float32)
    m[:, :, 3] = -np.inf
    text = ATTENTION.format(
        s="2,3,20,16", k="2,3,37,16", v="2,3,37,11", o="2,3,20,11", m=", float[1,1,20,37] m", add="u = Add(t, m)"
    )
    means(simulator, text, f32(2, 3, 20, 16), f32(2, 3, 37, 16), f32(2, 3, 37, 11), m, tolerance=1e-4)


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_recurrent(simulator: Simulator, op: str, direction: str) -> None:
    gates, d = {"LSTM": 4, "GRU": 3, "RNN": 1}[op], 2 if direction == "bidirectional" else 1
    inputs = [f32(5, 2, 7), f32(d, gates * 6, 7), f32(d, gates * 6, 6), f32(d, 2 * gates * 6)]
    attrs = {"hidden_size": 6, "direction": direction}
    agrees(simulator, Case(op, inputs, attrs, 14, const=[1, 2, 3], outputs=2, dynamic=False, atol=1e-5))


# ---------------------------------------------------------------- running sums, the best, scatters


@pytest.mark.parametrize("n", [1, 7, 64, 3001])
@pytest.mark.parametrize(("exclusive", "reverse"), [(0, 0), (1, 1)])
def test_running_sums(simulator: Simulator, n: int, exclusive: int, reverse: int) -> None:
    attrs = {"exclusive": exclusive, "reverse": reverse}
    for axis, x in ((1, f32(3, n)), (0, f32(n, 5)), (1, ints(-9, 9, 3, n))):
        x[(0,) * axis + (0,)] = -0.0 if x.dtype.kind == "f" else 1
        agrees(simulator, Case("CumSum", [x, np.array(axis)], attrs, 14, const=[1], rtol=1e-4, atol=1e-3))


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 3), (37, 37), (300, 5)])
def test_top_k(simulator: Simulator, n: int, k: int, largest: int) -> None:
    for axis, x in ((1, f32(3, n)), (0, ints(-3, 3, n, 2)), (1, ints(-3, 3, 2, n).astype(np.float16))):
        attrs = {"axis": axis, "largest": largest}
        agrees(simulator, Case("TopK", [x, np.array([k])], attrs, 11, const=[1], outputs=2, keep=[3, 2]))


def test_top_k_of_special_values(simulator: Simulator) -> None:
    x = np.array([[np.nan, 1, -np.inf, 0.0, -0.0, np.inf, np.nan, -1, 1, 0.0]], np.float32)
    for largest in (0, 1):
        body = f"c = Constant<value_ints = [10]>() v, i = TopK<largest = {largest}>(x, c)"
        means(simulator, f"g (float[1,10] x) => (float[1,10] v, int64[1,10] i) {{ {body} }}", x)


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.float16])
def test_scatters(simulator: Simulator, reduction: str, dtype: Any) -> None:
    x, u = (f32(5, 7) * 3).astype(dtype), (f32(5, 30) * 3).astype(dtype)
    name = {np.float32: "float", np.int64: "int64", np.float16: "float16"}[dtype]
    body = f'y = ScatterElements<axis = 1, reduction = "{reduction}">(x, i, u)'
    means(
        simulator,
        f"g ({name}[5,7] x, int64[5,30] i, {name}[5,30] u) => ({name}[5,7] y) {{ {body} }}",
        x,
        ints(-7, 7, 5, 30),
        u,
    )
    x, u = (f32(6, 5, 70) * 3).astype(dtype), (f32(40, 70) * 3).astype(dtype)
    index = np.stack([ints(-6, 6, 40), ints(-2, 2, 40)], 1)
    body = f'y = ScatterND<reduction = "{reduction}">(x, i, u)'
    means(
        simulator,
        f"g ({name}[6,5,70] x, int64[40,2] i, {name}[40,70] u) => ({name}[6,5,70] y) {{ {body} }}",
        x,
        index,
        u,
    )


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.float16])
def test_scatters_of_many(simulator: Simulator, reduction: str, dtype: Any) -> None:
    """Along an axis that is not the last one, and of slices; in a program for some of the places."""
    m, c, n = ("M", "C", "N") if dtype is np.float32 else ("70", "3", "7")
    x, u, i = (f32(4, 3, 7) * 3).astype(dtype), (f32(70, 3, 7) * 2).astype(dtype), ints(-4, 4, 70, 3, 7)
    name = {np.float32: "float", np.int64: "int64", np.float16: "float16"}[dtype]
    body = f'y = ScatterElements<axis = 0, reduction = "{reduction}">(x, i, u)'
    graph = f"g ({name}[4,{c},{n}] x, int64[{m},{c},{n}] i, {name}[{m},{c},{n}] u) => ({name}[4,{c},{n}] y)"
    means(simulator, f"{graph} {{ {body} }}", x, i, u)
    index = np.stack([ints(-4, 4, 70, 2), ints(-3, 3, 70, 2)], -1)
    body = f'y = ScatterND<reduction = "{reduction}">(x, i, u)'
    graph = f"g ({name}[4,{c},{n}] x, int64[{m},2,2] i, {name}[{m},2,{n}] u) => ({name}[4,{c},{n}] y)"
    means(simulator, f"{graph} {{ {body} }}", x, index, u[:, :2])


@pytest.mark.parametrize("words", [40, 8, 1])
def test_many_rows_are_added_up(simulator: Simulator, words: int) -> None:
    """As an embedding's gradient: some rows go to one place, or all of them."""
    x, u, index = f32(6, 41, 20), f32(70, 20), np.stack([ints(-6, -5, 70), ints(0, words, 70)], 1)
    body = 'y = ScatterND<reduction = "add">(x, i, u)'
    text = f"g (float[6,41,20] x, int64[70,2] i, float[70,20] u) => (float[6,41,20] y) {{ {body} }}"
    means(simulator, text, x, index, u)


def test_many_rows_to_a_wrong_index(simulator: Simulator) -> None:
    body = 'y = ScatterND<reduction = "add">(x, i, u)'
    text = f"g (float[5,7] x, int64[70,1] i, float[70,7] u) => (float[5,7] y) {{ {body} }}"
    answer = simulator.run(parsed(text).SerializeToString(), [f32(5, 7), np.full((70, 1), 5), f32(70, 7)])
    assert answer.error[0] == 3 and answer.error[2] == 5


@pytest.mark.parametrize("reduction", ["none", "max"])
@pytest.mark.parametrize("op", ["ScatterND", "ScatterElements"])
def test_many_to_a_wrong_index(simulator: Simulator, op: str, reduction: str) -> None:
    shape = "70,1" if op == "ScatterND" else "70,7"
    body = f'y = {op}<reduction = "{reduction}">(x, i, u)'
    text = f"g (float[5,7] x, int64[{shape}] i, float[70,7] u) => (float[5,7] y) {{ {body} }}"
    index = np.full([int(d) for d in shape.split(",")], -6)
    answer = simulator.run(parsed(text).SerializeToString(), [f32(5, 7), index, f32(70, 7)])
    assert answer.error[0] == 3 and answer.error[2] == -6


def test_scatter_to_a_wrong_index(simulator: Simulator) -> None:
    model = parsed("g (float[5,7] x, int64[2,1] i, float[2,7] u) => (float[5,7] y) { y = ScatterND(x, i, u) }")
    x, u = f32(5, 7), f32(2, 7)
    answer = simulator.run(model.SerializeToString(), [x, np.array([[1], [5]]), u])
    assert answer.error[0] == 3 and answer.error[2] == 5


# ---------------------------------------------------------------- quantized weights


def test_quantized(simulator: Simulator) -> None:
    w, scale, zero = ints(-128, 127, 19, 23).astype(np.int8), f32(23) ** 2 + 0.01, np.zeros(23, np.int8)
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["d"], axis=1),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    weights = [numpy_helper.from_array(a, n) for a, n in ((w, "w"), (scale, "s"), (zero, "z"))]
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [17, 19]), ("y", [17, 23]))]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    x = f32(17, 19)
    (y,) = simulator.run(model.SerializeToString(), [x]).outputs
    np.testing.assert_allclose(y, x.astype(np.float64) @ (w * scale.astype(np.float64)), 1e-4, 1e-3)


def test_failures_reach_the_test(simulator: Simulator) -> None:
    with pytest.raises(Failed, match="is given"):
        simulator.run(parsed("g (float[2] x) => (float[2] y) { y = Exp(x) }").SerializeToString(), [np.zeros(2)])


# ---------------------------------------------------------------- all of it


def test_machine_code(simulator: Simulator) -> None:
    """Triton's compiler refuses what its interpreter takes: a variable of two types, say."""
    from onnxc.codegen.triton.cubin import compile_program

    x = f32(5, 300)
    for case in (
        Case("TopK", [x, np.array([5])], opset=11, const=[1], outputs=2),
        Case("CumSum", [x, np.array(1)], {"exclusive": 1, "reverse": 1}, 14, const=[1]),
        Case("ScatterND", [x, ints(0, 5, 9, 1), f32(9, 300)], {"reduction": "add"}, 18),
        Case("ScatterND", [x, ints(0, 5, 90, 1), f32(90, 300)], {"reduction": "add"}, 18),
        Case("ScatterND", [x, ints(0, 5, 90, 1), f32(90, 300)], opset=18),
        Case("ScatterElements", [x, ints(0, 5, 4, 3), f32(4, 3)], {"reduction": "max"}, 18),
        Case("ArgMax", [x], {"axis": 1}),
    ):
        for dynamic in (False, True):
            _, program = program_of(Request(build(case, dynamic).SerializeToString(), []))
            assert all(image.code for image in compile_program(program, 90, 1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_every_operator(simulator: Simulator, case: Case) -> None:
    try:
        agrees(simulator, case)
    except Failed as error:
        if "UnsupportedError" not in str(error):
            raise
        pytest.skip(str(error)[:80])
