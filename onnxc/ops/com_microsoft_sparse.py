"""onnxruntime's SparseAttention: queries that see some blocks of keys."""

from __future__ import annotations

from onnxc.errors import ModelError
from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from onnxc.ops.attention import additive, guarded_softmax, merge_heads, rotary, scaled_scores, share_heads
from onnxc.ops.com_microsoft import MS
from onnxc.ops.com_microsoft_attention import cached, head_scale
from onnxc.ops.com_microsoft_gqa import heads_of, keys_before, last_keys
from onnxc.ops.common import static_dim
from onnxc.ops.registry import Flag, op
from onnxc.primitives.builder import Builder


@op("SparseAttention", 1, domain=MS)
def sparse_attention(
    b: Builder, query: Value, key: Value | None, value: Value | None, past_key: Value, past_value: Value,
    block_row_indices: Value, block_col_indices: Value, total_sequence_length: Value,
    key_total_sequence_lengths: Value, cos_cache: Value | None = None, sin_cache: Value | None = None, *,
    do_rotary: Flag = 0, kv_num_heads: int, num_heads: int, rotary_interleaved: Flag = 0, scale: float = 0.0,
    sparse_block_size: int,
) -> list[Value]:  # fmt: skip
    """Row i of the batch has `key_total_sequence_lengths[i]` keys, the new ones last; the cache has room for more.

    query [batch, sequence, heads * size], or with keys and values behind it; past_key [batch, kv heads, cache, size].
    Which blocks of keys a block of queries sees, stands in rows of columns: block_row_indices [layouts, blocks + 1],
    block_col_indices [layouts, most blocks]; head h has the layout h modulo their number.
    """
    layouts = static_dim(block_row_indices.shape[0], "the number of layouts of SparseAttention")
    if sparse_block_size < 1 or layouts < 1 or num_heads % layouts:
        raise ModelError(
            f"SparseAttention: {num_heads} heads cannot have {layouts} layouts of {sparse_block_size} keys"
        )
    q, k, v = heads_of(b, query, key, value, num_heads, kv_num_heads)
    new = q.shape[2]
    (total,) = b.extents(total_sequence_length, "the total_sequence_length of SparseAttention")
    last = b.sub(b.cast(key_total_sequence_lengths, dtypes.int64), 1)
    last = last_keys(b, last, new, total, total)
    before = keys_before(b, last, new, total)
    if do_rotary:
        if cos_cache is None or sin_cache is None:
            raise ModelError("SparseAttention with do_rotary needs cos_cache and sin_cache")
        at = b.add(b.reshape(before, (last.t.size, 1)), b.iota(new))
        width = static_dim(cos_cache.shape[1] * 2, "the width of cos_cache")
        q, k = (rotary(b, t, cos_cache, sin_cache, at, 0, width, bool(rotary_interleaved)) for t in (q, k))
    k, v = (cached(b, t, n, before, total, True) for t, n in ((past_key, k), (past_value, v)))
    keys = [b.slice(t, 2, 0, total) for t in (k, v)]
    blocks = _blocks(b, block_row_indices, block_col_indices)  # [layouts, rows, columns]
    place, column = b.add(before, b.reshape(b.iota(new), (new, 1))), b.iota(total)
    count = b.size_as(blocks.shape[1], dtypes.int64)
    row = b.clip(b.div(place, sparse_block_size), 0, b.sub(count, 1))  # [batch, 1, queries, 1]
    seen = b.gather(b.gather(blocks, b.div(column, sparse_block_size), 2), b.reshape(row, (row.t.size,)), 1)
    seen = b.transpose(b.reshape(seen, (layouts, row.shape[0], new, total)), (1, 0, 2, 3))
    seen = b.gather(seen, b.binary("mod", b.iota(num_heads), b.scalar(layouts, dtypes.int64)), 1)
    bias = additive(b, b.and_(seen, b.le(column, place)), q.dtype)
    scores = b.add(scaled_scores(b, q, share_heads(b, keys[0], num_heads), scale or head_scale(q)), bias)
    y = b.matmul(guarded_softmax(b, scores, bias), share_heads(b, keys[1], num_heads))
    return [merge_heads(b, y), k, v]


def _blocks(b: Builder, rows: Value, columns: Value) -> Value:
    """A mask [layouts, blocks, blocks] from the beginnings of rows [layouts, blocks + 1] and their columns."""
    layouts, count, entries = rows.shape[0], rows.shape[1] - 1, columns.shape[1]
    rows = b.cast(rows, dtypes.int64)
    first = b.reshape(b.slice(rows, 1, 0, count), (layouts, count, 1))
    end = b.reshape(b.slice(rows, 1, 1, count + 1), (layouts, count, 1))
    at = b.iota(entries)
    inside = b.cast(b.and_(b.le(first, at), b.lt(at, end)), dtypes.float32)
    hot = b.eq(b.reshape(b.cast(columns, dtypes.int64), (layouts, entries, 1)), b.iota(count))
    return b.lt(0.0, b.matmul(inside, b.cast(hot, dtypes.float32)))
