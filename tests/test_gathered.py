"""Gathers whose places many rows share: sampled images and volumes of many channels, against float64."""

from __future__ import annotations

import itertools

import numpy as np
import onnx.parser
import pytest

import onnxc
from onnxc.errors import RunError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.graph import Graph, Value
from onnxc.ir.types import TensorType
from onnxc.ops.sampling import Tap, linear_taps, weighted_sum
from onnxc.passes.normalise_indices import GATHERS, normalise_indices
from onnxc.primitives.builder import Builder
from onnxc.runtime.cpu import level
from tests.compile_harness import Compiled, compare, compile_graphs

pytestmark = pytest.mark.every_target

LEVELS = [
    level(),
    *(level(name) for name in ("x86-64-v3", "x86-64-v2") if level(name).vector_length < level().vector_length),
]
SIZES = [  # of the image or volume [N, C, D...], and how many places it is read at
    ((1, 4, 7, 9), 1),
    ((3, 5, 11, 13), 17),
    ((2, 33, 8, 40), 1301),
    ((1, 64, 5, 6), 640),
    ((2, 3, 6, 5), 37),
    ((2, 7, 4, 5, 6), 131),
    ((1, 6, 50), 700),
]


def sampling(shape: tuple[int, ...], places: int, dtype: DType = dtypes.float32, linear: bool = True) -> Graph:
    """An image [N, C, D...] read at places [N, count] of each of its axes D."""
    b = Builder()
    x = b.input(TensorType(dtype, shape))
    taps = []
    for size in shape[2:]:
        at = b.input(TensorType(dtypes.float32, (shape[0], places)))
        taps.append(linear_taps(b, at, size) if linear else [Tap(b.clip(b.floor(at), 0.0, float(size - 1)), None)])
    return b.graph([weighted_sum(b, x, taps)])


def content(shape: tuple[int, ...], places: int, seed: int) -> list[np.ndarray]:
    """An image, and places in it and around it."""
    rng = np.random.default_rng(seed)
    at = [rng.uniform(-2, size + 1, (shape[0], places)).astype(np.float32) for size in shape[2:]]
    return [rng.standard_normal(shape), *at]


def expected(x: np.ndarray, *at: np.ndarray) -> np.ndarray:
    """The linear interpolation in float64, zero outside: [N, C, count]."""
    x = x.astype(np.float64)
    result = np.zeros((*x.shape[:2], at[0].shape[1]))
    images = np.arange(x.shape[0])[:, None]
    for corner in itertools.product((0, 1), repeat=len(at)):
        weight, index = np.ones(at[0].shape), [images]
        for p, k, size in zip(at, corner, x.shape[2:], strict=True):
            low = np.floor(p.astype(np.float64))
            inside = (low + k >= 0) & (low + k < size)
            weight = weight * np.where(inside, p - low if k else 1 - (p - low), 0)
            index.append(np.clip(low + k, 0, size - 1).astype(np.int64))
        result += np.moveaxis(np.moveaxis(x, 1, -1)[tuple(index)] * weight[..., None], -1, 1)
    return result


@pytest.mark.parametrize("cpu", LEVELS, ids=lambda k: k.name)
def test_linear_interpolation(cpu: object) -> None:
    """Images, lines and volumes; few and many channels and places, one and several pieces of these."""
    programs = compile_graphs([sampling(shape, places) for shape, places in SIZES], cpu=cpu)  # type: ignore[arg-type]
    for k, ((shape, places), p) in enumerate(zip(SIZES, programs, strict=True)):
        x, *at = content(shape, places, k)
        data = [x.astype(np.float32), *at]
        (first,) = p(*data)
        compare(first, expected(data[0], *at).astype(np.float32), 1e-5, 1e-5)
        for threads in (1, 3):
            (other,) = p(*data, threads=threads)
            np.testing.assert_array_equal(first, other)


def test_the_places_are_computed_once_for_all_channels() -> None:
    """Of four channels on; three do not pay for tables."""
    some, few = compile_graphs([sampling((2, 4, 7, 9), 40), sampling((2, 3, 7, 9), 40)])
    if isinstance(some, Compiled) and isinstance(few, Compiled):
        assert "turns" in some.program.source and "turns" not in few.program.source


def test_other_types() -> None:
    """Doubles are weighted, integers and booleans only read."""
    shape, places = (2, 9, 5, 7), 83
    kinds = [dtypes.int32, dtypes.uint8, dtypes.int64, dtypes.float16, dtypes.boolean]
    graphs = [sampling(shape, places, dtypes.float64), *(sampling(shape, places, k, linear=False) for k in kinds)]
    double, *others = compile_graphs(graphs)
    x, *at = content(shape, places, 3)
    compare(double(x, *at)[0], expected(x, *at), 1e-5, 1e-5)
    index = [
        np.arange(2)[:, None],
        *(np.clip(np.floor(p), 0, d - 1).astype(int) for p, d in zip(at, shape[2:], strict=True)),
    ]
    for kind, p in zip(kinds, others, strict=True):
        data = (x * 50 > 0) if kind is dtypes.boolean else (np.abs(x) * 50).astype(kind.numpy)
        want = np.moveaxis(np.moveaxis(data, 1, -1)[tuple(index)], -1, 1)
        np.testing.assert_array_equal(p(data, *at)[0], want)


def test_sizes_that_only_the_run_tells() -> None:
    """One program for any number of images, channels and places, none of them included."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 20]>
        g (float[N, C, H, W] x, float[N, A, B, 2] g) => (float[P, Q, R, S] y) {
          y = GridSample <mode = "linear", align_corners = 1> (x, g)
        }""")
    compiled = onnxc.compile(model)
    rng = np.random.default_rng(1)
    for n, c, h, w, a, b in [
        (1, 8, 9, 7, 5, 6),
        (3, 1, 4, 4, 40, 50),
        (2, 17, 30, 3, 1, 1),
        (2, 0, 4, 4, 3, 3),
        (2, 5, 4, 4, 0, 3),
    ]:
        x = rng.standard_normal((n, c, h, w)).astype(np.float32)
        grid = rng.uniform(-1.2, 1.2, (n, a, b, 2)).astype(np.float32)
        (y,) = compiled(x, grid).values()
        at = [((grid[..., k].astype(np.float64) + 1) / 2 * (size - 1)).reshape(n, -1) for k, size in ((1, h), (0, w))]
        np.testing.assert_allclose(y, expected(x, *at).reshape(y.shape), rtol=1e-4, atol=1e-4)


def test_an_index_out_of_range_is_an_error() -> None:
    """Whichever of the places it is at."""

    def make(b: Builder) -> Value:
        x = b.input(TensorType(dtypes.float32, (2, 6, 5)))
        index = b.input(TensorType(dtypes.int64, (2, 130, 1)))
        return b.transpose(b.one("gather_nd", b.transpose(x, (0, 2, 1)), index, batch_dims=1), (0, 2, 1))

    b = Builder()
    (program,) = compile_graphs([b.graph([make(b)])])
    if not isinstance(program, Compiled):
        pytest.skip("GPU programs read the nearest element")
    x, index = np.ones((2, 6, 5), np.float32), np.zeros((2, 130, 1), np.int64)
    assert (program(x, index)[0] == 1).all()
    for place, wrong in ((0, 5), (129, -6), (64, 1 << 40)):
        broken = index.copy()
        broken[1, place] = wrong
        with pytest.raises(RunError):
            program(x, broken)


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float16, dtypes.int64, dtypes.uint8], ids=str)
def test_constant_places(dtype: DType) -> None:
    """Settled when the model is compiled: negative ones count from the end; those outside are left to the run."""
    b, rng = Builder(), np.random.default_rng(4)
    x, y = b.input(TensorType(dtype, (5, 37, 19))), b.input(TensorType(dtype, (37, 19)))
    each, rows = rng.integers(-19, 19, (37, 23)), rng.integers(-37, 37, (3, 7))
    turned = b.transpose(b.constant(np.ascontiguousarray(each.T)), (1, 0))
    found = [
        b.one("gather_elements", x, b.expand(turned, (5, 37, 23)), axis=2),
        b.one("gather_elements", y, b.constant(each), axis=1),
        b.gather(x, b.constant(rows), 1),
    ]
    graph = normalise_indices(b.graph(found))
    kept = [n.operands[1].dtype for n in graph.nodes if n.op in GATHERS]
    assert kept == [dtypes.int32] * 3
    given = [(rng.standard_normal(v.shape) * 50).astype(np.int8).astype(dtype.numpy) for v in graph.inputs]
    wanted = [
        np.take_along_axis(given[0], np.broadcast_to(each % 19, (5, 37, 23)), 2),
        np.take_along_axis(given[1], each % 19, 1),
        np.take(given[0], rows % 37, 1),
    ]
    (program,) = compile_graphs([graph])
    for got, want in zip(program(*given), wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    outside = b.graph([b.gather(x, b.constant(np.array([0, 37])), 1)])
    assert [n.operands[1].dtype for n in normalise_indices(outside).nodes if n.op in GATHERS] == [dtypes.int64]
