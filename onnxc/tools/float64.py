"""The judge between two float32 programs: the same graph, evaluated in float64.

The graph of primitives (what onnxc compiles, before any fusion) gets float64 in the place of every narrower
float, and is run by the interpreter that defines what primitives mean. Casts to a float become casts to
float64; integers stay as they are, so quantized arithmetic is exact. The weights are the float32 ones, so
what it differs from is rounding alone. (onnx's own reference evaluator would not do: many of its functions
round to float32, or fail for float64.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.graph import Graph, Node, Value
from onnxc.ir.types import TensorType
from onnxc.primitives.interpret import interpret

Array = np.ndarray[Any, Any]


def widened(dtype: DType) -> DType:
    """float64 for float32, float16 and bfloat16; any other type as it is."""
    return dtypes.float64 if dtype in (dtypes.float32, dtypes.float16, dtypes.bfloat16) else dtype


def widen(graph: Graph, values: dict[int, Value] | None = None, *, constants: bool = True) -> Graph:
    """A graph of primitives with float64 in the place of every narrower float, in its regions too.

    `values`, where given, is filled with the new value of each old one, by the old one's id. Without `constants`, the
    contents of constants outside of regions are left as they are, to be converted where they are used.
    """
    values = {} if values is None else values
    values.update({v.id: _value(v) for v in graph.inputs})
    nodes = []
    for node in graph.nodes:
        outputs = [_value(v) for v in node.outputs]
        values.update({v.id: new for v, new in zip(node.outputs, outputs, strict=True)})
        inputs = [None if v is None else values[v.id] for v in node.inputs]
        kept = node.op == "constant" and not constants
        attrs = node.attrs if kept else {name: _attribute(value) for name, value in node.attrs.items()}
        nodes.append(Node(node.op, inputs, outputs, attrs, [widen(r) for r in node.regions], node.origin))
    return replace(
        graph,
        inputs=[values[v.id] for v in graph.inputs],
        outputs=[values[v.id] for v in graph.outputs],
        nodes=nodes,
    )


def _value(value: Value) -> Value:
    t = value.t
    return Value(TensorType(widened(t.dtype), t.shape), value.name, value.data)


def _attribute(value: Any) -> Any:
    if isinstance(value, DType):
        return widened(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "fV":
        return value.astype(widened(dtypes.from_numpy(value.dtype)).numpy)
    return value


def open_shapes(graph: Graph, given: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of a call's tensors that a graph leaves open, by name: what the graph is to be made for.

    A graph of open dims takes those that meet to be equal, and in a call one of them may be 1, and broadcast.
    """
    tensors = [v.name for v in graph.inputs if isinstance(v.type, TensorType) and not v.type.is_static]
    return {name: np.shape(given[name]) for name in tensors if name in given}


def evaluate_float64(graph: Graph, inputs: Sequence[Array]) -> list[Array]:
    """The outputs of a graph of primitives in float64. Raises OnnxcError."""
    wide = widen(graph)
    given = [np.asarray(a).astype(v.dtype.numpy) for a, v in zip(inputs, wide.inputs, strict=True)]
    return interpret(wide, given)
