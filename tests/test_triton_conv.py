"""Convolutions on the GPU target: kernels in Triton's interpreter against float64, and machine code of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnxc
from onnxc.codegen.triton import conv_tiles, cubin, product_tiles, strips
from onnxc.codegen.triton.product_tiles import Facts
from onnxc.codegen.triton.strips import Windows
from onnxc.ir import dtypes
from tests.targets import needs_triton
from tests.triton_simulator import Answer, Request, Simulator, program_of

Array = np.ndarray[Any, Any]

pytestmark = needs_triton
rng = np.random.default_rng(7)
KINDS: dict[str, tuple[int, Any, float]] = {
    "float32": (TensorProto.FLOAT, np.float32, 2e-6), "float16": (TensorProto.FLOAT16, np.float16, 1e-3),
    "bfloat16": (TensorProto.BFLOAT16, ml_dtypes.bfloat16, 8e-3),
}  # fmt: skip


@dataclass(frozen=True)
class Conv:
    """One convolution."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    strides: Sequence[int] = ()
    pads: Sequence[int] = ()
    dilations: Sequence[int] = ()
    group: int = 1
    kind: str = "float32"
    constant: bool = True
    dynamic: Sequence[int] = ()  # axes of x that have names instead of sizes
    nodes: Sequence[str] = field(default=())  # "y = Relu(c)" and the like, which come after

    def __str__(self) -> str:
        shapes = "-".join("x".join(map(str, s)) for s in (self.x, self.w))
        return f"{shapes}-g{self.group}-s{self.strides}-p{self.pads}-d{self.dilations}-{self.kind}".replace(" ", "")

    def arrays(self) -> tuple[Array, Array]:
        """An image and weights, of results near 1."""
        x, w = rng.standard_normal(self.x), rng.standard_normal(self.w) / np.sqrt(np.prod(self.w[1:]))
        return x.astype(KINDS[self.kind][1]), w.astype(KINDS[self.kind][1])

    def model(self, w: Array) -> onnx.ModelProto:
        """A graph of it and of what comes after."""
        kind = KINDS[self.kind][0]
        names = {"strides": self.strides, "pads": self.pads, "dilations": self.dilations}
        attrs: dict[str, Any] = {k: list(v) for k, v in names.items() if v}
        nodes = [helper.make_node("Conv", ["x", "w"], ["c" if self.nodes else "y"], group=self.group, **attrs)]
        nodes += [onnx.parser.parse_node(n) for n in self.nodes]
        weights = onnx.TensorProto(name="w", data_type=kind, dims=self.w, raw_data=w.tobytes())
        shape = [f"d{k}" if k in self.dynamic else d for k, d in enumerate(self.x)]
        inputs = [helper.make_tensor_value_info("x", kind, shape)]
        inputs += [] if self.constant else [helper.make_tensor_value_info("w", kind, self.w)]
        outputs = [helper.make_tensor_value_info("y", kind, [None] * len(self.x))]
        graph = helper.make_graph(nodes, "g", inputs, outputs, [weights] if self.constant else [])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)

    def wanted(self, x: Array, w: Array) -> Array:
        """The convolution in float64, a tap at a time."""
        rank = len(self.x) - 2
        pads = self.pads or (0,) * 2 * rank
        strides, dilations = self.strides or (1,) * rank, self.dilations or (1,) * rank
        padded = np.pad(x.astype(np.float64), [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)])
        each = self.w[0] // self.group
        spans = [(k - 1) * d for k, d in zip(self.w[2:], dilations, strict=True)]
        sizes = [(n - s - 1) // t + 1 for n, s, t in zip(padded.shape[2:], spans, strides, strict=True)]
        y = np.zeros((self.x[0], self.w[0], *sizes))
        for tap in itertools.product(*map(range, self.w[2:])):
            part = [slice(None), slice(None)]
            rows = zip(tap, dilations, strides, sizes, strict=True)
            part += [slice(k * d, k * d + (n - 1) * t + 1, t) for k, d, t, n in rows]
            seen = padded[tuple(part)].reshape(self.x[0], self.group, self.w[1], -1)
            weights = np.moveaxis(w.astype(np.float64), (0, 1), (-2, -1))[tap].reshape(self.group, each, self.w[1])
            y += np.einsum("ngcs,goc->ngos", seen, weights).reshape(y.shape)
        return y


def check(simulator: Simulator, conv: Conv, **options: Any) -> Answer:
    """The kernels' answer is the convolution in float64, to the dtype's digits."""
    x, w = conv.arrays()
    inputs = [x] if conv.constant else [x, w]
    answer = simulator.run(conv.model(w).SerializeToString(), inputs, **options)
    assert answer.error[0] == 0 and "conv" in answer.kinds
    (y,) = answer.outputs
    wanted = conv.wanted(x, w)
    if conv.nodes:
        wanted = np.maximum(wanted, 0)
    assert y.shape == wanted.shape and y.dtype == x.dtype
    tolerance = KINDS[conv.kind][2]
    np.testing.assert_allclose(y.astype(np.float64), wanted, tolerance, 4 * tolerance)
    return answer


# ---------------------------------------------------------------- depthwise

DEPTHWISE = [
    Conv((1, 1, 1, 1), (1, 1, 1, 1)),
    Conv((2, 7, 17, 13), (7, 1, 3, 3), pads=(1, 1, 1, 1), group=7),
    Conv((1, 17, 7, 7), (17, 1, 7, 7), pads=(3, 3, 3, 3), group=17),
    Conv((2, 24, 14, 14), (24, 1, 5, 5), strides=(2, 2), pads=(2, 2, 2, 2), group=24),
    Conv((1, 40, 9, 31), (40, 1, 5, 7), (2, 3), (2, 3, 1, 0), (2, 1), 40),
    Conv((1, 5, 11, 23), (5, 1, 3, 4), (1, 2), (0, 1, 2, 3), (3, 2), 5),
    Conv((1, 6, 9, 9), (12, 1, 3, 3), group=6),
    Conv((1, 8, 5, 6), (24, 1, 2, 2), group=8),
    Conv((2, 9, 31), (27, 1, 5), (3,), (2, 2), group=9),
    Conv((1, 16, 101), (16, 1, 31), pads=(30, 0), group=16),
    Conv((1, 3, 200), (3, 1, 61), pads=(30, 30), group=3),
    Conv((1, 5, 6, 7, 8), (5, 1, 3, 3, 3), pads=(1,) * 6, group=5),
    Conv((1, 4, 5, 9, 8), (8, 1, 3, 1, 2), (2, 2, 1), (1, 0, 0, 1, 0, 1), (1, 1, 3), 4),
    Conv((1, 136, 5, 5), (136, 1, 3, 3), pads=(2, 2, 0, 0), group=136),
    Conv((3, 1, 9, 9), (4, 1, 3, 3), pads=(1, 1, 1, 1)),
    Conv((1, 32, 9, 15), (32, 4, 3, 3), pads=(1, 1, 1, 1), group=8),
    Conv((2, 9, 7, 11), (15, 3, 1, 3), (1, 2), (0, 1, 0, 0), (1, 2), 3),
    Conv((1, 4, 70), (6, 2, 61), pads=(60, 0), group=2),
]


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("conv", DEPTHWISE, ids=str)
def test_depthwise(simulator: Simulator, conv: Conv, constant: bool) -> None:
    answer = check(simulator, Conv(**{**conv.__dict__, "constant": constant}))
    assert "acc0" in answer.source and "tl.dot" not in answer.source


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("conv", [*DEPTHWISE[1:6], DEPTHWISE[-3]], ids=str)
def test_depthwise_of_halves(simulator: Simulator, conv: Conv, kind: str) -> None:
    check(simulator, Conv(**{**conv.__dict__, "kind": kind}))


@pytest.mark.parametrize("dynamic", [(0,), (2, 3), (0, 2, 3)])
@pytest.mark.parametrize("wide", [False, True])
def test_depthwise_of_open_sizes(simulator: Simulator, dynamic: Sequence[int], wide: bool) -> None:
    check(simulator, Conv((3, 7, 13, 17), (7, 1, 3, 5), (1, 2), (1, 2, 1, 2), (1, 1), 7, dynamic=dynamic), wide=wide)


@pytest.mark.parametrize("candidate", range(1, strips.COUNT))
def test_each_candidate_of_strips(simulator: Simulator, candidate: int) -> None:
    check(simulator, Conv((2, 20, 9, 15), (20, 1, 3, 3), pads=(1, 1, 1, 1), group=20), candidate=candidate)
    check(simulator, Conv((1, 12, 8, 17), (12, 1, 2, 3), (1, 2), group=12, kind="float16"), candidate=candidate)


@pytest.mark.parametrize("dynamic", [(), (0,)])
def test_what_comes_after_a_depthwise_convolution(simulator: Simulator, dynamic: Sequence[int]) -> None:
    nodes = ["y = Relu(c)"]
    conv = Conv((2, 10, 7, 11), (10, 1, 3, 3), pads=(1, 1, 1, 1), group=10, dynamic=dynamic, nodes=nodes)
    assert check(simulator, conv).kinds.count("conv") == 1


def test_a_residual_and_a_bias_are_part_of_the_kernel(simulator: Simulator) -> None:
    text = """<ir_version: 10, opset_import: ["" : 18]>
    g (float16[2,24,9,9] x, float16[24,24,1,1] v, float16[24,1,5,5] w, float16[24] b) => (float16[2,24,9,9] z) {
      u = Conv(x, v) c = Conv<group = 24, pads = [2, 2, 2, 2]>(u, w, b) r = HardSwish(c) s = Add(u, r)
      z = Conv(s, v) }"""
    arrays = [rng.standard_normal(s) / d for s, d in (((2, 24, 9, 9), 1), ((24, 24, 1, 1), 5), ((24, 1, 5, 5), 5))]
    x, v, w = (a.astype(np.float16) for a in arrays)
    b = rng.standard_normal(24).astype(np.float16)
    answer = simulator.run(onnx.parser.parse_model(text).SerializeToString(), [x, v, w, b])
    assert [k for k in answer.kinds if k != "loops"] == ["conv"] * 3
    one, deep = Conv(x.shape, v.shape), Conv(x.shape, w.shape, pads=(2, 2, 2, 2), group=24)
    u = one.wanted(x, v)
    c = deep.wanted(u.astype(np.float16), w) + b[:, None, None]
    s = u + c * np.clip(c / 6 + 0.5, 0, 1)
    np.testing.assert_allclose(answer.outputs[0].astype(np.float64), one.wanted(s.astype(np.float16), v), 5e-3, 1e-2)


def test_what_lies_outside_of_a_window_has_no_part(simulator: Simulator) -> None:
    """Infinities and NaN reach the outputs whose windows have them, and no others."""
    conv = Conv((1, 3, 9, 12), (3, 1, 3, 3), pads=(1, 1, 1, 1), group=3)
    x, w = conv.arrays()
    x[0, 0, 4, 5], x[0, 1, 0, 0], x[0, 2, 8, 11] = np.nan, np.inf, -np.inf
    (y,) = simulator.run(conv.model(w).SerializeToString(), [x]).outputs
    reached = np.zeros(x.shape, bool)
    reached[0, 0, 3:6, 4:7] = reached[0, 1, :2, :2] = reached[0, 2, 7:, 10:] = True
    np.testing.assert_array_equal(np.isfinite(y), ~reached)
    assert np.isnan(y[0, 0, 3:6, 4:7]).all() and np.isinf(y[0, 1, :2, :2]).all()


# ---------------------------------------------------------------- implicit products

PRODUCTS = [
    Conv((3, 48, 7, 11), (40, 48, 1, 1), strides=(2, 2)),
    Conv((1, 17, 9, 9), (23, 17, 1, 1)),
    Conv((1, 33, 7, 5), (20, 33, 3, 3), (2, 1), (1, 0, 2, 1), (1, 2)),
    Conv((1, 3, 19, 17), (17, 3, 7, 7), strides=(2, 2), pads=(3, 3, 3, 3)),
    Conv((2, 3, 32, 16), (24, 3, 8, 8), strides=(8, 8)),
    Conv((1, 1, 19, 23), (32, 1, 5, 3), pads=(2, 1, 2, 1)),
    Conv((1, 48, 7, 11), (96, 12, 3, 3), pads=(1, 1, 1, 1), group=4),
    Conv((1, 32, 9, 7), (64, 8, 3, 3), pads=(1, 1, 1, 1), group=4),
    Conv((1, 60, 5, 5), (30, 20, 1, 1), group=3),
    Conv((2, 18, 40), (9, 18, 4), (3,), (1, 2), (2,)),
    Conv((1, 4, 6, 7, 8), (6, 4, 3, 3, 3), pads=(1,) * 6),
    Conv((1, 20, 4, 5, 6), (7, 20, 2, 1, 3), (1, 2, 1), (0, 0, 1, 1, 0, 1)),
    Conv((1, 200, 3, 3), (5, 200, 3, 3), pads=(1, 1, 1, 1)),
]


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("conv", PRODUCTS, ids=str)
def test_products(simulator: Simulator, conv: Conv, constant: bool) -> None:
    assert "tl.dot" in check(simulator, Conv(**{**conv.__dict__, "constant": constant})).source


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("conv", PRODUCTS[::2], ids=str)
def test_products_of_halves(simulator: Simulator, conv: Conv, kind: str) -> None:
    check(simulator, Conv(**{**conv.__dict__, "kind": kind}))


@pytest.mark.parametrize("dynamic", [(0,), (2, 3)])
@pytest.mark.parametrize("channels", [3, 20])
@pytest.mark.parametrize("wide", [False, True])
def test_products_of_open_sizes(simulator: Simulator, channels: int, dynamic: Sequence[int], wide: bool) -> None:
    conv = Conv((2, channels, 9, 14), (11, channels, 3, 3), (2, 1), (1, 1, 1, 1), dynamic=dynamic)
    check(simulator, conv, wide=wide)


@pytest.mark.parametrize("candidate", range(1, product_tiles.CANDIDATES))
def test_each_candidate_of_tiles(simulator: Simulator, candidate: int) -> None:
    for kind in ("float32", "float16"):
        check(simulator, Conv((1, 40, 9, 9), (70, 40, 3, 3), pads=(1, 1, 1, 1), kind=kind), candidate=candidate)
        check(simulator, Conv((1, 3, 17, 17), (24, 3, 3, 3), (2, 2), kind=kind), candidate=candidate)


# ---------------------------------------------------------------- choices


def test_candidates_of_strips() -> None:
    for channels, rows, width, kernel in itertools.product(
        (1, 17, 72, 96, 130, 1021), (None, 1, 7, 1792), (None, 1, 56), ((3,), (7, 7), (1, 1, 1), (3, 200))
    ):
        found = strips.candidates(Windows(channels, rows, width, kernel))
        assert 0 < len(found) <= strips.COUNT and len(set(found)) == len(found)
    (few,) = strips.candidates(Windows(64, 7, 7, (3, 3)))[:1]
    (many,) = strips.candidates(Windows(64, 32 * 112, 112, (3, 3)))[:1]
    assert few.lanes * few.run < many.lanes * many.run


def test_candidates_of_tiles() -> None:
    for rows, outputs, channels, exact in itertools.product((1, 49, 100352), (5, 64, 2048), (16, 100, 512), (0, 1)):
        dtype = dtypes.float32 if exact else dtypes.float16
        found = conv_tiles.candidates(Facts(rows, outputs, channels, 1, dtype, bool(exact), turns=9))
        assert len(set(found)) == len(found)
    few = conv_tiles.candidates(Facts(49, 512, 512, 1, dtypes.float16, False, turns=9))[0]
    many = conv_tiles.candidates(Facts(100352, 256, 64, 1, dtypes.float16, False))[0]
    assert few.m == 16 and many.m * many.n >= 64 * 128


# ---------------------------------------------------------------- machine code

COMPILED = [
    Conv((4, 96, 28, 28), (96, 1, 7, 7), pads=(3, 3, 3, 3), group=96, kind="float16"),
    Conv((4, 64, 28, 28), (64, 1, 3, 3), strides=(2, 2), pads=(1, 1, 1, 1), group=64, kind="bfloat16"),
    Conv((2, 10, 9, 50), (20, 1, 3, 3), (1, 3), (1, 1, 1, 1), (1, 2), 10),
    Conv((2, 3, 64, 64), (32, 3, 7, 7), strides=(2, 2), pads=(3, 3, 3, 3), kind="float16"),
    Conv((2, 64, 14, 14), (64, 64, 3, 3), pads=(1, 1, 1, 1), kind="float16", dynamic=(0,)),
    Conv((2, 32, 14, 14), (32, 4, 3, 3), pads=(1, 1, 1, 1), group=8, kind="float16"),
    Conv((1, 64, 56, 56), (64, 64, 3, 3), pads=(1, 1, 1, 1), kind="float16"),
    Conv((2, 3, 64, 64), (64, 3, 16, 16), strides=(16, 16), kind="float16"),
    Conv((0, 16, 9, 9), (32, 16, 3, 3), kind="float16", dynamic=(2, 3)),
]


@pytest.mark.parametrize("conv", COMPILED, ids=str)
def test_machine_code(conv: Conv) -> None:
    model = onnxc.compile(conv.model(conv.arrays()[1]), target="cuda:sm_80,sm_90,sm_100", cache=False)
    assert {k.kind for k in model.explain().kernels} <= {"conv", "loops"}
    assert set(model.manifest["cuda"]["images"]) == {"sm_80", "sm_90a", "sm_100a"}


@pytest.mark.parametrize("conv", COMPILED, ids=str)
def test_indices_need_more_than_16_bits(conv: Conv) -> None:
    """In 16 bits two share a register, and ptxas makes wrong sums of them where a loop is unrolled."""
    from triton import compile as compile_triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    _, program = program_of(Request(conv.model(conv.arrays()[1]).SerializeToString(), []))
    for step in program.steps:
        if program.calls[step.call].kind != "conv":
            continue
        function = program.functions[step.kernel]
        kernel = cubin.load(program.source)[function.name]
        options = {"num_warps": function.warps, "num_stages": function.stages, "enable_fp_fusion": True}
        source = ASTSource(kernel, dict(function.parameters), {}, {})
        text = compile_triton(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        assert not re.search(r"(add|sub|min|max)\.[su]16x2", text)
