"""Emits a kernel for all steps of a loop, of which each program does all steps of some rows.

Rows do not need each other: where a program can hold all matrices of a step, it reads them once, keeps its rows' states
in registers from step to step, and waits for nobody. What a step reads of the input is on its way during the step
before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxc.codegen.triton import spelling
from onnxc.codegen.triton.epilogue import symbol
from onnxc.codegen.triton.kernel import Kernel, indent, is_wide, power
from onnxc.codegen.triton.options import Options
from onnxc.codegen.triton.recurrence_steps import (
    StageTerms,
    Steps,
    Sums,
    is_exact,
    places_of,
    products_of,
    same_loops,
    width_of,
)
from onnxc.codegen.triton.terms import Buffers, Packed, Scope
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, ceildiv, prod, substitute
from onnxc.ir.graph import Value
from onnxc.ir.types import TensorType
from onnxc.loops.terms import Load
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.planner.recurrence import Product, Recurrence

LEAST = 16  # elements of a sum that the matrix units take
HELD = 128 << 10  # bytes of matrices that a program holds at most
ANYWHERE = 48 << 10  # that it holds on any GPU
MEASURED = 90  # the architecture that has more room, and was measured
MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Alone:
    """How rows are laid over programs.

    Attributes:
        alone: rows of the states, in a program.
        warps: of a program.
        turned: whether tiles are units by rows, rather than rows by units: eight rows fill the matrix units then.
        only: the architecture that it is for; None: for all.
    """

    alone: int
    warps: int = 4
    turned: int = 0
    only: int | None = None


def alone_candidates(group: Group, options: Options) -> tuple[list[Alone], list[Alone]]:
    """Choices that the cost model takes before programs for each step, and those that are worth measuring, too. It is a
    table of what an H200 takes for LSTMs of 1 to 2048 rows and 32 to 128 units.
    """
    it = group.recurrence
    assert it is not None
    units, (rows, _, _), dtype = max(LEAST, power(width_of(group))), products_of(it)[0].access.sizes, _dtype(it)
    nbytes = units * dtype.itemsize * sum(s * max(LEAST, power(k)) for s, k in _columns(it))
    if nbytes > HELD or not _can_be_alone(group):
        return [], []
    only = None if nbytes <= ANYWHERE else MEASURED
    if is_exact(it, options):
        found = [Alone(1, max(1, units // 32), only=only), Alone(2, max(1, units // 16), only=only)]
        return (found[:1], found[1:]) if units <= 64 else ([], found)
    few, many = Alone(8, 8 if units > 64 else 4, 1, only), Alone(16, 8, 1, only)
    rest = [Alone(16, 4, 0, only), Alone(16, 8, 0, only), Alone(8, 8, 1, only)]
    first = many if units > 64 and isinstance(rows, int) and rows > 8 * MULTIPROCESSORS else few
    others = [x for x in dict.fromkeys([few, many, *rest]) if x != first]
    waits = not isinstance(rows, int) or rows > 16 or len(it.stages) > 1  # programs for each step would wait longer
    return ([first], others) if dtype.bits == 16 and (units <= 64 or waits) else ([], [first, *others])


def _columns(it: Recurrence) -> list[tuple[int, int]]:
    """Of each product of a step: how many columns meet in an element, and the elements of a sum."""
    found = list[tuple[int, int]]()
    for stage in it.stages:
        counts = places_of(stage, it)
        for p in stage.products:
            assert isinstance(p.access.sizes[2], int)
            found.append((len(counts[p.node.output.id]), p.access.sizes[2]))
    return found


def _dtype(it: Recurrence) -> DType:
    found: DType = products_of(it)[0].node.output.dtype
    return found


def _can_be_alone(group: Group) -> bool:
    """Whether products are of whole rows of what the steps themselves make, or of what is in memory."""
    assert group.recurrence is not None
    steps = Steps(group, group.recurrence.layout, Options())
    return all(_whole(steps, p) or not _own(steps, p) for p in products_of(group.recurrence))


def _own(steps: Steps, p: Product) -> bool:
    return p.access.a.value.id in {v.id for v in (*steps.states, *steps.it.handed)}


def _whole(steps: Steps, p: Product) -> bool:
    """Whether the rows of a product are those of a state or of what is handed on."""
    a, same = p.access.a, same_loops(steps, p)
    rows = substitute(a.base, same) + steps.access.m * substitute(a.row, same) + steps.unit * substitute(a.col, same)
    return p.access.sizes[2] == steps.width and rows == steps.layout.address(a.value, steps.at)


def emit_alone(group: Group, layout: Layout, options: Options, choice: Alone) -> Kernel:
    """The kernel of a loop."""
    return _Writer(group, layout, options, choice).kernel()


class _Writer(Steps):
    """The kernel being written."""

    def __init__(self, group: Group, layout: Layout, options: Options, choice: Alone) -> None:
        super().__init__(group, layout, options)
        self.choice, self.buffers = choice, Buffers()
        self.units = max(LEAST, power(self.width))
        self.axis = choice.turned  # that of rows
        self.form = (self.units, choice.alone) if choice.turned else (choice.alone, self.units)
        self.lanes = self.tile(self.buffers, self.form, self.axis)
        self.joined = not is_exact(self.it, options)  # the matrices of a product are one
        self.heads = self.lanes.heads(self.access.batch)
        self.programs = ceildiv(self.rows, choice.alone) * prod(d for _, d in self.access.batch)
        self.wide = is_wide([*self.node.operands, *self.results], self.programs)
        self.emitter = self.lanes.emitter()
        self.emitter.wide = self.wide
        self.emitter.scattered = self.joined
        self.emitter.result_symbols = frozenset(self.lanes.names)
        self.outer = self.lanes.scope()
        self.outer.available.remove(symbol(self.t))
        self.inner = self.outer.child(self.lanes.names)

    # ------------------------------------------------------------ programs

    def kernel(self) -> Kernel:
        """The kernel."""
        kind, index, rows = ".to(tl.int64)" if self.wide else "", self.lanes.index, self.choice.alone
        count = index(ceildiv(self.rows, rows))
        lines = [f"row = pid % {count}", f"rest = pid // {count}", "lead = rest", "zero = pid * 0", *self.heads]
        m, u = ("[None, :]", "[:, None]") if self.choice.turned else ("[:, None]", "[None, :]")
        lines += [f"m = (row * {rows} + tl.arange(0, {rows}){kind}){m}", f"mm = m < {index(self.rows)}"]
        lines += [f"u = tl.arange(0, {self.units}){kind}{u}", f"um = u < {self.width}"]
        steps = self._steps()
        for state, x in zip(self.states, self.node.operands, strict=False):
            found = self.emitter.emit(Load(state.dtype, x, (self.layout.address(state, self.at),)), self.outer)
            self.outer.lines.append(f"{self._name(state)} = {self._stored(found, state.dtype)}")
        if not (isinstance(self.trip, int) and self.trip > 0):
            steps = [f"if {index(self.trip)} > 0:", *indent(steps)]
        lines += [*self.outer.lines, *steps, *self._last()]
        return Kernel(lines, self.buffers, self.programs, self.choice.warps, 1, "recurrence", self.wide)

    def _last(self) -> list[str]:
        """The states behind the last step."""
        scope = Scope(self.outer, set(self.lanes.names))
        for state, y in zip(self.states, self.results, strict=False):
            self._put(y, self.layout.address(state, self.at), self._name(state), scope)
        return scope.lines

    def _put(self, y: Value, at: Dim, name: str, scope: Scope) -> None:
        mask, _ = self.emitter.mask(self.lanes.variables, scope)
        masked = f", mask={mask}" if mask else ""
        place = f"{self.emitter.index(at, scope)} + tl.zeros({self.form}, tl.int32)"
        scope.lines.append(f"tl.store({self.buffers.pointer(y)} + {place}, {name}{masked})")

    def _name(self, v: Value) -> str:
        """Of what is kept, or handed on."""
        states = [s.id for s in self.states]
        return f"state{states.index(v.id)}" if v.id in states else f"made{[x.id for x in self.it.handed].index(v.id)}"

    def _stored(self, name: str, dtype: DType) -> str:
        """A tile as it would be stored; a whole one, with zeros in place of units that there are not: those of the
        matrices for them are zeros, too, but what is computed for them might be no number.
        """
        whole = f"tl.broadcast_to({spelling.narrowed(name, dtype)}, {self.form})"
        return whole if self.units == self.width else f"tl.where(um, {whole}, 0.0).to({spelling.stored(dtype)})"

    # ------------------------------------------------------------ steps

    def _steps(self) -> list[str]:
        """All steps, of which there is one at least."""
        kept = frozenset(v.id for v in (*self.states, *self.it.handed))
        stages = [StageTerms(self, stage, kept) for stage in self.it.stages]
        for v in (*self.states, *self.it.handed):
            self.emitter.results[v.id] = spelling.widened(self._name(v), v.dtype)
        matrices = {id(s): self._matrix(s) for stage in stages for s in stage.sums}
        for stage in stages:
            stage.read_early(self.emitter, self.inner)
        rows = {id(s): self._read(s) for stage in stages for s in stage.sums if not _own(self, s.product)}
        early, self.inner.lines = self.inner.lines, []
        after = dict[int, str]()
        for stage in stages:
            for s in stage.sums:
                left = rows[id(s)] if id(s) in rows else self._name(s.product.access.a.value)
                self._product(s, matrices[id(s)], left)
            after |= {root.id: self._made(root, stage) for root in stage.stage.roots}
        lines = [*self.inner.lines, *self._kept(after)]
        last = self.lanes.index(self.trip - 1)
        following = [f"t = tl.minimum(step + 1 + zero, {last})", *early]
        loop = ["t = step + zero", *lines, *following]
        return ["t = zero", *early, f"for step in range(0, {self.lanes.index(self.trip)}):", *indent(loop)]

    def _made(self, root: Value, stage: StageTerms) -> str:
        """Computes what a stage makes, and writes it where it is collected."""
        name = self.buffers.fresh("n")
        value = self.emitter.emit(stage.terms[root.id], self.inner)
        self.inner.lines.append(f"{name} = {self._stored(value, root.dtype)}")
        for y, after in zip(self.results[self.count :], self.ends[self.count :], strict=True):
            if after is root:
                self._put(y, self.t * self.size + self.layout.address(root, self.at), name, self.inner)
        if root.id in {v.id for v in self.it.handed} and root not in self.states:
            self.inner.lines.append(f"{self._name(root)} = {name}")
        return name

    def _kept(self, after: dict[int, str]) -> list[str]:
        """The states change, all at once."""
        pairs = zip(self.states, self.ends[: self.count], strict=True)
        changed = [(self._name(s), after[x.id]) for s, x in pairs]
        return [f"{s} = {x}" for s, x in changed]

    # ------------------------------------------------------------ products

    def _depth(self, s: Sums) -> int:
        return max(LEAST, power(s.length))

    def _count(self, s: Sums) -> int:
        """Matrices of a product, one for each of the columns that meet in an element. On matrix units they are one, of
        which a thread has these columns side by side.
        """
        return s.each if self.joined else len(s.offsets)

    def _matrix(self, s: Sums) -> list[str]:
        """Reads the matrices of a product."""
        packed, depth, width = self._packed(s), self._depth(s), self.units * (s.each if self.joined else 1)
        rows, columns = (width, depth) if self.choice.turned else (depth, width)
        at = f"{self.buffers.pointer(packed)} + lead * {self._count(s) * depth * self.units}"
        place = f"tl.arange(0, {rows})[:, None] * {columns} + tl.arange(0, {columns})[None, :]"
        names = [self.buffers.fresh("w") for _ in range(1 if self.joined else len(s.offsets))]
        self.outer.lines += [f"{n} = tl.load({at} + {j * rows * columns} + {place})" for j, n in enumerate(names)]
        return names

    def _packed(self, s: Sums) -> Packed:
        """The matrices as they are read."""
        count, depth, units, width = self._count(s), self._depth(s), self.units, self.width
        lead, dtype = prod(d for _, d in s.product.access.batch), s.product.node.output.dtype
        assert isinstance(lead, int)
        order = (0, 3, 2, 1) if self.choice.turned else (0, 1, 3, 2) if self.joined else (0, 3, 1, 2)
        shape = tuple((lead, depth, units, count)[k] for k in order)

        def write(out: np.ndarray) -> None:
            found = s.matrices(width)
            whole = np.zeros((lead, depth, units, count), dtype.numpy)
            whole[:, : s.length, :width, : found.shape[3]] = found
            out.view(dtype.numpy).reshape(shape)[...] = whole.transpose(order)

        key = ("alone", s.product.node.output.id, tuple(s.offsets), order, units, depth, count)
        return Packed(key, TensorType(dtype, shape), write)

    def _read(self, s: Sums) -> str:
        """The rows of a product that are in memory."""
        p, depth = s.product, self._depth(s)
        a, same, index = p.access.a, same_loops(self, p), self.lanes.index
        start = self.buffers.pointer(self.it.outside.get(a.value.id, a.value))
        start += f" + t * {index(a.value.t.size)}" if a.value.id in self.slices else ""
        base, row, col = (index(substitute(x, same)) for x in (a.base, a.row, a.col))
        along = f"tl.arange(0, {depth})" + ("[:, None]" if self.choice.turned else "[None, :]")
        tests = ["mm"] if any(v.name == "m" and v.mask for v in self.lanes.variables.values()) else []
        tests += [f"({along} < {s.length})"] if depth > s.length else []
        masked = f", mask={' & '.join(tests)}, other=0.0" if tests else ""
        name = self.buffers.fresh("a")
        self.inner.lines.append(f"{name} = tl.load({start} + {base} + m * {row} + {along} * {col}{masked})")
        return name

    def _product(self, s: Sums, weights: Sequence[str], left: str) -> None:
        """Multiplies."""
        dtype, lines = s.product.node.output.dtype, self.inner.lines
        (rows, columns), turned, sums = self.form, self.choice.turned, []
        if self.joined:
            rows, columns = (rows * s.each, columns) if turned else (rows, columns * s.each)
        for w in weights:
            sums.append(self.buffers.fresh("acc"))
            a, b = (w, left) if turned else (left, w)
            how = self.options.of_dot(dtype)
            lines.append(f"{sums[-1]} = tl.dot({a}, {b}, tl.zeros(({rows}, {columns}), tl.float32){how})")
        for acc in sums if dtype.name != "float32" else ():  # as it would be stored
            lines.append(f"{acc} = {acc}.to({spelling.stored(dtype)}).to(tl.float32)")
        sums = self._apart(sums[0], s.each) if self.joined else sums
        self.emitter.results |= {v.id: acc for v, acc in zip(s.results, sums, strict=False)}

    def _apart(self, acc: str, count: int) -> list[str]:
        """The columns of joined sums that meet in an element, each for itself."""
        if count == 1:
            return [acc]
        twos, (rows, columns) = ["2"] * (count.bit_length() - 1), self.form
        n = len(twos)
        if self.choice.turned:
            shape, order = [*twos, f"{rows}", f"{columns}"], [n, n + 1, *range(n)]
        else:
            shape, order = [f"{rows}", *twos, f"{columns}"], [0, n + 1, *range(1, n + 1)]
        lines, whole = self.inner.lines, self.buffers.fresh("v")
        lines.append(f"{whole} = tl.permute(tl.reshape({acc}, ({', '.join(shape)})), {tuple(order)})")

        def split(x: str, count: int) -> list[str]:
            if count == 1:
                return [x]
            even, odd = self.buffers.fresh("v"), self.buffers.fresh("v")
            lines.append(f"{even}, {odd} = tl.split({x})")
            return [y for pair in zip(split(even, count // 2), split(odd, count // 2), strict=True) for y in pair]

        return split(whole, count)
