"""Kernels of the primitives that are no loop nests: running sums, the best of a line, scatters, boxes, trees.

Results do not depend on the order in which programs run: see `running.py`, `best.py`, `scatter.py`, `boxes.py`
and `trees.py`.
"""

from __future__ import annotations

from onnxc.codegen.triton.best import top_k
from onnxc.codegen.triton.boxes import suppression
from onnxc.codegen.triton.kernel import Kernel
from onnxc.codegen.triton.running import running_sums
from onnxc.codegen.triton.scatter import scatter_elements, scatter_nd
from onnxc.codegen.triton.trees import leaves
from onnxc.codegen.triton.user import emit_user
from onnxc.codegen.triton.writer import Writer
from onnxc.errors import UnsupportedError
from onnxc.ir.graph import Node
from onnxc.planner.groups import Group
from onnxc.planner.layout import Layout
from onnxc.primitives.kernels import USER


def emit_opaque(group: Group, layout: Layout) -> list[Kernel]:
    """The kernels of an opaque group, in the order in which they run."""
    assert group.node is not None
    own = _OPEN.get(group.node.op)
    if own is not None:
        return own(group, layout)
    emitter = _EMITTERS.get(group.node.op)
    if emitter is None:
        raise UnsupportedError(f"no GPU kernel for {group.node.op}", node=", ".join(map(str, group.origin)))
    return emitter(group.node, layout)


def _user(node: Node, layout: Layout) -> list[Kernel]:
    values, sizes = (*node.operands, *node.outputs), node.attrs["sizes"]
    w = Writer(layout, values, *sizes)
    starts = [w.start(v) for v in values]
    return [emit_user(node, layout, w.wide, w.buffers, [w.size(d) for d in sizes], starts)]


# What they read, and what they make of it, is in their groups.
_OPEN = {"cumsum": running_sums, "top_k": top_k, "scatter_elements": scatter_elements, "scatter_nd": scatter_nd}
_EMITTERS = {"nms": suppression, "tree_leaves": leaves, USER: _user}
