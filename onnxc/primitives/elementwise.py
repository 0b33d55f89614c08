"""Pointwise primitives: numpy broadcasting, one dtype in (but for `where` and `cast`), listed with their meaning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from onnxc.errors import ShapeError
from onnxc.ir import dtypes, expr
from onnxc.ir.graph import Attrs
from onnxc.ir.types import TensorType
from onnxc.primitives.base import Kind, Primitive, broadcast_shapes, register
from onnxc.primitives.erf import erf


def _same(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    first = types[0].dtype
    if any(t.dtype is not first for t in types):
        raise ShapeError(f"operands have different dtypes: {', '.join(map(str, types))}")
    return (TensorType(first, broadcast_shapes(*(t.shape for t in types))),)


def _predicate(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    return (_same(types, attrs)[0].with_dtype(dtypes.boolean),)


def _where(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    (out,) = _same(types[1:], attrs)
    if types[0].dtype is not dtypes.boolean:
        raise ShapeError(f"the condition of where must be bool, not {types[0].dtype}")
    return (out.with_shape(broadcast_shapes(types[0].shape, out.shape)),)


def _cast(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    return (types[0].with_dtype(attrs["to"]),)


def _erf(x: np.ndarray) -> np.ndarray:
    return np.asarray(erf(x.astype(np.float64)).astype(x.dtype))


def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Division; integers round toward zero (C's rule, as onnxruntime does)."""
    if a.dtype == object or b.dtype == object:
        return np.asarray(_divide_sizes(a, b), dtype=object)
    if a.dtype.kind in "iu":
        if np.any(b == 0):
            raise ShapeError("integer division by zero")
        quotient = np.floor_divide(a, b)
        return np.asarray(quotient + ((a % b != 0) & ((a < 0) != (b < 0))).astype(a.dtype))
    with np.errstate(all="ignore"):
        return np.asarray(a / b)


def _check_divisor(b: expr.Dim) -> None:
    """A symbolic divisor is taken to be positive where it is a size; of others the sign is not known."""
    if b == 0:
        raise ShapeError("integer division by zero")
    if not isinstance(b, int) and not expr.is_nonnegative(b):
        raise Undecided


def _divide_size(a: expr.Dim, b: expr.Dim) -> expr.Dim:
    """Division of two sizes, rounded toward zero."""
    _check_divisor(b)
    if isinstance(b, int) and b < 0:
        a, b = -a, -b
    if expr.is_nonnegative(a):
        return expr.floordiv(a, b)
    return expr.floordiv(expr.maximum(a, 0), b) - expr.floordiv(expr.maximum(-a, 0), b)


def _mod_size(a: expr.Dim, b: expr.Dim) -> expr.Dim:
    _check_divisor(b)
    return expr.mod(a, b)


_divide_sizes = np.frompyfunc(_divide_size, 2, 1)
_maximum = np.frompyfunc(expr.maximum, 2, 1)
_minimum = np.frompyfunc(expr.minimum, 2, 1)
_mod = np.frompyfunc(_mod_size, 2, 1)


def _remainder(f: Callable[..., Any]) -> Callable[..., Any]:
    """A remainder; of an integer by zero there is none."""

    def call(a: np.ndarray, b: np.ndarray) -> Any:
        if b.dtype.kind in "iu" and np.any(b == 0):
            raise ShapeError("integer division by zero")
        return f(a, b)

    return call


def _either(symbolic: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., np.ndarray]:
    def call(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if a.dtype == object or b.dtype == object:
            return np.asarray(symbolic(a, b), dtype=object)
        return np.asarray(plain(a, b))

    return call


class Undecided(Exception):
    """A comparison of symbolic sizes that could go either way."""


def _decide(yes: Callable[..., bool], no: Callable[..., bool]) -> Callable[..., Any]:
    def one(a: Any, b: Any) -> bool:
        if yes(a, b):
            return True
        if no(a, b):
            return False
        raise Undecided

    decide: Callable[..., Any] = np.frompyfunc(one, 2, 1)
    return decide


def _compare(plain: Callable[..., Any], symbolic: Callable[..., Any]) -> Callable[..., np.ndarray]:
    def call(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if a.dtype == object or b.dtype == object:
            return np.asarray(symbolic(a, b)).astype(bool)
        return np.asarray(plain(a, b))

    return call


def _pow(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind not in "iu":
        return np.asarray(np.power(a, b))
    # Modulo 2^bits; 1 / a^|b| is rounded toward zero, so that only 1 and -1 have inverses.
    inverse = np.where(a == 1, 1, np.where(a == a.dtype.type(0) - a.dtype.type(1), 1 - 2 * (b % 2), 0))
    return np.asarray(np.where(b < 0, inverse, np.power(a, np.maximum(b, 0)))).astype(a.dtype)


def _where_eval(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(c, a, b)


def _cast_eval(x: np.ndarray, to: dtypes.DType) -> np.ndarray:
    if x.dtype == object:
        if not to.is_integer:
            raise Undecided
        return x
    with np.errstate(all="ignore"):
        if to.name == "float8e8m0":
            return _power_of_two(x)
        if x.dtype == np.float16 and to.is_integer:  # as kernels do: NaN and infinities become what those of float32 do
            x = x.astype(np.float32)
        return x.astype(to.numpy)


def _power_of_two(x: np.ndarray) -> np.ndarray:
    """The nearest power of two, halves up; NaN for what is less than 2^-128, or no number."""
    bits = x.astype(np.float32).view(np.uint32)
    tiny = np.where(bits < 0x00200000, 255, np.where(bits < 0x00600000, 0, 1))
    code = np.where(bits < 0x00800000, tiny, (bits + np.uint32(0x00400000)) >> 23)
    return np.asarray(
        np.where(bits - np.uint32(1) >= 0x7F7FFFFF, 255, code).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
    )


def _bitcast(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    source, to = types[0].dtype, attrs["to"]
    if dtypes.string in (source, to) or source.bits != to.bits:
        raise ShapeError(f"the bits of {source} are not those of {to}")
    return (types[0].with_dtype(to),)


def _bitcast_eval(x: np.ndarray, to: dtypes.DType) -> np.ndarray:
    return np.ascontiguousarray(x).view(to.numpy).reshape(x.shape)


def _isinf(x: np.ndarray, positive: bool = True, negative: bool = True) -> np.ndarray:
    none = np.zeros(x.shape, bool)
    return np.asarray((np.isposinf(x) if positive else none) | (np.isneginf(x) if negative else none))


def _quantize_type(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    if types[0].dtype is not dtypes.float32:
        raise ShapeError(f"quantize of {types[0]}: float32 is quantized")
    return (types[0].with_dtype(dtypes.int32),)


def _quantize(x: np.ndarray, scale: float, zero: int, low: int, high: int) -> np.ndarray:
    """round(x / scale) + zero, limited to [low, high], as int32; NaN gives `low`."""
    with np.errstate(all="ignore"):
        y = np.rint(x / np.float32(scale)).astype(np.float64) + zero
    return np.asarray(np.where(np.isnan(y), low, np.clip(y, low, high)).astype(np.int32))


def _byte_table_type(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    (least, greatest), numbers = attrs["to"].limits, attrs["numbers"]
    if types[0].dtype not in (dtypes.uint8, dtypes.int8) or attrs["to"] not in (dtypes.uint8, dtypes.int8):
        raise ShapeError(f"a table of bytes, to {attrs['to']}, for {types[0]}: it is for uint8 and int8")
    if len(numbers) != 256 or min(numbers) < least or max(numbers) > greatest:
        raise ShapeError(f"a table of {attrs['to']} has 256 such numbers; these are {len(numbers)}")
    return (types[0].with_dtype(attrs["to"]),)


def _byte_table(x: np.ndarray, numbers: tuple[int, ...], to: dtypes.DType) -> np.ndarray:
    """The number at the place that a byte's bits tell."""
    return np.array(numbers, to.numpy)[x.view(np.uint8)]


UNARY: dict[str, Callable[..., Any]] = {
    "neg": np.negative, "abs": np.abs, "sign": np.sign, "exp": np.exp, "log": np.log, "sqrt": np.sqrt,
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
    "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh, "asinh": np.arcsinh, "acosh": np.arccosh,
    "atanh": np.arctanh, "erf": _erf, "floor": np.floor, "ceil": np.ceil, "round": np.rint,
    "not": np.logical_not, "bitnot": np.invert,
}  # fmt: skip
BINARY: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": divide, "pow": _pow,
    "mod": _either(_mod, _remainder(np.mod)), "fmod": _remainder(np.fmod), "max": _either(_maximum, np.maximum),
    "min": _either(_minimum, np.minimum), "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor,
    "bitand": np.bitwise_and, "bitor": np.bitwise_or, "bitxor": np.bitwise_xor, "shl": np.left_shift,
    "shr": np.right_shift,
}  # fmt: skip
COMPARE: dict[str, Callable[..., Any]] = {
    "eq": _compare(np.equal, _decide(expr.always_equal, expr.never_equal)),
    "lt": _compare(np.less, _decide(expr.is_less, lambda a, b: expr.is_nonnegative(a - b))),
    "le": _compare(np.less_equal, _decide(lambda a, b: expr.is_less(a, b + 1), lambda a, b: expr.is_less(b, a))),
}
_SYMBOLIC = {"add", "sub", "mul", "div", "mod", "max", "min", "neg", "eq", "lt", "le", "where", "cast"}


def _quiet(f: Callable[..., Any]) -> Callable[..., np.ndarray]:
    """Infinities and NaN are results, not warnings. Hints for derivatives change nothing."""

    def call(*arrays: np.ndarray, **hints: Any) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.asarray(f(*arrays))

    return call


_OF_INTEGERS = {"bitand", "bitor", "bitxor", "bitnot", "shl", "shr"}


def _bits(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    if not (types[0].dtype.is_integer or types[0].dtype is dtypes.boolean):
        raise ShapeError(f"the bits of {types[0]}: integers have such, floats do not")
    return _same(types, attrs)


for _name, _f in {**UNARY, **BINARY}.items():
    _infer = _bits if _name in _OF_INTEGERS else _same
    register(Primitive(_name, Kind.POINTWISE, _infer, _quiet(_f), _name in _SYMBOLIC))
for _name, _f in COMPARE.items():
    register(Primitive(_name, Kind.POINTWISE, _predicate, _f, True))
# The same values in a buffer of their own. Further operands are those that a hint says how to differentiate by.
register(Primitive("copy", Kind.POINTWISE, _same, _quiet(lambda x, *rest: np.copy(x))))
register(Primitive("quantize", Kind.POINTWISE, _quantize_type, _quantize))
register(Primitive("byte_table", Kind.POINTWISE, _byte_table_type, _byte_table))
register(Primitive("isnan", Kind.POINTWISE, _predicate, np.isnan))
register(Primitive("isinf", Kind.POINTWISE, _predicate, _isinf))
register(Primitive("where", Kind.POINTWISE, _where, _where_eval, True))
register(Primitive("cast", Kind.POINTWISE, _cast, _cast_eval, True))
# The same bits as another type of the same width.
register(Primitive("bitcast", Kind.POINTWISE, _bitcast, _bitcast_eval))
