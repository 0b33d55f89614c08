"""Loops that walk memory in other orders than their result: reductions in two stages, channels-last groups, strided
and masked vectors, tables of what all rows share. Odd sizes, against float64, for every vector length.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Sym
from onnxc.ir.graph import Graph, Value
from onnxc.ir.types import TensorType
from onnxc.passes.prepare import prepare
from onnxc.primitives.builder import Builder
from onnxc.primitives.interpret import interpret
from onnxc.runtime.cpu import Level, level
from tests.compile_harness import Compiled, check, compare, compile_graphs, generate

pytestmark = pytest.mark.every_target

RNG = np.random.default_rng(5)
LEVELS = [
    level(),
    *(level(name) for name in ("x86-64-v3", "x86-64-v2") if level(name).vector_length < level().vector_length),
]


def graph(make: Callable[..., Value], *shapes: tuple[int, ...], dtype: DType = dtypes.float32) -> Graph:
    b = Builder()
    return b.graph([make(b, *(b.input(TensorType(dtype, s)) for s in shapes))])


def arrays(program: Compiled) -> list[np.ndarray]:
    """Content for the inputs, far from zero on average, so that a mean or a variance that is wrong shows."""
    return [RNG.standard_normal([int(d) for d in v.shape]).astype(v.dtype.numpy) + v.dtype.numpy.type(1)
            for v in program.graph.inputs]  # fmt: skip


def in_float64(g: Graph, data: list[np.ndarray]) -> list[np.ndarray]:
    """What the graph gives if each of its numbers is a double."""
    b = Builder()
    inputs = [b.input(TensorType(dtypes.float64, v.shape)) for v in g.inputs]
    known = dict(zip((v.id for v in g.inputs), inputs, strict=True))
    for node in g.nodes:
        if node.op == "constant":
            array = node.attrs["value"]
            known[node.output.id] = b.constant(array.astype(np.float64) if array.dtype.kind == "f" else array)
        else:
            known[node.output.id] = b.one(node.op, *(known[v.id] for v in node.operands), **node.attrs)
    wide = b.graph([known[v.id] for v in g.outputs])
    return interpret(wide, [x.astype(np.float64) for x in data])


def same_on_all_threads(graphs: list[Graph], cpu: Level, tolerance: float) -> list[Compiled]:
    """Compiles, compares with float64, and runs with one thread and with three: equal to the bit."""
    programs = compile_graphs(graphs, cpu=cpu)
    for g, p in zip(graphs, programs, strict=True):
        data = arrays(p)
        first = p(*data)
        for a, e in zip(first, in_float64(g, data), strict=True):
            compare(a, e.astype(a.dtype), tolerance, tolerance * max(1.0, float(np.abs(e).max(initial=0))))
        for threads in (1, 3):
            for a, b in zip(first, p(*data, threads=threads), strict=True):
                np.testing.assert_array_equal(a, b)
    return programs


def normalised(b: Builder, x: Value, axes: list[int]) -> Value:
    centered = b.sub(x, b.mean(x, axes, True))
    variance = b.mean(b.mul(centered, centered), axes, True)
    return b.div(centered, b.sqrt(b.add(variance, 1e-5)))


def group_norm(groups: int) -> Callable[..., Value]:
    """Channels-last inside, as between convolutions: an activation of normalised groups, and a scale per channel."""

    def make(b: Builder, x: Value, scale: Value) -> Value:
        n, c, h, w = x.shape
        weight = b.constant(np.eye(c, dtype=np.float32)[:, :, None, None])
        one = {"strides": (1, 1), "dilations": (1, 1), "low": (0, 0), "high": (0, 0), "groups": 1}
        x = b.one("conv", x, weight, **one)
        y = b.reshape(normalised(b, b.reshape(x, (n, groups, c // groups * h * w)), [2]), (n, c, h, w))
        return b.one("conv", b.mul(b.sigmoid(y), scale), weight, **one)

    return make


@pytest.mark.parametrize("cpu", LEVELS, ids=lambda cpu: cpu.name)
def test_groups_of_neighbouring_channels(cpu: Level) -> None:
    cases = [
        ((1, 96, 32, 32), 32),
        ((2, 24, 29, 31), 8),
        ((1, 40, 37, 23), 1),
        ((3, 6, 64, 67), 6),
        ((1, 130, 17, 19), 10),
    ]
    same_on_all_threads([graph(group_norm(g), s, (s[1], 1, 1)) for s, g in cases], cpu, 2e-5)


@pytest.mark.parametrize("cpu", LEVELS, ids=lambda cpu: cpu.name)
def test_groups_of_an_open_batch(cpu: Level) -> None:
    """Numbers for each group of an image are looked up once for its rows: an item may hold rows of two images."""
    cases = [((96, 32, 33), 32), ((24, 9, 7), 8), ((288, 8, 8), 32), ((40, 5, 1), 10)]
    opened = [graph(group_norm(g), (Sym("s0"), *s), (s[0], 1, 1)) for s, g in cases]
    for p, (shape, groups) in zip(compile_graphs(opened, cpu=cpu), cases, strict=True):
        for batch in (1, 3):
            x, scale = (RNG.standard_normal(s).astype(np.float32) for s in ((batch, *shape), (shape[0], 1, 1)))
            (right,) = in_float64(graph(group_norm(groups), x.shape, scale.shape), [x, scale])
            compare(p(x, scale)[0], right.astype(np.float32), 2e-5, 2e-5 * float(np.abs(right).max()))


REDUCTIONS = [
    ((1 << 17,), [0]), ((3, 70001), [1]), ((90000, 3), [0]), ((5, 131, 137), [1, 2]), ((2, 3, 128, 128), [0, 2, 3]),
    ((509, 509), [0, 1]), ((97, 1024), [0]), ((1, 64, 64, 48), [1, 2]), ((64, 64, 6, 5), [0, 1, 3]),
    ((1 << 16, 1), [0]),
]  # fmt: skip


@pytest.mark.parametrize("cpu", LEVELS, ids=lambda cpu: cpu.name)
@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_reductions_to_few_results(op: str, cpu: Level) -> None:
    graphs = [graph(lambda b, x, a=axes: b.reduce(op, b.mul(x, 0.5), a), shape) for shape, axes in REDUCTIONS]
    same_on_all_threads(graphs, cpu, 1e-5)


@pytest.mark.parametrize("cpu", LEVELS, ids=lambda cpu: cpu.name)
def test_the_error_of_long_sums_does_not_grow_with_them(cpu: Level) -> None:
    """Of equal numbers, whose sum in one accumulator is off by 1e-4 and more. The sizes are not known, so that nothing
    else divides the sums.
    """
    n, m = Sym("s0"), Sym("s1")
    sums = [((n, 3), [0]), ((n,), [0]), ((3, n, 1), [1]), ((n, 17), [0]), ((n, m, 5), [0, 1]), ((2, n, m), [1, 2])]
    graphs = [graph(lambda b, x, a=axes: b.reduce("sum", x, a), shape) for shape, axes in sums]
    for p, (shape, axes) in zip(compile_graphs(graphs, cpu=cpu), sums, strict=True):
        size = tuple({n: 700_001 if m not in shape else 1709, m: 419}.get(d, d) for d in shape)
        x = np.full(size, 0.1, np.float32)
        (found,) = p(x)
        # Of a CPU, 1e-5; a lane of a GPU adds up 700 of them.
        np.testing.assert_allclose(found, x.astype(np.float64).sum(tuple(axes)), 3e-5)


def test_a_nan_reaches_the_result_of_both_stages() -> None:
    (p,) = compile_graphs([graph(lambda b, x: b.reduce("max", x, [0]), (1 << 17,))])
    for at in (0, 65537, (1 << 17) - 1):
        x = RNG.standard_normal(1 << 17).astype(np.float32)
        x[at] = np.nan
        assert np.isnan(p(x)[0])


def window(op: str, kernel: tuple[int, int], strides: tuple[int, int], low: tuple[int, int], high: tuple[int, int],
           dilations: tuple[int, int], last: bool) -> Callable[..., Value]:  # fmt: skip
    def pair(a: tuple[int, int], other: int) -> tuple[int, ...]:
        return (other, *a, other) if last else (other, other, *a)

    return lambda b, x: b.one(
        f"window_{op}", x, kernel=pair(kernel, 1), strides=pair(strides, 1), low=pair(low, 0), high=pair(high, 0),
        dilations=pair(dilations, 1),
    )  # fmt: skip


@pytest.mark.parametrize("cpu", LEVELS, ids=lambda cpu: cpu.name)
@pytest.mark.parametrize("last", [False, True])
def test_padded_windows(last: bool, cpu: Level) -> None:
    shapes = [(2, 3, 19, 37), (1, 5, 7, 7), (1, 2, 40, 65)]
    settings = itertools.product([(3, 3), (5, 5), (1, 7), (2, 4)], [(1, 1), (2, 2), (1, 3)], [(1, 1), (2, 1)])
    graphs = []
    for k, (kernel, strides, dilations) in enumerate(settings):
        n, c, h, w = shapes[k % len(shapes)]
        low = (kernel[0] // 2, kernel[1] // 2)
        high = (low[0], max(0, low[1] - k % 2))
        make = window(["max", "sum"][k % 2], kernel, strides, low, high, dilations, last)
        if all(
            d + a + z >= (t - 1) * e + 1 for d, a, z, t, e in zip((h, w), low, high, kernel, dilations, strict=True)
        ):
            graphs.append(graph(make, (n, h, w, c) if last else (n, c, h, w)))
    same_on_all_threads(graphs, cpu, 1e-5)


def test_reductions_of_what_a_border_surrounds() -> None:
    """The border may be left out where it is the reduction's neutral element, and only there."""
    graphs = []
    for op, fill in itertools.product(["sum", "max", "min", "prod"], [0.0, 1.0, -np.inf, np.inf]):
        graphs.append(graph(lambda b, x, f=fill, o=op: b.reduce(o, b.pad(x, (1, 2), (3, 0), f), [0]), (9, 21)))
    for op in ("max", "min"):
        b = Builder()
        x = b.input(TensorType(dtypes.boolean, (9, 21)))
        graphs.append(b.graph([b.reduce(op, b.pad(x, (1, 2), (3, 0), op == "min"), [0])]))
    for p in compile_graphs(graphs):
        data = [RNG.integers(0, 2, (9, 21)).astype(bool)] if p.graph.inputs[0].dtype.name == "bool" else arrays(p)
        check(p, data)


@pytest.mark.parametrize("cpu", LEVELS, ids=lambda cpu: cpu.name)
def test_strided_vectors_stay_inside_the_array(cpu: Level) -> None:
    """The last of them ends where the array does."""
    graphs = []
    for step, n, dtype in itertools.product(
        [2, 3, 4, 5], [1, 15, 16, 17, 33, 64], [dtypes.float32, dtypes.uint8, dtypes.int64]
    ):
        size = (n - 1) * step + 1
        graphs.append(
            graph(lambda b, x, s=step: b.one("copy", b.slice(x, 1, 0, x.shape[1], s)), (3, size), dtype=dtype)
        )
    for p in compile_graphs(graphs, cpu=cpu):
        check(p, arrays(p))


def test_long_rows_of_lanes_that_lie_apart() -> None:
    """The rows that read one line of the cache follow each other, piece by piece of the vector loop."""
    turned = [
        graph(lambda b, x: b.one("copy", b.transpose(x, (0, 2, 1))), (2, 9001, 3), dtype=dtype)
        for dtype in (dtypes.float32, dtypes.int64)
    ]
    every = graph(lambda b, x: b.one("copy", b.slice(x, 1, 0, x.shape[1], 2)), (3, 16999))
    for p in compile_graphs([*turned, every]):
        check(p, arrays(p))


def test_channels_that_are_shuffled_after_they_are_joined() -> None:
    """Lanes then take turns between two tensors: both are computed as vectors, and neither is read past its ends."""

    def shuffled(b: Builder, x: Value, y: Value) -> Value:
        if x.dtype.is_float:
            x, y = b.exp(x), b.abs(y)
        joined = b.concat([x, y], 1)
        rows, n = joined.shape
        return b.one("copy", b.reshape(b.transpose(b.reshape(joined, (rows, 2, n // 2)), (0, 2, 1)), (rows, n)))

    def looked_up(b: Builder, x: Value, at: Value) -> Value:
        """Which lanes read is data."""
        return b.neg(b.gather(b.pad(b.neg(x), (1,), (1,), 7), at, 0))

    wanted = (dtypes.float32, dtypes.float16, dtypes.boolean)
    graphs = [graph(shuffled, (3, 15), (3, 23), dtype=dtype) for dtype in wanted]
    programs = compile_graphs([*graphs, graph(looked_up, (1,), (19,), dtype=dtypes.int32)])
    for p in programs:
        check(p, [RNG.integers(-2, 3, [int(d) for d in v.shape]).astype(v.dtype.numpy) for v in p.graph.inputs])
    if isinstance(programs[0], Compiled):
        assert "Part{1}" not in programs[0].program.source


@pytest.mark.cpu_only("vectors of a CPU")
@pytest.mark.parametrize("kind", ["rows", "columns"])
@pytest.mark.parametrize(("turns", "whole", "rest"), [(0.3, False, True), (2, True, False), (2.3, True, True)])
def test_code_is_for_the_vectors_that_there_are(kind: str, turns: float, whole: bool, rest: bool) -> None:
    """A loop shorter than a vector has none for whole ones, a loop of whole vectors none for a rest."""
    cpu = level()
    n = int(turns * cpu.vector_length)
    made = {
        "rows": graph(lambda b, x: b.exp(x), (3, n)),
        "columns": graph(lambda b, x: b.one("reduce_max", b.exp(x), axes=(0,)), (3, n)),
    }[kind]
    text = generate(prepare(made), None, cpu).source
    assert ("Full{})" in text, "Part{" in text) == (whole, rest)
    (program,) = compile_graphs([made], cpu=cpu)
    check(program, arrays(program))


@pytest.mark.parametrize("cpu", LEVELS, ids=lambda cpu: cpu.name)
@pytest.mark.parametrize(
    "dtype", [dtypes.uint8, dtypes.int16, dtypes.float16, dtypes.bfloat16, dtypes.float32, dtypes.int64], ids=str
)
def test_permutations(dtype: DType, cpu: Level) -> None:
    shapes = [
        ((17, 31), (1, 0)),
        ((2, 33, 16), (0, 2, 1)),
        ((5, 3, 40), (2, 0, 1)),
        ((3, 18, 19, 4), (0, 3, 1, 2)),
        ((1, 3, 20, 21), (0, 2, 3, 1)),
    ]
    graphs = [graph(lambda b, x, p=perm: b.one("copy", b.transpose(x, p)), s, dtype=dtype) for s, perm in shapes]
    for p in compile_graphs(graphs, cpu=cpu):
        check(p, arrays(p))


@pytest.mark.parametrize("cpu", LEVELS, ids=lambda cpu: cpu.name)
def test_conversions_of_all_pairs(cpu: Level) -> None:
    names = [
        "bool",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
    ]
    kinds = [getattr(dtypes, "boolean" if n == "bool" else n) for n in names]
    graphs = []
    for a, z in itertools.permutations(kinds, 2):
        b = Builder()
        graphs.append(b.graph([b.cast(b.input(TensorType(a, (37,))), z)]))
    for p in compile_graphs(graphs, cpu=cpu):
        check(p, [np.arange(37).astype(p.graph.inputs[0].dtype.numpy)])


def test_halves_round_as_numpy_does() -> None:
    bits = np.concatenate(
        [np.arange(0, 1 << 32, 65521, dtype=np.uint32), np.array([0x7F800001, 0xFFC00000, 0x7F7FFFFF], np.uint32)]
    )
    x = bits.view(np.float32)
    (p,) = compile_graphs([graph(lambda b, v: b.cast(v, dtypes.float16), x.shape)])
    with np.errstate(all="ignore"):
        expected = x.astype(np.float16)
    np.testing.assert_array_equal(p(x)[0], expected)


def test_what_all_rows_share_is_read_by_each_of_them() -> None:
    """Tables: a gather along the innermost axis, a repeated row, and neighbours that share a number."""

    def gathered(b: Builder, x: Value) -> Value:
        return b.gather(b.mul(x, 2.0), b.constant(np.arange(70, dtype=np.int64)[::-1] % 33 - 16), 1)

    def tiled(b: Builder, x: Value) -> Value:
        n, m = x.shape
        return b.reshape(b.expand(b.reshape(x, (1, n, 1, m)), (2, n, 3, m)), (2 * n, 3 * m))

    def shared(b: Builder, x: Value) -> Value:
        n, m = x.shape
        each = b.exp(b.reduce("max", b.reshape(x, (n, m // 3, 3)), [0, 2]))
        return b.mul(x, b.reshape(b.expand(b.reshape(each, (m // 3, 1)), (m // 3, 3)), (m,)))

    for p in compile_graphs([graph(f, s) for f in (gathered, tiled, shared) for s in ((100, 33), (41, 48))]):
        check(p, arrays(p))


def test_division_of_integers() -> None:
    graphs = [graph(lambda b, x, y, op=op: b.one(op, x, y), (67,), (67,), dtype=d) for op in ("div", "mod")
              for d in (dtypes.int8, dtypes.uint8, dtypes.int32, dtypes.uint32, dtypes.int64)]  # fmt: skip
    for p in compile_graphs(graphs):
        t = p.graph.inputs[0].dtype.numpy
        info = np.iinfo(t)
        x, y = (RNG.integers(info.min, info.max, 67, endpoint=True, dtype=t) for _ in range(2))
        y[y == 0] = 3
        y[:3], x[:3] = t.type(1), (info.min, info.max, 0)
        check(p, [x, y])
