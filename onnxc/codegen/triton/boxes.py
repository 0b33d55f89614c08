"""Non-maximum suppression: a program for each class of each image, and one that moves what they found together.

A program keeps the scores of the boxes that are left as integers in the order of the scores, with the box below them.
It takes the greatest, crosses out what overlaps that box, and finds the next greatest on the way.
"""

from __future__ import annotations

from dataclasses import replace

from onnxc.codegen.triton.kernel import Kernel, indent
from onnxc.codegen.triton.writer import ERR_SHAPE, ERR_VALUE, Writer
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, always_equal, maximum
from onnxc.ir.graph import Node, Value
from onnxc.ir.types import TensorType
from onnxc.planner.layout import Layout

BOXES = 2048  # that a program looks at at a time
MOVED = 256  # rows that are moved at a time
GONE = -(1 << 63)  # in the place of a score
LOW = (1 << 32) - 1  # bits of a box below its score


def suppression(node: Node, layout: Layout) -> list[Kernel]:
    """The kernels of `nms`."""
    boxes, scores, *_ = node.operands
    units = scores.shape[0] * scores.shape[1]
    left = Value(TensorType(dtypes.int64, (units * boxes.shape[1],)))
    found = Value(TensorType(dtypes.int64, (units * node.attrs["room"],)))
    counts = Value(TensorType(dtypes.int64, (units,)))
    return [
        replace(_selected(node, layout, left, found, counts), scratch=(left, found, counts)),
        _moved(node, layout, units, found, counts),
    ]


def _selected(node: Node, layout: Layout, left: Value, found: Value, counts: Value) -> Kernel:
    boxes, scores, most, overlap, *least = node.operands
    w = Writer(layout, (boxes, scores, left, found))
    n, room = w.size(boxes.shape[1]), w.size(node.attrs["room"])
    batch, box, step = (w.size(s) for s in layout.strides(boxes))
    of_batch, of, score = (w.size(s) for s in layout.strides(scores))
    w.lines += [
        f"b = pid // {w.size(scores.shape[1])}", f"c = pid % {w.size(scores.shape[1])}",
        f"boxes = {w.start(boxes)} + b * {batch}", f"scores = {w.start(scores)} + b * {of_batch} + c * {of}",
        f"left = {w.start(left)} + pid * {n}", f"n = {n}", f"limit = tl.load({w.start(overlap)})",
        f"most = tl.minimum(tl.load({w.start(most)}), {room})",
    ]  # fmt: skip
    _check(w, "(limit >= 0) & (limit <= 1)", ERR_VALUE, "0")
    pairs = (boxes.shape[0], scores.shape[0]), (boxes.shape[1], scores.shape[2]), (boxes.shape[2], 4)
    for a, b in pairs:
        if not always_equal(a, b):
            _check(w, f"{w.size(a)} == {w.size(b)}", ERR_SHAPE, w.size(a))
    counted = f" & (s > tl.load({w.start(least[0])}))" if least else ""
    w.lines += [
        f"best = tl.full((), {GONE}, tl.int64)", f"for i0 in range(0, n, {BOXES}):",
        *indent([
            f"i = i0 + tl.arange(0, {BOXES})", f"s = tl.load(scores + i * {score}, mask=i < n, other=0.0)",
            f"key = tl.where((i < n){counted}, ox_score_key(s, i), {GONE})",
            "tl.store(left + i, key, mask=i < n)", "best = tl.maximum(best, tl.max(key, 0))",
        ]),
        "count = most * 0", f"while (count < most) & (best > {GONE}):",
        *indent([
            f"at = {LOW} - (best & {LOW})", f"tl.store({w.start(found)} + pid * {room} + count, at)",
            *_corners(node, "taken", f"boxes + at * {box}", step), f"best = tl.full((), {GONE}, tl.int64)",
            "tl.debug_barrier()", f"for i0 in range(0, n, {BOXES}):",
            *indent([
                f"i = i0 + tl.arange(0, {BOXES})", f"key = tl.load(left + i, mask=i < n, other={GONE})",
                f"alive = key > {GONE}", *_corners(node, "other", f"boxes + i * {box}", step, "alive"),
                f"gone = ox_overlaps({_ends('other')}, {_ends('taken')}, limit) | (i == at)",
                f"key = tl.where(gone, {GONE}, key)", "tl.store(left + i, key, mask=alive & gone)",
                "best = tl.maximum(best, tl.max(key, 0))",
            ]),
            "count += 1",
        ]),
        f"tl.store({w.start(counts)} + pid, count)",
    ]  # fmt: skip
    return w.kernel(counts.t.size, BOXES)


def _check(w: Writer, good: str, code: int, value: str) -> None:
    """Reports what is not good; nothing is selected then."""
    w.buffers.reports = True
    w.lines += [
        f"good = {good}", f"ox_report(error, tl.full((1,), 1, tl.int32) != good, {code}, call, {value})",
        "n = tl.where(good, n, 0)",
    ]  # fmt: skip


def _corners(node: Node, name: str, at: str, step: str, mask: str = "") -> list[str]:
    """Statements that read the corners of boxes: from x0 to x1, and from y0 to y1."""
    masked = f", mask={mask}, other=0.0" if mask else ""
    read = [f"{name}{k} = tl.load({at} + {k} * {step}{masked})" for k in range(4)]
    a, b, c, d = (f"{name}{k}" for k in range(4))
    if node.attrs["center"]:
        ends = [
            f"{name}x0, {name}x1 = {a} - {c} / 2, {a} + {c} / 2",
            f"{name}y0, {name}y1 = {b} - {d} / 2, {b} + {d} / 2",
        ]
    else:
        ends = [f"{name}x0, {name}x1 = ox_in_order({b}, {d})", f"{name}y0, {name}y1 = ox_in_order({a}, {c})"]
    return [*read, *ends]


def _ends(name: str) -> str:
    return ", ".join(f"{name}{end}" for end in ("x0", "x1", "y0", "y1"))


def _moved(node: Node, layout: Layout, units: Dim, found: Value, counts: Value) -> Kernel:
    rows, count = node.outputs
    scores, room = node.operands[1], node.attrs["room"]
    w = Writer(layout, (rows, found, counts))
    row, column = (w.size(s) for s in layout.strides(rows))
    columns = (f"pid // {w.size(scores.shape[1])}", f"pid % {w.size(scores.shape[1])}", "at")
    stores = [f"tl.store(to + {k} * {column}, {text} + at * 0, mask=rm)" for k, text in enumerate(columns)]
    w.lines += [
        "start = tl.zeros((), tl.int64)", f"for j0 in range(0, pid, {MOVED}):",
        *indent([
            f"j = j0 + tl.arange(0, {MOVED})",
            f"start += tl.sum(tl.load({w.start(counts)} + j, mask=j < pid, other=0), 0)",
        ]),
        f"own = tl.load({w.start(counts)} + pid, mask=pid < {w.size(units)}, other=0)",
        f"for r0 in range(0, own, {MOVED}):",
        *indent([
            f"r = r0 + tl.arange(0, {MOVED})", "rm = r < own",
            f"at = tl.load({w.start(found)} + pid * {w.size(room)} + r, mask=rm, other=0)",
            f"to = {w.start(rows)} + (start + r) * {row}", *stores,
        ]),
        f"if pid == {w.size(maximum(1, units))} - 1:", f"    tl.store({w.start(count)}, start + own)",
    ]  # fmt: skip
    return w.kernel(maximum(1, units), MOVED)
