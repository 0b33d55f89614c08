"""Kernels in stages that work through a large tensor image by image: in Triton's interpreter their answers are those of
kernels that read it twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest

import onnxc
from onnxc.planner.groups import FusionOptions
from tests.targets import needs_triton, this_gpu
from tests.triton_simulator import Simulator

Array = np.ndarray[Any, Any]

pytestmark = needs_triton
rng = np.random.default_rng(23)
SMALL = {"LEAST_BYTES": 0, "LEAST_IMAGE": 0, "LEAST_IMAGES": 2, "SMALL": 1, "LIGHT": 0}


def both(simulator: Simulator, text: str, *inputs: Array, tolerance: float = 0.0, **options: Any) -> list[str]:
    """The kinds of kernels in stages; their answers are those of kernels that read twice, as nearly as is asked."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]>\n{text}').SerializeToString()
    plain = simulator.run(model, inputs, limits=SMALL, fusion={"relay": False}, **options)
    found = simulator.run(model, inputs, limits=SMALL, **options)
    assert not found.error[0] and "relay" not in plain.kinds
    for x, y in zip(found.outputs, plain.outputs, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x.astype(np.float64), y.astype(np.float64), tolerance, tolerance)
    return found.kinds


def numbers(dtype: str, *shape: int) -> Array:
    return (rng.standard_normal(shape) / 2).astype({"float": np.float32, "float16": np.float16}[dtype])


def gated(dtype: str, n: int, c: int, r: int, h: int, w: int, more: str = "", pool: str = "GlobalAveragePool") -> str:
    """Squeeze and excite."""
    outputs = f"{dtype}[{n}, {c}, {h}, {w}] y" + (f", {dtype}[{n}, {c}, 1, 1] z" if more else "")
    return f"""g ({dtype}[{n}, {c}, {h}, {w}] x, {dtype}[{r}, {c}, 1, 1] a, {dtype}[{r}] b, {dtype}[{c}, {r}, 1, 1] d,
        {dtype}[{c}] e) => ({outputs}) {{
        m = {pool} (x)  s = Conv (m, a, b)  t = Relu (s)  u = Conv (t, d, e)  v = Sigmoid (u)
        y = Mul (x, v) {more} }}"""


def inputs(dtype: str, n: int, c: int, r: int, h: int, w: int) -> list[Array]:
    return [numbers(dtype, *s) for s in ((n, c, h, w), (r, c, 1, 1), (r,), (c, r, 1, 1), (c,))]


SIZES = [  # a program for each image, several, several for the stages between as well, rows in pieces
    ("float16", 5, 24, 3, 7, 7), ("float16", 3, 70, 5, 9, 13), ("float", 2, 600, 20, 2, 3), ("float", 2, 3, 2, 70, 71),
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_gates_of_channels(simulator: Simulator, size: tuple[str, int, int, int, int, int]) -> None:
    pool = "GlobalMaxPool" if size[-1] == 71 else "GlobalAveragePool"
    tolerance = 2e-3 if size[0] == "float16" else 1e-5
    options: dict[str, Any] = {"wide": size[1] == 2, "candidate": 7 if size[1] == 3 else 0, "tolerance": tolerance}
    assert both(simulator, gated(*size, pool=pool), *inputs(*size), **options) == ["relay"]


def test_what_is_no_number_stays_in_its_image(simulator: Simulator) -> None:
    size = ("float16", 4, 70, 5, 9, 13)
    x, *rest = inputs(*size)
    x[1, 3, 0, 0], x[2, 5, 1, 1], x[3] = np.nan, np.inf, 0
    assert both(simulator, gated(*size), x, *rest, tolerance=2e-3) == ["relay"]


def test_a_mean_that_others_read_too(simulator: Simulator) -> None:
    """It is a result of the model, or read by another kernel: it stays in memory as it is."""
    size = ("float", 3, 7, 2, 5, 5)
    for more in (" z = Identity (m)", " z = Exp (u)"):
        assert "relay" not in both(simulator, gated(*size, more), *inputs(*size), tolerance=1e-5)


def test_an_image_that_needs_another(simulator: Simulator) -> None:
    """Gates from the means of the next image, or from a sum over all of them."""
    head = "g (float[4, 6, 9, 5] x, float[1] o) => (float[4, 6, 9, 5] y) { m = GlobalAveragePool (x)"
    turned = """a = Constant <value_ints = [1]> ()  b = Constant <value_ints = [4]> ()
        z = Constant <value_ints = [0]> ()  p = Slice (m, a, b, z)  q = Slice (m, z, a, z)
        v = Concat <axis = 0> (p, q)"""
    summed = "z = Constant <value_ints = [0]> ()  s = ReduceSum (m, z)  v = Mul (m, s)"
    for between in (turned, summed):
        text = f"{head}  {between}  w = Sigmoid (v)  y = Mul (x, w) }}"
        assert "relay" not in both(simulator, text, numbers("float", 4, 6, 9, 5), numbers("float", 1), tolerance=1e-5)


def test_what_the_cache_holds_is_read_twice(simulator: Simulator) -> None:
    size = ("float16", 5, 24, 3, 7, 7)
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]>\n{gated(*size)}')
    assert "relay" not in simulator.run(model.SerializeToString(), inputs(*size)).kinds


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Programs that run at the same time; the same bits from run to run."""
    this_gpu()
    size = ("float16", 64, 512, 32, 33, 32)
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]>\n{gated(*size)}')
    given = dict(zip("xabde", inputs(*size), strict=True))
    found = onnxc.compile(model, target="cuda")
    assert [k.kind for k in found.explain().kernels] == ["relay"]
    wanted = onnxc.compile(model, target="cuda", fusion=FusionOptions(relay=False))(**given)["y"]
    first = found(**given)["y"]
    np.testing.assert_allclose(first.astype(np.float32), wanted.astype(np.float32), 2e-3, 2e-3)
    for _ in range(8):
        assert found(**given)["y"].tobytes() == first.tobytes()


def _linear(n: int, c: int, r: int, between: str = "") -> str:
    """Gates by products with matrices, `between` of the means first."""
    return f"""g (float[{n}, {c}, 3, 3] x, float[{c}, {r}] a, float[{r}, {c}] d, float[{n}, T, {c}] z)
        => (float[{n}, {c}, 3, 3] y) {{
        g = GlobalAveragePool (x)  m = Flatten (g)  o = Constant <value_ints = [1]> ()
        k = Constant <value_ints = [2, 3]> ()  {between or "f = Identity (m)"}
        s = MatMul (f, a)  t = Relu (s)  u = MatMul (t, d)  v = Sigmoid (u)  w = Unsqueeze (v, k)  y = Mul (x, w) }}"""


def test_a_wait_before_a_loop(simulator: Simulator) -> None:
    """Columns of a matrix are summed in pieces: the means are waited for once, before all of them."""
    given = [numbers("float", *s) for s in ((2, 300, 3, 3), (300, 20), (20, 300), (2, 0, 300))]
    assert both(simulator, _linear(2, 300, 20), *given, tolerance=1e-5) == ["relay"]


def test_what_is_no_small_matter_between(simulator: Simulator) -> None:
    """Sums over an axis that is known when the model runs; much work; images too small for a program each."""
    given = [numbers("float", *s) for s in ((2, 60, 3, 3), (60, 4), (4, 60), (2, 7, 60))]
    summed = "n = Unsqueeze (m, o)  p = Mul (n, z)  e = Exp (p)  f = ReduceSum <keepdims = 0> (e, o)"
    assert "relay" not in both(simulator, _linear(2, 60, 4, summed), *given, tolerance=1e-5)
    for limits in ({"LIGHT": 1, "SMALL": 1}, {"LEAST_IMAGE": 60 * 9 * 4 + 1}):
        model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]>\n{_linear(2, 60, 80)}')
        kinds = simulator.run(
            model.SerializeToString(), [given[0], *(numbers("float", *s) for s in ((60, 80), (80, 60), (2, 0, 60)))],
            limits=SMALL | limits,
        ).kinds  # fmt: skip
        assert "relay" not in kinds
