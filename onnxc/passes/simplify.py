"""Cleaning passes: dead code, common subexpressions, constant folding."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onnxc.errors import OnnxcError
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Symbol
from onnxc.ir.graph import Graph, Node, Origin, Value, merge_origins
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.builder import constant_of
from onnxc.primitives.symbols import symbols_of_node, told_sizes

FOLD_GROWTH = 4  # a folded result may be this many times larger than what it is computed from ...
FOLD_FREE_BYTES = 1 << 20  # ... or this large
_NOTHING = Node("constant", (), [], {})


def eliminate_dead(graph: Graph) -> Graph:
    """Without the nodes that no output needs, and no size of a node that one needs."""
    needed = {v.id for v in graph.outputs}
    told = told_sizes(graph)
    sizes: set[Symbol] = set()
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if any(v.id in needed or (told and told.get(v.id, {}).keys() & sizes) for v in node.outputs):
            kept.append(node)
            needed.update(v.id for v in node.operands)
            sizes |= symbols_of_node(node) if told else set()
    return replace(graph, nodes=kept[::-1])


class Rewriter:
    """Rebuilds a graph node by node while values are replaced by others."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: list[Node] = []
        self.replaced: dict[int, Value] = {}

    def value(self, v: Value | None) -> Value | None:
        """What stands for a value of the old graph."""
        return None if v is None else self.replaced.get(v.id, v)

    def keep(self, node: Node) -> Node:
        """Adds a node as it is, its operands replaced; its outputs get new values only if an operand changed."""
        inputs = [self.value(v) for v in node.inputs]
        if all(a is b for a, b in zip(inputs, node.inputs, strict=True)):
            self.nodes.append(node)
            return node
        outputs = [Value(v.type, v.name, v.data) for v in node.outputs]
        new = Node(node.op, inputs, outputs, node.attrs, node.regions, node.origin)
        self.replaced.update({a.id: b for a, b in zip(node.outputs, outputs, strict=True)})
        self.nodes.append(new)
        return new

    def replace(self, old: Value, new: Value) -> None:
        """Later nodes read `new` for `old`, whose name it takes where it has none."""
        self.replaced[old.id] = new
        new.name = new.name or old.name

    def result(self) -> Graph:
        """The new graph, without what nothing needs any more."""
        outputs = [self.replaced.get(v.id, v) for v in self.graph.outputs]
        return eliminate_dead(replace(self.graph, nodes=self.nodes, outputs=outputs))


HASHED_BYTES = 1 << 12  # of larger constants only so much is hashed: equal keys are then compared in full


def _frozen(x: Any) -> object:
    if isinstance(x, np.ndarray):
        some = x.flat[: max(1, HASHED_BYTES // x.itemsize)]  # a reshape would copy all of a transposed one
        content = tuple(some) if x.dtype == object else hashlib.sha256(some.tobytes()).digest()
        return (str(x.dtype), x.shape, content)
    if isinstance(x, DType):
        return x.name
    return tuple(_frozen(y) for y in x) if isinstance(x, (tuple, list)) else (type(x).__name__, x)


def _key(node: Node, inputs: tuple[int, ...]) -> tuple[object, ...]:
    attrs: Mapping[str, Any] = node.attrs
    return (node.op, inputs, tuple(sorted((k, _frozen(v)) for k, v in attrs.items())))


def _bytes(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _really_equal(a: Node, b: Node) -> bool:
    for k, x in a.attrs.items():
        y = b.attrs[k]
        large = isinstance(x, np.ndarray) and x is not y and x.nbytes > HASHED_BYTES
        if large and (x.dtype == object or not np.array_equal(_bytes(x), _bytes(y))):
            return False
    return True


def share_common(graph: Graph) -> Graph:
    """Computes equal nodes once; the one that stays gets the origins of all."""
    r = Rewriter(graph)
    seen: dict[tuple[object, ...], Node] = {}
    merged: dict[int, tuple[Node, list[Origin]]] = {}
    for node in graph.nodes:
        if node.regions or lookup(node.op).kind is Kind.CONTROL:
            r.keep(node)
            continue
        inputs = tuple(v.id if v is not None else -1 for v in (r.value(v) for v in node.inputs))
        key = _key(node, inputs)
        first = seen.get(key)
        if first is not None and _really_equal(first, node):
            for old, new in zip(node.outputs, first.outputs, strict=True):
                r.replace(old, new)
            if node.op != "constant":
                merged.setdefault(id(first), (first, [first.origin]))[1].append(node.origin)
        else:
            seen[key] = r.keep(node)
    for first, origins in merged.values():
        first.origin = merge_origins(origins)
    return r.result()


def _worth_storing(node: Node, uses: dict[int, list[Node]]) -> bool:
    """A broadcast constant is kept as it is, unless it is the weight of a template, which wants it packed."""
    readers = [r.op for v in node.outputs for r in uses.get(v.id, ())]
    return node.op != "expand" or any(op in ("conv", "matmul", "reshape", "transpose") for op in readers)


def _static_bytes(v: Value) -> int:
    """More than any budget for what is not static, as [0, n] is not, which has 0 bytes."""
    nbytes = v.t.nbytes
    return nbytes if isinstance(nbytes, int) and v.t.is_static else 1 << 62


def fold_constants(graph: Graph, budget: int) -> Graph:
    """Evaluates what depends on constants alone, as long as the results fit in `budget` bytes and do not grow much.

    A result counts until all that read it have been evaluated too: then nothing needs it any more.
    """
    r = Rewriter(graph)
    uses = graph.uses()
    readers = Counter(v.id for node in graph.nodes for v in node.operands)
    readers.update(v.id for v in graph.outputs)
    made: dict[int, int] = {}  # where the constants of results are, by the ids of these
    for node in graph.nodes:
        arrays = [constant_of(r.value(v)) for v in node.inputs]
        size = sum(_static_bytes(v) for v in node.outputs)
        worth = size <= budget and _grows_little(node, size, arrays) and _worth_storing(node, uses)
        results = _evaluated(node, arrays) if worth else None
        if results is None:
            r.keep(node)
            continue
        budget -= size
        for v in node.operands:
            readers[v.id] -= 1
            if readers[v.id] == 0 and v.id in made:
                budget += _static_bytes(v)
                r.nodes[made.pop(v.id)] = _NOTHING
        for old, array in zip(node.outputs, results, strict=True):
            value = Value(old.type, old.name, old.data)
            r.nodes.append(
                Node("constant", (), [value], {"value": np.asarray(array, old.t.dtype.numpy)}, (), node.origin)
            )
            made[old.id] = len(r.nodes) - 1
            r.replace(old, value)
    r.nodes = [node for node in r.nodes if node is not _NOTHING]
    return r.result()


def _grows_little(node: Node, size: int, arrays: Sequence[np.ndarray | None]) -> bool:
    """Whether a node's results, of so many bytes, are small, or not much larger than what they are computed from."""
    known = sum(a.nbytes for a in arrays if a is not None)
    return node.op == "expand" or size <= max(FOLD_FREE_BYTES, FOLD_GROWTH * known)


def _evaluated(node: Node, arrays: Sequence[np.ndarray | None]) -> tuple[np.ndarray, ...] | None:
    """A node's results from its operands; None where one of these is no constant, or a run is to report an error."""
    evaluate = lookup(node.op).evaluate
    if evaluate is None or not arrays or any(a is None for a in arrays):
        return None
    try:
        with np.errstate(all="ignore"):
            result = evaluate(*arrays, **node.attrs)
    except (OnnxcError, IndexError):  # an index outside, a division by zero
        return None
    return result if isinstance(result, tuple) else (result,)
