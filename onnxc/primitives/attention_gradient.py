"""The derivative of attention: what a kernel needs that computes its probabilities again, block by block.

    norm  = log(sum(exp(s)))                      of each row of the scores s = scale * q @ kt + bias
    p     = exp(s - norm)                         the probabilities
    delta = sum(dy * y)                           of each row of the result y = p @ v and its cotangent dy
    ds    = p * (dy @ v' - delta)

From these follow dv = p' dy, dq = scale * ds @ k and dk = scale * ds' @ q, each a node of its own.
(Dao and others, FlashAttention; the formula of ds is that of softmax's derivative.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxc.errors import ShapeError
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, never_equal
from onnxc.ir.graph import Attrs, Node, Value
from onnxc.ir.types import TensorType
from onnxc.primitives.base import Kind, Primitive, broadcast_shapes, register
from onnxc.primitives.contraction import attention_scores

# Beyond this a mask is as low (high) as this: far enough to hide a key, and such that the norm of a row all of whose
# keys are hidden still tells how many there are: float32 has no -1e9 + log(100), nor does -3.4e38 bear a factor.
FAR = 65536.0
MASK = {"attention": 3, "attention_norm": 2, "attention_gradient": 6}  # places of the mask among the operands


def _norm(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    """q [..., Q, D], kt [..., D, K], a mask as attention's: [..., Q], float32 at least; minus infinity for a row all of
    whose keys are hidden.
    """
    q, kt, *bias = types
    scores = attention_scores(q.shape, kt.shape)
    _check_mask(bias, scores, attrs)
    return (TensorType(_wide(q), scores[:-1]),)


def _gradient(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    """q [..., Q, D], kt [..., D, K], v [..., K, E], dy [..., Q, E], norm and delta broadcast to [..., Q], a mask as
    attention's; to the cotangent of q, of k [..., K, D] or of v, as `of` says, of each of dy's batches.

    With `guard`, rows without a key that counts have no part in it.
    """
    q, kt, v, dy, norm, delta, *bias = types
    scores = attention_scores(q.shape, kt.shape)
    _check_mask(bias, scores, attrs)
    lead, rows = dy.shape[:-2], dy.shape[:-1]
    for x in (norm, delta):
        whole = broadcast_shapes(rows, x.shape)
        if len(whole) != len(rows) or any(never_equal(a, b) for a, b in zip(whole, rows, strict=True)):
            raise ShapeError(f"attention_gradient of {dy}: its rows have no norm or delta {x}")
    sizes: dict[str, tuple[Dim, ...]] = {
        "q": q.shape[-2:], "k": (kt.shape[-1], kt.shape[-2]), "v": v.shape[-2:]
    }  # fmt: skip
    return (TensorType(q.dtype, (*lead, *sizes[attrs["of"]])),)


def mask_operand(node: Node) -> Value | None:
    """The mask of attention, or of a node of its derivative."""
    at = MASK[node.op]
    return node.operands[at] if len(node.operands) > at else None


def _check_mask(bias: Sequence[TensorType], scores: tuple[Dim, ...], attrs: Attrs) -> None:
    if bias:
        broadcast_shapes(scores, bias[0].shape)
        if (attrs.get("fill") is not None) is not (bias[0].dtype is dtypes.boolean):
            raise ShapeError(f"a mask {bias[0]}: it is a condition where scores are filled, else numbers")


def _wide(t: TensorType) -> dtypes.DType:
    return t.dtype if t.dtype.bits > 32 else dtypes.float32


Array = np.ndarray[Any, Any]


def near(fill: float) -> float:
    """What stands for the number of hidden scores."""
    return fill if math.isinf(fill) else min(max(fill, -FAR), FAR)


def _scores(q: Array, kt: Array, bias: Array | None, scale: float, fill: float | None) -> Array:
    dtype = np.float64 if q.dtype == np.float64 else np.float32
    s = np.matmul(q.astype(dtype), kt.astype(dtype)) * dtype(scale)
    if bias is None:
        return np.asarray(s)
    if fill is not None:
        return np.where(bias, dtype(near(fill)), s)
    s = s + bias.astype(dtype)
    return np.where((s < -FAR) & ~np.isneginf(s), dtype(-FAR), s)


def _norm_eval(q: Array, kt: Array, bias: Array | None = None, scale: float = 1.0, fill: float | None = None) -> Array:
    s = _scores(q, kt, bias, scale, fill)
    with np.errstate(all="ignore"):
        top = s.max(-1, keepdims=True, initial=-np.inf)
        base = np.where(np.isneginf(top), 0, top)
        return np.asarray(np.log(np.exp(s - base).sum(-1)) + base[..., 0])


def _gradient_eval(
    q: Array, kt: Array, v: Array, dy: Array, norm: Array, delta: Array, bias: Array | None = None,
    of: str = "q", scale: float = 1.0, guard: bool = False, fill: float | None = None,
) -> Array:  # fmt: skip
    s = _scores(q, kt, bias, scale, fill)
    with np.errstate(all="ignore"):
        p = np.exp(s - norm[..., None])
    p = np.where(np.isnan(p), 0, p) if guard else p
    wide = dy.astype(s.dtype)
    if of == "v":
        return np.asarray(np.matmul(np.swapaxes(p, -1, -2), wide)).astype(q.dtype)
    ds = p * (np.matmul(wide, np.swapaxes(v, -1, -2).astype(s.dtype)) - delta[..., None])
    if fill is not None and bias is not None:  # a score that is replaced does not count
        ds = np.where(bias, 0, ds)
    ds = ds * s.dtype.type(scale)
    if of == "q":
        return np.asarray(np.matmul(ds, np.swapaxes(kt, -1, -2).astype(s.dtype))).astype(q.dtype)
    return np.asarray(np.matmul(np.swapaxes(ds, -1, -2), q.astype(s.dtype))).astype(q.dtype)


register(Primitive("attention_norm", Kind.TEMPLATE, _norm, _norm_eval))
register(Primitive("attention_gradient", Kind.TEMPLATE, _gradient, _gradient_eval))
