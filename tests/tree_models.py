"""Random tree ensembles, and models of one operator of ai.onnx.ml, with onnxruntime's answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, TypeProto, helper, numpy_helper

Array = np.ndarray[Any, Any]
BRANCHES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")
Attributes = dict[str, Any]


def _element(x: Array) -> int:
    return TensorProto.STRING if x.dtype == object else helper.np_dtype_to_tensor_dtype(x.dtype)


def one_op(
    op: str, inputs: Sequence[Array | TypeProto], attrs: Mapping[str, Any], outputs: Sequence[int | TypeProto],
    opset: int = 3, dynamic: bool = False,
) -> onnx.ModelProto:  # fmt: skip
    """A model of one node. Inputs are arrays, or the types of maps; outputs are element types, or those of others."""
    infos = []
    for i, x in enumerate(inputs):
        if isinstance(x, TypeProto):
            infos.append(helper.make_value_info(f"x{i}", x))
        else:
            shape = ["N", *x.shape[1:]] if dynamic else x.shape
            infos.append(helper.make_tensor_value_info(f"x{i}", _element(x), shape))
    made = [
        helper.make_tensor_value_info(f"y{i}", t, None) if isinstance(t, int) else helper.make_value_info(f"y{i}", t)
        for i, t in enumerate(outputs)
    ]
    tensors = {k: numpy_helper.from_array(v) if isinstance(v, np.ndarray) else v for k, v in attrs.items()}
    node = helper.make_node(op, [i.name for i in infos], [o.name for o in made], domain="ai.onnx.ml", **tensors)
    graph = helper.make_graph([node], "one", infos, made)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def answers(model: onnx.ModelProto, inputs: Sequence[Any]) -> list[Any]:
    """onnxruntime's."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options)
    return list(session.run(None, {f"x{i}": x for i, x in enumerate(inputs)}))


def features(
    rng: np.random.Generator, rows: int, width: int, dtype: Any = np.float32, nan: float = 0.0, whole: bool = False
) -> Array:
    """Inputs; whole numbers meet the splits of equality, some of `nan` are missing."""
    x = rng.integers(-3, 4, (rows, width)).astype(dtype) if whole else rng.standard_normal((rows, width)).astype(dtype)
    if nan:
        x[rng.random(x.shape) < nan] = np.nan
    return x


def forest(
    rng: np.random.Generator, trees: int, depth: int, width: int, targets: int = 1, votes: str = "all",
    modes: Sequence[str] = ("BRANCH_LEQ",), missing: float | None = None, positive: bool = False, early: float = 0.1,
    kind: str = "target",
) -> Attributes:  # fmt: skip
    """Attributes of versions 1 and 3. `votes` says for what a leaf has a vote: ``all`` targets, one for each ``tree``,
    any one (``leaf``), or one number. `early` is the chance of a leaf above the last level.
    """
    columns = ("treeids", "nodeids", "featureids", "modes", "values", "truenodeids", "falsenodeids")
    nodes: dict[str, list[Any]] = {f"nodes_{c}": [] for c in columns}
    voted: dict[str, list[Any]] = {c: [] for c in ("treeids", "nodeids", "ids", "weights")}

    def grow(tree: int, levels: int, count: list[int]) -> int:
        number = count[0]
        count[0] += 1
        at = len(nodes["nodes_modes"])
        leaf = levels == 0 or (levels < depth and rng.random() < early)
        mode = "LEAF" if leaf else str(rng.choice(list(modes)))
        value = float(rng.integers(-2, 3)) if mode in BRANCHES[4:] else float(np.float32(rng.standard_normal()))
        for c, v in zip(columns, (tree, number, int(rng.integers(width)), mode, value, 0, 0), strict=True):
            nodes[f"nodes_{c}"].append(v)
        if leaf:
            chosen = {"all": range(targets), "tree": [tree % targets], "leaf": [int(rng.integers(targets))]}
            for target in chosen.get(votes) or [int(votes)]:
                weight = float(np.float32(rng.standard_normal() * 0.3))
                for c, v in zip(voted, (tree, number, target, abs(weight) if positive else weight), strict=True):
                    voted[c].append(v)
        else:
            nodes["nodes_truenodeids"][at] = grow(tree, levels - 1, count)
            nodes["nodes_falsenodeids"][at] = grow(tree, levels - 1, count)
        return number

    for tree in range(trees):
        grow(tree, depth, [0])
    attrs: Attributes = {**nodes, **{f"{kind}_{c}": v for c, v in voted.items()}}
    if kind == "target":
        attrs["n_targets"] = targets
    if missing is not None:
        attrs["nodes_missing_value_tracks_true"] = [int(rng.random() < missing) for _ in nodes["nodes_modes"]]
    return attrs


def forest_5(
    rng: np.random.Generator, trees: int, depth: int, width: int, targets: int = 1, modes: Sequence[int] = (0,),
    dtype: Any = np.float32, missing: float | None = None,
) -> Attributes:  # fmt: skip
    """Attributes of TreeEnsemble, version 5."""
    names = ("featureids", "truenodeids", "falsenodeids", "trueleafs", "falseleafs")
    nodes: dict[str, list[int]] = {f"nodes_{c}": [] for c in names}
    kinds, splits, sets, leaf_targets, weights, roots = (list[Any]() for _ in range(6))

    def leaf() -> int:
        leaf_targets.append(int(rng.integers(targets)))
        weights.append(rng.standard_normal() * 0.3)
        return len(weights) - 1

    def grow(levels: int) -> int:
        at, mode = len(kinds), int(rng.choice(list(modes)))
        kinds.append(mode)
        splits.append(float(rng.integers(-2, 3)) if mode > 3 else rng.standard_normal())
        if mode == 6:
            sets.append(rng.choice(np.arange(-4, 5), int(rng.integers(1, 6)), replace=False))
        for column in nodes.values():
            column.append(0)
        nodes["nodes_featureids"][at] = int(rng.integers(width))
        for side in ("true", "false"):
            ends = levels == 1 or rng.random() < 0.1
            nodes[f"nodes_{side}leafs"][at] = int(ends)
            nodes[f"nodes_{side}nodeids"][at] = leaf() if ends else grow(levels - 1)
        return at

    for _ in range(trees):
        roots.append(grow(depth))
    attrs: Attributes = {
        **nodes, "tree_roots": roots, "leaf_targetids": leaf_targets, "n_targets": targets,
        "nodes_modes": np.array(kinds, np.uint8), "nodes_splits": np.array(splits, dtype),
        "leaf_weights": np.array(weights, dtype),
    }  # fmt: skip
    if sets:
        attrs["membership_values"] = np.concatenate([np.append(s, np.nan) for s in sets]).astype(dtype)
    if missing is not None:
        attrs["nodes_missing_value_tracks_true"] = [int(rng.random() < missing) for _ in kinds]
    return attrs
