"""Products of a gate and what it opens, kept as one matrix: which are divided (those that the planner then pairs), and
that it changes no bit.
"""

from __future__ import annotations

import numpy as np
import pytest

from onnxc.codegen.triton.options import is_template
from onnxc.compiler.options import CompileOptions
from onnxc.ir import dtypes
from onnxc.ir.graph import Graph, Value
from onnxc.ir.types import TensorType
from onnxc.passes.gated_products import divide_gated_products
from onnxc.passes.pipeline import passes
from onnxc.passes.prepare import prepare
from onnxc.planner.fusion import plan
from onnxc.planner.groups import FusionOptions
from onnxc.planner.layout import assign
from onnxc.planner.machine import GPU
from onnxc.planner.templates import ENABLED
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


def gated(how: str = "halves", bias: bool = True, columns: int = 32, also: str = "", depth: int = 12) -> Graph:
    """tanh(a) * b of the two parts of x w + c; `also`: what else is made of them, or what in place of it."""
    b = Builder()
    x = b.input(TensorType(F16, (3, 5, depth)), "x")
    y = b.matmul(x, b.constant(weights(depth, columns)))
    y = b.add(y, b.constant(weights(columns))) if bias else y
    left, right = cut(b, y, how)
    gate = b.one("tanh", left)
    z = b.mul(gate, right) if also != "apart" else b.one("tanh", right)
    more = {"whole": lambda: y, "half": lambda: right, "gate": lambda: gate, "apart": lambda: gate,
            "sum of the gate": lambda: b.one("reduce_sum", gate, axes=(2,)),
            "row of the half": lambda: b.mul(right, b.reshape(b.one("reduce_max", right, axes=(2,)), (3, 5, 1))),
            "view of the half": lambda: b.reshape(right, (15, columns // 2)),
            "after": lambda: b.one("reduce_sum", z, axes=(2,))}  # fmt: skip
    return b.graph([z, more[also]()] if also else [z])


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
    "graph", [gated("unequal"), gated(columns=24), gated(depth=1),
              *(gated(also=also) for also in ("whole", "half", "gate", "apart", "sum of the gate", "row of the half",
                                              "view of the half"))],
    ids=["unequal parts", "odd columns", "one row", "read as a whole", "a half is read too", "the gate is an output",
         "parts that do not meet", "the gate is added up", "a half is read for its greatest", "a half is copied"],
)  # fmt: skip
def test_products_that_stay_whole(graph: Graph) -> None:
    assert products(divide_gated_products(graph)) == 1


@pytest.mark.parametrize("also", ["", "after"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("how", ["halves", "swapped", "even and odd"])
def test_what_is_divided_is_one_kernel_again(how: str, bias: bool, also: str) -> None:
    graph = prepare(divide_gated_products(gated(how, bias, also=also)))
    assert products(graph) == 2
    made = plan(graph, assign(graph, ENABLED), templates=is_template, machine=GPU)
    assert [group.twin is not None for group in made.groups if group.kind == "template"] == [True]


def test_halves_of_a_matrix_are_not_copied() -> None:
    graph = gated()
    (whole,) = (n.attrs["value"] for n in graph.nodes if n.op == "constant" and n.attrs["value"].ndim == 2)
    halves = [n.attrs["value"] for n in divide_gated_products(graph).nodes if n.op == "constant"]
    assert sum(np.shares_memory(whole, each) for each in halves if each.ndim == 2) == 2


def test_products_stay_whole_where_kernels_are_not_fused() -> None:
    for fusion in (True, False, FusionOptions(pairs=False), FusionOptions(epilogue=False)):
        names = [name for name, _ in passes(CompileOptions(target="cuda", fusion=fusion).passes)]
        assert ("divide-gated-products" in names) == (fusion is True)
