"""Random models, of a fixed set of seeds; `make fuzz` looks longer. And what makes such a look worth its time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import onnxc
from tests.fuzz import shadows
from tests.fuzz.__main__ import one
from tests.fuzz.catalogue import model_of
from tests.fuzz.judge import difference, judge
from tests.fuzz.model import Draw, Input, Model
from tests.fuzz.oracle import Oracle, Refused, reads
from tests.fuzz.shrink import shrink
from tests.fuzz.store import replay, save

CHUNK = 24  # models of a test


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 4 * CHUNK, CHUNK))
def test_models_of_fixed_seeds(first: int, oracle: Oracle, tmp_path: Path) -> None:
    seen = Counter[str]()
    for seed in range(first, first + CHUNK):
        verdict, _ = one(seed, oracle, tmp_path)
        story = tmp_path / str(seed) / "verdict.txt"
        assert not verdict.is_fault, story.read_text() if story.exists() else verdict
        seen[verdict.kind] += 1
    assert seen["same"] >= 0.75 * CHUNK, seen


def test_a_seed_is_always_the_same_model(oracle: Oracle) -> None:
    first, second = (model_of(1, o) for o in (oracle, Oracle()))
    assert first.nodes == second.nodes
    assert first.outputs == second.outputs
    for name, array in first.arrays.items():
        np.testing.assert_array_equal(array, second.arrays[name])


def test_models_are_valid_and_of_many_kinds(oracle: Oracle) -> None:
    ops, dynamic = Counter[str](), 0
    for seed in range(150):
        model = model_of(seed, oracle)
        ops.update(n.op_type for n in model.nodes)
        dynamic += any(isinstance(d, str) for i in model.inputs for d in i.dims)
        if model.outputs:
            onnx.checker.check_model(model.proto(model.run(oracle, model.arrays, steady=False)))
    assert len(ops) > 80, ops
    assert dynamic > 10
    assert {"Loop", "If", "Scan", "Conv", "QuantizeLinear", "Cast"} <= ops.keys()


def _model(nodes: list[onnx.NodeProto], arrays: dict[str, np.ndarray], outputs: list[str]) -> Model:
    inputs = [Input(n, a.dtype, a.shape, Draw()) for n, a in arrays.items()]
    return Model(18, {}, inputs, {}, nodes, outputs, arrays)


@pytest.mark.parametrize(
    ("ops", "values"),
    [(["Sigmoid", "Floor"], [0.0, 60.0]), (["Exp", "Cos"], [15.0, 16.0]), (["Tanh", "ArgMax"], [30.0, 31.0])],
    ids=str,
)
def test_ill_conditioned_nodes_are_refused(ops: list[str], values: list[float], oracle: Oracle) -> None:
    """A floor of what rounds to 1; the cosine of a large number; the best of two that are equal but for rounding."""
    nodes = [helper.make_node(op, [f"v{k}"], [f"v{k + 1}"]) for k, op in enumerate(ops)]
    model = _model(nodes, {"v0": np.array(values, np.float32)}, ["v2"])
    with pytest.raises(Refused, match="ill-conditioned"):
        model.run(oracle, model.arrays)


def test_whole_numbers_are_sure(oracle: Oracle) -> None:
    """Sums of small whole numbers are the same in any order, and may decide."""
    nodes = [helper.make_node("MatMul", ["x", "x"], ["y"]), helper.make_node("ArgMax", ["y"], ["z"])]
    model = _model(nodes, {"x": np.ones((3, 3), np.float32)}, ["z"])
    run = model.run(oracle, model.arrays)
    assert shadows.error(run.values["y"], [s["y"] for s in run.shadows]) == 0  # type: ignore[arg-type]


def test_what_differs() -> None:
    want = np.array([1.0, np.nan, np.inf, 0.0], np.float32)
    assert not difference(want.copy(), want, [want])
    for at, wrong in [(0, 1.01), (1, 0.0), (2, -np.inf), (3, 1e-3), (0, np.nan)]:
        got = want.copy()
        got[at] = wrong
        assert difference(got, want, [want]), (at, wrong)
    assert difference(want.astype(np.float64), want, [want])
    assert difference(want[None], want, [want])


def test_a_fault_is_shrunk_and_stored(oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that is wrong about Tanh: of six nodes one is left, with what shows it."""
    ops = ["Abs", "Sqrt", "Tanh", "Neg", "Sigmoid", "Relu"]
    nodes = [helper.make_node(op, [f"v{k}"], [f"v{k + 1}"]) for k, op in enumerate(ops)]
    nodes.append(helper.make_node("Add", ["v1", "v6"], ["v7"]))
    model = _model(nodes, {"v0": np.linspace(0.5, 2, 12, dtype=np.float32).reshape(3, 4)}, ["v7", "v2"])
    compile_ = onnxc.compile

    def broken(proto: onnx.ModelProto, **options: Any) -> Any:
        wrong = onnx.ModelProto()
        wrong.CopyFrom(proto)
        for node in wrong.graph.node:
            node.op_type = "Sin" if node.op_type == "Tanh" else node.op_type
        return compile_(wrong, **options)

    monkeypatch.setattr(onnxc, "compile", broken)
    verdict = judge(model, oracle)
    assert verdict.kind == "wrong"
    small, verdict = shrink(model, verdict, oracle)
    assert [n.op_type for n in small.nodes] == ["Tanh"]
    assert small.arrays[small.inputs[0].name].size == 1
    assert "Tanh" in save(small, verdict, oracle, tmp_path)
    assert replay(tmp_path, oracle).kind == "wrong"
    monkeypatch.undo()
    assert replay(tmp_path, oracle).kind == "same"


def test_what_a_subgraph_reads_is_known() -> None:
    body = helper.make_graph(
        [helper.make_node("Add", ["a", "outer"], ["b"])], "g", [], [helper.make_empty_tensor_value_info("b")]
    )
    node = helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body)
    assert reads(node) == ["c", "a", "outer"]
