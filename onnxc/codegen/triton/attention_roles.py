"""Attention by warps with roles: the kernel that calls `library_roles.py`, written in Triton's Gluon, for sm_90.

It takes what that can: heads of 64 or 128 of 16 bits, in rows that tensor descriptors describe, with no mask or one
that hides by position, and no epilogue but the store of the result. Everything else has the template of `attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxc.codegen.cpp.epilogue import mapping, substitute_indices
from onnxc.codegen.triton.attention_mask import Band
from onnxc.codegen.triton.attention_steps import ScoreSteps
from onnxc.codegen.triton.attention_tiles import GROUP, VECTOR, AttentionTile
from onnxc.codegen.triton.epilogue import Tile, symbol
from onnxc.codegen.triton.kernel import Kernel, indent
from onnxc.codegen.triton.terms import Buffers
from onnxc.ir.expr import (
    Call,
    Dim,
    Expr,
    Symbol,
    bounds,
    ceildiv,
    coefficient,
    is_nonnegative,
    of,
    prod,
    symbols,
)
from onnxc.ir.graph import Value
from onnxc.loops.loop_index import is_size
from onnxc.loops.terms import Result
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.planner.lower import Lowering
from onnxc.planner.templates import AttentionAccess, Matrix

DEPTHS = (64, 128)
MOST_AXES = 3  # of a descriptor, beside rows and columns
REGISTERS = {2: 240, 3: 160}  # of a group's thread, by how many groups there are
BRINGING = 24  # registers of the warp that brings tiles


@dataclass(frozen=True)
class _Lies:
    """How an operand lies: the first element, and its axes beside rows and columns (index, stride, size)."""

    matrix: Matrix
    offset: Dim
    axes: tuple[tuple[Dim, Dim, Dim], ...]


@dataclass(frozen=True)
class Roles:
    """An attention that such a kernel can compute."""

    access: AttentionAccess
    band: Band | None
    operands: tuple[_Lies, _Lies, _Lies]  # queries, keys, values
    out: Matrix
    unit: float  # of scores in the exponent of 2
    guard: bool


def roles_of(access: AttentionAccess, scores: ScoreSteps, unit: float, group: Group, layout: Layout) -> Roles | None:
    """The attention, where such a kernel can compute it; `unit` is that of its scores."""
    assert group.node is not None
    queries, keys, depth, columns = access.sizes
    out = _stored(access, group, layout)
    if out is None or scores.steps or depth != columns or depth not in DEPTHS:
        return None
    if group.node.output.dtype.bits != 16 or not is_nonnegative(keys - 1) or not is_nonnegative(queries - 1):
        return None
    found = [_lies(x, access.batch) for x in (access.q, access.k, access.v)]
    if any(x is None for x in found):
        return None
    q, k, v = (x for x in found if x is not None)
    return Roles(access, scores.band, (q, k, v), out, unit, bool(group.node.attrs.get("guard", False)))


def _stored(access: AttentionAccess, group: Group, layout: Layout) -> Matrix | None:
    """Where the result lies; None where something else than a store follows, or its rows are no rows in memory."""
    assert group.node is not None
    nest = Lowering(group.sections[0], layout, group.results).nest(None)
    substitute_indices(nest, [mapping(group.sections[0], access.index)])
    stores = list(nest.stores())
    if len(stores) != 1 or not isinstance(stores[0].term, Result) or nest.lookups:
        return None
    address, value = stores[0].address, stores[0].value
    row, column = (coefficient(address, symbol(x)) for x in (access.row, access.column))
    if row is None or column != 1 or value.dtype is not group.node.output.dtype:
        return None
    base = address - access.row * row - access.column
    return Matrix(value, base, row, 1) if _loops_of(base, access.batch) is not None else None


def _loops_of(base: Dim, batch: list[tuple[Symbol, Dim]]) -> frozenset[Symbol] | None:
    """The batch loops of an address; None where there are other symbols than they and sizes."""
    loops = {s for s, _ in batch}
    others = {s for s in symbols(base) - loops if not is_size(s)}
    return None if others else symbols(base) & loops


def _lies(x: Matrix, batch: list[tuple[Symbol, Dim]]) -> _Lies | None:
    """How a descriptor can say where the rows of all heads lie; None where none can."""
    loops, size = {s for s, _ in batch}, x.value.dtype.itemsize
    if _loops_of(x.base, batch) is None or x.col != 1 or not isinstance(x.row, int) or x.row <= 0:
        return None
    strides: dict[Expr, Dim] = {}
    offset: Dim = 0
    for factors, number in x.base.terms if isinstance(x.base, Expr) else ():
        own = [a for a in factors if symbols(of(a)) & loops]
        rest = prod([number, *(of(a) for a in factors if a not in own)])
        if len(own) > 1 or number * size % VECTOR:
            return None
        if own:
            strides[of(own[0])] = strides.get(of(own[0]), 0) + rest
        else:
            offset = offset + rest
    offset = x.base if isinstance(x.base, int) else offset
    axes = [(at, stride, _extent(at, dict(batch))) for at, stride in strides.items()]
    if len(axes) > MOST_AXES or x.row * size % VECTOR or (isinstance(offset, int) and offset * size % VECTOR):
        return None
    if any(n is None or not is_nonnegative(stride - 1) for _, stride, n in axes):
        return None
    return _Lies(x, offset, tuple((at, stride, n) for at, stride, n in axes if n is not None))


def _extent(at: Expr, sizes: dict[Symbol, Dim]) -> Dim | None:
    """How many values an index of an axis has."""
    (atom,) = at.atoms()
    if isinstance(atom, Symbol):
        return sizes[atom]
    most = bounds(at)[1]
    if most is not None:
        return most + 1
    if isinstance(atom, Call) and atom.op == "floordiv" and isinstance(atom.args[1], int):
        (inner,) = symbols(of(atom)) if len(symbols(of(atom))) == 1 else (None,)
        if inner in sizes and atom.args[0] == of(inner):
            return ceildiv(sizes[inner], atom.args[1])
    return None


# ---------------------------------------------------------------- text


def emit_roles(roles: Roles, tile: AttentionTile) -> Kernel:
    """The kernel with a tile. `ox_own_` stands for the kernel's name in names of its own functions."""
    return _Writer(roles, tile).kernel()


class _Writer:
    def __init__(self, roles: Roles, blocks: AttentionTile) -> None:
        self.roles, self.blocks = roles, blocks
        self.access, self.band = roles.access, roles.band
        self.tile = Tile((), Buffers())
        self.groups = blocks.rows // GROUP
        self.half = f"gl.{roles.access.q.value.dtype.name}"

    def kernel(self) -> Kernel:
        """The kernel and its functions."""
        queries = self.access.sizes[0]
        tiles = ceildiv(queries, self.blocks.rows) * prod(d for _, d in self.access.batch)
        place = self._place()
        parts = [self._group(k) for k in range(self.groups)]
        lines = [*self._setup(), *self._start()]
        resident = 1 if self.blocks.roles == PERSISTENT else 0
        sizes = sorted(self.tile.buffers.sizes)
        named = [f"{s} = sizes[{k + FIXED}]" for k, s in enumerate(sizes)]
        lines[lines.index(SIZES)] = f"sizes = ({', '.join([*self._fixed(tiles), *sizes])})"
        helpers = [*self._span(indent(named)), *place[:2], *indent(named), *place[2:]]
        helpers += [line for part in [*parts, self._bring()] for line in part]
        return Kernel(
            lines, self.tile.buffers, tiles, 4, 1, "attention", False, resident=resident, helpers=helpers
        )  # fmt: skip

    def _index(self, d: Dim) -> str:
        return self.tile.index(d)

    # ------------------------------------------------------------ where tiles lie

    def _fixed(self, tiles: Dim) -> list[str]:
        """The numbers that each kernel has."""
        queries, keys = self.access.sizes[:2]
        upper, lower = (self.band.upper, self.band.lower) if self.band is not None else (None, None)
        found = (tiles, queries, keys, upper or 0, lower or 0, self.roles.out.row)
        return [f"gl.to_tensor({self._index(d)})" if isinstance(d, int) else self._index(d) for d in found]

    def _place(self) -> list[str]:
        """The function that finds a tile: its first query and key, how many blocks of keys it has, and how many of
        them are tested; where its head is among queries, keys and values; where the first row of the result is.
        """
        queries = self.access.sizes[0]
        count = self._index(ceildiv(queries, self.blocks.rows))
        heads = self._index(prod(d for _, d in self.access.batch))
        if self._shared_out():
            lines = [
                "pid, programs = gl.program_id(0), gl.num_programs(0)",
                f"together, full, last, each = ox_shared_out({count}, {heads}, pid, programs)",
                "part = tile // each", "at = pid if tile % each == 0 else 2 * programs - 1 - pid",
                "most = together if part < full else last", "alone = pid + tile * programs",
                f"row = alone % {count} if 2 * programs < {count} else at // most",
                f"row0 = ({count} - 1 - row) * {self.blocks.rows}",
                f"rest = alone // {count} if 2 * programs < {count} else part * together + at % most",
            ]  # fmt: skip
        else:
            block = f"({count} - 1 - tile % {count})" if self.band is not None else f"tile % {count}"
            lines = [f"row0 = {block} * {self.blocks.rows}", f"rest = tile // {count}"]
        rest = "rest"
        for j, (loop, size) in reversed(list(enumerate(self.access.batch))):
            lines.append(f"b{j} = {rest}{f' % {self._index(size)}' if j else ''}")
            rest = f"({rest} // {self._index(size)})"
            self.tile.scalar(loop, f"b{j}")
        lines += self._blocks()
        heads_at = [f"({''.join(f'{self._index(at)}, ' for at, _, _ in x.axes)})" for x in self.roles.operands]
        found = ["row0", "start", "blocks", "tested", *heads_at, self._index(self.roles.out.base)]
        return [
            "@gluon.jit", "def ox_own_place(tile, sizes):", *indent([*lines, f"return {', '.join(found)}"])
        ]  # fmt: skip

    def _shared_out(self) -> bool:
        """Whether tiles are of unequal work, and each program's are chosen so that all have as much (the library's
        `ox_shared_out`).
        """
        return self.band is not None and self.blocks.roles == PERSISTENT

    def _span(self, named: list[str]) -> list[str]:
        """The function that says which tiles a program has: the first number, the end, and the step."""
        found = "gl.program_id(0), sizes[0], gl.num_programs(0)"
        if self._shared_out():
            count = self._index(ceildiv(self.access.sizes[0], self.blocks.rows))
            found = f"0, ox_share({count}, sizes[0] // {count}), 1"
        return ["@gluon.jit", "def ox_own_span(sizes):", *named, f"    return {found}", "", ""]

    def _blocks(self) -> list[str]:
        keys, step = self._index(self.access.sizes[1]), self.blocks.keys
        lines = ["start = 0", f"end = {keys}", f"whole = {keys}"]
        if self.band is not None and self.band.upper is not None:
            last = self._index(self.band.upper)
            lines[1:] = [
                f"end = gl.minimum({keys}, row0 + {self.blocks.rows} + {last})",
                f"whole = gl.minimum({keys}, row0 + 1 + {last})",
            ]
        if self.band is not None and self.band.lower is not None:  # all of them are tested
            first = f"gl.maximum(row0 + {self._index(self.band.lower)}, 0)"
            lines[0] = f"start = gl.minimum({first}, {keys} - 1) // {step} * {step}"
            lines.append("whole = start")
        return [
            *lines, f"blocks = gl.maximum((end - start + {step - 1}) // {step}, 1)",
            f"tested = blocks - gl.minimum(gl.maximum(whole - start, 0) // {step}, blocks)",
        ]  # fmt: skip

    @property
    def _ends(self) -> bool:
        keys = self.access.sizes[1]
        return not (isinstance(keys, int) and keys % self.blocks.keys == 0)

    @property
    def _more(self) -> bool:
        """Whether more blocks than one of a tile may have to be tested."""
        band, step = self.band, self.blocks.keys
        if band is None:
            return False
        aligned = isinstance(band.upper, int) and band.upper % step == 0 and step % self.blocks.rows == 0
        return band.lower is not None or not aligned

    # ------------------------------------------------------------ the kernel

    def _setup(self) -> list[str]:
        """Descriptors, buffers and barriers."""
        depth, stages, groups = self.access.sizes[2], self.blocks.stages, self.groups
        held = groups * (HELD if self.blocks.roles == PERSISTENT else 1)
        lines = [SIZES]
        queries, keys = self.access.sizes[:2]
        for name, x, count, rows, slots in zip(
            "qkv", self.roles.operands, (queries, keys, keys), (GROUP, self.blocks.keys, self.blocks.keys),
            (held, stages, stages), strict=True,
        ):  # fmt: skip
            ones = [1] * len(x.axes)
            shape = ", ".join([*(self._index(n) for _, _, n in x.axes), self._index(count), str(depth)])
            strides = ", ".join([*(self._index(s) for _, s, _ in x.axes), str(x.matrix.row), "1"])
            at = f"{self._pointer(x.matrix.value)} + {self._index(x.offset)}"
            lines += [
                f"{name}_is: gl.constexpr = gl.NVMMASharedLayout(128, 16, {len(ones) + 2})",
                f"{name}_lies = tma.make_tensor_descriptor({at}, [{shape}], [{strides}], "
                f"{[*ones, rows, depth]}, {name}_is)",
                f"{name}_at = gl.allocate_shared_memory({self.half}, {[slots, *ones, rows, depth]}, {name}_is)",
            ]
        return [
            *lines, "buffers = (q_at, k_at, v_at)",
            f"full = (ox_barriers({held}, 1), ox_barriers({stages}, 1), ox_barriers({stages}, 1))",
            f"free = (ox_barriers({held}, 1), ox_barriers({stages}, {groups}), ox_barriers({stages}, {groups}))",
            f"turns = ox_barriers({groups}, 1)",
            *(["mbarrier.arrive(turns.index(0))"] if self.blocks.turns else []),
            "fence_async_shared()",
        ]  # fmt: skip

    def _pointer(self, value: Value) -> str:
        return self.tile.buffers.pointer(value)

    def _start(self) -> list[str]:
        arguments = f"({self._pointer(self.roles.out.value)}, buffers, full, free, turns, sizes)"
        parts = [f"(ox_own_group{k}, {arguments})" for k in range(self.groups)]
        parts.append("(ox_own_bring, ((q_lies, k_lies, v_lies), buffers, full, free, sizes))")
        warps, registers = [4] * (self.groups - 1) + [1], [REGISTERS[self.groups]] * (self.groups - 1) + [BRINGING]
        return [f"gl.warp_specialize([{', '.join(parts)}], {warps}, {registers})"]

    def _group(self, group: int) -> list[str]:
        queries, band = self.access.sizes[0], self.band
        facts = {
            "unit": repr(self.roles.unit), "stages": self.blocks.stages, "groups": self.groups,
            "group": group, "paced": bool(self.blocks.turns), "more": self._more, "ends": self._ends,
            "above": band is not None and band.upper is not None, "below": band is not None and band.lower is not None,
            "rows": isinstance(queries, int) and queries % self.blocks.rows == 0, "guard": self.roles.guard,
        }  # fmt: skip
        given = ", ".join(f"{key}={value}" for key, value in facts.items())
        return [
            "", "", "@gluon.jit", f"def ox_own_group{group}(out, buffers, full, free, turns, sizes):",
            f"    ox_attend(ox_own_span, ox_own_place, out, buffers, full, free, turns, sizes, {given})",
        ]  # fmt: skip

    def _bring(self) -> list[str]:
        return [
            "", "", "@gluon.jit", "def ox_own_bring(lies, buffers, full, free, sizes):",
            f"    ox_bring(ox_own_span, ox_own_place, lies, buffers, full, free, sizes, groups={self.groups}, "
            f"stages={self.blocks.stages})",
        ]  # fmt: skip


SIZES = "sizes"  # the line that tells them, once all are known
FIXED = 6  # numbers before the dynamic dims
PERSISTENT = 2  # of AttentionTile.roles
HELD = 2  # tiles of queries: the next one's are copied while those of one are in use
