"""BERT (Devlin et al., 2018): token ids and a mask in, hidden states out; norms after each block."""

from __future__ import annotations

import numpy as np
import onnx

from models.attention import feed_forward, self_attention
from models.graph_builder import Dim, GraphBuilder


def bert(
    *,
    batch: Dim = 1,
    sequence: Dim = 128,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocabulary: int = 30522,
    positions: int = 512,
    seed: int = 0,
) -> onnx.ModelProto:
    """BERT-base by default.

    Inputs ``input_ids`` int64 [batch, sequence] and ``attention_mask`` int64 [batch, sequence] (1 to attend);
    output ``hidden_states`` float32 [batch, sequence, width].
    """
    g = GraphBuilder("bert", seed=seed)
    ids = g.input("input_ids", np.int64, [batch, sequence])
    attend = g.input("attention_mask", np.int64, [batch, sequence])
    mask = _additive_mask(g, attend)
    with g.scope("embeddings"):
        x = _embed(g, ids, vocabulary, positions, width)
    for index in range(layers):
        with g.scope(f"layer{index}"):
            with g.scope("attention"):
                attended = self_attention(g, x, width, heads, mask)
            x = g.layer_norm("norm1", g.op("Add", x, attended), width)
            with g.scope("mlp"):
                fed = feed_forward(g, x, width)
            x = g.layer_norm("norm2", g.op("Add", x, fed), width)
    g.output("hidden_states", x, np.float32, [batch, sequence, width])
    return g.build()


def _additive_mask(g: GraphBuilder, attend: str) -> str:
    """0 where a key may be attended to and -10000 where not, shaped [batch, 1, 1, sequence]."""
    keep = g.op("Cast", g.op("Unsqueeze", attend, g.ints("mask_axes", 1, 2)), to=onnx.TensorProto.FLOAT)
    hide = g.op("Sub", g.constant("one", 1.0, np.float32), keep)
    return g.op("Mul", hide, g.constant("masked", -10000.0, np.float32))


def _embed(g: GraphBuilder, ids: str, vocabulary: int, positions: int, width: int) -> str:
    words = g.op("Gather", g.normal("words", (vocabulary, width), 0.02), ids)
    table = g.normal("positions", (positions, width), 0.02)
    length = g.op("Shape", ids, start=1, end=2)
    places = g.op("Slice", table, g.ints("start", 0), length, g.ints("axis", 0))
    segment = g.normal("segment", (width,), 0.02)
    return g.layer_norm("norm", g.op("Add", g.op("Add", words, segment), places), width)
