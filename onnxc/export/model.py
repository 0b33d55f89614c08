"""The whole model: opset versions, names, the file or two that it is written to."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import onnx
from onnx import ModelProto, helper

from onnxc.errors import InternalError
from onnxc.export.graphs import WEIGHTS, GraphWriter
from onnxc.export.tensors import External
from onnxc.ir.graph import Graph

OPSET = 21  # what primitives are spelled in
MIN_OPSET = 20  # the least opset that has all the spellings but
_SINCE = {"bitcast": 26}


def to_onnx(graph: Graph, *, opset: int | None = None, ir_version: int | None = None) -> ModelProto:
    """The graph as an ONNX model. `opset` is by default the imported graph's own, and OPSET for primitives.

    Raises InternalError where a primitive has no spelling, UnsupportedOpError for nodes of two opsets in one
    graph.
    """
    return _model(graph, opset, ir_version, None)


def write_onnx(
    graph: Graph, path: str | os.PathLike[str], *, opset: int | None = None, ir_version: int | None = None
) -> None:
    """Writes the graph to a file, with large constants in a second one beside it (`<name>.data`).

    No large constant is in the protobuf, so a model may be larger than 2 GB.
    """
    path = Path(path)
    data = path.with_name(path.name + ".data")
    with open(data, "wb") as file:
        model = _model(graph, opset, ir_version, External(data.name, file))
    if data.stat().st_size == 0:
        data.unlink()
    path.write_bytes(model.SerializeToString())


def _model(graph: Graph, opset: int | None, ir_version: int | None, external: External | None) -> ModelProto:
    imports = _imports(graph, opset)
    writer = GraphWriter(imports, graph.dim_names, _prefix(graph), external)
    proto = writer.top(graph)
    opsets = [helper.make_opsetid(domain, version) for domain, version in imports.items()]
    model = helper.make_model(proto, producer_name="onnxc", opset_imports=opsets)
    model.ir_version = ir_version or max(10, helper.find_min_ir_version_for(opsets, ignore_unknown=True))
    if any(not o.type.WhichOneof("value") for o in model.graph.output):
        model = onnx.shape_inference.infer_shapes(model)
    return model


def _imports(graph: Graph, opset: int | None) -> dict[str, int]:
    """Opset versions by domain. Imported ops fix the version of ONNX's own domain, else it is ours to choose."""
    ops = set(_ops(graph))
    own = graph.metadata.get("opsets", {})
    imported = any(op.startswith("onnx.") for op in ops)
    waiting = list(_waiting(graph))  # their opset may be higher than that of our own choice, never lower
    newest = max([OPSET, *(_SINCE.get(op, 0) for op in ops), *(g.metadata["opsets"].get("", 1) for g in waiting)])
    chosen = opset or (own.get("", newest) if imported else newest)
    spelled = sorted(op for op in ops if "." not in op and op != "constant")
    least = max([MIN_OPSET, *(_SINCE.get(op, 0) for op in spelled)])
    if spelled and chosen < least:
        raise InternalError(f"{spelled[0]} has no spelling in opset {chosen}: primitives need {least} at least")
    ops |= {op for g in waiting for op in _ops(g)}
    domains = sorted({op.rpartition(".")[0] for op in ops if "." in op} - {"onnx"})
    return {"": chosen, **{d: own.get(d, 1) for d in domains}}


def _ops(graph: Graph) -> Iterable[str]:
    for node in graph.nodes:
        yield node.op.partition("@")[0]
        for region in node.regions if node.op != "later" else ():
            yield from _ops(region)


def _waiting(graph: Graph) -> Iterable[Graph]:
    """The ONNX nodes that are built when the model runs."""
    for node in graph.nodes:
        for region in node.regions:
            yield from [region] if node.op == "later" else _waiting(region)


def _prefix(graph: Graph) -> str:
    """A prefix for generated names that none of the model's names begins with."""
    names, prefix = [*graph.input_names, *graph.output_names, *graph.metadata.get(WEIGHTS, ())], "v"
    while any(n.startswith(prefix) and n[len(prefix) :].isdigit() for n in names):
        prefix += "_"
    return prefix
