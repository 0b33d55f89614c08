"""GPU kernels for sizes that only the run knows: the order of loops, the width of places, and what is read once."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
import pytest

from onnxc.codegen.loop_order import ordered
from onnxc.codegen.triton.conv_tiles import UNKNOWN, for_few_rows
from onnxc.codegen.triton.product_tiles import FEW_PLACES, Facts
from onnxc.ir import dtypes
from onnxc.ir.expr import Sym, index, of, symbols
from onnxc.ir.graph import Value
from onnxc.ir.types import TensorType
from onnxc.loops.nest import Phase, Store
from onnxc.loops.terms import Const
from tests.targets import needs_triton
from tests.triton_simulator import Request, Simulator, program_of

Array = np.ndarray[Any, Any]
rng = np.random.default_rng(47)


def model(text: str) -> bytes:
    parsed = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]>\n{text}')
    return bytes(parsed.SerializeToString())


def expected(made: bytes, inputs: dict[str, Array]) -> Array:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(made, options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, inputs)[0])


def floats(*shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


POOL = """g (float[N, 3, H, W] x, float[8, 3, 1, 1] w, float[8, 1, 1] a, float[8, 8, 1, 1] v) => (float[N, 8, P, Q] y) {
    c = Conv (x, w)  s = Mul (c, a)
    p = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1], count_include_pad = 0> (s)
    y = Conv (p, v)
}"""
NORM = """g (float[N, 4, H, W] x, float[4, 4, 1, 1] w, float[4, 1, 1] a) => (float[N, 4, P, Q] y)
    <int64[3] groups = {0, 2, -1}, float[2] one = {1, 1}, float[2] none = {0, 0}> {
    c = Conv (x, w)  s = Shape (c)  r = Reshape (c, groups)
    n = InstanceNormalization (r, one, none)  b = Reshape (n, s)  m = Mul (b, a)
    y = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (m)
}"""
DEPTHWISE = """g (float[N, 4, H, W] x, float[4, 1, 3, 3] w) => (float[N, 4, P, Q] y) {
    y = Conv <group = 4, pads = [1, 1, 1, 1]> (x, w)
}"""
TURNED = "g (float[A, B, C] x) => (float[C, A, B] y) { y = Transpose <perm = [2, 0, 1]> (x) }"
CASES = {
    "pool": (POOL, [(2, 3, 5, 7), (8, 3, 1, 1), (8, 1, 1), (8, 8, 1, 1)]),
    "norm": (NORM, [(3, 4, 5, 3), (4, 4, 1, 1), (4, 1, 1)]),
    "depthwise": (DEPTHWISE, [(2, 4, 7, 5), (4, 1, 3, 3)]),
    "turned": (TURNED, [(3, 5, 7)]),
}


@needs_triton
@pytest.mark.parametrize("far", [1, 1 << 30], ids=["64 bits", "32 bits"])
@pytest.mark.parametrize("case", CASES)
def test_both_widths(simulator: Simulator, case: str, far: int) -> None:
    """Of two kernels, the run takes the one whose places are as wide as the sizes want: their answers are the same."""
    text, shapes = CASES[case]
    inputs = [floats(*shape) for shape in shapes]
    made = model(text)
    answer = simulator.run(made, inputs, limits={"FAR": far})
    names = [i.name for i in onnx.ModelProto.FromString(made).graph.input]
    wanted = expected(made, dict(zip(names, inputs, strict=True)))
    np.testing.assert_allclose(answer.outputs[0], wanted, 1e-4, 1e-5)
    texts = program_of(Request(made, inputs))[1].kernels.values()
    assert any("tl.int64)" in t for t in texts) and any(".to(tl.int64)" not in t for t in texts)


@needs_triton
def test_a_window_reads_once_what_its_taps_share() -> None:
    """Nine taps may lie outside; their channel's scale does not."""
    texts = program_of(Request(model(NORM), []))[1].kernels.values()
    pools = [t for t in texts if t.count("ox_max(") >= 8]
    assert [t.count("tl.load") for t in pools] == [9 + 2] * 2  # the variance of a group, the scale of a channel


def test_the_order_of_loops_of_open_sizes() -> None:
    """By strides, in which a size is taken for one of many: that it may be 0 does not leave channels outside."""
    h, w = Sym("h"), Sym("w")
    loops = [(next(iter(symbols(v))), d) for v, d in ((index("c", 64), 64), (index("y", h), h), (index("x", w), w))]
    c, y, x = (of(s) for s, _ in loops)
    out = Value(TensorType(dtypes.float32, (64, h, w)))
    store = Store(out, 64 * w * y + 64 * x + c, Const(dtypes.float32, bytes(4)))
    assert [s.key for s, _ in ordered(loops, [Phase(loops, [], [store])], {})] == [loops[k][0].key for k in (1, 2, 0)]


def test_convolutions_of_open_images_have_tiles_for_some() -> None:
    n, h = Sym("n", 1), Sym("h", 1)
    facts = Facts(n * h, 512, 512, 1, dtypes.float16, False, turns=9, unknown=UNKNOWN)
    found = for_few_rows(facts)
    assert [most for _, most in found] == sorted(most for _, most in found)
    assert found[-1][1] >= FEW_PLACES[0] and len({blocks for blocks, _ in found}) == len(found)


@needs_triton
def test_the_first_of_equal_elements_where_loops_are_divided(simulator: Simulator) -> None:
    """What is read in the order of memory has its positions in another one."""
    made = model("""g (float[N, 12, C] x) => (int64[N] y) <int64[2] rows = {0, -1}> {
        t = Transpose <perm = [0, 2, 1]> (x)  r = Reshape (t, rows)  y = ArgMax <axis = 1, keepdims = 0> (r)
    }""")
    x = rng.integers(0, 3, (4, 12, 40)).astype(np.float32)
    answer = simulator.run(made, [x], tile={"points": 2, "turns": 16})
    np.testing.assert_array_equal(answer.outputs[0], expected(made, {"x": x}))


@needs_triton
def test_numbers_beyond_32_bits_that_no_buffer_has(simulator: Simulator) -> None:
    """A slice's end beyond its tensor's: of two sizes the lesser one, of which the other overflows."""
    made = model("""g (float[N] x, float[M] z) => (float[P] y) <int64[1] from = {0}, int64[1] large = {1048576}> {
        s = Shape (z)  to = Mul (s, large)  t = Slice (x, from, to)  y = Neg (t)
    }""")
    x = floats(7)
    np.testing.assert_array_equal(simulator.run(made, [x, floats(4096)]).outputs[0], -x)
