"""The writer of graphs: imported nodes as they were, primitives by their spellings, regions as subgraphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from google.protobuf import text_format
from onnx import AttributeProto, GraphProto, helper

from onnxc.errors import InternalError, UnsupportedOpError
from onnxc.export.control import CONTROL
from onnxc.export.nodes import NodeWriter
from onnxc.export.spellings import SPELLINGS
from onnxc.export.tensors import External, tensor_proto
from onnxc.export.types import declared_proto, type_proto
from onnxc.ir import dtypes
from onnxc.ir.graph import DECLARED, Graph, Node, Value
from onnxc.ir.types import Type
from onnxc.passes.random_state import state_input
from onnxc.primitives.host import is_host

WEIGHTS = "weights"  # of a graph's metadata: the names of constants that are initializers under these names


class GraphWriter(NodeWriter):
    """Writes one graph; a region's writer sees the names of the graphs around it."""

    def __init__(
        self,
        opsets: Mapping[str, int],
        dim_names: Mapping[str, str],
        prefix: str,
        external: External | None,
        parent: GraphWriter | None = None,
    ) -> None:
        super().__init__(prefix, external, dim_names, parent)
        self.opsets = opsets
        self.weights: set[str] = set()  # names of constants that keep them

    def top(self, graph: Graph) -> GraphProto:
        """The main graph."""
        self.weights = set(graph.metadata.get(WEIGHTS, ())) - {*graph.input_names, *graph.output_names}
        for value in graph.inputs:
            self.names[value.id] = value.name
        self.symbols(graph.inputs)
        declared = graph.metadata.get("output_types", {})
        given = graph.metadata.get("input_types", {})
        inputs = [
            helper.make_value_info(v.name, declared_proto(given[v.name]))
            if v.name in given
            else self.info(v.name, v.type)
            for v in graph.inputs
        ]
        state = state_input(graph)
        if state is not None:  # other runtimes do not fill it in: they have the numbers of a first call
            self.initializers.append(tensor_proto(np.zeros(2, np.uint64), state.name))
        self.initializers += [tensor_proto(array, name) for name, array in graph.defaults.items()]
        self.body(graph, graph.output_names)
        outputs = [
            self.info(name, v.type, declared.get(name))
            for v, name in zip(graph.outputs, graph.output_names, strict=True)
        ]
        return helper.make_graph(self.nodes, graph.name or "graph", inputs, outputs, self.initializers)

    def region(self, graph: Graph) -> GraphProto:
        """A subgraph. Its names are generated, since none may be used twice in a model."""
        inner = self.inner()
        inputs = [inner.declare(v) for v in graph.inputs]
        return inner.closed(inputs, inner.ended(graph))

    def inner(self, opsets: Mapping[str, int] | None = None) -> GraphWriter:
        """The writer of a graph inside of this one."""
        return GraphWriter(opsets or self.opsets, self.dim_names, self.prefix, self.external, self)

    def declare(self, value: Value) -> onnx.ValueInfoProto:
        """An input of this graph, under a new name."""
        self.names[value.id] = self.fresh()
        return self.info(self.names[value.id], value.type)

    def call(self, inputs: Sequence[Value], names: Sequence[str]) -> None:
        """Inputs of a region that stand for values outside, which have these names."""
        self.names.update({v.id: name for v, name in zip(inputs, names, strict=True)})

    def ended(self, graph: Graph) -> list[onnx.ValueInfoProto]:
        """Writes the graph's nodes; its outputs, under new names."""
        names = [self.fresh() for _ in graph.outputs]
        self.body(graph, names)
        return [self.info(n, v.type) for n, v in zip(names, graph.outputs, strict=True)]

    def closed(self, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]) -> GraphProto:
        """The graph of all that was written."""
        return helper.make_graph(self.nodes, self.fresh(), inputs, outputs, self.initializers)

    def body(self, graph: Graph, output_names: Sequence[str]) -> None:
        """Nodes. A node's output that is a graph output has its name at once, all else goes through an Identity."""
        made = {v.id for n in graph.nodes if n.op != "constant" for v in n.outputs}
        ends: dict[str, Value] = {}
        for value, name in zip(graph.outputs, output_names, strict=True):
            ends.setdefault(name, value)  # one may be listed twice
        wanted: dict[int, str] = {}
        for name, value in ends.items():
            if value.id in made:
                wanted.setdefault(value.id, name)
        for node in graph.nodes:
            self.write(node, wanted)
        for name, value in ends.items():
            if wanted.get(value.id) != name and self.names[value.id] != name:  # an input may be an output as it is
                self.nodes.append(helper.make_node("Identity", [self.names[value.id]], [name]))

    def write(self, node: Node, wanted: Mapping[int, str]) -> None:
        """A node; `wanted` are the names of those values that are outputs of the graph."""
        if node.op == "constant":
            named = node.output.name if node.output.name in self.weights else None
            self.names[node.output.id] = self.constant(node.attrs["value"], named)
            return
        if "." in node.op or "@" in node.op:
            return self.imported(node, wanted)
        inputs = ["" if v is None else self.names[v.id] for v in node.inputs]
        if node.op in CONTROL:
            made: str | list[str] = CONTROL[node.op](self, node, inputs)
        elif node.op in SPELLINGS:
            made = SPELLINGS[node.op](self, node, inputs)
        else:
            raise InternalError(
                f"the primitive {node.op!r} has no ONNX spelling: add one to SPELLINGS of its family in onnxc/export/"
            )
        for value, name in zip(node.outputs, [made] if isinstance(made, str) else made, strict=True):
            self.names[value.id] = name
            if value.id in wanted:
                self.rename(name, wanted[value.id], inputs)
                self.names[value.id] = wanted[value.id]
        if is_host(node):
            self.symbols(node.outputs)

    def rename(self, name: str, to: str, inputs: Sequence[str]) -> None:
        """Gives a value that has just been made (so it is not one of the node's inputs) its final name."""
        last = self.nodes[-1] if self.nodes else None
        if last is not None and name in last.output and name not in inputs:
            last.output[list(last.output).index(name)] = to
        else:
            self.nodes.append(helper.make_node("Identity", [name], [to]))

    def imported(self, node: Node, wanted: Mapping[int, str]) -> None:
        """A node of the user's model, as it was."""
        domain, _, op_type = node.op.rpartition(".")
        domain = "" if domain == "onnx" else domain
        if "@" in op_type:
            raise UnsupportedOpError(
                [(node.origin[0].name if node.origin else "", f"{node.op} beside {self.opsets[domain]}")]
            )
        for value in node.outputs:
            self.names[value.id] = wanted.get(value.id) or self.fresh()
        inputs = ["" if v is None else self.names[v.id] for v in node.inputs]
        proto = helper.make_node(op_type, inputs, [self.names[v.id] for v in node.outputs], domain=domain or None)
        kinds = _attribute_kinds(op_type, self.opsets.get(domain, 1), domain)
        for name, value in node.attrs.items():
            if name not in ("regions", DECLARED):
                proto.attribute.append(_attribute(name, value, kinds.get(name)))
        for name, region in zip(node.attrs.get("regions", ()), node.regions, strict=True):
            proto.attribute.append(helper.make_attribute(name, self.region(region)))
        self.nodes.append(proto)

    def info(self, name: str, type: Type | None, declared: Any = None) -> onnx.ValueInfoProto:
        """A graph input or output with its type; of an imported graph's output, the one that the model declares."""
        proto = type_proto(type, self.dim_names)
        if proto is not None:
            return helper.make_value_info(name, proto)
        if declared is not None:
            dtype, shape = declared
            return helper.make_tensor_value_info(name, dtypes.BY_NAME[dtype].onnx, shape)
        return onnx.ValueInfoProto(name=name)


def _attribute_kinds(op_type: str, version: int, domain: str) -> dict[str, int]:
    try:
        schema = onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return {}
    return {name: int(a.type.value) for name, a in schema.attributes.items()}  # type: ignore[attr-defined]


def _attribute(name: str, value: Any, kind: int | None) -> AttributeProto:
    """A Python value as an attribute; the schema's type decides what an empty tuple is a list of."""
    if kind == AttributeProto.TYPE_PROTO and isinstance(value, str):
        return helper.make_attribute(name, text_format.Parse(value, onnx.TypeProto()))
    if isinstance(value, np.ndarray):
        return helper.make_attribute(name, tensor_proto(value, ""))
    if isinstance(value, str):
        return helper.make_attribute(name, value.encode("utf-8", "surrogateescape"), attr_type=AttributeProto.STRING)
    if isinstance(value, tuple):
        items = [tensor_proto(v, "") if isinstance(v, np.ndarray) else v for v in value]
        items = [v.encode("utf-8", "surrogateescape") if isinstance(v, str) else v for v in items]
        return helper.make_attribute(name, items, attr_type=kind or (None if items else AttributeProto.INTS))
    return helper.make_attribute(name, value)
