"""DLPack: the protocol by which array libraries hand each other arrays without a copy, in plain ctypes.

A producer makes a capsule that points to a ``DLManagedTensor``. Whoever takes it renames the capsule, and calls the
tensor's deleter in the end. We read capsules without taking them: as long as we hold one, its array stays.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

from onnxc.ir.dtypes import BY_NAME, DType

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType
_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6  # DLDataTypeCode
_KINDS = {"int": _INT, "uint": _UINT, "float": _FLOAT, "complex": _COMPLEX, "bool": _BOOL}
_FLOATS = {"float8e4m3fn": 10, "float8e4m3fnuz": 11, "float8e5m2": 12, "float8e5m2fnuz": 13, "float8e8m0": 14}
_NAME, _USED = b"dltensor", b"used_dltensor"


def _codes() -> dict[str, tuple[int, int]]:
    """Code and bits of each dtype that DLPack has."""
    whole = (d for d in BY_NAME.values() if d.bits >= 8 and d.name != "string")
    found = {d.name: (_KINDS[d.kind], d.bits) for d in whole if d.bits > 8 or d.kind != "float"}
    return found | {"bfloat16": (_BFLOAT, 16)} | {name: (code, 8) for name, code in _FLOATS.items()}


CODES = _codes()
_DTYPES = {code: BY_NAME[name] for name, code in CODES.items()}


class DLTensor(ctypes.Structure):
    """``DLTensor`` of dlpack.h, its device and dtype spelled out."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class DLManagedTensor(ctypes.Structure):
    """``DLManagedTensor`` of dlpack.h."""


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
DLManagedTensor._fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))

_api = ctypes.pythonapi
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _Destructor)(("PyCapsule_New", _api))
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
# In a destructor the capsule has no references any more: it must not be made an object again.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer_at = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))


class Described(NamedTuple):
    """What a capsule says of an array. `strides` count elements; None: row-major."""

    address: int
    device: tuple[int, int]
    dtype: DType | None
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None


def read(capsule: Any) -> Described:
    """The array of a capsule, which stays the producer's. Raises ValueError."""
    tensor = DLManagedTensor.from_address(_pointer_of(capsule, _NAME)).tensor
    dtype = _DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None
    address = (tensor.data or 0) + tensor.byte_offset
    return Described(address, (tensor.device_type, tensor.device_id), dtype, shape, strides)


_exported: dict[int, tuple[Any, ...]] = {}  # by the tensor's address: what must stay until its deleter is called


def write(owner: Any, address: int, device: int, dtype: DType, shape: tuple[int, ...]) -> Any:
    """A capsule for a row-major array of a GPU. `owner` stays as long as anybody uses it.

    Raises:
        BufferError: DLPack has no such dtype.
    """
    if dtype.name not in CODES:
        raise BufferError(f"DLPack has no dtype {dtype.name}")
    code, bits = CODES[dtype.name]
    strides = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
    sizes = (ctypes.c_int64 * (2 * len(shape) + 1))(*shape, *strides)
    start = ctypes.addressof(sizes)
    managed = DLManagedTensor()
    tensor = managed.tensor
    tensor.data, tensor.device_type, tensor.device_id = address, CUDA, device
    tensor.ndim, tensor.code, tensor.bits, tensor.lanes = len(shape), code, bits, 1
    tensor.shape = ctypes.cast(start, ctypes.POINTER(ctypes.c_int64))
    tensor.strides = ctypes.cast(start + 8 * len(shape), ctypes.POINTER(ctypes.c_int64))
    managed.deleter = _delete
    place = ctypes.addressof(managed)
    _exported[place] = (managed, sizes, owner)
    return _new(place, _NAME, _destroy)


def _release(place: int) -> None:
    """A consumer is done."""
    _exported.pop(place, None)


def _drop(capsule: int) -> None:
    """A capsule goes: where nobody took it, so does what it points to."""
    if _is_valid(capsule, _NAME):
        _release(_pointer_at(capsule, _NAME))


_delete, _destroy = _Deleter(_release), _Destructor(_drop)
