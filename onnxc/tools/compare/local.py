"""Layers of the reference's model, evaluated alone for values that somebody gives: in float64, in numpy with the
model's own dtypes, or in an engine.

    local = Layers(source, [layer], feeds, pool)
    local.exact(layer, {"h3": ours})               # float64
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxc.frontends import onnx_file
from onnxc.ir import dtypes
from onnxc.ir.graph import Graph, Node, Value
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.interpret import evaluate_node
from onnxc.tools.compare.engines import Engine, load_piece
from onnxc.tools.compare.metrics import is_float, wide
from onnxc.tools.compare.pieces import SourceModel
from onnxc.tools.compare.products import product
from onnxc.tools.compare.taps import named_primitives
from onnxc.tools.float64 import widen

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Layer:
    """What lies between a tensor and the nearest tensors before it that are known.

    Attributes:
        name: the tensor that it makes.
        nodes: positions in the source's nodes, in order.
        inputs: the known tensors that it reads.
    """

    name: str
    nodes: tuple[int, ...]
    inputs: tuple[str, ...]


class Layers:
    """Some layers of a model in primitives. `feeds` has a value, of the model's own type, of each tensor that a layer
    reads; large products are shared out to the threads of `pool`. Raises OnnxcError where they cannot be built (a layer
    that needs a step on the host, say).
    """

    def __init__(self, source: SourceModel, layers: Sequence[Layer], feeds: Mapping[str, Any], pool: Executor) -> None:
        self._pool = pool
        nodes = sorted({k for layer in layers for k in layer.nodes})
        piece = source.piece(nodes, feeds, [layer.name for layer in layers], linked=source.data_dir is not None)
        graph, self.values = named_primitives(onnx_file.load(piece, base_dir=source.data_dir))
        self.values |= {v.name: v for v in graph.inputs}
        self.graph = graph
        wide: dict[int, Value] = {}
        self._wide = widen(graph, wide, constants=False)
        self._wide_values = {name: wide[v.id] for name, v in self.values.items() if v.id in wide}

    def exact(self, layer: Layer, feeds: Mapping[str, Array]) -> Array:
        """The layer's tensor in float64, for these inputs."""
        return self._evaluate(self._wide, self._wide_values, layer, feeds)

    def narrow(self, layer: Layer, feeds: Mapping[str, Array]) -> Array:
        """The same in numpy, with the model's own dtypes."""
        return self._evaluate(self.graph, self.values, layer, feeds)

    def nudged(self, layer: Layer, feeds: Mapping[str, Array], eps: float) -> Array | None:
        """The layer in float64 for inputs that differ by a unit, up or down; None where it repeats no steps. This shows
        what becomes of an error from step to step, whereas a single run in numpy may be a lucky one.
        """
        known = {self.values[n].id for n in layer.inputs if n in self.values}
        if not any(node.op == "scan" for node in _needed(self.values[layer.name], known)):
            return None
        rng = np.random.default_rng(0)
        given = dict(feeds)
        for name in layer.inputs:
            if is_float(x := np.asarray(feeds[name])):
                given[name] = wide(x) * (1 + eps * rng.choice([-1.0, 1.0], x.shape))
        return self.exact(layer, given)

    def _evaluate(self, graph: Graph, values: Mapping[str, Value], layer: Layer, feeds: Mapping[str, Array]) -> Array:
        """A layer's tensor; the nodes that it needs run, and no others."""
        known: dict[int, Array] = {}
        for name in layer.inputs:
            if name in values and (value := values[name]).id not in known:
                known[value.id] = np.asarray(feeds[name]).astype(value.dtype.numpy, copy=False)
        end = values[layer.name]
        needed = {id(node) for node in _needed(end, known)}
        for node in graph.nodes:
            if id(node) in needed:
                known.update(zip((v.id for v in node.outputs), self._run(node, known), strict=True))
        return _widened(end, known[end.id])

    def _run(self, node: Node, known: Mapping[int, Array]) -> Sequence[Array]:
        """A node's results. Constants, and what is chosen from them, may be narrower than their types say: weights are
        widened where they are used, and those of products block by block.
        """
        if node.op == "constant":
            value: Array = node.attrs["value"]
            return [value]
        given = [(v, known[v.id]) for v in node.inputs if v is not None]
        if lookup(node.op).kind in (Kind.VIEW, Kind.INDEXED) and not any(is_float(a) for _, a in given[1:]):
            return evaluate_node(node, [a for _, a in given], {})
        if node.op == "matmul" and node.outputs[0].dtype is dtypes.float64:
            return [product(given[0][1], given[1][1], self._pool)]
        results = evaluate_node(node, [_widened(v, a) for v, a in given], {})
        return [np.asarray(r).astype(v.dtype.numpy, copy=False) for v, r in zip(node.outputs, results, strict=True)]


def _needed(end: Value, known: Collection[int]) -> list[Node]:
    """The nodes between a value and those that are known, by id."""
    found: dict[int, Node] = {}
    pending: list[Value | None] = [end]
    while pending:
        v = pending.pop()
        if v is None or v.id in known or v.node is None or id(v.node) in found:
            continue
        found[id(v.node)] = v.node
        pending.extend(v.node.operands)
    return list(found.values())


def _widened(value: Value, array: Array) -> Array:
    return array.astype(value.dtype.numpy, copy=False)


def in_engine(engine: Engine, source: SourceModel, layer: Layer, feeds: Mapping[str, Any]) -> Any:
    """A layer's tensor, as an engine computes it for these inputs. Raises OnnxcError."""
    runner, fed = load_piece(engine, source, layer.nodes, feeds, [layer.name])
    (found,) = runner({n: feeds[n] for n in fed})
    return found
