"""Every primitive's ONNX spelling, run in onnxruntime, gives what the primitive's own numpy meaning gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import helper

import onnxc
from onnxc.errors import InternalError, ShapeError, UnsupportedOpError
from onnxc.export import SPELLINGS, to_onnx, write_onnx
from onnxc.export.control import CONTROL
from onnxc.export.host import HOST_SPELLINGS
from onnxc.frontends.onnx_file import load
from onnxc.host.registry import table as host_functions
from onnxc.ir import dtypes
from onnxc.ir.expr import Sym, floordiv, maximum, minimum, mod
from onnxc.ir.graph import Graph, Node, Value
from onnxc.ir.types import TensorType
from onnxc.passes.decompose import decompose
from onnxc.primitives.attention import fill_of
from onnxc.primitives.base import TABLE
from onnxc.primitives.builder import Builder
from onnxc.primitives.host import HOST_OPS
from onnxc.primitives.verify import verify


def run(model: onnx.ModelProto | str, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """onnxruntime's answer, with its optimizer off; the model is checked in full first."""
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    source = model if isinstance(model, str) else model.SerializeToString()
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return [np.asarray(x) for x in session.run(None, feeds)]


def single(op: str, arrays: list[np.ndarray], **attrs: Any) -> Graph:
    """A graph of one primitive over inputs of these types."""
    b = Builder()
    inputs = [b.input(TensorType(dtypes.from_numpy(a.dtype), a.shape), f"x{i}") for i, a in enumerate(arrays)]
    outputs = b.emit(op, inputs, attrs)
    graph = b.graph(outputs)
    verify(graph)
    return graph


def check(op: str, *arrays: np.ndarray, **attrs: Any) -> None:
    expected = TABLE[op].evaluate(*arrays, **attrs)  # type: ignore[misc]
    graph = single(op, list(arrays), **attrs)
    got = run(to_onnx(graph), {f"x{i}": a for i, a in enumerate(arrays)})
    wanted = expected if isinstance(expected, tuple) else (expected,)
    for g, e in zip(got, wanted, strict=True):
        assert g.dtype == e.dtype and g.shape == e.shape
        if e.dtype.kind == "f":
            tolerance = {2: 2e-3, 4: 1e-5, 8: 1e-12}[e.dtype.itemsize]
            np.testing.assert_allclose(g, e, rtol=tolerance, atol=tolerance)
        else:
            np.testing.assert_array_equal(g, e)


def floats(*shape: int, dtype: Any = np.float32, low: float = -3.0, high: float = 3.0) -> np.ndarray:
    return np.random.default_rng(0).uniform(low, high, shape).astype(dtype)


def ints(*shape: int, dtype: Any = np.int32, low: int = -9, high: int = 9) -> np.ndarray:
    info = np.iinfo(dtype)
    return np.random.default_rng(1).integers(max(low, info.min), high, shape).astype(dtype)


INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
DOMAINS = {
    "log": (0.1, 9),
    "sqrt": (0, 9),
    "asin": (-1, 1),
    "acos": (-1, 1),
    "acosh": (1, 9),
    "atanh": (-0.9, 0.9),
}
FLOAT_UNARY = [
    "neg",
    "abs",
    "sign",
    "exp",
    "log",
    "sqrt",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "asinh",
    "acosh",
    "atanh",
    "erf",
    "floor",
    "ceil",
    "round",
]


@pytest.mark.parametrize("op", FLOAT_UNARY)
def test_unary(op: str) -> None:
    low, high = DOMAINS.get(op, (-3, 3))
    check(op, floats(3, 5, low=low, high=high))


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("op", ["neg", "abs", "sign", "bitnot"])
def test_integer_unary(op: str, dtype: Any) -> None:
    check(op, ints(3, 5, dtype=dtype))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, *INTEGERS])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "max", "min"])
def test_binary(op: str, dtype: Any) -> None:
    make = floats if np.dtype(dtype).kind == "f" else ints
    check(op, make(3, 1, 5, dtype=dtype), make(4, 1, dtype=dtype))


@pytest.mark.parametrize("op", ["div", "mod", "fmod"])
def test_divisions_of_floats(op: str) -> None:
    x = np.array([7.5, -7.5, 6, -6, 0, -0.0, np.inf], np.float32)
    check(op, x[:, None], np.array([2, -2, 3, -3, 2.5], np.float32))


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("op", ["div", "mod", "fmod"])
def test_divisions_of_integers(op: str, dtype: Any) -> None:
    check(
        op,
        ints(7, 1, dtype=dtype),
        np.array([1, 2, 3, 4], dtype) * (-1 if np.dtype(dtype).kind == "i" else 1),
    )


def test_division_rounds_toward_zero() -> None:
    (got,) = run(
        to_onnx(single("div", [np.zeros(2, np.int32)] * 2)),
        {"x0": np.array([-7, 7], np.int32), "x1": np.array([2, -2], np.int32)},
    )
    assert got.tolist() == [-3, -3]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])
def test_pow(dtype: Any) -> None:
    check("pow", np.array([1, 2, 3], dtype), np.array([3, 2, 1], dtype))


@pytest.mark.parametrize("op", ["and", "or", "xor"])
def test_logic(op: str) -> None:
    check(op, np.array([[False], [True]]), np.array([False, True]))
    check("not", np.array([False, True]))


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("op", ["bitand", "bitor", "bitxor"])
def test_bitwise(op: str, dtype: Any) -> None:
    check(op, ints(5, 1, dtype=dtype), ints(4, dtype=dtype))


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("op", ["shl", "shr"])
def test_shifts(op: str, dtype: Any) -> None:
    info = np.iinfo(dtype)
    check(op, np.array([[info.min], [info.max], [5], [0], [100]], dtype), np.array([0, 1, 3, 7], dtype))


@pytest.mark.parametrize("dtype", [bool, np.float32, np.float64, *INTEGERS])
@pytest.mark.parametrize("op", ["eq", "lt", "le"])
def test_comparisons(op: str, dtype: Any) -> None:
    if dtype is bool and op != "eq":
        pytest.skip("bool has no order")
    check(op, np.array([[0], [1], [2]]).astype(dtype), np.array([0, 1, 2]).astype(dtype))


def test_comparison_with_nan() -> None:
    x = np.array([np.nan, 1, -np.inf, np.inf, -0.0], np.float32)
    for op in ("eq", "lt", "le"):
        check(op, x[:, None], x)
    check("isnan", x)
    for sides in ({}, {"positive": False}, {"negative": False}):
        check("isinf", x, **sides)
    check("isinf", x.astype(np.float16))


@pytest.mark.parametrize("dtype", [bool, np.float16, np.float32, np.float64, *INTEGERS])
def test_where(dtype: Any) -> None:
    check(
        "where",
        np.array([[True], [False]]),
        np.array([1, 0, 1]).astype(dtype),
        np.array([0, 1, 1]).astype(dtype),
    )


@pytest.mark.parametrize("to", ["float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool"])
@pytest.mark.parametrize("source", [np.float32, np.int32, np.int64, np.uint8, bool])
def test_cast(source: Any, to: str) -> None:
    check("cast", np.array([0, 1, 2, 100]).astype(source), to=dtypes.BY_NAME[to])


def test_cast_to_small_floats_does_not_saturate() -> None:
    b = Builder()
    x = b.input(TensorType(dtypes.float32, (3,)), "x")
    out = b.cast(b.cast(x, dtypes.BY_NAME["float8e4m3fn"]), dtypes.float32)
    (got,) = run(to_onnx(b.graph([out])), {"x": np.array([1.3, 448, 1e6], np.float32)})
    np.testing.assert_array_equal(got, [1.25, 448, np.nan])


def test_bfloat16_arithmetic() -> None:
    b = Builder()
    x = b.input(TensorType(dtypes.float32, (3,)), "x")
    y = b.cast(x, dtypes.bfloat16)
    out = b.cast(b.where(b.lt(y, 2.0), b.mul(b.exp(y), y), y), dtypes.float32)
    (got,) = run(to_onnx(b.graph([out])), {"x": np.array([0, 1, 2.5], np.float32)})
    np.testing.assert_allclose(got, [0, np.e, 2.5], rtol=1e-2)


# ---------------------------------------------------------------- movement


def test_views() -> None:
    x = floats(2, 3, 4)
    check("reshape", x, shape=(6, 4))
    check("reshape", x[:, :0], shape=(0, 7))
    check("transpose", x, perm=(2, 0, 1))
    check("expand", x[:, :1], shape=(2, 5, 4))
    check("concat", x, x[:, :2], axis=1)
    check("slice", x, starts=(0, 0, 0), sizes=(2, 3, 4), steps=(1, 1, 1))


@pytest.mark.parametrize(
    ("start", "size", "step"),
    [(0, 7, 1), (2, 3, 1), (1, 3, 2), (6, 7, -1), (5, 2, -2), (5, 3, -2), (3, 0, 1), (3, 0, -1), (0, 1, -3)],
)
def test_slice(start: int, size: int, step: int) -> None:
    check("slice", floats(3, 7), starts=(1, start), sizes=(2, size), steps=(1, step))


@pytest.mark.parametrize("dtype", [np.float32, np.int16, np.int64, bool])
@pytest.mark.parametrize("interior", [(0, 0, 0), (2, 0, 1), (0, 3, 0)])
def test_pad(dtype: Any, interior: tuple[int, ...]) -> None:
    x, value = floats(2, 1, 3).astype(dtype), np.array(1, dtype)
    check("pad", x, value, low=(1, 0, 2), high=(0, 3, 1), interior=interior)
    check("pad", x, value, low=(0, 0, 0), high=(0, 0, 0), interior=interior)
    check("pad", x[:0], value, low=(0, 0, 0), high=(0, 0, 1), interior=interior)


@pytest.mark.parametrize("dtype", ["int64", "int32", "float32", "uint8"])
def test_iota(dtype: str) -> None:
    node = Node(
        "iota",
        (),
        [Value(TensorType(dtypes.BY_NAME[dtype], (5,)))],
        {"size": 5, "dtype": dtypes.BY_NAME[dtype]},
    )
    (got,) = run(to_onnx(Graph([], [node.output], [node], ["y"])), {})
    np.testing.assert_array_equal(got, np.arange(5, dtype=dtype))


# ---------------------------------------------------------------- reductions


@pytest.mark.parametrize("axes", [(), (0,), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, np.int32, np.int64, np.uint8, np.uint16])
@pytest.mark.parametrize("op", ["reduce_sum", "reduce_prod", "reduce_max", "reduce_min"])
def test_reductions(op: str, dtype: Any, axes: tuple[int, ...]) -> None:
    x = floats(2, 3, 2, dtype=dtype) if np.dtype(dtype).kind == "f" else ints(2, 3, 2, dtype=dtype, low=-2, high=3)
    check(op, x, axes=axes)


def test_reductions_of_nothing() -> None:
    check("reduce_sum", floats(2, 0, 3), axes=(1,))
    check("reduce_prod", floats(2, 0, 3), axes=(1,))


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8, np.int16])
def test_arg_reductions(dtype: Any) -> None:
    x = np.array([[3, 1, 3, 1], [0, 0, 0, 0]], dtype)
    for op in ("argmax", "argmin"):
        for last in (False, True):
            check(op, x, axis=1, last=last)
    check("argmax", x, axis=0)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.int64, np.uint32])
def test_cumsum(dtype: Any, reverse: bool, exclusive: bool) -> None:
    check("cumsum", np.arange(12).reshape(3, 4).astype(dtype), axis=1, reverse=reverse, exclusive=exclusive)


# ---------------------------------------------------------------- indexing


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_gathers(dtype: Any) -> None:
    x = floats(4, 5, 3)
    index = np.array([[0, 2], [3, 1]], dtype)
    check("gather", x, index, axis=1)
    check("gather_elements", x[:4, :2, 0], index, axis=0)
    check("gather_nd", x, index, batch_dims=0)
    check("gather_nd", x[:2], index[::-1, :1], batch_dims=1)


def test_negative_positions() -> None:
    check("gather", floats(4, 3), np.array([-1, 0]), axis=0)
    check("gather_elements", floats(4, 3), np.array([[-1, 0, -4]]), axis=0)
    check("scatter_elements", floats(4, 3), np.array([[-1, 0, -4]]), floats(1, 3), axis=0, reduction="none")


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_scatters(dtype: Any, reduction: str) -> None:
    x, updates = np.arange(12).reshape(4, 3).astype(dtype), np.array([[5, -7, 2], [1, 20, 3]], dtype)
    check("scatter_elements", x, np.array([[0, 1, 3], [2, 3, 1]]), updates, axis=0, reduction=reduction)
    check("scatter_nd", x, np.array([[1], [3]], np.int32), updates, reduction=reduction)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint16])
def test_top_k(dtype: Any, largest: bool) -> None:
    check("top_k", np.array([[3, 1, 4, 1, 5], [2, 2, 2, 1, 0]], dtype), k=3, axis=1, largest=largest)


# ---------------------------------------------------------------- contractions and windows


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
def test_matmul(dtype: Any) -> None:
    make = floats if np.dtype(dtype).kind == "f" else ints
    check("matmul", make(2, 1, 3, 4, dtype=dtype), make(5, 4, 2, dtype=dtype))


@pytest.mark.parametrize("guard", [False, True])
def test_attention(guard: bool) -> None:
    q, kt, v, bias = floats(2, 3, 5, 4), floats(2, 3, 4, 6), floats(2, 3, 6, 4), floats(1, 5, 6)
    check("attention", q, kt, v, scale=0.5, guard=guard)
    bias[0, 2] = -np.inf  # a row with every key masked
    if guard:
        check("attention", q, kt, v, bias, scale=0.5, guard=guard)
    hidden = np.isin(np.arange(30), [3, 4, 12, 13, 14, 15, 16, 17, 25]).reshape(1, 5, 6)  # all keys of a row too
    for fill in (-1e4, -3.4e38, 0.5, *([-np.inf] if guard else [])):
        check("attention", q, kt, v, hidden, scale=0.5, guard=guard, fill=fill)


@pytest.mark.parametrize("steps", [("sub",), ("add", "sub"), ("fill", "sub", "tanh", "add")])
def test_attention_of_halves_with_masks_of_float32(steps: tuple[str, ...]) -> None:
    """One of them at least; numbers beyond float16 stay what they are."""
    q, kt, v = (floats(*s, dtype=np.float16) for s in ((2, 3, 5, 4), (2, 3, 4, 6), (2, 3, 6, 4)))
    far = {"sub": np.where(np.arange(6) % 3 == 1, np.float32(1e6), 0), "add": floats(5, 6, dtype=np.float16),
           "fill": np.arange(30).reshape(5, 6) % 4 == 0}  # fmt: skip
    masks = [far[name] for name in steps if name != "tanh"]
    numbers = (-3.4e38,) * steps.count("fill")
    check("attention", q, kt, v, *masks, scale=0.5, guard=False, steps=steps, numbers=numbers)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_derivative_of_attention(dtype: Any) -> None:
    q, kt, v, dy = (floats(*s, dtype=dtype) for s in ((2, 3, 5, 4), (2, 3, 4, 6), (2, 3, 6, 7), (2, 3, 5, 7)))
    norm, delta, bias = floats(2, 3, 5, dtype=dtype) + 3, floats(2, 3, 5, dtype=dtype), floats(1, 5, 6, dtype=dtype)
    hidden = np.arange(30).reshape(1, 5, 6) % 7 == 0
    bias[0, 2] = -np.inf  # a row with every key masked
    masked = norm.copy()
    masked[:, :, 2] = -np.inf
    for extra, attrs in (([], {}), ([bias], {}), ([hidden], {"fill": -2.0})):
        check("attention_norm", q, kt, *extra, scale=0.5, **attrs)
        for of in ("q", "k", "v"):
            own = masked if extra and not attrs else norm
            check("attention_gradient", q, kt, v, dy, own, delta, *extra, of=of, scale=0.5, guard=True, **attrs)
    with pytest.raises(ShapeError, match="do not broadcast"):
        single("attention_gradient", [q, kt, v, dy, norm[..., :4], delta], of="q")
    with pytest.raises(ShapeError, match="a condition where scores are filled"):
        single("attention_norm", [q, kt, bias], fill=-1.0)


def test_scores_are_filled_with_numbers_of_their_dtype() -> None:
    assert fill_of(-3.4e38, np.dtype(np.float16)) == -65504 and fill_of(-3.4e38, np.dtype(np.float32)) < -3.3e38
    assert fill_of(-np.inf, np.dtype(np.float16)) == -np.inf and fill_of(2.0, np.dtype(np.float16)) == 2
    lowest = dtypes.bfloat16.numpy
    assert np.isfinite(fill_of(-3.4028234e38, lowest).astype(np.float32))


def test_attention_takes_numbers_or_a_condition() -> None:
    q, kt, v = floats(2, 5, 4), floats(2, 4, 6), floats(2, 6, 4)
    with pytest.raises(ShapeError, match="a condition where scores are filled"):
        single("attention", [q, kt, v, floats(5, 6)], fill=-1.0)
    with pytest.raises(ShapeError, match="else numbers"):
        single("attention", [q, kt, v, floats(5, 6) > 0])


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_conv(rank: int, groups: int) -> None:
    x, w = floats(2, 4, *(7, 6, 5)[:rank]), floats(6, 4 // groups, *(3, 2, 2)[:rank])
    check(
        "conv",
        x,
        w,
        strides=(2, 1, 1)[:rank],
        low=(1, 0, 2)[:rank],
        high=(0, 1, 0)[:rank],
        dilations=(1, 2, 1)[:rank],
        groups=groups,
    )


def test_conv_of_integers() -> None:
    """The standard has none: it is one of float64, which onnxruntime lacks."""
    x, w = ints(2, 4, 7, 6, high=1 << 15), ints(6, 4, 3, 2, low=-99, high=1 << 10)
    attrs: dict[str, Any] = {"strides": (2, 1), "low": (1, 0), "high": (0, 1), "dilations": (1, 2), "groups": 1}
    made = to_onnx(single("conv", [x, w], **attrs))
    onnx.checker.check_model(made, full_check=True)
    (y,) = onnxc.compile(made, cache=False).run(None, {"x0": x, "x1": w})
    np.testing.assert_array_equal(y, TABLE["conv"].evaluate(x, w, **attrs), strict=True)  # type: ignore[misc]


WINDOWS = [
    {
        "kernel": (1, 1, 3, 2),
        "strides": (1, 1, 2, 1),
        "low": (0, 0, 1, 0),
        "high": (0, 0, 1, 1),
        "dilations": (1, 1, 1, 2),
    },
    {
        "kernel": (1, 2, 1, 3),
        "strides": (1, 1, 1, 2),
        "low": (0, 1, 0, 0),
        "high": (0, 0, 0, 5),
        "dilations": (1, 1, 1, 1),
    },
    {
        "kernel": (2, 2, 2, 2),
        "strides": (1, 1, 1, 1),
        "low": (0, 0, 0, 0),
        "high": (0, 0, 0, 0),
        "dilations": (1, 1, 1, 1),
    },
    {
        "kernel": (1, 1, 1, 1),
        "strides": (1, 1, 1, 1),
        "low": (0, 0, 0, 0),
        "high": (0, 0, 0, 0),
        "dilations": (1, 1, 1, 1),
    },
    {
        "kernel": (1, 1, 1, 1),
        "strides": (1, 1, 2, 3),
        "low": (0, 0, 0, 0),
        "high": (0, 0, 0, 0),
        "dilations": (1, 1, 1, 1),
    },
]


@pytest.mark.parametrize("attrs", WINDOWS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.uint8])
@pytest.mark.parametrize("op", ["window_max", "window_sum"])
def test_windows(op: str, dtype: Any, attrs: dict[str, tuple[int, ...]]) -> None:
    x = floats(2, 3, 6, 7, dtype=dtype) if np.dtype(dtype).kind == "f" else ints(2, 3, 6, 7, dtype=dtype, low=0)
    if op == "window_max" and attrs["high"][3] == 5 and np.dtype(dtype).kind == "f":
        attrs = {
            **attrs,
            "high": (0, 0, 0, 2),
        }  # onnxruntime's MaxPool gives -FLT_MAX for a window of padding alone
    check(op, x, **attrs)


# ---------------------------------------------------------------- symbolic sizes

s, t = Sym("s0"), Sym("s1")
X = TensorType(dtypes.float32, (s, t))


def symbolic(build: Callable[[Builder, Value], Value], shape: tuple[int, int]) -> np.ndarray:
    """Runs a graph over x [s0, s1] = 0, 1, 2, ... at a size."""
    b = Builder()
    x = b.input(X, "x")
    graph = b.graph([build(b, x)])
    graph.dim_names = {"s0": "batch"}
    verify(graph)
    (got,) = run(to_onnx(graph), {"x": np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)})
    return got


@pytest.mark.parametrize("size", [(1, 1), (2, 5), (7, 3)])
def test_sizes_as_expressions(size: tuple[int, int]) -> None:
    dims = [
        s,
        s * t - 3,
        2 * s + t,
        floordiv(s, 2),
        floordiv(s - 4, 3),
        mod(s - t, 4),
        maximum(s, t),
        minimum(s - t, 1),
        5,
    ]
    got = symbolic(lambda b, x: b.sizes(np.array(dims, object)), size)
    a, c = size
    assert got.tolist() == [
        a,
        a * c - 3,
        2 * a + c,
        a // 2,
        (a - 4) // 3,
        (a - c) % 4,
        max(a, c),
        min(a - c, 1),
        5,
    ]


@pytest.mark.parametrize("size", [(1, 1), (2, 5), (6, 4)])
def test_symbolic_movement(size: tuple[int, int]) -> None:
    x = np.arange(size[0] * size[1], dtype=np.float32).reshape(size)
    np.testing.assert_array_equal(symbolic(lambda b, v: b.reshape(v, (t, s)), size), x.reshape(size[::-1]))
    np.testing.assert_array_equal(symbolic(lambda b, v: b.expand(v, (3, s, t)), size), np.broadcast_to(x, (3, *size)))
    np.testing.assert_array_equal(symbolic(lambda b, v: b.slice(v, 1, floordiv(t, 2), t), size), x[:, size[1] // 2 :])
    np.testing.assert_array_equal(symbolic(lambda b, v: b.slice(v, 0, s - 1, -1, -1), size), x[::-1])
    np.testing.assert_array_equal(symbolic(lambda b, v: b.slice(v, 1, t - 1, -1, -2), size), x[:, ::-2])
    np.testing.assert_array_equal(symbolic(lambda b, v: b.iota(s * t), size), np.arange(x.size))
    np.testing.assert_array_equal(
        symbolic(lambda b, v: b.pad(v, (0, t), (s, 0), 9.0), size),
        np.pad(x, ((0, size[0]), (size[1], 0)), constant_values=9),
    )
    padded = symbolic(lambda b, v: b.pad(v, (0, 0), (0, 0), 9.0, (0, 2)), size)
    assert padded.shape == (size[0], 3 * size[1] - 2) and np.array_equal(padded[:, ::3], x)


def test_a_slice_that_may_end_before_the_first_element() -> None:
    for size in ((2, 1), (2, 2), (2, 6)):
        x = np.arange(size[0] * size[1], dtype=np.float32).reshape(size)
        got = symbolic(
            lambda b, v: b.one("slice", v, starts=(0, t - 1), sizes=(s, floordiv(t, 2)), steps=(1, -2)), size
        )
        np.testing.assert_array_equal(got, x[:, ::-1][:, ::2][:, : size[1] // 2])


def test_a_symbol_that_stands_only_inside_an_expression() -> None:
    b = Builder()
    x = b.input(TensorType(dtypes.float32, (2 * s + 1,)), "x")
    graph = b.graph([b.add(x, b.size_as(s, dtypes.float32))])
    (got,) = run(to_onnx(graph), {"x": np.zeros(7, np.float32)})
    assert got.tolist() == [3.0] * 7


def test_a_symbol_of_no_input_is_an_error() -> None:
    b = Builder()
    b.input(TensorType(dtypes.float32, (2,)), "x")
    with pytest.raises(InternalError, match="no graph input"):
        to_onnx(b.graph([b.iota(Sym("s7"))]))


# ---------------------------------------------------------------- whole graphs


def test_names_are_the_models_own_and_never_collide() -> None:
    b = Builder()
    x, y = (
        b.input(TensorType(dtypes.float32, (2,)), "v1"),
        b.input(TensorType(dtypes.float32, (2,)), 'a b\n"'),
    )
    z = b.add(b.mul(x, y), b.constant(np.ones(2, np.float32)))
    graph = b.graph([z, z, x, b.constant(np.zeros(2, np.float32))], ["v2", "v_3", "same", "c"])
    got = run(to_onnx(graph), {"v1": np.ones(2, np.float32), 'a b\n"': np.full(2, 3, np.float32)})
    assert [g.tolist() for g in got] == [[4, 4], [4, 4], [1, 1], [0, 0]]


def test_an_input_and_a_weight_that_are_outputs_as_they_are() -> None:
    """A model may have it so: no name is written twice."""
    text = """<ir_version: 8, opset_import: ["" : 18]> g (float[2] x) => (float[2] x, float[2] w, float[2] y)
      <float[2] w = {1, 2}> { y = Add(x, w) }"""
    x = np.array([3, 4], np.float32)
    for graph in (load(onnx.parser.parse_model(text)), decompose(load(onnx.parser.parse_model(text)))):
        assert [g.tolist() for g in run(to_onnx(graph), {"x": x})] == [[3, 4], [1, 2], [4, 6]]


def test_a_node_that_does_nothing_does_not_take_its_operands_name() -> None:
    b = Builder()
    x = b.input(TensorType(dtypes.float32, (2,)), "x")
    y = b.neg(x)
    same = b.one("pad", y, b.scalar(0, dtypes.float32), low=(0,), high=(0,), interior=(0,))
    z = b.add(y, same)
    got = run(to_onnx(b.graph([same, z], ["same", "z"])), {"x": np.array([1, 2], np.float32)})
    assert [g.tolist() for g in got] == [[-1, -2], [-2, -4]]


def test_every_primitive_has_a_spelling() -> None:
    without = {"constant"} | {name for name, p in TABLE.items() if p.kind.name == "CONTROL"}
    assert set(TABLE) - set(SPELLINGS) - set(CONTROL) - without == set()
    assert set(HOST_OPS) <= set(CONTROL)
    standard = {name for name in host_functions() if not name.startswith(("ml_", "ms_"))}
    assert standard - set(HOST_SPELLINGS) == set()


def test_a_primitive_without_a_spelling_says_where_to_write_it() -> None:
    node = Node("nonesuch", (), [Value(X)])
    with pytest.raises(InternalError, match=r"onnxc/export/"):
        to_onnx(Graph([], [node.output], [node], ["y"]))


def test_constants_of_every_dtype_come_back() -> None:
    for d in dtypes.ALL:
        array = np.array(["a", "é"], object) if d is dtypes.string else np.array([0, 1, 1]).astype(d.numpy)
        b = Builder()
        value = b.constant(array)
        back = load(to_onnx(b.graph([value], ["y"])))
        (node,) = [n for n in back.nodes if n.op == "constant"]
        assert node.output.dtype is d and [str(v) for v in node.attrs["value"]] == [str(v) for v in array]


def test_external_data(tmp_path: Path) -> None:
    import ml_dtypes

    b = Builder()
    x = b.input(TensorType(dtypes.float32, (64, 64)), "x")
    weight, packed = floats(64, 64), ints(99, 99, low=-8, high=8).astype(ml_dtypes.int4)
    small = b.constant(np.ones(1, np.float32))
    graph = b.graph([b.add(b.matmul(x, b.constant(weight)), small), b.cast(b.constant(packed), dtypes.int32)])
    write_onnx(graph, tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx").stat().st_size < 2000 and (tmp_path / "m.onnx.data").stat().st_size >= 64 * 64 * 4
    got = run(str(tmp_path / "m.onnx"), {"x": np.eye(64, dtype=np.float32)})
    np.testing.assert_array_equal(got[0], weight + 1)
    np.testing.assert_array_equal(got[1], packed.astype(np.int32))
    back = load(tmp_path / "m.onnx")
    assert any(n.op == "constant" and np.array_equal(n.attrs["value"], packed) for n in back.nodes)


def test_without_large_constants_there_is_no_data_file(tmp_path: Path) -> None:
    write_onnx(single("add", [floats(2), floats(2)]), tmp_path / "m.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_an_imported_graph_is_written_as_it_was() -> None:
    then = helper.make_graph(
        [helper.make_node("Mul", ["x", "two"], ["a"])],
        "then",
        [],
        [helper.make_tensor_value_info("a", 1, [2])],
    )
    other = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["b"])], "else", [], [helper.make_tensor_value_info("b", 1, [2])]
    )
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0, name="total"),
        helper.make_node("Constant", [], ["zero"], value_float=0.0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"]),
        helper.make_node("If", ["positive"], ["y"], then_branch=then, else_branch=other),
        helper.make_node("Split", ["y"], ["p", "q"], num_outputs=2),
    ]
    x = helper.make_tensor_value_info("x", 1, [2])
    outputs = [helper.make_tensor_value_info(n, 1, s) for n, s in (("y", [2]), ("q", [1]))]
    two = helper.make_tensor("two", 1, [], [2.0])
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], outputs, [two]),
        opset_imports=[helper.make_opsetid("", 19)],
        ir_version=9,
    )
    written = to_onnx(load(model))
    assert written.opset_import[0].version == 19
    for array in (np.array([1, 2], np.float32), np.array([-1, -2], np.float32)):
        for a, e in zip(run(written, {"x": array}), run(model, {"x": array}), strict=True):
            np.testing.assert_array_equal(a, e)


def test_outputs_without_a_declared_type_are_inferred() -> None:
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Relu", ["x"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", 1, ["n", 3])],
            [onnx.ValueInfoProto(name="y")],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
    )
    (got,) = run(to_onnx(load(model)), {"x": np.array([[-1, 0, 2]], np.float32)})
    assert got.tolist() == [[0, 0, 2]]


def test_two_opsets_in_one_graph_are_an_error() -> None:
    node = Node("onnx.Softmax@11", [value := Value(X, "x")], [Value(X)])
    with pytest.raises(UnsupportedOpError, match="Softmax@11"):
        to_onnx(Graph([value], [node.output], [node], ["y"]))


def test_reshapes_to_sizes_that_the_model_computes() -> None:
    """These are the model's own in what is exported, too: onnxruntime says where they are not those of the operand."""
    text = """(float[n, 4] x, float[m] z) => (float[A, 4] y) <int64[1] one = {1}, int64[1] four = {4}> {
        s = Shape(z) t = Sub(s, one) to = Concat<axis = 0>(t, four) r = Reshape(x, to) y = Relu(r) }"""
    model = to_onnx(decompose(load(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> g {text}'))))
    x = floats(3, 4)
    np.testing.assert_array_equal(run(model, {"x": x, "z": floats(4)})[0], np.maximum(x, 0))
    with pytest.raises(Exception, match="cannot be reshaped"):
        run(model, {"x": x, "z": floats(5)})


def test_branches_that_wait_for_the_run_have_their_own_types() -> None:
    """Their nodes are written in another opset, whose converter knows no types of what lies outside."""
    text = """(int64[N] k, bool[P] c) => (int64[A] z) {
        one = Squeeze(c)
        r = If(one) <then_branch = a () => (int64[T] p) { p = Identity(k) },
                     else_branch = b () => (int64[U] q) { u, i1, i2, i3 = Unique(k) q = Identity(u) }>
        z = Squeeze(r) }"""
    graph = load(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> g {text}'))
    model = to_onnx(decompose(graph, staged=True))
    for holds, wanted in ((True, [3, 1, 3]), (False, [1, 3])):
        (z,) = run(model, {"k": np.array([3, 1, 3]), "c": np.array([holds])})
        np.testing.assert_array_equal(z, wanted)
