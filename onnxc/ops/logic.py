"""Comparisons, selection and tests. And, Or, Xor and Not are in the tables of `math`."""

from __future__ import annotations

from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from onnxc.ops.common import numeric
from onnxc.ops.registry import Flag, op
from onnxc.ops.text import equal_text
from onnxc.primitives.builder import Builder


@op("Equal", 7)
def equal(b: Builder, x: Value, y: Value) -> Value:
    if x.dtype is dtypes.string:
        return equal_text(b, x, y)
    numeric(x.dtype, "Equal")
    return b.eq(x, y)


@op("Less", 7)
def less(b: Builder, x: Value, y: Value) -> Value:
    return b.lt(x, y)


@op("Greater", 7)
def greater(b: Builder, x: Value, y: Value) -> Value:
    return b.lt(y, x)


@op("LessOrEqual", 12)
def less_or_equal(b: Builder, x: Value, y: Value) -> Value:
    return b.le(x, y)


@op("GreaterOrEqual", 12)
def greater_or_equal(b: Builder, x: Value, y: Value) -> Value:
    return b.le(y, x)


@op("Where", 9)
def where(b: Builder, condition: Value, x: Value, y: Value) -> Value:
    return b.where(condition, x, y)


@op("IsNaN", 9)
def is_nan(b: Builder, x: Value) -> Value:
    return b.isnan(x)


@op("IsInf", 10)
def is_inf(b: Builder, x: Value, *, detect_negative: Flag = 1, detect_positive: Flag = 1) -> Value:
    if not detect_negative and not detect_positive:
        return b.full(x.shape, False, dtypes.boolean)
    return b.one("isinf", x, positive=bool(detect_positive), negative=bool(detect_negative))
