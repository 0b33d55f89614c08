"""Nodes with regions, and what the host does between programs, as ONNX: If, Loop, sizes that are read from tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import onnx
from onnx import helper, version_converter

from onnxc.errors import InternalError, UnsupportedError
from onnxc.export.host import HOST_SPELLINGS
from onnxc.ir import dtypes
from onnxc.ir.graph import Node

if TYPE_CHECKING:
    from onnxc.export.graphs import GraphWriter

Control = Callable[["GraphWriter", Node, "list[str]"], "list[str]"]
"""Writes a node, whose operands have the names given (empty where they are left out); names of its outputs."""


def _scan(w: GraphWriter, node: Node, xs: list[str]) -> list[str]:
    """A scan as a Loop, whose steps take their slices by the number of the step."""
    (region,) = node.regions
    n, m = node.attrs["states"], node.attrs["scanned"]
    inner = w.inner()
    infos = _counters(inner)
    infos += [inner.declare(v) for v in region.inputs[:n]]
    for value, x in zip(region.inputs[n : n + m], xs[n : n + m], strict=True):
        inner.names[value.id] = inner.one("Gather", x, infos[0].name, axis=0)
    inner.call(region.inputs[n + m :], xs[n + m :])
    ends = [region.outputs[k] for k in node.attrs["results"]]
    outputs = inner.ended(replace(region, outputs=ends))
    going = node.attrs.get("going")  # the state that is the condition
    if going is not None and len(node.outputs) > n:
        raise UnsupportedError("a loop of ONNX that ends early has results of the iterations that ran alone")
    still = inner.one("Identity", infos[1].name if going is None else outputs[going].name)
    body = inner.closed(infos, [helper.make_tensor_value_info(still, onnx.TensorProto.BOOL, []), *outputs])
    trip = w.one("Reshape", w.dim(node.attrs["trip"]), w.shape(()))
    return w.several("Loop", [trip, "" if going is None else xs[going], *xs[:n]], len(ends), body=body)


def _counters(inner: GraphWriter) -> list[onnx.ValueInfoProto]:
    """The first two inputs of a Loop's body: number of the iteration, condition."""
    kinds = (onnx.TensorProto.INT64, onnx.TensorProto.BOOL)
    return [helper.make_tensor_value_info(inner.fresh(), kind, []) for kind in kinds]


def _loop(w: GraphWriter, node: Node, xs: list[str]) -> list[str]:
    """A Loop, whose body reads from outside what the region takes as inputs."""
    region = node.regions[0]  # a second one runs several iterations of the same
    count = node.attrs["carried"]
    inner = w.inner()
    infos = [inner.declare(v) for v in region.inputs[: 2 + count]]
    inner.call(region.inputs[2 + count :], xs[2 + count :])
    inner.symbols(region.inputs)
    body = inner.closed(infos, inner.ended(region))
    return w.several("Loop", xs[: 2 + count], count + node.attrs["scans"], body=body)


def _if(w: GraphWriter, node: Node, xs: list[str]) -> list[str]:
    """An If, whose branches read from outside what the regions take as inputs."""
    split = node.attrs["split"] + 1
    branches = []
    for region, taken in zip(node.regions, (xs[1:split], xs[split:]), strict=True):
        inner = w.inner()
        inner.call(region.inputs, taken)
        inner.symbols(region.inputs)
        branches.append(inner.closed([], inner.ended(region)))
    return w.several("If", xs[:1], len(node.outputs), then_branch=branches[0], else_branch=branches[1])


def _read(w: GraphWriter, node: Node, xs: list[str]) -> list[str]:
    """The tensor itself; its elements are sizes."""
    value = node.output
    flat = w.cast(w.one("Reshape", xs[0], w.ints(-1)), dtypes.int64)
    for k, symbol in enumerate(node.attrs["symbols"]):
        w.dims[symbol] = w.one("Slice", flat, w.ints(k), w.ints(k + 1)) if value.t.size != 1 else flat
    return [w.one("Identity", xs[0])]


def _host(w: GraphWriter, node: Node, xs: list[str]) -> list[str]:
    name = node.attrs["function"]
    if name not in HOST_SPELLINGS:
        raise InternalError(f"the host function {name!r} has no ONNX spelling: add one in onnxc/export/host.py")
    made = HOST_SPELLINGS[name](w, node, xs)
    return [made] if isinstance(made, str) else made


# ---------------------------------------------------------------- nodes that wait for the run


def _later(w: GraphWriter, node: Node, xs: list[str]) -> list[str]:
    """The ONNX nodes themselves, of the opset that the graph is written in."""
    (region,) = node.regions
    own = dict(region.metadata["opsets"])
    inner = w.inner(own)
    inner.call(region.inputs, xs)
    outputs = [inner.fresh() for _ in region.outputs]
    inner.body(region, outputs)
    ends = [onnx.ValueInfoProto(name=n) for n in outputs]
    graph = helper.make_graph(inner.nodes, "later", [], ends, inner.initializers)
    if own.get("", 1) != w.opsets[""]:
        graph = _converted(w, graph, own)
    w.nodes += graph.node
    w.initializers += graph.initializer
    return outputs


def _converted(w: GraphWriter, graph: onnx.GraphProto, opsets: Mapping[str, int]) -> onnx.GraphProto:
    """The nodes in the writer's opset. Those whose meaning is the same in both stay as they are."""
    version, wanted = opsets.get("", 1), w.opsets[""]
    if all(_since(n, version) == _since(n, wanted) for n in _nodes(graph)):
        return graph
    ids = [helper.make_opsetid(domain, v) for domain, v in opsets.items()]
    known = _names(graph)
    # Without types: the converter needs none, and would go on from what is said here to the types of branches.
    graph.input.extend(onnx.ValueInfoProto(name=name) for name in sorted(known - _made(graph)))
    model = helper.make_model(graph, opset_imports=ids)
    try:
        graph = version_converter.convert_version(model, wanted).graph
    except Exception as error:  # the converter's own, of many kinds
        text = f"nodes of opset {version} cannot be written in opset {wanted}: {error}"
        raise UnsupportedError(text, cause=error) from error
    _rename(graph, known, {}, w)
    return graph


def _since(node: onnx.NodeProto, opset: int) -> int:
    if node.domain:
        return 0
    return int(onnx.defs.get_schema(node.op_type, opset, "").since_version)


def _graphs(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    """The graph and those inside of it."""
    inside = [a.g for n in graph.node for a in n.attribute if a.type == onnx.AttributeProto.GRAPH]
    return [graph, *(g for i in inside for g in _graphs(i))]


def _nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    return [n for g in _graphs(graph) for n in g.node]


def _rename(graph: onnx.GraphProto, known: set[str], names: dict[str, str], w: GraphWriter) -> None:
    """Gives what the converter has added names that the model does not have."""

    def name(old: str) -> str:
        return old if not old or old in known else names.get(old) or names.setdefault(old, w.fresh())

    for tensor in graph.initializer:
        tensor.name = name(tensor.name)
    for info in (*graph.input, *graph.output):
        info.name = name(info.name)
    for node in graph.node:
        node.input[:], node.output[:] = map(name, node.input), map(name, node.output)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _rename(attribute.g, known, names, w)


def _names(graph: onnx.GraphProto) -> set[str]:
    """Of all values, made here or outside."""
    return _made(graph) | {name for n in _nodes(graph) for name in n.input if name}


def _made(graph: onnx.GraphProto) -> set[str]:
    """The names of values that are made here."""
    given = {x.name for g in _graphs(graph) for x in (*g.initializer, *g.input)}
    return given | {name for n in _nodes(graph) for name in n.output}


CONTROL: dict[str, Control] = {
    "scan": _scan, "if": _if, "loop": _loop, "read": _read, "host": _host, "later": _later,
}  # fmt: skip
