"""onnxruntime's GroupQueryAttention: queries that share keys, over a cache that may be longer than what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from onnxc.errors import ModelError, UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, always_equal, maximum
from onnxc.ir.graph import Value
from onnxc.ops.attention import additive, guarded_softmax, merge_heads, rotary, scaled_scores, share_heads, split_heads
from onnxc.ops.com_microsoft import MS
from onnxc.ops.com_microsoft_attention import cached, head_scale, to_width
from onnxc.ops.common import counted, static_dim
from onnxc.ops.normalization import rms_norm
from onnxc.ops.registry import Flag, op
from onnxc.primitives.builder import Builder


@op("GroupQueryAttention", 1, domain=MS)
def group_query_attention(
    b: Builder, query: Value, key: Value | None, value: Value | None, past_key: Value | None,
    past_value: Value | None, seqlens_k: Value, total_sequence_length: Value, cos_cache: Value | None = None,
    sin_cache: Value | None = None, position_ids: Value | None = None, attention_bias: Value | None = None,
    head_sink: Value | None = None, k_scale: Value | None = None, v_scale: Value | None = None,
    q_norm_weight: Value | None = None, k_norm_weight: Value | None = None, *, causal: Flag = 1, do_rotary: Flag = 0,
    k_norm_epsilon: float | None = None, k_quant_type: str = "NONE", kv_cache_bit_width: int = 0, kv_num_heads: int,
    local_window_size: int = -1, num_heads: int, q_norm_epsilon: float | None = None, qk_norm_epsilon: float = 1e-6,
    qk_output: Literal[0, 1, 2] = 0, rotary_interleaved: Flag = 0,
    scale: float = 0.0, sliding_window_cache: Flag = 0, smooth_softmax: int = -1, softcap: float = 0.0,
    v_quant_type: str = "NONE",
) -> list[Value]:  # fmt: skip
    """Row i of the batch has `seqlens_k[i] + 1` keys, the new ones last; those before them lie in the cache.

    query [batch, sequence, heads * size], or with keys and values behind it; past_key [batch, kv heads, cache, size].
    Outputs: y, the cache with the new keys and values, and the scores before (1) or after (2) the softmax.
    """
    _check(
        quantized=(k_quant_type, v_quant_type) != ("NONE", "NONE") or k_scale is not None or v_scale is not None,
        sliding=bool(sliding_window_cache), window=local_window_size, causal=bool(causal),
    )  # fmt: skip
    q, k, v = heads_of(b, query, key, value, num_heads, kv_num_heads)
    if q_norm_weight is not None and k_norm_weight is not None:
        q = _normalized(b, q, q_norm_weight, qk_norm_epsilon if q_norm_epsilon is None else q_norm_epsilon)
        k = _normalized(b, k, k_norm_weight, qk_norm_epsilon if k_norm_epsilon is None else k_norm_epsilon)
    new = q.shape[2]
    (total,) = b.extents(total_sequence_length, "the total_sequence_length of GroupQueryAttention")
    seqlens_k = last_keys(b, seqlens_k, new, total, total if past_key is None else maximum(past_key.shape[2], total))
    before = keys_before(b, seqlens_k, new, total)
    if do_rotary:
        at = _positions(b, position_ids, seqlens_k, before, new, total)
        q, k = _rotated(b, (q, k), cos_cache, sin_cache, at, bool(rotary_interleaved))
    k, v = (cached(b, t, n, before, total, False) for t, n in ((past_key, k), (past_value, v)))
    scores = scaled_scores(b, q, share_heads(b, k, num_heads), scale or head_scale(q))
    if softcap > 0:
        scores = b.mul(b.tanh(b.div(scores, softcap)), softcap)
    if attention_bias is not None:
        scores = b.add(scores, to_width(b, attention_bias, k.shape[2]))
    # onnxruntime has two kernels, which differ in what queries of padding see through a window
    tiled = q.dtype is dtypes.float32 and softcap <= 0 and smooth_softmax != 1 and head_sink is None and not qk_output
    allowed = _allowed(b, seqlens_k, before, new, k.shape[2], bool(causal), local_window_size, not tiled)
    bias = additive(b, allowed, q.dtype)
    masked = b.add(scores, bias)
    if head_sink is not None or smooth_softmax == 1:
        sink = b.scalar(0.0, q.dtype) if head_sink is None else b.reshape(head_sink, (1, num_heads, 1, 1))
        p = _with_sink(b, masked, sink)
    else:
        p = guarded_softmax(b, masked, bias if local_window_size > 0 else None)
    y = merge_heads(b, b.matmul(p, share_heads(b, v, num_heads)))
    shown = p if qk_output == 2 else b.where(allowed, scores, 0.0)
    return [y, k, v, b.slice(shown, 3, 0, total)]


def _check(*, quantized: bool, sliding: bool, window: int, causal: bool) -> None:
    """Raises UnsupportedError, or ModelError, for attributes that are not supported, or not allowed together."""
    if quantized:
        raise UnsupportedError("GroupQueryAttention with a quantized cache is not supported")
    if sliding:
        raise UnsupportedError("GroupQueryAttention with sliding_window_cache is not supported")
    if window > 0 and not causal:
        raise ModelError("GroupQueryAttention with causal=0 takes no local_window_size")


def _rotated(
    b: Builder, heads: Sequence[Value], cos: Value | None, sin: Value | None, at: Value, interleaved: bool
) -> list[Value]:
    """Queries and keys, rotated by their positions."""
    if cos is None or sin is None:
        raise ModelError("GroupQueryAttention with do_rotary needs cos_cache and sin_cache")
    width = static_dim(cos.shape[1] * 2, "the width of cos_cache")
    return [rotary(b, t, cos, sin, at, 0, width, interleaved) for t in heads]


def heads_of(
    b: Builder, query: Value, key: Value | None, value: Value | None, heads: int, kv_heads: int
) -> tuple[Value, Value, Value]:
    """Queries, keys and values as [batch, heads, sequence, size]."""
    if min(heads, kv_heads) < 1 or heads % kv_heads:
        raise ModelError(f"GroupQueryAttention: {kv_heads} heads of keys cannot serve {heads} heads of queries")
    if key is not None and value is not None:
        return split_heads(b, query, heads), split_heads(b, key, kv_heads), split_heads(b, value, kv_heads)
    size = query.shape[2] // (heads + 2 * kv_heads)
    q, k, v = b.split(query, 2, [heads * size, kv_heads * size, kv_heads * size])
    return split_heads(b, q, heads), split_heads(b, k, kv_heads), split_heads(b, v, kv_heads)


def _normalized(b: Builder, x: Value, weight: Value, epsilon: float) -> Value:
    return b.mul(rms_norm(b, x, [3], epsilon, dtypes.float32)[0], weight)


def last_keys(b: Builder, lengths: Value, new: Dim, total: Dim, room: Dim) -> Value:
    """The place of each row's last key: one without room for it, or before which the new keys do not fit (a prompt may
    be shorter than the rows), is an error of the run. So is any where the total has no room for the new keys.
    """
    sizes = [b.size_as(n, dtypes.int64) for n in (new, total, room)]
    least = b.where(b.eq(sizes[0], sizes[1]), 0, b.sub(sizes[0], 1))
    return counted(b, lengths, room - 1, b.where(b.lt(sizes[1], b.max(sizes[0], 1)), sizes[2], least))


def keys_before(b: Builder, seqlens_k: Value, new: Dim, total: Dim) -> Value:
    """How many keys of each row come before the new ones, [batch, 1, 1, 1]: none where all keys are new."""
    lengths = b.reshape(seqlens_k, (seqlens_k.t.size, 1, 1, 1))
    if always_equal(new, total):
        return b.mul(lengths, 0)
    count = b.sub(b.add(lengths, 1), b.size_as(new, dtypes.int64))
    prompt = b.eq(b.size_as(new, dtypes.int64), b.size_as(total, dtypes.int64))
    return b.where(prompt, 0, count)


def _positions(b: Builder, given: Value | None, seqlens_k: Value, before: Value, new: Dim, total: Dim) -> Value:
    """Positions [batch, sequence]: counted from the keys before, or given; then onnxruntime takes the first of a
    prompt, and counts on.
    """
    if given is None:
        return b.add(b.reshape(before, (seqlens_k.t.size, 1)), b.iota(new))
    first = b.reshape(b.slice(b.reshape(given, (given.t.size,)), 0, 0, 1), (1, 1))
    counted = b.add(b.expand(first, given.shape), b.iota(new))
    if always_equal(new, total):
        return counted
    return b.where(b.eq(b.size_as(new, dtypes.int64), b.size_as(total, dtypes.int64)), counted, given)


def _allowed(
    b: Builder, seqlens_k: Value, before: Value, new: Dim, keys: Dim, causal: bool, window: int, clamped: bool
) -> Value:
    """Which keys each query sees, [batch, 1, queries, keys]: with a window, itself and those before in it.

    No query sees padding behind a prompt. A query of padding has a window like others, which may be empty, or, with
    `clamped`, that of the last token.
    """
    at, last = b.iota(keys), b.reshape(seqlens_k, (seqlens_k.t.size, 1, 1, 1))
    if not causal:
        return b.le(at, last)
    query = b.add(before, b.reshape(b.iota(new), (new, 1)))
    latest = b.min(query, last)
    allowed = b.le(at, latest)
    return b.and_(allowed, b.lt(b.sub(latest if clamped else query, window), at)) if window > 0 else allowed


def _with_sink(b: Builder, scores: Value, sink: Value) -> Value:
    """Softmax over the last axis with one more score, `sink`, that counts in the sum alone."""
    top = b.detach(b.max(b.reduce("max", scores, [3], True), sink))
    e = b.exp(b.sub(scores, top))
    return b.div(e, b.add(b.reduce("sum", e, [3], True), b.exp(b.sub(sink, top))))
