"""Products of halves as products of float32: what the pass changes, and what it leaves."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.graph import Graph, Value
from onnxc.ir.types import TensorType
from onnxc.passes.widen_products import PRODUCTS, widen_products
from onnxc.primitives.builder import Builder
from onnxc.primitives.interpret import interpret
from onnxc.primitives.verify import verify

RNG = np.random.default_rng(8)


def graph(half: DType) -> Graph:
    """Products that share operands, one by a constant, one in a scan, one of float32; results that are outputs."""
    b = Builder()
    x, w = b.input(TensorType(half, (5, 7)), "x"), b.input(TensorType(half, (7, 7)), "w")
    f = b.input(TensorType(dtypes.float32, (7, 3)), "f")
    c = b.constant(RNG.standard_normal((7, 3)).astype(half.numpy))
    y = b.matmul(x, w)
    z = b.matmul(b.mul(y, y), c)

    def step(inner: Builder, states: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
        new = inner.tanh(inner.matmul(states[0], w))
        return [new], [new]

    (end,), _ = b.scan([x], [], 3, step)
    return b.graph([y, z, end, b.matmul(b.cast(x, dtypes.float32), f)], ["y", "z", "end", "f"])


@pytest.mark.parametrize("half", [dtypes.float16, dtypes.bfloat16], ids=str)
def test_products(half: DType) -> None:
    before = graph(half)
    after = widen_products(before)
    verify(after)
    nodes = [*after.nodes, *(n for m in after.nodes for g in m.regions for n in g.nodes)]
    products = [n for n in nodes if n.op in PRODUCTS]
    assert len(products) == 4 and all(v.dtype is dtypes.float32 for n in products for v in (*n.operands, *n.outputs))
    assert [v.type for v in after.outputs] == [v.type for v in before.outputs]
    assert sum(n.op == "cast" and n.operands[0] is after.inputs[0] for n in after.nodes) == 2  # one of them the graph's
    arrays = [RNG.standard_normal(v.shape).astype(v.dtype.numpy) for v in before.inputs]
    unit = float(ml_dtypes.finfo(half.numpy).eps)
    for a, b in zip(interpret(after, arrays), interpret(before, arrays), strict=True):
        np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), rtol=8 * unit, atol=8 * unit)


def test_other_graphs_stay() -> None:
    b = Builder()
    x = b.input(TensorType(dtypes.float32, (5, 5)), "x")
    made = b.graph([b.matmul(x, x)])
    assert widen_products(made).nodes == made.nodes
