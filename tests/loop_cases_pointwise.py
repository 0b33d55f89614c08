"""Loop kernels: pointwise primitives of all dtypes, with special values."""

from __future__ import annotations

import numpy as np

from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.graph import Value
from tests.loop_cases import FLOATS, INTS, Bench, Table

TABLE = Table()
case = TABLE.case


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
