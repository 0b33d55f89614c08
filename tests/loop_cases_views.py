"""Loop kernels: broadcasting, sizes, views, and reads of places that data names."""

from __future__ import annotations

import itertools

import numpy as np

from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from tests.loop_cases import Bench, Table

TABLE = Table()
case = TABLE.case


# ---------------------------------------------------------------- broadcasting, sizes, views


@case()
def broadcasts(b: Bench) -> list[Value]:
    x, row, column, one, scalar = b.x(b.n, b.m), b.x(b.m), b.x(b.n, 1), b.x(1, 1), b.x()
    return [
        b.add(x, row),
        b.mul(b.add(x, column), b.sub(row, scalar)),
        b.add(one, b.mul(column, row)),
        b.add(scalar, one),
        b.exp(scalar),
    ]


@case()
def broadcast_middle(b: Bench) -> list[Value]:
    x, y = b.x(3, b.n, 1, b.m), b.x(b.n, 5, 1)
    return [b.add(x, y), b.mul(b.x(2, 1, 1, b.m, 1), b.x(b.n, 1, 3))]


@case()
def broadcast_both_ways(b: Bench) -> Value:
    return b.sub(b.x(b.n, 1, b.m, 1, 3), b.x(1, 4, 1, 2, 1))


@case()
def every_lane_size(b: Bench) -> list[Value]:
    return [
        b.tanh(b.x(b.m, d, dtype=t))
        for d, t in zip((1, 7, 17, 31, 33), itertools.cycle([dtypes.float32, dtypes.float64]), strict=False)
    ]


@case(dynamic=False)
def empty(b: Bench) -> list[Value]:
    x = b.x(3, 0, 4)
    return [
        b.exp(x),
        b.reduce("sum", x, [1]),
        b.reduce("prod", x, [1, 2]),
        b.reshape(x, (0, 12)),
        b.concat([x, b.x(3, 2, 4), x], 1),
        b.pad(x, (0, 1, 0), (0, 1, 0), 3.0),
        b.reduce("max", b.transpose(x, (2, 0, 1)), [0]),
    ]


@case()
def reshapes(b: Bench) -> list[Value]:
    x = b.x(6, b.n, 4)
    y = b.exp(x)
    return [
        b.reshape(y, (2, 3, b.n, 2, 2)),
        b.reshape(y, (3, b.n * 8)),
        b.neg(b.reshape(b.reshape(y, (b.n * 24,)), (2, b.n * 3, 4))),
    ]


@case(dynamic=False)
def reshapes_that_do_not_nest(b: Bench) -> list[Value]:
    x = b.x(6, 10, 4)
    return [
        b.add(b.reshape(x, (15, 16)), b.reshape(b.x(16, 15), (15, 16))),
        b.reduce("sum", b.reshape(b.exp(x), (16, 15)), [1]),
        b.softmax(b.reshape(x, (5, 48)), 1),
        b.transpose(b.reshape(x, (8, 30)), (1, 0)),
    ]


@case()
def transposes(b: Bench) -> list[Value]:
    x, y = b.x(b.n, 3, b.m), b.x(2, 3, b.n, 2, 3, 2)
    return [
        b.transpose(x, (2, 1, 0)),
        b.exp(b.transpose(x, (1, 0, 2))),
        b.transpose(b.neg(x), (0, 2, 1)),
        b.transpose(y, (5, 4, 3, 2, 1, 0)),
        b.transpose(y, (3, 0, 5, 1, 2, 4)),
    ]


@case()
def transpose_and_sum(b: Bench) -> Value:
    x = b.x(3, b.n, b.m)
    return b.reduce("sum", b.mul(b.swap(x, 1, 2), b.x(3, b.m, b.n)), [1])


@case(dynamic=False)
def slices(b: Bench) -> list[Value]:
    x = b.x(9, 40, 6)
    cut = b.slice(x, 1, 3, 38, 5)
    back = b.slice(b.slice(x, 0, 8, -1, -2), 2, 5, 1, -3)
    return [
        cut,
        back,
        b.add(b.slice(x, 1, 0, 20), b.slice(x, 1, 20, 40)),
        b.reduce("max", b.flip(x, (0, 2)), [1]),
        b.slice(x, 2, 4, 4),
    ]


@case()
def dynamic_slices(b: Bench) -> list[Value]:
    x = b.x(b.n, b.m)
    half = b.m // 2
    return [
        b.slice(x, 1, half, b.m),
        b.flip(x, (0, 1)),
        b.slice(b.exp(x), 1, 0, half),
        b.slice(x, 0, 0, b.n, 2),
    ]


@case()
def expands(b: Bench) -> list[Value]:
    x = b.x(b.n, 1)
    return [
        b.expand(x, (b.n, b.m)),
        b.exp(b.expand(b.tanh(x), (2, b.n, 3))),
        b.reduce("sum", b.expand(x, (b.n, b.m)), [1]),
        b.full((b.m, 2), 3.5, dtypes.float64),
    ]


@case()
def pads(b: Bench) -> list[Value]:
    x = b.x(b.n, b.m)
    return [
        b.pad(x, (1, 0), (0, 2), -1.0),
        b.exp(b.pad(b.neg(x), (0, 3), (0, 0))),
        b.pad(x, (1, 2), (3, 4), 0.5, (1, 2)),
        b.reduce("sum", b.pad(b.x(b.n, 5), (0, 2), (0, 1), 9.0), [1]),
        b.softmax(b.pad(b.x(b.n, 20), (0, 1), (0, 1)), 1),
    ]


@case()
def pad_of_pad(b: Bench) -> Value:
    return b.add(b.pad(b.pad(b.x(b.n, b.m), (0, 1), (1, 0), 1.0), (1, 1), (0, 1), 2.0), b.x(b.n + 2, b.m + 3))


@case()
def concats(b: Bench) -> list[Value]:
    x, y, z = b.x(b.n, b.m), b.x(b.n, 3), b.x(b.n, b.m)
    return [
        b.concat([x, b.exp(y), z], 1),
        b.concat([b.add(x, z), x], 0),
        b.mul(b.concat([x, y], 1), b.concat([b.neg(y), z], 1)),
        b.concat([b.x(b.n, 2, b.m), b.x(b.n, 1, b.m)], 1),
    ]


@case()
def concat_of_concat(b: Bench) -> list[Value]:
    x = b.x(b.n, 2)
    inner = b.concat([x, b.x(b.n, b.m), b.tanh(x)], 1)
    return [b.concat([inner, b.x(b.n, 1), inner], 1), inner]


@case()
def concat_reduced(b: Bench) -> list[Value]:
    both = b.concat([b.x(b.n, b.m), b.x(b.n, 4)], 1)
    return [
        b.reduce("sum", both, [1]),
        b.softmax(both, 1),
        b.reduce("max", b.concat([b.x(2, b.n), b.x(3, b.n)], 0), [0]),
    ]


@case()
def concat_many(b: Bench) -> Value:
    return b.exp(b.concat([b.x(b.n, k % 3 + 1, dtype=dtypes.float64) for k in range(12)], 1))


@case()
def rope(b: Bench) -> Value:
    """Rotary embedding: halves swapped, one negated."""
    x = b.x(b.n, 4, 32)
    turned = b.concat([b.neg(b.slice(x, 2, 16, 32)), b.slice(x, 2, 0, 16)], 2)
    return b.add(b.mul(x, b.x(b.n, 1, 32)), b.mul(turned, b.x(b.n, 1, 32)))


@case()
def iotas_and_sizes(b: Bench) -> list[Value]:
    mask = b.le(b.reshape(b.iota(b.m), (1, b.m)), b.reshape(b.iota(b.n), (b.n, 1)))
    sizes = b.sizes(np.array([b.n, b.m, 3], dtype=object))
    return [
        b.where(mask, b.x(b.n, b.m), -np.inf),
        b.add(sizes, 1),
        b.cast(b.iota(b.n * 2), dtypes.float32),
        b.mul(b.iota(b.m, dtypes.int32), 3),
        b.size_as(b.n * b.m, dtypes.float32),
    ]


# ---------------------------------------------------------------- data-dependent reads


@case()
def gathers(b: Bench) -> list[Value]:
    x = b.x(9, b.m)
    at = b.index(9, b.n, 2)
    return [
        b.gather(x, at, 0),
        b.exp(b.gather(x, b.index(9), 0)),
        b.gather(b.x(b.n, 11), b.index(11, 5, dtype=dtypes.int32), 1),
        b.add(b.gather(x, at, 0), b.x(b.m)),
    ]


@case()
def gathers_turned(b: Bench) -> list[Value]:
    """Rows that data chooses, stored as columns: whole tiles and parts of them, in every width of a lane."""
    at, turned = b.index(9, b.n, dtype=dtypes.int32), []
    for dtype in (dtypes.float32, dtypes.float64, dtypes.float16, dtypes.int8, dtypes.boolean, dtypes.int64):
        wide, open_ = b.x(9, 37, dtype=dtype), b.x(9, b.m, dtype=dtype)
        turned += [b.transpose(b.gather(v, at, 0), (1, 0)) for v in (wide, open_)]
    x, y = b.x(b.n, 9, 24), b.x(b.n, 50, 24)
    two = b.add(b.gather(x, b.index(9, 50), 1), b.mul(b.gather(x, b.index(9, 50), 1), b.x(50, 1)))
    pairs = b.one(
        "gather_nd", b.x(6, 5, 21), b.array(np.stack([np.arange(40) % 6, np.arange(40) // 3 % 5], 1)), batch_dims=0
    )
    return [
        *turned,
        b.transpose(b.exp(two), (0, 2, 1)),
        b.transpose(b.sub(two, y), (2, 0, 1)),
        b.transpose(b.mul(b.reduce("sum", two, [2], True), two), (0, 2, 1)),
        b.transpose(pairs, (1, 0)),
        b.pad(b.transpose(b.gather(b.x(9, 40), at, 0), (1, 0)), (1, 2), (2, 1), 3.0),
    ]


@case()
def gather_innermost(b: Bench) -> list[Value]:
    x = b.x(b.n, 40)
    at = b.index(40, b.m)
    return [b.gather(x, at, 1), b.reduce("sum", b.gather(b.exp(x), at, 1), [1]), b.gather(x, b.index(40), 1)]


@case()
def gather_elements(b: Bench) -> list[Value]:
    x = b.x(8, b.m, 5)
    return [
        b.one("gather_elements", x, b.index(8, b.n, b.m, 5), axis=0),
        b.one("gather_elements", b.x(b.n, 20), b.index(20, b.n, b.m), axis=1),
    ]


@case()
def gather_nd(b: Bench) -> list[Value]:
    x = b.x(6, 6, b.m)
    return [
        b.one("gather_nd", x, b.index(6, b.n, 2), batch_dims=0),
        b.one("gather_nd", x, b.index(6, 6, b.n, 1), batch_dims=1),
        b.one("gather_nd", x, b.index(6, 3, 1), batch_dims=0),
    ]


@case()
def gather_of_gather(b: Bench) -> Value:
    return b.gather(b.x(7, b.m), b.gather(b.index(7, 10), b.index(10, b.n), 0), 0)


@case()
def gather_under_guards(b: Bench) -> list[Value]:
    x, at = b.gather(b.x(9, 8), b.index(9, b.n), 0), b.index(8, b.n, b.m)
    picked = b.one("gather_elements", b.x(b.n, 8), at, axis=1)
    return [
        b.pad(x, (1, 1), (1, 0), 2.0),
        b.neg(b.concat([picked, b.slice(x, 1, 0, 3), picked], 1)),
        b.pad(b.exp(picked), (0, 2), (0, 1)),
    ]


@case()
def embeddings(b: Bench) -> Value:
    tokens, positions = b.gather(b.x(50, 24), b.index(50, b.n, b.m), 0), b.x(b.m, 24)
    x = b.add(tokens, positions)
    centred = b.sub(x, b.mean(x, [2], True))
    return b.div(centred, b.sqrt(b.add(b.mean(b.mul(centred, centred), [2], True), 1e-5)))
