"""Tree ensembles of ai.onnx.ml: compiled, against onnxruntime; and as an attacker would write them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import onnxc
from onnxc.errors import LimitError, ModelError, OnnxcError, ShapeError
from onnxc.export import to_onnx
from onnxc.frontends.onnx_file import load
from onnxc.ir import dtypes
from onnxc.ops import common
from onnxc.ops.ml_tables import EQ, GT, GTE, LEQ, LT, NEQ, Nodes, table_of, with_members
from onnxc.passes.decompose import decompose
from onnxc.primitives.interpret import interpret
from onnxc.primitives.trees import from_words
from tests.tree_models import BRANCHES, Attributes, answers, features, forest, forest_5, one_op

WIDTH = 5
FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64
Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.every_target


def agree(model: onnx.ModelProto, x: Array, rtol: float = 1e-5, atol: float = 1e-5, compiled: bool = False) -> None:
    """numpy's meaning of the model's primitives gives onnxruntime's answers, and so does the compiled model."""
    wanted = answers(model, [x])
    for got in (interpret(decompose(load(model)), [x]), list(onnxc.compile(model)(x).values()) if compiled else ()):
        for a, b in zip(got, wanted, strict=bool(got)):
            assert a.dtype == b.dtype and a.shape == b.shape
            np.testing.assert_allclose(np.asarray(a, np.float64), b.astype(np.float64), rtol, atol)


def regressor(attrs: Attributes, x: Array, **more: Any) -> onnx.ModelProto:
    return one_op("TreeEnsembleRegressor", [x], {**attrs, **more}, [FLOAT], dynamic=True)


def classifier(attrs: Attributes, x: Array, labels: list[int], **more: Any) -> onnx.ModelProto:
    return one_op(
        "TreeEnsembleClassifier", [x], {**attrs, "classlabels_int64s": labels, **more}, [INT, FLOAT], dynamic=True
    )


@pytest.mark.parametrize("rows", [1, 7, 17, 131])
@pytest.mark.parametrize(("trees", "depth", "early"), [(1, 0, 0.0), (3, 1, 0.0), (13, 4, 0.1), (8, 15, 0.4)])
def test_sizes(rows: int, trees: int, depth: int, early: float) -> None:
    rng = np.random.default_rng(rows)
    x = features(rng, rows, WIDTH)
    agree(regressor(forest(rng, trees, depth, WIDTH, early=early), x), x, compiled=trees > 1)


def test_a_large_forest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of its votes is no larger than the model itself: no limit is set to it."""
    monkeypatch.setattr(common, "TABLE_ELEMENTS", 100)
    rng = np.random.default_rng(5)
    x = features(rng, 7, WIDTH)
    agree(regressor(forest(rng, 13, 4, WIDTH, targets=3, votes="all"), x, n_targets=3), x)


@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize(("targets", "votes"), [(1, "all"), (3, "all"), (3, "tree"), (3, "leaf"), (12, "leaf")])
def test_aggregates(aggregate: str, targets: int, votes: str) -> None:
    rng = np.random.default_rng(targets)
    x = features(rng, 37, WIDTH)
    base = [0.1 * i + 0.5 for i in range(targets)]
    attrs = forest(rng, 9, 4, WIDTH, targets, votes)
    agree(regressor(attrs, x, aggregate_function=aggregate, base_values=base), x, compiled=targets == 3)
    agree(regressor(attrs, x, aggregate_function=aggregate), x)


@pytest.mark.parametrize("mode", [*BRANCHES, "all"])
@pytest.mark.parametrize("missing", [None, 0.5])
@pytest.mark.parametrize("nan", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_comparisons(mode: str, missing: float | None, nan: float, dtype: Any) -> None:
    """Inputs that equal splits, and missing ones."""
    rng = np.random.default_rng(len(mode))
    x = features(rng, 64, WIDTH, dtype, nan, whole=True)
    modes = BRANCHES if mode == "all" else [mode]
    attrs = forest(rng, 9, 4, WIDTH, modes=modes, missing=missing)
    agree(regressor(attrs, x), x, compiled=mode in ("all", "BRANCH_LT") and bool(nan))


@pytest.mark.parametrize("mode", BRANCHES)
def test_splits_at_the_ends_of_the_numbers(mode: str) -> None:
    """One node; x and the split are each of zero, its neighbours, infinities, NaN and the greatest numbers."""
    tiny, huge = np.float32(1e-45), np.finfo(np.float32).max
    numbers = np.array([-np.inf, -huge, -1, -tiny, -0.0, 0.0, tiny, 1, huge, np.inf, np.nan], np.float32)
    for split in numbers:
        for missing in (0, 1):
            attrs: Attributes = {
                "nodes_treeids": [0] * 3, "nodes_nodeids": [0, 1, 2], "nodes_featureids": [0] * 3,
                "nodes_modes": [mode, "LEAF", "LEAF"], "nodes_values": [float(split), 0.0, 0.0],
                "nodes_truenodeids": [1, 0, 0], "nodes_falsenodeids": [2, 0, 0], "n_targets": 1,
                "nodes_missing_value_tracks_true": [missing, 0, 0], "target_treeids": [0, 0],
                "target_nodeids": [1, 2], "target_ids": [0, 0], "target_weights": [1.0, 2.0],
            }  # fmt: skip
            x = numbers.reshape(-1, 1)
            model = regressor(attrs, x)
            got = interpret(decompose(load(model)), [x])[0]
            np.testing.assert_array_equal(got, answers(model, [x])[0], err_msg=f"{mode} {split} {missing}")


def test_splits_of_doubles_for_floats() -> None:
    """x <= s with a float x is x <= the next float below s."""
    below = np.float32(0.1)
    splits = np.array([0.1, np.nextafter(0.1, 0), np.float64(below)])
    count = len(splits)
    for mode in (LEQ, LT, GTE, GT, EQ, NEQ):
        nodes = Nodes(
            np.full(count, mode), np.zeros(count, np.int64), splits, np.full(count, -1), np.full(count, -2),
            np.zeros(count, bool),
        )  # fmt: skip
        table = table_of(nodes, np.arange(count), 2, dtypes.float32)
        rows = from_words(table.words, dtypes.float32)
        for x in (np.nextafter(below, np.float32(0)), below, np.nextafter(below, np.float32(1))):
            v = np.float64(x)
            wanted = [v <= splits, v < splits, v >= splits, v > splits, v == splits, v != splits][mode]
            for k in range(count):
                node = rows[k]
                first = x == node["split"] if node["feature"] & (1 << 30) else x <= node["split"]
                leaf = rows[node["child"] + (not first)]["leaf"]
                assert (leaf == 0) == wanted[k], (mode, x, splits[k])


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_integers_are_compared_as_floats(dtype: Any) -> None:
    """onnxruntime has kernels of integers for classifiers."""
    rng = np.random.default_rng(4)
    x = features(rng, 64, WIDTH, dtype, whole=True)
    agree(classifier(forest(rng, 4, 4, WIDTH, 3, kind="class"), x, [0, 1, 2]), x)


@pytest.mark.parametrize("transform", ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"])
@pytest.mark.parametrize("targets", [1, 2, 3])
def test_transforms(transform: str, targets: int) -> None:
    rng = np.random.default_rng(targets)
    x = features(rng, 17, WIDTH)
    agree(regressor(forest(rng, 2, 3, WIDTH, targets), x, post_transform=transform), x)


@pytest.mark.parametrize("targets", [1, 2])
def test_probit(targets: int) -> None:
    """Away from one half, where the approximation loses all digits of float32."""
    rng = np.random.default_rng(3)
    x = features(rng, 17, WIDTH)
    attrs = forest(rng, 1, 3, WIDTH, targets)
    key = "target_weights"
    attrs[key] = [0.1 + 0.25 * (k % 2) + 0.01 * (k % 7) + 0.5 * (k % 3 == 0) for k in range(len(attrs[key]))]
    agree(regressor(attrs, x, post_transform="PROBIT"), x, 1e-3, 1e-3)


def binary_cases() -> Iterator[tuple[str, bool, str, list[float]]]:
    for votes in ("all", "0", "1", "leaf"):
        for positive in (True, False):
            for transform in ("NONE", "LOGISTIC", "SOFTMAX"):
                for base in ([], [0.1], [0.1, -0.2]):
                    if votes != "leaf" or len(base) != 1:  # what onnxruntime shows then is not initialized
                        yield votes, positive, transform, base


@pytest.mark.parametrize(("votes", "positive", "transform", "base"), list(binary_cases()))
def test_two_classes(votes: str, positive: bool, transform: str, base: list[float]) -> None:
    """What onnxruntime makes of one score or two depends on which classes have votes, and on their signs."""
    rng = np.random.default_rng(2)
    x = features(rng, 33, WIDTH)
    attrs = forest(rng, 4, 2, WIDTH, 2, votes, positive=positive, kind="class")
    more = {"base_values": base} if base else {}
    agree(classifier(attrs, x, [3, 10], post_transform=transform, **more), x)


@pytest.mark.parametrize("votes", ["all", "tree", "leaf"])
@pytest.mark.parametrize("based", [False, True])
@pytest.mark.parametrize("classes", [1, 3, 5])
def test_classes(votes: str, based: bool, classes: int) -> None:
    rng = np.random.default_rng(classes)
    x = features(rng, 33, WIDTH)
    attrs = forest(rng, 15, 3, WIDTH, classes, votes, kind="class")
    more = {"base_values": [0.1 * i - 0.05 for i in range(classes)]} if based else {}
    agree(classifier(attrs, x, [7 * i + 3 for i in range(classes)], **more), x, compiled=classes == 3)


def test_labels_of_strings() -> None:
    rng = np.random.default_rng(9)
    x = features(rng, 33, WIDTH)
    attrs = {**forest(rng, 4, 3, WIDTH, 3, kind="class"), "classlabels_strings": ["ant", "bee", "cät"]}
    model = one_op("TreeEnsembleClassifier", [x], attrs, [TensorProto.STRING, FLOAT])
    wanted, got = answers(model, [x]), list(onnxc.compile(model)(x).values())
    assert got[0].tolist() == wanted[0].tolist()
    np.testing.assert_allclose(got[1], wanted[1], 1e-5, 1e-6)


@pytest.mark.parametrize("modes", [(0,), (0, 1, 2, 3, 4, 5), (6,), (0, 6)])
@pytest.mark.parametrize("missing", [None, 0.5])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_version_5(modes: tuple[int, ...], missing: float | None, dtype: Any) -> None:
    rng = np.random.default_rng(len(modes))
    x = features(rng, 23, WIDTH, dtype, 0.2 if missing else 0.0, whole=True)
    kind = FLOAT if dtype is np.float32 else TensorProto.DOUBLE
    for aggregate in range(4):
        for targets in (1, 3):
            attrs = forest_5(rng, 5, 4, WIDTH, targets, modes, dtype, missing)
            model = one_op("TreeEnsemble", [x], {**attrs, "aggregate_function": aggregate}, [kind], 5)
            graph = decompose(load(model))
            np.testing.assert_allclose(interpret(graph, [x])[0], answers(model, [x])[0], 1e-5, 1e-6)
    agree(model, x, compiled=True)


def test_version_5_of_half_precision() -> None:
    rng = np.random.default_rng(1)
    x = features(rng, 23, WIDTH, np.float16, whole=True)
    attrs = forest_5(rng, 5, 4, WIDTH, 2, (0, 6), np.float16)
    model = one_op("TreeEnsemble", [x], attrs, [TensorProto.FLOAT16], 5)
    wide = {k: v.astype(np.float32) if k in ("nodes_splits", "leaf_weights", "membership_values") else v
            for k, v in attrs.items()}  # fmt: skip
    wanted = answers(one_op("TreeEnsemble", [x.astype(np.float32)], wide, [FLOAT], 5), [x.astype(np.float32)])[0]
    got = onnxc.compile(model)(x)["y0"]
    assert got.dtype == np.float16
    np.testing.assert_allclose(got.astype(np.float32), wanted, 2e-3, 2e-3)


def test_shared_nodes() -> None:
    """Converters write set membership as a chain of equalities whose true children are one node."""
    attrs: Attributes = {
        "nodes_treeids": [0] * 5, "nodes_nodeids": list(range(5)), "nodes_featureids": [0] * 5,
        "nodes_modes": ["BRANCH_EQ", "BRANCH_EQ", "BRANCH_LEQ", "LEAF", "LEAF"],
        "nodes_values": [1.0, 2.0, 0.0, 0.0, 0.0], "nodes_truenodeids": [2, 2, 3, 0, 0],
        "nodes_falsenodeids": [1, 4, 4, 0, 0], "n_targets": 1, "target_treeids": [0, 0], "target_nodeids": [3, 4],
        "target_ids": [0, 0], "target_weights": [1.0, 2.0],
    }  # fmt: skip
    x = np.array([[1.0], [2.0], [3.0], [0.0]], np.float32)
    got = interpret(decompose(load(regressor(attrs, x))), [x])[0]
    assert got.ravel().tolist() == [2.0, 2.0, 2.0, 2.0]
    attrs["nodes_values"][2] = 1.5
    assert interpret(decompose(load(regressor(attrs, x))), [x])[0].ravel().tolist() == [1.0, 2.0, 2.0, 2.0]


def test_members() -> None:
    """A set is searched in about log2 steps; an empty one has no members."""
    one = np.zeros(1, np.int64)
    nodes = Nodes(np.array([6]), one, np.zeros(1), one - 1, one - 2, np.zeros(1, bool))
    values = np.arange(0, 2000, 2, dtype=np.float64)
    table = table_of(with_members(nodes, [values]), one, 2, dtypes.float64)
    assert table.steps == 11
    empty = table_of(with_members(nodes, [np.zeros(0)]), one, 2, dtypes.float64)
    assert empty.steps == 1 and np.isnan(from_words(empty.words, dtypes.float64)["split"][0])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_spelling(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    x = features(rng, 13, WIDTH, dtype, 0.2, whole=True)
    model = regressor(forest(rng, 9, 5, WIDTH, modes=BRANCHES, missing=0.5), x)
    spelled = to_onnx(decompose(load(model)))
    np.testing.assert_allclose(answers_named(spelled, x), answers(model, [x])[0], 1e-5, 1e-6)


def answers_named(model: onnx.ModelProto, x: Array) -> Array:
    renamed = onnx.ModelProto()
    renamed.CopyFrom(model)
    assert [i.name for i in renamed.graph.input] == ["x0"]
    return np.asarray(answers(renamed, [x])[0])


def test_repeats() -> None:
    """The same bits with any number of threads, and for a row alone."""
    rng = np.random.default_rng(6)
    x = features(rng, 301, WIDTH)
    compiled = onnxc.compile(regressor(forest(rng, 20, 6, WIDTH, 3), x), threads=2)
    first = compiled(x)["y0"]
    compiled.threads = 1
    assert compiled(x)["y0"].tobytes() == first.tobytes()
    assert compiled(x[200:201])["y0"].tobytes() == first[200:201].tobytes()


# ---------------------------------------------------------------- hostile


def small(**changed: Any) -> Attributes:
    """A tree of one node and two leaves, with some attributes replaced."""
    return {
        "nodes_treeids": [0, 0, 0], "nodes_nodeids": [0, 1, 2], "nodes_featureids": [0, 0, 0],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"], "nodes_values": [0.5, 0.0, 0.0],
        "nodes_truenodeids": [1, 0, 0], "nodes_falsenodeids": [2, 0, 0], "n_targets": 1, "target_treeids": [0, 0],
        "target_nodeids": [1, 2], "target_ids": [0, 0], "target_weights": [1.0, 2.0], **changed,
    }  # fmt: skip


HOSTILE: dict[str, Attributes] = {
    "a cycle of one": small(nodes_truenodeids=[0, 0, 0]),
    "a cycle of two": small(nodes_modes=["BRANCH_LEQ", "BRANCH_LEQ", "LEAF"], nodes_falsenodeids=[2, 2, 0]),
    "a child that is not there": small(nodes_truenodeids=[9, 0, 0]),
    "a child below zero": small(nodes_truenodeids=[-1, 0, 0]),
    "a child of another tree": small(nodes_treeids=[0, 1, 1]),
    "two nodes of one number": small(nodes_nodeids=[0, 1, 1]),
    "a short list of values": small(nodes_values=[0.5]),
    "a long list of modes": small(nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF", "LEAF"]),
    "an unknown mode": small(nodes_modes=["BRANCH_SIDEWAYS", "LEAF", "LEAF"]),
    "a feature below zero": small(nodes_featureids=[-5, 0, 0]),
    "a feature out of reach": small(nodes_featureids=[1 << 40, 0, 0]),
    "a feature that x lacks": small(nodes_featureids=[7, 0, 0]),
    "a target out of range": small(target_ids=[0, 1]),
    "a target below zero": small(target_ids=[0, -1]),
    "no targets": small(n_targets=0),
    "very many targets": small(n_targets=1 << 40),
    "a vote of no node": small(target_nodeids=[1, 77]),
    "votes of several lengths": small(target_weights=[1.0]),
    "no nodes": {k: v for k, v in small().items() if not k.startswith("nodes_")},
    "an unknown aggregate": small(aggregate_function="MEDIAN"),
    "an unknown transform": small(post_transform="HALF"),
    "base values of another number": small(base_values=[1.0, 2.0, 3.0]),
    "missing values of another number": small(nodes_missing_value_tracks_true=[1]),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str) -> None:
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(OnnxcError) as caught:
        onnxc.compile(one_op("TreeEnsembleRegressor", [x], HOSTILE[name], [FLOAT]))
    assert isinstance(caught.value, (ModelError, ShapeError, LimitError))


def test_features_that_a_call_lacks() -> None:
    """The width of x is known only when the model runs."""
    x = np.zeros((2, 3), np.float32)
    model = one_op("TreeEnsembleRegressor", [x], small(nodes_featureids=[7, 0, 0]), [FLOAT])
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "F"
    compiled = onnxc.compile(model)
    with pytest.raises(OnnxcError):
        compiled(x)
    assert compiled(np.ones((2, 8), np.float32))["y0"].ravel().tolist() == [2.0, 2.0]


def chain(count: int, cyclic: bool) -> Nodes:
    """A tree as deep as it has nodes."""
    ahead = np.arange(1, count + 1)
    ahead[-1] = 0 if cyclic else -1
    return Nodes(
        np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count), ahead, np.full(count, -1),
        np.zeros(count, bool),
    )  # fmt: skip


def test_deep_trees() -> None:
    """Neither a long chain nor a long cycle takes long."""
    root = np.zeros(1, np.int64)
    assert table_of(chain(5000, False), root, 1, dtypes.float32).steps == 5000
    with pytest.raises(LimitError):
        table_of(chain(500_000, False), root, 1, dtypes.float32)
    with pytest.raises(ModelError):
        table_of(chain(500_000, True), root, 1, dtypes.float32)


def test_hostile_version_5() -> None:
    good: Attributes = {
        "nodes_featureids": [0], "nodes_truenodeids": [0], "nodes_falsenodeids": [1], "nodes_trueleafs": [1],
        "nodes_falseleafs": [1], "tree_roots": [0], "leaf_targetids": [0, 0], "n_targets": 1,
        "nodes_modes": np.zeros(1, np.uint8), "nodes_splits": np.zeros(1, np.float32),
        "leaf_weights": np.ones(2, np.float32),
    }  # fmt: skip
    x = np.zeros((2, 3), np.float32)
    onnxc.compile(one_op("TreeEnsemble", [x], good, [FLOAT], 5))
    for changed in (
        {"nodes_truenodeids": [2]}, {"nodes_truenodeids": [-1]}, {"nodes_trueleafs": [0]}, {"tree_roots": [1]},
        {"tree_roots": [-1]}, {"nodes_modes": np.full(1, 9, np.uint8)}, {"nodes_modes": np.full(1, 6, np.uint8)},
        {"nodes_splits": np.zeros(2, np.float32)}, {"leaf_weights": np.ones(3, np.float32)},
        {"aggregate_function": 4}, {"post_transform": -1}, {"leaf_targetids": [0, 5]},
    ):  # fmt: skip
        with pytest.raises(OnnxcError):
            onnxc.compile(one_op("TreeEnsemble", [x], {**good, **changed}, [FLOAT], 5))
