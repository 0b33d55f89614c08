"""Chains of convolutions that run band by band: the same bits as one kernel each, at any number of threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

import onnxc
from onnxc.compiler.stages import Stages, generate
from onnxc.frontends import onnx_file
from onnxc.planner import chains
from onnxc.planner.groups import FusionOptions
from onnxc.runtime.cpu import level

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Block:
    """expand 1x1 -> depthwise -> project 1x1, each with its own activation, on an image of `size`."""

    channels: tuple[int, int, int, int]  # in, expanded, after the depthwise convolution, out
    size: tuple[int, int]
    kernel: tuple[int, int] = (3, 3)
    strides: tuple[int, int] = (1, 1)
    dilations: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (1, 1, 1, 1)
    batch: int = 1
    parts: str = "PDP"
    residual: bool = False
    open_batch: bool = False
    open_size: bool = False


def model(b: Block) -> onnx.ModelProto:
    """The block between two convolutions that are no part of a chain."""
    rng = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []

    def conv(x: str, y: str, co: int, ci: int, k: tuple[int, int], **attributes: Any) -> str:
        w = rng.standard_normal((co, ci, *k)).astype(np.float32) / np.sqrt(ci * k[0] * k[1])
        constants.append(numpy_helper.from_array(w.astype(np.float32), f"{y}_w"))
        constants.append(numpy_helper.from_array(rng.standard_normal(co).astype(np.float32), f"{y}_b"))
        nodes.append(helper.make_node("Conv", [x, f"{y}_w", f"{y}_b"], [y], **attributes))
        return y

    def relu(x: str) -> str:
        nodes.append(helper.make_node("Relu", [x], [f"{x}_r"]))
        return f"{x}_r"

    c, e, d, o = b.channels
    value = start = relu(conv("x", "first", c, 5, (3, 3), pads=[1, 1, 1, 1]))
    if b.parts.startswith("P"):
        value = relu(conv(value, "expand", e, c, (1, 1)))
    else:
        e = c
    value = relu(
        conv(value, "depthwise", d, 1, b.kernel, strides=b.strides, dilations=b.dilations, pads=b.pads, group=e)
    )
    if b.parts.endswith("P"):
        value = conv(value, "project", o, d, (1, 1))
    if b.residual:
        nodes.append(helper.make_node("Add", [value, start], ["sum"]))
        value = "sum"
    nodes.append(helper.make_node("GlobalAveragePool", [value], ["mean"]))
    nodes.append(helper.make_node("Neg", [value], ["y"]))
    x = helper.make_tensor_value_info(
        "x", 1, ("n" if b.open_batch else b.batch, 5, *(("h", "w") if b.open_size else b.size))
    )
    outputs = [helper.make_tensor_value_info(name, 1, None) for name in ("y", "mean")]
    graph = helper.make_graph(nodes, "block", [x], outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def results(compiled: onnxc.CompiledModel, x: F32) -> Sequence[F32]:
    """Both outputs."""
    return [np.array(found) for found in compiled(x)]


BLOCKS = [
    Block((16, 96, 96, 24), (31, 29), strides=(2, 2)),
    Block((24, 70, 70, 24), (14, 14), residual=True, batch=3),
    Block((7, 33, 33, 9), (17, 13), (5, 5), (1, 1), (1, 1), (2, 2, 2, 2)),
    Block((8, 20, 40, 12), (9, 40), (3, 3), (2, 1), (2, 1), (3, 0, 0, 1)),
    Block((16, 48, 48, 16), (40, 7), (7, 3), (3, 2), (1, 2), (0, 2, 5, 1), 2),
    Block((16, 48, 48, 16), (40, 11), parts="PD"),
    Block((33, 33, 33, 50), (19, 30), parts="DP", strides=(2, 2)),
    Block((5, 17, 17, 3), (1, 1)),
    Block((16, 48, 48, 24), (31, 9), strides=(2, 1), batch=3, open_batch=True),
    Block((16, 48, 48, 24), (31, 9), strides=(2, 1), batch=3, open_batch=True, open_size=True),
]


@pytest.mark.parametrize("b", BLOCKS)
def test_chains_change_no_bit(b: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain stores what its convolutions store one by one, at any number of threads."""
    m = model(b)
    x = np.random.default_rng(1).standard_normal((b.batch, 5, *b.size)).astype(np.float32)
    monkeypatch.setattr(chains, "LEAST_BYTES", 1 << 60)
    want = results(onnxc.compile(m, cache=False, threads=2), x)
    monkeypatch.setattr(chains, "LEAST_BYTES", 1)
    for threads in (1, 3):
        compiled = onnxc.compile(m, cache=False, threads=threads)
        for _ in range(5):  # what a call leaves in the scratch is no part of the next one
            compiled(-x[: 1 if b.open_batch else None])
            got = results(compiled, x)
            assert all(np.array_equal(g, w) for g, w in zip(got, want, strict=True)), b
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(m.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for g, w in zip(got, session.run(["y", "mean"], {"x": x}), strict=True):
        assert np.abs(g - w).max() <= 1e-5 * np.sqrt((w.astype(np.float64) ** 2).mean()), b


def test_what_lies_between_has_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain is one call, says so, and its large tensors are not in the memory plan."""
    m = model(BLOCKS[0])
    sizes = []
    for room in (1 << 60, 1):
        monkeypatch.setattr(chains, "LEAST_BYTES", room)
        program = generate(onnx_file.load(m), level(), FusionOptions(), Stages())
        sizes.append(program.arena_bytes)
    (chain,) = [c for c in program.calls if c.kind == "conv chain of 3"]
    assert "3 convolutions run band by band" in chain.reasons
    assert sum("Conv" in str(o) for o in chain.origin) == 3
    assert sizes[1] < sizes[0] / 2


def test_open_images_are_taken_for_photographs() -> None:
    """Large where the model is given, and small behind many strides: of the latter there is no chain."""
    for channels, kinds in ((96, 1), (4, 0)):
        b = Block((16, channels, channels, 24), (31, 29), strides=(2, 2), open_batch=True, open_size=True)
        program = generate(onnx_file.load(model(b)), level(), FusionOptions(), Stages())
        assert sum(c.kind == "conv chain of 3" for c in program.calls) == kinds


def test_single_taps_reach_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their dilation had the scratch be that of another shape than what a chain runs: too small for a planar image."""
    monkeypatch.setattr(chains, "LEAST_BYTES", 1)
    m = model(replace(BLOCKS[0], channels=(4, 96, 96, 24), batch=2))
    del m.graph.node[:2]  # the image is the model's input
    m.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 4
    m.graph.node[0].input[0] = "x"
    m.graph.node[0].attribute.append(helper.make_attribute("dilations", [2, 3]))
    program = generate(onnx_file.load(m), level(), FusionOptions(), Stages())
    assert any(c.kind == "conv chain of 3" for c in program.calls)
    assert "ConvDilated" not in program.source


def test_other_readers_forbid_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody else reads, or what is an output of the model, is stored."""
    monkeypatch.setattr(chains, "LEAST_BYTES", 1)
    m = model(BLOCKS[5])
    m.graph.output.append(helper.make_tensor_value_info("expand_r", 1, None))
    program = generate(onnx_file.load(m), level(), FusionOptions(), Stages())
    assert not any("chain" in c.kind for c in program.calls)
