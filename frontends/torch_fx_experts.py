"""Products of groups of rows, each by a matrix of its own: the experts of a mixture.

Only models have these rules: PyTorch, where it is there, multiplies group by group, and reads each matrix in its place.
"""

from __future__ import annotations

from typing import Any

from onnxc.errors import UnsupportedError
from onnxc.frontends.torch_fx_nn import widened
from onnxc.frontends.torch_fx_table import Call, alone, aten, named, static
from onnxc.ir import dtypes
from onnxc.ir.expr import ceildiv, maximum, minimum
from onnxc.ir.graph import Value
from onnxc.primitives.builder import Builder


def grouped_rows(b: Builder, x: Value, matrices: Value, ends: Value) -> Value:
    """x[s] @ matrices[g] for each row s, [S, N]; group g has the rows from ends[g - 1] to ends[g] (not included).

    The rows of a group are laid into blocks of equally many rows, of which there are at most two for each group, so
    that one batched product of known sizes does. Rows after the last group are zero.

    Args:
        x: [S, K].
        matrices: [G, K, N].
        ends: [G], integers that do not decrease.
    """
    rows, groups = x.shape[0], static(matrices.shape[0], "the number of groups")
    if rows == 0 or groups == 0:
        return b.full((rows, matrices.shape[2]), 0, x.dtype)
    height = maximum(ceildiv(rows, groups), 1)
    count = minimum(rows, 2 * groups)  # of blocks: each has a row, and each group one that is not full
    tall = b.size_as(height, dtypes.int64)

    ends = b.cast(ends, dtypes.int64)
    starts = b.concat([b.full((1,), 0, dtypes.int64), b.slice(ends, 0, 0, groups - 1)], 0)
    needed = b.div(b.add(b.sub(ends, starts), b.sub(tall, 1)), tall)
    after = b.one("cumsum", needed, axis=0, exclusive=False, reverse=False)
    firsts = b.sub(after, needed)  # block of each group

    blocks = b.iota(count)
    group = b.min(_passed(b, after, blocks), groups - 1)
    begin = b.add(b.gather(starts, group, 0), b.mul(b.sub(blocks, b.gather(firsts, group, 0)), tall))
    taken = b.add(b.reshape(begin, (count, 1)), b.reshape(b.iota(height), (1, height)))
    taken = b.clip(taken, 0, b.size_as(rows - 1, dtypes.int64))
    products = b.matmul(b.gather(x, taken, 0), b.gather(matrices, group, 0))

    row = b.iota(rows)
    owner = _passed(b, ends, row)
    known = b.min(owner, groups - 1)
    place = b.add(b.mul(b.gather(firsts, known, 0), tall), b.sub(row, b.gather(starts, known, 0)))
    place = b.clip(place, 0, b.size_as(count * height - 1, dtypes.int64))
    found = b.gather(b.reshape(products, (count * height, matrices.shape[2])), place, 0)
    return b.where(b.reshape(b.lt(owner, groups), (rows, 1)), found, 0.0)


def _passed(b: Builder, ends: Value, at: Value) -> Value:
    """How many of the ends do not lie after each place."""
    reached = b.le(b.reshape(ends, (1, *ends.shape)), b.reshape(at, (*at.shape, 1)))
    return b.reduce("sum", b.cast(reached, dtypes.int64), [1])


@named("transformers.grouped_mm_fallback.default")
@alone
def grouped_mm_fallback(c: Call, x: Value, matrices: Value, offs: Value) -> Value:
    x, matrices = widened(c.b, x, matrices)
    return grouped_rows(c.b, x, matrices, offs)


@aten("_grouped_mm")
@alone
def grouped_mm(
    c: Call, x: Value, matrices: Value, offs: Value | None = None, bias: Value | None = None, out_dtype: Any = None
) -> Value:
    if bias is not None or x.rank != 2 or matrices.rank != 3 or offs is None:
        raise UnsupportedError("groups of other than rows, or a bias")
    x, matrices = widened(c.b, x, matrices)
    return grouped_rows(c.b, x, matrices, offs)
