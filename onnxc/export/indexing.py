"""Spellings of reads and writes at positions that are data."""

from __future__ import annotations

from collections.abc import Sequence

from onnxc.export.common import Spelling, operand
from onnxc.export.nodes import NodeWriter
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.graph import Node


def _index(w: NodeWriter, node: Node, x: str, allowed: Sequence[DType] = (dtypes.int64, dtypes.int32)) -> str:
    """An index tensor in a dtype that ONNX takes."""
    return x if operand(node, 1).dtype in allowed else w.cast(x, dtypes.int64)


def _gather(op_type: str) -> Spelling:
    return lambda w, node, xs: w.one(op_type, xs[0], _index(w, node, xs[1]), axis=node.attrs["axis"])


def _gather_nd(w: NodeWriter, node: Node, xs: list[str]) -> str:
    return w.one("GatherND", xs[0], _index(w, node, xs[1], (dtypes.int64,)), batch_dims=node.attrs["batch_dims"])


def _scatter_elements(w: NodeWriter, node: Node, xs: list[str]) -> str:
    index, attrs = _index(w, node, xs[1]), node.attrs
    return w.one("ScatterElements", xs[0], index, xs[2], axis=attrs["axis"], reduction=attrs["reduction"])


def _scatter_nd(w: NodeWriter, node: Node, xs: list[str]) -> str:
    return w.one("ScatterND", xs[0], _index(w, node, xs[1], (dtypes.int64,)), xs[2], reduction=node.attrs["reduction"])


def _top_k(w: NodeWriter, node: Node, xs: list[str]) -> list[str]:
    attrs = {"axis": node.attrs["axis"], "largest": int(node.attrs["largest"]), "sorted": 1}
    return w.compute_several("TopK", operand(node).dtype, xs, [w.dim(node.attrs["k"])], 2, **attrs)


SPELLINGS: dict[str, Spelling] = {
    "gather": _gather("Gather"),
    "gather_elements": _gather("GatherElements"),
    "gather_nd": _gather_nd,
    "scatter_elements": _scatter_elements,
    "scatter_nd": _scatter_nd,
    "top_k": _top_k,
}
