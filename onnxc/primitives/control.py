"""Control flow: primitives with regions (graphs of their own).

A region reads nothing from outside but constants of its own: what it needs is passed in as operands, so that passes
treat a node with regions as any other node.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnxc.errors import ShapeError
from onnxc.ir import dtypes
from onnxc.ir.expr import never_equal
from onnxc.ir.graph import Attrs, Graph, Node, Value
from onnxc.ir.types import TensorType, same_shape
from onnxc.primitives.base import Kind, Primitive, register


def scan_types(types: Sequence[TensorType], attrs: Attrs, region: Graph) -> tuple[TensorType, ...]:
    """Output types of `scan`.

    Operands: `states` initial states, `scanned` tensors [T, ...], then values that every step sees. The region takes
    the states, one slice of each scanned tensor, and the rest; `results` says which of its outputs are the new
    states and, after them, the slices that are stacked to [T, ...]. Where there is `going`, the number of a bool state,
    no step follows once it is false; what is stacked of steps that do not run is undefined then.
    """
    states, scanned, trip = attrs["states"], attrs["scanned"], attrs["trip"]
    if any(never_equal(t.shape[0], trip) for t in types[states : states + scanned]):
        raise ShapeError(f"scan over {trip} steps of {', '.join(map(str, types[states : states + scanned]))}")
    results = [region.outputs[k].t for k in attrs["results"]]
    if "going" in attrs and types[attrs["going"]] != TensorType(dtypes.boolean, ()):
        raise ShapeError("a scan that may end early has a bool scalar as a state")
    for before, after in zip(types[:states], results[:states], strict=True):
        if not same_shape(before.shape, after.shape) or before.dtype is not after.dtype:
            raise ShapeError(f"a state of scan changes its type from {before} to {after}")
    return (*types[:states], *(t.with_shape((trip, *t.shape)) for t in results[states:]))


def _no_inference(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    raise ShapeError("the types of a node with regions follow from its regions")


def close_region(inputs: list[Value], nodes: list[Node], outputs: list[Value]) -> tuple[Graph, list[Value]]:
    """A region without captures, and the outside values that it takes as further operands.

    Constants made outside are made again inside.
    """
    own = {v.id for v in inputs} | {v.id for n in nodes for v in n.outputs}
    outside: dict[int, Value] = {}
    for v in [v for n in nodes for v in n.operands] + outputs:
        if v.id not in own:
            outside.setdefault(v.id, v)
    inner = {vid: Value(v.type, v.name, v.data) for vid, v in outside.items()}
    constants = {vid: v.node for vid, v in outside.items() if v.node is not None and v.node.op == "constant"}
    made = [Node("constant", (), [inner[vid]], n.attrs, (), n.origin) for vid, n in constants.items()]
    made += _reading(nodes, inner)
    taken = [v for vid, v in outside.items() if vid not in constants]
    ends = [inner.get(v.id, v) for v in outputs]
    region = Graph([*inputs, *(inner[v.id] for v in taken)], ends, made, [f"out{i}" for i in range(len(ends))])
    return region, taken


def _reading(nodes: list[Node], inner: dict[int, Value]) -> list[Node]:
    """The nodes, those anew that read what has another value inside; `inner` gets their outputs."""
    found = []
    for n in nodes:
        if any(v is not None and v.id in inner for v in n.inputs):
            renewed = [Value(v.type, v.name, v.data) for v in n.outputs]
            ins = [None if v is None else inner.get(v.id, v) for v in n.inputs]
            inner.update({a.id: b for a, b in zip(n.outputs, renewed, strict=True)})
            n = Node(n.op, ins, renewed, n.attrs, n.regions, n.origin)
        found.append(n)
    return found


register(Primitive("scan", Kind.CONTROL, _no_inference, None))
