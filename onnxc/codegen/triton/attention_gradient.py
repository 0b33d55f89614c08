"""The derivative of attention: probabilities are computed again, block by block; none is ever in memory.

A program has a block of queries of one head (for `attention_norm`, and the gradient by the queries) or of its keys (by
the keys, and by the values), and walks through blocks of the others. Each result is added up by one program, always in
the same order. Blocks that a mask hides as a whole are not visited.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from onnxc.codegen.triton import spelling
from onnxc.codegen.triton.attention_mask import Band, Mask, mask_of
from onnxc.codegen.triton.epilogue import Tile, emit_epilogue, symbol
from onnxc.codegen.triton.kernel import Kernel, indent, is_wide, power, touched
from onnxc.codegen.triton.options import MOST_DEPTH, Options, fits_head
from onnxc.codegen.triton.terms import Buffers, TileVariable
from onnxc.errors import InternalError, UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, ceildiv, prod, symbols
from onnxc.ir.graph import Value
from onnxc.loops.terms import Load
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.planner.templates import GradientAccess, Matrix, gradient_access
from onnxc.primitives.attention import PRODUCTS
from onnxc.primitives.attention_gradient import FAR, mask_operand, near

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class GradientTile:
    """How a node of attention's derivative is laid over programs.

    Attributes:
        own: queries, or keys, of a program.
        other: keys, or queries, that it reads at a time.
        warps, stages: as of all kernels.
    """

    own: int = 64
    other: int = 64
    warps: int = 4
    stages: int = 2


def candidates(group: Group) -> list[GradientTile]:
    """The tiles with which a group may run, the best one first as far as is known."""
    assert group.node is not None
    node = group.node
    widths = [node.operands[0].shape[-1], node.output.shape[-1] if node.op != "attention_norm" else 16]
    widths += [node.operands[2].shape[-1]] if node.op == "attention_gradient" else []
    most = max(power(d) if isinstance(d, int) else MOST_DEPTH for d in widths)
    if node.operands[0].dtype.bits > 16 or most > 128:
        return [GradientTile(16, 16, 4, 1), GradientTile(32, 16, 4, 1)]
    if most > 64:
        return [GradientTile(64, 32, 4, 2), GradientTile(64, 64, 8, 2), GradientTile(64, 32, 4, 1)]
    return [
        GradientTile(128, 64, 8, 2), GradientTile(64, 64, 4, 2), GradientTile(64, 64, 4, 3),
        GradientTile(128, 64, 4, 2), GradientTile(64, 128, 4, 2), GradientTile(128, 128, 8, 2),
    ]  # fmt: skip


def emit_gradient(group: Group, layout: Layout, options: Options, choice: GradientTile | None = None) -> Kernel:
    """The kernel of a group of attention's derivative."""
    assert group.node is not None
    access = gradient_access(layout, group.node)
    if access is None:
        raise InternalError("an operand of attention's derivative is behind a view that it cannot read through")
    if not (fits_head(access.sizes[2]) and fits_head(access.sizes[3])):
        found = f"heads of {access.sizes[2]} and {access.sizes[3]}"
        raise UnsupportedError(f"attention's derivative on a GPU with {found}: at most {MOST_DEPTH}")
    blocks = choice or candidates(group)[0]
    return _Stream(group, layout, options, access, blocks).kernel()


class _Stream:
    """One kernel being written. `mine` is the axis of a program's block, `m` (queries) or `k` (keys)."""

    def __init__(
        self, group: Group, layout: Layout, options: Options, access: GradientAccess, blocks: GradientTile
    ) -> None:
        assert group.node is not None
        self.group, self.layout, self.access, self.blocks = group, layout, access, blocks
        self.node = node = group.node
        self.of: str = "" if node.op == "attention_norm" else node.attrs["of"]
        self.by_key = self.of in ("k", "v")
        self.queries, self.keys, self.depth, self.columns = access.sizes
        self.dtype = node.operands[0].dtype
        self.half = "" if self.dtype is dtypes.float32 else f".to({spelling.stored(self.dtype)})"
        self.dot = options.of_dot(self.dtype)
        self.scale = float(node.attrs.get("scale", 1.0))
        self.fill: float | None = node.attrs.get("fill")
        self.wide = is_wide(touched(group, layout))
        bias = mask_operand(node)
        mask = Mask(nothing=True) if bias is None else mask_of(bias, self.queries, self.keys, self.fill)
        self.bias = None if mask.nothing else access.bias
        self.band: Band | None = None
        most = PRODUCTS * abs(self.scale)
        if mask.band is not None and mask.band.hides(self.queries, self.keys, self.dtype, most):
            self.band, self.bias = mask.band, None
        out = node.output.shape[-1]
        self.width = 1 if not self.of else max(16, power(int(str(out))))
        self.buffers = Buffers()
        self.tile = Tile((blocks.own, self.width), self.buffers)

    def kernel(self) -> Kernel:
        """All of it."""
        size = self.keys if self.by_key else self.queries
        lines = [*self._place(size), *self._before(), *self._loop(), *self._after()]
        lines += emit_epilogue(self.group, self.layout, self.access.index, self.tile, "acc")
        programs = ceildiv(size, self.blocks.own) * prod(d for _, d in self.access.batch)
        return Kernel(lines, self.buffers, programs, self.blocks.warps, self.blocks.stages, self.node.op, self.wide)

    # ------------------------------------------------------------ indices

    def _place(self, size: Dim) -> list[str]:
        """Which block of which head a program has, those with most to do first."""
        own, tile, access = self.blocks.own, self.tile, self.access
        long = ".to(tl.int64)" if self.wide else ""
        count = tile.index(ceildiv(size, own))
        last = self.band is not None and not self.by_key
        block = f"({count} - 1 - pid % {count})" if last else f"pid % {count}"
        lines = [f"rest = pid // {count}", f"own0 = {block} * {own}", f"own = own0 + tl.arange(0, {own}){long}"]
        lines += tile.heads(access.batch)
        whole = isinstance(size, int) and size % own == 0
        lines += ["x = own[:, None]"] + ([] if whole else [f"xm = x < {tile.index(size)}"])
        self.own_mask = None if whole else f"(own < {tile.index(size)})"
        axis = access.key if self.by_key else access.row
        tile.lane(symbol(axis), TileVariable("x", 0, own, None if whole else "xm"))
        if self.of:
            lines.append(f"n = tl.arange(0, {self.width})[None, :]")
            real = self.node.output.shape[-1]
            lines += [] if real == self.width else [f"nm = n < {real}"]
            tile.lane(
                symbol(access.column), TileVariable("n", 1, self.width, None if real == self.width else "nm")
            )  # fmt: skip
        return lines

    def _index(self, d: Dim) -> str:
        return self.tile.index(d)

    def _matrix(self, x: Matrix, rows: str, size: Dim, tested: str | None, turned: bool = False) -> str:
        """Loads rows of an operand, [rows, width] or turned; lanes beyond either side are 0."""
        wide = max(16, power(int(str(size))))
        up, along = ("[None, :]", "[:, None]") if turned else ("[:, None]", "[None, :]")
        lanes = f"tl.arange(0, {wide}){along}"
        parts = [self._index(x.base)]
        for name, stride in ((f"{rows}{up}", x.row), (lanes, x.col)):
            text = self._index(stride)
            parts.append(name if text == "1" else f"{name} * {text}")
        tests = [f"{tested}{up}"] if tested else []
        tests += [f"({lanes} < {size})"] if wide != size else []
        masked = f", mask={' & '.join(tests)}, other=0.0" if tests else ""
        return f"tl.load({self.buffers.pointer(x.value)} + {' + '.join(p for p in parts if p != '0')}{masked})"

    def _numbers(self, which: int, rows: str, tested: str | None, other: str) -> str:
        """Loads a norm or a delta for each row."""
        value, address = self.access.rows[which]
        own = Tile((1,), self.buffers)
        own.names = {k: n for k, n in self.tile.names.items() if k not in self.tile.variables}
        own.scalar(symbol(self.access.row), rows)
        masked = f", mask={tested}, other={other}" if tested else ""
        each = "" if symbol(self.access.row) in symbols(address) else f" + 0 * {rows}"
        return f"tl.load({self.buffers.pointer(value)} + {own.index(address)}{each}{masked})"

    # ------------------------------------------------------------ the pass

    def _before(self) -> list[str]:
        """What a program reads once, and where its sums begin."""
        own = self.blocks.own
        long = ".to(tl.int64)" if self.wide else ""
        lines = [f"oo = tl.arange(0, {self.blocks.other}){long}"]
        q, k, *more = self.access.matrices
        mask = self.own_mask
        if self.by_key:
            lines.append(f"k = {self._matrix(k, 'own', self.depth, mask)}")
            lines += [f"v = {self._matrix(more[0], 'own', self.columns, mask)}"] if self.of == "k" else []
        else:
            lines.append(f"q = {self._matrix(q, 'own', self.depth, mask)}")
        if self.of == "q":
            lines.append(f"dy = {self._matrix(more[1], 'own', self.columns, mask)}")
            norm, delta = (self._numbers(k, "own", mask, other) for k, other in enumerate(("float('inf')", "0.0")))
            lines += [f"norm = {norm} * {LOG2E!r}", f"delta = {delta}"]
        if not self.of:
            infinity = "float('-inf')"
            return [
                *lines,
                f"top = tl.full(({own},), {infinity}, tl.float32)",
                f"total = tl.zeros(({own},), tl.float32)",
            ]
        return [*lines, f"acc = tl.zeros(({own}, {self.width}), tl.float32)"]

    def _loop(self) -> list[str]:
        """Over the blocks of the other side."""
        step = self.blocks.other
        size = self.queries if self.by_key else self.keys
        start, end = "0", self._index(size)
        band = self.band
        if band is not None:
            # Of a key j, the queries i with lower <= j - i <= upper; of a query, the keys.
            low, high = (
                (None if band.upper is None else -band.upper, None if band.lower is None else -band.lower)
                if self.by_key
                else (band.lower, band.upper)
            )
            if low is not None:
                start = f"tl.maximum(own0 + {self._index(low)}, 0) // {step} * {step}"
            if high is not None:
                end = f"tl.minimum({end}, own0 + {self._index(high + self.blocks.own)})"
        whole = isinstance(size, int) and size % step == 0
        far = "tl.full((), 0, tl.int64) + step" if self.wide else "step"
        inside = None if whole else f"(other < {self._index(size)})"
        body = [f"first = {far}", "other = first + oo", *self._block(inside)]
        # Added is 0, which is not known when machine code is made: see attention.py.
        lines = [f"start = {start} + tl.program_id(1)", f"end = {end} + tl.program_id(2)"]
        return [*lines, f"for step in range(start, end, {step}):", *indent(body)]

    def _block(self, inside: str | None) -> list[str]:
        q, k, *more = self.access.matrices
        if self.by_key:
            lines = [f"q = {self._matrix(q, 'other', self.depth, inside, turned=True)}", f"s = tl.dot(k, q{self.dot})"]
            norm = self._numbers(0, "other", inside, "float('inf')")
            lines.append(f"norm = {norm} * {LOG2E!r}")
        else:
            lines = [f"k = {self._matrix(k, 'other', self.depth, inside, turned=True)}", f"s = tl.dot(q, k{self.dot})"]
        lines += self._scores(inside)
        if not self.of:
            return [*lines, *self._sums()]
        lines.append(f"p = {self._exp2}(s - norm{'[None, :]' if self.by_key else '[:, None]'})")
        if self.node.attrs.get("guard", False):
            lines.append("p = tl.where(p == p, p, 0.0)")
        if self.of == "v":
            dy = self._matrix(more[1], "other", self.columns, inside)
            return [*lines, f"dy = {dy}", f"acc = tl.dot(p{self.half}, dy, acc{self.dot})"]
        if self.of == "k":
            lines += [
                f"dy = {self._matrix(more[1], 'other', self.columns, inside, turned=True)}",
                f"delta = {self._numbers(1, 'other', inside, '0.0')}",
                f"ds = p * (tl.dot(v, dy{self.dot}) - delta[None, :])",
            ]
            return [*lines, *self._replaced(), f"acc = tl.dot(ds{self.half}, tl.trans(q), acc{self.dot})"]
        lines += [
            f"v = {self._matrix(more[0], 'other', self.columns, inside, turned=True)}",
            f"ds = p * (tl.dot(dy, v{self.dot}) - delta[:, None])",
        ]
        return [*lines, *self._replaced(), f"acc = tl.dot(ds{self.half}, tl.trans(k), acc{self.dot})"]

    @property
    def _exp2(self) -> str:
        return "tl.exp2" if self.dtype is dtypes.float32 else "ox_exp2_half"

    def _scores(self, inside: str | None) -> list[str]:
        """Scores times log2(e), as the mask has them; minus infinity for those that are hidden, or are none."""
        number = spelling.scalar
        lines, unit = [], repr(LOG2E)
        if self.bias is None:
            lines.append(f"s = s * {number(self.scale * LOG2E)}")
        elif self.fill is None:
            added = self._mask(self.bias)
            low = number(-FAR)
            lines += [
                *added[:-1], f"s = s * {number(self.scale)} + {added[-1]}",
                f"s = tl.where((s < {low}) & (s != float('-inf')), {low}, s) * {unit}",
            ]  # fmt: skip
        else:
            hidden = self._mask(self.bias)
            fill = number(near(self.fill) * LOG2E)
            lines += [*hidden[:-1], f"filled = {hidden[-1]}"]
            lines.append(f"s = tl.where(filled, {fill}, s * {number(self.scale * LOG2E)})")
        tests = []
        if inside and not self.by_key:  # of a query that is none, the norm is infinite
            tests.append(f"{inside}[None, :]")
        if self.band is not None:
            row, key = ("other[None, :]", "x") if self.by_key else ("x", "other[None, :]")
            bounds = ((self.band.upper, "<="), (self.band.lower, ">="))
            tests += [f"({key} - {row} {op} {self._index(b)})" for b, op in bounds if b is not None]
        return [*lines, *([f"s = tl.where({' & '.join(tests)}, s, float('-inf'))"] if tests else [])]

    def _replaced(self) -> list[str]:
        """A score that is replaced does not count."""
        return ["ds = tl.where(filled, 0.0, ds)"] if self.fill is not None and self.bias is not None else []

    def _mask(self, bias: tuple[Value, Dim]) -> list[str]:
        """Statements that read a block of the mask, and last its name."""
        value, address = bias
        blocks, access = self.blocks, self.access
        own = Tile((blocks.own, blocks.other), self.buffers)
        own.names = dict(self.tile.names)
        own.variables = {k: v for k, v in self.tile.variables.items() if v.axis == 0}
        size = self.queries if self.by_key else self.keys
        whole = isinstance(size, int) and size % blocks.other == 0
        test = None if whole else f"(other < {self._index(size)})[None, :]"
        other = access.row if self.by_key else access.key
        own.lane(symbol(other), TileVariable("other[None, :]", 1, blocks.other, test))
        emitter, scope = own.emitter(), own.scope()
        name = emitter.emit(Load(value.dtype, value, (address,)), scope)
        return [*scope.lines, name]

    def _sums(self) -> list[str]:
        """The largest score of a row, and the sum of powers of two beside it."""
        exp2 = self._exp2
        return [
            "high = ox_max(top, tl.reduce(s, 1, ox_max))",
            "base = tl.where(high == float('-inf'), 0.0, high)",
            f"total = total * {exp2}(top - base) + tl.reduce({exp2}(s - base[:, None]), 1, ox_add)", "top = high",
        ]  # fmt: skip

    def _after(self) -> list[str]:
        if not self.of:
            # log(2) times (top + log2(total)); of a row without keys, minus infinity.
            return [f"acc = (top * {math.log(2)!r} + tl.log(total))[:, None]"]
        lines = [] if self.of == "v" else [f"acc = acc * {spelling.scalar(self.scale)}"]
        return lines if self.dtype is dtypes.float32 else [*lines, f"acc = acc{self.half}.to(tl.float32)"]
