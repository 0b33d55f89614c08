"""The depthwise convolution template: every output channel sums over the window of one input channel, or of very few.

There is nothing to multiply as matrices, so a lane is a channel of a strip: `run` neighbouring outputs of one row of
the image. For each row of the window, a lane loads the elements that its strip needs once, and adds each to all outputs
that it belongs to: static shifts, with all sums in registers. The lanes of a program are `channels` channels (of which
a vector of neighbours is one thread's) of strips below each other, whose windows overlap in the L1 cache.
"""

from __future__ import annotations

import math

import numpy as np

from onnxc.codegen.triton import spelling
from onnxc.codegen.triton.epilogue import Tile, emit_epilogue, symbol
from onnxc.codegen.triton.kernel import Kernel, either, far, indent, touched
from onnxc.codegen.triton.strips import Strips, Windows, candidates
from onnxc.codegen.triton.terms import Buffers, Packed, TileVariable
from onnxc.errors import InternalError
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, ceildiv, floordiv, prod, symbols
from onnxc.ir.graph import Node
from onnxc.ir.types import TensorType
from onnxc.loops.access import fresh, unflatten
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.planner.templates import Image, conv_image
from onnxc.primitives.builder import constant_of

# Indices that are made of the numbers of taps get a zero that the compiler cannot see through, where it would make
# pairs of them in 16 bits (`cubin.PAIRS`).
NOTHING = "ox_nothing()"


class _Depthwise:
    """One kernel being written."""

    def __init__(self, group: Group, layout: Layout, choice: Strips) -> None:
        assert group.node is not None
        self.group, self.layout, self.choice = group, layout, choice
        self.node = node = group.node
        image = conv_image(layout, node.operands[0], planar=True)
        if image is None:
            raise InternalError("a convolution's operand is behind a view that it cannot read through")
        self.image: Image = image
        self.outputs = node.output.shape[1]
        count, self.summed = (int(d) for d in node.operands[1].shape[:2] if isinstance(d, int))
        self.multiplier = count // int(node.attrs["groups"])  # outputs of a group
        self.kernel = tuple(int(d) for d in node.operands[1].shape[2:] if isinstance(d, int))
        self.size = node.output.shape[2:]
        self.strips = ceildiv(self.size[-1], choice.run)
        # Strips below each other are neighbours: their windows overlap.
        self.rows = (node.output.shape[0], self.strips, *self.size[:-1])
        self.slides = windows(node).slides(choice.run)
        self.loop = self.kernel[:-1] if self.slides else self.kernel
        self.buffers = Buffers()
        self.tile = Tile((choice.lanes,), self.buffers)
        self.m, self.n = fresh("m", prod(self.rows)), fresh("n", self.outputs)
        self.place = unflatten(self.m, self.rows)

    # ------------------------------------------------------------ lanes

    def lanes(self, wide: bool) -> list[str]:
        """Row `m` and channel `n` of each lane, and which of them count (`inside`)."""
        choice, channels = self.choice, self.tile.index(self.outputs)
        blocks = self.tile.index(ceildiv(self.outputs, choice.channels))
        kind = ".to(tl.int64)" if wide else ""
        lines = [
            f"e = pid // {blocks} * {choice.lanes} + tl.arange(0, {choice.lanes}){kind} + {NOTHING}",
            f"m = e // {choice.channels}", f"n = e % {choice.channels} + pid % {blocks} * {choice.channels}",
        ]  # fmt: skip
        tests = []
        rows = prod(self.rows)
        if not (isinstance(rows, int) and rows * choice.channels % choice.lanes == 0):
            tests.append(f"(e < {self.tile.index(rows * choice.channels)})")
        if not (isinstance(self.outputs, int) and self.outputs % choice.channels == 0):
            tests.append(f"(n < {channels})")
        self.inside = "inside" if tests else None
        lines += [f"inside = {' & '.join(tests)}"] if tests else []
        for loop, name in ((self.m, "m"), (self.n, "n")):
            self.tile.lane(symbol(loop), TileVariable(name, 0, choice.lanes, self.inside))
        return lines

    def each(self, d: Dim) -> str:
        """An index expression with a value for each lane, also where it is the same number for all."""
        return self.tile.index(d) if symbols(d) & self.tile.variables.keys() else f"({self.tile.index(d)} + e * 0)"

    def first(self, axis: int) -> Dim:
        """The coordinate of a window's first tap along a spatial axis; along the last one, of the strip's first."""
        last = axis == len(self.size) - 1
        at = self.place[1] * self.choice.run if last else self.place[2 + axis]
        low: Dim = self.node.attrs["low"][axis]
        return at * int(self.node.attrs["strides"][axis]) - low

    # ------------------------------------------------------------ the sum

    def columns(self) -> dict[int, list[tuple[int, int]]]:
        """For each column of the image, from the strip's first on: outputs that it is added to, and by which taps."""
        stride, dilation = self.node.attrs["strides"][-1], self.node.attrs["dilations"][-1]
        found: dict[int, list[tuple[int, int]]] = {}
        for r in range(self.choice.run):
            for k in range(self.kernel[-1] if self.slides else 1):
                found.setdefault(r * stride + k * dilation, []).append((r, k))
        return dict(sorted(found.items()))

    def tests(self, column: int, step: str) -> list[str]:
        """That a column lies in the image, so far as it is not certain."""
        attrs, width = self.node.attrs, self.image_shape[-1]
        low, stride, run = attrs["low"][-1], attrs["strides"][-1], self.choice.run
        text = f"(x0 + {column}{step})"
        found = []
        if not (isinstance(low, int) and column >= low):
            found.append(f"({text} >= 0)")
        reach = 0 if self.slides else (self.kernel[-1] - 1) * attrs["dilations"][-1]
        most = (self.strips - 1) * run * stride - low + column + reach
        if not (isinstance(most, int) and isinstance(width, int) and most < width):
            found.append(f"({text} < {self.tile.index(width)})")
        return found

    @property
    def image_shape(self) -> tuple[Dim, ...]:
        return self.node.operands[0].shape[2:]

    def sum(self) -> list[str]:
        """The loop over the rows of the window, into `acc0`, `acc1`, ..."""
        tile, run = self.tile, self.choice.run
        batch, channel, *spatial = self.image.strides
        group = self.n if self.multiplier == 1 else floordiv(self.n, self.multiplier)
        start = self.image.base + self.place[0] * batch + group * self.summed * channel
        x = self.first(len(self.size) - 1)
        lines = [f"x0 = {tile.index(x)} + {NOTHING}"]
        lines += [f"y{k} = {tile.index(self.first(k))} + {NOTHING}" for k in range(len(self.size) - 1)]
        lines.append(f"at = {self.buffers.pointer(self.image.value)} + {self.each(start + x * spatial[-1])}")
        columns = self.columns()
        step = "" if self.slides else f" + d{len(self.size) - 1}"
        body, row = self.steps()
        masks: dict[int, str] = {}
        for j in columns:
            tests = self.tests(j, step)
            test = " & ".join([*tests, *([self.inside] if self.inside else [])])
            if tests and self.slides:  # the same for all rows of the window
                masks[j] = f"c{j}"
                lines.append(f"c{j} = {test}")
            elif tests:
                masks[j] = test
        lines += [f"acc{r} = tl.zeros(({self.choice.lanes},), tl.float32)" for r in range(run)]
        for c in range(self.summed):
            body += self.weights(c)
            for j, uses in columns.items():
                mask = " & ".join(t for t in (row, masks.get(j)) if t) or self.inside
                guard = f", mask={mask}, other=0.0" if mask else ""
                body.append(f"x = tl.load(row + {tile.index(j * spatial[-1] + c * channel)}{guard}).to(tl.float32)")
                body += [f"acc{r} += x * w{k}" for r, k in uses]
        taps = math.prod(self.loop)
        if taps == 1:
            return [*lines, "tap = 0", *body]
        turns = "tl.static_range" if self.choice.unrolled else "range"
        return [*lines, f"for tap in {turns}({taps}):", *indent(body)]

    def steps(self) -> tuple[list[str], str | None]:
        """Of a tap: where the row of the image begins, and the name of the test that it lies in the image."""
        tile, attrs = self.tile, self.node.attrs
        lines, tests, place = [], [], ["at"]
        inner = 1
        for k in reversed(range(len(self.loop))):
            step = "tap" if inner == 1 else f"(tap // {inner})"
            step = f"{step} % {self.loop[k]}" if k else step
            inner *= self.loop[k]
            lines.append(f"d{k} = {step} * {attrs['dilations'][k]}")
            stride = tile.index(self.image.strides[2 + k])
            if k == len(self.size) - 1:
                place.append(f"d{k} * {stride}")
                continue
            place.append(f"(y{k} + d{k}) * {stride}")
            if any(attrs[side][k] != 0 for side in ("low", "high")):
                tests.append(f"(y{k} + d{k} >= 0) & (y{k} + d{k} < {tile.index(self.image_shape[k])})")
        if tests:
            lines.append(f"ok = {' & '.join([*tests, *([self.inside] if self.inside else [])])}")
        return [*lines, f"row = {' + '.join(place)}"], "ok" if tests else None

    def weights(self, c: int) -> list[str]:
        """The weights of a row of the window in a group's input channel, of all lanes: `w0`, `w1`, ..."""
        w, tile = self.node.operands[1], self.tile
        row = self.kernel[-1] if self.slides else 1
        constant = constant_of(w)
        mask = f", mask={self.inside}, other=0.0" if self.inside else ""
        if constant is not None:
            outputs = tile.index(self.outputs)
            pointer = self.buffers.pointer(_packed(self.node, constant))
            at = f"{pointer} + (tap * {row * self.summed} + {{}}) * {outputs} + n{mask}"
            return [f"w{k} = tl.load({at.format(k * self.summed + c)})" for k in range(row)]
        found = conv_image(self.layout, w, planar=True)
        if found is None:
            raise InternalError("the weights of a convolution are behind a view that it cannot read through")
        output, channel, *taps = found.strides
        place = [self.each(found.base + self.n * output + c * channel)]
        inner = 1
        for k in reversed(range(len(self.loop))):
            step = "tap" if inner == 1 else f"(tap // {inner})"
            place.append(f"{step}{f' % {self.loop[k]}' if k else ''} * {tile.index(taps[k])}")
            inner *= self.loop[k]
        at = f"{self.buffers.pointer(found.value)} + {' + '.join(place)}"
        return [f"w{k} = tl.load({at} + {tile.index(k * taps[-1])}{mask}).to(tl.float32)" for k in range(row)]

    # ------------------------------------------------------------ the end

    def ends(self) -> list[str]:
        """The epilogue of each output of the strip."""
        kind = self.node.output.dtype
        lines: list[str] = []
        for r in range(self.choice.run):
            if kind.name != "float32":  # as it would be stored
                lines.append(f"acc{r} = acc{r}.to({spelling.stored(kind)}).to(tl.float32)")
            x = self.place[1] * self.choice.run + r
            if not (isinstance(self.size[-1], int) and self.size[-1] % self.choice.run == 0):
                test = f"({self.tile.index(x)} < {self.tile.index(self.size[-1])})"
                lines.append(f"in{r} = {' & '.join([test, *([self.inside] if self.inside else [])])}")
                for loop, name in ((self.m, "m"), (self.n, "n")):
                    self.tile.lane(symbol(loop), TileVariable(name, 0, self.choice.lanes, f"in{r}"))
            places = (self.place[0], self.n, *self.place[2:], x)
            lines += emit_epilogue(self.group, self.layout, places, self.tile, f"acc{r}")
        return lines


def windows(node: Node) -> Windows:
    """What the choice of a depthwise convolution's strips depends on."""
    batch, _, *outer, width = node.output.shape
    rows = prod((batch, *outer))
    count, summed, *kernel = (int(d) for d in node.operands[1].shape if isinstance(d, int))
    return Windows(
        count,
        rows if isinstance(rows, int) else None,
        width if isinstance(width, int) else None,
        tuple(kernel),
        int(node.attrs["strides"][-1]), int(node.attrs["dilations"][-1]), node.output.dtype.bits, summed,
    )  # fmt: skip


def emit_depthwise(group: Group, layout: Layout, choice: Strips | None = None) -> list[Kernel]:
    """The kernel of a depthwise convolution group; two, if the run decides how wide places are."""
    assert group.node is not None
    own = choice or candidates(windows(group.node))[0]

    def emitted(wide: bool) -> list[Kernel]:
        kernel = _Depthwise(group, layout, own)
        lines = [*kernel.lanes(wide), *kernel.sum(), *kernel.ends()]
        programs = ceildiv(prod(kernel.rows) * own.channels, own.lanes) * ceildiv(kernel.outputs, own.channels)
        return [Kernel(lines, kernel.buffers, programs, own.warps, 3, "conv", wide)]

    rows, narrow = prod(_Depthwise(group, layout, own).rows), emitted(False)
    which = far(touched(group, layout), rows * own.channels * own.run, numbers=narrow[0].buffers.numbers)
    return either(which, lambda: emitted(True), lambda: narrow)


def _packed(node: Node, w: np.ndarray) -> Packed:
    """The weights as [taps, channels, outputs], as what they are multiplied as."""
    t = TensorType(dtypes.float32, (w.size,))

    def write(out: np.ndarray) -> None:
        outputs, channels = w.shape[:2]
        out.view(np.float32).reshape(-1, channels, outputs)[...] = w.reshape(outputs, channels, -1).transpose(2, 1, 0)

    return Packed(("depthwise", node.operands[1].id), t, write)
