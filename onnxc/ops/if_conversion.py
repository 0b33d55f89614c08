"""If-conversion: both branches of an If are computed, and a `where` takes one, where that costs less than to ask.

An If is a step on the host, and so is each loop around it; branches without one leave the loop a part of a program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onnxc.ir.graph import Graph, Node, Value
from onnxc.ir.types import TensorType, same_shape
from onnxc.primitives.assumptions import assumptions
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import Builder, constant_of
from onnxc.primitives.costs import cycles
from onnxc.primitives.places import is_foreign

# What takes no longer than a step of the host: what a branch computes, in additions of an element (of which a vector's
# are one cycle), and the elements that are selected.
MOST_WORK = 1 << 16
MOST_SELECTED = 1 << 13
_KINDS = (Kind.POINTWISE, Kind.VIEW, Kind.REDUCTION)
_DRAWS = ("threefry", "random_state")
_DIVISIONS = ("div", "mod", "fmod")

Branch = tuple[Sequence[Node], Sequence[Value]]  # what it adds to the graph around it, and what it gives


def converted(b: Builder, condition: Value, branches: Sequence[Branch]) -> list[Value] | None:
    """The outputs of the first of two branches where a condition holds, else of the second, both computed; None where
    that may show (an error of the branch not taken), or take longer.

    Derivatives are left alone: those of the branch not taken may be NaN, and 0 times NaN is NaN.
    """
    (nodes, ends), (others, other_ends) = branches
    alike = len(ends) == len(other_ends) and all(map(_alike, ends, other_ends))
    if b.differentiable or not alike or not all(_is_cheap(n) for n in (nodes, others)):
        return None
    if sum(_size(x) for x, y in zip(ends, other_ends, strict=True) if x is not y) > MOST_SELECTED:
        return None  # what branches hand on, or only move, they do not compute, but to take one of two does
    b.nodes += [*nodes, *others]
    return [x if x is y else b.where(condition, x, y) for x, y in zip(ends, other_ends, strict=True)]


def _alike(x: Value, y: Value) -> bool:
    if not isinstance(x.type, TensorType) or not isinstance(y.type, TensorType) or is_foreign(x) or is_foreign(y):
        return False
    return x.type.dtype is y.type.dtype and x.type.is_static and same_shape(x.shape, y.shape)


def _is_cheap(nodes: Sequence[Node]) -> bool:
    """Whether nodes take little time, and cannot fail, whatever they are given."""
    if not all(map(_cannot_fail, nodes)) or sum(map(_work, nodes)) > MOST_WORK:
        return False
    taken = assumptions(Graph([], [], list(nodes), []))
    return not taken.equal and not taken.natural


def _cannot_fail(node: Node) -> bool:
    if node.regions or node.op in _DRAWS or lookup(node.op).kind not in _KINDS:
        return False
    if not all(isinstance(v.type, TensorType) and v.type.is_static and not is_foreign(v) for v in _values(node)):
        return False
    if node.op in _DIVISIONS and not node.output.dtype.is_float:
        divisor = constant_of(node.operands[1])
        return divisor is not None and bool(divisor.all())
    return True


def _values(node: Node) -> Iterable[Value]:
    return (*node.operands, *node.outputs)


def _work(node: Node) -> int:
    """What a node takes, in additions of an element: those that it reads or computes, by what each costs. What is only
    moved is computed with what reads it.
    """
    if lookup(node.op).kind is Kind.VIEW:
        return 0
    return cycles(node.op) * max(map(_size, _values(node)))


def _size(x: Value) -> int:
    """How many elements it has: a number, as checked before."""
    size = x.t.size
    assert isinstance(size, int)
    return size
