"""Spellings of reads and writes at positions that are data, trees of decisions among them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxc.errors import InternalError, UnsupportedError
from onnxc.export.common import Spelling, operand
from onnxc.export.nodes import NodeWriter
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.graph import Node
from onnxc.primitives.builder import constant_of
from onnxc.primitives.kernels import USER
from onnxc.primitives.trees import EQUAL, FEATURES, MISSING, from_words


def _user(w: NodeWriter, node: Node, xs: list[str]) -> str:
    raise UnsupportedError(
        f"the kernel {node.attrs['name']} has no spelling in ONNX", node=", ".join(map(str, node.origin))
    )


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


def _positions(w: NodeWriter, node: Node, xs: list[str]) -> list[str]:
    """Those that were found, and zeros behind them."""
    found = w.one("Reshape", w.one("NonZero", xs[0]), w.ints(-1))
    count = w.one("Shape", found)
    free = w.one("Sub", w.dim(operand(node).shape[0]), count)
    places = w.one("Pad", found, w.one("Concat", w.ints(0), free, axis=0))
    return [places, w.one("Reshape", count, w.shape(()))]


def _nms(w: NodeWriter, node: Node, xs: list[str]) -> list[str]:
    """Rows that were found, and zeros behind them."""
    numbers = [w.reshape(x, (1,)) for x in xs[2:]]
    found = w.one("NonMaxSuppression", *xs[:2], *numbers, center_point_box=int(node.attrs["center"]))
    count = w.one("Shape", found, start=0, end=1)
    free = w.one("Sub", w.dim(node.outputs[0].shape[0]), count)
    rows = w.one("Pad", found, w.one("Concat", w.ints(0, 0), free, w.ints(0), axis=0))
    return [rows, w.one("Reshape", count, w.shape(()))]


def _tree_leaves(w: NodeWriter, node: Node, xs: list[str]) -> str:
    """The walks step by step: all rows through all trees at once."""
    x, attrs = operand(node), node.attrs
    words, roots = (constant_of(v) for v in node.operands[1:])
    if words is None or roots is None:
        raise InternalError("trees that are not constants have no ONNX spelling")
    table = from_words(words, x.dtype)
    feature, split, child = table["feature"], w.constant(table["split"]), w.constant(table["child"].astype(np.int64))
    column = w.constant((feature & (FEATURES - 1)).astype(np.int64))
    equal, missing = (w.constant(feature & flag != 0) for flag in (EQUAL, MISSING))
    at = w.one("Expand", w.constant(roots.astype(np.int64)), w.shape(node.output.shape))
    for _ in range(attrs["steps"]):
        value, limit = w.one("GatherElements", xs[0], w.one("Gather", column, at), axis=1), w.one("Gather", split, at)
        first = w.one("LessOrEqual", value, limit)
        if attrs["flags"] & EQUAL:
            exact = w.one("Equal", value, limit)
            first = w.select(dtypes.boolean, w.one("Gather", equal, at), exact, first)
        if attrs["flags"] & MISSING:
            first = w.one("Or", first, w.one("And", w.one("IsNaN", value), w.one("Gather", missing, at)))
        at = w.one("Add", w.one("Gather", child, at), w.cast(w.one("Not", first), dtypes.int64))
    return w.one("Gather", w.constant(table["leaf"].astype(np.int32)), at)


SPELLINGS: dict[str, Spelling] = {
    "gather": _gather("Gather"),
    "gather_elements": _gather("GatherElements"),
    "gather_nd": _gather_nd,
    "scatter_elements": _scatter_elements,
    "scatter_nd": _scatter_nd,
    "top_k": _top_k,
    "tree_leaves": _tree_leaves,
    "nms": _nms,
    "positions": _positions,
    USER: _user,
}
