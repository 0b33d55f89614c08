"""What a list of nodes can see: names, opset versions, and the attributes of the function call around it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx
from onnx import AttributeProto, GraphProto, NodeProto

from onnxc.errors import LimitError, ModelError
from onnxc.frontends.onnx_tensors import text
from onnxc.ir.graph import Node, Value

MIN_OPSET, MAX_OPSET = 1, 28
MAX_DEPTH = 64  # of subgraphs and local functions in each other
MOST_PATH = 2000  # characters of a node's name with those of the calls around it

Attribute = tuple[AttributeProto, "Scope"]
FunctionKey = tuple[str, str, str]


@dataclass
class Scope:
    """The names that a list of nodes can see, and where the nodes made for it go."""

    opsets: dict[str, int]
    parent: Scope | None = None
    names: dict[str, Value | None] = field(default_factory=dict)
    makers: dict[str, str] = field(default_factory=dict)  # name -> the node that makes it, for messages
    declared: Mapping[str, str] = field(default_factory=dict)  # name -> its element type, as the graph declares it
    weights: dict[str, Any] = field(default_factory=dict)  # initializers that nothing has read yet
    constants: list[Node] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    attributes: dict[str, Attribute] | None = None  # inside a function: what its call gave
    prefix: str = ""
    calls: tuple[FunctionKey, ...] = ()
    depth: int = 0

    def inner(self, **changes: Any) -> Scope:
        """A scope one level down: a subgraph's, or (with `parent=None`) a function's."""
        if self.depth >= MAX_DEPTH:
            raise LimitError(f"subgraphs and functions lie more than {MAX_DEPTH} deep in each other")
        common: dict[str, Any] = {
            "opsets": self.opsets, "parent": self, "attributes": self.attributes, "prefix": self.prefix,
            "calls": self.calls, "depth": self.depth + 1,
        }  # fmt: skip
        return Scope(**{**common, **changes})

    def path(self, name: str) -> str:
        """The name of a node, after those of the calls around it: they cannot grow into megabytes for each node."""
        path = self.prefix + name
        return path if len(path) <= MOST_PATH else f"{path[: MOST_PATH // 2]}...{path[-MOST_PATH // 2 :]}"

    def define(self, name: str, value: Value | None, maker: str) -> None:
        """Gives a value its name. ModelError where there is one of that name."""
        if name in self.names or name in self.weights:
            other = self.makers.get(name, "an initializer")
            raise ModelError(f"{name!r} is defined twice: by {other} and by {maker}")
        self.names[name] = value
        self.makers[name] = maker


def label_of(number: int, node: NodeProto) -> str:
    """What messages call a node: its number, op type and name."""
    name = text(node.name)
    return f"n{number} {text(node.op_type)}" + (f" {name!r}" if name else "")


_PYTORCH = re.compile(r"(?:^|[/\\](?:site|dist)-packages[/\\])torch[/\\]")
_FOLDED = "pkg.onnxscript.optimizer.folded_from"
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_PARAMETER = re.compile(r": PARAMETER target='([^'\n]*)'")  # a line of the signature
_FX_NODE, _DETACH = "pkg.torch.onnx.fx_node", "torch.ops.aten.detach."
_PADDED = re.compile(r"torch\.ops\.aten\.embedding\.default\]\(args = \(%[^,()]*, %[^,()]*, (\d{1,18})[,)]")
_QUOTED = re.compile(r"'([^'\n]*)'")  # the names of the list that the exporter writes as Python would
_FRAME = re.compile(r'File "([^"\n]*)", line (\d+)')


def source_line(node: NodeProto) -> str:
    """`file.py:123`, the innermost frame outside of PyTorch that its exporter recorded, else the innermost."""
    for entry in node.metadata_props:
        if entry.key == "pkg.torch.onnx.stack_trace":
            frames = _FRAME.findall(text(entry.value))
            own = [frame for frame in frames if not _PYTORCH.search(frame[0])]
            return ":".join((own or frames)[-1]) if frames else ""
    return ""


def domain_of(name: str | bytes) -> str:
    """A domain; that of ONNX itself has two spellings."""
    name = text(name)
    return "" if name == "ai.onnx" else name


def opsets_of(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """Version by domain. A domain that is imported twice has the higher version."""
    found: dict[str, int] = {}
    for entry in imports:
        domain, version = domain_of(entry.domain), int(entry.version)
        if domain and not 0 <= version < 1 << 31:
            raise ModelError(f"the model imports the domain {domain!r} in version {version}, which there is not")
        found[domain] = max(found.get(domain, version), version)
    if "" in found and not MIN_OPSET <= found[""] <= MAX_OPSET:
        raise ModelError(f"the model uses opset {found['']}; opsets {MIN_OPSET} to {MAX_OPSET} are supported")
    return found


def meaning(domain: str, op_type: str, version: int) -> int | None:
    """The version that last changed an operator; None where onnx does not know it."""
    try:
        return int(onnx.defs.get_schema(op_type, version, domain).since_version)
    except onnx.defs.SchemaError:
        return None


def _noted_nodes(proto: GraphProto, op_type: str) -> Iterator[tuple[str, str]]:
    """The results of the graph's own nodes of a type, with what PyTorch's exporter noted that they were."""
    for node in proto.node:
        if node.op_type == op_type and node.output:
            yield from ((text(node.output[0]), text(e.value)) for e in node.metadata_props if e.key == _FX_NODE)


def detached_values(proto: GraphProto) -> list[str]:
    """The results that were `x.detach()` in the module."""
    return [name for name, noted in _noted_nodes(proto, "Identity") if _DETACH in noted]


def padded_embeddings(proto: GraphProto) -> dict[str, int]:
    """Of results of embeddings with a `padding_idx`, the number of that row, which is not trained."""
    found = ((name, _PADDED.search(noted)) for name, noted in _noted_nodes(proto, "Gather"))
    return {name: int(match[1]) for name, match in found if match}


def noted_parameters(proto: GraphProto) -> dict[str, bool]:
    """Of weights of which PyTorch's exporter noted it, whether they are parameters of the module. (Buffers and
    constants are not, and what it computed without any parameter.)
    """
    weights = {text(t.name) for t in proto.initializer}
    noted = [(text(v.name), text(e.value)) for v in proto.value_info for e in v.metadata_props if e.key == _KIND]
    found = {name: kind == "PARAMETER" for name, kind in noted if name in weights}
    signature = next((text(e.value) for e in proto.metadata_props if e.key == _SIGNATURE), "")
    parameters = set(_PARAMETER.findall(signature))
    tables = [name for name, sources in folded_weights(proto).items() if parameters and parameters.isdisjoint(sources)]
    return {**dict.fromkeys(tables, False), **found}


def folded_weights(proto: GraphProto) -> dict[str, list[str]]:
    """Of each weight that PyTorch's exporter computed, the names of the values that it noted as what it read."""
    weights = {text(t.name) for t in proto.initializer}
    noted = [(text(v.name), text(e.value)) for v in proto.value_info for e in v.metadata_props if e.key == _FOLDED]
    return {name: _QUOTED.findall(sources) for name, sources in noted if name in weights}
