"""Steps: operators that move elements, select them by indices, or make them from sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import numpy_helper

from tests.fuzz.grow import F32, I32, I64, U8, Grower, Item, Skip
from tests.fuzz.model import Draw
from tests.fuzz.oracle import onnx_type
from tests.fuzz.steps import step


def axis_of(g: Grower, x: Item) -> int:
    """An axis, from the front or from the back."""
    axis = g.integer(0, x.rank - 1)
    return axis - x.rank if g.chance(0.3) and g.opset >= 11 else axis


@step(7)
def transpose(g: Grower) -> Item:
    x = g.pick()
    perm = list(range(x.rank))
    g.r.shuffle(perm)
    return g.emit("Transpose", [x], perm=perm if x.rank and g.chance(0.85) else None)


def factored(g: Grower, size: int) -> list[int]:
    """Some shape of so many elements."""
    shape = []
    for p in (2, 2, 2, 2, 3, 5, 7, 11, 13, 17):
        if size and size % p == 0 and g.chance(0.6):
            size //= p
            if shape and g.chance(0.4):
                shape[-1] *= p
            else:
                shape.append(p)
    shape.append(size)
    if g.chance(0.2):
        shape.append(1)
    g.r.shuffle(shape)
    return shape


@step(7)
def reshape(g: Grower) -> Item:
    x = g.pick()
    if g.dynamic and g.chance(0.7):
        return _computed_reshape(g, x)
    shape = factored(g, x.array.size)
    if g.chance(0.4) and 0 not in shape:
        shape[g.integer(0, len(shape) - 1)] = -1
    if g.chance(0.2) and x.rank and shape[0] == x.shape[0]:
        shape[0] = 0
    return g.emit("Reshape", [x], shape=np.array(shape, np.int64))


def _computed_reshape(g: Grower, x: Item) -> Item:
    """Shape, Gather, Concat, Reshape: two axes into one, by sizes that are known at run time."""
    if x.rank < 2:
        raise Skip
    s = g.emit("Shape", [x])
    keep = g.integer(0, x.rank - 1)
    one = g.emit("Gather", [s, g.constant(np.array([keep], np.int64))], axis=0)
    rest = g.constant(np.array([-1], np.int64))
    if g.chance(0.5):
        return g.emit("Reshape", [x, g.emit("Concat", [one, rest], axis=0)])
    scalar = g.emit("Gather", [s, g.constant(np.asarray(keep, np.int64))], axis=0)
    product = g.emit("Mul", [scalar, g.constant(np.asarray(1, np.int64))])
    lifted = g.emit("Unsqueeze", [product], axes=[0])
    return g.emit("Reshape", [x, g.emit("Concat", [rest, lifted], axis=0)])


@step(3)
def flatten(g: Grower) -> Item:
    x = g.pick()
    return g.emit("Flatten", [x], axis=g.integer(0, x.rank))


@step(4)
def squeeze(g: Grower) -> Item:
    x = g.pick(lambda i: 1 in i.shape)
    ones = [k for k, d in enumerate(x.shape) if d == 1]
    axes = g.r.sample(ones, g.integer(1, len(ones)))
    return g.emit("Squeeze", [x], axes=axes if g.chance(0.8) else None)


@step(4)
def unsqueeze(g: Grower) -> Item:
    x = g.pick(lambda i: i.rank < 5)
    return g.emit("Unsqueeze", [x], axes=g.r.sample(range(x.rank + 2), 2) if g.chance(0.3) else [g.integer(0, x.rank)])


@step(4)
def expand(g: Grower) -> Item:
    x = g.pick()
    shape = [g.size() if d == 1 and g.chance(0.6) else d for d in x.shape]
    if g.chance(0.3):
        shape = [g.integer(1, 3), *shape]
    if g.chance(0.3):
        return g.emit("Expand", [x, g.emit("Shape", [g.like(x)])])
    return g.emit(
        "Expand",
        [x],
        shape=np.array(
            [1 if d == s and g.chance(0.3) else s for d, s in zip(x.shape, shape, strict=False)]
            if len(shape) == x.rank
            else shape,
            np.int64,
        ),
    )


@step(3)
def tile(g: Grower) -> Item:
    x = g.pick()
    return g.emit("Tile", [x], repeats=np.array([g.choice([1, 1, 2, 3]) for _ in x.shape], np.int64))


@step(8)
def slice_(g: Grower) -> Item:
    x = g.pick(lambda i: i.rank > 0)
    axes = g.r.sample(range(x.rank), g.integer(1, x.rank))
    starts, ends, steps = [], [], []
    for a in axes:
        d = x.shape[a]
        step_ = g.choice([1, 1, 1, 2, 3, -1, -1, -2]) if g.opset >= 10 else 1
        first, last = sorted([g.integer(-d - 1, d), g.integer(-d - 1, d + 1)])
        if step_ < 0:
            first, last = max(first, last), min(first, last)
        starts.append(first if g.chance(0.7) else 0 if step_ > 0 else d - 1)
        ends.append(last if g.chance(0.6) else 2**31 - 1 if step_ > 0 else -(2**31))
        steps.append(step_)
    plain = all(s == 1 for s in steps)
    kind = g.choice([np.int64, np.int32])
    return g.emit(
        "Slice",
        [x],
        starts=np.array(starts, kind) if g.opset < 10 else g.constant(np.array(starts, kind)),
        ends=np.array(ends, kind) if g.opset < 10 else g.constant(np.array(ends, kind)),
        axes=np.array(axes, kind) if g.opset < 10 else g.constant(np.array(axes, kind)),
        steps=None if plain and (g.opset < 10 or g.chance(0.5)) else g.constant(np.array(steps, kind)),
    )


@step(7)
def concat(g: Grower) -> Item:
    x = g.pick(lambda i: i.rank > 0)
    axis = g.integer(0, x.rank - 1)
    parts = [x]
    for _ in range(g.integer(0, 3)):
        found = [i for i in g.pool if not i.is_sequence and i.dtype == x.dtype and _joins(i, x, axis)]
        if found and g.chance(0.6):
            parts.append(g.choice(found))
        else:
            parts.append(g.fresh(x.dtype, [g.size() if k == axis else d for k, d in enumerate(x.shape)]))
    g.r.shuffle(parts)
    return g.emit("Concat", parts, axis=axis if g.chance(0.7) or g.opset < 11 else axis - x.rank)


def _joins(a: Item, b: Item, axis: int) -> bool:
    return a.rank == b.rank and all(k == axis or a.shape[k] == b.shape[k] for k in range(b.rank))


@step(5)
def split(g: Grower) -> Item:
    x = g.pick(lambda i: i.rank > 0 and max(i.shape) > 1)
    axis = axis_of(g, x)
    d = x.shape[axis]
    cut = g.integer(0, d)
    sizes = [cut, d - cut] if g.chance(0.6) else [cut, 0, d - cut]
    if g.chance(0.3) and d % 2 == 0:
        return g.emit_all("Split", [x], 2, axis=axis, num_outputs=2 if g.opset >= 18 else None)[0]
    return g.emit_all("Split", [x], len(sizes), axis=axis, split=sizes)[0]


@step(7)
def pad(g: Grower) -> Item:
    x = g.pick(lambda i: i.rank > 0)
    mode = g.choice(["constant", "constant", "edge", "reflect", "wrap", None])
    most = 2 if mode in ("constant", "edge", None) else 1
    low, high = ([g.integer(0, most) if g.chance(0.5) else 0 for _ in x.shape] for _ in range(2))
    if g.chance(0.3):
        low = [-1 if g.chance(0.4) and d > 2 else p for p, d in zip(low, x.shape, strict=True)]
        high = [-1 if g.chance(0.4) and d > 2 else p for p, d in zip(high, x.shape, strict=True)]
    value = g.choice([None, 2]) if mode in ("constant", None) else None
    if g.opset >= 18 and g.chance(0.3):
        axes = g.r.sample(range(x.rank), g.integer(1, x.rank))
        return g.emit(
            "Pad",
            [x],
            mode=mode,
            pads=np.array([*(low[a] for a in axes), *(high[a] for a in axes)]),
            value=value,
            axes=np.array(axes),
        )
    return g.emit("Pad", [x], mode=mode, pads=np.array([*low, *high]), value=value)


def indices(g: Grower, extent: int, shape: Any) -> Item:
    """Indices of an axis; of the elder opsets only such as are not negative."""
    if extent == 0:
        raise Skip
    kind = "index" if g.opset >= 11 else "forward"
    return g.fresh(g.choice([I64, I32]), shape, Draw(kind, extent))


@step(7)
def gather(g: Grower) -> Item:
    x = g.pick(lambda i: i.rank > 0)
    axis = axis_of(g, x)
    if g.chance(0.3):
        return g.emit("Gather", [x, g.constant(np.asarray(g.integer(0, x.shape[axis] - 1), np.int64))], axis=axis)
    return g.emit("Gather", [x, indices(g, x.shape[axis], g.shape(0, 2))], axis=axis)


@step(4)
def gather_elements(g: Grower) -> Item:
    x = g.pick(lambda i: i.rank > 0)
    axis = axis_of(g, x)
    shape = [g.size() if k == axis % x.rank else d for k, d in enumerate(x.shape)]
    return g.emit("GatherElements", [x, indices(g, x.shape[axis], shape)], axis=axis)


@step(3)
def gather_nd(g: Grower) -> Item:
    x = g.pick(lambda i: i.rank > 0)
    batch = g.integer(0, min(1, x.rank - 1)) if g.opset >= 12 else 0
    depth = g.integer(1, x.rank - batch)
    extent = min(x.shape[batch : batch + depth])
    if extent == 0:
        raise Skip
    index = g.fresh(I64, [*x.shape[:batch], *g.shape(0, 1), depth], Draw("forward", extent), fixed=True)
    return g.emit("GatherND", [x, index], batch_dims=batch or None)


@step(5)
def scatter(g: Grower) -> Item:
    x = g.pick(lambda i: i.rank > 0 and 0 not in i.shape)
    reduction = g.choice([None, "add", "mul", "max", "min"]) if g.opset >= 18 else None
    if g.chance(0.5):
        axis = g.integer(0, x.rank - 1)
        d = x.shape[axis]
        count = g.integer(1, d)
        rows = np.stack([g.rng.permutation(d)[:count] for _ in range(x.array.size // d)], -1)
        at = np.moveaxis(rows.reshape(count, *x.shape[:axis], *x.shape[axis + 1 :]), 0, axis)
        kind = g.choice([np.int64, np.int32])
        return g.emit(
            "ScatterElements",
            [x, g.constant(at.astype(kind)), g.fresh(x.dtype, at.shape)],
            axis=axis,
            reduction=reduction,
        )
    depth = g.integer(1, x.rank)
    places = np.stack(np.meshgrid(*map(np.arange, x.shape[:depth]), indexing="ij"), -1).reshape(-1, depth)
    some = g.rng.permutation(places)[: g.integer(1, len(places))].astype(np.int64)
    return g.emit(
        "ScatterND", [x, g.constant(some), g.fresh(x.dtype, [len(some), *x.shape[depth:]])], reduction=reduction
    )


@step(3)
def blocks(g: Grower) -> Item:
    b = 2
    if g.chance(0.5):
        x = g.fresh(g.dtype(), [g.size(), 4 * g.integer(1, 3), g.integer(1, 5), g.integer(1, 5)])
        return g.emit("DepthToSpace", [x], blocksize=b, mode=g.choice(["DCR", "CRD", None]) if g.opset >= 11 else None)
    x = g.fresh(g.dtype(), [g.size(), g.integer(1, 3), 2 * g.integer(1, 4), 2 * g.integer(1, 4)])
    return g.emit("SpaceToDepth", [x], blocksize=b)


@step(3)
def trilu(g: Grower) -> Item:
    x = g.pick(lambda i: i.rank >= 2)
    k = None if g.chance(0.4) else g.constant(np.asarray(g.integer(-3, 3), np.int64))
    return g.emit("Trilu", [x, k], upper=g.integer(0, 1))


@step(2)
def eye_like(g: Grower) -> Item:
    x = g.pick(lambda i: i.rank == 2)
    return g.emit("EyeLike", [x], k=g.integer(-2, 2), dtype=onnx_type(g.dtype()) if g.chance(0.5) else None)


@step(2)
def reverse_sequence(g: Grower) -> Item:
    x = g.pick(lambda i: i.rank >= 2 and 0 not in i.shape)
    time = g.integer(0, 1)
    lengths = g.fresh(I64, [x.shape[1 - time]], Draw("count", x.shape[time]))
    return g.emit("ReverseSequence", [x, lengths], time_axis=time, batch_axis=1 - time)


@step(3)
def selected(g: Grower) -> Item:
    """Operators whose results have sizes that the data decide."""
    op = g.choice(["Compress", "NonZero", "Unique"])
    x = g.pick()
    if op == "NonZero":
        return g.emit(op, [x])
    if op == "Compress":
        axis = g.choice([None, *range(x.rank)])
        size = x.array.size if axis is None else x.shape[axis]
        return g.emit(op, [x, g.fresh(np.dtype(np.bool_), [size])], axis=axis)
    return g.emit_all(op, [x], g.integer(1, 4), axis=g.choice([None, *range(x.rank)]), sorted=g.integer(0, 1))[0]


@step(2)
def one_hot(g: Grower) -> Item:
    depth = g.integer(1, 6)
    x = g.fresh(g.choice([I64, I32, F32]), g.shape(0, 3), Draw("forward", depth))
    values = g.constant(np.array([g.integer(-1, 0), g.integer(1, 3)]).astype(g.choice([F32, I64, I32])))
    return g.emit(
        "OneHot", [x, g.constant(np.asarray(depth, np.int64)), values], axis=g.choice([None, -1, *range(x.rank + 1)])
    )


@step(2)
def range_(g: Grower) -> Item:
    kind = g.choice([I64, I32, F32])
    start, delta, count = g.integer(-4, 4), g.choice([1, 2, -1, 3]), g.integer(0, 9)
    if g.dynamic and g.chance(0.6):
        x = g.pick(lambda i: i.rank > 0)
        size = g.emit(
            "Gather", [g.emit("Shape", [x]), g.constant(np.asarray(g.integer(0, x.rank - 1), np.int64))], axis=0
        )
        return g.emit("Range", [g.constant(np.asarray(0, np.int64)), size, g.constant(np.asarray(1, np.int64))])
    return g.emit("Range", [g.constant(np.asarray(v, kind)) for v in (start, start + delta * count, delta)])


@step(3)
def sizes(g: Grower) -> Item:
    x = g.pick()
    if g.chance(0.3):
        return g.emit("Size", [x])
    if g.opset >= 15 and g.chance(0.5):
        return g.emit(
            "Shape", [x], start=g.integer(-x.rank, x.rank), end=g.integer(-x.rank, x.rank) if g.chance(0.5) else None
        )
    return g.emit("Shape", [x])


@step(2)
def filled(g: Grower) -> Item:
    x = g.pick()
    value = numpy_helper.from_array(np.array([g.integer(0, 3)]).astype(g.dtype()))
    return g.emit("ConstantOfShape", [g.emit("Shape", [x])], value=value if g.chance(0.8) else None)


@step(2)
def crop(g: Grower) -> Item:
    x = g.pick(lambda i: i.rank > 0)
    axes = g.r.sample(range(x.rank), g.integer(1, x.rank))
    return g.emit("CenterCropPad", [x, g.constant(np.array([g.integer(1, 7) for _ in axes], np.int64))], axes=axes)


@step(1)
def tensor_scatter(g: Grower) -> Item:
    b, t, d = g.integer(1, 3), g.integer(4, 8), g.integer(1, 5)
    k = g.integer(1, 3)
    at = g.fresh(I64, [b], Draw("forward", t - k + 1))
    past = g.fresh(g.choice([F32, U8]), [b, t, d])
    return g.emit(
        "TensorScatter",
        [past, g.fresh(past.dtype, [b, k, d]), at],
        axis=1 if g.chance(0.5) else None,
        mode=g.choice([None, "linear", "circular"]),
    )
