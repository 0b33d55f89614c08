"""Ops for which PyTorch has no decomposition, or one for real numbers alone, as compositions of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.nn import functional

aten = torch.ops.aten


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


def nan_to_num(
    x: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Tensor:  # fmt: skip
    """``aten.nan_to_num``: of complex numbers, both parts."""
    if not x.is_complex():
        return decomposition_table[aten.nan_to_num.default](x, nan, posinf, neginf)
    return torch.complex(*(part.nan_to_num(nan, posinf, neginf) for part in (x.real, x.imag)))


def embedding_renorm(table: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """``aten.embedding_renorm``: rows that are looked up, and longer than `max_norm`, become as long as that."""
    norms = torch.linalg.vector_norm(table, norm_type, 1)
    used = torch.zeros_like(norms).index_fill(0, indices.reshape(-1), 1.0)
    scale = (max_norm / (norms.double() + 1e-7)).to(table.dtype)
    return table * torch.where((used != 0) & (norms > max_norm), scale, 1.0)[:, None]


def int_mm(x: Tensor, y: Tensor) -> Tensor:
    """``aten._int_mm``: of int8, summed in int32."""
    return x.to(torch.int32) @ y.to(torch.int32)


def bernoulli(x: Tensor, *, generator: Any = None) -> Tensor:
    """``aten.bernoulli``: ones with these probabilities. (PyTorch's own draws float32 for float64, too, and takes any
    number for a probability.)
    """
    return bernoulli_of(x, x, generator=generator)


def bernoulli_of(like: Tensor, p: Tensor, *, generator: Any = None) -> Any:
    """``aten.bernoulli.Tensor``: in the type of another tensor."""
    if generator is not None:
        return NotImplemented
    torch._assert_async(((p >= 0) & (p <= 1)).all(), "bernoulli: a probability is not between 0 and 1")
    drawn = torch.rand(like.shape, dtype=torch.float64 if p.dtype is torch.float64 else torch.float32)
    return (drawn < p).to(like.dtype)


def multinomial(p: Tensor, count: int, replacement: bool = False, *, generator: Any = None) -> Any:
    """``aten.multinomial``, as eager PyTorch draws: several places with replacement by uniform numbers and running
    sums, and else those where p over exponential numbers is the greatest.
    """
    if generator is not None or not p.is_floating_point() or p.numel() == 0:
        return NotImplemented
    if count < 1 or (count > p.shape[-1] and not replacement):
        return NotImplemented
    name = "multinomial: a probability is"
    torch._assert_async(((p >= 0) & (p < float("inf"))).all(), f"{name} negative, infinite or NaN")
    torch._assert_async((p.sum(-1) != 0).all(), f"{name} not there: their sum is 0")
    if replacement and count != 1:
        return _places(
            p.to(torch.promote_types(p.dtype, torch.float32)), torch.rand(*p.shape[:-1], count, dtype=torch.float64)
        )
    race = p / aten.exponential(torch.empty_like(p), 1.0)
    return race.argmax(-1, keepdim=True) if count == 1 else race.topk(count).indices


def _places(p: Tensor, drawn: Tensor) -> Tensor:
    """The first places where the share of what is up to there is no less than these numbers; else the last."""
    sums = p.cumsum(-1)
    shares = (sums / sums[..., -1:])[..., :-1].contiguous()
    return torch.searchsorted(shares.double(), drawn)


def normal(mean: Any, std: Any = 1.0, *, generator: Any = None) -> Any:
    """``aten.normal`` with tensors for the mean, the deviation or both, drawn as eager PyTorch draws them."""
    if generator is not None:
        return NotImplemented
    shape = torch.broadcast_shapes(*(x.shape for x in (mean, std) if isinstance(x, Tensor)))
    like = mean if isinstance(mean, Tensor) else std
    made = torch.empty(shape, dtype=like.dtype)
    if not isinstance(std, Tensor):
        return aten.normal_functional(made, 0.0, std) + mean
    torch._assert_async((std >= 0).all(), "normal: a standard deviation is negative, or NaN")
    return (aten.normal_functional(made) * std + mean).to(like.dtype)


def new_zeros_with_same_feature_meta(x: Tensor, other: Tensor, *, self_num_batch_dims: int = 0) -> Tensor:
    """``aten._new_zeros_with_same_feature_meta``, of derivatives in forward mode: zeros for each of some first axes."""
    return other.new_zeros((*x.shape[:self_num_batch_dims], *other.shape))


def zeros(size: Sequence[Any], *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """``aten._efficientzerotensor``, of derivatives in forward mode: zeros without memory of their own."""
    return torch.zeros(size, dtype=dtype)


# ---------------------------------------------------------------- histograms


def _limits(x: Tensor, name: str, middle: float, margin: float) -> tuple[Tensor, Tensor]:
    """The least and the greatest element, moved apart by the margin where they are equal, as `middle` is where there
    is none.
    """
    if x.numel() == 0:
        return x.new_full((), middle - margin), x.new_full((), middle + margin)
    low, high = torch.aminmax(x)
    torch._assert_async(low.isfinite() & high.isfinite(), f"{name}: the range of its elements is not finite")
    apart = torch.where(low == high, margin, 0.0)
    return low - apart, high + apart


def histc(x: Tensor, bins: int = 100, low: float = 0, high: float = 0) -> Any:
    """``aten.histc`` whose limits are those of the data: there is a rule for others."""
    if low != high:
        return NotImplemented
    least, greatest = _limits(x, "histc", low, 1.0)
    place = ((x - least) / (greatest - least) * bins).clamp(max=bins - 1)
    inside = (least <= x) & (x <= greatest)
    return _counted(torch.where(inside, place, bins), bins)


def _counted(place: Tensor, bins: int, weight: Tensor | None = None) -> Tensor:
    """How many elements, or of what weight, are at each place below `bins`."""
    one = torch.ones_like(place) if weight is None else weight
    flat = place.reshape(-1).to(torch.int64)
    return one.new_zeros(bins + 1).scatter_add(0, flat, one.reshape(-1))[:bins]


def histogram(
    x: Tensor, bins: int = 100, *, range: list[float] | None = None, weight: Tensor | None = None, density: bool = False
) -> tuple[Tensor, Tensor]:
    """``aten.histogram`` with a number of bins of one width: the counts, and the bins' edges."""
    if range is None:
        low, high = _limits(x, "histogram", 0.5, 0.5)
    else:
        low, high = (x.new_full((), v) for v in (range if range[0] != range[1] else (range[0] - 0.5, range[1] + 0.5)))
    steps = torch.arange(bins + 1)
    step = (high - low) / bins
    edges = torch.where(steps < (bins + 1) // 2, low + step * steps, high - step * (bins - steps))  # as linspace's
    return histogram_of_edges(x, edges, weight=weight, density=density)


def histogram_of_edges(
    x: Tensor, bins: Tensor, *, weight: Tensor | None = None, density: bool = False
) -> tuple[Tensor, Tensor]:
    """``aten.histogram`` with the bins' edges: the right one is no part of a bin, but of the last."""
    last = bins.shape[0] - 1
    place = torch.searchsorted(bins, x, right=True) - 1
    place = torch.where((place == last) & (x == bins[-1]), last - 1, place)
    place = torch.where((place < 0) | x.isnan(), last, place)
    counts = _counted(place, last, torch.ones_like(x) if weight is None else weight)
    return counts / counts.sum() / bins.diff() if density else counts, bins.clone()


# ---------------------------------------------------------------- quantization that training imitates


def _imitated(x: Tensor, scale: Any, zero: Any, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Elements at the nearest of the levels `low` to `high`, of which `zero` is 0 and one is `scale` above the next;
    and which of them lie between the levels.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    at = wide * (scale.reciprocal() if isinstance(scale, Tensor) else float(np.float32(1) / np.float32(scale)))
    is_whole = not isinstance(zero, Tensor) or not zero.is_floating_point()
    level = zero + at.round() if is_whole else (zero + at).round()
    level = torch.where(level.isnan(), low - 1, level)  # eager PyTorch's integer for NaN is the least
    found = (level.clamp(low, high) - zero).float() * scale
    return found.to(x.dtype), (low <= level) & (level <= high)


def fake_quantize(x: Tensor, scale: float, zero_point: int, low: int, high: int) -> tuple[Tensor, Tensor]:
    """``aten.fake_quantize_per_tensor_affine_cachemask``."""
    return _imitated(x, float(np.float32(scale)), zero_point, low, high)


def fake_quantize_by_tensors(
    x: Tensor, scale: Tensor, zero_point: Tensor, enabled: Tensor, low: int, high: int
) -> tuple[Tensor, Tensor]:
    """``aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams``, which a flag switches off."""
    found, kept = _imitated(x, scale.reshape(()), zero_point.reshape(()), low, high)
    off = enabled.reshape(-1)[0] == 0
    return torch.where(off, x, found), off | kept


def fake_quantize_channels(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, low: int, high: int
) -> tuple[Tensor, Tensor]:
    """``aten.fake_quantize_per_channel_affine_cachemask``."""
    scale, zero_point = _along(x, axis, scale, zero_point)
    return _imitated(x, scale, zero_point, low, high)


def learned(x: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int, factor: float = 1.0) -> Tensor:
    """``aten._fake_quantize_learnable_per_tensor_affine``."""
    return learned_channels(x, scale[:1], zero_point[:1], 0, low, high, factor)


def learned_channels(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, low: int, high: int, factor: float = 1.0
) -> Tensor:
    """``aten._fake_quantize_learnable_per_channel_affine``."""
    scale, zero = _along(x, axis, scale, zero_point.round().clamp(low, high))
    return _imitated(x, scale, zero.to(torch.int32), low, high)[0]


def learned_backward(
    dy: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int, factor: float = 1.0
) -> Any:
    """The derivatives by elements, scale and zero point, which is rounded otherwise than on the way forward."""
    zero = (zero_point[:1] + 0.5).clamp(low, high).trunc()
    return _learned_backward(dy, x, scale[:1], zero, 0, low, high, factor)


def learned_channels_backward(
    dy: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, low: int, high: int, factor: float = 1.0
) -> Any:
    """The derivatives by elements, scales and zero points."""
    return _learned_backward(dy, x, scale, zero_point.round().clamp(low, high), axis, low, high, factor)


def _learned_backward(
    dy: Tensor, x: Tensor, scales: Tensor, zeros: Tensor, axis: int, low: int, high: int, factor: float
) -> Any:
    """What lies between the levels changes with x, and the rest with scale and zero point."""
    if dy.dtype is not torch.float32 or x.dtype is not torch.float32 or not x.numel():
        return NotImplemented  # errors, and results that share memory
    scale, zero = _along(x, axis, scales, zeros)
    level = (zero + x * scale.reciprocal()).round()
    level = torch.where(level.isnan(), low - 1.0, level)  # as on the way forward
    inside, at = (low <= level) & (level <= high), level.clamp(low, high)
    by_scale = torch.where(inside, ((at - zero) * scale - x) / scale, at - zero)
    others = [k for k in range(x.dim()) if k != axis % x.dim() or len(scales) == 1]
    by = (dy * by_scale * factor, torch.where(inside, 0.0, dy * -scale * factor))
    return torch.where(inside, dy, 0.0), *(d.sum(others).reshape(scales.shape) for d in by)


def _along(x: Tensor, axis: int, *numbers: Tensor) -> tuple[Tensor, ...]:
    """A number of each channel, or one of all, beside x."""
    shape = [-1 if k == axis % x.dim() else 1 for k in range(x.dim())]
    return tuple(n.reshape(shape) for n in numbers)


COMPOSITES: dict[Any, Callable[..., Any]] = {
    aten.nonzero_static.default: nonzero_static,
    aten.rrelu_with_noise_functional.default: rrelu,
    aten.nan_to_num.default: nan_to_num,
    aten.embedding_renorm.default: embedding_renorm,
    aten._int_mm.default: int_mm,
    aten.bernoulli.default: bernoulli,
    aten.bernoulli.Tensor: bernoulli_of,
    aten.multinomial.default: multinomial,
    aten.normal.Tensor_float: normal,
    aten.normal.float_Tensor: normal,
    aten.normal.Tensor_Tensor: normal,
    aten._new_zeros_with_same_feature_meta.default: new_zeros_with_same_feature_meta,
    aten._efficientzerotensor.default: zeros,
    aten.histc.default: histc,
    aten.histogram.bin_ct: histogram,
    aten.histogram.bins_tensor: histogram_of_edges,
    aten.fake_quantize_per_tensor_affine_cachemask.default: fake_quantize,
    aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: fake_quantize_by_tensors,
    aten.fake_quantize_per_channel_affine_cachemask.default: fake_quantize_channels,
    aten._fake_quantize_learnable_per_tensor_affine.default: learned,
    aten._fake_quantize_learnable_per_tensor_affine_backward.default: learned_backward,
    aten._fake_quantize_learnable_per_channel_affine.default: learned_channels,
    aten._fake_quantize_learnable_per_channel_affine_backward.default: learned_channels_backward,
}
