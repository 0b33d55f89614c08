"""What converting to halves needs to know of a graph: classes of ops, and what stays float32 all the same.

See `onnxc.passes.precision`, which converts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np

from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.graph import Graph, Node, Value
from onnxc.passes.ranges import ANY, source, value_ranges
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import constant_of

HALVES = {d.name: d for d in (dtypes.float16, dtypes.bfloat16)}
TEMPLATES = frozenset({"matmul", "conv", "attention", "attention_norm", "attention_gradient"})
# Operands that are multiplied, if not 2.
FACTORS = {"attention": 3, "attention_norm": 2, "attention_gradient": 4, "matmul_quantized": 1}
FOLLOWS = frozenset({
    "add", "sub", "mul", "div", "neg", "abs", "sign", "max", "min", "where", "copy", "sqrt", "tanh", "erf",
    "floor", "ceil", "round",
    "reshape", "transpose", "expand", "slice", "pad", "concat",
    "gather", "gather_elements", "gather_nd", "scatter_elements", "scatter_nd", "top_k",
    "reduce_max", "reduce_min", "window_max",
})  # fmt: skip
READS = frozenset({"argmax", "argmin", "isnan", "isinf"})  # a float, as it is, for another dtype
COMPARES = frozenset({"eq", "lt", "le"})  # in float32: constants do not move
_GROWS = "its results can be far larger than its argument"
SUM = "a sum grows with its terms"
_MAGNIFIES = "it magnifies errors of its argument"
FLOAT32: dict[str, str] = {
    **dict.fromkeys(("exp", "pow", "sinh", "cosh", "tan", "reduce_prod"), _GROWS),
    **dict.fromkeys(("reduce_sum", "window_sum", "cumsum", "conv_weights"), SUM),
    **dict.fromkeys(("log", "asin", "acos", "atan", "asinh", "acosh", "atanh", "mod", "fmod"), _MAGNIFIES),
    **dict.fromkeys(("sin", "cos"), "large arguments matter to the last digit"),
    "iota": "positions: a half does not hold large integers", "quantize": "steps are those of the float32 model",
    "matmul_quantized": "its weights stay packed integers, and its activations float32",
    "bitcast": "the bits of a float32",
    "scan": "the state of a recurrence would be rounded at every step",
}  # fmt: skip
SQUARE = "squares have twice the range"
COUNTS = "integers: a half does not hold large ones"
_EXPONENTIAL = "an exponential or a power without a bound"
_PASSES_ON = (FOLLOWS - {"tanh", "erf", "sign"}) | {"reduce_sum", "window_sum", "cumsum", "mod", "fmod", "cast"}
_PLAIN_VIEWS = frozenset({"reshape", "transpose", "expand", "slice"})


# ---------------------------------------------------------------- the dtype


@dataclass(frozen=True)
class Half:
    """float16 or bfloat16, and what numbers it holds."""

    dtype: DType

    @cached_property
    def largest(self) -> float:
        """The largest finite number."""
        return float(ml_dtypes.finfo(self.dtype.numpy).max)  # type: ignore[no-untyped-call]

    @cached_property
    def least(self) -> float:
        """The smallest number of full precision."""
        return float(ml_dtypes.finfo(self.dtype.numpy).smallest_normal)  # type: ignore[no-untyped-call]

    def convert(self, array: np.ndarray) -> np.ndarray:
        """An array in this dtype: what overflows is infinite."""
        with np.errstate(all="ignore"):
            return np.asarray(array).astype(self.dtype.numpy)

    def misfit(self, array: np.ndarray, each: bool = False) -> str:
        """Why an array cannot be in this dtype, or "": it overflows, or all of it (`each`: any of it) is too small."""
        if not array.size:
            return ""
        with np.errstate(all="ignore"):
            top = max(abs(float(array.min())), abs(float(array.max())))
            if not math.isfinite(top):
                top = float(np.max(np.abs(array), where=np.isfinite(array), initial=0.0))
            if top > self.largest and np.isinf(self.convert(np.asarray(top))):
                return f"a constant of {top:.6g} is beyond the range of {self.dtype}"
            low = np.abs(array[array != 0]).min(initial=math.inf) if each else top
        return f"a constant of {low:.6g} is below the range of {self.dtype}" if 0 < low < self.least else ""

    def exact(self, array: np.ndarray) -> bool:
        """Whether no element changes."""
        return np.array_equal(self.convert(array).astype(np.float32), array, equal_nan=True)


# ---------------------------------------------------------------- what is to stay float32


@dataclass(frozen=True)
class Taint:
    """Why a value must stay float32, and so must what is computed from it.

    A `hard` taint (numbers beyond the range) goes on until an op bounds it; a soft one (counts, exponentials) goes on
    only together with constants, and what is tainted too: a mask of integers times activations is an activation.
    """

    reason: str
    hard: bool = False

    @property
    def counts(self) -> bool:
        """Whether the value counts something."""
        return self.reason == COUNTS


class Analysis:
    """What is known of a graph before a dtype is chosen: stages, taints, and what wants float32 behind it."""

    def __init__(self, graph: Graph, half: Half) -> None:
        self.half = half
        self.uses = graph.uses()
        self.ranges = value_ranges(graph)
        self.stages: dict[int, int] = {}
        self.taints: dict[int, Taint] = {}
        self.misfits: dict[int, str] = {}  # of constants
        for node in graph.nodes:
            stage, taint = self._stage(node), self._taint(node)
            for v in node.outputs:
                self.stages[v.id] = stage
                if taint is not None and v.dtype is dtypes.float32:
                    self.taints[v.id] = taint
        self.precise: set[int] = set()  # nodes, by the id of their first output
        self.stored: set[int] = set()  # values that are in memory for certain
        for node in reversed(graph.nodes):
            self._demand(node)
            self.stored.update(v.id for v in node.outputs if self._leaves(v))

    # A stage is a stretch of the graph that may be one kernel. Odd ones begin with a template: what reduces its
    # result is in the next stage, as an epilogue has but a part of a row.

    def stage(self, v: Value) -> int:
        """The stage that a value is made in."""
        return self.stages.get(v.id, 0)

    def before(self, node: Node) -> int:
        """The last stage that a node reads from."""
        return max((self.stage(v) for v in node.operands), default=0)

    def _stage(self, node: Node) -> int:
        kind, last = lookup(node.op).kind, self.before(node)
        if kind is Kind.TEMPLATE:
            return last + 1 + last % 2
        if kind in (Kind.OPAQUE, Kind.CONTROL):
            return last + 2 - last % 2
        return last + last % 2 if kind is Kind.REDUCTION else last

    def _leaves(self, v: Value) -> bool:
        """Whether a value is in memory for certain: it is read in another stage than it is made in.

        What joins the results of several templates is a kernel of its own, too. Views have no place of their own.
        """
        own = self.stage(v)
        for reader in self.uses.get(v.id, ()):
            out = reader.outputs[0]
            if self.stages[out.id] > own or (reader.op == "concat" and own % 2):
                return True
            if reader.op in _PLAIN_VIEWS and out.id in self.stored:
                return True
        return False

    # ---- taints

    def _taint(self, node: Node) -> Taint | None:
        taint = self._own(node) or self._inherited(node)
        if taint is None or taint.counts or not node.outputs:
            return taint
        known = self.ranges.get(node.outputs[0].id, ANY)
        return taint if known.largest > self.half.largest else None

    def _own(self, node: Node) -> Taint | None:
        op = node.op
        if op == "constant":
            array: np.ndarray = node.attrs["value"]
            if node.output.dtype is not dtypes.float32:
                return None
            self.misfits[node.output.id] = why = self.half.misfit(array)
            return Taint(why, hard=True) if "beyond" in why else None
        if op == "iota" or (op == "cast" and is_count(node.operands[0])):
            return Taint(COUNTS)
        if op in ("exp", "sinh", "cosh", "reduce_prod") or (op == "pow" and not _is_small_power(node)):
            return Taint(_EXPONENTIAL) if self.half.dtype is dtypes.float16 else None
        return None

    def _inherited(self, node: Node) -> Taint | None:
        outer = node.op == "matmul" and node.operands[0].shape[-1] == 1  # positions times frequencies, say
        if node.op not in _PASSES_ON and not outer:
            return None
        read = [v for v in node.operands if v.dtype is dtypes.float32 and not self._limits(node, v)]
        if node.op == "div" and len(read) == 2:  # of another dtype it has no taint
            top, below = (self.taints.get(v.id) for v in read)
            return None if top is None or (below is not None and not (top.hard or top.counts)) else top
        own = [(self.taints.get(v.id), _is_constant(v)) for v in read]
        hard = [t for t, _ in own if t is not None and t.hard]
        soft = [t for t, _ in own if t is not None]
        if hard:
            return hard[0]
        return soft[0] if soft and all(t is not None or constant for t, constant in own) else None

    def _limits(self, node: Node, v: Value) -> bool:
        """True for a constant that is no result: x is seldom above the large number in min(x, large)."""
        known = self.ranges.get(v.id, ANY)
        return _is_constant(v) and ((node.op == "min" and known.low > 0) or (node.op == "max" and known.high < 0))

    def refusal(self, node: Node) -> str:
        """Why a template cannot multiply halves, or ""."""
        for v in node.operands[: FACTORS.get(node.op, 2)]:
            taint = self.taints.get(v.id)
            why = taint.reason if taint is not None else self.misfits.get(v.id, "")
            if why:
                return why
        return ""

    # ---- demands

    def wants(self, node: Node) -> bool:
        """Whether a node has to be computed in float32."""
        return bool(node.outputs) and node.outputs[0].id in self.precise

    def _demand(self, node: Node) -> None:
        """Marks what computes an operand of a node that wants float32, in the same stage."""
        to_integers = node.op == "cast" and node.attrs["to"].is_integer
        refused = node.op in TEMPLATES and bool(self.refusal(node))
        if not (node.op in ("sin", "cos", "tan") or to_integers or refused or self.wants(node)):
            return
        for v in node.operands:
            made = v.node
            if v.dtype is not dtypes.float32 or made is None or self.stage(v) != self.before(node):
                continue
            if made.op in FOLLOWS and lookup(made.op).kind in (Kind.POINTWISE, Kind.VIEW):
                self.precise.add(v.id)


def _is_constant(v: Value) -> bool:
    made = source(v).node
    return made is not None and made.op == "constant"


def is_count(v: Value) -> bool:
    """Whether a value is of integers that may be more than a half can count."""
    return bool(v.dtype.is_integer and v.dtype.bits > 8)


def _is_small_power(node: Node) -> bool:
    power = constant_of(node.operands[1])
    return power is not None and power.size > 0 and all(abs(float(x)) <= 3 for x in (power.min(), power.max()))
