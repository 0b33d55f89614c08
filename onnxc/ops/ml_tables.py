"""Tables of decision trees as `tree_leaves` takes them, from the attributes of a model, which are checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxc.errors import LimitError, ModelError
from onnxc.ir.dtypes import DType
from onnxc.primitives.trees import EQUAL, FEATURES, MISSING, as_words, node_layout

LEQ, LT, GTE, GT, EQ, NEQ, MEMBER = range(7)
UNUSED, SHARED = -2, -1
MOST_STEPS = 10_000  # from a root to a leaf

Ints = np.ndarray


@dataclass
class Nodes:
    """Inner nodes, side by side. A child is the position of a node, or ~n for the leaf n."""

    modes: Ints
    features: Ints
    splits: np.ndarray
    true: Ints
    false: Ints
    missing: np.ndarray  # bool: NaN goes to the true child


@dataclass
class Table:
    """What `tree_leaves` takes."""

    words: np.ndarray
    roots: np.ndarray
    steps: int
    features: int
    flags: int
    leaf_trees: Ints  # the root that leads to each leaf, SHARED or UNUSED


def as_ints(values: Sequence[int] | np.ndarray, what: str) -> Ints:
    """An attribute as int64."""
    try:
        return np.asarray(values, np.int64).reshape(-1)
    except (OverflowError, ValueError, TypeError) as error:
        raise ModelError(f"{what} are not integers: {error}", cause=error) from error


def between(values: Ints, low: int, high: int, what: str) -> None:
    """ModelError for a value that is not in [low, high)."""
    bad = values[(values < low) | (values >= high)]
    if bad.size:
        raise ModelError(f"{what} have {bad[0]}, which is not in {low} to {high - 1}")


def table_of(nodes: Nodes, roots: Ints, leaves: int, dtype: DType) -> Table:
    """The table for x of a dtype. `roots` are positions of nodes, or ~leaf.

    Nodes may be shared, as converters of set memberships make them, but must not lead back to themselves.
    """
    between(nodes.features, 0, FEATURES, "features of tree nodes")
    for children in (nodes.true, nodes.false, roots):
        between(children, -leaves, len(nodes.modes), "children of tree nodes")
    levels = _levels(nodes)
    tree, leaf_trees = _trees(nodes, levels, roots, leaves)
    words, features, flags = _laid_out(_normal(nodes, dtype), roots, _order(levels, tree), dtype)
    numbers = np.arange(len(roots), dtype=np.int32)
    return Table(words, numbers, _steps(nodes, levels, roots), features, flags, leaf_trees)


# ---------------------------------------------------------------- the shape of trees


def _pairs(nodes: Nodes) -> Ints:
    return np.stack([nodes.true, nodes.false], 1)


def _levels(nodes: Nodes) -> list[Ints]:
    """Nodes by level: each after all that lead to it. ModelError for a cycle."""
    pairs = _pairs(nodes)
    waiting = np.bincount(pairs[pairs >= 0], minlength=len(pairs))
    level, done, levels = np.flatnonzero(waiting == 0), 0, list[Ints]()
    while level.size:
        levels.append(level)
        done += level.size
        if len(levels) > MOST_STEPS:
            raise LimitError(f"a tree is deeper than {MOST_STEPS} nodes")
        reached = pairs[level]
        reached = reached[reached >= 0]
        np.subtract.at(waiting, reached, 1)
        level = np.unique(reached[waiting[reached] == 0])
    if done < len(pairs):
        raise ModelError("nodes of a tree lead back to themselves")
    return levels


def _steps(nodes: Nodes, levels: Sequence[Ints], roots: Ints) -> int:
    """The most steps from a root to a leaf."""
    pairs, height = _pairs(nodes), np.zeros(len(nodes.modes) + 1, np.int64)  # the last one is of leaves
    inner = np.where(pairs >= 0, pairs, len(pairs))
    for level in reversed(levels):
        height[level] = 1 + height[inner[level]].max(1)
    return int(height[roots[roots >= 0]].max(initial=0))


def _trees(nodes: Nodes, levels: Sequence[Ints], roots: Ints, leaves: int) -> tuple[Ints, Ints]:
    """The tree of each node, and of each leaf: the number of its root, SHARED by several, or UNUSED."""
    pairs, count = _pairs(nodes), len(nodes.modes)
    place = np.where(pairs >= 0, pairs, count + ~pairs)  # leaves come behind the nodes
    least, most = np.full(count + leaves, len(roots)), np.full(count + leaves, -1)
    at = np.where(roots >= 0, roots, count + ~roots)
    np.minimum.at(least, at, np.arange(len(roots)))
    np.maximum.at(most, at, np.arange(len(roots)))
    for level in levels:
        used = level[most[level] >= 0]
        np.minimum.at(least, place[used].ravel(), np.repeat(least[used], 2))
        np.maximum.at(most, place[used].ravel(), np.repeat(most[used], 2))
    tree = np.where(most < 0, UNUSED, np.where(least == most, most, SHARED))
    return tree[:count], tree[count:]


def _order(levels: Sequence[Ints], tree: Ints) -> Ints:
    """Nodes that roots lead to, those of a tree together, level by level."""
    depth = np.zeros(len(tree), np.int64)
    for k, level in enumerate(levels):
        depth[level] = k
    order = np.lexsort((depth, tree))
    return np.asarray(order[tree[order] != UNUSED])


# ---------------------------------------------------------------- one form of comparison


def _normal(nodes: Nodes, dtype: DType) -> Nodes:
    """The same nodes, with comparisons x <= split and x = split alone, the true child first.

    x < s is x <= t with the number t before s; x >= s and x > s exchange the children; NaN follows `missing`. A split
    of NaN is never reached, which is also what x < -infinity is.
    """
    modes, splits = nodes.modes, nodes.splits.astype(np.float64)
    never = np.isnan(splits)
    turned = np.isin(modes, (GTE, GT)) & ~never
    equal = np.isin(modes, (EQ, NEQ))
    below = np.isin(modes, (LT, GTE))
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = splits.astype(dtype.numpy)
        exact = narrow == splits
        narrow = np.where(narrow > splits, np.nextafter(narrow, -np.inf, dtype=dtype.numpy), narrow)  # x <= s, in dtype
        before = np.nextafter(narrow, -np.inf, dtype=dtype.numpy)
    before = np.where(splits == -np.inf, np.nan, before).astype(dtype.numpy)
    split = np.where(below & exact, before, narrow)
    split = np.where(equal & ~exact, np.nan, split).astype(dtype.numpy)
    swap = turned | (modes == NEQ)
    missing = np.where(turned, ~nodes.missing, nodes.missing) & (modes != NEQ)
    true, false = np.where(swap, nodes.false, nodes.true), np.where(swap, nodes.true, nodes.false)
    return Nodes(np.where(equal, EQ, LEQ), nodes.features, split, true, false, missing)


def with_members(nodes: Nodes, members: Sequence[np.ndarray]) -> Nodes:
    """The same nodes with those of the mode MEMBER as searches: each has the next of the sets `members`."""
    places = np.flatnonzero(nodes.modes == MEMBER)
    if len(members) < len(places):
        raise ModelError(f"{len(places)} nodes test for a member, and there are {len(members)} sets of members")
    added: list[tuple[int, int, float, int, int, bool]] = []  # mode, feature, split, true, false, missing

    def node(at: int, mode: int, split: float, true: int, false: int) -> int:
        added.append((mode, int(nodes.features[at]), split, true, false, bool(nodes.missing[at])))
        return len(nodes.modes) + len(added) - 1

    def search(at: int, values: np.ndarray) -> int:
        """The node that finds out whether x is one of the values, which are in order."""
        if len(values) < 2:
            split = float(values[0]) if len(values) else np.nan
            return node(at, EQ, split, int(nodes.true[at]), int(nodes.false[at]))
        half = len(values) // 2
        return node(at, LEQ, float(values[half - 1]), search(at, values[:half]), search(at, values[half:]))

    starts = {int(at): search(int(at), np.unique(values)) for at, values in zip(places, members, strict=False)}
    if not starts:
        return nodes
    columns = [np.asarray(c) for c in zip(*added, strict=True)]
    own = (nodes.modes, nodes.features, nodes.splits, nodes.true, nodes.false, nodes.missing)
    modes, features, splits, true, false, missing = (
        np.concatenate([a, c.astype(a.dtype)]) for a, c in zip(own, columns, strict=True)
    )
    for at, start in starts.items():  # the node itself becomes the first one of its search
        for array in (modes, features, splits, true, false, missing):
            array[at] = array[start]
    return Nodes(modes, features, splits, true, false, missing)


# ---------------------------------------------------------------- the layout in memory


def _laid_out(nodes: Nodes, roots: Ints, order: Ints, dtype: DType) -> tuple[np.ndarray, int, int]:
    """Roots, then the two children of each node next to each other, in order; how many features; flags of any node."""
    count = len(roots)
    size = count + 2 * len(order)
    if size >= 1 << 31:
        raise LimitError(f"trees of {len(order)} nodes are more than a table can hold")
    first = np.full(len(nodes.modes), -1, np.int64)  # where the children of a node lie
    first[order] = count + 2 * np.arange(len(order))
    slots = np.empty(size, np.int64)  # what each slot has: a node, or ~leaf
    slots[:count] = roots
    slots[count::2], slots[count + 1 :: 2] = nodes.true[order], nodes.false[order]
    out = np.zeros(size, node_layout(dtype))
    inner = slots >= 0
    at = slots[inner]
    flags = np.where(nodes.missing[at], MISSING, 0) | np.where(nodes.modes[at] == EQ, EQUAL, 0)
    out["split"][inner], out["split"][~inner] = nodes.splits[at], np.nan
    out["feature"][inner] = nodes.features[at] | flags
    out["child"][inner], out["child"][~inner] = first[at], np.flatnonzero(~inner) - 1
    out["leaf"][inner], out["leaf"][~inner] = -1, ~slots[~inner]
    used = int(nodes.features[order].max(initial=-1)) + 1
    return as_words(out, dtype), max(used, 1), int(np.bitwise_or.reduce(flags, initial=0))
