"""Products of one matrix with several constant ones become one product: the queries, keys and values of attention.

One wide product fills a GPU where three narrow ones do not, and reads its left factor once. The results are slices of
the wide one, which are views. A product is merged only where its result goes to memory anyhow: one that a pointwise
function follows keeps its epilogue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxc.ir.graph import Graph, Node, Value, merge_origins
from onnxc.passes.simplify import Rewriter
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import Builder, constant_of

ALIGNED = 8  # columns: a slice that begins elsewhere could not be read by whole vectors


@dataclass(frozen=True)
class Branch:
    """A product x w, with the constant that is added to each row, if any.

    Attributes:
        product: the node.
        weights: w [K, N].
        addition: the node that adds, and no other reads the product.
        bias: what it adds [N].
    """

    product: Node
    weights: np.ndarray
    addition: Node | None = None
    bias: np.ndarray | None = None

    @property
    def result(self) -> Value:
        """The sum, or the product where nothing is added."""
        return (self.addition or self.product).output

    @property
    def row(self) -> np.ndarray:
        """What is added to each row; -0.0, which changes no number, where nothing is."""
        return np.full(self.weights.shape[1], -0.0, self.weights.dtype) if self.bias is None else self.bias


def merge_products(graph: Graph) -> Graph:
    """The graph with products of one value merged, where that is worth it."""
    uses = graph.uses()
    outputs = {v.id for v in graph.outputs}
    families: dict[int, list[Branch]] = {}
    for node in graph.nodes:
        branch = branch_of(node, uses, outputs)
        if branch is not None and branch.result.id not in outputs and _lies_in_memory(branch.result, uses):
            families.setdefault(node.operands[0].id, []).append(branch)
    first: dict[int, list[Branch]] = {}
    gone: set[int] = set()
    for family in families.values():
        if len(family) > 1:
            first[id(family[0].product)] = family
            gone.update(id(n) for branch in family for n in (branch.product, branch.addition) if n is not None)
    r = Rewriter(graph)
    for node in graph.nodes:
        if id(node) in first:
            _merge(r, first[id(node)])
        elif id(node) not in gone:
            r.keep(node)
    return r.result()


def branch_of(node: Node, uses: dict[int, list[Node]], outputs: set[int]) -> Branch | None:
    """A product with a constant matrix of so many columns that slices of it are whole vectors; None of other nodes."""
    if node.op != "matmul" or node.attrs.get("wide") or node.output.rank < 2:
        return None
    weights = constant_of(node.operands[1])
    if weights is None or weights.ndim != 2 or weights.shape[1] % ALIGNED or constant_of(node.operands[0]) is not None:
        return None
    readers = uses.get(node.output.id, [])
    if len(readers) == 1 and readers[0].op == "add" and node.output.id not in outputs:
        addition = readers[0]
        others = [v for v in addition.operands if v is not node.output]
        bias = constant_of(others[0]) if len(others) == 1 else None
        row = (*(1,) * (bias.ndim - 1), weights.shape[1]) if bias is not None else ()
        if bias is not None and bias.shape == row and bias.ndim <= node.output.rank:
            return Branch(node, weights, addition, bias.reshape(-1))
    return Branch(node, weights)


def _lies_in_memory(value: Value, uses: dict[int, list[Node]]) -> bool:
    """Whether what reads a value, through views, wants it in memory: attention, or readers of which one takes other
    positions than its own (the two halves that a rotary embedding exchanges).
    """
    while True:
        readers = uses.get(value.id, [])
        if len(readers) != 1:
            return any(lookup(n.op).kind is not Kind.POINTWISE for n in readers)
        if readers[0].op == "attention":
            return True
        if lookup(readers[0].op).kind is not Kind.VIEW:
            return False
        value = readers[0].output


def _merge(r: Rewriter, family: Sequence[Branch]) -> None:
    """One product in place of the family's, and its slices."""
    b = Builder()
    product = family[0].product
    with b.from_origin(merge_origins([n.origin for x in family for n in (x.product, x.addition) if n is not None])):
        x = r.value(product.operands[0])
        assert x is not None
        y = b.matmul(x, b.constant(np.concatenate([branch.weights for branch in family], axis=1)))
        if any(branch.bias is not None for branch in family):
            y = b.add(y, b.constant(np.concatenate([branch.row for branch in family])))
        slices = b.split(y, y.rank - 1, [branch.weights.shape[1] for branch in family])
    r.nodes += b.nodes
    for branch, part in zip(family, slices, strict=True):
        r.replace(branch.result, part)
