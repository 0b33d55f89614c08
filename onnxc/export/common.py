"""What spellings are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnxc.export.nodes import NodeWriter
from onnxc.ir.graph import Node, Value

Spelling = Callable[[NodeWriter, Node, list[str]], "str | list[str]"]
"""Writes a node, whose operands have the names given; returns the name of its output, or those of its outputs."""


def operand(node: Node, i: int = 0) -> Value:
    """An operand of a node, which is there."""
    value = node.inputs[i]
    assert value is not None
    return value


def direct(op_type: str, **attrs: Any) -> Spelling:
    """The ONNX op of the same meaning."""
    return lambda w, node, xs: w.compute(op_type, node.inputs[0].dtype, xs, **attrs)  # type: ignore[union-attr]
