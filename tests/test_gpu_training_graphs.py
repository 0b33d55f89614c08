"""The graphs of training steps on a GPU: what is read once, saved, and merged. No kernel is compiled."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxc
from onnxc import gpu
from onnxc.autodiff.clean import with_factors_outside
from onnxc.autodiff.reduction import BY_TAPS
from onnxc.codegen.triton.program import ProgramWriter
from onnxc.compiler import stages
from onnxc.compiler.options import CompileOptions
from onnxc.frontends import onnx_file
from onnxc.gradient import cleaned, differentiate, joint
from onnxc.ir import dtypes
from onnxc.ir.graph import Graph
from onnxc.ir.types import TensorType
from onnxc.passes.one_pass_moments import one_pass_moments
from onnxc.planner.groups import FusionOptions, Plan
from onnxc.primitives.builder import Builder
from onnxc.primitives.interpret import interpret
from onnxc.training.graph import Update, slots_of, step_graph
from onnxc.training.precision import before_gradients, lowered
from onnxc.training.statistics import running_statistics

RNG = np.random.default_rng(11)
IMAGES = """images (float[8, 3, 20, 20] x, int64[8] t) => (float loss) {
  a = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w)
  b, m1, v1 = BatchNormalization <training_mode = 1> (a, g, h, m, v)
  c = Relu(b)
  d = MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (c)
  e = Conv <kernel_shape = [1, 1]> (d, u)
  f = GlobalAveragePool(e)
  k = Flatten(f)
  loss = SoftmaxCrossEntropyLoss(k, t)
}"""
WEIGHTS = {"w": (16, 3, 3, 3), "g": (16,), "h": (16,), "m": (16,), "v": (16,), "u": (24, 16, 1, 1)}


def model_of(text: str, weights: dict[str, tuple[int, ...]]) -> bytes:
    """A model of the text of its graph, with random weights of these shapes."""
    found = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]>\n{text}')
    rng = np.random.default_rng(3)
    for name, shape in weights.items():
        array = (1.0 + 0.3 * rng.standard_normal(shape)).astype(np.float32)
        found.graph.initializer.append(numpy_helper.from_array(array, name))
    return found.SerializeToString()


def planned(model: bytes, fusion: bool | FusionOptions = True) -> Plan:
    """The plan of a training step in bfloat16."""
    imported = onnx_file.load(model)
    both = joint(
        imported, buffers=running_statistics(imported), prepare=before_gradients("bfloat16", on_gpu=True)
    )  # fmt: skip
    both = lowered(both, "bfloat16", on_gpu=True)
    update = Update(onnxc.optim.SGD(lr=0.1, momentum=0.9))
    graph = step_graph(both, update, slots_of(both, update), last=True)
    options = CompileOptions(target="cuda:sm_90", fusion=fusion)
    graph = stages.prepared(stages.lowered(graph, options), options.passes, stages.Stages())
    return gpu.planned(graph, options.fusion_options)


def test_batch_normalization_is_read_once_for_its_sums() -> None:
    """Forward and backward pass have one kernel each that reads the image for sums; and one that reads it for what
    follows from them.
    """
    plan = planned(model_of(IMAGES, WEIGHTS))
    (image,) = [v for v in plan.graph.values() if v.node is not None and v.node.op == "conv" and v.shape[1] == 16][:1]
    readers = [g for g in plan.groups if any(image.id in s.values and image.id not in s.members for s in g.sections)]
    sums = [g for g in readers if any(s.reductions for s in g.sections)]
    assert len([g for g in sums if not any(n.op == "window_max" for n in g.nodes)]) == 2
    assert all(v.dtype is dtypes.bfloat16 for g in plan.groups for v in g.stored() if v.t.size == image.t.size)


def test_kernels_that_follow_each_other_are_those_that_run_side_by_side() -> None:
    model = model_of(IMAGES, WEIGHTS)
    beside, behind = (ProgramWriter(planned(model, FusionOptions(branches=b))).write() for b in (True, False))
    assert beside.branches and not behind.branches
    assert beside.source == behind.source
    assert [s.kernel for s in gpu.launches(beside.steps)] == [s.kernel for s in gpu.launches(behind.steps)]


def test_weights_are_converted_once_and_small_kernels_are_merged() -> None:
    plan = planned(model_of(IMAGES, WEIGHTS))
    casts = Counter(n.operands[0].id for g in plan.groups for n in g.nodes if n.op == "cast" and not n.operands[0].node)
    weights = {v.id for v in plan.graph.inputs if v.rank == 4 and v.dtype is dtypes.float32}
    stored = Counter(
        v.node.operands[0].id for g in plan.groups for v in g.stored() if v.node is not None and v.node.op == "cast"
    )  # fmt: skip
    assert casts.keys() & weights
    assert all(stored[k] <= 1 for k in weights)
    assert any(len(g.sections) > 1 and any("horizontal" in r for r in g.reasons) for g in plan.groups)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    "window",
    ["kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]", "kernel_shape = [2, 3], dilations = [2, 1]"],
)
def test_windows_by_taps(window: str, ties: bool) -> None:
    """The derivative by taps is that by windows, to the bit where no element is in several windows that it wins."""
    model = model_of(f"m (float[2, 3, 9, 8] x) => (float y) {{\n p = MaxPool <{window}> (x)\n y = ReduceSumSquare"
                     " <keepdims = 0> (p)\n}", {})  # fmt: skip
    x = RNG.standard_normal((2, 3, 9, 8)).astype(np.float32)
    x = np.round(x) if ties else x
    imported = onnx_file.load(model)
    marked = joint(imported, wrt=["x"], prepare=before_gradients("float32", on_gpu=True))
    assert any(BY_TAPS in n.attrs for n in marked.graph.nodes)
    (gradient,) = marked.gradients
    assert gradient is not None
    taps = cleaned(replace(marked.graph, outputs=[gradient], output_names=["dx"]))
    expected = interpret(differentiate(onnx_file.load(model), wrt=["x"], outputs=False), [x])[0]
    np.testing.assert_allclose(interpret(taps, [x])[0], expected, rtol=1e-6)


def moments(dtype: dtypes.DType, axes: tuple[int, ...]) -> Graph:
    """Mean and variance of an image in halves."""
    b = Builder()
    x = b.cast(b.input(TensorType(dtype, (4, 6, 10, 10)), "x"), dtypes.float32)
    mean = b.mean(x, axes, True)
    centered = b.sub(x, mean)
    return b.graph([mean, b.mean(b.mul(centered, centered), axes, True)], ["mean", "variance"])


@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.float16], ids=str)
@pytest.mark.parametrize("shift", [0.0, 3.0, 40.0])
def test_moments_in_one_pass(dtype: dtypes.DType, shift: float) -> None:
    """Off by less than what rounding the image to halves did to its variance. Of equal numbers it is 0, or next to it,
    and never less.
    """
    exact = RNG.standard_normal((4, 6, 10, 10)) + shift
    exact[:, 2] = 7.0 + shift
    x = exact.astype(dtype.numpy)
    graph = moments(dtype, (0, 2, 3))
    one = one_pass_moments(graph)
    assert any(n.op == "max" for n in one.nodes)
    mean, variance = interpret(one, [x])
    wide = x.astype(np.float64)
    np.testing.assert_allclose(mean, wide.mean((0, 2, 3), keepdims=True), rtol=1e-5, atol=1e-6)
    rounding = (float(ml_dtypes.finfo(dtype.numpy).eps) * (abs(shift) + 8.0)) ** 2
    np.testing.assert_allclose(variance, wide.var((0, 2, 3), keepdims=True), rtol=1e-5, atol=rounding)
    assert variance.min() >= 0


def test_moments_of_large_numbers_in_one_pass() -> None:
    """Whose squares are beyond float32, where the squares of their deviations are not."""
    deviations = np.array([0.0, 5e17, 1e30]).repeat(2)[:, None, None]
    x = (1e20 + deviations * RNG.standard_normal((4, 6, 10, 10))).astype(dtypes.bfloat16.numpy)
    x[:, 1] = 1e-3
    _, variance = interpret(one_pass_moments(moments(dtypes.bfloat16, (0, 2, 3))), [x])
    exact = x.astype(np.float64).var((0, 2, 3), keepdims=True)
    np.testing.assert_allclose(variance, np.where(exact > 1e40, np.inf, exact), rtol=2e-2, atol=1e-12)


def test_moments_of_rows_and_of_float32_stay() -> None:
    rows, wide = moments(dtypes.bfloat16, (2, 3)), moments(dtypes.float32, (0, 2, 3))
    assert [n.op for n in one_pass_moments(rows).nodes] == [n.op for n in rows.nodes]
    assert [n.op for n in one_pass_moments(wide).nodes] == [n.op for n in wide.nodes]


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float16], ids=str)
def test_factors_leave_sums(dtype: dtypes.DType) -> None:
    """What is the same all along a sum; but not of halves, whose sum alone may overflow."""
    b = Builder()
    x, c = b.input(TensorType(dtype, (4, 5, 6)), "x"), b.input(TensorType(dtype, (5, 1)), "c")
    y = b.reduce("sum", b.neg(b.div(b.mul(c, x), c)), [0, 2])
    z = b.reduce("sum", b.mul(x, x), [0, 2])
    graph = b.graph([y, z, b.reduce("sum", b.mul(x, c), [1])], ["y", "z", "other"])
    found = with_factors_outside(graph)
    summed = {n.operands[0] for n in found.nodes if n.op == "reduce_sum"}
    assert (x in summed) == (dtype is dtypes.float32)
    assert len(summed) == 3
    arrays = [RNG.standard_normal((4, 5, 6)).astype(dtype.numpy), 1 + RNG.random((5, 1)).astype(dtype.numpy)]
    for one, other in zip(interpret(found, arrays), interpret(graph, arrays), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 4, 5])
def test_gradients_of_small_tables(rows: int) -> None:
    """By comparison up to 4 rows; negative positions count from the end."""
    model = model_of(
        f"m (float[{rows}, 3] x, int64[20, 16] i, float[20, 16, 3] w) => (float y) {{\n"
        " e = Gather(x, i)\n p = Mul(e, w)\n y = ReduceSum <keepdims = 0> (p)\n}", {},
    )  # fmt: skip
    graph = differentiate(onnx_file.load(model), wrt=["x"], outputs=False)
    assert any(n.op == "scatter_nd" for n in graph.nodes) == (rows > 4)
    i, w = RNG.integers(-rows, rows, (20, 16)), RNG.standard_normal((20, 16, 3)).astype(np.float32)
    expected = np.zeros((rows, 3))
    np.add.at(expected, i.reshape(-1), w.reshape(-1, 3))
    (found,) = interpret(graph, [np.zeros((rows, 3), np.float32), i, w])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
