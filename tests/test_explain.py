"""Reports: what a manifest says, counted and printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxc
from onnxc.errors import PackageError
from onnxc.report import Kernel, Memory, Origin, Report
from onnxc.reports.figures import count, size
from tests.small_models import parse

MANIFEST = {
    "name": "net",
    "cpu": "native",
    "threads": 2,
    "dim_names": {"s0": "batch"},
    "kernels": [
        {
            "function": "k0", "kind": "matmul",
            "origins": [[3, "MatMul", "fc/[bold]", "net.py:12"], [4, "Add", "", ""]],
            "reasons": ["epilogue: add", "epilogue: add"],
            "boundaries": [["float32[s0, 8]", "matmul is a template"]],
            "reads": 4096, "weights": 1024, "writes": "32*batch", "flops": 2_000_000,
        },
        {"function": "k1", "kind": "loops", "origins": [[5, "ReduceSum", "", ""]], "stores": ["float32[]"]},
        {"function": "k1", "kind": "loops", "origins": [{"number": 6, "op_type": "ReduceSum"}]},
    ],
    "memory": {"arena": 2048, "buffers": 2, "buffers_total": 4096, "weights": 1024},
    "stages": {"import": 0.1, "c++": 0.3},
    "sources": {"k0": "(void *arg) {\n}", "k1": "(void *arg) {\n  loop\n}"},
}  # fmt: skip


@pytest.fixture
def report() -> Report:
    return Report.from_manifest(MANIFEST)


def test_counts_and_fields(report: Report) -> None:
    assert report.counts == {"kernels": 3, "templates": 1, "fused": 2, "functions": 2}
    first = report.kernels[0]
    assert first.origins[0] == Origin(3, "MatMul", "fc/[bold]", "net.py:12")
    assert first.boundaries[0].type == "float32[batch, 8]" and first.label == "MatMul, Add"
    assert report.kernels[2].origins == (Origin(6, "ReduceSum"),)
    assert report.memory == Memory(2048, 2, 4096, 1024) and sum(report.stages.values()) == pytest.approx(0.4)


def test_sources(report: Report) -> None:
    assert report.source("k1") == report.source(2) == "static void k1(void *arg) {\n  loop\n}"
    with pytest.raises(KeyError, match="k0, k1"):
        report.source("k7")


def test_text_has_everything_and_no_markup(report: Report) -> None:
    text = str(report)
    for part in (
        "net: 3 kernel calls a run (2 loops, 1 matmul); cpu native, 2 threads",
        "1 template or routine calls, 2 fused kernels, 2 distinct functions",
        "arena 2 KB for 2 intermediates of 4 KB together; weights 1 KB",
        "compiled in 0.40 s: import 0.10, c++ 0.30",
        "n3 MatMul  fc/[bold]  net.py:12",
        "+ epilogue: add (2 times)",
        "> stores float32[batch, 8]: matmul is a template",
        "reads 4 KB (weights 1 KB), writes 32*batch B, 2 MFLOP",
    ):
        assert part in text
    assert "\x1b" not in text


def test_to_dict_is_json(report: Report) -> None:
    data = json.loads(json.dumps(report.to_dict()))
    assert data["counts"]["kernels"] == 3 and data["kernels"][0]["origins"][0]["name"] == "fc/[bold]"
    assert data["memory"]["arena"] == 2048 and data["sources"]["k0"]


def test_an_empty_manifest() -> None:
    empty = Report.from_manifest({})
    assert empty.counts["kernels"] == 0 and "0 kernel calls" in str(empty)


@pytest.mark.parametrize("wrong", [None, [1], {}, "x", 1e400])
def test_a_damaged_manifest_fails_before_it_is_shown(wrong: Any) -> None:
    """What is shown of a manifest is text, or a number; else its reading says that it is damaged."""
    choice = {"subject": wrong, "chosen": wrong, "candidates": [wrong, wrong]}
    for key in ("reads", "weights", "reasons", "choice", "boundaries", "takes", "steps", "turns"):
        manifest = {"kernels": [{"function": "k0", key: choice if key == "choice" else wrong}]}
        _shown(manifest | {"kernels": [{"function": "k0", key: [wrong]}]})
        _shown(manifest)
    for manifest in (
        {"stages": {"plan": wrong}},
        {"memory": {"arena": wrong, "weights": wrong}},
        {"kept": {"a": wrong}},
    ):
        _shown(manifest)


def _shown(manifest: dict[str, Any]) -> None:
    try:
        report = Report.from_manifest(manifest)
    except PackageError as error:
        assert "damaged" in str(error)
    else:
        assert str(report) and report.to_dict()


def test_numbers_for_people() -> None:
    assert [size(n) for n in (0, 999, 1024, 3 << 20, 5 << 30)] == ["0 B", "999 B", "1 KB", "3 MB", "5 GB"]
    assert count(1_500_000) == "1.5 M" and size("4*a + 8") == "(4*a + 8) B"
    assert Kernel(0, "k0", "loops", (Origin(0, "Cast"), Origin(1, "Cast"))).label == "2x Cast"


def fusable() -> onnx.ModelProto:
    weight = numpy_helper.from_array(np.random.default_rng(0).standard_normal((64, 32), np.float32), "W")
    scalars = [numpy_helper.from_array(np.asarray(v, np.float32), n) for n, v in (("one", 1), ("half", 0.5))]
    nodes = [
        helper.make_node("MatMul", ["x", "W"], ["a"], name="project"),
        helper.make_node("Add", ["a", "one"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("Mul", ["c", "half"], ["d"]),
        helper.make_node("ReduceSum", ["d"], ["y"], keepdims=0),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (128, 64))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ())
    graph = helper.make_graph(nodes, "fusable", [x], [y], [weight, *scalars])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def test_the_example_is_one_template_and_one_fused_kernel(tmp_path: Path) -> None:
    model = onnxc.compile(fusable())
    report = model.explain()
    assert {k: report.counts[k] for k in ("templates", "fused")} == {"templates": 1, "fused": 1}
    matmul, total = report.kernels
    assert [o.op_type for o in matmul.origins] == ["MatMul", "Add", "Relu", "Mul"]
    assert matmul.origins[0].name == "project" and matmul.reasons and matmul.boundaries[0].reason
    assert matmul.writes == 128 * 32 * 4 and total.writes == 4
    assert report.source(0).startswith("static void ")
    assert "c++" in report.stages and report.memory.weights >= 64 * 32 * 4
    model.save(tmp_path / "m.onnxc")
    assert onnxc.load(tmp_path / "m.onnxc").explain().kernels == report.kernels


def test_a_result_in_another_shape_is_written_and_not_read() -> None:
    text = """(float[4, 6] x) => (float[24] y) {
      k = Constant<value_ints = [-1]>() axis = Constant<value = int64 {1}>() s = CumSum(x, axis) y = Reshape(s, k) }"""
    (kernel,) = onnxc.compile(parse(text)).explain().kernels
    assert (kernel.reads, kernel.writes) == (96, 96)
