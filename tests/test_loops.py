"""Loop kernels: every primitive that becomes a loop, through the planner and the C++ compiler, against numpy.

A case is a function of a `Bench`, which builds a graph; most are compiled once for fixed sizes and once
for sizes
known only at run time. Many cases share one compiler run.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from onnxc.errors import RunError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, Sym, evaluate
from onnxc.ir.graph import Graph, Value
from onnxc.ir.types import TensorType
from onnxc.primitives.builder import Builder
from onnxc.runtime.cpu import level
from tests.compile_harness import UNFUSED, Compiled, check, compare, compile_graphs

pytestmark = pytest.mark.every_target

SIZES = [(7, 17), (1, 33), (31, 1), (0, 5), (16, 3)]  # of the two dims n and m
FIXED = [0, 3]  # the sizes of which there are kernels of fixed shape
PER_LIBRARY = 24
FLOATS = [dtypes.float32, dtypes.float64, dtypes.float16, dtypes.bfloat16]
SIGNED = [dtypes.int8, dtypes.int16, dtypes.int32, dtypes.int64]
UNSIGNED = [dtypes.uint8, dtypes.uint16, dtypes.uint32, dtypes.uint64]
INTS = SIGNED + UNSIGNED


class Bench(Builder):
    """A builder whose inputs come with data. `n` and `m` are ints, or symbols where the sizes are dynamic."""

    def __init__(self, sizes: tuple[int, int], dynamic: bool) -> None:
        super().__init__()
        self.n: Dim = Sym("s0") if dynamic else sizes[0]
        self.m: Dim = Sym("s1") if dynamic else sizes[1]
        self.data: dict[int, np.ndarray | Dim] = {}
        if dynamic:
            self.x(self.n), self.x(self.m)  # inputs that tell the sizes

    def x(self, *shape: Dim, dtype: DType = dtypes.float32) -> Value:
        """An input of small numbers."""
        return self.input(TensorType(dtype, shape), f"x{len(self.inputs)}")

    def array(self, array: np.ndarray) -> Value:
        """An input with this content."""
        value = self.x(*array.shape, dtype=dtypes.from_numpy(array.dtype))
        self.data[value.id] = array
        return value

    def index(self, extent: Dim, *shape: Dim, dtype: DType = dtypes.int64) -> Value:
        """An input of positions along an axis, negative ones among them."""
        value = self.x(*shape, dtype=dtype)
        self.data[value.id] = extent
        return value


def content(bench: Bench, value: Value, sizes: dict[str, int]) -> np.ndarray:
    """The data of an input."""
    given = bench.data.get(value.id)
    if isinstance(given, np.ndarray):
        return given
    shape = [evaluate(d, sizes) for d in value.shape]
    rng = np.random.default_rng([len(shape), bench.inputs.index(value)])  # the same, whatever ran before
    if given is not None:
        extent = evaluate(given, sizes)
        return rng.integers(-extent, max(extent, 1 - extent), shape).astype(value.dtype.numpy)
    if value.dtype.is_float:
        return (rng.standard_normal(shape) * 2).astype(value.dtype.numpy)
    return rng.integers(
        0 if value.dtype.kind in ("uint", "bool") else -9, 2 if value.dtype.kind == "bool" else 10, shape
    ).astype(value.dtype.numpy)


@dataclass(frozen=True)
class Case:
    """A graph builder, the sizes it is compiled for (None: dynamic), and whether it is fused."""

    name: str
    build: Callable[[Bench], Value | Sequence[Value]]
    at: int | None
    fused: bool = True
    rtol: float = 2e-5


CASES: list[Case] = []


def case(*, dynamic: bool = True, rtol: float = 2e-5, name: str = "") -> Callable[..., Callable[..., object]]:
    """Registers a case in all its forms."""

    def register(build: Callable[[Bench], Value | Sequence[Value]]) -> Callable[..., object]:
        label = name or build.__name__
        for at in [*(FIXED if dynamic else FIXED[:1]), *([None] if dynamic else [])]:
            CASES.append(
                Case(
                    f"{label}-{'dynamic' if at is None else 'x'.join(map(str, SIZES[at]))}",
                    build,
                    at,
                    True,
                    rtol,
                )
            )
        CASES.append(Case(f"{label}-unfused", build, 0, False, rtol))
        return build

    return register


# ---------------------------------------------------------------- pointwise primitives, dtypes, special
# values

SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    1.5,
    2.5,
    -2.5,
    3.0,
    -7.25,
    1e-40,
    -1e-42,
    1e-30,
    1e30,
    -1e30,
    np.inf,
    -np.inf,
    np.nan,
    88.0,
    -100.0,
    20.0,
]
UNARY_FLOAT = [
    "neg", "abs", "sign", "exp", "log", "sqrt", "sin", "cos", "tan", "asin", "acos", "atan", "sinh",
    "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "floor", "ceil", "round",
]  # fmt: skip
BINARY_FLOAT = ["add", "sub", "mul", "div", "pow", "mod", "fmod", "max", "min"]
BINARY_INT = ["add", "sub", "mul", "max", "min", "bitand", "bitor", "bitxor"]


def extremes(dtype: DType) -> np.ndarray:
    """All kinds of numbers of a dtype."""
    if dtype.kind == "bool":
        return np.array([True, False, False, True, True])
    if dtype.is_float:
        with np.errstate(all="ignore"):
            return np.array(SPECIAL, np.float64).astype(dtype.numpy)
    info = np.iinfo(dtype.numpy)
    return np.array(
        [
            0,
            1,
            2,
            3,
            7,
            100,
            info.max,
            info.max - 1,
            info.min,
            info.min + 1,
            *([-1, -2, -7, -100] if dtype.kind == "int" else []),
        ],
        dtype.numpy,
    )


def _pairs(dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    a = extremes(dtype)
    return np.repeat(a, len(a)), np.tile(a, len(a))


def _pointwise() -> None:
    for dtype in FLOATS:
        case(dynamic=False, name=f"unary-{dtype}")(
            lambda b, dtype=dtype: [b.unary(op, b.array(extremes(dtype))) for op in UNARY_FLOAT]
        )
        case(dynamic=False, name=f"binary-{dtype}")(lambda b, dtype=dtype: _binary(b, dtype))
        case(dynamic=False, name=f"tests-{dtype}")(lambda b, dtype=dtype: _float_tests(b, b.array(extremes(dtype))))
    for dtype in INTS:
        case(dynamic=False, name=f"int-{dtype}")(lambda b, dtype=dtype: _int_ops(b, dtype))
    case(dynamic=False, name="logic-bool")(_logic)


def _binary(b: Bench, dtype: DType) -> list[Value]:
    x, y = (b.array(a) for a in _pairs(dtype))
    return [b.one(op, x, y) for op in [*BINARY_FLOAT, "eq", "lt", "le"]]


def _float_tests(b: Bench, x: Value) -> list[Value]:
    return [
        b.isnan(x),
        *(b.one("isinf", x, positive=p, negative=n) for p in (True, False) for n in (True, False)),
        b.where(b.isnan(x), b.neg(x), x),
    ]


def _int_ops(b: Bench, dtype: DType) -> list[Value]:
    x, y = (b.array(a) for a in _pairs(dtype))
    one = b.scalar(1, dtype)
    divisor = b.where(b.eq(y, 0), one, y)
    if dtype.kind == "int":  # INT_MIN / -1 overflows in numpy
        divisor = b.where(b.eq(divisor, -1), one, divisor)
    shift = b.array(_pairs(dtype)[1] & (dtype.bits - 1))
    out = [b.one(op, x, y) for op in [*BINARY_INT, "eq", "lt", "le"]] + [
        b.one(op, x, divisor) for op in ("div", "mod", "fmod")
    ]
    out += [b.unary(op, x) for op in ("neg", "abs", "sign", "bitnot")]
    small = b.min(b.max(x, 0), 3)
    return [
        *out,
        *(b.one(op, x, shift) for op in (("shl", "shr") if dtype.kind == "uint" else ())),
        b.one("pow", small, small),
        b.where(b.lt(x, y), x, y),
    ]


def _logic(b: Bench) -> list[Value]:
    x, y = (b.array(a) for a in _pairs(dtypes.boolean))
    return [
        *(b.one(op, x, y) for op in ("and", "or", "xor", "eq")),
        b.not_(x),
        b.where(x, b.not_(y), y),
        b.cast(x, dtypes.float32),
    ]


_pointwise()


@case(dynamic=False)
def casts(b: Bench) -> list[Value]:
    """Between all dtypes whose conversion C and numpy define alike."""
    out = []
    for source in [*FLOATS, *INTS, dtypes.boolean]:
        values = np.array([0, 1, 2, 3, 100]) if source.kind != "int" else np.array([0, 1, 2, 3, 100, -1, -5, -100])
        exotic = extremes(source)
        for target in [*FLOATS, *INTS, dtypes.boolean]:
            narrow = source.is_float and target.is_integer
            if target is not source:
                out.append(b.cast(b.array(values.astype(source.numpy) if narrow else exotic), target))
    return out


@case(dynamic=False)
def tails_of_widening_casts(b: Bench) -> list[Value]:
    """Half a vector is left over, and only half of a wider one is made of it: nothing past the end is read."""
    return [b.cast(b.x(256 + k), to) for k in (4, 8) for to in (dtypes.int64, dtypes.float64)]


# ---------------------------------------------------------------- broadcasting, sizes, views


@case()
def broadcasts(b: Bench) -> list[Value]:
    x, row, column, one, scalar = b.x(b.n, b.m), b.x(b.m), b.x(b.n, 1), b.x(1, 1), b.x()
    return [
        b.add(x, row),
        b.mul(b.add(x, column), b.sub(row, scalar)),
        b.add(one, b.mul(column, row)),
        b.add(scalar, one),
        b.exp(scalar),
    ]


@case()
def broadcast_middle(b: Bench) -> list[Value]:
    x, y = b.x(3, b.n, 1, b.m), b.x(b.n, 5, 1)
    return [b.add(x, y), b.mul(b.x(2, 1, 1, b.m, 1), b.x(b.n, 1, 3))]


@case()
def broadcast_both_ways(b: Bench) -> Value:
    return b.sub(b.x(b.n, 1, b.m, 1, 3), b.x(1, 4, 1, 2, 1))


@case()
def every_lane_size(b: Bench) -> list[Value]:
    return [
        b.tanh(b.x(b.m, d, dtype=t))
        for d, t in zip((1, 7, 17, 31, 33), itertools.cycle([dtypes.float32, dtypes.float64]), strict=False)
    ]


@case(dynamic=False)
def empty(b: Bench) -> list[Value]:
    x = b.x(3, 0, 4)
    return [
        b.exp(x),
        b.reduce("sum", x, [1]),
        b.reduce("prod", x, [1, 2]),
        b.reshape(x, (0, 12)),
        b.concat([x, b.x(3, 2, 4), x], 1),
        b.pad(x, (0, 1, 0), (0, 1, 0), 3.0),
        b.reduce("max", b.transpose(x, (2, 0, 1)), [0]),
    ]


@case()
def reshapes(b: Bench) -> list[Value]:
    x = b.x(6, b.n, 4)
    y = b.exp(x)
    return [
        b.reshape(y, (2, 3, b.n, 2, 2)),
        b.reshape(y, (3, b.n * 8)),
        b.neg(b.reshape(b.reshape(y, (b.n * 24,)), (2, b.n * 3, 4))),
    ]


@case(dynamic=False)
def reshapes_that_do_not_nest(b: Bench) -> list[Value]:
    x = b.x(6, 10, 4)
    return [
        b.add(b.reshape(x, (15, 16)), b.reshape(b.x(16, 15), (15, 16))),
        b.reduce("sum", b.reshape(b.exp(x), (16, 15)), [1]),
        b.softmax(b.reshape(x, (5, 48)), 1),
        b.transpose(b.reshape(x, (8, 30)), (1, 0)),
    ]


@case()
def transposes(b: Bench) -> list[Value]:
    x, y = b.x(b.n, 3, b.m), b.x(2, 3, b.n, 2, 3, 2)
    return [
        b.transpose(x, (2, 1, 0)),
        b.exp(b.transpose(x, (1, 0, 2))),
        b.transpose(b.neg(x), (0, 2, 1)),
        b.transpose(y, (5, 4, 3, 2, 1, 0)),
        b.transpose(y, (3, 0, 5, 1, 2, 4)),
    ]


@case()
def transpose_and_sum(b: Bench) -> Value:
    x = b.x(3, b.n, b.m)
    return b.reduce("sum", b.mul(b.swap(x, 1, 2), b.x(3, b.m, b.n)), [1])


@case(dynamic=False)
def slices(b: Bench) -> list[Value]:
    x = b.x(9, 40, 6)
    cut = b.slice(x, 1, 3, 38, 5)
    back = b.slice(b.slice(x, 0, 8, -1, -2), 2, 5, 1, -3)
    return [
        cut,
        back,
        b.add(b.slice(x, 1, 0, 20), b.slice(x, 1, 20, 40)),
        b.reduce("max", b.flip(x, (0, 2)), [1]),
        b.slice(x, 2, 4, 4),
    ]


@case()
def dynamic_slices(b: Bench) -> list[Value]:
    x = b.x(b.n, b.m)
    half = b.m // 2
    return [
        b.slice(x, 1, half, b.m),
        b.flip(x, (0, 1)),
        b.slice(b.exp(x), 1, 0, half),
        b.slice(x, 0, 0, b.n, 2),
    ]


@case()
def expands(b: Bench) -> list[Value]:
    x = b.x(b.n, 1)
    return [
        b.expand(x, (b.n, b.m)),
        b.exp(b.expand(b.tanh(x), (2, b.n, 3))),
        b.reduce("sum", b.expand(x, (b.n, b.m)), [1]),
        b.full((b.m, 2), 3.5, dtypes.float64),
    ]


@case()
def pads(b: Bench) -> list[Value]:
    x = b.x(b.n, b.m)
    return [
        b.pad(x, (1, 0), (0, 2), -1.0),
        b.exp(b.pad(b.neg(x), (0, 3), (0, 0))),
        b.pad(x, (1, 2), (3, 4), 0.5, (1, 2)),
        b.reduce("sum", b.pad(b.x(b.n, 5), (0, 2), (0, 1), 9.0), [1]),
        b.softmax(b.pad(b.x(b.n, 20), (0, 1), (0, 1)), 1),
    ]


@case()
def pad_of_pad(b: Bench) -> Value:
    return b.add(b.pad(b.pad(b.x(b.n, b.m), (0, 1), (1, 0), 1.0), (1, 1), (0, 1), 2.0), b.x(b.n + 2, b.m + 3))


@case()
def concats(b: Bench) -> list[Value]:
    x, y, z = b.x(b.n, b.m), b.x(b.n, 3), b.x(b.n, b.m)
    return [
        b.concat([x, b.exp(y), z], 1),
        b.concat([b.add(x, z), x], 0),
        b.mul(b.concat([x, y], 1), b.concat([b.neg(y), z], 1)),
        b.concat([b.x(b.n, 2, b.m), b.x(b.n, 1, b.m)], 1),
    ]


@case()
def concat_of_concat(b: Bench) -> list[Value]:
    x = b.x(b.n, 2)
    inner = b.concat([x, b.x(b.n, b.m), b.tanh(x)], 1)
    return [b.concat([inner, b.x(b.n, 1), inner], 1), inner]


@case()
def concat_reduced(b: Bench) -> list[Value]:
    both = b.concat([b.x(b.n, b.m), b.x(b.n, 4)], 1)
    return [
        b.reduce("sum", both, [1]),
        b.softmax(both, 1),
        b.reduce("max", b.concat([b.x(2, b.n), b.x(3, b.n)], 0), [0]),
    ]


@case()
def concat_many(b: Bench) -> Value:
    return b.exp(b.concat([b.x(b.n, k % 3 + 1, dtype=dtypes.float64) for k in range(12)], 1))


@case()
def rope(b: Bench) -> Value:
    """Rotary embedding: halves swapped, one negated."""
    x = b.x(b.n, 4, 32)
    turned = b.concat([b.neg(b.slice(x, 2, 16, 32)), b.slice(x, 2, 0, 16)], 2)
    return b.add(b.mul(x, b.x(b.n, 1, 32)), b.mul(turned, b.x(b.n, 1, 32)))


@case()
def iotas_and_sizes(b: Bench) -> list[Value]:
    mask = b.le(b.reshape(b.iota(b.m), (1, b.m)), b.reshape(b.iota(b.n), (b.n, 1)))
    sizes = b.sizes(np.array([b.n, b.m, 3], dtype=object))
    return [
        b.where(mask, b.x(b.n, b.m), -np.inf),
        b.add(sizes, 1),
        b.cast(b.iota(b.n * 2), dtypes.float32),
        b.mul(b.iota(b.m, dtypes.int32), 3),
        b.size_as(b.n * b.m, dtypes.float32),
    ]


# ---------------------------------------------------------------- data-dependent reads


@case()
def gathers(b: Bench) -> list[Value]:
    x = b.x(9, b.m)
    at = b.index(9, b.n, 2)
    return [
        b.gather(x, at, 0),
        b.exp(b.gather(x, b.index(9), 0)),
        b.gather(b.x(b.n, 11), b.index(11, 5, dtype=dtypes.int32), 1),
        b.add(b.gather(x, at, 0), b.x(b.m)),
    ]


@case()
def gathers_turned(b: Bench) -> list[Value]:
    """Rows that data chooses, stored as columns: whole tiles and parts of them, in every width of a lane."""
    at, turned = b.index(9, b.n, dtype=dtypes.int32), []
    for dtype in (dtypes.float32, dtypes.float64, dtypes.float16, dtypes.int8, dtypes.boolean, dtypes.int64):
        wide, open_ = b.x(9, 37, dtype=dtype), b.x(9, b.m, dtype=dtype)
        turned += [b.transpose(b.gather(v, at, 0), (1, 0)) for v in (wide, open_)]
    x, y = b.x(b.n, 9, 24), b.x(b.n, 50, 24)
    two = b.add(b.gather(x, b.index(9, 50), 1), b.mul(b.gather(x, b.index(9, 50), 1), b.x(50, 1)))
    pairs = b.one(
        "gather_nd", b.x(6, 5, 21), b.array(np.stack([np.arange(40) % 6, np.arange(40) // 3 % 5], 1)), batch_dims=0
    )
    return [
        *turned,
        b.transpose(b.exp(two), (0, 2, 1)),
        b.transpose(b.sub(two, y), (2, 0, 1)),
        b.transpose(b.mul(b.reduce("sum", two, [2], True), two), (0, 2, 1)),
        b.transpose(pairs, (1, 0)),
        b.pad(b.transpose(b.gather(b.x(9, 40), at, 0), (1, 0)), (1, 2), (2, 1), 3.0),
    ]


@case()
def gather_innermost(b: Bench) -> list[Value]:
    x = b.x(b.n, 40)
    at = b.index(40, b.m)
    return [b.gather(x, at, 1), b.reduce("sum", b.gather(b.exp(x), at, 1), [1]), b.gather(x, b.index(40), 1)]


@case()
def gather_elements(b: Bench) -> list[Value]:
    x = b.x(8, b.m, 5)
    return [
        b.one("gather_elements", x, b.index(8, b.n, b.m, 5), axis=0),
        b.one("gather_elements", b.x(b.n, 20), b.index(20, b.n, b.m), axis=1),
    ]


@case()
def gather_nd(b: Bench) -> list[Value]:
    x = b.x(6, 6, b.m)
    return [
        b.one("gather_nd", x, b.index(6, b.n, 2), batch_dims=0),
        b.one("gather_nd", x, b.index(6, 6, b.n, 1), batch_dims=1),
        b.one("gather_nd", x, b.index(6, 3, 1), batch_dims=0),
    ]


@case()
def gather_of_gather(b: Bench) -> Value:
    return b.gather(b.x(7, b.m), b.gather(b.index(7, 10), b.index(10, b.n), 0), 0)


@case()
def gather_under_guards(b: Bench) -> list[Value]:
    x, at = b.gather(b.x(9, 8), b.index(9, b.n), 0), b.index(8, b.n, b.m)
    picked = b.one("gather_elements", b.x(b.n, 8), at, axis=1)
    return [
        b.pad(x, (1, 1), (1, 0), 2.0),
        b.neg(b.concat([picked, b.slice(x, 1, 0, 3), picked], 1)),
        b.pad(b.exp(picked), (0, 2), (0, 1)),
    ]


@case()
def embeddings(b: Bench) -> Value:
    tokens, positions = b.gather(b.x(50, 24), b.index(50, b.n, b.m), 0), b.x(b.m, 24)
    x = b.add(tokens, positions)
    centred = b.sub(x, b.mean(x, [2], True))
    return b.div(centred, b.sqrt(b.add(b.mean(b.mul(centred, centred), [2], True), 1e-5)))


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


# ---------------------------------------------------------------- running them


def _graph(one: Case) -> tuple[Bench, Graph]:
    bench = Bench(SIZES[one.at or 0], one.at is None)
    built = one.build(bench)
    return bench, bench.graph([built] if isinstance(built, Value) else built)


@functools.cache
def _library(first: int, cpu: str) -> list[tuple[Bench, Compiled]]:
    """The cases from `first` on that share a library."""
    group = CASES[first : first + PER_LIBRARY]
    made = [_graph(c) for c in group]
    compiled: dict[int, Compiled] = {}
    for fused in (True, False):
        chosen = [k for k, c in enumerate(group) if c.fused is fused]
        if chosen:
            options = None if fused else UNFUSED
            compiled.update(zip(chosen, compile_graphs([made[k][1] for k in chosen], options, level(cpu)), strict=True))
    return [(bench, compiled[k]) for k, (bench, _) in enumerate(made)]


def _run(k: int, cpu: str) -> None:
    bench, program = _library(k - k % PER_LIBRARY, cpu)[k % PER_LIBRARY]
    for sizes in SIZES if CASES[k].at is None else [(0, 0)]:
        bound = {"s0": sizes[0], "s1": sizes[1]}
        check(program, [content(bench, v, bound) for v in program.graph.inputs], CASES[k].rtol)


@pytest.mark.parametrize("k", range(len(CASES)), ids=[c.name for c in CASES])
def test_against_numpy(k: int) -> None:
    _run(k, "native")


@pytest.mark.cpu_only("vectors of another CPU")
@pytest.mark.slow
@pytest.mark.parametrize("k", range(len(CASES)), ids=[c.name for c in CASES])
def test_eight_lanes(k: int) -> None:
    cpu = level("x86-64-v3") if level().machine == "x86_64" else None
    if cpu is None or not cpu.features <= level().features:
        pytest.skip("this machine does not run x86-64-v3 programs")
    _run(k, "x86-64-v3")


# ---------------------------------------------------------------- errors


def _divide_by_zero(b: Bench, dtype: DType) -> Value:
    return b.div(b.x(20, dtype=dtype), b.array(np.eye(20)[3].astype(dtype.numpy)))


def _failing() -> list[tuple[str, Callable[[Bench], Value], str]]:
    index = np.array([0, 3, -4, 1])
    return [
        ("gather", lambda b: b.gather(b.x(3, 5), b.array(index), 0), "index"),
        ("gather_innermost", lambda b: b.gather(b.x(5, 3), b.array(index), 1), "index"),
        ("gather_turned", lambda b: b.transpose(b.gather(b.x(3, 40), b.array(index), 0), (1, 0)), "index"),
        (
            "gather_elements",
            lambda b: b.one("gather_elements", b.x(3, 4), b.array(index[None]), axis=0),
            "index",
        ),
        (
            "gather_nd",
            lambda b: b.one("gather_nd", b.x(3, 4), b.array(index[:, None]), batch_dims=0),
            "index",
        ),
        *((f"divide-{t}", lambda b, t=t: _divide_by_zero(b, t), "division") for t in INTS),
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "build", "message"), _failing(), ids=[n for n, *_ in _failing()])
def test_errors_at_run_time(name: str, build: Callable[[Bench], Value], message: str) -> None:
    bench = Bench((3, 4), False)
    (program,) = compile_graphs([bench.graph([build(bench)])])
    with pytest.raises(RunError, match=message):
        program(*(content(bench, v, {}) for v in program.graph.inputs))


# ---------------------------------------------------------------- onnxruntime's word on what C leaves open

_TARGETS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"]


def test_casts_out_of_range_are_onnxruntimes() -> None:
    """NaN and numbers too large for the target."""
    numbers = [
        np.nan,
        np.inf,
        -np.inf,
        1e10,
        -1e10,
        3e9,
        -3e9,
        300,
        -300,
        -1,
        2.7,
        -2.7,
        7e4,
        -7e4,
        1e19,
        -1e19,
        1.9e19,
        2.0**31,
        2.0**32,
        2.0**63,
        128,
        4e4,
    ]
    for source, number in ((dtypes.float32, "FLOAT"), (dtypes.float64, "DOUBLE")):
        x = np.array(numbers, source.numpy)
        bench = Bench((1, 1), False)
        value = bench.array(x)
        (program,) = compile_graphs([bench.graph([bench.cast(value, dtypes.BY_NAME[t]) for t in _TARGETS])])
        for target, actual in zip(_TARGETS, program(x), strict=True):
            compare(actual, _ort_cast(x, number, target), 0, 0, f"{source} to {target}")


def _ort_cast(x: np.ndarray, source: str, target: str) -> np.ndarray:
    to = getattr(TensorProto, target.upper())
    node = helper.make_node("Cast", ["x"], ["y"], to=to)
    inputs = [helper.make_tensor_value_info("x", getattr(TensorProto, source), x.shape)]
    graph = helper.make_graph([node], "cast", inputs, [helper.make_tensor_value_info("y", to, x.shape)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    (y,) = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    return np.asarray(y)


def test_results_do_not_depend_on_threads() -> None:
    bench = Bench((1, 1), False)
    x = bench.x(300, 700)
    outputs = [bench.reduce("sum", x, [0, 1]), bench.reduce("sum", x, [0]), bench.softmax(x, 1)]
    (program,) = compile_graphs([bench.graph(outputs)])
    array = np.random.default_rng(zlib.crc32(b"threads")).standard_normal((300, 700)).astype(np.float32)
    for a, b in zip(program(array, threads=1), program(array, threads=2), strict=True):
        np.testing.assert_array_equal(a, b)
