"""Conversions between element types, and tensors made from nothing."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from onnxc.errors import ModelError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.graph import Value
from onnxc.ops.common import along, dtype_of, numeric
from onnxc.ops.registry import op
from onnxc.primitives.builder import Builder


def convert(b: Builder, x: Value, to: DType, saturate: bool = True) -> Value:
    """As C converts; to a float of 8 or 4 bits, what is too large becomes the greatest finite value."""
    numeric(x.dtype, "Cast")
    numeric(to, "Cast")
    tiny = to.is_float and to.bits <= 8 and to.name != "float8e8m0"
    if tiny and x.dtype.is_float and x.dtype is not to and (saturate or to.bits == 4):
        greatest = float(ml_dtypes.finfo(to.numpy).max)  # type: ignore[no-untyped-call]
        x = b.clip(x, -greatest, greatest)
    return b.cast(x, to)


@op("Cast", 6)
def cast(b: Builder, x: Value, *, to: int, saturate: int = 1, round_mode: str = "up") -> Value:
    return convert(b, x, dtype_of(to, "Cast"), bool(saturate))


@op("CastLike", 15)
def cast_like(b: Builder, x: Value, like: Value, *, saturate: int = 1, round_mode: str = "up") -> Value:
    return convert(b, x, like.dtype, bool(saturate))


@op("ConstantOfShape", 9)
def constant_of_shape(b: Builder, shape: Value, *, value: np.ndarray | None = None) -> Value:
    """One value (float32 zero where none is given) in a shape."""
    fill = np.zeros(1, np.float32) if value is None else np.asarray(value)
    if fill.size != 1:
        raise ModelError(f"the value of ConstantOfShape has {fill.size} elements, not one")
    dtype = dtypes.from_numpy(fill.dtype)
    return b.full(b.ints(shape, "the shape of ConstantOfShape"), b.scalar(fill.reshape(1)[0], dtype), dtype)


@op("EyeLike", 9)
def eye_like(b: Builder, x: Value, *, dtype: int | None = None, k: int = 0) -> Value:
    rows, columns = x.shape
    row = along(b, b.add(b.iota(rows), k), 2, 0)
    return b.cast(b.eq(row, b.iota(columns)), x.dtype if dtype is None else dtype_of(dtype, "EyeLike"))
