"""Reads through views that are no even steps: shuffled channels, flattened images, windows, known indices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from onnxc import gpu
from onnxc.codegen.cpp.lane_steps import aligned_step
from onnxc.ir import dtypes, expr
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Dim, Sym, evaluate, index, recombine
from onnxc.ir.graph import Graph
from onnxc.ir.types import TensorType
from onnxc.loops.access import fresh, view_index
from onnxc.loops.known import steps_of
from onnxc.passes.prepare import prepare
from onnxc.passes.sink_reshapes import sink_reshapes
from onnxc.planner.groups import FusionOptions
from onnxc.primitives.builder import Builder
from onnxc.runtime.cpu import Level, level
from tests.compile_harness import Compiled, check, compile_graphs

pytestmark = pytest.mark.every_target

LEVELS = [
    level(),
    *(level(name) for name in ("x86-64-v3", "x86-64-v2") if level(name).vector_length < level().vector_length),
]
SHUFFLES = [  # groups, channels of each, rows
    (2, 58, 9), (3, 40, 7), (4, 17, 5), (2, 7, 1), (3, 1, 5), (1, 7, 3), (5, 13, 4), (7, 17, 3), (8, 31, 3), (2, 16, 2),
    (3, 100, 3), (17, 4, 2), (6, 11, 2), (64, 3, 2),
]  # fmt: skip
S, H, W = Sym("s0"), Sym("s1"), Sym("s2")


def shuffle(groups: int, channels: int, rows: Dim, dtype: DType = dtypes.float32) -> Graph:
    """Channels of groups side by side become groups of channels."""
    b = Builder()
    x = b.input(TensorType(dtype, (rows, groups * channels)))
    turned = b.transpose(b.reshape(x, (rows, groups, channels)), (0, 2, 1))
    return b.graph([b.reshape(turned, (rows, groups * channels))])


def content(graph: Graph, sizes: dict[str, int] | None = None, seed: int = 0) -> list[np.ndarray]:
    """Inputs of a graph, in which no two elements are likely to be the same."""
    rng = np.random.default_rng(seed)
    shapes = [tuple(d if isinstance(d, int) else (sizes or {})[str(d)] for d in v.shape) for v in graph.inputs]
    made = [rng.standard_normal(shape) * 50 for shape in shapes]
    kinds = [v.dtype for v in graph.inputs]
    return [(a > 0) if k is dtypes.boolean else a.astype(k.numpy) for a, k in zip(made, kinds, strict=True)]


@pytest.mark.parametrize("cpu", LEVELS, ids=lambda k: k.name)
def test_shuffled_channels(cpu: Level) -> None:
    """Few and many groups, of channels that fill vectors and that do not, of every width."""
    kinds = [dtypes.uint8, dtypes.int16, dtypes.int64, dtypes.float16, dtypes.boolean]
    graphs = [shuffle(*size) for size in SHUFFLES]
    graphs += [shuffle(*size, kind) for kind in kinds for size in ((2, 29, 3), (3, 16, 2), (4, 5, 7))]
    for p in compile_graphs(graphs, cpu=cpu):
        check(p, content(p.graph))


def test_lanes_take_turns() -> None:
    """Two to four groups are read side by side, and nothing is divided by their number."""
    found = compile_graphs([shuffle(g, 40, 7) for g in (2, 3, 4)])
    for p in found:
        if isinstance(p, Compiled):
            assert "st_turns(" in p.program.source and "some_lanes<" not in p.program.source


def test_a_shuffle_of_joined_and_shuffled_parts() -> None:
    """Which half a channel is from is known for each of the stores that take turns, and is not asked."""
    b = Builder()
    x, y = (b.input(TensorType(dtypes.float32, (5, n))) for n in (116, 58))
    turned = b.reshape(b.transpose(b.reshape(x, (5, 2, 58)), (0, 2, 1)), (5, 116))
    joined = b.concat([b.slice(turned, 1, 0, 58), b.add(y, 1.0)], 1)
    out = b.reshape(b.transpose(b.reshape(joined, (5, 2, 58)), (0, 2, 1)), (5, 116))
    rest = b.mul(b.slice(turned, 1, 57, 116), 2.0)  # begins in the middle of a turn
    for p in compile_graphs([b.graph([out, rest])]):
        check(p, content(p.graph))


def flattened(n: Dim, h: Dim, w: Dim, c: int, op: str) -> Graph:
    """Reductions of images [N, H, W, C], as one axis in the order [C, H, W]."""
    b = Builder()
    x = b.input(TensorType(dtypes.float32, (n, h, w, c)))
    flat = b.reshape(b.transpose(x, (0, 3, 1, 2)), (n, c * h * w))
    if op.startswith("arg"):
        return b.graph([b.one(op, flat, axis=1, last=False)])
    least = b.reduce(op, flat, (1,), keepdims=True)
    away = b.sub(flat, least)
    return b.graph([least, b.reduce(op, b.mul(away, away), (1,)), b.reshape(away, (n, c, h, w))])


@pytest.mark.parametrize("cpu", LEVELS[:2], ids=lambda k: k.name)
def test_sums_of_flattened_images(cpu: Level) -> None:
    """Over one axis that a reshape made, and what reads them element by element."""
    sizes = [(1, 5, 7, 3), (2, 17, 1, 13), (1, 1, 1, 7), (3, 4, 4, 16), (1, 40, 40, 32)]
    graphs = [flattened(*size, op) for size in sizes for op in ("sum", "max")]
    for p in compile_graphs(graphs, cpu=cpu):
        arrays = content(p.graph)
        check(p, arrays, 1e-5, 1e-2)
        if isinstance(p, Compiled):
            for one, other in zip(p(*arrays), p(*arrays), strict=True):
                np.testing.assert_array_equal(one, other)


def test_positions_in_flattened_images() -> None:
    """The first of equal elements in the order of the flattened axis, not in that of memory."""
    (p,) = compile_graphs([flattened(2, 5, 7, 3, "argmax")])
    check(p, [np.round(a / 40) for a in content(p.graph)])


def test_sizes_that_only_the_run_tells() -> None:
    """Shuffles of any number of rows, sums of images of any size."""
    graphs = [shuffle(3, 17, S), flattened(S, H, W, 7, "sum")]
    for p in compile_graphs(graphs):
        for n, h, w in ((1, 1, 1), (3, 5, 7), (2, 17, 1), (1, 1, 33), (4, 16, 16)):
            check(p, content(p.graph, {"s0": n, "s1": h, "s2": w}), 1e-5, 1e-2)


def test_windows_of_images() -> None:
    """An image in windows of pixels, and back, rolled in between."""
    b = Builder()
    x = b.input(TensorType(dtypes.float32, (1, 14, 21, 5)))
    rolled = b.concat([b.slice(x, 1, 3, 14), b.slice(x, 1, 0, 3)], 1)
    rolled = b.concat([b.slice(rolled, 2, 3, 21), b.slice(rolled, 2, 0, 3)], 2)
    windows = b.transpose(b.reshape(rolled, (1, 2, 7, 3, 7, 5)), (0, 1, 3, 2, 4, 5))
    rows = b.mul(b.reshape(windows, (6, 49, 5)), 2.0)
    back = b.reshape(b.transpose(b.reshape(rows, (1, 2, 3, 7, 7, 5)), (0, 1, 3, 2, 4, 5)), (14, 105))
    for p in compile_graphs([b.graph([rows]), b.graph([back]), b.graph([rows, back])]):
        check(p, content(p.graph))


def relative_shift(heads: int, size: Dim) -> Graph:
    """Scores by distance [heads, T, 2T - 1] as scores by position [heads, T, T], as relative attention turns them."""
    b = Builder()
    x = b.input(TensorType(dtypes.float32, (heads, size, 2 * size - 1)))
    wide = b.pad(x, (0, 0, 1), (0, 0, 0), 0.0)
    turned = b.slice(b.reshape(wide, (heads, 2 * size, size)), 1, 1, 2 * size)
    return b.graph([b.mul(b.slice(b.reshape(turned, (heads, size, 2 * size - 1)), 2, 0, size), 2.0)])


def test_relative_positions() -> None:
    """Rows that begin one element later each: even steps, in which no padding is left to ask for."""
    known = compile_graphs([relative_shift(2, size) for size in (2, 7, 17, 49)])
    for p in known:
        check(p, content(p.graph))
        if isinstance(p, Compiled):
            assert "ox_mod(" not in p.program.source.split("void k0(")[1]
    (p,) = compile_graphs([relative_shift(2, Sym("s0", 1))])
    for size in (1, 2, 7, 33):
        shape = (2, size, 2 * size - 1)
        check(p, [np.arange(np.prod(shape), dtype=np.float32).reshape(shape)])


def test_steps_of_lanes() -> None:
    """From a vector's first lane on, against the numbers themselves, wherever steps are even."""
    v, o = index("v", 128), index("o", 5)
    (symbol,) = expr.symbols(v)
    even = 0
    for factor, offset, n, m in itertools.product((1, 2), (o * 16, o * 32 + 16, o * 5, 3), (2, 16, 32, 24), (2, 32)):
        x = v * factor + offset
        for e in (x % n, x // n, x // n % m, x % n // m, x % n * 3 + v, (x % n + 16) % m, (o + x // n) % 3, x // n * o):
            step = aligned_step(e, symbol, 8)
            even += step is not None
            for first, at in ((0, 1), (8, 4), (56, 3), (120, 0)) if step is not None else ():
                known = {"o": at, "v": first}
                lanes = [evaluate(e, known | {"v": first + k}) for k in range(8)]
                assert step is not None
                assert lanes == [lanes[0] + k * evaluate(step, known) for k in range(8)], e
    assert even > 200


# ---------------------------------------------------------------- indices that are known


def count(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.int64)


KNOWN = [  # of a gather: the operand's shape, the axis, the index, what is added to it
    ((5, 40, 7), 1, count(6)[:, None] * 5 + count(11), None),
    ((40,), 0, count(6)[:, None] * 5 + count(11), None),
    ((700,), 0, count(3)[:, None, None] * 150 + count(17)[:, None] * 13 + count(7), None),
    ((7, 3), 0, np.asarray(-1), None),
    ((7, 3), 0, np.array([-1, -2, -3]), None),
    ((7, 17), 1, np.array([16, 0], np.int32), None),
    ((1, 13), 0, np.zeros(3, np.int64), None),
    ((13, 5), 0, count(13)[::-1].copy(), None),
    ((9216,), 0, (count(4)[:, None] * 2000 + count(136) * 16).reshape(-1), None),
    (
        (58000,),
        0,
        count(4)[:, None, None, None] * 13824 + count(17)[:, None, None] * 768 + count(48)[:, None],
        count(48),
    ),
]
UNKNOWN = [
    ((7, 3), 0, np.array([1, -2, 3]), None),
    ((7, 3), 0, np.array([2, 0, 1]), None),
    ((7, 3), 0, np.array([2, 3, 4, 6]), None),
    ((60,), 0, np.array([[0, 1, 2], [7, 8, 10]]), None),
]


def gathered(shape: tuple[int, ...], axis: int, first: np.ndarray, more: np.ndarray | None) -> Graph:
    """An operand at a constant index, or at the sum of two, that is too large to be computed beforehand."""
    b = Builder()
    x = b.input(TensorType(dtypes.float32, shape))
    at = b.constant(first)
    where = at if more is None else b.add(at, b.constant(more))
    assert more is None or (where.node is not None and where.node.op == "add")
    return b.graph([b.mul(b.gather(x, where, axis), 2.0)])


def test_an_index_in_even_steps_is_not_read() -> None:
    """Windows that overlap, one element of an axis, an axis backwards; all others are read, and tested."""
    for p in compile_graphs([gathered(*case) for case in KNOWN]):
        check(p, content(p.graph))
        if isinstance(p, Compiled):
            assert "i64 *const" not in p.program.source.split("void k0(")[1]
    for p in compile_graphs([gathered(*case) for case in UNKNOWN]):
        check(p, content(p.graph))
        if isinstance(p, Compiled):
            assert "i64 *const" in p.program.source.split("void k0(")[1]


def test_windows_of_overlapping_windows() -> None:
    """Reads through a flattened view of a transposed value, at places that overlap."""
    b = Builder()
    x = b.input(TensorType(dtypes.float32, (64, 3, 10)))
    flat = b.reshape(b.transpose(x, (1, 0, 2)), (1920,))
    where = count(3)[:, None, None, None] * 640 + count(7)[:, None, None] * 80 + count(16)[:, None] * 10 + count(10)
    (p,) = compile_graphs([b.graph([b.gather(flat, b.constant(where), 0)])])
    check(p, content(p.graph))
    if isinstance(p, Compiled):
        assert "lane_by_lane" not in p.program.source and "ox_mod(" not in p.program.source.split("void k0(")[1]


@pytest.mark.parametrize("content", [[0, 1, 3], [[0, 1], [2, 4]], [[0, 1], [1, 0]], [0.0, 1.0], []])
def test_uneven_steps(content: list[object]) -> None:
    assert steps_of(np.asarray(content)) is None


def test_steps() -> None:
    for array in (np.asarray(5), count(7), count(12).reshape(3, 4) * -2 + 30, np.array([0, 1, 2, 10, 11, 12])):
        steps = steps_of(array)
        assert steps is not None
        assert [steps.at(at) for at in np.ndindex(array.shape)] == array.ravel().tolist()


def test_windows_of_grids() -> None:
    """An image in windows, then in grids, there and back many times: every element is read where it was."""
    b = Builder()
    image = x = b.input(TensorType(dtypes.float32, (14, 14, 3)))
    for part, whole in itertools.islice(itertools.cycle([(7, 2), (2, 7)]), 12):
        apart = b.transpose(b.reshape(x, (whole, part, whole, part, 3)), (0, 2, 1, 3, 4))
        rows = b.reshape(apart, (whole * whole, part * part, 3))
        back = b.reshape(b.transpose(rows, (1, 0, 2)), (part, part, whole, whole, 3))
        x = b.reshape(b.transpose(back, (2, 0, 3, 1, 4)), (14, 14, 3))
    at = own = tuple(fresh("i", d) for d in x.shape)
    while x is not image:
        assert x.node is not None
        at, x = view_index(x.node, at), x.node.operands[0]
    assert tuple(map(recombine, at)) == own


def test_views_of_views_many_deep() -> None:
    """Whose index has no end: what looks for loops to read by gives up, nothing else does."""
    shapes = [(12, 35), (35, 12), (7, 60), (60, 7), (20, 21), (4, 105), (15, 28)]
    b = Builder()
    first = x = b.input(TensorType(dtypes.float32, (420,)))
    for k in range(56):
        x = b.neg(b.transpose(b.reshape(x, shapes[k % len(shapes)]), (1, 0)))
    graph = b.graph([b.reduce("sum", x, (1,)), b.add(x, b.reshape(first, x.shape))])
    for p in compile_graphs([graph]):
        check(p, content(p.graph))
    assert gpu.planned(prepare(graph), FusionOptions()).groups


def grouped(groups: int, shape: tuple[Dim, ...]) -> Graph:
    """A norm over groups of channels of an image, as PyTorch writes it; a pool and a convolution read it."""
    b = Builder()
    n, c, h, w = shape
    x, k = b.input(TensorType(dtypes.float32, shape)), b.input(TensorType(dtypes.float32, (c, c, 1, 1)))
    one = {"strides": (1, 1), "low": (0, 0), "high": (0, 0), "dilations": (1, 1), "groups": 1}
    image = b.one("conv", x, k, **one)
    parts = b.reshape(image, (n, groups, c // groups * h * w))
    apart = b.sub(parts, b.mean(parts, [2], True))
    norm = b.mul(apart, b.div(1.0, b.sqrt(b.add(b.mean(b.mul(apart, apart), [2], True), 1e-3))))
    scale = b.constant(np.arange(1, int(c) + 1, dtype=np.float32).reshape(int(c), 1, 1))
    norm = b.mul(b.reshape(norm, shape), scale)
    pads = {
        "kernel": (1, 1, 3, 3),
        "strides": (1,) * 4,
        "dilations": (1,) * 4,
        "low": (0, 0, 1, 1),
        "high": (0, 0, 1, 1),
    }
    return b.graph([b.sub(b.one("window_sum", norm, **pads), norm), b.one("conv", norm, k, **one)])


@pytest.mark.parametrize("cpu", LEVELS[:2], ids=lambda k: k.name)
def test_norms_of_groups(cpu: Level) -> None:
    """Of open sizes and of known ones, large enough to be summed in two stages."""
    graphs = [grouped(g, shape) for g in (1, 3, 12) for shape in ((2, 12, 41, 37), (S, 12, H, W))]
    for graph, program in zip(
        graphs, compile_graphs([prepare(sink_reshapes(g)) for g in graphs], None, cpu), strict=True
    ):
        for sizes in ({"s0": 1, "s1": 41, "s2": 37}, {"s0": 3, "s1": 1, "s2": 5}):
            check(program, content(graph, sizes), 1e-4)


def test_reshapes_go_behind_what_follows() -> None:
    """What is left in the shape between are sums, which read through the reshape, and numbers of a group each."""
    b = Builder()
    x = b.input(TensorType(dtypes.float32, (S, 12, H, W)))
    for groups in (1, 4):
        graph = sink_reshapes(grouped(groups, (S, 12, H, W)))
        between = [n for n in graph.nodes if n.output.rank == 3 and n.op in ("sub", "mul") and n.output.shape[2] != 1]
        assert not [n for n in between if n.operands[0] is not n.operands[1]]  # squares are read by a sum alone
    # Numbers that go around within an axis, or that lie side by side, would be looked up one by one.
    turning, beside = b.reshape(x, (S, 2, 6, H * W)), b.reshape(x, (S, 12, H, W, 1))
    y = b.mul(turning, b.constant(np.arange(6, dtype=np.float32).reshape(1, 1, 6, 1)))
    line = b.input(TensorType(dtypes.float32, (S, H, 12)))
    z = b.mul(b.reshape(line, (S, H, 3, 4)), b.input(TensorType(dtypes.float32, (S, 1, 3, 1))))
    kept = b.graph([b.reshape(y, x.shape), b.reshape(z, line.shape), b.reshape(beside, x.shape)])
    shapes = {n.output.shape for n in sink_reshapes(kept).nodes if n.op == "mul"}
    assert shapes == {(S, 2, 6, H * W), (S, H, 3, 4)}


def test_numbers_that_are_the_same_for_all_are_one() -> None:
    """The scales of a group normalization before those of its channels: not spread over these."""
    b = Builder()
    x = b.input(TensorType(dtypes.float32, (S, 12, H, W)))
    for numbers in (np.ones((4, 1), np.float32), np.array([[0], [-0.0], [0], [0]], np.float32)):
        y = b.mul(b.reshape(x, (S, 4, 3 * H * W)), b.constant(numbers))
        (made,) = (n for n in sink_reshapes(b.graph([b.reshape(y, x.shape)])).nodes if n.op == "mul")
        same = bool(numbers.tobytes() == numbers[0].tobytes() * 4)
        assert made.output.shape == x.shape and (made.operands[1].rank == 0) == same


def test_reshapes_of_nothing_stay() -> None:
    """No size divides one of 0."""
    graph = grouped(3, (0, 12, H, W))
    assert [n.op for n in sink_reshapes(graph).nodes] == [n.op for n in graph.nodes]


def test_sums_of_nothing_and_of_open_sizes() -> None:
    """A known size of 0 beside open ones, which are taken for large."""
    b = Builder()
    x = b.input(TensorType(dtypes.float32, (0, H, W, 4)))
    (program,) = compile_graphs([prepare(b.graph([b.reduce("sum", x, [0, 1, 2, 3])]))])
    check(program, [np.zeros((0, 5, 3, 4), np.float32)])


def test_an_index_that_is_looked_at_inside_only() -> None:
    """A window's neighbour is in the same image, or not there: its place in a flattened one needs no division."""
    b = Builder()
    x = b.input(TensorType(dtypes.float32, (2, 8, 7 * 9)))
    image = b.reshape(x, (2, 8, 7, 9))
    n, c, i, j = (index(name, d) for name, d in zip("ncij", image.shape, strict=True))
    assert image.node is not None
    found = view_index(image.node, (n, c, i - 1, j + 1))
    assert found == (n, c, 9 * (i - 1) + j + 1)
