"""The matmul template: tiles of the result, a loop over K, operands through strides, an open epilogue.

Programs are numbered so that neighbours share rows or columns that the L2 cache still holds. Which tile, and whether a
program does several of them one after the other, is data (`matmul_tiles.py`). Where it does, and where an architecture
has the means, operands are read through tensor descriptors, and the next tile is on its way while one ends.

Two products of the same rows whose results meet (`planner/pairs.py`) are one with a matrix that has the columns of both
in turns: neighbouring sums are those of either, in the same thread, and the epilogue takes them apart.

Where there are few tiles and sums are long, parts of a sum have programs of their own, which store what they found. A
second kernel adds the parts up, always in the same order, and has the epilogue.

Where the run decides how many rows there are, there are kernels with tiles for few of them, too: for so few, positions
have 32 bits.

What a library has the epilogue for, too, may be its product (`extern.py`), if measurements say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from onnxc.codegen.triton import spelling
from onnxc.codegen.triton.epilogue import Tile, emit_epilogue, symbol
from onnxc.codegen.triton.extern import Multiplication, Start, multiplication
from onnxc.codegen.triton.kernel import Kernel, indent, is_wide, narrow, power, touched
from onnxc.codegen.triton.matmul_tiles import candidates, for_few_rows
from onnxc.codegen.triton.options import Options
from onnxc.codegen.triton.product_tiles import Blocks, Facts, by_rows
from onnxc.codegen.triton.terms import Buffers, Packed, TileVariable
from onnxc.errors import InternalError
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, Symbol, always_equal, ceildiv, prod
from onnxc.ir.graph import Value
from onnxc.ir.types import TensorType
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.planner.templates import Matrix, matmul_access
from onnxc.primitives.builder import constant_of

RANKS = 3  # of a library's own suggestions, those that are worth measuring
GROUP = 8  # rows of tiles whose programs follow each other
VECTOR = 16  # bytes: rows are read fastest that begin at multiples of it, and descriptors know no others
PADDED = 256  # columns that rows of a packed constant are a multiple of, if there are as many
LONG = 128  # elements of a row of both operands
JOINS = (16, 256, 8)  # rows and columns of a tile of sums in parts that are added up, and warps


@dataclass(frozen=True)
class Extern:
    """A candidate: the product by cuBLASLt, with the algorithm that it suggests at this rank, from 1 on. `instead` is
    the kernel's tile.
    """

    called: ClassVar[str] = "cublaslt"
    rank: int = 1
    instead: Blocks | None = None


def emit_matmul(group: Group, layout: Layout, options: Options, way: Blocks | Extern | None = None) -> list[Kernel]:
    """The kernels of a matmul group. `way` is how it runs, where that is not left to the cost model."""
    product = Product(group, layout, options)
    facts = product.facts()
    blocks = (way.instead if isinstance(way, Extern) else way) or candidates(facts)[0]
    if isinstance(way, Extern):
        first, *rest = emit_matmul(group, layout, options, blocks)
        work = product.multiplication()
        return [replace(first, extern=(way.rank, work) if work is not None else None), *rest]
    return by_rows(product.m, for_few_rows(facts), blocks, lambda *tile: _tiled(group, layout, options, *tile))


def _tiled(group: Group, layout: Layout, options: Options, blocks: Blocks, most: int | None) -> list[Kernel]:
    """The kernels with a tile, for so many rows at most if the run decides how many there are."""
    product = Product(group, layout, options, most)
    if blocks.split == 1:
        return [product.kernel(blocks)]
    parts = Value(TensorType(dtypes.float32, (blocks.split, product.m, product.n)))
    joining = Product(group, layout, options, most)
    product.wide = joining.wide = product.wide or is_wide([parts], rows=(product.m, most))
    return [product.kernel(blocks, parts), joining.joining(parts)]


def matmul_candidates(group: Group, layout: Layout, options: Options) -> list[Blocks | Extern]:
    """The ways to run a matmul group that are worth measuring, the cost model's choice first. Those of a library come
    next: they need no compiling.
    """
    product = Product(group, layout, options)
    first, *others = candidates(product.facts())
    library = options.libraries and product.multiplication() is not None
    return [first, *(Extern(rank) for rank in range(1, RANKS + 1) if library), *others]


def numbering(
    tile: Tile, sizes: tuple[Dim, Dim], blocks: Blocks, batch: Sequence[tuple[Symbol, Dim]], wide: bool
) -> list[str]:
    """Which rows `m`, columns `n` and batch the program `pid` has."""
    kind = ".to(tl.int64)" if wide else ""
    return [
        *_order(tile, sizes, blocks, batch, "pid", wide),
        f"m = (row + tl.arange(0, {blocks.m}){kind})[:, None]",
        f"n = (column + tl.arange(0, {blocks.n}){kind})[None, :]",
    ]


def _order(
    tile: Tile, sizes: tuple[Dim, Dim], blocks: Blocks, batch: Sequence[tuple[Symbol, Dim]], number: str, wide: bool
) -> list[str]:
    """Where the tile of a number begins, `row` and `column`, and its batch. Numbers of tiles have 32 bits in any case:
    a division of 64 bits takes as long as a read.
    """
    down, across = (narrow(tile.index(ceildiv(d, b)), wide) for d, b in zip(sizes, (blocks.m, blocks.n), strict=True))
    lines, kind = [f"blocks_m = {down}", f"blocks_n = {across}"], ".to(tl.int64)" if wide else ""
    number = narrow(number, wide)
    if batch:
        lines.append(f"rest = ({number} // (blocks_m * blocks_n)){kind}")
        number = f"({number} % (blocks_m * blocks_n))"
    lines += [
        f"first = {number} // ({GROUP} * blocks_n) * {GROUP}", f"high = tl.minimum(blocks_m - first, {GROUP})",
        f"row = (first + {number} % ({GROUP} * blocks_n) % high){kind} * {blocks.m}",
        f"column = ({number} % ({GROUP} * blocks_n) // high){kind} * {blocks.n}",
    ]  # fmt: skip
    rest = "rest"
    for j, (loop, d) in reversed(list(enumerate(batch))):
        name = f"b{j}"
        size = tile.index(d)
        lines.append(f"{name} = {rest}{f' % {size}' if j else ''}")
        rest = f"({rest} // {size})"
        tile.scalar(loop, name)
    return lines


@dataclass(frozen=True)
class Operand:
    """A matrix: strides along the result's axis and along K, and how many rows (or columns) may be read."""

    name: str
    value: Value | Packed
    base: Dim
    outer: Dim
    inner: Dim
    limit: Dim

    def is_inward(self) -> bool:
        """Whether elements of a sum are neighbours."""
        return always_equal(self.inner, 1)

    def is_described(self) -> bool:
        """Whether a tensor descriptor can tell how it lies: one stride 1, the rest whole vectors."""
        size = self.value.dtype.itemsize
        far = self.outer if self.is_inward() else self.inner
        near = self.is_inward() or always_equal(self.outer, 1)
        aligned = isinstance(self.base, int) and isinstance(far, int) and self.base * size % VECTOR == 0
        return near and aligned and isinstance(far, int) and far > 0 and far * size % VECTOR == 0


@dataclass(frozen=True)
class Axis:
    """Lanes of the tile, `m` or `n`: where they start, how many the result has, and the operand that has them too."""

    name: str
    start: str
    size: Dim
    lanes: int
    operand: Operand


class Product:
    """The kernel of a matmul group being written."""

    def __init__(self, group: Group, layout: Layout, options: Options, most: int | None = None) -> None:
        """`most`: rows that there are, if the run decides it."""
        node = group.node
        assert node is not None
        access = matmul_access(layout, node, group.twin)
        if access is None:
            raise InternalError("a matmul's operand is behind a view that it cannot read through")
        self.group, self.layout, self.options, self.access = group, layout, options, access
        self.m, self.n, self.k = access.sizes
        self.most = self.m if isinstance(self.m, int) else most
        self.sums = len(group.results)  # columns of the sum for one of the result
        self.batch = prod(d for _, d in access.batch)
        self.dtype = node.output.dtype
        self.exact = self.dtype.name == "float32" and options.dot == "ieee"
        self.beside = options.beside
        self.dot = options.of_dot(self.dtype)
        a, b = access.a, access.b
        left = Operand("a", a.value, a.base, a.row, a.col, _limit(layout, a, a.row, self.m))
        self.operands = (left, self.right(b) if access.c is None else _woven(b, access.c, self.k, self.n))
        sizes = (o.value.t.size for o in self.operands)  # of a constant in another order, more than it has elements
        self.wide = is_wide(touched(group, layout), self.m * self.n * self.batch, *sizes, rows=(self.m, most))
        self.buffers = Buffers(apart=layout.pitches)
        self.tile = Tile((), self.buffers)

    def right(self, b: Matrix) -> Operand:
        """The right operand."""
        plain = Operand("b", b.value, b.base, b.col, b.row, _limit(self.layout, b, b.col, self.n))
        return _packed(b, self.k, self.n) or plain

    def facts(self) -> Facts:
        """What the choice of a tile depends on."""
        return Facts(
            self.m, self.n, self.k, self.batch, self.dtype, self.exact, self.is_described(),
            beside=self.beside, pair=self.sums == 2, divisible=not self.access.batch and self.sums == 1,
        )  # fmt: skip

    def multiplication(self) -> Multiplication[Start] | None:
        """The product as a library can do it."""
        return multiplication(self.group, self.layout, self.options, self.access, self.operands)

    def is_described(self) -> bool:
        """Whether the operands can be read through descriptors. These count with 32 bits: rows that are more have no
        room on any GPU where they are long.
        """
        if self.access.batch or self.dtype.bits != 16 or not (isinstance(self.n, int) and isinstance(self.k, int)):
            return False
        return self.k > 0 and self.k + self.n >= LONG and all(o.is_described() for o in self.operands)

    def kernel(self, blocks: Blocks, parts: Value | None = None) -> Kernel:
        """The kernel with a tile. `parts`: [split, M, N], where the sums of parts go, if these are not made as one."""
        self.blocks = blocks
        resident = blocks.resident if self.is_described() else 0
        number = "turn" if resident else "pid"
        part, number = self._part(number) if parts is not None else ([], number)
        order = [*part, *_order(self.tile, (self.m, self.n), blocks, self.access.batch, number, self.wide)]
        tiles = ceildiv(self.m, blocks.m) * ceildiv(self.n, blocks.n) * self.batch * blocks.split
        zero = self.zero_of()
        end = self._end if parts is None else lambda: self._kept(parts)
        lanes, pointed = self._lanes(), self.pointed()
        if resident:
            reads = ["if ox_descriptors:", *indent(self._described()), "else:", *indent([*lanes, *pointed])]
            count = self.tile.index(tiles)
            lines = [
                "if ox_descriptors:", *indent(self._descriptors()),
                f"for step in tl.range(pid, {count}, tl.num_programs(0), flatten=ox_descriptors):",
                *indent([f"turn = ox_turn(step, {count}, back)", *order, zero, *reads, *lanes, *end()]),
            ]  # fmt: skip
        else:
            lines = [*order, *lanes, zero, *pointed, *end()]
        return Kernel(
            lines, self.buffers, tiles, blocks.warps, blocks.stages, "matmul", self.wide, resident=resident,
            scratch=() if parts is None else (parts,),
        )  # fmt: skip

    # ------------------------------------------------------------ sums in parts

    def _part(self, number: str) -> tuple[list[str], str]:
        """Where the part of a program's number begins along the sum, and the number of its tile."""
        return [f"start = {number} % {self.blocks.split} * {self._depth()}"], f"({number} // {self.blocks.split})"

    def _depth(self) -> int:
        """Elements of a part of the sum; they are whole turns of the loop."""
        assert isinstance(self.k, int)
        return self.k // self.blocks.split

    def _kept(self, parts: Value) -> list[str]:
        """The end of a part: its sums."""
        masks = " & ".join(f"{x.name}m" for x in self._results() if self.mask(x, x.size))
        m, n = (self.tile.index(d) for d in (self.m, self.n))
        at = f"{self.buffers.pointer(parts)} + (start // {self._depth()} * {m} + m) * {n} + n"
        return [f"tl.store({at}, acc{f', mask={masks}' if masks else ''})"]

    def joining(self, parts: Value) -> Kernel:
        """The kernel that adds up the sums of parts, always in the same order, and finishes them."""
        assert self.most is not None and isinstance(self.n, int)
        columns = min(power(self.n), JOINS[1])
        self.blocks = Blocks(min(power(self.most), JOINS[0] * JOINS[1] // columns), columns, 1, JOINS[2], 1)
        across, lines = self.tile.index(ceildiv(self.n, columns)), self._lanes()
        masks = " & ".join(f"{x.name}m" for x in self._results() if self.mask(x, x.size))
        masked = f", mask={masks}, other=0.0" if masks else ""
        sums, apart = self.buffers.pointer(parts), self.tile.index(self.m * self.n)
        own = f"m * {self.tile.index(self.n)} + n"
        each = [f"tl.load({sums} + {k} * {apart} + {own}{masked})" for k in range(parts.shape[0])]
        lines = [
            f"row = pid // {across} * {self.blocks.m}", f"column = pid % {across} * {columns}", *lines,
            f"acc = {each[0]}", *(f"acc += {x}" for x in each[1:]), *self._end(),
        ]  # fmt: skip
        programs = ceildiv(self.m, self.blocks.m) * ceildiv(self.n, columns)
        return Kernel(lines, self.buffers, programs, JOINS[2], 1, "matmul", self.wide)

    def axes(self) -> list[Axis]:
        """Rows and columns of the sum."""
        left, right = self.operands
        rows = Axis("m", "row", self.m, self.blocks.m, left)
        if self.sums == 1:
            return [rows, Axis("n", "column", self.n, self.blocks.n, right)]
        return [rows, Axis("both", "column * 2", self.n * 2, self.blocks.n * 2, right)]

    def _results(self) -> list[Axis]:
        """Rows and columns of the result."""
        rows, columns = self.axes()
        return [rows, replace(columns, name="n", start="column", size=self.n, lanes=self.blocks.n)]

    def mask(self, axis: Axis, limit: Dim) -> str | None:
        """Which lanes of an axis are below a limit; None where all are."""
        if isinstance(limit, int) and isinstance(axis.size, int) and -(-axis.size // axis.lanes) * axis.lanes <= limit:
            return None
        return f"{axis.name} < {self.tile.index(limit)}"

    def _lanes(self) -> list[str]:
        """Rows `m` and columns `n`, and the masks of those that the result has."""
        lines = []
        kind = ".to(tl.int64)" if self.wide else ""
        for axis in {x.name: x for x in (*self.axes(), *self._results())}.values():
            view = "[:, None]" if axis.name == "m" else "[None, :]"
            lines.append(f"{axis.name} = ({axis.start} + tl.arange(0, {axis.lanes}){kind}){view}")
            mask = self.mask(axis, axis.size)
            lines += [f"{axis.name}m = {mask}"] if mask else []
        return lines

    # ------------------------------------------------------------ the sum

    def zero_of(self) -> str:
        """What the sum begins with."""
        rows, columns = self.axes()
        return f"acc = tl.zeros(({rows.lanes}, {columns.lanes}), tl.float32)"

    def pointed(self) -> list[str]:
        """The loop over K, through pointers."""
        depth = self.blocks.k
        known = self.k if isinstance(self.k, int) else None
        begin = ""
        if self.blocks.split > 1:
            known, begin = self._depth(), "start + "
        rest = depth if known is None or known < depth else known % depth  # of the sum, that a mask is needed for
        size = self.tile.index(self.k)
        lines, loads, masked, steps = [f"tk = {begin}tl.arange(0, {depth})"], list[str](), list[str](), list[str]()
        for axis, along in zip(self.axes(), ("tk[None, :]", "tk[:, None]"), strict=True):
            x = axis.operand
            place = _sum(self.line(x, axis.name), _times(along, self.tile.index(x.inner)))
            lines.append(f"{x.name}_at = {self.buffers.pointer(x.value)} + {place}")
            mask = self.mask(axis, x.limit)
            tests = [f"({mask})"] if mask else []
            loads.append(_load(x.name, tests))
            masked.append(_load(x.name, [*tests, f"({along} < left)"]))
            steps.append(f"{x.name}_at += {self.tile.index(x.inner * depth)}")
        dot = f"acc = tl.dot(a, b, acc{self.dot})"
        if known is None or rest == depth:
            body = [f"left = {size} - k0", *masked, dot, *steps]
            return [*lines, f"for k0 in range(0, {size}, {depth}):", *indent(body)]
        lines += [f"for k0 in range(0, {known - rest}, {depth}):", *indent([*loads, dot, *steps])]
        return [*lines, f"left = {rest}", *masked, dot] if rest else lines

    def line(self, x: Operand, lanes: str) -> str:
        """Where the first elements of rows (or columns) of an operand lie."""
        return _sum(self.tile.index(x.base), _times(lanes, self.tile.index(x.outer)))

    def _descriptors(self) -> list[str]:
        """A descriptor of each operand."""
        lines, depth = [], self.blocks.k
        for axis in self.axes():
            x = axis.operand
            start = _sum(self.buffers.pointer(x.value), self.tile.index(x.base))
            size, k = self._short(self.tile.index(axis.size)), self.tile.index(self.k)
            if x.is_inward():
                lies = f"[{size}, {k}], [{self.tile.index(x.outer)}, 1], [{axis.lanes}, {depth}]"
            else:
                lies = f"[{k}, {size}], [{self.tile.index(x.inner)}, 1], [{depth}, {axis.lanes}]"
            lines.append(f"{x.name}_tile = tl.make_tensor_descriptor({start}, {lies})")
        return lines

    def _short(self, number: str) -> str:
        """A number of 32 bits."""
        return narrow(number, self.wide)

    def _described(self) -> list[str]:
        """The loop over K, through descriptors. What lies outside of a matrix is 0."""
        loads = []
        along = "k0" if self.blocks.split == 1 else f"{self._short('start')} + k0"
        for axis in self.axes():
            x = axis.operand
            start = self._short(axis.start)
            place = f"[{start}, {along}]" if x.is_inward() else f"[{along}, {start}]"
            turned = ".T" if x.is_inward() == (x.name == "b") else ""  # `a` has rows of the result, `b` its columns
            loads.append(f"{x.name} = {x.name}_tile.load({place}){turned}")
        depth = self.tile.index(self.k) if self.blocks.split == 1 else self._depth()
        loop = f"for k0 in range(0, {depth}, {self.blocks.k}):"
        return [loop, *indent([*loads, f"acc = tl.dot(a, b, acc{self.dot})"])]

    # ------------------------------------------------------------ the end

    def _end(self) -> list[str]:
        """The epilogue."""
        tile = Tile((self.blocks.m, self.blocks.n), self.buffers)
        for loop, name in self.tile.names.items():
            tile.scalar(loop, name)
        for k, (place, axis) in enumerate(zip((self.access.m, self.access.n), self._results(), strict=True)):
            mask = f"{axis.name}m" if self.mask(axis, axis.size) else None
            size = axis.size if isinstance(axis.size, int) else None
            tile.lane(symbol(place), TileVariable(axis.name, k, axis.lanes, mask, size))
        names = ["acc", "acc2"][: self.sums]
        lines = emit_epilogue(self.group, self.layout, self.access.index, tile, *names)
        if self.sums == 2:
            lines.insert(0, f"acc, acc2 = tl.split(tl.reshape(acc, ({self.blocks.m}, {self.blocks.n}, 2)))")
        if self.dtype.name != "float32":  # as it would be stored
            lines.insert(0, f"acc = acc.to({spelling.stored(self.dtype)}).to(tl.float32)")
        return lines


def _limit(layout: Layout, x: Matrix, step: Dim, size: Dim) -> Dim:
    """How many lanes of an operand may be read: of rows that are apart, what lies between them too."""
    found = layout.pitches.get(x.value.id)
    return found[1] if found is not None and always_equal(step, 1) and x.base == 0 else size


def _packed(b: Matrix, k: Dim, n: Dim) -> Operand | None:
    """A constant whose rows begin anywhere, as rows that begin at multiples of a vector; None for others."""
    matrix = _constant(b, k, n)
    if matrix is None:
        return None
    size = b.value.dtype.itemsize
    assert isinstance(b.row, int) and isinstance(b.col, int) and isinstance(b.base, int)
    far = b.row if b.col == 1 else b.col
    if 1 in (b.row, b.col) and far * size % VECTOR == 0 and b.base * size % VECTOR == 0:
        return None
    return _rows(("matmul", *_place(b), k, n), b, matrix.shape, lambda out: np.copyto(out, matrix))


def _woven(b: Matrix, c: Matrix, k: Dim, n: Dim) -> Operand:
    """Two constants as one matrix, whose columns are in turns of either."""
    first, second = (_constant(x, k, n) for x in (b, c))
    if first is None or second is None:
        raise InternalError("a pair of products has a right factor that is no constant matrix")

    def write(out: np.ndarray) -> None:
        out[:, ::2], out[:, 1::2] = first, second

    return _rows(("pair", *_place(b), *_place(c), k, n), b, (first.shape[0], 2 * first.shape[1]), write)


def _place(b: Matrix) -> tuple[object, ...]:
    return b.value.id, b.base, b.row, b.col


def _constant(b: Matrix, k: Dim, n: Dim) -> np.ndarray | None:
    """The numbers of a constant matrix [K, N]; None of others, and where there is one row or column, or all are one."""
    constant = constant_of(b.value)
    if constant is None or not (isinstance(k, int) and isinstance(n, int) and isinstance(b.base, int)):
        return None
    if not (isinstance(b.row, int) and isinstance(b.col, int)) or min(k, n) <= 1 or 0 in (b.row, b.col):
        return None
    size = b.value.dtype.itemsize
    flat = np.ascontiguousarray(constant).reshape(-1)[b.base :]
    return np.lib.stride_tricks.as_strided(flat, (k, n), (b.row * size, b.col * size), writeable=False)


def _rows(key: object, b: Matrix, shape: tuple[int, ...], fill: Callable[[np.ndarray], None]) -> Operand:
    """A constant [K, N] in an order of the kernel's own: its rows begin at multiples of a vector."""
    k, n = shape
    width = -(-n // PADDED) * PADDED if n >= PADDED else max(VECTOR, power(n))

    def write(out: np.ndarray) -> None:
        fill(out.view(b.value.dtype.numpy).reshape(k, width)[:, :n])

    return Operand("b", Packed(key, TensorType(b.value.dtype, (k, width)), write), 0, 1, width, width)


def _load(name: str, tests: list[str]) -> str:
    masked = f", mask={' & '.join(tests)}, other=0.0" if tests else ""
    return f"{name} = tl.load({name}_at{masked})"


def _times(name: str, stride: str) -> str:
    return name if stride == "1" else f"{name} * {stride}"  # also 0: pointers must have the shape of masks


def _sum(*parts: str) -> str:
    return " + ".join(p for p in parts if p and p != "0") or "0"
