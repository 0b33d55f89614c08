"""Attention as one kernel: an online softmax over blocks of keys; no score is ever in memory.

A program has a block of queries of one head. It keeps the running maximum and sum of each row, and the result scaled to
them. Powers of two replace exponentials: their unit is part of the multiplication that they need anyway.

    whole blocks of keys    products, exponentials, products
    what is left            the same, with a test of each key: the last block, those that a causal mask cuts

What a mask hides from all rows of a block is not visited (see `attention_mask.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from onnxc.codegen.triton import spelling
from onnxc.codegen.triton.attention_heads import Sharing, shared_heads
from onnxc.codegen.triton.attention_mask import Band
from onnxc.codegen.triton.attention_parts import INFINITY, Parts
from onnxc.codegen.triton.attention_roles import Roles, emit_roles, roles_of
from onnxc.codegen.triton.attention_scores import LOG2E, TAME, Unit, unit_of
from onnxc.codegen.triton.attention_steps import ScoreSteps, steps_of
from onnxc.codegen.triton.attention_tiles import VECTOR, AttentionTile, Facts, parts_of
from onnxc.codegen.triton.attention_tiles import candidates as ranked
from onnxc.codegen.triton.epilogue import Tile, emit_epilogue, symbol
from onnxc.codegen.triton.kernel import Kernel, indent, is_wide, power, touched
from onnxc.codegen.triton.options import MOST_DEPTH, Options, fits_head
from onnxc.codegen.triton.terms import Buffers, TileVariable
from onnxc.errors import InternalError, UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, ceildiv, is_nonnegative, prod, substitute
from onnxc.loops.terms import Load
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.planner.templates import AttentionAccess, Matrix, attention_access

JOINING = 4  # warps that join the parts of a row


def candidates(group: Group, layout: Layout) -> list[AttentionTile]:
    """The tiles with which an attention group may run, the best one first as far as is known."""
    access, sharing = shared_heads(_access(group, layout))
    facts = _facts(access, sharing, _scores(group, access), group, layout)
    parts = parts_of(facts, math.prod(d for _, d in access.batch if isinstance(d, int)))
    return [replace(tile, parts=parts) for tile in ranked(facts)]


def _roles(
    access: AttentionAccess, sharing: Sharing | None, scores: ScoreSteps, group: Group, layout: Layout
) -> Roles | None:  # fmt: skip
    """What warps with roles can compute of it."""
    assert group.node is not None
    scale = float(group.node.attrs.get("scale", 1.0))
    if sharing is not None or is_wide(touched(group, layout)) or not 1 / TAME <= scale <= TAME:
        return None
    return roles_of(access, scores, scale * LOG2E, group, layout)


def emit_attention(
    group: Group, layout: Layout, options: Options, choice: AttentionTile | None = None
) -> list[Kernel]:  # fmt: skip
    """The kernels of an attention group, in the order in which they run."""
    access, sharing = shared_heads(_access(group, layout))
    queries, _, depth, columns = access.sizes
    if not (fits_head(depth) and isinstance(columns, int) and fits_head(columns)):
        raise UnsupportedError(f"attention on a GPU with heads of {depth} and {columns}: at most {MOST_DEPTH}")
    scores = _scores(group, access)
    blocks = choice or next(t for t in candidates(group, layout) if t.only is None)
    roles = _roles(access, sharing, scores, group, layout) if blocks.roles else None
    if roles is not None:
        return [emit_roles(roles, blocks)]
    wide = is_wide(touched(group, layout))
    heads, lanes = prod(d for _, d in access.batch), max(16, power(columns))
    tile = Tile((blocks.rows, lanes), Buffers())
    count = queries * (sharing.count if sharing is not None else 1)
    parts = Parts.of(heads, blocks.parts, count, columns) if blocks.parts > 1 else None
    lines = _place(tile, access, sharing, scores.by_position, wide, blocks.parts)
    stream = _Stream(tile, access, blocks, scores, group, options, wide, parts)
    lines += stream.lines()
    if parts is not None:
        lines += parts.stored(tile)
        each = Kernel(
            lines, tile.buffers, heads * parts.count, blocks.warps, blocks.stages, "attention", wide,
            scratch=(parts.sums, parts.facts),
        )  # fmt: skip
        tile = Tile((1, lanes), Buffers())
        lines = _place(tile, access, sharing, False, wide, joins=True)
        lines += [*stream.joined(tile), *stream.result(tile)]
        lines += emit_epilogue(group, layout, access.index, tile, "acc")
        return [each, Kernel(lines, tile.buffers, heads * count, JOINING, 1, "attention", wide)]
    lines += [*stream.result(tile), *emit_epilogue(group, layout, access.index, tile, "acc")]
    programs = (1 if sharing is not None else ceildiv(queries, blocks.rows)) * heads
    return [Kernel(lines, tile.buffers, programs, blocks.warps, blocks.stages, "attention", wide)]


def _access(group: Group, layout: Layout) -> AttentionAccess:
    assert group.node is not None
    access = attention_access(layout, group.node)
    if access is None:
        raise InternalError("attention's operand is behind a view that it cannot read through")
    return access


def _scores(group: Group, access: AttentionAccess) -> ScoreSteps:
    assert group.node is not None
    return steps_of(group.node, *access.sizes[:2])


def _facts(
    access: AttentionAccess, sharing: Sharing | None, scores: ScoreSteps, group: Group, layout: Layout
) -> Facts:  # fmt: skip
    assert group.node is not None
    dtype = group.node.output.dtype
    queries, keys = (d if isinstance(d, int) else None for d in access.sizes[:2])
    if sharing is not None and queries is not None:
        queries *= sharing.count
    count = prod(d for _, d in access.batch)
    most = power(max([d if isinstance(d, int) else MOST_DEPTH for d in access.sizes[2:]]))
    heads = count if isinstance(count, int) else None
    wide = is_wide(touched(group, layout))
    roles = dtype.bits == 16 and _roles(access, sharing, scores, group, layout) is not None
    return Facts(queries, keys, heads, most, dtype.bits, scores.band is not None, is_described(access, wide), roles)


def _place(
    tile: Tile, access: AttentionAccess, sharing: Sharing | None, backward: bool, wide: bool, parts: int = 1,
    joins: bool = False,
) -> list[str]:  # fmt: skip
    """Which queries of which heads a program has.

    Args:
        backward: the last ones first, which have most to do.
        parts: of the keys; where there are several, all rows of a head are in one tile.
        joins: it has one row of such a tile.
    """
    queries, _, _, columns = access.sizes
    rows, lanes = tile.shape
    kind, own = ".to(tl.int64)" if wide else "", f"tl.arange(0, {rows})"
    first = [f"part = pid % {parts}", f"pid = pid // {parts}"] if parts > 1 else []
    if joins:
        count = tile.index(queries * (sharing.count if sharing is not None else 1))
        first, own = [f"one = pid % {count}", f"pid = pid // {count}"], "(one + tl.arange(0, 1))"
    if sharing is None and (joins or parts > 1):
        limit, lane, lines = queries, "m", ["rest = pid", "row0 = 0", f"m = {own}{kind}[:, None]"]
    elif sharing is None:
        limit, count = queries, tile.index(ceildiv(queries, rows))
        block = f"({count} - 1 - pid % {count})" if backward else f"pid % {count}"
        lines = [f"rest = pid // {count}", f"row0 = {block} * {rows}", f"m = (row0 + tl.arange(0, {rows}))[:, None]"]
        lane = "m"
    else:
        limit, lane = queries * sharing.count, "lane"
        lines = ["rest = pid", "row0 = 0", f"lane = {own}{kind}[:, None]", f"m = lane % {queries}"]
    lines = [*first, *lines]
    lines.append(f"n = tl.arange(0, {lanes})[None, :]")
    lines += tile.heads(access.batch)
    masks: list[str | None] = []
    for name, own, size, most in (("m", lane, limit, rows), ("n", "n", columns, lanes)):
        whole = (joins and name == "m") or (isinstance(size, int) and size % most == 0)
        masks.append(None if whole else f"{name}m")
        lines += [] if whole else [f"{name}m = {own} < {tile.index(size)}"]
    tile.lane(symbol(access.row), TileVariable("m", 0, rows, masks[0]))
    tile.lane(symbol(access.column), TileVariable("n", 1, lanes, masks[1]))
    if sharing is not None:
        lines.append(f"head = b{sharing.at} * {sharing.count} + lane // {queries}")
        tile.lane(sharing.loop, TileVariable("head", 0, rows, masks[0]))
    return lines


def is_described(access: AttentionAccess, wide: bool) -> bool:
    """Whether tensor descriptors can tell how keys and values lie: rows and heads are whole vectors apart."""
    _, keys, *wideness = access.sizes
    for x, lanes in ((access.k, wideness[0]), (access.v, wideness[1])):
        size = x.value.dtype.itemsize
        steps = [x.base] if isinstance(x.base, int) else [c for _, c in x.base.terms]
        if x.col != 1 or not isinstance(x.row, int) or x.row <= 0 or any(c * size % VECTOR for c in [x.row, *steps]):
            return False
        if not isinstance(lanes, int) or lanes < 16 or lanes != power(lanes) or size != 2:
            return False
    return not wide and is_nonnegative(keys - 1)


class _Stream:
    """The pass over all keys, into `acc`."""

    def __init__(
        self,
        tile: Tile,
        access: AttentionAccess,
        blocks: AttentionTile,
        scores: ScoreSteps,
        group: Group,
        options: Options,
        wide: bool,
        parts: Parts | None = None,
    ) -> None:
        assert group.node is not None
        self.tile, self.access, self.blocks, self.wide, self.parts = tile, access, blocks, wide, parts
        self.attrs, self.dtype = group.node.attrs, group.node.output.dtype
        self.keys = access.sizes[1]
        self.deep = max(16, power(int(str(access.sizes[2]))))
        self.described = bool(blocks.described) and is_described(access, wide)
        self.dot = options.of_dot(self.dtype)
        self.steps, self.band = scores.steps, scores.band

    def lines(self) -> list[str]:
        """The statements."""
        rows, keys = self.blocks.rows, self.blocks.keys
        d, e = self.deep, self.tile.shape[1]
        long = ".to(tl.int64)" if self.wide else ""
        lines = [
            f"dd = tl.arange(0, {d})", f"ee = tl.arange(0, {e})", f"kk = tl.arange(0, {keys}){long}",
            f"q = {self._queries()}",
            *self._resident(d),
            *self._tiles(),
            f"top = tl.full(({rows},), {INFINITY}, tl.float32)", f"total = tl.zeros(({rows},), tl.float32)",
            f"acc = tl.zeros(({rows}, {e}), tl.float32)", *self._loops(),
        ]  # fmt: skip
        return lines

    # ------------------------------------------------------------ loops

    def _loops(self) -> list[str]:
        """Over blocks that need no test, and over those that do."""
        rows, step = self.blocks.rows, self.blocks.keys
        keys = self._index(self.keys)
        band, lines = self.band, []
        if band is None and isinstance(self.keys, int):
            whole, end = str(self.keys // step * step), keys
        elif band is None:
            whole, end = f"{keys} // {step} * {step}", keys
        else:
            end = whole = keys
            if band.upper is not None:
                end = f"tl.minimum({keys}, row0 + {self._index(band.upper + rows)})"
                whole = f"tl.minimum({keys}, tl.maximum(row0 + {self._index(band.upper + 1)}, 0))"
            whole = f"{whole} // {step} * {step}"
            if band.lower is not None:
                whole = f"tl.maximum(row0 + {self._index(band.lower)}, 0) // {step} * {step}"
        # Added is 0, but that is not known when machine code is made: a loop that is known to take one turn would be
        # none any more, and its products would wait for each other.
        lines += [f"whole = {whole} + tl.program_id(1)", f"end = {end} + tl.program_id(2)"]
        if self.parts is not None:
            lines += self.parts.bounds(keys, step)
        if band is None or band.lower is None:
            lines += self._loop("0" if self.parts is None else "first", "whole", tested=False)
        if band is not None or not isinstance(self.keys, int) or self.keys % step:
            lines += self._loop("whole", "end", tested=True)
        return lines

    def _loop(self, start: str, end: str, tested: bool) -> list[str]:
        far = "tl.full((), 0, tl.int64) + step" if self.wide else "step"
        body = [f"k0 = {far}", "key = k0 + kk", *self._block(tested)]
        return [f"for step in range({start}, {end}, {self.blocks.keys}):", *indent(body)]

    def _block(self, tested: bool) -> list[str]:
        """One block of keys."""
        inside = "" if not tested or self._fills else f"(kk < {self._index(self.keys)} - k0)"
        across = f"{inside}[None, :]" if inside else None
        tests = [across] if across else []
        tests += self._seen(self.band) if tested and self.band is not None else []
        loads, masks = self._masks(across)
        unit = self._unit(masks)
        half = "" if self.dtype is dtypes.float32 else f".to({spelling.stored(self.dtype)})"
        exp2 = self._exp2
        base = f"tl.where(high == {INFINITY}, 0.0, high)"
        # Where all keys so far are masked, the maximum is -inf, and -inf - -inf would be NaN too early.
        base = base if unit.factor is None or unit.late else f"{base} * {unit.factor}"
        key_mask = [across, self._deep("[:, None]")]
        value_mask = [f"{inside}[:, None]" if inside else None, self._far]
        return [
            *self._read("k", key_mask),
            f"s = tl.dot(q, k{self.dot})", *loads, *unit.scores,
            *([f"s = tl.where({' & '.join(tests)}, s, {INFINITY})"] if tests else []),
            "high = ox_max(top, tl.reduce(s, 1, ox_max))", f"base = {base}",
            f"p = {exp2}({unit.exponent('s', 'base[:, None]')})", f"old = {exp2}({unit.exponent('top', 'base')})",
            "total = total * old + tl.reduce(p, 1, ox_add)",
            *self._read("v", value_mask),
            f"acc = tl.dot(p{half}, v, acc * old[:, None]{self.dot})", "top = high",
        ]  # fmt: skip

    @property
    def _exp2(self) -> str:
        return "tl.exp2" if self.dtype is dtypes.float32 else "ox_exp2_half"  # no half has use for what that lacks

    def _unit(self, masks: Sequence[str]) -> Unit:
        """The unit of scores; `masks` are the names of what steps are done by, in order."""
        scale = float(self.attrs.get("scale", 1.0))
        return unit_of(scale, self.steps, masks, [value.dtype for value, _ in self.access.masks], self.dtype)

    def _seen(self, band: Band) -> list[str]:
        """The tests of a key by a band. What differs from block to block is on the side that has fewer registers."""
        bounds = ((band.upper, "<="), (band.lower, ">="))
        return [f"(kk[None, :] {op} m - k0 + {self._index(b)})" for b, op in bounds if b is not None]

    def _masks(self, inside: str | None) -> tuple[list[str], list[str]]:
        """Statements that read masks, and what the steps that have one are done by: added numbers, conditions."""
        own = Tile((self.blocks.rows, self.blocks.keys), self.tile.buffers)
        own.names = dict(self.tile.names)
        own.variables = {s: v for s, v in self.tile.variables.items() if v.axis == 0}
        own.lane(symbol(self.access.key), TileVariable("key[None, :]", 1, self.blocks.keys, inside))
        emitter, scope = own.emitter(), own.scope()
        found = []
        for step in self.steps:
            if step.band is not None:
                seen = " & ".join(self._seen(step.band))
                added = f"tl.where({seen}, 0.0, {spelling.scalar(step.band.low)})"
                found.append(added if step.name == "add" else f"~({seen})")
            elif step.mask is not None:
                value, address = self.access.masks[step.mask]
                address = substitute(address, {symbol(self.access.row): 0}) if step.alike else address
                found.append(emitter.emit(Load(value.dtype, value, (address,)), scope))
        return scope.lines, found

    def joined(self, tile: Tile) -> list[str]:
        """Statements that join what programs of parts found, in another kernel's tile."""
        assert self.parts is not None
        unit = self._unit([""] * len(self.steps))
        factor = None if unit.late else unit.factor
        return self.parts.joined(tile, unit.exponent("tops", "base"), factor, self._exp2)

    def result(self, tile: Tile) -> list[str]:
        """What follows the last block: the sums divided by the total."""
        rows = tile.shape[0]
        lines = []
        if self.attrs.get("guard", False):
            lines += [
                "some = (total == total) & (total != 0)",
                f"share = tl.div_rn(tl.full(({rows},), 1.0, tl.float32), tl.where(some, total, 1.0))",
                "acc = tl.where(some[:, None], acc * share[:, None], 0.0)",
            ]
        else:
            lines.append(f"acc = acc * tl.div_rn(tl.full(({rows},), 1.0, tl.float32), total)[:, None]")
            if (
                not isinstance(self.keys, int) or self.keys == 0
            ):  # without keys there is nothing to add up, and no 0 / 0
                lines.append(f"acc = tl.where(tl.full((1, 1), {tile.index(self.keys)}, tl.int64) == 0, 0.0, acc)")
        if self.dtype is not dtypes.float32:
            lines.append(f"acc = acc.to({spelling.stored(self.dtype)}).to(tl.float32)")
        return lines

    # ------------------------------------------------------------ operands

    def _tiles(self) -> list[str]:
        """Where the keys and values of the head begin, and how those of a block lie from there."""
        k, v = self.access.k, self.access.v
        pointed = [
            f"k_tile = {self._sum(k, 'kk[None, :]', 'dd[:, None]', base=False)}",
            f"v_tile = {self._sum(v, 'kk[:, None]', 'ee[None, :]', base=False)}",
        ]
        lines = [f"k_base = {self._index(k.base)}", f"v_base = {self._index(v.base)}"]
        if not self.described:
            return [*lines, *pointed]
        lies = []
        for name, x, lanes in (("k", k, self.deep), ("v", v, self.tile.shape[1])):
            pointer, sizes = self.tile.buffers.pointer(x.value), f"[{self._index(self.keys)}, {lanes}]"
            block = f"[{self.blocks.keys}, {lanes}]"
            lies.append(
                f"{name}_lies = tl.make_tensor_descriptor({pointer} + {name}_base, {sizes}, [{x.row}, 1], {block})"
            )
        return [*lines, "if ox_descriptors:", *indent(lies), "else:", *indent(pointed)]

    def _read(self, name: str, masks: list[str | None]) -> list[str]:
        """Reads keys or values of a block. Descriptors know where they end: 0 is read beyond."""
        x = {"k": self.access.k, "v": self.access.v}[name]
        pointed = f"{name} = {self._load(x, f'({name}_base + k0 * {self._index(x.row)}) + {name}_tile', masks)}"
        if not self.described:
            return [pointed]
        turned = ".T" if name == "k" else ""
        return ["if ox_descriptors:", f"    {name} = {name}_lies.load([k0, 0]){turned}", "else:", f"    {pointed}"]

    @property
    def _fills(self) -> bool:
        return isinstance(self.keys, int) and self.keys % self.blocks.keys == 0

    @property
    def _rows(self) -> str | None:
        (rows,) = [v.mask for v in self.tile.variables.values() if v.name == "m"]
        return rows

    def _deep(self, along: str) -> str | None:
        depth = self.access.sizes[2]
        return f"(dd < {depth}){along}" if depth != max(16, power(int(str(depth)))) else None

    @property
    def _far(self) -> str | None:
        columns = self.access.sizes[3]
        return f"(ee < {columns})[None, :]" if columns != self.tile.shape[1] else None

    def _resident(self, d: int) -> list[str]:
        """Queries times one: so they lie in registers in the order of the matrix units, and need no shared memory.

        An infinity among them makes its row NaN, which its scores do anyway.
        """
        if not self.blocks.resident or self.dtype is dtypes.float32:
            return []
        half = spelling.stored(self.dtype)
        one = f"(dd[:, None] == tl.arange(0, {d})[None, :]).to({half})"
        return [f"q = tl.dot(q, {one}).to({half})"]

    def _queries(self) -> str:
        q = self.access.q
        return self._load(q, self._sum(q, "m", "dd[None, :]"), [self._rows, self._deep("[None, :]")])

    def _index(self, d: Dim) -> str:
        return self.tile.index(d)

    def _sum(self, matrix: Matrix, row: str, col: str, base: bool = True) -> str:
        """Positions of elements, from their indices."""
        parts = [self._index(matrix.base)] if base else []
        for name, stride in ((row, matrix.row), (col, matrix.col)):
            text = self._index(stride)
            parts.append(name if text == "1" else f"{name} * {text}")
        return " + ".join(p for p in parts if p != "0")

    def _load(self, matrix: Matrix, where: str, masks: list[str | None]) -> str:
        tests = " & ".join(m for m in masks if m)
        masked = f", mask={tests}, other=0.0" if tests else ""
        return f"tl.load({self.tile.buffers.pointer(matrix.value)} + {where}{masked})"
