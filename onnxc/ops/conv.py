"""Convolutions. Their padding rules serve the pools too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnxc.errors import ModelError, ShapeError
from onnxc.ir.expr import Dim, ceildiv, maximum, minimum
from onnxc.ir.graph import Value
from onnxc.ops.common import static_dim, static_shape
from onnxc.ops.registry import op
from onnxc.primitives.builder import Builder


@dataclass(frozen=True)
class Window:
    """A window that slides over the spatial axes of a tensor: one entry for each axis."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    low: tuple[Dim, ...]
    high: tuple[Dim, ...]

    @property
    def spans(self) -> tuple[int, ...]:
        """Positions from a window's first element to its last, both counted."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilations, strict=True))


def window_of(
    spatial: Sequence[Dim], kernel: Sequence[int], strides: Sequence[int] | None,
    dilations: Sequence[int] | None, pads: Sequence[int] | None, auto_pad: str,
) -> Window:  # fmt: skip
    """ONNX's attributes with their defaults filled in and auto_pad resolved."""
    n = len(spatial)
    kernel, strides, dilations = tuple(kernel), tuple(strides or (1,) * n), tuple(dilations or (1,) * n)
    given = tuple(pads or (0,) * (2 * n))
    if not len(kernel) == len(strides) == len(dilations) == n or len(given) != 2 * n:
        raise ShapeError(
            f"kernel {kernel}, strides {strides}, dilations {dilations}, pads {given} for {n} spatial axes"
        )
    if min(*kernel, *strides, *dilations) < 1:
        raise ModelError(f"kernel {kernel}, strides {strides} and dilations {dilations} must be positive")
    low, high = given[:n], given[n:]
    if auto_pad == "VALID":
        low = high = (0,) * n
    elif auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        spans = Window(kernel, strides, dilations, low, high).spans
        total = [
            maximum((ceildiv(d, s) - 1) * s + span - d, 0)
            for d, s, span in zip(spatial, strides, spans, strict=True)
        ]
        small, large = tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
        low, high = (small, large) if auto_pad == "SAME_UPPER" else (large, small)  # type: ignore[assignment]
    elif auto_pad not in ("NOTSET", ""):
        raise ModelError(f"auto_pad {auto_pad!r} is none of NOTSET, VALID, SAME_UPPER, SAME_LOWER")
    return Window(kernel, strides, dilations, low, high)


def with_bias(b: Builder, y: Value, bias: Value | None) -> Value:
    """A bias [M] added along the channels."""
    return y if bias is None else b.add(y, b.reshape(bias, (1, *bias.shape, *(1,) * (y.rank - 2))))


def convolve(b: Builder, x: Value, w: Value, window: Window, group: int) -> Value:
    """The conv primitive."""
    return b.one(
        "conv",
        x,
        w,
        strides=window.strides,
        low=window.low,
        high=window.high,
        dilations=window.dilations,
        groups=group,
    )


@op("Conv", 1)
def conv(
    b: Builder, x: Value, w: Value, bias: Value | None = None, *, auto_pad: str = "NOTSET",
    dilations: list[int] | None = None, group: int = 1, kernel_shape: list[int] | None = None,
    pads: list[int] | None = None, strides: list[int] | None = None,
) -> Value:  # fmt: skip
    kernel = static_shape(w.shape[2:], "the kernel of Conv")
    if kernel_shape and tuple(kernel_shape) != kernel:
        raise ShapeError(f"Conv has the kernel_shape {kernel_shape}, but its weights are {w.t}")
    window = window_of(x.shape[2:], kernel, strides, dilations, pads, auto_pad)
    return with_bias(b, convolve(b, x, w, window, group), bias)


@op("ConvTranspose", 1)
def conv_transpose(
    b: Builder, x: Value, w: Value, bias: Value | None = None, *, auto_pad: str = "NOTSET",
    dilations: list[int] | None = None, group: int = 1, kernel_shape: list[int] | None = None,
    output_padding: list[int] | None = None, output_shape: list[int] | None = None,
    pads: list[int] | None = None, strides: list[int] | None = None,
) -> Value:  # fmt: skip
    """The gradient of Conv: x with stride - 1 zeros between elements, convolved with the mirrored kernel."""
    kernel = static_shape(w.shape[2:], "the kernel of ConvTranspose")
    n = len(kernel)
    plain = "NOTSET" if auto_pad.startswith("SAME") else auto_pad
    window = window_of(x.shape[2:], kernel, strides, dilations, pads, plain)
    extra: tuple[Dim, ...] = tuple(output_padding or (0,) * n)
    if output_shape or auto_pad.startswith("SAME"):
        goal = (
            output_shape[-n:]
            if output_shape
            else [d * s for d, s in zip(x.shape[2:], window.strides, strict=True)]
        )
        low, high, extra = _transposed_pads(x.shape[2:], window, extra, goal, auto_pad)
    else:
        low, high = window.low, window.high
    spread = b.pad(x, (0,) * x.rank, (0,) * x.rank, 0, (0, 0, *(s - 1 for s in window.strides)))
    before = [span - 1 - p for span, p in zip(window.spans, low, strict=True)]
    after = [span - 1 - p + e for span, p, e in zip(window.spans, high, extra, strict=True)]
    for i in range(n):  # padding by more than the kernel reaches crops the input
        crop = minimum(before[i], 0), minimum(after[i], 0)
        if crop != (0, 0):
            spread = b.slice(spread, i + 2, -crop[0], spread.shape[i + 2] + crop[1])
    inner = Window(
        kernel,
        (1,) * n,
        window.dilations,
        tuple(maximum(d, 0) for d in before),
        tuple(maximum(d, 0) for d in after),
    )
    return with_bias(b, convolve(b, spread, mirrored(b, w, group), inner, group), bias)


def _transposed_pads(
    spatial: Sequence[Dim], window: Window, extra: Sequence[Dim], goal: Sequence[Dim], auto_pad: str,
) -> tuple[tuple[Dim, ...], ...]:  # fmt: skip
    """The padding (low, high) that gives the wanted output size, and what to add at the end where none does.

    SAME_UPPER takes what is odd off the end.
    """
    low, high, more = [], [], []
    for d, s, span, e, size in zip(spatial, window.strides, window.spans, extra, goal, strict=True):
        excess = s * (d - 1) + e + span - size
        total = maximum(excess, 0)
        half = total // 2
        low.append(half if auto_pad == "SAME_UPPER" else total - half)
        high.append(total - low[-1])
        more.append(e + total - excess)
    return tuple(low), tuple(high), tuple(more)


def mirrored(b: Builder, w: Value, group: int) -> Value:
    """Weights [C, M / group, k...] of ConvTranspose as those of Conv, [M, C / group, k...] reversed."""
    c, m, *kernel = w.shape
    spatial = range(2, w.rank)
    if group == 1:
        return b.flip(b.swap(w, 0, 1), list(spatial))
    parts = b.swap(b.reshape(w, (group, c // group, m, *kernel)), 1, 2)
    return b.flip(b.reshape(parts, (group * m, c // group, *kernel)), list(spatial))


@op("CausalConvWithState", 27)
def causal_conv_with_state(
    b: Builder, x: Value, w: Value, bias: Value | None = None, past_state: Value | None = None, *,
    activation: str = "none",
) -> list[Value]:  # fmt: skip
    """A depthwise convolution of [batch, channels, length] that looks back only, and what it keeps."""
    reach = static_dim(w.shape[2], "the kernel of CausalConvWithState") - 1
    if activation not in ("none", "silu", "swish"):
        raise ModelError(f"CausalConvWithState has the activation {activation!r}; none, silu and swish exist")
    seen = b.pad(x, (0, 0, reach), (0, 0, 0)) if past_state is None else b.concat([past_state, x], 2)
    window = Window((reach + 1,), (1,), (1,), (0,), (0,))
    y = with_bias(
        b, convolve(b, seen, w, window, static_dim(w.shape[0], "the channels of CausalConvWithState")), bias
    )
    state = b.slice(seen, 2, seen.shape[2] - reach, seen.shape[2])
    return [y if activation == "none" else b.mul(y, b.sigmoid(y)), state]
