"""Steps: reductions, the best of an axis, running sums, softmax and normalizations."""

from __future__ import annotations

import numpy as np

from tests.fuzz.grow import F32, F64, I32, I64, Grower, Item, Skip
from tests.fuzz.model import Draw
from tests.fuzz.movement import axis_of
from tests.fuzz.steps import step

REDUCTIONS = ["ReduceSum", "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceProd",
              "ReduceSumSquare", "ReduceLogSumExp", "ReduceLogSum"]  # fmt: skip

NORMS = ["LayerNormalization", "RMSNormalization", "InstanceNormalization", "GroupNormalization",
         "BatchNormalization", "LpNormalization", "MeanVarianceNormalization", "LRN"]  # fmt: skip


@step(12)
def reduce(g: Grower) -> Item:
    op = g.choice(REDUCTIONS)
    x = g.pick()
    if op.startswith("ReduceLog") and not x.is_float:
        raise Skip  # the logarithm of integers as an integer: each runtime rounds elsewhere
    if op == "ReduceLogSum":
        x = g.tame(x, 0.01, 1e4)
    axes = [a - x.rank if g.chance(0.3) and g.opset >= 11 else a for a in range(x.rank) if g.chance(0.5)]
    return g.emit(op, [x], axes=axes or None, keepdims=g.choice([None, 0, 1]))


@step(4)
def best(g: Grower) -> Item:
    x = g.pick(lambda i: i.rank > 0)
    last = g.choice([None, 0, 1]) if g.opset >= 12 else None
    y = g.emit(
        g.choice(["ArgMax", "ArgMin"]), [x], axis=axis_of(g, x), keepdims=g.choice([None, 0, 1]), select_last_index=last
    )
    return g.emit("Add", [y, g.like(y)]) if g.chance(0.3) else y


@step(3)
def top_k(g: Grower) -> Item:
    x = g.pick(lambda i: i.rank > 0)
    axis = axis_of(g, x)
    k = g.integer(0, x.shape[axis])
    if g.opset < 11:
        return g.emit_all("TopK", [x], 2, axis=axis, k=k if g.opset < 10 else [k])[0]
    return g.emit_all("TopK", [x], 2, axis=axis, k=[k], largest=g.choice([None, 0, 1]))[0]


@step(3)
def running(g: Grower) -> Item:
    x = g.pick(lambda i: i.rank > 0)
    axis = g.constant(np.asarray(axis_of(g, x), g.choice([I64, I32])))
    return g.emit(
        g.choice(["CumSum", "CumSum", "CumProd"]), [x, axis], exclusive=g.choice([None, 1]), reverse=g.choice([None, 1])
    )


@step(6)
def softmax(g: Grower) -> Item:
    x = g.float(1)
    return g.emit(g.choice(["Softmax", "Softmax", "LogSoftmax", "Hardmax"]), [x], axis=g.choice([None, axis_of(g, x)]))


@step(3)
def softmax_by_parts(g: Grower) -> Item:
    """Softmax spelled out, with or without the shift, over any axes; now and then its parts are read elsewhere."""
    x = g.tame(g.float(1), -20, 5)
    axes = [axis_of(g, x)] if g.chance(0.7) else list(range(x.rank))
    shift = g.emit("ReduceMax", [x], axes=axes, keepdims=1)
    y = g.emit("Sub", [x, shift]) if g.chance(0.7) else x
    e = g.emit("Exp", [y])
    return g.emit("Div", [e, g.emit("ReduceSum", [e], axes=axes, keepdims=1)])


@step(3)
def norm_by_parts(g: Grower) -> Item:
    """A layer or root-mean-square normalization spelled out."""
    x = g.float(1)
    axes = [x.rank - 1] if g.chance(0.6) else list(range(g.integer(0, x.rank - 1), x.rank))
    if g.chance(0.6):
        x = g.emit("Sub", [x, g.emit("ReduceMean", [x], axes=axes, keepdims=1)])
    square = g.emit("Mul", [x, x]) if g.chance(0.5) else g.emit("Pow", [x, g.constant(np.asarray(2, x.dtype))])
    mean = g.emit("ReduceMean", [square], axes=axes, keepdims=1)
    root = g.emit("Sqrt", [g.emit("Add", [mean, g.constant(np.asarray(g.choice([1e-3, 0.1]), x.dtype))])])
    y = g.emit("Div", [x, root]) if g.chance(0.6) else g.emit("Mul", [x, g.emit("Reciprocal", [root])])
    y = g.emit("Mul", [y, g.fresh(x.dtype, x.shape[axes[0] :])])
    return g.emit("Add", [y, g.like(y)])


def image(g: Grower, low: int = 3, high: int = 5) -> Item:
    """Batch, channels, and one to three more axes."""
    try:
        if g.chance(0.6):
            return g.pick(lambda i: i.is_float and low <= i.rank <= high and 0 not in i.shape)
    except Skip:
        pass
    kind = g.choice([d for d in g.dtypes if d.kind == "f"] or [F32])
    rank = g.choice([4, 4, 4, low, high])
    size = [g.choice([3, 5, 7, 8, 9, 12]) if g.dynamic else g.choice([4, 6, 8, 9, 10]) for _ in range(rank - 2)]
    return g.fresh(
        kind, [g.choice([1, 2]), g.choice([1, 2, 4, 6, 8, 16]), *(min(s, 6) if rank == 5 else s for s in size)]
    )


@step(6)
def norm(g: Grower) -> Item:
    op = g.choice(NORMS)
    if op in ("LayerNormalization", "RMSNormalization"):
        x = g.float(1)
        axis = g.integer(-x.rank, x.rank - 1)
        scale = g.fresh(x.dtype, x.shape[axis % x.rank :])
        extra = [g.fresh(x.dtype, scale.shape)] if op[0] == "L" and g.chance(0.5) else []
        return g.emit(op, [x, scale, *extra], axis=axis, epsilon=g.choice([None, 0.01]), stash_type=stash(g, x))
    if op == "LpNormalization":
        x = g.float(1)
        return g.emit(op, [x], axis=g.choice([None, axis_of(g, x)]), p=g.choice([None, 1, 2]))
    x = image(g)
    c = x.shape[1]

    def weight(kind: str = "normal", size: int = c) -> Item:
        return g.fresh(x.dtype, [size], Draw(kind))

    if op == "InstanceNormalization":
        return g.emit(op, [x, weight(), weight()], epsilon=g.choice([None, 0.01]))
    if op == "GroupNormalization":
        groups = g.choice([n for n in (1, 2, 3, 4) if c % n == 0])
        size = c if g.opset >= 21 else groups
        return g.emit(
            op,
            [x, weight(size=size), weight(size=size)],
            num_groups=groups,
            stash_type=stash(g, x) if g.opset >= 21 else None,
        )
    if op == "BatchNormalization":
        return g.emit(op, [x, weight(), weight(), weight(), weight("positive")], epsilon=g.choice([None, 0.01]))
    if op == "LRN":
        return g.emit(op, [x], size=g.choice([1, 3, 5]), alpha=0.1, bias=1.5)
    return g.emit(op, [x], axes=[0, *range(2, x.rank)] if x.rank != 4 or g.chance(0.3) else None)


def stash(g: Grower, x: Item) -> int | None:
    """In which type a normalization computes: float64 numbers in float64."""
    return 11 if x.dtype == F64 else None


@step(2)
def between_transposes(g: Grower) -> Item:
    """A transpose before a reduction, or between one and what broadcasts its result."""
    x = g.float(2)
    perm = list(range(x.rank))
    g.r.shuffle(perm)
    y = g.emit("Transpose", [x], perm=perm)
    axis = g.integer(0, x.rank - 1)
    s = g.emit(g.choice(["ReduceSum", "ReduceMax", "ReduceMean"]), [y], axes=[axis], keepdims=1)
    z = g.emit(g.choice(["Sub", "Mul", "Add"]), [y, s])
    return g.emit("Transpose", [z], perm=[perm.index(k) for k in range(x.rank)])


@step(1)
def losses(g: Grower) -> Item:
    n, c = g.integer(1, 5), g.integer(2, 7)
    rest = g.shape(0, 2)
    kind = g.choice([F32, F64])
    x = g.fresh(kind, [n, c, *rest])
    target = g.fresh(g.choice([I64, I32]), [n, *rest], Draw("forward", c))
    weight = g.fresh(kind, [c], Draw("positive")) if g.chance(0.5) else None
    reduction, ignored = g.choice([None, "none", "sum", "mean"]), g.choice([None, 0, 1])
    if g.chance(0.5):
        return g.emit("SoftmaxCrossEntropyLoss", [x, target, weight], reduction=reduction, ignore_index=ignored)
    y = g.emit("LogSoftmax", [x], axis=1)
    return g.emit("NegativeLogLikelihoodLoss", [y, target, weight], reduction=reduction, ignore_index=ignored)
