"""onnxruntime's contrib operators for attention."""

from __future__ import annotations

import math

import numpy as np

from onnxc.errors import ModelError, ShapeError, UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from onnxc.ops.attention import (
    additive,
    merge_heads,
    rotary,
    scaled_scores,
    share_heads,
    split_heads,
    window_mask,
)
from onnxc.ops.com_microsoft import MS
from onnxc.ops.registry import op
from onnxc.primitives.builder import Builder


@op("RotaryEmbedding", 1, domain=MS)
def rotary_embedding(
    b: Builder, x: Value, position_ids: Value, cos: Value, sin: Value, *, interleaved: int = 0,
    is_packed_batching: int = 0, num_heads: int = 0, rotary_embedding_dim: int = 0, scale: float = 1.0,
) -> Value:  # fmt: skip
    """Positions [batch, sequence], or the first one alone."""
    if is_packed_batching:
        raise UnsupportedError("RotaryEmbedding of packed batches is not supported")
    batch, sequence = x.shape[0], x.shape[1] if x.rank == 3 else x.shape[2]
    width = rotary_embedding_dim or cos.shape[1] * 2
    if position_ids.t.size == 1:
        position_ids = b.expand(b.add(b.iota(sequence), b.reshape(position_ids, ())), (batch, sequence))
    hidden = x.shape[-1]
    heads = num_heads or (hidden // width if x.rank == 3 else x.shape[1])
    if not isinstance(width, int) or not isinstance(heads, int):
        raise ShapeError(f"RotaryEmbedding of {x.t}: the number of heads must be static")
    return rotary(b, x, cos, sin, position_ids, heads, width, bool(interleaved))


@op("MultiHeadAttention", 1, domain=MS)
def multi_head_attention(
    b: Builder, q: Value, k: Value | None = None, v: Value | None = None, bias: Value | None = None,
    key_padding_mask: Value | None = None, attention_bias: Value | None = None, past_key: Value | None = None,
    past_value: Value | None = None, past_sequence_length: Value | None = None,
    cache_indirection: Value | None = None, *, mask_filter_value: float = -10000.0, num_heads: int,
    scale: float | None = None, unidirectional: int = 0,
) -> list[Value]:  # fmt: skip
    """q [batch, sequence, hidden]; k and v alike, or already in heads, or all three packed in q."""
    if past_sequence_length is not None or cache_indirection is not None:
        raise UnsupportedError("MultiHeadAttention with a shared cache is not supported")
    if q.rank == 5:  # packed [batch, sequence, heads, 3, size]
        q, k, v = (b.reshape(t, (*q.shape[:2], q.shape[2] * q.shape[4])) for t in b.split(q, 3, [1, 1, 1]))
    elif k is not None and k.rank == 5:  # keys and values packed in the same way
        k, v = (b.reshape(t, (*k.shape[:2], k.shape[2] * k.shape[4])) for t in b.split(k, 3, [1, 1]))
    if k is None or v is None:
        raise ModelError("MultiHeadAttention needs a key and a value")
    if bias is not None:
        q, k, v = _with_biases(b, q, k, v, bias)
    qh = split_heads(b, q, num_heads)
    kh, vh = (t if t.rank == 4 else split_heads(b, t, num_heads) for t in (k, v))
    if past_key is not None and past_value is not None:
        kh, vh = b.concat([past_key, kh], 2), b.concat([past_value, vh], 2)
    mask = _padding_mask(b, qh, kh, key_padding_mask, mask_filter_value)
    if unidirectional:
        offset = b.size_as(kh.shape[2] - qh.shape[2], dtypes.int64)
        mask = _both(
            b,
            mask,
            additive(b, window_mask(b, qh.shape[2], kh.shape[2], offset, -1, 0), q.dtype, mask_filter_value),
        )
    if attention_bias is not None:
        mask = _both(b, mask, attention_bias)
    return [merge_heads(b, attend(b, qh, kh, vh, mask, scale)), kh, vh]


def attend(b: Builder, q: Value, k: Value, v: Value, mask: Value | None, scale: float | None) -> Value:
    """softmax(q k' * scale + mask) v, for [batch, heads, sequence, size]."""
    size = q.shape[3]
    if not scale and not isinstance(size, int):
        raise ShapeError(f"attention of {q.t}: the size of a head must be static")
    scores = scaled_scores(b, q, share_heads(b, k, q.shape[1]), scale or 1 / math.sqrt(size))
    scores = scores if mask is None else b.add(scores, mask)
    return b.matmul(b.softmax(scores, 3), share_heads(b, v, q.shape[1]))


def _both(b: Builder, x: Value | None, y: Value) -> Value:
    return y if x is None else b.add(x, y)


def _with_biases(b: Builder, q: Value, k: Value, v: Value, bias: Value) -> tuple[Value, Value, Value]:
    """One bias [q hidden + k hidden + v hidden]; keys that are already in heads take no bias."""
    hidden = q.shape[-1]
    sizes = [hidden, hidden, bias.shape[0] - 2 * hidden]
    parts = b.split(bias, 0, sizes)
    added = [b.add(t, p) if t.rank == 3 else t for t, p in zip((q, k, v), parts, strict=True)]
    return added[0], added[1], added[2]


def _padding_mask(b: Builder, q: Value, k: Value, mask: Value | None, filtered: float) -> Value | None:
    """The mask of padded keys as a bias: [batch] lengths, [batch, keys], or [batch, queries, keys]."""
    if mask is None:
        return None
    keys, batch = k.shape[2], q.shape[0]
    if mask.rank == 1 and mask.shape[0] != batch:
        raise UnsupportedError(f"a key_padding_mask {mask.t} is not supported")
    if mask.rank == 1:
        allowed = b.lt(b.iota(keys), b.reshape(b.cast(mask, dtypes.int64), (batch, 1, 1, 1)))
    else:
        shape = (batch, 1, 1, keys) if mask.rank == 2 else (batch, 1, *mask.shape[1:])
        allowed = b.reshape(b.lt(b.scalar(0, mask.dtype), mask), shape)
    return additive(b, allowed, q.dtype, filtered)


@op("Attention", 1, domain=MS)
def attention(
    b: Builder, x: Value, weights: Value, bias: Value | None = None, mask: Value | None = None,
    past: Value | None = None, attention_bias: Value | None = None, past_sequence_length: Value | None = None,
    *, do_rotary: int = 0, mask_filter_value: float = -10000.0, num_heads: int,
    past_present_share_buffer: int = 0, qkv_hidden_sizes: list[int] | None = None,
    rotary_embedding_dim: int = 0, scale: float | None = None, unidirectional: int = 0,
) -> list[Value]:  # fmt: skip
    """Self attention with its projection: x [batch, sequence, input], weights [input, q + k + v hidden]."""
    if do_rotary or past_present_share_buffer or past_sequence_length is not None:
        raise UnsupportedError("Attention with rotary embedding or a shared cache is not supported")
    if mask is not None and (mask.rank > 3 or (mask.rank == 1 and mask.shape[0] != x.shape[0])):
        raise UnsupportedError(f"Attention with the mask {mask.t} is not supported")
    projected = b.matmul(x, b.reshape(weights, (1, *weights.shape)))
    projected = projected if bias is None else b.add(projected, bias)
    third = weights.shape[1] // 3
    q, k, v = (split_heads(b, t, num_heads) for t in b.split(projected, 2, qkv_hidden_sizes or [third] * 3))
    present = []
    if past is not None:
        old_k, old_v = (b.reshape(t, t.shape[1:]) for t in b.split(past, 0, [1, 1]))
        k, v = b.concat([old_k, k], 2), b.concat([old_v, v], 2)
    if k.shape == v.shape:
        present = [b.concat([b.reshape(t, (1, *t.shape)) for t in (k, v)], 0)]
    total = _padding_mask(b, q, k, mask, mask_filter_value)
    if unidirectional:
        offset = b.size_as(k.shape[2] - q.shape[2], dtypes.int64)
        total = _both(b, total, additive(b, window_mask(b, q.shape[2], k.shape[2], offset, -1, 0), q.dtype, -np.inf))
    if attention_bias is not None:
        total = _both(b, total, attention_bias)
    return [merge_heads(b, attend(b, q, k, v, total, scale)), *present]
