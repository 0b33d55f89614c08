"""onnxruntime's contrib operators of arithmetic: norms with gates, groups and branches, fused products, distances."""

from __future__ import annotations

import numpy as np

from onnxc.errors import ModelError, ShapeError, UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.expr import ceildiv
from onnxc.ir.graph import Value
from onnxc.ops.activation import softplus
from onnxc.ops.com_microsoft import MS, activate_named, fast_gelu, fused_matmul
from onnxc.ops.common import axes_of, merge_axes, of_shape, widened
from onnxc.ops.matmul import matmul
from onnxc.ops.normalization import grouped, rms_norm
from onnxc.ops.quantization import centered
from onnxc.ops.registry import Flag, op
from onnxc.primitives.builder import Builder

# ---------------------------------------------------------------- gates


@op("ScaledSiLU", 1, domain=MS)
def scaled_silu(b: Builder, x: Value, scale: Value | None = None, *, alpha: float = 1.0) -> Value:
    """z * sigmoid(z) with z = scale * x; z and the sigmoid are rounded to the type of x."""
    factor = alpha if scale is None else widened(b, b.reshape(scale, ()))
    z = b.cast(b.mul(widened(b, x), factor), x.dtype)
    return b.mul(z, b.cast(b.sigmoid(widened(b, z)), x.dtype))


@op("GatedAdd", 1, domain=MS)
def gated_add(b: Builder, x: Value, y: Value, gate: Value) -> Value:
    return b.add(x, b.mul(y, gate))


@op("LinearAttentionGate", 1, domain=MS)
def linear_attention_gate(
    b: Builder, a: Value, bias: Value, scale: Value, rate: Value | None = None
) -> list[Value | None]:
    """scale * softplus(a + bias), and sigmoid(rate), computed in float32."""
    decay = b.cast(b.mul(scale, softplus(b, b.add(widened(b, a), bias))), a.dtype)
    return [decay, None if rate is None else b.cast(b.sigmoid(widened(b, rate)), rate.dtype)]


# ---------------------------------------------------------------- normalization


@op("GatedRMSNorm", 1, domain=MS)
def gated_rms_norm(
    b: Builder, x: Value, scale: Value, gate: Value, *, activation: str = "silu", epsilon: float = 1e-5
) -> Value:
    """x / rms(x) * scale * activation(gate), the norm over runs as long as the scale; computed in float32."""
    if activation not in ("silu", "swish", "sigmoid"):
        raise ModelError(f"GatedRMSNorm has the activation {activation!r}; silu, swish and sigmoid exist")
    width = scale.shape[0]
    runs = (*x.shape[:-1], x.shape[-1] // width, width)
    y, _ = rms_norm(b, b.reshape(widened(b, x), runs), [x.rank], epsilon, dtypes.float32)
    z = widened(b, gate)
    opened = b.sigmoid(z) if activation == "sigmoid" else b.mul(z, b.sigmoid(z))
    return b.cast(b.mul(b.reshape(b.mul(y, widened(b, scale)), x.shape), opened), x.dtype)


@op("BranchwiseRMSNorm", 1, domain=MS)
def branchwise_rms_norm(
    b: Builder, x: Value, scale: Value | None = None, *, epsilon: float = 1e-5, num_branches: int = 0
) -> Value:
    """x [..., branches, size], or flat with `num_branches`, each branch over its root mean square."""
    wide = widened(b, x)
    if num_branches:
        wide = b.reshape(wide, (*x.shape[:-1], num_branches, x.shape[-1] // num_branches))
    y, _ = rms_norm(b, wide, [wide.rank - 1], epsilon, dtypes.float32)
    if scale is not None:
        one = scale.rank == 1 and scale.t.size != wide.shape[-1]
        y = b.mul(y, widened(b, b.reshape(scale, wide.shape[-2:]) if one else scale))
    return b.cast(b.reshape(y, x.shape), x.dtype)


@op("GroupNorm", 1, domain=MS)
def group_norm(
    b: Builder, x: Value, gamma: Value, beta: Value, *, activation: int, channels_last: Flag = 1,
    epsilon: float = 1e-5, groups: int,
) -> Value:  # fmt: skip
    """Normalized over groups of channels, [N, spatial..., C] or channels first; with an activation, silu follows."""
    if activation not in (0, 1):
        raise UnsupportedError(f"GroupNorm with the activation {activation} is not supported; 0 and 1 (SiLU) are")
    first = b.transpose(x, (0, x.rank - 1, *range(1, x.rank - 1))) if channels_last else x
    wide = grouped(b, first, groups, epsilon, dtypes.float32)
    columns = (1, gamma.shape[0], *(1,) * (x.rank - 2))
    y = b.add(b.mul(wide, b.reshape(widened(b, gamma), columns)), b.reshape(widened(b, beta), columns))
    y = b.cast(b.mul(y, b.sigmoid(y)) if activation else y, x.dtype)
    return b.transpose(y, (0, *range(2, x.rank), 1)) if channels_last else y


@op("SkipGroupNorm", 1, domain=MS)
def skip_group_norm(
    b: Builder, x: Value, gamma: Value, beta: Value, skip: Value, bias: Value | None = None, *, activation: int,
    channels_last: Flag = 1, epsilon: float = 1e-5, groups: int,
) -> list[Value]:  # fmt: skip
    """GroupNorm of x + skip + bias, and that sum. The skip is like x, or [N, C], one for all positions."""
    spatial = (1,) * (x.rank - 2)
    if skip.rank == 2:
        n, c = skip.shape
        skip = b.reshape(skip, (n, *spatial, c) if channels_last else (n, c, *spatial))
    total = b.add(x, skip)
    if bias is not None:
        total = b.add(total, bias if channels_last else b.reshape(bias, (*bias.shape, *spatial)))
    y = group_norm(
        b, total, gamma, beta, activation=activation, channels_last=channels_last, epsilon=epsilon, groups=groups
    )
    return [y, total]


@op("BiasSoftmax", 1, domain=MS)
def bias_softmax(b: Builder, x: Value, bias: Value, *, axis: int = 1, is_inner_broadcast: int) -> Value:
    """Softmax over all axes from `axis` on of x + bias.

    The bias lacks axes of x, or has them with size 1: the ones just before `axis`, or else the first ones.
    """
    at = b.axis(axis, x.rank)
    if bias.rank < x.rank and is_inner_broadcast:
        tail = x.rank - at
        lead, rest = bias.shape[: bias.rank - tail], bias.shape[bias.rank - tail :]
        bias = b.reshape(bias, (*lead, *(1,) * (x.rank - bias.rank), *rest))
    return b.reshape(b.softmax(merge_axes(b, b.add(x, bias), at), 1), x.shape)


# ---------------------------------------------------------------- products


@op("GemmFastGelu", 1, domain=MS)
def gemm_fast_gelu(b: Builder, x: Value, w: Value, bias: Value | None = None) -> Value:
    return fast_gelu(b, matmul(b, x, w), bias)


@op("FusedMatMulActivation", 1, domain=MS)
def fused_matmul_activation(
    b: Builder, x: Value, y: Value, *, activation: str, activation_alpha: float = 0.0, activation_axis: int = -1,
    activation_beta: float = 0.0, activation_gamma: float = 0.0, alpha: float = 1.0, transA: Flag = 0, transB: Flag = 0,
    transBatchA: Flag = 0, transBatchB: Flag = 0,
) -> Value:  # fmt: skip
    product = fused_matmul(
        b, x, y, alpha=alpha, transA=transA, transB=transB, transBatchA=transBatchA, transBatchB=transBatchB
    )
    return activate_named(b, product, activation, activation_alpha, activation_beta, activation_gamma)


@op("MatMulInteger16", 1, domain=MS)
def matmul_integer_16(b: Builder, x: Value, y: Value) -> Value:
    """int16 matrices with a result in int32; of uint16 ones in uint32."""
    to = dtypes.int32 if x.dtype is dtypes.int16 else dtypes.uint32
    return matmul(b, b.cast(x, to), b.cast(y, to))


@op("MulInteger", 1, domain=MS)
def mul_integer(b: Builder, x: Value, x_zero: Value | None, y: Value, y_zero: Value | None = None) -> Value:
    """(x - x_zero) * (y - y_zero) in int32."""
    return b.mul(centered(b, x, x_zero), centered(b, y, y_zero))


@op("ReduceSumInteger", 1, domain=MS)
def reduce_sum_integer(b: Builder, x: Value, *, axes: list[int], keepdims: int) -> Value:
    found = axes_of(b, axes, x.rank, "ReduceSumInteger") or ()
    to = dtypes.int32 if x.dtype is dtypes.int8 else dtypes.uint32
    return b.reduce("sum", b.cast(x, to), found, bool(keepdims))


@op("ComplexMul", 1, domain=MS)
def complex_mul(b: Builder, x: Value, y: Value) -> Value:
    """The last axis has the real and the imaginary part."""
    return _complex_product(b, x, y, 1.0)


@op("ComplexMulConj", 1, domain=MS)
def complex_mul_conj(b: Builder, x: Value, y: Value) -> Value:
    """x times the conjugate of y."""
    return _complex_product(b, x, y, -1.0)


def _complex_product(b: Builder, x: Value, y: Value, sign: float) -> Value:
    (xr, xi), (yr, yi) = (b.split(v, v.rank - 1, [1, 1]) for v in (x, y))
    yi = yi if sign > 0 else b.neg(yi)
    real = b.sub(b.mul(xr, yr), b.mul(xi, yi))
    imaginary = b.add(b.mul(xr, yi), b.mul(xi, yr))
    return b.concat([real, imaginary], real.rank - 1)


@op("CDist", 1, domain=MS)
def cdist(b: Builder, x: Value, y: Value, *, metric: str = "sqeuclidean") -> Value:
    """The distance of each row of x [m, n] from each row of y [k, n]: [m, k]."""
    if metric not in ("sqeuclidean", "euclidean"):
        raise UnsupportedError(f"CDist with the metric {metric!r} is not supported; sqeuclidean and euclidean are")
    if x.rank != 2:
        raise ShapeError(f"CDist takes matrices, not {x.t}")
    y = of_shape(b, y, (*y.shape[:1], x.shape[1]), "the second matrix of CDist")
    gaps = b.sub(b.reshape(x, (x.shape[0], 1, x.shape[1])), y)
    squares = b.reduce("sum", b.mul(gaps, gaps), [2])
    return squares if metric == "sqeuclidean" else b.sqrt(squares)


@op("IsAllFinite", 1, domain=MS)
def is_all_finite(b: Builder, *xs: Value, isinf_only: Flag = 0, isnan_only: Flag = 0) -> Value:
    """Whether no element is infinite or NaN; with one of the attributes, only that is looked for."""
    if isinf_only and isnan_only:
        raise ModelError("IsAllFinite has both isinf_only and isnan_only")
    good = b.scalar(True, dtypes.boolean)
    for x in xs:
        bad = b.isnan(x)
        if not isnan_only:
            infinite = b.eq(b.abs(x), np.inf)
            bad = infinite if isinf_only else b.or_(bad, infinite)
        count = b.reduce("sum", b.cast(bad, dtypes.int64), range(x.rank))
        good = b.and_(good, b.eq(count, 0))
    return good


# ---------------------------------------------------------------- four-bit floats

# The sixteen values that bitsandbytes gives its codes: FP4, and quantiles of a normal distribution (QLoRA, NF4).
_FP4 = (0.0, 0.005208333, 0.6666667, 1.0, 0.33333334, 0.5, 0.16666667, 0.25)
_NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip


@op("MatMulBnb4", 1, domain=MS)
def matmul_bnb4(
    b: Builder, x: Value, packed: Value, absmax: Value, *, K: int, N: int, block_size: int, quant_type: int,
    training_mode: Flag = 0, transB: Flag = 1,
) -> Value:  # fmt: skip
    """x times weights [N, K] of four-bit floats, flat: two to a byte, the high half first; a scale for each block."""
    if not transB:
        raise UnsupportedError("MatMulBnb4 without transB, which training has, is not supported")
    if quant_type not in (0, 1) or block_size < 1 or min(K, N) < 1:
        raise ModelError(f"MatMulBnb4 with quant_type {quant_type}, block_size {block_size}, K {K}, N {N}")
    count, blocks = N * K, ceildiv(N * K, block_size)
    if packed.t.size != ceildiv(count, 2) or absmax.t.size != blocks:
        raise ShapeError(f"MatMulBnb4 of K {K} and N {N} has weights {packed.t} and scales {absmax.t}")
    table = np.array([*_FP4, *(-v for v in _FP4)] if quant_type == 0 else _NF4, np.float32)
    halves = [
        b.binary("shr", packed, b.scalar(4, packed.dtype)),
        b.binary("bitand", packed, b.scalar(15, packed.dtype)),
    ]
    codes = b.concat([b.reshape(h, (ceildiv(count, 2), 1)) for h in halves], 1)
    codes = b.slice(b.reshape(codes, (2 * ceildiv(count, 2),)), 0, 0, count)
    values = b.gather(b.constant(table), b.cast(codes, dtypes.int64), 0)
    scale = b.expand(b.reshape(absmax, (blocks, 1)), (blocks, block_size))
    scale = b.slice(b.reshape(scale, (blocks * block_size,)), 0, 0, count)
    w = b.reshape(b.mul(b.cast(values, x.dtype), scale), (N, K))
    return matmul(b, x, b.swap(w, 0, 1))
