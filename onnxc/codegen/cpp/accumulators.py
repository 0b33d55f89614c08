"""Reductions under way in a loop nest: their accumulators, as C++."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnxc.codegen.cpp import spelling, windows
from onnxc.codegen.cpp.terms import TermEmitter
from onnxc.codegen.cpp.writer import Scope
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim
from onnxc.loops.terms import Reduced, Reduction

LONG = 512  # numbers that an accumulator adds up, one after the other: the error of a sum grows with them
_COMBINE = {"sum": "{} + {}", "prod": "{} * {}", "max": "v_max({}, {})", "min": "v_min({}, {})"}


@dataclass
class Accumulator:
    """A reduction under way. `across`: its lanes are parts of one result (else each lane has a result,
    or all the same).
    """

    reduction: Reduction
    name: str
    lane: str
    across: bool

    @property
    def op(self) -> str:
        """How lanes are combined: of masks, where true is -1, the least is the greatest."""
        op = self.reduction.op
        return {"max": "min", "min": "max"}.get(op, op) if self.reduction.body.dtype is dtypes.boolean else op

    @property
    def identity(self) -> str:
        """A vector of what changes nothing."""
        return identity(self.reduction, self.lane)

    @property
    def place(self) -> str:
        """The integer of a position: as wide as a lane, so that one mask selects both."""
        return "i64" if self.lane in ("i64", "u64", "f64") else "i32"

    @property
    def is_rounded(self) -> bool:
        """Whether it adds up floats in any order, so that long sums are better made of parts."""
        r = self.reduction
        return r.op == "sum" and r.across is None and r.body.dtype.is_float

    def copy(self, k: int) -> str:
        """The name of the k-th of several accumulators."""
        return f"{self.name}_{k}" if k else self.name

    def combined(self, value: str, prefix: str = "") -> str:
        """The statement that adds a vector of values."""
        name = prefix + self.name
        return f"{name} = {_COMBINE[self.op].format(name, value)};"

    def declaration(self) -> str:
        """The statement that begins it."""
        if self.reduction.position is not None:
            start, at = self.identity, "{}"
            if self.reduction.body.dtype.is_float:
                start, at = f'bc<{self.lane}>(__builtin_nan(""))', f" = bc<{self.place}>(-1)"
            return f"V<{self.lane}> {self.name} = {start}; V<{self.place}> {self.name}_at{at};"
        return f"V<{self.lane}> {self.name} = {self.identity};"

    def accumulate(self, emitter: TermEmitter, scope: Scope, prefix: str) -> None:
        """Takes up the vector of values at the loops' position."""
        value = emitter.emit(self.reduction.body, scope)
        if self.reduction.position is not None:
            self._accumulate_position(emitter, value, scope, prefix)
            return
        if self.across:
            value = f"ox_part<{self.lane}>({value}, {self.identity}, lanes)"
        scope.lines.append(self.combined(value, prefix))

    def _accumulate_position(self, emitter: TermEmitter, value: str, scope: Scope, prefix: str) -> None:
        """The best element of each lane and its position; a NaN stays only at position 0, as in
        onnxruntime: a lane of floats begins with a NaN at -1. One of integers begins with the worst there is at 0.
        """
        assert self.reduction.position is not None
        own = spelling.lane_type(self.reduction.body.dtype)
        value = value if own == self.lane else f"conv<{self.lane}, {own}>({value})"
        position = emitter.position(self.reduction.position, scope, self.place)
        compare = "g" if self.reduction.op == "argmax" else "l"
        tests = [f"v_{compare}{'e' if self.reduction.attrs.get('last') else 't'}(x, y)"]
        if self.reduction.body.dtype.is_float:
            tests.append(f"(v_ne(y, y) & v_ne(at, V<{self.place}>{{}}))")
        part = f"take = ox_part<{self.place}>(take, V<{self.place}>{{}}, lanes); " if self.across else ""
        scope.lines.append(
            f"{{ const V<{self.lane}> x = {value}, y = {prefix}{self.name}; const V<{self.place}> at = {self.name}_at; "
            f"V<{self.place}> take = {' | '.join(tests)}; {part}"
            f"{prefix}{self.name} = v_sel(take, x, y); {self.name}_at = v_sel(take, {position}, at); }}"
        )

    def finish(self, emitter: TermEmitter, scope: Scope) -> None:
        """The result, by a name that later terms find."""
        r = self.reduction
        name = emitter.fresh("t")
        lane = spelling.lane_type(r.value.dtype)
        if r.position is not None:
            if not self.across:
                scope.lines.append(f"const vl {name} = conv<i64, {self.place}>({self.name}_at);")
            else:
                last = "true" if r.attrs.get("last") else "false"
                greatest = "true" if r.op == "argmax" else "false"
                best = f"h_arg<{self.lane}, {greatest}, {last}, {self.place}>({self.name}, {self.name}_at)"
                scope.lines.append(f"const vl {name} = bc<i64>({best});")
        else:
            result = f"bc<{self.lane}>(h_{self.op}<{self.lane}>({self.name}))" if self.across else self.name
            if r.op == "prod" and lane in ("f32", "f64"):  # the last product is not joined with what takes the result
                result = f"ox_own({result})"
            scope.lines.append(f"const V<{lane}> {name} = {result};")
        scope.terms[Reduced(r.value.dtype, r.key)] = name
        scope.available.add(("reduced", r.key))


@dataclass
class Parts:
    """Long sums, in parts: every `block` turns of one loop, what accumulators hold is added to sums of their own.

    Attributes:
        loop: which loop, from the innermost on.
        block: how many of its turns make a part.
    """

    sums: list[Accumulator]
    loop: int
    block: int

    def declared(self) -> list[str]:
        """The statements that begin the sums."""
        return [f"V<{a.lane}> {a.name}_sum = {a.identity};" for a in self.sums]

    def taken(self) -> list[str]:
        """Those that end a part."""
        return [f"{a.name}_sum = {a.name}_sum + {a.name}; {a.name} = {a.identity};" for a in self.sums]

    def ended(self) -> list[str]:
        """Those that end the sums."""
        return [f"{a.name} = {a.name}_sum;" for a in self.sums]


def parts_of(accumulators: Sequence[Accumulator], turns: Sequence[Dim]) -> Parts | None:
    """How to add up in parts, in loops of so many turns from the innermost on; None where sums are short. The parts of
    one sum are added up one after the other, however many they are.
    """
    sums = [a for a in accumulators if a.is_rounded]
    count = 1
    for at, n in enumerate(turns if sums else ()):
        if not isinstance(n, int) or count * n > LONG:
            return Parts(sums, at, max(1, LONG // count))
        count *= max(n, 1)
    return None


def lane_of(r: Reduction) -> str:
    """The type of a reduction's lanes: the best of a short integer is found among wider ones, as its position is wide."""
    lane = spelling.lane_type(r.body.dtype)
    return "i32" if r.position is not None and lane in ("i8", "u8", "i16", "u16") else lane


def identity(r: Reduction, lane: str) -> str:
    """A vector of what changes nothing in a reduction."""
    if r.op in windows.NEUTRAL:
        return f"bc<{lane}>({windows.NEUTRAL[r.op]})"
    greatest = r.op in ("max", "argmax")
    if r.body.dtype.is_float:
        return f"bc<{lane}>({'-' if greatest else ''}__builtin_inf())"
    if r.body.dtype is dtypes.boolean:
        return "vi{}" if greatest else "vi{} - 1"
    return f"bc<{lane}>(ox_least<{lane}>())" if greatest else f"bc<{lane}>(ox_greatest<{lane}>())"
