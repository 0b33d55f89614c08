"""Attention and rotary embeddings as the standard defines them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from onnxc.errors import ModelError, ShapeError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, bounds, is_nonnegative, never_equal
from onnxc.ir.graph import Value
from onnxc.ops.common import along, counted, float_of, from_start, is_narrow, static_dim, within
from onnxc.ops.registry import Flag, op
from onnxc.ops.resize import repeat_each
from onnxc.primitives.builder import Builder


def split_heads(b: Builder, x: Value, heads: int) -> Value:
    """[batch, sequence, heads * size] to [batch, heads, sequence, size]."""
    batch, sequence, hidden = x.shape
    return b.swap(b.reshape(x, (batch, sequence, heads, hidden // heads)), 1, 2)


def merge_heads(b: Builder, x: Value) -> Value:
    """[batch, heads, sequence, size] to [batch, sequence, heads * size]."""
    batch, heads, sequence, size = x.shape
    return b.reshape(b.swap(x, 1, 2), (batch, sequence, heads * size))


def check_batch(q: Value, k: Value, v: Value) -> None:
    """ShapeError where keys or values are of other batches than the queries: one of 1 would be broadcast."""
    for what, x in (("keys", k), ("values", v)):
        if never_equal(q.shape[0], x.shape[0]):
            raise ShapeError(f"queries of a batch of {q.shape[0]} and {what} of a batch of {x.shape[0]}")


def share_heads(b: Builder, x: Value, heads: Dim) -> Value:
    """Keys or values of fewer heads than the queries: each serves a run of neighbouring query heads."""
    own = x.shape[1]
    if own == heads:
        return x
    own, heads = (static_dim(n, "the number of heads") for n in (own, heads))
    if not own or heads % own:
        raise ShapeError(f"{own} heads of keys cannot serve {heads} heads of queries")
    return repeat_each(b, x, 1, heads // own)


def scaled_scores(b: Builder, q: Value, k: Value, scale: float) -> Value:
    """q @ k' * scale, for [batch, heads, sequence, size]. Narrow floats are scaled on both sides."""
    if is_narrow(q.dtype):
        root = math.sqrt(abs(scale))
        return b.matmul(b.mul(q, math.copysign(root, scale)), b.swap(b.mul(k, root), 2, 3))
    return b.matmul(b.mul(q, scale), b.swap(k, 2, 3))


def additive(b: Builder, allowed: Value, dtype: DType, masked: float = -np.inf) -> Value:
    """A boolean mask as a bias: 0 where attention is allowed, minus infinity elsewhere."""
    return b.where(allowed, b.scalar(0.0, dtype), b.scalar(masked, dtype))


def window_mask(b: Builder, queries: Dim, keys: Dim, offset: Value, left: int, right: int) -> Value:
    """True where key j is at most `left` before and `right` after query i + offset; a negative bound is none.

    `offset` is a scalar, or [batch, 1, 1, 1].
    """
    at = b.add(along(b, b.iota(queries), 2, 0), offset)
    j = b.iota(keys)
    allowed = b.le(j, b.add(at, right)) if right >= 0 else None
    if left >= 0:
        near = b.le(b.sub(at, left), j)
        allowed = near if allowed is None else b.and_(allowed, near)
    assert allowed is not None
    return allowed


def attention_bias(
    b: Builder, q: Value, k: Value, mask: Value | None, past: Dim, lengths: Value | None, left: int,
    right: int, opset: int,
) -> tuple[Value | None, bool]:  # fmt: skip
    """What is added to the scores, and whether a row of it may forbid every key.

    A mask that is too short forbids the keys behind it. One of a single key broadcasts before opset 24.
    """
    bias: Value | None = None
    if mask is not None:
        if mask.dtype is dtypes.boolean:
            mask = additive(b, mask, q.dtype)
        mask = b.cast(mask, q.dtype)  # which may be of any numbers
        _check_mask(mask, (*q.shape[:3], k.shape[2]))
        missing = k.shape[2] - mask.shape[-1]
        if missing != 0 and (mask.shape[-1] != 1 or opset >= 24):
            mask = b.pad(mask, (0,) * mask.rank, (*(0,) * (mask.rank - 1), missing), -np.inf)
        bias = mask
    offset = b.size_as(past, dtypes.int64)
    if lengths is not None:
        lengths = b.reshape(counted(b, lengths, k.shape[2]), (lengths.shape[0], 1, 1, 1))
        offset = b.sub(lengths, b.size_as(q.shape[2], dtypes.int64)) if past == 0 else offset
        bias = _plus(b, bias, additive(b, b.lt(b.iota(k.shape[2]), lengths), q.dtype))
    if left >= 0 or right >= 0:
        bias = _plus(b, bias, additive(b, window_mask(b, q.shape[2], k.shape[2], offset, left, right), q.dtype))
    sure = mask is None and lengths is None and left < 0 and right >= 0 and is_nonnegative(past)
    return bias, not (bias is None or sure)


def _check_mask(mask: Value, scores: Sequence[Dim]) -> None:
    """ShapeError where a mask would make the scores larger."""
    own = scores[4 - mask.rank :] if mask.rank <= 4 else ()
    far = bounds(own[-1] - mask.shape[-1])[1] if own else None
    larger = any(d != 1 and never_equal(d, s) for d, s in zip(mask.shape[:-1], own[:-1], strict=False))
    if not own or larger or (far is not None and far < 0 and mask.shape[-1] != 1):
        raise ShapeError(f"the mask {mask.t} does not broadcast to the scores {list(scores)}")


def _plus(b: Builder, x: Value | None, y: Value) -> Value:
    return y if x is None else b.add(x, y)


def guarded_softmax(b: Builder, scores: Value, bias: Value | None) -> Value:
    """Softmax over the last axis; rows whose bias forbids every key are zero."""
    if bias is None:
        return b.softmax(scores, scores.rank - 1)
    forbidden = b.eq(b.reduce("max", bias, [bias.rank - 1], True), b.scalar(-np.inf, bias.dtype))
    if b.differentiable:  # else those rows are NaN on the way to where, and their derivatives stay so
        scores = b.where(forbidden, 0.0, scores)
    return b.where(forbidden, 0.0, b.softmax(scores, scores.rank - 1))


@op("Attention", 23)
def attention(
    b: Builder, q: Value, k: Value, v: Value, attn_mask: Value | None = None, past_key: Value | None = None,
    past_value: Value | None = None, nonpad_kv_seqlen: Value | None = None, *, is_causal: Flag = 0,
    kv_num_heads: int | None = None, left_window_size: int = -1, q_num_heads: int | None = None,
    qk_matmul_output_mode: Literal[0, 1, 2, 3] = 0, right_window_size: int = -1, scale: float | None = None,
    softcap: float = 0.0, softmax_precision: int | None = None, opset: int = 23,
) -> list[Value]:  # fmt: skip
    """softmax(q k' * scale + bias) v over heads, with an optional cache of earlier keys and values."""
    flat = q.rank == 3
    if flat:
        if (q_num_heads or 0) < 1 or (kv_num_heads or 0) < 1:
            raise ModelError("Attention of 3D inputs needs q_num_heads and kv_num_heads")
        q = split_heads(b, q, q_num_heads or 0)
        k, v = (split_heads(b, t, kv_num_heads or 0) for t in (k, v))
    for what, told, x in (("q_num_heads", q_num_heads, q), ("kv_num_heads", kv_num_heads, k)):
        if told is not None and told > 0 and never_equal(told, x.shape[1]):
            raise ModelError(f"Attention has {what} {told}, but its tensor has {x.shape[1]} heads")
    check_batch(q, k, v)
    if never_equal(k.shape[1], v.shape[1]):
        raise ShapeError(f"keys of {k.shape[1]} heads and values of {v.shape[1]}")
    past: Dim = 0
    if past_key is not None and past_value is not None:
        past = past_key.shape[2]
        k, v = b.concat([past_key, k], 2), b.concat([past_value, v], 2)
    right = 0 if is_causal else right_window_size
    bias, may_be_empty = attention_bias(b, q, k, attn_mask, past, nonpad_kv_seqlen, left_window_size, right, opset)
    if scale is None:
        scale = 1 / math.sqrt(static_dim(q.shape[3], "the size of a head of Attention") or 1)
    scores = scaled_scores(b, q, share_heads(b, k, q.shape[1]), scale)
    shown = [scores]
    if softcap > 0:
        scores = b.mul(b.tanh(b.div(scores, softcap)), softcap)
    shown.append(scores)
    if bias is not None:
        scores = b.add(scores, bias)
    shown.append(scores)
    wide = scores if softmax_precision is None else b.cast(scores, float_of(softmax_precision, "softmax_precision"))
    p = b.cast(guarded_softmax(b, wide, bias if may_be_empty else None), q.dtype)
    shown.append(p)
    y = _weighted(b, p, share_heads(b, v, q.shape[1]))
    return [merge_heads(b, y) if flat else y, k, v, shown[qk_matmul_output_mode]]


def _weighted(b: Builder, p: Value, v: Value) -> Value:
    """p @ v in the dtype of p; where that of the values is another one, by way of a type that holds both."""
    if p.dtype is v.dtype:
        return b.matmul(p, v)
    wide = dtypes.float64 if dtypes.float64 in (p.dtype, v.dtype) else dtypes.float32
    return b.cast(b.matmul(b.cast(p, wide), b.cast(v, wide)), p.dtype)


def rotate(b: Builder, x: Value, cos: Value, sin: Value, size: int, interleaved: bool) -> Value:
    """The first `size` elements of the last axis turned by angles.

    Pairs are (x[i], x[i + size / 2]) or, interleaved, neighbours. cos and sin broadcast to [..., size / 2].
    """
    axis, half = x.rank - 1, size // 2
    head, rest = b.slice(x, axis, 0, size), b.slice(x, axis, size, x.shape[axis])
    if interleaved:
        first, second = b.slice(head, axis, 0, size, 2), b.slice(head, axis, 1, size, 2)
    else:
        first, second = b.split(head, axis, [half, half])
    real = b.sub(b.mul(cos, first), b.mul(sin, second))
    imaginary = b.add(b.mul(sin, first), b.mul(cos, second))
    if interleaved:
        parts = [b.reshape(t, (*t.shape, 1)) for t in (real, imaginary)]
        turned = b.reshape(b.concat(parts, x.rank), head.shape)
    else:
        turned = b.concat([real, imaginary], axis)
    return turned if rest.shape[axis] == 0 else b.concat([turned, rest], axis)


def rotary(
    b: Builder, x: Value, cos: Value, sin: Value, positions: Value | None, heads: int, size: int,
    interleaved: bool,
) -> Value:  # fmt: skip
    """Rotary embedding of [batch, heads, sequence, size] or, with `heads`, of [batch, sequence, hidden]."""
    flat = x.rank == 3
    if flat:
        if not heads:
            raise ModelError("RotaryEmbedding of a 3D input needs num_heads")
        x = b.reshape(x, (*x.shape[:2], heads, x.shape[2] // heads))
    head_size = x.shape[3]
    width = size or static_dim(head_size, "the rotated size of RotaryEmbedding")
    if width % 2 or width < 0:
        raise ShapeError(f"RotaryEmbedding of {x.t}: the rotated size {width} must be even, and not negative")
    if positions is not None:
        cos, sin = (b.gather(t, from_start(b, positions, t.shape[0]), 0) for t in (cos, sin))
    place = 2 if flat else 1
    cos, sin = (b.reshape(t, (*t.shape[:place], 1, *t.shape[place:])) for t in (cos, sin))
    if never_equal(cos.shape[-1], width // 2) or never_equal(sin.shape[-1], width // 2):
        raise ShapeError(f"RotaryEmbedding turns {width // 2} pairs, and has the angles {cos.t} and {sin.t}")
    cos, sin = (within(b, t, (*x.shape[:3], width // 2)) for t in (cos, sin))
    y = rotate(b, x, cos, sin, width, interleaved)
    return b.reshape(y, (*y.shape[:2], y.shape[2] * y.shape[3])) if flat else y


@op("RotaryEmbedding", 23)
def rotary_embedding(
    b: Builder, x: Value, cos_cache: Value, sin_cache: Value, position_ids: Value | None = None, *,
    interleaved: Flag = 0, num_heads: int = 0, rotary_embedding_dim: int = 0,
) -> Value:  # fmt: skip
    return rotary(b, x, cos_cache, sin_cache, position_ids, num_heads, rotary_embedding_dim, bool(interleaved))
