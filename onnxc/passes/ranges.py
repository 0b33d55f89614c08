"""Bounds of what floats may hold, as far as constants and the ops themselves tell: interval arithmetic over a graph.

Infinite bounds stand for what is not known. NaN is left out: a bound holds for the elements that are numbers.

>>> from onnxc.ir import dtypes
>>> from onnxc.ir.types import TensorType
>>> from onnxc.primitives.builder import Builder
>>> b = Builder()
>>> x = b.input(TensorType(dtypes.float32, (4,)))
>>> y = b.sigmoid(x)
>>> value_ranges(b.graph([y]))[y.id]
Range(low=0.0, high=1.0)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from onnxc.ir import dtypes
from onnxc.ir.graph import Graph, Node, Value
from onnxc.primitives.builder import constant_of

INF = math.inf


@dataclass(frozen=True)
class Range:
    """All elements lie in [low, high]."""

    low: float = -INF
    high: float = INF

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high))


ANY = Range()
Rule = Callable[[Node, Sequence[Range]], Range]


def value_ranges(graph: Graph) -> dict[int, Range]:
    """The range of each float of a graph of primitives, by id; nothing is said of its regions."""
    found: dict[int, Range] = {}
    for node in graph.nodes:
        rule = _RULES.get(node.op)
        if rule is None or len(node.outputs) != 1 or not node.output.dtype.is_float:
            continue
        made = rule(node, [found.get(v.id, _integers(v)) for v in node.operands])
        if made != ANY and not (math.isnan(made.low) or math.isnan(made.high)):
            found[node.output.id] = made
    return found


def _integers(v: Value) -> Range:
    if v.dtype is dtypes.boolean:
        return Range(0, 1)
    if v.dtype.is_integer and v.dtype.bits <= 16:
        top = 2 ** (v.dtype.bits - (v.dtype.kind == "int"))
        return Range(-top if v.dtype.kind == "int" else 0, top - 1)
    return ANY


def _hull(ranges: Iterable[Range]) -> Range:
    found = list(ranges)
    return Range(min(r.low for r in found), max(r.high for r in found))


def _product(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b  # an infinite bound is a large number


def _corners(op: Callable[[float, float], float], a: Range, b: Range) -> Range:
    ends = [op(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    return Range(min(ends), max(ends))


def _constant(node: Node, _: Sequence[Range]) -> Range:
    array: np.ndarray = node.attrs["value"]
    if not array.size:
        return ANY
    with np.errstate(all="ignore"):
        low, high = float(array.min()), float(array.max())
        if math.isnan(low):
            known = array[~np.isnan(array)]
            return Range(float(known.min()), float(known.max())) if known.size else ANY
    return Range(low, high)


def _mul(node: Node, r: Sequence[Range]) -> Range:
    if node.operands[0] is node.operands[1]:
        top = _product(r[0].largest, r[0].largest)
        return Range(0.0, top)
    return _corners(_product, *r)


def _div(node: Node, r: Sequence[Range]) -> Range:
    a, b = r
    if b.low > 0 or b.high < 0:
        return _corners(lambda x, y: 0.0 if math.isinf(y) or x == 0 else x / y, a, b)
    return Range(0.0, INF) if a.low >= 0 and b.low >= 0 else ANY


def source(v: Value) -> Value:
    """What a chain of reshapes and expansions shows."""
    while v.node is not None and v.node.op in ("reshape", "expand"):
        v = v.node.operands[0]
    return v


def _meets(y: Value, x: Value, axes: Sequence[int]) -> bool:
    """Whether each element of x meets its own of a reduction: y has the axes that it lacks, of size 1 or expanded."""
    while y.node is not None and y.node.op == "expand":
        y = y.node.operands[0]
    return y.shape == tuple(1 if k in axes else d for k, d in enumerate(x.shape)) or y.t.size == 1


def _sub(node: Node, r: Sequence[Range]) -> Range:
    """Less its own maximum, nothing is above zero."""
    x, y = node.operands
    top = source(y).node
    high = r[0].high - r[1].low
    if top is not None and top.op == "reduce_max" and top.operands[0] is x and _meets(y, x, top.attrs["axes"]):
        high = min(high, 0.0) if not math.isnan(high) else 0.0
    return Range(r[0].low - r[1].high, high)


def _exponential(x: float) -> float:
    return math.exp(x) if x < 709 else INF


def _abs(node: Node, r: Sequence[Range]) -> Range:
    (x,) = r
    return Range(max(0.0, x.low, -x.high), x.largest)


def _sum(node: Node, r: Sequence[Range]) -> Range:
    return Range(0.0 if r[0].low >= 0 else -INF, 0.0 if r[0].high <= 0 else INF)


def _log(node: Node, r: Sequence[Range]) -> Range:
    return Range(-INF, math.log(r[0].high) if r[0].high > 0 else -INF)


def _iota(node: Node, _: Sequence[Range]) -> Range:
    size = node.attrs["size"]
    return Range(0.0, float(max(size - 1, 0)) if isinstance(size, int) else INF)


def _pow(node: Node, r: Sequence[Range]) -> Range:
    power = constant_of(node.operands[1])
    even = power is not None and power.size == 1 and float(power.reshape(-1)[0]) % 2 == 0
    return Range(0.0, INF) if even or r[0].low >= 0 else ANY


def _first(node: Node, r: Sequence[Range]) -> Range:
    return r[0]


def _all(node: Node, r: Sequence[Range]) -> Range:
    return _hull(r)


def _within(low: float, high: float) -> Rule:
    return lambda node, r: Range(low, high)


_RULES: dict[str, Rule] = {
    "constant": _constant, "iota": _iota, "cast": _first, "copy": _first,
    "neg": lambda n, r: Range(-r[0].high, -r[0].low), "abs": _abs, "sign": _within(-1.0, 1.0),
    "add": lambda n, r: Range(r[0].low + r[1].low, r[0].high + r[1].high), "sub": _sub, "mul": _mul, "div": _div,
    "max": lambda n, r: Range(max(r[0].low, r[1].low), max(r[0].high, r[1].high)),
    "min": lambda n, r: Range(min(r[0].low, r[1].low), min(r[0].high, r[1].high)),
    "where": lambda n, r: _hull(r[1:]),
    "exp": lambda n, r: Range(_exponential(r[0].low), _exponential(r[0].high)), "log": _log, "pow": _pow,
    "sqrt": lambda n, r: Range(math.sqrt(max(r[0].low, 0.0)), math.sqrt(max(r[0].high, 0.0))),
    **dict.fromkeys(("sin", "cos", "tanh", "erf"), _within(-1.0, 1.0)),
    **dict.fromkeys(("floor", "round", "ceil"), lambda n, r: Range(math.floor(r[0].low) if r[0].low > -INF else -INF,
                                                                   math.ceil(r[0].high) if r[0].high < INF else INF)),
    **dict.fromkeys(("reshape", "transpose", "expand", "slice", "gather", "gather_elements", "gather_nd"), _first),
    **dict.fromkeys(("reduce_max", "reduce_min"), _first), "reduce_sum": _sum, "window_sum": _sum,
    "pad": _all, "concat": _all,
}  # fmt: skip
