"""Graphs of many equal parts: the text that is generated grows with what differs between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxc
from onnxc.codegen.cpp import sections

N = 40
KINDS = {"f32": TensorProto.FLOAT, "bool": TensorProto.BOOL, "i64": TensorProto.INT64, "f16": TensorProto.FLOAT16}


def info(name: str, shape: Sequence[int | str], dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def made(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: Mapping[str, Any] | None = None,
) -> onnx.ModelProto:
    known = [numpy_helper.from_array(np.asarray(v), name) for name, v in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), "wide", list(inputs), list(outputs), known)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def concat(rows: int | str, kind: str) -> onnx.ModelProto:
    """Of parts of two widths, along the last axis."""
    dtype, widths = KINDS[kind], [3 + k % 2 for k in range(N)]
    return made(
        [helper.make_node("Concat", [f"x{k}" for k in range(N)], ["y"], axis=1)],
        [info(f"x{k}", [rows, w], dtype) for k, w in enumerate(widths)],
        [info("y", [rows, sum(widths)], dtype)],
    )


def split(rows: int | str, kind: str) -> onnx.ModelProto:
    dtype = KINDS[kind]
    return made(
        [helper.make_node("Split", ["x"], [f"y{k}" for k in range(N)], axis=1, num_outputs=N)],
        [info("x", [rows, 3 * N], dtype)],
        [info(f"y{k}", [rows, 3], dtype) for k in range(N)],
    )


def drawn(model: onnx.ModelProto, rows: int) -> dict[str, np.ndarray[Any, Any]]:
    rng, feeds = np.random.default_rng(0), {}
    for x in model.graph.input:
        shape = [d.dim_value or rows for d in x.type.tensor_type.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(x.type.tensor_type.elem_type)
        feeds[x.name] = (rng.standard_normal(shape) * 3).astype(dtype)
    return feeds


@pytest.mark.parametrize(("rows", "kind"), [(4, "f32"), ("R", "f32"), (5, "bool"), (4, "i64"), (7, "f16")])
def test_many_parts_are_moved_by_one_piece_of_code(rows: int | str, kind: str) -> None:
    whole, parts = concat(rows, kind), split(rows, kind)
    feeds, given = drawn(whole, 6), drawn(parts, 6)
    joined, cut = onnxc.compile(whole), onnxc.compile(parts)
    assert joined.explain().source("k0").count("OX_PART") == 2  # one for each width
    if isinstance(rows, int):  # else nobody knows that they are small, and each is a kernel of its own
        assert cut.explain().source("k0").count("OX_PART") == 1
    np.testing.assert_array_equal(joined(**feeds)["y"], np.concatenate(list(feeds.values()), axis=1))
    for y, expected in zip(cut(**given).values(), np.split(given["x"], N, axis=1), strict=True):
        np.testing.assert_array_equal(y, expected)


def branches() -> onnx.ModelProto:
    """Pieces that differ, stencils and sums among them."""
    nodes, n = [], 12
    for k in range(n):
        nodes += [
            helper.make_node("Slice", ["x", f"from{k}", f"to{k}", "axis"], [f"part{k}"]),
            helper.make_node("Mul", [f"part{k}", f"scale{k % 5}"], [f"scaled{k}"]),
            helper.make_node("Softmax" if k % 3 else "Tanh", [f"scaled{k}"], [f"y{k}"]),
        ]
    constants: dict[str, Any] = {"axis": np.array([1])} | {f"scale{k}": np.float32(k + 0.1) for k in range(5)}
    constants |= {f"from{k}": np.array([k]) for k in range(n)} | {f"to{k}": np.array([k + 9]) for k in range(n)}
    return made(nodes, [info("x", [5, 32])], [info(f"y{k}", [5, 9]) for k in range(n)], constants)


def test_bits_do_not_depend_on_how_sections_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model = branches()
    feeds = drawn(model, 5)
    found = []
    for few in (0, 1000):
        monkeypatch.setattr(sections, "FEW", few)
        found.append(onnxc.compile(model, cache=False)(**feeds))
    for name, y in found[0].items():
        assert y.tobytes() == found[1][name].tobytes()
