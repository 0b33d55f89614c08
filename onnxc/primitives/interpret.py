"""Runs a graph of primitives with numpy, node by node: the meaning that everything faster must agree with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxc.errors import InputError, InternalError
from onnxc.ir.expr import Expr, evaluate, symbols
from onnxc.ir.graph import Graph, Node, Value
from onnxc.primitives.base import lookup


def interpret(graph: Graph, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The outputs of a graph of primitives for these inputs, in the order of the graph's.

    Dynamic dims take their sizes from the inputs. Every result is checked against the type that was inferred
    for it; an InternalError says which primitive broke its own rule. A value is dropped after its last use.
    """
    return _run(graph, [np.asarray(a) for a in inputs], bind_sizes(graph.inputs, inputs))


def _run(graph: Graph, inputs: Sequence[np.ndarray], sizes: Mapping[str, int]) -> list[np.ndarray]:
    known = {v.id: a for v, a in zip(graph.inputs, inputs, strict=True)}
    last = {v.id: k for k, node in enumerate(graph.nodes) for v in node.operands}
    kept = {v.id for v in graph.outputs}
    for k, node in enumerate(graph.nodes):
        results = evaluate_node(node, [known[v.id] for v in node.inputs if v is not None], sizes)
        for value, result in zip(node.outputs, results, strict=True):
            known[value.id] = _checked(node, value, result, sizes)
        for v in node.operands:
            if last[v.id] == k and v.id not in kept:
                known.pop(v.id, None)
    return [known[v.id] for v in graph.outputs]


def bind_sizes(values: Sequence[Value], arrays: Sequence[np.ndarray]) -> dict[str, int]:
    """The size of each dynamic dim, read off the arrays. Raises InputError where two disagree."""
    sizes: dict[str, int] = {}
    for value, array in zip(values, arrays, strict=True):
        if len(value.shape) != np.ndim(array):
            raise InputError(f"input {value.name!r} is {value.type}, but got the shape {np.shape(array)}")
        for d, size in zip(value.shape, np.shape(array), strict=True):
            names = [s.key for s in symbols(d)]
            if len(names) == 1 and repr(d) == names[0]:
                sizes.setdefault(names[0], size)
    for value, array in zip(values, arrays, strict=True):
        if any(evaluate(d, sizes) != size for d, size in zip(value.shape, np.shape(array), strict=True)):
            raise InputError(f"input {value.name!r} is {value.type}, but got the shape {np.shape(array)}")
    return sizes


def concrete(attr: Any, sizes: Mapping[str, int]) -> Any:
    """An attribute with its symbolic dims replaced by numbers."""
    if isinstance(attr, Expr):
        return evaluate(attr, sizes)
    return tuple(concrete(a, sizes) for a in attr) if isinstance(attr, tuple) else attr


def evaluate_node(node: Node, args: Sequence[np.ndarray], sizes: Mapping[str, int]) -> Sequence[np.ndarray]:
    """One node's results for the operands that are present."""
    attrs = {k: concrete(v, sizes) for k, v in node.attrs.items()}
    if node.op == "sizes":
        return [np.array(attrs["dims"], dtype=np.int64)]
    if node.op == "scan":
        return _scan(node.regions[0], args, attrs, sizes)
    primitive = lookup(node.op)
    if primitive.evaluate is None or node.regions:
        raise InternalError(f"the interpreter cannot run {node.op}")
    with np.errstate(all="ignore"):
        result = primitive.evaluate(*args, **attrs)
    return result if isinstance(result, tuple) else [np.asarray(result)]


def _checked(node: Node, value: Value, result: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
    shape = tuple(evaluate(d, sizes) for d in value.shape)
    if result.shape != shape or result.dtype != value.dtype.numpy:
        raise InternalError(
            f"{node.op} gave {result.dtype}{list(result.shape)}, but its type is {value.type}, {list(shape)}"
        )
    return result


def _scan(
    region: Graph, args: Sequence[np.ndarray], attrs: Mapping[str, Any], sizes: Mapping[str, int]
) -> list[np.ndarray]:
    """See `onnxc.primitives.control.scan_types`."""
    split = attrs["states"] + attrs["scanned"]
    states, scanned, rest = list(args[: attrs["states"]]), args[attrs["states"] : split], args[split:]
    slices: list[list[np.ndarray]] = []
    trip = evaluate(attrs["trip"], sizes)
    for step in range(trip):
        if "going" in attrs and not states[attrs["going"]]:
            break
        found = _run(region, [*states, *(a[step] for a in scanned), *rest], sizes)
        results = [found[k] for k in attrs["results"]]
        states, collected = results[: len(states)], results[len(states) :]
        slices.append(collected)
    types = [region.outputs[k].t for k in attrs["results"][len(states) :]]
    stacks = [np.zeros((trip, *concrete(t.shape, sizes)), t.dtype.numpy) for t in types]
    for step, collected in enumerate(slices):
        for stack, x in zip(stacks, collected, strict=True):
            stack[step] = x
    return [*states, *stacks]
