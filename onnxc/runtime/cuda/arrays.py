"""Arrays that lie on a GPU: those of other libraries, read where they are, and the results of a model.

Which libraries: torch (its tensors are read directly, which is quickest), whatever has ``__cuda_array_interface__``
(CuPy, Numba) and whatever has ``__dlpack__`` (JAX). None of them is imported here.

A stream is an int here, as the driver has it: 0 (or 1) is the legacy default stream, 2 the thread's default one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from onnxc.errors import InputError
from onnxc.ir.dtypes import BY_NAME, DType, from_numpy
from onnxc.runtime.cuda import dlpack

if TYPE_CHECKING:
    from onnxc.runtime.cuda.memory import Home, Timeline

Shape = tuple[int, ...]
Array = np.ndarray[Any, Any]
LEGACY = 0
VECTOR = 16  # bytes: what kernels take an address to be a multiple of


class Incoming(NamedTuple):
    """An array of the GPU that a call was given.

    Attributes:
        address: of its first element.
        dtype: None where we have none such.
        shape: its shape.
        strides: in bytes; None: row-major without gaps.
        stream: on which it was made, as far as its library says; None: it is ready, or will be on our stream.
        keep: what must be held until the call's work is done.
    """

    address: int
    dtype: DType | None
    shape: Shape
    strides: tuple[int, ...] | None
    stream: int | None
    keep: Any


Reader = Callable[[Any, int, int | None], Incoming | None]
"""Reads an array, given the GPU's number and the stream that will use it (None: not known yet)."""


def reader(kind: type) -> Reader | None:
    """How arrays of a class are read; None for those that are never on a GPU."""
    if issubclass(kind, DeviceArray):
        return _own
    if issubclass(kind, np.ndarray | np.generic | int | float | list | tuple):
        return None
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, getattr(torch, "Tensor", ())):
        return _torch
    if hasattr(kind, "__cuda_array_interface__") or hasattr(kind, "__dlpack__"):
        return _foreign
    return None


def usual(
    args: Sequence[Any], dtypes: Sequence[DType], device: int, stream: int | None
) -> tuple[list[Shape], list[int], int] | None:
    """Shapes, addresses and the stream of inputs that are read where they are, and wait for nothing: all of them are
    tensors of torch or results of models, of these dtypes, without gaps, at multiples of `VECTOR`, and made on one
    stream, `stream` if that is given. None where any is not, or may not be: then `reader` says how each is read. Models
    with many inputs have most of their time on the host here.
    """
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    current: int | None = None  # torch's stream
    shapes, addresses, bits = list[Shape](), list[int](), 0
    for x, dtype in zip(args, dtypes, strict=True):
        kind = type(x)
        if kind is tensor:
            if x.get_device() != device or _TORCH_DTYPES.get(x.dtype) is not dtype or not x.is_contiguous():
                return None
            if x.is_neg() or dtype.kind == "complex":  # memory may hold another sign, or the conjugates
                return None
            if current is None:
                current = _torch_stream(device)
            made, address = current, x.data_ptr()
        elif kind is DeviceArray:
            if x.element is not dtype or x.timeline.device.ordinal != device:
                return None
            made, address = x.stream, x.address
        else:
            return None
        if made != stream:
            if stream is not None:
                return None
            stream = made
        bits |= address
        shapes.append(x.shape)
        addresses.append(address)
    return None if stream is None or bits % VECTOR else (shapes, addresses, stream)


def _own(x: DeviceArray, device: int, stream: int | None) -> Incoming:
    if x.timeline.device.ordinal != device:
        raise _elsewhere(x, x.timeline.device.ordinal, device)
    return Incoming(x.address, x.element, x.shape, None, x.stream, x)


def _elsewhere(x: object, where: object, device: int) -> InputError:
    return InputError(f"a {type(x).__name__} is on GPU {where}, and the model on GPU {device}")


# ---------------------------------------------------------------- torch

_TORCH_DTYPES: dict[object, DType | None] = {}


def _torch(x: Any, device: int, stream: int | None) -> Incoming | None:
    if not x.is_cuda:
        return None
    if x.get_device() != device:
        raise _elsewhere(x, x.get_device(), device)
    dtype = x.dtype
    if dtype not in _TORCH_DTYPES:  # torch.float8_e4m3fn is ONNX's float8e4m3fn
        name = str(dtype).removeprefix("torch.").replace("float8_", "float8").replace("e8m0fnu", "e8m0")
        _TORCH_DTYPES[dtype] = BY_NAME.get(name)
    x = x.resolve_conj().resolve_neg()  # what is in memory of a view like `z.conj().imag` has the other sign
    strides = None
    if not x.is_contiguous():
        strides = tuple(n * x.element_size() for n in x.stride())
    return Incoming(x.data_ptr(), _TORCH_DTYPES[dtype], tuple(x.shape), strides, _torch_stream(device), x)


def _torch_stream(device: int) -> int:
    """torch's current stream."""
    torch = sys.modules["torch"]
    quick = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(quick(device) if quick is not None else torch.cuda.current_stream(device).cuda_stream)


# ---------------------------------------------------------------- the protocols


def _foreign(x: Any, device: int, stream: int | None) -> Incoming | None:
    """An array with one of the protocols. The interface is better where it tells the stream, else DLPack."""
    interface = getattr(x, "__cuda_array_interface__", None)
    if interface is not None and ("stream" in interface or not hasattr(x, "__dlpack__")):
        return _interface(x, interface)
    if not hasattr(x, "__dlpack__") or not hasattr(x, "__dlpack_device__"):
        return None
    kind, number = x.__dlpack_device__()
    if kind not in (dlpack.CUDA, dlpack.CUDA_MANAGED):
        return None
    if kind == dlpack.CUDA and number != device:
        raise _elsewhere(x, number, device)
    if stream is None:  # asked again when the stream is known: only then the producer can be told
        return Incoming(0, None, (), None, None, None)
    try:
        capsule = x.__dlpack__(stream=stream or 1)
        found = dlpack.read(capsule)
    except (BufferError, ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"a {type(x).__name__} gives no DLPack capsule: {error}", cause=error) from error
    itemsize = found.dtype.itemsize if found.dtype is not None else 1
    strides = None if found.strides is None else tuple(n * itemsize for n in found.strides)
    return Incoming(found.address, found.dtype, found.shape, strides, None, capsule)


def _interface(x: Any, interface: dict[str, Any]) -> Incoming:
    if interface.get("mask") is not None:
        raise InputError(f"a {type(x).__name__} has a mask, which a model cannot take")
    try:
        kind = np.dtype(interface["typestr"])
        dtype = from_numpy(kind) if kind.isnative else None
    except (TypeError, KeyError):
        dtype = None
    if dtype is None and str(getattr(x, "dtype", "")) == "bfloat16":  # which a typestr cannot say
        dtype = BY_NAME["bfloat16"]
    strides, stream = interface.get("strides"), interface.get("stream")
    return Incoming(
        int(interface["data"][0] or 0), dtype, tuple(interface["shape"]), None if strides is None else tuple(strides),
        None if stream is None else LEGACY if stream == 1 else int(stream), x,
    )  # fmt: skip


def is_dense(shape: Shape, strides: tuple[int, ...] | None, itemsize: int) -> bool:
    """Whether elements follow each other without gaps, in row-major order.

    >>> is_dense((2, 3), (12, 4), 4), is_dense((2, 3), (4, 8), 4), is_dense((1, 3), (99, 4), 4)
    (True, False, True)
    """
    if strides is None or 0 in shape:
        return True
    step = itemsize
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n > 1 and stride != step:
            return False
        step *= n
    return True


def stream_of(stream: Any) -> int:
    """The driver's handle of a stream: an int, or a stream of torch, CuPy or cuda-core.

    Raises:
        InputError: it is no stream.
    """
    if hasattr(stream, "__cuda_stream__"):
        stream = stream.__cuda_stream__()[1]
    for name in ("cuda_stream", "ptr", "handle"):
        stream = getattr(stream, name, stream)
    try:
        handle = int(stream)
    except (TypeError, ValueError):
        raise InputError(f"stream is the handle of a CUDA stream, or a library's stream, not {stream!r}") from None
    if handle < 0:
        raise InputError(f"stream is the handle of a CUDA stream, not {handle}")
    return LEGACY if handle == 1 else handle


# ---------------------------------------------------------------- results


class DeviceArray:
    """A result of a model: an array in a GPU's memory, row-major, the caller's own.

    ``torch.from_dlpack(y)``, ``cupy.from_dlpack(y)`` and ``jax.dlpack.from_dlpack(y)`` take it without a copy,
    ``y.numpy()`` copies it. Its work may still be under way: other libraries are told the stream, ``numpy()`` and
    ``synchronize()`` wait. It can be the input of a model as it is. Do not let it go while another stream of yours
    reads it.

    Attributes:
        address: of its first element.
        shape, dtype: as numpy has them.
        element: the dtype, as ONNX has it.
        stream: on which it is made, or was last written.
        timeline: of the model that did so.
    """

    __slots__ = ("__weakref__", "_home", "address", "element", "nbytes", "shape", "stream", "timeline")

    def __init__(self, shape: Shape, element: DType, nbytes: int, home: Home, timeline: Timeline, address: int) -> None:
        """`address`: of a block of this home's."""
        self.shape, self.element, self.nbytes, self._home = shape, element, nbytes, home
        self.stream, self.timeline, self.address = home.stream, timeline, address

    def __del__(self) -> None:
        self._home.give(self.address)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.element.numpy

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def device(self) -> int:
        """The number of its GPU."""
        return self.timeline.device.ordinal

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array of rank 0 has no length")
        return self.shape[0]

    def written(self, stream: int, timeline: Timeline) -> None:
        """A model has written over it, on this stream."""
        self.stream, self.timeline = stream, timeline
        self._home = self._home.pool.home(self._home.nbytes, stream)

    def synchronize(self) -> None:
        """Waits for the model's work.

        Raises:
            RunError: it failed, on an index out of bounds for instance.
        """
        with self.timeline.device.current():
            self.timeline.synchronize()

    def numpy(self) -> Array:
        """A copy in the host's memory.

        Raises:
            RunError: as :meth:`synchronize`.
        """
        array = np.empty(self.shape, self.dtype)
        device = self.timeline.device
        with device.current():
            self.timeline.synchronize()
            if self.nbytes:
                device.driver("cuMemcpyDtoH", array.ctypes.data, self.address, self.nbytes)
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("an array on a GPU becomes a numpy array by a copy")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape, "typestr": self.dtype.str, "data": (self.address if self.size else 0, False),
            "version": 3, "strides": None, "stream": self.stream or 1,
        }  # fmt: skip

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self.device

    def __dlpack__(
        self, *, stream: int | None = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError("this array is exported where it is, without a copy; numpy() copies it")
        consumer = LEGACY if stream in (None, 1) else int(stream or LEGACY)
        if consumer >= 0 and consumer != self.stream:
            device = self.timeline.device
            with device.current():
                self.timeline.join(device.driver.module.CUstream(consumer))
        return dlpack.write(self, self.address, self.device, self.element, self.shape)

    def __repr__(self) -> str:
        return f"<DeviceArray {self.element.name}{list(self.shape)} on GPU {self.device}>"
