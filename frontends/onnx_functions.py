"""A model's local functions: which function a node calls, with which attributes, and how many nodes they amount to."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import FunctionProto, ModelProto, NodeProto

from onnxc.errors import LimitError, ModelError
from onnxc.frontends.onnx_attributes import resolve
from onnxc.frontends.onnx_scope import MAX_DEPTH, Attribute, FunctionKey, Scope, domain_of
from onnxc.frontends.onnx_tensors import text

MAX_NODES = 1 << 20  # after inlining: functions that call functions twice grow exponentially


def key_of(function: FunctionProto) -> FunctionKey:
    """What a function is known by: domain, name, overload."""
    return domain_of(function.domain), text(function.name), text(function.overload)


def check_size(nodes: int) -> None:
    """Raises LimitError for more nodes than a model may have."""
    if nodes > MAX_NODES:
        raise LimitError(f"the model has {nodes} nodes once its functions are inlined (limit: {MAX_NODES})")


class Functions:
    """The functions of a model."""

    def __init__(self, model: ModelProto) -> None:
        self._table: dict[FunctionKey, FunctionProto] = {}
        self._sizes: dict[FunctionKey, int] = {}
        for function in model.functions:
            key = key_of(function)
            if key in self._table:
                raise ModelError(f"the model has two local functions {'.'.join(key[:2])}")
            self._table[key] = function

    def called(self, node: NodeProto) -> FunctionProto | None:
        """The function that a node calls, where it is a call."""
        return self._table.get(_called(node))

    def inlined(self, nodes: Sequence[NodeProto], depth: int = 0) -> int:
        """The number of nodes once all functions are inlined, counted without doing it."""
        if not self._table:
            return len(nodes)  # those of subgraphs are counted as they are read
        if depth > MAX_DEPTH:
            raise LimitError(f"subgraphs and functions lie more than {MAX_DEPTH} deep in each other")
        total = 0
        for n in nodes:
            total += 1 + sum(self.inlined(a.g.node, depth + 1) for a in n.attribute if a.HasField("g"))
            key = _called(n)
            if key in self._table and key not in self._sizes:
                self._sizes[key] = 0  # a function that calls itself is found when it is inlined
                self._sizes[key] = self.inlined(self._table[key].node, depth + 1)
            total += self._sizes.get(key, 0)
        return total


def _called(node: NodeProto) -> FunctionKey:
    return domain_of(node.domain), text(node.op_type), text(node.overload)


def arguments(call: NodeProto, function: FunctionProto, scope: Scope) -> dict[str, Attribute]:
    """The attributes that a function sees: its defaults, then what the call gives."""
    found = {text(a.name): (a, scope) for a in function.attribute_proto}
    for given in call.attribute:
        resolved = resolve(given, scope)
        if resolved is not None:
            found[text(given.name)] = resolved
    return found
