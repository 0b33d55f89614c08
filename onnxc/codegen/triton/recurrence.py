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
from dataclasses import dataclass, field, replace

import numpy as np

from onnxc.codegen.cpp.epilogue import mapping, substitute_indices
from onnxc.codegen.triton import spelling
from onnxc.codegen.triton.epilogue import Tile, symbol
from onnxc.codegen.triton.kernel import Kernel, indent, is_wide, power
from onnxc.codegen.triton.options import Options
from onnxc.codegen.triton.relay import WORDS
from onnxc.codegen.triton.terms import Buffers, Packed, Scope, TermEmitter, TileVariable
from onnxc.ir.expr import Dim, Symbol, ceildiv, prod, substitute
from onnxc.ir.expr import of as alone
from onnxc.ir.graph import Value
from onnxc.ir.types import TensorType
from onnxc.loops.access import fresh
from onnxc.loops.terms import Apply, Guard, Load, Result, Term
from onnxc.planner.groups import Group
from onnxc.planner.lower import Lowering
from onnxc.planner.recurrence import Product, Recurrence, Stage

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
    """

    rows: int
    units: int
    warps: int = 4
    depth: int = 128
    plain: int = 0


def recurrence_candidates(group: Group, options: Options) -> list[Wave]:
    """Choices that are worth measuring, the one that the cost model takes first. It is a table of what an H200 takes
    for LSTMs of 1, 8 and 64 rows and 64 to 1024 columns.
    """
    assert group.recurrence is not None
    products = _products(group.recurrence)
    depths = [k for p in products if isinstance(k := p.access.sizes[2], int)]
    m, k, gates = products[0].access.sizes[0], power(max(depths)), _gates(group.recurrence)
    rows = m if isinstance(m, int) else 16
    exact = products[0].node.output.dtype.name == "float32" and options.dot == "ieee"
    shapes = _exact(rows, k) if exact else _units(rows, k)
    widest = power(_width(group))

    def fitted(wave: Wave) -> Wave:
        units = max(1, wave.units * 4 // gates, -(-LEAST_COLUMNS // gates))
        depth = max(LEAST_DEPTH, min(k, wave.depth))
        return replace(wave, units=min(units, max(widest, -(-LEAST_COLUMNS // gates))), depth=depth)

    return list(dict.fromkeys(map(fitted, shapes)))


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


def _products(it: Recurrence) -> list[Product]:
    return [p for s in it.stages for p in s.products]


def _width(group: Group) -> int:
    """Columns of a state."""
    assert group.node is not None
    width = group.node.outputs[0].shape[-1]
    assert isinstance(width, int)
    return width


def _gates(it: Recurrence) -> int:
    """The most columns of a product that meet in an element of a state, as a power of two."""
    found = 1
    for stage in it.stages:
        places = _places(stage, it)
        found = max([found, *(power(len(offsets)) for offsets in places.values())])
    return found


def _places(stage: Stage, it: Recurrence) -> dict[int, list[int]]:
    """Where in its columns a product is read, by the id of its result: how far behind an element's own column."""
    found: dict[int, set[int]] = {p.node.output.id: set() for p in stage.products}
    for load in stage.loads:
        if load.value.id in found:
            off = load.index[0] - it.layout.address(load.value, stage.section.index)
            assert isinstance(off, int)
            found[load.value.id].add(off)
    return {vid: sorted(offsets) for vid, offsets in found.items()}


def emit_recurrence(group: Group, options: Options, choice: Wave | None) -> Kernel:
    """The kernel of a loop."""
    return _Writer(group, options, choice or recurrence_candidates(group, options)[0]).kernel()


@dataclass
class _Sums:
    """The results of a product, by how far behind an element's own column they are."""

    product: Product
    offsets: list[int]
    results: list[Value] = field(default_factory=list)

    @property
    def each(self) -> int:
        """Columns of the matrix for each column of a state."""
        return power(len(self.offsets))

    @property
    def length(self) -> int:
        """Elements of a sum."""
        k = self.product.access.sizes[2]
        assert isinstance(k, int)
        return k


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


class _Writer:
    """The kernel being written."""

    def __init__(self, group: Group, options: Options, wave: Wave) -> None:
        node, it = group.node, group.recurrence
        assert node is not None and it is not None
        self.node, self.it, self.options, self.wave = node, it, options, wave
        self.layout = it.layout
        self.region = node.regions[0]
        self.trip, self.count = node.attrs["trip"], node.attrs["states"]
        self.states = self.region.inputs[: self.count]
        self.slices = {v.id for v in self.region.inputs[self.count : self.count + node.attrs["scanned"]]}
        self.shape = self.states[0].shape
        self.size = prod(self.shape)
        first = _products(it)[0].access
        self.access, self.rows, self.width = first, first.sizes[0], _width(group)
        self.t, self.unit = fresh("t", self.trip), fresh("u", self.width)
        self.at = tuple(0 if d == 1 else x for d, x in zip(self.shape, (*first.index[:-1], self.unit), strict=True))
        handed = [*self.states, *it.handed]
        self.kept = {v.id: self._words(v) for v in handed}
        words = {v.id: Value(TensorType(WORDS[v.dtype.bits], v.shape)) for v in self.kept.values()}
        values = [*words.values(), *node.operands, *node.outputs]
        self.buffers = Buffers(words=words)
        self.programs = self._programs()
        self.wide = is_wide(values, self.programs)
        self.tile = self._tile()

    def _words(self, v: Value) -> Value:
        """The words of a value that is handed on, of all steps; those of a state begin with what it is at first."""
        steps = self.trip + 1 if v in self.states else self.trip
        return Value(TensorType(v.dtype, (steps, *v.shape)))

    def _programs(self) -> Dim:
        """Of a stage of a step."""
        blocks = ceildiv(self.rows, self.wave.rows) * ceildiv(self.width, self.wave.units)
        return blocks * prod(d for _, d in self.access.batch)

    def _tile(self) -> Tile:
        tile = Tile((self.wave.rows, self.wave.units), self.buffers)
        for k, (name, size, lanes, s) in enumerate(
            (("m", self.rows, self.wave.rows, self.access.m), ("u", self.width, self.wave.units, self.unit))
        ):
            whole = isinstance(size, int) and size % lanes == 0
            known = size if isinstance(size, int) else None
            tile.lane(symbol(s), TileVariable(name, k, lanes, None if whole else f"{name}m", known))
        tile.scalar(symbol(self.t), "t")
        return tile

    # ------------------------------------------------------------ programs

    def kernel(self) -> Kernel:
        """The kernel."""
        kind = ".to(tl.int64)" if self.wide else ""
        rows, units = self.wave.rows, self.wave.units
        each, index = self.tile.index(self.programs), self.tile.index
        lines = [f"step = pid // {each}", f"rest = pid % {each}"]
        for name, size, lanes in (("part", self.width, units), ("row", self.rows, rows)):
            count = index(ceildiv(size, lanes))
            lines += [f"{name} = rest % {count}", f"rest = rest // {count}"]
        lines.append("lead = rest")
        lines += self.tile.heads(self.access.batch)
        lines += [f"m = (row * {rows} + tl.arange(0, {rows}){kind})[:, None]", f"mm = m < {index(self.rows)}"]
        lines += [f"u = (part * {units} + tl.arange(0, {units}){kind})[None, :]", f"um = u < {self.width}"]
        stages = self.it.stages
        lines += ["if step == 0:", *indent(self._first()), "else:"]
        inner = [f"t = (step - 1) // {len(stages)}"]
        for k, stage in enumerate(stages):
            own = _StageWriter(self, stage).lines()
            inner += [f"if (step - 1) % {len(stages)} == {k}:", *indent(own)] if len(stages) > 1 else own
        lines += indent(inner)
        programs = self.programs * (1 + self.trip * len(stages))
        cleared = tuple(self.buffers.words.values())
        return Kernel(lines, self.buffers, programs, self.wave.warps, 1, "recurrence", self.wide, cleared=cleared)

    def emitter(self) -> TermEmitter:
        """For terms of a tile of the states."""
        found = self.tile.emitter()
        found.wide = self.wide
        found.result_symbols = frozenset(self.tile.variables)
        return found

    def _first(self) -> list[str]:
        """The states before the first step; they are the last ones, too, where there are no steps."""
        emitter, scope = self.emitter(), self.tile.scope()
        for state, x, y in zip(self.states, self.node.operands, self.node.outputs, strict=False):
            at = self.layout.address(state, self.at)
            term = Load(state.dtype, x, (at,))
            emitter.store(self.kept[state.id], at, term, scope)
            if not (isinstance(self.trip, int) and self.trip > 0):
                inner = Scope(scope, set())
                emitter.store(y, at, term, inner)
                scope.lines += [f"if {self.tile.index(self.trip)} == 0:", *indent(inner.lines)]
        return scope.lines


class _StageWriter:
    """A stage of a step: what its programs do."""

    def __init__(self, kernel: _Writer, stage: Stage) -> None:
        self.kernel, self.stage = kernel, stage
        self.sums = [
            _Sums(p, offsets, [Value(TensorType(p.node.output.dtype, ())) for _ in offsets])
            for p, offsets in zip(stage.products, _places(stage, kernel.it).values(), strict=True)
        ]
        self.buffers = kernel.buffers
        self.emitter, self.scope = kernel.emitter(), kernel.tile.scope()
        self.needed: dict[int, Value] = {}  # of what is handed on: what is read at its own place
        self._memo: dict[Term, Term] = {}
        self._seen: set[int] = set()

    def lines(self) -> list[str]:
        """The statements."""
        own = self.kernel
        nest = Lowering(self.stage.section, own.layout).nest(None)
        substitute_indices(nest, [mapping(self.stage.section, own.at)])
        terms = {s.value.id: self._term(s.term) for s in nest.stores()}
        for term in terms.values():
            self._early(term)
        weights = [self._matrix(s) for s in self.sums]
        rows = [self._left(s) for s in self.sums]
        self._wait(self._here())
        for part in rows:
            self._wait([w for w in part if isinstance(w, _Word)])
        for s, names, part in zip(self.sums, weights, rows, strict=True):
            self._product(s, names, [w.name if isinstance(w, _Word) else w for w in part])
        for root in self.stage.roots:
            self._store(root, terms[root.id])
        return self.scope.lines

    # ------------------------------------------------------------ terms

    def _term(self, term: Term) -> Term:
        """A term of sums and of numbers that are handed on, in place of loads of them."""
        if term not in self._memo:
            self._memo[term] = self._changed(term)
        return self._memo[term]

    def _changed(self, term: Term) -> Term:
        if isinstance(term, Apply):
            return replace(term, args=tuple(map(self._term, term.args)))
        if isinstance(term, Guard):
            return replace(term, inside=self._term(term.inside), outside=self._term(term.outside))
        return self._read(term) if isinstance(term, Load) else term

    def _read(self, load: Load) -> Term:
        own, vid = self.kernel, load.value.id
        for s in self.sums:
            if s.product.node.output.id == vid:
                off = load.index[0] - own.layout.address(load.value, own.at)
                assert isinstance(off, int)
                return Result(load.dtype, s.results[s.offsets.index(off)])
        if vid in own.kept:
            self.needed[vid] = load.value
            return Result(load.dtype, load.value)
        outside = own.it.outside.get(vid)
        if outside is None:
            return load
        step = own.t * load.value.t.size if vid in own.slices else 0
        return Load(load.dtype, outside, (load.index[0] + step,))

    def _early(self, term: Term) -> None:
        """Reads what does not depend on other programs."""
        if id(term) in self._seen:  # terms share parts: there may be many more paths than terms
            return
        self._seen.add(id(term))
        if isinstance(term, Apply):
            for a in term.args:
                self._early(a)
        elif isinstance(term, Load):
            self.emitter.emit(term, self.scope)

    # ------------------------------------------------------------ what is handed on

    def _slot(self) -> str:
        """Where the words of a step begin."""
        return f"t * {self.kernel.tile.index(self.kernel.size)}"

    def _pointer(self, v: Value) -> str:
        return self.buffers.pointer(self.buffers.words[self.kernel.kept[v.id].id])

    def _here(self) -> list[_Word]:
        """What is read at the places of the tile."""
        own, found = self.kernel, []
        mask = " & ".join(x.mask for x in own.tile.variables.values() if x.mask)
        for v in self.needed.values():
            at = own.tile.index(own.layout.address(v, own.at))
            place = f"{self._pointer(v)} + {self._slot()} + {at} + tl.zeros({own.tile.shape}, tl.int32)"
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

    def _chunks(self, s: _Sums) -> int:
        return -(-s.length // self.kernel.wave.depth)

    def _matrix(self, s: _Sums) -> list[str]:
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

    def _packed(self, s: _Sums, length: int) -> Packed:
        """The matrix in the order in which programs read it: for each a block of whole sums by its columns."""
        own, p, units = self.kernel, s.product, self.kernel.wave.units
        b, (_, n, k) = p.access.b, p.access.sizes
        parts = -(-own.width // units)
        counts = [d for _, d in p.access.batch]
        assert isinstance(n, int) and isinstance(k, int) and all(isinstance(d, int) for d in counts)
        lead = prod(counts)
        assert isinstance(lead, int)
        dtype, width, each, offsets = p.node.output.dtype, own.width, s.each, tuple(s.offsets)

        def write(out: np.ndarray) -> None:
            blocks = out.view(dtype.numpy).reshape(lead, parts, length, units, each)
            blocks[...] = 0
            flat = np.ascontiguousarray(p.constant).reshape(-1)
            for x in range(lead):
                at, rest = {}, x
                for loop, d in reversed(p.access.batch):
                    assert isinstance(d, int)
                    at[loop], rest = rest % d, rest // d
                base = substitute(b.base, at)
                assert isinstance(base, int) and isinstance(b.row, int) and isinstance(b.col, int)
                for g, off in enumerate(offsets):
                    for part in range(parts):
                        mine = np.arange(part * units, min(width, (part + 1) * units))
                        places = base + np.arange(k)[:, None] * b.row + (off + mine)[None, :] * b.col
                        blocks[x, part, :k, : len(mine), g] = flat[places]

        key = ("recurrence", p.node.output.id, offsets, units, length)
        return Packed(key, TensorType(dtype, (lead, parts, length, units, each)), write)

    def _product(self, s: _Sums, weights: list[str], rows: list[str]) -> None:
        """Multiplies."""
        own, lines, wave = self.kernel, self.scope.lines, self.kernel.wave
        p = s.product
        accs: list[str] = []
        dot = own.options.of_dot(p.node.output.dtype)
        plain = wave.plain and p.node.output.dtype.name == "float32" and own.options.dot == "ieee"
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

    def _left(self, s: _Sums) -> list[_Word | str]:
        """The rows of a product in parts: what is waited for, or names of what is in memory."""
        own, p, depth = self.kernel, s.product, self.kernel.wave.depth
        a, kind = p.access.a, spelling.stored(p.node.output.dtype)
        same: dict[Symbol, Dim] = {symbol(p.access.m): own.access.m}
        same |= {x: alone(y) for (x, _), (y, _) in zip(p.access.batch, own.access.batch, strict=True)}
        value = next((v for v in (*own.states, *own.it.handed) if v.id == a.value.id), None)
        if value is not None:
            start = f"{self._pointer(value)} + {self._slot()}"
        else:
            start = self.buffers.pointer(own.it.outside.get(a.value.id, a.value))
            start += f" + t * {own.tile.index(a.value.t.size)}" if a.value.id in own.slices else ""
        base, row, col = (own.tile.index(substitute(x, same)) for x in (a.base, a.row, a.col))
        found: list[_Word | str] = []
        for j in range(self._chunks(s)):
            along = f"({j * depth} + tl.arange(0, {depth}))[None, :]"
            tests = ["mm"] if own.tile.variables[symbol(own.access.m)].mask else []
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
        ends = [own.region.outputs[k] for k in own.node.attrs["results"]]
        for state, after in zip(own.states, ends[: own.count], strict=True):
            if after is root:
                self.emitter.store(own.kept[state.id], (own.t + 1) * own.size + at, term, self.scope)
        if root.id in own.kept and root not in own.states:
            self.emitter.store(own.kept[root.id], own.t * own.size + at, term, self.scope)
        for y, after in zip(own.node.outputs[own.count :], ends[own.count :], strict=True):
            if after is root:
                self.emitter.store(y, own.t * own.size + at, term, self.scope)
        last = Scope(self.scope, set())
        for y, after in zip(own.node.outputs[: own.count], ends[: own.count], strict=True):
            if after is root:
                self.emitter.store(y, at, term, last)
        if last.lines:
            self.scope.lines += [f"if t == {own.tile.index(own.trip - 1)}:", *indent(last.lines)]
