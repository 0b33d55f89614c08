"""ATen ops that resize images, and those with a filter that widens where an image shrinks (`antialias=True`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnxc.errors import UnsupportedError
from onnxc.frontends.torch_fx_nn import widened
from onnxc.frontends.torch_fx_table import Call, aten, static
from onnxc.ir.graph import Value
from onnxc.ops.common import limited
from onnxc.ops.resize import weighted


def _resized(c: Call, x: Value, scales: Sequence[float | None] | None, **style: Any) -> Value:
    """To the sizes that PyTorch gives the output. Where it was told factors, positions are divided by these."""
    n = x.rank - 2
    (wide,) = widened(c.b, x)
    sizes = c.type.shape[2:]
    if not all(isinstance(d, int) for d in (*x.shape[2:], *sizes)):
        raise UnsupportedError("resizing of an image whose size is not static")
    given = [None] * n if scales is None else list(scales)
    implied = [o / i for o, i in zip(sizes, x.shape[2:], strict=True)]
    if any(s is not None and not math.isclose(s, f, rel_tol=1e-12) for s, f in zip(given, implied, strict=True)):
        raise UnsupportedError(f"resizing by {given}, from {list(x.shape)} to {list(c.type.shape)}")
    wanted = c.b.constant(np.array(sizes, np.int64))
    (y,) = c.onnx("Resize", wide, None, None, wanted, axes=list(range(2, x.rank)), **style)
    return y  # type: ignore[no-any-return]


@aten("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec")
def upsample_nearest_vec(c: Call, x: Value, size: Any, scales: Sequence[float | None] | None) -> Value:
    return _resized(c, x, scales, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor")


@aten("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
def upsample_nearest(c: Call, x: Value, size: Any, *scales: float | None, **named: float | None) -> Value:
    return upsample_nearest_vec(c, x, size, [*scales, *named.values()] or None)


def _interpolated(mode: str, *names: str) -> Callable[..., Value]:
    def vec(c: Call, x: Value, size: Any, align: bool, scales: Sequence[float | None] | None) -> Value:
        place = "align_corners" if align else "half_pixel"
        return _resized(c, x, scales, mode=mode, coordinate_transformation_mode=place)

    def plain(c: Call, x: Value, size: Any, align: bool, *scales: float | None, **named: float | None) -> Value:
        return vec(c, x, size, align, [*scales, *named.values()] or None)

    for name in names:
        aten(f"upsample_{name}.vec")(vec)
        aten(f"upsample_{name}")(plain)
    return plain


upsample_linear = _interpolated("linear", "linear1d", "bilinear2d", "trilinear3d")
upsample_bicubic = _interpolated("cubic", "bicubic2d")


# ---------------------------------------------------------------- with antialias


def _antialiased(cubic: bool, name: str) -> Callable[..., Value]:
    def plain(c: Call, x: Value, size: Any, align: bool, *scales: float | None, **named: float | None) -> Value:
        if x.dtype.is_integer:
            raise UnsupportedError("antialias of integers, whose filters PyTorch rounds to 16 bits")
        y: Value = widened(c.b, x)[0]
        given = [*scales, *named.values()] or [None, None]
        for axis, scale in sorted(zip((2, 3), given, strict=True), reverse=True):
            before, after = (static(d, "a size of an image") for d in (x.shape[axis], c.type.shape[axis]))
            weights = _filters(before, after, _step(before, after, align, scale), cubic)
            y = weighted(c.b, y, axis, weights.astype(y.dtype.numpy))
        return y

    def vec(c: Call, x: Value, size: Any, align: bool, scales: Sequence[float | None] | None) -> Value:
        return plain(c, x, size, align, *(scales or ()))

    aten(f"_upsample_{name}_aa.vec")(vec)
    aten(f"_upsample_{name}_aa")(plain)
    return plain


def _step(before: int, after: int, align: bool, scale: float | None) -> float:
    """How far apart in the input the centres of neighbouring results are."""
    if align:
        return (before - 1) / (after - 1) if after > 1 else 0.0
    return 1 / scale if scale else before / after


def _filters(before: int, after: int, step: float, cubic: bool) -> np.ndarray:
    """The weights [before, after] of a triangle, or of Keys' cubic with a = -0.5, around each centre: as wide as
    neighbouring centres are apart, and cut off where the image ends.
    """
    wide = max(step, 1.0)
    reach = (2.0 if cubic else 1.0) * wide
    limited(after * before, "antialias")
    centre = step * (np.arange(after) + 0.5)
    first = np.maximum((centre - reach + 0.5).astype(np.int64), 0)
    last = np.minimum((centre + reach + 0.5).astype(np.int64), before)
    taps = np.arange(before)[:, None]
    t = np.abs(taps - centre + 0.5) / wide
    near, far = (1.5 * t - 2.5) * t * t + 1, ((-0.5 * t + 2.5) * t - 4) * t + 2
    kernel = np.where(t < 1, near, np.where(t < 2, far, 0)) if cubic else np.maximum(1 - t, 0)
    weights = np.where((taps >= first) & (taps < last), kernel, 0)
    total = weights.sum(0)
    return np.asarray(weights / np.where(total == 0, 1, total))


bilinear_antialiased = _antialiased(False, "bilinear2d")
bicubic_antialiased = _antialiased(True, "bicubic2d")
