"""Small decoders, as onnxruntime's operators that generate text have them in their attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import helper, numpy_helper

HEADS, SIZE = 2, 4
WIDTH = HEADS * SIZE
CACHE = f"{HEADS}, past, {SIZE}"
IMPORTS = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>'


def subgraph(text: str, weights: Mapping[str, np.ndarray]) -> onnx.GraphProto:
    """A graph in onnx's text format, with these initializers."""
    graph = onnx.parser.parse_model(f"{IMPORTS} {text}").graph
    graph.initializer.extend(numpy_helper.from_array(np.ascontiguousarray(v), k) for k, v in weights.items())
    return graph


def gpt(seed: int, words: int, layers: int) -> onnx.GraphProto:
    """Embeddings of words and positions, layers of onnxruntime's Attention, and logits."""
    rng = np.random.default_rng(seed)
    shapes = {"words": (words, WIDTH), "places": (32, WIDTH), "head": (WIDTH, words)}
    shapes |= {f"w{k}": (WIDTH, 3 * WIDTH) for k in range(layers)} | {f"b{k}": (3 * WIDTH,) for k in range(layers)}
    weights = {k: (0.6 * rng.standard_normal(s)).astype(np.float32) for k, s in shapes.items()}
    body = "\n".join(
        f"""a{k}, present_{k} = com.microsoft.Attention<num_heads = {HEADS}, unidirectional = 1>
            (x{k}, w{k}, b{k}, attention_mask, past_{k})
        x{k + 1} = Add(x{k}, a{k})"""
        for k in range(layers)
    )
    past, present = (", ".join(f"float[2, batch, {CACHE}] {n}_{k}" for k in range(layers)) for n in ("past", "present"))
    text = f"""
    decoder (int32[batch, n] input_ids, int32[batch, n] position_ids, int32[batch, total] attention_mask,
             {past})
         => (float[batch, n, {words}] logits, {present}) {{
        word = Gather(words, input_ids)
        place = Gather(places, position_ids)
        x0 = Add(word, place)
        {body}
        logits = MatMul(x{layers}, head)
    }}"""
    return subgraph(text, weights)


def light(seed: int, words: int) -> onnx.GraphProto:
    """A decoder that is quick to compile: in the place of attention, the sum of what the mask lets it see."""
    rng = np.random.default_rng(seed)
    shapes = {"words": (words, HEADS, SIZE), "places": (32, HEADS, SIZE), "head": (words, HEADS, SIZE)}
    weights = {k: (0.6 * rng.standard_normal(s)).astype(np.float32) for k, s in shapes.items()}
    axes = {"first": [0], "second": [1], "third": [2], "around": [0, 2, 4], "last": [3, 4]}
    weights |= {k: np.array(v, np.int64) for k, v in axes.items()}
    text = f"""
    decoder (int32[batch, n] input_ids, int32[batch, n] position_ids, int32[batch, total] attention_mask,
             float[2, batch, {CACHE}] past_0)
         => (float[batch, n, {words}] logits, float[2, batch, {CACHE}] present_0) {{
        word = Gather(words, input_ids)
        place = Gather(places, position_ids)
        x = Mul(word, place)
        rows = Unsqueeze(x, first)
        keys = Transpose<perm = [0, 1, 3, 2, 4]>(rows)
        values = Sin(keys)
        new = Concat<axis = 0>(keys, values)
        present_0 = Concat<axis = 3>(past_0, new)
        ones = Cast<to = 1>(attention_mask)
        seen = Unsqueeze(ones, around)
        kept = Mul(present_0, seen)
        pairs = ReduceSum<keepdims = 0>(kept, first)
        sums = ReduceSum<keepdims = 0>(pairs, third)
        row = Unsqueeze(sums, second)
        y = Add(word, row)
        each = Unsqueeze(y, third)
        products = Mul(each, head)
        logits = ReduceSum<keepdims = 0>(products, last)
    }}"""
    return subgraph(text, weights)


def _heads(x: str, weight: str, out: str) -> str:
    return f"""
        {out}_flat = Mul({x}, {weight})
        {out}_split = Reshape({out}_flat, split)
        {out} = Transpose<perm = [0, 2, 1, 3]>({out}_split)"""


def _attention(q: str, k: str, v: str, out: str, mask: str = "") -> str:
    """In its place a sum of products, which is quick to compile."""
    return f"""
        {out}_shares = Mul({q}, {k})
        {out}_products = Mul({out}_shares, {v})
        {out}_seen = {f"Mul({out}_products, {mask})" if mask else f"Identity({out}_products)"}
        {out}_heads = ReduceSum({out}_seen, tokens)
        {out}_rows = Transpose<perm = [0, 2, 1, 3]>({out}_heads)
        {out} = Reshape({out}_rows, merged)"""


def _decoded(cached: str, crossed: str) -> str:
    """From the last word `last` to logits; `cached` makes the caches of its own, of `x`."""
    return f"""
        x = Gather(words, last) {cached} {_heads("x", "wq", "q")}
        {_attention("q", "present_key_self_0", "present_value_self_0", "own")}
        y = Add(x, own) {_heads("y", "wc", "c")}
        {_attention("c", f"{crossed}_key_cross_0", f"{crossed}_value_cross_0", "other", "seen")}
        z = Add(y, other)
        each = Unsqueeze(z, tokens)
        weighted = Mul(each, head)
        logits = ReduceSum<keepdims = 0>(weighted, final)"""


def t5(
    seed: int, words: int, first: bool, hidden: bool, whole: bool, ids: bool = False, sound: bool = False
) -> tuple[onnx.GraphProto, onnx.GraphProto]:
    """An encoder and a decoder of one layer.

    Args:
        first: the encoder also takes the first words.
        hidden: the decoder takes hidden states.
        whole: it takes all words so far.
        ids: it takes the words of the encoder.
        sound: the encoder takes numbers [batch, WIDTH, length] in the place of words, and there is no mask.
    """
    rng = np.random.default_rng(seed)
    shapes = {"words": (words, WIDTH), "head": (words, WIDTH)} | dict.fromkeys(
        ("wq", "wk", "wv", "wc", "wck", "wcv"), (WIDTH,)
    )
    weights = {k: (0.7 * rng.standard_normal(s)).astype(np.float32) for k, s in shapes.items()}
    integers = {"split": [0, -1, HEADS, SIZE], "merged": [0, -1, WIDTH], "axes": [1, 3], "one": [1], "end": [1 << 40]}
    integers |= {"before": [-1], "tokens": [2], "final": [3]}
    weights |= {k: np.array(v, np.int64) for k, v in integers.items()}
    mask = """
        ones = Cast<to = 1>(encoder_attention_mask)
        seen = Unsqueeze(ones, axes)"""
    heard = "int32[batch, length] encoder_attention_mask"
    if sound:
        mask, heard = "seen = Constant<value = float[1] {1.0}>()", ""
    own, other = (
        (f"float[batch, {HEADS}, {n}, {SIZE}]", f"key_{kind}_0", f"value_{kind}_0")
        for kind, n in (("self", "past"), ("cross", "length"))
    )

    def caches(prefix: str, names: Sequence[str]) -> str:
        t, *rest = names
        return ", ".join(f"{t} {prefix}_{name}" for name in rest)

    encoded = _heads("states", "wck", "present_key_cross_0") + _heads("states", "wcv", "present_value_cross_0")
    head = f"int32[batch, length] encoder_input_ids, {heard}"
    states = "Gather(words, encoder_input_ids)"
    if sound:
        head = f"float[batch, {WIDTH}, length] encoder_input_ids"
        states = "Transpose<perm = [0, 2, 1]>(encoder_input_ids)"
    if first:
        started = _heads("x", "wk", "present_key_self_0") + _heads("x", "wv", "present_value_self_0")
        text = f"""
        encoder ({head}, int32[batch, first] decoder_input_ids)
            => (float[batch, first, {words}] logits, float[batch, length, {WIDTH}] encoder_hidden_states,
                {caches("present", own)}, {caches("present", other)}) {{
            states = {states} {encoded} {mask}
            encoder_hidden_states = Identity(states)
            last = Identity(decoder_input_ids) {_decoded(started, "present")}
        }}"""
    else:
        text = f"encoder ({head}) => ({caches('present', other)}) {{ states = {states} {encoded} }}"
    memory = ["int32[batch, length] encoder_input_ids"] if ids else []
    memory += [heard] if heard else []
    memory += [f"float[batch, length, {WIDTH}] encoder_hidden_states"] if hidden else []
    longer = "".join(
        _heads("x", f"w{k[0]}", f"new_{k}") + f"\n present_{k}_self_0 = Concat<axis = 2>(past_{k}_self_0, new_{k})"
        for k in ("key", "value")
    )
    decoder = f"""
    decoder (int32[batch, {"n" if whole else 1}] input_ids, {", ".join([*memory, caches("past", own)])},
             {caches("past", other)})
        => (float[batch, 1, {words}] logits, {caches("present", own)}) {{ {mask}
        last = {"Slice(input_ids, before, end, one)" if whole else "Identity(input_ids)"}
        {_decoded(longer, "past")}
    }}"""
    return subgraph(text, weights), subgraph(decoder, weights)


def model(
    op: str, given: Sequence[str], constants: Mapping[str, Any], attrs: Mapping[str, Any], outputs: Mapping[str, int]
) -> onnx.ModelProto:
    """One node over the input `ids` [batch, length] or `sound`; of the other inputs `given`, constants are known."""
    node = helper.make_node(op, list(given), list(outputs), domain="com.microsoft", **attrs)
    kinds = {"ids": (6, ["batch", "length"]), "sound": (1, ["batch", WIDTH, "length"]), "max": (6, [1])}
    kinds["start"] = (6, ["batch", "first"])
    inputs = [helper.make_tensor_value_info(k, *v) for k, v in kinds.items() if k in given and k not in constants]
    graph = helper.make_graph(
        [node], "g", inputs, [helper.make_tensor_value_info(k, t, None) for k, t in outputs.items()],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)
