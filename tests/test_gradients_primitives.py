"""The derivative rule of every primitive, against central differences in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from onnxc.autodiff.rules import rules
from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from onnxc.primitives.base import TABLE
from onnxc.primitives.builder import Builder
from tests.gradient_harness import agrees, distinct, floats, gradient, ints

NO_FLOATS = "its result or its operands are no floats"
WITHOUT = {
    **dict.fromkeys(("eq", "lt", "le", "isnan", "isinf", "argmax", "argmin", "threefry"), NO_FLOATS),
    **dict.fromkeys(("quantize", "byte_table", "bitcast"), NO_FLOATS),
    **dict.fromkeys(("not", "and", "or", "xor", "bitand", "bitor", "bitxor", "bitnot", "shl", "shr"), NO_FLOATS),
    **dict.fromkeys(("constant", "iota", "sizes", "random_state"), "it has no operands"),
    **dict.fromkeys(("tree_leaves", "nms", "positions"), "what it finds is places and counts, which are no floats"),
    **dict.fromkeys(("read", "host", "later"), "a step on the host"),
    **dict.fromkeys(("attention_norm", "attention_gradient"), "a training step's, which is not differentiated again"),
    "matmul_quantized": "the pass that makes it runs after differentiation",
}


def test_every_primitive_has_a_rule_or_a_reason() -> None:
    assert set(TABLE) - set(rules()) == set(WITHOUT)
    assert set(rules()) <= set(TABLE)


SHAPES = [(), (1,), (7,), (2, 3), (0, 3), (3, 1, 5)]
DOMAINS = {
    "log": (0.2, 3), "sqrt": (0.2, 3), "asin": (-0.9, 0.9), "acos": (-0.9, 0.9), "acosh": (1.2, 3),
    "atanh": (-0.9, 0.9), "tan": (-1.2, 1.2),
}  # fmt: skip
UNARY = ["neg", "abs", "sign", "exp", "log", "sqrt", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh",
         "tanh", "asinh", "acosh", "atanh", "erf", "floor", "ceil", "round", "copy"]  # fmt: skip


@pytest.mark.parametrize("op", UNARY)
def test_unary(op: str) -> None:
    low, high = DOMAINS.get(op, (-2.0, 2.0))
    for shape in SHAPES:
        agrees(lambda b, x: b.unary(op, x), floats(*shape, low=low, high=high))


PAIRS = [((), ()), ((3,), (3,)), ((2, 3), (3,)), ((2, 1), (1, 5)), ((), (4,)), ((1, 1, 3), (2, 3)), ((0, 3), (3,)),
         ((2, 3), (1,)), ((1,), (1, 1))]  # fmt: skip


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "max", "min", "mod", "fmod"])
def test_binary(op: str) -> None:
    for first, second in PAIRS:
        y = floats(*second, seed=1, low=0.4) * np.sign(floats(*second, seed=2))
        agrees(lambda b, x, y: b.binary(op, x, y), floats(*first, low=-5, high=5), y)


def test_pow() -> None:
    for first, second in PAIRS:
        agrees(lambda b, x, y: b.pow(x, y), floats(*first, low=0.2), floats(*second, seed=1, low=-3))
    agrees(lambda b, x: b.pow(x, 3.0), floats(3, 5))
    agrees(lambda b, x: b.pow(x, -2.0), floats(3, 5, low=0.3))


def test_pow_where_it_is_steep() -> None:
    x, p = np.array([0.0, 0.0, 0.0, 0.0, 2.0]), np.array([0.0, 1.0, 2.0, 3.0, 0.0])
    dx, dp = gradient(lambda b, x, p: b.pow(x, p), x, p)
    np.testing.assert_array_equal(dx, [0, 1, 0, 0, 0])
    np.testing.assert_allclose(dp, [0, 0, 0, 0, np.log(2)])


@pytest.mark.parametrize("shapes", [((), (), ()), ((2, 3), (3,), (2, 1)), ((3,), (2, 3), ()), ((0,), (1,), (0,))])
def test_where(shapes: Sequence[tuple[int, ...]]) -> None:
    c = floats(*shapes[0]) > 0
    agrees(lambda b, c, x, y: b.where(c, x, y), c, floats(*shapes[1]), floats(*shapes[2], seed=1))


def test_cast_there_and_back() -> None:
    x = floats(2, 3).astype(np.float32)
    (dx,) = gradient(lambda b, x: b.mul(b.cast(x, dtypes.float64), 3.0), x)
    assert dx.dtype == np.float32
    np.testing.assert_array_equal(dx, np.full((2, 3), 3, np.float32))


def test_integers_cut_the_gradient() -> None:
    def build(b: Builder, x: Value) -> Value:
        return b.add(x, b.cast(b.cast(b.mul(x, 10.0), dtypes.int64), dtypes.float64))

    (dx,) = gradient(build, floats(5))
    np.testing.assert_array_equal(dx, np.ones(5))


# ------------------------------------------------------------ movement


def test_movement() -> None:
    agrees(lambda b, x: b.reshape(x, (x.shape[0] * x.shape[1],)), floats(3, 5))
    agrees(lambda b, x: b.reshape(x, (1,)), floats())
    agrees(lambda b, x: b.transpose(x, (2, 0, 1)), floats(2, 3, 5))
    agrees(lambda b, x: b.expand(x, (7, 3, 2)), floats(3, 1))
    agrees(lambda b, x: b.expand(x, (0, 3)), floats(1, 3))
    agrees(lambda b, x, y: b.expand(x, (y.shape[0], 3)), floats(1, 1), floats(5))
    agrees(lambda b, x, y, z: b.concat([x, y, x, z], 1), floats(2, 3), floats(2, 0), floats(2, 1))


@pytest.mark.parametrize(
    ("shape", "starts", "sizes", "steps"),
    [
        ((7,), (2,), (3,), (1,)), ((7,), (1,), (3,), (2,)), ((7,), (0,), (2,), (5,)), ((7,), (6,), (7,), (-1,)),
        ((7,), (5,), (3,), (-2,)), ((7,), (6,), (2,), (-4,)), ((7,), (3,), (0,), (1,)), ((7,), (0,), (0,), (-2,)),
        ((5, 8), (4, 1), (3, 3), (-2, 3)), ((5, 0), (1, 0), (2, 0), (2, 1)), ((1, 1), (0, 0), (1, 1), (3, -1)),
    ],
)  # fmt: skip
def test_slice(shape: Any, starts: Any, sizes: Any, steps: Any) -> None:
    agrees(
        lambda b, x: b.one("slice", x, starts=starts, sizes=sizes, steps=steps), floats(*shape), dynamic=False
    )  # fmt: skip


def test_slices_of_dynamic_sizes() -> None:
    agrees(lambda b, x: b.flip(x, [0, 1]), floats(3, 5))
    agrees(lambda b, x: b.slice(x, 0, 1, x.shape[0]), floats(3, 5))
    agrees(lambda b, x: b.slice(x, 0, 0, x.shape[0], 2), floats(6, 2))
    agrees(lambda b, x: b.slice(x, 0, 1, x.shape[0], 3), floats(6, 2))
    agrees(lambda b, x: b.split(x, 1, [2, x.shape[1] - 2]), floats(2, 5))


@pytest.mark.parametrize(
    ("shape", "low", "high", "interior"),
    [
        ((5,), (1,), (2,), (0,)), ((5,), (0,), (0,), (2,)), ((3, 4), (2, 0), (0, 1), (1, 3)),
        ((0, 3), (1, 1), (2, 0), (0, 0)), ((1,), (0,), (4,), (3,)), ((), (), (), ()),
    ],
)  # fmt: skip
def test_pad(shape: Any, low: Any, high: Any, interior: Any) -> None:
    agrees(lambda b, x, v: b.one("pad", x, v, low=low, high=high, interior=interior), floats(*shape), floats())


# ------------------------------------------------------------ reductions and windows

AXES = [((7,), (0,)), ((2, 3, 5), (1,)), ((2, 3, 5), (0, 2)), ((2, 3), (0, 1)), ((1, 4), (0,)), ((3, 0), (0,))]


@pytest.mark.parametrize("op", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize(("shape", "axes"), AXES)
def test_reductions(op: str, shape: Any, axes: Any) -> None:
    agrees(lambda b, x: b.reduce(op, x, axes), distinct(*shape) if op in ("max", "min") else floats(*shape))


def test_sum_over_nothing() -> None:
    agrees(lambda b, x: b.reduce("sum", x, [1]), floats(3, 0))
    agrees(lambda b, x: b.reduce("prod", x, [1]), floats(3, 0))


@pytest.mark.parametrize("zeros", [0, 1, 2, 3])
def test_products_with_zeros(zeros: int) -> None:
    x = floats(2, 3, low=0.5)
    x[1, :zeros] = 0
    agrees(lambda b, x: b.reduce("prod", x, [1]), x)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_cumsum(exclusive: bool, reverse: bool) -> None:
    for shape, axis in [((5,), 0), ((2, 3, 4), 1), ((2, 0), 1), ((2, 0), 0), ((1, 1), 1)]:
        agrees(lambda b, x, a=axis: b.one("cumsum", x, axis=a, exclusive=exclusive, reverse=reverse), floats(*shape))


WINDOWS: list[dict[str, Any]] = [
    {"shape": (7,), "kernel": (3,)},
    {"shape": (2, 9), "kernel": (1, 3), "strides": (1, 2)},
    {"shape": (2, 9), "kernel": (1, 2), "strides": (1, 3)},
    {"shape": (1, 8), "kernel": (1, 3), "strides": (1, 2), "low": (0, 1), "high": (0, 2), "dilations": (1, 2)},
    {"shape": (2, 5, 7), "kernel": (1, 2, 3), "strides": (1, 2, 2), "low": (0, 1, 1), "high": (0, 0, 1)},
    {"shape": (5,), "kernel": (5,), "low": (2,), "high": (2,)},
    {"shape": (6,), "kernel": (2,), "strides": (4,)},
    {"shape": (11,), "kernel": (2,), "strides": (3,), "dilations": (4,)},
    {"shape": (3, 4), "kernel": (2, 2), "low": (1, 0), "high": (0, 1)},
    {"shape": (0, 4), "kernel": (1, 2)},
]


@pytest.mark.parametrize("op", ["window_sum", "window_max"])
@pytest.mark.parametrize("case", WINDOWS)
def test_windows(op: str, case: dict[str, Any]) -> None:
    n = len(case["shape"])
    attrs = {"strides": (1,) * n, "dilations": (1,) * n, "low": (0,) * n, "high": (0,) * n, **case}
    shape = attrs.pop("shape")
    agrees(lambda b, x: b.one(op, x, **attrs), distinct(*shape))


# ------------------------------------------------------------ products


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ((2, 3), (3, 5)), ((1, 7), (7, 1)), ((4, 2, 3), (3, 5)), ((2, 3), (4, 3, 5)), ((4, 2, 3), (4, 3, 5)),
        ((4, 1, 2, 3), (5, 3, 2)), ((2, 0), (0, 3)), ((0, 3), (3, 2)), ((2, 2, 1, 3), (1, 2, 3, 1)),
        ((4, 2, 3), (1, 3, 5)), ((1, 2, 3), (3, 5)), ((1, 2, 3), (1, 1, 3, 5)),
    ],
)  # fmt: skip
def test_matmul(x: Any, y: Any) -> None:
    agrees(lambda b, x, y: b.matmul(x, y), floats(*x), floats(*y, seed=1))


CONVS: list[dict[str, Any]] = [
    {"x": (1, 1, 5), "w": (1, 1, 3)},
    {"x": (2, 3, 7), "w": (4, 3, 2), "strides": (2,)},
    {"x": (2, 3, 8), "w": (2, 3, 3), "strides": (3,), "low": (1,), "high": (0,)},
    {"x": (1, 2, 9), "w": (2, 2, 3), "dilations": (2,), "low": (2,), "high": (1,)},
    {"x": (2, 4, 5, 6), "w": (6, 2, 3, 2), "groups": 2, "low": (1, 0), "high": (1, 1)},
    {"x": (1, 3, 5, 5), "w": (3, 1, 3, 3), "groups": 3, "strides": (2, 2), "low": (1, 1), "high": (1, 1)},
    {"x": (2, 2, 7, 9), "w": (3, 2, 2, 3), "strides": (2, 3), "dilations": (3, 2), "low": (1, 2), "high": (2, 0)},
    {"x": (1, 2, 4, 4), "w": (2, 2, 1, 1), "strides": (2, 2)},
    {"x": (1, 1, 3, 4, 3), "w": (2, 1, 2, 2, 2), "strides": (1, 2, 1), "low": (0, 1, 0), "high": (1, 0, 0)},
    {"x": (1, 1, 4), "w": (1, 1, 2), "strides": (5,)},
    {"x": (1, 1, 2), "w": (1, 1, 3), "low": (4,), "high": (3,)},
    {"x": (0, 2, 5), "w": (3, 2, 2)},
]


@pytest.mark.parametrize("case", CONVS)
def test_conv(case: dict[str, Any]) -> None:
    case = dict(case)
    x, w = floats(*case.pop("x")), floats(*case.pop("w"), seed=1)
    n = x.ndim - 2
    attrs = {"strides": (1,) * n, "dilations": (1,) * n, "low": (0,) * n, "high": (0,) * n, "groups": 1, **case}
    agrees(lambda b, x, w: b.one("conv", x, w, **attrs), x, w, dynamic=False)
    dynamic = x.copy()

    def of_dynamic_images(b: Builder, x: Value, n: Value) -> Value:
        """Batch and image sizes are known only at run time."""
        return b.one("conv", x, b.constant(w), **attrs)

    if attrs["groups"] == 1 and len({*x.shape} - {1}) > 1:
        agrees(of_dynamic_images, dynamic, floats(1))


# ------------------------------------------------------------ positions that are data


@pytest.mark.parametrize(
    ("x", "index", "axis"),
    [((5,), (3,), 0), ((3, 4), (2, 2), 1), ((3, 4), (), 0), ((2, 3, 4), (7,), 1), ((3, 4), (0,), 1), ((1, 2), (3,), 0)],
)
def test_gather(x: Any, index: Any, axis: int) -> None:
    at = ints(*index, low=-x[axis], high=x[axis])
    agrees(lambda b, x, i: b.gather(x, i, axis), floats(*x), at)
    agrees(lambda b, x, i: b.gather(x, i, axis), floats(*x), at.astype(np.int32))


def test_gather_elements() -> None:
    for x, index, axis in [((5,), (8,), 0), ((3, 4), (2, 6), 1), ((3, 4), (5, 4), 0), ((2, 3, 2), (2, 0, 2), 1)]:
        at = ints(*index, low=-x[axis], high=x[axis])
        agrees(lambda b, x, i, a=axis: b.one("gather_elements", x, i, axis=a), floats(*x), at)


@pytest.mark.parametrize(
    ("x", "index", "batch"),
    [((4, 3), (5, 1), 0), ((4, 3), (5, 2), 0), ((2, 4, 3), (2, 5, 1), 1), ((2, 3, 4), (2, 3, 1), 2),
     ((2, 3, 2, 2), (2, 4, 3, 2), 1), ((3, 2), (0, 1), 0)],
)  # fmt: skip
def test_gather_nd(x: Any, index: Any, batch: int) -> None:
    depth = index[-1]
    at = np.zeros(index, np.int64)
    for k in range(depth):
        at[..., k] = ints(*index[:-1], high=x[batch + k], seed=k)
    agrees(lambda b, x, i: b.one("gather_nd", x, i, batch_dims=batch), floats(*x), at, dynamic=False)


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_scatter_elements(reduction: str) -> None:
    once = reduction == "none"
    for x, index, axis in [((5,), (3,), 0), ((3, 4), (2, 4), 1), ((3, 4), (3, 2), 0), ((2, 3), (2, 0), 1)]:
        rng = np.random.default_rng(0)
        lines = [rng.permutation(x[axis])[: index[axis]] for _ in range(10)]
        at = np.stack([lines[k] for k in range(index[1 - axis])], 1 - axis) if len(x) > 1 else lines[0]
        at = at.reshape(index) if once else ints(*index, low=-x[axis], high=x[axis])
        values = distinct(int(np.prod(x) + np.prod(index)))
        data, updates = values[: int(np.prod(x))].reshape(x), values[int(np.prod(x)) :].reshape(index)
        agrees(lambda b, x, i, u, a=axis: b.one("scatter_elements", x, i, u, axis=a, reduction=reduction),
               data, at, updates)  # fmt: skip


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_scatter_nd(reduction: str) -> None:
    for x, index, updates in [
        ((5,), (3, 1), (3,)),
        ((4, 3), (2, 1), (2, 3)),
        ((3, 4), (3, 2), (3,)),
        ((3, 2), (0, 1), (0, 2)),
    ]:
        rng = np.random.default_rng(1)
        at = np.zeros(index, np.int64)
        for k in range(index[1]):
            size = x[k]
            at[:, k] = rng.permutation(size)[: index[0]] if reduction == "none" else rng.integers(-size, size, index[0])
        values = distinct(int(np.prod(x) + np.prod(updates)))
        data, new = values[: int(np.prod(x))].reshape(x), values[int(np.prod(x)) :].reshape(updates)
        agrees(lambda b, x, i, u: b.one("scatter_nd", x, i, u, reduction=reduction), data, at, new, dynamic=False)


def test_top_k() -> None:
    for shape, axis, k, largest in [
        ((7,), 0, 3, True),
        ((3, 5), 1, 2, False),
        ((3, 5), 0, 3, True),
        ((2, 0), 0, 1, True),
    ]:
        agrees(lambda b, x, a=axis, k=k, g=largest: list(b.emit("top_k", [x], {"k": k, "axis": a, "largest": g})),
               distinct(*shape), dynamic=False)  # fmt: skip


# ------------------------------------------------------------ ties and edges


def test_ties_of_max_and_min() -> None:
    x = np.array([1.0, 2.0, 3.0])
    for op in ("max", "min"):
        dx, dy = gradient(lambda b, x, y, op=op: b.binary(op, x, y), x, x.copy())
        np.testing.assert_array_equal(dx, np.full(3, 0.5))
        np.testing.assert_array_equal(dy, np.full(3, 0.5))
        (both,) = gradient(lambda b, x, op=op: b.binary(op, x, x), x)
        np.testing.assert_array_equal(both, np.ones(3))


def test_ties_of_reductions_share_evenly() -> None:
    x = np.array([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    (dx,) = gradient(lambda b, x: b.reduce("max", x, [1]), x)
    np.testing.assert_array_equal(dx, [[0, 0.5, 0.5, 0], [0.25] * 4])


def test_ties_of_windows_go_to_the_first() -> None:
    attrs = {"kernel": (2,), "strides": (2,), "dilations": (1,), "low": (0,), "high": (0,)}
    (dx,) = gradient(lambda b, x: b.one("window_max", x, **attrs), np.array([5.0, 5.0, 1.0, 2.0]))
    np.testing.assert_array_equal(dx, [1, 0, 0, 1])


def test_abs_and_sign_at_zero() -> None:
    for op in ("abs", "sign"):
        (dx,) = gradient(lambda b, x, op=op: b.unary(op, x), np.zeros(3))
        np.testing.assert_array_equal(dx, np.zeros(3))


@pytest.mark.parametrize("mask", ["none", "added", "condition"])
def test_attention(mask: str) -> None:
    """Heads that share keys and values; a mask has no derivative."""
    q, kt, v = floats(2, 4, 3, 5), floats(2, 1, 5, 6, seed=1), floats(2, 1, 6, 2, seed=2)
    extra: list[Any] = {"none": [], "added": [floats(3, 6, seed=3)], "condition": [ints(3, 6, high=2) == 0]}[mask]
    fill = {"fill": -0.7} if mask == "condition" else {}
    fixed = [3] if mask == "added" else []

    def build(b: Builder, *xs: Value) -> Value:
        return b.one("attention", *xs, scale=0.6, guard=True, **fill)

    agrees(build, q, kt, v, *extra, fixed=fixed)
