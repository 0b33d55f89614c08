"""Products with weights that stay packed: codes of 2, 4 or 8 bits (or 16-bit floats), scales and zero points.

Where rows are few, a product takes as long as its weights take to read. So codes lie in memory as few bytes as they
need, and are expanded in the tile. Matrix units multiply the differences of codes and zero points, which halves hold
as they are; the sum of a block is scaled in float32. Where they do not hold them, and on ordinary units, the numbers
that are multiplied are those that an expanded matrix would have.

A word of 16 bits holds codes that are `unit` rows of K apart. So the codes at one position of some words are a piece of
the matrix that is multiplied with neighbouring elements of a row, and nothing is shuffled. A column's words are
neighbours, and two of them are expanded at once, as matrix units want them.

A code lies where a float16 has its last bits, or is brought there by swapping bytes. With the exponent of which the
code's lowest bit counts 1, one instruction makes of it the number `code + _offset`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from onnxc.codegen.triton import spelling
from onnxc.codegen.triton.kernel import Kernel, either, indent, power
from onnxc.codegen.triton.matmul import Axis, Operand, Product
from onnxc.codegen.triton.options import Options
from onnxc.codegen.triton.product_tiles import Blocks
from onnxc.codegen.triton.terms import Packed
from onnxc.ir import dtypes
from onnxc.ir.expr import exceeds
from onnxc.ir.types import TensorType
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.planner.templates import Matrix
from onnxc.primitives.builder import constant_of

UNIT = 64  # rows of K between the codes of a word, at most
THIN = 32  # the same, where blocks are short
WORD = 16  # bits
FEW = 16  # rows of a product, up to which it is one tile high
MOST = 64  # rows of a tile where their number is not known
PARTS = 8  # of a sum that are made side by side
GROUPS = 16  # that the groups of a column are a multiple of, if there are as many
LEAST = 8  # rows of a tile of matrix units
FAR = 128  # zero points, at most, that differ from codes by no more than halves hold
WIDE = 8192  # columns, from which on there are enough of the wider tiles; rows of K that are many
HELD = 48 << 10  # bytes of the rows that a turn multiplies


def emit_packed(group: Group, layout: Layout, options: Options, blocks: Blocks | None = None) -> list[Kernel]:
    """The kernels of a product with packed weights. Where the number of rows is not known there are two, one for few
    and one for many, of which a run takes one.
    """
    product = PackedProduct(group, layout, options)
    rows = product.m
    if isinstance(rows, int):
        return [product.kernel(blocks or product.tiles(rows)[0])]

    def kernel(block: Blocks) -> list[Kernel]:
        return [PackedProduct(group, layout, options).kernel(block)]

    few = blocks or product.tiles(FEW)[0]
    return either(exceeds(rows, FEW), lambda: kernel(product.tiles(MOST)[0]), lambda: kernel(few))


def packed_candidates(group: Group, layout: Layout, options: Options) -> list[Blocks]:
    """The ways to run such a product that are worth measuring, of few rows where their number is not known."""
    product = PackedProduct(group, layout, options)
    return product.tiles(product.m if isinstance(product.m, int) else FEW)


class PackedProduct(Product):
    """The kernel of a `matmul_quantized` group being written."""

    def __init__(self, group: Group, layout: Layout, options: Options) -> None:
        node = group.node
        assert node is not None
        codes, scale, *zero = (constant_of(v) for v in node.operands[1:])
        assert codes is not None and scale is not None
        self.codes, self.bits, depth = codes, int(node.attrs["bits"]), len(codes)
        self.block = min(int(node.attrs["block"]), depth)
        self.key = ("matmul_quantized", *(v.id for v in node.operands[1:]))
        self.each = WORD // self.bits  # codes of a word
        self.unit = _unit(depth, self.block, self.each)
        self.turn = self.each * self.unit  # codes of a column's group of `unit` words
        least = power(-(-depth // self.turn))
        self.groups = -(-depth // (self.turn * min(GROUPS, least))) * min(GROUPS, least)
        self.bias = 1 << (self.bits - 1)  # that makes codes unsigned
        self.zero = zero[0] if zero else None
        self.scale = scale if self.bits < WORD else None
        super().__init__(group, layout, options)
        self.element = spelling.stored(self.dtype)
        self.share = self._share()

    def tiles(self, rows: int) -> list[Blocks]:
        """Tiles for so many rows, the one first that was fastest on an H200. A turn takes `k` products of a sum, in
        parts that each have warps of their own.
        """
        high = power(rows) if self.exact else max(LEAST, power(rows))
        narrow, broad, broader, divided = (16, 4, 4), (32, 4, 4), (64, 4, 3), (32, 8, 4)
        sizes = [broad, narrow, broader, divided]
        if self.codes.shape[1] >= WIDE:
            sizes = [broader, broad, narrow]
        elif self.unit == UNIT and rows <= LEAST:
            sizes = [narrow, broad, broader]
        elif self.bits == 8 and len(self.codes) >= WIDE:
            sizes = [divided, broad, narrow, broader]
        most = max(1, HELD // (high * self.dtype.itemsize * self.turn))
        found = []
        for wide, parts, stages in sizes:
            parts = min(parts, self.groups, 1 << most.bit_length() - 1)
            found.append(Blocks(high, wide, parts * self.turn, max(4 if self.exact else 2, parts), stages))
        return list(dict.fromkeys(found))

    def right(self, b: Matrix) -> Operand:
        """The packed codes."""
        rows, columns = self.groups * self.unit, self.codes.shape[1]
        dtype = dtypes.int16 if self.bits < WORD else dtypes.from_numpy(self.codes.dtype)
        packed = Packed((*self.key, "codes"), TensorType(dtype, (columns, rows)), self._write)
        return Operand("b", packed, 0, rows, 1, columns)

    def is_described(self) -> bool:
        return False

    def _write(self, out: np.ndarray) -> None:
        depth, columns = self.codes.shape
        codes = np.zeros((self.groups * self.each * self.unit, columns), self.codes.dtype)
        codes[:depth] = self.codes
        parts = codes.reshape(self.groups, self.each, self.unit, columns)
        packed = parts[:, 0]
        if self.bits < WORD:
            packed = np.zeros((self.groups, self.unit, columns), np.uint16)
            for k in range(self.each):
                shift, swapped = _place(k, self.bits)
                bits = (parts[:, k].astype(np.int16) + self.bias).astype(np.uint16) << shift
                packed |= bits << 8 | bits >> 8 if swapped else bits
        out.view(packed.dtype).reshape(columns, -1)[:] = packed.reshape(-1, columns).T

    # ------------------------------------------------------------ scales and zero points

    def _kind(self) -> str:
        """How scales and zero points are stored: as the shortest floats that hold all of them."""
        arrays = [x for x in (self.scale, self.zero) if x is not None]
        if self._is_short():
            return "float16"
        return "float32" if any((x.view(np.uint32) & 0xFFFF).any() for x in arrays) else "bfloat16"

    def _names(self) -> list[str]:
        """The numbers that a group needs, in order: for each block that its codes are in."""
        count = self.each // self.share
        names = ["scale"] * (self.scale is not None) + ["zero"] * (self.zero is not None)
        return [f"{name}{j}" for name in names for j in range(count)]

    def _share(self) -> int:
        """Neighbouring positions in words whose codes are in one block."""
        if self.is_constant() or self.block % self.turn == 0:
            return self.each
        return self.block // self.unit if self.turn % self.block == 0 else 1

    def is_constant(self) -> bool:
        """Whether a column has one scale."""
        return self.block >= len(self.codes)

    def _numbers(self, kind: str) -> Packed:
        """Scales and zero points [words, columns, groups]. Those of 16 bits are two in a word."""
        names, columns = self._names(), self.codes.shape[1]
        groups = 1 if self.is_constant() else self.groups
        each = 1 if kind == "float32" else 2
        shape = (-(-len(names) // each), columns, groups)

        def write(out: np.ndarray) -> None:
            first = np.arange(groups) * self.turn
            found = np.zeros((shape[0] * each, columns, groups), np.float32)
            for k, name in enumerate(names):
                array = self.scale if name.startswith("scale") else self.zero
                assert array is not None
                row = (first + int(name[-1]) * self.share * self.unit) // self.block
                there = row < len(array)
                found[k][:, there] = array[row[there]].T
            if kind == "float32":
                words: np.ndarray = found.view(np.uint32)
            else:
                bits = found.astype(np.float16).view(np.uint16) if kind == "float16" else found.view(np.uint32) >> 16
                low, high = bits[::2].astype(np.uint32), bits[1::2].astype(np.uint32)
                words = low | high << 16
            out.view(np.uint32).reshape(shape)[:] = words

        return Packed((*self.key, "numbers", kind), TensorType(dtypes.uint32, shape), write)

    def _loads(self, turn: str | None) -> list[str]:
        """Loads the numbers of a turn's groups; `turn` is None for those that all groups have in common."""
        kind, names = self._kind(), self._names()
        numbers = self._numbers(kind)
        words, columns, groups = numbers.t.shape
        mask = self.mask(self._across(), self.codes.shape[1])
        lines = []
        for k in range(int(words)):  # type: ignore[arg-type]
            base = f"{self.buffers.pointer(numbers)} + {k * columns * groups} + n3 * {groups}"
            lines.append(f"word{k} = {_load(f'{base} + {turn}' if turn else base, [mask])}")
        each = 1 if kind == "float32" else 2
        for k, name in enumerate(names):
            word = f"word{k // each}"
            if kind == "float32":
                text = f"{word}.to(tl.float32, bitcast=True)"
            elif kind == "float16":
                text = f"({word}{' >> 16' * (k % 2)}).to(tl.uint16).to(tl.float16, bitcast=True)"
            else:
                text = f"({word}{' >> 16' * (k % 2)} << 16).to(tl.float32, bitcast=True)"
            lines.append(f"{name} = {text}")
        return lines

    # ------------------------------------------------------------ the sum

    def zero_of(self) -> str:
        return f"acc = tl.zeros(({self._parts()}, {self.blocks.n}, {self.blocks.m}), tl.float32)"

    def pointed(self) -> list[str]:
        """The loop over the groups of a column, one for each part a turn; then the parts are added.

        Weights are the left factor: their columns are many, and the rows of the other one few.
        """
        a, b = self.operands
        parts, unit, kind = self._parts(), self.unit, ".to(tl.int64)" if self.wide else ""
        inner, step = self.tile.index(a.inner), parts * self.turn
        lines = [
            f"m3 = (row + tl.arange(0, {self.blocks.m}){kind})[None, None, :]",
            f"n3 = (column + tl.arange(0, {self.blocks.n}){kind})[None, :, None]",
            f"part = tl.arange(0, {parts}){kind}[:, None, None]",
            f"tk = tl.arange(0, {unit}){kind}",
            f"b_at = {self.buffers.pointer(b.value)} + {self.line(b, 'n3')} + part * {unit} + tk[None, None, :]",
            f"k3 = part * {self.turn} + tk[None, :, None]",
            f"a_at = {self.buffers.pointer(a.value)} + {self.line(a, 'm3')} + k3 * {inner}",
        ]
        if self.scale is not None and self.is_constant():
            lines += self._loads(None)
        rows, columns = self.mask(self._down(), a.limit), self.mask(self._across(), b.limit)
        body = [f"turn = step{' + tl.zeros((), tl.int64)' if self.wide else ''}"]
        body.append(f"codes = {_load(f'b_at + turn * {parts * unit}', [columns])}")
        if self.scale is not None and not self.is_constant():
            body += self._loads(f"turn * {parts} + part")
        for j in range(self.each):
            k = f"turn * {step} + {j * unit}"
            inside = f"k3 + {k} < {len(self.codes)}" if len(self.codes) % step else None
            body += [f"a = {_load(f'a_at + ({k}) * {inner}', [rows, inside])}", f"b = {self._expanded(j)}"]
            body += self._added(j)
        turns = -(-len(self.codes) // step)
        loop = f"for step in tl.range(0, {turns}, num_stages={self.blocks.stages}):"
        scaled = ["acc *= scale0.to(tl.float32)"] if self._is_late() and self.is_constant() else []
        return [*lines, loop, *indent(body), *scaled, "acc = tl.trans(tl.sum(acc, 0))"]

    def _added(self, j: int) -> list[str]:
        """Adds the products of the codes at a position, or those of a block when it ends."""
        if not self._is_late() or self.is_constant():
            return [f"acc = tl.dot(b, a, acc{self.dot})"]
        block, place = divmod(j, self.share)
        sums = f"sums = tl.dot(b, a{', sums' if place else ''}{self.dot})"
        ends = place == self.share - 1
        return [sums, *([f"acc += sums * scale{block}.to(tl.float32)"] if ends else [])]

    def _parts(self) -> int:
        """Parts of the sum that are made side by side."""
        return max(1, self.blocks.k // self.turn)

    def _down(self) -> Axis:
        return replace(self.axes()[0], name="m3")

    def _across(self) -> Axis:
        return replace(self.axes()[1], name="n3")

    def _expanded(self, j: int) -> str:
        """The numbers that the codes at a position stand for. In float16 where that makes no difference."""
        if self.bits == WORD:
            return f"codes.to({self.element})"
        shift, swapped = _place(j, self.bits)
        text = f'ox_codes(codes, {shift}, {swapped}, {self.bits}, "{_asm(shift, swapped, self.bits)}")'
        middle = f"{_offset(shift) + self.bias}.0"
        scale, zero = (f"{name}{j // self.share}" for name in ("scale", "zero"))
        if self._is_late():
            middle = middle if self.zero is None else f"({zero}.to(tl.float16) + {middle})"
            return f"({text} - {middle}).to({self.element})"
        element = "tl.float16" if self._is_short() else "tl.float32"
        text = f"({text} - {middle}).to({element})"
        if self.zero is not None:
            text = f"({text} - {zero}.to({element}))"
        return f"({text} * {scale}.to({element})).to({self.element})"

    def _is_late(self) -> bool:
        """Whether sums are scaled, not codes: halves hold the codes without zero points, and would hold them scaled.
        With many rows there are more sums than codes.
        """
        if self.scale is None or self.dtype.bits != WORD or self.blocks.m > FEW:
            return False
        zero = self.zero if self.zero is not None else np.zeros(())
        small = not (zero % 1).any() and float(np.abs(zero).max()) <= FAR
        return small and bool(np.abs(self.scale).max() * 2 * FAR < np.finfo(np.float16).max)

    def _is_short(self) -> bool:
        """Whether float16 holds differences and scales as they are: then products are rounded once, as they must be."""
        assert self.scale is not None
        zero = self.zero if self.zero is not None else np.zeros(())
        small = not (zero % 1).any() and float(np.abs(zero).max()) <= 1024
        return self.dtype.name == "float16" and small and np.array_equal(self.scale.astype(np.float16), self.scale)


def _place(j: int, bits: int) -> tuple[int, bool]:
    """Where the j-th codes of words begin, behind a swap of bytes if so."""
    half = WORD // bits // 2
    return (0 if bits == 8 else 2 + j % half * bits), j >= half


def _offset(shift: int) -> int:
    """What codes are more than they say, as `ox_codes` makes them."""
    return 1 << (10 - shift)


def _asm(shift: int, swapped: bool, bits: int) -> str:
    """Two codes of two words as float16: the code are the last bits, the others those of the offset."""
    if bits == 8:
        return f"prmt.b32 $0, $1, 0x64646464, {0x4341 if swapped else 0x4240:#x};"
    mask, known = ((1 << bits) - 1) << shift, (25 - shift) << 10
    made = f"lop3.b32 $0, {'y' if swapped else '$1'}, {mask | mask << 16:#x}, {known | known << 16:#x}, 0xea;"
    return f"{{ .reg .b32 y; prmt.b32 y, $1, 0, 0x2301; {made} }}" if swapped else made


def _unit(depth: int, block: int, each: int) -> int:
    """Rows of K between the codes of a word: a power of two that divides blocks."""
    most = min(UNIT, max(16, power(-(-depth // each))))
    return most if block >= depth else math.gcd(min(most, max(THIN, power(block // each + 1) // 2)), block)


def _load(at: str, tests: list[str | None]) -> str:
    found = " & ".join(f"({t})" for t in tests if t)
    return f"tl.load({at}, mask={found}, other=0.0)" if found else f"tl.load({at})"
