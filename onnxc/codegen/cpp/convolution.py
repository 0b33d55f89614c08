"""Convolution kernels: direct, depthwise and Winograd, and how their weights are packed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from onnxc.codegen.cpp.emitter import TemplateEmitter
from onnxc.codegen.cpp.epilogue import Epilogue
from onnxc.codegen.cpp.writer import KernelSource, indent
from onnxc.ir.expr import Dim, index, symbols
from onnxc.ir.graph import Node
from onnxc.loops.access import unflatten
from onnxc.passes.prepare import PLANES
from onnxc.planner.groups import Group
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
    """[ky][kx][ci of a group][co]"""
    return np.ascontiguousarray(w.transpose(2, 3, 1, 0))


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


@dataclass(frozen=True)
class ConvSizes:
    """What an algorithm's cost depends on; symbolic sizes are guesses."""

    n: int
    out: tuple[int, int]
    ci: int  # of a group
    co: int


def _sizes(node: Node) -> ConvSizes:
    w, (n, _, oh, ow) = node.operands[1].shape, four(node.output.shape)
    known = [d if isinstance(d, int) else k for d, k in zip((n, oh, ow), (1, UNKNOWN_SIZE, UNKNOWN_SIZE), strict=True)]
    return ConvSizes(known[0], (known[1], known[2]), int(w[1]), int(w[0]))


MOST_SHARED = 8  # channels of a group, for the depthwise kernel


def groups_fit_lanes(co: int, groups: int, ci: int, lanes: int) -> bool:
    """True where the depthwise kernel serves `groups` groups of `ci` channels: see conv_dw.h."""
    each = co // groups
    if groups == 1 or ci > MOST_SHARED or (ci > 1 and each >= lanes):
        return False
    ends = ((c // each, (min(c + lanes, co) - 1) // each) for c in range(0, co, lanes))
    return all((last - first + 1) * ci <= lanes for first, last in ends)


def candidates(node: Node, lanes: int, *, winograd: bool = True) -> list[Algorithm]:
    """The algorithms that can compute a convolution, simplest first. Without `winograd`: those that only sum."""
    w, a = node.operands[1].shape, node.attrs
    if groups_fit_lanes(int(w[0]), a["groups"], int(w[1]), lanes):
        return [DEPTHWISE]
    plain = all(s == 1 for s in (*a["strides"], *a["dilations"], a["groups"]))
    # Images of few channels may be planar, and would leave most lanes of Winograd's transforms empty.
    if winograd and plain and tuple(w[2:]) == (3, 3) and int(w[1]) > PLANES:
        return [DIRECT, *WINOGRAD.values()]
    return [DIRECT]


def cost(algorithm: Algorithm, node: Node, lanes: int) -> float:
    """Estimated work, in pairs of multiplications of a vector (a cycle of a common core).

    The constants were fitted to single-thread times of the layers of ResNet-50, YOLO and a UNet: a pass over the
    weights bounds products with few rows, and Winograd pays for its transforms by the tile.
    """
    z = _sizes(node)
    blocks = -(-z.co // lanes)

    def products(points: int, rows: int) -> float:
        bytes_ = 4 * points * z.ci * blocks * lanes
        least = 0.25 if bytes_ <= 1 << 20 else 0.5 if bytes_ <= 8 << 20 else 0.75
        return points * z.ci * blocks * lanes * max(rows / (2 * lanes), least)

    for m, inputs, outputs in ((2, 90, 80), (4, 250, 230)):
        if algorithm is WINOGRAD[m]:
            tiles = z.n * -(-z.out[0] // m) * -(-z.out[1] // m)
            return products((m + 2) ** 2, tiles) + tiles * (inputs * -(-z.ci // lanes) + outputs * blocks)
    taps = math.prod(int(d) for d in node.operands[1].shape[2:])
    pixels = z.n * z.out[0] * z.out[1]
    return products(taps, pixels) + pixels * (12 + 6 * blocks)


def choose(node: Node, lanes: int, *, winograd: bool = True) -> Algorithm:
    """The candidate with the least estimated work."""
    return min(candidates(node, lanes, winograd=winograd), key=lambda k: cost(k, node, lanes))


def subject(node: Node) -> str:
    """A readable text that says all that the speed of an algorithm depends on: symbolic sizes as `?`."""

    def times(sizes: Sequence[Dim]) -> str:
        return "x".join(str(d) if isinstance(d, int) else "?" for d in sizes)

    x, w, a = node.operands[0].shape, node.operands[1].shape, node.attrs
    parts = [f"conv {times(x)}", f"to {w[0]}", f"kernel {times(w[2:])}"]
    parts += [f"{key} {times(a[key])}" for key in ("strides", "dilations") if any(v != 1 for v in a[key])]
    parts += [f"padded {times(a['low'])}"] if any(a["low"]) else []
    parts += [f"groups {a['groups']}"] if a["groups"] > 1 else []
    return ", ".join([parts[0] + " " + parts[1], *parts[2:]])


def four(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """The shape of a convolution in one dimension as one in two."""
    return shape if len(shape) == 4 else (shape[0], shape[1], 1, shape[2])


@dataclass(frozen=True)
class Stage:
    """One convolution of a kernel: its sizes, operand and weights in C++, and its epilogue's statements."""

    algorithm: Algorithm
    special: str  # template arguments
    shape: str
    x: str
    weights: str
    epilogue: list[str]

    @property
    def scratch(self) -> str:
        return f"{self.algorithm.scratch}({self.shape})"

    def lambda_named(self, name: str) -> list[str]:
        """The epilogue as a function object."""
        head = f"const auto {name} = [=](Px q, i64 c, vf acc, auto lanes) OX_LAMBDA {{ (void)q; (void)c;"
        return [head, *indent(self.epilogue), "};"]


class ConvEmitter(TemplateEmitter):
    """A convolution over channels-last activations."""

    def emit(self) -> KernelSource:
        stage = self.stage()
        scratch = f"ox_up({stage.scratch}, 64) * 64"
        body = [
            f"const ConvShape z = {stage.shape};",
            *stage.lambda_named("epi"),
            f"{stage.algorithm.items}{stage.special}(z, {stage.x}, {stage.weights}, first, last, "
            f"a->scratch + worker * ({scratch}), epi);",
        ]
        items = f"{stage.algorithm.count}({stage.shape})"
        name = f"conv {stage.algorithm.name}"
        return self.source(body, items, stage.algorithm.header, f"ctx->threads * ({scratch})", [], name)

    def stage(self) -> Stage:
        """The convolution of `group`."""
        node = self.group.node
        assert node is not None
        x = conv_image(self.layout, node.operands[0], planar=True)
        assert x is not None, "the planner checked the operand"
        algorithm = self._algorithm(node)
        n, c, y, x_ = (index(k, d) for k, d in zip(("qn", "qc", "qy", "qx"), four(node.output.shape), strict=True))
        names = {next(iter(symbols(v))): t for v, t in ((n, "q.n"), (c, "c"), (y, "q.y"), (x_, "q.x"))}
        pixel = index("qi", 1 << 60)
        names[next(iter(symbols(pixel)))] = "q.i"
        places = (n, c, y, x_) if node.output.rank == 4 else (n, c, x_)
        spatial = unflatten(pixel, (node.output.shape[0], *node.output.shape[2:]))
        epilogue = self.epilogue(Epilogue(
            self.group, self.layout, self.lanes, places, names, c, self.buffers,
            aligned=node.attrs["groups"] == 1, linear=(spatial[0], c, *spatial[1:]),
        ))  # fmt: skip
        at = f"{self.pointer(x.value)} + {self.size(x.base)}"
        shape, weights = self._shape(node, x.strides), self._weights(node, algorithm)
        return Stage(algorithm, self._specialised(node, algorithm), shape, at, weights, epilogue)

    def _algorithm(self, node: Node) -> Algorithm:
        """The tuned or the cheapest algorithm; where there are several, the choice is noted."""
        found = {k.name: k for k in candidates(node, self.lanes, winograd=self.options.winograd)}
        decided = self.options.decide(subject(node), {k: cost(v, node, self.lanes) for k, v in found.items()})
        self.choice = decided if len(found) > 1 else None
        return found[decided.chosen]

    def _specialised(self, node: Node, algorithm: Algorithm) -> str:
        """Template arguments: a depthwise kernel of common shape is compiled for its width and stride."""
        if algorithm is not DEPTHWISE:
            return ""
        w, a = node.operands[1].shape, node.attrs
        width, stride = int(w[-1]), int(a["strides"][-1])
        grouped = not int(w[0]) == a["groups"] == node.operands[0].shape[1]
        known = width in ((3,) if grouped else (3, 5, 7)) and stride in (1, 2) and a["dilations"][-1] == 1
        return f"<{width}, {stride}{', true' if grouped else ''}>" if known else "<0, 0>"

    def _shape(self, node: Node, strides: tuple[Dim, ...]) -> str:
        a = node.attrs
        n, ci, h, w = four(node.operands[0].shape)
        _, co, oh, ow = four(node.output.shape)
        kernel = four(node.operands[1].shape)[2:]
        one = node.output.rank == 3
        pairs = [(1, *a[k]) if one else tuple(a[k]) for k in ("strides", "dilations")]
        low = (0, *a["low"]) if one else tuple(a["low"])
        ins, ics, irs, ips = (strides[0], strides[1], 0, strides[2]) if one else strides
        fields: list[Dim] = [
            *(n, h, w, ci, oh, ow, co), *kernel, *pairs[0], *pairs[1], *low, a["groups"], *(ins, irs, ips, ics),
        ]  # fmt: skip
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
            return co * ci * kh * kw
        points = kh * kw if algorithm is DIRECT else (16 if algorithm is WINOGRAD[2] else 36)
        return groups * -(-(co // groups) // panel) * panel * points * ci


class ConvChainEmitter(ConvEmitter):
    """Convolutions that run band by band (conv_chain.h): what lies between them is never a buffer."""

    def emit(self) -> KernelSource:
        chain = self.group
        stages: list[Stage] = []
        for group in chain.chain:
            self.group = group
            stages.append(self.stage())
        middle = next(k for k, stage in enumerate(stages) if stage.algorithm is DEPTHWISE)
        first, last = middle > 0, middle + 1 < len(stages)
        ends = f"{str(first).lower()}, {str(last).lower()}"
        shape = stages[middle].shape
        plan = f"chain_plan({shape}, {ends})"
        rest = "0"
        for stage in stages:
            rest = f"ox_max({stage.scratch}, {rest})"
        scratch = f"ox_up(CHAIN_STATE + 4 * ({plan}.before_room + {plan}.after_room) + {rest}, 64) * 64"
        body = [
            *(f"const ConvShape z{k} = {stage.shape};" for k, stage in enumerate(stages)),
            f"const ChainPlan plan = chain_plan(z{middle}, {ends});",
            f"char *const own = a->scratch + worker * ({scratch});",
            "f32 *const rows = (f32 *)(own + CHAIN_STATE), *const results = rows + plan.before_room;",
            "void *const rest = results + plan.after_room;",
            "ChainBand &b = *(ChainBand *)own;",
            "for (i64 item = first; item < last; item++) {",
            f"  b = chain_band(z{middle}, plan, item, b, rows);",
            *([f"  f32 *const before = rows - (b.n * z{middle}.H + b.top) * plan.before;"] if first else []),
            *([f"  f32 *const after = results - (b.n * z{middle}.OH + b.oy0) * plan.after;"] if last else []),
        ]
        for k, stage in enumerate(stages):
            band = "b.have, b.y1" if k < middle else "b.oy0, b.oy1"
            rows = f"conv_dw_rows{stage.special}" if k == middle else "conv_rows"
            body += indent([
                *stage.lambda_named(f"epi{k}"),
                f"{rows}(z{k}, {stage.x}, {stage.weights}, b.n, {band}, rest, epi{k});",
            ])  # fmt: skip
        names = [*(["before"] if first else []), *(["after"] if last else [])]
        body = self._without_buffers([*body, "}"], chain, names)
        text = f"conv chain of {len(stages)}"
        count = f"chain_count({shape}, {ends})"
        fresh = f"for (i64 t = 0; t < ctx->threads; t++) ((ChainBand *)(scratch + t * ({scratch})))->n = -1;"
        return self.source(body, count, "conv_chain.h", f"ctx->threads * ({scratch})", [fresh], text)

    def _without_buffers(self, lines: list[str], chain: Group, names: list[str]) -> list[str]:
        """What lies between the convolutions by its name in the kernel; its place among the buffers goes to the result."""
        (result,) = chain.stored()
        for group, name in zip(chain.chain[:-1], names, strict=True):
            (value,) = group.stored()
            pointer = self.pointer(value)
            lines = [re.sub(rf"\b{pointer}\b", name, line) for line in lines]
            self.buffers[int(pointer[1:])] = self.layout.storage(result)
        return lines
