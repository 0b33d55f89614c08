"""ONNX's own node tests, through the definitions and numpy; with a GPU as the target, on that.

`tests/test_backend_suite.py` has them all, compiled for the CPU.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from onnx import ModelProto, TensorProto, numpy_helper
from onnx.backend.test.case.node import collect_testcases

from onnxc.errors import UnsupportedError, UnsupportedOpError
from onnxc.frontends.onnx_file import load
from onnxc.ir import dtypes
from onnxc.passes.decompose import decompose
from onnxc.primitives.interpret import interpret
from tests.drawn import DRAWN, check_drawn
from tests.small_models import parse
from tests.targets import evaluate

pytestmark = pytest.mark.every_target

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the cases compute infinities on purpose
    CASES = {case.name: case for case in collect_testcases(None)}


def tensors(values: Any, infos: Any) -> list[np.ndarray]:
    """The arrays of a data set; a test with sequences or optionals is skipped."""
    if any(v is None or not i.type.HasField("tensor_type") for v, i in zip(values, infos, strict=False)):
        pytest.skip("not tensors")
    return [numpy_helper.to_array(v) if isinstance(v, TensorProto) else np.asarray(v) for v in values]


def with_constants(model: ModelProto, inputs: list[np.ndarray], which: set[int]) -> ModelProto:
    """The model with some of its inputs as constants: many cases give shapes and axes as inputs."""
    changed = ModelProto()
    changed.CopyFrom(model)
    infos = list(changed.graph.input)
    changed.graph.initializer.extend(numpy_helper.from_array(inputs[k], infos[k].name) for k in sorted(which))
    del changed.graph.input[:]
    changed.graph.input.extend(info for k, info in enumerate(infos) if k not in which)
    return changed


def run(model: ModelProto, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """The outputs: with inputs as they are, with lists of integers as constants, or with nothing but constants."""
    lists = {k for k, x in enumerate(inputs) if x.dtype == np.int64 and x.ndim <= 1}
    for which in (set(), lists, set(range(len(inputs)))):
        given = [x for k, x in enumerate(inputs) if k not in which]
        try:
            return evaluate(load(with_constants(model, inputs, which)), given)
        except UnsupportedOpError as error:
            pytest.skip(str(error)[:80])
        except UnsupportedError as error:
            reason = str(error)
    pytest.skip(reason[:80])


@pytest.mark.parametrize("name", sorted(CASES))
def test_node(name: str) -> None:
    case = CASES[name]
    for given, wanted in case.data_sets:
        inputs = tensors(given, case.model.graph.input)
        outputs = tensors(wanted, case.model.graph.output)
        found = run(case.model, inputs)
        if name in DRAWN:
            check_drawn(name, inputs, found, outputs)
            continue
        for a, b in zip(found, outputs, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            compare(a, b)


def compare(got: np.ndarray, wanted: np.ndarray) -> None:
    kind = dtypes.from_numpy(wanted.dtype)
    if not kind.is_float:
        np.testing.assert_array_equal(got, wanted)
        return
    rtol, atol = (1e-3, 1e-5) if kind.bits >= 32 else (1e-2, 1e-2)
    with np.errstate(all="ignore"):
        a, b = got.astype(np.float64), wanted.astype(np.float64)
    np.testing.assert_allclose(a, b, rtol, atol)


def test_negative_pads_of_windows() -> None:
    """They cut off, as in kernels: constants are folded so (no other engine takes them)."""
    x = np.arange(25, dtype=np.float32).reshape(1, 1, 5, 5)
    model = parse("""(float[1, 1, 5, 5] x, float[1, 1, 2, 2] w) => (float[A, B, C, D] c, float[E, F, G, H] a) {
        c = Conv<pads = [-1, 1, 0, -2]>(x, w) a = AveragePool<kernel_shape = [2, 2], pads = [-1, 0, 0, -1]>(x) }""")
    w = np.array([[[[1, 2], [3, 4]]]], np.float32)
    graph = decompose(load(model))
    (node,) = [n for n in graph.nodes if n.op == "conv"]  # whose kernels wrote behind their scratch
    assert min(*node.attrs["low"], *node.attrs["high"]) == 0
    conv, mean = interpret(graph, [x, w])
    parts = sliding_window_view(np.pad(x[0, 0, 1:, :3], ((0, 0), (1, 0))), (2, 2))
    np.testing.assert_array_equal(conv[0, 0], (parts * w[0, 0]).sum((2, 3)))
    np.testing.assert_array_equal(mean[0, 0], sliding_window_view(x[0, 0, 1:, :4], (2, 2)).mean((2, 3)))
