"""ATen ops of neural networks: products, convolutions, pools, norms, attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnxc.errors import UnsupportedError
from onnxc.frontends.torch_fx_reduction import best
from onnxc.frontends.torch_fx_table import Call, aten, axis_of
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, always_equal, floordiv, mod, prod
from onnxc.ir.graph import Value
from onnxc.ops.conv import window_of
from onnxc.ops.pooling import pool, with_ceil
from onnxc.primitives.builder import Builder, Operand


def widened(b: Builder, *xs: Value | None) -> list[Any]:
    """float16 and bfloat16 as float32."""
    return [b.cast(x, dtypes.float32) if x is not None and x.dtype.is_float and x.dtype.bits < 32 else x for x in xs]


# ---------------------------------------------------------------- products


@aten("mm", "bmm")
def matmul(c: Call, x: Value, y: Value) -> Value:
    return c.b.matmul(*widened(c.b, x, y))


@aten("addmm", "baddbmm")
def addmm(c: Call, bias: Value, x: Value, y: Value, *, beta: float = 1, alpha: float = 1) -> Value:
    b, (bias, x, y) = c.b, widened(c.b, bias, x, y)
    product = b.matmul(x, y)
    if alpha != 1:
        product = b.mul(product, alpha)
    if beta == 0:
        return product
    return b.add(product, bias if beta == 1 else b.mul(bias, beta))


@aten("mv", "dot", "vdot")
def matvec(c: Call, x: Value, y: Value) -> Value:
    b, (x, y) = c.b, widened(c.b, x, y)
    rows = x if x.rank == 2 else b.reshape(x, (1, x.shape[0]))
    return b.reshape(b.matmul(rows, b.reshape(y, (y.shape[0], 1))), c.type.shape)


@aten("addmv")
def addmv(c: Call, bias: Value, x: Value, y: Value, *, beta: float = 1, alpha: float = 1) -> Value:
    column = addmm(c, c.b.reshape(bias, (*bias.shape, 1)), x, c.b.reshape(y, (*y.shape, 1)), beta=beta, alpha=alpha)
    return c.b.reshape(column, c.type.shape)


@aten("addbmm")
def addbmm(c: Call, bias: Value, x: Value, y: Value, *, beta: float = 1, alpha: float = 1) -> Value:
    b = c.b
    long = b.reshape(b.transpose(x, (1, 0, 2)), (x.shape[1], x.shape[0] * x.shape[2]))
    return addmm(c, bias, long, b.reshape(y, (y.shape[0] * y.shape[1], y.shape[2])), beta=beta, alpha=alpha)


@aten("_scaled_dot_product_flash_attention_for_cpu")
def attention(
    c: Call, q: Value, k: Value, v: Value, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Value | None = None, scale: float | None = None,
) -> list[Value | None]:  # fmt: skip
    """softmax(q k^T * scale + mask) v; a row all of whose keys are masked counts as zero. The second output, which
    a backward pass reads: the logarithm of each row's sum of exponentials.
    """
    if dropout_p:
        raise UnsupportedError("attention with dropout")
    b, (q, k, v, mask) = c.b, widened(c.b, q, k, v, attn_mask)
    k, v = (for_heads(b, x, q.shape[1]) for x in (k, v))
    scores, _ = attention_scores(c, q, k, mask, is_causal, scale)
    weights = b.softmax(scores, scores.rank - 1)
    if mask is not None and not is_causal:
        weights = b.where(b.isnan(weights), 0.0, weights)
    return [b.matmul(weights, v), _log_sum_exp(b, scores)]


def for_heads(b: Builder, x: Value, heads: Dim) -> Value:
    """Keys or values [batch, groups, length, width] for heads of which equally many share a group."""
    batch, groups, length, width = x.shape
    if always_equal(groups, heads):
        return x
    each = floordiv(heads, groups)
    spread = b.expand(b.reshape(x, (batch, groups, 1, length, width)), (batch, groups, each, length, width))
    return b.reshape(spread, (batch, heads, length, width))


def _log_sum_exp(b: Builder, x: Value) -> Value:
    """Over the last axis; -inf where all of it is."""
    last = [x.rank - 1]
    high = b.reduce("max", x, last, True)
    high = b.where(b.eq(high, -math.inf), 0.0, high)
    return b.add(b.log(b.reduce("sum", b.exp(b.sub(x, high)), last)), b.reshape(high, x.shape[:-1]))


def _scale(b: Builder, q: Value) -> Operand:
    """1 / sqrt(size of a head), rounded once."""
    size = q.shape[-1]
    if isinstance(size, int):
        return 1 / math.sqrt(size)
    return b.cast(b.div(1.0, b.sqrt(b.size_as(size, dtypes.float64))), q.dtype)


def attention_scores(
    c: Call, q: Value, k: Value, mask: Value | None, is_causal: bool, scale: float | None
) -> tuple[Value, Operand]:
    """q k^T * scale + mask, and the scale."""
    b = c.b
    factor = _scale(b, q) if scale is None else scale
    scores = b.mul(b.matmul(q, b.swap(k, k.rank - 2, k.rank - 1)), factor)
    if mask is not None and mask.dtype is dtypes.boolean:
        mask = b.where(mask, b.scalar(0.0, scores.dtype), -math.inf)
    if is_causal:
        rows, columns = scores.shape[-2:]
        below = b.le(b.iota(columns), b.reshape(b.iota(rows), (rows, 1)))
        mask = b.where(below, b.scalar(0.0, scores.dtype), -math.inf)
    return scores if mask is None else b.add(scores, b.cast(mask, scores.dtype)), factor


# ---------------------------------------------------------------- convolutions


def _each(value: int | Sequence[Any], count: int) -> list[Any]:
    """One entry for each spatial axis."""
    given = [value] if isinstance(value, int) else list(value)
    return given * count if len(given) == 1 else given


@aten("convolution")
def convolution(
    c: Call, x: Value, w: Value, bias: Value | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> Value:  # fmt: skip
    if x.dtype.is_integer:
        raise UnsupportedError("a convolution of integers")
    n = w.rank - 2
    single = x.rank == n + 1  # an image without a batch
    x, w, bias = widened(c.b, c.b.reshape(x, (1, *x.shape)) if single else x, w, bias)
    pads = _each(padding, n)
    shared: dict[str, Any] = {
        "strides": _each(stride, n),
        "dilations": _each(dilation, n),
        "group": groups,
        "pads": pads * 2,
    }
    if transposed:
        (y,) = c.onnx("ConvTranspose", x, w, bias, output_padding=_each(output_padding, n), **shared)
    else:
        (y,) = c.onnx("Conv", x, w, bias, **shared)
    return c.b.reshape(y, y.shape[1:]) if single else y


# ---------------------------------------------------------------- pools


def _batched(c: Call, x: Value, spatial: int) -> tuple[Value, bool]:
    single = x.rank == spatial + 1
    return (c.b.reshape(x, (1, *x.shape)) if single else x), single


def _window(kernel: Any, stride: Any, padding: Any, n: int) -> dict[str, Any]:
    sizes = _each(kernel, n)
    strides = _each(stride, n) if stride or isinstance(stride, int) else sizes
    return {"kernel_shape": sizes, "strides": strides, "pads": _each(padding, n) * 2}


def _max_pool(n: int) -> Callable[..., list[Value]]:
    def rule(
        c: Call, x: Value, kernel: Sequence[int], stride: Sequence[int] = (), padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1, ceil_mode: bool = False,
    ) -> list[Value]:  # fmt: skip
        if x.dtype.is_integer and x.dtype.bits > 16:
            raise UnsupportedError(f"the positions of the greatest of {x.dtype}")
        b, (x, single) = c.b, _batched(c, x, n)
        options = {**_window(kernel, stride, padding, n), "dilations": _each(dilation, n), "ceil_mode": int(ceil_mode)}
        y, index = c.onnx("MaxPool", x, outputs=2, **options)
        # ONNX counts positions in the whole tensor, PyTorch in each plane.
        planes = b.mul(b.iota(x.shape[0] * x.shape[1]), b.size_as(prod(x.shape[2:]), dtypes.int64))
        index = b.sub(index, b.reshape(planes, (*x.shape[:2], *(1,) * n)))
        return [b.reshape(v, v.shape[1:]) if single else v for v in (y, index)]

    return rule


@aten("avg_pool1d", "avg_pool2d", "avg_pool3d")
def average_pool(
    c: Call, x: Value, kernel: Sequence[int], stride: Sequence[int] = (), padding: int | Sequence[int] = 0,
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> Value:  # fmt: skip
    if x.dtype.is_integer:
        raise UnsupportedError("an average pool of integers")
    n = len(kernel)
    x, single = _batched(c, x, n)
    (x,) = widened(c.b, x)
    options = _window(kernel, stride, padding, n)
    if divisor_override is not None:
        window = window_of(x.shape[2:], options["kernel_shape"], options["strides"], None, options["pads"], "NOTSET")
        total = pool(c.b, "window_sum", x, with_ceil(x.shape[2:], window) if ceil_mode else window)
        y = c.b.div(total, float(divisor_override))
    else:
        counted = int(count_include_pad)
        (y,) = c.onnx("AveragePool", x, **options, ceil_mode=int(ceil_mode), count_include_pad=counted)
    return c.b.reshape(y, y.shape[1:]) if single else y


for _n in (1, 2, 3):
    aten(f"max_pool{_n}d_with_indices")(_max_pool(_n))


@aten("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool1d")
def adaptive_average(c: Call, x: Value, size: Sequence[Dim]) -> Value:
    """Windows of equal size where the sizes divide; else each window is a product with a row of weights."""
    b, (x,) = c.b, widened(c.b, x)
    lead = x.rank - len(size)
    if all(always_equal(d, 1) for d in size):
        return b.mean(x, range(lead, x.rank), True)
    for axis, want in zip(range(lead, x.rank), size, strict=True):
        have = x.shape[axis]
        if isinstance(want, int) and want and always_equal(mod(have, want), 0):
            parted = b.reshape(x, (*x.shape[:axis], want, floordiv(have, want), *x.shape[axis + 1 :]))
            x = b.mean(parted, [axis + 1])
        else:
            x = b.swap(b.matmul(b.swap(x, axis, x.rank - 1), _windows(b, have, want, x)), axis, x.rank - 1)
    return x


@aten("adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(c: Call, x: Value, size: Sequence[Dim]) -> list[Value]:
    """The greatest of each window, and where in its plane the first such stands."""
    b, lead = c.b, x.rank - len(size)
    have = x.shape[lead:]
    parted = _parted(b, x, lead, size)
    where = best(b, "max", parted, x.rank)
    positions = _parted(b, b.reshape(b.iota(prod(have)), have), 0, size)
    each, count = positions.shape[-1], prod(size)
    start = b.reshape(b.mul(b.iota(count), b.size_as(each, dtypes.int64)), size)
    index = b.gather(b.reshape(positions, (count * each,)), b.add(where, start), 0)
    return [b.reduce("max", parted, [x.rank]), index]


def _parted(b: Builder, x: Value, lead: int, size: Sequence[Dim]) -> Value:
    """Adaptive windows [..., *size, elements]. One that is shorter than others has its last element more than once."""
    for axis, want in reversed(list(enumerate(size, lead))):
        have = x.shape[axis]
        if always_equal(want, 1) or (isinstance(want, int) and want and always_equal(mod(have, want), 0)):
            x = b.reshape(x, (*x.shape[:axis], want, floordiv(have, want), *x.shape[axis + 1 :]))
        elif always_equal(want, 0):
            raise UnsupportedError("adaptive pooling to no windows")
        else:
            first, last = _limits(b, have, want)
            places = b.add(b.reshape(first, (want, 1)), b.iota(_longest(have, want)))
            x = b.gather(x, b.min(places, b.reshape(b.sub(last, 1), (want, 1))), axis)
    n = len(size)
    x = b.transpose(x, [*range(lead), *range(lead, lead + 2 * n, 2), *range(lead + 1, lead + 2 * n, 2)])
    return b.reshape(x, (*x.shape[: lead + n], prod(x.shape[lead + n :])))


def _limits(b: Builder, have: Dim, want: Dim) -> tuple[Value, Value]:
    """Where in an axis each adaptive window begins, and where it ends: [want] each."""
    if isinstance(have, int) and isinstance(want, int):
        rows = np.arange(want)
        return b.constant(rows * have // want), b.constant(-(-(rows + 1) * have // want))
    places, n, count = b.iota(want), b.size_as(have, dtypes.int64), b.size_as(want, dtypes.int64)
    last = b.div(b.add(b.mul(b.add(places, 1), n), b.sub(count, 1)), count)
    return b.div(b.mul(places, n), count), last


def _longest(have: Dim, want: Dim) -> Dim:
    """How many elements the longest adaptive window has; of open sizes, at most."""
    if isinstance(have, int) and isinstance(want, int):
        return max(-(-(i + 1) * have // want) - i * have // want for i in range(want))
    return floordiv(have + want - 2, want) + 1


def _windows(b: Builder, have: Dim, want: Dim, x: Value) -> Value:
    """[have, want] weights of the means of adaptive windows."""
    if not isinstance(have, int) or not isinstance(want, int):
        first, last = _limits(b, have, want)
        place = b.reshape(b.iota(have), (have, 1))
        inside = b.and_(b.not_(b.lt(place, first)), b.lt(place, last))
        return b.where(inside, b.div(1.0, b.cast(b.sub(last, first), x.dtype)), 0.0)
    if have * want > 1 << 22:
        raise UnsupportedError(f"adaptive pooling from {have} to {want}")
    weights = np.zeros((have, want), x.dtype.numpy)
    for i in range(want):
        start, end = i * have // want, -(-(i + 1) * have // want)
        weights[start:end, i] = 1 / (end - start)
    return b.constant(weights)


# ---------------------------------------------------------------- norms, softmax


@aten("native_layer_norm")
def native_layer_norm(
    c: Call, x: Value, shape: Sequence[Dim], weight: Value | None, bias: Value | None, eps: float
) -> list[Value]:
    b, (x, weight, bias) = c.b, widened(c.b, x, weight, bias)
    first = x.rank - len(shape)
    if weight is None:
        weight = b.full(x.shape[first:], 1.0, x.dtype)
    if not len(shape):
        raise UnsupportedError("a layer norm over no axes")
    wide = x.dtype.onnx  # the statistics' type too, which the gradient reads
    return c.onnx("LayerNormalization", x, weight, bias, axis=first, epsilon=eps, stash_type=wide, outputs=3)


@aten("native_group_norm")
def native_group_norm(
    c: Call, x: Value, weight: Value | None, bias: Value | None, n: Dim, channels: Dim, inner: Dim, group: int,
    eps: float,
) -> list[Value]:  # fmt: skip
    b, (wide, weight, bias) = c.b, widened(c.b, x, weight, bias)
    rows = b.reshape(wide, (n, group, floordiv(channels, group) * inner))
    mean = b.mean(rows, [2], True)
    centered = b.sub(rows, mean)
    inverse = b.div(1.0, b.sqrt(b.add(b.mean(b.mul(centered, centered), [2], True), eps)))
    y = b.reshape(b.mul(centered, inverse), x.shape)
    column = (channels, *(1,) * (x.rank - 2))
    y = y if weight is None else b.mul(y, b.reshape(weight, column))
    y = y if bias is None else b.add(y, b.reshape(bias, column))
    return [y, b.reshape(mean, (n, group)), b.reshape(inverse, (n, group))]


@aten("_native_batch_norm_legit_no_training")
def batch_norm(
    c: Call, x: Value, weight: Value | None, bias: Value | None, mean: Value, var: Value, momentum: float, eps: float
) -> list[Value | None]:
    b, (x, weight, bias, mean, var) = c.b, widened(c.b, x, weight, bias, mean, var)
    channels = mean.shape
    weight = b.full(channels, 1.0, x.dtype) if weight is None else weight
    bias = b.full(channels, 0.0, x.dtype) if bias is None else bias
    (y,) = c.onnx("BatchNormalization", x, weight, bias, mean, var, epsilon=eps)
    empty = b.full((0,), 0.0, x.dtype)
    return [y, empty, empty]


@aten("_softmax")
def softmax(c: Call, x: Value, axis: int, half_to_float: bool) -> Value:
    (x,) = widened(c.b, x)
    return c.b.softmax(x, axis_of(c, axis, x.rank)) if x.rank else c.b.full((), 1.0, x.dtype)


@aten("_safe_softmax")
def safe_softmax(c: Call, x: Value, axis: int, dtype: Any = None) -> Value:
    """Zero where all of a row is -inf. Of the scores of attention as `attention` has it, so that it becomes such."""
    b, (x,) = c.b, widened(c.b, c.b.cast(x, c.type.dtype))
    at = axis_of(c, axis, x.rank)
    if at == x.rank - 1 and c.sole and _is_product(x):
        return b.softmax(x, at)
    masked = b.eq(b.reduce("max", x, [at], True), -math.inf)
    return b.where(masked, 0.0, b.softmax(x, at))


def _is_product(x: Value) -> bool:
    """Whether a value is what a product gave."""
    return x.node is not None and x.node.op == "matmul"


@aten("_log_softmax")
def log_softmax(c: Call, x: Value, axis: int, half_to_float: bool) -> Value:
    (x,) = widened(c.b, x)
    if not x.rank:
        return c.b.full((), 0.0, x.dtype)
    return c.onnx("LogSoftmax", x, axis=axis_of(c, axis, x.rank))[0]  # type: ignore[no-any-return]


# ---------------------------------------------------------------- samples, dropout


@aten("grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(c: Call, x: Value, grid: Value, mode: int, padding: int, align: bool) -> Value:
    modes, paddings = ("linear", "nearest", "cubic"), ("zeros", "border", "reflection")
    x, grid = widened(c.b, x, grid)
    (y,) = c.onnx("GridSample", x, grid, mode=modes[mode], padding_mode=paddings[padding], align_corners=int(align))
    return y  # type: ignore[no-any-return]


@aten("native_dropout")
def native_dropout(c: Call, x: Value, p: float, train: bool | None) -> list[Value]:
    if train or train is None:
        raise UnsupportedError("dropout that draws: the numbers are PyTorch's generator's")
    return [x, c.b.full(x.shape, True, dtypes.boolean)]


@aten("_trilinear")
def trilinear(
    c: Call, x: Value, y: Value, z: Value, new_x: Sequence[int], new_y: Sequence[int], new_z: Sequence[int],
    summed: Sequence[int], unroll: int = 1,
) -> Value:  # fmt: skip
    """The product of three tensors, each with axes of its own of size 1 added, summed over axes."""
    rank = x.rank + len(new_x)

    def spread(v: Value, new: Sequence[int]) -> Value:
        sizes = iter(v.shape)
        return c.b.reshape(v, [1 if axis in new else next(sizes) for axis in range(rank)])

    x, y, z = widened(c.b, x, y, z)
    product = c.b.mul(c.b.mul(spread(x, new_x), spread(y, new_y)), spread(z, new_z))
    return c.b.reduce("sum", product, list(summed))


@aten("multilabel_margin_loss_forward")
def multilabel_margin_loss(c: Call, x: Value, labels: Value, reduction: int) -> list[Value]:
    """How far other classes come near to those of a list, which ends at its first -1. (PyTorch's own decomposition
    reads on.)
    """
    b, n = c.b, x.shape[-1]
    batch = x.shape[:-1]
    line = b.iota(n)
    end = b.reduce("min", b.where(b.eq(labels, -1), line, b.size_as(n, dtypes.int64)), [labels.rank - 1], True)
    valid = b.lt(line, end)
    labels = b.where(valid, labels, 0)
    (wide,) = widened(b, x)
    own = b.reshape(b.one("gather_elements", wide, labels, axis=x.rank - 1), (*batch, n, 1))
    valid = b.reshape(valid, (*batch, n, 1))
    there = b.and_(valid, b.eq(b.reshape(labels, (*batch, n, 1)), line))
    target = b.reduce("max", b.cast(there, dtypes.uint8), [x.rank - 1])
    near = b.add(b.sub(1.0, own), b.reshape(wide, (*batch, 1, n)))
    others = b.and_(valid, b.eq(b.reshape(target, (*batch, 1, n)), 0))
    counts = b.and_(others, b.lt(0.0, near))  # no NaN, then
    loss = b.reduce("sum", b.where(counts, near, b.scalar(0.0, wide.dtype)), [x.rank - 1, x.rank])
    loss = b.div(loss, b.size_as(n, wide.dtype))
    axes = list(range(loss.rank))
    if reduction:
        loss = b.mean(loss, axes) if reduction == 1 else b.reduce("sum", loss, axes)
    return [loss, b.cast(target, x.dtype)]
