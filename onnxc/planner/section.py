"""A section: one loop nest over a root value's elements, and everything computed inside it.

A section grows by pulling producers in. For each member it keeps the *demands*: the distinct indices, in terms of the
section's loop variables, at which the member's elements are needed. A producer is legal inside when its demands are
few; a reduction when the variables of its index can be the outer loops; a value can be stored from inside when its
demand visits each of its elements once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from onnxc.ir.expr import (
    Dim,
    Expr,
    Symbol,
    always_equal,
    ceildiv,
    maximum,
    minimum,
    of,
    prod,
    substitute,
    symbols,
)
from onnxc.ir.graph import Node, Value
from onnxc.loops.access import Index, broadcast, flatten, fresh, unflatten, view_index
from onnxc.loops.known import gathered_at, is_known
from onnxc.loops.loop_index import divided_loops, is_loop, is_mixed_radix
from onnxc.planner.guesses import guessed_size
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import constant_of
from onnxc.primitives.costs import cycles
from onnxc.primitives.movement import VIEWS

WINDOWS = ("window_max", "window_sum")
CONTRACTIONS = ("conv", "conv_weights", "matmul")  # those that loops can compute
MOST_MEMBERS = 160  # nodes of a section, but for a few; its terms are walked recursively, so they must not be deep
LARGE = 1 << 16  # elements of a section that is better off with a small reduction's result from memory
LONG_WINDOW = 32  # elements along an axis, from which on a kernel may find out that fewer are in the operand
FULL = "the kernel is large enough"


@dataclass(frozen=True)
class SumOrder:
    """In which order the numbers of a sum are added, whatever is computed and stored around it.

    Attributes:
        across: the lanes of a vector are parts of one sum, rather than of neighbouring ones.
        runs: the loops from the outermost to the innermost, each over axes of the operand that it walks as one: as
            positions among those that are reduced and are longer than 1. None of them: the loops that it always has.
    """

    across: bool
    runs: tuple[tuple[int, ...], ...]


@dataclass
class LoopReduction:
    """How a reduction member runs: its own index and the variables that it loops over."""

    value: Value
    index: Index
    variables: list[tuple[Symbol, Dim]]


@dataclass
class Section:
    """One loop nest. `variables` are the root's loops in logical order; `outer` is fixed by the first
    reduction.
    """

    root: Value
    index: Index
    variables: list[tuple[Symbol, Dim]]
    members: dict[int, Node] = field(default_factory=dict)
    demands: dict[int, list[Index]] = field(default_factory=dict)
    values: dict[int, Value] = field(default_factory=dict)
    stores: dict[int, Index] = field(default_factory=dict)
    outer: list[Symbol] | None = None
    reductions: dict[tuple[int, Index], LoopReduction] = field(default_factory=dict)
    lookups: dict[tuple[int, Index], Symbol] = field(default_factory=dict)
    innermost: Symbol | None = None  # the loop along which the root lies contiguously in memory
    orders: Mapping[int, SumOrder] | None = None  # of sums, by the id of the result; None: bits may differ by plans

    @staticmethod
    def over(root: Value, order: tuple[int, ...], orders: Mapping[int, SumOrder] | None = None) -> Section:
        """An empty section with one loop per dim of the root; the root itself is demanded and stored.

        `order` is the root's memory order, `orders` are those in which sums are to be made.
        """
        own = [fresh("i", d) for d in root.shape]
        index = tuple(0 if d == 1 else v for v, d in zip(own, root.shape, strict=True))
        variables = [(_symbol(v), d) for v, d in zip(own, root.shape, strict=True) if d != 1]
        section = Section(root, index, variables, orders=orders)
        inner = [own[a] for a in order if root.shape[a] != 1]
        section.innermost = _symbol(inner[-1]) if inner else None
        section.demand(root, index)
        section.stores[root.id] = index
        return section

    # ------------------------------------------------------------ growing

    @property
    def is_full(self) -> bool:
        """Whether it computes so much that whatever else it reads had better be stored."""
        return len(self.members) > MOST_MEMBERS

    def accepts(self, node: Node, store: bool) -> str:
        """Why the node cannot be computed in this section; empty where it can. It changes nothing."""
        value = node.output
        demands = self.demands.get(value.id, [])
        if not demands:
            return "not demanded here"
        if len(demands) > 1 and (len(demands) > 4 or cost(node) > 2 or store):
            return f"needed at {len(demands)} different positions"
        if len(demands) > 1 and self._scattered(demands) and sum(_is_whole(v, value) for v in node.operands) > 1:
            return f"needed at {len(demands)} positions that are data, element by element"
        if self.is_full:
            return FULL
        if is_reduction(node) and (problem := self._misplaced(demands)):
            return problem
        if not self._wants_split(node):
            return self._fits(node, store)
        trial = replace(
            self,
            variables=list(self.variables),
            outer=None if self.outer is None else list(self.outer),
            reductions={k: replace(r) for k, r in self.reductions.items()},
        )
        trial._split_loops()
        return trial._fits(node, store)

    def _wants_split(self, node: Node) -> bool:
        """Whether loops that indices divide become two, for a node to be computed here."""
        if is_reduction(node):
            return node.op not in WINDOWS and node.op not in CONTRACTIONS
        return cost(node) > 1 and any(True for e in self.demands[node.output.id][0] for _ in divided_loops(e))

    def _fits(self, node: Node, store: bool) -> str:
        """As `accepts`, once loops are split."""
        value = node.output
        demands = self.demands[value.id]
        if is_reduction(node):
            return self._accepts_reduction(node) or self._stored_once(node, store)
        if store and not self.visits_once(value, demands[0]):
            return "not every element is computed exactly once here"
        return self._stored_once(node, store) or self._recompute(node, demands)

    def _scattered(self, demands: list[Index]) -> bool:
        """Whether positions are data that differs from one element of a row to the next."""
        data = {s for (_, at), s in self.lookups.items() if any(self.innermost in symbols(e) for e in at)}
        return any(data & symbols(e) for at in demands for e in at)

    def _stored_once(self, node: Node, store: bool) -> str:
        """A store inside the outer loops must move with each of them, or it would run once per turn of
        the others.
        """
        outer = set(self._outer_with(node))
        stores = [*self.stores.values(), *([self.demands[node.output.id][0]] if store else [])]
        if all(outer <= {s for e in at for s in symbols(e)} for at in stores):
            return ""
        return "it would be stored more than once"

    def _outer_with(self, node: Node) -> list[Symbol]:
        """The outer loops, if the node is computed here."""
        if self.outer is not None:
            return self.outer
        if node.op in WINDOWS or node.op in CONTRACTIONS:
            return [s for s, _ in self.variables]
        if lookup(node.op).kind is not Kind.REDUCTION:
            return []
        demand = self.demands[node.output.id][0]
        return [s for s, _ in self.variables if any(s in symbols(e) for e in demand)]

    def _recompute(self, node: Node, demands: list[Index]) -> str:
        if is_view(node) or node.op in ("concat", "constant", "sizes", "iota"):
            return ""
        extent = dict(self.all_variables())
        used = {s for e in demands[0] for s in symbols(e)} & extent.keys()
        times = prod(extent[s] for s in extent.keys() - used)
        spread = prod(extent[s] for s in used)
        repeated = not always_equal(spread, node.output.t.size) and used and not _single_positions(demands[0])
        if repeated and cost(node) > 1:
            return "its elements would be computed more than once"
        if times == 1 or self._is_outer(used):
            return ""
        if self.outer is None and self.innermost is not None and self.innermost not in used:
            return ""  # computed once per row
        limit = 64 if cost(node) <= 2 else 1
        if isinstance(times, int) and times <= limit and node.output.t.size != 1:
            return ""
        return "" if node.output.t.size == 1 else "it would be recomputed along a broadcast axis"

    def _is_outer(self, used: set[Symbol]) -> bool:
        return self.outer is not None and used <= set(self.outer)

    def _misplaced(self, demands: list[Index]) -> str:
        """Why no reduction can be computed where these elements of it are needed."""
        if len(demands) > 1:
            return "a reduction needed at several positions"
        if any(s not in dict(self.variables) for e in demands[0] for s in symbols(e) if is_loop(s)):
            return "a reduction inside a reduction"
        return ""

    def order_of(self, value: Value) -> SumOrder | None:
        """The order in which a sum must be made, if there is one."""
        return None if self.orders is None else self.orders.get(value.id)

    def _disagrees(self, node: Node) -> bool:
        """Whether the lanes of a sum must run along other loops than those of the sums that are here."""
        own, others = self.order_of(node.output), (self.order_of(m.output) for m in self.members.values())
        return own is not None and any(o is not None and o.across != own.across for o in others)

    def _accepts_reduction(self, node: Node) -> str:
        if self._disagrees(node):
            return "its sums are added up in another order"
        demand = self.demands[node.output.id][0]
        if node.op in WINDOWS or node.op in CONTRACTIONS:
            if self.outer is not None and set(self.outer) != {s for s, _ in self.variables}:
                return "a window inside a row reduction"
            return (
                "" if self.visits_once(node.output, demand) else "a window's elements would be computed more than once"
            )
        used = [s for s, _ in self.variables if any(s in symbols(e) for e in demand)]
        if not self.visits_once(node.output, demand):
            return "the reduction would be computed more than once"
        if self._dwarfs(node):
            return "its loops would be too few for what reads it"
        if self.outer is not None and set(self.outer) != set(used):
            return "another reduction runs over other axes"
        if self.outer is None and any(lookup(m.op).kind is Kind.REDUCTION for m in self.members.values()):
            return "another reduction runs over other axes"
        return ""

    def _dwarfs(self, node: Node) -> bool:
        """Whether the section is large and the reduction small: its rows should not become the section's loops. What it
        is the root of are its own rows, of which there may be many where each has no element.
        """
        if node.output.id == self.root.id:
            return False
        mine, whole = guessed_size(node.operands[0].shape), guessed_size(self.root.shape)
        return whole >= max(LARGE, 4 * mine)

    def split_for(self, node: Node) -> None:
        """Splits loops as the node wants it, which `accepts` has looked at."""
        if self._wants_split(node):
            self._split_loops()

    def add(self, node: Node, store: bool = False) -> None:
        """Computes the node here (after `accepts` and `split_for`), and stores it if asked."""
        value = node.output
        self.members[value.id] = node
        if store:
            self.stores[value.id] = self.demands[value.id][0]
        if is_reduction(node):
            self.outer = self._outer_with(node)
        for at in list(self.demands[value.id]):
            for operand, index in self.reads(node, at):
                self.demand(operand, index)

    def demand(self, value: Value, index: Index) -> None:
        """Notes that an element of a value is needed."""
        self.values[value.id] = value
        known = self.demands.setdefault(value.id, [])
        if index not in known:
            known.append(index)

    # ------------------------------------------------------------ reads

    def reads(self, node: Node, at: Index) -> list[tuple[Value, Index]]:
        """The operand elements that element `at` of the node's output needs."""
        ins = [v for v in node.inputs if v is not None]
        if not ins:
            return []
        if node.op in VIEWS:
            return [(ins[0], view_index(node, at))]
        if node.op == "pad":
            inner = tuple(
                _unpad(i, lo, gap) for i, lo, gap in zip(at, node.attrs["low"], node.attrs["interior"], strict=True)
            )
            return [(ins[0], inner), (ins[1], ())]
        if node.op == "concat":
            return self._concat_reads(node, at)
        kind = lookup(node.op).kind
        if kind is Kind.POINTWISE:
            return [(v, broadcast(v, at)) for v in ins]
        if kind is Kind.INDEXED:
            return self._indexed_reads(node, at)
        return self._reduction_reads(node, at)

    @staticmethod
    def _concat_reads(node: Node, at: Index) -> list[tuple[Value, Index]]:
        out: list[tuple[Value, Index]] = []
        axis = node.attrs["axis"]
        offset: Dim = 0
        for v in node.operands:
            out.append((v, (*at[:axis], at[axis] - offset, *at[axis + 1 :])))
            offset = offset + v.shape[axis]
        return out

    def _indexed_reads(self, node: Node, at: Index) -> list[tuple[Value, Index]]:
        x, where = (v for v in node.inputs if v is not None)
        if node.op == "gather":
            axis = node.attrs["axis"]
            inner = at[axis : axis + where.rank]
            known = gathered_at(node, inner)
            if known is not None:
                return [(x, (*at[:axis], known, *at[axis + where.rank :]))]
            symbol = self.lookup(node, inner, x.shape[axis])
            return [(where, inner), (x, (*at[:axis], of(symbol), *at[axis + where.rank :]))]
        if node.op == "gather_elements":
            axis = node.attrs["axis"]
            symbol = self.lookup(node, at, x.shape[axis])
            return [(where, at), (x, (*at[:axis], of(symbol), *at[axis + 1 :]))]
        batch, lead, depth = node.attrs["batch_dims"], where.rank - 1, where.shape[-1]
        places = [(*at[:lead], j) for j in range(depth)]
        found = [of(self.lookup(node, p, x.shape[batch + j])) for j, p in enumerate(places)]
        return [*((where, p) for p in places), (x, (*at[:batch], *found, *at[lead:]))]

    def lookup(self, node: Node, at: Index, extent: Dim) -> Symbol:
        """The symbol that stands for what a gather reads at `at` of its indices."""
        key = (node.output.id, at)
        if key not in self.lookups:
            self.lookups[key] = _symbol(fresh("d", extent))
        return self.lookups[key]

    def _reduction_reads(self, node: Node, at: Index) -> list[tuple[Value, Index]]:
        plan = self.reduction(node, at)
        loops: list[Dim] = [of(s) for s, _ in plan.variables]
        ins = [v for v in node.inputs if v is not None]
        if node.op == "matmul":
            a, b = ins
            k = loops[0]
            return [(a, broadcast(a, (*at[:-1], k))), (b, broadcast(b, (*at[:-2], k, at[-1])))]
        if node.op == "conv":
            return _conv_reads(node, at, loops)
        if node.op == "conv_weights":
            return _conv_weights_reads(node, at, loops)
        if node.op in WINDOWS:
            attrs = node.attrs
            moved = iter(loops)
            taps = [next(moved) if k != 1 else 0 for k in _taps(node)]
            rows = zip(at, taps, attrs["strides"], attrs["dilations"], attrs["low"], strict=True)
            return [(ins[0], tuple(i * s + t * d - lo for i, t, s, d, lo in rows))]
        axes = _axes(node)
        kept = iter(at)
        inner = iter(self._reduced_index(node, axes, plan))
        return [(ins[0], tuple(next(inner) if i in axes else next(kept) for i in range(ins[0].rank)))]

    def _reduced_index(self, node: Node, axes: Iterable[int], plan: LoopReduction) -> Index:
        x = node.inputs[0]
        assert x is not None
        dims = [x.shape[a] for a in sorted(axes)]
        extents = [d for _, d in plan.variables]
        loops = tuple(of(s) for s, _ in plan.variables)
        order = self.order_of(node.output)
        if order is not None:
            return _in_order(order, loops, dims)
        if len(dims) == len(extents) and all(always_equal(a, b) for a, b in zip(dims, extents, strict=True)):
            return loops
        real = [d for d in dims if d != 1]
        if len(real) == len(extents) and all(always_equal(a, b) for a, b in zip(real, extents, strict=True)):
            it = iter(loops)
            return tuple(0 if d == 1 else next(it) for d in dims)
        return unflatten(flatten(loops, extents), dims)

    def reduction(self, node: Node, at: Index) -> LoopReduction:
        """The loops of a reduction member: shared with the section's inner loops where the sizes agree."""
        key = (node.output.id, at)
        if key not in self.reductions:
            self.reductions[key] = LoopReduction(node.output, at, self._reduction_variables(node))
        return self.reductions[key]

    def _reduction_variables(self, node: Node) -> list[tuple[Symbol, Dim]]:
        own = _own_extents(node)
        if own is not None:
            return _loops_over(own)
        x = node.operands[0]
        dims = [x.shape[a] for a in sorted(_axes(node)) if x.shape[a] != 1]
        inner = [(s, d) for s, d in self.variables if self.outer is not None and s not in self.outer]
        order = self.order_of(node.output)
        if order is not None:
            return self._ordered_variables(order, dims, inner)
        if inner and always_equal(prod(d for _, d in inner), prod(dims)):
            return inner
        for other in self.reductions.values():
            if _have_extents(other.variables, dims):
                return other.variables
        return _loops_over(dims)

    def _ordered_variables(
        self, order: SumOrder, dims: list[Dim], inner: list[tuple[Symbol, Dim]]
    ) -> list[tuple[Symbol, Dim]]:
        """The loops of a sum that has an order: the section's own, or those of another sum, where they are in it."""
        extents = [prod(dims[a] for a in run) for run in order.runs]
        if inner and _have_extents(inner, extents) and [a for run in order.runs for a in run] == list(range(len(dims))):
            return inner
        for (vid, _), other in self.reductions.items():
            known = self.orders.get(vid) if self.orders else None
            if known is not None and known.runs == order.runs and _have_extents(other.variables, extents):
                return other.variables
        return _loops_over(extents)

    # ------------------------------------------------------------ loops

    def all_variables(self) -> list[tuple[Symbol, Dim]]:
        """The root's loops, then the reductions' own."""
        found = dict(self.variables)
        for r in self.reductions.values():
            found.update(r.variables)
        return list(found.items())

    def visits_once(self, value: Value, at: Index) -> bool:
        """Whether the index visits every element of the value exactly once as the loops run: whether a store there is
        right.
        """
        extent = dict(self.all_variables())
        found = {s for e in at for s in symbols(e)}
        used = [s for s in extent if s in found]
        if any(s in found for s in self.lookups.values()):
            return False
        if not always_equal(prod(extent[s] for s in used), value.t.size):
            return False
        position = flatten(at, value.shape)
        first = substitute(position, dict.fromkeys(used, 0))  # another one is a part of a concatenation, say
        return always_equal(first, 0) and is_mixed_radix(position, {s: extent[s] for s in used})

    def _split_loops(self) -> None:
        """Splits loops so that `v // n` and `v % n` in an index become loops of their own."""
        for _ in range(8):
            found = next(((s, n) for e in self.demands_expressions() for s, n in divided_loops(e)), None)
            if found is None or not self.split(*found):
                return

    def demands_expressions(self) -> Iterable[Dim]:
        """The indices of all demands, axis by axis."""
        for many in self.demands.values():
            for at in many:
                yield from at

    def split(self, symbol: Symbol, n: Dim) -> bool:
        """Replaces loop `symbol` by two, of extent / n and n, everywhere. False where n does not divide
        it.
        """
        for k, (s, extent) in enumerate(self.variables):
            if s == symbol and always_equal(extent % n, 0):
                hi, lo = fresh("i", extent // n), fresh("i", n)
                pair = [(_symbol(hi), extent // n), (_symbol(lo), n)]
                self.variables[k : k + 1] = [p for p in pair if p[1] != 1]
                self._substitute(symbol, (0 if extent // n == 1 else hi) * n + lo)
                if symbol == self.innermost:
                    self.innermost = pair[1][0] if n != 1 else pair[0][0]
                if self.outer is not None and symbol in self.outer:
                    at = self.outer.index(symbol)
                    self.outer[at : at + 1] = [s for s, d in pair if d != 1]
                return True
        return False

    def _substitute(self, symbol: Symbol, by: Dim) -> None:
        def new(at: Index) -> Index:
            return tuple(substitute(e, {symbol: by}) for e in at)

        self.index = new(self.index)
        self.demands = {k: list(dict.fromkeys(new(at) for at in many)) for k, many in self.demands.items()}
        self.stores = {k: new(at) for k, at in self.stores.items()}
        self.lookups = {(k, new(at)): s for (k, at), s in self.lookups.items()}
        for r in self.reductions.values():
            r.index = new(r.index)
        self.reductions = {(k, new(at)): r for (k, at), r in self.reductions.items()}


def _symbol(e: Dim) -> Symbol:
    assert isinstance(e, Expr)
    (atom,) = e.atoms()
    assert isinstance(atom, Symbol)
    return atom


def _own_extents(node: Node) -> Sequence[Dim] | None:
    """The extents of a reduction's loops, where these can be no other's: of a product, a convolution, a window."""
    if node.op == "matmul":
        return node.operands[0].shape[-1:]
    if node.op == "conv":
        return node.operands[1].shape[1:]
    if node.op == "conv_weights":
        pixels = node.operands[1].shape
        return (pixels[0], *pixels[2:])
    if node.op in WINDOWS:
        return [k for k in _taps(node) if k != 1]
    return None


def _taps(node: Node) -> list[Dim]:
    """The size of a window along each axis, without what lies behind the operand wherever the window stands: some
    networks take the mean of what they have by a window of a thousand pixels.
    """
    found: list[Dim] = []
    keys = ("kernel", "low", "dilations")
    for size, k, low, dilation in zip(node.operands[0].shape, *(node.attrs[key] for key in keys), strict=True):
        most = maximum(1, ceildiv(size + low, dilation))
        found.append(minimum(k, most) if isinstance(most, int) or k >= LONG_WINDOW else k)
    return found


def _loops_over(extents: Sequence[Dim]) -> list[tuple[Symbol, Dim]]:
    """New loops of a reduction."""
    return [(_symbol(fresh("r", d)), d) for d in extents]


def _have_extents(loops: Sequence[tuple[Symbol, Dim]], extents: Sequence[Dim]) -> bool:
    """Whether loops have these extents, at any size."""
    return len(loops) == len(extents) and all(always_equal(d, e) for (_, d), e in zip(loops, extents, strict=True))


def _axes(node: Node) -> tuple[int, ...]:
    """Those that a reduction reduces."""
    return tuple(node.attrs["axes"]) if "axes" in node.attrs else (node.attrs["axis"],)


def _in_order(order: SumOrder, loops: tuple[Dim, ...], dims: list[Dim]) -> Index:
    """Where a sum's loops, each of them over a run of axes, read its operand along the axes that are reduced."""
    at: list[Dim] = [0] * len(dims)
    long = [k for k, d in enumerate(dims) if d != 1]
    for run, loop in zip(order.runs, loops, strict=True):
        own = [dims[long[a]] for a in run]
        for a, i in zip(run, unflatten(loop, own) if len(own) > 1 else (loop,), strict=True):
            at[long[a]] = i
    return tuple(at)


def is_reduction(node: Node) -> bool:
    """Whether it has loops of its own: sums, windows, and contractions that are no templates."""
    return lookup(node.op).kind is Kind.REDUCTION or node.op in CONTRACTIONS


def _unpad(i: Dim, low: Dim, gap: int) -> Dim:
    inner = i - low
    return inner if gap == 0 else inner // (gap + 1)


def conv_guards(node: Node, index: Index) -> tuple[Dim, ...]:
    """Conditions (>= 0) under which a convolution's or window's read lies inside its input."""
    x = node.inputs[0]
    assert x is not None
    out: list[Dim] = []
    for i, d in zip(index, x.shape, strict=True):
        out += [i, d - 1 - i]
    return tuple(out)


def _conv_reads(node: Node, at: Index, loops: list[Dim]) -> list[tuple[Value, Index]]:
    x, w = (v for v in node.inputs if v is not None)
    a = node.attrs
    groups = a["groups"]
    per_group = w.shape[0] // groups
    channel = loops[0] if groups == 1 else (at[1] // per_group) * w.shape[1] + loops[0]
    rows = zip(at[2:], loops[1:], a["strides"], a["dilations"], a["low"], strict=True)
    inner = tuple(i * s + t * d - lo for i, t, s, d, lo in rows)
    return [(x, (at[0], channel, *inner)), (w, (at[1], *loops))]


def _conv_weights_reads(node: Node, at: Index, loops: list[Dim]) -> list[tuple[Value, Index]]:
    (x, dy), a = node.operands, node.attrs
    m, c = node.output.shape[:2]
    channel = at[1] if a["groups"] == 1 else (at[0] // (m // a["groups"])) * c + at[1]
    rows = zip(loops[1:], at[2:], a["strides"], a["dilations"], a["low"], strict=True)
    return [
        (x, (loops[0], channel, *(o * s + t * d - lo for o, t, s, d, lo in rows))),
        (dy, (loops[0], at[0], *loops[1:])),
    ]


def _is_whole(operand: Value, result: Value) -> bool:
    """Whether an operand has an element for each of the result's."""
    return always_equal(operand.t.size, result.t.size)


def _single_positions(at: Index) -> bool:
    return all(isinstance(e, int) for e in at)


def cost(node: Node) -> int:
    """Rough cycles per element, relative to an addition; views and constants are free."""
    return 0 if is_view(node) or constant_of(node.output) is not None else cycles(node.op)


def is_view(node: Node) -> bool:
    """Whether a node is index arithmetic alone."""
    return node.op in VIEWS or is_known(node)
