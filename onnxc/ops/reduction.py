"""Reductions over axes, arg-reductions and cumulative sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnxc.errors import ModelError
from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from onnxc.ops.common import axes_of, flat_at_zero
from onnxc.ops.registry import Flag, op
from onnxc.primitives.builder import Builder

# A reduction: (builder, value, axes, keepdims) to its result.
Reduction = Callable[[Builder, Value, Sequence[int], bool], Value]


def _sum(b: Builder, x: Value, axes: Sequence[int], keep: bool) -> Value:
    return b.reduce("sum", x, axes, keep)


def _prod(b: Builder, x: Value, axes: Sequence[int], keep: bool) -> Value:
    return b.reduce("prod", x, axes, keep)


def _mean(b: Builder, x: Value, axes: Sequence[int], keep: bool) -> Value:
    """Of nothing, which the standard leaves open, it is 0 as onnxruntime has it: bags of embeddings may be empty."""
    return b.mean(x, axes, keep, least=1) if axes else x


def _max(b: Builder, x: Value, axes: Sequence[int], keep: bool) -> Value:
    return _through_uint8(b, "max", x, axes, keep)


def _min(b: Builder, x: Value, axes: Sequence[int], keep: bool) -> Value:
    return _through_uint8(b, "min", x, axes, keep)


def _through_uint8(b: Builder, name: str, x: Value, axes: Sequence[int], keep: bool) -> Value:
    if x.dtype is not dtypes.boolean:
        return b.reduce(name, x, axes, keep)
    return b.cast(b.reduce(name, b.cast(x, dtypes.uint8), axes, keep), x.dtype)


def _l1(b: Builder, x: Value, axes: Sequence[int], keep: bool) -> Value:
    return _sum(b, b.abs(x), axes, keep)


def _sum_square(b: Builder, x: Value, axes: Sequence[int], keep: bool) -> Value:
    return _sum(b, b.mul(x, x), axes, keep)


def _l2(b: Builder, x: Value, axes: Sequence[int], keep: bool) -> Value:
    return _as_float(b, lambda v: flat_at_zero(b, b.sqrt, v), _sum_square(b, x, axes, keep))


def _log_sum(b: Builder, x: Value, axes: Sequence[int], keep: bool) -> Value:
    return _as_float(b, b.log, _sum(b, x, axes, keep))


def _as_float(b: Builder, f: Callable[[Value], Value], x: Value) -> Value:
    """A function of floats, also for integers: rounded toward zero."""
    return f(x) if x.dtype.is_float else b.cast(f(b.cast(x, dtypes.float64)), x.dtype)


def _log_sum_exp(b: Builder, x: Value, axes: Sequence[int], keep: bool) -> Value:
    """log(sum(exp(x))), the greatest element taken out first unless it is infinite: inf - inf is NaN."""

    def compute(y: Value) -> Value:
        top = b.reduce("max", y, axes, True)
        top = b.where(b.one("isinf", top), 0.0, top)
        total = b.log(b.reduce("sum", b.exp(b.sub(y, top)), axes, True))
        result = b.add(total, top)
        return result if keep else b.reshape(result, [d for i, d in enumerate(y.shape) if i not in axes])

    return _as_float(b, compute, x)


def _family(name: str, reduction: Reduction, inputs_from: int) -> None:
    """Axes are an attribute below opset `inputs_from`, an input from there on."""

    @op(name, 1, inputs_from - 1)
    def attribute(b: Builder, x: Value, *, axes: list[int] | None = None, keepdims: Flag = 1) -> Value:
        found = axes_of(b, axes or None, x.rank, name)
        return reduction(b, x, range(x.rank) if found is None else found, bool(keepdims))

    @op(name, inputs_from)
    def given(
        b: Builder, x: Value, axes: Value | None = None, *, keepdims: Flag = 1, noop_with_empty_axes: Flag = 0,
    ) -> Value:  # fmt: skip
        found = axes_of(b, axes, x.rank, name) or (() if noop_with_empty_axes else tuple(range(x.rank)))
        return reduction(b, x, found, bool(keepdims))


for _name, _reduction, _from in [
    ("ReduceSum", _sum, 13), ("ReduceProd", _prod, 18), ("ReduceMean", _mean, 18), ("ReduceMax", _max, 18),
    ("ReduceMin", _min, 18), ("ReduceL1", _l1, 18), ("ReduceL2", _l2, 18),
    ("ReduceSumSquare", _sum_square, 18),
    ("ReduceLogSum", _log_sum, 18), ("ReduceLogSumExp", _log_sum_exp, 18),
]:  # fmt: skip
    _family(_name, _reduction, _from)


def _arg(name: str, primitive: str) -> None:
    @op(name, 1)
    def define(
        b: Builder, x: Value, *, axis: int = 0, keepdims: Flag = 1, select_last_index: Flag = 0,
    ) -> Value:  # fmt: skip
        axis = b.axis(axis, x.rank)
        out = b.one(primitive, x, axis=axis, last=bool(select_last_index))
        return b.reshape(out, [1 if i == axis else d for i, d in enumerate(x.shape)]) if keepdims else out


_arg("ArgMax", "argmax")
_arg("ArgMin", "argmin")


@op("CumSum", 11)
def cumsum(b: Builder, x: Value, axis: Value, *, exclusive: Flag = 0, reverse: Flag = 0) -> Value:
    (at,) = b.static_ints(axis, "the axis of CumSum")
    if x.rank == 0:
        raise ModelError("CumSum of a scalar")
    return b.one("cumsum", x, axis=b.axis(at, x.rank), exclusive=bool(exclusive), reverse=bool(reverse))


@op("CumProd", 26)
def cumprod(b: Builder, x: Value, axis: Value, *, exclusive: Flag = 0, reverse: Flag = 0) -> Value:
    """The axis step by step, all lines at once. Halves are multiplied in float32."""
    (at,) = b.static_ints(axis, "the axis of CumProd")
    at = b.axis(at, x.rank)
    wide = b.cast(x, dtypes.float32) if x.dtype.is_float and x.dtype.bits < 32 else x
    lines = b.swap(b.flip(wide, [at]) if reverse else wide, 0, at)

    def step(inner: Builder, states: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
        (before,), (own,) = states, slices
        after = inner.mul(before, own)
        return [after], [before if exclusive else after]

    _, (y,) = b.scan([b.full(lines.shape[1:], 1, wide.dtype)], [lines], lines.shape[0], step)
    y = b.swap(y, 0, at)
    return b.cast(b.flip(y, [at]) if reverse else y, x.dtype)
