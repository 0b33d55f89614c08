"""Tree ensembles: the leaves that rows reach (`tree_leaves`), and what the votes of these leaves add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxc.errors import ModelError, UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.graph import Value
from onnxc.ops.common import limited
from onnxc.ops.ml_common import (
    ML,
    as_rows,
    labelled,
    labels_of,
    logistic_pair,
    row,
    same_length,
    transform_of,
    transformed,
)
from onnxc.ops.ml_tables import (
    EQ,
    GT,
    GTE,
    LEQ,
    LT,
    MEMBER,
    NEQ,
    SHARED,
    Ints,
    Nodes,
    as_ints,
    between,
    table_of,
    with_members,
)
from onnxc.ops.registry import op
from onnxc.primitives.builder import Builder

_MODES = {"BRANCH_LEQ": LEQ, "BRANCH_LT": LT, "BRANCH_GTE": GTE, "BRANCH_GT": GT, "BRANCH_EQ": EQ, "BRANCH_NEQ": NEQ}
_LEAF = -1
AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
Floats = Sequence[float] | np.ndarray | None


@dataclass
class Forest:
    """Trees and the votes of their leaves, side by side: leaf, target, weight."""

    nodes: Nodes
    roots: Ints
    leaves: int
    voters: Ints
    targets: Ints
    weights: np.ndarray


def _either(name: str, floats: Floats, tensor: np.ndarray | None) -> np.ndarray | None:
    """An attribute that is given as floats or as a tensor of doubles."""
    if floats is not None and tensor is not None:
        raise ModelError(f"both {name} and {name}_as_tensor are given")
    return tensor if tensor is not None else None if floats is None else np.asarray(floats, np.float32)


# ---------------------------------------------------------------- attributes of versions 1 and 3


def _forest(
    what: str, treeids: Sequence[int], nodeids: Sequence[int], featureids: Sequence[int], modes: Sequence[str],
    values: np.ndarray | None, true: Sequence[int], false: Sequence[int], missing: Sequence[int] | None,
    vote_trees: Sequence[int], vote_nodes: Sequence[int], vote_targets: Sequence[int], weights: np.ndarray | None,
) -> Forest:  # fmt: skip
    """The forest that attributes describe, whose nodes are named by a tree and a number in it."""
    if values is None or weights is None or not len(treeids):
        raise ModelError(f"{what} has no nodes, no nodes_values or no weights")
    same_length(
        what, nodes_treeids=treeids, nodes_nodeids=nodeids, nodes_featureids=featureids, nodes_modes=modes,
        nodes_values=values, nodes_truenodeids=true, nodes_falsenodeids=false,
        nodes_missing_value_tracks_true=missing or None,
    )  # fmt: skip
    same_length(what, treeids=vote_trees, nodeids=vote_nodes, ids=vote_targets, weights=weights)
    unknown = sorted({m for m in modes if m not in _MODES and m != "LEAF"})
    if unknown:
        raise ModelError(f"nodes of {what} have the mode {unknown[0]!r}")
    mode = np.array([_MODES.get(m, _LEAF) for m in modes])
    names = _Names(as_ints(treeids, "nodes_treeids"), as_ints(nodeids, "nodes_nodeids"), what)
    inner = mode != _LEAF
    place = np.where(inner, np.cumsum(inner) - 1, ~(np.cumsum(~inner) - 1))  # of an inner node, or ~leaf
    tracks = np.zeros(len(mode), bool) if not missing else as_ints(missing, "nodes_missing_value_tracks_true") != 0
    first, second = (
        place[names.find(names.trees[inner], as_ints(ids, "children")[inner], "a child")] for ids in (true, false)
    )
    read = as_ints(featureids, "nodes_featureids")[inner]
    nodes = Nodes(mode[inner], read, values[inner], first, second, tracks[inner])
    voters = place[names.find(as_ints(vote_trees, "treeids"), as_ints(vote_nodes, "nodeids"), "a vote")]
    counts = voters < 0  # votes of inner nodes do not
    targets = as_ints(vote_targets, "ids")[counts]
    return Forest(nodes, place[names.firsts()], int((~inner).sum()), ~voters[counts], targets, weights[counts])


class _Names:
    """Finds nodes by their trees and numbers."""

    def __init__(self, trees: Ints, numbers: Ints, what: str) -> None:
        self.trees, self.what = trees, what
        self._trees, tree = np.unique(trees, return_inverse=True)
        self._numbers, number = np.unique(numbers, return_inverse=True)
        keys = tree * len(self._numbers) + number
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]
        if (self._keys[1:] == self._keys[:-1]).any():
            raise ModelError(f"two nodes of a tree of {what} have the same number")

    def find(self, trees: Ints, numbers: Ints, who: str) -> Ints:
        """The positions of nodes; ModelError for one that is not there."""
        tree, number = np.searchsorted(self._trees, trees), np.searchsorted(self._numbers, numbers)
        tree, number = np.minimum(tree, len(self._trees) - 1), np.minimum(number, len(self._numbers) - 1)
        key = tree * len(self._numbers) + number
        at = np.minimum(np.searchsorted(self._keys, key), len(self._keys) - 1)
        lost = (self._trees[tree] != trees) | (self._numbers[number] != numbers) | (self._keys[at] != key)
        if lost.any():
            k = int(np.flatnonzero(lost)[0])
            raise ModelError(f"{who} of {self.what} names node {numbers[k]} of tree {trees[k]}, which there is not")
        return self._order[at]

    def firsts(self) -> Ints:
        """The first node of each tree is its root."""
        return np.flatnonzero(np.concatenate([[True], self.trees[1:] != self.trees[:-1]]))


# ---------------------------------------------------------------- votes


def _working(b: Builder, x: Value, what: str) -> Value:
    """x in the type that trees compare in: doubles as they are, everything else as float32."""
    x = as_rows(b, x, what)
    return x if x.dtype is dtypes.float64 else b.cast(x, dtypes.float32)


@dataclass
class Votes:
    """The aggregate of the votes that rows get, [rows, targets], and which targets got one; None where all did."""

    scores: Value
    voted: Value | None


def _votes(b: Builder, x: Value, forest: Forest, targets: int, aggregate: str, what: str) -> Votes:
    """What the leaves that rows x reach vote for."""
    if aggregate not in AGGREGATES:
        raise ModelError(f"{what} has the aggregate_function {aggregate!r}; {', '.join(AGGREGATES)} exist")
    if targets < 1:
        raise ModelError(f"{what} has {targets} targets")
    limited(targets, f"{what}, with its targets,")
    between(forest.targets, 0, targets, f"votes of {what}")
    table = table_of(forest.nodes, forest.roots, forest.leaves, x.dtype)
    trees = table.leaf_trees
    sums = aggregate in ("SUM", "AVERAGE")
    arranged = _arranged(forest, trees, targets) if sums and targets > 1 else None
    leaves = b.one(
        "tree_leaves", x, b.constant(table.words), b.constant(table.roots if arranged is None else arranged),
        steps=table.steps, features=table.features, flags=table.flags,
    )  # fmt: skip
    voted = None if _all_vote(forest, trees, targets) else _voted(b, leaves, forest, targets)
    if arranged is not None:
        each = b.gather(row(b, _sums(forest), x.dtype), leaves, 0)
        scores = b.reduce("sum", b.reshape(each, (x.shape[0], targets, arranged.size // targets)), [2])
    elif sums:
        scores = _total(b, leaves, forest, forest.weights, targets, x.dtype)
    else:
        scores = _extreme(b, leaves, forest, targets, aggregate == "MIN", x.dtype)
        scores = scores if voted is None else b.where(voted, scores, 0.0)
    return Votes(b.div(scores, float(len(forest.roots))) if aggregate == "AVERAGE" else scores, voted)


def _sums(forest: Forest) -> np.ndarray:
    """The sum of each leaf's votes."""
    return np.bincount(forest.voters, forest.weights, forest.leaves)


def _arranged(forest: Forest, trees: Ints, targets: int) -> np.ndarray | None:
    """Roots by target, as many for each, where every tree votes for one target alone, as boosted classifiers do."""
    tree = trees[forest.voters]
    if (tree < 0).any():
        return None
    votes = np.unique(np.stack([tree, forest.targets], 1), axis=0)
    counts = np.bincount(votes[:, 1], minlength=targets)
    if len(votes) != len(forest.roots) or len(np.unique(votes[:, 0])) != len(votes) or counts.min() != counts.max():
        return None
    order = np.argsort(votes[:, 1], kind="stable")
    return np.asarray(votes[order, 0], np.int32)


def _all_vote(forest: Forest, trees: Ints, targets: int) -> bool:
    """Whether every row gets a vote for every target: some tree has one in each of its leaves."""
    votes = np.unique(np.stack([forest.voters, forest.targets], 1), axis=0)
    tree = trees[votes[:, 0]]
    if (trees == SHARED).any():
        return False
    size = np.bincount(trees[trees >= 0], minlength=len(forest.roots))
    pairs, counts = np.unique(np.stack([tree, votes[:, 1]], 1)[tree >= 0], axis=0, return_counts=True)
    return np.unique(pairs[counts == size[pairs[:, 0]], 1]).size == targets


def _voted(b: Builder, leaves: Value, forest: Forest, targets: int) -> Value:
    """Which targets got a vote, bool [rows, targets]."""
    return b.lt(0.0, _total(b, leaves, forest, np.ones(len(forest.voters)), targets, dtypes.float32))


def _total(b: Builder, leaves: Value, forest: Forest, weights: np.ndarray, targets: int, dtype: DType) -> Value:
    """Sums of weights [rows, targets]: from a table of all leaves and targets, or where that is sparse, one by one."""
    if targets > 1 and len(forest.voters) * 4 < forest.leaves * targets:
        return _scattered(b, leaves, forest, weights, targets, dtype)
    table = np.zeros((forest.leaves, targets))  # of no more than the model has itself, four times over
    np.add.at(table, (forest.voters, forest.targets), weights)
    return b.reduce("sum", b.gather(b.constant(table.astype(dtype.numpy)), leaves, 0), [1])


def _scattered(b: Builder, leaves: Value, forest: Forest, weights: np.ndarray, targets: int, dtype: DType) -> Value:
    """The same where a leaf has votes for few targets: a list of these for each leaf."""
    order = np.argsort(forest.voters, kind="stable")
    voters = forest.voters[order]
    counts = np.bincount(voters, minlength=forest.leaves)
    most = max(int(counts.max(initial=0)), 1)
    limited(forest.leaves * most, "the votes of a tree ensemble")
    column = np.arange(len(voters)) - np.repeat(np.cumsum(counts) - counts, counts)
    target, weight = np.zeros((forest.leaves, most), np.int64), np.zeros((forest.leaves, most), dtype.numpy)
    target[voters, column], weight[voters, column] = forest.targets[order], weights[order]
    rows, trees = leaves.shape
    flat = (rows, trees * most)
    at, what = (b.reshape(b.gather(b.constant(v), leaves, 0), flat) for v in (target, weight))
    return b.one("scatter_elements", b.full((rows, targets), 0.0, dtype), at, what, axis=1, reduction="add")


def _extreme(b: Builder, leaves: Value, forest: Forest, targets: int, least: bool, dtype: DType) -> Value:
    """The least or the greatest vote for each target, [rows, targets]; infinite where there is none."""
    limited(forest.leaves * targets, "the votes of a tree ensemble")
    table = np.full((forest.leaves, targets), np.inf if least else -np.inf)
    (np.minimum if least else np.maximum).at(table, (forest.voters, forest.targets), forest.weights)
    return b.reduce("min" if least else "max", b.gather(b.constant(table.astype(dtype.numpy)), leaves, 0), [1])


def _checked_base(base: np.ndarray | None, sizes: Sequence[int], what: str) -> np.ndarray:
    """Base values, or none, of one of these sizes."""
    found = np.zeros(0) if base is None else base.reshape(-1).astype(np.float64)
    if found.size and found.size not in sizes:
        raise ModelError(f"{what} has {found.size} base values, not {' or '.join(map(str, sizes))}")
    return found


# ---------------------------------------------------------------- regressors


@op("TreeEnsembleRegressor", 1, domain=ML)
def tree_ensemble_regressor(
    b: Builder, x: Value, *, aggregate_function: str = "SUM", base_values: list[float] | None = None,
    base_values_as_tensor: np.ndarray | None = None, n_targets: int = 1, nodes_falsenodeids: Sequence[int] = (),
    nodes_featureids: Sequence[int] = (), nodes_hitrates: list[float] | None = None,
    nodes_hitrates_as_tensor: np.ndarray | None = None, nodes_missing_value_tracks_true: list[int] | None = None,
    nodes_modes: Sequence[str] = (), nodes_nodeids: Sequence[int] = (), nodes_treeids: Sequence[int] = (),
    nodes_truenodeids: Sequence[int] = (), nodes_values: list[float] | None = None,
    nodes_values_as_tensor: np.ndarray | None = None, post_transform: str = "NONE", target_ids: Sequence[int] = (),
    target_nodeids: Sequence[int] = (), target_treeids: Sequence[int] = (), target_weights: list[float] | None = None,
    target_weights_as_tensor: np.ndarray | None = None,
) -> Value:  # fmt: skip
    """x [rows, features] to float32 [rows, targets]."""
    what = "TreeEnsembleRegressor"
    forest = _forest(
        what, nodes_treeids, nodes_nodeids, nodes_featureids, nodes_modes,
        _either("nodes_values", nodes_values, nodes_values_as_tensor), nodes_truenodeids, nodes_falsenodeids,
        nodes_missing_value_tracks_true, target_treeids, target_nodeids, target_ids,
        _either("target_weights", target_weights, target_weights_as_tensor),
    )  # fmt: skip
    votes = _votes(b, _working(b, x, what), forest, n_targets, aggregate_function, what)
    base = _checked_base(_either("base_values", base_values, base_values_as_tensor), [n_targets], what)
    scores = votes.scores
    if base.size:  # onnxruntime adds them to targets that got a vote, and to the only one
        scores = b.add(scores, row(b, base, scores.dtype))
        scores = scores if votes.voted is None or n_targets == 1 else b.where(votes.voted, scores, 0.0)
    return b.cast(_regressed(b, scores, transform_of(post_transform, what), n_targets), dtypes.float32)


def _regressed(b: Builder, scores: Value, transform: str, targets: int) -> Value:
    """The post transform. Of a single target onnxruntime takes PROBIT alone."""
    return scores if targets == 1 and transform != "PROBIT" else transformed(b, scores, transform)


@op("TreeEnsemble", 5, domain=ML)
def tree_ensemble(
    b: Builder, x: Value, *, aggregate_function: int = 1, leaf_targetids: list[int], leaf_weights: np.ndarray,
    membership_values: np.ndarray | None = None, n_targets: int = 1, nodes_falseleafs: list[int],
    nodes_falsenodeids: list[int], nodes_featureids: list[int], nodes_hitrates: np.ndarray | None = None,
    nodes_missing_value_tracks_true: list[int] | None = None, nodes_modes: np.ndarray, nodes_splits: np.ndarray,
    nodes_trueleafs: list[int], nodes_truenodeids: list[int], post_transform: int = 0, tree_roots: list[int],
) -> Value:  # fmt: skip
    """x [rows, features] to [rows, targets] of its type."""
    what = "TreeEnsemble"
    transforms = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
    if not 0 <= post_transform < len(transforms) or not 0 <= aggregate_function < len(AGGREGATES):
        raise ModelError(f"{what} has post_transform {post_transform} and aggregate_function {aggregate_function}")
    missing = nodes_missing_value_tracks_true or None
    same_length(
        what, nodes_featureids=nodes_featureids, nodes_modes=nodes_modes.reshape(-1),
        nodes_splits=nodes_splits.reshape(-1), nodes_truenodeids=nodes_truenodeids, nodes_trueleafs=nodes_trueleafs,
        nodes_falsenodeids=nodes_falsenodeids, nodes_falseleafs=nodes_falseleafs,
        nodes_missing_value_tracks_true=missing,
    )  # fmt: skip
    count, leaves = len(nodes_featureids), same_length(what, leaf_targetids=leaf_targetids, leaf_weights=leaf_weights)
    modes = as_ints(nodes_modes, "nodes_modes")
    between(modes, LEQ, MEMBER + 1, "nodes_modes")
    true, false = (
        _child(ids, leafs, count, leaves)
        for ids, leafs in ((nodes_truenodeids, nodes_trueleafs), (nodes_falsenodeids, nodes_falseleafs))
    )
    tracks = np.zeros(count, bool) if missing is None else as_ints(missing, "nodes_missing_value_tracks_true") != 0
    features = as_ints(nodes_featureids, "nodes_featureids")
    nodes = Nodes(modes, features, nodes_splits.reshape(-1).astype(np.float64), true, false, tracks)
    nodes = with_members(nodes, _members(membership_values))
    roots = as_ints(tree_roots, "tree_roots")
    between(roots, 0, count, "tree_roots")
    targets, weights = as_ints(leaf_targetids, "leaf_targetids"), leaf_weights.reshape(-1).astype(np.float64)
    forest = Forest(nodes, roots, leaves, np.arange(leaves), targets, weights)
    votes = _votes(b, _working(b, x, what), forest, n_targets, AGGREGATES[aggregate_function], what)
    return b.cast(_regressed(b, votes.scores, transforms[post_transform], n_targets), x.dtype)


def _child(ids: Sequence[int], leafs: Sequence[int], count: int, leaves: int) -> Ints:
    """Positions of nodes, and ~leaf where the child is one."""
    at, leaf = as_ints(ids, "children of nodes"), as_ints(leafs, "nodes_trueleafs and nodes_falseleafs") != 0
    between(at[leaf], 0, leaves, "leaves of nodes")
    between(at[~leaf], 0, count, "children of nodes")
    return np.where(leaf, ~at, at)


def _members(values: np.ndarray | None) -> list[np.ndarray]:
    """Sets of members, which NaN parts."""
    flat = np.zeros(0) if values is None else values.reshape(-1).astype(np.float64)
    ends = np.flatnonzero(np.isnan(flat))
    sets = [s[~np.isnan(s)] for s in np.split(flat, ends)]
    return sets if sets[-1].size else sets[:-1]


# ---------------------------------------------------------------- classifiers


@op("TreeEnsembleClassifier", 1, domain=ML)
def tree_ensemble_classifier(
    b: Builder, x: Value, *, base_values: list[float] | None = None, base_values_as_tensor: np.ndarray | None = None,
    class_ids: Sequence[int] = (), class_nodeids: Sequence[int] = (), class_treeids: Sequence[int] = (),
    class_weights: list[float] | None = None, class_weights_as_tensor: np.ndarray | None = None,
    classlabels_int64s: list[int] | None = None, classlabels_strings: list[str] | None = None,
    nodes_falsenodeids: Sequence[int] = (), nodes_featureids: Sequence[int] = (),
    nodes_hitrates: list[float] | None = None, nodes_hitrates_as_tensor: np.ndarray | None = None,
    nodes_missing_value_tracks_true: list[int] | None = None, nodes_modes: Sequence[str] = (),
    nodes_nodeids: Sequence[int] = (), nodes_treeids: Sequence[int] = (), nodes_truenodeids: Sequence[int] = (),
    nodes_values: list[float] | None = None, nodes_values_as_tensor: np.ndarray | None = None,
    post_transform: str = "NONE",
) -> list[Value]:  # fmt: skip
    """x [rows, features] to labels [rows] and float32 scores [rows, classes]."""
    what = "TreeEnsembleClassifier"
    strings, ints = labels_of(classlabels_strings, classlabels_int64s, what)
    classes = len(strings or ints or ())
    forest = _forest(
        what, nodes_treeids, nodes_nodeids, nodes_featureids, nodes_modes,
        _either("nodes_values", nodes_values, nodes_values_as_tensor), nodes_truenodeids, nodes_falsenodeids,
        nodes_missing_value_tracks_true, class_treeids, class_nodeids, class_ids,
        _either("class_weights", class_weights, class_weights_as_tensor),
    )  # fmt: skip
    votes = _votes(b, _working(b, x, what), forest, classes, "SUM", what)
    base = _checked_base(
        _either("base_values", base_values, base_values_as_tensor), [1, 2] if classes == 2 else [classes], what
    )
    at, scores = _classified(b, votes, forest, base, transform_of(post_transform, what))
    return [_label(b, at, forest, strings, ints), b.cast(scores, dtypes.float32)]


def _label(b: Builder, at: Value, forest: Forest, strings: Sequence[str] | None, ints: Sequence[int] | None) -> Value:
    """The labels at positions. Where both of two classes, or one alone, get votes, onnxruntime's are 0 and 1."""
    plain = ints and len(ints) < 3 and len(set(forest.targets.tolist())) != len(ints) - 1
    if strings and len(strings) == 1:
        raise UnsupportedError("TreeEnsembleClassifier with a single class whose label is a string is not supported")
    return labelled(b, at, strings, [0, 1] if plain else ints)


def _classified(b: Builder, votes: Votes, forest: Forest, base: np.ndarray, transform: str) -> tuple[Value, Value]:
    """The position of each row's class, and the scores that are shown, as onnxruntime has them."""
    scores, voted = votes.scores, votes.voted
    rows, classes = scores.shape
    if classes == 2:
        return _binary(b, votes, forest, base, transform)
    shown = b.add(scores, row(b, base, scores.dtype)) if base.size else scores
    if classes == 1:
        positive = b.lt(0.0, b.reshape(shown, (rows,)))
        return b.cast(positive, dtypes.int64), transformed(b, shown, transform) if transform == "PROBIT" else shown
    judged = shown if voted is None or base.size else b.where(voted, shown, -np.inf)
    return b.one("argmax", judged, axis=1, last=False), transformed(b, shown, transform)


def _binary(b: Builder, votes: Votes, forest: Forest, base: np.ndarray, transform: str) -> tuple[Value, Value]:
    """Two classes. A row without a vote for the second has one score, from which that of the other is made."""
    classes = set(forest.targets.tolist())
    positive = len(classes) == 1 and bool((forest.weights >= 0).all())
    if 1 not in classes:
        return _of_one_score(b, votes.scores, base, transform, positive)
    both = _of_two_scores(b, votes, base, transform, positive)
    if votes.voted is None or classes == {1}:  # the second class alone: all rows have a vote for it
        return both
    one = _of_one_score(b, votes.scores, base, transform, positive)
    second = b.slice(votes.voted, 1, 1, 2)
    return b.where(b.reshape(second, (second.shape[0],)), both[0], one[0]), b.where(second, both[1], one[1])


def _above(b: Builder, score: Value, positive: bool) -> Value:
    """1 where the second class wins: its score is a probability where all weights are positive."""
    return b.cast(b.lt(0.5 if positive else 0.0, b.reshape(score, (score.shape[0],))), dtypes.int64)


def _of_one_score(b: Builder, scores: Value, base: np.ndarray, transform: str, positive: bool) -> tuple[Value, Value]:
    first = b.slice(scores, 1, 0, 1)
    score = b.add(first, float(base[0])) if base.size else first
    at = _above(b, score, positive)
    if base.size == 2:
        return at, transformed(b, b.concat([score, b.mul(score, 0.0)], 1), transform)
    if transform == "PROBIT":
        raise UnsupportedError("TreeEnsembleClassifier with one score for two classes and PROBIT is not supported")
    if transform == "LOGISTIC":
        return at, logistic_pair(b, score)
    return at, b.concat([b.sub(1.0, score) if positive else b.neg(score), score], 1)


def _of_two_scores(b: Builder, votes: Votes, base: np.ndarray, transform: str, positive: bool) -> tuple[Value, Value]:
    first, second = b.split(votes.scores, 1, [1, 1])
    if base.size == 2:  # onnxruntime takes the second one for both, and the votes for the first class
        second = b.add(first, float(base[1]))
        first = b.neg(second)
    elif base.size:
        first = b.add(first, float(base[0]))
    if base.size and votes.voted is not None:
        first = b.where(b.slice(votes.voted, 1, 0, 1), first, 0.0)
    return _above(b, second, positive), transformed(b, b.concat([first, second], 1), transform)
