"""onnxruntime's contrib operators of quantized models."""

from __future__ import annotations

import numpy as np

from onnxc.errors import ModelError, UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import prod
from onnxc.ir.graph import Value
from onnxc.ops import activation
from onnxc.ops.com_microsoft import MS
from onnxc.ops.com_microsoft_attention import projected_attention
from onnxc.ops.common import axes_of, from_start, merge_axes, rounded, static_dim
from onnxc.ops.matmul import matmul
from onnxc.ops.quantization import (
    centered,
    dequantize_linear,
    dynamic_quantize_linear,
    integer_product,
    quantize_linear,
    to_quantized,
)  # fmt: skip
from onnxc.ops.registry import Flag, op
from onnxc.primitives.builder import Builder, constant_of


@op("DynamicQuantizeMatMul", 1, domain=MS)
def dynamic_quantize_matmul(
    b: Builder, x: Value, y: Value, y_scale: Value, y_zero: Value | None = None, bias: Value | None = None,
) -> Value:  # fmt: skip
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


def _factor(b: Builder, x: Value, scale: Value) -> Value:
    """The ratio of two scales, of tensors that have one each."""
    return b.div(_single(b, x), _single(b, scale))


def _point(b: Builder, zero: Value | None) -> Value | float:
    """A zero point as a float."""
    return 0.0 if zero is None else b.cast(_single(b, zero), dtypes.float32)


def quantize_with_point(b: Builder, x: Value, scale: Value, zero: Value | None, to: DType) -> Value:
    """round(x / scale + zero): the zero point decides what ties are rounded to."""
    return _with_point(b, b.add(b.div(x, _single(b, scale)), _point(b, zero)), zero, to)


def _with_point(b: Builder, x: Value, zero: Value | None, to: DType) -> Value:
    """Rounded and limited to the type; x has its zero point in it, which decides what ties are rounded to."""
    return to_quantized(b, x, None, zero.dtype if zero is not None else to)


@op("QLinearAdd", 1, domain=MS)
def qlinear_add(
    b: Builder, x: Value, x_scale: Value, x_zero: Value | None, y: Value, y_scale: Value, y_zero: Value | None,
    scale: Value, zero: Value | None = None,
) -> Value:  # fmt: skip
    """x * p + (y * q + offset), in onnxruntime's order: p and q are ratios of scales, all zero points in the offset."""
    p, q = _factor(b, x_scale, scale), _factor(b, y_scale, scale)
    from_y = b.mul(q, _point(b, y_zero))
    wide = [b.cast(v, dtypes.float64) if isinstance(v, Value) else v for v in (p, _point(b, x_zero), from_y)]
    both = b.cast(b.add(b.mul(wide[0], wide[1]), wide[2]), dtypes.float32)  # as a fused operation gives it
    offset = b.sub(_point(b, zero), both)
    real_x, real_y = b.cast(x, dtypes.float32), b.cast(y, dtypes.float32)
    return _with_point(b, b.add(b.mul(real_x, p), b.add(b.mul(real_y, q), offset)), zero, x.dtype)


@op("QLinearMul", 1, domain=MS)
def qlinear_mul(
    b: Builder, x: Value, x_scale: Value, x_zero: Value | None, y: Value, y_scale: Value, y_zero: Value | None,
    scale: Value, zero: Value | None = None,
) -> Value:  # fmt: skip
    """The exact product of integers, times the scales' ratio in float32, plus the zero point."""
    whole = [b.sub(b.cast(v, dtypes.float32), _point(b, point)) for v, point in ((x, x_zero), (y, y_zero))]
    factor = b.div(b.mul(_single(b, x_scale), _single(b, y_scale)), _single(b, scale))
    product = rounded(b, b.mul(b.mul(*whole), factor))
    return _with_point(b, b.add(product, _point(b, zero)), zero, x.dtype)


def quantize_as(b: Builder, x: Value, scale: Value, zero: Value | None, to: DType) -> Value:
    """Quantized to the type of the zero point, or where there is none, to the given one."""
    return _whole(b, x, scale, zero if zero is not None else b.scalar(0, to))


@op("QLinearWhere", 1, domain=MS)
def qlinear_where(
    b: Builder, condition: Value, x: Value, x_scale: Value, x_zero: Value, y: Value, y_scale: Value, y_zero: Value,
    scale: Value, zero: Value,
) -> Value:  # fmt: skip
    """Each side is quantized anew before it is chosen from."""
    sides = ((x, x_scale, x_zero), (y, y_scale, y_zero))
    left, right = (quantize_as(b, _real(b, *side), scale, zero, x.dtype) for side in sides)
    return b.where(condition, left, right)


@op("QLinearSigmoid", 1, domain=MS)
def qlinear_sigmoid(
    b: Builder, x: Value, x_scale: Value, x_zero: Value | None, scale: Value, zero: Value | None = None,
) -> Value:  # fmt: skip
    return quantize_as(b, b.sigmoid(_real(b, x, x_scale, x_zero)), scale, zero, x.dtype)


@op("QLinearLeakyRelu", 1, domain=MS)
def qlinear_leaky_relu(
    b: Builder, x: Value, x_scale: Value, x_zero: Value | None, scale: Value, zero: Value | None = None, *,
    alpha: float = 0.01,
) -> Value:  # fmt: skip
    return quantize_as(b, activation.leaky_relu(b, _real(b, x, x_scale, x_zero), alpha=alpha), scale, zero, x.dtype)


@op("QLinearSoftmax", 1, domain=MS)
def qlinear_softmax(
    b: Builder, x: Value, x_scale: Value, x_zero: Value | None, scale: Value, zero: Value, *, axis: int = -1,
    opset: int = 1,
) -> Value:  # fmt: skip
    real, axis = _real(b, x, x_scale, x_zero), b.axis(axis, x.rank)
    if opset < 13 and axis != x.rank - 1:  # the axes from `axis` on are one
        return quantize_as(b, b.reshape(b.softmax(merge_axes(b, real, axis), 1), x.shape), scale, zero, x.dtype)
    return quantize_as(b, b.softmax(real, axis), scale, zero, x.dtype)


@op("QLinearConcat", 1, domain=MS)
def qlinear_concat(b: Builder, scale: Value, zero: Value, *xs: Value, axis: int) -> Value:
    """Inputs in threes: tensor, scale, zero point."""
    if len(xs) % 3:
        raise ModelError("QLinearConcat needs a tensor, a scale and a zero point for each input")
    parts = [_real(b, *xs[i : i + 3]) for i in range(0, len(xs), 3)]
    return quantize_as(b, b.concat(parts, b.axis(axis, parts[0].rank)), scale, zero, xs[0].dtype)


@op("QLinearGlobalAveragePool", 1, domain=MS)
def qlinear_global_average_pool(
    b: Builder, x: Value, x_scale: Value, x_zero: Value | None, scale: Value, zero: Value | None = None, *,
    channels_last: Flag = 0,
) -> Value:  # fmt: skip
    """The exact sum of integers, times one float32 that has the scales and the count in it."""
    axes = range(1, x.rank - 1) if channels_last else range(2, x.rank)
    total = b.reduce("sum", centered(b, x, _scalar_zero(b, x_zero)), axes, True)
    count = b.size_as(prod(x.shape[a] for a in axes), dtypes.float32)
    factor = b.div(_single(b, x_scale), b.mul(_single(b, scale), count))
    point = _scalar_zero(b, zero)
    return to_quantized(b, b.mul(b.cast(total, dtypes.float32), factor), point, point.dtype if point else x.dtype)


def _scalar_zero(b: Builder, zero: Value | None) -> Value | None:
    return None if zero is None else _single(b, zero)


@op("QLinearReduceMean", 1, domain=MS)
def qlinear_reduce_mean(
    b: Builder, x: Value, x_scale: Value, x_zero: Value | None, scale: Value, zero: Value | None = None, *,
    axes: list[int], keepdims: Flag = 1,
) -> Value:  # fmt: skip
    found = axes_of(b, axes, x.rank, "QLinearReduceMean") or ()
    return quantize_as(b, b.mean(_real(b, x, x_scale, x_zero), found, bool(keepdims)), scale, zero, x.dtype)


@op("QGemm", 1, domain=MS)
def qgemm(
    b: Builder, x: Value, x_scale: Value, x_zero: Value, y: Value, y_scale: Value, y_zero: Value,
    c: Value | None = None, scale: Value | None = None, zero: Value | None = None, *, alpha: float = 1.0,
    transA: Flag = 0, transB: Flag = 0,
) -> Value:  # fmt: skip
    """c is int32 in units of alpha * x_scale * y_scale; without an output zero point the result is a float."""
    left = centered(b, b.swap(x, 0, 1) if transA else x, _single(b, x_zero))
    right = centered(b, b.swap(y, 0, 1) if transB else y, _single(b, y_zero))
    acc = b.matmul(left, right)
    acc = acc if c is None else b.add(acc, c)
    factor = b.mul(b.mul(_single(b, x_scale), _single(b, y_scale)), alpha)
    real = b.cast(acc, dtypes.float32)
    scaled = b.mul(real, factor if scale is None else b.div(factor, _single(b, scale)))
    return scaled if zero is None else to_quantized(b, scaled, _single(b, zero), zero.dtype)


@op("QAttention", 1, domain=MS)
def qattention(
    b: Builder, x: Value, weights: Value, bias: Value, x_scale: Value, w_scale: Value, mask: Value | None = None,
    x_zero: Value | None = None, w_zero: Value | None = None, past: Value | None = None, *, do_rotary: Flag = 0,
    mask_filter_value: float = -10000.0, num_heads: int, past_present_share_buffer: Flag = 0,
    scale: float | None = None, unidirectional: Flag = 0,
) -> list[Value]:  # fmt: skip
    """Attention whose projection is of integers: x [batch, sequence, input], weights [input, 3 * hidden]."""
    if do_rotary or past_present_share_buffer:
        raise UnsupportedError("QAttention with rotary embedding or a shared cache is not supported")
    projected = matmul_integer_to_float(b, x, weights, x_scale, w_scale, x_zero, w_zero, bias)
    sizes = [weights.shape[1] // 3] * 3
    return projected_attention(
        b, projected, sizes, num_heads, mask, past, None, mask_filter_value, scale, bool(unidirectional)
    )


@op("MatMulNBits", 1, domain=MS)
def matmul_n_bits(
    b: Builder, x: Value, packed: Value, scales: Value, zeros: Value | None = None,
    g_idx: Value | None = None, bias: Value | None = None, *, K: int, N: int, accuracy_level: int = 0,
    bits: int = 4, block_size: int, weight_prepacked: Flag = 0,
) -> Value:  # fmt: skip
    """x @ w', w [N, K] of `bits` wide integers, packed; each block of K has a scale and a zero point.

    Activations stay floats: an accuracy_level that would let a runtime quantize them changes nothing. Weights that
    are constant stay packed (`onnxc.passes.weight_only`).
    """
    if bits not in (2, 4, 8) or weight_prepacked:
        raise UnsupportedError(f"MatMulNBits with {bits} bits or prepacked weights is not supported")
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
    if g_idx is not None:
        x, whole, scale, zero = _in_order(b, g_idx, K, x, whole, scale, zero)
    w = b.mul(b.sub(b.cast(whole, scales.dtype), zero), scale)
    w = b.slice(b.reshape(w, (N, prod(whole.shape[1:]))), 1, 0, K)
    out = matmul(b, x, b.swap(b.cast(w, x.dtype), 0, 1))
    return out if bias is None else b.add(out, bias)


@op("MatMulFpQ4", 1, domain=MS)
def matmul_fp_q4(b: Builder, x: Value, blob: Value, shape: Value, *, blk_quant_type: int = 1) -> Value:
    """x @ w, w [K, N] of 4-bit integers: column by column, and in each block by block, a float32 scale, for the type 1
    a zero point, and 16 bytes of 32 numbers, the first 16 of which are their lower halves.
    """
    if blk_quant_type not in (0, 1):  # of 2, onnxruntime's documentation and kernel say different things
        raise UnsupportedError(f"MatMulFpQ4 with the blk_quant_type {blk_quant_type} is not supported: 0 and 1 are")
    k, n = b.static_ints(shape, "the B_shape of MatMulFpQ4")
    data, size, has_zero = constant_of(blob), 32, blk_quant_type == 1
    blocks, head = -(-k // size), 5 if has_zero else 4
    if data is None:
        raise UnsupportedError("MatMulFpQ4 with weights that are not constant is not supported")
    if min(k, n) < 1 or data.size != n * blocks * (head + size // 2):
        raise ModelError(f"MatMulFpQ4: {data.size} bytes are not those of weights [{k}, {n}] in blocks of {size}")
    rows = np.ascontiguousarray(data).reshape(n, blocks, head + size // 2)
    halves = rows[..., head:]
    numbers = np.concatenate([halves & 15, halves >> 4], 2)
    scales = np.ascontiguousarray(rows[..., :4]).view(np.float32)[..., 0]
    zeros = b.constant(rows[..., 4].astype(np.float32)) if has_zero else None
    packed = b.constant(numbers[..., ::2] | numbers[..., 1::2] << 4)
    return matmul_n_bits(b, x, packed, b.constant(np.ascontiguousarray(scales)), zeros, K=k, N=n, block_size=size)


@op("GatherBlockQuantized", 1, domain=MS)
def gather_block_quantized(
    b: Builder, data: Value, indices: Value, scales: Value, zeros: Value | None = None, *, bits: int = 4,
    block_size: int = 128, gather_axis: int = 0, quantize_axis: int = 1,
) -> Value:  # fmt: skip
    """Rows of a table in blocks that share a scale. uint8 is packed along the last axis, centered where no zero is."""
    codes, quantized = data, b.axis(quantize_axis, data.rank)
    if data.dtype is dtypes.uint8:
        if bits not in (2, 4, 8):
            raise UnsupportedError(f"GatherBlockQuantized with {bits} bits is not supported")
        codes = unpacked_last(b, data, bits)
        zeros = b.scalar(1 << (bits - 1), dtypes.uint8) if zeros is None else unpacked_last(b, zeros, bits)
    elif data.dtype.bits == 4 != bits:
        raise ModelError(f"GatherBlockQuantized of {data.t} has {bits} bits; there are 4 in an element")
    if zeros is not None and zeros.rank:
        zeros = b.slice(zeros, zeros.rank - 1, 0, scales.shape[-1])
    table = dequantize_linear(b, codes, scales, zeros, axis=quantized, block_size=block_size)
    return b.gather(table, indices, b.axis(gather_axis, data.rank))


def unpacked_last(b: Builder, x: Value, bits: int) -> Value:
    """[..., bytes] as [..., bytes * 8 / bits]: the lowest bits come first."""
    flat = _unpacked(b, b.reshape(x, (prod(x.shape[:-1]), x.shape[-1])), bits)
    return b.reshape(flat, (*x.shape[:-1], x.shape[-1] * (8 // bits)))


def _in_order(
    b: Builder, g_idx: Value, k: int, x: Value, whole: Value, scale: Value, zero: Value
) -> tuple[Value, Value, Value, Value]:
    """Columns of x and weights [N, K] in the order of their groups: g_idx says whose scale each of them has."""
    if g_idx.rank != 1 or static_dim(g_idx.shape[0], "the size of g_idx") < k:
        raise ModelError(f"g_idx of MatMulNBits names a group for each of {k} rows, and is {g_idx.t}")
    group = constant_of(g_idx)
    if group is None:  # as they are: it is for weights that stay packed that groups had better lie together
        order, groups = np.arange(k), from_start(b, b.slice(g_idx, 0, 0, k), scale.shape[1])
    else:
        if group[:k].min(initial=0) < 0 or group[:k].max(initial=0) >= scale.shape[1]:
            raise UnsupportedError("MatMulNBits with a g_idx that names no block is not supported")
        order = np.argsort(group[:k], kind="stable")
        groups = b.constant(group[:k][order].astype(np.int64))

    def rows(v: Value) -> Value:  # of each column's group
        return v if v.rank == 0 else b.gather(b.reshape(v, v.shape[:2]), groups, 1)

    if (order != np.arange(k)).any():
        x = b.gather(x, b.constant(order.astype(np.int64)), x.rank - 1)
    whole = b.reshape(whole, (whole.shape[0], prod(whole.shape[1:])))
    return x, b.gather(whole, b.constant(order.astype(np.int64)), 1), rows(scale), rows(zero)


def _unpacked(b: Builder, x: Value, bits: int) -> Value:
    """[n, bytes] as [n, bytes * 8 / bits]: the lowest bits come first."""
    if bits == 8:
        return x
    mask = b.scalar((1 << bits) - 1, x.dtype)
    shifts = [b.scalar(s, x.dtype) for s in range(0, 8, bits)]
    parts = [b.reshape(b.binary("bitand", b.binary("shr", x, s), mask), (*x.shape, 1)) for s in shifts]
    return b.reshape(b.concat(parts, 2), (x.shape[0], x.shape[1] * len(shifts)))
