"""Emits scalar terms as vector expressions into scopes, each as far out as its operands allow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from onnxc.codegen.cpp import spelling
from onnxc.codegen.cpp.lane_steps import aligned_step
from onnxc.codegen.cpp.vector_loop import lane_stride, repeats
from onnxc.codegen.cpp.writer import Scope, indent
from onnxc.errors import InternalError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, Symbol, coefficient, of, symbols
from onnxc.ir.graph import Value
from onnxc.loops.loop_index import is_size
from onnxc.loops.nest import Store
from onnxc.loops.terms import (
    Apply,
    Const,
    Guard,
    Load,
    Lookup,
    Position,
    Reduced,
    Reduction,
    Result,
    Term,
    children,
    index_symbols,
    walk,
)

ONE = Const(dtypes.float32, np.float32(1).tobytes())
_FEW_DIVISIONS = 3  # of a lane's address: with more, a copy of it for each lane takes long to compile
UNROUNDED = frozenset({"add", "sub", "neg", "abs", "max", "min", "where", "copy", "floor", "ceil", "round", "sign"})


@dataclass(frozen=True)
class FlatParts:
    """An address: the same in all lanes, indices that are data and what each is multiplied by, the vector loop's factor."""

    rest: Dim
    steps: list[tuple[Symbol, Dim]]
    own: Dim


class TermEmitter:
    """Writes terms into scopes. `vector` is the loop whose lanes a vector holds (None: one lane at a
    time).
    """

    def __init__(self, lookups: Mapping[Symbol, Lookup], vector: Symbol | None) -> None:
        self.lookups, self.vector = lookups, vector
        self.names: dict[Symbol, str] = {}
        self.buffers: list[Value] = []
        self.results: dict[int, str] = {}  # value id -> the name of a template's result
        self._count = 0
        self._deps: dict[Term, frozenset[object]] = {}
        self.cached: dict[Term, str] = {}  # term -> cache array, once its phase has filled it
        self.cache_at: str = ""
        self.reductions: dict[int, Reduction] = {}  # of the kernel, by their keys
        self.tables: dict[Term, str] = {}  # term -> where its vector lies, computed before the loops
        self.places: dict[Dim, tuple[Dim, str]] = {}  # address -> what rows do not share of it, the table of the rest
        self.aligned = 0  # the vector's length, where the vector loop's variable is a multiple of it
        self.staged: dict[Term, str] = {}  # load -> where its vector lies in a tile
        self.only: Callable[[Scope], str] | None = None  # the test of the lanes `i` that may read
        self.exact = False  # a term has the same bits whatever is computed and stored beside it

    # ------------------------------------------------------------ names

    def fresh(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def name_loop(self, s: Symbol) -> str:
        """The C++ name of a loop variable."""
        if s not in self.names:
            self.names[s] = f"l{sum(n.startswith('l') for n in self.names.values())}"
        return self.names[s]

    def pointer(self, storage: Value) -> str:
        """The C++ name of a buffer."""
        for k, v in enumerate(self.buffers):
            if v.id == storage.id:
                return f"p{k}"
        self.buffers.append(storage)
        return f"p{len(self.buffers) - 1}"

    def size_symbols(self) -> list[Symbol]:
        """Dynamic dims that the kernel has used."""
        return sorted((s for s, n in self.names.items() if n == s.key and is_size(s)), key=lambda s: s.key)

    def index(self, d: Dim, scope: Scope) -> str:
        """An index expression, with the data-dependent indices in it computed first."""
        for s in sorted(symbols(d), key=lambda s: s.key):
            if s in self.lookups:
                self._lookup(s, scope)
                if self._varies(self.deps(self.lookups[s].term)):
                    raise InternalError(f"the data index {s} differs from lane to lane")
            elif s not in self.names:
                if not is_size(s):
                    raise InternalError(f"loop {s} is not open where it is used")
                self.names[s] = s.key
        return spelling.index(d, self.names)

    # ------------------------------------------------------------ where a term goes

    def deps(self, term: Term) -> frozenset[object]:
        """Loops and reductions that a term depends on."""
        if term not in self._deps:
            found: set[object] = set()
            for s in index_symbols(term):
                if s in self.lookups:
                    found |= self.deps(self.lookups[s].term)
                elif not is_size(s):
                    found.add(s)
            if isinstance(term, Reduced):
                found.add(("reduced", term.key))
            if isinstance(term, Result):
                found.add("result")
            for c in children(term):
                found |= self.deps(c)
            self._deps[term] = frozenset(found)
        return self._deps[term]

    def place(self, deps: frozenset[object], scope: Scope) -> Scope:
        """The outermost scope that knows everything a term depends on; never out of a guard."""
        chain = scope.chain()
        best = scope
        for k, candidate in enumerate(chain):
            known: set[object] = set()
            for s in chain[k:]:
                known |= s.available
            if not deps <= known:
                break
            best = candidate
            if candidate.guarded:
                break
        return best

    # ------------------------------------------------------------ emission

    def emit(self, term: Term, scope: Scope) -> str:
        """The name (or literal) of a term's vector in a scope."""
        if isinstance(term, Const):
            return spelling.literal(term.raw, term.dtype)
        found = self._find(term, scope)
        if found is not None:
            return found
        if isinstance(term, Reduced):
            raise InternalError("a reduction is used before it is computed")
        if isinstance(term, Result) and not self._is_product(term):
            return self.results[term.value.id]
        target = self.place(self.deps(term), scope)
        name = self.fresh("t")
        if term in self.tables or term in self.cached:
            at = self.tables.get(term) or f"{self.cached[term]} + {self.cache_at}"
            target.lines.append(f"const V<{spelling.lane_type(term.dtype)}> {name} = ldl({at}, lanes);")
        elif isinstance(term, Guard):
            self._guard(term, name, target)
        else:
            text = self._expression(term, target)
            text = f"ox_own({text})" if self._is_product(term) else text
            target.lines.append(f"const V<{spelling.lane_type(term.dtype)}> {name} = {text};")
        target.terms[term] = name
        return name

    def _is_product(self, term: Term) -> bool:
        """Whether a term ends in a product, which a compiler would join with a sum that it goes into, unrounded, and
        must not: by passes/round_products.py, or since bits would depend on whether both are in one kernel.
        """
        if not term.dtype.is_float or spelling.lane_type(term.dtype) not in ("f32", "f64"):
            return False
        if not self.exact:
            return isinstance(term, Apply) and (("rounded", True) in term.attrs or self._is_softmax(term))
        return isinstance(term, Result) or (isinstance(term, Apply) and term.op not in UNROUNDED)

    def _varies(self, deps: frozenset[object]) -> bool:
        """Whether lanes differ in more than their values being loaded side by side: it depends on the
        vector loop.
        """
        return self.vector is not None and self.vector in deps

    def _visible(self, scope: Scope, deps: frozenset[object]) -> list[Scope]:
        """Scopes whose results are valid here: lane-wise code sees nothing from outside that depends on
        the lane.
        """
        chain = scope.chain()
        if self._varies(deps):
            barrier = next((k for k, s in enumerate(chain) if s.lanewise), len(chain))
            return chain[: barrier + 1]
        return chain

    def _find(self, term: Term, scope: Scope) -> str | None:
        return next((s.terms[term] for s in self._visible(scope, self.deps(term)) if term in s.terms), None)

    def _expression(self, term: Term, scope: Scope) -> str:
        if isinstance(term, Load):
            return self._load(term, scope)
        if isinstance(term, Result):
            return self.results[term.value.id]
        if isinstance(term, Position):
            return self.position(term.expr, scope)
        assert isinstance(term, Apply), term
        if self._is_softmax(term):
            term = Apply(term.dtype, "mul", (term.args[0], Apply(term.dtype, "div", (ONE, term.args[1]))))
        args = [self.emit(a, scope) for a in term.args]
        attrs = dict(term.attrs)
        if term.op == "pow":
            attrs["even"] = not self._varies(self.deps(term.args[1]))
        return spelling.apply(
            term.op, args, term.dtype, term.args[-1].dtype if term.op == "where" else term.args[0].dtype, attrs
        )

    def _is_softmax(self, term: Apply) -> bool:
        """Whether a term is e^(x - max x) over the sum of such: which is 1 at least, so that its inverse, one for a
        whole row, does as well as a division.
        """
        if self.exact or term.op != "div" or term.dtype is not dtypes.float32 or not isinstance(term.args[1], Reduced):
            return False
        over, total = term.args[0], self.reductions.get(term.args[1].key)
        if total is None or total.op != "sum" or total.body != over:
            return False
        below = over.args[0] if isinstance(over, Apply) and over.op == "exp" else None
        if not isinstance(below, Apply) or below.op != "sub" or not isinstance(below.args[1], Reduced):
            return False
        most = self.reductions.get(below.args[1].key)
        return most is not None and most.op == "max" and most.body == below.args[0]

    def position(self, expr: Dim, scope: Scope, lane: str = "i64") -> str:
        """The vector of an index expression."""
        c = self.stride(expr)
        if c is None:
            each = f"({lane}){self.lane_address(expr, scope)}"
            return self._by_lane(lane, each)
        base = f"bc<{lane}>(({lane}){self.index(expr, scope)})"
        if c == 0:
            return base
        step = "" if c == 1 else f" * bc<{lane}>(({lane}){self.index(c, scope)})"
        return f"({base} + ox_lanes<{lane}>(){step})"

    def stride(self, address: Dim) -> Dim | None:
        """Elements between neighbouring lanes; None where the lanes are not evenly spaced."""
        if self.vector is None:
            return 0
        step = lane_stride(address, self.vector, self.lookups)
        if step is not None or not self.aligned or self._varies_by_data(address):
            return step
        return aligned_step(address, self.vector, self.aligned)

    def _varies_by_data(self, d: Dim) -> bool:
        """Whether an index differs from lane to lane by what is read."""
        return any(s in self.lookups and self._varies(self.deps(self.lookups[s].term)) for s in symbols(d))

    def lane_address(self, address: Dim, scope: Scope) -> str:
        """The address of lane `i`, for accesses that are not linear in the vector loop."""
        return self._at_lane(address, "i", scope)

    def _at_lane(self, expr: Dim, lane: str, scope: Scope) -> str:
        """An index expression at another lane than the first."""
        assert self.vector is not None
        varying = [s for s in symbols(expr) if s in self.lookups and self._varies(self.deps(self.lookups[s].term))]
        for s in sorted(varying, key=lambda s: s.key):
            self._lookup(s, scope)
        names = {s: self.names[s] for s in (self.vector, *varying)}
        self.names |= {s: f"{n}[{lane}]" for s, n in names.items()} | {self.vector: f"({names[self.vector]} + {lane})"}
        others = {s: self.names[s] for s in varying}
        text = self._index_with(expr, others, scope)
        self.names |= names
        return text

    def _index_with(self, expr: Dim, known: dict[Symbol, str], scope: Scope) -> str:
        for s in sorted(symbols(expr) - known.keys(), key=lambda s: s.key):
            self.index(of(s), scope)
        return spelling.index(expr, self.names)

    def _load(self, term: Load, scope: Scope) -> str:
        p = self.pointer(term.value)
        (address,) = term.index
        if term in self.staged:
            return _load_text(self.staged[term], 1, "1", term.dtype, "Full{}")
        if self.only is not None:
            kind, place = spelling.lane_type(term.dtype), f"{p}[{self.lane_address(address, scope)}]"
            return self._by_lane(kind, f"{self.only(scope)} ? {spelling.element(place, term.dtype)} : ({kind})0")
        stride = self.stride(address)
        if stride is None and (times := self._repeats(term, scope)):
            return f"ld_repeat<{times}>({p} + {self.index(address, scope)}, lanes, all_lanes{{}})"
        if stride is None:
            flat = self._flat_address(address, scope)
            place = f"({p} + {flat[0]})[{flat[1]}[i]]" if flat else f"{p}[{self.lane_address(address, scope)}]"
            return self._by_lane(spelling.lane_type(term.dtype), spelling.element(place, term.dtype))
        return _load_text(f"{p} + {self.index(address, scope)}", stride, self.index(stride, scope), term.dtype, "lanes")

    def _flat_address(self, address: Dim, scope: Scope) -> tuple[str, str] | None:
        """Where all lanes begin, and the vector of what each adds, for a place that several indices make up; None where
        it is no sum of them.
        """
        if address in self.places:
            rest, table = self.places[address]
            return self.index(rest, scope), table
        parts = self.flat_parts(address)
        if parts is None or (len(parts.steps) < 2 and parts.own == 0):
            return None
        name = self.fresh("at")
        scope.lines.append(f"const vl {name} = {self.flat_sum(parts, scope)};")
        return self.index(parts.rest, scope), name

    def flat_parts(self, address: Dim) -> FlatParts | None:
        """An address as a sum; None where it is none."""
        assert self.vector is not None
        varying = [s for s in symbols(address) if s in self.lookups and self._varies(self.deps(self.lookups[s].term))]
        steps, own = list[tuple[Symbol, Dim]](), coefficient(address, self.vector)
        if own is None:
            return None
        rest = address - of(self.vector) * own
        for s in sorted(varying, key=lambda s: s.key):
            c = coefficient(address, s)
            if c is None:
                return None
            rest = rest - of(s) * c
            steps.append((s, c))
        return None if symbols(rest) & {self.vector, *varying} else FlatParts(rest, steps, own)

    def flat_sum(self, parts: FlatParts, scope: Scope) -> str:
        """The vector of what the lanes add."""
        assert self.vector is not None
        texts = list[str]()
        for s, c in parts.steps:
            data = self.data_index(s, scope)
            if data.startswith("("):  # in a table, of which the name is the place
                data = f"ldl({data}, lanes)"
            texts.append(data if c == 1 else f"{data} * bc<i64>({self.index(c, scope)})")
        if parts.own != 0:
            lane = f"(bc<i64>({self.names[self.vector]}) + ox_lanes<i64>())"
            texts.append(lane if parts.own == 1 else f"{lane} * bc<i64>({self.index(parts.own, scope)})")
        return " + ".join(texts)

    @staticmethod
    def _by_lane(kind: str, each: str, is_long: bool = False) -> str:
        """The vector of an expression in the lane `i`; one that `is_long`, or divides often, is not written out for each
        lane.
        """
        lanes = "lane_by_lane" if is_long or _divisions(each) > _FEW_DIVISIONS else "some_lanes"
        return f"{lanes}<{kind}>(lane_lo(lanes), (int)lanes, [&](int i) OX_LAMBDA {{ return {each}; }})"

    def _repeats(self, term: Load, scope: Scope) -> int | None:
        """How many lanes in a row read the same element. A function that is called for single lanes may begin in the
        middle of such a run.
        """
        if not self.aligned or term.dtype is dtypes.boolean or spelling.is_narrow(term.dtype):
            return None
        return None if any(s.lanewise for s in scope.chain()) else repeats(term.index[0], self.vector)

    def store(self, store: Store, values: list[str], scope: Scope) -> None:
        """Writes a vector to memory: the term's value. (That of a bool may be a byte: `masks.py`.) Several vectors are
        those of as many neighbouring addresses, whose lanes take turns.
        """
        dtype = store.term.dtype if store.value.dtype is dtypes.boolean else store.value.dtype
        if len(values) > 1 and not spelling.is_narrow(dtype) and dtype is not dtypes.boolean:
            at = f"{self.pointer(store.value)} + {self.index(store.address, scope)}"
            scope.lines.append(f"st_turns({at}, lanes, {', '.join(values)});")
            return
        for k, value in enumerate(values):
            self._store_vector(store, store.address + k, value, dtype, scope)

    def fetch(self, store: Store, scope: Scope) -> None:
        """Fetches the line of a store for writing; nothing where its lanes do not lie side by side."""
        if self.stride(store.address) == 1:
            scope.lines.append(f"ox_ahead({self.pointer(store.value)} + {self.index(store.address, scope)}, 0);")

    def _store_vector(self, store: Store, address: Dim, value: str, dtype: DType, scope: Scope) -> None:
        p, stride = self.pointer(store.value), self.stride(address)
        if stride is None:
            put = spelling.put_element(f"{p}[{self.lane_address(address, scope)}]", f"{value}[i]", dtype)
            scope.lines.append(f"for (int i = 0; i < (int)lanes; i++) {put};")
            return
        at = f"{p} + {self.index(address, scope)}"
        if stride == 0:
            stride = 1  # one lane
        if dtype is dtypes.boolean:
            line = (
                f"ox_stbool({at}, {value}, lanes);"
                if stride == 1
                else f"sts({at}, conv<u8, i32>({value} & 1), {self.index(stride, scope)}, (int)lanes);"
            )
        elif spelling.is_narrow(dtype):
            place = "lanes" if stride == 1 else f"{self.index(stride, scope)}, (int)lanes"
            line = f"ox_stnarrow({at}, {value}, {place});"
        elif stride == 1:
            line = f"stl({at}, {value}, lanes);"
        else:
            line = f"sts({at}, {value}, {self.index(stride, scope)}, (int)lanes);"
        scope.lines.append(line)
        if store.ahead and stride == 1:
            scope.lines.append(f"ox_ahead({at}, {store.ahead});")

    def _guard(self, term: Guard, name: str, scope: Scope) -> None:
        scope.lines.append(f"V<{spelling.lane_type(term.dtype)}> {name};")
        if any(self.stride(c) != 0 for c in term.conditions):
            self._lanewise_guard(term, name, scope)
            return
        tests = " && ".join(f"{self.index(c, scope)} >= 0" for c in term.conditions)
        inside, outside = scope.child(guarded=True), scope.child(guarded=True)
        inside.lines.append(f"{name} = {self.emit(term.inside, inside)};")
        outside.lines.append(f"{name} = {self.emit(term.outside, outside)};")
        scope.lines += [f"if ({tests}) {{", *indent(inside.lines), "} else {", *indent(outside.lines), "}"]

    def _lanewise_guard(self, term: Guard, name: str, scope: Scope) -> None:
        """A guard that may differ between lanes: whole vectors where all agree, else the lanes on either side; lane
        by lane where they are no range or cannot be told apart so.
        """
        assert self.vector is not None
        loop, kind = self.names[self.vector], f"V<{spelling.lane_type(term.dtype)}>"
        if self._has_scattered_lanes(term):
            self._scattered_guard(term, name, kind, scope)
            return
        inside = self._function(term.inside, "inside", kind, scope)
        outside = self._function(term.outside, "outside", kind, scope)
        strides = [self.stride(c) for c in term.conditions]
        if not all(isinstance(c, int) for c in strides):
            test = " && ".join(f"{self._at_lane(c, 'i', scope)} >= 0" for c in term.conditions)
            one = f"({test} ? {inside}({loop} + i, Part{{1}}) : {outside}({loop} + i, Part{{1}}))[0]"
            each = "for (int i = lane_lo(lanes); i < (int)lanes; i++)"
            scope.lines.append(f"{{ {name} = {kind}{{}}; {each} {name}[i] = {one}; }}")
            return
        lo, hi = self.fresh("lo"), self.fresh("hi")
        scope.lines.append(f"i64 {lo} = lane_lo(lanes), {hi} = (int)lanes;")
        for condition, c in zip(term.conditions, strides, strict=True):
            scope.lines.append(_narrowed(self.index(condition, scope), c, lo, hi))
        some = self._some_lanes(term, inside, outside, (lo, hi))
        scope.lines += [
            f"if ({lo} == lane_lo(lanes) && {hi} == (int)lanes) {name} = {inside}({loop}, lanes);",
            f"else if ({lo} >= {hi}) {name} = {outside}({loop}, lanes);",
            f"else {name} = {some};",
        ]

    def _has_scattered_lanes(self, term: Guard) -> bool:
        """Whether the lanes of a guard are no range, and both sides can be computed in all lanes but for what they read."""
        if self.only is not None or all(isinstance(self.stride(c), int) for c in term.conditions):
            return False
        if any(s in self.lookups for s in index_symbols(term)):
            return False  # the test itself would load
        parts = [t for side in (term.inside, term.outside) for t in walk(side)]
        return not any(
            isinstance(t, Guard)
            or any(s in self.lookups for s in index_symbols(t))
            or (isinstance(t, Apply) and t.op in ("div", "mod", "fmod") and t.dtype.is_integer)
            for t in parts
        )

    def _scattered_guard(self, term: Guard, name: str, kind: str, scope: Scope) -> None:
        """Both sides as whole vectors, of which each lane reads for the one that counts in it alone."""
        assert self.vector is not None
        loop = self.names[self.vector]

        def test(scope: Scope) -> str:
            return "(" + " && ".join(f"{self._at_lane(c, 'i', scope)} >= 0" for c in term.conditions) + ")"

        self.only = test
        inside = self._function(term.inside, "inside", kind, scope)
        self.only = lambda scope: f"!{test(scope)}"
        outside = self._function(term.outside, "outside", kind, scope)
        self.only = None
        mask = self._by_lane("i32", f"{test(scope)} ? -1 : 0")
        lane = spelling.lane_type(term.dtype)
        scope.lines.append(f"{name} = ox_sel<{lane}>({mask}, {inside}({loop}, lanes), {outside}({loop}, lanes));")

    def _some_lanes(self, term: Guard, inside: str, outside: str, ends: tuple[str, str]) -> str:
        """The vector of a guard that holds in lanes lo <= i < hi."""
        assert self.vector is not None
        (lo, hi), loop, lane = ends, self.names[self.vector], spelling.lane_type(term.dtype)
        signs = {c > 0 for c in map(self.stride, term.conditions) if isinstance(c, int) and c != 0}
        rest = "lanes"
        if self._reads(term.outside):
            rest = f"Range{{lane_lo(lanes), (int){lo}}}" if signs == {True} else f"Range{{(int){hi}, (int)lanes}}"
        if self._may_fail(term) or (self._reads(term.outside) and len(signs) != 1):
            one = f"({lo} <= i && i < {hi} ? {inside}({loop} + i, Part{{1}}) : {outside}({loop} + i, Part{{1}}))[0]"
            loads = (t.index[0] for t in walk(term) if isinstance(t, Load))
            return self._by_lane(lane, one, any(_divisions(str(a)) > _FEW_DIVISIONS for a in loads))
        both = f"{inside}({loop}, Range{{(int){lo}, (int){hi}}}), {outside}({loop}, {rest})"
        return f"v_sel(range_mask<{lane}>({lo}, {hi}, all_lanes{{}}), {both})"

    def _reads(self, term: Term) -> bool:
        return any(isinstance(t, Load) and self.stride(t.index[0]) != 0 for t in walk(term))

    def _may_fail(self, term: Guard) -> bool:
        """Whether a lane must not be computed where it does not count: it reads an index that is data, or divides
        integers; and whether it reads what has no access by a range of lanes.
        """
        for t in walk(term):
            if any(s in self.lookups for s in index_symbols(t)):
                return True
            if isinstance(t, Apply) and t.op in ("div", "mod", "fmod") and t.dtype.is_integer:
                return True
            if isinstance(t, Load) and (t.dtype is dtypes.boolean or spelling.is_narrow(t.dtype)):
                return True
            if isinstance(t, Load) and self.stride(t.index[0]) is None:
                return True
        return False

    def _function(self, term: Term, prefix: str, kind: str, scope: Scope) -> str:
        """A term as a C++ function of the vector loop's variable."""
        assert self.vector is not None
        name, loop = self.fresh(prefix), self.names[self.vector]
        body = scope.child(guarded=True)
        body.lanewise = True
        result = self.emit(term, body)
        leaf = not any(isinstance(t, Guard) for t in walk(term))  # nested ones would grow with every level
        head = f"const auto {name} = [&](const i64 {loop}, auto lanes){' OX_LAMBDA' if leaf else ''} -> {kind} {{"
        scope.lines += [
            head,
            f"  (void){loop}; (void)lanes;",
            *indent(body.lines),
            f"  return {result};",
            "};",
        ]
        return name

    def data_index(self, s: Symbol, scope: Scope) -> str:
        """The vector of an index that is data."""
        self._lookup(s, scope)
        return self.names[s]

    def _lookup(self, s: Symbol, scope: Scope) -> None:
        lookup = self.lookups[s]
        deps = self.deps(lookup.term)
        known = next((c.lookups[s] for c in self._visible(scope, deps) if s in c.lookups), None)
        if known is not None:
            self.names[s] = known
            return
        target = self.place(deps, scope)
        same = (x for x, n in target.lookups.items() if self.lookups[x] == replace(lookup, symbol=x))
        if (other := next(same, None)) is not None:
            self.names[s] = target.lookups[s] = target.lookups[other]
            return
        value = self.emit(lookup.term, target)
        name = self.fresh("d")
        lane = spelling.lane_type(lookup.term.dtype)
        if lookup.inside:
            kind, text = ("vl", f"conv<i64, {lane}>({value})") if self._varies(deps) else ("i64", f"(i64)({value})[0]")
            target.lines.append(f"const {kind} {name} = {text};")
            self.names[s] = target.lookups[s] = name
            return
        extent = self.index(lookup.extent, target)
        if self._varies(deps):
            target.lines.append(f"const vl {name} = ox_indices<{lane}>(ctx, {value}, {extent}, (int)lanes);")
        else:
            target.lines.append(f"const i64 {name} = ox_index(ctx, (i64)({value})[0], {extent});")
        self.names[s] = target.lookups[s] = name


def _divisions(text: str) -> int:
    """How many divisions and remainders an expression has, as it is shown or spelled."""
    return sum(text.count(op) for op in ("//", "%", "ox_div(", "ox_mod("))


def _narrowed(condition: str, stride: Dim | None, lo: str, hi: str) -> str:
    """The statement that keeps the lanes in which a condition holds; it is linear in the lanes."""
    if stride == 0:
        return f"if ({condition} < 0) {hi} = {lo};"
    assert isinstance(stride, int)
    if stride > 0:
        return f"{lo} = ox_max({lo}, -{f'ox_div({condition}, {stride})' if stride > 1 else condition});"
    return f"{hi} = ox_min({hi}, {f'ox_div({condition}, {-stride})' if stride < -1 else condition} + 1);"


def _load_text(at: str, stride: Dim, step: str, dtype: DType, lanes: str) -> str:
    """The vector of elements at an address with a stride between lanes."""
    if dtype is dtypes.boolean:
        if stride == 1:
            return f"ox_ldbool({at}, {lanes})"
        if stride == 0:
            return f"bc<i32>(*({at}) ? -1 : 0)"
        return f"(conv<i32, i8>(lds((const i8 *)({at}), {step}, (int){lanes})) != 0)"
    if spelling.is_narrow(dtype):
        if stride == 0:
            return f"bc<{spelling.lane_type(dtype)}>(ox_get(*({at})))"
        return f"ox_ldnarrow({at}, {lanes})" if stride == 1 else f"ox_ldnarrow({at}, {step}, (int){lanes})"
    if stride == 0:
        return f"bc<{spelling.storage_type(dtype)}>(*({at}))"
    if stride == 1:
        return f"ldl({at}, {lanes})"
    return f"lds({at}, {step}, {lanes})"
