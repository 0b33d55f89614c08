"""Loop kernels: reductions, windows, and contractions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from tests.loop_cases import Bench, Table

TABLE = Table()
case = TABLE.case


# ---------------------------------------------------------------- reductions


def _reductions() -> None:
    for r in range(1, 4):
        for axes in itertools.combinations(range(3), r):
            case(rtol=1e-4, name=f"sum{''.join(map(str, axes))}")(
                lambda b, axes=axes: b.reduce("sum", b.x(b.n, 5, b.m), axes)
            )
            case(dynamic=False, rtol=1e-4, name=f"reduce{''.join(map(str, axes))}")(
                lambda b, axes=axes: _reduction(b, axes)
            )


def _reduction(b: Bench, axes: Sequence[int]) -> list[Value]:
    kinds = [dtypes.float32, dtypes.float64, dtypes.int32, dtypes.int64, dtypes.uint8]
    return [
        b.reduce(op, b.x(b.n, 5, b.m, dtype=t), axes, t.is_float) for op in ("sum", "max", "min", "prod") for t in kinds
    ]


_reductions()


@case(dynamic=False)
def reductions_of_special_values(b: Bench) -> list[Value]:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((5, 70)).astype(np.float32)
    x[0, 60], x[1, 3], x[2, :], x[3, 5], x[3, 6] = np.nan, np.inf, -np.inf, np.inf, -np.inf
    value = b.array(x)
    return [b.reduce(op, value, axes) for op in ("sum", "max", "min") for axes in ([1], [0], [0, 1])]


@case(dynamic=False)
def arg_reductions(b: Bench) -> list[Value]:
    rng = np.random.default_rng(4)
    ties = rng.integers(0, 3, (6, 37, 5))
    out = []
    for dtype in (dtypes.float32, dtypes.float64, dtypes.int32, dtypes.int64, dtypes.int8, dtypes.uint8):
        x = b.array(ties.astype(dtype.numpy))
        out += [
            b.one(op, x, axis=axis, last=last)
            for op in ("argmax", "argmin")
            for axis in range(3)
            for last in (False, True)
        ]
    return out


@case(dynamic=False)
def arg_reductions_of_nan(b: Bench) -> list[Value]:
    rng = np.random.default_rng(5)
    x = rng.integers(-3, 4, (40, 37)).astype(np.float32)
    x[rng.random(x.shape) < 0.3] = np.nan
    x[3], x[:, 4], x[5, 0], x[6, 0] = np.nan, np.nan, np.nan, 1
    x[5, 1:], x[6, 1:] = np.inf, -np.inf
    x[6, 2:9] = np.nan
    return [
        b.one(op, b.array(x.astype(dtype)), axis=axis, last=last)
        for dtype, lasts in ((np.float32, (False, True)), (np.float64, (False,)))
        for op in ("argmax", "argmin")
        for axis in (0, 1)
        for last in lasts
    ]


@case(dynamic=False)
def arg_reductions_of_ends(b: Bench) -> list[Value]:
    types = {np.int8: -128, np.uint8: 255, np.int64: -(2**63)}
    ends = [np.full((3, 21), end, dtype) for dtype, end in types.items()]
    for x in ends:
        x[1, 7] = 1
    return [b.one(op, b.array(x), axis=1, last=False) for x in ends for op in ("argmax", "argmin")]


@case()
def arg_of_chain(b: Bench) -> list[Value]:
    x = b.tanh(b.x(b.n, 19))
    return [b.one("argmax", x, axis=1), x, b.gather(b.x(19, b.m), b.one("argmin", b.x(b.n, 19), axis=1), 0)]


@case()
def softmaxes(b: Bench) -> list[Value]:
    return [
        b.softmax(b.x(b.n, 40), 1),
        b.softmax(b.x(b.n, 9, b.m), 1),
        b.softmax(b.x(3, 50, dtype=dtypes.float64), 0),
        b.softmax(b.x(b.n, 1), 1),
    ]


@case()
def layer_norms(b: Bench) -> list[Value]:
    x = b.add(b.x(b.n, 48), b.x(48))
    centred = b.sub(x, b.mean(x, [1], True))
    variance = b.mean(b.mul(centred, centred), [1], True)
    return [b.add(b.mul(b.div(centred, b.sqrt(b.add(variance, 1e-5))), b.x(48)), b.x(48)), x, variance]


@case()
def rows_of_dynamic_length(b: Bench) -> list[Value]:
    x = b.pad(b.x(b.n, b.m), (0, 0), (0, 1))
    centred = b.sub(x, b.mean(x, [1], True))
    return [b.softmax(x, 1), b.div(centred, b.add(b.reduce("sum", b.mul(centred, centred), [1], True), 1.0))]


@case()
def two_reductions_one_pass(b: Bench) -> list[Value]:
    x = b.x(b.n, 3, b.m)
    return [
        b.reduce("sum", x, [1]),
        b.reduce("sum", b.mul(x, x), [1]),
        b.add(b.reduce("sum", x, [0, 2]), b.reduce("sum", b.abs(x), [0, 2])),
    ]


@case(rtol=1e-4)
def reductions_over_other_axes(b: Bench) -> list[Value]:
    x = b.x(b.n, 4, b.m)
    rows, columns = b.reduce("sum", x, [2], True), b.reduce("sum", x, [1], True)
    return [
        b.add(b.mul(x, rows), columns),
        b.reduce("sum", b.tanh(b.reduce("sum", x, [2])), [1]),
        b.softmax(b.softmax(x, 1), 0),
    ]


@case()
def reduced_and_stored(b: Bench) -> list[Value]:
    x = b.x(b.n, 20)
    total = b.reduce("sum", x, [1], True)
    scaled = b.mul(x, total)
    return [total, scaled, b.reduce("max", scaled, [1]), b.exp(total)]


@case()
def diamonds(b: Bench) -> list[Value]:
    x = b.exp(b.x(b.n, b.m))
    left, right = b.neg(x), b.mul(x, x)
    joined = b.add(left, right)
    return [joined, left, b.reduce("sum", b.mul(joined, x), [0])]


@case()
def scalars_and_broadcast_values(b: Bench) -> list[Value]:
    total = b.reduce("sum", b.x(b.n, 6), [0, 1])
    return [b.mul(b.x(b.m), total), b.where(b.lt(total, 0.0), b.x(b.m), b.x(b.m)), total]


@case()
def group_norm(b: Bench) -> Value:
    x = b.x(2, 8, b.n, 3)
    grouped = b.reshape(x, (2, 4, b.n * 6))
    padded = b.pad(grouped, (0, 0, 0), (0, 0, 1))
    centred = b.sub(grouped, b.mean(padded, [2], True))
    scaled = b.reshape(
        b.div(centred, b.sqrt(b.add(b.reduce("sum", b.mul(centred, centred), [2], True), 1.0))),
        (2, 8, b.n, 3),
    )
    return b.mul(scaled, b.reshape(b.x(8), (1, 8, 1, 1)))


@case()
def store_inside_a_contraction(b: Bench) -> list[Value]:
    """A value that a matmul reads must not be stored once per column."""
    x = b.flip(b.x(b.n, 6, dtype=dtypes.int64), (0,))
    return [b.one("copy", x), b.matmul(x, b.x(6, b.m, dtype=dtypes.int64))]


# ---------------------------------------------------------------- windows and contractions


def _window(
    b: Bench,
    op: str,
    x: Value,
    kernel: Sequence[int],
    strides: Sequence[int],
    pads: int,
    dilations: Sequence[int],
) -> Value:
    low = tuple(pads if k > 1 else 0 for k in kernel)
    return b.one(op, x, kernel=tuple(kernel), strides=tuple(strides), low=low, high=low, dilations=tuple(dilations))


@case(dynamic=False, rtol=1e-4)
def windows(b: Bench) -> list[Value]:
    out = []
    for dtype in (dtypes.float32, dtypes.float64, dtypes.int32):
        for op in ("window_sum", "window_max"):
            x = b.x(2, 3, 11, 13, dtype=dtype)
            out += [
                _window(b, op, x, (1, 1, 3, 3), (1, 1, s, s), p, (1, 1, d, d))
                for s, p, d in ((1, 0, 1), (2, 1, 1), (1, 2, 2))
            ]
            out.append(_window(b, op, b.x(40, dtype=dtype), (5,), (3,), 2, (1,)))
    return out


@case()
def window_chain(b: Bench) -> list[Value]:
    x = b.exp(b.x(b.n, 2, 20, 9))
    pooled = b.div(_window(b, "window_sum", x, (1, 1, 2, 2), (1, 1, 2, 2), 0, (1, 1, 1, 1)), 4.0)
    return [b.tanh(pooled), b.reduce("sum", pooled, [2, 3])]


@case(dynamic=False, rtol=1e-4)
def convolutions_of_other_types(b: Bench) -> list[Value]:
    plain = {"strides": (1, 1), "low": (0, 0), "high": (0, 0), "dilations": (1, 1), "groups": 1}
    padded = {"strides": (2, 1), "low": (1, 2), "high": (1, 0), "dilations": (1, 2), "groups": 2}
    out = []
    for dtype in (dtypes.float64, dtypes.int32):
        out.append(b.one("conv", b.x(2, 4, 9, 8, dtype=dtype), b.x(5, 4, 3, 3, dtype=dtype), **plain))
        out.append(b.one("conv", b.x(2, 4, 9, 8, dtype=dtype), b.x(6, 2, 3, 2, dtype=dtype), **padded))
    return out


@case(rtol=1e-4)
def matmuls_of_other_types(b: Bench) -> list[Value]:
    double = b.matmul(b.x(b.n, 9, dtype=dtypes.float64), b.x(9, b.m, dtype=dtypes.float64))
    chained = b.matmul(
        b.matmul(b.x(3, b.n, 4, dtype=dtypes.int64), b.x(4, 5, dtype=dtypes.int64)),
        b.x(3, 5, b.m, dtype=dtypes.int64),
    )
    return [
        b.tanh(double),
        chained,
        b.matmul(b.x(2, b.n, 3, dtype=dtypes.int32), b.x(1, 3, 17, dtype=dtypes.int32)),
    ]
