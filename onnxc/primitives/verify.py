"""Checks a graph after a pass: every value is defined once and before its use, and has the type its node's
rule gives.

    verify(graph, "fold constants")

raises an InternalError that names the pass and the node. ONNX operators (an imported graph) have no rule
here: for those only the structure is checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import onnxc.primitives.builder  # noqa: F401  (it registers every primitive)
from onnxc.errors import InternalError, OnnxcError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Expr
from onnxc.ir.graph import Graph, Node, Value
from onnxc.ir.types import TensorType, same_shape
from onnxc.primitives.base import TABLE
from onnxc.primitives.control import scan_types
from onnxc.primitives.host import is_host


def verify(graph: Graph, after: str = "") -> None:
    """Raises InternalError where the graph is not well formed; `after` names the pass that made it."""
    _Check(after).graph(graph)


def is_primitive(op: str) -> bool:
    """ONNX operators carry their domain before a dot; primitives have plain names."""
    return "." not in op and "@" not in op


class _Check:
    def __init__(self, after: str) -> None:
        self.after = after
        self.defined: set[int] = set()
        self.nodes: set[int] = set()

    def fail(self, message: str, node: Node | None = None) -> InternalError:
        after = f"after the pass {self.after!r}: " if self.after else ""
        return InternalError(f"{after}{message}", node=describe(node) if node is not None else None)

    def graph(self, graph: Graph) -> None:
        for value in graph.inputs:
            if value.node is not None:
                raise self.fail(f"the input {value.name!r} is the output of a node ({describe(value.node)})")
            self.define(value, None)
        for node in graph.nodes:
            self.node(node)
        if len(graph.outputs) != len(graph.output_names):
            raise self.fail(f"the graph has {len(graph.outputs)} outputs and {len(graph.output_names)} output names")
        for value, name in zip(graph.outputs, graph.output_names, strict=True):
            if value.id not in self.defined:
                raise self.fail(f"output {name!r} ({value!r}) is not defined in the graph")

    def define(self, value: Value, node: Node | None) -> None:
        if value.id in self.defined:
            raise self.fail(f"{value!r} is defined twice", node)
        self.defined.add(value.id)

    def node(self, node: Node) -> None:
        if id(node) in self.nodes:
            raise self.fail("the node stands in the graph twice", node)
        self.nodes.add(id(node))
        for i, value in enumerate(node.inputs):
            if value is not None and value.id not in self.defined:
                raise self.fail(f"operand {i} ({value!r}) is not defined before its use", node)
        self.attributes(node)
        for region in node.regions:
            outside = set(self.defined)
            self.graph(region)
            self.defined = outside  # what a region defines is not seen outside of it
        if is_primitive(node.op) and not is_host(node):
            self.types(node)
        for i, value in enumerate(node.outputs):
            if value.node is not node or value.index != i:
                raise self.fail(f"output {i} ({value!r}) does not point back to its node", node)
            self.define(value, node)

    def types(self, node: Node) -> None:
        """The primitive's own rule gives the types that the outputs have."""
        if node.op not in TABLE:
            raise self.fail(f"there is no primitive named {node.op!r}", node)
        if any(v is None or v.type is None for v in (*node.inputs, *node.outputs)):
            raise self.fail("a primitive has an operand or output without a type", node)
        try:
            expected = _expected(node)
        except (OnnxcError, KeyError, ValueError, TypeError, IndexError, AssertionError) as error:
            raise self.fail(f"the type rule fails: {type(error).__name__}: {error}", node) from error
        if len(expected) != len(node.outputs):
            raise self.fail(f"the node has {len(node.outputs)} outputs, its rule gives {len(expected)}", node)
        for value, t in zip(node.outputs, expected, strict=True):
            if value.t.dtype is not t.dtype or not same_shape(value.t.shape, t.shape):
                raise self.fail(f"an output has the type {value.type}, its rule gives {t}", node)
            self.content(node, value)

    def content(self, node: Node, value: Value) -> None:
        """What is known of a value's content has the value's shape."""
        if value.data is not None and value.t.is_static and value.data.shape != value.t.shape:
            raise self.fail(f"the known content of {value!r} has the shape {list(value.data.shape)}", node)

    def attributes(self, node: Node) -> None:
        for name, attr in node.attrs.items():
            if not _well_formed(attr):
                raise self.fail(
                    f"attribute {name} has a value that attributes cannot have: {type(attr).__name__}", node
                )
        if node.op == "constant":
            value = node.attrs.get("value")
            if not isinstance(value, np.ndarray) or value.dtype != dtypes.from_numpy(value.dtype).numpy:
                raise self.fail("a constant needs an array in native byte order", node)


def _expected(node: Node) -> tuple[TensorType, ...]:
    """The types that a primitive's rule gives its outputs."""
    types = [v.t for v in node.inputs if v is not None]
    if node.op == "scan":
        return scan_types(types, node.attrs, node.regions[0])
    return TABLE[node.op].infer(types, node.attrs)


def _well_formed(attr: Any) -> bool:
    if isinstance(attr, tuple):
        return all(map(_well_formed, attr))
    return attr is None or isinstance(attr, (bool, int, float, str, np.ndarray, np.generic, Expr, DType, TensorType))


def describe(node: Node) -> str:
    """A node for a message: its op, operand types and origin."""
    operands = ", ".join("-" if v is None else repr(v.type) if v.type else f"%{v.id}" for v in node.inputs)
    origin = f" from {', '.join(map(str, node.origin))}" if node.origin else ""
    return f"{node.op}({operands}){origin}"
