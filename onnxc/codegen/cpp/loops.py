"""Emits loop nests: how their turns are divided over the parallel work items that a kernel function runs."""

from __future__ import annotations

from onnxc.codegen.cpp import gathered, prefetch, spelling, tables
from onnxc.codegen.cpp.accumulators import Accumulator, identity
from onnxc.codegen.cpp.lines import Lines, lines_of_windows
from onnxc.codegen.cpp.phases import UNROLL, PhaseEmitter
from onnxc.codegen.cpp.splits import turns
from onnxc.codegen.cpp.vector_loop import Staging, cost
from onnxc.codegen.cpp.writer import Scope, indent, interleave
from onnxc.codegen.loop_order import ROWS
from onnxc.ir.expr import Dim, Symbol, ceildiv, prod
from onnxc.loops.nest import Phase, extent_of, phase_terms
from onnxc.loops.terms import Load, Reduced, walk

ITEM_WORK = 16384  # element operations that make one parallel item worth its cost
CHUNK = 4096  # elements of the vector loop in one item, where that loop is the only one
MANY_ITEMS = 16  # parallel items enough for the threads of a machine
LINES = 4  # rows of windows that go through lines together


class NestEmitter(PhaseEmitter):
    """One loop nest as the body of a kernel function."""

    side = 1  # vectors of an outer vector loop that are computed side by side

    # ------------------------------------------------------------ work division

    def _rows(self, outer: list[tuple[Symbol, Dim]]) -> Dim:
        """How many turns of the outer loops there are, where one turn takes `self.side` vectors of an
        outer vector loop.
        """
        total = prod(d for _, d in outer)
        if self.outer_vector:
            assert self.vector is not None
            total = total * ceildiv(extent_of(self.nest, self.vector), self.lanes * self.side)
        return total

    def _wide_enough(self) -> bool:
        """Whether an outer vector loop gives each of many items several vectors."""
        assert self.vector is not None
        extent, total = extent_of(self.nest, self.vector), prod(d for _, d in self.nest.outer)
        if isinstance(extent, int) and extent < UNROLL * self.lanes:
            return False
        return not isinstance(total, int) or total >= MANY_ITEMS * UNROLL * self.lanes

    # ------------------------------------------------------------ text

    def emit(self) -> tuple[list[str], str]:
        """The lines of the function's body (over items first..last) and the number of items."""
        nest = self.nest
        if nest.is_plain:
            return self._emit_plain()
        if self.outer_vector and self.vector is not None and not self._has_order(*nest.phases):
            way = lines_of_windows(nest, self.vector, self.lanes)
            if way is not None:
                return self._emit_lines(way, self.vector)
        outer = [(s, d) for s, d in nest.outer if s != self.vector]
        if self.across or (self.vector is not None and not self.outer_vector):
            self.caches.plan(nest)
            prefetch.fetch_for_later_phases(nest, lambda phase: bool(self.caches.computed_by(phase)))
        self.function.lines += self.caches.lines
        body = self._row_body(outer)
        total = self._rows(outer)
        work = max((self._phase_work(p) for p in nest.phases), key=_size_key, default=1)
        grain = self._grain(work * self.lanes * self.side if self.outer_vector else work)
        lines = [*self.function.lines, f"const i64 rows = {self._top(total)}, grain = {grain};",
                 "for (i64 row = first * grain; row < ox_min(last * grain, rows); row++) {",
                 *indent(body), "}"]  # fmt: skip
        return lines, f"ox_up({self._top(total)}, {grain})"

    def _emit_lines(self, way: Lines, vector: Symbol) -> tuple[list[str], str]:
        """Windows by way of lines: down the columns of a row of results, then along it. Some rows take turns, so that
        no line is read that is still on its way to the cache.
        """
        windowed, *rest = self.nest.phases
        outer = [(s, d) for s, d in self.nest.outer if s != vector]
        for s, _ in outer:
            self.emitter.name_loop(s)
        first, second = (self.function.child({s for s, _ in outer}) for _ in range(2))
        size, names = ceildiv(way.end + 1, self.lanes) * self.lanes, list[str]()
        for r in windowed.reductions:
            names.append(self.emitter.fresh("line"))
            lane = spelling.lane_type(r.body.dtype)
            self.function.lines += [
                f"alignas(64) {lane} {names[-1]}_0[{LINES} * {size}];",
                f"for (i64 i = 0; i < {LINES} * {size}; i += VL) st({names[-1]}_0 + i, {identity(r, lane)});",
            ]
            for scope in (first, second):
                scope.lines.append(f"{lane} *const {names[-1]} = {names[-1]}_0 + (row - base) * {size};")
        column, columns = way.column
        self.vector = self.emitter.vector = column
        down, x = first.child({column}), self.emitter.name_loop(column)
        self._reduce(way.phase, down)
        for r, name in zip(way.phase.reductions, names, strict=True):
            value = self.emitter.emit(Reduced(r.value.dtype, r.key), down)
            down.lines.append(f"stl({name} + {x} + {way.first}, {value}, lanes);")
        first.lines += self._vectors(x, columns, down.lines)
        self.vector = self.emitter.vector = vector
        along, x = second.child({vector}), self.emitter.name_loop(vector)
        for r, name in zip(windowed.reductions, names, strict=True):
            a = Accumulator(r, self.emitter.fresh("acc"), spelling.lane_type(r.body.dtype), False)
            self._along_line(a, way, f"{name} + {way.stride} * {x}", along)
        for phase in rest:
            self._store(phase, along)
        second.lines += self._vectors(x, extent_of(self.nest, vector), along.lines)
        total, decode = self._top(prod(d for _, d in outer)), self._decode(outer, "row")
        grain = self._grain(prod(d for _, d in windowed.loops) * columns)
        over = "for (i64 row = base; row < until; row++) {"
        lines = [*self.function.lines, f"const i64 rows = {total}, grain = {grain}, stop = ox_min(last * grain, rows);",
                 f"for (i64 base = first * grain; base < stop; base += {LINES}) {{",
                 f"  const i64 until = ox_min(base + {LINES}, stop);",
                 *(f"  {x}" for s in (first, second) for x in (over, *indent([*decode, *s.lines]), "}")), "}"]  # fmt: skip
        return lines, f"ox_up({total}, {grain})"

    def _along_line(self, a: Accumulator, way: Lines, start: str, scope: Scope) -> None:
        """A reduction over the taps along a line."""
        taps = [f"{start} + {k * way.dilation}" for k in range(way.taps)]
        taps = [f"ldl({t}, lanes)" if way.stride == 1 else f"lds({t}, {way.stride}, lanes)" for t in taps]
        scope.lines.append(f"V<{a.lane}> {a.name} = {taps[0]};")
        scope.lines += [a.combined(t) for t in taps[1:]]
        a.finish(self.emitter, scope)

    def _vectors(self, loop: str, extent: Dim, body: list[str]) -> list[str]:
        """A loop over vectors, several side by side where the body allows it."""
        at, block, end = self.emitter.fresh("at"), self.emitter.fresh("block"), self._top(extent)
        several = (
            interleave(body, loop, at, [], UNROLL)
            if isinstance(extent, int) and extent >= UNROLL * self.lanes
            else None
        )
        lines = [f"const auto {block} = [&](const i64 {loop}, auto lanes) OX_LAMBDA {{", *indent(body), "};",
                 f"i64 {at} = 0;"]  # fmt: skip
        if several:
            lines += [f"for (; {at} + {UNROLL} * VL <= {end}; {at} += {UNROLL} * VL) {{", *indent(several), "}"]
        if not self._less_than_a_vector(extent):
            lines.append(f"for (; {at} + VL <= {end}; {at} += VL) {block}({at}, Full{{}});")
        if not self._whole(extent, 1):
            lines.append(f"if ({at} < {end}) {block}({at}, Part{{(int)({end} - {at})}});")
        return lines

    def _grain(self, work: Dim) -> str:
        if isinstance(work, int):
            return str(max(1, ITEM_WORK // max(1, work)))
        return f"ox_max(1, {ITEM_WORK} / ox_max(1, {self._top(work)}))"

    def _phase_work(self, phase: Phase) -> Dim:
        extent = prod(d for _, d in phase.loops)
        together = max((len(t) for v in self.vectors for t in turns(phase.stores, v)), default=1)
        return extent * max(together, cost(phase_terms(phase, self.nest.lookups)) // 4)

    def _row_body(self, outer: list[tuple[Symbol, Dim]]) -> list[str]:
        scope = self.function.child({s for s, _ in outer})
        for s, _ in outer:
            self.emitter.name_loop(s)
        if not self.outer_vector:
            self._phases(scope)
            return [*self._decode(outer, "row"), *scope.lines]
        assert self.vector is not None
        name, extent = self.emitter.name_loop(self.vector), self._top(extent_of(self.nest, self.vector))
        inner = scope.child({self.vector})
        self._phases(inner)
        several = interleave(inner.lines, name, name, [], UNROLL) if self._wide_enough() else None
        self.side = UNROLL if several else 1
        blocks = ceildiv(extent_of(self.nest, self.vector), self.lanes * self.side)
        rest, turn = self._divided("row", blocks) if outer else ("", "row")
        lines = [f"const i64 {name}{'_0' if several else ''} = {turn} * {self.side} * VL;"]
        lines += [*self._decode(outer, rest), *scope.lines]
        lines += [
            f"const auto block = [&](const i64 {name}, auto lanes) OX_LAMBDA {{",
            *indent(inner.lines),
            "};",
        ]
        size = extent_of(self.nest, self.vector)
        rest = f"block({name}, Part{{(int)({extent} - {name})}});"
        one = f"if ({name} + VL <= {extent}) block({name}, Full{{}}); else {rest}"
        if self._whole(size, 1):
            one = f"block({name}, Full{{}});"
        elif self._less_than_a_vector(size):
            one = rest
        if not several:
            return [*lines, one]
        turns = [f"const i64 {name} = {name}_0;", "{", *indent(several), "}"]
        if self._whole(size, UNROLL):
            return [*lines, *turns]
        ends = f"ox_min({name}_0 + {UNROLL} * VL, {extent})"
        return [*lines, f"if ({name}_0 + {UNROLL} * VL <= {extent}) {{", *indent(turns),
                f"}} else for (i64 {name} = {name}_0, end = {ends}; {name} < end; {name} += VL) {{",
                f"  {one}", "}"]  # fmt: skip

    def _decode(self, outer: list[tuple[Symbol, Dim]], rest: str) -> list[str]:
        """Definitions of loop variables from the number of a turn."""
        lines = []
        for k, (s, d) in reversed(list(enumerate(outer))):
            rest, here = self._divided(rest, d) if k else ("", rest)
            lines.append(f"const i64 {self.emitter.names[s]} = {here};")
        return lines

    def _divided(self, number: str, d: Dim) -> tuple[str, str]:
        """Quotient and rest of a number that is not negative. A size that is known at run time alone becomes a factor
        first: to divide by it takes as long as to compute dozens of elements.
        """
        size = self._top(d)
        if isinstance(d, int):
            return f"({number} / {size})", f"{number} % {size}"
        if size not in self.divisors:
            self.divisors[size] = self.emitter.fresh("by")
            self.function.lines.append(f"const ox_divisor {self.divisors[size]}({size});")
        by = self.divisors[size]
        return f"{by}.quotient({number})", f"{by}.rest({number})"

    # ------------------------------------------------------------ plain loops (no reduction)

    def _emit_plain(self) -> tuple[list[str], str]:
        """Sections without reductions: items are points of the non-vector loops times chunks of the
        vector loop.
        """
        lines: list[str] = []
        counts: list[str] = []
        start = "0"
        for phase in self.nest.phases:
            text, items = self._plain_phase(phase)
            first, last = f"ox_max(first - ({start}), 0)", f"ox_min(last - ({start}), {items})"
            lines += [f"for (i64 item = {first}, end = {last}; item < end; item++) {{", *indent(text), "}"]
            counts.append(items)
            start = " + ".join(counts)
        return [*self.function.lines, *lines], start

    def _plain_phase(self, phase: Phase) -> tuple[list[str], str]:
        vector = self._phase_vector(phase)
        previous, self.emitter.vector = self.emitter.vector, vector
        found = self._row_phase(phase, vector)
        self.emitter.vector = previous
        self.emitter.tables = {}
        return found

    def _row_phase(self, phase: Phase, vector: Symbol | None) -> tuple[list[str], str]:
        """Items are rows: points of the other loops than the vector loop, of which they take chunks where it is long."""
        staged = self._tiling(phase)
        loops = [(s, self._blocks(d) if staged and s == staged.partner else d) for s, d in phase.loops if s != vector]
        extent: Dim = dict(phase.loops)[vector] if vector is not None else 1
        chunked = vector is not None and not (isinstance(extent, int) and extent <= 2 * CHUNK)
        chunks = ceildiv(extent, CHUNK) if chunked else 0 if extent == 0 else 1  # no items: not even an index is read
        per_row = self._phase_work(Phase([], [], phase.stores)) * (CHUNK if chunked else extent)
        grain = self._grain(per_row * self.lanes if staged else per_row)  # a staged row is as many rows
        scope = self.function.child({s for s, _ in loops})
        head, outer = list[str](), list[tuple[Symbol, Dim]]()
        if vector is not None and staged is None:
            if isinstance(extent, int) and loops and not chunked:
                head, outer = self._tables(phase, vector, extent, loops, scope)
            if not head and (shared := gathered.shared(self.emitter, phase, vector)) is not None:
                return self._gathered_phase(phase, vector, shared)
        grain = f"ox_max({grain}, {ROWS})" if head else grain
        total = prod(d for _, d in loops)
        rows = self._top(total * chunks)
        lo, hi, rest = "0", self._top(extent), "row"
        if chunked:
            chunk, rest = self._chunk(phase, loops, chunks, total)
            scope.lines.append(f"const i64 lo = {chunk} * {CHUNK}, hi = ox_min(lo + {CHUNK}, {hi});")
            lo, hi = "lo", "hi"
        self._decode_row(loops, rest, staged, scope)
        self._innermost(phase, scope, vector, lo, hi, [], staged)
        inner = self._top(prod(d for _, d in loops[len(outer) :]))
        text = self._over_rows(scope.lines, head, outer, inner)
        return [f"const i64 rows = {rows}, grain = {grain};", *text], f"ox_up({rows}, {grain})"

    def _chunk(self, phase: Phase, loops: list[tuple[Symbol, Dim]], chunks: Dim, total: Dim) -> tuple[str, str]:
        """Which chunk of the vector loop an item takes, and what remains of its number."""
        if not loops:
            return "row", "row"
        if self._shares_lines(phase):  # what lies between its lanes is read by the rows that follow
            return self._divided("row", total)
        rest, chunk = self._divided("row", chunks)
        return chunk, rest

    def _decode_row(self, loops: list[tuple[Symbol, Dim]], rest: str, staged: Staging | None, scope: Scope) -> None:
        """Defines loop variables from what remains of an item's number; one that is staged is a block of its loop."""
        for k, (s, d) in reversed(list(enumerate(loops))):
            name = self.emitter.name_loop(s)
            rest, value = self._divided(rest, d) if k else ("", rest)
            block = staged is not None and s == staged.partner
            scope.lines.append(f"const i64 {name}_0 = {value} * VL;" if block else f"const i64 {name} = {value};")
        if staged:
            scope.available.discard(staged.partner)

    def _over_rows(self, body: list[str], head: list[str], outer: list[tuple[Symbol, Dim]], inner: str) -> list[str]:
        """The loop over an item's rows, behind the statements that make tables for them; these are made anew where the
        outer loops move on, which is after so many inner rows.
        """
        first, last = "i64 row = item * grain", "ox_min((item + 1) * grain, rows)"
        if not outer:
            return [*head, f"for ({first}; row < {last}; row++) {{", *indent(body), "}"]
        return [f"for ({first}, stop = {last}; row < stop;) {{", *indent([
            f"const i64 next = ox_min((row / {inner} + 1) * {inner}, stop);",
            *self._decode(self._named(outer), f"(row / {inner})"), *head,
            "for (; row < next; row++) {", *indent(body), "}",
        ]), "}"]  # fmt: skip

    def _tables(
        self, phase: Phase, vector: Symbol, extent: int, loops: list[tuple[Symbol, Dim]], scope: Scope
    ) -> tuple[list[str], list[tuple[Symbol, Dim]]]:
        """The statements that make tables for the rows of `scope`, and the loops around them; both may be empty."""
        found = [
            (
                outer,
                tables.terms(self.emitter, phase, vector, outer),
                tables.indices(self.emitter, phase, vector, outer),
            )
            for outer in tables.around(loops)
        ]
        for outer, computed, data in sorted(found, key=lambda f: -len(f[1]) - len(f[2])):
            around = self._named(loops[: len(outer)])
            outside = self.function.child(set(outer))
            head = tables.fill(self.emitter, computed, data, vector, extent, (outside, scope), self.lanes)
            if head:
                return [*outside.lines, *head], around
        return [], []

    def _shares_lines(self, phase: Phase) -> bool:
        """Whether lanes of a load lie apart, so that other rows read the same lines of the cache."""
        loads = {t for s in phase.stores for t in walk(s.term) if isinstance(t, Load)}
        strides = [self.emitter.stride(t.index[0]) for t in loads]
        return any(isinstance(step, int) and abs(step) > 1 for step in strides)

    def _gathered_phase(self, phase: Phase, vector: Symbol, shared: gathered.Shared) -> tuple[list[str], str]:
        """Items are pieces of the vector loop, at each point of the outer loops; where these are few, the rows that
        share what a piece is read at are divided, too.
        """
        extent, width = self._top(dict(phase.loops)[vector]), shared.width
        count, inner = (self._top(prod(d for _, d in loops)) for loops in (shared.outer, shared.inner))
        blocks = f"({count} * ox_up({extent}, {width}))"
        parts = f"ox_min({inner}, ox_up({MANY_ITEMS}, ox_max(1, {blocks})))"
        work = self._phase_work(Phase([], [], phase.stores)) * width
        grain = self._grain(work * prod(d for _, d in shared.inner))
        scope = self.function.child({s for s, _ in shared.outer})
        row = scope.child({s for s, _ in shared.inner})
        place = self._decode(self._named(shared.outer), f"(block / ox_up({extent}, {width}))")
        fill = gathered.fill(self.emitter, shared, vector, scope)
        decode = self._decode(self._named(shared.inner), "row")
        self._innermost(phase, row, vector, "lo", "hi", [])
        self.emitter.tables, self.emitter.places = {}, {}
        turn = [
            "const i64 block = turn / parts, part = turn % parts;",
            f"const i64 lo = block % ox_up({extent}, {width}) * {width}, hi = ox_min(lo + {width}, {extent});",
            *place, *scope.lines, *fill,
            f"for (i64 row = {inner} * part / parts; row < {inner} * (part + 1) / parts; row++) {{",
            *indent([*decode, *row.lines]), "}",
        ]  # fmt: skip
        return [
            f"const i64 parts = {parts}, turns = {blocks} * parts, grain = {grain};",
            "for (i64 turn = item * grain; turn < ox_min((item + 1) * grain, turns); turn++) {", *indent(turn), "}",
        ], f"ox_up({blocks} * {parts}, {grain})"  # fmt: skip

    def _named(self, loops: list[tuple[Symbol, Dim]]) -> list[tuple[Symbol, Dim]]:
        for s, _ in loops:
            self.emitter.name_loop(s)
        return loops


def _size_key(d: Dim) -> int:
    return d if isinstance(d, int) else 1 << 30
