"""Convolution kernels: direct, depthwise and Winograd, and how their weights are packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from onnxc.codegen.cpp.emitter import TemplateEmitter
from onnxc.codegen.cpp.epilogue import Epilogue
from onnxc.codegen.cpp.writer import KernelSource, indent
from onnxc.ir.expr import Dim, index, symbols
from onnxc.ir.graph import Node
from onnxc.loops.access import unflatten
from onnxc.planner.templates import conv_image
from onnxc.primitives.builder import constant_of

Pack = Callable[[np.ndarray, int], np.ndarray]


@dataclass(frozen=True)
class Algorithm:
    """One way to convolve: its header, its functions in C++, and the packing of [CO, CI / groups, KH, KW] weights."""

    name: str
    header: str
    items: str
    count: str
    scratch: str
    pack: Pack


def panels(w: np.ndarray, panel: int) -> np.ndarray:
    """[CO, K...] to [ceil(CO / panel)][K...][panel], zero padded."""
    count = -(-w.shape[0] // panel)
    full = np.zeros((count * panel, *w.shape[1:]), w.dtype)
    full[: w.shape[0]] = w
    return np.ascontiguousarray(np.moveaxis(full.reshape(count, panel, *w.shape[1:]), 1, -1))


def pack_direct(w: np.ndarray, panel: int, groups: int = 1) -> np.ndarray:
    """[group][panel][ky][kx][ci][NR]"""
    parts = [panels(g.transpose(0, 2, 3, 1), panel) for g in np.split(w, groups)]
    return np.stack(parts)


def pack_depthwise(w: np.ndarray, panel: int) -> np.ndarray:
    """[ky][kx][co]"""
    return np.ascontiguousarray(w[:, 0].transpose(1, 2, 0))


def winograd_matrix(m: int) -> np.ndarray:
    """G of F(m x m, 3 x 3), in float64: points 0, 1, -1 for m = 2; 0, +-45/64, +-91/64 for m = 4; and infinity."""
    if m == 2:
        return np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
    points = [0.0, 45 / 64, -45 / 64, 91 / 64, -91 / 64]
    rows = [np.array([1, q, q * q]) / np.prod([q - p for p in points if p != q]) for q in points]
    return np.array([*rows, [0, 0, 1]])


def _pack_winograd(m: int) -> Pack:
    """[panel][p][ci][NR] of U = G g G'"""
    g = winograd_matrix(m)
    both = np.kron(g, g)  # [T * T, 9]

    def pack(w: np.ndarray, panel: int) -> np.ndarray:
        co, ci = w.shape[:2]
        u = (w.reshape(co * ci, 9).astype(np.float64) @ both.T).astype(np.float32)
        return panels(u.reshape(co, ci, -1).transpose(0, 2, 1), panel)

    return pack


DIRECT = Algorithm("direct", "conv.h", "conv_items", "conv_items_count", "conv_scratch", pack_direct)
DEPTHWISE = Algorithm("depthwise", "conv_dw.h", "conv_dw_items", "conv_dw_count", "conv_dw_scratch", pack_depthwise)
WINOGRAD = {
    m: Algorithm(
        f"winograd F({m}x{m})",
        "conv_wino.h",
        f"conv_wino_items<{m}>",
        f"conv_wino_count<{m}>",
        f"conv_wino_scratch<{m}>",
        _pack_winograd(m),
    )
    for m in (2, 4)
}


UNKNOWN_SIZE = 56  # what a symbolic size is taken for when an algorithm is chosen


def choose(node: Node, lanes: int) -> Algorithm:
    """The algorithm with the least estimated work, in multiplications of a vector.

    The constants were fitted to single-thread times of the layers of ResNet-50, YOLO and a UNet: a pass over the
    weights bounds products with few rows, and Winograd pays for its transforms by the tile.
    """
    w, a = node.operands[1].shape, node.attrs
    if a["groups"] > 1 and w[1] == 1 and a["groups"] == node.operands[0].shape[1]:
        return DEPTHWISE
    plain = all(s == 1 for s in (*a["strides"], *a["dilations"], a["groups"]))
    if not plain or tuple(w[2:]) != (3, 3):
        return DIRECT
    n, oh, ow = (
        d if isinstance(d, int) else k
        for d, k in zip((node.output.shape[0], *node.output.shape[2:]), (1, UNKNOWN_SIZE, UNKNOWN_SIZE), strict=True)
    )
    ci, blocks = int(w[1]), -(-int(w[0]) // lanes)

    def products(points: int, rows: int) -> float:
        bytes_ = 4 * points * ci * blocks * lanes
        least = 0.25 if bytes_ <= 1 << 20 else 0.5 if bytes_ <= 8 << 20 else 0.75
        return points * ci * blocks * lanes * max(rows / (2 * lanes), least)

    pixels = n * oh * ow
    costs = {DIRECT: products(9, pixels) + pixels * (12 + 6 * blocks)}
    for m, inputs, outputs in ((2, 90, 80), (4, 250, 230)):
        tiles = n * -(-oh // m) * -(-ow // m)
        costs[WINOGRAD[m]] = products((m + 2) ** 2, tiles) + tiles * (inputs * -(-ci // lanes) + outputs * blocks)
    return min(costs, key=lambda k: costs[k])


class ConvEmitter(TemplateEmitter):
    """A convolution over channels-last activations."""

    def emit(self) -> KernelSource:
        node = self.group.node
        assert node is not None
        x = conv_image(self.layout, node.operands[0])
        assert x is not None, "the planner checked the operand"
        algorithm = choose(node, self.lanes)
        n, c, y, x_ = (
            index(k, d) for k, d in zip(("qn", "qc", "qy", "qx"), self._four(node.output.shape), strict=True)
        )
        names = {next(iter(symbols(v))): t for v, t in ((n, "q.n"), (c, "c"), (y, "q.y"), (x_, "q.x"))}
        pixel = index("qi", 1 << 60)
        names[next(iter(symbols(pixel)))] = "q.i"
        places = (n, c, y, x_) if node.output.rank == 4 else (n, c, x_)
        spatial = unflatten(pixel, (node.output.shape[0], *node.output.shape[2:]))
        epilogue = self.epilogue(Epilogue(
            self.group, self.layout, self.lanes, places, names, c, self.buffers,
            aligned=node.attrs["groups"] == 1, linear=(spatial[0], c, *spatial[1:]),
        ))  # fmt: skip
        shape = self._shape(node, x.strides)
        weights = self._weights(node, algorithm)
        scratch = f"ox_up({algorithm.scratch}({shape}), 64) * 64"
        body = [f"const ConvShape z = {shape};", "const auto epi = [=](Px q, i64 c, vf acc, auto lanes) OX_LAMBDA { (void)q; (void)c;",
                *indent(epilogue), "};",
                f"{algorithm.items}{self._specialised(node, algorithm)}(z, {self.pointer(x.value)} + {self.size(x.base)}, {weights}, first, last, "
                f"a->scratch + worker * ({scratch}), epi);"]  # fmt: skip
        return self.source(
            body,
            f"{algorithm.count}({shape})",
            algorithm.header,
            f"ctx->threads * ({scratch})",
            [],
            f"conv {algorithm.name}",
        )

    def _specialised(self, node: Node, algorithm: Algorithm) -> str:
        """Template arguments: a depthwise kernel of common shape is compiled for its width and stride."""
        if algorithm is not DEPTHWISE:
            return ""
        w, a = node.operands[1].shape, node.attrs
        width, stride = int(w[-1]), int(a["strides"][-1])
        known = width in (3, 5, 7) and stride in (1, 2) and a["dilations"][-1] == 1 and w[0] == a["groups"]
        return f"<{width}, {stride}>" if known else "<0, 0>"

    @staticmethod
    def _four(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
        return shape if len(shape) == 4 else (shape[0], shape[1], 1, shape[2])

    def _shape(self, node: Node, strides: tuple[Dim, ...]) -> str:
        a = node.attrs
        n, ci, h, w = self._four(node.operands[0].shape)
        _, co, oh, ow = self._four(node.output.shape)
        kernel = self._four(node.operands[1].shape)[2:]
        one = node.output.rank == 3
        pairs = [(1, *a[k]) if one else tuple(a[k]) for k in ("strides", "dilations")]
        low = (0, *a["low"]) if one else tuple(a["low"])
        ins, _, irs, ips = self._four(strides) if not one else (strides[0], 1, 0, strides[2])
        fields: list[Dim] = [
            n,
            h,
            w,
            ci,
            oh,
            ow,
            co,
            *kernel,
            *pairs[0],
            *pairs[1],
            *low,
            a["groups"],
            ins,
            irs,
            ips,
            1,
        ]
        return f"ConvShape{{{', '.join(self.size(f) for f in fields)}}}"

    def _weights(self, node: Node, algorithm: Algorithm) -> str:
        constant = constant_of(node.operands[1])
        assert constant is not None
        panel, groups = 2 * self.lanes, node.attrs["groups"]
        w = constant if constant.ndim == 4 else constant[:, :, None, :]

        def packed() -> np.ndarray:
            return pack_direct(w, panel, groups) if algorithm is DIRECT else algorithm.pack(w, panel)

        def write(out: np.ndarray) -> None:
            out.view(np.float32)[...] = packed().reshape(-1)

        nbytes = self._packed_size(w.shape, algorithm, panel, groups) * 4
        offset = self.weights.add_packed((algorithm.name, node.operands[1].id, panel), nbytes, write)
        self.packed.append(("f32", offset))
        return f"w{len(self.packed) - 1}"

    @staticmethod
    def _packed_size(shape: tuple[int, ...], algorithm: Algorithm, panel: int, groups: int) -> int:
        co, ci, kh, kw = shape
        if algorithm is DEPTHWISE:
            return co * kh * kw
        points = kh * kw if algorithm is DIRECT else (16 if algorithm is WINOGRAD[2] else 36)
        return groups * -(-(co // groups) // panel) * panel * points * ci
