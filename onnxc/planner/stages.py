"""Routines over long rows in stages, for machines on which many programs work side by side.

The best of a row are found by comparing each element with all of its row:

    top_k [n] -> [k]        n comparisons of each element

becomes the best of short runs, and then the best of several runs that are in order already, until one run is left:

    top_k [n / 256, 256] -> [n / 256, k]        256 comparisons of each element
    top_k [n / 4096, 16 k] -> [n / 4096, k]     runs=k: a binary search in each of 15 other runs
    ...

Runs are neighbours, so among equal elements the one that comes first in the row stays first. The last run is filled up
with what comes last of all: an infinity, NaN, or the end of an integer's range.

Where few of many are wanted, they are found first, in any order, by halving the range in which the last of them lies:

    top_k loose [n / 16384, 16384] -> [n / 16384, k]    one comparison of each element for each of its bits
    top_k [n / 16384 k] -> [k]                          in order

A running sum over few long rows becomes one over parts of them; what the parts before sum up to is added afterwards.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import prod
from onnxc.ir.graph import Graph, Node, Value
from onnxc.passes.simplify import Rewriter
from onnxc.planner.layout import Layout
from onnxc.primitives.builder import Builder

LONG_SUM = 1 << 14  # elements of a row that one program sums up
FEW = 512  # rows that leave programs idle
PART = 4096  # elements of a part of a running sum
LONG = 2048  # elements of a row that one step takes
RUNS = (256, 1024)  # elements of the first runs, where few are wanted, and where many are
MERGED = 16  # runs that become one
SEARCHED = 1 << 14  # elements that one program's registers hold, by 32 bits
SHORT = 256  # elements of a row that are compared with each other at once
SCARCE = 4  # times as many elements as are wanted, at least, for these to be looked for first
IDLE = 256  # programs that leave multiprocessors idle
LOOSE = (  # dtypes whose order 64 bits hold
    "float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"
)  # fmt: skip


def divide_routines(graph: Graph, layout: Layout) -> tuple[Graph, Layout]:
    """The graph with `top_k` and `cumsum` of long rows in stages."""
    stages = {"top_k": _best, "cumsum": _running}
    if not any(_is_long(n) for n in graph.nodes):
        return graph, layout
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        if not _is_long(node):
            rewriter.keep(node)
            continue
        builder = Builder()
        builder.origin = node.origin
        x = rewriter.value(node.operands[0])
        assert x is not None
        found = stages[node.op](builder, x, node)
        rewriter.nodes += builder.nodes
        for old, new in zip(node.outputs, found, strict=True):
            rewriter.replace(old, new)
    order = dict(layout.order)
    order |= {new.id: order[old] for old, new in rewriter.replaced.items() if old in order}
    return rewriter.result(), replace(layout, order=order)


def _is_long(node: Node) -> bool:
    if node.op not in ("top_k", "cumsum"):
        return False
    x, y = node.operands[0], node.outputs[0]
    n, size = x.shape[node.attrs["axis"]], x.t.size
    if not isinstance(n, int) or 0 in y.shape:
        return False
    if node.op == "top_k":
        k = y.shape[node.attrs["axis"]]
        return isinstance(k, int) and (n > LONG or (n > SHORT and _are_scarce(x, n, k)))
    return isinstance(size, int) and n > LONG_SUM and size // n < FEW


def _are_scarce(x: Value, n: int, k: int) -> bool:
    """Whether so few of n are wanted that they are looked for before they are put in order."""
    return x.dtype.name in LOOSE and SCARCE * k <= n and k <= LONG


# ---------------------------------------------------------------- running sums


def _running(b: Builder, x: Value, node: Node) -> list[Value]:
    """Running sums of parts, and the sum of the parts before added to each. 16-bit floats are summed as float32."""
    axis, attrs = node.attrs["axis"], {k: v for k, v in node.attrs.items() if k != "axis"}
    order = [*(a for a in range(x.rank) if a != axis), axis]
    wide = dtypes.float32 if x.dtype.is_float and x.dtype.bits < 32 else x.dtype
    rows = b.transpose(b.cast(x, wide), order)
    around, n = rows.shape[:-1], _int(rows.shape[-1])
    parts = _in_runs(b, b.reshape(rows, (*around, 1, n)), PART, wide.numpy.type(-0.0))
    count, last = _int(parts.shape[-2]), parts.rank - 1
    own = b.one("cumsum", parts, axis=last, **attrs)
    if attrs.get("exclusive"):
        totals = b.reduce("sum", parts, [last], True)
    else:
        at = 0 if attrs.get("reverse") else PART - 1
        totals = b.slice(own, last, at, at + 1)
    before = b.one("cumsum", totals, axis=last - 1, **{**attrs, "exclusive": 1})
    first = count - 1 if attrs.get("reverse") else 0
    alone = b.reshape(b.one("eq", b.iota(count), b.scalar(first, dtypes.int64)), (count, 1))
    found = b.one("where", alone, own, b.add(own, before))  # nothing is added to the first: -0.0 stays what it is
    found = b.slice(b.reshape(found, (*around, count * PART)), rows.rank - 1, 0, n)
    back = sorted(range(x.rank), key=order.__getitem__)
    return [b.cast(b.transpose(found, back), x.dtype)]


# ---------------------------------------------------------------- the best


def _best(b: Builder, x: Value, node: Node) -> list[Value]:
    """Values and positions of the best of long rows."""
    axis, largest = node.attrs["axis"], node.attrs["largest"]
    n, k = x.shape[axis], node.outputs[0].shape[axis]
    assert isinstance(n, int) and isinstance(k, int)
    order = [*(a for a in range(x.rank) if a != axis), axis]
    rows = b.transpose(x, order)
    around = rows.shape[:-1]
    back = sorted(range(x.rank), key=order.__getitem__)
    if _are_scarce(x, n, k):
        found = _chosen(b, rows, k, largest)
        return [b.transpose(b.reshape(v, (*around, k)), back) for v in found]
    length = RUNS[0] if 2 * k <= RUNS[0] else RUNS[1]
    values = _in_runs(b, b.reshape(rows, (*around, 1, n)), length, _last(x.dtype, largest))
    values, at = b.emit("top_k", [values], _attrs(values, min(k, length), largest))
    starts = b.mul(b.iota(values.shape[-2]), length)
    at = b.add(at, b.reshape(starts, (values.shape[-2], 1)))
    while values.shape[-2] != 1:
        runs = min(MERGED, _int(values.shape[-2]))
        kept = _int(values.shape[-1])
        values = _joined(b, values, runs, _last(x.dtype, largest))
        at = _joined(b, at, runs, np.int64(0))
        attrs = _attrs(values, min(k, runs * kept), largest)
        values, among = b.emit("top_k", [values], {**attrs, "runs": kept})
        at = b.one("gather_elements", at, among, axis=at.rank - 1)
    return [b.transpose(b.reshape(v, (*around, k)), back) for v in (values, at)]


def _chosen(b: Builder, rows: Value, k: int, largest: bool) -> tuple[Value, Value]:
    """Values and positions of the k best of rows [..., n]: found in pieces, then put in order."""
    around, last = rows.shape[:-1], _last(rows.dtype, largest)
    values = b.reshape(rows, (*around, 1, rows.shape[-1]))
    at: Value | None = None
    while at is None or _int(values.shape[-1]) > max(SHORT, k):
        length = _piece(values, k)
        values = _in_runs(b, values, length, last)
        places = None if at is None else _in_runs(b, at, length, np.int64(0))
        values, found = b.emit("top_k", [values], {**_attrs(values, k, largest), "loose": True})
        if places is None:
            at = b.add(found, b.reshape(b.mul(b.iota(values.shape[-2]), length), (values.shape[-2], 1)))
        else:
            at = b.one("gather_elements", places, found, axis=found.rank - 1)
        count = _int(values.shape[-2]) * k
        values, at = (b.reshape(v, (*around, 1, count)) for v in (values, at))
    values, among = b.emit("top_k", [values], _attrs(values, k, largest))
    return values, b.one("gather_elements", at, among, axis=at.rank - 1)


def _piece(x: Value, k: int) -> int:
    """Elements of the pieces of rows, as even as may be: shorter ones where there are few rows."""
    n, rows = _int(x.shape[-1]), prod(x.shape[:-1])
    most = SEARCHED if x.dtype.bits <= 32 else SEARCHED // 2
    while most > max(LONG, SCARCE * k) and isinstance(rows, int) and rows * -(-n // most) * 2 <= IDLE:
        most //= 2
    count = -(-n // most)
    return -(-n // count)


def _attrs(x: Value, k: int, largest: bool) -> dict[str, object]:
    return {"k": k, "axis": x.rank - 1, "largest": largest}


def _int(d: object) -> int:
    assert isinstance(d, int)
    return d


def _last(dtype: DType, largest: bool) -> np.generic:
    """An element that comes after all others, or beside them."""
    number: float = -np.inf if largest else np.nan
    if not dtype.is_float:
        limits = np.iinfo(dtype.numpy)
        number = limits.min if largest else limits.max
    found: np.generic = dtype.numpy.type(number)
    return found


def _in_runs(b: Builder, x: Value, length: int, last: np.generic) -> Value:
    """[..., 1, n] as runs [..., n / length, length], filled up."""
    n = _int(x.shape[-1])
    count = -(-n // length)
    x = b.pad(x, (0,) * x.rank, (*(0,) * (x.rank - 1), count * length - n), last)
    return b.reshape(x, (*x.shape[:-2], count, length))


def _joined(b: Builder, x: Value, runs: int, last: np.generic) -> Value:
    """Runs [..., r, n], `runs` of them in one row: [..., r / runs, runs * n]."""
    count = -(-_int(x.shape[-2]) // runs)
    x = b.pad(x, (0,) * x.rank, (*(0,) * (x.rank - 2), count * runs - _int(x.shape[-2]), 0), last)
    return b.reshape(x, (*x.shape[:-2], count, runs * _int(x.shape[-1])))
