"""Weights of channels that training has let die, lifted out of the range of denormals.

Weight decay takes what a network does not use to numbers like 4e-40, which no step makes smaller any more: whole rows
of weights, of channels that nothing goes into, and whole columns, of channels that nothing comes out of. Many
processors multiply such numbers a hundred times as slowly as others. So rows and columns are multiplied by a power of
two, and what belongs to them is divided by it:

    conv(x, w)    becomes    conv(x * 2^-24, w * 2^24)        for channels of the input whose columns are tiny
                             conv(x, w * 2^24) * 2^-24        for channels of the output whose rows are

This is exact: powers of two round nothing, infinities and NaN stay what they are, and no sum overflows that did not.
Where `x * 2^-24` is denormal its last bits go, but a sum would not hold what they add: less than 2^-186.
(So a result is the same up to the rounding of results that are denormal themselves, which happens once instead of in
each step.) What is denormal in an input, and goes into a tiny column, becomes zero, and costs nothing any more.
"""

from __future__ import annotations

import numpy as np

from onnxc.ir.graph import Graph, Node, Value
from onnxc.passes.simplify import Rewriter
from onnxc.primitives.builder import Builder, constant_of

LIFT = 2.0**24  # makes the least denormal, 2^-149, a normal number
# Rows and columns are lifted all of whose weights are smaller than TINY (what is lifted twice stays below 2^-12), and
# of which some are below LEAST, so that products with small numbers are denormal.
TINY, LEAST = 2.0**-60, 2.0**-100
PART = 1 << 16  # elements that are looked at in one go


def lift_tiny_weights(graph: Graph) -> Graph:
    """The graph with tiny rows and columns of the constant weights of convolutions and products lifted."""
    r = Rewriter(graph)
    for node in graph.nodes:
        x, w = node.operands[:2] if node.op in ("conv", "matmul") else (None, None)
        weights = constant_of(w)
        if x is None or weights is None or weights.dtype != np.float32 or not _has_tiny(weights):
            r.keep(node)
        elif node.op == "conv":
            _lift_conv(r, node, weights)
        elif weights.ndim == 2:
            _lift_matmul(r, node, weights)
        else:
            r.keep(node)
    return r.result()


def _has_tiny(weights: np.ndarray) -> bool:
    """In parts that stay in the cache: weights may be gigabytes."""
    flat = weights.reshape(-1)
    parts = (np.abs(flat[k : k + PART]) for k in range(0, flat.size, PART))
    return any(bool(((part < LEAST) & (part > 0)).any()) for part in parts)


def _tiny(weights: np.ndarray, axis: int) -> np.ndarray:
    """Which places of an axis are tiny, as booleans [n]."""
    size = np.abs(np.moveaxis(weights, axis, 0).reshape(weights.shape[axis], -1))
    some = ((size < LEAST) & (size > 0)).any(1)
    return np.asarray(some & (size.max(1) < TINY))


def _lift_conv(r: Rewriter, node: Node, weights: np.ndarray) -> None:
    """Weights [M, C / groups, ...] of x [N, C, ...] and a result [N, M, ...]."""
    groups = int(node.attrs["groups"])
    parts = weights.reshape(groups, -1, *weights.shape[1:])
    rows, columns = _tiny(weights, 0), np.stack([_tiny(part, 1) for part in parts])  # [M], [groups, C / groups]
    lifted = parts * _factors(columns, LIFT).reshape(groups, 1, -1, *[1] * (weights.ndim - 2))
    lifted = lifted.reshape(weights.shape) * _factors(rows, LIFT).reshape(-1, *[1] * (weights.ndim - 1))
    _lift(r, node, lifted, columns.reshape(-1), rows, weights.ndim - 2)


def _lift_matmul(r: Rewriter, node: Node, weights: np.ndarray) -> None:
    """Weights [K, N] of x [..., K] and a result [..., N]."""
    rows, columns = _tiny(weights, 1), _tiny(weights, 0)
    _lift(r, node, weights * _factors(columns, LIFT)[:, None] * _factors(rows, LIFT), columns, rows, 0)


def _factors(which: np.ndarray, factor: float) -> np.ndarray:
    return np.where(which, factor, 1.0).astype(np.float32)


def _lift(r: Rewriter, node: Node, weights: np.ndarray, columns: np.ndarray, rows: np.ndarray, trailing: int) -> None:
    """The node with these weights; `trailing` axes follow that of the channels."""
    if not rows.any() and not columns.any():
        r.keep(node)
        return
    b = Builder()
    x = r.value(node.operands[0])
    assert x is not None

    def lowered(v: Value, which: np.ndarray) -> Value:
        if not which.any():
            return v
        return b.mul(v, b.constant(_factors(which, 1 / LIFT).reshape(-1, *[1] * trailing)))

    with b.from_origin(node.origin):
        inputs = [lowered(x, columns), b.constant(weights), *(r.value(v) for v in node.inputs[2:])]
        result = Value(node.output.type)
        b.nodes.append(Node(node.op, inputs, [result], node.attrs, node.regions, node.origin))
        new = lowered(result, rows)
    r.nodes += b.nodes
    r.replace(node.output, new)
