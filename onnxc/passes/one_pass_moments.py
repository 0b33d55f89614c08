"""Variances of halves by one pass over them, for a target whose time goes into reading.

    sum (x - mean)^2  =  sum x^2 - n mean^2

The left side reads x twice, the second time when the mean is known. The right side subtracts large numbers where the
mean is large beside the deviation: by their ratio squared, times the rounding of float32. But an x of 8 or 11 bits has
been rounded itself, which adds to the variance the same ratio squared, times the rounding of x squared: no less, since
the square of a half is exact in float32. So of halves nothing is lost that was there.

It is done where the sums are not those of rows (batch normalization): a kernel that has a row at hand reads it once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from onnxc.ir import dtypes
from onnxc.ir.graph import Graph, Node, Value
from onnxc.passes.simplify import Rewriter
from onnxc.primitives.builder import Builder, constant_of

_SMALL = 2.0**-80  # times which squares of bfloat16 are no more than 2^96, so that their sums are finite


def one_pass_moments(graph: Graph) -> Graph:
    """The graph whose variances of 16-bit values need no mean before them. It has been converted to halves."""
    r = Rewriter(graph)
    for node in graph.nodes:
        found = _moments(node)
        if found is None:
            r.keep(node)
            continue
        total, mean, count = found
        b = Builder()
        with b.from_origin(node.origin):
            own, middle = r.value(total), r.value(mean)
            assert own is not None and own.node is not None and middle is not None
            x, middle = own.node.operands[0], b.reshape(middle, own.shape)
            spread = _spread(b, x, middle, count, node.attrs["axes"])
            if _stored(x).dtype is dtypes.bfloat16:  # whose squares may be beyond float32: then of smaller numbers
                small = _spread(b, b.mul(x, _SMALL), b.mul(middle, _SMALL), count, node.attrs["axes"])
                large = b.mul(b.mul(small, 1 / _SMALL), 1 / _SMALL)
                spread = b.where(b.lt(spread, np.inf), spread, large)
        r.nodes += b.nodes
        r.replace(node.output, spread)
    return r.result()


def _spread(b: Builder, x: Value, mean: Value, count: int, axes: Sequence[int]) -> Value:
    """The sum of squared deviations; infinite or NaN where squares overflow."""
    squares = b.reduce("sum", b.mul(x, x), axes)
    return b.max(b.sub(squares, b.mul(b.mul(mean, mean), float(count))), 0.0)


def _moments(node: Node) -> tuple[Value, Value, int] | None:
    """Of a sum of squared deviations of halves: the sum that the mean is made of, the mean, and of how many."""
    if node.op != "reduce_sum" or node.output.dtype is not dtypes.float32 or _is_of_rows(node):
        return None
    square = _made(node.operands[0], "mul")
    if square is None:
        return None
    deviations = [_made(_stored(v), "sub") for v in square.operands]
    if deviations[0] is None or deviations[1] is not deviations[0]:
        return None
    x, mean = deviations[0].operands
    share = _made(mean, "div")
    total = None if share is None else _made(_unshaped(share.operands[0]), "reduce_sum")
    if share is None or total is None or _stored(x).dtype.bits != 16 or _stored(total.operands[0]) is not _stored(x):
        return None
    count, parts = constant_of(share.operands[1]), [x.shape[a] for a in total.attrs["axes"]]
    size = math.prod(d for d in parts if isinstance(d, int))
    same = total.attrs["axes"] == node.attrs["axes"] and all(isinstance(d, int) for d in parts)
    exact = count is not None and count.size == 1 and float(count.reshape(())) == size
    return (total.output, mean, size) if same and exact and mean.dtype is dtypes.float32 else None


def _is_of_rows(node: Node) -> bool:
    axes, rank = sorted(node.attrs["axes"]), node.operands[0].rank
    return axes == [*range(rank - len(axes), rank)]


def _made(v: Value, op: str) -> Node | None:
    return v.node if v.node is not None and v.node.op == op else None


def _stored(v: Value) -> Value:
    """What a value is, but for casts of floats."""
    while v.node is not None and v.node.op == "cast" and v.node.operands[0].dtype.is_float:
        v = v.node.operands[0]
    return v


def _unshaped(v: Value) -> Value:
    while v.node is not None and v.node.op == "reshape":
        v = v.node.operands[0]
    return v
