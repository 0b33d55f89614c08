"""Normalizations: by batch statistics, by layer, instance, group, and local ones."""

from __future__ import annotations

from collections.abc import Sequence

from onnxc.errors import ModelError, ShapeError, UnsupportedError
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import prod
from onnxc.ir.graph import Value
from onnxc.ops.common import along, axes_of, dtype_of, flat_at_zero, float_of, is_narrow, per_channel, widened, within
from onnxc.ops.registry import Flag, op
from onnxc.primitives.builder import Builder


def moments(b: Builder, x: Value, axes: Sequence[int]) -> tuple[Value, Value, Value]:
    """(x - mean, mean, variance) over axes, which are kept with size 1."""
    mean = b.mean(x, axes, True)
    centered = b.sub(x, mean)
    square = b.derived(b.mul(centered, centered), "deviation", x, centered)
    return centered, mean, b.mean(square, axes, True)


def inverse_root(b: Builder, variance: Value, epsilon: float) -> Value:
    """1 / sqrt(variance + epsilon)."""
    return b.div(1.0, b.sqrt(b.add(variance, epsilon)))


def at_test_time(
    b: Builder, x: Value, scale: Value, bias: Value, mean: Value, var: Value, epsilon: float, spatial: bool = True,
) -> Value:  # fmt: skip
    """x * factor + offset: the statistics are constants, so both fold into weights.

    They are one number for each channel or, not `spatial`, for each element of a sample.
    """
    wide = [widened(b, v) for v in (scale, bias, mean, var)]
    wide = [b.cast(v, wide[3].dtype) for v in wide]
    factor = b.mul(wide[0], inverse_root(b, wide[3], epsilon))
    offset = b.sub(wide[1], b.mul(wide[2], factor))
    inner = b.cast(x, wide[3].dtype) if is_narrow(x.dtype) else x
    factor, offset = (b.cast(v, inner.dtype) for v in (factor, offset))
    if spatial:
        factor, offset = per_channel(b, factor, x), per_channel(b, offset, x)
    return b.cast(b.add(b.mul(inner, factor), offset), x.dtype)


@op("BatchNormalization", 7, 13)
def batch_normalization_7(
    b: Builder, x: Value, scale: Value, bias: Value, mean: Value, var: Value, *, epsilon: float = 1e-5,
    momentum: float = 0.9, spatial: Flag = 1, n_outputs: int,
) -> Value | list[Value]:  # fmt: skip
    """With more than one output in training mode. The last two are the batch's own mean and 1 / sqrt(variance +
    epsilon): the standard leaves open what of the variance is saved, and onnxruntime gives that.
    """
    if n_outputs == 1:
        return at_test_time(b, x, scale, bias, mean, var, epsilon, bool(spatial))
    if not spatial:
        raise UnsupportedError("BatchNormalization in training mode with spatial=0 is not supported")
    y, own_mean, own_var = _at_training(b, x, scale, bias, epsilon)
    inverse = inverse_root(b, own_var, epsilon)
    saved = [b.cast(b.reshape(v, mean.shape), mean.dtype) for v in (own_mean, inverse)]
    return [y, _running(b, mean, own_mean, momentum), _running(b, var, own_var, momentum), *saved][:n_outputs]


@op("BatchNormalization", 14)
def batch_normalization_14(
    b: Builder, x: Value, scale: Value, bias: Value, mean: Value, var: Value, *, epsilon: float = 1e-5,
    momentum: float = 0.9, training_mode: Flag = 0,
) -> Value | list[Value]:  # fmt: skip
    """In training mode with the batch's own statistics, which also update the running ones."""
    if not training_mode:
        return at_test_time(b, x, scale, bias, mean, var, epsilon)
    y, own_mean, own_var = _at_training(b, x, scale, bias, epsilon)
    return [y, _running(b, mean, own_mean, momentum), _running(b, var, own_var, momentum)]


def _at_training(b: Builder, x: Value, scale: Value, bias: Value, epsilon: float) -> tuple[Value, Value, Value]:
    """Normalised by the batch's own mean and variance, which follow: of each channel, kept with axes of size 1."""
    centered, mean, var = moments(b, x, [i for i in range(x.rank) if i != 1])
    factor = b.mul(per_channel(b, b.cast(scale, x.dtype), x), inverse_root(b, var, epsilon))
    return b.add(b.mul(centered, factor), per_channel(b, b.cast(bias, x.dtype), x)), mean, var


def _running(b: Builder, old: Value, new: Value, momentum: float) -> Value:
    new = b.cast(b.reshape(new, old.shape), old.dtype)
    return b.add(b.mul(old, momentum), b.mul(new, 1 - momentum))


def layer_norm(
    b: Builder, x: Value, scale: Value | None, bias: Value | None, axes: Sequence[int], epsilon: float,
    stash: DType,
) -> list[Value]:  # fmt: skip
    """(x - mean) / sqrt(var + epsilon) * scale + bias; the mean and inverse deviation in the stash type."""
    centered, mean, variance = moments(b, b.cast(x, stash), axes)
    inverse = inverse_root(b, variance, epsilon)
    y = b.cast(b.mul(centered, inverse), x.dtype)
    if scale is not None:
        y = b.mul(y, within(b, scale, y.shape))
    return [y if bias is None else b.add(y, within(b, bias, y.shape)), mean, inverse]


def stash_of(x: Value, stash_type: int) -> DType:
    """The type to compute in: the one asked for (0 leaves it to the runtime), but nothing narrower than the input."""
    stash = float_of(stash_type or 1, "stash_type")
    return stash if x.dtype.bits < stash.bits else x.dtype


@op("LayerNormalization", 17)
@op("LayerNormalization", 1, 16, unchecked=True)  # onnxruntime has it before the standard
def layer_normalization(
    b: Builder, x: Value, scale: Value, bias: Value | None = None, *, axis: int = -1, epsilon: float = 1e-5,
    stash_type: int = 1,
) -> list[Value]:  # fmt: skip
    axes, stash = range(b.axis(axis, x.rank), x.rank), stash_of(x, stash_type)
    y, *statistics = layer_norm(b, x, scale, bias, axes, epsilon, stash)
    told = dtype_of(stash_type, "stash_type") if stash_type else stash
    return [y, *(b.cast(v, told) for v in statistics)]


def rms_norm(b: Builder, x: Value, axes: Sequence[int], epsilon: float, stash: DType) -> tuple[Value, Value]:
    """x / sqrt(mean(x ** 2) + epsilon), and the inverse root itself in the stash type."""
    wide = b.cast(x, stash)
    inverse = inverse_root(b, b.mean(b.mul(wide, wide), axes, True), epsilon)
    return b.cast(b.mul(wide, inverse), x.dtype), inverse


@op("RMSNormalization", 23)
def rms_normalization(
    b: Builder, x: Value, scale: Value, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1,
) -> Value:  # fmt: skip
    normalized, _ = rms_norm(b, x, range(b.axis(axis, x.rank), x.rank), epsilon, stash_of(x, stash_type))
    return b.mul(normalized, within(b, b.cast(scale, x.dtype), x.shape))


@op("InstanceNormalization", 6)
def instance_normalization(
    b: Builder, x: Value, scale: Value, bias: Value, *, epsilon: float = 1e-5,
) -> Value:  # fmt: skip
    wide = widened(b, x)
    centered, _, variance = moments(b, wide, range(2, x.rank))
    y = b.mul(centered, inverse_root(b, variance, epsilon))
    scale, bias = (per_channel(b, b.cast(v, wide.dtype), x) for v in (scale, bias))
    return b.cast(b.add(b.mul(y, scale), bias), x.dtype)


def grouped(b: Builder, x: Value, groups: int, epsilon: float, stash: DType) -> Value:
    """[N, C, D...] normalized over each of `groups` groups of channels."""
    n, c, *spatial = x.shape
    if isinstance(c, int) and c % groups:
        raise ShapeError(f"{groups} groups do not divide the {c} channels of {x.t}")
    parts = b.reshape(b.cast(x, stash), (n, groups, c // groups * prod(spatial)))
    centered, _, variance = moments(b, parts, [2])
    return b.reshape(b.mul(centered, inverse_root(b, variance, epsilon)), x.shape)


@op("GroupNormalization", 18, 20)
def group_normalization_18(
    b: Builder, x: Value, scale: Value, bias: Value, *, epsilon: float = 1e-5, num_groups: int,
) -> Value:  # fmt: skip
    """Scale and bias are one number for each group."""
    n, c, *spatial = x.shape
    y = b.reshape(grouped(b, x, num_groups, epsilon, stash_of(x, 1)), (n, num_groups, c // num_groups * prod(spatial)))
    scale, bias = (along(b, b.cast(v, y.dtype), 3, 1) for v in (scale, bias))
    return b.cast(b.reshape(b.add(b.mul(y, scale), bias), x.shape), x.dtype)


@op("GroupNormalization", 21)
def group_normalization_21(
    b: Builder, x: Value, scale: Value, bias: Value, *, epsilon: float = 1e-5, num_groups: int,
    stash_type: int = 1,
) -> Value:  # fmt: skip
    """Scale and bias are one number for each channel."""
    y = b.cast(grouped(b, x, num_groups, epsilon, stash_of(x, stash_type)), x.dtype)
    return b.add(b.mul(y, per_channel(b, scale, x)), per_channel(b, bias, x))


@op("LRN", 1)
def lrn(
    b: Builder, x: Value, *, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0, size: int,
) -> Value:  # fmt: skip
    """x / (bias + alpha / size * sum of squares over `size` neighbouring channels) ** beta."""
    if size < 1 or x.rank < 2:
        raise ModelError(f"LRN of {x.t} over {size} channels")
    zeros, ones = (0,) * x.rank, (1,) * x.rank
    total = b.one(
        "window_sum", b.mul(x, x), kernel=(1, size, *ones[2:]), strides=ones, dilations=ones,
        low=(0, (size - 1) // 2, *zeros[2:]), high=(0, size - 1 - (size - 1) // 2, *zeros[2:]),
    )  # fmt: skip
    return b.div(x, b.pow(b.add(b.mul(total, alpha / size), bias), beta))


@op("LpNormalization", 1)
def lp_normalization(b: Builder, x: Value, *, axis: int = -1, p: int = 2) -> Value:
    """x over its p-norm along an axis; zero where the norm is zero."""
    axes = [b.axis(axis, x.rank)]
    if p not in (1, 2):
        raise UnsupportedError(f"LpNormalization with p = {p}; 1 and 2 exist")
    norm = b.reduce("sum", b.abs(x) if p == 1 else b.mul(x, x), axes, True)
    norm = norm if p == 1 else flat_at_zero(b, b.sqrt, norm)
    zero = b.eq(norm, 0.0)
    if b.differentiable:  # nothing is infinite on the way to where
        norm = b.where(zero, 1.0, norm)
    return b.where(zero, 0.0, b.div(x, norm))


@op("MeanVarianceNormalization", 9)
def mean_variance_normalization(b: Builder, x: Value, *, axes: list[int] | None = None) -> Value:
    """(x - mean) / (deviation + 1e-9)."""
    given = axes_of(b, [0, 2, 3] if axes is None else axes, x.rank, "MeanVarianceNormalization")
    centered, _, variance = moments(b, x, given or ())
    return b.div(centered, b.add(flat_at_zero(b, b.sqrt, variance), 1e-9))
