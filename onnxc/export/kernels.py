"""What onnxruntime has no kernel for, and the dtype that it is computed in instead."""

from __future__ import annotations

from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType

_FLOATS = {"float16", "float32", "float64"}
_SIGNED = {"int32", "int64"}
_ALL = (
    _FLOATS
    | _SIGNED
    | {"int8", "int16", "uint8", "uint16", "uint32", "uint64", "bool", "string", "complex64", "complex128"}
)
_SMALL = _FLOATS | _SIGNED | {"int8", "uint8"}
_KERNELS: dict[str, set[str]] = {  # of the ops that lack some
    "Neg": _FLOATS | _SIGNED | {"int8", "int16"},
    "Pow": _FLOATS | _SIGNED,
    "Max": _SMALL | {"uint32", "uint64"},
    "Min": _SMALL | {"uint32", "uint64"},
    "Where": _SMALL | {"uint32", "string"},
    "BitShift": {"uint8", "uint32", "uint64"},
    "MatMul": _FLOATS | _SIGNED | {"uint32", "uint64"},
    "ReduceSum": _FLOATS | _SIGNED,
    "ReduceProd": _FLOATS | _SIGNED,
    "ReduceMax": _SMALL,
    "ReduceMin": _SMALL,
    "ArgMax": _SMALL,
    "ArgMin": _SMALL,
    "CumSum": _FLOATS | _SIGNED,
    "TopK": _SMALL | {"int16"},
    "Pad": _SMALL | {"uint32", "uint64", "bool"},
    "Conv": _FLOATS,
}
_WIDER = {
    **dict.fromkeys(("bool", "int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16"), "int32"),
    **dict.fromkeys(("uint32", "uint64"), "int64"),
}
_ORDERED = {"ReduceMax", "ReduceMin", "ArgMax", "ArgMin", "TopK", "Pow"}  # int64 would misread large uint64


def wide_dtype(op_type: str, dtype: DType) -> DType:
    """The dtype to compute an op in: the given one where onnxruntime has a kernel for it, else a wider one.

    Integers wrap alike in a wider type; small floats are rounded once at the end.
    """
    if dtype.name in _KERNELS.get(op_type, _ALL) or (dtype is dtypes.uint64 and op_type in _ORDERED):
        return dtype
    if op_type == "BitShift":
        return dtypes.uint32
    if op_type == "Conv" and dtype.is_integer:
        return dtypes.float64  # the standard has none of integers; sums are exact up to 2**53
    if dtype.is_float:
        return dtypes.float32
    return dtypes.BY_NAME[_WIDER.get(dtype.name, dtype.name)]
