"""Emits one kernel for all steps of a loop whose states are multiplied by constant matrices: LSTM, GRU, RNN.

Each step has programs of its own, in the order of steps. A program computes some rows and columns of the states. It
reads its columns of the matrices, and whatever else is known from the start; then it waits for the states of the step
before, whole rows of them, and so for programs of lower numbers alone. GPUs start programs in the order of their
numbers, so whatever is waited for has begun, and those of the next step have their matrices in registers by the time
that this one ends.

States are handed on in words of memory, as in `relay.py`: zero before, each written once, as a number with some bits
turned so that none is zero. A program reads what it needs again and again until there is no zero in it. Nothing is
written twice: each step has words of its own.

The columns of a product that meet in one element of a state (the gates of an LSTM) are neighbours in the matrix that a
program multiplies by, so that a thread has their sums side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxc.codegen.triton import spelling
from onnxc.codegen.triton.epilogue import symbol
from onnxc.codegen.triton.kernel import Kernel, indent, is_wide, narrow, power
from onnxc.codegen.triton.options import Options
from onnxc.codegen.triton.recurrence_alone import Alone, alone_candidates, emit_alone
from onnxc.codegen.triton.recurrence_steps import (
    StageTerms,
    Steps,
    Sums,
    gates_of,
    is_exact,
    products_of,
    same_loops,
    width_of,
)
from onnxc.codegen.triton.relay import WORDS
from onnxc.codegen.triton.terms import Buffers, Packed, Scope, TermEmitter
from onnxc.ir.expr import ceildiv, minimum, prod, substitute
from onnxc.ir.graph import Value
from onnxc.ir.types import TensorType
from onnxc.loops.terms import Load, Term
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.planner.recurrence import MOST_READ, Stage

LEAST_DEPTH = 16  # elements of a sum that a product takes at least
LEAST_COLUMNS = 8  # of a matrix that a program multiplies by
PARTS = 4  # that sums are made in at most, where that is measured: the time that Triton takes grows with their number


@dataclass(frozen=True)
class Wave:
    """How a step is laid over programs.

    Attributes:
        rows: of the states, in a program.
        units: columns of the states.
        warps: of a program.
        depth: elements of a sum that are multiplied at once.
        plain: whether the products of float32 are added up as any sums are, rather than by Triton's `dot`: for few
            rows.
        only: as of `Alone`.
    """

    rows: int
    units: int
    warps: int = 4
    depth: int = 128
    plain: int = 0
    only: int | None = None


def recurrence_candidates(group: Group, options: Options) -> list[Wave | Alone]:
    """Choices that are worth measuring, the one that the cost model takes first. It is a table of what an H200 takes
    for LSTMs of 1, 8 and 64 rows and 64 to 1024 columns.
    """
    assert group.recurrence is not None
    products = products_of(group.recurrence)
    depths = [k for p in products if isinstance(k := p.access.sizes[2], int)]
    m, k, gates = products[0].access.sizes[0], power(max(depths)), gates_of(group.recurrence)
    rows = m if isinstance(m, int) else 16
    shapes = _exact(rows, k) if is_exact(group.recurrence, options) else _units(rows, k)
    widest = power(width_of(group))

    def fitted(wave: Wave) -> Wave:
        units = max(1, wave.units * 4 // gates, -(-LEAST_COLUMNS // gates))
        depth = max(LEAST_DEPTH, min(k, wave.depth))
        return replace(wave, units=min(units, max(widest, -(-LEAST_COLUMNS // gates))), depth=depth)

    first, others = alone_candidates(group, options)
    return [*first, *dict.fromkeys(map(fitted, shapes)), *others]


def _units(rows: int, k: int) -> list[Wave]:
    """For the matrix units, whose tiles have sixteen rows; of four gates."""
    depth = max(128, k // PARTS)
    wide = Wave(16, 16, 4, depth)
    narrow = Wave(16, 8, 2, depth)
    first = [wide, narrow] if (k > 256 if rows <= 16 else k <= 512) else [narrow, wide]
    return [*first, Wave(16, 8, 4, depth), Wave(32, 8, 4, depth), Wave(16, 4, 2, depth), Wave(16, 2, 1, depth)]


def _exact(rows: int, k: int) -> list[Wave]:
    """For float32; of four gates."""
    high = 16 if rows > 16 and k > 256 else 8
    dots = [Wave(high, 8, 4 if k > 512 or high > 8 else 2, 128 if k > 512 and high == 8 else 64), Wave(8, 8, 4, 64)]
    plain = [Wave(1, 8 if k <= 512 else 4, 4, 128, 1)] if rows == 1 else [Wave(4, 8, 4, 128, 1)]
    order = [*plain, *dots] if rows == 1 or (rows <= 4 and k <= 128) else [*dots, *plain]
    return [*order, Wave(8, 4, 2, 64), Wave(8, 2, 1, 64)]


def emit_recurrence(group: Group, layout: Layout, options: Options, choice: Wave | Alone | None) -> Kernel:
    """The kernel of a loop."""
    choice = choice or next(c for c in recurrence_candidates(group, options) if c.only is None)
    kernel = (
        emit_alone(group, layout, options, choice)
        if isinstance(choice, Alone)
        else _Writer(group, layout, options, choice).kernel()
    )
    assert group.recurrence is not None
    return replace(kernel, when=1 - group.recurrence.stepwise)


@dataclass
class _Word:
    """Words that are waited for: the tile that they become, where they lie, which of them count, and their type."""

    name: str
    place: str
    mask: str
    kind: str  # Triton's dtype of the numbers

    def load(self, how: str) -> str:
        """Reads them."""
        masked = f", mask={self.mask}, other=ox_turned({self.kind})" if self.mask else ""
        return f"tl.load({self.name}_at{masked}, {how})"


class _Writer(Steps):
    """The kernel being written."""

    def __init__(self, group: Group, layout: Layout, options: Options, wave: Wave) -> None:
        super().__init__(group, layout, options)
        self.wave = wave
        self.kept = {v.id: self._words(v) for v in (*self.states, *self.it.handed)}
        words = {v.id: Value(TensorType(WORDS[v.dtype.bits], v.shape)) for v in self.kept.values()}
        values = [*words.values(), *self.node.operands, *self.results]
        self.buffers = Buffers(words=words)
        self.blocks = ceildiv(self.rows, wave.rows)
        self.beside = self._beside()
        parts = ceildiv(self.width, wave.units) * prod(d for _, d in self.access.batch)
        self.programs = minimum(self.blocks, self.beside) * parts if self.beside else self.blocks * parts
        most = self.it.most
        programs = self.programs if most is None else ceildiv(most, wave.rows) * parts
        self.wide = is_wide(values, programs, rows=(self.rows, most))
        self.lanes = self.tile(self.buffers, (wave.rows, wave.units), 0)

    def _words(self, v: Value) -> Value:
        """The words of a value that is handed on, of all steps; those of a state begin with what it is at first."""
        steps = self.trip + 1 if v in self.states else self.trip
        return Value(TensorType(v.dtype, (steps, *v.shape)))

    def _beside(self) -> int:
        """How many blocks of rows have programs of their own, each of which reads the matrices: the others follow in
        the same programs. 0 for all of them, where they are few: that is known, or kernels for each step are there for
        more. (A program that has one block keeps no matrix for the next: a GRU of 512 units in float32 then has
        registers enough.)
        """
        if isinstance(self.rows, int) or self.it.stepwise != 0:
            return 0
        nbytes: int = sum(p.constant.size * p.node.output.dtype.itemsize for p in products_of(self.it))
        return max(1, MOST_READ // nbytes)

    # ------------------------------------------------------------ programs

    def kernel(self) -> Kernel:
        """The kernel."""
        kind = ".to(tl.int64)" if self.wide else ""
        units = self.wave.units
        index = self.lanes.index
        number, each = narrow("pid", self.wide), narrow(index(self.programs), self.wide)
        lines = [f"step = {number} // {each}", f"rest = {number} % {each}"]
        beside = minimum(self.blocks, self.beside) if self.beside else self.blocks
        for name, size in (("part", ceildiv(self.width, units)), ("row", beside)):
            count = narrow(index(size), self.wide)
            lines += [f"{name} = (rest % {count}){kind}", f"rest = rest // {count}"]
        lines.append(f"lead = rest{kind}")
        lines += self.lanes.heads(self.access.batch)
        lines += [f"u = (part * {units} + tl.arange(0, {units}){kind})[None, :]", f"um = u < {self.width}"]
        stages = self.it.stages
        lines += ["if step == 0:", *indent(self._over_rows(self._first())), "else:"]
        inner = [f"t = ((step - 1) // {len(stages)}){kind}"]
        for k, stage in enumerate(stages):
            matrices, rest = _StageWriter(self, stage).lines()
            own = [*matrices, *self._over_rows(rest)]
            inner += [f"if (step - 1) % {len(stages)} == {k}:", *indent(own)] if len(stages) > 1 else own
        lines += indent(inner)
        programs = self.programs * (1 + self.trip * len(stages))
        cleared = tuple(self.buffers.words.values())
        return Kernel(lines, self.buffers, programs, self.wave.warps, 1, "recurrence", self.wide, cleared=cleared)

    def _over_rows(self, lines: list[str]) -> list[str]:
        """These lines for the rows of a program, a block after the other."""
        kind, rows, index = ".to(tl.int64)" if self.wide else "", self.wave.rows, self.lanes.index
        found = [f"m = (row * {rows} + tl.arange(0, {rows}){kind})[:, None]", f"mm = m < {index(self.rows)}", *lines]
        if not self.beside:
            return found
        found[0] = found[0].replace("row", "block", 1)
        return [f"for block in range(row, {index(self.blocks)}, {self.beside}):", *indent(found)]

    def emitter(self) -> TermEmitter:
        """For terms of a tile of the states."""
        found = self.lanes.emitter()
        found.wide = self.wide
        found.result_symbols = frozenset(self.lanes.variables)
        return found

    def _first(self) -> list[str]:
        """The states before the first step; they are the last ones, too, where there are no steps."""
        emitter, scope = self.emitter(), self.lanes.scope()
        for state, x, y in zip(self.states, self.node.operands, self.results, strict=False):
            at = self.layout.address(state, self.at)
            term = Load(state.dtype, x, (at,))
            emitter.store(self.kept[state.id], at, term, scope)
            if not (isinstance(self.trip, int) and self.trip > 0):
                inner = Scope(scope, set())
                emitter.store(y, at, term, inner)
                scope.lines += [f"if {self.lanes.index(self.trip)} == 0:", *indent(inner.lines)]
        return scope.lines


class _StageWriter:
    """A stage of a step: what its programs do."""

    def __init__(self, kernel: _Writer, stage: Stage) -> None:
        self.kernel = kernel
        self.of = StageTerms(kernel, stage, frozenset(kernel.kept))
        self.sums = self.of.sums
        self.buffers = kernel.buffers
        self.emitter, self.scope = kernel.emitter(), kernel.lanes.scope()

    def lines(self) -> tuple[list[str], list[str]]:
        """The statements that read matrices, and all others."""
        weights = [self._matrix(s) for s in self.sums]
        matrices, self.scope.lines = self.scope.lines, []
        self.of.read_early(self.emitter, self.scope)
        rows = [self._left(s) for s in self.sums]
        self._wait(self._here())
        for part in rows:
            self._wait([w for w in part if isinstance(w, _Word)])
        for s, names, part in zip(self.sums, weights, rows, strict=True):
            self._product(s, names, [w.name if isinstance(w, _Word) else w for w in part])
        for root in self.of.stage.roots:
            self._store(root, self.of.terms[root.id])
        return matrices, self.scope.lines

    # ------------------------------------------------------------ what is handed on

    def _slot(self) -> str:
        """Where the words of a step begin."""
        return f"t * {self.kernel.lanes.index(self.kernel.size)}"

    def _pointer(self, v: Value) -> str:
        return self.buffers.pointer(self.buffers.words[self.kernel.kept[v.id].id])

    def _here(self) -> list[_Word]:
        """What is read at the places of the tile."""
        own, found = self.kernel, []
        mask = " & ".join(x.mask for x in own.lanes.variables.values() if x.mask)
        for v in self.of.needed.values():
            at = own.lanes.index(own.layout.address(v, own.at))
            place = f"{self._pointer(v)} + {self._slot()} + {at} + tl.zeros({own.lanes.shape}, tl.int32)"
            found.append(_Word(self.buffers.fresh("s"), place, mask, spelling.stored(v.dtype)))
            self.emitter.results[v.id] = spelling.widened(found[-1].name, v.dtype)
        return found

    def _wait(self, words: Sequence[_Word]) -> None:
        """Reads words in tiles of one shape, once all have been written. (Triton 3.6 cannot keep what the last turn of
        a wait has read. One wait for the tile's own places and for rows takes longer: 142 us in place of 117, for 64
        steps of 8 rows and 128 units. Few words are read again sooner, and by then the others are there.)
        """
        if not words:
            return
        tests = " | ".join(f"({w.load('volatile=True')} == 0)" for w in words)
        again = f"missing = ox_unwritten({tests})"
        cached = "cache_modifier='.cg'"
        self.scope.lines += [
            *(f"{w.name}_at = {w.place}" for w in words), again, "while missing != 0:", *indent([again]),
            "tl.debug_barrier()", *(f"{w.name} = ox_taken({w.load(cached)}, {w.kind})" for w in words),
        ]  # fmt: skip

    # ------------------------------------------------------------ products

    def _chunks(self, s: Sums) -> int:
        return -(-s.length // self.kernel.wave.depth)

    def _matrix(self, s: Sums) -> list[str]:
        """Reads the columns of a product's matrix."""
        own, wave = self.kernel, self.kernel.wave
        depth, across = wave.depth, wave.units * s.each
        length = self._chunks(s) * depth
        packed = self._packed(s, length)
        at = f"{self.buffers.pointer(packed)} + (lead * {-(-own.width // wave.units)} + part) * {length * across}"
        names = []
        for j in range(self._chunks(s)):
            name = self.buffers.fresh("w")
            place = f"({j * depth} + tl.arange(0, {depth}))[:, None] * {across} + tl.arange(0, {across})[None, :]"
            self.scope.lines.append(f"{name} = tl.load({at} + {place})")
            names.append(name)
        return names

    def _packed(self, s: Sums, length: int) -> Packed:
        """The matrix in the order in which programs read it: for each a block of whole sums by its columns."""
        own, units = self.kernel, self.kernel.wave.units
        parts = -(-own.width // units)
        lead = prod(d for _, d in s.product.access.batch)
        dtype, width, each = s.product.node.output.dtype, own.width, s.each

        def write(out: np.ndarray) -> None:
            blocks = out.view(dtype.numpy).reshape(lead, parts, length, units, each)
            blocks[...] = 0
            found = s.matrices(width)
            for part in range(parts):
                mine = found[:, :, part * units : (part + 1) * units]
                blocks[:, part, : s.length, : mine.shape[2], : mine.shape[3]] = mine

        key = ("recurrence", s.product.node.output.id, tuple(s.offsets), units, length)
        return Packed(key, TensorType(dtype, (lead, parts, length, units, each)), write)

    def _product(self, s: Sums, weights: list[str], rows: list[str]) -> None:
        """Multiplies."""
        own, lines, wave = self.kernel, self.scope.lines, self.kernel.wave
        p = s.product
        accs: list[str] = []
        dot = own.options.of_dot(p.node.output.dtype)
        plain = wave.plain and is_exact(own.it, own.options)
        zero = f"tl.zeros(({wave.rows}, {wave.units * s.each}), tl.float32)"
        for j, (a, b) in enumerate(zip(rows, weights, strict=True)):
            if j < 2:
                accs.append(self.buffers.fresh("acc"))
                lines.append(f"{accs[j]} = {zero}")
            acc = accs[j % 2]
            if plain:
                lines.append(f"{acc} += tl.sum({a}[:, :, None] * {b}[None, :, :], 1)")
            else:
                lines.append(f"{acc} = tl.dot({a}, {b}, {acc}{dot})")
        acc = self.buffers.fresh("acc")
        lines.append(f"{acc} = {' + '.join(accs)}")
        if p.node.output.dtype.name != "float32":  # as it would be stored
            lines.append(f"{acc} = {acc}.to({spelling.stored(p.node.output.dtype)}).to(tl.float32)")
        for v, name in zip(s.results, self._apart(acc, s.each), strict=False):
            self.emitter.results[v.id] = name

    def _left(self, s: Sums) -> list[_Word | str]:
        """The rows of a product in parts: what is waited for, or names of what is in memory."""
        own, p, depth = self.kernel, s.product, self.kernel.wave.depth
        a, kind = p.access.a, spelling.stored(p.node.output.dtype)
        same = same_loops(own, p)
        value = next((v for v in (*own.states, *own.it.handed) if v.id == a.value.id), None)
        if value is not None:
            start = f"{self._pointer(value)} + {self._slot()}"
        else:
            start = self.buffers.pointer(own.it.outside.get(a.value.id, a.value))
            start += f" + t * {own.lanes.index(a.value.t.size)}" if a.value.id in own.slices else ""
        base, row, col = (own.lanes.index(substitute(x, same)) for x in (a.base, a.row, a.col))
        found: list[_Word | str] = []
        for j in range(self._chunks(s)):
            along = f"({j * depth} + tl.arange(0, {depth}))[None, :]"
            tests = ["mm"] if own.lanes.variables[symbol(own.access.m)].mask else []
            tests += [f"({along} < {s.length})"] if (j + 1) * depth > s.length else []
            word = _Word(
                self.buffers.fresh("a"), f"{start} + {base} + m * {row} + {along} * {col}", " & ".join(tests), kind
            )
            if value is None:
                masked = f", mask={word.mask}, other=0.0" if word.mask else ""
                self.scope.lines.append(f"{word.name} = tl.load({word.place}{masked})")
            found.append(word if value is not None else word.name)
        return found

    def _apart(self, name: str, count: int) -> list[str]:
        """The neighbouring columns of sums, each for itself."""
        rows, units = self.kernel.wave.rows, self.kernel.wave.units
        if count == 1:
            return [name]
        shape = ", ".join("2" for _ in range(count.bit_length() - 1))
        whole = self.buffers.fresh("v")
        self.scope.lines.append(f"{whole} = tl.reshape({name}, ({rows}, {units}, {shape}))")

        def halves(x: str, n: int) -> list[str]:
            if n == 1:
                return [x]
            even, odd = self.buffers.fresh("v"), self.buffers.fresh("v")
            self.scope.lines.append(f"{even}, {odd} = tl.split({x})")
            return [y for pair in zip(halves(even, n // 2), halves(odd, n // 2), strict=True) for y in pair]

        return halves(whole, count)

    # ------------------------------------------------------------ results

    def _store(self, root: Value, term: Term) -> None:
        """Hands on what has been made, and writes results of the loop."""
        own = self.kernel
        at = own.layout.address(root, own.at)
        ends = own.ends
        for state, after in zip(own.states, ends[: own.count], strict=True):
            if after is root:
                self.emitter.store(own.kept[state.id], (own.t + 1) * own.size + at, term, self.scope)
        if root.id in own.kept and root not in own.states:
            self.emitter.store(own.kept[root.id], own.t * own.size + at, term, self.scope)
        for y, after in zip(own.results[own.count :], ends[own.count :], strict=True):
            if after is root:
                self.emitter.store(y, own.t * own.size + at, term, self.scope)
        last = Scope(self.scope, set())
        for y, after in zip(own.results[: own.count], ends[: own.count], strict=True):
            if after is root:
                self.emitter.store(y, at, term, last)
        if last.lines:
            self.scope.lines += [f"if t == {own.lanes.index(own.trip - 1)}:", *indent(last.lines)]
