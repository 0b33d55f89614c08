"""Models put together from protobuf messages, and how they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxc.frontends.onnx_file import load
from onnxc.ir.graph import Graph
from onnxc.primitives.verify import verify

node = helper.make_node


def tensor_info(name: str, shape: Sequence[int | str | None] | None = (2,), dtype: int = TensorProto.FLOAT) -> Any:
    """A float tensor of two elements, if nothing else is said."""
    return helper.make_tensor_value_info(name, dtype, shape)


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[Any] = ("x",),
    outputs: Sequence[Any] = ("y",),
    *,
    opset: int = 20,
    functions: Sequence[onnx.FunctionProto] = (),
    **graph: Any,
) -> ModelProto:
    """A model; inputs and outputs that are names alone are float tensors of two elements."""
    infos = [[tensor_info(v) if isinstance(v, str) else v for v in values] for values in (inputs, outputs)]
    proto = helper.make_graph(list(nodes), "g", *infos, **graph)
    opsets = [
        helper.make_opsetid("", opset),
        *(helper.make_opsetid(d, 1) for d in sorted({f.domain for f in functions})),
    ]
    return helper.make_model(proto, opset_imports=opsets, functions=list(functions), ir_version=10)


def read(proto: ModelProto, **more: Any) -> Graph:
    """The graph of a model, verified."""
    graph = load(proto, **more)
    verify(graph)
    return graph


def ops(graph: Graph) -> list[str]:
    """Of all nodes, in order."""
    return [n.op for n in graph.nodes]


def constant(graph: Graph) -> np.ndarray:
    """The content of the only constant."""
    (found,) = [n for n in graph.nodes if n.op == "constant"]
    array: np.ndarray = found.attrs["value"]
    assert found.output.type is not None and found.output.shape == array.shape
    return array


RELU = [node("Relu", ["x"], ["y"])]
W = numpy_helper.from_array(np.array([1, 2], np.float32), "w")
ADD = [node("Add", ["x", "w"], ["y"])]


def tensor(**fields: Any) -> TensorProto:
    """A weight of these fields, which may contradict each other."""
    return TensorProto(**{"name": "w", "data_type": TensorProto.FLOAT, "dims": [2], **fields})


def sparse(positions: np.ndarray, dims: Sequence[int] = (2, 3), count: int = 2) -> onnx.SparseTensorProto:
    """A sparse tensor with these positions."""
    values = numpy_helper.from_array(np.arange(1, count + 1, dtype=np.float32), "w")
    return helper.make_sparse_tensor(values, numpy_helper.from_array(positions), list(dims))


def branch(nodes: Sequence[NodeProto], output: str, **more: Any) -> onnx.GraphProto:
    """A graph that an If or a Loop takes."""
    return helper.make_graph(list(nodes), "branch", more.pop("inputs", []), [tensor_info(output)], **more)


def function(
    name: str, inputs: Sequence[str], outputs: Sequence[str], nodes: Sequence[NodeProto],
    attributes: Sequence[str] = (), defaults: Sequence[onnx.AttributeProto] = (), opset: int = 20,
) -> onnx.FunctionProto:  # fmt: skip
    """A function of the domain "local"."""
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("local", 1)]
    return helper.make_function("local", name, inputs, outputs, nodes, opsets, attributes, list(defaults))


def call(op_type: str, inputs: Sequence[str], outputs: Sequence[str], **attrs: Any) -> NodeProto:
    """A node that calls one."""
    return node(op_type, inputs, outputs, domain="local", **attrs)


def reference(n: NodeProto, attribute: str, to: str, kind: int) -> NodeProto:
    """The node, with an attribute that is the function's own."""
    n.attribute.append(onnx.AttributeProto(name=attribute, ref_attr_name=to, type=kind))
    return n
