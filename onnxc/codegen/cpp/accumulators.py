"""Reductions under way in a loop nest: their accumulators, as C++."""

from __future__ import annotations

from dataclasses import dataclass

from onnxc.codegen.cpp import spelling, windows
from onnxc.codegen.cpp.terms import TermEmitter
from onnxc.codegen.cpp.writer import Scope
from onnxc.ir import dtypes
from onnxc.loops.terms import Reduced, Reduction

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
        return identity(self.reduction)

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
            return f"V<{self.lane}> {self.name}{{}}; vi {self.name}_at = bc<i32>(-1);"
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
        onnxruntime.
        """
        assert self.reduction.position is not None
        position = emitter.position(self.reduction.position, scope, "i32")
        compare = "v_gt" if self.reduction.op == "argmax" else "v_lt"
        tests = [f"ox_mask<{self.lane}>({compare}(x, y))", "(at < 0)"]
        if self.reduction.attrs.get("last"):
            tests.append(f"ox_mask<{self.lane}>(v_eq(x, y))")
        if self.reduction.body.dtype.is_float:
            tests.append(f"(ox_mask<{self.lane}>(v_ne(y, y)) & (at != 0))")
        part = "take = ox_part<i32>(take, vi{}, lanes); " if self.across else ""
        scope.lines.append(
            f"{{ const V<{self.lane}> x = {value}, y = {prefix}{self.name}; const vi at = {self.name}_at; "
            f"vi take = {' | '.join(tests)}; {part}"
            f"{prefix}{self.name} = ox_sel<{self.lane}>(take, x, y); {self.name}_at = take ? {position} : at; }}"
        )

    def finish(self, emitter: TermEmitter, scope: Scope) -> None:
        """The result, by a name that later terms find."""
        r = self.reduction
        name = emitter.fresh("t")
        lane = spelling.lane_type(r.value.dtype)
        if r.position is not None:
            if not self.across:
                scope.lines.append(f"const vl {name} = conv<i64, i32>({self.name}_at);")
            else:
                better = ">" if r.op == "argmax" else "<"
                last = "true" if r.attrs.get("last") else "false"
                scope.lines.append(
                    f"const vl {name} = bc<i64>(h_arg<{self.lane}, i32>({self.name}, {self.name}_at, {last}, "
                    f"[](auto x, auto y) {{ return x {better} y; }}));"
                )
        elif not self.across:
            scope.lines.append(f"const V<{lane}> {name} = {self.name};")
        else:
            scope.lines.append(f"const V<{lane}> {name} = bc<{self.lane}>(h_{self.op}<{self.lane}>({self.name}));")
        scope.terms[Reduced(r.value.dtype, r.key)] = name
        scope.available.add(("reduced", r.key))


def identity(r: Reduction) -> str:
    """A vector of what changes nothing in a reduction."""
    lane = spelling.lane_type(r.body.dtype)
    if r.op in windows.NEUTRAL:
        return f"bc<{lane}>({windows.NEUTRAL[r.op]})"
    if r.body.dtype.is_float:
        return f"bc<{lane}>({'-' if r.op == 'max' else ''}__builtin_inf())"
    if r.body.dtype is dtypes.boolean:
        return "vi{}" if r.op == "max" else "vi{} - 1"
    return f"bc<{lane}>(ox_least<{lane}>())" if r.op == "max" else f"bc<{lane}>(ox_greatest<{lane}>())"
