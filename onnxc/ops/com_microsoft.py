"""onnxruntime's contrib operators that optimized and quantized models use, as composites."""

from __future__ import annotations

from collections.abc import Callable

from onnxc.errors import ShapeError, UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim
from onnxc.ir.graph import Value
from onnxc.ops import activation
from onnxc.ops.common import from_start, of_shape, per_last, within
from onnxc.ops.conv import conv
from onnxc.ops.matmul import gemm, matmul
from onnxc.ops.normalization import layer_norm, rms_norm, stash_of
from onnxc.ops.quantization import dequantize_linear
from onnxc.ops.registry import Flag, op
from onnxc.primitives.builder import Builder

MS = "com.microsoft"


# ---------------------------------------------------------------- activations


@op("Gelu", 1, domain=MS)
def gelu(b: Builder, x: Value) -> Value:
    return activation.gelu(b, x)


@op("BiasGelu", 1, domain=MS)
def bias_gelu(b: Builder, x: Value, bias: Value) -> Value:
    return activation.gelu(b, b.add(x, per_last(b, bias, x, "the bias of BiasGelu")))


@op("FastGelu", 1, domain=MS)
def fast_gelu(b: Builder, x: Value, bias: Value | None = None) -> Value:
    x = x if bias is None else b.add(x, per_last(b, bias, x, "the bias of FastGelu"))
    return activation.gelu(b, x, approximate="tanh")


@op("QuickGelu", 1, domain=MS)
def quick_gelu(b: Builder, x: Value, *, alpha: float = 1.702) -> Value:
    return activation.swish(b, x, alpha=alpha)


@op("BiasSplitGelu", 1, domain=MS)
def bias_split_gelu(b: Builder, x: Value, bias: Value) -> Value:
    """One half times the GELU of the other."""
    y = b.add(x, per_last(b, bias, x, "the bias of BiasSplitGelu"))
    half = y.shape[-1] // 2
    left, right = b.split(y, y.rank - 1, [half, half])
    return b.mul(left, activation.gelu(b, right))


@op("BiasAdd", 1, domain=MS)
def bias_add(b: Builder, x: Value, bias: Value, skip: Value) -> Value:
    return b.add(b.add(x, per_last(b, bias, x, "the bias of BiasAdd")), within(b, skip, x.shape))


def _scaled_tanh(b: Builder, x: Value, *, alpha: float = 1.0, beta: float = 1.0) -> Value:
    return b.mul(b.tanh(b.mul(x, beta)), alpha)


def _parametric_softplus(b: Builder, x: Value, *, alpha: float = 1.0, beta: float = 1.0) -> Value:
    return b.mul(activation.softplus(b, b.mul(x, beta)), alpha)


def _hard_swish(b: Builder, x: Value, *, alpha: float = 1 / 6, beta: float = 0.5) -> Value:
    return b.mul(x, activation.hard_sigmoid(b, x, alpha=alpha, beta=beta))


_ACTIVATIONS: dict[str, tuple[Callable[..., Value], tuple[str, ...]]] = {
    "Relu": (activation.relu, ()), "Tanh": (activation.tanh, ()), "Sigmoid": (activation.sigmoid, ()),
    "Softplus": (activation.softplus, ()), "Softsign": (activation.softsign, ()),
    "LeakyRelu": (activation.leaky_relu, ("alpha",)), "Elu": (activation.elu, ("alpha",)),
    "Celu": (activation.celu, ("alpha",)), "ThresholdedRelu": (activation.thresholded_relu, ("alpha",)),
    "HardSigmoid": (activation.hard_sigmoid, ("alpha", "beta")), "HardSwish": (_hard_swish, ("alpha", "beta")),
    "ScaledTanh": (_scaled_tanh, ("alpha", "beta")), "ParametricSoftplus": (_parametric_softplus, ("alpha", "beta")),
    "Selu": (activation.selu, ("alpha", "gamma")), "Clip": (activation.clip_6, ("min", "max")),
}  # fmt: skip


def activate(b: Builder, x: Value, name: str, parameters: list[float] | None) -> Value:
    """The activation that a fused node names, with its parameters in order."""
    if not name:
        return x
    if name not in _ACTIVATIONS:
        raise UnsupportedError(f"the fused activation {name!r} is not supported")
    define, names = _ACTIVATIONS[name]
    return define(b, x, **dict(zip(names, parameters or (), strict=False)))


def activate_named(b: Builder, x: Value, name: str, alpha: float, beta: float, gamma: float) -> Value:
    """The same for a node whose attributes name the parameters."""
    names = _ACTIVATIONS[name][1] if name in _ACTIVATIONS else ()
    given = {"alpha": alpha, "beta": beta, "gamma": gamma}
    return activate(b, x, name, [given[k] for k in names if k in given])


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
    b: Builder, x: Value, y: Value, *, alpha: float = 1.0, transA: Flag = 0, transB: Flag = 0,
    transBatchA: Flag = 0, transBatchB: Flag = 0,
) -> Value:  # fmt: skip
    out = matmul(
        b,
        _transposed(b, x, bool(transA), bool(transBatchA)),
        _transposed(b, y, bool(transB), bool(transBatchB)),
    )
    return out if alpha == 1.0 else b.mul(out, alpha)


@op("FusedGemm", 1, domain=MS)
def fused_gemm(
    b: Builder, x: Value, y: Value, c: Value | None = None, *, activation: str = "",
    activation_alpha: float = 0.0, activation_beta: float = 0.0, activation_gamma: float = 0.0,
    alpha: float = 1.0, beta: float = 1.0, transA: Flag = 0, transB: Flag = 0,
) -> Value:  # fmt: skip
    out = gemm(b, x, y, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    return activate_named(b, out, activation, activation_alpha, activation_beta, activation_gamma)


@op("FusedConv", 1, domain=MS)
def fused_conv(
    b: Builder, x: Value, w: Value, bias: Value | None = None, z: Value | None = None, *,
    activation: str = "", activation_params: list[float] | None = None, auto_pad: str = "NOTSET",
    dilations: list[int] | None = None, group: int = 1, kernel_shape: list[int] | None = None,
    pads: list[int] | None = None, strides: list[int] | None = None,
) -> Value:  # fmt: skip
    y = conv(
        b, x, w, bias, auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape,
        pads=pads, strides=strides,
    )  # fmt: skip
    return activate(b, y if z is None else b.add(y, z), activation, activation_params)


# ---------------------------------------------------------------- normalization


@op("SimplifiedLayerNormalization", 1, domain=MS)
@op("SimplifiedLayerNormalization", 1, unchecked=True)  # onnxruntime has it in ONNX's own domain
def simplified_layer_normalization(
    b: Builder, x: Value, scale: Value, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1,
) -> list[Value]:  # fmt: skip
    axes = range(b.axis(axis, x.rank), x.rank)
    y, inverse = rms_norm(b, x, axes, epsilon, stash_of(x, stash_type))
    return [b.mul(y, within(b, scale, y.shape)), inverse]


@op("LayerNormalization", 1, domain=MS)
def layer_normalization(
    b: Builder, x: Value, scale: Value, bias: Value | None = None, *, axis: int = -1, epsilon: float = 1e-5,
    stash_type: int = 1,
) -> list[Value]:  # fmt: skip
    return layer_norm(b, x, scale, bias, range(b.axis(axis, x.rank), x.rank), epsilon, stash_of(x, stash_type))


def _skipped(b: Builder, x: Value, skip: Value, bias: Value | None) -> Value:
    total = b.add(x, within(b, skip, x.shape))
    return total if bias is None else b.add(total, per_last(b, bias, x, "the bias of a skip"))


@op("SkipLayerNormalization", 1, domain=MS)
def skip_layer_normalization(
    b: Builder, x: Value, skip: Value, gamma: Value, beta: Value | None = None, bias: Value | None = None, *,
    epsilon: float = 1e-12,
) -> list[Value]:  # fmt: skip
    """Outputs: normalized sum, mean, inverse deviation, the sum itself."""
    total = _skipped(b, x, skip, bias)
    gamma = per_last(b, gamma, x, "the scale of SkipLayerNormalization")
    beta = None if beta is None else per_last(b, beta, x, "the shift of SkipLayerNormalization")
    return [*layer_norm(b, total, gamma, beta, [x.rank - 1], epsilon, stash_of(x, 1)), total]


@op("SkipSimplifiedLayerNormalization", 1, domain=MS)
def skip_simplified_layer_normalization(
    b: Builder, x: Value, skip: Value, gamma: Value, bias: Value | None = None, *, epsilon: float = 1e-12,
) -> list[Value]:  # fmt: skip
    """Outputs: normalized sum, a mean of zeros (none is subtracted), inverse deviation, the sum itself."""
    total = _skipped(b, x, skip, bias)
    y, inverse = rms_norm(b, total, [x.rank - 1], epsilon, stash_of(x, 1))
    gamma = per_last(b, gamma, x, "the scale of SkipSimplifiedLayerNormalization")
    return [b.mul(y, gamma), b.full(inverse.shape, 0, inverse.dtype), inverse, total]


def _rows(b: Builder, table: Value, ids: Value) -> Value:
    return b.gather(table, from_start(b, ids, table.shape[0]), 0)


@op("EmbedLayerNormalization", 1, domain=MS)
def embed_layer_normalization(
    b: Builder, ids: Value, segments: Value | None, words: Value, positions: Value,
    segment_table: Value | None, gamma: Value, beta: Value, mask: Value | None = None,
    position_ids: Value | None = None, *, epsilon: float = 1e-12, mask_index_type: int = 0,
) -> list[Value]:  # fmt: skip
    """The sum of word, position and segment embeddings, normalized; the length of each sequence; the sum."""
    if ids.rank != 2 or words.rank != 2:
        raise ShapeError(f"EmbedLayerNormalization takes ids [batch, sequence], and a table, not {ids.t} and {words.t}")
    (batch, sequence), hidden = ids.shape, words.shape[1]
    at = b.iota(sequence) if position_ids is None else within(b, position_ids, ids.shape)
    total = b.add(_rows(b, words, ids), _rows(b, _table(b, positions, hidden), at))
    if segments is not None and segment_table is not None:
        segments = of_shape(b, segments, ids.shape, "the segments of EmbedLayerNormalization")
        total = b.add(total, _rows(b, _table(b, segment_table, hidden), segments))
    if mask is None:
        lengths = b.full((batch,), 0, dtypes.int32)
    else:
        mask = of_shape(b, mask, ids.shape, "the mask of EmbedLayerNormalization")
        lengths = b.reduce("sum", b.cast(mask, dtypes.int32), [1])
    gamma, beta = (per_last(b, v, total, "a weight of EmbedLayerNormalization") for v in (gamma, beta))
    return [layer_norm(b, total, gamma, beta, [2], epsilon, stash_of(words, 1))[0], lengths, total]


def _table(b: Builder, table: Value, hidden: Dim) -> Value:
    return of_shape(b, table, (*table.shape[:1], hidden), "a table of EmbedLayerNormalization")


@op("QEmbedLayerNormalization", 1, domain=MS)
def q_embed_layer_normalization(
    b: Builder, ids: Value, segments: Value | None, words: Value, positions: Value, segment_table: Value | None,
    gamma: Value, beta: Value, mask: Value | None, words_scale: Value, positions_scale: Value,
    segments_scale: Value | None, gamma_scale: Value, beta_scale: Value, words_zero: Value, positions_zero: Value,
    segments_zero: Value | None, gamma_zero: Value, beta_zero: Value, *, epsilon: float = 1e-12,
) -> list[Value]:  # fmt: skip
    """EmbedLayerNormalization of quantized tables and weights. Outputs: normalized sum, length of each sequence."""
    first = dequantize_linear(b, words, words_scale, words_zero)
    second = dequantize_linear(b, positions, positions_scale, positions_zero)
    third: Value | None = None
    if segment_table is not None and segments_scale is not None:
        third = dequantize_linear(b, segment_table, segments_scale, segments_zero)
    scale = dequantize_linear(b, gamma, gamma_scale, gamma_zero)
    shift = dequantize_linear(b, beta, beta_scale, beta_zero)
    made = embed_layer_normalization(b, ids, segments, first, second, third, scale, shift, mask, epsilon=epsilon)
    return made[:2]
