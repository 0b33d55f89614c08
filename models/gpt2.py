"""GPT-2 (Radford et al., 2019): token ids in, next-token logits out. Norms before each block, causal mask."""

from __future__ import annotations

import numpy as np
import onnx

from models.attention import feed_forward, self_attention
from models.graph_builder import Dim, GraphBuilder


def gpt2(
    *,
    batch: Dim = 1,
    sequence: Dim = 128,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocabulary: int = 50257,
    positions: int = 1024,
    seed: int = 0,
) -> onnx.ModelProto:
    """GPT-2 small by default, prefill (no cache).

    Input ``input_ids`` int64 [batch, sequence]; output ``logits`` float32 [batch, sequence, vocabulary].
    The embedding is tied: the table that embeds the tokens also scores them.
    """
    g = GraphBuilder("gpt2", seed=seed)
    ids = g.input("input_ids", np.int64, [batch, sequence])
    length = g.op("Shape", ids, start=1, end=2)
    table = g.normal("tokens", (vocabulary, width), 0.02)
    places = _first(g, g.normal("positions", (positions, width), 0.02), length)
    x = g.op("Add", g.op("Gather", table, ids), places)
    mask = _causal_mask(g, positions, length)
    for index in range(layers):
        with g.scope(f"layer{index}"):
            normed = g.layer_norm("norm1", x, width)
            with g.scope("attention"):
                x = g.op("Add", x, self_attention(g, normed, width, heads, mask))
            normed = g.layer_norm("norm2", x, width)
            with g.scope("mlp"):
                x = g.op("Add", x, feed_forward(g, normed, width, approximate="tanh"))
    x = g.layer_norm("final_norm", x, width)
    logits = g.op("MatMul", x, g.op("Transpose", table, perm=[1, 0]))
    g.output("logits", logits, np.float32, [batch, sequence, vocabulary])
    return g.build()


def _first(g: GraphBuilder, x: str, count: str) -> str:
    """The first ``count`` rows of ``x``."""
    return g.op("Slice", x, g.ints("start", 0), count, g.ints("axis", 0))


def _causal_mask(g: GraphBuilder, positions: int, length: str) -> str:
    """[length, length]: 0 where the key is not later than the query, a very negative number where it is."""
    places = _first(g, g.constant("places", np.arange(positions), np.int64), length)
    keys = g.op("Unsqueeze", places, g.ints("row_axis", 0))
    queries = g.op("Unsqueeze", places, g.ints("column_axis", 1))
    later = g.op("Greater", keys, queries)
    hidden = g.constant("hidden", np.finfo(np.float32).min, np.float32)
    return g.op("Where", later, hidden, g.constant("seen", 0.0, np.float32))
