"""Weights, scales, masks and the like that do not fit what they go with: an error, where they could be broadcast."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from onnxc.errors import ShapeError
from onnxc.frontends.onnx_file import load
from onnxc.passes.decompose import decompose

FLOAT, INT64, UINT8, INT32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.UINT8, TensorProto.INT32
MICROSOFT = "com.microsoft"
Input = tuple[int, list[int]]


def floats(*shape: int) -> Input:
    return FLOAT, list(shape)


def bytes_of(*shape: int) -> Input:
    return UINT8, list(shape)


def whole(*shape: int) -> Input:
    return INT64, list(shape)


def ids(*shape: int) -> Input:
    return INT32, list(shape)


def model(op: str, inputs: list[Input], domain: str = "", **attrs: Any) -> onnx.ModelProto:
    names = [f"x{i}" for i in range(len(inputs))]
    infos = [helper.make_tensor_value_info(n, kind, shape) for n, (kind, shape) in zip(names, inputs, strict=True)]
    node = helper.make_node(op, names, ["y"], domain=domain, **attrs)
    graph = helper.make_graph([node], "g", infos, [onnx.ValueInfoProto(name="y")])
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def quantized_convolution(w: Input, w_scale: Input, w_zero: Input, bias: Input) -> list[Input]:
    return [bytes_of(1, 4, 5, 5), floats(), bytes_of(), w, w_scale, w_zero, floats(), bytes_of(), bias]


IMAGE, KERNEL = floats(2, 4, 6, 6), floats(6, 4, 3, 3)
KEYS = floats(2, 3, 5, 8)
DEFORMED = [floats(1, 4, 5, 5), floats(6, 4, 2, 2), floats(1, 8, 4, 4)]
TURNED = floats(2, 3, 4, 8)
WRONG: list[tuple[str, list[Input], dict[str, Any]]] = [
    *(("Conv", [IMAGE, KERNEL, bias], {}) for bias in (floats(), floats(1, 6), floats(6, 1), floats(2))),
    *(("ConvTranspose", [IMAGE, floats(4, 6, 3, 3), bias], {}) for bias in (floats(1, 6), floats(5))),
    ("DeformConv", [floats(1, 4, 10, 5), *DEFORMED[1:]], {}),
    ("DeformConv", [*DEFORMED, floats(1, 6)], {}),
    ("DeformConv", [*DEFORMED, floats(6), floats(1, 1, 4, 4, 4)], {}),
    ("BatchNormalization", [floats(), *[floats(4)] * 4], {}),
    *(("DequantizeLinear", [bytes_of(3, 1, 2), floats(4)], {"axis": axis}) for axis in (0, 1, 2)),
    ("DequantizeLinear", [bytes_of(3, 1, 2), floats(), bytes_of(4)], {}),
    ("QuantizeLinear", [floats(3, 1, 2), floats(4)], {}),
    *(
        (op, [x, floats(*scale)], {"axis": 1, "block_size": 2})
        for op, x in (("DequantizeLinear", bytes_of(3, 4, 2)), ("QuantizeLinear", floats(3, 4, 2)))
        for scale in ((1, 2, 2), (3, 4, 2), (3, 2, 1))
    ),
    ("QLinearConv", quantized_convolution(bytes_of(1, 4, 2, 2), floats(6), bytes_of(), ids(1)), {}),
    ("QLinearConv", quantized_convolution(bytes_of(6, 4, 2, 2), floats(6, 1), bytes_of(), ids(6)), {}),
    ("QLinearConv", quantized_convolution(bytes_of(6, 4, 2, 2), floats(6), bytes_of(), ids(6, 1)), {}),
    ("ConvInteger", [bytes_of(1, 4, 5, 5), bytes_of(1, 4, 2, 2), bytes_of(), bytes_of(6)], {}),
    ("MatMulInteger", [bytes_of(3, 4), bytes_of(4, 1), bytes_of(), bytes_of(5)], {}),
    ("GridSample", [floats(1, 2, 5, 5), floats(1, 3, 3, 4)], {}),
    ("GridSample", [floats(1, 2, 5, 5), floats(1, 1, 3, 3, 2)], {}),
    ("GridSample", [floats(2, 2, 5, 5), floats(3, 3, 3, 2)], {}),
    ("MaxUnpool", [floats(1, 1, 2, 2), whole(4)], {"kernel_shape": [2, 2]}),
    ("ReverseSequence", [floats(3, 4), whole(1, 4)], {}),
    ("ReverseSequence", [floats(3, 4), whole(1)], {}),
    ("RotaryEmbedding", [floats(1, 3, 4, 8), floats(9, 4), floats(9, 4), whole(2, 4)], {}),
    ("RotaryEmbedding", [floats(2, 3, 1, 8), floats(9, 4), floats(9, 4), whole(2, 4)], {}),
    ("RotaryEmbedding", [TURNED, floats(9, 1), floats(9, 4), whole(2, 4)], {}),
    ("Attention", [TURNED, floats(2, 1, 5, 8), KEYS], {}),
    *(("Attention", [TURNED, KEYS, KEYS, floats(*mask)], {}) for mask in ((3, 5), (4, 10), (3, 1, 4, 5))),
    ("Attention", [floats(2, 3, 1, 8), KEYS, KEYS, floats(4, 5)], {}),
]


@pytest.mark.parametrize("op, inputs, attrs", WRONG, ids=[f"{op}-{i}" for i, (op, *_) in enumerate(WRONG)])
def test_what_does_not_fit(op: str, inputs: list[Input], attrs: dict[str, Any]) -> None:
    with pytest.raises(ShapeError, match=rf"\[node n0 {op}"):
        decompose(load(model(op, inputs, **attrs)))


X, TABLES, VECTOR = floats(2, 3, 4), [floats(9, 4), floats(6, 4), floats(2, 4)], floats(4)
QUERIES = floats(2, 3, 8)
CONTRIB: list[tuple[str, list[Input], dict[str, Any]]] = [
    *((op, [floats(*x), VECTOR], {}) for op in ("BiasGelu", "FastGelu") for x in ((2, 3, 1), (), (2, 4, 1))),
    *((op, [X, floats(*bias)], {}) for op in ("BiasGelu", "FastGelu") for bias in ((), (1,), (1, 4))),
    *((op, [floats(2, 1, 4), X, VECTOR], {}) for op in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")),
    *((op, [X, X, floats(1)], {}) for op in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")),
    ("SkipLayerNormalization", [X, X, VECTOR, VECTOR, floats(1, 4)], {}),
    ("EmbedLayerNormalization", [ids(1, 2, 3), ids(1, 2, 3), *TABLES, VECTOR, VECTOR], {}),
    ("EmbedLayerNormalization", [ids(2, 3), ids(1, 3), *TABLES, VECTOR, VECTOR], {}),
    ("EmbedLayerNormalization", [ids(2, 3), ids(2, 3), floats(9, 1), *TABLES[1:], VECTOR, VECTOR], {}),
    ("EmbedLayerNormalization", [ids(2, 3), ids(2, 3), *TABLES, VECTOR, VECTOR, ids(2)], {}),
    ("EmbedLayerNormalization", [ids(2, 3), ids(2, 3), *TABLES, VECTOR, VECTOR, ids(4, 3)], {}),
    *(("Attention", [QUERIES, floats(8, 24), floats(*bias)], {"num_heads": 2}) for bias in ((1,), (1, 24))),
    *(("Attention", [QUERIES, floats(8, n)], {"num_heads": 2}) for n in (1, 26)),
    ("MultiHeadAttention", [QUERIES, floats(2, 5, 8), floats(2, 5, 1), floats(24)], {"num_heads": 2}),
    ("MoE", [floats(3, 4), floats(1, 2), floats(2, 6, 4), floats(2, 6), floats(2, 4, 6)], {"k": 1}),
    ("MoE", [floats(3, 4), floats(3, 1), floats(2, 6, 4), floats(2, 6), floats(2, 4, 6)], {"k": 1}),
    ("MoE", [floats(3, 4), floats(3, 2), floats(2, 6, 4), floats(2, 1), floats(2, 4, 6)], {"k": 1}),
    ("CDist", [floats(3, 4), floats(5, 1)], {"metric": "euclidean"}),
]


@pytest.mark.parametrize("op, inputs, attrs", CONTRIB, ids=[f"{op}-{i}" for i, (op, *_) in enumerate(CONTRIB)])
def test_what_does_not_fit_operators_of_onnxruntime(op: str, inputs: list[Input], attrs: dict[str, Any]) -> None:
    with pytest.raises(ShapeError, match=rf"\[node n0 {op}"):
        decompose(load(model(op, inputs, MICROSOFT, **attrs)))
