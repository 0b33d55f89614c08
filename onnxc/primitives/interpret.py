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
    for it; an InternalError says which primitive broke its own rule.
    """
    sizes = bind_sizes(graph.inputs, inputs)
    known = {v.id: np.asarray(a) for v, a in zip(graph.inputs, inputs, strict=True)}
    for node in graph.nodes:
        results = _evaluate(node, [known[v.id] for v in node.inputs if v is not None], sizes)
        for value, result in zip(node.outputs, results, strict=True):
            known[value.id] = _checked(node, value, result, sizes)
    return [known[v.id] for v in graph.outputs]


def bind_sizes(values: Sequence[Value], arrays: Sequence[np.ndarray]) -> dict[str, int]:
    """The size of each dynamic dim, read off the arrays. Raises InputError where two disagree."""
    sizes: dict[str, int] = {}
    for value, array in zip(values, arrays, strict=True):
        if len(value.shape) != np.ndim(array):
            raise InputError(f"input {value.name!r} is {value.type}, but got the shape {np.shape(array)}")
        for d, size in zip(value.shape, np.shape(array), strict=True):
            names = [s.key for s in symbols(d)]
            if len(names) == 1 and repr(d) == names[0] and sizes.setdefault(names[0], size) == size:
                continue
            if evaluate(d, sizes) != size:
                raise InputError(f"input {value.name!r} is {value.type}, but got the shape {np.shape(array)}")
    return sizes


def concrete(attr: Any, sizes: Mapping[str, int]) -> Any:
    """An attribute with its symbolic dims replaced by numbers."""
    if isinstance(attr, Expr):
        return evaluate(attr, sizes)
    return tuple(concrete(a, sizes) for a in attr) if isinstance(attr, tuple) else attr


def _evaluate(node: Node, args: Sequence[np.ndarray], sizes: Mapping[str, int]) -> Sequence[np.ndarray]:
    attrs = {k: concrete(v, sizes) for k, v in node.attrs.items()}
    if node.op == "sizes":
        return [np.array(attrs["dims"], dtype=np.int64)]
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
