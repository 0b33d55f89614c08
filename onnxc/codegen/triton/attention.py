"""Attention as one kernel: an online softmax over blocks of keys; no score is ever in memory.

A program has a block of queries of one head. It keeps the running maximum m and sum l of each row, and the result o
scaled to them; scores are in units of log2(e), so that powers of two replace exponentials.
"""

from __future__ import annotations

import math

from onnxc.codegen.triton import spelling
from onnxc.codegen.triton.epilogue import Tile, emit_epilogue, symbol
from onnxc.codegen.triton.kernel import Kernel, indent, is_wide, power, touched
from onnxc.codegen.triton.options import MOST_DEPTH, Options, fits_head
from onnxc.codegen.triton.terms import Buffers, TileVariable
from onnxc.errors import InternalError, UnsupportedError
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, ceildiv, prod
from onnxc.loops.terms import Load
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.planner.templates import AttentionAccess, Matrix, attention_access

LOG2E = math.log2(math.e)
MOST = 3.4028234663852886e38  # of float32


def emit_attention(group: Group, layout: Layout, options: Options) -> Kernel:
    """The kernel of an attention group."""
    node = group.node
    assert node is not None
    access = attention_access(layout, node)
    if access is None:
        raise InternalError("attention's operand is behind a view that it cannot read through")
    queries, _, depth, columns = access.sizes
    if not (fits_head(depth) and fits_head(columns)):
        raise UnsupportedError(f"attention on a GPU with heads of {depth} and {columns}: at most {MOST_DEPTH}")
    assert isinstance(depth, int) and isinstance(columns, int)
    buffers = Buffers()
    batch = prod(d for _, d in access.batch)
    dtype = node.output.dtype
    d, e = max(16, power(depth)), max(16, power(columns))
    bm, bn, warps, stages = choose_blocks(queries, d, dtype)
    wide = is_wide(touched(group, layout))
    tile = Tile((bm, e), buffers)
    lines = _place(tile, access, bm, e, wide)
    lines += _stream(tile, access, (bm, bn, d, e), node.attrs, options, dtype.name)
    lines += emit_epilogue(group, layout, access.index, tile, "acc")
    return Kernel(lines, buffers, ceildiv(queries, bm) * batch, warps, stages, "attention", wide)


def choose_blocks(queries: Dim, depth: int, dtype: DType) -> tuple[int, int, int, int]:
    """Queries and keys of a block, warps and stages."""
    if isinstance(queries, int) and queries <= 16:
        return 16, 64, 4, 3 if dtype.bits == 16 else 2
    if dtype.bits == 32:
        return (64, 32, 4, 2) if depth <= 128 else (32, 32, 4, 2)
    if depth <= 64:
        return 64, 64, 4, 3
    return (128, 128, 8, 3) if depth <= 128 else (64, 32, 4, 3)


def _place(tile: Tile, access: AttentionAccess, bm: int, e: int, wide: bool) -> list[str]:
    """Which queries of which head a program has."""
    queries, _, _, columns = access.sizes
    kind = ".to(tl.int64)" if wide else ""
    blocks = tile.index(ceildiv(queries, bm))
    lines = [f"rest = pid // {blocks}", f"m = (pid % {blocks} * {bm} + tl.arange(0, {bm}){kind})[:, None]",
             f"n = tl.arange(0, {e})[None, :]"]  # fmt: skip
    rest = "rest"
    for j, (loop, size) in reversed(list(enumerate(access.batch))):
        count = tile.index(size)
        lines.append(f"b{j} = {rest}{f' % {count}' if j else ''}")
        rest = f"({rest} // {count})"
        tile.scalar(loop, f"b{j}")
    for own, name, axis, size, lanes in ((access.row, "m", 0, queries, bm), (access.column, "n", 1, columns, e)):
        whole = isinstance(size, int) and size % lanes == 0
        if not whole:
            lines.append(f"{name}m = {name} < {tile.index(size)}")
        tile.lane(symbol(own), TileVariable(name, axis, lanes, None if whole else f"{name}m"))
    return lines


def _stream(
    tile: Tile, access: AttentionAccess, blocks: tuple[int, int, int, int], attrs: object, options: Options, dtype: str
) -> list[str]:
    """The pass over all keys, into `acc`."""
    bm, bn, d, e = blocks
    _, keys, depth, columns = access.sizes
    scale, guard = float(attrs.get("scale", 1.0)), bool(attrs.get("guard", False))  # type: ignore[attr-defined]
    dot = f', input_precision="{options.dot}"' if dtype == "float32" else ""
    (rows,) = [v.mask for v in tile.variables.values() if v.name == "m"]
    deep = f"(dd < {depth})" if depth != d else ""
    inside = "" if isinstance(keys, int) and keys % bn == 0 else f"(key < {tile.index(keys)})"
    far = f"(ee < {columns})" if columns != e else ""
    unit = spelling.scalar(scale if access.bias is not None else scale * LOG2E)
    if access.bias is None and abs(scale) <= MOST < abs(scale * LOG2E):
        unit = f"{spelling.scalar(scale)} * {LOG2E!r}"
    lines = [
        f"dd = tl.arange(0, {d})", f"ee = tl.arange(0, {e})", f"kk = tl.arange(0, {bn})",
        f"q = {_tile(tile, access.q, 'm', 'dd[None, :]', [rows, _across(deep)])}",
        f"top = tl.full(({bm}, 1), float('-inf'), tl.float32)", f"total = tl.zeros(({bm}, 1), tl.float32)",
        f"acc = tl.zeros(({bm}, {e}), tl.float32)",
    ]  # fmt: skip
    body = [
        "key = k0 + kk",
        f"kt = {_tile(tile, access.k, 'key[None, :]', 'dd[:, None]', [_across(inside), _down(deep)])}",
        f"s = tl.dot(q, kt{dot}) * {unit}",
        *_bias(tile, access, (bm, bn), _across(inside)),
        *([f"s = tl.where({_across(inside)}, s, float('-inf'))"] if inside else []),
        "high = ox_max(top, ox_max_of(s, 1))",
        # Where all keys so far are masked, the maximum is -inf, and -inf - -inf would be NaN too early.
        "base = tl.where(high == float('-inf'), 0.0, high)",
        "p = tl.exp2(s - base)", "old = tl.exp2(top - base)",
        "total = total * old + ox_sum(p, 1)",
        f"v = {_tile(tile, access.v, 'key[:, None]', 'ee[None, :]', [_down(inside), _across(far)])}",
        f"acc = tl.dot(p.to(v.dtype), v, acc * old{dot})", "top = high",
    ]  # fmt: skip
    lines += [f"for k0 in range(0, {tile.index(keys)}, {bn}):", *indent(body)]
    lines.append("acc = tl.where(total == 0, 0.0, tl.div_rn(acc, total))" if guard else "acc = tl.div_rn(acc, total)")
    if guard:
        lines.append("acc = tl.where(top != top, 0.0, acc)")
    elif not isinstance(keys, int) or keys == 0:  # without keys there is nothing to add up, and no 0 / 0
        lines.append(f"acc = tl.where(tl.full((1, 1), {tile.index(keys)}, tl.int64) == 0, 0.0, acc)")
    if dtype != "float32":
        lines.append(f"acc = acc.to({spelling.stored_of(dtype)}).to(tl.float32)")
    return lines


def _across(test: str) -> str | None:
    return f"{test}[None, :]" if test else None


def _down(test: str) -> str | None:
    return f"{test}[:, None]" if test else None


def _bias(tile: Tile, access: AttentionAccess, block: tuple[int, int], inside: str | None) -> list[str]:
    """Adds the mask or bias to the scores, and changes their unit."""
    if access.bias is None:
        return []
    value, address = access.bias
    key, row = symbol(access.key), symbol(access.row)
    own = Tile(block, tile.buffers)
    own.names = dict(tile.names)
    own.variables = {row: tile.variables[row]}
    own.lane(key, TileVariable("key[None, :]", 1, block[1], inside))
    emitter, scope = own.emitter(), own.scope()
    bias = emitter.emit(Load(value.dtype, value, (address,)), scope)
    return [*scope.lines, f"s = (s + {bias}) * {LOG2E!r}"]


def _tile(tile: Tile, matrix: Matrix, row: str, col: str, masks: list[str | None]) -> str:
    """A load of an operand: `row` and `col` are its indices."""
    parts = [tile.index(matrix.base)]
    for name, stride in ((row, matrix.row), (col, matrix.col)):
        text = tile.index(stride)
        parts.append(name if text == "1" else f"{name} * {text}")
    where = " + ".join(p for p in parts if p and p != "0")
    tests = " & ".join(m for m in masks if m)
    return f"tl.load({tile.buffers.pointer(matrix.value)} + {where}{f', mask={tests}, other=0.0' if tests else ''})"
