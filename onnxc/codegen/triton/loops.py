"""Emits loop nests as Triton kernels.

A nest without reductions is a grid of tiles over its elements: flat ones, or two-dimensional where it reads along
another dim than it writes, so that both are coalesced (Triton turns the tile in shared memory).

A nest with reductions has a tile [X, R] of outer points by turns of the inner loops. Where a row fits, it stays in
registers for all phases (softmax reads its input once), in one part or several; else each phase loops over it in
pieces. How large tiles are is chosen in `tiles.py`, or by the caller.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from onnxc.codegen.loop_order import normalise
from onnxc.codegen.triton import spelling, tiles
from onnxc.codegen.triton.kernel import WIDE, Kernel, either, far, indent
from onnxc.codegen.triton.terms import Buffers, Scope, TermEmitter, TileVariable
from onnxc.codegen.triton.tiles import Facts, Tile
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, Symbol, ceildiv, coefficient, prod, symbols
from onnxc.loops.nest import Loop, Nest, Phase, addresses, phase_terms
from onnxc.loops.terms import Guard, Load, Reduction, Term, walk


@dataclass
class Body:
    """Part of a kernel: `lines` for program `pid` of `programs`."""

    lines: list[str]
    programs: Dim
    warps: int


@dataclass
class Part:
    """Some turns of a row that stays in registers: what is known of them, and how loops are called there."""

    scope: Scope
    names: dict[Symbol, str]
    variables: dict[Symbol, TileVariable]


def emit_sections(
    nests: list[Nest], choice: Tile | None = None, apart: Mapping[int, tuple[int, int]] | None = None
) -> list[Kernel]:
    """The kernel for the sections of a group, whose programs are dealt to them in turn. If only the run knows whether
    places need 64 bits, there is one for these and one for the others: to divide such numbers takes long.

    Args:
        nests: the sections, lowered.
        choice: the tile of a single nest, one of :func:`candidates`; without it the cost model chooses.
        apart: buffers whose rows are apart, as the layout has them.
    """
    for nest in nests:
        normalise(nest, divide=True)
    own = choice if len(nests) == 1 else None

    def kernel(wide: bool) -> Kernel:
        buffers = Buffers(apart=apart or {})
        bodies = [body for nest in nests for body in NestEmitter(nest, buffers, wide, own).bodies()]
        lines, programs = _dealt(bodies, buffers)
        return Kernel(lines, buffers, programs, max(b.warps for b in bodies), wide=wide)

    narrow = kernel(False)
    return either(_needs_far(nests, narrow.buffers.numbers), lambda: [kernel(True)], lambda: [narrow])


def _needs_far(nests: list[Nest], numbers: Mapping[Dim, bool]) -> Dim:
    """1 where places, or numbers that are made of them, need more than 32 bits; an expression if the run decides it."""
    terms = [t for n in nests for p in n.phases for r in _terms(p) for t in walk(r)]
    if any(_is_far(t) for t in terms):
        return 1
    touched = [t.value for t in terms if isinstance(t, Load)] + [s.value for n in nests for s in n.stores()]
    points = [prod(d for _, d in [*n.outer, *p.loops]) for n in nests for p in n.phases]
    return far(touched, *points, numbers=numbers)


def _is_far(term: Term) -> bool:
    """Whether a condition, or an index of what may lie outside, has numbers that need more than 32 bits."""
    dims = term.conditions if isinstance(term, Guard) else term.index if isinstance(term, Load) else ()
    return any(abs(c) >= WIDE for d in dims for c in ([d] if isinstance(d, int) else [n for _, n in d.terms]))


def candidates(nests: list[Nest]) -> list[Tile]:
    """Tiles that :func:`emit_sections` may be given for these nests, best first by the cost model; none where several
    nests share a kernel, or one has several bodies.
    """
    if len(nests) != 1 or (nests[0].is_plain and len(nests[0].phases) != 1):
        return []
    normalise(nests[0], divide=True)
    emitter = NestEmitter(nests[0], Buffers(), False)
    return tiles.candidates(emitter.facts(nests[0].phases[0]))


def _terms(phase: Phase) -> list[Term]:
    return [r.body for r in phase.reductions] + [s.term for s in phase.stores]


def _dealt(bodies: list[Body], buffers: Buffers) -> tuple[list[str], Dim]:
    """The bodies one after the other in the numbers of programs: which one it is takes a search by halves, since the
    time that Triton takes grows with the depth of its branches.
    """
    ends = list(itertools.accumulate((b.programs for b in bodies), initial=0))[1:]
    own = TermEmitter({}, (), buffers)

    def search(low: int, high: int) -> list[str]:
        if high - low == 1:
            shift = [f"pid = pid - {own.index(ends[low - 1], Scope())}"] if low else []
            return [*shift, *bodies[low].lines]
        middle = (low + high) // 2
        test = f"if pid < {own.index(ends[middle - 1], Scope())}:"
        return [test, *indent(search(low, middle)), "else:", *indent(search(middle, high))]

    return search(0, len(bodies)), ends[-1]


class NestEmitter:
    """One normalised loop nest."""

    def __init__(
        self,
        nest: Nest,
        buffers: Buffers,
        wide: bool,
        choice: Tile | None = None,
        given: Mapping[Symbol, str] | None = None,
        passing: frozenset[int] = frozenset(),
    ) -> None:
        self.nest, self.buffers, self.wide, self.choice = nest, buffers, wide, choice
        self.given = given or {}  # loops around the nest, by name
        self.passing = passing  # storages that nobody touches again soon

    def bodies(self) -> list[Body]:
        """What the programs of the nest do."""
        if self.nest.is_plain:
            return [self._plain(phase) for phase in self.nest.phases]
        return [self._rows()]

    def _begin(self, shape: tuple[int, ...]) -> tuple[TermEmitter, Scope]:
        """For a tile of a shape; loops around the nest have their names there."""
        emitter = TermEmitter(self.nest.lookups, shape, self.buffers, self.wide)
        emitter.names |= self.given
        emitter.passing = self.passing
        return emitter, Scope(available=set(self.given))

    def facts(self, phase: Phase) -> Facts:
        """What a tile for the nest is chosen by; for a phase of it, where there are no reductions."""
        if self.nest.is_plain:
            partner = self._partner(phase)
            points = _known(prod(d for _, d in phase.loops))
            if partner is None:
                return Facts("flat", points)
            sizes = dict(phase.loops)
            return Facts("turned", points, sides=(_known(sizes[partner[0]]), _known(sizes[partner[1]])))
        rows = [p for p in self.nest.phases if p.loops]
        columns, along = self._directions()
        turns = [prod(d for _, d in p.loops) for p in rows]
        known = [t for t in turns if isinstance(t, int)]
        run = max((d for p in rows for _, d in p.loops[-1:] if isinstance(d, int)), default=None)
        return Facts(
            "columns" if columns else "rows",
            _known(prod(d for _, d in self.nest.outer)),
            max(known, default=1) if len(known) == len(turns) else None,
            run,
            self._passes(rows),
            self._bits(rows),
            columns and along,
        )

    def _read(self, phase: Phase) -> Iterator[Load]:
        """What changes from turn to turn of a phase."""
        own = {s for s, _ in phase.loops}
        terms = phase_terms(phase, self.nest.lookups)
        return (t for t in terms if isinstance(t, Load) and symbols(t.index[0]) & own)

    def _passes(self, rows: list[Phase]) -> int:
        """Phases that read one row."""
        reading = Counter(frozenset(s for s, _ in p.loops) for p in rows if next(self._read(p), None) is not None)
        return max(reading.values(), default=1)

    def _bits(self, rows: list[Phase]) -> int:
        """Bits of the widest elements that change from turn to turn."""
        return max((t.dtype.bits for p in rows for t in self._read(p)), default=32)

    def _tile(self, phase: Phase) -> Tile:
        return self.choice if self.choice is not None else tiles.best(self.facts(phase))

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
        return TileVariable(name, axis, lanes, f"{name}m", size if isinstance(size, int) else None)

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
        partner, tile = self._partner(phase), self._tile(phase)
        if partner is not None:
            return self._turned(phase, *partner, tile)
        loops, lanes = phase.loops, tile.points
        total = prod(d for _, d in loops)
        emitter, scope = self._begin((lanes,))
        x = self._lanes(emitter, scope, "x", f"pid * {lanes}", (lanes, 0), total)
        self._bind(emitter, scope, loops, x.name, x)
        self._stores(phase, emitter, scope)
        return Body(scope.lines, ceildiv(total, lanes), tile.warps)

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

    def _turned(self, phase: Phase, inner: Symbol, partner: Symbol, tile: Tile) -> Body:
        sizes, x, y = dict(phase.loops), tile.points, tile.turns
        emitter, scope = self._begin((y, x))
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
        return Body(scope.lines, total * prod(d for _, d in others), tile.warps)

    # ------------------------------------------------------------ with reductions

    def _rows(self) -> Body:
        nest, tile = self.nest, self._tile(self.nest.phases[0])
        points = prod(d for _, d in nest.outer)
        emitter, scope = self._begin((tile.points, tile.turns))
        emitter.reduced_axes = frozenset([0])
        emitter.packed = bool(tile.packed)
        emitter.turning = frozenset(s for p in nest.phases for s, _ in p.loops)
        variable = self._lanes(emitter, scope, "x", f"pid * {tile.points}", (tile.points, 0), points)
        self._bind(emitter, scope, nest.outer, variable.name, variable)
        resident = bool(tile.resident) and all(isinstance(d, int) for p in nest.phases for _, d in p.loops)
        parts: dict[tuple[Symbol, ...], list[Part]] = {}
        for phase in nest.phases:
            own = tuple(s for s, _ in phase.loops)
            if not own:
                self._phase(phase, emitter, scope, [Part(scope, {}, {})])
            elif resident:
                if own not in parts:
                    parts[own] = self._parts(emitter, scope, phase.loops, tile.turns)
                elif tile.packed:
                    for part in parts[own]:
                        emitter.again(part.scope)
                self._phase(phase, emitter, scope, parts[own])
            else:
                self._pieces(phase, emitter, scope, tile)
        return Body(scope.lines, ceildiv(points, tile.points), tile.warps)

    def _turns(
        self, emitter: TermEmitter, scope: Scope, loops: list[Loop], start: str, shape: tuple[int, int]
    ) -> TileVariable:
        """Makes the loops of a phase known along the second axis."""
        variable = self._lanes(emitter, scope, "r", start, (shape[1], 1), prod(d for _, d in loops))
        self._bind(emitter, scope, loops, variable.name, variable)
        return variable

    def _parts(self, emitter: TermEmitter, scope: Scope, loops: list[Loop], turns: int) -> list[Part]:
        """The turns of a row in parts, each with a scope of its own whose lines are the kernel's."""
        total = prod(d for _, d in loops)
        assert isinstance(total, int)
        return [
            self._part(emitter, Scope(scope, set(), scope.lines), loops, start, turns)
            for start in range(0, max(1, total), turns)
        ]

    def _part(self, emitter: TermEmitter, scope: Scope, loops: list[Loop], start: int, turns: int) -> Part:
        """Turns from `start` on. Loops that do not turn within the part are numbers there."""
        names: dict[Symbol, str] = {}
        inner, size = list(loops), prod(d for _, d in loops)
        while inner:
            (s, d), within = inner[0], prod(n for _, n in inner[1:])
            assert isinstance(within, int) and isinstance(d, int)
            if within * d == 0 or within % turns:
                break
            names[s] = str(start // within % d)
            start, size, inner = start % within, within, inner[1:]
        emitter.names |= names
        variable = self._lanes(emitter, scope, "r", str(start), (turns, 1), size)
        self._bind(emitter, scope, inner, variable.name, variable)
        scope.available |= names.keys()
        names |= {s: emitter.names[s] for s, _ in inner}
        return Part(scope, names, {s: variable for s, _ in inner})

    def _directions(self) -> tuple[bool, bool]:
        """Whether neighbours in memory belong to different rows, for some of what is read row by row; and whether to
        one row, for some.
        """
        rows = {s for s, _ in self.nest.outer}
        across = inside = False
        for phase in self.nest.phases:
            inner = {s for s, _ in phase.loops}
            for e in addresses(phase, self.nest.lookups) if inner else ():
                moves = any(coefficient(e, s) not in (0, None) for s in inner)
                along = {s for s in rows | inner if coefficient(e, s) == 1}
                across |= moves and bool(along) and not along & inner
                inside |= moves and bool(along & inner) and any(coefficient(e, s) != 0 for s in rows)
        return across, inside

    def _pieces(self, phase: Phase, emitter: TermEmitter, scope: Scope, tile: Tile) -> None:
        """A phase in pieces of a row."""
        shape = (tile.points, tile.turns)
        start = self.buffers.fresh("at")
        inner = scope.child()
        accumulators = [_Accumulator(r, self.buffers.fresh("acc"), shape, self.wide) for r in phase.reductions]
        self._turns(emitter, inner, phase.loops, start, shape)
        inside = inner.lines
        for a in accumulators:
            inside += a.add(self._masked(a, phase, emitter, inner), self._position(a, phase, emitter, inner))
        self._stores(phase, emitter, inner)
        for a in accumulators:
            scope.lines += a.start()
        size = emitter.index(prod(d for _, d in phase.loops), scope)
        # A run-time bound that Triton would otherwise unroll, or take for a constant of another type.
        turns = f"ox_nothing(), {size}, {shape[1]}"
        loop = f"range({turns})" if tile.stages == 1 else f"tl.range({turns}, num_stages={tile.stages})"
        scope.lines += [f"for {start} in {loop}:", *indent(inner.lines)]
        for a in accumulators:
            self._finish(a, emitter, scope)

    def _phase(self, phase: Phase, emitter: TermEmitter, scope: Scope, parts: list[Part]) -> None:
        """A phase whose turns are all in registers."""
        # Without loops it has one turn, not one in each lane of the second axis.
        shape = emitter.shape if phase.loops else (emitter.shape[0], 1)
        accumulators = [_Accumulator(r, self.buffers.fresh("acc"), shape, self.wide) for r in phase.reductions]
        for k, part in enumerate(parts):
            self._enter(part, emitter)
            for a in accumulators:
                value, position = (f(a, phase, emitter, part.scope) for f in (self._masked, self._position))
                assert value is not None
                scope.lines += a.add(value, position) if k else a.first(value, position)
        for a in accumulators:
            self._finish(a, emitter, scope)
        for part in parts:
            self._enter(part, emitter)
            self._stores(phase, emitter, part.scope)

    @staticmethod
    def _enter(part: Part, emitter: TermEmitter) -> None:
        """What is emitted next is of this part."""
        emitter.names |= part.names
        for s in part.names:
            emitter.variables.pop(s, None)
        emitter.variables |= part.variables

    @staticmethod
    def _finish(a: _Accumulator, emitter: TermEmitter, scope: Scope) -> None:
        """The result of a reduction is known from here on."""
        scope.lines += a.finish()
        emitter.reduced[a.reduction.key] = a.name
        scope.available.add(("reduced", a.reduction.key))

    def _masked(self, a: _Accumulator, phase: Phase, emitter: TermEmitter, scope: Scope) -> str:
        """The elements of a reduction; the neutral one where a lane does not count."""
        r = a.reduction
        body = (emitter.emit if r.position is None else emitter.rounded)(r.body, scope)
        value = f"tl.broadcast_to({body}, {a.shape})"
        mask, _ = emitter.mask({s for s, _ in phase.loops}, scope)
        if mask is None:
            return value
        return f"tl.where({mask}, {value}, {a.neutral})"

    def _position(self, a: _Accumulator, phase: Phase, emitter: TermEmitter, scope: Scope) -> str | None:
        if a.reduction.position is None:
            return None
        at = f"tl.zeros({a.shape}, {a.places}) + {emitter.index(a.reduction.position, scope)}"
        mask, _ = emitter.mask({s for s, _ in phase.loops}, scope)
        return f"tl.where({mask}, {at}, -1)" if mask and a.last else at


class _Accumulator:
    """A reduction under way, over the second axis of a tile."""

    def __init__(self, reduction: Reduction, name: str, shape: tuple[int, ...], wide: bool) -> None:
        self.reduction, self.name, self.shape = reduction, name, tuple(shape)
        self.places = "tl.int64" if wide else "tl.int32"  # of positions
        self.dtype = reduction.body.dtype
        self.op = reduction.op
        self.last = bool(reduction.attrs.get("last"))
        self.nowhere = str(-1 if self.last else (1 << 62) - 1 if wide else (1 << 31) - 1)

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
            lines.append(f"{self.name}_i = tl.full({self.shape}, {-1 if self.last else 0}, {self.places})")
            if self.last:
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
        x, p, i = (f"{self.name}_{k}" for k in "xpi")
        test = f"{x} {'>' if self.op == 'argmax' else '<'} {v}"
        lines = [f"{x} = {value}", f"{p} = {position}"]
        # A NaN counts where it is first of all, and nowhere else.
        if self.last:
            lines += [
                f"{self.name}_n = {self.name}_n | (({x} != {x}) & ({p} == 0))",
                f"{x} = tl.where({x} != {x}, {self.neutral}, {x})",
            ]
            test = f"({test}) | (({x} == {v}) & ({p} > {i}))"
        else:  # turns need not be in the order of positions
            if self.dtype.is_float:
                lines.append(f'{x} = tl.where(({x} != {x}) & ({p} == 0), float("{self._sign}inf"), {x})')
            test = f"({test}) | (({x} == {v}) & ({p} < {i}))"
        lines.append(f"{self.name}_b = {test}")
        return [*lines, f"{v} = tl.where({self.name}_b, {x}, {v})", f"{i} = tl.where({self.name}_b, {p}, {i})"]

    @property
    def _sign(self) -> str:
        """Of the infinity that is better than all else."""
        return "" if self.op == "argmax" else "-"

    def first(self, value: str, position: str | None) -> list[str]:
        """The first part, where there is nothing to add it to."""
        if position is None:
            return [f"{self.name}_v = ({value}).to({self._kind})"]
        return [*self.start(), *self.add(value, position)]

    def finish(self) -> list[str]:
        """The result [X, 1] from the lanes."""
        v = f"{self.name}_v"
        if self.reduction.position is not None:
            best = "ox_max_of" if self.op == "argmax" else "ox_min_of"
            pick = "ox_max_of" if self.last else "ox_min_of"
            at = f"tl.where(ox_any_of({self.name}_n, 1), 0, {self.name}_a)" if self.last else f"{self.name}_a"
            return [
                f"{self.name}_m = {best}({v}, 1)",
                f"{self.name}_a = {pick}(tl.where({v} == {self.name}_m, {self.name}_i, {self.nowhere}), 1)",
                f"{self.name} = {at}.to(tl.int64)",
            ]
        if self.dtype is dtypes.boolean:
            return [f"{self.name} = {'ox_any_of' if self.op == 'max' else 'ox_all_of'}({v}, 1)"]
        call = {"sum": "ox_sum", "prod": "ox_prod", "max": "ox_max_of", "min": "ox_min_of"}[self.op]
        return [f"{self.name} = {call}({v}, 1).to({self._kind})"]


def _known(d: Dim) -> int | None:
    return d if isinstance(d, int) else None
