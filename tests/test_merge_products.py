"""Products of one value with several constants, merged into one: which are, and that it changes no bit."""

from __future__ import annotations

import numpy as np
import pytest

from onnxc.ir import dtypes
from onnxc.ir.graph import Graph, Value
from onnxc.ir.types import TensorType
from onnxc.passes.merge_products import merge_products
from onnxc.primitives.builder import Builder
from onnxc.primitives.interpret import interpret
from onnxc.primitives.verify import verify

RNG = np.random.default_rng(7)
F32 = dtypes.float32


def weights(*shape: int) -> np.ndarray:
    """Whole numbers: sums of their products are exact in any order."""
    return RNG.integers(-8, 9, shape).astype(np.float32)


def projections(biases: tuple[bool, bool, bool], columns: tuple[int, int, int] = (16, 8, 8)) -> Graph:
    """Three products of x, each read by a reduction and by a function: a reader that needs all of it."""
    b = Builder()
    x = b.input(TensorType(F32, (2, 5, 12)), "x")
    outputs: list[Value] = []
    for has_bias, n in zip(biases, columns, strict=True):
        y = b.matmul(x, b.constant(weights(12, n)))
        if has_bias:
            y = b.add(y, b.constant(weights(n)))
        heads = b.transpose(b.reshape(y, (2, 5, n // 4, 4)), (0, 2, 1, 3))
        outputs.append(b.add(heads, b.reduce("sum", heads, [3], keepdims=True)))
    return b.graph(outputs)


def products(graph: Graph) -> int:
    return sum(n.op == "matmul" for n in graph.nodes)


@pytest.mark.parametrize("biases", [(True, True, True), (False, False, False), (True, False, True)])
def test_merged_products_give_the_same_bits(biases: tuple[bool, bool, bool]) -> None:
    graph = projections(biases)
    merged = merge_products(graph)
    verify(merged, "merge-products")
    assert (products(graph), products(merged)) == (3, 1)
    x = weights(2, 5, 12)
    x[0, 1] = -0.0
    for a, b in zip(interpret(graph, [x]), interpret(merged, [x]), strict=True):
        assert a.tobytes() == b.tobytes()


def test_a_product_with_odd_columns_stays() -> None:
    assert products(merge_products(projections((True, True, True), (16, 8, 12)))) == 2


def test_products_with_an_epilogue_stay() -> None:
    """A gate: both factors go through functions that a product's kernel computes before it stores."""
    b = Builder()
    x = b.input(TensorType(F32, (5, 12)), "x")
    gate, up = (b.matmul(x, b.constant(weights(12, 16))) for _ in range(2))
    graph = b.graph([b.mul(b.mul(gate, b.sigmoid(gate)), up)])
    assert products(merge_products(graph)) == 2


def test_a_product_that_is_an_output_stays() -> None:
    b = Builder()
    x = b.input(TensorType(F32, (5, 12)), "x")
    ys = [b.matmul(x, b.constant(weights(12, 16))) for _ in range(2)]
    graph = b.graph([*ys, *(b.reduce("max", y, [1]) for y in ys)])
    assert products(merge_products(graph)) == 2


@pytest.mark.parametrize("shape", [(), (1,), (5, 1)])
def test_what_is_not_added_to_each_row_is_no_bias(shape: tuple[int, ...]) -> None:
    b = Builder()
    x = b.input(TensorType(F32, (5, 12)), "x")
    ys = [b.add(b.matmul(x, b.constant(weights(12, 16))), b.constant(weights(*shape))) for _ in range(2)]
    graph = b.graph([b.reduce("max", y, [1]) for y in ys])
    merged = merge_products(graph)
    verify(merged, "merge-products")
    data = weights(5, 12)
    for a, c in zip(interpret(graph, [data]), interpret(merged, [data]), strict=True):
        assert a.tobytes() == c.tobytes()


def test_products_of_bytes_stay() -> None:
    """Their zero points and their int32 are not those of a plain product."""
    b = Builder()
    x = b.input(TensorType(dtypes.int8, (4, 8)), "x")
    found = []
    for seed in (0, 1):
        w = RNG.integers(-128, 128, (8, 16)).astype(np.int8)
        y = b.one("matmul", x, b.constant(w), wide=True, zeros=(3, seed))
        found.append(b.add(y, b.reduce("max", y, [1], keepdims=True)))
    graph = b.graph(found)
    assert products(merge_products(graph)) == 2
