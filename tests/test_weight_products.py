"""Gradients of convolutions by their weights as products of matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxc.ir import dtypes
from onnxc.ir.graph import Graph
from onnxc.ir.types import TensorType
from onnxc.passes import weight_products as module
from onnxc.passes.weight_products import weight_products
from onnxc.primitives.builder import Builder
from onnxc.primitives.interpret import interpret
from onnxc.primitives.verify import verify


def gradient(x: tuple[int, ...], dy: tuple[int, ...], **attrs: Any) -> Graph:
    b = Builder()
    operands = [b.input(TensorType(dtypes.float32, shape), name) for shape, name in ((x, "x"), (dy, "dy"))]
    n = len(x) - 2
    rest = {"strides": (1,) * n, "low": (0,) * n, "high": (0,) * n, "dilations": (1,) * n, "groups": 1}
    return b.graph([b.one("conv_weights", *operands, **{**rest, **attrs})], ["dw"])


CASES = {
    "points": gradient((2, 3, 4, 5), (2, 6, 4, 5), kernel=(1, 1)),
    "windows": gradient((4, 3, 6, 5), (4, 2, 6, 5), kernel=(3, 3), low=(1, 1), high=(1, 1)),
    "uneven edges": gradient((2, 3, 6, 5), (2, 2, 7, 3), kernel=(2, 4), low=(0, 1), high=(2, 0)),
    "dilated": gradient((2, 3, 7, 7), (2, 2, 5, 3), kernel=(2, 3), dilations=(2, 2)),
    "strided": gradient((2, 3, 7, 8), (2, 4, 4, 3), kernel=(3, 3), strides=(2, 3), low=(1, 1), high=(1, 1)),
    "a line": gradient((3, 2, 9), (3, 5, 8), kernel=(2,)),
    "many channels": gradient((4, 9, 6, 5), (4, 2, 6, 5), kernel=(3, 3), low=(1, 1), high=(1, 1)),
    "many, uneven edges": gradient((2, 9, 6, 5), (2, 2, 7, 3), kernel=(2, 4), low=(0, 1), high=(2, 0)),
    "many, dilated": gradient((2, 9, 7, 7), (2, 2, 5, 3), kernel=(2, 3), dilations=(2, 2)),
    "many, strided": gradient((2, 9, 7, 8), (2, 4, 4, 3), kernel=(3, 3), strides=(2, 3), low=(1, 1), high=(1, 1)),
    "many, a volume": gradient((2, 9, 3, 4, 5), (2, 3, 2, 4, 3), kernel=(2, 1, 3)),
    "a volume": gradient((2, 2, 3, 4, 5), (2, 3, 2, 4, 3), kernel=(2, 1, 3)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("parts", [1, 2])
def test_products_are_the_gradient(name: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHORT", 1)
    monkeypatch.setattr(module, "PROGRAMS", parts)
    graph = CASES[name]
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(v.shape).astype(np.float32) for v in graph.inputs]
    made = weight_products(graph)
    verify(made, "weight-products")
    assert not any(n.op == "conv_weights" for n in made.nodes)
    assert any(n.op == "matmul" for n in made.nodes)
    for found, wanted in zip(interpret(made, inputs), interpret(graph, inputs), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "graph",
    [
        gradient((2, 4, 4, 4), (2, 6, 4, 4), kernel=(1, 1), groups=2),
        gradient((2, 3, 9, 9), (2, 2, 1, 1), kernel=(9, 9)),
    ],
)
def test_others_stay(graph: Graph) -> None:
    assert [n.op for n in weight_products(graph).nodes] == ["conv_weights"]


@pytest.mark.parametrize(
    ("rows", "tiles", "images", "wanted"),
    [(1 << 20, 1, 32, 32), (1 << 20, 1024, 32, 1), (512, 1, 32, 2), (100, 1, 4, 1)],
)
def test_parts_fill_a_gpu(rows: int, tiles: int, images: int, wanted: int) -> None:
    assert module._parts(rows, tiles, images) == wanted
