"""Epilogues of convolutions and products that read by other loops than theirs: groups of channels, rows of a table."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper

import onnxc
from tests.small_models import floats, parse, reference

GROUPS = 32
BODY = "m = Div(sums, ten) e = Exp(m) d = Add(z, e) r = Reshape(d, shape) y = Add(h, r)"


def convolution(rows: str, channels: int) -> str:
    part = channels // GROUPS * 25
    return f"""(float[{rows}, 8, 5, 5] x, float[{rows}, {GROUPS}, {part}] z, float[{rows}, {GROUPS}, 1] sums,
     float[{channels}, 8, 1, 1] w) => (float[{rows}, {channels}, 5, 5] y)
    <int64[4] shape = {{0, {channels}, 5, 5}}, float ten = {{10.0}}> {{ h = Conv(x, w) {BODY} }}"""


def product(rows: str, channels: int) -> str:
    part = channels // GROUPS
    return f"""(float[{rows}, 5, 8] x, float[{rows}, 5, {GROUPS}, {part}] z, float[{rows}, 5, {GROUPS}, 1] sums,
     float[8, {channels}] w) => (float[{rows}, 5, {channels}] y)
    <int64[3] shape = {{0, 5, {channels}}}, float ten = {{10.0}}> {{ h = MatMul(x, w) {BODY} }}"""


@pytest.mark.parametrize("rows", ["2", "n"])
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("channels", [64, 160])
def test_groups_of_channels_in_an_epilogue(channels: int, constant: bool, rows: str) -> None:
    """An axis of the result has two loops then: over groups, and over the channels of one."""
    for text in (convolution(rows, channels), product(rows, channels)):
        proto = parse(text)
        arrays = [floats(*(d.dim_value or 2 for d in i.type.tensor_type.shape.dim)) for i in proto.graph.input]
        if constant:
            proto.graph.initializer.append(numpy_helper.from_array(arrays.pop(), "w"))
            del proto.graph.input[-1]
        (wanted,) = reference(proto, *arrays)
        np.testing.assert_allclose(onnxc.compile(proto)(*arrays)["y"], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("inputs", "op", "result"),
    [
        ("float[2, 4] x, float[4, 16] w, float[5, 2, 16] table, int64 at", "MatMul", "2, 16"),
        ("float[3, 2, 4] x, float[3, 4, 16] w, float[5, 2, 16] table, int64[3] at", "MatMul", "3, 2, 16"),
        ("float[n, 4] x, float[4, 16] w, float[5, n, 16] table, int64 at", "MatMul", "n, 16"),
        ("float[2, 8, 6, 6] x, float[16, 8, 3, 3] w, float[5, 2, 4, 4, 16] table, int64 at", "Conv", "2, 4, 4, 16"),
    ],
)  # fmt: skip
def test_an_operand_whose_place_is_data(inputs: str, op: str, result: str) -> None:
    """The lines of such an operand cannot be fetched before the epilogue has read where it lies."""
    last = "Transpose<perm = [0, 2, 3, 1]>" if op == "Conv" else "Identity"
    body = f"h = {op}(x, w) t = {last}(h) row = Gather(table, at) y = Add(t, row)"
    proto = parse(f"({inputs}) => (float[{result}] y) {{ {body} }}")
    shapes = [[d.dim_value or 9 for d in i.type.tensor_type.shape.dim] for i in proto.graph.input]
    arrays = [*(floats(*s) for s in shapes[:-1]), np.resize(np.array([-2, 3, 0]), shapes[-1])]
    (wanted,) = reference(proto, *arrays)
    np.testing.assert_allclose(onnxc.compile(proto)(*arrays)["y"], wanted, rtol=1e-5, atol=1e-5)
