"""Models that the benchmarks make themselves: attention over long sequences, and weights of few bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]
Model = tuple[onnx.ModelProto, dict[str, Array]]
"""A model and inputs for it."""

HEADS, DEPTH = 6, 64
WIDTH, LAYERS = 4096, 8  # of the decoder-like chain of matmuls: 512 MB of float32, 84 MB of 4 bits
BLOCK = 32  # weights that share a scale, of MatMulNBits


def attention(sequence: int, mask: bool) -> Model:
    """softmax(q k / 8 [+ mask]) v, as exporters write it: three matmuls' worth of nodes, no operator for all."""
    rng = np.random.default_rng(0)
    shape = (1, HEADS, sequence, DEPTH)
    inputs = {name: rng.standard_normal(shape, np.float32) for name in "qkv"}
    nodes = [
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "kt"], ["scores"]),
        helper.make_node("Mul", ["scores", "scale"], ["scaled"]),
    ]
    if mask:
        hidden = np.triu(np.full((sequence, sequence), -1e9, np.float32), 1)[None, None]
        inputs["mask"] = hidden
        nodes.append(helper.make_node("Add", ["scaled", "mask"], ["masked"]))
    nodes += [
        helper.make_node("Softmax", ["masked" if mask else "scaled"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v"], ["y"]),
    ]
    return _model(nodes, inputs, {"scale": np.float32(DEPTH**-0.5)}, shape), inputs


def decoder(bits: int) -> Model:
    """A chain of square matmuls with one row, with weights of 32, 8 (DequantizeLinear) or 4 bits (MatMulNBits)."""
    rng = np.random.default_rng(0)
    constants: dict[str, Array] = {}
    nodes = []
    for k in range(LAYERS):
        nodes += _matmul(bits, f"x{k}", f"h{k}", f"w{k}", rng, constants)
        nodes.append(helper.make_node("Relu", [f"h{k}"], [f"x{k + 1}"]))
    inputs = {"x0": rng.standard_normal((1, WIDTH), np.float32)}
    return _model(nodes, inputs, constants, (1, WIDTH), output=f"x{LAYERS}"), inputs


def _matmul(
    bits: int, x: str, y: str, w: str, rng: np.random.Generator, constants: dict[str, Array]
) -> list[onnx.NodeProto]:
    if bits == 32:
        constants[w] = rng.standard_normal((WIDTH, WIDTH), np.float32) / np.float32(WIDTH**0.5)
        return [helper.make_node("MatMul", [x, w], [y])]
    if bits == 8:
        constants[w] = rng.integers(-127, 128, (WIDTH, WIDTH), np.int8)
        constants[f"{w}_scale"] = np.full(WIDTH, 1 / (73 * WIDTH**0.5), np.float32)
        dequantize = helper.make_node("DequantizeLinear", [w, f"{w}_scale"], [f"{w}_real"], axis=1)
        return [dequantize, helper.make_node("MatMul", [x, f"{w}_real"], [y])]
    blocks = WIDTH // BLOCK
    constants[w] = rng.integers(0, 256, (WIDTH, blocks, BLOCK // 2), np.uint8)
    constants[f"{w}_scale"] = np.full(WIDTH * blocks, 1 / (4.6 * WIDTH**0.5), np.float32)
    sizes = {"K": WIDTH, "N": WIDTH, "bits": bits, "block_size": BLOCK, "accuracy_level": 1}
    return [helper.make_node("MatMulNBits", [x, w, f"{w}_scale"], [y], domain="com.microsoft", **sizes)]


def weight_bytes(model: onnx.ModelProto) -> int:
    """Bytes of all constants."""
    return sum(numpy_helper.to_array(t).nbytes for t in model.graph.initializer)


def perceptron(batch: int = 64, width: int = 2048, layers: int = 4) -> Model:
    """Matmuls with bias and ReLU, to be quantized."""
    rng = np.random.default_rng(0)
    constants: dict[str, Array] = {}
    nodes = []
    for k in range(layers):
        constants[f"w{k}"] = rng.standard_normal((width, width), np.float32) / np.float32(width**0.5)
        constants[f"b{k}"] = rng.standard_normal(width, np.float32)
        nodes += [
            helper.make_node("MatMul", [f"x{k}", f"w{k}"], [f"m{k}"]),
            helper.make_node("Add", [f"m{k}", f"b{k}"], [f"a{k}"]),
            helper.make_node("Relu", [f"a{k}"], [f"x{k + 1}"]),
        ]
    inputs = {"x0": rng.standard_normal((batch, width), np.float32)}
    return _model(nodes, inputs, constants, (batch, width), output=f"x{layers}"), inputs


def _model(
    nodes: Sequence[onnx.NodeProto], inputs: dict[str, Array], constants: dict[str, Any], shape: tuple[int, ...],
    output: str = "y",
) -> onnx.ModelProto:  # fmt: skip
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape) for n, a in inputs.items()]
    result = helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)
    initializers = [numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()]
    graph = helper.make_graph(nodes, "generated", infos, [result], initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)
