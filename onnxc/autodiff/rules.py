"""The table of derivative rules: one for each primitive that has a derivative.

    @rule("mul")
    def mul(s: Step) -> Gradients:
        x, y = s.operands
        return s.b.mul(s.dy, y), s.b.mul(s.dy, x)

A rule is given the cotangents of a node's outputs (`dy`: how fast the loss changes with each element) and builds those
of its inputs, one for each, None where there is none. What it builds are primitives again: so gradients are compiled,
exported and differentiated like any graph. A pointwise rule may leave the cotangent of a broadcast operand in the
shape of the result: `reverse.py` adds it up.

Where a derivative does not exist, PyTorch's convention holds; the rules say which.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from onnxc.ir.graph import Node, Value
from onnxc.primitives.builder import Builder

Gradients = Sequence["Value | None"]


@dataclass(frozen=True)
class Step:
    """One node on the way back.

    Attributes:
        b: where the gradient's nodes are added.
        node: the node that is differentiated.
        dys: the cotangent of each of its outputs, None where nothing depends on it.
        needed: for each input, whether its cotangent is wanted.
    """

    b: Builder
    node: Node
    dys: Sequence[Value | None]
    needed: Sequence[bool]

    @property
    def operands(self) -> tuple[Value, ...]:
        """The inputs, all of which are present."""
        return self.node.operands

    @property
    def x(self) -> Value:
        """The first input."""
        return self.node.operands[0]

    @property
    def y(self) -> Value:
        """The only output."""
        return self.node.output

    @property
    def dy(self) -> Value:
        """The cotangent of the first output."""
        dy = self.dys[0]
        assert dy is not None
        return dy


Rule = Callable[[Step], Gradients]
_TABLE: dict[str, Rule] = {}
FAMILIES = (
    "elementwise", "movement", "reduction", "contraction", "attention", "indexing", "control", "branches", "loops",
    "custom",
)  # fmt: skip


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers the decorated function as the derivative of these primitives."""

    def add(f: Rule) -> Rule:
        _TABLE.update(dict.fromkeys(names, f))
        return f

    return add


def constant_almost_everywhere(s: Step) -> Gradients:
    """The rule of what is a staircase: the derivative is zero wherever there is one."""
    return [None] * len(s.node.inputs)


@cache
def rules() -> dict[str, Rule]:
    """Every rule, by the name of its primitive."""
    for family in FAMILIES:
        importlib.import_module(f"onnxc.autodiff.{family}")
    return _TABLE
