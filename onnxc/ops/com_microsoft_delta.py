"""onnxruntime's GatedDeltaNet: linear attention over tokens that are packed one request behind the other."""

from __future__ import annotations

import math
from typing import Literal

from onnxc.errors import ModelError, ShapeError, UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, floordiv, prod
from onnxc.ir.graph import Value
from onnxc.ops.activation import softplus
from onnxc.ops.com_microsoft import MS
from onnxc.ops.common import static_dim
from onnxc.ops.linear_attention import linear_attention
from onnxc.ops.registry import Flag, op
from onnxc.ops.resize import repeat_each
from onnxc.primitives.builder import Builder

LEAST_NORM = 1e-12  # added to squares


@op("GatedDeltaNet", 1, domain=MS)
def gated_delta_net(
    b: Builder, query: Value, key: Value | None = None, value: Value | None = None, cu_seqlens: Value | None = None,
    decay: Value | None = None, beta: Value | None = None, initial_state: Value | None = None,
    a_log: Value | None = None, dt_bias: Value | None = None, capture_count: Value | None = None,
    state_update_active: Value | None = None, *, beta_activation: Literal["none", "sigmoid"] = "none",
    chunk_size: int = 64, gate_activation: str = "none", gate_lower_bound: float = -5.0, qk_l2_norm: Flag = 0,
    scale: float = 0.0, state_update_capacity: int = 0, update_rule: str = "gated_delta",
) -> list[Value]:  # fmt: skip
    """LinearAttention of requests whose tokens lie one behind the other, from `cu_seqlens[i]` on, or all of one length.

    query and key [tokens, heads, d_k], value [tokens, heads of values, d_v], each head of queries for a run of those of
    values; or all three along the last axis of the query; or [batch, length, ...]. States [batch, heads, d_v, d_k] are
    float32.
    """
    if state_update_capacity or capture_count is not None:
        raise UnsupportedError("GatedDeltaNet with state updates (state_update_capacity) is not supported")
    if initial_state is None and cu_seqlens is None and query.rank == 3:
        raise ModelError("GatedDeltaNet needs an initial_state, or cu_seqlens, to know how many requests there are")
    lead = query.shape[: query.rank - (1 if key is None else 2)]
    q, k, v = _flat(b, query, key, value, initial_state, len(lead))
    heads, width, depth = v.shape[1], q.shape[2], v.shape[2]
    g, rate = (None if x is None else b.cast(_tokens(b, x, len(lead)), dtypes.float32) for x in (decay, beta))
    if qk_l2_norm:
        q, k = (_normalized(b, x) for x in (q, k))
    g = None if g is None else _gate(b, g, gate_activation, gate_lower_bound, a_log, dt_bias)
    rate = b.sigmoid(rate) if rate is not None and beta_activation == "sigmoid" else rate
    times = _multiple(heads, q.shape[1])
    q, k = (repeat_each(b, x, 1, times) for x in (q, k))
    state = None if initial_state is None else b.swap(initial_state, 2, 3)
    packing = _Packing(b, cu_seqlens, q.shape[0], lead[0] if len(lead) == 2 else None, state)
    q, v, k = packing.padded(q, True), packing.padded(v, True), packing.padded(k, False)
    g, rate = (None if x is None else packing.padded(x, False) for x in (g, rate))
    count = static_dim(heads, "the heads of GatedDeltaNet")
    y, last = linear_attention(
        b, q, k, v, state, g, rate, kv_num_heads=count, q_num_heads=count, update_rule=update_rule,
        scale=scale or 1 / math.sqrt(static_dim(width, "the size of a head of GatedDeltaNet")),
    )  # fmt: skip
    y = b.reshape(packing.packed(y), (*lead, heads, depth))
    return [b.cast(y, query.dtype), b.swap(last, 2, 3)]


def _tokens(b: Builder, x: Value, lead: int) -> Value:
    """[batch, length, ...] as [tokens, ...]."""
    return x if lead == 1 else b.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))


def _flat(
    b: Builder, query: Value, key: Value | None, value: Value | None, state: Value | None, lead: int
) -> tuple[Value, Value, Value]:
    """Queries, keys and values [tokens, heads, size] in float32."""
    if key is not None and value is not None:
        found = [_tokens(b, x, lead) for x in (query, key, value)]
    elif key is not None or value is not None or state is None:
        raise ModelError("GatedDeltaNet takes keys and values, or neither of them and an initial_state")
    else:
        _, heads, depth, width = state.shape
        x = _tokens(b, query, lead)
        both = floordiv(x.shape[1] - heads * depth, 2)
        shares = [(both, floordiv(both, width), width)] * 2 + [(heads * depth, heads, depth)]
        parts = b.split(x, 1, [size for size, *_ in shares])
        found = [b.reshape(p, (x.shape[0], n, d)) for p, (_, n, d) in zip(parts, shares, strict=True)]
    q, k, v = (b.cast(x, dtypes.float32) for x in found)
    return q, k, v


def _multiple(heads: Dim, fewer: Dim) -> int:
    n, m = (static_dim(d, "the number of heads of GatedDeltaNet") for d in (heads, fewer))
    if m < 1 or n % m:
        raise ShapeError(f"GatedDeltaNet: {m} heads of queries cannot serve {n} heads of values")
    return n // m


def _normalized(b: Builder, x: Value) -> Value:
    """Vectors of the length 1."""
    return b.div(x, b.sqrt(b.add(b.reduce("sum", b.mul(x, x), [x.rank - 1], True), LEAST_NORM)))


def _gate(b: Builder, g: Value, kind: str, least: float, a_log: Value | None, bias: Value | None) -> Value:
    """The logarithm of the decay [tokens, heads] or [tokens, heads, d_k]."""
    if kind == "none":
        return g
    if kind not in ("softplus", "qwen", "sigmoid", "kda") or a_log is None:
        raise ModelError(f"GatedDeltaNet has the gate_activation {kind!r}, and {'no' if a_log is None else 'an'} a_log")
    rate = b.exp(b.reshape(a_log, (g.shape[1], *(1,) * (g.rank - 2))))
    if bias is not None:
        each = (*g.shape[1:],) if bias.t.size != g.shape[1] else (g.shape[1], *(1,) * (g.rank - 2))
        g = b.add(g, b.reshape(bias, each))
    if kind in ("softplus", "qwen"):
        return b.neg(b.mul(rate, softplus(b, g)))
    return b.mul(b.sigmoid(b.mul(rate, g)), least)


class _Packing:
    """Where tokens lie: of requests of one length, or from the places in `starts` on."""

    def __init__(self, b: Builder, starts: Value | None, tokens: Dim, batch: Dim | None, state: Value | None) -> None:
        self.b, self.tokens, self.starts = b, tokens, None
        if starts is None:
            self.batch = batch if batch is not None else state.shape[0] if state is not None else 1
            self.length = floordiv(tokens, self.batch)
            return
        self.batch = starts.shape[0] - 1
        self.starts = b.cast(starts, dtypes.int64)
        self.first = b.slice(self.starts, 0, 0, self.batch)
        self.end = b.slice(self.starts, 0, 1, self.batch + 1)
        longest = b.reshape(b.reduce("max", b.sub(self.end, self.first), [0]), (1,))
        (self.length,) = b.extents(longest, "the longest request of GatedDeltaNet")

    def padded(self, x: Value, kept: bool) -> Value:
        """[tokens, heads, ...] as [batch, length, heads * ...]: 0 behind each request, or (`kept`) anything."""
        b, wide = self.b, (self.batch, self.length, prod(x.shape[1:]))
        if self.starts is None:
            return b.reshape(x, wide)
        at = b.add(b.reshape(self.first, (self.batch, 1)), b.iota(self.length))
        inside = b.lt(at, b.reshape(self.end, (self.batch, 1)))
        rows = b.reshape(b.gather(x, b.min(at, b.sub(b.size_as(self.tokens, dtypes.int64), 1)), 0), wide)
        return rows if kept else b.where(b.reshape(inside, (self.batch, self.length, 1)), rows, 0.0)

    def packed(self, y: Value) -> Value:
        """[batch, length, width] as [tokens, width]."""
        b, flat = self.b, self.b.reshape(y, (self.batch * self.length, y.shape[2]))
        if self.starts is None:
            return flat
        at = b.iota(self.tokens)
        passed = b.le(b.reshape(self.end, (self.batch, 1)), at)
        request = b.min(b.reduce("sum", b.cast(passed, dtypes.int64), [0]), b.size_as(self.batch - 1, dtypes.int64))
        offset = b.sub(at, b.gather(self.first, request, 0))
        return b.gather(flat, b.add(b.mul(request, b.size_as(self.length, dtypes.int64)), offset), 0)
