"""onnxruntime's contrib operators that optimized and quantized models use, as composites."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from onnxc.errors import ModelError, ShapeError, UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import prod
from onnxc.ir.graph import Value
from onnxc.ops import activation
from onnxc.ops.attention import additive, merge_heads, rotary, scaled_scores, share_heads, split_heads, window_mask
from onnxc.ops.common import axes_of
from onnxc.ops.conv import conv
from onnxc.ops.matmul import gemm, matmul
from onnxc.ops.normalization import layer_norm, rms_norm, stash_of
from onnxc.ops.quantization import (
    centered, dequantize_linear, dynamic_quantize_linear, integer_product, quantize_linear, to_quantized,
)  # fmt: skip
from onnxc.ops.registry import op
from onnxc.primitives.builder import Builder

MS = "com.microsoft"


# ---------------------------------------------------------------- activations


@op("Gelu", 1, domain=MS)
def gelu(b: Builder, x: Value) -> Value:
    return activation.gelu(b, x)


@op("BiasGelu", 1, domain=MS)
def bias_gelu(b: Builder, x: Value, bias: Value) -> Value:
    return activation.gelu(b, b.add(x, bias))


@op("FastGelu", 1, domain=MS)
def fast_gelu(b: Builder, x: Value, bias: Value | None = None) -> Value:
    return activation.gelu(b, x if bias is None else b.add(x, bias), approximate="tanh")


@op("QuickGelu", 1, domain=MS)
def quick_gelu(b: Builder, x: Value, *, alpha: float = 1.702) -> Value:
    return activation.swish(b, x, alpha=alpha)


@op("BiasSplitGelu", 1, domain=MS)
def bias_split_gelu(b: Builder, x: Value, bias: Value) -> Value:
    """One half times the GELU of the other."""
    y = b.add(x, bias)
    half = y.shape[-1] // 2
    left, right = b.split(y, y.rank - 1, [half, half])
    return b.mul(left, activation.gelu(b, right))


@op("BiasAdd", 1, domain=MS)
def bias_add(b: Builder, x: Value, bias: Value, skip: Value) -> Value:
    return b.add(b.add(x, bias), skip)


_ACTIVATIONS: dict[str, tuple[Callable[..., Value], tuple[str, ...]]] = {
    "Relu": (activation.relu, ()), "Tanh": (activation.tanh, ()), "Sigmoid": (activation.sigmoid, ()),
    "LeakyRelu": (activation.leaky_relu, ("alpha",)), "Clip": (activation.clip_6, ("min", "max")),
    "HardSigmoid": (activation.hard_sigmoid, ("alpha", "beta")),
}  # fmt: skip


def activate(b: Builder, x: Value, name: str, parameters: list[float] | None) -> Value:
    """The activation that a fused node names, with its parameters in order."""
    if not name:
        return x
    if name not in _ACTIVATIONS:
        raise UnsupportedError(f"the fused activation {name!r} is not supported")
    define, names = _ACTIVATIONS[name]
    return define(b, x, **dict(zip(names, parameters or (), strict=False)))


# ---------------------------------------------------------------- matmul and convolution


def _transposed(b: Builder, x: Value, last_two: bool, batch: bool) -> Value:
    """The matrix axes exchanged; with `batch`, the first axis is the one before the last in memory."""
    if x.rank < 2:
        return x
    if batch:
        x = b.transpose(x, (*range(1, x.rank - 1), 0, x.rank - 1))
    return b.swap(x, x.rank - 2, x.rank - 1) if last_two else x


@op("TransposeMatMul", 1, domain=MS)
@op("FusedMatMul", 1, domain=MS)
def fused_matmul(
    b: Builder, x: Value, y: Value, *, alpha: float = 1.0, transA: int = 0, transB: int = 0, transBatchA: int = 0,
    transBatchB: int = 0,
) -> Value:  # fmt: skip  # noqa: N803
    out = matmul(
        b, _transposed(b, x, bool(transA), bool(transBatchA)), _transposed(b, y, bool(transB), bool(transBatchB))
    )
    return out if alpha == 1.0 else b.mul(out, alpha)


@op("FusedGemm", 1, domain=MS)
def fused_gemm(
    b: Builder, x: Value, y: Value, c: Value | None = None, *, activation: str = "", activation_alpha: float = 0.0,
    activation_beta: float = 0.0, activation_gamma: float = 0.0, alpha: float = 1.0, beta: float = 1.0,
    transA: int = 0, transB: int = 0,
) -> Value:  # fmt: skip  # noqa: N803
    out = gemm(b, x, y, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    return activate(b, out, activation, [activation_alpha, activation_beta])


@op("FusedConv", 1, domain=MS)
def fused_conv(
    b: Builder, x: Value, w: Value, bias: Value | None = None, z: Value | None = None, *, activation: str = "",
    activation_params: list[float] | None = None, auto_pad: str = "NOTSET", dilations: list[int] | None = None,
    group: int = 1, kernel_shape: list[int] | None = None, pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Value:  # fmt: skip
    y = conv(
        b, x, w, bias, auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape, pads=pads,
        strides=strides,
    )  # fmt: skip
    return activate(b, y if z is None else b.add(y, z), activation, activation_params)


# ---------------------------------------------------------------- normalization


@op("SimplifiedLayerNormalization", 1, domain=MS)
@op("SimplifiedLayerNormalization", 1)  # onnxruntime has it in ONNX's own domain
def simplified_layer_normalization(b: Builder, x: Value, scale: Value, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> list[Value]:  # fmt: skip
    axes = range(b.axis(axis, x.rank), x.rank)
    y, inverse = rms_norm(b, x, axes, epsilon, stash_of(x, stash_type))
    return [b.mul(y, scale), inverse]


@op("LayerNormalization", 1, domain=MS)
def layer_normalization(b: Builder, x: Value, scale: Value, bias: Value | None = None, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> list[Value]:  # fmt: skip
    return layer_norm(b, x, scale, bias, range(b.axis(axis, x.rank), x.rank), epsilon, stash_of(x, stash_type))


def _skipped(b: Builder, x: Value, skip: Value, bias: Value | None) -> Value:
    total = b.add(x, skip)
    return total if bias is None else b.add(total, bias)


@op("SkipLayerNormalization", 1, domain=MS)
def skip_layer_normalization(
    b: Builder, x: Value, skip: Value, gamma: Value, beta: Value | None = None, bias: Value | None = None, *,
    epsilon: float = 1e-12,
) -> list[Value]:  # fmt: skip
    """Outputs: normalized sum, mean, inverse deviation, the sum itself."""
    total = _skipped(b, x, skip, bias)
    return [*layer_norm(b, total, gamma, beta, [x.rank - 1], epsilon, stash_of(x, 1)), total]


@op("SkipSimplifiedLayerNormalization", 1, domain=MS)
def skip_simplified_layer_normalization(b: Builder, x: Value, skip: Value, gamma: Value, bias: Value | None = None, *, epsilon: float = 1e-12) -> list[Value | None]:  # fmt: skip
    """Outputs: normalized sum, no mean, inverse deviation, the sum itself."""
    total = _skipped(b, x, skip, bias)
    y, inverse = rms_norm(b, total, [x.rank - 1], epsilon, stash_of(x, 1))
    return [b.mul(y, gamma), None, inverse, total]


@op("EmbedLayerNormalization", 1, domain=MS)
def embed_layer_normalization(
    b: Builder, ids: Value, segments: Value | None, words: Value, positions: Value, segment_table: Value | None,
    gamma: Value, beta: Value, mask: Value | None = None, position_ids: Value | None = None, *,
    epsilon: float = 1e-12, mask_index_type: int = 0,
) -> list[Value]:  # fmt: skip
    """The sum of word, position and segment embeddings, normalized; the length of each sequence; the sum."""
    at = b.iota(ids.shape[1]) if position_ids is None else position_ids
    total = b.add(b.gather(words, ids, 0), b.gather(positions, at, 0))
    if segments is not None and segment_table is not None:
        total = b.add(total, b.gather(segment_table, segments, 0))
    lengths = b.full((ids.shape[0],), 0, dtypes.int32) if mask is None else b.reduce("sum", b.cast(mask, dtypes.int32), [1])
    return [layer_norm(b, total, gamma, beta, [2], epsilon, stash_of(words, 1))[0], lengths, total]


# ---------------------------------------------------------------- quantized operators


@op("DynamicQuantizeMatMul", 1, domain=MS)
def dynamic_quantize_matmul(b: Builder, x: Value, y: Value, y_scale: Value, y_zero: Value | None = None, bias: Value | None = None) -> Value:  # fmt: skip
    """x quantized by its own range, times an integer matrix."""
    whole, scale, zero = dynamic_quantize_linear(b, x)
    return matmul_integer_to_float(b, whole, y, scale, y_scale, zero, y_zero, bias)


@op("MatMulIntegerToFloat", 1, domain=MS)
def matmul_integer_to_float(
    b: Builder, x: Value, y: Value, x_scale: Value, y_scale: Value, x_zero: Value | None = None,
    y_zero: Value | None = None, bias: Value | None = None,
) -> Value:  # fmt: skip
    acc = b.cast(integer_product(b, x, y, x_zero, y_zero), x_scale.dtype)
    out = b.mul(acc, b.mul(_single(b, x_scale), _single(b, y_scale)))
    return out if bias is None else b.add(out, bias)


def _single(b: Builder, v: Value) -> Value:
    return b.reshape(v, ()) if v.t.size == 1 else v


def _real(b: Builder, x: Value, scale: Value, zero: Value | None) -> Value:
    return dequantize_linear(b, x, scale, zero)


def _whole(b: Builder, x: Value, scale: Value, zero: Value | None) -> Value:
    return quantize_linear(b, x, scale, zero)


def _qlinear_binary(name: str, f: Callable[[Builder, Value, Value], Value]) -> None:
    @op(name, 1, domain=MS)
    def define(
        b: Builder, x: Value, x_scale: Value, x_zero: Value | None, y: Value, y_scale: Value, y_zero: Value | None,
        scale: Value, zero: Value | None = None,
    ) -> Value:  # fmt: skip
        return quantize_as(b, f(b, _real(b, x, x_scale, x_zero), _real(b, y, y_scale, y_zero)), scale, zero, x.dtype)


_qlinear_binary("QLinearAdd", lambda b, x, y: b.add(x, y))
_qlinear_binary("QLinearMul", lambda b, x, y: b.mul(x, y))


def quantize_as(b: Builder, x: Value, scale: Value, zero: Value | None, to: DType) -> Value:
    """Quantized to the type of the zero point, or where there is none, to the given one."""
    return _whole(b, x, scale, zero if zero is not None else b.scalar(0, to))


@op("QLinearSigmoid", 1, domain=MS)
def qlinear_sigmoid(b: Builder, x: Value, x_scale: Value, x_zero: Value | None, scale: Value, zero: Value | None = None) -> Value:  # fmt: skip
    return quantize_as(b, b.sigmoid(_real(b, x, x_scale, x_zero)), scale, zero, x.dtype)


@op("QLinearLeakyRelu", 1, domain=MS)
def qlinear_leaky_relu(b: Builder, x: Value, x_scale: Value, x_zero: Value | None, scale: Value, zero: Value | None = None, *, alpha: float = 0.01) -> Value:  # fmt: skip
    return quantize_as(b, activation.leaky_relu(b, _real(b, x, x_scale, x_zero), alpha=alpha), scale, zero, x.dtype)


@op("QLinearSoftmax", 1, domain=MS)
def qlinear_softmax(b: Builder, x: Value, x_scale: Value, x_zero: Value | None, scale: Value, zero: Value, *, axis: int = -1, opset: int = 1) -> Value:  # fmt: skip
    return quantize_as(b, b.softmax(_real(b, x, x_scale, x_zero), b.axis(axis, x.rank)), scale, zero, x.dtype)


@op("QLinearConcat", 1, domain=MS)
def qlinear_concat(b: Builder, scale: Value, zero: Value, *xs: Value, axis: int) -> Value:
    """Inputs in threes: tensor, scale, zero point."""
    if len(xs) % 3:
        raise ModelError("QLinearConcat needs a tensor, a scale and a zero point for each input")
    parts = [_real(b, *xs[i : i + 3]) for i in range(0, len(xs), 3)]
    return quantize_as(b, b.concat(parts, b.axis(axis, parts[0].rank)), scale, zero, xs[0].dtype)


@op("QLinearGlobalAveragePool", 1, domain=MS)
def qlinear_global_average_pool(b: Builder, x: Value, x_scale: Value, x_zero: Value, scale: Value, zero: Value, *, channels_last: int = 0) -> Value:  # fmt: skip
    axes = range(1, x.rank - 1) if channels_last else range(2, x.rank)
    return quantize_as(b, b.mean(_real(b, x, x_scale, x_zero), axes, True), scale, zero, x.dtype)


@op("QLinearReduceMean", 1, domain=MS)
def qlinear_reduce_mean(b: Builder, x: Value, x_scale: Value, x_zero: Value | None, scale: Value, zero: Value | None = None, *, axes: list[int], keepdims: int = 1) -> Value:  # fmt: skip
    found = axes_of(b, axes, x.rank, "QLinearReduceMean") or ()
    return quantize_as(b, b.mean(_real(b, x, x_scale, x_zero), found, bool(keepdims)), scale, zero, x.dtype)


@op("QGemm", 1, domain=MS)
def qgemm(
    b: Builder, x: Value, x_scale: Value, x_zero: Value, y: Value, y_scale: Value, y_zero: Value,
    c: Value | None = None, scale: Value | None = None, zero: Value | None = None, *, alpha: float = 1.0,
    transA: int = 0, transB: int = 0,
) -> Value:  # fmt: skip  # noqa: N803
    """c is int32 in units of alpha * x_scale * y_scale; without an output scale the result is a float."""
    left = centered(b, b.swap(x, 0, 1) if transA else x, _single(b, x_zero))
    right = centered(b, b.swap(y, 0, 1) if transB else y, _single(b, y_zero))
    acc = b.matmul(left, right)
    acc = acc if c is None else b.add(acc, c)
    factor = b.mul(b.mul(_single(b, x_scale), _single(b, y_scale)), alpha)
    real = b.cast(acc, dtypes.float32)
    if scale is None:
        return b.mul(real, factor)
    point = None if zero is None else _single(b, zero)
    return to_quantized(b, b.mul(real, b.div(factor, _single(b, scale))), point, zero.dtype if zero else x.dtype)


@op("MatMulNBits", 1, domain=MS)
def matmul_n_bits(
    b: Builder, x: Value, packed: Value, scales: Value, zeros: Value | None = None, g_idx: Value | None = None,
    bias: Value | None = None, *, K: int, N: int, accuracy_level: int = 0, bits: int = 4, block_size: int,
    weight_prepacked: int = 0,
) -> Value:  # fmt: skip  # noqa: N803
    """x @ w', w [N, K] packed as `bits` wide integers in blocks of K, each block with a scale and a zero point."""
    if g_idx is not None or bits not in (2, 4, 8) or weight_prepacked:
        raise UnsupportedError(f"MatMulNBits with {bits} bits, g_idx or prepacked weights is not supported")
    blocks = -(-K // block_size)
    whole = b.reshape(_unpacked(b, b.reshape(packed, (N, prod(packed.shape) // N)), bits), (N, blocks, block_size))
    scale = b.reshape(scales, (N, blocks, 1))
    if zeros is None:
        zero: Value = b.scalar(1 << (bits - 1), scales.dtype)
    elif zeros.dtype is dtypes.uint8:
        unpacked = _unpacked(b, b.reshape(zeros, (N, prod(zeros.shape) // N)), bits)
        zero = b.cast(b.reshape(b.slice(unpacked, 1, 0, blocks), (N, blocks, 1)), scales.dtype)
    else:
        zero = b.reshape(zeros, (N, blocks, 1))
    w = b.mul(b.sub(b.cast(whole, scales.dtype), zero), scale)
    w = b.slice(b.reshape(w, (N, blocks * block_size)), 1, 0, K)
    out = matmul(b, x, b.swap(b.cast(w, x.dtype), 0, 1))
    return out if bias is None else b.add(out, bias)


def _unpacked(b: Builder, x: Value, bits: int) -> Value:
    """[n, bytes] as [n, bytes * 8 / bits]: the lowest bits come first."""
    if bits == 8:
        return x
    mask = b.scalar((1 << bits) - 1, x.dtype)
    shifts = [b.scalar(s, x.dtype) for s in range(0, 8, bits)]
    parts = [b.reshape(b.binary("bitand", b.binary("shr", x, s), mask), (*x.shape, 1)) for s in shifts]
    return b.reshape(b.concat(parts, 2), (x.shape[0], x.shape[1] * len(shifts)))


# ---------------------------------------------------------------- attention


@op("RotaryEmbedding", 1, domain=MS)
def rotary_embedding(
    b: Builder, x: Value, position_ids: Value, cos: Value, sin: Value, *, interleaved: int = 0,
    is_packed_batching: int = 0, num_heads: int = 0, rotary_embedding_dim: int = 0, scale: float = 1.0,
) -> Value:  # fmt: skip
    """Positions [batch, sequence], or the first one alone."""
    if is_packed_batching:
        raise UnsupportedError("RotaryEmbedding of packed batches is not supported")
    batch, sequence = x.shape[0], x.shape[1] if x.rank == 3 else x.shape[2]
    width = rotary_embedding_dim or cos.shape[1] * 2
    if position_ids.t.size == 1:
        position_ids = b.expand(b.add(b.iota(sequence), b.reshape(position_ids, ())), (batch, sequence))
    hidden = x.shape[-1]
    heads = num_heads or (hidden // width if x.rank == 3 else x.shape[1])
    if not isinstance(width, int) or not isinstance(heads, int):
        raise ShapeError(f"RotaryEmbedding of {x.t}: the number of heads must be static")
    return rotary(b, x, cos, sin, position_ids, heads, width, bool(interleaved))


@op("MultiHeadAttention", 1, domain=MS)
def multi_head_attention(
    b: Builder, q: Value, k: Value | None = None, v: Value | None = None, bias: Value | None = None,
    key_padding_mask: Value | None = None, attention_bias: Value | None = None, past_key: Value | None = None,
    past_value: Value | None = None, past_sequence_length: Value | None = None, cache_indirection: Value | None = None,
    *, mask_filter_value: float = -10000.0, num_heads: int, scale: float | None = None, unidirectional: int = 0,
) -> list[Value]:  # fmt: skip
    """q [batch, sequence, hidden]; k and v alike, or already in heads, or all three packed in q."""
    if past_sequence_length is not None or cache_indirection is not None:
        raise UnsupportedError("MultiHeadAttention with a shared cache is not supported")
    if q.rank == 5:  # packed [batch, sequence, heads, 3, size]
        q, k, v = (b.reshape(t, (*q.shape[:2], q.shape[2] * q.shape[4])) for t in b.split(q, 3, [1, 1, 1]))
    elif k is not None and k.rank == 5:  # keys and values packed in the same way
        k, v = (b.reshape(t, (*k.shape[:2], k.shape[2] * k.shape[4])) for t in b.split(k, 3, [1, 1]))
    if k is None or v is None:
        raise ModelError("MultiHeadAttention needs a key and a value")
    if bias is not None:
        q, k, v = _with_biases(b, q, k, v, bias)
    qh = split_heads(b, q, num_heads)
    kh, vh = (t if t.rank == 4 else split_heads(b, t, num_heads) for t in (k, v))
    if past_key is not None and past_value is not None:
        kh, vh = b.concat([past_key, kh], 2), b.concat([past_value, vh], 2)
    mask = _padding_mask(b, qh, kh, key_padding_mask, mask_filter_value)
    if unidirectional:
        offset = b.size_as(kh.shape[2] - qh.shape[2], dtypes.int64)
        mask = _both(b, mask, additive(b, window_mask(b, qh.shape[2], kh.shape[2], offset, -1, 0), q.dtype, mask_filter_value))
    if attention_bias is not None:
        mask = _both(b, mask, attention_bias)
    return [merge_heads(b, attend(b, qh, kh, vh, mask, scale)), kh, vh]


def attend(b: Builder, q: Value, k: Value, v: Value, mask: Value | None, scale: float | None) -> Value:
    """softmax(q k' * scale + mask) v, for [batch, heads, sequence, size]."""
    size = q.shape[3]
    if not scale and not isinstance(size, int):
        raise ShapeError(f"attention of {q.t}: the size of a head must be static")
    scores = scaled_scores(b, q, share_heads(b, k, q.shape[1]), scale or 1 / math.sqrt(size))
    scores = scores if mask is None else b.add(scores, mask)
    return b.matmul(b.softmax(scores, 3), share_heads(b, v, q.shape[1]))


def _both(b: Builder, x: Value | None, y: Value) -> Value:
    return y if x is None else b.add(x, y)


def _with_biases(b: Builder, q: Value, k: Value, v: Value, bias: Value) -> tuple[Value, Value, Value]:
    """One bias [q hidden + k hidden + v hidden]; keys that are already in heads take no bias."""
    hidden = q.shape[-1]
    sizes = [hidden, hidden, bias.shape[0] - 2 * hidden]
    parts = b.split(bias, 0, sizes)
    added = [b.add(t, p) if t.rank == 3 else t for t, p in zip((q, k, v), parts, strict=True)]
    return added[0], added[1], added[2]


def _padding_mask(b: Builder, q: Value, k: Value, mask: Value | None, filtered: float) -> Value | None:
    """The mask of padded keys as a bias: [batch] lengths, [batch, keys], or [batch, queries, keys]."""
    if mask is None:
        return None
    keys, batch = k.shape[2], q.shape[0]
    if mask.rank == 1 and mask.shape[0] != batch:
        raise UnsupportedError(f"a key_padding_mask {mask.t} is not supported")
    if mask.rank == 1:
        allowed = b.lt(b.iota(keys), b.reshape(b.cast(mask, dtypes.int64), (batch, 1, 1, 1)))
    else:
        shape = (batch, 1, 1, keys) if mask.rank == 2 else (batch, 1, *mask.shape[1:])
        allowed = b.reshape(b.lt(b.scalar(0, mask.dtype), mask), shape)
    return additive(b, allowed, q.dtype, filtered)


@op("Attention", 1, domain=MS)
def attention(
    b: Builder, x: Value, weights: Value, bias: Value | None = None, mask: Value | None = None,
    past: Value | None = None, attention_bias: Value | None = None, past_sequence_length: Value | None = None, *,
    do_rotary: int = 0, mask_filter_value: float = -10000.0, num_heads: int, past_present_share_buffer: int = 0,
    qkv_hidden_sizes: list[int] | None = None, rotary_embedding_dim: int = 0, scale: float | None = None,
    unidirectional: int = 0,
) -> list[Value]:  # fmt: skip
    """Self attention with its projection: x [batch, sequence, input], weights [input, q + k + v hidden]."""
    if do_rotary or past_present_share_buffer or past_sequence_length is not None:
        raise UnsupportedError("Attention with rotary embedding or a shared cache is not supported")
    if mask is not None and (mask.rank > 3 or (mask.rank == 1 and mask.shape[0] != x.shape[0])):
        raise UnsupportedError(f"Attention with the mask {mask.t} is not supported")
    projected = b.matmul(x, b.reshape(weights, (1, *weights.shape)))
    projected = projected if bias is None else b.add(projected, bias)
    third = weights.shape[1] // 3
    q, k, v = (split_heads(b, t, num_heads) for t in b.split(projected, 2, qkv_hidden_sizes or [third] * 3))
    present = []
    if past is not None:
        old_k, old_v = (b.reshape(t, t.shape[1:]) for t in b.split(past, 0, [1, 1]))
        k, v = b.concat([old_k, k], 2), b.concat([old_v, v], 2)
    if k.shape == v.shape:
        present = [b.concat([b.reshape(t, (1, *t.shape)) for t in (k, v)], 0)]
    total = _padding_mask(b, q, k, mask, mask_filter_value)
    if unidirectional:
        offset = b.size_as(k.shape[2] - q.shape[2], dtypes.int64)
        total = _both(b, total, additive(b, window_mask(b, q.shape[2], k.shape[2], offset, -1, 0), q.dtype, -np.inf))
    if attention_bias is not None:
        total = _both(b, total, attention_bias)
    return [merge_heads(b, attend(b, q, k, v, total, scale)), *present]
