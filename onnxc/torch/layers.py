"""What PyTorch keeps whole, taken apart into ops that are compiled: layers that its eager mode has a kernel for, and
attention whose scores Python functions change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._higher_order_ops.flex_attention import _permute_strides
from torch._ops import HigherOrderOperator
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


class _Dense(HigherOrderOperator):  # type: ignore[misc]
    """`all_scores` as an op, in place of `flex_attention`: what torch.export makes looks for parameters among the
    arguments of each node, and knows of ops alone that they may be functions.
    """

    def __init__(self) -> None:
        super().__init__("onnxc_all_scores")

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        return all_scores(*args, **kwargs)


_dense = _Dense()


def with_dense_attention(module: fx.GraphModule) -> fx.GraphModule:
    """A graph of Dynamo or torch.export, changed in place, with those inside of it: `flex_attention` is what PyTorch
    defines it as, a table of all scores.
    """
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            found = part.graph.find_nodes(op="call_function", target=torch.ops.higher_order.flex_attention)
            for node in found:
                node.target = _dense
            if found:
                part.recompile()
    return module


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


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten._native_multi_head_attention.default: self_attention,
    aten._transformer_encoder_layer_fwd.default: encoder_layer,
}
