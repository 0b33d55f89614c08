"""Element types: every dtype of the ONNX standard, with its numpy storage and its ONNX number."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from onnx import TensorProto


@dataclass(frozen=True, eq=False)
class DType:
    """An element type. There is one object for each type, so `is` and `==` agree.

    >>> from_numpy(np.dtype("float32")).name
    'float32'
    """

    name: str
    numpy: np.dtype
    onnx: int
    kind: str  # "float" | "int" | "uint" | "bool" | "complex" | "string"
    bits: int

    @property
    def itemsize(self) -> int:
        """Bytes that one element takes in a buffer (sub-byte types take one byte each, unpacked)."""
        return max(1, self.bits // 8)

    @property
    def is_float(self) -> bool:
        """Whether it is a float, of any width."""
        return self.kind == "float"

    @property
    def is_integer(self) -> bool:
        """Whether it is an integer, with a sign or without."""
        return self.kind in ("int", "uint")

    @property
    def limits(self) -> tuple[int, int]:
        """Least and greatest value of an integer type. (numpy has none for those of fewer than 8 bits.)"""
        if self.kind == "uint":
            return 0, (1 << self.bits) - 1
        return -(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1

    def __repr__(self) -> str:
        return self.name


def _table() -> list[DType]:
    rows: list[tuple[str, object, str, int]] = [
        ("float32", np.float32, "float", 32), ("uint8", np.uint8, "uint", 8), ("int8", np.int8, "int", 8),
        ("uint16", np.uint16, "uint", 16), ("int16", np.int16, "int", 16), ("int32", np.int32, "int", 32),
        ("int64", np.int64, "int", 64), ("string", np.object_, "string", 64), ("bool", np.bool_, "bool", 8),
        ("float16", np.float16, "float", 16), ("float64", np.float64, "float", 64), ("uint32", np.uint32, "uint", 32),
        ("uint64", np.uint64, "uint", 64), ("complex64", np.complex64, "complex", 64),
        ("complex128", np.complex128, "complex", 128), ("bfloat16", ml_dtypes.bfloat16, "float", 16),
        ("float8e4m3fn", ml_dtypes.float8_e4m3fn, "float", 8),
        ("float8e4m3fnuz", ml_dtypes.float8_e4m3fnuz, "float", 8),
        ("float8e5m2", ml_dtypes.float8_e5m2, "float", 8), ("float8e5m2fnuz", ml_dtypes.float8_e5m2fnuz, "float", 8),
        ("uint4", ml_dtypes.uint4, "uint", 4), ("int4", ml_dtypes.int4, "int", 4),
        ("float4e2m1", ml_dtypes.float4_e2m1fn, "float", 4), ("float8e8m0", ml_dtypes.float8_e8m0fnu, "float", 8),
        ("uint2", ml_dtypes.uint2, "uint", 2), ("int2", ml_dtypes.int2, "int", 2),
    ]  # fmt: skip
    if "FLOAT6E2M3" in list(TensorProto.DataType.keys()):  # newer than the oldest onnx that we accept
        rows += [
            ("float6e2m3", ml_dtypes.float6_e2m3fn, "float", 6),
            ("float6e3m2", ml_dtypes.float6_e3m2fn, "float", 6),
        ]
    names = {"float32": "FLOAT", "float64": "DOUBLE"}
    return [
        DType(name, np.dtype(storage), TensorProto.DataType.Value(names.get(name, name.upper())), kind, bits)  # type: ignore[call-overload]
        for name, storage, kind, bits in rows
    ]


ALL: tuple[DType, ...] = tuple(_table())
BY_NAME: dict[str, DType] = {d.name: d for d in ALL}
BY_ONNX: dict[int, DType] = {d.onnx: d for d in ALL}
_BY_NUMPY: dict[np.dtype, DType] = {d.numpy: d for d in ALL}

float16, float32, float64 = BY_NAME["float16"], BY_NAME["float32"], BY_NAME["float64"]
bfloat16 = BY_NAME["bfloat16"]
int8, int16, int32, int64 = (BY_NAME[f"int{b}"] for b in (8, 16, 32, 64))
uint8, uint16, uint32, uint64 = (BY_NAME[f"uint{b}"] for b in (8, 16, 32, 64))
boolean, string = BY_NAME["bool"], BY_NAME["string"]


def from_numpy(dtype: np.dtype) -> DType:
    """The DType stored as this numpy dtype (of either byte order). Raises KeyError for a type ONNX does not have."""
    if dtype.kind in "US":
        return string
    return _BY_NUMPY[dtype if dtype.isnative else dtype.newbyteorder("=")]
