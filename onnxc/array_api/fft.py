"""The standard's extension `fft`: discrete Fourier transforms. Lengths are known when a program is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from onnxc.array.argument_errors import named_all
from onnxc.array.core import Array, call, concrete
from onnxc.array.sizes import value_of_size
from onnxc.array_api.creation import Device
from onnxc.array_api.data_types import DEFAULTS, Dtype, array, checked_device, checked_dtype, is_kind
from onnxc.array_api.manipulation import Axes, axes_of, axis_of, roll
from onnxc.ir.expr import Dim
from onnxc.ops import fourier, numbers
from onnxc.primitives.builder import Builder
from onnxc.primitives.pairs import Number, each

Norm = Literal["backward", "ortho", "forward"]
_OPPOSITE: dict[str, Norm] = {"backward": "forward", "ortho": "ortho", "forward": "backward"}


def _scale(length: int, norm: str, inverse: bool) -> float:
    if norm == "ortho":
        return float(1 / np.sqrt(length))
    return 1 / length if (norm == "backward") == inverse else 1.0


def _scaled(b: Builder, x: Number, factor: float) -> Number:
    return x if factor == 1.0 else each(lambda v: b.mul(v, factor), x)


def _transform(b: Builder, x: Number, *, axis: int, length: int, norm: Norm, inverse: bool, half: bool) -> Number:
    found = fourier.transform(b, x, axis, length, 1 if inverse else -1, half)
    return _scaled(b, found, _scale(length, norm, inverse))


def _to_real(b: Builder, x: Number, *, axis: int, length: int, norm: Norm) -> Number:
    return _scaled(b, fourier.to_real(b, x, axis, length), _scale(length, norm, True))


def _checked(name: str, x: Array, norm: str, *kinds: str) -> Array:
    if norm not in _OPPOSITE:
        raise ValueError(f"the norm of {name} is one of {', '.join(_OPPOSITE)}, not {norm!r}")
    return array(x, name, *(kinds or ("real floating", "complex floating")))


def _length(name: str, x: Array, n: Dim | None, at: int) -> int:
    size = value_of_size(x.dims[at] if n is None else n, name)
    if size < 1:
        raise ValueError(f"{name} of the length {size}")
    return size


def _one(name: str, x: Array, n: int | None, axis: int, norm: Norm, inverse: bool, half: bool = False) -> Array:
    at = axis_of(axis, x.ndim, name)
    return call(  # type: ignore[no-any-return]
        _transform, x, name=name, axis=at, length=_length(name, x, n, at), norm=norm, inverse=inverse, half=half
    )


def fft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Array:
    """The transform along an axis, cut or continued with zeros to the length n."""
    return _one("fft", _checked("fft", x, norm), n, axis, norm, False)


def ifft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Array:
    """The inverse of `fft`."""
    return _one("ifft", _checked("ifft", x, norm), n, axis, norm, True)


def rfft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Array:
    """The transform of real numbers: its first half, whose mirror image the rest is."""
    return _one("rfft", _checked("rfft", x, norm, "real floating"), n, axis, norm, False, True)


def irfft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Array:
    """The inverse of `rfft`, of the length n (default: an even one)."""
    x = _checked("irfft", x, norm)
    at = axis_of(axis, x.ndim, "irfft")
    length = _length("irfft", x, 2 * (x.dims[at] - 1) if n is None else n, at)
    return call(_to_real, x, name="irfft", axis=at, length=length, norm=norm)  # type: ignore[no-any-return]


def hfft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Array:
    """The transform of a symmetric signal, of which the first half is given: real numbers."""
    return irfft(_conjugate("hfft", x, norm), n=n, axis=axis, norm=_OPPOSITE[norm])


def ihfft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Array:
    """The inverse of `hfft`."""
    found = _one("ihfft", _checked("ihfft", x, norm, "real floating"), n, axis, _OPPOSITE[norm], False, True)
    return _conjugate("ihfft", found, norm)


def _conj(b: Builder, x: Number) -> Number:
    return numbers.conj(b, x)


def _conjugate(name: str, x: Array, norm: str) -> Array:
    return call(_conj, _checked(name, x, norm), name=name)  # type: ignore[no-any-return]


# ---------------------------------------------------------------- along several axes


def _axes(name: str, x: Array, s: Sequence[int] | None, axes: Sequence[int] | None) -> list[tuple[int, int | None]]:
    """Axes, and the length along each."""
    if axes is None:
        axes = range(x.ndim) if s is None else range(x.ndim - len(s), x.ndim)
    found = tuple(axis_of(a, x.ndim, name) for a in axes)
    if s is not None and len(s) != len(found):
        raise ValueError(f"{name} of the lengths {s} along the axes {axes}: their numbers differ")
    return list(zip(found, s if s is not None else (None,) * len(found), strict=True))


def fftn(
    x: Array, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: Norm = "backward"
) -> Array:
    """The transform along several axes (all, by default), cut or continued with zeros to the lengths s."""
    x = _checked("fftn", x, norm)
    for at, n in _axes("fftn", x, s, axes):
        x = _one("fftn", x, n, at, norm, False)
    return x


def ifftn(
    x: Array, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: Norm = "backward"
) -> Array:
    """The inverse of `fftn`."""
    x = _checked("ifftn", x, norm)
    for at, n in _axes("ifftn", x, s, axes):
        x = _one("ifftn", x, n, at, norm, True)
    return x


def rfftn(
    x: Array, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: Norm = "backward"
) -> Array:
    """`rfft` along the last of several axes, then `fft` along the others."""
    x = _checked("rfftn", x, norm, "real floating")
    found = _axes("rfftn", x, s, axes)
    if not found:
        raise ValueError("rfftn needs an axis")
    at, n = found[-1]
    x = _one("rfftn", x, n, at, norm, False, True)
    for at, n in found[:-1]:
        x = _one("rfftn", x, n, at, norm, False)
    return x


def irfftn(
    x: Array, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: Norm = "backward"
) -> Array:
    """The inverse of `rfftn`."""
    x = _checked("irfftn", x, norm)
    found = _axes("irfftn", x, s, axes)
    if not found:
        raise ValueError("irfftn needs an axis")
    for at, n in found[:-1]:
        x = _one("irfftn", x, n, at, norm, True)
    at, n = found[-1]
    return irfft(x, n=n, axis=at, norm=norm)


# ---------------------------------------------------------------- frequencies


def _frequencies(values: np.ndarray, dtype: Dtype | None, device: Device) -> Array:
    checked_device(device)
    found = DEFAULTS["real floating"] if dtype is None else checked_dtype(dtype)
    if not is_kind(found, "real floating"):
        raise TypeError(f"frequencies are real floats, not {found}")
    return concrete(values.astype(found))


def fftfreq(n: int, /, *, d: float = 1.0, dtype: Dtype | None = None, device: Device = None) -> Array:
    """The frequencies of `fft`, for samples at the distance d."""
    return _frequencies(np.fft.fftfreq(n, _distance(d)), dtype, device)


def rfftfreq(n: int, /, *, d: float = 1.0, dtype: Dtype | None = None, device: Device = None) -> Array:
    """The frequencies of `rfft`, for samples at the distance d."""
    return _frequencies(np.fft.rfftfreq(n, _distance(d)), dtype, device)


def _distance(d: float) -> float:
    if d == 0:
        raise ValueError("samples at the distance zero have no frequencies")
    return d


def _shifted(name: str, x: Array, axes: Axes | None, inverse: bool) -> Array:
    x = _checked(name, x, "backward")
    found = tuple(range(x.ndim)) if axes is None else axes_of(axes, x.ndim, name)
    shifts = tuple(-(x.dims[a] // 2) if inverse else x.dims[a] // 2 for a in found)
    return roll(x, shifts, axis=found)


def fftshift(x: Array, /, *, axes: int | Sequence[int] | None = None) -> Array:
    """The frequency zero in the middle."""
    return _shifted("fftshift", x, axes, False)


def ifftshift(x: Array, /, *, axes: int | Sequence[int] | None = None) -> Array:
    """The inverse of `fftshift`."""
    return _shifted("ifftshift", x, axes, True)


__all__ = [
    "fft", "fftfreq", "fftn", "fftshift", "hfft", "ifft", "ifftn", "ifftshift", "ihfft", "irfft", "irfftn", "rfft",
    "rfftfreq", "rfftn",
]  # fmt: skip

named_all(globals(), __all__)


def __dir__() -> list[str]:
    return __all__
