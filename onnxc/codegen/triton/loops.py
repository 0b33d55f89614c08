"""Emits loop nests as Triton kernels.

A nest without reductions is a grid of tiles over its elements: flat ones, or two-dimensional where it reads along
another dim than it writes, so that both are coalesced (Triton turns the tile in shared memory).

A nest with reductions has a tile [X, R] of outer points by turns of the inner loops. Where a row fits, it stays in
registers for all phases (softmax reads its input once); else each phase loops over it in pieces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from onnxc.codegen.cpp.shape import addresses, is_plain, normalise
from onnxc.codegen.triton import spelling
from onnxc.codegen.triton.kernel import Kernel, indent, is_wide, power
from onnxc.codegen.triton.terms import Buffers, Scope, TermEmitter, TileVariable
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, Symbol, ceildiv, coefficient, prod
from onnxc.loops.nest import Loop, Nest, Phase
from onnxc.loops.terms import Load, Reduction, Term, walk

FLAT = 1024  # elements of a flat tile
SIDE = 32  # of a square tile, which is turned
PERSISTENT = 32768  # elements of a row that stay in registers
TILE = 8192  # elements of a tile [X, R], about
PIECE = 2048  # turns of a row at a time, where it does not fit
COLUMNS = 64  # neighbouring outer points of a tile, where rows lie side by side
PROGRAMS = 264  # programs enough for a GPU: two for each multiprocessor of the largest
ROWS = 1024  # elements of a tile of whole rows: a warp has a row for itself, where it can
PER_WARP = 256  # elements of a tile for each warp
PER_WARP_OF_ROWS = 1024  # the same of whole rows: sums within a warp need no shared memory


@dataclass
class Body:
    """Part of a kernel: `lines` for program `pid` of `programs`."""

    lines: list[str]
    programs: Dim
    warps: int


def emit_sections(nests: list[Nest]) -> Kernel:
    """One kernel for the sections of a group: programs are dealt to them in turn."""
    buffers = Buffers()
    for nest in nests:
        normalise(nest)
    touched = [t.value for n in nests for p in n.phases for r in _terms(p) for t in walk(r) if isinstance(t, Load)]
    touched += [s.value for n in nests for s in n.stores()]
    wide = is_wide(touched, *(prod(d for _, d in [*n.outer, *p.loops]) for n in nests for p in n.phases))
    bodies = [body for nest in nests for body in NestEmitter(nest, buffers, wide).bodies()]
    lines, programs = _dealt(bodies, buffers)
    return Kernel(lines, buffers, programs, max(b.warps for b in bodies), wide=wide)


def _terms(phase: Phase) -> list[Term]:
    return [r.body for r in phase.reductions] + [s.term for s in phase.stores]


def _dealt(bodies: list[Body], buffers: Buffers) -> tuple[list[str], Dim]:
    """The bodies one after the other in the numbers of programs."""
    if len(bodies) == 1:
        return bodies[0].lines, bodies[0].programs
    lines: list[str] = []
    start: Dim = 0
    own = TermEmitter({}, (), buffers)
    for k, body in enumerate(bodies):
        end = start + body.programs
        word = "if" if k == 0 else "elif"
        test = f"{word} pid < {own.index(end, Scope())}:" if k < len(bodies) - 1 else "else:"
        shift = [f"pid = pid - {own.index(start, Scope())}"] if k else []
        lines += [test, *indent([*shift, *body.lines])]
        start = end
    return lines, start


class NestEmitter:
    """One normalised loop nest."""

    def __init__(self, nest: Nest, buffers: Buffers, wide: bool) -> None:
        self.nest, self.buffers, self.wide = nest, buffers, wide

    def bodies(self) -> list[Body]:
        """What the programs of the nest do."""
        if is_plain(self.nest):
            return [self._plain(phase) for phase in self.nest.phases]
        return [self._rows()]

    def _lanes(
        self, emitter: TermEmitter, scope: Scope, prefix: str, start: str, place: tuple[int, int], size: Dim
    ) -> TileVariable:
        """An index along an axis of the tile: `place` gives its lanes and the axis; those from `size` on are masked."""
        lanes, axis = place
        rank, name = len(emitter.shape), self.buffers.fresh(prefix)
        where = ", ".join(":" if a == axis else "None" for a in range(rank))
        lane = f"tl.arange(0, {lanes}){'.to(tl.int64)' if self.wide else ''}" + (f"[{where}]" if rank > 1 else "")
        scope.lines.append(f"{name} = {lane if start == '0' else f'{start} + {lane}'}")
        if isinstance(size, int) and size and size % lanes == 0:
            return TileVariable(name, axis, lanes, None)
        scope.lines.append(f"{name}m = {name} < {emitter.index(size, scope)}")
        return TileVariable(name, axis, lanes, f"{name}m")

    def _decode(self, emitter: TermEmitter, loops: list[Loop], name: str, scope: Scope) -> list[str]:
        """Names loop variables from the number of a turn; returns the statements."""
        lines: list[str] = []
        rest = name
        for k, (s, d) in reversed(list(enumerate(loops))):
            emitter.names[s] = own = self.buffers.fresh("i")
            size = emitter.index(d, scope)
            lines.append(f"{own} = {rest}{f' % {size}' if k else ''}")
            rest = f"({rest} // {size})"
        return lines

    # ------------------------------------------------------------ without reductions

    def _plain(self, phase: Phase) -> Body:
        partner = self._partner(phase)
        if partner is not None:
            return self._turned(phase, *partner)
        loops = phase.loops
        total = prod(d for _, d in loops)
        lanes = min(FLAT, power(total)) if isinstance(total, int) else FLAT
        emitter, scope = TermEmitter(self.nest.lookups, (lanes,), self.buffers), Scope()
        x = self._lanes(emitter, scope, "x", f"pid * {lanes}", (lanes, 0), total)
        self._bind(emitter, scope, loops, x.name, x)
        self._stores(phase, emitter, scope)
        return Body(scope.lines, ceildiv(total, lanes), _warps(lanes))

    def _bind(
        self, emitter: TermEmitter, scope: Scope, loops: list[Loop], name: str, variable: TileVariable | None
    ) -> None:
        """Makes loop variables known that are counted together by one index."""
        scope.lines += self._decode(emitter, loops, name, scope)
        scope.available |= {s for s, _ in loops}
        if variable is not None:
            emitter.variables |= {s: variable for s, _ in loops}

    def _stores(self, phase: Phase, emitter: TermEmitter, scope: Scope) -> None:
        for s in phase.stores:
            emitter.store(s.value, s.address, s.term, scope)

    def _partner(self, phase: Phase) -> tuple[Symbol, Symbol] | None:
        """The loop along which stores are contiguous and another along which a load is; None where they agree."""
        inner = next((x for x, d in phase.loops if coefficient(phase.stores[0].address, x) == 1 and d != 1), None)
        if inner is None:
            return None
        for e in addresses(phase, self.nest.lookups):
            across = coefficient(e, inner)
            if across is None or (isinstance(across, int) and abs(across) < 8):
                continue
            for s, d in phase.loops:
                if s != inner and coefficient(e, s) == 1 and not (isinstance(d, int) and d < 8):
                    return inner, s
        return None

    def _turned(self, phase: Phase, inner: Symbol, partner: Symbol) -> Body:
        sizes = dict(phase.loops)
        x, y = (min(SIDE, power(d)) if isinstance(d := sizes[s], int) else SIDE for s in (inner, partner))
        emitter, scope = TermEmitter(self.nest.lookups, (y, x), self.buffers), Scope()
        rest = "pid"
        total: Dim = 1
        for name, s, lanes, axis in (("x", inner, x, 1), ("y", partner, y, 0)):
            size = sizes[s]
            blocks = ceildiv(size, lanes)
            count = emitter.index(blocks, scope)
            variable = self._lanes(emitter, scope, name, f"({rest} % {count}) * {lanes}", (lanes, axis), size)
            rest = f"({rest} // {count})"
            emitter.names[s] = variable.name
            emitter.variables[s] = variable
            scope.available.add(s)
            total = total * blocks
        others = [loop for loop in phase.loops if loop[0] not in (inner, partner)]
        z = self.buffers.fresh("z")
        scope.lines.append(f"{z} = {rest}")
        self._bind(emitter, scope, others, z, None)
        self._stores(phase, emitter, scope)
        return Body(scope.lines, total * prod(d for _, d in others), _warps(x * y))

    # ------------------------------------------------------------ with reductions

    def _rows(self) -> Body:
        nest = self.nest
        points = prod(d for _, d in nest.outer)
        turns = [prod(d for _, d in p.loops) for p in nest.phases]
        x, r, persistent = self._tile(points, turns)
        emitter = TermEmitter(nest.lookups, (x, r), self.buffers)
        emitter.reduced_axes = frozenset([0])
        scope = Scope()
        variable = self._lanes(emitter, scope, "x", f"pid * {x}", (x, 0), points)
        self._bind(emitter, scope, nest.outer, variable.name, variable)
        seen: dict[tuple[Symbol, ...], TileVariable] = {}
        for phase in nest.phases:
            own = tuple(s for s, _ in phase.loops)
            if not own:
                self._phase(phase, emitter, scope, scope)
            elif persistent:
                if own not in seen:
                    seen[own] = self._turns(emitter, scope, phase.loops, "0", (x, r))
                self._phase(phase, emitter, scope, scope)
            else:
                self._pieces(phase, emitter, scope, (x, r))
        per_warp = PER_WARP_OF_ROWS if persistent and not self._side_by_side() else 2 * PER_WARP
        return Body(scope.lines, ceildiv(points, x), _warps(x * r, per_warp))

    def _turns(
        self, emitter: TermEmitter, scope: Scope, loops: list[Loop], start: str, shape: tuple[int, int]
    ) -> TileVariable:
        """Makes the loops of a phase known along the second axis."""
        variable = self._lanes(emitter, scope, "r", start, (shape[1], 1), prod(d for _, d in loops))
        self._bind(emitter, scope, loops, variable.name, variable)
        return variable

    def _tile(self, points: Dim, turns: list[Dim]) -> tuple[int, int, bool]:
        """Outer points and turns of a tile, and whether all turns of a row are in one."""
        many = points if isinstance(points, int) else 1 << 20
        whole = power(max((t for t in turns if isinstance(t, int)), default=1))
        fits = all(isinstance(t, int) for t in turns)
        columns = self._side_by_side()
        if columns:
            x = min(COLUMNS, power(many))
            persistent = fits and whole * x <= TILE
            r = whole if persistent else max(8, TILE // x)
        else:
            persistent = fits and whole <= PERSISTENT
            r = whole if persistent else PIECE
            x = max(1, min(ROWS // r, power(many), 128))
        while x > 1 and many // x < PROGRAMS and not (columns and x <= 16):
            x //= 2
        return x, r, persistent

    def _side_by_side(self) -> bool:
        """Whether neighbours in memory belong to different rows, for some of what is read row by row."""
        rows = {s for s, _ in self.nest.outer}
        for phase in self.nest.phases:
            inner = {s for s, _ in phase.loops}
            for e in addresses(phase, self.nest.lookups) if inner else ():
                moves = any(coefficient(e, s) not in (0, None) for s in inner)
                along = {s for s in rows | inner if coefficient(e, s) == 1}
                if moves and along and not along & inner:
                    return True
        return False

    def _pieces(self, phase: Phase, emitter: TermEmitter, scope: Scope, shape: tuple[int, int]) -> None:
        """A phase in pieces of a row."""
        start = self.buffers.fresh("at")
        inner = scope.child()
        accumulators = [_Accumulator(r, self.buffers.fresh("acc"), shape) for r in phase.reductions]
        self._turns(emitter, inner, phase.loops, start, shape)
        inside = inner.lines
        for a in accumulators:
            inside += a.add(self._masked(a, phase, emitter, inner), self._position(a, phase, emitter, inner))
        self._stores(phase, emitter, inner)
        for a in accumulators:
            scope.lines += a.start()
        size = emitter.index(prod(d for _, d in phase.loops), scope)
        # A run-time bound that Triton would otherwise unroll, or take for a constant of another type.
        scope.lines += [f"for {start} in range(0, {size}, {shape[1]}):", *indent(inner.lines)]
        for a in accumulators:
            scope.lines += a.finish()
            emitter.reduced[a.reduction.key] = a.name
            scope.available.add(("reduced", a.reduction.key))

    def _phase(self, phase: Phase, emitter: TermEmitter, scope: Scope, inner: Scope) -> None:
        """A phase whose turns are all in the tile."""
        # Without loops it has one turn, not one in each lane of the second axis.
        shape = emitter.shape if phase.loops else (emitter.shape[0], 1)
        for r in phase.reductions:
            a = _Accumulator(r, self.buffers.fresh("acc"), shape)
            scope.lines += a.whole(self._masked(a, phase, emitter, inner), self._position(a, phase, emitter, inner))
            emitter.reduced[r.key] = a.name
            scope.available.add(("reduced", r.key))
        self._stores(phase, emitter, inner)

    def _masked(self, a: _Accumulator, phase: Phase, emitter: TermEmitter, scope: Scope) -> str:
        """The elements of a reduction; the neutral one where a lane does not count."""
        r = a.reduction
        value = f"tl.broadcast_to({emitter.emit(r.body, scope)}, {a.shape})"
        mask, _ = emitter.mask({s for s, _ in phase.loops}, scope)
        if mask is None:
            return value
        return f"tl.where({mask}, {value}, {a.neutral})"

    def _position(self, a: _Accumulator, phase: Phase, emitter: TermEmitter, scope: Scope) -> str | None:
        if a.reduction.position is None:
            return None
        at = f"tl.zeros({a.shape}, tl.int64) + {emitter.index(a.reduction.position, scope)}"
        mask, _ = emitter.mask({s for s, _ in phase.loops}, scope)
        return f"tl.where({mask}, {at}, {a.nowhere})" if mask else at


NOWHERE = 1 << 62


class _Accumulator:
    """A reduction under way, over the second axis of a tile."""

    def __init__(self, reduction: Reduction, name: str, shape: tuple[int, ...]) -> None:
        self.reduction, self.name, self.shape = reduction, name, tuple(shape)
        self.dtype = reduction.body.dtype
        self.op = reduction.op
        self.last = bool(reduction.attrs.get("last"))
        self.nowhere = str(-1 if self.last else NOWHERE)

    @property
    def neutral(self) -> str:
        """What changes nothing."""
        kind = "max" if self.op == "argmax" else "min" if self.op == "argmin" else self.op
        if self.dtype is dtypes.boolean:
            return {"max": "False", "min": "True", "sum": "False", "prod": "True"}[kind]
        if kind in ("sum", "prod"):
            return "0" if kind == "sum" else "1"
        if self.dtype.is_float:
            return f'float("{"-" if kind == "max" else ""}inf")'
        limits = np.iinfo(self.dtype.numpy)
        return str(int(limits.min if kind == "max" else limits.max))

    @property
    def _kind(self) -> str:
        return spelling.computed(self.dtype)

    def start(self) -> list[str]:
        """Before the first piece."""
        lines = [f"{self.name}_v = tl.full({self.shape}, {self.neutral}, {self._kind})"]
        if self.reduction.position is not None:
            lines.append(f"{self.name}_i = tl.full({self.shape}, {self.nowhere}, tl.int64)")
            lines.append(f"{self.name}_n = tl.full({self.shape}, False, tl.int1)")
        return lines

    def add(self, value: str, position: str | None) -> list[str]:
        """A piece."""
        v = f"{self.name}_v"
        if position is None:
            joined = {
                "sum": f"{v} + ({value})", "prod": f"{v} * ({value})", "max": f"ox_max({v}, {value})",
                "min": f"ox_min({v}, {value})",
            }  # fmt: skip
            if self.dtype is dtypes.boolean:
                joined |= {"max": f"{v} | ({value})", "min": f"{v} & ({value})"}
            return [f"{v} = ({joined[self.op]}).to({self._kind})"]
        lines = self._compared(value, position)
        sign = ">" if self.op == "argmax" else "<"
        better = f"({self.name}_x {sign}{'=' if self.last else ''} {v}) & ({self.name}_p != {self.nowhere})"
        return [
            *lines,
            f"{self.name}_b = ({better}) | (({self.name}_i == {self.nowhere}) & ({self.name}_p != {self.nowhere}))",
            f"{v} = tl.where({self.name}_b, {self.name}_x, {v})",
            f"{self.name}_i = tl.where({self.name}_b, {self.name}_p, {self.name}_i)",
            f"{self.name}_n = {self.name}_n | {self.name}_q",
        ]

    def _compared(self, value: str, position: str) -> list[str]:
        """Elements and positions to compare: a NaN counts where it is first of all, and nowhere else."""
        x, lines = f"{self.name}_x", [f"{self.name}_x = {value}", f"{self.name}_p = {position}"]
        lines.append(f"{self.name}_q = ({x} != {x}) & ({self.name}_p == 0)")
        return [*lines, f"{x} = tl.where({x} != {x}, {self.neutral}, {x})"]

    def whole(self, value: str, position: str | None) -> list[str]:
        """All of it at once."""
        if position is None:
            return [f"{self.name}_v = ({value}).to({self._kind})", *self.finish()]
        lines = self._compared(value, position)
        names = {"v": "x", "i": "p", "n": "q"}
        return [*lines, *(f"{self.name}_{a} = {self.name}_{b}" for a, b in names.items()), *self.finish()]

    def finish(self) -> list[str]:
        """The result [X, 1] from the lanes."""
        v = f"{self.name}_v"
        if self.reduction.position is not None:
            best = "ox_max_of" if self.op == "argmax" else "ox_min_of"
            pick = "ox_max_of" if self.last else "ox_min_of"
            return [
                f"{self.name}_m = {best}({v}, 1)",
                f"{self.name}_a = {pick}(tl.where({v} == {self.name}_m, {self.name}_i, {self.nowhere}), 1)",
                f"{self.name} = tl.where(ox_any_of({self.name}_n, 1), 0, {self.name}_a)",
            ]
        if self.dtype is dtypes.boolean:
            return [f"{self.name} = {'ox_any_of' if self.op == 'max' else 'ox_all_of'}({v}, 1)"]
        call = {"sum": "ox_sum", "prod": "ox_prod", "max": "ox_max_of", "min": "ox_min_of"}[self.op]
        return [f"{self.name} = {call}({v}, 1).to({self._kind})"]


def _warps(elements: int, each: int = PER_WARP) -> int:
    """Warps of a program: one for each few elements, a power of two."""
    return max(1, min(16, power(math.ceil(elements / each))))
