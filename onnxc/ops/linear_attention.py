"""Attention without a softmax: a state of outer products that each token updates and reads."""

from __future__ import annotations

import math

from onnxc.errors import ModelError, ShapeError
from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from onnxc.ops.attention import share_heads
from onnxc.ops.common import static_dim
from onnxc.ops.registry import op
from onnxc.primitives.builder import Builder

_RULES = {"linear": (False, False), "gated": (True, False), "delta": (False, True), "gated_delta": (True, True)}


def _by_step(b: Builder, x: Value, heads: int) -> Value:
    """[batch, steps, heads * size] to [steps, batch, heads, size], in float32 at least."""
    batch, steps, width = x.shape
    if isinstance(width, int) and width % heads:
        raise ShapeError(f"LinearAttention of {x.t}: {heads} heads do not divide the last axis")
    x = b.cast(x, dtypes.float64 if x.dtype is dtypes.float64 else dtypes.float32)
    return b.transpose(b.reshape(x, (batch, steps, heads, width // heads)), (1, 0, 2, 3))


def _check(rule: str, decay: Value | None, beta: Value | None, queries: int, keys: int) -> tuple[bool, bool]:
    """Whether the state decays, and whether what it already holds is subtracted."""
    if rule not in _RULES:
        raise ModelError(f"update_rule is one of {', '.join(_RULES)}, not {rule!r}")
    if keys <= 0 or queries <= 0 or queries % keys:
        raise ModelError(f"{queries} heads of queries are no multiple of {keys} heads of keys")
    gated, corrected = _RULES[rule]
    for name, given, wanted in (("decay", decay is not None, gated), ("beta", beta is not None, corrected)):
        if given != wanted:
            raise ModelError(f"the update rule {rule} {'needs' if wanted else 'has no'} {name}")
    return gated, corrected


@op("LinearAttention", 27)
def linear_attention(
    b: Builder, query: Value, key: Value, value: Value, past_state: Value | None = None, decay: Value | None = None,
    beta: Value | None = None, *, chunk_size: int = 64, kv_num_heads: int, q_num_heads: int, scale: float = 0.0,
    update_rule: str = "gated_delta",
) -> list[Value]:  # fmt: skip
    """For each step, with the state S of a head, [d_k, d_v]:

        S = exp(decay) * S;  v = beta * (v - k S);  S = S + k' v;  y = scale * q S

    without the first for rules that are not gated, and without the second for those without delta.
    """
    gated, corrected = _check(update_rule, decay, beta, q_num_heads, kv_num_heads)
    q, (k, v) = _by_step(b, query, q_num_heads), (_by_step(b, x, kv_num_heads) for x in (key, value))
    steps, batch, _, width = q.shape
    depth = v.shape[3]
    factor = scale or 1 / math.sqrt(static_dim(width, "the size of a head of LinearAttention") or 1)
    scanned = [q, k, v]
    if decay is not None:  # [steps, batch, heads, 1 or d_k]
        scanned.append(b.exp(_by_step(b, decay, kv_num_heads)))
    if beta is not None:
        scanned.append(_by_step(b, beta, 1 if beta.shape[2] == 1 else kv_num_heads))
    if past_state is None:
        state = b.full((batch, kv_num_heads, width, depth), 0.0, q.dtype)
    else:
        state = b.cast(past_state, q.dtype)

    def step(inner: Builder, states: list[Value], xs: list[Value]) -> tuple[list[Value], list[Value]]:
        (s,), (q, k, v, *rest) = states, xs
        row = inner.reshape(k, (*k.shape[:2], 1, k.shape[2]))
        v = inner.reshape(v, (*v.shape[:2], 1, v.shape[2]))
        if gated:
            s = inner.mul(s, inner.reshape(rest[0], (*rest[0].shape, 1)))
        if corrected:
            v = inner.mul(inner.sub(v, inner.matmul(row, s)), inner.reshape(rest[-1], (*rest[-1].shape, 1)))
        s = inner.add(s, inner.mul(inner.swap(row, 2, 3), v))
        shared = share_heads(inner, s, q_num_heads)
        y = inner.matmul(inner.reshape(q, (*q.shape[:2], 1, q.shape[2])), shared)
        return [s], [inner.mul(inner.reshape(y, (*q.shape[:2], depth)), factor)]

    (last,), (y,) = b.scan([state], scanned, steps, step)
    y = b.reshape(b.swap(y, 0, 1), (batch, steps, q_num_heads * depth))
    return [b.cast(y, query.dtype), b.cast(last, query.dtype if past_state is None else past_state.dtype)]
