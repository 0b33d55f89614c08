"""Kernels that begin at the end of a large buffer, where the one before them has ended: the bits are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest

from onnxc.codegen.triton.kernel import Kernel
from onnxc.codegen.triton.terms import Buffers
from onnxc.codegen.triton.walk import Walks
from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from onnxc.ir.types import TensorType
from tests.targets import needs_triton
from tests.triton_simulator import Simulator

Array = np.ndarray[Any, Any]

pytestmark = needs_triton
rng = np.random.default_rng(19)
LARGE = {"LARGE": 1 << 10}
BACK, TURNED = "num_programs(0) - 1 - tl.program_id(0)", "back: tl.constexpr = True"


def both(simulator: Simulator, text: str, *inputs: Array, **options: Any) -> tuple[str, list[Array]]:
    """The source with some kernels the other way round, and the outputs, which are those of the plain order."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]>\n{text}').SerializeToString()
    plain = simulator.run(model, inputs, **options)
    assert not plain.error[0] and BACK not in plain.source and TURNED not in plain.source
    found = simulator.run(model, inputs, limits=LARGE, **options)
    assert found.kinds == plain.kinds and not found.error[0]
    switched = simulator.run(model, inputs, limits=LARGE, **{**options, "fusion": {"walks": False}})
    assert switched.source == plain.source
    for x, y in zip(found.outputs, plain.outputs, strict=True):
        assert x.tobytes() == y.tobytes()
    return found.source, found.outputs


def numbers(*shape: int) -> Array:
    return (rng.standard_normal(shape) / 4).astype(np.float16)


@pytest.mark.parametrize("wide", [False, True])
def test_an_image_that_is_read_twice(simulator: Simulator, wide: bool) -> None:
    """Small kernels between the two do not count."""
    x, w = numbers(3, 16, 7, 9), numbers(16, 16)
    text = """g (float16[3, 16, 7, 9] x, float16[16, 16] w) => (float16[3, 16, 7, 9] y) {
        mean = GlobalAveragePool(x)
        shape = Constant <value_ints = [3, 16]> ()
        rows = Reshape(mean, shape)
        gates = MatMul(rows, w)
        gate = Sigmoid(gates)
        back = Constant <value_ints = [3, 16, 1, 1]> ()
        scale = Reshape(gate, back)
        y = Mul(x, scale)
    }"""
    source, (y,) = both(simulator, text, x, w, wide=wide)
    assert source.count(BACK) == 1
    exact = x.astype(np.float64)
    gate = 1 / (1 + np.exp(-(exact.mean((2, 3)) @ w.astype(np.float64))))
    np.testing.assert_allclose(y.astype(np.float64), exact * gate[:, :, None, None], 4e-3, 1e-3)


@pytest.mark.parametrize("descriptors", [False, True])
def test_programs_that_take_several_tiles(simulator: Simulator, descriptors: bool) -> None:
    """Of three products one after the other the second one goes back."""
    x, *w = (numbers(128, 64), *(numbers(64, 64) for _ in range(3)))
    text = """g (float16[128, 64] x, float16[64, 64] a, float16[64, 64] b, float16[64, 64] c) => (float16[128, 64] y) {
        p = MatMul(x, a)
        q = MatMul(p, b)
        y = MatMul(q, c)
    }"""
    blocks = {"m": 32, "n": 64, "k": 16, "warps": 4, "stages": 3, "resident": 1}
    source, _ = both(simulator, text, x, *w, blocks=blocks, descriptors=descriptors)
    assert source.count(TURNED) == 1 and source.count("tl.range(pid") == 2


def test_sizes_that_are_not_known(simulator: Simulator) -> None:
    """What may be small goes forward."""
    text = """g (float16[N, 300] x) => (float16[300, N] y, float16[N, 300] z) {
        y = Transpose(x)
        s = ReduceSum <keepdims = 1> (x)
        z = Div(x, s)
    }"""
    source, _ = both(simulator, text, np.abs(numbers(5, 300)))
    assert BACK not in source


def test_which_kernels_turn() -> None:
    """Each that finds a large buffer of the one before it, but for those with an order of their own."""
    large, other, small = (Value(TensorType(dtypes.float32, (n,))) for n in (1 << 23, 1 << 23, 1 << 10))
    walks = Walks()

    def turns(kind: str, *values: Value) -> bool:
        buffers = Buffers()
        for v in values:
            buffers.pointer(v)
        return walks.turns(Kernel([], buffers, 8, 4, kind=kind))

    assert [turns("loops", large), turns("conv", small, large), turns("matmul", small), turns("loops", large)] == [
        False, True, False, False,
    ]  # fmt: skip
    assert [turns("attention", large, other), turns("loops", other), turns("loops", large)] == [False, True, False]
