"""Convolutions. Their padding rules serve the pools too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from onnxc.errors import LimitError, ModelError, ShapeError
from onnxc.ir.expr import Dim, ceildiv, floordiv, is_nonnegative, maximum, prod
from onnxc.ir.graph import Value
from onnxc.ops.common import per_channel, static_dim, static_shape
from onnxc.ops.registry import op
from onnxc.primitives.builder import Builder, constant_of


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

    def counts(self, spatial: Sequence[Dim]) -> list[Dim]:
        """How many places there are for it along each axis of these sizes."""
        padded = [low + d + high for low, d, high in zip(self.low, spatial, self.high, strict=True)]
        return [floordiv(d - span, s) + 1 for d, span, s in zip(padded, self.spans, self.strides, strict=True)]


def window_of(
    spatial: Sequence[Dim], kernel: Sequence[int], strides: Sequence[int] | None,
    dilations: Sequence[int] | None, pads: Sequence[int] | None, auto_pad: str,
) -> Window:  # fmt: skip
    """ONNX's attributes with their defaults filled in and auto_pad resolved."""
    n = len(spatial)
    if n == 0:
        raise ShapeError("there is no axis for a window: an image is [N, C, ...]")
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
            maximum((ceildiv(d, s) - 1) * s + span - d, 0) for d, s, span in zip(spatial, strides, spans, strict=True)
        ]
        small, large = tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
        low, high = (small, large) if auto_pad == "SAME_UPPER" else (large, small)  # type: ignore[assignment]
    elif auto_pad not in ("NOTSET", ""):
        raise ModelError(f"auto_pad {auto_pad!r} is none of NOTSET, VALID, SAME_UPPER, SAME_LOWER")
    return Window(kernel, strides, dilations, low, high)


def kernel_of(what: str, x: Value, w: Value, group: int, kernel_shape: Sequence[int] | None) -> tuple[int, ...]:
    """The sizes of the kernel that weights hold; ShapeError where they are none, or not those that are said."""
    if x.rank < 3 or w.rank != x.rank:
        raise ShapeError(f"{what} takes an image [N, C, ...] and weights of its rank, not {x.t} and {w.t}")
    if group < 1:
        raise ModelError(f"{what} has {group} groups")
    kernel = static_shape(w.shape[2:], f"the kernel of {what}")
    if kernel_shape and tuple(kernel_shape) != kernel:
        raise ShapeError(f"{what} has the kernel_shape {tuple(kernel_shape)}, but its weights are {w.t}")
    return kernel


def check_pads(what: str, pads: Sequence[int] | None, auto_pad: str) -> None:
    """ModelError for a convolution that says in two ways how it is padded. (Pools go by auto_pad, as elsewhere.)"""
    if any(pads or ()) and auto_pad not in ("NOTSET", ""):
        raise ModelError(f"{what} has both auto_pad {auto_pad!r} and pads {list(pads or ())}: leave one of them out")


def with_bias(b: Builder, y: Value, bias: Value | None) -> Value:
    """A bias [M] added along the channels."""
    return y if bias is None else b.add(y, per_channel(b, bias, y))


def convolve(b: Builder, x: Value, w: Value, window: Window, group: int) -> Value:
    """The conv primitive, of an image without what negative padding cuts off: kernels take none."""
    x, low, high = _cropped(b, x, window.low, window.high)
    return b.one(
        "conv",
        x,
        w,
        strides=window.strides,
        low=low,
        high=high,
        dilations=window.dilations,
        groups=group,
    )


def _cropped(
    b: Builder, x: Value, before: Sequence[Dim], after: Sequence[Dim]
) -> tuple[Value, tuple[Dim, ...], tuple[Dim, ...]]:
    """An image without what negative padding cuts off, and the padding that is left. Where an end cuts off some of what
    the other one adds, that is added first; open sizes are taken to be those of some pixels.
    """
    lows, highs = ([maximum(d, 0) for d in ends] for ends in (before, after))
    for i, axis in enumerate(range(2, x.rank)):
        first, last = maximum(-before[i], 0), maximum(-after[i], 0)
        if (first, last) == (0, 0):
            continue
        size = x.shape[axis] if isinstance(x.shape[axis], int) else maximum(x.shape[axis], 1)
        if (lows[i], highs[i]) != (0, 0) and not is_nonnegative(size - first - last):
            low, high = ([ends[i] if k == axis else 0 for k in range(x.rank)] for ends in (lows, highs))
            x = b.pad(x, low, high)
            lows[i] = highs[i] = 0
        x = b.part(x, axis, first, x.shape[axis] - first - last)
    return x, tuple(lows), tuple(highs)


@op("Conv", 1)
def conv(
    b: Builder, x: Value, w: Value, bias: Value | None = None, *, auto_pad: str = "NOTSET",
    dilations: list[int] | None = None, group: int = 1, kernel_shape: list[int] | None = None,
    pads: list[int] | None = None, strides: list[int] | None = None,
) -> Value:  # fmt: skip
    check_pads("Conv", pads, auto_pad)
    kernel = kernel_of("Conv", x, w, group, kernel_shape)
    window = window_of(x.shape[2:], kernel, strides, dilations, pads, auto_pad)
    return with_bias(b, convolve(b, x, w, window, group), bias)


@op("ConvTranspose", 1)
def conv_transpose(
    b: Builder, x: Value, w: Value, bias: Value | None = None, *, auto_pad: str = "NOTSET",
    dilations: list[int] | None = None, group: int = 1, kernel_shape: list[int] | None = None,
    output_padding: list[int] | None = None, output_shape: list[int] | None = None,
    pads: list[int] | None = None, strides: list[int] | None = None,
) -> Value:  # fmt: skip
    """The gradient of Conv: each output position of one remainder by the stride meets the same taps of the kernel."""
    check_pads("ConvTranspose", pads, auto_pad)
    kernel = kernel_of("ConvTranspose", x, w, group, kernel_shape)
    if isinstance(w.shape[0], int) and w.shape[0] % group:
        raise ShapeError(f"ConvTranspose of {x.t} with weights {w.t}: channels do not fit {group} groups")
    n = len(kernel)
    if output_shape and len(output_shape) not in (n, n + 2):
        raise ShapeError(f"ConvTranspose has the output_shape {output_shape} for {n} spatial axes")
    plain = "NOTSET" if auto_pad.startswith("SAME") else auto_pad
    window = window_of(x.shape[2:], kernel, strides, dilations, pads, plain)
    extra: tuple[Dim, ...] = tuple(output_padding or (0,) * n)
    if output_shape or auto_pad.startswith("SAME"):
        low, high, extra = _transposed_pads(x.shape[2:], window, extra, (output_shape or ())[-n:], auto_pad)
    else:
        low, high = window.low, window.high
    if not _is_finite(w):
        return with_bias(b, _by_taps(b, x, w, window, low, high, extra, group), bias)
    if all(d == 1 for d in (*x.shape[2:], *window.dilations)):
        return with_bias(b, _of_one_pixel(b, x, w, low, high, extra, group), bias)
    maps = static_dim(w.shape[1], "the channels of ConvTranspose") if group == 1 else 0
    phases = _phases(x.shape[2:], window, low, high, extra, maps)
    y = _spread(b, x, w, window, low, high, extra, group) if phases is None else _interleave(b, x, w, phases, group)
    return with_bias(b, y, bias)


def _is_finite(w: Value) -> bool:
    """Whether no weight is known to be infinite or NaN: what pads an image may be multiplied with it."""
    array = constant_of(w)
    return array is None or bool(np.isfinite(array).all())


def _by_taps(
    b: Builder, x: Value, w: Value, window: Window, low: Sequence[Dim], high: Sequence[Dim], extra: Sequence[Dim],
    group: int,
) -> Value:  # fmt: skip
    """A transposed convolution as it is defined: the products with each tap, added up where it puts them."""
    taps = math.prod(window.kernel)
    if taps > MOST_TAPS:
        raise LimitError(f"ConvTranspose has weights that are not finite, of {taps} taps; the limit is {MOST_TAPS}")
    batch, c, *spatial = x.shape
    m = w.shape[1]
    rows = b.swap(b.reshape(x, (batch, group, c // group, prod(spatial))), 2, 3)
    total: Value | None = None
    for tap in product(*map(range, window.kernel)):
        one = b.one("slice", w, starts=(0, 0, *tap), sizes=(*w.shape[:2], *(1,) * len(tap)), steps=(1,) * w.rank)
        y = b.matmul(rows, b.reshape(one, (group, c // group, m)))
        y = b.reshape(b.swap(y, 2, 3), (batch, group * m, *spatial))
        before = [j * d for j, d in zip(tap, window.dilations, strict=True)]
        after = [span - 1 - j + e for span, j, e in zip(window.spans, before, extra, strict=True)]
        y = b.pad(y, (0, 0, *before), (0, 0, *after), 0, (0, 0, *(s - 1 for s in window.strides)))
        total = y if total is None else b.add(total, y)
    assert total is not None
    for i, (lo, hi) in enumerate(zip(low, high, strict=True)):
        total = b.part(total, i + 2, lo, total.shape[i + 2] - lo - hi)
    return total


def _of_one_pixel(
    b: Builder, x: Value, w: Value, low: Sequence[Dim], high: Sequence[Dim], extra: Sequence[Dim], group: int
) -> Value:
    """One input position, as generators begin with: the kernel itself, weighted; a matmul with nothing to add up."""
    c, m, *kernel = w.shape
    flat = b.reshape(w, (group, c // group, prod((m, *kernel))))
    y = b.matmul(b.swap(b.reshape(x, (x.shape[0], group, c // group)), 0, 1), flat)
    y = b.reshape(b.swap(y, 0, 1), (x.shape[0], group * m, *kernel))
    y = b.pad(y, (0,) * y.rank, (0, 0, *extra), 0)
    for i, (lo, hi) in enumerate(zip(low, high, strict=True)):
        y = b.part(y, i + 2, lo, y.shape[i + 2] - lo - hi)
    return y


MOST_TAPS = 512  # of a transposed convolution tap by tap: each is a matmul of its own
MOST_PHASES = 64  # of one transposed convolution: each has a kernel of its own


@dataclass(frozen=True)
class _Phase:
    """Every s-th output along one axis: a convolution of stride 1 with a part of the kernel's taps."""

    first: int  # tap, and the step to the next
    step: int
    taps: int
    dilation: int
    low: int
    high: int


@dataclass(frozen=True)
class _Phases:
    """The phases of one axis, their common size, and the output that they make in turns: `out` from `begin` on."""

    each: tuple[_Phase, ...]
    size: Dim
    begin: int
    out: Dim

    @property
    def kinds(self) -> set[tuple[int, ...]]:
        """What the phases' convolutions differ in, other than their weights."""
        return {(p.taps, p.dilation, p.low, p.high) for p in self.each}


def _phases(
    spatial: Sequence[Dim], window: Window, low: Sequence[Dim], high: Sequence[Dim], extra: Sequence[Dim], maps: int
) -> list[_Phases] | None:
    """A transposed convolution as interleaved plain ones; None where pads depend on sizes, or there were too many."""
    if math.prod(window.strides) > MOST_PHASES or any(s == 1 for s in window.strides):
        return None
    found, alike = [], []
    for n, s, d, k, lo, hi, e in zip(
        spatial, window.strides, window.dilations, window.kernel, low, high, extra, strict=True
    ):
        if not (isinstance(lo, int) and isinstance(hi, int) and isinstance(e, int)):
            return None
        found.append(_axis(n, s, d, k, lo, e - hi, 0))
        alike.append(_axis(n, s, d, k, lo, e - hi, lo % s))
    return alike if _is_less_work(alike, found, maps) else found


def _axis(n: Dim, s: int, d: int, k: int, lo: int, more: int, begin: int) -> _Phases:
    """The phases of one axis of n inputs, of which `lo` outputs are cropped below, and `more` added above.

    Output f, counted with what is cropped below, gets tap j of input i where i * stride + j * dilation = f + low: so
    the outputs of one remainder by the stride all meet the same taps. With `begin`, that many outputs less are cropped
    below before the phases are set side by side, and after it.
    """
    lo -= begin
    beyond = more + d * (k - 1) + 1 - lo  # outputs more than (n - 1) * s
    longer = -(-beyond // s) - 1  # positions of a phase more than n
    each = []
    for p in range(s):
        shift, rest = divmod(p + lo, s)
        first = next((j for j in range(min(k, s)) if j * d % s == rest), k)  # a kernel may have very many taps
        taps = range(first, k, s // math.gcd(d, s))
        if not taps:
            each.append(_Phase(0, 1, 0, 1, 0, longer))
            continue
        ends = [(j * d - rest) // s - shift for j in (taps[0], taps[-1])]
        step, apart = (taps.step, taps.step * d // s) if len(taps) > 1 else (1, 1)
        each.append(_Phase(first, step, len(taps), apart, ends[1], longer - ends[0]))
    return _Phases(tuple(each), n + longer, begin, (n - 1) * s + beyond - begin)


MAPS = 16  # the maps of a vector, about: a convolution of fewer takes as long as one of these


def _is_less_work(alike: list[_Phases], apart: list[_Phases], maps: int) -> bool:
    """Whether phases that differ in their weights alone, as one convolution, are less work than one for each phase;
    `maps` is 0 where they may not be.

    They compute a position more along each axis, but fill vectors with the maps of all phases, and are stored in turns
    as they are computed.
    """
    if any(len(axis.kinds) > 1 or axis.each[0].taps == 0 for axis in alike):
        return False
    if maps == 0 or all(len(axis.kinds) == 1 for axis in apart):
        return False  # or they are one already
    one, several = maps * math.prod(len(axis.each) for axis in alike), maps
    work = [-(-one // MAPS), -(-several // MAPS) * math.prod(len(axis.each) for axis in apart)]
    for k, axes in enumerate((alike, apart)):
        work[k] *= math.prod(axis.size if isinstance(axis.size, int) else UNKNOWN_SIZE for axis in axes)
    return work[0] <= JOINING * work[1]


UNKNOWN_SIZE = 32  # what a symbolic size is taken for
JOINING = 1.05  # the work of several convolutions and of joining them, over that of one


def _interleave(b: Builder, x: Value, w: Value, axes: list[_Phases], group: int) -> Value:
    """All phases, as one convolution where they differ in their weights alone, set side by side."""
    counts = [len(a.each) for a in axes]
    phases = [[a.each[i] for a, i in zip(axes, at, strict=True)] for at in product(*map(range, counts))]
    m = static_dim(w.shape[1], "the channels of ConvTranspose")
    kinds = {tuple((p.taps, p.dilation, p.low, p.high) for p in each) for each in phases}
    join = _in_one if len(kinds) == 1 else _in_several
    y = join(b, x, w, axes, phases, group)
    y = b.reshape(y, (x.shape[0], group * m, *(a.size * s for a, s in zip(axes, counts, strict=True))))
    for i, a in enumerate(axes):
        y = b.part(y, i + 2, a.begin, a.out)
    assert y.rank == x.rank
    return y


def _in_one(b: Builder, x: Value, w: Value, axes: list[_Phases], phases: list[list[_Phase]], group: int) -> Value:
    """Phases of one kind, as one convolution with the weights of all: [N, group, m, size, count, ...]."""
    n, m = len(axes), w.shape[1]
    weights = [mirrored(b, _taps(b, w, each), group) for each in phases]
    merged = b.concat([b.reshape(v, (group, m, *v.shape[1:])) for v in weights], 1)
    y = _phase(b, x, b.reshape(merged, (group * len(phases) * m, *merged.shape[2:])), phases[0], group)
    y = b.reshape(y, (x.shape[0], group, *(len(a.each) for a in axes), m, *(a.size for a in axes)))
    return b.transpose(y, [0, 1, 2 + n, *(k for i in range(n) for k in (3 + n + i, 2 + i))])


def _in_several(b: Builder, x: Value, w: Value, axes: list[_Phases], phases: list[list[_Phase]], group: int) -> Value:
    """A convolution for each phase: [N, group * m, size, count, ...]."""
    channels, sizes = group * w.shape[1], [a.size for a in axes]
    nothing = b.full((x.shape[0], channels, *sizes), 0.0, x.dtype)  # of phases that no tap reaches
    ys = [
        _phase(b, x, mirrored(b, _taps(b, w, each), group), each, group) if all(p.taps for p in each) else nothing
        for each in phases
    ]
    ones = [d for size in sizes for d in (size, 1)]
    ys = [b.reshape(y, (x.shape[0], channels, *ones)) for y in ys]
    for i in reversed(range(len(axes))):  # the innermost axis varies fastest among the phases
        count = len(axes[i].each)
        ys = [b.concat(ys[k : k + count], 3 + 2 * i) for k in range(0, len(ys), count)]
    (y,) = ys
    return y


def _taps(b: Builder, w: Value, each: Sequence[_Phase]) -> Value:
    """The taps of one phase, [C, M / group, taps...]."""
    return b.one(
        "slice",
        w,
        starts=(0, 0, *(p.first for p in each)),
        sizes=(*w.shape[:2], *(p.taps for p in each)),
        steps=(1, 1, *(p.step for p in each)),
    )


def _phase(b: Builder, x: Value, w: Value, each: Sequence[_Phase], group: int) -> Value:
    """The convolution of one phase."""
    window = Window(
        tuple(p.taps for p in each), (1,) * len(each), tuple(p.dilation for p in each),
        tuple(p.low for p in each), tuple(p.high for p in each),
    )  # fmt: skip
    return convolve(b, x, w, window, group)


def _spread(
    b: Builder, x: Value, w: Value, window: Window, low: Sequence[Dim], high: Sequence[Dim], extra: Sequence[Dim],
    group: int,
) -> Value:  # fmt: skip
    """A transposed convolution as one of its input with stride - 1 zeros between elements."""
    spread = b.pad(x, (0,) * x.rank, (0,) * x.rank, 0, (0, 0, *(s - 1 for s in window.strides)))
    before = tuple(span - 1 - p for span, p in zip(window.spans, low, strict=True))
    after = tuple(span - 1 - p + e for span, p, e in zip(window.spans, high, extra, strict=True))
    inner = Window(window.kernel, (1,) * len(window.kernel), window.dilations, before, after)
    return convolve(b, spread, mirrored(b, w, group), inner, group)


def _transposed_pads(
    spatial: Sequence[Dim], window: Window, extra: Sequence[Dim], goal: Sequence[Dim], auto_pad: str,
) -> tuple[tuple[Dim, ...], ...]:  # fmt: skip
    """The padding (low, high) that gives the wanted output size, and what to add at the end where none does.

    Without a wanted size it is the input's times the stride, or what there is without padding, where that is less (as
    in onnxruntime and in the standard's shape inference). SAME_UPPER takes what is odd off the end.
    """
    low, high, more = [], [], []
    for k, (d, s, span, e) in enumerate(zip(spatial, window.strides, window.spans, extra, strict=True)):
        excess = s * (d - 1) + e + span - goal[k] if goal else maximum(e + span - s, 0)
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
    y = with_bias(b, convolve(b, seen, w, window, static_dim(w.shape[0], "the channels of CausalConvWithState")), bias)
    state = b.slice(seen, 2, seen.shape[2] - reach, seen.shape[2])
    return [y if activation == "none" else b.mul(y, b.sigmoid(y)), state]
