"""Mixtures of experts, and other operators of com.microsoft, against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import helper

import onnxc
from onnxc.errors import UnsupportedError

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(8)
E, H, F = 4, 8, 6


def both(name: str, inputs: list[Array | None], outputs: int = 1, tolerance: float = 1e-5, **attrs: Any) -> None:
    """The op in onnxc, with its first two dims open, as in onnxruntime."""
    given = {f"x{k}": x for k, x in enumerate(inputs) if x is not None}
    node = helper.make_node(
        name, ["" if x is None else f"x{k}" for k, x in enumerate(inputs)], [f"y{k}" for k in range(outputs)],
        domain="com.microsoft", **attrs,
    )  # fmt: skip
    types = {n: helper.np_dtype_to_tensor_dtype(x.dtype) for n, x in given.items()}
    shapes = {n: ["n", *x.shape[1:]] if n == "x0" else x.shape for n, x in given.items()}
    infos = [helper.make_tensor_value_info(n, types[n], shapes[n]) for n in given]
    results = [onnx.ValueInfoProto(name=f"y{k}") for k in range(outputs)]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "g", infos, results), opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    wanted = session.run(None, given)
    found = onnxc.compile(model)(**given)
    for w, f in zip(wanted, found.values(), strict=True):
        assert w.dtype == f.dtype and w.shape == f.shape
        np.testing.assert_allclose(f, w, rtol=tolerance, atol=tolerance)


def f32(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("normalize", [0, 1])
@pytest.mark.parametrize("kind, k, fusion", [("relu", 2, 0), ("gelu", 1, 0), ("silu", 3, 0), ("swiglu", 2, 1)])
def test_moe(kind: str, k: int, fusion: int, normalize: int) -> None:
    wide = 2 * F if fusion else F
    inputs = [f32(5, H), f32(5, E), f32(E, wide, H), f32(E, wide), f32(E, H, F), f32(E, H)]
    more = (
        {"swiglu_fusion": fusion, "swiglu_limit": 0.7, "activation_alpha": 1.7, "activation_beta": 1.0}
        if fusion
        else {}
    )
    both("MoE", inputs, k=k, activation_type=kind, normalize_routing_weights=normalize, **more)


@pytest.mark.parametrize("bits, block, zeros", [(4, 0, False), (8, 0, False), (4, 16, False), (8, 32, True)])
def test_quantized_moe(bits: int, block: int, zeros: bool) -> None:
    hidden, inner = 32, 64

    def packed(rows: int, columns: int) -> list[Array | None]:
        groups = columns // block if block else 1
        scales = (RNG.random((E, rows, groups)) * 0.1).astype(np.float32)
        return [
            RNG.integers(0, 256, (E, rows, columns * bits // 8)).astype(np.uint8),
            scales if block else scales[:, :, 0],
            RNG.integers(0, 256, (E, rows, -(-groups * bits // 8))).astype(np.uint8) if zeros else None,
        ]

    w1, s1, z1 = packed(2 * inner, hidden)
    w2, s2, z2 = packed(hidden, inner)
    inputs = [f32(7, hidden), f32(7, E), w1, s1, f32(E, 2 * inner), w2, s2, f32(E, hidden), None, None, None, z1, z2]
    while inputs[-1] is None:
        inputs.pop()
    both("QMoE", inputs, k=2, activation_type="swiglu", swiglu_fusion=1, expert_weight_bits=bits,
         normalize_routing_weights=1, tolerance=2e-3, **({"block_size": block} if block else {}))  # fmt: skip


def test_what_experts_are_not() -> None:
    with pytest.raises(UnsupportedError, match="sparse_mixer"):
        both("MoE", [f32(5, H), f32(5, E), f32(E, F, H), f32(E, F), f32(E, H, F), f32(E, H)], k=2, use_sparse_mixer=1)


def test_a_number_of_experts_that_a_run_tells() -> None:
    model = onnxc.compile(
        onnx.parser.parse_model(
            """<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>
            g (float[t, d] x, float[t, e] r, float[e, f, d] first, float[e, d, f] second) => (y) {
              y = com.microsoft.MoE <k = 1> (x, r, first, "", second) }"""
        )
    )
    for tokens, experts in ((3, 2), (5, 2), (3, 4)):
        x, r, first, second = f32(tokens, H), f32(tokens, experts), f32(experts, F, H), f32(experts, H, F)
        at = r.argmax(1)
        inner = np.maximum(np.einsum("td,tfd->tf", x, first[at]), 0)
        share = np.take_along_axis(np.exp(r) / np.exp(r).sum(1, keepdims=True), at[:, None], 1)
        wanted = share * np.einsum("tf,tdf->td", inner, second[at])
        np.testing.assert_allclose(model(x, r, first, second)["y"], wanted, rtol=1e-4, atol=1e-5)


def test_ops_that_became_standard() -> None:
    both("Trilu", [f32(4, 5)], upper=0)
    both("Unique", [np.array([2, 1, 1, 3, 4, 3], np.float32)], 3)
    both("GridSample", [f32(1, 2, 4, 4), f32(1, 3, 3, 2)], mode="bilinear")
    both("CausalConvWithState", [f32(2, 3, 7), f32(3, 1, 4), f32(3), f32(2, 3, 3)], 2, activation="silu", ndim=1)


def test_gated_relative_position_bias() -> None:
    """Against the formula: onnxruntime has no kernel of it for the CPU."""
    batch, heads, steps, size, d = 2, 3, 5, 4, 8
    q, qb, rel = f32(batch, steps, heads * size), f32(heads * size), f32(1, heads, steps, steps)
    w, bias, eco = f32(size, d), f32(d), f32(1, heads, 1, 1)
    names = ["q", "qb", "rel", "w", "bias", "eco"]
    arrays = dict(zip(names, (q, qb, rel, w, bias, eco), strict=True))
    node = helper.make_node("GatedRelativePositionBias", names, ["y"], domain="com.microsoft", num_heads=heads)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(n, 1, a.shape) for n, a in arrays.items()],
        [onnx.ValueInfoProto(name="y")],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    found = onnxc.compile(helper.make_model(graph, opset_imports=opsets, ir_version=9))(**arrays)["y"]
    layers = (q + qb).reshape(batch, steps, heads, size).transpose(0, 2, 1, 3)
    gates = 1 / (1 + np.exp(-(layers @ w + bias).reshape(batch, heads, steps, 2, d // 2).sum(-1)))
    u, r = gates[..., :1], gates[..., 1:]
    np.testing.assert_allclose(found, (u * (r * eco - 1) + 2) * rel, rtol=1e-5)
