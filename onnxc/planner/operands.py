"""Open operands: routines that ask for elements one by one, and compute what they are asked for on the way.

A running sum and the best of a line are no loop nests, but on a GPU their kernels read an operand as loops do: at a
line and a position; and a scatter that sorts its updates reads each of them once. So an operand has a section of its
own (the elements of one value, stored nowhere), and what leads to the operand joins it as it joins any kernel: views,
casts, padding, functions, and rows that are gathered if they are scattered. A running sum also finishes its result, as
a template does.

Two things speak against it. Neighbouring lanes must find neighbouring elements, or a copy that turns the operand is
faster. And a node whose operands are wider than its result, or more than one, has its result stored rather than them,
unless they are in memory anyway.
"""

from __future__ import annotations

from onnxc.ir.expr import coefficient, prod
from onnxc.ir.graph import Node, Value
from onnxc.loops.access import Index
from onnxc.planner.draft import Draft
from onnxc.planner.groups import Group
from onnxc.planner.section import Section, cost
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import constant_of
from onnxc.primitives.movement import VIEWS

ROUTINES = ("cumsum", "top_k")  # that read their first operand so
SORTED = 8192  # updates of a scatter that are joined, above which they are sorted by their places
FINISHING = ("cumsum",)
CHEAP = 2  # what a function costs that may be computed for each comparison of two elements, or in both sections


def opened(node: Node) -> tuple[Value, ...]:
    """The operands that a routine reads element by element."""
    if node.op == "scatter_nd":
        data, index, updates = node.operands
        count = prod(index.shape[:-1])
        is_sorted = is_joined_in_order(node) and isinstance(count, int) and count > SORTED
        return (updates,) if is_sorted and updates is not data else ()
    return node.operands[:1] if node.op in ROUTINES and "runs" not in node.attrs else ()


def is_joined_in_order(node: Node) -> bool:
    """Whether a scatter joins updates in an order: it writes none over the others, and the result depends on it."""
    reduction, exact = node.attrs["reduction"], node.output.dtype.name in ("int32", "int64")
    return reduction != "none" and not (exact and reduction in ("add", "max", "min"))


def finishes(node: Node) -> bool:
    """Whether a routine has an epilogue."""
    return node.op in FINISHING


def takes(draft: Draft, group: Group, section: Section, node: Node) -> bool:
    """Whether a node had better be computed in the section of an open operand than be stored."""
    assert group.node is not None
    kind = lookup(node.op).kind
    if kind is not Kind.POINTWISE and node.op != ("gather" if group.node.op == "scatter_nd" else "pad"):
        return False
    out = node.output
    large = [v for v in node.operands if v.t.size != 1 and constant_of(v) is None]
    if group.node.op == "top_k" and "loose" not in group.node.attrs and (cost(node) > CHEAP or len(large) > 1):
        return False  # it reads each element many times
    computed = [v for v in large if not _is_in_memory(draft, v)]
    if len(computed) > 1 or any(v.dtype.bits > out.dtype.bits for v in computed):
        return False
    return all(follows(draft, section, v, at) for at in section.demands[out.id] for v, at in section.reads(node, at))


def follows(draft: Draft, section: Section, value: Value, at: Index) -> bool:
    """Whether neighbouring lanes find neighbours there, or the same element, if the value is stored."""
    if section.innermost is None or value.t.size == 1:
        return True
    address = draft.layout.address(value, at)
    steps = {s: coefficient(address, s) for s, _ in section.variables}
    if steps[section.innermost] in (0, 1):
        return True
    return None not in steps.values() and 1 not in steps.values()  # a copy would find no neighbours either


def _is_in_memory(draft: Draft, value: Value) -> bool:
    """Whether a value is there anyway: given to the model, stored already, or a template's or a routine's result."""
    node = value.node
    while node is not None and node.op in VIEWS and value.id not in draft.layout.stored:
        (value,) = node.operands
        node = value.node
    return node is None or value.id in draft.layout.stored or id(node) in draft.homes
