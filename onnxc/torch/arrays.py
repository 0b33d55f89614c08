"""Tensors of PyTorch as numpy arrays and back, in the same memory."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

Array = np.ndarray[Any, Any]

# What numpy has no dtype of its own for: the integer of the same width, and the dtype that ml_dtypes has.
_FOREIGN: dict[torch.dtype, tuple[torch.dtype, type]] = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}
_BACK: dict[np.dtype[Any], tuple[np.dtype[Any], torch.dtype]] = {
    np.dtype(own): (np.dtype(np.int16 if integer is torch.int16 else np.uint8), dtype)
    for dtype, (integer, own) in _FOREIGN.items()
}


def has_own_dtype(tensor: torch.Tensor) -> bool:
    """Whether numpy has a dtype of its own for the elements."""
    return tensor.dtype not in _FOREIGN


def plain(value: Any) -> Any:
    """A tensor of a class of its own as a plain one in the same memory; all else as it is.

    So programs and PyTorch's ops are called outside of what such a class, or a dispatch mode that refuses classes that
    it does not know, makes of a call. Classes that take ops apart themselves (``__torch_dispatch__``) stay.
    """
    if type(value) in _PLAIN or not isinstance(value, torch.Tensor):
        return value
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return value
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        return value.as_subclass(torch.Tensor)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def array_of(tensor: torch.Tensor) -> Array:
    """A view of a tensor on the CPU, with its strides; a copy where its elements stand conjugated or negated, or
    have no memory.
    """
    tensor = _with_memory(tensor.detach() if tensor.requires_grad else tensor)
    foreign = _FOREIGN.get(tensor.dtype)
    if foreign is not None:
        return tensor.view(foreign[0]).numpy().view(foreign[1])  # type: ignore[no-any-return]
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.numpy()  # type: ignore[no-any-return]


def _with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is not zeros without memory, as derivatives in forward mode have them."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor._is_zerotensor() else tensor


def reals_of(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor [...] as the real numbers [..., 2] that it consists of."""
    return torch.view_as_real(_with_memory(tensor.detach()).resolve_conj())


def complex_of(array: Array) -> torch.Tensor:
    """The complex tensor [...] in the memory of [..., 2]."""
    tensor = torch.from_numpy(array)
    if not tensor.numel():
        return torch.empty(array.shape[:-1], dtype=tensor.dtype.to_complex())
    return torch.view_as_complex(tensor)


def tensor_of(array: Array) -> torch.Tensor:
    """A tensor in an array's memory."""
    foreign = _BACK.get(array.dtype)
    if foreign is not None:
        return torch.from_numpy(array.view(foreign[0])).view(foreign[1])
    return torch.from_numpy(array)
