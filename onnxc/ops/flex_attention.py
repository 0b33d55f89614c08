"""Attention whose scores and probabilities the model changes with graphs of its own."""

from __future__ import annotations

import math

from onnxc.errors import ModelError, ShapeError
from onnxc.ir import dtypes
from onnxc.ir.graph import Graph, Value
from onnxc.ops.attention import share_heads
from onnxc.ops.common import float_of, static_dim
from onnxc.ops.control import lower
from onnxc.ops.registry import op
from onnxc.primitives.builder import Builder


def _changed(b: Builder, graph: Graph | None, x: Value, name: str) -> Value:
    """What a modifier makes of the scores: a tensor of the same type."""
    if graph is None:
        return x
    made = lower(b, graph, b, [x])
    if len(made) != 1 or made[0].dtype is not x.dtype or made[0].rank != x.rank:
        raise ModelError(f"{name} of FlexAttention makes {', '.join(str(v.type) for v in made)} of {x.t}")
    return made[0]


@op("FlexAttention", 1, domain="ai.onnx.preview")
def flex_attention(
    b: Builder, q: Value, k: Value, v: Value, *, prob_mod: Graph | None = None, scale: float | None = None,
    score_mod: Graph | None = None, softmax_precision: int | None = None,
) -> Value:  # fmt: skip
    """prob_mod(softmax(score_mod(q k' * scale))) v, for [batch, heads, sequence, size]."""
    if any(x.rank != 4 for x in (q, k, v)):
        raise ShapeError(f"FlexAttention of {q.t}, {k.t} and {v.t}: all have four axes")
    wide = dtypes.float64 if q.dtype is dtypes.float64 else dtypes.float32
    if softmax_precision is not None:
        wide = float_of(softmax_precision, "softmax_precision")
    size = "the size of a head of FlexAttention"
    factor = scale if scale is not None else 1 / math.sqrt(static_dim(q.shape[3], size) or 1)
    inner = dtypes.float64 if dtypes.float64 in (wide, q.dtype) else dtypes.float32
    heads, dtype = q.shape[1], q.dtype
    q, k, v = (b.cast(x, inner) for x in (q, k, v))
    scores = b.mul(b.matmul(q, b.swap(share_heads(b, k, heads), 2, 3)), factor)
    scores = _changed(b, score_mod, b.cast(scores, wide), "score_mod")
    p = _changed(b, prob_mod, b.softmax(scores, 3), "prob_mod")
    return b.cast(b.matmul(b.cast(p, inner), share_heads(b, v, heads)), dtype)
