"""Decision trees: which leaf of each tree a row of features reaches.

A tree is a table of nodes, and a walk through it always takes one step of the same form: from node `i` to
`child[i]` where x[feature[i]] <= split[i], else to `child[i] + 1`. Other comparisons are written as this one
(`onnxc.ops.ml_trees`); two flags of a node say what is left over:

- MISSING: NaN goes to the first child too; without it, to the second.
- EQUAL: only x = split goes to the first child.

A leaf is a node from which a step leads to itself: its split is NaN and its child the node before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxc.errors import ShapeError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import is_less
from onnxc.ir.graph import Attrs
from onnxc.ir.types import TensorType
from onnxc.primitives.base import Kind, Primitive, register

MISSING, EQUAL = 1 << 31, 1 << 30
FEATURES = EQUAL  # how many features there can be
WORDS = {dtypes.float32: 4, dtypes.float64: 6}  # of a node: the split, feature with flags, child, leaf


def node_layout(dtype: DType) -> np.dtype:
    """A node as it lies in memory: the leaf is its number, or -1."""
    spare = [("spare", "i4")] if dtype is dtypes.float64 else []
    return np.dtype([("split", dtype.numpy), ("feature", "u4"), ("child", "i4"), ("leaf", "i4"), *spare])


def as_words(nodes: np.ndarray, dtype: DType) -> np.ndarray:
    """Nodes of `node_layout` as the operand of `tree_leaves`, int32 [nodes, words]."""
    return np.ascontiguousarray(nodes).view(np.int32).reshape(len(nodes), WORDS[dtype])


def from_words(words: np.ndarray, dtype: DType) -> np.ndarray:
    """The nodes that such an operand holds."""
    return np.ascontiguousarray(words).view(node_layout(dtype))[:, 0]


def _tree_leaves(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    """x [rows, features], nodes int32 [nodes, words], roots int32 [trees] to leaves int32 [rows, trees].

    Attributes: `steps`, the most that any walk takes; `features`, how many of them are read; `flags`, those that any
    node has.
    """
    x, nodes, roots = types
    if x.rank != 2 or x.dtype not in WORDS or roots.rank != 1:
        raise ShapeError(f"trees of {x} with roots {roots}")
    if nodes.rank != 2 or nodes.shape[1] != WORDS[x.dtype] or {nodes.dtype, roots.dtype} != {dtypes.int32}:
        raise ShapeError(f"trees of {x} with nodes {nodes} and roots {roots}")
    if is_less(x.shape[1], attrs["features"]):
        raise ShapeError(f"trees read {attrs['features']} features, of {x.shape[1]}")
    return (TensorType(dtypes.int32, (x.shape[0], roots.shape[0])),)


def _tree_leaves_eval(
    x: np.ndarray, nodes: np.ndarray, roots: np.ndarray, steps: int, features: int, flags: int
) -> np.ndarray:
    table = from_words(nodes, dtypes.from_numpy(x.dtype))
    at = np.broadcast_to(roots.astype(np.int64), (len(x), len(roots)))
    for _ in range(steps):
        node = table[at]
        value = np.take_along_axis(x, (node["feature"] & (FEATURES - 1)).astype(np.int64), 1)
        first = np.where(node["feature"] & EQUAL, value == node["split"], value <= node["split"])
        first |= np.isnan(value) & (node["feature"] & MISSING != 0)
        at = node["child"] + ~first
    return table["leaf"][at].astype(np.int32).reshape(len(x), len(roots))


register(Primitive("tree_leaves", Kind.OPAQUE, _tree_leaves, _tree_leaves_eval))
