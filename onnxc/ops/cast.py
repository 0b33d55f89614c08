"""Conversions between element types, and tensors made from nothing."""

from __future__ import annotations

from typing import Literal

import ml_dtypes
import numpy as np

from onnxc.errors import ModelError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.graph import Value
from onnxc.ops.common import along, dtype_of, numeric
from onnxc.ops.registry import Flag, op
from onnxc.ops.text import convert_text
from onnxc.primitives.builder import Builder


def convert(b: Builder, x: Value, to: DType, saturate: bool = True, round_mode: str = "up") -> Value:
    """As C converts; to a float of 8 or 4 bits, what is too large becomes the greatest finite value.

    `round_mode` (up, down or nearest) is for powers of two alone, float8e8m0.
    """
    if dtypes.string in (x.dtype, to):
        return convert_text(b, x, to)
    numeric(x.dtype, "Cast")
    numeric(to, "Cast")
    if x.dtype is to:
        return x
    if to.name == "float8e8m0":
        return _power_of_two(b, x, to, saturate, round_mode)
    if to.is_float and to.bits <= 8 and (saturate or to.bits < 8):
        greatest = float(ml_dtypes.finfo(to.numpy).max)  # type: ignore[no-untyped-call]
        whole = x if x.dtype.is_float and x.dtype.bits > 8 else b.cast(x, dtypes.float32)
        # float16 ends before the greatest float8e5m2, and bfloat16 rounds that of others
        wide = b.cast(whole, dtypes.float32) if whole.dtype.bits == 16 else whole
        x = b.clip(wide, -greatest, greatest)
    return b.cast(x, to)


_EXPONENT = 1023 - 127  # that a float64 of the least float8e8m0 has
Rounding = Literal["up", "down", "nearest"]
_ROUNDING = {"up": (1 << 52) - 1, "down": 0, "nearest": 1 << 51}


def _power_of_two(b: Builder, x: Value, to: DType, saturate: bool, round_mode: str) -> Value:
    """float8e8m0, which has an exponent and nothing else: 0 for 2^-127, 254 for 2^127, 255 for NaN.

    Saturated, what is less (zero, too) becomes 2^-127 and what is greater 2^127, and a sign is left out; else all that
    is NaN.
    """
    x = b.cast(x, dtypes.float64)
    bits = b.bitcast(b.abs(x), dtypes.int64)
    exponent = b.sub(b.one("shr", b.add(bits, _ROUNDING[round_mode]), b.scalar(52, dtypes.int64)), _EXPONENT)
    if saturate:
        code = b.where(b.isnan(x), 255, b.clip(exponent, 0, 254))
    else:
        below = b.or_(b.lt(x, 0.0), b.lt(exponent, 0))
        code = b.where(b.or_(below, b.isnan(x)), 255, b.min(exponent, 255))
    return b.bitcast(b.cast(code, dtypes.uint8), to)


@op("Cast", 6)
def cast(b: Builder, x: Value, *, to: int, saturate: Flag = 1, round_mode: Rounding = "up") -> Value:
    return convert(b, x, dtype_of(to, "Cast"), bool(saturate), round_mode)


@op("CastLike", 15)
def cast_like(b: Builder, x: Value, like: Value, *, saturate: Flag = 1, round_mode: Rounding = "up") -> Value:
    return convert(b, x, like.dtype, bool(saturate), round_mode)


@op("BitCast", 26)
def bit_cast(b: Builder, x: Value, *, to: int) -> Value:
    """The same bits as another type of the same width."""
    return b.bitcast(x, dtype_of(to, "BitCast"))


@op("ConstantOfShape", 9)
def constant_of_shape(b: Builder, shape: Value, *, value: np.ndarray | None = None) -> Value:
    """One value (float32 zero where none is given) in a shape."""
    fill = np.zeros(1, np.float32) if value is None else np.asarray(value)
    if fill.size != 1:
        raise ModelError(f"the value of ConstantOfShape has {fill.size} elements, not one")
    dtype = dtypes.from_numpy(fill.dtype)
    return b.full(b.extents(shape, "the shape of ConstantOfShape"), b.scalar(fill.reshape(1)[0], dtype), dtype)


@op("EyeLike", 9)
def eye_like(b: Builder, x: Value, *, dtype: int | None = None, k: int = 0) -> Value:
    rows, columns = x.shape
    row = along(b, b.add(b.iota(rows), k), 2, 0)
    return b.cast(b.eq(row, b.iota(columns)), x.dtype if dtype is None else dtype_of(dtype, "EyeLike"))
