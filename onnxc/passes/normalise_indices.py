"""Places of gathers that are constants, as kernels read them best: from 0 on, in int32.

Whether they lie inside is then known too (`onnxc.loops.known.lies_inside`), and no run looks.
"""

from __future__ import annotations

import numpy as np

from onnxc.ir import dtypes
from onnxc.ir.graph import Graph, Node, Value
from onnxc.ir.types import TensorType
from onnxc.passes.simplify import Rewriter
from onnxc.primitives.builder import constant_of
from onnxc.primitives.movement import VIEWS

GATHERS = ("gather", "gather_elements")
LARGEST = 1 << 24  # elements of a constant that is looked at


def normalise_indices(graph: Graph) -> Graph:
    """The graph with constant places of gathers as int32 from 0 on, where they lie inside and are more than one."""
    r = Rewriter(graph)
    made: dict[tuple[int, int], Value] = {}
    for node in graph.nodes:
        settled = _settled(r, node, made) if node.op in GATHERS else None
        if settled is None:
            r.keep(node)
            continue
        out = Value(node.output.type, node.output.name, node.output.data)
        r.nodes.append(Node(node.op, [r.value(node.inputs[0]), settled], [out], node.attrs, (), node.origin))
        r.replace(node.output, out)
    return r.result()


def _settled(r: Rewriter, node: Node, made: dict[tuple[int, int], Value]) -> Value | None:
    """The places of a gather, settled; None where they are to stay."""
    x, where = node.operands
    extent = x.shape[node.attrs["axis"]]
    views: list[Node] = []
    while where.node is not None and where.node.op in VIEWS:
        views.append(where.node)
        where = where.node.operands[0]
    array = constant_of(where)
    if array is None or where.dtype is not dtypes.int64 or not isinstance(extent, int) or extent > 1 << 31:
        return None
    if not 1 < array.size <= LARGEST or array.min() < -extent or array.max() >= extent:
        return None
    key = (where.id, extent)
    if key not in made:
        content = np.where(array < 0, array + extent, array).astype(np.int32)
        made[key] = Value(TensorType(dtypes.int32, where.shape))
        r.nodes.append(
            Node("constant", (), [made[key]], {"value": content}, (), where.node.origin if where.node else ())
        )
    found = made[key]
    for view in reversed(views):
        shown = Value(view.output.t.with_dtype(dtypes.int32))
        r.nodes.append(Node(view.op, [found], [shown], view.attrs, (), view.origin))
        found = shown
    return found
