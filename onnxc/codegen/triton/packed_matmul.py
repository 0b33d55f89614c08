"""Products with weights that stay packed: codes of 2, 4 or 8 bits (or 16-bit floats), scales and zero points.

Where rows are few, a product takes as long as its weights take to read. So codes lie in memory as few bytes as they
need, and are expanded in the tile: the numbers that are multiplied are those that an expanded matrix would have.

A byte holds codes that are `unit` rows of K apart. So the codes at one position of some bytes are a piece of the matrix
that is multiplied with neighbouring elements of a row, and nothing is shuffled. A column's bytes are neighbours, and
four of them are expanded at once, as matrix units want them.
"""

from __future__ import annotations

import math

import numpy as np

from onnxc.codegen.triton import spelling
from onnxc.codegen.triton.kernel import Kernel, indent, power
from onnxc.codegen.triton.matmul import Operand, Product
from onnxc.codegen.triton.options import Options
from onnxc.codegen.triton.product_tiles import Blocks
from onnxc.codegen.triton.terms import Packed
from onnxc.ir import dtypes
from onnxc.ir.expr import minimum
from onnxc.ir.types import TensorType
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.planner.templates import Matrix
from onnxc.primitives.builder import constant_of

UNIT = 64  # rows of K between the codes of a byte, at most
FEW = 16  # rows of a product, up to which it is one tile high
MOST = 64  # rows of a tile where their number is not known
WIDE = 8192  # columns, from which on there are enough of the wider tiles


def emit_packed(group: Group, layout: Layout, options: Options, blocks: Blocks | None = None) -> list[Kernel]:
    """The kernels of a product with packed weights. Where the number of rows is not known there are two, one for few
    and one for many, of which one has nothing to do.
    """
    product = PackedProduct(group, layout, options)
    rows = product.m
    if isinstance(rows, int):
        return [product.kernel(blocks or product.tiles(rows)[0])]
    many = minimum(rows // (FEW + 1), 1)
    found = []
    for count, block in ((1 - many, blocks or product.tiles(FEW)[0]), (many, product.tiles(MOST)[0])):
        kernel = PackedProduct(group, layout, options).kernel(block)
        kernel.programs = kernel.programs * count
        found.append(kernel)
    return found


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
        self.each = max(1, 8 // self.bits)  # codes of a byte
        self.unit = _unit(depth, self.block, self.each)
        self.groups = -(-depth // (self.each * self.unit))  # of `unit` bytes
        self.bias = 1 << (self.bits - 1)  # that makes codes unsigned
        self.zero = zero[0] if zero else None
        self.scale = scale if self.bits < 16 else None
        super().__init__(group, layout, options)
        self.element = spelling.stored(self.dtype)

    def tiles(self, rows: int) -> list[Blocks]:
        """Tiles for so many rows, the one first that was fastest on an H200. A turn takes `k` products of a sum."""
        if rows <= FEW:
            narrow = [Blocks(16, 32, 256, 4, 4), Blocks(16, 32, 128, 4, 6)]
            wide = [Blocks(16, 64, 256, 4, 4), Blocks(16, 64, 128, 4, 5)]
            return [*wide, *narrow] if self.codes.shape[1] >= WIDE else [*narrow, *wide]
        if rows <= 32:
            return [Blocks(32, 32, 128, 4, 5), Blocks(32, 64, 128, 4, 4)]
        return [Blocks(64, 64, 128, 4, 4), Blocks(64, 128, 64, 8, 4), Blocks(64, 32, 128, 4, 4)]

    def right(self, b: Matrix) -> Operand:
        """The packed codes."""
        rows, columns = self.groups * self.unit, self.codes.shape[1]
        dtype = dtypes.uint8 if self.bits < 16 else dtypes.from_numpy(self.codes.dtype)
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
        if self.bits < 16:
            packed = np.zeros((self.groups, self.unit, columns), np.uint8)
            for k in range(self.each):
                packed |= (parts[:, k].astype(np.int16) + self.bias).astype(np.uint8) << (k * self.bits)
        out.view(packed.dtype).reshape(columns, -1)[:] = packed.reshape(-1, columns).T

    def _rows(self, name: str, array: np.ndarray) -> Packed:
        """Scales or zero points, with rows for all of the codes that bytes have."""
        count = -(-self.groups * self.each * self.unit // self.block)

        def write(out: np.ndarray) -> None:
            out.view(array.dtype).reshape(count, -1)[: len(array)] = array

        return Packed((*self.key, name), TensorType(dtypes.from_numpy(array.dtype), (count, array.shape[1])), write)

    # ------------------------------------------------------------ the sum

    def pointed(self) -> list[str]:
        """The loop over groups of bytes, several a turn."""
        size = self.size = max(1, self.blocks.k // (self.each * self.unit))
        whole = self.groups if self.k == self.groups * self.each * self.unit else self.groups - 1
        steps, rest = divmod(whole, size)
        a, b = self.operands
        lines = [
            f"tk = tl.arange(0, {self.unit}){'.to(tl.int64)' if self.wide else ''}",
            f"a_at = {self.buffers.pointer(a.value)} + {self.line(a, 'm')} + tk[None, :] * {self.tile.index(a.inner)}",
            f"b_at = {self.buffers.pointer(b.value)} + {self.line(b, 'n')} + tk[:, None]",
        ]
        if steps:
            loop = f"for turn in tl.range(0, {steps}, num_stages={self.blocks.stages}):"
            lines += [loop, *indent(self._step(f"turn * {size}", size, False))]
        if rest:
            lines += self._step(str(steps * size), rest, False)
        if whole < self.groups:
            lines += self._step(str(whole), 1, True)
        return lines

    def _step(self, first: str, count: int, last: bool) -> list[str]:
        """Some groups, from number `first` on; `last` if part of the codes are beyond K."""
        a, b = self.operands
        rows, columns = self.mask(self.axes()[0], a.limit), self.mask(self.axes()[1], b.limit)
        lines = [f"group = {first}{' + tl.zeros((), tl.int64)' if self.wide else ''}"]
        known: dict[str, str] = {}
        for g in range(count):
            lines.append(f"codes = {_load(f'b_at + (group + {g}) * {self.unit}', [columns])}")
            for j in range(self.each):
                row = self._row(g, j, count)
                for name, array in (("scale", self.scale), ("zero", self.zero)):
                    if array is not None and known.get(name) != row:
                        known[name] = row
                        at = f"{self.buffers.pointer(self._rows(name, array))} + ({row}) * {array.shape[1]} + n"
                        lines.append(f"{name} = {_load(at, [columns])}")
                k = f"((group + {g}) * {self.each} + {j}) * {self.unit}"
                inside = f"{k} + tk[None, :] < {self.tile.index(self.k)}" if last else None
                lines += [
                    f"a = {_load(f'a_at + {k} * {self.tile.index(a.inner)}', [rows, inside])}",
                    f"b = {self._expanded(j)}", f"acc = tl.dot(a, b, acc{self.dot})",
                ]  # fmt: skip
        return lines

    def _row(self, g: int, j: int, count: int) -> str:
        """The row of scales of the codes at position `j` in a group, the one `g` behind the first of `count`."""
        each, block = self.each * self.unit, self.block
        if block >= len(self.codes):
            return "0"
        if count == self.size and block % (count * each) == 0:  # all of a turn are in one block
            return f"group * {each} // {block}"
        if block % each == 0:
            return f"(group + {g}) * {each} // {block}"
        if each % block == 0:
            return f"(group + {g}) * {each // block} + {j * self.unit // block}"
        return f"((group + {g}) * {self.each} + {j}) * {self.unit} // {block}"

    def _expanded(self, j: int) -> str:
        """The numbers that the codes at a position stand for. In float16 where that makes no difference."""
        if self.bits == 16:
            return f"codes.to({self.element})"
        text = f'ox_codes(codes, {j * self.bits}, {self.bits}, "{_asm(j * self.bits, self.bits)}")'
        element = "tl.float16" if self._is_short() else "tl.float32"
        text = f"{text}.to({element})"
        if self.zero is not None:
            text = f"({text} - zero.to({element}))"
        return f"({text} * scale.to({element})).to({self.element})"

    def _is_short(self) -> bool:
        """Whether float16 holds differences and scales as they are: then products are rounded once, as they must be."""
        assert self.scale is not None
        zero = self.zero if self.zero is not None else np.zeros(())
        small = not (zero % 1).any() and float(np.abs(zero).max()) <= 1024
        return self.dtype.name == "float16" and small and np.array_equal(self.scale.astype(np.float16), self.scale)


def _asm(shift: int, bits: int) -> str:
    """Four codes of four bytes, `shift` bits from the lowest on, as float16: 1024 and the code have known bits."""
    middle = 1024 + (1 << (bits - 1))
    less = int(np.float16(middle).view(np.uint16))
    mask = (1 << bits) - 1
    ones = f"{mask | mask << 16:#x}, 0x64006400, 0xea"
    return (
        f"{{ .reg .b32 x, y, z, c; shr.b32 x, $2, {shift}; prmt.b32 y, x, 0, 0x4140; prmt.b32 z, x, 0, 0x4342; "
        f"lop3.b32 y, y, {ones}; lop3.b32 z, z, {ones}; mov.b32 c, {less | less << 16:#x}; "
        "sub.f16x2 $0, y, c; sub.f16x2 $1, z, c; }"
    )


def _unit(depth: int, block: int, each: int) -> int:
    """Rows of K between the codes of a byte: a power of two that divides blocks."""
    most = min(UNIT, max(16, power(-(-depth // each))))
    return most if block >= depth else math.gcd(most, block)


def _load(at: str, tests: list[str | None]) -> str:
    found = " & ".join(f"({t})" for t in tests if t)
    return f"tl.load({at}, mask={found}, other=0.0)" if found else f"tl.load({at})"
