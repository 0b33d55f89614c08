"""Products of a gate and what it opens, kept as one matrix: which are divided, and that it changes no bit."""

from __future__ import annotations

import numpy as np
import pytest

from onnxc.ir import dtypes
from onnxc.ir.graph import Graph, Value
from onnxc.ir.types import TensorType
from onnxc.passes.gated_products import divide_gated_products
from onnxc.primitives.builder import Builder
from onnxc.primitives.interpret import interpret
from onnxc.primitives.verify import verify

RNG = np.random.default_rng(7)
F16 = dtypes.float16


def weights(*shape: int) -> np.ndarray:
    """Whole numbers: sums of their products are exact in any order."""
    return RNG.integers(-4, 5, shape).astype(np.float16)


def cut(b: Builder, y: Value, how: str) -> tuple[Value, Value]:
    """Two parts of the columns of y."""
    n = y.shape[-1]
    assert isinstance(n, int)
    if how == "even and odd":
        return b.slice(y, y.rank - 1, 0, n, 2), b.slice(y, y.rank - 1, 1, n, 2)
    first = n // 2 if how != "unequal" else n // 4
    left, right = b.split(y, y.rank - 1, [first, n - first])
    if how == "unequal":
        right = b.slice(right, y.rank - 1, 0, first)
    return (right, left) if how == "swapped" else (left, right)


def gated(how: str = "halves", bias: bool = True, columns: int = 32, also: bool = False, meets: bool = True) -> Graph:
    """tanh(a) * b of the two parts of x w + c."""
    b = Builder()
    x = b.input(TensorType(F16, (3, 5, 12)), "x")
    y = b.matmul(x, b.constant(weights(12, columns)))
    y = b.add(y, b.constant(weights(columns))) if bias else y
    left, right = cut(b, y, how)
    gate = b.one("tanh", left)
    outputs = [b.mul(gate, right)] if meets else [gate, b.one("tanh", right)]
    return b.graph([*outputs, y] if also else outputs)


def products(graph: Graph) -> int:
    return sum(n.op == "matmul" for n in graph.nodes)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("how", ["halves", "swapped", "even and odd"])
def test_divided_products_give_the_same_bits(how: str, bias: bool) -> None:
    graph = gated(how, bias)
    divided = divide_gated_products(graph)
    verify(divided, "divide-gated-products")
    assert (products(graph), products(divided)) == (1, 2)
    assert not any(n.op == "slice" for n in divided.nodes)
    x = weights(3, 5, 12)
    for a, b in zip(interpret(graph, [x]), interpret(divided, [x]), strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize(
    "graph", [gated("unequal"), gated(columns=24), gated(also=True), gated(meets=False)],
    ids=["unequal parts", "odd columns", "read as a whole", "parts that do not meet"],
)  # fmt: skip
def test_products_that_stay_whole(graph: Graph) -> None:
    assert products(divide_gated_products(graph)) == 1
