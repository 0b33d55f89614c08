"""Emits scalar terms as vector expressions into scopes, each as far out as its operands allow."""

from __future__ import annotations

from collections.abc import Mapping

from onnxc.codegen.cpp import spelling
from onnxc.codegen.cpp.shape import lane_stride
from onnxc.codegen.cpp.writer import Scope, indent
from onnxc.errors import InternalError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, Symbol, of, symbols
from onnxc.ir.graph import Value
from onnxc.loops.terms import (
    Apply,
    Const,
    Guard,
    Load,
    Lookup,
    Position,
    Reduced,
    Result,
    Term,
    children,
    index_symbols,
)


class TermEmitter:
    """Writes terms into scopes. `vector` is the loop whose lanes a vector holds (None: one lane at a
    time).
    """

    def __init__(self, lookups: Mapping[Symbol, Lookup], vector: Symbol | None) -> None:
        self.lookups, self.vector = lookups, vector
        self.names: dict[Symbol, str] = {}
        self.buffers: list[Value] = []
        self.results: dict[int, str] = {}  # value id -> the name of a template's result
        self.results_level: object | None = None
        self._count = 0
        self._deps: dict[Term, frozenset[object]] = {}
        self.cached: dict[Term, str] = {}  # term -> cache array, once its phase has filled it
        self.cache_at: str = ""
        self.staged: dict[Term, str] = {}  # load -> where its vector lies in a tile

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
        return sorted(
            (s for s, n in self.names.items() if n == s.key and s.key[0] == "s"), key=lambda s: s.key
        )

    def index(self, d: Dim, scope: Scope) -> str:
        """An index expression, with the data-dependent indices in it computed first."""
        for s in sorted(symbols(d), key=lambda s: s.key):
            if s in self.lookups:
                self._lookup(s, scope)
                if self._varies(self.deps(self.lookups[s].term)):
                    raise InternalError(f"the data index {s} differs from lane to lane")
            elif s not in self.names:
                if s.key[0] != "s":
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
                elif s.key[0] != "s":
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
        if isinstance(term, Result):
            return self.results[term.value.id]
        target = self.place(self.deps(term), scope)
        name = self.fresh("t")
        if term in self.cached:
            lane = spelling.lane_type(term.dtype)
            target.lines.append(
                f"const V<{lane}> {name} = ldl({self.cached[term]} + {self.cache_at}, lanes);"
            )
        elif isinstance(term, Guard):
            self._guard(term, name, target)
        else:
            text = self._expression(term, target)
            target.lines.append(f"const V<{spelling.lane_type(term.dtype)}> {name} = {text};")
        target.terms[term] = name
        return name

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
        if isinstance(term, Position):
            return self.position(term.expr, scope)
        assert isinstance(term, Apply), term
        args = [self.emit(a, scope) for a in term.args]
        return spelling.apply(
            term.op,
            args,
            term.dtype,
            term.args[-1].dtype if term.op == "where" else term.args[0].dtype,
            dict(term.attrs),
        )

    def position(self, expr: Dim, scope: Scope, lane: str = "i64") -> str:
        """The vector of an index expression."""
        c = self.stride(expr)
        if c is None:
            each = f"({lane}){self._lane_address(expr, scope)}"
            return (
                f"[&] {{ V<{lane}> r{{}}; for (int i = 0; i < (int)lanes; i++) r[i] = {each}; return r; }}()"
            )
        base = f"bc<{lane}>(({lane}){self.index(expr, scope)})"
        if c == 0:
            return base
        step = "" if c == 1 else f" * bc<{lane}>(({lane}){self.index(c, scope)})"
        return f"({base} + ox_lanes<{lane}>(){step})"

    def stride(self, address: Dim) -> Dim | None:
        """Elements between neighbouring lanes; None where the lanes are not evenly spaced."""
        return 0 if self.vector is None else lane_stride(address, self.vector, self.lookups)

    def _lane_address(self, address: Dim, scope: Scope) -> str:
        """The address of lane `i`, for accesses that are not linear in the vector loop."""
        return self._at_lane(address, "i", scope)

    def _at_lane(self, expr: Dim, lane: str, scope: Scope) -> str:
        """An index expression at another lane than the first."""
        assert self.vector is not None
        varying = [
            s for s in symbols(expr) if s in self.lookups and self._varies(self.deps(self.lookups[s].term))
        ]
        for s in sorted(varying, key=lambda s: s.key):
            self._lookup(s, scope)
        names = {s: self.names[s] for s in (self.vector, *varying)}
        self.names |= {s: f"{n}[{lane}]" for s, n in names.items()} | {
            self.vector: f"({names[self.vector]} + {lane})"
        }
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
        stride = self.stride(address)
        if stride is None:
            lane, get = (
                spelling.lane_type(term.dtype),
                spelling.element(f"{p}[{self._lane_address(address, scope)}]", term.dtype),
            )
            return (
                f"[&] {{ V<{lane}> r{{}}; for (int i = 0; i < (int)lanes; i++) r[i] = {get}; return r; }}()"
            )
        return _load_text(
            f"{p} + {self.index(address, scope)}", stride, self.index(stride, scope), term.dtype, "lanes"
        )

    def store(self, storage: Value, address: Dim, value: str, scope: Scope) -> None:
        """Writes a vector to memory."""
        p = self.pointer(storage)
        stride = self.stride(address)
        dtype = storage.dtype
        if stride is None:
            put = spelling.put_element(f"{p}[{self._lane_address(address, scope)}]", f"{value}[i]", dtype)
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
        elif dtype.name in ("float16", "bfloat16"):
            line = f"ox_sthalf({at}, {value}, {self.index(stride, scope)}, (int)lanes);"
        elif stride == 1:
            line = f"stl({at}, {value}, lanes);"
        else:
            line = f"sts({at}, {value}, {self.index(stride, scope)}, (int)lanes);"
        scope.lines.append(line)

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
        """A guard that may differ between lanes: whole vectors where all agree, else lane by lane."""
        assert self.vector is not None
        loop, kind = self.names[self.vector], f"V<{spelling.lane_type(term.dtype)}>"
        inside = self._function(term.inside, "inside", kind, scope)
        outside = self._function(term.outside, "outside", kind, scope)
        test = " && ".join(f"{self._at_lane(c, 'i', scope)} >= 0" for c in term.conditions)
        one = f"({test} ? {inside}({loop} + i, Part{{1}}) : {outside}({loop} + i, Part{{1}}))[0]"
        lanewise = f"{{ {name} = {kind}{{}}; for (int i = 0; i < (int)lanes; i++) {name}[i] = {one}; }}"
        if any(self.stride(c) is None for c in term.conditions):
            scope.lines.append(lanewise)
            return
        lanes = ("0", "((int)lanes - 1)")
        ends = [[f"{self._at_lane(c, lane, scope)} >= 0" for lane in lanes] for c in term.conditions]
        every = " && ".join(t for pair in ends for t in pair)
        # a linear condition fails everywhere if it fails at both ends
        none = " || ".join(f"!({a} || {b})" for a, b in ends)
        scope.lines += [
            f"if ({every}) {name} = {inside}({loop}, lanes);",
            f"else if ({none}) {name} = {outside}({loop}, lanes);",
            f"else {lanewise}",
        ]

    def _function(self, term: Term, prefix: str, kind: str, scope: Scope) -> str:
        """A term as a C++ function of the vector loop's variable."""
        assert self.vector is not None
        name, loop = self.fresh(prefix), self.names[self.vector]
        body = scope.child(guarded=True)
        body.lanewise = True
        result = self.emit(term, body)
        head = f"const auto {name} = [&](const i64 {loop}, auto lanes) -> {kind} {{"
        scope.lines += [
            head,
            f"  (void){loop}; (void)lanes;",
            *indent(body.lines),
            f"  return {result};",
            "};",
        ]
        return name

    def _lookup(self, s: Symbol, scope: Scope) -> None:
        lookup = self.lookups[s]
        deps = self.deps(lookup.term)
        known = next((c.lookups[s] for c in self._visible(scope, deps) if s in c.lookups), None)
        if known is not None:
            self.names[s] = known
            return
        target = self.place(deps, scope)
        value = self.emit(lookup.term, target)
        name = self.fresh("d")
        extent = self.index(lookup.extent, target)
        if self._varies(deps):
            lane = spelling.lane_type(lookup.term.dtype)
            target.lines.append(f"const vl {name} = ox_indices<{lane}>(ctx, {value}, {extent}, (int)lanes);")
        else:
            target.lines.append(f"const i64 {name} = ox_index(ctx, (i64)({value})[0], {extent});")
        self.names[s] = target.lookups[s] = name


def _load_text(at: str, stride: Dim, step: str, dtype: DType, lanes: str) -> str:
    """The vector of elements at an address with a stride between lanes."""
    if dtype is dtypes.boolean:
        if stride == 1:
            return f"ox_ldbool({at}, {lanes})"
        if stride == 0:
            return f"bc<i32>(*({at}) ? -1 : 0)"
        return f"(conv<i32, i8>(lds((const i8 *)({at}), {step}, (int){lanes})) != 0)"
    if dtype.name in ("float16", "bfloat16"):
        return f"bc<f32>(ox_get(*({at})))" if stride == 0 else f"ox_ldhalf({at}, {step}, (int){lanes})"
    if stride == 0:
        return f"bc<{spelling.storage_type(dtype)}>(*({at}))"
    if stride == 1:
        return f"ldl({at}, {lanes})"
    return f"lds({at}, {step}, (int){lanes})"
