"""Spellings of reductions over axes, arg-reductions and cumulative sums."""

from __future__ import annotations

from onnxc.export.common import Spelling, operand
from onnxc.export.kernels import wide_dtype
from onnxc.export.nodes import NodeWriter
from onnxc.ir import dtypes
from onnxc.ir.graph import Node


def _reduce(op_type: str) -> Spelling:
    def spell(w: NodeWriter, node: Node, xs: list[str]) -> str:
        axes = w.ints(*node.attrs["axes"])
        return w.compute(op_type, operand(node).dtype, xs, axes, keepdims=0, noop_with_empty_axes=1)

    return spell


def _arg(op_type: str) -> Spelling:
    def spell(w: NodeWriter, node: Node, xs: list[str]) -> str:
        dtype = operand(node).dtype
        wide = wide_dtype(op_type, dtype)
        x = xs[0] if wide is dtype else w.cast(xs[0], wide)
        return w.one(
            op_type,
            x,
            axis=node.attrs["axis"],
            keepdims=0,
            select_last_index=int(node.attrs.get("last", False)),
        )

    return spell


def _cumsum(w: NodeWriter, node: Node, xs: list[str]) -> str:
    flags = {k: int(node.attrs.get(k, False)) for k in ("exclusive", "reverse")}
    return w.compute("CumSum", operand(node).dtype, xs, w.scalar(node.attrs["axis"], dtypes.int64), **flags)


SPELLINGS: dict[str, Spelling] = {
    "reduce_sum": _reduce("ReduceSum"),
    "reduce_prod": _reduce("ReduceProd"),
    "reduce_max": _reduce("ReduceMax"),
    "reduce_min": _reduce("ReduceMin"),
    "argmax": _arg("ArgMax"),
    "argmin": _arg("ArgMin"),
    "cumsum": _cumsum,
}
