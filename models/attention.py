"""Multi-head attention written out in ONNX ops, as BERT and GPT-2 share it."""

from __future__ import annotations

from models.graph_builder import GraphBuilder


def self_attention(g: GraphBuilder, x: str, width: int, heads: int, mask: str) -> str:
    """Softmax(Q Kᵀ / sqrt(d) + mask) V, with the four projections.

    ``x`` is [batch, sequence, width]; ``mask`` is added to the scores and broadcasts to
    [batch, heads, sequence, sequence]. The zeros in the reshapes copy a dim, so nothing here fixes a size.
    """
    head = width // heads
    split = g.ints("split_heads", 0, 0, heads, head)
    queries, keys, values = (
        g.op("Reshape", g.linear(name, x, width, width), split) for name in ("query", "key", "value")
    )
    queries = g.op("Transpose", queries, perm=[0, 2, 1, 3])
    keys = g.op("Transpose", keys, perm=[0, 2, 3, 1])
    values = g.op("Transpose", values, perm=[0, 2, 1, 3])
    scale = g.constant("scale", head**-0.5, "float32")
    scores = g.op("Add", g.op("Mul", g.op("MatMul", queries, keys), scale), mask)
    context = g.op("MatMul", g.op("Softmax", scores, axis=-1), values)
    context = g.op("Transpose", context, perm=[0, 2, 1, 3])
    merged = g.op("Reshape", context, g.ints("merge_heads", 0, 0, width))
    return g.linear("output", merged, width, width)


def feed_forward(g: GraphBuilder, x: str, width: int, *, approximate: str = "none") -> str:
    """Two linear layers, four times as wide inside, with GELU between."""
    hidden = g.op("Gelu", g.linear("up", x, width, 4 * width), approximate=approximate)
    return g.linear("down", hidden, 4 * width, width)
