"""Contractions: matmul, convolution, and pooling windows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from onnxc.errors import LimitError, ShapeError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, always_equal, ceildiv, is_nonnegative, minimum, never_equal
from onnxc.ir.graph import Attrs, Node, Value
from onnxc.ir.types import TensorType
from onnxc.primitives.base import Kind, Primitive, broadcast_shapes, register, summed_in_float32

# Elements of a pooling window: more than any model has, and few enough to loop over.
MAX_TAPS = 1 << 24


# What `wide` contractions multiply: narrow integers, not both of one type perhaps.
NARROW = (dtypes.uint8, dtypes.int8, dtypes.int16)


def _result_type(a: TensorType, b: TensorType, attrs: Attrs) -> DType | None:
    """The dtype of a contraction: the operands' own, or int32 (modulo 2^32) where it is `wide`. None for a misfit."""
    if attrs.get("wide"):
        return dtypes.int32 if a.dtype in NARROW and b.dtype in NARROW else None
    return a.dtype if a.dtype is b.dtype else None


def _matmul(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    """[..., M, K] @ [..., K, N]; leading dims broadcast.

    With `wide`, of narrow integers, in int32; `zeros`, two integers, are then what the operands, both of 8 bits, are
    less: (a - zeros[0]) @ (b - zeros[1]). Neither is more than 255 away from 0.
    """
    a, b = types
    dtype = _result_type(a, b, attrs)
    zeros = attrs.get("zeros", (0, 0))
    if any(zeros) and not (attrs.get("wide") and a.dtype.bits == b.dtype.bits == 8 and max(map(abs, zeros)) <= 255):
        raise ShapeError(f"matmul of {a} less {zeros[0]} and {b} less {zeros[1]}: zero points are for 8 bits")
    if a.rank < 2 or b.rank < 2 or dtype is None or never_equal(a.shape[-1], b.shape[-2]):
        raise ShapeError(f"matmul of {a} and {b}: the inner dims must be equal")
    batch = broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return (TensorType(dtype, (*batch, a.shape[-2], b.shape[-1])),)


def _matmul_eval(a: np.ndarray, b: np.ndarray, wide: bool = False, zeros: tuple[int, int] = (0, 0)) -> np.ndarray:
    a, b = (a.astype(np.int32) - zeros[0], b.astype(np.int32) - zeros[1]) if wide else (a, b)
    return np.asarray(np.matmul(a, b)).astype(a.dtype, copy=False)


def window_size(size: Dim, kernel: Dim, stride: int, low: Dim, high: Dim, dilation: int, *, empty: bool = False) -> Dim:
    """Number of window positions along one axis (rounding down).

    `empty`: a window that is longer by one whole stride has none. By parts of one, authors round differently.
    """
    if kernel == 1 and stride == 1:
        return size + low + high  # of nothing, nothing
    room = size + low + high - (dilation * (kernel - 1) + 1)
    if isinstance(room, int) and room < least_room(room, stride, empty):
        raise ShapeError(f"a window of {kernel} (dilation {dilation}) does not fit in {size} + {low} + {high}")
    return room // stride + 1


def least_room(room: Dim, stride: int, empty: bool) -> int:
    """How much larger than a window its padded input has to be: see `window_size`."""
    return -stride if empty and always_equal(room % stride, 0) else 0


def _conv(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    """x [N, C, D1...], w [M, C / groups, K1...]; attrs strides, low, high, dilations (per spatial axis), groups.

    With `wide`, of narrow integers, in int32; a third operand is then the number that pads x, a scalar of its dtype.
    """
    x, w, *fill = types
    groups = attrs["groups"]
    dtype = _result_type(x, w, attrs)
    if dtype is None or (fill and (not attrs.get("wide") or fill[0].shape or fill[0].dtype is not x.dtype)):
        raise ShapeError(f"conv of {x} with weights {w}: their dtypes differ")
    if x.rank != w.rank or x.rank < 3 or groups < 1:
        raise ShapeError(f"conv of {x} with weights {w}, groups {groups}: ranks must be equal and at least 3")
    if never_equal(x.shape[1], w.shape[1] * groups) or (isinstance(w.shape[0], int) and w.shape[0] % groups):
        raise ShapeError(f"conv of {x} with weights {w}: channels do not fit {groups} groups")
    spatial = tuple(
        window_size(x.shape[i + 2], w.shape[i + 2], attrs["strides"][i], attrs["low"][i], attrs["high"][i],
                    attrs["dilations"][i])
        for i in range(x.rank - 2)
    )  # fmt: skip
    return (TensorType(dtype, (x.shape[0], w.shape[0], *spatial)),)


def images_of(node: Node) -> tuple[Value, ...]:
    """The operands of a convolution, or of its derivative, whose second dim is channels of an image."""
    return node.operands[:1] if node.op == "conv" else node.operands if node.op == "conv_weights" else ()


def _window(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    """Windows over every axis: attrs kernel, strides, low, high, dilations, each with one entry per axis."""
    keys = ("kernel", "strides", "low", "high", "dilations")
    if math.prod(attrs["kernel"]) > MAX_TAPS:
        raise LimitError(f"a window of {math.prod(attrs['kernel'])} elements; the limit is {MAX_TAPS}")
    rows = zip(types[0].shape, *(attrs[k] for k in keys), strict=True)
    shape = tuple(window_size(d, *row, empty=True) for d, *row in rows)
    if not all(is_nonnegative(d) for d in shape if isinstance(d, int)):
        raise ShapeError(f"windows {dict(attrs)} do not fit in {types[0]}")
    return (types[0].with_shape(shape),)


def _patches(x: np.ndarray, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> np.ndarray:
    """A view [positions..., kernel...] of an already padded array."""
    out = [(d - (dl * (k - 1) + 1)) // s + 1 for d, k, s, dl in zip(x.shape, kernel, strides, dilations, strict=True)]
    step = tuple(b * s for b, s in zip(x.strides, strides, strict=True))
    inner = tuple(b * dl for b, dl in zip(x.strides, dilations, strict=True))
    return np.lib.stride_tricks.as_strided(x, (*out, *kernel), step + inner, writeable=False)


def _padded(x: np.ndarray, low: Sequence[int], high: Sequence[int], fill: float) -> np.ndarray:
    """The array with so many elements around it, or so many less where an amount is negative."""
    ends = list(zip(low, high, strict=True))
    wide = np.pad(x, [(max(lo, 0), max(hi, 0)) for lo, hi in ends], constant_values=fill)
    return wide[tuple(slice(max(-lo, 0), n - max(-hi, 0)) for (lo, hi), n in zip(ends, wide.shape, strict=True))]


def _window_eval(op: str) -> object:
    def call(x: np.ndarray, kernel, strides, low, high, dilations) -> np.ndarray:  # type: ignore[no-untyped-def]
        fill = 0 if op == "sum" else np.iinfo(x.dtype).min if x.dtype.kind in "biu" else -np.inf
        padded = _padded(x, low, high, fill)
        view = _patches(padded, kernel, strides, dilations)
        if op == "max":
            return np.asarray(view.max(tuple(range(x.ndim, 2 * x.ndim)))).astype(x.dtype)
        total = np.zeros(view.shape[: x.ndim], x.dtype)
        for tap in np.ndindex(*kernel):  # one after the other, as kernels do
            total += view[(..., *tap)]
        return total

    return call


def _conv_eval(x, w, fill=0, *, strides, low, high, dilations, groups, wide=False) -> np.ndarray:  # type: ignore[no-untyped-def]
    n = x.ndim - 2
    x, w = (x.astype(np.int32), w.astype(np.int32)) if wide else (x, w)
    padded = _padded(x, (0, 0, *low), (0, 0, *high), fill)
    view = _patches(padded, (1, 1, *w.shape[2:]), (1, 1, *strides), (1, 1, *dilations))
    view = view.reshape(*view.shape[: n + 2], *w.shape[2:])
    ci, co = x.shape[1] // groups, w.shape[0] // groups
    parts = []
    for g in range(groups):
        v = np.moveaxis(view[:, g * ci : (g + 1) * ci], 1, n + 1)  # [N, out..., C, k...]
        parts.append(np.tensordot(v, w[g * co : (g + 1) * co], axes=(range(n + 1, 2 * n + 2), range(1, n + 2))))
    return np.moveaxis(np.concatenate(parts, axis=-1), -1, 1).astype(x.dtype)


def _conv_weights(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    """x [N, C, D1...], dy [N, M, O1...] to [M, C / groups, K1...]; attrs kernel, and conv's own.

    The derivative of `conv` by its weights: how each of them meets the products of x with the cotangent dy.
    """
    x, dy = types
    groups = attrs["groups"]
    if x.dtype is not dy.dtype or x.rank != dy.rank or x.rank < 3 or len(attrs["kernel"]) != x.rank - 2 or groups < 1:
        raise ShapeError(f"conv_weights of {x} and {dy}: dtypes and ranks must be equal")
    m, c = dy.shape[1], x.shape[1]
    if never_equal(x.shape[0], dy.shape[0]) or any(isinstance(d, int) and d % groups for d in (m, c)):
        raise ShapeError(f"conv_weights of {x} and {dy}: images, or channels and {groups} groups, do not fit")
    keys = ("kernel", "strides", "low", "high", "dilations")
    sizes = [window_size(d, *row) for d, *row in zip(x.shape[2:], *(attrs[k] for k in keys), strict=True)]
    if any(never_equal(a, b) for a, b in zip(sizes, dy.shape[2:], strict=True)):
        raise ShapeError(f"conv_weights of {x} and {dy}: windows {dict(attrs)} do not fit")
    return (TensorType(x.dtype, (m, c // groups, *attrs["kernel"])),)


def _conv_weights_eval(x, dy, *, kernel, strides, low, high, dilations, groups) -> np.ndarray:  # type: ignore[no-untyped-def]
    n = x.ndim - 2
    padded = _padded(x, (0, 0, *low), (0, 0, *high), 0)
    view = _patches(padded, (1, 1, *kernel), (1, 1, *strides), (1, 1, *dilations))
    view = view.reshape(*view.shape[: n + 2], *kernel)  # [N, C, out..., k...]
    axes = (0, *range(2, n + 2))
    parts = zip(np.split(view, groups, 1), np.split(dy, groups, 1), strict=True)
    return np.concatenate([np.tensordot(d, v, axes=(axes, axes)) for v, d in parts]).astype(x.dtype)


register(Primitive("matmul", Kind.TEMPLATE, _matmul, summed_in_float32(_matmul_eval)))
register(Primitive("conv", Kind.TEMPLATE, _conv, summed_in_float32(_conv_eval)))
register(Primitive("conv_weights", Kind.TEMPLATE, _conv_weights, summed_in_float32(_conv_weights_eval)))
register(Primitive("window_max", Kind.REDUCTION, _window, _window_eval("max")))  # type: ignore[arg-type]
register(Primitive("window_sum", Kind.REDUCTION, _window, summed_in_float32(_window_eval("sum"))))  # type: ignore[arg-type]


def product_type(a: TensorType, b: TensorType) -> TensorType:
    """The type of a @ b.

    Raises:
        ShapeError: operands that do not fit.
    """
    return _matmul((a, b), {})[0]


def attention_scores(q: tuple[Dim, ...], kt: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """The shape of q @ kt."""
    return (*broadcast_shapes(q[:-2], kt[:-2]), q[-2], kt[-1])


def not_one(size: Dim) -> Dim:
    """0 where a size is 1, else 1: the factor of an index along an axis that may turn out to be repeated.

    >>> from onnxc.ir.expr import Sym
    >>> not_one(1), not_one(7), not_one(Sym("n"))
    (0, 1, min(n*n - 2*n + 1, 1))
    """
    return minimum((size - 1) * (size - 1), 1)


def _matmul_quantized(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    """a [..., M, K] @ ((q - zero) * scale), with small integers q [K, N], or numbers of 16 bits.

    The rows of scale and zero [ceil(K / block), N], both float32, hold for `block` rows of q each; `bits` says how
    wide q's values are: from -2 ** (bits - 1) up to 2 ** (bits - 1) - 1.
    """
    a, q, *rows = types
    block = attrs["block"]
    if a.rank < 2 or q.rank != 2 or block < 1 or never_equal(a.shape[-1], q.shape[0]):
        raise ShapeError(f"matmul_quantized of {a} and {q}: the inner dims must be equal")
    for r in rows:
        if r.rank != 2 or never_equal(r.shape[0], ceildiv(q.shape[0], block)) or never_equal(r.shape[1], q.shape[1]):
            raise ShapeError(f"matmul_quantized of {q}, blocks of {block}: scales and zero points {r} do not fit")
    return (a.with_shape((*a.shape[:-1], q.shape[1])),)


def _matmul_quantized_eval(a, q, scale, zero=None, *, bits: int, block: int) -> np.ndarray:  # type: ignore[no-untyped-def]
    rows = np.arange(len(q)) // block
    w = q.astype(np.float32) if zero is None else q.astype(np.float32) - zero[rows]
    return np.asarray(np.matmul(a, w * scale[rows])).astype(a.dtype)


register(Primitive("matmul_quantized", Kind.TEMPLATE, _matmul_quantized, summed_in_float32(_matmul_quantized_eval)))
