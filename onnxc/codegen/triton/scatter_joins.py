"""Scatters that join many updates, in an order that does not depend on the order in which programs run."""

from __future__ import annotations

import math

from onnxc.codegen.cpp.routine import without
from onnxc.codegen.triton.kernel import Kernel, indent, power
from onnxc.codegen.triton.scatter_parts import Slices, joined
from onnxc.codegen.triton.writer import Reach, Writer, kept, loaded
from onnxc.ir.expr import Dim, ceildiv, maximum, minimum, prod
from onnxc.ir.graph import Node
from onnxc.planner.layout import Layout

COMPARED = 20_000_000  # pairs of rows that are compared with each other, above which all are sorted
SEARCHED = 1024  # places of rows that a program compares at a time
SUMMED = (8, 256)  # rows, and elements of each, that it adds up at a time
MANY = 8  # rows among these places, above which they are not looked for one by one
OWNERS = 512  # programs that have places to themselves
LINES, SEEN = 8, 512  # lines, and updates of all of them, that a program looks at at a time


def joined_rows(node: Node, layout: Layout) -> Kernel:
    """The kernel that joins slices with a result that begins as the data."""
    return _summed_rows(node, layout) if _are_summed(node) else _owned_rows(node, layout)


def most_rows(node: Node, layout: Layout) -> int | None:
    """How many rows that kernel joins sooner than they are sorted, where it compares each with all others."""
    if not _are_summed(node):
        return None
    s = Slices(node, layout)
    size = s.slice(s.data, s.out, s.updates).count
    blocks = ceildiv(size, SUMMED[1]) if isinstance(size, int) else 1
    assert isinstance(blocks, int)
    return math.isqrt(COMPARED // max(1, blocks))


def _are_summed(node: Node) -> bool:
    return str(node.attrs["reduction"]) == "add" and node.output.dtype.name == "float32"


# ---------------------------------------------------------------- each row compared with all others


def _summed_rows(node: Node, layout: Layout) -> Kernel:
    """A program for each row and some of its elements: the first row for a place adds up all rows for it."""
    s = Slices(node, layout)
    slices, out = s.slice(s.data, s.out, s.updates), s.out
    w = Writer(layout, (s.data, out, s.index, s.updates), s.rows.count * slices.count)
    piece, width = SUMMED
    searched = min(SEARCHED, power(s.rows.count)) if isinstance(s.rows.count, int) else SEARCHED
    width = min(width, power(slices.count)) if isinstance(slices.count, int) else width
    blocks, count, kind = ceildiv(slices.count, width), w.size(s.rows.count), ".to(tl.int64)" if w.wide else ""
    w.lanes("q", f"pid % {w.size(blocks)} * {width}", width, "[None, :]")
    w.lines += [
        f"qm = q < {w.size(slices.count)}", f"row = pid // {w.size(blocks)}", "i = row + tl.zeros((1, 1), tl.int32)",
        "im = i >= 0", f"lane = tl.arange(0, {searched}){kind}[:, None]",
        f"near = tl.arange(0, {piece}){kind}[:, None]",
    ]  # fmt: skip
    from_data, to_out, from_updates = w.spread("q", slices)
    s.write_places(w)
    search = ["j = j0 + lane", *s.same_place(w, "j")]
    some = [
        "k = k0 + near", *s.same_place(w, "k"),
        f"u = tl.load({w.start(s.updates)} + at_k + {from_updates}, mask=same_k & qm, other=0.0)",
        "acc += ox_sum(tl.where(same_k & qm, u, 0.0), 0)",
    ]  # fmt: skip
    single, at_last = s.in_updates(w, "last")
    one = [
        f"last = ox_least(same_j & (j > last), j, j0 + {searched})", *single,
        f"acc += tl.load({w.start(s.updates)} + {at_last} + {from_updates}, mask=qm, other=0.0)",
    ]  # fmt: skip
    w.lines += [
        "earlier = 0", f"for j0 in range(0, row, {searched}):",
        *indent([*search, "earlier = tl.maximum(earlier, ox_some(same_j & (j < i)))"]),
        "if earlier == 0:",
        *indent([
            f"acc = tl.load({w.start(s.data)} + at_data + {from_data}, mask=good & qm, other=0.0)",
            f"for j0 in range(row // {searched} * {searched}, {count}, {searched}):",
            *indent([
                *search, "found = ox_count(same_j)", f"if found > {MANY}:",
                *indent([f"for k0 in range(j0, j0 + {searched}, {piece}):", *indent(some)]),
                "else:", *indent(["last = j0 - 1", "for turn in range(0, found):", *indent(one)]),
            ]),
            f"tl.store({w.start(out)} + at_out + {to_out}, acc, mask=good & qm)",
        ]),
    ]  # fmt: skip
    return w.kernel(s.rows.count * blocks, piece * width // 2)


# ---------------------------------------------------------------- places that one program has to itself


def _join(node: Node, at: str, update: str, mask: str) -> list[str]:
    """Statements that join one update with what is there. The threads of a program have seen each other's writes."""
    dtype = node.output.dtype
    return [
        "tl.debug_barrier()", f"acc = {loaded(at, mask, dtype)}", f"u = {loaded(update, mask, dtype)}",
        f"acc = {joined(node)}", f"tl.store({at}, {kept('acc', dtype)}, mask={mask})",
    ]  # fmt: skip


def joined_elements(node: Node, layout: Layout) -> Kernel:
    """The kernel that joins elements with a result that begins as the data: lines side by side, each with a part of its
    places; from step to step the first of the updates that are left.
    """
    data, index, updates = node.operands
    out, axis = node.output, node.attrs["axis"]
    n, m = out.shape[axis], index.shape[axis]
    tensors = (out, index, updates)
    strides = [layout.strides(v) for v in tensors]
    reach = Reach.of(without(index.shape, axis), *(without(s, axis) for s in strides))
    lines = min(LINES, power(reach.count)) if isinstance(reach.count, int) else LINES
    piece = min(SEEN // lines, power(m)) if isinstance(m, int) else SEEN // lines
    blocks = ceildiv(reach.count, lines)
    parts: Dim = max(1, OWNERS // max(1, blocks)) if isinstance(blocks, int) else OWNERS // LINES
    parts = maximum(1, minimum(parts, n))
    w = Writer(layout, (data, *tensors), reach.count * m)
    kind = ".to(tl.int64)" if w.wide else ""
    w.lanes("x", f"pid // {w.size(parts)} * {lines}", lines, "[:, None]")
    w.lines.append(f"xm = x < {w.size(reach.count)}")
    starts = [f"{w.start(v)} + {o}" for v, o in zip(tensors, w.spread("x", reach), strict=True)]
    steps, extent, each = [w.size(s[axis]) for s in strides], w.size(n), w.size(ceildiv(n, parts))
    report = w.aside()
    report.report_index(f"inside & ((to < 0) | (to >= {extent}))", "raw")
    w.lines += [
        f"low = pid % {w.size(parts)} * {each}", f"high = tl.minimum(low + {each}, {extent})",
        f"lane = tl.arange(0, {piece}){kind}[None, :]", f"for j0 in range(0, {w.size(m)}, {piece}):",
        *indent([
            "j = j0 + lane", f"inside = xm & (j < {w.size(m)})",
            f"raw = tl.load({starts[1]} + j * {steps[1]}, mask=inside, other=0)", f"to = ox_wrapped(raw, {extent})",
            *report.lines, "mine = inside & (to >= low) & (to < high)",
            "most = tl.max(tl.sum(mine.to(tl.int32), 1), 0)", "for turn in range(0, most):",
            *indent([
                f"first = tl.min(tl.where(mine, j, j0 + {piece}), 1)[:, None]", f"some = first < j0 + {piece}",
                "place = tl.sum(tl.where(mine & (j == first), to, 0), 1)[:, None]",
                *_join(node, f"{starts[0]} + place * {steps[0]}", f"{starts[2]} + first * {steps[2]}", "some"),
                "mine = mine & (j != first)",
            ]),
        ]),
    ]  # fmt: skip
    return w.kernel(blocks * parts, lines * piece)


def _owned_rows(node: Node, layout: Layout) -> Kernel:
    """A program for some of the places and some elements of each slice."""
    s = Slices(node, layout)
    slices, places, (_, width) = s.slice(s.out, s.updates), prod(s.places), SUMMED
    width = min(width, power(slices.count)) if isinstance(slices.count, int) else width
    parts = maximum(1, minimum(OWNERS, places))
    blocks = ceildiv(slices.count, width)
    w = Writer(layout, (s.data, s.out, s.index, s.updates), s.rows.count * slices.count)
    kind, count = ".to(tl.int64)" if w.wide else "", w.size(s.rows.count)
    w.lanes("q", f"pid % {w.size(blocks)} * {width}", width, "[None, :]")
    w.lines += [
        f"qm = q < {w.size(slices.count)}", f"low = pid // {w.size(blocks)} * {w.size(ceildiv(places, parts))}",
        f"high = low + {w.size(ceildiv(places, parts))}", f"lane = tl.arange(0, {SEARCHED}){kind}[:, None]",
    ]  # fmt: skip
    to_out, from_updates = w.spread("q", slices)
    inner = w.aside()
    s.write_places(inner)
    found, at_updates = s.in_updates(w, "last")
    apart = w.aside()
    (at_out,) = apart.offsets("place", Reach.of(s.places, layout.strides(s.out)[: s.depth]))
    to, update = f"{w.start(s.out)} + {at_out} + {to_out}", f"{w.start(s.updates)} + {at_updates} + {from_updates}"
    w.lines += [
        f"for j0 in range(0, {count}, {SEARCHED}):",
        *indent([
            "i = j0 + lane", f"im = i < {count}", *inner.lines, f"to = {s.flat(w)}",
            "mine = good & (to >= low) & (to < high)", "found = ox_count(mine)",
            f"last = ox_least(mine, i, j0 + {SEARCHED}) - 1", "for turn in range(0, found):",
            *indent([
                f"last = ox_least(mine & (i > last), i, j0 + {SEARCHED})",
                "place = tl.sum(tl.sum(tl.where(i == last, to, 0), 1), 0)", *found, *apart.lines,
                *_join(node, to, update, "qm"),
            ]),
        ]),
    ]  # fmt: skip
    return w.kernel(blocks * parts, SEARCHED)
