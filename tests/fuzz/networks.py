"""Steps: blocks of real networks, at sizes at which their kernels are chosen: many channels, several tiles, heads.

Behind each stands what fusing compilers have been wrong about: an epilogue that goes on behind a reshape, a slice, a
transpose or a pad, and values in the middle that are read elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.fuzz import movement
from tests.fuzz.grow import BOOL, F32, I64, SIZES, Grower, Item, Skip
from tests.fuzz.model import Draw
from tests.fuzz.steps import Step

ROOM = 1 << 16  # elements of such a block's values
BLOCKS: list[tuple[int, Step]] = []


def block(weight: int = 1) -> Callable[[Step], Step]:
    """Adds the decorated function to the table of blocks, of which some models are grown."""

    def add(take: Step) -> Step:
        BLOCKS.append((weight, take))
        return take

    return add


def weight(g: Grower, shape: Sequence[int], fan: int) -> Item:
    """Numbers that keep the size of what they are multiplied by: a constant, or known at run time."""
    if g.chance(0.1):
        return g.fresh(F32, shape, Draw("small"), constant=False, fixed=True)
    return g.constant((g.rng.standard_normal(shape) / max(1, fan) ** 0.5).astype(np.float32))


def vector(g: Grower, size: int, low: float = -1, high: float = 1) -> Item:
    return g.constant(g.rng.uniform(low, high, size).astype(np.float32))


def large(g: Grower, channels: Sequence[int] = (1, 3, 4, 8, 12, 16, 17, 24, 32, 48)) -> Item:
    """An image of a network: one of the pool, or a new one of many channels and pixels."""
    g.room = ROOM
    found = [i for i in g.pool if not i.is_sequence and i.dtype == F32 and i.rank == 4 and min(i.shape) > 0]
    found = [i for i in found if i.shape[2] >= 4 and i.shape[3] >= 4]
    if found and g.chance(0.7):
        return g.choice(found[-2:])
    h, w = (g.choice([7, 11]) if g.dynamic else g.choice([5, 6, 8, 9, 12, 14, 16, 19, 28]) for _ in range(2))
    c = g.choice([c for c in channels if not g.dynamic or c not in SIZES.values()])
    return g.fresh(F32, [g.choice([1, 1, 2, 3]), c, h, w], constant=False)


def activated(g: Grower, x: Item) -> Item:
    op = g.choice(["Relu", "Relu", "relu6", "silu", "HardSwish", "Sigmoid", "LeakyRelu", "PRelu", "gelu", "", ""])
    if op == "relu6":
        return g.emit("Clip", [x], min=0, max=6)
    if op == "silu":
        return g.emit("Mul", [x, g.emit("Sigmoid", [x])])
    if op == "PRelu":
        return g.emit("PRelu", [x, g.constant(g.rng.uniform(0, 0.5, [x.shape[1], 1, 1]).astype(np.float32))])
    if op == "gelu":
        half, one = (g.constant(np.asarray(v, np.float32)) for v in (0.5, 1.0))
        y = g.emit("Erf", [g.emit("Div", [x, g.constant(np.asarray(2**0.5, np.float32))])])
        return g.emit("Mul", [g.emit("Mul", [x, g.emit("Add", [y, one])]), half])
    return g.emit(op, [x]) if op else x


def convolution(g: Grower, x: Item, outputs: int, kernel: Sequence[int], groups: int = 1, **attributes: Any) -> Item:
    """A convolution, perhaps with a bias, perhaps with what a batch normalization leaves."""
    c = x.shape[1]
    w = weight(g, [outputs, c // groups, *kernel], c // groups * int(np.prod(kernel)))
    bias = vector(g, outputs) if g.chance(0.6) else None
    y = g.emit("Conv", [x, w, bias], group=groups if groups > 1 else None, **attributes)
    if g.chance(0.25):
        y = g.emit("BatchNormalization", [y, *(vector(g, outputs, 0.5, 1.5) for _ in range(4))])
    return y


def same(kernel: Sequence[int], dilation: int = 1) -> list[int]:
    """Padding that keeps the size."""
    low = [dilation * (k - 1) // 2 for k in kernel]
    return [*low, *(dilation * (k - 1) - p for k, p in zip(kernel, low, strict=True))]


@block(3)
def plain_block(g: Grower) -> Item:
    """Any kernel, stride, dilation and padding; a residual where the sizes allow it."""
    x = large(g)
    kernel = g.choice([[1, 1], [3, 3], [3, 3], [3, 3], [5, 5], [1, 3], [3, 1], [2, 2], [7, 7], [4, 4], [1, 7]])
    dilation = g.choice([1, 1, 1, 2, 3])
    attributes: dict[str, Any] = {"dilations": [dilation] * 2 if dilation > 1 else None}
    if g.chance(0.7):
        attributes["pads"] = same(kernel, dilation)
    elif g.chance(0.6):
        attributes["pads"] = [g.integer(0, 2) for _ in range(4)]
    if g.chance(0.3):
        attributes["strides"] = [g.integer(1, 3) for _ in range(2)]
    c = x.shape[1]
    groups = g.choice([n for n in (1, 1, 1, 2, 3, 4, 8, c) if c % n == 0])
    outputs = x.shape[1] if g.chance(0.5) else groups * g.choice([1, 2, 4, 5, 8, 16])
    y = convolution(g, x, outputs, kernel, groups, **attributes)
    if g.chance(0.7):
        y = activated(g, y)
    if y.shape == x.shape and g.chance(0.7):
        y = g.emit("Add", [x, y] if g.chance(0.5) else [y, x])
        y = activated(g, y)
    return behind(g, y) if g.chance(0.5) else y


@block(3)
def mobile_block(g: Grower) -> Item:
    """1x1, depthwise, perhaps squeezed and excited, 1x1, residual."""
    x = large(g)
    c = x.shape[1]
    wide = c * g.choice([1, 2, 3, 6])
    y = activated(g, convolution(g, x, wide, [1, 1])) if g.chance(0.8) else x
    wide = y.shape[1]
    kernel = g.choice([[3, 3], [3, 3], [5, 5], [7, 7], [3, 1]])
    stride = g.choice([1, 1, 2])
    more = g.choice([1, 1, 1, 2])
    y = convolution(g, y, wide * more, kernel, wide, pads=same(kernel), strides=[stride] * 2 if stride > 1 else None)
    y = activated(g, y)
    if g.chance(0.4):
        y = excited(g, y)
    y = convolution(g, y, c if g.chance(0.7) else 2 * c, [1, 1])
    if y.shape == x.shape and g.chance(0.8):
        y = g.emit("Add", [y, x])
    return behind(g, y) if g.chance(0.4) else y


def excited(g: Grower, x: Item) -> Item:
    """Channels weighed by what their means say."""
    mean = g.emit("GlobalAveragePool", [x]) if g.chance(0.5) else g.emit("ReduceMean", [x], axes=[2, 3], keepdims=1)
    less = max(1, x.shape[1] // 4)
    y = g.emit("Relu", [convolution(g, mean, less, [1, 1])])
    y = g.emit(g.choice(["Sigmoid", "HardSigmoid"]), [convolution(g, y, x.shape[1], [1, 1])])
    return g.emit("Mul", [x, y] if g.chance(0.5) else [y, x])


@block(2)
def shuffled(g: Grower) -> Item:
    """Channels in two halves, one of them convolved; then dealt like cards."""
    x = large(g, (4, 8, 12, 24, 32))
    if x.shape[1] % 2:
        raise Skip
    half = x.shape[1] // 2
    a, b = g.emit_all("Split", [x], 2, axis=1, split=[half, half])
    b = activated(g, convolution(g, b, half, [1, 1]))
    b = convolution(g, b, half, [3, 3], half, pads=[1, 1, 1, 1])
    b = activated(g, convolution(g, b, half, [1, 1], g.choice([1, 2]) if half % 2 == 0 else 1))
    y = g.emit("Concat", [a, b] if g.chance(0.5) else [b, a], axis=1)
    if g.dynamic and set(x.shape[2:]) & set(SIZES.values()):
        return y
    c, h, w = y.shape[1:]
    y = g.emit("Reshape", [y], shape=np.array([-1, 2, half, h, w], np.int64))
    y = g.emit("Transpose", [y], perm=[0, 2, 1, 3, 4])
    return g.emit("Reshape", [y], shape=np.array([-1, c, h, w], np.int64))


@block(2)
def modern_block(g: Grower) -> Item:
    """Depthwise 7x7, channels last: a normalization, two products, a gain for each channel, a residual."""
    x = large(g)
    c = x.shape[1]
    y = convolution(g, x, c, [7, 7], c, pads=[3] * 4)
    y = g.emit("Transpose", [y], perm=[0, 2, 3, 1])
    y = normalized(g, y)
    y = linear(g, y, 4 * c)
    y = activated_rows(g, y)
    y = linear(g, y, c)
    y = g.emit("Mul", [y, vector(g, c)])
    y = g.emit("Transpose", [y], perm=[0, 3, 1, 2])
    return g.emit("Add", [x, y])


def normalized(g: Grower, x: Item) -> Item:
    """By rows, as one node or by parts."""
    c = x.shape[-1]
    if g.chance(0.5):
        try:
            return g.emit("LayerNormalization", [x, vector(g, c, 0.5, 1.5), vector(g, c)], axis=-1)
        except Skip:
            pass
    d = g.emit("Sub", [x, g.emit("ReduceMean", [x], axes=[x.rank - 1], keepdims=1)])
    v = g.emit("ReduceMean", [g.emit("Mul", [d, d])], axes=[x.rank - 1], keepdims=1)
    s = g.emit("Sqrt", [g.emit("Add", [v, g.constant(np.asarray(1e-2, np.float32))])])
    y = g.emit("Mul", [g.emit("Div", [d, s]), vector(g, c, 0.5, 1.5)])
    return g.emit("Add", [y, vector(g, c)])


def linear(g: Grower, x: Item, outputs: int) -> Item:
    y = g.emit("MatMul", [x, weight(g, [x.shape[-1], outputs], x.shape[-1])])
    return g.emit("Add", [y, vector(g, outputs)] if g.chance(0.7) else [vector(g, outputs), y])


def activated_rows(g: Grower, x: Item) -> Item:
    op = g.choice(["gelu", "Relu", "Tanh", "gated"])
    if op == "gated" and x.shape[-1] % 2 == 0:
        a, b = g.emit_all("Split", [x], 2, axis=x.rank - 1, split=[x.shape[-1] // 2] * 2)
        return g.emit("Mul", [g.emit("Mul", [a, g.emit("Sigmoid", [a])]), b])
    if op == "gelu":
        y = g.emit("Erf", [g.emit("Mul", [x, g.constant(np.asarray(0.5**0.5, np.float32))])])
        y = g.emit("Mul", [x, g.emit("Add", [y, g.constant(np.asarray(1, np.float32))])])
        return g.emit("Mul", [y, g.constant(np.asarray(0.5, np.float32))])
    return g.emit("Relu" if op == "gated" else op, [x])


@block(2)
def pyramid(g: Grower) -> Item:
    """Pools of pools, joined, and convolved."""
    x = large(g)
    op = g.choice(["MaxPool", "MaxPool", "AveragePool"])
    k = g.choice([3, 5])
    parts = [x]
    for _ in range(g.integer(1, 3)):
        parts.append(g.emit(op, [parts[-1]], kernel_shape=[k, k], pads=[k // 2] * 4))
    y = g.emit("Concat", parts, axis=1)
    return activated(g, convolution(g, y, g.choice([4, 8, 16]), [1, 1]))


@block(2)
def decoded(g: Grower) -> Item:
    """To twice the size, joined with what was there, convolved."""
    x = large(g, (1, 4, 8, 16))
    c = x.shape[1]
    y = g.emit("MaxPool", [x], kernel_shape=[2, 2], strides=[2, 2])
    y = activated(g, convolution(g, y, g.choice([c, 2 * c]), [3, 3], pads=[1] * 4))
    if g.chance(0.5):
        k, p = g.choice([(2, 0), (4, 1)])
        w = weight(g, [y.shape[1], c, k, k], y.shape[1])
        y = g.emit("ConvTranspose", [y, w, vector(g, c)], strides=[2, 2], pads=[p] * 4)
    elif g.opset >= 11:
        factors = g.constant(np.array([1, 1, 2, 2], np.float32))
        mode = g.choice(["nearest", "linear"])
        how = "asymmetric" if mode == "nearest" else "half_pixel"
        near = "floor" if mode == "nearest" else None
        y = g.emit("Resize", [y, None, factors], mode=mode, coordinate_transformation_mode=how, nearest_mode=near)
    else:
        raise Skip
    h, w_ = y.shape[2:]
    if (h, w_) != x.shape[2:]:
        if g.dynamic:
            return y
        x = g.emit("Slice", [x], starts=np.array([0, 0]), ends=np.array([h, w_]), axes=np.array([2, 3]))
    y = g.emit("Concat", [x, y] if g.chance(0.5) else [y, x], axis=1)
    return activated(g, convolution(g, y, g.choice([4, 8, 16]), g.choice([[3, 3], [1, 1]]), pads=None))


def behind(g: Grower, x: Item) -> Item:
    """What comes behind a template: views and pointwise operators in turns, read by name and from the pool."""
    y = x
    for _ in range(g.integer(1, 4)):
        kind = g.choice(["view", "view", "unary", "binary", "reduce", "self"])
        if kind == "view":
            pool, g.pool = g.pool, [y]
            try:
                y = g.choice(VIEWS)(g)
            finally:
                g.pool = pool + [i for i in g.pool if i not in pool]
        elif kind == "unary":
            y = g.emit(g.choice(["Relu", "Neg", "Abs", "Tanh"]), [y])
        elif kind == "binary":
            y = g.emit(g.choice(["Add", "Mul", "Sub", "Max"]), [y, g.like(y)])
        elif kind == "reduce" and y.rank:
            op = g.choice(["ReduceMean", "ReduceMax", "ReduceSum"])
            y = g.emit(op, [y], axes=[g.integer(0, y.rank - 1)], keepdims=g.choice([0, 1]))
        elif kind == "self" and y.rank:
            back = list(range(y.rank))[::-1]
            y = g.emit("Concat", [y, y], axis=0) if g.chance(0.5) else g.emit("Transpose", [y], perm=back)
    return y


VIEWS = [
    movement.slice_, movement.pad, movement.transpose, movement.reshape, movement.flatten, movement.split,
    movement.unsqueeze, movement.squeeze, movement.gather, movement.concat,
]  # fmt: skip


def rows(g: Grower) -> Item:
    """Tokens: [batch, length, width]."""
    g.room = ROOM
    found = [i for i in g.pool if not i.is_sequence and i.dtype == F32 and i.rank == 3 and min(i.shape) > 0]
    if found and g.chance(0.6):
        return g.choice(found[-2:])
    t = g.choice([5, 7, 11]) if g.dynamic else g.choice([1, 2, 6, 9, 16, 17, 33])
    return g.fresh(F32, [g.choice([1, 1, 2, 3]), t, g.choice([8, 16, 24, 32, 36, 64])], constant=False)


@block(3)
def feed_forward(g: Grower) -> Item:
    x = rows(g)
    y = normalized(g, x) if g.chance(0.7) else x
    y = activated_rows(g, linear(g, y, 2 * g.choice([8, 12, 24, 37, 64])))
    y = linear(g, y, x.shape[-1])
    y = g.emit("Add", [x, y])
    return behind(g, y) if g.chance(0.4) else y


@block(3)
def product_with_epilogue(g: Grower) -> Item:
    x = rows(g)
    if g.chance(0.5):
        x = g.emit("Transpose", [x], perm=g.choice([[0, 2, 1], [1, 0, 2], [2, 1, 0]]))
    if g.dynamic and x.shape[-1] in SIZES.values():
        raise Skip
    return behind(g, linear(g, x, g.choice([1, 4, 8, 17, 32, 64])))


def heads_of(g: Grower, x: Item, heads: int) -> Item:
    """[batch, length, width] to [batch, heads, length, width / heads]"""
    y = g.emit("Reshape", [x], shape=np.array([0, 0, heads, x.shape[-1] // heads], np.int64))
    return g.emit("Transpose", [y], perm=[0, 2, 1, 3])


def rotated(g: Grower, x: Item) -> Item:
    """Rotary positions spelled out."""
    half = x.shape[-1] // 2
    cos, sin = (g.fresh(F32, [x.shape[2], x.shape[3]], Draw("unit"), constant=False) for _ in range(2))
    a, b = g.emit_all("Split", [x], 2, axis=3, split=[half, half])
    turned = g.emit("Concat", [g.emit("Neg", [b]), a], axis=3)
    return g.emit("Add", [g.emit("Mul", [x, cos]), g.emit("Mul", [turned, sin])])


def repeated(g: Grower, x: Item, times: int) -> Item:
    """Each head several times, for queries that share it."""
    h, d = x.shape[1], x.shape[3]
    y = g.emit("Unsqueeze", [x], axes=[2])
    if g.chance(0.5):
        y = g.emit("Tile", [y], repeats=np.array([1, 1, times, 1, 1], np.int64))
    else:
        y = g.emit("Concat", [y] * times, axis=2)
    s = g.emit("Shape", [x])
    one, three = (g.emit("Gather", [s, g.constant(np.array([k], np.int64))], axis=0) for k in (0, 2))
    shape = [one, g.constant(np.array([h * times], np.int64)), three, g.constant(np.array([d], np.int64))]
    return g.emit("Reshape", [y, g.emit("Concat", shape, axis=0)])


def masked(g: Grower, scores: Item) -> Item:
    """A mask that is added, one that chooses, of some shape; or a causal one, made of positions."""
    b, h, t, s = scores.shape
    shape = [[t, s], [b, 1, t, s], [b, 1, 1, s], [1, h, t, s], [s], [b, h, t, 1]][g.integer(0, 5)]
    kind = g.choice(["", "add", "where", "where not", "causal", "alibi", "bias"])
    if kind in ("add", "bias"):
        return g.emit("Add", [scores, g.fresh(F32, shape, Draw("normal" if kind == "bias" else "small"))])
    if kind.startswith("where"):
        low = g.constant(np.asarray(g.choice([-1e9, -1e4, -3.0]) if kind == "where" else -5.0, np.float32))
        mask = g.fresh(BOOL, shape)
        if kind == "where":
            # -1e9 is no plain number: it goes through the softmax before anything else sees it.
            return g.emit("Where", [mask, scores, g.emit("Mul", [low, g.constant(np.asarray(1e-3, np.float32))])])
        return g.emit("Where", [mask, low, scores])
    if kind == "causal" and not g.dynamic:
        lower = np.where(np.tri(t, s, s - t, dtype=bool), 0, -1e3).astype(np.float32)
        return g.emit("Add", [scores, g.constant(lower)])
    if kind == "causal" and g.opset >= 14:
        ones = g.emit("Expand", [g.constant(np.ones([1, 1], np.float32)), g.emit("Shape", [scores])])
        return g.emit("Where", [g.emit("Cast", [g.emit("Trilu", [ones], upper=0)], to=9), scores,
                                g.constant(np.asarray(-1e3, np.float32))])  # fmt: skip
    if kind == "alibi":
        return g.emit("Add", [scores, g.constant(g.rng.uniform(-1, 0, [1, h, 1, 1]).astype(np.float32))])
    return scores


@block(4)
def heads(g: Grower) -> list[Item]:
    """Attention with its products: one or three for queries, keys and values; shared heads; a past; positions."""
    x = rows(g)
    c = x.shape[-1]
    h = g.choice([n for n in (1, 2, 4, 8) if c % n == 0 and c // n % 2 == 0])
    share = g.choice([n for n in (1, 1, 2, 4) if h % n == 0])
    d, kept = c // h, h // share
    if share == 1 and g.chance(0.5):
        y = linear(g, x, 3 * c)
        q, k, v = g.emit_all("Split", [y], 3, axis=2, split=[c, c, c])
    else:
        q, k, v = linear(g, x, c), linear(g, x, kept * d), linear(g, x, kept * d)
    q, k, v = heads_of(g, q, h), heads_of(g, k, kept), heads_of(g, v, kept)
    if g.chance(0.3):
        q, k = rotated(g, q), rotated(g, k)
    if g.chance(0.3):
        past = g.choice([7, 11, 4])
        k, v = (
            g.emit("Concat", [g.fresh(F32, [x.shape[0], kept, past, d], constant=False), i], axis=2) for i in (k, v)
        )
    ends = [k, v] if g.chance(0.3) else []
    if share > 1:
        k, v = repeated(g, k, share), repeated(g, v, share)
    scale = g.constant(np.asarray(d**-0.5, np.float32))
    if g.chance(0.3):
        q = g.emit("Mul", [q, scale])
    k = g.emit("Transpose", [k], perm=[0, 1, 3, 2])
    scores = g.emit("MatMul", [q, k])
    scores = masked(g, g.emit("Mul", [scores, scale]) if g.chance(0.7) else scores)
    p = g.emit("Softmax", [scores], axis=3)
    if g.chance(0.1):
        ends.append(p)
    y = g.emit("Transpose", [g.emit("MatMul", [p, v])], perm=[0, 2, 1, 3])
    y = g.emit("Reshape", [y], shape=np.array([0, 0, c], np.int64))
    y = linear(g, y, c)
    if g.chance(0.7):
        y = g.emit("Add", [x, y])
    g.model.outputs += [i.name for i in ends]
    return [behind(g, y) if g.chance(0.3) else y, *ends]


@block(2)
def embedded(g: Grower) -> Item:
    """Rows of a table, with those of their positions."""
    g.room = ROOM
    c, words = g.choice([8, 16, 32]), g.choice([6, 20, 50])
    t = 7 if g.dynamic else g.choice([1, 4, 9])
    ids = g.fresh(g.choice([I64, I64, np.dtype(np.int32)]), [g.choice([1, 2, 3]), t], Draw("forward", words), False)
    y = g.emit("Gather", [weight(g, [words, c], 1), ids], axis=0)
    table = weight(g, [40, c], 1)
    if g.dynamic:
        size = g.emit("Gather", [g.emit("Shape", [ids]), g.constant(np.array([1], np.int64))], axis=0)
        zero = g.constant(np.array([0], np.int64))
        if g.opset < 10:
            raise Skip
        at = g.emit("Slice", [table, zero, size, zero])
    else:
        at = g.constant(g.state.values[table.name][:t])  # type: ignore[arg-type]
    return normalized(g, g.emit("Add", [y, at]))
