"""Convolution kernels, by the algorithms of conv_algorithms.py.

A kernel sees an image (rank 4) or a volume (rank 5); `seen` says how a line, and a volume whose kernel leaves some axes
alone, is an image.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from onnxc.codegen.cpp import prefetch
from onnxc.codegen.cpp.conv_algorithms import (
    DEPTHWISE,
    DIRECT,
    PIXELS,
    PRODUCTS,
    ROWS,
    SLIDING,
    STRASSEN,
    TURNING,
    VOLUMES,
    WIDEST,
    WINO_LINE,
    Algorithm,
    WinogradTile,
    candidates,
    costs,
    pixel_way,
    pixels_of,
    reaches_far,
    row_sizes,
    subject,
    winograd_tile,
)  # fmt: skip
from onnxc.codegen.cpp.emitter import TemplateEmitter
from onnxc.codegen.cpp.epilogue import Epilogue
from onnxc.codegen.cpp.writer import KernelSource, indent
from onnxc.ir.expr import Dim, Symbol, always_equal, index, prod, symbols
from onnxc.ir.graph import Node, Value
from onnxc.loops.access import unflatten
from onnxc.passes.prepare import reads_planes
from onnxc.planner.groups import Group
from onnxc.planner.templates import conv_image
from onnxc.primitives.builder import constant_of


@dataclass(frozen=True)
class Seen:
    """A convolution as its kernel sees it: of an image or a volume.

    `strides` are those of its operand in memory, `places` gives the index of the result in the model from that of the
    result as it is seen.
    """

    node: Node
    strides: tuple[Dim, ...]
    places: Callable[[tuple[Dim, ...]], tuple[Dim, ...]]


def seen(node: Node, strides: tuple[Dim, ...]) -> Seen:
    """A line is an image of one row. A volume is a batch of images where the kernel has one plane, and an image of its
    planes where the kernel has one column; where neither is so, or its memory does not allow it, it stays a volume."""
    x, y, w, a = node.operands[0].shape, node.output.shape, node.operands[1].shape, node.attrs

    def alone(axis: int) -> bool:
        """The axis is neither summed over nor cut."""
        k = axis - 2
        return w[axis] == 1 and a["strides"][k] == 1 and always_equal(a["low"][k], 0) and always_equal(x[axis], y[axis])

    if node.output.rank == 3:
        flat = _reshaped(node, *((*s[:2], 1, s[2]) for s in (x, w, y)), keep=(None, 0))
        return Seen(flat, (*strides[:2], 0, strides[2]), lambda q: (q[0], q[1], q[3]))
    if node.output.rank == 5 and alone(2) and (x[0] == 1 or always_equal(strides[0], x[2] * strides[2])):
        flat = _reshaped(node, (x[0] * x[2], x[1], *x[3:]), (*w[:2], *w[3:]), (y[0] * y[2], y[1], *y[3:]), keep=(1, 2))
        batch = (y[0], y[2])

        def of_batch(q: tuple[Dim, ...]) -> tuple[Dim, ...]:
            n, z = unflatten(q[0], batch)
            return (n, q[1], z, *q[2:])

        return Seen(flat, (strides[2], strides[1], *strides[3:]), of_batch)
    if node.output.rank == 5 and alone(3) and alone(4) and always_equal(strides[3], x[4] * strides[4]):
        shapes = ((*s[:3], s[3] * s[4]) for s in (x, w, y))
        size = (y[3], y[4])
        flat = _reshaped(node, *shapes, keep=(0, None))
        return Seen(flat, (*strides[:3], strides[4]), lambda q: (*q[:3], *unflatten(q[3], size)))
    return Seen(node, strides, lambda q: q)


def _reshaped(
    node: Node, x: tuple[Dim, ...], w: tuple[Dim, ...], y: tuple[Dim, ...], *, keep: tuple[int | None, ...]
) -> Node:
    """The convolution of other shapes; `keep` has the old spatial axis of each new one, None for a plain one."""
    constant = constant_of(node.operands[1])
    weights = Value(node.operands[1].t.with_shape(w))
    if constant is not None:
        Node("constant", [], [weights], {"value": constant.reshape(w)})
    attrs = {key: tuple(plain if k is None else node.attrs[key][k] for k in keep)
             for key, plain in (("strides", 1), ("dilations", 1), ("low", 0), ("high", 0))}  # fmt: skip
    return Node(
        node.op,
        [Value(node.operands[0].t.with_shape(x)), weights],
        [Value(node.output.t.with_shape(y))],
        {**node.attrs, **attrs},
    )


def _pixels(node: Node) -> int:
    """Pixels of the result; where they are not known, more than there will ever be."""
    sizes = (node.output.shape[0], *node.output.shape[2:])
    known = [d for d in sizes if isinstance(d, int)]
    return max(1, math.prod(known)) if len(known) == len(sizes) else 1 << 60


@dataclass(frozen=True)
class Stage:
    """One convolution of a kernel: its sizes, operand and weights in C++, and its epilogue's statements."""

    algorithm: Algorithm
    special: str  # template arguments
    shape: str
    x: str
    weights: str  # packed; empty where that is done at run time
    source: str  # the weights as they lie, for that
    epilogue: list[str]
    near: str  # an argument: the rows that the epilogue writes and reads
    across: bool  # the epilogue's lanes are pixels

    @property
    def scratch(self) -> str:
        return f"{self.algorithm.scratch}({self.shape})"

    def packed_at(self, place: str) -> list[str]:
        """Statements that pack the weights at run time, from where they lie to `place` in the workspace."""
        packer, place = self.algorithm.packer, f"(f32 *)(a->scratch + {place})"
        return [
            "const auto pack = [](void *arg, i64 first, i64 last, int) {",
            "  const ox_call *const a = (const ox_call *)arg; ox_ctx *const ctx = a->ctx; @SIZES@",
            f"  {packer}::pack({self.shape}, ConvWeights{{{self.source}}}, first, last, {place});",
            "};",
            f"ox_for(ctx, {packer}::count({self.shape}), pack, &c);",
        ]

    def lambda_named(self, name: str) -> list[str]:
        """The epilogue as a function object."""
        pixel = "PxVolume" if self.shape.startswith("ConvVolume") else "Px"
        before, end = ("conv_across(", "});") if self.across else ("", "};")
        head = f"const auto {name} = {before}[=]({pixel} q, i64 c, vf acc, auto lanes) OX_LAMBDA {{ (void)q; (void)c;"
        return [head, *indent(self.epilogue), end]


class ConvEmitter(TemplateEmitter):
    """A convolution over channels-last activations, or of planar ones with few outputs."""

    alone = True  # it may choose among all algorithms: there are no others in the kernel

    def emit(self) -> KernelSource:
        stage = self.stage()
        scratch = f"ox_up({stage.scratch}, 64) * 64"
        weights, room, before = stage.weights, f"ctx->threads * ({scratch})", []
        if not weights:
            weights = f"(const f32 *)(a->scratch + {room})"
            before = stage.packed_at(room)
            room += f" + {stage.algorithm.packer}::bytes({stage.shape})"
        body = [
            f"const auto z = {stage.shape};",
            *stage.lambda_named("epi"),
            f"{stage.algorithm.items}{stage.special}(z, {stage.x}, {weights}, first, last, "
            f"a->scratch + worker * ({scratch}), epi{stage.near});",
        ]
        items = f"{stage.algorithm.count}({stage.shape})"
        name = f"conv {stage.algorithm.name}"
        each = f"for (i64 t = 0; t < ctx->threads; t++) {stage.algorithm.fresh}(scratch + t * ({scratch}));"
        fresh = [each] if stage.algorithm.fresh else []
        return self.source(body, items, stage.algorithm.header, room, [*fresh, *before], name)

    def stage(self) -> Stage:
        """The convolution of `group`."""
        node = self.group.node
        assert node is not None
        x = conv_image(self.layout, node.operands[0], planar=True)
        assert x is not None, "the planner checked the operand"
        own = seen(node, x.strides)
        terms = ("q.n", "c", "q.y", "q.x") if own.node.output.rank == 4 else ("q.n", "c", "q.z", "q.y", "q.x")
        q = tuple(index(k.replace(".", ""), d) for k, d in zip(terms, own.node.output.shape, strict=True))
        names = {next(iter(symbols(v))): t for v, t in zip(q, terms, strict=True)}
        pixel = index("qi", _pixels(node))
        names[next(iter(symbols(pixel)))] = "q.i"
        spatial = unflatten(pixel, (node.output.shape[0], *node.output.shape[2:]))
        end = Epilogue(
            self.group, self.layout, self.lanes, own.places(q), names, q[1], self.buffers,
            aligned=node.attrs["groups"] == 1, linear=(spatial[0], q[1], *spatial[1:]),
        )  # fmt: skip
        turned = self._turned(own)
        # Where a plan must not change bits, neither may the order in which its results lie.
        halves = self._across(own, end, turned, None) is None
        planar = turned.apart() <= end.apart()
        algorithm = self._algorithm(node, own, None if end.nest.exact else planar, halves)
        if algorithm.name == PIXELS.name:
            across = turned if planar or node.attrs["groups"] > 1 else None
        else:
            across = self._across(own, end, turned, winograd_tile(algorithm))
        (row,) = symbols(pixel)
        epilogue = self.epilogue(across or end)
        fetches = across is None and algorithm.name in (DIRECT.name, ROWS.name, STRASSEN.name)
        near = self._near(end, row, stores=algorithm is not STRASSEN) if fetches else ""
        at = f"{self.pointer(x.value)} + {self.size(x.base)}"
        shape, special = self._shape(own), self._specialised(own.node, algorithm)
        constant = constant_of(own.node.operands[1])
        weights = "" if constant is None else self._packed(node.operands[1], constant, node.attrs["groups"], algorithm)
        source = self._source(node) if constant is None else ""
        return Stage(algorithm, special, shape, at, weights, source, epilogue, near, across is not None)

    def _across(self, own: Seen, plain: Epilogue, turned: Epilogue, tile: WinogradTile | None) -> Epilogue | None:
        """The epilogue whose lanes are pixels of a plane (conv_across.h), where it moves fewer elements one by one."""
        size = prod(own.node.output.shape[2:])
        if plain.apart() <= TURNING or (isinstance(size, int) and 2 * size < self.lanes):
            return None
        if tile is not None and tile.outputs[1] * own.node.attrs["dilations"][-1] > WINO_LINE:
            return None
        return turned if turned.apart() + TURNING < plain.apart() else None

    def _turned(self, own: Seen) -> Epilogue:
        """The epilogue whose lanes are pixels of a plane."""
        y = own.node.output.shape
        size = prod(y[2:])
        n, c, place = index("qn", y[0]), index("c", y[1]), index("qp", size)
        linear = f"q.y * ({self.size(y[-1])}) + q.x"
        if len(y) == 5:
            linear = f"q.z * ({self.size(prod(y[-2:]))}) + {linear}"
        names = {next(iter(symbols(v))): t for v, t in ((n, "q.n"), (c, "c"), (place, f"({linear})")) if symbols(v)}
        places = own.places((n, c, *unflatten(place, y[2:])))
        end = Epilogue(self.group, self.layout, self.lanes, places, names, place, self.buffers, aligned=False)
        for phase in end.nest.phases:
            prefetch.fetch_ahead(phase, prefetch.STRIP * self.lanes)
        return end

    def _near(self, end: Epilogue, row: Symbol, *, stores: bool) -> str:
        """The rows that the epilogue reads, and those that it writes, for the template to fetch their lines in time."""
        written = () if stores else [s.value for s in end.nest.stores()]
        found = [
            f"ConvLines{{{self.pointer(value)} + {self.size(base)}, {self.size(apart)}}}"
            for value, base, apart in end.matrices(row)
            if value.dtype.name == "float32" and value not in written
        ]
        return f", ConvNear<{len(found)}>{{{{{', '.join(found)}}}}}" if found else ""

    def _algorithm(self, node: Node, own: Seen, planar: bool | None, halves: bool) -> Algorithm:
        """The tuned or the cheapest algorithm; where there are several, the choice is noted. `planar`: an epilogue whose
        lanes are pixels moves no more elements one by one; None where that must not matter. `halves`: one whose lanes are
        channels is the better one.
        """
        flat, channels = own.node, own.node.operands[0].shape[1]
        rows = channels != 1 and not always_equal(own.strides[1], 1) and not reads_planes(node)
        ways = candidates(
            flat, self.lanes, winograd=self.options.winograd, planar=rows, pixels=planar is not None and self.alone,
            halves=halves and self.alone,
        )  # fmt: skip
        found = {k.name: k for k in ways}
        each = costs(ways, flat, self.lanes, planar)
        decided = self.options.decide(subject(node), dict(zip(found, each, strict=True)))
        self.choice = decided if len(found) > 1 else None
        chosen = found[decided.chosen]
        if chosen is ROWS:
            sizes = row_sizes(flat)
            return replace(ROWS, items=ROWS.items + sizes, count=ROWS.count + sizes, scratch=ROWS.scratch + sizes)
        if chosen is not PIXELS:
            return chosen
        way = pixel_way(flat, self.lanes)
        of_all = f"<{way.outputs.together}, {way.way}>"
        return replace(
            PIXELS, items=f"{PIXELS.items}{way}", count=PIXELS.count + of_all, scratch=PIXELS.scratch + of_all
        )

    def _specialised(self, node: Node, algorithm: Algorithm) -> str:
        """Template arguments: the widths of panels (conv.h); of a depthwise kernel taps and stride along the axis that its
        tiles slide on (conv_dw.h).
        """
        w, a = node.operands[1].shape, node.attrs
        tile = winograd_tile(algorithm)
        if algorithm is DIRECT or tile is not None:
            each = int(w[0]) // a["groups"]
            short = f", conv_short({each}, {math.prod(map(int, w[1:]))})" if tile is None else ""
            sizes = "" if tile is None else "".join(f"{m}, " for m in (*tile.outputs, tile.stride))
            return f"<{sizes}conv_widths({each}){short}>"
        if algorithm not in (DEPTHWISE, VOLUMES):
            return ""
        permuted = not int(w[0]) == a["groups"] == node.operands[0].shape[1]
        tall = int(w[-2]) > int(w[-1])
        taps, stride = (int(d[-2 if tall else -1]) for d in (w, a["strides"]))
        if stride > SLIDING:
            return f"<0, 0, {str(permuted).lower()}>"
        each = taps if taps <= WIDEST else -(-taps // -(-taps // (WIDEST - 1)))
        return f"<{each}, {stride}, {', '.join(str(f).lower() for f in (permuted, taps > each, tall))}>"

    def _shape(self, own: Seen) -> str:
        node, a = own.node, own.node.attrs
        x, w, y = node.operands[0].shape, node.operands[1].shape, node.output.shape
        (ins, ics, *_, irs, ips), low = own.strides, a["low"]
        pairs = (*w[-2:], *a["strides"][-2:], *a["dilations"][-2:], *low[-2:])
        fields: list[Dim] = [x[0], *x[-2:], x[1], *y[-2:], y[1], *pairs, a["groups"], ins, irs, ips, ics]
        shape = f"ConvShape{{{', '.join(self.size(f) for f in fields)}}}"
        if node.output.rank == 4:
            return f"ConvDilated{{{shape}}}" if reaches_far(node) else shape
        depth = (x[2], y[2], w[2], a["strides"][0], a["dilations"][0], low[0], own.strides[2])
        return f"ConvVolume{{{shape}, {', '.join(self.size(f) for f in depth)}}}"

    def _source(self, node: Node) -> str:
        """Weights that are packed at run time, as they lie: the fields of a ConvWeights."""
        w = conv_image(self.layout, node.operands[1], planar=True)
        assert w is not None, "the planner checked the operand"
        own = (w.strides[0], w.strides[1], *(0,) * (5 - len(w.strides)), *w.strides[2:])
        at = f"(const f32 *)a->p[{self.pointer(w.value)[1:]}] + {self.size(w.base)}"
        return ", ".join([at, *(self.size(s) for s in own)])

    def _packed(self, weights: Value, constant: np.ndarray, groups: int, algorithm: Algorithm) -> str:
        panel = 2 * self.lanes

        def packed() -> np.ndarray:
            return algorithm.pack(constant, panel, groups)

        def write(out: np.ndarray) -> None:
            out.view(np.float32)[...] = packed().reshape(-1)

        nbytes = self._packed_size(constant.shape, algorithm, panel, groups) * 4
        key = (algorithm.name, weights.id, panel, groups, constant.shape)  # the layout depends on all of these
        offset = self.weights.add_packed(key, nbytes, write)
        self.packed.append(("f32", offset))
        return f"w{len(self.packed) - 1}"

    @staticmethod
    def _packed_size(shape: tuple[int, ...], algorithm: Algorithm, panel: int, groups: int) -> int:
        co, ci, *taps = shape
        if algorithm in (DEPTHWISE, VOLUMES):
            return math.prod(shape)
        if algorithm.name == PIXELS.name:
            outputs = pixels_of(co // groups)
            return groups * outputs.parts * outputs.together * ci * math.prod(taps)
        if algorithm is STRASSEN:
            return (PRODUCTS * co * ci + 2 * ci + 2 * co) // 4
        m = winograd_tile(algorithm)
        points = math.prod(taps) if m is None else m.weights * math.prod(taps[:-2])
        return groups * -(-(co // groups) // panel) * panel * points * ci


class ConvChainEmitter(ConvEmitter):
    """Convolutions that run band by band (conv_chain.h): what lies between them is never a buffer."""

    alone = False

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
            rows = f"conv_{'dw_' if k == middle else ''}rows{stage.special}"
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
