"""Arithmetic and elementary functions, element by element."""

from __future__ import annotations

import math
from functools import reduce as fold

import numpy as np

from onnxc.errors import ModelError
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, ceildiv, maximum
from onnxc.ir.graph import Value
from onnxc.ops.common import scalar_of
from onnxc.ops.computed import is_computed, range_size
from onnxc.ops.registry import Flag, op
from onnxc.primitives.builder import Builder, constant_of
from onnxc.primitives.movement import EXACT_COUNTS

# ONNX name, first version, primitive: one input and one output of the same type.
_UNARY = [
    ("Abs", 1, "abs"), ("Neg", 1, "neg"), ("Sign", 9, "sign"), ("Exp", 1, "exp"), ("Log", 1, "log"),
    ("Sqrt", 1, "sqrt"), ("Floor", 1, "floor"), ("Ceil", 1, "ceil"), ("Round", 11, "round"),
    ("Erf", 9, "erf"),
    ("Sin", 7, "sin"), ("Cos", 7, "cos"), ("Tan", 7, "tan"), ("Asin", 7, "asin"), ("Acos", 7, "acos"),
    ("Atan", 7, "atan"), ("Sinh", 9, "sinh"), ("Cosh", 9, "cosh"), ("Asinh", 9, "asinh"),
    ("Acosh", 9, "acosh"),
    ("Atanh", 9, "atanh"), ("Not", 1, "not"), ("BitwiseNot", 18, "bitnot"),
]  # fmt: skip
_BINARY = [
    ("Add", 7, "add"), ("Sub", 7, "sub"), ("Mul", 7, "mul"), ("Div", 7, "div"), ("And", 7, "and"),
    ("Or", 7, "or"),
    ("Xor", 7, "xor"), ("BitwiseAnd", 18, "bitand"), ("BitwiseOr", 18, "bitor"), ("BitwiseXor", 18, "bitxor"),
]  # fmt: skip
_VARIADIC = [("Max", 6, "max"), ("Min", 6, "min"), ("Sum", 6, "add")]


def _unary(name: str, first: int, primitive: str) -> None:
    @op(name, first)
    def define(b: Builder, x: Value) -> Value:
        return b.unary(primitive, x)


def _binary(name: str, first: int, primitive: str) -> None:
    @op(name, first)
    def define(b: Builder, x: Value, y: Value) -> Value:
        return b.binary(primitive, x, y)


def variadic(name: str, first: int, primitive: str, last: int | None = None) -> None:
    """Registers an op that combines any number of inputs, one after the other."""

    @op(name, first, last)
    def define(b: Builder, *xs: Value) -> Value:
        if not xs:
            raise ModelError(f"{name} needs at least one input")
        return fold(lambda x, y: b.binary(primitive, x, y), xs)


for _row in _UNARY:
    _unary(*_row)
for _row in _BINARY:
    _binary(*_row)
for _row in _VARIADIC:
    variadic(*_row)


@op("Mean", 6)
def mean(b: Builder, *xs: Value) -> Value:
    if not xs:
        raise ModelError("Mean needs at least one input")
    return b.div(fold(b.add, xs), len(xs))


@op("Reciprocal", 1)
def reciprocal(b: Builder, x: Value) -> Value:
    return b.div(1.0, x)


@op("Pow", 7)
def pow(b: Builder, x: Value, y: Value) -> Value:
    """x ** y in the type of x. Squares and cubes are products, as in onnxruntime."""
    exponent = constant_of(y)
    if exponent is not None and exponent.size == 1 and exponent.ndim <= x.rank and exponent.item() in (2, 3):
        square = b.mul(x, x)
        return square if exponent.item() == 2 else b.mul(square, x)
    if x.dtype is y.dtype:
        return b.pow(x, y)
    if x.dtype.is_float and (y.dtype.is_integer or y.dtype.bits <= x.dtype.bits):
        return b.pow(x, b.cast(y, x.dtype))
    wide = dtypes.int64 if x.dtype.is_integer and y.dtype.is_integer else dtypes.float64
    return b.cast(b.pow(b.cast(x, wide), b.cast(y, wide)), x.dtype)


@op("Mod", 10)
def mod(b: Builder, x: Value, y: Value, *, fmod: Flag = 0) -> Value:
    """The remainder with the sign of the divisor, or with `fmod` that of the dividend."""
    return b.binary("fmod" if fmod else "mod", x, y)


@op("BitShift", 11)
def bit_shift(b: Builder, x: Value, y: Value, *, direction: str) -> Value:
    if direction not in ("LEFT", "RIGHT"):
        raise ModelError(f"BitShift has the direction {direction!r}; LEFT and RIGHT exist")
    return b.binary("shl" if direction == "LEFT" else "shr", x, y)


@op("Range", 11)
def range_(b: Builder, start: Value, limit: Value, delta: Value, *, stash_type: int = 1) -> Value:
    """start, start + delta, ... up to, not with, limit."""
    first, last = (_whole(b, v) if _counts(delta) else None for v in (start, limit))
    if first is not None and last is not None and (constant_of(first) is None or constant_of(last) is None):
        size = _range_size(b, first, last, b.cast(delta, dtypes.int64))
        ends = [*b.ints(first, "the start of Range"), *b.ints(last, "the limit of Range")]
        farthest = fold(maximum, [d for end in ends for d in (end, -end)], size)
        steps = b.slice(b.iota(farthest, start.dtype), 0, 0, size)  # a call checks that floats hold all these numbers
    else:
        computed = is_computed(b, start, limit, delta) and any(constant_of(v) is None for v in (start, limit, delta))
        size = (range_size if computed else _range_size)(b, start, limit, delta)
        steps = b.cast(b.iota(size), start.dtype)
    return b.add(b.mul(steps, scalar_of(b, delta)), scalar_of(b, start))


def _counts(delta: Value) -> bool:
    """Whether the numbers of a Range are floats that count up or down."""
    step = constant_of(delta)
    return delta.dtype in EXACT_COUNTS and step is not None and step.size == 1 and abs(step.item()) == 1


def _whole(b: Builder, x: Value) -> Value | None:
    """The integers, known now, that a float is: sizes that were cast, or a constant. None where it is another."""
    content = constant_of(x)
    if content is not None:
        exact = np.all((content == np.trunc(content)) & (abs(content) <= EXACT_COUNTS[x.dtype]))  # of NaN neither holds
        return b.constant(content.astype(np.int64)) if exact else None
    node = x.node
    if node is None or node.op not in ("cast", "reshape"):
        return None
    (source,) = node.operands
    if node.op == "reshape":
        return _whole(b, source)
    return source if b.known(source) is not None else None  # what was a float of another width is rounded


def _range_size(b: Builder, start: Value, limit: Value, delta: Value) -> Dim:
    arrays = [constant_of(v) for v in (start, limit, delta)]
    if all(a is not None for a in arrays):
        first, last, step = (a.item() for a in arrays if a is not None)
        if step == 0:
            raise ModelError("Range has a step of zero")
        count: int = math.ceil((last - first) / step)
        return max(count, 0)
    (first,), (last,) = b.ints(start, "the start of Range"), b.ints(limit, "the limit of Range")
    (step,) = b.static_ints(delta, "the step of Range")
    if step == 0:
        raise ModelError("Range has a step of zero")
    return maximum(ceildiv(last - first, step) if step > 0 else ceildiv(first - last, -step), 0)
