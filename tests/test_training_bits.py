"""A training step has the same bits whatever its planner decides: what is saved, what is computed again and where."""

from __future__ import annotations

import platform
import re
from contextlib import nullcontext

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from onnxc.codegen.cpp.program import ProgramWriter
from onnxc.ir import dtypes
from onnxc.ir.graph import Graph, Value
from onnxc.ir.types import TensorType
from onnxc.optim import SGD, AdamW
from onnxc.planner.fusion import plan
from onnxc.planner.groups import OF_STEPS, FusionOptions
from onnxc.planner.layout import Layout, assign
from onnxc.planner.order import sum_orders
from onnxc.planner.section import SumOrder
from onnxc.planner.templates import ENABLED
from onnxc.primitives.builder import Builder
from onnxc.runtime.cpu import level, missing_features
from onnxc.training.step import compile_training
from tests.compile_harness import compile_graphs
from tests.random_plans import random_plans
from tests.small_models import Array
from tests.test_gradients_random import SIZES, arrays_for, derived
from tests.test_random_plans import HEAD, NETS

RNG = np.random.default_rng(23)


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


# ---------------------------------------------------------------- steps

DATA = {"convolutions": ("x", "z"), "transformer": ("x",)}


def net(name: str) -> tuple[onnx.ModelProto, list[Array]]:
    """One of the nets with weights, and its inputs."""
    model = onnx.parser.parse_model(HEAD + NETS[name])
    inputs = {v.name: normal(*(d.dim_value for d in v.type.tensor_type.shape.dim)) for v in model.graph.input}
    weights = [numpy_helper.from_array(a / 2, n) for n, a in inputs.items() if n not in DATA[name]]
    model.graph.initializer.extend(weights)
    return model, [inputs[n] for n in DATA[name]]


@pytest.mark.parametrize("name", NETS)
def test_steps_have_the_same_bits_in_every_plan(name: str) -> None:
    model, inputs = net(name)
    wanted: tuple[list[float], dict[str, Array]] | None = None
    for seed, budget in ((None, 1.0), (None, 0.0), (1, 1.0), (2, 0.5)):
        with nullcontext() if seed is None else random_plans(seed):
            step = compile_training(
                model, loss="loss", optimizer=SGD(lr=0.1, momentum=0.9), memory_budget=budget, cache=False
            )
        losses = [float(step(*inputs)["loss"]) for _ in range(3)]
        found = losses, dict(step.parameters)
        wanted = wanted or found
        assert losses == wanted[0], (seed, budget)
        for parameter, array in found[1].items():
            np.testing.assert_array_equal(array, wanted[1][parameter], err_msg=f"{parameter} {seed} {budget}")


@pytest.mark.parametrize(("first", "dynamic"), [(100, False), (120, True)])
def test_gradients_of_random_graphs_have_the_same_bits(first: int, dynamic: bool) -> None:
    found = [(seed, d) for seed in range(first, first + 20) if (d := derived(seed, dynamic)) is not None]
    graphs, compared = [graph for _, (_, graph) in found], 0
    plain = compile_graphs(graphs, exact=True)
    with random_plans(first):
        other = compile_graphs(graphs, exact=True)
    for (seed, (made, graph)), a, b in zip(found, plain, other, strict=True):
        for sizes in SIZES if dynamic else SIZES[:1]:
            given = arrays_for(made, graph, sizes, seed)
            if given is None:
                continue
            rng = np.random.default_rng(seed)
            arrays = [rng.standard_normal(x.shape).astype(x.dtype) if x.dtype.kind == "f" else x for x in given]
            for k, (x, y) in enumerate(zip(a(*arrays), b(*arrays), strict=True)):
                np.testing.assert_array_equal(x, y, err_msg=f"graph {seed}, gradient {k}, {sizes}")
                compared += 1
    assert compared > 20


# ---------------------------------------------------------------- orders


def order_of(shape: tuple[int, ...], axes: tuple[int, ...], memory: tuple[int, ...] | None = None) -> SumOrder:
    """That of a sum of an input that lies in memory in this order of its axes."""
    b = Builder()
    x = b.input(TensorType(dtypes.float32, shape), "x")
    y = b.one("reduce_sum", x, axes=axes)
    graph = b.graph([y])
    return sum_orders(graph, Layout(order={x.id: memory} if memory else {}))[y.id]


@pytest.mark.parametrize(
    ("shape", "axes", "memory", "expected"),
    [
        ((64, 768), (1,), None, SumOrder(True, ((0,),))),  # rows
        ((64, 768), (0,), None, SumOrder(False, ((0,),))),  # columns
        ((64, 7), (1,), None, SumOrder(False, ((0,),))),  # rows that fill no vector
        ((8, 16, 32), (0, 1, 2), None, SumOrder(True, ((0, 1, 2),))),  # all as one loop
        ((8, 16, 32), (0, 1), None, SumOrder(False, ((0, 1),))),
        ((4, 32, 14, 14), (0, 2, 3), (0, 2, 3, 1), SumOrder(False, ((0, 1, 2),))),  # channels last
        ((4, 32, 14, 14), (1, 2, 3), (0, 2, 3, 1), SumOrder(True, ((1, 2), (0,)))),  # channels inside
        ((4, 1, 768), (1, 2), None, SumOrder(True, ((0,),))),  # axes of length 1 have no loop
        ((1, 1, 5), (0, 1), None, SumOrder(False, ())),
    ],
)  # fmt: skip
def test_orders(
    shape: tuple[int, ...], axes: tuple[int, ...], memory: tuple[int, ...] | None, expected: SumOrder
) -> None:
    assert order_of(shape, axes, memory) == expected


def test_an_order_looks_through_what_is_computed() -> None:
    """It is that of the values behind, whatever of what lies between is stored."""
    b = Builder()
    x, y = (b.input(TensorType(dtypes.float32, s), n) for n, s in (("x", (256, 64)), ("y", (256, 1))))
    rows = b.mul(b.transpose(x, (1, 0)), b.reshape(y, (1, 256)))
    total = b.one("reduce_sum", rows, axes=(1,))
    assert sum_orders(b.graph([total]), Layout())[total.id] == SumOrder(False, ((0,),))


# ---------------------------------------------------------------- kernels


def two_orders(b: Builder, x: Value) -> list[Value]:
    """Sums whose lanes run along rows and along columns, what both read, and a result that needs one of them."""
    y = b.one("exp", b.mul(x, x))
    rows, columns = (b.one("reduce_sum", y, axes=(k,)) for k in (1, 0))
    most = b.one("reduce_max", y, axes=(1,))
    whole = b.one("reduce_sum", b.mul(y, b.reshape(rows, (x.shape[0], 1))), axes=(0, 1))
    return [rows, columns, most, whole, b.div(y, b.reshape(rows, (x.shape[0], 1)))]


def graph_of(dtype: dtypes.DType, shape: tuple[int, int]) -> Graph:
    b = Builder()
    return b.graph(two_orders(b, b.input(TensorType(dtype, shape), "x")))


LEVELS = [
    name
    for name in (["native", "x86-64", "x86-64-v3", "x86-64-v4"] if platform.machine() == "x86_64" else ["native"])
    if not missing_features(level(name).features)
]


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float64], ids=str)
def test_sums_at_every_level(dtype: dtypes.DType) -> None:
    """Products are kept from being joined with sums, whatever the registers of the machine."""
    graphs = [graph_of(dtype, shape) for shape in ((5, 200), (130, 9), (1, 1))]
    for name in LEVELS:
        for graph, program in zip(graphs, compile_graphs(graphs, cpu=level(name), exact=True), strict=True):
            (shape,) = [tuple(int(d) for d in v.shape) for v in graph.inputs]  # type: ignore[arg-type]
            x = RNG.standard_normal(shape).astype(dtype.numpy)
            y = np.exp(x.astype(np.float64) ** 2)
            rows = y.sum(1)
            wanted = [rows, y.sum(0), y.max(1), (y * rows[:, None]).sum(), y / rows[:, None]]
            for found, exact in zip(program(x), wanted, strict=True):
                np.testing.assert_allclose(found, exact, rtol=1e-5 if dtype is dtypes.float32 else 1e-13)


def test_products_are_rounded_in_steps_alone() -> None:
    """Elsewhere only what a maximum is taken of, which is no product here."""
    graph = graph_of(dtypes.float32, (64, 64))
    sources = [
        ProgramWriter(plan(graph, assign(graph, ENABLED), exact=exact), 8).write().source for exact in (True, False)
    ]
    assert [bool(re.search(r"ox_own\(\(\w+ \* \w+\)\)", s)) for s in sources] == [True, False]


def test_sums_of_two_orders_are_in_two_kernels() -> None:
    graph = graph_of(dtypes.float32, (64, 768))
    made = plan(graph, assign(graph, ENABLED), exact=True)
    for group in made.groups:
        for section in group.sections:
            orders = [section.order_of(n.output) for n in section.members.values()]
            assert len({o.across for o in orders if o is not None}) <= 1
    free = plan(graph, assign(graph, ENABLED))
    assert all(s.orders is None for g in free.groups for s in g.sections)


@pytest.mark.parametrize("name", NETS)
def test_switches_change_the_plan_alone(name: str) -> None:
    model, inputs = net(name)
    wanted: dict[str, Array] | None = None
    for fusion in (True, *(FusionOptions(**{switch: False}) for switch in OF_STEPS), False):
        optimizer = AdamW(lr=0.01)
        step = compile_training(model, loss="loss", optimizer=optimizer, memory_budget=0.5, fusion=fusion, cache=False)
        found = {f"loss {k}": np.asarray(step(*inputs)["loss"]) for k in range(3)} | dict(step.parameters)
        wanted = wanted or found
        for value, array in found.items():
            np.testing.assert_array_equal(array, wanted[value], err_msg=f"{value} {fusion}")
