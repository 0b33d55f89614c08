"""Values of open sizes that are one number everywhere: what they are folded to, and that answers stay."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnxruntime
import pytest

import onnxc
from onnxc.frontends import onnx_file
from onnxc.passes.decompose import decompose
from onnxc.passes.pipeline import PassOptions, passes
from onnxc.passes.uniform import fold_uniform, number_of
from onnxc.primitives.builder import Builder

rng = np.random.default_rng(61)


def model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]>\n{text}')


COUNT = """zero = Constant <value_int = 0> ()  one = Constant <value_int = 1> ()  none = Constant <value_ints = [0]> ()
    n = Shape <start = 1, end = 2> (x)  s = Squeeze (n)  i = Range (zero, s, one)"""
# Conditions of `i`, the positions along the second axis, and what they are everywhere.
CONDITIONS = {
    "c = GreaterOrEqual (i, zero)": True,
    "c = Less (i, zero)": False,
    "c = Equal (i, m)": False,
    "j = Add (i, one) c = Greater (j, zero)": True,
    "j = Mul (i, one) c = LessOrEqual (m, j)": True,
    "c = Greater (i, zero)": None,
    "j = Mul (i, big) c = GreaterOrEqual (j, zero)": None,
    "j = Sub (i, one) c = GreaterOrEqual (j, zero)": None,
    "c = Equal (i, zero)": None,
    "j = Cast <to = 6> (i) z = Cast <to = 6> (zero) c = GreaterOrEqual (j, z)": None,
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_conditions_of_positions(condition: str) -> None:
    """A choice by one that always holds, or never does, is what it chooses; others are computed."""
    text = f"""g (float[N, S] x) => (float[N, S] y)
        <float low = {{-1.5}}, int64 m = {{-1}}, int64 big = {{4611686018427387904}}> {{
        {COUNT} {condition} y = Where (c, x, low)
    }}"""
    made = model(text)
    folded = fold_uniform(decompose(onnx_file.load(made)))
    holds = CONDITIONS[condition]
    assert (holds is None) == any(n.op == "where" for n in folded.nodes)
    compiled = onnxc.compile(made)
    for shape in ((2, 5), (3, 1), (2, 0), (0, 4)):
        x = rng.standard_normal(shape).astype(np.float32)
        (y,) = compiled.run(None, {"x": x})
        (wanted,) = onnxruntime.InferenceSession(made.SerializeToString()).run(None, {"x": x})
        np.testing.assert_array_equal(y, wanted)


def test_masks_that_hide_nothing() -> None:
    """As exporters write them in models of open sizes: attention has no mask then."""
    made = model(f"""g (float[N, S, 8] x) => (float[N, S, 8] y, bool[S] c)
        <float low = {{-3.4e38}}, float nothing = {{0}}> {{
        {COUNT} c = GreaterOrEqual (i, zero)  k = Squeeze (s)  u = Unsqueeze (k, none)
        sizes = Concat <axis = 0> (u, u)  e = Expand (c, sizes)  mask = Where (e, nothing, low)
        t = Transpose <perm = [0, 2, 1]> (x)  q = MatMul (x, t)  a = Add (q, mask)
        p = Softmax (a)  y = MatMul (p, x)
    }}""")
    graph = onnx_file.load(made)
    for _, one in passes(PassOptions()):
        graph = one(graph)
    (attention,) = (n for n in graph.nodes if n.op == "attention")
    assert len(attention.operands) == 3
    x = rng.standard_normal((2, 7, 8)).astype(np.float32)
    y, c = onnxc.compile(made).run(None, {"x": x})
    wanted, _ = onnxruntime.InferenceSession(made.SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(y, wanted, 1e-5, 1e-6)
    assert c.all() and c.shape == (7,)


def test_numbers_of_values() -> None:
    """Zeros of both signs are two numbers, and a NaN is one."""
    b = Builder()
    for array, number in (([2.0, 2.0], 2.0), ([0.0, -0.0], None), ([np.nan, np.nan], np.nan), ([], None)):
        found = number_of(b.constant(np.array(array, np.float32)))
        assert (found is None) == (number is None)
        assert found is None or np.array_equal(found, np.float32(number), equal_nan=True)
