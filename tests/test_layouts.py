"""Values wanted in two memory orders: convolutions read channels-last, and outputs are row-major."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxc
from tests.agreement import assert_agrees
from tests.small_models import floats, parse

pytestmark = pytest.mark.every_target

CASES = {
    "an output that a convolution reads": "r = Relu(x) z = Conv(r, w)",
    "an output that a convolution makes": "z = Conv(x, w) r = Relu(z)",
    "an output between two convolutions": "z = Conv(x, w) r = Conv(z, w)",
    "one value, two outputs": "a = Relu(x) r = Identity(a) z = Conv(a, w)",
    "an output that a convolution reads through views": """
        a = Relu(x) s = Constant<value_ints=[2, 8, 9, 4]>() r = Reshape(a, s)
        b = Transpose<perm=[0, 1, 3, 2]>(r)
        t = Constant<value_ints=[2, 8, 6, 6]>() c = Reshape(b, t) z = Conv(c, w)""",
    "an input that is an output too": "r = Identity(x) z = Conv(x, w)",
    "a convolution of a constant": "c = Conv(k, w) z = Add(c, x) r = Relu(x)",
}


def model(body: str) -> onnx.ModelProto:
    made = parse(f"(float[2,8,6,6] x) => (float[A,B,C,D] r, float[E,F,G,H] z) {{ {body} }}")
    weights = {"w": floats(8, 8, 1, 1), "k": floats(2, 8, 6, 6, seed=1)}
    made.graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in weights.items())
    return made


@pytest.mark.parametrize("body", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("fusion", [True, False])
def test_both_orders(body: str, fusion: bool) -> None:
    made = model(body)
    compiled = onnxc.compile(made, fusion=fusion, fold_bytes=0)
    for seed in range(2):
        assert_agrees(made, {"x": floats(2, 8, 6, 6, seed=seed)}, compiled)


def test_no_copy_where_none_is_needed() -> None:
    counts = onnxc.compile(model("r = Relu(x) z = Conv(x, w)")).explain().counts
    assert counts["kernels"] <= 3 and counts["templates"] == 1
    out = onnxc.compile(model("z = Conv(x, w) r = Relu(x)"))(np.ones((2, 8, 6, 6), np.float32))
    assert out["r"].flags.c_contiguous and out["z"].flags.c_contiguous
