"""onnxruntime's contrib operators for attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import numpy as np

from onnxc.errors import ModelError, NeedsSizesError, ShapeError, UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, always_equal, maximum, never_equal
from onnxc.ir.graph import Value
from onnxc.ops.attention import (
    additive,
    check_batch,
    merge_heads,
    rotary,
    scaled_scores,
    share_heads,
    split_heads,
    window_mask,
)
from onnxc.ops.com_microsoft import MS
from onnxc.ops.common import TABLE_ELEMENTS, along, check_within, counted, from_start, per_last, static_dim
from onnxc.ops.control import scalar
from onnxc.ops.registry import Flag, op
from onnxc.primitives.builder import Builder


@op("RotaryEmbedding", 1, domain=MS)
def rotary_embedding(
    b: Builder, x: Value, position_ids: Value, cos: Value, sin: Value, *, interleaved: Flag = 0,
    is_packed_batching: Flag = 0, num_heads: int = 0, rotary_embedding_dim: int = 0, scale: float = 1.0,
) -> Value:  # fmt: skip
    """Positions [batch, sequence], or the first one alone."""
    if is_packed_batching:
        raise UnsupportedError("RotaryEmbedding of packed batches is not supported")
    batch, sequence = x.shape[0], x.shape[1] if x.rank == 3 else x.shape[2]
    width = rotary_embedding_dim or cos.shape[1] * 2
    if position_ids.rank == 1 or position_ids.t.size == 1:
        position_ids = b.expand(b.add(b.iota(sequence), b.reshape(position_ids, ())), (batch, sequence))
    hidden = x.shape[-1]
    heads = num_heads or (hidden // width if x.rank == 3 else x.shape[1])
    width = static_dim(width, "the rotated size of RotaryEmbedding")
    heads = static_dim(heads, "the number of heads of RotaryEmbedding")
    return rotary(b, x, cos, sin, position_ids, heads, width, bool(interleaved))


@op("MRotaryEmbedding", 1, domain=MS)
def m_rotary_embedding(
    b: Builder, x: Value, position_ids: Value, cos: Value, sin: Value, *, interleaved: Flag = 0,
    is_packed_batching: Flag = 0, mrope_layout: Flag = 0, mrope_section: list[int], num_heads: int = 0,
    rotary_embedding_dim: int = 0, scale: float = 1.0,
) -> Value:  # fmt: skip
    """Positions [3, batch, sequence] of time, height and width; each pair of elements turns by one of them."""
    if is_packed_batching:
        raise UnsupportedError("MRotaryEmbedding of packed batches is not supported")
    stream = _streams(mrope_section, bool(mrope_layout))
    if not always_equal(len(stream), static_dim(cos.shape[1], "the width of the caches of MRotaryEmbedding")):
        raise ShapeError(f"MRotaryEmbedding: mrope_section {mrope_section} does not fit the caches {cos.t}")
    if rotary_embedding_dim not in (0, 2 * len(stream)):
        raise ModelError(f"MRotaryEmbedding has rotary_embedding_dim {rotary_embedding_dim} and caches {cos.t}")
    turned = [b.gather(t, from_start(b, position_ids, t.shape[0]), 0) for t in (cos, sin)]  # [3, batch, seq, pairs]
    chosen = []
    for t in turned:
        parts = [b.reshape(p, p.shape[1:]) for p in b.split(t, 0, [1, 1, 1])]
        of = [b.constant(np.array([s == k for s in stream])) for k in (0, 1)]
        chosen.append(b.where(of[0], parts[0], b.where(of[1], parts[1], parts[2])))
    heads = num_heads or (x.shape[2] // (2 * len(stream)) if x.rank == 3 else x.shape[1])
    heads = static_dim(heads, "the number of heads of MRotaryEmbedding")
    return rotary(b, x, chosen[0], chosen[1], None, heads, 2 * len(stream), bool(interleaved))


def _streams(section: Sequence[int], interleaved: bool) -> list[int]:
    """Which of the three positions each pair of elements turns by: in chunks, or by turns while there are some."""
    if len(section) != 3 or min(section) < 0 or sum(section) > TABLE_ELEMENTS:
        raise ModelError(f"mrope_section {section} must be three numbers that are not negative")
    if not interleaved:
        return [k for k, count in enumerate(section) for _ in range(count)]
    stream = [0] * sum(section)
    for k in (1, 2):
        for at in range(k, min(section[k] * 3, len(stream)), 3):
            stream[at] = k
    return stream


@op("MultiHeadAttention", 1, domain=MS)
def multi_head_attention(
    b: Builder, q: Value, k: Value | None = None, v: Value | None = None, bias: Value | None = None,
    key_padding_mask: Value | None = None, attention_bias: Value | None = None, past_key: Value | None = None,
    past_value: Value | None = None, past_sequence_length: Value | None = None,
    cache_indirection: Value | None = None, *, mask_filter_value: float = -10000.0, num_heads: int,
    scale: float | None = None, unidirectional: Flag = 0,
) -> list[Value]:  # fmt: skip
    """q [batch, sequence, hidden]; k and v alike, or already in heads, or all three packed in q."""
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
    check_batch(qh, kh, vh)
    past: Dim | Value = 0
    present = None
    if past_sequence_length is not None and past_key is not None:
        kh, vh, attention_bias = _in_shared_cache(b, kh, vh, past_key, past_value, past_sequence_length, attention_bias)
        present, past = (kh, vh), b.cast(scalar(b, past_sequence_length), dtypes.int64)
        if cache_indirection is not None:
            kh, vh = (_by_beams(b, t, cache_indirection, past_sequence_length, q.shape[1]) for t in (kh, vh))
        if key_padding_mask is not None and key_padding_mask.rank > 1:
            key_padding_mask = to_width(b, key_padding_mask, kh.shape[2])
    elif past_key is not None and past_value is not None:
        past = past_key.shape[2]
        kh, vh = b.concat([past_key, kh], 2), b.concat([past_value, vh], 2)
    added = _added(b, qh, kh, key_padding_mask, mask_filter_value, past if unidirectional else None, attention_bias)
    y, scores = attend(b, qh, kh, vh, added, scale)
    return [merge_heads(b, y), *(present or (kh, vh)), scores]


def _by_beams(b: Builder, cache: Value, indirection: Value, count: Value, queries: Dim) -> Value:
    """A cache [batch * beams, heads, room, size] as each beam sees it: its first `count` rows are those of the beams
    that `indirection` [batch, beams, room] names. onnxruntime does so for one query at a time.
    """
    rows, room = cache.shape[0], cache.shape[2]
    batch, beams, _ = indirection.shape
    first = b.mul(b.reshape(b.iota(batch), (batch, 1, 1)), b.size_as(beams, dtypes.int64))
    named = b.reshape(b.add(b.cast(indirection, dtypes.int64), first), (rows, room))
    before = b.lt(b.iota(room), b.cast(scalar(b, count), dtypes.int64))
    held = b.and_(before, b.eq(b.size_as(queries, dtypes.int64), 1))
    index = b.where(b.reshape(held, (1, room)), named, b.reshape(b.iota(rows), (rows, 1)))
    at = b.expand(b.reshape(index, (rows, 1, room, 1)), cache.shape)
    return b.one("gather_elements", cache, at, axis=0)


def _in_shared_cache(
    b: Builder, k: Value, v: Value, past_k: Value | None, past_v: Value | None, count: Value, bias: Value | None
) -> tuple[Value, Value, Value]:
    """Caches that hold `count` keys and have room for the new ones, with these; and a bias for keys behind them."""
    if past_k is None or past_v is None:
        raise ModelError("past_sequence_length needs past_key and past_value")
    room = past_k.shape[2]
    before = b.reshape(counted(b, count, room - k.shape[2]), (1, 1, 1, 1))
    held = b.lt(b.iota(room), b.add(before, b.size_as(k.shape[2], dtypes.int64)))
    filled = additive(b, held, k.dtype)
    total = filled if bias is None else b.add(to_width(b, bias, room), filled)
    return cached(b, past_k, k, before, room, True), cached(b, past_v, v, before, room, True), total


def cached(b: Builder, past: Value | None, new: Value, before: Value, total: Dim, keep: bool) -> Value:
    """[batch, heads, cache, size] with new rows written behind the `before` first ones of each batch.

    What lies behind them stays with `keep`, else it is zero. The cache has at least `total` rows.
    """
    batch, heads, count, size = new.shape
    if past is None:
        return b.pad(new, (0, 0, 0, 0), (0, 0, total - count, 0)) if not always_equal(total, count) else new
    length = maximum(past.shape[2], total)
    at = b.reshape(b.iota(length), (length, 1))
    if always_equal(count, 1):
        row = new
    else:
        source = b.clip(b.sub(at, before), 0, b.sub(b.size_as(count, dtypes.int64), 1))
        row = b.one("gather_elements", new, b.expand(source, (batch, heads, length, size)), axis=2)
    old = b.pad(past, (0, 0, 0, 0), (0, 0, length - past.shape[2], 0))
    end = b.add(before, b.size_as(count, dtypes.int64))
    return b.where(b.lt(at, before), old, b.where(b.lt(at, end), row, old if keep else 0.0))


def to_width(b: Builder, bias: Value, keys: Dim) -> Value:
    """A bias [..., keys] or a mask for a cache that may be longer."""
    gap = keys - bias.shape[-1]
    return bias if always_equal(gap, 0) else b.pad(bias, (0,) * bias.rank, (*(0,) * (bias.rank - 1), gap), 0)


def attend(
    b: Builder, q: Value, k: Value, v: Value, added: Sequence[Value], scale: float | None
) -> tuple[Value, Value]:  # fmt: skip
    """softmax(q k' * scale + added) v, for [batch, heads, sequence, size]; and what the softmax is taken of."""
    scores = scaled_scores(b, q, share_heads(b, k, q.shape[1]), scale or head_scale(q))
    for mask in added:
        check_within(mask, scores.shape)
    scores = reduce(b.add, added, scores)
    return b.matmul(b.softmax(scores, 3), share_heads(b, v, q.shape[1])), scores


def head_scale(q: Value) -> float:
    """1 / sqrt(size), for [batch, heads, sequence, size]."""
    return 1 / math.sqrt(static_dim(q.shape[3], "the size of a head") or 1)


def _added(
    b: Builder, q: Value, k: Value, mask: Value | None, filtered: float, past: Dim | Value | None, bias: Value | None
) -> list[Value]:
    """What is added to the scores: a bias; for padded keys, and for keys to come (where `past`, their first, is given).

    In this order, as onnxruntime does it: where all keys of a query are padded, scores less 10000 keep three digits.
    """
    total = _padding_mask(b, q, k, mask, filtered)
    if past is not None:
        offset = past if isinstance(past, Value) else b.size_as(past, dtypes.int64)
        causal = window_mask(b, q.shape[2], k.shape[2], offset, -1, 0)
        if not isinstance(past, Value) and not always_equal(
            q.shape[2] + past, k.shape[2]
        ):  # the last query of a cross attention sees all, as there
            last = b.eq(b.iota(q.shape[2]), b.size_as(q.shape[2] - 1, dtypes.int64))
            causal = b.or_(causal, along(b, last, 2, 0))
        hidden = additive(b, causal, q.dtype, -np.inf)
        total = hidden if total is None else b.add(total, hidden)
    return [x for x in (bias, total) if x is not None]


def _with_biases(b: Builder, q: Value, k: Value, v: Value, bias: Value) -> tuple[Value, Value, Value]:
    """One bias [q hidden + k hidden + v hidden]; keys that are already in heads take no bias."""
    hidden = q.shape[-1]
    if bias.rank != 1:
        raise ShapeError(f"the bias {bias.t} of MultiHeadAttention is no vector")
    sizes = [hidden, hidden, bias.shape[0] - 2 * hidden]
    parts = b.split(bias, 0, sizes)
    what = "the bias of MultiHeadAttention"
    added = [b.add(t, per_last(b, p, t, what)) if t.rank == 3 else t for t, p in zip((q, k, v), parts, strict=True)]
    return added[0], added[1], added[2]


def _padding_mask(b: Builder, q: Value, k: Value, mask: Value | None, filtered: float) -> Value | None:
    """The mask of padded keys as a bias: ends of keys, as `_between` reads them, or [batch, (queries,) keys]."""
    if mask is None:
        return None
    keys, batch = k.shape[2], q.shape[0]
    if mask.rank == 1:
        allowed = _between(b, mask, keys, batch)
    elif mask.rank <= 3:
        shape = (batch, 1, 1, keys) if mask.rank == 2 else (batch, 1, *mask.shape[1:])
        allowed = b.reshape(b.lt(b.scalar(0, mask.dtype), mask), shape)
    else:
        raise UnsupportedError(f"a mask {mask.t} of keys is not supported")
    return additive(b, allowed, q.dtype, filtered)


def _between(b: Builder, mask: Value, keys: Dim, batch: Dim) -> Value:
    """Keys before the ends, [batch], and from the starts on where the mask has them too, [2 * batch].

    What stands behind the ends in [3 * batch + 2], where sequences begin without their padding, adds nothing to them.
    """
    at, (size,) = b.iota(keys), mask.shape
    lengths = (batch, 2 * batch, 3 * batch + 2)
    if all(never_equal(size, n) for n in lengths):
        raise UnsupportedError(
            f"a mask {mask.t} of keys is not supported: it has neither {batch} elements, nor twice as many, nor "
            f"{lengths[2]}"
        )
    if not any(always_equal(size, n) for n in lengths):
        raise NeedsSizesError(f"what a mask {mask.t} of keys holds depends on the size of a batch", size, batch)
    limits = b.cast(mask, dtypes.int64)
    parts = b.split(limits, 0, [batch, batch] if always_equal(size, 2 * batch) else [batch])
    ends, *starts = (b.reshape(t, (batch, 1, 1, 1)) for t in parts)
    inside = b.lt(at, ends)
    return b.and_(b.le(starts[0], at), inside) if starts else inside


@op("Attention", 1, domain=MS)
def attention(
    b: Builder, x: Value, weights: Value, bias: Value | None = None, mask: Value | None = None,
    past: Value | None = None, attention_bias: Value | None = None, past_sequence_length: Value | None = None,
    *, do_rotary: Flag = 0, mask_filter_value: float = -10000.0, num_heads: int,
    past_present_share_buffer: Flag = 0, qkv_hidden_sizes: list[int] | None = None,
    rotary_embedding_dim: int = 0, scale: float | None = None, unidirectional: Flag = 0,
) -> list[Value]:  # fmt: skip
    """Self attention with its projection: x [batch, sequence, input], weights [input, q + k + v hidden]."""
    if do_rotary or past_present_share_buffer or past_sequence_length is not None:
        raise UnsupportedError("Attention with rotary embedding or a shared cache is not supported")
    projected = b.matmul(x, b.reshape(weights, (1, *weights.shape)))
    if bias is not None:
        projected = b.add(projected, per_last(b, bias, projected, "the bias of Attention"))
    sizes = qkv_hidden_sizes or [weights.shape[1] // 3] * 3
    return projected_attention(
        b, projected, sizes, num_heads, mask, past, attention_bias, mask_filter_value, scale, bool(unidirectional)
    )


def projected_attention(
    b: Builder, projected: Value, sizes: Sequence[Dim], heads: int, mask: Value | None, past: Value | None,
    bias: Value | None, filtered: float, scale: float | None, causal: bool,
) -> list[Value]:  # fmt: skip
    """Attention of what a projection gave, [batch, sequence, q + k + v hidden]: the output, and the new cache."""
    if projected.rank != 3 or never_equal(sum(sizes, start=0), projected.shape[2]):
        raise ShapeError(f"queries, keys and values of the sizes {list(sizes)} are not what {projected.t} holds")
    q, k, v = (split_heads(b, t, heads) for t in b.split(projected, 2, sizes))
    before: Dim = 0
    if past is not None:
        before = past.shape[3]
        old_k, old_v = (b.reshape(t, t.shape[1:]) for t in b.split(past, 0, [1, 1]))
        k, v = b.concat([old_k, k], 2), b.concat([old_v, v], 2)
    present = []
    if k.shape == v.shape:
        present = [b.concat([b.reshape(t, (1, *t.shape)) for t in (k, v)], 0)]
    added = _added(b, q, k, mask, filtered, before if causal else None, bias)
    y, _ = attend(b, q, k, v, added, scale)
    return [merge_heads(b, y), *present]


@op("DecoderMaskedMultiHeadAttention", 1, domain=MS)
def decoder_masked_multi_head_attention(
    b: Builder, q: Value, k: Value | None = None, v: Value | None = None, mask: Value | None = None,
    attention_bias: Value | None = None, past_key: Value | None = None, past_value: Value | None = None,
    past_sequence_length: Value | None = None, beam_width: Value | None = None,
    cache_indirection: Value | None = None, bias: Value | None = None, *, mask_filter_value: float = -10000.0,
    num_heads: int, output_qk: Flag = 0, past_present_share_buffer: Flag = 0, scale: float | None = None,
) -> list[Value]:  # fmt: skip
    """MultiHeadAttention of one new query, [batch, 1, hidden], alone or with its key and value behind it."""
    if k is None and v is None:
        q, k, v = b.split(q, 2, [q.shape[2] // 3] * 3)
    if k is not None and k.rank == 4:
        past_key = past_value = past_sequence_length = None
    return multi_head_attention(
        b, q, k, v, bias, mask, attention_bias, past_key, past_value,
        past_sequence_length if past_present_share_buffer else None, cache_indirection,
        mask_filter_value=mask_filter_value, num_heads=num_heads, scale=scale,
    )  # fmt: skip
