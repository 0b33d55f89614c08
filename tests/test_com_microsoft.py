"""onnxruntime's contrib operators, over their attributes and optional inputs, against onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import ml_dtypes
import numpy as np
import onnx.parser
import onnxruntime as ort
import pytest

import onnxc
from onnxc.errors import ModelError, OnnxcError, RunError
from onnxc.frontends.onnx_file import load
from onnxc.passes.decompose import decompose
from tests.ops_harness import Case, build, check, compare, expected, feeds
from tests.targets import evaluate

pytestmark = pytest.mark.every_target
rng = np.random.default_rng()
F = np.float32
U = np.uint8
I8 = np.int8


def draw_for(name: str) -> None:
    """What is drawn from here on depends on the name of its test or case, not on what was drawn before."""
    rng.bit_generator.state = np.random.default_rng(list(name.encode())).bit_generator.state


@pytest.fixture(autouse=True)
def own_draws(request: pytest.FixtureRequest) -> None:
    draw_for(request.node.name)


def f32(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(F)


def pos(*shape: int) -> np.ndarray:
    return (np.abs(rng.standard_normal(shape)) + 0.1).astype(F)


def u8(*shape: int) -> np.ndarray:
    return rng.integers(0, 256, shape).astype(U)


def s8(*shape: int) -> np.ndarray:
    return rng.integers(-127, 128, shape).astype(I8)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def bits(*shape: int) -> np.ndarray:
    return rng.integers(0, 2, shape).astype(np.int32)


def ms(name: str, inputs: Sequence[Any], attrs: dict[str, Any] | None = None, **more: Any) -> Case:
    return Case(name, inputs, attrs or {}, domain="com.microsoft", **more)


def fixed(name: str, inputs: Sequence[Any], attrs: dict[str, Any] | None = None, **more: Any) -> Case:
    """A case whose sizes are known at compile time."""
    return ms(name, inputs, attrs, dynamic=False, **more)


# ---------------------------------------------------------------- attention


def attentions() -> Iterator[Case]:
    x, w, bias = f32(2, 3, 8), f32(8, 24), f32(24)
    past = f32(2, 2, 2, 5, 4)
    for causal in (0, 1):
        attrs = {"num_heads": 2, "unidirectional": causal}
        for mask in (None, i32(2, 3), i32(2, 3, 1, 0), bits(2, 3), bits(2, 3, 3)):
            yield fixed("Attention", [x, w, bias, mask], attrs)
        yield fixed("Attention", [x, w, bias, bits(2, 3), None, f32(1, 2, 3, 3)], attrs)
        for mask in (None, i32(7, 6), bits(2, 8)):
            yield fixed("Attention", [x, w, bias, mask, past], attrs, outputs=2)
    yield fixed("Attention", [x, w, bias, bits(2, 3)], {"num_heads": 2, "mask_filter_value": -3.0})
    sizes = {"num_heads": 2, "qkv_hidden_sizes": [8, 8, 12]}
    yield fixed("Attention", [x, f32(8, 28), f32(28)], sizes)
    yield ms("Attention", [x, w, bias], {"num_heads": 2, "scale": 0.3}, keep=(8, 24))


def multi_head_attentions() -> Iterator[Case]:
    def mha(inputs: Sequence[Any], attrs: dict[str, Any] | None = None, **more: Any) -> Case:
        return Case(
            "MultiHeadAttention",
            inputs,
            {"num_heads": 2, **(attrs or {})},
            domain="com.microsoft",
            **{"dynamic": False, **more},
        )

    q, k, v = f32(2, 3, 8), f32(2, 5, 8), f32(2, 5, 12)
    yield mha([q, k, v])
    yield mha([q, k, v, f32(28)])
    yield mha([q, k, v, f32(28), None, f32(1, 2, 3, 5)], keep=(8, 12, 28, 2, 1), dynamic=True)
    for mask in (i32(2, 5), i32(2, 5, 0, 3, 6, 0, 2, 7), bits(2, 5), bits(2, 3, 5)):
        yield mha([q, k, v, None, mask])
    yield mha([q, f32(2, 2, 5, 4), f32(2, 2, 5, 4)])
    yield mha([q, k, v], {"unidirectional": 1})
    yield mha([f32(2, 6, 8), k, v], {"unidirectional": 1})
    yield mha([q, q, q, None, bits(2, 3)], {"unidirectional": 1, "mask_filter_value": -2.0})
    cache = [f32(2, 2, 4, 4), f32(2, 2, 4, 4)]
    same = [f32(2, 3, 8) for _ in range(3)]
    yield mha([*same, None, None, None, *cache], outputs=3)
    bias = f32(1, 1, 3, 7)
    yield mha([*same, None, bits(2, 7), bias, *cache], {"unidirectional": 1}, outputs=3)
    one = [f32(2, 1, 8) for _ in range(3)]
    long = [f32(2, 2, 9, 4), f32(2, 2, 9, 4)]
    yield mha([*one, None, None, None, *long, i32(4)], outputs=3)
    yield mha([*same, None, None, None, *long, i32(4)], {"unidirectional": 1}, outputs=3)
    shared = {"num_heads": 2, "past_present_share_buffer": 1}
    for mask, bias5, projection in ((None, None, None), (bits(2, 5), None, None), (None, f32(1, 2, 1, 5), f32(24))):
        inputs = [*one, mask, bias5, *long, i32(4), None, None, projection]
        yield fixed("DecoderMaskedMultiHeadAttention", inputs, shared, outputs=3)
    yield fixed("DecoderMaskedMultiHeadAttention", [one[0], f32(2, 2, 6, 4), f32(2, 2, 6, 4)], {"num_heads": 2})
    beams = [f32(4, 1, 8) for _ in range(3)], [f32(4, 2, 9, 4), f32(4, 2, 9, 4)], bits(2, 2, 9)
    yield mha([*beams[0], None, None, None, *beams[1], i32(4), beams[2]], outputs=3)
    yield mha([*beams[0], None, bits(4, 5), f32(1, 2, 1, 5), *beams[1], i32(4), beams[2]], outputs=3)
    inputs = [*beams[0], None, None, *beams[1], i32(4), i32(2), beams[2], f32(24)]
    yield fixed("DecoderMaskedMultiHeadAttention", inputs, shared, outputs=3)
    cross = [one[0], f32(2, 2, 6, 4), f32(2, 2, 6, 4), None, None, None, None, None, i32(4), bits(1, 2, 9)]
    yield mha(cross)


def grouped_queries() -> Iterator[Case]:
    """Four heads of queries, two of keys, of 16 elements each."""

    def gqa(
        batch: int, new: int, total: int, lengths: Sequence[int], cache: int | None = None, packed: bool = False,
        rotary: bool = False, more: Sequence[Any] = (), outputs: int = 3, dynamic: bool = False, **attrs: Any,
    ) -> Case:  # fmt: skip
        inputs: list[Any] = [f32(batch, new, 64), f32(batch, new, 32), f32(batch, new, 32)]
        if packed:
            inputs = [f32(batch, new, 128), None, None]
        inputs += [None, None] if cache is None else [f32(batch, 2, cache, 16), f32(batch, 2, cache, 16)]
        inputs += [i32(*lengths), i32(total)]
        inputs += [f32(20, 8), f32(20, 8)] if rotary else [None, None]
        inputs += more
        given = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": int(rotary), **attrs}
        keep = (2, 4, 8, 16, 32, 64, 128)
        return ms("GroupQueryAttention", inputs, given, const=[6], outputs=outputs, dynamic=dynamic, keep=keep)

    yield gqa(2, 5, 5, [4, 4])
    yield gqa(2, 5, 5, [4, 4], cache=0)
    for packed in (False, True):
        yield gqa(2, 5, 5, [4, 4], rotary=True, packed=packed)
    yield gqa(2, 5, 5, [4, 4], rotary=True, rotary_interleaved=1)
    yield gqa(2, 5, 5, [4, 4], cache=16, rotary=True)
    yield gqa(2, 1, 7, [6, 6], cache=6, rotary=True, dynamic=True)
    yield gqa(2, 1, 7, [6, 3], cache=6, rotary=True)
    yield gqa(2, 1, 7, [6, 3], cache=12, rotary=True, packed=True)
    yield gqa(1, 3, 9, [8], cache=6, rotary=True, dynamic=True)
    yield gqa(1, 3, 9, [8], cache=16, rotary=True)
    yield gqa(2, 7, 7, [6, 6], local_window_size=3)
    yield gqa(2, 1, 9, [8, 5], cache=8, local_window_size=3)
    yield gqa(2, 7, 7, [6, 6], softcap=1.5, scale=0.9)
    yield gqa(2, 7, 7, [6, 6], smooth_softmax=1)
    yield gqa(2, 7, 7, [6, 6], more=[None, f32(2, 1, 7, 7)])
    yield gqa(2, 7, 7, [6, 6], more=[None, f32(1, 4, 7, 7)], softcap=0.5)
    yield gqa(2, 1, 9, [8, 8], cache=12, more=[None, f32(1, 4, 1, 9)])
    yield gqa(2, 7, 7, [6, 6], more=[None, None, f32(4)])
    yield gqa(2, 5, 5, [4, 4], rotary=True, more=[np.array([[3, 4, 5, 6, 7], [0, 1, 2, 3, 4]])])
    yield gqa(2, 1, 7, [6, 6], cache=6, rotary=True, more=[np.array([[3], [9]])])
    yield gqa(2, 5, 5, [4, 4], outputs=4, qk_output=1)
    yield gqa(2, 5, 5, [4, 4], outputs=4, qk_output=2, softcap=1.0)
    yield gqa(2, 5, 5, [4, 4], causal=0)
    yield gqa(1, 2, 6, [5], cache=4, causal=0)
    padded = (2, 9, 9, [8, 3])  # the second row has five tokens of padding
    for attrs in ({}, {"local_window_size": 3}, {"softcap": 2.0, "local_window_size": 3}, {"smooth_softmax": 1}):
        yield gqa(*padded, rotary=True, **attrs)
        yield gqa(*padded, cache=12, outputs=4, qk_output=2, **attrs)
    yield gqa(*padded, local_window_size=3, more=[None, None, f32(4)])


def rotaries() -> Iterator[Case]:
    cos, sin, at = f32(10, 4), f32(10, 4), rng.integers(0, 10, (2, 4))
    for interleaved in (0, 1):
        attrs = {"interleaved": interleaved}
        yield fixed("RotaryEmbedding", [f32(2, 3, 4, 8), at, cos, sin], attrs)
        partly = {**attrs, "num_heads": 3, "rotary_embedding_dim": 4}
        yield fixed("RotaryEmbedding", [f32(2, 4, 24), at, f32(10, 2), f32(10, 2)], partly)
    yield fixed("RotaryEmbedding", [f32(2, 3, 4, 8), at, cos, sin], {"scale": 0.5})
    for layout, section in ((0, [2, 1, 1]), (1, [2, 1, 1]), (1, [4, 2, 2]), (0, [3, 0, 0])):
        half = sum(section)
        inputs = [f32(2, 3, 4, 2 * half), rng.integers(0, 10, (3, 2, 4)), f32(10, half), f32(10, half)]
        yield fixed("MRotaryEmbedding", inputs, {"mrope_layout": layout, "mrope_section": section})


# ---------------------------------------------------------------- fused nodes


def activations() -> Iterator[Case]:
    conv = [f32(1, 2, 5, 5), f32(3, 2, 3, 3), f32(3)]
    chosen: dict[str, list[float]] = {
        "Relu": [], "Tanh": [], "Sigmoid": [], "LeakyRelu": [0.2], "Clip": [-0.3, 0.4], "HardSigmoid": [0.3, 0.6],
        "HardSwish": [],
    }  # fmt: skip
    for name, parameters in chosen.items():
        attrs = {"activation": name, **({"activation_params": parameters} if parameters else {})}
        yield ms("FusedConv", conv, attrs, keep=(1, 2, 3))
    yield ms("FusedConv", [*conv, f32(1, 3, 3, 3)], {"activation": "Relu"}, keep=(1, 2, 3))
    factors = {"activation_alpha": 0.3, "activation_beta": 0.7, "activation_gamma": 1.1}
    for name in (
        "Relu", "Tanh", "Sigmoid", "LeakyRelu", "HardSigmoid", "Elu", "Softplus", "Softsign", "ThresholdedRelu",
        "ScaledTanh", "Selu", "ParametricSoftplus", "Celu",
    ):  # fmt: skip
        attrs = {"activation": name, **factors, "transB": 1, "alpha": 0.5, "beta": 2.0}
        yield ms("FusedGemm", [f32(3, 4), f32(5, 4), f32(5)], attrs)
    x = f32(2, 3, 8)
    yield ms("Gelu", [x])
    yield ms("BiasGelu", [x, f32(8)])
    yield ms("FastGelu", [x], atol=1e-5)
    yield ms("FastGelu", [x, f32(8)], atol=1e-5)
    yield ms("QuickGelu", [x], {"alpha": 1.3})
    yield ms("ScaledSiLU", [x], {"alpha": 0.7})
    yield ms("ScaledSiLU", [x, F(0.3)])
    yield ms("GatedAdd", [x, f32(2, 3, 8), f32(2, 3, 1)])
    yield ms("LinearAttentionGate", [f32(2, 3, 4), f32(4), f32(4), f32(2, 3, 4)], outputs=2)


def products() -> Iterator[Case]:
    rows, inner, columns, batch = 3, 4, 5, 2

    def side(shape: tuple[int, int], transposed: bool, batched: bool) -> np.ndarray:
        a, b = shape[::-1] if transposed else shape
        return f32(a, batch, b) if batched else f32(batch, a, b)

    for attrs in (
        {"transA": 1}, {"transB": 1}, {"transBatchA": 1}, {"transBatchB": 1},
        {"transA": 1, "transB": 1, "transBatchA": 1, "transBatchB": 1, "alpha": 0.3},
    ):  # fmt: skip
        x = side((rows, inner), "transA" in attrs, "transBatchA" in attrs)
        y = side((inner, columns), "transB" in attrs, "transBatchB" in attrs)
        yield ms("FusedMatMul", [x, y], attrs)
    yield ms("FusedMatMul", [f32(4), f32(4, 5)], {"alpha": 2.0})
    yield ms("FusedMatMul", [f32(4), f32(4, 5)], {"transA": 1})
    words = [rng.integers(-3000, 3000, s).astype(np.int16) for s in ((3, 7), (7, 5))]
    yield ms("MatMulInteger16", words)
    yield ms("CDist", [f32(4, 7), f32(5, 7)], rtol=1e-4)
    yield ms("CDist", [f32(4, 7), f32(5, 7)], {"metric": "euclidean"}, rtol=1e-4)


def norms() -> Iterator[Case]:
    x, gamma, beta = f32(2, 3, 8), f32(8), f32(8)
    yield Case("SimplifiedLayerNormalization", [x, gamma], {"epsilon": 1e-5})
    yield ms("SkipLayerNormalization", [x, f32(2, 3, 8), gamma], {"epsilon": 1e-3})
    for skip in (f32(1, 3, 8), f32(3, 8)):
        yield ms("SkipLayerNormalization", [x, skip, gamma, beta])
        yield ms("SkipSimplifiedLayerNormalization", [x, skip, gamma])
    yield ms("SkipLayerNormalization", [f32(3, 8), f32(3, 8), gamma, beta, f32(8)])
    for name in ("silu", "swish", "sigmoid"):
        yield ms("GatedRMSNorm", [x, f32(4), f32(2, 3, 8)], {"activation": name}, keep=(4, 8))
    for scale in (None, f32(8), f32(3, 8)):
        yield fixed("BranchwiseRMSNorm", [x, scale])
    for scale in (f32(12), f32(4)):
        yield fixed("BranchwiseRMSNorm", [f32(2, 12), scale], {"num_branches": 3})
    ids = rng.integers(0, 7, (2, 3)).astype(np.int32)
    tables = [u8(9, 8), u8(7, 8), u8(9, 8), u8(8), u8(8)]
    scales, zeros = [F(s) for s in (0.1, 0.2, 0.3, 0.1, 0.1)], [U(z) for z in (3, 120, 7, 1, 2)]
    mask = np.array([[1, 1, 0], [1, 1, 1]], np.int32)
    inputs = [ids, ids, *tables, mask, *scales, *zeros]
    yield ms("QEmbedLayerNormalization", inputs, outputs=2, rtol=1e-4, atol=1e-5)


def moved() -> Iterator[Case]:
    x = f32(2, 4, 5)
    yield ms("Trilu", [x, np.int64(1)], {"upper": 0})
    yield ms("Pad", [f32(3, 4), np.array([[1, 0, 2, 1]]), F(3)], const=[1])
    yield ms("Pad", [f32(3, 4), np.array([1, 0, 2, 1])], {"mode": "reflect"}, const=[1])
    yield ms("ExpandDims", [x, np.int32(-1)], const=[1])
    yield ms("GatherND", [x, np.array([[0, 1], [1, 2]])], keep=(2,))
    yield ms("GridSample", [f32(1, 2, 4, 5), f32(1, 3, 3, 2) * F(0.5)], {"mode": "bilinear"}, keep=(2,), atol=1e-5)
    yield ms("Range", [np.int32(2), np.int32(11), np.int32(3)], const=[0, 1, 2])
    yield ms("Range", [F(2), F(5)], const=[0, 1])
    for dim, size, step in ((-1, 3, 1), (1, 2, 2), (0, 1, 1)):
        yield ms("UnfoldTensor", [f32(2, 5, 7)], {"dim": dim, "size": size, "step": step})


# ---------------------------------------------------------------- quantized


def quantized_attention() -> Iterator[Case]:
    close = {"rtol": 1e-4, "atol": 1e-5}
    x, heads = u8(2, 3, 8), {"num_heads": 2}
    yield fixed("QAttention", [x, u8(8, 24), f32(24), F(0.02), F(0.03), None, U(120), U(130)], heads, **close)
    columns = [s8(8, 24), f32(24), F(0.02), pos(24) * F(0.03), i32(2, 3), U(120), np.zeros(24, I8)]
    yield fixed("QAttention", [x, *columns], {"num_heads": 2, "unidirectional": 1}, **close)
    cached = [x, s8(8, 24), f32(24), F(0.02), F(0.03), None, U(120), I8(3), f32(2, 2, 2, 5, 4)]
    yield fixed("QAttention", cached, heads, outputs=2, **close)


def recurrent() -> Iterator[Case]:
    """One sequence in the batch: with more, onnxruntime's answer depends on its number of threads."""

    def lstm(directions: int = 1, signed: bool = False, columns: bool = False, bias: bool = True, steps: int = 5,
             size: int = 3, hidden: int = 4, initial: bool = False, peephole: bool = False, lengths: Any = None,
             **attrs: Any) -> Case:  # fmt: skip
        gates = (directions, 4 * hidden)
        each = gates if columns else (directions,)
        weight = s8 if signed else u8

        def zeros() -> np.ndarray:
            return np.zeros(each, I8) if signed else rng.integers(100, 140, each).astype(U)

        state = [f32(directions, 1, hidden) if initial else None for _ in range(2)]
        inputs = [
            f32(steps, 1, size), weight(directions, size, 4 * hidden), weight(directions, hidden, 4 * hidden),
            f32(directions, 8 * hidden) if bias else None, lengths, *state,
            f32(directions, 3 * hidden) if peephole else None, pos(*each) * F(0.01), zeros(),
            pos(*each) * F(0.01), zeros(),
        ]  # fmt: skip
        if lengths is not None:
            inputs[0][-1] *= 30  # behind the sequence, whose range it must not widen
        const = [1, 2, 8, 9, 10, 11]
        given = {"hidden_size": hidden, **attrs}
        return fixed("DynamicQuantizeLSTM", inputs, given, outputs=3, const=const, rtol=1e-3, atol=1e-4)

    yield lstm()
    yield lstm(signed=True, columns=True, initial=True)
    yield lstm(directions=2, direction="bidirectional", initial=True)
    yield lstm(direction="reverse", peephole=True)
    yield lstm(bias=False, clip=0.5, input_forget=1)
    yield lstm(lengths=i32(3))
    yield lstm(directions=2, direction="bidirectional", lengths=i32(2))
    yield lstm(steps=17, size=7, hidden=16)


def images() -> Iterator[Case]:
    first, last = u8(1, 3, 6, 7), u8(1, 6, 7, 3)
    weights = [s8(4, 3, 3, 3), pos(4) * F(0.05), np.zeros(4, I8), F(0.6), U(128)]
    bias = rng.integers(-900, 900, 4).astype(np.int32)
    for channels_last, x in ((0, first), (1, last)):
        layout = {"channels_last": channels_last}
        yield fixed("QLinearConv", [x, F(0.02), U(100), *weights, bias], layout)
        yield fixed("QLinearConv", [x, F(0.02), U(100), *weights], {**layout, "strides": [2, 1], "pads": [1, 1, 0, 1]})
        for attrs in (
            {}, {"pads": [1, 1, 1, 1]}, {"pads": [1, 1, 1, 1], "count_include_pad": 1},
            {"strides": [2, 2], "ceil_mode": 1}, {"auto_pad": "SAME_UPPER"},
            {"strides": [2, 3], "pads": [1, 0, 0, 1], "ceil_mode": 1, "count_include_pad": 1},
        ):  # fmt: skip
            scales = [F(0.02), U(100), F(0.021), U(98)]
            yield fixed("QLinearAveragePool", [x, *scales], {"kernel_shape": [3, 2], **layout, **attrs})
        for scales in ([F(0.02), U(100), F(0.021), U(98)], [F(0.02), U(0), F(0.005), U(3)]):
            yield fixed("QLinearGlobalAveragePool", [x, *scales], layout)
        same = [F(0.02), U(100), F(0.02), U(99)]  # a quarter of the means of four lies half way between two integers
        yield fixed("QLinearAveragePool", [x, *same], {"kernel_shape": [2, 2], **layout})
        yield fixed("QLinearAveragePool", [x, *same], {"kernel_shape": [6, 7], **layout})
    yield fixed("QLinearAveragePool", [s8(1, 2, 9), F(0.02), I8(3), F(0.021), I8(-4)], {"kernel_shape": [3]})
    yield fixed("QLinearAveragePool", [u8(1, 2, 9), F(0.02), U(0), F(0.021)], {"kernel_shape": [3]})
    yield fixed("NhwcMaxPool", [last], {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], "strides": [2, 1]})
    spread = {"kernel_shape": [2, 2], "dilations": [2, 1], "ceil_mode": 1, "strides": [2, 2]}
    yield fixed("NhwcMaxPool", [s8(2, 6, 7, 3)], spread)


def pointwise() -> Iterator[Case]:
    x, y = [u8(2, 3, 5), F(0.02), U(100)], [u8(3, 1), F(0.03), U(90)]
    for name in ("QLinearAdd", "QLinearMul"):
        yield ms(name, [*x, *y, F(0.05), U(127)])
        yield ms(name, [s8(2, 3, 5), F(0.02), I8(10), s8(5), F(0.03), I8(0), F(0.05), I8(7)])
        yield ms(name, [u8(2, 3, 5), F(0.02), U(0), u8(5), F(0.03), U(0), F(0.05)])
        yield ms(name, [u8(37, 101), F(0.0213), U(100), u8(37, 101), F(0.0347), U(90), F(0.0519), U(127)])
        halves = [s8(37, 101), F(0.5), I8(9), s8(101), F(0.25), I8(-7), F(0.5), I8(5)]
        yield ms(name, halves)
    choice = np.array([[True], [False]])
    yield ms("QLinearWhere", [choice, u8(2, 5), F(0.02), U(100), u8(1, 5), F(0.03), U(90), F(0.05), U(127)])
    codes = np.arange(256).astype(U)
    yield ms("QLinearSigmoid", [codes, F(0.043), U(120), F(0.00390625), U(0)])
    yield ms("QLinearSigmoid", [codes.view(I8), F(0.043), I8(1), F(0.00390625), I8(-128)])
    yield ms("QLinearLeakyRelu", [codes, F(0.043), U(120), F(0.037), U(11)], {"alpha": 0.1})
    for opset in (12, 13):
        for axis in (0, 1, -1):
            inputs = [u8(2, 5, 7), F(0.1), U(100), F(1 / 256), U(0)]
            yield ms("QLinearSoftmax", inputs, {"axis": axis, "opset": opset})
    yield ms("QLinearSoftmax", [s8(2, 257), F(0.1), I8(0), F(1 / 256), I8(-128)], {"axis": -1, "opset": 13})
    tail = [u8(2, 3), F(0.02), U(100), u8(2, 4), F(0.07), U(90)]
    yield ms("QLinearConcat", [F(0.05), U(127), *tail], {"axis": 1})
    tail = [s8(3, 2), F(0.02), I8(0), s8(5, 2), F(0.07), I8(9)]
    yield ms("QLinearConcat", [F(0.05), I8(2), *tail], {"axis": -2})


def integer_products() -> Iterator[Case]:
    whole, weights = u8(3, 7), u8(7, 5)
    head = [whole, F(0.02), U(100), weights, F(0.03), U(120)]
    bias = rng.integers(-900, 900, 5).astype(np.int32)
    exact = {"rtol": 1e-5}
    yield fixed("QGemm", head, **exact)
    yield fixed("QGemm", [*head, bias], {"alpha": 1.5}, **exact)
    yield fixed("QGemm", [*head, rng.integers(-900, 900, (3, 5)).astype(np.int32)], **exact)
    yield fixed("QGemm", [*head, bias, F(0.1), U(128)])
    yield fixed("QGemm", [*head, None, F(0.1), U(3)], {"alpha": 0.7})
    yield fixed("QGemm", [*head, bias, F(0.1)], {"alpha": 1.5}, **exact)
    columns = [u8(7, 3), F(0.02), U(100), s8(5, 7), pos(5) * F(0.03), np.zeros(5, I8), bias, F(0.1), U(128)]
    yield fixed("QGemm", columns, {"transA": 1, "transB": 1})
    yield fixed("QGemm", [s8(3, 7), F(0.02), I8(4), s8(7, 5), F(0.03), I8(0), None, F(0.1), I8(-5)])
    close = {"rtol": 1e-4, "atol": 1e-4}
    yield ms("DynamicQuantizeMatMul", [f32(3, 7), s8(7, 5), pos(5), np.zeros(5, I8), f32(5)], **close)
    yield ms("DynamicQuantizeMatMul", [f32(2, 3, 7), weights, F(0.1)], **close)
    yield ms("MatMulIntegerToFloat", [s8(3, 7), s8(7, 5), F(0.1), F(0.2), I8(3)], **close)
    yield ms("MatMulIntegerToFloat", [whole, s8(7, 5), F(0.1), pos(5), U(3), None, f32(5)], **close)


def blob(columns: int, blocks: int, zero: bool) -> np.ndarray:
    """Random weights as MatMulFpQ4 takes them."""
    scales = (pos(columns, blocks, 1) * F(0.1)).view(U)
    zeros = [rng.integers(0, 16, (columns, blocks, 1)).astype(U)] if zero else []
    return np.concatenate([scales, *zeros, u8(columns, blocks, 16)], 2).ravel()


def packed_weights() -> Iterator[Case]:
    for kind in (0, 1):
        inputs = [f32(3, 100), blob(12, 4, kind == 1), np.array([100, 12])]
        yield fixed("MatMulFpQ4", inputs, {"blk_quant_type": kind}, const=[1, 2], rtol=1e-4, atol=1e-4)
    k, n = 40, 6
    for width, block in ((2, 16), (4, 32), (8, 16)):
        blocks = -(-k // block)
        zeros: list[np.ndarray | None] = [None, u8(n, -(-blocks * width // 8))]
        if width < 8:
            zeros.append(f32(n, blocks) * 2 + 8)
        for zero in zeros:
            inputs = [f32(2, 3, k), u8(n, blocks, block * width // 8), pos(n, blocks), zero, None, f32(n)]
            attrs = {"K": k, "N": n, "bits": width, "block_size": block}
            yield fixed("MatMulNBits", inputs, attrs, const=[1, 2, 3], rtol=1e-3, atol=1e-2)
    groups = rng.integers(0, 3, 48).astype(np.int32)
    for known in ([1, 2, 4], [1, 2]):  # whose scale each column of weights has: of a constant, and of an input
        inputs = [f32(2, 3, 40), u8(6, 3, 8), pos(6, 3), None, groups]
        yield fixed("MatMulNBits", inputs, {"K": 40, "N": 6, "block_size": 16}, const=known, rtol=1e-3, atol=1e-2)
    for kind in (0, 1):
        for k in (32, 24):  # blocks go on in the next row
            inputs = [f32(3, k), u8(5 * k // 2), pos(-(-5 * k // 16))]
            attrs = {"K": k, "N": 5, "block_size": 16, "quant_type": kind}
            yield fixed("MatMulBnb4", inputs, attrs, const=[1, 2], rtol=1e-4, atol=1e-5)
    for gather, quantize in ((0, 1), (0, 2), (1, 2), (2, 1)):
        table = rng.integers(-8, 8, (3, 32, 32)).astype(ml_dtypes.int4)
        scales = pos(*(2 if i == quantize else d for i, d in enumerate(table.shape)))
        attrs = {"gather_axis": gather, "quantize_axis": quantize, "block_size": 16}
        inputs = [table, np.array([[0, 2], [1, -1]]), scales]
        yield fixed("GatherBlockQuantized", inputs, attrs, const=[0, 2])
    table, zeros4 = (rng.integers(0, 16, s).astype(ml_dtypes.uint4) for s in ((5, 32), (5, 2)))
    inputs = [table, np.array([0, 4]), pos(5, 2), zeros4]
    yield fixed("GatherBlockQuantized", inputs, {"block_size": 16}, const=[0, 2, 3])
    for width in (2, 4, 8):
        for zero in (None, u8(5, max(1, 2 * width // 8))):
            inputs = [u8(5, 32 * width // 8), np.array([0, 4]), pos(5, 2), zero]
            yield fixed("GatherBlockQuantized", inputs, {"block_size": 16, "bits": width}, const=[0, 2, 3])


FAMILIES = [
    attentions, multi_head_attentions, grouped_queries, rotaries, activations, products, norms, moved,
    quantized_attention, recurrent, images, pointwise, integer_products, packed_weights,
]  # fmt: skip


def numbered(family: Callable[[], Iterator[Case]]) -> Iterator[tuple[str, Case]]:
    cases = family()
    for i in count():
        name = f"{family.__name__}-{i}"
        draw_for(name)
        if (case := next(cases, None)) is None:
            return
        yield f"{name}-{case}", case


CASES = {name: case for family in FAMILIES for name, case in numbered(family)}


@pytest.mark.parametrize("name", CASES, ids=str)
def test_operator(name: str) -> None:
    check(CASES[name])


# ---------------------------------------------------------------- more than the table can say


def check_outputs(case: Case, wanted: Sequence[bool], threads: int = 0, kinds: Sequence[int] = (1, 1, 1, 1)) -> None:
    """As `check`, with some of the outputs alone, of these element types: others are left out of the node."""
    model = build(case, False)
    node, infos = model.graph.node[0], list(model.graph.output)
    for kept, name, info, kind in zip(wanted, list(node.output), infos, kinds, strict=False):
        if kept:
            info.type.tensor_type.elem_type = kind
        else:
            model.graph.output.remove(info)
            node.output[int(name[1:])] = ""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    right = ort.InferenceSession(model.SerializeToString(), options).run(None, feeds(case))
    for i, (a, b) in enumerate(zip(evaluate(load(model), list(feeds(case).values())), right, strict=True)):
        compare(a, b, f"{case}, output {i}", case)


@pytest.mark.parametrize("simplified", [False, True])
def test_sum_of_skip_normalization(simplified: bool) -> None:
    name = "SkipSimplifiedLayerNormalization" if simplified else "SkipLayerNormalization"
    rest = [f32(8)] if simplified else [f32(8), f32(8)]
    case = ms(name, [f32(2, 3, 8), f32(2, 3, 8), f32(8), *rest], outputs=4)
    check_outputs(case, [True, False, False, True])


def test_sum_of_embeddings() -> None:
    ids = rng.integers(0, 7, (2, 3)).astype(np.int32)
    tables = [f32(9, 8), f32(7, 8), f32(9, 8), f32(8), f32(8)]
    case = ms("EmbedLayerNormalization", [ids, ids, *tables], outputs=3)
    check_outputs(case, [True, True, True], kinds=[1, 6, 1])
    plain = [ids, None, tables[0], tables[1], None, tables[3], tables[4], None, ids[:1]]
    check(ms("EmbedLayerNormalization", [*plain[:7], bits(2, 3), ids[:1]], {"epsilon": 0.1}, outputs=2, keep=(1,)))


def test_rows_of_a_quantized_lstm_are_independent() -> None:
    """As onnxruntime does it with a thread for each row."""
    each = (1,)
    inputs = [
        f32(5, 2, 3), u8(1, 3, 16), u8(1, 4, 16), f32(1, 32), None, None, None, None,
        np.full(each, F(0.01)), np.full(each, U(120)), np.full(each, F(0.01)), np.full(each, U(120)),
    ]  # fmt: skip
    case = ms("DynamicQuantizeLSTM", inputs, {"hidden_size": 4}, outputs=3, rtol=1e-3, atol=1e-4)
    check_outputs(case, [True] * 3, threads=2)


COMPILED = [
    name
    for name in CASES
    if name.startswith(("grouped_queries", "recurrent-0", "quantized_attention", "images", "packed_weights"))
    or "37x101-scalar-scalar-101" in name  # with ties
]


@pytest.mark.parametrize("name", COMPILED, ids=str)
def test_compiled(name: str) -> None:
    """What is more than a composite of well-worn primitives, through kernels."""
    case = CASES[name]
    outputs = onnxc.compile(build(case, case.dynamic))(**feeds(case)).values()
    for i, (a, b) in enumerate(zip(outputs, expected(case), strict=True)):
        compare(np.asarray(a), b, f"{case}, output {i}", case)


# Of ops that onnxruntime has for GPUs alone, numpy says what is right.


def test_four_bit_floats_of_a_large_layer() -> None:
    """Its scales are read as they are: no table says which scale a weight has."""
    k, n, block = 4096, 11008, 64
    case = fixed(
        "MatMulBnb4", [f32(1, k), np.zeros(n * k // 2, np.uint8), np.ones(n * k // block, np.float32)],
        {"K": k, "N": n, "block_size": block, "quant_type": 1},
    )  # fmt: skip
    graph = decompose(load(build(case, False)))
    assert max(node.output.t.size for node in graph.nodes if node.op == "constant") < 100


def numpy_group_norm(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, groups: int, silu: bool) -> np.ndarray:
    """Channels last."""
    n, *_, c = x.shape
    parts = x.astype(np.float64).reshape(n, -1, groups, c // groups)
    mean, var = parts.mean((1, 3), keepdims=True), parts.var((1, 3), keepdims=True)
    y = ((parts - mean) / np.sqrt(var + 1e-5)).reshape(x.shape) * gamma + beta
    return y / (1 + np.exp(-y)) if silu else y


def run(case: Case) -> list[np.ndarray]:
    return evaluate(load(build(case, False)), list(feeds(case).values()))


@pytest.mark.parametrize("channels_last", [0, 1])
@pytest.mark.parametrize("activation", [0, 1])
def test_group_norm(channels_last: int, activation: int) -> None:
    x, skip, gamma, beta, bias = f32(2, 3, 5, 8), f32(2, 8), f32(8), f32(8), f32(8)
    attrs = {"groups": 4, "activation": activation, "channels_last": channels_last}
    given = x if channels_last else np.moveaxis(x, 3, 1).copy()
    total = x + skip[:, None, None] + bias
    for name, inputs, right in (
        ("GroupNorm", [given, gamma, beta], x), ("SkipGroupNorm", [given, gamma, beta, skip, bias], total)
    ):  # fmt: skip
        y, *more = run(ms(name, inputs, attrs, outputs=1 if name == "GroupNorm" else 2))
        for got, wanted in zip(
            [y, *more], [numpy_group_norm(right, gamma, beta, 4, bool(activation)), total], strict=False
        ):
            np.testing.assert_allclose(got if channels_last else np.moveaxis(got, 1, 3), wanted, 1e-4, 1e-5)


@pytest.mark.parametrize("inner", [0, 1])
def test_bias_softmax(inner: int) -> None:
    x = f32(2, 3, 4, 5)
    bias = f32(2, 1, 4, 5) if inner else f32(3, 4, 5)
    scores = (x.astype(np.float64) + bias).reshape(6, 20)
    wanted = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    given = bias[:, 0] if inner else bias
    (y,) = run(ms("BiasSoftmax", [x, given], {"axis": 2, "is_inner_broadcast": inner}))
    np.testing.assert_allclose(y, wanted.reshape(x.shape), 1e-5, 1e-6)


def test_complex_products() -> None:
    x, y = f32(3, 4, 2), f32(4, 2)
    left, right = x[..., 0] + 1j * x[..., 1], y[..., 0] + 1j * y[..., 1]
    for name, wanted in (("ComplexMul", left * right), ("ComplexMulConj", left * right.conj())):
        (z,) = run(ms(name, [x, y]))
        np.testing.assert_allclose(z, np.stack([wanted.real, wanted.imag], -1), 1e-5, 1e-6)


def test_integers() -> None:
    x, y = s8(3, 7), s8(7)
    (z,) = run(ms("MulInteger", [x, I8(3), y, I8(-4)]))
    np.testing.assert_array_equal(z, (x.astype(np.int32) - 3) * (y.astype(np.int32) + 4))
    (z,) = run(ms("ReduceSumInteger", [x], {"axes": [1], "keepdims": 0}))
    np.testing.assert_array_equal(z, x.astype(np.int32).sum(1))


def test_attributes_that_onnxruntime_passes_over() -> None:
    """Its LayerNormalization of opsets before the standard's: there are models that misspell epsilon."""
    text = '<ir_version: 8, opset_import: ["" : {}]> g (float[2, 4] x, float[4] s) => (y) {{ y = {} (x, s) }}'
    for op in ("LayerNormalization <epsion = 0.5>", "SimplifiedLayerNormalization <stash = 1>"):
        case = onnx.parser.parse_model(text.format(16, op))
        x, s = f32(2, 4), f32(4)
        session = ort.InferenceSession(case.SerializeToString())
        np.testing.assert_allclose(onnxc.compile(case)(x, s)["y"], session.run(None, {"x": x, "s": s})[0], 1e-5, 1e-6)
    with pytest.raises(OnnxcError, match="has no attribute epsion in opset 17"):
        onnxc.compile(onnx.parser.parse_model(text.format(17, "LayerNormalization <epsion = 0.5>")))


def test_is_all_finite() -> None:
    good, bad, infinite = f32(5), np.array([1, np.nan], F), np.array([-np.inf, 2], F)
    for inputs, attrs, wanted in (
        ([good, good], {}, True), ([good, bad], {}, False), ([infinite], {}, False),
        ([infinite], {"isnan_only": 1}, True), ([bad], {"isinf_only": 1}, True), ([bad], {"isnan_only": 1}, False),
    ):  # fmt: skip
        assert bool(run(ms("IsAllFinite", inputs, attrs))[0]) is wanted


@pytest.mark.parametrize("fused", [False, True])
def test_convolution_of_channels_last(fused: bool) -> None:
    x, w, bias, z = f32(2, 6, 7, 3), f32(4, 3, 3, 2), f32(4), f32(2, 4, 6, 4)
    attrs: dict[str, Any] = {"activation": "Relu"} if fused else {}
    inputs = [x, w, bias, z] if fused else [x, w, bias]
    (y,) = run(ms("NhwcFusedConv" if fused else "NhwcConv", inputs, attrs))
    first = Case("Conv", [np.moveaxis(x, 3, 1).copy(), w, bias], {})
    wanted = np.moveaxis(expected(first)[0], 1, 3)
    np.testing.assert_allclose(y, np.maximum(wanted + z, 0) if fused else wanted, 1e-5, 1e-5)


@pytest.mark.parametrize(("channels", "groups", "given"), [(3, 1, False), (3, 1, True), (6, 2, False), (5, 1, True)])
def test_weights_of_channels_last(channels: int, groups: int, given: bool) -> None:
    """As onnxruntime's optimizer writes NhwcConv, also where the sizes would do for the other order."""
    x, w, bias = f32(2, 6, 7, channels), f32(4, 3, 3, channels // groups), f32(4)
    attrs = {"group": groups, "pads": [1, 1, 1, 1]} | ({"kernel_shape": [3, 3]} if given else {})
    (y,) = run(ms("NhwcConv", [x, w, bias], attrs))
    first = Case("Conv", [np.moveaxis(x, 3, 1).copy(), np.moveaxis(w, 3, 1).copy(), bias], attrs)
    np.testing.assert_allclose(y, np.moveaxis(expected(first)[0], 1, 3), 1e-5, 1e-5)


REFUSED = [
    ms("GroupQueryAttention", [f32(1, 1, 64), None, None, None, None, i32(0), i32(1)],
       {"num_heads": 3, "kv_num_heads": 2}, const=[6]),
    ms("GroupQueryAttention", [f32(1, 1, 64), None, None, None, None, i32(0), i32(1)],
       {"num_heads": 2, "kv_num_heads": 1, "do_rotary": 1}, const=[6]),
    ms("MRotaryEmbedding", [f32(1, 2, 3, 8), np.zeros((3, 1, 3), np.int64), f32(5, 4), f32(5, 4)],
       {"mrope_section": [1 << 40, 0, 0]}),
    ms("UnfoldTensor", [f32(3, 4)], {"size": 2, "step": 0}),
    ms("MatMulBnb4", [f32(1, 16), u8(8), pos(1)], {"K": 1 << 40, "N": 1 << 40, "block_size": 16, "quant_type": 0}),
    ms("FusedConv", [f32(1, 1, 3, 3), f32(1, 1, 1, 1)], {"activation": "Nothing"}),
    ms("Attention", [f32(2, 3, 8), f32(8, 24), f32(24), i32(1, 2, 3)], {"num_heads": 2}),
    ms("GroupNorm", [f32(1, 2, 2, 4), f32(4), f32(4)], {"groups": 3, "activation": 0}),
    ms("MultiHeadAttention", [f32(1, 2, 4), f32(1, 2, 4), f32(3, 2, 4)], {"num_heads": 2}),
    Case("Attention", [f32(1, 2, 2, 4), f32(3, 2, 2, 4), f32(3, 2, 2, 4)], opset=23),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_refused(case: Case) -> None:
    """What does not fit together is an error of ours."""
    with pytest.raises(OnnxcError):
        run(case)


@pytest.mark.parametrize("group", [-1, 3])
def test_groups_of_no_block(group: int) -> None:
    """Of a g_idx that is an input the run finds it, and does not count from the end."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
      g (float[1, 40] x, uint8[6, 3, 8] w, float[18] scale, int32[40] group) => (float[1, 6] y)
      { y = com.microsoft.MatMulNBits <K = 40, N = 6, block_size = 16, bits = 4> (x, w, scale, , group) }""")
    groups = np.arange(40, dtype=np.int32) // 16
    groups[7] = group
    with pytest.raises(RunError, match="out of bounds"):
        onnxc.compile(model)(x=f32(1, 40), w=np.zeros((6, 3, 8), np.uint8), scale=f32(18), group=groups)


def test_scales_are_floats() -> None:
    """The onnx package does not know the types of these operators."""
    text = """<ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>
    g (uint8[3] x, uint8 s, uint8 z, float f) => (y) { y = com.microsoft.QLinearSigmoid (x, %s) }"""
    assert decompose(load(onnx.parser.parse_model(text % "f, z, f, z")))
    for inputs, number, name in (("s, z, f, z", 1, "x_scale"), ("f, z, s, z", 3, "scale")):
        with pytest.raises(ModelError, match=rf"input {number} of QLinearSigmoid, '{name}', cannot be uint8\[\]"):
            decompose(load(onnx.parser.parse_model(text % inputs)))


def test_a_first_position_of_an_open_size() -> None:
    """A vector of positions has one element, whatever its size is called: the program does not wait for it."""
    text = """<ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>
    g (float[B, S, 24] x, int64[%s] first, float[9, 4] c, float[9, 4] s) => (float[B, S, 24] y)
    { y = com.microsoft.RotaryEmbedding <num_heads = 3> (x, first, c, s) }"""
    given = {"x": f32(2, 4, 24), "first": np.array([3]), "c": f32(9, 4), "s": f32(9, 4)}
    models = [onnx.parser.parse_model(text % size) for size in ("1", "P")]
    known, told = map(onnxc.compile, models)
    assert decompose(load(models[1]))
    np.testing.assert_array_equal(told(**given)["y"], known(**given)["y"])
    with pytest.raises(OnnxcError, match="n0 RotaryEmbedding"):
        told(**given | {"first": np.array([0, 1, 2, 3])})
