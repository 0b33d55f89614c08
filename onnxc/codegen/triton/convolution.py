"""The convolution template: an implicit matmul over images in channels-last order, an open epilogue.

Rows of the product are output positions, columns output channels; the sum runs over the taps of the window and the
input channels. Constant weights are stored as [groups, taps, channels, outputs], so that a tile of them is contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxc.codegen.triton import spelling
from onnxc.codegen.triton.epilogue import Tile, emit_epilogue, symbol
from onnxc.codegen.triton.kernel import Kernel, indent, is_wide, power, touched
from onnxc.codegen.triton.matmul import choose_blocks, numbering
from onnxc.codegen.triton.options import Options
from onnxc.codegen.triton.terms import Buffers, Packed, TileVariable
from onnxc.errors import InternalError
from onnxc.ir.expr import Dim, ceildiv, prod
from onnxc.ir.graph import Node
from onnxc.loops.access import fresh, unflatten
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.planner.templates import Image, conv_image
from onnxc.primitives.builder import constant_of

FEW_CHANNELS = 16  # below, a piece of the sum runs over taps and channels at once


@dataclass(frozen=True)
class _Shape:
    """Sizes of a convolution, for one group."""

    groups: int
    channels: Dim
    outputs: Dim
    kernel: tuple[int, ...]
    image: tuple[Dim, ...]  # spatial dims of the input
    result: tuple[Dim, ...]  # N, spatial dims of the output

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)


def emit_convolution(group: Group, layout: Layout, options: Options) -> Kernel:
    """The kernel of a convolution group."""
    node = group.node
    assert node is not None
    x, w = node.operands
    image = conv_image(layout, x, planar=True)
    if image is None:
        raise InternalError("a convolution's operand is behind a view that it cannot read through")
    groups = node.attrs["groups"]
    kernel = tuple(int(d) for d in w.shape[2:] if isinstance(d, int))
    shape = _Shape(
        groups, w.shape[1], node.output.shape[1] // groups, kernel, x.shape[2:],
        (node.output.shape[0], *node.output.shape[2:]),
    )  # fmt: skip
    buffers = Buffers()
    dtype = node.output.dtype
    exact = dtype.name == "float32" and options.dot == "ieee"
    rows = prod(shape.result)
    total = shape.channels * shape.taps
    blocks = choose_blocks(rows, shape.outputs, total, groups, dtype, exact=exact, piece=shape.channels)
    wide = is_wide(touched(group, layout), rows * shape.outputs * groups)
    tile = Tile((blocks.m, blocks.n), buffers)
    m, n, g = fresh("m", rows), fresh("n", shape.outputs), fresh("g", groups)
    batch = [(symbol(g), groups)] if groups > 1 else []
    lines = numbering(tile, (rows, shape.outputs), blocks, batch, wide)
    for loop, name, axis, size, lanes in ((m, "m", 0, rows, blocks.m), (n, "n", 1, shape.outputs, blocks.n)):
        whole = isinstance(size, int) and size % lanes == 0
        if not whole:
            lines.append(f"{name}m = {name} < {tile.index(size)}")
        tile.lane(symbol(loop), TileVariable(name, axis, lanes, None if whole else f"{name}m"))
    dot = f', input_precision="{options.dot}"' if dtype.name == "float32" else ""
    lines += _sum(tile, node, image, shape, layout, blocks.k, dot)
    if dtype.name != "float32":
        lines.append(f"acc = acc.to({spelling.stored(dtype)}).to(tl.float32)")
    batch_index, *place = unflatten(m, shape.result)
    channel = g * shape.outputs + n if groups > 1 else n
    lines += emit_epilogue(group, layout, (batch_index, channel, *place), tile, "acc")
    programs = ceildiv(rows, blocks.m) * ceildiv(shape.outputs, blocks.n) * groups
    return Kernel(lines, buffers, programs, blocks.warps, blocks.stages, "conv", wide)


@dataclass(frozen=True)
class _Steps:
    """The loop of the sum: its range, and the statements that find the lanes' channels `c`, their taps, and which of
    them count (`ok`, if not all do). `row` and `column` spell the tap for tiles of the image and of the weights.
    """

    range: str
    head: list[str]
    row: str
    column: str
    masked: bool


def _steps(tile: Tile, shape: _Shape, depth: int) -> _Steps:
    channels = tile.index(shape.channels)
    if isinstance(shape.channels, int) and shape.channels < FEW_CHANNELS:
        total = shape.channels * shape.taps
        depth = max(16, min(depth, power(total)))
        head = [f"k = k0 + tl.arange(0, {depth})", f"tap = k // {channels}", f"c = k % {channels}", f"ok = k < {total}"]
        return _Steps(f"range(0, {total}, {depth})", head, "tap[None, :]", "tap[:, None]", masked=True)
    pieces = tile.index(ceildiv(shape.channels, depth))
    masked = not (isinstance(shape.channels, int) and shape.channels % depth == 0)
    head = [f"tap = k0 // {pieces}", f"c = k0 % {pieces} * {depth} + tl.arange(0, {depth})"]
    head += [f"ok = c < {channels}"] if masked else []
    return _Steps(f"range(0, {shape.taps} * {pieces})", head, "tap", "tap", masked)


def _sum(tile: Tile, node: Node, image: Image, shape: _Shape, layout: Layout, depth: int, dot: str) -> list[str]:
    """The loop over taps and channels, into `acc`."""
    steps = _steps(tile, shape, depth)
    inside, where = _window(tile, node, shape, steps.row)
    batch, channel, *spatial = (tile.index(s) for s in image.strides)
    masks = {v.name: v.mask for v in tile.variables.values()}
    rows = [*inside, *(["ok[None, :]"] if steps.masked else []), masks["m"]]
    columns = [*(["ok[:, None]"] if steps.masked else []), masks["n"]]
    place = [f"im * {batch}", *(f"{i} * {s}" for i, s in zip(where, spatial, strict=True)), f"c[None, :] * {channel}"]
    if shape.groups > 1:
        place.append(f"b0 * {tile.index(shape.channels)} * {channel}")
    if image.base != 0:
        place.append(tile.index(image.base))
    pointer = tile.buffers.pointer(image.value)
    weights = _weights(tile, node, shape, layout, steps.column)
    return [
        *_positions(tile, node, shape),
        f"acc = tl.zeros({tile.shape}, tl.float32)",
        f"for k0 in {steps.range}:",
        *indent([
            *steps.head,
            f"a = tl.load({pointer} + {' + '.join(place)}{_mask(rows)})",
            f"b = tl.load({weights}{_mask(columns)})", f"acc = tl.dot(a, b, acc{dot})",
        ]),
    ]  # fmt: skip


def _mask(tests: Sequence[str | None]) -> str:
    found = " & ".join(t for t in tests if t)
    return f", mask={found}, other=0.0" if found else ""


def _positions(tile: Tile, node: Node, shape: _Shape) -> list[str]:
    """Image number `im` and, of the window's first tap, the coordinates o0, o1, ... of each row."""
    lines, rest = [], "m"
    spatial = shape.result[1:]
    for k in reversed(range(len(spatial))):
        size = tile.index(spatial[k])
        low, stride = node.attrs["low"][k], node.attrs["strides"][k]
        lines.append(f"o{k} = {rest} % {size}{f' * {stride}' if stride != 1 else ''} - {tile.index(low)}")
        rest = f"({rest} // {size})"
    return [*lines, f"im = {rest}"]


def _digits(tap: str, kernel: Sequence[int]) -> list[str]:
    """A tap's place in the window, along each axis."""
    found: list[str] = []
    inner = 1
    for k in reversed(range(len(kernel))):
        step = tap if inner == 1 else f"({tap} // {inner})"
        found.insert(0, f"({step} % {kernel[k]})" if k else step)
        inner *= kernel[k]
    return found


def _window(tile: Tile, node: Node, shape: _Shape, tap: str) -> tuple[list[str], list[str]]:
    """Tests that a tap lies in the image, and its coordinates."""
    tests, where = [], []
    for k, digit in enumerate(_digits(tap, shape.kernel)):
        dilation = node.attrs["dilations"][k]
        step = f" + {digit}{f' * {dilation}' if dilation != 1 else ''}" if shape.kernel[k] > 1 else ""
        where.append(f"(o{k}{step})" if step else f"o{k}")
        if node.attrs["low"][k] != 0 or node.attrs["high"][k] != 0:
            tests.append(f"({where[-1]} >= 0) & ({where[-1]} < {tile.index(shape.image[k])})")
    return tests, where


def _weights(tile: Tile, node: Node, shape: _Shape, layout: Layout, tap: str) -> str:
    """Pointers to a tile [channels, outputs] of the weights."""
    w = node.operands[1]
    constant = constant_of(w)
    channels, outputs = tile.index(shape.channels), tile.index(shape.outputs)
    group = f"b0 * {outputs}" if shape.groups > 1 else ""
    if constant is not None:
        pointer = tile.buffers.pointer(_packed(w.id, constant, shape, node))
        group = f" + {group} * {shape.taps} * {channels}" if group else ""
        return f"{pointer}{group} + ({tap} * {channels} + c[:, None]) * {outputs} + n"
    found = conv_image(layout, w, planar=True)
    if found is None:
        raise InternalError("the weights of a convolution are behind a view that it cannot read through")
    output, channel, *taps = (tile.index(s) for s in found.strides)
    place = [f"{digit} * {s}" for digit, s in zip(_digits(tap, shape.kernel), taps, strict=True)]
    place += [f"c[:, None] * {channel}", f"n * {output}", tile.index(found.base)]
    place += [f"{group} * {output}"] if group else []
    return f"{tile.buffers.pointer(found.value)} + {' + '.join(place)}"


def _packed(key: int, w: np.ndarray, shape: _Shape, node: Node) -> Packed:
    """The weights as [groups, taps, channels, outputs]."""

    def write(out: np.ndarray) -> None:
        grouped = w.reshape(shape.groups, -1, w.shape[1], shape.taps)
        out.view(w.dtype).reshape(shape.groups, shape.taps, w.shape[1], -1)[...] = grouped.transpose(0, 3, 2, 1)

    return Packed(("conv", key), node.operands[1].t, write)
