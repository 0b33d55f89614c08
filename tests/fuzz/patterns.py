"""Steps: combinations that fusing compilers have been wrong about."""

from __future__ import annotations

import numpy as np

from tests.fuzz import kernels, movement
from tests.fuzz.grow import BOOL, F32, Grower, Item
from tests.fuzz.reductions import image
from tests.fuzz.steps import step


@step(3)
def centred(g: Grower) -> Item:
    """A reduction that is broadcast again over what was reduced, by an axis that may be missing."""
    x = g.number(1)
    axis = g.integer(0, x.rank - 1)
    s = g.emit(
        g.choice(["ReduceSum", "ReduceMax", "ReduceMin", "ReduceMean"]), [x], axes=[axis], keepdims=g.choice([0, 1])
    )
    if s.rank < x.rank:
        s = g.emit("Unsqueeze", [s], axes=[axis])
    return g.emit(g.choice(["Sub", "Add", "Mul", "Max"]), [x, s])


@step(3)
def chain_of_views(g: Grower) -> Item:
    """Concat, slice, pad, transpose, reshape in a row, with something computed before and after."""
    x = g.number(1)
    y = g.emit(g.choice(["Abs", "Neg", "Identity"]), [x])
    views = [
        movement.concat,
        movement.slice_,
        movement.pad,
        movement.transpose,
        movement.reshape,
        movement.expand,
        movement.split,
        movement.tile,
    ]
    for _ in range(g.integer(2, 5)):
        y = g.choice(views)(g)
    return g.emit("Add", [y, y]) if y.is_number else y


@step(2)
def concat_expand_where(g: Grower) -> Item:
    x = g.number(1)
    y = g.emit("Concat", [x, g.emit("Neg", [x])] if x.dtype.kind != "u" else [x, x], axis=0)
    c = g.fresh(BOOL, [1 if g.chance(0.5) else d for d in y.shape])
    one = g.fresh(x.dtype, [1] * y.rank)
    e = (
        g.emit("Expand", [one], shape=np.array(y.shape, np.int64))
        if not g.dynamic
        else g.emit("Expand", [one, g.emit("Shape", [y])])
    )
    return g.emit("Where", [c, y, e])


@step(2)
def arg_reduce_broadcast(g: Grower) -> Item:
    """The place of the best of a sum that broadcasts."""
    x = g.number(1)
    y = g.emit("Add", [x, g.like(x)])
    axis = g.integer(0, y.rank - 1)
    at = g.emit(g.choice(["ArgMax", "ArgMin"]), [y], axis=axis, keepdims=1)
    return g.emit("GatherElements", [y, at], axis=axis) if g.chance(0.5) else at


@step(2)
def shared(g: Grower) -> Item:
    """One value, read by several kernels of different kinds."""
    x = g.float(2)
    y = g.emit(g.choice(["Relu", "Tanh", "Abs"]), [x])
    s = g.emit("ReduceSum", [y], axes=[x.rank - 1], keepdims=1)
    perm = [*range(x.rank - 2), x.rank - 1, x.rank - 2]
    p = g.emit("MatMul", [y, g.emit("Transpose", [y], perm=perm)])
    return g.emit("Add", [p, s])


@step(2)
def channels_last(g: Grower) -> Item:
    """A convolution between layouts, then what removes or reduces an axis."""
    x = image(g, 4, 4)
    y = kernels.convolved(g, x)
    op = g.choice(["squeeze", "argmin", "softmax", "reshape", "concat"])
    if op == "squeeze":
        y = g.emit(g.choice(["GlobalAveragePool", "GlobalMaxPool"]), [y])
        return g.emit("Squeeze", [y], axes=[2, 3])
    if op == "argmin":
        return g.emit("ArgMin", [y], axis=g.integer(0, 3), keepdims=g.integer(0, 1))
    if op == "softmax":
        return g.emit("Softmax", [y], axis=1)
    if op == "reshape":
        return g.emit("Reshape", [g.emit("Relu", [y])], shape=np.array([y.shape[0], -1], np.int64))
    z = g.emit("Concat", [y, g.emit("Sigmoid", [y])], axis=1)
    return kernels.convolved(g, z)


@step(1)
def gated(g: Grower) -> Item:
    """Two products of one value, one of them through an activation, multiplied."""
    x = g.fresh(F32, [g.size(), g.size()], constant=False)
    n = g.size()
    a, b = (g.emit("MatMul", [x, g.fresh(F32, [x.shape[1], n], constant=True)]) for _ in range(2))
    return g.emit("Mul", [g.emit("Mul", [a, g.emit("Sigmoid", [a])]), b])
