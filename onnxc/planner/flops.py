"""The work of a kernel, for reports: its arithmetic, and how much of each stored value it needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod as product

from onnxc.ir.expr import Dim, minimum, prod
from onnxc.ir.graph import Node, Value
from onnxc.planner.layout import Layout
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.movement import VIEWS

# What an element costs, in additions or multiplications: one, but for moved bits, which cost none, and for functions
# that are polynomials of about ten terms.
FREE = frozenset({"copy", "cast", "iota", "constant"})
FUNCTIONS = frozenset(
    {"exp", "log", "erf", "pow", "tanh", "sinh", "cosh", "asinh", "acosh", "atanh", "sin", "cos", "tan", "asin", "acos",
     "atan"}
)  # fmt: skip
FUNCTION_COST = 10


def flops(node: Node) -> Dim:
    """Multiplications and additions of a contraction; 0 for other primitives. A convolution counts as a direct one."""
    out: tuple[Dim, ...] = node.outputs[0].shape
    if node.op in ("matmul", "matmul_quantized"):
        inner: Dim = node.operands[0].shape[-1]
        return 2 * prod(out) * inner
    if node.op == "conv":
        return 2 * prod(out) * prod(node.operands[1].shape[1:])
    if node.op == "conv_weights":
        pixels: tuple[Dim, ...] = node.operands[1].shape
        return 2 * prod(out) * pixels[0] * prod(pixels[2:])
    if node.op == "attention_norm":
        depth: Dim = node.operands[0].shape[-1]
        keys: Dim = node.operands[1].shape[-1]
        return 2 * prod(out) * keys * depth
    if node.op == "attention_gradient":  # scores; what comes back through the values, but for these; the result
        q, kt, v, dy = node.operands[:4]
        products: Dim = q.shape[-1] + v.shape[-1]
        products = products if node.attrs["of"] == "v" else products + q.shape[-1]
        keys = kt.shape[-1]
        return 2 * prod(dy.shape[:-1]) * keys * products
    if node.op == "attention":
        width: Dim = node.operands[0].shape[-1]
        keys = node.operands[1].shape[-1]
        return 2 * prod(out[:-1]) * keys * (width + out[-1])
    return 0


def pointwise(node: Node) -> Dim:
    """The arithmetic of a pointwise primitive or a reduction, each element once; 0 for other primitives."""
    kind = lookup(node.op).kind
    if kind is Kind.POINTWISE:
        cost = 0 if node.op in FREE else FUNCTION_COST if node.op in FUNCTIONS else 1
        return cost * node.outputs[0].t.size
    if kind is Kind.REDUCTION:
        if "kernel" in node.attrs:  # a window: all of its elements, for each element of the output
            return node.outputs[0].t.size * product(node.attrs["kernel"])
        return node.operands[0].t.size
    return 0


def total(nodes: Iterable[Node]) -> tuple[Dim, Dim]:
    """The arithmetic of a kernel's nodes: of contractions, and of all others."""
    first: Dim = 0
    second: Dim = 0
    for node in nodes:
        first, second = first + flops(node), second + pointwise(node)
    return first, second


def elements_read(nodes: Iterable[Node], layout: Layout) -> dict[int, Dim]:
    """Elements of each storage that a kernel of these nodes needs, by the storage's id.

    Where a node reads through views (or gathers), it needs no more than the smallest value on the way: a slice
    needs its own size of what it is cut from. Parts that are different values add up, to at most the whole.
    """
    parts: dict[int, dict[int, Dim]] = {}
    whole: dict[int, Dim] = {}
    for source, part, size in _paths(list(nodes)):
        storage = layout.storage(source)
        parts.setdefault(storage.id, {})[part] = size
        whole[storage.id] = storage.t.size
    found: dict[int, Dim] = {}
    for key, sizes in parts.items():
        sum_: Dim = 0
        for size in sizes.values():
            sum_ = sum_ + size
        found[key] = minimum(sum_, whole[key])
    return found


def _paths(nodes: list[Node]) -> Iterator[tuple[Value, int, Dim]]:
    """For each value that some node reads from outside, through views or not: the smallest value on the way."""
    own = {v.id for n in nodes for v in n.outputs}
    for node in nodes:
        for position, value in enumerate(node.operands):
            narrow = node.op in VIEWS or (lookup(node.op).kind is Kind.INDEXED and position == 0)
            part, size = (node.outputs[0].id, node.outputs[0].t.size) if narrow else (value.id, value.t.size)
            while True:
                least = minimum(value.t.size, size)
                if least == value.t.size:
                    part, size = value.id, least
                if value.id not in own:
                    yield value, part, size
                if value.node is None or value.node.op not in VIEWS:
                    break
                value = value.node.operands[0]
