"""The matmul template: tiles of the result, a loop over K, operands through strides, an open epilogue.

Programs are numbered so that neighbours share rows or columns that the L2 cache still holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnxc.codegen.triton import spelling
from onnxc.codegen.triton.epilogue import Tile, emit_epilogue, symbol
from onnxc.codegen.triton.kernel import Kernel, indent, is_wide, power, touched
from onnxc.codegen.triton.options import Options
from onnxc.codegen.triton.terms import Buffers, TileVariable
from onnxc.errors import InternalError
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, Symbol, ceildiv, prod
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.planner.templates import Matrix, matmul_access

GROUP = 8  # rows of tiles whose programs follow each other
PROGRAMS = 132  # of a GPU's first wave


@dataclass(frozen=True)
class Blocks:
    """A tile's sizes, and how a program runs it."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# Tiles of 16-bit products (m, n, k, warps, stages) with the share of the arithmetic peak that they reached on an H200
# where there were many of them.
HALF_TILES = (
    (Blocks(128, 256, 64, 8, 4), 1.0), (Blocks(128, 128, 32, 4, 4), 0.86), (Blocks(128, 128, 64, 4, 4), 0.82),
    (Blocks(128, 64, 64, 4, 4), 0.7), (Blocks(64, 128, 64, 4, 4), 0.65), (Blocks(64, 64, 64, 4, 4), 0.6),
    (Blocks(64, 32, 128, 4, 5), 0.4), (Blocks(32, 64, 128, 4, 4), 0.35), (Blocks(16, 64, 128, 4, 4), 0.22),
    (Blocks(16, 32, 128, 4, 4), 0.15),
)  # fmt: skip
# The same of float32 products on ordinary units, which need no large tiles.
EXACT_TILES = (
    (Blocks(128, 64, 16, 8, 3), 1.0), (Blocks(64, 64, 16, 4, 3), 0.9), (Blocks(32, 64, 32, 4, 3), 0.7),
    (Blocks(32, 32, 32, 2, 3), 0.55), (Blocks(16, 32, 32, 2, 3), 0.4),
)  # fmt: skip
SHORT = 256  # sums so short that a tile's end takes as long as its sum: several tiles must share a multiprocessor
LARGE = 128 * 128  # elements of the largest tile of which several fit


def choose_blocks(m: Dim, n: Dim, k: Dim, batch: Dim, dtype: DType, *, exact: bool, piece: Dim | None = None) -> Blocks:
    """The tile with the least work for the multiprocessor that has most.

    Args:
        m, n, k, batch: sizes of the product; open ones count as large.
        exact: float32 on ordinary units.
        piece: the longest run of the sum that one step may take, where it is not k.
    """
    rows, columns, depth, count = (d if isinstance(d, int) else 1 << 10 for d in (m, n, k, batch))
    count = count if isinstance(batch, int) else 16
    odd = columns % 8 != 0  # rows of the result are not aligned: large tiles are long in storing them

    def work(row: tuple[Blocks, float]) -> float:
        blocks, share = row
        tiles = -(-rows // blocks.m) * -(-columns // blocks.n) * count
        slow = 2.0 if blocks.m * blocks.n > LARGE and (odd or depth <= SHORT) and not exact else 1.0
        slow *= 1.5 if odd and blocks.k < 64 and not exact else 1.0
        return -(-tiles // PROGRAMS) * blocks.m * blocks.n / share * slow

    found, _ = min(EXACT_TILES if exact else HALF_TILES, key=work)
    run = depth if piece is None else piece if isinstance(piece, int) else 1 << 10
    step = max(16, min(found.k, power(run)))
    return replace(found, k=max(16, step // 2) if dtype.bits == 32 and not exact else step)


def emit_matmul(group: Group, layout: Layout, options: Options) -> Kernel:
    """The kernel of a matmul group."""
    node = group.node
    assert node is not None
    access = matmul_access(layout, node)
    if access is None:
        raise InternalError("a matmul's operand is behind a view that it cannot read through")
    buffers = Buffers()
    m, n, k = access.sizes
    batch = prod(d for _, d in access.batch)
    dtype = node.output.dtype
    exact = dtype.name == "float32" and options.dot == "ieee"
    blocks = choose_blocks(m, n, k, batch, dtype, exact=exact)
    wide = is_wide(touched(group, layout), m * n * batch)
    tile = Tile((blocks.m, blocks.n), buffers)
    lines = numbering(tile, (m, n), blocks, access.batch, wide)
    for loop, name, axis, size, lanes in ((access.m, "m", 0, m, blocks.m), (access.n, "n", 1, n, blocks.n)):
        exactly = isinstance(size, int) and size % lanes == 0
        if not exactly:
            lines.append(f"{name}m = {name} < {tile.index(size)}")
        tile.lane(symbol(loop), TileVariable(name, axis, lanes, None if exactly else f"{name}m"))
    dot = f', input_precision="{options.dot}"' if dtype.name == "float32" else ""
    lines += _accumulate(tile, access.a, access.b, k, blocks, dot, dtype)
    lines += emit_epilogue(group, layout, access.index, tile, "acc")
    programs = ceildiv(m, blocks.m) * ceildiv(n, blocks.n) * batch
    return Kernel(lines, buffers, programs, blocks.warps, blocks.stages, "matmul", wide)


def numbering(
    tile: Tile, sizes: tuple[Dim, Dim], blocks: Blocks, batch: Sequence[tuple[Symbol, Dim]], wide: bool
) -> list[str]:
    """Which rows, columns and batch a program has."""
    down, across = (tile.index(ceildiv(d, b)) for d, b in zip(sizes, (blocks.m, blocks.n), strict=True))
    kind = ".to(tl.int64)" if wide else ""
    lines = [
        f"blocks_m = {down}", f"blocks_n = {across}",
        "rest = pid // (blocks_m * blocks_n)", "pid = pid % (blocks_m * blocks_n)",
        f"first = pid // ({GROUP} * blocks_n) * {GROUP}", f"high = tl.minimum(blocks_m - first, {GROUP})",
        f"m = ((first + pid % ({GROUP} * blocks_n) % high) * {blocks.m} + tl.arange(0, {blocks.m}){kind})[:, None]",
        f"n = (pid % ({GROUP} * blocks_n) // high * {blocks.n} + tl.arange(0, {blocks.n}){kind})[None, :]",
    ]  # fmt: skip
    rest = "rest"
    for j, (loop, d) in reversed(list(enumerate(batch))):
        name = f"b{j}"
        size = tile.index(d)
        lines.append(f"{name} = {rest}{f' % {size}' if j else ''}")
        rest = f"({rest} // {size})"
        tile.scalar(loop, name)
    return lines


def _accumulate(tile: Tile, a: Matrix, b: Matrix, k: Dim, blocks: Blocks, dot: str, dtype: DType) -> list[str]:
    """The loop over K, into `acc`."""
    whole = isinstance(k, int) and k % blocks.k == 0
    at = {"a": ("m", "tk[None, :]"), "b": ("n", "tk[:, None]")}
    masks = {v.name: v.mask for v in tile.variables.values()}
    lines = [f"tk = tl.arange(0, {blocks.k})", f"acc = tl.zeros(({blocks.m}, {blocks.n}), tl.float32)"]
    steps = []
    loads = []
    for name, matrix in (("a", a), ("b", b)):
        line, depth = at[name]
        outer, inner = (matrix.row, matrix.col) if name == "a" else (matrix.col, matrix.row)
        pointer = tile.buffers.pointer(matrix.value)
        place = _sum(tile.index(matrix.base), _times(line, tile.index(outer)), _times(depth, tile.index(inner)))
        lines.append(f"{name}_at = {pointer} + {place}")
        tests = [t for t in (masks[line], None if whole else f"({depth} < left)") if t]
        mask = f", mask={' & '.join(tests)}, other=0.0" if tests else ""
        loads.append(f"{name} = tl.load({name}_at{mask})")
        step = tile.index(inner * blocks.k)
        steps.append(f"{name}_at += {step}")
    size = tile.index(k)
    loop = [] if whole else [f"left = {size} - k0"]
    lines += [
        f"for k0 in range(0, {size}, {blocks.k}):",
        *indent([*loop, *loads, f"acc = tl.dot(a, b, acc{dot})", *steps]),
    ]
    if dtype.name != "float32":  # as it would be stored
        lines.append(f"acc = acc.to({spelling.stored(dtype)}).to(tl.float32)")
    return lines


def _times(name: str, stride: str) -> str:
    return name if stride == "1" else f"{name} * {stride}"  # also 0: pointers must have the shape of masks


def _sum(*parts: str) -> str:
    return " + ".join(p for p in parts if p and p != "0") or "0"
