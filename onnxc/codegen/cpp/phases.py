"""The inside of a loop nest: the loops of each phase around a body that computes one vector."""

from __future__ import annotations

from dataclasses import replace

from onnxc.codegen.cpp import prefetch, spelling, windows
from onnxc.codegen.cpp.accumulators import Accumulator, Parts, lane_of, parts_of
from onnxc.codegen.cpp.index_sets import split_phase
from onnxc.codegen.cpp.phase_caches import PhaseCaches
from onnxc.codegen.cpp.splits import arrange, turns, written_out
from onnxc.codegen.cpp.terms import TermEmitter
from onnxc.codegen.cpp.vector_loop import Staging, choose_vector, cost, staging, vectors_across
from onnxc.codegen.cpp.writer import Scope, indent, interleave
from onnxc.ir.expr import Dim, Symbol, ceildiv, symbols
from onnxc.loops.nest import Nest, Phase
from onnxc.loops.terms import Guard, Load, Term, children

UNROLL = 4
LONG_CHAIN = 32  # cost of a body from which several vectors are computed side by side


class PhaseEmitter:
    """What the phases of a nest do at one turn of its outer loops."""

    def __init__(self, nest: Nest, lanes: int) -> None:
        arrange(nest, lanes)
        self.nest, self.lanes = nest, lanes
        self.across = vectors_across(nest, lanes)  # of phases, by their loops, where sums decide about the vectors
        self.vector = None if self.across else choose_vector(nest, lanes)
        self.emitter = TermEmitter(nest.lookups, self.vector)
        self.emitter.exact = nest.exact
        self.emitter.reductions = {r.key: r for r in nest.reductions()}
        self.emitter.aligned = lanes
        self.outer_vector = any(s == self.vector for s, _ in nest.outer)
        self._split()
        self.includes: set[str] = set()
        self.caches = PhaseCaches(self.emitter, lanes)
        self.bounds: dict[Symbol, tuple[list[Dim], list[Dim]]] = {}  # of loops that stay inside a padded window
        self.divisors: dict[str, str] = {}  # names of what divides by a size, by the size
        self.function = Scope()
        self.function.lines.append("const Full lanes{}; (void)lanes;")

    def _split(self) -> None:
        phases: list[Phase] = []
        self.vectors = {self.vector, *self.across.values()}
        for phase in self.nest.phases:
            vector = self._phase_vector(phase)
            if vector is not None and not self.outer_vector:
                phase = written_out(phase, self.nest.lookups, vector)
            pieces = [phase]
            if vector is not None and not phase.reductions:
                pieces = split_phase(phase, self.nest.lookups, vector) or [phase]
            self.vectors |= {s for p in pieces for s, _ in p.loops if s not in dict(phase.loops)}
            phases += pieces
        self.nest.phases = phases
        for phase in phases:
            if self._tiling(phase) is not None:
                prefetch.fetch_ahead(phase, prefetch.TILE)

    def _tiling(self, phase: Phase) -> Staging | None:
        """The loads of a phase that go through tiles, since its lanes run across them; None where none do."""
        vector = self.vector if self.outer_vector else self._phase_vector(phase) if self.nest.is_plain else None
        found = None if vector is None else staging(phase, self.nest.lookups, vector, self.lanes)
        if found is not None and self._has_order(phase) and phase.loops[-1][0] != found.partner:
            return None
        return found

    def _top(self, d: Dim) -> str:
        return self.emitter.index(d, self.function)

    def _phases(self, scope: Scope) -> None:
        for phase in self.nest.phases:
            if phase.reductions:
                self._reduce(phase, scope)
            else:
                self._store(phase, scope)

    def _phase_vector(self, phase: Phase) -> Symbol | None:
        """The vector loop of a phase: splitting gave it another symbol in each piece."""
        known = self.across.get(frozenset(s for s, _ in phase.loops))
        return known or next((s for s, _ in phase.loops if s in self.vectors), None)

    @staticmethod
    def _has_order(*phases: Phase) -> bool:
        """Whether there are sums that must be added up in the order of their loops."""
        return any(r.across is not None for p in phases for r in p.reductions)

    # ------------------------------------------------------------ loops of a phase

    def _store(self, phase: Phase, scope: Scope) -> None:
        vector = self.vector if self.outer_vector else self._phase_vector(phase)
        if not phase.loops:
            inner = scope.child()
            if not self.outer_vector:
                inner.lines.append("const Part lanes{1};")
            values = [self.emitter.emit(s.term, scope) for s in phase.stores]
            for s, value in zip(phase.stores, values, strict=True):
                self.emitter.store(s, [value], inner)
            scope.lines += ["{", *indent(inner.lines), "}"]
            return
        previous, self.emitter.vector = self.emitter.vector, vector
        self._nested(phase, scope, vector, [])
        self.emitter.vector = previous

    def _nested(self, phase: Phase, scope: Scope, vector: Symbol | None, accumulators: list[Accumulator]) -> None:
        """The phase's loops around its innermost body."""
        staged = self._tiling(phase) if self.outer_vector else None
        partner = staged.partner if staged else None
        loops = [(s, d) for s, d in phase.loops if s not in (vector, partner)]
        masked = set() if self._has_order(phase) else self._masking(accumulators)
        loops.sort(key=lambda loop: loop[0] not in masked)  # the lanes that count are found outside of the others
        scopes = [scope]
        for s, _ in loops:
            self.emitter.name_loop(s)
            scopes.append(scopes[-1].child({s}))
        own = next((d for s, d in phase.loops if s in (vector, partner)), 1)
        own = own if partner else ceildiv(own, UNROLL * self.lanes)
        parts = parts_of(accumulators, [own, *(d for _, d in reversed(loops))])
        if parts:
            scope.lines += parts.declared()
        self._inside(phase, scopes[-1], vector, accumulators, staged, parts)
        around = reversed(list(zip(loops, scopes[:-1], scopes[1:], strict=True)))
        for k, ((s, d), outer, body) in enumerate(around, start=1):
            least, most = self._range(s, d, outer)
            own_parts = parts if parts and parts.loop == k else None
            outer.lines += self._loop(self.emitter.names[s], least, most, body.lines, own_parts)
        if parts:
            scope.lines += parts.ended()

    def _inside(
        self,
        phase: Phase,
        scope: Scope,
        vector: Symbol | None,
        accumulators: list[Accumulator],
        staged: Staging | None,
        parts: Parts | None,
    ) -> None:
        """What is inside of a phase's other loops: its vector loop, the blocks of a tile, or one vector or lane."""
        extents = dict(phase.loops)
        if vector in extents:
            self._innermost(phase, scope, vector, "0", self._top(extents[vector]), accumulators, parts=parts)
        elif staged is not None:
            base, inside = f"{self.emitter.name_loop(staged.partner)}_0", scope.child()
            self._tiles(phase, inside, accumulators, "", staged)
            scope.lines += [
                f"for (i64 {base} = 0; {base} < {self._top(extents[staged.partner])}; {base} += VL) {{",
                *indent([*inside.lines, *(parts.taken() if parts and parts.loop == 0 else ())]),
                "}",
            ]
        elif self.outer_vector:
            self._body(phase, scope, accumulators, "")
        else:
            self._one_lane(phase, scope, accumulators)

    @staticmethod
    def _loop(name: str, least: str, most: str, body: list[str], parts: Parts | None) -> list[str]:
        """A loop around a body, which may be that of sums in parts."""
        if parts is None:
            return [f"for (i64 {name} = {least}; {name} < {most}; {name}++) {{", *indent(body), "}"]
        part, end = f"{name}_part", f"{name}_end"
        begin = f"i64 {name} = {part}, {end} = ox_min({part} + {parts.block}, {most})"
        return [
            f"for (i64 {part} = {least}; {part} < {most}; {part} += {parts.block}) {{",
            *indent([f"for ({begin}; {name} < {end}; {name}++) {{", *indent(body), "}", *parts.taken()]),
            "}",
        ]

    def _masking(self, accumulators: list[Accumulator]) -> set[Symbol]:
        """Loops on which it depends which lanes lie inside a padded window."""
        guards = [a.reduction.body for a in accumulators if isinstance(a.reduction.body, Guard)]
        return {s for g in guards for c in g.conditions for s in symbols(c)}

    def _range(self, s: Symbol, extent: Dim, scope: Scope) -> tuple[str, str]:
        """Where a loop begins and ends."""
        low, high = "0", self._top(extent)
        least, most = self.bounds.get(s, ([], []))
        for d in least:
            low = f"ox_max({low}, {self.emitter.index(d, scope)})"
        for d in most:
            high = f"ox_min({high}, {self.emitter.index(d, scope)})"
        return low, high

    def _innermost(
        self,
        phase: Phase,
        scope: Scope,
        vector: Symbol | None,
        lo: str,
        hi: str,
        accumulators: list[Accumulator],
        staged: Staging | None = None,
        parts: Parts | None = None,
    ) -> None:
        """The vector loop: full vectors (several at a time into separate accumulators for reductions),
        then the tail. Sums in parts are so many turns of that.
        """
        if vector is None:
            self._one_lane(phase, scope, accumulators)
            return
        name = self.emitter.name_loop(vector)
        inner = scope.child({vector})
        if staged is not None:
            self._tiles(phase, inner, accumulators, "x", staged)
        else:
            self._body(phase, inner, accumulators, "x")
        types = "".join(f", V<{a.lane}> &x{a.name}" for a in accumulators)
        body = self.emitter.fresh("body")
        lines = scope.lines
        lines += [
            f"const auto {body} = [&](const i64 {name}, auto lanes{types}) OX_LAMBDA {{",
            *indent(inner.lines),
            "};",
        ]
        i, end = self.emitter.fresh("at"), self.emitter.fresh("end")
        several = self._several(phase, inner, name, i, end, hi, body, accumulators)
        args = "".join(f", {a.name}" for a in accumulators)
        extent = dict(phase.loops)[vector]
        rest = []
        if not self._less_than_a_vector(extent) and not (several and self._whole(extent, UNROLL)):
            rest.append(f"for (; {i} + VL <= {end}; {i} += VL) {body}({i}, Full{{}}{args});")
        if not self._whole(extent, 1):
            rest.append(f"if ({i} < {end}) {body}({i}, Part{{(int)({end} - {i})}}{args});")
        if parts is None or parts.loop:
            lines += [f"i64 {i} = {lo}; const i64 {end} = {hi};", *several, *rest]
            return
        part, size = self.emitter.fresh("part"), f"{parts.block * UNROLL} * VL"
        lines += [
            f"for (i64 {part} = {lo}; {part} < {hi}; {part} += {size}) {{",
            f"  i64 {i} = {part}; const i64 {end} = ox_min({part} + {size}, {hi});",
            *indent([*several, *rest, *parts.taken()]),
            "}",
        ]

    def _whole(self, extent: Dim, side: int) -> bool:
        """Whether a loop is made of whole turns of `side` vectors: then the compiler sees no code for a rest."""
        return isinstance(extent, int) and extent % (side * self.lanes) == 0

    def _less_than_a_vector(self, extent: Dim) -> bool:
        """Whether a loop is a rest alone: then the compiler sees no code for whole vectors, half of what it would."""
        return isinstance(extent, int) and extent < self.lanes

    def _several(
        self,
        phase: Phase,
        inner: Scope,
        loop: str,
        at: str,
        end: str,
        hi: str,
        body: str,
        accumulators: list[Accumulator],
    ) -> list[str]:
        """The part of a vector loop that takes UNROLL vectors at a time: reductions, and long chains of
        dependent terms.

        Their statements alternate where they are simple, so that the processor sees the independent
        chains side by side.
        """
        if (hi.isdigit() and int(hi) < UNROLL * self.lanes) or any(
            a.reduction.position is not None for a in accumulators
        ):
            return []
        simple = interleave(inner.lines, loop, at, [a.name for a in accumulators], UNROLL)
        if not accumulators and (simple is None or self._chain(phase) < LONG_CHAIN):
            return []
        lines = []
        for a in accumulators:
            copies = ", ".join(f"{a.name}_{k} = {a.identity}" for k in range(1, UNROLL))
            lines.append(f"V<{a.lane}> {copies};")
        calls = [
            f"{body}({at} + {k} * VL, Full{{}}{''.join(f', {a.copy(k)}' for a in accumulators)});"
            for k in range(UNROLL)
        ]
        lines += [
            f"for (; {at} + {UNROLL} * VL <= {end}; {at} += {UNROLL} * VL) {{",
            *indent(simple or calls),
            "}",
        ]
        for a in accumulators:
            for k in range(1, UNROLL):
                lines.append(a.combined(a.copy(k)))
        return lines

    def _chain(self, phase: Phase) -> int:
        """The cost of what a vector loop computes: without what tables hold."""
        pending, seen = [s.term for s in phase.stores], set[Term]()
        while pending:
            term = pending.pop()
            if term not in seen and term not in self.emitter.tables:
                seen.add(term)
                pending += children(term)
        return cost(seen)

    def _one_lane(self, phase: Phase, scope: Scope, accumulators: list[Accumulator]) -> None:
        """The body where no loop is a vector loop: lane 0 alone counts."""
        inner = scope.child()
        inner.lines.append("const Part lanes{1};")
        self._body(phase, inner, accumulators, "")
        scope.lines += ["{", *indent(inner.lines), "}"]

    def _blocks(self, extent: Dim) -> Dim:
        return ceildiv(extent, self.lanes)

    def _tiles(self, phase: Phase, scope: Scope, accumulators: list[Accumulator], prefix: str, staged: Staging) -> None:
        """The body for one block of the partner loop (from its name with `_0` on): tiles are read, then
        walked.
        """
        self.includes.add("tile.h")
        name = self.emitter.name_loop(staged.partner)
        scope.lines.append(
            f"const i64 {name}_1 = ox_min({name}_0 + VL, {self._top(dict(phase.loops)[staged.partner])});"
        )
        tiled = scope.child({staged.partner})
        self.emitter.names[staged.partner] = f"{name}_0"
        for load in staged.loads:
            tile = self.emitter.fresh("tile")
            kind = spelling.storage_type(load.dtype)
            scope.lines.append(f"alignas(64) {kind} {tile}[VL * VL + VL];")
            scope.lines += self._tile_rows(load, tile, kind, f"(int)({name}_1 - {name}_0)", scope)
            # A function that is called for single lanes has a vector variable of its own: it starts at that lane.
            assert self.emitter.vector is not None, "tiles are of vectors"
            lane = self.emitter.name_loop(self.emitter.vector)  # of this phase: splitting gives each its own
            scope.lines.append(f"const i64 {tile}_at = {lane};")
            self.emitter.staged[load] = f"{tile} + ({name} - {name}_0) * VL + ({lane} - {tile}_at)"
        self.emitter.names[staged.partner] = name
        self._body(phase, tiled, accumulators, prefix)
        self.emitter.staged.clear()
        scope.lines += [
            f"for (i64 {name} = {name}_0; {name} < {name}_1; {name}++) {{",
            *indent(tiled.lines),
            "}",
        ]

    def _tile_rows(self, load: Load, tile: str, kind: str, columns: str, scope: Scope) -> list[str]:
        """Statements that read a tile: of rows in even steps, or each from an address of its own."""
        (address,), p = load.index, self.emitter.pointer(load.value)
        stride = self.emitter.stride(address)
        if stride is not None:
            step = self.emitter.index(stride, scope)
            return [f"tile_load({tile}, {p} + {self.emitter.index(address, scope)}, {step}, (int)lanes, {columns});"]
        place = self.emitter.lane_address(address, scope)
        return [
            f"const {kind} *{tile}_rows[VL];",
            f"for (int i = 0; i < (int)lanes; i++) {tile}_rows[i] = {p} + {place};",
            f"tile_gather({tile}, {tile}_rows, (int)lanes, {columns});",
        ]

    def _body(self, phase: Phase, scope: Scope, accumulators: list[Accumulator], prefix: str) -> None:
        """What one vector of the innermost loop does."""
        if phase.loops:
            self.emitter.cache_at = self._flat(phase)
        for a in accumulators:
            a.accumulate(self.emitter, scope, prefix)
        values = [self.emitter.emit(s.term, scope) for s in phase.stores]  # all first: a store may overwrite an operand
        for some in turns(phase.stores, self.emitter.vector):
            self.emitter.store(phase.stores[some[0]], [values[k] for k in some], scope)
        for term, name in self.caches.computed_by(phase):
            if term not in self.emitter.cached:
                value = self.emitter.emit(term, scope)
                scope.lines.append(f"stl({name} + {self.emitter.cache_at}, {value}, lanes);")
        for store in phase.fetched:
            self.emitter.fetch(store, scope)

    def _flat(self, phase: Phase) -> str:
        total = ""
        vector = self.emitter.vector
        for s, d in [x for x in phase.loops if x[0] != vector] + [x for x in phase.loops if x[0] == vector]:
            name = self.emitter.name_loop(s)
            total = name if not total else f"({total} * {self._top(d)} + {name})"
        return total

    # ------------------------------------------------------------ reductions

    def _reduce(self, phase: Phase, scope: Scope) -> None:
        accumulators, vector = [], self.vector if self.outer_vector else self._phase_vector(phase)
        previous, self.emitter.vector = self.emitter.vector, vector
        for r in phase.reductions:
            name = self.emitter.fresh("acc")
            across = not self.outer_vector and vector is not None
            accumulators.append(Accumulator(r, name, lane_of(r), across))
            scope.lines.append(accumulators[-1].declaration())
        within = self._whole_windows(phase, scope, accumulators)
        inside, self.bounds = windows.inside([a.reduction for a in accumulators], phase, self.emitter)
        for a, r in zip(accumulators, inside, strict=True):
            a.reduction = r
        some = scope.child(guarded=True) if within else scope
        self._nested(phase, some, vector, accumulators)
        self.bounds.clear()
        if within:
            scope.lines += [*within, "} else {", *indent(some.lines), "}"]
        for a in accumulators:
            a.finish(self.emitter, scope)
        self.emitter.cached.update(self.caches.computed_by(phase))
        self.emitter.vector = previous

    def _whole_windows(self, phase: Phase, scope: Scope, accumulators: list[Accumulator]) -> list[str]:
        """The loops of padded windows for vectors all of whose lanes lie inside of the image, up to the closing brace;
        empty where lanes do not differ in that.
        """
        if not self.outer_vector or staging(phase, self.nest.lookups, self.vector, self.lanes):  # type: ignore[arg-type]
            return []
        tests = windows.whole([a.reduction for a in accumulators], phase, self.emitter)
        if tests is None:
            return []
        free = [replace(a, reduction=replace(a.reduction, body=_unguarded(a.reduction.body))) for a in accumulators]
        inner = scope.child(guarded=True)
        self._nested(phase, inner, self.vector, free)
        ends = [f" + {step} * ((int)lanes - 1)" if isinstance(step, int) and step < 0 else "" for _, step in tests]
        text = [f"{self.emitter.index(c, scope)}{end} >= 0" for (c, _), end in zip(tests, ends, strict=True)]
        return [f"if ({' && '.join(text)}) {{", *indent(inner.lines)]


def _unguarded(term: Term) -> Term:
    return term.inside if isinstance(term, Guard) else term
