"""Cases of operators that are made of many: quantized ones, attention, losses, transforms, sampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from tests.op_cases import KERNELS, f32, i64, ints, pos, rng
from tests.ops_harness import Case


def quantized() -> Iterator[Case]:
    x = f32(3, 4, 5) * 10
    for to, low, high in (
        (np.uint8, 0, 255),
        (np.int8, -128, 127),
        (np.uint16, 0, 65535),
        (np.int16, -32768, 32767),
    ):
        zero = np.array(rng.integers(low, high) // 2, to)
        q = ints(low, high, 3, 4, 5, dtype=to)
        yield Case("QuantizeLinear", [x, np.float32(0.13), zero], opset=21)
        yield Case("DequantizeLinear", [q, np.float32(0.13), zero], opset=21)
        zeros = ints(low // 2, high // 2, 4, dtype=to)
        yield Case("QuantizeLinear", [x, pos(4), zeros], {"axis": 1}, opset=21)
        yield Case("DequantizeLinear", [q, pos(4), zeros], {"axis": 1}, opset=21)
    yield Case("QuantizeLinear", [x, np.float32(0.13)], opset=13)
    yield Case("DequantizeLinear", [ints(-9, 9, 3, dtype=np.int32), np.float32(0.5)], opset=13)
    yield Case(
        "QuantizeLinear",
        [f32(3, 6), pos(3, 2), ints(0, 9, 3, 2, dtype=np.uint8)],
        {"axis": 1, "block_size": 3},
        opset=21,
        dynamic=False,
    )
    yield Case(
        "DequantizeLinear",
        [ints(0, 9, 3, 5, dtype=np.uint8), pos(3, 2), ints(0, 9, 3, 2, dtype=np.uint8)],
        {"axis": 1, "block_size": 3},
        opset=21,
        dynamic=False,
    )
    yield Case("QuantizeLinear", [x, np.float32(0.1), np.array(0, ml_dtypes.float8_e4m3fn)], opset=19, const=[2])
    yield Case(
        "QuantizeLinear",
        [x, np.float32(2.0), np.array(0, ml_dtypes.int4)],
        opset=21,
        const=[2],
        oracle="reference",
    )
    yield Case("DynamicQuantizeLinear", [x], outputs=3)
    yield Case("DynamicQuantizeLinear", [np.zeros(4, np.float32)], outputs=3)
    a, b = ints(0, 255, 3, 4, dtype=np.uint8), ints(0, 255, 4, 5, dtype=np.uint8)
    yield Case("MatMulInteger", [a, b])
    yield Case("MatMulInteger", [a, b, np.uint8(100), np.uint8(120)])
    yield Case("MatMulInteger", [a, b, np.uint8(7), ints(0, 9, 5, dtype=np.uint8)], oracle="reference")
    one = np.float32
    yield Case(
        "QLinearMatMul",
        [a, one(0.02), np.uint8(100), b, one(0.03), np.uint8(110), one(0.5), np.uint8(128)],
        opset=13,
    )
    image, kernel = ints(0, 255, 1, 2, 6, 6, dtype=np.uint8), ints(0, 255, 3, 2, 3, 3, dtype=np.uint8)
    yield Case("ConvInteger", [image, kernel, np.uint8(99), np.uint8(120)], {"pads": [1, 1, 1, 1]}, keep=KERNELS)
    qconv = [image, one(0.02), np.uint8(100), kernel, one(0.03), np.uint8(110), one(0.6), np.uint8(128)]
    yield Case("QLinearConv", qconv, {"strides": [2, 2]}, keep=KERNELS)
    yield Case("QLinearConv", [*qconv, ints(-900, 900, 3, dtype=np.int32)], {"pads": [1, 1, 1, 1]}, keep=KERNELS)
    signed = ints(-128, 127, 3, 2, 3, 3, dtype=np.int8)
    per = [
        image,
        one(0.02),
        np.uint8(100),
        signed,
        pos(3) * one(0.05),
        np.zeros(3, np.int8),
        one(0.6),
        np.uint8(128),
    ]
    yield Case("QLinearConv", per, keep=KERNELS)


# Numbers and sizes of heads.
HEADS = (4, 6, 8)


def attentions() -> Iterator[Case]:
    q, k, v = f32(2, 4, 3, 8), f32(2, 4, 5, 8), f32(2, 4, 5, 6)
    yield Case("Attention", [q, k, v], opset=23, keep=HEADS)
    yield Case("Attention", [q, k, v, f32(3, 5)], {"scale": 0.3}, opset=23, keep=HEADS)
    yield Case("Attention", [q, k, v, np.array([[True, False, True, True, False]] * 3)], opset=23, keep=HEADS)
    yield Case("Attention", [q, k, v], {"is_causal": 1, "softcap": 2.0}, opset=23, keep=HEADS)
    for kind in (np.int8, np.uint32, np.float16, np.float64):  # a mask of any numbers
        mask = np.arange(15).reshape(3, 5).astype(kind)
        yield Case("Attention", [q, k, v, mask], opset=24, keep=HEADS, oracle="reference")
    for short in (f32(3, 4), f32(4, 3, 1), np.array([[True], [False], [True]])):
        yield Case("Attention", [q, k, v, short], opset=24, keep=HEADS, oracle="reference")
    for ours, values in ((np.float32, np.float64), (np.float32, np.float16), (np.float64, np.float32)):
        inputs = [q.astype(ours), k.astype(ours), v.astype(values)]
        yield Case("Attention", inputs, opset=23, outputs=3, dynamic=False, oracle="reference", rtol=1e-3, atol=1e-3)
    yield Case("Attention", [q, f32(2, 2, 5, 8), f32(2, 2, 5, 6)], opset=23, dynamic=False)
    past = [f32(2, 4, 2, 8), f32(2, 4, 2, 6)]
    yield Case("Attention", [q, k, v, None, *past], {"is_causal": 1}, opset=23, outputs=3, keep=HEADS)
    for mode in range(4):
        attrs = {"qk_matmul_output_mode": mode, "softcap": 1.5 if mode else 0.0}
        yield Case("Attention", [q, k, v, f32(3, 5)], attrs, opset=24, outputs=4, oracle="reference", keep=HEADS)
    flat = [f32(2, 3, 32), f32(2, 5, 16), f32(2, 5, 16)]
    yield Case("Attention", flat, {"q_num_heads": 4, "kv_num_heads": 2}, opset=23, dynamic=False)
    x, cos, sin, at = f32(2, 3, 4, 8), f32(10, 4), f32(10, 4), ints(0, 10, 2, 4)
    for interleaved in (0, 1):
        attrs = {"interleaved": interleaved}
        yield Case("RotaryEmbedding", [x, cos, sin, at], attrs, opset=23, dynamic=False)
        yield Case(
            "RotaryEmbedding",
            [f32(2, 4, 24), cos, sin, at],
            {**attrs, "num_heads": 3},
            opset=23,
            dynamic=False,
        )
    yield Case("RotaryEmbedding", [x, f32(2, 4, 2), f32(2, 4, 2)], {"rotary_embedding_dim": 4}, opset=23)


def contrib() -> Iterator[Case]:
    def ms(name: str, inputs: list[Any], attrs: dict[str, Any] | None = None, **more: Any) -> Case:
        return Case(name, inputs, attrs or {}, domain="com.microsoft", **more)

    x = f32(2, 3, 8)
    yield ms("Gelu", [x])
    yield ms("BiasGelu", [x, f32(8)])
    yield ms("FastGelu", [x, f32(8)], atol=1e-5)
    yield ms("QuickGelu", [x], {"alpha": 1.3})
    yield ms("FusedMatMul", [f32(2, 4, 3), f32(5, 4)], {"transA": 1, "transB": 1, "alpha": 0.5})
    yield ms("FusedMatMul", [f32(4, 2, 3), f32(4, 2, 5)], {"transBatchA": 1, "transBatchB": 1, "transA": 1})
    yield ms("FusedGemm", [f32(3, 4), f32(4, 5), f32(5)], {"activation": "LeakyRelu", "activation_alpha": 0.1})
    yield ms(
        "FusedConv",
        [f32(1, 2, 5, 5), f32(3, 2, 3, 3), f32(3), f32(1, 3, 3, 3)],
        {"activation": "Relu"},
        keep=KERNELS,
    )
    yield Case("SimplifiedLayerNormalization", [x, f32(8)], {"epsilon": 1e-5})
    yield ms("SkipLayerNormalization", [x, f32(2, 3, 8), f32(8), f32(8), f32(8)], {"epsilon": 1e-5})
    yield ms("SkipSimplifiedLayerNormalization", [x, f32(2, 3, 8), f32(8)], {"epsilon": 1e-5})
    ids = ints(0, 9, 2, 3, dtype=np.int32)
    tables = [f32(9, 8), f32(7, 8), f32(9, 8), f32(8), f32(8)]
    yield ms("EmbedLayerNormalization", [ids, ids, *tables, ints(0, 2, 2, 3, dtype=np.int32)], outputs=2)
    b, zero = ints(0, 255, 8, 5, dtype=np.uint8), np.uint8(120)
    yield ms("DynamicQuantizeMatMul", [x, b, np.float32(0.1), zero, f32(5)], rtol=1e-4, atol=1e-4)
    whole = ints(0, 255, 3, 8, dtype=np.uint8)
    yield ms(
        "MatMulIntegerToFloat",
        [whole, b, np.float32(0.1), pos(5), zero, ints(0, 99, 5, dtype=np.uint8)],
        rtol=1e-4,
    )
    q = [whole, np.float32(0.1), zero]
    tail = [np.float32(0.3), np.uint8(100)]
    yield ms("QLinearAdd", [*q, *q, *tail])
    yield ms("QLinearSigmoid", [*q, np.float32(0.01), np.uint8(0)])
    yield ms("QLinearLeakyRelu", [*q, *tail], {"alpha": 0.1})
    packed = ints(0, 255, 6, 2, 8, dtype=np.uint8)
    for zeros in (None, ints(0, 255, 6, 1, dtype=np.uint8)):
        attrs = {"K": 32, "N": 6, "bits": 4, "block_size": 16}
        yield ms(
            "MatMulNBits",
            [f32(3, 32), packed, pos(6, 2), zeros],
            attrs,
            const=[1, 2, 3],
            rtol=1e-4,
            atol=1e-4,
        )
    for interleaved in (0, 1):
        inputs = [f32(2, 4, 24), ints(0, 6, 2, 4), f32(10, 4), f32(10, 4)]
        yield ms("RotaryEmbedding", inputs, {"interleaved": interleaved}, dynamic=False)
    yield ms("RotaryEmbedding", [f32(2, 3, 4, 8), i64(2), f32(10, 4), f32(10, 4)], dynamic=False)
    qkv = [f32(2, 3, 8), f32(2, 5, 8), f32(2, 5, 8)]
    yield ms("MultiHeadAttention", qkv, {"num_heads": 2}, dynamic=False)
    yield ms(
        "MultiHeadAttention",
        [*qkv, f32(24), ints(0, 2, 2, 5, dtype=np.int32)],
        {"num_heads": 2},
        dynamic=False,
    )
    yield ms("MultiHeadAttention", [x, x, x], {"num_heads": 2, "unidirectional": 1, "scale": 0.2}, dynamic=False)
    weights = [f32(8, 24), f32(24)]
    yield ms("Attention", [x, *weights], {"num_heads": 2}, dynamic=False)
    yield ms("Attention", [x, *weights, ints(0, 2, 2, 3, dtype=np.int32)], {"num_heads": 2}, dynamic=False)
    yield ms("Attention", [x, *weights], {"num_heads": 2, "unidirectional": 1}, dynamic=False, outputs=2)


def losses() -> Iterator[Case]:
    for shape in ((5, 4), (2, 4, 3, 2)):
        scores, labels = f32(*shape), ints(0, 4, shape[0], *shape[2:])
        for reduction in ("none", "sum", "mean"):
            for extra, attrs in (
                ([], {}),
                ([pos(4)], {}),
                ([pos(4)], {"ignore_index": 1}),
                ([], {"ignore_index": -7}),
            ):
                given = np.where(labels == 2, -7, labels) if attrs.get("ignore_index") == -7 else labels
                attrs = {**attrs, "reduction": reduction}
                yield Case("NegativeLogLikelihoodLoss", [scores, given, *extra], attrs, opset=13, oracle="reference")
                yield Case(
                    "SoftmaxCrossEntropyLoss",
                    [scores, given, *extra],
                    attrs,
                    opset=13,
                    outputs=2,
                    oracle="reference",
                )


def spectra() -> Iterator[Case]:
    for parts in (1, 2):
        x = f32(2, 8, 5, parts)
        for axis in (1, 2):
            for length in (None, np.int64(6), np.int64(11)):
                for onesided in (0, 1) if parts == 1 else (0,):
                    inputs = [x, length, np.int64(axis)]
                    attrs = {"onesided": onesided}
                    yield Case("DFT", inputs, attrs, opset=20, const=[1, 2], keep=(2, 5, 8), rtol=1e-4, atol=1e-4)
                yield Case(
                    "DFT",
                    [x, length],
                    {"axis": axis},
                    opset=17,
                    const=[1],
                    keep=(2, 5, 8),
                    rtol=1e-4,
                    atol=1e-4,
                )
    yield Case("DFT", [f32(2, 8, 2)], {"inverse": 1}, opset=20, dynamic=False, atol=1e-5)
    signal = f32(2, 40, 1)
    hann = np.hanning(16).astype(np.float32)
    for onesided in (0, 1):
        attrs = {"onesided": onesided}
        yield Case("STFT", [signal, np.int64(5), hann], attrs, opset=17, const=[1], keep=(16,), rtol=1e-4, atol=1e-4)
        yield Case("STFT", [signal, np.int64(1), hann[:9]], attrs, opset=17, const=[1], keep=(9,), rtol=1e-4, atol=1e-4)
        yield Case("STFT", [signal, np.int64(17), hann], attrs, opset=17, const=[1], keep=(16,), rtol=1e-4, atol=1e-4)
        inputs = [signal, np.int64(4), None, np.int64(8)]
        yield Case("STFT", inputs, attrs, opset=17, const=[1, 3], rtol=1e-4, atol=1e-4)
    edges = [np.int64(8), np.int64(64), np.int64(8000), np.float32(0), np.float32(4000)]
    yield Case("MelWeightMatrix", edges, opset=17, const=range(5), rtol=1e-4)


def samplings() -> Iterator[Case]:
    x, grid = f32(2, 3, 5, 6), rng.uniform(-1.4, 1.4, (2, 4, 3, 2)).astype(np.float32)
    for mode in ("linear", "nearest", "cubic"):
        for padding in ("zeros", "border", "reflection"):
            for align in (0, 1):
                attrs = {"mode": mode, "padding_mode": padding, "align_corners": align}
                yield Case("GridSample", [x, grid], attrs, opset=20, keep=(2,), rtol=1e-4, atol=1e-4)
    yield Case("GridSample", [x, grid], {"mode": "bilinear"}, opset=16, keep=(2,), atol=1e-5)
    volume, points = f32(1, 2, 3, 4, 5), rng.uniform(-1.1, 1.1, (1, 2, 3, 2, 3)).astype(np.float32)
    yield Case("GridSample", [volume, points], opset=20, dynamic=False, atol=1e-5)
    for align in (0, 1):
        yield Case(
            "AffineGrid",
            [f32(2, 2, 3), i64(2, 3, 4, 5)],
            {"align_corners": align},
            const=[1],
            opset=20,
            atol=1e-5,
        )
        yield Case(
            "AffineGrid",
            [f32(2, 3, 4), i64(2, 3, 4, 5, 6)],
            {"align_corners": align},
            const=[1],
            opset=20,
            atol=1e-5,
        )
    rois = np.array([[0, 0, 4, 3], [1.5, 0.5, 5.5, 4.5], [-2, -1, 9, 9]], np.float32)
    for how in ("half_pixel", "output_half_pixel"):
        attrs = {
            "coordinate_transformation_mode": how,
            "output_height": 2,
            "output_width": 3,
            "sampling_ratio": 2,
        }
        yield Case("RoiAlign", [x, rois, i64(0, 1, 0)], {**attrs, "spatial_scale": 0.8}, opset=16, atol=1e-5)
        yield Case("RoiAlign", [x, rois, i64(0, 1, 0)], {**attrs, "mode": "max"}, opset=16, atol=1e-5)
        inside, infinite = np.array([[0, 0, 4, 4], [1, 1, 6, 6]], np.float32), f32(1, 2, 6, 6)
        infinite[0, 0, 2, 2] = np.inf  # where neighbours of a weight of 0 may be
        yield Case("RoiAlign", [infinite, inside, i64(0, 0)], {**attrs, "mode": "max"}, opset=16, atol=1e-5)
    for group, own in ((2, 2), (1, 2), (2, 1), (4, 2), (2, 4)):
        inputs = [f32(2, 4, 5, 6), f32(8, 4 // group, 2, 2), f32(2, own * 2 * 4, 4, 5), f32(8), pos(2, own * 4, 4, 5)]
        attrs = {"group": group, "offset_group": own}
        yield Case("DeformConv", inputs, attrs, opset=19, dynamic=False, rtol=1e-4, atol=1e-4)
    yield Case("Col2Im", [f32(2, 12, 20), i64(5, 6), i64(2, 2)], const=[1, 2], opset=18, dynamic=False)
    strided = {"strides": [2, 1], "pads": [1, 0, 1, 2], "dilations": [1, 2]}
    yield Case("Col2Im", [f32(2, 12, 18), i64(5, 6), i64(2, 2)], strided, const=[1, 2], opset=18, dynamic=False)
    for image, block, more in (
        ((5, 6), (3, 3), {"pads": [1, 1, 1, 1]}),
        ((9, 11), (4, 3), {"strides": [3, 2], "pads": [1, 0, 2, 1]}),
        ((13, 14), (4, 4), {"strides": [4, 4]}),
        ((13, 14), (2, 2), {"strides": [4, 3]}),
        ((9, 9), (5, 5), {}),
        ((31,), (7,), {"strides": [3], "pads": [2, 1]}),
        ((5, 6, 7), (2, 3, 2), {"strides": [1, 2, 2]}),
    ):
        n, pads = len(image), more.get("pads", [0] * 2 * len(image))
        steps = more.get("strides", [1] * n)
        count = [(image[i] + pads[i] + pads[n + i] - block[i]) // steps[i] + 1 for i in range(n)]
        blocks = f32(2, 3 * int(np.prod(block)), int(np.prod(count)))
        yield Case("Col2Im", [blocks, i64(*image), i64(*block)], more, const=[1, 2], opset=18, dynamic=False, rtol=1e-4)
    for exclusive in (0, 1):
        attrs = {"exclusive": exclusive, "reverse": exclusive}
        yield Case("CumProd", [f32(3, 4), np.int64(1)], attrs, opset=26, const=[1])
    for n in (1, 2, 3, 4, 5, 11):
        yield Case("Det", [f32(2, n, n)], keep=(n,), atol=1e-5)


def linear_attentions() -> Iterator[Case]:
    """onnx's reference evaluator is the oracle: onnxruntime does not have it."""
    q, k, v = (f32(2, 5, n) * 0.5 for n in (12, 6, 14))
    decay, beta = -np.abs(f32(2, 5, 2)), np.abs(f32(2, 5, 2))
    state = f32(2, 2, 3, 7)
    common = {"q_num_heads": 4, "kv_num_heads": 2}
    rules: list[tuple[str, list[Any]]] = [
        ("linear", []), ("gated", [decay]), ("gated", [-np.abs(f32(2, 5, 6))]), ("delta", [None, beta]),
        ("gated_delta", [decay, beta]), ("gated_delta", [decay, beta[:, :, :1]]),
    ]  # fmt: skip
    for rule, extra in rules:
        attrs = {**common, "update_rule": rule}
        for past in (None, state):
            yield Case("LinearAttention", [q, k, v, past, *extra], attrs, opset=27, outputs=2, dynamic=False)
    scaled = {**common, "update_rule": "linear", "scale": 0.3}
    yield Case("LinearAttention", [q, k, v], scaled, opset=27, outputs=2, keep=(12, 6, 14))


def pooled_regions() -> Iterator[Case]:
    x = f32(2, 3, 11, 13)
    corners = np.sort(rng.uniform(-3, 16, (17, 2, 2)), 1).reshape(17, 4)
    rois = np.concatenate([ints(0, 2, 17, 1), corners], 1).astype(np.float32)
    for shape, scale in (([2, 3], 1.0), ([3, 3], 0.5), ([1, 7], 0.0625), ([5, 2], 0.7)):
        yield Case("MaxRoiPool", [x, rois], {"pooled_shape": shape, "spatial_scale": scale}, opset=13)
