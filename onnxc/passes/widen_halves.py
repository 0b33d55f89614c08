"""Arithmetic of float16 and bfloat16 as float32, for a target that has no arithmetic of halves.

    c = matmul(a, b): float16; d = exp(c): float16   becomes   d = cast(exp(matmul(wide a, wide b)), float16)

A half is rounded where the model can tell: at its outputs, where it casts by name, and before whatever is not smooth
(comparisons, rounding, indices, casts to integers), so that ties and steps stay where they are. In between, results
are nearer to the exact ones than halves could be, and do not overflow; products and attention have kernels.
"""

from __future__ import annotations

from dataclasses import replace

from onnxc.ir import dtypes
from onnxc.ir.graph import Graph, Node, Value
from onnxc.ir.types import TensorType
from onnxc.passes.precision_rules import HALVES
from onnxc.passes.simplify import eliminate_dead
from onnxc.primitives.base import SMOOTH, Kind, lookup

KEPT = "halves"  # of a graph's metadata: halves were chosen, and stay as they are
MOVING = frozenset({"gather", "gather_elements", "gather_nd"})  # and views: they leave a half as it is
_BY_NAME = frozenset({"Cast", "CastLike", "_to_copy.default", "prims.convert_element_type.default"})  # ONNX, PyTorch
_HALVES = frozenset(HALVES.values())


def widen_halves(graph: Graph) -> Graph:
    """The graph with smooth arithmetic of halves in float32, in regions too.

    Before: primitives. Inputs, outputs, and operands of regions keep their types.
    """
    if graph.metadata.get(KEPT):
        return graph
    return eliminate_dead(_Widener(graph).graph())


def _is_half(v: Value | None) -> bool:
    return v is not None and isinstance(v.type, TensorType) and v.dtype in _HALVES


def _moves(node: Node) -> bool:
    return node.op in MOVING or lookup(node.op).kind is Kind.VIEW


class _Widener:
    """Builds one graph. Each half has a narrow value, of its own type, a wide one, or both, made when asked for."""

    def __init__(self, graph: Graph) -> None:
        self.source = graph
        self.nodes: list[Node] = []
        self.narrow: dict[int, Value] = {v.id: v for v in graph.inputs}
        self.wide: dict[int, Value] = {}

    def graph(self) -> Graph:
        for node in self.source.nodes:
            self._node(node)
        outputs = [self._own(v) for v in self.source.outputs]
        return replace(self.source, nodes=self.nodes, outputs=outputs)

    def _node(self, node: Node) -> None:
        if node.op == "cast" and (_is_half(node.inputs[0]) or _is_half(node.output)):
            self._cast(node)
        elif self._is_smooth(node) and not self._moves_narrow(node):
            inputs = [self._wide(v) if v is not None and _is_half(v) else self._given(v) for v in node.inputs]
            types = [v.t.with_dtype(dtypes.float32) if _is_half(v) else v.type for v in node.outputs]
            outputs = [Value(t, v.name) for t, v in zip(types, node.outputs, strict=True)]
            self.nodes.append(Node(node.op, inputs, outputs, node.attrs, node.regions, node.origin))
            for old, new in zip(node.outputs, outputs, strict=True):
                (self.wide if _is_half(old) else self.narrow)[old.id] = new
        else:
            self._keep(node)

    def _is_smooth(self, node: Node) -> bool:
        known = node.op in SMOOTH or _moves(node)
        halves = [v.dtype for v in (*node.inputs, *node.outputs) if v is not None and _is_half(v)]
        return known and bool(halves) and all(_is_half(v) for v in node.outputs) and bool(node.inputs)

    def _moves_narrow(self, node: Node) -> bool:
        """Whether it only moves halves that are in memory as such: a table of weights stays one of halves."""
        return _moves(node) and all(v.id in self.narrow for v in node.operands)

    def _keep(self, node: Node) -> None:
        """A node as it is; regions have halves at their ends, and are widened inside."""
        inputs = [self._given(v) for v in node.inputs]
        same = all(a is b for a, b in zip(inputs, node.inputs, strict=True))
        if not node.regions and same:
            self.nodes.append(node)
            self.narrow.update({v.id: v for v in node.outputs})
            return
        regions = node.regions if node.op == "later" else [eliminate_dead(_Widener(g).graph()) for g in node.regions]
        outputs = [Value(v.type, v.name, v.data) for v in node.outputs]
        self.nodes.append(Node(node.op, inputs, outputs, node.attrs, regions, node.origin))
        self.narrow.update({old.id: new for old, new in zip(node.outputs, outputs, strict=True)})

    def _cast(self, node: Node) -> None:
        """Rounds where the model's own node says so, and before integers; else it is exact, or nothing."""
        (x,) = node.operands
        if any(s.op_type in _BY_NAME for s in node.origin):
            self._keep(node)
        elif _is_half(node.output):
            self.wide[node.output.id] = self._wide(x) if _is_half(x) else self._to(self._own(x), dtypes.float32, node)
        elif node.output.dtype in (dtypes.float32, dtypes.float64):
            wide = self._wide(x)
            self.narrow[node.output.id] = (
                wide if node.output.dtype is dtypes.float32 else self._to(wide, dtypes.float64, node)
            )
        else:
            self._keep(node)

    # ------------------------------------------------------------ values

    def _given(self, v: Value | None) -> Value | None:
        return None if v is None else self._own(v)

    def _own(self, v: Value) -> Value:
        """The value in its own type."""
        if v.id not in self.narrow:
            self.narrow[v.id] = self._to(self.wide[v.id], v.dtype, v.node)
        return self.narrow[v.id]

    def _wide(self, v: Value) -> Value:
        """A half as float32."""
        if v.id not in self.wide:
            self.wide[v.id] = self._to(self.narrow[v.id], dtypes.float32, v.node)
        return self.wide[v.id]

    def _to(self, v: Value, dtype: dtypes.DType, node: Node | None) -> Value:
        if v.dtype is dtype:
            return v
        out = Value(v.t.with_dtype(dtype))
        self.nodes.append(Node("cast", [v], [out], {"to": dtype}, (), node.origin if node is not None else ()))
        return out
