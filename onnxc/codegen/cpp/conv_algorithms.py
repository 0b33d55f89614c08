"""The algorithms for a convolution: how each has its weights packed, where it can be used, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxc.ir.expr import Dim
from onnxc.ir.graph import Node
from onnxc.passes.prepare import NARROW_ROWS, PLANES, can_take_pixels
from onnxc.planner.guesses import BATCHES, IMAGES, guessed
from onnxc.primitives.builder import constant_of

Tile = tuple[int, int]  # outputs of Winograd's algorithm, along y and x
Pack = Callable[[np.ndarray, int, int], np.ndarray]  # of weights, channels of a panel, groups


@dataclass(frozen=True)
class Algorithm:
    """One way to convolve: its header, its functions in C++, and the packing of [CO, CI / groups, K...] weights."""

    name: str
    header: str
    items: str
    count: str
    scratch: str
    pack: Pack
    fresh: str = ""  # the function in C++ that each thread's scratch goes through before the first item
    packer: str = ""  # the struct in C++ that packs weights at run time


def panels(w: np.ndarray, panel: int) -> np.ndarray:
    """[CO, K...] to [ceil(CO / panel)][K...][panel], zero padded."""
    count = -(-w.shape[0] // panel)
    full = np.zeros((count * panel, *w.shape[1:]), w.dtype)
    full[: w.shape[0]] = w
    return np.ascontiguousarray(np.moveaxis(full.reshape(count, panel, *w.shape[1:]), 1, -1))


def pack_direct(w: np.ndarray, panel: int, groups: int) -> np.ndarray:
    """[group][panel][taps...][ci][NR]"""
    parts = [panels(np.moveaxis(g, 1, -1), panel) for g in np.split(w, groups)]
    return np.stack(parts)


def pack_depthwise(w: np.ndarray, panel: int, groups: int) -> np.ndarray:
    """[taps...][ci of a group][co]"""
    return np.ascontiguousarray(np.moveaxis(w, (0, 1), (-1, -2)))


def winograd_matrix(m: int, stride: int = 1) -> np.ndarray:
    """G of F(m, 3), in float64: points 0, 1, -1 for m = 2; 0, +-45/64, +-91/64 for m = 4; and infinity.

    An axis that is left alone has m = 1. With a stride of 2 the outer taps have the points 0, 1 or +-1/2, +-5/4, and
    infinity, and the middle one is the last row, as it is.
    """
    if m == 1:
        return np.ones((1, 1))
    if stride == 2:
        if m == 2:
            return np.array([[1, 0, 0], [1, 0, 1], [0, 0, 1], [0, 1, 0]])
        a, b = 1 / 2, 5 / 4
        outer = [
            sign * np.array([1, 0, sign * q]) / (2 * q * (q * q - (a + b - q) ** 2)) for q in (a, b) for sign in (1, -1)
        ]
        return np.array([*outer, [0, 0, 1], [0, 1, 0]])
    if m == 2:
        return np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
    points = [0.0, 45 / 64, -45 / 64, 91 / 64, -91 / 64]
    rows = [np.array([1, q, q * q]) / np.prod([q - p for p in points if p != q]) for q in points]
    return np.array([*rows, [0, 0, 1]])


def _pack_winograd(m: Tile, stride: int) -> Pack:
    """[group][panel][p][kz][ci][NR] of U = G g G'"""
    both = np.kron(winograd_matrix(m[0], stride), winograd_matrix(m[1], stride))  # [points, taps]

    def pack(w: np.ndarray, panel: int, groups: int) -> np.ndarray:
        co, ci = w.shape[:2]
        with np.errstate(all="ignore"):  # weights may be infinite
            u = (w.reshape(-1, both.shape[1]).astype(np.float64) @ both.T).astype(np.float32)
        u = u.reshape(co, ci, -1, len(both)).transpose(0, 3, 2, 1)
        return np.stack([panels(part.reshape(*part.shape[:2], -1), panel) for part in np.split(u, groups)])

    return pack


DIRECT = Algorithm(
    "direct", "conv.h", "conv_items", "conv_items_count", "conv_scratch", pack_direct, "conv_fresh", "ConvPanels"
)
ROWS = Algorithm(
    "direct rows", "conv_rows.h", "conv_row_items", "conv_row_count", "conv_row_scratch", pack_direct,
    packer="ConvPanels",
)  # fmt: skip
DEPTHWISE = Algorithm(
    "depthwise", "conv_dw.h", "conv_dw_items", "conv_dw_count", "conv_dw_scratch", pack_depthwise, packer="ConvTaps"
)
VOLUMES = Algorithm(
    "depthwise 3-D", "conv_dw3.h", "conv_dw3_items", "conv_dw3_count", "conv_dw3_scratch", pack_depthwise,
    packer="ConvTaps",
)  # fmt: skip


@dataclass(frozen=True)
class Pixels:
    """How the output channels of a group are divided by conv_pixels.h: so many at once, in so many parts."""

    together: int
    parts: int


def pixels_of(each: int) -> Pixels:
    """The division of `each` output channels."""
    parts = max(1, -(-each // 4))
    return Pixels(-(-each // parts), parts)


def pack_pixels(w: np.ndarray, panel: int, groups: int) -> np.ndarray:
    """[group][part][kz][ci][kx][ky][output channels of a part]"""
    co, ci, *taps = w.shape
    kz, ky, kx = (1,) * (3 - len(taps)) + tuple(taps)
    p = pixels_of(co // groups)
    full = np.zeros((groups, p.parts * p.together, ci, kz, ky, kx), w.dtype)
    full[:, : co // groups] = w.reshape(groups, -1, ci, kz, ky, kx)
    parts = full.reshape(groups, p.parts, p.together, ci, kz, ky, kx)
    return np.ascontiguousarray(parts.transpose(0, 1, 4, 3, 6, 5, 2))


PIXELS = Algorithm("pixels", "conv_pixels.h", "conv_px_items", "conv_px_count", "conv_px_scratch", pack_pixels)


def _winograd(y: int, x: int, stride: int = 1) -> Algorithm:
    tile = f"<{y}, {x}, {stride}>"
    return Algorithm(
        f"winograd F({y}x{x})" + (f" stride {stride}" if stride > 1 else ""),
        "conv_wino.h",
        "conv_wino_items",
        f"conv_wino_count{tile}",
        f"conv_wino_scratch{tile}",
        _pack_winograd((y, x), stride),
        "conv_fresh",
        f"WinoPanels{tile}",
    )


WINOGRAD = {m: _winograd(*m) for m in ((2, 2), (4, 4), (1, 2), (1, 4), (2, 1), (4, 1))}
STRIDED = {m: _winograd(*m, stride=2) for m in ((2, 2), (4, 4))}  # the same for a stride of 2


@dataclass(frozen=True)
class WinogradTile:
    """What Winograd's algorithm makes of a tile: outputs along y and x, and products and weights of a pair of channels."""

    outputs: Tile
    stride: int

    @property
    def points(self) -> int:
        """Products."""
        return math.prod((m + 2 if self.stride == 1 else 2 * m + 1) if m > 1 else 1 for m in self.outputs)

    @property
    def weights(self) -> int:
        """Weights: with a stride some serve several products."""
        return math.prod(m + 2 if m > 1 else 1 for m in self.outputs)


PRODUCTS = 7  # of Strassen's algorithm, where the plain sum has 8
WIDEST_SCALE = 24  # powers of two by which channels are brought to one scale, at most


def _are_near(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether sizes that meet, and are not 0, can be brought to one scale."""
    both = (first > 0) & (second > 0)
    apart = np.abs(np.log2(first[both]) - np.log2(second[both]))
    return bool((apart <= WIDEST_SCALE).all())


def _scale(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Powers of two, about first / second; 1 where both are 0."""
    with np.errstate(all="ignore"):
        exponents = np.rint(np.log2(first) - np.log2(second))
    powers: np.ndarray = np.exp2(np.clip(np.nan_to_num(exponents, nan=0), -WIDEST_SCALE, WIDEST_SCALE))
    return powers


def pack_strassen(w: np.ndarray, panel: int, groups: int) -> np.ndarray:
    """[pair of panels][product][ci / 2][NR], then scales of ci / 2 inputs and of co / 2 outputs: see conv_strassen.h."""
    co, ci = w.shape[:2]
    b = w.reshape(co // (2 * panel), 2, panel, 2, ci // 2).astype(np.float64).transpose(1, 3, 0, 4, 2)
    size = np.abs(b).max(axis=(0, 2, 4))  # of each input channel's weights: [half, ci / 2]
    rows = _scale(size[1], size[0])
    b = b / np.stack([np.ones_like(rows), rows])[:, None, :, None]
    size = np.abs(b).max(axis=(1, 3))  # of each output channel's: [panel of a pair, pair, NR]
    columns = _scale(size[0], size[1])
    (b11, b21), (b12, b22) = b[0], b[1] * columns[:, None, :]
    sums = (b11 + b22, b11, b12 - b22, b21 - b11, b22, b11 + b12, b21 + b22)
    parts = [np.stack(sums, axis=1), rows, 1 / columns]
    return np.concatenate([k.astype(np.float32).reshape(-1) for k in parts])


STRASSEN = Algorithm(
    "strassen", "conv_strassen.h", "conv_strassen_items", "conv_strassen_count", "conv_strassen_scratch", pack_strassen,
    "conv_fresh",
)  # fmt: skip


def winograd_tile(algorithm: Algorithm) -> WinogradTile | None:
    """The tile of a Winograd algorithm."""
    ways = ((1, WINOGRAD), (2, STRIDED))
    return next((WinogradTile(m, s) for s, some in ways for m, k in some.items() if k is algorithm), None)


CACHED = 24 << 20  # bytes of packed weights that the last level of a cache holds until they are read


@dataclass(frozen=True)
class ConvSizes:
    """What an algorithm's cost depends on; symbolic sizes are guesses."""

    n: int
    out: tuple[int, ...]
    groups: int
    ci: int  # of a group
    co: int  # of a group


def _sizes(node: Node) -> list[ConvSizes]:
    """The sizes; where some are symbolic, several guesses."""
    w, (n, _, *out) = node.operands[1].shape, node.output.shape
    groups = int(node.attrs["groups"])
    ci, co = int(w[1]), int(w[0]) // groups
    batches = (n,) if isinstance(n, int) else BATCHES
    images = [tuple(out)] if all(isinstance(d, int) for d in out) else [guessed(out, size) for size in IMAGES]
    return [ConvSizes(batch, image, groups, ci, co) for batch in batches for image in images]


FARTHEST = 1 << 31  # dilations from here on are left to the kernel that does not multiply them by sizes of tiles
MOST_SHARED = 8  # channels of a group, for the depthwise kernel
WINO_LINE = 64  # conv_wino.h's: pixels from a tile's first to its last, at most, where lanes are pixels
TURNING = 4  # what turning a vector costs, in elements that are moved one by one
WIDEST = 9  # taps of a depthwise kernel whose weights stay in registers: of more, some at a time
SLIDING = 4  # strides of depthwise kernels that load an input once for all of its uses
SHORT = 160  # terms of a sum that stay in registers: CONV_FLUSH of conv.h
LONGEST_STEP = 16  # stride of conv_rows.h, which copies what lies between
MOST_MAPS = 512  # output channels of conv_rows.h, whose panels the compiler writes out one by one
LARGEST = 1e30  # of weights whose sums are sure to be finite
COLUMN = 7  # taps of a column whose weights stay in registers beside the sums of conv_pixels.h
MOST_OUTPUTS = 48  # of a group, where lanes are pixels: of more, whole vectors of channels do better on any machine


def groups_fit_lanes(co: int, groups: int, ci: int, lanes: int) -> bool:
    """True where the depthwise kernel serves `groups` groups of `ci` channels: see conv_dw.h."""
    each = co // groups
    if groups == 1 or ci > MOST_SHARED or (ci > 1 and each >= lanes):
        return False
    if ci == 1:
        return True
    # Where vectors begin in their group, they begin again after `each` of them.
    ends = ((c // each, (min(c + lanes, co) - 1) // each) for c in range(0, min(co, each * lanes), lanes))
    return all((last - first + 1) * ci <= lanes for first, last in ends)


def _halves(node: Node, lanes: int) -> bool:
    """True where conv_strassen.h can compute a convolution."""
    w, a = node.operands[1].shape, node.attrs
    if len(w) != 4 or tuple(w[2:]) != (1, 1) or a["groups"] > 1 or int(w[1]) % (2 * lanes) or int(w[0]) % (4 * lanes):
        return False
    constant = constant_of(node.operands[1])
    if constant is None or not constant.size or any((*a["low"], *a["high"])):
        return False
    # Channels that training has let die, far smaller than those that they meet, would be lost in sums with these.
    size = np.abs(constant.reshape(-1, 2, 2 * lanes, 2, int(w[1]) // 2))
    inputs, outputs = size.max(axis=(0, 1, 2)), size.max(axis=(3, 4))
    return bool(size.max() < LARGEST) and _are_near(*inputs) and _are_near(outputs[:, 0], outputs[:, 1])


def candidates(
    node: Node, lanes: int, *, winograd: bool = True, planar: bool = False, pixels: bool = False, halves: bool = False
) -> list[Algorithm]:
    """The algorithms that can compute a convolution, simplest first. Without `winograd`: those that only sum.
    `planar`: the image lies so, and has more channels than the others turn. `pixels`: the lanes of the epilogue may be.
    `halves`: the epilogue may be that of Strassen's algorithm, whose lanes are channels.
    """
    w, a = node.operands[1].shape, node.attrs
    if planar:
        return [PIXELS]
    if groups_fit_lanes(int(w[0]), a["groups"], int(w[1]), lanes):
        return [DEPTHWISE if node.output.rank == 4 else VOLUMES]
    kernel, volume = tuple(w[-2:]), len(w) == 5
    ways = WINOGRAD if all(s == 1 for s in a["strides"][-2:]) else {}
    if all((s, d) == (2, 1) for s, d in zip(a["strides"][-2:], a["dilations"][-2:], strict=True)):
        ways = STRIDED
    plain = not (volume and a["groups"] > 1) and max(a["dilations"]) < FARTHEST
    # Images of few channels may be planar, and would leave most lanes of Winograd's transforms empty.
    few, width = int(w[0]) // a["groups"] <= MOST_OUTPUTS and can_take_pixels(node), node.output.shape[-1]
    few = few and pixels and not (isinstance(width, int) and width < NARROW_ROWS)
    found = [DIRECT, PIXELS] if few else [DIRECT]
    if pixels and takes_rows(node):
        found.append(ROWS)
    if winograd and plain and kernel in ((3, 3), (1, 3), (3, 1)) and int(w[1]) > PLANES:
        found += [k for m, k in ways.items() if tuple(3 if t > 1 else 1 for t in m) == kernel]
    if winograd and halves and _halves(node, lanes):
        found.append(STRASSEN)
    return found


def costs(ways: Sequence[Algorithm], node: Node, lanes: int, planar: bool | None = None) -> list[float]:
    """The work of each algorithm, by that of the best.

    `planar`: whether the result lies so, or channels-last; where neither counts, None.
    With symbolic sizes it is the mean square over several: what is good for most of them, and far off for none.
    """
    total = [0.0] * len(ways)
    for z in _sizes(node):
        each = [_cost(k, node, lanes, z) + _turning(k, z, lanes, planar) for k in ways]
        best = max(min(each), 1.0)
        total = [t + (e / best) ** 2 for t, e in zip(total, each, strict=True)]
    least = min(total) or 1.0  # of no images
    return [t / least for t in total]


def _turning(algorithm: Algorithm, z: ConvSizes, lanes: int, planar: bool | None) -> float:
    """The cost of turning sums whose lanes are not what is contiguous in the result."""
    vectors = z.n * math.prod(z.out) * z.groups * -(-z.co // lanes)
    if planar is None or planar == (algorithm is PIXELS):
        return 0
    return vectors * lanes * (0.25 if algorithm is PIXELS else 0.55)


def _cost(algorithm: Algorithm, node: Node, lanes: int, z: ConvSizes) -> float:
    """Estimated work for given sizes, in pairs of multiplications of a vector (a cycle of a common core).

    The constants were fitted to single-thread times of the layers of ResNet-50, YOLO and a UNet: weights that come from
    memory bound products with few rows, though half of the multiplications hide behind the reading, and Winograd pays
    for its transforms by the tile.
    """
    blocks = z.groups * -(-z.co // lanes)

    def packing(points: int) -> float:
        """Weights that are known at run time only are turned, transformed, written and read in every run."""
        if constant_of(node.operands[1]) is not None:
            return 0
        vectors = z.ci * blocks
        return vectors * (20 + (4 + 0.75 * lanes) * points * (2 if 4 * vectors * lanes * points > CACHED else 1))

    m = winograd_tile(algorithm)
    if m is not None:
        points, planes = m.points, math.prod(int(d) for d in node.operands[1].shape[2:-2])
        packed = packing(m.weights * planes)
        flat = zip(z.out[-2:], node.attrs["dilations"][-2:], m.outputs, strict=True)
        tiles = z.n * math.prod(z.out[:-2]) * math.prod(_tiles(*k) for k in flat)
        inputs, outputs = (90, 80) if points == 16 else (7 * points, 6.4 * points)
        points, inputs = points * planes, inputs * planes
        apart = 1.1 if max(node.attrs["dilations"][-2:]) > 1 else 1  # tiles of interleaved images share few lines
        transforms = tiles * (inputs * -(-z.ci * z.groups // lanes) + outputs * blocks)
        return apart * _products(z, lanes, points, tiles, m.weights * planes) + transforms + packed
    taps = math.prod(int(d) for d in node.operands[1].shape[2:])
    pixels = z.n * math.prod(z.out)
    if algorithm is STRASSEN:
        vectors, pairs = z.ci // (2 * lanes), z.n * -(-math.prod(z.out) // 2)
        half = replace(z, ci=z.ci // 2, co=z.co // 2)
        sums = pairs * (8 * vectors + 12 * blocks)
        return 1.03 * (_products(half, lanes, PRODUCTS, pairs, PRODUCTS) + pixels * (12 + 6 * blocks) + sums)
    if algorithm is PIXELS:
        own, rows = pixel_way(node, lanes), z.n * math.prod(z.out[:-1])
        vectors = rows * -(-z.out[-1] // (own.vectors * lanes)) * own.vectors
        shared = own.taps > 0 or own.outputs.together > 1  # what is loaded serves several sums
        multiply = vectors * z.ci * taps * own.outputs.together * own.outputs.parts * (0.6 if shared else 1)
        copied = vectors * z.ci * math.prod(map(int, node.attrs["strides"][-2:]))
        each = 2 if z.groups > 1 or z.ci <= PLANES else 6  # a vector copied from rows, or turned
        return z.groups * (multiply + each * copied + 2 * vectors * z.co)
    if algorithm is ROWS:
        most = 14 if lanes >= 16 else 12 if z.co <= lanes else 6
        tiles = -(-z.out[-1] // most)
        computed = tiles * -(-z.out[-1] // tiles) / z.out[-1]  # pixels, of one that is used
        return computed * _products(z, lanes, taps, pixels, taps) + pixels * (2 + blocks) + packing(taps)
    return _inside(node, z) * _products(z, lanes, taps, pixels, taps) + pixels * (12 + 6 * blocks) + packing(taps)


def _products(z: ConvSizes, lanes: int, points: int, rows: int, different: int) -> float:
    """The cost of `points` products of `rows` pixels by the channels, with `different` sets of weights."""
    blocks = z.groups * -(-z.co // lanes)
    weights = different * z.ci * blocks * lanes
    multiply = points * z.ci * blocks * rows / 2
    return max(multiply, 0.25 * weights if 4 * weights <= 1 << 20 else 0.4 * weights + 0.55 * multiply)


def takes_rows(node: Node) -> bool:
    """True where conv_rows.h can compute a convolution, and sums are short enough for it to gain."""
    x, a, width = node.operands[0].shape, node.attrs, node.output.shape[-1]
    maps, *sizes = map(int, node.operands[1].shape)
    if len(sizes) != 3 or sizes[-1] == 1 or math.prod(sizes) > SHORT or maps > MOST_MAPS or a["groups"] > 1:
        return False
    fits = max(a["dilations"]) == 1 and a["strides"][-1] <= LONGEST_STEP and x[1] == sizes[0]
    return bool(fits) and not (isinstance(width, int) and width < 4)


def row_sizes(node: Node) -> str:
    """The template arguments of conv_rows.h: input channels, a kernel's width and stride, output channels, and pixels of
    a tile.
    """
    co, ci, _, kx = map(int, node.operands[1].shape)
    width = node.output.shape[-1]
    pixels = f"cr_pixels<{co}, {width if isinstance(width, int) else 0}>"
    return f"<{ci}, {kx}, {node.attrs['strides'][-1]}, {co}, {pixels}>"


@dataclass(frozen=True)
class PixelWay:
    """The template arguments of conv_pixels.h, and how many vectors of pixels a tile is wide."""

    outputs: Pixels
    taps: int
    stride: int
    long: bool
    way: str
    vectors: int

    def __str__(self) -> str:
        return f"<{self.outputs.together}, {self.taps}, {self.stride}, {str(self.long).lower()}, {self.way}>"


def pixel_way(node: Node, lanes: int) -> PixelWay:
    """How conv_pixels.h computes a convolution, as it is seen."""
    w, a, (rows, width) = node.operands[1].shape, node.attrs, node.output.shape[-2:]
    outputs, taps, stride = pixels_of(int(w[0]) // a["groups"]), int(w[-2]), int(a["strides"][-2])
    line = isinstance(rows, int) and rows <= 2
    tall = isinstance(width, int) and width <= lanes
    way, vectors = ("PX_LINE", 8) if line else ("PX_TALL", 1) if tall else ("PX_WIDE", 2)
    if outputs.together > 1 or taps == 1 or stride > 2 or a["dilations"][-2] > 1:
        return PixelWay(outputs, 0, 0, False, way, vectors)
    each = taps if taps <= COLUMN else -(-taps // -(-taps // COLUMN))
    return PixelWay(outputs, each, stride, taps > each, way, vectors)


def _tiles(size: int, dilation: int, m: int) -> int:
    """Tiles along an axis: wino_tiles of conv_wino.h."""
    return size // (dilation * m) * dilation + min(size % (dilation * m), dilation)


def _inside(node: Node, z: ConvSizes) -> float:
    """The share of taps that conv.h multiplies: those beyond the image are left out where a tile has no others."""
    return _share_inside(node, z.out) if reaches_far(node) else 1


FAR = 0.8  # share of taps that is multiplied, under which leaving out the others pays


def reaches_far(node: Node) -> bool:
    """True where conv.h looks for taps beyond the image (ConvDilated there): of dilated and of very large kernels. Single
    taps reach nowhere, whatever their dilation (a chain's 1x1 kernels are no ConvDilated: see conv_rows).
    """
    taps = zip(node.operands[1].shape[2:], node.attrs["dilations"], strict=True)
    return any(k != 1 and d > 1 for k, d in taps) or any(_share_inside(node, z.out) < FAR for z in _sizes(node))


def _share_inside(node: Node, out: Sequence[int]) -> float:
    """An estimate of it, for padded axes; rows are left out more surely than columns, of which a tile has several."""
    a, shares = node.attrs, []
    for k, (size, taps) in enumerate(zip(out, map(int, node.operands[1].shape[2:]), strict=True)):
        padded = size > 0 and (a["low"][k] or a["high"][k])
        shares.append(1 - _beyond(size, taps, a["dilations"][k]) / (size * taps) if padded else 1)
    return min(1.0, 1.2 * shares[0] * (1 + math.prod(shares[1:])) / 2)


def _beyond(size: float, taps: int, dilation: int) -> float:
    """The pixels, of `size` for each tap, where a centred kernel has its taps beyond the image: as many as a tap is away
    from the middle, at most all. Each side has an arithmetic series of them, of which the first `near` are not all.
    """
    side, first = taps // 2, 1 if taps % 2 else 0.5
    near = min(side, max(0, math.ceil(size / dilation - first)))
    return 2 * (dilation * near * (first + (near - 1) / 2) + (side - near) * size)


def subject(node: Node) -> str:
    """A readable text that says all that the speed of an algorithm depends on: symbolic sizes as `?`."""

    def times(sizes: Sequence[Dim]) -> str:
        return "x".join(str(d) if isinstance(d, int) else "?" for d in sizes)

    x, w, a = node.operands[0].shape, node.operands[1].shape, node.attrs
    parts = [f"conv {times(x)}", f"to {w[0]}", f"kernel {times(w[2:])}"]
    parts += [f"{key} {times(a[key])}" for key in ("strides", "dilations") if any(v != 1 for v in a[key])]
    parts += [f"padded {times(a['low'])}"] if any(a["low"]) else []
    parts += [f"groups {a['groups']}"] if a["groups"] > 1 else []
    parts += ["weights at run time"] if constant_of(node.operands[1]) is None else []
    return ", ".join([parts[0] + " " + parts[1], *parts[2:]])
