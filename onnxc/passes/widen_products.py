"""Products of halves, for a target whose matrix kernels are those of float32.

    y = matmul(a, b): float16   becomes   y = cast(matmul(cast(a, float32), cast(b, float32)), float16)

The result is the same but for the order of its sums, which are float32 either way. What lies in memory between kernels
stays half: the wide copies live only as long as the product runs.
"""

from __future__ import annotations

from onnxc.ir import dtypes
from onnxc.ir.graph import Graph, Node, Value
from onnxc.passes.precision_rules import HALVES
from onnxc.passes.simplify import Rewriter
from onnxc.primitives.builder import constant_of

PRODUCTS = frozenset({"matmul", "conv", "conv_weights"})


def widen_products(graph: Graph) -> Graph:
    """The graph with its products of float16 and bfloat16 in float32, those in regions too."""
    r = Rewriter(graph)
    wide: dict[int, Value] = {}
    for node in graph.nodes:
        if node.op in PRODUCTS and node.output.dtype in HALVES.values():
            operands = [_widened(r, wide, v) for v in node.operands]
            product = Value(node.output.t.with_dtype(dtypes.float32))
            r.nodes.append(Node(node.op, operands, [product], node.attrs, (), node.origin))
            out = Value(node.output.type, node.output.name)
            r.nodes.append(Node("cast", [product], [out], {"to": out.dtype}, (), node.origin))
            r.replace(node.output, out)
        elif node.regions:
            outputs = [Value(v.type, v.name, v.data) for v in node.outputs]
            regions = [widen_products(g) for g in node.regions]
            r.nodes.append(Node(node.op, [r.value(v) for v in node.inputs], outputs, node.attrs, regions, node.origin))
            for old, new in zip(node.outputs, outputs, strict=True):
                r.replace(old, new)
        else:
            r.keep(node)
    return r.result()


def _widened(r: Rewriter, wide: dict[int, Value], v: Value) -> Value:
    """A half as float32; a constant is one at once."""
    if v.id not in wide:
        array, source = constant_of(v), r.replaced.get(v.id, v)
        out = wide[v.id] = Value(v.t.with_dtype(dtypes.float32), v.name)
        if array is not None:
            r.nodes.append(Node("constant", (), [out], {"value": array.astype(dtypes.float32.numpy)}, ()))
        else:
            r.nodes.append(Node("cast", [source], [out], {"to": dtypes.float32}, (), v.node.origin if v.node else ()))
    return wide[v.id]
