"""Gradients of the standard's operators: against central differences in float64, and in onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxc.errors import UnsupportedError
from onnxc.export import to_onnx
from onnxc.frontends.onnx_file import load
from onnxc.passes.decompose import decompose
from onnxc.primitives.interpret import interpret
from tests.gradient_harness import ATOL, EPS, RTOL, Array, cotangents_of
from tests.gradient_ops import BEGIN, END, Derived, NodeCase, cases, derive, is_real, node_case, table

CASES = cases()
DIRECTIONS = 3


def _inputs(found: Derived, case: NodeCase, dys: list[Array]) -> list[Array]:
    given = {**case.inputs, **{f"{n}_cotangent": dy for n, dy in zip(found.losses, dys, strict=True)}}
    given["random_state"] = np.zeros(2, np.uint64)  # what the forward pass draws from here, too
    return [given[n] for n in found.gradient.input_names]


@pytest.mark.parametrize("name", sorted(CASES))
def test_node(name: str) -> None:
    case = CASES[name]
    try:
        found = derive(case)
    except UnsupportedError as error:
        pytest.skip(str(error)[:80])
    if found is None:
        pytest.skip("no floats")
    forward = decompose(load(found.model))
    places = [forward.output_names.index(n) for n in found.losses]

    def results(moved: dict[str, Array]) -> list[Array]:
        ys = interpret(forward, [moved[n] for n in forward.input_names])
        return [ys[k] for k in places]

    base = {n: case.inputs[n] for n in forward.input_names}
    dys = cotangents_of(results(base))
    got = dict(zip(found.wrt, interpret(found.gradient, _inputs(found, case, dys)), strict=True))
    rng = np.random.default_rng(5)
    for n in found.wrt:
        assert got[n].shape == base[n].shape
        for _ in range(DIRECTIONS):
            way = rng.uniform(0.5, 1, base[n].shape) * rng.choice([-1, 1], base[n].shape)
            ends = [results({**base, n: base[n] + step * way}) for step in (EPS, -EPS)]
            with np.errstate(invalid="ignore"):  # infinities of masks
                slope = sum(float(((a - b) * dy).sum()) for a, b, dy in zip(*ends, dys, strict=True)) / (2 * EPS)
            if np.isfinite(slope):
                scale = float(np.abs(got[n] * way).sum())
                np.testing.assert_allclose((got[n] * way).sum(), slope, RTOL, ATOL + RTOL * scale, err_msg=n)
    if all(a.dtype.isbuiltin == 1 for a in case.inputs.values()):  # onnxruntime has few kernels for 8, 4 and 2 bits
        _agrees_in_onnxruntime(case, dys, got)


def _agrees_in_onnxruntime(case: NodeCase, dys: list[Array], wanted: dict[str, Array]) -> None:
    """The gradient in float32, as an ONNX model."""
    found = derive(case, np.float32)
    assert found is not None
    model = to_onnx(found.gradient)
    onnx.checker.check_model(model, full_check=True)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    given = [np.asarray(a, np.float32) if is_real(a) else a for a in _inputs(found, case, dys)]
    outputs = session.run(None, dict(zip(found.gradient.input_names, given, strict=True)))
    for n, a in zip(found.wrt, outputs, strict=True):
        scale = float(np.abs(wanted[n][np.isfinite(wanted[n])]).max(initial=0))
        np.testing.assert_allclose(a, wanted[n], 2e-3, 1e-5 + 2e-4 * scale, err_msg=f"onnxruntime: {n}")


def test_the_page_tells_which_operators_have_gradients() -> None:
    """`python -m tests.gradient_ops` writes the table."""
    page = (Path(__file__).parents[1] / "docs" / "training.md").read_text()
    assert BEGIN + page.partition(BEGIN)[2].partition(END)[0] + END == table()


def test_staircases_have_the_gradient_zero() -> None:
    for op in ("Floor", "Ceil", "Round", "Sign"):
        found = derive(node_case(op, {"x": np.array([0.0, 0.5, -1.7, 2.0])}, 1))
        assert found is not None
        np.testing.assert_array_equal(interpret(found.gradient, [np.zeros(4), np.ones(4)])[0], np.zeros(4))
