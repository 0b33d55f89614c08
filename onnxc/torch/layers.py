"""What PyTorch keeps whole, taken apart into ops that are compiled: layers that its eager mode has a kernel for, and
attention whose scores Python functions change.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._higher_order_ops.flex_attention import _permute_strides
from torch.nn import functional
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import _vmap_for_bhqkv

aten = torch.ops.aten


def all_scores(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor], block_mask: tuple[Any, ...],
    scale: float, options: Any, score_captured: tuple[Any, ...] = (), mask_captured: tuple[Any, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The op `flex_attention` of [batch, heads, length, width]: the result, and for each row the logarithm to the base
    2 of the sum of exp(score), and the greatest score in the same unit. The functions are of one score, or of one
    place: captured tensors follow. (PyTorch's own definition has a constant tensor, which torch.export loses.)
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1).expand(query.shape[0], -1, -1, -1) for x in (key, value))
    scores = query.to(wide) @ key.to(wide).transpose(-2, -1) * scale
    places = [torch.arange(n) for n in scores.shape]
    mask_mod = _vmap_for_bhqkv(block_mask[-1], prefix=(), suffix=(None,) * len(mask_captured))
    score_mod = _vmap_for_bhqkv(score_mod, prefix=(0,), suffix=(None,) * len(score_captured))
    with TransformGetItemToIndex():
        kept = mask_mod(*places, *mask_captured)
        scores = torch.where(kept, score_mod(scores, *places, *score_captured), -math.inf)
    found = torch._safe_softmax(scores, -1).to(query.dtype) @ value.to(query.dtype)
    unit = math.log(2)
    return _permute_strides(found, query.stride()), scores.logsumexp(-1) / unit, scores.amax(-1) / unit


def with_dense_attention(module: fx.GraphModule) -> fx.GraphModule:
    """Dynamo's graph, changed in place: `flex_attention` is what PyTorch defines it as, a table of all scores."""
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.higher_order.flex_attention:
            node.target = all_scores
    module.recompile()
    return module


@contextlib.contextmanager
def dense_attention() -> Iterator[None]:
    """Here the op `flex_attention` computes that table, also where a graph that torch.export made has it."""
    kind = type(torch.ops.higher_order.flex_attention)
    own = kind.__call__
    kind.__call__ = lambda _, *args, **kwargs: all_scores(*args, **kwargs)
    try:
        yield
    finally:
        kind.__call__ = own


def forget_attention() -> None:
    """Drops what Dynamo has compiled for `flex_attention` outside of functions that it compiles. torch.export goes that
    way too, and guards of other sizes, which Dynamo would try on its symbols, make numbers of these.
    """
    for inner in flex_attention.flex_attention.__code__.co_consts:
        if isinstance(inner, CodeType):
            torch._dynamo.reset_code(inner)


def self_attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_head: int, qkv_weight: Tensor, qkv_bias: Tensor,
    proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None, need_weights: bool = True,
    average_attn_weights: bool = True, mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """``aten._native_multi_head_attention``: of [batch, length, embed_dim]. Where the mask is not zero no weight is
    given: [length, length] (type 0), [batch, keys] (type 1) or one for each head (type 2).
    """
    weights, biases = qkv_weight.chunk(3), qkv_bias.chunk(3)
    given = zip((query, key, value), weights, biases, strict=True)
    q, k, v = (functional.linear(x, w, b).unflatten(-1, (num_head, -1)).transpose(1, 2) for x, w, b in given)
    scores = q @ k.transpose(-1, -2) / math.sqrt(embed_dim // num_head)
    if mask is not None:
        wide = mask[:, None, None, :] if mask_type == 1 else mask
        scores = torch.where(wide.bool(), -math.inf, scores)
    shares = scores.softmax(-1)
    found = functional.linear((shares @ v).transpose(1, 2).flatten(-2), proj_weight, proj_bias)
    if not need_weights:
        return found, None
    return found, shares.mean(1) if average_attn_weights else shares


def encoder_layer(
    src: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor,
    proj_bias: Tensor, use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Tensor, norm_bias_1: Tensor,
    norm_weight_2: Tensor, norm_bias_2: Tensor, ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor,
    ffn_bias_2: Tensor, mask: Tensor | None = None, mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    """``aten._transformer_encoder_layer_fwd``, which `nn.TransformerEncoderLayer` calls where nothing asks for a
    gradient.
    """

    def normed(x: Tensor, weight: Tensor, bias: Tensor, now: bool) -> Tensor:
        return functional.layer_norm(x, (embed_dim,), weight, bias, eps) if now else x

    x = normed(src, norm_weight_1, norm_bias_1, norm_first)
    params = (qkv_weight, qkv_bias, proj_weight, proj_bias)
    x = self_attention(x, x, x, embed_dim, num_heads, *params, mask, False, True, mask_type)[0] + src
    x = normed(x, norm_weight_1, norm_bias_1, not norm_first)
    inner = functional.linear(normed(x, norm_weight_2, norm_bias_2, norm_first), ffn_weight_1, ffn_bias_1)
    inner = functional.gelu(inner) if use_gelu else functional.relu(inner)
    x = functional.linear(inner, ffn_weight_2, ffn_bias_2) + x
    return normed(x, norm_weight_2, norm_bias_2, not norm_first)


# ---------------------------------------------------------------- of sizes that are given, or of no random numbers


def nonzero_static(x: Tensor, size: int, fill_value: int = -1) -> Tensor:
    """``aten.nonzero_static``: positions of the first `size` elements that are not zero, [size, axes]; `fill_value`
    where there are fewer.
    """
    flags = x.reshape(-1) != 0
    number = flags.cumsum(0) - 1
    row = torch.where(flags & (number < size), number, size)  # the last row is for all else
    count = torch.arange(flags.shape[0])
    at = torch.full((size + 1,), -1).scatter(0, row, count)[:size]
    columns, step = [], 1
    for length in reversed(x.shape):
        columns.append(torch.where(at < 0, fill_value, at // step % length if x.numel() else at))
        step = step * length
    return torch.stack(columns[::-1], 1) if columns else at.new_empty((size, 0))


def rrelu(
    x: Tensor, noise: Tensor, lower: float = 0.125, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Any:
    """``aten.rrelu_with_noise_functional``, which draws a number for each negative element, where it is training."""
    if training:
        return NotImplemented
    return functional.leaky_relu(x, (lower + upper) / 2), noise.clone()


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten._native_multi_head_attention.default: self_attention,
    aten._transformer_encoder_layer_fwd.default: encoder_layer,
    aten.nonzero_static.default: nonzero_static,
    aten.rrelu_with_noise_functional.default: rrelu,
}
