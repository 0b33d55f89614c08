"""From ONNX operators to primitives: every node is replaced by its operator's definition in `onnxc.ops`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import onnx

from onnxc.errors import ModelError, OnnxcError, ShapeError, UnsupportedOpError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.graph import Graph, Node, Value
from onnxc.ops.registry import OpDef, apply, find
from onnxc.primitives.base import check_type
from onnxc.primitives.builder import Builder

# What a definition raises for inputs that it cannot be built from (a rank that does not fit, an attribute of
# a wrong type): the model's fault, as the definitions themselves are tested.
_MISFITS = (
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    ZeroDivisionError,
    OverflowError,
    AssertionError,
    AttributeError,
)


def decompose(graph: Graph, differentiable: bool = False) -> Graph:
    """The graph with every ONNX op replaced by primitives, and all types known.

    Before: as imported (`onnxc.frontends.onnx_file.load`), the opsets in its metadata. After: nodes
    of primitives, each with the origin of the ONNX node that it comes from, none that no output needs. A graph of
    primitives stays as it is.

    With `differentiable`, nodes carry the hints that derivative rules read (`onnxc.autodiff`).

    Raises UnsupportedOpError that lists every op without a definition; any other OnnxcError names the node,
    its op type and the shapes of its inputs.
    """
    if not any("." in node.op for node in graph.nodes):
        return graph
    definitions = _definitions(graph)
    b = Builder(differentiable)
    b.inputs = list(graph.inputs)
    values: dict[int, Value] = {v.id: v for v in graph.inputs}
    for v in graph.inputs:
        _check_input(v)
    for node in graph.nodes:
        with b.from_origin(node.origin):
            for old, new in zip(node.outputs, _build(b, node, definitions, values, graph), strict=False):
                if new is not None:
                    values[old.id] = new
    missing = [name for v, name in zip(graph.outputs, graph.output_names, strict=True) if v.id not in values]
    if missing:
        raise ModelError(f"the outputs {', '.join(map(repr, missing))} are not made by any node")
    outputs = [values[v.id] for v in graph.outputs]
    return replace(graph, outputs=outputs, nodes=_needed(b.nodes, outputs))


def _target(op: str, opsets: Mapping[str, int]) -> tuple[str, str, int]:
    """Domain, type and opset version of `onnx.Gelu`, `com.microsoft.FusedMatMul` or `onnx.Softmax@11`."""
    name, _, version = op.partition("@")
    domain, _, op_type = name.rpartition(".")
    domain = "" if domain == "onnx" else domain
    return domain, op_type, int(version) if version else opsets.get(domain, 1)


def _definitions(graph: Graph) -> dict[str, OpDef]:
    """The definition of each op of the graph, or one error that lists all ops without one."""
    opsets = graph.metadata["opsets"]
    found: dict[str, OpDef] = {}
    missing = []
    for node in graph.nodes:
        if node.op in ("constant", *found):
            continue
        domain, op_type, version = _target(node.op, opsets)
        definition = find(domain, op_type, version)
        if definition is None:
            missing.append((_name(node), f"{op_type}-{version}" + (f" ({domain})" if domain else "")))
        else:
            found[node.op] = definition
    if missing:
        raise UnsupportedOpError(missing)
    return found


def _name(node: Node) -> str:
    return next((s.name for s in node.origin if s.name), "")


def _build(
    b: Builder, node: Node, definitions: Mapping[str, OpDef], values: Mapping[int, Value], graph: Graph,
) -> Sequence[Value | None]:  # fmt: skip
    """One node's outputs in the new graph."""
    if node.op == "constant":
        return [b.constant(node.attrs["value"])]
    definition = definitions[node.op]
    _, _, version = _target(node.op, graph.metadata["opsets"])
    inputs = [None if v is None else values.get(v.id) for v in node.inputs]
    lost = [v for v, new in zip(node.inputs, inputs, strict=True) if v is not None and new is None]
    try:
        if lost:
            raise ModelError(f"the input {lost[0].name!r} is an optional output that its node does not give")
        _check_operands(definition, inputs, version)
        outputs = apply(definition, b, inputs, node.attrs, version, len(node.outputs))
        if len(outputs) < len(node.outputs):
            raise ModelError(f"{definition.name} has {len(outputs)} outputs, not {len(node.outputs)}")
        return outputs
    except OnnxcError as error:
        _place(error, node, inputs)
        raise
    except _MISFITS as error:
        wrapped = ModelError(f"its inputs or attributes do not fit {definition.name}: {error}", cause=error)
        _place(wrapped, node, inputs)
        raise wrapped from error


def _check_input(v: Value) -> None:
    try:
        check_type(v.t)
    except OnnxcError as error:
        raise type(error)(f"the input {v.name!r}: {error.message}") from error


_OWN_NAMES = {"float": "float32", "double": "float64"}
Formal = tuple[str, frozenset[str], bool]  # type parameter, kinds of dtypes, and whether the parameter is free


@cache
def _formals(domain: str, name: str, version: int) -> tuple[int, int, tuple[Formal, ...]] | None:
    """What the standard says of an operator's inputs: the fewest, the most, and each one's type."""
    try:
        schema = onnx.defs.get_schema(name, version, domain)
    except onnx.defs.SchemaError:
        return None
    free = onnx.defs.OpSchema.FormalParameterOption.Variadic
    found = []
    for formal in schema.inputs:
        names = (t.removeprefix("tensor(").rstrip(")") for t in formal.types if t.startswith("tensor("))
        kinds = frozenset(dtypes.BY_NAME[_OWN_NAMES.get(n, n)].kind for n in names)
        varied = formal.option == free and not formal.is_homogeneous
        found.append((formal.type_str, kinds, varied))
    return schema.min_input, schema.max_input, tuple(found)


def _check_operands(definition: OpDef, inputs: Sequence[Value | None], version: int) -> None:
    """The number of inputs and their kinds of dtypes are those of the standard, equal where it says so.

    Kinds alone (any float for a float): older opsets run in types that only later ones list.
    """
    found = _formals(definition.domain, definition.name, version)
    if found is None or any(v is not None and v.type is None for v in inputs):
        return
    fewest, most, formals = found
    if not fewest <= len(inputs) <= most:
        raise ModelError(f"{definition.name} takes {fewest} to {most} inputs, not {len(inputs)}")
    bound: dict[str, DType] = {}
    for i, v in enumerate(inputs):
        parameter, kinds, varied = formals[min(i, len(formals) - 1)]
        if v is None:
            continue
        if kinds and v.dtype.kind not in kinds:
            raise ModelError(f"input {i} of {definition.name} cannot be {v.t}")
        if not varied and bound.setdefault(parameter, v.dtype) is not v.dtype:
            raise ShapeError(f"operands have different dtypes: {bound[parameter]} and {v.dtype}")


def _place(error: OnnxcError, node: Node, inputs: Sequence[Value | None]) -> None:
    """Says in an error which node it is about, and what went in."""
    if error.node is None:
        name = _name(node)
        error.node = " ".join([*(str(s) for s in node.origin[:1]), *([repr(name)] if name else [])]) or node.op
    if not error.shapes:
        error.shapes = {f"input {i}": v.shape for i, v in enumerate(inputs) if v is not None and v.type is not None}


def _needed(nodes: Sequence[Node], outputs: Sequence[Value]) -> list[Node]:
    """The nodes that some output depends on, in order."""
    used = {v.id for v in outputs}
    kept = []
    for node in reversed(nodes):
        if any(v.id in used for v in node.outputs):
            used.update(v.id for v in node.operands)
            kept.append(node)
    return kept[::-1]
