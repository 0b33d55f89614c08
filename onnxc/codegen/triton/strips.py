"""How a depthwise convolution may be laid over the programs of a GPU: the choice, its candidates, and a cost model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onnxc.codegen.triton.kernel import power

PROCESSORS = 132  # of an H200
SCHEDULERS = 4  # of each
REGISTERS = 65536
MOST_WARPS = 64  # on a multiprocessor
LINE = 128  # bytes of the L1 cache
START = 4400  # cycles that a program waits for its first row and its end
ROW = 180  # and for each other row
BANDWIDTH = 2800  # bytes of memory a cycle
CACHE = 10000  # and of the L2 cache
MOST_PRODUCTS = 160  # of a window's row and a strip that are written out; above, a loop runs over all taps
MOST_UNROLLED = 256  # of all a window's rows; above, a loop runs over them
WIDTHS = (8, 4, 16, 2, 1)  # elements that a thread may have side by side, as divisors of the channels
MANY = 1 << 16  # rows where their number is open
COUNT = 10  # candidates


@dataclass(frozen=True)
class Strips:
    """What a program computes.

    Attributes:
        channels: that are neighbours among its lanes.
        lanes: of a program: channels of strips.
        run: outputs of a strip, along the last axis.
        warps: of a program.
        unrolled: 1 where the rows of the window are written out, so that all are read at once.
    """

    channels: int
    lanes: int
    run: int
    warps: int
    unrolled: int = 0


@dataclass(frozen=True)
class Windows:
    """What the choice depends on.

    Attributes:
        channels: of the result.
        rows: of the result, in all images; None where that is known at run time only.
        width: of a row; likewise.
        kernel: sizes of the window.
        stride, dilation: along a row.
        bits: of an element.
        summed: input channels of an output.
    """

    channels: int
    rows: int | None
    width: int | None
    kernel: tuple[int, ...]
    stride: int = 1
    dilation: int = 1
    bits: int = 16
    summed: int = 1

    def columns(self, run: int) -> int:
        """Columns of the image that a strip reads."""
        return len({r * self.stride + k * self.dilation for r in range(run) for k in range(self.kernel[-1])})

    def slides(self, run: int) -> bool:
        """Whether a row of the window is written out: what a strip reads is read once, and added where it belongs."""
        return self.summed * self.kernel[-1] * run <= MOST_PRODUCTS


def candidates(windows: Windows) -> list[Strips]:
    """Choices that are worth measuring, the one that the cost model takes first."""
    runs = [1, 2, 4] if windows.kernel[-1] > 32 else [1, 2, 4, 5, 6, 7, 8, 14]
    sizes = [(1, 1), (1, 2), (2, 2), (4, 2), (2, 4), (4, 4)]
    found = [
        Strips(channels, each * warps * 32, run, warps, unrolled)
        for channels in _channels(windows)
        for run in runs
        for each, warps in sizes
        for unrolled in (1, 0)
        if not (unrolled and windows.summed * math.prod(windows.kernel) * run > MOST_UNROLLED)
    ]
    found = [s for s in found if s.run == 1 or s.run <= power(windows.width or 64)]
    return sorted(found, key=lambda s: cost(windows, s))[:COUNT]


def _channels(windows: Windows) -> list[int]:
    """Numbers of channels side by side: divisors, so that no lane is idle, and multiples of a vector of elements."""
    count = windows.channels
    divisors = [d for d in range(1, min(count, 128) + 1) if count % d == 0]
    for width in WIDTHS:
        fitting = [d for d in divisors if d % width == 0 and d >= min(count, 16)]
        if fitting:
            return fitting[-2:]
    return [min(power(count), 64)]


def cost(windows: Windows, strips: Strips) -> float:
    """Cycles, roughly: those that a multiprocessor's warps issue or its L1 cache needs, and what they wait for.

    The numbers were fitted to 375 measurements of 18 convolutions on an H200, of which it takes ways that are a tenth
    slower than the best.
    """
    each = max(1, strips.lanes // (32 * strips.warps))
    nbytes = windows.bits // 8
    across, down = windows.kernel[-1], math.prod(windows.kernel[:-1])
    columns = windows.columns(strips.run) if windows.slides(strips.run) else strips.run * across
    # Lines of the cache that a warp touches in a read of the image, and in one of the weights.
    lines = max(1.0, 32 * each * nbytes / min(LINE, strips.channels * nbytes))
    weights = max(1.0, min(32 * each, strips.channels) * 4 / LINE)
    converted = each * columns if nbytes == 2 else 0
    turns = down * windows.summed
    lines *= each if windows.summed > 1 else 1  # neighbours in a thread read the same, each for itself
    issued = turns * (converted + each * strips.run * across) + 3 * each * strips.run
    busy = strips.warps * max(issued / SCHEDULERS, turns * (columns * lines + across * weights))
    waits = START + ROW * (1 + 0.3 * (down - 1) if strips.unrolled else down)
    registers = min(255, 24 + 0.76 * each * (strips.run + across))
    most = max(1, min(MOST_WARPS, REGISTERS // int(registers * 32)) // strips.warps)
    rows = (windows.rows or MANY) * math.ceil((windows.width or 64) / strips.run)
    programs = math.ceil(rows * strips.channels / strips.lanes) * math.ceil(windows.channels / strips.channels)
    resident = min(most, math.ceil(programs / PROCESSORS))
    waves = max(1.0, 0.6 * programs / (PROCESSORS * resident) + 0.4 * math.ceil(programs / (PROCESSORS * resident)))
    stored = (windows.rows or MANY) * (windows.width or 64) * windows.channels * nbytes
    # Strips that share no program read the rows and columns that they share from the L2 cache, each for itself.
    below = max(1.0, strips.lanes / strips.channels)
    shared = stored * (columns / strips.run) * (down - 1) / below
    return waves * (resident * busy + waits) + stored * (1 + windows.stride**2) / BANDWIDTH + shared / CACHE
