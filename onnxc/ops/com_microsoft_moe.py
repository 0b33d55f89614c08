"""Mixtures of experts of com.microsoft: each token goes through the feed-forward networks that a router picks."""

from __future__ import annotations

from dataclasses import dataclass

from onnxc.errors import ModelError, ShapeError, UnsupportedError
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, always_equal, prod
from onnxc.ir.graph import Value
from onnxc.ops.activation import gelu
from onnxc.ops.com_microsoft import MS
from onnxc.ops.com_microsoft_quantized import unpacked_last
from onnxc.ops.common import of_shape, static_dim
from onnxc.ops.registry import Flag, op
from onnxc.primitives.builder import Builder

Layer = tuple[Value, "Value | None"]  # weights [experts, out, in], bias [experts, out]


@dataclass(frozen=True)
class Activation:
    """What is between the two layers of an expert.

    Attributes:
        name: of the function.
        alpha, beta, limit: of swiglu; no limit for None.
        fusion: where its linear half is: in a third layer (0), or in the first, interleaved (1) or behind the gate (2).
    """

    name: str
    alpha: float
    beta: float
    limit: float | None
    fusion: int

    def of(self, b: Builder, x: Value, third: Value | None) -> Value:
        """Of what the first layer gives, [..., inner] or [..., 2 * inner], and the third."""
        if self.name != "swiglu":
            y = self._simple(b, x)
            return y if third is None else b.mul(y, third)
        gate, linear = (x, third) if third is not None else self._halves(b, x)
        assert linear is not None
        if self.limit is not None:
            gate, linear = b.min(gate, self.limit), b.clip(linear, -self.limit, self.limit)
        swish = b.mul(gate, b.sigmoid(b.mul(gate, self.alpha)))
        return b.mul(swish, b.add(linear, self.beta) if self.beta else linear)

    def _simple(self, b: Builder, x: Value) -> Value:
        match self.name:
            case "relu":
                return b.max(x, 0.0, tie=0.0)
            case "gelu":
                return gelu(b, x, approximate="tanh")  # as onnxruntime's
            case "silu":
                return b.mul(x, b.sigmoid(x))
            case "identity":
                return x
        raise UnsupportedError(f"experts with the activation {self.name!r} are not supported")

    def _halves(self, b: Builder, x: Value) -> tuple[Value, Value]:
        last, width = x.rank - 1, x.shape[-1]
        if self.fusion == 1:
            pairs = b.reshape(x, (*x.shape[:-1], width // 2, 2))
            gate, linear = (b.reshape(b.slice(pairs, last + 1, k, k + 1), pairs.shape[:-1]) for k in (0, 1))
            return gate, linear
        if self.fusion == 2:
            return b.slice(x, last, 0, width // 2), b.slice(x, last, width // 2, width)
        raise ModelError("swiglu without swiglu_fusion needs a third layer of experts")


def routed(b: Builder, logits: Value, k: int, normalized: bool, mixed: Value | None) -> tuple[Value, Value]:
    """How much of each expert a token takes, and which it takes, both [tokens, experts].

    The shares are softmax(logits) of the best k, or of these alone where they are `normalized` (or what `mixed` says of
    them).
    """
    experts = static_dim(logits.shape[1], "the number of experts")
    if not 0 < k <= experts:
        raise ShapeError(f"{k} of the experts of {logits.t} cannot be chosen")
    best, at = b.emit("top_k", [logits], {"k": k, "axis": 1, "largest": True})
    shares = b.softmax(best, 1)
    if mixed is not None:
        shares = b.one("gather_elements", mixed, at, axis=1)
        if normalized:
            shares = b.div(shares, b.reduce("sum", shares, [1], True))
    elif not normalized:
        shares = b.one("gather_elements", b.softmax(logits, 1), at, axis=1)
    zeros = b.full(logits.shape, 0.0, logits.dtype)
    taken = b.full(at.shape, 1.0, logits.dtype)
    put = [b.one("scatter_elements", zeros, at, v, axis=1, reduction="none") for v in (shares, taken)]
    return put[0], put[1]


def experts_of(
    b: Builder, x: Value, logits: Value, first: Layer, second: Layer, third: Layer | None, activation: Activation,
    k: int, normalized: bool, mixed: Value | None = None,
) -> Value:  # fmt: skip
    """The sum over the chosen experts of share * second(activation(first(x))). All experts see all tokens."""
    if x.rank not in (2, 3) or logits.rank != 2:
        raise ShapeError(f"experts take tokens [(batch,) sequence, hidden] and a router [tokens, experts], not {x.t}")
    tokens = b.reshape(x, (prod(x.shape[:-1]), x.shape[-1]))
    logits = of_shape(b, logits, (tokens.shape[0], logits.shape[1]), "the router of experts")
    shares, taken = (b.swap(v, 0, 1) for v in routed(b, logits, k, normalized, mixed))
    experts, count = shares.shape
    rows = b.reshape(tokens, (1, *tokens.shape))
    beside = None if third is None else _layer(b, rows, third, experts)
    inner = activation.of(b, _layer(b, rows, first, experts), beside)
    y = b.mul(_layer(b, inner, second, experts), b.reshape(shares, (experts, count, 1)))
    y = b.where(b.eq(b.reshape(taken, (experts, count, 1)), 0.0), 0.0, y)  # whatever an expert makes of others' tokens
    return b.reshape(b.reduce("sum", y, [0], False), x.shape)


def _layer(b: Builder, x: Value, layer: Layer, experts: Dim) -> Value:
    weights, bias = layer
    weights = of_shape(b, weights, (experts, *weights.shape[1:2], x.shape[-1]), "a layer of experts")
    y = b.matmul(x, b.swap(weights, 1, 2))
    if bias is None:
        return y
    bias = of_shape(b, bias, weights.shape[:2], "a bias of experts")
    return b.add(y, b.reshape(bias, (experts, 1, bias.shape[1])))


@op("MoE", 1, domain=MS)
def moe(
    b: Builder, x: Value, router: Value, fc1: Value, bias1: Value | None, fc2: Value, bias2: Value | None = None,
    fc3: Value | None = None, bias3: Value | None = None, *, activation_alpha: float = 1.0,
    activation_beta: float = 0.0, activation_type: str = "relu", k: int = 1, normalize_routing_weights: Flag = 0,
    swiglu_fusion: int = 0, swiglu_limit: float | None = None, swiglu_limit_after_activation: Flag = 0,
    use_sparse_mixer: Flag = 0,
) -> Value:  # fmt: skip
    if use_sparse_mixer or swiglu_limit_after_activation:
        raise UnsupportedError("MoE with use_sparse_mixer or swiglu_limit_after_activation is not supported")
    activation = Activation(activation_type, activation_alpha, activation_beta, swiglu_limit, swiglu_fusion)
    third = None if fc3 is None else (fc3, bias3)
    return experts_of(b, x, router, (fc1, bias1), (fc2, bias2), third, activation, k, bool(normalize_routing_weights))


@op("QMoE", 1, domain=MS)
def qmoe(
    b: Builder, x: Value, router: Value, fc1: Value, scales1: Value | None, bias1: Value | None, fc2: Value,
    scales2: Value | None, bias2: Value | None = None, fc3: Value | None = None, scales3: Value | None = None,
    bias3: Value | None = None, zeros1: Value | None = None, zeros2: Value | None = None,
    zeros3: Value | None = None, mixed: Value | None = None, *, accuracy_level: int = 0,
    activation_alpha: float = 1.0, activation_beta: float = 0.0, activation_type: str = "relu", block_size: int = 0,
    expert_weight_bits: int = 4, fc1_expert_weight_bits: int = 0, fc2_expert_weight_bits: int = 0,
    fc3_expert_weight_bits: int = 0, k: int = 1, normalize_routing_weights: Flag = 0, quant_type: str = "int",
    swiglu_fusion: int = 0, swiglu_limit: float | None = None, swiglu_limit_after_activation: Flag = 0,
    use_sparse_mixer: Flag = 0, weights_prepacked: int = -1,
) -> Value:  # fmt: skip
    """As MoE; weights are packed integers with a scale for each row, or for each `block_size` of a row's elements."""
    if use_sparse_mixer or swiglu_limit_after_activation or quant_type != "int" or weights_prepacked > 0:
        raise UnsupportedError("QMoE of this quant_type, with prepacked weights or a sparse mixer is not supported")
    activation = Activation(activation_type, activation_alpha, activation_beta, swiglu_limit, swiglu_fusion)

    def weights(w: Value, scales: Value | None, zeros: Value | None, bits: int) -> Value:
        if scales is None:
            raise ModelError("QMoE of integers needs scales")
        return dequantized(b, w, scales, zeros, bits or expert_weight_bits, block_size, x.dtype)

    first = weights(fc1, scales1, zeros1, fc1_expert_weight_bits), bias1
    second = weights(fc2, scales2, zeros2, fc2_expert_weight_bits), bias2
    third = None if fc3 is None else (weights(fc3, scales3, zeros3, fc3_expert_weight_bits), bias3)
    return experts_of(b, x, router, first, second, third, activation, k, bool(normalize_routing_weights), mixed)


def dequantized(b: Builder, w: Value, scales: Value, zeros: Value | None, bits: int, block: int, dtype: DType) -> Value:
    """[experts, rows, bytes] as (w - zero) * scale, [experts, rows, columns]."""
    if bits not in (2, 4, 8):
        raise UnsupportedError(f"QMoE with {bits} bits is not supported")
    codes = unpacked_last(b, w, bits)
    experts, rows, columns = codes.shape
    groups = columns // block if block > 0 else 1
    zero: Value | float = float(1 << (bits - 1))
    if zeros is not None:
        packed = zeros if zeros.rank == 3 else b.reshape(zeros, (experts, 1, zeros.shape[1]))
        wide = unpacked_last(b, packed, bits)
        wide = b.slice(wide, 2, 0, groups if zeros.rank == 3 else rows)
        zero = b.cast(b.reshape(wide, (experts, rows, groups, 1)), dtype)
    if not always_equal(columns, groups * (block if block > 0 else columns)):
        raise ShapeError(f"QMoE: {columns} columns in blocks of {block}")
    parts = b.cast(b.reshape(codes, (experts, rows, groups, columns // groups)), dtype)
    scaled = b.mul(b.sub(parts, zero), b.cast(b.reshape(scales, (experts, rows, groups, 1)), dtype))
    return b.reshape(scaled, (experts, rows, columns))


@op("GatedRelativePositionBias", 1, domain=MS)
def gated_relative_position_bias(
    b: Builder, query: Value, query_bias: Value, rel_pos: Value, weight: Value, bias: Value, eco_a: Value,
    token_offset: Value | None = None, *, num_heads: int,
) -> Value:  # fmt: skip
    """rel_pos times a gate, which two sums of the halves of query * weight + bias make. [batch, heads, seq, seq]."""
    if token_offset is not None or query.rank != 3:
        raise UnsupportedError("GatedRelativePositionBias of tokens without padding is not supported")
    batch, steps, hidden = query.shape
    q = b.reshape(b.add(query, query_bias), (batch, steps, num_heads, hidden // num_heads))
    sums = b.add(b.matmul(b.transpose(q, (0, 2, 1, 3)), weight), bias)
    halves = b.reshape(sums, (batch, num_heads, steps, 2, sums.shape[-1] // 2))
    gates = b.sigmoid(b.reduce("sum", halves, [4], False))
    u, r = (b.slice(gates, 3, k, k + 1) for k in (0, 1))
    return b.mul(b.add(b.mul(u, b.sub(b.mul(r, eco_a), 1.0)), 2.0), rel_pos)
