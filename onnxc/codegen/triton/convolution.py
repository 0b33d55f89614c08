"""The convolution template: an implicit matmul over images in channels-last order, an open epilogue.

Rows of the product are output positions, columns output channels; the sum runs over the taps of the window and the
input channels. Constant weights are stored as [groups, taps, channels, outputs], so that a tile of them is contiguous.
Depthwise convolutions have a template of their own (`depthwise.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from onnxc.codegen.triton import spelling, strips
from onnxc.codegen.triton.conv_tiles import UNKNOWN, candidates, for_few_rows
from onnxc.codegen.triton.depthwise import NOTHING, emit_depthwise, windows
from onnxc.codegen.triton.epilogue import Tile, emit_epilogue, symbol
from onnxc.codegen.triton.kernel import Kernel, either, far, indent, power, touched
from onnxc.codegen.triton.matmul import numbering
from onnxc.codegen.triton.options import Options, is_depthwise
from onnxc.codegen.triton.product_tiles import Blocks, Facts, by_rows
from onnxc.codegen.triton.strips import Strips
from onnxc.codegen.triton.terms import Buffers, Packed, TileVariable
from onnxc.errors import InternalError
from onnxc.ir.expr import Dim, always_equal, ceildiv, prod, recombine
from onnxc.ir.graph import Value
from onnxc.loops.access import fresh, unflatten
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.planner.templates import conv_image
from onnxc.primitives.builder import constant_of

FEW_CHANNELS = 16  # below, a turn of the sum takes pairs of a tap and a channel
FEW_TESTED = 32  # most such pairs, where each has tests of its own


def emit_convolution(
    group: Group, layout: Layout, options: Options, choice: Blocks | Strips | None = None
) -> list[Kernel]:
    """The kernels of a convolution group: where the run decides how many images there are, some with tiles for
    few positions, one for many, and one for so many that places need 64 bits. `choice` is how it runs, where that is
    not left to the cost model.
    """
    assert group.node is not None
    if is_depthwise(group.node):
        assert not isinstance(choice, Blocks)
        return emit_depthwise(group, layout, choice)
    assert not isinstance(choice, Strips)
    product = _Product(group, layout, options)
    facts = product.facts()
    many = choice or candidates(facts)[0]

    def tiled(blocks: Blocks, _most: int | None = None, wide: bool = False) -> list[Kernel]:
        return [_Product(group, layout, options).kernel(blocks, wide)]

    numbers = tiled(many)[0].buffers.numbers
    which = far(touched(group, layout), product.rows * product.outputs * product.groups, numbers=numbers)
    by_size = partial(by_rows, product.rows, for_few_rows(facts), many, tiled)
    return either(which, lambda: tiled(many, wide=True), by_size)


def convolution_candidates(group: Group, layout: Layout, options: Options) -> Sequence[Blocks | Strips]:
    """The ways to run a convolution group that are worth measuring, the cost model's choice first."""
    assert group.node is not None
    if is_depthwise(group.node):
        return strips.candidates(windows(group.node))
    return candidates(_Product(group, layout, options).facts())


class _Product:
    """One kernel being written: for each group of channels a product [positions, sum] x [sum, outputs]."""

    def __init__(self, group: Group, layout: Layout, options: Options) -> None:
        assert group.node is not None
        self.group, self.layout = group, layout
        self.node = node = group.node
        x, w = node.operands
        image = conv_image(layout, x, planar=True)
        if image is None:
            raise InternalError("a convolution's operand is behind a view that it cannot read through")
        self.image = image
        self.groups = int(node.attrs["groups"])
        self.channels, self.outputs = w.shape[1], node.output.shape[1] // self.groups
        self.window = tuple(int(d) for d in w.shape[2:] if isinstance(d, int))
        self.taps = math.prod(self.window)
        self.size = x.shape[2:]
        self.result = (node.output.shape[0], *node.output.shape[2:])
        self.rows = prod(self.result)
        # Few channels: a turn of the sum runs over pairs of a tap and a channel, `pairs` of them in all.
        few = isinstance(self.channels, int) and self.channels < FEW_CHANNELS and self.taps > 1
        self.pairs = self.channels * self.taps if few and isinstance(self.channels, int) else 0
        self.planar = self.pairs > 0 and not always_equal(image.strides[1], 1) and self.channels != 1
        self.exact = node.output.dtype.name == "float32" and options.dot == "ieee"
        self.dot = options.of_dot(node.output.dtype)
        self.buffers = Buffers()
        self.m, self.n, self.g = fresh("m", self.rows), fresh("n", self.outputs), fresh("g", self.groups)
        self.place = unflatten(self.m, self.result)
        self.masks: dict[str, str | None] = {}

    def facts(self) -> Facts:
        """What the choice of a tile depends on."""
        channels, turns = (self.pairs, 1) if self.pairs else (self.channels, self.taps)
        tested = any(d != 0 for side in ("low", "high") for d in self.node.attrs[side])
        most = FEW_TESTED if self.pairs and tested else None
        dtype = self.node.output.dtype
        return Facts(
            self.rows, self.outputs, channels, self.groups, dtype, self.exact, turns=turns, most=most, unknown=UNKNOWN
        )

    def kernel(self, blocks: Blocks, wide: bool) -> Kernel:
        """All of it; `wide`: where places need 64 bits."""
        self.blocks, dtype = blocks, self.node.output.dtype
        self.tile = Tile((blocks.m, blocks.n), self.buffers)
        lines = [*self._lanes(wide), *self._sum()]
        if dtype.name != "float32":  # as it would be stored
            lines.append(f"acc = acc.to({spelling.stored(dtype)}).to(tl.float32)")
        channel = self.g * self.outputs + self.n if self.groups > 1 else self.n
        lines += emit_epilogue(self.group, self.layout, (self.place[0], channel, *self.place[1:]), self.tile, "acc")
        programs = ceildiv(self.rows, blocks.m) * ceildiv(self.outputs, blocks.n) * self.groups
        return Kernel(lines, self.buffers, programs, blocks.warps, blocks.stages, "conv", wide)

    def _lanes(self, wide: bool) -> list[str]:
        """Rows `m`, columns `n` and group of a program, with masks where a tile is not whole."""
        blocks, tile = self.blocks, self.tile
        batch = [(symbol(self.g), self.groups)] if self.groups > 1 else []
        lines = numbering(tile, (self.rows, self.outputs), blocks, batch, wide)
        sides = ((self.m, "m", 0, self.rows, blocks.m), (self.n, "n", 1, self.outputs, blocks.n))
        for loop, name, axis, size, lanes in sides:
            whole = isinstance(size, int) and size > 0 and size % lanes == 0  # none may lack a tile's lanes
            self.masks[name] = None if whole else f"{name}m"
            if not whole:
                lines.append(f"{name}m = {name} < {tile.index(size)}")
            tile.lane(symbol(loop), TileVariable(name, axis, lanes, self.masks[name]))
        return lines

    # ------------------------------------------------------------ the sum

    def _sum(self) -> list[str]:
        """The loop over taps and channels, into `acc`.

        Pointers to the first tap stand before the loop: a turn adds to them how far its own are from there.
        """
        tile, filter_ = self.tile, self._filter()
        depth, turns, body, part = self._pairs() if self.pairs else self._pieces()
        # What is different for each `k` is computed twice, across rows of the image and down columns of the weights: as
        # one line that is turned, Triton 3.6 takes its alignment for that of the other axis too.
        row, column = ("_a", "_b") if self.pairs else ("", "")
        channel = tile.index(self.image.strides[1])
        a_at = [self.buffers.pointer(self.image.value), tile.index(self._start())]
        b_at = [filter_.start, f"n * {filter_.output}"]
        if not self.pairs:
            a_at.append(f"tk[None, :] * {channel}")
            b_at.append(f"tk[:, None] * {filter_.channel}")
        a_far, b_far, tests, before = [f"c{row} * {channel}"], [f"c{column} * {filter_.channel}"], [], []
        for k in range(len(self.window)):
            at, dilation = f"o{k}", self.node.attrs["dilations"][k]
            if self.window[k] > 1:
                for side in dict.fromkeys((row, column)):
                    digit = _digits(f"tap{side}", self.window)[k]
                    body.append(f"u{k}{side} = {digit}{f' + {NOTHING}' if self.pairs else ''}")
                a_far.append(f"u{k}{row} * {tile.index(self.image.strides[2 + k] * dilation)}")
                b_far.append(f"u{k}{column} * {filter_.taps[k]}")
                at = f"(o{k} + u{k}{row}{f' * {dilation}' if dilation != 1 else ''})"
            if any(self.node.attrs[side][k] != 0 for side in ("low", "high")):
                before.append(f"o{k} = {tile.index(self._corner(k))} + {NOTHING}")
                tests.append(f"({at} >= 0) & ({at} < {tile.index(self.size[k])})")
        rows, columns = [*tests, self.masks["m"]], [self.masks["n"]]
        if part:
            rows.append(part.format(row, "[None, :]"))
            columns.append(part.format(column, "[:, None]"))
        body += [
            f"a = tl.load(a_at + ({' + '.join(a_far)}){_mask(rows)})",
            f"b = tl.load(b_at + ({' + '.join(b_far)}){_mask(columns)})",
            f"acc = tl.dot(a, b, acc{self.dot})",
        ]
        return [
            *before, f"tk = tl.arange(0, {depth})", f"a_at = {' + '.join(a_at)}", f"b_at = {' + '.join(b_at)}",
            f"acc = tl.zeros({tile.shape}, tl.float32)", f"for k0 in range({turns}):", *indent(body),
        ]  # fmt: skip

    def _pieces(self) -> tuple[int, str, list[str], str | None]:
        """A turn takes some channels of one tap: how many, how many turns, the first channel `c` and the tap, and which
        of them there are (where not all): a format of a name's ending and how `tk` is turned.
        """
        depth = self.blocks.k
        pieces = self.tile.index(ceildiv(self.channels, depth))
        whole = isinstance(self.channels, int) and self.channels % depth == 0
        part = None if whole else f"(tk < {self.tile.index(self.channels)} - c){{1}}"
        if self.taps == 1:
            return depth, pieces, [f"c = k0 * {depth}"], part
        return depth, f"{self.taps} * {pieces}", [f"tap = k0 // {pieces}", f"c = k0 % {pieces} * {depth}"], part

    def _pairs(self) -> tuple[int, str, list[str], str | None]:
        """The same where it takes pairs of a tap and a channel: those first that are neighbours in memory."""
        depth = max(16, min(self.blocks.k, power(self.pairs)))
        body = []
        for side, turned in (("_a", "[None, :]"), ("_b", "[:, None]")):
            body.append(f"k{side} = k0 * {depth} + tk{turned} + {NOTHING}")
            if self.planar:
                body += [f"c{side} = k{side} // {self.taps}", f"tap{side} = k{side} % {self.taps} + {NOTHING}"]
            else:
                body += [f"tap{side} = k{side} // {self.channels}", f"c{side} = k{side} % {self.channels} + {NOTHING}"]
        part = None if self.pairs % depth == 0 else f"(k{{0}} < {self.pairs})"
        return depth, str(ceildiv(self.pairs, depth)), body, part

    def _corner(self, axis: int) -> Dim:
        """The coordinate of a row's first tap along a spatial axis."""
        low: Dim = self.node.attrs["low"][axis]
        return self.place[1 + axis] * int(self.node.attrs["strides"][axis]) - low

    def _start(self) -> Dim:
        """The address of a row's first tap, in its first channel."""
        batch, channel, *spatial = self.image.strides
        at = self.image.base + self.place[0] * batch
        for k, step in enumerate(spatial):
            at = at + self._corner(k) * step
        return recombine(at + self.g * self.channels * channel if self.groups > 1 else at)

    def _filter(self) -> _Filter:
        """How the weights lie."""
        tile, w = self.tile, self.node.operands[1]
        constant = constant_of(w)
        output: Dim = 1
        if constant is not None:
            pointer = self.buffers.pointer(_packed(w, constant, self.groups))
            channel = self.outputs
            taps = [self.channels * channel * math.prod(self.window[k + 1 :]) for k in range(len(self.window))]
            at = self.g * self.taps * self.channels * channel if self.groups > 1 else 0
        else:
            found = conv_image(self.layout, w, planar=True)
            if found is None:
                raise InternalError("the weights of a convolution are behind a view that it cannot read through")
            pointer = self.buffers.pointer(found.value)
            output, channel, *taps = found.strides
            at = found.base + self.g * self.outputs * output if self.groups > 1 else found.base
        start = f"{pointer} + {tile.index(at)}"
        return _Filter(start, tile.index(output), tile.index(channel), [tile.index(t) for t in taps])


@dataclass(frozen=True)
class _Filter:
    """Where a group's weights begin, and the elements between neighbours along each axis."""

    start: str
    output: str
    channel: str
    taps: Sequence[str]


def _mask(tests: Sequence[str | None]) -> str:
    found = " & ".join(t for t in tests if t)
    return f", mask={found}, other=0.0" if found else ""


def _digits(tap: str, window: Sequence[int]) -> list[str]:
    """A tap's place in the window, along each axis."""
    found: list[str] = []
    inner = 1
    for k in reversed(range(len(window))):
        step = tap if inner == 1 else f"({tap} // {inner})"
        found.insert(0, f"({step} % {window[k]})" if k else step)
        inner *= window[k]
    return found


def _packed(w: Value, constant: np.ndarray, groups: int) -> Packed:
    """The weights as [groups, taps, channels, outputs]."""

    def write(out: np.ndarray) -> None:
        count, channels = constant.shape[:2]
        grouped = constant.reshape(groups, count // groups, channels, -1).transpose(0, 3, 2, 1)
        out.view(constant.dtype).reshape(grouped.shape)[...] = grouped

    return Packed(("conv", w.id), w.t, write)
