"""Emits scalar terms as Triton tiles: loads with masks, lookups, guards, and everything pointwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from onnxc.codegen.triton import spelling
from onnxc.errors import InternalError
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, Expr, Symbol, is_less, is_nonnegative, of, symbols
from onnxc.ir.graph import Value
from onnxc.ir.types import TensorType
from onnxc.loops.loop_index import is_size
from onnxc.loops.terms import Apply, Const, Guard, Load, Lookup, Position, Reduced, Result, Term, walk
from onnxc.primitives.base import SMOOTH

SCATTERED = ("float32", "float16", "bfloat16")  # element types that `ox_read` reads
Key = object  # a loop symbol, or ("reduced", key)
Guarding = tuple[tuple[tuple[Dim, ...], bool], ...]  # conditions, and whether they hold or not


@dataclass(frozen=True)
class TileVariable:
    """An index along one axis of the tile: its name, how many lanes it has, and the mask of those that count; they are
    those below `size`, where that is known.
    """

    name: str
    axis: int
    lanes: int
    mask: str | None
    size: int | None = None


@dataclass(eq=False)
class Scope:
    """A block of a kernel. `available` are the loop symbols and reductions whose values are known here."""

    parent: Scope | None = None
    available: set[Key] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)
    known: dict[object, str] = field(default_factory=dict)  # what has been computed here -> its name

    def child(self, available: Iterable[Key] = ()) -> Scope:
        return Scope(self, set(available))

    def chain(self) -> list[Scope]:
        """This scope and its parents, innermost first."""
        out: list[Scope] = []
        scope: Scope | None = self
        while scope is not None:
            out.append(scope)
            scope = scope.parent
        return out


@dataclass(frozen=True)
class Packed:
    """A constant in an order of the kernel's own; `write` fills a flat array of its bytes."""

    id: object
    t: TensorType
    write: Callable[[np.ndarray], None] = field(compare=False)

    @property
    def dtype(self) -> DType:
        return self.t.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in memory; a constant has no open dims."""
        nbytes = self.t.nbytes
        assert isinstance(nbytes, int)
        return nbytes


@dataclass
class Buffers:
    """The parameters of a kernel: storages in the order of p0, p1, ..., sizes, and what else it asks for. `apart` are
    storages whose rows are apart: the elements of a row, and those from row to row. `words` are those that stages of
    the kernel hand each other numbers in, as integers, by the storage whose numbers they are (relay.py). `numbers` are
    the expressions that it computes; those that are only places in a buffer have False.
    """

    storages: list[Value | Packed] = field(default_factory=list)
    sizes: set[str] = field(default_factory=set)
    reports: bool = False  # whether it may find an index out of bounds or a division by zero
    apart: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    words: Mapping[int, Value] = field(default_factory=dict)
    numbers: dict[Dim, bool] = field(default_factory=dict)
    _count: int = 0

    def pointer(self, storage: Value | Packed) -> str:
        """The name of a storage's pointer."""
        for k, v in enumerate(self.storages):
            if v.id == storage.id:
                return f"p{k}"
        self.storages.append(storage)
        return f"p{len(self.storages) - 1}"

    def fresh(self, prefix: str) -> str:
        """A name that nothing has yet."""
        self._count += 1
        return f"{prefix}{self._count}"


class TermEmitter:
    """Terms of one tile. `variables` gives the tile variable of each loop symbol that has lanes; other loops are
    scalars. `names` is how the kernel calls loop symbols. `wide`: whether positions may need more than 32 bits.
    """

    def __init__(
        self, lookups: Mapping[Symbol, Lookup], shape: tuple[int, ...], buffers: Buffers, wide: bool = True
    ) -> None:
        self.lookups, self.shape, self.buffers, self.wide = lookups, shape, buffers, wide
        self.names: dict[Symbol, str] = {}
        self.variables: dict[Symbol, TileVariable] = {}
        self.reduced: dict[int, str] = {}
        self.reduced_axes: frozenset[int] = frozenset()
        self.results: dict[int, str] = {}
        self.result_symbols: frozenset[Symbol] = frozenset()
        self.packed = False  # whether elements are kept as they are in memory, and widened wherever they are used
        self.scattered = False  # whether threads read what they need, however it lies, rather than exchange it
        self.passing: frozenset[int] = frozenset()  # storages that need not stay in the cache
        # Where lanes that are wrong are noted, with code and value, rather than reported at once.
        self.later: list[tuple[str, int, str]] | None = None
        self._deps: dict[Term, frozenset[Key]] = {}
        self._certain: dict[Term, bool] = {}
        self.turning: frozenset[Symbol] = frozenset()  # loops of sums, whose turns a thread may do one after the other
        self._sides: dict[tuple[Dim, ...], Symbol] = {}
        self._conditions: dict[Symbol, tuple[Dim, ...]] = {}

    # ------------------------------------------------------------ what terms depend on

    def deps(self, term: Term) -> frozenset[Key]:
        """The loop symbols and reductions that a term is a function of."""
        if term not in self._deps:
            self._deps[term] = self._dependencies(term)
        return self._deps[term]

    def _dependencies(self, term: Term) -> frozenset[Key]:
        if isinstance(term, Load):
            return self._of(term.index)
        if isinstance(term, Position):
            return self._of((term.expr,))
        if isinstance(term, Reduced):
            return frozenset([("reduced", term.key)])
        if isinstance(term, Result):
            return frozenset([*self.result_symbols, "result"])
        if isinstance(term, Apply):
            return frozenset[Key]().union(*map(self.deps, term.args))
        if isinstance(term, Guard):
            return self._of(term.conditions) | self.deps(term.inside) | self.deps(term.outside)
        return frozenset()

    def _of(self, exprs: Iterable[Dim]) -> frozenset[Key]:
        found: set[Key] = set()
        for e in exprs:
            for s in symbols(e):
                if s in self.lookups:
                    found |= self.deps(self.lookups[s].term)
                elif s in self._conditions:
                    found |= self._of(self._conditions[s])
                elif is_size(s):
                    self.buffers.sizes.add(s.key)
                    self.names[s] = s.key
                elif s in self.names:
                    found.add(s)
                else:
                    raise InternalError(f"the loop {s} has no name")
        return frozenset(found)

    def axes(self, deps: Iterable[Key]) -> frozenset[int]:
        """The axes of the tile along which something with these dependencies varies."""
        found: set[int] = set()
        for d in deps:
            if isinstance(d, Symbol) and d in self.variables:
                found.add(self.variables[d].axis)
            elif isinstance(d, tuple):
                found |= self.reduced_axes
        return frozenset(found)

    # ------------------------------------------------------------ terms

    def emit(self, term: Term, scope: Scope, guarding: Guarding = ()) -> str:
        """The name (or constant) of a term's tile."""
        if isinstance(term, Const):
            return spelling.literal(term.raw, term.dtype, len(self.shape))
        if isinstance(term, Reduced):
            return self.reduced[term.key]
        if isinstance(term, Result):
            return self.results[term.value.id]
        own = self._needed(guarding, term) if _reads(term) else ()
        return self._once((term, own), self.deps(term) | self._guards(own), scope, lambda s: self._text(term, s, own))

    def _needed(self, guarding: Guarding, term: Term) -> Guarding:
        """The guards of a term without those that change from turn to turn, where neither the term does nor anything
        can go wrong without them: a tap of a window may lie outside of the image, and its channel's scale is the same
        for all taps.
        """
        if not self.turning or not guarding or not self._is_certain(term):
            return guarding
        own = self.deps(term)
        return tuple(g for g in guarding if not (self._of(g[0]) & self.turning) - own)

    def _is_certain(self, term: Term) -> bool:
        """Whether a term can be computed wherever its loops are, whatever a guard around it says."""
        if term not in self._certain:
            self._certain[term] = self._computes_anywhere(term)
        return self._certain[term]

    def _computes_anywhere(self, term: Term) -> bool:
        if isinstance(term, (Load, Position)):
            (place,) = term.index if isinstance(term, Load) else (term.expr,)
            if symbols(place) & (self.lookups.keys() | self._conditions.keys()):
                return False
            return isinstance(term, Position) or (is_nonnegative(place) and is_less(place, term.value.t.size))
        if isinstance(term, Apply):
            by_zero = term.op in ("div", "mod", "fmod") and term.args[0].dtype.is_integer
            return not by_zero and all(map(self._is_certain, term.args))
        return isinstance(term, (Const, Reduced))

    def rounded(self, term: Term, scope: Scope, guarding: Guarding = ()) -> str:
        """A term, as what has steps takes it: a half that was computed in float32 is one again, as where it is stored.

        Else 41 / 41 might be less than 1.
        """
        name = self.emit(term, scope, guarding)
        exact = isinstance(term, (Load, Const)) or (isinstance(term, Apply) and term.op == "cast")
        if exact or term.dtype.name not in ("float16", "bfloat16"):
            return name
        return spelling.rounded(name, term.dtype)

    def _guards(self, guarding: Guarding) -> frozenset[Key]:
        return self._of(c for conditions, _ in guarding for c in conditions)

    def _once(self, key: object, deps: frozenset[Key], scope: Scope, make: object) -> str:
        """The name of what `make` spells, in the outermost scope where it can be computed."""
        for s in scope.chain():
            if key in s.known:
                return s.known[key]
        target = self._place(deps, scope)
        text = make(target)  # type: ignore[operator]
        name = self.buffers.fresh("t")
        target.lines.append(f"{name} = {text}")
        target.known[key] = name
        return name

    def _place(self, deps: frozenset[Key], scope: Scope) -> Scope:
        need = {d for d in deps if d != "result"}
        chain = scope.chain()
        have: list[set[Key]] = []
        total: set[Key] = set()
        for s in reversed(chain):
            total = total | s.available
            have.append(total)
        for s, known in zip(reversed(chain), have, strict=True):
            if need <= known:
                return s
        raise InternalError(f"a kernel needs {need - total} where they are not known")

    def _text(self, term: Term, scope: Scope, guarding: Guarding) -> str:
        if isinstance(term, Load):
            return self._load(term, scope, guarding)
        if isinstance(term, Position):
            return self._position(term, scope, guarding)
        if isinstance(term, Guard):
            return self._guard(term, scope, guarding)
        assert isinstance(term, Apply), term
        stepped = term.op not in SMOOTH and not (term.op == "cast" and term.dtype.is_float)
        args = [(self.rounded if stepped else self.emit)(a, scope, guarding) for a in term.args]
        operand = term.args[-1].dtype if term.op == "where" else term.args[0].dtype
        if term.op in ("div", "mod", "fmod") and operand.is_integer and not isinstance(term.args[1], Const):
            self._report(f"{args[1]} == 0", self.deps(term.args[1]), 4, "0", scope, guarding)
        return spelling.apply(term.op, args, term.dtype, operand, dict(term.attrs))

    def _position(self, term: Position, scope: Scope, guarding: Guarding) -> str:
        text = self.index(term.expr, scope, guarding)
        one = f"tl.full({spelling.ones(len(self.shape))}, 0, {spelling.computed(term.dtype)})"
        return f"{one} + {text}"

    def index(self, d: Dim, scope: Scope, guarding: Guarding = (), place: bool = False) -> str:
        """An index expression, which may be a place in a buffer; what it reads from memory is read first."""
        self._of((d,))
        self.buffers.numbers[d] = self.buffers.numbers.get(d, False) or not place
        for s in sorted(symbols(d) & self.lookups.keys(), key=lambda s: s.key):
            self.names[s] = self._lookup(s, scope, guarding)
        for s in sorted(symbols(d) & self._conditions.keys(), key=lambda s: s.key):
            holds = self._condition(self._conditions[s], True, scope)
            self.names[s] = f"tl.where({holds}, 0, 1)"
        return spelling.index(d, self.names)

    # ------------------------------------------------------------ masks

    def mask(
        self, deps: Iterable[Key], scope: Scope, guarding: Guarding = (), wider: Mapping[str, str] | None = None
    ) -> tuple[str | None, frozenset[int]]:
        """The lanes that count for something with these dependencies, and the axes of that mask. `wider` are masks to
        take in the place of others.
        """
        deps = frozenset(deps)
        variables = {self.variables[d] for d in deps if isinstance(d, Symbol) and d in self.variables}
        if any(isinstance(d, tuple) for d in deps):
            variables |= {v for v in self.variables.values() if v.axis in self.reduced_axes}
        found = sorted({(wider or {}).get(v.mask, v.mask) for v in variables if v.mask})
        axes = frozenset(v.axis for v in variables if v.mask)
        for conditions, holds in guarding:
            needs = self._of(conditions)
            found.append(self._condition(conditions, holds, scope))
            axes |= self.axes(needs)
        return " & ".join(found) or None, axes

    def _condition(self, conditions: tuple[Dim, ...], holds: bool, scope: Scope) -> str:
        def test(s: Scope) -> str:
            return " & ".join(f"({self._nonnegative(c, s)})" for c in conditions)

        name = self._once(("guard", conditions), self._of(conditions), scope, test)
        return name if holds else f"({name} == 0)"

    def _nonnegative(self, d: Dim, scope: Scope) -> str:
        """That an expression is at least 0, as a comparison of two that have no minus: Triton then sees for how many
        neighbours it is the same, and can still load them as one.
        """
        if isinstance(d, int):
            return str(d >= 0)
        less = Expr(tuple((m, c) for m, c in d.terms if c > 0 and m))
        more = Expr(tuple((m, -c) for m, c in d.terms if c < 0 and m))
        rest = d - less + more
        if not more.terms:
            return f"{self.index(less, scope)} >= {self.index(-rest, scope)}"
        return f"{self.index(more, scope)} < {self.index((less if less.terms else 0) + rest + 1, scope)}"

    def _guard(self, term: Guard, scope: Scope, guarding: Guarding) -> str:
        conditions = tuple(c for c in term.conditions if not isinstance(c, int))
        if any(isinstance(c, int) and c < 0 for c in term.conditions):
            return self.emit(term.outside, scope, guarding)
        if not conditions:
            return self.emit(term.inside, scope, guarding)
        one = self._one(conditions, term.inside, term.outside)
        if one is not None:
            inside, outside = (self.emit(t, scope, guarding) for t in one)
        else:
            inside = self.emit(term.inside, scope, (*guarding, (conditions, True)))
            outside = self.emit(term.outside, scope, (*guarding, (conditions, False)))
        return f"tl.where({self._condition(conditions, True, scope)}, {inside}, {outside})"

    # Rotary positions, and whatever else joins pieces of one tensor: both sides are the same function of elements that
    # lie some way apart. Then these are read once, from where the condition says, and computed with once.

    def _one(self, conditions: tuple[Dim, ...], inside: Term, outside: Term) -> tuple[Term, Term] | None:
        """Both sides of a guard in terms of loads that they share; None where they are too different."""
        for a, b in ((inside, outside), (_argument(inside), outside), (inside, _argument(outside))):
            both = self._joined(conditions, a, b, {}) if a is not None and b is not None else None
            if both is not None and both not in (a, b):
                return (
                    both if a is inside else replace(inside, args=(both,)),  # type: ignore[call-arg]
                    both if b is outside else replace(outside, args=(both,)),  # type: ignore[call-arg]
                )
        return None

    def _joined(
        self, conditions: tuple[Dim, ...], a: Term, b: Term, known: dict[tuple[Term, Term], Term | None]
    ) -> Term | None:
        """A term that is `a` where the conditions hold and `b` elsewhere, but for where it reads."""
        if (a, b) not in known:
            known[a, b] = self._join(conditions, a, b, known)
        return known[a, b]

    def _join(
        self, conditions: tuple[Dim, ...], a: Term, b: Term, known: dict[tuple[Term, Term], Term | None]
    ) -> Term | None:
        if a == b:
            return None if _guarded(a) else a
        if isinstance(a, Load) and isinstance(b, Load) and a.value is b.value and a.dtype is b.dtype:
            ((x,), (y,)) = a.index, b.index
            apart = y - x
            if not isinstance(apart, int) or symbols(x) & self.lookups.keys():
                return None
            return Load(a.dtype, a.value, (x + apart * self._side(conditions),))
        if isinstance(a, Apply) and isinstance(b, Apply) and (a.op, a.attrs, a.dtype) == (b.op, b.attrs, b.dtype):
            args = [self._joined(conditions, x, y, known) for x, y in zip(a.args, b.args, strict=True)]
            return replace(a, args=tuple(x for x in args if x)) if all(args) else None
        return None

    def _side(self, conditions: tuple[Dim, ...]) -> Expr:
        """0 where the conditions hold, else 1: a number in index expressions."""
        if conditions not in self._sides:
            self._sides[conditions] = symbol = Symbol(self.buffers.fresh("side"), 0, 1)
            self._conditions[symbol] = conditions
        return of(self._sides[conditions])

    # ------------------------------------------------------------ memory

    def _load(self, term: Load, scope: Scope, guarding: Guarding) -> str:
        if not self.packed:
            return spelling.widened(self._read(term, scope, guarding), term.dtype)
        key = ("read", term, guarding)
        deps = self.deps(term) | self._guards(guarding)
        return spelling.widened(self._once(key, deps, scope, lambda s: self._read(term, s, guarding)), term.dtype)

    def again(self, scope: Scope) -> None:
        """Forgets what has been computed in a scope from what was read there: it is computed again where it is needed,
        and meanwhile needs no registers. The compiler must not see that it is the same.
        """
        read = {k: name for k, name in scope.known.items() if isinstance(k, tuple) and k[0] == "read"}
        for (_, term, _), name in read.items():
            if term.dtype.bits == 16:
                scope.lines.append(f"{name} = ox_again({name})")
        scope.known = dict(read)

    def _read(self, term: Load, scope: Scope, guarding: Guarding) -> str:
        (address,) = term.index
        deps = self._of(term.index)
        if isinstance(term.value.t.size, int) and term.value.t.size == 0:  # it may have no address
            self.index(address, scope, guarding, place=True)  # whatever is looked up there is out of bounds
            nothing = spelling.literal(bytes(term.dtype.itemsize), term.dtype, len(self.shape))
            return f"{nothing}.to({spelling.stored(term.dtype)})"
        at, mask = self._address(term.value, address, deps, scope, guarding)
        for s in sorted(symbols(address) & self.lookups.keys(), key=lambda s: s.key):
            extent = self.lookups[s].extent  # a wrong index has become 0, where an empty buffer has nothing either
            if not isinstance(extent, int):
                some = f"({self.index(extent, scope)} > 0)"
                mask = f"{mask} & {some}" if mask else some
        if term.value.id in self.buffers.words:
            kind = spelling.stored(term.dtype)
            masked = f", mask={mask}, other=ox_turned({kind})" if mask else ""
            return f"ox_taken(tl.load({at}{masked}, cache_modifier='.cg'), {kind})"
        nothing = "0.0" if term.dtype.is_float else "0"
        masked = f", mask={mask}, other={nothing}" if mask else ""
        if self.scattered and term.dtype.name in SCATTERED:
            return f"ox_read({at}{masked})"
        return f"tl.load({at}{masked}{self._policy(term.value)})"

    def _policy(self, storage: Value) -> str:
        return ', eviction_policy="evict_first"' if storage.id in self.passing else ""

    def _address(
        self, storage: Value, address: Dim, deps: frozenset[Key], scope: Scope, guarding: Guarding
    ) -> tuple[str, str | None]:
        """Pointers, and the mask of those that may be followed; of equal shapes."""
        mask, axes = self.mask(deps, scope, guarding, self._between_rows(storage, address))
        text = self.index(address, scope, guarding, place=True)
        if not axes <= self.axes(deps):
            shape = tuple(n if a in axes else 1 for a, n in enumerate(self.shape))
            text = f"({text} + tl.zeros({shape}, tl.int32))"
        return f"{self.buffers.pointer(self.buffers.words.get(storage.id, storage))} + {text}", mask

    def _between_rows(self, storage: Value, address: Dim) -> dict[str, str]:
        """The masks of lanes along rows that are apart, each with one that lets what lies between two rows be touched
        too: its bound is one of vectors, and many elements are then read and written at once.
        """
        width, pitch = self.buffers.apart.get(storage.id, (0, 0))
        found: dict[str, str] = {}
        for s in symbols(address) if width else ():
            v, rest = self.variables.get(s), address - of(s)
            steps = [rest] if isinstance(rest, int) else [c for _, c in rest.terms]
            others = symbols(rest)
            plain = s not in others and not others & (self.lookups.keys() | self._conditions.keys())
            alone = plain and sum(other == v for other in self.variables.values()) == 1
            if v is not None and v.mask and v.size == width and alone and all(c % pitch == 0 for c in steps):
                found[v.mask] = f"({v.name} < {pitch})"
        return found

    def store(self, storage: Value, address: Dim, term: Term, scope: Scope) -> None:
        """Writes a term's tile to memory."""
        value = self.emit(term, scope)
        deps = self._of((address,))
        # Along an axis that the address lacks only some lanes count (rows of a product with one row, say, or none, as
        # in a buffer without elements, whose strides are 0).
        more = {d for d in self.deps(term) if not self.axes([d]) <= self.axes(deps)}
        mask, _ = self.mask(deps | more, scope, (), None if more else self._between_rows(storage, address))
        text = self.index(address, scope, place=True)
        if more or not self.axes(deps):
            axes = self.axes(more)
            shape = tuple(n if a in axes else 1 for a, n in enumerate(self.shape))
            text = f"({text} + tl.zeros({shape}, tl.int32))"
        at = f"{self.buffers.pointer(self.buffers.words.get(storage.id, storage))} + {text}"
        value = spelling.narrowed(value, storage.dtype)
        if storage.id in self.buffers.words:
            value = f"ox_given({value}, {spelling.stored(storage.dtype)})"
        masked = f", mask={mask}" if mask else ""
        scope.lines.append(f"tl.store({at}, {value}{masked}{self._policy(storage)})")

    def _lookup(self, s: Symbol, scope: Scope, guarding: Guarding) -> str:
        lookup = self.lookups[s]
        deps = self.deps(lookup.term)

        def make(target: Scope) -> str:
            value = self.emit(lookup.term, target, guarding)
            if lookup.inside:
                return f"({value}).to(tl.int64)" if self.wide else value
            extent = self.index(lookup.extent, target)
            at = self.buffers.fresh("d")
            target.lines.append(f"{at} = ox_wrapped({value}, {extent})")
            bad = f"({at} < 0) | ({at} >= {extent})"
            self._report(bad, deps, 3, value, target, guarding)
            return f"tl.where({bad}, 0, {at})"

        return self._once(("lookup", s, guarding), deps | self._guards(guarding), scope, make)

    def _report(self, bad: str, deps: frozenset[Key], code: int, value: str, scope: Scope, guarding: Guarding) -> None:
        """Writes down that lanes are `bad`, if they count."""
        self.buffers.reports = True
        mask, _ = self.mask(deps, scope, guarding)
        test = f"({bad}) & {mask}" if mask else bad
        if not (self.axes(deps) or mask):
            test = f"({test}) & tl.full({spelling.ones(len(self.shape))}, True, tl.int1)"
        if self.later is not None:
            self.later.append((test, code, value))
        else:
            scope.lines.append(f"ox_report(error, {test}, {code}, call, {value})")


def _argument(term: Term) -> Term | None:
    """What a function of one argument is applied to."""
    return term.args[0] if isinstance(term, Apply) and len(term.args) == 1 else None


def _guarded(term: Term) -> bool:
    """Whether part of a term may be read under conditions of its own alone."""
    return any(isinstance(t, Guard) for t in walk(term))


def _reads(term: Term) -> bool:
    """Whether a term reads memory (then where it is guarded, other elements are read)."""
    found = term.__dict__.get("_reads")
    if found is None:
        if isinstance(term, (Load, Position)):
            found = True
        elif isinstance(term, Apply):
            found = any(map(_reads, term.args))
        else:
            found = isinstance(term, Guard)
        term.__dict__["_reads"] = found
    return bool(found)
